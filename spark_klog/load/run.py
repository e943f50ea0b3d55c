"""A load's run from start to end: finish what a killed run has left, plan, give the tasks to Spark, commit.

It is a generator of steps (`driving.py`), so that the runs of several loads can share Spark's jobs.

A run may load again offsets that the load has. It replaces ranges of earlier runs as a whole, so that no record is in
two files: it begins where the range begins that has the asked offset, and ends where one ends.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from time import time_ns
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa

from spark_klog.base.names import TopicPartition
from spark_klog.base.settings import any_of, some_of
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import list_offsets, offsets_of_led
from spark_klog.client.range_spans import RangeSpans
from spark_klog.errors import ConfigError, DataLossError, KlogError, LoadError
from spark_klog.files.arrow import ArrowFolder
from spark_klog.load.binding import BINDING, check_output, check_schema, event_time_now, open_target
from spark_klog.load.commit import check_results, make_manifest, settings_of
from spark_klog.load.driving import Follow, Steps, drive
from spark_klog.load.inference import inferred_schema, seen_so_far
from spark_klog.load.journal import history, paths
from spark_klog.load.journal.checkpoint import read_summary
from spark_klog.load.journal.history import Identity
from spark_klog.load.journal.letters import first_letter
from spark_klog.load.journal.model import (
    Idle,
    Manifest,
    PartitionAudit,
    Plan,
    Progress,
    Range,
    RangeResult,
    now_text,
    offsets_json,
)
from spark_klog.load.journal.store import Store, locked, to_json
from spark_klog.load.letter_table import LetterTable, check_letters
from spark_klog.load.letter_topic import SCHEME, LetterTopic
from spark_klog.load.places import AtOffsets, AtRun, Place, resolve
from spark_klog.load.planning import Extent, Limits, Look, bounded, check_names, find_extent, make_tasks, partitions_of
from spark_klog.load.rows import ANOTHER, Evolution, RowSchema, check_registry, run_schemas, with_names_of
from spark_klog.load.settings import PARQUET, VALUES, WriteSettings
from spark_klog.load.target import Target, show_letters
from spark_klog.load.tasks.task import Job, SparkRunner, Work
from spark_klog.load.tasks.time_limit import TimeLimit
from spark_klog.protocol.tables.records import EARLIEST, LATEST
from spark_klog.schemas.json_schema.ddl import parse_schema
from spark_klog.spark.options import PREFIX, source_options
from spark_klog.spark.read.ranges import RETENTION, Lost, OffsetRange
from spark_klog.tables.changes import RECORD_KEY
from spark_klog.tables.mongodb import plain_events
from spark_klog.tables.opening import is_table, open_table
from spark_klog.tables.partitions import BY_TIME

if TYPE_CHECKING:
    from spark_klog.schemas.column_format import ColumnFormat, ReaderSchema

_log = logging.getLogger(__name__)
#: How many newer versions of a schema a run takes.
_MOST_VERSIONS = 1000
#: How long leaders may take to say where the log ends for which a killed run was planned.
_ANSWER_MS = 5000.0


@dataclass(frozen=True)
class MaxBad:
    """The limit of bad batches and values: a number, or a percentage of a run's records, good and bad."""

    count: float
    is_percent: bool = False

    def allows(self, bad: int, records: int) -> bool:
        return bad <= (self.count * (bad + records) / 100 if self.is_percent else self.count)

    def __str__(self) -> str:
        return f"{self.count:g}{'%' * self.is_percent}"


