"""A segment's transaction index (.txnindex): the aborted transactions that end in it.

Entries of 34 bytes: INT16 version 0, INT64 producer id, INT64 first offset, INT64 last offset,
INT64 last stable offset, ordered by last offset.

Crash story: entries can be derived from the log. An entry is on disk before a snapshot of the producers that covers it
is written; a start replays the log after the newest snapshot (recovery.py), which restores lost entries.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from spark_klog.errors import DecodeError
from spark_klog.log.file_system import File, FileSystem, write_all
from spark_klog.log.segments.index import IndexMemory

_log = logging.getLogger(__name__)
TRANSACTION_ENTRY = Struct(">hqqqq")


class AbortedTransaction(NamedTuple):
    """An aborted transaction: the offsets of its first record and of its abort marker."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


def parse_transaction_index(data: bytes, name: str) -> list[AbortedTransaction]:
    """Parse the entries of a file, which errors call `name`; `DecodeError` unless all are complete, of version 0."""
    if len(data) % TRANSACTION_ENTRY.size:
        raise DecodeError(f"{name}: {len(data)} bytes are not a multiple of {TRANSACTION_ENTRY.size}")
    entries = list(TRANSACTION_ENTRY.iter_unpack(data))
    if any(entry[0] != 0 for entry in entries):
        raise DecodeError(f"{name}: an entry is not of version 0")
    return [AbortedTransaction(*entry[1:]) for entry in entries]


def encode_transaction_index(transactions: Iterable[AbortedTransaction]) -> bytes:
    """The content of a .txnindex file."""
    return b"".join(TRANSACTION_ENTRY.pack(0, *transaction) for transaction in transactions)


class TransactionIndex:
    """The index of an open segment; most segments have no entries and no file (`exists`)."""

    def __init__(self, files: FileSystem, path: Path, memory: IndexMemory, exists: bool) -> None:
        self.path = path
        self._files = files
        self._memory = memory
        self._data: bytearray | None = None if exists else bytearray()
        #: Bytes of entries in the file, and bytes known to be on disk.
        self.written_bytes = self._synced = 0
        self._is_detached = False

    def _entries(self) -> bytearray:
        data = self._data
        if data is None:
            content = self._files.read(self.path)
            parse_transaction_index(content, str(self.path))
            data = self._data = bytearray(content)
            self.written_bytes = self._synced = len(data)
        return data

    def _load(self) -> bytearray:
        data = self._entries()
        if self._synced == len(data) and data and not self._is_detached:
            self._memory.note_use(self, len(data))
        return data

    def release(self) -> None:
        """Drop the loaded entries; the next look-up reads them again."""
        self._data = None

    def overlapping(self, first: int, end: int) -> tuple[list[AbortedTransaction], bool]:
        """(transactions with records in [first, end), whether no later segment can have more).

        `DecodeError` if the file is damaged, OSError.
        """
        data = self._load()
        count = len(data) // TRANSACTION_ENTRY.size
        aborted = []
        for number in range(bisect_left(range(count), first, key=lambda number: _entry_at(data, number)[2]), count):
            entry = _entry_at(data, number)
            if entry.first_offset < end:
                aborted.append(entry)
            if entry.last_stable_offset >= end:  # transactions that end later also start later
                return aborted, True
        return aborted, False

    def prepare(self) -> None:
        """Load the entries and keep them loaded until the next look-up, so that `append` can't fail.

        `DecodeError` if the file is damaged, OSError.
        """
        self._memory.forget(self)
        self._entries()

    def append(self, transaction: AbortedTransaction) -> None:
        """Add an entry, unless it exists. If the disk rejects it, a flush retries."""
        self._memory.forget(self)
        data = self._entries()
        if data and _entry_at(data, len(data) // TRANSACTION_ENTRY.size - 1).last_offset >= transaction.last_offset:
            return
        data += TRANSACTION_ENTRY.pack(0, *transaction)
        try:
            self.write()
        except OSError as error:
            _log.warning("%s: an entry is not written yet: %s", self.path, error)

    def write(self) -> None:
        """Write the entries that are not in the file yet; OSError."""
        data = self._data
        if data is None or self.written_bytes == len(data) or self._is_detached:
            return
        file = self._files.create(self.path)
        write_all(file, self.written_bytes, data[self.written_bytes :])
        file.close()
        self.written_bytes = len(data)

    def note_synced(self, size: int) -> None:
        """Note that a flush has synced the first `size` bytes of the file."""
        self._synced = max(self._synced, size)

    def unsynced_file(self) -> File | None:
        """The open file, if it has entries that may not be on disk; OSError."""
        if self._synced == self.written_bytes or self._is_detached:
            return None
        return self._files.open(self.path)

    def detach(self) -> None:
        """Do not touch the file any more: it belongs to another segment, or will be removed."""
        self._is_detached = True
        self._memory.forget(self)

    def repair(self, start: int) -> bool:
        """After a crash, keep the complete entries of transactions that ended before offset `start`; OSError.

        The log from `start` on is replayed, so entries of an unfinished write are not needed. Returns True if the file
        had other bytes than entries: then entries before `start` may be lost.
        """
        if self._data is not None:
            return False
        data, kept, before = self._files.read(self.path), b"", -1
        is_damaged = len(data) % TRANSACTION_ENTRY.size != 0
        for version, *fields in TRANSACTION_ENTRY.iter_unpack(data[: len(data) - len(data) % TRANSACTION_ENTRY.size]):
            entry = AbortedTransaction(*fields)
            is_sound = not version and entry.first_offset < entry.last_offset and before < entry.last_offset
            if not is_sound or entry.last_offset >= start:
                is_damaged = not is_sound
                break
            kept, before = kept + TRANSACTION_ENTRY.pack(version, *entry), entry.last_offset
        if kept != data:
            self._files.replace(self.path, kept)
        self._data, self.written_bytes, self._synced = bytearray(kept), len(kept), len(kept)
        return is_damaged


def _entry_at(data: bytearray, number: int) -> AbortedTransaction:
    return AbortedTransaction(*TRANSACTION_ENTRY.unpack_from(data, number * TRANSACTION_ENTRY.size)[1:])
