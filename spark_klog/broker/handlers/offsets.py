"""Offsets of groups: OffsetCommit, TxnOffsetCommit, OffsetFetch and OffsetDelete."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import UUID

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.event_loop import distinct
from spark_klog.broker.groups.expiry import removal_error
from spark_klog.broker.groups.membership import Partitions
from spark_klog.broker.groups.offset_manager import DEFAULT_RETENTION, Commit, EncodedCommits, encoded_commits
from spark_klog.broker.groups.records import Committed
from spark_klog.broker.security.authorizer import READ, SEE
from spark_klog.broker.transactions.transaction import ProducerIdAndEpoch
from spark_klog.broker.transactions.verification import as_known
from spark_klog.errors import ConfigError, DecodeError, DirectoryError, ErrorCode
from spark_klog.log.partition_log import BatchTooLarge, PartitionLog
from spark_klog.log.producer_state import ProducerRefused
from spark_klog.protocol.apis import TXN_OFFSET_COMMIT
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.groups import OFFSETS_WITH_TOPIC_IDS
from spark_klog.protocol.tables.transactions import FIRST_OF_TRANSACTIONS_2, TXN_OFFSETS_WITH_TOPIC_IDS

_log = logging.getLogger(__name__)

_AT_ONCE = 100
#: This version commits to and fetches from the shared directories.
_DIRECTORIES = 0
_Codes = dict[tuple[str, int], ErrorCode]
_Offsets = dict[tuple[str, int], Commit]
#: Offsets encoded in the event loop, which takes a few milliseconds.
_ENCODED_AT_ONCE = 200
#: Offsets of a group that are looked up one by one, at one moment.
_FEW = 1_000
_NO_MEMBER = -1


async def _remove(broker: Broker, log: PartitionLog, group_id: str, topic: str, partitions: list[int]) -> ErrorCode:
    for start in range(0, max(1, len(partitions)), _AT_ONCE):
        await broker.turns.take()
        await broker.flushes.make_early_room(log)
        subscribed = broker.coordinator.subscribed_topics(
            group_id
        )  # again: the group may have changed during the waits
        if subscribed is None or topic in subscribed:
            return ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
        broker.offsets.remove(log, group_id, [(topic, index) for index in partitions[start : start + _AT_ONCE]])
    await broker.flushes.flush_many(log)
    return ErrorCode.NONE


async def offset_delete(broker: Broker, request: Request, message: Message) -> Message:
    """OffsetDelete v0 (KIP-496): delete a group's offsets of topics to which no member subscribes."""
    group_id = message["group_id"]
    if not broker.authorizer.is_admin(request.session):
        return {"error_code": ErrorCode.GROUP_AUTHORIZATION_FAILED}
    log = await broker.coordinator.log_of(group_id)
    if isinstance(log, ErrorCode):
        return {"error_code": log}
    is_group = broker.groups.get(group_id) is not None or broker.coordinator.consumer_groups.get(group_id) is not None
    if not is_group and not broker.offsets.has(group_id):
        return {"error_code": ErrorCode.GROUP_ID_NOT_FOUND}
    if broker.coordinator.subscribed_topics(group_id) is None:
        return {"error_code": ErrorCode.NON_EMPTY_GROUP}
    topics = []
    for topic in message["topics"]:
        await broker.turns.take()
        name, partitions = topic["name"], [entry["partition_index"] for entry in topic["partitions"]]
        try:
            code = await _remove(broker, log, group_id, name, partitions)
        except (BatchTooLarge, OSError) as error:
            code = removal_error(group_id, error)
        answers = [{"partition_index": index, "error_code": code} async for index in broker.turns.each(partitions)]
        topics.append({"name": name, "partitions": answers})
    return {"error_code": ErrorCode.NONE, "topics": topics}


