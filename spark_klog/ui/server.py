"""Run the page's server."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from spark_klog.client import Admin
from spark_klog.errors import ConfigError
from spark_klog.trees.paths import host_and_port
from spark_klog.ui.app import Sources, make_app
from spark_klog.ui.guard import OutageWatch
from spark_klog.ui.streams import Streams
from spark_klog.wire.listening import bind, is_loopback, parse_listen

_OPTION = "--listen"
_MAX_CONNECTIONS = 200
_CLOSE_SECONDS = 3
_THREAD_SECONDS = 0.5
#: Time of a call, unless the settings say otherwise: a view should say soon that a broker is away.
_TIMEOUTS = {"default.api.timeout.ms": "10000", "request.timeout.ms": "10000"}


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, streams: Streams, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._streams, self._ready = streams, ready

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._streams.close()
        # what is cancelled because the server ends is no error
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        super().handle_exit(sig, frame)


def serve(
    sources: Sources, listen: str, allows_changes: bool, is_remote_allowed: bool, ready: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM; call `ready` with the page's address once it is served.

    `listen` is HOST:PORT, or a port of 127.0.0.1. Raises `ConfigError` if it is not a loopback address and
    `is_remote_allowed` is not set, or if it is in use; `ConnectionFailed` and the like if no broker answers.
    """
    host, port = parse_listen(listen, _OPTION, "127.0.0.1")
    if not is_remote_allowed and not is_loopback(host):
        raise ConfigError(
            f"{_OPTION} {listen} is not a loopback address, and everybody who reaches it sees all records: give "
            "--allow-remote if that is what you want"
        )
    timeouts = {} if sources.settings.keys() & _TIMEOUTS.keys() else _TIMEOUTS
    with bind(host, port, _OPTION) as listener, Admin({**sources.settings, **timeouts}) as admin:
        admin.describe_cluster()
        address = host_and_port(*listener.getsockname()[:2])
        with OutageWatch(sources.settings) as watch:
            run = _run(admin, watch, sources, host, allows_changes, listener, lambda: ready(f"http://{address}/"))
            asyncio.run(run)
        _leave_calls()


def _leave_calls() -> None:
    """End the process if requests, whose answers nobody waits for, are still asking brokers.

    Python waits for their threads, and they try for a minute to reach a broker that is away.
    """
    others = [one for one in threading.enumerate() if one is not threading.current_thread() and not one.daemon]
    for each in others:
        each.join(_THREAD_SECONDS)
    if any(each.is_alive() for each in others):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


async def _run(
    admin: Admin,
    watch: OutageWatch,
    sources: Sources,
    host: str,
    allows_changes: bool,
    listener: object,
    ready: Callable[[], None],
) -> None:
    streams = Streams()
    app = make_app(admin, watch, sources, host, allows_changes, streams)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        lifespan="off",
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    server = _Server(config, streams, ready)
    # Uvicorn sends itself the signals again that have ended it, for programs that wait for them; this one has ended.
    kept = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        await server.serve(sockets=[listener])  # type: ignore[list-item]
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    if not server.started:
        raise ConfigError(f"the page's server did not start (process {os.getpid()}); --log-level DEBUG says more")
