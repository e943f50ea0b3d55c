"""`klog load verify`: what is missing, double or different, in folders and in tables, with the log and without it."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from pyiceberg.manifest import DataFileContent

from spark_klog.embedded import EmbeddedCluster
from spark_klog.load import files
from spark_klog.load.compaction import compact
from spark_klog.load.run import MaxBad
from spark_klog.load.settings import VALUES, WriteSettings
from spark_klog.load.verify import OffsetSet, verify
from tests.load.support import run
from tests.spark.support import Sent, create_topic, delete_records, produce
from tests.support.clients.klog import klog
from tests.tables.delta_vectors import delete_by_vector
from tests.tables.iceberg_tables import Warehouse, delete_by_file

_TIME = 1_700_002_800_000


def test_a_set_of_offsets() -> None:
    chance = random.Random(1)
    found, model = OffsetSet(), Counter[int]()
    for _ in range(20):
        start = chance.choice([0, 65_530, 131_000, 1 << 40])
        some = [start + chance.randrange(70_000) for _ in range(200)]
        if chance.random() < 0.3:
            some = list(range(start, start + 66_000))
        known = sorted(one for one, count in Counter(some).items() for _ in range(count - (one not in model)))
        assert sorted(found.add(np.array(some))) == known
        model.update(some)
        begin = chance.choice(some) - chance.randrange(1000)
        until = begin + chance.randrange(1, 90_000)
        assert found.count(begin, until) == sum(begin <= one < until for one in model)


def _load(servers: str, topic: str, output: str, **options: Any) -> None:
    create_topic(servers, topic, 2)
    for number in range(0, 120, 40):
        sent = [
            Sent(b"%d" % n, None if n % 5 else b"k", n % 2, _TIME + n, (("h", b"%d" % n),) if n % 3 else ())
            for n in range(number, number + 40)
        ]
        produce(servers, topic, sent)
        run(servers, output, topic, **options)


def _edit(path: Path, table: pa.Table) -> None:
    """Write another table, as somebody might who has not told the journal."""
    pq.write_table(table, path)


@pytest.mark.parametrize("kind", ["folder", "sorted and compacted", "table"])
def test_what_is_wrong(cluster: EmbeddedCluster, topic: str, tmp_path: Path, kind: str) -> None:
    servers, output = cluster.bootstrap_servers, str(tmp_path)
    options: dict[str, Any] = {}
    if kind == "table":
        output = f"delta:{tmp_path}"
    if kind == "sorted and compacted":
        options["settings"] = WriteSettings(sort_by="key")
    _load(servers, topic, output, **options)
    client = {"bootstrap.servers": servers}
    if kind == "sorted and compacted":
        compact(output)
    good = verify(output, client, with_hash=True)
    assert good.findings == []
    assert [(one.records, one.in_files, one.lag, one.compared, one.gone) for one in good.partitions] == [
        (60, 60, 0, 60, 0)
    ] * 2
    first = next(item for item in files(output) if item.partition == 0)
    path = Path(first.path)
    table, content = pq.read_table(path).sort_by("offset"), path.read_bytes()

    def told(changed: pa.Table, **how: Any) -> list[str]:
        _edit(path, changed)
        found = [item.what for item in verify(output, client, **how).findings]
        path.write_bytes(content)
        return found

    count, end = first.records, first.last + 1
    without = pa.concat_tables([table.slice(0, 3), table.slice(5)])
    assert told(without) == [f"[0, {end}): 2 of {count} records are missing"]
    assert told(without, with_hash=True)[1:] == ["records of [3, 5) are in the log, and not in the files"]
    double = pa.concat_tables([table, table.slice(7, 1)])
    assert told(double)[0] == "records of [7, 8) are there more than once"
    other = table.set_column(
        table.schema.get_field_index("value"),
        table.schema.field("value"),
        pa.chunked_array([[b"x" if number == 4 else value.as_py() for number, value in enumerate(table["value"])]]),
    )
    assert told(other, with_hash=True) == ["records of [4, 5) are not as the log has them"]
    path.unlink()
    assert [item.what for item in verify(output).findings] == [f"[0, {end}): {count} of {count} records are missing"]
    path.write_bytes(content)

    delete_records(servers, topic, {0: 10})
    found = verify(output, client, with_hash=True)
    assert (found.findings, found.partitions[0].compared) == ([], 50)


def test_values_as_columns_beside_another_writer(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Compacted files have many runs', and others have rows without offsets."""
    servers, output = cluster.bootstrap_servers, f"delta:{tmp_path}"
    create_topic(servers, topic)
    settings = WriteSettings(table_columns=VALUES, schema="a bigint")
    for number in range(3):
        produce(servers, topic, [Sent(b'{"a":%d}' % number)] * 10)
        run(servers, output, topic, settings=settings)
    write_deltalake(tmp_path, pa.table({"a": [7, 8]}), mode="append", schema_mode="merge")
    assert verify(output).findings == []
    DeltaTable(tmp_path).optimize.compact()
    [line] = verify(output, {"bootstrap.servers": servers}).partitions
    assert (line.records, line.in_files, line.lag) == (30, 30, 0)
    DeltaTable(tmp_path).delete("_klog_offset = 12")
    [finding] = verify(output).findings
    assert finding.what == "[10, 20): 1 of 10 records are missing"


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_rows_that_files_have_and_readers_do_not(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, warehouse = cluster.bootstrap_servers, Warehouse(tmp_path)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG.get_catalog_config", lambda _name: warehouse.options)
    output = f"delta:{tmp_path / 'table'}" if kind == "delta" else f"iceberg:{warehouse.name}"
    create_topic(servers, topic)
    for _ in range(2):
        produce(servers, topic, [Sent(b"v")] * 10)
        run(servers, output, topic)
    client = {"bootstrap.servers": servers}
    assert verify(output, client, with_hash=True).findings == []
    if kind == "delta":
        delete_by_vector(tmp_path / "table", files(output)[0].path, [3, 4, 9])
        seen = QueryBuilder().register("t", DeltaTable(tmp_path / "table")).execute('SELECT "offset" FROM t')
        offsets = pa.table(seen)["offset"].to_pylist()
    else:
        for task in warehouse.stranger().scan().plan_files():
            if task.file.file_path.endswith(files(output)[0].path.rpartition("/")[2]):
                for row in (3, 4, 9):
                    delete_by_file(warehouse.stranger(), task.file, row, DataFileContent.POSITION_DELETES)
        offsets = warehouse.offsets()
    assert sorted(offsets) == [one for one in range(20) if one not in (3, 4, 9)]
    for with_hash in (False, True):
        found = verify(output, client, with_hash=with_hash)
        assert found.partitions[0].in_files == 17
        told = [
            "[0, 10): 3 of 10 records are missing",
            "records of [3, 5), [9, 10) are in the log, and not in the files",
        ]
        assert [one.what for one in found.findings] == told[: 1 + with_hash]


def test_values_with_the_names_of_places(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers, output = cluster.bootstrap_servers, f"delta:{tmp_path}"
    create_topic(servers, topic)
    settings = WriteSettings(table_columns=VALUES, schema="topic string, partition int, `offset` bigint")
    for number in range(2):
        produce(servers, topic, [Sent(b'{"topic":"news","partition":9,"offset":%d}' % number)] * 10)
        run(servers, output, topic, settings=settings)
    DeltaTable(tmp_path).optimize.compact()
    [file] = files(output, topic)
    assert (file.topic, file.partition, file.first, file.last, file.records) == (topic, 0, 0, 19, 20)
    assert files(output, "news") == []


def test_the_command(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    sent = [Sent(b"1"), Sent(b"2", None, 0, 1 << 60), Sent(b"3")]  # a time that no column holds is a dead letter
    produce(servers, topic, sent)
    run(servers, tmp_path, topic, max_bad=MaxBad(1))
    produce(servers, topic, [Sent(b"4")])
    shown = klog("load", "verify", str(tmp_path), "-b", servers, "--hash", "--json")
    assert shown.returncode == 0, shown
    [line] = json.loads(shown.stdout)["partitions"]
    assert (line["records"], line["in_files"], line["lag"], line["compared"]) == (2, 2, 1, 2)
    Path(files(str(tmp_path))[0].path).unlink()
    shown = klog("load", "verify", str(tmp_path))
    assert (shown.returncode, "wrong: " in shown.stdout, "2 of 2 records are missing" in shown.stdout) == (
        1,
        True,
        True,
    )
    assert klog("load", "verify", str(tmp_path), "--hash").returncode == 2
