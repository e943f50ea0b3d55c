"""Run a task: read its ranges, write their files, then the task's file of offsets; have Spark run all tasks."""

from __future__ import annotations

import base64
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from spark_klog.columns.decode import has_microseconds
from spark_klog.columns.room import decodable_parts, largest_element
from spark_klog.columns.schema import FULL, in_milliseconds
from spark_klog.errors import KlogError, LoadError, SchemaChanged
from spark_klog.load.inference import GrownError, InferringDecoder, keep_seen
from spark_klog.load.journal import paths
from spark_klog.load.journal.history import task_results
from spark_klog.load.journal.model import VERSION, FileEntry, Range, RangeResult, TaskResults
from spark_klog.load.journal.store import Store, open_store, to_json
from spark_klog.load.rows import fitted, named_type
from spark_klog.load.settings import JSON_LINES, LOSS_ADVICE, RECORDS, WriteSettings
from spark_klog.load.table_columns import dated_columns
from spark_klog.load.tasks.time_limit import TaskTime
from spark_klog.load.tasks.writers import HOUR_US, ChangeRangeWriter, RangeWriter, time_text
from spark_klog.load.values import FIRST_US, LAST_US, dated, field_times, is_dated, local_times, microseconds
from spark_klog.records.formats.batch import iter_batches
from spark_klog.records.formats.batch_v2 import BatchHeader
from spark_klog.records.reading.reader import AbortedTransactions
from spark_klog.schemas.json_schema.columns import DDL
from spark_klog.schemas.json_schema.ddl import parse_schema
from spark_klog.schemas.json_schema.decoder import JsonDecoder
from spark_klog.schemas.json_schema.from_arrow import column_of
from spark_klog.schemas.json_schema.inference import Seen
from spark_klog.schemas.json_schema.variant import variants
from spark_klog.schemas.rows import Decoded
from spark_klog.spark.options import SourceOptions
from spark_klog.spark.read.ranges import RECREATED, LossReporter, Lost, OffsetRange
from spark_klog.spark.read.tasks import RangeReader, ReadObserver, RecordBatches, in_reading_order, read_ranges
from spark_klog.tables.change_order import LACKING, LACKING_TYPE, OFFSET, TIMESTAMP
from spark_klog.tables.changes import ChangeFormat, no_row, no_value
from spark_klog.tables.mongodb import plain_events
from spark_klog.tables.table import has_field_ids

if TYPE_CHECKING:
    from spark_klog.schemas.column_format import ColumnDecoder, ReaderSchema

_log = logging.getLogger(__name__)
#: The columns of records as they are read: with timestamps in ms, as not all of them have microseconds.
READ = in_milliseconds(FULL)
TRANSACTIONS, COMPACTION, CORRUPT, UNPARSED = "transactions", "compaction", "corrupt", "unparsed"
_HOUR_FORM = "%Y-%m-%dT%H"
#: What went wrong, in Spark's messages, the most telling first: the package's error; the line behind the last traceback
#: of a Python worker; what the JVM says of a worker that did not start, or died; Java's last cause.
_CAUSES = (
    r"^spark_klog\.errors\.(\w+: .+)$",
    r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)$",
    r"(Cannot run program .+|Python worker exited unexpectedly.*)$",
    r"^(?:Caused by)?: (.+)$",
)
_ANSWER, _ANSWER_DDL = pa.schema([("load", pa.int64()), ("failed", pa.bool_())]), "load long, failed boolean"
#: Tasks of fewer offsets share one of Spark's, of which there are about so many for each core.
_SMALL, _PARTS_OF_CORE = 10_000, 4
#: The cores that a session is taken to have if it does not tell (Spark Connect).
_CORES = 8
NO_DECODERS: Mapping[str, ColumnDecoder] = MappingProxyType({})


