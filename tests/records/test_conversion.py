"""Conversion between magics: kafka-python builds the batches of magic 2, and reads the results in every magic."""

from __future__ import annotations

import gzip
import itertools
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st
from kafka.codec import lz4_encode, lz4_encode_old_kafka, snappy_encode, zstd_encode
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.memory_records import MemoryRecords
from kafka.record.util import calc_crc32c

from spark_klog.errors import CorruptBatchError, DecodeError, ErrorCode, ProtocolError
from spark_klog.records.building import conversion
from spark_klog.records.building.conversion import Converted, batch_of, down_convert, up_convert
from spark_klog.wire.codecs import CODECS
from tests.support.brokers.batches import read_records

TIME, APPEND_TIME = 1_700_000_000_000, 1_800_000_000_000
NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
OLD_CODECS = [NONE, GZIP, SNAPPY, LZ4]
APPEND_BIT, TRANSACTIONAL, CONTROL = 0x08, 0x10, 0x20
ENCODE: dict[tuple[int, int], Callable[[bytes], bytes]] = {
    (0, GZIP): gzip.compress,
    (1, GZIP): gzip.compress,
    (0, SNAPPY): snappy_encode,
    (1, SNAPPY): snappy_encode,
    (0, LZ4): lz4_encode_old_kafka,
    (1, LZ4): lz4_encode,
}
Headers = tuple[tuple[str, "bytes | None"], ...]


class Row(NamedTuple):
    """A record; kafka-python's `timestamp` and its type are None in magic 0."""

    offset: int
    timestamp: int | None
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    kind: int | None = 0


ROWS = [
    Row(100, TIME, b"key", b"value", (("h", b"v"),)),
    Row(101, TIME + 50, None, b""),
    Row(104, TIME - 7, b"", None, (("one", None), ("two", b""))),
    Row(109, TIME + 1, None, None),
    Row(110, TIME, b"k" * 30, b"v" * 3000),
]
#: The number of headers in `ROWS`.
HEADERS = 3


def _old(rows: Sequence[Row], magic: int) -> list[Row]:
    """The rows as they are after conversion to magic 0 or 1."""
    if magic:
        return [row._replace(headers=()) for row in rows]
    return [row._replace(headers=(), timestamp=None, kind=None) for row in rows]


def _new(rows: Sequence[Row]) -> list[Row]:
    """The rows as they are after conversion to magic 2: a missing timestamp becomes -1."""
    return [row._replace(timestamp=-1, kind=0) if row.timestamp is None else row for row in rows]


def _numbered(rows: Sequence[Row]) -> list[Row]:
    """The rows with offsets from 0 on, as a producer's are after conversion to magic 2."""
    return [row._replace(offset=number) for number, row in enumerate(rows)]


def _appended(rows: Sequence[Row], time: int = APPEND_TIME) -> list[Row]:
    return [row._replace(timestamp=time, kind=1) for row in rows]


def _batch(rows: Sequence[Row] = ROWS, codec: int = NONE, attributes: int = 0, append_time: int | None = None) -> bytes:
    """A batch of magic 2 by kafka-python; its offset, compression and log append time by hand."""
    builder = DefaultRecordBatchBuilder(2, NONE, bool(attributes & TRANSACTIONAL), 7, 0, 0, 1 << 30)
    for row in rows:
        builder.append(row.offset - rows[0].offset, row.timestamp, row.key, row.value, list(row.headers))
    batch = bytearray(builder.build())
    if codec:  # the builder does not compress if that saves nothing
        batch[61:] = zstd_encode(bytes(batch[61:])) if codec == ZSTD else ENCODE[1, codec](bytes(batch[61:]))
    batch[22] |= attributes | codec | (0 if append_time is None else APPEND_BIT)
    struct.pack_into(">qi", batch, 0, rows[0].offset, len(batch) - 12)
    if append_time is not None:
        struct.pack_into(">q", batch, 35, append_time)
    return _with_checksum(batch)


def _with_checksum(batch: bytearray) -> bytes:
    struct.pack_into(">I", batch, 17, calc_crc32c(bytes(batch[21:])))
    return bytes(batch)


def _message(magic: int, offset: int, time: int | None, key: bytes | None, value: bytes | None, bits: int = 0) -> bytes:
    """One message, by hand."""
    content = struct.pack(">bb", magic, bits) + (struct.pack(">q", -1 if time is None else time) if magic else b"")
    for field in (key, value):
        content += struct.pack(">i", -1) if field is None else struct.pack(">i", len(field)) + field
    return struct.pack(">qiI", offset, 4 + len(content), zlib.crc32(content)) + content


