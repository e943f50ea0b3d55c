"""Spans of the clients, compared with OpenTelemetry's conventions; contexts in headers; that no span stays open."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from opentelemetry import baggage, context as contexts, trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from spark_klog.aio import Producer as AioProducer
from spark_klog.client import Admin, Consumer, Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import CommitFailed, KlogError, ProducerClosed, RecordTooLargeToSend
from spark_klog.tracing import processing
from tests.support.clients.on_loop import LoopProducer, run
from tests.support.waiting import wait_until
from tests.tracing.conventions import Traces, attributes_of, ids, links, tracing

_PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
_PARENT_IDS = (0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7)
SECRETS = ("hunter2", "the-key", "the-value", "the-header")


@pytest.fixture
def traces() -> Iterator[Traces]:
    with tracing() as provider:
        yield provider
    shown = " ".join(span.to_json() for span in provider.done)
    assert not [secret for secret in SECRETS if secret in shown]


@pytest.fixture
def topic(cluster: EmbeddedCluster) -> str:
    name = f"t-{uuid.uuid4().hex[:8]}"
    with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
        admin.create_topic(name, 1)
    return name


@pytest.fixture(params=["thread", "loop"])
def kind(request: pytest.FixtureRequest) -> Any:
    """A producer's class, by its driver."""
    return Producer if request.param == "thread" else LoopProducer


def _settings(cluster: EmbeddedCluster, **more: str) -> dict[str, str]:
    return {"bootstrap.servers": cluster.bootstrap_servers, **{k.replace("_", "."): v for k, v in more.items()}}


def _traceparent(span: ReadableSpan) -> bytes:
    context = span.context
    assert context is not None
    return b"00-%032x-%016x-%02x" % (context.trace_id, context.span_id, context.trace_flags)


def _records(cluster: EmbeddedCluster, topic: str, count: int) -> list[Any]:
    """The first records of the topic, by a consumer without traces."""
    with Consumer(_settings(cluster)) as consumer:
        consumer.assign([(topic, 0, 0)])
        records: list[Any] = []
        wait_until(lambda: len(records.extend(consumer.poll(0.1)) or records) >= count)
    return records


def test_send_poll_process_commit(cluster: EmbeddedCluster, topic: str, traces: Traces, kind: Any) -> None:
    host, port = cluster.bootstrap_servers.split(":")
    with kind(_settings(cluster, client_id="writer")) as producer, traces.tracer().start_as_current_span("request"):
        place = producer.send(topic, b"the-value", key=b"the-key", headers=[("h", b"the-header")]).result(60)
        producer.flush()
    with Consumer(_settings(cluster, group_id="readers", client_id="reader", enable_auto_commit="false")) as consumer:
        consumer.assign([(topic, 0, 0)])
        records: list[Any] = []
        wait_until(lambda: records.extend(consumer.poll(0.1)) or records)
        with processing(records[0], consumer):
            trace.get_current_span().set_attribute("messaging.kafka.message.tombstone", False)
            consumer.commit()
        cluster_id = consumer._cluster.cluster_id

    request = traces.named("request")[0]
    operations = ("send", "poll", "process", "commit")
    sent, polled, processed, committed = (traces.named(f"{name} {topic}") for name in operations)
    assert [len(spans) for spans in (sent, polled, processed, committed)] == [1, 1, 1, 1]
    common = {
        "messaging.system": "kafka",
        "messaging.destination.name": topic,
        "messaging.destination.partition.id": "0",
        "messaging.kafka.cluster.id": cluster_id,
        "server.address": host,
        "server.port": int(port),
    }
    read = common | {"messaging.client.id": "reader", "messaging.consumer.group.name": "readers"}
    assert attributes_of(sent[0]) == common | {
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.client.id": "writer",
        "messaging.kafka.offset": place.offset,
    }
    assert attributes_of(polled[0]) == read | {
        "messaging.operation.name": "poll",
        "messaging.operation.type": "receive",
        "messaging.batch.message_count": 1,
    }
    assert attributes_of(processed[0]) == read | {
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.kafka.offset": place.offset,
        "messaging.kafka.message.tombstone": False,
    }
    assert attributes_of(committed[0]) == read | {
        "messaging.operation.name": "commit",
        "messaging.operation.type": "settle",
    }
    assert sent[0].parent == request.context
    assert polled[0].parent is None
    assert links(polled[0]) == links(processed[0]) == [ids(sent[0].context)]
    assert ids(processed[0].parent) == ids(sent[0].context)  # nothing else was current
    assert committed[0].parent == processed[0].context


