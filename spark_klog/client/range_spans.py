"""Spans of what reads ranges of topics without `poll`: micro-batches, loads, mirrors. See `spark_klog.tracing`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from spark_klog.base.names import TopicPartition
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.sampling import first_headers
from spark_klog.errors import KlogError
from spark_klog.records.contract import Headers
from spark_klog.tracing import spans_of

_log = logging.getLogger(__name__)
#: What a look at records for links may take.
_LOOK_MS = 5_000
#: Partitions whose first records are looked at.
_MOST_PARTITIONS = 32


class RangeSpans:
    """Makes the spans of ranges that are read from a cluster; none without a TracerProvider.

    Without a cluster they have no links. Others may use it meanwhile: `asking` is a block in which they don't.
    """

    def __init__(self, cluster: Cluster | None = None, asking: AbstractContextManager[Any] | None = None) -> None:
        self._cluster, self._asking = cluster, asking or nullcontext()
        if cluster is None:
            self._spans = spans_of()
        else:
            client_id, server = cluster.config.client_id, cluster.config.bootstrap_servers[0]
            self._spans = spans_of(client_id=client_id, server=server, cluster_id=lambda: cluster.cluster_id)

    @property
    def is_on(self) -> bool:
        return self._spans is not None

    def processed(
        self,
        ranges: Mapping[TopicPartition, tuple[int, int]],
        count: int,
        began: int,
        ended: int | None = None,
        error: BaseException | str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """A span for so many records of these ranges [start, stop), in ns since 1970; it ends now by default.

        Without records there is none, unless there is an error.
        """
        if self._spans is None or not (count or error):
            return
        times = began, max(began, time.time_ns() if ended is None else ended)
        topics = [topic for topic, _ in ranges]
        self._spans.processed(topics, count, times, self._sampled(ranges), attributes or {}, error)

    def _sampled(self, ranges: Mapping[TopicPartition, tuple[int, int]]) -> Iterator[tuple[Headers, str, int, int]]:
        """The headers of some records of the ranges; nothing more if they can't be read now."""
        starts = {key: start for key, (start, stop) in ranges.items() if start < stop}
        if self._cluster is None or not starts:
            return
        chosen = dict(list(starts.items())[:_MOST_PARTITIONS])
        try:
            with self._asking, self._cluster.within(_LOOK_MS):
                records = list(first_headers(self._cluster, chosen))
        except KlogError as error:
            _log.info("a span has no links to records: %s", error)
            return
        yield from (record for record in records if record[3] < ranges[record[1], record[2]][1])
