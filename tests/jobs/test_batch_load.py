"""jobs/batch_load.py by spark-submit: each record once in the Parquet, whatever was killed on the way.

SPARK_KLOG_KILLS says how many kills the kill test makes (3), SPARK_KLOG_SEED which ones.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from confluent_kafka.admin import AdminClient
from kazoo.client import KazooClient

from spark_klog.embedded import EmbeddedCluster
from tests.jobs.support import BATCH_LOAD, Load, Running, environment, kill, named, rows_of, wait_until
from tests.spark.support import Sent, create_topic, produce
from tests.support.kafka import free_port

pytestmark = pytest.mark.timeout(900)
_GIVEN = ("--topics", "t", "--output", "o", "--checkpoint", "c")
_START = 1_700_000_000_000


@pytest.fixture(scope="module")
def cluster(module_server_dir: Path) -> Iterator[EmbeddedCluster]:
    """A broker of ours with ZooKeeper."""
    with EmbeddedCluster(zookeeper=True, data_dir=module_server_dir / "cluster") as running:
        yield running


@pytest.fixture
def make_load(cluster: EmbeddedCluster, server_dir: Path) -> Iterator[Callable[..., Load]]:
    """Loads in the test's folder; what runs of them at its end is killed."""
    made: list[Load] = []

    def make(topics: str, name: str = "load") -> Load:
        made.append(Load(cluster.bootstrap_servers, topics, server_dir / name))
        return made[-1]

    yield make
    for load in made:
        load.stop()


class Truth:
    """What has been produced, and where it must be found."""

    def __init__(self, servers: str) -> None:
        self._servers = servers
        self._sent: dict[tuple[str, int], list[Sent]] = defaultdict(list)

    def create(self, topic: str, partitions: int) -> None:
        create_topic(self._servers, topic, partitions)
        for partition in range(partitions):
            self._sent[topic, partition] = []

    def send(self, topic: str, count: int, partitions: int) -> None:
        """Distinct records, some of them without key or value, some with headers."""
        first = sum(map(len, self._sent.values()))
        records = []
        for number in range(first, first + count):
            record = Sent(
                None if number % 11 == 3 else b"value %d of %s" % (number, topic.encode()),
                None if number % 7 == 2 else b"key %d" % (number % 13),
                random.Random(number).randrange(partitions),
                _START + number,
                (("number", b"%d" % number), ("none", None)) if number % 5 == 1 else (),
            )
            records.append(record)
            self._sent[topic, record.partition].append(record)
        produce(self._servers, topic, records)

    def send_again(self, topic: str) -> None:
        """All records of a topic that was deleted and made again."""
        sent = [record for (name, _), records in sorted(self._sent.items()) if name == topic for record in records]
        produce(self._servers, topic, sent)

    def rows(self) -> list[tuple[Any, ...]]:
        """As `rows_of` gives them."""
        return [
            (record.key, record.value, *key, offset, record.timestamp, [*record.headers] or None)
            for key, records in sorted(self._sent.items())
            for offset, record in enumerate(records)
        ]

    def ends(self) -> dict[tuple[str, int], int]:
        return {key: len(records) for key, records in self._sent.items()}

    def report(self, before: dict[tuple[str, int], int]) -> list[dict[str, Any]]:
        """What a run must report that has begun at `before` and loaded the rest."""
        return [
            {
                "topic": key[0],
                "partition": key[1],
                "from": before.get(key, 0),
                "until": len(records),
                "records": len(records) - before.get(key, 0),
                "bytes": sum(len(item.key or b"") + len(item.value or b"") for item in records[before.get(key, 0) :]),
                "lag": 0,
            }
            for key, records in sorted(self._sent.items())
        ]


@pytest.fixture
def truth(cluster: EmbeddedCluster) -> Truth:
    return Truth(cluster.bootstrap_servers)


