"""Queries at brokers whose answers are late, doubled, empty, throttled, errors or nonsense.

Within `SECONDS` each record is there once, or the query fails with a typed error; an answer without records makes a
task fail, and the next attempt passes. The client's tests have the tables of such answers (test_api_errors.py,
test_bad_peers.py); here is a slice of them. SPARK_KLOG_SCRIPTED=full runs all cases.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.support.brokers.faults import (
    Fault,
    cut,
    double,
    dropped,
    empty,
    error,
    late,
    lost,
    misaddressed,
    renamed,
    repeated,
    silent,
    slowed,
    throttled,
)
from tests.support.brokers.scripted_broker import ScriptedCluster

from .support import Job, error_of

SECONDS = 90
TOPIC = "t"
COUNT = 300
#: Faults that pass: a query must not notice them.
PASSES: dict[str, Callable[[], Fault]] = {
    "late": lambda: late(0.3),
    "empty": empty,
    "throttled": lambda: throttled(200),
    "slowed": lambda: slowed(200),
    "NOT_LEADER_OR_FOLLOWER": lambda: error(6),
    "KAFKA_STORAGE_ERROR": lambda: error(56),
    "dropped": dropped,
    "lost": lost,
    "silent": silent,
}
#: Answers that no broker gives: the query may fail with a typed error.
NONSENSE: dict[str, Callable[[], Fault]] = {
    "empty": empty,
    "double": double,
    "cut": cut,
    "misaddressed": misaddressed,
    "renamed": renamed,
    "repeated": repeated,
}
CLIENT = {"kafka.request.timeout.ms": "2000", "kafka.delivery.timeout.ms": "20000", "kafka.retry.backoff.ms": "20"}
FULL = os.environ.get("SPARK_KLOG_SCRIPTED") == "full"
READ_APIS, WRITE_APIS = ("Metadata", "ListOffsets", "Fetch"), ("Metadata", "InitProducerId", "Produce")


def of_each(apis: tuple[str, ...]) -> list[Any]:
    """(APIs with the faults, names of the faults): all at once, with FULL also one by one."""
    one_by_one = [pytest.param((api,), (name,), id=f"{api}-{name}") for api in apis for name in PASSES]
    return [pytest.param(apis, tuple(PASSES), id="all"), *(one_by_one if FULL else ())]


def answer(brokers: ScriptedCluster, apis: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Give the first requests of each API these answers, one after the other."""
    for api in apis:
        brokers.on(api, *(PASSES[name]() for name in names if takes(api, name)))


def takes(api: str, name: str) -> bool:
    """Whether a broker may give this answer to the API, and the client has time to retry."""
    if name.isupper():
        return api in ("ListOffsets", "Fetch", "Produce")
    return name not in ("silent", "empty") or api in ("Fetch", "Produce")


@pytest.fixture
def brokers() -> Iterator[ScriptedCluster]:
    with ScriptedCluster({TOPIC: 2}, nodes=2) as made:
        yield made


def fill(brokers: ScriptedCluster) -> None:
    for partition in range(2):
        brokers.append(TOPIC, partition, [b"%d" % number for number in range(COUNT)], size=50)


EXPECTED = [(partition, offset) for partition in range(2) for offset in range(COUNT)]


def read(spark: SparkSession, brokers: ScriptedCluster, **options: str) -> list[tuple[int, int]]:
    given = {"kafka.bootstrap.servers": brokers.bootstrap_servers, "subscribe": TOPIC} | CLIENT | options
    rows = spark.read.format("klog").options(**given).load().select("partition", "offset").collect()
    return sorted((row.partition, row.offset) for row in rows)


def write(spark: SparkSession, brokers: ScriptedCluster, **options: str) -> None:
    given = {"kafka.bootstrap.servers": brokers.bootstrap_servers, "topic": TOPIC} | CLIENT | options
    frame = spark.range(0, COUNT, 1, 2).selectExpr("cast(id as string) as key", "cast(id as string) as value")
    frame.write.format("klog").options(**given).mode("append").save()


def written(brokers: ScriptedCluster) -> list[int]:
    return sorted(int(value) for partition in range(2) for value in brokers.values(TOPIC, partition))


