"""Consumer groups: their coordinator, their members' requests, descriptions and deletion."""

from __future__ import annotations

from functools import partial

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.event_loop import MAX_ID_LENGTH
from spark_klog.broker.groups.expiry import forget_group, removal_error
from spark_klog.broker.groups.group import CONSUMER, Join, State, refused_join, refused_sync
from spark_klog.broker.security.authorizer import SEE
from spark_klog.errors import DirectoryError, ErrorCode
from spark_klog.log.partition_log import BatchTooLarge
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.groups import GROUP, TRANSACTION

_CLASSIC = "classic"
_FIRST_WITH_STATE, _FIRST_WITH_TYPE = 4, 5
_FIRST_NOT_FOUND = 6
_FIRST_WITH_MEMBERS = 3
_FIRST_WITH_PROTOCOL = 5
#: Far more than there are assignors; each join of a member compares its protocols with those of all others.
_MAX_PROTOCOLS = 100
_FIRST_WITH_REBALANCE_TIMEOUT, _FIRST_WITH_IDS, _FIRST_NULL_PROTOCOL, _FIRST_SKIPPING = 1, 4, 7, 9


def list_groups(broker: Broker, request: Request, message: Message) -> Message:
    """ListGroups v0-5: the groups that this broker coordinates, including those that have only offsets."""
    if broker.coordinator.is_loading:
        return {"error_code": ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "groups": []}
    groups = dict.fromkeys(broker.offsets.groups, (_CLASSIC, "", State.EMPTY.value))
    groups |= {group.group_id: (_CLASSIC, group.protocol_type or "", group.state.value) for group in broker.groups}
    consumer_groups = broker.coordinator.consumer_groups
    groups |= {group.group_id: (CONSUMER, CONSUMER, group.state) for group in consumer_groups}
    states = {state.lower() for state in message["states_filter"]}
    types = {name.lower() for name in message["types_filter"]}
    listed = []
    for group_id, (kind, protocol_type, state) in sorted(groups.items()):
        if (states and state.lower() not in states) or (types and kind not in types):
            continue
        entry = {"group_id": group_id, "protocol_type": protocol_type}
        if request.version >= _FIRST_WITH_STATE:
            entry["group_state"] = state
        if request.version >= _FIRST_WITH_TYPE:
            entry["group_type"] = kind
        listed.append(entry)
    return {"error_code": ErrorCode.NONE, "groups": listed}


async def describe_groups(broker: Broker, request: Request, message: Message) -> Message:
    """DescribeGroups v0-6: the state of groups, their members, and the members' assignments."""
    groups = [await _describe(broker, request, group_id) for group_id in dict.fromkeys(message["groups"])]
    if message["include_authorized_operations"]:
        operations = broker.authorizer.group_operations(request.session)
        for group in groups:
            if group["error_code"] == ErrorCode.NONE:
                group["authorized_operations"] = operations
    return {"groups": groups}


async def _describe(broker: Broker, request: Request, group_id: str) -> Message:
    described: Message = {"group_id": group_id, "group_state": "", "protocol_type": "", "protocol_data": ""}
    # not `code`, which rejects the empty group id: it may have offsets
    log = await broker.coordinator.log_of(group_id, for_reading=True)
    if isinstance(log, ErrorCode):
        return described | {"error_code": log}
    group = broker.groups.get(group_id)
    if group is not None:
        is_stable = group.state is State.STABLE
        return described | {
            "error_code": ErrorCode.NONE,
            "group_state": group.state.value,
            "protocol_type": group.protocol_type or "",
            "protocol_data": (group.protocol or "") if is_stable else "",
            "members": [
                {
                    "member_id": member.member_id,
                    "group_instance_id": member.request.instance_id,
                    "client_id": member.request.client_id,
                    "client_host": member.request.client_host,
                    "member_metadata": member.metadata(group.protocol) if is_stable else b"",
                    "member_assignment": member.assignment if is_stable else b"",
                }
                for member in group.members.values()
            ],
        }
    has_offsets = broker.offsets.has(group_id) and broker.coordinator.consumer_groups.get(group_id) is None
    described |= {"error_code": ErrorCode.NONE, "group_state": State.EMPTY.value if has_offsets else State.DEAD.value}
    if not has_offsets and request.version >= _FIRST_NOT_FOUND:
        is_other = broker.coordinator.consumer_groups.get(group_id) is not None
        reason = f"group {group_id} {'is not of the classic protocol' if is_other else 'does not exist'}"
        described |= {"error_code": ErrorCode.GROUP_ID_NOT_FOUND, "error_message": reason}
    return described