@dataclass(frozen=True)
class LoadOptions:
    """What to load and where to. `client` are settings of a Kafka client, with bootstrap.servers.

    `output` is a folder's path or URI, or the address of a table, as `open_table` takes it.
    `max_seconds` bounds the reading of a call from its first task on; `max_task_records` the records of a file's range;
    more than `max_bad` batches and values that are bad fail the run. Deleted keys are remembered for `keep_deletes`
    seconds. `start` loads again from a place on, `until` stops at one. `formats` are those of keys and values that
    become rows; which schema a run has of them, `evolution` says. A format of a registry without text, id and subject
    has the subject TOPIC-COLUMN of each topic. `dead_letters` is the address of a table that gets them, too.
    """

    client: dict[str, str]
    topics: list[str]
    output: str
    settings: WriteSettings = field(default_factory=WriteSettings)
    limits: Limits = field(default_factory=Limits)
    max_seconds: float | None = None
    max_task_records: int | None = None
    max_bad: MaxBad = MaxBad(0)
    fail_on_loss: bool = True
    start: Place | None = None
    until: Place | None = None
    formats: tuple[ColumnFormat, ...] = ()
    evolution: Evolution = "keep"
    dead_letters: str = ""
    keep_deletes: float | None = None

    def __post_init__(self) -> None:
        settings, columns = self.settings, {form.column for form in self.formats}
        is_json = bool(settings.schema) or settings.infers
        has_fields = is_json or "value" in columns
        for name in settings.dictionary:
            if name in columns or (name == "value" and has_fields):
                raise ConfigError(f"dictionary: {name}s are rows here, and only plain columns have a dictionary")
        if is_table(self.output):
            self._check_table(settings, has_fields)
        elif settings.table_columns == VALUES:
            raise ConfigError("--table-columns values is for --table")
        elif settings.layout not in BY_TIME:
            raise ConfigError(f"partition-by {settings.layout!r} must be {any_of(BY_TIME)}: columns are for --table")
        elif settings.is_variant:
            raise ConfigError("--schema variant is for --table delta:, as files have no such type: give a DDL")
        elif settings.upsert_key:
            raise ConfigError("an upsert key is for a table, as is an envelope: give --table delta: or iceberg:")
        if self.dead_letters.startswith(SCHEME):
            if self.dead_letters.removeprefix(SCHEME) in self.topics:
                raise ConfigError(
                    f"--dead-letters {self.dead_letters} is loaded itself: each run would find the letters of the last "
                    "one. Name another topic, or leave it out of the topics to load"
                )
        elif self.dead_letters:
            check_letters(self.dead_letters, self.output)
        if self.keep_deletes is not None and not settings.upsert_key:
            raise ConfigError("--keep-deletes is for changes of rows: give an upsert key")
        if is_json and "value" in columns:
            raise ConfigError("values are either JSON or of another format with a schema")
        if settings.event_time and not has_fields:
            raise ConfigError(f"event time {settings.event_time!r} needs a --value-format with a schema")

    def _check_table(self, settings: WriteSettings, has_fields: bool) -> None:
        table = open_table(self.output)
        zone = table.partition_zone
        if settings.format != PARQUET:
            raise ConfigError(f"--table has files of --format parquet, not {settings.format}")
        if zone is not None and settings.layout != "none" and settings.time_zone != zone:
            raise ConfigError(
                f"{table.address} is partitioned by hours and days of {zone}, not of {settings.time_zone}: leave "
                "--time-zone out"
            )
        if isinstance(self.start, AtRun):
            raise ConfigError("--from-run loads again what the load has: for files only, as a table keeps it")
        if settings.table_columns == VALUES and not has_fields:
            raise ConfigError("--table-columns values needs a --value-format with a schema")
        if settings.is_variant and (why := table.no_variant):
            raise ConfigError(f"--schema variant is for --table delta:, as {why}: give a DDL, or infer")
        if settings.upsert_key:
            if settings.table_columns == VALUES:
                raise ConfigError("--table-columns values is for records: with an upsert key fields are columns anyway")
            if len(self.topics) > 1:
                raise ConfigError("changes of several topics have no order: load one topic with an upsert key")
            if not has_fields and not self.formats:
                self._check_without_rows(settings)

    @staticmethod
    def _check_without_rows(settings: WriteSettings) -> None:
        """Refuse an upsert of records whose keys and values are bytes, unless their key and value are the row."""
        form = "give --value-format, such as avro, or json with --schema"
        if settings.envelope != "none":
            raise ConfigError(f"envelope {settings.envelope} is one of values with fields: {form}")
        if settings.upsert_key != RECORD_KEY:
            raise ConfigError(
                f"upsert key {settings.upsert_key!r} names fields of keys or values, which are bytes: {form}"
            )


@dataclass(frozen=True)
class Loaded:
    """The result of a call: the runs that it committed, and a line for each partition, even if nothing was new."""

    runs: list[int]
    partitions: list[PartitionAudit]
    files: int
    dead_letters: list[str]
    lost: list[dict[str, Any]]
    offsets: dict[TopicPartition, int]
    """Where the next run begins."""
    left_out: Mapping[str, KlogError] = field(default_factory=dict)
    """The errors of partitions and topics that the call has not looked at, by their names."""

    @property
    def bad(self) -> int:
        """Corrupt batches, and records whose value or timestamp did not parse."""
        return sum(part.bad for part in self.partitions)

    @property
    def failed(self) -> list[PartitionAudit]:
        return [part for part in self.partitions if part.error]


#: Gets where a load goes on, of all its partitions.
Publish = Callable[[Mapping[TopicPartition, int]], None]


