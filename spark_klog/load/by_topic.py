"""The loads of a job: one of all its topics, or one for each topic, into an output of its own.

`--output '/lake/{topic}'` is an output by topic, as is `/lake/{topic[1]}/{topic[2]}`, in which `{topic[1]}` is the
second part of the topic's name between dots. Each topic is then a load with a journal and commits
of its own, and they run side by side (`driving.py`). A round looks at the cluster once, for all of them: a load that
had loaded everything in the round before, and whose topic has not changed since, is not opened at all.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from spark_klog.base.addresses import without_user
from spark_klog.base.clock import doubled
from spark_klog.base.names import TopicPartition, topic_pattern
from spark_klog.base.settings import some_of
from spark_klog.client.cluster import Cluster, numbers_of
from spark_klog.client.offsets import list_offsets, offsets_of_led
from spark_klog.client.retry import Lasting
from spark_klog.errors import ConfigError, DataLossError, ErrorCode, KlogError, LoadError, ProtocolError
from spark_klog.load.driving import Follow, Steps, drive
from spark_klog.load.journal import paths
from spark_klog.load.journal.model import Idle, PartitionAudit, Plan, from_json
from spark_klog.load.journal.store import Store, open_store, read_json
from spark_klog.load.letter_topic import SCHEME
from spark_klog.load.places import AtOffsets, Place
from spark_klog.load.planning import Look, partitions_of
from spark_klog.load.run import Loaded, LoadOptions, Publish, Shared, load_steps
from spark_klog.load.settings import LOSS_ADVICE
from spark_klog.load.tasks.task import SparkRunner
from spark_klog.load.tasks.time_limit import TimeLimit
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.records import EARLIEST, LATEST
from spark_klog.spark.read.ranges import DELETED
from spark_klog.tables.opening import LOADING, catalog_tables, kind_and_folder, open_table, takes_plain_names
from spark_klog.tables.table import LETTERS, STREAMS

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
#: The longest pause after failures in seconds, if the interval between rounds is not longer.
LONGEST_PAUSE = 300.0
#: Anything that looks like a field, so that a mistyped one is refused.
_MARK = re.compile(r"\{[^{}]*\}|\{\s*topic", re.IGNORECASE)
_FIELD = re.compile(r"\{topic(?:\[(-?[0-9]{1,3})\])?\}")
_NOT_PLAIN = re.compile(r"[^0-9A-Za-z_]")
#: How long leaders may take before a round loads the topics of the others first.
_ANSWER_MS = 5000.0
#: How long a round waits for others than these if all topics have one output: for leaders that are moving.
_MOVING_MS = 1000.0
#: Seconds between the first two warnings of what rounds leave out.
_FIRST_WARNING = 10.0
#: How long a topic that the pattern has matched is looked for before it counts as deleted.
_GONE_SECONDS = 20.0


def is_by_topic(output: str) -> bool:
    """Whether an output has a field, so that each topic has its own. `example_of` refuses those that there are not."""
    return _MARK.search(output) is not None


def example_of(output: str) -> str:
    """An output by topic as that of some topic; `ConfigError` for other fields than {topic} and {topic[N]}."""
    if is_by_topic(_FIELD.sub("", output)):
        raise ConfigError(
            f"{without_user(output)}: write {{topic}}, or {{topic[0]}}, {{topic[1]}} ... for its parts between dots"
        )
    most = max((abs(int(number or 0)) for number in _FIELD.findall(output)), default=0)
    return output_of(output, ".".join(["topic"] * (most + 1)))


def output_of(output: str, topic: str) -> str:
    """The output of a topic; `ConfigError` if its name has too few parts.

    In the name of a catalog's table all characters but letters, digits and _ become _: dots separate its namespaces,
    and few engines take others without quotes. Folders have the topic's name as it is.
    """
    is_plain = takes_plain_names(output)
    parts = topic.split(".")

    def text(match: re.Match[str]) -> str:
        try:
            part = topic if match[1] is None else parts[int(match[1])]
        except IndexError:
            part = ""
        if not part:
            place = without_user(output)
            raise ConfigError(f"topic {topic} has no part for {match[0]} of {place}: leave it out of the topics")
        return _NOT_PLAIN.sub("_", part) if is_plain else part

    return _FIELD.sub(text, output)


@dataclass(frozen=True)
class Outcome:
    """What a load has come to in a round: `loaded`, or the `error` that ended it. `topic` is "" for a load of several
    topics, `letters` the table of its dead letters, "" without one. `failures` are its rounds in a row, up to this one,
    that it or some of its partitions have failed.
    """

    topic: str
    output: str
    loaded: Loaded | None
    error: Exception | None = None
    failures: int = 0
    letters: str = ""

    @property
    def has_failed(self) -> bool:
        return self.loaded is None or bool(self.loaded.failed)

    @property
    def has_news(self) -> bool:
        return self.has_failed or (self.loaded is not None and bool(self.loaded.runs))

    @property
    def lag(self) -> int | None:
        """Records that the log had when the run planned, and that are not loaded; None after an error, and if the run
        has not looked at all partitions."""
        if self.loaded is None or self.loaded.left_out:
            return None
        return sum(part.lag for part in self.loaded.partitions)


@dataclass(frozen=True)
class _Known:
    """The last outcome of a load, what the look before it had found, and when it is tried again after a failure."""

    outcome: Outcome
    look: Look | None
    held_until: float

    def is_up_to_date(self, look: Look | None) -> bool:
        """Whether the load had nothing to do by the look before, and has nothing to do by this one."""
        if look is None or self.look is None or self.outcome.has_news or self.outcome.lag:
            return False
        return (look.ids, look.end) == (self.look.ids, self.look.end)


class Loads:
    """The loads of a job, round by round: of these topics, or of those that match a pattern.

    `asked` says all else, and the output if it is none by topic, as are the tables of dead `letters`. Topics that a
    round has met belong to all later ones, so that one that is lost is named. `every` is in seconds from round to
    round. `around` may do something before and after the steps of a load. A round that `is_stopping` begins no further
    loads. If it `follows` the topics, a later round loads the partitions that have no leader now; otherwise it waits
    for them for `request.timeout.ms`.
    """

    def __init__(
        self,
        asked: LoadOptions,
        topics: Sequence[str],
        pattern: str | None,
        output: str,
        runner: SparkRunner,
        follow: Follow,
        publish: Publish | None = None,
        every: float = 0.0,
        around: Callable[[LoadOptions, Steps[Loaded]], Steps[Loaded]] = lambda _options, steps: steps,
        is_stopping: Callable[[], bool] = lambda: False,
        letters: str = "",
        *,
        follows: bool = False,
    ) -> None:
        self._asked, self._runner, self._follow, self._publish = asked, runner, follow, publish
        self._every, self._around, self._is_stopping = every, around, is_stopping
        self._limit = TimeLimit(asked.max_seconds)
        self._pattern = None if pattern is None else topic_pattern(f"--topics-pattern {pattern}", pattern)
        self._topics = dict.fromkeys(topics)
        self._known: dict[str, _Known] = {}
        self._output, self._letters, self._follows = output, letters, follows
        #: If all topics have one output: the last that is known of each partition, and since when topics of the pattern
        #: are missing.
        self._parts: dict[TopicPartition, PartitionAudit] = {}
        self._missing: dict[str, float] = {}
        #: When to warn of what rounds leave out.
        self._telling: Lasting | None = None
        self.is_by_topic = is_by_topic(output)

    def round(self) -> list[Outcome]:
        """Load what is new, each load for itself; errors of loads are in their outcomes.

        `ConfigError` if no topic matches, or if offsets are given for others; `DataLossError` if a topic that the
        pattern has matched was deleted before all of it was loaded; errors as of `Cluster.connect`. If all topics have
        one output, also `LoadError` if one of them does not exist, and the errors of partitions if none has an answer.
        """
        began, self._limit = time.monotonic(), TimeLimit(self._asked.max_seconds)
        with Cluster.connect(self._asked.client) as cluster:
            looks: Mapping[str, Look] = {}
            metadata: Mapping[str, Message] = {}
            if self.is_by_topic or self._pattern is not None:
                metadata = cluster.metadata(None if self._pattern is not None else list(self._topics))
                self._meet(metadata)
            if self.is_by_topic:
                outcomes, looks = self._by_topic(cluster, metadata, began)
            else:
                # with a place to begin or to end at, all partitions have to be there
                if self._asked.start is None and self._asked.until is None:
                    looks = {"": self._look_at_all(cluster, metadata)}
                outcomes = self._drive(cluster, {"": replace(self._asked, topics=list(self._topics))}, looks)
                if (loaded := outcomes[0].loaded) is not None:
                    self._parts |= {(part.topic, part.partition): part for part in loaded.partitions}
        for outcome in outcomes:
            pause = doubled(self._every, max(self._every, LONGEST_PAUSE), outcome.failures + 1)
            held_until = began + pause - self._every / 2 if outcome.failures else 0.0
            before = self._known.get(outcome.topic)
            if before is None or before.outcome is not outcome:
                self._known[outcome.topic] = _Known(outcome, looks.get(outcome.topic), held_until)
        return outcomes

    def _meet(self, metadata: Mapping[str, Message]) -> None:
        """Take up the topics that the pattern matches; it leaves out internal ones, as the source and consumers do."""
        pattern = self._pattern
        if pattern is None:
            return
        for name in sorted(metadata):
            if not metadata[name]["is_internal"] and pattern.fullmatch(name):
                self._topics[name] = None
        if not self.is_by_topic:
            self._forget_deleted(metadata)
        if not self._topics:
            servers = self._asked.client["bootstrap.servers"]
            names = (name for name in sorted(metadata) if not metadata[name]["is_internal"] and pattern.search(name))
            part = next(names, "")
            advice = f": whole names have to match, and of {part} only a part does" if part else ""
            raise ConfigError(f"--topics-pattern {pattern.pattern} matches no topic at {servers}{advice}")

    def _forget_deleted(self, metadata: Mapping[str, Message]) -> None:
        """Leave out topics that the pattern has matched and that have been missing for a while.

        `DataLossError` if the load is known to lack records of them, and fails for that.
        """
        now = time.monotonic()
        self._missing = {name: self._missing.get(name, now) for name in self._topics if name not in metadata}
        gone = {name: None for name, since in self._missing.items() if now - since >= _GONE_SECONDS}
        for name in gone:
            del self._topics[name], self._missing[name]
        parts = [self._parts.pop(key) for key in sorted(self._parts) if key[0] in gone]
        lost = [f"{part.topic}-{part.partition} [{part.until}, {part.log_end})" for part in parts if part.lag]
        if not gone:
            return
        said = f"deleted, or hidden from this user: {some_of([f'topic {name}' for name in gone])}"
        if lost:
            said += f"; not loaded of what the log had at the last look: {some_of(lost)}"
            if self._asked.fail_on_loss:
                raise DataLossError(f"{said}; {LOSS_ADVICE}", DELETED)
        _log.warning("the load goes on without what was %s", said)

    def _look_at_all(self, cluster: Cluster, metadata: Mapping[str, Message]) -> Look:
        """A look at all topics, which are loaded into one output, without partitions that have no leader that answers.

        `LoadError` if a topic does not exist, unless a pattern has matched it; the error of a partition if none has an
        answer.
        """
        left_out: dict[str, KlogError] = {}
        if self._pattern is None:
            ids = partitions_of(cluster, list(self._topics))
        else:
            ids = {key: str(cluster.topic_ids.get(key[0], "")) for key in _keys(metadata, self._topics)}
            for name in self._topics.keys() - {topic for topic, _ in ids}:
                code = metadata[name]["error_code"] if name in metadata else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                left_out[f"topic {name}"] = ProtocolError(code, f"topic {name}")
        last = self._known[""].outcome.loaded if "" in self._known else None
        loaded = {} if last is None else last.offsets
        first, end, failed = _offsets(cluster, list(ids), loaded, _ANSWER_MS)
        if failed:
            with suppress(KlogError), cluster.within(_MOVING_MS if self._follows and end else math.inf):
                list_offsets(cluster, dict.fromkeys(failed, LATEST))
            cluster.metadata(sorted({topic for topic, _ in failed}))
            late_first, late_end, failed = _offsets(cluster, list(failed), loaded, _MOVING_MS)
            first, end = first | late_first, end | late_end
        left_out |= {f"{topic}-{number}": failed[topic, number] for topic, number in sorted(failed)}
        ids = {key: topic_id for key, topic_id in ids.items() if key not in failed}
        if left_out and not ids:
            raise next(iter(left_out.values()))
        if not left_out:
            self._telling = None
        elif self._follows:
            self._telling = self._telling or Lasting(0.0, _FIRST_WARNING, LONGEST_PAUSE)
            if self._telling.is_due(time.monotonic()):
                names = [f"{name} ({error})" for name, error in left_out.items()]
                _log.warning("not loaded in this round, as no broker answers for them: %s", some_of(names))
        end = {key: end[key] for key in ids}
        return Look(ids, end, {key: first[key] for key in ids if key in first}, left_out)

    def _by_topic(
        self, cluster: Cluster, metadata: Mapping[str, Message], now: float
    ) -> tuple[list[Outcome], Mapping[str, Look]]:
        """The outcomes of all topics, and the looks at them.

        Topics of which a partition has no leader are waited for once, together, when the others are loaded, unless
        their last round has failed.
        """
        _check_offsets((self._asked.start, self._asked.until), self._topics)
        loads = [known.outcome.loaded for known in self._known.values()]
        loaded = {key: at for load in loads if load is not None for key, at in load.offsets.items()}
        looks, lost = _look(cluster, metadata, self._topics, loaded, _ANSWER_MS)
        waits = [topic for topic in lost if not self._failures(topic)]
        outcomes = self._loaded(cluster, [topic for topic in self._topics if topic not in waits], looks, lost, now)
        if waits and not self._is_stopping():
            with suppress(KlogError):
                list_offsets(cluster, dict.fromkeys(_keys(metadata, waits), LATEST))
            with suppress(KlogError):
                again, lost = _look(cluster, cluster.metadata(waits), waits, loaded)
                looks |= again
            outcomes |= self._loaded(cluster, waits, looks, lost, now)
        return [outcomes[topic] for topic in self._topics if topic in outcomes], looks

    def _loaded(
        self,
        cluster: Cluster,
        topics: Iterable[str],
        looks: Mapping[str, Look],
        lost: Mapping[str, KlogError],
        now: float,
    ) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        begun: dict[str, LoadOptions] = {}
        outputs, refused = self._outputs()
        others_go_on = any(not known.outcome.has_failed for known in self._known.values())
        for topic in topics:
            known = self._known.get(topic)
            if topic in refused:
                outcomes[topic] = Outcome(topic, self._output, None, refused[topic], self._failures(topic) + 1)
            elif known and (known.is_up_to_date(looks.get(topic)) or (others_go_on and now < known.held_until)):
                outcomes[topic] = known.outcome
            elif topic in lost:
                outcomes[topic] = Outcome(topic, outputs[topic][0], None, lost[topic], self._failures(topic) + 1)
            else:
                begun[topic] = self._options_of(topic, *outputs[topic])
        return outcomes | {outcome.topic: outcome for outcome in self._drive(cluster, begun, looks)}

    def _outputs(self) -> tuple[dict[str, tuple[str, str]], dict[str, ConfigError]]:
        """The topics' outputs and tables of dead letters (""), and why others have none: two topics may not share one.

        One topic's dead letters may not go into another one's output, such as orders_dlq.
        """
        outputs: dict[str, tuple[str, str]] = {}
        refused: dict[str, ConfigError] = {}
        same: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for topic in self._topics:
            try:
                letters = self._letters and output_of(self._letters, topic)
                outputs[topic] = output_of(self._output, topic), letters
            except ConfigError as error:
                refused[topic] = error
            else:
                for place in filter(None, outputs[topic]):
                    same[place][topic] = None
        for place, topics in same.items():
            if len(topics) > 1:
                names = some_of(list(topics), separator=" and ")
                why = f"topics {names} would both be loaded into {place}: name more of their parts"
                if any(outputs[topic][1] == place for topic in topics):
                    why = f"topics {names} would share {place} for dead letters: give them another name"
                refused |= {topic: ConfigError(why) for topic in topics}
        return outputs, refused

    def _options_of(self, topic: str, output: str, letters: str) -> LoadOptions:
        start, until = (_only(place, topic) for place in (self._asked.start, self._asked.until))
        return replace(self._asked, topics=[topic], output=output, start=start, until=until, dead_letters=letters)

    def _drive(self, cluster: Cluster, begun: Mapping[str, LoadOptions], looks: Mapping[str, Look]) -> list[Outcome]:
        shared, limit = Shared(cluster), self._limit
        steps = [
            self._around(options, load_steps(options, shared, limit, self._publish, looks.get(topic)))
            for topic, options in begun.items()
        ]
        ended = drive(steps, self._runner, limit, self._follow, self._is_stopping)
        return [self._outcome(topic, options, end) for (topic, options), end in zip(begun.items(), ended, strict=False)]

    def _outcome(self, topic: str, options: LoadOptions, end: Loaded | Exception) -> Outcome:
        error = end if isinstance(end, Exception) else None
        loaded = None if isinstance(end, Exception) else end
        letters = "" if options.dead_letters.startswith(SCHEME) else options.dead_letters
        outcome = Outcome(topic, options.output, loaded, error, letters=letters)
        return replace(outcome, failures=self._failures(topic) + 1) if outcome.has_failed else outcome

    def _failures(self, topic: str) -> int:
        return self._known[topic].outcome.failures if topic in self._known else 0


def _look(
    cluster: Cluster,
    metadata: Mapping[str, Message],
    topics: Iterable[str],
    loaded: Mapping[TopicPartition, int],
    answer_ms: float = math.inf,
) -> tuple[dict[str, Look], dict[str, KlogError]]:
    """One look at all topics, and the errors of those of which a partition has no leader that answers in time.

    First offsets are asked of partitions that do not end where the loads have come to (`loaded`).
    Topics of which nothing is known are in neither: their loads look for themselves, and have the error.
    """
    ids: dict[str, dict[TopicPartition, str]] = {}
    for topic, number in _keys(metadata, topics):
        ids.setdefault(topic, {})[topic, number] = str(cluster.topic_ids.get(topic, ""))
    try:
        first, end, failed = _offsets(cluster, [key for keys in ids.values() for key in keys], loaded, answer_ms)
    except KlogError:
        return {}, {}
    errors = {key[0]: failed[key] for key in sorted(failed)}
    return {
        topic: Look(keys, {key: end[key] for key in keys}, {key: first[key] for key in keys if key in first})
        for topic, keys in ids.items()
        if topic not in errors
    }, errors


def _keys(metadata: Mapping[str, Message], topics: Iterable[str]) -> list[TopicPartition]:
    """The partitions of topics, without the topics of which nothing is known."""
    keys: list[TopicPartition] = []
    for topic in topics:
        with suppress(ProtocolError):
            keys += [(topic, number) for number in numbers_of(metadata, [topic])[topic]]
    return keys


def _offsets(
    cluster: Cluster, keys: Sequence[TopicPartition], loaded: Mapping[TopicPartition, int], answer_ms: float
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int], dict[TopicPartition, KlogError]]:
    """The first offsets and the ends of partitions, and the errors of those without; errors as of `offsets_of_led`.

    Of those that end where they are `loaded` to, no first offset is asked.
    """
    with cluster.within(answer_ms):
        end, without_end = offsets_of_led(cluster, dict.fromkeys(keys, LATEST))
    news = [key for key, at in end.items() if loaded.get(key) != at]
    with cluster.within(answer_ms):
        first, without_first = offsets_of_led(cluster, dict.fromkeys(news, EARLIEST))
    return first, end, without_first | without_end


def _only(place: Place | None, topic: str) -> Place | None:
    """The same place, without the offsets of other topics."""
    if not isinstance(place, AtOffsets):
        return place
    return replace(place, offsets={key: offset for key, offset in place.offsets.items() if key[0] == topic})


def _check_offsets(places: Sequence[Place | None], topics: Iterable[str]) -> None:
    """`ConfigError` if a file has offsets of topics that are not loaded."""
    for place in places:
        others = {key[0] for key in place.offsets} - set(topics) if isinstance(place, AtOffsets) else ()
        if isinstance(place, AtOffsets) and others:
            raise ConfigError(f"{place.file}: topic {min(others)} is not loaded")


def existing(output: str) -> dict[str, str]:
    """The outputs by topic that are there and have loads of their topic, sorted, each with "".

    One with a load of another topic, or of several, is left out: it was made by another address. One that can't be read
    has the error: whose it is is not known, so that nothing may be done with it. Errors as of `example_of`,
    `open_store` and `catalog_tables`.
    """
    example_of(output)
    pattern = _matching(output)
    if takes_plain_names(output):
        listed = [address for address in catalog_tables(output[: output.index("{")]) if pattern.fullmatch(address)]
        return _of_loads(output, sorted(listed), str, _catalog_load)
    kind, place = kind_and_folder(output)
    place, query, options = place.partition("?")
    first = place[: place.index("{")].rpartition("/")[0]
    store = open_store(f"{first or '.'}{query}{options}")
    there = [""]
    for part in place[len(first) :].strip("/").split("/"):
        names = _matching(part)
        there = [
            f"{above}/{name}".strip("/")
            for above in there
            for name in (store.names(above) if is_by_topic(part) else [part])
            if names.fullmatch(name)
        ]
    beginning = f"{kind}{first}{'/' if first or place[0] == '/' else ''}"

    def address(path: str) -> str:
        return f"{beginning}{path}{query}{options}"

    return _of_loads(output, sorted(there), address, lambda path: _topics_of(store, f"{path}/"))


def _catalog_load(address: str) -> set[str] | None:
    """As `_topics_of`, of a catalog's table."""
    table = open_table(address)
    owner = table.load_id() or STREAMS
    if owner == STREAMS or owner.endswith(LETTERS):
        return None
    return _topics_of(open_store(table.location, of_table=True), "") or set()


