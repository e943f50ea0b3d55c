"""Read a partition's log of Kafka 0.7.

    TOPIC-PARTITION/
        00000000000000000000.kafka      messages one after the other, see records/formats/message_07.py
        00000000000536870984.kafka      the next ones; a file is named by the offset of its first byte

An offset is a byte position in the stream of all messages ever written to the partition. The oldest files may have
been deleted; every other file starts where the one before it ends. Names have 11 digits in the design chapter, 20 in
Kafka 0.7 itself; any number is accepted. A broker may be writing to the last file: it may end with a partial message.

Source: 0.7 design chapter, "Log".
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from spark_klog.errors import ConfigError, DecodeError, ErrorWithFields, LogCorrupted, OffsetOutOfRange
from spark_klog.log.files.partition_files import SUFFIX_07, partition_of_folder
from spark_klog.records.contract import Record
from spark_klog.records.formats.message_07 import Message07, check_crc_07, iter_messages_07, records_07

#: Distance of the remembered message positions in a file, from which a search for a message starts.
_MARK_BYTES = 1024 * 1024


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


class Tail(NamedTuple):
    """The partial message at the end of the last file: `size` bytes from `position` on."""

    path: Path
    position: int
    size: int


class _File(NamedTuple):
    path: Path
    base_offset: int
    size: int

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.size


class Log07:
    """A log as of its opening; reopen it to see later appends.

    `ConfigError` if the folder is not named TOPIC-PARTITION or has no .kafka file, `DecodeError` if a file's name is
    not an offset, `LogCorrupted` if files leave a gap or overlap; OSError.
    """

    def __init__(self, directory: Path) -> None:
        parsed = partition_of_folder(directory.name)
        if parsed is None:
            raise ConfigError(f"{directory} is not named TOPIC-PARTITION")
        self.topic, self.partition = parsed
        self.directory = directory
        self._files = files_07(directory)
        if not self._files:
            raise ConfigError(f"{directory} has no log of Kafka 0.7: it contains no {SUFFIX_07} file")
        for before, after in pairwise(self._files):
            if before.end_offset != after.base_offset:
                raise LogCorrupted(hole_07(before, after))
        #: Per file, ascending start positions of messages.
        self._marks: dict[int, list[int]] = {}

    @property
    def start_offset(self) -> int:
        """The offset of the first message, or of the next one in an empty log."""
        return self._files[0].base_offset

    @cached_property
    def end_offset(self) -> int:
        """The offset after the last complete message. `DecodeError` if the last file has other bytes than messages."""
        last = self._files[-1]
        end = self._marks.get(last.base_offset, [0])[-1]
        for message in self._walk(last, end):
            end = message.next_offset - last.base_offset
        return last.base_offset + end

    @property
    def tail(self) -> Tail | None:
        """The partial message at the end, being written now or when the broker crashed."""
        last = self._files[-1]
        size = last.end_offset - self.end_offset
        return Tail(last.path, self.end_offset - last.base_offset, size) if size else None

    def messages(self, offset: int) -> Iterator[Message07]:
        """The messages from `offset` on, shallow, up to `end_offset`; their payloads are views of the mapped files.

        `OffsetOutOfRange`; `NoMessageAtOffset` for an offset within a message. While reading: `CorruptBatchError` for a
        wrong CRC, `DecodeError` for bytes that are not a message; both name the file and the position.
        """
        end = self.end_offset
        if not self.start_offset <= offset <= end:
            raise OffsetOutOfRange(self.topic, self.partition, (offset, offset), (self.start_offset, end))
        if offset < end:
            self._check_begins(offset)
        return self._messages(offset, end)

    def records(self, message: Message07) -> Iterator[Record]:
        """The records of one of the log's messages, as `records_07`; errors name the file and the position in it."""
        try:
            yield from records_07(message)
        except DecodeError as error:
            raise self._located(error, message.offset) from None

    def _messages(self, offset: int, end: int) -> Iterator[Message07]:
        for file in self._files:
            if file.end_offset <= offset:
                continue
            for message in self._walk(file, max(offset - file.base_offset, 0)):
                if message.offset >= end:
                    return
                try:
                    check_crc_07(message)
                except DecodeError as error:
                    raise self._located(error, message.offset) from None
                yield message

    def _check_begins(self, offset: int) -> None:
        file = self._file_of(offset)
        marks = self._marks.get(file.base_offset, [0])
        start = marks[bisect_right(marks, offset - file.base_offset) - 1]
        for message in self._walk(file, start):
            if message.offset == offset:
                return
            if message.next_offset > offset:
                raise NoMessageAtOffset(
                    self.topic, self.partition, str(file.path), offset, message.offset, message.next_offset
                )

    def _walk(self, file: _File, position: int) -> Iterator[Message07]:
        """The messages of a file from the start of one on, without checking CRCs."""
        marks = self._marks.setdefault(file.base_offset, [0])
        end = position
        try:
            for message in iter_messages_07(_map(file)[position:], file.base_offset + position):
                yield message
                end = message.next_offset - file.base_offset
                if end - marks[-1] >= _MARK_BYTES:
                    marks.append(end)
        except DecodeError as error:
            raise self._located(error, file.base_offset + end) from None
        if end != file.size and file is not self._files[-1]:
            raise DecodeError(f"{file.path} at position {end}: incomplete message, but another file follows")

    def _file_of(self, offset: int) -> _File:
        return self._files[bisect_right([file.base_offset for file in self._files], offset) - 1]

    def _located(self, error: DecodeError, offset: int) -> DecodeError:
        file = self._file_of(offset)
        return type(error)(f"{file.path} at position {offset - file.base_offset}: {error}")


def files_07(directory: Path) -> list[_File]:
    """The .kafka files of a folder, by offset; `DecodeError` if a name is not an offset."""
    files = []
    for path in directory.glob(f"*{SUFFIX_07}"):
        if not (path.stem.isascii() and path.stem.isdecimal()):
            raise DecodeError(f"{path}: a {SUFFIX_07} file is named by the offset of its first byte, not {path.stem}")
        files.append(_File(path, int(path.stem), path.stat().st_size))
    return sorted(files, key=lambda file: (file.base_offset, file.size))


def hole_07(before: _File, after: _File) -> str:
    """The message about two files that leave a gap or overlap."""
    what = "a file between them is missing" if before.end_offset < after.base_offset else "they overlap"
    return (
        f"{before.path} ends at offset {before.end_offset}, {after.path.name} begins at {after.base_offset}: {what}; "
        f"restore it, or move the files before or after it elsewhere"
    )


def _map(file: _File) -> memoryview:
    if not file.size:
        return memoryview(b"")
    with file.path.open("rb") as opened:
        try:
            return memoryview(mmap.mmap(opened.fileno(), file.size, access=mmap.ACCESS_READ))
        except ValueError:
            raise DecodeError(f"{file.path} has become shorter than {file.size} bytes since it was opened") from None
