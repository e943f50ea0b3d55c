"""A flush of a log beside its appends: begun and ended where appends run, the disk is waited for in any thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from spark_klog.log.file_system import File, FileSystem
from spark_klog.log.transaction_index import TransactionIndex


@dataclass
class Paths:
    """Whether the paths of a log's folder are its own: a retired one's may be another log's by now."""

    lock: Lock = field(default_factory=Lock)
    are_ours: bool = True


@dataclass
class Flush:
    """All before `end_offset`: open files, folders with new files, the snapshot of the producers (path, content).

    The snapshot is written last: what it covers is on the disk by then. `made_files`: how many files the log had made.
    `transactions`: the transaction index, and how many bytes of its file are flushed.
    """

    end_offset: int
    made_files: int
    files: FileSystem
    opened: list[File]
    folders: list[Path]
    snapshot: tuple[Path, bytes] | None
    transactions: tuple[TransactionIndex, int]
    paths: Paths
    snapshot_error: OSError | None = None

    def run(self) -> None:
        """Return when it is on the disk; from any thread. OSError, but not for the snapshot: see `snapshot_error`."""
        for file in self.opened:
            file.sync()
        for folder in self.folders:
            self.files.sync_folder(folder)
        with self.paths.lock:
            if self.snapshot is not None and self.paths.are_ours:
                try:
                    self.files.replace(*self.snapshot)
                except OSError as error:
                    self.snapshot_error = error
