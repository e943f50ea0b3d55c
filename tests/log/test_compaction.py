"""Compaction of batches against a model of plain lists; kafka-python also reads the results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.errors import LogCorrupted
from spark_klog.log.compaction import passes
from spark_klog.log.compaction.passes import Cleaner, CleaningRound, LastRecord, OffsetMap, build_map
from spark_klog.log.segments.transaction_index import AbortedTransaction
from spark_klog.records.contract import Record
from spark_klog.records.formats.message_set import build_message_set
from spark_klog.wire.codecs import codec_by_name
from tests.support.available_kernels import KERNELS
from tests.support.brokers.batches import read_records
from tests.support.brokers.compaction_logs import (
    ABORT,
    COMMIT,
    CONTROL,
    HORIZON,
    NOW,
    RETENTION,
    TRANSACTIONAL,
    Survivor,
    any_magic,
    batch_of_rows,
    compact,
    dumped_with_holes,
    headers,
    marker,
    reading,
    survivors,
)
from tests.support.checker.record_model import Row
from tests.support.servers.kafka import NEWEST, Version

FORMATS = [
    *((0, codec) for codec in ("none", "gzip", "snappy", "lz4")),
    *((1, codec) for codec in ("none", "gzip", "snappy", "lz4")),
    *((2, codec) for codec in ("none", "gzip", "snappy", "lz4", "zstd")),
]
KEYS = st.sampled_from([None, b"", b"a", b"b", b"c", b"a longer key"])
VALUES = st.sampled_from([None, b"", b"1", b"2" * 50])


@st.composite
def batches_of_rows(draw: st.DrawFn) -> list[list[Row]]:
    """Batches of rows with holes between their offsets."""
    offset, batches = draw(st.integers(0, 5)), []
    for size in draw(st.lists(st.integers(1, 6), min_size=1, max_size=8)):
        rows = []
        for _ in range(size):
            rows.append(Row(offset, NOW + draw(st.integers(-1000, 1000)), draw(KEYS), draw(VALUES)))
            offset += draw(st.sampled_from([1, 1, 1, 2, 90]))
        batches.append(rows)
    return batches


def _last_values(rows: Sequence[Row], start: int, end: int) -> dict[bytes, int]:
    return {row.key: row.offset for row in rows if row.key is not None and start <= row.offset < end}


def _kept(rows: Sequence[Row], start: int, end: int) -> list[Row]:
    """The model: rows that remain after one round whose map covers offsets [start, end)."""
    last = _last_values(rows, start, end)
    return [row for row in rows if row.offset >= end or (row.key is not None and row.offset >= last.get(row.key, -1))]


def _as_survivors(rows: Sequence[Row], magic: int = 2) -> list[Survivor]:
    return [Survivor(row.offset, row.timestamp if magic else -1, row.key, row.value) for row in rows]


@pytest.mark.parametrize(("magic", "codec"), FORMATS)
@given(batches=batches_of_rows(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_the_last_value_of_each_key_is_left(
    magic: int, codec: str, batches: list[list[Row]], data: st.DataObject
) -> None:
    rows = [row for batch in batches for row in batch]
    bounds = [batch[0].offset for batch in batches] + [rows[-1].offset + 1]
    start, end = sorted((data.draw(st.sampled_from(bounds)), data.draw(st.sampled_from(bounds))))
    log = b"".join(any_magic(batch, magic, codec) for batch in batches)
    cleaned = compact(log, start=start, end=end)
    assert cleaned.end == end
    assert survivors(cleaned.data) == _as_survivors(_kept(rows, start, end), magic)
    # A second round changes nothing, and batches that lost nothing keep their bytes.
    assert compact(cleaned.data, start=start, end=end).data == cleaned.data
    for batch in batches:
        has_horizon = magic == 2 and any(row.value is None for row in batch) and batch[-1].offset < end
        if _kept(rows, start, end) and set(batch) <= set(_kept(rows, start, end)) and not has_horizon:
            assert any_magic(batch, magic, codec) in cleaned.data


@pytest.mark.parametrize("kernel", ["native", "reference"])
def test_both_kernels_leave_the_same(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_KLOG_KERNEL", kernel)
    rows = [Row(n, NOW + n, b"key%d" % (n % 7), None if n % 5 == 0 else b"v%d" % n) for n in range(40)]
    for magic, codec in FORMATS:
        log = b"".join(any_magic(rows[n : n + 4], magic, codec) for n in range(0, 40, 4))
        assert survivors(compact(log, end=40).data) == _as_survivors(rows[33:], magic)


@given(made=st.deferred(lambda: transactions()), data=st.data())
@settings(max_examples=60, deadline=None)
def test_both_kernels_leave_the_same_of_runs(made: Transactions, data: st.DataObject) -> None:
    """The native kernel cleans runs of batches; the reference each batch by itself."""
    plain = data.draw(batches_of_rows())
    first = made.next_offset + 1
    parts = [
        any_magic([row._replace(offset=row.offset + first) for row in batch], 2, codec)
        for batch in plain
        for codec in [data.draw(st.sampled_from(["none", "none", "none", "lz4"]))]
    ]
    log = made.log + b"".join(parts)
    end = headers(log)[-1].next_offset
    bounds = st.sampled_from([0, *(header.next_offset for header in headers(log))])
    start, upper = sorted((data.draw(bounds), data.draw(bounds)))
    producers = {1: LastRecord(data.draw(bounds) - 1, 0), -1: LastRecord(data.draw(bounds) - 1, 0)}
    now, left = NOW, []
    for kernel in KERNELS:
        with mock.patch.object(passes, "load", return_value=kernel):
            once = compact(log, start=start, end=upper, aborted=made.aborted, producers=producers, now=now)
            later = now + RETENTION + 1
            twice = compact(once.data, start=upper, end=end, aborted=once.aborted, producers=producers, now=later)
        left.append((once, twice))
    assert left[1:] == left[:-1]


@given(batches=batches_of_rows(), keys=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_full_map_ends_the_round_and_the_next_goes_on(batches: list[list[Row]], keys: int) -> None:
    rows = [row for batch in batches for row in batch]
    log, end = b"".join(any_magic(batch, 2, "lz4") for batch in batches), rows[-1].offset + 1
    offsets = OffsetMap(1 << 10)
    offsets.capacity = keys
    start, model = 0, rows
    while start < end:
        cleaned = compact(log, start=start, end=end, offsets=offsets)
        assert start < cleaned.end <= end
        mapped = _last_values(model, start, cleaned.end)
        assert len(mapped) <= keys
        if cleaned.end < end:
            stopped_at = next(row for row in model if row.offset >= cleaned.end)
            assert len(mapped) == keys
            assert stopped_at.key not in mapped
        model = _kept(model, start, cleaned.end)
        assert survivors(cleaned.data) == _as_survivors(model)
        log, start = cleaned.data, cleaned.end
    assert survivors(log) == _as_survivors(_kept(rows, 0, end))


def test_a_batch_keeps_its_header_fields() -> None:
    rows = [Row(10 + n, NOW + n, b"k%d" % (n % 3), b"v", (("h", b"x"),)) for n in range(6)]
    log = batch_of_rows(rows, codec="zstd", producer=(77, 5, 40), base_offset=8, last_offset=20)
    (before,) = headers(log)
    cleaned = compact(log, end=21).data
    (after,) = headers(cleaned)
    assert (after.count, after.base_timestamp, after.max_timestamp) == (3, NOW + 3, NOW + 5)
    for name in ("base_offset", "last_offset", "codec_id", "attributes"):
        assert getattr(after, name) == getattr(before, name), name
    for name in ("producer_id", "producer_epoch", "base_sequence", "leader_epoch"):
        assert getattr(after, name) == getattr(before, name), name
    assert [record.headers for record in read_records(cleaned)] == [(("h", b"x"),)] * 3


@pytest.mark.parametrize("magic", [1, 2])
@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_log_append_time_stays(magic: int, codec: str) -> None:
    if magic == 2:
        rows = [Row(n, NOW - 99, b"k%d" % (n % 2), b"v") for n in range(4)]
        log = batch_of_rows(rows, codec=codec, attributes=0x08, max_timestamp=NOW)
    else:
        records = [Record(n, NOW, 1, b"k%d" % (n % 2), b"v", ()) for n in range(4)]
        log = build_message_set(records, 1, codec_by_name(codec))
    found = list(read_records(compact(log, end=4).data))
    assert [(record.offset, record.timestamp, record.timestamp_type) for record in found] == [(2, NOW, 1), (3, NOW, 1)]


class TestTombstones:
    LOG = batch_of_rows([Row(0, NOW, b"a", b"1"), Row(1, NOW, b"b", b"1")]) + batch_of_rows(
        [Row(2, NOW - 5, b"a", None), Row(3, NOW + 5, b"c", b"1")]
    )

    def test_the_horizon_is_set_once_and_kept_to(self) -> None:
        first = compact(self.LOG, end=4, now=NOW, retention=1000).data
        assert [record.offset for record in survivors(first)] == [1, 2, 3]
        assert [header.delete_horizon for header in headers(first)] == [None, NOW + 1000]
        assert survivors(first)[1:] == survivors(self.LOG)[2:]
        # a later round's map has no records before its first dirty offset
        assert compact(first, start=4, end=4, now=NOW + 999, retention=5).data == first
        last = compact(first, start=4, end=4, now=NOW + 1000, retention=5).data
        assert [record.offset for record in survivors(last)] == [1, 3]
        assert headers(last)[1].delete_horizon == NOW + 1000
        assert compact(last, start=4, end=4, now=NOW + 9000, retention=5).data == last

    def test_those_beyond_the_map_have_no_horizon_yet(self) -> None:
        """Older records of its key may still exist, and would reappear if the tombstone expired first."""
        offsets = OffsetMap(1 << 10)
        offsets.capacity = 1
        first = compact(self.LOG, end=4, offsets=offsets)
        assert first.end == 1
        assert first.data == self.LOG

    def test_nor_has_a_batch_in_which_the_map_ends(self) -> None:
        log = batch_of_rows([Row(0, NOW, b"a", b"1"), Row(1, NOW, b"b", None)])
        offsets = OffsetMap(1 << 10)
        offsets.capacity = 1
        assert compact(log, end=2, offsets=offsets) == (log, 1, [])
        assert headers(compact(log, start=1, end=2).data)[0].delete_horizon == NOW + RETENTION

    @pytest.mark.parametrize("magic", [0, 1])
    @pytest.mark.parametrize("codec", ["none", "gzip"])
    @pytest.mark.parametrize("are_retained", [True, False])
    def test_of_old_magics_go_as_told(self, magic: int, codec: str, are_retained: bool) -> None:
        rows = [Row(0, NOW, b"a", b"1"), Row(1, NOW, b"a", None), Row(2, NOW, b"b", b"1"), Row(3, NOW, b"c", None)]
        log = any_magic(rows, magic, codec)
        cleaned = compact(log, end=4, retain_legacy_tombstones=are_retained).data
        assert [record.offset for record in survivors(cleaned)] == ([1, 2, 3] if are_retained else [2])


class TestProducerState:
    """The batch with an active producer's last sequence stays, even if it loses all records."""

    def _log(self) -> bytes:
        rows = [[Row(n, NOW + n, b"k", b"v")] for n in range(4)]
        producers = [(1, 0, 0), (2, 4, 10), (1, 0, 1), (-1, -1, -1)]
        return b"".join(
            batch_of_rows(batch, codec="gzip", producer=producer)
            for batch, producer in zip(rows, producers, strict=True)
        )

    def test_the_last_of_an_active_producer_stays_empty(self) -> None:
        cleaned = compact(self._log(), end=4, producers={1: LastRecord(2, 0), 2: LastRecord(1, 4)}).data
        left = headers(cleaned)
        assert [(header.base_offset, header.count) for header in left] == [(1, 0), (2, 0), (3, 1)]
        assert (left[0].producer_id, left[0].producer_epoch, left[0].base_sequence) == (2, 4, 10)
        assert (left[0].size, left[0].codec_id, left[0].max_timestamp) == (61, 0, NOW + 1)
        assert survivors(cleaned) == [Survivor(3, NOW + 3, b"k", b"v")]
        assert compact(cleaned, end=4, producers={1: LastRecord(2, 0), 2: LastRecord(1, 4)}).data == cleaned

    def test_those_of_others_go(self) -> None:
        cleaned = compact(self._log(), end=4, producers={1: LastRecord(7, 0)}).data
        assert [header.base_offset for header in headers(cleaned)] == [3]

    def test_the_end_of_what_was_cleaned_stays(self) -> None:
        log = batch_of_rows([Row(0, NOW, b"k", b"v")]) + batch_of_rows([Row(1, NOW, None, b"v")])
        cleaned = compact(log, end=2).data
        assert [(header.last_offset, header.count) for header in headers(cleaned)] == [(0, 1), (1, 0)]

    def test_the_last_marker_of_a_producer_without_data_stays_empty(self) -> None:
        log = marker(ABORT, 0, 5, epoch=2) + batch_of_rows([Row(1, NOW, b"k", b"v")])
        producers = {5: LastRecord(None, 2)}
        first = compact(log, end=2, producers=producers, retention=10).data
        assert headers(first)[0].delete_horizon == NOW + 10
        later = compact(first, start=2, end=2, now=NOW + 10, producers=producers).data
        assert [(header.base_offset, header.count) for header in headers(later)] == [(0, 0), (1, 1)]
        assert headers(later)[0].producer_epoch == 2
        assert headers(later)[0].is_control
        assert compact(later, start=2, end=2, now=NOW + 99, producers=producers).data == later
        other = compact(later, start=2, end=2, now=NOW + 99, producers={5: LastRecord(None, 3)}).data
        assert [header.base_offset for header in headers(other)] == [1]


