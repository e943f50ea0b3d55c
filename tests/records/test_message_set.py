"""Message sets of magic 0 and 1, against bytes built by hand and kafka-python's reader and builder."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Callable, Sequence

import pytest
import snappy
from hypothesis import given, settings, strategies as st
from kafka.codec import lz4_decode, lz4_decode_old_kafka, lz4_encode, lz4_encode_old_kafka, snappy_encode
from kafka.record.legacy_records import LegacyRecordBatchBuilder
from kafka.record.memory_records import MemoryRecords

from spark_klog.errors import ConfigError, CorruptBatchError, DecodeError
from spark_klog.records.contract import Record
from spark_klog.records.formats.batch import (
    first_batch_size,
    iter_batches,
    next_offset_after,
    read_header,
    whole_batch_size,
    whole_batches,
)
from spark_klog.records.formats.message_set import (
    MessageHeader,
    build_message,
    build_message_set,
    iter_messages,
    key_and_value,
    message_records,
    read_message_header,
    set_message_append_time,
    set_message_offset,
)
from spark_klog.wire.codecs import CODECS
from tests.support.brokers.batches import read_records

TIME = 1_700_000_000_000
NO_TIMESTAMP_TYPE, CREATE_TIME, APPEND_TIME = -1, 0, 1
APPEND_BIT = 8
NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
Pair = tuple["bytes | None", "bytes | None"]
PAIRS: list[Pair] = [(b"key", b"value"), (None, b""), (b"", None), (None, None), (b"k" * 300, b"v" * 20_000)]
FIELDS: list[Pair] = [(key, value) for key in (None, b"", b"k", b"\x00\xff") for value in (None, b"", b"v")]

#: Compression by other libraries, by (magic, codec).
COMPRESS: dict[tuple[int, int], Callable[[bytes], bytes]] = {
    (0, GZIP): gzip.compress,
    (1, GZIP): gzip.compress,
    (0, SNAPPY): snappy.compress,
    (1, SNAPPY): snappy_encode,
    (0, LZ4): lz4_encode_old_kafka,
    (1, LZ4): lz4_encode,
}


def _message(
    magic: int, offset: int, timestamp: int, key: bytes | None, value: bytes | None, attributes: int = 0
) -> bytes:
    """One message, by hand."""
    content = struct.pack(">bb", magic, attributes) + (struct.pack(">q", timestamp) if magic else b"")
    for field in (key, value):
        content += struct.pack(">i", -1) if field is None else struct.pack(">i", len(field)) + field
    return struct.pack(">qiI", offset, 4 + len(content), zlib.crc32(content)) + content


def _wrapper(magic: int, offset: int, timestamp: int, inner: bytes, codec: int, attributes: int = 0) -> bytes:
    return _message(magic, offset, timestamp, None, COMPRESS[magic, codec](inner), codec | attributes)


def _set(magic: int, offsets: Sequence[int], pairs: Sequence[Pair] = PAIRS, time: int = TIME) -> bytes:
    """Messages one after the other, 10 ms apart."""
    return b"".join(
        _message(magic, offset, time + 10 * index, key, value)
        for index, (offset, (key, value)) in enumerate(zip(offsets, pairs, strict=True))
    )


def _records(
    magic: int, offsets: Sequence[int], pairs: Sequence[Pair] = PAIRS, append: int | None = None
) -> list[Record]:
    """The records that reading such messages must give."""
    kind = (CREATE_TIME if append is None else APPEND_TIME) if magic else NO_TIMESTAMP_TYPE
    return [
        Record(offset, (TIME + 10 * index if append is None else append) if magic else -1, kind, key, value, ())
        for index, (offset, (key, value)) in enumerate(zip(offsets, pairs, strict=True))
    ]


def _kafka_records(data: bytes) -> list[Record]:
    """All records as kafka-python reads them; it validates the checksums of messages and wrappers."""
    found: list[Record] = []
    for batch in MemoryRecords(data):
        assert batch.validate_crc()
        for record in batch:
            assert record.validate_crc()
            kind = NO_TIMESTAMP_TYPE if record.timestamp_type is None else record.timestamp_type
            timestamp = -1 if record.timestamp is None else record.timestamp
            found.append(Record(record.offset, timestamp, kind, record.key, record.value, ()))
    return found


# ----- single messages, byte by byte


def test_a_message_of_magic_0_by_hand() -> None:
    content = bytes.fromhex("00 00 00000002 6b31 00000003 76 76 76")  # magic, attributes, key "k1", value "vvv"
    expected = bytes.fromhex("0102030405060708 00000013") + zlib.crc32(content).to_bytes(4, "big") + content
    assert build_message(0, 0x0102030405060708, TIME, b"k1", b"vvv") == expected
    header = read_message_header(expected)
    assert header == MessageHeader(0x0102030405060708, 0x13, zlib.crc32(content), 0, 0, -1)
    offset = 0x0102030405060708
    assert (header.base_offset, header.last_offset, header.next_offset) == (offset, offset, offset + 1)
    assert header.size == len(expected)
    assert (header.codec_id, header.timestamp_type, header.max_timestamp) == (NONE, NO_TIMESTAMP_TYPE, -1)
    assert list(read_records(expected)) == [Record(0x0102030405060708, -1, NO_TIMESTAMP_TYPE, b"k1", b"vvv", ())]


def test_a_message_of_magic_1_by_hand() -> None:
    content = bytes.fromhex("01 08 0000018bcfe56800 ffffffff 00000000")  # log append time, key null, value empty
    expected = bytes.fromhex("00000000000000ff 00000016") + zlib.crc32(content).to_bytes(4, "big") + content
    assert TIME == 0x18BCFE56800
    assert build_message(1, 255, TIME, None, b"", APPEND_BIT) == expected
    header = read_message_header(b"?" + expected, 1)
    assert header == MessageHeader(255, 22, zlib.crc32(content), 1, 8, TIME)
    assert (header.codec_id, header.timestamp_type, header.max_timestamp) == (NONE, APPEND_TIME, TIME)
    assert (header.is_control, header.is_transactional, header.producer_id) == (False, False, -1)
    assert list(read_records(expected)) == [Record(255, TIME, APPEND_TIME, None, b"", ())]


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize(("key", "value"), FIELDS)
def test_null_and_empty_are_two_things(magic: int, key: bytes | None, value: bytes | None) -> None:
    data = _message(magic, 3, TIME, key, value)
    assert build_message(magic, 3, TIME, key, value) == data
    ((header, message),) = iter_messages(data)
    assert [None if field is None else bytes(field) for field in key_and_value(header, message)] == [key, value]
    assert list(read_records(data)) == _records(magic, [3], [(key, value)]) == _kafka_records(data)


@pytest.mark.parametrize("timestamp", [-1, 0, 1, TIME, 2**63 - 1, -(2**63)])
def test_timestamps_of_magic_1_are_taken_as_they_are(timestamp: int) -> None:
    data = _message(1, 0, timestamp, None, b"v")
    assert build_message(1, 0, timestamp, None, b"v") == data
    assert [(r.timestamp, r.timestamp_type) for r in read_records(data)] == [(timestamp, CREATE_TIME)]


@pytest.mark.parametrize("bits", [0x10, 0x20, 0x40, 0x80 - 0x100])
def test_unused_bits_of_the_attributes_are_passed_over(bits: int) -> None:
    data = _message(1, 0, TIME, None, b"v", bits)
    assert list(read_records(data)) == [Record(0, TIME, CREATE_TIME, None, b"v", ())] == _kafka_records(data)


def test_magic_0_has_no_timestamp_type_whatever_the_bit() -> None:
    data = _message(0, 0, TIME, None, b"v", APPEND_BIT)
    assert list(read_records(data)) == [Record(0, -1, NO_TIMESTAMP_TYPE, None, b"v", ())]


@pytest.mark.parametrize("magic", [0, 1])
def test_the_offset_is_outside_of_the_checksum(magic: int) -> None:
    data = bytearray(_set(magic, range(5)))
    before = bytes(data)
    for number, (header, message) in enumerate(list(iter_messages(data))):
        set_message_offset(message, 1000 + 7 * number)
        start = _position(before, number)
        assert bytes(message[8:]) == before[start + 8 : start + header.size]
    assert list(read_records(data)) == _records(magic, range(1000, 1035, 7)) == _kafka_records(bytes(data))


def _position(data: bytes, number: int) -> int:
    """The position of the message of that number, by the sizes before it."""
    position = 0
    for _ in range(number):
        position += 12 + struct.unpack_from(">i", data, position + 8)[0]
    return position


@pytest.mark.parametrize("codec", [NONE, GZIP])
def test_append_time_is_set_in_place_with_the_checksum(codec: int) -> None:
    data = bytearray(_set(1, [4], PAIRS[:1]) if codec == NONE else _wrapper(1, 4, TIME + 40, _set(1, range(5)), codec))
    before = bytes(data)
    set_message_append_time(memoryview(data), 0x0102030405060708)
    assert data[:12] == before[:12]
    assert data[16:26] == bytes([1, codec | 8]) + bytes.fromhex("0102030405060708")
    assert data[26:] == before[26:]
    expected = _records(1, [4], PAIRS[:1]) if codec == NONE else _records(1, range(5))
    expected = [r._replace(timestamp=0x0102030405060708, timestamp_type=APPEND_TIME) for r in expected]
    assert list(read_records(data)) == expected == _kafka_records(bytes(data))


# ----- wrappers


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4])
@pytest.mark.parametrize("offset", [4, 1004, 2**62])
def test_offsets_inside_magic_1_are_relative(codec: int, offset: int) -> None:
    data = _wrapper(1, offset, TIME + 40, _set(1, range(5)), codec)
    assert list(read_records(data)) == _records(1, range(offset - 4, offset + 1)) == _kafka_records(data)
    ((header, _),) = iter_batches(data)
    assert (header.base_offset, header.last_offset, header.next_offset) == (0, offset, offset + 1)


@pytest.mark.parametrize("inner", [[0, 2, 3, 7, 9], [3, 4, 6, 8, 9], [0, 1, 2, 3, 9]])
def test_compaction_leaves_holes_in_relative_offsets(inner: list[int]) -> None:
    """The wrapper's offset stays that of its last message, whichever messages before it are left."""
    data = _wrapper(1, 109, TIME + 40, _set(1, inner), GZIP)
    assert list(read_records(data)) == _records(1, [100 + offset for offset in inner]) == _kafka_records(data)


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4])
@pytest.mark.parametrize("offsets", [[1000, 1001, 1002, 1003, 1004], [3, 10, 500, 2**40, 2**62], [0, 1, 2, 3, 4]])
def test_offsets_inside_magic_0_are_absolute(codec: int, offsets: list[int]) -> None:
    for wrapper in (offsets[-1], 0, 2000):  # the wrapper's offset does not matter
        data = _wrapper(0, wrapper, 0, _set(0, offsets), codec)
        assert list(read_records(data)) == _records(0, offsets) == _kafka_records(data)


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4])
def test_append_time_of_a_wrapper_is_that_of_all_its_messages(codec: int) -> None:
    data = _wrapper(1, 4, TIME + 777, _set(1, range(5)), codec, APPEND_BIT)
    assert list(read_records(data)) == _records(1, range(5), append=TIME + 777) == _kafka_records(data)
    data = _wrapper(1, 4, TIME + 777, _set(1, range(5)), codec)  # a wrapper's create time is ignored
    assert list(read_records(data)) == _records(1, range(5)) == _kafka_records(data)


