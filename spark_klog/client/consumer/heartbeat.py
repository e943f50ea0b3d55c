"""The thread that sends a member's heartbeats and enforces max.poll.interval.ms."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from spark_klog.client.answers import answer_error
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer.settings import ConsumerConfig
from spark_klog.client.coordinator import find_coordinator
from spark_klog.client.offsets import GroupMetadata
from spark_klog.client.retry import pause_seconds
from spark_klog.errors import ErrorCode, KlogError
from spark_klog.protocol.apis import HEARTBEAT, LEAVE_GROUP
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)
#: The coordinator has moved or loads its groups: the heartbeat is sent again.
_AGAIN = (
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.REQUEST_TIMED_OUT,
)
#: Seconds that `stop` waits for the thread; a request in flight then ends by request.timeout.ms.
_STOP_SECONDS = 5.0


def leave(cluster: Cluster, member: GroupMetadata, reason: str) -> None:
    """Send LeaveGroup for a member; raises what `Cluster.request` raises."""
    node = find_coordinator(cluster, member.group)
    entry = {"member_id": member.member, "group_instance_id": member.instance, "reason": reason}
    is_old = cluster.version_of(node, LEAVE_GROUP) < 3
    request: Message = {"group_id": member.group}
    request |= {"member_id": member.member} if is_old else {"members": [entry]}
    cluster.request(node, LEAVE_GROUP, request)


class Heartbeats:
    """Heartbeats of one member, from `begin` until `pause`. Calls `on_news` when `take_news` has an error code."""

    def __init__(self, config: ConsumerConfig, on_news: Callable[[], None]) -> None:
        self._config = config
        self._group = config.group_id or ""
        self._on_news = on_news
        #: To enter and leave by itself: an interrupt may keep the lock of a `Condition` that is.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._member: GroupMetadata | None = None
        self._news: ErrorCode | None = None
        self._polled_at = time.monotonic()
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self._cluster = Cluster(config.client)

    def begin(self, member: GroupMetadata) -> None:
        """Start the heartbeats of this member."""
        with self._lock:
            self._member, self._news = member, None
            self._polled_at = time.monotonic()
            self._changed.notify_all()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="klog-heartbeats", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """Send no heartbeats until `begin`."""
        with self._lock:
            self._member = self._news = None
            self._changed.notify_all()

    def polled(self) -> None:
        """Note that the program has polled: restart max.poll.interval.ms."""
        self._polled_at = time.monotonic()

    def take_news(self) -> ErrorCode | None:
        """Take the error code that the coordinator has answered since the last call, if any."""
        with self._lock:
            news, self._news = self._news, None
            return news

    def stop(self, deadline: float) -> None:
        """Stop the thread; wait for it to the deadline, a reading of `time.monotonic`, at most 5 s."""
        with self._lock:
            self._is_stopping = True
            self._changed.notify_all()
        self._cluster.patience = 0.0
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(max(0.0, min(_STOP_SECONDS, deadline - time.monotonic())))

    def close_sockets(self) -> None:
        """Close this process' copies of the connections: for a forked process, which does not have the thread."""
        self._cluster.close()

    def _run(self) -> None:
        with self._cluster as cluster:
            while True:
                with self._lock:
                    while self._member is None and not self._is_stopping:
                        self._changed.wait()
                    member = self._member
                    if self._is_stopping or member is None:
                        return
                self._keep(cluster, member)

    def _keep(self, cluster: Cluster, member: GroupMetadata) -> None:
        """Send heartbeats of one generation until it ends."""
        config = self._config
        node: int | None = None
        attempts = 0
        heard_at = time.monotonic()
        next_at = heard_at + config.heartbeat_interval_ms / 1000
        while True:
            poll_until = self._polled_at + config.max_poll_interval_ms / 1000
            with self._lock:
                if self._member is not member or self._is_stopping:
                    return
                now = time.monotonic()
                if now < min(next_at, poll_until):
                    self._changed.wait(min(next_at, poll_until) - now)
                    continue
            if now >= poll_until:
                self._give_up(cluster, member)
                return
            try:
                with cluster.within(config.session_timeout_ms, "session.timeout.ms"):
                    node = find_coordinator(cluster, self._group) if node is None else node
                    code = self._beat(cluster, node, member)
            except KlogError as error:
                node, attempts = None, attempts + 1
                _log.info("heartbeat of group %s: %s", self._group, error)
                if time.monotonic() > heard_at + config.session_timeout_ms / 1000:
                    self._tell(member, ErrorCode.UNKNOWN_MEMBER_ID)
                    return
                next_at = time.monotonic() + pause_seconds(config.client, attempts)
                continue
            attempts, heard_at = 0, time.monotonic()
            next_at = heard_at + config.heartbeat_interval_ms / 1000
            if code == ErrorCode.NONE:
                continue
            self._tell(member, code)
            if code != ErrorCode.REBALANCE_IN_PROGRESS:
                return

    def _beat(self, cluster: Cluster, node: int, member: GroupMetadata) -> ErrorCode:
        """Send one heartbeat; raises if it must be repeated."""
        request = {
            "group_id": self._group,
            "generation_id": member.generation,
            "member_id": member.member,
            "group_instance_id": member.instance,
        }
        answer = cluster.request(node, HEARTBEAT, request)
        error = answer_error(HEARTBEAT, answer["error_code"], f"heartbeat of group {self._group}")
        if error.code in _AGAIN:
            raise error
        return error.code

    def _tell(self, member: GroupMetadata, code: ErrorCode) -> None:
        with self._lock:
            if self._member is not member:
                return
            self._news = code
            if code != ErrorCode.REBALANCE_IN_PROGRESS:
                self._member = None
        self._on_news()

    def _give_up(self, cluster: Cluster, member: GroupMetadata) -> None:
        _log.warning(
            "no poll for max.poll.interval.ms=%d: the consumer leaves group %s",
            *(self._config.max_poll_interval_ms, self._group),
        )
        if member.instance is None:
            try:
                leave(cluster, member, "max.poll.interval.ms has passed")
            except KlogError as error:
                _log.info("leaving group %s: %s", self._group, error)
        self._tell(member, ErrorCode.UNKNOWN_MEMBER_ID)
