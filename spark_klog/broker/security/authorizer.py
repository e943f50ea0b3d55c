"""Authorization on topics: the one place that decides; handlers return its error code.

    may read      Fetch, OffsetCommit, TxnOffsetCommit, DescribeProducers
    may write     Produce, AddPartitionsToTxn, and automatic topic creation by Metadata
    either        Metadata, ListOffsets, OffsetFetch, OffsetForLeaderEpoch, DescribeConfigs: the topic is visible
    admin         everything: all changes of topics, groups, settings, users or the cluster, and lists of transactions

A topic that the client may not see is left out of lists; requested by name, it gets TOPIC_AUTHORIZATION_FAILED, whether
it exists or not.
"""

from __future__ import annotations

from collections.abc import Iterable

from spark_klog.broker.security.session import Session
from spark_klog.broker.security.users import Users
from spark_klog.errors import ErrorCode
from spark_klog.protocol.tables.security import AclOperation

READ, WRITE, SEE = "read", "write", "see"

#: Operations that an admin may do on a resource of each kind: all that Kafka has for the kind.
_OF_TOPICS = (
    AclOperation.READ,
    AclOperation.WRITE,
    AclOperation.CREATE,
    AclOperation.DELETE,
    AclOperation.ALTER,
    AclOperation.DESCRIBE,
    AclOperation.DESCRIBE_CONFIGS,
    AclOperation.ALTER_CONFIGS,
)
_OF_GROUPS = (AclOperation.READ, AclOperation.DELETE, AclOperation.DESCRIBE)
_OF_THE_CLUSTER = (
    AclOperation.CREATE,
    AclOperation.ALTER,
    AclOperation.DESCRIBE,
    AclOperation.CLUSTER_ACTION,
    AclOperation.DESCRIBE_CONFIGS,
    AclOperation.ALTER_CONFIGS,
    AclOperation.IDEMPOTENT_WRITE,
)


def _bits(operations: Iterable[AclOperation]) -> int:
    return sum(1 << operation for operation in operations)


def _matches(rules: tuple[str, ...], topic: str) -> bool:
    return any(topic.startswith(rule[:-1]) if rule.endswith("*") else topic == rule for rule in rules)


class Authorizer:
    """Authorization by the rules of the users file."""

    def __init__(self, users: Users) -> None:
        self._users = users

    def allows(self, session: Session, operation: str, topic: str) -> bool:
        """Whether the client may READ, WRITE or SEE the topic."""
        rules = self._users.rules(session.user) if self._users.path is not None else None
        if rules is None or rules.admin:
            return True
        if operation == SEE:
            return _matches(rules.read, topic) or _matches(rules.write, topic)
        return _matches(rules.read if operation == READ else rules.write, topic)

    def refusal(self, session: Session, operation: str, topic: str) -> ErrorCode:
        """TOPIC_AUTHORIZATION_FAILED if the operation is not allowed, else NONE."""
        allowed = self.allows(session, operation, topic)
        return ErrorCode.NONE if allowed else ErrorCode.TOPIC_AUTHORIZATION_FAILED

    def is_admin(self, session: Session) -> bool:
        """Whether the client is an admin; everybody is one until a user has a rule."""
        rules = self._users.rules(session.user)
        return rules is None or rules.admin

    def topic_operations(self, session: Session, topic: str) -> int:
        """Operations that the client may do on a topic, as KIP-430's bit field: one bit per operation code."""
        if self.is_admin(session):
            return _bits(_OF_TOPICS)
        operations = []
        if self.allows(session, READ, topic):
            operations.append(AclOperation.READ)
        if self.allows(session, WRITE, topic):
            operations.append(AclOperation.WRITE)
        if operations:
            operations += [AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS]
        return _bits(operations)

    def group_operations(self, session: Session) -> int:
        """Operations on any group, as a bit field: rules do not name groups, and only admins delete them."""
        return _bits(_OF_GROUPS if self.is_admin(session) else (AclOperation.READ, AclOperation.DESCRIBE))

    def cluster_operations(self, session: Session) -> int:
        """Operations on the cluster, as a bit field; everybody may describe it."""
        everybody = (AclOperation.DESCRIBE, AclOperation.IDEMPOTENT_WRITE)
        return _bits(_OF_THE_CLUSTER if self.is_admin(session) else everybody)
