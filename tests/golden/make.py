"""Make the golden directories of this version: `python -m tests.golden.make`. It takes a minute, and Spark.

Two brokers, `source` and `target`. The source is killed with transactions open and prepared; the target is stopped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer as Confluent
from packaging.version import Version
from pyspark.sql import SparkSession

import spark_klog
from spark_klog.base.names import VERSION
from spark_klog.client import Admin, Committed, Consumer, Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.files.folder import LocalFolder
from spark_klog.load.journal import checkpoint
from spark_klog.load.planning import Limits
from spark_klog.load.run import MaxBad
from spark_klog.load.settings import WriteSettings
from spark_klog.mirror.mirror import Mirror
from spark_klog.mirror.settings import MirrorSettings
from spark_klog.records.formats.batch import iter_batches
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.tables.opening import open_table
from tests.golden.streams import ONCE, STREAMS, UPSERTED, start_copy, start_upsert, write_once
from tests.golden.support import (
    CLASSIC,
    CODECS,
    CONSUMER,
    FIRST,
    GOLDEN,
    KEEP_ALL,
    KINDS,
    MORE,
    NUMBERS,
    PARTITIONS,
    SCHEMAS,
    SIMPLE,
    TABLES,
    ask_registry,
)
from tests.load.support import Killed, failing, in_child, run
from tests.load.tables import Lake, make_lake
from tests.spark.support import create_topic, delete_records
from tests.support.servers.broker import KlogBroker

_DIED = 9


def main(work: Path) -> None:
    if Version(VERSION).is_prerelease:
        sys.exit(f"{VERSION} is no release: set VERSION in spark_klog/base/names.py first")
    os.chdir(work)
    source, target = (KlogBroker(work, *KEEP_ALL, name=name) for name in ("source", "target"))
    with source, target:
        expected = _write(source.bootstrap_servers, target.bootstrap_servers, work)
        source.stop()  # which writes checkpoints and snapshots
        source.start()
        expected["handed"] = _transactions(source.bootstrap_servers)
        _prepare(source.bootstrap_servers)
        source.kill()
    with EmbeddedCluster(2, data_dir=work / "cluster") as cluster:
        _shared(cluster.bootstrap_servers)
    _cut_last(work / "source" / "__transaction_state-0")  # the record of the completion
    _cut_last(work / "source" / "transactions-1")  # its marker
    folder = GOLDEN / VERSION
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in ("source", "target", "cluster", "loads", "tables", "checkpoints"):
        with tarfile.open(folder / f"{name}.tar.xz", "w:xz", preset=9) as archive:
            archive.add(work / name, name)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def _write(source: str, target: str, work: Path) -> dict[str, Any]:
    create_topic(source, NUMBERS, PARTITIONS)
    _send(source, 0, FIRST)
    expected = {"plain": _plain(source), "compacted": _compacted(source)}
    _groups(source)
    _registry(source)
    mirror = MirrorSettings(
        *_sides(source, target),
        name="golden",
        topics=re.compile(f"{NUMBERS}|plain"),
        groups=re.compile(SIMPLE),
        exactly_once=True,
    )
    Mirror(mirror).run(until_end=True)
    _loads(source, work / "loads")
    with pytest.MonkeyPatch.context() as patch:
        for kind in KINDS:
            _table(source, make_lake(kind, TABLES / kind, patch))
    _streams(source, work / "checkpoints")
    _send(source, FIRST, MORE)
    return expected


def _sides(source: str, target: str) -> tuple[dict[str, str], dict[str, str]]:
    return {"bootstrap.servers": source}, {"bootstrap.servers": target}


def _send(servers: str, first: int, count: int) -> None:
    with Producer({"bootstrap.servers": servers}) as producer:
        for number in range(first, first + count):
            producer.send(NUMBERS, b'{"id":%d}' % number, b"%d" % number, partition=number % PARTITIONS)


def _plain(servers: str) -> list[list[Any]]:
    """Records of each codec, with headers and nulls, in a topic with a setting of its own."""
    create_topic(servers, "plain", 1, **{"retention.ms": "-1", "max.message.bytes": "2000000"})
    sent: list[list[Any]] = []
    for codec in CODECS:
        producer = Confluent({"bootstrap.servers": servers, "compression.type": codec, "linger.ms": 100})
        for number in range(3):
            key, value = (None, f"{codec} {number} " * 9) if number else ("key", None)
            headers = [("codec", codec.encode()), ("null", None)] if number == 2 else []
            producer.produce("plain", value, key, timestamp=1_700_000_000_000 + len(sent), headers=headers)
            texts = [[name, data and data.decode()] for name, data in headers]
            sent.append([len(sent), key, value, 1_700_000_000_000 + len(sent), texts])
        assert producer.flush(20) == 0
    delete_records(servers, "plain", {0: 2})
    return sent[2:]


def _compacted(servers: str) -> dict[str, str]:
    create_topic(servers, "compacted", 1, **{"cleanup.policy": "compact"})
    with Producer({"bootstrap.servers": servers}) as producer:
        for number in range(20):
            producer.send("compacted", b"%d" % number, b"key-%d" % (number % 3), partition=0)
        producer.send("compacted", None, b"key-0", partition=0)
    return {"key-1": "19", "key-2": "17"}


def _shared(servers: str) -> None:
    """A topic of several brokers: its settings and partitions are in the tree that they share."""
    create_topic(servers, "shared", 4, **{"retention.ms": "1234567890123"})
    with Producer({"bootstrap.servers": servers}) as producer:
        for number in range(8):
            producer.send("shared", b"%d" % number, partition=number % 4)
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.alter_group_offsets(SIMPLE, {("shared", 3): 1}).check()


def _groups(servers: str) -> None:
    """Static members stay when their consumers are closed."""
    for group, protocol in ((CLASSIC, "classic"), (CONSUMER, "consumer")):
        named = {"group.id": group, "group.protocol": protocol, "group.instance.id": "one"}
        settings = {"bootstrap.servers": servers, "auto.offset.reset": "earliest", "enable.auto.commit": "false"}
        if protocol == "classic":
            settings["session.timeout.ms"] = "1800000"  # on a slow machine the member would be gone before the broker
        with Consumer({**settings, **named}) as consumer:
            consumer.subscribe([NUMBERS])
            while not consumer.poll(1.0) or len(consumer.assignment()) < PARTITIONS:
                pass
            consumer.commit({(NUMBERS, number): Committed(5 + number, metadata="note") for number in range(PARTITIONS)})
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.alter_group_offsets(SIMPLE, {(NUMBERS, 0): 7, ("plain", 0): 9}).check()


def _registry(servers: str) -> None:
    with SchemaRegistry({"bootstrap.servers": servers}, "0") as registry:
        for subject, schema in SCHEMAS:
            ask_registry(registry.url, f"/subjects/{subject}/versions", schema)
        ask_registry(registry.url, "/config/numbers-value", {"compatibility": "FULL"}, "PUT")
        ask_registry(registry.url, "/subjects/gone-value", None, "DELETE")


def _loads(servers: str, folder: Path) -> None:
    """A load in each state of its journal: one that dies before each change, of which each state is kept once."""
    seen: set[str] = set()
    number = 0
    while "published" not in seen:
        number += 1
        output = folder / "next"
        code = in_child(lambda number=number, output=output: _dying(servers, output, number))  # type: ignore[misc]
        state = _state(output) if code else "published"
        if state in seen:
            shutil.rmtree(output, ignore_errors=True)
        elif state:
            seen.add(state)
            output.rename(folder / state)
    assert seen == {"begun", "prepared", "committed", "published"}, seen
    create_topic(servers, "bad", 1)
    with Producer({"bootstrap.servers": servers}) as producer:
        for number in range(10):
            producer.send("bad", b"bad" if number % 5 == 0 else b'{"id":%d}' % number, partition=0)
    schema = WriteSettings(schema="id bigint")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "EVERY", 1)
        run(servers, folder / "letters", "bad", settings=schema, max_bad=MaxBad(50, is_percent=True))


def _dying(servers: str, output: Path, number: int) -> None:
    with failing(LocalFolder, number, lambda: os._exit(_DIED)):
        run(servers, output, NUMBERS)


def _state(output: Path) -> str:
    """The state of the first run's journal, "" before it has a plan."""
    first = output / "_klog" / "runs" / "00000001"
    if (first / "manifest.json").exists():
        return "committed"
    if not (first / "plan.json").exists():
        return ""
    tasks, results = json.loads((first / "plan.json").read_text())["tasks"], list(first.glob("offsets-*.json"))
    return "prepared" if len(results) == len(tasks) else "" if results else "begun"


