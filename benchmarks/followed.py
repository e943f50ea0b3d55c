"""A table that is followed: its files, its metadata and the time of its commits, over many runs with their upkeep.

    python -m benchmarks.followed SERVERS TOPIC ADDRESS RUNS EVERY UPKEEP

follows a topic in this process, without Spark, and prints a line of JSON for each run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.sides import SideFailed, project_environment
from spark_klog.client.producer.producer import Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.files import open_folder
from spark_klog.load.by_topic import Loads
from spark_klog.load.follow import follow
from spark_klog.load.run import LoadOptions
from spark_klog.load.upkeep import Upkeep
from spark_klog.tables.opening import open_table
from spark_klog.tables.upkeep import Kept
from tests.load.support import InProcess
from tests.spark.support import create_topic

_CATALOG = "bench"
_PARTITIONS, _EACH = 24, 5_000
#: Seconds from run to run, and from upkeep to upkeep, which keeps what is younger: of the usual measurement, and of the
#: one in real time.
_QUICK, _LIVE = (0.0, 60.0), (10.0, 600.0)
#: Of a figure over time.
_PARTS = 10
_FIGURES = {
    "commit_s": ("commit of a run, median", "s"),
    "commit_cpu_s": ("processor time of a commit, median", "s"),
    "files": ("files of the table, most", "files"),
    "on_disk": ("data files in its folder, most", "files"),
    "metadata": ("metadata in its folder (Delta's log, Iceberg's metadata/), most", "MB"),
}


def _measure(bench: Bench, every: float, upkeep: float, *, at_once: bool) -> Iterator[Result]:
    runs = max(_PARTS, bench.records // _EACH)
    folder = bench.folder("followed")
    (folder / "iceberg").mkdir()
    places = {"delta": f"delta:{folder / 'delta'}", "iceberg": f"iceberg:{_CATALOG}.web.clicks"}
    with EmbeddedCluster(data_dir=folder / "broker") as cluster:
        for kind in places:
            create_topic(cluster.bootstrap_servers, kind, _PARTITIONS)

        def start(kind: str) -> subprocess.Popen[bytes]:
            words = [kind, places[kind], str(runs), str(every), str(upkeep)]
            with (folder / f"{kind}.jsonl").open("wb") as lines:
                return subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.followed", cluster.bootstrap_servers, *words],
                    cwd=Path(__file__).parents[1],
                    env=os.environ | project_environment() | _catalog(folder),
                    stdout=lines,
                )

        started = {kind: start(kind) for kind in places} if at_once else {}
        for kind in places:
            with started.get(kind) or start(kind) as process:
                pass
            lines = [json.loads(line) for line in (folder / f"{kind}.jsonl").read_bytes().splitlines()]
            if process.returncode or len(lines) != runs:
                raise SideFailed(f"{kind}: {len(lines)} of {runs} runs, exit code {process.returncode}")
            yield from _results(kind, lines, every, upkeep, bench.command)


def _catalog(folder: Path) -> dict[str, str]:
    place = {"URI": f"sqlite:///{folder / 'catalog.db'}", "WAREHOUSE": str(folder / "iceberg"), "TYPE": "sql"}
    return {f"PYICEBERG_CATALOG__{_CATALOG.upper()}__{name}": value for name, value in place.items()}


def _results(
    kind: str, lines: Sequence[Mapping[str, float]], every: float, upkeep: float, command: str
) -> Iterator[Result]:
    pace = f"one every {every:g} s" if every else "one after the other"
    what = (
        f"{kind}, {len(lines)} runs of {_EACH:,} records, {pace}, {_PARTITIONS} partitions, upkeep every {upkeep:g} s"
    )
    for name, (figure, unit) in _FIGURES.items():
        values = [line[name] for line in lines]
        parts = [values[at * len(values) // _PARTS : (at + 1) * len(values) // _PARTS] for at in range(_PARTS)]
        samples = [median(part) if unit == "s" else max(part) for part in parts]
        yield Result(f"{figure}: {what}", unit, Side(f"{_PARTS} parts of the time", samples), None, command)


def _follow(servers: str, topic: str, address: str, runs: int, every: float, upkeep: float) -> None:
    table, commits = open_table(address), list[tuple[float, float]]()
    real: Callable[..., None] = type(table).append

    def append(*arguments: Any) -> None:
        start, busy = time.perf_counter(), time.process_time()
        real(*arguments)
        commits.append((time.perf_counter() - start, time.process_time() - busy))

    type(table).append = append  # type: ignore[assignment, method-assign]
    asked = LoadOptions({"bootstrap.servers": servers}, [topic], address)
    keeper = Upkeep(upkeep, Kept(upkeep))
    with Producer({"bootstrap.servers": servers, "compression.type": "lz4"}) as producer:
        loads = Loads(asked, [topic], None, address, InProcess(), lambda _total, _done: nullcontext())

        def produce_and_load() -> Any:
            for number in range(_EACH):
                producer.send(topic, value=b"%0100d" % number, partition=number % _PARTITIONS)
            producer.flush()
            return loads.round()

        for report in islice(follow(produce_and_load, every, 1, lambda: False), runs):
            if report.error is not None:
                raise report.error
            done = keeper.after(report.outcomes, lambda: False)
            line: dict[str, Any] = {"at": report.began, "round_s": report.seconds}
            line["commit_s"], line["commit_cpu_s"] = commits[-1]
            line |= _sizes(address)
            if done is not None:
                [kempt] = done.outputs
                line["upkeep"] = {"seconds": done.seconds, **kempt.to_json()}
            print(json.dumps(line), flush=True)  # noqa: T201


def _sizes(address: str) -> dict[str, float]:
    table = open_table(address)
    below = open_folder(table.location).sizes_below("")
    metadata = sum(size for path, size in below.items() if path.startswith(("_delta_log/", "metadata/")))
    on_disk = sum(path.endswith(".parquet") and not path.startswith("_") for path in below)
    return {"files": sum(1 for _ in table.files()), "on_disk": on_disk, "metadata": metadata / 1e6}


_NOTES = (
    f"A topic of {_PARTITIONS} partitions, followed into a table on a local disk, without Spark: each run has new "
    "records in all partitions. An upkeep compacts and expires by one duration: what is younger stays. The rows of "
    "every run are the tenths of the time, in their order: a table that keeps its files, its metadata and the time of "
    "its commits has the same figures in all of them, but for the first ones.",
)
FOLLOWED = Work("followed", lambda bench: _measure(bench, *_QUICK, at_once=False), _NOTES)
FOLLOWED_LIVE = Work(
    "followed-live",
    lambda bench: _measure(bench, *_LIVE, at_once=True),
    (*_NOTES, "Both tables are followed at once, in a process each. This section is measured only if it is named."),
    is_of_all=False,
)


if __name__ == "__main__":
    _follow(*sys.argv[1:4], int(sys.argv[4]), float(sys.argv[5]), float(sys.argv[6]))
