"""Delete the files of segments: rename them at once, remove them after file.delete.delay.ms."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path

from spark_klog.log.files.file_system import FileSystem
from spark_klog.log.producer_state import SNAPSHOT
from spark_klog.log.segments.segment import Segment
from spark_klog.log.segments.segment_files import DELETED

_log = logging.getLogger(__name__)
_RETRY_MS = 60_000


class DeletedFiles:
    """The deleted files of one log that still exist. `now_ms` returns the time in ms since the epoch."""

    def __init__(self, files: FileSystem, now_ms: Callable[[], int]) -> None:
        self._files = files
        self._now_ms = now_ms
        #: (time of removal in ms, paths), the earliest first.
        self._waiting: deque[tuple[int, list[Path]]] = deque()

    def add(self, segment: Segment, delay_ms: int) -> None:
        """Rename the files of a segment, so that no start finds it again. After an OSError it is unchanged."""
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
        """Remove the files that are due, in any thread. After an OSError, retry the failed ones in a minute."""
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
