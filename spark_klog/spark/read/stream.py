"""The stream reader: plans each micro-batch, and publishes the group's offsets after Spark's commit."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping, Set
from typing import Any
from uuid import UUID

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from spark_klog.base.memory import uncollected
from spark_klog.base.names import TopicPartition
from spark_klog.base.settings import some_partitions
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.sampling import record_sizes
from spark_klog.client.offsets import list_offsets, offsets_of_led
from spark_klog.client.places import Offsets, check_covers
from spark_klog.client.retry import Lasting, pause_seconds
from spark_klog.errors import KlogError, RequestTimedOut
from spark_klog.groups.checkpoint import from_json, start_in, to_json, told_apart, with_left, with_start
from spark_klog.protocol.tables.records import EARLIEST, LATEST
from spark_klog.spark.options import HELD_UP, LOST, RECORD_BYTES, SourceOptions
from spark_klog.spark.read.broker_source import BrokerSource
from spark_klog.spark.read.open_transactions import OpenTransactions
from spark_klog.spark.read.ranges import (
    UNSUBSCRIBED,
    LeaderOf,
    LossReporter,
    OffsetRange,
    limit_bytes,
    limit_rows,
    no_leader,
    plan_micro_batch,
    readable_start,
    unread,
)
from spark_klog.spark.read.tasks import Plan, read_ranges
from spark_klog.spark.versions import (
    HAS_ADMISSION_CONTROL,
    JsonOffsets,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

_log = logging.getLogger(__name__)
#: How long to look for a missing partition before it counts as deleted.
_GONE_SECONDS = 20.0
_LEAST_RETRY_MS = 50
#: How long a leader that answered last time may take, before a micro-batch leaves its partitions out.
_ANSWER_SECONDS = 5.0
#: The same for leaders that are moving, or did not answer last time.
_MOVING_SECONDS = 1.0
#: A sample costs a fetch, so each partition is sampled only once in this time, and so many for a micro-batch.
_KEPT_SECONDS, _MOST_SAMPLED = 60.0, 200


class RangePartition(InputPartition):
    """The offset ranges of a task, the ids of their topics if the brokers give them, and the plan of a batch query.

    `leaders` are those of the ranges, so that tasks need not ask for them.
    """

    def __init__(
        self,
        ranges: tuple[OffsetRange, ...],
        topic_ids: Mapping[str, UUID],
        leader_of: LeaderOf = no_leader,
        plan: Plan | None = None,
    ) -> None:
        super().__init__(ranges)
        self.ranges = ranges
        self.plan = plan
        self.leaders = tuple(leader_of(span.topic, span.partition) for span in ranges)
        self.topic_ids = {span.topic: topic_ids[span.topic] for span in ranges if span.topic in topic_ids}


class RefusedStreamReader(DataSourceStreamReader):
    """Raises the error of a query's options or schemas when Spark first calls it.

    If `streamReader` raised it, Spark would hide it behind an UnboundLocalError of its own.
    """

    def __init__(self, error: KlogError) -> None:
        self._error = error

    def _refuse(self, *_: Any) -> Any:  # Spark takes a `latestOffset` with parameters for one with read limits
        raise self._error

    initialOffset = latestOffset = getDefaultReadLimit = partitions = read = _refuse


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches; one process runs it for the whole query. Offsets are {"topic": {"partition": next offset}}.

    Spark calls `latestOffset`, writes the result to the checkpoint, then calls `partitions` for that micro-batch. For a
    micro-batch that a restart repeats it calls only `partitions`.
    """

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._connected: BrokerSource | None = None
        self._target: Offsets | None = None
        self._initial: Offsets | None = None
        self._latest: Offsets = {}
        self._planned: tuple[JsonOffsets, JsonOffsets, list[OffsetRange]] | None = None
        #: Whether the next latest offset is the run's first, which is Trigger.AvailableNow's end before pyspark 4.2.
        self._may_be_last = not HAS_ADMISSION_CONTROL
        self._last_trigger = -math.inf
        self._topic_ids: dict[str, UUID] = {}
        #: Ids of former topics, which a broker that lags behind may still tell.
        self._retired_ids: set[UUID] = set()
        self._recreated: set[str] = set()
        self._gone: set[TopicPartition] = set()
        #: Missing partitions that do not count as deleted yet, and since when they are missing.
        self._missing: dict[TopicPartition, float] = {}
        #: When the last plan ended, a reading of `time.monotonic`.
        self._planned_at = -math.inf
        #: Of missing partitions: the offset up to which they were read, and the id of their topic.
        self._left: dict[TopicPartition, tuple[int, UUID | None]] = {}
        #: Partitions without a leader, which the micro-batch that is being planned leaves out.
        self._waiting: set[TopicPartition] = set()
        self._leaderless = Leaderless()
        self._losses = LossReporter(options.on_data_loss)
        #: For estimateRecordBytes and maxBytesPerTrigger.
        self._record_bytes = RecordBytes()
        self._open_transactions = OpenTransactions()

    @property
    def _source(self) -> BrokerSource:
        if self._connected is None:
            self._connected = BrokerSource.connect(self._options)
            group = self._options.group_offsets
            # here: Spark makes a stream's reader in two processes, and only one of them connects
            if group is not None and group.commits is None:
                _log.warning(
                    'kafka.group.id=%s: the query commits no offsets of this group, as with format("kafka"); earlier '
                    "versions of klog did. Set commitOffsets=true to show the query's progress as the group's offsets, "
                    "false to silence this",
                    group.group,
                )
        return self._connected

    @property
    def _cluster(self) -> Cluster:
        return self._source.cluster

    def _partitions(self, *, is_first: bool = False) -> list[TopicPartition]:
        """The subscribed partitions now; notes topics that were deleted and created again since the last call.

        `ConfigError` if `is_first` and a named partition is missing; later it may have been deleted.
        """
        there = self._source.partitions(missing_ok=not is_first)
        for topic in {topic for topic, _ in there} & self._source.topic_ids.keys():
            topic_id = self._source.topic_ids[topic]
            known = self._topic_ids.setdefault(topic, topic_id)
            if topic_id != known and topic_id not in self._retired_ids:
                self._retired_ids.add(known)
                self._topic_ids[topic] = topic_id
                self._recreated.add(topic)
        return there

    def initialOffset(self) -> JsonOffsets:
        """Empty: the checkpoint keeps the query's start with the end of its first micro-batch, see `with_start`."""
        return {}

    def _first_start(self) -> Offsets:
        """The query's start by the options, resolved once."""
        if self._initial is None:
            partitions = self._partitions(is_first=True)
            options = self._options
            check_covers(options.starting_option, options.starting, partitions)
            self._initial = self._source.resolve(options.starting, partitions, options.starting_option)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        """Tell Spark whether a limit exists; `latestOffset` applies it. For Trigger.Once it gets ReadAllAvailable."""
        return ReadMaxRows(self._options.trigger.max_offsets or 1) if self._options.trigger.any else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._source.latest(self._partitions())

    def reportLatestOffset(self) -> JsonOffsets:
        """The log's latest offsets, as `latestOffset` has just seen them, with more figures for the progress record."""
        latest: dict[str, Any] = to_json(self._latest)
        more = {
            LOST: self._losses.show(),
            RECORD_BYTES: self._record_bytes.to_json() if self._options.estimate_record_bytes else [],
            HELD_UP: self._open_transactions.to_json(),
        }
        return latest | {name: value for name, value in more.items() if value}

    def latestOffset(self, start: JsonOffsets, limit: ReadLimit) -> JsonOffsets:
        """The end of the next micro-batch; `start` if there is none.

        Reports lost records now: before the micro-batch is in the checkpoint, and in time for its progress record.
        """
        try:
            with uncollected():  # answers about 50,000 partitions have no cycles, and the search takes half the time
                return self._next_end(start, limit)
        finally:
            self._may_be_last = False
            self._planned_at = time.monotonic()

    def _next_end(self, start: JsonOffsets, limit: ReadLimit) -> JsonOffsets:
        self._losses.begin_micro_batch()
        is_first, before = not start, from_json(start)
        begin = self._first_start() if is_first else before
        latest = self._latest = self._latest_after(begin)
        if self._cluster.config.isolation_level and self._target is None:
            self._open_transactions.look(self._cluster, latest)
        if not is_first:
            # The micro-batch that ends at `start` is committed, but Spark calls `commit` for it only with the next one:
            # until then the offsets of an idle or restarted stream would lag behind.
            self._publish({key: offset for key, offset in begin.items() if key[0] not in self._recreated})
        begin = begin | self._resume(latest.keys() - begin.keys())
        if latest == before and not is_first and not self._recreated:
            self._is_due(0)
            return start
        still = self._without_news(begin, latest)
        earliest = still | self._list_offsets(latest.keys() - still.keys() - self._waiting, EARLIEST)
        for key in latest.keys() - earliest.keys():
            self._wait_for_leader(latest, key, begin)
        readable = readable_start(begin, earliest, self._recreated)
        end = self._end(readable, latest, limit)
        if end is None:
            return start
        recreated = {key: offset for key, offset in readable.items() if key[0] in self._recreated}
        ranges = self._plan(begin, end, earliest, latest, is_first=is_first)
        missing = {key: (begin[key], self._topic_ids.get(key[0])) for key in begin.keys() - end.keys()}
        self._left = {key: left for key, left in self._left.items() if key not in end} | missing
        shown = with_start(end, begin | recreated, before, is_first=is_first)
        if ranges and shown == start:
            shown = told_apart(shown)
        if self._may_be_last:
            shown = with_left(shown, end, latest)
        self._planned = start, shown, ranges
        return shown

    def _list_offsets(self, partitions: Collection[TopicPartition], timestamp: int) -> Offsets:
        """Offsets of the partitions that have a leader; AvailableNow waits for all, as it has to read them all."""
        if self._target is not None or self._may_be_last:
            return list_offsets(self._cluster, dict.fromkeys(partitions, timestamp))
        return self._leaderless.offsets(self._cluster, partitions, timestamp, self._recreated)

    def _wait_for_leader(self, latest: Offsets, key: TopicPartition, start: Offsets) -> None:
        """Read nothing of a partition in this micro-batch; a new partition is not part of it."""
        self._waiting.add(key)
        if key in start:
            latest[key] = start[key]
        else:
            latest.pop(key, None)

    def _resume(self, appeared: Set[TopicPartition]) -> Offsets:
        """The offsets at which partitions that were missing continue, if the id shows that the topic is the same."""
        left = {key: self._left[key] for key in appeared & self._left.keys()}
        ids = self._cluster.topic_ids
        return {key: offset for key, (offset, topic_id) in left.items() if topic_id and topic_id == ids.get(key[0])}

    def _end(self, begin: Offsets, latest: Offsets, limit: ReadLimit) -> Offsets | None:
        """The end of a micro-batch from `begin` on, by the limits; None if too few records wait."""
        counts = unread(begin, latest)
        if self._options.estimate_record_bytes:
            self._record_bytes.sample(self._cluster, {key: begin[key] for key, count in counts.items() if count})
        if isinstance(limit, ReadAllAvailable):
            return latest
        if not self._is_due(sum(counts.values())):
            return None
        limits, end = self._options.trigger, latest
        if limits.max_offsets is not None:
            end = limit_rows(begin, end, limits.max_offsets)
        if limits.max_bytes is not None:
            waiting = sorted(((count, key) for key, count in unread(begin, end).items() if count), reverse=True)
            sizes = self._record_bytes.of(self._cluster, {key: begin[key] for _, key in waiting})
            end = limit_bytes(begin, end, limits.max_bytes, sizes)
        return end

    def _is_due(self, records: int) -> bool:
        """Whether minOffsetsPerTrigger records wait or maxTriggerDelay is over; if so, restarts the delay.

        Always true for AvailableNow, which must reach its end.
        """
        limits, now = self._options.trigger, time.monotonic()
        is_little = limits.min_offsets is not None and self._target is None and records < limits.min_offsets
        if is_little and now - self._last_trigger < limits.max_delay_ms / 1000:
            return False
        self._last_trigger = now
        return True

    def _latest_after(self, start: Offsets) -> Offsets:
        """The latest offsets, or AvailableNow's target, without deleted partitions.

        Requests offsets before `start` again, as a broker's answer may be stale. If they stay there, the log has lost
        records or the topic was created again.

        A missing partition keeps its offset for some seconds, in which later micro-batches look for it. If none may
        follow soon (the first one of a process, AvailableNow, rare triggers), this one waits for it.
        """
        start = self._options.subscription.named(start)
        is_followed = self._target is None and time.monotonic() - self._planned_at < _GONE_SECONDS
        for attempt in itertools.count():
            there = self._partitions_there(() if is_followed else start.keys() - self._gone)
            self._waiting.clear()
            self._leaderless.keep(there)
            latest = self._list_offsets(there, LATEST) if self._target is None else self._target_of(there, start)
            if self._target is None:
                for key in there - latest.keys():
                    self._wait_for_leader(latest, key, start)
            if self._cluster.config.isolation_level:
                latest |= self._unstable(start, latest)
            self._gone -= latest.keys()
            self._keep_missing(latest, start)
            behind = {key for key, offset in start.items() if latest.get(key, offset) < offset}
            if attempt >= self._options.offset_retries or all(topic in self._recreated for topic, _ in behind):
                break
            time.sleep(max(self._options.offset_retry_ms, _LEAST_RETRY_MS) / 1000)
            if self._target is not None:
                # The target itself may have come from a stale answer.
                self._target |= self._source.latest(behind & there)
        return latest

    def _keep_missing(self, latest: Offsets, start: Offsets) -> None:
        """Have missing partitions wait at their offsets, or count as deleted if they are missing for long.

        Not those of a topic that was created again: the offsets are the former topic's.
        """
        now = time.monotonic()
        missing = {key for key in start.keys() - latest.keys() - self._gone if key[0] not in self._recreated}
        if new := missing - self._missing.keys():
            _log.warning(
                "no broker knows %s; the query continues with the other partitions, and looks for these for %g s",
                *(some_partitions(new), _GONE_SECONDS),
            )
        self._missing = {key: self._missing.get(key, now) for key in missing}
        for key, since in self._missing.items():
            if now - since < _GONE_SECONDS:
                self._wait_for_leader(latest, key, start)
            else:
                self._gone.add(key)

    def _target_of(self, there: Set[TopicPartition], start: Offsets) -> Offsets:
        """AvailableNow's target; the log's end where the log became shorter meanwhile, or is that of a new topic.

        Partitions of `start` that were missing when the target was made get theirs now.
        """
        assert self._target is not None
        self._target |= self._source.latest((start.keys() & there) - self._target.keys())
        latest = self._source.latest(self._target.keys() & there)
        return {key: min(offset, self._target[key]) for key, offset in latest.items()}

    def _unstable(self, start: Offsets, stable: Offsets) -> Offsets:
        """The starts between the last stable offset and the high watermark: no record is lost there.

        A group, or this query while it was read_uncommitted, may have read up to them.
        """
        beyond = [key for key, offset in stable.items() if offset < start.get(key, 0)]
        high = self._source.log_ends(beyond) if beyond else {}
        return {key: start[key] for key in beyond if start[key] <= high[key]}

    def partitions(self, start: JsonOffsets, end: JsonOffsets) -> list[InputPartition]:
        if self._planned is None or self._planned[:2] != (start, end):
            self._planned = start, end, self._plan_again(start, end)
        source = self._source
        tasks = source.tasks(self._planned[2])
        return [RangePartition(ranges, self._topic_ids, source.leader_of) for ranges in tasks]

    def _plan_again(self, start: JsonOffsets, end: JsonOffsets) -> list[OffsetRange]:
        """The ranges of a micro-batch that an earlier run has planned: the checkpoint has its end."""
        begin, until = start_in(end, from_json(start), is_first=not start), from_json(end)
        there = self._partitions_there({key for key, at in until.items() if begin.get(key, 0) != at})
        there_until = {key: offset for key, offset in until.items() if key in there}
        earliest = self._without_news(begin, there_until)
        earliest |= self._source.earliest(there_until.keys() - earliest.keys())
        return self._plan(begin, until, earliest, None, is_first=not start)

    def _without_news(self, begin: Offsets, end: Offsets) -> Offsets:
        """The partitions that a micro-batch does not read, with their offsets: nothing of them is lost.

        Their first offsets are not asked for: they may have no leader.
        """
        return {key: at for key, at in end.items() if begin.get(key, 0) == at and key[0] not in self._recreated}

    def _partitions_there(self, expected: Collection[TopicPartition]) -> set[TopicPartition]:
        """The existing partitions. Retries before an expected one counts as deleted: a broker that has just started may
        not know it yet."""
        deadline = time.monotonic() + _GONE_SECONDS
        expected = set(self._options.subscription.named(dict.fromkeys(expected)))
        for attempt in itertools.count(1):
            there = set(self._partitions())
            missing = {key for key in expected - there if key[0] not in self._recreated}
            if not missing or time.monotonic() >= deadline:
                break
            time.sleep(pause_seconds(self._cluster.config, attempt))
        self._gone |= expected - there
        return there

    def _plan(
        self, begin: Offsets, end: Offsets, earliest: Offsets, latest: Offsets | None, *, is_first: bool
    ) -> list[OffsetRange]:
        """The readable ranges of a micro-batch; reports the lost ones. `DataLossError` as failOnDataLoss says."""
        ranges, lost = plan_micro_batch(begin, end, earliest, self._recreated, is_first=is_first)
        if lost and latest is None:
            latest = self._source.latest([loss[:2] for loss in lost if loss[:2] in earliest])
        names = self._options.subscription.names
        lost = [loss if names(*loss[:2]) else loss._replace(cause=UNSUBSCRIBED) for loss in lost]
        lost = [loss._replace(available_end=(latest or {}).get(loss[:2], loss.available_end)) for loss in lost]
        self._losses.report(lost)
        self._recreated.clear()
        return ranges

    def read(self, partition: RangePartition) -> Iterator[pa.RecordBatch]:
        topic_ids, leaders = partition.topic_ids, partition.leaders
        return read_ranges(self._options, partition.ranges, self._schema, topic_ids, leaders=leaders)

    def _publish(self, offsets: Offsets) -> None:
        if self._options.group_offsets and self._source.progress:
            self._source.progress.publish(offsets)

    def commit(self, end: JsonOffsets) -> None:
        self._publish(from_json(end))

    def stop(self) -> None:
        if self._connected is not None:
            self._connected.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connected": None}


