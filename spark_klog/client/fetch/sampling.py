"""Sample records: a small fetch from each partition, with one request per broker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial

from spark_klog.base.names import TopicPartition
from spark_klog.client.answers import check_code
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.entries import (
    Fetched,
    FetchParameters,
    Larger,
    Limits,
    entries_of,
    read_entry,
    topics_to_fetch,
)
from spark_klog.errors import DecodeError, KlogError
from spark_klog.protocol.apis import FETCH
from spark_klog.records.contract import NO_TIMESTAMP_TYPE, Record
from spark_klog.records.formats.batch import Header, check_crc, iter_batches
from spark_klog.records.formats.message_set import MessageHeader
from spark_klog.records.reading.reader import records_of

#: Bytes of the first fetch, and how much larger the next one is: for headers, and for the first record.
_HEADERS_BYTES, _HEADERS_GROWTH = 64 * 1024, 4
_RECORD_BYTES, _RECORD_GROWTH = 16 * 1024, 8


def record_sizes(cluster: Cluster, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, float]:
    """Estimate the compressed bytes per offset after the given offsets, from the first batches.

    Partitions without records there are left out. Raises what `Cluster.attempt` raises.
    """
    return {key: _record_size(headers, offsets[key]) for key, headers in _sample(cluster, offsets).items()}


def timestamp_types(cluster: Cluster, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """The timestamp type (see `records.contract`) of the batch at each offset; partitions without one are left out."""
    return {key: headers[0].timestamp_type for key, headers in _sample(cluster, offsets).items()}


def _record_size(headers: list[Header], offset: int) -> float:
    is_wrapper = isinstance(headers[0], MessageHeader) and headers[0].codec_id
    first = offset if is_wrapper else headers[0].base_offset  # a compressed message has only its last offset
    return sum(header.size for header in headers) / max(1, headers[-1].next_offset - first)


def _sample(cluster: Cluster, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, list[Header]]:
    """The headers of a few batches from each offset on; partitions without any are left out."""
    found: dict[TopicPartition, list[Header]] = {}
    rest, size, largest = dict(offsets), _HEADERS_BYTES, max(_HEADERS_BYTES, cluster.config.partition_fetch_bytes)
    while rest:
        answer = cluster.attempt(partial(_headers, cluster, rest, size))
        found |= {key: headers for key, headers in answer.items() if headers}
        rest = {key: offsets[key] for key, headers in answer.items() if not headers}
        if size == largest:
            break
        size = min(_HEADERS_GROWTH * size, largest)
    return found


def _headers(cluster: Cluster, offsets: Mapping[TopicPartition, int], size: int) -> dict[TopicPartition, list[Header]]:
    """The headers in the first `size` bytes of each partition that has records; [] if the first batch is larger.

    Partitions that fail are left out: the real fetch will report that.
    """
    found: dict[TopicPartition, list[Header]] = {}
    for key, fetched in _small_fetch(cluster, offsets, size):
        if isinstance(fetched, Larger):
            found[key] = []
        elif isinstance(fetched, Fetched):
            with suppress(DecodeError):
                found[key] = [header for header, _ in iter_batches(fetched.data)]
    return found


def _small_fetch(
    cluster: Cluster, offsets: Mapping[TopicPartition, int], size: int
) -> Iterator[tuple[TopicPartition, Fetched | Larger | KlogError]]:
    """Yield what up to `size` bytes of each partition hold, or its error; each is valid until the next one.

    `Larger` if the first batch does not fit: Apache Kafka returns such a batch for the first partition of a request
    only. Partitions without a leader, or without records, are left out. Use it within `Cluster.attempt`: it raises what
    `Cluster.connection` raises.
    """
    leaders, _ = cluster.by_leader(offsets)
    for node, wanted in leaders.items():
        asked = topics_to_fetch({key: FetchParameters(offsets[key], size) for key in wanted})
        request = {"max_wait_ms": 0, "max_bytes": cluster.config.fetch_max_bytes, "topics": asked}
        answer = cluster.connection(node).request(FETCH, request, deadline=cluster.deadline())
        check_code(FETCH, answer["error_code"], f"fetch from broker {node}")
        limits = Limits(size, cluster.config.response_max_bytes, is_shared=True)
        for key, entry in entries_of(answer, wanted).items():
            if not entry["error_code"] and offsets[key] >= entry["high_watermark"]:
                continue
            try:
                yield key, read_entry(key, entry, offsets[key], limits) or Larger(size)
            except KlogError as error:
                yield key, error


def next_timestamps(cluster: Cluster, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
    """The timestamp (ms) of the first data record at or after each partition's offset.

    None if the record has no timestamp or can't be read; partitions without such a record are left out. Raises what
    `Cluster.attempt` raises.
    """
    found: dict[TopicPartition, int | None] = {}
    rest, size = dict(offsets), _RECORD_BYTES
    largest = max(_RECORD_BYTES, cluster.config.partition_fetch_bytes)
    while rest:
        times, following = cluster.attempt(partial(_first_timestamps, cluster, rest, size))
        found |= times
        is_larger = any(offset == rest[key] for key, offset in following.items())
        if is_larger and size == largest:
            found |= {key: None for key, offset in following.items() if offset == rest[key]}
            following = {key: offset for key, offset in following.items() if offset > rest[key]}
        rest = following
        if is_larger:
            size = min(_RECORD_GROWTH * size, largest)
    return found


def _first_timestamps(
    cluster: Cluster, offsets: Mapping[TopicPartition, int], size: int
) -> tuple[dict[TopicPartition, int | None], dict[TopicPartition, int]]:
    """The timestamps as of `next_timestamps`, and where to go on in partitions whose first record was not there."""
    times: dict[TopicPartition, int | None] = {}
    following: dict[TopicPartition, int] = {}
    for key, fetched in _small_fetch(cluster, offsets, size):
        if isinstance(fetched, Larger):
            following[key] = offsets[key]
            continue
        times[key] = None
        if isinstance(fetched, Fetched):
            try:
                record = _first_record(fetched)
            except DecodeError:
                continue
            if record is None:
                del times[key]
                following[key] = fetched.next_offset
            elif record.timestamp_type != NO_TIMESTAMP_TYPE:
                times[key] = record.timestamp
    return times, following


def _first_record(fetched: Fetched) -> Record | None:
    """The first data record at or after the offset that was asked for; `DecodeError`."""
    for header, batch in iter_batches(fetched.data):
        check_crc(header, batch)
        for record in () if header.is_control else records_of(header, batch):
            if record.offset >= fetched.offset:
                return record
    return None
