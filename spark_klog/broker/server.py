"""The server: listens, hands requests to their handlers, stops in order."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import socket
from collections.abc import Callable

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.config import BrokerConfig
from spark_klog.broker.connection import Connection
from spark_klog.broker.handlers import HANDLERS
from spark_klog.broker.housekeeping import keep_house
from spark_klog.broker.log_cleaner import clean_logs
from spark_klog.errors import ConfigError, DecodeError, ErrorCode
from spark_klog.protocol.apis import API_VERSIONS, BY_KEY
from spark_klog.protocol.codec import decode_request, decode_request_header, encode_response
from spark_klog.wire.primitives import Reader, Writer

_log = logging.getLogger(__name__)
_BACKLOG = 512


class Server:
    """Serves one broker on one address."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.connections: set[Connection] = set()

    async def answer(self, frame: bytearray, peer: str) -> Writer | None:
        """The response to a request; None where it wants none (Produce with acks=0).

        `DecodeError` where the connection must be closed: an unknown API or version, or a message that does not
        decode. ApiVersions of an unknown version is answered by version 0 with error 35, so that the client can
        choose another one (KIP-35).
        """
        reader = Reader(frame)
        key, version, correlation_id = decode_request_header(reader)
        api = BY_KEY.get(key)
        if api is None or version not in api.versions:
            if api is API_VERSIONS:
                message = HANDLERS[key](self.broker, Request(0, None, peer), {})
                assert isinstance(message, dict)
                message["error_code"] = ErrorCode.UNSUPPORTED_VERSION
                return encode_response(api, 0, correlation_id, message)
            client_id = reader.nullable_string()
            raise DecodeError(f"client {client_id!r} asks for API {key} version {version}, which is not served")
        client_id, message = decode_request(api, version, reader)
        answer = HANDLERS[key](self.broker, Request(version, client_id, peer), message)
        response = await answer if inspect.isawaitable(answer) else answer
        return None if response is None else encode_response(api, version, correlation_id, response)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; `ConfigError` where the address can't be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]  # the address is told already
        raise ConfigError(f"can't listen on {host}:{port}: {reason}; choose another --listen") from None


async def _serve(server: Server, listener: socket.socket, host: str, ready: Callable[[str], None]) -> None:
    broker = server.broker
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    port = listener.getsockname()[1]
    broker.start(host, port)
    broker.watch()
    background = [loop.create_task(keep_house(broker.logs, broker.config))]
    if broker.config.cleaner_enabled:
        background.append(loop.create_task(clean_logs(broker.logs, broker.config)))
    listening = await loop.create_server(lambda: Connection(server), sock=listener)
    ready(f"klog broker {broker.config.broker_id} ready on {host}:{port}")
    await stop.wait()
    for task in background:
        task.cancel()
    _log.info("stopping")
    listening.close()
    for connection in list(server.connections):
        connection.close()
    await asyncio.sleep(0)


def run(config: BrokerConfig, ready: Callable[[str], None], make_server: Callable[[Broker], Server] = Server) -> None:
    """Serve until SIGTERM or SIGINT; `ready` is told the line to print once requests are answered.

    `ConfigError`, `LogDirLocked`, `LogCorrupted` or `DirectoryError` where the broker can't start.
    """
    with bind(config.host, config.port) as listener:
        broker = Broker(config)
        try:
            asyncio.run(_serve(make_server(broker), listener, config.host, ready))
        finally:
            broker.close()
