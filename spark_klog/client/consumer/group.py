"""What a consumer's group does by either protocol: commits, the listener, the end of a call or of the consumer.

What waits is steps (`client/requests.py`): a consumer's call makes them, heartbeats go on beside its calls.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol
from uuid import UUID

from spark_klog.base.clock import doubled
from spark_klog.base.interrupts import between_steps
from spark_klog.base.names import TopicPartition
from spark_klog.client.answers import answer_error
from spark_klog.client.cluster import UNKNOWN_TOPIC, Cluster
from spark_klog.client.consumer.assignment import Assignment, Troubles
from spark_klog.client.consumer.commits import Commits
from spark_klog.client.consumer.settings import ConsumerConfig
from spark_klog.client.net.waiting import Waker, wait_until_ready
from spark_klog.client.offsets import Committed, GroupMetadata, GroupOffsets
from spark_klog.client.requests import Steps, run
from spark_klog.client.retry import pause_seconds
from spark_klog.errors import (
    CallInterrupted,
    CommitFailed,
    ConnectionFailed,
    ErrorCode,
    KlogError,
    MemberFenced,
    ProtocolError,
    RequestTimedOut,
    is_retriable,
)
from spark_klog.protocol.apis import METADATA

_log = logging.getLogger(__name__)
#: Seconds that closing may take, as in Kafka.
CLOSE_SECONDS = 30.0
#: What limits the requests of a close, for messages.
_CLOSE_LIMIT = "the timeout of close, at most request.timeout.ms"
#: Seconds without an answer of any broker after which a close gives up: time to connect again after a break.
PATIENCE = 1.0
#: Seconds that `Heartbeating.stop` waits; a request in flight then ends by request.timeout.ms.
_STOP_SECONDS = 5.0
#: Seconds until the next lookup if no broker answered, or if subscribed topics do not exist: doubled up to the latter.
_MISSING_SECONDS, _LONGEST_SECONDS = 1.0, 10.0
#: Partitions that a topic is taken to have, and so many more in all after each answer that was late, as often as that.
_OF_A_TOPIC, _MORE, _MOST_LATE = 10, 5000, 5


class RebalanceListener:
    """Callbacks for rebalances; subclass it. The polling thread calls all methods, within `poll`.

    They may call `commit`, `seek`, `position` and so on of the consumer, but neither `poll` nor `close`. `on_revoked`
    (or `on_lost`) is also called within `close` and `unsubscribe`. What a method raises, these calls raise when their
    work is done.

    For a consumer of `spark_klog.aio` methods may be coroutine functions, which may await these calls.
    """

    def on_assigned(self, partitions: list[TopicPartition]) -> Awaitable[None] | None:
        """Called for new partitions; they start at the committed offsets unless the listener seeks."""
        return None

    def on_revoked(self, partitions: list[TopicPartition]) -> Awaitable[None] | None:
        """Called before partitions are given up: the last chance to commit."""
        return None

    def on_lost(self, partitions: list[TopicPartition]) -> Awaitable[None] | None:
        """Called if another member may already own the partitions: commits fail. By default calls `on_revoked`."""
        return self.on_revoked(partitions)


class Beside(Protocol):
    """What an event loop does for a consumer's group, in place of a thread and of plain calls."""

    def start(self, steps: Steps[None]) -> Callable[[], None]:
        """Make steps beside the consumer's calls; the function that is returned ends them."""

    def wake(self) -> None:
        """Go on with the steps that wait: what they wait for may have changed."""

    def called(
        self, call: Callable[[list[TopicPartition]], Awaitable[None] | None], partitions: list[TopicPartition]
    ) -> Steps[None]:
        """Call a listener, and wait for what is to be awaited."""


