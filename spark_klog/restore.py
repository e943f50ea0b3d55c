"""Restore topics from a load, and replay its dead letters: send the records of values that did not parse again.

Each partition is written in transactions of a producer of its own, in the order of offsets. A transaction has some
thousand records, and the offset after them (in the log that was loaded) as the offset of the group
`klog-restore.NAME`: both are there or neither. A restore that was killed goes on after the last of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spark_klog.base.extras import require

require("A restore", "pyarrow")

import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.base.addresses import filesystem_at, local_path
from spark_klog.base.durable import check_version
from spark_klog.base.names import TopicPartition
from spark_klog.client import Admin, Producer
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import Committed, GroupOffsets, first_and_end
from spark_klog.client.settings import of_bytes
from spark_klog.columns.decode import MAX_MILLISECONDS
from spark_klog.columns.schema import subset
from spark_klog.errors import ConfigError, KlogError, LoadError
from spark_klog.load.journal import paths
from spark_klog.load.journal.checkpoint import read_summary
from spark_klog.load.journal.history import open_load
from spark_klog.load.journal.letters import StoredLetter, unsent
from spark_klog.load.journal.listing import CommittedFile, files
from spark_klog.load.journal.store import Store
from spark_klog.load.settings import JSON_LINES
from spark_klog.load.tasks.writers import MOST_OPEN
from spark_klog.security.config import Settings

_log = logging.getLogger(__name__)
#: Extents of a partition that are noted: brokers take 4,096 bytes of metadata.
_MOST_EXTENTS = 80
_NOTE_VERSION = 1
#: The groups that have the progress, and what is added to the name of one for its notes.
_RESTORE_GROUP, _REPLAY_GROUP, _LOADED = "klog-restore.", "klog-replay-", "+loaded"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
#: Settings of consumers and transactions in shared files of settings: a restore and a replay have their own.
_OWN = ("group.id", "group.instance.id", "transactional.id", "enable.auto.commit", "auto.offset.reset")
_SCHEMA = subset(("key", "value", "partition", "offset", "timestamp", "headers"))
_COLUMNS = _SCHEMA.names
#: A table ends at either.
_ROWS, _BYTES = 65_536, 16 * 1024 * 1024
#: About the bytes that are read of each file at once; files of one group are open at the same time.
_BATCH_BYTES, _BUFFER_BYTES = 1024 * 1024, 64 * 1024
#: Of the records of dead letters; their timestamps are in ms.
_LETTER_SCHEMA = pa.schema([*subset(("key", "value", "partition", "headers")), pa.field("timestamp", pa.int64())])


@dataclass(frozen=True)
class RestoreOptions:
    """What to restore and where to: the load in `output`, by client settings of the target.

    `topics` are those of the load to restore, all of them by default; `prefix` is put before their names at the
    target. `name` tells restores apart, each of which writes each record once; by default it is the load's. `append`
    restores to partitions that have records.
    """

    output: str
    client: Mapping[str, str] = field(repr=False)
    topics: Sequence[str] = ()
    prefix: str = ""
    name: str | None = None
    append: bool = False


class Part(NamedTuple):
    """A partition of the target, and the files of its records in the order of offsets.

    Files in one group cover the same offsets: they differ in the time of their records. `extents` are the offsets
    [start, until) that the load has.
    """

    topic: str
    partition: int
    group: str
    incarnation: int
    files: tuple[tuple[CommittedFile, ...], ...]
    extents: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        return self.files[-1][0].last + 1


def plan_restore(options: RestoreOptions) -> list[Part]:
    """The partitions to restore; makes missing topics. `ConfigError`, `LoadError`, errors as of `Admin`."""
    store, identity = open_load(options.output)
    if identity.table:
        raise LoadError(f"{store.address} is a table, whose files others may compact: read it, and produce its rows")
    if identity.schema or identity.rows:
        raise LoadError(f"{store.address} has parsed values: they can't be restored as they were")
    if identity.format == JSON_LINES:
        raise LoadError(f"{store.address} has JSON lines, which can't be restored: load as Parquet or Arrow")
    name = identity.load if options.name is None else options.name
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r} must be up to 100 letters, digits, '.', '_' and '-'")
    committed = files(options.output)
    unknown = sorted(set(options.topics) - {file.topic for file in committed})
    if unknown:
        raise ConfigError(f"{store.address} has no files of topic {', '.join(unknown)}")
    wanted = [file for file in committed if not options.topics or file.topic in options.topics]
    parts = _parts(wanted, read_summary(store).extents, options.prefix, f"{_RESTORE_GROUP}{name}")
    with Admin(options.client) as admin:
        _make_topics(admin, parts)
        _check_targets(admin, parts, options.append)
        _check_order(admin, parts)
    return parts


def _parts(
    wanted: Sequence[CommittedFile],
    extents: Mapping[tuple[str, int, int], Sequence[tuple[int, int]]],
    prefix: str,
    group: str,
) -> list[Part]:
    """Files of a partition are sorted by `files`; those of a topic that was created again come after the old ones."""
    groups: dict[tuple[str, int, int], dict[tuple[int, int], list[CommittedFile]]] = {}
    for file in wanted:
        place = paths.place_of(file.path.removesuffix(paths.STAGED))
        incarnation = place[2] if place else 0
        each = groups.setdefault((file.topic, file.partition, incarnation), {})
        each.setdefault((file.first, file.last), []).append(file)
    return [
        Part(
            prefix + topic,
            partition,
            f"{group}.{incarnation}" if incarnation else group,
            incarnation,
            tuple(tuple(each[bounds]) for bounds in sorted(each)),
            tuple(extents.get((topic, partition, incarnation), ())),
        )
        for (topic, partition, incarnation), each in sorted(groups.items())
    ]


def _make_topics(admin: Admin, parts: Sequence[Part]) -> None:
    counts: dict[str, int] = {}
    for part in parts:
        counts[part.topic] = max(counts.get(part.topic, 0), part.partition + 1)
    there = {topic.name for topic in admin.list_topics()}
    for topic, count in counts.items():
        if topic not in there:
            admin.create_topic(topic, count)
            continue
        partitions = len(admin.describe_topic(topic).partitions)
        if partitions < count:
            raise ConfigError(
                f"topic {topic} has {partitions} partitions, the load {count}: add partitions, or --prefix"
            )


def _check_targets(admin: Admin, parts: Sequence[Part], append: bool) -> None:
    """`ConfigError` for a partition that has records of others; note that the rest are this restore's."""
    first_parts = {(part.topic, part.partition): part for part in reversed(parts)}
    for group, of_group in _by_group(parts).items():
        offsets = GroupOffsets(admin.cluster, group, is_stable=True)
        new = of_group.keys() - offsets.fetch(of_group).keys()
        first = {key for key in new if first_parts[key].group == group}
        low, high = first_and_end(admin.cluster, first)
        full = sorted(key for key in first if low[key] < high[key])
        if full and not append:
            names = ", ".join(f"{topic}-{partition}" for topic, partition in full[:5])
            raise ConfigError(
                f"{names} of the target have records that this restore has not written: restore to other names "
                "(--prefix), or --append"
            )
        if new:
            offsets.commit(dict.fromkeys(new, 0))


