"""Batches whose offsets can't be right. No checksum covers where a batch begins (see batch.py): a flipped bit there
moves all its records, or hides what follows.

In a sound log each batch begins after the end of the one before it, and the last one ends at the log's end at most. Of
two that overlap the one lies that does not begin where its predecessor ends: only compaction leaves gaps.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from spark_klog.errors import DecodeError
from spark_klog.records.batch import MIN_BATCH_SIZE, check_crc, read_header
from spark_klog.records.batch_v2 import HEADER_SIZE, LOG_OVERHEAD
from spark_klog.wire.primitives import Buffer

_PREFIX, _DELTA = Struct(">qi"), Struct(">i")
_MAGIC_POSITION, _DELTA_POSITION = 16, 23
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
        #: Where the batch before each of them ends, None for the first one.
        self._expected: list[int | None] = []
        self.damaged: dict[int, DecodeError] = {}
        expected: int | None = None
        for index, span in enumerate(self._spans):
            self._expected.append(expected)
            if self._is_wrong(index, expected):
                self.damaged[span.position] = self._error(span, expected)
            else:
                expected = span.following

    def _is_wrong(self, index: int, expected: int | None) -> bool:
        span = self._spans[index]
        if span.following > self._log_end or (expected is not None and span.first < expected):
            return True
        if index + 1 == len(self._spans) or self._spans[index + 1].first >= span.following:
            return False
        # the next one begins within it
        if self._crc_error(span) is not None:
            return True
        place = self._offset if expected is None else expected
        if self._spans[index + 1].first < place:
            return False
        if not span.is_message:
            return span.first > place
        return index + 2 < len(self._spans) and self._spans[index + 2].first < span.following

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

    def end(self) -> End | None:
        """Where the sound batches end; None where there is none.

        A corrupt batch may say anything about its own end. One with a gap before it, at the end of the data, is left
        for the next read, where it is seen beside the batch that follows it. A damaged batch is no gap.
        """
        may_cut = not any(span.position in self.damaged for span in self._spans[-2:])
        for span, expected in zip(reversed(self._spans), reversed(self._expected), strict=True):
            if span.position in self.damaged or self._crc_error(span) is not None:
                continue
            is_last = may_cut and span is self._spans[-1] and span.following != self._log_end
            if is_last and not span.is_message and expected is not None and self._offset < expected < span.first:
                return End(expected, span.position)
            return End(span.following, self._spans[-1].position + self._spans[-1].size)
        return None


def _spans(view: memoryview) -> list[_Span]:
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
