"""A schema registry with Confluent's REST API, in a thread: over any Kafka cluster, embedded or not.

    with SchemaRegistry({"bootstrap.servers": "127.0.0.1:9092"}) as registry:
        print(registry.url)                                     # http://127.0.0.1:8081

Its state is the compacted topic `_schemas`, in the form of Confluent's registry: it takes over from one, and one from
it. One registry at a time may use the topic: two would give the same id to different schemas.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import Mapping
from contextlib import ExitStack
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qs, unquote

from spark_klog.client import Admin, Consumer, Producer
from spark_klog.client.settings import check_settings, of_bytes
from spark_klog.errors import KlogError
from spark_klog.registry import errors
from spark_klog.registry.api import Answer, answer, content_type, refusal_body
from spark_klog.registry.errors import RegistryRefusal
from spark_klog.registry.log import START_SECONDS, TOPIC, WRITE_SECONDS, SchemaLog
from spark_klog.registry.processes import Processes
from spark_klog.registry.registry import Registry
from spark_klog.security.config import Settings
from spark_klog.wire.http import LOOPBACK, Body, HttpThread, Request, Response, Workers
from spark_klog.wire.listening import RequestRefused, is_loopback, is_own_host, parse_listen

_log = logging.getLogger(__name__)
DEFAULT_ADDRESS: Final = f"{LOOPBACK}:8081"
_OPTION: Final = "--listen"
#: Larger than any record that brokers take by default.
_MAX_BODY: Final = 4 << 20
_MAX_CONNECTIONS: Final = 256
#: Requests that wait for brokers, processes or their turn; the other connections are for what reads.
_MOST_WAITING: Final = 64
#: Bodies that are received at once behind the first bytes, which is all of a small one; others wait, for so many
#: seconds. In its turn a body may not stand still, and is there in time.
_LARGE_BODIES: Final = 3
_SMALL_BODY: Final = 64 << 10
_TURN_SECONDS: Final = 10.0
_STILL_SECONDS, _RECEIVE_SECONDS = 1.0, 5.0
#: Requests of each kind that are carried out at a time. What reads never waits; a list of all schemas is large; all
#: others may wait, for brokers or for the processes that parse and compare schemas.
_READ, _LIST, _WAIT = "read", "list", "wait"
_WORKERS: Final = {_READ: 8, _LIST: 1, _WAIT: _MOST_WAITING}
#: Seconds until a request is answered, and the client may ask again.
_ANSWER_SECONDS: Final = WRITE_SECONDS + 5
#: Settings of the user's other clients that this one must not have.
_LEFT_OUT: Final = frozenset(("group.id", "group.instance.id", "transactional.id"))
_CONSUMER: Final = {"auto.offset.reset": "none", "enable.auto.commit": "false", "allow.auto.create.topics": "false"}
#: What the writing of the topic needs, whatever the user's settings are.
_PRODUCER: Final = {"acks": "all", "linger.ms": "0", "delivery.timeout.ms": "25000", "request.timeout.ms": "10000"}


class SchemaRegistry:
    """A context manager: serves from its construction until `close`.

    `settings` are those of a client, by Kafka's names: where the cluster is, and how to log in. `listen` is HOST:PORT,
    or a port of 127.0.0.1; port 0 picks a free one. There is no log-in here: whoever reaches the port may register and
    delete schemas. Raises `ConfigError` for a setting, an address or a topic that does not do, `KlogError` if the
    cluster does not answer or the topic is not read to its end within 300 s.
    """

    def __init__(self, settings: Mapping[str, Any], listen: str | int = DEFAULT_ADDRESS, topic: str = TOPIC) -> None:
        listen = str(listen)
        host, _ = parse_listen(listen, _OPTION, LOOPBACK)
        #: A page of another site can send requests here under a name of its own; only who listens on one more knows it.
        self._host = host if is_loopback(host) else None
        check_settings("SchemaRegistry", settings)
        settings = Settings({name: value for name, value in of_bytes(settings).items() if name not in _LEFT_OUT})
        with ExitStack() as opened:
            admin = opened.enter_context(Admin(settings))
            consumer = Consumer(settings | _CONSUMER)
            opened.callback(consumer.close)
            self._log = SchemaLog(admin, consumer, lambda: Producer(settings | _PRODUCER), topic)
            opened.pop_all()
        self._workers = {
            kind: Workers(f"klog-schemas-{kind}", count, _MAX_CONNECTIONS) for kind, count in _WORKERS.items()
        }
        self._processes = Processes()
        self._large_bodies = asyncio.Semaphore(_LARGE_BODIES)
        #: Requests that are not answered yet, but for those that only read.
        self._waiting = 0
        try:
            try:
                self._log.catch_up(time.monotonic() + START_SECONDS)
                self._registry = Registry(self._log, self._processes)
                self._registry.restore()
            except RegistryRefusal as refused:
                raise KlogError(f"the schema registry can't start: {refused.reason}") from refused
            self._server = HttpThread(listen, self._answer, _OPTION, _MAX_CONNECTIONS)
        except BaseException:
            self._stop()
            raise
        _log.info("schema registry at %s, topic %s", self.url, topic)

    @property
    def url(self) -> str:
        """http://HOST:PORT: the value for schema.registry.url."""
        return f"http://{self._server.address}"

    async def _answer(self, request: Request) -> Response:
        kind = content_type(request.headers.get("accept", ""))
        try:
            self._check_origin(request)
            body = Body(request, _MAX_BODY)
            await body.receive(_SMALL_BODY)  # who keeps the server waiting has no turn yet
            made = await self._carry_out(request, body)
            return Response(made.status, kind, made.body, made.allow)
        except RegistryRefusal as error:
            refused = error
        except RequestRefused as error:
            refused = errors.bare(HTTPStatus(error.status), str(error))
        except queue.Full:
            refused = errors.bare(HTTPStatus.SERVICE_UNAVAILABLE, f"more than {_MAX_CONNECTIONS} requests wait")
        except asyncio.TimeoutError:
            refused = errors.timed_out(f"not answered within {_ANSWER_SECONDS:g} s")
        except (OSError, EOFError):
            raise  # the client is gone
        except Exception as error:
            _log.exception("%s %s failed", request.method, request.path)
            refused = errors.store_failed(f"{type(error).__name__}: {error}")
        return Response(refused.status, kind, refusal_body(refused))

    async def _carry_out(self, request: Request, body: Body) -> Answer:
        kind = _kind(request)
        if kind == _READ and body.is_whole:
            return await self._call(kind, request, body)
        if self._waiting >= _MOST_WAITING:
            raise errors.bare(HTTPStatus.SERVICE_UNAVAILABLE, f"{_MOST_WAITING} requests wait: try again later")
        self._waiting += 1
        try:
            if body.is_whole:
                return await self._call(kind, request, body)
            await self._turn()
            try:
                end = time.monotonic() + _RECEIVE_SECONDS
                while not body.is_whole:
                    left = end - time.monotonic()
                    await body.receive(len(body.data) + _SMALL_BODY, min(_STILL_SECONDS, left))
                return await self._call(kind, request, body)
            finally:
                self._large_bodies.release()
        finally:
            self._waiting -= 1

    async def _turn(self) -> None:
        """Wait for one of the places of large bodies."""
        try:
            await asyncio.wait_for(self._large_bodies.acquire(), _TURN_SECONDS)
        except asyncio.TimeoutError:
            raise errors.bare(HTTPStatus.SERVICE_UNAVAILABLE, "too many large requests: try again later") from None

    async def _call(self, kind: str, request: Request, body: Body) -> Answer:
        call = self._workers[kind].submit(
            answer, self._registry, request.method, request.path, request.query, bytes(body.data)
        )
        return await asyncio.wait_for(asyncio.wrap_future(call), _ANSWER_SECONDS)

    def _check_origin(self, request: Request) -> None:
        """Refuse what pages of other sites make a browser send to this machine's loopback interface."""
        if self._host is not None and not is_own_host(request.headers.get("host", ""), self._host):
            raise errors.bare(HTTPStatus.FORBIDDEN, "the Host header names another server")
        if "origin" in request.headers:
            raise errors.bare(HTTPStatus.FORBIDDEN, "requests of web pages are refused")

    def close(self) -> None:
        """Stop serving. May be called twice."""
        self._server.close()
        self._stop()

    def _stop(self) -> None:
        for workers in self._workers.values():
            workers.close()
        self._processes.close()
        self._log.close()

    def __enter__(self) -> SchemaRegistry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _kind(request: Request) -> str:
    """What a request may wait for, by its path and query."""
    if request.method not in ("GET", "HEAD"):
        return _WAIT
    if unquote(request.path).rstrip("/").endswith("/schemas"):
        return _LIST
    return _WAIT if "format" in parse_qs(request.query, keep_blank_values=True) else _READ
