"""Spans by OpenTelemetry's conventions for messaging systems and Kafka, version 1.44. Imports OpenTelemetry's API.

| span | kind | type | when |
| --- | --- | --- | --- |
| send TOPIC | PRODUCER | send | from the call until the record is confirmed or has failed; of rows: the call |
| poll TOPIC | CLIENT | receive | a poll that returns records, with links to their contexts |
| process TOPIC | CONSUMER | process | what a program, a micro-batch, a load or a mirror does with records |
| commit TOPIC | CLIENT | settle | a commit of offsets, also by itself or in a transaction |

Attributes have names of topics and groups, addresses, numbers, and the kind of an error: never keys, values, headers,
settings or an error's text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from opentelemetry import context as contexts, propagate, trace
from opentelemetry.trace import INVALID_SPAN, Span, SpanContext, SpanKind, StatusCode

from spark_klog.base.names import VERSION, TopicPartition
from spark_klog.errors import ErrorCode

_log = logging.getLogger(__name__)
Header = tuple[str, "bytes | None"]
#: As many as the SDK keeps by default.
MOST_LINKS = 128
_SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
_BAGGAGE = "baggage"
_GROUP = "messaging.consumer.group.name"
_TOPIC, _PARTITION = "messaging.destination.name", "messaging.destination.partition.id"
_OFFSET, _COUNT = "messaging.kafka.offset", "messaging.batch.message_count"
#: The headers of a record, its topic, partition and offset.
_Content = tuple[Any, str, int, int]
#: Rows of an Arrow batch that are looked at together.
_ROWS = 1000


class _Harmless:
    """A block that makes a span; errors in it, of a sampler or processor, are logged: what is traced goes on."""

    level = logging.WARNING

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        _log.log(self.level, "a span is lost, more are logged as DEBUG: %s: %s", type(error).__name__, error)
        self.level = logging.DEBUG
        return True


_HARMLESS = _Harmless()


class _HeaderGetter:
    """Reads the last header of a name, as Kafka's clients do."""

    def get(self, carrier: Sequence[Header], key: str) -> list[str] | None:
        value = next((value for name, value in reversed(carrier) if name == key), None)
        return None if value is None else [bytes(value).decode("utf-8", "replace")]

    def keys(self, carrier: Sequence[Header]) -> list[str]:
        return [name for name, _ in carrier]


class _HeaderSetter:
    """Adds headers, but none of a name that is there."""

    def set(self, carrier: list[Header], key: str, value: str) -> None:
        if key not in [name for name, _ in carrier]:
            carrier.append((key, value.encode()))


_GETTER, _SETTER = _HeaderGetter(), _HeaderSetter()


def error_type(error: BaseException) -> str:
    """Kafka's name of a protocol error, or the name of the exception's class."""
    code = getattr(error, "code", None)
    if isinstance(code, int) and code in ErrorCode._value2member_map_:
        return ErrorCode(code).name
    if isinstance(error, GeneratorExit):  # the steps of a call whose task was cancelled
        return "asyncio.CancelledError"
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class Sending:
    """The span of a record that is sent, which is ended once: by its outcome, or by an error of the call.

    It is the record's `on_delivery`, and calls the caller's one.
    """

    __slots__ = ("_is_ended", "_on_delivery", "_span", "_spans")

    def __init__(self, spans: Spans, span: Span, on_delivery: Callable[[Any, Any], None] | None = None) -> None:
        self._spans, self._span, self._on_delivery, self._is_ended = spans, span, on_delivery, False

    def __call__(self, error: BaseException | None, metadata: Any) -> None:
        self.end(error, metadata)
        if self._on_delivery is not None:
            self._on_delivery(error, metadata)

    def note_done(self, future: Any) -> None:
        """End the span of a record whose future was cancelled: it may never be sent."""
        if future.cancelled():
            self.end(asyncio.CancelledError())

    def end(self, error: BaseException | None, metadata: Any = None) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        with _HARMLESS:
            if metadata is not None:
                self._span.set_attribute(_PARTITION, str(metadata.partition))
                if metadata.offset >= 0:
                    self._span.set_attribute(_OFFSET, metadata.offset)
        self._spans.end(self._span, error)


