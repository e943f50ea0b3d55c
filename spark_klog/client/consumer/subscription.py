"""The group part of a consumer: membership, commits, and the rebalance listener."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterable

from spark_klog.base.interrupts import between_steps
from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.consumer.assignment import Assignment
from spark_klog.client.consumer.commits import Commits, Offsets, OnCommit
from spark_klog.client.consumer.group import GroupMember
from spark_klog.client.consumer.heartbeat import Membership
from spark_klog.client.consumer.settings import ConsumerConfig
from spark_klog.client.consumer.troubles import Troubles
from spark_klog.client.net.connection import Connection
from spark_klog.client.offsets import Committed, GroupMetadata
from spark_klog.errors import CallInterrupted, CommitFailed, KlogError, ProtocolError

_log = logging.getLogger(__name__)
#: Seconds that closing may take, as in Kafka.
CLOSE_SECONDS = 30.0
#: What limits the requests of a close, for messages.
_CLOSE_LIMIT = "the timeout of close, at most request.timeout.ms"
#: Seconds without an answer of any broker after which a close gives up: time to connect again after a break.
_PATIENCE = 1.0


class RebalanceListener:
    """Callbacks for rebalances; subclass it. The polling thread calls all methods, within `poll`.

    They may call `commit`, `seek`, `position` and so on of the consumer, but neither `poll` nor `close`. `on_revoked`
    is also called within `close` and `unsubscribe`. What a method raises, these calls raise when their work is done.
    """

    def on_assigned(self, partitions: list[TopicPartition]) -> None:
        """Called for new partitions; they start at the committed offsets unless the listener seeks."""

    def on_revoked(self, partitions: list[TopicPartition]) -> None:
        """Called before partitions are given up: the last chance to commit."""

    def on_lost(self, partitions: list[TopicPartition]) -> None:
        """Called if another member may already own the partitions: commits fail. By default calls `on_revoked`."""
        self.on_revoked(partitions)


class GroupSide:
    """A consumer's work in its group. Call `step` at each poll; it calls `on_assign` to set the assignment."""

    def __init__(
        self,
        config: ConsumerConfig,
        assignment: Assignment,
        on_assign: Callable[[Iterable[TopicPartition]], None],
        on_news: Callable[[], None],
        troubles: Troubles,
    ) -> None:
        self._config = config
        self._assignment = assignment
        self._on_assign = on_assign
        self.cluster = Cluster(config.client)
        self._commits = Commits(self.cluster, config, self._committer)
        self._member = GroupMember(self.cluster, config, self, on_news, troubles)
        self._listener = RebalanceListener()
        #: What the listener has raised: `step` raises it when the rebalance is done.
        self._listener_failure: Exception | None = None
        self._commit_at = math.inf
        self._set_timer()

    def _set_timer(self) -> None:
        if self._config.enable_auto_commit:
            self._commit_at = time.monotonic() + self._config.auto_commit_interval_ms / 1000

    @property
    def is_subscribed(self) -> bool:
        return self._member.is_subscribed

    @property
    def connection(self) -> Connection | None:
        """The connection on which an answer of the coordinator is expected, if any."""
        return self._member.connection

    def look_at(self) -> float:
        """When to call `step` next, a reading of `time.monotonic`."""
        return min(self._member.look_at() if self.is_subscribed else math.inf, self._commit_at)

    def subscribe(self, topics: Collection[str], pattern: re.Pattern[str] | None, listener: RebalanceListener) -> None:
        self._listener = listener
        self._member.subscribe(topics, pattern)

    def step(self, timeout_ms: float, limit: str) -> None:
        """Take part in rebalances, and commit if it is time; raises what the listener has raised.

        Commits before a revocation, and the listener, may take longer than `timeout_ms`: what they do not commit is
        read again.
        """
        with self.cluster.within(timeout_ms, limit):
            self._commits.step()
            if self._member.is_subscribed:
                self._member.step()
            if time.monotonic() >= self._commit_at:
                self._set_timer()
                if offsets := self.consumed():
                    self._commits.begin(offsets, None)
        if self._listener_failure is not None:
            failure, self._listener_failure = self._listener_failure, None
            between_steps(failure)
            raise failure

    def mend(self) -> None:
        """Give up requests in flight and join again: an interrupt has ended a call halfway."""
        self.cluster.end_deadlines()
        self.cluster.close()
        if self.is_subscribed:
            self._member.rejoin()
        self._commits.give_up(CallInterrupted("an interrupt has ended the call that waits for the commit"))

    def consumed(self, keys: Collection[TopicPartition] | None = None) -> dict[TopicPartition, Committed]:
        """The positions of these partitions, or of all, to commit."""
        return {
            item.key: Committed(item.position, item.epoch)
            for item in self._assignment
            if item.position is not None and (keys is None or item.key in keys)
        }

    def metadata(self) -> GroupMetadata:
        """This member, or the group alone if the consumer has not subscribed; `CommitFailed` as `commit`."""
        group, member = self._config.group_id or "", self._committer()
        if member is None:
            return GroupMetadata(group)
        return GroupMetadata(group, member.generation, member.member_id, member.instance_id)

    def commit(self, offsets: Offsets, *, skips_deleted: bool = False) -> None:
        if offsets:
            self._commits.commit(offsets, skips_deleted=skips_deleted)

    def commit_async(self, offsets: Offsets, on_done: OnCommit | None) -> None:
        self._commits.begin(offsets, on_done)

    def _committer(self) -> Membership | None:
        """The member that commits; `CommitFailed` outside of a generation.

        Without one a commit counts as that of a consumer that has not subscribed. The coordinator of an empty group
        accepts those, and would put the group back to what a lost member had read.
        """
        member = self._member.membership
        if member is None and self.is_subscribed:
            raise CommitFailed(
                f"the consumer is not a member of group {self._config.group_id} now, other members may read its "
                f"partitions: commit after the next poll has assigned some"
            )
        return member

    def committed(
        self, partitions: Collection[TopicPartition], timeout_ms: float, limit: str
    ) -> dict[TopicPartition, Committed]:
        with self.cluster.within(timeout_ms, limit):
            return self._commits.committed(partitions)

    def committed_now(
        self, partitions: Collection[TopicPartition], timeout_ms: float, limit: str
    ) -> tuple[dict[TopicPartition, Committed], dict[TopicPartition, ProtocolError]]:
        """Like `committed` without retries, with the errors of single partitions."""
        with self.cluster.within(timeout_ms, limit):
            return self._commits.committed_now(partitions)

    def owned(self) -> list[TopicPartition]:
        return self._assignment.keys()

    def assigned(self, partitions: list[TopicPartition], added: list[TopicPartition]) -> None:
        self._on_assign(partitions)
        self._tell(self._listener.on_assigned, added)

    def revoked(self, partitions: list[TopicPartition], *, is_lost: bool) -> None:
        try:
            if not is_lost:
                with self.cluster.apart():
                    self._auto_commit(partitions)
            self._tell(self._listener.on_lost if is_lost else self._listener.on_revoked, partitions)
        finally:  # even if it is interrupted: another member gets them soon
            self._on_assign([item.key for item in self._assignment if item.key not in set(partitions)])

    def _tell(self, call: Callable[[list[TopicPartition]], None], partitions: list[TopicPartition]) -> None:
        """Call the listener, and note what it raises: that must not break off the rebalance (as in Java's client)."""
        try:
            with self.cluster.apart():
                call(partitions)
        except Exception as error:
            if self._listener_failure is None:
                self._listener_failure = error
            else:
                _log.warning("the rebalance listener of group %s failed again: %s", self._config.group_id, error)

    def _auto_commit(self, keys: Collection[TopicPartition] | None) -> None:
        if not self._config.enable_auto_commit:
            return
        try:
            self.commit(self.consumed(keys), skips_deleted=True)
        except KlogError as error:
            _log.warning("offsets of group %s were not committed: %s", self._config.group_id, error)

    def unsubscribe(self, *, commits: bool = True) -> None:
        """Commit if enable.auto.commit is set and `commits`, call the listener, and leave the group."""
        try:
            if commits:
                self._auto_commit(None)
            if self.is_subscribed and (owned := self.owned()):
                self._listener.on_revoked(owned)
        finally:  # even if the listener raises: a member that stays keeps its partitions from the others
            if self.is_subscribed:
                self._member.leave()

    def close_sockets(self) -> None:
        """Close this process' copies of the connections, and send nothing: for a forked process."""
        self._member.close_sockets()
        self.cluster.close()

    def close(self, timeout: float = CLOSE_SECONDS, *, commits: bool = True) -> None:
        """Unsubscribe and close the connections within `timeout` s; `commits`: see `unsubscribe`.

        Like Java's clients it takes no longer than request.timeout.ms, and unlike them not as long if no broker at all
        can be reached.
        """
        self.cluster.patience = _PATIENCE
        longest_ms = min(1000 * max(0.0, timeout), self._config.client.request_timeout_ms)
        try:
            with self.cluster.within(longest_ms, _CLOSE_LIMIT):
                try:
                    self._commits.finish()
                finally:  # even if `on_done` raises
                    self.unsubscribe(commits=commits)
        finally:
            self.cluster.close()