def _set(magic: int, codec: int = NONE, rows: Sequence[Row] = ROWS, append_time: int | None = None) -> bytes:
    """A message set by hand, as a log stores it."""
    shift = rows[0].offset if magic and codec else 0
    bits = 0 if append_time is None else APPEND_BIT
    plain = b"".join(
        _message(
            magic,
            row.offset - shift,
            row.timestamp if codec else append_time or row.timestamp,
            row.key,
            row.value,
            0 if codec else bits,
        )
        for row in rows
    )
    if not codec:
        return plain
    latest = max(row.timestamp or 0 for row in rows) if append_time is None else append_time
    return _message(magic, rows[-1].offset, latest, None, ENCODE[magic, codec](plain), codec | bits)


def _read(data: bytes | bytearray) -> list[Row]:
    """All records as kafka-python reads them; it validates the checksums of batches, wrappers and messages."""
    found: list[Row] = []
    for batch in MemoryRecords(bytes(data)):
        assert batch.validate_crc()
        for record in batch:
            assert batch.magic == 2 or record.validate_crc()
            found.append(
                Row(
                    record.offset,
                    record.timestamp,
                    record.key,
                    record.value,
                    tuple(record.headers),
                    record.timestamp_type,
                )
            )
    return found


class Shallow(NamedTuple):
    """Header fields of a batch or message, read by struct: magic, codec, offsets of the first and last record."""

    magic: int
    codec: int
    first: int | None
    last: int


def _shallow(data: bytes | bytearray) -> list[Shallow]:
    found, position = [], 0
    while position < len(data):
        offset, length = struct.unpack_from(">qi", data, position)
        if data[position + 16] == 2:
            delta = struct.unpack_from(">i", data, position + 23)[0]
            found.append(Shallow(2, data[position + 22] & 7, offset, offset + delta))
        else:
            found.append(Shallow(data[position + 16], data[position + 17] & 7, None, offset))
        position += 12 + length
    assert position == len(data)
    return found


def _counts(converted: Converted) -> tuple[int, int]:
    return converted.records, converted.lost_headers


# ----- down


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", OLD_CODECS)
def test_a_batch_becomes_a_message_set(magic: int, codec: int) -> None:
    converted = down_convert(_batch(codec=codec), magic)
    assert _read(converted.data) == _old(ROWS, magic)
    assert _counts(converted) == (5, HEADERS)
    lasts = [110] if codec else [row.offset for row in ROWS]
    assert _shallow(converted.data) == [Shallow(magic, codec, None, last) for last in lasts]
    if not codec:
        assert converted.data == _set(magic)


@pytest.mark.parametrize("codec", OLD_CODECS)
def test_magic_1_becomes_magic_0(codec: int) -> None:
    converted = down_convert(_set(1, codec), 0)
    assert _read(converted.data) == _old(ROWS, 0)
    assert _counts(converted) == (5, 0)
    assert {found.codec for found in _shallow(converted.data)} == {codec}
    if not codec:
        assert converted.data == _set(0)


@pytest.mark.parametrize("codec", OLD_CODECS)
def test_log_append_time_goes_down(codec: int) -> None:
    converted = down_convert(_batch(codec=codec, append_time=APPEND_TIME), 1)
    assert _read(converted.data) == _appended(_old(ROWS, 1))
    for batch in MemoryRecords(bytes(converted.data)):
        assert batch.timestamp_type == 1
    for data in (_batch(codec=codec, append_time=APPEND_TIME), _set(1, codec, append_time=APPEND_TIME)):
        converted = down_convert(data, 0)
        assert _read(converted.data) == _old(ROWS, 0)


def test_the_wrapper_has_the_largest_timestamp() -> None:
    converted = down_convert(_batch(codec=GZIP), 1)
    assert struct.unpack_from(">q", converted.data, 18) == (TIME + 50,)


@pytest.mark.parametrize(("data", "magic"), [(_set(0, c), m) for c in OLD_CODECS for m in (0, 1)])
def test_magic_0_stays_as_it_is(data: bytes, magic: int) -> None:
    converted = down_convert(data, magic)
    assert converted.data == data
    assert _counts(converted) == (0, 0)


