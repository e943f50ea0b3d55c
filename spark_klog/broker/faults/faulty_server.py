"""A server that applies a fault script. A broker without faults uses the plain server and none of this code.

HTTP control of the fault script, for test suites in any language.

    GET    /faults        -> {"faults": [{"id": 1, "fault": FAULT, "fired": 0}, ...]}
    POST   /faults        {"faults": [FAULT, ...]} -> 201 {"ids": [1, ...]}
    DELETE /faults        forgets all; DELETE /faults/ID one -> {"removed": 2}

    {"do": {"kind": "ErrorAnswer", "code": "NOT_LEADER_OR_FOLLOWER"}, "api": "Produce", "topic": "orders", "count": 2}

When the answer is sent, the change applies to all further requests. Errors are {"error": "why"} with status 400 to 503.

Pages of other sites must not reach it through a browser: the Host header must name this server, a request with an
Origin header is refused, and POST takes application/json only. A request has 5 seconds and a body of at most 1 MiB; at
most 16 connections are served at a time, and a script has at most 10,000 faults.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from spark_klog.broker.broker import Broker
from spark_klog.broker.faults.script import (
    ANSWER,
    Corrupt,
    Delay,
    Drop,
    ErrorAnswer,
    Fault,
    FaultScript,
    Firing,
    MatchedRequest,
    Truncate,
    flip_bits,
)
from spark_klog.broker.net.connection import AnswerCut
from spark_klog.broker.net.server import Server
from spark_klog.broker.security.session import Session
from spark_klog.errors import ConfigError
from spark_klog.log.segments.segment import FileRange
from spark_klog.protocol.apis import BY_KEY, FETCH, METADATA
from spark_klog.protocol.codec import (
    Message,
    decode_request,
    decode_request_header,
    decode_response,
    encode_request,
    encode_response,
)
from spark_klog.protocol.schema import Api
from spark_klog.protocol.targets import EVERYTHING, TopicNames, error_response, merge, narrow, set_error, targets
from spark_klog.records.formats.batch import iter_batches
from spark_klog.records.formats.batch_v2 import HEADER_SIZE
from spark_klog.wire.listening import bind, is_loopback, is_own_host, parse_listen
from spark_klog.wire.primitives import SIZE, Reader, Writer

_log = logging.getLogger(__name__)
_OPTION = "--control"
_LOOPBACK = "127.0.0.1"
_MAX_BODY = 1024 * 1024
_MAX_CONNECTIONS = 16
_MAX_FAULTS = 10_000
_SECONDS = 5.0
_PATH = "/faults"


class _Refused(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class FaultControl:
    """Serves a script at http://ADDRESS/faults until `close`.

    `address` is HOST:PORT, or a port of 127.0.0.1; another host needs `is_remote_allowed`, as everybody who reaches the
    port may change the script. Raises `ConfigError`.
    """

    def __init__(self, script: FaultScript, address: str, is_remote_allowed: bool = False) -> None:
        host, port = parse_listen(address, _OPTION, _LOOPBACK)
        if not is_remote_allowed and not is_loopback(host):
            raise ConfigError(
                f"{_OPTION} {address} is not a loopback address, and everybody who reaches it may break the broker's "
                "answers: give --allow-remote-control if that is what you want"
            )
        listener = bind(host, port, _OPTION)
        self._server = _ControlServer(host, _Handler, script)
        self._server.socket.close()
        self._server.socket = listener
        found = listener.getsockname()
        self.address = f"[{found[0]}]:{found[1]}" if ":" in found[0] else f"{found[0]}:{found[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="klog-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _ControlServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, handler: type[BaseHTTPRequestHandler], script: FaultScript) -> None:
        super().__init__((host, 0), handler, bind_and_activate=False)
        self.host, self.script = host, script
        self._places = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a client of the fault control disconnected", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _ControlServer
    timeout = _SECONDS
    server_version, sys_version = "klog", ""

    def do_GET(self) -> None:
        self._serve(self._list)

    def do_POST(self) -> None:
        self._serve(self._add)

    def do_DELETE(self) -> None:
        self._serve(self._remove)

    def _serve(self, work: Any) -> None:
        try:
            if not is_own_host(self.headers.get("Host", ""), self.server.host):
                raise _Refused(403, "the Host header names another server")
            if self.headers.get("Origin") is not None:
                raise _Refused(403, "requests of web pages are refused")
            status, answer = work(self.path.partition("?")[0].rstrip("/"))
        except _Refused as refused:
            status, answer = refused.status, {"error": str(refused)}
        except (ConfigError, ValueError, TypeError) as error:
            status, answer = 400, {"error": str(error)}
        body = json.dumps(answer).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def _list(self, path: str) -> tuple[int, Any]:
        if path != _PATH:
            raise _Refused(404, f"{path or '/'} is unknown; the faults are at {_PATH}")
        listed = self.server.script.listed()
        return 200, {"faults": [{"id": one.id, "fault": one.fault.to_json(), "fired": one.fired} for one in listed]}

    def _add(self, path: str) -> tuple[int, Any]:
        if path != _PATH:
            raise _Refused(404, f"{path or '/'} is unknown; faults are added at {_PATH}")
        found = json.loads(self._body())
        if not isinstance(found, dict) or not isinstance(found.get("faults"), list) or len(found) != 1:
            raise ConfigError('the body must be {"faults": [FAULT, ...]}')
        if not all(isinstance(values, dict) for values in found["faults"]):
            raise ConfigError("each fault must be an object")
        faults = [Fault.from_json(values) for values in found["faults"]]
        if len(self.server.script.listed()) + len(faults) > _MAX_FAULTS:
            raise ConfigError(f"a script has at most {_MAX_FAULTS:,} faults: remove some")
        return 201, {"ids": self.server.script.add(faults)}

    def _remove(self, path: str) -> tuple[int, Any]:
        if path == _PATH:
            return 200, {"removed": self.server.script.clear()}
        number = path.removeprefix(f"{_PATH}/")
        if not path.startswith(f"{_PATH}/") or not number.isdecimal():
            raise _Refused(404, f"{path or '/'} is unknown; a fault is at {_PATH}/ID")
        if not self.server.script.remove(int(number)):
            raise _Refused(404, f"there is no fault {number}")
        return 200, {"removed": 1}

    def _body(self) -> bytes:
        if self.headers.get_content_type() != "application/json":
            raise _Refused(415, "the Content-Type must be application/json")
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal():
            raise _Refused(411, "a Content-Length is required")
        if int(size) > _MAX_BODY:
            raise _Refused(413, f"the body has more than {_MAX_BODY:,} bytes")
        return self.rfile.read(int(size))

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)


_NO_SESSION, _FINAL_EPOCH = 0, -1
_NO_ANSWER = 0
#: offset, length, checksum, magic, attributes (message_set.py)
_MESSAGE_HEADER_SIZE = 18


@dataclass
class _Request:
    """A request of a known API and version."""

    api: Api
    version: int
    correlation_id: int
    client_id: str | None
    message: Message
    frame: bytearray
    session: Session

    def encoded(self, message: Message) -> bytearray:
        """Encode the request with another message."""
        return bytearray(
            encode_request(self.api, self.version, self.correlation_id, self.client_id, message).to_bytes()
        )

    def answered(self, message: Message) -> Writer:
        return encode_response(self.api, self.version, self.correlation_id, message)

    def decoded(self, answer: Writer) -> Message:
        return decode_response(self.api, self.version, _to_bytes(answer))[1]


class FaultyServer(Server):
    """Answers as `Server` does, except for the script's faults."""

    def __init__(self, broker: Broker, script: FaultScript) -> None:
        super().__init__(broker)
        self._script = script

    async def answer(self, frame: bytearray, session: Session) -> Writer | None:
        """As `Server.answer`; raises `AnswerCut` if a fault drops the connection."""
        request = None if session.takes_raw_tokens else _read(frame, session)
        if request is None:
            return await super().answer(frame, session)
        if request.api is FETCH and request.message["session_epoch"] != _FINAL_EPOCH:
            # In a session most fetches name no partitions, but faults by topic must know them: fetch without a session.
            request.message |= {"session_id": _NO_SESSION, "session_epoch": _FINAL_EPOCH}
            request.frame = request.encoded(request.message)
        named = targets(request.api, request.version, request.message, self._topic_names())
        firing = self._script.choose(MatchedRequest(request.api.name, request.client_id, named))
        if firing is None:
            return await self._carry_out(request)
        _say(request, firing)
        return await self._spoil(request, firing)

    def _topic_names(self) -> TopicNames:
        return {topic.topic_id: topic.name for topic in self.broker.registry.topics.values()}

    async def _carry_out(self, request: _Request) -> Writer | None:
        """The true response, with records corrupted if a fault waits for records."""
        answer = await super().answer(request.frame, request.session)
        if answer is None or request.api is not FETCH or not self._script.waits_for_records:
            return answer
        return self._corrupt_records(request, answer)

    async def _spoil(self, request: _Request, firing: Firing) -> Writer | None:
        action = firing.fault.do
        if isinstance(action, ErrorAnswer):
            return await self._fail(request, firing, action)
        if isinstance(action, Drop) and not action.after and not action.sent:
            raise AnswerCut(b"")
        if isinstance(action, Delay) and not action.after:
            await asyncio.sleep(action.ms / 1000)
        answer = await self._carry_out(request)
        if isinstance(action, Delay) and action.after:
            await asyncio.sleep(action.ms / 1000)
        if isinstance(action, Drop):
            whole = b"" if answer is None else SIZE.pack(len(answer)) + _to_bytes(answer)
            raise AnswerCut(whole[: action.sent])
        if answer is None or isinstance(action, Delay):
            return answer
        return _spoiled(answer, action, firing.number)

    async def _fail(self, request: _Request, firing: Firing, action: ErrorAnswer) -> Writer | None:
        api, version, fault, names = request.api, request.version, firing.fault, self._topic_names()
        failed = narrow(api, version, request.message, names, fault.is_about)
        rest = narrow(api, version, request.message, names, lambda *target: not fault.is_about(*target))
        answer = error_response(api, version, failed)
        # Metadata without brokers is of no use to a client, and a response about all topics is needed to know them.
        if action.after or api is METADATA or EVERYTHING in targets(api, version, request.message, names):
            true = await self._carry_out(request)
            answer = answer if true is None else request.decoded(true)
        elif targets(api, version, rest, names):
            true = await super().answer(request.encoded(rest), request.session)
            answer = answer if true is None else merge(api, version, request.decoded(true), answer)
        if request.message.get("acks") == _NO_ANSWER:
            raise AnswerCut(b"")
        return request.answered(set_error(api, version, answer, action.number, names, fault.is_about))

    def _corrupt_records(self, request: _Request, answer: Writer) -> Writer:
        message = request.decoded(answer)
        names = self._topic_names()
        found = {
            (topic["topic"] or names.get(topic.get("topic_id")), entry["partition_index"]): entry
            for topic in message["responses"]
            for entry in topic["partitions"]
            if any(iter_batches(entry["records"] or b""))
        }
        if not found:
            return answer
        firing = self._script.choose(MatchedRequest(request.api.name, request.client_id, list(found), has_records=True))
        if firing is None:
            return answer
        _say(request, firing)
        assert isinstance(firing.fault.do, Corrupt)
        for target, entry in found.items():
            if firing.fault.is_about(*target):
                entry["records"] = _with_corrupt_batch(bytearray(entry["records"]), firing.fault.do, firing.number)
        return request.answered(message)