async def delete_groups(broker: Broker, request: Request, message: Message) -> Message:
    """DeleteGroups v0-3 (KIP-229): delete groups without members, and their offsets."""
    names = message["groups_names"]
    if not broker.authorizer.is_admin(request.session):
        code = ErrorCode.GROUP_AUTHORIZATION_FAILED
        return {"results": [{"group_id": group, "error_code": code} for group in names]}
    return {"results": [{"group_id": group, "error_code": await _delete(broker, group)} for group in names]}


async def _delete(broker: Broker, group: str) -> ErrorCode:
    log = await broker.coordinator.log_of(group)
    if isinstance(log, ErrorCode):
        return log
    has_offsets = broker.offsets.has_any(group)
    code = broker.coordinator.delete(group)
    if code == ErrorCode.GROUP_ID_NOT_FOUND and has_offsets:
        code = ErrorCode.NONE
    if not code:
        since = broker.offsets.since_now(group=group)
        try:
            await broker.flushes.take(forget_group(group, since, broker.offsets, broker.coordinator.local_log))
            await broker.flushes.flush_many(log)
        except (BatchTooLarge, OSError) as error:
            code = removal_error(group, error)
        finally:
            broker.offsets.forget_since(since)
    return code


async def leave_group(broker: Broker, request: Request, message: Message) -> Message:
    """LeaveGroup v0-5: remove members; from version 3 on several at once, static ones by instance id."""
    group = message["group_id"]
    code = await broker.coordinator.code(group)
    if request.version < _FIRST_WITH_MEMBERS:
        code = code or broker.coordinator.leave(group, message["member_id"], None)
        return {"error_code": code or await broker.coordinator.flushed(group)}
    if code:
        return {"error_code": code}
    members = []
    for member in message["members"]:
        member_id, instance_id = member["member_id"], member["group_instance_id"]
        await broker.turns.take()
        left = broker.coordinator.leave(group, member_id, instance_id)
        members.append({"member_id": member_id, "group_instance_id": instance_id, "error_code": left})
    return {"error_code": await broker.coordinator.flushed(group), "members": members}


async def heartbeat(broker: Broker, request: Request, message: Message) -> Message:
    """Heartbeat v0-4: keep a member alive, and let it know if it must rejoin."""
    group, member_id, instance_id = message["group_id"], message["member_id"], message["group_instance_id"]
    code = await broker.coordinator.code(group, for_reading=True)
    return {"error_code": code or broker.coordinator.heartbeat(group, member_id, instance_id, message["generation_id"])}


async def sync_group(broker: Broker, request: Request, message: Message) -> Message:
    """SyncGroup v0-5: the leader sends the assignment, and each member gets its part."""
    group = message["group_id"]
    if code := await broker.coordinator.code(group):
        return {"error_code": code}
    answer = await broker.coordinator.sync(
        group,
        message["member_id"],
        message["group_instance_id"],
        message["generation_id"],
        (message["protocol_type"], message["protocol_name"]),
        {entry["member_id"]: bytes(entry["assignment"]) for entry in message["assignments"]},
    )
    if (code := await broker.coordinator.flushed(group)) and not answer["error_code"]:
        answer = refused_sync(code)
    if request.version < _FIRST_WITH_PROTOCOL:
        answer = {"error_code": answer["error_code"], "assignment": answer["assignment"]}
    return answer


