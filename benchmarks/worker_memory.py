"""The peak memory of Spark's Python workers over a long read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.data import PARTITIONS, produce
from benchmarks.figures import Result, Side
from benchmarks.sides import SideFailed, SparkSide, klog_side, read_all, recorded, topic_options
from benchmarks.work import Bench, Work
from tests.support.kafka import Kafka

_SIZE = 1024
#: With 4,000,000 records as the setting 10 GiB are read.
_RECORDS_FOR_EACH = 2.62144
_LIMIT_MB = 400
_CODECS = ("none", "lz4")


def _worker_memory(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("worker-memory")
    records = int(bench.records * _RECORDS_FOR_EACH)
    with Kafka("3.9.1", folder / "broker", heap="1g") as kafka:
        for codec in _CODECS:
            topic = f"long-{codec}"
            kafka.create_topic(topic, partitions=PARTITIONS)
            produce(kafka.libs, kafka.bootstrap_servers, topic, records, codec, folder, _SIZE)
            result = Result(
                f"peak memory of a Python worker, {records * _SIZE / 1e9:.1f} GB of {_SIZE:,} B records, {codec}",
                "MB",
                Side("klog"),
                None,
                bench.command,
                higher_is_better=False,
            )
            with recorded(result.klog), klog_side(folder / codec) as side:
                side.start()
                peak = _peak(side, topic_options(kafka.bootstrap_servers, topic), records)
                if peak > _LIMIT_MB:
                    raise SideFailed(f"{peak:.0f} MB; {_LIMIT_MB} are allowed")
                result.klog.samples.append(peak)
            yield result


def _peak(side: SparkSide, options: dict[str, str], records: int) -> float:
    """The largest VmHWM of a process under the side's JVM that runs Python, in MB."""
    peaks: dict[int, float] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            for pid in _descendants(side.pid):
                with suppress(OSError, ValueError, IndexError):
                    if "python" in Path(f"/proc/{pid}/exe").resolve().name:
                        peaks[pid] = _high_water_mark(pid)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        read_all(side, options, records, _SIZE)
    finally:
        done.set()
        watcher.join()
    if not peaks:
        raise SideFailed("no Python worker was seen")
    return max(peaks.values())


def _descendants(pid: int | None) -> list[int]:
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents.setdefault(int(path.read_text().rsplit(")", 1)[1].split()[1]), []).append(int(path.parent.name))
    found, waiting = [], [pid] if pid is not None else []
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def _high_water_mark(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1000
    raise ValueError(f"process {pid} has no VmHWM")


WORKER_MEMORY = Work(
    "worker-memory",
    _worker_memory,
    ("Worker memory: VmHWM of the Python processes under Spark's JVM during one read in local[2], the largest.",),
)
