"""The producer: records to batches, partition by partition.

There is no background thread: `send` transmits when enough has gathered, `flush` sends the rest. With acks=all each
record is written once, in order (idempotence); without idempotence a request whose answer was lost is sent again, and
its records may be there twice.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping
from types import TracebackType

from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.partitioner import StickyPartitioner
from spark_klog.client.sender import Sender
from spark_klog.errors import ConfigError
from spark_klog.records import kernels
from spark_klog.records.contract import NO_TIMESTAMP, Headers, RecordColumns
from spark_klog.records.reference import append_record, murmur2

_MAX_INT32, _MAX_INT64 = 0x7FFFFFFF, 0x7FFFFFFFFFFFFFFF


class _Gathering:
    """Records of one partition that are not a batch yet."""

    __slots__ = ("body", "count", "first_timestamp", "max_timestamp")

    def __init__(self) -> None:
        self.body = bytearray()
        self.count = 0
        self.first_timestamp = self.max_timestamp = 0

    def add(self, timestamp: int, key: bytes | None, value: bytes | None, headers: Headers) -> int:
        """Append a record; returns its size in bytes."""
        before = len(self.body)
        if not self.count:
            self.first_timestamp = self.max_timestamp = timestamp
        append_record(self.body, timestamp - self.first_timestamp, self.count, key, value, headers)
        self.count += 1
        self.max_timestamp = max(self.max_timestamp, timestamp)
        return len(self.body) - before


def _check_bytes(name: str, content: object) -> None:
    if isinstance(content, memoryview) and content.nbytes != len(content):
        raise TypeError(f"{name} must be bytes or None, not a memoryview of {content.format!r}")
    if content is not None and not isinstance(content, bytes | bytearray | memoryview):
        raise TypeError(f"{name} must be bytes or None, not {type(content).__name__}")


def _check_timestamp(timestamp: int) -> int:
    """The timestamp; `ConfigError` for one that no record can have."""
    timestamp = operator.index(timestamp)
    if not NO_TIMESTAMP <= timestamp <= _MAX_INT64:
        raise ConfigError(f"timestamp {timestamp}: set milliseconds since 1970, from 0 to {_MAX_INT64}, or -1 for none")
    return timestamp


def _check_headers(headers: Headers) -> Headers:
    """The headers as a tuple; `TypeError` for anything but pairs of str and bytes."""
    if isinstance(headers, Mapping | str | bytes):
        raise TypeError(f"headers must be pairs of str and bytes, not {type(headers).__name__}")
    headers = tuple(headers)
    for header in headers:
        if not isinstance(header, tuple | list) or len(header) != 2:
            raise TypeError(f"header {header!r} must be a pair of str and bytes")
        if not isinstance(header[0], str):
            raise TypeError(f"the name of header {header[0]!r} must be str, not {type(header[0]).__name__}")
        _check_bytes(f"header {header[0]!r}", header[1])
    return headers


class Producer:
    """Writes records to partitions' leaders. Not for several threads at once.

    Settings (Kafka's names): acks, enable.idempotence, compression.type and compression.CODEC.level, batch.size,
    max.request.size, buffer.memory, delivery.timeout.ms, retry.backoff.ms and retry.backoff.max.ms. Errors come from
    the call that meets them: `ProtocolError` naming the partition, `RequestTimedOut` once delivery.timeout.ms is over.
    A producer that has failed raises the same error from every later call and writes nothing any more: what it was
    given and has not confirmed by `flush` may be there or not.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._sender = Sender(cluster)
        self._kernel = kernels.load()
        self._gathering: dict[TopicPartition, _Gathering] = {}
        #: Of the topics used since `refresh`, and of those used before, which it has asked for.
        self._partitions: dict[str, int] = {}
        self._refreshed: dict[str, int] = {}
        #: Bytes of records in a batch, before compression; a record is never split.
        self.batch_size = max(1, cluster.config.batch_size)
        self._sticky = StickyPartitioner(self._available, self.batch_size)

    @classmethod
    def connect(cls, settings: Mapping[str, str], prefix: str = "") -> Producer:
        """A producer with a cluster of its own; see `Cluster.connect`."""
        return cls(Cluster.connect(settings, prefix))

    def partitions(self, topic: str) -> int:
        """How many partitions the topic has; it is made if the broker allows that, else `ProtocolError`."""
        if topic not in self._partitions:
            count = self._refreshed.pop(topic, None)
            if count is None:
                found = self._cluster.attempt(lambda: self._cluster.partitions([topic], create=True))
                count = len(found[topic])
            self._partitions[topic] = count
        return self._partitions[topic]

    def _available(self, topic: str) -> list[int]:
        """Partitions with a leader, as far as is known; all if none has one."""
        numbers = range(self.partitions(topic))
        return [number for number in numbers if self._cluster.last_leader(topic, number) is not None] or list(numbers)

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
        headers: Headers = (),
    ) -> None:
        """Add a record; `timestamp` in ms, now if None, -1 for a record without one.

        Without a partition the key's murmur2 decides, as Kafka's default; without a key, too, partitions take turns.
        `TypeError` or `ConfigError` for what no record can hold; nothing of it is written then.
        """
        self._sender.check()
        _check_bytes("value", value)
        _check_bytes("key", key)
        headers = _check_headers(headers)
        timestamp = time.time_ns() // 1_000_000 if timestamp is None else _check_timestamp(timestamp)
        count = self.partitions(topic)
        is_free = partition is None and key is None
        if partition is None:
            partition = (murmur2(key) & _MAX_INT32) % count if key is not None else self._sticky.current(topic)
        elif not 0 <= operator.index(partition) < count:
            raise ConfigError(f"topic {topic} has partitions 0 to {count - 1}, not {partition}")
        gathering = self._gathering.setdefault((topic, partition), _Gathering())
        size = gathering.add(timestamp, key, value, headers)
        if is_free:
            self._sticky.filled(topic, size)
        if len(gathering.body) >= self.batch_size:
            self._finish((topic, partition))

    def send_columns(self, topic: str, partition: int, columns: RecordColumns) -> None:
        """Add records column by column; `columns.timestamp` must be there, `offset` is not read."""
        self._finish((topic, partition))
        row = 0
        while row < columns.count:
            body, following, base, maximum = self._kernel.encode(columns, row, self.batch_size)
            self._sender.add((topic, partition), body, following - row, base, maximum)
            row = following

    def choose_partition(self, topic: str) -> int:
        """The partition for the next batch of records without a key."""
        return self._sticky.next(topic)

    def _finish(self, key: TopicPartition) -> None:
        gathering = self._gathering.pop(key, None)
        if gathering is not None and gathering.count:  # none if its first record could not be encoded
            self._sender.add(key, gathering.body, gathering.count, gathering.first_timestamp, gathering.max_timestamp)

    def flush(self) -> None:
        """Send all and wait for the answers."""
        for key in list(self._gathering):
            self._finish(key)
        self._sender.flush()

    def refresh(self) -> bool:
        """Ask for the partitions and leaders of the topics used since the last call; everything must be flushed.

        False if the brokers belong to another cluster by now, which may give our producer id to somebody else: such a
        producer must not be used any more. Errors as of `Cluster.partitions`.
        """
        cluster_id = self._cluster.cluster_id
        topics = list(self._partitions)
        self._partitions.clear()
        self._sticky.end_turns()
        found = self._cluster.partitions(topics, missing_ok=True)
        self._refreshed = {topic: len(numbers) for topic, numbers in found.items()}
        return self._cluster.cluster_id == cluster_id

    def close(self) -> None:
        """Flush and close the connections."""
        try:
            self.flush()
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the connections. Records that have not been flushed may be written or not."""
        self._cluster.close()

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
