"""Identify a folder before a broker or a cluster writes into it.

meta.properties            data directory of a broker: of klog, of Kafka with ZooKeeper (version 0) or KRaft (version 1)
TOPIC-PARTITION/*.log      the same without meta.properties: a copy, or Kafka before 0.9
TOPIC-PARTITION/*.kafka    data directory of Kafka 0.7
klog-cluster.properties    directory of a cluster, which has a data directory broker-N/ for each broker
broker-N/meta.properties   the same, created by an earlier version without klog-cluster.properties

Names that start with a dot, lost+found, and temporary files of failed writes (*.tmp) are ignored. Only `mark_cluster`
and `write_meta` write.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from spark_klog.base.settings import some_of
from spark_klog.errors import ConfigError, DataDirectoryError
from spark_klog.log.file_system import FileSystem
from spark_klog.log.partition_files import PARTITION_METADATA, SUFFIX_07, partition_of_folder
from spark_klog.log.segments.segment import LOG

META = "meta.properties"
CLUSTER_MARK = "klog-cluster.properties"
#: Registries of a cluster: the value of `registry` in its mark, and the folder that an earlier version left.
_REGISTRIES = {"zookeeper": "zookeeper", "files": "directories"}
#: The data directory of a broker within the directory of its cluster.
BROKER_FOLDER = re.compile(r"broker-([0-9]+)")
_CHECKPOINT = "-offset-checkpoint"
#: Files of failed writes.
_TEMPORARY = re.compile(r".*(\.properties|-checkpoint)\.tmp")
_SHOWN = 3
_CHOOSE = "choose another data directory"


class Meta(NamedTuple):
    """The content of meta.properties; `cluster_id` is None if it has none."""

    broker_id: int
    cluster_id: str | None


class _Contents(NamedTuple):
    names: list[str]
    #: Data directories within the folder: of a cluster's brokers, or others.
    data_directories: list[str]
    #: Folders of partitions with logs of Kafka 0.7, and with logs of later versions.
    logs_07: list[str]
    logs: list[str]

    @property
    def brokers(self) -> list[int]:
        """Ids of the brokers that have their data directories here."""
        return sorted(int(match[1]) for name in self.data_directories if (match := BROKER_FOLDER.fullmatch(name)))


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Turn an OSError within the block into a `DataDirectoryError` about the data directory `path`."""
    try:
        yield
    except OSError as error:
        file = f"{error.filename}: " if error.filename not in (None, str(path)) else ""
        reason = error.strerror or str(error)
        raise DataDirectoryError(f"data directory {path} can't be used: {file}{reason}") from error


def check_data_directory(path: Path, broker_id: int | None = None) -> None:
    """Raise `DataDirectoryError` unless `path` is a data directory of the broker, or empty, or missing.

    Without `broker_id` it may belong to any broker. Writes nothing.
    """
    with usable(path):
        contents = _look(path)
        if contents is None:
            return
        if CLUSTER_MARK in contents.names or contents.brokers:
            folder = path / (f"broker-{contents.brokers[0]}" if contents.brokers else "broker-0")
            why = f"it holds {CLUSTER_MARK if CLUSTER_MARK in contents.names else f'{folder.name}/{META}'}"
            raise DataDirectoryError(
                f"{path} is the directory of a cluster, not of a broker ({why}): "
                f"start it with klog cluster --data-dir {path}, or {_CHOOSE}"
            )
        _refuse_07(path, contents)
        if META in contents.names:
            meta = read_meta(path)
            if meta is not None and broker_id not in (None, meta.broker_id):
                raise DataDirectoryError(
                    f"data directory {path} belongs to broker {meta.broker_id}, not {broker_id}; "
                    f"start with --broker-id {meta.broker_id}, or choose another --data-dir"
                )
        elif not _is_kafkas(contents) and contents.names:
            inner = contents.data_directories
            advice = (
                f"its folder {inner[0]} is a data directory: give {path / inner[0]}, or {_CHOOSE}" if inner else _CHOOSE
            )
            raise DataDirectoryError(
                f"{path} is neither empty nor a data directory: it holds {some_of(contents.names, _SHOWN)} and no "
                f"{META}; {advice}"
            )


def check_no_cluster(path: Path) -> None:
    """Raise `ConfigError` if `path`, given as a data directory to read, is the directory of a cluster; OSError."""
    contents = _look(path)
    if contents is not None and (CLUSTER_MARK in contents.names or contents.brokers):
        folders = " ".join(str(path / f"broker-{broker_id}") for broker_id in contents.brokers or [0])
        raise ConfigError(f"{path} is the directory of a cluster: give the data directories of its brokers, {folders}")


def check_alone(path: Path) -> None:
    """Raise `DataDirectoryError` if `path` belongs to a cluster: a single broker can't start on it.

    Without the cluster's registry it would not know the topics and their ids, nor the cluster those it creates.
    """
    with usable(path):
        folder = path.resolve()
        parent = folder.parent
        if BROKER_FOLDER.fullmatch(folder.name) and (parent / CLUSTER_MARK).exists():
            raise DataDirectoryError(
                f"data directory {path} belongs to the cluster in {parent}: start the cluster with klog "
                f"cluster --data-dir {parent}, or copy {folder.name} elsewhere to start a single broker on it"
            )


