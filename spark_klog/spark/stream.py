"""The stream reader: offsets of each micro-batch, and the group's offsets after Spark's commit."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from spark_klog.client.cluster import Cluster
from spark_klog.client.sampling import record_sizes
from spark_klog.spark import discovery
from spark_klog.spark.group_offsets import GroupProgress
from spark_klog.spark.loss import LossReporter
from spark_klog.spark.offsets import Offsets, TopicPartition, from_json, to_json
from spark_klog.spark.options import SourceOptions
from spark_klog.spark.planning import (
    DELETED,
    Lost,
    OffsetRange,
    check_covers,
    limit_bytes,
    limit_rows,
    plan_batch,
    waiting,
)
from spark_klog.spark.reading import read_ranges
from spark_klog.spark.record_bytes import RecordBytes

JsonOffsets = dict[str, dict[str, int]]

#: How long a partition is looked for before it counts as deleted.
_GONE_SECONDS = 20.0
#: In a progress record's latest offsets: what could not be read of the batch (failOnDataLoss=report), the bytes of a
#: record by topic and partition, and where a first batch starts, which Spark does not tell.
LOST, RECORD_BYTES, INITIAL = "__lost__", "__record_bytes__", "__initial__"


class RangePartition(InputPartition):
    """One task's ranges of offsets."""

    def __init__(self, ranges: tuple[OffsetRange, ...]) -> None:
        super().__init__(ranges)
        self.ranges = ranges


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets are Spark's: {"topic": {"partition": next offset}}. Lives in one process for the whole query."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._connected: Cluster | None = None
        self._target: Offsets | None = None
        self._initial: Offsets | None = None
        self._is_first = False
        self._last_trigger = -math.inf
        self._topic_ids: dict[str, UUID] = {}
        self._recreated: set[str] = set()
        self._gone: set[TopicPartition] = set()
        self._losses = LossReporter(options.on_data_loss)
        self._record_bytes = RecordBytes()
        group = options.group_offsets
        self._progress = GroupProgress(group, lambda: self._cluster) if group else None

    @property
    def _cluster(self) -> Cluster:
        if self._connected is None:
            self._connected = Cluster.connect(self._options.client)
        return self._connected

    def _partitions(self, *, is_first: bool = False) -> list[TopicPartition]:
        """The partitions that are there now; notices topics that were made anew since the last time.

        `ConfigError` where a named one is missing and it `is_first`: later it may have been deleted.
        """
        found = discovery.partitions_of(self._cluster, self._options.subscription, missing_ok=not is_first)
        for topic, topic_id in self._cluster.topic_ids.items():
            if self._topic_ids.setdefault(topic, topic_id) != topic_id:
                self._topic_ids[topic] = topic_id
                self._recreated.add(topic)
        return found

    def _partitions_there(self, wanted: set[TopicPartition]) -> set[TopicPartition]:
        """The partitions that are there. Wanted ones that were there before are asked for again before they are gone:
        a broker that has just started may not know them yet."""
        deadline = time.monotonic() + _GONE_SECONDS
        there = set(self._partitions())
        while wanted - there - self._gone and time.monotonic() < deadline:
            time.sleep(self._options.offset_retry_ms / 1000)
            there = set(self._partitions())
        return there

    def initialOffset(self) -> JsonOffsets:
        """Where the query starts. Spark asks twice, for the end of the first batch and to plan it: the answer stays."""
        if self._initial is None:
            partitions = self._partitions(is_first=True)
            options = self._options
            check_covers(options.starting_option, options.starting, partitions)
            self._initial = discovery.resolve(
                self._cluster, options.starting, partitions, options.starting_option, self._progress
            )
        return to_json(self._initial)

    def getDefaultReadLimit(self) -> ReadLimit:
        """That there are limits; `latestOffset` knows which. With Trigger.Once Spark passes ReadAllAvailable there."""
        return ReadMaxRows(self._options.trigger.max_offsets or 1) if self._options.trigger.any else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = discovery.latest(self._cluster, self._partitions())

    def reportLatestOffset(self) -> JsonOffsets:
        latest: dict[str, Any] = to_json(self._latest())
        more = {
            LOST: self._losses.batch,
            RECORD_BYTES: self._record_bytes.to_json(),
            INITIAL: to_json(self._initial or {}) if self._is_first else {},
        }
        return latest | {name: value for name, value in more.items() if value}

    def latestOffset(self, start: JsonOffsets, limit: ReadLimit) -> JsonOffsets:
        begin = from_json(start)
        self._is_first = begin == self._initial
        if self._progress and not self._is_first:
            # Spark asks when the batch that ends at `start` is in the checkpoint, but tells `commit` of it only with
            # the next batch: a stream that has read all, or was restarted, would show too little until then.
            self._progress.publish(begin)
        latest = self._latest_after(begin)
        begin = discovery.known_start(begin, self._cluster, latest.keys())
        behind = {key: begin[key] for key, count in waiting(begin, latest).items() if count}
        self._record_bytes.learn(self._cluster, behind)
        if isinstance(limit, ReadAllAvailable):
            return to_json(latest)
        if self._is_too_little(sum(waiting(begin, latest).values())):
            return start
        self._last_trigger = time.monotonic()
        return to_json(self._limited(begin, latest))

    def _is_too_little(self, records: int) -> bool:
        """Less than minOffsetsPerTrigger, and not for maxTriggerDelay yet. AvailableNow has to come to its end."""
        limits = self._options.trigger
        if limits.min_offsets is None or self._target is not None or records >= limits.min_offsets:
            return False
        return time.monotonic() - self._last_trigger < limits.max_delay_ms / 1000

    def _limited(self, begin: Offsets, end: Offsets) -> Offsets:
        limits = self._options.trigger
        if limits.max_offsets is not None:
            end = limit_rows(begin, end, limits.max_offsets)
        if limits.max_bytes is not None:
            behind = {key: begin[key] for key, count in waiting(begin, end).items() if count}
            sizes = record_sizes(self._cluster, behind) if behind else {}
            end = limit_bytes(begin, end, limits.max_bytes, sizes)
        return end

    def _latest(self) -> Offsets:
        if self._target is not None:
            return dict(self._target)
        return discovery.latest(self._cluster, self._partitions())

    def _latest_after(self, start: Offsets) -> Offsets:
        """Latest offsets; those before `start` are asked for again, since a broker may answer with stale ones.

        Where they stay there, the log has lost records, or is another one: `partitions` tells of it. Partitions that
        are gone keep their offsets: they may come back.
        """
        deadline = time.monotonic() + _GONE_SECONDS
        for attempt in itertools.count():
            latest = self._latest()
            behind = {key for key in start if latest.get(key, -1) < start[key]}
            if not behind or all(topic in self._recreated for topic, _ in behind):
                return latest
            is_missed = bool(behind - latest.keys() - self._gone) and time.monotonic() < deadline
            if attempt >= self._options.offset_retries and not is_missed:
                break
            time.sleep(self._options.offset_retry_ms / 1000)
            self._ask_target_again(behind)
        gone = {key: offset for key, offset in start.items() if key not in latest}
        self._losses.report(
            [Lost(*key, gone[key], gone[key], -1, -1, DELETED) for key in sorted(gone.keys() - self._gone)]
        )
        self._gone = set(gone)
        return latest | gone

    def _ask_target_again(self, behind: set[TopicPartition]) -> None:
        """The target of AvailableNow is as old as the run: it may have been a stale answer itself."""
        if self._target is not None:
            there = self._partitions()
            self._target |= discovery.latest(self._cluster, behind.intersection(there))

    def partitions(self, start: JsonOffsets, end: JsonOffsets) -> list[InputPartition]:
        self._losses.begin_batch()
        begin, until = from_json(start), from_json(end)
        there = self._partitions_there({*begin, *until})
        if begin == self._initial:
            # The end of a first batch may be of a run before, which was ended then: the log has grown since.
            begin = {key: min(offset, until.get(key, offset)) for key, offset in begin.items()}
        earliest = discovery.earliest(self._cluster, [key for key in {*begin, *until} if key in there])
        wanted, lost = plan_batch(begin, until, earliest, self._recreated)
        if lost:
            latest = discovery.latest(self._cluster, [item[:2] for item in lost if item[:2] in there])
            lost = [item._replace(available_end=latest.get(item[:2], item.available_end)) for item in lost]
        self._recreated.clear()
        self._losses.report(lost)
        return [RangePartition(ranges) for ranges in discovery.tasks(self._cluster, wanted, self._options.split)]

    def read(self, partition: RangePartition) -> Iterator[pa.RecordBatch]:
        return read_ranges(self._options, partition.ranges, self._schema)

    def commit(self, end: JsonOffsets) -> None:
        if self._progress:
            self._progress.publish(from_json(end))

    def stop(self) -> None:
        if self._progress:
            self._progress.close()
        if self._connected is not None:
            self._connected.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connected": None, "_progress": None}