def test_no_provider_no_import(cluster: EmbeddedCluster, topic: str) -> None:
    """A program without a provider never imports OpenTelemetry, and nothing of a client is wrapped."""
    code = f"""
import asyncio, sys
from spark_klog.aio import Producer as AioProducer
from spark_klog.client import Consumer, Producer
from spark_klog.tracing import processing
settings = {{"bootstrap.servers": {cluster.bootstrap_servers!r}, "group.id": "g"}}
with Producer({{"bootstrap.servers": {cluster.bootstrap_servers!r}}}) as producer, Consumer(settings) as consumer:
    producer.send({topic!r}, b"v").result(60)
    consumer.assign([({topic!r}, 0, 0)])
    while not (records := consumer.poll(1)):
        pass
    with processing(records[0], consumer):
        consumer.commit()
    assert not records[0].headers
    assert not {{"send", "send_arrow", "_read", "_spans"}} & (vars(producer).keys() | vars(consumer).keys())
    assert not {{"commit", "begin"}} & vars(consumer._group.commits).keys()
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
import opentelemetry.trace  # without a provider it changes nothing
with Producer({{"bootstrap.servers": {cluster.bootstrap_servers!r}}}) as producer:
    assert "send" not in vars(producer)
assert "spark_klog.tracing.spans" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_headers_of_a_record_are_never_changed(cluster: EmbeddedCluster, topic: str, traces: Traces, kind: Any) -> None:
    """A context that a record has is kept, and linked; what is there beside it, too; baggage is added once."""
    own = [("traceparent", _PARENT.encode()), ("tracestate", b"vendor=1"), ("a", None)]
    with kind(_settings(cluster)) as producer, traces.tracer().start_as_current_span("request"):
        token = contexts.attach(baggage.set_baggage("user", "7"))
        producer.send(topic, b"0", headers=own)
        producer.send(topic, b"1", headers=[("a", b"1")])
        producer.send(topic, b"2", headers=[("baggage", b"mine=1")])
        producer.send(topic, b"3", headers=[("traceparent", b"\xffrubbish")])
        producer.flush()
        contexts.detach(token)
    sent = traces.named(f"send {topic}")
    parents = [_traceparent(span) for span in sent]
    headers = [record.headers for record in _records(cluster, topic, 4)]
    assert headers[0] == tuple(own)
    assert headers[1] == (("a", b"1"), ("traceparent", parents[1]), ("baggage", b"user=7"))
    assert headers[2] == (("baggage", b"mine=1"), ("traceparent", parents[2]))
    assert headers[3] == (("traceparent", b"\xffrubbish"),)
    assert links(sent[0]) == [_PARENT_IDS]


def test_errors(cluster: EmbeddedCluster, topic: str, traces: Traces) -> None:
    """A record that can't be sent, one whose topic can't be, and wrong arguments."""
    with Producer(_settings(cluster, max_request_size="2000")) as producer:
        with pytest.raises(RecordTooLargeToSend):
            producer.send(topic, b"the-value" * 1000).result(60)
        with pytest.raises(KlogError):
            producer.send("no/such/topic", b"the-value").result(60)
        with pytest.raises(TypeError):
            producer.send(7, b"the-value").result(60)
        with pytest.raises(TypeError):
            producer.send(topic, b"v", headers={"a": b"the-header"}).result(60)
        with pytest.raises(TypeError):
            producer.send(topic, b"v", headers=[("a", b"1", b"the-header")]).result(60)
        producer.send(topic, b"v", headers=(pair for pair in [("a", b"1")])).result(60)
    with pytest.raises(ProducerClosed):
        producer.send(topic, b"v").result(60)
    errors = [attributes_of(span).get("error.type") for span in traces.done]
    assert errors == [
        "spark_klog.errors.RecordTooLargeToSend",
        "INVALID_TOPIC_EXCEPTION",
        "TypeError",
        "TypeError",
        None,
        "spark_klog.errors.ProducerClosed",
    ]


class _Broken(SpanProcessor):
    """Fails at the start of spans, or at their end."""

    def __init__(self, fails_at_start: bool) -> None:
        self._fails_at_start = fails_at_start

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if self._fails_at_start:
            raise RuntimeError("at the start")

    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("at the end")


@pytest.mark.parametrize("fails_at_start", [False, True])
def test_a_broken_provider(cluster: EmbeddedCluster, topic: str, kind: Any, fails_at_start: bool) -> None:
    """What its processors raise costs a span, and no record, answer or commit."""
    provider, told = TracerProvider(shutdown_on_exit=False), []
    provider.add_span_processor(_Broken(fails_at_start))
    before, trace._TRACER_PROVIDER = trace._TRACER_PROVIDER, provider
    try:
        with kind(_settings(cluster)) as producer:
            for number in range(3):
                producer.send(topic, b"%d" % number, on_delivery=lambda error, _: told.append(error)).result(60)
        settings = _settings(cluster, group_id=f"g-{topic}", auto_offset_reset="earliest")
        with Consumer(settings) as consumer:
            consumer.assign([(topic, 0)])
            values: list[bytes] = []

            def polled() -> bool:
                for record in consumer.poll(0.5):
                    with processing(record, consumer):
                        values.append(record.value)
                return len(values) == 3

            wait_until(polled)
            consumer.commit()
            consumer.commit_async({(topic, 0): 2})
            consumer.commit()
            assert consumer.committed([(topic, 0)])[topic, 0].offset == 3
    finally:
        trace._TRACER_PROVIDER = before
    assert values == [b"0", b"1", b"2"]
    assert told == [None] * 3


def test_records_that_are_not_confirmed(traces: Traces) -> None:
    """`abort` of a producer whose broker is away ends the spans of what it has taken."""
    producer = Producer.__new__(Producer)
    with EmbeddedCluster() as brokers:
        producer = Producer({"bootstrap.servers": brokers.bootstrap_servers, "linger.ms": "60000"})
        for number in range(100):
            producer.send("t", b"%d" % number)
    assert traces.open == 100
    producer.abort()
    assert {attributes_of(span)["error.type"] for span in traces.done} == {"spark_klog.errors.ProducerClosed"}


def test_cancelled_sends(cluster: EmbeddedCluster, traces: Traces) -> None:
    """Tasks and futures that are cancelled before, or while, their topic is looked up."""

    async def main() -> None:
        async with AioProducer(_settings(cluster)) as producer:
            tasks = [asyncio.ensure_future(producer.send(f"c-{number}", b"v")) for number in range(20)]
            futures = [producer.send_nowait(f"c-{number}", b"v") for number in range(20)]
            for step, each in enumerate([*tasks, *futures]):
                if step % 3:
                    await asyncio.sleep(0)
                each.cancel()
            await asyncio.gather(*tasks, *futures, return_exceptions=True)
            await producer.flush()

    run(main())
    assert {attributes_of(span).get("error.type") for span in traces.done} == {"asyncio.exceptions.CancelledError"}
    assert len(traces.done) >= 20  # of a task that has not begun there is none


def test_errors_on_a_loop(cluster: EmbeddedCluster, topic: str, traces: Traces) -> None:
    """Errors of the call, of the topic's look-up, and of records that are under way when the loop's producer ends."""

    async def main() -> None:
        producer = AioProducer(_settings(cluster, max_request_size="2000", linger_ms="60000"))
        outcomes = [producer.send_nowait("no/such/topic", b"v")]
        with pytest.raises(TypeError):
            await producer.send(topic, b"v", headers=[("a", b"1", b"the-header")])
        await asyncio.gather(*outcomes, return_exceptions=True)
        await producer.partitions(topic)
        with pytest.raises(RecordTooLargeToSend):
            producer.send_nowait(topic, b"the-value" * 1000)
        with pytest.raises(RecordTooLargeToSend):
            await producer.send(topic, b"the-value" * 1000)
        outcomes = [producer.send_nowait(topic, b"v"), asyncio.ensure_future(producer.send(topic, b"v"))]
        await asyncio.sleep(0)
        with pytest.raises(ZeroDivisionError):
            async with producer:
                raise ZeroDivisionError
        await asyncio.gather(*outcomes, return_exceptions=True)
        with pytest.raises(ProducerClosed):
            producer.send_nowait(topic, b"v")

    run(main())
    errors = sorted(str(attributes_of(span).get("error.type")).rpartition(".")[2] for span in traces.done)
    assert errors == [
        "INVALID_TOPIC_EXCEPTION",
        *["ProducerClosed"] * 3,
        *["RecordTooLargeToSend"] * 2,
        "TypeError",
    ]


def test_rows(cluster: EmbeddedCluster, topic: str, traces: Traces, kind: Any) -> None:
    """A span for the rows of a call; they get its context, unless they have headers."""
    import pyarrow as pa

    with kind(_settings(cluster)) as producer:
        producer.send_arrow(pa.table({"value": [b"0", b"1"]}), topic)
        kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
        own = pa.array([[{"key": "traceparent", "value": _PARENT.encode()}], None], kind)
        producer.send_arrow(pa.table({"value": [b"2", b"3"], "headers": own}), topic)
        with pytest.raises(KlogError):
            producer.send_arrow(pa.table({"value": ["the-value"], "partition": [99]}), topic)
        producer.flush()
    sent = traces.named(f"send {topic}")
    assert [attributes_of(span)["messaging.batch.message_count"] for span in sent] == [2, 2, 1]
    assert [span.status.status_code for span in sent] == [StatusCode.UNSET, StatusCode.UNSET, StatusCode.ERROR]
    written = (("traceparent", _traceparent(sent[0])),)
    headers = [record.headers for record in _records(cluster, topic, 4)]
    assert headers == [written, written, (("traceparent", _PARENT.encode()),), ()]
    with Consumer(_settings(cluster), include_headers=True) as consumer:
        consumer.assign([(topic, 0, 0)])
        batches: list[Any] = []
        wait_until(lambda: sum(map(len, batches)) == 4 or batches.append(consumer.poll_arrow(0.1) or b""))
        with processing(next(batch for batch in batches if batch), consumer):
            pass
    polled, processed = traces.named(f"poll {topic}"), traces.named(f"process {topic}")
    assert [link for span in polled for link in links(span)][-3:] == [ids(sent[0].context)] * 2 + [_PARENT_IDS]
    assert links(processed[0])[0] == ids(sent[0].context)


def test_links_of_many_records(cluster: EmbeddedCluster, topic: str, traces: Traces) -> None:
    """A poll of 500 records has 128 links, with each record's place."""
    with Producer(_settings(cluster)) as producer:
        for number in range(500):
            producer.send(topic, b"%d" % number)
    with Consumer(_settings(cluster)) as consumer:
        consumer.assign([(topic, 0, 0)])
        count = 0
        while count < 500:
            count += len(consumer.poll(1.0))
    polled = traces.named(f"poll {topic}")
    assert sum(attributes_of(span)["messaging.batch.message_count"] for span in polled) == 500
    first = polled[0]
    assert len(first.links) == min(128, attributes_of(first)["messaging.batch.message_count"])
    assert [link.attributes["messaging.kafka.offset"] for link in first.links] == list(range(len(first.links)))


