"""Model brokers that append to lists; a test decides the fate of each Produce request.

The brokers share one replicated log, so that a leader may move at any time. kafka-python reads the batches.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kafka.record import MemoryRecords

from spark_klog.errors import ErrorCode
from spark_klog.protocol.apis import API_VERSIONS, BY_KEY, INIT_PRODUCER_ID, METADATA, PRODUCE
from spark_klog.protocol.codec import decode_request, decode_request_header, encode_response
from spark_klog.wire.primitives import Reader
from tests.support.brokers.idempotence import Numbers, Producers
from tests.support.servers.kafka import HOST

Key = tuple[str, int]
_NONE = 0


@dataclass
class Fate:
    """The fate of one Produce request.

    `errors` are error codes of partitions whose batch is not appended, `after` of those whose batch is. `delay_before`
    and `delay_after` are seconds before and after the append. The answer is sent `answers` times; 0 closes the
    connection. The request waits until `behind` later ones have arrived on its connection, 20 s at most.
    """

    errors: dict[Key, int] = field(default_factory=dict)
    after: dict[Key, int] = field(default_factory=dict)
    left_out: frozenset[Key] = frozenset()
    drop_before: bool = False
    answers: int = 1
    delay_before: float = 0.0
    delay_after: float = 0.0
    throttle_ms: int = 0
    moves: dict[Key, int] = field(default_factory=dict)
    moves_before: bool = True
    forget_producers: bool = False
    wrong_id: bool = False
    behind: int = 0


#: Returns the fate of a request, given the broker's node id and the request's partitions.
Script = Callable[[int, list[Key]], Fate]


class ModelCluster:
    """`log` has record values by partition, `leaders` node ids (-1: none), `requests` (node, partitions) of Produce."""

    def __init__(self, nodes: int, topics: dict[str, int], script: Script | None = None) -> None:
        self.lock = threading.Lock()
        self.script = script or (lambda node, keys: Fate())
        self.topics = topics
        keys = [(topic, number) for topic, count in topics.items() for number in range(count)]
        self.leaders: dict[Key, int] = {key: index % nodes for index, key in enumerate(keys)}
        self.log: dict[Key, list[bytes]] = {key: [] for key in keys}
        self.requests: list[tuple[int, list[Key]]] = []
        self.batches_received: Counter[Key] = Counter()
        #: (producer id, epoch, base sequence) of the batches received for each partition.
        self.numbers: dict[Key, list[tuple[int, int, int]]] = {key: [] for key in keys}
        #: The last versions that the brokers support; None: not supported.
        self.produce_version = 12
        self.init_version: int | None = 5
        #: Errors of the next InitProducerId answers.
        self.init_errors: list[int] = []
        #: The epoch of new producer ids.
        self.init_epoch = 0
        #: How many of the next InitProducerId requests close the connection.
        self.init_drops = 0.0
        self.inits = 0
        self.cluster_id = "model"
        #: Whether an unknown producer may begin with any sequence, as from Kafka 2.5 on.
        self.takes_any_first = False
        #: Brokers reject larger batches (max.message.bytes).
        self.max_bytes = 1 << 20
        #: The most requests in flight on a connection, counted when a Produce request is handled.
        self.most_in_flight = 0
        self._producers = {key: Producers() for key in keys}
        self._brokers = [_Broker(self, node) for node in range(nodes)]

    @property
    def servers(self) -> str:
        return ",".join(f"{HOST}:{broker.port}" for broker in self._brokers)

    def answer(self, node: int, key: int, version: int, message: Any) -> Any:
        if key == API_VERSIONS.key:
            versions = {
                PRODUCE: self.produce_version,
                METADATA: 12,
                API_VERSIONS: 0,
                INIT_PRODUCER_ID: self.init_version,
            }
            known = [
                {"api_key": api.key, "min_version": 0, "max_version": last}
                for api, last in versions.items()
                if last is not None
            ]
            return {"error_code": 0, "api_keys": known}
        if key == METADATA.key:
            return self._metadata(message)
        assert key == INIT_PRODUCER_ID.key
        self.inits += 1
        if self.init_drops > 0:
            self.init_drops -= 1
            return None
        code = self.init_errors.pop(0) if self.init_errors else 0
        return {"error_code": code, "producer_id": -1 if code else 1000 + self.inits, "producer_epoch": self.init_epoch}

    def _metadata(self, message: Any) -> Any:
        names = list(self.topics) if message["topics"] is None else [entry["name"] for entry in message["topics"]]
        topics = []
        for name in names:
            partitions = [
                {
                    "error_code": 0 if self.leaders[name, number] >= 0 else int(ErrorCode.LEADER_NOT_AVAILABLE),
                    "partition_index": number,
                    "leader_id": self.leaders[name, number],
                    "replica_nodes": [],
                    "isr_nodes": [],
                    "offline_replicas": [],
                }
                for number in range(self.topics.get(name, 0))
            ]
            code = 0 if partitions else int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            topics.append({"error_code": code, "name": name, "partitions": partitions})
        brokers = [{"node_id": broker.node, "host": HOST, "port": broker.port} for broker in self._brokers]
        return {"brokers": brokers, "topics": topics, "controller_id": 0, "cluster_id": self.cluster_id}

    def begin_produce(self, node: int, message: Any) -> Fate:
        keys = [(topic["name"], entry["index"]) for topic in message["topic_data"] for entry in topic["partition_data"]]
        self.requests.append((node, keys))
        self.batches_received.update(keys)
        return self.script(node, keys)

    def produce(self, node: int, message: Any, fate: Fate) -> Any:
        if fate.moves_before:
            self.leaders.update(fate.moves)
        if fate.forget_producers:
            for producers in self._producers.values():
                producers.forget()
        responses = []
        for topic in message["topic_data"]:
            entries = []
            for entry in topic["partition_data"]:
                key = topic["name"], entry["index"]
                code, base_offset = fate.errors.get(key, _NONE), -1
                if not code and key not in self.leaders:
                    code = int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
                if not code and self.leaders[key] != node:
                    code = int(ErrorCode.NOT_LEADER_OR_FOLLOWER)
                if not code:
                    before = len(self.log[key])
                    code = self._append(key, bytes(entry["records"])) or fate.after.get(key, _NONE)
                    if not code and len(self.log[key]) > before:
                        base_offset = before
                if key not in fate.left_out:
                    answer = {"index": entry["index"], "error_code": code, "record_errors": []}
                    entries.append(answer | {"base_offset": base_offset})
            responses.append({"name": topic["name"], "partition_responses": entries})
        if not fate.moves_before:
            self.leaders.update(fate.moves)
        return {"responses": responses, "throttle_time_ms": fate.throttle_ms}

    def _append(self, key: Key, data: bytes) -> int:
        if len(data) > self.max_bytes:  # Kafka checks the size before the producer's sequences
            return int(ErrorCode.MESSAGE_TOO_LARGE)
        records = MemoryRecords(data)
        values: list[bytes] = []
        batches = 0
        while (batch := records.next_batch()) is not None:
            if not batch.validate_crc():
                return int(ErrorCode.CORRUPT_MESSAGE)
            batches += 1
            values += [record.value for record in batch]
        assert batches == 1, "one batch a partition, from Produce 3 on"
        numbers = Numbers.of(data)
        self.numbers[key].append((numbers.producer_id, numbers.epoch, numbers.first))
        assert numbers.count == len(values)
        end = len(self.log[key])
        code, base = self._producers[key].append(numbers, end, takes_any_first=self.takes_any_first)
        if not code and base == end:
            self.log[key] += values
        return code

    def expect(self, key: Key, producer_id: int, last: int) -> None:
        """Set a producer's last sequence in a partition."""
        self._producers[key].expect(producer_id, last)

    def forget_producers(self) -> None:
        """Forget all producers, as brokers do after a day without writes."""
        with self.lock:
            for producers in self._producers.values():
                producers.forget()

    def make_anew(self, topic: str, partitions: int) -> None:
        """Delete a topic and create it again."""
        with self.lock:
            for number in range(self.topics[topic]):
                for state in (self.leaders, self.log, self.numbers, self._producers):
                    del state[topic, number]
            self.topics[topic] = 0
        self.add_partitions(topic, partitions)

    def add_partitions(self, topic: str, count: int) -> None:
        with self.lock:
            for number in range(self.topics[topic], self.topics[topic] + count):
                key = topic, number
                self.leaders[key] = number % len(self._brokers)
                self.log[key], self.numbers[key], self._producers[key] = [], [], Producers()
            self.topics[topic] += count

    def disconnect(self, node: int) -> None:
        """Close a broker's connections."""
        self._brokers[node].disconnect()

    def close(self) -> None:
        for broker in self._brokers:
            broker.close()

    def __enter__(self) -> ModelCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Broker:
    """A listener with a thread per connection."""

    def __init__(self, cluster: ModelCluster, node: int) -> None:
        self.node = node
        self._cluster = cluster
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._closed = threading.Event()
        self._connections: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.add(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Handle requests one at a time in order of arrival, while a thread reads the next ones."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        reader = threading.Thread(target=self._read, args=(connection, frames), daemon=True)
        reader.start()
        with connection:
            try:
                while (frame := frames.get()) is not None:
                    if not self._handle(connection, frame, frames):
                        return
            except OSError:
                pass
            finally:
                self._connections.discard(connection)
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                reader.join(20)

    def _read(self, connection: socket.socket, frames: queue.SimpleQueue[bytes | None]) -> None:
        try:
            while len(prefix := connection.recv(4, socket.MSG_WAITALL)) == 4:
                frames.put(connection.recv(struct.unpack(">i", prefix)[0], socket.MSG_WAITALL))
        except OSError:
            pass
        frames.put(None)

    def _handle(self, connection: socket.socket, frame: bytes, following: queue.SimpleQueue[bytes | None]) -> bool:
        """Answer a request; return False to close the connection."""
        reader = Reader(frame)
        key, version, correlation_id = decode_request_header(reader)
        api = BY_KEY[key]
        _, message = decode_request(api, version, reader)
        times = 1
        if key != PRODUCE.key:
            with self._cluster.lock:
                answer = self._cluster.answer(self.node, key, version, message)
            if answer is None:
                return False
        else:
            with self._cluster.lock:
                fate = self._cluster.begin_produce(self.node, message)
            if fate.drop_before:
                return False
            self._await_more(fate.behind, following)
            self._closed.wait(fate.delay_before)
            with self._cluster.lock:
                self._cluster.most_in_flight = max(self._cluster.most_in_flight, 1 + following.qsize())
                answer = self._cluster.produce(self.node, message, fate)
            self._closed.wait(fate.delay_after)
            times = fate.answers if message["acks"] else 0
            correlation_id += fate.wrong_id
            if not times:
                return not message["acks"]
        frame = bytes(encode_response(api, version, correlation_id, answer).to_bytes())
        connection.sendall((struct.pack(">i", len(frame)) + frame) * times)
        return True

    def _await_more(self, count: int, following: queue.SimpleQueue[bytes | None]) -> None:
        deadline = time.monotonic() + 20
        while following.qsize() < count and time.monotonic() < deadline and not self._closed.wait(0.002):
            pass

    def disconnect(self) -> None:
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self._closed.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:  # already closed
            pass
        self._listener.close()
        self.disconnect()
        for thread in self._threads:
            thread.join(20)
