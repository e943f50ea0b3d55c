"""Every available kernel against a model in plain Python."""

from __future__ import annotations

import itertools
import os
import random
import struct
import threading

import pytest
from hypothesis import given, settings, strategies as st
from kafka.partitioner.default import murmur2
from kafka.record.default_records import DefaultRecordBatch

from spark_klog.errors import ConfigError, DecodeError
from spark_klog.records import kernels
from spark_klog.records.contract import COLUMNS, BinaryColumn, HeadersColumn, Kernel, RecordColumns
from spark_klog.records.formats.batch_v2 import build_batch
from tests.support.available_kernels import KERNELS
from tests.support.checker.record_model import (
    Row,
    binary_column,
    encode_row,
    encode_rows,
    expected_lists,
    record_columns,
    to_lists,
    varint,
)

ALL = frozenset(COLUMNS)
EVERYTHING = (-(1 << 62), 1 << 62)
BASE_OFFSET, BASE_TIME = 1000, 1_700_000_000_000
ROWS = [
    Row(1000, BASE_TIME, b"key", b"value"),
    Row(1001, BASE_TIME + 5, None, b""),
    Row(1002, BASE_TIME - 70_000, b"", None, (("h", b"v"),)),
    Row(1005, BASE_TIME + 1, b"k" * 200, b"v" * 20_000, (("one", None), ("", b""), ("zwölf", b"\x00\xff"))),
    Row(1006, -1, None, None),
    *(Row(1010 + 3 * i, BASE_TIME + i, b"k%d" % i, b"v%d" % i if i % 3 else None) for i in range(20)),
]


@pytest.fixture(params=KERNELS, ids=[kernel.name for kernel in KERNELS])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return request.param


def _decode(
    kernel: Kernel,
    rows: list[Row],
    columns: frozenset[str] = ALL,
    span: tuple[int, int] = EVERYTHING,
    append_time: int | None = None,
) -> dict[str, list[object]]:
    builder = kernel.builder(columns)
    body = encode_rows(rows, BASE_OFFSET, BASE_TIME)
    builder.append(body, len(rows), BASE_OFFSET, BASE_TIME, append_time, *span)
    return to_lists(builder.finish())


def test_all_columns(kernel: Kernel) -> None:
    assert _decode(kernel, ROWS) == expected_lists(ROWS)


@pytest.mark.parametrize("rows", [ROWS, [row._replace(key=None) for row in ROWS]], ids=["some", "all null"])
def test_objects_of_some_rows(kernel: Kernel, rows: list[Row]) -> None:
    builder = kernel.builder(ALL)
    builder.append(encode_rows(rows, BASE_OFFSET, BASE_TIME), len(rows), BASE_OFFSET, BASE_TIME, None, *EVERYTHING)
    columns = builder.finish()
    assert columns.key is not None
    assert columns.value is not None
    assert columns.headers is not None
    for start, stop in itertools.combinations_with_replacement(range(len(rows) + 1), 2):
        part = rows[start:stop]
        assert columns.key.values(start, stop) == [row.key for row in part]
        assert columns.value.values(start, stop) == [row.value for row in part]
        assert columns.headers.rows(start, stop) == [row.headers for row in part]
    assert columns.key.values() == [row.key for row in rows]


@pytest.mark.parametrize("size", range(len(COLUMNS) + 1))
def test_subsets_of_columns(kernel: Kernel, size: int) -> None:
    for names in itertools.combinations(COLUMNS, size):
        expected = {name: values for name, values in expected_lists(ROWS).items() if name in names}
        assert _decode(kernel, ROWS, frozenset(names)) == expected


def test_log_append_time(kernel: Kernel) -> None:
    assert _decode(kernel, ROWS, append_time=123) == expected_lists(ROWS, append_time=123)


