"""Batches whose offsets can't be right. No checksum covers where a batch begins (see batch.py): a flipped bit there
moves all its records, or hides what follows.

In a sound log each batch begins after the end of the one before it, and the last one ends at the log's end at most. Of
two that overlap the one lies that leaves a gap to its other neighbour: only compaction leaves gaps in sound logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from types import MappingProxyType
from typing import NamedTuple

from spark_klog.errors import DecodeError
from spark_klog.records.batch import MIN_BATCH_SIZE, check_crc, read_header
from spark_klog.records.batch_v2 import HEADER_SIZE, LOG_OVERHEAD
from spark_klog.wire.primitives import Buffer

_PREFIX, _DELTA = Struct(">qi"), Struct(">i")
_MAGIC_POSITION, _DELTA_POSITION = 16, 23
#: No batch is damaged.
NOTHING: Mapping[int, DecodeError] = MappingProxyType({})
#: Where the end of the log is not known.
NO_END = 1 << 64


class _Span(NamedTuple):
    """A batch as its header says: [first, following), where it is. A message says only its last offset."""

    position: int
    size: int
    first: int
    following: int
    is_message: bool


class End(NamedTuple):
    """The offset to go on with, and where in the data its batch begins."""

    offset: int
    position: int


class OffsetOrder:
    """What the headers in `data` say of offsets: whole batches of any magic, up to the first that is none.

    `damaged` has the error of each batch, by its position, that is corrupt or not where it should be. `offset` is where
    reading begins, `log_end` the offset after the log's last record.
    """

    def __init__(self, data: Buffer, offset: int, log_end: int = NO_END) -> None:
        self._view = memoryview(data)
        self._offset, self._log_end = offset, log_end
        self._spans = _spans(self._view)
        #: Where the batch before each of them ends, by position; None for the first one.
        self._expected: dict[int, int | None] = {}
        self.damaged: dict[int, DecodeError] = {}
        # what is impossible by itself does not bear witness about others
        possible = [span for span in self._spans if 0 <= span.first < span.following <= log_end]
        index, expected = 0, None
        for span in self._spans:
            self._expected[span.position] = expected
            is_possible = index < len(possible) and span is possible[index]
            index += is_possible
            if is_possible and self._is_in_order(span, expected, possible, index):
                expected = span.following
            else:
                self.damaged[span.position] = self._error(span, expected)

    def _is_in_order(self, span: _Span, expected: int | None, possible: list[_Span], index: int) -> bool:
        """Whether a batch is between those before it, which end at `expected`, and those from `index` on."""
        shared = 1 if span.is_message else 0  # those of a set of Kafka 0.7 share its offset
        if expected is not None and span.first < expected - shared:
            return False
        if index == len(possible) or possible[index].first >= span.following - shared:
            return True
        # the next one begins within it
        if self._crc_error(span) is not None:
            return False
        following = possible[index]
        third = possible[index + 1] if index + 1 < len(possible) else None
        if not following.is_message and following.following == (self._log_end if third is None else third.first):
            return False
        place = self._offset if expected is None else expected
        if span.first <= place:
            return True
        if not span.is_message and following.first >= place:
            return False
        if expected is None and following.first <= place < following.following:
            return False
        return third is None or third.first >= span.following

    def _crc_error(self, span: _Span) -> DecodeError | None:
        try:
            header = read_header(self._view, span.position)
            check_crc(header, self._view[span.position : span.position + span.size])
        except DecodeError as error:
            return error
        return None

    def _error(self, span: _Span, expected: int | None) -> DecodeError:
        after = "" if expected is None else f" after {expected - 1}"
        before = "" if self._log_end == NO_END else f" before {self._log_end}"
        return self._crc_error(span) or DecodeError(
            f"batch of offsets {span.first}-{span.following - 1} is not where it says: "
            f"its place is{after or before}{' and' if after and before else ''}{before if after else ''}"
        )

    @property
    def length(self) -> int:
        """How many offsets the batches say that they have; a wrapper does not say it."""
        return sum(span.following - span.first for span in self._spans)

    @property
    def has_messages(self) -> bool:
        """Whether one of them is of magic 0 or 1."""
        return any(span.is_message for span in self._spans)

    def _undecided(self) -> End | None:
        """Where the last two overlap, and the first of them is a message: what follows tells which of them lies."""
        if len(self._spans) < 2 or self._spans[-1].position not in self.damaged:
            return None
        span, expected = self._spans[-2], self._expected[self._spans[-2].position]
        if not span.is_message or span.position in self.damaged or expected is None or expected <= self._offset:
            return None
        return End(expected, span.position) if self._spans[-1].first < span.following else None

    def end(self) -> End | None:
        """Where the sound batches end; None where there is none.

        A corrupt batch may say anything about its own end. One with a gap before it, at the end of the data, is left
        for the next read, where it is seen beside the batch that follows it. A damaged batch is no gap.
        """
        if (left := self._undecided()) is not None:
            return left
        may_cut = not any(span.position in self.damaged for span in self._spans[-2:])
        for span in reversed(self._spans):
            expected = self._expected[span.position]
            if span.position in self.damaged or self._crc_error(span) is not None:
                continue
            is_last = may_cut and span is self._spans[-1]
            if is_last and not span.is_message and expected is not None and self._offset < expected < span.first:
                return End(expected, span.position)
            return End(span.following, self._spans[-1].position + self._spans[-1].size)
        return None


def _spans(view: memoryview) -> list[_Span]:
    """As `batch.iter_batches` walks, with nothing called: a fetch may hold ten thousand messages."""
    found = []
    position, last = 0, len(view) - MIN_BATCH_SIZE
    while position <= last:
        offset, length = _PREFIX.unpack_from(view, position)
        magic, size = view[position + _MAGIC_POSITION], length + LOG_OVERHEAD
        if magic > 2 or size < (HEADER_SIZE if magic == 2 else MIN_BATCH_SIZE) or size > len(view) - position:
            break
        delta = _DELTA.unpack_from(view, position + _DELTA_POSITION)[0] if magic == 2 else 0
        found.append(_Span(position, size, offset, offset + delta + 1, magic < 2))
        position += size
    return found
