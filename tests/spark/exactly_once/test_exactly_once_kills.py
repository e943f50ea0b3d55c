"""Kill programs and brokers at any moment: a read_committed consumer must find each row once.

`kills.py` says how; SPARK_KLOG_KILLS is the number of kills.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import FileSelector, S3FileSystem
from pyspark.sql import SparkSession

from tests.jobs.support import Running
from tests.spark.exactly_once.kills import KILLS, SECONDS, SEED, Brokers, Program, brokers
from tests.spark.exactly_once.support import PARTITIONS, fill, once, read, read_by_java
from tests.spark.support import create_topic
from tests.support.runs.soak import in_soak
from tests.support.servers.s3_server import serving_s3
from tests.support.spark.s3a import s3a_settings

from . import copy_program

__all__ = ["brokers"]
pytestmark = [pytest.mark.timeout(0)]  # each step has its own deadline

RECORDS_A_BATCH = 30
#: For each kill: more records than the program copies until then.
RECORDS = 3000
_PROGRAM = Path(__file__).with_name("copy_program.py")
_KILL = [pytest.mark.test_all("kill")]


@pytest.fixture
def s3() -> Iterator[str]:
    with serving_s3() as address:
        yield address


class Copy(Program):
    """The copy program and its checkpoint."""

    def __init__(self, servers: str, topic: str, folder: Path, chance: random.Random) -> None:
        super().__init__(chance)
        self._settings = {"servers": servers, "from": f"{topic}-from", "to": topic}
        self._folder = folder.resolve()
        self._checkpoint = self._folder / "checkpoint"
        self.runs = 0

    def _given(self, **settings: Any) -> dict[str, Any]:
        self.runs += 1
        tasks = self.chance.randint(3, 5)
        return {"checkpoint": str(self._checkpoint), **self._settings, "tasks": tasks, **settings}

    def start(self) -> Running:
        given = self._given(records=RECORDS_A_BATCH, to_the_end=False)
        return Running([sys.executable, str(_PROGRAM), json.dumps(given)], self._folder, self.runs)

    def to_the_end(self, request: pytest.FixtureRequest) -> None:
        """Run the program's query in this process until it has copied everything."""
        spark: SparkSession = request.getfixturevalue("spark")  # not earlier: it is one more JVM
        given = self._given(records=None, to_the_end=True)
        query = copy_program.start(spark, given)
        try:
            assert query.awaitTermination(SECONDS)
        finally:
            query.stop()

    def begun(self) -> int:
        """The number of the last micro-batch that has begun, or -1."""
        names = [path.name for path in (self._checkpoint / "offsets").glob("[0-9]*")]
        return max((int(name) for name in names if name.isdecimal()), default=-1)


class CopyInBucket(Copy):
    """The copy program with its checkpoint in a bucket, by Hadoop's S3A."""

    def __init__(self, servers: str, topic: str, folder: Path, chance: random.Random, s3: str) -> None:
        super().__init__(servers, topic, folder, chance)
        self._settings |= {"checkpoint": "s3a://bucket/checkpoint", "confs": s3a_settings(s3)}
        self._bucket = S3FileSystem(
            access_key="key", secret_key="secret", endpoint_override=s3, scheme="http", allow_bucket_creation=True
        )
        self._bucket.create_dir("bucket")
        self._offsets = "bucket/checkpoint/offsets"

    def to_the_end(self, request: pytest.FixtureRequest) -> None:
        given = self._given(records=None, to_the_end=True)
        result = Running([sys.executable, str(_PROGRAM), json.dumps(given)], self._folder, self.runs).result(SECONDS)
        assert result.code == 0, result.stderr[-4000:]

    def begun(self) -> int:
        found = self._bucket.get_file_info(FileSelector(self._offsets, allow_not_found=True))
        return max((int(one.base_name) for one in found if one.base_name.isdecimal()), default=-1)


@pytest.mark.parametrize(
    ("kills", "place"),
    [
        pytest.param(1, "folder", id="1-folder"),
        pytest.param(max(2, KILLS), "folder", marks=_KILL, id=f"{max(2, KILLS)}-folder"),
        pytest.param(
            KILLS, "bucket", marks=[pytest.mark.test_all("kill"), pytest.mark.peer, in_soak], id=f"{KILLS}-bucket"
        ),
    ],
)
def test_every_row_once(
    request: pytest.FixtureRequest, brokers: Brokers, topic: str, server_dir: Path, kills: int, place: str
) -> None:
    create_topic(brokers.servers, f"{topic}-from", PARTITIONS)
    create_topic(brokers.servers, topic, PARTITIONS)
    records = RECORDS * kills
    fill(brokers.servers, topic, 0, records)
    chance = random.Random(SEED)
    copy: Copy
    if place == "bucket":
        copy = CopyInBucket(brokers.servers, topic, server_dir, chance, request.getfixturevalue("s3"))
    else:
        copy = Copy(brokers.servers, topic, server_dir, chance)
    killed = copy.kill(brokers, kills)
    seen = read(brokers.servers, topic)
    assert max(seen.values(), default=0) <= 1
    copy.to_the_end(request)
    wanted = once(records)
    deadline = time.monotonic() + 60
    while (found := read(brokers.servers, topic)) != wanted and time.monotonic() < deadline:
        time.sleep(0.5)  # coordinators answer EndTxn before they write the markers
    assert sorted((found - wanted).items())[:10] == []
    assert sorted((wanted - found).items())[:10] == []
    if place == "bucket":
        assert read_by_java(brokers.servers, topic, server_dir) == wanted
    print(f"killed {dict(killed)} in {copy.runs} runs, after {copy.begun()} micro-batches, {len(seen)} rows")  # noqa: T201
