"""The lock of a load in an object store or HDFS, which have no locks: a lease that its holder renews.

    OUTPUT/_klog/lease/EPOCH    the holder's token, process and renewals, and whether it has ended

Only the creation of a file decides (`ArrowFolder.create`): who creates the next epoch holds the lease. The holder
renews its file, which nobody else writes, and then looks for a later epoch. Another run sees the file change, and is
refused. If it does not change for `LEASE_SECONDS`, by the watcher's own clock, its holder is dead, and the watcher
creates the next epoch. The newest epoch stays there when a run ends, so that no number is used twice, unless it is the
first one and its run has written nothing.

A holder that was frozen for that long finds the later epoch before its next change, which fails. What was under way at
the very moment of the take-over is bounded by the run's files, each of which is created once: plan, results of tasks,
manifest.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from spark_klog.errors import LoadError
from spark_klog.files.arrow import ArrowFolder
from spark_klog.files.conditional_put import no_conditional_put
from spark_klog.load.journal.model import FOLDER

_log = logging.getLogger(__name__)
_LEASES = f"{FOLDER}/lease"
_DIGITS = 8
#: How often a holder renews, when a lease ends that is not renewed, and how long before it a holder stops its changes.
RENEW_SECONDS, LEASE_SECONDS, MARGIN_SECONDS = 3.0, 20.0, 5.0
_LOOK_SECONDS = 0.5


@contextmanager
def lease(store: ArrowFolder) -> Iterator[None]:
    """Hold the load's lease for the duration of the block, in which all changes by `store` depend on it.

    `LoadError` if another run has it, and from changes when another one has taken it over.
    """
    held = _Lease(copy.copy(store))
    try:
        held.acquire()
        thread = threading.Thread(target=held.renew_until_end, name="klog-lease", daemon=True)
        thread.start()
        unguarded, store.guard = store.guard, held.check
        try:
            yield
        finally:
            store.guard = unguarded
            held.ended.set()
            thread.join()
    finally:
        held.release()


class _Lease:
    def __init__(self, store: ArrowFolder) -> None:
        self._store = store
        self._epoch = 0
        self._token = secrets.token_hex(8)
        self._renewals = 0
        self._valid_until = 0.0
        self._is_lost = False
        self._lock = threading.Lock()
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.ended = threading.Event()

    def acquire(self) -> None:
        """Wait for the end of a former holder that is dead; `LoadError` if there is one that lives."""
        store = self._store
        last = self._last_epoch()
        former = store.read(_path(last)) if last else None
        if former is not None and not _has_ended(former):
            former = self._watch(last, former)
        began = _now()
        if not store.create(_path(last + 1), self._content()):
            raise self._under_way(None)
        self._epoch = last + 1
        if store.create(_path(self._epoch), self._content()):  # a store that ignores the condition would lose records
            raise LoadError(str(no_conditional_put(store.address)))
        self._valid_until = began + LEASE_SECONDS - MARGIN_SECONDS
        # In this order: a holder that renews late either finds this epoch, or is found here.
        if self._last_epoch() > self._epoch:
            raise self._under_way(None)
        if former is not None and (now := store.read(_path(last))) not in (None, former):
            raise self._under_way(now)
        for epoch in self._epochs():
            if epoch < self._epoch:
                store.remove(_path(epoch))

    def _watch(self, epoch: int, former: bytes) -> bytes:
        """Watch the lease of a run that may be dead until it ends; returns what was read last."""
        end = _now() + (0 if _is_of_dead_process(former) else LEASE_SECONDS)
        while _now() < end:
            time.sleep(_LOOK_SECONDS)
            found = self._store.read(_path(epoch))
            if found is None:  # a third run goes on after this one
                raise self._under_way(None)
            if _has_ended(found):
                return found
            if found != former:
                raise self._under_way(found)
        _log.warning("%s: the run that %s is dead: going on", self._store.address, _holder(former))
        return former

    def renew_until_end(self) -> None:
        """Renew at intervals until `ended` is set, or the lease is lost."""
        while not self._is_lost and not self.ended.wait(RENEW_SECONDS):
            try:
                self._renew()
            except LoadError as error:  # tried again; if it takes too long, the next change tells
                _log.debug("the lease can't be renewed: %s", error)

    def check(self) -> None:
        """`LoadError` if another run may have taken the lease over."""
        if _now() >= self._valid_until:
            self._renew()
        if self._is_lost:
            raise LoadError(
                f"{self._store.address}: this run stood still for {LEASE_SECONDS:g} s or longer, and another run of "
                "the load goes on with its work: nothing is lost. Run again for what has come since"
            )

    def _renew(self) -> None:
        with self._lock:
            if self._is_lost:
                return
            began = _now()
            self._renewals += 1
            self._store.write(_path(self._epoch), self._content())
            if self._last_epoch() > self._epoch:
                self._is_lost = True
            else:
                self._valid_until = began + LEASE_SECONDS - MARGIN_SECONDS

    def release(self) -> None:
        """Say that the run has ended, if this object got the lease."""
        with self._lock:
            if self._epoch and not self._is_lost:
                try:
                    if self._epoch == 1 and self._store.names(FOLDER) == [_LEASES.rpartition("/")[2]]:
                        self._store.remove(_path(1))  # a first run that was refused leaves nothing behind
                        return
                    self._store.write(_path(self._epoch), self._content(has_ended=True))
                except LoadError as error:  # the next run waits for the lease's end
                    _log.warning("the next run has to wait for %g s: %s", LEASE_SECONDS, error)

    def _epochs(self) -> list[int]:
        return [int(name) for name in self._store.names(_LEASES) if name.isascii() and name.isdecimal()]

    def _last_epoch(self) -> int:
        return max(self._epochs(), default=0)

    def _content(self, *, has_ended: bool = False) -> bytes:
        return json.dumps(
            {
                "token": self._token,
                "host": socket.gethostname(),
                "process": os.getpid(),
                "instance": _instance(os.getpid()),
                "started": self._started,
                "renewals": self._renewals,
                "ended": has_ended,
            }
        ).encode()

    def _under_way(self, content: bytes | None) -> LoadError:
        which = f" ({_holder(content)})" if content else ""
        return LoadError(f"another run of the load in {self._store.address} is under way{which}: wait for its end")


def _path(epoch: int) -> str:
    return f"{_LEASES}/{epoch:0{_DIGITS}d}"


def _now() -> float:
    """Seconds of a clock that goes on while the machine sleeps, if there is one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _parsed(content: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(found := json.loads(content), dict):
            return found
    return {}  # cut off by people; it ends if nobody renews it


def _has_ended(content: bytes) -> bool:
    return _parsed(content).get("ended") is True


def _holder(content: bytes) -> str:
    found = _parsed(content)
    return f"process {found.get('process')} on {found.get('host')} began at {found.get('started')}"


def _instance(process: int) -> list[str] | None:
    """What tells a process from all others, on all hosts; None if it is not there, or the system does not tell."""
    with suppress(OSError, IndexError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        started = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
        return [boot, namespace, started]
    return None


def _is_of_dead_process(content: bytes) -> bool:
    """Whether the holder was a process of this system, of which it is known that it has ended."""
    found, own = _parsed(content), _instance(os.getpid())
    process, instance = found.get("process"), found.get("instance")
    if own is None or not isinstance(process, int) or not isinstance(instance, list):
        return False
    return instance[:2] == own[:2] and instance != _instance(process)
