"""Read data directories without a broker (option `path`): partitions, offsets and record batches for batch queries."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

from spark_klog.base.addresses import filesystem_at, without_user
from spark_klog.base.names import TopicPartition
from spark_klog.client.offsets import NO_OFFSET
from spark_klog.client.places import Offsets, OffsetSpec, Spec
from spark_klog.errors import ConfigError
from spark_klog.files.arrow import ArrowFolder
from spark_klog.log.stored.directory import Directory, StoredDirectories, StoredLog
from spark_klog.log.stored.segment import StoredBatches
from spark_klog.protocol.tables.records import EARLIEST, LATEST
from spark_klog.records.reading.reader import BadBatch
from spark_klog.spark.options import SourceOptions, SplitLimits, directory_config
from spark_klog.spark.read.batch_query import QuerySource, select
from spark_klog.spark.read.ranges import OffsetRange, pack, split

_log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
#: Read only if the options name them: Kafka's internal topics, and KRaft's metadata log.
_INTERNAL = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"})
#: Stored bytes of a task, unless the options limit tasks otherwise.
_TASK_BYTES = 48 * 1024 * 1024
#: Partitions to open at the same time: with remote files most of the time is spent waiting.
_THREADS = 8


def directory(address: str) -> Directory:
    """The data directory at a path or URI; `ConfigError` for a URI that no file system supports, OSError."""
    filesystem, path = filesystem_at(address)
    return Directory(ArrowFolder(filesystem, "", ""), path, without_user(address))


class DirectorySource(QuerySource):
    """The partitions of a query in data directories. It lists each folder once, when it first needs it."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self.config = directory_config(options.client)
        self._directories = StoredDirectories(
            [directory(path) for path in options.paths],
            read_committed=bool(self.config.isolation_level),
            limit=self.config.decompressed_max_bytes,
        )
        self._pool = ThreadPoolExecutor(_THREADS)
        self._logs: dict[TopicPartition, StoredLog] = {}

    def close(self) -> None:
        self._pool.shutdown()

    def read(self, requested: OffsetRange, on_bad: Callable[[BadBatch], None]) -> Iterator[StoredBatches]:
        """The record batches of a range; errors of `StoredPartition.read`. Bad messages of Kafka 0.7 go to `on_bad`."""
        return self._directories.open(requested.topic, requested.partition).read(requested.start, requested.end, on_bad)

    def partitions(self) -> list[TopicPartition]:
        subscription = self._options.subscription
        there: dict[str, list[int]] = {topic: [] for topic in subscription.assign or subscription.topics or ()}
        pattern = None if subscription.pattern is None else re.compile(subscription.pattern)
        for topic, partition in self._directories.partitions():
            if topic in there or (pattern is not None and topic not in _INTERNAL and pattern.search(topic)):
                there.setdefault(topic, []).append(partition)
        for topic, numbers in there.items():
            if not numbers:
                folders = ", ".join(map(without_user, self._options.paths))
                raise ConfigError(f"topic {topic} does not exist in {folders}")
        return select(there, subscription.assign)

    def list_offsets(self, times: Mapping[TopicPartition, int]) -> Offsets:
        return self._in_threads(times, lambda key: self._offset(key, times[key]))

    def timestamp_types(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        kinds = self._in_threads(offsets, lambda key: self._logs[key].timestamp_type(offsets[key]))
        return {key: kind for key, kind in kinds.items() if kind is not None}

    def resolve(self, spec: Spec, partitions: Collection[TopicPartition], option: str) -> Offsets:
        if isinstance(spec, OffsetSpec):
            for key, offset in spec.each:
                if offset >= 0 and key in partitions:
                    self._log(key).check_offset(offset)
        return super().resolve(spec, partitions, option)

    def tasks(self, ranges: list[OffsetRange]) -> list[tuple[OffsetRange, ...]]:
        limits = self._options.split
        size = limits.max_bytes or (None if limits.min_partitions else _TASK_BYTES)
        cuts = self._in_threads(ranges, lambda span: self._cut(span, size) if size else [span])
        pieces = [piece for span in ranges for piece in cuts[span]]
        return pack(split(pieces, SplitLimits(limits.min_partitions, limits.max_records), {}), limits)

    def _in_threads(self, keys: Iterable[K], function: Callable[[K], T]) -> dict[K, T]:
        keys = list(keys)
        return dict(zip(keys, self._pool.map(function, keys), strict=True))

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
            if log.damage is not None:
                if self._options.bad_records.mode == "fail":
                    raise log.damage
                _log.error("the log ends before bytes that are not a record batch: %s", log.damage)
            return log.end_offset
        offset = log.offset_for_time(time)
        return NO_OFFSET if offset is None else offset

    def _cut(self, span: OffsetRange, size: int) -> list[OffsetRange]:
        bounds = [span.start, *self._logs[span[:2]].cuts(span.start, span.end, size), span.end]
        return [span._replace(start=low, end=high) for low, high in pairwise(bounds)]