def _check_order(admin: Admin, parts: Sequence[Part]) -> None:
    """`ConfigError` if the load has got offsets before those that are restored; note what it has now.

    The note is the metadata of an offset of the group `GROUP+loaded`: no --name has a "+" in it.
    """
    for group, of_group in _by_group(parts).items():
        done = GroupOffsets(admin.cluster, group, is_stable=True).fetch(of_group)
        notes = GroupOffsets(admin.cluster, group + _LOADED)
        noted = notes.committed(of_group)
        for key, part in of_group.items():
            end = done.get(key, 0)
            where = f"the note of group {group}{_LOADED} on {key[0]}-{key[1]}"
            known = _noted_extents(noted[key].metadata, where) if key in noted else None
            if known is not None and (new := _between(part.extents, known, end)):
                names = ", ".join(f"[{first}, {after})" for first, after in new[:5])
                raise ConfigError(
                    f"{key[0]}-{key[1]}: the load has got the offsets {names} since this restore left them out, "
                    f"and it is at {end}: their records can't be put before others. Restore all to other names, by "
                    "another --prefix and --name"
                )
        current = {
            key: Committed(part.end, metadata=_note(part.extents[-_MOST_EXTENTS:])) for key, part in of_group.items()
        }
        if current != {key: batch._replace(leader_epoch=-1) for key, batch in noted.items()}:
            notes.commit(current)


