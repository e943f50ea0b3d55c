"""The leader epochs of a log and their start offsets (KIP-101), stored in leader-epoch-checkpoint."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from pathlib import Path

from spark_klog.log.files.file_system import FileSystem
from spark_klog.log.files.partition_files import leader_epochs_of, write_leader_epochs

#: Without replication a leader never changes: a log keeps its last epoch.
_FIRST_EPOCH = 0
_NONE = -1


class LeaderEpochs:
    """The epochs of one log. The file is read at first use, as a start opens thousands of logs."""

    def __init__(self, files: FileSystem, folder: Path) -> None:
        self._files = files
        self._folder = folder

    @cached_property
    def _epochs(self) -> list[tuple[int, int]]:
        """(epoch, start offset), ascending."""
        return leader_epochs_of(self._files, self._folder)

    @property
    def latest(self) -> int:
        """The epoch of new record batches."""
        return self._epochs[-1][0] if self._epochs else _FIRST_EPOCH

    def begin(self, offset: int) -> None:
        """Start the first epoch at `offset` if the log has none, as it is new; OSError."""
        if not self._epochs:
            write_leader_epochs(self._files, self._folder, _FIRST_EPOCH, offset)
            self._epochs.append((_FIRST_EPOCH, offset))

    def end_of(self, epoch: int, start_offset: int, end_offset: int) -> tuple[int, int]:
        """(the largest epoch not above `epoch`, the offset after its last record); -1 if unknown.

        The log has the records of [start_offset, end_offset). As Kafka's OffsetForLeaderEpoch (KIP-101, KIP-279).
        """
        if epoch == self.latest:
            return epoch, end_offset
        after = bisect_right(self._epochs, epoch, key=lambda entry: entry[0])
        if epoch < 0 or after == len(self._epochs):
            return _NONE, _NONE
        return (self._epochs[after - 1][0] if after else epoch), max(start_offset, self._epochs[after][1])
