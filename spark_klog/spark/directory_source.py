"""Batch queries over data directories, without a broker: the option `path`."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar
from uuid import UUID

from spark_klog.client.offsets import NO_OFFSET
from spark_klog.errors import ConfigError
from spark_klog.log.stored import StoredBatches
from spark_klog.log.stored_directory import StoredDirectories, StoredLog
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST
from spark_klog.records.reader import BadBatch
from spark_klog.spark import places
from spark_klog.spark.log_files import directory
from spark_klog.spark.offsets import Offsets, OffsetSpec, Spec, TopicPartition
from spark_klog.spark.options import SourceOptions, SplitLimits, directory_config
from spark_klog.spark.planning import OffsetRange, pack, split

_log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
#: Only read where they are named; Kafka's own are internal, and the log of KRaft is no topic.
_INTERNAL = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"})
#: About so many bytes are a task, as they are stored, unless the options say more of it.
_TASK_BYTES = 48 * 1024 * 1024
#: Partitions that are looked at at once: most of the time is spent waiting, where files are far away.
_THREADS = 8


def _directories(options: SourceOptions) -> StoredDirectories:
    config = directory_config(options.client)
    return StoredDirectories(
        [directory(path) for path in options.paths],
        read_committed=bool(config.isolation_level),
        limit=config.decompressed_max_bytes,
    )


class DirectoryReader:
    """The work of a task; see `reading.py`."""

    def __init__(self, options: SourceOptions) -> None:
        self.config = directory_config(options.client)
        self._directories = _directories(options)

    def read(self, wanted: OffsetRange, on_bad: Callable[[BadBatch], None]) -> Iterator[StoredBatches]:
        """The batches of a range; errors as of `StoredPartition.read`."""
        return self._directories.open(wanted.topic, wanted.partition).read(wanted.start, wanted.end, on_bad)


@contextmanager
def directory_log(options: SourceOptions) -> Iterator[DirectoryLog]:
    """What a batch query reads, as the folders list it when they are first looked at."""
    with ThreadPoolExecutor(_THREADS) as pool:
        yield DirectoryLog(options, pool)


class DirectoryLog:
    """See `places.BatchLog`."""

    def __init__(self, options: SourceOptions, pool: ThreadPoolExecutor) -> None:
        self._options, self._pool = options, pool
        self._directories = _directories(options)
        self._logs: dict[TopicPartition, StoredLog] = {}
        #: A directory is read as it is: none is compared.
        self.topic_ids: Mapping[str, UUID] = {}

    def partitions(self) -> list[TopicPartition]:
        subscription, found = self._options.subscription, self._directories.partitions()
        if subscription.pattern is not None:
            pattern = re.compile(subscription.pattern)
            return [key for key in found if key[0] not in _INTERNAL and pattern.search(key[0])]
        wanted = subscription.assign or dict.fromkeys(subscription.topics or ())
        for topic, numbers in wanted.items():
            there = {partition for name, partition in found if name == topic}
            if not there:
                raise ConfigError(f"topic {topic} does not exist in {', '.join(self._options.paths)}")
            if missing := sorted(set(numbers or ()) - there):
                raise ConfigError(f"topic {topic} has no partition {', '.join(map(str, missing))}")
        return [key for key in found if key[0] in wanted and key[1] in (wanted[key[0]] or (key[1],))]

    def list_offsets(self, times: Mapping[TopicPartition, int]) -> Offsets:
        return self._each(times, lambda key: self._offset(key, times[key]))

    def timestamp_types(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        found = self._each(offsets, lambda key: self._logs[key].timestamp_type(offsets[key]))
        return {key: kind for key, kind in found.items() if kind is not None}

    def resolve(self, spec: Spec, partitions: Collection[TopicPartition], option: str) -> Offsets:
        if isinstance(spec, OffsetSpec):
            for key, offset in spec.each:
                if offset >= 0 and key in partitions:
                    self._log(key).check_offset(offset)
        return places.resolve(self, spec, partitions, option)

    def tasks(self, wanted: list[OffsetRange]) -> list[tuple[OffsetRange, ...]]:
        limits = self._options.split
        size = limits.max_bytes or (None if limits.min_partitions else _TASK_BYTES)
        cuts = self._each(wanted, lambda item: self._cut(item, size) if size else [item])
        pieces = [piece for item in wanted for piece in cuts[item]]
        return pack(split(pieces, SplitLimits(limits.min_partitions, limits.max_records), {}), limits)

    def _each(self, keys: Iterable[K], ask: Callable[[K], T]) -> dict[K, T]:
        """The answers for all keys, some at a time."""
        keys = list(keys)
        return dict(zip(keys, self._pool.map(ask, keys), strict=True))

    def _log(self, key: TopicPartition) -> StoredLog:
        log = self._logs.get(key)
        if log is None:
            log = self._logs[key] = self._directories.open(*key)
        return log

    def _offset(self, key: TopicPartition, time: int) -> int:
        log = self._log(key)
        if time == EARLIEST:
            return log.start_offset
        if time == LATEST:
            self._check_end(log)
            return log.end_offset
        found = log.offset_for_time(time)
        return NO_OFFSET if found is None else found

    def _check_end(self, log: StoredLog) -> None:
        if log.damage is not None:
            if self._options.bad_records.mode == "fail":
                raise log.damage
            _log.error("the log ends before what is no batch: %s", log.damage)

    def _cut(self, item: OffsetRange, size: int) -> list[OffsetRange]:
        bounds = [item.start, *self._logs[item[:2]].cuts(item.start, item.end, size), item.end]
        return [item._replace(start=low, end=high) for low, high in pairwise(bounds)]
