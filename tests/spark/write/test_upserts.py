"""Streams whose micro-batches are merged into tables by `spark_klog.tables.upsert`."""

from __future__ import annotations

import json
import random
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyiceberg.utils.config import Config
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession, functions as F

from spark_klog.client import Admin
from spark_klog.errors import ConfigError, LoadError
from spark_klog.tables import stream_upserts, upsert
from spark_klog.tables.opening import open_table
from tests.spark.support import Sent, create_topic, produce

_ROW = "id bigint, name string"
_ENVELOPE = f"before struct<{_ROW}>, after struct<{_ROW}>, op string"


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    properties = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/iceberg"}
    for name, value in properties.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__LOCAL__{name.upper()}", value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # it has read the environment at its import
    return load_catalog("local")


def _changes(count: int, seed: int) -> tuple[list[Sent], dict[int, str]]:
    """Records of random changes, of rows as JSON with the id as the key; and the rows that they leave."""
    chance = random.Random(seed)
    rows: dict[int, str] = {}
    sent = []
    for number in range(count):
        key = chance.randrange(40)
        if chance.random() < 0.2:
            rows.pop(key, None)
            value = None
        else:
            rows[key] = f"name {number}"
            value = json.dumps({"id": key, "name": rows[key]}).encode()
        sent.append(Sent(value, b"%d" % key, key % 2))
    return sent, rows


def _of_rows(frame: DataFrame) -> DataFrame:
    """The records with a struct as the key and as the value."""
    key = F.struct(F.col("key").cast("string").cast("bigint").alias("id")).alias("key")
    value = F.from_json(F.col("value").cast("string"), _ROW).alias("value")
    return frame.select(key, value, "topic", "partition", "offset", "timestamp")


def _follow(spark: SparkSession, servers: str, topic: str, checkpoint: Path, write: Any, rows: bool = True) -> None:
    frame = spark.readStream.format("klog").option("kafka.bootstrap.servers", servers).option("subscribe", topic)
    frame = frame.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 120).load()
    writer = (_of_rows(frame) if rows else frame).writeStream.foreachBatch(write)
    writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()


