"""Runs of a load in the history of an Iceberg table: what its commits say, and whether they are those of its rows.

A run is recorded twice: in the summary of its snapshot, and in properties of the table, which stay when snapshots
expire, and also when the table is rolled back.

    klog.load          the load to which the table belongs
    klog.version       of these properties, 1
    klog.run           the number of its last run in the table
    klog.token         of the attempt that committed it
    klog.offsets       JSON, {topic: {partition: offset}}: where the next run begins
    klog.topic-ids     JSON, {topic: id}
    klog.incarnations  JSON, {topic: how often it was created again}
    klog.snapshot      of the run: its id and its sequence number (property only)
    klog.starts        JSON, {topic: {partition: offset}}: where the last run that has rows began (property only)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from pyiceberg.serializers import FromInputFile
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from spark_klog.errors import LoadError
from spark_klog.tables.change_order import names_of_record
from spark_klog.tables.table import LOAD_PROPERTY, RUN_VERSION, STREAMS, Offsets, Run, check_run_version, json_property

_log = logging.getLogger(__name__)
_VERSION, _RUN, _TOKEN, _OFFSETS = "klog.version", "klog.run", "klog.token", "klog.offsets"
_TOPIC_IDS = "klog.topic-ids"
_INCARNATIONS = "klog.incarnations"
SNAPSHOT, _STARTS = "klog.snapshot", "klog.starts"
#: In the summary of a snapshot that a cherry-pick makes: the one that it repeats.
_PICKED = "source-snapshot-id"
#: Former versions of the metadata that are read, and partitions in which a row of a run is looked for.
_MOST_VERSIONS, _MOST_PARTITIONS = 200, 20
#: In errors about properties: what they must be, and how to mend them.
_OFFSETS_FORM = 'a JSON object as {"topic": {"0": 5}}'
_AS_LAST = "set it as the summary of the load's last snapshot has it"


def run_texts(run: Run) -> dict[str, str]:
    """The run as properties or a summary have it."""
    return {
        LOAD_PROPERTY: run.load,
        _VERSION: str(RUN_VERSION),
        _RUN: str(run.number),
        _TOKEN: run.token,
        _OFFSETS: json.dumps(run.offsets),
        _TOPIC_IDS: json.dumps(run.topic_ids),
        _INCARNATIONS: json.dumps(run.incarnations),
    }


def run_properties(run: Run, snapshot_id: int, sequence: int, starts: Offsets | None) -> dict[str, str]:
    """The properties of a table with a run as its last one. `starts` is where its rows begin, if it has added some."""
    texts = {**run_texts(run), SNAPSHOT: json.dumps([snapshot_id, sequence])}
    return texts if starts is None else {**texts, _STARTS: json.dumps(starts)}


def is_run_of(snapshot: Snapshot, load: str) -> bool:
    """Whether a snapshot tells of a run of the load: its own, or one before a compaction."""
    texts = snapshot.summary
    return texts is not None and texts.get(LOAD_PROPERTY) == load and bool(texts.get(_RUN))


def last_run(address: str, table: Table, load: str) -> Run | None:
    """The last run of a load whose rows the table has, by the history of its current snapshot; None before the first.

    `LoadError` if the table was rolled back to before its last run, or if its history is lost and nothing else tells.
    """
    properties: dict[str, str] = table.metadata.properties
    if properties.get(LOAD_PROPERTY, load) != load:
        return None
    recorded = _run_of({**properties, LOAD_PROPERTY: load}, load, address)
    form = "[id, sequence number] of the snapshot of the load's last run: set it to that"
    snapshot_id, sequence = json_property(address, properties, SNAPSHOT, _is_pair, form, [0, 0])
    # in format version 1 the numbers of snapshots are 0: after an upgrade 1 is not the first one
    history = _History(address, table, 0 if SNAPSHOT not in properties else _MOST_VERSIONS, is_numbered=sequence > 0)
    if recorded is None:
        for snapshot in history.ancestors():
            if (run := _run_of(snapshot.summary, load, address)) is not None:
                return run
        if SNAPSHOT in properties and history.is_cut:
            raise LoadError(
                f"{address}: the snapshots that tell which runs of load {load} it has are expired, and the "
                f"property {_RUN} is unset: set it again, or load into another table"
            )
        return None
    earlier, is_older = None, False
    picked: set[int] = set()
    for snapshot in history.ancestors():
        run = _run_of(snapshot.summary, load, address)
        if run is not None and run.number >= recorded.number:
            return run
        if snapshot_id in (snapshot.snapshot_id, snapshot.parent_snapshot_id):
            return recorded
        if (source := history.source(snapshot)) is not None:
            again = recorded if source == snapshot_id else history.run_of(source, load)
            picked.update(() if again is None else (again.number,))
        if run is not None:
            earlier = run
            break
        is_older = is_older or (snapshot.sequence_number or sequence) < sequence
    if (earlier is not None or not history.is_cut) and picked.issuperset(
        range(earlier.number + 1 if earlier else 1, recorded.number + 1)
    ):
        return recorded  # what has come after the run before was picked anew
    if earlier is not None or not history.is_cut or (is_older and not picked):
        raise LoadError(_rolled_back(address, table, recorded, snapshot_id, earlier, is_known=not history.is_cut))
    starts = json_property(address, properties, _STARTS, _is_offsets, f"{_OFFSETS_FORM}: remove it", None)
    if not picked and _has_rows(table, recorded, starts):
        return recorded
    head = table.current_snapshot()
    assert head is not None
    raise LoadError(
        f"{address} may lack run {recorded.number} of load {load} (snapshot {snapshot_id}): what others have written "
        "since has no history any more, as snapshots are expired and former versions of the metadata removed, and no "
        f"row of the run tells. If nobody has rolled it back, set its property {SNAPSHOT} to "
        f"[{head.snapshot_id}, {head.sequence_number}]; else load into another table"
    )


def _rolled_back(
    address: str, table: Table, recorded: Run, snapshot_id: int, earlier: Run | None, *, is_known: bool
) -> str:
    head, theirs = table.current_snapshot(), table.snapshot_by_id(snapshot_id)
    have = "has none of its runs" if earlier is None else f"has its runs up to {earlier.number}"
    text = (
        f"{address} was rolled back: run {recorded.number} of load {recorded.load} (snapshot {snapshot_id}) is not in "
        f"the history of its current snapshot ({head and head.snapshot_id}), which {have}. "
    )
    if theirs is None:
        text += "The run's snapshot is expired, and its rows are gone"
    else:
        text += f"To have its rows again, set the current snapshot to {snapshot_id}"
        if head is not None and (head.sequence_number or 0) > (theirs.sequence_number or 0):
            text += ", which takes away what others have written since"
    if earlier is None and not is_known:
        return f"{text}; or load into another table"
    return f"{text}; to load on from the runs that are left, unset the table's property {_RUN}"


def _run_of(texts: Mapping[str, Any] | None, load: str, address: str) -> Run | None:
    """The run in properties or a summary; None if there is none of the load. `LoadError` for another version."""
    if not texts or texts.get(LOAD_PROPERTY) != load or not texts.get(_RUN):
        return None
    version = texts.get(_VERSION)
    check_run_version(int(version) if version and version.isdecimal() else version, f"{address}: run {texts[_RUN]}")
    number = json_property(address, texts, _RUN, _is_number, f"the number of the load's last run: {_AS_LAST}", 0)
    form = f"{_OFFSETS_FORM}: {_AS_LAST}"
    offsets = json_property(address, texts, _OFFSETS, _is_offsets, form, {})
    form = f"a JSON object of topics: {_AS_LAST}"
    ids, again = (json_property(address, texts, name, _is_object, form, {}) for name in (_TOPIC_IDS, _INCARNATIONS))
    return Run(load, number, texts.get(_TOKEN) or "", offsets, ids, again)


def _is_number(value: Any) -> bool:
    return isinstance(value, int)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(number, int) for number in value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_offsets(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(each, dict) and all(isinstance(offset, int) for offset in each.values()) for each in value.values()
    )


class _History:
    """The snapshots of a table, and those that have expired, as far as former versions of its metadata tell.

    Java's libraries leave a snapshot the id of a parent that has expired, pyiceberg sets it to None. At most
    `versions` are read, those first that were written about the time of the snapshot whose parent is unknown. If it
    `is_numbered`, the snapshot with the sequence number 1 has no parent.
    """

    def __init__(self, address: str, table: Table, versions: int, *, is_numbered: bool) -> None:
        self._address, self._table, self._is_numbered = address, table, is_numbered
        self._known = {snapshot.snapshot_id: snapshot for snapshot in table.metadata.snapshots}
        self._log = list(table.metadata.metadata_log)[-versions:] if versions else []
        #: By place in the log: the parents in this version, None if it can't be read. The current one is the last.
        self._parents: dict[int, dict[int, int | None] | None] = {len(self._log): _parents(table.metadata.snapshots)}
        #: Whether `ancestors` has ended before the table's first snapshot.
        self.is_cut = False

    def ancestors(self) -> Iterator[Snapshot]:
        """The current snapshot and those before it."""
        snapshot = self._table.metadata.current_snapshot()
        while snapshot is not None:
            yield self._known[snapshot.snapshot_id]
            snapshot = self._parent(snapshot.snapshot_id)

    def source(self, snapshot: Snapshot) -> int | None:
        """The snapshot that a cherry-pick has repeated as this one."""
        text = None if snapshot.summary is None else snapshot.summary.get(_PICKED)
        return int(text) if text and text.isdecimal() else None

    def run_of(self, snapshot_id: int, load: str) -> Run | None:
        """The run of a snapshot, if both are known."""
        snapshot = self._known.get(snapshot_id)
        return None if snapshot is None else _run_of(snapshot.summary, load, self._address)

    def _parent(self, snapshot_id: int) -> Snapshot | None:
        while True:
            snapshot = self._known[snapshot_id]
            if snapshot.parent_snapshot_id in self._known:
                return self._known[snapshot.parent_snapshot_id]
            if snapshot.parent_snapshot_id is None and self._is_first(snapshot):
                return None
            if not self._read_version(snapshot.timestamp_ms):
                self.is_cut = True
                return None

    def _is_first(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot was made without a parent: the table's first, or one that replaces the table."""
        if snapshot.sequence_number == 1 and self._is_numbered:
            return True
        for place, parents in self._parents.items():
            before = self._parents.get(place - 1)
            if parents is not None and before is not None and snapshot.snapshot_id in parents.keys() - before.keys():
                return parents[snapshot.snapshot_id] is None
        return False

    def _read_version(self, about_ms: int) -> bool:
        """Read one more version of the metadata; False if there is none."""
        places = [place for place in range(len(self._log)) if place not in self._parents]
        if not places:
            return False
        place = min(places, key=lambda entry: (abs(self._log[entry].timestamp_ms - about_ms), -entry))
        path = self._log[place].metadata_file
        try:
            metadata = FromInputFile.table_metadata(self._table.io.new_input(path))
        except Exception as error:  # of any store's package; it may have been removed
            _log.debug("%s can't be read: %s", path, error)
            self._parents[place] = None
            return True
        self._parents[place] = _parents(metadata.snapshots)
        for snapshot in metadata.snapshots:
            if snapshot.snapshot_id not in self._known or self._known[snapshot.snapshot_id].parent_snapshot_id is None:
                self._known[snapshot.snapshot_id] = snapshot
        return True


