"""Read stored logs through pyarrow's file systems: local disk, HDFS, S3 and others."""

from __future__ import annotations

import pyarrow.fs as pafs

from spark_klog.directories.trees.addresses import filesystem_at, without_user
from spark_klog.log.stored.directory import Directory
from spark_klog.log.stored.files import Entry


class ArrowLogFiles:
    """A file system of pyarrow as `log.stored_files.LogFiles`."""

    def __init__(self, filesystem: pafs.FileSystem) -> None:
        self._filesystem = filesystem

    def entries(self, folder: str) -> list[Entry]:
        infos = self._filesystem.get_file_info(pafs.FileSelector(folder))
        return [
            Entry(info.base_name, info.size or 0, info.type == pafs.FileType.Directory)
            for info in infos
            if info.type != pafs.FileType.NotFound  # deleted during the listing
        ]

    def open(self, path: str) -> ArrowFile:
        return ArrowFile(self._filesystem, path)


class ArrowFile:
    """A file of pyarrow as `log.stored_files.OpenFile`."""

    def __init__(self, filesystem: pafs.FileSystem, path: str) -> None:
        self._file = filesystem.open_input_file(path)
        self.size: int = self._file.size()

    def read(self, position: int, size: int) -> bytes:
        data: bytes = self._file.read_at(size, position)
        return data

    def close(self) -> None:
        self._file.close()


def directory(address: str) -> Directory:
    """The data directory at a path or URI; `ConfigError` for a URI that no file system supports, OSError."""
    filesystem, path = filesystem_at(address)
    return Directory(ArrowLogFiles(filesystem), path, without_user(address))
