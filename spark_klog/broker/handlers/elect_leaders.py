"""ElectLeaders v0-2 (KIP-460). A partition's only replica leads it, so an election never changes anything."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.metadata.registry import NO_LEADER
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message

_PREFERRED = 0
_REASONS = {
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED: "only admins elect leaders",
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: "there is no such partition",
    ErrorCode.ELECTION_NOT_NEEDED: "the partition's only replica leads it",
    ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE: "the broker of the partition's only replica is down",
    ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE: "the broker of the partition's only replica is down",
}


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    is_admin = broker.authorizer.is_admin(request.session)
    results = []
    for name, partitions in await _requested(broker, message, is_admin):
        if is_admin:
            codes = {partition: await _elect(broker, name, partition, message) for partition in partitions}
        else:
            codes = dict.fromkeys(partitions, ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
        if message["topic_partitions"] is None:  # for all topics, Kafka omits partitions that need no election
            codes = {partition: code for partition, code in codes.items() if code != ErrorCode.ELECTION_NOT_NEEDED}
        if codes:
            results.append({"topic": name, "partition_result": [_result(*item) for item in codes.items()]})
    code = ErrorCode.NONE if is_admin else ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    return {"error_code": code, "replica_election_results": results}


async def _requested(broker: Broker, message: Message, is_admin: bool) -> list[tuple[str, list[int]]]:
    if message["topic_partitions"] is not None:
        return [(topic["topic"], topic["partitions"]) for topic in message["topic_partitions"]]
    if not is_admin:
        return []
    return [(name, sorted(topic.assignment)) for name, topic in sorted(broker.registry.topics.items())]


async def _elect(broker: Broker, name: str, partition: int, message: Message) -> ErrorCode:
    await broker.turns.take()
    topic = await broker.topic(name)
    if topic is None or partition not in topic.assignment:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if broker.registry.leader(topic, partition) != NO_LEADER:
        return ErrorCode.ELECTION_NOT_NEEDED
    is_preferred = message["election_type"] == _PREFERRED
    return ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE if is_preferred else ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE


def _result(partition: int, code: ErrorCode) -> Message:
    return {"partition_id": partition, "error_code": code, "error_message": _REASONS[code]}
