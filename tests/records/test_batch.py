"""Record batches v2 against kafka-python's reader and writer, and byte for byte."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import crcmod.predefined
import pytest
from kafka.record import MemoryRecords
from kafka.record.memory_records import MemoryRecordsBuilder

from spark_klog.errors import CorruptBatchError, DecodeError
from spark_klog.records.contract import Record
from spark_klog.records.formats.batch import check_crc, iter_batches, read_header, whole_batch_size
from spark_klog.records.formats.batch_v2 import HEADER_SIZE, BatchHeader, build_batch, set_base_offset
from spark_klog.records.kernels.reference import append_record, iter_body
from spark_klog.records.reading.reader import AbortedTransactions, visible_batches
from spark_klog.wire.codecs import CODECS, Codec, codec_by_name
from tests.support.brokers.batches import read_records
from tests.support.checker.record_model import Row, encode_rows

_CRC32C = crcmod.predefined.mkCrcFun("crc-32c")
TIME = 1_700_000_000_000
ROWS = [
    Row(0, TIME, b"key", b"value"),
    Row(1, TIME + 5, None, b""),
    Row(2, TIME - 70_000, b"", None, (("h", b"v"),)),
    Row(3, TIME + 1, b"k" * 200, b"v" * 20_000, (("one", None), ("", b""), ("zwölf", b"\x00\xff"))),
    Row(4, -1, None, None),
]
TRANSACTIONAL, CONTROL, APPEND_TIME = 0x10, 0x20, 0x08


def _body(rows: Sequence[Row], base_timestamp: int) -> bytes:
    body = bytearray()
    for row in rows:
        append_record(body, row.timestamp - base_timestamp, row.offset, row.key, row.value, row.headers)
    return bytes(body)


def _batch(
    rows: Sequence[Row] = ROWS,
    codec: Codec = CODECS[0],
    attributes: int = 0,
    base_offset: int = 0,
    producer_id: int = -1,
) -> bytes:
    return build_batch(
        _body(rows, rows[0].timestamp),
        len(rows),
        base_timestamp=rows[0].timestamp,
        max_timestamp=max(row.timestamp for row in rows),
        codec=codec,
        attributes=attributes,
        base_offset=base_offset,
        producer_id=producer_id,
        last_offset_delta=rows[-1].offset,
    )


SMALL = _batch([Row(0, TIME, b"k", b"v"), Row(1, TIME + 3, None, b"w", (("n", b"x"),))])


def _records(rows: Sequence[Row], base_offset: int = 0, append_time: int | None = None) -> list[Record]:
    """The records that reading the rows must give."""
    kind = 0 if append_time is None else 1
    return [
        Record(
            base_offset + row.offset,
            row.timestamp if append_time is None else append_time,
            kind,
            row.key,
            row.value,
            row.headers,
        )
        for row in rows
    ]


def _kafka_records(data: bytes) -> list[Record]:
    """All records as kafka-python reads them; it validates the checksums."""
    found: list[Record] = []
    for batch in MemoryRecords(data):
        assert batch.validate_crc()
        found += [Record(r.offset, r.timestamp, r.timestamp_type, r.key, r.value, tuple(r.headers)) for r in batch]
    return found


def _with_crc(batch: bytearray) -> bytes:
    struct.pack_into(">I", batch, 17, _CRC32C(bytes(batch[21:])))
    return bytes(batch)


# ----- what we write


@pytest.mark.parametrize("base_offset", [0, 7, 2**62])
@pytest.mark.parametrize("codec", CODECS.values(), ids=[codec.name for codec in CODECS.values()])
def test_kafka_python_reads_our_batches(codec: Codec, base_offset: int) -> None:
    data = _batch(codec=codec, base_offset=base_offset)
    assert _kafka_records(data + data) == _records(ROWS, base_offset) * 2
    assert list(read_records(data + data)) == _records(ROWS, base_offset) * 2


def test_every_field_of_the_header_is_in_its_place() -> None:
    body = encode_rows(ROWS, 0, TIME)
    batch = build_batch(
        body,
        5,
        base_timestamp=TIME,
        max_timestamp=TIME + 5,
        codec=codec_by_name("none"),
        base_offset=0x0102030405060708,
        last_offset_delta=9,
        attributes=TRANSACTIONAL | APPEND_TIME,
        producer_id=0x1112131415161718,
        producer_epoch=0x2122,
        base_sequence=0x31323334,
        leader_epoch=0x41424344,
    )
    expected = bytes.fromhex("0102030405060708")
    expected += (49 + len(body)).to_bytes(4, "big")
    expected += bytes.fromhex("41424344") + b"\x02"
    expected += _CRC32C(batch[21:]).to_bytes(4, "big")
    expected += bytes.fromhex("0018 00000009")
    expected += TIME.to_bytes(8, "big") + (TIME + 5).to_bytes(8, "big")
    expected += bytes.fromhex("1112131415161718 2122 31323334 00000005")
    assert len(expected) == HEADER_SIZE == 61
    assert batch == expected + body

    header = read_header(batch)
    assert header == BatchHeader(
        base_offset=0x0102030405060708,
        length=49 + len(body),
        leader_epoch=0x41424344,
        magic=2,
        crc=_CRC32C(batch[21:]),
        attributes=0x18,
        last_offset_delta=9,
        base_timestamp=TIME,
        max_timestamp=TIME + 5,
        producer_id=0x1112131415161718,
        producer_epoch=0x2122,
        base_sequence=0x31323334,
        count=5,
    )
    assert (header.size, header.last_offset, header.next_offset) == (
        len(batch),
        0x0102030405060711,
        0x0102030405060712,
    )
    assert (header.codec_id, header.timestamp_type, header.is_transactional, header.is_control) == (
        0,
        1,
        True,
        False,
    )


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        (0x00, (0, 0, False, False)),
        (0x07, (7, 0, False, False)),
        (0x08, (0, 1, False, False)),
        (0x10, (0, 0, True, False)),
        (0x20, (0, 0, False, True)),
        (0x7C, (4, 1, True, True)),
        (0x40, (0, 0, False, False)),
    ],
)
def test_attributes(attributes: int, expected: tuple[int, int, bool, bool]) -> None:
    batch = bytearray(SMALL)
    struct.pack_into(">h", batch, 21, attributes)
    header = read_header(batch)
    assert (header.codec_id, header.timestamp_type, header.is_transactional, header.is_control) == expected


def test_producer_fields_default_to_none() -> None:
    header = read_header(SMALL)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (-1, -1, -1)
    assert (header.leader_epoch, header.last_offset_delta, header.count) == (-1, 1, 2)


def test_record_bytes_by_hand() -> None:
    body = bytearray()
    append_record(body, 1, 2, b"k", None, (("h", b"v"), ("n", None)))
    # 14 bytes; attributes, timestamp +1, offset +2, key "k", value null, 2 headers: "h" = "v", "n" = null
    assert body.hex() == "1c" + "00" + "02" + "04" + "026b" + "01" + "04" + "0268" + "0276" + "026e" + "01"


def test_records_are_those_of_the_model() -> None:
    assert _body(ROWS, TIME) == encode_rows(ROWS, 0, TIME)


def test_set_base_offset_leaves_the_checksum_right() -> None:
    batch = bytearray(SMALL)
    set_base_offset(memoryview(batch), 500, 6)
    assert batch[:16].hex() == "00000000000001f4" + SMALL[8:12].hex() + "00000006"
    assert batch[16:] == SMALL[16:]
    assert [record.offset for record in read_records(batch)] == [500, 501]
    assert [record.offset for record in _kafka_records(bytes(batch))] == [500, 501]


# ----- what others write


@pytest.mark.parametrize("codec", CODECS.values(), ids=[codec.name for codec in CODECS.values()])
def test_we_read_batches_of_kafka_python(codec: Codec) -> None:
    builder = MemoryRecordsBuilder(
        magic=2,
        compression_type=codec.id,
        batch_size=1 << 20,
        transactional=True,
        producer_id=77,
        producer_epoch=3,
        base_sequence=12,
    )
    for row in ROWS:
        builder.append(row.timestamp, row.key, row.value, list(row.headers))
    builder.close()
    data = bytes(builder.buffer())
    assert list(read_records(data)) == _records(ROWS)
    ((header, batch),) = visible_batches(data)
    assert bytes(batch) == data
    assert (header.codec_id, header.count, header.last_offset_delta) == (codec.id, 5, 4)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (77, 3, 12)
    assert (header.base_timestamp, header.max_timestamp, header.is_transactional) == (TIME, TIME + 5, True)


def test_log_append_time_is_the_batchs_max_timestamp() -> None:
    batch = bytearray(_batch(attributes=APPEND_TIME))
    struct.pack_into(">q", batch, 35, TIME + 99_999)
    data = _with_crc(batch)
    assert list(read_records(data)) == _records(ROWS, append_time=TIME + 99_999) == _kafka_records(data)


# ----- damage


def test_every_flipped_bit_is_noticed() -> None:
    assert len(list(read_records(SMALL))) == 2
    for position in range(17, len(SMALL)):
        for bit in range(8):
            damaged = bytearray(SMALL)
            damaged[position] ^= 1 << bit
            with pytest.raises((CorruptBatchError, DecodeError)):
                list(visible_batches(damaged))


def test_a_wrong_checksum_is_a_corrupt_batch() -> None:
    damaged = SMALL[:-1] + bytes([SMALL[-1] ^ 1])
    with pytest.raises(CorruptBatchError, match="offsets 0-1"):
        list(visible_batches(damaged))
    ((header, batch),) = iter_batches(damaged)
    with pytest.raises(CorruptBatchError):
        check_crc(header, batch)


def test_partial_batch_at_the_end_is_left_out() -> None:
    data = SMALL * 3
    for size in range(len(data) + 1):
        found = list(iter_batches(data[:size]))
        assert [bytes(batch) for _, batch in found] == [SMALL] * (size // len(SMALL))
        whole = len(SMALL) if size >= len(SMALL) else None
        assert whole_batch_size(data[:size]) == whole


def test_sizes_at_a_position() -> None:
    data = b"???" + SMALL + SMALL[:30]
    assert whole_batch_size(data, 3) == len(SMALL)
    assert read_header(data, 3) == read_header(SMALL)
    assert whole_batch_size(data, 3 + len(SMALL)) is None
    assert whole_batch_size(data, len(data)) is None


@pytest.mark.parametrize("length", [48, 1, 0, -1, -(2**31)])
def test_impossible_lengths_are_refused(length: int) -> None:
    damaged = bytearray(SMALL)
    struct.pack_into(">i", damaged, 8, length)
    for read in (whole_batch_size, read_header, lambda data: list(iter_batches(data))):
        with pytest.raises(DecodeError):
            read(damaged)


def test_length_beyond_the_end_is_a_partial_batch_and_a_short_one_corrupt() -> None:
    damaged = bytearray(SMALL)
    struct.pack_into(">i", damaged, 8, 2**31 - 1)
    assert list(visible_batches(damaged)) == []
    struct.pack_into(">i", damaged, 8, len(SMALL) - 12 - 1)
    with pytest.raises(CorruptBatchError):
        list(visible_batches(damaged))


@pytest.mark.parametrize(
    ("form", "position", "value"),
    [
        (">b", 16, 3),
        (">b", 16, -1),
        (">q", 0, -1),
        (">i", 23, -1),
        (">i", 57, -1),
        (">i", 57, 1),
        (">i", 57, 3),
        (">i", 57, 2**31 - 1),
        (">h", 21, 5),
        (">h", 21, 7),
        (">h", 21, 1),
        (">h", 21, 2),
        (">h", 21, 3),
        (">h", 21, 4),
    ],
)
def test_wrong_fields_are_refused_though_the_checksum_is_right(form: str, position: int, value: int) -> None:
    damaged = bytearray(SMALL)
    struct.pack_into(form, damaged, position, value)
    with pytest.raises(DecodeError) as caught:
        list(read_records(_with_crc(damaged)))
    assert not isinstance(caught.value, CorruptBatchError)


@pytest.mark.parametrize(("form", "position"), [(">q", 0), (">i", 23), (">i", 57)])
def test_negative_fields_are_refused_in_a_batch_without_records(form: str, position: int) -> None:
    batch = bytearray(SMALL[:61])
    struct.pack_into(">i", batch, 8, 49)
    struct.pack_into(">i", batch, 57, 0)
    assert list(read_records(_with_crc(batch))) == []
    struct.pack_into(form, batch, position, -1)
    with pytest.raises(DecodeError):
        list(visible_batches(_with_crc(batch)))


def test_header_that_is_cut_off() -> None:
    for size in range(61):
        with pytest.raises(DecodeError):
            read_header(SMALL[:size])


# ----- what a consumer sees


def _marker(producer_id: int, offset: int, kind: int) -> bytes:
    """A control batch; kind 0 is abort, 1 is commit. Key: INT16 version, INT16 type; value: version, epoch."""
    row = Row(0, TIME, struct.pack(">hh", 0, kind), struct.pack(">hi", 0, 0))
    return _batch([row], attributes=TRANSACTIONAL | CONTROL, base_offset=offset, producer_id=producer_id)


def _log(steps: str) -> bytes:
    """`steps` such as "1 2 x 1A 2C": data of producers 1 and 2, data without one, abort of 1, commit of 2."""
    data = b""
    for offset, step in enumerate(steps.split()):
        row = [Row(0, TIME, None, b"%d" % offset)]
        if step == "x":
            data += _batch(row, base_offset=offset)
        elif step.isdigit():
            data += _batch(row, attributes=TRANSACTIONAL, base_offset=offset, producer_id=int(step))
        else:
            data += _marker(int(step[:-1]), offset, "AC".index(step[-1]))
    return data


@pytest.mark.parametrize(
    ("steps", "aborted", "visible"),
    [
        ("x x", [], [0, 1]),
        ("1 1 1C", [], [0, 1]),
        ("1 1 1A", [(1, 0)], []),
        ("1 x 1A x", [(1, 0)], [1, 3]),
        ("1 1A 1 1C", [(1, 0)], [2]),
        ("1 1C 1 1A", [(1, 2)], [0]),
        ("1 2 1A 2C", [(1, 0)], [1]),
        ("1 2 1 2 2A 1C", [(2, 1)], [0, 2]),
        ("1 2 1A 1 2A 1C", [(1, 0), (2, 1)], [3]),
        ("1 1A 1 1A 1 1C", [(1, 0), (1, 2)], [4]),
        ("1 1A 1 1A 1 1C", [(1, 2), (1, 0)], [4]),
        # the marker is missing: the fetch ended before it
        ("1 x 1", [(1, 0)], [1]),
        # the transaction began before what was fetched
        ("1 1A x", [(1, -500)], [2]),
        # an entry for a transaction that lies after what was fetched
        ("1 1C", [(1, 50)], [0]),
        # batches without a transaction are visible, even with the producer id of an aborted one
        ("x 1 x 1A", [(-1, 0), (1, 1)], [0, 2]),
    ],
)
def test_read_committed(steps: str, aborted: list[tuple[int, int]], visible: list[int]) -> None:
    data = _log(steps)
    found = list(read_records(data, AbortedTransactions(aborted)))
    assert [record.offset for record in found] == visible
    assert [record.value for record in found] == [b"%d" % offset for offset in visible]
    uncommitted = [offset for offset, step in enumerate(steps.split()) if not step.endswith(("A", "C"))]
    assert [record.offset for record in read_records(data)] == uncommitted
    # kafka-python agrees on what is a control batch
    assert [b.base_offset for b in MemoryRecords(data) if not b.is_control_batch] == uncommitted


@pytest.mark.parametrize("key", [None, b"", b"\x00\x00\x00"])
def test_control_batch_without_a_type_is_refused(key: bytes | None) -> None:
    marker = _batch([Row(0, TIME, key, b"")], attributes=TRANSACTIONAL | CONTROL, base_offset=1, producer_id=1)
    data = _log("1") + marker
    assert [record.offset for record in read_records(data)] == [0]
    with pytest.raises(DecodeError, match="control"):
        list(read_records(data, AbortedTransactions([(1, 0)])))


@pytest.mark.parametrize("size", [None, 0, 1, 63, 64, 2047, 2048, 5000])
def test_sizes_and_numbers_at_the_ends_of_their_varints(size: int | None) -> None:
    content = None if size is None else bytes(size)
    for number in (0, 63, 64, 2047, 2048, 8191, 8192, 1 << 40):
        for key, value in ((content, b"v"), (b"k", content), (content, content)):
            body = bytearray()
            append_record(body, number, min(number, 100_000), key, value)
            [record] = iter_body(body, 1, 0, 0, None)
            assert (record.timestamp, record.offset, record.key, record.value, record.headers) == (
                *(number, min(number, 100_000), key, value, ()),
            )
