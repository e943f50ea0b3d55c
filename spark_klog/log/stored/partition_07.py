"""Read a partition's folder of Kafka 0.7 without a broker: files of messages (records/formats/message_07.py), no index.

    OFFSET.kafka    the name is the position of its first byte in the stream of all messages, which is its offset

Messages are converted to magic 0 for the common decoder; the messages of a compressed set have the offset of the set.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

from spark_klog.errors import DecodeError, OffsetOutOfRange
from spark_klog.log.files.partition_files import SUFFIX_07
from spark_klog.log.log_07 import NoMessageAtOffset
from spark_klog.log.stored.files import LogFiles, opened
from spark_klog.log.stored.partition import ListedPartition, StoredBatches
from spark_klog.records.formats.message_07 import Message07, iter_messages_07, records_07
from spark_klog.records.formats.message_set import build_message
from spark_klog.records.reading.reader import BadBatch, refuse
from spark_klog.wire.codecs import MAX_DECOMPRESSED

_BLOCK_BYTES = 1024 * 1024


class StoredPartition07(ListedPartition):
    """The log in `folder`, as of its listing. `FileNotFoundError` if the folder does not exist, OSError.

    `limit`: maximum decompressed bytes of a message set.
    """

    def __init__(self, files: LogFiles, folder: str, topic: str, partition: int, limit: int = MAX_DECOMPRESSED) -> None:
        super().__init__(files, folder, topic, partition)
        self._limit = limit

    def _list(self) -> None:
        names = [entry.name for entry in self._files.entries(self._folder) if entry.name.endswith(SUFFIX_07)]
        found = {int(name.removesuffix(SUFFIX_07)): name for name in names if name.removesuffix(SUFFIX_07).isdecimal()}
        self._bases = sorted(found)
        self._paths = [f"{self._folder}/{found[base]}" for base in self._bases]
        self._end: tuple[int, DecodeError | None] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no file of Kafka 0.7."""
        return not self._bases

    @property
    def start_offset(self) -> int:
        """The offset of the first file."""
        return self._bases[0] if self._bases else 0

    @property
    def end_offset(self) -> int:
        """The offset after the last complete message."""
        return self._find_end()[0]

    @property
    def damage(self) -> DecodeError | None:
        """The error of bytes after the last complete message that are not a partial message."""
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

    def offset_for_time(self, timestamp: int) -> int | None:
        """None: messages of 0.7 have no timestamps."""
        return None

    def timestamp_type(self, offset: int) -> int | None:
        """None: messages of 0.7 have no timestamps."""
        return None

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
                raise NoMessageAtOffset(self._topic, self._partition, self._paths[index], offset, *around)

    def cuts(self, start: int, end: int, target: int) -> list[int]:
        """The starts of files in (start, end), about `target` bytes apart: there is no index with others."""
        found, last = [], start
        for base, following in zip(self._bases, [*self._bases[1:], end], strict=True):
            if last < base < end and min(following, end) - last > target:
                found.append(base)
                last = base
        return found

    def read(self, start: int, end: int, on_bad: Callable[[BadBatch], None] = refuse) -> Iterator[StoredBatches]:
        """The messages with offsets in [start, end). Corrupt ones go to `on_bad`.

        `OffsetOutOfRange` if the log does not have the offsets, `DecodeError` at bytes that are not a message, OSError.
        """
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
        """Convert to messages of magic 0."""
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
        found: list[Message07] = []
        size = 0
        for message in self._messages(index):
            if message.offset >= end:
                break
            if message.offset < start:
                continue
            found.append(message)
            size += len(message.payload)
            if size >= _BLOCK_BYTES:
                yield found
                found, size = [], 0
        if found:
            yield found

    def _messages(self, index: int) -> Iterator[Message07]:
        """The messages of a file. `DecodeError` at other bytes, or if the next file does not start at its end."""
        base = self._bases[index]
        with opened(self._files, self._paths[index]) as file:
            position, chunk = 0, _BLOCK_BYTES
            while position < file.size:
                data, last = file.read(position, chunk), position
                for message in iter_messages_07(data, base + position):
                    yield message
                    last = message.next_offset - base
                if last == position and position + len(data) >= file.size:
                    break
                chunk = _BLOCK_BYTES if last > position else 2 * chunk
                position = last
            if index + 1 < len(self._bases) and base + position != self._bases[index + 1]:
                raise DecodeError(
                    f"the last complete message ends at offset {base + position}, the next file starts at "
                    f"{self._bases[index + 1]}"
                )

    def _out_of_range(self, offset: int, end: int) -> None:
        available = self.start_offset, self.end_offset
        raise OffsetOutOfRange(self._topic, self._partition, (offset, end), available)
