"""The records of __consumer_offsets, in Kafka's own format.

    key of an offset    INT16 version 0 or 1, STRING group, STRING topic, INT32 partition
    value               INT16 version 3, INT64 offset, INT32 leader epoch, STRING metadata, INT64 commit time (ms)
                        [0-2: no leader epoch; 1: INT64 expiry time at the end]

    key of a group      INT16 version 2, STRING group
    value               INT16 version 3, STRING protocol type, INT32 generation, nullable STRING protocol,
                        nullable STRING leader, INT64 time of its state (ms) [from 2 on], ARRAY of members:
                            STRING member id, nullable STRING instance id [from 3 on], STRING client id, STRING host,
                            INT32 rebalance timeout (ms) [from 1 on], INT32 session timeout (ms),
                            BYTES subscription, BYTES assignment

A null value removes what the key names. Versions 4 of both values, as Kafka 4 writes them, are flexible: compact
strings, bytes and arrays, tagged fields at the end of each structure (of an offset the topic id, which is not used).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

from spark_klog.errors import DecodeError
from spark_klog.wire.primitives import Buffer, Reader, Writer

_OFFSET_KEYS, _GROUP_KEY = (0, 1), 2
_KEY_START, _PARTITION, _SIZE = Struct(">hh"), Struct(">i"), Struct(">h")
#: Version 3 without metadata, as nearly all are.
_PLAIN_OFFSET = Struct(">hqihq")
_VALUE_VERSION = 3
#: Of offsets: the only version with an expiry time.
_EXPIRING = 1
_FLEXIBLE = 4


class OffsetKey(NamedTuple):
    """Whose offset of what."""

    group: str
    topic: str
    partition: int


class GroupKey(NamedTuple):
    """Which group."""

    group: str


#: A committed offset that has no time to live of its own.
NO_EXPIRY = -1


class Committed(NamedTuple):
    """A committed offset. `timestamp` is the commit's, in ms; `expires_ms` is when it is removed, where the client said
    so (OffsetCommit 2-4), else the broker's retention decides.
    """

    offset: int
    leader_epoch: int
    metadata: str
    timestamp: int
    expires_ms: int = NO_EXPIRY


class StoredMember(NamedTuple):
    """A member; `subscription` is what it said for the group's protocol. Timeouts in ms."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


@dataclass(frozen=True)
class StoredGroup:
    """A group as it was when its last generation was complete; `timestamp` (ms) is when that was."""

    protocol_type: str
    generation: int
    protocol: str | None
    leader: str | None
    timestamp: int
    members: list[StoredMember] = field(default_factory=list)


def encode_offset_key(key: OffsetKey) -> bytes:
    """Version 1."""
    writer = Writer()
    writer.int16(_OFFSET_KEYS[-1])
    writer.nullable_string(key.group)
    writer.nullable_string(key.topic)
    writer.int32(key.partition)
    return writer.to_bytes()


def encode_group_key(group: str) -> bytes:
    """Version 2."""
    writer = Writer()
    writer.int16(_GROUP_KEY)
    writer.nullable_string(group)
    return writer.to_bytes()


@lru_cache(maxsize=1 << 14)
def _names(start: bytes) -> tuple[str, str] | None:
    """Group and topic of an offset's key without its partition; None for what is none."""
    version, group = _KEY_START.unpack_from(start)
    if version not in _OFFSET_KEYS or not 0 <= group <= len(start) - 6:
        return None
    (topic,) = _SIZE.unpack_from(start, 4 + group)
    if 6 + group + topic != len(start):
        return None
    try:
        return str(start[4 : 4 + group], "utf-8"), str(start[6 + group :], "utf-8")
    except UnicodeDecodeError:
        return None


def decode_key(data: bytes) -> OffsetKey | GroupKey | None:
    """None for a key of another kind, as later Kafkas have them; `DecodeError`."""
    if len(data) >= 10:  # without a reader, if it goes
        names = _names(data[:-4])
        if names is not None:
            return OffsetKey(*names, partition_of(data))
    reader = Reader(data)
    version = reader.int16()
    if version in _OFFSET_KEYS:
        return OffsetKey(reader.nullable_string() or "", reader.nullable_string() or "", reader.int32())
    return GroupKey(reader.nullable_string() or "") if version == _GROUP_KEY else None


