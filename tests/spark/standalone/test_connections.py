"""The connections of executors to many brokers, as the system and the brokers count them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import psutil

from tests.support.brokers.simulated_cluster import SimulatedCluster
from tests.support.processes import workers as python_workers
from tests.support.spark.standalone import Standalone

from .conftest import Programs
from .support import wait_for

TOPICS, PARTITIONS, BROKERS, RECORDS, TASKS, EXECUTORS = 40, 5, 8, 20, 100, 4


def test_tasks_share_the_connections_of_their_worker(
    tmp_path: Path, spark_cluster: Standalone, programs: Programs
) -> None:
    """Two to each broker at most, which a batch and a stream after it use again."""

    def held() -> dict[int, set[tuple[int, int]]]:
        """The connections of each Python worker: its port, and the other side's."""
        processes: list[psutil.Process] = []
        for worker in spark_cluster.workers:
            processes += python_workers(worker.tree())
        found = {each.pid: each.net_connections("tcp") for each in processes}
        return {pid: {(one.laddr.port, one.raddr.port) for one in some if one.raddr} for pid, some in found.items()}

    with SimulatedCluster(TOPICS, PARTITIONS, BROKERS, RECORDS) as brokers:
        given = {"servers": brokers.bootstrap_servers, "folder": str(tmp_path), "tasks": TASKS}
        given["records"] = TOPICS * PARTITIONS * RECORDS // 3
        running = programs.start("read", given, spark__cores__max=str(EXECUTORS))
        before: dict[int, set[tuple[int, int]]] = {}
        for number in range(3):
            brokers.tell("forget")
            (tmp_path / f"go-{number}").touch()
            wait_for(running, (tmp_path / f"done-{number}").exists, "all is read")
            figures, now = brokers.figures(), held()
            assert figures["requests"]["Fetch"] >= TASKS
            assert max(map(len, now.values())) > BROKERS
            for pid, connections in before.items():
                assert connections <= now[pid]
            for connections in now.values():
                assert max(Counter(port for _, port in connections).values()) <= 2
            new = sum(len(connections - before.get(pid, set())) for pid, connections in now.items())
            assert figures["opened"] <= new + 2 * BROKERS  # the driver's
            before = now
