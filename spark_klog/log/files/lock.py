"""The lock of a data directory (.lock, by fcntl as in Kafka): only one broker or tool at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spark_klog.errors import LogDirLocked


def take_lock(data_dir: Path, otherwise: str = "") -> int:
    """Take the lock; returns the descriptor that holds it until closed. `LogDirLocked` if another process has it.

    `otherwise` is the alternative to stopping that process, for the message. OSError.
    """
    lock = os.open(data_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if error.errno not in (errno.EACCES, errno.EAGAIN):  # the file system has no locks
            raise
        advice = f"stop that one, or {otherwise}" if otherwise else "stop that one first"
        raise LogDirLocked(f"data directory {data_dir} is in use by another broker or tool; {advice}") from None
    return lock


@contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Hold the lock for the duration of the block; `LogDirLocked`, OSError."""
    lock = take_lock(data_dir)
    try:
        yield
    finally:
        os.close(lock)
