"""Segments of Apache Kafka (0.10.2.2: magic 0 and 1, 3.9.1: magic 2), against what real clients read from them.

The .jsonl files beside the logs hold the clients' records. We read the logs as records, and as columns by every kernel.
"""

from __future__ import annotations

import base64
import itertools
import json
import struct
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from spark_klog.columns.decode import PartitionDecoder
from spark_klog.columns.schema import FULL
from spark_klog.errors import ConfigError, CorruptBatchError
from spark_klog.log.segments.transaction_index import parse_transaction_index
from spark_klog.records import kernels
from spark_klog.records.contract import Record
from spark_klog.records.formats.batch import iter_batches, next_offset_after, whole_batches
from spark_klog.records.reading.reader import AbortedTransactions
from tests.support.brokers.batches import read_records

DATA = Path(__file__).parent.parent / "data"
OLD, NEW = DATA / "kafka-0.10.2.2", DATA / "kafka-3.9.1"
#: (folder of the version, topic)
TOPICS = [
    *((OLD, f"v{magic}-{codec}") for magic in (0, 1) for codec in ("none", "gzip", "snappy", "lz4")),
    *((NEW, f"v2-{codec}") for codec in ("none", "gzip", "snappy", "lz4", "zstd")),
]
IDS = [name for _, name in TOPICS]
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
ALL = (0, 1 << 60)
#: Their ends are those of batches, or one beside them.
_RANGES = (
    (0, 0),
    (0, 1),
    (1, 18),
    (17, 60),
    (18, 61),
    (18, 18),
    (59, 60),
    (118, 119),
    (118, 120),
    (119, 500),
    (120, 500),
)
Line = dict[str, Any]


def _kernels() -> Iterator[str]:
    """The names of the kernels that read message sets."""
    for name in ("reference", "native"):
        try:
            if hasattr(kernels.load(name), "message_run"):
                yield name
        except ConfigError:
            pass


@pytest.fixture(params=_kernels())
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel that `PartitionDecoder` uses."""
    name: str = request.param
    monkeypatch.setenv("SPARK_KLOG_KERNEL", name)
    return name


def _text(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _line(record: Record) -> Line:
    """A record as in the .jsonl files, with librdkafka's timestamp types: 0 none, 1 create, 2 log append."""
    return {
        "offset": record.offset,
        "timestamp": None if record.timestamp_type < 0 else record.timestamp,
        "timestampType": record.timestamp_type + 1,
        "key": _text(record.key),
        "value": _text(record.value),
        "headers": [[name, _text(value)] for name, value in record.headers],
    }


def _expected(folder: Path, name: str) -> list[Line]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def _segments(folder: Path, topic: str) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((folder / "logs" / f"{topic}-0").glob("*.log")))


def _columns(data: Sequence[bytes], first: int, end: int) -> list[Line]:
    """The data as `PartitionDecoder` decodes it, as lines."""
    decoder = PartitionDecoder("t", 3, FULL)
    batches = [batch for chunk in data for batch in decoder.decode(chunk, first, end)]
    batches += decoder.finish()
    lines = []
    for batch in batches:
        batch.validate(full=True)
        for row in batch.to_pylist():
            assert (row["topic"], row["partition"]) == ("t", 3)
            milliseconds, rest = divmod(row["timestamp"] - EPOCH, timedelta(milliseconds=1))
            assert not rest
            if row["timestampType"] == -1:
                assert milliseconds == -1
            lines.append(
                {
                    "offset": row["offset"],
                    "timestamp": None if row["timestampType"] == -1 else milliseconds,
                    "timestampType": row["timestampType"] + 1,
                    "key": _text(row["key"]),
                    "value": _text(row["value"]),
                    "headers": [[header["key"], _text(header["value"])] for header in row["headers"] or ()],
                }
            )
    return lines


def test_the_vectors_are_what_their_names_say() -> None:
    """By struct alone: check the magic and a batch's codec, so that no file is there twice by mistake."""
    for folder, name in TOPICS:
        data, position, seen = _segments(folder, name), 0, set()
        while position < len(data):
            magic = data[position + 16]
            attributes = struct.unpack_from(">h", data, position + 21)[0] if magic == 2 else data[position + 17]
            seen.add((magic, attributes & 7))
            position += 12 + struct.unpack_from(">i", data, position + 8)[0]
        codec = ("none", "gzip", "snappy", "lz4", "zstd").index(name[3:])
        assert {magic for magic, _ in seen} == {int(name[1])}
        assert codec in {used for _, used in seen}