class Leaderless:
    """Tracks partitions without a leader that answers, since when, and logs them."""

    def __init__(self) -> None:
        self._since: dict[TopicPartition, float] = {}
        #: Those of which the last look at the ends has waited the whole time, and got an answer.
        self._slow: set[TopicPartition] = set()
        self._looked_at = 0.0
        self._telling = Lasting(0.0, 1.0)

    def keep(self, partitions: Collection[TopicPartition]) -> None:
        """Forget all other partitions: they no longer exist."""
        for key in self._since.keys() - set(partitions):
            del self._since[key]

    def offsets(
        self, cluster: Cluster, partitions: Collection[TopicPartition], timestamp: int, required: set[str]
    ) -> Offsets:
        """The offsets at `timestamp` (EARLIEST or LATEST) of the partitions whose leaders answer.

        Waits for all partitions of `required` topics, and for every partition if no leader answers. Raises
        `RequestTimedOut` for a partition without a leader for longer than `request.timeout.ms`, if it has not answered
        within that time once more; other errors as of `list_offsets`.
        """
        begin, limit = time.monotonic(), cluster.config.request_timeout_ms / 1000
        if timestamp == LATEST:
            self._slow.clear()
        slow = self._slow & set(partitions)
        silent = (self._since.keys() & set(partitions)) - slow
        failed: dict[TopicPartition, KlogError] = {}

        def ask(keys: Collection[TopicPartition], seconds: float) -> Offsets:
            with cluster.within(seconds * 1000):
                more, refused = offsets_of_led(cluster, dict.fromkeys(keys, timestamp))
            failed.update(refused)
            return more

        def wait_for(keys: Collection[TopicPartition]) -> Offsets:
            try:
                more = list_offsets(cluster, dict.fromkeys(keys, timestamp))
            except KlogError as error:
                failed.update(dict.fromkeys(keys, error))
                return {}
            for key in keys:
                failed.pop(key, None)
            return more

        offsets = ask([key for key in partitions if key not in silent and key not in slow], _ANSWER_SECONDS)
        moving_until = time.monotonic() + _MOVING_SECONDS
        while failed and time.monotonic() < moving_until:
            time.sleep(pause_seconds(cluster.config, 1))
            cluster.metadata(sorted({topic for topic, _ in failed}))
            again = list(failed)
            failed.clear()
            offsets |= ask(again, _MOVING_SECONDS)
        if silent:
            offsets |= ask(silent, _MOVING_SECONDS)
        if slow:
            offsets |= wait_for(slow)
        if failed and (not offsets or any(topic in required for topic, _ in failed)):
            offsets |= list_offsets(cluster, dict.fromkeys(failed, timestamp))
            failed.clear()
        is_overdue = any(begin - self._since.get(key, begin) > limit for key in failed)
        is_silent = any(isinstance(failure, RequestTimedOut) for failure in failed.values())
        if is_overdue and (is_silent or begin - self._looked_at > limit / 2):
            # The last call was long ago: this may be a new, short outage. Or the leader is slow: give it all the time.
            late = list(failed)
            offsets |= wait_for(late)
            if timestamp == LATEST:
                self._slow.update(offsets.keys() & set(late))
        self._looked_at = time.monotonic()
        self._note(offsets.keys(), failed, limit, is_overdue=is_overdue)
        return offsets

    def _note(
        self,
        answered: Set[TopicPartition],
        failed: dict[TopicPartition, KlogError],
        limit: float,
        *,
        is_overdue: bool,
    ) -> None:
        now = time.monotonic()
        back = answered & self._since.keys()
        for key in back:
            del self._since[key]
        if back and not self._since:
            _log.warning("all partitions have leaders that answer again")
        if not failed:
            return
        if not self._since:
            self._telling = Lasting(now, 1.0)
        for key in failed:
            self._since.setdefault(key, now)
        key = min(self._since, key=lambda partition: self._since[partition])
        waited = now - self._since[key]
        names = some_partitions(self._since)
        if is_overdue:
            raise RequestTimedOut(
                f"no leader of {names} has answered for {waited:.0f} s (kafka.request.timeout.ms is "
                f"{limit:g} s): {failed.get(key, 'its last error is unknown')}"
            )
        if self._telling.is_due(now):
            _log.warning(
                "no leader of %s has answered for %.0f s; the query continues with the other partitions: %s",
                *(names, waited, failed.get(key, next(iter(failed.values())))),
            )