def _delete_topic(cluster: EmbeddedCluster, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    admin.delete_topics([topic])[topic].result(timeout=30)
    wait_until(lambda: topic not in admin.list_topics(timeout=10).topics, "the topic is deleted")


def _zookeeper_offsets(cluster: EmbeddedCluster, group: str) -> dict[tuple[str, int], int]:
    client = KazooClient(cluster.zookeeper_connect)
    client.start()
    try:
        root = f"/consumers/{group}/offsets"
        return {
            (topic, int(partition)): int(client.get(f"{root}/{topic}/{partition}")[0])
            for topic in client.get_children(root)
            for partition in client.get_children(f"{root}/{topic}")
        }
    finally:
        client.stop()
        client.close()


def _whole_batches_once(load: Load) -> None:
    """What holds at any moment: no record twice, and each partition from its beginning without a gap."""
    offsets: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row in rows_of(load.output):
        offsets[row[2], row[3]].append(row[4])
    for key, found in offsets.items():
        assert found == list(range(len(found))), f"records of {key} are missing or there twice"


def test_each_run_goes_on_where_the_last_one_stopped(
    cluster: EmbeddedCluster, truth: Truth, make_load: Callable[..., Load], topic: str
) -> None:
    truth.create(topic, 3)
    load = make_load(topic)
    assert cluster.zookeeper_connect is not None
    shown = ("--group", "g1", "--zookeeper", cluster.zookeeper_connect)

    truth.send(topic, 2_000, 3)
    first = truth.ends()
    assert load.report(*shown, "--max-offsets-per-batch", "700") == truth.report({})
    assert rows_of(load.output) == truth.rows()
    assert len(load.batches()) == 3
    assert _zookeeper_offsets(cluster, "g1") == first

    truth.send(topic, 500, 3)
    ran = load.run(*shown)  # the table this time
    assert ran.code == 0, ran.stderr
    assert "loaded" in [line.strip() for line in ran.stdout.splitlines()]
    total = next(line.split() for line in ran.stdout.splitlines() if " all " in line)
    assert "500" in total
    assert rows_of(load.output) == truth.rows()
    assert _zookeeper_offsets(cluster, "g1") == truth.ends()

    files = load.files()
    assert load.report(*shown) == truth.report(truth.ends())
    assert load.files() == files
    assert not load.staging.exists()
    # The plainest of readers, which knows nothing of partitioned folders.
    assert sum(pq.ParquetFile(path).metadata.num_rows for path in load.output.rglob("*.parquet")) == 2_500


def test_new_topics_and_partitions_with_offsets_in_files(
    cluster: EmbeddedCluster, truth: Truth, make_load: Callable[..., Load], topic: str, tmp_path: Path
) -> None:
    other = f"{topic}-2"
    truth.create(topic, 1)
    truth.send(topic, 300, 1)
    load = make_load(topic)
    shown = ("--group", "g2", "--offsets-path", str(tmp_path / "tree"))
    assert load.report(*shown) == truth.report({})
    before = truth.ends()

    # The broker can't add partitions: made again with more of them and the same records.
    _delete_topic(cluster, topic)
    create_topic(cluster.bootstrap_servers, topic, 3)
    truth.send_again(topic)
    truth.create(other, 2)
    truth.send(topic, 300, 3)
    truth.send(other, 200, 2)
    assert load.report(*shown, topics=f"{other}, {topic}") == truth.report(before)
    assert rows_of(load.output) == truth.rows()
    root = tmp_path / "tree" / "consumers" / "g2" / "offsets"
    assert {
        (folder.name, int(file.name)): int(file.read_text())
        for folder in root.iterdir()
        for file in folder.iterdir()
        if not file.name.startswith(".")
    } == truth.ends()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--topics", "t"], "--output, --checkpoint"),
        ([*_GIVEN, "--group", "g"], "--group needs --zookeeper"),
        ([*_GIVEN, "--zookeeper", "z:1"], "need --group"),
        ([*_GIVEN, "--group", "g", "--zookeeper", "z:1", "--offsets-path", "p"], "not allowed with"),
        ([*_GIVEN, "--max-offsets-per-batch", "many"], "invalid"),
        ([*_GIVEN, "--max-offsets-per-batch", "0"], "invalid"),
        ([*_GIVEN, "--topics", " , "], "--topics"),
        ([*_GIVEN, "--fail-on-data-loss", "maybe"], "invalid choice"),
    ],
)
def test_wrong_arguments(options: list[str], words: str, tmp_path: Path) -> None:
    command = [sys.executable, str(BATCH_LOAD), "--bootstrap-servers", "127.0.0.1:1", *options]
    ran = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment(tmp_path), timeout=60, check=False
    )
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    assert ran.stderr.splitlines()[-1].startswith("batch_load.py: error: ")
    assert words in ran.stderr.splitlines()[-1]


