"""Faults that a scripted broker applies to a request and its answer, see `scripted_broker`."""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.support.brokers.kafka_python_wire import Message
from tests.support.brokers.sound_brokers import UNKNOWN_TOPIC_OR_PARTITION

_SECONDS = float(os.environ.get("SPARK_KLOG_FAULT_SECONDS", "3"))
_FIRST_SEED = int(os.environ.get("SPARK_KLOG_FAULT_SEED", "0"))


def run_seeds(run: Callable[[int], object]) -> None:
    """Call `run` with successive seeds for SPARK_KLOG_FAULT_SECONDS, at least once; a failure prints its seed."""
    end = time.monotonic() + _SECONDS
    seed = _FIRST_SEED
    while seed == _FIRST_SEED or time.monotonic() < end:
        try:
            run(seed)
        except BaseException:
            print(f"SPARK_KLOG_FAULT_SEED={seed}")  # noqa: T201
            raise
        seed += 1


@dataclass(frozen=True)
class Fault:
    """A fault of one request and its answer."""

    #: Changes the answer's fields, a dict.
    change: Callable[[Message], None] = lambda answer: None
    #: Changes the answer's frame, which begins with the correlation id.
    rewrite: Callable[[bytes], bytes] = lambda frame: frame
    #: False: the request has no effect.
    is_applied: bool = True
    #: Seconds before the answer.
    delay: float = 0.0
    #: How many times the answer is sent.
    times: int = 1
    #: Seconds between the bytes of the answer.
    drip: float = 0.0
    #: The answer is sent after the connection's next one.
    is_held: bool = False
    #: The connection is closed afterwards.
    closes: bool = False


def sound() -> Fault:
    return Fault()


def error(code: int, partition: int | None = None) -> Fault:
    """Set the error code of all innermost entries (the request has no effect) or of one partition (it has)."""
    return Fault(lambda answer: _set_error(answer, code, partition), is_applied=partition is not None)


def top_error(code: int) -> Fault:
    """Set the answer's top-level error code, with empty lists."""

    def change(answer: Message) -> None:
        _empty(answer)
        answer["error_code"] = code

    return Fault(change, is_applied=False)


def no_topics(delay: float = 0.0) -> Fault:
    """Answer Metadata as a broker that has not learnt of the topics yet."""

    def change(answer: Message) -> None:
        for topic in answer["topics"]:
            topic |= {"error_code": UNKNOWN_TOPIC_OR_PARTITION, "partitions": []}

    return Fault(change, delay=delay)


def throttled(ms: int) -> Fault:
    """Throttle as Kafka's quotas do: an empty answer without error, with a throttle time."""

    def change(answer: Message) -> None:
        _empty(answer)
        answer["throttle_time_ms"] = ms

    return Fault(change, is_applied=False)


def slowed(ms: int) -> Fault:
    """A full answer with a throttle time."""
    return Fault(lambda answer: answer.update(throttle_time_ms=ms))


def empty() -> Fault:
    """An answer with empty lists; the request has no effect."""
    return Fault(_empty, is_applied=False)


def renamed() -> Fault:
    """An answer for another topic, resource or group than requested."""
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
    """Wait this long between the bytes of the answer."""
    return Fault(drip=seconds)


def reordered() -> Fault:
    """The answer comes after the connection's next one."""
    return Fault(is_held=True)


def dropped() -> Fault:
    """The connection closes before the request has an effect."""
    return Fault(is_applied=False, times=0, closes=True)


def lost() -> Fault:
    """The request has its effect; the connection closes instead of an answer."""
    return Fault(times=0, closes=True)


def cut() -> Fault:
    """Half the answer's bytes, in a frame of matching size."""
    return Fault(rewrite=lambda frame: frame[: max(4, len(frame) // 2)])


def misaddressed() -> Fault:
    """An answer with an unknown correlation id."""
    return Fault(rewrite=lambda frame: struct.pack(">i", 0x7ABBCCDD) + frame[4:])


def chosen(choose: random.Random, codes: Sequence[int], *, has_top_errors: bool = False) -> Fault:
    """A random fault; `has_top_errors` if the answers have a top-level error code."""
    makers: list[Callable[[], Fault]] = [
        lambda: error(choose.choice(codes), choose.choice([None, 0, 1, 2])),
        *([lambda: top_error(choose.choice(codes))] if has_top_errors else []),
        lambda: throttled(choose.randrange(100)),
        lambda: slowed(choose.randrange(100)),
        lambda: late(choose.random() / 5),
        lambda: dripped(choose.random() / 1000),
        sound,
        empty,
        renamed,
        repeated,
        double,
        dropped,
        lost,
        cut,
        misaddressed,
        silent,
        reordered,
    ]
    return choose.choice(makers)()


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
