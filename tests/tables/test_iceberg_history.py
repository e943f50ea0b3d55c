"""Orders of what others do to an Iceberg table between runs: the last run is exact, or refused by a true name."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from spark_klog.columns.schema import FULL
from spark_klog.errors import LoadError
from spark_klog.tables.table import STREAMS, Run
from tests.support.runs.soak import SOAK
from tests.tables.iceberg_tables import LOAD, Warehouse, rows, run_of, write

_NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # it would take minutes
ROLLED_BACK, MAY_LACK = "was rolled back", "may lack run"


class Order:
    """A table, and a model of it: the runs that each snapshot has.

    `run` is the last run by the table's properties; `is_lost` whether former metadata was removed.
    """

    def __init__(self, folder: Path, version: str = "2") -> None:
        self.warehouse = Warehouse(folder)
        if version == "1":
            self.warehouse.catalog.create_namespace("ns")
            self.warehouse.catalog.create_table("ns.t", FULL, properties={"format-version": "1"})
        self.table, self.schema = self.warehouse.prepared("none")
        self.run: Run | None = None
        self.next = 0
        self.is_lost = False
        self.snapshots: dict[int, int] = {}  # of each run, when it committed
        self.known: dict[int | None, frozenset[int]] = {None: frozenset()}

    @property
    def head(self) -> int | None:
        return self.warehouse.stranger().metadata.current_snapshot_id

    def there(self) -> list[int]:
        return sorted((one.snapshot_id for one in self.warehouse.stranger().snapshots()), key=list(self.known).index)

    @property
    def is_whole(self) -> bool:
        """Whether the current rows are of all runs."""
        return self.run is None or self.known[self.head].issuperset(range(1, self.run.number + 1))

    def _offsets(self, count: int) -> list[int]:
        self.next += count
        return [*range(self.next - count, self.next)]

    def _committed(self, before: int | None, runs: set[int] | None = None) -> None:
        """All snapshots that are new have also these runs."""
        for one in self.warehouse.stranger().snapshots():
            self.known.setdefault(one.snapshot_id, self.known[before] | (runs or set()))

    # ----- what happens

    def runs(self, choice: int) -> None:
        number = self.run.number + 1 if self.run else 1
        before, offsets = self.head, self._offsets(choice % 4 and 2)
        files = [write(self.table, self.schema, f"f{self.next}-{number}", rows(offsets))] if offsets else []
        run, is_whole = run_of(number, self.next), self.is_whole
        try:
            self.warehouse.open().append(files, run)
        except LoadError as error:
            message = str(error)
            assert not is_whole or MAY_LACK in message
            return
        assert is_whole
        self.run = run
        self._committed(before, {number})
        assert self.head is not None
        self.snapshots[number] = self.head

    def appends(self, choice: int) -> None:
        before, offsets = self.head, self._offsets(1)
        self.warehouse.stranger().append(pa.Table.from_pylist(rows(offsets), FULL))
        self._committed(before)

    def compacts(self, choice: int) -> None:
        """All rows are in a file of one who is not the load."""
        before, table = self.head, self.warehouse.stranger()
        if before is not None:
            table.overwrite(table.scan().to_arrow())
            self._committed(before)

    def expires(self, choice: int) -> None:
        """All snapshots but those that are protected, or one."""
        table = self.warehouse.stranger()
        kept = {ref.snapshot_id for ref in table.metadata.refs.values()}
        gone = [one for one in self.there() if one not in kept]
        if gone:
            gone = gone if choice % 2 else [gone[choice % len(gone)]]
            table.maintenance.expire_snapshots().by_ids(gone).commit()

    def tags(self, choice: int) -> None:
        table = self.warehouse.stranger()
        if there := self.there():
            table.manage_snapshots().create_tag(there[choice % len(there)], f"tag{choice}").commit()

    def rolls_back(self, choice: int) -> None:
        if there := self.there():
            self.warehouse.stranger().manage_snapshots().set_current_snapshot(there[choice % len(there)]).commit()

    def picks(self, choice: int) -> None:
        """A cherry-pick of a run that is not in the table, as Spark's."""
        before = self.head
        runs = self.known[before]
        lost = [n for n, snapshot in self.snapshots.items() if n not in runs and snapshot in self.there()]
        if lost:
            number = lost[choice % len(lost)]
            data = pa.Table.from_pylist(rows(self._offsets(1)), FULL)
            properties = {"source-snapshot-id": str(self.snapshots[number])}
            self.warehouse.stranger().append(data, snapshot_properties=properties)
            self._committed(before, {number})

    def upgrades(self, choice: int) -> None:
        """To format version 2, whose snapshots have sequence numbers, from 1 on."""
        table = self.warehouse.stranger()
        if table.format_version == 1:
            with table.transaction() as transaction:
                transaction.upgrade_table_version(2)

    def loses_metadata(self, choice: int) -> None:
        table = self.warehouse.stranger()
        current = Path(table.metadata_location.removeprefix("file://"))
        for path in current.parent.glob("*.metadata.json"):
            if path != current:
                path.unlink()
        self.is_lost = True

    # ----- what the load sees

    def check(self, *, follows_advice: bool) -> None:
        try:
            found = self.warehouse.open().last_run(LOAD)
        except LoadError as error:
            message = str(error)
        else:
            assert self.is_whole, f"{found} is not in the table"
            assert found == self.run
            return
        if MAY_LACK in message:
            assert self.is_lost
            if self.is_whole:
                name, value = re.findall(r"set its property (\S+) to (\[.*?\])", message)[0]
                self._set(name, value)
                assert self.warehouse.open().last_run(LOAD) == self.run
            return
        assert ROLLED_BACK in message
        assert not self.is_whole
        if not follows_advice:
            return
        if set_again := re.findall(r"set the current snapshot to (\d+)", message):
            self.warehouse.stranger().manage_snapshots().set_current_snapshot(int(set_again[0])).commit()
            assert self.is_whole
        elif "unset the table's property klog.run" in message:
            with self.warehouse.stranger().transaction() as transaction:
                transaction.remove_properties("klog.run")
            self.run = self.warehouse.open().last_run(LOAD)
            assert self.is_whole

    def _set(self, name: str, value: str) -> None:
        with self.warehouse.stranger().transaction() as transaction:
            transaction.set_properties({name: value})


