"""Files of a tree on any of pyarrow's file systems."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from spark_klog.errors import DirectoryError
from spark_klog.files.arrow import ArrowFolder
from spark_klog.files.folder import Entry
from spark_klog.trees.tree import VALUE

_READS = 10


class ArrowFiles(ArrowFolder):
    """Files of a tree in the folder `base` of a pyarrow file system, without ephemeral nodes.

    If a move cannot replace a file (HDFS), the new value of b goes to b.value first, where readers look too; b.value
    itself, the value of a folder, is missing for a moment while it is replaced.
    """

    poll_seconds = 1.0

    def __init__(self, filesystem: Any, base: str) -> None:
        super().__init__(filesystem, base, f"{filesystem.type_name}:{base}")
        self._lock = threading.Lock()
        if self._base:
            try:
                filesystem.create_dir(self._base, recursive=True)
            except OSError as error:
                raise DirectoryError(f"cannot use {self.address} for directories: {error}") from error

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Exclude other writers of this object."""
        with self._lock:
            yield

    def read(self, path: str) -> bytes | None:
        for _ in range(_READS - 1):  # a replacement in two steps ends before that
            with contextlib.suppress(OSError):
                return super().read(path)
        return super().read(path)

    def _rename(self, temporary: str, path: str) -> None:
        try:
            super()._rename(temporary, path)
        except OSError:
            if self.kind(path) != "file":
                raise
            spare = path + VALUE
            self.remove(spare)
            super()._rename(temporary, spare)
            self.remove(path)
            super()._rename(spare, path)

    def make_folder(self, path: str) -> None:
        self._fs.create_dir(self._at(path), recursive=True)

    def entries(self, path: str) -> list[Entry]:
        return super().entries(path) if self.kind(path) == "folder" else []

    def read_ephemeral(self, path: str) -> None:
        """Return None: there are no ephemeral files."""

    def write_ephemeral(self, path: str, value: bytes) -> None:
        raise DirectoryError(
            f"{path} under {self.address} cannot be ephemeral: use ZooKeeper or a local folder for such nodes"
        )

    def owner(self, path: str) -> None:
        """Return None, as `read_ephemeral`."""

    def close(self) -> None:
        """Do nothing: this holds no resources."""