@pytest.mark.parametrize("codec", OLD_CODECS)
def test_magic_1_stays_as_it_is(codec: int) -> None:
    for data in (_set(1, codec), _set(1, codec, append_time=APPEND_TIME)):
        assert down_convert(data, 1).data == data


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [*OLD_CODECS, ZSTD])
def test_control_batches_are_dropped_and_data_of_transactions_is_not(magic: int, codec: int) -> None:
    marker = _batch([Row(120, TIME, struct.pack(">hh", 0, 1), bytes(6))], codec, TRANSACTIONAL | CONTROL)
    assert _counts(down_convert(marker, magic)) == (0, 0)
    assert down_convert(marker, magic).data == b""
    data = (
        _batch(ROWS[:2], GZIP, TRANSACTIONAL) + marker + _batch([Row(121, TIME, b"k", b"v")], attributes=TRANSACTIONAL)
    )
    converted = down_convert(data, magic)
    assert _read(converted.data) == _old([*ROWS[:2], Row(121, TIME, b"k", b"v")], magic)
    assert converted.records == 3


@pytest.mark.parametrize("magic", [0, 1])
def test_zstd_is_refused(magic: int) -> None:
    for data in (_batch(codec=ZSTD), _batch(codec=NONE) + _batch([Row(111, TIME, None, b"v")], ZSTD)):
        with pytest.raises(ProtocolError) as failed:
            down_convert(data, magic)
        assert failed.value.code == ErrorCode.UNSUPPORTED_COMPRESSION_TYPE == 76


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("first", [0, 100, 101, 102, 104, 105, 110, 111])
def test_records_before_the_first_offset_are_left_out_unless_compressed(magic: int, first: int) -> None:
    wanted = [row for row in ROWS if row.offset >= first]
    converted = down_convert(_batch(), magic, first)
    assert _read(converted.data) == _old(wanted, magic)
    assert converted.records == len(wanted)
    assert _read(down_convert(_batch(codec=GZIP), magic, first).data) == _old(ROWS, magic)
    assert down_convert(_set(0), magic, first).data == _set(0)


@pytest.mark.parametrize("magic", [0, 1])
def test_batches_that_compaction_left_empty_are_dropped(magic: int) -> None:
    empty = bytearray(_batch()[:61])
    struct.pack_into(">i", empty, 8, 49)
    struct.pack_into(">i", empty, 57, 0)
    following = [Row(111, TIME, b"k", b"v")]
    assert down_convert(_with_checksum(empty), magic).data == b""
    assert _read(down_convert(_with_checksum(empty) + _batch(following), magic).data) == _old(following, magic)


@pytest.mark.parametrize("magic", [0, 1])
def test_a_partial_batch_at_the_end_is_left_out(magic: int) -> None:
    data = _batch(ROWS[:2]) + _batch(ROWS[2:], GZIP)
    for size in range(0, len(data), 7):
        wanted = ROWS[:2] if size >= len(_batch(ROWS[:2])) else []
        assert _read(down_convert(data[:size], magic).data) == _old(wanted, magic)


def test_a_log_of_all_magics_goes_down() -> None:
    data, wanted, following = b"", {0: list[Row](), 1: list[Row]()}, 0
    for codec, magic in itertools.product(OLD_CODECS, (2, 0, 1)):
        rows = [row._replace(offset=row.offset + following) for row in ROWS]
        data += _batch(rows, codec) if magic == 2 else _set(magic, codec, rows)
        for target, expected in wanted.items():
            expected += _old(rows, min(target, magic))
        following += 11
    for target, expected in wanted.items():
        assert _read(down_convert(data, target).data) == expected


# ----- up


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", OLD_CODECS)
def test_a_message_set_becomes_a_batch(magic: int, codec: int) -> None:
    data = up_convert(_set(magic, codec))
    assert _read(data) == _numbered(_new(_old(ROWS, magic)))
    assert _shallow(data) == [Shallow(2, codec, 0, 4)]
    (batch,) = MemoryRecords(bytes(data))
    assert (batch.first_timestamp, batch.max_timestamp) == ((TIME, TIME + 50) if magic else (-1, -1))
    assert (batch.producer_id, batch.base_sequence, batch.is_transactional) == (-1, -1, False)
    assert (batch.is_control_batch, batch.attributes) == (False, codec)


@pytest.mark.parametrize("codec", OLD_CODECS)
def test_log_append_time_goes_up(codec: int) -> None:
    data = up_convert(_set(1, codec, append_time=APPEND_TIME))
    assert _read(data) == _numbered(_appended(_old(ROWS, 1)))
    assert len(_shallow(data)) == 1


