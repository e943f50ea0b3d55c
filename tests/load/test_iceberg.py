"""Loads into Iceberg tables: kills around the commit, other writers between runs, layouts by a field of the values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, LoadError
from spark_klog.files.folder import LocalFolder
from spark_klog.load import files
from spark_klog.load.audit import status
from spark_klog.load.run import LoadOptions, MaxBad, load
from spark_klog.load.settings import WriteSettings
from spark_klog.tables.iceberg import IcebergTable
from tests.load.support import InProcess, Killed, Place, die, expected, failing, run
from tests.spark.support import Sent, create_topic, produce, values
from tests.support.runs.soak import SOAK
from tests.tables.iceberg_tables import Warehouse

_ADDRESS = "iceberg:c.ns.t"


@pytest.fixture
def warehouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Warehouse:
    made = Warehouse(tmp_path)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG.get_catalog_config", lambda _: made.options)
    return made


def seen(warehouse: Warehouse) -> list[Place]:
    """The places of all records, by two readers that agree."""
    if warehouse.open().schema() is None:
        return []
    names = ["topic", "partition", "offset"]
    found = sorted(zip(*warehouse.stranger().scan().to_arrow().select(names).to_pydict().values(), strict=True))
    assert sorted(pl.scan_iceberg(warehouse.stranger()).select(names).collect().rows()) == found
    return found


def test_runs_of_a_table(cluster: EmbeddedCluster, topic: str, warehouse: Warehouse) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    assert run(servers, _ADDRESS, topic, settings=WriteSettings(layout="hour")).runs == []
    with pytest.raises(LoadError, match=f"^{_ADDRESS} belongs to a load with values as bytes, not values of the"):
        run(servers, _ADDRESS, topic, settings=WriteSettings(schema="id bigint"))
    assert seen(warehouse) == [], "a call with nothing new makes the table"
    for number in (1, 2):
        produce(servers, topic, values(40, start=(number - 1) * 40, partitions=2))
        assert run(servers, _ADDRESS, topic, settings=WriteSettings(layout="hour")).runs == [number]
        assert seen(warehouse) == expected(topic, dict.fromkeys(range(2), number * 20))
    assert run(servers, _ADDRESS, topic, settings=WriteSettings(layout="hour")).runs == []
    assert json.loads(warehouse.stranger().properties["klog.offsets"]) == {topic: {"0": 40, "1": 40}}
    found = status(_ADDRESS)
    assert (found.findings, len(found.runs)) == ([], 2)
    assert [(item.topic, item.records) for item in files(_ADDRESS)] == [(topic, 20)] * 4
    assert warehouse.open().compact(1 << 30) == 4
    produce(servers, topic, values(10, start=80))
    assert run(servers, _ADDRESS, topic, settings=WriteSettings(layout="hour")).runs == [3]
    assert seen(warehouse) == expected(topic, {0: 50, 1: 40})


@pytest.mark.test_all("kill")
@pytest.mark.parametrize(("side", "step"), [(1, 2), (-1, 1)] if SOAK else [(1, 7), (-1, 5)])
def test_killed_at_each_change(
    cluster: EmbeddedCluster, topic: str, warehouse: Warehouse, side: int, step: int
) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    produce(servers, topic, values(120, partitions=2))
    whole = expected(topic, {0: 60, 1: 60})
    number, died = 0, True
    while died:
        number += step
        warehouse.name, address = f"c.ns.t{number}", f"iceberg:c.ns.t{number}"
        try:
            with failing(LocalFolder, side * number, die):
                run(servers, address, topic, max_task_records=40)
            died = False
        except Killed:
            pass
        assert seen(warehouse) in ([], whole)
        run(servers, address, topic, max_task_records=40)
        assert seen(warehouse) == whole
        location = Path(warehouse.open().location.removeprefix("file://"))
        there = {path.relative_to(location).as_posix() for path in location.glob("[!_]*/**/*.parquet")}
        assert there == {one.path for one in warehouse.open().files()}
        assert (status(address).findings, len(status(address).runs)) == ([], 1)
        assert run(servers, address, topic).runs == []
    assert number > 12


@pytest.mark.parametrize("after", [False, True], ids=["before the commit", "after it"])
@pytest.mark.parametrize("is_lost", [False, pytest.param(True, marks=pytest.mark.test_all("kill"))])
def test_killed_around_the_commit(
    cluster: EmbeddedCluster,
    topic: str,
    warehouse: Warehouse,
    monkeypatch: pytest.MonkeyPatch,
    after: bool,
    is_lost: bool,
) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, values(30))
    real = IcebergTable.append

    def append(self: IcebergTable, *arguments: Any) -> None:
        if after:
            real(self, *arguments)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(IcebergTable, "append", append)
        with pytest.raises(Killed):
            run(servers, _ADDRESS, topic)
    assert len(seen(warehouse)) == 30 * after
    if is_lost:
        shutil.rmtree(Path(warehouse.open().location.removeprefix("file://")) / "_klog")
    produce(servers, topic, values(10, start=30))
    runner = InProcess()
    loaded = load(LoadOptions({"bootstrap.servers": servers}, [topic], _ADDRESS), runner)
    assert seen(warehouse) == expected(topic, {0: 40})
    if not is_lost:
        assert loaded.runs == ([2] if after else [1, 2])
        assert len(runner.ran) == 1  # the task of the new run


def test_partitions_by_a_time_of_the_values(cluster: EmbeddedCluster, topic: str, warehouse: Warehouse) -> None:
    """Values without a time have a partition; timestamps that are microseconds taken for milliseconds have none."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    times = ['"2024-01-01T05:30:00"', "null", '"2024-01-01T06:30:00"', '"9999-12-31T23:59:59"', '"0001-01-01T00:00:00"']
    at = 1_700_000_000_000_000
    sent = [Sent(f'{{"at": {time}}}'.encode(), timestamp=at + 10_000_000 * n) for n, time in enumerate(times)]
    produce(servers, topic, sent)
    settings = WriteSettings(layout="hour", schema="at timestamp", event_time="at")
    assert run(servers, _ADDRESS, topic, settings=settings).runs == [1]
    assert [place[2] for place in seen(warehouse)] == [*range(5)]
    hours = {one.file.partition[0] for one in warehouse.stranger().scan().plan_files()}
    assert None in hours
    assert len(hours) == 5
    assert warehouse.offsets(row_filter="value.at >= '2024-01-01T06:00:00+00:00'") == [2, 3]
    assert warehouse.offsets(row_filter="value.at IS NULL") == [1]
    with pytest.raises(ConfigError, match="partitioned by hours and days of UTC, not of Europe/Berlin"):
        run(servers, _ADDRESS, topic, settings=WriteSettings(layout="day", time_zone="Europe/Berlin"))

    produce(servers, topic, values(3))
    warehouse.name = "c.ns.of_timestamps"
    loaded = run(servers, "iceberg:c.ns.of_timestamps", topic, settings=WriteSettings(layout="hour"), max_bad=MaxBad(5))
    assert (loaded.bad, seen(warehouse)) == (5, [(topic, 0, offset) for offset in (5, 6, 7)])


def test_a_topic_that_does_not_exist_leaves_nothing(cluster: EmbeddedCluster, warehouse: Warehouse) -> None:
    with pytest.raises(LoadError, match="does not exist at"):
        run(cluster.bootstrap_servers, _ADDRESS, "no-such-topic")
    assert warehouse.catalog.list_namespaces() == []
