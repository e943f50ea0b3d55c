"""Loads into files and into a table: a worker dies in the middle, then the driver, and another run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from spark_klog.embedded import EmbeddedCluster
from spark_klog.load.audit import status
from tests.jobs.support import BATCH_LOAD, DONE, Load, rows_of
from tests.jobs.truth import Truth
from tests.support.processes import workers as python_workers
from tests.support.spark.standalone import Standalone

from .conftest import Programs
from .support import wait_for

PARTITIONS, RECORDS, OF_FILE = 8, 6000, 40


@pytest.mark.parametrize("kind", ["files", "delta"])
def test_a_worker_and_the_driver_die(
    kind: str, cluster: EmbeddedCluster, topic: str, tmp_path: Path, spark_cluster: Standalone, programs: Programs
) -> None:
    truth = Truth(cluster.bootstrap_servers)
    truth.create(topic, PARTITIONS)
    truth.send(topic, RECORDS, PARTITIONS)
    table = f"delta:{tmp_path / 'table'}" if kind == "delta" else ""
    load = Load(cluster.bootstrap_servers, topic, tmp_path, table=table)
    words = load.arguments(["--max-file-records", str(OF_FILE)], {})
    running = programs.submit(BATCH_LOAD, *words, spark__cores__max="3")

    def wait_for_tasks(more: int) -> None:
        goal = len(load.tasks()) + more
        wait_for(running, lambda: len(load.tasks()) >= goal, f"{more} more tasks have ended")

    wait_for_tasks(5)
    worker = next(each for each in spark_cluster.workers if python_workers(each.tree()))
    worker.kill()
    spark_cluster.workers.remove(worker)
    spark_cluster.add(worker.host)
    wait_for_tasks(10)
    running.kill()
    assert (load.planned(), load.committed()) == ([1], [])
    assert len(load.tasks()) < RECORDS // OF_FILE
    ran = programs.submit(BATCH_LOAD, *words, spark__cores__max="3").result()
    assert ran.code == DONE, ran.stdout[-6000:]
    assert load.committed() == [1]
    assert rows_of(load.output) == truth.rows()
    if kind == "delta":
        assert DeltaTable(str(load.output)).to_pyarrow_dataset().count_rows() == RECORDS
    assert status(load.address).findings == []
