"""One run of a mirror between two failures: clients of both sides, and the loop that copies.

The loop fetches batches from the source, queues them for the target, and notes where each was written when the target
has confirmed it. Every `commit_seconds` it writes the runs of offsets of what is confirmed:

    without exactly-once    after the records: what was confirmed since is copied again after a crash
    with exactly-once       in their transaction, which ends then

Memory: one fetch response a broker of the source, and buffer.memory of the target.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from spark_klog.client import Admin, Consumer
from spark_klog.client.cluster import TopicPartition
from spark_klog.client.connection import wait_until_ready
from spark_klog.client.consumer.chunk import Chunk
from spark_klog.client.delivery.receipts import Receipt
from spark_klog.client.offsets import list_offsets
from spark_klog.errors import ConfigError, DataLossError, LogTruncated, OffsetOutOfRange
from spark_klog.mirror.batches import Span, out_batches
from spark_klog.mirror.groups import GroupTranslation
from spark_klog.mirror.offset_map import PartitionMap
from spark_klog.mirror.progress import load_progress, prepare_progress, slot_of
from spark_klog.mirror.settings import MirrorSettings, check_name
from spark_klog.mirror.target import Target
from spark_klog.mirror.topics import MirroredTopics
from spark_klog.mirror.totals import Totals
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST

_log = logging.getLogger(__name__)
#: Seconds that the loop waits for one side while the other may have work.
_SHORT, _LONG = 0.02, 0.5
#: Seconds between two looks at the source's ends.
_LAG_SECONDS = 2.0
#: A commit comes earlier after this many batches, so that what is noted of them stays small.
_MOST_NOTED = 20_000


#: What to do if the source's log is another one now.
_REMEDY = "Delete its copy and give the mirror another name (--name), or exclude the topic (--exclude)"


class _Noted(NamedTuple):
    """Records that were sent: when they are confirmed, the partition is mirrored up to `following`."""

    receipt: Receipt | None
    spans: Sequence[Span]
    following: int


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


class Session:
    """Use it as a context; `run` mirrors until it is told to stop."""

    def __init__(self, settings: MirrorSettings, slot: int, slots: int | None, totals: Totals) -> None:
        self._settings, self._slot, self.totals = settings, slot, totals
        self._stack = ExitStack()
        try:
            self._source_admin = self._stack.enter_context(Admin(settings.source_admin()))
            self._target_admin = self._stack.enter_context(Admin(settings.target_admin()))
            check_clusters(settings, self._source_admin, self._target_admin)
            name = mirror_name(settings, self._source_admin)
            self._slots = prepare_progress(self._target_admin, name, slots)
            self._target = Target(settings, name, slot)
            self._stack.callback(self._target.close)
            maps = load_progress(settings.target_admin(), self._target_admin, name, slot)
            #: Of all partitions that the topic knows, those that are assigned among them.
            self._maps: dict[TopicPartition, PartitionMap] = maps
            self._consumer = self._stack.enter_context(Consumer(settings.source_consumer()))
        except BaseException:
            self._stack.close()
            raise
        self._topics = MirroredTopics(settings, self._source_admin, self._target_admin)
        self._groups = GroupTranslation(settings, self._source_admin, self._target_admin)
        self._limit = self._source_admin.cluster.config.decompressed_max_bytes
        self._assigned: list[TopicPartition] = []
        #: The source's offset after what was sent, by partition.
        self._positions: dict[TopicPartition, int] = {}
        self._noted: dict[TopicPartition, deque[_Noted]] = {}
        self._noted_count = 0
        self._commit_at = self._refresh_at = self._groups_at = self._lag_at = 0.0
        self._is_first = not maps
        self._has_warned = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, is_stopped: Callable[[], bool], on_progress: Callable[[Totals], None], *, until_end: bool) -> None:
        """Mirror until `is_stopped`, with `until_end` until the offsets that the source has now; commit at the end.

        `on_progress` is called after each commit, at least once a second.
        """
        self._follow()
        ends = self._ends() if until_end else {}
        while not is_stopped():
            now = time.monotonic()
            if now >= self._refresh_at and not until_end:
                self._follow()
            if now >= self._lag_at:
                self._look_at_lag()
            self._step()
            if time.monotonic() >= self._commit_at or self._noted_count >= _MOST_NOTED:
                self._commit()
                on_progress(self.totals)
            if until_end and all(self._positions[key] >= end for key, end in ends.items()):
                break
            if time.monotonic() >= self._groups_at and not until_end:
                self._translate()
        self._target.flush()
        self._commit()
        self._target.commit()
        self._translate()
        self._look_at_lag()
        on_progress(self.totals)

    def _follow(self) -> None:
        """Take in new topics and partitions."""
        found = [key for key in self._topics.refresh() if slot_of(key, self._slots) == self._slot]
        self._refresh_at = time.monotonic() + self._settings.refresh_seconds
        new = [key for key in found if key not in self._positions]
        gone = set(self._assigned).difference(found)
        for key in sorted(gone):
            _log.warning("%s-%d is not at the source any more; its copy stays", *key)
            del self._positions[key]
        if new or gone:
            self._begin(new)
            self._assigned = found
            self._consumer.assign([(*key, self._positions[key]) if key in new else key for key in found])
        self._is_first = False
        self.totals.partitions = len(found)
        if not found and self._slots == 1 and not self._has_warned:
            self._has_warned = True
            _log.warning("the source has no topic to mirror: see --topics and --exclude")

    def _begin(self, keys: Sequence[TopicPartition]) -> None:
        """Find where to begin with new partitions."""
        cluster = self._source_admin.cluster
        starts = list_offsets(cluster, dict.fromkeys(keys, EARLIEST))
        ends = list_offsets(cluster, dict.fromkeys(keys, LATEST))
        if any(self._noted.get(key) for key in keys):  # they were gone for a moment
            self._target.flush()
        for key in keys:
            known = self._maps.setdefault(key, PartitionMap())
            self._take_confirmed(key, self._noted.get(key, deque()))
            position = known.position
            if position is None:
                begins_late = self._is_first and self._settings.start == "latest"
                position = ends[key] if begins_late else starts[key]
                known.moved(position)
            elif position < starts[key]:
                self._lose(key, position, starts[key])
                position = starts[key]
                known.moved(position)
            elif position > ends[key]:
                raise DataLossError(
                    f"{key[0]}-{key[1]} ends at offset {ends[key]} at the source, but was mirrored up to {position}: "
                    f"it was created again or truncated. {_REMEDY}"
                )
            self._positions[key] = position

    def _lose(self, key: TopicPartition, position: int, start: int) -> None:
        _log.warning(
            "%s-%d: offsets %d to %d were deleted at the source before they were mirrored", *key, position, start - 1
        )
        self.totals.lost += start - position

    def _step(self) -> None:
        """Take what the source has sent, and let the target work."""
        seconds, connections = self._target.step()
        is_idle = self._target.is_idle
        left = max(0.0, self._commit_at - time.monotonic()) if self._commit_at else 0.0
        if not self._assigned:
            time.sleep(min(left, _LONG))
            return
        try:
            chunk = self._consumer.poll_chunk(min(left, _LONG) if is_idle else 0.0)
        except OffsetOutOfRange as error:
            self._out_of_range(error)
            return
        except LogTruncated as error:
            raise DataLossError(f"{error.what}. {_REMEDY}") from None
        if chunk is not None:
            self._send(chunk)
        elif not is_idle:
            wait_until_ready(connections, min(seconds, _SHORT))

    def _out_of_range(self, error: OffsetOutOfRange) -> None:
        """Go on at the log's start if retention has overtaken the mirror."""
        key = error.topic, error.partition
        start = error.available[0]
        if self._positions.get(key, start) >= start:
            raise error
        self._lose(key, self._positions[key], start)
        self._note(key, _Noted(None, (), start))
        self._consumer.seek(*key, start)

    def _send(self, chunk: Chunk) -> None:
        key = chunk.topic, chunk.partition
        totals = self.totals
        for batch in out_batches(chunk, self._limit):
            totals.records += batch.count
            totals.bytes += len(batch.data)
            totals.copied += batch.is_copied
            totals.rebuilt += not batch.is_copied
            self._note(key, _Noted(self._target.send(key, batch), batch.spans, batch.following))
        self._note(key, _Noted(None, (), chunk.following))

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
        # Partitions that are gone, too: their records may be part of this transaction.
        changes = [(key, run) for key, known in self._maps.items() for run in known.take_changes()]
        if changes:
            self._target.send_runs(changes)
        if self._target.is_transactional:
            self._target.commit()
        self._commit_at = time.monotonic() + self._settings.commit_seconds

    def _take_confirmed(self, key: TopicPartition, noted: deque[_Noted]) -> None:
        known = self._maps[key]
        while noted and (noted[0].receipt is None or noted[0].receipt.done.is_set()):
            receipt, spans, following = noted.popleft()
            self._noted_count -= 1
            if receipt is not None and receipt.base_offset >= 0:
                for span in spans:
                    known.copied(span.first, span.count, receipt.base_offset + span.place)
            known.moved(following)

    def _ends(self) -> dict[TopicPartition, int]:
        return list_offsets(self._source_admin.cluster, dict.fromkeys(self._assigned, LATEST))

    def _look_at_lag(self) -> None:
        ends = self._ends()
        self.totals.lag = sum(max(0, end - self._positions[key]) for key, end in ends.items())
        self._lag_at = time.monotonic() + _LAG_SECONDS

    def _translate(self) -> None:
        """Translate groups, up to what is committed at the target."""
        if self._settings.groups is not None:
            self.totals.groups = self._groups.translate({key: self._maps[key] for key in self._assigned})
        self._groups_at = time.monotonic() + self._settings.group_seconds
