"""A local folder, and what all folders have in common; arrow.py has those of pyarrow's file systems."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from math import inf
from pathlib import Path
from typing import NamedTuple, Protocol

from spark_klog.base.addresses import without_user
from spark_klog.base.durable import locked, sync_folder, write_synced
from spark_klog.errors import KlogError
from spark_klog.wire.primitives import Buffer

#: Prefix of the names of unfinished files.
TEMPORARY = ".tmp-"
#: Bytes of files that wait to be synced together, and how many are synced at once.
_MOST_WAITING, _SYNCS = 64 * 1024 * 1024, 4
#: The errors of os.link on mounts without hard links (FUSE of object stores, FAT), or for a file that may have no more.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_NOTHING_THERE = (FileNotFoundError, NotADirectoryError)


class Entry(NamedTuple):
    """An entry of a folder; `size` in bytes is 0 for a folder, `stamp` changes with a file.

    `time` is when a file was last changed, in seconds since the epoch, or infinite if nobody knows.
    """

    name: str
    size: int
    is_folder: bool
    stamp: Hashable = None
    time: float = inf


class OpenFile(Protocol):
    """An open file; on most file systems it stays readable when it is deleted."""

    @property
    def size(self) -> int:
        """Size in bytes when the file was opened."""

    def read_at(self, position: int, size: int) -> Buffer:
        """`size` bytes from `position` on, fewer at the end of the file; OSError."""

    def close(self) -> None:
        """Close the file."""


class ReadableFolder(Protocol):
    """The part of a folder that readers of logs use. Paths are relative to it, with "/"."""

    def entries(self, path: str) -> list[Entry]:
        """The entries of a folder, in any order. `FileNotFoundError` if it does not exist, OSError."""

    def open(self, path: str) -> OpenFile:
        """Open a file. `FileNotFoundError` if it does not exist, OSError."""


def read_whole(folder: ReadableFolder, path: str) -> bytes:
    """A small file's bytes; raises what `open` raises."""
    with closing(folder.open(path)) as file:
        return bytes(file.read_at(0, file.size))


def reason(error: Exception) -> str:
    """The first line of an error without its number, its file, and passwords."""
    return without_user((getattr(error, "strerror", None) or str(error)).partition("\n")[0])


