"""Admin clients for the driver's steps: a Python worker keeps them for the next micro-batch.

Spark reuses the workers that claim and decide. A new client connects, negotiates and authenticates each time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from spark_klog.client.admin.admin import Admin
from spark_klog.client.cluster import Cluster
from spark_klog.spark.options.names import PREFIX

#: A worker rarely serves queries with more different settings; each client has a connection to a broker.
_MOST_IDLE = 4
#: After that a new connection is safer: proxies drop quiet ones. Spark stops workers that are idle for a minute.
_IDLE_SECONDS = 60.0
_Key = tuple[tuple[str, str], ...]


class Clients:
    """Idle clients by their settings. Threads may share it; each borrowed client belongs to one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: With the reading of `time.monotonic` since when; the longest idle first.
        self._idle: list[tuple[_Key, Admin, float]] = []

    @contextmanager
    def borrow(self, settings: Mapping[str, str]) -> Iterator[Admin]:
        """A client for one step, which looks the coordinators of its transactions up once.

        If the block fails, the client is closed. Raises what `Cluster.connect` raises.
        """
        key = tuple(sorted(settings.items()))
        admin = self._take(key) or Admin(Cluster.connect(settings, PREFIX))
        try:
            with admin.same_coordinators():
                yield admin
        except BaseException:
            admin.close()
            raise
        with self._lock:
            self._idle.append((key, admin, time.monotonic()))
            self._close_outdated()

    def _take(self, key: _Key) -> Admin | None:
        with self._lock:
            self._close_outdated()
            for entry in reversed(self._idle):
                if entry[0] == key:
                    self._idle.remove(entry)
                    return entry[1]
        return None

    def _close_outdated(self) -> None:
        """Close clients beyond the bounds of number and time. The caller holds the lock."""
        oldest = time.monotonic() - _IDLE_SECONDS
        kept = [entry for entry in self._idle[-_MOST_IDLE:] if entry[2] > oldest]
        for entry in self._idle:
            if entry not in kept:
                entry[1].close()
        self._idle = kept

    def forget(self) -> None:
        """Close the idle clients. A forked process calls this first, as it shares its parent's connections."""
        self._lock = threading.Lock()  # in the parent another thread may hold the old one
        idle, self._idle = self._idle, []
        for _, admin, _ in idle:
            admin.close()


#: The clients of this process.
CLIENTS = Clients()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=CLIENTS.forget)
