"""The assigned partitions of a consumer, with their positions and failures."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from spark_klog.base.names import TopicPartition
from spark_klog.client.retry import Lasting, pause_seconds
from spark_klog.client.settings import ClientConfig
from spark_klog.errors import ConfigError, ErrorCode, KlogError, ProtocolError, Remedy

_log = logging.getLogger(__name__)
#: Seconds between two warnings about the same thing: doubled from the first to the last.
_FIRST_PAUSE, _LAST_PAUSE = 5.0, 300.0
#: Seconds without the failure after which the next one is a new one.
_FORGET = 30.0
#: Errors that pass within moments when a leader or coordinator moves, or a member's next heartbeat is answered.
_PASSING = frozenset(
    {
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.OFFSET_NOT_AVAILABLE,
        ErrorCode.UNSTABLE_OFFSET_COMMIT,
        ErrorCode.THROTTLING_QUOTA_EXCEEDED,
        ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
        ErrorCode.INVALID_FETCH_SESSION_EPOCH,
        ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.INCONSISTENT_TOPIC_ID,
        ErrorCode.STALE_MEMBER_EPOCH,
        ErrorCode.UNKNOWN_MEMBER_ID,
    }
)
#: Seconds that these last before there is a warning.
_PASSING_SECONDS = 2.0
#: The most failures that are remembered.
_MOST = 1000
_runs = itertools.count()


class Leader(NamedTuple):
    """A partition's leader (node id) and leader epoch (-1 from old brokers)."""

    node: int
    epoch: int


