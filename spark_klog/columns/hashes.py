"""Hashes of a column of keys that the kernel does not have, computed for all keys byte by byte."""

from __future__ import annotations

from typing import Any

import numpy as np

from spark_klog.records.contract import BinaryColumn

_UInt32s = np.ndarray[Any, np.dtype[np.uint32]]


def _crc_table() -> _UInt32s:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0xEDB88320), table >> 1).astype(np.uint32)
    return table


_CRC_TABLE = _crc_table()


def hashes(keys: BinaryColumn, count: int, kind: str) -> _UInt32s:
    """The hash ("crc32" or "fnv1a", see `records/partitioning.py`) of each of `count` keys; null keys are empty."""
    offsets = np.frombuffer(keys.offsets, np.int32)[: count + 1].astype(np.int64)
    data = np.frombuffer(keys.data, np.uint8)
    result = np.full(count, 0xFFFFFFFF if kind == "crc32" else 0x811C9DC5, np.uint32)
    lengths = np.diff(offsets)
    rows = np.flatnonzero(lengths)
    position = 0
    while len(rows):
        found, bytes_ = result[rows], data[offsets[rows] + position]
        if kind == "crc32":
            result[rows] = _CRC_TABLE[(found ^ bytes_) & 0xFF] ^ (found >> np.uint32(8))
        else:
            result[rows] = (found ^ bytes_) * np.uint32(0x01000193)
        position += 1
        rows = rows[lengths[rows] > position]
    if kind == "crc32":
        return ~result
    signed = result.view(np.int32)
    return np.where(signed < 0, -signed.astype(np.int64), signed).astype(np.uint32)