@pytest.mark.parametrize("magic", [0, 1])
def test_a_key_of_a_wrapper_is_passed_over(magic: int) -> None:
    data = _message(magic, 4, TIME, b"some key", gzip.compress(_set(magic, range(5))), GZIP)
    assert list(read_records(data)) == _records(magic, range(5)) == _kafka_records(data)


def test_sets_of_wrappers_and_messages_one_after_the_other() -> None:
    parts = [
        _set(0, range(5)),
        _wrapper(0, 9, 0, _set(0, range(5, 10)), SNAPPY),
        _set(1, range(10, 15)),
        _wrapper(1, 19, TIME, _set(1, range(5)), LZ4),
    ]
    expected = [record for start in range(0, 20, 5) for record in _records(start // 10, range(start, start + 5))]
    assert list(read_records(b"".join(parts))) == expected == _kafka_records(b"".join(parts))
    assert next_offset_after(b"".join(parts), 3) == 20
    assert len(whole_batches(b"".join(parts))) == 12


def _refused(data: bytes, match: str | None = None) -> None:
    with pytest.raises(DecodeError, match=match) as failed:
        list(read_records(data))
    assert not isinstance(failed.value, CorruptBatchError)


@pytest.mark.parametrize("magic", [0, 1])
def test_a_message_of_another_magic_inside_is_refused(magic: int) -> None:
    inner = _set(magic, range(2), PAIRS[:2]) + _set(1 - magic, [2], PAIRS[:1])
    _refused(_wrapper(magic, 2, TIME, inner, GZIP), f"magic {1 - magic} among messages of magic {magic}")


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [GZIP, LZ4, ZSTD])
def test_a_compressed_message_inside_is_refused(magic: int, codec: int) -> None:
    content = _set(magic, range(5))
    if codec != ZSTD:
        content = COMPRESS[magic, codec](content)
    nested = _set(magic, [0], PAIRS[:1]) + _message(magic, 5, TIME, None, content, codec)
    _refused(_wrapper(magic, 5, TIME, nested, GZIP), "compressed message of offset 5 inside a compressed message")


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4])
def test_a_wrapper_without_messages_is_refused(magic: int, codec: int) -> None:
    _refused(_message(magic, 7, TIME, b"k", None, codec), "offset 7 has no value")
    _refused(_message(magic, 7, TIME, None, b"", codec), "no compressed data")
    _refused(_wrapper(magic, 7, TIME, b"", codec), "offset 7 holds no messages")


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [ZSTD, 5, 6, 7])
def test_codecs_that_message_sets_do_not_have_are_refused(magic: int, codec: int) -> None:
    content = bytes(CODECS[ZSTD].compress(_set(magic, range(5))))
    _refused(_message(magic, 4, TIME, None, content, codec), f"offset 4: unknown compression codec {codec}")


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("left_over", [1, 11, 12, 17, 18, 25])
def test_a_wrapper_whose_set_is_cut_off_is_refused(magic: int, left_over: int) -> None:
    inner = _set(magic, range(5))
    _refused(_wrapper(magic, 5, TIME, inner + inner[:left_over], GZIP))
    _refused(_wrapper(magic, 4, TIME, inner[:-left_over], GZIP))


