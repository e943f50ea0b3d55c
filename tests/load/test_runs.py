"""What a run writes (formats, layouts, file sizes), bounds, the audit, and what a run rejects."""

from __future__ import annotations

import json
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from spark_klog.client import Producer as Writer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, DataLossError, LoadError
from spark_klog.files.folder import LocalFolder
from spark_klog.load import files
from spark_klog.load.audit import status
from spark_klog.load.commit import check_results
from spark_klog.load.journal import paths
from spark_klog.load.journal.model import FileEntry, Range, RangeResult
from spark_klog.load.planning import Limits
from spark_klog.load.run import LoadOptions, MaxBad, load
from spark_klog.load.settings import WriteSettings
from spark_klog.load.tasks import task, time_limit
from tests.load.conftest import CORRUPT, COUNT, EACH
from tests.load.support import InProcess, by_duckdb, by_pyarrow, expected, run
from tests.spark.support import Sent, create_topic, delete_records, produce, values, wait_for
from tests.support.clients.klog import klog
from tests.support.servers.kafka import NEWEST
from tests.support.servers.shared_kafka import SharedKafkas

_HOUR_MS = 3_600_000
_TIME = 1_700_002_800_000  # 2023-11-14T23:00Z


def test_columns_and_values(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    sent = [
        Sent(b"one", b"k", 0, _TIME, (("a", b"1"), ("b", None))),
        Sent(None, None, 0, _TIME + 1),
        Sent(b"\xff\x00", b"", 0, _TIME + 2),
    ]
    produce(servers, topic, sent)
    for name in ("parquet", "arrow", "json"):
        run(servers, tmp_path / name, topic, settings=WriteSettings(name, "none"))
    for name in ("parquet", "arrow"):
        rows = ds.dataset(tmp_path / name, format=name).to_table().to_pylist()
        assert [(row["key"], row["value"], row["topic"], row["partition"], row["offset"]) for row in rows] == [
            (item.key, item.value, topic, 0, offset) for offset, item in enumerate(sent)
        ]
        assert [row["timestamp"] for row in rows] == [
            datetime.fromtimestamp(item.timestamp / 1000, timezone.utc) for item in sent
        ]
        assert [row["headers"] for row in rows] == [
            [{"key": "a", "value": b"1"}, {"key": "b", "value": None}],
            None,
            None,
        ]
    [lines] = (tmp_path / "json").glob(f"{topic}/*.jsonl")
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(item["key"], item["value"], item["timestamp"]) for item in records] == [
        ("k", "one", _TIME),
        (None, None, _TIME + 1),
        ("", {"base64": "/wA="}, _TIME + 2),
    ]
    assert records[0]["headers"] == [{"key": "a", "value": "1"}, {"key": "b", "value": None}]


@pytest.mark.peer
def test_from_kafka(shared_kafkas: SharedKafkas, topic: str, tmp_path: Path) -> None:
    """Runs go on where the last one ended; what a transaction has aborted, and its markers, are not loaded."""
    servers = shared_kafkas.get(NEWEST).bootstrap_servers
    create_topic(servers, topic, 2)
    produce(servers, topic, values(100, partitions=2))
    run(servers, tmp_path, topic)
    with Writer({"bootstrap.servers": servers, "transactional.id": topic}) as writer:
        writer.init_transactions()
        for is_committed in (False, True):
            writer.begin_transaction()
            for number in range(10):
                writer.send(topic, b"%d" % number, partition=number % 2)
            writer.flush()
            (writer.commit_transaction if is_committed else writer.abort_transaction)()
    asked = LoadOptions({"bootstrap.servers": servers, "isolation.level": "read_committed"}, [topic], str(tmp_path))
    load(asked, InProcess())
    kept = [*range(50), *range(56, 61)]  # five that were aborted and their marker, five that count
    assert by_duckdb(tmp_path) == [(topic, partition, offset) for partition in range(2) for offset in kept]


