"""Sample records: a small fetch from each partition, of many with one request per broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

from spark_klog.base.names import TopicPartition
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.entries import Fetched, FetchInFlight, FetchParameters, Larger, Limits, read_entry
from spark_klog.errors import DecodeError, KlogError
from spark_klog.protocol.tables.records import READ_UNCOMMITTED
from spark_klog.records.contract import NO_TIMESTAMP_TYPE, Headers
from spark_klog.records.formats.batch import Header, check_crc, iter_batches
from spark_klog.records.formats.message_set import MessageHeader
from spark_klog.records.reading.reader import records_of

#: Bytes of the first fetch, and how much larger the next one is: for headers, and for the first record.
_HEADERS_BYTES, _HEADERS_GROWTH = 64 * 1024, 4
_RECORD_BYTES, _RECORD_GROWTH = 16 * 1024, 8
#: Of one request: a connection keeps the memory of its largest answer. How many requests, about, are made within
#: request.timeout.ms: brokers may be far away.
_REQUEST_BYTES, _REQUESTS = 1 << 20, 64
_Found = TypeVar("_Found")


def record_sizes(cluster: Cluster, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, float]:
    """Estimate the compressed bytes per offset after the given offsets, from the first batches.

    Partitions without records there are left out. Raises what `Cluster.attempt` raises.
    """

    def size(headers: list[Header], offset: int) -> float:
        is_wrapper = isinstance(headers[0], MessageHeader) and headers[0].codec_id
        first = offset if is_wrapper else headers[0].base_offset  # a compressed message has only its last offset
        return sum(header.size for header in headers) / max(1, headers[-1].next_offset - first)

    sampled = _sample(cluster, offsets, _HEADERS_BYTES, _HEADERS_GROWTH, _headers)
    return {key: size(headers, offsets[key]) for key, headers in sampled.items() if headers}


def timestamp_types(cluster: Cluster, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """The timestamp type (see `records.contract`) of the batch at each offset; partitions without one are left out."""
    sampled = _sample(cluster, offsets, _HEADERS_BYTES, _HEADERS_GROWTH, _headers)
    return {key: headers[0].timestamp_type for key, headers in sampled.items() if headers}


def next_timestamps(cluster: Cluster, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
    """The timestamp (ms) of the first data record at or after each partition's offset.

    None if the record has no timestamp or can't be read; partitions without such a record are left out. Raises what
    `Cluster.attempt` raises.
    """
    return _sample(cluster, offsets, _RECORD_BYTES, _RECORD_GROWTH, _first_timestamp)


def first_headers(
    cluster: Cluster, offsets: Mapping[TopicPartition, int], most: int = 20
) -> Iterator[tuple[Headers, str, int, int]]:
    """The headers of the first records from each partition's offset on, at most so many, with topic, partition, offset.

    Partitions whose records can't be read are left out. Raises what `Cluster.attempt` raises.
    """

    def read(fetched: Fetched | KlogError) -> list[tuple[Headers, str, int, int]] | _Later | None:
        records: list[tuple[Headers, str, int, int]] = []
        with suppress(DecodeError):
            for header, batch in iter_batches(b"" if isinstance(fetched, KlogError) else fetched.data):
                for record in () if header.is_control else records_of(header, batch):
                    if record.offset >= fetched.offset and len(records) < most:  # type: ignore[union-attr]
                        records.append((record.headers, fetched.topic, fetched.partition, record.offset))  # type: ignore[union-attr]
        return records

    for sampled in _sample(cluster, offsets, _RECORD_BYTES, _RECORD_GROWTH, read).values():
        yield from sampled or ()


class _Later(NamedTuple):
    """Nothing was found before this offset."""

    offset: int


def _sample(
    cluster: Cluster,
    offsets: Mapping[TopicPartition, int],
    size: int,
    growth: int,
    read: Callable[[Fetched | KlogError], _Found | _Later | None],
) -> dict[TopicPartition, _Found | None]:
    """What `read` finds in the first bytes after each offset: `size` of them, or more if no batch fits.

    None if it finds nothing, or if the largest fetch holds no batch. Partitions without records are left out.
    """
    samples: dict[TopicPartition, _Found | None] = {}
    rest, largest = dict(offsets), max(size, cluster.config.partition_fetch_bytes)

    def read_each(keys: Sequence[TopicPartition]) -> dict[TopicPartition, _Found | _Later | None]:
        fetches = _small_fetch(cluster, {key: rest[key] for key in keys}, size)
        return {key: _Later(rest[key]) if isinstance(fetched, Larger) else read(fetched) for key, fetched in fetches}

    while rest:
        keys, most = list(rest), _REQUESTS * _at_once(size)
        answers: dict[TopicPartition, _Found | _Later | None] = {}
        for start in range(0, len(keys), most):
            answers |= cluster.attempt(partial(read_each, keys[start : start + most]))
        samples |= {key: fetched for key, fetched in answers.items() if not isinstance(fetched, _Later)}
        following = {key: fetched.offset for key, fetched in answers.items() if isinstance(fetched, _Later)}
        too_large = [key for key, offset in following.items() if offset == rest[key]]
        if size == largest:
            samples |= dict.fromkeys(too_large)
            following = {key: offset for key, offset in following.items() if offset > rest[key]}
        rest = following
        if too_large:
            size = min(growth * size, largest)
    return samples


def _headers(fetched: Fetched | KlogError) -> list[Header] | None:
    """The headers of the batches; the real fetch will report errors."""
    if isinstance(fetched, Fetched):
        with suppress(DecodeError):
            return [header for header, _ in iter_batches(fetched.data)]
    return None


def _first_timestamp(fetched: Fetched | KlogError) -> int | _Later | None:
    """The timestamp of the first data record at or after the offset that was asked for; None if it can't be read."""
    if isinstance(fetched, KlogError):
        return None
    try:
        for header, batch in iter_batches(fetched.data):
            check_crc(header, batch)
            for record in () if header.is_control else records_of(header, batch):
                if record.offset >= fetched.offset:
                    has_time = record.timestamp_type != NO_TIMESTAMP_TYPE and record.timestamp >= 0
                    return record.timestamp if has_time else None
    except DecodeError:
        return None
    return _Later(fetched.next_offset)


