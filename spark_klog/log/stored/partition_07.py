"""A partition's log of Kafka 0.7, read without a broker.

    TOPIC-PARTITION/
        00000000000000000000.kafka      messages one after the other, see records/formats/message_07.py; no index
        00000000000536870984.kafka      the next ones; a file is named by the offset of its first byte

An offset is a byte position in the stream of all messages ever written to the partition. The oldest files may have
been deleted; every other file starts where the one before it ends. Names have 11 digits in the design chapter, 20 in
Kafka 0.7 itself; any number is accepted. A broker may be writing to the last file: it may end with a partial message.

Source: 0.7 design chapter, "Log".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import closing

from spark_klog.errors import ConfigError, DecodeError, ErrorWithFields, OffsetOutOfRange
from spark_klog.files.folder import ReadableFolder
from spark_klog.log.partition_files import SUFFIX_07
from spark_klog.log.stored.partition import ListedPartition
from spark_klog.log.stored.segment import StoredBatches
from spark_klog.records.contract import Record
from spark_klog.records.formats.message_07 import Message07, iter_messages_07, records_07
from spark_klog.records.formats.message_set import build_message
from spark_klog.records.reading.reader import BadBatch, refuse
from spark_klog.wire.codecs import MAX_DECOMPRESSED

_BLOCK_BYTES = 1024 * 1024


class NoMessageAtOffset(ErrorWithFields, ConfigError):
    """An offset of Kafka 0.7 lies within a message: `before` is the offset of that message, `after` of the next."""

    condition = "KLOG_NO_MESSAGE_AT_OFFSET"

    def __init__(self, topic: str, partition: int, file: str, offset: int, before: int, after: int) -> None:
        self.topic, self.partition, self.file = topic, partition, file
        self.offset, self.before, self.after = offset, before, after
        super().__init__(
            f"no message of {topic}-{partition} begins at offset {offset} ({file}): "
            f"the nearest offsets are {before} and {after}"
        )


class StoredPartition07(ListedPartition):
    """A log of Kafka 0.7; methods as of `StoredPartition`. `limit`: maximum decompressed bytes of a message set."""

    def __init__(
        self, files: ReadableFolder, folder: str, topic: str, partition: int, limit: int = MAX_DECOMPRESSED
    ) -> None:
        super().__init__(files, folder, topic, partition)
        self._limit = limit

    def _list(self) -> None:
        entries = [entry for entry in self._files.entries(self._folder) if entry.name.endswith(SUFFIX_07)]
        stems = [(entry.name.removesuffix(SUFFIX_07), entry) for entry in entries]
        #: Names of .kafka files that are no offsets; they are not read.
        self.misnamed = [entry.name for stem, entry in stems if not (stem.isascii() and stem.isdecimal())]
        files = sorted((int(stem), entry.size, entry.name) for stem, entry in stems if entry.name not in self.misnamed)
        self._bases = [base for base, *_ in files]
        self._sizes = [size for _, size, _ in files]
        self.paths = [f"{self._folder}/{name}" for *_, name in files]
        self._end: tuple[int, DecodeError | None] | None = None

    @property
    def is_empty(self) -> bool:
        return not self._bases

    @property
    def start_offset(self) -> int:
        return self._bases[0] if self._bases else 0

    @property
    def end_offset(self) -> int:
        return self._find_end()[0]

    @property
    def damage(self) -> DecodeError | None:
        return self._find_end()[1]

    def _find_end(self) -> tuple[int, DecodeError | None]:
        if self._end is None:
            end, damage = self.start_offset, None
            if self._bases:
                end = self._bases[-1]
                try:
                    for message in self._messages(len(self._bases) - 1):
                        end = message.next_offset
                except DecodeError as error:
                    damage = error
            self._end = end, damage
        return self._end

    @property
    def tail(self) -> tuple[int, int]:
        """(position, size) of the partial message at the end of the last file; without one the size is 0."""
        position = self.end_offset - self._bases[-1]
        return position, self._sizes[-1] - position

    def holes(self) -> Iterator[tuple[str, str]]:
        """(path, problem) of files that do not begin where the one before them ends."""
        for number, (base, size) in enumerate(zip(self._bases[:-1], self._sizes, strict=False)):
            end, following, path = base + size, self._bases[number + 1], self.paths[number + 1]
            if end != following:
                yield (
                    path,
                    f"{self.paths[number]} ends at offset {end}, {path.rpartition('/')[2]} begins at {following}: "
                    f"{'a file between them is missing' if end < following else 'they overlap'}; restore it, or move "
                    "the files before or after it elsewhere",
                )

    def offset_for_time(self, timestamp: int) -> None:
        """None: messages of 0.7 have no timestamps."""

    def timestamp_type(self, offset: int) -> None:
        """None: messages of 0.7 have no timestamps."""

    def check_offset(self, offset: int) -> None:
        """Raise `NoMessageAtOffset` if the offset lies within a message."""
        index = bisect_right(self._bases, offset) - 1
        if index < 0:
            return
        for message in self._messages(index):
            if message.offset >= offset:
                return
            if offset < message.next_offset:
                around = message.offset, message.next_offset
                raise NoMessageAtOffset(self._topic, self._partition, self.paths[index], offset, *around)

    def cuts(self, start: int, end: int, target: int) -> list[int]:
        # only the starts of files: there is no index with other offsets
        bounds, last = [], start
        for base, following in zip(self._bases, [*self._bases[1:], end], strict=True):
            if last < base < end and min(following, end) - last > target:
                bounds.append(base)
                last = base
        return bounds

    def read(self, start: int, end: int, on_bad: Callable[[BadBatch], None] = refuse) -> Iterator[StoredBatches]:
        # Messages become those of magic 0 for the common decoder; those of a compressed set have the offset of the set.
        offset = start
        if offset < self.start_offset:
            self._out_of_range(offset, end)
        for index in range(max(0, bisect_right(self._bases, offset) - 1), len(self._bases)):
            try:
                for messages in self._blocks(index, offset, end):
                    following = messages[-1].next_offset
                    yield StoredBatches(self._converted(messages, on_bad), following, [])
                    offset = following
            except FileNotFoundError:
                self._list_again(offset, end)
                self._out_of_range(offset, end)
            if offset >= end:
                return
        if offset < end:
            self._list_again(offset, end)
            if self.end_offset < end:
                self._out_of_range(offset, end)

    def _converted(self, messages: list[Message07], on_bad: Callable[[BadBatch], None]) -> memoryview:
        converted = bytearray()
        for message in messages:
            try:
                records = list(records_07(message, self._limit))
            except DecodeError as error:
                named = type(error)(f"{self._topic}-{self._partition}: {error}")
                on_bad(BadBatch(message.offset, message.payload, named))
                continue
            for record in records:
                converted += build_message(0, record.offset, record.timestamp, None, record.value)
        return memoryview(converted)

    def _blocks(self, index: int, start: int, end: int) -> Iterator[list[Message07]]:
        """The messages of a file with offsets in [start, end), a few at a time."""
        block: list[Message07] = []
        size = 0
        for message in self._messages(index):
            if message.offset >= end:
                break
            if message.offset < start:
                continue
            block.append(message)
            size += len(message.payload)
            if size >= _BLOCK_BYTES:
                yield block
                block, size = [], 0
        if block:
            yield block

    def messages(self) -> Iterator[tuple[Message07, list[Record]]]:
        """All messages with their records; `DecodeError` at other bytes and at corrupt ones names file and position."""
        end = self.end_offset
        for index, path in enumerate(self.paths):
            for message in self._messages(index):
                if message.offset >= end:  # written since the listing
                    return
                try:
                    yield message, list(records_07(message, self._limit))
                except DecodeError as error:
                    position = message.offset - self._bases[index]
                    raise type(error)(f"{path} at position {position}: {error}") from None

    def _messages(self, index: int) -> Iterator[Message07]:
        """The messages of a file. `DecodeError` at other bytes, or if the next file does not start at its end."""
        base, path = self._bases[index], self.paths[index]
        position, chunk = 0, _BLOCK_BYTES
        with closing(self._files.open(path)) as file:
            while position < file.size:
                data, last = file.read_at(position, chunk), position
                try:
                    for message in iter_messages_07(data, base + position):
                        yield message
                        last = message.next_offset - base
                except DecodeError as error:
                    raise type(error)(f"{path} at position {last}: {error}") from None
                if last == position and position + len(data) >= file.size:
                    break
                chunk = _BLOCK_BYTES if last > position else 2 * chunk
                position = last
        if index + 1 < len(self._bases) and base + position != self._bases[index + 1]:
            raise DecodeError(
                f"{path}: the last complete message ends at offset {base + position}, the next file starts at "
                f"{self._bases[index + 1]}"
            )

    def _out_of_range(self, offset: int, end: int) -> None:
        available = self.start_offset, self.end_offset
        raise OffsetOutOfRange(self._topic, self._partition, (offset, end), available)
