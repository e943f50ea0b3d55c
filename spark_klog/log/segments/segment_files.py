"""The files of a segment: a .log file of record batches, named by its first offset, and its indexes.

00000000000000000042.log        batches one after the other
00000000000000000042.index      see index.py
00000000000000000042.timeindex
00000000000000000042.txnindex   see transaction_index.py; only if there are aborted transactions
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spark_klog.log.files.file_system import File, FileInfo, FileSystem
from spark_klog.log.segments.index import OffsetIndex, TimeIndex
from spark_klog.log.segments.index_memory import IndexMemory
from spark_klog.log.segments.transaction_index import TransactionIndex

LOG, INDEX, TIME_INDEX, TRANSACTION_INDEX = ".log", ".index", ".timeindex", ".txnindex"
#: Appended to names while segments are replaced or deleted, see recovery.py.
CLEANED, SWAP, DELETED = ".cleaned", ".swap", ".deleted"


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a log file. It keeps the file open, so that a deleted segment stays readable."""

    file: File
    position: int
    size: int

    def __len__(self) -> int:
        return self.size

    def read(self) -> bytes:
        """The bytes themselves; OSError."""
        return self.file.read_at(self.position, self.size)


def segment_name(base_offset: int) -> str:
    """20 digits, so that names sort as offsets do."""
    return f"{base_offset:020d}"


class SegmentFiles:
    """The files of one segment. The .log file is open while something holds it, see `open_for_appends`.

    `made_ms` is the time when the .log file was created, or last written before it was opened.
    """

    def __init__(
        self,
        files: FileSystem,
        folder: Path,
        base_offset: int,
        info: FileInfo,
        memory: IndexMemory,
        *,
        has_transactions: bool,
    ) -> None:
        self.base_offset = base_offset
        name = segment_name(base_offset)
        self.path = folder / (name + LOG)
        self.size, self.made_ms = info
        self.offset_index = OffsetIndex(files, folder / (name + INDEX), base_offset, memory)
        self.time_index = TimeIndex(files, folder / (name + TIME_INDEX), base_offset, memory)
        self.transaction_index = TransactionIndex(files, folder / (name + TRANSACTION_INDEX), memory, has_transactions)
        self._files = files
        #: Weak: the file closes when nobody reads it, so that old segments need no descriptors; who reads a deleted
        #: segment still has its file.
        self._open_file: weakref.ref[File] | None = None
        self._kept_file: File | None = None
        #: A failed append has left bytes after the last batch that could not be truncated yet.
        self._has_rest = False
        #: The segment has left the log.
        self.is_detached = False

    @property
    def file(self) -> File:
        """The open .log file. `FileNotFoundError` if the segment has left the log and nothing holds its file."""
        file = self._open_file() if self._open_file else None
        if file is None:
            if self.is_detached:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
            file = self._files.open(self.path)
            self._open_file = weakref.ref(file)
        return file

    def open_for_appends(self) -> None:
        """Make this the active segment: keep the file open until `close`. Creates files of a new segment; OSError."""
        if not self.size:
            self._kept_file = self._files.create(self.path)
            self._open_file = weakref.ref(self._kept_file)
            self.offset_index.clear()
            self.time_index.clear()
        self._kept_file = self.file

    def _cut_rest(self) -> None:
        if self._has_rest:
            self.file.truncate(self.size)
            self._has_rest = False

    def cut(self, size: int) -> None:
        """Truncate the file to `size`; OSError. The indexes end before it, as `recover` has rebuilt them."""
        self.file.truncate(size)
        self.size = size
        self.flush()

    def flush(self) -> None:
        """Wait until all appends are on disk; OSError."""
        self.file.sync()
        self.offset_index.sync()
        self.time_index.sync()
        self.transaction_index.sync()

    def unsynced_files(self) -> list[File]:
        """The open files that a flush must sync, which contain all appends; OSError."""
        self.complete()
        indexes = [self.offset_index.written_file(), self.time_index.written_file()]
        return [self.file, *filter(None, [*indexes, self.transaction_index.unsynced_file()])]

    def complete(self) -> None:
        """Retry writes that a full disk has rejected, before a flush. An OSError leaves all unchanged."""
        self._cut_rest()
        self.transaction_index.write()

    def close(self) -> None:
        """Drop the references to the files; ranges keep theirs."""
        self.offset_index.close()
        self.time_index.close()
        self._kept_file = None

    def detach(self) -> None:
        """Drop the references to the files, as the segment has left the log; ranges keep theirs.

        From now on nothing is written to or opened at these paths.
        """
        self.is_detached = True
        for index in (self.offset_index, self.time_index, self.transaction_index):
            index.detach()
        self._kept_file = None

    def remove(self) -> None:
        """Remove the files that exist; OSError."""
        self.detach()
        for path in self.paths():
            self._files.remove(path)

    def rename(self, suffix: str) -> None:
        """Rename all files by adding a suffix. After an OSError the log still has the segment unless it `is_detached`.

        The .log file is first: a start accepts it without its indexes, and removes indexes without it.
        """
        for path in self.paths():
            with suppress(FileNotFoundError):
                self._files.rename(path, path.with_name(path.name + suffix))
            if not self.is_detached:
                self.detach()

    def paths(self) -> Iterable[Path]:
        """The .log file and its indexes, which may not exist."""
        return [self.path.with_suffix(suffix) for suffix in (LOG, INDEX, TIME_INDEX, TRANSACTION_INDEX)]
