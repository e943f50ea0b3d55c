"""The changes of topics since the last clean stop, of a broker whose folders are its only registry.

klog-topics.journal    a line of JSON each: {"version": 1}, then {"topic", "id", "partitions", "settings"}, a topic as
                       it is from then on; without partitions it is deleted. The last line of an id, or a name, counts

A line is on the disk before anything else of a change is done. So folders need not be: a start after a crash makes what
is missing of the topics here, and removes what is left of deleted ones. After a clean stop the folders tell all, and
there is no journal.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

from spark_klog.base.durable import check_version
from spark_klog.errors import DataDirectoryError, DecodeError, DirectoryError
from spark_klog.log.file_system import FileSystem, write_all
from spark_klog.log.partition_files import partition_of_folder, read_topic_id

_log = logging.getLogger(__name__)
JOURNAL, _VERSION = "klog-topics.journal", 1
#: Lines beyond two for each topic that is not deleted, above which the file is written anew; deletions kept then.
_MOST_SPARE, _NEWEST = 1000, 500


class KeptTopic(NamedTuple):
    """A topic: its id, its partitions (none: it is deleted), and its own settings."""

    topic_id: UUID
    partitions: Sequence[int]
    settings: Mapping[str, str]


class TopicJournal:
    """The journal of a data directory. One thread at a time."""

    def __init__(self, files: FileSystem, folder: Path) -> None:
        self._files, self._folder, self._path = files, folder, folder / JOURNAL
        #: By name.
        self.topics: dict[str, KeptTopic] = {}
        #: Names, by id, of deleted topics whose folders may be there, also after one of the name was created again.
        self.deleted: dict[UUID, str] = {}
        #: Names of topics that were deleted when the file was read.
        self.deleted_before: set[str] = set()
        #: Deletions wait to be written.
        self.is_behind = False
        #: False while changes that were read are still to be made.
        self.is_settled = True
        #: Bytes and lines of the file; None if it must be written anew.
        self._size: int | None = None
        self._lines = 0

    def read(self) -> None:
        """Read the file, if there is one; `DataDirectoryError` if it is of another version, OSError."""
        try:
            # what follows the last newline is unfinished
            first, *lines = self._files.read(self._path).split(b"\n")[:-1]
            version = json.loads(first).get("version")
        except FileNotFoundError:
            return
        except (ValueError, AttributeError):
            version, lines = None, []
        self.is_settled = False
        check_version(version, _VERSION, str(self._path), "remove it to go by the folders", DataDirectoryError)
        for number, line in enumerate(lines, 2):
            try:
                entry = json.loads(line)
                partitions = [int(partition) for partition in entry["partitions"]]
                kept = KeptTopic(UUID(entry["id"]), partitions, {**entry["settings"]})
                _apply({str(entry["topic"]): kept}, self.topics, self.deleted)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                _log.error("%s: line %d is damaged and passed over: %s", self._path, number, error)
        self.deleted_before = {*self.deleted.values()} - self.topics.keys()

    def note(self, topics: Mapping[str, KeptTopic]) -> None:
        """Add changes, by name, and wait until they are on the disk; `DirectoryError` if that fails.

        Deletions do not fail: they give a full disk room again. Until a later call succeeds, also one without changes,
        a crash may bring such a topic back.
        """
        if not topics and not self.is_behind:
            return
        alive, deleted = dict(self.topics), dict(self.deleted)
        _apply(topics, alive, deleted)
        try:
            if self._size is None or self._lines + len(topics) > 2 * len(alive) + _MOST_SPARE:
                self.deleted = deleted
                deleted = self.left(_NEWEST)
                self._replace(deleted, alive)
            else:
                self._append(_encoded(topics.items()), self._size)
                self._lines += len(topics)
            self.is_behind = False
        except OSError as error:
            if not topics or any(kept.partitions for kept in topics.values()):
                raise DirectoryError(f"{self._path} can't be written: {error}") from error
            self.is_behind, path = True, self._path
            _log.error("%s can't be written, a crash may bring back deleted topics, trying again: %s", path, error)
        self.topics, self.deleted = alive, deleted

    def _append(self, lines: bytes, size: int) -> None:
        self._size = None
        file = self._files.open(self._path)
        try:
            write_all(file, size, lines)
            file.sync()
        except OSError:
            with suppress(OSError):
                file.truncate(size)  # no start shall make what was refused
            raise
        finally:
            file.close()
        self._size = size + len(lines)

    def _replace(self, deleted: Mapping[UUID, str], alive: Mapping[str, KeptTopic]) -> None:
        gone = [(name, KeptTopic(topic_id, (), {})) for topic_id, name in deleted.items()]
        content = b'{"version": %d}\n' % _VERSION + _encoded([*gone, *alive.items()])
        self._size = None
        self._files.replace(self._path, content)
        self._size, self._lines = len(content), len(gone) + len(alive)

    def left(self, newest: int = 0) -> dict[UUID, str]:
        """`deleted` but for those whose folders are gone, also after a power failure; OSError.

        Threads may be making folders of the `newest` ones.
        """
        entries = [*self.deleted.items()]
        older = entries[: max(0, len(entries) - newest)]
        names, ids = {name for _, name in older}, {topic_id for topic_id, _ in entries[len(older) :]}
        for folder in self._files.folders(self._folder):
            parsed = partition_of_folder(folder)
            if parsed is not None and parsed[0] in names:
                topic_id = None
                with suppress(DecodeError, OSError):
                    topic_id = read_topic_id(self._files, self._folder / folder)
                ids |= {topic_id} if topic_id else {gone for gone, name in entries if name == parsed[0]}
        self._files.sync_folder(self._folder)
        return {topic_id: name for topic_id, name in entries if topic_id in ids}

    def partitions(self) -> Iterator[tuple[str, int]]:
        """(topic, partition) of the topics that are not deleted."""
        return ((name, partition) for name, topic in self.topics.items() for partition in topic.partitions)

    def clear(self) -> None:
        """Remove the file: the folders tell all; OSError."""
        self._files.sync_folder(self._folder)
        self._files.remove(self._path)
        self._files.sync_folder(self._folder)
        self.topics, self.deleted, self._size, self.is_behind, self.is_settled = {}, {}, None, False, True


def _apply(changes: Mapping[str, KeptTopic], alive: dict[str, KeptTopic], deleted: dict[UUID, str]) -> None:
    for name, kept in changes.items():
        if kept.partitions:
            alive[name] = kept
        else:
            alive.pop(name, None)
            deleted[kept.topic_id] = name


def _encoded(topics: Iterable[tuple[str, KeptTopic]]) -> bytes:
    lines = (
        {"topic": name, "id": str(kept.topic_id), "partitions": [*kept.partitions], "settings": dict(kept.settings)}
        for name, kept in topics
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