class Values:
    """Parses or decodes the values and keys of a range, and converts the timestamps to microseconds.

    The `bad` records, for which that is impossible, are lines of the file `letters`, which exists if there are some.

    A line is {"topic", "partition", "offset", "timestamp" (ms), "reason", "key", "value", "headers"}, bytes in base64.
    The columns `dated` need a date of the years 1 to 9999, as a table computes its partitions of them. JSON is decoded
    by `inferring`, if its schema is inferred.
    """

    def __init__(
        self,
        span: Range,
        settings: WriteSettings,
        folder: Path,
        token: str,
        decoders: Mapping[str, ColumnDecoder] = NO_DECODERS,
        *,
        dated: Collection[str] = (),
        inferring: InferringDecoder | None = None,
    ) -> None:
        prefix = "value." if settings.table_columns == RECORDS and not settings.upsert_key else ""
        #: The fields that need a date, and whether the records' own times do.
        self._dated = [path.removeprefix(prefix) for path in dated if path.startswith(prefix)]
        self._is_dated = ("timestamp" if prefix else TIMESTAMP) in dated
        self._settings, self._columns, self._decoders = settings, settings.columns(span.topic), decoders
        self._parse: Callable[[pa.Array], Decoded] | None = None
        types = [decoder.type for decoder in decoders.values()]
        if settings.is_variant:
            self._parse = variants
        elif settings.schema:
            decoder = JsonDecoder(column_of(parse_schema(settings.schema), DDL))
            types.append(decoder.type)
            self._parse = partial(decoder.decode, programs=[None]) if inferring is None else inferring.decode
        self._incarnation = span.incarnation
        self._element_bytes = max(map(largest_element, types), default=0)
        self.letters = folder / paths.letters(span, token)
        self.bad = 0
        self._file: IO[str] | None = None

    def __enter__(self) -> Values:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def parts(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """A batch in parts whose columns are not too large, whatever is in their lists; see columns/room.py."""
        sizes = [
            pc.fill_null(pc.binary_length(batch[name]), 0).to_numpy().astype(np.int64) for name in ("key", "value")
        ]
        ranges = decodable_parts(sizes[0] + sizes[1], self._element_bytes)
        for begin, end in ranges:  # slices would not begin at the start of their buffers
            yield batch if len(ranges) == 1 else batch.take(pa.array(range(begin, end)))

    def parse(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """The good records of a batch with the columns `READ`, as they are in the log and as they are written.

        OSError if the others can't be kept; `LoadError` if a schema registry gives no answer, `SchemaChanged` as of
        `RowSchema.reader`, `GrownError` as of `InferringDecoder`.
        """
        times = batch["timestamp"].cast(pa.int64()).to_numpy()
        good = has_microseconds(times)
        bad = {row: f"timestamp {times[row]} ms does not fit into microseconds" for row in _rows(~good)}
        if self._is_dated:
            undated = good & ((times < FIRST_US // 1000) | (times > LAST_US // 1000))
            bad.update((row, f"timestamp {times[row]} ms is in no year from 1 to 9999") for row in _rows(undated))
        rows: dict[str, pa.Array] = {}
        for name in self._decoders:
            rows[name], undecoded = self._decode(name, batch)
            for row, reason in undecoded:
                bad.setdefault(row, reason)
        if self._parse is not None:
            values = batch["value"]
            rows["value"], unparsed = self._parse(
                plain_events(values) if self._settings.envelope == "debezium" else values
            )
            for row, reason in unparsed:
                bad.setdefault(row, reason)
        if bad:
            good[list(bad)] = False
            numbers = sorted(bad)
            self._keep(batch.take(pa.array(numbers)), [bad[row] for row in numbers])
            mask = pa.array(good)
            batch = batch.filter(mask)
            rows = {name: column.filter(mask) for name, column in rows.items()}
        columns = dict(zip(FULL.names, batch.columns, strict=True))
        columns["timestamp"] = columns["timestamp"].cast(FULL.field("timestamp").type)
        raw = pa.RecordBatch.from_arrays(list(columns.values()), schema=FULL)
        if not rows:
            return raw, raw
        columns |= rows
        return raw, pa.RecordBatch.from_arrays(list(columns.values()), schema=self._columns)

    def _decode(self, name: str, batch: pa.RecordBatch) -> tuple[pa.Array, list[tuple[int, str]]]:
        """A column as rows, and (row, reason) of those that can't be written."""
        try:
            decoder = self._decoders[name]
            column, undecoded = decoder.decode(batch[name], batch["headers"])
        except SchemaChanged:
            raise
        except KlogError as error:  # nothing is wrong with the records: the run goes on from here another time
            raise LoadError(f"{name}s can't be decoded now, run again later: {error}") from None
        column = fitted(column, self._columns.field(name).type, decoder.type)
        bad = [(row, f"the {name} does not decode: {reason}") for row, reason in undecoded]
        if self._settings.format == JSON_LINES and not is_dated(column):
            why = f"the {name} has a time before the year 1 or after 9999, which JSON lines do not have"
            bad += [(row, why) for row in range(len(column)) if not is_dated(column.slice(row, 1))]
        for path in self._dated if name == "value" or self._settings.upsert_key else ():
            known = _times(column, path if name == "key" or self._settings.envelope == "none" else f"after.{path}")
            if known is not None:
                undated = pc.or_(pc.less(known, FIRST_US), pc.greater(known, LAST_US))
                why = f"{path} is in no year from 1 to 9999"
                bad += [(row, why) for row in pc.indices_nonzero(undated).to_pylist()]
        return column, bad

    def changes(
        self, raw: pa.RecordBatch, parsed: pa.RecordBatch, change_format: ChangeFormat
    ) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """The records that say something of rows, as they are in the log, and the changes; others are bad."""
        bad: dict[int, str] = {}
        made = change_format.changes(parsed, self._incarnation, bad)
        if bad:
            numbers = sorted(bad)
            columns = dict(zip(raw.schema.names, raw.take(pa.array(numbers)).columns, strict=True))
            columns["timestamp"] = columns["timestamp"].cast(READ.field("timestamp").type)
            letters = pa.RecordBatch.from_arrays(list(columns.values()), schema=READ)
            self._keep(letters, [f"the record {bad[row]}" for row in numbers])
            good = np.ones(len(raw), np.bool_)
            good[numbers] = False
            raw = raw.filter(pa.array(good))
        return raw, self._with_letters(made, raw)

    def _with_letters(self, changes: pa.RecordBatch, raw: pa.RecordBatch) -> pa.RecordBatch:
        """The changes; with those that lack values is what is a dead letter if no row has these."""
        if LACKING not in changes.schema.names or changes[LACKING].null_count == len(changes):
            return changes
        lacking = changes[LACKING].is_valid().to_numpy(zero_copy_only=False)
        columns, _, parts = changes[LACKING].filter(pa.array(lacking)).flatten()
        places = np.searchsorted(raw["offset"].to_numpy(), changes[OFFSET].to_numpy()[lacking])
        known = zip(columns.to_pylist(), parts.to_pylist(), strict=True)
        reasons = [f"the record {no_value(names[0]) if text is None else no_row()}" for names, text in known]
        lines = np.full(len(changes), None, object)
        lines[lacking] = _letters(raw.take(pa.array(places)), reasons, per_ms=1000)
        names, _, parts = changes[LACKING].flatten()
        arrays = [names, pa.array(lines, pa.string()), parts]
        made = pa.StructArray.from_arrays(arrays, fields=list(LACKING_TYPE), mask=pa.array(~lacking))
        return changes.set_column(changes.schema.get_field_index(LACKING), changes.schema.field(LACKING), made)

    def layout_times(self, batch: pa.RecordBatch, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """The times that decide on the records' folders, in microseconds as clocks of the time zone show them."""
        settings = self._settings
        if settings.event_time:
            return field_times(batch["value"], settings.event_time, times, settings.time_zone)
        return local_times(times, settings.time_zone)

    def _keep(self, batch: pa.RecordBatch, reasons: list[str]) -> None:
        if self._file is None:
            self._file = self.letters.open("w", encoding="utf-8")
        self.bad += len(reasons)
        self._file.writelines(f"{line}\n" for line in _letters(batch, reasons))


def _times(column: pa.Array, path: str) -> pa.Array | None:
    """The times at a path as microseconds; None if there is no such field of times."""
    for name in path.split("."):
        if not pa.types.is_struct(column.type) or column.type.get_field_index(name) < 0:
            return None
        column = pc.struct_field(column, [name])
    return microseconds(column) if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type) else None


def _letters(batch: pa.RecordBatch, reasons: list[str], per_ms: int = 1) -> list[str]:
    """The lines of records as they are in the log; so many units of their timestamps are a ms."""
    times = batch["timestamp"].cast(pa.int64()).to_pylist()
    columns = (batch[name].to_pylist() for name in ("topic", "partition", "offset", "key", "value", "headers"))
    made = []
    for time, reason, topic, partition, offset, key, value, headers in zip(times, reasons, *columns, strict=True):
        letter = {
            "version": VERSION,
            "topic": topic,
            "partition": partition,
            "offset": offset,
            "timestamp": time // per_ms,
            "reason": reason,
            "key": _text(key),
            "value": _text(value),
            "headers": [[header["key"], _text(header["value"])] for header in headers or ()],
        }
        made.append(json.dumps(letter, ensure_ascii=False))
    return made


def _rows(mask: NDArray[np.bool_]) -> list[int]:
    return list(np.flatnonzero(mask).tolist())


def _text(value: Any) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


@dataclass(frozen=True)
class Job:
    """The settings that all tasks of a run share. `is_limited`: they stop reading when the driver says so (`TaskTime`).

    `recreated` are topics of the plan that were created again since: asking brokers for the old one would wait.
    """

    output: str
    run: int
    source: SourceOptions
    settings: WriteSettings
    is_limited: bool = False
    recreated: frozenset[str] = frozenset()
    #: Keys and values that are rows of `settings.rows`, by topic.
    readers: Mapping[str, Sequence[ReaderSchema]] = field(default_factory=dict)
    #: The columns of the table that the files are for; None without one.
    columns: pa.Schema | None = None
    #: Of a schema that is inferred: what the run's tasks have seen so far, as `Seen.to_json` has it.
    seen: Sequence[Any] = ()


def run_task(number: int, ranges: Sequence[Range], job: Job) -> list[RangeResult]:
    """Load the ranges and write the task's file of offsets; a task that has done so returns what is in it. One whose
    values the run's schema has no place for writes what it has seen of them instead, and returns nothing.

    A range that can't be read has its error in the result, and does not stop the others. `LoadError` if the output
    can't be written.
    """
    store = open_store(job.output, of_table=job.columns is not None)
    done = task_results(store, job.run, number)
    if done is not None:
        return done
    with store.scratch(paths.staging(job.run)) as folder:
        attempt = _Attempt(store, job, number, folder)
        results = [] if attempt.is_late() else _load_all(attempt, ranges)
        store.settle()
    if not attempt.is_late():
        if attempt.inferring is not None and attempt.inferring.has_grown:
            keep_seen(store, job.run, number, attempt.inferring.seen)
        elif store.create(paths.task(job.run, number), to_json(TaskResults(results))):
            return results
    attempt.remove_files()
    return task_results(store, job.run, number) or []  # another attempt was first: its files count


class _Attempt:
    """An execution of a task. Spark may begin another one beside it, or after it without having ended it.

    The attempt that creates the task's file of offsets counts. Files have its token in their names, so that no other
    attempt replaces them. If it is late, or is killed, they belong to no run. On a local disk the commit removes the
    folder of files that wait, and the attempt's scratch folder in it. In an object store they lie among the others: a
    marker tells the commit and the next run of the attempt (`remove_orphans`).
    """

    def __init__(self, store: Store, job: Job, number: int, folder: Path) -> None:
        self.store, self.job, self.folder = store, job, folder
        self._number = number
        self._paths: list[str] = []
        self._decoders: dict[str, dict[str, ColumnDecoder]] = {}
        self.inferring = InferringDecoder(job.settings, Seen.of_json(job.seen)) if job.settings.infers else None
        self.token = paths.new_token()
        if store.shows_whole_files_only:
            while not store.create(paths.attempt(job.run, self.token), b""):
                self.token = paths.new_token()
        self.time = TaskTime(store, job.run, is_limited=job.is_limited)

    def decoders(self, topic: str) -> dict[str, ColumnDecoder]:
        """What decodes keys and values of a topic, by column: each schema is asked for once. Types are `named_type`."""
        if topic not in self._decoders:
            readers = self.job.readers.get(topic, ())
            self._decoders[topic] = {
                reader.column: replace(reader.decoder(), type=named_type(reader)) for reader in readers
            }
        return self._decoders[topic]

    def is_late(self) -> bool:
        """Whether another attempt counts, or the run is committed or given up."""
        store, run = self.store, self.job.run
        if store.size(paths.manifest(run)) is not None or store.size(paths.task(run, self._number)) is not None:
            return True
        # the marker is gone, or has been written again: the attempt was ended
        return store.shows_whole_files_only and store.size(paths.attempt(run, self.token)) != 0

    def put(self, source: Path, path: str) -> None:
        """Hand over a file from the scratch folder; `LoadError` if the attempt is late and readers would see it."""
        if not self.store.shows_whole_files_only:
            path = paths.staged(self.job.run, path)
        elif self.is_late():
            self.remove_files()
            raise LoadError(
                f"another attempt of task {self._number} of run {paths.run_name(self.job.run)} has ended first"
            )
        self._paths.append(path)
        self.store.put(source, path)

    def remove_files(self) -> None:
        """Remove the files, and then the marker, of an attempt that does not count."""
        for path in self._paths:
            self.store.remove(path)
        self.store.remove(paths.attempt(self.job.run, self.token))


def _load_all(attempt: _Attempt, ranges: Sequence[Range]) -> list[RangeResult]:
    """Load the ranges; short ones are fetched together, from many partitions at once."""
    job = attempt.job
    by_range = {
        OffsetRange(span.topic, span.partition, span.start, span.end): span
        for span in ranges
        if span.topic not in job.recreated
    }
    ids = {span.topic: UUID(span.topic_id) for span in ranges if span.topic_id}
    results = {
        by_range[asked]: _RangeLoad(attempt, by_range[asked]).result(ids, reader)
        for asked, reader in in_reading_order(job.source, by_range, ids)
    }
    return [results[span] if span in results else _RangeLoad(attempt, span).result(ids, None) for span in ranges]


class _RangeLoad(ReadObserver):
    """Loads a range, and counts its records and where the offsets without records are."""

    loss_advice = LOSS_ADVICE

    def __init__(self, attempt: _Attempt, span: Range) -> None:
        self._attempt, self._range = attempt, span
        self._until = span.start
        self._records = self._bytes = self._bad_values = 0
        self._times: list[int] = []
        self._gaps: Counter[str] = Counter()
        self._hours: Counter[int] = Counter()
        self._files: list[FileEntry] = []
        self._letters: list[str] = []
        self._letters_before = 0
        self.keep_letter = self._keep_letter

    def result(self, ids: Mapping[str, UUID], reader: RangeReader | None) -> RangeResult:
        """Read and write the range. An error of it is in the result; `LoadError` if the output can't be written."""
        span, job = self._range, self._attempt.job
        try:
            if span.topic in job.recreated:
                lost = Lost(span.topic, span.partition, span.start, span.end, -1, -1, RECREATED)
                LossReporter(job.source.on_data_loss, LOSS_ADVICE).report([lost])
                self.lost(lost)
            elif not self._attempt.time.is_over():
                self._write(ids, reader)
        except LoadError:
            raise
        except SchemaChanged as change:
            # No letters of records that are good: the run waits for a call that takes the new version.
            self._attempt.store.write(paths.refused(job.run), b"")
            raise LoadError(
                f"run {paths.run_name(job.run)} is not committed: subject {change.subject} has records of version "
                f"{change.version} now, which version {change.read}, the load's, can't read: run again with "
                "--schema-evolution latest, which loads this run anew by the latest version"
            ) from None
        except KlogError as failure:
            # What the range has written belongs to no run: the commit removes it.
            return unread(span, span.start, str(failure))
        except OSError as failure:
            raise LoadError(f"{self._attempt.store.address} can't be written: {failure}") from None
        return RangeResult(
            span.topic,
            span.partition,
            span.start,
            self._until,
            self._records,
            self._bytes,
            min(self._times, default=None),
            max(self._times, default=None),
            {cause: count for cause, count in sorted(self._gaps.items()) if count},
            {time_text(hour * HOUR_US, _HOUR_FORM): count for hour, count in sorted(self._hours.items())},
            self._files,
            self._letters,
            "",
            self._bad_values,
        )

    def _write(self, ids: Mapping[str, UUID], reader: RangeReader | None) -> None:
        span, attempt, settings = self._range, self._attempt, self._attempt.job.settings

        def put(source: Path, entry: FileEntry) -> None:
            attempt.put(source, entry.path)
            self._files.append(entry)

        writer: RangeWriter | ChangeRangeWriter
        change_format = settings.change_format(span.topic)
        if change_format is None:
            writer = RangeWriter(span, settings, attempt.folder, put, attempt.token, attempt.job.columns)
        else:
            writer = ChangeRangeWriter(span, change_format.key, attempt.folder, put, attempt.token, attempt.job.run)
        asked = OffsetRange(span.topic, span.partition, span.start, span.end)
        decoders, columns = attempt.decoders(span.topic), attempt.job.columns
        dated = () if columns is None else dated_columns(settings, has_ids=has_field_ids(columns))
        inferring = attempt.inferring
        with Values(
            *(span, settings, attempt.folder, attempt.token, decoders), dated=dated, inferring=inferring
        ) as values:
            batches = read_ranges(attempt.job.source, [asked], READ, ids, self, reader)
            for batch in chain.from_iterable(map(values.parts, batches)):
                try:
                    raw, parsed = values.parse(batch)
                except GrownError:
                    continue
                if change_format is not None:
                    raw, parsed = values.changes(raw, parsed, change_format)
                self._gaps[UNPARSED] += len(batch) - len(raw)
                if len(raw):
                    times = np.frombuffer(raw["timestamp"].buffers()[1], np.int64)[: len(raw)]
                    self._count(raw, times)
                    if isinstance(writer, ChangeRangeWriter):
                        writer.add(parsed, times, raw["offset"][len(raw) - 1].as_py())
                    else:
                        writer.add(parsed, times, values.layout_times(parsed, times))
            if inferring is not None and inferring.has_grown:
                return  # another attempt, by a larger schema, writes all of it
            writer.finish(self._until)
        if values.bad:
            self._bad_values = values.bad
            attempt.put(values.letters, f"{paths.LETTERS}/{values.letters.name}")
            self._letters.append(values.letters.name)

    def _count(self, batch: pa.RecordBatch, times: NDArray[np.int64]) -> None:
        low, high = int(times.min()), int(times.max())
        self._records += len(batch)
        self._bytes += _data_size(batch["key"]) + _data_size(batch["value"])
        known = [*self._times, low // 1000, high // 1000]
        self._times = [min(known), max(known)]
        first, last = (dated(np.array([low, high])) // HOUR_US).tolist()
        if first == last:
            self._hours[first] += len(batch)
        else:
            hours, records = np.unique(dated(times) // HOUR_US, return_counts=True)
            self._hours.update(dict(zip(hours.tolist(), records.tolist(), strict=True)))

    def _keep_letter(self, name: str, letter: dict[str, Any]) -> None:
        self._attempt.store.write(paths.dead_letter(name), to_json(letter))
        if name not in self._letters:
            self._letters.append(name)

    def lost(self, lost: Lost) -> None:
        self._gaps[lost.cause] += lost.end - lost.start
        self._until = lost.end

    def fetched(self, batches: RecordBatches, start: int, records: int) -> bool:
        end = min(batches.next_offset, self._range.end)
        missing = end - start - records
        if missing:
            hidden = min(missing, self._hidden(batches, start, end) if batches.data else 0)
            self._gaps[TRANSACTIONS] += hidden
            is_corrupt = len(self._letters) > self._letters_before
            self._gaps[CORRUPT if is_corrupt else COMPACTION] += missing - hidden
        self._letters_before = len(self._letters)
        self._until = end
        return not self._attempt.time.is_over()

    def _hidden(self, batches: RecordBatches, start: int, end: int) -> int:
        """The offsets of control batches and aborted transactions."""
        aborted = AbortedTransactions(batches.aborted)
        count = 0
        for header, batch in iter_batches(batches.data):
            if isinstance(header, BatchHeader) and (aborted.skips(header, batch) or header.is_control):
                count += max(0, min(header.next_offset, end) - max(header.base_offset, start))
        return count


def _data_size(column: pa.Array) -> int:
    """The bytes of a binary column that begins at the start of its buffers."""
    ends = np.frombuffer(column.buffers()[1], np.int32)
    return int(ends[len(column)] - ends[0])


def unread(span: Range | RangeResult, until: int, error: str) -> RangeResult:
    """The result of a range of which nothing counts: it was not read, or a range before it could not be."""
    return RangeResult(span.topic, span.partition, until, until, 0, 0, None, None, {}, {}, [], [], error)


@dataclass(frozen=True)
class Work:
    """Tasks of a run by their numbers, for Spark. `total` are their offsets, of which `done` tells those that are
    loaded; `store` has the run's journal."""

    tasks: dict[int, list[Range]]
    job: Job
    store: Store
    total: int
    done: Callable[[], int]


class SparkRunner:
    """Runs tasks by a Spark session, which `make_session` makes when the first task is there.

    They are a DataFrame: no record goes through the JVM, and Spark Connect does as well. Row N of `spark.range` is part
    N of the tasks, in a partition of its own; what a task answers is one row, too.
    """

    def __init__(self, make_session: Callable[[], Any]) -> None:
        self._make_session = make_session
        self._made: Any = None

    @property
    def spark(self) -> Any:
        if self._made is None:
            self._made = self._make_session()
        return self._made

    def cores(self) -> int:
        from pyspark.sql.utils import is_remote

        spark = self.spark
        return _CORES if is_remote() else int(spark.sparkContext.defaultParallelism)

    def run_all(self, works: Sequence[Work]) -> list[Exception | None]:
        """Run the tasks of several loads in one job; the results are in the runs' files. Returns an error for each load
        whose tasks are not complete, `LoadError`.

        Spark gives up a job for a single task. So tasks that share a job raise nothing, but answer that they have
        failed, and the loads of which one has failed, or all if a worker has died, run again, each in a job of its own.
        """
        if len(works) == 1:
            return [self._run(works)]
        failed: Collection[int] = range(len(works))
        try:
            failed = {answer[0] for answer in self._answers(works) if answer[1]}
        except Exception as error:
            _log.warning("the loads run one after the other, as their tasks have failed together: %s", cause_of(error))
        return [self._run([work]) if number in failed else None for number, work in enumerate(works)]

    def _run(self, works: Sequence[Work]) -> Exception | None:
        try:
            self._answers(works)
        except Exception as error:
            failure = LoadError(cause_of(error))
            failure.__cause__ = error
            return failure
        return None

    def _answers(self, works: Sequence[Work]) -> list[Any]:
        """Each task's load, by its number in `works`, and whether the task has failed."""
        parts = _parts(works, self.cores())
        work = partial(_work, parts, [work.job for work in works])
        return list(self.spark.range(0, len(parts), 1, len(parts)).mapInArrow(work, _ANSWER_DDL).collect())

    def has_ended(self) -> bool:
        """Whether there was a session that is gone: someone has stopped it, or its JVM."""
        if self._made is None:
            return False
        from pyspark.sql.utils import is_remote

        if is_remote():
            return bool(getattr(self._made, "is_stopped", False))
        try:
            context = self._made.sparkContext._jsc
            return context is None or bool(context.sc().isStopped())
        except Exception:  # py4j's, of many kinds
            return True

    def stop(self) -> None:
        if self._made is not None:
            self._made.stop()


def cause_of(error: Exception) -> str:
    """The cause inside Spark's message, in a line; the first line of any other error."""
    for pattern in _CAUSES:
        causes = re.findall(pattern, str(error), re.MULTILINE)
        if causes:
            cause = str(causes[-1]).removeprefix("LoadError: ")
            is_lacking = cause.startswith("ModuleNotFoundError")
            return f"{cause}; klog doctor checks the Python of Spark's workers" if is_lacking else cause
    return (str(error).strip().splitlines() or [repr(error)])[0]


#: Tasks that one of Spark's does: the number of the load, that of the task, its ranges.
_Part = list[tuple[int, int, list[Range]]]


def _parts(works: Sequence[Work], cores: int) -> list[_Part]:
    """What each of Spark's tasks does: small tasks of loads together."""
    tasks = [(number, *task) for number, work in enumerate(works) for task in sorted(work.tasks.items())]
    sizes = [sum(span.end - span.start for span in ranges) for _, _, ranges in tasks]
    most = max(_SMALL, sum(sizes) // (_PARTS_OF_CORE * cores))
    parts: list[_Part] = []
    room = 0
    for size, task in zip(sizes, tasks, strict=True):
        room -= size
        if room < 0 or not parts:
            parts.append([])
            room = most - size
        parts[-1].append(task)
    return parts


def _work(parts: list[_Part], jobs: list[Job], rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in rows:
        for index in batch.column(0).to_pylist():
            for number, task, ranges in parts[index]:
                has_failed = False
                try:
                    run_task(task, ranges, jobs[number])
                except Exception as error:
                    if len(jobs) == 1:
                        raise
                    _log.warning("a task of %s has failed: %s", jobs[number].output, error)
                    has_failed = True
                columns = pa.array([number], pa.int64()), pa.array([has_failed], pa.bool_())
                yield pa.RecordBatch.from_arrays(list(columns), schema=_ANSWER)
