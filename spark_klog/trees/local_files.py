"""Files of a tree in a local folder: replaced atomically, ephemeral ones held by a lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import uuid
import weakref
from collections.abc import Iterator
from typing import Literal

from spark_klog.errors import DirectoryError
from spark_klog.files.folder import TEMPORARY, LocalFolder

#: What the names of files end with: of a folder's value, and of an ephemeral node.
VALUE, EPHEMERAL = ".value", ".ephemeral"


class LocalFiles(LocalFolder):
    """Files of a tree in a local folder, which is created; `DirectoryError` if that fails.

    Temporary files are in the root, so that the next one to open the tree finds what killed writers have left.
    """

    poll_seconds = 0.2

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root)
        self._lock = threading.Lock()
        self._own: dict[str, int] = {}  # path of an ephemeral file -> descriptor with its lock
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
        with self._lock:
            descriptor = os.open(self._at(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                # Closing is not enough: a child forked meanwhile has the file open too.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def kind(self, path: str) -> Literal["file", "folder"] | None:
        if os.path.isdir(self._at(path)):
            return "folder"
        return "file" if os.path.exists(self._at(path)) else None

    def write(self, path: str, value: bytes) -> None:
        os.close(self._replace_node(path, value))

    def _replace_node(self, path: str, value: bytes, lock: bool = False) -> int:
        """Replace a file; return its descriptor. Readers see it only when it is complete, and locked if `lock`."""
        temporary = self._at(f"{TEMPORARY}{uuid.uuid4().hex}")
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

    def make_folder(self, path: str) -> None:
        """Create a folder and its parents; no error if it exists."""
        os.makedirs(self._at(path), exist_ok=True)

    def remove(self, path: str) -> None:
        for own in [own for own in self._own if own == path or own.startswith(f"{path}/")]:
            self._release(own)
        super().remove(path)

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
