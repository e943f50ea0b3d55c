"""The map from a source's offsets to the target's, and its records in the mirror's topic.

The map of a partition is a list of runs: consecutive offsets at the source that are consecutive at the target, too.
A gap on either side (markers of transactions, compaction, records of other producers) begins another run. The last
run ends at the mirror's position, so the map is also its progress.

A record of the topic is a run. Its first fields are those of an OffsetSync of Kafka's MirrorMaker 2, whose readers
take it as one: "the source's offset `upstream` is the target's offset `downstream`".

    key     topic STRING (INT16 length, UTF-8), partition INT32
    value   upstream INT64, downstream INT64; then, of the run that ends there, the first source offset INT64

No I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from struct import Struct, error as StructError
from typing import NamedTuple

from spark_klog.base.names import TopicPartition
from spark_klog.errors import DecodeError

_LENGTH, _PARTITION, _VALUE, _MM2_VALUE = Struct(">h"), Struct(">i"), Struct(">qqq"), Struct(">qq")
#: The most runs of a partition that are kept; older offsets are then mapped to an earlier record.
_MOST_RUNS = 10_000


class Run(NamedTuple):
    """The source's offsets [first, upstream) are the target's offsets up to `downstream`; it may be empty."""

    first: int
    upstream: int
    downstream: int

    @property
    def is_empty(self) -> bool:
        return self.first == self.upstream

    @property
    def shift(self) -> int:
        return self.downstream - self.upstream


class PartitionMap:
    """The runs of one partition, by offset."""

    def __init__(self) -> None:
        self._runs: list[Run] = []
        #: How many runs at the end have changed since `take_changes`.
        self._changed = 0

    @property
    def position(self) -> int | None:
        """The source's offset up to which the partition is mirrored; None before the first run."""
        return self._runs[-1].upstream if self._runs else None

    @property
    def downstream(self) -> int:
        """The target's offset after the last record that was written; 0 before the first."""
        return self._runs[-1].downstream if self._runs else 0

    def load(self, run: Run) -> None:
        """Add a run as it was written; one that begins before the end of the last replaces what it overlaps."""
        while self._runs and self._runs[-1].upstream > run.first:
            self._runs.pop()
        if not (run.is_empty and self._runs and self._runs[-1].upstream == run.upstream):
            self._add(run)

    def copied(self, first: int, count: int, target: int) -> None:
        """Note records that were written: `count` from the source's offset `first`, at the target's from `target`."""
        last = self._runs[-1] if self._runs else None
        if last is not None and (last.upstream, last.downstream) == (first, target):
            self._runs[-1] = Run(last.first, first + count, target + count)
            self._changed = max(self._changed, 1)
        else:
            self._changed += self._add(Run(first, first + count, target + count))

    def moved(self, position: int) -> None:
        """Note that nothing is left to copy before this source offset."""
        last = self._runs[-1] if self._runs else None
        if last is None or last.upstream < position:
            self._changed += self._add(Run(position, position, 0 if last is None else last.downstream))

    def write_again(self) -> None:
        """Make the last run part of the next changes."""
        self._changed = max(self._changed, min(1, len(self._runs)))

    def take_changes(self) -> list[Run]:
        """The runs to write, in order: all that have changed since the last call."""
        changed = self._runs[len(self._runs) - self._changed :]
        self._changed = 0
        return changed

    def translate(self, offset: int) -> int | None:
        """The target's offset to read from instead of the source's `offset`; never too late.

        Exact within a run; else the end of the run before it. None before the first known run: read from the beginning.
        """
        index = bisect_right(self._runs, offset, key=lambda run: run.upstream)
        if index < len(self._runs) and self._runs[index].first <= offset:
            return offset + self._runs[index].shift
        return self._runs[index - 1].downstream if index else None

    def _add(self, run: Run) -> bool:
        """Append a run, in place of an empty one that ends where it begins; return whether more runs have changed."""
        if self._runs and self._runs[-1].is_empty and self._runs[-1].upstream == run.first:
            self._runs[-1] = run
            return not self._changed
        self._runs.append(run)
        if len(self._runs) > _MOST_RUNS:
            del self._runs[: _MOST_RUNS // 10]
            self._changed = min(self._changed, len(self._runs) - 1)
        return True


def encode_run(key: TopicPartition, run: Run) -> tuple[bytes, bytes]:
    """The record of a run: (key, value)."""
    return encode_key(key), _VALUE.pack(run.upstream, run.downstream, run.first)


def encode_key(key: TopicPartition) -> bytes:
    """The key of a partition's records."""
    name = key[0].encode()
    return _LENGTH.pack(len(name)) + name + _PARTITION.pack(key[1])


def decode_key(key: bytes) -> TopicPartition:
    """Decode a record's key; `DecodeError`."""
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(key)[0]
        if len(key) != end + _PARTITION.size:
            raise DecodeError(f"a key of {len(key)} bytes holds no topic and partition")
        return key[_LENGTH.size : end].decode(), _PARTITION.unpack_from(key, end)[0]
    except (StructError, UnicodeDecodeError) as error:
        raise DecodeError(f"not a record of a mirror's offsets: {error}") from None


def decode_run(value: bytes) -> Run:
    """Decode the value of a partition's record; one of MirrorMaker 2 is an empty run. `DecodeError`."""
    try:
        upstream, downstream = _MM2_VALUE.unpack_from(value)
        first = _VALUE.unpack_from(value)[2] if len(value) >= _VALUE.size else upstream
    except StructError as error:
        raise DecodeError(f"not a record of a mirror's offsets: {error}") from None
    return Run(min(first, upstream), upstream, downstream)
