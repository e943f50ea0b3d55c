"""A consumer in its group by the consumer protocol (KIP-848): the coordinator assigns, heartbeats tell the rest.

    joining      the heartbeat has epoch 0 and the whole subscription; the answer has the member's epoch
    stable       heartbeats in that epoch; an answer may have another assignment
    reconciling  the polling thread revokes what is not in it and takes what is new; the next heartbeat tells

Partitions of other members stay where they are, and no member waits for another one.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Collection
from typing import NamedTuple
from uuid import UUID, uuid4

from spark_klog.base.names import TopicPartition
from spark_klog.client.answers import answer_error
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer.assignment import Assignment, Troubles
from spark_klog.client.consumer.group import Beside, ConsumerGroup, Heartbeating, RebalanceListener
from spark_klog.client.consumer.settings import ConsumerConfig
from spark_klog.client.coordinator import finding_coordinator
from spark_klog.client.offsets import GroupMetadata
from spark_klog.client.requests import Steps, Wait
from spark_klog.client.retry import pause_seconds
from spark_klog.errors import (
    ErrorCode,
    KlogError,
    MemberFenced,
    ProtocolError,
    Remedy,
    UnsupportedVersionError,
    is_retriable,
)
from spark_klog.protocol.apis import CONSUMER_GROUP_HEARTBEAT
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.groups import JOIN_EPOCH, LEAVE_EPOCH, STATIC_LEAVE_EPOCH

_log = logging.getLogger(__name__)
#: Partitions by topic id, as heartbeats name them.
_Ids = frozenset[tuple[UUID, int]]
_NO_IDS: _Ids = frozenset()
#: Not a member: the polling thread has to learn of it before this one joins again.
_OUTSIDE = -1
_UNCHANGED_MS = -1
_LOST = (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_MEMBER_EPOCH)
#: The first version of ConsumerGroupHeartbeat with a regular expression.
_FIRST_WITH_REGEX = 1
_REGEX_ADVICE = (
    "the coordinator resolves text that begins with ^, in RE2's syntax; for Python's subscribe with a compiled pattern "
    "(re.compile)"
)
#: Seconds until the next look for the names of topics that the coordinator has assigned.
_NAME_SECONDS = 0.1


class Subscription(NamedTuple):
    """What a member subscribes to: topics, and a regular expression that the coordinator resolves ("": none)."""

    topics: frozenset[str] = frozenset()
    regex: str = ""


class _News(NamedTuple):
    """What heartbeats have brought: the loss of membership, the last failure, the last assignment."""

    is_lost: bool = False
    failure: KlogError | None = None
    assigned: _Ids | None = None
    #: Whether the member is outside of the group, and no loss of it is still to be told.
    is_outside: bool = False


class EpochHeartbeats(Heartbeating):
    """Heartbeats of one member, from `join` until it is lost or `stop`. Calls `on_news` when `take_news` has some."""

    def __init__(self, config: ConsumerConfig, on_news: Callable[[], None], beside: Beside | None = None) -> None:
        super().__init__(config, on_news, beside)
        self.member_id = str(uuid4())
        #: The member's epoch: `JOIN_EPOCH` while it joins, `_OUTSIDE` before that and after a loss.
        self.epoch = _OUTSIDE
        self._news = _News()
        self._subscription = Subscription()
        self._owned = _NO_IDS
        #: What the coordinator knows by an answered heartbeat; None: tell all again, or what the member owns.
        self._told: tuple[Subscription, _Ids | None] | None = None
        self._next_at = 0.0
        #: Whether a coordinator may know the member. It fences one that joins though it is known, so that one leaves
        #: before it joins again.
        self.may_be_known = False
        #: Whether the last heartbeat failed.
        self.is_failing = False

    # ----- for the polling thread

    def join(self, subscription: Subscription) -> None:
        """Join, owning nothing."""
        with self._lock:
            self._subscription, self._owned, self._told = subscription, _NO_IDS, None
            self.epoch, self._news = JOIN_EPOCH, _News()
            self.polled_at = time.monotonic()
            self._beat_now()
        self._start()

    def subscribe(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscription = subscription
            self._beat_now()

    def hurry(self) -> None:
        """Send the next heartbeat at once."""
        with self._lock:
            self._beat_now()

    def own(self, owned: _Ids, *, is_all: bool) -> None:
        """Tell the coordinator what the member owns from now on; `is_all` if these are all that it was assigned.

        Then the coordinator is told even what it was told before: if it has assigned more meanwhile, and has taken that
        back, it waits for this before it gives the partitions to others.
        """
        with self._lock:
            self._owned = owned
            if self._told is not None and is_all:
                self._told = self._told[0], None
            if self._told is None or self._told[1] != owned:
                self._beat_now()

    def forget(self) -> None:
        """Send no heartbeats until `join`."""
        with self._lock:
            self.epoch, self._news = _OUTSIDE, _News()
            self._tell_changes()

    def take_news(self) -> _News:
        with self._lock:
            news, self._news = self._news, _News()
            return news._replace(is_outside=self.epoch == _OUTSIDE)

    def leave(self, cluster: Cluster) -> Steps[None]:
        """Send the last heartbeat, of a static member one for a while.

        Raises what `Cluster.request` raises, and `ProtocolError` if the member may still be in the group.
        """
        epoch = LEAVE_EPOCH if self._config.group_instance_id is None else STATIC_LEAVE_EPOCH
        request = {"group_id": self._group, "member_id": self.member_id, "member_epoch": epoch}
        request["instance_id"] = self._config.group_instance_id
        node = yield from finding_coordinator(cluster, self._group)
        answer = yield from cluster.asking(node, CONSUMER_GROUP_HEARTBEAT, request)
        error = answer_error(CONSUMER_GROUP_HEARTBEAT, answer["error_code"], f"leaving group {self._group}")
        if error.retriable:
            raise error
        self.may_be_known = False

    # ----- the thread, or the loop

    def _beat_now(self) -> None:
        self._next_at = 0.0
        self._tell_changes()

    def _beating(self) -> Steps[None]:
        node: int | None = None
        attempts = 0
        with self.cluster as cluster:
            while not self._is_stopping:
                request = self._due()
                if not isinstance(request, dict):
                    yield Wait(None, request)
                    continue
                if request["member_epoch"] in (LEAVE_EPOCH, STATIC_LEAVE_EPOCH):
                    yield from self._give_up(cluster)
                    continue
                try:
                    with cluster.within(self._config.client.request_timeout_ms):
                        node = (yield from finding_coordinator(cluster, self._group)) if node is None else node
                        version = yield from cluster.asking_version(node, CONSUMER_GROUP_HEARTBEAT)
                        self._check_version(version, request)
                        if self.may_be_known and request["member_epoch"] == JOIN_EPOCH:
                            yield from self.leave(cluster)
                        self.may_be_known = True
                        answer = yield from cluster.asking(node, CONSUMER_GROUP_HEARTBEAT, request)
                    self._answered(request, answer)
                    attempts = 0
                except KlogError as error:
                    node, attempts = None, attempts + 1
                    self._failed(request, error, pause_seconds(self._config.client, attempts))

    def _due(self) -> Message | float:
        """The heartbeat that is due, or when one is unless something changes, a reading of `time.monotonic`."""
        longest = self._config.max_poll_interval_ms / 1000
        with self._lock:
            now = time.monotonic()
            if self.epoch == _OUTSIDE:
                return math.inf
            if now >= self.polled_at + longest:
                return {"member_epoch": LEAVE_EPOCH}
            if now < self._next_at:
                return min(self._next_at, self.polled_at + longest)
            self._next_at = math.inf  # until the answer, unless something changes meanwhile
            return self._request()

    def _request(self) -> Message:
        config, told = self._config, self._told
        is_full = told is None or self.epoch == JOIN_EPOCH
        topics: list[str] | None = sorted(self._subscription.topics)
        regex: str | None = self._subscription.regex  # "" takes back one told before
        if not regex and self.epoch == JOIN_EPOCH:
            regex = None
        if told is not None and told[0] == self._subscription:
            topics = regex = None
        owned = None if told is not None and told[1] == self._owned else _topic_partitions(self._owned)
        return {
            "group_id": self._group,
            "member_id": self.member_id,
            "member_epoch": self.epoch,
            "instance_id": config.group_instance_id,
            "rack_id": config.client_rack or None if is_full else None,
            "rebalance_timeout_ms": config.max_poll_interval_ms if is_full else _UNCHANGED_MS,
            "subscribed_topic_names": topics,
            "subscribed_topic_regex": regex,
            "server_assignor": config.group_remote_assignor if is_full else None,
            "topic_partitions": owned,
        }

    def _check_version(self, version: int, request: Message) -> None:
        if request["subscribed_topic_regex"] and version < _FIRST_WITH_REGEX:
            raise UnsupportedVersionError(
                f"the coordinator of group {self._group} resolves no regular expressions, as Kafka does from 4.0 on"
            )

    def _answered(self, request: Message, answer: Message) -> None:
        """Take over what the coordinator has answered; raises its error."""
        code = answer["error_code"]
        if code:
            raise self._error(answer)
        with self._lock:
            if self.epoch != request["member_epoch"]:
                return  # the polling thread has begun anew
            self.epoch = answer["member_epoch"]
            self.is_failing = False
            subscription, owned = self._told or (Subscription(), None)
            if request["subscribed_topic_names"] is not None:
                topics, regex = frozenset(request["subscribed_topic_names"]), request["subscribed_topic_regex"]
                subscription = Subscription(topics, regex or "")
            if request["topic_partitions"] is not None:
                owned = _ids(request["topic_partitions"])
            self._told = subscription, owned
            self._next_at = min(self._next_at, time.monotonic() + answer["heartbeat_interval_ms"] / 1000)
            if answer["assignment"] is None:
                return
            self._news = self._news._replace(assigned=_ids(answer["assignment"]["topic_partitions"]))
        self._on_news()

    def _error(self, answer: Message) -> KlogError:
        code, config = answer["error_code"], self._config
        what = f"heartbeat of group {self._group}"
        if code == ErrorCode.FENCED_INSTANCE_ID:
            return MemberFenced(
                f"another member of group {self._group} has group.instance.id={config.group_instance_id}: "
                f"close one of the two"
            )
        if code == ErrorCode.UNRELEASED_INSTANCE_ID:
            advice = f"a member with group.instance.id={config.group_instance_id} has not left, or not yet timed out"
            return ProtocolError(code, what, Remedy.RETRY, advice)
        if code == ErrorCode.GROUP_ID_NOT_FOUND:
            advice = (
                "its members are of another kind: set another group.id or group.protocol=classic, or close them first"
            )
            return ProtocolError(code, what, advice=advice)
        error = answer_error(CONSUMER_GROUP_HEARTBEAT, code, what)
        if code == ErrorCode.INVALID_REGULAR_EXPRESSION:
            reason = answer["error_message"] or repr(self._subscription.regex)
            return ProtocolError(code, what, advice=f"{reason}: {_REGEX_ADVICE}")
        return ProtocolError(error.code, what, error.remedy, answer["error_message"] or error.advice)

    def _failed(self, request: Message, error: KlogError, pause: float) -> None:
        code = error.code if isinstance(error, ProtocolError) else None
        with self._lock:
            if self.epoch != request["member_epoch"]:
                return
            self._told, self.is_failing = None, True
            was_deleted = code == ErrorCode.GROUP_ID_NOT_FOUND and request["member_epoch"] > JOIN_EPOCH
            if code in _LOST or was_deleted:
                self.may_be_known = code == ErrorCode.FENCED_MEMBER_EPOCH
                _log.info("member %s of group %s: %s", self.member_id, self._group, error)
                self.epoch, self._news = _OUTSIDE, _News(is_lost=True)
            elif is_retriable(error):
                self._next_at = time.monotonic() + pause
                self._news = self._news._replace(failure=error)
            else:
                if isinstance(error, UnsupportedVersionError):
                    error = UnsupportedVersionError(f"{error}: set group.protocol=classic")
                self.epoch, self._news = _OUTSIDE, _News(is_lost=True, failure=error)
        self._on_news()

    def _give_up(self, cluster: Cluster) -> Steps[None]:
        _log.warning(
            "no poll for max.poll.interval.ms=%d: the consumer leaves group %s",
            *(self._config.max_poll_interval_ms, self._group),
        )
        with self._lock:
            self.epoch, self._news = _OUTSIDE, _News(is_lost=True)
        try:
            with cluster.within(self._config.client.request_timeout_ms):
                yield from self.leave(cluster)
        except KlogError as error:
            _log.info("leaving group %s: %s", self._group, error)
        self._on_news()


def _ids(rows: list[Message]) -> _Ids:
    return frozenset((row["topic_id"], number) for row in rows for number in row["partitions"])


def _topic_partitions(ids: _Ids) -> list[Message]:
    numbers: dict[UUID, list[int]] = {}
    for topic_id, number in sorted(ids):
        numbers.setdefault(topic_id, []).append(number)
    return [{"topic_id": topic_id, "partitions": some} for topic_id, some in numbers.items()]


class ConsumerProtocolGroup(ConsumerGroup):
    """A consumer's work in its group by the consumer protocol."""

    def __init__(
        self,
        config: ConsumerConfig,
        assignment: Assignment,
        on_news: Callable[[], None],
        troubles: Troubles,
        beside: Beside | None = None,
    ) -> None:
        super().__init__(config, assignment, on_news, troubles, beside)
        self._heartbeats: EpochHeartbeats = EpochHeartbeats(config, on_news, beside)
        #: What the heartbeats tell.
        self._told = Subscription()
        #: The last assignment, until the consumer has it.
        self._assigned: _Ids | None = None
        #: The ids of the topics of assigned partitions.
        self._topic_ids: dict[str, UUID] = {}

    def subscribe(
        self, topics: Collection[str], pattern: re.Pattern[str] | str | None, listener: RebalanceListener
    ) -> None:
        """Read these topics, and those whose full names match; tells the coordinator with the next step."""
        self._listener = listener
        self._topics.subscribe(topics, pattern)

    def look_at(self) -> float:
        """When to call `step` if nothing arrives, a reading of `time.monotonic`."""
        if not self.is_subscribed:
            return self._commit_at
        at = self._topics.look_at
        if self._assigned is not None or self._heartbeats.epoch == _OUTSIDE:
            at = min(at, self._retry_at)
        return min(at, self._commit_at)

    def _take_part(self) -> Steps[None]:
        now = self._heartbeats.polled_at = time.monotonic()
        yield from self._topics.look(now)
        news = self._heartbeats.take_news()
        if news.is_lost:
            yield from self._lose()
        if news.assigned is not None:
            self._assigned, self._retry_at = news.assigned, 0.0
        if news.failure is not None:
            raise news.failure
        subscription = Subscription(self._topics.names, self._topics.regex)
        if news.is_outside and now >= self._retry_at:
            self._told = subscription
            self._heartbeats.join(subscription)
        elif subscription != self._told:
            self._told = subscription
            self._heartbeats.subscribe(subscription)
        if self._assigned is not None and now >= self._retry_at:
            yield from self._reconcile(self._assigned, now)
        if not self._heartbeats.is_failing:
            self._note_success()

    def _reconcile(self, assigned: _Ids, now: float) -> Steps[None]:
        """Revoke partitions that are not assigned, then take those that are."""
        if not {topic_id for topic_id, _ in assigned} <= set(self.cluster.topic_ids.values()):
            yield from self.cluster.asking_metadata(None if self._told.regex else self._told.topics or None)
        names = {topic_id: name for ids in (self._topic_ids, self.cluster.topic_ids) for name, topic_id in ids.items()}
        taken = frozenset((topic_id, number) for topic_id, number in assigned if topic_id in names)
        wanted = sorted({(names[topic_id], number) for topic_id, number in taken})
        owned = {key for key in self._assignment.partitions if (self._topic_ids.get(key[0]), key[1]) in assigned}
        revoked = sorted(set(self._assignment.partitions) - owned)
        if revoked:
            yield from self._revoke_in_topics(revoked, assigned)
        if taken == assigned:
            self._assigned = None
        else:  # a new topic: other brokers may not know it yet
            self._retry_at = now + _NAME_SECONDS
        self._topic_ids = {names[topic_id]: topic_id for topic_id, _ in taken}
        self._assignment.set(wanted)
        self._heartbeats.own(taken, is_all=self._assigned is None)
        _log.info(
            "group %s: member %s has %d partitions in epoch %d",
            *(self.name, self._heartbeats.member_id, len(wanted), self._heartbeats.epoch),
        )
        added = sorted(set(wanted) - owned)
        if added or not (revoked or owned):
            yield from self._tell(self._listener.on_assigned, added)

    def _revoke_in_topics(self, revoked: list[TopicPartition], assigned: _Ids) -> Steps[None]:
        """Give up partitions; those of topics that have been created again are lost.

        Offsets are committed by the name of a topic: they would count in the new one.
        """
        kept = {topic_id for topic_id, _ in assigned}
        if gone := {topic for topic, _ in revoked if self._topic_ids.get(topic) not in kept}:
            yield from self.cluster.asking_metadata(gone)
        again = {topic for topic in gone if self.cluster.topic_ids.get(topic) != self._topic_ids.get(topic)}
        if lost := [key for key in revoked if key[0] in again]:
            _log.warning("%s: deleted and created again; going on as auto.offset.reset says", ", ".join(sorted(again)))
            yield from self._revoke(lost, is_lost=True)
        if given_up := [key for key in revoked if key not in lost]:
            yield from self._revoke(given_up, is_lost=False)

    def _lose(self) -> Steps[None]:
        """Handle the loss of membership: other members may already read the partitions."""
        self._assigned = None
        self._retry_at = 0.0
        owned = list(self._assignment.partitions)
        if owned:
            yield from self._revoke(owned, is_lost=True)

    def _give_up_membership(self) -> Steps[None]:
        self._heartbeats.forget()
        yield from self._lose()

    def _as_member(self) -> GroupMetadata | None:
        epoch = self._heartbeats.epoch
        if epoch <= JOIN_EPOCH:
            return None
        return GroupMetadata(self.name, epoch, self._heartbeats.member_id, self._config.group_instance_id)

    def _reader(self) -> GroupMetadata | None:
        return self._as_member()  # None after a loss: the next step gives up what begins at these offsets

    def _suspect(self) -> None:
        self._heartbeats.hurry()

    def _leave(self) -> Steps[None]:
        """Stop heartbeats, and leave the group; a static member does so for a while (KIP-345)."""
        self._heartbeats.stop(self.cluster.deadline())
        if self._heartbeats.may_be_known:
            try:
                timeout_ms = self._config.default_api_timeout_ms
                leaving = self.cluster.attempting(
                    lambda: self._heartbeats.leave(self.cluster), timeout_ms, "default.api.timeout.ms"
                )
                yield from leaving
            except KlogError as error:
                _log.info("leaving group %s: %s", self.name, error)
        self._heartbeats.forget()
