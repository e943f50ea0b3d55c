"""The stream reader: offsets of each micro-batch, and the group's offsets after Spark's commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from spark_klog.client.cluster import Cluster
from spark_klog.directories.offsets import OffsetDirectory
from spark_klog.directories.tree import Tree, open_tree
from spark_klog.errors import DataLossError, DirectoryError
from spark_klog.spark import discovery
from spark_klog.spark.offsets import Offsets, TopicPartition, from_json, to_json
from spark_klog.spark.options import GroupOffsetsOptions, SourceOptions
from spark_klog.spark.planning import Lost, OffsetRange, check_covers, limit_rows, ranges
from spark_klog.spark.reading import read_range, report_loss

_log = logging.getLogger(__name__)
_STALE_RETRIES = 5
_STALE_PAUSE = 0.2

JsonOffsets = dict[str, dict[str, int]]


class RangePartition(InputPartition):
    """One task's range of offsets."""

    def __init__(self, range: OffsetRange) -> None:
        super().__init__(range)
        self.range = range


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets are Spark's: {"topic": {"partition": next offset}}. Lives in one process for the whole query."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._connected: Cluster | None = None
        self._target: Offsets | None = None
        self._initial: Offsets | None = None
        self._progress = GroupProgress(options.group_offsets) if options.group_offsets else None

    @property
    def _cluster(self) -> Cluster:
        if self._connected is None:
            self._connected = Cluster.connect(self._options.client)
        return self._connected

    def initialOffset(self) -> JsonOffsets:
        partitions = discovery.partitions_of(self._cluster, self._options.subscription)
        check_covers("startingOffsets", self._options.starting, partitions)
        self._initial = discovery.resolve(self._cluster, self._options.starting, partitions)
        return to_json(self._initial)

    def getDefaultReadLimit(self) -> ReadLimit:
        rows = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:
        partitions = discovery.partitions_of(self._cluster, self._options.subscription)
        self._target = discovery.latest(self._cluster, partitions)

    def reportLatestOffset(self) -> JsonOffsets:
        return to_json(self._latest())

    def latestOffset(self, start: JsonOffsets, limit: ReadLimit) -> JsonOffsets:
        begin = from_json(start)
        if self._progress and begin != self._initial:
            # Spark asks when the batch that ends at `start` is in the checkpoint, but tells `commit` of it only with
            # the next batch: a stream that has read all, or was restarted, would show too little until then.
            self._progress.publish(begin)
        latest = self._not_before(begin)
        begin = discovery.known_start(begin, self._cluster, latest.keys())
        if isinstance(limit, ReadMaxRows):
            return to_json(limit_rows(begin, latest, limit.max_rows))
        return to_json(latest)

    def _latest(self) -> Offsets:
        if self._target is not None:
            return dict(self._target)
        partitions = discovery.partitions_of(self._cluster, self._options.subscription)
        return discovery.latest(self._cluster, partitions)

    def _not_before(self, start: Offsets) -> Offsets:
        """Latest offsets that do not lie before `start`: a broker may answer with stale ones, so it is asked again."""
        for attempt in range(_STALE_RETRIES):
            latest = self._latest()
            behind = {key for key in start if latest.get(key, -1) < start[key]}
            if not behind:
                break
            if attempt + 1 < _STALE_RETRIES:
                time.sleep(_STALE_PAUSE)
                self._ask_target_again(behind)
        for key in sorted(behind):
            self._report_behind(key, start[key], latest.get(key))
            if key in latest:
                latest[key] = start[key]
        return latest

    def _ask_target_again(self, behind: set[TopicPartition]) -> None:
        """The target of AvailableNow is as old as the run: it may have been a stale answer itself."""
        if self._target is not None:
            there = discovery.partitions_of(self._cluster, self._options.subscription)
            self._target |= discovery.latest(self._cluster, behind.intersection(there))

    def _report_behind(self, key: TopicPartition, start: int, latest: int | None) -> None:
        topic, partition = key
        if latest is not None:
            earliest = discovery.earliest(self._cluster, [key])[key]
            report_loss(Lost(topic, partition, start, start, earliest, latest), self._options.fail_on_data_loss)
            return
        message = f"{topic}-{partition} is gone; the query has read it up to offset {start}"
        if self._options.fail_on_data_loss:
            raise DataLossError(f"{message}; set failOnDataLoss=false to go on without it")
        _log.warning("%s (failOnDataLoss=false)", message)

    def partitions(self, start: JsonOffsets, end: JsonOffsets) -> list[InputPartition]:
        until = from_json(end)
        begin = discovery.known_start(from_json(start), self._cluster, until.keys())
        return [RangePartition(item) for item in ranges(begin, until)]

    def read(self, partition: RangePartition) -> Iterator[pa.RecordBatch]:
        return read_range(self._options.client, partition.range, self._schema, self._options.fail_on_data_loss)

    def commit(self, end: JsonOffsets) -> None:
        if self._progress:
            self._progress.publish(from_json(end))

    def stop(self) -> None:
        if self._connected is not None:
            self._connected.close()
        if self._progress:
            self._progress.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connected": None}


class GroupProgress:
    """Shows a query's progress in the group's directory. Follows Spark's commit, and never fails a query."""

    def __init__(self, options: GroupOffsetsOptions) -> None:
        self._options = options
        self._tree: Tree | None = None
        self._published: Offsets = {}

    def publish(self, offsets: Offsets) -> None:
        """Write the offsets that changed; what could not be written is written with the next ones."""
        changed = {key: offset for key, offset in offsets.items() if self._published.get(key) != offset}
        if not changed:
            return
        try:
            if self._tree is None:
                self._tree = open_tree(self._options.tree)
            OffsetDirectory(self._tree, self._options.group).commit(changed)
        except DirectoryError as error:
            _log.error("offsets of group %s were not written, trying again next time: %s", self._options.group, error)
            return
        self._published |= changed

    def close(self) -> None:
        if self._tree is not None:
            self._tree.close()
            self._tree = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tree": None}
