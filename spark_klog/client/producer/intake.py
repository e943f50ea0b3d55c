"""Records of `Producer.send` on the way to a batch: serializers, their partitions, checks of values, what gathers."""

from __future__ import annotations

import logging
import math
import operator
import random
import threading
import time
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from spark_klog.base.names import ROW_FORMATS, TopicPartition
from spark_klog.base.settings import INT64_MAX
from spark_klog.client.cluster import Cluster, numbers_of
from spark_klog.client.net.waiting import Waited
from spark_klog.client.producer.receipts import OnDelivery, Receipt
from spark_klog.client.requests import PendingRequest, Steps, retried
from spark_klog.client.retry import Retry
from spark_klog.client.serialization import Column, Context, Function, PlainType, Serialization
from spark_klog.errors import (
    ConfigError,
    ConnectionFailed,
    EncodeError,
    KlogError,
    ProtocolError,
    RecordTooLargeToSend,
    RequestTimedOut,
    is_retriable,
)
from spark_klog.records.contract import NO_TIMESTAMP, Headers
from spark_klog.records.kernels.reference import append_record
from spark_klog.records.partitioning import MOST_LENGTHS, OVERHEAD, largest_size

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_klog.schemas.row_serializing import RowSerializer

_log = logging.getLogger(__name__)
#: Seconds that calls wait for newer metadata at most, since these were asked for: they can go on with what is known.
_LONGEST_RENEWAL = 2.0
#: Seconds until the next attempt after one that failed.
_PAUSE = 20.0


class AsItIs(bytes):
    """A key or a value that no serializer sees: of a record that is passed on."""


class Serializers:
    """Serializes the keys and values of a producer. Threads may share it.

    The schema of a topic's rows is looked up, or registered, with its first record, and kept.
    """

    def __init__(self, serialization: Serialization) -> None:
        self._serialization = serialization
        #: Also for a signal handler within a call: its producer's own `ConcurrentUse` comes later.
        self._lock = threading.RLock()
        self._by_topic: dict[tuple[Column, str], RowSerializer] = {}

    def record(self, topic: str, key: Any, value: Any, headers: Headers) -> tuple[Any, Any, Headers]:
        """Key, value and headers of a record as they are sent: bytes, or None for null.

        `EncodeError` if one of the two does not serialize; errors of the registry.
        """
        context_headers = list(headers)
        key = self._serialized("key", topic, key, context_headers)
        value = self._serialized("value", topic, value, context_headers)
        return key, value, tuple(context_headers)

    def _serialized(self, column: Column, topic: str, value: Any, headers: list[tuple[str, bytes | None]]) -> Any:
        chosen = self._serialization.by_column.get(column)
        if value is None or chosen is None:
            return value
        if type(value) is AsItIs:
            return bytes(value)
        try:
            if isinstance(chosen, str):
                name = f"__{column}_schema_id"  # of a record that is copied: readers would take it for this one's
                headers[:] = [header for header in headers if header[0] != name]
                return self._row_serializer(column, topic).serialize(value)
            return _called(chosen, value, Context(topic, column, headers))
        except EncodeError as error:
            raise EncodeError(f"the {column} of a record for {topic} does not serialize: {error}") from error.__cause__

    def knows(self, topic: str) -> bool:
        """Whether `record` needs no schema registry for this topic."""
        return all(
            (serializer := self._by_topic.get((column, topic))) is not None and serializer.is_ready
            for column, chosen in self._serialization.by_column.items()
            if isinstance(chosen, str)
        )

    def prepare(self, topic: str) -> None:
        """Have a topic known; errors as of `record`."""
        for column, chosen in self._serialization.by_column.items():
            if isinstance(chosen, str):
                self._row_serializer(column, topic).prepare()

    def _row_serializer(self, column: Column, topic: str) -> RowSerializer:
        with self._lock:
            serializer = self._by_topic.get((column, topic))
            if serializer is None:
                from spark_klog.schemas.row_serializing import RowSerializer

                serializer = RowSerializer(self._serialization.write_format(column, topic))
                self._by_topic[column, topic] = serializer
            return serializer

    def table(self, rows: pa.Table | pa.RecordBatch, topic: str | None) -> pa.Table | pa.RecordBatch:
        """The rows of `Producer.send_arrow` with binary keys and values.

        `EncodeError` names the row that does not fit its schema, `SchemaError` the field; errors of the registry.
        """
        if not hasattr(rows, "schema"):
            return rows  # whose type is refused later
        from spark_klog.schemas.row_serializing import serialized_column

        for column in self._serialization.by_column:
            rows = serialized_column(rows, column, topic, partial(self._encoded, column))
        return rows

    def _encoded(self, column: Column, topic: str, values: pa.Array, first: int) -> pa.Array:
        """The binary column of a topic's rows, of which the first one has this number."""
        chosen = self._serialization.by_column[column]
        if isinstance(chosen, str):
            return self._row_serializer(column, topic).encode(values, first)
        if not isinstance(chosen, PlainType):
            raise ConfigError(
                f"{column}.serializer is a function, which takes no columns: call send, or set "
                f"{', '.join(ROW_FORMATS)} or a plain type"
            )
        from spark_klog.schemas.row_serializing import plain_column

        try:
            return plain_column(values, chosen.arrow, chosen.write, first)
        except EncodeError as error:
            raise EncodeError(f"column {column}, {error}") from error.__cause__