def _table(servers: str, lake: Lake) -> None:
    """A table with two runs, of which its journal does not know the second yet."""
    run(servers, lake.address, NUMBERS, limits=Limits(FIRST // 2))
    table = type(open_table(lake.address))
    append = table.append

    def dies(*arguments: Any) -> None:
        append(*arguments)
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "append", dies)
        with pytest.raises(Killed):
            run(servers, lake.address, NUMBERS)


def _streams(servers: str, folder: Path) -> None:
    with _spark() as spark:
        for to in STREAMS:
            create_topic(servers, to, 1)
            spark_klog.run_available_now(partial(start_copy, spark, servers, folder, to), 100)
        table = folder.parent / "tables" / UPSERTED
        spark_klog.run_available_now(partial(start_upsert, spark, servers, folder, table), 100)
        create_topic(servers, ONCE, 1)
        write_once(spark, servers)


@contextmanager
def _spark() -> Iterator[SparkSession]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    session = builder.config("spark.sql.session.timeZone", "UTC").getOrCreate()
    yield session
    session.stop()


def _transactions(servers: str) -> list[Any]:
    """Partition 0 has transactions that are done, 1 the one to be cut, 2 one that was handed over, 3 an open one.

    Returns what names the one that was handed over.
    """
    create_topic(servers, "transactions", 4)
    settings = {"bootstrap.servers": servers, "transaction.timeout.ms": "900000"}
    with Producer({**settings, "transactional.id": "done"}) as producer:
        producer.init_transactions()
        for ends, value in ((producer.commit_transaction, b"done"), (producer.abort_transaction, b"aborted")):
            producer.begin_transaction()
            producer.send("transactions", value, partition=0)
            producer.flush()
            ends()
    handed = Producer({**settings, "transactional.id": "handed"})
    handed.init_transactions()
    handed.begin_transaction()
    handed.send("transactions", b"handed", partition=2)
    prepared = handed.prepare_transaction()
    assert prepared is not None
    opened = Producer({**settings, "transactional.id": "open"})
    opened.init_transactions()
    opened.begin_transaction()
    opened.send("transactions", b"open", partition=3)
    opened.send_offsets_to_transaction({(NUMBERS, 0): 11}, SIMPLE)
    opened.flush()
    return list(astuple(prepared))


def _prepare(servers: str) -> None:
    with Producer({"bootstrap.servers": servers, "transactional.id": "prepared"}) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send("transactions", b"prepared", partition=1)
        producer.commit_transaction()


def _cut_last(folder: Path) -> None:
    """Cut the last batch off the log."""
    (path,) = folder.glob("*.log")
    data = path.read_bytes()
    *_, (header, _) = iter_batches(data)
    path.write_bytes(data[: -header.size])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
