"""The lock of a load in an object store or HDFS, which have no locks: a lease that its holder renews.

    OUTPUT/_klog/lease/EPOCH            the holder's token, process and start; is never replaced
    OUTPUT/_klog/lease/EPOCH.renewed    how often it has renewed the lease, and whether its run has ended

Only the creation of EPOCH decides (`ArrowFolder.create`): who creates the next one holds the lease. The holder replaces
EPOCH.renewed, which nobody else writes, and then looks for a later epoch. Another run sees the file change, and is
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
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from spark_klog.base.durable import check_version
from spark_klog.errors import LoadError
from spark_klog.files.arrow import ArrowFolder
from spark_klog.files.store_requests import no_conditional_put
from spark_klog.load.journal import paths
from spark_klog.load.journal.model import VERSION

_log = logging.getLogger(__name__)
_LEASES = f"{paths.FOLDER}/lease"
_DIGITS = 8
_RENEWED, _ENDED = ".renewed", b"ended"
_OF_LEASE = re.compile(r"(\d+)(?:\.renewed)?")
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


class _State(NamedTuple):
    """The content of a lease's two files; `renewed` is None before the first renewal."""

    holder: bytes
    renewed: bytes | None

    @property
    def has_ended(self) -> bool:
        return self.renewed == _ENDED

    def __str__(self) -> str:
        written = _parsed(self.holder)
        return f"process {written.get('process')} on {written.get('host')} began at {written.get('started')}"


def _parsed(holder: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(written := json.loads(holder), dict):
            return written
    return {}  # people have edited it


class _Lease:
    def __init__(self, store: ArrowFolder) -> None:
        self._store = store
        self._epoch = 0
        self._renewals = 0
        self._valid_until = 0.0
        self._is_lost = False
        self._lock = threading.Lock()
        self.ended = threading.Event()

    def acquire(self) -> None:
        """Wait for the end of a former holder that is dead; `LoadError` if there is one that lives."""
        store = self._store
        last = self._last_epoch()
        former = self._state(last) if last else None
        if former is not None and not former.has_ended:
            if known := _parsed(former.holder):
                check_version(
                    known.get("version"),
                    VERSION,
                    f"{store.address}/{_path(last)}",
                    f"remove {store.address}/{_LEASES} if no run is under way",
                    LoadError,
                )
            former = self._watch(last, former)
        began = _now()
        content = self._content()
        if not store.create(_path(last + 1), content):
            raise self._under_way(None)
        self._epoch = last + 1
        if store.create(_path(self._epoch), content):  # a store that ignores the condition would lose records
            raise LoadError(str(no_conditional_put(store.address)))
        self._valid_until = began + LEASE_SECONDS - MARGIN_SECONDS
        # In this order: a holder that renews late either finds this epoch, or is found here.
        if self._last_epoch() > self._epoch:
            raise self._under_way(None)
        if former is not None and (now := self._state(last)) not in (None, former):
            raise self._under_way(now)
        for name in store.names(_LEASES):
            if (older := _OF_LEASE.fullmatch(name)) and int(older[1]) < self._epoch:
                store.remove(f"{_LEASES}/{name}")

    def _watch(self, epoch: int, former: _State) -> _State:
        """Watch the lease of a run that may be dead until it ends; returns what was read last."""
        end = _now() + LEASE_SECONDS
        while _now() < end and not _is_dead_process(former.holder):
            time.sleep(_LOOK_SECONDS)
            state = self._state(epoch)
            if state is None:  # a third run goes on after this one
                raise self._under_way(None)
            if state.has_ended:
                return state
            if state != former:
                raise self._under_way(state)
        _log.warning("%s: the run (%s) is dead: going on", self._store.address, former)
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
            self._store.write(f"{_path(self._epoch)}{_RENEWED}", b"%d" % self._renewals)
            if self._last_epoch() > self._epoch:
                self._is_lost = True
            else:
                self._valid_until = began + LEASE_SECONDS - MARGIN_SECONDS

    def release(self) -> None:
        """Say that the run has ended, if this object got the lease."""
        with self._lock:
            if self._epoch and not self._is_lost:
                try:
                    if self._epoch == 1 and self._store.names(paths.FOLDER) == [_LEASES.rpartition("/")[2]]:
                        self._store.remove(_LEASES)  # a first run that was refused leaves nothing behind
                        return
                    self._store.write(f"{_path(self._epoch)}{_RENEWED}", _ENDED)
                except LoadError as error:  # the next run waits for the lease's end
                    _log.warning("the next run has to wait for %g s: %s", LEASE_SECONDS, error)

    def _last_epoch(self) -> int:
        names = self._store.names(_LEASES)
        return max((int(name) for name in names if name.isascii() and name.isdecimal()), default=0)

    def _state(self, epoch: int) -> _State | None:
        """What a lease says now; None if there is none."""
        holder = self._store.read(_path(epoch))
        renewed = self._store.read(f"{_path(epoch)}{_RENEWED}")
        return None if holder is None else _State(holder, renewed)

    def _content(self) -> bytes:
        return json.dumps(
            {
                "version": VERSION,
                "token": secrets.token_hex(8),
                "host": socket.gethostname(),
                "process": os.getpid(),
                "instance": _instance(os.getpid()),
                "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            }
        ).encode()

    def _under_way(self, state: _State | None) -> LoadError:
        return under_way(self._store.address, f" ({state})" if state else "")


def under_way(address: str, which: str = "") -> LoadError:
    """The error of a call that finds another run, with what is known of `which` it is."""
    return LoadError(f"another run of the load in {address} is under way{which}: wait for its end")


def _path(epoch: int) -> str:
    return f"{_LEASES}/{epoch:0{_DIGITS}d}"


def _now() -> float:
    """Seconds of a clock that goes on while the machine sleeps, if there is one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _instance(process: int) -> list[str] | None:
    """What tells a process from all others, on all hosts; None if it has ended, or the system does not tell."""
    with suppress(OSError, IndexError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        if state not in "ZX":  # it has ended, and its parent has not noticed
            return [boot, namespace, fields[18]]
    return None


def _is_dead_process(holder: bytes) -> bool:
    """Whether the holder was a process of this system, of which it is known that it has ended."""
    written, own = _parsed(holder), _instance(os.getpid())
    process, instance = written.get("process"), written.get("instance")
    if own is None or not isinstance(process, int) or not isinstance(instance, list) or instance[:2] != own[:2]:
        return False
    return instance != _instance(process) and not _is_hidden(process)


def _is_hidden(process: int) -> bool:
    """Whether there is a process that /proc does not show: hidepid hides those of other users."""
    try:
        Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        try:
            os.kill(process, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except OSError:  # of another user
            return True
        return True
    return False
