"""What others make of the tables of loads: done right, or refused by name with what to do, before anything is written.

The table of it is in docs/recipes/tables.md; Spark's part is in `test_other_writers_spark.py`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyiceberg.catalog import load_catalog
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import LoadError
from spark_klog.files import open_folder
from spark_klog.load.run import MaxBad
from spark_klog.load.settings import WriteSettings
from spark_klog.load.verify import verify
from spark_klog.tables import iceberg_rows
from spark_klog.tables.delta import DeltaLakeTable
from spark_klog.tables.delta_features import WRITTEN
from spark_klog.tables.iceberg import IcebergTable
from spark_klog.tables.iceberg_rows import LiveFile, Rows
from spark_klog.tables.iceberg_schema import to_arrow
from spark_klog.tables.opening import open_table
from spark_klog.tables.stream_upserts import upsert
from tests.load.support import expected, run
from tests.load.tables import Lake, make_lake, places
from tests.spark.support import Sent, create_topic, produce, values
from tests.tables.change_support import FORMAT, Change, change_batch, rows_in, written
from tests.tables.iceberg_tables import delete_by_file
from tests.tables.test_upserts import Source, catalog_options, content, run as run_of

#: Features of readers, too, and of writers only (PROTOCOL.md of Delta 4.1).
_OF_READERS = [
    *("columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "v2Checkpoint", "vacuumProtocolCheck"),
    *("variantType", "variantType-preview", "variantShredding"),
]
_OF_WRITERS = [
    *("allowColumnDefaults", "appendOnly", "changeDataFeed", "checkConstraints", "checkpointProtection", "clustering"),
    *("collations", "domainMetadata", "generatedColumns", "icebergCompatV1", "icebergCompatV2", "identityColumns"),
    *("inCommitTimestamp", "invariants", "materializePartitionColumns", "rowTracking"),
]


def _commit(folder: Path, *actions: dict[str, Any]) -> None:
    """Commit to a Delta table as another writer does."""
    version = DeltaTable(folder).version() + 1
    (folder / "_delta_log" / f"{version:020}.json").write_text("\n".join(map(json.dumps, actions)))


def _protocol(*features: str) -> dict[str, Any]:
    readers = [name for name in features if name in _OF_READERS]
    versions: dict[str, Any] = {"minReaderVersion": 3 if readers else 1, "minWriterVersion": 7}
    return {"protocol": versions | ({"readerFeatures": readers} if readers else {}) | {"writerFeatures": [*features]}}


def _configured(folder: Path, **properties: str | None) -> dict[str, Any]:
    """The action that gives a table these properties, by their names without "delta."; None removes one."""
    log = sorted((folder / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for path in log for line in path.read_text().splitlines()]
    metadata = [action["metaData"] for action in actions if "metaData" in action][-1]
    if "columnMapping__mode" in properties:
        schema, ids = json.loads(metadata["schemaString"]), itertools.count(1)
        _map_names(schema, ids)
        metadata = {**metadata, "schemaString": json.dumps(schema)}
    changed = {f"delta.{name.replace('__', '.')}": value for name, value in properties.items()}
    configuration = {**metadata["configuration"], **changed}
    return {"metaData": {**metadata, "configuration": {name: one for name, one in configuration.items() if one}}}


def _map_names(kind: Any, ids: Iterator[int]) -> None:
    """Give the fields of a Delta schema ids, and their own names in files."""
    for field in kind["fields"] if isinstance(kind, dict) and kind.get("type") == "struct" else ():
        known = {"delta.columnMapping.id": next(ids), "delta.columnMapping.physicalName": field["name"]}
        field["metadata"] = {**field["metadata"], **known}
    for inner in kind.values() if isinstance(kind, dict) else kind if isinstance(kind, list) else ():
        if isinstance(inner, (dict, list)):
            _map_names(inner, ids)


@pytest.mark.parametrize("feature", [*_OF_READERS, *_OF_WRITERS])
def test_a_feature_is_refused_if_deltalake_refuses_it(feature: str, tmp_path: Path) -> None:
    DeltaTable.create(tmp_path, pa.schema([("id", pa.int64())]))
    _commit(tmp_path, _protocol(feature))
    table = DeltaLakeTable(str(tmp_path))
    if feature in WRITTEN:
        table.check("merge")
        raw = DeltaTable(tmp_path)
        raw.create_write_transaction([], "append", raw.schema())
        return
    for use in ("append", "merge", "compact"):
        with pytest.raises(LoadError, match=rf"has the table feature {feature}, .*: .*load into another table"):
            table.check(use)  # type: ignore[arg-type]
    raw = DeltaTable(tmp_path)
    with pytest.raises((DeltaError, OSError), match="Unsupported table features"):
        raw.create_write_transaction([], "append", raw.schema())


def _data_files(folder: Path) -> set[str]:
    """What there is in a folder, but for logs and journals."""
    return {path for path in open_folder(str(folder)).paths_below("") if not path.startswith(("_", "metadata/"))}


class _Load:
    """A load of records or of changes, between whose runs others write."""

    def __init__(self, servers: str, topic: str, lake: Lake, **options: Any) -> None:
        self.servers, self.topic, self.lake, self.options, self.sent = servers, topic, lake, options, 0
        create_topic(servers, topic)

    def go(self) -> None:
        """What has come, and ten records more, are in the table once."""
        self._produce()
        run(self.servers, self.lake.address, self.topic, **self.options)
        for reader, read in self.lake.readers().items():
            assert places(read()) == expected(self.topic, {0: self.sent}), reader

    def refused(self, message: str, folder: Path) -> None:
        """A run that has records changes nothing."""
        self._produce()
        before = _data_files(folder)
        journal = {
            path: (folder / "_klog" / path).read_bytes() for path in open_folder(f"{folder}/_klog").paths_below("")
        }
        for _ in range(2):
            with pytest.raises(LoadError, match=message):
                run(self.servers, self.lake.address, self.topic, **self.options)
        assert _data_files(folder) == before
        there = open_folder(f"{folder}/_klog")
        assert journal == {path: (folder / "_klog" / path).read_bytes() for path in there.paths_below("")}

    def _produce(self) -> None:
        produce(self.servers, self.topic, values(10, start=self.sent))
        self.sent += 10


def test_a_delta_table_that_others_change_between_runs(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = make_lake("delta", tmp_path, monkeypatch)
    load, folder = _Load(cluster.bootstrap_servers, topic, lake), Path(lake.uri)
    load.go()
    plain = _protocol("appendOnly", "invariants")
    _commit(folder, plain)
    for feature in ("clustering", "inCommitTimestamp", "typeWidening"):
        _commit(folder, _protocol(feature))
        load.refused(f"has the table feature {feature}", folder)
        _commit(folder, plain)
        load.go()
    _commit(folder, _protocol("columnMapping"), _configured(folder, columnMapping__mode="name"))
    load.refused(r"columnMapping\.mode=name.*'none'", folder)
    _commit(folder, plain, _configured(folder, columnMapping__mode=None))
    load.go()
    DeltaTable(folder).alter.add_constraint({"low": '"offset" >= 0'})
    load.refused("has the constraint delta.constraints.low, .* DROP CONSTRAINT low", folder)
    assert open_table(lake.address).compact(1 << 30) > 1
    DeltaTable(folder).alter.drop_constraint("low")
    load.go()
    _commit(folder, _configured(folder, appendOnly="true", enableChangeDataFeed="true"))
    load.go()
    with pytest.raises(LoadError, match=r"appends only .*'delta\.appendOnly' = 'false'"):
        open_table(lake.address).check("merge")
    assert verify(lake.address).findings == []


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("delta.generationExpression", "id * 2", "is generated"),
        ("delta.identity.start", 1, "is an identity"),
        ("delta.invariants", '{"expression": {"expression": "twice > 0"}}', "has an invariant"),
    ],
)
def test_a_column_that_is_computed_is_refused(tmp_path: Path, key: str, value: Any, words: str) -> None:
    columns = pa.schema([("id", pa.int64()), ("twice", pa.int64())])
    DeltaTable.create(tmp_path, columns)
    action = _configured(tmp_path)
    schema = json.loads(action["metaData"]["schemaString"])
    schema["fields"][1]["metadata"] = {key: value}
    action["metaData"]["schemaString"] = json.dumps(schema)
    _commit(tmp_path, action)
    with pytest.raises(LoadError, match=f"the column twice {words}, which a load does not compute: load into another"):
        DeltaLakeTable(str(tmp_path)).prepare(columns, "none", "", "load", "plan")


def test_a_constraint_that_comes_while_a_run_has_files(tmp_path: Path) -> None:
    source = Source("delta", tmp_path)
    folder = tmp_path / "table"
    source.merge([Change(1, "a", 0, 0)], 1)
    for at, (change, message) in enumerate(
        [
            (
                lambda: DeltaTable(folder).alter.add_constraint({"low": "amount >= 0"}),
                "constraint delta.constraints.low",
            ),
            (lambda: _commit(folder, _configured(folder, appendOnly="true")), "takes appends only"),
        ]
    ):
        files = written(tmp_path / f"changes {at}", [change_batch([Change(1, "b", 0, 1)])])
        table = DeltaLakeTable(str(folder))
        table.prepare(files.row, "none", "", "load", "tasks", FORMAT.key)
        change()
        with pytest.raises(LoadError, match=message):
            table.upsert(files, run_of(2))
        assert table.last_run("load") == run_of(1)
        DeltaTable(folder).alter.set_table_properties({"delta.appendOnly": "false"})
        if at == 0:
            DeltaTable(folder).alter.drop_constraint("low")
    source.merge([Change(1, "b", 0, 1)], 2)
    assert rows_in(content("delta", tmp_path)) == [(1, "b", 0.5, 0, 1)]


def test_a_change_data_feed_has_the_changes_of_merges(tmp_path: Path) -> None:
    source = Source("delta", tmp_path)
    source.merge([Change(1, "a", 0, 0), Change(2, "b", 0, 1)], 1)
    DeltaTable(tmp_path / "table").alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    start = DeltaTable(tmp_path / "table").version() + 1
    source.merge([Change(1, "c", 0, 2), Change(2, None, 0, 3), Change(3, "d", 0, 4)], 2)
    assert rows_in(content("delta", tmp_path)) == [(1, "c", 1.0, 0, 2), (3, "d", 2.0, 0, 4)]
    feed = pa.table(DeltaTable(tmp_path / "table").load_cdf(starting_version=start))
    kinds = sorted(zip(feed["id"].to_pylist(), feed["_change_type"].to_pylist(), feed["name"].to_pylist(), strict=True))
    assert kinds == [
        (1, "update_postimage", "c"),
        (1, "update_preimage", "a"),
        (2, "delete", "b"),
        (3, "insert", "d"),
    ]


def test_tables_of_letters_and_of_streams_are_looked_at_first(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path
) -> None:
    servers, letters = cluster.bootstrap_servers, tmp_path / "letters"
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b"bad")])
    table = DeltaTable.create(letters, pa.schema([("offset", pa.int64())]))
    table.alter.add_constraint({"low": '"offset" >= 0'})
    options = {"settings": WriteSettings(schema="id bigint"), "max_bad": MaxBad(1), "dead_letters": f"delta:{letters}"}
    with pytest.raises(LoadError, match=r"letters has the constraint delta\.constraints\.low"):
        run(servers, tmp_path / "out", topic, **options)
    assert not list((tmp_path / "out").rglob("manifest*.json"))
    with pytest.raises(LoadError, match=r"letters has the constraint delta\.constraints\.low"):
        upsert(f"delta:{letters}", stream="s")(None, 1)  # type: ignore[arg-type]
    DeltaTable(letters).alter.drop_constraint("low")
    assert run(servers, tmp_path / "out", topic, **options).bad == 1
    assert DeltaTable(letters).to_pyarrow_table()["offset"].to_pylist() == [0]


def test_an_iceberg_table_that_others_change_between_runs(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = make_lake("iceberg", tmp_path, monkeypatch)
    load = _Load(cluster.bootstrap_servers, topic, lake)
    load.go()
    folder = Path(open_table(lake.address).location.removeprefix("file://"))

    def table() -> Any:
        return lake.catalog.load_table(lake.name)

    with table().update_schema() as update:
        update.rename_column("value", "payload")
    load.refused("the column value, which has values of the load, was renamed to payload: rename it back", folder)
    with table().update_schema() as update:
        update.rename_column("payload", "value")
    load.go()
    with table().update_spec() as spec:
        spec.add_field("offset", BucketTransform(4), "of_offset")
    load.refused(r"is partitioned by the bucket\[4\] of offset.*: give --partition-by", folder)
    with table().update_spec() as spec:
        spec.remove_field("of_offset")
    load.go()
    with table().update_schema(allow_incompatible_changes=True) as update:
        update.add_column("who", StringType(), required=True)
    load.refused("who is required in the table", folder)
    with table().update_schema() as update:
        update.delete_column("who")
    load.go()
    path = Path(table().metadata_location.removeprefix("file://"))
    text = path.read_text()
    later = json.dumps(json.loads(text) | {"format-version": 3, "next-row-id": 0})
    path.write_text(later)
    load.refused("has format version 3: .*: load into another table", folder)
    for call in (lambda: open_table(lake.address).compact(1 << 30), lambda: open_table(lake.address).check("merge")):
        with pytest.raises(LoadError, match="has format version 3"):
            call()
    path.write_text(later.replace('"binary"', '"variant"'))
    load.refused("has something that pyiceberg can't read, such as a type", folder)
    path.write_text(text)
    load.go()
    head = table().metadata.current_snapshot_id
    table().manage_snapshots().rollback_to_snapshot(table().metadata.current_snapshot().parent_snapshot_id).commit()
    load.refused("was rolled back: run .* is not in the history of its current snapshot", folder)
    table().manage_snapshots().set_current_snapshot(head).commit()
    table().manage_snapshots().create_tag(head, "kept").create_branch(head, "side").commit()
    load.go()
    assert verify(lake.address).findings == []


def test_records_that_others_delete_by_values(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Flink does (equality deletes): the load goes on, `verify` counts what readers see, compactions leave them."""
    servers, lake = cluster.bootstrap_servers, make_lake("iceberg", tmp_path, monkeypatch)
    create_topic(servers, topic)
    for start in (0, 10):
        produce(servers, topic, values(10, start=start))
        run(servers, lake.address, topic)
        if not start:
            table = lake.catalog.load_table(lake.name)
            [task] = table.scan().plan_files()
            for offset in (3, 4, 9, 15):  # which comes later
                table = lake.catalog.load_table(lake.name)
                delete_by_file(table, task.file, offset, DataFileContent.EQUALITY_DELETES)
    there = open_table(lake.address)
    left = [one for one in range(20) if one not in (3, 4, 9)]
    for _ in range(2):
        assert sorted(pa.Table.from_batches(there.rows(["offset"]))["offset"].to_pylist()) == left
        for with_hash in (False, True):
            result = verify(lake.address, {"bootstrap.servers": servers}, with_hash=with_hash)
            assert result.partitions[0].in_files == 17
            assert result.findings[0].what == "[0, 10): 3 of 10 records are missing"
        assert there.compact(1 << 30) == 0


