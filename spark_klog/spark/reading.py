"""The work of a task: fetch a range of offsets, give Arrow batches."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from spark_klog.client.cluster import Cluster
from spark_klog.client.config import client_config
from spark_klog.client.fetcher import fetch_range
from spark_klog.columns.decode import PartitionDecoder
from spark_klog.errors import OffsetOutOfRange
from spark_klog.records.reader import AbortedTransactions
from spark_klog.spark.bad_records import BadRecords
from spark_klog.spark.loss import LossReporter
from spark_klog.spark.options import SourceOptions
from spark_klog.spark.planning import RETENTION, TRUNCATED, Lost, OffsetRange

#: Connections of this worker process, kept for its next task: Spark reuses its Python workers.
_clusters: dict[tuple[tuple[str, str], ...], Cluster] = {}


def _cluster(settings: dict[str, str]) -> Cluster:
    key = tuple(sorted(settings.items()))
    if key not in _clusters:
        _clusters[key] = Cluster(client_config(settings))
    return _clusters[key]


def read_range(options: SourceOptions, wanted: OffsetRange, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Arrow batches of the records in the range.

    `DataLossError` where offsets are gone and failOnDataLoss is true; else they are skipped, with a warning that names
    them. Corrupt batches as the option badRecords says. Other errors as of `fetch_range`.
    """
    cluster = _cluster(options.client)
    losses = LossReporter(options.on_data_loss)
    bad_records = BadRecords(options.bad_records, wanted.topic, wanted.partition)
    decoder = PartitionDecoder(
        wanted.topic, wanted.partition, schema, cluster.config.decompressed_max_bytes, bad_records.take
    )
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
            cause = RETENTION if start < low else TRUNCATED
            lost_end = min(low, wanted.end) if start < low else wanted.end
            losses.report([Lost(wanted.topic, wanted.partition, start, lost_end, low, high, cause)])
            if not start < low < wanted.end:
                break
            start = low
    yield from decoder.finish()
