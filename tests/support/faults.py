"""What a scripted broker does to one request and its answer, see `scripted_broker`."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.support.kafka_python_wire import Message


@dataclass(frozen=True)
class Fault:
    """What becomes of one request and its answer."""

    #: Changes the answer, a dict of its fields.
    change: Callable[[Message], None] = lambda answer: None
    #: Changes the answer's frame, from the correlation id on.
    rewrite: Callable[[bytes], bytes] = lambda frame: frame
    #: False: the request has no effect.
    is_applied: bool = True
    #: Seconds before the answer.
    delay: float = 0.0
    #: How often the answer is sent.
    times: int = 1
    #: Seconds between the bytes of the answer.
    drip: float = 0.0
    #: The answer is sent after the next one of the connection.
    is_held: bool = False
    #: The connection is closed afterwards.
    closes: bool = False


def sound() -> Fault:
    return Fault()


def error(code: int, partition: int | None = None) -> Fault:
    """The code in the innermost places of the answer that have one, of one partition or of all; without effect."""
    return Fault(lambda answer: _set_error(answer, code, partition), is_applied=partition is not None)


def top_error(code: int) -> Fault:
    """The code as the answer's own, with nothing else in it."""

    def change(answer: Message) -> None:
        _empty(answer)
        answer["error_code"] = code

    return Fault(change, is_applied=False)


def throttled(ms: int) -> Fault:
    """Kafka's quotas: no error, nothing in the answer, and for how long to be silent."""

    def change(answer: Message) -> None:
        _empty(answer)
        answer["throttle_time_ms"] = ms

    return Fault(change, is_applied=False)


def slowed(ms: int) -> Fault:
    """A full answer that asks for silence afterwards."""
    return Fault(lambda answer: answer.update(throttle_time_ms=ms))


def empty() -> Fault:
    """An answer with nothing in its lists."""
    return Fault(_empty, is_applied=False)


def renamed() -> Fault:
    """An answer of another topic, resource or group than asked for."""
    return Fault(lambda answer: _rename(answer))


def repeated() -> Fault:
    """Every entry of the answer comes twice."""
    return Fault(lambda answer: _repeat(answer))


def late(seconds: float) -> Fault:
    return Fault(delay=seconds)


def silent() -> Fault:
    """The request has its effect and is never answered."""
    return Fault(times=0)


def double() -> Fault:
    return Fault(times=2)


def dripped(seconds: float) -> Fault:
    """So many seconds between the bytes of the answer."""
    return Fault(drip=seconds)


def reordered() -> Fault:
    """The answer comes after the next one of the same connection."""
    return Fault(is_held=True)


def dropped() -> Fault:
    """The connection ends before the request has an effect."""
    return Fault(is_applied=False, times=0, closes=True)


def lost() -> Fault:
    """The request has its effect; the connection ends instead of an answer."""
    return Fault(times=0, closes=True)


def cut() -> Fault:
    """Half the bytes of the answer in a frame of their size."""
    return Fault(rewrite=lambda frame: frame[: max(4, len(frame) // 2)])


def misaddressed() -> Fault:
    """An answer to a request that nobody made."""
    return Fault(rewrite=lambda frame: struct.pack(">i", 0x7ABBCCDD) + frame[4:])


def _lists(answer: Message) -> Iterator[list[Message]]:
    for value in answer.values():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield value


def _has_code(answer: Message) -> bool:
    return "error_code" in answer or any(_has_code(entry) for entries in _lists(answer) for entry in entries)


def _set_error(answer: Message, code: int, partition: int | None) -> None:
    inner = [entry for entries in _lists(answer) for entry in entries if _has_code(entry)]
    for entry in inner:
        _set_error(entry, code, partition)
    number = answer.get("partition_index", answer.get("index"))
    if not inner and "error_code" in answer and partition in (None, number):
        answer["error_code"] = code


def _empty(answer: Message) -> None:
    for name, value in answer.items():
        if isinstance(value, list):
            answer[name] = []


def _rename(answer: Message) -> None:
    for name in ("name", "topic", "resource_name", "group_id", "key"):
        if name in answer:
            answer[name] = "another"
    for entries in _lists(answer):
        for entry in entries:
            _rename(entry)


def _repeat(answer: Message) -> None:
    for entries in _lists(answer):
        for entry in entries:
            _repeat(entry)
        entries.extend(list(entries))
