"""Rebuild a batch of magic 2 with some of its records, for compaction.

The batch keeps its base offset, last offset, producer and base sequence, from which a broker restores offsets and
sequence numbers; also its codec, leader epoch, timestamp type, and the flags for transactions and control.

The base timestamp becomes that of the first kept record, or the delete horizon (KIP-534); timestamp deltas are written
relative to it. The rest of each record is copied as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from spark_klog.errors import DecodeError
from spark_klog.records.contract import NO_TIMESTAMP
from spark_klog.records.formats.batch_v2 import (
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    LOG_APPEND_TIME_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
    build_batch,
)
from spark_klog.wire.codecs import NONE, codec_by_id
from spark_klog.wire.primitives import Buffer, Reader, append_uvarint, append_varlong, wrap_int64

_KEPT_BITS = LOG_APPEND_TIME_BIT | TRANSACTIONAL_BIT | CONTROL_BIT


def retain_records(header: BatchHeader, records: Buffer, kept: Sequence[bool], delete_horizon: int | None) -> bytes:
    """The batch with those records for which `kept` is true, at least one.

    `records` is the decompressed body, `kept` has an entry per record, `delete_horizon` (ms) may be None.
    `DecodeError` if the body does not have `len(kept)` records.
    """
    reader = Reader(records)
    body = bytearray()
    base, latest = delete_horizon, NO_TIMESTAMP
    for is_kept in kept:
        record = reader.take(reader.varint())
        if not is_kept:
            continue
        fields = Reader(record)
        attributes = fields.take(1)
        delta = fields.varlong()
        timestamp = header.append_time
        if timestamp is None:
            timestamp = wrap_int64(header.base_timestamp + delta)
        if base is None:
            base = timestamp
        latest = max(latest, timestamp)
        delta = wrap_int64(timestamp - base)
        content = bytearray(attributes)
        append_varlong(content, delta)
        content += fields.take(fields.remaining)
        append_uvarint(body, len(content) << 1)
        body += content
    if reader.remaining:
        raise DecodeError(
            f"batch at offset {header.base_offset}: {reader.remaining} bytes left over after {len(kept)} records"
        )
    return build_batch(
        body,
        sum(kept),
        codec=codec_by_id(header.codec_id),
        base_timestamp=NO_TIMESTAMP if base is None else base,
        max_timestamp=latest,
        attributes=header.attributes & _KEPT_BITS | (0 if delete_horizon is None else DELETE_HORIZON_BIT),
        **_kept_fields(header),
    )


def empty_batch(header: BatchHeader) -> bytes:
    """The batch without records: it only keeps the offsets and sequence numbers."""
    return build_batch(
        b"",
        0,
        codec=NONE,
        base_timestamp=NO_TIMESTAMP,
        max_timestamp=header.max_timestamp,
        attributes=header.attributes & _KEPT_BITS,
        **_kept_fields(header),
    )


def _kept_fields(header: BatchHeader) -> dict[str, int]:
    names = "base_offset", "last_offset_delta", "producer_id", "producer_epoch", "base_sequence", "leader_epoch"
    return {name: getattr(header, name) for name in names}
