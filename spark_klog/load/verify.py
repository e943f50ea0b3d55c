"""Compare a load with what it has written, and with the log: which records are missing, double or different.

The journal says how many records each range has. Files tell their offsets: by what is known of them, if they have one
for each offset that they cover, else by the columns topic, partition and offset, which are read. `--hash` reads all
records of files and log, and compares a sum of their hashes for each `_WINDOW` offsets; of windows that differ, record
by record. Records that the log has no more (retention, compaction) are not compared, nor are dead letters.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from spark_klog.base.names import TopicPartition
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import first_and_end
from spark_klog.columns.schema import FULL
from spark_klog.errors import LoadError
from spark_klog.load.journal import paths
from spark_klog.load.journal.checkpoint import read_summary
from spark_klog.load.journal.history import open_load, read_plan
from spark_klog.load.journal.letters import dead_letters
from spark_klog.load.journal.listing import CommittedFile, committed, is_below, stored_path, table_files
from spark_klog.load.journal.store import Store, arrow_file
from spark_klog.load.journal.summary import HOLE, Finding, Incarnation, joined
from spark_klog.load.settings import PARQUET, VALUES
from spark_klog.load.tasks.task import READ
from spark_klog.spark.options import PREFIX, source_options
from spark_klog.spark.read.ranges import OffsetRange
from spark_klog.spark.read.tasks import read_ranges
from spark_klog.tables.change_order import OWN
from spark_klog.tables.table import without_rows

#: Offsets of a sum of hashes, and windows whose records are compared at once.
_WINDOW, _AT_ONCE = 10_000, 50
#: Offsets of a part of a set.
_PART_BITS = 16
_PART = 1 << _PART_BITS
#: Extents that a finding names.
_MOST_NAMED = 5
_PLACE = ["topic", "partition", "offset"]
_CONTENT = [*_PLACE, "timestamp", "key", "value", "headers"]
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class VerifiedPartition:
    """A partition of a load: offsets [start, until), which have `records` by the runs, and `in_files` by the files.

    `compared` counts the records of the log whose hashes were compared, `gone` those of the files that the log has no
    more; `lag` is None without a cluster.
    """

    topic: str
    partition: int
    start: int
    until: int
    records: int
    in_files: int
    lag: int | None = None
    compared: int = 0
    gone: int = 0


@dataclass(frozen=True)
class Verified:
    """`unknown` are partitions whose offsets can't be told apart, as topics were created again."""

    partitions: list[VerifiedPartition]
    findings: list[Finding]
    unknown: list[str] = field(default_factory=list)


def verify(output: str, client: Mapping[str, str] | None = None, *, with_hash: bool = False) -> Verified:
    """Verify the load in `output`, or of the table at this address; `client` are settings to reach its log by.

    `LoadError` if it has no Parquet files, or rows by key (`--upsert-key`), or values that were decoded, with
    `with_hash`; `LoadError` too if a file can't be read, errors as of `Cluster.connect`.
    """
    return _Verification(output, client, with_hash).result()


class OffsetSet:
    """A set of offsets: a bit for each in parts that are not full, so that gaps alone take memory."""

    def __init__(self) -> None:
        self._parts: dict[int, NDArray[np.bool_] | None] = {}  # None is full

    def add(self, offsets: NDArray[np.int64]) -> list[int]:
        """Add offsets; returns those that were there already, or are there twice."""
        ordered = np.sort(offsets)
        is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]]) if len(ordered) else np.zeros(0, bool)
        twice: list[int] = ordered[~is_first].tolist()
        ordered = ordered[is_first]
        parts = ordered >> _PART_BITS
        for number in np.unique(parts).tolist():
            inside = ordered[parts == number] & (_PART - 1)
            bits = self._parts.setdefault(number, np.zeros(_PART, bool))
            known = inside if bits is None else inside[bits[inside]]
            twice += (known + (number << _PART_BITS)).tolist()
            if bits is not None:
                bits[inside] = True
                if bits.all():
                    self._parts[number] = None
        return twice

    def count(self, start: int, until: int) -> int:
        """How many offsets of [start, until) are in it."""
        total = 0
        for number in range(start >> _PART_BITS, ((until - 1) >> _PART_BITS) + 1):
            first = max(start - (number << _PART_BITS), 0)
            last = min(until - (number << _PART_BITS), _PART)
            if number in self._parts:
                bits = self._parts[number]
                total += last - first if bits is None else int(np.count_nonzero(bits[first:last]))
        return total


