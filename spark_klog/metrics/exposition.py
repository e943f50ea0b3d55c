r"""Prometheus's text exposition format, version 0.0.4.

    # HELP klog_broker_bytes_in_total Bytes of records appended
    # TYPE klog_broker_bytes_in_total counter
    klog_broker_bytes_in_total{topic="clicks"} 1027

Lines end with LF. Help texts escape \ as \\ and LF as \n; label values also escape " as \". A histogram has the samples
NAME_bucket{le="BOUND"} (cumulative; the last bound is +Inf), NAME_sum and NAME_count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
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
