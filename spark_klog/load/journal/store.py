"""The folder of a load: the JSON in it, and the lock that keeps two runs apart."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import ArrowException

from spark_klog.base.addresses import without_user
from spark_klog.errors import ConfigError, LoadError
from spark_klog.files import open_folder
from spark_klog.files.arrow import ArrowFolder
from spark_klog.files.folder import LocalFolder, reason
from spark_klog.load.journal import paths
from spark_klog.load.journal.lease import lease, under_way

_LOCK = f"{paths.FOLDER}/lock"
#: The files below an output.
Store = LocalFolder | ArrowFolder
_ENCODER = json.JSONEncoder(ensure_ascii=False, default=vars)


def open_store(address: str, *, of_table: bool = False) -> Store:
    """The folder at a path or URI; `ConfigError` for a URI that pyarrow does not know, `LoadError`.

    Its methods raise `LoadError`. In the folder of a table files are written to their final names, as in an object
    store: no reader of the table sees them before its commit.
    """
    if not address:
        raise ConfigError("the output is empty: give a folder or a URI")
    try:
        store = open_folder(address, LoadError)
    except ArrowException as error:
        raise LoadError(f"{without_user(address)} can't be opened: {reason(error)}") from None
    if of_table:
        store.shows_whole_files_only = True
    return store


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


def arrow_file(store: Store, path: str) -> pa.NativeFile:
    """A file to read by pyarrow; OSError, `ArrowException`."""
    return store.input_file(path) if isinstance(store, ArrowFolder) else pa.OSFile(store.uri(path))


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


@contextmanager
def locked(store: Store) -> Iterator[None]:
    """Exclude other runs for the duration of the block; `LoadError` if there is one.

    In object stores and HDFS changes by `store` fail from then on if another run takes over, because this one stood
    still for long (`lease`).
    """
    if isinstance(store, ArrowFolder):
        with lease(store):
            yield
        return
    path = Path(store.uri(_LOCK))
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
            raise under_way(store.address) from None
        except OSError as error:
            is_ours = True  # nobody has a lock here
            raise LoadError(
                f"{store.address} can't be locked ({error.strerror}): use a mount with flock, or the URI of an object "
                "store"
            ) from None
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file)):
            raise under_way(store.address)  # a run that failed has removed the file since it was opened here
        is_ours = True
        yield
    finally:
        if is_ours:
            _remove_if_empty(path, made)
        os.close(file)


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
