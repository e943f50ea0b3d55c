"""Kill programs of `foreachBatch` and of batch writes at any moment: what they write is there once, and complete.

`kills.py` says how; SPARK_KLOG_KILLS is the number of kills.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.support import Running
from tests.spark.exactly_once.kills import KILLS, SECONDS, SEED, Brokers, Program, brokers
from tests.spark.exactly_once.support import PARTITIONS, once, read, read_by_java
from tests.spark.support import Sent, consume, create_topic, produce
from tests.support.waiting import wait_until

from . import batch_program, updates_program

__all__ = ["brokers"]
pytestmark = [
    pytest.mark.timeout(0),  # each step has its own deadline
    pytest.mark.test_all("kill"),
    pytest.mark.peer,  # they are read by Java, too
]

RECORDS_A_BATCH = 100
#: For each kill: more records than the program counts until then.
RECORDS = 3000
WORDS = 7
#: 2023-11-14T22:13:20Z, in ms; one record every 10 s.
_START, _STEP, _HOUR = 1_700_000_000_000, 10_000, 3_600_000
ROWS, WRITES = 200, 30


class Counts(Program):
    """The program of foreachBatch and its checkpoint."""

    def __init__(self, servers: str, topic: str, folder: Path) -> None:
        super().__init__(random.Random(SEED))
        self._folder, self._runs = folder.resolve(), 0
        self._checkpoint = self._folder / "checkpoint"
        self.given: dict[str, Any] = {"servers": servers, "from": f"{topic}-from", "to": [topic, f"{topic}-all"]}
        self.given |= {"checkpoint": str(self._checkpoint), "records": RECORDS_A_BATCH, "to_the_end": False}
        self.given["confs"] = {"spark.sql.shuffle.partitions": "3"}

    def start(self) -> Running:
        self._runs += 1
        program = Path(updates_program.__file__)
        return Running([sys.executable, str(program), json.dumps(self.given)], self._folder, self._runs)

    def begun(self) -> int:
        names = [path.name for path in (self._checkpoint / "offsets").glob("[0-9]*")]
        return max((int(name) for name in names if name.isdecimal()), default=-1)


class Writes(Program):
    """The program of batch writes."""

    def __init__(self, servers: str, topic: str, folder: Path, writes: int) -> None:
        super().__init__(random.Random(SEED))
        self._folder, self._runs = folder.resolve(), 0
        self._place = self._folder / "place"
        self.given = {"servers": servers, "to": topic, "rows": ROWS, "writes": writes, "place": str(self._place)}

    def start(self) -> Running:
        self._runs += 1
        program = Path(batch_program.__file__)
        return Running([sys.executable, str(program), json.dumps(self.given)], self._folder, self._runs)

    def begun(self) -> int:
        return int(self._place.read_text() or "-1") if self._place.exists() else -1


def test_updates(request: pytest.FixtureRequest, brokers: Brokers, topic: str, server_dir: Path) -> None:
    """The last value of each key is the count, no key is there twice in a micro-batch, both topics have all rows."""
    servers, records = brokers.servers, RECORDS * KILLS
    for name in (f"{topic}-from", topic, f"{topic}-all"):
        create_topic(servers, name, PARTITIONS)
    sent = [Sent(b"x", b"%d" % (n % WORDS), n % PARTITIONS, _START + n * _STEP) for n in range(records)]
    produce(servers, f"{topic}-from", sent)
    program = Counts(servers, topic, server_dir)
    killed = program.kill(brokers, KILLS)
    given = {**program.given, "records": records, "to_the_end": True}
    query = updates_program.start(request.getfixturevalue("spark"), given)
    assert query.awaitTermination(SECONDS)
    wanted = Counter((one.key, (one.timestamp or 0) // _HOUR) for one in sent)
    last: dict[bytes | None, int] = {}

    def is_complete() -> bool:  # coordinators answer EndTxn before they write the markers
        for record in consume(servers, topic, isolation_level="read_committed"):
            last[record.key] = json.loads(record.value or b"")["count"]
        return sum(last.values()) == records

    wait_until(is_complete, "all counts", 60)
    assert sorted(last.values()) == sorted(wanted.values())
    assert len(last) == len(wanted)
    by_key: dict[bytes | None, list[dict[str, Any]]] = defaultdict(list)
    for record in consume(servers, topic, isolation_level="read_committed"):
        by_key[record.key].append(json.loads(record.value or b""))
    for updates in by_key.values():
        for field in ("batch", "count"):
            values = [one[field] for one in updates]
            assert values == sorted(set(values))
    all_of_them = Counter(json.dumps(one, separators=(",", ":")) for updates in by_key.values() for one in updates)
    wait_until(lambda: read(servers, f"{topic}-all") == all_of_them)
    for name in (topic, f"{topic}-all"):
        assert read_by_java(servers, name, server_dir) == all_of_them
    print(f"killed {dict(killed)}, {program.begun()} micro-batches, {len(all_of_them)} updates of {len(last)} keys")  # noqa: T201


def test_batch_writes(request: pytest.FixtureRequest, brokers: Brokers, topic: str, server_dir: Path) -> None:
    create_topic(brokers.servers, topic, PARTITIONS)
    writes = WRITES * KILLS
    program = Writes(brokers.servers, topic, server_dir, writes)
    killed = program.kill(brokers, KILLS)
    begun = program.begun()
    seen = read(brokers.servers, topic)
    assert set(seen.values()) <= {1}
    given = program.given | {"writes": begun + 2, "place": str(server_dir / "none")}
    batch_program.run(request.getfixturevalue("spark"), given)
    wait_until(lambda: read(brokers.servers, topic) == once(ROWS * (begun + 2)), "all rows, each once", 60)
    assert read_by_java(brokers.servers, topic, server_dir) == once(ROWS * (begun + 2))
    print(f"killed {dict(killed)} in {begun} writes, {len(seen)} rows")  # noqa: T201