def test_wrappers_grow_to_the_limit_only() -> None:
    inner = _set(1, range(5))
    for codec in (GZIP, SNAPPY, LZ4):
        data = _wrapper(1, 4, TIME, inner, codec)
        header = read_message_header(data)
        assert list(message_records(header, memoryview(data), len(inner))) == _records(1, range(5))
        with pytest.raises(DecodeError, match=f"beyond {len(inner) - 1} bytes"):
            list(message_records(header, memoryview(data), len(inner) - 1))


# ----- damage


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [NONE, GZIP])
def test_every_flipped_bit_after_the_offset_is_noticed(magic: int, codec: int) -> None:
    inner = _set(magic, [0, 1], PAIRS[:2])
    data = _message(magic, 1, TIME, b"key", b"value") if codec == NONE else _wrapper(magic, 1, TIME, inner, codec)
    for position in range(8, len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            length = struct.unpack_from(">i", damaged, 8)[0]
            if length > len(data) - 12:  # as in a fetch that ends within a message
                assert list(read_records(damaged)) == []
                continue
            with pytest.raises(DecodeError) as failed:
                list(read_records(damaged))
            assert isinstance(failed.value, CorruptBatchError) or position in (8, 9, 10, 11, 16)


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4])
def test_flipped_bits_inside_a_wrapper_whose_own_checksum_is_right(magic: int, codec: int) -> None:
    """The messages' own checksums are checked. They don't cover the offset, and gzip's does not cover its header."""
    pairs: list[Pair] = [(b"key", b"value"), (None, b"\x00\x17\x2a")]
    value = COMPRESS[magic, codec](_set(magic, [0, 1], pairs))
    expected = [record[1:] for record in _records(magic, [0, 1], pairs)]
    noticed = 0
    for position in range(len(value)):
        for bit in range(8):
            damaged = bytearray(value)
            damaged[position] ^= 1 << bit
            try:
                found = list(read_records(_message(magic, 1, TIME, None, bytes(damaged), codec)))
            except DecodeError:
                noticed += 1
            else:
                assert [record[1:] for record in found] == expected
    assert noticed > 4 * len(value)


