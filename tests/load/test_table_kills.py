"""A load into a table is killed by SIGKILL at any moment: readers find each record once, in tables on disk and in S3.

SPARK_KLOG_KILLS sets the number of kills of each kind of table and place (default: one of each moment), and
SPARK_KLOG_SEED the random choices. tests/load/test_outages.py kills the processes of Spark.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.load.audit import status
from tests.jobs.support import ROOT
from tests.load.support import expected, kills, run
from tests.load.tables import CATALOG, NAME, Kind, Lake, make_lake, places
from tests.spark.support import create_topic, produce, values
from tests.support.spark_tables import SparkTables

_SECONDS = 120
#: Records of a run, and partitions of the topic.
_EACH, _PARTITIONS = 120, 2
_MOMENTS = ("any", "before", "after", "compaction")


def _killed(lake: Lake, servers: str, topic: str, moment: str, seconds: float) -> bool:
    """Start a run or a compaction, and kill it after `seconds`; return False if it had ended before."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.load.table_run", servers, topic, lake.address, moment],
        cwd=ROOT,
        env=os.environ | lake.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        try:
            ready = process.stdout.readline()
            if ready:
                process.stdin.write(b"go\n")
                process.stdin.flush()
                try:
                    process.wait(_SECONDS if moment in ("before", "after") else seconds)
                except subprocess.TimeoutExpired:
                    assert moment not in ("before", "after"), "it did not reach its commit"
        finally:
            process.kill()
        assert ready, process.stderr.read().decode()
        code = process.wait(_SECONDS)
        assert code in (0, -9), process.stderr.read().decode()
        return code != 0


def _check_each_once(lake: Lake, topic: str, sent: int) -> int:
    """No reader finds a record twice, and none of a partition is missing before its last one; how many there are."""
    if not lake.exists():
        return 0
    seen = {name: places(read()) for name, read in lake.readers().items()}
    first = next(iter(seen.values()))
    assert all(other == first for other in seen.values())
    counts = Counter(partition for _, partition, _ in first)
    assert first == expected(topic, dict(counts))
    assert counts.total() <= sent
    return counts.total()


@pytest.mark.timeout(0)  # SPARK_KLOG_KILLS sets the duration; each step has its own deadline
@pytest.mark.test_all("kill")
@pytest.mark.parametrize("place", ["disk", "s3"])
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_killed_at_any_time(
    cluster: EmbeddedCluster,
    topic: str,
    tmp_path: Path,
    s3_process: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    place: str,
) -> None:
    chance = random.Random(int(os.environ.get("SPARK_KLOG_SEED", "1")))
    servers = cluster.bootstrap_servers
    lake = make_lake(kind, tmp_path, monkeypatch, s3_process if place == "s3" else "", f"{kind}-kills")
    create_topic(servers, topic, _PARTITIONS)
    sent, wanted, hits, rounds = 0, kills() or len(_MOMENTS), Counter[str](), 0
    longest = 2.0
    while hits.total() < wanted:
        rounds += 1
        assert rounds <= 4 * wanted, f"too many runs ended before they were killed: {hits}"
        moment = _MOMENTS[hits.total() % len(_MOMENTS)]
        if moment != "compaction":
            produce(servers, topic, values(_EACH, start=sent, partitions=_PARTITIONS))
            sent += _EACH
        before = _check_each_once(lake, topic, sent)
        if moment == "compaction":  # small files of runs that were not killed
            run(servers, lake.address, topic, max_task_records=20)
            before = sent
        was_killed = _killed(lake, servers, topic, moment, chance.uniform(0, longest))
        hits[moment] += was_killed
        if not was_killed:
            longest *= 0.7
        after = _check_each_once(lake, topic, sent)
        assert after >= before
        if moment in ("before", "compaction"):
            assert after == before
        if moment == "after":
            assert after > before
    run(servers, lake.address, topic, max_task_records=20)
    assert _check_each_once(lake, topic, sent) == sent
    found = status(lake.address)
    assert (found.findings, found.unfinished) == ([], "")
    if place == "disk" and kills():
        name = f"delta.`{lake.uri}`" if kind == "delta" else f"{CATALOG}.{NAME}"
        with SparkTables(kind, tmp_path / "spark", CATALOG, lake.warehouse) as spark:
            assert places(spark.sql(f"SELECT topic, partition, offset FROM {name}")) == expected(
                topic, dict.fromkeys(range(_PARTITIONS), sent // _PARTITIONS)
            )
