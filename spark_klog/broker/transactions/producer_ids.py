"""Allocation of producer ids, unique over all brokers and restarts (KIP-98).

A broker claims blocks of 1000 ids. Brokers that share a tree claim them by compare-and-set in its node
/latest_producer_id_block, as Kafka does; a broker without one uses a file in its data directory, with the same content.
A restart discards the rest of a block.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from spark_klog.broker.metadata.nodes import replace_node
from spark_klog.directories import paths
from spark_klog.directories.trees.tree import Tree
from spark_klog.errors import DirectoryError
from spark_klog.log.files.file_system import LocalFileSystem

_log = logging.getLogger(__name__)
_BLOCK = 1000
_MAX_ID = 2**63 - 1
#: File name in the data directory.
PRODUCER_IDS = "latest_producer_id_block"


class Blocks(Protocol):
    """Source of id blocks. Its method blocks the thread."""

    def claim(self, floor: int) -> range:
        """Claim a block of unused ids, none below `floor`. Raises `DirectoryError`, `DecodeError` or OSError."""


class TreeBlocks:
    """Blocks claimed in the tree that brokers share."""

    def __init__(self, tree: Tree, broker_id: int) -> None:
        self._tree, self._broker_id = tree, broker_id

    def claim(self, floor: int) -> range:
        path = paths.PRODUCER_IDS_PATH
        while True:
            before = self._tree.get(path)  # b"" if Kafka has started here: it creates the node without a value
            block = _following(before, floor, path)
            payload = paths.producer_ids_payload(self._broker_id, block[0], block[-1])
            if replace_node(self._tree, path, before, payload):
                return block


class FileBlocks:
    """Blocks claimed in a file."""

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
    """Hands out ids from the blocks that it claims; for one event loop.

    `floor` returns the lowest id above all that the logs here contain: the data may come from another cluster.
    """

    def __init__(self, blocks: Blocks, floor: Callable[[], int]) -> None:
        self._blocks, self._floor = blocks, floor
        self._left = iter(range(0))
        self._lock = asyncio.Lock()

    async def next(self) -> int:
        """Return an id that was never given before. Raises as `Blocks.claim`."""
        async with self._lock:
            found = next(self._left, None)
            if found is None:
                block = await asyncio.to_thread(self._blocks.claim, self._floor())
                _log.info("claimed producer ids %d to %d", block[0], block[-1])
                self._left = iter(block)
                found = next(self._left)
            return found