def check_cluster_directory(path: Path, *, zookeeper: bool) -> list[int]:
    """The ids of the brokers with data in the cluster directory `path`; empty for a new one.

    `DataDirectoryError` if it is something else, or belongs to a cluster with the other registry. Other files may lie
    beside those of a cluster. Writes nothing.
    """
    with usable(path):
        contents = _look(path)
        if contents is None:
            return []
        registry = _registry(path, contents)
        expected = "zookeeper" if zookeeper else "files"
        if registry not in (None, expected):
            raise DataDirectoryError(
                f"the cluster in {path} was made {'with' if registry == 'zookeeper' else 'without'} ZooKeeper, which "
                f"keeps its topics: start it {'with --zookeeper' if registry == 'zookeeper' else 'without --zookeeper'}"
                f" (zookeeper={registry == 'zookeeper'}), or {_CHOOSE}"
            )
        if CLUSTER_MARK in contents.names or contents.brokers:
            return contents.brokers
        _refuse_07(path, contents)
        if META in contents.names or _is_kafkas(contents):
            evidence = [META] if META in contents.names else contents.logs or contents.names
            raise DataDirectoryError(
                f"{path} is the data directory of a broker, not of a cluster (it holds {some_of(evidence, _SHOWN)}): "
                f"start it with klog broker --data-dir {path}, or {_CHOOSE}"
            )
        return []


def mark_cluster(path: Path, *, zookeeper: bool) -> None:
    """Mark the folder `path` as a cluster's; `DataDirectoryError` if it can't be written."""
    mark = path / CLUSTER_MARK
    with usable(path):
        if not mark.exists():
            registry = "zookeeper" if zookeeper else "files"
            text = f"# klog cluster: broker-N is the data directory of broker N\nversion=1\nregistry={registry}\n"
            FileSystem().replace(mark, text.encode())


def read_meta(path: Path) -> Meta | None:
    """Read meta.properties; None if it is missing; `DataDirectoryError` for bad content, OSError."""
    file = path / META
    if not file.exists():
        return None
    values = _properties(file)
    version = values.get("version", "none")
    name = {"0": "broker.id", "1": "node.id"}.get(version)
    if name is None:
        raise DataDirectoryError(f"{file} has version {version}, 0 and 1 are known: restore it, or {_CHOOSE}")
    number = values.get(name, "")
    if not (number.isascii() and number.isdecimal()):
        raise DataDirectoryError(f"{file} names no {name}: restore it, or {_CHOOSE}")
    return Meta(int(number), values.get("cluster.id"))


def write_meta(path: Path, meta: Meta) -> None:
    """Write meta.properties, unless it already has this content (a file of KRaft stays unchanged); OSError."""
    if read_meta(path) != meta:
        text = f"#\nbroker.id={meta.broker_id}\ncluster.id={meta.cluster_id}\nversion=0\n"
        FileSystem().replace(path / META, text.encode())


def _properties(file: Path) -> dict[str, str]:
    lines = (line.partition("=") for line in file.read_text(errors="replace").splitlines() if line[:1] not in "#!")
    return {key.strip(): value.strip() for key, _, value in lines}


def _look(path: Path) -> _Contents | None:
    """The contents of a folder; None if it is missing. OSError."""
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except FileNotFoundError:
        return None
    contents = _Contents([], [], [], [])
    for entry in entries:
        if entry.name.startswith(".") or entry.name == "lost+found" or _TEMPORARY.fullmatch(entry.name):
            continue
        contents.names.append(entry.name)
        if not entry.is_dir():
            continue
        try:
            inner = os.listdir(entry.path)
        except PermissionError:  # another user's folder
            continue
        if META in inner:
            contents.data_directories.append(entry.name)
        elif partition_of_folder(entry.name):
            if any(name.endswith(SUFFIX_07) for name in inner):
                contents.logs_07.append(entry.name)
            if PARTITION_METADATA in inner or any(name.endswith(LOG) for name in inner):
                contents.logs.append(entry.name)
    return contents


def _refuse_07(path: Path, contents: _Contents) -> None:
    if contents.logs_07:
        raise DataDirectoryError(
            f"{path} holds logs of Kafka 0.7 ({some_of(contents.logs_07, _SHOWN)}): write them in today's format with "
            f"klog log upgrade {path} NEW, and start on NEW"
        )


def _is_kafkas(contents: _Contents) -> bool:
    """Whether it is a broker's data directory without meta.properties."""
    return bool(contents.logs) or any(name.endswith(_CHECKPOINT) for name in contents.names)


def _registry(path: Path, contents: _Contents) -> str | None:
    """The registry of a cluster's directory; None if it has none, or if an earlier version left both."""
    if CLUSTER_MARK in contents.names:
        values = _properties(path / CLUSTER_MARK)
        if values.get("version") != "1" or values.get("registry") not in _REGISTRIES:
            raise DataDirectoryError(
                f"{path / CLUSTER_MARK} is not of version 1: restore it, or remove it if this version made the cluster"
            )
        return values["registry"]
    there = [name for name, folder in _REGISTRIES.items() if folder in contents.names]
    return there[0] if contents.brokers and len(there) == 1 else None