async def offset_fetch(broker: Broker, request: Request, message: Message) -> Message:
    """OffsetFetch v0-10: committed offsets, -1 if there is none; null topics (v2) request all offsets of a group.

    With `require_stable` (v7, KIP-447), a pending transactional commit gets UNSTABLE_OFFSET_COMMIT: the client must
    wait. Version 0 reads from the shared directories. From version 9 on members name their epoch (KIP-848), so that
    one that has lost its partitions does not read their offsets too early. Version 10 has ids of topics.
    """
    if request.version == _DIRECTORIES and broker.config.directories is not None:
        return {"topics": await _of_directories(broker, request, message["group_id"], message["topics"])}
    if request.version >= 8:
        is_strict = message["require_stable"]
        groups = [
            await _group(
                *(broker, request, entry["group_id"], entry["topics"], is_strict),
                (entry["member_id"], entry["member_epoch"]),
            )
            for entry in distinct(message["groups"], lambda entry: entry["group_id"])
        ]
        return {"groups": groups}
    answer = await _group(broker, request, message["group_id"], message["topics"], message["require_stable"])
    if request.version <= 1 and answer["error_code"]:
        answer["topics"] = [await _refused(broker, entry, answer["error_code"]) for entry in message["topics"]]
    del answer["group_id"]
    return answer


async def _of_directories(broker: Broker, request: Request, group: str, topics: list[dict[str, Any]]) -> list[Message]:
    keys: dict[tuple[str, int], None] = {}
    for topic in topics:
        await broker.turns.take()
        if broker.authorizer.allows(request.session, SEE, topic["name"]):
            keys |= dict.fromkeys((topic["name"], index) for index in topic["partition_indexes"])
    code = ErrorCode.NONE
    offsets: dict[tuple[str, int], int] = {}
    try:
        offsets = await asyncio.to_thread(broker.registry.group_offsets(group).fetch, list(keys))
    except (DirectoryError, ConfigError, DecodeError) as error:
        _log.error("offsets of group %s can't be read: %s", group, error)
        code = ErrorCode.UNKNOWN_SERVER_ERROR
    answer = []
    for topic in topics:
        name = topic["name"]
        refusal = broker.authorizer.refusal(request.session, SEE, name) or code
        partitions = []
        async for index in broker.turns.each(topic["partition_indexes"]):
            offset = offsets.get((name, index))
            committed = None if offset is None else Committed(offset, -1, "", -1)
            missing = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if committed is None else ErrorCode.NONE
            partitions.append(_entry(index, committed, refusal or missing))
        answer.append({"name": name, "partitions": partitions})
    return answer


async def _group(
    broker: Broker,
    request: Request,
    group: str,
    topics: list[dict[str, Any]] | None,
    is_strict: bool,
    member: tuple[str | None, int] = (None, _NO_MEMBER),
) -> Message:
    by_id = request.version >= OFFSETS_WITH_TOPIC_IDS
    log = await broker.coordinator.log_of(group, for_reading=True)
    code = log if isinstance(log, ErrorCode) else broker.coordinator.may_fetch(group, *member)
    if code:
        return {"group_id": group, "topics": [], "error_code": code}
    if by_id:
        for entry in topics or ():
            await broker.turns.take()
            if not await _resolve(broker, entry):
                entry["name"] = None
    # of one moment, however long the answer takes: a commit is in all of it, and so is the group's deletion
    committed = _committed(broker, group, topics)
    pending = broker.offsets.pending(group) if is_strict else set()

    def answer_for(key: tuple[str, int]) -> Message:
        if key in pending:
            return _entry(key[1], None, ErrorCode.UNSTABLE_OFFSET_COMMIT)
        return _entry(key[1], committed.get(key), ErrorCode.NONE)

    if topics is None:
        answers: dict[str, list[Message]] = {}
        for key in committed:
            await broker.turns.take()
            if broker.authorizer.allows(request.session, SEE, key[0]):
                answers.setdefault(key[0], []).append(answer_for(key))
        if by_id:  # offsets of a topic that was deleted have no id
            known = broker.registry.topics
            answer = [
                {"topic_id": known[topic].topic_id, "partitions": partitions}
                for topic, partitions in answers.items()
                if topic in known
            ]
        else:
            answer = [{"name": topic, "partitions": partitions} for topic, partitions in answers.items()]
    else:
        answer = []
        answered: set[tuple[str, int]] = set()
        for entry in topics:
            await broker.turns.take()
            if entry["name"] is None:
                answer.append(await _refused(broker, entry, ErrorCode.UNKNOWN_TOPIC_ID))
                continue
            name = entry["name"]
            if code := broker.authorizer.refusal(request.session, SEE, name):
                answer.append(await _refused(broker, entry, code))
                continue
            partitions = []
            for index in entry["partition_indexes"]:
                await broker.turns.take()
                if (name, index) not in answered:  # an offset's metadata may be long: return it once
                    answered.add((name, index))
                    partitions.append(answer_for((name, index)))
            answer.append(_named(entry, partitions))
    return {"group_id": group, "topics": answer, "error_code": ErrorCode.NONE}


