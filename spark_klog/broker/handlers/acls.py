"""ACLs: DescribeAcls, CreateAcls and DeleteAcls read and change the rules of the users file; see `security.acls`."""

from __future__ import annotations

import asyncio
import logging

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.security import acls
from spark_klog.broker.security.acls import Acl, AclFilter, acls_of, remove
from spark_klog.broker.security.users import User
from spark_klog.errors import ConfigError, ErrorCode
from spark_klog.protocol.codec import Message

#: Response of DescribeAcls, CreateAcls and DeleteAcls until a user has a rule.
_WITHOUT_RULES = "no user has rules: everything is allowed until a user in the users file has admin = true"
_log = logging.getLogger(__name__)


async def describe_acls(broker: Broker, request: Request, message: Message) -> Message:
    """DescribeAcls v1-3 (KIP-140): the rules of the users file as ACLs; see `security.acls`."""
    acl_filter = _filter_of(message)
    refusal = _refusal(broker, request, "describe") or _filter_refusal(acl_filter)
    if refusal is not None:
        return refusal | {"resources": []}
    found = await asyncio.to_thread(lambda: [acl for acl in acls_of(broker.users.all()) if acl_filter.matches(acl)])
    resources: dict[tuple[int, str, int], list[Acl]] = {}
    for acl in found:
        resources.setdefault(acl[:3], []).append(acl)
    return {
        "error_code": ErrorCode.NONE,
        "resources": [
            {
                "resource_type": kind,
                "resource_name": name,
                "pattern_type": pattern,
                "acls": [
                    {
                        "principal": acl.principal,
                        "host": acl.host,
                        "operation": acl.operation,
                        "permission_type": acl.permission_type,
                    }
                    for acl in acls
                ],
            }
            for (kind, name, pattern), acls in sorted(resources.items())
        ],
    }


def _refusal(broker: Broker, request: Request, verb: str) -> Message | None:
    """The error for a client that may not do this with ACLs."""
    if not broker.authorizer.is_admin(request.session):
        return {"error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "error_message": f"only admins {verb} ACLs"}
    if not broker.users.has_rules:
        return {"error_code": ErrorCode.SECURITY_DISABLED, "error_message": _WITHOUT_RULES}
    return None


def _filter_of(message: Message) -> AclFilter:
    """The filter of a DescribeAcls request, or of an entry of a DeleteAcls request."""
    return AclFilter(
        message["resource_type_filter"],
        message["resource_name_filter"],
        message["pattern_type_filter"],
        message["principal_filter"],
        message["host_filter"],
        message["operation"],
        message["permission_type"],
    )


def _filter_refusal(acl_filter: AclFilter) -> Message | None:
    if acl_filter.is_defined:
        return None
    reason = "the filter holds a resource type, pattern, operation or permission that is unknown"
    return {"error_code": ErrorCode.INVALID_REQUEST, "error_message": reason}


async def create_acls(broker: Broker, request: Request, message: Message) -> Message:
    """CreateAcls v1-3 (KIP-140): add rules to the users file; ACLs that rules can't express get INVALID_REQUEST.

    Each ACL has its own result, as in Kafka; the valid ones are one change of the file.
    """
    creations = message["creations"]
    refusal = _refusal(broker, request, "create")
    if refusal is not None:
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


async def delete_acls(broker: Broker, request: Request, message: Message) -> Message:
    """DeleteAcls v1-3 (KIP-140): remove the rules that match the filters from the users file, in one change."""
    filters = [_filter_of(entry) for entry in message["filters"]]
    matching: list[list[Acl]] = []

    def change(users: dict[str, User]) -> None:
        there = acls_of(users)
        matching.extend([acl for acl in there if acl_filter.matches(acl)] for acl_filter in filters)
        remove(users, dict.fromkeys(acl for found in matching for acl in found))

    refusal = _refusal(broker, request, "delete")
    if refusal is None:
        try:
            await asyncio.to_thread(broker.users.change, change)
        except ConfigError as error:
            _log.error("ACLs can't be deleted: %s", error)
            refusal = {"error_code": ErrorCode.INVALID_CONFIG, "error_message": str(error)}
    if refusal is not None:
        return {"filter_results": [refusal | {"matching_acls": []} for _ in filters]}
    deleted = {acl for found in matching for acl in found}
    _log.info("%s (%s) deleted %d ACLs", request.client_id, request.peer, len(deleted))
    return {
        "filter_results": [
            (_filter_refusal(acl_filter) or {"error_code": ErrorCode.NONE})
            | {"matching_acls": [{"error_code": ErrorCode.NONE} | acl._asdict() for acl in found]}
            for acl_filter, found in zip(filters, matching, strict=True)
        ]
    }
