"""A client with one connection, for requests that other clients do not send."""

from __future__ import annotations

import socket
import struct
from typing import Any

from spark_klog.protocol.codec import decode_response, encode_request
from spark_klog.protocol.schema import Api

#: Some measured work takes minutes.
_TIMEOUT_SECONDS = 300


class Client:
    """A socket, and the frames sent over it."""

    def __init__(self, servers: str) -> None:
        host, _, port = servers.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), _TIMEOUT_SECONDS)
        self._file = self._socket.makefile("rb")

    def send(self, frames: bytes) -> None:
        self._socket.sendall(frames)

    def receive(self) -> bytes:
        (size,) = struct.unpack(">i", self._file.read(4))
        return self._file.read(size)

    def ask(self, api: Api, version: int, message: dict[str, Any]) -> dict[str, Any]:
        self.send(frame(api, version, message))
        return decode_response(api, version, self.receive())[1]

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def frame(api: Api, version: int, message: dict[str, Any]) -> bytes:
    body = encode_request(api, version, 1, "bench", message).to_bytes()
    return struct.pack(">i", len(body)) + body
