"""Load offsets again that a load has: which ranges of earlier runs a new run replaces.

A range is replaced as a whole, so that no record is in two files: a run begins where the range begins that has the
asked offset, and ends where one ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from spark_klog.client.cluster import Cluster
from spark_klog.errors import ConfigError, DataLossError
from spark_klog.load.journal.history import manifests
from spark_klog.load.journal.model import FileEntry, Manifest, Progress, RangeResult
from spark_klog.load.journal.store import Store
from spark_klog.load.places import AtOffsets, Key, Place, resolve
from spark_klog.load.planning import Extent
from spark_klog.load.tasks.task import complete_tasks, task_results
from spark_klog.spark.planning.ranges import RETENTION, Lost


def begin_at(
    extent: Extent,
    cluster: Cluster,
    store: Store,
    progress: Mapping[Key, Progress],
    place: Place,
    fail_on_loss: bool,
) -> Extent:
    """The extent from `place` on: partitions that the load has are loaded again from there, new ones begin there.

    `ConfigError` if it would skip offsets, and as of `resolve`; `DataLossError` if the log no longer has the offsets
    and `fail_on_loss`, else what it has is loaded again, and earlier files stay.
    """
    ids = {key: item.topic_id for key, item in extent.start.items()}
    asked = resolve(cluster, store, place, ids, extent.log_end)
    changed = {item[:2] for item in extent.lost}
    starts = dict(extent.start)
    lost: list[Lost] = []
    known = {
        key: offset
        for key, offset in asked.items()
        if key in progress and key not in changed and offset < extent.start[key].offset
    }
    ranges = ranges_of_runs(store, {key: extent.start[key] for key in known})
    again = {}
    for key, offset in sorted(asked.items()):
        now, low = starts[key], extent.log_start[key]
        if key in known:
            old = [item for item in ranges[key] if item.until > offset]
            begin = min(offset, old[0].start) if old else offset
            if begin < low:
                lost.append(Lost(*key, begin, low, low, extent.log_end[key], RETENTION))
                old = [item for item in old if item.start >= low]
                begin = old[0].start if old else now.offset
            starts[key], again[key] = replace(now, offset=begin), old
        elif key not in progress:
            if offset < low:
                lost.append(Lost(*key, offset, low, low, extent.log_end[key], RETENTION))
            starts[key] = replace(now, offset=max(offset, low))
        elif isinstance(place, AtOffsets) and key not in changed and offset > now.offset:
            raise ConfigError(
                f"{place.file}: {key[0]}-{key[1]}: the load goes on at {now.offset}, so that {offset} would skip "
                "offsets: use another --output"
            )
    if lost and fail_on_loss:
        raise DataLossError(
            f"records can't be loaded again: {'; '.join(map(str, lost))}; --fail-on-data-loss false loads what the log "
            "still has, and keeps the files of the other records",
            lost[0].cause,
        )
    return replace(extent, start=starts, again=again)


def end_at(extent: Extent, cluster: Cluster, store: Store, place: Place) -> Extent:
    """The extent up to `place`; partitions of which it says nothing end at the log's end. Errors as of `resolve`."""
    ids = {key: item.topic_id for key, item in extent.start.items()}
    asked = resolve(cluster, store, place, ids, extent.log_end)
    end = {key: max(extent.start[key].offset, min(until, asked.get(key, until))) for key, until in extent.end.items()}
    return replace(extent, end=end)


def whole_ranges(extent: Extent) -> Extent:
    """Move ends that lie inside a range of an earlier run to its end; keep only the ranges that are replaced."""
    end = dict(extent.end)
    again = {}
    for key, old in extent.again.items():
        for item in old:
            if item.start < end[key] < item.until:
                end[key] = item.until
        again[key] = [item for item in old if item.until <= end[key]]
    return replace(extent, end=end, again=again)


def ranges_of_runs(store: Store, wanted: Mapping[Key, Progress]) -> dict[Key, list[RangeResult]]:
    """The ranges of all runs, of those partitions and incarnations, in the order of offsets; `LoadError`."""
    found: dict[Key, dict[tuple[int, int], RangeResult]] = {key: {} for key in wanted}
    if not wanted:
        return {}
    for manifest in manifests(store):
        for gone in manifest.replaced:
            found.get((gone.topic, gone.partition), {}).pop((gone.start, gone.until), None)
        progress = manifest.progress()
        bounds = {
            (item.topic, item.partition): (item.start, item.until)
            for item in manifest.partitions
            if (key := (item.topic, item.partition)) in wanted
            and progress[key].incarnation == wanted[key].incarnation
            and item.until > item.start
        }
        for result in _results(store, manifest) if bounds else ():
            key = result.topic, result.partition
            first, last = bounds.get(key, (0, 0))
            if first <= result.start < result.until <= last:
                found[key][result.start, result.until] = result
    return {key: [each[place] for place in sorted(each)] for key, each in found.items()}


def _results(store: Store, manifest: Manifest) -> list[RangeResult]:
    """The results of a run's tasks, with the files that the run has."""
    committed: dict[Key, list[FileEntry]] = defaultdict(list)
    for item in manifest.files:
        committed[item.topic, item.partition].append(item)
    found = [
        item
        for number in complete_tasks(store, manifest.run)
        for item in task_results(store, manifest.run, number) or ()
    ]
    # In an object store two attempts may have ended at once: each has written a file of offsets, the last one stays.
    return [
        replace(
            item,
            files=[file for file in committed[item.topic, item.partition] if item.start <= file.first < item.until],
        )
        for item in found
    ]