def test_ranges_of_offsets(kernel: Kernel) -> None:
    edges = [0, 999, 1000, 1001, 1003, 1005, 1006, 1010, 1067, 1068, 1 << 40]
    for first, end in itertools.product(edges, edges):
        wanted = [row for row in ROWS if first <= row.offset < end]
        assert _decode(kernel, ROWS, span=(first, end)) == expected_lists(wanted)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_body_of_any_buffer(kernel: Kernel, kind: type) -> None:
    builder = kernel.builder(ALL)
    body = kind(b"xx" + encode_rows(ROWS, BASE_OFFSET, BASE_TIME))[2:]
    builder.append(body, len(ROWS), BASE_OFFSET, BASE_TIME, None, *EVERYTHING)
    assert to_lists(builder.finish()) == expected_lists(ROWS)


def test_many_batches_then_finish_then_more(kernel: Kernel) -> None:
    builder = kernel.builder(ALL)
    assert (builder.rows, builder.size) == (0, 0)
    for start in range(0, len(ROWS), 4):
        part = ROWS[start : start + 4]
        body = encode_rows(part, part[0].offset, part[0].timestamp)
        builder.append(body, len(part), part[0].offset, part[0].timestamp, None, *EVERYTHING)
        seen = ROWS[: start + 4]
        assert builder.rows == len(seen)
        assert builder.size == sum(len(row.key or b"") + len(row.value or b"") for row in seen)
    first = builder.finish()
    assert (builder.rows, builder.size) == (0, 0)
    builder.append(encode_rows(ROWS[:1], 1000, BASE_TIME), 1, 1000, BASE_TIME, None, *EVERYTHING)
    assert to_lists(builder.finish()) == expected_lists(ROWS[:1])
    assert to_lists(first) == expected_lists(ROWS)
    assert to_lists(builder.finish()) == expected_lists([])


def test_no_records(kernel: Kernel) -> None:
    builder = kernel.builder(ALL)
    builder.append(b"", 0, 0, 0, None, *EVERYTHING)
    columns = builder.finish()
    assert columns.count == 0
    assert to_lists(columns) == expected_lists([])


def test_no_nulls_need_no_bitmap(kernel: Kernel) -> None:
    builder = kernel.builder(frozenset({"key", "value"}))
    builder.append(encode_rows(ROWS[:1], 1000, BASE_TIME), 1, 1000, BASE_TIME, None, *EVERYTHING)
    columns = builder.finish()
    assert columns.key is not None
    assert (columns.key.validity, columns.key.null_count) == (None, 0)
    assert columns.headers is columns.offset is columns.timestamp is columns.timestamp_type is None


def _record(content: bytes) -> bytes:
    return varint(len(content)) + content


_GOOD = encode_row(ROWS[0], BASE_OFFSET, BASE_TIME)
# attributes, deltas of 0, then the fields of each case
BAD_RECORDS = {
    "empty": _record(b""),
    "negative length": varint(-1) + b"\x00\x00\x00\x01\x01\x00",
    "length beyond the end": varint(100) + b"\x00\x00\x00\x01\x01\x00",
    "length too short": varint(5) + b"\x00\x00\x00\x01\x01\x00",
    "length too long": varint(7) + b"\x00\x00\x00\x01\x01\x00" + b"\x00",
    "key beyond the record": _record(b"\x00\x00\x00" + varint(50) + b"k\x01\x00"),
    "key of length -2": _record(b"\x00\x00\x00" + varint(-2) + b"\x01\x00"),
    "value beyond the record": _record(b"\x00\x00\x00\x01" + varint(2**31 - 1) + b"\x00"),
    "value of length -2": _record(b"\x00\x00\x00\x01" + varint(-2) + b"\x00"),
    "header count negative": _record(b"\x00\x00\x00\x01\x01" + varint(-1)),
    "header count huge": _record(b"\x00\x00\x00\x01\x01" + varint(2**31 - 1)),
    "header without a name": _record(b"\x00\x00\x00\x01\x01" + varint(1) + varint(-1) + b"\x01"),
    "header name beyond": _record(b"\x00\x00\x00\x01\x01" + varint(1) + varint(9) + b"n\x01"),
    "header value beyond": _record(b"\x00\x00\x00\x01\x01" + varint(1) + varint(1) + b"n" + varint(9)),
    "offset delta negative": _record(b"\x00\x00" + varint(-1) + b"\x01\x01\x00"),
    "offset delta of 2^31": _record(b"\x00\x00" + varint(2**31) + b"\x01\x01\x00"),
    "timestamp delta of 65 bits": _record(b"\x00" + b"\xff" * 9 + b"\x02" + b"\x00\x01\x01\x00"),
    "timestamp delta of 11 bytes": _record(b"\x00" + b"\x80" * 10 + b"\x00" + b"\x00\x01\x01\x00"),
    "varint without an end": b"\xff" * 30,
    "one byte left over": _GOOD + b"\x00",
    "nothing": b"",
}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"\xff", "\ufffd"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        (b"a\xe2\x82", "a\ufffd"),
        ("gr\u00fc\u00df \U0001f600".encode() + b"\x80", "gr\u00fc\u00df \U0001f600\ufffd"),
    ],
)
def test_header_names_that_are_not_utf8(kernel: Kernel, name: bytes, shown: str) -> None:
    """Names are decoded as in Java, since producers do not check them."""
    header = varint(1) + varint(len(name)) + name + varint(1) + b"v"
    body = _record(b"\x00\x00\x00\x01\x01" + header)
    builder = kernel.builder(ALL)
    builder.append(body, 1, 0, 0, None, 0, 1)
    assert to_lists(builder.finish())["headers"] == [((shown, b"v"),)]
    without = kernel.builder(frozenset({"offset"}))
    without.append(body, 1, 0, 0, None, 0, 1)
    assert without.rows == 1


