"""Run every snippet of README and docs in the order of its page: Python in one namespace, klog commands for real.

Each page has a cluster of its own, or starts the broker that it describes. Free ports and the test's folders replace
127.0.0.1:9092 and the page's folders. `_ELSEWHERE` names the tests of commands that do not run here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_klog.client import Admin, Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.spark.write.decisions.decision_place import decision_place
from spark_klog.spark.write.exactly_once_driver import claim
from tests.support.clients.klog import klog, klog_command
from tests.support.clients.srfake import serving_srfake
from tests.support.clients.topics import make_topic
from tests.support.papers import pages as papers
from tests.support.papers.pages import ROOT, Snippet

#: Tests of the commands that do not run here, by the beginning of a command line.
_ELSEWHERE = {
    ".": "tests/jobs/test_packaging.py",
    "PYTHONPATH": "tests/jobs/test_packaging.py",
    "cd": "tests/records/test_slow_kernel.py",
    "cp": "tests/jobs/test_packaging.py",
    "curl": "tests/broker/faults/test_fault_control.py",
    "klog broker --schema-registry": "tests/schemas/registry/test_running.py",
    "klog cluster --schema-registry": "tests/schemas/registry/test_running.py",
    "klog dead-letters replay": "tests/cli/test_dead_letters_command.py",
    "klog doctor": "tests/cli/test_doctor.py",
    "klog load": "tests/jobs/test_batch_load.py",
    "klog mirror": "tests/mirror/test_mirror_command.py",
    "klog schema-registry": "tests/schemas/registry/test_running.py",
    "klog topics create orders --config confluent.value.schema": "tests/broker/handlers/test_schema_validation.py",
    "klog topics list --bootstrap-server broker.example.com": "tests/cli/test_command_config.py",
    "make": "tests/jobs/test_demo.py",
    "pip": "tests/jobs/test_packaging.py",
    "python -m spark_klog.cli.jobs.batch_load": "tests/load/test_follow.py",
    "python3": "tests/jobs/test_packaging.py",
    "spark-submit": "tests/jobs/test_batch_load.py",
    "sudo": "tests/client/security/test_kerberos.py",
    "uvicorn": "tests/aio/test_service.py",
}
#: Pages whose Python needs jars, extensions of DuckDB or other servers, and tests of what they say.
_OF_TABLES = {
    "docs/recipes/follow-a-database.md": "tests/load/test_debezium.py",
    "docs/recipes/tables.md": "tests/tables/test_delta.py",
    "docs/recipes/tables-iceberg.md": "tests/tables/test_iceberg.py",
    "docs/recipes/tables-streaming.md": "tests/tables/test_streams.py",
}
_LANGUAGES = ("python", "bash")
_WITH_ZOOKEEPER = ("docs/recipes/zookeeper-to-kafka.md", "docs/explanation/systems.md")
#: Pages that create their own topics.
_EMPTY = ("docs/recipes/records.md", "docs/reference/admin.md")
_FOLDERS = re.compile(r"/(?:data|mnt|backup|tmp)/")
_READY_SECONDS = 60


def _runnable(page: str) -> list[Snippet]:
    return [one for one in papers.snippets(page) if one.language in _LANGUAGES]


#: Pages that take long; README has streams, and other tests what these pages do.
_LONG = {
    "docs/recipes/named-clusters.md",
    "docs/recipes/schema-registry.md",
    "docs/recipes/security/broker.md",
    "docs/recipes/security/gssapi.md",
    "docs/recipes/security/index.md",
    "docs/recipes/security/msk-iam.md",
    "docs/recipes/security/oauthbearer.md",
    "docs/recipes/security/plain.md",
    "docs/recipes/security/scram.md",
    "docs/recipes/transactions.md",
    "docs/recipes/schemas.md",
    "docs/recipes/cdc.md",
    "docs/recipes/debezium.md",
    "docs/recipes/exactly-once.md",
    "docs/explanation/systems.md",
    "docs/index.md",
    "docs/recipes/lineage.md",
    "docs/recipes/log-directories.md",
    "docs/recipes/monitoring.md",
    "docs/recipes/python-clients.md",
    "docs/recipes/replay.md",
    "docs/recipes/switch.md",
    "docs/recipes/testing.md",
    "docs/recipes/zookeeper-to-kafka.md",
    "docs/reference/consumer.md",
    "docs/reference/producer.md",
    "docs/tutorial.md",
}
_PAGES = [
    pytest.param(page, marks=pytest.mark.test_all("long") if page in _LONG else ())
    for page in papers.pages()
    if _runnable(page) and page not in _OF_TABLES
]


class _Reader:
    """Runs a page as its reader would."""

    def __init__(self, spark: SparkSession, folder: Path, servers: str, zookeeper: str) -> None:
        self.folder = folder
        self.ports = {"127.0.0.1:9092": servers, "127.0.0.1:2181": zookeeper}
        self._children: list[subprocess.Popen[str]] = []
        self.resources = ExitStack()
        self.namespace: dict[str, Any] = {"spark": spark, "servers": servers, "__name__": "page"}

    def text(self, text: str) -> str:
        """The snippet with this test's addresses and folders."""
        text = _FOLDERS.sub(lambda found: f"{self.folder}{found[0]}", text)
        text = re.sub(r"127\.0\.0\.1:\d+", lambda found: self._address(found[0]), text)
        return text.replace('"127.0.0.1", 9092', '"{}", {}'.format(*self._address("127.0.0.1:9092").split(":")))

    def _address(self, address: str) -> str:
        if not self.ports.get(address):
            with socket.create_server(("127.0.0.1", 0)) as server:
                self.ports[address] = f"127.0.0.1:{server.getsockname()[1]}"
        return self.ports[address]

    def run(self, snippet: Snippet) -> None:
        text = self.text(snippet.text)
        if snippet.language == "python":
            text = "\n" * snippet.line + text.replace("while True:", "for _ in range(3):")
            exec(compile(text, snippet.page, "exec"), self.namespace)
            return
        for pipeline in papers.command_lines(text):
            found = b""
            for words in pipeline:
                if _elsewhere(words) is None:
                    found = self._command(words, found)

    def _command(self, words: list[str], stdin: bytes) -> bytes:
        if words[:2] in (["klog", "broker"], ["klog", "cluster"]):
            self._start(words[1:])
            return b""
        target = Path(words[words.index(">") + 1]) if ">" in words else None
        words = words[: words.index(">")] if target else words
        if words[0] == "printf":
            return subprocess.run(words, stdout=subprocess.PIPE, check=True, timeout=60).stdout
        assert words[0] == "klog", shlex.join(words)
        done = klog(*words[1:], stdin=stdin.decode())
        assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr}"
        if target is not None:
            target.write_text(done.stdout)
        return done.stdout.encode()

    def _start(self, arguments: list[str]) -> None:
        child = subprocess.Popen(klog_command(*arguments), stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self._children.append(child)
        assert child.stdout is not None
        assert "ready on" in child.stdout.readline(), shlex.join(arguments)

    def close(self) -> None:
        self.resources.close()
        for child in self._children:
            child.terminate()
            child.wait(_READY_SECONDS)
            assert child.stdout is not None
            child.stdout.close()


def _elsewhere(words: list[str]) -> str | None:
    line = " ".join(words)
    return next((test for start, test in _ELSEWHERE.items() if re.match(rf"{re.escape(start)}(?![\w-])", line)), None)


def _fill(servers: str) -> None:
    """Create the topics that pages read, with three records in each partition except clicks-eu."""
    with Admin({"bootstrap.servers": servers}) as admin:
        for name, partitions in {"clicks": 3, "clicks-eu": 1, "views": 1, "orders": 1}.items():
            admin.create_topic(name, partitions)
    with Producer({"bootstrap.servers": servers}) as producer:
        for topic, partition in [("clicks", 0), ("clicks", 1), ("clicks", 2), ("views", 0), ("orders", 0)]:
            for number in range(3):
                producer.send(topic, f"page {number}".encode(), key=b"ada", partition=partition)


def _copy_log(reader: _Reader, cluster: EmbeddedCluster, data_dir: Path) -> None:
    cluster.stop()
    shutil.copytree(data_dir / "broker-0", reader.folder / "backup" / "kafka-logs")


def _name_cluster(reader: _Reader, cluster: EmbeddedCluster, data_dir: Path) -> None:
    Path(os.environ["KLOG_CONFIG"]).write_text(f'[prod]\nbootstrap.servers = "{cluster.bootstrap_servers}"\n')


def _store_in_zookeeper(reader: _Reader, cluster: EmbeddedCluster, data_dir: Path) -> None:
    command = "offsets set --group g --to zookeeper://127.0.0.1:2181 --topic clicks --to-latest -b 127.0.0.1:9092"
    done = klog(*reader.text(command).split())
    assert done.returncode == 0, done.stderr


def _run_with_checkpoint(reader: _Reader, cluster: EmbeddedCluster, data_dir: Path) -> None:
    reader.run(_runnable("docs/recipes/switch.md")[1])
    writer = reader.namespace["clicks"].writeStream.format("noop").trigger(availableNow=True)
    writer.option("checkpointLocation", reader.text("/data/checkpoint")).start().awaitTermination(120)


def _call_test(reader: _Reader, name: str = "test_what_is_sent_is_read") -> None:
    class Cluster:
        bootstrap_servers = reader.namespace["servers"]

    topic = "of-a-test"
    make_topic(Cluster.bootstrap_servers, topic, 1)
    reader.namespace[name](Cluster, topic)


def _check_merged(reader: _Reader) -> None:
    rows = DeltaTable(reader.folder / "data" / "customers-stream").to_pyarrow_table()
    assert rows.select(["id", "name", "_klog_offset"]).to_pylist() == [
        {"id": 1, "name": "Ada Lovelace", "_klog_offset": 2}
    ]


def _check_clean(reader: _Reader) -> None:
    assert reader.namespace["clean"].count() == 9


def _check_readme(reader: _Reader) -> None:
    copies = reader.text(_COPIES)
    exec(compile(copies, "README.md", "exec"), reader.namespace)
    values = [json.loads(row.value) for row in reader.namespace["copies"].selectExpr("cast(value AS string)").collect()]
    assert {value["page"] for value in values} == {"page 0", "page 1", "page 2"}
    assert len(reader.namespace["last_hour"]) == 9
    _call_test(reader, "test_orders")


_COPIES = """
copies = spark.read.format("klog").option("kafka.bootstrap.servers", "127.0.0.1:9092").option("subscribe", "copies")
copies = copies.load()
"""


def _check_tutorial(reader: _Reader) -> None:
    rows = reader.namespace["written"].selectExpr("cast(key AS string)", "cast(value AS string)").collect()
    assert sorted(tuple(row) for row in rows) == [("ada", "CART"), ("ada", "HOME"), ("grace", "SEARCH")]


def _check_customers(reader: _Reader) -> None:
    rows = reader.namespace["customers"]().collect()
    assert sorted(tuple(row) for row in rows) == [
        (1, "Ada", "Paris", None),
        (3, "Edsger", "Austin", "ewd@example.com"),
    ]


def _start_registry(reader: _Reader, cluster: EmbeddedCluster, data_dir: Path) -> None:
    registry = reader.resources.enter_context(serving_srfake(reader.folder / "registry"))
    reader.ports["127.0.0.1:8081"] = registry.url.removeprefix("http://")


def _begin_in_bucket(reader: _Reader, cluster: EmbeddedCluster, data_dir: Path) -> None:
    """A run of the query that the page goes on with, by its checkpoint in a bucket."""
    place = decision_place("s3a://bucket/checkpoints/clean", None)
    claim({"bootstrap.servers": cluster.bootstrap_servers}, place, "klog-")


_BEFORE: dict[str, Callable[[_Reader, EmbeddedCluster, Path], None]] = {
    "docs/recipes/exactly-once.md": _begin_in_bucket,
    "docs/recipes/log-directories.md": _copy_log,
    "docs/recipes/named-clusters.md": _name_cluster,
    "docs/recipes/python-clients.md": _start_registry,
    "docs/recipes/schemas.md": _start_registry,
    "docs/recipes/switch.md": _run_with_checkpoint,
    "docs/recipes/zookeeper-to-kafka.md": _store_in_zookeeper,
}
_AFTER: dict[str, Callable[[_Reader], None]] = {
    "README.md": _check_readme,
    "docs/recipes/cdc.md": _check_merged,
    "docs/recipes/debezium.md": _check_customers,
    "docs/recipes/exactly-once.md": _check_clean,
    "docs/recipes/testing.md": _call_test,
    "docs/tutorial.md": _check_tutorial,
}


def _end_queries(spark: SparkSession, servers: str = "") -> None:
    """Let streams read everything, then stop them: idle ones would poll the broker all the time.

    With `servers` each gets one more record: a stream that starts at the end of its topics would read none.
    """
    for query in spark.streams.active:
        query.processAllAvailable()
        if servers:
            with Producer({"bootstrap.servers": servers}) as producer:
                for topic in ("clicks", "clicks-eu"):
                    producer.send(topic, b"page 0")
            query.processAllAvailable()
            assert sum(item["numInputRows"] for item in query.recentProgress), "the stream has read the record"
        query.stop()


@pytest.fixture
def left_as_it_was(spark: SparkSession) -> Iterator[None]:
    """The session has no queries and no named cluster after a test, whatever failed."""
    yield
    for query in spark.streams.active:
        query.stop()
    Path(os.environ["KLOG_CONFIG"]).unlink(missing_ok=True)


@pytest.mark.usefixtures("left_as_it_was")
@pytest.mark.parametrize("page", _PAGES)
def test_page(page: str, spark: SparkSession, server_dir: Path, tmp_path: Path) -> None:
    begun = any(one.language == "bash" and "klog broker" in one.text for one in _runnable(page))
    for folder in ("data", "mnt", "backup", "tmp"):
        (tmp_path / folder).mkdir()
    data_dir = server_dir / "cluster"
    with EmbeddedCluster(1, page in _WITH_ZOOKEEPER, data_dir) as cluster:
        servers = "" if begun else cluster.bootstrap_servers
        reader = _Reader(spark, tmp_path, servers, cluster.zookeeper_connect or "")
        reader.namespace["servers"] = reader.text("127.0.0.1:9092")
        try:
            if not begun and page not in _EMPTY:
                _fill(servers)
            if page in _BEFORE:
                _BEFORE[page](reader, cluster, data_dir)
            for snippet in _runnable(page):
                reader.run(snippet)
                _end_queries(spark, servers if page == "README.md" else "")
            if page in _AFTER:
                _AFTER[page](reader)
        finally:
            if "listener" in reader.namespace:
                spark.streams.removeListener(reader.namespace["listener"])
                reader.namespace["listener"].close()
            reader.close()


def test_tests_of_the_rest_exist() -> None:
    assert _LONG.issubset(page.values[0] for page in _PAGES)
    tests = (*_ELSEWHERE.values(), *_OF_TABLES.values())
    assert [test for test in tests if not (ROOT / test).exists()] == []
