"""Run a task: read its offset ranges from brokers or data directories into Arrow batches."""

from __future__ import annotations

import base64
import json
import logging
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID
from weakref import WeakKeyDictionary

import pyarrow as pa

from spark_klog.base.addresses import filesystem_at
from spark_klog.base.cache import Newest
from spark_klog.base.clock import doubled, system_ms
from spark_klog.client.cluster import UNKNOWN_TOPIC, Cluster
from spark_klog.client.fetch.entries import Fetched
from spark_klog.client.fetch.ranges import MOST_RANGES, ShortRanges, by_leader, fetch_range, is_short
from spark_klog.client.offsets import list_offsets
from spark_klog.client.places import Offsets
from spark_klog.client.settings import ClientConfig
from spark_klog.columns.decode import PartitionDecoder, Unreadable
from spark_klog.errors import (
    ConnectionFailed,
    ErrorCode,
    KlogError,
    OffsetOutOfRange,
    ProtocolError,
    RequestTimedOut,
)
from spark_klog.protocol.tables.records import LATEST
from spark_klog.records.kernels import warn_if_slow
from spark_klog.records.reading.reader import AbortedTransactions, BadBatch
from spark_klog.spark.options import BadRecordsOptions, SourceOptions
from spark_klog.spark.read.ranges import (
    DELETED,
    OPTION_ADVICE,
    RECREATED,
    RETENTION,
    TRUNCATED,
    LossReporter,
    Lost,
    OffsetRange,
)
from spark_klog.spark.worker_process import cluster_of, prepare_worker

if TYPE_CHECKING:
    from spark_klog.log.stored.segment import StoredBatches
    from spark_klog.schemas.column_format import ColumnDecoder
    from spark_klog.spark.read.directory_source import DirectorySource
    from spark_klog.spark.read.letter_topic import LetterTopic

_log = logging.getLogger(__name__)
#: Of dead letters, each a file.
_LETTER_VERSION = 1
#: Record batches of brokers or of data directories, and what reads them there.
RecordBatches: TypeAlias = "Fetched | StoredBatches"
RangeReader: TypeAlias = "BrokerReader | DirectorySource"
#: Fetch errors that mean that the topic is gone, with the cause of the loss.
_GONE = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: DELETED,
    ErrorCode.UNKNOWN_TOPIC_ID: RECREATED,
    ErrorCode.INCONSISTENT_TOPIC_ID: RECREATED,
}
_MAX_PAUSE_MS = 1000
#: Spark's local property that tells the action that a task belongs to, of a stream the micro-batch.
_EXECUTION = "spark.sql.execution.root.id"
#: How long the look-up of newer records may take, in ms.
_LOOK_UP_MS = 2000
_MOST_PLANS = 1000
#: Bad batches and records that a task logs: a topic may hold a million records of a schema that does not fit.
_MOST_LOGGED = 100
#: Topics that were gone after a range had waited for them, with the error code: the next range does not wait again.
_gone: WeakKeyDictionary[Cluster, dict[tuple[str, UUID | None], int]] = WeakKeyDictionary()
#: The execution id that this process has first read each plan in; None after the warning. The newest plan is last.
_executions: Newest[str, str | None] = Newest(_MOST_PLANS)


@dataclass(frozen=True)
class Plan:
    """A batch query's plan. `ends` is where it ends in each partition, if that was the log's end.

    Spark asks a Python data source for a plan once for each DataFrame, and reads that plan whenever the DataFrame is
    used: the static side of a stream's join in each micro-batch, a temporary view in each query. Tasks can't look up
    newer ends by themselves: the tasks of one action, and their retries, would see different ends. So a task warns when
    its process reads the plan in a second action; Spark's execution id tells actions apart.
    """

    ends: Offsets
    planned_at_ms: int = field(default_factory=system_ms)
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def advice(self) -> str:
        moment = datetime.fromtimestamp(self.planned_at_ms / 1000, timezone.utc).isoformat(" ", "seconds")
        return (
            f"the DataFrame was planned at {moment}, and Spark keeps the offsets of that time whenever it is read: "
            "call load() again for each use, in a stream within foreachBatch"
        )


