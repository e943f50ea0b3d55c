"""Points in a load to begin again at, or to stop at: a run, a time, offsets that a person has edited."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timezone, tzinfo
from pathlib import Path
from typing import Any

from spark_klog.base.clock import system_ms
from spark_klog.base.durable import check_version
from spark_klog.base.names import TopicPartition
from spark_klog.base.settings import distinct
from spark_klog.client import places
from spark_klog.client.cluster import Cluster
from spark_klog.client.places import TimeSpec, offsets_at
from spark_klog.errors import ConfigError
from spark_klog.load.journal import paths
from spark_klog.load.journal.history import is_compaction, last_committed, read_manifest
from spark_klog.load.journal.model import Progress
from spark_klog.load.journal.store import Store

_VERSION = 1
_MOST_DIGITS = 30
_LARGEST = (1 << 63) - 1
#: A partition, in its one form: "07" and "7" would be the same one.
_NUMBER = re.compile("0|[1-9][0-9]{0,9}")


@dataclass(frozen=True)
class AtRun:
    """The place at which a run began."""

    run: int


@dataclass(frozen=True)
class AtOffsets:
    """Offsets of a file, and what it says of whose they are; "" and {} if it does not say."""

    file: str
    offsets: Mapping[TopicPartition, int]
    cluster_id: str = ""
    topic_ids: Mapping[str, str] = field(default_factory=dict)


Place = AtRun | TimeSpec | AtOffsets


def parse_run(option: str, text: str) -> AtRun:
    """Parse a run's number or name; `ConfigError`."""
    if not re.fullmatch("0*[1-9][0-9]{0,17}", text):
        raise ConfigError(f"{option} {text[:40]} is not a run: name one that `klog load status OUTPUT` lists")
    return AtRun(int(text))


def parse_time(option: str, text: str, zone: tzinfo = timezone.utc) -> TimeSpec:
    """Parse a time that is not to come, as `client.places.parse_time` does; `ConfigError`."""
    time = places.parse_time(option, text, zone)
    if time > system_ms():
        raise ConfigError(f"{option} {text} is in the future")
    return TimeSpec(time)


def read_offsets(option: str, path: Path) -> AtOffsets:
    """Read offsets as `klog load offsets` prints them; `ConfigError` if the file holds anything else."""
    where = f"{option} {path}"
    try:
        value = json.loads(path.read_text(), object_pairs_hook=distinct, parse_int=_whole)
    except ConfigError as error:
        raise ConfigError(f"{where} {error}") from None
    except OSError as error:
        raise ConfigError(f"{where} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error})") from None
    if not isinstance(value, dict) or not isinstance(value.get("offsets"), dict):
        raise ConfigError(f'{where} has no offsets: write {{"offsets": {{"TOPIC": {{"0": 100}}}}}}')
    unknown = sorted(value.keys() - {"version", "offsets", "cluster_id", "topic_ids", "run"})
    if "version" in value:
        check_version(value["version"], _VERSION, where, "write the offsets into a file of your own", ConfigError)
    elif unknown:  # a person wrote it, and may have mistyped a name
        raise ConfigError(f"{where}: unknown {', '.join(unknown)}; it may have offsets, cluster_id, topic_ids and run")
    offsets: dict[TopicPartition, int] = {}
    for topic, each in value["offsets"].items():
        if not isinstance(each, dict):
            raise ConfigError(f'{where}: topic {topic} needs an offset for each partition, as {{"0": 100}}')
        for partition, offset in each.items():
            if not _NUMBER.fullmatch(partition):
                raise ConfigError(f"{where}: topic {topic} has no partition {partition[:40]!r}")
            if type(offset) is not int or not 0 <= offset <= _LARGEST:
                raise ConfigError(f"{where}: {topic}-{partition}: {repr(offset)[:40]} is not an offset")
            offsets[topic, int(partition)] = offset
    cluster_id, topic_ids = value.get("cluster_id", ""), value.get("topic_ids", {})
    if not isinstance(cluster_id, str) or not isinstance(topic_ids, dict):
        raise ConfigError(f"{where}: cluster_id must be a text, topic_ids a text for each topic")
    return AtOffsets(where, offsets, cluster_id, topic_ids)