def _committed(broker: Broker, group: str, topics: list[dict[str, Any]] | None) -> dict[tuple[str, int], Committed]:
    """The committed offsets of a group that are listed; all of them if many are."""
    if topics is None or len(topics) > _FEW or sum(len(entry["partition_indexes"]) for entry in topics) > _FEW:
        return broker.offsets.all(group)
    keys = [(entry["name"], index) for entry in topics for index in entry["partition_indexes"]]
    return {key: offset for key in keys if (offset := broker.offsets.fetch(group, *key)) is not None}


async def _resolve(broker: Broker, topic: dict[str, Any]) -> bool:
    """Give an entry of a request that has an id its topic's name; False if no topic has the id."""
    known = await broker.partitions.topic_by_id(topic["topic_id"])
    if known is not None:
        topic["name"] = known.name
    return known is not None


def _named(entry: dict[str, Any], partitions: list[Message]) -> Message:
    """An entry of the response for one of the request: its version has the name or the id."""
    topic = {name: entry[name] for name in ("name", "topic_id") if name in entry}
    return topic | {"partitions": partitions}


async def _refused(broker: Broker, entry: dict[str, Any], code: ErrorCode) -> Message:
    await broker.turns.take()
    return _named(entry, [_entry(index, None, code) async for index in broker.turns.each(entry["partition_indexes"])])


def _entry(partition: int, committed: Committed | None, code: ErrorCode) -> Message:
    return {
        "partition_index": partition,
        "committed_offset": committed.offset if committed else -1,
        "committed_leader_epoch": committed.leader_epoch if committed else -1,
        "metadata": committed.metadata if committed else "",
        "error_code": code,
    }


class _CheckedOffsets(NamedTuple):
    """Preliminary error codes by partition, offsets to commit, and the ids of their topics.

    `missing` is the error of a topic that does not exist.
    """

    codes: _Codes
    offsets: _Offsets
    topics: dict[str, UUID]
    missing: ErrorCode

    def partitions(self) -> Partitions:
        """The partitions of the offsets to commit."""
        return frozenset((self.topics[name], index) for name, index in self.offsets)

    def refuse_deleted(self, broker: Broker) -> bool:
        """Refuse the offsets of topics that were deleted since the check; return whether there are any."""
        gone = {name for name, topic_id in self.topics.items() if broker.follower.current_id(name) != topic_id}
        for name in gone:
            del self.topics[name]
        for key in [key for key in self.offsets if key[0] in gone]:
            del self.offsets[key]
            self.codes[key] = self.missing
        return bool(gone)


