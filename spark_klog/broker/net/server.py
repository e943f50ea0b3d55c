"""The server: listens, passes requests to their handlers, shuts down in order.

Orderly shutdown of a broker: no acknowledged record is lost, and the next start needs no recovery.

1. the listeners are closed
2. requests already received are answered, within 5 seconds; waiting fetches return what is available
3. connections are closed
4. housekeeping and the cleaner end
5. logs are flushed and closed; checkpoints and the marker of a clean shutdown are written
6. the broker's registration is removed

`drain` does 2 and 3, its caller the rest. A second signal ends step 2 at once; during a later step it kills the
process, as signals do by default, and the next start recovers.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Collection
from contextlib import ExitStack
from time import perf_counter

from spark_klog.base.names import PLAINTEXT
from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.event_loop import MAX_ID_LENGTH, has_many_elements, short_collections
from spark_klog.broker.fetches import Purgatory
from spark_klog.broker.handlers import HANDLERS, credentials
from spark_klog.broker.housekeeping import clean_logs, keep_house
from spark_klog.broker.net.acceptor import Acceptor, ConnectionLimits
from spark_klog.broker.net.connection import Connection, Connections, watch
from spark_klog.broker.security.config import Listener
from spark_klog.broker.security.mechanisms import Refused
from spark_klog.broker.security.session import Session
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.errors import DecodeError, ErrorCode
from spark_klog.protocol.apis import API_VERSIONS, BY_KEY, PRODUCE
from spark_klog.protocol.codec import decode_request, decode_request_header, encode_response
from spark_klog.trees.paths import host_and_port
from spark_klog.wire.listening import bind
from spark_klog.wire.primitives import AllowanceExceeded, Reader, Writer

_log = logging.getLogger(__name__)
_DRAIN_SECONDS = 5.0
_LOOK_SECONDS = 0.01
#: Interval after which a working thread yields to the event loop; each of the loop's system calls may wait that long.
_SWITCH_SECONDS = 0.001
#: Bytes that a request's decoded elements may take beyond twice its frame; enough to commit 50,000 offsets.
_DECODED_MAX = 24 * 1024 * 1024
#: Bytes of a frame that may take milliseconds to decode; of a Produce the records are not decoded, only checked.
_LONG_FRAME = 16 * 1024
#: Allowance for decoding in the event loop, which then takes a few milliseconds.
_DECODED_AT_ONCE = 512 * 1024
#: Less memory than that is not counted: a connection has one decoded request at a time.
_UNCOUNTED_BYTES = 8 * 1024


class StopSignals:
    """SIGTERM and SIGINT: events for the first and the second signal."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._came)

    def _came(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def drain(purgatory: Purgatory, connections: Collection[Connection], at_once: asyncio.Event) -> None:
    """Close `connections` (a live collection) within the deadline, or as soon as `at_once` is set."""
    purgatory.close()
    deadline = asyncio.get_running_loop().time() + _DRAIN_SECONDS
    while connections and not at_once.is_set() and asyncio.get_running_loop().time() < deadline:
        for connection in list(connections):  # each round: one may have been accepted just before the listener closed
            connection.finish()
        await asyncio.sleep(_LOOK_SECONDS)
    if connections:
        _log.warning("%d connections closed with requests under way", len(connections))
        for connection in list(connections):
            connection.abort()
        await asyncio.sleep(0)


class Server:
    """Serves one broker on its listeners."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.connections = Connections(broker.config, broker.metrics, broker.turns, self.answer)

    async def answer(self, frame: bytearray, session: Session) -> Writer | None:
        """Answer a request; None if it has no response (Produce with acks=0).

        Raises, to close the connection, `DecodeError` for an unknown API or version or a message that does not decode,
        and `Refused` if the client may not send it. ApiVersions of an unknown version gets a version 0 response with
        error 35, so that the client can choose another version (KIP-35).
        """
        if session.takes_raw_tokens:
            token = Writer()
            token.raw(await credentials.step(self.broker, session, frame))
            return token
        reader = Reader(frame, _DECODED_AT_ONCE)
        key, version, correlation_id = decode_request_header(reader)
        if not session.admits(key):
            raise Refused(f"API {key} before authentication")
        api = BY_KEY.get(key)
        if api is None or version not in api.versions:
            if api is API_VERSIONS:
                message = HANDLERS[key](self.broker, Request(0, None, session), {})
                assert isinstance(message, dict)
                message["error_code"] = ErrorCode.UNSUPPORTED_VERSION
                return encode_response(api, 0, correlation_id, message)
            client_id = reader.nullable_string()
            raise DecodeError(f"client {client_id!r} sent API {key} version {version}, which is not supported")
        broker = self.broker
        turns, is_counted = broker.turns, broker.metrics.is_read
        started = perf_counter() if is_counted else 0.0
        is_long = len(frame) > _LONG_FRAME and not (api is PRODUCE and turns.has_room(len(frame)))
        if is_long or turns.is_over():
            await turns.take(before_long_step=is_long)
        start = reader.position
        try:
            client_id, request = decode_request(api, version, reader)
            decoded_bytes = _DECODED_AT_ONCE - int(reader.allowance)
        except AllowanceExceeded:
            allowance = _DECODED_MAX + 2 * len(frame)
            reader.position, reader.allowance = start, allowance
            client_id, request = await asyncio.to_thread(decode_request, api, version, reader)
            decoded_bytes = int(allowance - reader.allowance)
        if client_id is not None and len(client_id) > MAX_ID_LENGTH:
            raise DecodeError(f"client id of {len(client_id)} characters, at most {MAX_ID_LENGTH} are allowed")
        if decoded_bytes < _UNCOUNTED_BYTES:
            decoded_bytes = 0
        else:
            self.connections.frame_memory.take(decoded_bytes)
        try:
            answer = HANDLERS[key](broker, Request(version, client_id, session), request)
            response = answer if answer is None or isinstance(answer, dict) else await answer
            if response is None:
                encoded = None
            elif has_many_elements(response):
                encoded = await asyncio.to_thread(encode_response, api, version, correlation_id, response)
            else:
                if turns.is_over():
                    await turns.take()
                encoded = encode_response(api, version, correlation_id, response)
            if is_counted:
                broker.note_answered(api, response, perf_counter() - started)
            return encoded
        finally:
            if decoded_bytes:
                self.connections.frame_memory.give_back(decoded_bytes)


async def _serve(
    server: Server,
    listening: dict[Listener, socket.socket],
    metrics: socket.socket | None,
    ready: Callable[[str], None],
    stopping: Callable[[], None] | None,
) -> None:
    broker, loop = server.broker, asyncio.get_running_loop()
    signals = StopSignals(loop)
    sys.setswitchinterval(_SWITCH_SECONDS)
    security = broker.config.security
    tls = None
    if any(listener.is_tls for listener in listening):
        from spark_klog.broker.security.tls import server_context

        tls = server_context(security)
    broker.start(security.endpoints(list(listening)))
    broker.follower.watch()
    loading = loop.create_task(broker.coordinator.load())
    background = [
        loading,
        loop.create_task(broker.transactions.run(loading)),
        loop.create_task(keep_house(broker)),
        loop.create_task(watch(server.connections.opened, broker.config)),
    ]
    if broker.config.cleaner_enabled:
        cleaner = clean_logs(broker.logs, broker.config, lambda: broker.transactions.is_loading)  # they are loaded last
        background.append(loop.create_task(cleaner))
    for task in background:
        task.add_done_callback(_log_failure)
    config = broker.config
    limits = ConnectionLimits(config.max_connections, config.max_connections_per_ip, broker.metrics)
    acceptors: list[Acceptor | asyncio.Server] = [
        Acceptor(broker, server.connections, limits, listener, opened, tls if listener.is_tls else None)
        for listener, opened in listening.items()
    ]
    if metrics is not None:
        from spark_klog.broker.metrics_page import page
        from spark_klog.metrics import metrics_page
        from spark_klog.wire.http import HttpServer

        broker.metrics.is_read = True
        _log.info("metrics at http://%s/metrics", host_and_port(*metrics.getsockname()[:2]))
        pages = metrics_page(lambda: page(broker, len(server.connections.opened)))
        acceptors.append(await HttpServer(pages).listen(metrics))
    _log.info("listening on %s", ", ".join(map(str, listening)))
    first = next(iter(listening))
    ready(f"klog broker {broker.config.broker_id} ready on {host_and_port(first.host, first.port)}")
    await signals.first.wait()
    _log.info("stopping")
    if stopping is not None:
        stopped = asyncio.ensure_future(asyncio.to_thread(stopping))
        hurried = asyncio.ensure_future(signals.second.wait())
        await asyncio.wait((stopped, hurried), return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
    for acceptor in acceptors:
        acceptor.close()
    broker.coordinator.stop()
    await drain(broker.purgatory, server.connections.opened, signals.second)
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    await broker.changes.ended()


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log the failure of a background task when it happens: nothing awaits the task before the broker stops."""
    if not task.cancelled() and (error := task.exception()) is not None:
        coroutine = task.get_coro()
        _log.error(
            "%s ended, restart the broker: %s", getattr(coroutine, "__qualname__", coroutine), error, exc_info=error
        )


def run(
    config: BrokerConfig,
    ready: Callable[[str], None],
    make_server: Callable[[Broker], Server] = Server,
    stopping: Callable[[], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; call `ready` with the line to print once requests are answered.

    `stopping` is called in a thread before it stops: requests are answered until that returns, or a second signal
    comes. `drain` says how it stops. Raises `ConfigError`, `LogDirLocked`, `LogCorrupted` or `DirectoryError` if the
    broker can't start.
    """
    listeners = config.security.listeners or (Listener(PLAINTEXT, PLAINTEXT, config.host, config.port),)
    with ExitStack() as sockets:
        listening = {}
        for listener in listeners:
            opened = sockets.enter_context(bind(listener.host, listener.port))
            listening[listener._replace(port=opened.getsockname()[1])] = opened
        metrics = None
        if config.metrics_address is not None:
            metrics = sockets.enter_context(bind(*config.metrics_address, option="--metrics"))
        broker = Broker(config)
        try:
            with short_collections():
                asyncio.run(_serve(make_server(broker), listening, metrics, ready, stopping))
        finally:
            broker.close()
    _log.info("stopped")
