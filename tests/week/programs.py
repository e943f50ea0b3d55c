"""The programs of a week, each in a process of its own, until SIGTERM.

python -m tests.week.programs PROGRAM JSON

JSON has the program's settings. Each prints lines of JSON with what it has done so far.

| program | |
| --- | --- |
| produce | numbers in transactions, as Avro, number n to partition n % partitions; the schema gets fields |
| consume | checks that each partition has its numbers, each once and no gap; members of the group come and go |
| answer | asks over one topic and answers over another, on asyncio's loop |
| look | reads the page's views |
| query | four queries of a Spark session: exactly once, by a schema, at a secured cluster, without anything to do |
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from spark_klog import aio
from spark_klog.client import Consumer, Producer
from spark_klog.errors import (
    CommitFailed,
    InvalidTransactionState,
    MemberFenced,
    ProtocolError,
    RequestTimedOut,
    TransactionAborted,
    WokenUp,
)
from tests.ui.support import Page

#: Spark gives a query's process 10 s to start, which nothing sets, and a busy machine may need more.
_TOO_SLOW = "Python worker failed to connect back"
_ended = False


def _end(*_: object) -> None:
    global _ended
    _ended = True


def _say(**done: object) -> None:
    print(json.dumps(done), flush=True)  # noqa: T201


def _schema(version: int) -> str:
    """The numbers' schema, with `version` more fields."""
    fields: list[dict[str, Any]] = [{"name": "number", "type": "long"}, {"name": "text", "type": "string"}]
    fields += [{"name": f"more{k}", "type": ["null", "string"], "default": None} for k in range(version)]
    return json.dumps({"type": "record", "name": "Click", "fields": fields})


def produce(asked: Mapping[str, Any]) -> None:
    numbers = 0
    for version in count():
        typed = {"value.serializer": "avro", "value.schema": _schema(version), "schema.registry.url": asked["registry"]}
        until = time.monotonic() + asked["schema_seconds"]
        with Producer({**asked["client"], **typed, "transactional.id": "week", "compression.type": "lz4"}) as producer:
            producer.init_transactions()
            while time.monotonic() < until and not _ended:
                began = time.monotonic()
                _write(
                    producer,
                    asked["topic"],
                    range(numbers, numbers + asked["each"]),
                    asked["partitions"],
                    asked["bytes"],
                )
                numbers += asked["each"]
                _say(records=numbers, schemas=version + 1)
                time.sleep(max(0.0, asked["pause"] - (time.monotonic() - began)))
        if _ended:
            return


