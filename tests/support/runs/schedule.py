"""The order of test files in a run with workers: the longest first, and those with Spark in few workers.

`--record-seconds` writes tests/seconds.json, the seconds of each file that takes more than two.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

_ROOT = Path(__file__).parents[3]
_SECONDS = _ROOT / "tests" / "seconds.json"
_SHORTEST = 2
#: What a file without a record is thought to take.
_UNKNOWN = 5
#: Each worker that runs a test with Spark starts a JVM, and its first queries are slow: some 30 seconds of CPU. In
#: `make test` one worker is done with all of them when the others are done with the rest.
_WORKERS_WITH_SPARK, _WORKERS_WITH_SPARK_IF_QUICK = 2, 1
#: If only files with Spark are left, and take each worker that has a JVM longer than this, another one starts one, too.
_WORTH_A_JVM = 150
#: What xdist's class must have, since it documents none of it.
_NEEDED = ("_assign_work_unit", "_reschedule", "_pending_of", "_split_scope", "add_node_collection", "remove_node")


def recorded_seconds() -> dict[str, int]:
    return json.loads(_SECONDS.read_text()) if _SECONDS.exists() else {}


class Recorder:
    """A plugin of a run's main process: `--record-seconds`."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Files that did not run keep what is recorded, and all do if the run was ended."""
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        merged = {file: seconds for file, seconds in recorded_seconds().items() if (_ROOT / file).exists()}
        merged |= {file: round(seconds) for file, seconds in self._seconds.items()}
        lines = sorted((-seconds, file) for file, seconds in merged.items() if seconds >= _SHORTEST)
        _SECONDS.write_text(json.dumps({file: -seconds for seconds, file in lines}, indent=0) + "\n")


class LongestFirst(LoadFileScheduling):
    """Give each worker the longest file that is left; files with Spark to few workers, as long as there are others."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        self._seconds = recorded_seconds()
        self._most_with_spark = _WORKERS_WITH_SPARK_IF_QUICK if config.getoption("quick") else _WORKERS_WITH_SPARK
        self._with_spark: dict[str, bool] = {}
        self._spark_nodes: list[Any] = []
        self._indexes: dict[str, int] = {}

    def remove_node(self, node: Any) -> str | None:
        """Other than xdist's, which gives the test that has ended a worker to the next one, and so on."""
        units = self.assigned_work.pop(node)
        if node in self._spark_nodes:
            self._spark_nodes.remove(node)
        crashed = next(((unit, test) for unit in units.values() for test, is_done in unit.items() if not is_done), None)
        if crashed is None:
            return None
        unit, test = crashed
        unit[test] = True
        self.workqueue.update({file: unit for file, unit in units.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return str(test)

    def _assign_work_unit(self, node: Any) -> None:
        file = self._next_file(node)
        if file is None:
            node.shutdown()
            return
        unit = self.workqueue.pop(file)
        self.assigned_work[node][file] = unit
        if not self._indexes:  # of all workers: their collections are the same
            self._indexes = {test: index for index, test in enumerate(self.registered_collections[node])}
        node.send_runtest_some([self._indexes[test] for test, is_done in unit.items() if not is_done])

    def _reschedule(self, node: Any) -> None:
        if node.shutting_down:
            return
        if not self.workqueue:
            node.shutdown()
        elif self._pending_of(self.assigned_work[node]) < 2:  # a worker starts its last test when it knows the next one
            self._assign_work_unit(node)

    def _next_file(self, node: Any) -> str | None:
        spark = [file for file in self.workqueue if self._needs_spark(file)]
        others = [file for file in self.workqueue if not self._needs_spark(file)]
        is_new = node not in self._spark_nodes
        if is_new and len(self._spark_nodes) >= self._most_with_spark:
            files = others or (spark if sum(map(self._cost, spark)) > _WORTH_A_JVM * len(self._spark_nodes) else [])
        else:
            files = spark or others
        if not files:
            return None
        file = max(files, key=self._cost)
        if is_new and file in spark:
            self._spark_nodes.append(node)
        return file

    def _cost(self, file: str) -> int:
        return self._seconds.get(file, _UNKNOWN)

    def _needs_spark(self, file: str) -> bool:
        """Whether tests of this file use the fixture `spark`, which lives as long as its worker."""
        if file not in self._with_spark:
            path = _ROOT / file
            used = file.startswith("tests/spark/") and path.exists()
            self._with_spark[file] = used and re.search(r"\bspark(_log)?: ", path.read_text()) is not None
        return self._with_spark[file]


def scheduler(config: pytest.Config, log: Any) -> LongestFirst | None:
    """None, which means xdist's own, for another --dist, or if xdist has changed."""
    if config.getoption("dist") != "loadfile" or not all(hasattr(LoadFileScheduling, name) for name in _NEEDED):
        return None
    return LongestFirst(config, log)
