"""The lines about formats: names of files, fields and versions of what is written and read again.

What Kafka defines (the log, offset and transaction records) has its versions only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any, cast
from uuid import UUID

from spark_klog import restore
from spark_klog.base.names import DECISION_TOPIC
from spark_klog.broker import topic_changes
from spark_klog.broker.groups import consumer_records, records as group_records
from spark_klog.broker.metadata.internal_topics import INTERNAL_TOPICS
from spark_klog.broker.transactions.coordinator import PRODUCER_IDS
from spark_klog.broker.transactions.records import TRANSACTION_LOG_KEY, TRANSACTION_LOG_VALUE
from spark_klog.client import letter_topics
from spark_klog.client.dead_letters import HEADERS as LETTER_HEADERS
from spark_klog.groups import checkpoint as query_checkpoint
from spark_klog.load import letter_topic as of_loads, places, rows, settings
from spark_klog.load.journal import checkpoint, history, lease, letters, model, paths, store, summary
from spark_klog.load.tasks import task
from spark_klog.log import layout, partition_files, producer_state, topic_journal
from spark_klog.log.directory import CLEAN_STOP
from spark_klog.log.segments.segment import INDEX, LOG, TIME_INDEX, TRANSACTION_INDEX
from spark_klog.log.tools.upgrade import OFFSET_MAP
from spark_klog.mirror import progress
from spark_klog.protocol.schema import Versioned
from spark_klog.registry import records as registry_records
from spark_klog.schemas.prefix import HEADERS
from spark_klog.spark import options
from spark_klog.spark.option_table import DEFAULT_ID_PREFIX
from spark_klog.spark.read import letter_topic, row_columns, tasks
from spark_klog.spark.write.decisions import entries
from spark_klog.spark.write.exactly_once import PLAN, Claim, Decision, Ended, Transaction
from spark_klog.tables import change_order, columns, deleted_keys, iceberg_runs, table
from spark_klog.trees import consumers, paths as paths_of_trees, tree

_JOURNAL = (
    history.Identity,
    model.Plan,
    model.Range,
    model.RangeResult,
    model.FileEntry,
    model.Manifest,
    model.PartitionAudit,
    model.Progress,
    model.Idle,
    model.Latest,
    model.LettersInTopic,
    model.TaskResults,
    settings.WriteSettings,
    rows.RowSchema,
)


def format_lines() -> Iterator[str]:
    yield from (f"load journal: {line}" for line in _journal())
    yield from (f"table: {line}" for line in _tables())
    yield from (f"decision topic: {line}" for line in _decisions())
    yield from (f"query checkpoint: {line}" for line in _checkpoints())
    yield from (f"data directory: {line}" for line in _data_directory())
    yield from (f"mirror: {line}" for line in _mirror())
    yield from (f"_schemas: {line}" for line in _schemas())


def _journal() -> Iterator[str]:
    yield f"version {model.VERSION}, of checkpoints {checkpoint._VERSION}"
    read = model.Range("clicks", 1, 0, 9, 2)
    for path in (
        *(paths.LOAD, paths.LATEST, paths.IDLE, store._LOCK),
        *(f"{lease._LEASES}/EPOCH", f"{lease._LEASES}/EPOCH{lease._RENEWED}"),
        *(checkpoint.checkpoint_path(7), paths.plan(7), paths.manifest(7), paths.refused(7)),
        *(paths.candidate(7, "TOKEN"), paths.changes(7, ""), paths.task(7, 3), paths.seen(7, 3)),
        *(paths.attempt(7, "TOKEN"), paths.staged(7, "FILE")),
        paths.dead_letter(paths.letters(read, "TOKEN")),
        paths.letters_in("TOPIC"),
        paths.file(read, 0, 9, "date=2026-11-29", "TOKEN", "parquet"),
    ):
        yield f"file {path}"
    for kind in _JOURNAL:
        for field in fields(kind):
            has_default = field.default is not MISSING or field.default_factory is not MISSING
            may_be_missing = has_default and (field.name, field.type) != ("version", "int")
            yield f"{kind.__name__}.{field.name}: {field.type}{', may be missing' if may_be_missing else ''}"
    of_record = {"version", *(field.name for field in fields(letters.StoredLetter))} - {"time", "batch"}
    yield f"a dead letter of version {model.VERSION}: {', '.join(sorted(of_record))}"
    yield f"a dead letter of a corrupt batch is of version {tasks._LETTER_VERSION}"
    yield f"a lease's holder: {', '.join(json.loads(lease._Lease._content(cast(Any, None))))}"
    yield f"`klog load offsets` of version {places._VERSION} prints {', '.join(places.offsets_text('', None, {}))}"
    groups = f"{restore._RESTORE_GROUP}NAME, a note of {restore._RESTORE_GROUP}NAME{restore._LOADED}"
    progress = letter_topics.Progress(None, "")
    progress.advance(letter_topics.Choice("REASON", "TOPIC"), 9)
    group = f"{letter_topics.GROUP}TOPIC: metadata {progress.committed.metadata}"
    yield f"groups of a replay of dead letters: {group}"
    names = ", ".join(LETTER_HEADERS.values())
    yield f"headers of dead letters in topics: {names}"
    note = letter_topic._note([(0, 9)]).metadata
    yield f"groups of letters of queries and loads: {letter_topic.GROUP}QUERY: metadata {note}, {of_loads.GROUP}LOAD"
    yield f"groups of a restore: {groups}: {restore._note([(0, 9)])}, of a replay: {restore._REPLAY_GROUP}HASH"
    yield "what a task has seen: version, seen"
    yield f"causes of gaps: {', '.join((task.TRANSACTIONS, task.COMPACTION, task.CORRUPT, task.UNPARSED))}"
    yield f"metadata of columns: {rows._BRANCH.decode()}"
    nothing = summary.Summary(0)
    yield f"a checkpoint: sha256, state: version, load, first, run, manifest, {', '.join(checkpoint._state(nothing))}"
    part = model.PartitionAudit("TOPIC", 0, 0, 0, 0, 0, 0, None, None, {}, 0, 0)
    of_part = (*summary.nothing_of(part), "until", "lag", "incarnation", "topic_id")
    yield f"a partition of a checkpoint's totals: {', '.join(of_part)}"
    yield f"a finding of a checkpoint: {', '.join(field.name for field in fields(summary.Finding))}"
    yield f"a run of a checkpoint: {', '.join(checkpoint._RUN)}"
    yield f"a range of a checkpoint: {', '.join(checkpoint._RANGE)}"


def _tables() -> Iterator[str]:
    for name in (table.LOAD_PROPERTY, table.COLUMNS_PROPERTY, table.KEY_PROPERTY):
        yield f"property {name}"
    of_run = ", ".join(each.name for each in fields(table.Run))
    yield f"Delta: entry {table.COMMIT_ENTRY} of a commit, with version {table.RUN_VERSION}, {of_run}"
    names = (iceberg_runs._VERSION, iceberg_runs._RUN, iceberg_runs._TOKEN, iceberg_runs._OFFSETS)
    more = (iceberg_runs._TOPIC_IDS, iceberg_runs._INCARNATIONS, iceberg_runs.SNAPSHOT, iceberg_runs._STARTS)
    yield f"Iceberg: {', '.join((*names, *more))} of a snapshot or the table"
    yield f"in Parquet's footers: {columns.NAN_COLUMNS}, {table._ALIASES.decode()}"
    yield f"the load of a table of streams: {table.STREAMS}, of one of dead letters: LOAD{table.LETTERS}"
    since = deleted_keys._SINCE.name
    yield f"file {deleted_keys._FOLDER}/00000007-TOKEN{deleted_keys._END}, of version {deleted_keys._VERSION}"
    yield f"deleted keys: the key, {', '.join((*change_order.PLACE.names, change_order.ORDER, since))}"


def _decisions() -> Iterator[str]:
    yield f"topic {DECISION_TOPIC}, prefix {DEFAULT_ID_PREFIX}"
    yield f"key {entries.record_key('LOG', 3, 'UUID').decode()}"
    decision = Decision(5, (Transaction("ID", 1, 2, 3),), "HASH")
    for entry in (Claim(), decision, Ended()):
        yield f"value {entries.encode_entry(entries.Identity('PREFIX', 'UUID'), entry).decode()}"


def _checkpoints() -> Iterator[str]:
    yield f"version {query_checkpoint._VERSION}; without others Spark's own form of offsets, by topic and partition"
    more = (query_checkpoint.START_OF, query_checkpoint._QUERY, query_checkpoint._MICRO_BATCH, query_checkpoint._LEFT)
    yield f"keys that are no topics begin {json.dumps(more)}"
    yield f"metadata of columns: {', '.join((row_columns.ID, row_columns.SUBJECT, row_columns.VERSION))}"
    yield f"in what Spark reports: {', '.join((options.LOST, options.RECORD_BYTES, options.HELD_UP))}"
    yield f"transactional ids begin PREFIX + UUID + '-'; the name of a plan begins {PLAN!r}"


def _data_directory() -> Iterator[str]:
    files = partition_files
    for name in (
        *(layout.META, layout.CLUSTER_MARK, files.RECOVERY_POINT, files.LOG_START, files.CLEANER, CLEAN_STOP),
        *(PRODUCER_IDS, topic_changes._GROUP_SETTINGS, topic_journal.JOURNAL, OFFSET_MAP),
        *(f"OFFSET{suffix}" for suffix in (LOG, INDEX, TIME_INDEX, TRANSACTION_INDEX, producer_state.SNAPSHOT)),
        *(files.PARTITION_METADATA, files.LEADER_EPOCHS, files.OVERRIDES, files._DELETED),
    ):
        yield f"file {name}"
    yield f"a producer snapshot is of version {producer_state._VERSION}: {producer_state._ENTRY.format}"
    yield f"a cluster: {layout.BROKER_FOLDER.pattern}, registries {json.dumps(layout._REGISTRIES)}"
    yield f"{files.OVERRIDES} has version {files._OVERRIDES_VERSION} and config, a topic's settings by Kafka's names"
    kept = topic_journal.KeptTopic(UUID(int=0), [0], {"NAME": "VALUE"})
    line = topic_journal._encoded([("T", kept)]).decode().strip()
    yield f"{topic_journal.JOURNAL} has version {topic_journal._VERSION}: {line}"
    yield f"topics of the broker's own: {', '.join(sorted(INTERNAL_TOPICS))}"
    yield from _tree()
    yield f"groups' settings: {paths_of_trees.group_configs_payload({'GROUP': {'NAME': 'VALUE'}}).decode()}"
    yield f"producer ids: {paths_of_trees.producer_ids_payload(0, 0, 999).decode()}"
    yield from _versions("a committed offset", group_records.OFFSET_COMMIT_KEY, group_records.OFFSET_COMMIT_VALUE)
    yield from _versions("a classic group", group_records.GROUP_METADATA_KEY, group_records.GROUP_METADATA_VALUE)
    for key, value in consumer_records._VALUES.items():
        yield from _versions("a consumer group", key, value)
    yield from _versions("a transaction", TRANSACTION_LOG_KEY, TRANSACTION_LOG_VALUE)


def _tree() -> Iterator[str]:
    trees = paths_of_trees
    constants = (value for name, value in vars(trees).items() if name.endswith("_PATH") and isinstance(value, str))
    for path in sorted(
        {
            *constants,
            *trees.COMMON_PATHS,
            trees.topic_path("TOPIC"),
            trees.topic_broker_path("TOPIC", 1),
            trees.partition_state_path("TOPIC", 0),
            trees.consumer_offset_path("GROUP", "TOPIC", 0),
            consumers.consumer_id_path("GROUP", "CONSUMER"),
            consumers.owner_path("GROUP", "TOPIC", 0),
        }
    ):
        yield f"node {path}"
    yield f"files of a tree end with {tree.VALUE} or {tree.EPHEMERAL}"


def _versions(what: str, *kinds: Versioned) -> Iterator[str]:
    for kind in kinds:
        yield f"{what}: {kind.name} of versions {kind.versions.first} to {kind.versions.last}"


def _mirror() -> Iterator[str]:
    key = progress.encode_key(("clicks", 1))
    yield f"topic {progress.progress_topic('NAME')}, key of clicks-1 {key.hex()}"
    yield f"value of a run: {progress._VALUE.format}; of MirrorMaker 2: {progress._MM2_VALUE.format}"
    notes = {name: getattr(progress, name) for name in ("ORIGINAL", "COPY", "PREFIX", "OWNER", "RELEASE", "ORIGINS")}
    yield f"notes by kind: {', '.join(f'{name.lower()} {kind}' for name, kind in notes.items())}"
    yield f"owner: version {progress.VERSION}, {', '.join(each.name for each in fields(progress.Owner))}"


def _schemas() -> Iterator[str]:
    for kind in sorted(registry_records._KNOWN):
        key = registry_records.Key(kind, None if kind == registry_records.NOOP else "SUBJECT", 1)
        yield f"key {key.encode().decode()}"
    yield f"header {registry_records.RESTORED}; of records with a schema: {', '.join(HEADERS.values())}"