class Heartbeating(ABC):
    """Sends the heartbeats of one member, over a cluster of its own. Calls `on_news` if it has some.

    A thread does so, or a loop (`beside`).
    """

    def __init__(self, config: ConsumerConfig, on_news: Callable[[], None], beside: Beside | None = None) -> None:
        self._config, self._group, self._on_news = config, config.group_id or "", on_news
        self._beside = beside
        #: Ends the steps on a loop.
        self._end: Callable[[], None] | None = None
        self._lock = threading.RLock()
        #: Ends a wait of the thread.
        self._waker: Waker | None = None
        #: When the program has polled last: max.poll.interval.ms begins then.
        self.polled_at = time.monotonic()
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self.cluster = Cluster(config.client)

    def _start(self) -> None:
        """Start the thread, or the steps, unless they run."""
        if self._beside is not None:
            self._end = self._end or self._beside.start(self._beating())
        elif self._thread is None or not self._thread.is_alive():
            self._waker = Waker()
            self._thread = threading.Thread(target=self._run, args=(self._waker,), name="klog-heartbeats", daemon=True)
            self._thread.start()

    @abstractmethod
    def _beating(self) -> Steps[None]:
        """Send heartbeats until `_is_stopping`, and close the cluster."""

    def _tell_changes(self) -> None:
        """Have the steps go on; the lock is held."""
        if self._beside is not None:
            self._beside.wake()
        elif self._waker is not None:
            self._waker.wake()

    def _run(self, waker: Waker) -> None:
        """Make the steps in this thread."""
        try:
            for wait in self._beating():
                if not wait.is_over:
                    wait_until_ready((*wait.connections, waker), wait.until - time.monotonic())
                waker.clear()
        finally:
            with self._lock:
                waker.close()

    def close_sockets(self) -> None:
        """Close this process' copies of the sockets, and send nothing: for a forked process."""
        self.cluster.close()
        if self._waker is not None:
            self._waker.close()

    def stop(self, deadline: float) -> None:
        """Stop the thread; wait for it to the deadline, a reading of `time.monotonic`, at most 5 s."""
        with self._lock:
            self._is_stopping = True
            self._tell_changes()
        self.cluster.patience = 0.0
        if self._end is not None:
            self._end()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(max(0.0, min(_STOP_SECONDS, deadline - time.monotonic())))


