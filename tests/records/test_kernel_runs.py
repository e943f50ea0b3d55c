"""Runs of batches that a kernel reads at once; reading gives the same with and without them."""

from __future__ import annotations

import random

import pytest

from spark_klog.errors import CorruptBatchError, DecodeError
from spark_klog.records.contract import COLUMNS, Kernel
from spark_klog.records.formats.batch_v2 import build_batch
from spark_klog.records.formats.message_set import build_message
from spark_klog.records.reading.reader import BadBatch, RecordReader
from spark_klog.wire.codecs import codec_by_name
from tests.support.available_kernels import KERNELS
from tests.support.checker.record_model import Row, encode_rows, expected_lists, to_lists

ALL = frozenset(COLUMNS)
TIME = 1_700_000_000_000
MANY = 1 << 62


needs_native = pytest.mark.skipif(len(KERNELS) == 1, reason="the native kernel was not built")


def rows_of(number: int, count: int = 3) -> list[Row]:
    """The records of batch `number`, which has ten offsets, so that there are gaps."""
    return [Row(10 * number + index, TIME + index, b"k", b"%d" % number) for index in range(count)]


def batch(number: int, codec: str = "none", attributes: int = 0, count: int = 3) -> bytes:
    rows = rows_of(number, count)
    return build_batch(
        encode_rows(rows, 10 * number, TIME),
        count,
        base_timestamp=TIME,
        max_timestamp=TIME + count,
        codec=codec_by_name(codec),
        attributes=attributes,
        base_offset=10 * number,
        last_offset_delta=9,
    )


def changed(data: bytes, position: int) -> bytes:
    result = bytearray(data)
    result[position] ^= 1
    return bytes(result)


PLAIN = [batch(number) for number in range(4)]
SIZE = len(PLAIN[0])


def run(data: bytes, position: int = 0, first: int = 0, end: int = MANY, rows: int = MANY, size: int = MANY) -> tuple:  # type: ignore[type-arg]
    """Read a run with the native kernel: (its end, the offset after it, the columns)."""
    builder = KERNELS[1].builder(ALL)
    ended, next_offset = builder.append_batches(memoryview(data), position, first, end, rows, size)
    return ended, next_offset, to_lists(builder.finish())


def test_the_reference_takes_no_runs() -> None:
    builder = KERNELS[0].builder(ALL)
    assert builder.append_batches(b"".join(PLAIN), 0, 7, MANY, MANY, MANY) == (0, 7)
    assert builder.rows == 0


@needs_native
def test_a_run_of_plain_batches() -> None:
    wanted = [row for number in range(4) for row in rows_of(number)]
    assert run(b"".join(PLAIN)) == (4 * SIZE, 40, expected_lists(wanted))
    assert run(b"".join(PLAIN), 2 * SIZE) == (4 * SIZE, 40, expected_lists(wanted[6:]))
    for position in (1, SIZE - 1, 4 * SIZE, 4 * SIZE + 1, 1 << 62):
        assert run(b"".join(PLAIN), position) == (position, 0, expected_lists([]))


@needs_native
def test_log_append_time_and_a_delete_horizon_are_plain() -> None:
    assert run(batch(0, attributes=0x08))[2] == expected_lists(rows_of(0), append_time=TIME + 3)
    assert run(batch(0, attributes=0x40))[2] == expected_lists(rows_of(0))


OTHERS = {
    "codec": batch(2, "gzip"),
    "transactional": batch(2, attributes=0x10),
    "control": batch(2, attributes=0x30),
    "message": build_message(1, 20, TIME, b"k", b"v"),
    "wrong CRC": changed(batch(2), 30),
    "wrong value": changed(batch(2), SIZE - 2),
    "another magic": changed(batch(2), 16),
    "cut off": batch(2)[:-1],
    "cut off in the header": batch(2)[:40],
    "nothing": b"",
    "fewer records than it says": build_batch(b"", 3, base_timestamp=0, max_timestamp=0, base_offset=20),
    "more records than fit": build_batch(b"", 2**31 - 1, base_timestamp=0, max_timestamp=0, base_offset=20),
    "damaged record": build_batch(b"\x02\x00", 1, base_timestamp=0, max_timestamp=0, base_offset=20),
    "the last offset there can be": build_batch(b"", 0, base_timestamp=0, max_timestamp=0, base_offset=2**63 - 1),
    "negative last offset delta": build_batch(
        b"", 0, base_timestamp=0, max_timestamp=0, base_offset=20, last_offset_delta=-1
    ),
    "negative offset": build_batch(b"", 0, base_timestamp=0, max_timestamp=0, base_offset=-1),
}