def _write(producer: Producer, topic: str, numbers: range, partitions: int, size: int) -> None:
    """A transaction, again until it is committed."""
    while True:
        with suppress(TransactionAborted, RequestTimedOut, ProtocolError):
            producer.begin_transaction()
            for number in numbers:
                text = os.urandom(size // 2).hex()  # else compression would leave nothing that retention could delete
                producer.send(topic, {"number": number, "text": text}, partition=number % partitions)
            producer.flush()
            break
        producer.abort_transaction()
    while True:
        try:
            return producer.commit_transaction()
        except RequestTimedOut:  # it may have succeeded: the next call tells
            continue
        except InvalidTransactionState:
            return None


def consume(asked: Mapping[str, Any]) -> None:
    step, records, members = asked["partitions"], 0, 0
    expected = dict(enumerate(range(step)))
    #: Of each partition; what is before it is read again after a commit that failed.
    offsets = dict.fromkeys(expected, -1)
    while not _ended:
        members += 1
        until = time.monotonic() + asked["member_seconds"]
        with Consumer(asked["client"]) as consumer:
            consumer.subscribe([asked["topic"]])
            while time.monotonic() < until and not _ended:
                polled = consumer.poll(0.5)
                for record in polled:
                    value = record.value
                    number = value["number"] if isinstance(value, dict) else int(value)
                    if record.offset <= offsets[record.partition]:
                        continue
                    wanted = expected[record.partition]
                    assert number == wanted, (
                        f"{record.topic}-{record.partition}@{record.offset}: not {wanted}: {number}"
                    )
                    expected[record.partition], offsets[record.partition] = number + step, record.offset
                records += len(polled)
                with suppress(CommitFailed, MemberFenced, RequestTimedOut):
                    consumer.commit()
                _say(records=records, members=members, next=min(expected.values()))


def answer(asked: Mapping[str, Any]) -> None:
    asyncio.run(_answer(asked))


async def _answer(asked: Mapping[str, Any]) -> None:
    client, (questions, answers) = asked["client"], asked["topics"]
    async with aio.Producer({name: value for name, value in client.items() if name != "auto.offset.reset"}) as producer:
        async with (
            aio.Consumer(client | {"group.id": "answering"}) as server,
            aio.Consumer(client | {"group.id": "asking"}) as asking,
        ):
            server.subscribe([questions])
            asking.subscribe([answers])

            async def serve() -> None:
                with suppress(WokenUp):
                    while True:
                        for record in await server.poll(1.0):
                            producer.send_nowait(answers, record.value)

            serving, asked_for = asyncio.create_task(serve()), 0
            while not _ended:
                for _ in range(asked["each"]):
                    await producer.send(questions, b"%d" % asked_for)
                    asked_for += 1
                deadline, missing = time.monotonic() + 120, set(range(asked_for - asked["each"], asked_for))
                while missing and not _ended:
                    assert time.monotonic() < deadline, f"no answer to {sorted(missing)[:5]}"
                    missing -= {int(record.value or b"") for record in await asking.poll(1.0)}
                _say(records=asked_for, tasks=len(asyncio.all_tasks()))
                await asyncio.sleep(asked["pause"])
            server.wakeup()
            await serving


def look(asked: Mapping[str, Any]) -> None:
    page, looks, refused = Page(asked["address"], asked["token"], 0), 0, 0
    topic = {"name": asked["topic"]}
    views: dict[str, dict[str, Any]] = {
        "overview": {},
        "groups": {},
        "queries": {},
        "loads": {},
        "subjects": {},
        "topic": topic,
        "messages": topic,
    }
    while not _ended:
        for view, parameters in views.items():
            status, _ = page.ask(view, **parameters)
            looks += status == 200
            refused += status != 200  # while the broker is away
        _say(looks=looks, refused=refused)
        time.sleep(asked["pause"])


def query(asked: Mapping[str, Any]) -> None:
    from pyspark.sql import DataFrame, SparkSession

    builder = SparkSession.builder.master("local[2]")
    for name, value in asked["spark"].items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("WARN")

    def source(where: str, **options: str) -> DataFrame:
        reader = spark.readStream.format("klog").options(**asked[where]).option("startingOffsets", "earliest")
        return reader.options(**options).load()

    def start(name: str, frame: DataFrame, kind: str, every: str, **options: str) -> Any:
        writer = frame.writeStream.queryName(name).format(kind).options(**options).trigger(processingTime=every)
        writer = writer.outputMode("update" if name == "typed" else "append")
        return writer.option("checkpointLocation", f"{asked['checkpoints']}/{name}").start()

    typed = {"valueFormat": "avro", "schemaRegistryUrl": asked["registry"]}
    clicks = source("ours", subscribe=asked["topic"], **typed)
    copied = clicks.selectExpr("CAST(value.number AS STRING) AS value", "partition")
    exactly = {**asked["ours"], "topic": asked["to"], "deliveryGuarantee": "exactly-once"}
    quiet, secured = source("ours", subscribe=asked["quiet"]), source("secured", subscribe=asked["mirrored"])
    begin: dict[str, Callable[[], Any]] = {
        "copied": lambda: start("copied", copied, "klog", asked["every"], **exactly),
        "typed": lambda: start("typed", clicks.groupBy("partition").count(), "noop", asked["every"]),
        "secured": lambda: start("secured", secured, "noop", asked["every"]),
        "idle": lambda: start("idle", quiet, "noop", asked["idle_every"]),
    }
    queries, again = {name: each() for name, each in begin.items()}, 0
    while not _ended:
        for name, each in queries.items():
            if (error := each.exception()) is not None:
                if _TOO_SLOW not in str(error):
                    raise error
                queries[name], again = begin[name](), again + 1
        _say(**dict(_batches(queries.values())), started_again=again)
        time.sleep(1)
    for each in queries.values():
        each.stop()
    spark.stop()


def _batches(queries: Iterable[Any]) -> Iterator[tuple[str, int]]:
    for each in queries:
        last = each.lastProgress
        yield each.name, -1 if last is None else last["batchId"]


PROGRAMS = {each.__name__: each for each in (produce, consume, answer, look, query)}

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    logging.basicConfig(level=os.environ.get("WEEK_LEVEL", "WARNING"), format="%(asctime)s %(name)s: %(message)s")
    PROGRAMS[sys.argv[1]](json.loads(sys.argv[2]))
