"""Raise KeyboardInterrupt (Ctrl-C) at any line of chosen code."""

from __future__ import annotations

from types import FrameType
from typing import Any


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
