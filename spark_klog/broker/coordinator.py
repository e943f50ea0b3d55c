"""What the coordinators of groups and of transactions share: an internal topic that keeps their state, by key.

A key is the id of a group, or a transactional id. It lives in one partition; the broker that leads it coordinates it.
A log may have millions of records, most in batches of one: the kernel decodes runs of plain batches in one call.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from spark_klog.base.clock import system_ms
from spark_klog.broker.metadata.nodes import TopicExists
from spark_klog.broker.partitions import ServedPartitions
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.broker.topic_changes import TopicChanges
from spark_klog.errors import DirectoryError, EncodeError, ErrorCode, KlogError
from spark_klog.log.partition_log import BatchTooLarge, PartitionLog
from spark_klog.records import kernels
from spark_klog.records.building.assignment import own_batch
from spark_klog.records.formats.batch import check_crc, iter_batches
from spark_klog.records.formats.batch_v2 import BatchHeader
from spark_klog.records.reading.reader import COMMIT, read_marker, records_of

_log = logging.getLogger(__name__)
#: Bytes of a log read at once; the kernel decodes them in one call, during which nothing else runs.
_READ_BYTES = 512 * 1024
#: Logs up to this size are read in the event loop.
_READ_AT_ONCE = 16 * 1024
_NO_LIMIT = (1 << 31) - 1
_LAST_OFFSET = (1 << 63) - 1
_T = TypeVar("_T")
Row = tuple[bytes | None, bytes | None]


class Coordinator:
    """The partitions of an internal topic that this broker leads. For one event loop; `kind` names a key in errors."""

    def __init__(
        self, config: BrokerConfig, partitions: ServedPartitions, changes: TopicChanges, topic: str, kind: str
    ) -> None:
        self._config, self._partitions, self._changes = config, partitions, changes
        self._registry, self._logs, self._flushes = partitions.registry, partitions.logs, partitions.flushes
        self._topic, self._kind = topic, kind
        #: Whether the logs are still being read.
        self.is_loading = True
        #: Partitions that can't be read; serving their keys would start them from nothing.
        self._unread: set[int] = set()

    async def find(self, key: str) -> tuple[int, int]:
        """(broker id, partition of the topic) that keep the key; creates the topic at first use.

        Raises `DirectoryError` if the topic can't be created or read.
        """
        name = self._topic
        await self._partitions.turns.take()
        if name not in self._registry.topics:
            try:
                await self._changes.create_topic(name, self._config.default_partitions(name))
            except TopicExists:
                await self._partitions.follower.refresh()
        topic = self._registry.topics.get(name)
        if topic is None:
            raise DirectoryError(f"{name} exists, but can't be read")
        partition = partition_for(key, len(topic.assignment))
        if self._logs.get(name, partition) is None and self._registry.leads(name, partition):
            await self._partitions.follower.settle()  # a topic is registered before its logs are created
        return self._registry.leader(topic, partition), partition

    async def log_of(self, key: str, *, for_reading: bool = False) -> PartitionLog | ErrorCode:
        """The log that keeps the key, or the error if this broker does not lead it or has not read it."""
        if not await self._partitions.is_current(for_reading=for_reading):
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        try:
            _, partition = await self.find(key)
        except DirectoryError as error:
            _log.error("%s %s has no coordinator: %s", self._kind, key, error)
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if not self._registry.leads(self._topic, partition):
            return ErrorCode.NOT_COORDINATOR
        log = self._logs.get(self._topic, partition)
        if log is None or partition in self._unread:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if self.is_loading:
            return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        await self._flushes.make_early_room(log)
        return log

    def local_log(self, key: str) -> PartitionLog | None:
        """The log that keeps the key, if this broker has it and could read it."""
        topic = self._registry.topics.get(self._topic)
        if topic is None:
            return None
        log = self._logs.get(self._topic, partition_for(key, len(topic.assignment)))
        return None if log is None or log.partition in self._unread else log

    def _append(self, log: PartitionLog, key: str, encode: Callable[[], list[tuple[bytes, bytes | None]]]) -> ErrorCode:
        """Append records of the key in one batch; NONE, or the error for the client. The caller flushes the log."""
        if not self._partitions.serves(log):
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        try:
            log.append(memoryview(own_batch(encode(), system_ms())), flushes=False)
        except OSError as error:
            _log.error("%s %s can't be written to %s: %s", self._kind, key, log.directory, error)
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        except (BatchTooLarge, EncodeError) as error:
            _log.error("%s %s has too many members or partitions: %s", self._kind, key, error)
            return ErrorCode.UNKNOWN_SERVER_ERROR
        self._partitions.purgatory.wake((log.topic, log.partition))
        return ErrorCode.NONE

    async def _is_flushed(self, log: PartitionLog) -> bool:
        """Whether the log is flushed as far as flush.messages requires, and still served; a failure is logged."""
        try:
            await self._flushes.flush_many(log)
        except OSError as error:
            _log.error("%ss can't be written to %s: %s", self._kind, log.directory, error)
            return False
        return await self._partitions.confirms(log)

    async def _read_logs(self, read: Callable[[PartitionLog], _T]) -> list[_T] | None:
        """What `read` returns for the topic's logs; None if one was set aside meanwhile, as the topic was deleted.

        A log that can't be read is logged, and its keys are not served. A large one is read in a thread.
        """
        results = []
        logs = [log for (topic, _), log in self._logs.logs.items() if topic == self._topic]
        for log in logs:
            try:
                results.append(await asyncio.to_thread(read, log) if log.size > _READ_AT_ONCE else read(log))
                await asyncio.sleep(0)
            except Exception as error:
                if not self._logs.serves(log):
                    break
                known = isinstance(error, (KlogError, OSError))
                text = "%ss of %s can't be read, and are not served: %s"
                _log.error(text, self._kind, log.directory, error, exc_info=not known)
                self._unread.add(log.partition)
        if all(map(self._logs.serves, logs)):
            return results
        self._unread.clear()
        return None


def partition_for(key: str, partitions: int) -> int:
    """The partition of an internal topic that holds the key (Kafka: Utils.abs(hash) % partitions)."""
    result = 0  # java.lang.String.hashCode
    for unit in array("H", key.encode(f"utf-16-{sys.byteorder[0]}e")):
        result = (31 * result + unit) & 0xFFFFFFFF
    return (result & 0x7FFFFFFF) % partitions


class Rows(NamedTuple):
    """Records of one producer's transaction, or outside of transactions (producer id -1): (key, value, time in ms)."""

    producer_id: int
    rows: Iterable[tuple[bytes | None, bytes | None, int]]


