"""OffsetCommit v0-9: offsets into __consumer_offsets, by version 0 into the directories that brokers share.

Members commit within their generation; who is in no group commits for groups without members.
"""

from __future__ import annotations

import asyncio

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.coordinator.commit_request import answer, encoded, not_written, sorted_out
from spark_klog.errors import ConfigError, DirectoryError, ErrorCode
from spark_klog.protocol.codec import Message

_TO_DIRECTORIES = 0


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    group = message["group_id"]
    codes, offsets = await sorted_out(broker, request, message)
    commits = await encoded(group, offsets, message["retention_time_ms"])
    log = await broker.coordinator.log_of(group)
    failure = log if isinstance(log, ErrorCode) else ErrorCode.NONE
    if not failure:  # a group without a name may commit, as before KIP-289
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
        except (OSError, DirectoryError, ConfigError) as error:
            codes |= not_written(group, offsets, error)
    return answer(message, codes)