@pytest.mark.parametrize("magic", [0, 1])
def test_a_message_with_a_wrong_checksum_inside_is_a_corrupt_batch(magic: int) -> None:
    inner = bytearray(_set(magic, range(5)))
    inner[-1] ^= 1
    with pytest.raises(CorruptBatchError, match="message of offset 4: CRC 0x"):
        list(read_records(_wrapper(magic, 4, TIME, bytes(inner), GZIP)))


@pytest.mark.parametrize("magic", [0, 1])
def test_partial_message_at_the_end_is_left_out(magic: int) -> None:
    one = _set(magic, [0], PAIRS[:1])
    data = one + _wrapper(magic, 2, TIME, _set(magic, [1, 2], PAIRS[:2]), GZIP) + one
    ends = [len(one), len(data) - len(one), len(data)]
    for size in range(len(data) + 1):
        found = [bytes(batch) for _, batch in iter_batches(data[:size])]
        assert len(found) == sum(end <= size for end in ends)
        assert b"".join(found) == data[: ([0, *ends])[len(found)]]
        assert whole_batch_size(data[:size]) == (len(one) if size >= len(one) else None)
        if size not in (0, *ends):
            with pytest.raises(DecodeError):
                list(iter_messages(data[:size]))


@pytest.mark.parametrize("magic", [0, 1])
def test_a_header_that_is_cut_off(magic: int) -> None:
    data = _message(magic, 0, TIME, None, None)
    for size in range(26 if magic else 18):
        with pytest.raises(DecodeError, match="cut off"):
            read_message_header(data[:size])
    assert read_message_header(data[: 26 if magic else 18]).length == len(data) - 12
    with pytest.raises(DecodeError, match="magic 2"):
        read_message_header(data[:16] + b"\x02" + data[17:])


