"""DeleteAcls v1-3 (KIP-140): remove the rules that match the filters from the users file, in one change."""

from __future__ import annotations

import asyncio
import logging

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.handlers.describe_acls import WITHOUT_RULES, filter_of
from spark_klog.broker.security.acls import Acl, AclFilter, acls_of, remove
from spark_klog.broker.security.users_file import User
from spark_klog.errors import ConfigError, ErrorCode
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    filters = [filter_of(entry) for entry in message["filters"]]
    if not broker.authorizer.is_admin(request.session):
        refusal = _refused(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "only admins delete ACLs")
        return {"filter_results": [refusal for _ in filters]}
    if not broker.authorizer.has_rules:
        return {"filter_results": [_refused(ErrorCode.SECURITY_DISABLED, WITHOUT_RULES) for _ in filters]}
    matching: list[list[Acl]] = []

    def change(users: dict[str, User]) -> None:
        there = acls_of(users)
        matching.extend(
            [acl for acl in there if _is_valid(acl_filter) and acl_filter.matches(acl)] for acl_filter in filters
        )
        remove(users, dict.fromkeys(acl for found in matching for acl in found))

    try:
        await asyncio.to_thread(broker.users.change, change)
    except ConfigError as error:
        _log.error("ACLs can't be deleted: %s", error)
        return {"filter_results": [_refused(ErrorCode.INVALID_CONFIG, str(error)) for _ in filters]}
    deleted = {acl for found in matching for acl in found}
    _log.info("%s (%s) deleted %d ACLs", request.client_id, request.peer, len(deleted))
    return {"filter_results": [_result(*pair) for pair in zip(filters, matching, strict=True)]}


def _is_valid(acl_filter: AclFilter) -> bool:
    try:
        acl_filter.check()
    except ConfigError:
        return False
    return True


def _result(acl_filter: AclFilter, found: list[Acl]) -> Message:
    try:
        acl_filter.check()
    except ConfigError as error:
        return _refused(ErrorCode.INVALID_REQUEST, str(error))
    return {"error_code": ErrorCode.NONE, "matching_acls": [{"error_code": 0} | acl._asdict() for acl in found]}


def _refused(code: ErrorCode, reason: str) -> Message:
    return {"error_code": code, "error_message": reason, "matching_acls": []}
