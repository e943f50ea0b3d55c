"""Requests of several steps: made while the caller waits, or step by step, so that nothing else waits for the answers.

Such a request is a generator: it yields a `Wait` where it can't go on, and returns the result. `run`
waits for what it says; a `PendingRequest` leaves that to a caller that has more to wait for. Deadlines are readings of
`time.monotonic`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

from spark_klog.base.interrupts import closing_if_interrupted
from spark_klog.client.net.connection import Connection, Handle
from spark_klog.client.net.waiting import LEAST_ANSWER, Waited, wait_until_ready
from spark_klog.client.retry import Retry
from spark_klog.errors import ConnectionFailed, KlogError, RequestTimedOut
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api

_Result = TypeVar("_Result")
_Key = TypeVar("_Key", bound=Hashable)
#: Seconds between steps although no event came: another thread may have read the answer from the connection.
_LONGEST_WAIT = 0.05


class Wait(NamedTuple):
    """An event of the connection, or the answer to the request, lets a request go on; so does the time `until`."""

    connection: Connection | None
    until: float
    handle: Handle | None = None
    #: Connections, and wakers, of which an event does so, too.
    others: tuple[Waited, ...] = ()
    #: Waits of requests that are made at once: what ends one of them ends this one.
    parts: tuple[Wait, ...] = ()

    @property
    def connections(self) -> list[Waited]:
        own: list[Waited] = [] if self.connection is None else [self.connection]
        return [*own, *self.others, *(connection for part in self.parts for connection in part.connections)]

    @property
    def is_over(self) -> bool:
        """Whether the answer has come with that to another request: no event would tell."""
        if self.handle is not None and self.connection is not None and self.connection.has_arrived(self.handle):
            return True
        return any(part.is_over for part in self.parts)


Steps = Generator[Wait, None, _Result]


@contextmanager
def unsent() -> Iterator[None]:
    """Note in errors of the block, which opens a connection, that the request was not sent."""
    try:
        yield
    except (ConnectionFailed, RequestTimedOut) as error:
        error.is_unsent = True
        raise


def opened(connection: Connection, deadline: float) -> Steps[None]:
    """Open a connection, and wait while it is throttled unless that lasts beyond the deadline.

    One that is not open by then goes on opening, see `Connection.late`: the next request may have more luck.
    """
    begin = time.monotonic()
    while not connection.open_step():
        until = connection.opening_until(deadline)
        if time.monotonic() >= until:
            raise connection.late(begin)
        yield Wait(connection, min(until, connection.look_at))
    while time.monotonic() < connection.throttled_until <= deadline:  # another answer may have prolonged it
        yield Wait(None, connection.throttled_until)


def answered(
    connection: Connection, api: Api, message: Message, deadline: float, last: int | None = None
) -> Steps[Message]:
    """Send a request on an open connection, and wait for its answer; raises what `Connection` raises.

    One that is sent late has some time nevertheless, see `LEAST_ANSWER`. `last`: see `Connection.version_of`.
    """
    begin = time.monotonic()
    version = None if last is None else connection.version_of(api, last)
    handle = connection.send(api, message, version=version, deadline=deadline)
    return (yield from received(connection, handle, begin, max(deadline, begin + LEAST_ANSWER)))


def received(connection: Connection, handle: Handle, begin: float, deadline: float) -> Steps[Message]:
    """Wait for the answer to a request that was sent at `begin`; raises what `Connection` raises."""
    try:
        connection.check_under_way(handle)  # an answer that was received does not come again
        while True:
            yield Wait(connection, deadline, handle)
            if connection.poll(handle):
                return connection.receive(handle)
            connection.check_time(begin, deadline)
    finally:
        connection.forget(handle)  # if nobody waits for it any more


def paused(until: float) -> Steps[None]:
    while time.monotonic() < until:
        yield Wait(None, until)


def retried(retry: Retry, failure: Exception) -> Steps[None]:
    """The pause before the next attempt; raises `failure` as of `Retry.pause`."""
    yield from paused(time.monotonic() + retry.seconds(failure))
    retry.resume()


def run(steps: Steps[_Result]) -> _Result:
    try:
        while True:
            wait = next(steps)
            if not wait.is_over:
                wait_until_ready(wait.connections, wait.until - time.monotonic())
    except StopIteration as end:
        result: _Result = end.value
        return result
    finally:
        steps.close()


def each(requests: Mapping[_Key, Steps[_Result]]) -> Steps[dict[_Key, _Result | KlogError]]:
    """Make several requests at once; each has its result or its error. One that is slow does not delay the others."""
    results: dict[_Key, _Result | KlogError] = {}
    left = dict(requests)
    try:
        while True:
            waits: list[Wait] = []
            for key, steps in list(left.items()):
                try:
                    waits.append(next(steps))
                    continue
                except StopIteration as end:
                    results[key] = end.value
                except KlogError as error:
                    results[key] = error
                del left[key]
            if not left:
                return results
            yield Wait(None, min(wait.until for wait in waits), parts=tuple(waits))
    finally:
        for steps in left.values():
            steps.close()


def at_once(action: Callable[[], _Result]) -> Steps[_Result]:
    """What needs no waiting, or waits by itself, as the steps of a request."""
    return action()
    yield


class PendingRequest(Generic[_Result]):
    """Room for one request that is made step by step: call `step` until it returns the result."""

    def __init__(self) -> None:
        #: The request with which the next `step` goes on, if any.
        self.under_way: Steps[_Result] | None = None
        #: What the request waits for, if one is under way.
        self.wait = Wait(None, math.inf)

    @closing_if_interrupted
    def step(self, begin: Callable[[], Steps[_Result]]) -> _Result | None:
        """Begin a request unless one is under way, and do what can be done without waiting.

        The result once it is there, else None. Raises what the request does, which then is under way no more.
        """
        steps = self.under_way or begin()
        self.under_way = None
        try:
            self.wait = next(steps)
        except StopIteration as end:
            result: _Result = end.value
            return result
        self.under_way = steps
        return None

    @property
    def connections(self) -> list[Waited]:
        """The connection of which an event makes the next step possible, if any."""
        return self.wait.connections

    @property
    def look_at(self) -> float:
        """When to call `step` if no event comes."""
        until = self.wait.until
        return min(until, time.monotonic() + _LONGEST_WAIT) if self.connections else until

    def close(self) -> None:
        """Drop the answer, which is not needed any more."""
        if self.under_way is not None:
            self.under_way.close()
            self.under_way = None
