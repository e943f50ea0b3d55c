"""The server of `klog ui`: static files, views as JSON, live views and searches as events, exports, changes.

A live view sends itself again and again, a search its steps, as server-sent events:

    event: NAME
    data: JSON
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from spark_klog.base.interrupts import stop_signals
from spark_klog.base.names import VERSION
from spark_klog.client import Admin, Consumer
from spark_klog.client.settings import without_ids
from spark_klog.errors import ConfigError, KlogError
from spark_klog.trees.paths import host_and_port
from spark_klog.ui import changes, views
from spark_klog.ui.guard import Guard, GuardedConnection, OutageWatch, Session
from spark_klog.ui.log_in import LogIn, Token, chosen_token
from spark_klog.ui.messages import (
    FIELDS,
    FORMS,
    MAX_COUNT,
    MAX_EXPORTED,
    MAX_MATCHES,
    MAX_SEARCHED,
    Render,
    Search,
    View,
    export,
    page,
    search,
)
from spark_klog.wire.listening import RequestRefused, bind, is_loopback, parse_listen

if TYPE_CHECKING:
    from spark_klog.schemas.registry.client import RegistrySettings
    from spark_klog.ui.schemas import MessageSchemas

_MAX_STREAMS = 32
_EVENT_STREAM = "text/event-stream"
_STATIC = Path(__file__).parent / "static"
#: Seconds between two looks of a live view.
_LIVE_SECONDS = 2.0
_MESSAGES_SECONDS = 1.0
#: A look that takes long, as at tens of thousands of partitions, is followed by a pause of so many times its own time.
_PAUSES = 2
#: Views that need no broker.
_WITHOUT_BROKERS = ("session", "loads", "subjects", "subject")
_OPTION = "--listen"
_CLOSE_SECONDS = 3
_FAILURES = (KlogError, RequestRefused, OSError, TypeError, ClientDisconnect)
_THREAD_SECONDS = 0.5
#: Time of a call, unless the settings say otherwise: a view should say soon that a broker is away.
_TIMEOUTS = {"default.api.timeout.ms": "10000", "request.timeout.ms": "10000"}


def event(name: str, data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()


def _events(steps: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    with closing(steps):  # type: ignore[type-var]
        try:
            for step in steps:
                for name, data in step.items():
                    yield event(name, data)
        except (KlogError, OSError) as error:
            yield event("trouble", {"error": str(error)})


class Streams:
    """Starts streams, at most 32 at a time. A stream that its reader leaves ends with it."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(_MAX_STREAMS)
        self._is_closing = asyncio.Event()

    def close(self) -> None:
        """End all streams soon."""
        self._is_closing.set()

    def repeat(self, look: Callable[[], Any], seconds: float) -> StreamingResponse:
        """Send what `look` returns every `seconds` seconds, as event `view`; an error as event `trouble`.

        A look that takes long is repeated less often, see `_PAUSES`.
        """
        self._take_place()

        async def events() -> AsyncIterator[bytes]:
            try:
                while not self._is_closing.is_set():
                    begin, pause = time.monotonic(), seconds
                    try:
                        view = event("view", await run_in_threadpool(look))
                        pause = max(seconds, _PAUSES * (time.monotonic() - begin))
                    except (KlogError, OSError) as error:
                        view = event("trouble", {"error": str(error)})
                    yield view
                    try:
                        await asyncio.wait_for(self._is_closing.wait(), pause)
                    except asyncio.TimeoutError:
                        pass
            finally:
                self._places.release()

        return StreamingResponse(events(), media_type=_EVENT_STREAM)

    def steps(self, steps: Iterator[dict[str, Any]]) -> StreamingResponse:
        """Send each step, {NAME: DATA}, as an event NAME; an error as event `trouble`."""
        return self._pieces(_events(steps), _EVENT_STREAM)

    def download(self, work: Iterator[bytes], name: str, media_type: str) -> StreamingResponse:
        saved_as = f"attachment; filename*=UTF-8''{quote(name, safe='')}"
        return self._pieces(work, media_type, {"Content-Disposition": saved_as})

    def _pieces(
        self, work: Iterator[bytes], media_type: str, headers: Mapping[str, str] | None = None
    ) -> StreamingResponse:
        """Send pieces; each is made in a thread."""
        self._take_place()

        async def pieces() -> AsyncIterator[bytes]:
            try:
                while not self._is_closing.is_set():
                    piece = await run_in_threadpool(next, work, None)
                    if piece is None:
                        return
                    yield piece
            finally:
                await asyncio.shield(run_in_threadpool(work.close))  # type: ignore[attr-defined]
                self._places.release()

        return StreamingResponse(pieces(), media_type=media_type, headers=headers)

    def _take_place(self) -> None:
        if not self._places.acquire(blocking=False):
            raise RequestRefused(503, f"there are {_MAX_STREAMS} live views, searches and exports already: close some")