@pytest.mark.parametrize("name", BAD_RECORDS)
@pytest.mark.parametrize("columns", [ALL, frozenset(), frozenset({"offset"}), frozenset({"headers"})], ids=len)
def test_bad_records_are_refused_and_nothing_is_added(kernel: Kernel, name: str, columns: frozenset[str]) -> None:
    builder = kernel.builder(columns)
    good = encode_rows(ROWS, BASE_OFFSET, BASE_TIME)
    builder.append(good, len(ROWS), BASE_OFFSET, BASE_TIME, None, *EVERYTHING)
    state = builder.rows, builder.size
    # also after good records, and if the range leaves the bad record out
    for prefix, count in ((b"", 1), (_GOOD * 3, 4)):
        for span in (EVERYTHING, (0, 1)):
            with pytest.raises(DecodeError):
                builder.append(prefix + BAD_RECORDS[name], count, BASE_OFFSET, BASE_TIME, None, *span)
            assert (builder.rows, builder.size) == state
    expected = {name: values for name, values in expected_lists(ROWS).items() if name in columns}
    assert to_lists(builder.finish()) == expected


def test_every_truncation_and_wrong_count_is_refused(kernel: Kernel) -> None:
    rows = ROWS[:3]
    body = encode_rows(rows, BASE_OFFSET, BASE_TIME)
    builder = kernel.builder(ALL)
    for size in range(len(body)):
        with pytest.raises(DecodeError):
            builder.append(body[:size], 3, BASE_OFFSET, BASE_TIME, None, *EVERYTHING)
    for count in (0, 1, 2, 4, 2**31 - 1):
        with pytest.raises(DecodeError):
            builder.append(body, count, BASE_OFFSET, BASE_TIME, None, *EVERYTHING)
    assert builder.rows == 0


def test_record_that_says_it_holds_the_next_one_too_is_refused(kernel: Kernel) -> None:
    inner = _record(b"\x00\x00\x00\x01\x01\x00")
    builder = kernel.builder(ALL)
    with pytest.raises(DecodeError):
        builder.append(varint(6 + len(inner)) + inner[1:] + inner, 2, 0, 0, None, *EVERYTHING)
    builder.append(inner + inner, 2, 0, 0, None, *EVERYTHING)
    assert builder.rows == 2


@pytest.mark.parametrize("delta", [2**63 - 1, -(2**63), 2**31, -(2**31) - 1, 0, -1])
def test_timestamps_of_64_bits_wrap(kernel: Kernel, delta: int) -> None:
    content = b"\x00" + varint(delta) + b"\x00\x01\x01\x00"
    builder = kernel.builder(ALL)
    builder.append(_record(content), 1, 0, BASE_TIME, None, *EVERYTHING)
    expected = struct.unpack("<q", struct.pack("<Q", (BASE_TIME + delta) % 2**64))[0]
    assert to_lists(builder.finish())["timestamp"] == [expected]


