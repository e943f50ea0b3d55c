"""The listing of a partition's folder, for readers of any format."""

from __future__ import annotations

from spark_klog.errors import OffsetOutOfRange
from spark_klog.log.stored.files import LogFiles

#: `OffsetOutOfRange.available` of a partition that does not exist.
GONE = (-1, -1)


class ListedPartition:
    """The log in `folder`, as of its listing. `FileNotFoundError` if the folder does not exist, OSError."""

    def __init__(self, files: LogFiles, folder: str, topic: str, partition: int) -> None:
        self._files, self._folder = files, folder
        self._topic, self._partition = topic, partition
        self._list()

    def _list(self) -> None:
        """List the folder, and forget what an earlier listing has shown."""
        raise NotImplementedError

    def _list_again(self, start: int, end: int) -> None:
        """List the folder for a read of [start, end); `OffsetOutOfRange` with `GONE` if it was deleted."""
        try:
            self._list()
        except FileNotFoundError:
            raise OffsetOutOfRange(self._topic, self._partition, (start, end), GONE) from None
