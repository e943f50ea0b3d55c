"""Timestamps of the next records to read, found by small fetches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.sampling import small_fetch
from spark_klog.errors import DecodeError
from spark_klog.protocol.codec import Message
from spark_klog.records.contract import NO_TIMESTAMP_TYPE
from spark_klog.records.formats.batch import check_crc, iter_batches
from spark_klog.records.reading.reader import records_of

_FIRST_BYTES = 16 * 1024
_GROWTH = 8


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
        for key, seen in cluster.attempt(partial(_ask, cluster, rest, size)).items():
            if seen.is_found:
                found[key] = seen.timestamp
            elif seen.following is not None:
                if seen.following > rest[key] or size < largest:
                    following[key] = seen.following
                else:
                    found[key] = None
        if any(offset == rest[key] for key, offset in following.items()):
            size = min(_GROWTH * size, largest)  # the first batch is larger than the fetch
        rest = following
    return found


def _ask(cluster: Cluster, offsets: Mapping[TopicPartition, int], size: int) -> dict[TopicPartition, _Seen]:
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
