"""The stream reader: offsets of each micro-batch, and the group's offsets after Spark's commit."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator, Mapping, Set
from functools import partial
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
from spark_klog.client.offsets import list_offsets
from spark_klog.client.sampling import record_sizes
from spark_klog.errors import ConfigError
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST
from spark_klog.spark import discovery
from spark_klog.spark.group_offsets import GroupProgress
from spark_klog.spark.leaders import Leaderless
from spark_klog.spark.loss import LossReporter
from spark_klog.spark.offsets import Offsets, TopicPartition, from_json, start_in, to_json, with_start
from spark_klog.spark.options import PREFIX, SourceOptions
from spark_klog.spark.planning import (
    UNSUBSCRIBED,
    OffsetRange,
    check_covers,
    limit_bytes,
    limit_rows,
    plan_batch,
    readable_start,
    waiting,
)
from spark_klog.spark.reading import read_ranges
from spark_klog.spark.record_bytes import RecordBytes

JsonOffsets = dict[str, dict[str, int]]

#: How long a partition is looked for before it counts as deleted.
_GONE_SECONDS = 20.0
#: In a progress record's latest offsets: the ranges that could not be read (failOnDataLoss=report), and the bytes of a
#: record of each partition (estimateRecordBytes). Both are lists, and no topic has a blank in its name.
LOST, RECORD_BYTES = "lost ranges", "record bytes"


class RangePartition(InputPartition):
    """One task's ranges of offsets, and the ids of their topics as far as the brokers give them."""

    def __init__(self, ranges: tuple[OffsetRange, ...], topic_ids: Mapping[str, UUID]) -> None:
        super().__init__(ranges)
        self.ranges = ranges
        topics = {item.topic for item in ranges}
        self.topic_ids = {topic: topic_id for topic, topic_id in topic_ids.items() if topic in topics}


