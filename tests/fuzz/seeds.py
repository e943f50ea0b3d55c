"""Seeds for the fuzzer: slices of logs that Apache Kafka wrote, and batches of all magics and codecs."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path

from spark_klog.records.contract import CREATE_TIME, LOG_APPEND_TIME, NO_TIMESTAMP, NO_TIMESTAMP_TYPE, Record
from spark_klog.records.formats.batch import iter_batches
from spark_klog.records.formats.batch_v2 import BatchHeader, body, build_batch
from spark_klog.records.formats.message_set import build_message, build_message_set, inner_set, key_and_value
from spark_klog.records.kernels.reference import append_record
from spark_klog.wire.codecs import CODECS, codec_by_id
from tests.support.brokers import log_07

from .avro_rows import avro_seeds
from .envelope import Mode, varint
from .protobuf_rows import protobuf_seeds

_DATA = Path(__file__).parent.parent / "data"
_LARGEST = 1200
_TIME = 1_700_000_000_000
_VALUES = (b"value" * 5, b"", None, b"\x00\xff" * 3)
_KEYS = (b"key", None, b"", b"\x00\x00\x00\x01")
_HEADERS = ((), (("h", b"v"), ("n", None)), (("\u20ac", b""), ("\U0001f600", b"")), (("\xe9", b""),))


def seeds(target: str) -> Iterator[bytes]:
    """Seeds for a target of targets.py."""
    if target == "codecs":
        yield from _codec_seeds()
        return
    if target == "avro":
        yield from avro_seeds()
        return
    if target == "protobuf":
        yield from protobuf_seeds()
        return
    knobs = [bytes((mode, span, choice, 0)) for mode, span, choice in ((Mode.WRAP, 0, 0x20), (Mode.FIT, 0x44, 7))]
    if target != "message_07":
        for source in _sources():
            yield from (head + source for head in knobs)
        for log in _golden():
            yield bytes((Mode.RAW, 0, 6, 3)) + log
        for span in (0, 0x10, 0x31, 0x43, 0x52, 0x65):
            yield bytes((Mode.WRAP, span, 0, 0)) + b"".join(_small_batches(100))
        for offset in (2**63 - 9, 2**63 - 7):
            yield bytes((Mode.WRAP, 0, 0, 0)) + b"".join(_small_batches(offset))
        for attributes in (0x04, 0x34):
            yield bytes((Mode.MEND, 0, 3, 0)) + _bomb(attributes)
    if target in ("message_07", "dump"):
        for source in _sources_07():
            yield from (bytes((mode, 5, 1, 0)) + source for mode in (Mode.RAW, Mode.WRAP))


def source_of(log: bytes) -> bytes:
    """Convert a log to a source (see envelope.py)."""
    result = bytearray()
    for header, batch in iter_batches(log):
        if isinstance(header, BatchHeader):
            entry = bytearray(batch[:61]) + body(header, batch)
        elif header.codec_id:
            _, value = key_and_value(header, batch)
            inner = source_of(bytes(inner_set(header, batch)))
            entry = bytearray(batch[: len(batch) - len(value or b"") - 4]) + struct.pack(">i", len(inner)) + inner
        else:
            entry = bytearray(batch)
        struct.pack_into(">i", entry, 8, len(entry) - 12)
        result += entry
    return bytes(result)


def _golden() -> Iterator[bytes]:
    """The smallest batches of each golden log, and its first ones."""
    for path in sorted(_DATA.glob("kafka-*/logs/*/*.log")):
        batches = [bytes(batch) for _, batch in iter_batches(path.read_bytes())]
        small = sorted(batches, key=len)[:2]
        yield b"".join(batch for batch in batches if batch in small)
        if len(first := b"".join(batches[:6])) < _LARGEST:
            yield first


def _sources() -> Iterator[bytes]:
    for log in _golden():
        if len(source := source_of(log)) < _LARGEST:
            yield source
    generated = [source_of(log) for log in _generated()]
    yield from generated
    for number in range(0, len(generated), 3):  # mix magics and codecs
        yield b"".join(generated[number::7])


def _rows(kind: int) -> list[Record]:
    time = NO_TIMESTAMP if kind == NO_TIMESTAMP_TYPE else _TIME
    return [
        Record(10 + row, time if kind else time + 5 * row, kind, _KEYS[row], _VALUES[row], _HEADERS[row])
        for row in range(4)
    ]


def _generated() -> Iterator[bytes]:
    for magic, kind in ((0, NO_TIMESTAMP_TYPE), (1, CREATE_TIME), (1, LOG_APPEND_TIME)):
        for codec_id in range(4):
            yield build_message_set(_rows(kind), magic, codec_by_id(codec_id))
    for codec in CODECS.values():
        for attributes in (0, 8, 0x10):
            records = bytearray()
            for record in _rows(CREATE_TIME):
                append_record(records, record.timestamp - _TIME, record.offset - 10, *record[3:])
            yield build_batch(
                records,
                4,
                base_timestamp=_TIME,
                max_timestamp=_TIME + 15,
                codec=codec,
                base_offset=10,
                attributes=attributes,
                producer_id=7,
            )
    far = bytearray()
    for delta in (2**62, -(2**62), 2**63 - 1):
        append_record(far, delta, 2**31 - 1, None, None)
    yield build_batch(far, 3, base_timestamp=-(2**63), max_timestamp=2**62, last_offset_delta=2**31 - 1)
    marker = bytearray()
    append_record(marker, 0, 0, struct.pack(">hh", 0, 0), bytes(6))
    yield build_batch(
        marker, 1, base_timestamp=_TIME, max_timestamp=_TIME, base_offset=20, attributes=0x30, producer_id=7
    )
    inner = build_message_set(_rows(CREATE_TIME)[:2], 1, codec_by_id(1))
    yield build_message(1, 12, _TIME, None, codec_by_id(2).compress(inner), 2)


def _small_batches(offset: int) -> Iterator[bytes]:
    """Batches of few records, with consecutive offsets."""
    for count in (1, 1, 2, 1, 3):
        records = bytearray()
        for delta in range(count):
            append_record(records, delta, delta, None, b"v")
        yield build_batch(records, count, base_timestamp=_TIME, max_timestamp=_TIME, base_offset=offset)
        offset += count


def _bomb(attributes: int) -> bytes:
    """A batch with one record, whose key grows from 3 KB to 100 MB when zstd decompresses it."""
    runs, size = 800, 128 * 1024
    content = b"\x00" * 3 + varint(runs * size)
    start = varint(len(content) + runs * size + 2) + content
    blocks = [(0, len(start), start), *[(1, size, b"\x00")] * runs, (0, 2, b"\x01\x00")]
    body = bytes.fromhex("28b52ffd0038") + b"".join(
        ((number == len(blocks) - 1) | kind << 1 | count << 3).to_bytes(3, "little") + content
        for number, (kind, count, content) in enumerate(blocks)
    )
    return build_batch(body, 1, base_timestamp=0, max_timestamp=0, attributes=attributes, producer_id=7)


def _sources_07() -> Iterator[bytes]:
    payloads = [b"", b"payload", b"\x00" * 20]
    for magic in (0, 1):
        yield b"".join(log_07.message(payload, magic) for payload in payloads)
    for codec_id in (1, 2):
        yield log_07.compressed(payloads, codec_id)
        content = b"".join(map(log_07.message, payloads))
        for _ in range(3):  # nested sets, not compressed yet
            content = struct.pack(">ibbI", 6 + len(content), 1, codec_id, 0) + content
        yield content + log_07.message(b"last", 0)


def _codec_seeds() -> Iterator[bytes]:
    rng = random.Random(1)
    contents = [b"", b"a", b"abc" * 50, rng.randbytes(60), bytes(300) + rng.randbytes(20), bytes(5000)]
    for codec in list(CODECS.values())[1:]:
        for content in contents:
            compressed = bytes(codec.compress(content))
            yield bytes((codec.id, 0)) + compressed
            yield bytes((codec.id, 1)) + compressed * 2
            yield bytes((codec.id | 8, 0)) + compressed[_MENDED[codec.id] :]
    for path in sorted(_DATA.glob("kafka-*/logs/*/*.log")):
        for header, batch in list(iter_batches(path.read_bytes())):
            if header.codec_id and len(batch) < _LARGEST:
                value = batch[61:] if isinstance(header, BatchHeader) else key_and_value(header, batch)[1]
                yield bytes((header.codec_id, 0)) + bytes(value or b"")


#: Size of the header that the functions in `MEND` add, by codec.
_MENDED = {1: 10, 2: 16, 3: 4, 4: 4}
