"""Control of the fault script by the process that started the broker: JSON lines on stdin, each answered on stdout.

    {"add": [FAULT, ...]}    {"clear": true}    {"fired": true}
    -> {"fired": [[FAULT, times fired], ...]}   or {"error": "why the line was not obeyed"}

When the answer is written, the change applies to all further requests. The first line comes before the broker serves;
it is answered by the line that says that the broker is ready.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from spark_klog.broker.faults.script import Fault, FaultScript
from spark_klog.errors import ConfigError

_READ_BYTES = 65536


def lines_of(descriptor: int) -> Iterator[bytes]:
    """Yield whole lines until the end. Not from `sys.stdin`: a thread must not hold its lock when the process ends."""
    pending = b""
    while data := os.read(descriptor, _READ_BYTES):
        *lines, pending = (pending + data).split(b"\n")
        yield from lines


def encode(command: str, faults: Iterable[Fault] = ()) -> bytes:
    """Encode a command as a line."""
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
