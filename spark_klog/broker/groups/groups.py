"""All groups of a broker: runs the state machines of `group.py` with a clock, a log and pending requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from spark_klog.base.clock import system_ms
from spark_klog.broker.groups.group import Group, Join, Member, Reply, State, refused_join, refused_sync
from spark_klog.broker.groups.known_groups import KnownGroups
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message


class Groups(KnownGroups[Group]):
    """All groups of the classic protocol. For one event loop.

    `store` writes a group to its partition of __consumer_offsets, or removes it (None).
    """

    def __init__(self, store: Callable[[str, Group | None], ErrorCode], initial_delay_ms: int, max_size: int) -> None:
        super().__init__()
        self._store = store
        self._initial_delay_ms = initial_delay_ms
        self._max_size = max_size

    def load(self, group_id: str, stored: Message | None) -> None:
        """Load a group's record from the log; a later record replaces an earlier one."""
        self._groups.pop(group_id, None)
        if stored is None:
            return
        group = self._make(group_id)
        group.generation, group.protocol = stored["generation"], stored["protocol"]
        group.protocol_type, group.leader = stored["protocol_type"] or None, stored["leader"]
        for row in stored["members"]:
            member_id, session_ms, rebalance_ms = (row["member_id"], row["session_timeout"], row["rebalance_timeout"])
            request = Join(
                member_id=member_id,
                instance_id=row["group_instance_id"],
                client_id=row["client_id"],
                client_host=row["client_host"],
                session_timeout_ms=session_ms,
                rebalance_timeout_ms=session_ms if rebalance_ms < 0 else rebalance_ms,
                protocol_type=stored["protocol_type"],
                protocols=((stored["protocol"] or "", bytes(row["subscription"])),),
            )
            group.members[member_id] = Member(member_id, request, bytes(row["assignment"]), is_named=True)
            if request.instance_id is not None:
                group.instances[request.instance_id] = member_id
        group.state = State.STABLE if group.members else State.EMPTY
        self._emptied[group_id] = stored["current_state_timestamp"]

    def stop(self) -> None:
        """Answer all waiting requests, so that clients look for the coordinator again, and accept no more."""
        super().stop()
        for group in self._groups.values():
            _set_results(group.release(ErrorCode.COORDINATOR_NOT_AVAILABLE))

    def _make(self, group_id: str) -> Group:
        group = self._groups[group_id] = Group(group_id, self._write, self._initial_delay_ms, self._max_size)
        return group

    def _write(self, group: Group) -> ErrorCode:
        self._emptied[group.group_id] = system_ms()
        return self._store(group.group_id, group)

    def note_emptied(self, group_id: str, emptied_ms: int) -> None:
        """Note when a group that is one of this class again lost its last member."""
        self._emptied[group_id] = emptied_ms

    async def join(self, group_id: str, join: Join) -> dict[str, Any]:
        """Answer JoinGroup; may take as long as a rebalance."""
        if self._is_stopped:
            return refused_join(ErrorCode.COORDINATOR_NOT_AVAILABLE, join.member_id)
        group = self._groups.get(group_id)
        if group is None:
            if join.member_id:
                return refused_join(ErrorCode.UNKNOWN_MEMBER_ID, join.member_id)
            group = self._make(group_id)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._deliver(group, group.join(join, answer, time.monotonic()))
        try:
            return await answer
        except asyncio.CancelledError:
            self._deliver(group, group.lost(answer, time.monotonic()))
            raise

    async def sync(
        self,
        group_id: str,
        member_id: str,
        instance_id: str | None,
        generation: int,
        protocol: tuple[str | None, str | None],
        assignments: dict[str, bytes],
    ) -> dict[str, Any]:
        """Answer SyncGroup, once the leader has assigned."""
        if self._is_stopped:
            return refused_sync(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        group = self._groups.get(group_id)
        if group is None:
            return refused_sync(ErrorCode.UNKNOWN_MEMBER_ID)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        now = time.monotonic()
        self._deliver(group, group.sync(member_id, instance_id, generation, protocol, assignments, answer, now))
        return await answer

    def heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
        group = self._groups.get(group_id)
        if group is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        return group.heartbeat(member_id, instance_id, generation, time.monotonic())

    def leave(self, group_id: str, member_id: str, instance_id: str | None) -> ErrorCode:
        group = self._groups.get(group_id)
        if group is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        code, replies = group.leave(member_id, instance_id, time.monotonic())
        self._deliver(group, replies)
        return code

    def may_commit(
        self,
        group_id: str,
        member_id: str,
        instance_id: str | None,
        generation: int,
        *,
        in_transaction: bool = False,
    ) -> ErrorCode:
        """Return NONE if OffsetCommit (`in_transaction`: TxnOffsetCommit) is allowed, else the error."""
        group = self._groups.get(group_id)
        if group is None:
            return ErrorCode.NONE if generation < 0 else ErrorCode.ILLEGAL_GENERATION
        now = time.monotonic()
        return group.may_commit(member_id, instance_id, generation, now, in_transaction=in_transaction)

    def _remove(self, group: Group) -> ErrorCode:
        return self._store(group.group_id, None) if group.generation else ErrorCode.NONE

    def _end(self, group: Group, code: ErrorCode) -> None:
        _set_results(group.release(code))
        super()._end(group, code)

    def begin_again(
        self,
        group_id: str,
        protocols: Mapping[str, tuple[tuple[str, bytes], ...]],
        reserved_generation: int,
        reason: str,
    ) -> None:
        """Let the members of a group that has been loaded join again; `protocols` are all that each supports."""
        group, now = self._groups[group_id], time.monotonic()
        group.reserved_generation = reserved_generation
        for member in group.members.values():
            member.request = member.request._replace(protocols=protocols[member.member_id])
        group.restart(now)
        self._deliver(group, group.rebalance(now, reason))

    def _deliver(self, group: Group, replies: list[Reply]) -> None:
        _set_results(replies)
        if group.state is not State.DEAD:
            self._set_timer(group)

    def _tick(self, group: Group) -> None:
        self._deliver(group, group.tick(time.monotonic()))


def _set_results(replies: list[Reply]) -> None:
    for token, message in replies:
        assert isinstance(token, asyncio.Future)
        if not token.done():  # the connection may be gone
            token.set_result(message)
