"""Consumer groups of KIP-848: their members' heartbeats, and descriptions."""

from __future__ import annotations

from functools import partial
from uuid import uuid4

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.event_loop import MAX_ID_LENGTH
from spark_klog.broker.groups.consumer_group import ConsumerGroup, Heartbeat, preferred_assignor, refused_heartbeat
from spark_klog.broker.groups.membership import Partitions, partitions_of, topic_partitions
from spark_klog.broker.groups.server_assignors import SERVER_ASSIGNORS
from spark_klog.broker.security.authorizer import SEE
from spark_klog.errors import ConfigError, ErrorCode
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.groups import JOIN_EPOCH, STATIC_LEAVE_EPOCH

#: From this version on members choose their ids.
_FIRST_WITH_OWN_ID = 1
#: So many names and partitions of a heartbeat may be of topics that are not there (any more).
_MANY_TOPICS, _MANY_PARTITIONS = 10_000, 10_000
#: What a member of a consumer group is.
_CLASSIC_MEMBER, _CONSUMER_MEMBER = 0, 1


async def consumer_group_heartbeat(broker: Broker, request: Request, message: Message) -> Message:
    """ConsumerGroupHeartbeat v0-1 (KIP-848): join, stay in or leave a group; the answer has the member's partitions."""
    group, member_id, epoch = message["group_id"], message["member_id"], message["member_epoch"]
    code = await broker.coordinator.code(group, for_reading=epoch > JOIN_EPOCH)
    if code:
        return refused_heartbeat(code, member_id, f"group {group}")
    if reason := _too_many(broker, message) or _invalid(request, message):
        return refused_heartbeat(ErrorCode.INVALID_REQUEST, member_id, reason)
    assignor, regex = message["server_assignor"], message.get("subscribed_topic_regex")
    if assignor and assignor not in SERVER_ASSIGNORS:
        known = ", ".join(SERVER_ASSIGNORS)
        return refused_heartbeat(ErrorCode.UNSUPPORTED_ASSIGNOR, member_id, f"assignor {assignor[:100]}: set {known}")
    for topic in message["subscribed_topic_names"] or ():
        await broker.turns.take()
        if refusal := broker.authorizer.refusal(request.session, SEE, topic):
            return refused_heartbeat(refusal, member_id, f"topic {topic} may not be read")
    beat = Heartbeat(
        member_id=member_id or str(uuid4()),
        epoch=epoch,
        instance_id=message["instance_id"],
        rack_id=message["rack_id"],
        client_id=request.client_id or "",
        client_host=f"/{request.session.host}",
        rebalance_timeout_ms=message["rebalance_timeout_ms"],
        topics=None if message["subscribed_topic_names"] is None else frozenset(message["subscribed_topic_names"]),
        regex=regex,
        assignor=assignor,
        owned=None if message["topic_partitions"] is None else partitions_of(message["topic_partitions"]),
    )
    groups = broker.coordinator.consumer_groups
    try:
        topics = await groups.resolved(group, regex, lambda: broker.registry.topics, broker.turns)
    except ConfigError as error:
        return refused_heartbeat(ErrorCode.INVALID_REGULAR_EXPRESSION, member_id, str(error))
    allows = partial(broker.authorizer.allows, request.session, SEE)
    answer = broker.coordinator.consumer_heartbeat(group, beat, topics, allows)
    if not answer["error_code"] and (code := await broker.coordinator.flushed(group)):
        return refused_heartbeat(code, member_id, f"a change of group {group} could not be written")
    return answer


def _too_many(broker: Broker, message: Message) -> str:
    """Why the request has more names or partitions than a member needs: the group's next step looks at all of them."""
    topics = broker.registry.topics
    if len(message["subscribed_topic_names"] or ()) > _MANY_TOPICS + len(topics):
        return f"a member may subscribe to all topics and {_MANY_TOPICS} other names: subscribe by a regular expression"
    owned = sum(len(row["partitions"]) for row in message["topic_partitions"] or ())
    if owned > _MANY_PARTITIONS and owned > sum(len(topic.assignment) for topic in topics.values()) + _MANY_PARTITIONS:
        return f"a member can't own {owned} partitions"
    return ""


