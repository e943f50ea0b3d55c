"""The tree as files: in a local folder, or on any file system of pyarrow.

The value of node /a/b is in the file ROOT/a/b. A node that has, or had, children is the folder ROOT/a/b, and its value
is in the file ROOT/a/b.value beside the folder (no file: b""). When a leaf gets its first child, the writer renames its
file to b.value, then creates the folder; so a reader that tries b, then b.value, always finds the value. If both are
files (a writer was killed between the two steps, and b was written again), b has the value.

An ephemeral node is the file ROOT/a/b.ephemeral (local folders only). Its creator holds an flock on it. If nobody holds
the lock, the node has ended: readers ignore it, and the next writer removes it.

In names, "%", control characters, a leading "." and the "." of a final ".value" or ".ephemeral" are percent-encoded;
files whose name starts with "." are not nodes. An flock on ROOT/.lock excludes concurrent writers of a local folder. On
pyarrow's file systems nothing excludes writers in other processes: let each node have one writer there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import threading
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote

from spark_klog.base.durable import locked, sync_folder
from spark_klog.errors import DirectoryError
from spark_klog.files.folder import TEMPORARY, LocalFolder
from spark_klog.trees.tree import EPHEMERAL, VALUE, NodeExists, SerialTree, components, inner_components

if TYPE_CHECKING:
    from spark_klog.trees.arrow_files import ArrowFiles

_log = logging.getLogger(__name__)
#: Consumers' nodes: thousands of folders, of whose names a power failure may take the latest.
_UNSYNCED = "consumers"
_UNSAFE = re.compile(rf"[%\x00-\x1f\x7f]|^\.|\.(?=(?:{VALUE[1:]}|{EPHEMERAL[1:]})$)")


class LocalFiles(LocalFolder):
    """Files of a tree in a local folder, which is created; `DirectoryError` if that fails.

    Temporary files are in the root, so that the next one to open the tree finds what killed writers have left.
    """

    poll_seconds = 0.2

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root)
        self._lock = threading.Lock()
        self._own: dict[str, int] = {}  # path of an ephemeral file -> descriptor with its lock
        #: Folders in which names have changed since they were synced.
        self._unsynced: set[str] = set()
        _instances.add(self)
        try:
            os.makedirs(self._root, exist_ok=True)
            with self.writing():  # nobody else writes now
                for name in os.listdir(self._root):
                    if name.startswith(TEMPORARY):
                        os.unlink(self._at(name))
        except OSError as error:
            raise DirectoryError(f"cannot use the folder {self.address} for directories: {error}") from error

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Exclude other writers, of all processes."""
        with self._lock, locked(os.open(self._at(".lock"), os.O_RDWR | os.O_CREAT, 0o666)):
            yield

    def kind(self, path: str) -> Literal["file", "folder"] | None:
        if os.path.isdir(self._at(path)):
            return "folder"
        return "file" if os.path.exists(self._at(path)) else None

    def write(self, path: str, value: bytes, *, lasting: bool = True) -> None:
        os.close(self._replace_node(path, value, lasting=lasting))
        if lasting:
            self._note_changed(os.path.dirname(path))

    def _replace_node(self, path: str, value: bytes, *, lock: bool = False, lasting: bool = True) -> int:
        """Replace a file; return its descriptor. Readers see it only when it is complete, and locked if `lock`."""
        temporary = self._at(f"{TEMPORARY}{uuid.uuid4().hex}")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if lock:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            view = memoryview(value)
            while view:
                view = view[os.write(descriptor, view) :]
            if lasting:
                os.fsync(descriptor)
            os.replace(temporary, self._at(path))
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return descriptor

    def make_folder(self, path: str) -> None:
        """Create a folder and its parents; no error if it exists."""
        missing = path
        while missing and not os.path.isdir(self._at(missing)):
            missing = os.path.dirname(missing)
            self._note_changed(missing)
        os.makedirs(self._at(path), exist_ok=True)

    def sync(self) -> None:
        """Wait until the names that have changed are on disk; OSError."""
        for folder in list(self._unsynced):
            self._unsynced.discard(folder)  # before: another thread may change names meanwhile
            try:
                sync_folder(Path(self._at(folder)))
            except FileNotFoundError:
                pass  # removed since
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # else the mount does it by itself, or never
                    self._unsynced.add(folder)
                    raise

    def _note_changed(self, folder: str) -> None:
        if folder.partition("/")[0] != _UNSYNCED:
            self._unsynced.add(folder)

    def remove(self, path: str) -> None:
        for own in [own for own in self._own if own == path or own.startswith(f"{path}/")]:
            self._release(own)
        super().remove(path)
        self._note_changed(os.path.dirname(path))

    def read_ephemeral(self, path: str) -> bytes | None:
        """The content of an ephemeral file; None if there is none, or its creator has ended."""
        real = self._at(path)
        while True:
            try:
                with open(real, "rb") as file:
                    value = file.read()
                    if _is_locked(file.fileno()):
                        return value
                    if _same_file(file.fileno(), real):
                        return None
                    # Otherwise its owner has replaced it and released the old file: read again.
            except (FileNotFoundError, NotADirectoryError):
                return None

    def write_ephemeral(self, path: str, value: bytes) -> None:
        """Create or replace an ephemeral file and become its owner."""
        descriptor = self._replace_node(path, value, lock=True)
        self._release(path)
        self._own[path] = descriptor

    def _release(self, path: str) -> None:
        descriptor = self._own.pop(path, None)
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def owner(self, path: str) -> Literal["self", "other"] | None:
        """The holder of an ephemeral file; removes a file without one. Only while `writing`."""
        real = self._at(path)
        own = self._own.get(path)
        if own is not None and _same_file(own, real):
            return "self"
        if self.read_ephemeral(path) is not None:
            return "other"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(real)
        return None

    def after_fork(self) -> None:
        """Close the inherited descriptors, which would keep the parent's ephemeral nodes alive."""
        for descriptor in self._own.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)  # without unlocking, which would release the parent's lock
        self._own.clear()
        self._lock = threading.Lock()  # a thread of the parent may hold the old one

    def close(self) -> None:
        """Remove the ephemeral files of this object."""
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