class ReadObserver:
    """Gets a read's events, for a task's caller. This one ignores them, and reads to the end."""

    #: Takes (name, letter) of each corrupt record batch that is skipped; None: as the option badRecordsPath says.
    keep_letter: Callable[[str, dict[str, Any]], None] | None = None
    #: How the caller's user goes on without lost records.
    loss_advice: str = OPTION_ADVICE

    def lost(self, lost: Lost) -> None:
        """Offsets that can't be read, and failOnDataLoss is not true."""

    def fetched(self, batches: RecordBatches, start: int, records: int) -> bool:
        """Record batches from offset `start` on, of which `records` are visible; False to stop after them."""
        return True


def read_ranges(
    options: SourceOptions,
    ranges: Iterable[OffsetRange],
    schema: pa.Schema,
    topic_ids: Mapping[str, UUID] = MappingProxyType({}),
    observer: ReadObserver | None = None,
    reader: RangeReader | None = None,
    plan: Plan | None = None,
    leaders: Sequence[int | None] = (),
) -> Iterator[pa.RecordBatch]:
    """Read the ranges one after the other, as Arrow batches; `observer` learns what happens on the way.

    `reader` is one of `in_reading_order`, which may have fetched the range.

    `topic_ids` are the ids of the topics for which the ranges were planned, if the brokers give them. A new topic of
    the same name is not read. `plan` is the batch query's, if Spark may read it again. `leaders` are the leaders of
    the ranges that the driver knew.

    `DataLossError` if offsets are gone and failOnDataLoss is true; else it skips and logs them. Corrupt record batches
    as the option badRecords says. Other errors as of `fetch_range` and `StoredPartition.read`.
    """
    prepare_worker()
    warn_if_slow()
    if plan is not None and plan.ends:
        warn_if_read_again(plan, cluster_of(options.client))
    observer = observer or ReadObserver()
    letters: LetterTopic | None = None
    if options.bad_records.topic is not None and observer.keep_letter is None:
        from spark_klog.spark.read.letter_topic import LetterTopic  # few queries need its transactions

        letters = LetterTopic(options, options.bad_records.topic, "read" if plan is None else plan.identity)
    bad_records = BadRecords(options.bad_records, observer.keep_letter, letters)
    done: list[tuple[str, int, int, int]] = []
    decoders: dict[str, ColumnDecoder] = {reader.column: reader.decoder() for reader in options.readers}
    losses = LossReporter(options.on_data_loss, observer.loss_advice, "" if plan is None else plan.advice)
    if leaders:
        ranges = tuple(ranges)
        known = {span[:2]: node for span, node in zip(ranges, leaders, strict=True) if node is not None}
        if known:
            cluster_of(options.client).expect_leaders(known)
    pairs = in_reading_order(options, ranges, topic_ids) if reader is None else ((span, reader) for span in ranges)
    decoder: PartitionDecoder | None = None
    for requested, range_reader in pairs:
        topic, partition, start, end = requested
        if decoder is None:
            limit = range_reader.config.decompressed_max_bytes
            keeps_bad = letters is not None
            decoder = PartitionDecoder(
                topic, partition, schema, limit, yields_bad=True, decoders=decoders, keeps_bad=keeps_bad
            )
        decoder.move_to(topic, partition)
        refusals = _Refusals(options, range_reader.config)
        while start < end:
            try:
                on_bad = partial(bad_records.handle, topic, partition)
                for batches in range_reader.read(requested._replace(start=start), on_bad):
                    aborted = AbortedTransactions(batches.aborted) if range_reader.config.isolation_level else None
                    before = decoder.rows
                    yield from bad_records.readable(decoder.decode(batches.data, start, end, aborted, batches.damaged))
                    refusals.count = 0
                    if not observer.fetched(batches, start, decoder.rows - before):
                        break
                    start = batches.next_offset
                    if letters is not None and letters.is_full:
                        yield from bad_records.readable(decoder.finish())
                        letters.flush([*done, (topic, partition, requested.start, start)])
                break
            except ProtocolError as error:
                cause = _GONE.get(error.code)
                if cause is None:
                    raise
                lost = Lost(topic, partition, start, end, -1, -1, cause)
            except OffsetOutOfRange as error:
                low, high = error.available
                if low <= start and not options.paths:
                    if refusals.retry(start, high):
                        continue
                    if start < high:  # the broker says that it has the offset: not a proven loss
                        raise
                cause = DELETED if high < 0 else RETENTION if start < low else TRUNCATED
                lost_end = min(low, end) if start < low else end
                lost = Lost(topic, partition, start, lost_end, low, high, cause)
            losses.report([lost])
            observer.lost(lost)
            start = lost.end
        done.append((topic, partition, requested.start, end))
    if decoder is not None:
        yield from bad_records.readable(decoder.finish())
    if letters is not None:
        letters.flush(done)