class Sources(NamedTuple):
    """What the page shows: a cluster by its client settings, stores of offsets, checkpoints, outputs of loads.

    `cluster` or `command_config` is where the settings are from: the lines to copy name it, and no secret.
    `json_lines` renders records that are exported. Keys and values are decoded by the `registry`.
    """

    settings: Mapping[str, str]
    json_lines: Render
    stores: Sequence[str] = ()
    checkpoints: Sequence[str] = ()
    loads: Sequence[str] = ()
    cluster: str | None = None
    command_config: Path | None = None
    registry: RegistrySettings | None = None


class Pages:
    """Answers requests about one cluster. Each slow call runs in a thread."""

    def __init__(
        self,
        admin: Admin,
        watch: OutageWatch,
        sources: Sources,
        session: Session,
        streams: Streams,
        schemas: MessageSchemas | None,
    ) -> None:
        self._admin, self._watch, self._sources, self._session = admin, watch, sources, session
        self._streams, self._schemas = streams, schemas
        own = {"enable.auto.commit": "false", "auto.offset.reset": "earliest"}
        self._consumer_settings = without_ids(sources.settings) | own

    def routes(self) -> list[Route]:
        shown = self._sources
        looks = {
            "session": self._about,
            "overview": lambda _: views.overview(self._admin),
            "topic": lambda asked: views.topic(self._admin, _name(asked)),
            "messages": lambda asked: page(
                self._admin,
                self._new_consumer,
                _message_view(asked),
                _number(asked, "count", most=MAX_COUNT) or 50,
                self._schemas,
            ),
            "readers": lambda asked: views.readers(self._admin, _name(asked)),
            "groups": lambda _: views.groups(self._admin),
            "group": lambda asked: views.group(
                self._admin, _name(asked), shown.stores, shown.checkpoints, shown.settings
            ),
            "queries": lambda _: views.queries(self._admin, shown.checkpoints),
            "loads": lambda _: views.loads(shown.loads),
            "subjects": lambda _: None if self._schemas is None else self._schemas.subjects(),
            "subject": self._subject,
        }
        looks |= {name: partial(self._checked, look) for name, look in looks.items() if name not in _WITHOUT_BROKERS}
        made: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "topics/create": partial(changes.create_topic, self._admin),
            "topics/delete": partial(changes.delete_topic, self._admin),
            "topics/alter": partial(changes.alter_topic, self._admin),
            "produce": partial(changes.produce, self._admin, shown.settings),
            "groups/move": partial(changes.move_group, self._admin),
            "dead-letters/replay": partial(changes.replay_letters, shown.settings),
        }
        return [
            *(Route(f"/api/{name}", partial(_view, look)) for name, look in looks.items()),
            *(
                Route(f"/api/live/{name}", partial(self._live, name, look))
                for name, look in looks.items()
                if name != "session"
            ),
            Route("/api/outage", self._outage),
            Route("/api/search", self._search),
            Route("/api/export", self._export),
            *(Route(f"/api/{name}", partial(self._change, work), methods=["POST"]) for name, work in made.items()),
        ]

    def _about(self, _: Request) -> dict[str, Any]:
        config = self._sources.command_config
        return {
            "version": VERSION,
            "servers": self._sources.settings["bootstrap.servers"],
            "cluster": self._sources.cluster,
            "commandConfig": None if config is None else str(config),
            "allowsChanges": self._session.allows_changes,
            "token": self._session.token,
            "checkpoints": len(self._sources.checkpoints),
            "loads": len(self._sources.loads),
            "registry": self._registry_url(),
        }

    def _registry_url(self) -> str | None:
        """The address of the registry for lines to copy, without user and password."""
        registry = self._sources.registry
        if registry is None:
            return None
        from spark_klog.schemas.registry.settings import registry_config

        return ",".join(registry_config(registry.settings, registry.prefix, registry.client).urls)

    def _subject(self, asked: Request) -> dict[str, Any]:
        if self._schemas is None:
            raise ConfigError("the page has no schema registry: start klog ui with --schema-registry URL")
        return self._schemas.subject(_name(asked), _number(asked, "version", most=2**31 - 1))

    async def _outage(self, _: Request) -> Response:
        return JSONResponse(self._watch.outage())

    def _new_consumer(self) -> Consumer:
        # timestamps that are nanoseconds by mistake do not fit into microseconds
        return Consumer(self._consumer_settings, include_headers=True, timestamp_unit="ms")

    async def _export(self, asked: Request) -> Response:
        form = asked.query_params.get("format", "jsonl")
        records = _number(asked, "records", most=MAX_EXPORTED) or 10_000
        view, lines = _message_view(asked), self._sources.json_lines
        work = await run_in_threadpool(export, self._admin, self._new_consumer, view, form, records, lines)
        return self._streams.download(work, f"{view.topic}.{form}", FORMS[form])

    def _checked(self, look: Callable[[Request], Any], asked: Request) -> Any:
        self._watch.check()
        return look(asked)

    async def _live(self, name: str, look: Callable[[Request], Any], asked: Request) -> Response:
        return self._streams.repeat(partial(look, asked), _MESSAGES_SECONDS if name == "messages" else _LIVE_SECONDS)

    async def _search(self, asked: Request) -> Response:
        wanted = Search(
            _name(asked),
            asked.query_params.get("text", ""),
            asked.query_params.get("in", ",".join(FIELDS)).split(","),
            _number(asked, "partition"),
            asked.query_params.get("ignoreCase") == "true",
            _number(asked, "records", most=MAX_SEARCHED) or 1_000_000,
            _number(asked, "matches", most=MAX_MATCHES) or 100,
        )
        return self._streams.steps(search(self._admin, self._new_consumer, wanted, self._schemas))

    async def _change(self, work: Callable[[Mapping[str, Any]], Any], asked: Request) -> Response:
        return JSONResponse(await run_in_threadpool(work, await self._session.body(asked)))