def test_no_broker(make_load: Callable[..., Load]) -> None:
    port = free_port()
    complaint = make_load("t").run("--json", bootstrap_servers=f"127.0.0.1:{port}").complaint()
    assert f"127.0.0.1:{port}" in complaint


def test_unknown_topic(make_load: Callable[..., Load], topic: str) -> None:
    load = make_load(topic)
    complaint = load.run("--json").complaint()
    assert topic in complaint
    assert "UNKNOWN_TOPIC_OR_PARTITION" in complaint or "does not exist" in complaint
    assert not load.output.exists()
    assert not load.checkpoint.exists()


def test_what_is_gone_from_the_topic_stops_the_load(
    cluster: EmbeddedCluster, truth: Truth, make_load: Callable[..., Load], topic: str
) -> None:
    """The topic was deleted and made again, shorter than what has been loaded."""
    truth.create(topic, 1)
    truth.send(topic, 200, 1)
    load = make_load(topic)
    load.report()
    files = load.files()

    _delete_topic(cluster, topic)
    again = Truth(cluster.bootstrap_servers)
    again.create(topic, 1)
    again.send(topic, 50, 1)

    complaint = load.run("--json").complaint()
    assert f"{topic}-0" in complaint
    assert "200" in complaint
    assert load.files() == files


def test_crash_points(truth: Truth, make_load: Callable[..., Load], topic: str) -> None:
    """What is left by a run that dies at each step of a batch, one after the other."""
    truth.create(topic, 2)
    truth.send(topic, 600, 2)
    load = make_load(topic)
    load.report("--max-offsets-per-batch", "200")
    assert rows_of(load.output) == truth.rows()
    files = load.files()
    last = load.committed()[-1]

    # Died while it wrote the batch that has since been written by another run; what may be another run's stays.
    left, others = (load.staging / f"{batch}-0123" for batch in (last, last + 1))
    for folder in (left, others):
        (folder / "_temporary" / "0").mkdir(parents=True)
        (folder / "part-00000.snappy.parquet").write_bytes(b"half a fil")
    load.report()
    assert load.files() == files
    assert not left.exists()
    assert others.exists()

    # Died between the rename of the last batch and Spark's note of it, and more has come since.
    load.uncommit(last)
    before = load.planned()
    truth.send(topic, 100, 2)
    reported = load.report()
    assert sum(item["records"] for item in reported) == 200 + 100
    assert {key: value for key, value in load.files().items() if key in files} == files
    assert len(load.planned()) == len(before) + 1
    assert rows_of(load.output) == truth.rows()
    assert not load.staging.exists()  # what was of the batch after the last is of a batch that is done now

    # Died after the last batch was planned and before anything of it was written.
    last = load.committed()[-1]
    load.uncommit(last)
    for path in sorted((load.output / f"batch={last}").iterdir()):
        path.unlink()
    (load.output / f"batch={last}").rmdir()
    assert sum(item["records"] for item in load.report()) == 100
    assert rows_of(load.output) == truth.rows()


def test_output_of_another_load_is_refused(truth: Truth, make_load: Callable[..., Load], topic: str) -> None:
    truth.create(topic, 1)
    truth.send(topic, 50, 1)
    load = make_load(topic)
    load.report()
    files = load.files()
    other = str(load.checkpoint.with_name("another"))
    complaint = load.run("--json", checkpoint=other).complaint()
    assert str(load.output) in complaint
    assert "another load" in complaint
    assert load.files() == files

    truth.send(topic, 50, 1)  # the load that it belongs to is none the worse for it
    load.report()
    assert rows_of(load.output) == truth.rows()


