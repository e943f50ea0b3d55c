"""DescribeUserScramCredentials v0 (KIP-554): mechanisms and iterations of users in the users file."""

from __future__ import annotations

from collections import Counter

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.security.config import SCRAM_SHA_256, SCRAM_SHA_512
from spark_klog.broker.security.users_file import User
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message

#: Mechanisms by Kafka's numbers.
MECHANISMS = {1: SCRAM_SHA_256, 2: SCRAM_SHA_512}


def handle(broker: Broker, request: Request, message: Message) -> Message:
    if not broker.authorizer.is_admin(request.session):
        refusal: Message = {
            "error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
            "error_message": "only admins describe credentials",
        }
        # as in Kafka, the error is repeated for each user
        results = [{"user": entry["name"]} | refusal for entry in message["users"] or ()]
        return refusal | {"results": results}
    users = broker.users.all()
    if message["users"]:
        counts = Counter(entry["name"] for entry in message["users"])
        results = [_result(name, users.get(name), count) for name, count in counts.items()]
    else:
        results = [_result(name, user) for name, user in sorted(users.items()) if user.credentials]
    return {"error_code": ErrorCode.NONE, "results": results}


def _result(name: str, user: User | None, times_asked: int = 1) -> Message:
    if name and times_asked > 1:
        reason = f"user {name[:255]!r} is in the request {times_asked} times"
        return {"user": name, "error_code": ErrorCode.DUPLICATE_RESOURCE, "error_message": reason}
    if user is None or not user.credentials:
        reason = f"user {name[:255]!r} has no SCRAM credentials"
        return {"user": name, "error_code": ErrorCode.RESOURCE_NOT_FOUND, "error_message": reason}
    infos = [
        {"mechanism": number, "iterations": user.credentials[mechanism].iterations}
        for number, mechanism in MECHANISMS.items()
        if mechanism in user.credentials
    ]
    return {"user": name, "error_code": ErrorCode.NONE, "credential_infos": infos}