class Shared:
    """The cluster from which several loads read. Their threads take turns in it, within `asking`."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.asking = threading.Lock()


def load(
    options: LoadOptions,
    runner: SparkRunner,
    follow: Follow = lambda _total, _done: nullcontext(),
    publish: Publish | None = None,
) -> Loaded:
    """Do one load: see `load_steps`. Errors also as of `Cluster.connect`."""
    time = TimeLimit(options.max_seconds)
    with Cluster.connect(options.client) as cluster:
        [outcome] = drive([load_steps(options, Shared(cluster), time, publish)], runner, time, follow)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def load_steps(
    options: LoadOptions, shared: Shared, time: TimeLimit, publish: Publish | None = None, look: Look | None = None
) -> Steps[Loaded]:
    """Load what is new in the topics; first the rest of a run that was killed, as it was planned.

    Other partitions are loaded if some fail: see `Loaded.failed`. `publish` gets `Loaded.offsets` while no other run of
    the load can have later ones. A `look` at the topics is one that others have had for this load, too; `time` is that
    of all loads of the call. `ConfigError`, `LoadError`, `DataLossError`, errors as of `publish`.
    """
    cluster = shared.cluster
    # Before anything is written: opening the target of a table may create the namespace of its location.
    with shared.asking:
        partitions = partitions_of(cluster, options.topics) if look is None else look.ids
    target = open_target(options.output)
    check_names(target.store, partitions, options.settings.extension)
    if options.settings.schema:
        parse_schema(options.settings.schema)
    with locked(target.store):
        event_time = event_time_now(target.store, options.settings.event_time)
        options = replace(options, settings=replace(options.settings, event_time=event_time))
        settings = asdict(options.settings)
        names: dict[str, str] = {each.column: each.format for each in options.formats}
        identity = check_output(target, cluster.cluster_id, settings, names)
        owner, is_new = None, identity is None
        if identity is None:
            owner = target.owner()
            identity = history.new_identity(cluster.cluster_id, settings, names, target.journal_name)
            identity = replace(identity, load=owner or identity.load)
        elif options.settings.schema:
            takes_new = target.widens or options.evolution == "latest"
            schema = check_schema(target, identity, options.settings.schema, takes_new=takes_new)
            options = replace(options, settings=replace(options.settings, schema=schema))
        run = _Run(options, target, shared, time, identity)
        if owner is not None:  # its journal is lost
            run.claim()
        loaded = yield from _with_span(run.all(is_new and owner is None, look), options.topics, shared)
        if publish is not None:
            if isinstance(target.store, ArrowFolder):
                target.store.guard()  # if this call stood still, another one may have taken over
            publish(loaded.offsets)
        return loaded


def _with_span(steps: Steps[Loaded], topics: Sequence[str], shared: Shared) -> Steps[Loaded]:
    """The steps of a load, which are a span if there is a TracerProvider; what they raise is its error."""
    spans = RangeSpans(shared.cluster, shared.asking)
    began = time_ns()
    try:
        loaded = yield from steps
    except BaseException as error:
        spans.processed({(topic, -1): (0, 0) for topic in topics}, 0, began, error=error)
        raise
    parts = [part for part in loaded.partitions if part.records or part.error]
    ranges = {(part.topic, part.partition): (part.start, part.until) for part in parts}
    failed = "spark_klog.errors.LoadError" if loaded.failed else None  # of single partitions; their errors are texts
    spans.processed(ranges, sum(part.records for part in parts), began, error=failed)
    return loaded


class _Run:
    def __init__(
        self, options: LoadOptions, target: Target, shared: Shared, time: TimeLimit, identity: Identity
    ) -> None:
        self._options, self._identity, self._load = options, identity, identity.load
        self._cluster, self._asking = shared.cluster, shared.asking
        self._target, self._store, self._time = target, target.store, time
        # Here, so that a setting that is refused is refused before anything is written.
        self._source = source_options(
            {
                **{f"{PREFIX}{name}": value for name, value in options.client.items()},
                "subscribe": ",".join(options.topics),
                "failOnDataLoss": "true" if options.fail_on_loss else "false",
                "badRecords": "skip",
            },
            streaming=False,
        )
        self._letters: LetterTable | LetterTopic | None = None
        if options.dead_letters.startswith(SCHEME):
            self._letters = LetterTopic(options.dead_letters, options.client, self._load)
        elif options.dead_letters:
            self._letters = LetterTable(options.dead_letters, self._load)
        self._loaded: list[Manifest] = []
        self._committed: list[Manifest] = []

    def all(self, is_new: bool, look: Look | None) -> Steps[Loaded]:
        number = history.settled_run(self._store)
        if not is_new:
            number = self._target.catch_up(self._load, number)
        manifest = history.read_manifest(self._store, number) if number else None
        if manifest is not None:
            if not history.is_pointed_to(self._store, number):
                self._target.publish(manifest)
            elif self._store.names(paths.staging(number)):  # an attempt has gone on after the commit
                self._store.remove(paths.staging(number))
            self._target.remove_orphans(number, self._options.topics, is_last_time=True)
        if number:
            self._add_letters()  # of a run that was killed before it could
        progress = manifest.progress() if manifest else {}
        killed = history.read_plan(self._store, number + 1)
        limits = self._options.limits
        asked = repr((self._options.start, self._options.until)) if self._options.start else ""
        if killed is not None:
            if killed.run != number + 1:
                raise LoadError(f"{self._store.address}/{paths.plan(number + 1)} is of run {killed.run}: restore it")
            _log.info("finishing run %s, which failed or was killed", paths.run_name(killed.run))
            killed = self._renewed(killed)
            progress = yield from self._execute(killed, progress, self._log_ends(killed), is_resumed=True)
            if look is not None:  # that took a while
                with self._asking:
                    look = look.again(self._cluster) if look.left_out else None
            number = history.last_committed(self._store)
            limits = limits.less(sum(part.until - part.start for each in self._loaded for part in each.partitions))
        is_done = killed is not None and killed.asked == asked != ""
        extent = self._extent(look, progress, limits, is_again=not is_done)
        has_work = (extent.records or extent.lost) and not self._time.is_over
        settings = self._options.settings
        if has_work and self._options.formats:
            settings = settings.with_rows(self._run_schemas(number, self._options.topics))
        if has_work and settings.infers:
            settings = self._inferred(number, extent, settings)
        if has_work and self._letters is not None:
            self._letters.check()
        if is_new:
            self.claim()
        elif number == 0 and self._identity != history.read_identity(self._store):  # that of a call without records
            self._store.write(paths.LOAD, to_json(self._identity))
        # Of columns that are known without a record there is a table after the first call.
        if has_work or (number == 0 and not self._options.formats and not settings.infers):
            try:
                self._target.prepare(self._load, settings, self._options.topics, "plan")
            except LoadError:  # the target refuses the columns, before there is a plan
                if is_new:
                    self._store.remove(paths.LOAD)
                raise
        if has_work:
            tasks: list[list[Range]] = []
            if extent.records:
                cores, leader_of = (yield None), self._cluster.last_leader
                tasks = make_tasks(extent, cores, self._options.max_task_records, leader_of)
            plan = self._plan(number + 1, extent, progress, asked, settings, tasks)
            progress = yield from self._execute(plan, progress, extent.log_end)
        summary = replace(self._summary(extent, progress), left_out={} if look is None else look.left_out)
        if not self._committed:
            idle = Idle(number, now_text(), summary.partitions)
            self._store.write(paths.IDLE, to_json(idle))
        return summary

    def claim(self) -> None:
        """Make the target this load's; `LoadError` if another run was quicker that is not of the same load."""
        claimed = history.claim_output(self._store, self._identity)
        if not self._target.loads_again and claimed.load != self._load:
            raise self._begun_by_another(1)

    def _extent(
        self, look: Look | None, progress: Mapping[TopicPartition, Progress], limits: Limits, *, is_again: bool
    ) -> Extent:
        """Find the offsets to load; with `is_again` also those that the load has already, from `options.start` on."""
        with self._asking:
            return self._extent_of(look or Look.at(self._cluster, self._options.topics), progress, limits, is_again)

    def _extent_of(
        self, look: Look, progress: Mapping[TopicPartition, Progress], limits: Limits, is_again: bool
    ) -> Extent:
        options, cluster = self._options, self._cluster
        extent = find_extent(cluster, look, progress, options.fail_on_loss)
        if options.start is not None and is_again:
            extent = _begin_at(extent, cluster, self._store, progress, options.start, options.fail_on_loss)
            if not self._target.loads_again and any(
                key in progress and now.offset < progress[key].offset and now.incarnation == progress[key].incarnation
                for key, now in extent.start.items()
            ):
                raise ConfigError(
                    "--from-time or --from-offsets is before the end of what the table has, and a table is not loaded "
                    "again: leave it out, or load into another table"
                )
        if options.until is not None:  # partitions of which it says nothing end at the log's end
            ids = {key: place.topic_id for key, place in extent.start.items()}
            asked = resolve(cluster, self._store, options.until, ids, extent.log_end)
            ends = {key: min(end, asked.get(key, end)) for key, end in extent.end.items()}
            extent = replace(extent, end={key: max(extent.start[key].offset, end) for key, end in ends.items()})
        return _whole_ranges(bounded(extent, cluster, limits))

    def _run_schemas(self, last: int, topics: Sequence[str]) -> tuple[RowSchema, ...]:
        """The schemas of the run after run `last`; errors as of `rows.run_schemas`."""
        plan = history.read_plan(self._store, last) if last else None
        before = () if plan is None else settings_of(self._store, plan).rows
        options, target = self._options, self._target
        return run_schemas(
            options.formats, topics, before, options.evolution, widens=target.widens, renames=target.renames
        )

    def _inferred(self, last: int, extent: Extent, settings: WriteSettings) -> WriteSettings:
        """The settings of the run after run `last`, with the schema that it begins by; errors as of `inferred_schema`.

        It is that of the run before. Of the first one it is that of a sample.
        """
        from spark_klog.spark.read.sampling import sample_json  # pyspark takes a while to import

        plan = history.read_plan(self._store, last) if last else None
        before = "" if plan is None else settings_of(self._store, plan).schema
        if before:
            return replace(settings, schema=before, known=before)
        ids = {key[0]: UUID(place.topic_id) for key, place in extent.start.items() if place.topic_id}
        spans = [OffsetRange(*key, place.offset, extent.end[key]) for key, place in extent.start.items()]
        with self._asking:  # one cluster of the process reads all samples
            plain = plain_events if settings.envelope == "debezium" else None
            seen = sample_json(self._source, [span for span in spans if span.start < span.end], ids, plain=plain)
        return replace(settings, schema=inferred_schema(settings, seen))

    def _plan(
        self,
        number: int,
        extent: Extent,
        progress: Mapping[TopicPartition, Progress],
        asked: str,
        settings: WriteSettings,
        tasks: list[list[Range]],
    ) -> Plan:
        moved = {loss[:2] for loss in extent.lost}
        starts = offsets_json({key: now for key, now in extent.start.items() if key in moved or key not in progress})
        lost = [loss._asdict() for loss in extent.lost]
        replaces = [old for each in extent.again.values() for old in each]
        plan = Plan(number, now_text(), self._options.topics, tasks, settings.to_json(), lost, starts, replaces, asked)
        if (
            history.read_plan(self._store, number) is not None
        ):  # in an object store, before this one removes that run's files
            raise self._begun_by_another(number)
        # A run that could read nothing removes its folder: killed there, or with an attempt of a task that ends later,
        # it leaves results of ranges that this plan does not have.
        self._target.end_attempts(number, self._options.topics)
        for task in history.complete_tasks(self._store, number):
            self._store.remove(paths.task(number, task))
        if not self._store.create(paths.plan(number), to_json(plan)):
            raise self._begun_by_another(number)
        return plan

    def _begun_by_another(self, number: int) -> LoadError:
        return LoadError(f"{self._store.address}: another run of this load has begun run {paths.run_name(number)}")

    def _log_ends(self, plan: Plan) -> dict[TopicPartition, int]:
        keys = {(span.topic, span.partition) for ranges in plan.tasks for span in ranges}
        with self._asking:
            there = self._cluster.partitions(sorted({topic for topic, _ in keys}), missing_ok=True)
            existing = [key for key in keys if key[1] in there.get(key[0], ())]
            with self._cluster.within(_ANSWER_MS):  # of a partition without a leader the run has no end to show
                return offsets_of_led(self._cluster, dict.fromkeys(existing, LATEST))[0] if existing else {}

    def _execute(
        self,
        plan: Plan,
        before: Mapping[TopicPartition, Progress],
        log_end: Mapping[TopicPartition, int],
        *,
        is_resumed: bool = False,
    ) -> Steps[dict[TopicPartition, Progress]]:
        """Run what is left of a plan, and commit it; returns where the next run starts."""
        plan, results, is_renewed = yield from self._newest(plan)
        done = [result for number in sorted(results) for result in results[number]]
        manifest = make_manifest(plan, done, before, log_end)
        settings = settings_of(self._store, plan)
        if changes := settings.change_format(plan.topics[0]):
            manifest = self._target.settle(self._load, manifest, changes, self._options.keep_deletes)
        bad, records = (sum(getattr(part, name) for part in manifest.partitions) for name in ("bad", "records"))
        if not self._options.max_bad.allows(bad, records):
            show_letters(self._store, manifest)
            again = ""
            if rows := settings.rows:
                self._store.write(paths.refused(plan.run), b"")
                again = ", or with another schema and --schema-evolution latest"
                if any(row.has_ids for row in rows):
                    again = f", or once the schema registry has what they need{again}"
            elif settings.is_variant:  # which takes all JSON
                again = ", or without --schema into another table, which takes any bytes"
            elif self._target.widens and settings.schema:
                again = ", or with a --schema that has room for them"
            first = first_letter(self._store, manifest.dead_letters)
            first = first and f" (the first: {first})"
            raise LoadError(
                f"run {paths.run_name(plan.run)} has {bad} bad record batches or values, more than --max-bad "
                f"{self._options.max_bad}, and is not committed{first}: look at "
                f"{self._store.address}/{paths.LETTERS}, then run again with a larger --max-bad to load the others"
                f"{again}"
            )
        if not plan.lost and not any(part.until > part.start for part in manifest.partitions):
            # Nothing could be read: the next run makes a plan of its own.
            self._loaded.append(manifest)
            self._target.end_attempts(plan.run, plan.topics)
            history.discard_run(self._store, plan.run)
            return dict(before)
        has_failed = any(part.error for part in manifest.partitions)
        is_cut = sum(len(result.files) for result in done) > len(manifest.files)
        has_leftovers = is_resumed or is_renewed or has_failed or is_cut or self._time.is_set
        manifest = self._target.commit(self._load, manifest, changes)
        self._target.publish(manifest, has_leftovers=has_leftovers)
        if manifest.dead_letters:
            self._add_letters()
        self._loaded.append(manifest)
        self._committed.append(manifest)
        return manifest.progress()

    def _add_letters(self) -> None:
        """Give the table of dead letters what it lacks of those of committed runs."""
        if self._letters is not None:
            self._letters.catch_up(self._store)

    def _newest(self, plan: Plan) -> Steps[tuple[Plan, dict[int, list[RangeResult]], bool]]:
        """Run a plan by each newer schema that its records have, if the call takes the latest one.

        Returns the plan that has come to its end, the results of its tasks, and whether it is another one.
        """
        for attempts in range(_MOST_VERSIONS):
            seen = self._seen(plan)
            try:
                results = yield from self._run_tasks(plan, seen)
                return plan, results, attempts > 0
            except LoadError:
                may_change = self._options.evolution != "keep" or self._options.settings.infers
                renewed = self._renewed(plan) if may_change else plan
                # the schema is the same, too, if an object has got too many names: the tasks have to know that
                if renewed is plan and seen == self._seen(plan):
                    raise
                plan = renewed
        raise LoadError(
            f"run {paths.run_name(plan.run)}: its records have more than {_MOST_VERSIONS} versions of a schema"
        )

    def _seen(self, plan: Plan) -> Sequence[Any]:
        """What the tasks of a run by an inferred schema have seen; empty of any other."""
        settings = settings_of(self._store, plan)
        return seen_so_far(self._store, plan.run, settings).to_json() if settings.infers else ()

    def _run_tasks(self, plan: Plan, seen: Sequence[Any]) -> Steps[dict[int, list[RangeResult]]]:
        """Run the tasks that are not complete; returns the results of all. `LoadError` if one of them has ended."""
        settings = settings_of(self._store, plan)
        columns = self._target.prepare(self._load, settings, plan.topics, "tasks")
        results = self._results(plan, columns)
        todo = {number: ranges for number, ranges in enumerate(plan.tasks) if number not in results}
        if not todo:
            return results
        total = sum(span.end - span.start for ranges in plan.tasks for span in ranges)
        yield Work(todo, self._job(plan, columns, seen), self._store, total, lambda: self._done(plan))
        results = self._results(plan)
        missing = sorted(todo.keys() - results.keys())
        if missing:
            raise LoadError(f"run {paths.run_name(plan.run)}: no file of offsets of tasks {missing[:5]}: run again")
        return results

    def _renewed(self, plan: Plan) -> Plan:
        """The plan of a run to finish, by the schemas that this call has.

        They are those of the plan, but for what binds no later run yet: settings and a schema of JSON of which the call
        gives others, or which tasks have found to lack something, and for a run that was refused the latest schema, if
        the call asks for it. Then tasks run again whose records did not decode; all of them in files, as the newest one
        is to have all fields, of changes, as those of a key are to be of one type, and if their files have what the new
        columns have no place for. The tasks of a refused run whose records did not decode run again anyway: the
        registry may know more now. Errors as of `_run_schemas`, `inferred_schema` and `Target.prepare`, before any
        change.
        """
        store, options = self._store, self._options
        is_refused = store.size(paths.refused(plan.run)) is not None
        new = old = settings_of(self._store, plan)
        if is_refused and options.evolution == "latest" and options.formats:
            rows = self._run_schemas(plan.run - 1, plan.topics)
            new = new.with_rows(with_names_of(rows, old.rows))
        given = {name: getattr(options.settings, name) for name in BINDING}
        given = {name: value for name, value in given.items() if value != getattr(old, name)}
        if old.layout == options.settings.layout == "none":
            given.pop("time_zone", None)
        # all at once: a schema need not have the fields that the former settings name, nor the other way round
        if old.schema and options.settings.schema:
            new = replace(new, schema=options.settings.schema, infers=False, known="", **given)
        elif old.schema and options.settings.infers:
            known = old.known
            if not old.infers:
                last = history.read_plan(store, plan.run - 1)
                known = "" if last is None else settings_of(store, last).schema
            new = replace(new, schema="", infers=True, known=known, **given)
            new = replace(new, schema=inferred_schema(new, seen_so_far(store, plan.run, old)))
        else:
            new = replace(new, **given)
        if new == old and not is_refused:
            return plan
        if new != old:
            self._target.prepare(self._load, new, plan.topics, "plan")
        runs_all_again = new != old and (bool(given) or not self._target.fits(new, old, plan.topics))
        for number, results in self._results(plan).items():
            if runs_all_again or any(result.bad_values for result in results):
                # the letters first: killed in between, the next call still knows their names
                for name in (name for result in results for name in result.dead_letters if paths.is_of_values(name)):
                    store.remove(paths.dead_letter(name))
                store.remove(paths.task(plan.run, number))
        if new != old:
            plan = replace(plan, settings=new.to_json())
            store.write(paths.plan(plan.run), to_json(plan))
            # an attempt that goes on, by the old schema, can't write to its files any more
            self._target.end_attempts(plan.run, plan.topics)
            if not store.shows_whole_files_only:
                store.remove(paths.staging(plan.run))
        store.remove(paths.refused(plan.run))
        return plan

    def _results(self, plan: Plan, columns: pa.Schema | None = None) -> dict[int, list[RangeResult]]:
        """The results of the tasks that are complete, checked, also whether their files have the target's `columns`."""
        checked = {}
        complete = set(history.complete_tasks(self._store, plan.run))
        for number, ranges in enumerate(plan.tasks):
            results = history.task_results(self._store, plan.run, number) if number in complete else None
            if results is not None and not self._target.keeps(results, columns):
                self._store.remove(paths.task(plan.run, number))
            elif results is not None:
                check_results(self._store, plan.run, number, ranges, results)
                checked[number] = results
        return checked

    def _done(self, plan: Plan) -> int:
        numbers = history.complete_tasks(self._store, plan.run)
        return sum(span.end - span.start for number in numbers for span in plan.tasks[number])

    def _job(self, plan: Plan, columns: pa.Schema | None, seen: Sequence[Any]) -> Job:
        settings = settings_of(self._store, plan)
        sources = {form.column: form for form in self._options.formats}
        readers: dict[str, list[ReaderSchema]] = {}
        for row in settings.rows:
            if row.topic in plan.topics:
                source = sources[row.column]
                check_registry(source, row)
                if changes := settings.change_format(row.topic):
                    source = replace(source, identity=changes.key_paths(row.column))
                readers.setdefault(row.topic, []).append(row.reader(source, self._options.evolution))
        planned = {span.topic: span.topic_id for ranges in plan.tasks for span in ranges if span.topic_id}
        now = self._cluster.topic_ids
        recreated = frozenset(topic for topic, known in planned.items() if str(now.get(topic, known)) != known)
        return Job(
            *(self._target.location, plan.run, self._source, settings, self._time.is_set),
            *(recreated, readers, columns, seen),
        )

    def _summary(self, extent: Extent, progress: Mapping[TopicPartition, Progress]) -> Loaded:
        """All partitions of the topics, over the runs of this call."""
        rows: dict[TopicPartition, PartitionAudit] = {}
        for manifest in self._loaded:
            for part in manifest.partitions:
                key = part.topic, part.partition
                rows[key] = _joined(rows[key], part) if key in rows else part
        for key, first in extent.start.items():
            if key not in rows:
                end = extent.log_end[key]
                rows[key] = PartitionAudit(
                    *key, first.offset, first.offset, first.offset, 0, 0, None, None, {}, 0, max(end, first.offset)
                )
        committed = self._committed
        return Loaded(
            [manifest.run for manifest in committed],
            [rows[key] for key in sorted(rows)],
            sum(len(manifest.files) for manifest in committed),
            [name for manifest in committed for name in manifest.dead_letters],
            [loss._asdict() for loss in extent.lost],
            {key: place.offset for key, place in {**extent.start, **progress}.items() if key in extent.start},
        )


