"""Records of __consumer_offsets: committed offsets and groups. Byte layout: `protocol.tables.groups`.

A null value removes the key's entry.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import NamedTuple

from spark_klog.broker.groups.consumer_records import ConsumerGroupKey, decode_consumer_key
from spark_klog.broker.groups.group import Group
from spark_klog.protocol.codec import Message, decode_versioned, encode_versioned
from spark_klog.protocol.tables.groups import (
    GROUP_METADATA_KEY,
    GROUP_METADATA_VALUE,
    OFFSET_COMMIT_KEY,
    OFFSET_COMMIT_VALUE,
)
from spark_klog.wire.primitives import Reader

_KEY_START, _PARTITION, _SIZE = Struct(">hh"), Struct(">i"), Struct(">h")
#: An offset value of version 3 without metadata: the common case.
_PLAIN_OFFSET = Struct(">hqihq")
_VALUE_VERSION = 3
#: The only version of an offset value with an expiry time.
_EXPIRING = 1
#: The committed offset has no expiry time of its own.
NO_EXPIRY = -1


class OffsetKey(NamedTuple):
    """Key of a committed offset."""

    group: str
    topic: str
    partition: int


class GroupKey(NamedTuple):
    """Key of a group."""

    group: str


class Committed(NamedTuple):
    """A committed offset; `timestamp` (ms) is the commit's.

    `expires_ms` is the expiry time, if the client set one (OffsetCommit 2-4); else the broker's retention applies.
    """

    offset: int
    leader_epoch: int
    metadata: str
    timestamp: int
    expires_ms: int = NO_EXPIRY


def encode_offset_key(key: OffsetKey) -> bytes:
    """Encode the key of an offset (version 1)."""
    return _key_start(key.group, key.topic) + _PARTITION.pack(key.partition)


@lru_cache(maxsize=1 << 14)
def _key_start(group: str, topic: str) -> bytes:
    """The key of an offset without its last field, the partition."""
    message = {"group": group, "topic": topic}
    return encode_versioned(OFFSET_COMMIT_KEY, OFFSET_COMMIT_KEY.versions.last, message)[: -_PARTITION.size]


def encode_group_key(group: str) -> bytes:
    """Encode the key of a group (version 2)."""
    return encode_versioned(GROUP_METADATA_KEY, GROUP_METADATA_KEY.versions.last, {"group": group})


@lru_cache(maxsize=1 << 14)
def _names(start: bytes) -> tuple[str, str] | None:
    """Group and topic of an offset's key without its partition at the end; None for any other bytes."""
    version, group = _KEY_START.unpack_from(start)
    if version not in OFFSET_COMMIT_KEY.versions or not 0 <= group <= len(start) - 6:
        return None
    (topic,) = _SIZE.unpack_from(start, 4 + group)
    if 6 + group + topic != len(start):
        return None
    try:
        return str(start[4 : 4 + group], "utf-8"), str(start[6 + group :], "utf-8")
    except UnicodeDecodeError:
        return None


def decode_key(data: bytes) -> OffsetKey | GroupKey | ConsumerGroupKey | None:
    """Decode a key; None for key types of later Kafka versions. Raises `DecodeError`."""
    if len(data) >= 10:  # fast path without a reader
        names = _names(data[:-4])
        if names is not None:
            return OffsetKey(*names, partition_of(data))
    version = Reader(data).int16()
    if version in OFFSET_COMMIT_KEY.versions:
        return OffsetKey(**decode_versioned(OFFSET_COMMIT_KEY, data))
    if version in GROUP_METADATA_KEY.versions:
        return GroupKey(**decode_versioned(GROUP_METADATA_KEY, data))
    return decode_consumer_key(version, data)


def partition_of(data: bytes) -> int:
    """The partition of an offset's key: its last field."""
    partition: int = _PARTITION.unpack_from(data, len(data) - _PARTITION.size)[0]
    return partition


def encode_offset(committed: Committed) -> bytes:
    """Encode an offset as Kafka does: version 3, or version 1 if it has an expiry time."""
    if not committed.metadata and committed.expires_ms == NO_EXPIRY:
        return _PLAIN_OFFSET.pack(_VALUE_VERSION, committed.offset, committed.leader_epoch, 0, committed.timestamp)
    message = {
        "offset": committed.offset,
        "leader_epoch": committed.leader_epoch,
        "metadata": committed.metadata,
        "commit_timestamp": committed.timestamp,
        "expire_timestamp": committed.expires_ms,
    }
    version = _VALUE_VERSION if committed.expires_ms == NO_EXPIRY else _EXPIRING
    return encode_versioned(OFFSET_COMMIT_VALUE, version, message)


def decode_offset(data: bytes) -> Committed:
    """Decode an offset (versions 0-4). Raises `DecodeError`."""
    if len(data) == _PLAIN_OFFSET.size:  # fast path without the codec: a start may load a million offsets
        version, offset, leader_epoch, size, timestamp = _PLAIN_OFFSET.unpack(data)
        if version == _VALUE_VERSION and size == 0:
            return Committed(offset, leader_epoch, "", timestamp)
    message = decode_versioned(OFFSET_COMMIT_VALUE, data)
    return Committed(
        message["offset"],
        message["leader_epoch"],
        message["metadata"],
        message["commit_timestamp"],
        message["expire_timestamp"],
    )


def encode_group(group: Group, now_ms: int) -> bytes:
    """Encode a group as of its last completed generation (version 3)."""
    message = {
        "protocol_type": group.protocol_type or "",
        "generation": group.generation,
        "protocol": group.protocol,
        "leader": group.leader,
        "current_state_timestamp": now_ms,
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.request.instance_id,
                "client_id": member.request.client_id,
                "client_host": member.request.client_host,
                "rebalance_timeout": member.request.rebalance_timeout_ms,
                "session_timeout": member.request.session_timeout_ms,
                "subscription": member.metadata(group.protocol),
                "assignment": member.assignment,
            }
            for member in group.members.values()
        ],
    }
    return encode_stored_group(message)


def encode_stored_group(message: Message) -> bytes:
    """Encode the fields of a group's record (version 3)."""
    return encode_versioned(GROUP_METADATA_VALUE, _VALUE_VERSION, message)


def decode_group(data: bytes) -> Message:
    """Decode a group (versions 0-4); a rebalance timeout of -1 is the session's. Raises `DecodeError`."""
    return decode_versioned(GROUP_METADATA_VALUE, data)
