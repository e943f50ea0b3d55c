"""A cluster of many brokers and partitions in one process, whose answers are computed: nothing is stored.

    with SimulatedCluster(topics=5000, partitions=10, brokers=100) as cluster:
        reader = StreamReader(source_options({"kafka.bootstrap.servers": cluster.bootstrap_servers, ...}), schema)
        cluster.tell("append", every=500, records=100)  # each 500th partition gets 100 records
        cluster.tell("move", topic="t00007", partition=3, node=5)
        cluster.tell("stop", node=9)
        cluster.tell("stale", node=0, lacks="t00003")  # its metadata stay as they are, without this topic
        cluster.figures()  # requests by API, bytes, connections, since the last `forget`

Topics are `t00000`, `t00001` and so on; each partition has `records` records of 100 bytes at first, and its leader is
the sum of the topic's and its own number, modulo the brokers. A node answers as a broker that leads what the cluster
says it leads; groups, coordinators and committed offsets are those of one table. What is produced is only counted;
topics that a client creates, of one partition each, keep it. It speaks our codec: it is for how much is asked, not for
whether it is encoded right.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from uuid import UUID

from spark_klog.protocol.apis import BY_KEY
from spark_klog.protocol.codec import Message, decode_request, decode_request_header, encode_response
from spark_klog.protocol.schema import Api
from spark_klog.wire.primitives import Reader
from tests.support.brokers.batches import make_batch

HOST = "127.0.0.1"
_UNKNOWN_TOPIC, _NOT_LEADER, _OUT_OF_RANGE, _NO_SESSION = 3, 6, 1, 70
_VALUE, _NOW, _IN_BATCH = b"v" * 100, 1_700_000_000_000, 100
_MOST_BYTES = 64 << 20


def topic_name(number: int) -> str:
    return f"t{number:05}"


@cache
def _batch(count: int) -> bytes:
    """A batch of `count` records; its checksum covers neither its base offset nor its leader epoch."""
    return bytes(make_batch([(None, _VALUE)] * count, [_NOW] * count))


def records_from(offset: int, end: int, most: int, *, is_first: bool) -> bytes:
    """Batches with the records from the offset on to the end, of at most so many bytes.

    The first partition of a response gets one batch at least, whatever its size is.
    """
    first = offset - offset % _IN_BATCH
    batches = bytearray()
    while first < end:
        batch = _batch(min(_IN_BATCH, end - first))
        if (batches or not is_first) and len(batches) + len(batch) > most:
            break
        batches += struct.pack(">qii", first, len(batch) - 12, 0) + batch[16:]
        first += _IN_BATCH
    return bytes(batches)


def _batches(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The batches of a Produce request, each with the number of its offsets."""
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from(">i", data, at + 8)
        (last,) = struct.unpack_from(">i", data, at + 23)
        yield last + 1, data[at : at + 12 + length]
        at += 12 + length


@dataclass
class _Session:
    """A fetch session (KIP-227): what is asked of each partition of a topic by its name and id, offset and bytes."""

    number: int
    wanted: dict[tuple[str | None, UUID | None], dict[int, tuple[int, int]]] = field(default_factory=dict)
    #: What the session has got by this request: each of these is in the answer, whether it has news or not.
    added: set[tuple[str | None, UUID | None, int]] = field(default_factory=set)

    def take(self, asked: Message) -> None:
        self.added.clear()
        for topic in asked["topics"]:
            key = topic.get("topic"), topic.get("topic_id")
            partitions = self.wanted.setdefault(key, {})
            for wanted in topic["partitions"]:
                if wanted["partition"] not in partitions:
                    self.added.add((*key, wanted["partition"]))
                partitions[wanted["partition"]] = wanted["fetch_offset"], wanted["partition_max_bytes"]
        for topic in asked.get("forgotten_topics_data") or ():
            partitions = self.wanted.get((topic.get("topic"), topic.get("topic_id")), {})
            for partition in topic["partitions"]:
                partitions.pop(partition, None)