def _at_once(size: int) -> int:
    """How many partitions a request asks for `size` bytes each."""
    return max(1, _REQUEST_BYTES // size)


def _in_parts(leaders: Mapping[int, list[TopicPartition]], at_once: int) -> Iterator[tuple[int, list[TopicPartition]]]:
    for node, keys in leaders.items():
        for start in range(0, len(keys), at_once):
            yield node, keys[start : start + at_once]


def _small_fetch(
    cluster: Cluster, offsets: Mapping[TopicPartition, int], size: int
) -> Iterator[tuple[TopicPartition, Fetched | Larger | KlogError]]:
    """Yield what up to `size` bytes of each partition hold, or its error; each is valid until the next one.

    `Larger` if the first batch does not fit: Apache Kafka returns such a batch for the first partition of a request
    only. Partitions without a leader, or without records, are left out. Use it within `Cluster.attempt`: it raises what
    `Cluster.connection` raises.
    """
    leaders, _ = cluster.by_leader(offsets)
    limits = Limits(size, cluster.config.response_max_bytes, is_shared=True)
    for node, keys in _in_parts(leaders, _at_once(size)):
        wanted = {key: FetchParameters(offsets[key], size) for key in keys}
        connection = cluster.connection(node)
        fetch = FetchInFlight(cluster, connection, wanted, max_wait_ms=0, isolation_level=READ_UNCOMMITTED)
        for key, entry in fetch.entries().items():
            if not entry["error_code"] and offsets[key] >= entry["high_watermark"]:
                continue
            try:
                yield key, read_entry(key, entry, offsets[key], limits) or Larger(size)
            except KlogError as error:
                yield key, error
