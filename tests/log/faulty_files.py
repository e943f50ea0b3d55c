"""A file system in memory with the failures of real ones: kills, power failures, torn and short writes, errors.

It separates written from synced content. `after_crash` returns what the next start finds. If only the process died,
that is everything written. After a power failure, any subset of the unsynced writes may survive, also in part. Changes
of names are journaled, so the first few of the unsynced ones survive, of files and of folders.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from spark_klog.log.file_system import FileInfo
from spark_klog.wire.primitives import Buffer


class Killed(BaseException):
    """The process was killed here; not an `Exception`, so that no code handles it."""


@dataclass
class Content:
    """A file's bytes as written and as synced; unsynced changes are (position, bytes), or (size, None) for a cut."""

    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def apply(self, position: int, data: bytes | None) -> None:
        if data is None:
            del self.data[position:]
            self.data += bytes(position - len(self.data))
            return
        self.data += bytes(max(0, position - len(self.data)))
        self.data[position : position + len(data)] = data

    def change(self, position: int, data: bytes | None) -> None:
        self.apply(position, data)
        self.pending.append((position, data))

    def sync(self) -> None:
        self.synced = bytes(self.data)
        self.pending.clear()


@dataclass
class Faults:
    """The failures to simulate."""

    bytes_left: int | None = None  # the write that exceeds them is cut, and the process killed
    capacity: int | None = None  # of the disk, in bytes
    short_writes: random.Random | None = None
    fails: Callable[[str, Path], bool] = lambda operation, path: False


class FaultyFile:
    def __init__(self, files: FaultyFiles, path: Path, content: Content) -> None:
        self._files, self._path, self._content = files, path, content

    def fileno(self) -> int:
        raise NotImplementedError

    def read_at(self, position: int, size: int) -> bytes:
        self._files.check("read", self._path)
        data = bytes(self._content.data[position : position + size])
        self._files.bytes_read += len(data)
        return data

    def write_at(self, position: int, data: Buffer) -> int:
        self._files.check("write", self._path)
        wanted = bytes(data)
        faults = self._files.faults
        if faults.short_writes and len(wanted) > 1 and faults.short_writes.random() < 0.5:
            wanted = wanted[: faults.short_writes.randrange(1, len(wanted))]
        if faults.capacity is not None:
            room = faults.capacity - self._files.used() + max(0, len(self._content.data) - position)
            if room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            wanted = wanted[:room]
        done = self._files.spend(wanted)
        self._content.change(position, done)
        if len(done) < len(wanted):
            raise Killed
        return len(done)

    def truncate(self, size: int) -> int:
        self._files.check("truncate", self._path)
        self._content.change(size, None)
        return size

    def sync(self) -> None:
        self._files.check("sync", self._path)
        self._content.sync()

    def close(self) -> None:
        pass


class FaultyFolder:
    def __init__(self, files: FaultyFiles, path: Path) -> None:
        self._files, self._path = files, path

    def sync(self) -> None:
        self._files.sync_folder(self._path)

    def close(self) -> None:
        pass


@dataclass
class FolderChange:
    """An unsynced change of a folder's name: `old` is None for a new one, `new` for a removed one with its contents."""

    old: Path | None
    new: Path | None
    contents: dict[Path, Content] = field(default_factory=dict)

    @property
    def parent(self) -> Path | None:
        path = self.old or self.new
        return path and path.parent


