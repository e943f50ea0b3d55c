"""Files of a load: on a local disk, or on any of pyarrow's file systems.

Local files are written beside their place, synced and renamed; object stores show only whole objects. OSErrors become
`LoadError`, which names the file.
"""

from __future__ import annotations

import errno
import io
import json
import os
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Protocol

from pyarrow import ArrowException

from spark_klog.base.addresses import filesystem_at, local_path, without_user
from spark_klog.base.durable import sync_folder, write_synced
from spark_klog.errors import ConfigError, LoadError
from spark_klog.load.journal.model import FOLDER

_HIDDEN = ".tmp-"
#: Bytes of files that wait to be synced together, and how many are synced at once.
_MOST_WAITING, _SYNCS = 64 * 1024 * 1024, 4
_READ_BYTES = 1024 * 1024
_LOCK = f"{_HIDDEN}lock"
#: The errors of os.link on mounts without hard links (FUSE of object stores, FAT), or for a file that may have no more.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class Store(Protocol):
    """The files below an output. Paths are relative to it, with "/"."""

    address: str
    """For messages, without secrets."""
    shows_whole_files_only: bool
    """Whether files must be uploaded to their final names, because a rename takes several steps there."""

    def read(self, path: str) -> bytes | None:
        """A file's content; None if there is no such file."""

    def lines(self, path: str) -> Iterator[bytes]:
        """A file's lines, of which one is in memory; none if there is no such file."""

    def write(self, path: str, content: bytes) -> None:
        """Create or replace a file; readers see the old content or the new one."""

    def create(self, path: str, content: bytes) -> bool:
        """Create a file; False if it exists."""

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; none if it does not exist."""

    def paths_below(self, folder: str) -> list[str]:
        """The paths of all files in a folder and in the folders in it."""

    def size(self, path: str) -> int | None:
        """A file's bytes; None if there is no such file."""

    def put(self, source: Path, path: str) -> None:
        """Hand over a file from `scratch`, which replaces what is at its place after `settle` at the latest."""

    def settle(self) -> None:
        """Wait until all files of `put` are in place, and safe from a power failure."""

    def move(self, source: str, target: str) -> None:
        """Move a file, replacing what is there; nothing if `source` does not exist."""

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its content; nothing if it does not exist."""

    def scratch(self, folder: str) -> Any:
        """A context with a local folder (`Path`) for files that are not complete; `folder` is its place, if local."""

    def uri(self, path: str) -> str:
        """A path that pyarrow, Spark and DuckDB can open."""


def open_store(address: str) -> Store:
    """The store at a path or URI; `ConfigError` for a URI that pyarrow does not know, `LoadError`."""
    if not address:
        raise ConfigError("the output is empty: give a folder or a URI")
    path = local_path(address)
    if path is not None:
        return LocalStore(Path(path).absolute())
    try:
        filesystem, base = filesystem_at(address)
    except (OSError, ArrowException) as error:
        raise LoadError(f"{without_user(address)} can't be opened: {_reason(error)}") from None
    return ArrowStore(filesystem, base, without_user(address))


def read_json(store: Store, path: str) -> dict[str, Any] | None:
    """Read a JSON object; None if there is no such file, `LoadError` if it holds anything else."""
    content = store.read(path)
    if content is None:
        return None
    try:
        value = json.loads(content)
    except ValueError as error:
        raise LoadError(f"{store.address}/{path} is not JSON ({error}): restore it") from None
    if not isinstance(value, dict):
        raise LoadError(f"{store.address}/{path} is not a JSON object: restore it")
    return value


_ENCODER = json.JSONEncoder(ensure_ascii=False, default=vars)


def to_json(value: Any) -> bytes:
    """JSON that people can read and edit, of dataclasses as well: what holds no others has a line of its own."""
    return (_lines(vars(value) if is_dataclass(value) else value, 0) + "\n").encode()


def _lines(value: Any, depth: int) -> str:
    items = list(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
    if not items or (depth and not isinstance(items[0], dict | list) and not is_dataclass(items[0])):
        return _ENCODER.encode(value)  # in C, which has no indentation
    texts = [_lines(item, depth + 1) for item in items]
    if isinstance(value, dict):
        texts = [f"{_ENCODER.encode(key)}: {text}" for key, text in zip(value, texts, strict=True)]
    indent = " " * depth
    body = f",\n{indent} ".join(texts)
    start, end = "{}" if isinstance(value, dict) else "[]"
    return f"{start}\n{indent} {body}\n{indent}{end}"


def _replace(source: str, place: str) -> None:
    """Move a file to a place whose folder is made if need be. FileNotFoundError without the file."""
    try:
        os.replace(source, place)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.replace(source, place)


def _reason(error: Exception) -> str:
    return without_user((getattr(error, "strerror", None) or str(error)).partition("\n")[0])


@contextmanager
def _named(store: Store, path: str, action: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ArrowException) as error:  # pyarrow's Azure file system has errors that are no OSError
        raise LoadError(f"{store.address}/{path} can't be {action}: {_reason(error)}") from None


class LocalStore:
    """A folder of a local disk, or of a mount that has locks (flock), renames, and preferably hard links."""

    shows_whole_files_only = False

    def __init__(self, root: Path) -> None:
        self._root = root
        self.address = str(root)
        #: Files of `put`, which are synced together: a folder once, and the disk does several files at a time.
        self._waiting: list[tuple[Path, str]] = []
        self._waiting_bytes = 0

    def read(self, path: str) -> bytes | None:
        with _named(self, path, "read"):
            try:
                return (self._root / path).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def lines(self, path: str) -> Iterator[bytes]:
        with _named(self, path, "read"), suppress(FileNotFoundError, NotADirectoryError):
            with (self._root / path).open("rb") as file:
                yield from file

    def write(self, path: str, content: bytes) -> None:
        with _named(self, path, "written"):
            temporary = self._temporary(path, content)
            os.replace(temporary, self._root / path)
            sync_folder((self._root / path).parent)

    def create(self, path: str, content: bytes) -> bool:
        with _named(self, path, "written"):
            temporary, place = self._temporary(path, content), self._root / path
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
        import fcntl

        with (place.parent / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if place.exists():
                return False
            os.replace(temporary, place)
            return True

    def _temporary(self, path: str, content: bytes) -> Path:
        place = self._root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f"{_HIDDEN}{uuid.uuid4().hex}")
        write_synced(temporary, content)
        return temporary

    def names(self, folder: str) -> list[str]:
        with _named(self, folder, "listed"):
            try:
                return sorted(name for name in os.listdir(self._root / folder) if not name.startswith(_HIDDEN))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def paths_below(self, folder: str) -> list[str]:
        with _named(self, folder, "listed"):
            root = self._root / folder
            return sorted(path.relative_to(self._root).as_posix() for path in root.rglob("*") if path.is_file())

    def size(self, path: str) -> int | None:
        with _named(self, path, "read"):
            try:
                return os.stat(f"{self._root}/{path}").st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def put(self, source: Path, path: str) -> None:
        with _named(self, path, "written"):
            self._waiting.append((source, path))
            self._waiting_bytes += source.stat().st_size
        if self._waiting_bytes >= _MOST_WAITING:
            self.settle()

    def settle(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        with ThreadPoolExecutor(_SYNCS) as pool:
            for _ in pool.map(self._sync, waiting):
                pass
        for source, path in waiting:
            with _named(self, path, "written"):
                _replace(str(source), f"{self._root}/{path}")
        for folder in {path.rpartition("/")[0] for _, path in waiting}:
            with _named(self, folder, "written"):
                sync_folder(self._root / folder)

    def _sync(self, item: tuple[Path, str]) -> None:
        source, path = item
        with _named(self, path, "written"):
            sync_folder(source)

    def move(self, source: str, target: str) -> None:
        with _named(self, target, "written"), suppress(FileNotFoundError):
            _replace(f"{self._root}/{source}", f"{self._root}/{target}")

    def remove(self, path: str) -> None:
        import shutil

        with _named(self, path, "removed"):
            place = self._root / path
            with suppress(FileNotFoundError, NotADirectoryError):
                if place.is_dir():
                    shutil.rmtree(place)
                else:
                    place.unlink()

    @contextmanager
    def scratch(self, folder: str) -> Iterator[Path]:
        with _named(self, folder, "written"):
            (self._root / folder).mkdir(parents=True, exist_ok=True)
            made = tempfile.TemporaryDirectory(prefix=_HIDDEN, dir=self._root / folder, ignore_cleanup_errors=True)
        with made as name:
            yield Path(name)

    def uri(self, path: str) -> str:
        return str(self._root / path)


class ArrowStore:
    """A folder of one of pyarrow's file systems: S3, GCS, Azure, HDFS."""

    shows_whole_files_only = True

    def __init__(self, filesystem: Any, base: str, address: str) -> None:
        self._fs, self._base = filesystem, base.rstrip("/")
        self.address = address

    def _at(self, path: str) -> str:
        return f"{self._base}/{path}" if path else self._base

    def read(self, path: str) -> bytes | None:
        with _named(self, path, "read"):
            if not self._fs.get_file_info(self._at(path)).is_file:
                return None
            with self._fs.open_input_stream(self._at(path), compression=None) as stream:
                content: bytes = stream.read()
                return content

    def lines(self, path: str) -> Iterator[bytes]:
        with _named(self, path, "read"):
            if self._fs.get_file_info(self._at(path)).is_file:
                with self._fs.open_input_stream(self._at(path), compression=None) as stream:
                    yield from io.BufferedReader(stream, _READ_BYTES)

    def write(self, path: str, content: bytes) -> None:
        with _named(self, path, "written"), self._stream(path) as stream:
            stream.write(content)

    def create(self, path: str, content: bytes) -> bool:
        # pyarrow has no conditional write: two runs that start at the same moment may both succeed.
        if self.size(path) is not None:
            return False
        self.write(path, content)
        return True

    @contextmanager
    def _stream(self, path: str) -> Iterator[Any]:
        """Write a file, which is there as a whole or not at all. HDFS shows what is being written, but renames."""
        if self._fs.type_name != "hdfs":
            with self._fs.open_output_stream(self._at(path), compression=None) as stream:
                yield stream
            return
        folder = self._at(path).rpartition("/")[0]
        self._fs.create_dir(folder, recursive=True)
        temporary = f"{folder}/{_HIDDEN}{uuid.uuid4().hex}"
        try:
            with self._fs.open_output_stream(temporary, compression=None) as stream:
                yield stream
            self._fs.move(temporary, self._at(path))
        except OSError:
            with suppress(OSError):
                self._fs.delete_file(temporary)
            raise

    def names(self, folder: str) -> list[str]:
        from pyarrow.fs import FileSelector

        with _named(self, folder, "listed"):
            found = self._fs.get_file_info(FileSelector(self._at(folder), allow_not_found=True))
            return sorted(info.base_name for info in found if not info.base_name.startswith(_HIDDEN))

    def paths_below(self, folder: str) -> list[str]:
        from pyarrow.fs import FileSelector

        with _named(self, folder, "listed"):
            found = self._fs.get_file_info(FileSelector(self._at(folder), allow_not_found=True, recursive=True))
            return sorted(info.path[len(self._base) + 1 :] for info in found if info.is_file)

    def size(self, path: str) -> int | None:
        with _named(self, path, "read"):
            info = self._fs.get_file_info(self._at(path))
            return int(info.size) if info.is_file else None

    def put(self, source: Path, path: str) -> None:
        with _named(self, path, "written"):
            with source.open("rb") as file, self._stream(path) as stream:
                while piece := file.read(8 * 1024 * 1024):
                    stream.write(piece)
            source.unlink()

    def settle(self) -> None:
        """Nothing is left to do: an upload ends when the file is safe."""

    def move(self, source: str, target: str) -> None:
        with _named(self, target, "written"):
            if self.size(source) is not None:
                self._fs.move(self._at(source), self._at(target))

    def remove(self, path: str) -> None:
        with _named(self, path, "removed"), suppress(FileNotFoundError):
            info = self._fs.get_file_info(self._at(path))
            if info.is_file:
                self._fs.delete_file(self._at(path))
            elif info.type.name == "Directory":
                self._fs.delete_dir(self._at(path))

    @contextmanager
    def scratch(self, folder: str) -> Iterator[Path]:
        try:
            made = tempfile.TemporaryDirectory(prefix="klog-load-", ignore_cleanup_errors=True)
        except OSError as error:
            raise LoadError(f"no folder for temporary files: {_reason(error)}") from None
        with made as name:
            yield Path(name)

    def uri(self, path: str) -> str:
        return f"{self._fs.type_name}://{self._at(path)}"