@pytest.mark.parametrize(
    ("format_name", "codec"),
    [
        ("parquet", "snappy"),
        ("parquet", "gzip"),
        ("arrow", "zstd"),
        ("arrow", "lz4"),
        ("json", "gzip"),
        ("json", "zstd"),
    ],
)
def test_formats_and_codecs(cluster: EmbeddedCluster, topic: str, tmp_path: Path, format_name: str, codec: str) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    produce(servers, topic, values(200, partitions=2))
    run(servers, tmp_path, topic, settings=WriteSettings(format_name, codec))
    if format_name == "json":
        found = duckdb.sql(f"SELECT topic, partition, \"offset\" FROM read_json('{tmp_path}/{topic}/*') ORDER BY ALL")
        assert found.fetchall() == expected(topic, {0: 100, 1: 100})
    else:
        assert by_pyarrow(tmp_path, format_name) == expected(topic, {0: 100, 1: 100})
    if format_name == "parquet":
        paths = [item.path for item in files(str(tmp_path))]
        assert {pq.ParquetFile(path).metadata.row_group(0).column(0).compression for path in paths} == {codec.upper()}


def test_row_groups_and_files_by_size(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    rows = 200_000
    produce(servers, topic, [Sent(b"%020d" % number, None, 0, _TIME + number) for number in range(rows)])
    settings = WriteSettings(row_group_rows=65_536, file_bytes=1, dictionary=("topic",))
    run(servers, tmp_path, topic, settings=settings)
    found = files(str(tmp_path))
    assert len(found) > 2
    assert [item.first for item in found] == [0, *(item.last + 1 for item in found[:-1])]
    assert found[-1].last == rows - 1
    for item in found:
        metadata = pq.ParquetFile(item.path).metadata
        assert metadata.num_rows == item.records == item.last - item.first + 1
        group = metadata.row_group(0)
        by_name = {group.column(index).path_in_schema: group.column(index) for index in range(group.num_columns)}
        assert by_name["topic"].has_dictionary_page
        assert not by_name["value"].has_dictionary_page
    whole = tmp_path / "whole"
    run(servers, whole, topic, settings=WriteSettings(row_group_rows=70_000))
    metadata = [pq.ParquetFile(item.path).metadata for item in files(str(whole))]
    assert sum(item.num_rows for item in metadata) == rows
    for item in metadata:
        groups = [item.row_group(index).num_rows for index in range(item.num_row_groups)]
        assert all(count >= 70_000 for count in groups[:-1])


@pytest.mark.parametrize("layout", ["hour", "day"])
def test_layout_by_time(cluster: EmbeddedCluster, topic: str, tmp_path: Path, layout: str) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    # 60 hours with late records, more than the files that a task keeps open
    times = [_TIME + (number * 7 % 60) * _HOUR_MS for number in range(600)]
    produce(servers, topic, [Sent(b"v", None, 0, when) for when in times])
    run(servers, tmp_path, topic, settings=WriteSettings(layout=layout))
    assert by_duckdb(tmp_path) == expected(topic, {0: 600})
    for path in tmp_path.rglob("*.parquet"):
        parts = dict(part.split("=") for part in path.parts if "=" in part)
        found = {
            (when.strftime("%Y-%m-%d"), when.strftime("%H")) if layout == "hour" else (when.strftime("%Y-%m-%d"),)
            for when in pq.ParquetFile(path).read(["timestamp"])["timestamp"].to_pylist()
        }
        assert found == {tuple(parts.values())}
    hours = status(str(tmp_path)).hours[topic]
    assert hours == {
        datetime.fromtimestamp(hour / 1000, timezone.utc).strftime("%Y-%m-%dT%H"): 10
        for hour in range(_TIME, _TIME + 60 * _HOUR_MS, _HOUR_MS)
    }


def test_names_that_readers_would_skip(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers, hidden = cluster.bootstrap_servers, f"_{topic}"
    create_topic(servers, hidden)
    produce(servers, hidden, values(10))
    run(servers, tmp_path, hidden)
    assert by_pyarrow(tmp_path) == by_duckdb(tmp_path) == expected(hidden, {0: 10})


def test_a_name_that_is_too_long_for_files(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """The name is rejected before a plan is written: every later run would start with that plan, and fail."""
    servers, long = cluster.bootstrap_servers, f"{topic}-".ljust(230, "x")
    for name in (topic, long):
        create_topic(servers, name)
        produce(servers, name, values(10))
    run(servers, tmp_path, topic)
    produce(servers, topic, values(10))
    with pytest.raises(ConfigError, match=f"topic {long}.*bytes.*object store"):
        run(servers, tmp_path, topic, long)
    run(servers, tmp_path, topic)
    assert by_duckdb(tmp_path) == expected(topic, {0: 20})
    fitting = topic.ljust(190, "x")
    create_topic(servers, fitting)
    produce(servers, fitting, values(10))
    run(servers, tmp_path, topic, fitting)
    assert len(by_duckdb(tmp_path)) == 30


def test_bounds(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    produce(servers, topic, values(1000, partitions=2))
    loaded = run(servers, tmp_path, topic, limits=Limits(max_records=300))
    assert [(item.until, item.lag) for item in loaded.partitions] == [(150, 350), (150, 350)]
    loaded = run(servers, tmp_path, topic, limits=Limits(max_bytes=1))
    assert all(150 < item.until <= 160 for item in loaded.partitions)
    run(servers, tmp_path, topic)
    assert by_duckdb(tmp_path) == expected(topic, {0: 500, 1: 500})


def test_a_run_that_is_out_of_time_keeps_what_it_has(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    produce(servers, topic, [Sent(b"x" * 1000, None, number % 2, _TIME) for number in range(4000)])
    real = task._RangeLoad.fetched

    def fetched(*arguments: Any) -> bool:
        wait_for((tmp_path / "_klog/runs/00000001/time/over").exists, "the end of the time")
        return real(*arguments)

    class Slow(InProcess):
        """Spark's start takes longer than the limit."""

        def run(self, tasks: Any, job: Any) -> None:
            time.sleep(0.1)
            super().run(tasks, job)

    client = {"max.partition.fetch.bytes": "100000", "bootstrap.servers": servers}
    with monkeypatch.context() as patch:
        patch.setattr(time_limit, "_INTERVAL_S", 0.01)
        patch.setattr(task._RangeLoad, "fetched", fetched)
        loaded = load(LoadOptions(client, [topic], str(tmp_path), max_seconds=0.05), Slow())
    first, second = loaded.partitions
    assert 0 < first.until < 2000
    assert second.until == 0
    assert by_duckdb(tmp_path) == expected(topic, {0: first.until})
    run(servers, tmp_path, topic)
    assert by_duckdb(tmp_path) == expected(topic, {0: 2000, 1: 2000})


def test_nothing_new(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    loaded = run(servers, tmp_path, topic)
    assert loaded.runs == []
    assert [(item.start, item.until, item.lag) for item in loaded.partitions] == [(0, 0, 0)] * 2
    produce(servers, topic, values(3))
    assert run(servers, tmp_path, topic).runs == [1]
    assert run(servers, tmp_path, topic).runs == []


def test_a_corrupt_batch_fails_the_run(cluster: EmbeddedCluster, corrupt: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    with pytest.raises(LoadError, match="1 bad record batches or values, more than --max-bad 0"):
        run(servers, tmp_path, corrupt)
    assert by_duckdb(tmp_path) == []
    assert len(list((tmp_path / paths.LETTERS).iterdir())) == 1
    loaded = run(servers, tmp_path, corrupt, max_bad=MaxBad(1))
    assert loaded.bad == 1
    assert [(item.gaps, item.bad, item.unexplained) for item in loaded.partitions] == [
        ({"corrupt": EACH}, 1, 0),
        ({}, 0, 0),
    ]
    rest = [offset for offset in range(COUNT * EACH) if offset // EACH != CORRUPT]
    assert by_duckdb(tmp_path) == [(corrupt, 0, offset) for offset in rest] + [(corrupt, 1, n) for n in range(50)]
    assert status(str(tmp_path)).findings == []


def test_one_partition_that_fails_stops_no_other(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of partition 0 are deleted between the plan and the tasks; partition 1 is loaded all the same."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    produce(servers, topic, values(400, partitions=2))

    class Late(InProcess):
        def run(self, tasks: Any, job: Any) -> None:
            delete_records(servers, topic, {0: 120})
            super().run(tasks, job)

    options = LoadOptions({"bootstrap.servers": servers}, [topic], str(tmp_path), max_task_records=50)
    loaded = load(options, Late())
    assert [item.until for item in loaded.partitions] == [0, 200]
    assert "retention" in loaded.partitions[0].error
    assert [item.topic for item in loaded.failed] == [topic]
    assert by_duckdb(tmp_path) == [(topic, 1, offset) for offset in range(200)]
    assert status(str(tmp_path)).findings == []

    with pytest.raises(DataLossError, match="retention"):
        run(servers, tmp_path, topic)
    loaded = run(servers, tmp_path, topic, fail_on_loss=False)
    assert [item.until for item in loaded.partitions] == [200, 200]
    assert by_duckdb(tmp_path) == [(topic, 0, offset) for offset in range(120, 200)] + [
        (topic, 1, offset) for offset in range(200)
    ]
    [finding] = status(str(tmp_path)).findings
    assert "[0, 120) lost" in finding.what
    assert "retention" in finding.what


def test_transactions_are_gaps_with_a_name(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    producer = Producer({"bootstrap.servers": servers, "transactional.id": topic, "log_level": 0})
    producer.init_transactions(30)
    for number in range(3):
        producer.begin_transaction()
        for index in range(10):
            producer.produce(topic, b"%d" % index, partition=0)
        if number == 1:
            producer.flush(30)
            producer.abort_transaction(30)
        else:
            producer.commit_transaction(30)

    client = {"bootstrap.servers": servers, "isolation.level": "read_committed"}
    [item] = load(LoadOptions(client, [topic], str(tmp_path)), InProcess()).partitions
    assert (item.until, item.records, item.gaps, item.unexplained) == (33, 20, {"transactions": 13}, 0)
    offsets = [*range(10), *range(22, 32)]
    assert by_duckdb(tmp_path) == [(topic, 0, offset) for offset in offsets]


@pytest.mark.parametrize("fail_on_loss", [True, False])
def test_read_committed_after_read_uncommitted(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, fail_on_loss: bool
) -> None:
    """Records of an open transaction, once loaded, are neither reported lost nor loaded again."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    producer = Producer({"bootstrap.servers": servers, "transactional.id": topic, "log_level": 0})
    producer.init_transactions(30)
    producer.begin_transaction()
    for index in range(10):
        producer.produce(topic, b"%d" % index, partition=0)
    producer.flush(30)
    run(servers, tmp_path, topic)
    client = {"bootstrap.servers": servers, "isolation.level": "read_committed"}
    options = LoadOptions(client, [topic], str(tmp_path), fail_on_loss=fail_on_loss)
    [item] = load(options, InProcess()).partitions
    assert item.until == 10
    producer.commit_transaction(30)
    [item] = load(options, InProcess()).partitions
    assert item.until == 11
    assert by_duckdb(tmp_path) == expected(topic, {0: 10})


def test_a_topic_that_was_created_again(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, values(30))
    run(servers, tmp_path, topic)
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    admin.delete_topics([topic])[topic].result(timeout=30)
    wait_for(lambda: topic not in admin.list_topics(timeout=60).topics, "the topic is deleted")
    create_topic(servers, topic)
    produce(servers, topic, values(30))
    with pytest.raises(DataLossError, match="recreated"):
        run(servers, tmp_path, topic)
    run(servers, tmp_path, topic, fail_on_loss=False)
    assert by_duckdb(tmp_path) == sorted(expected(topic, {0: 30}) * 2)
    assert len(files(str(tmp_path))) == 2
    run(servers, tmp_path, topic)  # the load has recorded the new topic


def test_outputs_of_others(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, values(3))
    run(servers, tmp_path, topic)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(LoadError, match="belongs to a load with --format parquet, not arrow"):
        run(servers, tmp_path, topic, settings=WriteSettings("arrow"))
    # With two layouts, Spark would silently read the files of one of them, or of none.
    with pytest.raises(LoadError, match="belongs to a load with --partition-by none, not with --partition-by day"):
        run(servers, tmp_path, topic, settings=WriteSettings(layout="day"))
    assert {path: path.read_bytes() for path in before} == before
    identity = tmp_path / "_klog" / "load.json"
    [cluster_id] = [value for name, value in json.loads(identity.read_text()).items() if name == "cluster_id"]
    identity.write_text(identity.read_text().replace(cluster_id, "another"))
    with pytest.raises(LoadError, match="belongs to a load of cluster another"):
        run(servers, tmp_path, topic)
    identity.write_bytes(before[identity])
    with pytest.raises(LoadError, match="no-such-topic does not exist"):
        run(servers, tmp_path / "new", "no-such-topic")
    assert not (tmp_path / "new").exists()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_first_call_that_found_no_records_binds_nobody(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Nothing is written by its format, schema and cluster: the next call may have others."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    run(servers, tmp_path, topic)
    identity = tmp_path / "_klog" / "load.json"
    before = json.loads(identity.read_text())
    identity.write_text(identity.read_text().replace(before["cluster_id"], "another"))
    run(servers, tmp_path, topic, settings=WriteSettings("arrow", schema="n bigint"))  # still nothing
    after = json.loads(identity.read_text())
    assert after == {**before, "format": "arrow", "schema": "n bigint"}
    produce(servers, topic, values(3))
    run(servers, tmp_path, topic, settings=WriteSettings("json", "none"))
    assert json.loads(identity.read_text()) == {**before, "format": "json"}
    assert len(files(str(tmp_path))) == 1
    assert status(str(tmp_path)).findings == []
    with pytest.raises(LoadError, match="belongs to a load with --format json, not parquet"):
        run(servers, tmp_path, topic)


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("_klog/latest.json", '"00000002"', '"00000009"', "names run 00000009, which is not committed"),
        ("_klog/latest.json", '"00000002"', '"x"', "names no run"),
        ("_klog/latest.json", "{", "", "is not JSON"),
        (
            "_klog/latest.json",
            '"version": 1',
            '"version": 2',
            "latest.json has version 2, and this klog reads",
        ),
        ("_klog/runs/00000002/manifest.json", '"offset": 20', '"offset": -20', "offset: -20"),
        ("_klog/runs/00000002/manifest.json", '"version": 1', '"version": 7', "version 7"),
        ("_klog/runs/00000002/manifest.json", '"finished"', '"ended"', "without finished"),
        ("_klog/load.json", '"format"', '"kind"', "without format"),
        ("_klog/load.json", '"format": "parquet",', "", "without format"),
    ],
)
def test_files_that_were_edited(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, name: str, old: str, new: str, words: str
) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    for start in (0, 10):
        produce(servers, topic, values(10, start))
        run(servers, tmp_path, topic)
    path = tmp_path / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    before = by_duckdb(tmp_path)
    produce(servers, topic, values(10, 20))
    with pytest.raises(LoadError, match=words) as found:
        run(servers, tmp_path, topic)
    assert str(path) in str(found.value)
    assert by_duckdb(tmp_path) == before


def test_the_audit_finds_what_is_missing(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    for start in (0, 10, 20):
        produce(servers, topic, values(10, start))
        run(servers, tmp_path, topic)
    [first, second, _] = files(str(tmp_path))
    mistyped = klog("load", "files", str(tmp_path), "--topic", "nope")
    assert (mistyped.stdout, mistyped.stderr) == ("", "klog: the load has no files of topic nope\n")
    Path(first.path).unlink()
    Path(second.path).write_bytes(b"short")
    manifest = tmp_path / "_klog/runs/00000003/manifest.json"
    found = json.loads(manifest.read_text())
    found["partitions"][0] |= {"start": 25, "records": 4}
    manifest.write_text(json.dumps(found))
    words = [item.what for item in status(str(tmp_path)).findings]
    assert [word.split(" ", 2)[2] if word.startswith("file") else word for word in words] == [
        "is missing",
        f"has 5 bytes, not {second.size}",
        "1 offsets of run 00000003 have neither record nor cause",
        "[20, 25) is in no run, and offsets after it are: --from-offsets loads it",
    ]


def test_settings() -> None:
    with pytest.raises(ConfigError, match="format 'orc' must be parquet, arrow or json"):
        WriteSettings("orc")
    with pytest.raises(ConfigError, match="compression 'snappy' of format arrow must be"):
        WriteSettings("arrow", "snappy")
    with pytest.raises(ConfigError, match="no column nothing"):
        WriteSettings(dictionary=("nothing",))
    with pytest.raises(ConfigError, match="dictionary is for format parquet, not json: leave it out"):
        WriteSettings("json", "none", dictionary=("topic",))


def test_a_file_that_is_not_as_it_was_written_is_not_committed(tmp_path: Path) -> None:
    store, asked = LocalFolder(tmp_path, LoadError), Range("t", 0, 0, 3)
    path = paths.file(asked, 0, 2, "", paths.new_token(), "parquet")
    entry = FileEntry(path, "t", 0, 0, 2, 3, 100, 0, 0)
    result = RangeResult("t", 0, 0, 3, 3, 30, None, None, {}, {}, [entry], [])
    staged = tmp_path / paths.staged(1, path)
    staged.parent.mkdir(parents=True)
    staged.write_bytes(bytes(100))
    check_results(store, 1, 0, [asked], [result])
    staged.write_bytes(bytes(99))
    with pytest.raises(LoadError, match="is missing or not as it was written"):
        check_results(store, 1, 0, [asked], [result])
    staged.unlink()
    with pytest.raises(LoadError, match="is missing or not as it was written"):
        check_results(store, 1, 0, [asked], [result])
