"""Partition folders read without a broker: against lists of records, with damage, and with files deleted meanwhile."""

from __future__ import annotations

import base64
import gzip
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.errors import ConfigError, CorruptBatchError, DecodeError, OffsetOutOfRange
from spark_klog.log.stored import segment
from spark_klog.log.stored.directory import Directory, StoredDirectories
from spark_klog.log.stored.partition import GONE, StoredPartition
from spark_klog.log.stored.partition_07 import StoredPartition07
from spark_klog.records.contract import Record
from spark_klog.records.formats.message_set import build_message_set
from spark_klog.records.reading.reader import AbortedTransactions, BadBatch
from spark_klog.wire.checksums import crc32c
from spark_klog.wire.codecs import codec_by_name
from tests.log.memory_files import MemoryFiles
from tests.support.brokers.batches import make_batch, read_records, walk
from tests.support.brokers.log_07 import GZIP, message as message_07

GOLDEN = Path(__file__).parent.parent / "data"
NOW = 1_700_000_000_000
FOLDER = "logs/t-0"


def small_blocks() -> Any:
    """Make blocks, windows and steps so small that little data needs many of them."""
    return mock.patch.multiple(segment, BLOCK_BYTES=300, _LEAST_BYTES=80), mock.patch.multiple(
        segment, _WALK_BYTES=100, _SEARCHED_BYTES=24
    )


def partition(files: MemoryFiles, log_start: int = 0, read_committed: bool = False) -> StoredPartition:
    return StoredPartition(files, FOLDER, "t", 0, log_start, read_committed=read_committed)


def read(log: StoredPartition, start: int, end: int, read_committed: bool = False) -> list[Record]:
    """The records of a range; checks that `next_offset` never decreases."""
    found: list[Record] = []
    last = start
    for batches in log.read(start, end):
        aborted = AbortedTransactions(batches.aborted) if read_committed else None
        found += [record for record in read_records(bytes(batches.data), aborted) if start <= record.offset < end]
        assert batches.next_offset >= last
        last = batches.next_offset
    return found


# ----- a model


@dataclass
class Log:
    """A folder's files, and the records that must be read from them."""

    records: list[Record] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    end: int = 0


def batch_bytes(kind: str, records: list[Record]) -> bytes:
    """A batch, messages, or a wrapper of them, with the records' offsets."""
    if kind.startswith("v2"):
        first = records[0]
        batch = make_batch([(r.key, r.value) for r in records], [r.timestamp for r in records], kind[3:])
        struct.pack_into(">q", batch, 0, first.offset)
        return bytes(batch)
    return build_message_set(records, int(kind[1]), codec_by_name(kind[3:]))


