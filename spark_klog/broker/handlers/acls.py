"""ACLs: DescribeAcls, CreateAcls and DeleteAcls read and change the rules of the users file (KIP-140, KIP-290).

    read = clicks        ALLOW READ on topic LITERAL clicks for User:NAME from host *
    write = clicks*      ALLOW WRITE on topic PREFIXED clicks
    read = *             ALLOW READ on topic LITERAL *, Kafka's wildcard

`rule_of` rejects all other ACLs. `admin = true` is not an ACL, as Kafka's super.users are not.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

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
#: What an ACL says of its resource; the rest is said of each rule.
_OF_RESOURCE = ("resource_type", "resource_name", "pattern_type")
#: The highest number that Kafka defines, by field of a filter.
_HIGHEST = {"resource_type_filter": 7, "pattern_type_filter": 4, "operation": 15, "permission_type": 3}


class Rule(NamedTuple):
    """A rule of the users file. `topic` is a name, a prefix that ends with a star, or the star alone."""

    user: str
    operation: AclOperation
    topic: str

    def acl(self) -> Message:
        """The rule as Kafka's clients see it; numbers are those of `protocol.tables.security`."""
        is_prefix = self.topic.endswith("*") and self.topic != _WILDCARD
        return {
            "resource_type": TOPIC,
            "resource_name": self.topic[:-1] if is_prefix else self.topic,
            "pattern_type": PREFIXED if is_prefix else LITERAL,
            "principal": _PRINCIPAL + self.user,
            "host": "*",
            "operation": self.operation,
            "permission_type": ALLOW,
        }


def rules_of(users: Mapping[str, User]) -> list[Rule]:
    """All rules, sorted by user."""
    return [
        Rule(name, operation, topic)
        for name, user in sorted(users.items())
        for operation, topics in ((AclOperation.READ, user.read), (AclOperation.WRITE, user.write))
        for topic in topics
    ]


def rule_of(entry: Message) -> Rule:
    """The rule for an ACL of a CreateAcls request. Raises `ConfigError` if no rule can express it."""
    name, pattern, principal = entry["resource_name"], entry["resource_pattern_type"], entry["principal"]
    user = principal.removeprefix(_PRINCIPAL)
    if (
        not (_TOPIC_NAME.fullmatch(name) or (name == _WILDCARD and pattern == LITERAL))
        or entry["resource_type"] != TOPIC
        or pattern not in (LITERAL, PREFIXED)
        or entry["operation"] not in (AclOperation.READ, AclOperation.WRITE)
        or entry["permission_type"] != ALLOW
        or entry["host"] != "*"
        or user in (principal, _WILDCARD)
    ):
        raise ConfigError(
            "the rules of users can express ALLOW of READ or WRITE (which include DESCRIBE) on a topic's name, a "
            "prefix or *, for one User:NAME from any host; there are no rules for groups, transactional ids and the "
            "cluster, and administrators have admin = true in the users file"
        )
    check_user_name(user)
    return Rule(user, AclOperation(entry["operation"]), f"{name}*" if pattern == PREFIXED else name)


async def describe_acls(broker: Broker, request: Request, message: Message) -> Message:
    """DescribeAcls v1-3 (KIP-140): the rules of the users file as ACLs."""
    refusal = _refusal(broker, request, "describe") or _filter_refusal(message)
    if refusal is not None:
        return refusal | {"resources": []}
    matching = await asyncio.to_thread(lambda: _matching(message, rules_of(broker.users.all())))
    resources: dict[tuple[Any, ...], list[Message]] = {}
    for acl in (rule.acl() for rule in matching):
        resources.setdefault(tuple(acl.pop(name) for name in _OF_RESOURCE), []).append(acl)
    return {
        "error_code": ErrorCode.NONE,
        "resources": [
            dict(zip(_OF_RESOURCE, resource, strict=True)) | {"acls": acls}
            for resource, acls in sorted(resources.items())
        ],
    }