def _read(frame: bytearray, session: Session) -> _Request | None:
    """Decode a request; None if its API or version is unknown, which `Server` refuses."""
    reader = Reader(frame)
    key, version, correlation_id = decode_request_header(reader)
    api = BY_KEY.get(key)
    if api is None or version not in api.versions:
        return None
    client_id, message = decode_request(api, version, reader)
    return _Request(api, version, correlation_id, client_id, message, frame, session)


def _to_bytes(answer: Writer) -> bytes:
    return b"".join(part.read() if isinstance(part, FileRange) else part for part in answer.parts)  # type: ignore[misc]


def _spoiled(answer: Writer, action: Corrupt | Truncate, number: int) -> Writer:
    data = bytearray(_to_bytes(answer))
    if isinstance(action, Truncate):
        del data[max(len(data) - action.missing, 0) :]
    else:
        assert action.where == ANSWER
        flip_bits(data, 0, len(data), action, number)
    result = Writer()
    result.raw(data)
    return result


def _with_corrupt_batch(records: bytearray, action: Corrupt, number: int) -> bytearray:
    header, batch = next(iter_batches(bytes(records)))
    start = HEADER_SIZE if header.magic == 2 else _MESSAGE_HEADER_SIZE
    flip_bits(records, start, len(batch), action, number)
    return records


def _say(request: _Request, firing: Firing) -> None:
    _log.info("fault for %s of %s (%s): %s", request.api.name, request.client_id, request.session.peer, firing.fault.do)