def test_largest_offsets(kernel: Kernel) -> None:
    content = b"\x00\x00" + varint(2**31 - 1) + b"\x01\x01\x00"
    base = 2**63 - 1 - 2**31
    builder = kernel.builder(ALL)
    builder.append(_record(content), 1, base, 0, None, 0, 2**63 - 1)
    assert to_lists(builder.finish())["offset"] == [2**63 - 2]


def test_a_negative_count_is_none(kernel: Kernel) -> None:
    builder = kernel.builder(ALL)
    builder.append(b"", -1, 0, 0, None, *EVERYTHING)
    with pytest.raises(DecodeError):
        builder.append(_GOOD, -1, BASE_OFFSET, BASE_TIME, None, *EVERYTHING)
    assert to_lists(builder.finish()) == expected_lists([])


@pytest.mark.parametrize("base", [0, 5, 2**63 - 10, 2**63 - 2**31])
def test_ranges_at_the_ends_of_64_bits(kernel: Kernel, base: int) -> None:
    deltas = [0, 1, 7, 2**31 - 1]
    body = b"".join(_record(b"\x00\x00" + varint(delta) + b"\x01\x01\x00") for delta in deltas)
    offsets = [base + delta for delta in deltas]
    for first, end in itertools.product([-(2**63), -1, 0, 1, 6, base + 1, 2**63 - 1], repeat=2):
        builder = kernel.builder(frozenset({"offset"}))
        builder.append(body, len(deltas), base, 0, None, first, end)
        wanted = [offset for offset in offsets if first <= offset < end]
        assert to_lists(builder.finish())["offset"] == wanted


def test_columns_keep_their_content_while_others_come_and_go(kernel: Kernel) -> None:
    """The native kernel reuses memory, but only that of columns without references."""
    builder = kernel.builder(ALL)
    held: list[tuple[int, RecordColumns]] = []
    for number in range(40):
        rows = [Row(index, number, b"%d" % number, bytes([number]) * 200, (("h", b"v"),)) for index in range(400)]
        builder.append(encode_rows(rows, 0, 0), len(rows), 0, 0, None, *EVERYTHING)
        held.append((number, builder.finish()))
        if number % 3:
            del held[number % len(held)]
    for number, columns in held:
        found = to_lists(columns)
        assert set(found["value"]) == {bytes([number]) * 200}
        assert set(found["timestamp"]) == {number}
        assert found["offset"] == list(range(400))


def test_a_part_of_a_buffer_keeps_all_of_it(kernel: Kernel) -> None:
    builder = kernel.builder(frozenset({"value"}))
    parts = []
    for number in range(20):
        rows = [Row(index, 0, None, bytes([number]) * 1000) for index in range(200)]
        builder.append(encode_rows(rows, 0, 0), len(rows), 0, 0, None, *EVERYTHING)
        columns = builder.finish()
        assert columns.value is not None
        parts.append(memoryview(columns.value.data)[1000:2000])
    assert [bytes(part) for part in parts] == [bytes([number]) * 1000 for number in range(20)]


def test_two_threads_at_one_builder_break_nothing(kernel: Kernel) -> None:
    rows = [Row(index, 0, None, b"x" * 100) for index in range(2000)]
    body = encode_rows(rows, 0, 0)
    builder = kernel.builder(frozenset({"value"}))
    added: list[int] = []

    def add() -> None:
        for _ in range(20):
            try:
                builder.append(body, len(rows), 0, 0, None, *EVERYTHING)
            except RuntimeError:
                continue
            added.append(1)

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builder.rows == len(added) * len(rows)
    assert to_lists(builder.finish())["value"] == [b"x" * 100] * len(added) * len(rows)


# ----- encode


def _kafka_rows(body: bytes, count: int, base: int, maximum: int) -> list[Row]:
    """The records of a body as kafka-python reads them; offsets count from 0."""
    batch = build_batch(body, count, base_timestamp=base, max_timestamp=maximum)
    return [
        Row(record.offset, record.timestamp, record.key, record.value, tuple(record.headers))
        for record in DefaultRecordBatch(batch)
    ]


