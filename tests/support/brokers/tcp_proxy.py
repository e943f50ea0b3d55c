"""A TCP proxy that delays, splits and coalesces data and cuts connections, in both directions; never reorders bytes.

With `latency` it is a long line.

with TcpProxy(port, broker.port, seed=7) as proxy:
    proxy.disturb()
    ...  # clients use the proxy's port, which the broker advertises
    proxy.calm()
"""

from __future__ import annotations

import random
import select
import socket
import threading
import time

from tests.support.servers.kafka import HOST

_MOST = 1 << 16


class TcpProxy:
    """Forwards to port `target` of the same host, with a random fault for some of the chunks that arrive."""

    def __init__(self, port: int, target: int, seed: int = 0, *, latency: float = 0.0) -> None:
        """`latency`: seconds that all data take, each way."""
        self.port, self._target = port, target
        self._latency = latency
        self._choose = random.Random(seed)
        self._faulty = False
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        #: Accepted connections.
        self.connections = 0
        #: Cut connections.
        self.cuts = 0
        self._listener = socket.create_server((HOST, port))
        self._start(self._accept)

    def disturb(self) -> None:
        """Start injecting faults."""
        self._faulty = True

    def calm(self) -> None:
        """Stop injecting faults."""
        self._faulty = False

    def close(self) -> None:
        self._stopping.set()
        with self._lock:
            for item in [self._listener, *self._sockets]:
                _end(item)
        for thread in self._threads:
            thread.join(20)

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, run: object, *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            try:
                server = socket.create_connection((HOST, self._target), 5)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sockets += [client, server]
                seeds = self._choose.random(), self._choose.random()
            self._start(self._pass, client, server, seeds[0])
            self._start(self._pass, server, client, seeds[1])

    def _pass(self, source: socket.socket, sink: socket.socket, seed: float) -> None:
        choose = random.Random(seed)
        try:
            while data := source.recv(_MOST):
                if self._latency:
                    self._stopping.wait(self._latency)
                if self._faulty:
                    data = self._hurt(source, sink, data, choose)
                sink.sendall(data)
        except OSError:
            pass
        _end(source)
        _end(sink)

    def _hurt(self, source: socket.socket, sink: socket.socket, data: bytes, choose: random.Random) -> bytes:
        """Inject at most one fault; return the bytes still to send."""
        kind = choose.random()
        if kind < 0.02:
            self.cuts += 1
            sink.sendall(data[: choose.randrange(len(data) + 1)])  # none, some or all arrive
            raise OSError("cut")
        if kind < 0.10:  # delay
            self._stopping.wait(choose.choice([0.01, 0.05, 0.3]))
        elif kind < 0.20:  # coalesce with the next chunks
            until = time.monotonic() + 0.05
            while time.monotonic() < until and select.select([source], [], [], 0.02)[0]:
                if not (more := source.recv(_MOST)):
                    break
                data += more
        elif kind < 0.35:  # split off small chunks
            for _ in range(choose.randrange(1, 6)):
                size = choose.choice([1, 3, 4, 5, 100])
                sink.sendall(data[:size])
                data = data[size:]
                self._stopping.wait(0.002)
        return data


def _end(item: socket.socket) -> None:
    try:
        item.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    item.close()