def test_output_that_cannot_be_written(truth: Truth, make_load: Callable[..., Load], topic: str) -> None:
    truth.create(topic, 1)
    truth.send(topic, 50, 1)
    load = make_load(topic)
    file = load.output.with_name("file")
    file.write_text("no folder")
    complaint = load.run("--json", output=str(file / "out")).complaint()
    assert str(file) in complaint

    load.report()  # the batch comes as soon as there is a place for it
    assert rows_of(load.output) == truth.rows()


@pytest.mark.slow
def test_two_runs_at_once(truth: Truth, make_load: Callable[..., Load], topic: str) -> None:
    """Both may fail, as Spark finds that they disturb each other; the records come once all the same."""
    truth.create(topic, 2)
    truth.send(topic, 3_000, 2)
    load = make_load(topic)
    small = ("--json", "--max-offsets-per-batch", "300")
    both = [load.start(*small), load.start(*small)]
    for running in both:
        running.result()
        _whole_batches_once(load)
    load.report()
    assert rows_of(load.output) == truth.rows()


#: Whom to kill, by the processes of a run.
_TARGETS: dict[str, Callable[[list[psutil.Process]], list[psutil.Process]]] = {
    "jvm": lambda tree: tree[:1],
    "python driver": lambda tree: named(tree[1:], BATCH_LOAD.name),
    "python workers": lambda tree: named(tree[1:], "pyspark.daemon"),
    "everything": lambda tree: tree,
    "source": lambda tree: named(tree[1:], "python_streaming_source_runner"),
    "a worker": lambda tree: named(tree[1:], "pyspark.daemon")[-1:],
}


def _wait_for_the_moment(running: Running, load: Load, chance: random.Random) -> None:
    """Some time after the start, or some time after the run has done some batches; or the run has ended."""
    if chance.random() < 0.2:
        running.ends_within(chance.uniform(0, 8))
        return
    goal = (load.planned() or [-1])[-1] + chance.randint(1, 4)
    wait_until(lambda: running.ended or (load.planned() or [-1])[-1] >= goal, "a batch is planned")
    running.ends_within(chance.uniform(0, 1))


@pytest.mark.slow
@pytest.mark.timeout(0)  # as long as SPARK_KLOG_KILLS asks; each step has its deadline
def test_killed_at_any_moment(
    cluster: EmbeddedCluster, truth: Truth, make_load: Callable[..., Load], topic: str
) -> None:
    kills = int(os.environ.get("SPARK_KLOG_KILLS", "3"))
    chance = random.Random(int(os.environ.get("SPARK_KLOG_SEED", "1")))
    truth.create(topic, 3)
    load = make_load(topic)
    assert cluster.zookeeper_connect is not None
    options = ("--group", "killed", "--zookeeper", cluster.zookeeper_connect, "--max-offsets-per-batch", "100")
    killed: Counter[str] = Counter()
    rounds = 0
    while killed.total() < kills:
        rounds += 1
        assert rounds <= 3 * kills, f"too many runs ended before they were killed: {killed}"
        truth.send(topic, chance.randint(600, 1_500), 3)
        target = [*_TARGETS][killed.total() % len(_TARGETS)]
        running = load.start("--json", *options)
        _wait_for_the_moment(running, load, chance)
        hit = 0 if running.ended else kill(_TARGETS[target](running.tree()))
        if hit:
            killed[target] += 1
        ran = running.result()
        if target in ("jvm", "everything", "python driver"):
            assert ran.code != 0 or not hit, f"{target} killed, and the run has not noticed"
        if target in ("source", "python workers", "a worker") and ran.code != 0:
            ran.complaint()
        _whole_batches_once(load)
    load.report(*options)
    assert rows_of(load.output) == truth.rows()
    assert _zookeeper_offsets(cluster, "killed") == truth.ends()
    assert not load.staging.exists()
