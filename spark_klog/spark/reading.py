"""The work of a task: fetch a range of offsets, give Arrow batches."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol
from uuid import UUID

import pyarrow as pa

from spark_klog.client.cluster import Cluster
from spark_klog.client.config import ClientConfig, client_config
from spark_klog.client.fetcher import fetch_range
from spark_klog.columns.decode import PartitionDecoder
from spark_klog.errors import DecodeError, ErrorCode, OffsetOutOfRange, ProtocolError
from spark_klog.records.kernels import warn_if_slow
from spark_klog.records.reader import AbortedTransactions, BadBatch
from spark_klog.spark.bad_records import BadRecords
from spark_klog.spark.loss import LossReporter
from spark_klog.spark.options import PREFIX, SourceOptions
from spark_klog.spark.planning import DELETED, RECREATED, RETENTION, TRUNCATED, Lost, OffsetRange
from spark_klog.spark.worker_process import prepare_worker

_log = logging.getLogger(__name__)
_MAX_PAUSE_MS = 1000
#: What the errors of a fetch say of its topic.
_GONE = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: DELETED,
    ErrorCode.UNKNOWN_TOPIC_ID: RECREATED,
    ErrorCode.INCONSISTENT_TOPIC_ID: RECREATED,
}
#: A worker rarely reads with more settings than these; each cluster has two connections to a broker.
_MOST_CLUSTERS = 8
#: Connections of this worker process, kept for its next task: Spark reuses its Python workers. Used last is last.
_clusters: dict[tuple[tuple[str, str], ...], Cluster] = {}


def _cluster(settings: dict[str, str]) -> Cluster:
    key = tuple(sorted(settings.items()))
    _clusters[key] = _clusters.pop(key) if key in _clusters else Cluster(client_config(settings, PREFIX))
    if len(_clusters) > _MOST_CLUSTERS:
        # a read that still uses it connects again
        _clusters.pop(next(iter(_clusters))).close()
    return _clusters[key]


def _forget_clusters() -> None:
    """Close the connections of a forked process: they are those of its parent."""
    while _clusters:
        _clusters.popitem()[1].close()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_clusters)


def _source(options: SourceOptions, topic_ids: Mapping[str, UUID]) -> _Source:
    if options.paths:
        from spark_klog.spark.directory_source import DirectoryReader  # pyarrow's file systems take long to import

        return DirectoryReader(options)
    return _Brokers(_cluster(options.client), options.poll_timeout_ms, topic_ids)


def read_ranges(
    options: SourceOptions,
    ranges: Iterable[OffsetRange],
    schema: pa.Schema,
    topic_ids: Mapping[str, UUID] = MappingProxyType({}),
) -> Iterator[pa.RecordBatch]:
    """Arrow batches of the records in the ranges, one after the other.

    `topic_ids` are those of the topics that the ranges were planned for, if the brokers give them: another topic of
    such a name is not read.

    `DataLossError` where offsets are gone and failOnDataLoss is true; else they are skipped, with a warning that names
    them. Corrupt batches as the option badRecords says. Other errors as of `fetch_range`, of `StoredPartition.read`.
    """
    prepare_worker()
    warn_if_slow()
    source = _source(options, topic_ids)
    for wanted in ranges:
        yield from _read_range(source, options, wanted, schema)


class _Batches(Protocol):
    """Record batches, where to go on, (producer id, first offset) of aborted transactions, errors of damaged ones."""

    @property
    def data(self) -> memoryview: ...
    @property
    def next_offset(self) -> int: ...
    @property
    def aborted(self) -> list[tuple[int, int]]: ...
    @property
    def damaged(self) -> Mapping[int, DecodeError]: ...


class _Source(Protocol):
    """Who gives record batches."""

    config: ClientConfig

    def read(self, wanted: OffsetRange, on_bad: Callable[[BadBatch], None]) -> Iterator[_Batches]:
        """Those of a range, see `fetch_range`."""


class _Brokers:
    def __init__(self, cluster: Cluster, poll_timeout_ms: int | None, topic_ids: Mapping[str, UUID]) -> None:
        self.config = cluster.config
        self._cluster = cluster
        self._poll_timeout_ms = poll_timeout_ms
        self._topic_ids = topic_ids

    def read(self, wanted: OffsetRange, on_bad: Callable[[BadBatch], None]) -> Iterator[_Batches]:
        return fetch_range(self._cluster, *wanted, self._poll_timeout_ms, self._topic_ids.get(wanted.topic))


def _read_range(
    source: _Source, options: SourceOptions, wanted: OffsetRange, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    losses = LossReporter(options.on_data_loss)
    bad_records = BadRecords(options.bad_records, wanted.topic, wanted.partition)
    decoder = PartitionDecoder(
        wanted.topic, wanted.partition, schema, source.config.decompressed_max_bytes, bad_records.take
    )
    start, refusals = wanted.start, _Refusals(options)
    while start < wanted.end:
        try:
            for batches in source.read(wanted._replace(start=start), bad_records.take):
                aborted = AbortedTransactions(batches.aborted) if source.config.isolation_level else None
                yield from decoder.add(batches.data, start, wanted.end, aborted, batches.damaged)
                start = batches.next_offset
                refusals.end()
            break
        except ProtocolError as error:
            cause = _GONE.get(error.code)
            if cause is None:
                raise
            losses.report([Lost(wanted.topic, wanted.partition, start, wanted.end, -1, -1, cause)])
            break
        except OffsetOutOfRange as error:
            low, high = error.available
            if low <= start and not options.paths:
                if refusals.may_pass(start, high):
                    continue
                if start < high:  # the broker refuses what it says it has: nothing is known to be lost
                    raise
            cause = DELETED if high < 0 else RETENTION if start < low else TRUNCATED
            lost_end = min(low, wanted.end) if start < low else wanted.end
            losses.report([Lost(wanted.topic, wanted.partition, start, lost_end, low, high, cause)])
            start = lost_end
    yield from decoder.finish()


class _Refusals:
    """Decides how often a fetch is repeated that was refused with OFFSET_OUT_OF_RANGE, and waits before it.

    A leader that has just been elected may lag behind: its log seems to end too early for a moment.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._count = 0
        self._since = 0.0

    def end(self) -> None:
        """Records came."""
        self._count = 0

    def may_pass(self, start: int, log_end: int) -> bool:
        """Whether to fetch again: fetchOffset.numRetries times, or as long as records are waited for if the log has
        the offset."""
        self._count += 1
        now = time.monotonic()
        if self._count == 1:
            self._since = now
        options = self._options
        if start < log_end:
            timeout_ms = options.poll_timeout_ms or client_config(options.client).request_timeout_ms
            is_over = now - self._since > timeout_ms / 1000
        else:
            is_over = self._count > options.offset_retries
        if is_over:
            return False
        _log.info("offset %d was refused, fetching again", start)
        time.sleep(min(options.offset_retry_ms * 2 ** min(self._count - 1, 5), _MAX_PAUSE_MS) / 1000)
        return True
