"""Counts of the product's modules, and the walks of a warm call through them: python -m benchmarks.house [--functions].

    modules        Python files in spark_klog
    lines          their lines
    one importer   files that exactly one other file of spark_klog imports
    send_arrow     100 rows of 100 bytes and their flush: files of spark_klog, and Python calls in them
    poll_arrow     100 rows
    write          100 rows by a Spark task, without Spark
    task           a Spark task's read of 3,000 records, without Spark
    task, Avro     the same as rows of ten fields by `valueSchema`
    Produce        a plain request with one batch, in the broker's event loop

Calls are counted by `sys.setprofile` in one thread: the caller's, or the event loop's. What other threads do is not
counted, nor are calls of C. The walk is the shortest of some, since now and then one also looks up metadata.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import BinaryType, StructField, StructType

import spark_klog
from benchmarks.connections import produce_frame
from benchmarks.record_batches import record_batches
from spark_klog.broker.net.server import run
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.client import Admin, Consumer, NewTopic, Producer
from spark_klog.spark.read.source import KlogDataSource
from tests.support.servers.kafka import free_port

_ROOT = Path(spark_klog.__file__).parent
_ROWS, _RECORDS = 100, 3000


def counts() -> dict[str, int]:
    """How many modules there are, how long they are, and how many have one importer."""
    sources = {path: path.read_text() for path in _ROOT.rglob("*.py")}
    modules = {_dotted(path): path for path in sources}
    importers: dict[Path, set[Path]] = defaultdict(set)
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            for name in _imported(node):
                imported = modules.get(name)
                if imported not in (None, path) and imported.name != "__init__.py":
                    importers[imported].add(path)
    return {
        "modules": len(sources),
        "lines": sum(len(source.splitlines()) for source in sources.values()),
        "one importer": sum(len(paths) == 1 for paths in importers.values()),
    }


def _dotted(path: Path) -> str:
    return ".".join((_ROOT.name, *path.relative_to(_ROOT).with_suffix("").parts)).removesuffix(".__init__")


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


class Walk:
    """The functions of spark_klog that a thread calls while this is its profile function, by their first calls."""

    def __init__(self) -> None:
        self.functions: Counter[tuple[str, str]] = Counter()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{_ROOT}/"):
            self.functions[path.removeprefix(f"{_ROOT}/"), frame.f_code.co_name] += 1

    @property
    def calls(self) -> int:
        return self.functions.total()

    @property
    def files(self) -> int:
        return len({path for path, _ in self.functions})


class _Times(NamedTuple):
    """How often a call is made before its walks, and how many walks there are."""

    warm: int
    walks: int

    def walk(self, call: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> Walk:
        """The shortest walk of a warm call; `prepare` is called before each, and does not count."""
        for _ in range(self.warm):
            prepare()
            call()
        return min((_walked(call, prepare) for _ in range(self.walks)), key=lambda walk: walk.calls)


def _walked(call: Callable[[], object], prepare: Callable[[], object]) -> Walk:
    prepare()
    walk = Walk()
    sys.setprofile(walk)
    try:
        call()
    finally:
        sys.setprofile(None)
    return walk


def _walks_of_a_client(servers: str, times: _Times) -> Iterator[tuple[str, Walk]]:
    settings = {"bootstrap.servers": servers}
    rows = pa.table({"value": [b"x" * 100] * _ROWS})
    with Admin(settings) as admin:
        admin.create_topics([NewTopic("arrow", 1), NewTopic("task", 1)])
    consumer = Consumer({**settings, "auto.offset.reset": "earliest"})
    with Producer(settings) as producer, consumer:

        def send() -> None:
            producer.send_arrow(rows, "arrow")
            producer.flush()

        yield "send_arrow", times.walk(send)
        consumer.assign([("arrow", 0)])
        while consumer.poll_arrow(1) is not None:
            pass
        yield "poll_arrow", times.walk(lambda: consumer.poll_arrow(5), send)
        # a record of ten longs, each -1
        producer.send_arrow(pa.table({"value": [b"\1" * 10] * _RECORDS}), "task")
        producer.flush()
    fields = [{"name": f"f{number}", "type": "long"} for number in range(10)]
    schema = json.dumps({"type": "record", "name": "Row", "fields": fields})
    avro = {"valueFormat": "avro", "valueSchema": schema}
    for name, more in (("task", {}), ("task, Avro", avro)):
        source = KlogDataSource({"kafka.bootstrap.servers": servers, "subscribe": "task", **more})
        reader = source.reader(source.schema())
        (partition,) = reader.partitions()
        yield name, times.walk(partial(_read, reader, partition))
    sink = KlogDataSource({"kafka.bootstrap.servers": servers, "topic": "arrow"})
    writer = sink.writer(StructType([StructField("value", BinaryType())]), False)
    yield "write", times.walk(lambda: writer.write(iter(rows.to_batches())))


def _read(reader: DataSourceReader, partition: InputPartition) -> None:
    assert sum(len(batch) for batch in reader.read(partition)) == _RECORDS


def _walk_of_a_produce(servers: str, loop: asyncio.AbstractEventLoop, times: _Times) -> Walk:
    host, port = servers.split(":")
    frame = produce_frame("arrow", 0, record_batches("none", 1, 10))
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        answers = connection.makefile("rb")

        def produce() -> None:
            connection.sendall(frame)
            (size,) = struct.unpack(">i", answers.read(4))
            answers.read(size)

        def walked() -> Walk:
            walk = Walk()
            loop.call_soon_threadsafe(sys.setprofile, walk)
            produce()
            loop.call_soon_threadsafe(sys.setprofile, None)
            return walk

        for _ in range(times.warm):
            produce()
        return min((walked() for _ in range(times.walks)), key=lambda walk: walk.calls)


def walks(warm: int = 100, repeats: int = 20) -> dict[str, Walk]:
    """The shortest of `repeats` walks, after `warm` calls of each: a broker in this thread, its clients in another."""
    result: dict[str, Walk] = {}
    times = _Times(warm, repeats)

    def work(servers: str, loop: asyncio.AbstractEventLoop) -> None:
        try:
            result.update(_walks_of_a_client(servers, times))
            result["Produce"] = _walk_of_a_produce(servers, loop, times)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def ready(servers: str) -> None:
        threading.Thread(target=work, args=(servers.split()[-1], asyncio.get_running_loop())).start()

    with tempfile.TemporaryDirectory() as folder:
        run(BrokerConfig("127.0.0.1", free_port(), data_dir=Path(folder)), ready)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", action="store_true", help="also list the functions of each walk")
    options = parser.parse_args()
    for name, number in counts().items():
        sys.stdout.write(f"{name:14} {number:6,}\n")
    for name, walk in walks().items():
        sys.stdout.write(f"{name:14} {walk.files:3} files {walk.calls:4} calls\n")
        if options.functions:
            for (path, function), number in walk.functions.items():
                sys.stdout.write(f"{number:8}  {path}  {function}\n")


if __name__ == "__main__":
    main()
