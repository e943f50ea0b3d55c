"""Reference implementation of `scan_batches`: headers, checksums and index entries of a run of batches."""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct

from spark_klog.errors import DecodeError
from spark_klog.records.contract import BatchRun, IndexState, IndexTarget
from spark_klog.records.formats.batch import Header, check_crc, read_header, whole_batch_size
from spark_klog.records.formats.batch_v2 import BatchHeader, set_base_offset
from spark_klog.wire.primitives import Buffer

#: The entries of a segment's indexes.
OFFSET_ENTRY, TIME_ENTRY = Struct(">ii"), Struct(">qi")
#: Indexes store positions, and offsets relative to the segment's base, as INT32.
MAX_RELATIVE = 0x7FFFFFFF


def scan_batches(
    data: Buffer,
    position: int,
    state: IndexState,
    target: IndexTarget,
    next_offset: int,
    leader_epoch: int | None,
) -> BatchRun:
    """See `contract.Kernel.scan_batches`."""
    view = memoryview(data)
    base_offset, start, _ = target
    found: list[tuple[int, Header]] = []
    at, following = position, next_offset
    while True:
        try:
            size = whole_batch_size(view, at)
            header = None if size is None else read_header(view, at)
            if not isinstance(header, BatchHeader):
                break
            batch = view[at : at + header.size]
            check_crc(header, batch)
        except DecodeError:
            break
        first = header.base_offset if leader_epoch is None else following
        last = first + header.last_offset_delta
        if first < following or last - base_offset > MAX_RELATIVE or start + at > MAX_RELATIVE:
            break
        if leader_epoch is not None:
            if header.count != header.last_offset_delta + 1:
                break
            set_base_offset(batch, first, leader_epoch)
            header = read_header(view, at)
        found.append((at, header))
        at += header.size
        following = last + 1
    return run_of(found, position, state, target, next_offset)


def run_of(
    batches: Iterable[tuple[int, Header]], position: int, state: IndexState, target: IndexTarget, next_offset: int
) -> BatchRun:
    """The run of these batches, of any magic: (position in the data, header) of each, the first at `position`."""
    since, timestamp, timestamp_offset, indexed = state
    base_offset, start, interval = target
    largest = 0
    offsets, times, producers = bytearray(), bytearray(), []
    for at, header in batches:
        if isinstance(header, BatchHeader) and header.producer_id >= 0:
            producers.append(at)
        # a base offset that is damaged may be any: no checksum covers it
        has_entry = 0 <= header.last_offset - base_offset <= MAX_RELATIVE
        if header.max_timestamp > timestamp and has_entry:
            timestamp, timestamp_offset = header.max_timestamp, header.last_offset
        if since > interval and has_entry:
            offsets += OFFSET_ENTRY.pack(header.last_offset - base_offset, start + at)
            if timestamp > indexed:
                times += TIME_ENTRY.pack(timestamp, timestamp_offset - base_offset)
                indexed = timestamp
            since = 0
        since += header.size
        largest = max(largest, header.size)
        position, next_offset = at + header.size, header.next_offset
    after = IndexState(since, timestamp, timestamp_offset, indexed)
    return BatchRun(position, next_offset, largest, after, bytes(offsets), bytes(times), producers)
