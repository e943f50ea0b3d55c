"""Page of metrics for Prometheus, made for each request.

| metric | kind | labels | what |
| --- | --- | --- | --- |
| klog_broker_build_info | gauge | version, kernel, python | 1 |
| klog_broker_bytes_in_total | counter | topic | bytes of records appended |
| klog_broker_records_in_total | counter | topic | records appended |
| klog_broker_bytes_out_total | counter | topic | bytes of records in responses to fetches |
| klog_broker_records_out_total | counter | topic | records in whole batches of these; compacted offsets count |
| klog_broker_requests_total | counter | api | requests |
| klog_broker_request_seconds | histogram | api | from a request to its encoded response; waits of fetches count |
| klog_broker_errors_total | counter | api, code | error codes in responses, for each partition or topic |
| klog_broker_connections | gauge | | open connections |
| klog_broker_connections_total | counter | | connections accepted |
| klog_broker_connections_dropped_total | counter | | connections closed because of the client's behaviour |
| klog_broker_connections_refused_total | counter | | connections refused because there were too many |
| klog_broker_purgatory_size | gauge | | fetches that wait for records |
| klog_broker_log_size_bytes | gauge | topic, partition | bytes of .log files |
| klog_broker_log_segments | gauge | topic, partition | segments |
| klog_broker_log_start_offset | gauge | topic, partition | the first offset |
| klog_broker_log_end_offset | gauge | topic, partition | the next offset |
| klog_broker_log_flushes_total | counter | topic | flushes to the disk |
| klog_broker_log_expired_segments_total | counter | topic | segments that retention deleted |
| klog_broker_cleaner_rounds_total | counter | | rounds of compaction |
| klog_broker_offline_partitions | gauge | | partitions that can't be served |
| klog_broker_group_lag | gauge | group, topic, partition | log end minus committed offset, for partitions led here |
| klog_broker_series_left_out | gauge | metric | samples left out: a metric has at most 10,000 |
| process_resident_memory_bytes | gauge | | resident memory (Linux) |
| process_cpu_seconds_total | counter | | user and system time |
| process_open_fds | gauge | | open file descriptors (Linux) |
| process_start_time_seconds | gauge | | when the broker started, since the epoch |

Counters start at 0 with the broker; those of a topic end with the topic.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from spark_klog.base.names import VERSION
from spark_klog.broker.metrics import LATENCY_BOUNDS
from spark_klog.errors import ErrorCode
from spark_klog.log.partition_log import PartitionLog
from spark_klog.metrics import COUNTER, GAUGE, HISTOGRAM, Family, Histogram, Labels, lines
from spark_klog.records import kernels

if TYPE_CHECKING:
    from spark_klog.broker.broker import Broker

#: Samples of a metric: clients choose names of topics and groups, and could flood a monitoring system.
MAX_SERIES = 10_000
_STARTED = time.time()
_PREFIX = "klog_broker_"
Sample = tuple[Labels, float | Histogram]


def page(broker: Broker, connections: int) -> Iterator[str]:
    """The page in parts of one or more lines: the caller may do other work between two."""
    left_out: dict[str, int] = {}
    for family in _families(broker, connections):
        samples = iter(family.samples)
        yield from lines(family._replace(samples=islice(samples, MAX_SERIES)))
        for _ in samples:
            left_out[family.name] = left_out.get(family.name, 0) + 1
            yield ""  # counting many samples takes time, too
    yield from lines(_family("series_left_out", GAUGE, "Samples left out", ("metric",), _labelled(left_out.items())))


def _family(name: str, kind: str, text: str, labels: Labels, samples: Iterable[Sample]) -> Family:
    return Family(_PREFIX + name, kind, text, labels, samples)


def _labelled(items: Iterable[tuple[str, float]]) -> Iterator[Sample]:
    for label, value in items:
        yield (label,), value


def _families(broker: Broker, connections: int) -> Iterator[Family]:
    metrics = broker.metrics
    build = (VERSION, kernels.load().name, platform.python_version())
    yield _family("build_info", GAUGE, "Versions in use", ("version", "kernel", "python"), [(build, 1)])
    yield from _traffic(broker)
    yield from _requests(broker)
    for name, kind, text, value in (
        ("connections", GAUGE, "Open connections", connections),
        ("connections_total", COUNTER, "Connections accepted", metrics.connections),
        ("connections_dropped_total", COUNTER, "Connections closed because of the client", metrics.connections_dropped),
        ("connections_refused_total", COUNTER, "Connections refused", metrics.connections_refused),
        ("purgatory_size", GAUGE, "Fetch requests that wait for records", broker.purgatory.waiting),
        ("cleaner_rounds_total", COUNTER, "Compactions of logs", broker.logs.cleanings),
        ("offline_partitions", GAUGE, "Partitions whose log is offline", len(broker.logs.offline)),
    ):
        yield _family(name, kind, text, (), [((), value)])
    yield from _logs(broker)
    partition = ("group", "topic", "partition")
    yield _family("group_lag", GAUGE, "Log end offset minus committed offset", partition, _lags(broker))
    yield from _process()


def _traffic(broker: Broker) -> Iterator[Family]:
    metrics = broker.metrics
    for name, text, of_log in (
        ("bytes_in_total", "Bytes of records appended", lambda log: log.appended_bytes),
        ("records_in_total", "Records appended", lambda log: log.end_offset - log.opened_at),
        ("log_flushes_total", "Flushes to disk", lambda log: log.flushed.count),
        ("log_expired_segments_total", "Segments that retention deleted", lambda log: log.expired_segments),
    ):
        yield _family(name, COUNTER, text, ("topic",), _by_topic(broker, of_log))
    for name, text, counters in (
        ("bytes_out_total", "Bytes of records in Fetch responses", metrics.bytes_out),
        ("records_out_total", "Records in Fetch responses", metrics.records_out),
    ):
        yield _family(name, COUNTER, text, ("topic",), _labelled(list(counters.items())))


def _by_topic(broker: Broker, of_log: Callable[[PartitionLog], int]) -> Iterator[Sample]:
    sums: dict[str, int] = {}
    for (topic, _), log in broker.logs.logs.items():
        sums[topic] = sums.get(topic, 0) + of_log(log)
    return _labelled(sums.items())


def _requests(broker: Broker) -> Iterator[Family]:
    apis = sorted(broker.metrics.apis.items())
    requests: list[Sample] = [((name,), api.requests) for name, api in apis]
    yield _family("requests_total", COUNTER, "Requests", ("api",), requests)
    times: list[Sample] = [((name,), Histogram(LATENCY_BOUNDS, tuple(api.buckets), api.seconds)) for name, api in apis]
    text = "Time from a complete request to its encoded response"
    yield _family("request_seconds", HISTOGRAM, text, ("api",), times)
    names = {code.value: code.name for code in ErrorCode}
    errors: list[Sample] = [
        ((name, names.get(code, str(code))), count) for name, api in apis for code, count in sorted(api.errors.items())
    ]
    yield _family("errors_total", COUNTER, "Error codes in responses", ("api", "code"), errors)


def _logs(broker: Broker) -> Iterator[Family]:
    logs = sorted(broker.logs.logs.items())
    for name, text, of_log in (
        ("log_size_bytes", "Bytes of .log files", lambda log: log.size),
        ("log_segments", "Segments", lambda log: len(log.segments)),
        ("log_start_offset", "First offset", lambda log: log.start_offset),
        ("log_end_offset", "Offset after the last record", lambda log: log.end_offset),
    ):
        samples = (((topic, str(partition)), of_log(log)) for (topic, partition), log in logs)
        yield _family(name, GAUGE, text, ("topic", "partition"), samples)


def _lags(broker: Broker) -> Iterator[Sample]:
    for group in () if broker.coordinator.is_loading else sorted(broker.coordinator.offsets.groups):
        for (topic, partition), committed in broker.coordinator.offsets.all(group).items():
            log = broker.logs.get(topic, partition)
            if log is not None:
                yield (group, topic, str(partition)), max(0, log.end_offset - committed.offset)


def _process() -> Iterator[Family]:
    yield Family("process_cpu_seconds_total", COUNTER, "User and system CPU time", (), [((), time.process_time())])
    yield Family("process_start_time_seconds", GAUGE, "Start time since the epoch", (), [((), _STARTED)])
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        descriptors = len(os.listdir("/proc/self/fd"))
    except OSError:
        return  # not Linux
    yield Family("process_resident_memory_bytes", GAUGE, "Resident memory in bytes", (), [((), resident)])
    yield Family("process_open_fds", GAUGE, "Open file descriptors", (), [((), descriptors)])
