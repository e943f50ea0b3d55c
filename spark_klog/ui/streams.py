"""Server-sent events: a view again and again, or the steps of a search. And downloads, with the same limit.

    event: NAME
    data: JSON

At most 32 streams at a time. A stream that its reader leaves ends with it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from spark_klog.errors import KlogError
from spark_klog.ui.guard import RequestRefused

_MAX_STREAMS = 32
_EVENT_STREAM = "text/event-stream"


def event(name: str, data: Any) -> bytes:
    """Encode an event."""
    return f"event: {name}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()


class Streams:
    """Starts streams, up to their number's limit."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(_MAX_STREAMS)
        self._is_closing = asyncio.Event()

    def close(self) -> None:
        """End all streams soon."""
        self._is_closing.set()

    def repeat(self, look: Callable[[], Any], seconds: float) -> StreamingResponse:
        """Send what `look` returns every `seconds` seconds, as event `view`; an error as event `trouble`."""
        self._take()

        async def events() -> AsyncIterator[bytes]:
            try:
                while not self._is_closing.is_set():
                    try:
                        yield event("view", await run_in_threadpool(look))
                    except (KlogError, OSError) as error:
                        yield event("trouble", {"error": str(error)})
                    try:
                        await asyncio.wait_for(self._is_closing.wait(), seconds)
                    except asyncio.TimeoutError:
                        pass
            finally:
                self._places.release()

        return StreamingResponse(events(), media_type=_EVENT_STREAM)

    def steps(self, work: Iterator[dict[str, Any]]) -> StreamingResponse:
        """Send each step of `work`, {NAME: DATA}, as an event NAME; an error as event `trouble`."""
        self._take()

        async def events() -> AsyncIterator[bytes]:
            try:
                while not self._is_closing.is_set():
                    try:
                        step = await run_in_threadpool(next, work, None)
                    except (KlogError, OSError) as error:
                        yield event("trouble", {"error": str(error)})
                        return
                    if step is None:
                        return
                    for name, data in step.items():
                        yield event(name, data)
            finally:
                await asyncio.shield(run_in_threadpool(work.close))  # type: ignore[attr-defined]
                self._places.release()

        return StreamingResponse(events(), media_type=_EVENT_STREAM)

    def download(self, work: Iterator[bytes], name: str, media_type: str) -> StreamingResponse:
        """Send the pieces of a file."""
        self._take()

        async def pieces() -> AsyncIterator[bytes]:
            try:
                while not self._is_closing.is_set():
                    piece = await run_in_threadpool(next, work, None)
                    if piece is None:
                        return
                    yield piece
            finally:
                await asyncio.shield(run_in_threadpool(work.close))  # type: ignore[attr-defined]
                self._places.release()

        saved_as = f"attachment; filename*=UTF-8''{quote(name, safe='')}"
        return StreamingResponse(pieces(), media_type=media_type, headers={"Content-Disposition": saved_as})

    def _take(self) -> None:
        if not self._places.acquire(blocking=False):
            raise RequestRefused(503, f"there are {_MAX_STREAMS} live views, searches and exports already: close some")
