"""Spark Connect's server as an application of the cluster: clients without a JVM; executors are killed meanwhile."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from spark_klog.embedded import EmbeddedCluster
from tests.jobs.support import ROOT
from tests.spark import connect_program
from tests.spark.support import consume, create_topic, produce, values
from tests.support.processes import kill
from tests.support.servers.kafka import HOST, free_port
from tests.support.spark.standalone import Standalone
from tests.support.waiting import wait_until

from .conftest import Programs
from .support import SECONDS

_SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
COPIES = ("batch", "stream", "updates")


@pytest.fixture
def remote(programs: Programs) -> str:
    port = free_port()
    confs = {"spark__connect__grpc__binding__port": str(port), "spark__connect__grpc__binding__address": HOST}
    running = programs.submit(Path("spark-internal"), main=_SERVER, spark__cores__max="4", **confs)

    def has_started() -> bool:
        assert not running.ended, running.result().stderr[-6000:]
        with suppress(OSError), socket.create_connection((HOST, port), 1):
            return True
        return False

    wait_until(has_started, "Spark Connect's server", SECONDS)
    return f"sc://{HOST}:{port}"


def _client(remote: str, servers: str, topic: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the client without this process's SPARK_ and PYSPARK_ variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    return subprocess.run(
        [sys.executable, connect_program.__file__, remote, servers, topic, folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=SECONDS,
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def test_clients_before_and_after_executors_are_killed(
    remote: str, cluster: EmbeddedCluster, topic: str, tmp_path: Path, spark_cluster: Standalone
) -> None:
    servers = cluster.bootstrap_servers
    records = values(80, partitions=4)
    for name in (f"{topic}-a", f"{topic}-b"):
        create_topic(servers, name, 4)
        produce(servers, name, records)
        folder = tmp_path / name
        folder.mkdir()
        done = _client(remote, servers, name, folder)
        assert done.returncode == 0, done.stdout[-6000:]
        report = json.loads((folder / "found.json").read_text())
        assert (report["has_jvm"], report["counted"], report["has_ended"]) == (False, 80, True)
        assert report["rows"] == [[partition, 20] for partition in range(4)]
        assert report["decoded"] == [0, 1, 2]
        for copy in COPIES:
            seen = sorted(record.value or b"" for record in consume(servers, f"{name}-{copy}"))
            assert seen == sorted(record.value or b"" for record in records)
        # the second client's tasks go to executors that the master starts in their place
        assert kill([process for worker in spark_cluster.workers for process in worker.executors()])
