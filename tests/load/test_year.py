"""A load over a simulated year: between its runs topics are added, grow, lose records and are created again; some runs
die, reload or have bounds. At the end the files hold what the logs held, and the audit finds each planted loss.

SPARK_KLOG_RUNS sets the number of runs (default 12, in `make test` 6), SPARK_KLOG_SEED the random choices.
"""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from spark_klog.embedded import EmbeddedCluster
from spark_klog.files.folder import LocalFolder
from spark_klog.load import files
from spark_klog.load.audit import status
from spark_klog.load.journal import checkpoint
from spark_klog.load.places import AtRun
from spark_klog.load.planning import Limits
from tests.load.support import Killed, by_duckdb, by_pyarrow, die, failing, run
from tests.spark.support import Sent, create_topic, delete_records, delete_topic, produce, wait_for

_TIME = 1_700_000_000_000
_RUNS = os.environ.get("SPARK_KLOG_RUNS")
_MOST_TOPICS, _MOST_PARTITIONS = 5, 4
#: The first _CHECKED runs are checked, then each _CHECKED-th run.
_CHECKED = 12


class _Year:
    """Topics of a cluster, and the number of times that a load of them must hold each (topic, partition, offset)."""

    def __init__(self, servers: str, name: str, output: Path, chance: random.Random) -> None:
        self.servers, self.output, self.chance = servers, output, chance
        self._name = name
        self.ends: dict[str, list[int]] = {}
        self.loaded: Counter[tuple[str, int, int]] = Counter()
        #: The end of the loaded offsets, by partition.
        self.until: dict[tuple[str, int], int] = defaultdict(int)
        self._admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})

    def add(self) -> None:
        if len(self.ends) < _MOST_TOPICS:
            topic = f"{self._name}-{len(self.ends)}"
            partitions = self.chance.randint(1, 2)
            create_topic(self.servers, topic, partitions)
            self.ends[topic] = [0] * partitions

    def grow(self) -> None:
        topic = self.chance.choice(list(self.ends))
        count = len(self.ends[topic]) + 1
        if count <= _MOST_PARTITIONS:
            self._admin.create_partitions([NewPartitions(topic, count)])[topic].result(timeout=30)
            wait_for(lambda: len(self._admin.list_topics(topic, 10).topics[topic].partitions) == count, "it has grown")
            self.ends[topic].append(0)

    def make_anew(self) -> None:
        """Delete a topic that is loaded completely, and create it again."""
        topic = self.chance.choice(list(self.ends))
        if all(self.until[topic, number] == end for number, end in enumerate(self.ends[topic])):
            delete_topic(self.servers, topic)
            create_topic(self.servers, topic, len(self.ends[topic]))
            self.ends[topic] = [0] * len(self.ends[topic])
            for number in range(len(self.ends[topic])):
                self.until[topic, number] = 0

    def shorten(self) -> None:
        """Delete records as retention does; some of them may not be loaded yet."""
        topic = self.chance.choice(list(self.ends))
        end = self.ends[topic][0]
        if end > 4:
            delete_records(self.servers, topic, {0: end - 2})
            self.until[topic, 0] = max(self.until[topic, 0], end - 2)

    def send(self) -> None:
        for topic, ends in self.ends.items():
            numbers = [self.chance.randrange(len(ends)) for _ in range(self.chance.randint(0, 30))]
            produce(self.servers, topic, [Sent(b"v", b"k", number, _TIME) for number in numbers])
            for number in numbers:
                ends[number] += 1

    def load(self, **options: Any) -> None:
        loaded = run(self.servers, self.output, *self.ends, fail_on_loss=False, max_task_records=11, **options)
        for (topic, number), until in loaded.offsets.items():
            for offset in range(self.until[topic, number], until):
                self.loaded[topic, number, offset] += 1
            self.until[topic, number] = max(self.until[topic, number], until)

    def check(self) -> None:
        expected = sorted(self.loaded.elements())
        assert by_pyarrow(self.output) == expected
        assert by_pyarrow([item.path for item in files(str(self.output))]) == expected
        found = status(str(self.output))
        assert all(" lost before run " in item.what for item in found.findings), found.findings
        assert sum(sum(each.values()) for each in found.hours.values()) == len(expected)


@pytest.mark.timeout(0)  # SPARK_KLOG_RUNS sets the duration
@pytest.mark.parametrize("runs", [int(_RUNS)] if _RUNS else [6, pytest.param(12, marks=pytest.mark.test_all("long"))])
def test_a_year(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    monkeypatch.setattr(checkpoint, "EVERY", 2)
    chance = random.Random(int(os.environ.get("SPARK_KLOG_SEED", "1")))
    year = _Year(cluster.bootstrap_servers, topic, tmp_path / "out", chance)
    year.add()
    changes = [year.add, year.grow, year.make_anew, year.shorten]
    for number in range(runs):
        changes[number % len(changes)]()
        year.send()
        kind = chance.choice(["plain", "bounded", "killed", "again"])
        if kind == "bounded":
            year.load(limits=Limits(max_records=20))
        elif kind == "killed":
            try:
                with failing(LocalFolder, chance.choice([1, -1]) * chance.randint(1, 40), die):
                    run(year.servers, year.output, *year.ends, fail_on_loss=False, max_task_records=11)
            except Killed:
                pass
        elif kind == "again" and (year.output / "_klog" / "latest.json").exists():
            year.load(start=AtRun(chance.randint(1, len(status(str(year.output)).runs))))
        year.load()
        if number < _CHECKED or number % _CHECKED == 0 or number == runs - 1:  # the readers read all files each time
            year.check()
    assert by_duckdb(year.output) == sorted(year.loaded.elements())
    _plant_losses(year)


def _plant_losses(year: _Year) -> None:
    """Remove and truncate files one by one: the audit reports that file and no other."""
    before = {item.what for item in status(str(year.output)).findings}
    for item in files(str(year.output))[:: max(1, len(files(str(year.output))) // 8)]:
        path = Path(item.path)
        content = path.read_bytes()
        for planted in (None, content[:-1]):
            path.unlink() if planted is None else path.write_bytes(planted)
            [finding] = [each for each in status(str(year.output)).findings if each.what not in before]
            assert (finding.topic, finding.partition, path.name in finding.what) == (item.topic, item.partition, True)
            path.write_bytes(content)
    assert {item.what for item in status(str(year.output)).findings} == before
