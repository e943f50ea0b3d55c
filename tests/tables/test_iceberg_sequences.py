"""Any order of runs, lost answers, compactions and what others do to an Iceberg table, against a model of its rows."""

from __future__ import annotations

import itertools
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

from spark_klog.columns.schema import FULL
from spark_klog.errors import LoadError
from spark_klog.tables.table import Run, RunConflict
from tests.support.runs.figures import count
from tests.tables.iceberg_tables import LOAD, Warehouse, before_commit, lose_answer, rows, run_of, write

_LOST = [CommitStateUnknownException, CommitFailedException, OSError]


class Orders(RuleBasedStateMachine):
    """The model: the offsets in the table and the last run, now and at each snapshot."""

    def __init__(self) -> None:
        super().__init__()
        count("sequences")
        self._folder = tempfile.TemporaryDirectory()
        self._warehouse = Warehouse(Path(self._folder.name))
        self._columns = FULL
        self._table, self._schema = self._warehouse.prepared("none")
        with self._warehouse.stranger().transaction() as transaction:
            transaction.set_properties({"commit.manifest.min-count-to-merge": "3"})
        self._names = (f"f{number}" for number in itertools.count())
        self._offsets = itertools.count()
        self._rows = frozenset[int]()
        self._run: Run | None = None
        self._has_expired = False
        self._known: dict[int, tuple[frozenset[int], Run | None]] = {}

    def teardown(self) -> None:
        self._folder.cleanup()

    def _next_run(self, token: str = "token") -> tuple[Run, list[int]]:
        number = 1 if self._run is None else self._run.number + 1
        offsets = [next(self._offsets) for _ in range(4)]
        return run_of(number, offsets[-1] + 1, token), offsets

    def _append(self, run: Run, offsets: list[int]) -> None:
        parts = [part for part in (offsets[:2], offsets[2:]) if part]
        files = [write(self._table, self._schema, next(self._names), rows(part)) for part in parts]
        self._table.append(files, run)

    def _committed(self, run: Run, offsets: list[int]) -> None:
        self._rows |= frozenset(offsets)
        self._run = run

    def _stranger_appends(self) -> None:
        offsets = [next(self._offsets) for _ in range(3)]
        self._warehouse.stranger().append(pa.Table.from_pylist(rows(offsets), FULL))
        self._rows |= frozenset(offsets)

    def _stranger_deletes(self, share: int) -> None:
        doomed = [one for one in self._rows if one % 7 == share]
        if doomed:
            self._warehouse.stranger().delete(f"offset IN ({', '.join(map(str, doomed))})")
            self._rows -= frozenset(doomed)

    def _stranger_expires(self) -> None:
        self._has_expired = True
        later = datetime.now(timezone.utc) + timedelta(hours=1)
        self._warehouse.stranger().maintenance.expire_snapshots().older_than(later).commit()

    def _stranger(self, kind: str) -> None:
        if kind == "appends":
            self._stranger_appends()
        elif kind == "expires":
            self._stranger_expires()
        elif kind == "properties":
            with self._warehouse.stranger().transaction() as transaction:
                transaction.set_properties({"note": next(self._names)})
        else:
            self._stranger_deletes(int(kind))

    strangers = st.sampled_from(["appends", "expires", "properties", "0", "3"])

    @rule(count=st.integers(1, 3), empty=st.booleans())
    def run(self, count: int, empty: bool) -> None:
        for _ in range(count):
            run, offsets = self._next_run()
            offsets = [] if empty else offsets
            self._append(run, offsets)
            self._committed(run, offsets)

    @rule(kinds=st.lists(strangers, min_size=1, max_size=2))
    def run_while_others_write(self, kinds: list[str]) -> None:
        run, offsets = self._next_run()
        before_commit(self._table, lambda: [self._stranger(kind) for kind in kinds])
        self._append(run, offsets)
        self._committed(run, offsets)

    @rule(
        is_committed=st.booleans(), sort=st.sampled_from([CommitStateUnknownException, CommitFailedException, OSError])
    )
    def run_whose_answer_is_lost(self, is_committed: bool, sort: type[Exception]) -> None:
        run, offsets = self._next_run()
        lose_answer(self._table, sort("lost"), is_committed)
        self._append(run, offsets)
        self._committed(run, offsets)
        self._table = self._warehouse.open()
        self._table.append([write(self._table, self._schema, next(self._names), rows([9]))], run)  # changes nothing

    @rule(is_during=st.booleans())
    def another_run_of_the_number(self, is_during: bool) -> None:
        run, offsets = self._next_run()
        other, others = self._next_run("other")

        def intrude() -> None:
            mine, self._table = self._table, self._warehouse.open()
            self._append(other, others)
            self._table = mine

        if is_during:
            before_commit(self._table, intrude)
        else:
            intrude()
        with pytest.raises(RunConflict):
            self._append(run, offsets)
        self._committed(other, others)

    @rule(kind=strangers)
    def others_write(self, kind: str) -> None:
        self._stranger(kind)

    @rule(
        size=st.sampled_from([6_000, 20_000, 1 << 20]),
        during=st.none() | strangers,
        lost=st.none() | st.tuples(st.sampled_from(_LOST), st.booleans()),
    )
    def compact(self, size: int, during: str | None, lost: tuple[type[Exception], bool] | None) -> None:
        if during is not None:
            before_commit(self._table, lambda: self._stranger(during))
        elif lost is not None:
            lose_answer(self._table, lost[0]("lost"), lost[1])
        table = self._table
        table.compact(size)
        self._table = self._warehouse.open()  # without what waits for a commit

    @rule()
    def compact_while_a_run_commits(self) -> None:
        run, offsets = self._next_run()
        mine = self._table

        def intrude() -> None:
            self._table = self._warehouse.open()
            self._append(run, offsets)
            self._committed(run, offsets)
            self._table = mine

        before_commit(mine, intrude)
        mine.compact(1 << 20)
        self._table = self._warehouse.open()

    @rule(widen=st.booleans())
    def the_schema_changes(self, widen: bool) -> None:
        name = next(self._names)
        kinds = {one.name: one.type for one in self._columns}
        if widen:
            kinds["timestampType"] = pa.int64()
        self._columns = pa.schema([*kinds.items(), (name, pa.struct([("x", pa.float32())]))])
        self._schema = self._table.prepare(self._columns, "none", "timestamp", LOAD)
        assert self._schema.names == self._columns.names

    @rule(data=st.data())
    def rolled_back(self, data: st.DataObject) -> None:
        table = self._warehouse.stranger()
        past = [one.snapshot_id for one in table.history() if one.snapshot_id in self._known]
        there = {one.snapshot_id for one in table.metadata.snapshots}
        past = [one for one in past if one in there]
        if not past:
            return
        head, place = table.metadata.current_snapshot_id, data.draw(st.sampled_from(past))
        table.manage_snapshots().set_current_snapshot(place).commit()
        rows_then, run_then = self._known[place]
        number = table.properties.get("klog.run")  # if it is unset, the history tells
        is_back = number is not None and (run_then is None or run_then.number < int(number))
        if is_back:
            with pytest.raises(LoadError, match="was rolled back"):
                self._table.last_run(LOAD)
            with pytest.raises(LoadError, match="was rolled back"):
                self._append(*self._next_run())
            if data.draw(st.booleans()):
                assert head is not None
                self._warehouse.stranger().manage_snapshots().set_current_snapshot(head).commit()
                return
            with self._warehouse.stranger().transaction() as transaction:
                transaction.remove_properties("klog.run")
        if self._has_expired and (is_back or number is None):
            try:
                self._table.last_run(LOAD)
            except LoadError:  # nothing tells which runs are left
                if number is not None:
                    with self._warehouse.stranger().transaction() as transaction:
                        transaction.set_properties({"klog.run": number})
                assert head is not None
                self._warehouse.stranger().manage_snapshots().set_current_snapshot(head).commit()
                return
        self._rows, self._run = rows_then, run_then

    @invariant()
    def as_the_model(self) -> None:
        offsets = self._warehouse.offsets()
        assert offsets == sorted(self._rows)
        assert self._warehouse.open().last_run(LOAD) == self._run
        assert sum(one.records for one in self._table.files()) == len(self._rows)
        head = self._warehouse.stranger().metadata.current_snapshot_id
        if head is not None:
            self._known[head] = self._rows, self._run


def _check(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Orders,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


@pytest.mark.filterwarnings("ignore:Delete operation did not match")
def test_an_order() -> None:
    _check(1, 15)


@pytest.mark.test_all("long")
@pytest.mark.filterwarnings("ignore:Delete operation did not match")
def test_many_orders() -> None:
    _check(20, 25)