async def _check_offsets(broker: Broker, request: Request, message: Message, *, by_id: bool) -> _CheckedOffsets:
    """Check which of the offsets of a request may be committed; with `by_id` it has its topics' ids.

    Other requests are served meanwhile, so the caller checks afterwards whether the client may commit at all, and just
    before the append whether a topic was deleted.
    """
    codes: _Codes = {}
    offsets: _Offsets = {}
    topics: dict[str, UUID] = {}
    missing = ErrorCode.UNKNOWN_TOPIC_ID if by_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    for topic in message["topics"]:
        await broker.turns.take()
        if by_id and not await _resolve(broker, topic):
            continue  # `_commit_response` has UNKNOWN_TOPIC_ID for it
        for entry in topic["partitions"]:
            await broker.turns.take()
            key = topic["name"], entry["partition_index"]
            metadata = entry["committed_metadata"] or ""
            codes[key] = ErrorCode.NONE
            known = broker.registry.topics.get(topic["name"])
            if refusal := broker.authorizer.refusal(request.session, READ, topic["name"]):
                codes[key] = refusal
            elif known is None or (by_id and known.topic_id != topic["topic_id"]):
                codes[key] = missing
            elif key[1] not in known.assignment:
                codes[key] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            elif len(metadata.encode()) > broker.config.offset_metadata_max_bytes:
                codes[key] = ErrorCode.OFFSET_METADATA_TOO_LARGE
            else:
                topics.setdefault(topic["name"], known.topic_id)
                offsets[key] = entry["committed_offset"], entry["committed_leader_epoch"], metadata
    return _CheckedOffsets(codes, offsets, topics, missing)


async def _encode_commits(
    group: str, offsets: _Offsets, retention_ms: int = DEFAULT_RETENTION, producer: tuple[int, int] | None = None
) -> EncodedCommits | None:
    """Encode the batch to append, None without offsets; many offsets are encoded in a thread."""
    if not offsets:
        return None
    if len(offsets) <= _ENCODED_AT_ONCE:
        return encoded_commits(group, offsets, retention_ms, producer)
    return await asyncio.to_thread(encoded_commits, group, offsets, retention_ms, producer)


def _not_served(broker: Broker, log: PartitionLog) -> ErrorCode:
    """COORDINATOR_NOT_AVAILABLE if the log is not, this moment, served by this broker: before an append; else NONE."""
    return ErrorCode.NONE if broker.partitions.serves(log) else ErrorCode.COORDINATOR_NOT_AVAILABLE


async def _append(broker: Broker, log: PartitionLog, commits: EncodedCommits) -> _Codes:
    """Append and flush commits; the error code of each partition, nothing if they may be acknowledged."""
    try:
        broker.offsets.append(log, commits)
        await broker.flushes.flush_many(log)
        code = ErrorCode.NONE if await broker.partitions.confirms(log) else ErrorCode.COORDINATOR_NOT_AVAILABLE
    except ProducerRefused as error:
        code = error.code
    except (BatchTooLarge, OSError) as error:
        _log.error("commit of group %s failed: %s", commits.group, error)
        is_refused = isinstance(error, BatchTooLarge)
        code = ErrorCode.INVALID_COMMIT_OFFSET_SIZE if is_refused else ErrorCode.COORDINATOR_NOT_AVAILABLE
    return dict.fromkeys(commits.committed, code) if code else {}


async def _commit_to_directories(broker: Broker, group: str, offsets: _Offsets) -> _Codes:
    """As `_append`, for version 0."""
    directory = broker.registry.group_offsets(group)
    try:
        await asyncio.to_thread(directory.commit, {key: entry[0] for key, entry in offsets.items()})
    except (OSError, DirectoryError, ConfigError) as error:
        _log.error("commit of group %s failed: %s", group, error)
        return dict.fromkeys(offsets, ErrorCode.COORDINATOR_NOT_AVAILABLE)
    return {}


async def _commit_response(broker: Broker, message: Message, codes: _Codes) -> Message:
    """The response: an error code for each partition of the request, UNKNOWN_TOPIC_ID where its topic has no name."""
    topics = []
    async for topic in broker.turns.each(message["topics"]):
        name, partitions = topic["name"], []
        async for entry in broker.turns.each(topic["partitions"]):
            index = entry["partition_index"]
            code = codes[name, index] if name else ErrorCode.UNKNOWN_TOPIC_ID
            partitions.append({"partition_index": index, "error_code": code})
        topics.append(_named(topic, partitions))
    return {"topics": topics}


