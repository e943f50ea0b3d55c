"""A file system in memory for readers of stored logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spark_klog.files.folder import Entry


class MemoryFiles:
    """Files by path, in place of a file system; an open file keeps its content."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = dict(files or {})
        self.opened: list[str] = []
        self.read_bytes = 0

    @classmethod
    def of(cls, folder: Path) -> MemoryFiles:
        return cls({str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()})

    def entries(self, folder: str) -> list[Entry]:
        prefix = f"{folder.rstrip('/')}/"
        inside = [(path.removeprefix(prefix), data) for path, data in self.files.items() if path.startswith(prefix)]
        if not inside:
            raise FileNotFoundError(folder)
        found = {name.split("/")[0]: Entry(name.split("/")[0], 0, True) for name, _ in inside if "/" in name}
        return [*found.values(), *(Entry(name, len(data), False) for name, data in inside if "/" not in name)]

    def open(self, path: str) -> Any:
        if path not in self.files:
            raise FileNotFoundError(path)
        self.opened.append(path)
        data, files = self.files[path], self

        class Open:
            size = len(data)

            def read_at(self, position: int, size: int) -> bytes:
                assert position >= 0
                assert size >= 0
                files.read_bytes += size
                return data[position : position + size]

            def close(self) -> None:
                pass

        return Open()