def _called(chosen: PlainType | Function, value: Any, context: Context) -> Any:
    try:
        data = chosen.write(value) if isinstance(chosen, PlainType) else chosen(value, context)
    except KlogError:
        raise
    except Exception as error:
        raise EncodeError(f"{type(error).__name__}: {error}") from error
    if data is not None and not isinstance(data, bytes | bytearray | memoryview):
        raise EncodeError(f"its serializer returns {type(data).__name__}, not bytes")
    return data


class PartitionChoice:
    """The partitions of the topics in use, and which of them records get. Not thread-safe.

    A topic's records without a key or a partition go to one partition until a batch is full, then to the next one
    (KIP-480, KIP-794). The first is random, so that many small producers spread evenly. Partitions without a leader are
    skipped while others have one.
    """

    def __init__(self, cluster: Cluster, batch_size: int, *, creates_topics: bool) -> None:
        self._cluster, self._batch_size = cluster, batch_size
        #: Whether brokers with auto.create.topics.enable may create missing topics.
        self.creates_topics = creates_topics
        self.partitioning = cluster.config.partitioning
        self._max_age = cluster.config.metadata_max_age_ms / 1000
        #: Numbers of partitions of the topics used since `refresh`, and of those that it asked for.
        self._known: dict[str, int] = {}
        self._refreshed: dict[str, int] = {}
        #: A reading of `time.monotonic`.
        self._old_at = math.inf
        #: Calls share it: one that ends early, as at a cancellation, leaves it to the next.
        self._renewal: PendingRequest[bool] = PendingRequest()
        #: When it was begun.
        self._renewed_at = -math.inf
        #: The partition whose turn it is, and the bytes that it has got; without them it is the next one's turn.
        self._current: dict[str, int] = {}
        self._filled: dict[str, int] = {}

    def count(self, topic: str) -> int:
        """The number of partitions of a topic; `ProtocolError` if it is missing and the broker does not create it."""
        if topic not in self._known:
            count = self._refreshed.pop(topic, None)
            if count is None:
                numbers = self._cluster.attempt(lambda: self._cluster.partitions([topic], create=self.creates_topics))
                count = len(numbers[topic])
            self._know(topic, count)
        return self._known[topic]

    def knows(self, topic: str) -> bool:
        """Whether `count` needs no broker. Any thread may ask."""
        return topic in self._known or topic in self._refreshed

    def looking_up(self, topic: str) -> Steps[None]:
        """Have a topic known within request.timeout.ms; `ProtocolError` as of `count`."""
        bounds = self._cluster.bounds()
        retry = Retry(self._cluster.config, *bounds)
        while not self.knows(topic):
            try:
                metadata = yield from self._cluster.asking_metadata([topic], bounds, create=self.creates_topics)
                self._know(topic, len(numbers_of(metadata, [topic])[topic]))
            except (ConnectionFailed, RequestTimedOut, ProtocolError) as error:
                if not is_retriable(error):
                    raise
                yield from retried(retry, error)

    def _know(self, topic: str, count: int) -> None:
        self._known[topic] = count
        self._old_at = min(self._old_at, time.monotonic() + self._max_age)

    def renewing(self) -> Steps[None]:
        """See new partitions after metadata.max.age.ms; a call does it first, as it relies on the same ones.

        No errors: the known ones stay. An answer that was asked for earlier must not be older than that, either.
        """
        oldest = time.monotonic() - self._max_age
        while self.is_due:
            if self._renewal.step(self._renewed) is not None:
                if self._renewed_at >= oldest:
                    return
                continue
            until = self._renewed_at + _LONGEST_RENEWAL
            if time.monotonic() >= until:
                return
            yield self._renewal.wait._replace(until=min(until, self._renewal.wait.until))

    def renew_soon(self) -> None:
        """As `renewing`, without waiting: the first call only asks, and a later one sees the answer."""
        if self.is_due:
            self._renewal.step(self._renewed)

    @property
    def is_due(self) -> bool:
        """Whether metadata.max.age.ms is over, or new metadata are under way."""
        return self._renewal.under_way is not None or time.monotonic() >= self._old_at

    def _renewed(self) -> Steps[bool]:
        self._refreshed.clear()
        self._renewed_at = time.monotonic()
        try:
            metadata = yield from self._cluster.asking_metadata(list(self._known))
        except KlogError as error:
            self._old_at = time.monotonic() + min(self._max_age, _PAUSE)
            _log.warning("a producer's topics may have new partitions that it does not know: %s", error)
            return False
        before = dict(self._known)
        self._old_at = self._renewed_at + self._max_age
        for name, topic in metadata.items():
            if topic["partitions"]:  # else it has an error, which the brokers answer to its records, too
                self._known[name] = len(topic["partitions"])
        if self._known != before:
            self._filled.clear()
        return True

    @property
    def look_at(self) -> float:
        """When to call `renew_soon` if no event of `connections` comes, a reading of `time.monotonic`."""
        return self._renewal.look_at if self._renewal.under_way else self._old_at

    @property
    def connections(self) -> list[Waited]:
        return self._renewal.connections if self._renewal.under_way else []

    def refresh(self) -> bool:
        """As `Producer.refresh`."""
        self._filled.clear()
        self._renewal.close()
        cluster_id = self._cluster.cluster_id
        topics = list(self._known)
        self._known.clear()
        numbers = self._cluster.partitions(topics, missing_ok=True)
        self._refreshed = {topic: len(of_topic) for topic, of_topic in numbers.items()}
        self._old_at = time.monotonic() + self._max_age
        return self._cluster.cluster_id == cluster_id

    def of(self, topic: str, key: bytes | None, partition: int | None) -> tuple[int, bool]:
        """(partition of a record, whether it was free to choose); `ConfigError` if the topic has no such partition."""
        count = self.count(topic)
        if partition is not None:
            if not 0 <= operator.index(partition) < count:
                there = f"partitions 0 to {count - 1}" if count > 1 else "only partition 0"
                raise ConfigError(f"topic {topic} has {there}, not {partition}")
            return partition, False
        hashed = self.partitioning.of(key, count)
        if hashed is not None:
            return hashed, False
        return (self._current[topic] if topic in self._filled else self.turns(topic, 1)[0]), True

    def filled(self, topic: str, size: int) -> None:
        """Note the size of a record whose partition was free to choose: a full batch ends the partition's turn."""
        self._filled[topic] = self._filled.get(topic, 0) + (self._batch_size if self.partitioning.takes_turns else size)
        if self._filled[topic] >= self._batch_size:
            self.turns(topic, 1)

    def turns(self, topic: str, number: int) -> list[int]:
        """The next partitions in turn; the last one's turn goes on."""
        last_leader = self._cluster.last_leader
        every = range(self.count(topic))
        available = [partition for partition in every if last_leader(topic, partition) is not None] or list(every)
        chosen: list[int] = []
        for _ in range(number):
            before = self._current.get(topic)
            if before is None:
                following = random.choice(available)
            else:
                place = bisect(available, before)
                following = available[place if place < len(available) else 0]
            self._current[topic] = following
            self._filled[topic] = 0
            chosen.append(following)
        return chosen


