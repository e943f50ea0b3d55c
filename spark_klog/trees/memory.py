"""The tree in memory: for a single broker, and for tests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from typing import NamedTuple

from spark_klog.errors import DirectoryError
from spark_klog.trees.tree import NodeExists, SerialTree, components, inner_components

_log = logging.getLogger(__name__)

_Names = tuple[str, ...]


class _Node(NamedTuple):
    value: bytes
    owner: MemoryTree | None  # None: not ephemeral


class _Watch(NamedTuple):
    tree: MemoryTree
    names: _Names
    callback: Callable[[], None]
    values: bool


class _Store:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.nodes: dict[_Names, _Node] = {(): _Node(b"", None)}
        self.children: dict[_Names, set[str]] = {(): set()}
        self.watches: list[_Watch] = []


class MemoryTree(SerialTree):
    """A tree in this process. The thread that makes a change calls the watches after it."""

    def __init__(self) -> None:
        self._store = _Store()
        self._closed = False

    def session(self) -> MemoryTree:
        """Another session of the same tree, with ephemeral nodes of its own."""
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

    def swap(self, path: str, old: bytes, value: bytes) -> bool:
        names = inner_components(path)
        with self._store.lock:
            self._check_open(path)
            node = self._store.nodes.get(names)
            if node is None or node.value != old:
                return False
            self._store.nodes[names] = _Node(bytes(value), node.owner)
        self._notify(set(), {names[:-1]})
        return True

    def create(self, path: str, value: bytes, ephemeral: bool = False) -> None:
        self._set(path, value, self if ephemeral else None, overwrite=False)

    def _set(self, path: str, value: bytes, owner: MemoryTree | None, overwrite: bool) -> None:
        names = inner_components(path)
        store = self._store
        changed: set[_Names] = set()
        valued: set[_Names] = set()
        with store.lock:
            self._check_open(path)
            old = store.nodes.get(names)
            if old is not None:
                if not overwrite:
                    raise NodeExists(f"{path} exists: delete it first, or put")
                store.nodes[names] = _Node(bytes(value), old.owner)
                valued.add(names[:-1])
            else:
                changed = self._make(names, _Node(bytes(value), owner), path)
        self._notify(changed, valued)

    def _make(self, names: _Names, leaf: _Node, path: str) -> set[_Names]:
        store = self._store
        for depth in range(1, len(names)):
            parent = store.nodes.get(names[:depth])
            if parent is not None and parent.owner is not None:
                raise DirectoryError(f"{path}: /{'/'.join(names[:depth])} is ephemeral and can't have children")
        changed = set()
        for depth in range(1, len(names) + 1):
            node = names[:depth]
            if node not in store.nodes:
                store.nodes[node] = leaf if depth == len(names) else _Node(b"", None)
                store.children[node] = set()
                store.children[node[:-1]].add(node[-1])
                changed.add(node[:-1])
        return changed

    def delete(self, path: str) -> None:
        names = inner_components(path)
        with self._store.lock:
            self._check_open(path)
            changed = self._remove(names)
        self._notify(changed)

    def delete_if(self, path: str, value: bytes) -> bool:
        names = inner_components(path)
        with self._store.lock:
            self._check_open(path)
            node = self._store.nodes.get(names)
            if node is None or node.value != value:
                return False
            changed = self._remove(names)
        self._notify(changed)
        return True

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

    def watch(self, path: str, callback: Callable[[], None], values: bool = False) -> None:
        names = components(path)
        with self._store.lock:
            self._check_open(path)
            self._store.watches.append(_Watch(self, names, callback, values))

    def close(self) -> None:
        store = self._store
        changed: set[_Names] = set()
        with store.lock:
            if self._closed:
                return
            self._closed = True
            store.watches = [watch for watch in store.watches if watch.tree is not self]
            for names in [names for names, node in store.nodes.items() if node.owner is self]:
                changed |= self._remove(names)
        self._notify(changed)

    def _notify(self, changed: set[_Names], valued: Collection[_Names] = ()) -> None:
        with self._store.lock:
            watches = [
                watch
                for watch in self._store.watches
                if watch.names in changed or (watch.values and watch.names in valued)
            ]
        for watch in watches:
            try:
                watch.callback()
            except Exception:
                _log.exception("the watch on /%s failed", "/".join(watch.names))

    def _check_open(self, path: str) -> None:
        if self._closed:
            raise DirectoryError(f"{path}: the tree is closed")
