"""The offset map against a dict."""

from __future__ import annotations

import ctypes
import re
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.errors import ConfigError
from spark_klog.log.compaction.passes import OffsetMap

SLOT = 24


@given(
    slots=st.integers(3, 40),
    load_factor=st.sampled_from([0.3, 0.9, 1.0]),
    puts=st.lists(st.tuples(st.binary(max_size=2), st.integers(0, 2**62)), max_size=80),
)
@settings(max_examples=200, deadline=None)
def test_as_a_dict_of_bounded_size(slots: int, load_factor: float, puts: list[tuple[bytes, int]]) -> None:
    offsets = OffsetMap(slots * SLOT + 5, load_factor)
    assert 1 <= offsets.capacity <= max(1, slots * load_factor)
    model: dict[bytes, int] = {}
    for key, offset in puts:
        fits = key in model or len(model) < offsets.capacity
        assert offsets.put(key, offset) == fits
        if fits:
            model[key] = offset
        assert len(offsets) == len(model)
    for key, _ in puts:
        assert offsets.get(memoryview(key)) == model.get(key, -1)
    offsets.clear()
    assert len(offsets) == 0
    assert all(offsets.get(key) == -1 for key, _ in puts)


def test_many_keys_fill_it_to_its_load_factor() -> None:
    offsets = OffsetMap(20_000 * SLOT)
    number = 0
    while offsets.put(b"key %d" % number, number):
        number += 1
    assert 0.89 * 20_000 < number == offsets.capacity == len(offsets) <= 0.9 * 20_000
    assert [offsets.get(b"key %d" % key) for key in range(number + 1)] == [*range(number), -1]


@pytest.mark.parametrize(
    ("memory", "load_factor", "message"),
    [
        (71, 0.9, "log.cleaner.dedupe.buffer.size to 72"),
        (0, 0.9, "too small"),
        (720, 0.0, "load factor"),
        (720, 1.1, "at most 1"),
    ],
)
def test_a_size_that_can_not_be(memory: int, load_factor: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OffsetMap(memory, load_factor)


def test_memory_that_is_not_used_is_not_touched() -> None:
    """Making or clearing a table of 128 MiB does not touch its memory, which would hold up all threads."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    offsets = OffsetMap(1 << 27)
    for _ in range(2):
        assert offsets.put(b"key", 1)
        assert resident() - before < 1 << 24
        offsets.clear()


def test_its_memory_may_be_in_large_pages() -> None:
    """Few systems have them for shared memory, whatever it is advised: sh of its flags."""
    offsets = OffsetMap(1 << 24)
    address = ctypes.addressof(ctypes.c_char.from_buffer(offsets.table))
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(bound, 16) for bound in bounds.groups())
        elif line.startswith("VmFlags:") and start <= address < end:
            flags = line.split()[1:]
    assert "sh" not in flags
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def test_the_memory_of_the_round_before_is_given_back_at_once() -> None:
    """`clear` unmaps the old table itself: while a deallocator does that, no other thread runs."""
    offsets = OffsetMap(1 << 12)
    offsets.put(b"k", 1)
    table = offsets.table
    offsets.clear()
    assert table.closed
    assert (len(offsets), offsets.get(b"k")) == (0, -1)
