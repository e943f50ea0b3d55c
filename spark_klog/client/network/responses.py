"""Requests in flight on one connection, and responses that arrived while it waited for another one."""

from __future__ import annotations

from dataclasses import dataclass

from spark_klog.errors import DecodeError
from spark_klog.protocol.schema import Api


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A request in flight on one connection."""

    correlation_id: int
    api: Api
    version: int


class Responses:
    """Handles that wait for responses, and up to `max_bytes` of responses that wait for their handles."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pending: dict[int, Handle] = {}
        self._forgotten: set[int] = set()
        self._arrived: dict[int, bytes] = {}
        self._arrived_bytes = 0
        #: The Fetch response that was read last, still in the stream's buffer, with its correlation id.
        self.at_hand: tuple[int, memoryview] | None = None

    def __len__(self) -> int:
        """The number of requests whose responses were neither received nor forgotten."""
        return len(self._pending)

    def expect(self, handle: Handle) -> Handle:
        """Note that a request is sent; returns its handle."""
        self._pending[handle.correlation_id] = handle
        return handle

    def end(self, handle: Handle) -> bool:
        """Stop expecting a response, which is received now or forgotten; False if it is not expected."""
        if self._pending.get(handle.correlation_id) is not handle:
            return False
        del self._pending[handle.correlation_id]
        return True

    def forget(self, handle: Handle) -> None:
        """Drop the response when it arrives."""
        self._forgotten.add(handle.correlation_id)

    def has(self, handle: Handle) -> bool:
        """Whether the response has arrived."""
        is_at_hand = self.at_hand is not None and self.at_hand[0] == handle.correlation_id
        return is_at_hand or handle.correlation_id in self._arrived

    def take(self, handle: Handle) -> memoryview | bytes | None:
        """The response if it has arrived."""
        if self.at_hand is not None and self.at_hand[0] == handle.correlation_id:
            (_, view), self.at_hand = self.at_hand, None
            return view
        frame = self._arrived.pop(handle.correlation_id, None)
        self._arrived_bytes -= len(frame or b"")
        return frame

    def keep_at_hand(self) -> None:
        """Copy the response at hand before the stream's buffer is read into again."""
        if self.at_hand is not None:
            (correlation_id, frame), self.at_hand = self.at_hand, None
            self.put_aside(correlation_id, frame)

    def put_aside(self, correlation_id: int, frame: memoryview) -> None:
        """Keep a copy of a response for its handle; `DecodeError` if no request expects it."""
        if correlation_id in self._forgotten:
            self._forgotten.remove(correlation_id)
            return
        if correlation_id not in self._pending or correlation_id in self._arrived:
            raise DecodeError(f"response to request {correlation_id}, which is not under way")
        if self._arrived_bytes + len(frame) > self._max_bytes:
            raise ConnectionResetError(f"more than {self._max_bytes} bytes of responses not received")
        self._arrived[correlation_id] = bytes(frame)
        self._arrived_bytes += len(frame)

    def clear(self) -> None:
        """Forget everything: the connection is closed."""
        self._pending.clear()
        self._forgotten.clear()
        self._arrived.clear()
        self._arrived_bytes = 0
        self.at_hand = None
