"""Kill processes of jobs/batch_load.py, run by spark-submit, at random moments: each record is in the Parquet once.

SPARK_KLOG_KILLS sets the number of kills (default 2), SPARK_KLOG_SEED the random choices.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable

import psutil
import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.load import files
from spark_klog.load.audit import status
from tests.jobs.support import BATCH_LOAD, DONE, NOTHING_NEW, Load, kill, named, rows_of, wait_for_the_moment
from tests.jobs.truth import Truth, check_each_once, zookeeper_offsets

#: Picks the processes to kill from those of a run.
_TARGETS: dict[str, Callable[[list[psutil.Process]], list[psutil.Process]]] = {
    "jvm": lambda tree: tree[:1],
    "python workers": lambda tree: named(tree[1:], "pyspark.daemon"),
    "python driver": lambda tree: named(tree[1:], BATCH_LOAD.name),
    "everything": lambda tree: tree,
    "a worker": lambda tree: named(tree[1:], "pyspark.daemon")[-1:],
}


@pytest.mark.timeout(0)  # SPARK_KLOG_KILLS sets the duration; each step has its own deadline
def test_killed_at_any_moment(
    zookeeper_cluster: EmbeddedCluster, truth: Truth, make_load: Callable[..., Load], topic: str
) -> None:
    kills = int(os.environ.get("SPARK_KLOG_KILLS", "2"))
    chance = random.Random(int(os.environ.get("SPARK_KLOG_SEED", "1")))
    truth.create(topic, 3)
    load = make_load(topic)
    assert zookeeper_cluster.zookeeper_connect is not None
    options = ("--group", "killed", "--zookeeper", zookeeper_cluster.zookeeper_connect)
    killed: Counter[str] = Counter()
    rounds = 0
    while killed.total() < kills:
        rounds += 1
        assert rounds <= 3 * kills, f"too many runs ended before they were killed: {killed}"
        truth.send(topic, chance.randint(600, 1_500), 3)
        target = [*_TARGETS][killed.total() % len(_TARGETS)]
        running = load.start("--json", *options, "--max-file-records", "10")
        wait_for_the_moment(running, load, chance)
        hit = 0 if running.ended else kill(_TARGETS[target](running.tree()))
        if hit:
            killed[target] += 1
        ran = running.result()
        if target in ("everything", "python driver"):
            assert ran.code != 0 or not hit, f"{target} killed, and the run has not noticed"
        if target in ("python workers", "a worker") and ran.code != 0:
            ran.complaint()
        check_each_once(load)
    ran = load.submit("--json", *options)
    assert ran.code in (DONE, NOTHING_NEW), ran.stderr
    assert ran.report()[-1]["until"] == truth.ends()[topic, 2]
    assert rows_of(load.output) == truth.rows()
    assert zookeeper_offsets(zookeeper_cluster, "killed") == truth.ends()
    assert len(status(str(load.output)).findings) == 0
    assert sum(item.records for item in files(str(load.output))) == len(truth.rows())
