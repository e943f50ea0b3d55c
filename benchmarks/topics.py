"""The load of many topics into tables of their own: a first load, and a round in which few topics have new records."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from benchmarks.brokers import create_topic
from benchmarks.data import PARTITIONS, payload_file
from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.machine import processor_time
from benchmarks.record_batches import take_turns
from benchmarks.sides import SideFailed, SparkSide, klog_side
from spark_klog.base.names import TopicPartition
from spark_klog.client.producer.producer import Producer
from spark_klog.columns.schema import FULL
from spark_klog.load.driving import STEPS_AT_ONCE
from tests.support.servers.kafka import Kafka

_TOPICS, _WITH_NEWS = 200, 10
#: Of a record: as large as changes are.
_SIZE = 1024
#: Records of a topic with something new. With --records 4,000,000 a first load is of 12 million records.
_NEW, _FIRST = 5_000, 3
_NAMES = itertools.count()


def _load_topics(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("load-topics")
    many, one = [f"shop.public.t{number}" for number in range(_TOPICS)], ["shop.public.all"]
    each = bench.records * _FIRST // _TOPICS
    with Kafka("3.9.1", folder / "broker", {"log.retention.ms": "-1"}, full_speed=True) as kafka:
        servers = kafka.bootstrap_servers
        for name in many:
            create_topic(servers, name, 1)
        create_topic(servers, one[0], PARTITIONS)
        _fill(servers, [(name, 0) for name in many], each, folder)
        _fill(servers, [(one[0], number) for number in range(PARTITIONS)], each * _TOPICS // PARTITIONS, folder)
        with klog_side(folder / "klog") as klog:
            klog.start()
            yield from _first(bench, klog, servers, many, one, each * _TOPICS, folder)
            yield _round(bench, klog, servers, many, each * _TOPICS, folder)


def _fill(servers: str, partitions: Sequence[TopicPartition], records: int, folder: Path) -> None:
    """The same records into each partition, in turns, so that their logs grow together.

    By their keys a partition of several would have a part of the lines again and again, which packs three times as
    fast.
    """
    lines = payload_file(folder, _SIZE).read_bytes().splitlines()
    rows = pa.table({"value": pa.array(lines, pa.binary()), "key": pa.array([b"%d" % n for n in range(len(lines))])})
    with Producer({"bootstrap.servers": servers, "compression.type": "lz4"}) as producer:
        for begin in range(0, records, len(lines)):
            for topic, number in partitions:
                part = rows.slice(0, min(len(lines), records - begin))
                producer.send_arrow(part.append_column("partition", pa.array([number] * len(part))), topic)


def _ask(side: SparkSide, servers: str, topics: Sequence[str], output: str, records: int) -> float:
    """Seconds of a round of these loads, whose process goes on."""
    answer = side.ask("load_topics", {"servers": servers, "topics": ",".join(topics), "output": output})
    if answer["rows"] != records:
        raise SideFailed(f"{answer['rows']} records were written; there are {records}")
    return float(answer["seconds"])


def _output(folder: Path) -> str:
    return f"delta:{folder / f'lake-{next(_NAMES)}'}/{{topic}}"


def _first(
    bench: Bench, side: SparkSide, servers: str, many: Sequence[str], one: Sequence[str], records: int, folder: Path
) -> Iterator[Result]:
    work = f"first load of {records:,} records of {_SIZE:,} B into Delta, local[2]"
    peer, last = Side("one topic"), {}
    result = Result(work, "M records/s", Side(f"{len(many)} topics, a table each"), peer, bench.command)
    bound = Side(f"one topic, then {len(many)} tables by deltalake alone")
    worked = {len(many): Side(result.klog.name), len(one): Side(peer.name)}

    def rate(topics: Sequence[str]) -> float:
        before = processor_time(side.pid)
        last[len(topics)] = _ask(side, servers, topics, _output(folder), records)
        worked[len(topics)].add(processor_time(side.pid) - before)
        return records / 1e6 / last[len(topics)]

    def with_bare_tables() -> float:
        return records / 1e6 / (last[len(one)] + _bare_tables(folder / f"bare-{next(_NAMES)}", len(many)))

    turns = [(result.klog, partial(rate, many)), (peer, partial(rate, one)), (bound, with_bare_tables)]
    take_turns(turns, bench.repeat)
    yield result
    yield Result(
        "the bound of that: the same, and what no load can leave out", "M records/s", bound, peer, bench.command
    )
    work = f"{work}: processor time of driver, JVM and workers"
    yield Result(work, "s", worked[len(many)], worked[len(one)], bench.command, False)


def _bare_tables(folder: Path, count: int) -> float:
    """Seconds that deltalake takes for tables, each with a commit of a file, in as many threads as the loads have."""

    def make(number: int) -> None:
        table = DeltaTable.create(str(folder / str(number)), FULL)
        file = AddAction("file.parquet", 1, {}, 0, True, "{}")
        table.create_write_transaction([file], "append", table.schema(), [])

    started = time.perf_counter()
    with ThreadPoolExecutor(STEPS_AT_ONCE) as threads:
        list(threads.map(make, range(count)))
    return time.perf_counter() - started


def _round(bench: Bench, side: SparkSide, servers: str, many: Sequence[str], records: int, folder: Path) -> Result:
    some = many[:_WITH_NEWS]
    work = f"a round of --follow, {_WITH_NEWS} topics with {_NEW:,} new records each, into Delta, local[2]"
    result = Result(
        work, "s", Side(f"of {len(many)} topics"), peer := Side(f"of these {len(some)}"), bench.command, False
    )
    places = {_TOPICS: _output(folder), _WITH_NEWS: _output(folder)}

    def ask(topics: Sequence[str], count: int) -> float:
        return _ask(side, servers, topics, places[len(topics)], count)

    def of_many() -> float:
        for topics in (many, some):  # one that finds nothing new
            ask(topics, 0)
        _fill(servers, [(name, 0) for name in some], _NEW, folder)
        return ask(many, _NEW * len(some))

    ask(many, records)
    ask(some, records // len(many) * len(some))
    take_turns([(result.klog, of_many), (peer, lambda: ask(some, _NEW * len(some)))], bench.repeat)
    return result


LOAD_TOPICS = Work(
    "load-topics",
    _load_topics,
    (
        f"Many topics: {_TOPICS} topics of a partition each into Delta tables of their own, by the loads of one job in "
        "a session that is up, from the call to its end, when all tables are committed; and one topic of "
        f"{PARTITIONS} partitions with as many records into one table. A round is one of --follow, in a process that "
        "has loaded the topics before.",
        "Wanted: 0.9 of one topic, and at most 1.5 times as long as the topics with something new alone (a ratio of "
        "0.67). The bound is of what the machine does at best if nothing but deltalake's own creation and commit of "
        "the tables came to the load of one topic. The processor time says how much a busy machine has to do with it.",
    ),
)
