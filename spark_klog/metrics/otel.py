"""The same metrics for OpenTelemetry: its meter reads the families that Prometheus' pages are made of.

Each is an asynchronous instrument of its name: a counter or a gauge, with the labels as attributes. Without a
MeterProvider nothing is imported, and nothing done.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any
from weakref import WeakMethod

from spark_klog.base.names import VERSION
from spark_klog.metrics import COUNTER, Family, Histogram

_log = logging.getLogger(__name__)
#: Samples of a metric, as on the pages.
_MAX_SERIES = 10_000
_Families = Callable[[], Iterable[Family]]


class _Meter:
    """The instruments of a provider, by their names, and what gives them families.

    A collection calls one instrument after the other: what they read is made once for all of them.
    """

    def __init__(self, metrics: Any) -> None:
        self._metrics, self._meter = metrics, metrics.get_meter("spark_klog", VERSION)
        self._sources: list[WeakMethod[_Families]] = []
        self._names: set[str] = set()
        self._unread: dict[str, list[Family]] = {}
        self._reading = threading.Lock()
        #: Not taken by what a collection calls, which has the SDK's lock.
        self._creating = threading.Lock()

    def add(self, families: _Families) -> None:
        reference = WeakMethod(families)
        with self._creating:
            for family in families():
                if family.name not in self._names:
                    self._names.add(family.name)
                    meter = self._meter
                    is_counter = family.kind == COUNTER
                    create = meter.create_observable_counter if is_counter else meter.create_observable_gauge
                    create(family.name, [self._reader(family.name)], description=family.help)
        with self._reading:
            if reference not in self._sources:
                self._sources.append(reference)

    def _reader(self, name: str) -> Callable[[Any], list[Any]]:
        return lambda _: self._read(name)

    def _read(self, name: str) -> list[Any]:
        with self._reading:
            if name not in self._unread:
                self._unread = {known: [] for known in self._names}
                self._sources = [source for source in self._sources if source() is not None]
                for source in self._sources:
                    for family in families() if (families := source()) is not None else ():
                        self._unread.setdefault(family.name, []).append(family)
            read = self._unread.pop(name)
        return [
            self._metrics.Observation(value, dict(zip(family.labels, labels, strict=True)))
            for family in read
            for labels, value in islice(family.samples, _MAX_SERIES)
            if not isinstance(value, Histogram)  # the broker's, which has a page only
        ]


_meters: dict[Any, _Meter] = {}


def export(families: _Families) -> None:
    """Have OpenTelemetry's meter read what a bound method returns as long as its object lives.

    Call it again if there are new names. Without a MeterProvider it does nothing.
    """
    metrics = sys.modules.get("opentelemetry.metrics")
    if metrics is None or type(provider := metrics.get_meter_provider()).__name__ == "_ProxyMeterProvider":
        return
    try:
        if provider not in _meters:
            _meters[provider] = _Meter(metrics)
        _meters[provider].add(families)
    except Exception as error:  # of the provider: what is measured goes on
        _log.warning("metrics are not exported: %s: %s", type(error).__name__, error)
