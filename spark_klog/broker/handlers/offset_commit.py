"""OffsetCommit v0-9: commit offsets to __consumer_offsets; version 0 commits to the shared directories.

Members commit within their generation; a client without a group membership may commit only if the group is empty.
"""

from __future__ import annotations

import asyncio

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.commit_request import (
    check_offsets,
    encode_commits,
    log_failure,
    not_served,
    response,
    unconfirmed,
)
from spark_klog.errors import ConfigError, DirectoryError, ErrorCode
from spark_klog.protocol.codec import Message

_TO_DIRECTORIES = 0


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    group = message["group_id"]
    checked = await check_offsets(broker, request, message)
    codes, offsets, _ = checked
    while True:
        commits = await encode_commits(group, offsets, message["retention_time_ms"])
        log = await broker.coordinator.log_of(group)
        if not checked.refuse_deleted(broker):  # no await between these checks and the append
            break
    failure = log if isinstance(log, ErrorCode) else not_served(broker, log)
    if not failure:  # an empty group id may commit, as before KIP-289
        failure = broker.groups.may_commit(
            group, message["member_id"], message["group_instance_id"], message["generation_id_or_member_epoch"]
        )
    if failure:
        codes = dict.fromkeys(codes, failure)
    elif commits is not None and not isinstance(log, ErrorCode):
        try:
            if request.version == _TO_DIRECTORIES and broker.config.directories is not None:
                directory = broker.registry.group_offsets(group)
                await asyncio.to_thread(directory.commit, {key: entry[0] for key, entry in offsets.items()})
            else:
                broker.offsets.append(log, commits)
                await broker.flushes.flush_many(log)
                codes |= await unconfirmed(broker, log, offsets)
        except (OSError, DirectoryError, ConfigError) as error:
            codes |= log_failure(group, offsets, error)
    return response(message, codes)
