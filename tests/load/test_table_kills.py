"""A load into a table is killed by SIGKILL at any moment: readers find each record once, in tables on disk, in S3,
and in real catalogs and stores (`real_lakes.py`).

SPARK_KLOG_KILLS sets the number of kills of each kind of table and place (default: one of each moment, in a slice of
them), and SPARK_KLOG_SEED the random choices. tests/load/test_outages.py kills the processes of Spark.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.files import open_folder
from spark_klog.load.audit import status
from spark_klog.load.journal import paths
from spark_klog.tables.opening import open_table
from tests.load.change_source import KEYED, PARTITIONED, ChangeSource, offsets_of, rows_of
from tests.load.real_lakes import REAL
from tests.load.support import expected, kills, run
from tests.load.tables import Kind, Lake, by_spark, check_each_once, make_lake
from tests.spark.support import create_topic, produce, values
from tests.support.runs.soak import in_soak
from tests.support.servers.http_proxy import Fate, HttpProxy

_SECONDS = 120
#: Records of a run, and partitions of the topic.
_EACH, _PARTITIONS = 120, 2
_numbers = count(1)
#: None that changes the table when the run has ended: its readers look one after the other.
_FATES: tuple[Fate, ...] = ("refused", "lost", "cut")
#: Keys of rows, and changes of a run.
_KEYS, _CHANGES = 400, 300
_OF_UPKEEP = ("compaction", "expiry")
_MOMENTS = ("any", "before", "commit", "after", *_OF_UPKEEP)
_OF_MERGES = ("any", "before", "commit", "after")
#: At which the process kills itself.
_BY_ITSELF = ("before", "after")
_SLICE = (("delta", "s3"), ("iceberg", "disk"))
_OTHERS = (("delta", "disk"), ("iceberg", "s3"))
#: The REST catalog again, which loses answers, too.
_LOSSY = ("iceberg", "lossy")
#: Of the real ones, those that are killed also outside `make soak`.
_REAL_SLICE = (("delta", "gateway"), ("iceberg", "rest"))
pytestmark = [
    pytest.mark.timeout(0),  # SPARK_KLOG_KILLS sets the duration; each step has its own deadline
    pytest.mark.test_all("kill"),
    pytest.mark.parametrize(
        ("kind", "place"),
        [
            *_SLICE,
            *(pytest.param(*each, marks=in_soak) for each in _OTHERS),
            *(
                pytest.param(*each, marks=[pytest.mark.peer, *([] if each in _REAL_SLICE else [in_soak])])
                for each in (*REAL, _LOSSY)
            ),
        ],
    ),
]


@pytest.fixture
def lake(kind: Kind, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> Lake:
    if place == "disk":
        return make_lake(kind, tmp_path, monkeypatch)
    if place == "s3":
        return make_lake(kind, tmp_path, monkeypatch, request.getfixturevalue("s3_process"), f"{kind}-{next(_numbers)}")
    real = "rest" if place == "lossy" else place
    made, _ = request.getfixturevalue("real_lakes").make(kind, real, tmp_path, monkeypatch)
    return cast("Lake", made)


@pytest.fixture
def lossy(lake: Lake, place: str, request: Any) -> HttpProxy | None:
    """What loses answers of the catalog."""
    return request.getfixturevalue("real_lakes").rest if place == "lossy" else None


class _Victims:
    """Runs of a load, which are killed after a random time; `counts` has the kills by moment.

    Those of a catalog that is `lossy` may fail instead.
    """

    def __init__(self, lake: Lake, servers: str, topic: str, lossy: HttpProxy | None, *how: str) -> None:
        self._lossy = lossy
        self._chance = random.Random(int(os.environ.get("SPARK_KLOG_SEED", "1")))
        #: How long a run goes on after the moment: it grows with each kill, so that all parts of it are met.
        self._longest: dict[str, float] = defaultdict(lambda: 1.0)
        self.counts, self.ended = Counter[str](), Counter[str]()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.load.table_run", servers, topic, lake.address, *how],
            cwd=Path(__file__).parents[2],
            env=os.environ | lake.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def kill(self, moment: str) -> bool:
        """Start a run (or an upkeep) and kill it; return False if it had ended before."""
        if self._lossy is not None:
            good: list[Fate] = ["good"] * self._chance.randrange(4)
            self._lossy.set_fates(*good, *self._chance.choices(_FATES, k=2))
        self._ask(moment)
        word, number = self._answer()
        if word == "at":
            begin = time.monotonic()
            if self._has_answer(self._chance.uniform(0, self._longest[moment])):
                self._longest[moment] = time.monotonic() - begin
            else:
                self._longest[moment] *= 1.1
                os.kill(number, signal.SIGKILL)
            word, number = self._answer()
        assert word == "ended"
        is_right = number == -signal.SIGKILL or (number == 0 and moment not in _BY_ITSELF)
        assert is_right or (self._lossy is not None and number == 1), f"{moment}: {number}"
        if self._lossy is not None:
            self._lossy.set_fates()
        is_killed = number == -signal.SIGKILL
        (self.counts if is_killed else self.ended)[moment] += 1
        return is_killed

    def moments(self, wanted: int, of: Sequence[str]) -> Iterator[str]:
        """The moments to kill at in turn, until as many kills were made."""
        rounds = 0
        while (done := self.counts.total()) < wanted:
            rounds += 1
            assert rounds <= 4 * wanted, "too many runs ended before they were killed"
            yield of[done % len(of)]

    def _ask(self, moment: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{moment}\n".encode())
        self._process.stdin.flush()

    def _has_answer(self, seconds: float) -> bool:
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def _answer(self) -> tuple[str, int]:
        assert self._process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            assert self._has_answer(_SECONDS), "no answer"
            part = os.read(self._process.stdout.fileno(), 1)  # no more than a line, so that select sees the rest
            assert part, "it has ended"
            line += part
        word, number = line.split()
        return word.decode(), int(number)

    def __enter__(self) -> _Victims:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process:
            self._process.kill()
        print(f"\nkilled: {dict(self.counts)}; ended before: {dict(self.ended)}")  # noqa: T201


def _files(lake: Lake) -> set[str]:
    return {item.path for item in open_table(lake.address).files()}


def _on_disk(lake: Lake) -> set[str]:
    """The files of attempts, by their names, wherever they are."""
    return {path for path in open_folder(open_table(lake.address).location).paths_below("") if paths.token_of(path)}


def test_killed_at_any_time(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, lake: Lake, place: str, lossy: HttpProxy | None
) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, _PARTITIONS)
    sent = 0
    #: All files of attempts that the table has had.
    had: set[str] = set()
    with _Victims(lake, servers, topic, lossy) as victims:
        for moment in victims.moments(kills() or len(_MOMENTS), _MOMENTS):
            if moment not in _OF_UPKEEP:
                produce(servers, topic, values(_EACH, start=sent, partitions=_PARTITIONS))
                sent += _EACH
            before = check_each_once(lake, topic, sent)
            if moment in _OF_UPKEEP:  # small files of runs that were not killed
                run(servers, lake.address, topic, max_task_records=20)
                before = sent
                had |= _files(lake)
            victims.kill(moment)
            after = check_each_once(lake, topic, sent)
            had |= _files(lake)
            assert after >= before
            if moment in ("before", *_OF_UPKEEP) and lossy is None:
                assert after == before
            if moment == "after" and lossy is None:
                assert after > before
    for _ in range(2):  # the second one removes what attempts that went on have left
        run(servers, lake.address, topic, max_task_records=20)
        assert check_each_once(lake, topic, sent) == sent
    assert _on_disk(lake) <= had | _files(lake), "no orphans"
    found = status(lake.address)
    assert (found.findings, found.unfinished) == ([], "")
    if place == "disk" and kills():
        assert by_spark(lake, tmp_path) == expected(topic, dict.fromkeys(range(_PARTITIONS), sent // _PARTITIONS))


@pytest.mark.parametrize("how", ["merged", pytest.param("partitioned", marks=in_soak)])
def test_killed_while_it_merges(
    cluster: EmbeddedCluster, topic: str, lake: Lake, lossy: HttpProxy | None, how: str
) -> None:
    """The rows are always those of the source at the offsets of the table's last run."""
    servers = cluster.bootstrap_servers
    source = ChangeSource(servers, topic, _KEYS)

    def check() -> Mapping[str, int]:
        offsets = offsets_of(lake.address, topic)
        readers: Mapping[str, Callable[[], Any]] = lake.readers() if lake.exists() else {}
        for name, read in readers.items():
            assert rows_of(read()) == source.rows(offsets), name
        return offsets

    offsets = check()
    with _Victims(lake, servers, topic, lossy, how) as victims:
        for moment in victims.moments(kills() or len(_OF_MERGES), _OF_MERGES):
            source.change(_CHANGES)
            victims.kill(moment)
            before, offsets = offsets, check()
            assert all(offsets.get(key, 0) >= offset for key, offset in before.items())
            if moment in _BY_ITSELF and lossy is None:
                assert (offsets == before) == (moment == "before")
    for _ in range(2):
        run(servers, lake.address, topic, settings=PARTITIONED[lake.kind] if how == "partitioned" else KEYED)
        assert check() == source.end
    found = status(lake.address)
    assert (found.findings, found.unfinished) == ([], "")
    left = open_folder(open_table(lake.address).location).paths_below("_klog/runs")
    assert not [path for path in left if "/changes/" in path]
