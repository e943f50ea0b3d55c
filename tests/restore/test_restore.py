"""Restores of a load to a topic: confluent-kafka reads the same records there as at the source."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_klog import restore as restore_module
from spark_klog.cli.jobs import restore as restore_job
from spark_klog.cli.jobs.running import DONE, FAILED, NOTHING_NEW
from spark_klog.client import Admin, Producer
from spark_klog.client.places import TimeSpec
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, LoadError
from spark_klog.load import files
from spark_klog.load.compaction import compact
from spark_klog.load.journal import paths
from spark_klog.load.journal.history import claim_output, new_identity
from spark_klog.load.journal.store import open_store
from spark_klog.load.run import MaxBad
from spark_klog.load.settings import WriteSettings
from spark_klog.restore import (
    Part,
    Restored,
    RestoreOptions,
    plan_restore,
    read_part,
    replay,
    restore_partition,
    restored_offsets,
)
from tests.jobs.support import ROOT, environment, spark_submit
from tests.load.support import Killed, kills, run
from tests.spark.support import Sent, create_topic, delete_topic, produce
from tests.support.brokers.batches import make_batch
from tests.support.brokers.raw_client import RawClient
from tests.support.clients.klog import klog
from tests.support.clients.mirrors import read_topic

_TIME = 1_700_002_800_000
_HOUR_MS = 3_600_000
_PARTITIONS = 3


def _records(count: int, start: int = 0) -> list[Sent]:
    return [
        Sent(
            None if number % 7 == 0 else b"%d" % number,
            None if number % 5 == 0 else b"key %d" % number,
            number % _PARTITIONS,
            _TIME + number * 7 % 13 * _HOUR_MS + number,
            (("h", b"%d" % number), ("n", None)) if number % 3 else (),
        )
        for number in range(start, start + count)
    ]


def _restore(options: RestoreOptions) -> list[Restored]:
    """Restore as the job does, without Spark."""
    parts = plan_restore(options)
    found = [list(each) for _, each in groupby(parts, key=lambda part: (part.topic, part.partition))]
    return [restore_partition(options.client, options.output, each) for each in found]


def _content(servers: str, topic: str) -> list[list[tuple[Any, ...]]]:
    """The records of each partition, without offsets: restored topics have transaction markers between records."""
    return [
        [(seen.key, seen.value, seen.headers, seen.timestamp) for seen in partition]
        for partition in read_topic(servers, topic, _PARTITIONS)
    ]


def _client(target: EmbeddedCluster) -> dict[str, str]:
    return {"bootstrap.servers": target.bootstrap_servers}


_SORTED = pytest.param(
    WriteSettings(layout="hour", sort_by="key", row_group_rows=16), marks=pytest.mark.test_all("long"), id="by key"
)


@pytest.mark.parametrize(
    "settings",
    [pytest.param(WriteSettings("arrow"), id="arrow"), pytest.param(WriteSettings(layout="hour"), id="hour"), _SORTED],
)
def test_restored(
    cluster: EmbeddedCluster, target: EmbeddedCluster, topic: str, tmp_path: Path, settings: WriteSettings
) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, _PARTITIONS)
    options = RestoreOptions(str(tmp_path), _client(target), prefix="again.")
    for start in (0, 240):
        produce(servers, topic, _records(240, start))
        run(servers, tmp_path, topic, settings=settings, max_task_records=60)
        if settings.sort_by:
            assert compact(str(tmp_path)).runs
        found = _restore(options)
        assert [(item.records, item.error) for item in found] == [(80, "")] * _PARTITIONS
        assert _content(target.bootstrap_servers, f"again.{topic}") == _content(servers, topic)
    assert [item.records for item in _restore(options)] == [0] * _PARTITIONS
    once_more = RestoreOptions(str(tmp_path), _client(target), prefix="again.", name="second")
    with pytest.raises(ConfigError, match="have records that this restore has not written"):
        _restore(once_more)


@pytest.mark.parametrize("side", ["before", "after"])
def test_killed_at_each_transaction(
    cluster: EmbeddedCluster,
    target: EmbeddedCluster,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    side: str,
) -> None:
    """A restore dies before or after every second commit; the next one fences it and writes the rest."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, _PARTITIONS)
    produce(servers, topic, _records(300))
    run(servers, tmp_path, topic)
    monkeypatch.setattr(restore_module, "_ROWS", 20)
    options = RestoreOptions(str(tmp_path), _client(target), name=f"killed-{side}", prefix=f"{side}.")
    real, count = Producer.commit_transaction, [0]

    def commit(producer: Producer) -> None:
        count[0] += 1
        if count[0] % 2 == 0 and side == "before":
            raise Killed
        real(producer)
        if count[0] % 2 == 0:
            raise Killed

    died = 0
    with monkeypatch.context() as patch:
        patch.setattr(Producer, "commit_transaction", commit)
        while died < (kills() or 6):
            try:
                _restore(options)
                break
            except Killed:
                died += 1
    assert died > 4
    _restore(options)
    assert _content(target.bootstrap_servers, f"{side}.{topic}") == _content(servers, topic)