class RecordBytes:
    """Average bytes of a record in the log (compressed), by partition."""

    def __init__(self) -> None:
        self._known: dict[TopicPartition, tuple[float, float]] = {}

    def sample(self, cluster: Cluster, starts: Offsets) -> None:
        """As `of`; logs errors."""
        try:
            self.of(cluster, starts)
        except (KlogError, OSError) as error:
            _log.info("can't sample record sizes: %s", error)

    def of(self, cluster: Cluster, starts: Offsets) -> dict[TopicPartition, float]:
        """The sizes in these partitions, each of which has records from its offset on.

        Samples the first ones whose last sample is old; those without a sample have the others' average.
        """
        now = time.monotonic()
        due = [key for key in starts if now - self._known.get(key, (-1e9, 0))[0] > _KEPT_SECONDS][:_MOST_SAMPLED]
        sizes = record_sizes(cluster, {key: starts[key] for key in due}) if due else {}
        self._known |= {key: (now, size) for key, size in sizes.items()}
        known = {key: self._known[key][1] for key in starts if key in self._known}
        average = sum(known.values()) / max(1, len(known))
        return {key: known.get(key, average) for key in starts}

    def to_json(self) -> list[dict[str, Any]]:
        """[{"topic": ..., "partition": ..., "bytes": ...}]"""
        return [
            {"topic": topic, "partition": partition, "bytes": round(size, 1)}
            for (topic, partition), (_, size) in sorted(self._known.items())
        ]
