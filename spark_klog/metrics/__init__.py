r"""Metrics for Prometheus: its text exposition format, version 0.0.4, and its page at /metrics.

Beside it is a dashboard for Grafana.

    # HELP klog_broker_bytes_in_total Bytes of records appended
    # TYPE klog_broker_bytes_in_total counter
    klog_broker_bytes_in_total{topic="clicks"} 1027

Lines end with LF. Help texts escape \ as \\ and LF as \n; label values also escape " as \". A histogram has the samples
NAME_bucket{le="BOUND"} (cumulative; the last bound is +Inf), NAME_sum and NAME_count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from spark_klog.wire.http import Pages, Request, Response, refusal

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Lines of the page made before other work of the event loop gets its turn.
_LINES_AT_ONCE = 500
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
Labels = tuple[str, ...]


class Histogram(NamedTuple):
    """Counts up to each upper bound, and beyond the last one; not cumulative. `sum` is the sum of the values."""

    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float


class Family(NamedTuple):
    """A metric. Samples are (label values, value); the value of a histogram is a `Histogram`."""

    name: str
    kind: str
    help: str
    labels: Labels
    samples: Iterable[tuple[Labels, float | Histogram]]


def lines(family: Family) -> Iterator[str]:
    """The family's lines, with line ends."""
    text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {family.name} {text}\n# TYPE {family.name} {family.kind}\n"
    for values, value in family.samples:
        pairs = [f'{name}="{_escaped(text)}"' for name, text in zip(family.labels, values, strict=True)]
        if not isinstance(value, Histogram):
            yield _line(family.name, pairs, value)
            continue
        cumulative = list(accumulate(value.counts))
        for bound, count in zip([*map(str, value.bounds), "+Inf"], cumulative, strict=True):
            yield _line(f"{family.name}_bucket", [*pairs, f'le="{bound}"'], count)
        yield _line(f"{family.name}_sum", pairs, value.sum)
        yield _line(f"{family.name}_count", pairs, cumulative[-1])


def _line(name: str, pairs: list[str], value: float) -> str:
    return f"{name}{{{','.join(pairs)}}} {value}\n" if pairs else f"{name} {value}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def metrics_page(page: Callable[[], Iterable[str]]) -> Pages:
    """Serve the lines that `page` returns at /metrics."""

    async def serve(request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            return refusal(405, "; the metrics are at /metrics", allow="GET, HEAD")
        if request.path != "/metrics":
            return refusal(404, "; the metrics are at /metrics")
        parts = []
        for number, text in enumerate(page(), 1):
            parts.append(text)
            if number % _LINES_AT_ONCE == 0:
                await asyncio.sleep(0)
        return Response(200, _CONTENT_TYPE, "".join(parts).encode())

    return serve