_WAYS = ["runs", "runs", "appends", "compacts", "expires", "expires", "tags", "rolls_back", "picks"]


def _play(steps: list[tuple[str, int]], *, follows_advice: bool) -> None:
    is_upgraded = "upgrades" in (way for way, _ in steps)
    with TemporaryDirectory() as folder:
        order = Order(Path(folder), "1" if is_upgraded else "2")
        for way, choice in steps:
            getattr(order, way)(choice)
            order.check(follows_advice=follows_advice and choice % 5 == 0)


def _orders(ways: list[str], most: int) -> Any:
    return st.lists(st.tuples(st.sampled_from(ways), st.integers(0, 1000)), min_size=1, max_size=most)


@settings(deadline=None, max_examples=6, phases=_NO_SHRINKING, suppress_health_check=list(HealthCheck))
@given(steps=_orders(_WAYS, 10), advice=st.booleans())
def test_orders(steps: list[Any], advice: bool) -> None:
    _play([("runs", 1), *steps], follows_advice=advice)


@pytest.mark.test_all("long")
@settings(deadline=None, max_examples=60 if SOAK else 15, phases=_NO_SHRINKING, suppress_health_check=list(HealthCheck))
@given(steps=_orders([*_WAYS, "loses_metadata", "upgrades"], 16), advice=st.booleans())
def test_many_orders(steps: list[Any], advice: bool) -> None:
    _play([("runs", 1), *steps], follows_advice=advice)


EXPIRED_WITH_A_TAG = [("runs", 1), ("tags", 0), ("appends", 0), ("appends", 0), ("expires", 1)]
EXPIRED_AFTER_A_ROLL_BACK = [("runs", 1), ("runs", 1), ("rolls_back", 2), ("appends", 1), ("expires", 1)]


UPGRADED = [("runs", 1), ("upgrades", 0), ("appends", 0), ("expires", 1)]
UPGRADED_AFTER_A_ROLL_BACK = [("runs", 1), ("runs", 1), ("rolls_back", 2), *UPGRADED[1:]]


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("steps", [EXPIRED_WITH_A_TAG, EXPIRED_AFTER_A_ROLL_BACK, UPGRADED, UPGRADED_AFTER_A_ROLL_BACK])
def test_snapshots_between_are_expired(steps: list[tuple[str, int]], is_lost: bool) -> None:
    _play([*steps, ("loses_metadata", 0)] if is_lost else steps, follows_advice=True)


def test_a_run_of_format_version_1_is_not_loaded_again(tmp_path: Path) -> None:
    order = Order(tmp_path, "1")
    for way, choice in (*UPGRADED, ("loses_metadata", 0)):
        getattr(order, way)(choice)
    with order.warehouse.stranger().transaction() as transaction:
        transaction.remove_properties("klog.run")
    order.loses_metadata(0)
    with pytest.raises(LoadError, match=r"are expired, and the property klog\.run is unset: set it again"):
        order.warehouse.open().last_run(LOAD)


def test_a_row_of_the_run_tells_when_no_history_does(tmp_path: Path) -> None:
    order = Order(tmp_path)
    for way in ("runs", "runs", "appends", "compacts", "appends", "expires", "loses_metadata"):
        getattr(order, way)(1)
    assert order.warehouse.open().last_run(LOAD) == order.run
    before = order.head
    order.warehouse.stranger().delete("offset in (2, 3)")
    order._committed(before)
    order.expires(1)
    order.loses_metadata(1)
    with pytest.raises(LoadError, match=f"{MAY_LACK} 2 of load {LOAD} .* no row of the run tells"):
        order.warehouse.open().last_run(LOAD)


def test_a_stream_of_upserts_has_no_offsets_of_rows(tmp_path: Path) -> None:
    order = Order(tmp_path)
    with order.warehouse.stranger().transaction() as transaction:
        transaction.set_properties({"klog.load": STREAMS})
    run = Run(STREAMS, 1, "token", {"query": {"batch": 0, "rows-0": 5, "run": 1}})
    order.warehouse.open().append([write(order.table, order.schema, "a", rows(range(5)))], run)
    order._committed(None, {1})
    order.appends(0)
    order.appends(0)
    order.expires(1)
    assert order.warehouse.open().last_run(STREAMS) == run
    order.loses_metadata(0)
    with pytest.raises(LoadError, match=MAY_LACK):
        order.warehouse.open().last_run(STREAMS)
