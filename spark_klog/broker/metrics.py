"""Counters of the broker, from which `metrics_page` makes Prometheus metrics.

Counters are plain numbers, used in one event loop. Requests and fetched records are counted only if metrics are served
(`is_read`). Values that the logs keep themselves (appended bytes, offsets, sizes) are read from them for each page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from spark_klog.errors import KlogError
from spark_klog.log.directory import LogDirectory
from spark_klog.log.segments.segment import FileRange
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api, Array, Struct
from spark_klog.records.formats.batch import next_offset_after, read_header

#: Upper bounds of the histogram of latencies, in seconds.
LATENCY_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ERROR = "error_code"
Path = tuple[str, ...]


class ApiCounters:
    """Counters for the requests of one API."""

    __slots__ = ("buckets", "error_paths", "errors", "requests", "seconds")

    def __init__(self, api: Api) -> None:
        #: Paths of field names to the error codes in the API's responses.
        self.error_paths = tuple(_paths(api.response))
        self.requests = 0
        self.seconds = 0.0
        #: Requests by latency: up to each of `LATENCY_BOUNDS`, and longer; not cumulative.
        self.buckets = [0] * (len(LATENCY_BOUNDS) + 1)
        #: Responses' error codes except 0, with their counts.
        self.errors: dict[int, int] = defaultdict(int)


class Metrics:
    """The counters of one broker."""

    def __init__(self) -> None:
        self.is_read = False
        self.connections = 0
        #: Connections closed because of the client's behaviour.
        self.connections_dropped = 0
        #: Connections refused because there were too many.
        self.connections_refused = 0
        self.apis: dict[str, ApiCounters] = {}
        self.bytes_out: dict[str, int] = defaultdict(int)
        self.records_out: dict[str, int] = defaultdict(int)

    def answered(self, api: Api, response: Message | None, seconds: float) -> None:
        """Count a request that took `seconds`; `response` is None if it has none."""
        counters = self.apis.get(api.name)
        if counters is None:
            counters = self.apis[api.name] = ApiCounters(api)
        counters.requests += 1
        counters.seconds += seconds
        counters.buckets[bisect_left(LATENCY_BOUNDS, seconds)] += 1
        if response is not None:
            for path in counters.error_paths:
                _count_errors(response, path, counters.errors)

    def fetched(self, topic: str, partition: int, records: Any, logs: LogDirectory) -> None:
        """Count records (bytes, or a range of a log) of a partition in a Fetch response."""
        log = logs.get(topic, partition)
        if log is None:
            return  # the topic was deleted meanwhile
        count = 0
        try:
            if isinstance(records, FileRange):
                count = log.records_in(records)
                if not count:
                    return  # the topic was created again meanwhile, or the segment removed
            else:
                first = read_header(records).base_offset
                count = next_offset_after(records, first) - first
        except (KlogError, OSError):
            pass  # the log is damaged; the client finds out, and the log reports it
        self.bytes_out[topic] += len(records)
        self.records_out[topic] += count

    def forget_topic(self, topic: str) -> None:
        """Drop the counters of a deleted topic."""
        self.bytes_out.pop(topic, None)
        self.records_out.pop(topic, None)


def _paths(struct: Struct) -> Iterable[Path]:
    for field in struct.fields:
        inner = field.type.element if isinstance(field.type, Array) else field.type
        if field.name == _ERROR:
            yield (_ERROR,)
        elif isinstance(inner, Struct):
            yield from ((field.name, *path) for path in _paths(inner))


def _count_errors(message: Mapping[str, Any], path: Path, errors: dict[int, int]) -> None:
    inner = message.get(path[0])
    if not inner:
        return
    if len(path) == 1:
        errors[int(inner)] += 1
    elif isinstance(inner, Mapping):
        _count_errors(inner, path[1:], errors)
    else:
        for entry in inner:
            _count_errors(entry, path[1:], errors)