def _parents(snapshots: list[Snapshot]) -> dict[int, int | None]:
    return {snapshot.snapshot_id: snapshot.parent_snapshot_id for snapshot in snapshots}


def _has_rows(table: Table, run: Run, starts: Offsets | None) -> bool:
    """Whether the table has a row of the last run that has added some: then it has all that it has not lost since.

    False of the runs of streams, whose commits do not have the offsets at which rows begin.
    """
    names = {field.name for field in table.schema().fields}
    topic, partition, offset, _ = names_of_record(names)
    if run.load == STREAMS or starts is None or not {partition, offset} <= names:
        return False
    ranges = []
    for name, each in run.offsets.items():
        if name not in run.incarnations:  # rows of the topic before it have the same offsets
            for key, end in each.items():
                ranges.append((end - starts.get(name, {}).get(key, 0), name, int(key), end))
    wanted = []
    for count, name, number, end in sorted(ranges, reverse=True)[:_MOST_PARTITIONS]:
        if count > 0:
            place = f"{partition} = {number} AND {offset} >= {end - count} AND {offset} < {end}"
            wanted.append(f"({topic} = '{name}' AND {place})" if topic in names else f"({place})")
    if not wanted:
        return False
    try:
        return len(table.scan(" OR ".join(wanted), selected_fields=(offset,), limit=1).to_arrow()) > 0
    except ValueError:  # pyiceberg reads no rows that are deleted by values
        return False
