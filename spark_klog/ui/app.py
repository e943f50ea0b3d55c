"""The routes of `klog ui`: static files, views as JSON, live views and searches as events, exports, changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from spark_klog import __version__
from spark_klog.client import Admin, Consumer
from spark_klog.errors import ConfigError, KlogError
from spark_klog.ui import changes, groups, overview, queries
from spark_klog.ui.export import FORMS, MAX_RECORDS as MAX_EXPORTED, Render, export
from spark_klog.ui.guard import Guard, OutageWatch, RequestRefused, Session
from spark_klog.ui.messages import MAX_COUNT, View, page
from spark_klog.ui.search import FIELDS, MAX_MATCHES, MAX_RECORDS, Search, search
from spark_klog.ui.streams import Streams

_STATIC = Path(__file__).parent / "static"
#: Seconds between two looks of a live view.
_LIVE_SECONDS = 2.0
_MESSAGES_SECONDS = 1.0
#: What a command file for another program's consumer must not do here: join its group, and commit for it.
_GROUP_SETTINGS = ("group.id", "group.instance.id")

#: Views that need no broker.
_WITHOUT_BROKERS = ("session", "loads")


class Sources(NamedTuple):
    """What the page shows: a cluster by its client settings, stores of offsets, checkpoints, outputs of loads.

    `cluster` or `command_config` is where the settings are from: the lines to copy name it, and no secret.
    `json_lines` renders records that are exported.
    """

    settings: Mapping[str, str]
    json_lines: Render
    stores: Sequence[str] = ()
    checkpoints: Sequence[str] = ()
    loads: Sequence[str] = ()
    cluster: str | None = None
    command_config: Path | None = None


class Pages:
    """Answers requests about one cluster. Each slow call runs in a thread."""

    def __init__(self, admin: Admin, watch: OutageWatch, sources: Sources, session: Session, streams: Streams) -> None:
        self._admin, self._watch, self._sources, self._session = admin, watch, sources, session
        self._streams = streams
        self._consumer_settings = {
            **{name: text for name, text in sources.settings.items() if name not in _GROUP_SETTINGS},
            "enable.auto.commit": "false",
            "auto.offset.reset": "earliest",
        }

    def routes(self) -> list[Route]:
        """All routes of the API."""
        views = {
            "session": self._about,
            "overview": lambda _: overview.overview(self._admin),
            "topic": lambda asked: overview.topic(self._admin, _name(asked)),
            "messages": self._messages,
            "readers": lambda asked: groups.readers(self._admin, _name(asked)),
            "groups": lambda _: groups.groups(self._admin),
            "group": self._group,
            "queries": lambda _: queries.queries(self._admin, self._sources.checkpoints),
            "loads": lambda _: queries.loads(self._sources.loads),
        }
        views |= {name: self._checked(look) for name, look in views.items() if name not in _WITHOUT_BROKERS}
        made: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "topics/create": partial(changes.create_topic, self._admin),
            "topics/delete": partial(changes.delete_topic, self._admin),
            "topics/alter": partial(changes.alter_topic, self._admin),
            "produce": partial(changes.produce, self._admin, self._sources.settings),
            "groups/move": partial(changes.move_group, self._admin),
        }
        return [
            *(Route(f"/api/{name}", _view(look)) for name, look in views.items()),
            *(Route(f"/api/live/{name}", self._live(look, name)) for name, look in views.items() if name != "session"),
            Route("/api/outage", self._outage),
            Route("/api/search", self._search),
            Route("/api/export", self._export),
            *(Route(f"/api/{name}", self._change(work), methods=["POST"]) for name, work in made.items()),
        ]

    def _about(self, _: Request) -> dict[str, Any]:
        config = self._sources.command_config
        return {
            "version": __version__,
            "servers": self._sources.settings["bootstrap.servers"],
            "cluster": self._sources.cluster,
            "commandConfig": None if config is None else str(config),
            "allowsChanges": self._session.allows_changes,
            "token": self._session.token,
            "checkpoints": len(self._sources.checkpoints),
            "loads": len(self._sources.loads),
        }

    async def _outage(self, _: Request) -> Response:
        return JSONResponse(self._watch.outage())

    def _new_consumer(self) -> Consumer:
        return Consumer(self._consumer_settings, include_headers=True)

    def _messages(self, asked: Request) -> dict[str, Any]:
        count = _number(asked, "count", most=MAX_COUNT) or 50
        return page(self._admin, self._new_consumer, _message_view(asked), count)

    async def _export(self, asked: Request) -> Response:
        form = asked.query_params.get("format", "jsonl")
        records = _number(asked, "records", most=MAX_EXPORTED) or 10_000
        view, lines = _message_view(asked), self._sources.json_lines
        work = await run_in_threadpool(export, self._admin, self._new_consumer, view, form, records, lines)
        return self._streams.download(work, f"{view.topic}.{form}", FORMS[form])

    def _group(self, asked: Request) -> dict[str, Any]:
        sources = self._sources
        return groups.group(self._admin, _name(asked), sources.stores, sources.checkpoints, sources.settings)

    def _checked(self, look: Callable[[Request], Any]) -> Callable[[Request], Any]:
        def checked(asked: Request) -> Any:
            self._watch.check()
            return look(asked)

        return checked

    def _live(self, look: Callable[[Request], Any], name: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(asked: Request) -> Response:
            seconds = _MESSAGES_SECONDS if name == "messages" else _LIVE_SECONDS
            return self._streams.repeat(lambda: look(asked), seconds)

        return answer

    async def _search(self, asked: Request) -> Response:
        wanted = Search(
            _name(asked),
            asked.query_params.get("text", ""),
            asked.query_params.get("in", ",".join(FIELDS)).split(","),
            _number(asked, "partition"),
            asked.query_params.get("ignoreCase") == "true",
            _number(asked, "records", most=MAX_RECORDS) or 1_000_000,
            _number(asked, "matches", most=MAX_MATCHES) or 100,
        )
        return self._streams.steps(search(self._admin, self._new_consumer, wanted))

    def _change(self, work: Callable[[Mapping[str, Any]], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(asked: Request) -> Response:
            body = await self._session.body(asked)
            return JSONResponse(await run_in_threadpool(work, body))

        return answer


def _view(look: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(asked: Request) -> Response:
        return JSONResponse(await run_in_threadpool(look, asked))

    return answer


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


def make_app(
    admin: Admin, watch: OutageWatch, sources: Sources, host: str, allows_changes: bool, streams: Streams
) -> Starlette:
    """The application; `host` is the name that it listens on."""
    pages = Pages(admin, watch, sources, Session(allows_changes), streams)

    async def index(_: Request) -> Response:
        return FileResponse(_STATIC / "index.html")

    return Starlette(
        routes=[Route("/", index), *pages.routes(), Mount("/static", StaticFiles(directory=_STATIC))],
        middleware=[Middleware(Guard, host=host)],
        exception_handlers={KlogError: _failed, RequestRefused: _failed, OSError: _failed, TypeError: _failed},
    )
