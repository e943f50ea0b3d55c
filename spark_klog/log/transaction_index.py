"""A segment's transaction index (.txnindex): the aborted transactions that end in it.

Entries of 34 bytes: INT16 version 0, INT64 producer id, INT64 first offset, INT64 last offset,
INT64 last stable offset.
"""

from __future__ import annotations

from pathlib import Path
from struct import Struct
from typing import NamedTuple

from spark_klog.errors import DecodeError

_ENTRY = Struct(">hqqqq")


class AbortedTransaction(NamedTuple):
    """Offsets are of the transaction's first record and of its abort marker."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


def read_transaction_index(path: Path) -> list[AbortedTransaction]:
    """All entries; `DecodeError` where the file is not whole entries of version 0."""
    data = path.read_bytes()
    if len(data) % _ENTRY.size:
        raise DecodeError(f"{path}: {len(data)} bytes are no multiple of {_ENTRY.size}")
    entries = list(_ENTRY.iter_unpack(data))
    if any(entry[0] != 0 for entry in entries):
        raise DecodeError(f"{path}: an entry is not of version 0")
    return [AbortedTransaction(*entry[1:]) for entry in entries]