class SubscribedTopics:
    """The subscription of one group member: topics, a pattern, or both. It is false if there is neither.

    A pattern is compiled, and resolved here, or the text of a regular expression, which the coordinator resolves.

    `look` raises what `Cluster.metadata` raises, and `ProtocolError` for a topic that the member may not read.
    """

    def __init__(self, cluster: Cluster, config: ConsumerConfig) -> None:
        self._cluster, self._config = cluster, config
        self._topics: frozenset[str] = frozenset()
        self._pattern: re.Pattern[str] | None = None
        #: The regular expression that the coordinator resolves; "" if there is none.
        self.regex = ""
        #: When `look` does its next lookup, a reading of `time.monotonic`, and when that of all topics is due.
        self.look_at = self._all_at = -math.inf
        #: Lookups in a row that have not found all topics.
        self._lookups = 0
        #: Partition counts of the topics in the last lookup; 0: the topic does not exist.
        self._counts: dict[str, int] = {}
        #: The partition counts that this member assigned as the group's leader; None if it is not the leader.
        self.assigned_for: dict[str, int] | None = None
        #: The missing topics of the last warning.
        self._missing: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._topics) or self._pattern is not None or bool(self.regex)

    @property
    def names(self) -> frozenset[str]:
        """The names that the member subscribes to at the coordinator."""
        return self._topics if self._pattern is None else frozenset(self._counts)

    def lacking(self, late: int) -> int:
        """How many partitions the next `look` is about, as far as that is known, after so many late answers."""
        if time.monotonic() < self.look_at and not late:
            return 0
        return max(sum(self._counts.values()) or _OF_A_TOPIC * len(self._topics), more_for(late))

    def subscribe(self, topics: Collection[str], pattern: re.Pattern[str] | str | None) -> None:
        """Replace the subscription; the next `look` looks the topics up."""
        self._topics = frozenset(topics)
        self._pattern, self.regex = (None, pattern) if isinstance(pattern, str) else (pattern, "")
        self._counts = {}
        self.look_at = self._all_at = -math.inf
        self._lookups, self._missing = 0, []

    def assigned(self, counts: dict[str, int] | None) -> None:
        """Note the partition counts that this member has assigned as the group's leader; None if it is not the leader.

        If the last lookup had others, one of the two was wrong: the next one comes soon.
        """
        self.assigned_for = counts
        if counts is not None and any(self._counts.get(topic, count) != count for topic, count in counts.items()):
            self.look_at = min(self.look_at, time.monotonic() + _MISSING_SECONDS)
            self._all_at = self.look_at

    def look(self, now: float) -> Steps[bool]:
        """Look the topics up if it is time; return whether the member must join again.

        The leader joins again if a topic has new partitions, a member with a pattern if other topics match.
        """
        if now < self.look_at:
            return False
        if not self._topics and self._pattern is None:
            self.look_at = math.inf
            return False
        age = self._config.client.metadata_max_age_ms / 1000
        self.look_at = now + min(age, _MISSING_SECONDS)  # unless a broker answers
        must_rejoin = False
        subscribed = self._topics, self._pattern
        known = {} if now >= self._all_at else {topic: count for topic, count in self._counts.items() if count}
        wanted = None if self._pattern is not None else self._topics - known.keys()
        counts = yield from counted(self._cluster, self._config, wanted)
        if (self._topics, self._pattern) != subscribed:  # there is another subscription since
            self.look_at = -math.inf
            return False
        if not known or self._pattern is not None:
            self._all_at = now + age
        if self._pattern is not None:
            matching = {topic for topic, count in counts.items() if count and self._pattern.fullmatch(topic)}
            counts = {topic: counts.get(topic, 0) for topic in matching | self._topics}
            must_rejoin = _existing(counts) != _existing(self._counts)
        else:
            counts = known | counts
        self._counts = counts
        has_no_match = not self._topics and not counts and self._pattern is not None
        self._lookups = self._lookups + 1 if has_no_match or 0 in counts.values() else 0
        pause = doubled(_MISSING_SECONDS, _LONGEST_SECONDS, self._lookups) if self._lookups else math.inf
        self.look_at = min(now + pause, self._all_at)
        self._warn_of_missing()
        if self.assigned_for is not None:
            shared = self.assigned_for.keys() & counts.keys()
            must_rejoin |= any(self.assigned_for[topic] != counts[topic] for topic in shared)
        return must_rejoin

    def _warn_of_missing(self) -> None:
        """Log the subscribed topics that do not exist, unless they are those of the last warning."""
        existing = _existing(self._counts)
        missing = sorted(self._topics - existing)
        if self._pattern is not None and not existing - self._topics:
            missing.append(f"any that match {self._pattern.pattern!r}")
        if missing and missing != self._missing:
            group = self._config.group_id
            _log.warning("group %s: no records from topics that do not exist: %s", group, ", ".join(missing))
        self._missing = missing


def more_for(late: int) -> int:
    """The partitions that take the time which a look-up gets beyond its own, after so many late answers in a row."""
    return _MORE * min(late, _MOST_LATE)


def counted(cluster: Cluster, config: ConsumerConfig, topics: Collection[str] | None) -> Steps[dict[str, int]]:
    """Partition counts by topic, 0 for a missing one. None: all topics, by default without internal ones."""
    # brokers before Kafka 0.11 are asked for all topics, and name no missing one
    counts = dict.fromkeys(topics or (), 0)
    create = topics is not None and config.allow_auto_create_topics
    for name, topic in (yield from cluster.asking_metadata(topics, create=create)).items():
        code = topic["error_code"]
        if code and code not in (*UNKNOWN_TOPIC, ErrorCode.LEADER_NOT_AVAILABLE):
            raise answer_error(METADATA, code, f"topic {name}")
        if topics is not None or not (topic["is_internal"] and config.exclude_internal_topics):
            counts[name] = len(topic["partitions"])
    return counts