class Transactions:
    """A log of transactions, with the expected rows, markers and aborted transactions."""

    def __init__(self) -> None:
        self.log = b""
        self.rows: list[Row] = []
        self.hidden: set[int] = set()
        self.aborted: list[AbortedTransaction] = []
        #: (offset of the marker, offsets of its transaction's rows)
        self.markers: list[tuple[int, list[int]]] = []
        self.next_offset = 0
        self._open: dict[int, list[int]] = {}
        self._sequences: dict[int, int] = {}

    def append(self, producer: int | None, pairs: Sequence[tuple[bytes | None, bytes | None]], codec: str) -> None:
        rows = [Row(self.next_offset + n, NOW, key, value) for n, (key, value) in enumerate(pairs)]
        self.next_offset += len(rows)
        self.rows += rows
        if producer is None:
            self.log += batch_of_rows(rows, codec=codec)
            return
        sequence = self._sequences.get(producer, 0)
        self._sequences[producer] = sequence + len(rows)
        self.log += batch_of_rows(rows, codec=codec, producer=(producer, 0, sequence), attributes=TRANSACTIONAL)
        self._open.setdefault(producer, []).extend(row.offset for row in rows)

    def end(self, producer: int, kind: int) -> None:
        offset, self.next_offset = self.next_offset, self.next_offset + 1
        self.log += marker(kind, offset, producer)
        offsets = self._open.pop(producer, [])
        self.markers.append((offset, offsets))
        if kind == ABORT and offsets:
            self.hidden.update(offsets)
            first = min([offsets[0], *(found[0] for found in self._open.values())])
            self.aborted.append(AbortedTransaction(producer, offsets[0], offset, first))

    def end_all(self) -> None:
        for producer in list(self._open):
            self.end(producer, COMMIT)

    def visible(self) -> list[Row]:
        return [row for row in self.rows if row.offset not in self.hidden]


