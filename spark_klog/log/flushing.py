"""Flush a log beside its appends: start and finish in the appending thread, wait for the disk in any thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from spark_klog.log.file_system import File, FileSystem, Folder
from spark_klog.log.segments.transaction_index import TransactionIndex


@dataclass
class Paths:
    """Whether a log still owns its paths: after it is retired, a new log may have them."""

    lock: Lock = field(default_factory=Lock)
    are_ours: bool = True


@dataclass
class Flush:
    """A flush of all records before `end_offset`: open files, open folders with new files, the producer snapshot.

    All is open before, so that an error of `run` is an error of the disk.

    `run` writes the snapshot (path, content) last, when all that it covers is on disk. `made_files`: how many files the
    log had created; `small_files`: the names of small ones, maybe missing, that nobody has synced. `transactions`: the
    transaction index, and how many bytes of its file the flush covers.
    """

    end_offset: int
    made_files: int
    small_files: tuple[str, ...]
    files: FileSystem
    opened: list[File]
    folders: list[Folder]
    snapshot: tuple[Path, bytes] | None
    transactions: tuple[TransactionIndex, int]
    paths: Paths
    snapshot_error: OSError | None = None

    def run(self) -> None:
        """Wait until all is on disk; runs in any thread. OSError, but for the snapshot see `snapshot_error`."""
        for file in self.opened:
            file.sync()
        for folder in self.folders:
            folder.sync()
            folder.close()
        with self.paths.lock:
            if self.snapshot is not None and self.paths.are_ours:
                try:
                    self.files.replace(*self.snapshot)
                except OSError as error:
                    self.snapshot_error = error


class Flushed:
    """Tracks how much of a log is on disk. One thread at a time; `now_ms` returns the time in ms since the epoch.

    `has_new_name`: whether the folder's own directory entry may not be on disk yet. `small_files`: names of files in it
    that may be there, and not on the disk.
    """

    def __init__(
        self,
        files: FileSystem,
        folder: Path,
        recovery_point: int,
        now_ms: Callable[[], int],
        *,
        has_new_name: bool,
        small_files: tuple[str, ...] = (),
    ) -> None:
        self._files, self._folder, self._now_ms = files, folder, now_ms
        self.small_files = small_files
        self.paths = Paths()
        #: All records before it are on disk.
        self.recovery_point = recovery_point
        #: The end of the log at its last producer snapshot, -1 before the first.
        self.snapshot_at = -1
        #: Time of the last flush (ms), and the number of flushes since the log was opened.
        self.at_ms, self.count = now_ms(), 0
        #: How many files were created, and how many of their directory entries are on disk.
        self._made_files, self._named_files = 1, 0
        self._has_new_name = has_new_name

    def note_made(self, *small_files: str) -> None:
        """Note that a file may have been created in the folder; `small_files` by name, if nobody has synced them."""
        self._made_files += 1
        if small_files:  # also a name that a flush under way has
            self.small_files = (*dict.fromkeys((*self.small_files, *small_files)),)

    def begin(
        self, end_offset: int, opened: list[File], snapshot: tuple[Path, bytes] | None, index: TransactionIndex
    ) -> Flush:
        """Start a flush of the records before `end_offset`, in the `opened` files; `index` is the active segment's.

        Small files are synced first: records are never on the disk without their topic's id. OSError if a file or
        folder can't be opened.
        """
        small = []
        for name in self.small_files:
            with suppress(FileNotFoundError):
                small.append(self._files.open(self._folder / name))
        folders = [self._files.open_folder(self._folder)] if self._named_files < self._made_files else []
        if self._has_new_name:
            folders.append(self._files.open_folder(self._folder.parent))
        transactions = index, index.written_bytes
        made = self._made_files, self.small_files
        return Flush(end_offset, *made, self._files, small + opened, folders, snapshot, transactions, self.paths)

    def end(self, flush: Flush) -> None:
        """Finish a flush that has run; OSError if its snapshot could not be written."""
        self.recovery_point = max(self.recovery_point, flush.end_offset)
        index, synced_bytes = flush.transactions
        index.note_synced(synced_bytes)
        self._named_files = max(self._named_files, flush.made_files)
        if self.small_files is flush.small_files:  # else one was made meanwhile
            self.small_files = ()
        self._has_new_name = False
        self.at_ms = self._now_ms()
        self.count += 1
        if flush.snapshot_error is not None:
            raise flush.snapshot_error
        if flush.snapshot is not None:
            self.snapshot_at = flush.end_offset