def is_typed(text: str) -> bool:
    return re.search(r"spark_klog\.errors\.\w+", text) is not None


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(("apis", "names"), of_each(READ_APIS))
def test_a_read_does_not_notice_what_passes(
    spark: SparkSession, brokers: ScriptedCluster, apis: tuple[str, ...], names: tuple[str, ...]
) -> None:
    fill(brokers)
    answer(brokers, apis, names)
    assert read(spark, brokers) == EXPECTED


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(("apis", "names"), of_each(WRITE_APIS))
def test_a_write_does_not_notice_what_passes(
    spark: SparkSession, brokers: ScriptedCluster, apis: tuple[str, ...], names: tuple[str, ...]
) -> None:
    answer(brokers, apis, names)
    write(spark, brokers)
    assert written(brokers) == list(range(COUNT))


def outcome(action: Callable[[], object]) -> str:
    """Run `action`; return the text of its error, or an empty string."""
    try:
        action()
    except (PySparkException, Py4JJavaError) as failure:
        return str(failure)
    return ""


NONSENSE_CASES = [(api, name) for api in ("Metadata", "ListOffsets", "Fetch", "Produce") for name in NONSENSE]


@pytest.mark.usefixtures("one_attempt")
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(("api", "name"), NONSENSE_CASES if FULL else [("Fetch", "renamed")])
def test_nonsense_is_a_typed_error_or_unnoticed(
    spark: SparkSession, brokers: ScriptedCluster, api: str, name: str
) -> None:
    brokers.on(api, NONSENSE[name]())
    if api == "Produce":
        text = outcome(lambda: write(spark, brokers))
        assert is_typed(text) or written(brokers) == list(range(COUNT))
        return
    fill(brokers)
    found: list[tuple[int, int]] = []
    text = outcome(lambda: found.extend(read(spark, brokers)))
    assert is_typed(text) or found == EXPECTED, text


#: Faults that never pass, with a pattern of the query's error.
LASTING: dict[str, tuple[Callable[[], Fault], str]] = {
    "silent": (silent, "RequestTimedOut|ConnectionFailed"),
    "dropped": (dropped, "ConnectionFailed|RequestTimedOut"),
    "NOT_LEADER_OR_FOLLOWER": (lambda: error(6), "NOT_LEADER_OR_FOLLOWER|RequestTimedOut"),
    "TOPIC_AUTHORIZATION_FAILED": (lambda: error(29), "TOPIC_AUTHORIZATION_FAILED"),
    "empty": (empty, r"spark_klog\.errors\."),
}
SOON = {"kafka.request.timeout.ms": "700", "kafka.delivery.timeout.ms": "1500"}


@pytest.mark.usefixtures("one_attempt")
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    ("api", "name"),
    [(api, name) for api in ("ListOffsets", "Fetch", "Produce") for name in LASTING]
    if FULL
    else [
        ("Fetch", "TOPIC_AUTHORIZATION_FAILED"),
        ("Produce", "NOT_LEADER_OR_FOLLOWER"),
    ],
)
def test_what_lasts_is_a_typed_error(spark: SparkSession, brokers: ScriptedCluster, api: str, name: str) -> None:
    fill(brokers)
    fault, words = LASTING[name]
    brokers.always(api, fault())
    run = write if api == "Produce" else read
    text = error_of(lambda: run(spark, brokers, **SOON))
    assert is_typed(text), text
    assert re.search(words, text), text
    assert "SASL" not in text  # no hint at SASL: these brokers have answered without it


@pytest.mark.timeout(SECONDS)
def test_a_stream_reads_each_record_once(spark: SparkSession, brokers: ScriptedCluster, tmp_path: Path) -> None:
    fill(brokers)
    job = Job(spark, brokers.bootstrap_servers, tmp_path, subscribe=TOPIC, maxOffsetsPerTrigger="300", **CLIENT)
    for api in ("ListOffsets", "Fetch"):
        brokers.on(api, *(PASSES[name]() for name in PASSES if takes(api, name) and name != "silent"))
    assert sum(job.run()) == 2 * COUNT
    rows = job.result.select("partition", "offset").collect()
    assert sorted((row.partition, row.offset) for row in rows) == EXPECTED