class Spans:
    """Makes the spans of a client. Threads may share it.

    `server` is the first of bootstrap.servers; `cluster_id` returns the id of the cluster once it is known.
    """

    def __init__(
        self,
        client_id: str | None = None,
        server: tuple[str, int] | None = None,
        group: str | None = None,
        cluster_id: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._tracer = trace.get_tracer("spark_klog", VERSION, schema_url=_SCHEMA)
        self._propagator = propagate.get_global_textmap()
        self._fields = frozenset(self._propagator.fields)
        self._cluster_id = cluster_id
        address, port = server or (None, None)
        base = {"messaging.client.id": client_id, "server.address": address, "server.port": port, _GROUP: group}
        self._base = {name: value for name, value in base.items() if value is not None} | {"messaging.system": "kafka"}
        self._attributes = lru_cache(1000)(self._new_attributes)

    def _new_attributes(self, name: str, kind: str, topic: str | None) -> dict[str, Any]:
        """Attributes that all spans of an operation on a topic share."""
        attributes = self._base | {"messaging.operation.name": name, "messaging.operation.type": kind}
        return attributes if topic is None else attributes | {_TOPIC: topic}

    def _start(
        self,
        name: str,
        kind: str,
        topic: str | None,
        more: Mapping[str, Any] = {},
        **options: Any,
    ) -> Span:
        """Start a span; the attributes that samplers may need are there at once."""
        of_kind = {"send": SpanKind.PRODUCER, "process": SpanKind.CONSUMER}.get(kind, SpanKind.CLIENT)
        attributes = self._attributes(name, kind, topic)
        title = name if topic is None else f"{name} {topic}"
        with _HARMLESS:
            return self._tracer.start_span(title, kind=of_kind, attributes={**attributes, **more}, **options)
        return INVALID_SPAN

    def end(self, span: Span, error: BaseException | str | None = None, at: int | None = None) -> None:
        """End a span, with an error or the name of one, now or at a time in ns since 1970."""
        with _HARMLESS:
            if (cluster := self._cluster_id()) is not None:
                span.set_attribute("messaging.kafka.cluster.id", cluster)
            if error is not None:
                span.set_attribute("error.type", error if isinstance(error, str) else error_type(error))
                span.set_status(StatusCode.ERROR)  # without a description: an error's text may have parts of a record
            span.end(at)

    @contextmanager
    def _ending(self, span: Span) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.end(span, error)
            raise
        self.end(span)

    # Contexts in headers

    def context_in(self, headers: Iterable[Header] | None) -> SpanContext | None:
        """The context in which a record was made, by its headers; None without a valid one."""
        headers = [header for header in headers or () if header[0] in self._fields and header[0] != _BAGGAGE]
        if not headers:
            return None
        with _HARMLESS:
            extracted = self._propagator.extract(headers, contexts.Context(), _GETTER)
            context = trace.get_current_span(extracted).get_span_context()
            return context if context.is_valid else None
        return None

    def _with_context(self, span: Span, headers: Sequence[Header]) -> Sequence[Header]:
        """The headers with the span's context, and the current baggage.

        Of headers with a context of their own nothing is changed: the span links to it.
        """
        own = [name for name, _ in headers if name in self._fields and name != _BAGGAGE]
        if own:
            with _HARMLESS:
                if (context := self.context_in(headers)) is not None and span.is_recording():
                    span.add_link(context)
            return headers
        carrier = list(headers)
        with _HARMLESS:
            self._propagator.inject(carrier, trace.set_span_in_context(span), _SETTER)
            return tuple(carrier)
        return headers

    def _link(self, span: Span, contents: Iterable[_Content]) -> None:
        """Link a span that is recorded to the contexts of records, of 128 at most."""
        traced = ((self.context_in(headers), *place) for headers, *place in contents if headers)
        linked = ((context, *place) for context, *place in traced if context is not None)
        for context, topic, partition, offset in islice(linked, MOST_LINKS):
            span.add_link(context, {_TOPIC: topic, _PARTITION: str(partition), _OFFSET: offset})

    def _link_to(self, span: Span, records: Any) -> None:
        with _HARMLESS:
            if span.is_recording():
                self._link(span, _contents(records))

    # Sends

    def sending(
        self, topic: str, value: Any, headers: Any, on_delivery: Callable[[Any, Any], None] | None
    ) -> tuple[Sending | None, Any, Any]:
        """(the record's span, its headers, its on_delivery); no span if it isn't recorded."""
        if type(topic) is not str:
            return None, headers, on_delivery  # the call says what is wrong
        span = self._start("send", "send", topic)
        if headers == ():
            headers = self._with_context(span, ())
        elif not isinstance(headers, Mapping | str | bytes):
            headers = tuple(headers)
            if all(isinstance(header, tuple | list) and len(header) == 2 for header in headers):
                headers = self._with_context(span, headers)
        with _HARMLESS:
            if not span.is_recording():
                return None, headers, on_delivery
            if value is None:
                span.set_attribute("messaging.kafka.message.tombstone", True)
        sending = Sending(self, span, on_delivery)
        return sending, headers, sending

    @contextmanager
    def sending_rows(self, rows: Any, topic: str | None) -> Iterator[Any]:
        """A block that sends rows; it gets them with a column of headers, if they have none: its context."""
        span = self._start("send", "send", topic, {_COUNT: getattr(rows, "num_rows", 0)})
        with self._ending(span):
            names = getattr(getattr(rows, "schema", None), "names", ["headers"])
            headers = () if "headers" in names else self._with_context(span, ())
            if headers:
                import pyarrow as pa

                kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
                pairs = [{"key": name, "value": value} for name, value in headers]
                rows = rows.append_column("headers", pa.repeat(pa.scalar(pairs, kind), rows.num_rows))
            yield rows

    # What consumers do

    @contextmanager
    def reading(self, *_: Any) -> Iterator[Callable[[Any], None]]:
        """A poll; the span begins with it, and is made once it has records."""
        began = time.time_ns()

        def note(records: Any) -> None:
            if not isinstance(records, list) and not hasattr(records, "num_rows"):
                return  # chunks of the package's own
            with _HARMLESS:
                where = _Place.of(records if hasattr(records, "num_rows") else records[:1])  # they are of one partition
                where.attributes[_COUNT] = len(records)
                span = self._start("poll", "receive", where.topic, where.attributes, start_time=began)
                self._link_to(span, records)
                self.end(span)

        yield note

    @contextmanager
    def commit(self, offsets: Collection[TopicPartition], member: Any = None) -> Iterator[Callable[[Any], None]]:
        """A commit of offsets, which is nothing without any; `member` is the group's in a producer's transaction."""
        if not offsets:
            yield _ignore
            return
        with self._ending(self.committing(offsets, {} if member is None else {_GROUP: member.group})):
            yield _ignore

    def committing(self, offsets: Collection[TopicPartition], more: Mapping[str, Any] = {}) -> Span:
        """Start the span of a commit."""
        topics = {topic for topic, _ in offsets}
        if len(offsets) == 1:
            more = {**more, _PARTITION: str(next(iter(offsets))[1])}
        return self._start("commit", "settle", topics.pop() if len(topics) == 1 else None, more)

    @contextmanager
    def processing(self, records: Any) -> Iterator[None]:
        """See `spark_klog.tracing.processing`."""
        single = records if hasattr(records, "headers") else None
        where = _Place.of(records if single is None else [single])
        context = contexts.get_current()
        if single is not None:
            where.attributes[_OFFSET] = single.offset
            del where.attributes[_COUNT]
            ambient = trace.get_current_span(context)
            with _HARMLESS:
                context = self._propagator.extract(single.headers, context, _GETTER)
            if ambient.get_span_context().is_valid:
                context = trace.set_span_in_context(ambient, context)
        span = self._start("process", "process", where.topic, where.attributes, context=context)
        self._link_to(span, records if single is None else [single])
        with self._ending(span):
            token = contexts.attach(trace.set_span_in_context(span, context))
            try:
                yield
            finally:
                contexts.detach(token)

    def processed(
        self,
        topics: Iterable[str],
        count: int,
        times: tuple[int, int],
        contents: Iterable[_Content],
        attributes: Mapping[str, Any],
        error: BaseException | str | None = None,
    ) -> None:
        """Records of topics were processed between two times, in ns since 1970: by a micro-batch, a load, a mirror.

        `contents` are some of them, which are looked at if the span is recorded: it links to those that are sampled.
        """
        names = sorted(set(topics))
        topic = names[0] if len(names) == 1 else None
        span = self._start("process", "process", topic, {_COUNT: count, **attributes}, start_time=times[0])
        with _HARMLESS:
            if span.is_recording():
                self._link(span, (record for record in contents if self._is_sampled(record[0])))
        self.end(span, error, times[1])

    def _is_sampled(self, headers: Any) -> bool:
        context = self.context_in(headers)
        return context is not None and context.trace_flags.sampled


class _Place(NamedTuple):
    """The topic of records, if it is one, and attributes: their partition, if it is one, and their number."""

    topic: str | None
    attributes: dict[str, Any]

    @classmethod
    def of(cls, records: Any) -> _Place:
        """The place of a list of records, or of an Arrow batch, which is of one partition."""
        if hasattr(records, "num_rows"):
            keys = {(records["topic"][0].as_py(), records["partition"][0].as_py())} if records.num_rows else set()
        else:
            keys = {(record.topic, record.partition) for record in records}
        topics = {topic for topic, _ in keys}
        attributes: dict[str, Any] = {_COUNT: len(records)}
        if len(keys) == 1:
            attributes[_PARTITION] = str(next(iter(keys))[1])
        return cls(topics.pop() if len(topics) == 1 else None, attributes)


def _contents(records: Any) -> Iterator[_Content]:
    """The headers and places of records; of an Arrow batch without headers nothing."""
    if not hasattr(records, "num_rows"):
        return ((record.headers, record.topic, record.partition, record.offset) for record in records)
    if "headers" not in records.schema.names:
        return iter(())
    columns = records.select(["headers", "topic", "partition", "offset"])
    rows = (row for first in range(0, len(records), _ROWS) for row in columns.slice(first, _ROWS).to_pylist())
    return (
        ([(pair["key"], pair["value"]) for pair in row["headers"] or ()], row["topic"], row["partition"], row["offset"])
        for row in rows
    )


def _ignore(_: Any) -> None:
    pass
