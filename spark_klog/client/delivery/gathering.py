"""Records of `Producer.send` on the way to a batch, and checks of their values."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping

from spark_klog.client.cluster import TopicPartition
from spark_klog.client.config import ClientConfig
from spark_klog.client.delivery.receipts import OnDelivery, Receipt
from spark_klog.errors import BufferExhausted, ConfigError, RecordTooLargeToSend
from spark_klog.records.contract import NO_TIMESTAMP, Headers
from spark_klog.records.kernels.reference import append_record
from spark_klog.records.record_size import MOST_LENGTHS, OVERHEAD, largest_size

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
