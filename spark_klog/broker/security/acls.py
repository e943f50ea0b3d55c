"""Conversion of the users file's rules to access control lists and back (KIP-140, KIP-290).

    read = clicks        ALLOW READ on topic LITERAL clicks for User:NAME from host *
    write = clicks*      ALLOW WRITE on topic PREFIXED clicks
    read = *             ALLOW READ on topic LITERAL *, Kafka's wildcard

`check_expressible` rejects all other ACLs. `admin = true` is not an ACL, as Kafka's super.users are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from spark_klog.broker.security.users import User, check_user_name
from spark_klog.errors import ConfigError
from spark_klog.protocol.tables.security import ALLOW, ANY, LITERAL, MATCH, PREFIXED, TOPIC, AclOperation

_PRINCIPAL = "User:"
_WILDCARD = "*"
_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
#: Highest number that Kafka defines for resource types, patterns, operations and permissions.
_KINDS, _PATTERNS, _OPERATIONS, _PERMISSIONS = 7, 4, 15, 3


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


def add(users: dict[str, User], acls: Iterable[Acl]) -> None:
    """Add rules to users; existing rules are kept."""
    for acl in acls:
        user = users.setdefault(acl.user, User())
        if acl.operation == AclOperation.READ and acl.rule not in user.read:
            user.read += (acl.rule,)
        if acl.operation == AclOperation.WRITE and acl.rule not in user.write:
            user.write += (acl.rule,)


def remove(users: dict[str, User], acls: Iterable[Acl]) -> None:
    """Remove rules; a user left without rules and credentials is removed."""
    for acl in acls:
        user = users[acl.user]
        if acl.operation == AclOperation.READ:
            user.read = tuple(rule for rule in user.read if rule != acl.rule)
        else:
            user.write = tuple(rule for rule in user.write if rule != acl.rule)
        if not user.has_rules and not user.credentials:
            del users[acl.user]