@pytest.mark.parametrize("target", [1, 30, 100, 5000, 1 << 20])
def test_encode_piece_by_piece(kernel: Kernel, target: int) -> None:
    columns, start, pieces = record_columns(ROWS), 0, 0
    while start < len(ROWS):
        body, following, base, maximum = kernel.encode(columns, start, target)
        part = [row._replace(offset=index) for index, row in enumerate(ROWS[start:following])]
        assert part
        assert (base, maximum) == (part[0].timestamp, max(row.timestamp for row in part))
        assert bytes(body) == encode_rows(part, 0, base)
        assert _kafka_rows(bytes(body), len(part), base, maximum) == part
        # it stopped at the first record that reached the target
        assert following == len(ROWS) or len(body) >= target
        assert len(encode_rows(part[:-1], 0, base)) < target
        start, pieces = following, pieces + 1
    assert pieces == {1: len(ROWS), 1 << 20: 1}.get(target, pieces)


def test_encode_stops_where_the_target_is_reached_exactly(kernel: Kernel) -> None:
    rows = [Row(index, BASE_TIME, b"k", b"v") for index in range(4)]
    two = len(encode_rows(rows[:2], 0, BASE_TIME))
    for start, target, following in ((0, two, 2), (0, two + 1, 3), (1, two, 3), (3, two, 4)):
        assert kernel.encode(record_columns(rows), start, target)[1] == following


def test_encode_without_key_value_and_headers(kernel: Kernel) -> None:
    columns = RecordColumns(2, timestamp=struct.pack("<2q", 10, 7))
    assert kernel.encode(columns, 0, 1000) == (
        encode_rows([Row(0, 10), Row(1, 7)], 0, 10),
        2,
        10,
        10,
    )


def test_encode_of_slices_whose_offsets_do_not_begin_at_zero(kernel: Kernel) -> None:
    keys = BinaryColumn(struct.pack("<3i", 2, 3, 5), b"__abc__", None, 0)
    columns = RecordColumns(2, key=keys, timestamp=struct.pack("<2q", 0, 0))
    body, _, _, _ = kernel.encode(columns, 0, 1000)
    assert bytes(body) == encode_rows([Row(0, 0, b"a"), Row(1, 0, b"bc")], 0, 0)


def _ints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


# columns that Arrow never builds, but a wrong caller could
BAD_COLUMNS = {
    "an offset beyond the data": BinaryColumn(_ints(0, 4), b"abc", None, 0),
    "an offset far beyond the data": BinaryColumn(_ints(0, 2**31 - 1), b"abc", None, 0),
    "a negative offset": BinaryColumn(_ints(-1, 3), b"abc", None, 0),
    "offsets that go down": BinaryColumn(_ints(3, 0), b"abc", None, 0),
    "too few offsets": BinaryColumn(_ints(0), b"abc", None, 0),
    "no validity bits": BinaryColumn(_ints(0, 3), b"abc", b"", 1),
}


@pytest.mark.skipif(len(KERNELS) == 1, reason="the native kernel was not built")
@pytest.mark.parametrize("name", BAD_COLUMNS)
def test_the_native_kernel_reads_nothing_beyond_the_columns_buffers(name: str) -> None:
    native, column = KERNELS[1], BAD_COLUMNS[name]
    good = BinaryColumn(_ints(0, 1), b"n", None, 0)
    time = struct.pack("<q", 0)
    headers = [
        HeadersColumn(_ints(0, 1), None, 0, column, good, 1),
        HeadersColumn(_ints(0, 1), None, 0, good, column, 1),
        HeadersColumn(column.offsets, column.validity, 0, good, good, 1),
    ]
    for columns in (
        RecordColumns(1, key=column, timestamp=time),
        RecordColumns(1, value=column, timestamp=time),
        *(RecordColumns(1, timestamp=time, headers=entry) for entry in headers),
    ):
        with pytest.raises(ValueError, match="column"):
            native.encode(columns, 0, 100)
    with pytest.raises(ValueError, match="column"):
        native.partitions(column, 1, 4)