@st.composite
def transactions(draw: st.DrawFn) -> Transactions:
    made = Transactions()
    pairs = st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=4)
    for _ in range(draw(st.integers(1, 14))):
        producer = draw(st.sampled_from([None, 1, 2, 3]))
        action = draw(st.sampled_from(["append", "append", "commit", "abort"]))
        if action == "append" or producer is None:
            made.append(producer, draw(pairs), draw(st.sampled_from(["none", "lz4"])))
        else:
            made.end(producer, COMMIT if action == "commit" else ABORT)
    made.end_all()
    return made


@given(made=transactions(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_interleaved_transactions(made: Transactions, data: st.DataObject) -> None:
    end = made.next_offset + 1  # so that no batch ends the cleanable part
    start = data.draw(st.sampled_from([0, *(header.base_offset for header in headers(made.log))]))
    expected = _kept(made.visible(), start, end)
    left = {row.offset for row in expected}
    first = compact(made.log, start=start, end=end, aborted=[*made.aborted, *made.aborted])
    assert survivors(first.data) == _as_survivors(expected)
    # a marker of a transaction that had batches stays unchanged; others get a delete horizon
    markers = {header.base_offset: header for header in headers(first.data) if header.is_control}
    assert {offset: header.delete_horizon for offset, header in markers.items()} == {
        offset: None if offsets else NOW + RETENTION for offset, offsets in made.markers
    }
    assert first.aborted == made.aborted

    second = compact(first.data, start=end, end=end, aborted=first.aborted, now=NOW + 1)
    assert survivors(second.data) == _as_survivors(expected)
    assert second.aborted == []
    for header in headers(second.data):
        if header.is_control:
            offsets = next(found for offset, found in made.markers if offset == header.base_offset)
            horizon = NOW + RETENTION if not offsets else NOW + 1 + RETENTION
            assert header.delete_horizon == (None if left & set(offsets) else horizon)
    assert compact(second.data, start=end, end=end, now=NOW + RETENTION - 1).data == second.data

    third = compact(second.data, start=end, end=end, now=NOW + 1 + RETENTION)
    assert {header.base_offset for header in headers(third.data) if header.is_control} == {
        offset for offset, offsets in made.markers if left & set(offsets)
    }
    assert survivors(third.data) == _as_survivors([row for row in expected if row.value is not None])


def test_an_aborted_value_hides_no_other() -> None:
    made = Transactions()
    made.append(None, [(b"k", b"right")], "none")
    made.append(1, [(b"k", b"wrong"), (b"j", b"wrong")], "none")
    made.end(1, ABORT)
    made.append(None, [(b"l", b"right")], "none")
    cleaned = compact(made.log, end=made.next_offset, aborted=made.aborted)
    assert [(record.key, record.value) for record in survivors(cleaned.data)] == [(b"k", b"right"), (b"l", b"right")]


@pytest.mark.parametrize(("magic", "codec"), [(0, "none"), (1, "gzip"), (2, "none"), (2, "lz4")])
@pytest.mark.parametrize("in_map", [True, False])
def test_a_damaged_batch_is_not_made_right(magic: int, codec: str, in_map: bool) -> None:
    log = bytearray(any_magic([Row(0, NOW, b"k", b"value")], magic, codec))
    log += any_magic([Row(1, NOW, b"k", b"value"), Row(2, NOW, b"k", b"value")], magic, codec)
    log[-2] ^= 1
    batches, offsets = reading(bytes(log)), OffsetMap(1 << 10)
    cleaner = Cleaner(offsets, CleaningRound(3, 3, NOW, 0))
    with pytest.raises(LogCorrupted, match="batch that ends at offset 2"):
        build_map([batches], offsets, 0, 3) if in_map else list(cleaner.clean(batches))


def test_what_was_read_and_written_is_counted() -> None:
    log = batch_of_rows([Row(0, NOW, None, b"v"), Row(1, NOW, b"k", b"v")]) + batch_of_rows([Row(2, NOW, b"k", b"w")])
    offsets = OffsetMap(1 << 10)
    assert build_map([reading(log)], offsets, 0, 3) == 3
    cleaner = Cleaner(offsets, CleaningRound(3, 3, NOW, RETENTION))
    left = b"".join(cleaner.clean(reading(log)))
    stats = cleaner.stats
    assert (stats.batches_read, stats.bytes_read, stats.without_key) == (2, len(log), 1)
    assert (stats.batches_written, stats.bytes_written) == (1, len(left))


@pytest.mark.peer
@pytest.mark.parametrize("version", [pytest.param("3.9.1", marks=pytest.mark.test_all("version")), NEWEST])
def test_kafkas_dump_finds_nothing_wrong(version: Version, tmp_path: Path) -> None:
    """Checks cleaned segments of every format, one with transactions, tombstones and empty batches."""
    paths, expected = [], []
    for number, (magic, codec) in enumerate(FORMATS):
        rows = [Row(n, NOW + n, b"key%d" % (n % 7), None if n % 5 == 0 else b"v%d" % n) for n in range(60)]
        log = b"".join(any_magic(rows[n : n + 4], magic, codec) for n in range(0, 60, 4))
        paths.append(tmp_path / str(number) / f"{0:020}.log")
        paths[-1].parent.mkdir()
        paths[-1].write_bytes(compact(log, end=60).data)
        expected += [(row.offset, row.key, row.value) for row in rows[53:]]
    made = Transactions()
    for number in range(30):
        made.append(number % 3 or None, [(b"k%d" % (number % 4), b"v"), (b"t", None)], "lz4")
        if number % 7 == 6:
            made.end(number % 2 + 1, number % 2)
    made.end_all()
    producers = {1: LastRecord(made.rows[-4].offset, 0), 2: LastRecord(made.rows[-1].offset, 0)}
    cleaned = compact(made.log, end=made.next_offset, aborted=made.aborted, producers=producers).data
    assert {bool(header.attributes & flag) for header in headers(cleaned) for flag in (CONTROL, HORIZON)} == {
        True,
        False,
    }
    paths.append(tmp_path / "transactions" / f"{0:020}.log")
    paths[-1].parent.mkdir()
    paths[-1].write_bytes(cleaned)
    expected += [(row.offset, row.key, row.value) for row in _kept(made.visible(), 0, made.next_offset)]
    found = dumped_with_holes(version, *paths)
    assert [(record.offset, record.key, record.value) for record in found] == [
        (offset, (key or b"").decode(), None if value is None else value.decode()) for offset, key, value in expected
    ]
