"""Plan a run: where each partition starts and ends, what is lost, and the tasks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from spark_klog.base.names import TopicPartition
from spark_klog.base.settings import some_of
from spark_klog.client.cluster import UNKNOWN_TOPIC, Cluster
from spark_klog.client.fetch.ranges import MOST_RANGES
from spark_klog.client.fetch.sampling import record_sizes
from spark_klog.client.offsets import high_watermarks, list_offsets
from spark_klog.errors import ConfigError, DataLossError, KlogError, LoadError, ProtocolError
from spark_klog.files.arrow import ArrowFolder
from spark_klog.load.journal import paths
from spark_klog.load.journal.model import Progress, Range, RangeResult
from spark_klog.load.journal.store import Store
from spark_klog.load.settings import LOSS_ADVICE
from spark_klog.protocol.tables.records import EARLIEST, LATEST
from spark_klog.spark.options import SplitLimits
from spark_klog.spark.read.ranges import (
    RECREATED,
    RETENTION,
    TRUNCATED,
    LeaderOf,
    Lost,
    OffsetRange,
    grouped,
    in_turns,
    limit_bytes,
    limit_rows,
    no_leader,
    pack,
    sorted_by_leader,
    split,
)

#: A range is split to use more cores only into parts of so many records, as each part has a file of its own.
_LEAST_RECORDS = 100_000
#: What no name of a topic has.
_NO_NAME = re.compile(r"[^a-zA-Z0-9._-]")
#: Ranges of so many records share tasks, which together are so many for each core.
_SMALL, _TASKS_OF_CORE = 10_000, 2
#: Bytes of a file's name on a disk.
_LONGEST_NAME = 255


@dataclass(frozen=True)
class Limits:
    """Bounds of a run; bytes are those that the brokers send (compressed), estimated from samples."""

    max_records: int | None = None
    max_bytes: int | None = None

    def less(self, records: int) -> Limits:
        """The limits that remain after so many records; 0 records with `max_bytes`, as their bytes are not known."""
        if not records:
            return self
        if self.max_bytes is not None:
            return Limits(0)
        return Limits(None if self.max_records is None else max(0, self.max_records - records))


@dataclass(frozen=True)
class Extent:
    """The offsets to load, [start, end) of each partition, and those that the log had at the look-up.

    `log_start` has partitions with news alone. `again` are the ranges of earlier runs in it, in the order of offsets.
    """

    start: dict[TopicPartition, Progress]
    end: dict[TopicPartition, int]
    log_start: dict[TopicPartition, int]
    log_end: dict[TopicPartition, int]
    lost: list[Lost] = field(default_factory=list)
    again: dict[TopicPartition, list[RangeResult]] = field(default_factory=dict)

    @property
    def records(self) -> int:
        """The offsets in it."""
        return sum(self.end[key] - place.offset for key, place in self.start.items())


def partitions_of(cluster: Cluster, topics: list[str]) -> dict[TopicPartition, str]:
    """The topics' partitions, each with its topic's id ("" without one).

    `LoadError` if a topic does not exist, `ConfigError` if none can have its name.
    """
    try:
        counts = cluster.partitions(topics)
    except ProtocolError as error:
        if error.code in UNKNOWN_TOPIC:
            servers = ",".join(f"{host}:{port}" for host, port in cluster.config.bootstrap_servers)
            problem = f"{error.what} does not exist at {servers}"
            if any(_NO_NAME.search(topic) for topic in topics):
                advice = "names are taken as they are; --topics-pattern takes a pattern"
                raise ConfigError(f"{problem}: {advice}") from None
            # a load that follows its topics tries again: the topic may be there later
            raise LoadError(f"{problem}: create it, or leave it out") from None
        raise
    ids = {topic: str(cluster.topic_ids.get(topic, "")) for topic in counts}
    return {(topic, number): ids[topic] for topic in sorted(counts) for number in counts[topic]}


def check_names(store: Store, partitions: Iterable[TopicPartition], extension: str) -> None:
    """`ConfigError` for a topic whose files have names that a local disk does not take.

    To be called before there is a plan: runs go on with a plan, and none could write these files.
    """
    for topic, partition in () if isinstance(store, ArrowFolder) else partitions:
        path = paths.file(Range(topic, partition, 0, 0), 0, 0, "", paths.new_token(), extension)
        name = path.rpartition("/")[2] + paths.STAGED
        if len(name) > _LONGEST_NAME:
            raise ConfigError(
                f"topic {topic}: the names of its files would have {len(name)} bytes, and a disk takes "
                f"{_LONGEST_NAME}: load it into an object store"
            )


@dataclass(frozen=True)
class Look:
    """What the cluster has said of partitions: the ids of their topics ("" without one), their ends, and what has been
    asked of first offsets: a load asks for those that it needs besides.

    `left_out` are the errors of partitions and topics of which it has said nothing, by their names: a load goes on
    without them.
    """

    ids: dict[TopicPartition, str]
    end: dict[TopicPartition, int]
    first: dict[TopicPartition, int] = field(default_factory=dict)
    left_out: Mapping[str, KlogError] = field(default_factory=dict)

    @classmethod
    def at(cls, cluster: Cluster, topics: list[str]) -> Look:
        """Errors as of `partitions_of` and `list_offsets`."""
        ids = partitions_of(cluster, topics)
        return cls(ids, list_offsets(cluster, dict.fromkeys(ids, LATEST)))

    def again(self, cluster: Cluster) -> Look:
        """A later look at the partitions that this one has; errors as of `list_offsets`."""
        return replace(self, end=list_offsets(cluster, dict.fromkeys(self.ids, LATEST)), first={})


def find_extent(
    cluster: Cluster, look: Look, progress: Mapping[TopicPartition, Progress], fail_on_loss: bool
) -> Extent:
    """What is new since `progress` by a look at the topics; partitions that are not in it start at their first record.

    Records that are gone are in `lost`, or `DataLossError` if `fail_on_loss`.
    A topic that was created again starts at its first record, a log that became shorter goes on at its end.
    """
    ids, high = look.ids, look.end
    news = [key for key in ids if not _is_loaded(progress.get(key), ids[key], high[key])]
    low = {key: look.first[key] for key in news if key in look.first}
    low |= list_offsets(cluster, dict.fromkeys((key for key in news if key not in low), EARLIEST))
    # read_committed: before what an earlier run has read of open transactions
    shorter = [key for key in ids if key in progress and high[key] < progress[key].offset]
    ends = {**high, **high_watermarks(cluster, shorter)}
    start, lost = {}, []
    for key, topic_id in ids.items():
        last = progress.get(key)
        # nothing is lost of a partition of which all is loaded
        first, loss = _start(key, last, topic_id, low.get(key, ends[key]), ends[key])
        start[key] = first
        lost += loss
    if lost and fail_on_loss:
        raise DataLossError(
            f"records can't be loaded: {some_of([str(loss) for loss in lost], separator='; ')}; {LOSS_ADVICE}",
            lost[0].cause,
        )
    end = {key: max(high[key], place.offset) for key, place in start.items()}
    return Extent(start, end, low, high, lost)


def _is_loaded(last: Progress | None, topic_id: str, end: int) -> bool:
    """Whether a load has a log up to its end."""
    return last is not None and last.offset == end and (not topic_id or last.topic_id in ("", topic_id))


def bounded(extent: Extent, cluster: Cluster, limits: Limits) -> Extent:
    """As much of the extent as the limits allow, of each partition its share."""
    begin, end = {key: place.offset for key, place in extent.start.items()}, extent.end
    if limits.max_records is not None:
        end = limit_rows(begin, end, limits.max_records)
    if limits.max_bytes is not None:
        sizes = record_sizes(cluster, {key: begin[key] for key in end if begin[key] < end[key]})
        end = limit_bytes(begin, end, limits.max_bytes, sizes)
    return replace(extent, end=end)


def _start(
    key: TopicPartition, last: Progress | None, topic_id: str, low: int, high: int
) -> tuple[Progress, list[Lost]]:
    """Decide where a partition's run starts; return that, and the ranges that are lost."""
    if last is None:
        return Progress(low, 0, topic_id), []
    known = Progress(last.offset, last.incarnation, topic_id or last.topic_id)
    if last.topic_id and topic_id and last.topic_id != topic_id:
        return Progress(low, last.incarnation + 1, topic_id), [
            Lost(*key, last.offset, max(last.offset, high), low, high, RECREATED)
        ]
    if high < last.offset:
        # New records get offsets that are in files of this load.
        return Progress(high, last.incarnation + 1, known.topic_id), [
            Lost(*key, last.offset, last.offset, low, high, TRUNCATED)
        ]
    if last.offset < low:
        return Progress(low, last.incarnation, known.topic_id), [Lost(*key, last.offset, low, low, high, RETENTION)]
    return known, []