async def join_group(broker: Broker, request: Request, message: Message) -> Message:
    """JoinGroup v0-9: answered when the rebalance that it starts or joins has reached its next generation."""
    answer = await _join(broker, request, message)
    if request.version < _FIRST_NULL_PROTOCOL:
        answer.pop("protocol_type", None)
        answer["protocol_name"] = answer["protocol_name"] or ""
    if request.version < _FIRST_SKIPPING:
        answer.pop("skip_assignment", None)
    return answer


async def _join(broker: Broker, request: Request, message: Message) -> Message:
    group, config, timeout = message["group_id"], broker.config, message["session_timeout_ms"]
    code = await broker.coordinator.code(group)
    if not code and not config.group_min_session_ms <= timeout <= config.group_max_session_ms:
        code = ErrorCode.INVALID_SESSION_TIMEOUT
    code = code or _size_code(broker, message)
    if code:
        return refused_join(code, message["member_id"])
    has_rebalance_timeout = request.version >= _FIRST_WITH_REBALANCE_TIMEOUT
    join = Join(
        member_id=message["member_id"],
        instance_id=message["group_instance_id"],
        client_id=request.client_id or "",
        client_host=f"/{request.session.host}",
        session_timeout_ms=timeout,
        rebalance_timeout_ms=message["rebalance_timeout_ms"] if has_rebalance_timeout else timeout,
        protocol_type=message["protocol_type"],
        protocols=tuple((entry["name"], bytes(entry["metadata"])) for entry in message["protocols"]),
        requires_id=request.version >= _FIRST_WITH_IDS,
        can_skip=request.version >= _FIRST_SKIPPING,
    )
    allows = partial(broker.authorizer.allows, request.session, SEE)
    answer = await broker.coordinator.join(group, join, lambda: broker.registry.topics, allows)
    code = await broker.coordinator.flushed(group)
    return refused_join(code, message["member_id"]) if code and not answer["error_code"] else answer


def _size_code(broker: Broker, message: Message) -> ErrorCode:
    """NONE if what the group would keep of this member is not too large, else the error."""
    if len(message["protocols"]) > _MAX_PROTOCOLS:
        return ErrorCode.INVALID_REQUEST
    names = [message["group_instance_id"] or "", message["protocol_type"]]
    if any(len(name) > MAX_ID_LENGTH for name in [*names, *(entry["name"] for entry in message["protocols"])]):
        return ErrorCode.INVALID_REQUEST
    log = broker.coordinator.local_log(message["group_id"])
    size = sum(len(entry["metadata"]) for entry in message["protocols"])
    if log is not None and size > log.config.max_message_bytes:  # the group's record would be refused with this error
        return ErrorCode.UNKNOWN_SERVER_ERROR
    return ErrorCode.NONE


async def find_coordinator(broker: Broker, request: Request, message: Message) -> Message:
    """FindCoordinator v0-6 ("GroupCoordinator" in the guide): the broker of a group or transactional id."""
    if request.version >= 4:
        keys = dict.fromkeys(message["coordinator_keys"])
        return {"coordinators": [await _find(broker, request, key, message["key_type"]) for key in keys]}
    answer = await _find(broker, request, message["key"], message["key_type"])
    del answer["key"]
    return answer


async def _find(broker: Broker, request: Request, key: str, key_type: int) -> Message:
    none = {"key": key, "node_id": -1, "host": "", "port": -1}
    if key_type not in (GROUP, TRANSACTION):
        reason = f"key type {key_type} is neither {GROUP} (group) nor {TRANSACTION} (transaction)"
        return none | {"error_code": ErrorCode.INVALID_REQUEST, "error_message": reason}
    try:
        node, _ = await (broker.coordinator.find(key) if key_type == GROUP else broker.transactions.find(key))
    except DirectoryError as error:
        return none | {"error_code": ErrorCode.COORDINATOR_NOT_AVAILABLE, "error_message": str(error)}
    addresses = broker.registry.addresses(request.session.listener)
    if node not in addresses:
        return none | {"error_code": ErrorCode.COORDINATOR_NOT_AVAILABLE, "error_message": None}
    host, port = addresses[node]
    return {"key": key, "node_id": node, "host": host, "port": port, "error_code": 0, "error_message": None}
