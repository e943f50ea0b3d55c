"""What a broker asks of batches that a producer sends, beside what a log checks of all batches."""

from __future__ import annotations

from struct import Struct

from spark_klog.errors import DecodeError
from spark_klog.records.batch import check_crc, iter_batches
from spark_klog.records.batch_v2 import CONTROL_BIT, HEADER_SIZE, TRANSACTIONAL_BIT
from spark_klog.records.reader import records_of
from spark_klog.wire.codecs import MAX_DECOMPRESSED
from spark_klog.wire.lz4_frames import has_linked_blocks
from spark_klog.wire.primitives import Buffer

#: base offset, size of what follows, leader epoch, magic, CRC, attributes
_START = Struct(">qiibIh")
_SIZE_END = 12
_MAGIC = 2
_CODEC_BITS, _LZ4 = 0x07, 3


def check_produced(data: Buffer, *, needs_keys: bool = False, limit: int = MAX_DECOMPRESSED) -> bool:
    """Whether a batch is part of a transaction; `DecodeError` for one of another magic than 2, and for a control batch:
    only brokers write these.

    And for lz4 frames of blocks that depend on each other: Java's readers take none, and Apache Kafka refuses them.

    With `needs_keys`, as compaction does, also for a record without a key, and `CorruptBatchError` where the CRC is
    wrong; `limit` bounds what a batch decompresses to. What is no whole batch is left to the log.
    """
    view, position, is_transactional = memoryview(data), 0, False
    while position + _START.size <= len(view):
        _base_offset, size, _, magic, _, attributes = _START.unpack_from(view, position)
        if magic != _MAGIC:
            raise DecodeError(f"a batch of magic {magic}, where only {_MAGIC} is taken")
        if attributes & CONTROL_BIT:
            raise DecodeError("a control batch, which only brokers write")
        is_transactional = is_transactional or bool(attributes & TRANSACTIONAL_BIT)
        if size <= 0:
            return is_transactional
        end = position + _SIZE_END + size
        if attributes & _CODEC_BITS == _LZ4 and has_linked_blocks(view[position + HEADER_SIZE : end]):
            raise DecodeError("an lz4 frame whose blocks depend on each other: write independent ones")
        position = end
    if needs_keys:
        _check_keys(view, limit)
    return is_transactional


def _check_keys(view: memoryview, limit: int) -> None:
    for header, batch in iter_batches(view):
        check_crc(header, batch)
        for number, record in enumerate(records_of(header, batch, limit)):
            if record.key is None:
                raise DecodeError(f"record {number} of a batch has no key, which a compacted topic must have")
