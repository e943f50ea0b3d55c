"""The members of a group, and what they are answered."""

from __future__ import annotations

from typing import Any

from spark_klog.broker.groups.member import Member
from spark_klog.broker.groups.replies import Replies
from spark_klog.broker.groups.state import TRANSITIONS, State
from spark_klog.errors import ErrorCode


class Membership:
    """The base of `Group`, which decides when members come and go."""

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.state = State.EMPTY
        self.generation = 0
        self.protocol_type: str | None = None
        self.protocol: str | None = None
        self.leader: str | None = None
        self.members: dict[str, Member] = {}
        #: Static members: instance id to member id.
        self.instances: dict[str, str] = {}
        #: Members of this generation that have not sent SyncGroup.
        self._unsynced: set[str] = set()
        self._replies = Replies()

    def _go(self, state: State) -> None:
        if state is not self.state:
            assert state in TRANSITIONS[self.state], f"{self.state} to {state}"
            self.state = state

    def _hear_of(self, member: Member, now: float) -> None:
        member.deadline = now + member.session_timeout_ms / 1000

    def _member_code(self, member_id: str, instance_id: str | None) -> ErrorCode:
        if self.state is State.DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if instance_id is not None and instance_id in self.instances and self.instances[instance_id] != member_id:
            return ErrorCode.FENCED_INSTANCE_ID
        member = self.members.get(member_id)
        if member is None or (instance_id is not None and member.instance_id != instance_id):
            return ErrorCode.UNKNOWN_MEMBER_ID
        return ErrorCode.NONE

    def _generation_code(self, generation: int) -> ErrorCode:
        return ErrorCode.NONE if generation == self.generation else ErrorCode.ILLEGAL_GENERATION

    def _joined(self, member: Member) -> dict[str, Any]:
        member.is_named = True
        leads = member.member_id == self.leader
        return {
            "error_code": ErrorCode.NONE,
            "generation_id": self.generation,
            "protocol_type": self.protocol_type,
            "protocol_name": self.protocol,
            "leader": self.leader,
            "member_id": member.member_id,
            "members": [one.described_to_leader(self.protocol) for one in self.members.values()] if leads else [],
        }

    def _answer_joined(self, member: Member, token: object, *, skips: bool = False) -> None:
        self._replies.add(token, self._joined(member) | {"skip_assignment": skips})

    def _answer_synced(self, token: object, assignment: bytes) -> None:
        protocol = {"protocol_type": self.protocol_type, "protocol_name": self.protocol}
        self._replies.add(token, {"error_code": ErrorCode.NONE, "assignment": assignment} | protocol)

    def _replace(self, old_id: str, new_id: str) -> Member:
        member = self.members.pop(old_id)
        if old_id in self._unsynced:
            self._unsynced.remove(old_id)
            self._unsynced.add(new_id)
        self._replies.refuse_waiting(member, ErrorCode.FENCED_INSTANCE_ID)
        member.member_id = new_id
        self.members[new_id] = member
        assert member.instance_id is not None
        self.instances[member.instance_id] = new_id
        if self.leader == old_id:
            self.leader = new_id
        return member

    def _forget(self, member: Member) -> None:
        del self.members[member.member_id]
        self._unsynced.discard(member.member_id)
        if member.instance_id is not None:
            self.instances.pop(member.instance_id, None)
        self._replies.refuse_waiting(member, ErrorCode.UNKNOWN_MEMBER_ID)
        if self.leader == member.member_id:
            self.leader = next(iter(self.members), None)
