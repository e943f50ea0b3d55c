"""Batches with a damaged base offset: no checksum covers it, but neighbouring batches show the damage."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.errors import CorruptBatchError
from spark_klog.records.reading.offset_order import NO_END, End, OffsetOrder
from tests.support.available_kernels import KERNELS
from tests.support.brokers.bad_batches import Batch, batch, damaged, read, with_field

START, EACH, COUNT = 100, 10, 5
END = START + EACH * COUNT
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


def log(codec: str = "none") -> list[Batch]:
    return [batch(offset, EACH, codec=codec) for offset in range(START, END, EACH)]


def joined(batches: list[Batch]) -> bytes:
    return b"".join(item.data for item in batches)


def moved(good: Batch, offset: int) -> Batch:
    return with_field(good, ">q", 0, offset)


@settings(max_examples=300, deadline=None)
@given(
    which=st.integers(0, COUNT - 1),
    offset=st.one_of(INT64, st.integers(START - 30, END + 30)),
    codec=st.sampled_from(["none", "lz4"]),
)
def test_one_that_is_moved_is_bad_and_the_others_are_read(which: int, offset: int, codec: str) -> None:
    batches = log(codec)
    true = batches[which].offset
    if offset == true or (which == 0 and offset < true):
        return  # a log may begin with a gap, so nothing shows the damage
    batches[which] = moved(batches[which], offset)
    expected = [number for number in range(START, END) if not true <= number < true + EACH]
    for kernel in KERNELS:
        offsets, bad = read(kernel, batches, START, END, log_end=END)
        assert offsets == expected
        assert [(item.offset, bytes(item.data)) for item in bad] == [(offset, batches[which].data)]


@settings(max_examples=200, deadline=None)
@given(which=st.integers(0, COUNT - 1), offset=st.integers(START - 30, END + 30), cut=st.integers(2, COUNT))
def test_reading_goes_on_where_the_sound_ones_end(which: int, offset: int, cut: int) -> None:
    """Whatever part of the log a response has, only the damaged batch is left out."""
    batches = log()
    true = batches[which].offset
    if true - EACH < offset < true or (which == 0 and offset < true):
        return  # the first batch of a part may begin before the requested offset
    batches[which] = moved(batches[which], offset)
    position, reached, seen = 0, START, []
    data = joined(batches)
    size = len(batches[0].data)
    while position < len(data):
        part = data[position : position + cut * size]
        end = OffsetOrder(part, reached, END).end() or End(reached, len(part))
        some = [batches[(position + at) // size] for at in range(0, end.position, size)]
        offsets, _ = read(KERNELS[0], [item._replace(is_bad=False) for item in some], reached, END, log_end=END)
        seen += offsets
        position, reached = position + end.position, max(reached, end.offset)
    assert seen == [number for number in range(START, END) if offset == true or not true <= number < true + EACH]


@settings(max_examples=300, deadline=None)
@given(which=st.integers(0, COUNT - 3), offset=st.integers(START, 2 * END), first=st.integers(START, END - 1))
def test_a_range_that_begins_anywhere(which: int, offset: int, first: int) -> None:
    """A response begins with the first batch that ends after the requested offset by its header: maybe the moved one.

    Two more batches follow it: with one alone, nothing shows which of the two is wrong.
    """
    batches = log()
    true = batches[which].offset
    if offset <= true:
        return
    batches[which] = moved(batches[which], offset)
    ends = [(item.claim if item.is_bad else item.offset) + EACH for item in batches]
    answer = batches[next(index for index, end in enumerate(ends) if end > first) :]
    expected = [number for number in range(first, END) if not true <= number < true + EACH]
    assert read(KERNELS[0], answer, first, END, log_end=2 * END)[0] == expected
    reached = OffsetOrder(joined(answer), first, 2 * END).end()
    assert reached is not None
    assert reached.offset == END


def test_the_error_says_where_it_should_be() -> None:
    batches = log()
    batches[2] = moved(batches[2], 105)
    [error] = OffsetOrder(joined(batches), START, END).damaged.values()
    assert str(error) == "batch of offsets 105-114 has a wrong base offset: it must be after 119 and before 150"


def test_gaps_of_compaction_are_no_damage() -> None:
    batches = [batch(offset, EACH) for offset in (100, 130, 200)]
    order = OffsetOrder(joined(batches), 100, 300)
    assert order.damaged == {}
    assert order.end() == End(140, len(joined(batches[:2])))  # the last one is decided together with the batch after it
    assert OffsetOrder(joined(batches), 100, 210).end() == End(140, len(joined(batches[:2])))
    assert OffsetOrder(joined(batches[2:]), 140, 300).end() == End(210, len(batches[2].data))


def test_a_corrupt_one_may_say_anything_about_its_end() -> None:
    """The neighbour of a corrupt batch must not count as damaged."""
    batches = log()
    for delta in (2**31 - 1, 25, 12, 3):
        wrong = with_field(batches[1], ">i", 23, delta)
        found = OffsetOrder(joined([batches[0], wrong, *batches[2:]]), START, NO_END).damaged
        assert set(found) <= {len(batches[0].data)}
        assert all(isinstance(error, CorruptBatchError) for error in found.values())


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_messages(magic: int, codec: str) -> None:
    """Messages have their last offset only, which increases in an intact log."""
    batches = [batch(offset, EACH, magic, codec) for offset in range(START, END, EACH)]
    order = OffsetOrder(joined(batches), START, END)
    assert order.damaged == {}
    assert order.end() == End(END, len(joined(batches)))
    wrong = moved(batches[1], END + 100)
    whole, position = joined([batches[0], wrong, *batches[2:]]), len(batches[0].data)
    later = OffsetOrder(whole, START, NO_END)
    assert list(later.damaged) == [position]
    assert later.end() == End(END, len(whole))
    cut = joined([batches[0], wrong, batches[2]])
    # one wrapper after it does not decide which of the two is wrong; the other messages of the batch do
    expected = End(START + EACH, position) if codec == "gzip" else End(START + 3 * EACH, len(cut))
    assert OffsetOrder(cut, START, NO_END).end() == expected
    lower = joined([*batches[:2], moved(batches[2], START + 3), *batches[3:]])
    assert list(OffsetOrder(lower, START, END).damaged) == [len(joined(batches[:2]))]


def test_the_end_of_what_is_corrupt() -> None:
    batches = log()
    assert OffsetOrder(b"", START).end() is None
    assert OffsetOrder(damaged(batches[0]).data, START).end() is None
    last = joined([*batches[:-1], damaged(batches[-1])])
    assert OffsetOrder(last + b"\0" * 7, START).end() == End(END - EACH, len(last))


@settings(max_examples=200, deadline=None)
@given(
    gaps=st.lists(st.sampled_from([0, 0, 0, 0, 7, -3]), max_size=COUNT),
    flipped=st.lists(st.tuples(st.integers(0, COUNT - 1), st.integers(0, 60), st.integers(0, 7)), max_size=2),
    magic=st.sampled_from([None, None, 0, 1]),
    cut=st.integers(0, 90),
    offset=st.integers(START - 5, END),
    log_end=st.sampled_from([NO_END, END, END - 1, END + 100]),
)
def test_both_kernels_say_the_same(
    gaps: list[int], flipped: list[tuple[int, int, int]], magic: int | None, cut: int, offset: int, log_end: int
) -> None:
    """The native kernel looks at each header only if the batches are not in order."""
    first, batches = START, []
    for gap in gaps:
        first += gap
        batches.append(bytearray(batch(first, EACH).data))
        first += EACH
    for which, position, bit in flipped:
        if which < len(batches):
            batches[which][position] ^= 1 << bit
    data = b"".join(batches) + (batch(first, 1, magic=magic).data if magic is not None else b"")
    data = data[: len(data) - cut] if cut < len(data) else data

    def seen() -> tuple[object, ...]:
        order = OffsetOrder(data, offset, log_end)
        ends = order.end(), order.length, order.has_messages, order.last_leader_epoch
        return *ends, {position: str(error) for position, error in order.damaged.items()}

    with pytest.MonkeyPatch.context() as patch:
        found = []
        for kernel in KERNELS:
            patch.setenv("SPARK_KLOG_KERNEL", kernel.name)
            found.append(seen())
    assert found == found[:1] * len(KERNELS)


def test_batches_in_order_are_not_looked_at_one_by_one() -> None:
    native = KERNELS[-1]
    if native.name == "reference":
        pytest.skip("the native kernel was not built")
    data, size = joined(log()), len(log()[0].data)
    last = native.ordered_batches(data + b"\0" * 7, END)
    assert last == (END - START, END - EACH, 4 * size, size, END - EACH, END, -1, True)
    assert native.ordered_batches(data[:size], END) == (EACH, -1, 0, size, START, START + EACH, -1, True)
    wrong_last = native.ordered_batches(data[:-1] + b"?", END)
    assert wrong_last == (*last[:-1], False)
    assert native.ordered_batches(data, END - 1) is None
    assert native.ordered_batches(data[:-1], END) == (
        END - START - EACH,
        END - 2 * EACH,
        3 * size,
        size,
        *(130, 140),
        -1,
        True,
    )
    assert native.ordered_batches(b"", END) is native.ordered_batches(data[: size - 1], END) is None
    for wrong in (moved(log()[0], -1), moved(log()[0], START + 1), batch(START, 1, magic=1)):
        assert native.ordered_batches(joined([wrong, *log()[1:]]), END) is None
