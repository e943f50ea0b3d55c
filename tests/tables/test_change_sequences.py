"""A database's changes in any order of runs and partitions: after each run the table is that of a model.

The model folds what has been read in the order of the database's log. Events are Debezium's: writes, also such that
lack large values, updates of the key, deletions, tombstones whose deletion is compacted away, and truncations. A later
schema of the rows has one more column, and one of another type.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings, strategies as st
from pyiceberg.catalog import load_catalog
from pyiceberg.expressions import EqualTo
from pyiceberg.transforms import BucketTransform, IdentityTransform, MonthTransform, TruncateTransform

from spark_klog.errors import LoadError
from spark_klog.files.folder import LocalFolder
from spark_klog.tables.changes import UNAVAILABLE, ChangeFormat, debezium_type
from spark_klog.tables.deleted_keys import forget, remember, with_memory
from spark_klog.tables.table import Table
from tests.tables.change_support import written
from tests.tables.test_upserts import FORMATS, catalog_options, content, make_table, run

_ROW = pa.struct(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("note", pa.string()),
        ("tags", pa.list_(pa.string())),
        ("city", pa.string()),
        ("day", pa.date32()),
        ("size", pa.int32()),
        ("at", pa.timestamp("us")),
        ("price", pa.decimal128(9, 2)),
    ]
)
#: What a later schema of the rows has: another column, and in Iceberg a wider one, too (deltalake can't widen any).
_MORE, _WIDER = pa.field("more", pa.string()), pa.field("size", pa.int64())
#: How tables are partitioned: not at all, by others, by the load itself; of Iceberg by transforms.
_LAYOUTS = {
    "delta": ["none", "others", "city, day", "at, city", "name"],
    "iceberg": [
        *("none", "others", "city, price", "bucket(3, id)", "truncate(2, name), month(day)"),
        *("hour(at), bucket(2, city)", "year(_klog_timestamp), truncate(5, price)"),
    ],
}
_CITIES = None, "x", "y", "", "Ü/a=b %2F'"
#: Fields by which others partition the table, one after the other.
_FIELDS: list[tuple[str, Any]] = [
    ("city", IdentityTransform()),
    ("id", BucketTransform(3)),
    ("name", TruncateTransform(2)),
    ("day", MonthTransform()),
]
_KEY = pa.struct([("id", pa.int64())])
_LARGE = ("note", "tags")
#: What stands for a value that nobody has.
_LOST = "lost"


class Event(NamedTuple):
    """An event of the database's log, at `lsn`. `id` None is a truncation, `row` None a deletion."""

    lsn: int
    id: int | None
    row: dict[str, Any] | None
    partition: int
    lacks: tuple[str, ...] = ()
    old_id: int | None = None
    is_tombstone: bool = False


class Place(NamedTuple):
    """A record of a partition."""

    event: Event
    time: int


def _value(event: Event) -> dict[str, Any] | None:
    if event.is_tombstone:
        return None
    source = {"lsn": event.lsn}
    if event.id is None:
        return {"op": "t", "before": None, "after": None, "source": source}
    if event.row is None:
        return {"op": "d", "before": {"id": event.id}, "after": None, "source": source}
    marks = {"note": UNAVAILABLE, "tags": [UNAVAILABLE]}
    row = event.row | {name: marks[name] for name in event.lacks}
    before = None if event.old_id is None else {"id": event.old_id}
    return {"op": "u", "before": before, "after": row, "source": source}


