"""Who may do what with which topic: the one place that decides. Handlers ask, and answer the code.

    may read      Fetch, OffsetCommit, TxnOffsetCommit, DescribeProducers
    may write     Produce, AddPartitionsToTxn, and the topics that Metadata makes for who asks for them
    either        Metadata, ListOffsets, OffsetFetch, OffsetForLeaderEpoch, DescribeConfigs: the topic is seen
    admin         everything; what is in none of the handlers is for admins only

A topic that may not be seen is left out of lists, and answered with TOPIC_AUTHORIZATION_FAILED by name. It does not
matter then whether it exists.
"""

from __future__ import annotations

from spark_klog.broker.security.session import Session
from spark_klog.broker.security.users import Users
from spark_klog.errors import ErrorCode
from spark_klog.protocol import apis

READ, WRITE, SEE = "read", "write", "see"

#: APIs whose handlers ask here, or that touch no topic. All others are for admins where there are rules.
_CHECKED_BY_HANDLER = frozenset(
    {
        apis.PRODUCE.key,
        apis.FETCH.key,
        apis.LIST_OFFSETS.key,
        apis.METADATA.key,
        apis.OFFSET_COMMIT.key,
        apis.OFFSET_FETCH.key,
        apis.FIND_COORDINATOR.key,
        apis.JOIN_GROUP.key,
        apis.SYNC_GROUP.key,
        apis.HEARTBEAT.key,
        apis.LEAVE_GROUP.key,
        apis.DESCRIBE_GROUPS.key,
        apis.LIST_GROUPS.key,
        apis.INIT_PRODUCER_ID.key,
        apis.ADD_PARTITIONS_TO_TXN.key,
        apis.ADD_OFFSETS_TO_TXN.key,
        apis.END_TXN.key,
        apis.TXN_OFFSET_COMMIT.key,
        apis.DESCRIBE_PRODUCERS.key,
        apis.API_VERSIONS.key,
        apis.CREATE_TOPICS.key,
        apis.DELETE_TOPICS.key,
        apis.OFFSET_FOR_LEADER_EPOCH.key,
        apis.DESCRIBE_CONFIGS.key,
        apis.DESCRIBE_CLUSTER.key,
        apis.DESCRIBE_TOPIC_PARTITIONS.key,
        apis.SASL_HANDSHAKE.key,
        apis.SASL_AUTHENTICATE.key,
    }
)


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

    def admits(self, session: Session, key: int) -> bool:
        """Whether the client may send requests of this API at all."""
        return key in _CHECKED_BY_HANDLER or self.is_admin(session)
