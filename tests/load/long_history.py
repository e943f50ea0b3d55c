"""The journal of a load with thousands of runs, written as runs write it, without a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from spark_klog.base.names import TopicPartition
from spark_klog.load.commit import make_manifest
from spark_klog.load.journal import paths
from spark_klog.load.journal.history import Identity, read_manifest
from spark_klog.load.journal.model import FileEntry, Latest, Plan, Progress, Range, RangeResult, TaskResults
from spark_klog.load.journal.store import open_store, to_json
from spark_klog.load.settings import WriteSettings

EACH = 100
_TIME = 1_700_000_000_000
_HOUR_MS = 3_600_000
_CONTENT = b"records"
_STARTED, _FINISHED = "2026-01-01T00:00:00.000+00:00", "2026-01-01T00:00:01.000+00:00"


def write_runs(output: Path, numbers: Iterable[int], partitions: int = 2, load: str = "load") -> None:
    """Write hourly runs of topic t, each with `EACH` records of each partition; the files have no records in them."""
    settings, progress = asdict(WriteSettings()), _progress(output)
    (output / "t").mkdir(parents=True, exist_ok=True)
    _write(output / paths.LOAD, to_json(Identity(load, "", "parquet")))
    number = 0
    for number in numbers:
        first = progress.get(("t", 0), Progress(0)).offset
        ranges = [Range("t", partition, first, first + EACH) for partition in range(partitions)]
        time = _TIME + number * _HOUR_MS
        results = []
        for item in ranges:
            path = paths.file(item, item.start, item.end - 1, "", f"{number:07d}", "parquet")
            _write(output / path, _CONTENT)
            entry = FileEntry(path, "t", item.partition, item.start, item.end - 1, EACH, len(_CONTENT), time, time)
            hour = f"2026-{number // 720 % 12 + 1:02d}-{number // 24 % 28 + 1:02d}T{number % 24:02d}"
            gaps, letters, files = {}, [], [entry]
            results.append(
                RangeResult(
                    "t", item.partition, item.start, item.end, EACH, 7, time, time, gaps, {hour: EACH}, files, letters
                )
            )
        plan = Plan(number, _STARTED, ["t"], [ranges], settings)
        manifest = make_manifest(plan, results, progress, {(one.topic, one.partition): one.end for one in ranges})
        manifest = replace(manifest, finished=_FINISHED)
        progress = manifest.progress()
        _write(output / paths.plan(number), to_json(plan))
        _write(output / paths.task(number, 0), to_json(TaskResults(results)))
        _write(output / paths.manifest(number), to_json(manifest))
    pointer = Latest(paths.run_name(number), paths.manifest(number), _FINISHED)
    _write(output / paths.LATEST, to_json(pointer))


def _progress(output: Path) -> dict[TopicPartition, Progress]:
    runs = sorted((output / "_klog" / "runs").glob("*/manifest.json"))
    manifest = read_manifest(open_store(str(output)), int(runs[-1].parent.name)) if runs else None
    return manifest.progress() if manifest is not None else {}


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