@pytest.mark.parametrize("magic", [0, 1])
def test_a_message_cut_short_though_its_size_and_checksum_are_right(magic: int) -> None:
    content = _message(magic, 0, TIME, b"key", b"value")[16:]
    for size in range(2, len(content) + 20):
        if size == len(content):
            continue
        short = (content + bytes(20))[:size]
        message = struct.pack(">qiI", 0, 4 + size, zlib.crc32(short)) + short
        with pytest.raises(DecodeError):
            list(read_records(message))


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize(
    ("key", "value"), [(-2, 1), (5, 1), (2**31 - 1, 1), (1, -2), (1, 2), (1, 0), (1, -(2**31)), (-2, 0), (0, -2)]
)
def test_impossible_sizes_of_fields_are_refused(magic: int, key: int, value: int) -> None:
    content = struct.pack(">bb", magic, 0) + (struct.pack(">q", TIME) if magic else b"")
    with_fields = 0 not in (key, value) or key == 1
    content += struct.pack(">i", key) + b"k" * with_fields + struct.pack(">i", value) + b"v" * with_fields
    _refused(struct.pack(">qiI", 0, 4 + len(content), zlib.crc32(content)) + content)


@pytest.mark.parametrize(("magic", "least"), [(0, 14), (1, 22)])
def test_impossible_lengths_are_refused(magic: int, least: int) -> None:
    data = bytearray(_message(magic, 0, TIME, None, None))
    assert struct.unpack_from(">i", data, 8)[0] == least
    assert first_batch_size(data) == len(data)
    for length in (least - 1, 1, 0, -1, -(2**31)):
        struct.pack_into(">i", data, 8, length)
        for read in (whole_batch_size, read_header, lambda data: list(iter_batches(data))):
            with pytest.raises(DecodeError):
                read(data)


@pytest.mark.parametrize("magic", [*range(3, 256, 9), 3, 127, 128, 255])
def test_unknown_magics_are_refused(magic: int) -> None:
    data = bytearray(_message(1, 0, TIME, None, b"v" * 100))
    data[16] = magic
    for read in (whole_batch_size, first_batch_size, read_message_header, lambda data: list(iter_batches(data))):
        with pytest.raises(DecodeError):
            read(data)


# ----- built message sets


def _built_by_kafka(magic: int, codec: int, pairs: Sequence[Pair], time: int = TIME) -> bytearray:
    """A message set by kafka-python's producer: offsets from 0 on; a wrapper has offset 0, timestamp 0."""
    builder = LegacyRecordBatchBuilder(magic=magic, compression_type=codec, batch_size=1 << 30)
    for index, (key, value) in enumerate(pairs):
        builder.append(index, time + 10 * index, key, value)
    return bytearray(builder.build())