@dataclass(slots=True, eq=False)
class Gathering:
    """Records of one partition that do not fill a batch yet; they are due at `due`, a reading of `time.monotonic`."""

    receipt: Receipt
    due: float
    body: bytearray = field(default_factory=bytearray)
    first_timestamp: int = 0
    #: Number of records, bytes of `body`, greatest timestamp: replaced at once, when a record is added as a whole.
    whole: tuple[int, int, int] = 0, 0, 0
    #: What becomes of the last records, for a producer that tells many of them by one callback.
    outcomes: list[Any] = field(default_factory=list)

    def add_record(
        self,
        timestamp: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        on_delivery: OnDelivery | None = None,
    ) -> tuple[int, int]:
        """Append a record; return its place in the batch and its size in bytes."""
        body = self.body
        count, before, last = self.whole
        if len(body) != before:
            self.mend()
        if not count:
            self.first_timestamp = last = timestamp
        append_record(body, timestamp - self.first_timestamp, count, key, value, headers)
        if on_delivery is not None:
            self.receipt.callbacks.append((on_delivery, count, timestamp))
        size = len(body)
        self.whole = count + 1, size, timestamp if timestamp > last else last
        return count, size - before

    def mend(self) -> None:
        """Remove what an interrupted `add_record` has left."""
        count, size, _ = self.whole
        if len(self.body) != size:
            del self.body[size:]
            self.receipt.cut(count)


