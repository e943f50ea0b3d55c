"""The work of a task: fetch a range of offsets, give Arrow batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pyarrow as pa

from spark_klog.client.cluster import Cluster
from spark_klog.client.config import client_config
from spark_klog.client.fetcher import fetch_range
from spark_klog.columns.decode import PartitionDecoder
from spark_klog.errors import DataLossError, OffsetOutOfRange
from spark_klog.records.reader import AbortedTransactions
from spark_klog.spark.planning import Lost, OffsetRange

_log = logging.getLogger(__name__)

#: Connections of this worker process, kept for its next task: Spark reuses its Python workers.
_clusters: dict[tuple[tuple[str, str], ...], Cluster] = {}


def _cluster(settings: dict[str, str]) -> Cluster:
    key = tuple(sorted(settings.items()))
    if key not in _clusters:
        _clusters[key] = Cluster(client_config(settings))
    return _clusters[key]


def report_loss(lost: Lost, fail: bool) -> None:
    """Say exactly what can't be read: `DataLossError` with `fail`, else a warning."""
    if fail:
        raise DataLossError(
            f"offsets are gone or not there yet: {lost}; set failOnDataLoss=false to go on without them"
        )
    _log.warning("skipped what can't be read (failOnDataLoss=false): %s", lost)


def read_range(
    settings: dict[str, str], wanted: OffsetRange, schema: pa.Schema, fail_on_data_loss: bool
) -> Iterator[pa.RecordBatch]:
    """Arrow batches of the records in the range.

    `DataLossError` where offsets are gone and `fail_on_data_loss`; else they are skipped, with a warning that names
    them. Other errors as of `fetch_range`.
    """
    cluster = _cluster(settings)
    decoder = PartitionDecoder(wanted.topic, wanted.partition, schema, cluster.config.decompressed_max_bytes)
    start = wanted.start
    while start < wanted.end:
        try:
            for fetched in fetch_range(cluster, wanted.topic, wanted.partition, start, wanted.end):
                aborted = AbortedTransactions(fetched.aborted) if cluster.config.isolation_level else None
                yield from decoder.add(fetched.data, start, wanted.end, aborted)
                start = fetched.next_offset
            break
        except OffsetOutOfRange as error:
            low, high = error.available
            report_loss(Lost(wanted.topic, wanted.partition, start, wanted.end, low, high), fail_on_data_loss)
            if not start < low < wanted.end:
                break
            start = low
    yield from decoder.finish()