def partition_of(data: bytes) -> int:
    """The partition of an offset's key, which is its end."""
    partition: int = _PARTITION.unpack_from(data, len(data) - _PARTITION.size)[0]
    return partition


def encode_offset(committed: Committed) -> bytes:
    """Version 3, or 1 with an expiry time: as Kafka does it."""
    expires = committed.expires_ms != NO_EXPIRY
    writer = Writer()
    writer.int16(_EXPIRING if expires else _VALUE_VERSION)
    writer.int64(committed.offset)
    if not expires:
        writer.int32(committed.leader_epoch)
    writer.nullable_string(committed.metadata)
    writer.int64(committed.timestamp)
    if expires:
        writer.int64(committed.expires_ms)
    return writer.to_bytes()


def decode_offset(data: bytes) -> Committed:
    """Versions 0-4; `DecodeError`."""
    if len(data) == _PLAIN_OFFSET.size:  # there may be a million of them at start: without a reader, if it goes
        version, offset, leader_epoch, size, timestamp = _PLAIN_OFFSET.unpack(data)
        if version == _VALUE_VERSION and size == 0:
            return Committed(offset, leader_epoch, "", timestamp)
    reader = Reader(data)
    version = reader.int16()
    if not 0 <= version <= _FLEXIBLE:
        raise DecodeError(f"committed offset of unknown version {version}")
    offset = reader.int64()
    leader_epoch = reader.int32() if version >= _VALUE_VERSION else -1
    metadata = reader.compact_nullable_string() if version == _FLEXIBLE else reader.nullable_string()
    timestamp = reader.int64()
    expires_ms = reader.int64() if version == _EXPIRING else NO_EXPIRY
    return Committed(offset, leader_epoch, metadata or "", timestamp, expires_ms)


def encode_group(group: StoredGroup) -> bytes:
    """Version 3."""
    writer = Writer()
    writer.int16(_VALUE_VERSION)
    writer.nullable_string(group.protocol_type)
    writer.int32(group.generation)
    writer.nullable_string(group.protocol)
    writer.nullable_string(group.leader)
    writer.int64(group.timestamp)
    writer.int32(len(group.members))
    for member in group.members:
        for text in member[:4]:
            writer.nullable_string(text)
        writer.int32(member.rebalance_timeout_ms)
        writer.int32(member.session_timeout_ms)
        writer.nullable_bytes(member.subscription)
        writer.nullable_bytes(member.assignment)
    return writer.to_bytes()


def decode_group(data: Buffer) -> StoredGroup:
    """Versions 0-4; `DecodeError`."""
    reader = Reader(data)
    version = reader.int16()
    if not 0 <= version <= _FLEXIBLE:
        raise DecodeError(f"group of unknown version {version}")
    is_flexible = version == _FLEXIBLE
    text = reader.compact_nullable_string if is_flexible else reader.nullable_string
    blob = reader.compact_nullable_bytes if is_flexible else reader.nullable_bytes
    protocol_type, generation, protocol, leader = text() or "", reader.int32(), text(), text()
    timestamp = reader.int64() if version >= 2 else -1
    members = []
    for _ in range(max(0, reader.count(is_flexible))):
        member_id, instance_id = text() or "", text() if version >= _VALUE_VERSION else None
        client_id, host = text() or "", text() or ""
        timeouts = [reader.int32() for _ in range(2 if version >= 1 else 1)]
        subscription, assignment = bytes(blob() or b""), bytes(blob() or b"")
        if is_flexible:
            reader.skip_tags()
        members.append(
            StoredMember(member_id, instance_id, client_id, host, timeouts[0], timeouts[-1], subscription, assignment)
        )
    return StoredGroup(protocol_type, generation, protocol, leader, timestamp, members)