@dataclass
class _Group:
    """A group of KIP-848: the epoch that each member has, and the topics."""

    epoch: int = 0
    members: dict[str, int] = field(default_factory=dict)
    topics: list[int] = field(default_factory=list)


@dataclass
class _Node:
    number: int
    server: asyncio.Server | None = None
    port: int = 0
    #: The port that metadata tell; 0: `port`.
    advertised: int = 0
    seconds: float = 0.0
    throttle_ms: int = 0
    #: The APIs whose answers are late; all if there is none.
    late: tuple[str, ...] = ()
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    sessions: dict[int, _Session] = field(default_factory=dict)


class Simulation:
    """The brokers, in the process that runs them."""

    def __init__(self, topics: int, partitions: int, brokers: int, records: int) -> None:
        self.topics, self.partitions = topics, partitions
        self.nodes = [_Node(number) for number in range(brokers)]
        self.base = records
        self._more: dict[tuple[int, int], int] = {}
        self._moved: dict[tuple[int, int], int] = {}
        self._epochs: Counter[tuple[int, int]] = Counter()
        #: Of nodes whose metadata are old: the leaders and epochs that they tell, and a topic that they do not know.
        self._stale: dict[int, tuple[dict[tuple[int, int], int], Counter[tuple[int, int]], int | None]] = {}
        #: The error code that leaders answer with.
        self._refusal = 0
        self._committed: dict[str, dict[tuple[str, int], int]] = {}
        self._groups: dict[str, _Group] = {}
        self._sessions = itertools.count(1)
        self._producers = itertools.count(1)
        #: The batches of each topic that was created, with their first offsets and those after them.
        self._created: dict[str, list[tuple[int, int, bytes]]] = {}
        #: Set when something has changed that a waiting fetch may have to tell; then there is another one.
        self._news = asyncio.Event()
        self._all_topics: dict[int, bytes] = {}
        self.requests: Counter[str] = Counter()
        self.by_node: Counter[int] = Counter()
        #: Metadata requests by node.
        self.metadata_by: Counter[int] = Counter()
        self.asked_partitions: Counter[str] = Counter()
        self.received = self.sent = self.opened = 0

    async def start(self) -> None:
        for node in self.nodes:
            await self._listen(node)

    async def _listen(self, node: _Node) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            node.writers.add(writer)
            self.opened += 1
            try:
                while True:
                    (size,) = struct.unpack(">i", await reader.readexactly(4))
                    await self._answer(node, await reader.readexactly(size), writer)
            except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
                pass  # the connection or the simulation has ended
            finally:
                node.writers.discard(writer)
                writer.close()

        node.server = await asyncio.start_server(serve, HOST, node.port, limit=1 << 24, backlog=1024)
        node.port = node.server.sockets[0].getsockname()[1]

    async def _answer(self, node: _Node, frame: bytes, writer: asyncio.StreamWriter) -> None:
        self.received += len(frame) + 4
        reader = Reader(frame)
        key, version, correlation_id = decode_request_header(reader)
        api = BY_KEY[key]
        _, message = decode_request(api, version, reader)
        self.requests[api.name] += 1
        self.by_node[node.number] += 1
        self.metadata_by[node.number] += api.name == "Metadata"
        if node.seconds and (not node.late or api.name in node.late):
            await asyncio.sleep(node.seconds)
        if api.name == "Metadata" and message["topics"] is None and node.number not in self._stale:
            data = struct.pack(">i", correlation_id) + self._all(api, version)
        else:
            handler: Callable[[_Node, int, Message], Any] = getattr(self, f"_on_{api.name}")
            answer = await handler(node, version, message)
            data = bytes(
                encode_response(
                    api, version, correlation_id, {"throttle_time_ms": node.throttle_ms, **answer}
                ).to_bytes()
            )
        self.sent += len(data) + 4
        writer.write(struct.pack(">i", len(data)) + data)
        await writer.drain()

    # -- what is asked ---------------------------------------------------------------------------------------------

    async def _on_ApiVersions(self, node: _Node, version: int, asked: Message) -> Message:
        names = {item[len("_on_") :] for item in dir(self) if item.startswith("_on_")}
        there = [api for api in BY_KEY.values() if api.name in names]
        keys = [
            {"api_key": api.key, "min_version": api.versions.first, "max_version": api.versions.last} for api in there
        ]
        return {"error_code": 0, "api_keys": keys}

    async def _on_Metadata(self, node: _Node, version: int, asked: Message) -> Message:
        if asked["topics"]:
            self.asked_partitions["Metadata"] += self.partitions * len(asked["topics"])
        newest = self._moved, self._epochs
        self._moved, self._epochs, lacked = self._stale.get(node.number, (*newest, None))
        try:
            if asked["topics"] is None:
                return self._metadata([each for each in range(self.topics) if each != lacked], None)
            numbers = [self._number(topic) for topic in asked["topics"]]
            return self._metadata([None if each == lacked else each for each in numbers], asked["topics"])
        finally:
            self._moved, self._epochs = newest

    def _all(self, api: Api, version: int) -> bytes:
        """Metadata of all topics, without the correlation id: encoded again only when something has changed."""
        if version not in self._all_topics:
            everything = list(range(self.topics + len(self._created)))
            message = {"throttle_time_ms": 0, **self._metadata(everything, None)}
            self._all_topics[version] = encode_response(api, version, 0, message).to_bytes()[4:]
        return self._all_topics[version]

    def _metadata(self, numbers: list[int | None], asked: list[Message] | None) -> Message:
        live = [node for node in self.nodes if node.server is not None]
        brokers = [{"node_id": node.number, "host": HOST, "port": node.advertised or node.port} for node in live]
        topics = []
        for place, number in enumerate(numbers):
            if number is None:
                name = asked[place]["name"] if asked else None
                topics.append({"error_code": _UNKNOWN_TOPIC, "name": name, "topic_id": UUID(int=0), "partitions": []})
                continue
            entries = [self._partition(number, partition) for partition in self._numbers(number)]
            topic_id = UUID(int=number + 1)
            topics.append({"error_code": 0, "name": self._name(number), "topic_id": topic_id, "partitions": entries})
        controller = live[0].number if live else -1
        return {
            "brokers": brokers,
            "controller_id": controller,
            "cluster_id": f"simulated-{self.nodes[0].port}",
            "topics": topics,
            "error_code": 0,
        }

    def _partition(self, topic: int, partition: int) -> Message:
        leader = self._leader(topic, partition)
        is_there = self.nodes[leader].server is not None
        return {
            "error_code": 0 if is_there else 5,
            "partition_index": partition,
            "leader_id": leader if is_there else -1,
            "leader_epoch": self._epochs[topic, partition],
            "replica_nodes": [leader],
            "isr_nodes": [leader],
            "offline_replicas": [],
        }

    def _leader(self, topic: int, partition: int) -> int:
        return self._moved.get((topic, partition), (topic + partition) % len(self.nodes))

    def _number(self, topic: Message) -> int | None:
        """The number of a topic that a request names, by name or id; None if there is none."""
        if topic.get("topic_id") and topic["topic_id"].int:
            number = topic["topic_id"].int - 1
        else:
            name = topic.get("name") or topic.get("topic") or ""
            number = int(name[1:]) if name.startswith("t") and name[1:].isdigit() else -1
            if name in self._created:
                number = self.topics + list(self._created).index(name)
        return number if 0 <= number < self.topics + len(self._created) else None

    def _name(self, number: int) -> str:
        return topic_name(number) if number < self.topics else list(self._created)[number - self.topics]

    def _numbers(self, topic: int) -> range:
        return range(self.partitions if topic < self.topics else 1)

    def _end(self, key: tuple[int, int]) -> int:
        return (self.base if key[0] < self.topics else 0) + self._more.get(key, 0)

    def _code(self, node: _Node, topic: int | None, partition: int) -> int:
        if topic is None or partition not in self._numbers(topic):
            return _UNKNOWN_TOPIC
        return self._refusal if self._leader(topic, partition) == node.number else _NOT_LEADER

    async def _on_ListOffsets(self, node: _Node, version: int, asked: Message) -> Message:
        topics = []
        for topic in asked["topics"]:
            number, entries = self._number(topic), []
            for wanted in topic["partitions"]:
                self.asked_partitions["ListOffsets"] += 1
                partition, time_ms = wanted["partition_index"], wanted["timestamp"]
                code = self._code(node, number, partition)
                is_end = time_ms == -1 or time_ms > _NOW
                offset = -1 if code else self._end((number, partition)) if is_end else 0
                entries.append({"partition_index": partition, "error_code": code, "offset": offset, "leader_epoch": 0})
            topics.append({"name": topic["name"], "partitions": entries})
        return {"topics": topics}

    async def _on_Fetch(self, node: _Node, version: int, asked: Message) -> Message:
        deadline = asyncio.get_running_loop().time() + asked["max_wait_ms"] / 1000
        is_incremental = asked.get("session_epoch", -1) > 0
        if is_incremental:
            session = node.sessions.get(asked["session_id"])
            if session is None:
                return {"error_code": _NO_SESSION, "session_id": 0, "responses": []}
        else:
            node.sessions.pop(asked.get("session_id", 0), None)
            session = _Session(0)
            if asked.get("session_epoch", -1) == 0:
                session.number = next(self._sessions)
                node.sessions[session.number] = session
        session.take(asked)
        while True:
            news = self._news
            topics, total = self._fetched(node, session, asked["max_bytes"], is_incremental=is_incremental)
            late = deadline - asyncio.get_running_loop().time()
            if total or late <= 0:
                self.asked_partitions["Fetch"] += sum(len(topic["partitions"]) for topic in asked["topics"])
                return {"error_code": 0, "session_id": session.number, "responses": topics}
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(news.wait(), late)

    def _fetched(
        self, node: _Node, session: _Session, most_bytes: int, *, is_incremental: bool
    ) -> tuple[list[Message], int]:
        """The topics of an answer, and how much of it is to be told at once: bytes, and errors."""
        total, left = 0, min(most_bytes, _MOST_BYTES)
        topics = []
        for (name, topic_id), partitions in session.wanted.items():
            number, entries = self._number({"topic": name, "topic_id": topic_id}), []
            for partition, (offset, most) in partitions.items():
                code, data, end = self._code(node, number, partition), b"", -1
                if not code:
                    assert number is not None
                    end = self._end((number, partition))
                    code = 0 if 0 <= offset <= end else _OUT_OF_RANGE
                if not code and left > 0 and offset < end:
                    if number < self.topics:
                        data = records_from(offset, end, min(left, most), is_first=not total)
                    else:
                        data = b"".join(part for _, after, part in self._created[self._name(number)] if after > offset)
                if is_incremental and not code and not data and (name, topic_id, partition) not in session.added:
                    continue
                total, left = total + len(data) + bool(code), left - len(data)
                watermarks = {"high_watermark": end, "last_stable_offset": end, "log_start_offset": 0}
                entries.append({"partition_index": partition, "error_code": code, **watermarks, "records": data})
            if entries:
                topics.append({"topic": name, "topic_id": topic_id, "partitions": entries})
        return topics, total

    async def _on_InitProducerId(self, node: _Node, version: int, asked: Message) -> Message:
        return {"error_code": 0, "producer_id": next(self._producers), "producer_epoch": 0}

    async def _on_CreateTopics(self, node: _Node, version: int, asked: Message) -> Message:
        for topic in asked["topics"]:
            self._created.setdefault(topic["name"], [])
        self._all_topics.clear()
        return {"topics": [{"name": topic["name"], "error_code": 0} for topic in asked["topics"]]}

    async def _on_Produce(self, node: _Node, version: int, asked: Message) -> Message:
        topics = []
        for topic in asked["topic_data"]:
            number, entries = self._number(topic), []
            for wanted in topic["partition_data"]:
                self.asked_partitions["Produce"] += 1
                partition = wanted["index"]
                code, base = self._code(node, number, partition), -1
                if not code:
                    assert number is not None
                    key = number, partition
                    base = self._end(key)
                    for count, batch in _batches(bytes(wanted["records"])):
                        if number >= self.topics:
                            first = self._end(key)
                            entry = first, first + count, struct.pack(">q", first) + batch[8:]
                            self._created[self._name(number)].append(entry)
                        self._more[key] = self._more.get(key, 0) + count
                entries.append({"index": partition, "error_code": code, "base_offset": base})
            names = {"name": topic.get("name"), "topic_id": topic.get("topic_id")}
            topics.append({**names, "partition_responses": entries})
        self._tell_news()
        return {"responses": topics}

    async def _on_OffsetForLeaderEpoch(self, node: _Node, version: int, asked: Message) -> Message:
        topics = []
        for topic in asked["topics"]:
            number, entries = self._number(topic), []
            for wanted in topic["partitions"]:
                partition = wanted["partition"]
                code = self._code(node, number, partition)
                end = -1 if code else self._end((number, partition))
                entry = {"partition": partition, "error_code": code, "end_offset": end}
                entries.append({**entry, "leader_epoch": wanted["leader_epoch"]})
            topics.append({"topic": topic["topic"], "partitions": entries})
        return {"topics": topics}

    async def _on_ConsumerGroupHeartbeat(self, node: _Node, version: int, asked: Message) -> Message:
        """Members of a group share all partitions of the topics that the first has named; each change is an epoch."""
        group = self._groups.setdefault(asked["group_id"], _Group())
        member, epoch = asked["member_id"], asked["member_epoch"]
        answer = {"error_code": 0, "error_message": None, "member_id": member, "heartbeat_interval_ms": 1000}
        named = sum(len(topic["partitions"]) for topic in asked["topic_partitions"] or ())
        self.asked_partitions["ConsumerGroupHeartbeat"] += named
        if epoch < 0:
            group.members.pop(member, None)
            group.epoch += 1
            return {**answer, "member_epoch": epoch, "assignment": None}
        if epoch == 0:
            group.epoch += member not in group.members
            group.members.setdefault(member, 0)
            names = asked["subscribed_topic_names"] or []
            group.topics = [n for n in (self._number({"name": name}) for name in names) if n is not None]
            if asked.get("subscribed_topic_regex"):
                group.topics = list(range(self.topics))
        is_told, group.members[member] = group.members[member] == group.epoch and epoch > 0, group.epoch
        answer["member_epoch"] = group.epoch
        if is_told:
            return {**answer, "assignment": None}
        place, count = list(group.members).index(member), len(group.members)
        shares = [
            {
                "topic_id": UUID(int=number + 1),
                "partitions": [each for each in range(self.partitions) if (number + each) % count == place],
            }
            for number in group.topics
        ]
        return {**answer, "assignment": {"topic_partitions": [share for share in shares if share["partitions"]]}}

    async def _on_DescribeLogDirs(self, node: _Node, version: int, asked: Message) -> Message:
        topics = []
        wanted = {number: range(self.partitions) for number in range(self.topics)}
        if asked["topics"] is not None:
            wanted = {self._number({"name": topic["topic"]}): topic["partitions"] for topic in asked["topics"]}
        for number, partitions in wanted.items():
            self.asked_partitions["DescribeLogDirs"] += len(partitions)
            led = [each for each in partitions if self._leader(number, each) == node.number]
            replica = {"partition_size": 1000, "offset_lag": 0, "is_future_key": False}
            if led:
                entries = [{"partition_index": each, **replica} for each in led]
                topics.append({"name": topic_name(number), "partitions": entries})
        return {"error_code": 0, "results": [{"error_code": 0, "log_dir": "/simulated", "topics": topics}]}

    async def _on_FindCoordinator(self, node: _Node, version: int, asked: Message) -> Message:
        live = [item for item in self.nodes if item.server is not None]

        def of(name: str) -> Message:
            there = live[sum(name.encode()) % len(live)]
            return {"node_id": there.number, "host": HOST, "port": there.port, "error_code": 0, "error_message": None}

        if "coordinator_keys" in asked:
            return {"coordinators": [{"key": key, **of(key)} for key in asked["coordinator_keys"]]}
        return of(asked["key"])

    async def _on_OffsetCommit(self, node: _Node, version: int, asked: Message) -> Message:
        there = self._committed.setdefault(asked["group_id"], {})
        topics = []
        for topic in asked["topics"]:
            number = self._number(topic)
            for entry in topic["partitions"]:
                self.asked_partitions["OffsetCommit"] += 1
                if number is not None:
                    there[topic_name(number), entry["partition_index"]] = entry["committed_offset"]
            code = _UNKNOWN_TOPIC if number is None else 0
            entries = [
                {"partition_index": entry["partition_index"], "error_code": code} for entry in topic["partitions"]
            ]
            topics.append({"name": topic.get("name"), "topic_id": topic.get("topic_id"), "partitions": entries})
        return {"topics": topics}

    async def _on_OffsetFetch(self, node: _Node, version: int, asked: Message) -> Message:
        def of(group: Message) -> Message:
            there = self._committed.get(group["group_id"], {})
            if group["topics"] is None:
                keys = sorted(there)
            else:
                keys = [
                    (topic_name(number), partition)
                    for topic in group["topics"]
                    if (number := self._number(topic)) is not None
                    for partition in topic["partition_indexes"]
                ]
            topics: dict[str, list[Message]] = {}
            for name, partition in keys:
                entry = {"partition_index": partition, "committed_offset": there.get((name, partition), -1)}
                topics.setdefault(name, []).append({**entry, "metadata": "", "error_code": 0})
            self.asked_partitions["OffsetFetch"] += len(keys)
            return {
                "error_code": 0,
                "topics": [
                    {"name": name, "topic_id": UUID(int=int(name[1:]) + 1), "partitions": entries}
                    for name, entries in topics.items()
                ],
            }

        if "groups" in asked:
            return {"groups": [{"group_id": group["group_id"], **of(group)} for group in asked["groups"]]}
        return of(asked)

    async def _on_ListGroups(self, node: _Node, version: int, asked: Message) -> Message:
        live = [item.number for item in self.nodes if item.server is not None]
        groups = [name for name in self._committed if live[sum(name.encode()) % len(live)] == node.number]
        entries = [
            {"group_id": name, "protocol_type": "consumer", "group_state": "Empty", "group_type": "classic"}
            for name in groups
        ]
        return {"error_code": 0, "groups": entries}

    async def _on_DescribeGroups(self, node: _Node, version: int, asked: Message) -> Message:
        entry = {"error_code": 0, "protocol_type": "consumer", "protocol_data": "", "members": []}
        states = {name: "Empty" if name in self._committed else "Dead" for name in asked["groups"]}
        return {"groups": [{"group_id": name, "group_state": state, **entry} for name, state in states.items()]}

    # -- what the test tells ---------------------------------------------------------------------------------------

    async def tell_append(self, every: int, records: int) -> None:
        """Give each partition whose place, over all topics, is a multiple of `every` more records."""
        for place in range(0, self.topics * self.partitions, every):
            key = divmod(place, self.partitions)
            self._more[key] = self._more.get(key, 0) + records
        self._tell_news()

    def _tell_news(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def tell_move(self, topic: str, partition: int, node: int) -> None:
        key = int(topic[1:]), partition
        self._moved[key] = node
        self._epochs[key] += 1
        self._all_topics.clear()
        self._tell_news()

    async def tell_refuse(self, code: int) -> None:
        self._refusal = code
        self._tell_news()

    async def tell_advertise(self, node: int, port: int) -> None:
        self.nodes[node].advertised = port
        self._all_topics.clear()

    async def tell_stale(self, node: int, lacks: str = "") -> None:
        """From now on the node's metadata do not change, and lack this topic."""
        self._stale[node] = dict(self._moved), Counter(self._epochs), self._number({"name": lacks}) if lacks else None

    async def tell_stop(self, node: int) -> None:
        """Stop a broker: its partitions have no leader until it starts."""
        there = self.nodes[node]
        assert there.server is not None
        there.server.close()
        there.server = None
        there.sessions.clear()
        for writer in list(there.writers):
            writer.transport.abort()
        self._all_topics.clear()

    async def tell_start(self, node: int) -> None:
        await self._listen(self.nodes[node])
        self._all_topics.clear()

    async def tell_slow(self, node: int, seconds: float = 0.0, throttle_ms: int = 0, apis: Sequence[str] = ()) -> None:
        """From now on the node answers so late (these APIs, or all), and says so much throttling; -1 for all nodes."""
        for there in self.nodes if node < 0 else [self.nodes[node]]:
            there.seconds, there.throttle_ms, there.late = seconds, throttle_ms, tuple(apis)

    async def tell_forget(self) -> None:
        """Begin counting anew; connections that are open stay counted as open only."""
        for counter in (self.requests, self.by_node, self.metadata_by, self.asked_partitions):
            counter.clear()
        self.received = self.sent = self.opened = 0

    async def tell_figures(self) -> dict[str, Any]:
        return {
            "requests": dict(self.requests),
            "partitions": dict(self.asked_partitions),
            "nodes": len(self.by_node),
            "by_node": dict(self.by_node),
            "metadata_by": dict(self.metadata_by),
            "most_of_a_node": max(self.by_node.values(), default=0),
            "received": self.received,
            "sent": self.sent,
            "opened": self.opened,
            "open": sum(len(node.writers) for node in self.nodes),
        }

    async def tell_committed(self, group: str) -> int:
        return len(self._committed.get(group, {}))


class SimulatedCluster:
    """The simulation in a process of its own, so that what is measured in this one is the client's."""

    def __init__(self, topics: int, partitions: int, brokers: int, records: int = 0) -> None:
        self.topics, self.partitions, self.brokers = topics, partitions, brokers
        arguments = [str(number) for number in (topics, partitions, brokers, records)]
        command = [sys.executable, "-m", __name__, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ports: list[int] = self._answer()

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"{HOST}:{port}" for port in self.ports[:3])

    def tell(self, what: str, **arguments: Any) -> Any:
        """Have the simulation do what its method `tell_...` does; returns what that returns."""
        assert self._process.stdin is not None
        print(json.dumps([what, arguments]), file=self._process.stdin, flush=True)
        return self._answer()

    def figures(self) -> Mapping[str, Any]:
        figures: Mapping[str, Any] = self.tell("figures")
        return figures

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the simulated cluster has ended"
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def __enter__(self) -> SimulatedCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tell(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def _run(topics: int, partitions: int, brokers: int, records: int) -> None:
    simulation = Simulation(topics, partitions, brokers, records)
    await simulation.start()
    _tell([node.port for node in simulation.nodes])
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        what, arguments = json.loads(line)
        _tell(await getattr(simulation, f"tell_{what}")(**arguments))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run a simulated cluster until standard input ends.")
    for name in ("topics", "partitions", "brokers", "records"):
        parser.add_argument(name, type=int)
    asyncio.run(_run(**vars(parser.parse_args())))