def _existing(counts: dict[str, int]) -> set[str]:
    return {topic for topic, count in counts.items() if count}


class ConsumerGroup(ABC):
    """A consumer's work in its group. The consumer calls `step` at each poll; that does not wait for rebalances.

    `on_news` ends the consumer's wait.
    """

    _heartbeats: Heartbeating

    def __init__(
        self,
        config: ConsumerConfig,
        assignment: Assignment,
        on_news: Callable[[], None],
        troubles: Troubles,
        beside: Beside | None = None,
    ) -> None:
        self._beside = beside
        self._config, self.name = config, config.group_id or ""
        self._assignment, self._troubles, self._on_news = assignment, troubles, on_news
        self.cluster = Cluster(config.client)
        self._stored = GroupOffsets(
            self.cluster, self.name, is_stable=True, reader=self._reader, on_refused=self._suspect
        )
        self.commits = Commits(self.cluster, config, self._committer, self._ids_of_topics, self._suspect)
        self._topics = SubscribedTopics(self.cluster, config)
        self._listener = RebalanceListener()
        #: What the listener has raised: `step` raises it when the rebalance is done.
        self._listener_failure: Exception | None = None
        self._attempts = 0
        #: Of these the last ones in a row that had no answer in time, though a broker was there.
        self._late = 0
        #: When the failures began that are retried, a reading of `time.monotonic`; infinite if there are none.
        self._failing_since = math.inf
        self._retry_at = 0.0
        self._commit_at = math.inf
        self._set_timer()

    @abstractmethod
    def subscribe(
        self, topics: Collection[str], pattern: re.Pattern[str] | str | None, listener: RebalanceListener
    ) -> None:
        """Read these topics, and those whose full names match; takes effect with the next step.

        Text is a pattern in RE2's syntax, for a coordinator that resolves it.
        """

    @abstractmethod
    def look_at(self) -> float:
        """When to call `step` if nothing arrives, a reading of `time.monotonic`."""

    @abstractmethod
    def _take_part(self) -> Steps[None]:
        """Do what is due in the group, without waiting for other members; errors as of `step`."""

    @abstractmethod
    def _as_member(self) -> GroupMetadata | None:
        """This member in its generation or epoch; None outside of the group."""

    def _reader(self) -> GroupMetadata | None:
        """The member in whose epoch committed offsets are read, if the protocol has epochs."""
        return None

    def _suspect(self) -> None:
        """Find out soon whether this is still a member: the coordinator has refused it a commit or offsets."""
        return

    @abstractmethod
    def _give_up_membership(self) -> Steps[None]:
        """Join again as after a lost session: an interrupt has ended a call halfway."""

    @abstractmethod
    def _leave(self) -> Steps[None]:
        """Stop heartbeats, and leave the group."""

    def close_sockets(self) -> None:
        """Close this process' copies of the connections, and send nothing: for a forked process."""
        self._heartbeats.close_sockets()
        self.cluster.close()

    def _set_timer(self) -> None:
        if self._config.enable_auto_commit:
            self._commit_at = time.monotonic() + self._config.auto_commit_interval_ms / 1000

    @property
    def is_subscribed(self) -> bool:
        return bool(self._topics)

    @property
    def lacking(self) -> int:
        """How many partitions the next step looks up, about."""
        return self._topics.lacking(self._late)

    def step(self, timeout_ms: float, limit: str) -> Steps[None]:
        """Take part in rebalances, and commit if it is time; raises what the listener has raised.

        Errors that can't be retried are raised at once, others after default.api.timeout.ms. Commits before a
        revocation, and the listener, may take longer than `timeout_ms`: what they do not commit is read again.
        """
        with self.cluster.within(timeout_ms, limit):
            self.commits.step()
            if self.is_subscribed:
                try:
                    yield from self._take_part()
                except (ConnectionFailed, RequestTimedOut, ProtocolError) as error:
                    if not is_retriable(error):
                        raise
                    self._try_again(error)
            letters = self.commits.letters
            if time.monotonic() >= self._commit_at or (
                letters is not None and letters.is_filling and self._config.enable_auto_commit
            ):
                self._set_timer()
                if offsets := self.consumed():
                    yield from self.commits.begin_by_itself(offsets)
        if self._listener_failure is not None:
            failure, self._listener_failure = self._listener_failure, None
            between_steps(failure)
            raise failure

    def _try_again(self, error: KlogError) -> None:
        self._troubles.note(f"group {self.name}", error)
        self._attempts += 1
        is_late = isinstance(error, ConnectionFailed | RequestTimedOut) and error.is_late
        self._late = self._late + 1 if is_late else 0
        now = time.monotonic()
        self._retry_at = now + pause_seconds(self._config.client, self._attempts)
        self._failing_since = min(self._failing_since, now)
        if now > self._failing_since + self._config.default_api_timeout_ms / 1000:
            self._failing_since = math.inf
            raise error

    def _note_success(self) -> None:
        self._attempts, self._late, self._failing_since = 0, 0, math.inf

    def mend(self) -> None:
        """Give up requests in flight and join again as after a lost session: an interrupt has ended a call halfway."""
        self.cluster.end_deadlines()
        self.cluster.close()
        if self.is_subscribed:
            run(self._give_up_membership())
        self.commits.give_up(CallInterrupted("an interrupt has ended the call that waits for the commit"))

    def consumed(self, keys: Collection[TopicPartition] | None = None) -> dict[TopicPartition, Committed]:
        """The positions of these partitions, or of all, to commit; not those in former topics of the same name."""
        return {
            state.key: Committed(state.position, state.epoch)
            for state in self._assignment.partitions.values()
            if state.position is not None and not state.is_recreated and (keys is None or state.key in keys)
        }

    def metadata(self) -> GroupMetadata:
        """This member, or the group alone if the consumer has not subscribed; `CommitFailed` as `commit`."""
        return self._committer() or GroupMetadata(self.name)

    def _committer(self) -> GroupMetadata | None:
        """The member that commits; `CommitFailed` outside of a generation.

        Without one a commit counts as that of a consumer that has not subscribed. The coordinator of an empty group
        accepts those, and would put the group back to what a lost member had read.
        """
        member = self._as_member()
        if member is None and self.is_subscribed:
            raise CommitFailed(
                f"the consumer is not a member of group {self.name} now, other members may read its "
                f"partitions: commit after the next poll has assigned some"
            )
        return member

    def _ids_of_topics(self) -> dict[str, UUID]:
        """The ids of the topics to which the positions belong; another topic of the same name gets no offsets."""
        items = self._assignment.partitions.values()
        return {
            **self.cluster.topic_ids,
            **{state.topic: state.topic_id for state in items if state.topic_id is not None},
        }

    def _fenced(self) -> MemberFenced:
        return MemberFenced(
            f"another member of group {self.name} has group.instance.id={self._config.group_instance_id}: "
            f"close one of the two"
        )

    def committed(self, partitions: Collection[TopicPartition]) -> Steps[dict[TopicPartition, Committed]]:
        """The committed offsets of the partitions that have one; waits up to default.api.timeout.ms."""
        with self.cluster.within(self._config.default_api_timeout_ms, "default.api.timeout.ms"):
            return (yield from self._stored.asking_committed(partitions))

    def committed_now(
        self, partitions: Collection[TopicPartition], timeout_ms: float, limit: str
    ) -> Steps[tuple[dict[TopicPartition, Committed], dict[TopicPartition, ProtocolError]]]:
        """Like `committed` without retries, with the errors of single partitions."""
        with self.cluster.within(timeout_ms, limit):
            return (yield from self._stored.asking_committed_now(partitions))

    def _revoke(self, partitions: list[TopicPartition], *, is_lost: bool) -> Steps[None]:
        """Give up these partitions; `is_lost` if another member may already read them."""
        try:
            if not is_lost:
                with self.cluster.apart():
                    yield from self._auto_commit(partitions)
            yield from self._tell(self._listener.on_lost if is_lost else self._listener.on_revoked, partitions)
        finally:  # even if it is interrupted: another member gets them soon
            gone = set(partitions)
            self._assignment.set([key for key in self._assignment.partitions if key not in gone])

    def _tell(
        self, call: Callable[[list[TopicPartition]], Awaitable[None] | None], partitions: list[TopicPartition]
    ) -> Steps[None]:
        """Call the listener, and note what it raises: that must not break off the rebalance (as in Java's client)."""
        try:
            with self.cluster.apart():
                yield from self._called(call, partitions)
        except Exception as error:
            if self._listener_failure is None:
                self._listener_failure = error
            else:
                _log.warning("the rebalance listener of group %s failed again: %s", self.name, error)

    def _called(
        self, call: Callable[[list[TopicPartition]], Awaitable[None] | None], partitions: list[TopicPartition]
    ) -> Steps[None]:
        if self._beside is not None:
            yield from self._beside.called(call, partitions)
        elif inspect.iscoroutine(awaitable := call(partitions)):
            awaitable.close()
            raise TypeError("a rebalance listener's coroutine is awaited by consumers of spark_klog.aio only")

    def _auto_commit(self, keys: Collection[TopicPartition] | None) -> Steps[None]:
        if not self._config.enable_auto_commit:
            return
        try:
            yield from self.commits.commit(self.consumed(keys), skips_deleted=True)
        except KlogError as error:
            _log.warning("offsets of group %s were not committed: %s", self.name, error)

    def hurry(self) -> None:
        """Give up soon, from now on, if no broker can be reached."""
        self.cluster.patience = PATIENCE
        if self.commits.letters is not None:
            self.commits.letters.hurry(PATIENCE)

    def close(self, timeout: float = CLOSE_SECONDS, *, commits: bool = True) -> Steps[None]:
        """Commit if enable.auto.commit is set and `commits`, call the listener, leave the group, close the connections.

        Like Java's clients it takes no longer than `timeout` s and request.timeout.ms, and unlike them not as long if
        no broker at all can be reached.
        """
        self.hurry()
        longest_ms = min(1000 * max(0.0, timeout), self._config.client.request_timeout_ms)
        failures: list[BaseException] = []
        leaving: Steps[None] | None = None
        try:
            with self.cluster.within(longest_ms, _CLOSE_LIMIT):
                # even if `on_done` or the listener raises: a member that stays keeps its partitions from the others
                for steps in (self.commits.finish(), self._last_calls(commits=commits), self.commits.finish()):
                    try:
                        yield from steps
                    except GeneratorExit:
                        if self.is_subscribed and self._beside is None:  # an interrupt
                            run(self._leave())
                        raise
                    except BaseException as error:
                        failures.append(error)
                if self.is_subscribed:
                    yield from self._leave()
        except GeneratorExit:
            leaving = self._leaving_beside() if self.is_subscribed else None
            raise
        finally:
            self.cluster.close()
            if leaving is not None and self._beside is not None:
                self._beside.start(leaving)  # the task that is cancelled waits no longer
        if failures:
            raise failures[-1]

    def _leaving_beside(self) -> Steps[None]:
        try:
            yield from self._leave()
        finally:
            self.cluster.close()

    def _last_calls(self, *, commits: bool) -> Steps[None]:
        if commits:
            yield from self._auto_commit(None)
        if self.is_subscribed and self._assignment.partitions:
            is_lost = self._as_member() is None
            call = self._listener.on_lost if is_lost else self._listener.on_revoked
            yield from self._called(call, list(self._assignment.partitions))
