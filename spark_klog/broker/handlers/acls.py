"""ACLs: DescribeAcls, CreateAcls and DeleteAcls read and change the rules of the users file; see `security.acls`."""

from __future__ import annotations

import asyncio
import logging

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.security import acls
from spark_klog.broker.security.acls import Acl, AclFilter, acls_of, remove
from spark_klog.broker.security.users_file import User
from spark_klog.errors import ConfigError, ErrorCode
from spark_klog.protocol.codec import Message

#: Response of DescribeAcls, CreateAcls and DeleteAcls until a user has a rule.
WITHOUT_RULES = "no user has rules: everything is allowed until a user in the users file has admin = true"
_log = logging.getLogger(__name__)


async def describe_acls(broker: Broker, request: Request, message: Message) -> Message:
    """DescribeAcls v1-3 (KIP-140): the rules of the users file as ACLs; see `security.acls`."""
    if not broker.authorizer.is_admin(request.session):
        return _refused(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "only admins describe ACLs")
    if not broker.authorizer.has_rules:
        return _refused(ErrorCode.SECURITY_DISABLED, WITHOUT_RULES)
    acl_filter = filter_of(message)
    try:
        acl_filter.check()
    except ConfigError as error:
        return _refused(ErrorCode.INVALID_REQUEST, str(error))
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


def filter_of(message: Message) -> AclFilter:
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


def _refused(code: ErrorCode, reason: str) -> Message:
    return {"error_code": code, "error_message": reason, "resources": []}


async def create_acls(broker: Broker, request: Request, message: Message) -> Message:
    """CreateAcls v1-3 (KIP-140): add rules to the users file; ACLs that rules can't express get INVALID_REQUEST.

    Each ACL has its own result, as in Kafka; the valid ones are one change of the file.
    """
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


async def delete_acls(broker: Broker, request: Request, message: Message) -> Message:
    """DeleteAcls v1-3 (KIP-140): remove the rules that match the filters from the users file, in one change."""
    filters = [filter_of(entry) for entry in message["filters"]]
    if not broker.authorizer.is_admin(request.session):
        refusal = _failed_filter(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "only admins delete ACLs")
        return {"filter_results": [refusal for _ in filters]}
    if not broker.authorizer.has_rules:
        return {"filter_results": [_failed_filter(ErrorCode.SECURITY_DISABLED, WITHOUT_RULES) for _ in filters]}
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
        return {"filter_results": [_failed_filter(ErrorCode.INVALID_CONFIG, str(error)) for _ in filters]}
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
        return _failed_filter(ErrorCode.INVALID_REQUEST, str(error))
    return {"error_code": ErrorCode.NONE, "matching_acls": [{"error_code": 0} | acl._asdict() for acl in found]}


def _failed_filter(code: ErrorCode, reason: str) -> Message:
    return {"error_code": code, "error_message": reason, "matching_acls": []}