async def _view(look: Callable[[Request], Any], asked: Request) -> Response:
    return JSONResponse(await run_in_threadpool(look, asked))


def _name(asked: Request) -> str:
    name = asked.query_params.get("name", "")
    if not name:
        raise ConfigError("the parameter name is missing")
    return name


def _message_view(asked: Request) -> View:
    order = asked.query_params.get("order", "newest")
    if order not in ("newest", "oldest"):
        raise ConfigError(f"order={order[:50]!r} must be newest or oldest")
    reached = asked.query_params.get("after" if order == "oldest" else "before")
    return View(
        _name(asked),
        _number(asked, "partition"),
        order == "oldest",
        _number(asked, "offset"),
        _number(asked, "time"),
        _places(reached) if reached else None,
    )


def _number(asked: Request, name: str, most: int = 2**63 - 1) -> int | None:
    text = asked.query_params.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or int(text) > most:
        raise ConfigError(f"{name}={text[:50]!r} must be a number from 0 to {most}")
    return int(text)


def _places(text: str) -> dict[int, int]:
    """Parse PARTITION:OFFSET,PARTITION:OFFSET..."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(number): int(offset) for number, offset in pairs}
    except ValueError:
        raise ConfigError("before and after must be PARTITION:OFFSET,...") from None


async def _failed(_: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, RequestRefused) else 400 if isinstance(error, ConfigError) else 502
    return JSONResponse({"error": str(error)}, status)


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
    sources: Sources,
    listen: str,
    allows_changes: bool,
    is_remote_allowed: bool,
    token: str | None,
    ready: Callable[[str, Token | None], None],
) -> None:
    """Serve until SIGINT or SIGTERM; call `ready` with the page's address, and its token, once it is served.

    `listen` is HOST:PORT, or a port of 127.0.0.1. `token` is as of `chosen_token`. Raises `ConfigError` if `listen` is
    not a loopback address and `is_remote_allowed` is not set, or if it is in use; `ConnectionFailed` and the like if no
    broker answers.
    """
    host, port = parse_listen(listen, _OPTION, "127.0.0.1")
    if not is_remote_allowed and not is_loopback(host):
        raise ConfigError(
            f"{_OPTION} {listen} is not a loopback address, and what goes over the network is not encrypted: give "
            "--allow-remote if that is what you want"
        )
    key = chosen_token(token, is_loopback=is_loopback(host))
    schemas: MessageSchemas | None = None
    if sources.registry is not None:
        from spark_klog.ui.schemas import MessageSchemas

        schemas = MessageSchemas(sources.registry)
        # the page says that a registry is down, at each message, and a live one looks every few seconds
        logging.getLogger("spark_klog.schemas.registry.client").setLevel(logging.ERROR)
    timeouts = {} if sources.settings.keys() & _TIMEOUTS.keys() else _TIMEOUTS
    with bind(host, port, _OPTION) as listener, Admin({**sources.settings, **timeouts}) as admin:
        admin.describe_cluster()
        host_port = listener.getsockname()[:2]
        address = host_and_port(*host_port)
        log_in = [] if key is None else [Middleware(LogIn, token=key, port=host_port[1])]
        with OutageWatch(sources.settings) as watch:
            streams = Streams()
            app = Starlette(
                routes=[
                    Route("/", lambda _: FileResponse(_STATIC / "index.html")),
                    *Pages(admin, watch, sources, Session(allows_changes), streams, schemas).routes(),
                    Mount("/static", StaticFiles(directory=_STATIC)),
                ],
                middleware=[Middleware(Guard, host=host), *log_in],
                exception_handlers=dict.fromkeys(_FAILURES, _failed),
            )
            asyncio.run(_run(app, streams, listener, lambda: ready(f"http://{address}/", key)))
        _leave_calls()


def _leave_calls() -> None:
    """End the process if requests, whose answers nobody waits for, are still asking brokers.

    Python waits for their threads, and they try for a minute to reach a broker that is away.
    """
    others = [each for each in threading.enumerate() if each is not threading.current_thread() and not each.daemon]
    for each in others:
        each.join(_THREAD_SECONDS)
    if any(each.is_alive() for each in others):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


async def _run(app: Starlette, streams: Streams, listener: object, ready: Callable[[], None]) -> None:
    config = uvicorn.Config(
        app,
        http=GuardedConnection,
        ws="none",
        log_config=None,
        log_level=logging.ERROR,  # a warning is what any client can cause
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    server = _Server(config, streams, ready)
    # Uvicorn sends itself the signals again that have ended it, for programs that wait for them; this one has ended.
    with stop_signals(signal.SIG_IGN):
        await server.serve(sockets=[listener])  # type: ignore[list-item]
    if not server.started:
        raise ConfigError(f"the page's server did not start (process {os.getpid()}); --log-level DEBUG says more")
