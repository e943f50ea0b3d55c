"""Records of `Producer.send` on the way to a batch, and checks of their values.

Choose partitions for records without a key: one until a batch is full, then the next (KIP-480, KIP-794).

The first partition is random, so that many small producers spread evenly; then the partitions take turns. Partitions
without a leader are skipped while others have one.
"""

from __future__ import annotations

import logging
import math
import operator
import random
import time
from collections.abc import Callable, Mapping, Sequence

from spark_klog.client.cluster import Cluster, TopicPartition, numbers_of
from spark_klog.client.producer.receipts import OnDelivery, Receipt
from spark_klog.client.requests import MetadataRequest
from spark_klog.client.settings import ClientConfig
from spark_klog.errors import BufferExhausted, ConfigError, KlogError, RecordTooLargeToSend
from spark_klog.protocol.codec import Message
from spark_klog.records.contract import NO_TIMESTAMP, Headers
from spark_klog.records.kernels.reference import append_record
from spark_klog.records.partitioning import MOST_LENGTHS, OVERHEAD, largest_size

_log = logging.getLogger(__name__)
#: The most that a call waits for newer metadata while it can go on with what is known.
_RENEWAL_MS = 2_000
#: Seconds until the next attempt after one that failed.
_PAUSE = 20.0


class PartitionCounts:
    """Numbers of partitions by topic. Not thread-safe."""

    def __init__(self, cluster: Cluster, creates_topics: bool) -> None:
        self._cluster = cluster
        #: Whether brokers with auto.create.topics.enable may create missing topics.
        self.creates_topics = creates_topics
        self._max_age = cluster.config.metadata_max_age_ms / 1000
        #: Of the topics used since `refresh`, and of those that it asked for.
        self._known: dict[str, int] = {}
        self._refreshed: dict[str, int] = {}
        #: A reading of `time.monotonic`.
        self._old_at = math.inf
        self._renewal: MetadataRequest | None = None

    def of(self, topic: str) -> int:
        """The number of partitions of a topic; `ProtocolError` if it is missing and the broker does not create it."""
        if topic not in self._known:
            count = self._refreshed.pop(topic, None)
            if count is None:
                found = self._cluster.attempt(lambda: self._cluster.partitions([topic], create=self.creates_topics))
                count = len(found[topic])
            self._know(topic, count)
        return self._known[topic]

    def knows(self, topic: str) -> bool:
        """Whether `of` needs no broker. Any thread may ask."""
        return topic in self._known or topic in self._refreshed

    def learn(self, topic: str, found: Mapping[str, Message]) -> None:
        """Take over metadata of a topic; `ProtocolError` if they have an error."""
        self._know(topic, len(numbers_of(found, [topic])[topic]))

    def _know(self, topic: str, count: int) -> None:
        self._known[topic] = count
        self._old_at = min(self._old_at, time.monotonic() + self._max_age)

    def with_leader(self, topic: str) -> list[int]:
        """Partitions with a leader in the last metadata; all if none has one."""
        numbers = range(self.of(topic))
        return [number for number in numbers if self._cluster.last_leader(topic, number) is not None] or list(numbers)

    def renew(self, *, wait: bool = True) -> bool:
        """Fetch the numbers if they are old; return whether one has changed. Without errors: the known ones stay.

        Without `wait` the first call only asks, and a later one sees the answer.
        """
        if self._renewal is None and time.monotonic() < self._old_at:
            return False
        self._refreshed.clear()
        if wait:
            self._drop_renewal()
        try:
            with self._cluster.within(_RENEWAL_MS):
                found = self._cluster.metadata(self._known) if wait else self._renewal_step()
        except KlogError as error:
            self._old_at = time.monotonic() + min(self._max_age, _PAUSE)
            _log.warning("a producer's topics may have new partitions that it does not know: %s", error)
            return False
        if found is None:
            return False
        before = dict(self._known)
        self._old_at = time.monotonic() + self._max_age
        for name, topic in found.items():
            if topic["partitions"]:  # else it has an error, which the brokers answer to its records, too
                self._known[name] = len(topic["partitions"])
        return self._known != before

    def _renewal_step(self) -> dict[str, Message] | None:
        request = self._renewal or MetadataRequest(self._cluster, self._known)
        self._renewal = None
        found = request.step()
        if found is None:
            self._renewal = request
        return found

    def _drop_renewal(self) -> None:
        """Forget a request in flight: its answer may be older than one that is asked for now."""
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

    def refresh(self) -> bool:
        """As `Producer.refresh`."""
        self._drop_renewal()
        cluster_id = self._cluster.cluster_id
        topics = list(self._known)
        self._known.clear()
        found = self._cluster.partitions(topics, missing_ok=True)
        self._refreshed = {topic: len(numbers) for topic, numbers in found.items()}
        self._old_at = time.monotonic() + self._max_age
        return self._cluster.cluster_id == cluster_id