@dataclass(slots=True, eq=False)
class Assigned:
    """One assigned partition.

    `position` is the offset after the last record returned to the caller. None: not known yet; `start` then says how to
    find it: a time for ListOffsets (ms, EARLIEST or LATEST), or None for the committed offset or the reset policy.
    `fetch_offset` is the next offset to fetch: `position` plus what was fetched but not yet returned.
    `run` numbers the fetches between two changes of `fetch_offset` by anything else: records that were fetched in an
    earlier run are dropped, even at the right offset, as they are fetched again. No two partitions share a number.
    """

    topic: str
    partition: int
    key: TopicPartition = field(init=False)
    name: str = field(init=False)
    position: int | None = None
    start: int | None = None
    fetch_offset: int = -1
    run: int = field(default_factory=_runs.__next__)
    #: Numbers the time for which it is assigned; a copy has the same one.
    term: int = field(default_factory=_runs.__next__)
    #: The run of which nothing more is fetched for now, see `Fetches.keep`.
    held_run: int = -1
    #: The id of the topic to which the position belongs, and that in the last metadata; None: unknown.
    topic_id: UUID | None = None
    found_id: UUID | None = None
    #: Ids of former topics of this name, which a broker that lags behind may still tell.
    retired_ids: frozenset[UUID] = frozenset()
    #: The leader epoch of the record before `position`; -1: unknown.
    epoch: int = -1
    is_paused: bool = False
    leader: Leader | None = None
    #: The epoch of the last known leader, -1 before.
    leader_epoch: int = -1
    #: Whether the leader must confirm the position before the next fetch: the log may have been truncated.
    is_unchecked: bool = False
    #: The node that the leader told this consumer to fetch from (KIP-392), and until when.
    replica: int | None = None
    replica_until: float = 0.0
    #: The fetch size if a batch is larger than max.partition.fetch.bytes; 0: that setting.
    max_bytes: int = 0
    #: A position that the broker does not have; None: it has.
    out_of_range: int | None = None
    #: Earliest time of the next fetch, a reading of `time.monotonic`.
    retry_at: float = 0.0
    #: Before that nothing is fetched, as the next record of a retry topic is due then.
    due_at: float = 0.0
    attempts: int = 0
    failure: KlogError | None = None
    failing_since: float = 0.0
    #: Since when brokers do not know this partition; infinite if they do, or have ever done.
    unknown_since: float = math.inf
    was_known: bool = False
    #: The restless partitions of its `Assignment`, and the node among whose calm ones it is.
    watch: dict[Assigned, None] | None = None
    calm_at: int = -1

    def __post_init__(self) -> None:
        self.key, self.name = (self.topic, self.partition), f"{self.topic}-{self.partition}"

    @property
    def is_calm(self) -> bool:
        """Whether nothing is to be done but to fetch from the leader."""
        return (
            (self.leader is not None and self.position is not None)
            and (self.failure is None and self.out_of_range is None and self.replica is None)
            and not (self.is_paused or self.is_unchecked or self.retry_at or self.due_at)
            and (self.held_run != self.run and self.unknown_since == math.inf)
        )

    def stir(self) -> None:
        """Have the next step look at this partition: to be called before a change by which it is not calm any more."""
        if self.watch is not None:
            self.watch[self] = None

    def lead(self, leader: Leader) -> None:
        """Take the leader from metadata; after a change of its epoch the position is checked (KIP-320)."""
        if leader != self.leader:
            self.stir()
        if leader.epoch != self.leader_epoch and leader.epoch >= 0 <= self.epoch and self.position is not None:
            self.is_unchecked = True
            self.rewind()
        self.leader, self.leader_epoch = leader, leader.epoch

    def node(self, now: float) -> int:
        """The node to fetch from: the leader, or the replica that it has told; -1 without a leader."""
        if self.leader is None:
            return -1
        return self.leader.node if self.replica is None or now >= self.replica_until else self.replica

    @property
    def is_recreated(self) -> bool:
        """Whether the topic is another one of the same name now."""
        return self.topic_id is not None and self.found_id is not None and self.topic_id != self.found_id

    def find(self, topic_id: UUID) -> None:
        """Take the topic's id from metadata; a position without one belongs to this topic."""
        self.found_id = topic_id
        if self.topic_id is None:
            self.topic_id = topic_id

    def belong(self, topic_id: UUID | None) -> None:
        """Let the position belong to this topic."""
        self.stir()
        if self.topic_id is not None and self.topic_id != topic_id:
            self.retired_ids |= {self.topic_id}
        self.topic_id = topic_id
        if self.is_recreated:
            self.leader = None

    def seek(self, offset: int, epoch: int = -1) -> None:
        """Continue at an offset; drop what was fetched. `epoch`: of the record before it, to check the position by."""
        self.stir()
        if self.is_recreated:
            self.belong(self.found_id)
        self.is_unchecked = epoch >= 0
        self.position = self.fetch_offset = offset
        self.due_at = 0.0
        self.run = next(_runs)
        self.epoch = epoch
        self.start = None
        self.max_bytes = 0

    def restart(self, start: int | None) -> None:
        """Forget the position; `start` says how to find a new one, see the class."""
        self.stir()
        if self.is_recreated:
            self.belong(self.found_id)
        self.position, self.start = None, start
        self.fetch_offset, self.due_at = -1, 0.0
        self.run = next(_runs)
        self.epoch = -1
        self.is_unchecked = False

    def rewind(self) -> None:
        """Fetch again from the position; drop what was fetched."""
        self.run = next(_runs)
        if self.position is not None:
            self.fetch_offset = self.position

    def succeeded(self) -> None:
        self.attempts, self.retry_at, self.failure = 0, 0.0, None

    def failed(self, failure: KlogError, config: ClientConfig, *, keeps_leader: bool = False) -> None:
        """Note a retriable failure: the next attempt is after a pause, with another leader if the failure says so."""
        self.stir()
        now = time.monotonic()
        if self.failure is None:
            self.failing_since = now
        self.failure = failure
        self.attempts += 1
        self.retry_at = now + pause_seconds(config, self.attempts)
        is_elsewhere = not isinstance(failure, ProtocolError) or failure.remedy is Remedy.REFRESH
        if is_elsewhere and not keeps_leader:
            self.leader = None