def test_deletes_by_values_of_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of each delete file are hashed and sorted once, each file's rows hashed; rows of one hash are told
    apart."""
    catalog = load_catalog("local", **catalog_options(tmp_path))
    catalog.create_namespace("space")
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "name", StringType()))
    table = catalog.create_table("space.table", schema, properties={"format-version": "2"})
    names = [None, "", "a", "b"]
    for first in range(0, 40, 10):
        some = [names[number % 4] for number in range(first, first + 10)]
        table.append(pa.table({"id": range(first, first + 10), "name": some}))
    gone: list[tuple[int, str | None]] = [(20, None), (3, "b"), (4, None), (13, ""), (16, None), (39, "a"), (40, None)]
    deletes = []
    for number, pair in enumerate(gone):
        path = tmp_path / f"delete-{number}.parquet"
        pq.write_table(pa.Table.from_pylist([dict(zip(("id", "name"), pair, strict=True))], to_arrow(schema)), path)
        deletes.append(
            DataFile.from_args(
                content=DataFileContent.EQUALITY_DELETES,
                file_path=str(path),
                file_format=FileFormat.PARQUET,
                record_count=1,
                equality_ids=[1, 2],
            )
        )
        deletes[-1].spec_id = 0
    hashed: list[int] = []
    real = iceberg_rows.slots

    def slots(rows: pa.Table, key: list[str], count: int) -> Any:
        hashed.append(len(rows))
        return real(rows, key, count) % 3

    monkeypatch.setattr(iceberg_rows, "slots", slots)
    rows, found, sorted_at = Rows(table), [], []
    made = iceberg_rows._Gone.__init__
    monkeypatch.setattr(iceberg_rows._Gone, "__init__", lambda *args: (sorted_at.append(len(found)), made(*args))[1])
    for number, each in enumerate(rows.files()):
        live = LiveFile(each.file, (), deletes[number:])
        [batch] = rows.batches(live, to_arrow(schema), np.zeros(0, np.int64))
        found += [tuple(batch.slice(number, 1).to_pylist()[0].values()) for number in rows.deleted(live).tolist()]
    # two are of rows that are not there, and one is older than its row
    assert found == [(3, "b"), (4, None), (13, ""), (16, None)]
    assert sorted_at == [0], "what the oldest file has lost is sorted once for all of them"
    assert sorted(hashed) == [*[1] * len(gone), *[10] * 4]


def test_deletes_by_values_of_a_spec_whose_fields_were_dropped(tmp_path: Path) -> None:
    """They are for the whole table: format version 1 keeps dropped fields, as of the transform void."""
    catalog = load_catalog("local", **catalog_options(tmp_path))
    catalog.create_namespace("space")
    spec = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "id"))
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "name", StringType()))
    table = catalog.create_table("space.table", schema, partition_spec=spec, properties={"format-version": "1"})
    table.append(pa.table({"id": [1, 1], "name": ["a", "b"]}))
    [of_spec] = [one.file for one in Rows(table).files()]
    with table.update_spec() as update:
        update.remove_field("id")
    with table.transaction() as transaction:
        transaction.upgrade_table_version(2)
    table.append(pa.table({"id": [1], "name": ["a"]}))
    [newest] = [one.file for one in Rows(table).files() if one.file.spec_id != of_spec.spec_id]
    delete_by_file(table, newest, "a", DataFileContent.EQUALITY_DELETES, column="name")
    there = IcebergTable("local.space.table", catalog_options(tmp_path))
    assert pa.Table.from_batches(there.rows(["name"]))["name"].to_pylist() == ["b"]
    assert there.compact(1 << 30) == 0


@pytest.mark.parametrize("is_partitioned", [False, True])
def test_rows_that_others_delete_by_values_come_back(tmp_path: Path, is_partitioned: bool) -> None:
    source = Source("iceberg", tmp_path)
    if is_partitioned:
        with load_catalog("local", **catalog_options(tmp_path)).load_table("space.table").update_spec() as spec:
            spec.add_field("id", BucketTransform(2), "of_id")
    table = source.table
    name = {number: None if number == 7 else "ab"[number % 2] for number in range(8)}

    def delete(column: str, value: Any) -> None:
        place = load_catalog("local", **catalog_options(tmp_path)).load_table("space.table")
        files = [one.file for one in Rows(place).files()]
        for file in {one.partition: one for one in files}.values():
            place.refresh()
            delete_by_file(place, file, value, DataFileContent.EQUALITY_DELETES, column=column)

    def check(*ids: int) -> None:
        assert sorted(pa.Table.from_batches(table.rows(["id"]))["id"].to_pylist()) == list(ids)

    source.merge([Change(number, name[number] or "", 0, number) for number in range(8)], 1)
    check(*range(8))
    delete("id", 2)
    delete("name", "a")
    check(1, 3, 5, 7)
    source.merge([Change(2, "a", 0, 20), Change(3, None, 0, 21), Change(5, "c", 0, 22)], 2)
    check(1, 2, 5, 7)
    if is_partitioned:  # a file of a partition without changes stays
        return
    assert not table.deleted_rows()
    read = duckdb.read_parquet([f"{table.location.removeprefix('file://')}/{one.path}" for one in table.files()])
    assert sorted(read.select("id, name").fetchall()) == [(1, "b"), (2, "a"), (5, "c"), (7, "")]
