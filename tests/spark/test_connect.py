"""Spark Connect: clients without a JVM use the connector, the load job and Declarative Pipelines at a server.

The server runs in the session's JVM; each client is a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

from spark_klog.embedded import EmbeddedCluster
from tests.jobs.support import ROOT

from .support import consume, create_topic, needs_admission_control, produce, values

pytestmark = [pytest.mark.test_all("long")]  # a server, and a process with its imports for each client

_SECONDS = 180
_PROGRAM = Path(__file__).with_name("connect_program.py")
_SERVICE = "org.apache.spark.sql.connect.service.SparkConnectService$"
_PIPELINE = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()
OPTIONS = {{"kafka.bootstrap.servers": "{servers}"}}


@dp.table
def clicks():
    options = {{**OPTIONS, "subscribe": "{topic}", "startingOffsets": "earliest"}}
    return spark.readStream.format("klog").options(**options).load().select("value")


dp.create_sink("copies", "klog", {{**OPTIONS, "topic": "{topic}-flow", "createTopics": "1"}})


@dp.append_flow(target="copies")
def copy():
    return spark.readStream.table("clicks")
"""
_SPECIFICATION = """
name: clicks
storage: {storage}
libraries:
  - glob:
      include: pipeline.py
"""


@pytest.fixture(scope="module")
def remote(spark: SparkSession) -> Iterator[str]:
    """The address of a Connect server in the session's JVM."""
    jvm = spark._jvm
    assert jvm is not None
    service = getattr(getattr(jvm, _SERVICE), "MODULE$")
    context = spark._jsc.sc()
    context.conf().set("spark.connect.grpc.binding.port", "0")
    context.conf().set("spark.connect.grpc.binding.address", "127.0.0.1")
    service.start(context)
    yield f"sc://127.0.0.1:{service.localPort()}"
    service.stop(getattr(service, "stop$default$1")(), getattr(service, "stop$default$2")())


def _run(folder: Path, *command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a client without this process's SPARK_ and PYSPARK_ variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    return subprocess.run(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_SECONDS,
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        check=False,
    )


def test_batch_stream_sink_and_sql(remote: str, cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    records = values(40, partitions=2)
    produce(servers, topic, records)
    done = _run(tmp_path, _PROGRAM, remote, servers, topic, tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    refused = found.pop("refused")
    assert "the query of this micro-batch is unknown: Spark tells it in foreachBatch only" in found.pop("updates")
    assert found == {
        "kind": "pyspark.sql.connect.session",
        "has_jvm": False,
        "rows": [[0, 20], [1, 20]],
        "has_ended": True,
        "counted": 40,
        "decoded": [0, 1, 2],
    }
    assert "did you mean subscribe" in refused
    for copy in ("batch", "stream", "updates"):
        seen = sorted(one.value or b"" for one in consume(servers, f"{topic}-{copy}"))
        assert seen == sorted(record.value or b"" for record in records)


def test_the_load_job(remote: str, cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    records = values(30, partitions=2)
    produce(servers, topic, records)
    job = (ROOT / "jobs" / "batch_load.py", "--bootstrap-servers", servers, "--topics", topic)
    done = _run(tmp_path, *job, "--output", tmp_path / "out", SPARK_REMOTE=remote)
    assert done.returncode == 0, done.stdout[-4000:]
    loaded = ds.dataset(tmp_path / "out", partitioning="hive").to_table(columns=["value"])
    assert sorted(loaded.column("value").to_pylist()) == sorted(record.value or b"" for record in records)


@needs_admission_control
def test_a_pipeline(remote: str, cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 1)
    records = values(20)
    produce(servers, topic, records)
    (tmp_path / "pipeline.py").write_text(_PIPELINE.format(servers=servers, topic=topic))
    storage = (tmp_path / "storage").as_uri()
    (tmp_path / "spark-pipeline.yml").write_text(_SPECIFICATION.format(storage=storage))
    done = _run(tmp_path, "-m", "pyspark.pipelines.cli", "run", SPARK_REMOTE=remote)
    assert done.returncode == 0, done.stdout[-4000:]
    seen = [one.value for one in consume(servers, f"{topic}-flow")]
    assert seen == [record.value for record in records]
