"""Exactly once with speculation: in each micro-batch two attempts of a task write all of its rows.

Part of make soak (SPARK_KLOG_EXACTLY_ONCE=full). Spark starts no copy on the host of the first attempt, and the
executors of local-cluster share one host. So a standalone master has workers on two loopback addresses: three JVMs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from spark_klog.client.admin.admin import Admin
from spark_klog.embedded import EmbeddedCluster
from tests.jobs.support import Running
from tests.spark.support import create_topic
from tests.support.spark.standalone import standalone

from .support import PARTITIONS, fill, once, read

pytestmark = [
    pytest.mark.test_all("long"),
    pytest.mark.skipif(os.environ.get("SPARK_KLOG_EXACTLY_ONCE") != "full", reason="part of make soak"),
]

_PROGRAM = Path(__file__).with_name("copy_program.py")
_CONFS = {
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.minTaskRuntime": "50ms",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "2",
    "spark.scheduler.minRegisteredResourcesRatio": "1",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
}
_RECORDS, _RECORDS_A_BATCH = 120, 30


def test_copies_of_tasks(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers, markers = cluster.bootstrap_servers, tmp_path / "markers"
    markers.mkdir()
    create_topic(servers, f"{topic}-from", PARTITIONS)
    create_topic(servers, topic, PARTITIONS)
    fill(servers, topic, 0, _RECORDS)
    given = {
        "servers": servers,
        "from": f"{topic}-from",
        "to": topic,
        "checkpoint": str(tmp_path / "checkpoint"),
        "tasks": PARTITIONS,
        "records": _RECORDS_A_BATCH,
        "to_the_end": True,
        "markers": str(markers),
    }
    with standalone(tmp_path, ("127.0.0.1", "127.0.0.2"), memory="1g") as running_cluster:
        command = [sys.executable, str(_PROGRAM), json.dumps({**given, "master": running_cluster.url, "confs": _CONFS})]
        running = Running(command, tmp_path, 1)
        try:
            ran = running.result(400)
        finally:
            running.kill()
    assert ran.code == 0, ran.stderr[-4000:]
    assert len(list(markers.iterdir())) == _RECORDS / _RECORDS_A_BATCH  # a copy wrote in each micro-batch
    assert read(servers, topic) == once(_RECORDS)
    uncommitted = read(servers, topic, committed=False)
    assert uncommitted.total() > _RECORDS
    with Admin({"bootstrap.servers": servers}) as admin:
        states = {one.state for one in admin.list_transactions()}
    assert "CompleteAbort" in states