def _joined(first: PartitionAudit, second: PartitionAudit) -> PartitionAudit:
    """Merge two runs' lines of one partition."""
    times = [time for time in (first.min_time, first.max_time, second.min_time, second.max_time) if time is not None]
    return replace(
        second,
        start=first.start,
        records=first.records + second.records,
        bytes=first.bytes + second.bytes,
        min_time=min(times, default=None),
        max_time=max(times, default=None),
        gaps=dict(Counter(first.gaps) + Counter(second.gaps)),
        bad=first.bad + second.bad,
        error=second.error or first.error,
    )


def _begin_at(
    extent: Extent,
    cluster: Cluster,
    store: Store,
    progress: Mapping[TopicPartition, Progress],
    place: Place,
    fail_on_loss: bool,
) -> Extent:
    """The extent from `place` on: partitions that the load has are loaded again from there, new ones begin there.

    `ConfigError` if it would skip offsets, and as of `resolve`; `DataLossError` if the log no longer has the offsets
    and `fail_on_loss`, else what it has is loaded again, and earlier files stay.
    """
    ids = {key: place.topic_id for key, place in extent.start.items()}
    asked = resolve(cluster, store, place, ids, extent.log_end)
    changed = {loss[:2] for loss in extent.lost}
    starts = dict(extent.start)
    lost: list[Lost] = []
    known = {
        key: offset
        for key, offset in asked.items()
        if key in progress and key not in changed and offset < extent.start[key].offset
    }
    ranges = _ranges_of_runs(store, {key: extent.start[key] for key in known}, known)
    again = {}
    log_start = extent.log_start | list_offsets(
        cluster, dict.fromkeys(asked.keys() - extent.log_start.keys(), EARLIEST)
    )
    for key, offset in sorted(asked.items()):
        now, low = starts[key], log_start[key]
        if key in known:
            old = [result for result in ranges[key] if result.until > offset]
            begin = min(offset, old[0].start) if old else offset
            if begin < low:
                lost.append(Lost(*key, begin, low, low, extent.log_end[key], RETENTION))
                old = [result for result in old if result.start >= low]
                begin = old[0].start if old else now.offset
            starts[key], again[key] = replace(now, offset=begin), old
        elif key not in progress:
            if offset < low:
                lost.append(Lost(*key, offset, low, low, extent.log_end[key], RETENTION))
            starts[key] = replace(now, offset=max(offset, low))
        elif isinstance(place, AtOffsets) and key not in changed and offset > now.offset:
            raise ConfigError(
                f"{place.file}: {key[0]}-{key[1]}: the load goes on at {now.offset}, so that {offset} would skip "
                f"offsets: use {ANOTHER}"
            )
    if lost and fail_on_loss:
        raise DataLossError(
            f"records can't be loaded again: {some_of([str(loss) for loss in lost], separator='; ')}; "
            "--fail-on-data-loss false loads what the log still has, and keeps the files of the other records",
            lost[0].cause,
        )
    return replace(extent, start=starts, again=again)


