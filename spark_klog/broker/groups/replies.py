"""Responses to members' requests: deferred ones, and refusals."""

from __future__ import annotations

from typing import Any, NamedTuple

from spark_klog.broker.groups.member import Member
from spark_klog.errors import ErrorCode

_NO_GENERATION = -1


class Reply(NamedTuple):
    """Fields of the response to the request that `token` names."""

    token: object
    message: dict[str, Any]


def refused_join(code: ErrorCode, member_id: str) -> dict[str, Any]:
    """Fields of a JoinGroup response with an error."""
    return {
        "error_code": code,
        "generation_id": _NO_GENERATION,
        "protocol_type": None,
        "protocol_name": "",
        "leader": "",
        "member_id": member_id,
        "members": [],
    }


def refused_sync(code: ErrorCode) -> dict[str, Any]:
    """Fields of a SyncGroup response with an error."""
    return {"error_code": code, "assignment": b""}


class Replies:
    """Replies of a group that are due, in order. Tokens are the caller's objects, opaque here."""

    def __init__(self) -> None:
        self._due: list[Reply] = []

    def add(self, token: object, message: dict[str, Any]) -> None:
        """Answer a request."""
        self._due.append(Reply(token, message))

    def refuse_join(self, token: object, code: ErrorCode, member_id: str) -> None:
        """Answer a JoinGroup with an error."""
        self.add(token, refused_join(code, member_id))

    def refuse_sync(self, token: object, code: ErrorCode) -> None:
        """Answer a SyncGroup with an error."""
        self.add(token, refused_sync(code))

    def refuse_waiting(self, member: Member, code: ErrorCode) -> None:
        """Answer a member's waiting requests with an error."""
        if member.join_token is not None:
            self.refuse_join(member.join_token, code, member.member_id)
        if member.sync_token is not None:
            self.refuse_sync(member.sync_token, code)
        member.join_token = member.sync_token = None

    def replace_sync(self, member: Member, token: object) -> None:
        """Let a member's new SyncGroup wait, in place of an earlier one."""
        if member.sync_token is not None:
            self.refuse_sync(member.sync_token, ErrorCode.REBALANCE_IN_PROGRESS)
        member.sync_token = token

    def take(self) -> list[Reply]:
        """Return the replies that are due, once."""
        due, self._due = self._due, []
        return due
