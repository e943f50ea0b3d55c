"""Plan a restore: which files of a load go to which partitions, and whether they may."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from spark_klog.client import Admin
from spark_klog.client.offsets import Committed, GroupOffsets, list_offsets
from spark_klog.errors import ConfigError, LoadError
from spark_klog.load.journal.history import CommittedFile, files, loaded_extents, manifests, open_load
from spark_klog.load.journal.model import STAGED, place_of
from spark_klog.load.settings import JSON_LINES
from spark_klog.protocol.tables.records import EARLIEST, LATEST

#: Extents of a partition that are noted: brokers take 4,096 bytes of metadata.
_MOST_EXTENTS = 80
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True)
class RestoreOptions:
    """What to restore and where to: the load in `output`, by client settings of the target.

    `topics` are those of the load to restore, all of them by default; `prefix` is put before their names at the
    target. `name` tells restores apart, each of which writes each record once; by default it is the load's. `append`
    restores to partitions that have records.
    """

    output: str
    client: Mapping[str, str] = field(repr=False)
    topics: Sequence[str] = ()
    prefix: str = ""
    name: str | None = None
    append: bool = False


class Part(NamedTuple):
    """A partition of the target, and the files of its records in the order of offsets.

    Files in one group cover the same offsets: they differ in the time of their records. `extents` are the offsets
    [start, until) that the load has.
    """

    topic: str
    partition: int
    group: str
    incarnation: int
    files: tuple[tuple[CommittedFile, ...], ...]
    extents: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """The offset after the last one."""
        return self.files[-1][0].last + 1


def plan_restore(options: RestoreOptions) -> list[Part]:
    """The partitions to restore; makes missing topics. `ConfigError`, `LoadError`, errors as of `Admin`."""
    store, identity = open_load(options.output)
    if identity.schema:
        raise LoadError(f"{store.address} has parsed values: they can't be restored as they were")
    if identity.format == JSON_LINES:
        raise LoadError(f"{store.address} has JSON lines, which can't be restored: load as Parquet or Arrow")
    name = identity.load if options.name is None else options.name
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r} must be up to 100 letters, digits, '.', '_' and '-'")
    found = files(options.output)
    unknown = sorted(set(options.topics) - {item.topic for item in found})
    if unknown:
        raise ConfigError(f"{store.address} has no files of topic {', '.join(unknown)}")
    wanted = [item for item in found if not options.topics or item.topic in options.topics]
    parts = _parts(wanted, loaded_extents(manifests(store)), options.prefix, f"klog-restore.{name}")
    with Admin(options.client) as admin:
        _make_topics(admin, parts)
        _check_targets(admin, parts, options.append)
        _check_order(admin, parts)
    return parts


def _parts(
    wanted: Sequence[CommittedFile],
    extents: Mapping[tuple[str, int, int], Sequence[tuple[int, int]]],
    prefix: str,
    group: str,
) -> list[Part]:
    """Files of a partition are sorted by `files`; those of a topic that was created again come after the old ones."""
    groups: dict[tuple[str, int, int], dict[tuple[int, int], list[CommittedFile]]] = {}
    for item in wanted:
        place = place_of(item.path.removesuffix(STAGED))
        incarnation = place[2] if place else 0
        each = groups.setdefault((item.topic, item.partition, incarnation), {})
        each.setdefault((item.first, item.last), []).append(item)
    return [
        Part(
            prefix + topic,
            partition,
            f"{group}.{incarnation}" if incarnation else group,
            incarnation,
            tuple(tuple(each[bounds]) for bounds in sorted(each)),
            tuple(extents.get((topic, partition, incarnation), ())),
        )
        for (topic, partition, incarnation), each in sorted(groups.items())
    ]


def _make_topics(admin: Admin, parts: Sequence[Part]) -> None:
    counts: dict[str, int] = {}
    for part in parts:
        counts[part.topic] = max(counts.get(part.topic, 0), part.partition + 1)
    there = {topic.name for topic in admin.list_topics()}
    for topic, count in counts.items():
        if topic not in there:
            admin.create_topic(topic, count)
            continue
        partitions = len(admin.describe_topic(topic).partitions)
        if partitions < count:
            raise ConfigError(
                f"topic {topic} has {partitions} partitions, the load {count}: add partitions, or --prefix"
            )


def _check_targets(admin: Admin, parts: Sequence[Part], append: bool) -> None:
    """`ConfigError` for a partition that has records of others; note that the rest are this restore's."""
    for group in sorted({part.group for part in parts}):
        offsets = GroupOffsets(admin.cluster, group, is_stable=True)
        keys = {(part.topic, part.partition) for part in parts if part.group == group}
        new = keys - offsets.fetch(sorted(keys)).keys()
        first = new & {(part.topic, part.partition) for part in _first_parts(parts) if part.group == group}
        low, high = (list_offsets(admin.cluster, dict.fromkeys(first, at)) for at in (EARLIEST, LATEST))
        full = sorted(key for key in first if low[key] < high[key])
        if full and not append:
            names = ", ".join(f"{topic}-{partition}" for topic, partition in full[:5])
            raise ConfigError(
                f"{names} of the target have records that this restore has not written: restore to other names "
                "(--prefix), or --append"
            )
        if new:
            offsets.commit(dict.fromkeys(new, 0))


