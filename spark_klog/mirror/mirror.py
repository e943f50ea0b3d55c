"""The mirror: sessions, one after the other. A session has clients of both sides, and the loop that copies.

The loop fetches batches from the source and queues them for the target, a batch of each partition in turn, so that a
Produce request carries those of many; the next fetch comes in meanwhile. It notes where each was written when the
target has confirmed it. Every `commit_seconds` it writes the runs of offsets of what is confirmed:

    without exactly-once    after the records: what was confirmed since is copied again after a crash
    with exactly-once       in their transaction, which ends then

Memory: one fetch response a broker of the source, `_MOST_WAITING` and max.partition.fetch.bytes of batches that wait
for their turn, and buffer.memory of the target.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from spark_klog.base.clock import doubled
from spark_klog.base.names import TopicPartition
from spark_klog.base.settings import some_of, some_partitions
from spark_klog.client import Admin, Consumer
from spark_klog.client.cluster import UNKNOWN_TOPIC, Cluster
from spark_klog.client.net.waiting import wait_until_ready
from spark_klog.client.offsets import Committed, asking_offsets_of_led, high_watermarks, list_offsets, offsets_of_led
from spark_klog.client.producer.receipts import Receipt
from spark_klog.client.producer.transactions import NEVER_COMMITTED
from spark_klog.client.range_spans import RangeSpans
from spark_klog.client.requests import PendingRequest, Steps, run
from spark_klog.client.retry import Lasting
from spark_klog.errors import (
    ConfigError,
    DataLossError,
    ErrorCode,
    KlogError,
    LogTruncated,
    MirrorFenced,
    OffsetOutOfRange,
    ProducerFenced,
    ProtocolError,
    RequestTimedOut,
    TopicRecreated,
    UnsupportedVersionError,
    is_retriable,
)
from spark_klog.mirror.batches import OutBatch, Span, out_batches
from spark_klog.mirror.progress import (
    COPY,
    ORIGINS,
    PREFIX,
    PartitionMap,
    ProgressReader,
    encode_run,
    note_record,
    prepare_progress,
    progress_topic,
    slot_of,
    topic_record,
)
from spark_klog.mirror.settings import MirrorSettings, check_name
from spark_klog.mirror.target import LOOK_SECONDS, Ownership, Target
from spark_klog.mirror.topics import MirroredTopics
from spark_klog.protocol.tables.records import EARLIEST, LATEST

_log = logging.getLogger(__name__)
#: Seconds before the first attempt after a failure, and the most; each pause is twice the last.
_FIRST_PAUSE, _LAST_PAUSE = 0.5, 30.0
#: Failures in a row that end a mirror which has not begun yet, or is to stop at the end.
_MOST_FAILURES = 3
#: Seconds that the loop waits for one side while the other may have work.
_SHORT, _LONG = 0.02, 0.5
#: Seconds between two looks at the source's ends.
_LAG_SECONDS = 2.0
#: Seconds after which a topic that is missing at the source counts as deleted if the mirror is to stop at the end.
_GONE_SECONDS = 10.0
#: Bytes of batches that wait for their turn before nothing more is taken from the source.
_MOST_WAITING = 16 * 1024 * 1024
#: A commit comes earlier after this many batches, so that what is noted of them stays small.
_MOST_NOTED = 20_000
#: The most milliseconds that an answer of a leader may take which others do not wait for.
_LOOK_MS = 5000


class GroupTranslation:
    """Commits translated offsets at the target, for groups that have no members there.

    Offsets only move forward, as with MirrorMaker 2: consumers that were moved to the target keep theirs.
    """

    def __init__(self, settings: MirrorSettings, source: Admin, target: Admin) -> None:
        self._settings, self._source, self._target = settings, source, target

    def translate(self, maps: Mapping[TopicPartition, PartitionMap]) -> int:
        """Translate all groups that the settings name; return the number of groups at the target that are up to date.

        A group that fails is logged as a warning, and tried again at the next call.
        """
        pattern = self._settings.groups
        if pattern is None:
            return 0
        names = [group.group for group in self._source.list_groups() if pattern.fullmatch(group.group)]
        return sum(self._translate(name, maps) for name in sorted(names))

    def _translate(self, group: str, maps: Mapping[TopicPartition, PartitionMap]) -> bool:
        try:
            offsets = self._translated(group, maps)
            there = self._target.list_group_offsets(group, list(offsets)) if offsets else {}
            ahead = {key: new for key, new in offsets.items() if key not in there or there[key].offset < new.offset}
            refused = self._target.alter_group_offsets(group, ahead).failures if ahead else {}
        except KlogError as error:
            _log.warning("group %s is not translated: %s", group, error)
            return False
        for key, refusal in refused.items():
            if isinstance(refusal, ProtocolError) and refusal.code == ErrorCode.UNKNOWN_MEMBER_ID:
                _log.info("group %s has members at the target, and keeps its offsets there", group)
                return False
            _log.warning("the offset of group %s in %s-%d is not translated: %s", group, *key, refusal)
        return bool(offsets) and not refused

    def _translated(self, group: str, maps: Mapping[TopicPartition, PartitionMap]) -> dict[TopicPartition, Committed]:
        committed = {key: entry for key, entry in self._committed(group, maps).items() if key in maps}
        translated = {
            (self._settings.prefix + key[0], key[1]): maps[key].translate(entry.offset)
            for key, entry in committed.items()
        }
        before = [key for key, offset in translated.items() if offset is None]
        starts = list_offsets(self._target.cluster, dict.fromkeys(before, EARLIEST)) if before else {}
        return {
            key: Committed(starts[key] if offset is None else offset, metadata=entry.metadata)
            for (key, offset), entry in zip(translated.items(), committed.values(), strict=True)
        }

    def _committed(self, group: str, maps: Mapping[TopicPartition, PartitionMap]) -> dict[TopicPartition, Committed]:
        """All offsets of the group: to name the partitions would take a request about all that are mirrored."""
        if not maps:
            return {}
        try:
            return self._source.list_group_offsets(group)
        except UnsupportedVersionError:  # before Kafka 0.10.2
            return self._source.list_group_offsets(group, list(maps))


def mirror_name(settings: MirrorSettings, source: Admin) -> str:
    """The name of the mirror: as set, or else the id of the source's cluster, and the prefix.

    Copies with another prefix have a progress of their own.
    """
    source.list_topics()
    if settings.name is not None:
        return settings.name
    name = source.cluster.cluster_id
    if name is None:
        raise ConfigError("the source's brokers have no cluster id (before Kafka 0.10.1): name the mirror (--name)")
    return check_name(f"{name}-{settings.prefix}" if settings.prefix else name)


def check_clusters(settings: MirrorSettings, source: Admin, target: Admin) -> None:
    """Raise `ConfigError` if the mirror would copy topics into themselves."""
    target.list_topics()
    cluster = source.cluster.cluster_id
    if cluster is not None and cluster == target.cluster.cluster_id and not settings.prefix:
        raise ConfigError(f"source and target are the same cluster, {cluster}: give the copies other names (--prefix)")


@dataclass
class Totals:
    """Counts of a mirror since it was started; `bytes` are those of batches, as they are compressed.

    `copied` batches are as at the source, `rebuilt` ones were encoded again. `lag` is the number of offsets that are
    not mirrored yet, as of the last look. `lost` offsets were deleted at the source before they were mirrored.
    `restarts` were made after failures.
    """

    partitions: int = 0
    records: int = 0
    bytes: int = 0
    copied: int = 0
    rebuilt: int = 0
    lag: int | None = None
    lost: int = 0
    groups: int = 0
    restarts: int = 0


def _find_bounds(
    cluster: Cluster, keys: Collection[TopicPartition], *, waits: bool
) -> dict[TopicPartition, tuple[int, int]]:
    """The first offsets and the ends of partitions, whose leaders are those in the last metadata.

    Without `waits`, a partition whose leader is missing or does not answer now is left out; else the call retries until
    default.api.timeout.ms, and raises what `list_offsets` raises.
    """
    if waits:
        starts = list_offsets(cluster, dict.fromkeys(keys, EARLIEST))
        ends = list_offsets(cluster, dict.fromkeys(keys, LATEST))
    else:
        with cluster.within(_LOOK_MS):
            starts, _ = offsets_of_led(cluster, dict.fromkeys(keys, EARLIEST))
            ends, _ = offsets_of_led(cluster, dict.fromkeys(starts, LATEST))
    return {key: (starts[key], end) for key, end in ends.items()}


class Waiting:
    """Batches by partition, in order. Partitions take turns, so that a Produce request carries batches of many."""

    def __init__(self) -> None:
        self._items: dict[TopicPartition, deque[OutBatch | int]] = {}
        #: Bytes of all batches.
        self.size = 0

    def __bool__(self) -> bool:
        return bool(self._items)

    def append(self, key: TopicPartition, entry: OutBatch | int) -> None:
        """Add a batch, or the source's offset before which nothing more is to be copied."""
        self._items.setdefault(key, deque()).append(entry)
        self.size += _size(entry)

    @property
    def next_size(self) -> int:
        """Bytes of what `pop_next` returns; 0 if nothing waits."""
        return next((_size(items[0]) for items in self._items.values()), 0)

    def pop_next(self) -> tuple[TopicPartition, OutBatch | int]:
        """The next item of the partition whose turn it is."""
        key = next(iter(self._items))
        items = self._items.pop(key)
        entry = items.popleft()
        self.size -= _size(entry)
        if items:
            self._items[key] = items
        return key, entry


