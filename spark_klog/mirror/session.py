"""One run of a mirror between two failures: clients of both sides, and the loop that copies.

The loop fetches batches from the source and queues them for the target, a batch of each partition in turn, so that a
Produce request carries those of many; the next fetch comes in meanwhile. It notes where each was written when the
target has confirmed it. Every `commit_seconds` it writes the runs of offsets of what is confirmed:

    without exactly-once    after the records: what was confirmed since is copied again after a crash
    with exactly-once       in their transaction, which ends then

Memory: one fetch response a broker of the source, `_MOST_WAITING` and max.partition.fetch.bytes of batches that wait
for their turn, and buffer.memory of the target.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from typing import NamedTuple

from spark_klog.client import Admin, Consumer
from spark_klog.client.cluster import UNKNOWN_TOPIC, TopicPartition
from spark_klog.client.consumer.decoding.chunk import Chunk
from spark_klog.client.delivery.receipts import Receipt
from spark_klog.client.network.readiness import wait_until_ready
from spark_klog.client.offsets import high_watermarks, list_offsets
from spark_klog.errors import (
    DataLossError,
    LogTruncated,
    MirrorFenced,
    OffsetOutOfRange,
    ProtocolError,
    TopicRecreated,
)
from spark_klog.mirror.batches import Span, out_batches
from spark_klog.mirror.beginnings import copy_record, origins_record, prefix_record, topic_record
from spark_klog.mirror.bounds import Bounds, ends_now, find_bounds
from spark_klog.mirror.clusters import check_clusters, mirror_name
from spark_klog.mirror.groups import GroupTranslation
from spark_klog.mirror.offset_map import PartitionMap, encode_run
from spark_klog.mirror.ownership import LOOK_SECONDS, Ownership
from spark_klog.mirror.progress import ProgressReader, prepare_progress, progress_topic, slot_of
from spark_klog.mirror.settings import MirrorSettings
from spark_klog.mirror.target import Target
from spark_klog.mirror.topics import MirroredTopics
from spark_klog.mirror.totals import Totals
from spark_klog.mirror.waiting import Waiting
from spark_klog.protocol.tables.list_offsets import LATEST

_log = logging.getLogger(__name__)
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


def _remedy(topic: str) -> str:
    """What to do if the source's log or the copy is another one now."""
    return f"Delete its copy, and have it copied again (--copy-again {topic}), or exclude the topic (--exclude)"


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
            self._target_admin = self._stack.enter_context(Admin(settings.target_admin()))
            check_clusters(settings, self._source_admin, self._target_admin)
            self._name = name = mirror_name(settings, self._source_admin)
            self._slots = prepare_progress(self._target_admin, name, slots)
            self._target = Target(settings, name, slot)
            self._stack.callback(self._target.close)
            self._reader = self._stack.enter_context(
                ProgressReader(settings.target_admin(), self._target_admin, progress_topic(name), slot)
            )
            self._reader.load().check_prefix(name, settings.prefix)
            #: Its maps are of all partitions that the topic knows, those that are assigned among them.
            self._progress = ownership.claim(name, self._reader, self._target)
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
        self._waiting = Waiting()
        self._noted: dict[TopicPartition, deque[_Noted]] = {}
        self._noted_count = 0
        self._commit_at = self._refresh_at = self._groups_at = self._lag_at = self._look_at = 0.0
        self._is_first = self._progress.is_new
        #: Whether topics and partitions that appear are left out: the mirror stops at the ends that it has seen.
        self._is_closed = False
        #: Whether to wait for the leaders of new partitions.
        self._must_find = False
        #: New partitions whose leaders have not answered.
        self._left_out: set[TopicPartition] = set()
        self._has_warned = False

    @property
    def has_expired(self) -> bool:
        """Whether the target may have aborted the open transaction because it lasted too long."""
        return self._target.has_expired

    def __enter__(self) -> Session:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        try:
            if isinstance(error, DataLossError) and not self._target.is_transactional:
                self._ownership.release(self._target)
        finally:
            self._stack.close()
        if (fenced := self._target.fenced(error)) is not None:
            raise fenced from error

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
        self._look_at_lag()
        on_progress(self.totals)

    def _finish(self) -> None:
        self._target.flush()
        self._commit()
        self._target.commit()
        self._ownership.release(self._target)

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
        found = [key for key in there if slot_of(key, self._slots) == self._slot]
        if self._is_closed:
            found = [key for key in found if key in self._positions]
        self._refresh_at = time.monotonic() + self._settings.refresh_seconds
        self._check_copies(found)
        recreated = self._recreated({topic for topic, _ in found})
        new = [key for key in found if key not in self._positions or key[0] in recreated]
        bounds = find_bounds(self._source_admin.cluster, new, waits=self._must_find)
        self._leave_out({key for key in new if key not in bounds})
        found = [key for key in found if key not in self._left_out]
        new = list(bounds)
        gone = set(self._assigned).difference(found)
        if new or gone:
            self._drain()
            self._target.flush()
            self._commit()
        for topic in recreated:
            _log.warning(
                "%s was created again at the source: it is mirrored from its beginning, behind its copy", topic
            )
            self._progress.forget(topic)
            for key in [key for key in self._noted if key[0] == topic]:
                del self._noted[key]  # `_commit` has taken all of it
        for key in sorted(gone):
            if key not in self._left_out:
                _log.warning("%s-%d is not at the source any more; its copy stays", *key)
            del self._positions[key]
        if new or gone:
            self._begin(bounds)
            self._assigned = found
            self._consumer.assign([(*key, self._positions[key]) if key in new else key for key in found])
            self._consumer.expect(self._topics.ids)
            self._until = {key: end for key, end in self._until.items() if key not in gone}
            self._until |= self._ends(key for key in new if key in self._until)
        if new or gone or self._is_first:
            self._note_beginnings()
        self._is_first = False
        self.totals.partitions = len(found)
        if not found and self._slots == 1 and not self._has_warned:
            self._has_warned = True
            _log.warning("the source has no topic to mirror: see --topics and --exclude")

    def _check_copies(self, keys: Sequence[TopicPartition]) -> None:
        """Raise `DataLossError` if a copy is another topic than at the last look, or ends before what was mirrored.

        What was mirrored of a topic is forgotten if it is to be copied again, and its copy has never had a record.
        """
        known, now = self._progress.copy_ids, self._topics.copy_ids
        again = self._settings.copy_again
        new = [key for key in keys if key not in self._positions and (key in self._maps or key[0] in again)]
        copies = {(self._settings.prefix + topic, part): (topic, part) for topic, part in new}
        cluster = self._target_admin.cluster
        ends = {copies[key]: end for key, end in high_watermarks(cluster, copies).items()} if copies else {}
        for topic in sorted(again & {topic for topic, _ in new}):
            if any(end for key, end in ends.items() if key[0] == topic):  # retention may have emptied it since
                _log.warning("%s is not copied again: its copy has, or had, records; delete it first", topic)
            else:
                self._copy_again(topic)
        for topic in sorted({topic for topic, _ in keys} & known.keys() & now.keys()):
            if known[topic] != now[topic]:
                raise DataLossError(
                    f"the copy of topic {topic} was deleted at the target, and created again: what was mirrored is not "
                    f"in it. {_remedy(topic)}"
                )
        for key, end in ends.items():
            if key in self._maps and end < self._maps[key].downstream:
                raise DataLossError(
                    f"the copy of {key[0]}-{key[1]} ends at offset {end} at the target, but was written up to "
                    f"{self._maps[key].downstream}: it was created again or truncated. {_remedy(key[0])}"
                )

    def _copy_again(self, topic: str) -> None:
        if any(key[0] == topic for key in self._maps):
            _log.warning("%s is copied again from its beginning", topic)
            self._progress.forget(topic)
            self._progress.topic_ids.pop(topic, None)
            self._progress.copy_ids.pop(topic, None)
            self._target.send_progress([topic_record(topic, None)])
            self._target.commit()

    def _recreated(self, topics: Set[str]) -> list[str]:
        """The topics that were deleted and created again; `DataLossError` unless the new ones are to be mirrored."""
        ids, known = self._topics.ids, self._progress.topic_ids
        found = sorted(topic for topic in topics & known.keys() & ids.keys() if known[topic] != ids[topic])
        if found and self._settings.recreated == "fail":
            raise DataLossError(
                f"topic {found[0]} was deleted and created again at the source: what was mirrored is of another topic. "
                f"{_remedy(found[0])}, or mirror the new one behind the copy of the old one (--recreated begin)"
            )
        return found

    def _note_beginnings(self) -> None:
        """Write the ids of new topics, the prefix, and where new partitions begin, before any of their records."""
        ids = {topic: self._topics.ids.get(topic) for topic, _ in self._assigned}
        new = {
            topic: one for topic, one in ids.items() if one is not None and one != self._progress.topic_ids.get(topic)
        }
        for key, known in self._maps.items():
            if key[0] in new:
                known.write_again()  # behind the record of the id, which ends what came before
        copies = {topic: self._topics.copy_ids[topic] for topic in ids.keys() & self._topics.copy_ids.keys()}
        rows = [topic_record(topic, one) for topic, one in new.items()]
        rows += [copy_record(*one) for one in copies.items() if self._progress.copy_ids.get(one[0]) != one[1]]
        rows += self._changes()
        origins = dict(self._topics.origins.of_copies)
        if origins != self._progress.origins:
            rows.append(origins_record(origins))
        if self._progress.prefix is None:
            rows.append(prefix_record(self._settings.prefix))
        if not rows:
            return
        self._target.send_progress(rows)
        self._target.commit()
        self._progress.topic_ids |= new
        self._progress.copy_ids |= copies
        self._progress.origins = origins
        self._progress.prefix = self._settings.prefix

    def _changes(self) -> list[tuple[bytes, bytes]]:
        """Records of the runs that have changed; partitions that are gone, too: this transaction may have theirs."""
        return [encode_run(key, run) for key, known in self._maps.items() for run in known.take_changes()]

    def _leave_out(self, keys: set[TopicPartition]) -> None:
        """Look again soon for partitions whose leaders do not answer: they must not hold up the others."""
        for key in sorted(keys - self._left_out):
            _log.warning("%s-%d has no leader that answers: it is mirrored as soon as it has one", *key)
        self._left_out = keys
        if keys:
            self._refresh_at = time.monotonic() + _LAG_SECONDS

    def _begin(self, bounds: Mapping[TopicPartition, Bounds]) -> None:
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
        seconds, connections = self._target.step()
        is_idle = self._target.is_idle
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
            self._take(chunk)
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
            self._target.flush()
            self._commit()

    def _take(self, chunk: Chunk) -> None:
        key = chunk.topic, chunk.partition
        for batch in out_batches(chunk, self._limit):
            self._waiting.add(key, batch)
        self._waiting.add(key, chunk.following)

    def _queue(self) -> None:
        """Queue batches for the target, as many as it takes without waiting."""
        totals = self.totals
        while self._noted_count < _MOST_NOTED and self._target.has_room(self._waiting.next_size):
            taken = self._waiting.take()
            if taken is None:
                return
            key, batch = taken
            if isinstance(batch, int):
                self._note(key, _Noted(None, (), batch))
                continue
            totals.records += batch.count
            totals.bytes += len(batch.data)
            totals.copied += batch.is_copied
            totals.rebuilt += not batch.is_copied
            self._note(key, _Noted(self._target.send(key, batch), batch.spans, batch.following))

    def _note(self, key: TopicPartition, noted: _Noted) -> None:
        self._noted.setdefault(key, deque()).append(noted)
        self._noted_count += 1
        self._positions[key] = noted.following

    def _commit(self) -> None:
        """Write the runs of all records that are confirmed; with exactly-once wait for all, and end the transaction."""
        if self._target.is_transactional or self._noted_count >= _MOST_NOTED:
            self._target.flush()
        for key, noted in self._noted.items():
            self._take_confirmed(key, noted)
        if changes := self._changes():
            self._target.send_progress(changes)
        if self._target.is_transactional:
            self._target.commit()
        self._commit_at = time.monotonic() + self._settings.commit_seconds

    def _take_confirmed(self, key: TopicPartition, noted: deque[_Noted]) -> None:
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
        """Ask for the source's ends, and look for topics if one is not known there any more."""
        found, has_unknown = ends_now(self._source_admin.cluster, self._assigned)
        if has_unknown:
            self._refresh_at = 0.0
        self._seen_ends |= found
        ends = {key: self._seen_ends.get(key, 0) for key in self._assigned}
        self.totals.lag = sum(max(0, end - self._positions[key]) for key, end in ends.items())
        self._lag_at = time.monotonic() + _LAG_SECONDS

    def _translate(self) -> None:
        """Translate groups, up to what is committed at the target."""
        if self._settings.groups is not None:
            self.totals.groups = self._groups.translate({key: self._maps[key] for key in self._assigned})
        self._groups_at = time.monotonic() + self._settings.group_seconds
