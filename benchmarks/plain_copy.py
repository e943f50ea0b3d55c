"""The bound of a mirror: the same bytes read from one broker and written to another with plain sockets.

The bytes are not processed: requests are built before the clock starts, and responses are parsed after it stops. One
thread reads everything, and then writes everything.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterator

from benchmarks.data import PARTITIONS
from benchmarks.sides import SideFailed
from spark_klog.client.settings import parse_bootstrap
from spark_klog.protocol.apis import FETCH, PRODUCE
from spark_klog.protocol.codec import decode_response, encode_request
from spark_klog.records.formats.batch import iter_batches, next_offset_after
from spark_klog.records.formats.batch_v2 import set_produced
from spark_klog.wire.primitives import SIZE

_FETCH, _PRODUCE = 4, 3
_FETCH_BYTES = 4 * 1024 * 1024
_IN_FLIGHT = 5
_SECONDS = 120.0


class _Plain:
    """A socket that sends frames, and receives them into one buffer."""

    def __init__(self, servers: str) -> None:
        [address] = parse_bootstrap(servers)
        self._socket = socket.create_connection(address, _SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(2 * PARTITIONS * _FETCH_BYTES))

    def send(self, frame: bytes) -> None:
        self._socket.sendall(frame)

    def receive(self) -> memoryview:
        """Return the next response, valid until the next call."""
        [size] = SIZE.unpack(self._exactly(SIZE.size))
        return self._exactly(size)

    def _exactly(self, size: int) -> memoryview:
        filled = 0
        while filled < size:
            received = self._socket.recv_into(self._buffer[filled:size])
            if not received:
                raise SideFailed("the broker closed the connection")
            filled += received
        return self._buffer[:size]

    def close(self) -> None:
        self._socket.close()


def plain_copy(source: str, target: str, topic: str, copy: str) -> float:
    """Copy a topic of `PARTITIONS` partitions to a topic of another broker; return the seconds."""
    read: list[list[bytes]] = []
    reading = _Plain(source)
    seconds = 0.0
    for partition in range(PARTITIONS):
        parts, taken = _read(reading, topic, partition)
        seconds += taken
        read.append(parts)
    reading.close()
    frames = list(_frames(copy, [[bytes(_produced(one)) for part in parts for one in _split(part)] for parts in read]))
    writing = _Plain(target)
    started = time.perf_counter()
    waiting: deque[int] = deque()
    answers = []
    for frame in frames:
        writing.send(frame)
        waiting.append(0)
        if len(waiting) == _IN_FLIGHT:
            waiting.popleft()
            answers.append(bytes(writing.receive()))
    while waiting:
        waiting.popleft()
        answers.append(bytes(writing.receive()))
    seconds += time.perf_counter() - started
    writing.close()
    for answer in answers:
        for entry in decode_response(PRODUCE, _PRODUCE, memoryview(answer))[1]["responses"]:
            for one in entry["partition_responses"]:
                if one["error_code"]:
                    raise SideFailed(f"error {one['error_code']} of {copy}-{one['index']}")
    return seconds


def _read(plain: _Plain, topic: str, partition: int) -> tuple[list[bytes], float]:
    """Read the whole batches of a partition; return them and the seconds of sending and receiving."""
    offset, found, seconds = 0, [], 0.0
    while True:
        entry = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": _FETCH_BYTES}
        request = {
            "max_wait_ms": 0,
            "min_bytes": 0,
            "max_bytes": _FETCH_BYTES,
            "isolation_level": 0,
            "topics": [{"topic": topic, "partitions": [entry]}],
        }
        frame = _framed(encode_request(FETCH, _FETCH, 1, "plain", request).to_bytes())
        started = time.perf_counter()
        plain.send(frame)
        answer = plain.receive()
        seconds += time.perf_counter() - started
        records = decode_response(FETCH, _FETCH, answer)[1]["responses"][0]["partitions"][0]["records"]
        if not records:
            return found, seconds
        offset = next_offset_after(records, offset)
        found.append(bytes(records))


def _split(part: bytes) -> Iterator[memoryview]:
    for _, batch in iter_batches(part):
        yield batch


def _produced(batch: memoryview) -> bytearray:
    data = bytearray(batch)
    set_produced(memoryview(data), -1, -1, -1, is_transactional=False)
    return data


def _frames(topic: str, batches: list[list[bytes]]) -> Iterator[bytes]:
    """Produce requests with one batch of each partition, as brokers accept only one."""
    for number in range(max(map(len, batches))):
        entries = [
            {"index": partition, "records": of_partition[number]}
            for partition, of_partition in enumerate(batches)
            if number < len(of_partition)
        ]
        message = {
            "transactional_id": None,
            "acks": -1,
            "timeout_ms": 30_000,
            "topic_data": [{"name": topic, "partition_data": entries}],
        }
        yield _framed(encode_request(PRODUCE, _PRODUCE, 1, "plain", message).to_bytes())


def _framed(frame: bytes) -> bytes:
    return SIZE.pack(len(frame)) + frame
