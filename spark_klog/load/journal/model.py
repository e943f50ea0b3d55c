"""What the files of a load hold: plans, tasks' results, manifests. All of them are JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from datetime import datetime, timezone
from functools import cache, partial
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from spark_klog.base.durable import check_version
from spark_klog.base.names import TopicPartition
from spark_klog.errors import LoadError

#: Version of the files; a load with another one is refused.
VERSION = 1
_T = TypeVar("_T")
_Of = TypeVar("_Of", "FileEntry", "Range", "RangeResult")
#: Milliseconds since the epoch, or before it. No other number in the files of a load is negative.
Time = Annotated[int, "milliseconds"]


@dataclass(frozen=True)
class FileEntry:
    """A file of records. `first` and `last` are the offsets that it covers."""

    path: str
    topic: str
    partition: int
    first: int
    last: int
    records: int
    size: int
    min_time: Time
    max_time: Time


@dataclass(frozen=True)
class Range:
    """Offsets [start, end) of a partition that a task reads. `topic_id` is "" if the brokers have none."""

    topic: str
    partition: int
    start: int
    end: int
    incarnation: int = 0
    topic_id: str = ""


@dataclass(frozen=True)
class RangeResult:
    """The outcome of a range: [start, until) was read. `error` says why it ends early, else it is "".

    `gaps` counts the offsets without a record by cause, `hours` the records by hour ("2026-11-23T10"), `dead_letters`
    names the files of what was not loaded: a corrupt batch each, and one of the `bad_values`, which did not parse.
    """

    topic: str
    partition: int
    start: int
    until: int
    records: int
    bytes: int
    min_time: Time | None
    max_time: Time | None
    gaps: dict[str, int]
    hours: dict[str, int]
    files: list[FileEntry]
    dead_letters: list[str]
    error: str = ""
    bad_values: int = 0

    @property
    def bad(self) -> int:
        """Corrupt batches, and records whose value or timestamp did not parse."""
        return len(self.dead_letters) - bool(self.bad_values) + self.bad_values

    @classmethod
    def joined(cls, ranges: Sequence[RangeResult], files: list[FileEntry]) -> RangeResult:
        """Adjacent ranges of a partition as one, with these files; its error is the first one."""
        gaps, hours = Counter[str](), Counter[str]()
        for each in ranges:
            gaps.update(each.gaps)
            hours.update(each.hours)
        letters = sorted({name for each in ranges for name in each.dead_letters})
        bad = sum(each.bad for each in ranges)  # two ranges may have one corrupt batch
        has_values = bad > len(letters) or any(each.bad_values for each in ranges)
        first = ranges[0]
        return cls(
            first.topic,
            first.partition,
            first.start,
            ranges[-1].until,
            sum(each.records for each in ranges),
            sum(each.bytes for each in ranges),
            min((each.min_time for each in ranges if each.min_time is not None), default=None),
            max((each.max_time for each in ranges if each.max_time is not None), default=None),
            dict(sorted(gaps.items())),
            dict(sorted(hours.items())),
            files,
            letters,
            next((each.error for each in ranges if each.error), ""),
            bad - len(letters) + 1 if has_values else 0,
        )


@dataclass(frozen=True)
class Plan:
    """The plan of a run: ranges by task. `settings` are those of `WriteSettings`, as JSON.

    `starts` has the partitions that lost records and those that are new, as `Manifest.offsets`: they go on there, also
    if no task reads them.
    `replaces` are ranges of earlier runs that this one loads again, as `asked` says ("" if it does not).
    """

    run: int
    started: str
    topics: list[str]
    tasks: list[list[Range]]
    settings: dict[str, Any]
    lost: list[dict[str, Any]] = field(default_factory=list)
    starts: dict[str, dict[str, Progress]] = field(default_factory=dict)
    replaces: list[RangeResult] = field(default_factory=list)
    asked: str = ""
    version: int = VERSION


@dataclass(frozen=True)
class PartitionAudit:
    """A partition in a run: offsets [start, until) were to be loaded up to `planned`; the log's end was `log_end`."""

    topic: str
    partition: int
    start: int
    until: int
    planned: int
    records: int
    bytes: int
    min_time: Time | None
    max_time: Time | None
    gaps: dict[str, int]
    bad: int
    log_end: int
    error: str = ""

    @property
    def lag(self) -> int:
        return max(0, self.log_end - self.until)

    @property
    def unexplained(self) -> int:
        """Offsets that were neither loaded nor named in `gaps`: 0, or the load has lost records."""
        return self.until - self.start - self.records - sum(self.gaps.values())


@dataclass(frozen=True)
class Progress:
    """The start of a partition's next run. A topic that was created again has another id and a higher incarnation."""

    offset: int
    incarnation: int = 0
    topic_id: str = ""