def _forget_last(log: Path) -> None:
    """Leave the commits of a checkpoint as a driver does that is killed before it says that a micro-batch is done."""
    last = max((path for path in log.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    last.unlink()
    (log / f".{last.name}.crc").unlink(missing_ok=True)


@pytest.mark.test_all("long")
def test_a_table_follows_a_topic(spark: SparkSession, servers: str, topic: str, tmp_path: Path, catalog: Any) -> None:
    """A micro-batch that runs again changes nothing; both formats have the rows of the model."""
    create_topic(servers, topic, 2)
    sent, rows = _changes(400, 1)
    produce(servers, topic, sent)
    address, checkpoint = f"delta:{tmp_path}/table", tmp_path / "checkpoint"
    both = [upsert(address), upsert("iceberg:local.space.rows")]

    def write(frame: DataFrame, batch_id: int) -> None:
        for each in both:
            each(frame, batch_id)

    def check(rows: dict[int, str]) -> None:
        delta = DeltaTable(tmp_path / "table").to_pyarrow_table()
        iceberg = catalog.load_table("space.rows").scan().to_arrow()
        for found in (delta, iceberg):
            pairs = zip(found["id"].to_pylist(), found["name"].to_pylist(), strict=True)
            assert sorted(pairs) == sorted(rows.items())

    _follow(spark, servers, topic, checkpoint, write)
    check(rows)
    before = DeltaTable(tmp_path / "table").version(), catalog.load_table("space.rows").metadata.current_snapshot_id
    _forget_last(checkpoint / "commits")
    _follow(spark, servers, topic, checkpoint, write)
    after = DeltaTable(tmp_path / "table").version(), catalog.load_table("space.rows").metadata.current_snapshot_id
    assert before == after
    assert not list((tmp_path / "table" / "_klog" / "changes").iterdir())

    more, changed = _changes(200, 2)
    produce(servers, topic, more)
    _follow(spark, servers, topic, checkpoint, write)
    untouched = {key: name for key, name in rows.items() if b"%d" % key not in {each.key for each in more}}
    check(untouched | changed)

    # a checkpoint from a backup: Spark plans the last micro-batch anew, with records that the table has not
    _forget_last(checkpoint / "commits")
    newest = max(
        (path for path in (checkpoint / "offsets").iterdir() if path.name.isdigit()), key=lambda p: int(p.name)
    )
    newest.unlink()
    (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)
    produce(servers, topic, [Sent(b'{"id": 1000, "name": "new"}', b"1000")])
    _follow(spark, servers, topic, checkpoint, write)
    changed[1000] = "new"
    check(untouched | changed)

    # a new checkpoint reads all of it again, and the table ends as it was
    _follow(spark, servers, topic, tmp_path / "another", write)
    check(untouched | changed)
    last = open_table(address).last_run("spark_klog.tables.upsert")
    assert last is not None
    assert len(last.offsets) == 2


@pytest.mark.test_all("long")
def test_two_upserts_into_a_table_have_names(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    create_topic(servers, topic, 2)
    produce(servers, topic, _changes(20, 3)[0])
    address = f"delta:{tmp_path}/table"

    def write(frame: DataFrame, batch_id: int, *names: str) -> None:
        for name in names:
            upsert(address, name=name)(frame.where(f"partition = {len(name)}"), batch_id)

    with pytest.raises(PySparkException, match="give each a name="):
        _follow(spark, servers, topic, tmp_path / "bad", lambda *batch: write(*batch, "", ""))
    _follow(spark, servers, topic, tmp_path / "good", lambda *batch: write(*batch, "", "a"))
    assert set(DeltaTable(tmp_path / "table").to_pyarrow_table()["_klog_partition"].to_pylist()) == {0, 1}


@pytest.mark.test_all("long")  # tests/load/test_upserts.py has it without Spark
def test_debeziums_envelope(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    """A micro-batch that runs again changes nothing; one of a topic that was created again is refused by name."""
    create_topic(servers, topic, 1)
    ada, bob = {"id": 1, "name": "Ada"}, {"id": 2, "name": "Bob"}
    events: list[Any] = [
        {"before": None, "after": ada, "op": "c"},
        {"before": None, "after": bob, "op": "r"},
        {"before": ada, "after": {"id": 1, "name": "Ada L."}, "op": "u"},
        {"before": bob, "after": None, "op": "d"},
        None,
    ]
    produce(servers, topic, [Sent(None if each is None else json.dumps(each).encode(), b"k") for each in events])
    incarnation: int | None = None

    def write(frame: DataFrame, batch_id: int) -> None:
        merge = upsert(f"delta:{tmp_path}/table", key="id", envelope="debezium", stream="s", incarnation=incarnation)
        merge(frame.withColumn("value", F.from_json(F.col("value").cast("string"), _ENVELOPE)), batch_id)

    _follow(spark, servers, topic, tmp_path / "checkpoint", write, rows=False)
    found = DeltaTable(tmp_path / "table").to_pyarrow_table().select(["id", "name", "_klog_offset"]).to_pylist()
    assert found == [{"id": 1, "name": "Ada L.", "_klog_offset": 2}]
    version = DeltaTable(tmp_path / "table").version()
    _forget_last(tmp_path / "checkpoint" / "commits")
    _follow(spark, servers, topic, tmp_path / "checkpoint", write, rows=False)
    assert DeltaTable(tmp_path / "table").version() == version

    # what a driver that was killed has left goes, and what is of other queries stays
    changes = tmp_path / "table" / "_klog" / "changes"
    mine, theirs = (changes / f"{sha256(name).hexdigest()[:16]}-left" for name in (b"s", b"t"))
    for folder in (mine, theirs):
        folder.mkdir(parents=True)
        (folder / "x.parquet").write_bytes(b"")
    stream_upserts._merged_ends.clear()
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.delete_topic(topic)
    create_topic(servers, topic, 1)
    again = {"before": None, "after": {"id": 1, "name": "Ada again"}, "op": "c"}
    produce(servers, topic, [Sent(json.dumps(again).encode(), b"k", timestamp=1_800_000_000_000)])
    batch = spark.read.format("klog").option("kafka.bootstrap.servers", servers).option("subscribe", topic).load()
    with pytest.raises(LoadError, match=r"created again. Give upsert\(incarnation=1\)"):
        write(batch, 0)
    assert DeltaTable(tmp_path / "table").version() == version
    incarnation = 1
    write(batch, 0)
    found = DeltaTable(tmp_path / "table").to_pyarrow_table().select(["id", "name", "_klog_incarnation"]).to_pylist()
    assert found == [{"id": 1, "name": "Ada again", "_klog_incarnation": 1}]
    assert list(changes.iterdir()) == [theirs]


def test_what_a_frame_needs(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.sql("SELECT 1 AS id, 'a' AS name")
    with pytest.raises(ConfigError, match="stream= that stands for it"):
        upsert(f"delta:{tmp_path}")(frame, 0)
    with pytest.raises(ConfigError, match="has no column key: an upsert needs key, value, topic"):
        upsert(f"delta:{tmp_path}", stream="mine")(frame, 0)
    with pytest.raises(ConfigError, match="not the address of a table"):
        upsert(str(tmp_path))
    with pytest.raises(ConfigError, match="the upsert key is empty"):
        upsert(f"delta:{tmp_path}", key=[])
