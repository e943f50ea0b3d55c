"""DescribeAcls v1-3 (KIP-140): the rules of the users file as ACLs; see `security.acls`."""

from __future__ import annotations

import asyncio

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.security.acls import Acl, AclFilter, acls_of
from spark_klog.errors import ConfigError, ErrorCode
from spark_klog.protocol.codec import Message

#: Response of DescribeAcls, CreateAcls and DeleteAcls until a user has a rule.
WITHOUT_RULES = "no user has rules: everything is allowed until a user in the users file has admin = true"


async def handle(broker: Broker, request: Request, message: Message) -> Message:
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