def test_a_topic_that_was_created_again(
    cluster: EmbeddedCluster, target: EmbeddedCluster, topic: str, tmp_path: Path
) -> None:
    """The records of the new topic follow those of the old one."""
    servers = cluster.bootstrap_servers
    before = []
    for start in (0, 60):
        create_topic(servers, topic, _PARTITIONS)
        produce(servers, topic, _records(60, start))
        run(servers, tmp_path, topic, fail_on_loss=False)
        before.append(_content(servers, topic))
        delete_topic(servers, topic)
    options = RestoreOptions(str(tmp_path), _client(target))
    _restore(options)
    assert [item.records for item in _restore(options)] == [0] * _PARTITIONS
    assert _content(target.bootstrap_servers, topic) == [old + new for old, new in zip(*before, strict=True)]


def test_how_far_a_restore_is(cluster: EmbeddedCluster, target: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Progress beyond the files of a partition (after a repeated load that was cut) does not count for another one."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, _PARTITIONS)
    produce(servers, topic, _records(60))
    run(servers, tmp_path, topic)
    parts = plan_restore(RestoreOptions(str(tmp_path), _client(target)))
    with Admin(_client(target)) as admin:
        admin.alter_group_offsets(parts[0].group, {(topic, 0): 100, (topic, 1): 5}).check()
    assert restored_offsets(_client(target), parts) == 20 + 5


def test_offsets_that_the_load_has_got_later(
    cluster: EmbeddedCluster, target: EmbeddedCluster, topic: str, tmp_path: Path
) -> None:
    """Offsets that the load gets later are an error before the restore's position, also in a gap, but not after it."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b"%d" % n, None, 0, _TIME + n * 1000) for n in range(60)])
    until = TimeSpec(_TIME + 10_000)
    run(servers, tmp_path, topic, start=TimeSpec(_TIME + 40_000))
    options = RestoreOptions(str(tmp_path), _client(target))
    assert [item.records for item in _restore(options)] == [20]
    produce(servers, topic, [Sent(b"new", None, 0, _TIME + 60_000)])
    run(servers, tmp_path, topic)
    assert [item.records for item in _restore(options)] == [1]
    run(servers, tmp_path, topic, start=TimeSpec(_TIME), until=until)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"-0: the load has got the offsets \[0, 10\) since this restore left"):
            _restore(options)
    other = RestoreOptions(str(tmp_path), _client(target), prefix="other.", name=f"other.{topic}")
    assert [item.records for item in _restore(other)] == [31]
    run(servers, tmp_path, topic, start=TimeSpec(_TIME))
    with pytest.raises(ConfigError, match=r"the offsets \[10, 40\) since this restore left them out, and it is at 61"):
        _restore(other)
    third = RestoreOptions(str(tmp_path), _client(target), prefix="third.", name=f"third.{topic}")
    assert [item.records for item in _restore(third)] == [61]
    [restored], [sent] = read_topic(target.bootstrap_servers, f"third.{topic}", 1), read_topic(servers, topic, 1)
    assert [item.value for item in restored] == [item.value for item in sent]


@pytest.mark.parametrize("settings", [WriteSettings(layout="hour"), WriteSettings("arrow", layout="hour")])
@pytest.mark.parametrize("hours", [6, 40])
def test_large_records_of_several_hours(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, settings: WriteSettings, hours: int
) -> None:
    """Files of the same offset range are merged in offset order, with few of their bytes in memory."""
    servers, count, size = cluster.bootstrap_servers, 480, 100_000
    create_topic(servers, topic)
    some = [b"%d" % number + b"x" * size for number in range(count)]
    produce(servers, topic, [Sent(value, None, 0, _TIME + n % hours * _HOUR_MS) for n, value in enumerate(some)])
    run(servers, tmp_path, topic, settings=settings)
    found = files(str(tmp_path))
    part = Part(topic, 0, "group", 0, tuple(tuple(each) for _, each in groupby(found, key=lambda item: item.first)), ())
    read = list(read_part(str(tmp_path), part, 7))
    assert [value for table, _ in read for value in table["value"].to_pylist()] == some[7:]
    assert [after for _, after in read] == [table["offset"][-1].as_py() + 1 for table, _ in read]
    assert max(table.nbytes for table, _ in read) < 32e6 < sum(table.nbytes for table, _ in read)


def test_what_is_refused(cluster: EmbeddedCluster, target: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers, client = cluster.bootstrap_servers, _client(target)
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b'{"id":1}')])
    lines, values, plain = (tmp_path / name for name in ("lines", "values", "plain"))
    run(servers, lines, topic, settings=WriteSettings("json", "none"))
    run(servers, values, topic, settings=WriteSettings(schema="id bigint"))
    run(servers, plain, topic)
    for output, words in ((lines, "has JSON lines"), (values, "has parsed values"), (tmp_path, "has no load")):
        with pytest.raises(LoadError, match=words):
            plan_restore(RestoreOptions(str(output), client))
    with pytest.raises(ConfigError, match="has no files of topic nope"):
        plan_restore(RestoreOptions(str(plain), client, ["nope"]))
    with pytest.raises(ConfigError, match="--name"):
        plan_restore(RestoreOptions(str(plain), client, name="a b"))
    [file] = plain.glob(f"{topic}/*.parquet")
    file.write_bytes(b"damaged")
    [found] = _restore(RestoreOptions(str(plain), client))
    assert "can't be read" in found.error


def test_replay_of_dead_letters(cluster: EmbeddedCluster, target: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, _PARTITIONS)
    create_topic(target.bootstrap_servers, topic, _PARTITIONS)
    produce(servers, topic, [item for item in _records(90) if item.value is not None])
    run(servers, tmp_path, topic, settings=WriteSettings(schema="id bigint"), max_bad=MaxBad(100, is_percent=True))
    done = klog("load", "replay", str(tmp_path), "--topic", topic, "-b", target.bootstrap_servers, "--json")
    sent = sum(item.value is not None for item in _records(90))
    assert (done.returncode, json.loads(done.stdout)["records"]) == (0, sent), done
    assert _content(target.bootstrap_servers, topic) == _content(servers, topic)
    other = ("--from-topic", "nope", "-b", target.bootstrap_servers)
    assert klog("load", "replay", str(tmp_path), "--topic", topic, *other).returncode == 3
    delete_topic(servers, topic)
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b"bad")])  # in a topic of the same name, created again
    again = {"settings": WriteSettings(schema="id bigint"), "max_bad": MaxBad(100, is_percent=True)}
    run(servers, tmp_path, topic, fail_on_loss=False, **again)
    assert replay(str(tmp_path), _client(target), topic, topic).records == sent + 1
    whole = max((tmp_path / "_klog" / "dead-letters").iterdir(), key=lambda path: path.stat().st_size)
    lines = whole.read_text().splitlines(keepends=True)
    later = whole.name.replace("+" + "0" * 20, f"+{json.loads(lines[5])['offset']:020d}")
    whole.with_name(later).write_text("".join(lines[5:]))  # an overlapping range that a run gave up
    assert replay(str(tmp_path), _client(target), topic, topic).records == sent + 1


def test_records_before_1970(cluster: EmbeddedCluster, target: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Brokers take them from old clients, and so they are restored as they are."""
    for each in (cluster, target):
        create_topic(each.bootstrap_servers, topic)
    times = [_TIME, -2, -86_400_000, _TIME + 1]
    batch = make_batch([(None, b"%d" % time) for time in times], times)
    with RawClient(int(cluster.bootstrap_servers.rpartition(":")[2])) as client:
        assert client.produce(topic, bytes(batch), 7) == (0, 0)
    run(cluster.bootstrap_servers, tmp_path, topic)
    [done] = _restore(RestoreOptions(str(tmp_path), _client(target)))
    assert (done.error, done.records) == ("", 4)
    copies = [(item.value, item.timestamp[1]) for item in read_topic(target.bootstrap_servers, topic, 1)[0]]
    assert copies == [(b"%d" % time, time) for time in times]


def test_a_replay_that_is_interrupted(
    cluster: EmbeddedCluster, target: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call sends what is left, in short transactions; another one sends all records again."""
    servers, copy = cluster.bootstrap_servers, target.bootstrap_servers
    for each in (servers, copy):
        create_topic(each, topic)
    settings: dict[str, Any] = {"settings": WriteSettings(schema="id bigint"), "max_bad": MaxBad(100, is_percent=True)}
    for start in (0, 20):
        produce(servers, topic, [Sent(b"%d" % number) for number in range(start, start + 20)])
        run(servers, tmp_path, topic, **settings)
    monkeypatch.setattr("spark_klog.load.journal.letters._MOST", 7)
    real, calls = Producer.commit_transaction, [0]

    def commit(producer: Producer) -> None:
        calls[0] += 1
        if calls[0] == 5:  # in the second file
            raise Killed
        real(producer)

    with monkeypatch.context() as patch:
        patch.setattr(Producer, "commit_transaction", commit)
        with pytest.raises(Killed):
            replay(str(tmp_path), _client(target), topic)
    sent = [b"%d" % number for number in range(40)]
    assert [item.value for item in read_topic(copy, topic, 1)[0]] == sent[:27]
    assert replay(str(tmp_path), _client(target), topic).records == 13
    assert [item.value for item in read_topic(copy, topic, 1)[0]] == sent
    assert replay(str(tmp_path), _client(target), topic).records == 40
    assert [item.value for item in read_topic(copy, topic, 1)[0]] == sent * 2


def test_corrupt_batches_of_one_topic(tmp_path: Path) -> None:
    """Files are counted by name: "a" is a prefix of "a-1" and "a-b"; a damaged header may have a negative offset."""
    store = open_store(str(tmp_path))
    claim_output(store, new_identity(None, {"format": "parquet", "schema": "", "infers": False}, {}))
    names = ("a-0-5", "a-0--5", "a-1-0-5", "a-1-2--5", "a-b-0-5", "ab-0-5", "a.-0-5")
    for name in names:
        store.write(f"{paths.LETTERS}/{name}-0badbeef.json", b"{}")
    assert {topic: replay(str(tmp_path), {}, "x", topic).batches for topic in ("a", "a-1", "a-b", "a.", None)} == {
        "a": 2,
        "a-1": 2,
        "a-b": 1,
        "a.": 1,
        None: len(names),
    }


@pytest.mark.usefixtures("logging_kept")
def test_the_job(
    cluster: EmbeddedCluster,
    target: EmbeddedCluster,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """jobs/restore.py, with its tasks in this process: what it restores and says, and its exit codes."""
    collected: list[int] = []

    def collect(partitions: list[Any], task: Any) -> list[Any]:
        collected.append(len(partitions))
        return [task(one) for one in partitions]

    def parallelize(partitions: list[Any], _: int) -> SimpleNamespace:
        return SimpleNamespace(map=lambda task: SimpleNamespace(collect=lambda: collect(partitions, task)))

    context = SimpleNamespace(parallelize=parallelize)
    session = SimpleNamespace(sparkContext=context, stop=lambda: None)
    monkeypatch.setattr(restore_job, "spark_session", lambda _: session)
    servers, output = cluster.bootstrap_servers, tmp_path / "out"
    for name in (topic, f"{topic}-not-asked-for"):
        create_topic(servers, name, _PARTITIONS)
        produce(servers, name, _records(90))
    run(servers, output, topic, f"{topic}-not-asked-for")

    def done(*more: str) -> tuple[int, int]:
        asked = ["--load", str(output), "--topics", topic, "--prefix", "job.", "--json", *more]
        with pytest.raises(SystemExit) as ended:
            restore_job.main([*asked, "--bootstrap-servers", target.bootstrap_servers])
        told = capsys.readouterr().out
        return int(ended.value.code or 0), json.loads(told)["records"] if told else -1

    assert done() == (DONE, 90)
    assert done() == (NOTHING_NEW, 0)
    assert collected == [_PARTITIONS], "a second run has nothing to do, and starts no Spark"
    assert _content(target.bootstrap_servers, f"job.{topic}") == _content(servers, topic)
    assert done("--name", "second") == (FAILED, -1)
    assert done("--name", "second", "--append") == (DONE, 90)
    with Admin(_client(target)) as admin:
        assert [one.name for one in admin.list_topics() if one.name.startswith("job.")] == [f"job.{topic}"]


@pytest.mark.test_all("long")
def test_by_spark_submit(cluster: EmbeddedCluster, target: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """A second run has nothing to do, and starts no Spark."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, _PARTITIONS)
    produce(servers, topic, _records(600))
    run(servers, tmp_path / "out", topic)
    job = str(ROOT / "jobs" / "restore.py")
    options = ["--load", str(tmp_path / "out"), "--bootstrap-servers", target.bootstrap_servers, "--json"]
    by_spark = [spark_submit(), "--master", "local[2]", "--conf", "spark.ui.enabled=false", job]
    for command, code, records in ((by_spark, 0, 600), ([sys.executable, job], 3, 0)):
        done = subprocess.run(
            [*command, *options],
            capture_output=True,
            text=True,
            timeout=400,
            env=environment(tmp_path),
            cwd=tmp_path,
            check=False,
        )
        assert done.returncode == code, done
        assert json.loads(done.stdout.splitlines()[-1])["records"] == records
    assert _content(target.bootstrap_servers, topic) == _content(servers, topic)
