"""A folder of one of pyarrow's file systems: S3, GCS, Azure, HDFS."""

from __future__ import annotations

import io
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any, Literal

from pyarrow import ArrowException
from pyarrow.fs import FileSelector, FileType

from spark_klog.base.addresses import is_single_writer
from spark_klog.errors import KlogError
from spark_klog.files.folder import TEMPORARY, Entry, reason
from spark_klog.files.keys import KeyedUri
from spark_klog.files.store_requests import StoreRequests, azure_remover, no_conditional_put, store_requests

_READ_BYTES, _WRITE_BYTES = 1024 * 1024, 8 * 1024 * 1024
#: pyarrow leases a file of Azure for 15 s to remove it: a process that is killed then leaves the lease.
_LEASED, _LEASED_SECONDS, _PAUSE_SECONDS = "LeaseAlreadyPresent", 20.0, 0.5


class ArrowFile:
    """A file of pyarrow that is read by position."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size: int = file.size()

    def read_at(self, position: int, size: int) -> bytes:
        data: bytes = self._file.read_at(size, position)
        return data

    def close(self) -> None:
        self._file.close()


class ArrowFolder:
    """The folder `base` of a file system of pyarrow, which `address` names in messages. Methods as of `LocalFolder`.

    Object stores show only whole objects. HDFS shows what is being written: there files are renamed into place.
    `uri` is the address as it was given, with its options and secrets: of a `KeyedUri` the keys are renewed, else only
    `create` and `remove` need it.
    """

    shows_whole_files_only = True

    def __init__(
        self, filesystem: Any, base: str, address: str, failure: type[KlogError] | None = None, uri: str = ""
    ) -> None:
        self._opened, self._base = filesystem, base.rstrip("/")
        self._failure, self._uri = failure, uri
        #: For conditional puts and for removals, with the file system whose keys they have.
        self._requests: tuple[StoreRequests | None, Any] = None, None
        self._removing: tuple[StoreRequests | None, Any] = None, None
        self.address = address
        #: Is called before each change; what it raises, the change raises.
        self.guard: Callable[[], None] = _nothing

    @property
    def _fs(self) -> Any:
        """pyarrow's file system, with keys that have not ended."""
        return self._uri.filesystem() if isinstance(self._uri, KeyedUri) else self._opened

    def _at(self, path: str) -> str:
        return f"{self._base}/{path}" if self._base and path else self._base or path

    @contextmanager
    def _naming(self, path: str, action: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ArrowException) as error:  # pyarrow's Azure file system has errors that are no OSError
            if self._failure is None:
                raise
            raise self._failure(f"{self.address}/{path} can't be {action}: {reason(error)}") from None

    @contextmanager
    def _changing(self, path: str, action: str) -> Iterator[None]:
        self.guard()
        with self._naming(path, action):
            yield

    def uri(self, path: str) -> str:
        return f"{self._fs.type_name}://{self._at(path)}"

    def kind(self, path: str) -> Literal["file", "folder"] | None:
        if not self._at(path):
            return "folder"
        info = self._fs.get_file_info(self._at(path))
        return "file" if info.is_file else "folder" if info.type == FileType.Directory else None

    def entries(self, path: str) -> list[Entry]:
        return [
            _entry(info)
            for info in self._fs.get_file_info(FileSelector(self._at(path)))
            if info.type != FileType.NotFound  # deleted during the listing
        ]

    def open(self, path: str) -> ArrowFile:
        return ArrowFile(self.input_file(path))

    def input_file(self, path: str) -> Any:
        """A file of pyarrow; raises what `open` raises."""
        return self._fs.open_input_file(self._at(path))

    def names(self, path: str) -> list[str]:
        with self._naming(path, "listed"):
            infos = self._fs.get_file_info(FileSelector(self._at(path), allow_not_found=True))
            return sorted(info.base_name for info in infos if not info.base_name.startswith(TEMPORARY))

    def paths_below(self, path: str) -> list[str]:
        return sorted(self.sizes_below(path))

    def sizes_below(self, path: str) -> dict[str, int]:
        return {below: entry.size for below, entry in self.entries_below(path).items()}

    def entries_below(self, path: str) -> dict[str, Entry]:
        with self._naming(path, "listed"):
            infos = self._fs.get_file_info(FileSelector(self._at(path), allow_not_found=True, recursive=True))
            return {info.path[len(self._base) + 1 :]: _entry(info) for info in infos if info.is_file}

    def read(self, path: str) -> bytes | None:
        with self._naming(path, "read"):
            if self.kind(path) != "file":  # the error for a folder differs between file systems
                return None
            with self._input(path) as stream:
                content: bytes = stream.read()
                return content

    def lines(self, path: str) -> Iterator[bytes]:
        with self._naming(path, "read"):
            if self.kind(path) == "file":
                with self._input(path) as stream:
                    yield from io.BufferedReader(stream, _READ_BYTES)

    def _input(self, path: str) -> Any:
        # by default a name that ends in ".gz" is decompressed
        return self._fs.open_input_stream(self._at(path), compression=None)

    def size(self, path: str) -> int | None:
        with self._naming(path, "read"):
            info = self._fs.get_file_info(self._at(path))
            return int(info.size) if info.is_file else None

    def write(self, path: str, content: bytes) -> None:
        with self._changing(path, "written"), self._output(path) as stream:
            stream.write(content)

    def create(self, path: str, content: bytes) -> bool:
        """Create a file; False if it exists. Of several writers of one path exactly one succeeds, on all hosts.

        S3, GCS and Azure: a conditional put, which needs obstore (`MissingPackage`). HDFS: a move into the folder.
        With single_writer=true in the URI nothing keeps two writers apart. On errors the file may be there, or
        come to be there later, with `content`.
        """
        if is_single_writer(self._uri):
            if self.size(path) is not None:
                return False
            self.write(path, content)
            return True
        with self._changing(path, "written"):
            bucket, _, key = self._at(path).partition("/")
            requests, opened = self._requests
            if opened is not (filesystem := self._fs):
                requests = store_requests(filesystem, bucket, self._uri, self.address)
                self._requests = requests, filesystem
            if requests is not None:
                return requests.create(key, content)
            if filesystem.type_name == "hdfs":
                return self._create_by_rename(path, content)
            raise no_conditional_put(f"pyarrow's file system {filesystem.type_name}")

    def _create_by_rename(self, path: str, content: bytes) -> bool:
        """Move a file of the same name into the folder, which HDFS does unless the folder has one.

        pyarrow's `move` to the place itself would delete what is there, and then move.
        """
        if self.size(path) is not None:
            return False
        folder, _, name = path.rpartition("/")
        own = self._temporary(path)
        source = f"{own}/{name}"
        self._fs.create_dir(self._at(own))
        try:
            with self._fs.open_output_stream(self._at(source), compression=None) as stream:
                stream.write(content)
            self._fs.move(self._at(source), self._at(folder))
        except OSError:
            if self.size(source) is None and self.size(path) is not None:
                return True  # only the answer was lost
            if self.size(path) is None:
                raise
            return False
        finally:
            with suppress(OSError):
                self._fs.delete_dir(self._at(own))
        return True

    @contextmanager
    def _output(self, path: str) -> Iterator[Any]:
        """Write a file, which is there as a whole or not at all."""
        if self._shows_whole_objects():
            with self._fs.open_output_stream(self._at(path), compression=None) as stream:
                yield stream
            return
        temporary = self._temporary(path)
        try:
            with self._fs.open_output_stream(self._at(temporary), compression=None) as stream:
                yield stream
            self._rename(temporary, path)
        except OSError:
            with suppress(OSError):
                self._fs.delete_file(self._at(temporary))
            raise

    def _temporary(self, path: str) -> str:
        """A new path in the folder of a file, which is made."""
        folder = path.rpartition("/")[0]
        if self._at(folder):
            self._fs.create_dir(self._at(folder), recursive=True)
        return f"{folder}/{TEMPORARY}{uuid.uuid4().hex}".lstrip("/")

    def _shows_whole_objects(self) -> bool:
        inner = self._fs
        while inner.type_name == "subtree":
            inner = inner.base_fs
        return inner.type_name in ("s3", "gcs", "abfs")

    def _rename(self, temporary: str, path: str) -> None:
        self._fs.move(self._at(temporary), self._at(path))

    def put(self, source: Path, path: str) -> None:
        with self._changing(path, "written"):
            with source.open("rb") as file, self._output(path) as stream:
                while piece := file.read(_WRITE_BYTES):
                    stream.write(piece)
            source.unlink()

    def settle(self) -> None:
        """Nothing is left to do: an upload ends when the file is safe."""

    def move(self, source: str, target: str) -> None:
        with self._changing(target, "written"):
            if self.kind(source) == "file":
                self.remove(target)  # a move in HDFS does not overwrite
                self._fs.move(self._at(source), self._at(target))

    def remove(self, path: str) -> None:
        end = time.monotonic() + _LEASED_SECONDS
        while not self._is_removed(path, is_last=time.monotonic() > end):
            time.sleep(_PAUSE_SECONDS)

    def _is_removed(self, path: str, *, is_last: bool) -> bool:
        """Remove a file or folder; False if another remover has leased the file, unless it is the last try."""
        with self._changing(path, "removed"), suppress(FileNotFoundError):
            kind = self.kind(path)
            try:
                if kind == "file":
                    self._remove_file(self._at(path))
                elif kind == "folder":
                    self._fs.delete_dir(self._at(path))
            except (OSError, ArrowException) as error:
                if is_last or _LEASED not in str(error):
                    raise
                return False
        return True

    def _remove_file(self, place: str) -> None:
        container, _, key = place.partition("/")
        if (filesystem := self._fs) is not self._removing[1]:
            self._removing = azure_remover(filesystem, container, self._uri), filesystem
        if (requests := self._removing[0]) is not None:
            requests.remove(key)
        else:
            filesystem.delete_file(place)

    @contextmanager
    def scratch(self, path: str) -> Iterator[Path]:
        try:
            made = tempfile.TemporaryDirectory(prefix="klog-load-", ignore_cleanup_errors=True)
        except OSError as error:
            if self._failure is None:
                raise
            raise self._failure(f"no folder for temporary files: {reason(error)}") from None
        with made as name:
            yield Path(name)


def _nothing() -> None:
    """The guard of a folder that has none."""


def _entry(info: Any) -> Entry:
    time = inf if info.mtime_ns is None else info.mtime_ns / 1e9
    return Entry(info.base_name, info.size or 0, info.type == FileType.Directory, _stamp(info), time)


def _stamp(info: Any) -> tuple[int, int] | None:
    return (info.size, info.mtime_ns) if info.is_file else None