def test_messages_in_a_row_become_one_batch_unless_their_times_differ_in_type() -> None:
    parts = [
        _set(1, rows=ROWS[:1]),
        _set(0, rows=ROWS[1:2]),
        _set(1, rows=ROWS[2:3], append_time=APPEND_TIME),
        _set(1, rows=ROWS[3:4], append_time=APPEND_TIME),
        _set(1, rows=ROWS[4:], append_time=APPEND_TIME + 1),
        _set(1, GZIP, [Row(111, TIME, None, b"a"), Row(112, TIME, None, b"b")]),
        _set(1, GZIP, [Row(113, TIME, None, b"c")]),
        _set(1, NONE, [Row(114, TIME, None, b"d")]),
    ]
    data = up_convert(b"".join(parts))
    assert [(found.first, found.last, found.codec) for found in _shallow(data)] == [
        (0, 1, NONE),
        (2, 3, NONE),
        (4, 4, NONE),
        (5, 6, GZIP),
        (7, 7, GZIP),
        (8, 8, NONE),
    ]
    old = _old(ROWS, 1)
    expected = [old[0], *_new(_old(ROWS[1:2], 0)), *_appended(old[2:4]), *_appended(old[4:], APPEND_TIME + 1)]
    expected += [Row(111 + number, TIME, None, value) for number, value in enumerate((b"a", b"b", b"c", b"d"))]
    assert _read(data) == _numbered(expected)


def test_batches_stay_as_they_are() -> None:
    kept = [_batch(codec=codec, attributes=TRANSACTIONAL) for codec in (*OLD_CODECS, ZSTD)]
    assert up_convert(b"".join(kept)) == b"".join(kept)
    data = up_convert(_set(1) + kept[4] + _set(0, GZIP) + kept[0] + _set(1))
    assert kept[4] in data
    assert kept[0] in data
    assert [(found.magic, found.codec) for found in _shallow(data)] == [(2, c) for c in (NONE, ZSTD, GZIP, NONE, NONE)]


@pytest.mark.parametrize("magic", [0, 1])
def test_offsets_count_from_0(magic: int) -> None:
    """The offsets that a producer sends may have any values."""
    rows = [row._replace(offset=offset) for row, offset in zip(ROWS, (5, 5, -1, 0, 2**62), strict=True)]
    data = _set(magic, NONE, rows) + _set(magic, SNAPPY, rows[:2]) + _set(magic, NONE, rows[:1])
    assert _read(up_convert(data)) == _numbered(_new(_old([*rows, *rows[:2], *rows[:1]], magic)))


@pytest.mark.parametrize("times", [(0, 2**63 - 1), (-(2**63), 2**63 - 1), (2**63 - 1, -(2**63)), (-1, 2**63 - 1)])
def test_timestamps_far_apart_go_up(times: tuple[int, int]) -> None:
    """Java computes differences of timestamps in 64 bits, and so wraps around."""
    data = up_convert(b"".join(_message(1, number, time, None, b"v") for number, time in enumerate(times)))
    assert [record.timestamp for record in read_records(data)] == list(times)


# ----- refused data