class StickyPartitioner:
    """Choose a partition per topic. `available(topic)` returns the partitions to choose from, at least one."""

    def __init__(self, available: Callable[[str], Sequence[int]], batch_bytes: int) -> None:
        self._available = available
        self._batch_bytes = batch_bytes
        self._current: dict[str, int] = {}
        self._filled: dict[str, int] = {}

    def current(self, topic: str) -> int:
        """The partition of the next record."""
        if topic not in self._filled:
            return self.next(topic)
        return self._current[topic]

    def filled(self, topic: str, size: int) -> None:
        """Count bytes added to the current partition; a full batch ends its turn."""
        self._filled[topic] = self._filled.get(topic, 0) + size
        if self._filled[topic] >= self._batch_bytes:
            self.next(topic)

    def end_turns(self) -> None:
        """Choose again at each topic's next record: the partitions may have changed."""
        self._filled.clear()

    def next(self, topic: str) -> int:
        """Go to the next partition in turn and return it."""
        available = self._available(topic)
        before = self._current.get(topic)
        if before is None:
            chosen = random.choice(available)
        else:
            chosen = min((number for number in available if number > before), default=min(available))
        self._current[topic] = chosen
        self._filled[topic] = 0
        return chosen


class PartitionChoice:
    """Partition counts of the topics in use, and the partitions that records without a key or a partition get."""

    def __init__(self, cluster: Cluster, batch_size: int, creates_topics: bool) -> None:
        self.counts = PartitionCounts(cluster, creates_topics)
        self.partitioning = cluster.config.partitioning
        self.sticky = StickyPartitioner(self.counts.with_leader, batch_size)
        self._batch_size = batch_size

    def renew(self, *, wait: bool = True) -> None:
        """See new partitions after metadata.max.age.ms; a call does it first, as it relies on the same ones.

        `wait`: see `PartitionCounts.renew`.
        """
        if self.counts.renew(wait=wait):
            self.sticky.end_turns()

    def refresh(self) -> bool:
        """Fetch the topics in use again; False if the brokers belong to another cluster now."""
        self.sticky.end_turns()
        return self.counts.refresh()

    def of(self, topic: str, key: bytes | None, partition: int | None) -> tuple[int, bool]:
        """(partition of a record, whether it was free to choose); `ConfigError` if the topic has no such partition."""
        count = self.counts.of(topic)
        if partition is not None:
            if not 0 <= operator.index(partition) < count:
                there = f"partitions 0 to {count - 1}" if count > 1 else "only partition 0"
                raise ConfigError(f"topic {topic} has {there}, not {partition}")
            return partition, False
        hashed = self.partitioning.of(key, count)
        return (self.sticky.current(topic), True) if hashed is None else (hashed, False)

    def filled(self, topic: str, size: int) -> None:
        """Note the size of a record whose partition was free to choose."""
        self.sticky.filled(topic, self._batch_size if self.partitioning.takes_turns else size)


_MAX_INT64 = 0x7FFFFFFFFFFFFFFF


class Gathering:
    """Records of one partition that do not fill a batch yet; they are due at `due`, a reading of `time.monotonic`."""

    __slots__ = ("_whole", "body", "due", "first_timestamp", "receipt")

    def __init__(self, receipt: Receipt, due: float) -> None:
        self.body = bytearray()
        self.first_timestamp = 0
        #: Number of records, bytes of `body`, greatest timestamp: replaced at once, when a record is added as a whole.
        self._whole = 0, 0, 0
        self.receipt = receipt
        self.due = due

    @property
    def count(self) -> int:
        return self._whole[0]

    @property
    def size(self) -> int:
        """Bytes of the records."""
        return self._whole[1]

    @property
    def max_timestamp(self) -> int:
        return self._whole[2]

    def add(
        self,
        timestamp: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        on_delivery: OnDelivery | None = None,
    ) -> tuple[int, int]:
        """Append a record; return its place in the batch and its size in bytes."""
        body = self.body
        count, before, last = self._whole
        if len(body) != before:
            self.mend()
        if not count:
            self.first_timestamp = last = timestamp
        append_record(body, timestamp - self.first_timestamp, count, key, value, headers)
        if on_delivery is not None:
            self.receipt.ask(on_delivery, count, timestamp)
        size = len(body)
        self._whole = count + 1, size, timestamp if timestamp > last else last
        return count, size - before

    def mend(self) -> None:
        """Remove what an interrupted `add` has left."""
        if len(self.body) != self.size:
            del self.body[self.size :]
            self.receipt.cut(self.count)


