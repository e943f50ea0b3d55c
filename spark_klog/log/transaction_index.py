"""A segment's transaction index (.txnindex): the aborted transactions that end in it.

Entries of 34 bytes: INT16 version 0, INT64 producer id, INT64 first offset, INT64 last offset,
INT64 last stable offset.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from spark_klog.errors import DecodeError
from spark_klog.log.file_system import FileSystem, write_all

_ENTRY = Struct(">hqqqq")


class AbortedTransaction(NamedTuple):
    """Offsets are of the transaction's first record and of its abort marker."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


def read_transaction_index(path: Path) -> list[AbortedTransaction]:
    """All entries; `DecodeError` where the file is not whole entries of version 0."""
    return parse_transaction_index(path.read_bytes(), str(path))


def parse_transaction_index(data: bytes, name: str) -> list[AbortedTransaction]:
    """All entries of a file called `name` in errors; `DecodeError` where it is not whole entries of version 0."""
    if len(data) % _ENTRY.size:
        raise DecodeError(f"{name}: {len(data)} bytes are no multiple of {_ENTRY.size}")
    entries = list(_ENTRY.iter_unpack(data))
    if any(entry[0] != 0 for entry in entries):
        raise DecodeError(f"{name}: an entry is not of version 0")
    return [AbortedTransaction(*entry[1:]) for entry in entries]


def encode_transaction_index(transactions: Iterable[AbortedTransaction]) -> bytes:
    """The content of a file."""
    return b"".join(_ENTRY.pack(0, *item) for item in transactions)


class TransactionIndex:
    """The index of an open segment; most have none, and no file (`exists`)."""

    def __init__(self, files: FileSystem, path: Path, exists: bool) -> None:
        self.path = path
        self._files = files
        self._entries: list[AbortedTransaction] | None = None if exists else []

    def read(self) -> list[AbortedTransaction]:
        """All entries; `DecodeError` where the file is damaged."""
        if self._entries is None:
            self._entries = parse_transaction_index(self._files.read(self.path), str(self.path))
        return self._entries

    def append(self, transaction: AbortedTransaction) -> None:
        """Add an entry, unless it is there; OSError."""
        entries = self.read()
        if entries and entries[-1].last_offset >= transaction.last_offset:
            return
        file = self._files.open(self.path)
        write_all(file, len(entries) * _ENTRY.size, _ENTRY.pack(0, *transaction))
        file.sync()
        file.close()
        entries.append(transaction)

    def repair(self, end: int) -> None:
        """After a crash: keep the whole entries of transactions that ended before offset `end`; OSError."""
        if self._entries is not None:
            return
        data = self._files.read(self.path)
        entries = parse_transaction_index(data[: len(data) - len(data) % _ENTRY.size], str(self.path))
        self._entries = [item for item in entries if item.last_offset < end]
        self._files.replace(self.path, encode_transaction_index(self._entries))