class TransactionEnd(NamedTuple):
    """End of a producer's transaction."""

    producer_id: int
    commits: bool


def stored_rows(log: PartitionLog) -> Iterator[Rows | TransactionEnd]:
    """All rows in order. Raises `DecodeError` if batches are damaged, OSError, `LogRetired` if the log is deleted."""
    builder = kernels.load().builder(frozenset({"key", "value", "timestamp"}))
    offset = log.start_offset
    while (part := log.read(offset, _READ_BYTES)) is not None:
        log.check_open()
        data = memoryview(part.read())
        position, begin = 0, offset
        while True:
            position, offset = builder.append_batches(data, position, offset, _LAST_OFFSET, _NO_LIMIT, _NO_LIMIT)
            columns = builder.finish()
            if columns.count:
                assert columns.key is not None
                assert columns.value is not None
                assert columns.timestamp is not None
                times = memoryview(columns.timestamp).cast("B").cast("q")
                yield Rows(-1, zip(columns.key.values(), columns.value.values(), times, strict=True))
            other = next(iter_batches(data[position:]), None)
            if other is None:
                break
            header, batch = other
            check_crc(header, batch)
            position, offset = position + len(batch), header.next_offset
            if isinstance(header, BatchHeader) and header.is_control:
                marker = read_marker(header, batch)
                if marker is not None:
                    yield TransactionEnd(header.producer_id, marker.type == COMMIT)
                continue
            is_open = isinstance(header, BatchHeader) and header.is_transactional
            rows = [(record.key, record.value, record.timestamp) for record in records_of(header, batch)]
            yield Rows(header.producer_id if isinstance(header, BatchHeader) and is_open else -1, rows)
        if offset == begin:
            return
