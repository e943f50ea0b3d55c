"""Sample records: a small fetch from each partition, with one request per broker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

from spark_klog.client.answers import by_key, check_code
from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.fetch.ranges import entries_of
from spark_klog.errors import DecodeError
from spark_klog.protocol.apis import FETCH
from spark_klog.protocol.codec import Message
from spark_klog.records.contract import NO_TIMESTAMP_TYPE
from spark_klog.records.formats.batch import Header, check_crc, iter_batches
from spark_klog.records.formats.message_set import MessageHeader
from spark_klog.records.reading.reader import records_of

_SAMPLE_BYTES = 64 * 1024
_GROWTH = 4


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
    rest, size, largest = dict(offsets), _SAMPLE_BYTES, max(_SAMPLE_BYTES, cluster.config.partition_fetch_bytes)
    while rest:
        answer = cluster.attempt(partial(_ask, cluster, rest, size))
        found |= {key: headers for key, headers in answer.items() if headers}
        rest = {key: offsets[key] for key, headers in answer.items() if not headers}
        if size == largest:
            break
        size = min(_GROWTH * size, largest)
    return found


def _ask(cluster: Cluster, offsets: Mapping[TopicPartition, int], size: int) -> dict[TopicPartition, list[Header]]:
    """The headers in the first `size` bytes of each partition that has records; [] if the first batch is larger.

    Apache Kafka returns such a batch for the first partition of a request only.
    """
    found: dict[TopicPartition, list[Header]] = {}
    for key, entry in small_fetch(cluster, offsets, size):
        headers = _headers(entry)
        if headers is not None and offsets[key] < entry["high_watermark"]:
            found[key] = headers
    return found


def small_fetch(
    cluster: Cluster, offsets: Mapping[TopicPartition, int], size: int
) -> Iterator[tuple[TopicPartition, Message]]:
    """Yield the entries of Fetch responses for up to `size` bytes of each partition; each is valid until the next one.

    Use it within `Cluster.attempt`: it raises what `Cluster.connection` raises. Errors of a partition are in its entry;
    partitions without a leader are left out.
    """
    leaders, _ = cluster.by_leader(offsets)
    for node, topics in leaders.items():
        request = {
            "max_wait_ms": 0,
            "max_bytes": cluster.config.fetch_max_bytes,
            "topics": [
                {
                    "topic": topic,
                    "partitions": [
                        {
                            "partition": partition,
                            "fetch_offset": offsets[topic, partition],
                            "partition_max_bytes": size,
                        }
                        for partition in partitions
                    ],
                }
                for topic, partitions in topics.items()
            ],
        }
        answer = cluster.connection(node).request(FETCH, request, deadline=cluster.deadline())
        check_code(FETCH, answer["error_code"], f"fetch from broker {node}")
        wanted = [(topic, partition) for topic, partitions in topics.items() for partition in partitions]
        yield from by_key(FETCH, answer, entries_of(answer), wanted).items()


def _headers(entry: Message) -> list[Header] | None:
    """The batch headers of an entry; None if it has an error or can't be decoded, which the real fetch will report."""
    if entry["error_code"]:
        return None
    try:
        return [header for header, _ in iter_batches(entry["records"] or b"")]
    except DecodeError:
        return None


_FIRST_BYTES = 16 * 1024
_NEXT_RECORDS_GROWTH = 8


class _Seen(NamedTuple):
    """The result of a fetch: whether the record was found, its timestamp, and if not where to continue (None: end)."""

    is_found: bool
    timestamp: int | None
    following: int | None


_UNKNOWN, _AT_END = _Seen(True, None, None), _Seen(False, None, None)


def next_timestamps(cluster: Cluster, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
    """The timestamp (ms) of the first data record at or after each partition's offset.

    None if the record has no timestamp or can't be read; partitions without such a record are left out. Raises what
    `Cluster.attempt` raises.
    """
    found: dict[TopicPartition, int | None] = {}
    rest, size = dict(offsets), _FIRST_BYTES
    largest = max(_FIRST_BYTES, cluster.config.partition_fetch_bytes)
    while rest:
        following: dict[TopicPartition, int] = {}
        for key, seen in cluster.attempt(partial(_ask_of_next_records, cluster, rest, size)).items():
            if seen.is_found:
                found[key] = seen.timestamp
            elif seen.following is not None:
                if seen.following > rest[key] or size < largest:
                    following[key] = seen.following
                else:
                    found[key] = None
        if any(offset == rest[key] for key, offset in following.items()):
            size = min(_NEXT_RECORDS_GROWTH * size, largest)  # the first batch is larger than the fetch
        rest = following
    return found


def _ask_of_next_records(
    cluster: Cluster, offsets: Mapping[TopicPartition, int], size: int
) -> dict[TopicPartition, _Seen]:
    return {key: _look(entry, offsets[key]) for key, entry in small_fetch(cluster, offsets, size)}


def _look(entry: Message, offset: int) -> _Seen:
    if entry["error_code"]:
        return _UNKNOWN
    if offset >= entry["high_watermark"]:
        return _AT_END
    following = offset
    try:
        for header, batch in iter_batches(entry["records"] or b""):
            check_crc(header, batch)
            following = max(following, header.next_offset)
            for record in () if header.is_control else records_of(header, batch):
                if record.offset >= offset:
                    has_time = record.timestamp_type != NO_TIMESTAMP_TYPE
                    return _Seen(True, record.timestamp if has_time else None, None)
    except DecodeError:
        return _UNKNOWN
    return _Seen(False, None, following)
