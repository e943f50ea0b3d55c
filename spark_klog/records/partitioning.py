"""Which partition a record's key chooses: the hashes of Kafka's Java clients and of librdkafka.

murmur2   positive murmur2 modulo partitions (Java's default, librdkafka's murmur2)
crc32     CRC-32 modulo partitions (librdkafka's default)
fnv1a     absolute value of 32-bit FNV-1a modulo partitions (librdkafka, Sarama)
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from spark_klog.base.settings import INT32_MAX
from spark_klog.records.contract import Headers
from spark_klog.records.kernels.reference import murmur2

#: Bytes of a batch's header, and the most of a record beside its key, value and headers.
OVERHEAD = 61 + 21
#: Sizes in bytes of a zigzag varint grow by one at each of these lengths.
VARINT_BOUNDS = (1 << 6, 1 << 13, 1 << 20, 1 << 27)
#: The most bytes that the lengths of key and value take, and the number of headers if there are none.
MOST_LENGTHS = 5 + 5 + 1


def largest_size(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    """The most bytes that a batch with this record alone takes before compression."""
    size = OVERHEAD + _field_size(key) + _field_size(value) + _varint_size(len(headers))
    for name, content in headers:
        size += _field_size(name.encode()) + _field_size(content)
    return size


def _field_size(content: bytes | None) -> int:
    return 1 if content is None else _varint_size(len(content)) + len(content)


def _varint_size(length: int) -> int:
    """Bytes of a zigzag varint of a number that is not negative."""
    return max(1, (length.bit_length() + 7) // 7)


_FNV_OFFSET, FNV_PRIME = 0x811C9DC5, 0x01000193
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Partitioning:
    """How a key chooses a partition: by `hash`; None ignores keys.

    Records without a key are free, too: they go where the producer likes, to one partition for a batch, or, with
    `takes_turns`, to another one for each record. With `hashes_null` the hash of an empty key decides instead. With
    `frees_empty` empty keys count as none.
    """

    hash: str | None = "murmur2"
    hashes_null: bool = False
    frees_empty: bool = False
    takes_turns: bool = False

    def of(self, key: bytes | None, partitions: int) -> int | None:
        """The partition of a key, None if the record is free."""
        if self.hash is None or (self.frees_empty and not key) or (key is None and not self.hashes_null):
            return None
        content = b"" if key is None else bytes(key)
        if self.hash == "murmur2":
            return (murmur2(content) & INT32_MAX) % partitions
        return (zlib.crc32(content) if self.hash == "crc32" else _fnv1a(content)) % partitions


def _fnv1a(key: bytes) -> int:
    digest = _FNV_OFFSET
    for byte in key:
        digest = (digest ^ byte) * FNV_PRIME & _MASK
    return digest if digest <= INT32_MAX else _MASK + 1 - digest


#: The default: murmur2; records without a key are free.
KAFKAS = Partitioning()
#: Partitioners by librdkafka's names.
_LIBRDKAFKAS = {
    "consistent": Partitioning("crc32", hashes_null=True),
    "consistent_random": Partitioning("crc32", frees_empty=True),
    "murmur2": Partitioning("murmur2", hashes_null=True),
    "murmur2_random": Partitioning("murmur2"),
    "fnv1a": Partitioning("fnv1a", hashes_null=True),
    "fnv1a_random": Partitioning("fnv1a"),
    "random": Partitioning(None),
}
_JAVAS = {
    "org.apache.kafka.clients.producer.internals.DefaultPartitioner": Partitioning(),
    "org.apache.kafka.clients.producer.UniformStickyPartitioner": Partitioning(None),
    "org.apache.kafka.clients.producer.RoundRobinPartitioner": Partitioning(None, takes_turns=True),
}
#: The partitioners by setting and value.
PARTITIONERS = {"partitioner": _LIBRDKAFKAS, "partitioner.class": _JAVAS}