@dataclass(frozen=True)
class Manifest:
    """A committed run. `offsets` has all partitions of the load as {topic: {partition: Progress}}.

    `replaced` are ranges of earlier runs that this one has loaded again: their files are no longer the load's.
    """

    run: int
    started: str
    finished: str
    partitions: list[PartitionAudit]
    hours: dict[str, dict[str, int]]
    files: list[FileEntry]
    dead_letters: list[str]
    lost: list[dict[str, Any]]
    offsets: dict[str, dict[str, Progress]]
    replaced: list[RangeResult] = field(default_factory=list)
    version: int = VERSION

    def progress(self) -> dict[TopicPartition, Progress]:
        """The start of each partition's next run."""
        return progress_of(self.offsets)


@dataclass(frozen=True)
class Idle:
    """The findings of a call that had nothing to load, after run `run`."""

    run: int
    finished: str
    partitions: list[PartitionAudit]
    version: int = VERSION


@dataclass(frozen=True)
class Latest:
    """The pointer to the last committed run, by its name, and to its manifest."""

    run: str
    manifest: str
    finished: str
    version: int = VERSION


@dataclass(frozen=True)
class LettersInTopic:
    """Up to which number of transactions a topic, the one with this id, has the load's dead letters."""

    topic_id: str
    until: int
    version: int = VERSION


@dataclass(frozen=True)
class TaskResults:
    """What a task has loaded."""

    ranges: list[RangeResult]
    version: int = VERSION


def now_text() -> str:
    """The time of now, as the files have it."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def by_partition(items: Iterable[_Of]) -> defaultdict[TopicPartition, list[_Of]]:
    """Group what has a topic and a partition."""
    groups: defaultdict[TopicPartition, list[_Of]] = defaultdict(list)
    for each in items:
        groups[each.topic, each.partition].append(each)
    return groups


def progress_of(offsets: dict[str, dict[str, Progress]]) -> dict[TopicPartition, Progress]:
    """Progress by partition of what `offsets_json` has made."""
    return {(topic, int(number)): progress for topic, each in offsets.items() for number, progress in each.items()}


def offsets_json(progress: dict[TopicPartition, Progress]) -> dict[str, dict[str, Progress]]:
    """The other way of `progress_of`."""
    offsets: dict[str, dict[str, Progress]] = {}
    for (topic, partition), of_partition in sorted(progress.items()):
        offsets.setdefault(topic, {})[str(partition)] = of_partition
    return offsets


def from_json(kind: type[_T], value: Any, where: str) -> _T:
    """A dataclass of this module from its JSON; `LoadError` names the file `where` and what is wrong in it.

    Fields that are not known are passed over, see `check_version`.
    """
    _, readers = _fields(cast(Any, kind))
    if isinstance(value, dict) and "version" in readers:
        check_version(value.get("version"), VERSION, where, "load into another --output or --table", LoadError)
    try:
        made: _T = _build(kind, value)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise LoadError(f"{where} is not what a run has written ({error}): restore it") from None
    return made


def _build(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise TypeError(f"no JSON object for {kind.__name__}")
    required, readers = _fields(kind)
    if missing := [name for name in required if name not in value]:
        raise ValueError(f"without {', '.join(missing)}")
    values = {}
    for name in value.keys() & readers.keys():
        try:
            values[name] = readers[name](value[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return kind(**values)


@cache
def _fields(kind: Any) -> tuple[list[str], dict[str, Callable[[Any], Any]]]:
    """The fields of a dataclass that must be there, and what reads each of them."""
    required = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    hints = get_type_hints(kind, include_extras=True)
    return required, {name: _reader(hint) for name, hint in hints.items()}


def _reader(hint: Any) -> Callable[[Any], Any]:
    """What reads JSON of a type; it raises ValueError for others, and for numbers that can't be: people edit files."""
    if is_dataclass(hint):
        return partial(_build, hint)
    container, arguments = get_origin(hint), get_args(hint)
    if container in (list, dict):
        return partial(_read_all, container, _reader(arguments[-1]))
    if hint is Any:
        return lambda value: value
    kinds = arguments if container in (UnionType, Union) else (hint,)
    return partial(_checked, [int if kind == Time else kind for kind in kinds], Time in kinds)


def _read_all(container: Any, read: Callable[[Any], Any], value: Any) -> Any:
    if type(value) is not container:
        raise ValueError(repr(value))
    return [read(each) for each in value] if container is list else {key: read(each) for key, each in value.items()}


def _checked(kinds: Collection[Any], may_be_negative: bool, value: Any) -> Any:
    if type(value) not in kinds or (type(value) is int and value < 0 and not may_be_negative):
        raise ValueError(repr(value))
    return value
