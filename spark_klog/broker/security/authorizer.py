"""Who may do what with which topic: the one place that decides. Handlers ask, and answer the code.

    may read      Fetch, OffsetCommit, TxnOffsetCommit, DescribeProducers
    may write     Produce, AddPartitionsToTxn, and the topics that Metadata makes for who asks for them
    either        Metadata, ListOffsets, OffsetFetch, OffsetForLeaderEpoch, DescribeConfigs: the topic is seen
    admin         everything: all that changes topics, groups, settings, users or the cluster, and lists transactions

A topic that may not be seen is left out of lists, and answered with TOPIC_AUTHORIZATION_FAILED by name. It does not
matter then whether it exists.
"""

from __future__ import annotations

from collections.abc import Iterable

from spark_klog.broker.security.session import Session
from spark_klog.broker.security.users import Users
from spark_klog.errors import ErrorCode
from spark_klog.protocol.tables.acls import AclOperation

READ, WRITE, SEE = "read", "write", "see"

#: What an admin may do to a resource of each kind: the operations that Kafka knows for it.
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
    """The rules of the file of users."""

    def __init__(self, users: Users) -> None:
        self._users = users

    def allows(self, session: Session, operation: str, topic: str) -> bool:
        """Whether the client may READ, WRITE or SEE the topic."""
        rules = self._users.rules(session.user)
        if rules is None or rules.admin:
            return True
        if operation == SEE:
            return _matches(rules.read, topic) or _matches(rules.write, topic)
        return _matches(rules.read if operation == READ else rules.write, topic)

    def refusal(self, session: Session, operation: str, topic: str) -> ErrorCode:
        """TOPIC_AUTHORIZATION_FAILED, or NONE."""
        allowed = self.allows(session, operation, topic)
        return ErrorCode.NONE if allowed else ErrorCode.TOPIC_AUTHORIZATION_FAILED

    def is_admin(self, session: Session) -> bool:
        """Whether the client may create, delete and alter topics."""
        rules = self._users.rules(session.user)
        return rules is None or rules.admin

    @property
    def has_rules(self) -> bool:
        """Whether anybody is restricted at all."""
        return self._users.has_rules

    def topic_operations(self, session: Session, topic: str) -> int:
        """What the client may do with a topic, as KIP-430's bit field: a bit for the code of each operation."""
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
        """The same for any group: rules do not name groups, and only admins delete them."""
        return _bits(_OF_GROUPS if self.is_admin(session) else (AclOperation.READ, AclOperation.DESCRIBE))

    def cluster_operations(self, session: Session) -> int:
        """The same for the cluster, which everybody may describe."""
        everybody = (AclOperation.DESCRIBE, AclOperation.IDEMPOTENT_WRITE)
        return _bits(_OF_THE_CLUSTER if self.is_admin(session) else everybody)
