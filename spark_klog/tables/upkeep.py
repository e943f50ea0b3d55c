"""What tables have in common when they remove what neither they nor the readers of a kept time need."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from spark_klog.files.arrow import ArrowFolder
from spark_klog.files.folder import Entry, LocalFolder

#: The least age in seconds of files to remove that no commit has had: a run, a merge or a compaction may be about to
#: commit them, also one of another writer.
ORPHAN_SECONDS = 24 * 3600.0
#: What another table, a load or a sink has in its folder.
_OF_OTHERS = re.compile(
    r"(.+?)/(?:(?:_delta_log|_klog|_spark_metadata|\.hoodie)/.+|metadata/[^/]+\.metadata\.json(?:\.gz)?)"
)


@dataclass(frozen=True)
class Kept:
    """What stays: all states of the table that it has had in the last `seconds`, and its last `count` ones.

    None is as the table's properties say, or as its format has it.
    """

    seconds: float | None = None
    count: int | None = None


@dataclass(frozen=True)
class Expired:
    """What a table no longer needs: states, and files with their bytes, by paths as `Table.remove` takes them.

    `properties` are those that the call sets for that, each with its value before and after.
    """

    states: int
    files: Mapping[str, int]
    properties: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def files_below(store: LocalFolder | ArrowFolder) -> dict[str, Entry]:
    """The files in a table's folder by path, without the hidden ones: those of its log and of a load's journal.

    Without those of tables and loads in folders of this one, too, as of a namespace that has the table's name.
    """
    files: dict[str, Entry] = {}
    for entry in store.entries(""):
        if not _is_hidden(entry.name):
            files |= store.entries_below(entry.name) if entry.is_folder else {entry.name: entry}
    others = {match[1] for match in map(_OF_OTHERS.fullmatch, files) if match is not None}
    return {
        path: entry
        for path, entry in files.items()
        if not any(map(_is_hidden, path.split("/"))) and others.isdisjoint(accumulate(path.split("/"), "{}/{}".format))
    }


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def orphans(
    files: Mapping[str, Entry], known: Iterable[str], before: float, is_needed: Callable[[str], bool]
) -> dict[str, int]:
    """The bytes of those files, by path, that were last changed `before` a time and have none of the `known` names.

    Names and not paths are compared, which others may write in several ways (s3a://, file:/): writers give each file
    a name of its own.
    """
    names = {path.rpartition("/")[2] for path in known}
    return {
        path: entry.size
        for path, entry in files.items()
        if entry.time < before and path.rpartition("/")[2] not in names and not is_needed(path)
    }