class FaultyFiles:
    """The file system; see the module."""

    def __init__(self) -> None:
        self.faults = Faults()
        self._folders: set[Path] = set()
        self._folder_changes: list[FolderChange] = []
        #: Folders that were renamed, removed or lost; all others count as existing.
        self._gone: set[Path] = set()
        self._entries: dict[Path, Content] = {}
        self._synced: dict[Path, Content] = {}
        #: Unsynced changes of names: (path, content created there, new path of a renamed file).
        self._pending: list[tuple[Path, Content | None, Path | None]] = []
        self.bytes_read = 0
        #: Number of `replace` calls by path.
        self.replaced: Counter[Path] = Counter()

    def check(self, operation: str, path: Path) -> None:
        if self.faults.fails(operation, path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def used(self) -> int:
        return sum(len(content.data) for content in self._entries.values())

    def spend(self, data: bytes) -> bytes:
        """The part of a write that is done before the process is killed."""
        if self.faults.bytes_left is None:
            return data
        done = data[: self.faults.bytes_left]
        self.faults.bytes_left -= len(done)
        return done

    def open(self, path: Path) -> FaultyFile:
        self.check("open", path)
        if path not in self._entries:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return FaultyFile(self, path, self._entries[path])

    def create(self, path: Path) -> FaultyFile:
        self.check("open", path)
        if path.parent in self._gone:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if path not in self._entries:
            if self.faults.capacity is not None and self.used() >= self.faults.capacity:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            self._entries[path] = content = Content()
            self._pending.append((path, content, None))
        return FaultyFile(self, path, self._entries[path])

    def names(self, folder: Path) -> set[str]:
        return {path.name for path in self._entries if path.parent == folder}

    def folders(self, folder: Path) -> set[str]:
        return {path.name for path in self._folders if path.parent == folder}

    def info(self, path: Path) -> FileInfo:
        if path not in self._entries:
            raise FileNotFoundError(path)
        return FileInfo(len(self._entries[path].data), 0)

    def read(self, path: Path) -> bytes:
        self.check("read", path)
        if path not in self._entries:
            raise FileNotFoundError(path)
        return bytes(self._entries[path].data)

    def replace(self, path: Path, content: bytes) -> None:
        self.check("write", path)
        grown = len(content) - len(self._entries[path].data if path in self._entries else b"")
        if self.faults.capacity is not None and self.used() + grown > self.faults.capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if path.parent in self._gone:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if len(self.spend(content)) < len(content):
            raise Killed
        self._sync_folder(path.parent)
        self._entries[path] = self._synced[path] = Content(bytearray(content), content)
        self.replaced[path] += 1

    def rename(self, old: Path, new: Path) -> None:
        self.check("rename", old)
        if old in self._folders:
            self._move_folder(old, new)
            return
        if old not in self._entries:
            raise FileNotFoundError(old)
        self._entries[new] = self._entries.pop(old)
        self._pending.append((old, None, new))

    def remove(self, path: Path) -> None:
        self.check("remove", path)
        if self._entries.pop(path, None) is not None:
            self._pending.append((path, None, None))

    def _sync_names(self, folder: Path) -> None:
        self._synced = _changed(self._synced, [item for item in self._pending if item[0].parent == folder])
        self._pending = [item for item in self._pending if item[0].parent != folder]

    def _move_folder(self, old: Path, new: Path | None) -> None:
        self._sync_names(old)
        change = FolderChange(old, new)
        for entries in (self._entries, self._synced):
            change.contents = _moved(entries, old, new)
        self._gone.add(old)
        if old in self._folders:
            self._folders.remove(old)
            self._folder_changes.append(change)
            if new is not None:
                self._folders.add(new)

    def make_folder(self, path: Path) -> bool:
        self.check("open", path)
        if path in self._folders:
            return False
        self._folders.add(path)
        self._gone.discard(path)
        self._folder_changes.append(FolderChange(None, path))
        return True

    def remove_folder(self, path: Path) -> None:
        self._move_folder(path, None)

    def open_folder(self, path: Path) -> FaultyFolder:
        self.check("open folder", path)
        return FaultyFolder(self, path)

    def sync_folder(self, path: Path) -> None:
        self.check("sync", path)
        self._sync_folder(path)

    def _sync_folder(self, path: Path) -> None:
        self._folder_changes = [change for change in self._folder_changes if change.parent != path]
        self._sync_names(path)

    def after_crash(self, rng: random.Random, *, power: bool) -> FaultyFiles:
        """What survives a crash, as a new file system without faults."""
        names = self._entries
        left = FaultyFiles()
        left._folders, left._gone = set(self._folders), set(self._gone)
        if power:
            names = _changed(self._synced, self._pending[: rng.randrange(len(self._pending) + 1)])
            for change in reversed(self._folder_changes[rng.randrange(len(self._folder_changes) + 1) :]):
                _undo(change, names, left._folders, left._gone)
        for path, content in names.items():
            found = Content(bytearray(content.synced if power else content.data))
            if power:
                for position, data in content.pending:
                    is_torn = data and rng.random() < 0.3
                    if rng.random() < 0.6:
                        found.apply(position, data[: rng.randrange(len(data) + 1)] if data and is_torn else data)
            found.sync()
            left._entries[path] = found
        left._synced = dict(left._entries)
        return left


def _changed(
    names: dict[Path, Content], changes: list[tuple[Path, Content | None, Path | None]]
) -> dict[Path, Content]:
    """Apply changes of names to a copy of `names`, from which other crashes may start, too."""
    changed = dict(names)
    for path, made, gone_to in changes:
        if made is not None:
            changed[path] = made
            continue
        content = changed.pop(path, None)
        if gone_to is not None and content is not None:
            changed[gone_to] = content
    return changed


def _moved(entries: dict[Path, Content], old: Path, new: Path | None) -> dict[Path, Content]:
    """Move the files of a folder, or remove them; returns those that were removed."""
    contents = {path: entries.pop(path) for path in [path for path in entries if path.parent == old]}
    if new is None:
        return contents
    entries.update({new / path.name: content for path, content in contents.items()})
    return {}


def _undo(change: FolderChange, names: dict[Path, Content], folders: set[Path], gone: set[Path]) -> None:
    if change.new is not None:
        folders.discard(change.new)
        gone.add(change.new)
        _moved(names, change.new, change.old)
    if change.old is not None:
        folders.add(change.old)
        gone.discard(change.old)
        names.update(change.contents)