_NAME = f"{FOLDER}/lock"


@contextmanager
def locked(store: Store) -> Iterator[None]:
    """Exclude other runs for the duration of the block; `LoadError` if there is one.

    Object stores have no locks: of two runs that begin at once, the second to write its plan or its manifest fails,
    unless both do so at the same moment. Schedule one run at a time there.
    """
    if store.shows_whole_files_only:
        yield
        return
    import fcntl

    path = Path(store.uri(_NAME))
    try:
        made = _make_folders(path.parent)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise LoadError(f"{store.address} can't be written: {error.strerror}: {error.filename}") from None
    is_ours = False
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _under_way(store) from None
        except OSError as error:
            is_ours = True  # nobody has a lock here
            raise LoadError(
                f"{store.address} can't be locked ({error.strerror}): use a mount with flock, or the URI of an object "
                "store"
            ) from None
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file)):
            raise _under_way(store)  # a run that failed has removed the file since it was opened here
        is_ours = True
        yield
    finally:
        if is_ours:
            _remove_if_empty(path, made)
        os.close(file)


def _under_way(store: Store) -> LoadError:
    return LoadError(f"another run of the load in {store.address} is under way: wait for its end")


def _make_folders(folder: Path) -> list[Path]:
    """Make a folder and its parents; returns those that were not there, the innermost first."""
    missing = []
    at = folder
    while not at.exists():
        missing.append(at)
        at = at.parent
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_if_empty(path: Path, folders: list[Path]) -> None:
    """After a run that failed before it wrote anything, leave nothing behind."""
    if not folders or os.listdir(path.parent) != [path.name]:
        return
    path.unlink(missing_ok=True)
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