class LocalFile:
    """A file that is read by position."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size

    def read_at(self, position: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, position)

    def close(self) -> None:
        os.close(self._descriptor)


class LocalFolder:
    """A folder of a local disk, or of a mount that has locks (flock), renames, and preferably hard links.

    Files are written beside their place, synced and renamed. `failure` is raised instead of OSErrors, which `entries`
    and `open` always raise; it names the file.
    """

    shows_whole_files_only = False
    """Whether files must be written to their final names: a rename takes several steps there, or nobody looks there."""

    def __init__(self, root: str | os.PathLike[str], failure: type[KlogError] | None = None) -> None:
        self._root = str(Path(root).absolute())
        self._failure = failure
        #: For messages, without secrets.
        self.address = self._root
        #: Files of `put`, which are synced together: a folder once, and the disk does several files at a time.
        self._waiting: list[tuple[Path, str]] = []
        self._waiting_bytes = 0

    def _at(self, path: str) -> str:
        return os.path.join(self._root, path)

    @contextmanager
    def _naming(self, path: str, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._failure is None:
                raise
            raise self._failure(f"{self.address}/{path} can't be {action}: {reason(error)}") from None

    def uri(self, path: str) -> str:
        """A path that pyarrow, Spark and DuckDB can open."""
        return self._at(path)

    # ----- reading

    def entries(self, path: str) -> list[Entry]:
        listed = []
        with os.scandir(self._at(path)) as entries:
            for entry in entries:
                if entry.is_dir():
                    listed.append(Entry(entry.name, 0, True))  # its time changes with the children's children
                    continue
                with suppress(FileNotFoundError):  # removed meanwhile
                    stat = entry.stat()
                    stamp = stat.st_ino, stat.st_size, stat.st_mtime_ns
                    listed.append(Entry(entry.name, stat.st_size, False, stamp, stat.st_mtime))
        return listed

    def open(self, path: str) -> LocalFile:
        return LocalFile(self._at(path))

    def names(self, path: str) -> list[str]:
        """The names in a folder, sorted, without those of unfinished files; none if it does not exist."""
        with self._naming(path, "listed"), suppress(*_NOTHING_THERE):
            return sorted(name for name in os.listdir(self._at(path)) if not name.startswith(TEMPORARY))
        return []

    def paths_below(self, path: str) -> list[str]:
        """The paths of all files in a folder and in the folders in it."""
        return sorted(self.sizes_below(path))

    def sizes_below(self, path: str) -> dict[str, int]:
        """The bytes of all files in a folder and in the folders in it, by path."""
        return {below: entry.size for below, entry in self.entries_below(path).items()}

    def entries_below(self, path: str) -> dict[str, Entry]:
        """All files in a folder and in the folders in it, by path."""
        files, waiting = {}, [path]
        with self._naming(path, "listed"):
            while waiting:
                folder = waiting.pop()
                with suppress(*_NOTHING_THERE):
                    for entry in self.entries(folder):
                        inner = f"{folder}/{entry.name}" if folder else entry.name
                        if entry.is_folder:
                            waiting.append(inner)
                        else:
                            files[inner] = entry
        return files

    def read(self, path: str) -> bytes | None:
        """A file's content; None if there is no such file."""
        with self._naming(path, "read"), suppress(*_NOTHING_THERE, IsADirectoryError):
            with open(self._at(path), "rb") as file:
                return file.read()
        return None

    def lines(self, path: str) -> Iterator[bytes]:
        """A file's lines, of which one is in memory; none if there is no such file."""
        with self._naming(path, "read"), suppress(*_NOTHING_THERE):
            with open(self._at(path), "rb") as file:
                yield from file

    def size(self, path: str) -> int | None:
        """A file's bytes; None if there is no such file."""
        with self._naming(path, "read"), suppress(*_NOTHING_THERE):
            return os.stat(self._at(path)).st_size
        return None

    # ----- writing

    def write(self, path: str, content: bytes) -> None:
        """Create or replace a file; readers see the old content or the new one."""
        with self._naming(path, "written"):
            temporary, place = self._temporary(path, content), self._at(path)
            os.replace(temporary, place)
            sync_folder(Path(place).parent)

    def create(self, path: str, content: bytes) -> bool:
        """Create a file; False if it exists.

        An empty one is a sign to processes, which a power failure ends, too: it is not synced.
        """
        with self._naming(path, "written"):
            place = Path(self._at(path))
            if not content:
                place.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError):
                    place.touch(exist_ok=False)
                    return True
                return False
            temporary = self._temporary(path, content)
            try:
                os.link(temporary, place)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if not self._rename_to_new(temporary, place):
                    return False
            finally:
                temporary.unlink(missing_ok=True)
            sync_folder(place.parent)
            return True

    def _rename_to_new(self, temporary: Path, place: Path) -> bool:
        """Rename a file to a place that is free, on a mount without hard links; False if it is taken.

        A lock makes it exclusive, as far as the mount's locks go. A file that is opened with O_EXCL would be so
        without a lock, but a process that is killed before it has written it would leave half of it at its place.
        """
        with locked(os.open(place.parent / f"{TEMPORARY}lock", os.O_RDWR | os.O_CREAT, 0o666)):
            if place.exists():
                return False
            os.replace(temporary, place)
            return True

    def _temporary(self, path: str, content: bytes) -> Path:
        place = Path(self._at(path))
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        write_synced(temporary, content)
        return temporary

    def put(self, source: Path, path: str) -> None:
        """Hand over a file from `scratch`, which replaces what is at its place after `settle` at the latest."""
        with self._naming(path, "written"):
            self._waiting.append((source, path))
            self._waiting_bytes += source.stat().st_size
        if self._waiting_bytes >= _MOST_WAITING:
            self.settle()

    def settle(self) -> None:
        """Wait until all files of `put` are in place, and safe from a power failure."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        with ThreadPoolExecutor(_SYNCS) as pool:
            for _ in (pool.map if len(waiting) > 1 else map)(self._sync, waiting):
                pass
        for source, path in waiting:
            with self._naming(path, "written"):
                self._replace(str(source), path)
        for folder in {path.rpartition("/")[0] for _, path in waiting}:
            with self._naming(folder, "written"):
                sync_folder(Path(self._at(folder)))

    def _sync(self, renamed: tuple[Path, str]) -> None:
        source, path = renamed
        with self._naming(path, "written"):
            sync_folder(source)

    def move(self, source: str, target: str) -> None:
        """Move a file, replacing what is there; nothing if `source` does not exist."""
        with self._naming(target, "written"), suppress(FileNotFoundError):
            self._replace(self._at(source), target)

    def _replace(self, source: str, path: str) -> None:
        """Move a file to its place, whose folder is made if need be. FileNotFoundError without the file."""
        place = self._at(path)
        try:
            os.replace(source, place)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.replace(source, place)

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its content; nothing if it does not exist."""
        with self._naming(path, "removed"), suppress(*_NOTHING_THERE):
            try:
                os.unlink(self._at(path))
            except (IsADirectoryError, PermissionError):  # PermissionError on macOS
                if not os.path.isdir(self._at(path)):
                    raise
                shutil.rmtree(self._at(path))

    @contextmanager
    def scratch(self, path: str) -> Iterator[Path]:
        """A context with a local folder for files that are not complete; `path` is its place, if local."""
        with self._naming(path, "written"):
            os.makedirs(self._at(path), exist_ok=True)
            made = tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=self._at(path), ignore_cleanup_errors=True)
        with made as name:
            yield Path(name)