def _check_order(admin: Admin, parts: Sequence[Part]) -> None:
    """`ConfigError` if the load has got offsets before those that are restored; note what it has now.

    The note is the metadata of an offset of the group `GROUP+loaded`: no --name has a "+" in it.
    """
    for group in sorted({part.group for part in parts}):
        of_group = {(part.topic, part.partition): part for part in parts if part.group == group}
        done = GroupOffsets(admin.cluster, group, is_stable=True).fetch(sorted(of_group))
        notes = GroupOffsets(admin.cluster, f"{group}+loaded")
        noted = notes.committed(sorted(of_group))
        for key, part in of_group.items():
            end = done.get(key, 0)
            known = _noted_extents(noted[key].metadata) if key in noted else None
            if known is not None and (new := _between(part.extents, known, end)):
                names = ", ".join(f"[{first}, {after})" for first, after in new[:5])
                raise ConfigError(
                    f"{key[0]}-{key[1]}: the load has got the offsets {names} since this restore left them out, "
                    f"and it is at {end}: their records can't be put before others. Restore all to other names, by "
                    "another --prefix and --name"
                )
        current = {
            key: Committed(part.end, metadata=json.dumps(part.extents[-_MOST_EXTENTS:]))
            for key, part in of_group.items()
        }
        if current != {key: item._replace(leader_epoch=-1) for key, item in noted.items()}:
            notes.commit(current)


def _noted_extents(text: str) -> list[tuple[int, int]] | None:
    """The extents of a note; None if it is not one of ours."""
    try:
        return [(int(start), int(until)) for start, until in json.loads(text)]
    except (TypeError, ValueError):
        return None


def _between(extents: Sequence[tuple[int, int]], known: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """The offsets before `end` that are in extents, but not in those that were noted.

    A note of the most extents has the last ones only, so that nothing is known of offsets before them.
    """
    at = known[0][0] if len(known) >= _MOST_EXTENTS else 0
    missing = []
    for start, until in [*known, (end, end)]:
        missing.append((at, min(start, end)))
        at = max(at, until)
    found = [(max(first, start), min(after, until)) for first, after in missing for start, until in extents]
    return [(first, after) for first, after in found if first < after]


def restored_offsets(parts: Sequence[Part], progress: Mapping[tuple[str, str, int], int]) -> int:
    """Count the offsets of parts that are restored; `progress` is by group, topic and partition."""
    return sum(min(progress.get((part.group, part.topic, part.partition), 0), part.end) for part in parts)


def _first_parts(parts: Sequence[Part]) -> list[Part]:
    """The first part to write of each partition."""
    found: dict[tuple[str, int], Part] = {}
    for part in parts:
        found.setdefault((part.topic, part.partition), part)
    return list(found.values())
