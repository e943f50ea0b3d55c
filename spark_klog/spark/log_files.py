"""Any file system of pyarrow for reading stored logs: local disk, hdfs, s3 and so on."""

from __future__ import annotations

import re

import pyarrow.fs as pafs

from spark_klog.directories.tree import without_user
from spark_klog.errors import ConfigError
from spark_klog.log.stored_directory import Directory
from spark_klog.log.stored_files import Entry

#: Two letters at least: C:\ is a path.
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


class ArrowLogFiles:
    """See `LogFiles`."""

    def __init__(self, filesystem: pafs.FileSystem) -> None:
        self._filesystem = filesystem

    def entries(self, folder: str) -> list[Entry]:
        infos = self._filesystem.get_file_info(pafs.FileSelector(folder))
        return [
            Entry(info.base_name, info.size or 0, info.type == pafs.FileType.Directory)
            for info in infos
            if info.type != pafs.FileType.NotFound  # removed while it was listed
        ]

    def open(self, path: str) -> ArrowFile:
        return ArrowFile(self._filesystem, path)


class ArrowFile:
    """See `OpenFile`."""

    def __init__(self, filesystem: pafs.FileSystem, path: str) -> None:
        self._file = filesystem.open_input_file(path)
        self.size: int = self._file.size()

    def read(self, position: int, size: int) -> bytes:
        data: bytes = self._file.read_at(size, position)
        return data

    def close(self) -> None:
        self._file.close()


def directory(address: str) -> Directory:
    """The data directory at a path or URI; `ConfigError` for a URI that no file system takes, OSError."""
    if not _URI.match(address):
        return Directory(ArrowLogFiles(pafs.LocalFileSystem()), address, address)
    try:
        filesystem, path = pafs.FileSystem.from_uri(address)
    except ValueError as error:
        raise ConfigError(
            f"{without_user(address)!r} names no directory ({without_user(str(error))}): "
            "a path, or a URI of pyarrow's file systems is wanted"
        ) from None
    return Directory(ArrowLogFiles(filesystem), path, without_user(address))
