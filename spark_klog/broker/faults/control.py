"""Control of the fault script. When a change is answered, it applies to all further requests.

The process that started the broker writes JSON lines to stdin, each answered on stdout. The first line comes before the
broker serves; it is answered by the line that says that the broker is ready.

    {"add": [FAULT, ...]}    {"clear": true}    {"fired": true}
    -> {"fired": [[FAULT, times fired], ...]}   or {"error": "why the line was not obeyed"}

Test suites in any language use HTTP. Errors are {"error": "why"} with a status from 400 on.

    GET    /faults        -> {"faults": [{"id": 1, "fault": FAULT, "fired": 0}, ...]}
    POST   /faults        {"faults": [FAULT, ...]} -> 201 {"ids": [1, ...]}
    DELETE /faults        forgets all; DELETE /faults/ID one -> {"removed": 2}

    {"do": {"kind": "ErrorAnswer", "code": "NOT_LEADER_OR_FOLLOWER"}, "api": "Produce", "topic": "orders", "count": 2}

Pages of other sites must not reach it through a browser: the Host header must name this server, a request with an
Origin header is refused, and POST takes application/json only. A body has at most 1 MiB, a script at most 10,000
faults.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from spark_klog.broker.faults.script import Fault, FaultScript
from spark_klog.errors import ConfigError
from spark_klog.wire.listening import RequestRefused, is_loopback, is_own_host, parse_listen

if TYPE_CHECKING:
    from spark_klog.wire.http import HttpThread, Request, Response

_READ_BYTES = 65536
_OPTION = "--control"
_PATH = "/faults"
_MAX_BODY = 1024 * 1024
_MAX_FAULTS = 10_000


def lines_of(descriptor: int) -> Iterator[bytes]:
    """Yield whole lines until the end. Not from `sys.stdin`: a thread must not hold its lock when the process ends."""
    pending = b""
    while data := os.read(descriptor, _READ_BYTES):
        *lines, pending = (pending + data).split(b"\n")
        yield from lines


def encode(command: str, faults: Iterable[Fault] = ()) -> bytes:
    value: Any = [fault.to_json() for fault in faults] if command == "add" else True
    return json.dumps({command: value}).encode() + b"\n"


def decode_answer(line: str) -> list[tuple[Fault, int]]:
    """How often each fault fired; `ConfigError` if the broker rejected the command."""
    answer = json.loads(line)
    if "error" in answer:
        raise ConfigError(answer["error"])
    return [(Fault.from_json(values), count) for values, count in answer["fired"]]


def obey(script: FaultScript, line: bytes) -> str:
    """Carry out a line, and return the answer."""
    try:
        command = json.loads(line)
        if "add" in command:
            script.add([Fault.from_json(values) for values in command["add"]])
        elif "clear" in command:
            script.clear()
        elif "fired" not in command:
            raise ConfigError("the command must be add, clear or fired")
    except (ConfigError, ValueError, TypeError) as error:
        return json.dumps({"error": str(error)})
    return json.dumps({"fired": [[fault.to_json(), count] for fault, count in script.fired()]})


def first_script(lines: Iterator[bytes]) -> FaultScript:
    """The script of the first line, empty if there is no line; `ConfigError` if the line is invalid."""
    script = FaultScript()
    line = next(lines, None)
    if line is not None and "error" in (answer := json.loads(obey(script, line))):
        raise ConfigError(answer["error"])
    return script


def follow(script: FaultScript, lines: Iterator[bytes], answer: Callable[[str], None]) -> None:
    """Carry out lines until they end."""
    for line in lines:
        answer(obey(script, line))


def serve_control(script: FaultScript, address: str, is_remote_allowed: bool = False) -> HttpThread:
    """Serve a script at http://ADDRESS/faults; `address` is as in `HttpThread`. `ConfigError`.

    A host that is not loopback needs `is_remote_allowed`, as everybody who reaches the port may change the script.
    """
    from spark_klog.wire.http import LOOPBACK, HttpThread, Response  # asyncio, which the broker's process has

    host, _ = parse_listen(address, _OPTION, LOOPBACK)
    if not is_remote_allowed and not is_loopback(host):
        raise ConfigError(
            f"{_OPTION} {address} is not a loopback address, and everybody who reaches it may break the broker's "
            "answers: give --allow-remote-control if that is what you want"
        )

    async def pages(request: Request) -> Response:
        try:
            if not is_own_host(request.headers.get("host", ""), host):
                raise RequestRefused(403, "the Host header names another server")
            if "origin" in request.headers:
                raise RequestRefused(403, "requests of web pages are refused")
            status, answer = await _change(script, request)
        except RequestRefused as refused:
            status, answer = refused.status, {"error": str(refused)}
        except (ConfigError, ValueError, TypeError) as error:
            status, answer = 400, {"error": str(error)}
        return Response(status, "application/json", json.dumps(answer).encode() + b"\n")

    return HttpThread(address, pages, _OPTION)


async def _change(script: FaultScript, request: Request) -> tuple[int, dict[str, Any]]:
    """Carry out a request; return the status and the answer."""
    path = request.path.rstrip("/")
    number = path.removeprefix(f"{_PATH}/")
    if request.method == "DELETE" and path != _PATH and number.isdecimal():
        if not script.remove(int(number)):
            raise RequestRefused(404, f"there is no fault {number}")
        return 200, {"removed": 1}
    if path != _PATH:
        raise RequestRefused(404, f"{path or '/'} is unknown; the faults are at {_PATH}, one of them at {_PATH}/ID")
    if request.method == "GET":
        return 200, {"faults": [{"id": id, "fault": fault.to_json(), "fired": n} for id, fault, n in script.listed()]}
    if request.method == "DELETE":
        return 200, {"removed": script.clear()}
    if request.method != "POST":
        raise RequestRefused(405, f"{request.method} is not supported: GET, POST and DELETE are")
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestRefused(415, "the Content-Type must be application/json")
    size = request.headers.get("content-length", "")
    if not size.isdecimal():
        raise RequestRefused(411, "a Content-Length is required")
    if int(size) > _MAX_BODY:
        raise RequestRefused(413, f"the body has more than {_MAX_BODY:,} bytes")
    body = json.loads(await request.body(int(size)))
    if not isinstance(body, dict) or not isinstance(body.get("faults"), list) or len(body) != 1:
        raise ConfigError('the body must be {"faults": [FAULT, ...]}')
    if not all(isinstance(values, dict) for values in body["faults"]):
        raise ConfigError("each fault must be an object")
    faults = [Fault.from_json(values) for values in body["faults"]]
    if len(script.listed()) + len(faults) > _MAX_FAULTS:
        raise ConfigError(f"a script has at most {_MAX_FAULTS:,} faults: remove some")
    return 201, {"ids": script.add(faults)}
