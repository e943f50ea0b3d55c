"""OpenTelemetry's conventions for Kafka's spans, as the package of the SDK names them, and a provider for tests.

The tables are those of "Semantic conventions for Kafka" 1.44: who sets an attribute that is not there, or leaves out a
required one, fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.semconv._incubating.attributes import messaging_attributes as messaging
from opentelemetry.semconv.attributes import error_attributes, server_attributes
from opentelemetry.trace import SpanKind, StatusCode

_TYPES = messaging.MessagingOperationTypeValues
_REQUIRED = {messaging.MESSAGING_SYSTEM, messaging.MESSAGING_OPERATION_NAME, messaging.MESSAGING_OPERATION_TYPE}
_ANY = _REQUIRED | {
    error_attributes.ERROR_TYPE,
    messaging.MESSAGING_BATCH_MESSAGE_COUNT,
    messaging.MESSAGING_DESTINATION_NAME,
    messaging.MESSAGING_CLIENT_ID,
    messaging.MESSAGING_DESTINATION_PARTITION_ID,
    messaging.MESSAGING_KAFKA_CLUSTER_ID,
    messaging.MESSAGING_KAFKA_OFFSET,
    server_attributes.SERVER_ADDRESS,
    server_attributes.SERVER_PORT,
}
_TOMBSTONE, _GROUP = messaging.MESSAGING_KAFKA_MESSAGE_TOMBSTONE, messaging.MESSAGING_CONSUMER_GROUP_NAME
#: By the type of an operation: the kind of its span, its name, and the attributes that it may have.
_OPERATIONS = {
    _TYPES.SEND.value: (SpanKind.PRODUCER, "send", _ANY | {_TOMBSTONE}),
    _TYPES.RECEIVE.value: (SpanKind.CLIENT, "poll", _ANY | {_TOMBSTONE, _GROUP}),
    _TYPES.PROCESS.value: (SpanKind.CONSUMER, "process", _ANY | {_TOMBSTONE, _GROUP}),
    _TYPES.SETTLE.value: (SpanKind.CLIENT, "commit", _ANY | {_GROUP}),
}
_INTEGERS = {
    messaging.MESSAGING_BATCH_MESSAGE_COUNT,
    messaging.MESSAGING_KAFKA_OFFSET,
    server_attributes.SERVER_PORT,
}


def check(span: ReadableSpan, more: frozenset[str] = frozenset()) -> None:
    """`AssertionError` if a span is not by the conventions; `more` are attributes that are ours."""
    attributes = dict(span.attributes or {})
    kind, name, known = _OPERATIONS[str(attributes[messaging.MESSAGING_OPERATION_TYPE])]
    assert span.kind is kind
    assert attributes[messaging.MESSAGING_SYSTEM] == "kafka"
    assert attributes[messaging.MESSAGING_OPERATION_NAME] == name
    topic = attributes.get(messaging.MESSAGING_DESTINATION_NAME)
    assert span.name == (name if topic is None else f"{name} {topic}")
    assert set(attributes) >= _REQUIRED
    assert set(attributes) <= known | more, set(attributes) - known - more
    for attribute, value in attributes.items():
        if attribute not in more and attribute != _TOMBSTONE:
            assert isinstance(value, int if attribute in _INTEGERS else str), (attribute, value)
    assert (span.status.status_code is StatusCode.ERROR) == (error_attributes.ERROR_TYPE in attributes)
    assert span.status.description is None
    assert not span.events
    assert span.end_time is not None
    assert span.start_time is not None
    assert span.start_time <= span.end_time
    assert span.instrumentation_scope is not None
    assert span.instrumentation_scope.schema_url == "https://opentelemetry.io/schemas/1.44.0"


class _Open(SpanProcessor):
    """Counts the spans that are not ended."""

    def __init__(self) -> None:
        self.spans: set[int] = set()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        assert span.context is not None
        self.spans.add(span.context.span_id)

    def on_end(self, span: ReadableSpan) -> None:
        assert span.context is not None
        self.spans.remove(span.context.span_id)  # KeyError for a second end


class Traces:
    """The spans of a test; `done` are those that have ended."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self._exporter, self._open = InMemorySpanExporter(), _Open()
        self.provider.add_span_processor(self._open)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def done(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    @property
    def open(self) -> int:
        return len(self._open.spans)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.done if span.name == name]

    def tracer(self) -> trace.Tracer:
        return self.provider.get_tracer("test")


@contextmanager
def tracing(sampler: Sampler | None = None) -> Iterator[Traces]:
    """Configure a provider for a block; at its end all spans have ended, and ours are by the conventions."""
    before, traces = trace._TRACER_PROVIDER, Traces(sampler)
    trace._TRACER_PROVIDER = traces.provider
    try:
        yield traces
    finally:
        trace._TRACER_PROVIDER = before
    assert not traces.open
    for span in traces.done:
        assert span.instrumentation_scope is not None
        if span.instrumentation_scope.name == "spark_klog":
            check(span, OURS)


#: Attributes that are not the conventions'.
OURS = frozenset({"klog.query.name", "klog.query.id", "klog.query.run_id", "klog.query.batch_id", "klog.load.output"})


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def ids(context: Any) -> tuple[int, int]:
    """The ids of a trace and a span, without what a header does not say."""
    return context.trace_id, context.span_id


def links(span: ReadableSpan) -> list[tuple[int, int]]:
    return [ids(link.context) for link in span.links]
