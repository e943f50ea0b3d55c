"""The load of JSON without a schema, beside that of the same records by a DDL."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from confluent_kafka import Producer

from benchmarks.brokers import check_count, create_topic
from benchmarks.data import PARTITIONS, ToolFailed
from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.record_batches import take_turns
from benchmarks.sides import SideFailed, SparkSide, klog_side
from tests.support.servers.kafka import Kafka

#: With --records 4,000,000, 2,000,000 are loaded.
_PART = 2
_ROWS, _WAITING = 50_000, 50_000
_DDL = (
    "id bigint, user string, at string, price double, quantity bigint, is_new boolean, tags array<string>, "
    "place struct<lat: double, lon: double>, note string"
)
_NAMES = itertools.count()


def _row(number: int, *, has_note: bool) -> bytes:
    row = {
        "id": number,
        "user": f"user {number % 1000}",
        "at": f"2026-11-29T10:{number % 60:02}:00Z",
        "price": number * 0.25 + 0.125,
        "quantity": number % 7,
        "is_new": number % 3 == 0,
        "tags": ["a", "b"],
        "place": {"lat": 52.5 + number % 10, "lon": 13.25},
    }
    return json.dumps(row | {"note": "x" * 20} if has_note else row, separators=(",", ":")).encode()


def _fill(servers: str, topic: str, count: int, *, is_rare: bool) -> None:
    """Records of which all have a note, or only one in the middle of each partition, where no sample is."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 50, "compression.type": "lz4"})
    values = [_row(number, has_note=not is_rare) for number in range(_ROWS)]
    for sent, value in zip(range(count), itertools.cycle(values)):
        is_middle = is_rare and count // 2 <= sent < count // 2 + PARTITIONS
        producer.produce(topic, _row(sent, has_note=True) if is_middle else value, partition=sent % PARTITIONS)
        while len(producer) > _WAITING:
            producer.poll(0.05)
    if producer.flush(120):
        raise ToolFailed(f"{topic} could not be filled")


def _seconds(side: SparkSide, servers: str, topic: str, records: int, folder: Path, schema: str) -> float:
    place = str(folder / f"load-{next(_NAMES)}")
    answer = side.ask("load", {"servers": servers, "topic": topic, "schema": schema}, folder=place)
    if answer["rows"] != records:
        raise SideFailed(f"{answer['rows']} records were written; there are {records}")
    return float(answer["seconds"])


def _load_json(bench: Bench) -> Iterator[Result]:
    folder, records = bench.folder("load-json"), bench.records // _PART
    with Kafka("3.9.1", folder / "broker", {"log.retention.ms": "-1"}, full_speed=True) as kafka:
        servers = kafka.bootstrap_servers
        with klog_side(folder / "klog") as klog:
            klog.start()
            for topic, what in (("json", ""), ("rare", ", a field of which no sample has")):
                create_topic(servers, topic)
                _fill(servers, topic, records, is_rare=topic == "rare")
                check_count(kafka, topic, records)
                work = f"log to Parquet, zstd, {records:,} JSON records of 9 fields, lz4{what}, local[2]"
                ours, theirs = Side("klog, --schema infer"), Side("klog, --schema DDL")
                sides = [
                    (side, partial(_rate, klog, servers, topic, records, folder, schema))
                    for side, schema in ((ours, "infer"), (theirs, _DDL))
                ]
                take_turns(sides, bench.repeat)
                yield Result(work, "M records/s", ours, theirs, bench.command)


def _rate(side: SparkSide, servers: str, topic: str, records: int, folder: Path, schema: str) -> float:
    return records / 1e6 / _seconds(side, servers, topic, records, folder, schema)


LOAD_JSON = Work(
    "load-json",
    _load_json,
    (
        "JSON without a schema: the same records by `--schema infer` and by their DDL, each into a new folder of "
        "Parquet with zstd, in a session that is up, from the call of the load to its commit. A first run by `infer` "
        "begins with a sample; a field that only some records in the middle of a partition have makes it begin anew.",
        "Wanted: 0.7 of the DDL.",
    ),
)
