"""The file system as a log uses it. Tests put one in its place that forgets, tears and refuses."""

from __future__ import annotations

import os
import shutil
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Protocol

from spark_klog.wire.primitives import Buffer


class File(Protocol):
    """An open file, read and written by position. All methods raise OSError."""

    def fileno(self) -> int:
        """For sendfile."""

    def read_at(self, position: int, size: int) -> bytes:
        """Up to `size` bytes; fewer at the end of the file."""

    def write_at(self, position: int, data: Buffer) -> int:
        """How many bytes were written: maybe not all."""

    def truncate(self, size: int) -> int:
        """Cut the file, or fill it with zeros, to `size` bytes."""

    def sync(self) -> None:
        """Return when what was written is on the disk."""

    def close(self) -> None: ...


class FileInfo(NamedTuple):
    """Size in bytes, and when it was written to last (ms since the epoch)."""

    size: int
    modified_ms: int


class FileSystem(Protocol):
    """Folders and files by path. All methods raise OSError."""

    def open(self, path: Path) -> File:
        """Open a file for reading and writing; `FileNotFoundError`. Never makes one: the name may be another log's."""

    def create(self, path: Path) -> File:
        """Open a file for reading and writing; made if it is missing."""

    def names(self, folder: Path) -> set[str]:
        """What is in a folder."""

    def folders(self, folder: Path) -> set[str]:
        """The names of the folders in a folder."""

    def info(self, path: Path) -> FileInfo:
        """Of a file; `FileNotFoundError`."""

    def read(self, path: Path) -> bytes:
        """The whole content of a small file; `FileNotFoundError`."""

    def replace(self, path: Path, content: bytes) -> None:
        """Give a small file this content: after a crash it has either the old one or this, after the call this."""

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or a folder."""

    def remove(self, path: Path) -> None:
        """Remove a file; nothing happens where there is none."""

    def make_folder(self, path: Path) -> bool:
        """Make a folder and those above it; False if it was there."""

    def remove_folder(self, path: Path) -> None:
        """Remove a folder and what is in it, as far as that is possible; never raises."""

    def sync_folder(self, path: Path) -> None:
        """Return when files made, renamed and removed in the folder are so on the disk."""


class _Handle(FileIO):
    """Closes its descriptor, without a warning, when nothing refers to it any more."""

    def __del__(self) -> None:
        self.close()


class LocalFile:
    """A file of the operating system. It is closed when nothing refers to it any more: a response may be under way.

    A weak reference to it gives an open file, or none, in any thread. One to an object with a finalizer would also give
    a file that another thread is closing.
    """

    __slots__ = ("__weakref__", "_handle", "fileno", "readinto", "seek", "truncate")

    def __init__(self, path: Path, flags: int = 0) -> None:
        self._handle = _Handle(os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644), "r+")
        self.fileno, self.truncate = self._handle.fileno, self._handle.truncate
        # for a file system without sendfile
        self.seek, self.readinto = self._handle.seek, self._handle.readinto

    def read_at(self, position: int, size: int) -> bytes:
        return os.pread(self.fileno(), size, position)

    def write_at(self, position: int, data: Buffer) -> int:
        return os.pwrite(self.fileno(), data, position)

    def sync(self) -> None:
        os.fsync(self.fileno())

    def close(self) -> None:
        self._handle.close()


class LocalFileSystem:
    """The file system of this machine."""

    def open(self, path: Path) -> LocalFile:
        return LocalFile(path)

    def create(self, path: Path) -> LocalFile:
        return LocalFile(path, os.O_CREAT)

    def names(self, folder: Path) -> set[str]:
        return set(os.listdir(folder))

    def folders(self, folder: Path) -> set[str]:
        return {path.name for path in folder.iterdir() if path.is_dir()}

    def info(self, path: Path) -> FileInfo:
        status = path.stat()
        return FileInfo(status.st_size, status.st_mtime_ns // 1_000_000)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def replace(self, path: Path, content: bytes) -> None:
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        self.sync_folder(path.parent)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> bool:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            return False
        return True

    def remove_folder(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_all(file: File, position: int, data: Buffer) -> None:
    """Write all of `data`. OSError: some of it may have been written."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += file.write_at(position + done, view[done:])