def _note(extents: Sequence[tuple[int, int]]) -> str:
    return json.dumps({"version": _NOTE_VERSION, "extents": extents})


def _noted_extents(text: str, where: str) -> list[tuple[int, int]] | None:
    """The extents of a note; None if it is not one of ours. `LoadError` for another version."""
    try:
        note = json.loads(text)
        version, extents = note["version"], note["extents"]
    except (TypeError, ValueError, KeyError):
        return None
    check_version(version, _NOTE_VERSION, where, "restore all to other names (--prefix and --name)", LoadError)
    return [(int(start), int(until)) for start, until in extents]


def _between(extents: Sequence[tuple[int, int]], known: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """The offsets before `end` that are in extents, but not in those that were noted.

    A note of the most extents has the last ones only, so that nothing is known of offsets before them.
    """
    at = known[0][0] if len(known) >= _MOST_EXTENTS else 0
    missing = []
    for start, until in [*known, (end, end)]:
        missing.append((at, min(start, end)))
        at = max(at, until)
    gaps = [(max(first, start), min(after, until)) for first, after in missing for start, until in extents]
    return [(first, after) for first, after in gaps if first < after]


def restored_offsets(client: Mapping[str, str], parts: Sequence[Part]) -> int:
    count = 0
    for group, of_group in _by_group(parts).items():
        progress = _offsets_of(client, group, of_group)
        count += sum(min(progress.get(key, 0), part.end) for key, part in of_group.items())
    return count


def _by_group(parts: Sequence[Part]) -> dict[str, dict[TopicPartition, Part]]:
    """The parts by the group that has their progress, and by topic and partition."""
    groups: dict[str, dict[TopicPartition, Part]] = {}
    for part in parts:
        groups.setdefault(part.group, {})[part.topic, part.partition] = part
    return groups


def read_part(output: str, part: Part, start: int) -> Iterator[tuple[pa.Table, int]]:
    """Tables of the records from offset `start` on, each with the offset after it; `LoadError` for a damaged file."""
    for group in part.files:
        if group[0].last < start:
            continue
        try:
            if len(group) > MOST_OPEN:  # they have the records of one Arrow batch
                read = [batch for file in group for batch in _batches(output, file, start)]
                files = [iter(pa.Table.from_batches(read, _SCHEMA).sort_by("offset").to_batches(_ROWS))]
            else:
                files = [_batches(output, file, start) for file in group]
            for table in _merged(files):
                yield table, table["offset"][-1].as_py() + 1
        except (OSError, pa.ArrowException) as error:
            reason = str(error).partition("\n")[0]
            raise LoadError(
                f"{group[0].path} can't be read ({reason}): `klog load status` shows what is missing"
            ) from None


def _batches(output: str, part: CommittedFile, start: int) -> Iterator[pa.RecordBatch]:
    """The records of a file from offset `start` on, in batches that are not empty."""
    if local_path(output) is not None:
        opened = pa.OSFile(part.path)
    else:
        filesystem, _ = filesystem_at(output)
        opened = filesystem.open_input_file(part.path.partition("://")[2])
    with opened as file:
        for batch in (_of_arrow if ".arrow" in part.path else _of_parquet)(file, start):
            if batch["offset"][0].as_py() < start:
                batch = batch.filter(pc.greater_equal(batch["offset"], start))
            if len(batch):
                yield batch


def _of_arrow(file: Any, start: int) -> Iterator[pa.RecordBatch]:
    schema = pa.ipc.open_file(file).schema
    included = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name) for name in _COLUMNS])
    reader = pa.ipc.open_file(file, options=included)
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number).select(_COLUMNS)
        if len(batch) and batch["offset"][-1].as_py() >= start:
            for at in range(0, len(batch), _ROWS):
                yield batch.slice(at, _ROWS)


