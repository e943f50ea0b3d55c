"""Keep two runs of a load apart: on a local disk by a lock on a file, which a killed process leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spark_klog.errors import LoadError
from spark_klog.load.journal.model import FOLDER
from spark_klog.load.journal.store import Store

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
