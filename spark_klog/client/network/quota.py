"""A broker's throttling of this client (KIP-219)."""

from __future__ import annotations

import logging
import time

from spark_klog.errors import RequestTimedOut

_log = logging.getLogger(__name__)


class Quota:
    """How long a broker wants no requests on a connection."""

    def __init__(self, address: str) -> None:
        self._address = address
        #: End of the throttling, a reading of `time.monotonic`.
        self.until = 0.0

    def note(self, throttle_time_ms: int) -> None:
        """Take the throttle time of a response; it does not shorten that of an earlier one, 0 changes nothing."""
        if throttle_time_ms > 0:
            self.until = max(self.until, time.monotonic() + throttle_time_ms / 1000)

    def wait(self, deadline: float) -> None:
        """Wait until the throttling ends; `RequestTimedOut` if that is after the deadline."""
        if not self.until:
            return
        pause = self.until - time.monotonic()
        if self.until > deadline:
            raise RequestTimedOut(f"broker {self._address} throttles this client (quota) for {pause:.1f} s more")
        if pause > 0:
            _log.info("broker %s throttles this client for %.3f s", self._address, pause)
            time.sleep(pause)
        self.until = 0.0