def _whole_ranges(extent: Extent) -> Extent:
    """Move ends that lie inside a range of an earlier run to its end; keep only the ranges that are replaced."""
    end = dict(extent.end)
    again = {}
    for key, old in extent.again.items():
        for result in old:
            if result.start < end[key] < result.until:
                end[key] = result.until
        again[key] = [result for result in old if result.until <= end[key]]
    return replace(extent, end=end, again=again)


def _ranges_of_runs(
    store: Store, wanted: Mapping[TopicPartition, Progress], asked: Mapping[TopicPartition, int]
) -> dict[TopicPartition, list[RangeResult]]:
    """The ranges of all runs, of those partitions and incarnations, in the order of offsets.

    `LoadError` if those from the `asked` offset on are not all known: without them records would be there twice.
    """
    if not wanted:
        return {}
    summary = read_summary(store, with_ranges=True)
    for (topic, partition), now in wanted.items():
        first, run = summary.unranged.get((topic, partition, now.incarnation), (0, 0))
        if asked[topic, partition] < first:
            raise LoadError(
                f"{store.address}: {topic}-{partition}: offsets before {first} can't be loaded again, as the files "
                f"offsets-TASK.json of run {paths.run_name(run)} or of earlier ones are gone: begin at a later run, or "
                f"use {ANOTHER}"
            )
    return {key: summary.known_ranges((*key, now.incarnation)) for key, now in wanted.items()}
