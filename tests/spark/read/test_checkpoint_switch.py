"""One checkpoint used in turn by format("kafka"), Spark's own connector, and format("klog"): each row once.

Cases: stateless, stateful, several sources, added partitions and topics, limits, and a query that started at latest.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.groups.checkpoint import checkpoint_state
from tests.support.runs.soak import in_matrix
from tests.support.spark.jvm_connector import connector_jars
from tests.support.spark.pyspark_versions import report_of, with_connector

pytestmark = [
    pytest.mark.peer,
    pytest.mark.test_all("long"),
    in_matrix,
]

_PROGRAM = Path(__file__).with_name("switch_program.py")
_SECONDS = 480
_LIMIT = 12


@pytest.fixture(scope="module")
def switched(cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """(the folder of the queries, the program's report)."""
    folder, python, jars = tmp_path_factory.mktemp("switched"), with_connector(), connector_jars()
    found, _ = report_of(python, _PROGRAM, folder, _SECONDS, jars, cluster.bootstrap_servers)
    return folder, found


def _rows(folder: Path) -> list[list[dict[str, int]]]:
    """The rows of each micro-batch."""
    batches = sorted((folder / "rows").iterdir(), key=lambda path: int(path.name))
    return [[json.loads(line) for part in batch.glob("*.json") for line in part.open()] for batch in batches]


def _numbers(folder: Path) -> list[int]:
    return sorted(row["number"] for batch in _rows(folder) for row in batch)


@pytest.mark.parametrize("first", ["kafka", "klog"])
def test_stateless(switched: tuple[Path, dict[str, Any]], first: str) -> None:
    folder, found = switched
    assert _numbers(folder / f"{first}-stateless") == sorted(
        number for name in "abc" for number in found["sent"][f"{first}-{name}"]
    )


@pytest.mark.parametrize("first", ["kafka", "klog"])
def test_stateful(switched: tuple[Path, dict[str, Any]], first: str) -> None:
    folder, found = switched
    counts = {row["rest"]: row["count"] for row in _rows(folder / f"{first}-stateful")[-1]}
    sent = [number for name in "ab" for number in found["sent"][f"{first}-{name}"]]
    assert counts == dict(Counter(number % 3 for number in sent))


@pytest.mark.parametrize("first", ["kafka", "klog"])
def test_limits(switched: tuple[Path, dict[str, Any]], first: str) -> None:
    folder, found = switched
    assert _numbers(folder / f"{first}-limited") == sorted(found["sent"][f"{first}-a"])
    assert max(found["batches"]) <= _LIMIT + 4  # a partition's share below one record is rounded up


@pytest.mark.parametrize("first", ["kafka", "klog"])
def test_a_query_that_began_at_the_end(switched: tuple[Path, dict[str, Any]], first: str) -> None:
    folder, found = switched
    seven_before, three_after = 7, 3
    assert _numbers(folder / f"{first}-latest") == sorted(found["sent"][f"{first}-late"])[seven_before:-three_after]


@pytest.mark.parametrize("first", ["kafka", "klog"])
@pytest.mark.parametrize("name", ["stateless", "stateful", "limited", "latest"])
def test_what_the_command_says(switched: tuple[Path, dict[str, Any]], first: str, name: str) -> None:
    found = checkpoint_state(str(switched[0] / f"{first}-{name}" / "checkpoint"))
    assert (found.to_klog, found.to_kafka, found.is_stateful) == ([], [], name == "stateful")
    assert len(found.sources) == (2 if name == "stateless" else 1)
    assert found.done == found.planned > 0