@pytest.mark.parametrize("magic", [0, 1])
def test_uncompressed_sets_are_kafka_pythons_byte_for_byte(magic: int) -> None:
    built = build_message_set(_records(1, range(5)), magic)
    assert built == _built_by_kafka(magic, NONE, PAIRS) == _set(magic, range(5))


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [NONE, GZIP, SNAPPY, LZ4])
def test_we_read_what_kafka_python_builds(magic: int, codec: int) -> None:
    data = _built_by_kafka(magic, codec, PAIRS)
    if codec:
        set_message_offset(memoryview(data), 4)
    assert list(read_records(data)) == _records(magic, range(5))


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [NONE, GZIP, SNAPPY, LZ4])
@pytest.mark.parametrize("offsets", [[0, 1, 2, 3, 4], [1000, 1001, 1005, 1006, 2**40]])
def test_kafka_python_reads_what_we_build(magic: int, codec: int, offsets: list[int]) -> None:
    data = build_message_set(_records(1, offsets), magic, CODECS[codec])
    assert _kafka_records(data) == _records(magic, offsets) == list(read_records(data))


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4])
def test_the_fields_of_wrappers_that_we_build(codec: int) -> None:
    """Offset of the last message, largest timestamp, null key; relative offsets inside in magic 1 only."""
    records = [record._replace(timestamp=TIME + record.offset % 8) for record in _records(1, [7, 15, 20], PAIRS[:3])]
    records[0] = records[0]._replace(timestamp=TIME)
    for magic, inside in ((0, [7, 15, 20]), (1, [0, 8, 13])):
        data = build_message_set(records, magic, CODECS[codec])
        offset, length, crc, found_magic, attributes = struct.unpack_from(">qiIbb", data)
        assert (offset, length, crc) == (20, len(data) - 12, zlib.crc32(data[16:]))
        assert (found_magic, attributes) == (magic, codec)
        position = 18
        if magic:
            assert struct.unpack_from(">q", data, 18) == (TIME + 7,)
            position = 26
        assert struct.unpack_from(">ii", data, position) == (-1, len(data) - position - 8)
        inner = bytes(CODECS[codec].decompress(data[position + 8 :], 1 << 20))
        assert inner == b"".join(
            _message(magic, number, record.timestamp, record.key, record.value)
            for number, record in zip(inside, records, strict=True)
        )


def test_lz4_of_magic_0_has_the_old_header_checksum() -> None:
    """Clients of that time require it (KIP-57); later ones, and the lz4 library, require the right one."""
    records = _records(1, range(5))
    old, new = (build_message_set(records, magic, CODECS[LZ4]) for magic in (0, 1))
    assert lz4_decode_old_kafka(old[26:]) == _set(0, range(5))
    with pytest.raises(RuntimeError):
        lz4_decode(old[26:])
    assert lz4_decode(new[34:]) == _set(1, range(5))


@pytest.mark.parametrize("codec", [NONE, GZIP, SNAPPY, LZ4])
def test_append_time_is_built_so_that_kafka_python_sees_it(codec: int) -> None:
    records = _records(1, range(5), append=TIME + 1)
    data = build_message_set(records, 1, CODECS[codec])
    assert _kafka_records(data) == records == list(read_records(data))
    assert _kafka_records(build_message_set(records, 0, CODECS[codec])) == _records(0, range(5))


@pytest.mark.parametrize("magic", [0, 1])
def test_sets_compressed_by_zstd_are_not_built(magic: int) -> None:
    with pytest.raises(ConfigError, match=f"magic {magic} can't be compressed by zstd"):
        build_message_set(_records(magic, range(5)), magic, CODECS[ZSTD])


def test_a_level_is_used() -> None:
    records = [Record(number, TIME, CREATE_TIME, b"k%d" % number, b"v" * 50, ()) for number in range(300)]
    fast, small = (build_message_set(records, 1, CODECS[GZIP], level) for level in (1, 9))
    assert len(small) < len(fast)
    assert _kafka_records(small) == _kafka_records(fast) == records


optional_bytes = st.none() | st.binary(max_size=30)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([0, 1]),
    st.sampled_from([NONE, GZIP, SNAPPY, LZ4]),
    st.integers(0, 1 << 62),
    st.lists(st.tuples(st.integers(1, 1 << 40), st.integers(-1, 1 << 50), optional_bytes, optional_bytes), min_size=1),
)
def test_any_records(
    magic: int, codec: int, first: int, rows: list[tuple[int, int, bytes | None, bytes | None]]
) -> None:
    """kafka-python and we read the records of the sets that we build; we also read those built by hand."""
    records, offset = [], first
    for step, timestamp, key, value in rows:
        records.append(Record(offset, timestamp if magic else -1, CREATE_TIME if magic else -1, key, value, ()))
        offset += step
    data = build_message_set(records, magic, CODECS[codec])
    assert _kafka_records(data) == records
    assert list(read_records(data)) == records
    shift = first if magic and codec else 0
    plain = b"".join(_message(magic, r.offset - shift, r.timestamp, r.key, r.value) for r in records)
    last = records[-1].offset
    by_hand = plain if codec == NONE else _wrapper(magic, last, 0, plain, codec)
    assert list(read_records(by_hand)) == records
    if codec == NONE:
        assert data == by_hand
