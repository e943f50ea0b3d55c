"""The leader epochs of a log, and where each begins (KIP-101); kept in leader-epoch-checkpoint."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from pathlib import Path

from spark_klog.log.file_system import FileSystem
from spark_klog.log.partition_files import leader_epochs_of, write_leader_epochs

#: Without replication a leader stays one for ever: a log goes on with the last epoch that it has.
_FIRST_EPOCH = 0
_NONE = -1


class LeaderEpochs:
    """Read when they are first asked for, as a start opens thousands of logs."""

    def __init__(self, files: FileSystem, folder: Path) -> None:
        self._files = files
        self._folder = folder

    @cached_property
    def _epochs(self) -> list[tuple[int, int]]:
        """(epoch, start offset) of each."""
        return leader_epochs_of(self._files, self._folder)

    @property
    def latest(self) -> int:
        """The epoch that batches are appended with."""
        return self._epochs[-1][0] if self._epochs else _FIRST_EPOCH

    def begin(self, offset: int) -> None:
        """Note that the first epoch begins at `offset`, if no epoch is known: the log is new. OSError."""
        if not self._epochs:
            write_leader_epochs(self._files, self._folder, _FIRST_EPOCH, offset)
            self._epochs.append((_FIRST_EPOCH, offset))

    def end_of(self, epoch: int, start_offset: int, end_offset: int) -> tuple[int, int]:
        """(the largest epoch not above `epoch`, the offset after its last record), -1 where that is not known.

        The log has the records of [start_offset, end_offset). As Kafka answers OffsetForLeaderEpoch (KIP-101, KIP-279).
        """
        if epoch == self.latest:
            return epoch, end_offset
        after = bisect_right(self._epochs, epoch, key=lambda entry: entry[0])
        if epoch < 0 or after == len(self._epochs):
            return _NONE, _NONE
        return (self._epochs[after - 1][0] if after else epoch), max(start_offset, self._epochs[after][1])
