"""What the requests of members are answered, where they have waited or are refused."""

from __future__ import annotations

from typing import Any, NamedTuple

from spark_klog.errors import ErrorCode

_NO_GENERATION = -1


class Reply(NamedTuple):
    """The answer to the request of `token`: fields of its response."""

    token: object
    message: dict[str, Any]


def refused_join(code: ErrorCode, member_id: str) -> dict[str, Any]:
    """Of JoinGroup."""
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
    """Of SyncGroup."""
    return {"error_code": code, "assignment": b""}
