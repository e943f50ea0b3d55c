"""A stream whose executors come with its records and go when there are none: each record is written exactly once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from spark_klog.embedded import EmbeddedCluster
from tests.spark.support import create_topic
from tests.support.spark.standalone import Standalone

from .conftest import Programs
from .support import Copy, copied, fill, wait_for

PARTITIONS, RECORDS, MOST = 16, 800, 4
_DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "1",
    "spark.dynamicAllocation.maxExecutors": str(MOST),
    "spark.dynamicAllocation.schedulerBacklogTimeout": "1s",
    "spark.dynamicAllocation.executorIdleTimeout": "5s",
}


def test_executors_come_and_go(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, spark_cluster: Standalone, programs: Programs
) -> None:
    servers, output = cluster.bootstrap_servers, f"{topic}-out"
    for name in (topic, output):
        create_topic(servers, name, PARTITIONS)
    copy, markers = Copy(tmp_path / "checkpoint"), tmp_path / "markers"
    markers.mkdir()
    given = {"servers": servers, "from": topic, "to": output, "checkpoint": str(copy.checkpoint)}
    given |= {"records": 160, "seconds": 0.5, "markers": str(markers)}
    fill(servers, topic, 0, RECORDS, PARTITIONS)
    running = programs.start("copy", given, **_DYNAMIC)

    def executors() -> int:
        return sum(len(worker.executors()) for worker in spark_cluster.workers)

    for end in (RECORDS, 2 * RECORDS):
        wait_for(running, lambda: executors() == MOST, "as many executors as there may be")
        wait_for(running, lambda end=end: copy.committed() == end, "all is copied")  # type: ignore[misc]
        wait_for(running, lambda: executors() == 1, "the others have gone")
        if end == RECORDS:
            fill(servers, topic, end, 2 * end, PARTITIONS)
    assert copied(servers, output) == Counter(range(2 * RECORDS))