class Database:
    """Its log, dealt out to the partitions of a topic, and the rows of what a load has read of it."""

    def __init__(self, kind: str, folder: Path, *, has_order: bool, keeps_deletes: bool, layout: str) -> None:
        self.keeps_deletes, self.store = keeps_deletes, LocalFolder(folder, LoadError)
        #: Deletions that are remembered, by the key, and the last truncation.
        self.gone: dict[int, int] = {}
        self.emptied = 0
        self.kind, self.folder, self.has_order = kind, folder, has_order
        self.table: Table = make_table(kind, folder)
        self.fields = list(_FIELDS)
        self.columns = list(_ROW)
        self.has_more = False
        self.layout = "none" if layout == "others" else layout
        if kind == "delta" and layout == "others":
            DeltaTable.create(folder / "table", self.format.row, partition_by=["city", "day"])
        self.read = [0, 0, 0]
        self.logs: list[list[Place]] = [[], [], []]
        self.rows: dict[int, tuple[int, dict[str, Any]]] = {}
        self.runs = 0
        self.letters: set[int] = set()

    @property
    def format(self) -> ChangeFormat:
        order = {"source.lsn": pa.int64()}
        # as Avro has it, without JSON's wrapper
        value = pa.struct(list(debezium_type(pa.struct(self.columns), order))[:-1])
        return ChangeFormat(_KEY, value, (), "debezium", tuple(order) if self.has_order else ())

    def with_tombstones(self, ends: list[int]) -> list[int]:
        """The ends, behind tombstones, too: nobody would know the order of one without its deletion."""
        return [
            at + (at < len(log) and log[at].event.is_tombstone and self.has_order)
            for at, log in zip(ends, self.logs, strict=True)
        ]

    def evolve(self) -> None:
        """Rows have another schema from the next run on."""
        if not self.has_more:
            wider = {"size": _WIDER} if self.kind == "iceberg" else {}
            self.columns = [*(wider.get(field.name, field) for field in self.columns), _MORE]
            self.has_more = True

    def records(self, partition: int, start: int, end: int) -> pa.RecordBatch:
        places = self.logs[partition][start:end]
        columns = {
            "key": pa.array([None if at.event.id is None else {"id": at.event.id} for at in places], _KEY),
            "value": pa.array([_value(at.event) for at in places], self.format.value_type),
            "topic": pa.array(["rows"] * len(places)),
            "partition": pa.array([partition] * len(places), pa.int32()),
            "offset": pa.array(range(start, end), pa.int64()),
            "timestamp": pa.array([at.time * 1_000_000 for at in places], pa.timestamp("us", tz="UTC")),
        }
        return pa.RecordBatch.from_pydict(columns)

    def run(self, ends: list[int], slice_bytes: int, *, answer_is_lost: bool = False) -> None:
        """Merge the records up to `ends`, and do so again if the first answer is lost."""
        spans = [
            (number, start, max(start, end)) for number, (start, end) in enumerate(zip(self.read, ends, strict=True))
        ]
        batches = []
        for number, start, end in spans:
            half = (start + end) // 2
            batches += [self.format.changes(self.records(number, *each)) for each in ((start, half), (half, end))]
        self.table.prepare(self.format.row, self.layout, "", "load", key=self.format.key)
        files = written(self.folder / f"changes-{self.runs}", batches, slice_bytes, self.format.key)
        schema, last = self.table.schema(), self.table.last_run("load")
        assert schema is not None
        if self.keeps_deletes:
            files = with_memory(files, self.store, last)
        lost = list(files.without_row(schema, self.table.rows))
        places = {(each["_klog_partition"], each["_klog_offset"]) for each in lost}
        files = replace(files, letters=frozenset(places))
        self.runs += 1
        if self.keeps_deletes:
            remember(files, self.store, last, run(self.runs), 3600)
            forget(self.store, self.runs - 1)
        for _ in range(1 + answer_is_lost):
            self.table.upsert(files, run(self.runs))
        events = [at.event for number, start, end in spans for at in self.logs[number][start:end]]
        lost_ids = {self.logs[partition][offset].event.id for partition, offset in places}
        assert lost_ids == self.fold(events), f"run {self.runs}"
        self.read = [end for _, _, end in spans]

    def fold(self, events: Iterable[Event]) -> set[int]:
        """Apply the events of a run in the order of the database's log; the ids of rows that nobody has all of."""
        known = [Event(lsn, key, row, 0) for key, (lsn, row) in self.rows.items()]
        known += [Event(lsn, key, None, 0) for key, lsn in self.gone.items()]
        known += [Event(self.emptied, None, None, 0)] if self.emptied else []
        # a row is of the first of two equal events, as connectors write some again
        steps = sorted([*known, *sorted(events, key=lambda one: one.is_tombstone)], key=lambda one: one.lsn)
        rows: dict[int, tuple[int, dict[str, Any]]] = {}
        gone: dict[int, int] = {}
        for one in steps:
            if one.id is None:
                rows.clear()
                self.emptied = one.lsn if self.keeps_deletes else 0
            elif one.row is None:
                rows.pop(one.id, None)
                gone[one.id] = one.lsn
            else:
                gone.pop(one.id, None)
                before = rows.get(one.id, (0, dict.fromkeys(_LARGE, _LOST)))[1]
                row = one.row if one in known or self.has_more else one.row | {"more": None}
                rows[one.id] = one.lsn, row | {name: before[name] for name in one.lacks}
                if one.old_id is not None:
                    rows.pop(one.old_id, None)
                    gone[one.old_id] = one.lsn
        self.gone = gone if self.keeps_deletes else {}
        lost = {key for key, (_, row) in rows.items() if _LOST in row.values()}
        self.rows = {key: row for key, row in rows.items() if key not in lost}
        return lost

    def partition(self) -> None:
        """Another field partitions an Iceberg table from now on, or one does so no longer."""
        if self.kind == "iceberg" and self.fields and self.runs:
            place = load_catalog("local", **catalog_options(self.folder)).load_table("space.table")
            if self.layout != "none":
                self.fields.clear()
                with place.update_spec() as update:
                    update.remove_field(place.spec().fields[0].name)
                return
            name, transform = self.fields.pop(0)
            with place.update_spec() as update:
                if len(self.fields) == 1:
                    update.remove_field(place.spec().fields[0].name)
                update.add_field(name, transform)

    def check(self) -> None:
        names = ["id", "name", "note", "tags", "size", *(["more"] if self.has_more else [])]
        expected = sorted(tuple(row[name] for name in names) for _, row in self.rows.values())
        found = content(self.kind, self.folder).select(names).to_pylist()
        assert sorted(tuple(row.values()) for row in found) == expected
        if self.kind == "delta":
            paths = DeltaTable(self.folder / "table").file_uris()
        else:
            place = load_catalog("local", **catalog_options(self.folder)).load_table("space.table")
            paths = [task.file.file_path for task in place.scan().plan_files()]
            for city in ("x", "y"):
                rows = place.scan(row_filter=EqualTo("city", city)).to_arrow()["id"].to_pylist()
                assert sorted(rows) == sorted(key for key, (_, row) in self.rows.items() if row["city"] == city)
        rows = duckdb.read_parquet(paths, union_by_name=True).fetchall() if paths else []
        assert sorted(row[0] for row in rows) == [row[0] for row in expected]