def _topics_of(store: Store, folder: str) -> set[str] | None:
    """The topics of the load in a folder, none before it knows one; None if there is no load."""
    if (value := read_json(store, path := f"{folder}{paths.plan(1)}")) is not None:
        return set(from_json(Plan, value, f"{store.address}/{path}").topics)
    if (value := read_json(store, path := f"{folder}{paths.IDLE}")) is not None:
        return {part.topic for part in from_json(Idle, value, f"{store.address}/{path}").partitions}
    return None if store.size(f"{folder}{paths.LOAD}") is None else set()


def _of_loads(
    output: str, paths_there: Iterable[str], address: Callable[[str], str], topics_of: Callable[[str], set[str] | None]
) -> dict[str, str]:
    """The addresses of those paths that have a load of their topic, and of which that can't be told, with the error."""
    made = {}
    for path in paths_there:
        try:
            topics = topics_of(path)
            if topics is not None and (not topics or _is_output_of(output, topics, address(path))):
                made[address(path)] = ""
        except (KlogError, OSError) as error:
            made[address(path)] = str(error)
    return made


def _is_output_of(output: str, topics: set[str], place: str) -> bool:
    """Whether the output of a load's topic is this place, whose case a catalog may have changed."""
    with suppress(ConfigError):  # the topic has too few parts
        return [_plain(output_of(output, topic)) for topic in topics] == [_plain(place)]
    return False


