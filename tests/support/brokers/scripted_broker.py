"""A cluster of brokers with scripted faults: late, double, empty, throttled or wrong answers.

kafka-python's classes decode requests and encode answers; no protocol code of this package is used. Without a script
the brokers work correctly and keep everything in memory. The faults are in `tests.support.brokers.faults`:

    with ScriptedCluster({"t": 2}, nodes=2) as brokers:
        brokers.append("t", 0, [b"a", b"b"])
        brokers.on("Fetch", error(NOT_LEADER), throttled(300), dropped())  # for the next three Fetch requests
        brokers.always("Metadata", late(0.2))                              # for all requests without another fault
        cluster = Cluster.connect({"bootstrap.servers": brokers.bootstrap_servers})
        ...
        assert brokers.count("Fetch") == 4
        assert brokers.values("t", 0) == [b"a", b"b"]   # all produced values in order, including duplicates

`brokers.leaders["t", 0] = 1` moves a leader (-1: none); `brokers.coordinator` and `brokers.controller` are node ids
too. A node that is not the leader answers NOT_LEADER_OR_FOLLOWER. Produce supports idempotent producers: a repeated
batch gets the same answer again, a gap gets OUT_OF_ORDER_SEQUENCE_NUMBER.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tests.support.brokers.faults import Fault
from tests.support.brokers.kafka_python_wire import Message, decode_request, encode_response, make_records, read_records
from tests.support.brokers.sound_brokers import NOW, SoundBrokers
from tests.support.servers.kafka import HOST


class Asked(NamedTuple):
    """A request that a node received; `at` is from `time.monotonic`, `connection` numbers the cluster's connections."""

    node: int
    connection: int
    name: str
    version: int
    message: Message
    at: float


class ScriptedCluster(SoundBrokers):
    """Brokers 0 to `nodes` - 1, each on its own port. `versions` has (first, last) supported version by API name."""

    def __init__(
        self, topics: Mapping[str, int], nodes: int = 1, versions: Mapping[str, tuple[int, int]] | None = None
    ) -> None:
        self._listeners = [socket.create_server((HOST, 0)) for _ in range(nodes)]
        super().__init__(topics, [listener.getsockname()[1] for listener in self._listeners], versions)
        self.asked: list[Asked] = []
        self._script: dict[str, list[Fault]] = {}
        self._always: dict[str, Fault] = {}
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        for node, listener in enumerate(self._listeners):
            self._start(self._accept, node, listener)

    @classmethod
    def filled(cls, choose: random.Random, values: Sequence[Sequence[bytes]], nodes: int) -> ScriptedCluster:
        """Brokers with topic `t`, whose partitions have these values in batches of random sizes."""
        brokers = cls({"t": len(values)}, nodes)
        for partition, some in enumerate(values):
            brokers.append("t", partition, list(some), size=choose.choice([1, 7, 60]))
        return brokers

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"{HOST}:{port}" for port in self.ports)

    def on(self, name: str, *faults: Fault) -> None:
        """Set one fault for each of the next requests of an API."""
        with self._lock:
            self._script.setdefault(name, []).extend(faults)

    def always(self, name: str, fault: Fault) -> None:
        """Set a fault for all requests of an API, except those with a fault from `on`."""
        with self._lock:
            self._always[name] = fault

    def clear(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._script.clear()
            self._always.clear()

    def append(self, topic: str, partition: int, values: list[bytes], size: int = 1000) -> None:
        """Append records in batches of `size`."""
        with self._changed:
            for start in range(0, len(values), size):
                self.logs[topic, partition].append(make_records(2, values[start : start + size], NOW))
            self._changed.notify_all()

    def values(self, topic: str, partition: int) -> list[bytes]:
        with self._lock:
            data = b"".join(batch for _, batch in self.logs[topic, partition].batches)
        return [value for _, _, value in read_records(data)]

    def count(self, name: str) -> int:
        """The number of requests of an API so far."""
        with self._lock:
            return sum(asked.name == name for asked in self.asked)

    def close(self) -> None:
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
            for item in [*self._listeners, *self._sockets]:
                try:
                    item.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
                item.close()
        for thread in self._threads:
            thread.join(20)

    def __enter__(self) -> ScriptedCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, run: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, node: int, listener: socket.socket) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self._sockets.append(connection)
                number = len(self._sockets)
            self._start(self._serve, node, number, connection)

    def _serve(self, node: int, number: int, connection: socket.socket) -> None:
        held: list[bytes] = []
        with connection:
            try:
                while (frame := _read_frame(connection)) is not None:
                    if not self._answer(node, number, connection, frame, held):
                        return
            except OSError:
                pass

    def _answer(self, node: int, number: int, connection: socket.socket, frame: bytes, held: list[bytes]) -> bool:
        """Serve one request; return False to close the connection."""
        request = decode_request(frame)
        with self._lock:
            self.asked.append(Asked(node, number, request.name, request.version, request.message, time.monotonic()))
            script = self._script.get(request.name)
            fault = script.pop(0) if script else self._always.get(request.name, Fault())
        answer = self._handle(node, request, fault.is_applied)
        if fault.delay and self._stopping.wait(fault.delay):
            return False
        if answer is not None and fault.times:
            fault.change(answer)
            data = fault.rewrite(encode_response(request, answer))
            framed = struct.pack(">i", len(data)) + data
            if fault.is_held:
                held.append(framed)
                return True
            self._send(connection, framed * fault.times, fault.drip)
            for earlier in held:
                connection.sendall(earlier)
            held.clear()
        return not fault.closes

    def _send(self, connection: socket.socket, data: bytes, drip: float) -> None:
        if not drip:
            connection.sendall(data)
            return
        for position in range(len(data)):
            connection.sendall(data[position : position + 1])
            if self._stopping.wait(drip):
                return


def _read_frame(connection: socket.socket) -> bytes | None:
    """Read a frame; None at the end of the connection."""
    data = bytearray()
    size = 4
    while len(data) < size:
        received = connection.recv(size - len(data))
        if not received:
            return None
        data += received
        if len(data) == 4:
            size = 4 + struct.unpack(">i", data)[0]
    return bytes(data[4:])