#: How records are written: the keys of the topic with more partitions move to others, with clocks in any order; a
#: connector starts again, and writes some events once more; keys move, with clocks in order; one partition.
_HOW = ("order", "again", "clocks", "offsets")


@st.composite
def _histories(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """(operation, id, another id, partition of a truncation, which large values are lacking) of events."""
    operations = ["write", "write", "write", "lacking", "lacking", "move", "delete", "tombstone", "truncate"]
    one = st.tuples(
        st.sampled_from(operations),
        st.integers(1, 4),
        st.integers(1, 4),
        st.integers(0, 2),
        st.sampled_from([("note",), ("tags",), _LARGE]),
    )
    return draw(st.lists(one, min_size=1, max_size=25))


_RUNS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 12), min_size=3, max_size=3), st.sampled_from(["", "again", "compact", "evolve"])
    ),
    max_size=4,
)


def _check(
    kind: str,
    history: list[tuple[Any, ...]],
    runs: list[Any],
    seed: int,
    slice_bytes: int,
    how: str,
    keeps_deletes: bool,
    layout: str,
) -> None:
    chance = random.Random(seed)
    places = {key: (chance.randrange(3), chance.randrange(3)) for key in range(1, 5)}
    moves_at, alive = chance.randrange(len(history) + 1), set[int]()
    with TemporaryDirectory() as name:
        base = Database(
            kind,
            Path(name),
            has_order=how in ("order", "again"),
            keeps_deletes=keeps_deletes,
            layout=layout,
        )
        for lsn, (operation, key, other, partition, lacks) in enumerate(history, 1):
            if operation != "truncate":
                partition = places[key][lsn > moves_at and how in ("order", "clocks")]
            partition = 0 if how == "offsets" else partition
            row = {"id": key, "name": f"n{lsn}", "note": f"note {lsn}", "tags": [str(lsn)]}
            row |= {"city": _CITIES[lsn % 5], "day": (date(2026, 1 + lsn % 5, 1), date(1969, 12, 31))[lsn % 2]}
            row["at"] = None if lsn % 4 == 0 else datetime(1969 + lsn % 2 * 57, 12, 31, 23, 59, 59, 999_999)
            row["price"] = None if lsn % 5 == 0 else Decimal(lsn % 7 - 3) / 100
            row |= {"size": lsn, "more": f"more {lsn}"}
            event = Event(lsn, key, row, partition)
            if operation == "lacking" and key in alive:
                event = event._replace(lacks=lacks)
            elif operation == "move" and key != other:
                event = event._replace(old_id=other)
                alive.discard(other)
            elif operation in ("delete", "tombstone"):
                event = event._replace(row=None)
            elif operation == "truncate":
                event = event._replace(id=None, row=None)
                alive.clear()
            alive = alive - {key} if event.row is None else alive | {key}
            time = chance.randrange(100) if base.has_order else lsn
            log = base.logs[partition]
            if operation != "tombstone" or base.has_order:
                log.append(Place(event, time))
            if operation in ("delete", "tombstone"):
                log.append(Place(event._replace(is_tombstone=True), time))
            if how == "again" and chance.random() < 0.3:
                start = chance.randrange(len(log))
                log += log[start + log[start].event.is_tombstone :]
        if chance.random() < 0.3:  # the topic's retention has taken the first ones
            base.read = [chance.randrange(len(log) // 2 + 1) for log in base.logs]
            base.read = base.with_tombstones(base.read)
        for counts, step in runs:
            if step == "evolve":
                base.evolve()
            ends = [min(at + count, len(log)) for at, count, log in zip(base.read, counts, base.logs, strict=True)]
            # a deletion of an earlier run is known if it is remembered
            ends = ends if keeps_deletes else base.with_tombstones(ends)
            base.run(ends, slice_bytes, answer_is_lost=step == "again")
            base.check()
            if layout != "none":
                base.partition()
            if step == "compact" and layout == "none":
                base.table.compact(1 << 20)
                base.check()
        base.run([len(log) for log in base.logs], slice_bytes)
        base.check()


_MODEL = st.fixed_dictionaries(
    {
        "history": _histories(),
        "runs": _RUNS,
        "seed": st.integers(0, 1000),
        "slice_bytes": st.sampled_from([300, 1 << 27]),
        "how": st.sampled_from(_HOW),
        "keeps_deletes": st.booleans(),
    }
)


def _models(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda drawn, layout: drawn | {"layout": layout}, _MODEL, st.sampled_from(_LAYOUTS[kind]))


@pytest.mark.parametrize("kind", FORMATS)
@settings(deadline=None, max_examples=8)
@given(st.data())
def test_the_table_is_that_of_the_model(kind: str, data: st.DataObject) -> None:
    _check(kind, **data.draw(_models(kind)))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_value_of_a_deleted_row_is_not_that_of_the_next_one(kind: str) -> None:
    note = ("note",)
    history = [("delete", 2, 2, 0, note), ("lacking", 2, 2, 0, note), ("delete", 1, 1, 0, note)]
    history += [("write", 2, 1, 2, note), ("lacking", 2, 2, 2, note)]
    _check(kind, history, [([0, 4, 1], "")], 386, 1 << 27, "order", keeps_deletes=False, layout="none")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_truncation_takes_rows_that_no_change_of_the_run_is_about(kind: str) -> None:
    note = ("note",)
    history = [("truncate", 2, 1, 1, note), ("write", 1, 1, 2, note), ("truncate", 1, 2, 2, note)]
    history += [("delete", 1, 2, 1, note), ("write", 2, 2, 2, note), ("truncate", 1, 2, 0, note)]
    _check(kind, history, [([3, 0, 4], "")], 944, 1 << 27, "order", keeps_deletes=False, layout="none")


@pytest.mark.test_all("long")
@pytest.mark.parametrize("kind", FORMATS)
@settings(deadline=None, max_examples=int(os.environ.get("SPARK_KLOG_UPSERTS", "100")))
@given(st.data())
def test_many_tables_are_those_of_the_model(kind: str, data: st.DataObject) -> None:
    _check(kind, **data.draw(_models(kind)))