def test_processing(cluster: EmbeddedCluster, topic: str, traces: Traces) -> None:
    """A record's block within another span; an error; several records; none; baggage."""
    with Producer(_settings(cluster)) as producer:
        token = contexts.attach(baggage.set_baggage("user", "7"))
        producer.send(topic, None)
        producer.send(topic, b"1")
        contexts.detach(token)
    with Consumer(_settings(cluster, group_id="g")) as consumer:
        consumer.assign([(topic, 0, 0)])
        records: list[Any] = []
        wait_until(lambda: len(records.extend(consumer.poll(0.1)) or records) == 2)
        with traces.tracer().start_as_current_span("handler") as handler, processing(records[0], consumer):
            assert baggage.get_baggage("user") == "7"
        assert baggage.get_baggage("user") is None
        with pytest.raises(ValueError, match="the-value"), processing(records, consumer):
            raise ValueError("the-value")
        with processing([], consumer):
            pass
    first, second, third = [span for span in traces.done if span.name.startswith("process")]
    assert attributes_of(traces.named(f"send {topic}")[0])["messaging.kafka.message.tombstone"] is True
    assert first.parent == handler.get_span_context()
    assert links(first) == [ids(traces.named(f"send {topic}")[0].context)]
    assert attributes_of(second)["error.type"] == "ValueError"
    assert attributes_of(second)["messaging.batch.message_count"] == len(second.links) == 2
    assert (third.name, attributes_of(third)["messaging.batch.message_count"]) == ("process", 0)


