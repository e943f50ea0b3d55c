"""The tree as files: in a local folder, or on any file system of pyarrow.

The node /a/b is the file ROOT/a/b, and the file holds its value. A node that has, or had, children is the folder
ROOT/a/b, and its value is the file ROOT/a/b.value beside the folder (none: the value b""). When a leaf gets its first
child its file is renamed to b.value, and only then the folder is made. So a reader who looks for b, then for b.value,
finds the value at any time. Where both are files (a writer was killed between the two steps, and b was written again),
b is the value.

An ephemeral node is the file ROOT/a/b.ephemeral (local folders only). Its creator holds an flock on it as long as it
lives; where the lock is free the node is dead: readers pass over it, and the next writer removes it.

In names, "%", control characters, a leading "." and the "." of a final ".value" or ".ephemeral" are percent-encoded;
files whose name starts with "." are no nodes. Writers to one local folder exclude each other by an flock on ROOT/.lock.
On pyarrow's file systems nothing excludes writers in other processes: a node should have one writer there.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol
from urllib.parse import unquote

from spark_klog.directories.tree import NodeExists, components, inner_components
from spark_klog.errors import ConfigError, DirectoryError

_log = logging.getLogger(__name__)

_VALUE, _EPHEMERAL = ".value", ".ephemeral"
_TEMPORARY = ".tmp-"
_UNSAFE = re.compile(rf"[%\x00-\x1f\x7f]|^\.|\.(?=(?:{_VALUE[1:]}|{_EPHEMERAL[1:]})$)")

Kind = Literal["file", "folder"] | None
Owner = Literal["self", "other"] | None


class Files(Protocol):
    """What `FileTree` needs of a file system; paths are relative to the root. Errors are OSError."""

    root: str
    poll_seconds: float

    def writing(self) -> AbstractContextManager[None]:
        """Excludes other writers as far as the file system can."""

    def kind(self, path: str) -> Kind: ...

    def read(self, path: str) -> bytes | None:
        """None where there is no file."""

    def write(self, path: str, value: bytes) -> None:
        """Make or replace a file; readers see the old bytes or the new ones."""

    def move(self, source: str, target: str) -> None:
        """Move a file, over another one if need be."""

    def make_folder(self, path: str) -> None:
        """With its parents; no error where it is."""

    def remove(self, path: str) -> None:
        """Remove a file or all of a folder; no error where there is none."""

    def entries(self, path: str) -> dict[str, Hashable]:
        """The names in a folder, each with something that changes when the file does; {} where there is none."""

    def read_ephemeral(self, path: str) -> bytes | None:
        """None where there is no file, or its creator is dead."""

    def write_ephemeral(self, path: str, value: bytes) -> None:
        """Make or replace an ephemeral file and become its owner."""

    def owner(self, path: str) -> Owner:
        """Who holds an ephemeral file; a dead one is removed. Only while `writing`."""

    def close(self) -> None:
        """Remove the ephemeral files of this object."""


class FileTree:
    """A tree on `files` (see the module). Watches are called by a thread that polls."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._closed = threading.Event()
        self._watch_lock = threading.Lock()
        self._watches: list[_Watch] = []
        self._poller: threading.Thread | None = None

    def get(self, path: str) -> bytes | None:
        real = _real(components(path))
        with self._errors("read", path):
            # Once more: a writer may have moved the value from the second place to the first between the two looks.
            for _ in range(2):
                for value in (
                    self._files.read(real),
                    self._files.read(real + _VALUE),
                    self._files.read_ephemeral(real + _EPHEMERAL),
                ) if real else ():
                    if value is not None:
                        return value
            return b"" if self._files.kind(real) == "folder" else None

    def put(self, path: str, value: bytes) -> None:
        names = inner_components(path)
        real = _real(names)
        with self._errors("write", path), self._files.writing():
            owner = self._files.owner(real + _EPHEMERAL)
            if owner == "self":
                self._files.write_ephemeral(real + _EPHEMERAL, value)
                return
            if owner == "other":
                raise DirectoryError(f"{path} under {self._files.root} is the ephemeral node of another process")
            self._write(names, value)

    def create(self, path: str, value: bytes, ephemeral: bool = False) -> None:
        names = inner_components(path)
        real = _real(names)
        with self._errors("create", path), self._files.writing():
            if (
                self._files.owner(real + _EPHEMERAL)
                or self._files.kind(real)
                or self._files.kind(real + _VALUE)
            ):
                raise NodeExists(f"{path} exists under {self._files.root}: delete it first, or put")
            if ephemeral:
                self._make_parents(names)
                self._files.write_ephemeral(real + _EPHEMERAL, value)
            else:
                self._write(names, value)

    def _write(self, names: tuple[str, ...], value: bytes) -> None:
        real = _real(names)
        kind = self._files.kind(real)
        if kind is None:
            self._make_parents(names)
        self._files.write(real + _VALUE if kind == "folder" else real, value)

    def _make_parents(self, names: tuple[str, ...]) -> None:
        for depth in range(len(names) - 1, 0, -1):  # from below: most times the parent is a folder, and all is done
            real = _real(names[:depth])
            kind = self._files.kind(real)
            if kind == "folder":
                return
            if self._files.owner(real + _EPHEMERAL):
                raise DirectoryError(
                    f"/{'/'.join(names)}: /{'/'.join(names[:depth])} under {self._files.root} is ephemeral "
                    "and has no children"
                )
            if kind == "file":
                self._files.move(real, real + _VALUE)
                break
        if len(names) > 1:
            self._files.make_folder(_real(names[:-1]))

    def delete(self, path: str) -> None:
        real = _real(inner_components(path))
        with self._errors("delete", path), self._files.writing():
            # In this order: .value may hold an older value, which must not come to light.
            self._files.remove(real + _VALUE)
            self._files.remove(real)
            self._files.remove(real + _EPHEMERAL)

    def children(self, path: str) -> list[str]:
        real = _real(components(path))
        with self._errors("list", path):
            return sorted(self._nodes(real))

    def _nodes(self, real: str) -> dict[str, Hashable]:
        nodes: dict[str, Hashable] = {}
        for name, stamp in sorted(self._files.entries(real).items()):
            if name.startswith("."):
                continue
            if name.endswith(_EPHEMERAL):
                if self._files.read_ephemeral(f"{real}/{name}" if real else name) is None:
                    continue
                name = name.removesuffix(_EPHEMERAL)
            node = unquote(name.removesuffix(_VALUE))
            nodes[node] = (nodes.get(node), stamp)
        return nodes

    def watch(self, path: str, callback: Callable[[], None]) -> None:
        real = _real(components(path))
        with self._errors("watch", path):
            watch = _Watch(path, real, callback, self._nodes(real))
        with self._watch_lock:
            self._watches.append(watch)
            if self._poller is None:
                self._poller = threading.Thread(target=self._poll, name="klog-file-watch", daemon=True)
                self._poller.start()

    def _poll(self) -> None:
        while not self._closed.wait(self._files.poll_seconds):
            with self._watch_lock:
                watches = list(self._watches)
            for watch in watches:
                try:
                    seen = self._nodes(watch.real)
                except OSError as error:
                    if not watch.failing:
                        _log.warning("cannot list %s under %s: %s", watch.path, self._files.root, error)
                    watch.failing = True
                    continue
                watch.failing = False
                if seen == watch.seen or self._closed.is_set():
                    continue
                watch.seen = seen
                try:
                    watch.callback()
                except Exception:
                    _log.exception("the watch on %s failed", watch.path)

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        with self._watch_lock:
            poller = self._poller
        if poller is not None and poller is not threading.current_thread():
            poller.join()
        try:
            self._files.close()
        except OSError as error:
            raise DirectoryError(f"cannot remove the ephemeral nodes under {self._files.root}: {error}") from error

    @contextlib.contextmanager
    def _errors(self, verb: str, path: str) -> Iterator[None]:
        if self._closed.is_set():
            raise DirectoryError(f"{path}: the tree under {self._files.root} is closed")
        try:
            yield
        except OSError as error:
            raise DirectoryError(f"cannot {verb} {path} under {self._files.root}: {error}") from error


