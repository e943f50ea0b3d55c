"""Control batches (KIP-98): they mark the end of a transaction in each partition that it wrote to.

key    INT16 version, INT16 type (0 abort, 1 commit)
value  INT16 version, INT32 coordinator epoch
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from spark_klog.errors import DecodeError
from spark_klog.records.formats.batch_v2 import BatchHeader
from spark_klog.records.kernels.reference import iter_records

ABORT, COMMIT = 0, 1
_VERSION = 0
_KEY = Struct(">hh")
_VALUE = Struct(">hi")
#: Limit for decompressing a control batch, in bytes; Kafka's are some ten bytes, uncompressed.
_MAX_SIZE = 64 * 1024


class EndTransactionMarker(NamedTuple):
    """The record of a control batch: ABORT, COMMIT or another type; `coordinator_epoch` is -1 if it has none."""

    type: int
    coordinator_epoch: int


def read_marker(header: BatchHeader, batch: memoryview) -> EndTransactionMarker | None:
    """The marker of a control batch, None if compaction has removed it.

    `DecodeError` if the batch holds anything else.
    """
    if not header.count:
        return None
    record = next(iter_records(header, batch, _MAX_SIZE))
    if record.key is None or len(record.key) < _KEY.size:
        raise DecodeError(f"control batch at offset {header.base_offset} holds no control record")
    epoch = _VALUE.unpack_from(record.value)[1] if record.value and len(record.value) >= _VALUE.size else -1
    return EndTransactionMarker(_KEY.unpack_from(record.key)[1], epoch)


def encode_marker(marker: EndTransactionMarker) -> tuple[bytes, bytes]:
    """The marker's record: (key, value)."""
    return _KEY.pack(_VERSION, marker.type), _VALUE.pack(_VERSION, marker.coordinator_epoch)
