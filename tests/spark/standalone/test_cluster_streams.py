"""A stream of rows by Avro, exactly once, over eight workers that are killed, drained and added."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import psutil

from spark_klog.embedded import EmbeddedCluster
from tests.spark.support import create_topic
from tests.support.processes import kill, named, workers as python_workers
from tests.support.spark.standalone import EXECUTOR, Standalone, Worker
from tests.support.waiting import wait_until

from .conftest import WORKERS, Programs
from .support import SECONDS, Copy, copied, fill

PARTITIONS, RECORDS = 16, 12_000


def test_workers_come_and_go(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, spark_cluster: Standalone, programs: Programs
) -> None:
    servers, output = cluster.bootstrap_servers, f"{topic}-out"
    for name in (topic, output):
        create_topic(servers, name, PARTITIONS)
    fill(servers, topic, 0, RECORDS, PARTITIONS)
    copy, markers = Copy(tmp_path / "checkpoint"), tmp_path / "markers"
    markers.mkdir()
    given = {"servers": servers, "from": topic, "to": output, "checkpoint": str(copy.checkpoint)}
    slow = {**given, "records": 160, "seconds": 0.3, "markers": str(markers)}
    running = programs.start("copy", slow, spark__decommission__enabled="true")
    workers = spark_cluster.workers

    def wait_for_a_task(worker: Worker) -> list[psutil.Process]:
        """The worker's processes, while one of them is in the middle of a task."""

        def is_there() -> bool:
            assert not running.ended, running.result().stdout[-6000:]
            there[:] = worker.tree()
            return any((markers / str(process.pid)).exists() for process in there)

        there: list[psutil.Process] = []
        wait_until(is_there, "a task of that worker", SECONDS)
        return there

    copy.wait_for(running, 1)
    kill(named(wait_for_a_task(workers[0]), EXECUTOR))
    copy.wait_for(running, 320)
    kill(python_workers(wait_for_a_task(workers[1])))
    copy.wait_for(running, 320)
    kill(wait_for_a_task(workers[2]))
    copy.wait_for(running, 320)
    spark_cluster.add("127.0.0.9")
    wait_for_a_task(workers[3])
    workers[3].drain()
    spark_cluster.wait_for_workers(WORKERS - 1)
    wait_for_a_task(workers[-1])
    copy.wait_for(running, 320)
    wait_for_a_task(workers[4])
    running.kill()
    # all that is left, and a second run that has nothing to do
    for _ in range(2):
        given |= {"records": RECORDS, "to_the_end": True}
        ran = programs.start("copy", given, spark__cores__max="2").result()
        assert ran.code == 0, ran.stdout[-6000:]
        assert copy.committed() == RECORDS
        assert copied(servers, output) == Counter(range(RECORDS))