class Gatherings(dict[TopicPartition, Gathering]):
    """What gathers, by partition, and its size in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def remove(self, key: TopicPartition) -> Gathering:
        gathering = self.pop(key)
        gathering.mend()
        self.bytes = self.bytes - gathering.whole[1] if self else 0
        return gathering

    @property
    def records(self) -> int:
        return sum(gathering.whole[0] for gathering in list(self.values()))  # at the exit another thread may add some

    def clear(self) -> None:
        super().clear()
        self.bytes = 0


def check_bytes(name: str, content: object) -> None:
    """Raise `TypeError` for what is neither bytes nor None."""
    if isinstance(content, memoryview) and content.nbytes != len(content):
        raise TypeError(f"{name} must be bytes or None, not a memoryview of {content.format!r}")
    if content is not None and not isinstance(content, bytes | bytearray | memoryview):
        raise TypeError(f"{name} must be bytes or None, not {type(content).__name__}")


def check_size(topic: str, key: bytes | None, value: bytes | None, headers: Headers, limit: int, setting: str) -> None:
    """Raise `RecordTooLargeToSend` for a record that takes more than `limit` bytes, which the setting says."""
    if not headers and len(key or b"") + len(value or b"") + OVERHEAD + MOST_LENGTHS <= limit:
        return  # most records: the exact count takes longer
    size = largest_size(key, value, headers)
    if size > limit:
        raise RecordTooLargeToSend(topic, size, limit, setting)


def check_timestamp(timestamp: int) -> int:
    """The timestamp as an int; `ConfigError` if no record can have it."""
    timestamp = operator.index(timestamp)
    if not NO_TIMESTAMP <= timestamp <= INT64_MAX:
        raise ConfigError(f"timestamp {timestamp}: set milliseconds since 1970, from 0 to {INT64_MAX}, or -1 for none")
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
