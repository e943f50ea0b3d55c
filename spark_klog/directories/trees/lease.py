"""Until when a session with ZooKeeper certainly lives, by the clock.

A process that stood still (SIGSTOP, a paused virtual machine) goes on as if nothing had happened: its own threads learn
only later that ZooKeeper has ended its session, and that others have acted without it. So requests of our own, beats,
note when they were sent: the session lives at least its timeout longer than the last one that ZooKeeper answered.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from spark_klog.directories.trees.zookeeper_session import ZooKeeperSession

_BEATS_PER_TIMEOUT = 6
_MAX_PAUSE_SECONDS = 1.0
_Clocks = tuple[float, float]


def _clocks() -> _Clocks:
    """Seconds of two clocks: one that counts suspended time, if there is one, and the wall clock.

    In a paused virtual machine the first may stand still as well; the wall clock is set later.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)), time.time()


def _seconds_since(then: _Clocks) -> float:
    clock, wall = _clocks()
    return max(clock - then[0], wall - then[1])


class SessionLease:
    """`Lease` of a session with ZooKeeper; a thread sends the beats until `stop`."""

    def __init__(self, session: ZooKeeperSession) -> None:
        self._zookeeper = session
        self._session: int | None = None
        #: When the last beat that was answered was sent, in the session of that id.
        self._answered: tuple[int, _Clocks] | None = None
        #: When the beat under way was sent.
        self._sent: _Clocks | None = None
        #: Whether this process stood still, and ZooKeeper has not answered since.
        self._stood_still = False
        self._was_cut_off, self._looked_at = False, _clocks()
        self._wakes = threading.Event()
        self._is_stopped = False
        self.restored(session.session_id)
        self._thread = threading.Thread(target=self._run, name="klog-zookeeper-beats", daemon=True)
        self._thread.start()

    @property
    def session(self) -> int | None:
        return self._session

    @property
    def holds(self) -> bool:
        answered = self._answered
        return (
            answered is not None
            and answered[0] == self._session
            and _seconds_since(answered[1]) < self._zookeeper.timeout_seconds
        )

    @property
    def is_cut_off(self) -> bool:
        return (
            self._was_cut_off
            and not self._zookeeper.client.connected
            and _seconds_since(self._looked_at) < self._zookeeper.timeout_seconds
        )

    def restored(self, session: int | None) -> None:
        """Note that the session of that id has the ephemeral nodes now."""
        self._session = session
        self._wakes.set()

    def stop(self) -> None:
        """End the thread."""
        self._is_stopped = True
        self._wakes.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopped:
            self._wakes.clear()
            self._look()
            pause = self._zookeeper.timeout_seconds / _BEATS_PER_TIMEOUT
            self._wakes.wait(min(_MAX_PAUSE_SECONDS, pause))

    def _look(self) -> None:
        if _seconds_since(self._looked_at) >= self._zookeeper.timeout_seconds:
            self._stood_still = True
        is_connected = self._zookeeper.client.connected
        self._was_cut_off = not is_connected and not self._stood_still
        self._looked_at = _clocks()  # last: it makes `is_cut_off` true
        # kazoo may lose a request that is sent in the moment in which a session ends
        if is_connected and (self._sent is None or _seconds_since(self._sent) >= self._zookeeper.timeout_seconds):
            self._beat()

    def _beat(self) -> None:
        session, sent = self._zookeeper.session_id, _clocks()

        def answered(result: Any) -> None:
            self._sent = None
            if result.successful() and session is not None and session == self._zookeeper.session_id:
                self._answered = session, sent
                if _seconds_since(sent) < self._zookeeper.timeout_seconds:
                    self._stood_still = False

        self._sent = sent
        self._zookeeper.client.exists_async(self._zookeeper.real("/")).rawlink(answered)