@pytest.mark.parametrize("is_on", [False, True])
def test_processing_of_what_is_none(cluster: EmbeddedCluster, is_on: bool) -> None:
    with tracing() if is_on else nullcontext(), Consumer(_settings(cluster)) as consumer:
        for records, reader in (("x", consumer), (None, consumer), ([], None), ([], "consumer")):
            with pytest.raises(TypeError, match=r"^processing: "):
                processing(records, reader)


def test_commits(cluster: EmbeddedCluster, topic: str, traces: Traces) -> None:
    """Commits without waiting, by themselves, in a transaction; one that is refused; none of no offsets."""
    with Producer(_settings(cluster, transactional_id=f"x-{topic}")) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"0")
        producer.send_offsets_to_transaction({(topic, 0): 0}, "theirs")
        producer.send_offsets_to_transaction({}, "theirs")
        producer.commit_transaction()
    told: list[Any] = []
    with Consumer(_settings(cluster, group_id="g", auto_commit_interval_ms="60000")) as consumer:
        consumer.assign([(topic, 0, 0)])
        wait_until(lambda: consumer.poll(0.1))
        consumer.commit_async({(topic, 0): 1}, lambda *outcome: told.append(outcome))
        consumer.commit_async({(topic, 0): 1})
        consumer.commit({})
    with Consumer(_settings(cluster, group_id="other")) as stranger:
        stranger.subscribe([topic])
        with pytest.raises(CommitFailed):  # it has not joined
            stranger.commit({(topic, 0): 1})
    assert told[0][1] is None
    spans = [span for span in traces.done if span.name.startswith("commit")]
    groups = [attributes_of(span)["messaging.consumer.group.name"] for span in spans]
    assert groups == ["theirs", "g", "g", "g", "other"]  # the third of g by `close`
    errors = [attributes_of(span).get("error.type") for span in spans]
    assert errors == [None, None, None, None, "spark_klog.errors.CommitFailed"]