def _whole(text: str) -> int | float:
    """An integer of JSON: Python refuses to read those of thousands of digits."""
    return int(text) if len(text) <= _MOST_DIGITS else float(text)


def offsets_of_run(store: Store, run: int | None) -> dict[TopicPartition, Progress]:
    """The offsets at which a committed run began, or the next run begins (None); `ConfigError` for an unknown run.

    Partitions that the load did not have at the time are at the first offset that a later run has loaded.
    """
    last = last_committed(store)
    if run is None:
        manifest = read_manifest(store, last) if last else None
        return manifest.progress() if manifest else {}
    if not 1 <= run <= last:
        known = f"the committed runs are 1 to {last}" if last else "there is none yet"
        raise ConfigError(f"{store.address} has no run {paths.run_name(run)}: {known}")
    before = read_manifest(store, run - 1) if run > 1 else None
    offsets = before.progress() if before else {}
    for number in range(run, last + 1):
        manifest = read_manifest(store, number)
        if manifest is None or is_compaction(store, manifest):
            continue
        progress = manifest.progress()
        for part in manifest.partitions:
            key = part.topic, part.partition
            now = progress[key]
            # of later runs only the partitions that they, or whose new log they, have first
            if number == run or key not in offsets or offsets[key].incarnation < now.incarnation:
                offsets[key] = Progress(part.start, now.incarnation, now.topic_id)
    return offsets


def resolve(
    cluster: Cluster,
    store: Store,
    place: Place,
    ids: Mapping[TopicPartition, str],
    log_end: Mapping[TopicPartition, int],
) -> dict[TopicPartition, int]:
    """The offset that a place means in each partition; without those of which it says nothing.

    `ConfigError` if it can't be: an unknown run, topic or partition, offsets beyond the log's end, or of another
    cluster or topic.
    """
    if isinstance(place, AtRun):
        return {key: place.offset for key, place in offsets_of_run(store, place.run).items() if key in ids}
    if isinstance(place, TimeSpec):
        return offsets_at(cluster, place, {key: log_end[key] for key in ids})
    if place.cluster_id and cluster.cluster_id and place.cluster_id != cluster.cluster_id:
        raise ConfigError(
            f"{place.file} has offsets of cluster {place.cluster_id}, and this is cluster {cluster.cluster_id}"
        )
    topics = {topic for topic, _ in ids}
    for (topic, partition), offset in sorted(place.offsets.items()):
        if topic not in topics:
            raise ConfigError(f"{place.file}: topic {topic} is not loaded: the topics are {', '.join(sorted(topics))}")
        if (topic, partition) not in ids:
            raise ConfigError(f"{place.file}: topic {topic} has no partition {partition}")
        told, now = place.topic_ids.get(topic, ""), ids[topic, partition]
        if told and now and told != now:
            raise ConfigError(f"{place.file} has offsets of another topic {topic}: it was created again since")
        if offset > log_end[topic, partition]:
            raise ConfigError(
                f"{place.file}: {topic}-{partition}: offset {offset} lies beyond the log's end, which is "
                f"{log_end[topic, partition]}"
            )
    return dict(place.offsets)


def offsets_text(cluster_id: str, run: int | None, progress: Mapping[TopicPartition, Progress]) -> dict[str, Any]:
    """Offsets in the form that `read_offsets` takes."""
    offsets: dict[str, dict[str, int]] = {}
    for (topic, partition), place in sorted(progress.items()):
        offsets.setdefault(topic, {})[str(partition)] = place.offset
    ids = {topic: place.topic_id for (topic, _), place in sorted(progress.items()) if place.topic_id}
    name = "" if run is None else paths.run_name(run)
    return {"version": _VERSION, "cluster_id": cluster_id, "run": name, "offsets": offsets, "topic_ids": ids}