def _refusal(broker: Broker, request: Request, verb: str) -> Message | None:
    """The error for a client that may not do this with ACLs."""
    if not broker.authorizer.is_admin(request.session):
        return {"error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "error_message": f"only admins {verb} ACLs"}
    if not broker.users.has_rules:
        return {"error_code": ErrorCode.SECURITY_DISABLED, "error_message": _WITHOUT_RULES}
    return None


def _filter_refusal(wanted: Message) -> Message | None:
    """The error for a filter, which is a DescribeAcls request or an entry of a DeleteAcls request."""
    if _is_defined(wanted):
        return None
    reason = "the filter holds a resource type, pattern, operation or permission that is unknown"
    return {"error_code": ErrorCode.INVALID_REQUEST, "error_message": reason}


def _is_defined(wanted: Message) -> bool:
    """Whether Kafka defines a filter's numbers."""
    return all(ANY <= wanted[name] <= highest for name, highest in _HIGHEST.items())


def _matching(wanted: Message, rules: Iterable[Rule]) -> list[Rule]:
    """The rules that a filter matches; None and ANY in it match everything."""
    return [rule for rule in rules if _matches(wanted, rule.acl())] if _is_defined(wanted) else []


def _matches(wanted: Message, acl: Message) -> bool:
    return (
        wanted["resource_type_filter"] in (ANY, acl["resource_type"])
        and wanted["operation"] in (ANY, acl["operation"])
        and wanted["permission_type"] in (ANY, acl["permission_type"])
        and wanted["principal_filter"] in (None, acl["principal"])
        and wanted["host_filter"] in (None, acl["host"])
        and _matches_pattern(wanted["resource_name_filter"], wanted["pattern_type_filter"], acl)
    )


def _matches_pattern(name: str | None, pattern: int, acl: Message) -> bool:
    if pattern not in (ANY, MATCH, acl["pattern_type"]):
        return False
    if name is None or name == acl["resource_name"]:
        return True
    if pattern != MATCH:
        return False
    if acl["pattern_type"] == PREFIXED:
        return name.startswith(acl["resource_name"])
    return bool(acl["resource_name"] == _WILDCARD)


async def create_acls(broker: Broker, request: Request, message: Message) -> Message:
    """CreateAcls v1-3 (KIP-140): add rules to the users file; ACLs that rules can't express get INVALID_REQUEST.

    Each ACL has its own result, as in Kafka; the valid ones are one change of the file.
    """
    creations = message["creations"]
    refusal = _refusal(broker, request, "create")
    if refusal is not None:
        return {"results": [refusal for _ in creations]}
    valid: list[Rule] = []
    results: list[Message] = []
    done: Message = {"error_code": ErrorCode.NONE}
    for entry in creations:
        try:
            valid.append(rule_of(entry))
            results.append(done)
        except ConfigError as error:
            results.append({"error_code": ErrorCode.INVALID_REQUEST, "error_message": str(error)})
    if valid:
        try:
            await asyncio.to_thread(broker.users.change, lambda users: add_rules(users, valid))
            _log.info("%s (%s) created %d ACLs", request.client_id, request.peer, len(valid))
        except ConfigError as error:
            _log.error("ACLs can't be created: %s", error)
            done |= {"error_code": ErrorCode.INVALID_CONFIG, "error_message": str(error)}
    return {"results": results}


async def delete_acls(broker: Broker, request: Request, message: Message) -> Message:
    """DeleteAcls v1-3 (KIP-140): remove the rules that match the filters from the users file, in one change."""
    filters: list[Message] = message["filters"]
    matching: list[list[Rule]] = []

    def change(users: dict[str, User]) -> None:
        there = rules_of(users)
        matching.extend(_matching(wanted, there) for wanted in filters)
        remove_rules(users, dict.fromkeys(chain.from_iterable(matching)))

    refusal = _refusal(broker, request, "delete")
    if refusal is None:
        try:
            await asyncio.to_thread(broker.users.change, change)
        except ConfigError as error:
            _log.error("ACLs can't be deleted: %s", error)
            refusal = {"error_code": ErrorCode.INVALID_CONFIG, "error_message": str(error)}
    if refusal is not None:
        return {"filter_results": [refusal | {"matching_acls": []} for _ in filters]}
    deleted = set(chain.from_iterable(matching))
    _log.info("%s (%s) deleted %d ACLs", request.client_id, request.peer, len(deleted))
    return {
        "filter_results": [
            (_filter_refusal(wanted) or {"error_code": ErrorCode.NONE})
            | {"matching_acls": [{"error_code": ErrorCode.NONE} | rule.acl() for rule in rules]}
            for wanted, rules in zip(filters, matching, strict=True)
        ]
    }


def add_rules(users: dict[str, User], rules: Iterable[Rule]) -> None:
    """Add rules to users; existing rules are kept."""
    for rule in rules:
        user = users.setdefault(rule.user, User())
        if rule.operation == AclOperation.READ and rule.topic not in user.read:
            user.read += (rule.topic,)
        if rule.operation == AclOperation.WRITE and rule.topic not in user.write:
            user.write += (rule.topic,)


def remove_rules(users: dict[str, User], rules: Iterable[Rule]) -> None:
    """Remove rules; a user left without rules and credentials is removed."""
    for rule in rules:
        user = users[rule.user]
        if rule.operation == AclOperation.READ:
            user.read = tuple(topic for topic in user.read if topic != rule.topic)
        else:
            user.write = tuple(topic for topic in user.write if topic != rule.topic)
        if not user.has_rules and not user.credentials:
            del users[rule.user]
