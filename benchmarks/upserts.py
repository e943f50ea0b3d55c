"""An upsert of few changes into a large partitioned table, beside Spark's MERGE by the jars of Delta and Iceberg.

    python -m benchmarks.run --records 10000000 --only upserts

Each side has a table of its own with the same rows: `--records` of them, in partitions by `region`, the keys of which
are one after the other. A change is one of a thousandth of the rows, in 4 of 64 partitions; each run has others.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake
from pyiceberg.catalog import load_catalog

from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.machine import ROOT
from benchmarks.record_batches import take_turns
from benchmarks.sides import Lines, SideFailed, SparkSide
from spark_klog.tables.change_files import ChangeWriter, change_files
from spark_klog.tables.changes import ChangeFormat
from spark_klog.tables.opening import open_table
from spark_klog.tables.table import Run
from tests.support.spark.spark_tables import Kind, table_python, table_settings

_REGIONS, _CHANGED, _SHARE = 64, 4, 1000
_SECONDS = 900.0
_KEY = pa.struct([("region", pa.int32()), ("id", pa.int64())])
_ROW = pa.struct([*_KEY, ("name", pa.string()), ("amount", pa.float64()), ("note", pa.string())])
_FORMAT = ChangeFormat(_KEY, _ROW)
_NAMES = ("klog", "jvm")


def _upserts(bench: Bench) -> Iterator[Result]:
    for kind in ("delta", "iceberg"):
        yield from _of_format(bench, kind, bench.folder(f"upserts-{kind}"))  # type: ignore[arg-type]


def _of_format(bench: Bench, kind: Kind, folder: Path) -> Iterator[Result]:
    (folder / "changes").mkdir()
    for name in _NAMES:
        _fill(kind, folder, name, bench.records)
    work = (
        f"{bench.records // _SHARE:,} changes in {_CHANGED} of {_REGIONS} partitions of {bench.records:,} rows, {kind}"
    )
    names = "klog, upsert", "Spark, MERGE, local[2]"
    units = ("s", "MB read", "MB written", "MB of memory at most")
    results = [
        Result(f"{work}, {unit}", unit, Side(names[0]), Side(names[1]), bench.command, higher_is_better=False)
        for unit in units
    ]
    warehouse = _warehouse(folder, _NAMES[1]) if kind == "iceberg" else None
    confs = table_settings(kind, "bench", warehouse) | {"spark.driver.memory": "4g"}
    confs |= {"spark.sql.parquet.compression.codec": "zstd", "spark.sql.shuffle.partitions": "4"}
    confs |= {"spark.databricks.delta.snapshotPartitions": "4"}  # 50 tasks for the log, by default
    spark = SparkSide(names[1], "klog", folder, python=table_python(kind), confs=confs)
    with _OurSide(kind, folder) as ours, spark:
        spark.start()
        numbers = iter(range(1, 1000))

        def run(side: int, ask: Callable[[str, int], Mapping[str, Any]], process: Callable[[], int | None]) -> float:
            number = next(numbers)
            path = str(folder / "changes" / f"{number}.parquet")
            pq.write_table(_changes(number, bench.records), path)
            before = _io(process())
            answer = ask(path, number)
            figures = [now - then for now, then in zip(_io(process()), before, strict=True)]
            seconds = float(answer["seconds"])
            for result, figure in zip(results[1:], [*figures, _memory(process())], strict=True):
                result.sides[side].add(figure)
            return seconds

        def merge(path: str, _: int) -> Mapping[str, Any]:
            return spark.ask("statement", {}, text=_merge(kind, folder, path))

        sides = [
            (results[0].sides[0], partial(run, 0, ours.ask, lambda: ours.pid)),
            (results[0].sides[1], partial(run, 1, merge, lambda: spark.pid)),
        ]
        take_turns(sides, bench.repeat)
    yield from results


def _warehouse(folder: Path, name: str) -> Path:
    """The folder of a side's catalog: each has its own, as readers of one in SQLite keep writers from committing."""
    made = folder / f"{name}-catalog"
    made.mkdir(exist_ok=True)
    return made


def _options(folder: Path, name: str) -> dict[str, str]:
    warehouse = _warehouse(folder, name)
    return {"uri": f"sqlite:///{warehouse / 'catalog.db'}", "warehouse": str(warehouse), "type": "sql"}


def _fill(kind: Kind, folder: Path, name: str, rows: int) -> None:
    """The table, made as a load makes it, and its rows, a file for each partition."""
    if kind == "delta" and name != _NAMES[0]:
        shutil.copytree(folder / _NAMES[0], folder / name)
        return
    table = _open(kind, folder, name)
    table.prepare(_FORMAT.row, "region", "", "bench", key=_FORMAT.key)
    for region in range(_REGIONS):
        each = rows // _REGIONS
        part = _rows(np.arange(region * each, (region + 1) * each), 0, rows)
        if kind == "delta":
            write_deltalake(str(folder / name), part, mode="append")
        else:
            load_catalog("bench", **_options(folder, name)).load_table(f"web.{name}").append(part)


def _open(kind: Kind, folder: Path, name: str) -> Any:
    if kind == "delta":
        return open_table(f"delta:{folder / name}")
    from spark_klog.tables.iceberg import IcebergTable

    return IcebergTable(f"bench.web.{name}", _options(folder, name))


