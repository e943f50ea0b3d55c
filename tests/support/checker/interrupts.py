"""Interrupt chosen code at any of its steps: by a trace function that raises, or as a signal does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

_interrupt_main = ctypes.PYFUNCTYPE(None, ctypes.py_object, ctypes.py_object, ctypes.py_object)(
    ("PyErr_SetInterrupt", ctypes.pythonapi)
)


class LinesRun:
    """Counts the lines that run in modules, and ends the process at one of them with exit code 9, as a kill does."""

    def __init__(self, last: int, *modules: ModuleType) -> None:
        """`last`: the number of that line, 0 for none."""
        self.seen, self._last = 0, last
        self._files = {module.__file__ for module in modules}

    def __enter__(self) -> LinesRun:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self._last:
                os._exit(9)
        return self._trace


class Interrupt:
    """A trace function that raises at the `at`-th line that runs in files with these ends; `is_over` if fewer run.

    Counts lines of `functions`, or of all but `outside`.
    """

    def __init__(
        self, at: int, files: tuple[str, ...], functions: tuple[str, ...] = (), outside: tuple[str, ...] = ()
    ) -> None:
        self._at, self._files, self._functions, self._outside = at, files, functions, outside
        self.is_over = True

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_name
        is_inside = name in self._functions if self._functions else name not in self._outside
        is_ours = is_inside and frame.f_code.co_filename.endswith(self._files)
        if event == "line" and is_ours:
            self._at -= 1
            if self._at == 0:
                self.is_over = False
                raise KeyboardInterrupt
        return self if is_ours else None


class Signal:
    """A trace function that has SIGINT arrive at the `at`-th instruction in files whose paths contain one of `parts`.

    It sets the signal by C code, so that its handler is called where Python calls the handlers of real signals: after
    the next call, or at the beginning of a function. A function that raises by itself would do so where none can.
    """

    def __init__(self, at: int, parts: tuple[str, ...], raised: Callable[[], BaseException]) -> None:
        self._at, self._parts, self._raised = at, parts, raised
        #: Instructions until the signal.
        self.steps = 0
        self._armed: FrameType | None = None
        #: Where the handler was called, None if fewer instructions ran.
        self.place: str | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not any(part in frame.f_code.co_filename for part in self._parts):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.steps += 1
            if self.steps == self._at:
                self._armed = frame
                return _interrupt_main  # at the next instruction of this frame
        return self

    def handle(self, number: int, frame: FrameType | None) -> None:
        sys.settrace(None)
        if self._armed is not None:
            self._armed.f_trace = None
        if frame is not None:
            self.place = f"{frame.f_code.co_filename.rpartition('spark_klog/')[2]}:{frame.f_lineno}"
        if not self._is_over(frame):
            raise self._raised()

    def _is_over(self, frame: FrameType | None) -> bool:
        """Whether the block has ended: a signal of its last instruction may arrive at the beginning of `__exit__`.

        Or in this trace function, after a function has returned: without one, no signal arrives there.
        """
        if frame is not None and frame.f_code is Signal.__call__.__code__:
            return True
        is_exit = frame is not None and frame.f_code is contextlib._GeneratorContextManager.__exit__.__code__
        caller = frame.f_back if frame is not None else None
        return is_exit and caller is not None and not any(part in caller.f_code.co_filename for part in self._parts)


@contextmanager
def signalled(
    at: int, parts: tuple[str, ...] = ("spark_klog/",), raised: Callable[[], BaseException] = KeyboardInterrupt
) -> Iterator[Signal]:
    """Have a signal arrive in the block, see `Signal`; what it raises ends the block."""
    interrupt = Signal(at, parts, raised)
    tracing, former = sys.gettrace(), signal.signal(signal.SIGINT, interrupt.handle)
    sys.settrace(interrupt)
    try:
        yield interrupt
    except BaseException as error:
        if interrupt.place is None or type(error) is not type(raised()):
            raise
    finally:
        sys.settrace(tracing)
        signal.signal(signal.SIGINT, former)
