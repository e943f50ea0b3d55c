"""A socket that sends hand-made requests to a broker."""

from __future__ import annotations

import socket
import struct
from typing import Any

from spark_klog.protocol.apis import FETCH, PRODUCE
from spark_klog.protocol.codec import decode_response, encode_request
from spark_klog.protocol.schema import Api
from tests.support.servers.kafka import HOST

CLIENT_ID = "nosy-client"
_CORRELATION_ID = 7


def error_codes(answer: Any) -> list[int]:
    """All error codes in an answer or in a part of it."""
    if isinstance(answer, dict):
        own = [answer[name] for name in ("error_code", "partition_error_code") if name in answer]
        return own + [code for entry in answer.values() for code in error_codes(entry)]
    return [code for entry in answer for code in error_codes(entry)] if isinstance(answer, (list, tuple)) else []


class RawClient:
    """A socket that sends frames."""

    def __init__(self, port: int, timeout: float = 20, source: str = "") -> None:
        """`source`: the address to connect from, such as 127.0.0.2."""
        self.socket = socket.create_connection((HOST, port), timeout, (source, 0))

    def send_frame(self, frame: bytes) -> None:
        self.socket.sendall(struct.pack(">i", len(frame)) + frame)

    def receive_frame(self) -> bytes:
        (size,) = struct.unpack(">i", self.receive_exactly(4))
        return self.receive_exactly(size)

    def receive_exactly(self, size: int) -> bytes:
        """Receive `size` bytes; ConnectionResetError if the broker closes first."""
        data = bytearray()
        while len(data) < size:
            received = self.socket.recv(size - len(data))
            if not received:
                raise ConnectionResetError("closed by the broker")
            data += received
        return bytes(data)

    def request(self, api: Api, version: int, message: dict[str, Any]) -> dict[str, Any]:
        self.send_frame(encode_request(api, version, _CORRELATION_ID, CLIENT_ID, message).to_bytes())
        correlation_id, answer = decode_response(api, version, self.receive_frame())
        assert correlation_id == _CORRELATION_ID
        return answer

    def produce(self, topic: str, records: bytes | None, version: int) -> tuple[int, int]:
        """Produce to partition 0; return (error code, base offset)."""
        data = [{"name": topic, "partition_data": [{"index": 0, "records": records}]}]
        answer = self.request(PRODUCE, version, {"acks": -1, "timeout_ms": 1000, "topic_data": data})
        entry = answer["responses"][0]["partition_responses"][0]
        return entry["error_code"], entry["base_offset"]

    def fetch(
        self, topic: str, offset: int, version: int, max_bytes: int = 1_000_000, index: int = 0
    ) -> tuple[int, bytes]:
        """Fetch one partition without waiting; return (error code, records)."""
        partition = {"partition": index, "fetch_offset": offset, "partition_max_bytes": max_bytes}
        request = {"max_wait_ms": 0, "min_bytes": 1, "topics": [{"topic": topic, "partitions": [partition]}]}
        entry = self.request(FETCH, version, request)["responses"][0]["partitions"][0]
        return entry["error_code"], bytes(entry["records"] or b"")

    def is_closed(self) -> bool:
        """Whether the broker closes the connection without sending a byte; TimeoutError if it does neither."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
