"""One connection to one broker: requests out, responses in, in the same order; several may be under way."""

from __future__ import annotations

import logging
import socket
from collections import deque
from typing import Any, NoReturn

from spark_klog.client.config import ClientConfig
from spark_klog.errors import (
    ConnectionFailed,
    DecodeError,
    RequestTimedOut,
    UnsupportedVersionError,
    raise_for_code,
)
from spark_klog.protocol.apis import API_VERSIONS, FETCH, PRODUCE
from spark_klog.protocol.codec import Message, decode_response, encode_request
from spark_klog.protocol.schema import Api
from spark_klog.wire.frames import SIZE, frame_size

_log = logging.getLogger(__name__)
_FIRST_BUFFER = 64 * 1024
_RECEIVE_BUFFER = 4 * 1024 * 1024
#: This client names topics by name; later versions want their ids.
_LAST = {PRODUCE.key: 12, FETCH.key: 12}


class Connection:
    """A connected, negotiated socket. Not for several threads at once.

    `ConnectionFailed` where the broker is not there or goes away, `RequestTimedOut`, `DecodeError` where it answers
    something else than the protocol. After any of them the connection is closed.
    """

    def __init__(self, host: str, port: int, config: ClientConfig) -> None:
        self.address = f"{host}:{port}"
        self._config = config
        self._pending: deque[tuple[Api, int, int]] = deque()
        self._correlation_id = 0
        self._buffer = bytearray(_FIRST_BUFFER)
        self._versions: dict[int, tuple[int, int]] = {}
        try:
            self._socket = socket.create_connection((host, port), config.connect_timeout_ms / 1000)
        except OSError as error:
            raise ConnectionFailed(f"no broker answers at {self.address}: {error}") from None
        self._socket.settimeout(config.request_timeout_ms / 1000)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        self._negotiate()

    def _negotiate(self) -> None:
        answer = self.request(API_VERSIONS, {}, version=0)
        raise_for_code(answer["error_code"], f"ApiVersions at {self.address}")
        for entry in answer["api_keys"]:
            self._versions[entry["api_key"]] = entry["min_version"], entry["max_version"]

    def version_of(self, api: Api) -> int:
        """The highest version that both sides speak; `UnsupportedVersionError` where there is none."""
        if api.key not in self._versions:
            raise UnsupportedVersionError(f"broker {self.address} does not know {api.name}")
        first, last = self._versions[api.key]
        version = min(last, _LAST.get(api.key, api.versions.last))
        if version < max(first, api.versions.first):
            raise UnsupportedVersionError(
                f"broker {self.address} speaks {api.name} {first}-{last}, "
                f"this client {api.versions.first}-{api.versions.last}"
            )
        return version

    @property
    def pending(self) -> int:
        """Requests whose responses have not been received."""
        return len(self._pending)

    def send(self, api: Api, message: Message, *, version: int | None = None, answered: bool = True) -> None:
        """Send a request; `receive` gives its response later, unless none is `answered`."""
        version = self.version_of(api) if version is None else version
        self._correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        writer = encode_request(api, version, self._correlation_id, self._config.client_id, message)
        try:
            self._socket.sendall(SIZE.pack(len(writer)) + writer.to_bytes())
        except OSError as error:
            self._fail(error)
        if answered:
            self._pending.append((api, version, self._correlation_id))

    def receive(self) -> Message:
        """The response to the oldest request under way.

        Its record bytes are views of a buffer that the next `receive` overwrites.
        """
        api, version, correlation_id = self._pending.popleft()
        try:
            size = frame_size(self._read(SIZE.size), self._config.response_max_bytes)
            answered, message = decode_response(api, version, self._read(size))
            if answered != correlation_id:
                raise DecodeError(f"response to request {answered}, {correlation_id} was expected")
        except DecodeError as error:
            self.close()
            raise DecodeError(f"broker {self.address}: {error}") from None
        except OSError as error:
            self._fail(error)
        return message

    def request(self, api: Api, message: Message, *, version: int | None = None) -> Message:
        """Send a request and wait for its response."""
        self.send(api, message, version=version)
        return self.receive()

    def _read(self, size: int) -> memoryview:
        """Exactly `size` bytes in the connection's buffer, which grows only with what has arrived."""
        filled = 0
        while filled < size:
            if filled == len(self._buffer):
                grown = bytearray(min(size, 4 * len(self._buffer)))
                grown[:filled] = self._buffer
                self._buffer = grown
            received = self._socket.recv_into(memoryview(self._buffer)[filled : min(size, len(self._buffer))])
            if received == 0:
                raise ConnectionResetError(f"closed by the broker after {filled} of {size} bytes")
            filled += received
        return memoryview(self._buffer)[:size]

    def _fail(self, error: OSError) -> NoReturn:
        self.close()
        if isinstance(error, TimeoutError):
            seconds = self._config.request_timeout_ms / 1000
            raise RequestTimedOut(f"broker {self.address} did not answer within {seconds:g} s") from None
        raise ConnectionFailed(f"connection to broker {self.address} broke: {error}") from None

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def close(self) -> None:
        self._socket.close()
        self._pending.clear()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