def test_not_sampled(cluster: EmbeddedCluster, topic: str) -> None:
    """A context that is not sampled goes on in the headers, and nothing is recorded."""
    with tracing(ALWAYS_OFF) as traces, Producer(_settings(cluster)) as producer:
        producer.send(topic, b"0").result(60)
        with Consumer(_settings(cluster, group_id="g")) as consumer:
            consumer.assign([(topic, 0, 0)])
            records: list[Any] = []
            wait_until(lambda: records.extend(consumer.poll(0.1)) or records)
            with processing(records[0], consumer):
                assert trace.get_current_span().get_span_context().trace_id
            consumer.commit()
    assert not traces.done
    ((name, value),) = records[0].headers
    assert name == "traceparent"
    assert value[-2:] in (b"00", b"02")  # not sampled; by newer SDKs random


def test_forked(cluster: EmbeddedCluster, topic: str, traces: Traces) -> None:
    """A child ends no span of its parent's, whose producer goes on."""
    with Producer(_settings(cluster, linger_ms="60000")) as producer:
        delivery = producer.send(topic, b"0")
        child = os.fork()
        if not child:
            code = 1
            try:
                producer.close()
                del delivery
                gc.collect()
                code = 0 if traces.open == 1 and not traces.done else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        producer.flush()
        assert delivery.result(60).offset == 0


def test_interrupts(cluster: EmbeddedCluster, topic: str, traces: Traces) -> None:
    """An interrupt at any step of a send or a poll leaves no span open, and no record is lost between two polls."""
    choose, sent = random.Random(7), 0

    class Stop(Exception):
        pass

    def at_step(number: int, call: Any) -> Any:
        left = number

        def step(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            if "tracing/" not in frame.f_code.co_filename or event not in ("call", "line"):
                return step
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise Stop
            return step

        sys.settrace(step)
        try:
            return call()
        finally:
            sys.settrace(None)

    with Producer(_settings(cluster)) as producer:
        for _ in range(60):
            try:
                at_step(choose.randrange(1, 80), lambda: producer.send(topic, b"v"))
                sent += 1
            except Stop:
                pass
        producer.flush()
    values: list[Any] = []
    with Consumer(_settings(cluster, max_poll_records="1")) as consumer:
        consumer.assign([(topic, 0, 0)])
        wait_until(lambda: values.extend(record.offset for record in consumer.poll(0.1)) or values)
        for _ in range(sent - 1):
            try:
                values += [record.offset for record in at_step(choose.randrange(1, 120), lambda: consumer.poll(5.0))]
            except Stop:
                pass
        end = consumer.position(topic, 0)
    assert values == list(range(end))
    # a span that was interrupted before its call has it may stay: it is of nothing, and is never exported
    gc.collect()
    traces._open.spans.clear()