KINDS = ["v2-none", "v2-lz4", "v1-none", "v1-gzip", "v0-none", "v0-gzip"]
DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "right": lambda data: data,
    "missing": lambda data: None,
    "empty": lambda data: b"",
    "preallocated": lambda data: data + bytes(96),
    "cut": lambda data: data[: len(data) // 2 + 3],
    "zeros": lambda data: bytes(len(data)),
    "shifted": lambda data: data[5:] + b"\x00\x00\x07\x01\x02",
    "ones": lambda data: b"\xff" * len(data),
    "reversed": lambda data: data[::-1],
    "doubled": lambda data: data[: len(data) // 2] * 2,
}


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """Segments of batches of all magics, with gaps as after compaction, unordered timestamps and damaged indexes.

    The last segment may end with an incomplete batch.
    """
    log = Log(end=draw(st.sampled_from([0, 7, 3_000_000_000])))
    for number in range(draw(st.integers(1, 4))):
        base, content, index, time_index = log.end, b"", b"", b""
        since, largest = 0, (-1, 0)
        first_offsets = draw(st.booleans())  # as in indexes of Kafka before 0.11
        for _ in range(draw(st.integers(0 if number else 1, 8))):
            kind, count = draw(st.sampled_from(KINDS)), draw(st.integers(1, 5))
            log.end += draw(st.sampled_from([0, 0, 0, 5]))
            records = []
            for offset in range(log.end, log.end + count):
                time = -1 if kind[1] == "0" else NOW + 10 * (offset - base) + draw(st.integers(-60, 60))
                key, value = b"k%d" % offset, b"v" * draw(st.integers(0, 40))
                records.append(Record(offset, time, -1 if time < 0 else 0, key, value, ()))
            data = batch_bytes(kind, records)
            # the indexes count these records as one batch, but each message without a wrapper as one of its own
            last = records[0].offset if kind in ("v1-none", "v0-none") else records[-1].offset
            if since > 100:
                index += struct.pack(">ii", (log.end if first_offsets else last) - base, len(content))
            top = max(records, key=lambda record: record.timestamp)
            if top.timestamp > largest[0]:
                largest = top.timestamp, top.offset - base
            if since > 100:
                if largest[0] >= 0 and not time_index.endswith(struct.pack(">qi", *largest)):
                    time_index += struct.pack(">qi", *largest)
                since = 0
            since += len(data)
            content += data
            log.records += records
            log.end += count
        stem = f"{FOLDER}/{base:020d}"
        log.files[f"{stem}.log"] = content
        for suffix, entries in ((".index", index), (".timeindex", time_index)):
            damaged = DAMAGE[draw(st.sampled_from(sorted(DAMAGE)))](entries)
            if damaged is not None:
                log.files[stem + suffix] = damaged
        if draw(st.booleans()):
            log.files[f"{stem}.log.deleted"] = log.files[f"{stem}.log.cleaned"] = b"not looked at"
    tail = draw(st.sampled_from(["", "partial", "header", "zeros"]))
    if tail:
        following = batch_bytes("v2-none", [Record(log.end, NOW, 0, b"k", b"v" * 50, ())])
        log.files[f"{stem}.log"] += {"partial": following[:90], "header": following[:9], "zeros": bytes(500)}[tail]
    return log


def _any_log(log: Log, data: st.DataObject) -> None:
    with small_blocks()[0], small_blocks()[1]:
        files = MemoryFiles(log.files)
        stored = partition(files)
        first = min(int(path[-24:-4]) for path in log.files if path.endswith(".log"))
        assert (stored.start_offset, stored.end_offset, stored.damage) == (first, log.end, None)
        assert read(stored, first, log.end) == log.records
        start = data.draw(st.integers(first, log.end), label="start")
        end = data.draw(st.integers(start, log.end), label="end")
        wanted = [record for record in log.records if start <= record.offset < end]
        assert read(stored, start, end) == wanted
        cuts = stored.cuts(start, end, data.draw(st.integers(1, 600), label="target"))
        assert cuts == sorted(set(cuts))
        assert all(start < cut < end for cut in cuts)
        pieces = [read(stored, low, high) for low, high in zip([start, *cuts], [*cuts, end], strict=True)]
        assert [record for piece in pieces for record in piece] == wanted
        times = {record.timestamp for record in log.records if record.timestamp >= 0}
        for time in (*sorted(times), NOW + 10**9):
            assert stored.offset_for_time(time) == next((r.offset for r in log.records if r.timestamp >= time), None)
        for record in wanted:
            assert stored.timestamp_type(record.offset) == record.timestamp_type
        if wanted:
            later = partition(files, log_start=wanted[-1].offset)
            assert later.start_offset == wanted[-1].offset
            top = max(0, *(record.timestamp for record in log.records))
            since = [record for record in log.records if record.offset >= wanted[-1].offset]
            assert later.offset_for_time(top) == next((r.offset for r in since if r.timestamp == top), None)


_LOGS = given(log=logs(), data=st.data())
test_any_log = settings(max_examples=80, deadline=None)(_LOGS(_any_log))
test_many_logs = pytest.mark.test_all("long")(settings(max_examples=250, deadline=None)(_LOGS(_any_log)))


# ----- use of the indexes


def build(batches: int = 3000, segments: int = 3, size: int = 400) -> tuple[MemoryFiles, bytes]:
    """Segments of batches of one record each, with indexes as Kafka writes them; the values are the offsets."""
    files, everything, offset = MemoryFiles(), b"", 0
    for _ in range(segments):
        base, content, index, time_index, since = offset, bytearray(), b"", b"", 0
        for _ in range(batches):
            batch = make_batch([(None, b"%d" % offset + b" " * size)], [NOW + offset])
            struct.pack_into(">q", batch, 0, offset)
            if since > 4096:
                index += struct.pack(">ii", offset - base, len(content))
                time_index += struct.pack(">qi", NOW + offset, offset - base)
                since = 0
            since += len(batch)
            content += batch
            offset += 1
        time_index += struct.pack(">qi", NOW + offset - 1, offset - 1 - base)
        stem = f"{FOLDER}/{base:020d}"
        files.files |= {f"{stem}.log": bytes(content), f"{stem}.index": index, f"{stem}.timeindex": time_index}
        everything += content
    return files, everything


@pytest.fixture(scope="module")
def built() -> tuple[MemoryFiles, bytes]:
    return build()


@pytest.mark.parametrize("zeros", [0, 80_000])
def test_little_is_read_to_find_a_few_records(built: tuple[MemoryFiles, bytes], zeros: int) -> None:
    """Kafka preallocates the indexes of its active segment, so zeros may follow their entries."""
    files = MemoryFiles(built[0].files)
    for path in [path for path in files.files if path.endswith("index")]:
        files.files[path] += bytes(zeros)
    stored = partition(files)
    walked, read_from = 20_000, 20_000
    with mock.patch.multiple(segment, _WALK_BYTES=walked, _SEARCHED_BYTES=24):
        with mock.patch.multiple(segment, BLOCK_BYTES=read_from, _LEAST_BYTES=read_from):
            for offset in range(0, 9000, 37):
                before = files.read_bytes
                assert [record.offset for record in read(stored, offset, offset + 2)] == [offset, offset + 1]
                assert files.read_bytes - before < 2 * (2 * walked + read_from)
            before = files.read_bytes
            assert stored.offset_for_time(NOW + 2222) == 2222
            assert stored.end_offset == 9000
            assert files.read_bytes - before < 8 * walked


def test_an_index_of_kafka_before_0_11(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entries have first offsets; offsets within a compressed set are found, too."""
    content, index, offset = b"", b"", 0
    for _ in range(2000):
        records = [Record(offset + inner, NOW, 0, None, b"v%d" % inner, ()) for inner in range(3)]
        index += struct.pack(">ii", offset, len(content)) if content else b""
        content += batch_bytes("v1-gzip", records)
        offset += 3
    files = MemoryFiles({f"{FOLDER}/{0:020d}.log": content, f"{FOLDER}/{0:020d}.index": index})
    stored = partition(files)
    monkeypatch.setattr(segment, "_WALK_BYTES", 1000)
    monkeypatch.setattr(segment, "_LEAST_BYTES", 1000)
    assert [record.offset for record in read(stored, 5000, 5010)] == [*range(5000, 5010)]
    assert files.read_bytes < 40_000 < len(content)


def test_cuts_are_even(built: tuple[MemoryFiles, bytes]) -> None:
    stored = partition(MemoryFiles(built[0].files))
    cuts = stored.cuts(0, 9000, len(built[1]) // 10)
    assert len(cuts) == 9
    sizes = [high - low for low, high in zip([0, *cuts], [*cuts, 9000], strict=True)]
    assert max(sizes) - min(sizes) < 50
    assert stored.cuts(0, 9000, 10 * len(built[1])) == []
    [half] = stored.cuts(2000, 4000, len(built[1]) * 1500 // 9000)
    assert abs(half - 3000) < 30


def test_cuts_without_any_index(built: tuple[MemoryFiles, bytes]) -> None:
    files = MemoryFiles({path: data for path, data in built[0].files.items() if path.endswith(".log")})
    cuts = partition(files).cuts(0, 9000, len(built[1]) // 4)
    assert [round(cut / 9000, 1) for cut in cuts] in ([0.2, 0.4, 0.6, 0.8], [0.2, 0.5, 0.8])


def test_an_index_of_another_segment_is_not_believed(built: tuple[MemoryFiles, bytes]) -> None:
    files = MemoryFiles(built[0].files)
    names = sorted(path for path in files.files if path.endswith(".index"))
    data = files.files[names[0]]
    files.files[names[1]] = data[: len(data) // 2 + 1].ljust(len(data), b"\x01")
    files.files[names[2]] = struct.pack(">ii", 100, 1) * 50
    entries = [*struct.iter_unpack(">ii", files.files[names[0]])]
    late = [(offset, position) for (offset, _), (_, position) in zip(entries, entries[5:], strict=False)]
    files.files[names[0]] = b"".join(struct.pack(">ii", *entry) for entry in late)
    for start in (100, 1500, 2990):
        assert [record.offset for record in read(partition(files), start, start + 20)] == [*range(start, start + 20)]
    for start in (3000, 4000, 5990, 6000, 8000):
        assert [record.offset for record in read(partition(files), start, start + 20)] == [*range(start, start + 20)]


def test_a_time_index_that_claims_too_much_is_not_believed(built: tuple[MemoryFiles, bytes]) -> None:
    files = MemoryFiles(built[0].files)
    path = f"{FOLDER}/{0:020d}.timeindex"
    entries = [*struct.iter_unpack(">qi", files.files[path])]
    late = [(time, offset) for (time, _), (_, offset) in zip(entries, entries[9:], strict=False)]
    files.files[path] = b"".join(struct.pack(">qi", *entry) for entry in late)
    for offset in (0, 1000, 2000):
        assert partition(files).offset_for_time(NOW + offset) == offset


# ----- files that are deleted or cut meanwhile


def delete(files: MemoryFiles, base: int) -> None:
    """Delete a segment as retention does, which renames the files first."""
    for path in [path for path in files.files if f"/{base:020d}." in path]:
        files.files[f"{path}.deleted"] = files.files.pop(path)


def test_a_segment_that_is_gone_since_it_was_listed() -> None:
    files, _ = build(100)
    stored = partition(files)
    delete(files, 0)
    with pytest.raises(OffsetOutOfRange, match=r"offsets \[50, 250\) of t-0 .* holds \[100, 300\)") as caught:
        read(stored, 50, 250)
    assert caught.value.available == (100, 300)
    assert [record.offset for record in read(stored, 100, 250)] == [*range(100, 250)]


def test_segments_that_go_while_they_are_read() -> None:
    """An open segment stays readable; the read fails at the next, deleted one."""
    files, _ = build(100)
    stored = partition(files)
    found: list[int] = []

    def consume() -> None:
        for batches in stored.read(0, 300):
            found.extend(record.offset for record in read_records(bytes(batches.data)))
            delete(files, 0)
            delete(files, 100)

    with pytest.raises(OffsetOutOfRange) as caught:
        consume()
    assert found == [*range(100)]
    assert (caught.value.requested, caught.value.available) == ((100, 300), (200, 300))


def test_a_partition_that_is_gone() -> None:
    files, _ = build(10)
    stored = partition(files)
    files.files.clear()
    for start in (0, 30):
        with pytest.raises(OffsetOutOfRange) as caught:
            read(stored, start, 31)
        assert caught.value.available == GONE
    with pytest.raises(FileNotFoundError):
        assert stored.end_offset


def test_segments_that_compaction_has_joined_meanwhile() -> None:
    files, _ = build(100)
    stored = partition(files)
    joined = MemoryFiles(files.files)
    for base in (100, 200):
        joined.files[f"{FOLDER}/{0:020d}.log"] += joined.files.pop(f"{FOLDER}/{base:020d}.log")
        joined.files.pop(f"{FOLDER}/{base:020d}.index")
    files.files = joined.files
    assert [record.offset for record in read(stored, 150, 290)] == [*range(150, 290)]


def test_a_log_that_was_cut() -> None:
    files, _ = build(100)
    stored = partition(files)
    path = f"{FOLDER}/{200:020d}.log"
    files.files[path] = files.files[path][: list(walk(files.files[path]))[50].position]
    with pytest.raises(OffsetOutOfRange) as caught:
        read(stored, 210, 300)
    assert (caught.value.requested, caught.value.available) == ((250, 300), (0, 250))


def test_what_is_written_meanwhile_is_not_there_yet() -> None:
    files, everything = build(50, 1)
    path = f"{FOLDER}/{0:020d}.log"
    batches = [*walk(everything)]
    for size in range(batches[40].position - 100, len(everything), 77):
        files.files[path] = everything[:size]
        end = next(batch.base_offset for batch in batches if batch.position + batch.size > size)
        stored = partition(files)
        assert (stored.end_offset, stored.damage) == (end, None)
        assert len(read(stored, 0, end)) == end


def test_an_empty_last_segment_says_where_the_log_ends() -> None:
    files, _ = build(10, 2)
    files.files[f"{FOLDER}/{25:020d}.log"] = b""  # compaction removed the last records before it
    stored = partition(files)
    assert (stored.start_offset, stored.end_offset) == (0, 25)
    assert [record.offset for record in read(stored, 15, 25)] == [*range(15, 20)]
    assert stored.timestamp_type(22) is None
    assert stored.offset_for_time(NOW + 20) is None


def test_a_folder_without_segments() -> None:
    stored = partition(MemoryFiles({f"{FOLDER}/partition.metadata": b""}), log_start=5)
    assert (stored.start_offset, stored.end_offset, stored.damage) == (5, 5, None)
    assert (read(stored, 5, 5), stored.cuts(5, 5, 1), stored.offset_for_time(0)) == ([], [], None)


# ----- damage


def test_a_tail_that_is_no_batch_is_told() -> None:
    files, everything = build(10, 1)
    path = f"{FOLDER}/{0:020d}.log"
    files.files[path] = everything + b"\x00" * 8 + b"garbage" * 9
    stored = partition(files)
    assert stored.end_offset == 10
    assert f"{path} at position {len(everything)}: " in str(stored.damage)
    assert len(read(stored, 0, 10)) == 10


def test_a_batch_that_is_cut_off_before_another_segment() -> None:
    files, _ = build(10, 2)
    path = f"{FOLDER}/{0:020d}.log"
    files.files[path] = files.files[path][:-5]
    message = rf"{path} at position \d+: the batch is incomplete, \d+ bytes left"
    with pytest.raises(DecodeError, match=message):
        read(partition(files), 0, 20)
    assert len(read(partition(files), 10, 20)) == 10


def test_garbage_between_batches_names_its_place() -> None:
    files, _ = build(10, 2)
    path = f"{FOLDER}/{0:020d}.log"
    position = [*walk(files.files[path])][4].position
    data = bytearray(files.files[path])
    data[position + 8 : position + 12] = b"\x00\x00\x00\x03"
    files.files[path] = bytes(data)
    with pytest.raises(DecodeError, match=rf"{path} at position {position}: .*length 3"):
        read(partition(files), 0, 20)
    assert len(read(partition(files), 0, 4)) == 4


def test_a_corrupt_batch_is_handed_on_and_not_believed() -> None:
    """The decoder reports the damage; a wrong last offset does not end the read early."""
    files, everything = build(10, 1, size=40)
    for batch in walk(everything):
        data = bytearray(everything)
        struct.pack_into(">i", data, batch.position + 23, 1_000_000)  # last offset delta; now the CRC is wrong
        files.files[f"{FOLDER}/{0:020d}.log"] = bytes(data)
        with small_blocks()[0], small_blocks()[1]:
            found = b"".join(bytes(batches.data) for batches in partition(files).read(0, 10))
        assert found == data
        with pytest.raises(CorruptBatchError):
            [*read_records(found)]


# ----- Kafka's own files


def golden_rows(path: Path) -> list[tuple[Any, ...]]:
    def decoded(text: str | None) -> bytes | None:
        return None if text is None else base64.b64decode(text)

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    times = [-1 if row["timestamp"] is None else row["timestamp"] for row in rows]
    return [
        (row["offset"], time, decoded(row["key"]), decoded(row["value"])) for row, time in zip(rows, times, strict=True)
    ]


@pytest.mark.parametrize(
    "path", [path for path in sorted(GOLDEN.glob("*/*.jsonl")) if "transactions" not in path.name], ids=lambda p: p.stem
)
def test_golden_logs(path: Path) -> None:
    files = MemoryFiles.of(path.parent / "logs")
    [log] = [StoredDirectories([Directory(files, str(path.parent / "logs"), "golden")]).open(path.stem, 0)]
    rows = golden_rows(path)
    assert (log.start_offset, log.end_offset) == (0, len(rows))
    found = [record for batches in log.read(0, len(rows), _never) for record in read_records(bytes(batches.data))]
    assert [(r.offset, r.timestamp, r.key, r.value) for r in found] == rows
    for time in {row[1] for row in rows if row[1] >= 0}:
        assert log.offset_for_time(time) == next(row[0] for row in rows if row[1] >= time)


def _never(bad: BadBatch) -> None:
    raise AssertionError(bad)


TRANSACTIONS = GOLDEN / "kafka-3.9.1" / "logs" / "v2-transactions-0"


def transactions() -> MemoryFiles:
    return MemoryFiles({f"{FOLDER}/{path.name}": path.read_bytes() for path in TRANSACTIONS.iterdir()})


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
@pytest.mark.parametrize("is_small", [False, True])
def test_golden_transactions(isolation: str, is_small: bool) -> None:
    rows = golden_rows(GOLDEN / "kafka-3.9.1" / f"v2-transactions.{isolation}.jsonl")
    committed = isolation == "read_committed"
    patches = small_blocks() if is_small else (mock.MagicMock(), mock.MagicMock())
    with patches[0], patches[1]:
        log = partition(transactions(), read_committed=committed)
        assert (log.start_offset, log.end_offset) == (0, 37)
        for start in range(37):
            for end in range(start + 1, 38):
                found = [(r.offset, r.timestamp, r.key, r.value) for r in read(log, start, end, committed)]
                assert found == [row for row in rows if start <= row[0] < end]


def test_a_transaction_that_is_open_ends_read_committed() -> None:
    files = transactions()
    path = f"{FOLDER}/{5:020d}.log"
    data = files.files[path]
    control = [batch for batch in walk(data) if struct.unpack_from(">h", data, batch.position + 21)[0] & 0x20]
    opened: dict[int, int] = {}
    for batch in walk(data):
        if batch.position >= control[-1].position:
            break
        producer, attributes = _producer(data, batch.position)
        if attributes & 0x20:
            opened.pop(producer, None)
        elif attributes & 0x10:
            opened.setdefault(producer, batch.base_offset)
    assert opened, "the last marker ends a transaction"
    files.files[path] = data[: control[-1].position]
    log = partition(files, read_committed=True)
    assert log.end_offset == min(opened.values())
    assert partition(files).end_offset == control[-1].base_offset


@pytest.mark.parametrize("boundary", [6, 11, 17, 24, 31])
def test_transactions_over_many_segments(boundary: int) -> None:
    """Kafka's second segment, split in two: an aborted transaction is in the index of the segment where it ends."""
    files = transactions()
    data, entries = files.files[f"{FOLDER}/{5:020d}.log"], files.files.pop(f"{FOLDER}/{5:020d}.txnindex")
    cut = next(batch for batch in walk(data) if batch.base_offset >= boundary)
    files.files[f"{FOLDER}/{5:020d}.log"] = data[: cut.position]
    files.files[f"{FOLDER}/{cut.base_offset:020d}.log"] = data[cut.position :]
    for entry in struct.iter_unpack(">hqqqq", entries):
        path = f"{FOLDER}/{5 if entry[3] < cut.base_offset else cut.base_offset:020d}.txnindex"
        files.files[path] = files.files.get(path, b"") + struct.pack(">hqqqq", *entry)
    rows = golden_rows(GOLDEN / "kafka-3.9.1" / "v2-transactions.read_committed.jsonl")
    log = partition(files, read_committed=True)
    assert log.end_offset == 37
    for start in range(37):
        for end in (start + 1, min(start + 5, 37), 37):
            found = [record.offset for record in read(log, start, end, True)]
            assert found == [row[0] for row in rows if start <= row[0] < end]


def test_producer_snapshots_shorten_the_walk() -> None:
    """Snapshots of any offset give the same result; damaged ones, and those after the end, are ignored."""
    whole = transactions().files[f"{FOLDER}/{5:020d}.log"]
    before = transactions().files[f"{FOLDER}/{0:020d}.log"]
    for last in walk(whole):
        files, ongoing = transactions(), {}
        files.files[f"{FOLDER}/{5:020d}.log"] = whole[: last.position]
        snapshots = {0: b"", 10**6: b""}
        for batch in walk(before + whole[: last.position]):
            producer, attributes = _producer(before + whole, batch.position)
            snapshots[batch.base_offset] = _snapshot(ongoing)
            if attributes & 0x20:
                ongoing.pop(producer, None)
            elif attributes & 0x10:
                ongoing.setdefault(producer, batch.base_offset)
        expected = min(ongoing.values(), default=max(5, last.base_offset))
        assert partition(files, read_committed=True).end_offset == expected
        for offset, content in snapshots.items():
            path = f"{FOLDER}/{offset:020d}.snapshot"
            for written in (content, content[:-1], content[:9] + b"x" + content[10:]):
                files.files[path] = written
                assert partition(files, read_committed=True).end_offset == expected
        files.files[f"{FOLDER}/{10**6:020d}.snapshot"] = _snapshot({1: 0})
        assert partition(files, read_committed=True).end_offset == expected


def _producer(data: bytes, position: int) -> tuple[int, int]:
    """(producer id, attributes) of a batch."""
    return struct.unpack_from(">q", data, position + 43)[0], struct.unpack_from(">h", data, position + 21)[0]


def _snapshot(ongoing: dict[int, int]) -> bytes:
    """A producer snapshot by Kafka's ProducerSnapshot.json."""
    entries = [struct.pack(">qhiqiqiq", producer, 0, 0, 0, 0, NOW, 0, first) for producer, first in ongoing.items()]
    body = struct.pack(">i", len(entries)) + b"".join(entries)
    return struct.pack(">hI", 1, crc32c(body)) + body


def test_an_abort_that_no_index_has_ends_read_committed(caplog: pytest.LogCaptureFixture) -> None:
    """A running broker, or an index copied before its log, causes this; no aborted record may be returned."""
    files = transactions()
    path = f"{FOLDER}/{5:020d}.txnindex"
    entries = [*struct.iter_unpack(">hqqqq", files.files[path])]
    for count in range(3):
        files.files[path] = files.files[path][: 34 * count]
        if not count:
            del files.files[path]
        log = partition(files, read_committed=True)
        assert log.end_offset == entries[count][2]
        assert "read_committed stops before it" in caplog.text
        caplog.clear()
        files = transactions()


@pytest.mark.parametrize("size", [33, 35, 101])
def test_a_damaged_transaction_index(size: int) -> None:
    files = transactions()
    path = f"{FOLDER}/{5:020d}.txnindex"
    files.files[path] = files.files[path][:size]
    with pytest.raises(DecodeError, match=rf"{path}: {size} bytes are not a multiple of 34"):
        assert partition(files, read_committed=True).end_offset
    assert partition(files).end_offset == 37


# ----- Kafka 0.7


class Old(NamedTuple):
    files: MemoryFiles
    records: list[tuple[int, bytes | None]]
    end: int


def old_log(base: int = 0) -> Old:
    """Three files: plain messages, compressed sets, a partial message at the end."""
    files, records, offset = MemoryFiles(), [], base
    for number in range(3):
        start, content = offset, b""
        for index in range(40):
            values = [b"%d-%d-%d" % (number, index, inner) for inner in range(3 if index % 5 == 0 else 1)]
            message = message_07(values[0])
            if len(values) > 1:
                message = message_07(gzip.compress(b"".join(map(message_07, values))), attributes=GZIP)
            records += [(offset, value) for value in values]
            content += message
            offset += len(message)
        files.files[f"{FOLDER}/{start:020d}.kafka"] = content
    files.files[f"{FOLDER}/{start:020d}.kafka"] += message_07(b"not whole yet")[:-1]
    return Old(files, records, offset)


def read_07(log: StoredPartition07, start: int, end: int, **more: Any) -> list[tuple[int, bytes | None]]:
    found = []
    for batches in log.read(start, end, **more):
        for record in read_records(batches.data):
            assert record[1:4] == (-1, -1, None)
            found.append((record.offset, record.value))
    return found


@pytest.mark.parametrize("base", [0, 5000])
def test_kafka_07(base: int) -> None:
    files, records, end = old_log(base)
    with mock.patch("spark_klog.log.stored.partition_07._BLOCK_BYTES", 64):
        log = StoredPartition07(files, FOLDER, "t", 0)
        assert (log.start_offset, log.end_offset, log.damage) == (base, end, None)
        assert read_07(log, base, end) == records
        offsets = sorted({offset for offset, _ in records})
        for start in (*offsets[::9], offsets[3] + 1):
            for until in (*offsets[start % 7 :: 7], end):
                assert read_07(log, start, until) == [item for item in records if start <= item[0] < until]
        cuts = log.cuts(base, end, 10)
        assert cuts == sorted(int(path[-26:-6]) for path in files.files)[1:]
        assert log.cuts(base, end, end - base) == []
        assert (log.offset_for_time(0), log.timestamp_type(base)) == (None, None)


def test_kafka_07_a_corrupt_message() -> None:
    files, records, end = old_log()
    path = f"{FOLDER}/{0:020d}.kafka"
    data = bytearray(files.files[path])
    second = sorted({offset for offset, _ in records})[1]
    data[second + 10] ^= 1
    files.files[path] = bytes(data)
    log = StoredPartition07(files, FOLDER, "t", 0)
    with pytest.raises(CorruptBatchError, match=f"offset {second}"):
        read_07(log, 0, end)
    bad: list[BadBatch] = []
    assert read_07(log, 0, end, on_bad=bad.append) == [item for item in records if item[0] != second]
    assert [item.offset for item in bad] == [second]


def test_kafka_07_files_that_go_or_do_not_fit() -> None:
    files, _, end = old_log()
    log = StoredPartition07(files, FOLDER, "t", 0)
    first, second, _last = sorted(files.files)
    kept = dict(files.files)
    del files.files[first]
    with pytest.raises(OffsetOutOfRange) as caught:
        read_07(log, 0, end)
    assert caught.value.available == (int(second[-26:-6]), end)
    with pytest.raises(OffsetOutOfRange):
        read_07(StoredPartition07(files, FOLDER, "t", 0), 0, end)
    files.files = kept | {first: kept[first][:-3]}
    with pytest.raises(DecodeError, match=rf"{first}: the last complete message ends at offset \d+, the next file"):
        read_07(StoredPartition07(files, FOLDER, "t", 0), 0, end)


# ----- data directories


def directories(files: MemoryFiles, *paths: str) -> StoredDirectories:
    return StoredDirectories([Directory(files, path, path) for path in paths])


@pytest.mark.parametrize("content", [b"0\n2\nt 0 4\nbad line\n", b"0\n2\nt 0 4\n", b"1\n1\nt 0 4\n", b"0\n1\nt 0 4\n"])
def test_a_damaged_checkpoint_of_starts_keeps_its_other_lines(content: bytes) -> None:
    """Else records that were deleted would be read again."""
    log = b"".join(make_batch([(None, b"v")], [1], base_offset=offset) for offset in range(6))
    files = MemoryFiles({"d/t-0/" + "0" * 20 + ".log": log, "d/log-start-offset-checkpoint": content})
    assert directories(files, "d").open("t", 0).start_offset == 4


def test_data_directories() -> None:
    names = ("b-1", "a-0", "a-10", "a-2.1f-delete", "a-b-3", "a-0.77-stray", "a-4.1f-future", "nothing")
    files = MemoryFiles(
        {f"x/{name}/partition.metadata": b"" for name in names} | {"y/c-0/x": b"", "z/meta.properties": b""}
    )
    assert directories(files, "x", "y/", "z").partitions() == [("a", 0), ("a", 10), ("a-b", 3), ("b", 1), ("c", 0)]
    assert directories(files, "x", "y").open("c", 0).end_offset == 0
    assert isinstance(directories(MemoryFiles(old_log().files.files), "logs").open("t", 0), StoredPartition07)
    with pytest.raises(OffsetOutOfRange) as caught:
        directories(files, "x", "y").open("c", 1)
    assert caught.value.available == GONE


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("nowhere",), "directory nowhere does not exist"),
        (
            ("x/a-0",),
            "x/a-0 is not a data directory of a broker: give the directory that contains folders TOPIC-PARTITION",
        ),
        (("x", "y"), "a-0 is in x and in y"),
        (("cluster/",), "cluster/ is the directory of a cluster: give .* brokers, cluster/broker-0,cluster/broker-1"),
        (("marked",), "marked is the directory of a cluster: give .* brokers, marked/broker-0"),
    ],
)
def test_what_is_no_data_directory(paths: tuple[str, ...], message: str) -> None:
    metas = [f"cluster/broker-{broker_id}/meta.properties" for broker_id in (0, 1)]
    names = ["x/a-0/00000000000000000000.log", "y/a-0/00000000000000000000.log", "marked/klog-cluster.properties"]
    files = MemoryFiles(dict.fromkeys([*names, *metas], b""))
    with pytest.raises(ConfigError, match=message):
        directories(files, *paths).partitions()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0\n2\nt 0 12\nu 0 3\n", 12), ("0\n1\nu 0 3\n", 0), ("", 0), ("0\n1\nt 0 x\n", 0), ("garbage", 0)],
)
def test_the_checkpoint_of_log_starts(text: str, expected: int) -> None:
    files, _ = build(20, 1)
    files.files["logs/log-start-offset-checkpoint"] = text.encode()
    log = directories(files, "logs").open("t", 0)
    assert (log.start_offset, log.end_offset) == (expected, 20)
    found = [record.offset for batches in log.read(expected, 20, _never) for record in read_records(batches.data)]
    assert [offset for offset in found if offset >= expected] == [*range(expected, 20)]
