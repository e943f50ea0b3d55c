"""A mirror's notes on its topics, in its own topic beside the offsets (see progress.py).

    key     topic STRING (INT16 length, UTF-8), partition INT32: -1
    value   INT64 -1, INT64 -1, then
            of a topic          its id at the source (16 bytes): the runs of offsets before this record are of another
                                topic of that name
            of the empty name   the prefix of the copies, UTF-8

The first fields are those of an offset sync, as of each record of the topic (see offset_map.py). No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import Struct, error as StructError
from uuid import UUID

from spark_klog.client.cluster import TopicPartition
from spark_klog.errors import ConfigError, DecodeError
from spark_klog.mirror.offset_map import PartitionMap, decode_key, decode_run, encode_key

_NO_PARTITION = -1
_NO_OFFSETS = Struct(">qq").pack(-1, -1)


@dataclass
class Progress:
    """The content of the mirror's topic: maps of offsets, ids of topics, the prefix (None: never written)."""

    maps: dict[TopicPartition, PartitionMap] = field(default_factory=dict)
    topic_ids: dict[str, UUID] = field(default_factory=dict)
    prefix: str | None = None

    @property
    def is_new(self) -> bool:
        """Whether nothing was mirrored yet."""
        return self.prefix is None and not self.maps

    def load(self, key: bytes, value: bytes) -> None:
        """Take in a record, in the order of the topic; `DecodeError` if it is not a mirror's."""
        topic, partition = decode_key(key)
        if partition != _NO_PARTITION:
            self.maps.setdefault((topic, partition), PartitionMap()).load(decode_run(value))
            return
        rest = value[len(_NO_OFFSETS) :]
        try:
            if topic:
                found = UUID(bytes=rest)
                self.forget(topic)
                self.topic_ids[topic] = found
            else:
                self.prefix = rest.decode()
        except (ValueError, StructError) as error:
            raise DecodeError(f"not a record of a mirror's topics: {error}") from None

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


def topic_record(topic: str, topic_id: UUID) -> tuple[bytes, bytes]:
    """The record of a topic's id: (key, value)."""
    return encode_key((topic, _NO_PARTITION)), _NO_OFFSETS + topic_id.bytes


def prefix_record(prefix: str) -> tuple[bytes, bytes]:
    """The record of the prefix: (key, value)."""
    return encode_key(("", _NO_PARTITION)), _NO_OFFSETS + prefix.encode()