def _size(entry: OutBatch | int) -> int:
    return 0 if isinstance(entry, int) else len(entry.data)


def _remedy(topic: str, *, is_empty: bool = False) -> str:
    """What to do if the source's log or the copy is another one now. `is_empty`: the copy has never had a record."""
    copying = "Have it copied again" if is_empty else "Delete its copy, and have it copied again"
    return f"{copying} (--copy-again {topic}), or exclude the topic (--exclude)"


class _Noted(NamedTuple):
    """Records that were sent: when they are confirmed, the partition is mirrored up to `following`."""

    receipt: Receipt | None
    spans: Sequence[Span]
    following: int


class Session:
    """Use it as a context; `run` mirrors until it is told to stop."""

    def __init__(
        self, settings: MirrorSettings, slot: int, slots: int | None, ownership: Ownership, totals: Totals
    ) -> None:
        self._settings, self._slot, self._ownership, self.totals = settings, slot, ownership, totals
        self._stack = ExitStack()
        try:
            self._source_admin = self._stack.enter_context(Admin(settings.source_admin()))
            self._target_admin = self._stack.enter_context(Admin(settings.target_client()))
            check_clusters(settings, self._source_admin, self._target_admin)
            self._name = name = mirror_name(settings, self._source_admin)
            self._slots = prepare_progress(self._target_admin, name, slots)
            self.target = Target(settings, name, slot)
            self._stack.callback(self.target.close)
            self._reader = ProgressReader(settings.target_client(), self._target_admin, progress_topic(name), slot)
            self._stack.callback(self._reader.close)
            self._reader.load().check_prefix(name, settings.prefix)
            #: Its maps are of all partitions that the topic knows, those that are assigned among them.
            self._progress = ownership.claim(name, self._reader, self.target)
            self._maps = self._progress.maps
            self._consumer = self._stack.enter_context(Consumer(settings.source_consumer()))
        except BaseException:
            self._stack.close()
            raise
        self._topics = MirroredTopics(settings, self._source_admin, self._target_admin)
        self._stack.callback(self._topics.origins.close)
        self._groups = GroupTranslation(settings, self._source_admin, self._target_admin)
        self._limit = self._source_admin.cluster.config.decompressed_max_bytes
        self._assigned: list[TopicPartition] = []
        #: The source's offset after what was sent, by partition.
        self._positions: dict[TopicPartition, int] = {}
        #: With `until_end` the source's ends, up to which is mirrored.
        self._until: dict[TopicPartition, int] = {}
        #: The source's ends at the last look.
        self._seen_ends: dict[TopicPartition, int] = {}
        self._look: PendingRequest[tuple[dict[TopicPartition, int], dict[TopicPartition, KlogError], bool]]
        self._look = PendingRequest()
        self._stack.callback(self._look.close)
        #: When the leaders that do not answer are told of again; None if all do.
        self._silence: Lasting | None = None
        self._spans = RangeSpans(self._source_admin.cluster)
        #: Where partitions were, how many records were copied, and the time in ns at the last span.
        self._starts: dict[TopicPartition, int] = {}
        self._records_before, self._span_at = totals.records, time.time_ns()
        self._waiting = Waiting()
        self._noted: dict[TopicPartition, deque[_Noted]] = {}
        self._noted_count = 0
        self._commit_at = self._refresh_at = self._groups_at = self._lag_at = self._look_at = 0.0
        self._is_first = self._progress.prefix is None and not self._maps
        #: Whether topics and partitions that appear are left out: the mirror stops at the ends that it has seen.
        self._is_closed = False
        #: Whether to wait for the leaders of new partitions.
        self._must_find = False
        #: New partitions whose leaders have not answered.
        self._left_out: set[TopicPartition] = set()
        #: Those of them that have answered the last look at the source's ends.
        self._answering: set[TopicPartition] = set()
        self._has_warned = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        try:
            if isinstance(error, DataLossError) and not self.target.is_transactional:
                self._ownership.release(self.target)
            self._trace(error)
        finally:
            self._stack.close()

    def run(self, is_stopped: Callable[[], bool], on_progress: Callable[[Totals], None], *, until_end: bool) -> None:
        """Mirror until `is_stopped`, with `until_end` until the offsets that the source has now; commit at the end.

        `on_progress` is called after each commit, at least once a second.
        """
        # a partition that is left out could be missed by --until-end, and --start latest would copy what it has now
        self._must_find = until_end or (self._is_first and self._settings.start == "latest")
        self._follow()
        if until_end:
            self._until = self._ends(self._assigned)
            self._is_closed = True
        self._must_find = until_end
        while not is_stopped():
            now = time.monotonic()
            if now >= self._refresh_at:
                self._follow()
            if now >= self._lag_at:
                self._look_at_lag()
            if now >= self._look_at:
                self._check_owner()
            self._step()
            if time.monotonic() >= self._commit_at or self._noted_count >= _MOST_NOTED:
                self._commit()
                on_progress(self.totals)
            if until_end and all(self._positions[key] >= end for key, end in self._until.items()):
                break
            if time.monotonic() >= self._groups_at and not until_end:
                self._translate()
        self._finish()
        self._translate()
        self._look.close()
        with self._source_admin.cluster.within(_LOOK_MS):
            self._take_ends(*run(self._asking_ends()))
        on_progress(self.totals)

    def _finish(self) -> None:
        self.target.sender.flush()
        self._commit()
        self.target.commit()
        self._ownership.release(self.target)

    def _check_owner(self) -> None:
        """Leave the mirror to another process that has begun, which waits for the last commit."""
        try:
            self._ownership.check(self._name, self._reader)
        except MirrorFenced:
            self._finish()
            raise
        self._look_at = time.monotonic() + LOOK_SECONDS

    def _follow(self) -> None:
        """Take in new topics and partitions, and let go of those that were deleted."""
        there = self._topics.refresh(_GONE_SECONDS if self._is_closed else 0.0)
        assigned = [key for key in there if slot_of(key, self._slots) == self._slot]
        if self._is_closed:
            assigned = [key for key in assigned if key in self._positions]
        self._refresh_at = time.monotonic() + self._settings.refresh_seconds
        self._check_copies(assigned)
        recreated = self._recreated({topic for topic, _ in assigned})
        new = [key for key in assigned if key not in self._positions or key[0] in recreated]
        silent = set() if self._must_find else self._left_out - self._answering
        bounds = _find_bounds(self._source_admin.cluster, set(new) - silent, waits=self._must_find)
        self._leave_out({key for key in new if key not in bounds})
        assigned = [key for key in assigned if key not in self._left_out]
        new = list(bounds)
        gone = set(self._assigned).difference(assigned)
        if new or gone:
            self._drain()
            self.target.sender.flush()
            self._commit()
        for topic in recreated:
            _log.warning(
                "%s was created again at the source: it is mirrored from its beginning, behind its copy", topic
            )
            self._progress.forget(topic)
            for key in [key for key in self._noted if key[0] == topic]:
                del self._noted[key]  # `_commit` has taken all of it
        if deleted := gone - self._left_out:
            _log.warning("not at the source any more, the copies stay: %s", some_partitions(deleted))
        for key in gone:
            del self._positions[key]
        if new or gone:
            self._begin(bounds)
            self._assigned = assigned
            self._consumer.assign([(*key, self._positions[key]) if key in bounds else key for key in assigned])
            self._consumer.expect(self._topics.ids)
            self._until = {key: end for key, end in self._until.items() if key not in gone}
            self._until |= self._ends(key for key in new if key in self._until)
        if new or gone or self._is_first:
            self._note_beginnings()
        self._is_first = False
        self.totals.partitions = len(assigned)
        if not assigned and self._slots == 1 and not self._has_warned:
            self._has_warned = True
            _log.warning("the source has no topic to mirror: see --topics and --exclude")

    def _check_copies(self, keys: Sequence[TopicPartition]) -> None:
        """Raise `DataLossError` if a copy is another topic than at the last look, or ends before what was mirrored.

        What was mirrored of a topic is forgotten if it is to be copied again, and its copy has never had a record.
        """
        known, now = self._progress.copy_ids, self._topics.copy_ids
        again = self._settings.copy_again
        new = [key for key in keys if key not in self._positions and (key in self._maps or key[0] in again)]
        ends = self._ends_of_copies(new)
        for topic in sorted(again & {topic for topic, _ in new}):
            if any(end for key, end in ends.items() if key[0] == topic):  # retention may have emptied it since
                _log.warning("%s is not copied again: its copy has, or had, records; delete it first", topic)
            elif any(key[0] == topic for key in self._maps):
                _log.warning("%s is copied again from its beginning", topic)
                self._progress.forget(topic)
                self._progress.topic_ids.pop(topic, None)
                self._progress.copy_ids.pop(topic, None)
                self.target.send_progress([topic_record(topic, None)])
                self.target.commit()
        for topic in sorted({topic for topic, _ in keys} & known.keys() & now.keys()):
            if known[topic] != now[topic]:
                raise DataLossError(
                    f"the copy of topic {topic} was deleted at the target, and created again: what was mirrored is not "
                    f"in it. {self._remedy_of_copy(topic, keys)}"
                )
        for key, end in ends.items():
            if key in self._maps and end < self._maps[key].downstream:
                raise DataLossError(
                    f"the copy of {key[0]}-{key[1]} ends at offset {end} at the target, but was written up to "
                    f"{self._maps[key].downstream}: it was created again or truncated. "
                    f"{self._remedy_of_copy(key[0], keys)}"
                )

    def _ends_of_copies(self, keys: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        copies = {(self._settings.prefix + topic, part): (topic, part) for topic, part in keys}
        ends = high_watermarks(self._target_admin.cluster, copies) if copies else {}
        return {copies[key]: end for key, end in ends.items()}

    def _remedy_of_copy(self, topic: str, keys: Sequence[TopicPartition]) -> str:
        ends = self._ends_of_copies(key for key in keys if key[0] == topic)
        return _remedy(topic, is_empty=not any(ends.values()))

    def _recreated(self, topics: Set[str]) -> list[str]:
        """The topics that were deleted and created again; `DataLossError` unless the new ones are to be mirrored."""
        ids, known = self._topics.ids, self._progress.topic_ids
        recreated = sorted(topic for topic in topics & known.keys() & ids.keys() if known[topic] != ids[topic])
        if recreated and self._settings.recreated == "fail":
            raise DataLossError(
                f"topic {recreated[0]} was deleted and created again at the source: what was mirrored is of another "
                f"topic. {_remedy(recreated[0])}, or mirror the new one behind the copy of the old one "
                "(--recreated begin)"
            )
        return recreated

    def _note_beginnings(self) -> None:
        """Write the ids of new topics, the prefix, and where new partitions begin, before any of their records."""
        ids = {topic: self._topics.ids.get(topic) for topic, _ in self._assigned}
        new = {
            topic: uuid
            for topic, uuid in ids.items()
            if uuid is not None and uuid != self._progress.topic_ids.get(topic)
        }
        for key, known in self._maps.items():
            if key[0] in new:
                known.write_again()  # behind the record of the id, which ends what came before
        copies = {topic: self._topics.copy_ids[topic] for topic in ids.keys() & self._topics.copy_ids.keys()}
        rows = [topic_record(topic, uuid) for topic, uuid in new.items()]
        before = self._progress.copy_ids
        rows += [topic_record(topic, uuid, COPY) for topic, uuid in copies.items() if before.get(topic) != uuid]
        rows += self._changes()
        origins = dict(self._topics.origins.of_copies)
        if origins != self._progress.origins:
            rows.append(note_record(ORIGINS, json.dumps(origins)))
        if self._progress.prefix is None:
            rows.append(note_record(PREFIX, self._settings.prefix))
        if not rows:
            return
        self.target.send_progress(rows)
        self.target.commit()
        self._progress.topic_ids |= new
        self._progress.copy_ids |= copies
        self._progress.origins = origins
        self._progress.prefix = self._settings.prefix

    def _changes(self) -> list[tuple[bytes, bytes]]:
        """Records of the runs that have changed; partitions that are gone, too: this transaction may have theirs."""
        return [encode_run(key, run) for key, known in self._maps.items() for run in known.take_changes()]

    def _leave_out(self, keys: set[TopicPartition]) -> None:
        """Leave out partitions whose leaders do not answer, until the look beside the copying finds one that does."""
        if new := keys - self._left_out:
            _log.warning("no leader answers, mirrored as soon as one does: %s", some_partitions(new))
        self._left_out = keys

    def _begin(self, bounds: Mapping[TopicPartition, tuple[int, int]]) -> None:
        """Find where to begin with new partitions."""
        for key, (start, end) in bounds.items():
            known = self._maps.setdefault(key, PartitionMap())
            position = known.position
            if position is None:
                begins_late = self._is_first and self._settings.start == "latest"
                position = end if begins_late else start
                known.moved(position)
            elif position < start:
                self._lose(key, position, start)
                position = start
                known.moved(position)
            elif position > end:
                self._check_end(key, position)
            self._positions[key] = position

    def _check_end(self, key: TopicPartition, position: int) -> None:
        """Raise `DataLossError` if the log ends before a position; with read_committed its bounds end earlier."""
        end = high_watermarks(self._source_admin.cluster, [key])[key]
        if position > end:
            self._topics.check_id(key[0])
            raise DataLossError(
                f"{key[0]}-{key[1]} ends at offset {end} at the source, but was mirrored up to {position}: "
                f"it was created again or truncated. {_remedy(key[0])}"
            )

    def _lose(self, key: TopicPartition, position: int, start: int) -> None:
        _log.warning(
            "%s-%d: offsets %d to %d were deleted at the source before they were mirrored", *key, position, start - 1
        )
        self.totals.lost += start - position

    def _step(self) -> None:
        """Take what the source has sent, and let the target work."""
        self._queue()
        seconds, connections = self.target.sender.step()
        is_idle = self.target.sender.is_idle
        left = max(0.0, self._commit_at - time.monotonic()) if self._commit_at else 0.0
        if not self._assigned:
            time.sleep(min(left, _LONG))
            return
        chunk = None
        try:
            if self._waiting.size < _MOST_WAITING:
                may_wait = is_idle and not self._waiting
                chunk = self._consumer.poll_chunk(min(left, _LONG) if may_wait else 0.0)
        except OffsetOutOfRange as error:
            self._out_of_range(error)
            return
        except TopicRecreated:
            self._drain()
            self._follow()
            return
        except LogTruncated as error:
            raise DataLossError(f"{error.what}. {_remedy(error.topic)}") from None
        except ProtocolError as error:
            before = {topic for topic, _ in self._assigned}
            if error.code in UNKNOWN_TOPIC:
                self._follow()
            if error.code not in UNKNOWN_TOPIC or not before & self._topics.missing:
                raise
            return
        if chunk is not None:
            key = chunk.topic, chunk.partition
            for batch in out_batches(chunk, self._limit):
                self._waiting.append(key, batch)
            self._waiting.append(key, chunk.next_offset)
        elif not is_idle:
            wait_until_ready(connections, min(seconds, _SHORT))

    def _out_of_range(self, error: OffsetOutOfRange) -> None:
        """Go on at the log's start if retention has overtaken the mirror."""
        self._drain()
        key = error.topic, error.partition
        start = error.available[0]
        if self._positions.get(key, start) >= start:
            raise error
        self._lose(key, self._positions[key], start)
        self._note(key, _Noted(None, (), start))
        self._consumer.seek(*key, start)

    def _drain(self) -> None:
        """Copy all that was fetched, and note it."""
        while self._waiting:
            self._queue()
            self.target.sender.flush()
            self._commit()

    def _queue(self) -> None:
        """Queue batches for the target, as many as it takes without waiting."""
        totals, has_room = self.totals, self.target.sender.has_room
        while self._waiting and self._noted_count < _MOST_NOTED and has_room(self._waiting.next_size):
            key, batch = self._waiting.pop_next()
            if isinstance(batch, int):
                self._note(key, _Noted(None, (), batch))
                continue
            totals.records += batch.count
            totals.bytes += len(batch.data)
            totals.copied += batch.is_copied
            totals.rebuilt += not batch.is_copied
            self._note(key, _Noted(self.target.send(key, batch), batch.spans, batch.following))

    def _note(self, key: TopicPartition, noted: _Noted) -> None:
        self._noted.setdefault(key, deque()).append(noted)
        self._noted_count += 1
        self._starts.setdefault(key, self._positions[key])
        self._positions[key] = noted.following

    def _commit(self) -> None:
        """Write the runs of all records that are confirmed; with exactly-once wait for all, and end the transaction."""
        if self.target.is_transactional or self._noted_count >= _MOST_NOTED:
            self.target.sender.flush()
        for key, noted in self._noted.items():
            self._note_confirmed(key, noted)
        if changes := self._changes():
            self.target.send_progress(changes)
        if self.target.is_transactional:
            self.target.commit()
        self._trace()
        self._commit_at = time.monotonic() + self._settings.commit_seconds

    def _trace(self, error: BaseException | None = None) -> None:
        """Make a span of what was copied since the last commit, up to this one or an error."""
        ranges = {key: (start, self._positions.get(key, start)) for key, start in self._starts.items()}
        self._spans.processed(ranges, self.totals.records - self._records_before, self._span_at, error=error)
        self._starts.clear()
        self._records_before, self._span_at = self.totals.records, time.time_ns()

    def _note_confirmed(self, key: TopicPartition, noted: deque[_Noted]) -> None:
        known = self._maps[key]
        while noted and (noted[0].receipt is None or noted[0].receipt.done.is_set()):
            receipt, spans, following = noted.popleft()
            self._noted_count -= 1
            if receipt is not None and receipt.base_offset >= 0:
                if receipt.base_offset < known.downstream:
                    raise DataLossError(
                        f"the copy of {key[0]}-{key[1]} was deleted at the target while it was written: its offset "
                        f"{receipt.base_offset} comes after {known.downstream}. {_remedy(key[0])}"
                    )
                for span in spans:
                    known.copied(span.first, span.count, receipt.base_offset + span.place)
            known.moved(following)

    def _ends(self, keys: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return list_offsets(self._source_admin.cluster, dict.fromkeys(keys, LATEST))

    def _look_at_lag(self) -> None:
        """Go on with the look at the source's ends, beside the copying: a silent leader must not hold it up."""
        self._lag_at = time.monotonic() + _SHORT
        with self._source_admin.cluster.within(_LOOK_MS):
            ends = self._look.step(self._asking_ends)
        if ends is not None:
            self._take_ends(*ends)

    def _asking_ends(self) -> Steps[tuple[dict[TopicPartition, int], dict[TopicPartition, KlogError], bool]]:
        """The ends at the leaders that answer now, the errors of others, and whether a topic is not known any more.

        Each leader is asked once: a topic that is deleted just now must not hold up the others.
        """
        cluster = self._source_admin.cluster
        keys = {*self._assigned, *self._left_out}
        latest, failed = yield from asking_offsets_of_led(cluster, dict.fromkeys(keys, LATEST))
        names = {topic for topic, _ in failed}
        known = (yield from cluster.asking_metadata(names)) if names else {}  # with the leaders to ask the next time
        is_gone = any(name not in known or known[name]["error_code"] in UNKNOWN_TOPIC for name in names)
        return latest, failed, is_gone

    def _take_ends(
        self, latest: Mapping[TopicPartition, int], failed: Mapping[TopicPartition, KlogError], is_gone: bool
    ) -> None:
        """Note the ends, and what did not answer; look for topics soon if one is gone, or has a leader again."""
        self._answering = self._left_out & latest.keys()
        if is_gone or self._answering:
            self._refresh_at = 0.0
        self._seen_ends |= latest
        ends = {key: self._seen_ends.get(key, 0) for key in self._assigned}
        self.totals.lag = sum(max(0, end - self._positions[key]) for key, end in ends.items())
        now = time.monotonic()
        self._lag_at = now + _LAG_SECONDS
        silent = {
            key: error
            for key, error in failed.items()
            if isinstance(error, RequestTimedOut) and key not in self._left_out
        }
        if not silent:
            if self._silence is not None:
                _log.warning("all leaders of the source answer again")
            self._silence = None
            return
        if self._silence is None:
            self._silence = Lasting(now, _LAG_SECONDS, _LAST_PAUSE)
        if self._silence.is_due(now):
            reasons = some_of(sorted({str(error) for error in silent.values()}))
            _log.warning(
                "%d partitions of the source have a silent leader (%s): %s",
                len(silent),
                reasons,
                some_partitions(silent),
            )

    def _translate(self) -> None:
        """Translate groups, up to what is committed at the target."""
        self.totals.groups = self._groups.translate({key: self._maps[key] for key in self._assigned})
        self._groups_at = time.monotonic() + self._settings.group_seconds


class Mirror:
    """Copies topics of one cluster into another, with the same partitions and the same order.

        settings = MirrorSettings({"bootstrap.servers": "a:9092"}, {"bootstrap.servers": "b:9092"}, exactly_once=True)
        totals = Mirror(settings).run(until_end=True)

    Record batches are copied as they are where both sides allow it (see batches.py). Progress is kept at the target
    (see progress.py): a mirror that was stopped or killed goes on where it was. With exactly-once each record is
    written once; otherwise what was not noted yet is written again after a crash.

    A mirror of several tasks gives each a `slot` of `slots`, which has its own share of the partitions.
    """

    def __init__(self, settings: MirrorSettings, *, slot: int = 0, slots: int | None = 1) -> None:
        self._settings, self._slot, self._slots = settings, slot, slots
        self._stopped = threading.Event()
        self._ownership = Ownership(settings)
        self.totals = Totals()

    def stop(self) -> None:
        """Make `run` commit and return; any thread or signal handler may call it."""
        self._stopped.set()

    def run(self, *, until_end: bool = False, on_progress: Callable[[Totals], None] = lambda _: None) -> Totals:
        """Mirror until `stop` is called, or with `until_end` until the offsets that the source has at the beginning.

        Failures that may pass are retried from the last commit, with pauses of up to 30 s; before the first session has
        begun, and with `until_end`, three times in a row. So is a transaction that the target has aborted because it
        lasted too long. Raises `ConfigError`, `MirrorFenced` if another mirror of this name has begun since, or
        `ProducerFenced` if both run with exactly-once, `DataLossError` if the source's log is another one now (see
        `MirrorSettings.recreated`), or the copy is (`MirrorSettings.copy_again`), `DecodeError` for corrupt batches,
        `AuthenticationError`, and any `ProtocolError` that can't be retried.
        """
        failures, has_begun = 0, False
        while not self._stopped.is_set():
            before, session = self.totals.records, None
            try:
                with Session(self._settings, self._slot, self._slots, self._ownership, self.totals) as session:
                    has_begun = True
                    session.run(self._stopped.is_set, on_progress, until_end=until_end)
                break
            except KlogError as error:
                failures = 1 if self.totals.records > before else failures + 1
                # A broker that aborts a transaction for its age fences the producer, although there is no other one.
                is_expired = session is not None and session.target.has_expired
                is_abort = isinstance(error, ProducerFenced) or getattr(error, "code", None) in NEVER_COMMITTED
                is_lasting = (until_end or not has_begun) and failures >= _MOST_FAILURES
                if is_lasting or not (is_retriable(error) or (is_expired and is_abort)):
                    raise
                pause = doubled(_FIRST_PAUSE, _LAST_PAUSE, failures)
                _log.warning("the mirror begins again in %.1f s: %s", pause, error)
                self.totals.restarts += 1
                self._stopped.wait(pause)
        return self.totals
