"""Spans of micro-batches, and traces that go through a stream into the next topic."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_klog.aio import Producer as AioProducer
from spark_klog.client import Consumer, Producer
from spark_klog.tracing import processing
from tests.spark.support import create_topic
from tests.support.clients.mirrors import read_topic
from tests.support.waiting import wait_until

conventions = pytest.importorskip("tests.tracing.conventions", reason="without OpenTelemetry's SDK")
_HEADERS = (
    ("traceparent", b"\xff\x00"),
    ("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    ("tracestate", b"vendor=1"),
    ("baggage", b"user=7,\xe9"),
    ("", None),
)
_NOT_SAMPLED = (("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b8-00"),)


@pytest.fixture
def topics(servers: str) -> tuple[str, str]:
    name = f"t-{uuid.uuid4().hex[:8]}"
    for topic in (name, f"{name}-out"):
        create_topic(servers, topic)
    return name, f"{name}-out"


def _copy(spark: SparkSession, servers: str, topics: tuple[str, str], folder: Path, value: str = "value") -> Any:
    """Run a stream from one topic to the other up to the log's end, with its headers."""
    source = spark.readStream.format("klog").option("kafka.bootstrap.servers", servers).option("subscribe", topics[0])
    rows = source.option("startingOffsets", "earliest").option("includeHeaders", "true").load()
    writer = rows.selectExpr("key", f"{value} AS value", "headers").writeStream.format("klog").queryName(topics[0])
    writer = writer.option("kafka.bootstrap.servers", servers).option("topic", topics[1])
    return writer.option("checkpointLocation", str(folder)).trigger(availableNow=True).start()


@contextmanager
def _listening(spark: SparkSession, settings: dict[str, str] | None) -> Iterator[None]:
    from spark_klog.spark.tracing import TracingListener

    listener = TracingListener(settings)
    spark.streams.addListener(listener)
    try:
        yield
    finally:
        spark.streams.removeListener(listener)
        listener.close()


@pytest.mark.test_all("long")
def test_micro_batches(spark: SparkSession, servers: str, topics: tuple[str, str], tmp_path: Path) -> None:
    settings = {"bootstrap.servers": servers}
    with Producer(settings) as producer:
        producer.send(topics[0], b"0", headers=_HEADERS)
        producer.send(topics[0], b"1")
        producer.send(topics[0], b"2", headers=_NOT_SAMPLED)
    with conventions.tracing() as traces, _listening(spark, settings):
        _copy(spark, servers, topics, tmp_path / "good").awaitTermination()
        wait_until(lambda: traces.named(f"process {topics[0]}"))
        bad = _copy(spark, servers, topics, tmp_path / "bad", "raise_error('the-secret')")
        wait_until(lambda: bad.exception() is not None)
        wait_until(lambda: any(span.status.status_code.name == "ERROR" for span in traces.done))
    assert [seen.headers for seen in read_topic(servers, topics[1], 1)[0]] == [_HEADERS, (), _NOT_SAMPLED]
    span = traces.named(f"process {topics[0]}")[0]
    attributes = conventions.attributes_of(span)
    assert attributes["messaging.batch.message_count"] == 3
    assert (attributes["klog.query.name"], attributes["klog.query.batch_id"]) == (topics[0], 0)
    assert conventions.links(span) == [(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7)]
    assert "the-secret" not in " ".join(span.to_json() for span in traces.done)


def test_without_a_provider(spark: SparkSession, servers: str, topics: tuple[str, str], tmp_path: Path) -> None:
    """The listener does nothing, and looks at no record."""
    from spark_klog.spark.tracing import TracingListener

    listener = TracingListener({"bootstrap.servers": "localhost:1"})
    assert not listener._spans.is_on
    listener.close()


class _Collector:
    """Receives traces by OTLP over HTTP, as a collector does, and parses them with OpenTelemetry's own messages."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        spans = self.spans = []  # type: ignore[var-annotated]

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def _service(servers: str, topic: str, tracer: Any) -> Iterator[int]:
    """A service of FastAPI, whose handler sends a record; its port."""
    import uvicorn
    from fastapi import FastAPI

    @asynccontextmanager
    async def lifespan(app: Any) -> Any:
        async with AioProducer({"bootstrap.servers": servers, "linger.ms": "0"}) as producer:
            app.state.producer = producer
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders/{number}")
    async def order(number: int) -> dict[str, int]:
        with tracer.start_as_current_span("order"):
            place = await app.state.producer.send(topic, b"%d" % number)
        return {"offset": place.offset}

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(60)


@pytest.mark.test_all("client")
def test_from_a_handler_through_a_stream_to_a_consumer(
    spark: SparkSession, servers: str, topics: tuple[str, str], tmp_path: Path
) -> None:
    """One trace: a handler of FastAPI, its record, a stream, the record's consumer, as a collector sees it by OTLP."""
    pytest.importorskip("fastapi")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    collector = _Collector()
    with conventions.tracing() as traces:
        traces.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=collector.address)))
        with _listening(spark, {"bootstrap.servers": servers}):
            with _service(servers, topics[0], traces.tracer()) as port:
                request = urllib.request.Request(f"http://127.0.0.1:{port}/orders/7", method="POST")
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert json.load(answer) == {"offset": 0}
            _copy(spark, servers, topics, tmp_path).awaitTermination()
            wait_until(lambda: traces.named(f"process {topics[0]}"))
        with Consumer({"bootstrap.servers": servers, "group.id": topics[1], "enable.auto.commit": False}) as consumer:
            consumer.assign([(topics[1], 0, 0)])
            records: list[Any] = []
            wait_until(lambda: records.extend(consumer.poll(0.1)) or records)
            with processing(records[0], consumer), traces.tracer().start_as_current_span("bill"):
                consumer.commit()
        traces.provider.force_flush()
    wait_until(lambda: len(collector.spans) >= len(traces.done))
    collector.close()

    spans = {span.name: span for span in collector.spans}
    handler, sent = spans["order"], spans[f"send {topics[0]}"]
    batch, polled = spans[f"process {topics[0]}"], spans[f"poll {topics[1]}"]
    processed, bill, committed = spans[f"process {topics[1]}"], spans["bill"], spans[f"commit {topics[1]}"]
    chain = [handler, sent, processed, bill, committed]
    assert {span.trace_id for span in chain} == {handler.trace_id}
    assert [span.parent_span_id for span in chain[1:]] == [span.span_id for span in chain[:-1]]
    for span in (batch, polled, processed):
        assert [(link.trace_id, link.span_id) for link in span.links] == [(sent.trace_id, sent.span_id)]
