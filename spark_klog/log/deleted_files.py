"""The files of segments that have left a log: renamed at once, removed after file.delete.delay.ms."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path

from spark_klog.log.file_system import FileSystem
from spark_klog.log.producer_state import SNAPSHOT
from spark_klog.log.recovery import DELETED
from spark_klog.log.segment import Segment

_log = logging.getLogger(__name__)
_RETRY_MS = 60_000


class DeletedFiles:
    """Of one log. `now_ms`: the time in ms since the epoch."""

    def __init__(self, files: FileSystem, now_ms: Callable[[], int]) -> None:
        self._files = files
        self._now_ms = now_ms
        #: When files may be removed (ms), and which; the earliest first.
        self._waiting: deque[tuple[int, list[Path]]] = deque()

    def add(self, segment: Segment, delay_ms: int) -> None:
        """Rename the files of a segment, so that no start finds it again; OSError: the segment is as it was."""
        try:
            segment.rename(DELETED)
        except OSError as error:
            if not segment.is_detached:
                raise
            _log.warning("%s: its indexes stay until the next start: %s", segment.path, error)
        try:
            self._files.remove(segment.path.with_suffix(SNAPSHOT))
        except OSError as error:
            _log.warning("%s: its snapshot of producers stays until a later start: %s", segment.path, error)
        paths = [path.with_name(path.name + DELETED) for path in segment.paths()]
        self._waiting.append((self._now_ms() + delay_ms, paths))

    @property
    def are_due(self) -> bool:
        """Whether `remove_due` has something to do."""
        return bool(self._waiting) and self._waiting[0][0] <= self._now_ms()

    def remove_due(self) -> None:
        """Remove the files whose time has come, from any thread; OSError: what is left is tried again in a minute."""
        now, left, failure = self._now_ms(), [], None
        while self._waiting and self._waiting[0][0] <= now:
            for path in self._waiting.popleft()[1]:
                try:
                    self._files.remove(path)
                except OSError as error:
                    failure = error
                    left.append(path)
        if failure is not None:
            self._waiting.append((now + _RETRY_MS, left))
            raise failure
