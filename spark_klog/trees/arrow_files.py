"""Files of a tree on any of pyarrow's file systems."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Hashable, Iterator
from typing import Any

from spark_klog.base.addresses import filesystem_at, without_user
from spark_klog.errors import ConfigError, DirectoryError
from spark_klog.trees.files import TEMPORARY, VALUE, Kind, Owner

_READS = 10


class ArrowFiles:
    """`Files` in the folder `base` of a pyarrow file system, without ephemeral nodes.

    Object stores show only complete objects; elsewhere a temporary file is moved into place. If a move cannot replace
    a file (HDFS), the new value of b goes to b.value first, where readers look too; b.value itself, the value of a
    folder, is missing for a moment while it is replaced.
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
        """Open the folder at a URI; `ConfigError` if pyarrow does not know it, `DirectoryError` if it can't open it."""
        try:
            filesystem, base = filesystem_at(uri)
        except ImportError as error:
            raise ConfigError(f"directories at {without_user(uri)!r} need pyarrow, which is not installed") from error
        except OSError as error:
            reason = without_user(str(error).partition("\n")[0])
            raise DirectoryError(f"cannot open the file system of {without_user(uri)!r}: {reason}") from None
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
        if self.kind(path) != "file":  # the error for a folder differs between file systems
            return None
        for attempt in range(_READS):
            try:
                # compression=None: by default a name that ends in ".gz" is decompressed
                with self._fs.open_input_stream(self._at(path), compression=None) as stream:
                    value: bytes = stream.read()
                    return value
            except OSError:
                if self.kind(path) != "file":  # removed, or replaced by a folder
                    return None
                if attempt + 1 == _READS:  # a replacement in two steps ends before that
                    raise
        return None

    def write(self, path: str, value: bytes) -> None:
        if self._complete_on_close:
            self._write(path, value)
            return
        temporary = f"{TEMPORARY}{uuid.uuid4().hex}"
        self._write(temporary, value)
        try:
            self._fs.move(self._at(temporary), self._at(path))
        except OSError:
            if self.kind(path) != "file":
                self.remove(temporary)
                raise
            spare = path + VALUE
            self.remove(spare)
            self._fs.move(self._at(temporary), self._at(spare))
            self.remove(path)
            self._fs.move(self._at(spare), self._at(path))

    def _write(self, path: str, value: bytes) -> None:
        with self._fs.open_output_stream(self._at(path), compression=None) as stream:
            stream.write(value)

    def move(self, source: str, target: str) -> None:
        self.remove(target)  # a move in HDFS does not overwrite
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
            f"{path} under {self.root} cannot be ephemeral: use ZooKeeper or a local folder for such nodes"
        )

    def owner(self, path: str) -> Owner:
        return None

    def close(self) -> None:
        """Do nothing: this holds no resources."""