class RefusedStreamReader(DataSourceStreamReader):
    """Raises the error of a query's options when Spark first asks for an offset.

    If it were raised when Spark makes the reader, Spark would end in an UnboundLocalError of its own.
    """

    def __init__(self, error: ConfigError) -> None:
        self._error = error

    def initialOffset(self) -> JsonOffsets:
        raise self._error

    def latestOffset(self, start: JsonOffsets, limit: ReadLimit) -> JsonOffsets:
        raise self._error

    def getDefaultReadLimit(self) -> ReadLimit:
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        raise self._error


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets are Spark's: {"topic": {"partition": next offset}}. Lives in one process for the whole query.

    Spark calls `latestOffset`, writes its answer to the checkpoint, and then asks for the `partitions` of that batch;
    of a batch that a restart runs again it asks for the partitions only.
    """

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._connected: Cluster | None = None
        self._target: Offsets | None = None
        self._initial: Offsets | None = None
        self._latest: Offsets = {}
        self._planned: tuple[JsonOffsets, JsonOffsets, list[OffsetRange]] | None = None
        self._last_trigger = -math.inf
        self._topic_ids: dict[str, UUID] = {}
        self._recreated: set[str] = set()
        self._gone: set[TopicPartition] = set()
        #: Where partitions that are away had been read to, and the id of their topic.
        self._left: dict[TopicPartition, tuple[int, UUID | None]] = {}
        #: Partitions that wait for a leader in the batch that is being planned.
        self._waiting: set[TopicPartition] = set()
        self._leaderless = Leaderless()
        self._losses = LossReporter(options.on_data_loss)
        self._record_bytes = RecordBytes()
        group = options.group_offsets
        # another connection for publishing, which does not wait for what is asked for here
        connect = partial(Cluster.connect, options.client, PREFIX)
        self._progress = GroupProgress(group, lambda: self._cluster, connect) if group else None

    @property
    def _cluster(self) -> Cluster:
        if self._connected is None:
            self._connected = Cluster.connect(self._options.client, PREFIX)
        return self._connected

    def _partitions(self, *, is_first: bool = False) -> list[TopicPartition]:
        """The partitions that are there now; notices topics that were made anew since the last time.

        `ConfigError` where a named one is missing and it `is_first`: later it may have been deleted.
        """
        found = discovery.partitions_of(self._cluster, self._options.subscription, missing_ok=not is_first)
        for topic in {topic for topic, _ in found} & self._cluster.topic_ids.keys():
            topic_id = self._cluster.topic_ids[topic]
            if self._topic_ids.setdefault(topic, topic_id) != topic_id:
                self._topic_ids[topic] = topic_id
                self._recreated.add(topic)
        return found

    def initialOffset(self) -> JsonOffsets:
        """None: where the query starts stands beside the end of its first batch, see `offsets.with_start`."""
        return {}

    def _first_start(self) -> Offsets:
        """Where the query starts, by the options; the first answer stays until there is a batch."""
        if self._initial is None:
            partitions = self._partitions(is_first=True)
            options = self._options
            check_covers(options.starting_option, options.starting, partitions)
            self._initial = discovery.resolve(
                self._cluster, options.starting, partitions, options.starting_option, self._progress
            )
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        """That there are limits; `latestOffset` knows which. With Trigger.Once Spark passes ReadAllAvailable there."""
        return ReadMaxRows(self._options.trigger.max_offsets or 1) if self._options.trigger.any else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = discovery.latest(self._cluster, self._partitions())

    def reportLatestOffset(self) -> JsonOffsets:
        """Of the log, as `latestOffset` has just seen it, with what more the progress record is to say."""
        latest: dict[str, Any] = to_json(self._latest)
        more = {LOST: self._losses.show(), RECORD_BYTES: self._record_bytes.to_json()}
        return latest | {name: value for name, value in more.items() if value}

    def latestOffset(self, start: JsonOffsets, limit: ReadLimit) -> JsonOffsets:
        """Where the next batch ends; `start` itself where there is none.

        What the batch can't read is told now: before it is in the checkpoint, and in time for its progress record.
        """
        self._losses.begin_batch()
        is_first, before = not start, from_json(start)
        begin = self._first_start() if is_first else before
        if self._progress and not is_first:
            # Spark asks when the batch that ends at `start` is in the checkpoint, but tells `commit` of it only with
            # the next batch: a stream that has read all, or was restarted, would show too little until then.
            self._progress.publish(begin)
        latest = self._latest = self._latest_after(begin)
        begin = begin | self._come_back(latest.keys() - begin.keys())
        if latest == before and not is_first and not self._recreated:
            self._is_due(0)
            return start
        earliest = self._ask_leaders(latest.keys() - self._waiting, EARLIEST)
        for key in latest.keys() - earliest.keys():
            self._wait_for_leader(latest, key, begin)
        readable = readable_start(begin, earliest, self._recreated)
        end = self._end(readable, latest, limit)
        if end is None:
            return start
        anew = {key: offset for key, offset in readable.items() if key[0] in self._recreated}
        wanted = self._plan(begin, end, earliest, latest, is_first=is_first)
        away = {key: (begin[key], self._topic_ids.get(key[0])) for key in begin.keys() - end.keys()}
        self._left = {key: left for key, left in self._left.items() if key not in end} | away
        found = with_start(end, begin | anew, before)
        self._planned = start, found, wanted
        return found

    def _ask_leaders(self, partitions: Collection[TopicPartition], place: int) -> Offsets:
        """Offsets of the partitions, without those that have no leader now; AvailableNow has to read them all."""
        if self._target is not None:
            return list_offsets(self._cluster, dict.fromkeys(partitions, place))
        return self._leaderless.ask(self._cluster, partitions, place, self._recreated)

    def _wait_for_leader(self, latest: Offsets, key: TopicPartition, start: Offsets) -> None:
        """Leave a partition where it is in this batch; one that has just appeared is left out of it."""
        self._waiting.add(key)
        if key in start:
            latest[key] = start[key]
        else:
            latest.pop(key, None)

    def _come_back(self, appeared: Set[TopicPartition]) -> Offsets:
        """Where to go on with partitions that were away, of topics that are known to be the same as before."""
        left = {key: self._left[key] for key in appeared & self._left.keys()}
        ids = self._cluster.topic_ids
        return {key: offset for key, (offset, topic_id) in left.items() if topic_id and topic_id == ids.get(key[0])}

    def _end(self, begin: Offsets, latest: Offsets, limit: ReadLimit) -> Offsets | None:
        """Where a batch from `begin` on ends, by the limits; None where too little waits for one."""
        behind = {key: begin[key] for key, count in waiting(begin, latest).items() if count}
        if self._options.estimate_record_bytes:
            self._record_bytes.learn(self._cluster, behind)
        if isinstance(limit, ReadAllAvailable):
            return latest
        return self._limited(begin, latest) if self._is_due(sum(waiting(begin, latest).values())) else None

    def _is_due(self, records: int) -> bool:
        """Whether so many are enough (minOffsetsPerTrigger), or maxTriggerDelay is over, which then begins anew.

        AvailableNow has to come to its end.
        """
        limits, now = self._options.trigger, time.monotonic()
        is_little = limits.min_offsets is not None and self._target is None and records < limits.min_offsets
        if is_little and now - self._last_trigger < limits.max_delay_ms / 1000:
            return False
        self._last_trigger = now
        return True

    def _limited(self, begin: Offsets, end: Offsets) -> Offsets:
        limits = self._options.trigger
        if limits.max_offsets is not None:
            end = limit_rows(begin, end, limits.max_offsets)
        if limits.max_bytes is not None:
            behind = {key: begin[key] for key, count in waiting(begin, end).items() if count}
            sizes = record_sizes(self._cluster, behind) if behind else {}
            end = limit_bytes(begin, end, limits.max_bytes, sizes)
        return end

    def _latest_after(self, start: Offsets) -> Offsets:
        """Latest offsets, or AvailableNow's; those before `start` are asked for again: a broker may have stale ones.

        Where they stay there, the log has lost records, or is another one. Partitions that are gone are left out.
        """
        deadline = time.monotonic() + _GONE_SECONDS
        start = {key: offset for key, offset in start.items() if self._is_subscribed(key)}
        for attempt in itertools.count():
            there = self._partitions()
            self._waiting.clear()
            self._leaderless.keep(there)
            latest = self._ask_leaders(there, LATEST) if self._target is None else self._target_of(there)
            if self._target is None:
                for key in set(there) - latest.keys():
                    self._wait_for_leader(latest, key, start)
            if self._cluster.config.isolation_level:
                latest |= self._unstable(start, latest)
            behind = {key for key in start if latest.get(key, -1) < start[key]}
            self._gone -= latest.keys()
            if not behind or all(topic in self._recreated for topic, _ in behind):
                return latest
            is_missed = bool(behind - latest.keys() - self._gone) and time.monotonic() < deadline
            if attempt >= self._options.offset_retries and not is_missed:
                break
            time.sleep(self._options.offset_retry_ms / 1000)
            if self._target is not None:
                # as old as the run, it may have been a stale answer itself
                self._target |= discovery.latest(self._cluster, behind.intersection(there))
        self._gone = start.keys() - latest.keys()
        return latest

    def _is_subscribed(self, key: TopicPartition) -> bool:
        return self._options.subscription.names(*key)

    def _target_of(self, there: list[TopicPartition]) -> Offsets:
        assert self._target is not None
        return {key: self._target[key] for key in there if key in self._target}

    def _unstable(self, start: Offsets, stable: Offsets) -> Offsets:
        """The starts that lie between the last stable offset and the high watermark: nothing has been lost there.

        A group, or this query as long as it was read_uncommitted, may have come that far.
        """
        beyond = [key for key, offset in stable.items() if offset < start.get(key, 0)]
        high = discovery.high_watermarks(self._cluster, beyond) if beyond else {}
        return {key: start[key] for key in beyond if start[key] <= high[key]}

    def partitions(self, start: JsonOffsets, end: JsonOffsets) -> list[InputPartition]:
        if self._planned is None or self._planned[:2] != (start, end):
            self._planned = start, end, self._plan_again(start, end)
        tasks = discovery.tasks(self._cluster, self._planned[2], self._options.split)
        return [RangePartition(ranges, self._topic_ids) for ranges in tasks]

    def _plan_again(self, start: JsonOffsets, end: JsonOffsets) -> list[OffsetRange]:
        """The ranges of a batch of which the checkpoint has the end, from a run before."""
        begin, until = start_in(end, from_json(start)), from_json(end)
        there = self._partitions_there({*begin, *until})
        # of what is not read nothing is asked for: its leader may be away
        read = {key for key in there & until.keys() if begin.get(key, 0) != until[key] or key[0] in self._recreated}
        earliest = {key: begin.get(key, 0) for key in (there & until.keys()) - read}
        earliest |= discovery.earliest(self._cluster, read)
        return self._plan(begin, until, earliest, None, is_first=not start)

    def _partitions_there(self, wanted: set[TopicPartition]) -> set[TopicPartition]:
        """The partitions that are there. The wanted ones are asked for again before they count as gone: a broker that
        has just started may not know them yet."""
        deadline = time.monotonic() + _GONE_SECONDS
        wanted = {key for key in wanted if self._is_subscribed(key)}
        while wanted - (there := set(self._partitions())) and time.monotonic() < deadline:
            time.sleep(self._options.offset_retry_ms / 1000)
        self._gone = wanted - there
        return there

    def _plan(
        self, begin: Offsets, end: Offsets, earliest: Offsets, latest: Offsets | None, *, is_first: bool
    ) -> list[OffsetRange]:
        """The ranges of a batch that can be read; the others are told of. `DataLossError` as failOnDataLoss says."""
        wanted, lost = plan_batch(begin, end, earliest, self._recreated, is_first=is_first)
        if lost and latest is None:
            latest = discovery.latest(self._cluster, [item[:2] for item in lost if item[:2] in earliest])
        lost = [item if self._is_subscribed(item[:2]) else item._replace(cause=UNSUBSCRIBED) for item in lost]
        lost = [item._replace(available_end=(latest or {}).get(item[:2], item.available_end)) for item in lost]
        self._losses.report(lost)
        self._recreated.clear()
        return wanted

    def read(self, partition: RangePartition) -> Iterator[pa.RecordBatch]:
        return read_ranges(self._options, partition.ranges, self._schema, partition.topic_ids)

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