def _of_parquet(file: Any, start: int) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    reader = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    index = reader.schema_arrow.get_field_index("offset")
    for number in range(reader.num_row_groups):
        group = reader.metadata.row_group(number)
        known = group.column(index).statistics if index >= 0 else None
        if known is not None and known.has_min_max and known.max < start:
            continue
        if group.sorting_columns:  # by key: one of them is in memory
            table = reader.read_row_group(number, _COLUMNS, use_threads=False).sort_by("offset")
            yield from (batch.select(_COLUMNS) for batch in table.to_batches(_ROWS))
            continue
        rows = _BATCH_BYTES * max(1, group.num_rows) // max(1, group.total_byte_size)
        for batch in reader.iter_batches(max(1, min(_ROWS, rows)), [number], _COLUMNS, use_threads=False):
            if len(batch):
                yield batch.select(_COLUMNS)


def _merged(files: Sequence[Iterator[pa.RecordBatch]]) -> Iterator[pa.Table]:
    """The batches of files, each in the order of offsets, as tables in that order."""
    heads: list[tuple[pa.RecordBatch, Iterator[pa.RecordBatch]]] = []
    for file in files:
        if (head := next(file, None)) is not None:
            heads.append((head, file))
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    while heads:
        # Of each file the head has the next records: up to the first end of one of them nothing is missing.
        last = min(head["offset"][-1].as_py() for head, _ in heads)
        left = []
        for head, file in heads:
            count = int(pc.sum(pc.less_equal(head["offset"], last)).as_py())
            if count:
                waiting.append(head.slice(0, count))
                rows += count
                size += waiting[-1].nbytes
            rest = head.slice(count) if count < len(head) else next(file, None)
            if rest is not None:
                left.append((rest, file))
        heads = left
        if rows >= _ROWS or size >= _BYTES or not heads:
            table = pa.Table.from_batches(waiting)
            yield table if len(files) == 1 else table.sort_by("offset")
            waiting, rows, size = [], 0, 0


@dataclass(frozen=True)
class Restored:
    """The outcome of a partition. `error` says why it is incomplete, else it is ""."""

    topic: str
    partition: int
    records: int
    error: str = ""


def restore_partition(client: Mapping[str, str], output: str, parts: Sequence[Part]) -> Restored:
    """Restore the parts of one partition, from where the last restore of them stopped.

    A process that is still restoring them is fenced. Errors of the target and of files are in the result.
    """
    first, records = parts[0], 0
    try:
        with _transactions_of(client, f"{first.group}-{first.topic}-{first.partition}") as producer:
            for part in parts:
                key = part.topic, part.partition
                start = after = _offsets_of(client, part.group, [key]).get(key, 0)
                for table, after in read_part(output, part, start):
                    _write_with_progress(producer, table, key, after, part.group, is_any_time=True)
                    records += len(table)
                if after < part.end:  # offsets without a record
                    _write_with_progress(producer, None, key, part.end, part.group, is_any_time=True)
    except KlogError as error:
        return Restored(first.topic, first.partition, records, f"{type(error).__name__}: {error}")
    _log.info("restored %d records of %s-%d", records, first.topic, first.partition)
    return Restored(first.topic, first.partition, records)


