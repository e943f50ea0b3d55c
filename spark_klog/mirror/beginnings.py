"""A mirror's notes on its topics, in its own topic beside the offsets (see progress.py).

    key     topic STRING (INT16 length, UTF-8), partition INT32: the kind
    value   INT64 -1, INT64 -1, then by kind
            of a topic          -1: its id at the source (16 bytes, zeros if unknown): the runs of offsets before this
                                record are of another topic of that name
                                -2: the id of its copy at the target (16 bytes)
            of the empty name   -1: the prefix of the copies, UTF-8
                                -2: the process that has begun last, JSON: its id, how long to wait for it, ...
                                -3: the id of the last process that has ended in order, UTF-8
                                -4: clusters by prefix, JSON: where the target's topics with that prefix come from

The first fields are those of an offset sync, as of each record of the topic (see offset_map.py). No I/O.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from struct import Struct, error as StructError
from uuid import UUID

from spark_klog.client.cluster import TopicPartition
from spark_klog.errors import ConfigError, DecodeError
from spark_klog.mirror.offset_map import PartitionMap, decode_key, decode_run, encode_key

_TOPIC, _COPY = -1, -2
_PREFIX, _OWNER, _RELEASE, _ORIGINS = -1, -2, -3, -4
_UNKNOWN = UUID(int=0)
_NO_OFFSETS = Struct(">qq").pack(-1, -1)


@dataclass(frozen=True)
class Owner:
    """The process that mirrors a slot; another one has `seconds` to wait until this one has noticed it."""

    id: str
    seconds: float
    is_transactional: bool


@dataclass
class Progress:
    """The content of the mirror's topic: maps of offsets, ids of topics, the prefix (None: never written)."""

    maps: dict[TopicPartition, PartitionMap] = field(default_factory=dict)
    topic_ids: dict[str, UUID] = field(default_factory=dict)
    #: The ids of the copies, by the names of topics at the source.
    copy_ids: dict[str, UUID] = field(default_factory=dict)
    prefix: str | None = None
    #: The ids of the clusters that topics of the target come from, by the topics' prefix.
    origins: dict[str, str] = field(default_factory=dict)
    #: The processes that have begun, in order; compaction may have left the last one only.
    owners: list[Owner] = field(default_factory=list)
    released: str = ""

    @property
    def is_new(self) -> bool:
        """Whether nothing was mirrored yet."""
        return self.prefix is None and not self.maps

    @property
    def owner(self) -> Owner | None:
        """The process that has begun last."""
        return self.owners[-1] if self.owners else None

    def load(self, key: bytes, value: bytes) -> None:
        """Take in a record, in the order of the topic; `DecodeError` if it is not a mirror's."""
        topic, partition = decode_key(key)
        if partition >= 0:
            self.maps.setdefault((topic, partition), PartitionMap()).load(decode_run(value))
            return
        rest = value[len(_NO_OFFSETS) :]
        try:
            if topic:
                self._load_id(topic, partition, UUID(bytes=rest))
            else:
                self._load_note(partition, rest)
        except (ValueError, TypeError, StructError) as error:
            raise DecodeError(f"not a record of a mirror's topics: {error}") from None

    def _load_id(self, topic: str, kind: int, found: UUID) -> None:
        if kind == _COPY:
            self.copy_ids[topic] = found
            return
        self.forget(topic)
        self.topic_ids.pop(topic, None)
        if found != _UNKNOWN:
            self.topic_ids[topic] = found

    def _load_note(self, kind: int, rest: bytes) -> None:
        if kind == _PREFIX:
            self.prefix = rest.decode()
        elif kind == _OWNER:
            self.owners.append(Owner(**json.loads(rest)))
        elif kind == _RELEASE:
            self.released = rest.decode()
        elif kind == _ORIGINS:
            self.origins = dict(json.loads(rest))

    def load_note(self, key: bytes, value: bytes) -> None:
        """Take in a record only if it is of no topic."""
        if decode_key(key)[0] == "":
            self.load(key, value)

    def load_owner(self, key: bytes, value: bytes) -> None:
        """Take in a record only if it tells of a process."""
        if decode_key(key) == ("", _OWNER):
            self.load(key, value)

    def forget(self, topic: str) -> None:
        """Drop a topic's map of offsets."""
        for key in [key for key in self.maps if key[0] == topic]:
            del self.maps[key]

    def check_prefix(self, name: str, prefix: str) -> None:
        """Raise `ConfigError` if the mirror wrote to topics with another prefix before."""
        if self.prefix is not None and self.prefix != prefix:
            raise ConfigError(
                f"the mirror {name} writes to topics with the prefix {self.prefix!r}, not {prefix!r}: give this copy "
                "another name (--name)"
            )


def topic_record(topic: str, topic_id: UUID | None) -> tuple[bytes, bytes]:
    """The record of a topic's id: (key, value)."""
    return encode_key((topic, _TOPIC)), _NO_OFFSETS + (topic_id or _UNKNOWN).bytes


def copy_record(topic: str, topic_id: UUID) -> tuple[bytes, bytes]:
    """The record of the id of a topic's copy: (key, value)."""
    return encode_key((topic, _COPY)), _NO_OFFSETS + topic_id.bytes


def prefix_record(prefix: str) -> tuple[bytes, bytes]:
    """The record of the prefix: (key, value)."""
    return _note(_PREFIX, prefix)


def owner_record(owner: Owner) -> tuple[bytes, bytes]:
    """The record of the process that begins: (key, value)."""
    return _note(_OWNER, json.dumps(asdict(owner)))


def release_record(owner: Owner) -> tuple[bytes, bytes]:
    """The record of the process that has ended: (key, value)."""
    return _note(_RELEASE, owner.id)


def origins_record(origins: dict[str, str]) -> tuple[bytes, bytes]:
    """The record of the clusters by prefix: (key, value)."""
    return _note(_ORIGINS, json.dumps(origins))


def _note(kind: int, text: str) -> tuple[bytes, bytes]:
    return encode_key(("", kind)), _NO_OFFSETS + text.encode()
