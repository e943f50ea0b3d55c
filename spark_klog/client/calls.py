"""Calls of clients as steps, which a waiting thread makes, or an event loop (`spark_klog.aio`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from spark_klog.base.settings import nearest
from spark_klog.client.requests import Steps, at_once, run
from spark_klog.errors import ConfigError

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")
_Client = TypeVar("_Client")


class OfSettings:
    """The base of clients, which take their settings as a dict, not as arguments by name."""

    def __new__(cls: type[_Client], *_: object, **named: object) -> _Client:
        known = inspect.signature(cls.__init__).parameters if named else {}
        unknown = [name for name in named if name not in known]
        if unknown and not any(each.kind is each.VAR_KEYWORD for each in known.values()):
            settings, name = ", ".join(f'"{each.replace("_", ".")}": ...' for each in unknown), cls.__name__
            if hint := nearest(unknown[0], known, 0.75):
                raise TypeError(f"{name} has no argument {unknown[0]}: {hint}")
            raise ConfigError(
                f"{name} takes its settings in a dict: write {name}({{{settings}}}), not {unknown[0]}=..."
            )
        return object.__new__(cls)


class Calls(OfSettings):
    """The base of clients whose calls are made by `call`."""

    def make(self, steps: Steps[Any]) -> Any:
        """The result of a call, by its steps."""
        return run(steps)


class OnLoop(Calls):
    """The base of clients on an event loop."""


class Call(Generic[_Arguments, _Answer]):
    """A call as types see it: a client on an event loop returns what is to be awaited."""

    @overload
    def __get__(self, calls: OnLoop, kind: object) -> Callable[_Arguments, Coroutine[Any, Any, _Answer]]: ...

    @overload
    def __get__(self, calls: Calls, kind: object) -> Callable[_Arguments, _Answer]: ...

    def __get__(self, calls: Calls, kind: object) -> Any:
        raise NotImplementedError  # `call` makes functions


def call(method: Callable[Concatenate[Any, _Arguments], Steps[_Answer]]) -> Call[_Arguments, _Answer]:
    """A call of a client, by the steps of its requests, which the client's driver makes."""
    returned = method.__annotations__["return"]
    method.__annotations__["return"] = returned.removeprefix("Steps[").removesuffix("]")

    @functools.wraps(method)
    def made(self: Calls, /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> Any:
        return self.make(method(self, *arguments, **named))

    made.steps = method  # type: ignore[attr-defined]
    return made  # type: ignore[return-value]


def steps_of(made: Callable[_Arguments, _Answer]) -> Callable[_Arguments, Steps[_Answer]]:
    """The steps of a call, for another one; of one that a subclass has overridden, the call itself."""
    steps = getattr(made.__func__, "steps", None)  # type: ignore[attr-defined]
    if steps is None:
        return lambda *arguments, **named: at_once(lambda: made(*arguments, **named))
    return functools.partial(steps, made.__self__)  # type: ignore[attr-defined]
