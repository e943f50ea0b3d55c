"""Correct brokers in memory, to which scripted brokers add faults: their state, and a handler for each API."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.support.brokers.idempotence import Numbers, Producers
from tests.support.brokers.kafka_python_wire import Message, Request, known_versions
from tests.support.servers.kafka import HOST

TopicPartition = tuple[str, int]
UNKNOWN_TOPIC_OR_PARTITION, NO_LEADER, NOT_LEADER, NOT_COORDINATOR, TOPIC_EXISTS = 3, 5, 6, 16, 36
FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH = 74, 75
INVALID_PARTITIONS, NOT_CONTROLLER, INVALID_TXN_STATE = 37, 41, 48
NOW = 1_700_000_000_000


@dataclass
class _Log:
    """Batches of magic 2 with their first offsets, and what is known of producers."""

    start: int = 0
    end: int = 0
    batches: list[tuple[int, bytes]] = field(default_factory=list)
    producers: Producers = field(default_factory=Producers)
    #: The leader epoch; -1 before the first `elect`.
    epoch: int = -1

    def elect(self, end: int) -> None:
        """Begin the next leader epoch, and truncate to `end`, the first offset of a batch or the end offset."""
        self.epoch += 1
        self.batches = [item for item in self.batches if item[0] < end]
        self.end = end

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """The last epoch up to this one that has records, and its end offset."""
        found = -1, self.start
        for number, (_, batch) in enumerate(self.batches):
            (there,) = struct.unpack_from(">i", batch, 12)
            if there <= epoch:
                found = there, self.batches[number + 1][0] if number + 1 < len(self.batches) else self.end
        return found

    def append(self, batch: bytes) -> int:
        """Append one batch of magic 2; return its first offset."""
        base = self.end
        if self.epoch >= 0:
            batch = batch[:12] + struct.pack(">i", self.epoch) + batch[16:]
        (last_delta,) = struct.unpack_from(">i", batch, 23)
        self.batches.append((base, struct.pack(">q", base) + batch[8:]))
        self.end = base + last_delta + 1
        return base


class SoundBrokers:
    """Brokers 0 to `len(ports)` - 1. `versions` has (first, last) supported version by API name."""

    def __init__(
        self, topics: Mapping[str, int], ports: list[int], versions: Mapping[str, tuple[int, int]] | None = None
    ) -> None:
        self.ports = ports
        self.logs = {(name, number): _Log() for name, count in topics.items() for number in range(count)}
        self.leaders = {key: key[1] % len(ports) for key in self.logs}
        self.coordinator = self.controller = len(ports) - 1
        self.offsets: dict[str, dict[TopicPartition, int]] = {}
        self.configs: dict[str, dict[str, str]] = {}
        #: Error codes in Metadata, by topic or (topic, partition).
        self.metadata_errors: dict[str | TopicPartition, int] = {}
        self._versions = versions or {}
        #: APIs that ApiVersions leaves out.
        self.hidden: set[str] = set()
        self._next_producer_id = 1000
        #: Partitions added to the open transaction, by producer id.
        self.added: dict[int, set[TopicPartition]] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stopping = threading.Event()

    def _handle(self, node: int, request: Request, is_applied: bool) -> Message | None:
        handler: Callable[[int, Message, bool], Message | None] = getattr(self, f"_on_{request.name}")
        if request.name == "Fetch":
            return handler(node, request.message, is_applied)  # it waits, and takes the lock itself
        with self._changed:
            answer = handler(node, request.message, is_applied)
            self._changed.notify_all()
        return answer

    def _leader_error(self, node: int, key: TopicPartition) -> int:
        if key not in self.logs:
            return UNKNOWN_TOPIC_OR_PARTITION
        return 0 if self.leaders[key] == node else NOT_LEADER

    def _epoch_error(self, key: TopicPartition, wanted: Message) -> int:
        asked, epoch = wanted.get("current_leader_epoch", -1), self.logs[key].epoch
        if -1 in (asked, epoch) or asked == epoch:
            return 0
        return FENCED_LEADER_EPOCH if asked < epoch else UNKNOWN_LEADER_EPOCH

    def _on_OffsetForLeaderEpoch(self, node: int, asked: Message, is_applied: bool) -> Message:
        def entry(topic: str, wanted: Message) -> Message:
            key = topic, wanted["partition"]
            code = self._leader_error(node, key) or self._epoch_error(key, wanted)
            epoch, end = (-1, -1) if code else self.logs[key].end_of_epoch(wanted["leader_epoch"])
            return {"partition": key[1], "error_code": code, "leader_epoch": epoch, "end_offset": end}

        return {"topics": _each(asked["topics"], "topic", "partitions", entry)}

    def _on_ApiVersions(self, node: int, asked: Message, is_applied: bool) -> Message:
        keys = []
        names = (item[len("_on_") :] for item in dir(self) if item.startswith("_on_"))
        for name in (name for name in names if name not in self.hidden):
            key, first, last = known_versions(name)
            first, last = self._versions.get(name, (first, last))
            keys.append({"api_key": key, "min_version": first, "max_version": last})
        return {"error_code": 0, "api_keys": keys}

    def _on_Metadata(self, node: int, asked: Message, is_applied: bool) -> Message:
        known = sorted({topic for topic, _ in self.logs})
        names = known if asked["topics"] is None else [topic["name"] for topic in asked["topics"]]
        topics = [
            {
                "error_code": self.metadata_errors.get(name, 0 if name in known else UNKNOWN_TOPIC_OR_PARTITION),
                "name": name,
                "partitions": [
                    {
                        "error_code": self.metadata_errors.get(key, 0 if leader >= 0 else NO_LEADER),
                        "partition_index": key[1],
                        "leader_id": leader,
                        "leader_epoch": self.logs[key].epoch,
                        "replica_nodes": [max(0, leader)],
                        "isr_nodes": [max(0, leader)],
                    }
                    for key, leader in sorted(self.leaders.items())
                    if key[0] == name
                ],
            }
            for name in names
        ]
        brokers = [{"node_id": number, "host": HOST, "port": port} for number, port in enumerate(self.ports)]
        return {"brokers": brokers, "controller_id": self.controller, "topics": topics}

    def _on_ListOffsets(self, node: int, asked: Message, is_applied: bool) -> Message:
        def entry(topic: str, wanted: Message) -> Message:
            key = topic, wanted["partition_index"]
            code = self._leader_error(node, key)
            if code:
                return {"partition_index": key[1], "error_code": code}
            log, time_ms = self.logs[key], wanted["timestamp"]
            offset = {-1: log.end, -2: log.start}.get(time_ms, log.start if time_ms <= NOW else -1)
            return {"partition_index": key[1], "error_code": 0, "timestamp": -1, "offset": offset}

        return {"topics": _each(asked["topics"], "name", "partitions", entry)}

    def _on_Fetch(self, node: int, asked: Message, is_applied: bool) -> Message:
        deadline = time.monotonic() + asked["max_wait_ms"] / 1000

        def entry(topic: str, wanted: Message) -> Message:
            key, offset = (topic, wanted["partition"]), wanted["fetch_offset"]
            answer: Message = {"partition_index": key[1], "error_code": self._leader_error(node, key)}
            if not answer["error_code"]:
                answer["error_code"] = self._epoch_error(key, wanted)
            if answer["error_code"]:
                return answer | {"high_watermark": -1, "records": b""}
            log = self.logs[key]
            if not log.start <= offset <= log.end:
                return answer | {"error_code": 1, "high_watermark": -1, "records": b""}
            data = b""
            for number, (_, batch) in enumerate(log.batches):
                following = log.batches[number + 1][0] if number + 1 < len(log.batches) else log.end
                if data and len(data) + len(batch) > wanted["partition_max_bytes"]:
                    break
                if following > offset:
                    data += batch
            return answer | {"high_watermark": log.end, "last_stable_offset": log.end, "records": data}

        with self._changed:
            while True:
                responses = _each(asked["topics"], "topic", "partitions", entry)
                entries = [item for topic in responses for item in topic["partitions"]]
                left = deadline - time.monotonic()
                if any(item["records"] or item["error_code"] for item in entries) or left <= 0:
                    return {"error_code": 0, "responses": responses}
                if self._stopping.is_set():
                    return {"error_code": 0, "responses": []}
                self._changed.wait(left)

    def _on_Produce(self, node: int, asked: Message, is_applied: bool) -> Message | None:
        def entry(topic: str, wanted: Message) -> Message:
            key = topic, wanted["index"]
            answer: Message = {"index": key[1], "error_code": self._leader_error(node, key), "base_offset": -1}
            if not answer["error_code"] and not self._may_append(key, wanted["records"]):
                answer["error_code"] = INVALID_TXN_STATE
            if not answer["error_code"] and is_applied:
                code, base = _append(self.logs[key], wanted["records"])
                answer |= {"error_code": code, "base_offset": base}
            return answer

        responses = _each(asked["topic_data"], "name", "partition_data", entry, "partition_responses")
        return {"responses": responses} if asked["acks"] else None

    def _on_InitProducerId(self, node: int, asked: Message, is_applied: bool) -> Message:
        self._next_producer_id += 1
        return {"error_code": 0, "producer_id": self._next_producer_id, "producer_epoch": 0}

    def _may_append(self, key: TopicPartition, batch: bytes) -> bool:
        """Whether a batch is not transactional, or its partition was added to the transaction (KIP-890)."""
        (attributes,) = struct.unpack_from(">h", batch, 21)
        (producer_id,) = struct.unpack_from(">q", batch, 43)
        return not attributes & 0x10 or key in self.added.get(producer_id, ())

    def _on_AddPartitionsToTxn(self, node: int, asked: Message, is_applied: bool) -> Message:
        code = 0 if node == self.coordinator else NOT_COORDINATOR

        def entry(topic: str, number: int) -> Message:
            if not code and is_applied:
                self.added.setdefault(asked["v3_and_below_producer_id"], set()).add((topic, number))
            return {"partition_index": number, "partition_error_code": code}

        topics = asked["v3_and_below_topics"]
        results = _each(topics, "name", "partitions", entry, "results_by_partition")
        return {"results_by_topic_v3_and_below": results}

    def _on_EndTxn(self, node: int, asked: Message, is_applied: bool) -> Message:
        if is_applied and node == self.coordinator:
            self.added.pop(asked["producer_id"], None)
        return {"error_code": 0 if node == self.coordinator else NOT_COORDINATOR}

    def _on_FindCoordinator(self, node: int, asked: Message, is_applied: bool) -> Message:
        found = {"node_id": self.coordinator, "host": HOST, "port": self.ports[self.coordinator], "error_code": 0}
        if "coordinator_keys" in asked:
            return {"coordinators": [{"key": key, **found} for key in asked["coordinator_keys"]]}
        return found

    def _on_OffsetCommit(self, node: int, asked: Message, is_applied: bool) -> Message:
        code = 0 if node == self.coordinator else NOT_COORDINATOR

        def entry(topic: str, wanted: Message) -> Message:
            if not code and is_applied:
                offsets = self.offsets.setdefault(asked["group_id"], {})
                offsets[topic, wanted["partition_index"]] = wanted["committed_offset"]
            return {"partition_index": wanted["partition_index"], "error_code": code}

        return {"topics": _each(asked["topics"], "name", "partitions", entry)}

    def _on_OffsetFetch(self, node: int, asked: Message, is_applied: bool) -> Message:
        code = 0 if node == self.coordinator else NOT_COORDINATOR

        def group(wanted: Message) -> Message:
            there = {} if code else self.offsets.get(wanted["group_id"], {})
            topics = wanted["topics"]
            keys = (
                sorted(there)
                if topics is None
                else [(topic["name"], number) for topic in topics for number in topic["partition_indexes"]]
            )
            entries: dict[str, list[Message]] = {}
            for topic, number in keys:
                offset = there.get((topic, number), -1)
                found = {"partition_index": number, "committed_offset": offset, "metadata": "", "error_code": 0}
                entries.setdefault(topic, []).append(found)
            return {
                "error_code": code,
                "topics": [{"name": topic, "partitions": found} for topic, found in entries.items()],
            }

        if "groups" in asked:
            return {"groups": [{"group_id": item["group_id"], **group(item)} for item in asked["groups"]]}
        return group(asked)

    def _on_ListGroups(self, node: int, asked: Message, is_applied: bool) -> Message:
        groups = self.offsets if node == self.coordinator else ()
        entries = [{"group_id": name, "protocol_type": "consumer", "group_state": "Empty"} for name in groups]
        return {"error_code": 0, "groups": entries}

    def _on_DescribeGroups(self, node: int, asked: Message, is_applied: bool) -> Message:
        code = 0 if node == self.coordinator else NOT_COORDINATOR
        return {
            "groups": [
                {
                    "error_code": code,
                    "group_id": name,
                    "group_state": "Empty" if name in self.offsets else "Dead",
                    "protocol_type": "consumer",
                    "protocol_data": "",
                    "members": [],
                }
                for name in asked["groups"]
            ]
        }

    def _on_CreateTopics(self, node: int, asked: Message, is_applied: bool) -> Message:
        def create(topic: Message) -> int:
            if node != self.controller:
                return NOT_CONTROLLER
            if (topic["name"], 0) in self.logs:
                return TOPIC_EXISTS
            if is_applied:
                self._add(topic["name"], topic["num_partitions"])
            return 0

        return {
            "topics": [
                {"name": topic["name"], "error_code": create(topic), "error_message": None} for topic in asked["topics"]
            ]
        }

    def _add(self, name: str, count: int) -> None:
        for number in range(count):
            self.logs.setdefault((name, number), _Log())
            self.leaders.setdefault((name, number), number % len(self.ports))

    def _on_DeleteTopics(self, node: int, asked: Message, is_applied: bool) -> Message:
        def delete(name: str) -> int:
            if node != self.controller:
                return NOT_CONTROLLER
            keys = [key for key in self.logs if key[0] == name]
            for key in keys if is_applied else ():
                del self.logs[key], self.leaders[key]
            return 0 if keys else UNKNOWN_TOPIC_OR_PARTITION

        names = [topic["name"] for topic in asked["topics"]] if "topics" in asked else asked["topic_names"]
        return {"responses": [{"name": name, "error_code": delete(name)} for name in names]}

    def _on_CreatePartitions(self, node: int, asked: Message, is_applied: bool) -> Message:
        def grow(name: str, count: int) -> int:
            if node != self.controller:
                return NOT_CONTROLLER
            if sum(key[0] == name for key in self.logs) >= count:
                return INVALID_PARTITIONS
            if is_applied:
                self._add(name, count)
            return 0

        results = [
            {"name": topic["name"], "error_code": grow(topic["name"], topic["count"]), "error_message": None}
            for topic in asked["topics"]
        ]
        return {"results": results}

    def _on_DescribeConfigs(self, node: int, asked: Message, is_applied: bool) -> Message:
        def describe(name: str) -> Message:
            configs = [
                {"name": key, "value": value, "config_source": 1} for key, value in self.configs.get(name, {}).items()
            ]
            code = 0 if (name, 0) in self.logs else UNKNOWN_TOPIC_OR_PARTITION
            return {"error_code": code, "resource_type": 2, "resource_name": name, "configs": configs}

        return {"results": [describe(item["resource_name"]) for item in asked["resources"]]}

    def _on_IncrementalAlterConfigs(self, node: int, asked: Message, is_applied: bool) -> Message:
        def alter(item: Message) -> Message:
            name, configs = item["resource_name"], self.configs.setdefault(item["resource_name"], {})
            for change in item["configs"] if is_applied else ():
                if change["config_operation"]:
                    configs.pop(change["name"], None)
                else:
                    configs[change["name"]] = change["value"]
            code = 0 if (name, 0) in self.logs else UNKNOWN_TOPIC_OR_PARTITION
            return {"error_code": code, "error_message": None, "resource_type": 2, "resource_name": name}

        return {"responses": [alter(item) for item in asked["resources"]]}


def _each(
    topics: list[Message],
    name: str,
    partitions: str,
    entry: Callable[[str, Message], Message],
    answered: str = "partitions",
) -> list[Message]:
    return [
        {name: topic[name], answered: [entry(topic[name], wanted) for wanted in topic[partitions]]} for topic in topics
    ]


def _append(log: _Log, records: bytes) -> tuple[int, int]:
    """Append a produced batch of magic 2; return (error code, first offset)."""
    code, base = log.producers.append(Numbers.of(records), log.end)
    if not code and base == log.end:
        log.append(records)
    return code, base
