"""Detection of batches with wrong offsets. No checksum covers a batch's base offset (see formats/batch.py): a flipped
bit shifts all its records, or hides the batches that follow.

In an intact log each batch begins after the end of the one before it, and the last one ends at or before the log's
end. If two batches overlap, the wrong one is the one with a gap to its other neighbour: in an intact log only
compaction leaves gaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from types import MappingProxyType
from typing import NamedTuple

from spark_klog.base.settings import INT64_MAX
from spark_klog.errors import DecodeError
from spark_klog.records import kernels
from spark_klog.records.formats.batch import MAGIC_POSITION, MIN_BATCH_SIZE, PREFIX, check_crc, read_header
from spark_klog.records.formats.batch_v2 import HEADER_SIZE, LOG_OVERHEAD
from spark_klog.wire.primitives import Buffer

_INT32, _DELTA_POSITION = Struct(">i"), 23
#: The value of `damaged` if all batches are intact.
NOTHING: Mapping[int, DecodeError] = MappingProxyType({})
#: The value of `log_end` if it is not known.
NO_END = 1 << 64


class _Span(NamedTuple):
    """A batch's position, and its offsets [first, following) by its header; for a message, its last offset only."""

    position: int
    size: int
    first: int
    following: int
    is_message: bool


class End(NamedTuple):
    """The offset to continue with, and the position of its batch in the data."""

    offset: int
    position: int


class OffsetOrder:
    """The offsets in the headers of `data`: whole batches of any magic, up to the first bytes that are not a batch.

    Reading begins at `offset`; `log_end` is the offset after the log's last record.
    """

    def __init__(self, data: Buffer, offset: int, log_end: int = NO_END) -> None:
        self._view = memoryview(data)
        self._offset, self._log_end = offset, log_end
        #: By position: the error of each batch that is corrupt, or has wrong offsets.
        self.damaged: dict[int, DecodeError] = {}
        #: Whether any batch is of magic 0 or 1.
        self.has_messages = False
        self._ordered = kernels.load().ordered_batches(self._view, min(log_end, INT64_MAX))
        if self._ordered is None:
            self._compare()
        else:
            #: Number of offsets by the headers; each message or wrapper counts as one.
            self.length = self._ordered.offsets
            #: The leader epoch of the last batch; -1 without one, and for batches of magic 0 and 1.
            self.last_leader_epoch = self._ordered.leader_epoch

    def _compare(self) -> None:
        """Compare the offsets of each batch with those of the batches beside it."""
        self._spans = _spans(self._view)
        #: By position: the offset after the intact batches before it; None for the first one.
        self._expected: dict[int, int | None] = {}
        self.length = sum(span.following - span.first for span in self._spans)
        self.has_messages = any(span.is_message for span in self._spans)
        has_epoch = self._spans and not self._spans[-1].is_message
        self.last_leader_epoch = (
            _INT32.unpack_from(self._view, self._spans[-1].position + LOG_OVERHEAD)[0] if has_epoch else -1
        )
        # batches with impossible offsets are not compared with others
        possible = [span for span in self._spans if 0 <= span.first < span.following <= self._log_end]
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
        """Whether a batch lies between those before it, which end at `expected`, and those from `index` on."""
        shared = 1 if span.is_message else 0  # the messages of a set of Kafka 0.7 share its offset
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
            f"batch of offsets {span.first}-{span.following - 1} has a wrong base offset: "
            f"it must be{after or before}{' and' if after and before else ''}{before if after else ''}"
        )

    def end(self) -> End | None:
        """End of the intact batches; None if there are none.

        The header of a corrupt batch is not trusted. A batch at the end of the data with a gap before it is left for
        the next read, which sees it together with the batch that follows. A damaged batch does not count as a gap.
        """
        last = self._ordered
        if last is not None and last.is_intact:
            if self._offset < last.before < last.first:
                return End(last.before, last.position)
            return End(last.following, last.position + last.size)
        if last is not None:
            self._ordered = None
            self._compare()
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

    def _undecided(self) -> End | None:
        """The end before the last two, if they overlap and the next batch must show which of them is wrong."""
        if len(self._spans) < 2 or self._spans[-1].position not in self.damaged:
            return None
        span, expected = self._spans[-2], self._expected[self._spans[-2].position]
        if not span.is_message or span.position in self.damaged or expected is None or expected <= self._offset:
            return None
        return End(expected, span.position) if self._spans[-1].first < span.following else None


def _spans(view: memoryview) -> list[_Span]:
    """Walk as `batch.iter_batches`, but inline, since a fetch may hold ten thousand messages."""
    spans = []
    position, last = 0, len(view) - MIN_BATCH_SIZE
    while position <= last:
        offset, length = PREFIX.unpack_from(view, position)
        magic, size = view[position + MAGIC_POSITION], length + LOG_OVERHEAD
        if magic > 2 or size < (HEADER_SIZE if magic == 2 else MIN_BATCH_SIZE) or size > len(view) - position:
            break
        delta = _INT32.unpack_from(view, position + _DELTA_POSITION)[0] if magic == 2 else 0
        spans.append(_Span(position, size, offset, offset + delta + 1, magic < 2))
        position += size
    return spans
