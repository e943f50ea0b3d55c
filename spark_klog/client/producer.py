"""The producer: batches by partition, one request under way per broker, so that a partition keeps its order.

There is no background thread: `send` transmits when enough has gathered, `flush` sends the rest. A request whose
answer was lost is sent again, so that records may be there twice (at least once).
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType

from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.connection import Connection
from spark_klog.errors import (
    ConfigError,
    ConnectionFailed,
    DecodeError,
    ProtocolError,
    RequestTimedOut,
    UnsupportedVersionError,
)
from spark_klog.protocol.apis import PRODUCE
from spark_klog.protocol.codec import Message
from spark_klog.records import kernels
from spark_klog.records.batch_v2 import build_batch
from spark_klog.records.contract import Headers, RecordColumns
from spark_klog.records.conversion import down_convert
from spark_klog.records.reference import append_record, murmur2

_log = logging.getLogger(__name__)
_MAX_INT32 = 0x7FFFFFFF
#: The first version of Produce that takes magic 2, and the one that takes magic 1.
_FIRST_MAGIC_2, _MAGIC_1 = 3, 2


class _Gathering:
    """Records of one partition that are not a batch yet."""

    __slots__ = ("body", "count", "first_timestamp", "max_timestamp")

    def __init__(self) -> None:
        self.body = bytearray()
        self.count = 0
        self.first_timestamp = self.max_timestamp = 0

    def add(self, timestamp: int, key: bytes | None, value: bytes | None, headers: Headers) -> None:
        if not self.count:
            self.first_timestamp = self.max_timestamp = timestamp
        append_record(self.body, timestamp - self.first_timestamp, self.count, key, value, headers)
        self.count += 1
        self.max_timestamp = max(self.max_timestamp, timestamp)


def _as_message_set(batch: bytes, version: int, where: str) -> bytearray:
    """A batch for a broker before 0.11; `UnsupportedVersionError` where it can't hold the records' headers."""
    converted = down_convert(batch, 1 if version == _MAGIC_1 else 0)
    if converted.lost_headers:
        raise UnsupportedVersionError(
            f"records for {where} have headers, the broker speaks Produce {version}, which has none: leave them out"
        )
    return converted.data


class Producer:
    """Writes records to partitions' leaders. Not for several threads at once.

    Settings (Kafka's names): acks, compression.type and compression.CODEC.level, batch.size, max.request.size,
    delivery.timeout.ms. Errors come from the call that meets them: `ProtocolError` naming the partition, or
    `ConnectionFailed` / `RequestTimedOut` once delivery.timeout.ms is over.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._config = cluster.config
        self._codec, self._level = self._config.codec, self._config.compression_level
        self._kernel = kernels.load()
        self._gathering: dict[TopicPartition, _Gathering] = {}
        self._ready: dict[TopicPartition, deque[bytes]] = {}
        self._ready_bytes = 0
        self._under_way: dict[int, dict[TopicPartition, bytes]] = {}
        self._partitions: dict[str, int] = {}
        self._sticky: dict[str, int] = {}

    @classmethod
    def connect(cls, settings: Mapping[str, str]) -> Producer:
        """A producer with a cluster of its own."""
        return cls(Cluster.connect(settings))

    def partitions(self, topic: str) -> int:
        """How many partitions the topic has; it is made where the broker allows that, else `ProtocolError`."""
        if topic not in self._partitions:
            found = self._cluster.attempt(lambda: self._cluster.partitions([topic], create=True))
            self._partitions[topic] = len(found[topic])
        return self._partitions[topic]

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
        headers: Headers = (),
    ) -> None:
        """Add a record; `timestamp` in ms, now where None. The partition is the key's murmur2, as Kafka's default."""
        count = self.partitions(topic)
        if partition is None:
            partition = (murmur2(key) & _MAX_INT32) % count if key is not None else self.choose_partition(topic, count)
        elif not 0 <= partition < count:
            raise ConfigError(f"topic {topic} has partitions 0 to {count - 1}, not {partition}")
        gathering = self._gathering.setdefault((topic, partition), _Gathering())
        gathering.add(time.time_ns() // 1_000_000 if timestamp is None else timestamp, key, value, headers)
        if len(gathering.body) >= self._config.batch_size:
            self._finish((topic, partition))
            self._sticky.pop(topic, None)
            self._send_if_enough()

    def send_columns(self, topic: str, partition: int, columns: RecordColumns) -> None:
        """Add records column by column; `columns.timestamp` must be there, `offset` is not read."""
        self._finish((topic, partition))
        row = 0
        while row < columns.count:
            body, following, base, maximum = self._kernel.encode(columns, row, self._config.batch_size)
            self._enqueue((topic, partition), body, following - row, base, maximum)
            row = following
            self._send_if_enough()

    def choose_partition(self, topic: str, count: int) -> int:
        """The partition for records without a key: one until its batch is full, then another."""
        if topic not in self._sticky:
            self._sticky[topic] = random.randrange(count)
        return self._sticky[topic]

    def _finish(self, key: TopicPartition) -> None:
        gathering = self._gathering.pop(key, None)
        if gathering is not None and gathering.count:
            self._enqueue(key, gathering.body, gathering.count, gathering.first_timestamp, gathering.max_timestamp)

    def _enqueue(self, key: TopicPartition, body: bytes | bytearray, count: int, base: int, maximum: int) -> None:
        batch = build_batch(
            body, count, base_timestamp=base, max_timestamp=maximum, codec=self._codec, level=self._level
        )
        self._ready.setdefault(key, deque()).append(batch)
        self._ready_bytes += len(batch)

    def _send_if_enough(self) -> None:
        while self._ready_bytes >= self._config.max_request_size:
            self._deliver(wait=False)

    def flush(self) -> None:
        """Send all and wait for the answers."""
        for key in list(self._gathering):
            self._finish(key)
        while self._ready_bytes or self._under_way:
            self._deliver(wait=not self._ready_bytes)

    def _deliver(self, wait: bool) -> None:
        """Send one request to each leader that has something ready; with `wait`, only take the answers."""
        deadline = time.monotonic() + self._config.delivery_timeout_ms / 1000
        while True:
            try:
                if wait:
                    for node in list(self._under_way):
                        self._take_answer(node)
                else:
                    self._transmit()
            except (ConnectionFailed, RequestTimedOut) as error:
                failure: Exception = error
            except ProtocolError as error:
                if not error.retriable:
                    raise
                failure = error
            else:
                return
            if time.monotonic() >= deadline:
                raise failure
            _log.info("sending again: %s", failure)
            self._recover()
            wait = False
            time.sleep(self._config.retry_backoff_ms / 1000)

    def _transmit(self) -> None:
        by_node: dict[int, list[TopicPartition]] = {}
        for key, batches in self._ready.items():
            if batches:
                by_node.setdefault(self._cluster.leader(*key), []).append(key)
        for node, keys in by_node.items():
            if node in self._under_way:
                self._take_answer(node)
            connection = self._cluster.connection(node)
            self._send_request(connection, node, keys)

    def _send_request(self, connection: Connection, node: int, keys: list[TopicPartition]) -> None:
        """One batch of each partition, as many partitions as fit into max.request.size."""
        request: dict[TopicPartition, bytes] = {}
        size = 0
        for key in keys:
            batch = self._ready[key][0]
            if request and size + len(batch) > self._config.max_request_size:
                break
            request[key] = batch
            size += len(batch)
        topics: dict[str, list[Message]] = {}
        version = connection.version_of(PRODUCE)
        for (topic, partition), batch in request.items():
            records = batch if version >= _FIRST_MAGIC_2 else _as_message_set(batch, version, f"{topic}-{partition}")
            topics.setdefault(topic, []).append({"index": partition, "records": records})
        message = {
            "acks": self._config.acks,
            "timeout_ms": self._config.request_timeout_ms,
            "topic_data": [{"name": topic, "partition_data": data} for topic, data in topics.items()],
        }
        answered = self._config.acks != 0
        connection.send(PRODUCE, message, answered=answered)
        for key in request:
            self._ready[key].popleft()
        self._ready_bytes -= size
        if answered:
            self._under_way[node] = request

    def _take_answer(self, node: int) -> None:
        request = self._under_way[node]
        answer = self._cluster.connection(node)
        if not answer.pending:
            raise ConnectionFailed(f"connection to broker {node} broke with a request under way")
        try:
            response = answer.receive()
        except DecodeError as error:
            raise ConnectionFailed(str(error)) from None
        failure: ProtocolError | None = None
        for topic in response["responses"]:
            for entry in topic["partition_responses"]:
                key = topic["name"], entry["index"]
                if not entry["error_code"]:
                    request.pop(key, None)
                    continue
                reason = f" ({entry['error_message']})" if entry["error_message"] else ""
                refusal = ProtocolError(entry["error_code"], f"produce to {key[0]}-{key[1]}{reason}")
                if failure is None or not refusal.retriable:
                    failure = refusal
        if failure is not None:
            raise failure
        del self._under_way[node]

    def _recover(self) -> None:
        """Put what was not confirmed back to the front of its partition."""
        for request in self._under_way.values():
            for key, batch in request.items():
                self._ready.setdefault(key, deque()).appendleft(batch)
                self._ready_bytes += len(batch)
        self._under_way.clear()
        self._cluster.forget_leaders()

    def close(self) -> None:
        """Flush and close the connections."""
        try:
            self.flush()
        finally:
            self._cluster.close()

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._cluster.close()