@pytest.mark.parametrize(("folder", "name"), TOPICS, ids=IDS)
def test_segment_gives_exactly_what_a_client_read(folder: Path, name: str) -> None:
    data = _segments(folder, name)
    expected = _expected(folder, name)
    assert len(expected) == 120
    assert [_line(record) for record in read_records(data)] == expected
    assert next_offset_after(data, 0) == 120
    assert sum(header.size for header, _ in whole_batches(data)) == len(data)


@pytest.mark.parametrize(("folder", "name"), TOPICS, ids=IDS)
def test_columns_are_exactly_what_a_client_read(folder: Path, name: str, kernel: str) -> None:
    assert _columns([_segments(folder, name)], *ALL) == _expected(folder, name)


@pytest.mark.parametrize(("folder", "name"), TOPICS, ids=IDS)
def test_columns_of_every_batch_by_itself(folder: Path, name: str, kernel: str) -> None:
    """Small fetches return single batches."""
    batches = [bytes(batch) for _, batch in iter_batches(_segments(folder, name))]
    assert _columns(batches, *ALL) == _expected(folder, name)


@pytest.mark.parametrize(("folder", "name"), TOPICS, ids=IDS)
def test_ranges_of_offsets(folder: Path, name: str, kernel: str) -> None:
    data, expected = _segments(folder, name), _expected(folder, name)
    batches = [bytes(batch) for _, batch in iter_batches(data)]
    for first, end in _RANGES:
        wanted = [line for line in expected if first <= line["offset"] < end]
        assert _columns([data], first, end) == wanted
        assert _columns(batches, first, end) == wanted


@pytest.mark.parametrize(("folder", "name"), TOPICS, ids=IDS)
def test_a_fetch_that_ends_within_a_batch(folder: Path, name: str, kernel: str) -> None:
    """The fetch ends at every position near the ends of batches, and at many others."""
    data, expected = _segments(folder, name), _expected(folder, name)
    ends, end = [], 0
    for header, batch in iter_batches(data):
        end += len(batch)
        ends.append((end, header.next_offset))
    sizes = {size + step for size, _ in ends[:6] for step in (-1, 0, 1, 11, 12, 16, 17, 30)}
    for size in sorted(sizes | set(range(0, len(data), 1201))):
        whole = max((next_offset for end, next_offset in ends if end <= size), default=0)
        assert [_line(record) for record in read_records(data[:size])] == expected[:whole]
        assert _columns([data[:size]], *ALL) == expected[:whole]


def _moved(data: bytes, by: int) -> bytes:
    """Shift the offset field of each batch by struct; in compressed magic 0 that moves no record."""
    moved, position = bytearray(data), 0
    while position < len(moved):
        offset, length = struct.unpack_from(">qi", moved, position)
        struct.pack_into(">q", moved, position, offset + by)
        position += 12 + length
    return bytes(moved)


@pytest.mark.parametrize("codecs", list(itertools.product(("none", "gzip"), ("none", "lz4"), ("none", "zstd"))))
def test_a_log_of_all_magics(codecs: tuple[str, str, str], kernel: str) -> None:
    """A log that brokers of three generations wrote, one after the other."""
    parts = [(OLD, f"v0-{codecs[0]}"), (OLD, f"v1-{codecs[1]}"), (NEW, f"v2-{codecs[2]}")]
    data = b"".join(_moved(_segments(*part), 120 * number) for number, part in enumerate(parts))
    expected = [
        {**line, "offset": line["offset"] + 120 * number}
        for number, part in enumerate(parts)
        for line in _expected(*part)
    ]
    assert [line["offset"] for line in expected] == list(range(360))
    assert [_line(record) for record in read_records(data)] == expected
    for span in ((0, 360), (119, 121), (120, 240), (100, 300), (239, 241), (240, 999), (360, 999)):
        assert _columns([data], *span) == expected[slice(*span)]