class _Watch:
    def __init__(self, path: str, real: str, callback: Callable[[], None], seen: dict[str, Hashable]) -> None:
        self.path = path
        self.real = real
        self.callback = callback
        self.seen = seen
        self.failing = False


def _real(names: tuple[str, ...]) -> str:
    return "/".join(_UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", name) for name in names)


#: Files whose locks keep ephemeral nodes alive. A forked child shares them, and would keep the nodes alive too.
_held: set[int] = set()


def _close_in_child() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class LocalFiles:
    """A local folder, made if need be; DirectoryError where it cannot be."""

    poll_seconds = 0.2

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.abspath(root)
        self._lock = threading.Lock()
        self._own: dict[str, int] = {}  # path -> descriptor with the lock
        try:
            os.makedirs(self.root, exist_ok=True)
            with self.writing():  # so those that are there were left by killed writers
                for name in os.listdir(self.root):
                    if name.startswith(_TEMPORARY):
                        os.unlink(os.path.join(self.root, name))
        except OSError as error:
            raise DirectoryError(f"cannot use the folder {self.root} for directories: {error}") from error

    def _at(self, path: str) -> str:
        return os.path.join(self.root, path)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        with self._lock:
            descriptor = os.open(self._at(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                # Not by closing alone: a child that was forked meanwhile has the file open too.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def kind(self, path: str) -> Kind:
        if os.path.isdir(self._at(path)):
            return "folder"
        return "file" if os.path.exists(self._at(path)) else None

    def read(self, path: str) -> bytes | None:
        try:
            with open(self._at(path), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def write(self, path: str, value: bytes) -> None:
        os.close(self._replace(path, value))

    def _replace(self, path: str, value: bytes, lock: bool = False) -> int:
        """The open file, which has its name, and is locked, only when all is in it."""
        temporary = self._at(f"{_TEMPORARY}{uuid.uuid4().hex}")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if lock:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            view = memoryview(value)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
            os.replace(temporary, self._at(path))
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return descriptor

    def move(self, source: str, target: str) -> None:
        os.replace(self._at(source), self._at(target))

    def make_folder(self, path: str) -> None:
        os.makedirs(self._at(path), exist_ok=True)

    def remove(self, path: str) -> None:
        for own in [own for own in self._own if own == path or own.startswith(f"{path}/")]:
            self._release(own)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                os.unlink(self._at(path))
            except (IsADirectoryError, PermissionError):  # the second on macOS
                if not os.path.isdir(self._at(path)):
                    raise
                shutil.rmtree(self._at(path))

    def entries(self, path: str) -> dict[str, Hashable]:
        found: dict[str, Hashable] = {}
        try:
            with os.scandir(self._at(path)) as entries:
                for entry in entries:
                    if entry.is_dir():
                        found[entry.name] = None  # its time would tell of the children's children
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        stat = entry.stat()
                        found[entry.name] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        except (FileNotFoundError, NotADirectoryError):
            pass
        return found

    def read_ephemeral(self, path: str) -> bytes | None:
        real = self._at(path)
        while True:
            try:
                with open(real, "rb") as file:
                    value = file.read()
                    if _is_locked(file.fileno()):
                        return value
                    if _same_file(file.fileno(), real):
                        return None
                    # Else its owner has replaced it since, and let go of the old file.
            except (FileNotFoundError, NotADirectoryError):
                return None

    def write_ephemeral(self, path: str, value: bytes) -> None:
        descriptor = self._replace(path, value, lock=True)
        _held.add(descriptor)
        self._release(path)
        self._own[path] = descriptor

    def _release(self, path: str) -> None:
        descriptor = self._own.pop(path, None)
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            _held.discard(descriptor)
            os.close(descriptor)

    def owner(self, path: str) -> Owner:
        real = self._at(path)
        own = self._own.get(path)
        if own is not None and _same_file(own, real):
            return "self"
        if self.read_ephemeral(path) is not None:
            return "other"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(real)
        return None

    def close(self) -> None:
        with self.writing():
            for path in list(self._own):
                if self.owner(path) == "self":
                    os.unlink(self._at(path))
                self._release(path)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


class ArrowFiles:
    """The folder `base` of a pyarrow file system; it has no ephemeral nodes.

    Object stores show an object when it is complete; elsewhere a temporary file is moved into place. Where a move
    cannot replace a file (HDFS), b is rewritten by way of b.value, which readers look at too; but b.value itself,
    the value of a folder, is absent for a moment when it is rewritten.
    """

    poll_seconds = 1.0

    def __init__(self, filesystem: Any, base: str) -> None:
        self._fs = filesystem
        self._base = base.rstrip("/")
        self.root = f"{filesystem.type_name}:{base}"
        self._lock = threading.Lock()
        inner = filesystem
        while inner.type_name == "subtree":
            inner = inner.base_fs
        self._complete_on_close = inner.type_name in ("s3", "gcs", "abfs")
        if self._base:
            try:
                filesystem.create_dir(self._base, recursive=True)
            except OSError as error:
                raise DirectoryError(f"cannot use {self.root} for directories: {error}") from error

    @classmethod
    def from_uri(cls, uri: str) -> ArrowFiles:
        """ConfigError for a URI that pyarrow does not know, DirectoryError where its file system is unavailable."""
        try:
            from pyarrow.fs import FileSystem
        except ImportError as error:
            raise ConfigError(f"directories at {uri!r} need pyarrow, which is not installed") from error
        try:
            filesystem, base = FileSystem.from_uri(uri)
        except ValueError as error:
            raise ConfigError(
                f"{uri!r} names no directories ({error}): give a path, zookeeper://HOST:PORT or a URI of pyarrow"
            ) from None
        except OSError as error:
            reason = str(error).partition("\n")[0]
            raise DirectoryError(f"cannot open the file system of {uri!r}: {reason}") from error
        return cls(filesystem, base)

    def _at(self, path: str) -> str:
        return f"{self._base}/{path}" if self._base and path else self._base or path

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        with self._lock:
            yield

    def kind(self, path: str) -> Kind:
        if not self._at(path):
            return "folder"
        info = self._fs.get_file_info(self._at(path))
        return "file" if info.is_file else "folder" if info.type.name == "Directory" else None

    def read(self, path: str) -> bytes | None:
        if self.kind(path) != "file":  # what it says of a folder differs from one file system to the next
            return None
        try:
            # compression=None: else a name that ends in ".gz" is unpacked
            with self._fs.open_input_stream(self._at(path), compression=None) as stream:
                value: bytes = stream.read()
                return value
        except FileNotFoundError:
            return None

    def write(self, path: str, value: bytes) -> None:
        if self._complete_on_close:
            self._write(path, value)
            return
        temporary = f"{_TEMPORARY}{uuid.uuid4().hex}"
        self._write(temporary, value)
        try:
            self._fs.move(self._at(temporary), self._at(path))
        except OSError:
            if self.kind(path) != "file":
                self.remove(temporary)
                raise
            spare = path + _VALUE
            self.remove(spare)
            self._fs.move(self._at(temporary), self._at(spare))
            self.remove(path)
            self._fs.move(self._at(spare), self._at(path))

    def _write(self, path: str, value: bytes) -> None:
        with self._fs.open_output_stream(self._at(path), compression=None) as stream:
            stream.write(value)

    def move(self, source: str, target: str) -> None:
        self.remove(target)  # HDFS moves over nothing
        self._fs.move(self._at(source), self._at(target))

    def make_folder(self, path: str) -> None:
        self._fs.create_dir(self._at(path), recursive=True)

    def remove(self, path: str) -> None:
        kind = self.kind(path)
        with contextlib.suppress(FileNotFoundError):
            if kind == "file":
                self._fs.delete_file(self._at(path))
            elif kind == "folder":
                self._fs.delete_dir(self._at(path))

    def entries(self, path: str) -> dict[str, Hashable]:
        from pyarrow.fs import FileSelector

        if self.kind(path) != "folder":
            return {}
        found = self._fs.get_file_info(FileSelector(self._at(path), allow_not_found=True))
        return {info.base_name: (info.size, info.mtime_ns) if info.is_file else None for info in found}

    def read_ephemeral(self, path: str) -> bytes | None:
        return None

    def write_ephemeral(self, path: str, value: bytes) -> None:
        raise DirectoryError(
            f"{path} under {self.root} cannot be ephemeral: use ZooKeeper or a local folder for what ends with a process"
        )

    def owner(self, path: str) -> Owner:
        return None

    def close(self) -> None:
        """Nothing is held."""
