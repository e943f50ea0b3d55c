"""Small files that survive a power failure: written, synced, renamed into place, and the folder synced; and locks.

Whatever klog writes and reads again has a version, which `check_version` compares; Kafka's own forms have theirs.
Readers pass over fields that they do not know: a field that may be passed over is added without a new version, for any
other change the version is raised.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spark_klog.errors import KlogError

_LOCK_POLL_SECONDS = 0.05


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk; also takes a file, for its content. OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Create or overwrite a file, and wait until its content is on disk. After an OSError there is no file."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def replace_file(path: Path, content: bytes, temporary: Path, mode: int = 0o666) -> None:
    """Replace a file by way of `temporary`, in the same folder: after a crash it has the old content or the new one.

    OSError; `temporary` is gone then, unless the process is killed.
    """
    write_synced(temporary, content, mode)
    try:
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def check_version(version: object, known: int, where: str, otherwise: str, error: type[KlogError]) -> None:
    """Raise the `error` if what is `where` has another `version` than the known one; `otherwise` is what else to do."""
    if type(version) is int and version == known:
        return
    has = "no version" if version is None else f"version {version if type(version) is int else repr(version)[:20]}"
    raise error(
        f"{where} has {has}, and this klog reads version {known}: go on with the klog that wrote it, or {otherwise}"
    )


@contextmanager
def locked(descriptor: int, seconds: float | None = None) -> Iterator[None]:
    """Hold the lock (flock) of an open file or folder for the block, and close it.

    `BlockingIOError` if somebody else has it for `seconds`; None: wait for good. OSError on a mount without locks.
    """
    try:
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if end is None else fcntl.LOCK_NB))
                break
            except BlockingIOError:
                if end is None or time.monotonic() > end:
                    raise
                time.sleep(_LOCK_POLL_SECONDS)
        try:
            yield
        finally:
            # closing is not enough: a child that was forked meanwhile has the file open, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