class _Verification:
    def __init__(self, output: str, client: Mapping[str, str] | None, with_hash: bool) -> None:
        self._store, identity = open_load(output)
        self._summary, self._client, self._with_hash = read_summary(self._store, with_ranges=True), client, with_hash
        address = self._store.address
        plan = read_plan(self._store, self._summary.run) if self._summary.run else None
        if identity.format != PARQUET:
            raise LoadError(f"{address} has {identity.format} files: only Parquet files are verified")
        if plan is not None and plan.settings.get("upsert_key"):
            raise LoadError(f"{address} has a row for each key, not for each record: it can't be verified by offsets")
        if with_hash and (identity.schema or identity.rows):
            raise LoadError(f"{address} has decoded keys or values: their bytes can't be compared; leave out --hash")
        of_values = plan is not None and plan.settings.get("table_columns") == VALUES
        self._place_columns = [f"{OWN}{name}" for name in _PLACE] if of_values else _PLACE
        table = identity.table_at(output)
        self._files = committed(self._summary) if table is None else table_files(table, self._summary)
        self._deleted = {} if table is None else table.deleted_rows()
        self._findings: list[Finding] = list(self._summary.findings)
        self._sets: dict[Incarnation, OffsetSet] = defaultdict(OffsetSet)

    def result(self) -> Verified:
        totals = self._summary.totals
        ambiguous = {
            key for key, line in totals.items() if line["incarnation"] and any(not file.run for file in self._files)
        }
        self._add_files()
        lines = {key: self._checked(key, is_told=key not in ambiguous) for key in sorted(totals)}
        if self._client is not None:
            with Cluster.connect(dict(self._client)) as cluster:
                lines = self._compared(cluster, lines)
        unknown = [f"{topic}-{partition}" for topic, partition in sorted(ambiguous)]
        return Verified(list(lines.values()), self._findings, unknown)

    def _add(self, key: TopicPartition, what: str) -> None:
        self._findings.append(Finding(*key, what))

    # ----- offsets

    def _add_files(self) -> None:
        """Look at the offsets of all files, of which some are read."""
        double: dict[Incarnation, list[int]] = defaultdict(list)
        for file in self._files:
            has_all = file.records == file.last - file.first + 1 and file.path not in self._deleted
            if file.run and has_all and self._is_whole(file):
                placed = [((file.topic, file.partition), np.arange(file.first, file.last + 1))]
            else:
                read = (_by_partition(_of_load(batch, _PLACE)) for batch in self._read(file, self._place_columns))
                placed = [(key, offsets) for each in read for key, offsets, _ in each]
            for key, offsets in placed:
                if key in self._summary.totals:
                    place = *key, self._incarnation(file, key)
                    double[place] += self._sets[place].add(offsets)
        for (topic, partition, _), twice in sorted(double.items()):
            if twice:
                self._add((topic, partition), f"{_named(twice)} are there more than once")

    def _is_whole(self, file: CommittedFile) -> bool:
        return is_below(file.path) and self._store.size(stored_path(self._store, self._summary, file)) == file.size

    def _incarnation(self, file: CommittedFile, key: TopicPartition) -> int:
        place = paths.place_of(file.path) if file.run else None
        return int(self._summary.totals[key]["incarnation"]) if place is None else place[2]

    def _read(self, file: CommittedFile, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of a file that readers see, a row group at a time; none if the file is not there."""
        import pyarrow.parquet as pq

        path = stored_path(self._store, self._summary, file)
        if is_below(path) and self._store.size(path) is None:
            return
        try:
            with _opened(self._store, path) as opened:
                reader = pq.ParquetFile(opened, pre_buffer=False)
                if not file.run and not set(columns) <= set(reader.schema_arrow.names):
                    return  # another writer's rows, which have no offsets
                start = 0
                for number in range(reader.num_row_groups):
                    rows = reader.read_row_group(number, columns, use_threads=False).combine_chunks()
                    for batch in rows.to_batches():
                        yield without_rows(batch, start, self._deleted.get(file.path))
                        start += len(batch)
        except (OSError, pa.ArrowException) as error:
            self._add(
                (file.topic, file.partition), f"file {file.path.removesuffix(paths.STAGED)} can't be read ({error})"
            )

    def _checked(self, key: TopicPartition, *, is_told: bool) -> VerifiedPartition:
        """Compare the offsets of a partition's files with what its ranges are to have."""
        line = self._summary.totals[key]
        place = *key, line["incarnation"]
        if is_told:
            for result in self._summary.known_ranges(place):
                missing = result.records - self._sets[place].count(result.start, result.until)
                if missing:
                    words = f"{missing} of {result.records} records are missing"
                    words = words if missing > 0 else f"{-missing} records too many are there"
                    self._add(key, f"[{result.start}, {result.until}): {words}")
        for hole in self._summary.holes().get(place, ()):
            self._add(key, HOLE.format(*hole))
        extents = self._summary.extents.get(place, [])
        count = sum(self._sets[place].count(*extent) for extent in extents)
        records = sum(result.records for result in self._summary.known_ranges(place))
        return VerifiedPartition(*key, line["from"], line["until"], records, count)

    # ----- the log

    def _compared(
        self, cluster: Cluster, lines: Mapping[TopicPartition, VerifiedPartition]
    ) -> dict[TopicPartition, VerifiedPartition]:
        """The lines with what the log says; partitions that it has no more, or anew, stay."""
        there = cluster.partitions(sorted({topic for topic, _ in lines}), missing_ok=True)
        ids = {topic: str(cluster.topic_ids.get(topic, "")) for topic in there}
        keys = []
        for key, line in lines.items():
            known = self._summary.totals[key]["topic_id"]
            if key[1] in there.get(key[0], ()) and (not known or ids[key[0]] in ("", known)):
                keys.append(key)
            elif line.until > line.start:
                self._add(key, "the log of this partition is not there any more, or another one: nothing is compared")
        if not keys:
            return dict(lines)
        low, high = first_and_end(cluster, keys)
        made = dict(lines)
        for key in keys:
            line = lines[key]
            if high[key] < line.until:
                self._add(key, f"the log ends at {high[key]}, and the load has offsets up to {line.until}: it was cut")
            compared = gone = 0
            if self._with_hash:
                compared, gone = self._compare_records(key, max(low[key], line.start), min(high[key], line.until))
            numbers = vars(line) | {"lag": max(0, high[key] - line.until), "compared": compared, "gone": gone}
            made[key] = VerifiedPartition(**numbers)
        return made

    def _compare_records(self, key: TopicPartition, start: int, until: int) -> tuple[int, int]:
        """Compare the records of offsets [start, until); returns how many the log has, and how many it has no more."""
        dead = self._dead(key)
        mine = _sums(self._of_files(key, start, until), dead)
        theirs = _sums(self._of_log(key, start, until), dead)
        windows = sorted(number for number in mine.keys() | theirs.keys() if mine.get(number) != theirs.get(number))
        missing, different, gone = [], [], 0
        for at in range(0, len(windows), _AT_ONCE):
            some = set(windows[at : at + _AT_ONCE])
            first, after = max(start, min(some) * _WINDOW), min(until, (max(some) + 1) * _WINDOW)
            have: dict[int, set[int]] = defaultdict(set)
            for offset, digest in self._of_files(key, first, after):
                if offset // _WINDOW in some:
                    have[offset].add(digest)
            for offset, digest in self._of_log(key, first, after):
                if offset // _WINDOW in some and offset not in dead:
                    if offset not in have:
                        missing.append(offset)
                    elif have.pop(offset) != {digest}:
                        different.append(offset)
            gone += len(have.keys() - dead)
        if missing:
            self._add(key, f"{_named(missing)} are in the log, and not in the files")
        if different:
            self._add(key, f"{_named(different)} are not as the log has them")
        return sum(count for _, count in theirs.values()), gone

    def _of_files(self, key: TopicPartition, start: int, until: int) -> Iterator[tuple[int, int]]:
        """(offset, hash) of the records of a partition's current incarnation that files have."""
        incarnation = self._summary.totals[key]["incarnation"]
        for file in self._files:
            is_other = file.topic and ((file.topic, file.partition) != key or file.last < start or file.first >= until)
            if is_other or self._incarnation(file, key) != incarnation:
                continue
            for batch in (_of_load(rows, _CONTENT) for rows in self._read(file, _CONTENT)):
                for place, offsets, rows in _by_partition(batch):
                    inside = (offsets >= start) & (offsets < until)
                    if place == key and inside.any():
                        yield from _hashed(batch.take(pa.array(rows[inside])), per_ms=1000)

    def _of_log(self, key: TopicPartition, start: int, until: int) -> Iterator[tuple[int, int]]:
        if start >= until:
            return
        settings = {f"{PREFIX}{name}": value for name, value in (self._client or {}).items()}
        settings |= {"subscribe": key[0], "failOnDataLoss": "false", "badRecords": "skip"}
        source = source_options(settings, streaming=False)
        for batch in read_ranges(source, [OffsetRange(*key, start, until)], READ):
            yield from _hashed(batch, per_ms=1)

    def _dead(self, key: TopicPartition) -> set[int]:
        """The offsets of a partition's dead letters."""
        dead = set()
        for name in self._summary.letters:
            if paths.is_of_values(name) and name.split("+")[1:3] == [key[0], str(key[1])]:
                dead |= {letter.offset for letter in dead_letters(self._store, name)}
        return dead


def _opened(store: Store, path: str) -> pa.NativeFile:
    """A file of a load, or one that a table has elsewhere, by its own address."""
    if is_below(path):
        return arrow_file(store, path)
    filesystem, place = pa.fs.FileSystem.from_uri(path)
    return filesystem.open_input_file(place)


def _of_load(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """The records of a load, with its names and types: rows of other writers have no place, and views of strings."""
    columns = [column.cast(FULL.field(name).type) for column, name in zip(batch.columns, names, strict=True)]
    batch = pa.RecordBatch.from_arrays(columns, names)
    return batch.filter(reduce(pc.and_, (pc.is_valid(batch[name]) for name in _PLACE)))


def _by_partition(
    batch: pa.RecordBatch,
) -> Iterator[tuple[TopicPartition, NDArray[np.int64], NDArray[np.int64]]]:
    """The offsets of a batch by partition, with the numbers of their rows."""
    partitions, offsets = np.asarray(batch["partition"]), np.asarray(batch["offset"])
    for topic in pc.unique(batch["topic"]).to_pylist():
        is_topic = np.asarray(pc.equal(batch["topic"], topic))
        for partition in np.unique(partitions[is_topic]).tolist():
            rows = np.flatnonzero(is_topic & (partitions == partition))
            yield (topic, partition), offsets[rows], rows


def _hashed(batch: pa.RecordBatch, per_ms: int) -> Iterator[tuple[int, int]]:
    """(offset, hash of timestamp, key, value and headers) of each record."""
    times = batch["timestamp"].cast(pa.int64()).to_pylist()
    columns = (batch[name].to_pylist() for name in ("offset", "key", "value", "headers"))
    for time, offset, key, value, headers in zip(times, *columns, strict=True):
        parts = [b"%d" % (time // per_ms), key, value]
        for header in headers or ():
            parts += [header["key"].encode(), header["value"]]
        content = b"".join(b"-" if part is None else b"%d:%b" % (len(part), part) for part in parts)
        yield offset, int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def _sums(rows: Iterable[tuple[int, int]], without: Collection[int]) -> dict[int, tuple[int, int]]:
    """By window the sum of its records' hashes, and their number, of (offset, hash), but for some offsets."""
    sums: dict[int, tuple[int, int]] = {}
    for offset, digest in rows:
        if offset not in without:
            total, count = sums.get(offset // _WINDOW, (0, 0))
            sums[offset // _WINDOW] = (total + digest) & _MASK, count + 1
    return sums


def _named(offsets: Iterable[int]) -> str:
    extents = joined((offset, offset + 1) for offset in offsets)
    shown = ", ".join(f"[{start}, {until})" for start, until in extents[:_MOST_NAMED])
    return f"records of {shown}" + (
        f" and {len(extents) - _MOST_NAMED} ranges more" if len(extents) > _MOST_NAMED else ""
    )
