"""The peak memory of Spark's Python workers over a long read and a long write."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchmarks.broker_pair import check_count, delete_topic, topic as new_topic
from benchmarks.data import PARTITIONS, produce
from benchmarks.figures import Result, Side
from benchmarks.sides import SideFailed, SparkSide, klog_side, read_all, recorded, topic_options
from benchmarks.work import Bench, Work
from tests.support.kafka import Kafka

_SIZE = 1024
#: With --records 4,000,000, 10 GiB are read.
_RECORDS_FOR_EACH = 2.62144
_LIMIT_MB, _WRITE_LIMIT_MB = 400, 300
_CODECS = ("none", "lz4")


def _worker_memory(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("worker-memory")
    records = int(bench.records * _RECORDS_FOR_EACH)
    with Kafka("3.9.1", folder / "broker", full_speed=True) as kafka:
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
                options = topic_options(kafka.bootstrap_servers, topic)
                peak = peak_memory(side, partial(read_all, side, options, records, _SIZE))
                if peak > _LIMIT_MB:
                    raise SideFailed(f"{peak:.0f} MB; {_LIMIT_MB} are allowed")
                result.klog.samples.append(peak)
            yield result
            delete_topic(kafka.bootstrap_servers, topic)
            yield _writing(bench, kafka, folder / f"write-{codec}", records, codec)


def _writing(bench: Bench, kafka: Kafka, folder: Path, records: int, codec: str) -> Result:
    work = f"peak memory of a Python worker that writes {records * _SIZE / 1e9:.1f} GB of {_SIZE:,} B rows, {codec}"
    result = Result(work, "MB", Side("klog"), None, bench.command, higher_is_better=False)
    with recorded(result.klog), klog_side(folder) as side, new_topic(kafka.bootstrap_servers, f"to-{codec}") as name:
        side.start()
        options = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "topic": name, "kafka.compression.type": codec}
        rows = {"rows": str(records), "size": str(_SIZE), "files": "4"}
        peak = peak_memory(side, partial(side.ask, "write", options, **rows))
        check_count(kafka, name, records)
        if peak > _WRITE_LIMIT_MB:
            raise SideFailed(f"{peak:.0f} MB; {_WRITE_LIMIT_MB} are allowed")
        result.klog.samples.append(peak)
    return result


def peak_memory(side: SparkSide, run: Callable[[], object]) -> float:
    """The largest VmHWM, in MB, of the Python processes below the side's JVM."""
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
        run()
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
    (
        "Worker memory: VmHWM of the Python processes under Spark's JVM during one read or write in local[2], the "
        "largest. Tasks make up the rows that are written.",
    ),
)