_instances: weakref.WeakSet[LocalFiles] = weakref.WeakSet()


def _after_fork() -> None:
    for files in list(_instances):
        files.after_fork()


os.register_at_fork(after_in_child=_after_fork)


class FileTree(SerialTree):
    """A tree on `files` (see the module). A polling thread calls the watches."""

    def __init__(self, files: LocalFiles | ArrowFiles) -> None:
        self._files = files
        self._closed = threading.Event()
        self._watch_lock = threading.Lock()
        self._watches: list[_Watch] = []
        self._poller: threading.Thread | None = None

    def get(self, path: str) -> bytes | None:
        real = _real(components(path))
        with self._errors("read", path):
            # Twice, since a writer may have moved the value between the two reads.
            for _ in range(2 if real else 0):
                value = self._files.read(real)
                if value is None:
                    value = self._files.read(real + VALUE)
                if value is None:
                    value = self._files.read_ephemeral(real + EPHEMERAL)
                if value is not None:
                    return value
            return b"" if self._files.kind(real) == "folder" else None

    def put(self, path: str, value: bytes) -> None:
        names = inner_components(path)
        real = _real(names)
        with self._errors("write", path), self._files.writing():
            owner = self._files.owner(real + EPHEMERAL)
            if owner == "self":
                self._files.write_ephemeral(real + EPHEMERAL, value)
                return
            if owner == "other":
                raise DirectoryError(f"{path} under {self._files.address} is the ephemeral node of another process")
            self._write(names, value)

    def put_many(self, values: Mapping[str, bytes], *, lasting: bool = True) -> None:
        if lasting or not isinstance(self._files, LocalFiles):
            super().put_many(values)
        elif values:
            with self._errors("write", next(iter(values))), self._files.writing():
                for path, value in values.items():
                    self._files.write(self._place(inner_components(path)), value, lasting=False)

    def sync(self) -> None:
        if isinstance(self._files, LocalFiles):
            with self._errors("sync", "/"):
                self._files.sync()

    def swap(self, path: str, old: bytes, value: bytes) -> bool:
        names = inner_components(path)
        with self._errors("write", path), self._files.writing():
            if self.get(path) != old:
                return False
            self._write(names, value)
            return True

    def create(self, path: str, value: bytes, ephemeral: bool = False) -> None:
        names = inner_components(path)
        real = _real(names)
        with self._errors("create", path), self._files.writing():
            if self._files.owner(real + EPHEMERAL) or self._files.kind(real) or self._files.kind(real + VALUE):
                raise NodeExists(f"{path} exists under {self._files.address}: delete it first, or put")
            if ephemeral:
                self._make_parents(names)
                self._files.write_ephemeral(real + EPHEMERAL, value)
            else:
                self._write(names, value)

    def _write(self, names: tuple[str, ...], value: bytes) -> None:
        self._files.write(self._place(names), value)

    def _place(self, names: tuple[str, ...]) -> str:
        """The path of a node's value; makes its parents."""
        real = _real(names)
        kind = self._files.kind(real)
        if kind is None:
            self._make_parents(names)
        return real + VALUE if kind == "folder" else real

    def _make_parents(self, names: tuple[str, ...]) -> None:
        for depth in range(len(names) - 1, 0, -1):  # upwards: usually the direct parent is a folder already
            real = _real(names[:depth])
            kind = self._files.kind(real)
            if kind == "folder":
                if depth == len(names) - 1:
                    return
                break
            if self._files.owner(real + EPHEMERAL):
                raise DirectoryError(
                    f"/{'/'.join(names)}: /{'/'.join(names[:depth])} under {self._files.address} is ephemeral "
                    "and can't have children"
                )
            if kind == "file":
                self._files.move(real, real + VALUE)
                break
        if len(names) > 1:
            self._files.make_folder(_real(names[:-1]))

    def delete(self, path: str) -> None:
        real = _real(inner_components(path))
        with self._errors("delete", path), self._files.writing():
            self._remove(real)

    def delete_if(self, path: str, value: bytes) -> bool:
        real = _real(inner_components(path))
        with self._errors("delete", path), self._files.writing():
            if self.get(path) != value:
                return False
            self._remove(real)
            return True

    def _remove(self, real: str) -> None:
        # In this order, so that no reader sees an older value in .value.
        self._files.remove(real + VALUE)
        self._files.remove(real)
        self._files.remove(real + EPHEMERAL)

    def children(self, path: str) -> list[str]:
        real = _real(components(path))
        with self._errors("list", path):
            return sorted(self._nodes(real))

    def _nodes(self, real: str) -> dict[str, Hashable]:
        nodes: dict[str, Hashable] = {}
        try:
            entries = sorted(self._files.entries(real))
        except (FileNotFoundError, NotADirectoryError):
            return nodes
        for name, *_, stamp in entries:
            if name.startswith("."):
                continue
            if name.endswith(EPHEMERAL):
                if self._files.read_ephemeral(f"{real}/{name}" if real else name) is None:
                    continue
                name = name.removesuffix(EPHEMERAL)
            node = unquote(name.removesuffix(VALUE))
            nodes[node] = (nodes.get(node), stamp)
        return nodes

    def watch(self, path: str, callback: Callable[[], None], values: bool = False) -> None:
        # `values` makes no difference: a file's stamp changes with its value.
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
                        _log.warning("cannot list %s under %s: %s", watch.path, self._files.address, error)
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
            raise DirectoryError(f"cannot remove the ephemeral nodes under {self._files.address}: {error}") from error

    @contextlib.contextmanager
    def _errors(self, verb: str, path: str) -> Iterator[None]:
        if self._closed.is_set():
            raise DirectoryError(f"{path}: the tree under {self._files.address} is closed")
        try:
            yield
        except OSError as error:
            raise DirectoryError(f"cannot {verb} {path} under {self._files.address}: {error}") from error


@dataclass
class _Watch:
    path: str
    real: str
    callback: Callable[[], None]
    seen: dict[str, Hashable]
    failing: bool = False


def _real(names: tuple[str, ...]) -> str:
    return "/".join(_UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", name) for name in names)
