"""`scan_batches`: both kernels agree on any data, and with a walk that shares no code with them."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, strategies as st

from spark_klog.records import kernels
from spark_klog.records.contract import IndexState, Kernel
from spark_klog.wire.checksums import crc32c
from tests.support.brokers.batches import make_batch, walk

NATIVE, REFERENCE = kernels.load("native"), kernels.load("reference")
START = IndexState()
BASE = 1000


def batches(sizes: list[tuple[int, int, int]]) -> bytearray:
    """One batch for each (records, bytes of a value, timestamp); offsets from BASE on, with a gap after each batch."""
    data, offset = bytearray(), BASE
    for records, size, timestamp in sizes:
        batch = make_batch([(None, bytes(size))] * records, [timestamp] * records)
        struct.pack_into(">q", batch, 0, offset)
        data += batch
        offset += records + 2
    return data


SIZES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 300), st.integers(0, 50)), max_size=12)


def both(data: bytes | bytearray, *arguments: Any) -> Any:
    """Run both kernels, which must agree; returns the result and the changed data."""
    native, reference = bytearray(data), bytearray(data)
    found = NATIVE.scan_batches(native, *arguments)
    assert found == REFERENCE.scan_batches(reference, *arguments)
    assert native == reference
    return found, native


@given(SIZES, st.integers(0, 600), st.integers(0, 1 << 30))
def test_scan(sizes: list[tuple[int, int, int]], interval: int, position: int) -> None:
    data = batches(sizes)
    run, after = both(data, 0, START, (BASE, position, interval), BASE, None)
    assert after == data
    expected = list(walk(bytes(data)))
    assert run.end == len(data)
    assert run.next_offset == (expected[-1].last_offset + 1 if expected else BASE)
    assert run.largest == max((item.size for item in expected), default=0)
    offsets = times = b""
    since, largest, indexed = 0, (-1, -1), -1
    for item in expected:
        if item.max_timestamp > largest[0]:
            largest = item.max_timestamp, item.last_offset
        if since > interval:
            offsets += struct.pack(">ii", item.last_offset - BASE, position + item.position)
            if largest[0] > indexed:
                times += struct.pack(">qi", largest[0], largest[1] - BASE)
                indexed = largest[0]
            since = 0
        since += item.size
    assert (run.offset_entries, run.time_entries) == (offsets, times)
    assert run.state == (since, *largest, indexed)


@given(SIZES, st.integers(0, 1 << 40), st.integers(-1, 9))
def test_assigned_offsets_are_dense(sizes: list[tuple[int, int, int]], first: int, epoch: int) -> None:
    data = batches(sizes)
    run, after = both(data, 0, START, (first, 0, 4096), first, epoch)
    assert run.next_offset == first + sum(records for records, _, _ in sizes)
    offset, expected = first, bytearray()
    for item, (records, _, _) in zip(walk(bytes(data)), sizes, strict=True):
        batch = data[item.position : item.position + item.size]
        expected += struct.pack(">q", offset) + batch[8:12] + struct.pack(">i", epoch) + batch[16:]
        offset += records
    assert after == expected


@given(SIZES, st.data())
def test_a_run_ends_before_what_is_damaged(sizes: list[tuple[int, int, int]], source: st.DataObject) -> None:
    data = batches([(1, 10, 5), *sizes])
    place = source.draw(st.integers(0, len(data) - 1))
    data[place] ^= source.draw(st.integers(1, 255))
    for epoch in (None, 3):
        run, _ = both(data, 0, START, (0, 0, 0), 0, epoch)
        whole = [item for item in walk(bytes(batches([(1, 10, 5), *sizes]))) if item.position + item.size <= place]
        assert run.end >= sum(item.size for item in whole)
        if place not in range(run.end, len(data)):  # base offset and leader epoch are not in the checksum
            [item] = [
                item for item in walk(bytes(batches([(1, 10, 5), *sizes]))) if 0 <= place - item.position < item.size
            ]
            assert place - item.position < 8 or 12 <= place - item.position < 16


@pytest.mark.parametrize("kernel", [NATIVE, REFERENCE], ids=["native", "reference"])
def test_where_a_run_ends(kernel: Kernel) -> None:
    data = batches([(2, 10, 1), (2, 10, 1), (2, 10, 1)])
    size = len(data) // 3

    def end(data: bytes | bytearray, first: int = BASE, base: int = BASE, start: int = 0, position: int = 0) -> int:
        return kernel.scan_batches(bytearray(data), position, START, (base, start, 0), first, None).end

    assert end(data) == 3 * size
    assert end(data, position=size) == 3 * size
    assert end(data[:-1]) == 2 * size
    assert end(data, first=BASE + 1) == 0
    assert end(data, base=BASE + 1 - (1 << 31)) == 0
    assert end(data, base=BASE + 4 + 1 - (1 << 31)) == size
    assert end(data, start=(1 << 31) - 1) == size  # the second one's position does not fit into an index
    assert end(b"") == 0
    old = bytearray(data)
    old[size + 16] = 1  # magic
    assert end(old) == size
    more = bytearray(data)
    struct.pack_into(">i", more, 2 * size + 57, 3)  # count; the checksum is wrong now
    assert end(more) == 2 * size


def test_positions_of_producers() -> None:
    data = batches([(1, 10, 1)] * 3)
    size = len(data) // 3
    struct.pack_into(">q", data, size + 43, 7)
    crc = NATIVE.scan_batches(data, 0, START, (BASE, 0, 0), BASE, None)
    assert crc.end == size  # the checksum covers the id
    struct.pack_into(">I", data, size + 17, crc32c(bytes(data[size + 21 : 2 * size])))
    run, _ = both(data, 0, START, (BASE, 0, 0), BASE, None)
    assert (run.end, run.producers) == (3 * size, [size])
