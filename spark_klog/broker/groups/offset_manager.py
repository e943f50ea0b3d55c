"""Offset manager: offsets that groups commit, kept in the topic __consumer_offsets (1.0: "Consumer Offset Tracking").

A commit is answered after it has been appended. Fetches are answered from memory, which is loaded from the log at
start. Offsets committed in a transaction stay pending until its marker is written. Format: `groups/records.py`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from spark_klog.base.clock import system_ms
from spark_klog.base.memory import uncollected
from spark_klog.broker.coordinator import TransactionEnd, stored_rows
from spark_klog.broker.groups.consumer_records import ConsumerGroupKey
from spark_klog.broker.groups.records import (
    NO_EXPIRY,
    Committed,
    GroupKey,
    OffsetKey,
    decode_group,
    decode_key,
    decode_offset,
    encode_offset,
    encode_offset_key,
    partition_of,
)
from spark_klog.errors import DecodeError
from spark_klog.log.partition_log import PartitionLog
from spark_klog.protocol.codec import Message
from spark_klog.records.building.assignment import own_batch
from spark_klog.records.formats.batch import MAX_HEADER_SIZE
from spark_klog.records.formats.batch_v2 import TRANSACTIONAL_BIT

_log = logging.getLogger(__name__)

Offsets = dict[tuple[str, int], Committed]
#: Offsets and topic for each key prefix (the key without its partition): loading need not decode a million keys.
_Decoded = dict[bytes, tuple[Offsets, str]]
#: Size of a record beside its key.
_ROW_BYTES = 32
#: The client leaves the retention to the broker.
DEFAULT_RETENTION = -1
_MAX_MS = (1 << 63) - 1


#: (offset, leader epoch, metadata)
Commit = tuple[int, int, str]


class EncodedCommits(NamedTuple):
    """Commits of a group and the batch to append; `producer` is (id, epoch) if they belong to a transaction."""

    group: str
    committed: Offsets
    producer: tuple[int, int] | None
    batch: bytearray


def encoded_commits(
    group: str,
    offsets: Mapping[tuple[str, int], Commit],
    retention_ms: int,
    producer: tuple[int, int] | None,
) -> EncodedCommits:
    """Encode at least one commit, to be kept for `retention_ms`. Thread-safe."""
    now = system_ms()
    expires_ms = NO_EXPIRY if retention_ms == DEFAULT_RETENTION else min(now + retention_ms, _MAX_MS)
    committed = {key: Committed(*entry, now, expires_ms) for key, entry in offsets.items()}
    rows = [(encode_offset_key(OffsetKey(group, *key)), encode_offset(entry)) for key, entry in committed.items()]
    if producer is None:
        batch = own_batch(rows, now)
    else:
        batch = own_batch(rows, now, attributes=TRANSACTIONAL_BIT, producer=producer)
    return EncodedCommits(group, committed, producer, batch)


class Since:
    """Notes for which partitions groups have committed offsets of one topic, or of one group, since it was made."""

    def __init__(self, *, topic: str | None = None, group: str | None = None) -> None:
        self._topic, self._group = topic, group
        self._committed: set[tuple[str, tuple[str, int]]] = set()

    def note(self, group: str, keys: Iterable[tuple[str, int]]) -> None:
        if self._group in (None, group):
            self._committed.update((group, key) for key in keys if self._topic in (None, key[0]))

    def has(self, group: str, key: tuple[str, int]) -> bool:
        """Whether the group has committed an offset for the partition since."""
        return (group, key) in self._committed


class OffsetManager:
    """All committed offsets of the groups whose partitions this broker leads.

    `load_group` and `load_consumer_group` get the groups that the same log contains.
    """

    def __init__(
        self,
        load_group: Callable[[str, Message | None], None],
        load_consumer_group: Callable[[ConsumerGroupKey, bytes | None, int], None],
    ) -> None:
        self._load_group, self._load_consumer_group = load_group, load_consumer_group
        self._groups: dict[str, Offsets] = {}
        #: Pending offsets by group, for each (partition, producer id): a marker ends a transaction in its own partition
        #: only.
        self._pending: dict[tuple[int, int], dict[str, Offsets]] = defaultdict(dict)
        self._noting: list[Since] = []

    def load(self, log: PartitionLog) -> None:
        """Load a partition of __consumer_offsets; later records win.

        Records that do not decode are logged and skipped. Raises `DecodeError` if batches are damaged, OSError.
        """
        count = bad = 0
        decoded: _Decoded = {}
        with uncollected(freezes=True):
            for entry in stored_rows(log):
                if isinstance(entry, TransactionEnd):
                    self.complete(log.partition, entry.producer_id, committed=entry.commits)
                    continue
                load = self._load_record
                for key, value, written_ms in entry.rows:
                    count += 1
                    try:
                        load(key, value, written_ms, (log.partition, entry.producer_id), decoded)
                    except DecodeError as error:
                        bad += 1
                        _log.debug("%s: a record is left out: %s", log.directory.name, error)
            while decoded:  # to drop all at once would take 20 ms for a million offsets, in which no other thread runs
                decoded.popitem()
        if bad:
            _log.error("%s: %d records of %d can't be read and are left out", log.directory.name, bad, count)
        _log.info("loaded %d commits and groups from %s", count, log.directory.name)

    def _load_record(
        self,
        data: bytes | None,
        value: bytes | None,
        written_ms: int,
        transaction: tuple[int, int],
        decoded: _Decoded,
    ) -> None:
        if not data:
            return
        is_plain = transaction[1] < 0
        if is_plain and not self._pending and value is not None and (known := decoded.get(data[:-4])):
            known[0][known[1], partition_of(data)] = decode_offset(value)
            return
        key = decode_key(data)
        if isinstance(key, OffsetKey):
            group, topic, partition = key
            if value is None:
                self._forget(group, [(topic, partition)])
                decoded.clear()
                return
            groups = self._groups if is_plain else self._pending[transaction]
            offsets = groups.setdefault(group, {})
            offsets[topic, partition] = decode_offset(value)
            if is_plain:
                decoded[data[:-4]] = offsets, topic
                if self._pending:
                    self._overtake(group, [(topic, partition)])
        elif isinstance(key, GroupKey):
            self._load_group(key.group, None if value is None else decode_group(value))
        elif key is not None:
            self._load_consumer_group(key, value, written_ms)

    def append(self, log: PartitionLog, commits: EncodedCommits) -> None:
        """Append commits to the group's partition. Transactional ones stay pending until the marker.

        The caller flushes as flush.messages requires. Raises OSError, `ProducerRefused`, or `BatchTooLarge` if the
        commits exceed the topic's limit for a batch.
        """
        log.append(memoryview(commits.batch), flushes=False)
        group, committed = commits.group, commits.committed
        for since in self._noting:
            since.note(group, committed)
        if commits.producer is not None:
            self._pending[log.partition, commits.producer[0]].setdefault(group, {}).update(committed)
            return
        self._groups.setdefault(group, {}).update(committed)
        self._overtake(group, committed)

    def complete(self, partition: int, producer_id: int, *, committed: bool) -> None:
        """End the producer's transaction in that partition of __consumer_offsets."""
        for group, offsets in self._pending.pop((partition, producer_id), {}).items():
            if committed:
                self._groups.setdefault(group, {}).update(offsets)

    def fetch(self, group: str, topic: str, partition: int) -> Committed | None:
        return self._groups.get(group, {}).get((topic, partition))

    def all(self, group: str) -> dict[tuple[str, int], Committed]:
        """The group's committed offsets at this moment."""
        return dict(self._groups.get(group, {}))

    def pending(self, group: str) -> set[tuple[str, int]]:
        """Where open transactions have pending offsets: readers may have to wait (KIP-447)."""
        return {key for groups in self._pending.values() for key in groups.get(group, ())}

    @property
    def groups(self) -> list[str]:
        """Groups with committed offsets."""
        return [group for group, offsets in self._groups.items() if offsets]

    @property
    def all_groups(self) -> list[str]:
        """Groups with committed or pending offsets."""
        return list(dict.fromkeys([*self.groups, *(group for groups in self._pending.values() for group in groups)]))

    def has(self, group: str) -> bool:
        """Whether the group has committed offsets."""
        return bool(self._groups.get(group))

    def known(self, group: str) -> Iterator[tuple[str, int]]:
        """Partitions for which the group has offsets, committed or pending, while they change; one may come twice."""
        yield from list(self._groups.get(group, ()))
        for groups in list(self._pending.values()):
            yield from list(groups.get(group, ()))

    def has_any(self, group: str) -> bool:
        """Whether the group has offsets, committed or pending."""
        return self.has(group) or any(groups.get(group) for groups in self._pending.values())

    def remove(self, log: PartitionLog, group: str, keys: Iterable[tuple[str, int]]) -> None:
        """Remove offsets, committed and pending, by records without a value. Raises OSError, `BatchTooLarge`.

        The caller flushes as flush.messages requires.
        """
        known = [self._groups.get(group, {}), *(groups.get(group, {}) for groups in self._pending.values())]
        gone = {
            key: encode_offset_key(OffsetKey(group, *key)) for key in keys if any(key in offsets for offsets in known)
        }
        # split into batches that the topic accepts
        longest = max(map(len, gone.values()), default=0) + _ROW_BYTES
        count = max(1, (log.config.max_message_bytes - MAX_HEADER_SIZE) // longest)
        left = list(gone)
        for start in range(0, len(left), count):
            now = left[start : start + count]
            batch = own_batch([(gone[key], None) for key in now], system_ms())
            log.append(memoryview(batch), flushes=False)
            self._forget(group, now)

    def expired(
        self, group: str, keys: Iterable[tuple[str, int]], now_ms: int, before_ms: int
    ) -> list[tuple[str, int]]:
        """Return those of `keys` whose committed offset has expired.

        An offset with an expiry time expires then; any other one if it was committed before `before_ms`. Keys for
        which a transaction has a pending offset are left out.
        """
        offsets, pending = self._groups.get(group, {}), self.pending(group)
        return [
            key
            for key in keys
            if (offset := offsets.get(key)) is not None
            and (offset.timestamp < before_ms if offset.expires_ms == NO_EXPIRY else offset.expires_ms <= now_ms)
            and key not in pending
        ]

    def forget_all(self) -> None:
        """Forget all offsets, because their log is gone."""
        self._groups.clear()
        self._pending.clear()

    def since_now(self, *, topic: str | None = None, group: str | None = None) -> Since:
        """Note the commits of one topic or group from now on, pending ones included, until `forget_since`."""
        since = Since(topic=topic, group=group)
        self._noting.append(since)
        return since

    def forget_since(self, since: Since) -> None:
        self._noting.remove(since)

    def _forget(self, group: str, keys: Iterable[tuple[str, int]]) -> None:
        offsets = self._groups.get(group, {})
        for key in keys:
            offsets.pop(key, None)
        if not offsets:
            self._groups.pop(group, None)
        self._overtake(group, keys)

    def _overtake(self, group: str, keys: Iterable[tuple[str, int]]) -> None:
        """Drop pending offsets of these partitions: a later record supersedes them."""
        for groups in self._pending.values():
            if staged := groups.get(group):
                for key in keys:
                    staged.pop(key, None)
