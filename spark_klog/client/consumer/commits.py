"""Commit a group's offsets as a member."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple
from uuid import UUID

from spark_klog.base.interrupts import between_steps
from spark_klog.base.names import TopicPartition
from spark_klog.client.answers import worst
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer.dead_letters import DeadLetters
from spark_klog.client.consumer.settings import ConsumerConfig
from spark_klog.client.coordinator import Coordinators
from spark_klog.client.net.connection import Connection, Handle
from spark_klog.client.offsets import (
    Committed,
    GroupMetadata,
    Uncommitted,
    commit_errors,
    topics_to_commit,
    with_topic_ids,
)
from spark_klog.client.requests import Steps, Wait, opened
from spark_klog.errors import (
    CommitFailed,
    ErrorCode,
    KlogError,
    MemberFenced,
    ProtocolError,
    RequestTimedOut,
    is_retriable,
)
from spark_klog.protocol.apis import OFFSET_COMMIT
from spark_klog.protocol.codec import Message
from spark_klog.tracing import trace_client

_log = logging.getLogger(__name__)
Offsets = Mapping[TopicPartition, Committed]
OnCommit = Callable[[Offsets, "KlogError | None"], None]
#: Errors of a member that is not in the group's generation any more; the last one if its group was deleted.
_REBALANCED = (
    ErrorCode.UNKNOWN_MEMBER_ID,
    ErrorCode.ILLEGAL_GENERATION,
    ErrorCode.REBALANCE_IN_PROGRESS,
    ErrorCode.GROUP_ID_NOT_FOUND,
)
#: Errors of a member of KIP-848 whose next heartbeat tells its epoch, or its loss.
_UNKNOWN = (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.STALE_MEMBER_EPOCH, ErrorCode.GROUP_ID_NOT_FOUND)
#: The most commits in flight; a further one waits for the oldest.
_MOST = 100


class _UnderWay(NamedTuple):
    connection: Connection
    handle: Handle
    request: Message
    offsets: Offsets
    is_member: bool
    until: float
    on_done: OnCommit | None


class Commits:
    """Commits at a group's coordinator. Only the consumer's thread uses `cluster`.

    `committer` gives the member that commits, None for a consumer that has not subscribed; it raises `CommitFailed` if
    this one may not commit now. `topic_ids` gives those of the topics that are read. `on_refused` is called if the
    coordinator does not know the member in its epoch.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: ConsumerConfig,
        committer: Callable[[], GroupMetadata | None],
        topic_ids: Callable[[], Mapping[str, UUID]],
        on_refused: Callable[[], None],
    ) -> None:
        self._cluster, self._config, self._committer, self._topic_ids = cluster, config, committer, topic_ids
        self._on_refused = on_refused
        self._group = config.group_id or ""
        self._coordinators = Coordinators(cluster)
        self._under_way: deque[_UnderWay] = deque()
        #: What a commit writes besides the offsets.
        self.letters: DeadLetters | None = None
        #: Since when letters are not written, a reading of `time.monotonic`.
        self._failing_since = math.inf
        trace_client(self, cluster, "commit", "begin", group=config.group_id)

    def commit(self, offsets: Offsets, *, skips_deleted: bool = False) -> Steps[None]:
        """Commit, and wait for the answer for up to default.api.timeout.ms. `skips_deleted`: see `Uncommitted`.

        `CommitFailed` if the group has rebalanced or as `committer` says, `MemberFenced`, or what `Cluster.attempt`
        raises. Earlier commits in flight are finished first, unless there is nothing to commit.
        """
        if not offsets:
            return
        deadline = time.monotonic() + self._config.default_api_timeout_ms / 1000
        while self._under_way:
            yield from self._finish_first(deadline)
        self._committer()  # whether it may commit at all, before anything is looked up
        if self.letters is not None and self.letters.concern(offsets):
            yield from self._commit_letters(self.letters, offsets)
            return
        left = Uncommitted(self._cluster, offsets, self._topic_ids(), skips_deleted=skips_deleted)

        def ask() -> Steps[None]:
            member = self._committer()  # its epoch may have changed meanwhile
            with self._coordinators.forgotten_on_error():
                node = yield from self._coordinators.asking_node(self._group)
                request = self._request(left.offsets, member, left.topic_ids)
                answer = yield from self._cluster.asking(node, OFFSET_COMMIT, request)
                refused = self._refused(answer, request, left.offsets, is_member=member is not None)
                yield from left.answered(refused)

        yield from self._cluster.attempting(ask, self._config.default_api_timeout_ms, "default.api.timeout.ms")

    def _commit_letters(self, letters: DeadLetters, offsets: Offsets) -> Steps[None]:
        deadline = time.monotonic() + self._config.default_api_timeout_ms / 1000
        while self._under_way:  # it could be processed after these offsets, and undo them
            yield from self._finish_first(deadline)
        try:
            bounds = self._cluster.bounds(self._config.default_api_timeout_ms, "default.api.timeout.ms")
            yield from letters.settling(offsets, lambda: self._committer() or GroupMetadata(self._group), bounds)
        except ProtocolError as error:
            is_member = self._committer() is not None
            if is_member and error.code in _UNKNOWN:
                self._on_refused()
            self._check_membership(error, is_member=is_member)
            raise
        self._failing_since = math.inf

    def begin(self, offsets: Offsets, on_done: OnCommit | None) -> Steps[None]:
        """Commit without waiting for the answer and without retries. `step` calls `on_done(offsets, error)`.

        With dead letters it waits for the answer.
        """
        if self.letters is not None and self.letters.concern(offsets):
            failure: KlogError | None = None
            try:
                yield from self._commit_letters(self.letters, offsets)
            except KlogError as error:
                failure = error
            self.tell(offsets, failure, on_done)
            return
        if len(self._under_way) >= _MOST:
            yield from self._finish_first(time.monotonic() + self._config.client.request_timeout_ms / 1000)
        try:
            member = self._committer()
            request = self._request(offsets, member, self._topic_ids())
            node = yield from self._coordinators.asking_node(self._group)
            connection = self._cluster.plain_connection(node)
            yield from opened(connection, self._cluster.deadline())
            handle = connection.send(OFFSET_COMMIT, request)
        except KlogError as error:
            self._coordinators.forget()
            self.tell(offsets, error, on_done)
            return
        until = time.monotonic() + self._config.client.request_timeout_ms / 1000
        self._under_way.append(_UnderWay(connection, handle, request, offsets, member is not None, until, on_done))

    def begin_by_itself(self, offsets: Offsets) -> Steps[None]:
        """As `begin`, of enable.auto.commit, which logs failures.

        But it raises errors of dead letters that can't be retried, and others after default.api.timeout.ms: the letters
        would grow without bounds.
        """
        if self.letters is None or not self.letters.concern(offsets):
            yield from self.begin(offsets, None)
            return
        try:
            yield from self._commit_letters(self.letters, offsets)
        except KlogError as error:
            now = time.monotonic()
            self._failing_since = min(self._failing_since, now)
            is_late = now > self._failing_since + self._config.default_api_timeout_ms / 1000
            if not (isinstance(error, CommitFailed) or (is_retriable(error) and not is_late)):
                raise
            self.log_failure(offsets, error)

    def finish(self) -> Steps[None]:
        """Wait for the commits in flight, each up to request.timeout.ms from its begin."""
        while self._under_way:
            yield from self._finish_first(self._cluster.deadline())

    def give_up(self, failure: KlogError) -> None:
        """Fail the commits in flight: their answers do not come."""
        while self._under_way:
            try:
                self._done(failure)
            except Exception:
                _log.exception("on_done of a commit of group %s failed", self._group)

    def step(self) -> None:
        """Process the answers that have arrived, in the order of the commits."""
        while self._under_way and self._is_over(self._under_way[0], math.inf):
            pass

    def _finish_first(self, deadline: float) -> Steps[None]:
        first = self._under_way[0]
        while not self._is_over(first, deadline):
            yield Wait(first.connection, min(first.until, deadline), first.handle)

    def _is_over(self, first: _UnderWay, deadline: float) -> bool:
        """Process the answer to the first commit if it has arrived, or fail the commit if that is too late."""
        failure: KlogError | None = None
        try:
            if not first.connection.poll(first.handle):
                if time.monotonic() < min(first.until, deadline):
                    return False
                first.connection.close()
                raise RequestTimedOut(f"coordinator {first.connection.address} did not answer a commit in time")
            answer = first.connection.receive(first.handle)
            if refused := self._refused(answer, first.request, first.offsets, is_member=first.is_member):
                raise worst(list(refused.values()))
        except KlogError as error:
            failure = error
        self._done(failure)
        return True

    def _done(self, failure: KlogError | None) -> None:
        first = self._under_way.popleft()
        if failure is not None:
            self._coordinators.forget()
        self.tell(first.offsets, failure, first.on_done)

    def tell(self, offsets: Offsets, failure: KlogError | None, on_done: OnCommit | None) -> None:
        """Call `on_done`; without one log the failure."""
        try:
            (on_done or self.log_failure)(offsets, failure)
        except BaseException as error:
            between_steps(error)
            raise

    def log_failure(self, _: Offsets, failure: KlogError | None) -> None:
        """Log the failure of a commit that nobody else is told of."""
        if failure is not None:
            _log.warning("offsets of group %s were not committed: %s", self._group, failure)

    def _request(self, offsets: Offsets, member: GroupMetadata | None, topic_ids: Mapping[str, UUID]) -> Message:
        topics = with_topic_ids(topics_to_commit(offsets), topic_ids)
        request: Message = {"group_id": self._group, "topics": topics}
        if member is not None:
            request |= {
                "generation_id_or_member_epoch": member.generation,
                "member_id": member.member,
                "group_instance_id": member.instance,
            }
        return request

    def _refused(
        self, answer: Message, request: Message, offsets: Offsets, *, is_member: bool
    ) -> dict[TopicPartition, ProtocolError]:
        """The errors of single partitions; raises those of the member."""
        failures = commit_errors(self._cluster, answer, request, offsets, is_member=is_member)
        if is_member and any(failure.code in _UNKNOWN for failure in failures.values()):
            self._on_refused()
        for failure in failures.values():
            self._check_membership(failure, is_member=is_member)
        return failures

    def _check_membership(self, failure: ProtocolError, *, is_member: bool) -> None:
        """Raise what a failure means for the member, if it is about that."""
        if failure.code in _REBALANCED and not is_member:
            raise CommitFailed(str(failure))
        if failure.code in _REBALANCED:
            raise CommitFailed(
                f"{failure}: the group has rebalanced, other members may read these partitions; poll more often, "
                f"or raise max.poll.interval.ms"
            )
        if failure.code == ErrorCode.FENCED_INSTANCE_ID:
            raise MemberFenced(f"{failure}: another member has the same group.instance.id")
