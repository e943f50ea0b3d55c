"""A broker that answers fetches with arbitrary bytes."""

from __future__ import annotations

import socketserver
import struct
from typing import NamedTuple

from tests.support.servers.kafka import HOST

TOPIC = "fake"
FETCH, LIST_OFFSETS, METADATA, API_VERSIONS = 1, 2, 3, 18
MAX_FRAME = 100 * 1024 * 1024


class Asked(NamedTuple):
    """A fetch request."""

    offset: int
    max_bytes: int
    total_max_bytes: int | None


def _string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


class FakeBroker(socketserver.ThreadingTCPServer):
    """Supports Fetch up to `version` (at most 3) and, like old brokers, truncates `log` at the requested size.

    It has topic `TOPIC` with partition 0. `log` is (last offset, bytes) of each message.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, version: int) -> None:
        super().__init__((HOST, 0), _Connection)
        self.version = version
        self.log: list[tuple[int, bytes]] = []
        #: The most bytes of records in an answer, whatever is requested.
        self.most = MAX_FRAME
        #: The first offset in answers, whatever is requested; None: the requested one.
        self.start: int | None = None
        #: The high watermark; None: the offset after the last message.
        self.end: int | None = None
        self.asked: list[Asked] = []

    @property
    def _end(self) -> int:
        return self.log[-1][0] + 1 if self.end is None else self.end

    def answer(self, key: int, version: int, body: bytes) -> bytes:
        if key == API_VERSIONS:
            apis = ((FETCH, 0, self.version), (LIST_OFFSETS, 1, 1), (METADATA, 0, 0), (API_VERSIONS, 0, 0))
            return struct.pack(">hi", 0, len(apis)) + b"".join(struct.pack(">hhh", *api) for api in apis)
        if key == METADATA:
            host, port = self.server_address[:2]
            brokers = struct.pack(">ii", 1, 0) + _string(str(host)) + struct.pack(">i", int(port))
            partition = struct.pack(">hiiiiii", 0, 0, 0, 1, 0, 1, 0)
            return brokers + struct.pack(">ih", 1, 0) + _string(TOPIC) + struct.pack(">i", 1) + partition
        topic = struct.pack(">i", 1) + _string(TOPIC) + struct.pack(">ii", 1, 0)
        if key == LIST_OFFSETS:
            timestamp = struct.unpack(">q", body[-8:])[0]
            return topic + struct.pack(">hqq", 0, -1, 0 if timestamp == -2 else self._end)
        assert key == FETCH
        total = struct.unpack_from(">i", body, 12)[0] if version >= 3 else None
        partition_number, offset, max_bytes = struct.unpack(">iqi", body[-16:])
        assert partition_number == 0
        self.asked.append(Asked(offset, max_bytes, total))
        start = offset if self.start is None else self.start
        data = b"".join(message for last, message in self.log if last >= start)[: min(max_bytes, self.most)]
        throttle = struct.pack(">i", 0) if version else b""
        return throttle + topic + struct.pack(">hqi", 0, self._end, len(data)) + data


class _Connection(socketserver.StreamRequestHandler):
    server: FakeBroker

    def handle(self) -> None:
        while len(prefix := self.rfile.read(4)) == 4:
            frame = self.rfile.read(struct.unpack(">i", prefix)[0])
            key, version, correlation_id, size = struct.unpack_from(">hhih", frame)
            answer = self.server.answer(key, version, frame[10 + max(size, 0) :])
            self.wfile.write(struct.pack(">ii", 4 + len(answer), correlation_id) + answer)
