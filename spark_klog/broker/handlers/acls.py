"""ACLs: DescribeAcls, CreateAcls and DeleteAcls read and change the rules of the users file (KIP-140, KIP-290).

    read = clicks        ALLOW READ on topic LITERAL clicks for User:NAME from host *
    write = clicks*      ALLOW WRITE on topic PREFIXED clicks
    read = *             ALLOW READ on topic LITERAL *, Kafka's wildcard

`check_expressible` rejects all other ACLs. `admin = true` is not an ACL, as Kafka's super.users are not.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.security.users import User, check_user_name
from spark_klog.errors import ConfigError, ErrorCode
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.security import ALLOW, ANY, LITERAL, MATCH, PREFIXED, TOPIC, AclOperation

_log = logging.getLogger(__name__)
#: Response of DescribeAcls, CreateAcls and DeleteAcls until a user has a rule.
_WITHOUT_RULES = "no user has rules: everything is allowed until a user in the users file has admin = true"
_PRINCIPAL = "User:"
_WILDCARD = "*"
_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
#: Highest number that Kafka defines for resource types, patterns, operations and permissions.
_KINDS, _PATTERNS, _OPERATIONS, _PERMISSIONS = 7, 4, 15, 3


async def describe_acls(broker: Broker, request: Request, message: Message) -> Message:
    """DescribeAcls v1-3 (KIP-140): the rules of the users file as ACLs."""
    acl_filter = _filter_of(message)
    refusal = _refusal(broker, request, "describe") or _filter_refusal(acl_filter)
    if refusal is not None:
        return refusal | {"resources": []}
    acls = await asyncio.to_thread(lambda: [acl for acl in acls_of(broker.users.all()) if acl_filter.matches(acl)])
    resources: dict[tuple[int, str, int], list[Acl]] = {}
    for acl in acls:
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
        Acl(
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
            await asyncio.to_thread(broker.users.change, lambda users: add_rules(users, valid))
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


def _reason(acl: Acl) -> str | None:
    try:
        check_expressible(acl)
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
        remove_rules(users, dict.fromkeys(acl for matched in matching for acl in matched))

    refusal = _refusal(broker, request, "delete")
    if refusal is None:
        try:
            await asyncio.to_thread(broker.users.change, change)
        except ConfigError as error:
            _log.error("ACLs can't be deleted: %s", error)
            refusal = {"error_code": ErrorCode.INVALID_CONFIG, "error_message": str(error)}
    if refusal is not None:
        return {"filter_results": [refusal | {"matching_acls": []} for _ in filters]}
    deleted = {acl for matched in matching for acl in matched}
    _log.info("%s (%s) deleted %d ACLs", request.client_id, request.peer, len(deleted))
    return {
        "filter_results": [
            (_filter_refusal(acl_filter) or {"error_code": ErrorCode.NONE})
            | {"matching_acls": [{"error_code": ErrorCode.NONE} | acl._asdict() for acl in matched]}
            for acl_filter, matched in zip(filters, matching, strict=True)
        ]
    }


class Acl(NamedTuple):
    """An access control entry, which Kafka calls an ACL. Numbers are those of `protocol.tables.security`."""

    resource_type: int
    resource_name: str
    pattern_type: int
    principal: str
    host: str
    operation: int
    permission_type: int

    @property
    def user(self) -> str:
        return self.principal.removeprefix(_PRINCIPAL)

    @property
    def rule(self) -> str:
        """The topic, as a rule in the users file names it."""
        return f"{self.resource_name}*" if self.pattern_type == PREFIXED else self.resource_name


class AclFilter(NamedTuple):
    """Filter of ACLs; None and ANY match everything."""

    resource_type: int
    resource_name: str | None
    pattern_type: int
    principal: str | None
    host: str | None
    operation: int
    permission_type: int

    @property
    def is_defined(self) -> bool:
        """Whether Kafka defines its numbers."""
        numbers = (self.resource_type, self.pattern_type, self.operation, self.permission_type)
        limits = (_KINDS, _PATTERNS, _OPERATIONS, _PERMISSIONS)
        return all(ANY <= number <= limit for number, limit in zip(numbers, limits, strict=True))

    def matches(self, acl: Acl) -> bool:
        return (
            self.is_defined
            and self.resource_type in (ANY, acl.resource_type)
            and self.operation in (ANY, acl.operation)
            and self.permission_type in (ANY, acl.permission_type)
            and self.principal in (None, acl.principal)
            and self.host in (None, acl.host)
            and self._matches_pattern(acl)
        )

    def _matches_pattern(self, acl: Acl) -> bool:
        if self.pattern_type not in (ANY, MATCH, acl.pattern_type):
            return False
        if self.resource_name is None or self.resource_name == acl.resource_name:
            return True
        if self.pattern_type != MATCH:
            return False
        if acl.pattern_type == PREFIXED:
            return self.resource_name.startswith(acl.resource_name)
        return acl.resource_name == _WILDCARD


def acls_of(users: Mapping[str, User]) -> list[Acl]:
    """All rules as ACLs, sorted by user."""
    return [
        _acl(name, rule, operation)
        for name, user in sorted(users.items())
        for operation, rules in ((AclOperation.READ, user.read), (AclOperation.WRITE, user.write))
        for rule in rules
    ]


def _acl(user: str, rule: str, operation: AclOperation) -> Acl:
    is_prefix = rule.endswith("*") and rule != _WILDCARD
    topic, pattern = (rule[:-1], PREFIXED) if is_prefix else (rule, LITERAL)
    return Acl(TOPIC, topic, pattern, _PRINCIPAL + user, "*", operation, ALLOW)


def check_expressible(acl: Acl) -> None:
    """Raise `ConfigError` if no rule can express the ACL."""
    is_topic = _TOPIC_NAME.fullmatch(acl.resource_name) or (
        acl.resource_name == _WILDCARD and acl.pattern_type == LITERAL
    )
    if (
        not is_topic
        or acl.resource_type != TOPIC
        or acl.pattern_type not in (LITERAL, PREFIXED)
        or acl.operation not in (AclOperation.READ, AclOperation.WRITE)
        or acl.permission_type != ALLOW
        or acl.host != "*"
        or not acl.principal.startswith(_PRINCIPAL)
        or acl.user == _WILDCARD
    ):
        raise ConfigError(
            "the rules of users can express ALLOW of READ or WRITE (which include DESCRIBE) on a topic's name, a "
            "prefix or *, for one User:NAME from any host; there are no rules for groups, transactional ids and the "
            "cluster, and administrators have admin = true in the users file"
        )
    check_user_name(acl.user)


def add_rules(users: dict[str, User], acls: Iterable[Acl]) -> None:
    """Add rules to users; existing rules are kept."""
    for acl in acls:
        user = users.setdefault(acl.user, User())
        if acl.operation == AclOperation.READ and acl.rule not in user.read:
            user.read += (acl.rule,)
        if acl.operation == AclOperation.WRITE and acl.rule not in user.write:
            user.write += (acl.rule,)


def remove_rules(users: dict[str, User], acls: Iterable[Acl]) -> None:
    """Remove rules; a user left without rules and credentials is removed."""
    for acl in acls:
        user = users[acl.user]
        if acl.operation == AclOperation.READ:
            user.read = tuple(rule for rule in user.read if rule != acl.rule)
        else:
            user.write = tuple(rule for rule in user.write if rule != acl.rule)
        if not user.has_rules and not user.credentials:
            del users[acl.user]
