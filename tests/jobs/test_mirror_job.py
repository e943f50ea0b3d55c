"""jobs/mirror.py: tasks share the partitions, and a later run goes on where they ended."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from jobs.mirror import prepare, run_slot
from spark_klog.client import Admin
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError
from spark_klog.mirror.mirror import Mirror
from spark_klog.mirror.settings import MirrorSettings
from tests.jobs.support import ROOT, environment, spark_submit
from tests.support.clients.klog import klog_refusal
from tests.support.clients.mirrors import read_topic
from tests.support.clients.topics import make_topic

_PARTITIONS = 5
_SECONDS = 300.0
_CONFS = ("spark.ui.enabled=false", "spark.driver.bindAddress=127.0.0.1", "spark.log.level=ERROR")


@pytest.fixture
def target(server_dir: Path) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(data_dir=server_dir / "target") as running:
        yield running


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    confs = [part for conf in _CONFS for part in ("--conf", conf)]
    command = [spark_submit(), "--master", "local[2]", *confs, str(ROOT / "jobs" / "mirror.py"), *arguments]
    environ = environment(folder)
    return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=environ, cwd=folder)


def _fill(servers: str, topic: str) -> Producer:
    make_topic(servers, topic, _PARTITIONS)
    producer = Producer({"bootstrap.servers": servers, "compression.type": "lz4"})
    for number in range(5_000):
        producer.produce(topic, b"%d" % number, b"k%d" % number, number % _PARTITIONS)
    assert producer.flush(60) == 0
    return producer


def test_slots_share_the_partitions(cluster: EmbeddedCluster, target: EmbeddedCluster) -> None:
    """The code of the tasks, without Spark: each goes on where it ended."""
    producer = _fill(cluster.bootstrap_servers, "orders")
    first, second = ({"bootstrap.servers": side.bootstrap_servers} for side in (cluster, target))
    settings = MirrorSettings(first, second, name="slots", topics=re.compile("orders"), exactly_once=True)
    for count in (5_000, 1):
        settings, slots = prepare(settings, 3)
        found = [run_slot(settings, slots, slot) for slot in range(slots)]
        assert (sum(one.records for one in found), sum(one.partitions for one in found)) == (count, _PARTITIONS)
        producer.produce("orders", b"later", None, 4)
        assert producer.flush(60) == 0
    before = read_topic(cluster.bootstrap_servers, "orders", _PARTITIONS)
    assert read_topic(target.bootstrap_servers, "orders", _PARTITIONS) == [*before[:4], before[4][:-1]]
    with Admin({"bootstrap.servers": target.bootstrap_servers}) as admin:
        ids = {one.transactional_id for one in admin.list_transactions()}
    assert ids == {f"klog-mirror.slots.internal-{slot}" for slot in range(3)}
    with pytest.raises(ConfigError, match="3 tasks, not 2"):
        prepare(settings, 2)


@pytest.mark.test_all("long")
def test_tasks_share_the_partitions(cluster: EmbeddedCluster, target: EmbeddedCluster, server_dir: Path) -> None:
    sides = ("--from", cluster.bootstrap_servers, "--to", target.bootstrap_servers)
    producer = _fill(cluster.bootstrap_servers, "clicks")
    chosen = (*sides, "--topics", "clicks", "--name", "job", "--exactly-once", "--json")
    done = _run(server_dir, *chosen, "--tasks", "3")
    assert done.returncode == 0, done
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["records"], told["partitions"], told["lag"]) == (5_000, _PARTITIONS, 0)
    before = read_topic(cluster.bootstrap_servers, "clicks", _PARTITIONS)
    assert read_topic(target.bootstrap_servers, "clicks", _PARTITIONS) == before
    # each task has its own transactional id
    with Admin({"bootstrap.servers": target.bootstrap_servers}) as admin:
        ids = {one.transactional_id for one in admin.list_transactions()}
    assert ids == {f"klog-mirror.job.internal-{slot}" for slot in range(3)}
    # the number of tasks belongs to the mirror
    refused = subprocess.run(
        [sys.executable, str(ROOT / "jobs" / "mirror.py"), *chosen, "--tasks", "2"],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    assert (refused.returncode, "3 tasks, not 2" in refused.stderr) == (1, True), refused
    assert "3 tasks, not 1" in klog_refusal("mirror", *chosen[:-1], "--until-end")
    producer.produce("clicks", b"later", None, 4)
    assert producer.flush(60) == 0
    # run the tasks' code here without another JVM: each slot goes on where its task ended
    first, second = ({"bootstrap.servers": side.bootstrap_servers} for side in (cluster, target))
    settings = MirrorSettings(first, second, name="job", topics=re.compile("clicks"), exactly_once=True)
    slots = [Mirror(settings, slot=slot, slots=3).run(until_end=True) for slot in range(3)]
    assert (sum(one.records for one in slots), sum(one.partitions for one in slots)) == (1, _PARTITIONS)
    assert read_topic(target.bootstrap_servers, "clicks", _PARTITIONS)[4][-1].value == b"later"
