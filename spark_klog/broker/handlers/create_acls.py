"""CreateAcls v1-3 (KIP-140): add rules to the users file; ACLs that rules can't express get INVALID_REQUEST.

Each ACL has its own result, as in Kafka; the valid ones are one change of the file.
"""

from __future__ import annotations

import asyncio
import logging

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.handlers.describe_acls import WITHOUT_RULES
from spark_klog.broker.security import acls
from spark_klog.errors import ConfigError, ErrorCode
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    creations = message["creations"]
    if not broker.authorizer.is_admin(request.session):
        refusal = {"error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "error_message": "only admins create ACLs"}
        return {"results": [refusal for _ in creations]}
    if not broker.authorizer.has_rules:
        refusal = {"error_code": ErrorCode.SECURITY_DISABLED, "error_message": WITHOUT_RULES}
        return {"results": [refusal for _ in creations]}
    created = [
        acls.Acl(
            entry["resource_type"],
            entry["resource_name"],
            entry["resource_pattern_type"],
            entry["principal"],
            entry["host"],
            entry["operation"],
            entry["permission_type"],
        )
        for entry in creations
    ]
    reasons = [_reason(acl) for acl in created]
    valid = [acl for acl, reason in zip(created, reasons, strict=True) if reason is None]
    failure: Message = {"error_code": ErrorCode.NONE}
    if valid:
        try:
            await asyncio.to_thread(broker.users.change, lambda users: acls.add(users, valid))
            _log.info("%s (%s) created %d ACLs", request.client_id, request.peer, len(valid))
        except ConfigError as error:
            _log.error("ACLs can't be created: %s", error)
            failure = {"error_code": ErrorCode.INVALID_CONFIG, "error_message": str(error)}
    return {
        "results": [
            failure if reason is None else {"error_code": ErrorCode.INVALID_REQUEST, "error_message": reason}
            for reason in reasons
        ]
    }


def _reason(acl: acls.Acl) -> str | None:
    try:
        acls.check_expressible(acl)
    except ConfigError as error:
        return str(error)
    return None
