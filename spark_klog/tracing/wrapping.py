"""What wraps the methods of a client that has spans, each by its name. Without a TracerProvider none is wrapped.

A method that is a generator of steps stays one, so that both drivers of the client have the same spans.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from functools import wraps
from inspect import iscoroutinefunction, isgeneratorfunction
from typing import Any

from spark_klog.tracing.spans import Sending, Spans

_Method = Callable[..., Any]


def wrap(client: Any, spans: Spans, methods: tuple[str, ...]) -> None:
    """Replace these methods of an object by ones that make spans."""
    for name in methods:
        setattr(client, name, _WRAPPERS[name](getattr(client, name), spans))


def _send(method: _Method, spans: Spans) -> _Method:
    """`send` and `send_nowait` of the producers; what is wrong with an argument the method says."""
    if iscoroutinefunction(method):

        @wraps(method)
        async def send(
            topic: Any,
            value: Any,
            key: Any = None,
            partition: Any = None,
            timestamp: Any = None,
            headers: Any = (),
            on_delivery: Any = None,
        ) -> Any:
            sending, headers, on_delivery = spans.sending(topic, value, headers, on_delivery)
            try:
                return await method(topic, value, key, partition, timestamp, headers, on_delivery)
            except BaseException as error:
                if sending is not None:
                    sending.end(error)
                raise

        return send

    @wraps(method)
    def send_nowait(
        topic: Any,
        value: Any,
        key: Any = None,
        partition: Any = None,
        timestamp: Any = None,
        headers: Any = (),
        on_delivery: Any = None,
    ) -> Any:
        sending, headers, on_delivery = spans.sending(topic, value, headers, on_delivery)
        try:
            outcome = method(topic, value, key, partition, timestamp, headers, on_delivery)
        except BaseException as error:
            if sending is not None:
                sending.end(error)
            raise
        if sending is not None and hasattr(outcome, "add_done_callback"):  # it may be cancelled, and never be sent
            outcome.add_done_callback(sending.note_done)
        return outcome

    return send_nowait


def _send_arrow(method: _Method, spans: Spans) -> _Method:
    if iscoroutinefunction(method):

        @wraps(method)
        async def send_rows(rows: Any, topic: Any = None, **options: Any) -> Any:
            with spans.sending_rows(rows, topic) as rows_with_context:
                return await method(rows_with_context, topic, **options)

        return send_rows

    @wraps(method)
    def send_arrow(rows: Any, topic: Any = None, **options: Any) -> Any:
        with spans.sending_rows(rows, topic) as rows_with_context:
            return method(rows_with_context, topic, **options)

    return send_arrow


def _around(method: _Method, block: Callable[..., AbstractContextManager[Any]]) -> _Method:
    """Call a method, or make its steps, within a block, which may be given its result."""
    if isgeneratorfunction(method):

        @wraps(method)
        def steps(*arguments: Any, **options: Any) -> Generator[Any, Any, Any]:
            with block(*arguments) as note:
                outcome = yield from method(*arguments, **options)
                note(outcome)
                return outcome

        return steps

    @wraps(method)
    def called(*arguments: Any, **options: Any) -> Any:
        with block(*arguments) as note:
            outcome = method(*arguments, **options)
            note(outcome)
            return outcome

    return called


def _begin(method: _Method, spans: Spans) -> _Method:
    """`Commits.begin`, whose outcome is told later."""

    def prepared(offsets: Any, on_done: Any) -> tuple[Sending, Callable[[Any, Any], Any]]:
        commit = Sending(spans, spans.committing(offsets))

        def done(committed: Any, error: Any) -> Any:
            commit.end(error)
            return (on_done or method.__self__.log_failure)(committed, error)  # type: ignore[attr-defined]

        return commit, done

    if isgeneratorfunction(method):

        @wraps(method)
        def steps(offsets: Any, on_done: Any) -> Generator[Any, Any, Any]:
            commit, done = prepared(offsets, on_done)
            try:
                return (yield from method(offsets, done))
            except BaseException as error:
                commit.end(error)
                raise

        return steps

    @wraps(method)
    def begin(offsets: Any, on_done: Any) -> Any:
        commit, done = prepared(offsets, on_done)
        try:
            return method(offsets, done)
        except BaseException as error:
            commit.end(error)
            raise

    return begin


_WRAPPERS: dict[str, Callable[[_Method, Spans], _Method]] = {
    "send": _send,
    "send_nowait": _send,
    "send_arrow": _send_arrow,
    "_read": lambda method, spans: _around(method, spans.reading),
    "commit": lambda method, spans: _around(method, spans.commit),
    "send_offsets": lambda method, spans: _around(method, spans.commit),
    "begin": _begin,
}