def make_tasks(
    extent: Extent, cores: int, max_records: int | None, leader_of: LeaderOf = no_leader
) -> list[list[Range]]:
    """The ranges of each task: at least one a core if there are records enough, small ones of one leader together.

    Ranges that are loaded again stay as they are, unless they have more than `max_records`.
    """
    again, new = [], []
    for key, place in sorted(extent.start.items()):
        at = place.offset
        for old in extent.again.get(key, ()):
            new.append(OffsetRange(*key, at, old.start))
            again.append(OffsetRange(*key, old.start, old.until))
            at = old.until
        new.append(OffsetRange(*key, at, extent.end[key]))
    new = [part for part in new if part.start < part.end]
    cut = SplitLimits(min(cores, sum(part.end - part.start for part in new) // _LEAST_RECORDS) or None, max_records)
    ranges = sorted([*split(again, SplitLimits(None, max_records), {}), *split(new, cut, {})])
    limits = SplitLimits(min(cores, extent.records // _LEAST_RECORDS) or None, max_records)
    return [
        [Range(*part, extent.start[part[:2]].incarnation, extent.start[part[:2]].topic_id) for part in ranges_of_task]
        for ranges_of_task in (pack(ranges, limits, leader_of) if max_records else _together(ranges, cores, leader_of))
    ]


def _together(ranges: list[OffsetRange], cores: int, leader_of: LeaderOf) -> list[list[OffsetRange]]:
    """The ranges of each task: small ones share tasks, as they are fetched together."""
    small = [part for part in ranges if part.end - part.start <= _SMALL]
    most = max(_SMALL, sum(part.end - part.start for part in small) // (_TASKS_OF_CORE * cores))
    together = in_turns(grouped(sorted_by_leader(small, leader_of), most, MOST_RANGES), leader_of)
    return [[part] for part in ranges if part.end - part.start > _SMALL] + together
