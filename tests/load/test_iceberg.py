"""Loads into Iceberg tables: kills around the commit, other writers between runs, layouts by a field of the values."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.load import files
from spark_klog.load.audit import status
from spark_klog.load.settings import WriteSettings
from tests.load.support import Place, expected, run
from tests.spark.support import create_topic, produce, values
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
    assert run(servers, _ADDRESS, topic).runs == []
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