_REFUSED: dict[str, tuple[bytes, type[DecodeError]]] = {
    "checksum of v2": (_batch()[:-1] + b"!", CorruptBatchError),
    "checksum of v1": (_set(1)[:-1] + b"!", CorruptBatchError),
    "checksum of a wrapper": (_set(1, GZIP)[:-1] + b"!", CorruptBatchError),
    "checksum inside": (_message(1, 0, 0, None, gzip.compress(_set(1)[:-1] + b"!"), GZIP), CorruptBatchError),
    "set in a set": (_message(1, 0, 0, None, gzip.compress(_set(1, GZIP)), GZIP), DecodeError),
    "rubbish": (b"\xff" * 100, DecodeError),
    "not compressed": (_message(1, 0, 0, None, _set(1), GZIP), DecodeError),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_damage_is_refused(name: str) -> None:
    data, kind = _REFUSED[name]
    for before in (b"", _batch(), _set(1), _set(0, GZIP)):
        with pytest.raises(kind):
            down_convert(before + data, 0)
        with pytest.raises(kind):
            up_convert(before + data)


@pytest.mark.parametrize("size", [0, 1, 12, 60, len(_set(1)) - 1])
def test_only_whole_batches_go_up(size: int) -> None:
    with pytest.raises(DecodeError):
        up_convert(_set(1)[:size])


def test_what_is_compressed_grows_to_the_limit_only() -> None:
    for convert in (
        lambda limit: down_convert(_batch(codec=GZIP), 1, 0, limit),
        lambda limit: up_convert(_set(1, GZIP), limit=limit),
    ):
        convert(4000)
        with pytest.raises(DecodeError, match="beyond 2000 bytes"):
            convert(2000)


def test_all_wrappers_of_a_producer_share_the_limit() -> None:
    """Otherwise a request of many small wrappers could grow to many times the limit."""
    one = _set(1, GZIP)
    assert len(_read(up_convert(one, limit=4000))) == len(ROWS)
    assert len(_read(up_convert(one * 2, limit=8000))) == 2 * len(ROWS)
    with pytest.raises(DecodeError, match="beyond"):
        up_convert(one * 2, limit=4000)


# ----- very many records


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", OLD_CODECS)
def test_many_records_are_converted_in_slices(codec: int, magic: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message is larger than a slice."""
    monkeypatch.setattr(conversion, "_SLICE_BYTES", 100)
    monkeypatch.setattr(conversion, "_SLICE_RECORDS", 2)
    rows = [row._replace(offset=number) for number, row in enumerate(ROWS * 3)]
    data = _set(magic, codec, rows)
    up = up_convert(data)
    assert _read(up) == _new(_old(rows, magic))
    assert len(_shallow(up)) > 5
    down = down_convert(_batch(rows, codec), magic)
    assert _read(down.data) == _old(rows, magic)
    assert (down.records, down.lost_headers) == (len(rows), 3 * HEADERS)


def test_slices_keep_the_append_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_SLICE_BYTES", 100)
    found = list(read_records(up_convert(_set(1, GZIP, append_time=APPEND_TIME))))
    assert [(record.timestamp, record.timestamp_type) for record in found] == [(APPEND_TIME, 1)] * len(ROWS)


@pytest.mark.parametrize("name", _REFUSED)
def test_damage_in_a_slice_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_SLICE_BYTES", 100)
    data, kind = _REFUSED[name]
    for before in (b"", _batch(), _set(1), _set(0, GZIP)):
        with pytest.raises(kind):
            up_convert(before + data)
    inner = _set(1, NONE, ROWS[:2])
    for bad in (
        inner[:-1],
        inner[:70],
        inner + _set(0),
        inner + bytes(50),
        inner + _message(1, 2**63 - 1, 0, None, b""),
    ):
        with pytest.raises(DecodeError):
            up_convert(_message(1, 0, 0, None, gzip.compress(bad), GZIP))


@pytest.mark.parametrize("is_up", [True, False])
def test_the_memory_of_many_records_is_bounded(is_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kilobyte may decompress to a million messages, which must not all be objects at the same time."""
    monkeypatch.setattr(conversion, "_SLICE_BYTES", 1 << 16)
    monkeypatch.setattr(conversion, "_SLICE_RECORDS", 1000)
    messages = _message(0, 0, None, None, None) * 20_000
    data = _message(0, 0, None, None, gzip.compress(messages), GZIP)
    if not is_up:
        data = bytes(up_convert(data))
    tracemalloc.start()
    try:
        out = up_convert(data) if is_up else down_convert(data, 0).data
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(_read(out)) == 20_000
    assert peak < 4 * len(messages)  # with an object for each it would be about 20 times


# ----- down and up again


fields = st.none() | st.binary(max_size=20)
headers = st.lists(st.tuples(st.text(max_size=5), fields), max_size=2).map(tuple)
records = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 1 << 42), fields, fields, headers), min_size=1, max_size=5
)
batches = st.lists(st.tuples(st.sampled_from(OLD_CODECS), st.none() | st.integers(0, 1 << 42), records), min_size=1)


@settings(max_examples=40, deadline=None)  # the fuzz target conversion does the same
@given(batches, st.integers(0, 1 << 60), st.sampled_from([0, 1]))
def test_down_and_up_again_keeps_the_records(
    made: list[tuple[int, int | None, list[Any]]], first: int, magic: int
) -> None:
    data, rows, following = b"", [], first
    for codec, append_time, given_rows in made:
        batch = []
        for step, *rest in given_rows:
            batch.append(Row(following, *rest))
            following += step
        data += _batch(batch, codec, append_time=append_time)
        rows += batch if append_time is None else _appended(batch, append_time)
    assert _read(data) == rows
    down = down_convert(data, magic)
    assert _read(down.data) == _old(rows, magic)
    assert down.records == len(rows)
    assert down.lost_headers == sum(len(row.headers) for row in rows)
    up = up_convert(down.data)
    assert _read(up) == _numbered(_new(_old(rows, magic)))
    assert up_convert(up) == up
    assert {found.magic for found in _shallow(up)} == {2}


def test_batch_of_keeps_headers_and_type() -> None:
    for append_time in (None, APPEND_TIME):
        for codec in (*OLD_CODECS, ZSTD):
            found = list(read_records(_batch(codec=codec, append_time=append_time)))
            assert _read(batch_of(found, CODECS[codec])) == (ROWS if append_time is None else _appended(ROWS))