def _plain(place: str) -> str:
    """A place without slashes that do nothing, in lower case."""
    return re.sub(r"/+(?=[/?]|$)", "", place).lower()


def of_each(output: str, work: Callable[[str], _T], at_once: int = 1) -> Iterator[tuple[str, _T | str]]:
    """The loads in an output by topic, each with what `work` returns for it, or the text of its error.

    Errors of an output that is none by topic are raised. `LoadError` if there is no load; errors as of `existing`.
    """

    def outcome(place: str) -> _T | str:
        try:
            return places[place] or work(place)
        except (KlogError, OSError) as error:
            return str(error)

    if not is_by_topic(output):
        yield output, work(output)
        return
    if not (places := existing(output)):
        raise LoadError(f"{without_user(output)} has no loads: name the --output or --table of `{LOADING}`")
    if at_once == 1:  # in the caller's thread, which an interrupt ends at once
        yield from zip(places, map(outcome, places), strict=True)
        return
    threads = ThreadPoolExecutor(at_once)
    try:
        yield from zip(places, threads.map(outcome, places), strict=True)
    finally:
        threads.shutdown(cancel_futures=True)  # an interrupt waits for those alone that have begun


def _matching(text: str) -> re.Pattern[str]:
    """What the text is for any topic."""
    return re.compile(".+".join(map(re.escape, _FIELD.split(text)[::2])))