def _rows(ids: np.ndarray[Any, Any], number: int, rows: int) -> pa.Table:
    """Rows with these ids, as change `number` of them leaves them."""
    chance = np.random.default_rng(number)
    notes = pa.array(chance.integers(0, 1 << 62, len(ids))).cast(pa.string())
    columns = {
        "region": pa.array(ids // (rows // _REGIONS), pa.int32()),
        "id": pa.array(ids, pa.int64()),
        "name": pa.array([f"customer {one % 5000}" for one in ids.tolist()]),
        "amount": pa.array(chance.random(len(ids)).round(2)),
        "note": notes,
        "_klog_incarnation": pa.array(np.zeros(len(ids)), pa.int32()),
        "_klog_partition": pa.array(np.zeros(len(ids)), pa.int32()),
        "_klog_offset": pa.array(number * rows + np.arange(len(ids)), pa.int64()),
        "_klog_timestamp": pa.array(np.full(len(ids), 1_800_000_000_000_000 + number), pa.timestamp("us", tz="UTC")),
    }
    return pa.table(columns).select(_FORMAT.row.names)


def _changes(number: int, rows: int) -> pa.Table:
    """Changes of random keys of some partitions, a twentieth of them deletions."""
    chance = np.random.default_rng(number)
    each = rows // _REGIONS
    regions = chance.choice(_REGIONS, _CHANGED, replace=False)
    ids = np.concatenate([region * each + chance.choice(each, rows // _SHARE // _CHANGED, False) for region in regions])
    deleted = pa.array(chance.random(len(ids)) < 0.05)
    return _rows(ids, number, rows).append_column("_klog_deleted", deleted)


def _merge(kind: Kind, folder: Path, path: str) -> str:
    table = f"delta.`{folder / _NAMES[1]}`" if kind == "delta" else f"bench.web.{_NAMES[1]}"
    names = _FORMAT.row.names
    values = ", ".join(f"c.{name}" for name in names)
    assigned = ", ".join(f"t.{name} = c.{name}" for name in names)
    return (
        f"MERGE INTO {table} t USING parquet.`{path}` c ON t.region = c.region AND t.id = c.id "
        "WHEN MATCHED AND c._klog_deleted AND c._klog_offset > t._klog_offset THEN DELETE "
        f"WHEN MATCHED AND NOT c._klog_deleted AND c._klog_offset > t._klog_offset THEN UPDATE SET {assigned} "
        f"WHEN NOT MATCHED AND NOT c._klog_deleted THEN INSERT ({', '.join(names)}) VALUES ({values})"
    )


def _processes(number: int | None) -> list[psutil.Process]:
    process = psutil.Process(number)
    return [process, *process.children(recursive=True)]


def _io(number: int | None) -> list[float]:
    """MB that the processes have read and written since they began."""
    counters = [process.io_counters() for process in _processes(number)]
    return [sum(one.read_chars for one in counters) / 1e6, sum(one.write_chars for one in counters) / 1e6]


def _memory(number: int | None) -> float:
    """MB that the processes had in memory at most."""
    peaks = 0
    for process in _processes(number):
        status = Path(f"/proc/{process.pid}/status").read_text()
        peaks += int(status.partition("VmHWM:")[2].split()[0]) if "VmHWM:" in status else 0
    return peaks / 1e3


class _OurSide:
    """A process that merges changes as the commit of a load does, tasks included."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self._kind, self._folder = kind, folder

    def __enter__(self) -> _OurSide:
        command = [sys.executable, "-m", "benchmarks.upserts", self._kind, str(self._folder)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=ROOT, **pipes)
        assert self._process.stdout is not None
        self._lines = Lines(self._process.stdout)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, path: str, number: int) -> Mapping[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([path, number]) + "\n")
        self._process.stdin.flush()
        line = self._lines.get(_SECONDS)
        if line is None:
            raise SideFailed("the process ended")
        answer: Mapping[str, Any] = json.loads(line[1])
        return answer


def _serve(kind: Kind, folder: Path) -> None:
    """Merge the changes of files that standard input names; answer the seconds that each took."""
    table = _open(kind, folder, _NAMES[0])
    for count, line in enumerate(sys.stdin, 1):
        path, _ = json.loads(line)
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            paths: list[Path] = []
            writer = ChangeWriter(_FORMAT.key, Path(scratch), lambda file, _, paths=paths: paths.append(file))  # type: ignore[misc]
            for batch in pq.read_table(path).to_batches():
                writer.add(batch)
            writer.finish()
            names = [str(file.relative_to(folder)) for file in paths]
            files = change_files(str(folder), names, _FORMAT.key)
            schema = table.prepare(_FORMAT.row, "region", "", "bench", key=_FORMAT.key)
            assert schema is not None
            table.upsert(files, Run("bench", count, f"t{count}", {"rows": {"0": count}}))
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)  # noqa: T201


UPSERTS = Work(
    "upserts",
    _upserts,
    (
        "Upserts: changes in Parquet files into tables that each side has, in sessions that are up, by the key "
        "(region, id), partitioned by region. Ours are the tasks' files of changes and the commit, by "
        "one process; Spark's is MERGE with delta-spark 4.1.0 and iceberg-spark 1.10.1, with the order of offsets in "
        "its conditions. Read and written are the bytes of system calls of all processes of a side (rchar, wchar), "
        "memory is the sum of their peaks.",
        "Wanted: 1.5 times MERGE.",
    ),
)


def main(arguments: Sequence[str]) -> None:
    kind: Any = arguments[0]
    _serve(kind, Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
