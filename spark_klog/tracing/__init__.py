"""Traces by OpenTelemetry: spans of sends, polls, commits, and of what is done with records. docs/recipes/tracing.md.

    from spark_klog.tracing import processing

    for record in consumer.poll(1.0):
        with processing(record, consumer):
            ...

A client looks for a TracerProvider when it is made. Without one nothing is wrapped, and OpenTelemetry is not imported:
who has configured a provider has imported it. The extra `otel` installs its API; the SDK and an exporter are the
program's choice.
"""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_klog.tracing.spans import Spans

__all__ = ["processing"]

_log = logging.getLogger(__name__)
#: The attribute of a traced client that has its `Spans`.
_SPANS = "_spans"


def is_on() -> bool:
    """Whether there is a TracerProvider."""
    trace = sys.modules.get("opentelemetry.trace")
    return trace is not None and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def spans_of(**client: Any) -> Spans | None:
    """What makes the spans of a client, by the arguments of `Spans`; None without a TracerProvider."""
    if not is_on():
        return None
    from spark_klog.tracing.spans import Spans

    try:
        return Spans(**client)
    except Exception as error:  # of the provider: a client goes on without traces
        _log.warning("there are no spans of a client: %s: %s", type(error).__name__, error)
        return None


def trace_client(client: Any, cluster: Any, *methods: str, group: str | None = None) -> None:
    """Have methods of a client of this cluster make spans, if there is a TracerProvider: `tracing/wrapping.py`."""
    server = cluster.config.bootstrap_servers[0]
    client_id, cluster_id = cluster.config.client_id, lambda: cluster.cluster_id
    spans = spans_of(client_id=client_id, server=server, group=group, cluster_id=cluster_id)
    if spans is not None:
        from spark_klog.tracing.wrapping import wrap

        setattr(client, _SPANS, spans)
        wrap(client, spans, methods)


def processing(records: Any, consumer: Any) -> AbstractContextManager[None]:
    """A block that processes records of a consumer: a span `process TOPIC`, which is the current one in the block.

    `records` are one record, or what `poll` or `poll_arrow` has returned. The span links to the contexts that the
    records' headers have. The span of a single record is in the trace of its producer, unless another span is the
    current one already. An exception that leaves the block is its error. The record's baggage is the block's.
    Without a TracerProvider the block does nothing. `TypeError` for what no consumer has returned.
    """
    if not isinstance(records, list) and not hasattr(records, "headers") and not hasattr(records, "num_rows"):
        raise TypeError(f"processing: {type(records).__name__} is neither a record nor what a poll has returned")
    if not hasattr(consumer, "group_metadata"):
        raise TypeError(f"processing: pass the Consumer that has returned the records, not {type(consumer).__name__}")
    spans: Spans | None = getattr(consumer, _SPANS, None)
    return nullcontext() if spans is None else spans.processing(records)