def in_reading_order(
    options: SourceOptions, ranges: Iterable[OffsetRange], topic_ids: Mapping[str, UUID]
) -> Iterator[tuple[OffsetRange, RangeReader]]:
    """The ranges in the order in which to read them, each with its reader, which has fetched short ones together."""
    reader: RangeReader
    if options.paths:
        from spark_klog.spark.read.directory_source import DirectorySource  # pyarrow's file systems: slow to import

        reader = DirectorySource(options)
    else:
        reader = BrokerReader(cluster_of(options.client), options.poll_timeout_ms, topic_ids)
        ranges = reader.ahead(ranges)
    for requested in ranges:
        yield requested, reader


class BrokerReader:
    def __init__(self, cluster: Cluster, poll_timeout_ms: int | None, topic_ids: Mapping[str, UUID]) -> None:
        self.config = cluster.config
        self._cluster = cluster
        self._poll_timeout_ms = poll_timeout_ms
        self._topic_ids = topic_ids
        self._short = ShortRanges(cluster, topic_ids)
        #: Short ranges that are fetched and not yet read; their data is in one buffer.
        self._fetched: dict[OffsetRange, Fetched] = {}

    def ahead(self, ranges: Iterable[OffsetRange]) -> Iterator[OffsetRange]:
        """Yield the ranges in the order in which to read them; short ones are fetched together before."""
        short: list[OffsetRange] = []
        for requested in ranges:
            if not is_short(requested.start, requested.end):
                yield requested
                continue
            short.append(requested)
            if len(short) == MOST_RANGES:
                yield from self._together(short)
                short = []
        yield from self._together(short)

    def _together(self, short: list[OffsetRange]) -> Iterator[OffsetRange]:
        left = {(requested.topic, requested.partition): requested for requested in short}
        if len(left) == len(short) > 1:
            for node, keys in by_leader(self._cluster, list(left)).items():
                starts = {key: (left[key].start, left[key].end) for key in keys}
                for answers in self._short.fetch(node, starts):
                    self._fetched = {left.pop(key): fetched for key, fetched in answers.items()}
                    yield from list(self._fetched)
            short = list(left.values())
        yield from short

    def read(self, requested: OffsetRange, on_bad: Callable[[BadBatch], None]) -> Iterator[Fetched]:
        """The record batches of a range, see `fetch_range`; only directories know messages that go to `on_bad`."""
        if requested in self._fetched:
            yield self._fetched.pop(requested)
            return
        topic = requested.topic
        key = topic, self._topic_ids.get(topic)
        gone = _gone.setdefault(self._cluster, {})
        if key in gone:
            if self._is_gone(*key):
                raise ProtocolError(gone[key], f"topic {topic}")
            del gone[key]
        try:
            yield from fetch_range(self._cluster, *requested, self._poll_timeout_ms, key[1])
        except ProtocolError as error:
            with suppress(ConnectionFailed, RequestTimedOut):
                if error.code in _GONE and self._is_gone(*key):
                    gone[key] = error.code
            raise

    def _is_gone(self, topic: str, topic_id: UUID | None) -> bool:
        """Whether the brokers have no such topic now, or another one of its name."""
        metadata = self._cluster.metadata([topic]).get(topic)
        if metadata is None or metadata["error_code"] in UNKNOWN_TOPIC:
            return True
        return topic_id is not None and metadata["topic_id"].int != 0 and metadata["topic_id"] != topic_id