class Assignment:
    """The assigned partitions: a step costs what has changed, however many there are."""

    def __init__(self) -> None:
        #: Replaced as a whole, so that an interrupt loses none.
        self.partitions: dict[TopicPartition, Assigned] = {}
        #: Partitions that lack something, or wait: each step looks at them. They add themselves, see `Assigned.stir`.
        self.restless: dict[Assigned, None] = {}
        #: The others by leader, in the order in which they are fetched. Some may not be assigned any more.
        self.calm: dict[int, dict[TopicPartition, Assigned]] = {}
        #: Partitions that were assigned before: what is kept for them can go.
        self.dropped: set[TopicPartition] = set()

    def assigned(self, topic: str, partition: int) -> Assigned:
        """The partition; `ConfigError` if it is not assigned."""
        state = self.partitions.get((topic, partition))
        if state is None:
            raise ConfigError(
                f"{topic}-{partition} is not assigned to this consumer: assign it, or poll until the group has"
            )
        return state

    def copy_of(self, key: TopicPartition) -> Assigned:
        """A copy of a partition, for `set`; a new one if it is not assigned."""
        known = self.partitions.get(key)
        if known is None:
            return Assigned(*key)
        state = copy.copy(known)
        state.watch = None  # until it is assigned
        return state

    def set(self, keys: Iterable[TopicPartition], changed: Mapping[TopicPartition, Assigned] | None = None) -> None:
        """Assign exactly these partitions; those assigned before keep their positions unless they are in `changed`."""
        there = {**self.partitions, **(changed or {})}
        partitions = {key: there.get(key) or Assigned(*key) for key in keys}
        for state in partitions.values():
            state.watch = self.restless
            state.stir()
        self.partitions = partitions
        for state in list(self.restless):
            if partitions.get(state.key) is not state:
                del self.restless[state]
        self.calm = {}
        self.dropped |= there.keys() - self.partitions.keys()

    def settle(self) -> None:
        """Leave in `restless` only those partitions that are."""
        for state in list(self.restless):
            calm = self.calm.get(state.calm_at, {})
            if calm.get(state.key) is state:
                del calm[state.key]
            if self.partitions.get(state.key) is state:
                if not state.is_calm:
                    continue
                assert state.leader is not None
                state.calm_at = state.leader.node
                self.calm.setdefault(state.calm_at, {})[state.key] = state
            del self.restless[state]

    def of_node(self, node: int) -> list[Assigned]:
        """The partitions that are fetched from a node."""
        now = time.monotonic()
        states = dict.fromkeys(self.calm.get(node, {}).values())
        states |= dict.fromkeys(state for state in self.restless if state.node(now) == node)
        return [state for state in states if self.partitions.get(state.key) is state]

    def fetch_last(self, state: Assigned) -> None:
        """Let the others of its node be fetched before this partition, so that none starves (before fetch sessions)."""
        calm = self.calm.get(state.calm_at, {})
        if calm.get(state.key) is state:
            calm[state.key] = calm.pop(state.key)


class Troubles:
    """Log each failure that lasts as a warning: the first time at once, then at intervals that double.

    Failures that are normal when a leader or coordinator moves are logged as warnings only if they last for 2 s.
    """

    def __init__(self) -> None:
        #: When a failure was last noted, when to warn again, and what has failed since the last warning; the failure
        #: noted longest ago comes first.
        self._known: dict[Hashable, tuple[float, Lasting, dict[str, None]]] = {}
        #: Failures that can't be retried; each is raised by a poll.
        self.final: deque[KlogError] = deque()

    def note_all(self, failures: Mapping[Assigned, KlogError]) -> None:
        """Note the failures of partitions, before `Assigned.failed`: those of one broker and one cause together."""
        now = time.monotonic()
        causes: dict[Hashable, list[Assigned]] = {}
        for state, error in failures.items():
            code = error.code if isinstance(error, ProtocolError) else None
            is_new = state.failure is None or now < state.failing_since + _PASSING_SECONDS
            if code in _PASSING and is_new:
                _log.info("%s: trying again: %s", state.name, error)
            else:
                node = None if state.leader is None else state.leader.node
                causes.setdefault((node, type(error), code), []).append(state)
        for cause, states in causes.items():
            names = [state.name for state in states]
            is_alone = len(states) == 1 and states[0].leader is None  # as of a topic that does not exist
            self._note((names[0], cause) if is_alone else cause, names, failures[states[0]], now)

    def note(self, where: str, error: KlogError) -> None:
        """Note a failure that is retried; `where` names what failed, for example a broker."""
        now = time.monotonic()
        code = error.code if isinstance(error, ProtocolError) else None
        self._note((where, type(error), code), [where], error, now + _PASSING_SECONDS if code in _PASSING else now)

    def _note(self, key: Hashable, names: list[str], error: KlogError, first_at: float) -> None:
        now = time.monotonic()
        known = self._known.pop(key, None)
        if known is None or now > known[0] + _FORGET + known[1].pause:
            known = now, Lasting(first_at, _FIRST_PAUSE, _LAST_PAUSE), {}
        _, lasting, failed = known
        failed |= dict.fromkeys(names)
        self._known[key] = now, lasting, failed
        if len(self._known) > _MOST:
            del self._known[next(iter(self._known))]
        where = names[0] + (f" and {len(failed) - 1} more" if len(failed) > 1 else "")
        if lasting.is_due(now):
            failed.clear()
            _log.warning("no records from %s, trying again: %s", where, error)
        else:
            _log.info("%s: trying again: %s", where, error)
