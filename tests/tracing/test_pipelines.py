"""Contexts in headers through loads, dead letters, replay, restore and mirror; the spans of loads and mirrors."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from spark_klog.client import Admin, Consumer, Producer
from spark_klog.client.dead_letters import split
from spark_klog.client.letter_topics import LetterTopic
from spark_klog.columns.schema import WITHOUT_HEADERS
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import LoadError
from spark_klog.load.run import MaxBad
from spark_klog.load.settings import WriteSettings
from spark_klog.mirror.mirror import Mirror
from spark_klog.mirror.settings import MirrorSettings
from spark_klog.restore import RestoreOptions, plan_restore, replay, restore_partition
from spark_klog.spark.options import source_options
from spark_klog.spark.read.ranges import OffsetRange
from spark_klog.spark.read.tasks import Plan, read_ranges
from tests.load.support import run
from tests.support.clients.mirrors import read_topic
from tests.support.waiting import wait_until
from tests.tracing.conventions import Traces, attributes_of, ids, links, tracing

_HEADERS: tuple[tuple[str, bytes | None], ...] = (
    ("traceparent", b"\xff\x00"),
    ("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    ("tracestate", b"vendor=1"),
    ("baggage", b"user=7,\xe9"),
    ("", None),
)
_IDS = (0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7)


@pytest.fixture
def topic(cluster: EmbeddedCluster) -> str:
    name = f"t-{uuid.uuid4().hex[:8]}"
    with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
        admin.create_topic(name, 2)
    _write(cluster.bootstrap_servers, name)
    return name


@pytest.fixture
def traces() -> Iterator[Traces]:
    with tracing() as provider:
        yield provider


def _write(servers: str, topic: str) -> None:
    """Without traces: a record with exotic headers, one without, and one that is no JSON, in each partition."""
    with Producer({"bootstrap.servers": servers}) as producer:
        for partition in range(2):
            producer.send(topic, b'{"a": 1}', partition=partition, headers=_HEADERS)
            producer.send(topic, b'{"a": 2}', partition=partition)
            producer.send(topic, b"no", partition=partition, headers=_HEADERS)


def _headers(servers: str, topic: str, partitions: int = 2) -> list[list[Any]]:
    return [[seen.headers for seen in part] for part in read_topic(servers, topic, partitions)]


_WHOLE = [[_HEADERS, (), _HEADERS]] * 2


@pytest.mark.parametrize("kind", ["parquet", pytest.param("arrow", marks=pytest.mark.test_all("codec"))])
def test_load_and_restore(cluster: EmbeddedCluster, topic: str, tmp_path: Path, kind: str) -> None:
    servers = cluster.bootstrap_servers
    with tracing() as traces:
        run(servers, tmp_path, topic, settings=WriteSettings(kind))
        run(servers, tmp_path, topic, settings=WriteSettings(kind))  # nothing is new: no span
        options = RestoreOptions(str(tmp_path), {"bootstrap.servers": servers}, prefix="again.")
        for _, parts in groupby(plan_restore(options), key=lambda part: (part.topic, part.partition)):
            assert not restore_partition(options.client, options.output, list(parts)).error
    assert _headers(servers, f"again.{topic}") == _WHOLE
    (span,) = traces.named(f"process {topic}")
    assert attributes_of(span)["messaging.batch.message_count"] == 6
    assert links(span) == [_IDS] * 4
    link = span.links[0].attributes
    assert link is not None
    assert (link["messaging.destination.name"], link["messaging.kafka.offset"]) == (topic, 0)


def test_dead_letters_and_replay(cluster: EmbeddedCluster, topic: str, tmp_path: Path, traces: Traces) -> None:
    servers = cluster.bootstrap_servers
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topic(f"{topic}-again", 2)
    settings = WriteSettings("json", schema="a int")
    run(servers, tmp_path, topic, settings=settings, max_bad=MaxBad(10))
    assert replay(str(tmp_path), {"bootstrap.servers": servers}, f"{topic}-again").records == 2
    assert _headers(servers, f"{topic}-again") == [[_HEADERS], [_HEADERS]]


def test_load_that_fails(cluster: EmbeddedCluster, topic: str, tmp_path: Path, traces: Traces) -> None:
    servers = cluster.bootstrap_servers
    settings = WriteSettings("json", schema="a int")
    with pytest.raises(LoadError):
        run(servers, tmp_path, topic, settings=settings)
    (span,) = traces.named(f"process {topic}")
    assert attributes_of(span)["error.type"] == "spark_klog.errors.LoadError"


@pytest.mark.parametrize("exactly_once", [False, True])
def test_mirror(cluster: EmbeddedCluster, topic: str, traces: Traces, exactly_once: bool) -> None:
    servers = {"bootstrap.servers": cluster.bootstrap_servers}
    settings = MirrorSettings(
        servers, servers, name=topic, topics=re.compile(topic), prefix="copy.", exactly_once=exactly_once
    )
    with traces.tracer().start_as_current_span("run") as around:
        assert Mirror(settings).run(until_end=True).records == 6
        assert Mirror(settings).run(until_end=True).records == 0
    assert _headers(cluster.bootstrap_servers, f"copy.{topic}") == _WHOLE
    spans = traces.named(f"process {topic}")
    assert sum(attributes_of(span)["messaging.batch.message_count"] for span in spans) == 6
    assert {link for span in spans for link in links(span)} == {_IDS}
    assert {ids(span.parent) for span in spans} == {ids(around.get_span_context())}


def test_consumer_to_producer(cluster: EmbeddedCluster, topic: str, traces: Traces) -> None:
    """A program that sends on what it has read keeps the headers, too."""
    servers = cluster.bootstrap_servers
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topic(f"{topic}-on", 2)
    settings = {"bootstrap.servers": servers}
    with Consumer(settings, include_headers=True) as consumer, Producer(settings) as producer:
        consumer.assign([(topic, 0, 0), (topic, 1, 0)])
        count = 0
        while count < 6:
            batch = consumer.poll_arrow(1.0)
            if batch is not None:
                producer.send_arrow(batch, f"{topic}-on")
                count += batch.num_rows
    assert _headers(servers, f"{topic}-on") == _WHOLE


def test_dead_letter_topics_of_queries(cluster: EmbeddedCluster, topic: str, traces: Traces) -> None:
    """A task writes letters without spans, whose contexts would be headers."""
    servers, far, dlq = cluster.bootstrap_servers, f"{topic}-far", f"{topic}-dlq"
    with Admin({"bootstrap.servers": servers}) as admin, Producer({"bootstrap.servers": servers}) as producer:
        for name in (far, dlq):  # its record's time fits into no column
            admin.create_topic(name, 2, configs={"message.timestamp.after.max.ms": str((1 << 63) - 1)})
        for headers in (_HEADERS, ()):
            Producer.send(producer, far, b"x", partition=0, timestamp=1 << 62, headers=headers)
    query = {"kafka.bootstrap.servers": servers, "subscribe": far, "badRecords": "deadletter", "deadLetterTopic": dlq}
    options = source_options(query, streaming=False)
    batches = read_ranges(options, [OffsetRange(far, 0, 0, 2)], WITHOUT_HEADERS, plan=Plan({}))
    assert sum(map(len, batches)) == 0
    letters = list(LetterTopic({"bootstrap.servers": servers}, dlq).letters())
    assert [letter.own for letter in letters] == [_HEADERS, ()]
    assert traces.named(f"send {dlq}") == []


def test_dead_letter_topics(cluster: EmbeddedCluster, topic: str, traces: Traces) -> None:
    """Letters of a consumer, and their replay to where they came from: own headers as they were, no other context."""
    servers = {"bootstrap.servers": cluster.bootstrap_servers}
    with Admin(servers) as admin:
        admin.create_topic(f"{topic}-dlq", 2)
    settings = {"group.id": topic, "enable.auto.commit": False, "dead.letter.topic": f"{topic}-dlq"}
    with Consumer({**servers, **settings, "auto.offset.reset": "earliest"}) as consumer:
        consumer.subscribe([topic])
        records: list[Any] = []
        wait_until(lambda: len(records.extend(consumer.poll(0.2)) or records) == 6)
        for record in records:
            consumer.dead_letter(record, "no")
        consumer.commit()
    LetterTopic(servers, f"{topic}-dlq").replay()
    letters = [headers for part in _headers(cluster.bootstrap_servers, f"{topic}-dlq") for headers in part]
    own = [split(headers)[1] for headers in letters]
    assert sorted(own, key=len) == [(), (), *[_HEADERS] * 4]
    again = [headers for part in _headers(cluster.bootstrap_servers, topic) for headers in part]
    assert sorted(again, key=len) == [*[()] * 4, *[_HEADERS] * 8]
