"""Interrupts (Ctrl-C, `SystemExit` of a signal handler) in the middle of a request."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class _Closable(Protocol):
    def close(self) -> None: ...


_Self = TypeVar("_Self", bound=_Closable)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def closing_if_interrupted(
    method: Callable[Concatenate[_Self, _Arguments], _Result],
) -> Callable[Concatenate[_Self, _Arguments], _Result]:
    """Close the object if an interrupt ends the method: a request or an answer may be half sent or half read."""

    @functools.wraps(method)
    def wrapped(self: _Self, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            raise  # the method has decided what it means for the object
        except BaseException:
            self.close()
            raise

    return wrapped