@needs_native
@pytest.mark.parametrize("name", OTHERS)
def test_a_run_ends_before_what_is_not_plain_whole_and_sound(name: str) -> None:
    wanted = expected_lists([*rows_of(0), *rows_of(1)])
    assert run(PLAIN[0] + PLAIN[1] + OTHERS[name]) == (2 * SIZE, 20, wanted)
    if name not in ("cut off", "nothing"):
        assert run(PLAIN[0] + PLAIN[1] + OTHERS[name] + PLAIN[3]) == (2 * SIZE, 20, wanted)


@needs_native
def test_ranges_of_a_run() -> None:
    data = b"".join(PLAIN)
    rows = [row for number in range(4) for row in rows_of(number)]
    for first in (0, 1, 3, 9, 10, 12, 25, 40):
        for end in (1, 2, 9, 10, 11, 20, 21, 31, 40, 41):
            ended, next_offset, columns = run(data, 0, first, end)
            assert columns == expected_lists([row for row in rows if first <= row.offset < end])
            batches = 0 if first >= end else min(4, (end + 9) // 10)
            assert (ended, next_offset) == (batches * SIZE, 10 * batches if batches else first)


@needs_native
def test_a_run_ends_when_there_is_enough() -> None:
    data = b"".join(PLAIN)
    for rows, batches in ((0, 0), (1, 1), (3, 1), (4, 2), (12, 4)):
        assert run(data, rows=rows)[0] == batches * SIZE
    for size, batches in ((0, 0), (1, 1), (6, 1), (7, 2), (1000, 4)):
        assert run(data, size=size)[0] == batches * SIZE


@pytest.mark.parametrize("kernel", KERNELS, ids=[kernel.name for kernel in KERNELS])
def test_errors_come_from_the_batch_that_has_them(kernel: Kernel) -> None:
    for name, error in (("wrong CRC", CorruptBatchError), ("damaged record", DecodeError)):
        reader = RecordReader(ALL, kernel=kernel)
        with pytest.raises(error):
            list(reader.read(PLAIN[0] + PLAIN[1] + OTHERS[name], 0, MANY))
        assert to_lists(reader.finish()) == expected_lists([*rows_of(0), *rows_of(1)])


def read(kernel: Kernel, data: bytes, span: tuple[int, int], enough: tuple[int, int], pass_over: bool) -> object:
    """Read data: (the error's class, the bad batches' offsets and the columns in order, the last columns)."""
    rows, size = enough
    reader = RecordReader(ALL, kernel=kernel, rows=rows, size=size, limit=1 << 20, yields_bad=pass_over)
    parts: list[object] = []
    error: type[DecodeError] | None = None
    try:
        for part in reader.read(data, *span):
            parts.append(part.offset if isinstance(part, BadBatch) else to_lists(part))
    except DecodeError as caught:
        error = type(caught)
    return error, parts, to_lists(reader.finish())


@needs_native
def test_reading_is_the_same_in_both_kernels() -> None:
    source = random.Random(8)
    pieces = [*PLAIN, *OTHERS.values(), batch(5), batch(6, "lz4"), batch(7, count=1), batch(8, count=0)]
    for _ in range(3000):
        data = b"".join(source.choices(pieces, k=source.randrange(1, 6)))
        span = source.choice([(0, MANY), (source.randrange(40), source.randrange(90))])
        enough = source.choice([(MANY, MANY), (4, MANY), (MANY, 7)])
        for pass_over in (False, True):
            first, second = (read(kernel, data, span, enough, pass_over) for kernel in KERNELS)
            assert first == second