def _first_batches(folder: Path, name: str, count: int) -> Iterator[tuple[bytes, list[Line]]]:
    """The first batches, split by struct, each with its lines; offsets in the file are dense from 0 on."""
    data, lines, position, first = _segments(folder, name), _expected(folder, name), 0, 0
    for _ in range(count):
        offset, length = struct.unpack_from(">qi", data, position)
        delta = struct.unpack_from(">i", data, position + 23)[0] if data[position + 16] == 2 else 0
        yield data[position : position + 12 + length], lines[first : offset + delta + 1]
        position, first = position + 12 + length, offset + delta + 1


def test_magics_and_codecs_in_turn(kernel: str) -> None:
    """Producers of a topic need not agree on them: one log has some batches of each, in turn."""
    topics = [(OLD, "v1-none"), (OLD, "v1-gzip"), (NEW, "v2-none"), (OLD, "v1-lz4"), (OLD, "v0-none"), (NEW, "v2-zstd")]
    data, expected = b"", list[Line]()
    for count, topic in enumerate(topics * 2, 1):
        for batch, lines in _first_batches(*topic, count=min(count, 5)):
            data += _moved(batch, len(expected) - lines[0]["offset"])
            expected += [{**line, "offset": len(expected) + index} for index, line in enumerate(lines)]
    assert len({line["timestampType"] for line in expected}) == 2
    assert [_line(record) for record in read_records(data)] == expected
    for first, end in ((0, 1 << 60), (3, len(expected) - 3), (40, 41)):
        assert _columns([data], first, end) == expected[first:end]


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4"])
def test_offsets_inside_magic_0_are_absolute_and_inside_magic_1_relative(codec: str, kernel: str) -> None:
    """Every wrapper's offset is raised by 1000; only records of magic 1 follow it."""
    for magic, shift in ((0, 0), (1, 1000)):
        expected, data = _expected(OLD, f"v{magic}-{codec}"), b""
        for batch in (bytes(batch) for _, batch in iter_batches(_segments(OLD, f"v{magic}-{codec}"))):
            is_wrapper = batch[17] & 7
            data += _moved(batch, 1000) if is_wrapper else batch
            last = struct.unpack_from(">q", batch)[0]
            if not is_wrapper:
                expected[last]["offset"] -= shift
        expected = [{**line, "offset": line["offset"] + shift} for line in expected]
        assert [_line(record) for record in read_records(data)] == expected
        assert _columns([data], *ALL) == expected


@pytest.mark.parametrize("codec", ["none", "gzip"])
@pytest.mark.parametrize("magic", [0, 1])
def test_damage_beyond_the_range_is_not_looked_at(magic: int, codec: str, kernel: str) -> None:
    """A wrapper does not have its first offset: that follows from the batch before it."""
    good, after = _segments(OLD, f"v{magic}-{codec}"), _segments(OLD, f"v{magic}-gzip")
    single = struct.unpack_from(">i", after, 8)[0] + 12
    wrapper = bytearray(after[single : single + struct.unpack_from(">i", after, single + 8)[0] + 12])
    assert wrapper[17] == 1
    struct.pack_into(">q", wrapper, 0, 120 + 16)
    wrapper[-1] ^= 1
    expected = _expected(OLD, f"v{magic}-{codec}")
    for first in (0, 119):
        assert _columns([good + wrapper], first, 120) == expected[first:]
        with pytest.raises(CorruptBatchError, match="message of offset 136"):
            _columns([good + wrapper], first, 121)


def test_read_uncommitted_skips_control_batches() -> None:
    read = [_line(record) for record in read_records(_segments(NEW, "v2-transactions"))]
    assert read == _expected(NEW, "v2-transactions.read_uncommitted")


def test_read_committed_skips_aborted_transactions() -> None:
    index = NEW / "logs" / "v2-transactions-0" / "00000000000000000005.txnindex"
    entries = parse_transaction_index(index.read_bytes(), index.name)
    aborted = AbortedTransactions((entry.producer_id, entry.first_offset) for entry in entries)
    read = [_line(record) for record in read_records(_segments(NEW, "v2-transactions"), aborted)]
    assert read == _expected(NEW, "v2-transactions.read_committed")
