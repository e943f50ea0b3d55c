"""DeleteGroups v0-2 (KIP-229): delete groups without members, and their offsets."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.groups.expiry import forget_group, removal_error
from spark_klog.errors import ErrorCode
from spark_klog.log.partition_log import BatchTooLarge
from spark_klog.protocol.codec import Message


async def handle(broker: Broker, request: Request, message: Message) -> Message:
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
    code = broker.groups.delete(group)
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
