"""Producer ids: each is given once, over all brokers and restarts (KIP-98).

A broker claims blocks of 1000 ids. Brokers with a tree in common do so in its node /latest_producer_id_block, as Kafka
does, by compare and set; one that is alone in a file of its data directory, with the same content. What is left of a
block at a restart is never given.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from spark_klog.directories import paths
from spark_klog.directories.tree import NodeExists, Tree
from spark_klog.errors import DirectoryError
from spark_klog.log.file_system import LocalFileSystem

_log = logging.getLogger(__name__)
_BLOCK = 1000
_MAX_ID = 2**63 - 1
#: In the data directory.
PRODUCER_IDS = "latest_producer_id_block"


class Blocks(Protocol):
    """Where blocks are claimed; it blocks."""

    def claim(self, floor: int) -> range:
        """A block of ids not below `floor` that nobody has claimed; `DirectoryError`, `DecodeError` or OSError."""


class TreeBlocks:
    """In the tree that brokers share."""

    def __init__(self, tree: Tree, broker_id: int) -> None:
        self._tree, self._broker_id = tree, broker_id

    def claim(self, floor: int) -> range:
        path = paths.PRODUCER_IDS_PATH
        while True:
            before = self._tree.get(path)
            block = _following(before, floor, path)
            payload = paths.producer_ids_payload(self._broker_id, block[0], block[-1])
            try:
                if not before:
                    # Kafka makes the node without a value at its start
                    if before is None:
                        self._tree.create(path, payload)
                        return block
                    if self._tree.swap(path, b"", payload):
                        return block
                elif self._tree.swap(path, before, payload):
                    return block
            except NodeExists:
                continue


class FileBlocks:
    """In a file."""

    def __init__(self, path: Path, broker_id: int) -> None:
        self._path, self._broker_id = path, broker_id
        self._files = LocalFileSystem()

    def claim(self, floor: int) -> range:
        try:
            before: bytes | None = self._files.read(self._path)
        except FileNotFoundError:
            before = None
        block = _following(before, floor, str(self._path))
        self._files.replace(self._path, paths.producer_ids_payload(self._broker_id, block[0], block[-1]))
        return block


def _following(before: bytes | None, floor: int, where: str) -> range:
    first = max(floor, paths.parse_producer_ids(before, where) + 1 if before else 0)
    if first > _MAX_ID - _BLOCK:
        raise DirectoryError(f"{where}: no producer ids are left above {first - 1}")
    return range(first, first + _BLOCK)


class ProducerIds:
    """Gives ids of the blocks that it claims; for one event loop.

    `floor` tells which ids are below all that logs here do not know: a directory may come from elsewhere.
    """

    def __init__(self, blocks: Blocks, floor: Callable[[], int]) -> None:
        self._blocks, self._floor = blocks, floor
        self._left = iter(range(0))
        self._lock = asyncio.Lock()

    async def next(self) -> int:
        """An id that was never given before; errors as of `Blocks.claim`."""
        async with self._lock:
            found = next(self._left, None)
            if found is None:
                block = await asyncio.to_thread(self._blocks.claim, self._floor())
                _log.info("claimed producer ids %d to %d", block[0], block[-1])
                self._left = iter(block)
                found = next(self._left)
            return found
