"""The file system of logs. Tests replace it by one that loses, tears and rejects writes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from spark_klog.base.durable import replace_file, sync_folder
from spark_klog.errors import LogDirLocked
from spark_klog.wire.primitives import Buffer


def take_lock(data_dir: Path, otherwise: str = "") -> int:
    """Take the lock; returns the descriptor that holds it until closed. `LogDirLocked` if another process has it.

    `otherwise` is the alternative to stopping that process, for the message. OSError.
    """
    lock = os.open(data_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if error.errno not in (errno.EACCES, errno.EAGAIN):  # the file system has no locks
            raise
        advice = f"stop that one, or {otherwise}" if otherwise else "stop that one first"
        raise LogDirLocked(f"data directory {data_dir} is in use by another broker or tool; {advice}") from None
    return lock


@contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Hold the lock for the duration of the block; `LogDirLocked`, OSError."""
    lock = take_lock(data_dir)
    try:
        yield
    finally:
        os.close(lock)


class FileInfo(NamedTuple):
    """Size in bytes, and the time of the last write (ms since the epoch)."""

    size: int
    modified_ms: int


class _Handle(FileIO):
    """Closes its descriptor, without a warning, when the last reference goes."""

    def __del__(self) -> None:
        self.close()


class File:
    """An open file, read and written by position, closed with its last reference: a response may still be sending it.

    In any thread, a weak reference to it returns an open file or None. With a finalizer of its own it could return a
    file that another thread is closing. All methods raise OSError.
    """

    __slots__ = ("__weakref__", "_handle", "fileno", "readinto", "seek", "truncate")

    def __init__(self, path: Path, flags: int = 0) -> None:
        self._handle = _Handle(os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644), "r+")
        self.fileno, self.truncate = self._handle.fileno, self._handle.truncate
        # For systems without sendfile.
        self.seek, self.readinto = self._handle.seek, self._handle.readinto

    def read_at(self, position: int, size: int) -> bytes:
        """Up to `size` bytes; fewer at the end of the file."""
        return os.pread(self.fileno(), size, position)

    def write_at(self, position: int, data: Buffer) -> int:
        """Write `data`; return the number of bytes written, which may be fewer."""
        return os.pwrite(self.fileno(), data, position)

    def sync(self) -> None:
        """Wait until all writes are on disk."""
        os.fsync(self.fileno())

    def close(self) -> None:
        self._handle.close()


class Folder:
    """An open folder, closed with its last reference: its changes can be synced when no descriptor is free."""

    __slots__ = ("_descriptor",)

    def __init__(self, path: Path) -> None:
        self._descriptor = -1  # for `close`, if the next line raises
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)

    def sync(self) -> None:
        """Wait until creations, renames and removals in the folder are on disk. OSError."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = close


class FileSystem:
    """Folders and files by path, of this machine. All methods raise OSError."""

    def open(self, path: Path) -> File:
        """Open an existing file for reading and writing; `FileNotFoundError`: the name may belong to another log."""
        return File(path)

    def create(self, path: Path) -> File:
        """Open a file for reading and writing; creates it if it is missing."""
        return File(path, os.O_CREAT)

    def names(self, folder: Path) -> set[str]:
        return set(os.listdir(folder))

    def folders(self, folder: Path) -> set[str]:
        """The names of the folders in a folder."""
        return {path.name for path in folder.iterdir() if path.is_dir()}

    def info(self, path: Path) -> FileInfo:
        """The size and time of a file; `FileNotFoundError`."""
        status = path.stat()
        return FileInfo(status.st_size, status.st_mtime_ns // 1_000_000)

    def read(self, path: Path) -> bytes:
        """The whole content of a small file; `FileNotFoundError`."""
        return path.read_bytes()

    def replace(self, path: Path, content: bytes) -> None:
        """Replace a small file's content durably: after a crash it has either the old or the new content."""
        replace_file(path, content, path.with_name(path.name + ".tmp"))

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Remove a file if it exists."""
        path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> bool:
        """Create a folder and its parents; False if it existed."""
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            return False
        return True

    def remove_folder(self, path: Path) -> None:
        """Remove a folder and its contents as far as possible; never raises."""
        shutil.rmtree(path, ignore_errors=True)

    def open_folder(self, path: Path) -> Folder:
        """Open a folder before its names are changed: later no descriptor may be free."""
        return Folder(path)

    def sync_folder(self, path: Path) -> None:
        """Wait until creations, renames and removals in the folder are on disk."""
        sync_folder(path)


def write_all(file: File, position: int, data: Buffer) -> None:
    """Write all of `data`. After an OSError some of it may have been written."""
    done = file.write_at(position, data)
    if done < len(data):
        view = memoryview(data)
        while done < len(view):
            done += file.write_at(position + done, view[done:])