class BadRecords:
    """What a read does with corrupt record batches, by mode: "fail" raises; "skip" and "deadletter" log and go on.

    "deadletter" gives them to `letters`, or writes a file TOPIC-PARTITION-OFFSET-CRC.json: topic, partition, the base
    offset that the batch claims, the reason, the time (ms), and the bytes in base64. The CRC-32 of the bytes in the
    name keeps apart batches that claim the same offset. A repeated task writes the same files. `keep` takes (name,
    letter) in place of the file.

    The same for single records whose timestamps do not fit into microseconds, of which the value is kept, and for those
    whose key or value does not decode, of which that is kept, and key, value and headers beside it.
    """

    def __init__(
        self,
        options: BadRecordsOptions,
        keep: Callable[[str, dict[str, Any]], None] | None = None,
        letters: LetterTopic | None = None,
    ) -> None:
        self._options, self._keep, self._letters = options, keep, letters
        #: The name of the last dead letter.
        self._last = ""
        self._handled = 0

    def readable(self, parts: Iterable[pa.RecordBatch | Unreadable]) -> Iterator[pa.RecordBatch]:
        """The Arrow batches of what a decoder gives; handles the rest."""
        for part in parts:
            if isinstance(part, Unreadable):
                self.handle(*part)
            else:
                yield part

    def handle(self, topic: str, partition: int, bad: BadBatch) -> None:
        """Handle one record batch. Raises its `DecodeError` with "fail", OSError if a dead letter can't be written."""
        name = f"{topic}-{partition}"
        if self._options.mode == "fail":
            reason = str(bad.error).removeprefix(f"{name}: ")
            raise type(bad.error)(f"{name}: {reason}; badRecords=skip or deadletter reads on after it")
        file = f"{name}-{bad.offset}-{zlib.crc32(bad.data):08x}.json"
        if file == self._last:  # the next fetch starts with the batch that the last one ended with
            return
        self._last = file
        self._handled += 1
        if self._handled <= _MOST_LOGGED:
            more = "; this task logs no more of them" if self._handled == _MOST_LOGGED else ""
            _log.error("%s: skipped %d bytes of bad records: %s%s", name, len(bad.data), bad.error, more)
        if self._letters is not None:
            self._letters.add(topic, partition, bad)
            return
        letter = {
            "version": _LETTER_VERSION,
            "topic": topic,
            "partition": partition,
            "offset": bad.offset,
            "reason": str(bad.error),
            "time": system_ms(),
            "bytes": base64.b64encode(bad.data).decode(),
        }
        if bad.record is not None:
            key, value, headers, _ = bad.record
            letter["key"], letter["value"] = _base64(key), _base64(value)
            letter["headers"] = [[header, _base64(data)] for header, data in headers]
        if self._keep is not None:
            self._keep(file, letter)
        elif self._options.path is not None:
            files, path = filesystem_at(self._options.path)
            files.create_dir(path, recursive=True)
            with files.open_output_stream(f"{path.rstrip('/')}/{file}") as stream:
                stream.write(json.dumps(letter).encode())


def _base64(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


class _Refusals:
    """Decides whether to retry a fetch after OFFSET_OUT_OF_RANGE, and pauses before the retry.

    The log of a newly elected leader may end too early for a moment.
    """

    def __init__(self, options: SourceOptions, config: ClientConfig) -> None:
        self._options, self._timeout_ms = options, options.poll_timeout_ms or config.request_timeout_ms
        #: Since records arrived last.
        self.count = 0
        self._since = 0.0

    def retry(self, start: int, log_end: int) -> bool:
        """Pause and return True to fetch again: fetchOffset.numRetries times, or, if the log has the offset, until the
        poll timeout."""
        self.count += 1
        now = time.monotonic()
        if self.count == 1:
            self._since = now
        is_late, is_often = now - self._since > self._timeout_ms / 1000, self.count > self._options.offset_retries
        if is_late if start < log_end else is_often:
            return False
        _log.info("the broker rejected offset %d, fetching again", start)
        time.sleep(doubled(self._options.offset_retry_ms, _MAX_PAUSE_MS, self.count) / 1000)
        return True


def warn_if_read_again(plan: Plan, cluster: Cluster) -> None:
    """Log, once per plan and process, that another action reads the plan while its partitions have newer records."""
    from pyspark import TaskContext  # here: a load that has nothing to do reads this module, and needs no Spark

    context = TaskContext.get()
    execution = context.getLocalProperty(_EXECUTION) if context else None
    if execution is None or not plan.ends:
        return
    first = _executions[plan.identity] = _executions.get(plan.identity, execution)
    if first in (None, execution):
        return
    try:
        with cluster.within(_LOOK_UP_MS, "the look-up of newer records"):
            latest = list_offsets(cluster, dict.fromkeys(plan.ends, LATEST))
    except KlogError:  # the read itself reports what matters
        return
    newer = {key: offset for key, offset in latest.items() if offset > plan.ends[key]}
    if newer:
        (topic, partition), offset = next(iter(newer.items()))
        _executions[plan.identity] = None
        _log.warning(
            "records are not read: %s-%d ends at offset %d, this read at %d; %s",
            *(topic, partition, offset, plan.ends[topic, partition], plan.advice),
        )