def _transactions_of(client: Mapping[str, str], transactional_id: str) -> Producer:
    """A producer that may begin a transaction; an older one with the same id is fenced, and its transaction ended."""
    producer = Producer(Settings(_shared(client) | {"transactional.id": transactional_id}))
    try:
        producer.init_transactions()
    except BaseException:
        producer.close()
        raise
    return producer


def _shared(client: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in of_bytes(client).items() if name not in _OWN}


def _write_with_progress(
    producer: Producer, table: pa.Table | None, key: TopicPartition, progress: int, group: str, *, is_any_time: bool
) -> None:
    """Write records, to the topic of `key`, and an offset of the group in one transaction."""
    producer.begin_transaction()
    if table is not None:
        # records as they were: `send_arrow` would give those without headers the context of a trace
        producer.send_rows(producer.record_rows(table, key[0], is_any_time=is_any_time))
    producer.send_offsets_to_transaction({key: progress}, group)
    producer.commit_transaction()


def _offsets_of(client: Mapping[str, str], group: str, keys: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """The offsets that transactions have committed of a group, by topic and partition."""
    with Cluster.connect(_shared(client)) as cluster:
        return GroupOffsets(cluster, group, is_stable=True).fetch(keys)


@dataclass(frozen=True)
class Replayed:
    """How many records were sent, and how many corrupt batches could not be: their bytes are no records."""

    records: int
    batches: int


def replay(output: str, client: Mapping[str, str], topic: str, source: str | None = None) -> Replayed:
    """Send the dead letters of a load, of the topic `source` or of all, to a topic in transactions.

    Each is sent once: a call that was interrupted is continued by the next one of the same topics, as each transaction
    has the progress, the offset of a group. A call after a complete one sends all of them again. Partitions stay if the
    topic has them; else the key decides. Timestamps that no column holds or no producer sends become the current time.
    `LoadError` for a damaged letter, errors as of `Producer`.
    """
    store, identity = open_load(output)
    letters = read_summary(store).letters
    of_values = {
        name: place
        for name, place in letters.items()
        if paths.is_of_values(name) and source in (None, name.split("+")[1])
    }
    records = 0
    if of_values:
        name = hashlib.sha256(json.dumps([identity.load, topic, source]).encode()).hexdigest()[:32]
        records = _send_letters(store, of_values, client, topic, f"{_REPLAY_GROUP}{name}")
    batches = [name for name in store.names(paths.LETTERS) if not paths.is_of_values(name)]
    if source is not None:  # TOPIC-PARTITION-OFFSET-CRC.json: another topic's name may begin with this one's and a "-"
        of_source = re.compile(rf"{re.escape(source)}-\d+--?\d+-[0-9a-f]{{8}}\.json")
        batches = [name for name in batches if of_source.fullmatch(name)]
    return Replayed(records, len(batches))


def _send_letters(
    store: Store, files: Mapping[str, tuple[int, int]], client: Mapping[str, str], topic: str, group: str
) -> int:
    """Send the letters of files, by run and place in it, from where the last call stopped; return how many.

    `group` has the progress, and is the transactional id.
    """
    records, key = 0, (topic, 0)
    with _transactions_of(client, group) as producer:
        start = _offsets_of(client, group, [key]).get(key, 0)
        count = producer.partitions(topic)
        for progress, letters in unsent(store, files, start):
            table = pa.Table.from_pylist([_row(letter, count) for letter in letters], _LETTER_SCHEMA)
            _write_with_progress(producer, table, key, progress, group, is_any_time=False)
            records += len(letters)
        _write_with_progress(producer, None, key, 0, group, is_any_time=False)
    return records


def _row(letter: StoredLetter, partitions: int) -> dict[str, Any]:
    time = letter.timestamp
    return {
        "key": letter.key,
        "value": letter.value,
        "partition": letter.partition if letter.partition < partitions else None,
        "timestamp": time if time is not None and -1 <= time <= MAX_MILLISECONDS else None,
        "headers": [{"key": key, "value": value} for key, value in letter.headers] or None,
    }
