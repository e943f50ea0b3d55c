"""Responses to members' requests: deferred ones, and refusals."""

from __future__ import annotations

from typing import Any, NamedTuple

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