class Gatherings(dict[TopicPartition, Gathering]):
    """What gathers, by partition, and its size in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def take(self, key: TopicPartition) -> Gathering:
        gathering = self.pop(key)
        gathering.mend()
        self.bytes = self.bytes - gathering.size if self else 0
        return gathering

    def due(self, now: float) -> list[TopicPartition]:
        return [key for key, gathering in self.items() if gathering.due <= now]

    @property
    def next_due(self) -> float:
        return min((gathering.due for gathering in self.values()), default=math.inf)

    @property
    def records(self) -> int:
        return sum(gathering.count for gathering in list(self.values()))  # at the exit another thread may add some

    def clear(self) -> None:
        super().clear()
        self.bytes = 0


def check_bytes(name: str, content: object) -> None:
    """Raise `TypeError` for what is neither bytes nor None."""
    if isinstance(content, memoryview) and content.nbytes != len(content):
        raise TypeError(f"{name} must be bytes or None, not a memoryview of {content.format!r}")
    if content is not None and not isinstance(content, bytes | bytearray | memoryview):
        raise TypeError(f"{name} must be bytes or None, not {type(content).__name__}")


def size_limit(config: ClientConfig) -> tuple[int, str]:
    """The most bytes of a batch with a single record, and the setting that says so, as the user writes it."""
    if config.buffer_memory < config.max_request_size:
        return config.buffer_memory, config.named("buffer.memory")
    return config.max_request_size, config.named("max.request.size")


def check_size(topic: str, key: bytes | None, value: bytes | None, headers: Headers, limit: int, setting: str) -> None:
    """Raise `RecordTooLargeToSend` for a record that takes more than `limit` bytes; see `size_limit`."""
    if not headers and len(key or b"") + len(value or b"") + OVERHEAD + MOST_LENGTHS <= limit:
        return  # most records: the exact count takes longer
    size = largest_size(key, value, headers)
    if size > limit:
        raise RecordTooLargeToSend(topic, size, limit, setting)


def check_timestamp(timestamp: int) -> int:
    """The timestamp as an int; `ConfigError` if no record can have it."""
    timestamp = operator.index(timestamp)
    if not NO_TIMESTAMP <= timestamp <= _MAX_INT64:
        raise ConfigError(f"timestamp {timestamp}: set milliseconds since 1970, from 0 to {_MAX_INT64}, or -1 for none")
    return timestamp


def check_headers(headers: Headers) -> Headers:
    """The headers as a tuple; `TypeError` for anything but pairs of str and bytes."""
    if isinstance(headers, Mapping | str | bytes):
        raise TypeError(f"headers must be pairs of str and bytes, not {type(headers).__name__}")
    headers = tuple(headers)
    for header in headers:
        if not isinstance(header, tuple | list) or len(header) != 2:
            raise TypeError(f"header {header!r} must be a pair of str and bytes")
        if not isinstance(header[0], str):
            raise TypeError(f"the name of header {header[0]!r} must be str, not {type(header[0]).__name__}")
        check_bytes(f"header {header[0]!r}", header[1])
    return headers


def no_room(config: ClientConfig, waiting: int, partition: str) -> BufferExhausted:
    """The error of a record for which buffer.memory had no room within max.block.ms; `waiting` is in bytes."""
    named, seconds = config.named, config.max_block_ms / 1000
    return BufferExhausted(
        f"{waiting} bytes of records wait to be sent, {named('buffer.memory')}={config.buffer_memory}, and none was "
        f"confirmed within {seconds:g} s ({named('max.block.ms')}): a record for {partition} is not sent"
    )
