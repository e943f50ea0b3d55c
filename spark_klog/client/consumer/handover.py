"""The records being handed to the caller: a fetched chunk, part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from spark_klog.client.consumer.assigned import Assigned, Assignment
from spark_klog.client.consumer.decoding.chunk import Chunk
from spark_klog.client.consumer.fetching import Fetches


@dataclass(slots=True)
class _Decoding:
    """A chunk being returned to the caller; `run` is the partition's, unless e.g. a seek has begun another."""

    item: Assigned
    parts: Iterator[tuple[Any, int]]
    run: int
    following: int
    leader_epoch: int


class Handover:
    """Decodes fetched chunks and moves the partitions' positions with each part that a call returns.

    Call `begin` at the beginning of each call of the user, and `undo` if an interrupt ends it.
    """

    def __init__(self, assignment: Assignment, fetches: Fetches) -> None:
        self._assignment, self._fetches = assignment, fetches
        self._decoding: _Decoding | None = None
        #: What the part being returned has changed, to undo it: (partition, run, position, epoch). None once the caller
        #: has the part.
        self.returned: tuple[Assigned, int, int | None, int] | None = None
        #: Whether `_decoding` is from the Arrow decoder.
        self._decodes_arrow = False

    def begin(self, is_arrow: bool) -> None:
        """Begin a call that returns Arrow batches or records; a chunk decoded into the other kind is fetched again."""
        if is_arrow is not self._decodes_arrow:
            self._decodes_arrow, self._decoding = is_arrow, None
            self._fetches.rewind()
        self.returned = None

    def undo(self) -> None:
        """Return to the positions of the last call that has returned; nothing is lost or returned twice."""
        if self.returned is not None:
            item, run, position, epoch = self.returned
            if item.run == run:
                item.position, item.epoch = position, epoch
        self.returned = self._decoding = None
        self._fetches.abandon()

    def take(self, decode: Callable[[Chunk], Iterator[tuple[Any, int]]]) -> bool:
        """Take the next fetched chunk, to be decoded with `decode`; False if there is none."""
        chunk = self._fetches.take()
        if chunk is None:
            return False
        item = self._assignment.get((chunk.topic, chunk.partition))
        assert item is not None
        self._decoding = _Decoding(item, decode(chunk), chunk.run, chunk.following, chunk.leader_epoch)
        return True

    def next_part(self) -> Any:
        """The next part of the current chunk, None at its end."""
        while (decoding := self._decoding) is not None:
            item = decoding.item
            if self._assignment.get(item.key) is not item or item.run != decoding.run:
                self._release()
                return None
            try:
                part, position = next(decoding.parts, (None, decoding.following))
            except BaseException:  # an interrupt, too: an iterator that has raised looks like one at its end
                self._release()
                item.rewind()
                raise
            self.returned = item, item.run, item.position, item.epoch
            item.position, item.epoch = position, decoding.leader_epoch
            if part is None:
                self._release()
            elif len(part):
                return part
        return None

    def _release(self) -> None:
        self._decoding = None
        self._fetches.release()

    def close(self) -> None:
        """Drop the chunk being decoded."""
        self._decoding = None
