"""How requests, bytes, connections, memory and processor time grow with partitions, brokers and tasks.

    python -m benchmarks.scale [--only KIND ...] [--plot docs/explanation/scale.svg] [--json FILE]

prints the tables of docs/explanation/scale.md. The cluster is simulated, in a process of its own: what is measured is
this side's. Each size has a process of its own, for its memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.machine import ROOT
from benchmarks.sides import jvm_side, klog_side
from spark_klog.client import Admin, Consumer
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import GroupOffsets
from spark_klog.columns.schema import FULL
from spark_klog.groups.lag import partition_lags
from spark_klog.load.journal.model import Progress
from spark_klog.load.planning import Look, find_extent, make_tasks
from spark_klog.mirror.mirror import Mirror
from spark_klog.mirror.settings import MirrorSettings
from spark_klog.spark.options import SourceOptions, source_options
from spark_klog.spark.read.batch_query import plan_batch_query
from spark_klog.spark.read.broker_source import BrokerSource
from spark_klog.spark.read.pushdown import Pushed
from spark_klog.spark.read.stream import StreamReader
from spark_klog.spark.read.tasks import read_ranges
from spark_klog.spark.versions import ReadAllAvailable
from spark_klog.ui import views
from tests.support.brokers.simulated_cluster import SimulatedCluster, topic_name

#: (topics, partitions of each, brokers): by partitions, then by brokers.
SIZES = ((100, 10, 100), (1000, 10, 100), (5000, 10, 100))
BROKERS = ((1000, 10, 10), (1000, 10, 30), (1000, 10, 100))
_EACH, _RECORDS, _NEWS, _TASKS = 10, 100, 100, 1000
Step = tuple[str, Callable[[], object]]


def _options(cluster: SimulatedCluster, **more: str) -> SourceOptions:
    servers = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "kafka.request.timeout.ms": "120000"}
    return source_options({**servers, "subscribepattern": "t.*", "startingoffsets": "earliest", **more}, True)


def _stream(cluster: SimulatedCluster, partitions: int) -> Iterator[Step]:
    reader, ends = StreamReader(_options(cluster), FULL), [{}]

    def plan() -> None:
        ends.append(reader.latestOffset(ends[-1], ReadAllAvailable()))
        if ends[-1] != ends[-2]:
            reader.partitions(ends[-2], ends[-1])

    yield "stream: first plan", plan
    yield "stream: plan without news", plan
    cluster.tell("append", every=max(1, partitions // _NEWS), records=_RECORDS)
    yield f"stream: plan, {_NEWS} partitions have news", plan
    yield "stream: offsets as JSON and back", lambda: json.loads(json.dumps(ends[-1]))
    reader.stop()


def _batch(cluster: SimulatedCluster, partitions: int) -> Iterator[Step]:
    options = _options(cluster)
    with closing(BrokerSource.connect(options)) as source:
        yield "batch: plan", lambda: plan_batch_query(source, options, Pushed())


def _tasks(cluster: SimulatedCluster, partitions: int) -> Iterator[Step]:
    options = _options(cluster, minpartitions=str(_TASKS))
    reader = StreamReader(options, FULL)
    tasks: list[Any] = reader.partitions({}, reader.latestOffset({}, ReadAllAvailable()))

    def read() -> None:
        rows = 0
        for task in tasks:
            batches = read_ranges(options, task.ranges, FULL, task.topic_ids, leaders=task.leaders)
            rows += sum(batch.num_rows for batch in batches)
        assert rows >= partitions * _RECORDS

    assert len(tasks) >= _TASKS
    yield f"tasks: {_TASKS:,} and a few in one worker", read
    reader.stop()


def _client(cluster: SimulatedCluster, partitions: int) -> Iterator[Step]:
    settings = _settings(cluster)
    with Admin(settings) as admin:
        yield "Admin: list of topics", admin.list_topics
        yield "Admin: describe all topics", lambda: admin.describe_topics(_topics(cluster))
    with Cluster.connect(settings) as client:
        group = GroupOffsets(client, "g")
        names = client.partitions(list(client.metadata(None)))
        offsets = {(topic, number): 1 for topic, numbers in names.items() for number in numbers}
        yield "group: commit of all offsets", lambda: group.commit(offsets)
        yield "group: lag (klog groups lag)", lambda: partition_lags(client, {"g": group.fetch()})


def _consumer(cluster: SimulatedCluster, partitions: int) -> Iterator[Step]:
    keys = [(name, number) for name in _topics(cluster) for number in range(_EACH)]
    others = sum((number // _EACH + number % _EACH) % cluster.brokers != 7 for number in range(partitions))
    with Consumer(_settings(cluster, **{"auto.offset.reset": "latest"})) as consumer:

        def assign() -> None:
            consumer.assign(keys)
            for key in keys:
                consumer.position(*key)

        yield "consumer: positions of all", assign
        yield "consumer: first fetches, 5 s", lambda: consumer.poll(5)
        yield "consumer: 5 s without news", lambda: consumer.poll(5)
        cluster.tell("append", every=max(1, partitions // _NEWS), records=_RECORDS)
        yield f"consumer: {_NEWS} partitions have news", lambda: _poll(consumer, _NEWS * _RECORDS)
        cluster.tell("stop", node=7)
        cluster.tell("append", every=1, records=1)
        yield "consumer: all have news, a broker is gone", lambda: _poll(consumer, others)
        cluster.tell("start", node=7)
        _poll(consumer, partitions - others)
        cluster.tell("slow", node=7, throttle_ms=60_000)
        cluster.tell("append", every=1, records=1)
        yield "consumer: all have news, a broker throttles", lambda: _poll(consumer, others)


def _poll(consumer: Consumer, records: int) -> None:
    while records > 0:
        records -= len(consumer.poll(1))


def _group(cluster: SimulatedCluster, partitions: int) -> Iterator[Step]:
    more = {"group.id": "all", "group.protocol": "consumer", "auto.offset.reset": "latest"}
    with Consumer(_settings(cluster, **more)) as consumer:

        def join() -> None:
            consumer.subscribe(_topics(cluster))
            while len(consumer.assignment()) < partitions:
                consumer.poll(0.5)

        yield "KIP-848: join, and all partitions", join
        for key in consumer.assignment():
            consumer.position(*key)
        consumer.poll(5)
        yield "KIP-848: 5 s, a heartbeat each second", lambda: consumer.poll(5)


def _page(cluster: SimulatedCluster, partitions: int) -> Iterator[Step]:
    size = 0

    def overview() -> None:
        nonlocal size
        size = len(json.dumps(views.overview(admin)))

    with Admin(_settings(cluster)) as admin:
        yield "klog ui: overview", overview
        yield "klog ui: overview again, each 2 s", overview
        sys.stderr.write(f"the page gets {size / 1e6:.2f} MB\n")
        yield "klog ui: a topic", lambda: views.topic(admin, "t00001")
        yield "klog ui: groups", lambda: views.groups(admin)


def _load(cluster: SimulatedCluster, partitions: int) -> Iterator[Step]:
    with Cluster.connect(_settings(cluster)) as client:
        names, looks = _topics(cluster), []

        def plan() -> None:
            looks.append(Look.at(client, names))
            make_tasks(find_extent(client, looks[-1], {}, fail_on_loss=True), 8, None, client.last_leader)

        def again() -> None:
            extent = find_extent(client, Look.at(client, names), progress, fail_on_loss=True)
            assert not extent.records

        yield "load: plan", plan
        progress = {key: Progress(offset, 0, looks[0].ids[key]) for key, offset in looks[0].end.items()}
        yield "load: a round without news", again


def _mirror(cluster: SimulatedCluster, partitions: int) -> Iterator[Step]:
    """The figures of requests are the source's; the target has the topics already."""
    with SimulatedCluster(cluster.topics, cluster.partitions, cluster.brokers) as target:
        own = {"bootstrap.servers": target.bootstrap_servers}
        mirror = Mirror(MirrorSettings(_settings(cluster), own, start="latest"))
        thread = threading.Thread(target=mirror.run)

        def begin() -> None:
            thread.start()
            _wait(lambda: mirror.totals.partitions == partitions and mirror.totals.lag == 0)

        def copy() -> None:
            cluster.tell("append", every=max(1, partitions // _NEWS), records=_RECORDS)
            _wait(lambda: mirror.totals.records == _NEWS * _RECORDS)

        yield "mirror: begin, at the ends of all", begin
        time.sleep(5)  # first fetches
        yield "mirror: 5 s without news", lambda: time.sleep(5)
        yield f"mirror: {_NEWS} partitions have news", copy
        mirror.stop()
        thread.join()
        asked = {name: count for name, count in target.figures()["requests"].items() if name != "ApiVersions"}
        sys.stderr.write(f"the target was asked {asked}\n")


def _wait(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _topics(cluster: SimulatedCluster) -> list[str]:
    return [topic_name(number) for number in range(cluster.topics)]


def _settings(cluster: SimulatedCluster, **more: str) -> dict[str, str]:
    return {"bootstrap.servers": cluster.bootstrap_servers, "request.timeout.ms": "120000", **more}


def _measure(name: str, topics: int, each: int, brokers: int) -> list[dict[str, Any]]:
    lines, process = [], psutil.Process()
    with SimulatedCluster(topics, each, brokers, _RECORDS) as cluster:
        before = process.memory_info().rss
        for step, run in _KINDS[name](cluster, topics * each):
            cluster.tell("forget")
            start, busy = time.monotonic(), time.process_time()
            run()
            line = {"step": step, "cpu_s": time.process_time() - busy, "wall_s": time.monotonic() - start}
            line |= {"memory_mb": (process.memory_info().rss - before) / 1e6, **cluster.figures()}
            lines.append({**line, "kind": name, "at": [topics, each, brokers]})
    return lines


_KINDS: dict[str, Callable[[SimulatedCluster, int], Iterator[Step]]] = {
    "stream": _stream,
    "batch": _batch,
    "tasks": _tasks,
    "client": _client,
    "consumer": _consumer,
    "group": _group,
    "page": _page,
    "load": _load,
    "mirror": _mirror,
}


def _apart(name: str, size: tuple[int, int, int]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", __spec__.name, "--one", name, *map(str, size)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=600)
    lines: list[dict[str, Any]] = json.loads(done.stdout)
    return lines


def _bench(bench: Bench) -> Iterator[Result]:
    topics, each, brokers = SIZES[-1] if bench.records >= 1_000_000 else (100, 10, 10)
    sides: dict[tuple[str, str], Side] = {}
    for _ in range(bench.repeat + 1):
        for kind in ("stream", "tasks"):
            for line in _apart(kind, (topics, each, brokers)):
                for unit, value in _figures(line).items():
                    sides.setdefault((line["step"], unit), Side("klog")).add(value)
    for (step, unit), side in sides.items():
        work = f"{step[0].upper()}{step[1:]}; {topics * each:,} partitions, {brokers} brokers"
        yield Result(work, unit, side, None, bench.command, higher_is_better=False)


def _figures(line: dict[str, Any]) -> dict[str, float]:
    requests = sum(count for name, count in line["requests"].items() if name != "ApiVersions")
    figures = {"s of processor time": line["cpu_s"], "MB": line["memory_mb"]}
    return figures | {"requests": requests, "new connections": line["opened"]}


def _beside_jvm(topics: int, each: int, brokers: int) -> None:
    """A stream by AvailableNow, started again each time with a record more in 100 partitions, here and by the JVM."""
    with SimulatedCluster(topics, each, brokers) as cluster, TemporaryDirectory() as folder:
        options = {"subscribePattern": "t.*", "startingOffsets": "earliest"}
        options["kafka.bootstrap.servers"] = cluster.bootstrap_servers
        for side in (klog_side(Path(folder)), jvm_side(Path(folder))):
            with side:
                side.start()
                for number in range(4):
                    cluster.tell("append", every=max(1, topics * each // _NEWS), records=1)
                    cluster.tell("forget")
                    answer = side.ask("stream", options, folder=f"{folder}/{side.name[:4]}")
                    requests = cluster.figures()["requests"]
                    sys.stdout.write(f"{side.name}: run {number}: {answer}, {requests}\n")
                    sys.stdout.flush()


SCALE = Work(
    "scale",
    _bench,
    (
        "Scale: a simulated cluster, whose answers are computed, in a process of its own; each run is a new process. "
        f"{_NEWS} partitions have news of {_RECORDS} records. MB are what the process has grown by; a worker has the "
        "driver's here, too. Wanted: a first plan in 10 s, a plan with news in 1 s and 200 MB, offsets as JSON and "
        "back in 0.1 s, 2 connections a broker in a worker. docs/explanation/scale.md has the reasons.",
    ),
)


def _requests(line: dict[str, Any]) -> dict[str, int]:
    return {name: count for name, count in sorted(line["requests"].items()) if name != "ApiVersions"}


def _row(step: str, by_size: dict[tuple[int, ...], dict[str, Any]]) -> str:
    largest = by_size[SIZES[-1]]
    grown = [by_size[size] for size in SIZES]
    cells = (
        step,
        ", ".join(f"{count} {name}" for name, count in _requests(largest).items()) or "none",
        ", ".join(str(sum(_requests(by_size[size]).values())) for size in BROKERS),
        f"{largest['received'] / 1e6:.2f}, {largest['sent'] / 1e6:.2f}",
        f"{largest['opened']}, {largest['open']}",
        ", ".join(f"{line['cpu_s']:.2f}" for line in grown),
        ", ".join(f"{line['memory_mb']:.0f}" for line in grown),
    )
    return f"| {' | '.join(cells)} |"


def _tables(lines: list[dict[str, Any]]) -> str:
    """A table for each kind: a line for each step, at the largest size and, where it grows, at all."""
    places = ", ".join(f"{topics * each:,}" for topics, each, _ in SIZES)
    brokers = ", ".join(str(size[2]) for size in BROKERS)
    head = f"| step | requests | by {brokers} brokers | MB sent, received | connections opened, open | "
    head += f"processor s at {places} partitions | memory MB |\n{'| --- ' * 7}|"
    parts = []
    for kind in dict.fromkeys(line["kind"] for line in lines):
        steps: dict[str, dict[tuple[int, ...], dict[str, Any]]] = {}
        for line in lines:
            if line["kind"] == kind:
                steps.setdefault(line["step"], {})[tuple(line["at"])] = line
        parts.append("\n".join([f"### {kind}\n", head, *(_row(step, by_size) for step, by_size in steps.items())]))
    return "\n\n".join(parts) + "\n"


def _plot(lines: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "scale"
    from matplotlib import pyplot as plt

    kinds = list(dict.fromkeys(line["kind"] for line in lines))
    figure, axes = plt.subplots(-(-len(kinds) // 3), 3, figsize=(12, 3 * -(-len(kinds) // 3)), squeeze=False)
    for axis, kind in zip(axes.flat, kinds, strict=False):
        of_kind = [line for line in lines if line["kind"] == kind and line["at"][2] == SIZES[0][2]]
        places = sorted({line["at"][0] * line["at"][1] for line in of_kind})
        memory = axis.twinx()
        for step in dict.fromkeys(line["step"] for line in of_kind):
            points = {line["at"][0] * line["at"][1]: line for line in of_kind if line["step"] == step}
            axis.plot(places, [points[place]["cpu_s"] for place in places], marker="o", label=step.partition(": ")[2])
        most = [max(line["memory_mb"] for line in of_kind if line["at"][0] * line["at"][1] == at) for at in places]
        memory.plot(places, most, color="grey", linestyle="dashed")
        axis.set(title=kind, xlabel="partitions", ylabel="processor seconds", ylim=(0, None))
        memory.set(ylabel="MB (dashed)", ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--spark", nargs=3, type=int, help="topics, partitions and brokers of a run beside the JVM")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=sorted(_KINDS), default=list(_KINDS))
    arguments = parser.parse_args()
    if arguments.one:
        name, *size = arguments.one
        json.dump(_measure(name, *map(int, size)), sys.stdout)
        return
    if arguments.spark:
        _beside_jvm(*arguments.spark)
        return
    lines = []
    for name in arguments.only:
        for size in dict.fromkeys((*SIZES, *BROKERS)):
            sys.stderr.write(f"{name} {size}\n")
            lines += _apart(name, size)
    sys.stdout.write(_tables(lines))
    if arguments.json:
        arguments.json.write_text(json.dumps(lines, indent=1) + "\n")
    if arguments.plot:
        _plot(lines, arguments.plot)


if __name__ == "__main__":
    _main()
