"""Metrics served from a thread of their own, for programs without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable

from spark_klog.metrics.http import MetricsServer
from spark_klog.wire.listening import bind, parse_listen

#: The host of an address that is a port alone.
LOOPBACK = "127.0.0.1"
_CLOSE_SECONDS = 5.0


class MetricsThread:
    """Serves http://ADDRESS/metrics until `close`.

    `address` is HOST:PORT, or a port of 127.0.0.1; port 0 picks a free one. The thread calls `page` for each request,
    which returns the lines. Raises `ConfigError`, which names `option`, if the address is malformed or in use.
    """

    def __init__(self, address: str, page: Callable[[], Iterable[str]], option: str = "--metrics") -> None:
        host, port = parse_listen(address, option, LOOPBACK)
        self._listener = bind(host, port, option)
        found = self._listener.getsockname()
        self.address = f"[{found[0]}]:{found[1]}" if ":" in found[0] else f"{found[0]}:{found[1]}"
        self._page = page
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="klog-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await MetricsServer(self._page).listen(self._listener)
        try:
            await self._stop.wait()
        finally:
            server.close()

    def close(self) -> None:
        """Stop listening. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_CLOSE_SECONDS)
