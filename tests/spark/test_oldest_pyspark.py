"""The oldest Python on this machine with the lower bound of each dependency: read, write, streams, the main job.

Part of `make matrix`, as is Spark 4.1 with the newest other dependencies; it also runs suites of this folder.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from spark_klog.embedded import EmbeddedCluster
from tests.jobs.support import ROOT
from tests.support.packages import pythons
from tests.support.runs.soak import in_matrix
from tests.support.spark import pyspark_versions

from .support import consume, create_topic, produce, values

RECORDS, PARTITIONS, MORE, LIMIT = 200, 2, 100, 40
_PROGRAM = Path(__file__).with_name("oldest_program.py")
_SECONDS = 480
_COMPILE = """
import sys
from pathlib import Path
from spark_klog.client import Admin
from spark_klog.embedded import EmbeddedCluster

for folder in ("spark_klog", "jobs"):
    for path in (Path(sys.argv[1]) / folder).rglob("*.py"):
        compile(path.read_bytes(), str(path), "exec")
with EmbeddedCluster() as cluster, Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
    admin.list_topics()
print("started")
"""


@in_matrix
@pytest.mark.parametrize(
    ("version", "make"), [("4.0.", pyspark_versions.oldest), ("4.1.", pyspark_versions.with_connector)]
)
def test_main_job_reads_writes_and_streams(
    cluster: EmbeddedCluster, tmp_path: Path, version: str, make: Callable[[], Path]
) -> None:
    servers, topic, python = cluster.bootstrap_servers, f"oldest-{version}0", make()
    create_topic(servers, topic, PARTITIONS)
    records = values(RECORDS, partitions=PARTITIONS)
    produce(servers, topic, records)
    found, output = pyspark_versions.report_of(python, _PROGRAM, tmp_path, _SECONDS, servers, topic)
    assert found["versions"][0].startswith(version)
    sent = [record.value or b"" for record in records]
    assert (found["rows"], found["bytes"]) == (RECORDS, sum(map(len, sent)))

    def copied(name: str) -> list[bytes]:
        return sorted(seen.value or b"" for seen in consume(servers, f"{topic}-{name}"))

    every = sorted([*sent, *(b"more-%d" % number for number in range(MORE))])
    assert copied("batch") == sorted(sent)
    assert copied("stream") == every
    batches = [rows for rows in found["batches"] if rows]
    # a share below one record is rounded up
    assert sum(batches) == len(every)
    assert max(batches) <= LIMIT + PARTITIONS
    # Spark ends Trigger.AvailableNow after one micro-batch, also after a restart: the source warns, and loses nothing
    (short,) = [rows for rows in found["available_now"] if rows]
    assert 0 < short <= LIMIT + PARTITIONS
    assert len(copied("limited")) == len(every) + short
    assert set(copied("limited")) == set(every)
    assert output.count("ends Trigger.AvailableNow after one micro-batch") >= 3  # each start of a query with limits
    assert found["job"] == 0, output[-3000:]
    loaded = ds.dataset(tmp_path / "parquet", partitioning="hive").to_table(columns=["value"])
    assert sorted(loaded.column("value").to_pylist()) == sorted(
        [*every, *(b"more-%d" % number for number in range(MORE))]
    )


@in_matrix
def test_all_modules_compile_and_the_broker_starts(tmp_path: Path) -> None:
    """Some syntax is new in Python 3.11, and a linter with an older target version does not find all of it."""
    python = pyspark_versions.oldest()
    program = tmp_path / "program.py"
    program.write_text(_COMPILE)
    environment = {**pyspark_versions.child_environment(python), "PYTHONPATH": str(ROOT)}
    command = [python, program, ROOT]
    ran = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=_SECONDS, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "started\n"), ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("requirement", "bound"),
    [
        ("lz4>=4.3", "lz4==4.3.*"),
        ("pandas<3,>=2.2", "pandas==2.2.*"),
        ("pyspark[sql]<4.4,>=4.0", "pyspark[sql]==4.0.0"),
        ('crc32c>=2.7; platform_machine in "x86_64"', 'crc32c==2.7.*; platform_machine in "x86_64"'),
    ],
)
def test_lower_bounds(requirement: str, bound: str) -> None:
    assert pyspark_versions.lower_bound(requirement) == bound


def test_pairs_whose_python_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' Python replaces a missing one if no other pair has its pyspark; else the pair is skipped and named."""
    monkeypatch.setattr(pythons, "find", lambda version: None)
    monkeypatch.setattr(pythons, "environment", lambda name, python, packages: (packages[0], python))
    ours = sys.executable
    found = [(f"pyspark=={version}", ours) for version in ("4.1.4", "4.2.1", "4.3.0")], ["pyspark-4.3.0-python3.14"]
    assert pyspark_versions.newer() == found
    monkeypatch.setattr(pythons, "find", lambda version: f"/usr/bin/python{version}")
    chosen, left_out = pyspark_versions.newer()
    assert chosen[-1] == ("pyspark==4.3.0", "/usr/bin/python3.14")
    assert left_out == []
