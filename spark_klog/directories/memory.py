"""The tree in a dict: for a broker that is alone, and for tests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from spark_klog.directories.tree import NodeExists, components, inner_components
from spark_klog.errors import DirectoryError

_log = logging.getLogger(__name__)

_Names = tuple[str, ...]


class _Node(NamedTuple):
    value: bytes
    owner: MemoryTree | None  # None: not ephemeral


class _Store:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.nodes: dict[_Names, _Node] = {(): _Node(b"", None)}
        self.children: dict[_Names, set[str]] = {(): set()}
        self.watches: list[tuple[MemoryTree, _Names, Callable[[], None]]] = []


class MemoryTree:
    """A tree of this process. Watches are called by the thread that makes the change, after it."""

    def __init__(self) -> None:
        self._store = _Store()
        self._closed = False

    def session(self) -> MemoryTree:
        """Another tree with the same nodes and ephemeral nodes of its own."""
        other = MemoryTree()
        other._store = self._store
        return other

    def get(self, path: str) -> bytes | None:
        names = components(path)
        with self._store.lock:
            self._check_open(path)
            node = self._store.nodes.get(names)
            return None if node is None else node.value

    def put(self, path: str, value: bytes) -> None:
        self._set(path, value, None, overwrite=True)

    def create(self, path: str, value: bytes, ephemeral: bool = False) -> None:
        self._set(path, value, self if ephemeral else None, overwrite=False)

    def _set(self, path: str, value: bytes, owner: MemoryTree | None, overwrite: bool) -> None:
        names = inner_components(path)
        store = self._store
        with store.lock:
            self._check_open(path)
            old = store.nodes.get(names)
            if old is not None:
                if not overwrite:
                    raise NodeExists(f"{path} exists: delete it first, or put")
                store.nodes[names] = _Node(bytes(value), old.owner)
                return
            for depth in range(1, len(names)):
                parent = store.nodes.get(names[:depth])
                if parent is not None and parent.owner is not None:
                    raise DirectoryError(f"{path}: /{'/'.join(names[:depth])} is ephemeral and has no children")
            changed = set()
            for depth in range(1, len(names) + 1):
                node = names[:depth]
                if node not in store.nodes:
                    last = depth == len(names)
                    store.nodes[node] = _Node(bytes(value), owner) if last else _Node(b"", None)
                    store.children[node] = set()
                    store.children[node[:-1]].add(node[-1])
                    changed.add(node[:-1])
        self._notify(changed)

    def delete(self, path: str) -> None:
        names = inner_components(path)
        with self._store.lock:
            self._check_open(path)
            changed = self._remove(names)
        self._notify(changed)

    def _remove(self, names: _Names) -> set[_Names]:
        store = self._store
        if names not in store.nodes:
            return set()
        changed = {names[:-1]}
        store.children[names[:-1]].discard(names[-1])
        below = [names]
        while below:
            node = below.pop()
            del store.nodes[node]
            gone = store.children.pop(node)
            if gone:
                changed.add(node)
            below += [(*node, child) for child in gone]
        return changed

    def children(self, path: str) -> list[str]:
        names = components(path)
        with self._store.lock:
            self._check_open(path)
            return sorted(self._store.children.get(names, ()))

    def watch(self, path: str, callback: Callable[[], None]) -> None:
        names = components(path)
        with self._store.lock:
            self._check_open(path)
            self._store.watches.append((self, names, callback))

    def close(self) -> None:
        store = self._store
        changed: set[_Names] = set()
        with store.lock:
            if self._closed:
                return
            self._closed = True
            store.watches = [watch for watch in store.watches if watch[0] is not self]
            for names in [names for names, node in store.nodes.items() if node.owner is self]:
                changed |= self._remove(names)
        self._notify(changed)

    def _notify(self, changed: set[_Names]) -> None:
        with self._store.lock:
            watches = [watch for watch in self._store.watches if watch[1] in changed]
        for _, names, callback in watches:
            try:
                callback()
            except Exception:
                _log.exception("the watch on /%s failed", "/".join(names))

    def _check_open(self, path: str) -> None:
        if self._closed:
            raise DirectoryError(f"{path}: the tree is closed")