async def offset_commit(broker: Broker, request: Request, message: Message) -> Message:
    """OffsetCommit v0-10: commit offsets to __consumer_offsets; version 0 commits to the shared directories.

    Members commit within their generation; a client without a group membership may commit only if the group is empty.
    Version 10 has ids of topics.
    """
    group = message["group_id"]
    checked = await _check_offsets(broker, request, message, by_id=request.version >= OFFSETS_WITH_TOPIC_IDS)
    codes, offsets = checked.codes, checked.offsets
    while True:
        commits = await _encode_commits(group, offsets, message["retention_time_ms"])
        log = await broker.coordinator.log_of(group)
        if not checked.refuse_deleted(broker):  # no await between these checks and the append
            break
    failure = log if isinstance(log, ErrorCode) else _not_served(broker, log)
    if not failure:  # an empty group id may commit, as before KIP-289
        failure = broker.coordinator.may_commit(
            *(group, message["member_id"], message["group_instance_id"], message["generation_id_or_member_epoch"]),
            checked.partitions,
        )
    if failure:
        codes = dict.fromkeys(codes, failure)
    elif commits is not None and not isinstance(log, ErrorCode):
        if request.version == _DIRECTORIES and broker.config.directories is not None:
            codes |= await _commit_to_directories(broker, group, offsets)
        else:
            codes |= await _append(broker, log, commits)
    return await _commit_response(broker, message, codes)


async def txn_offset_commit(broker: Broker, request: Request, message: Message) -> Message:
    """TxnOffsetCommit v0-6: offsets that take effect if the transaction commits; from v3 on of a member (KIP-447).

    From v5 on the group need not be in the transaction before (KIP-890); v6 has ids of topics (KIP-1319).
    """
    group = message["group_id"]
    adds = request.version >= FIRST_OF_TRANSACTIONS_2
    producer = ProducerIdAndEpoch(message["producer_id"], message["producer_epoch"])
    checked = await _check_offsets(broker, request, message, by_id=request.version >= TXN_OFFSETS_WITH_TOPIC_IDS)
    codes, offsets = checked.codes, checked.offsets
    if adds and not offsets:  # nothing to begin a transaction for
        return await _commit_response(broker, message, codes)
    while True:
        commits = await _encode_commits(group, offsets, producer=(producer.producer_id, producer.epoch))
        log = await broker.coordinator.log_of(group)
        if not group:
            log = ErrorCode.INVALID_GROUP_ID
        if not isinstance(log, ErrorCode):
            verification = await broker.verifier.verify(
                message["transactional_id"], producer, log, adds=adds, group=group
            )
            await broker.flushes.make_early_room(log)
        if not checked.refuse_deleted(broker):  # no await between these checks and the append
            break
    if isinstance(log, ErrorCode):
        failure = log
    elif not (failure := _not_served(broker, log) or _membership(broker, message, checked.partitions)):
        failure, reason = verification.outcome()
        if failure:
            _log.warning("%s (%s): %s", request.client_id, request.peer, reason)
    if failure:
        codes = dict.fromkeys(codes, as_known(TXN_OFFSET_COMMIT, request.version, failure))
    elif commits is not None and not isinstance(log, ErrorCode):
        codes |= await _append(broker, log, commits)
    return await _commit_response(broker, message, codes)


def _membership(broker: Broker, message: Message, partitions: Callable[[], Partitions]) -> ErrorCode:
    """NONE if the member may commit; a producer without a member id may always, as before KIP-447."""
    generation, member_id, instance_id = message["generation_id"], message["member_id"], message["group_instance_id"]
    if generation == _NO_MEMBER and not member_id and instance_id is None:
        return ErrorCode.NONE
    return broker.coordinator.may_commit(
        *(message["group_id"], member_id, instance_id, generation), partitions, in_transaction=True
    )