@pytest.mark.skipif(len(KERNELS) == 1, reason="the native kernel was not built")
def test_the_native_kernel_refuses_rows_that_are_not_there() -> None:
    native = KERNELS[1]
    columns = RecordColumns(1, timestamp=struct.pack("<q", 0))
    for row in (-1, 1, 2**62):
        with pytest.raises(IndexError, match="of 1"):
            native.encode(columns, row, 100)
    for count in (-1, 2, 2**31, 2**62):
        with pytest.raises((ValueError, IndexError)):
            native.encode(RecordColumns(count, timestamp=columns.timestamp), 0, 100)
    with pytest.raises(ValueError, match="timestamp"):
        native.encode(RecordColumns(1), 0, 100)
    with pytest.raises(ValueError, match="0 partitions"):
        native.partitions(BinaryColumn(_ints(0, 0), b"", None, 0), 1, 0)


_BYTES = st.none() | st.binary(max_size=40) | st.integers(60, 300).map(bytes)
_HEADERS = st.lists(st.tuples(st.text(max_size=5), _BYTES), max_size=3).map(tuple)
_ROWS = st.lists(st.tuples(st.integers(-1, 2**40), _BYTES, _BYTES, _HEADERS), min_size=1, max_size=30)


@settings(max_examples=80, deadline=None)
@given(_ROWS, st.integers(1, 2000), st.sets(st.sampled_from(COLUMNS)))
def test_encode_then_decode(values: list[tuple], target: int, names: set[str]) -> None:  # type: ignore[type-arg]
    rows = [Row(index, *value) for index, value in enumerate(values)]
    for kernel in KERNELS:
        columns, start = record_columns(rows), 0
        builder = kernel.builder(frozenset(names))
        while start < len(rows):
            body, following, base, _ = kernel.encode(columns, start, target)
            builder.append(body, following - start, start, base, None, 0, 1 << 62)
            start = following
        expected = {name: column for name, column in expected_lists(rows).items() if name in names}
        assert to_lists(builder.finish()) == expected


# ----- partitions

# org.apache.kafka.common.utils.UtilsTest
MURMUR2 = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


def _partitions(kernel: Kernel, keys: list[bytes | None], partitions: int) -> list[int]:
    column = binary_column(keys)
    return list(memoryview(kernel.partitions(column, len(keys), partitions)).cast("B").cast("i"))


@pytest.mark.parametrize("partitions", [1, 2, 7, 100, 2**31 - 1])
def test_partitions_of_kafkas_own_vectors(kernel: Kernel, partitions: int) -> None:
    expected = [(value & 0x7FFFFFFF) % partitions for value in MURMUR2.values()]
    assert _partitions(kernel, list(MURMUR2), partitions) == expected


def test_partitions_against_kafka_python(kernel: Kernel) -> None:
    source = random.Random(1)
    keys = [source.randbytes(size) for size in range(70) for _ in range(4)]
    assert _partitions(kernel, list(keys), 1009) == [(murmur2(key) & 0x7FFFFFFF) % 1009 for key in keys]


def test_null_keys_have_no_partition(kernel: Kernel) -> None:
    keys = [None, b"abc", None, b"", None]
    assert _partitions(kernel, keys, 10) == [-1, 479470107 % 10, -1, (murmur2(b"") & 0x7FFFFFFF) % 10, -1]
    assert _partitions(kernel, [], 10) == []


# ----- the choice of a kernel


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.environ.get("SPARK_KLOG_KERNEL") in (None, "", "auto", *(kernel.name for kernel in KERNELS))
    monkeypatch.setenv("SPARK_KLOG_KERNEL", "reference")
    assert kernels.load().name == "reference"
    monkeypatch.delenv("SPARK_KLOG_KERNEL")
    assert kernels.load().name == KERNELS[-1].name
    with pytest.raises(ConfigError, match="fastest"):
        kernels.load("fastest")
    if len(KERNELS) == 1:
        with pytest.raises(ConfigError, match="not built"):
            kernels.load("native")