def _invalid(request: Request, message: Message) -> str:
    """Why the request is invalid; "" if it is not."""
    epoch, topics, regex = message["member_epoch"], message["subscribed_topic_names"], message["subscribed_topic_regex"]
    names = [message["member_id"], message["instance_id"], message["rack_id"], *(topics or ())]
    if any(len(name or "") > MAX_ID_LENGTH for name in names):
        return f"an id or name has more than {MAX_ID_LENGTH} characters"
    if not message["member_id"] and (epoch != JOIN_EPOCH or request.version >= _FIRST_WITH_OWN_ID):
        return "member_id is empty"
    if message["instance_id"] == "" or message["rack_id"] == "":
        return "instance_id or rack_id is empty: leave it out"
    if epoch < STATIC_LEAVE_EPOCH:
        return f"member_epoch {epoch} is less than {STATIC_LEAVE_EPOCH}"
    if epoch == STATIC_LEAVE_EPOCH and message["instance_id"] is None:
        return "only a member with an instance_id can leave for a while"
    if epoch == JOIN_EPOCH:
        if message["rebalance_timeout_ms"] == -1:
            return "a member that joins must set rebalance_timeout_ms"
        if message["topic_partitions"] is None or message["topic_partitions"]:
            return "a member that joins owns no partitions"
        if topics is None and not regex:
            return "a member that joins must subscribe to topics"
    return ""


async def consumer_group_describe(broker: Broker, request: Request, message: Message) -> Message:
    """ConsumerGroupDescribe v0-1 (KIP-848): epochs, members, and what they have and are to have."""
    groups = []
    for group_id in dict.fromkeys(message["group_ids"]):
        code = await broker.coordinator.code(group_id, for_reading=True)
        group = broker.coordinator.consumer_groups.get(group_id)
        described = {
            "error_code": code,
            "group_id": group_id,
            "group_state": "",
            "group_epoch": 0,
            "assignment_epoch": 0,
            "assignor_name": "",
            "members": [],
        }
        if not code and group is None:
            reason = f"group {group_id} is not of the consumer protocol, or does not exist"
            described |= {"error_code": ErrorCode.GROUP_ID_NOT_FOUND, "error_message": reason}
        elif not code and group is not None:
            described |= await _described(broker, request, group)
            if message["include_authorized_operations"] and not described["error_code"]:
                described["authorized_operations"] = broker.authorizer.group_operations(request.session)
        groups.append(described)
    return {"groups": groups}


async def _described(broker: Broker, request: Request, group: ConsumerGroup) -> Message:
    for topic in group.subscribed_topics():
        await broker.turns.take()
        if refusal := broker.authorizer.refusal(request.session, SEE, topic):
            return {
                "error_code": refusal,
                "error_message": f"the group consumes topics that {request.peer} may not see",
            }
    membership = group.membership
    members = []
    for member in membership.members.values():
        await broker.turns.take()
        subscription = member.subscription
        entry = {
            "member_id": member.member_id,
            "instance_id": subscription.instance_id,
            "rack_id": subscription.rack_id,
            "member_epoch": member.epoch,
            "client_id": subscription.client_id,
            "client_host": subscription.client_host,
            "subscribed_topic_names": sorted(subscription.topics),
            "subscribed_topic_regex": subscription.regex,
            "assignment": _named(broker, member.assigned),
            "target_assignment": _named(broker, membership.targets.get(member.member_id, frozenset())),
        }
        if request.version >= 1:
            entry["member_type"] = _CONSUMER_MEMBER if subscription.classic is None else _CLASSIC_MEMBER
        members.append(entry)
    return {
        "error_code": ErrorCode.NONE,
        "group_state": group.state,
        "group_epoch": membership.epoch,
        "assignment_epoch": membership.assignment_epoch,
        "assignor_name": preferred_assignor(membership),
        "members": members,
    }


def _named(broker: Broker, partitions: Partitions) -> Message:
    """Partitions with the names of their topics; those of deleted topics are left out."""
    rows = [
        row | {"topic_name": broker.registry.names[row["topic_id"]]}
        for row in topic_partitions(partitions)
        if row["topic_id"] in broker.registry.names
    ]
    return {"topic_partitions": rows}
