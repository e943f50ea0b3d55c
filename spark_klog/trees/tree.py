"""The interface of a tree of nodes with values, like ZooKeeper's, and its paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from spark_klog.errors import ConfigError, DirectoryError

#: ZooKeeper's session timeout (0.10 documentation, "zookeeper.session.timeout.ms").
SESSION_SECONDS = 6.0
#: A tree of files: what the names of files end with, of a folder's value and of an ephemeral node.
VALUE, EPHEMERAL = ".value", ".ephemeral"


class NodeExists(DirectoryError):
    """A node to create exists already."""


class Lease(Protocol):
    """A tree's session, for a process that acts on what it has read: after the end others act without asking it."""

    @property
    def session(self) -> int | None:
        """Id of the session that has the ephemeral nodes; a later session has another one. None before the first."""

    @property
    def holds(self) -> bool:
        """Whether `session` certainly lives, however long this process may have stood still."""

    @property
    def is_cut_off(self) -> bool:
        """Whether the tree is known to be out of reach, by a process that has not stood still meanwhile."""


class Tree(Protocol):
    """A tree of nodes, which have a value (bytes) and children. A path is "/a/b": absolute, without "." and "..".

    Creating a node creates its parents, with the value b"". Every method raises `ConfigError` for an invalid path, and
    `DirectoryError` if the tree fails or is closed. Trees are thread-safe.
    """

    def get(self, path: str) -> bytes | None:
        """The value of a node; None if it does not exist."""

    def get_many(self, paths: Sequence[str]) -> list[bytes | None]:
        """The values of several nodes, in the order of `paths`; requests to ZooKeeper are pipelined."""

    def put(self, path: str, value: bytes) -> None:
        """Create or overwrite a node; readers see the old value or the new one.

        An ephemeral node stays one; on files only its creator may overwrite it.
        """

    def put_many(self, values: Mapping[str, bytes], *, lasting: bool = True) -> None:
        """As `put` for each, not atomically; requests to ZooKeeper are pipelined.

        Unless they are `lasting`, a power failure may take them: files are not synced then.
        """

    def swap(self, path: str, old: bytes, value: bytes) -> bool:
        """Overwrite a node if its value is `old` (compare-and-set); else, or without a node, return False.

        Not for ephemeral nodes. On pyarrow's file systems it excludes only writers in this process.
        """

    def create(self, path: str, value: bytes, ephemeral: bool = False) -> None:
        """Create a node; `NodeExists` if it exists.

        An ephemeral node ends with this tree or its process, and has no children. After a lost session the tree
        creates it again, unless its parent has been deleted since.
        """

    def delete(self, path: str) -> None:
        """Delete a node and all below it; no error if it does not exist. ConfigError for the root."""

    def delete_if(self, path: str, value: bytes) -> bool:
        """Delete a node and all below it if its value is `value`; else, or without a node, return False.

        Not for ephemeral nodes. As `swap`, on pyarrow's file systems it excludes only writers in this process.
        """

    def children(self, path: str) -> list[str]:
        """The sorted names of the children; [] if the node does not exist."""

    def watch(self, path: str, callback: Callable[[], None], values: bool = False) -> None:
        """Call `callback`, from any thread, when the names of the children of `path` may have changed.

        With `values` also when the value of a child may have changed. Several changes may make one call. After a lost
        connection it is called once more. The node need not exist.
        """

    def sync(self) -> None:
        """Wait until a power failure can't undo this object's changes; of ZooKeeper and in memory there is no wait."""

    def lease(self) -> Lease:
        """The tree's session; ZooKeeper is asked often from the first call on."""

    def close(self) -> None:
        """End the ephemeral nodes and the watches. A second call does nothing."""


class ProcessLease:
    """`Lease` of a tree whose ephemeral nodes last as long as their process: in memory, or files with a lock."""

    session, holds, is_cut_off = 0, True, False


class SerialTree(Tree):
    """A tree in memory or in files: it reads and writes several nodes one after the other, and has no timeout."""

    def sync(self) -> None:
        """Files override this."""

    def lease(self) -> Lease:
        return ProcessLease()

    def get_many(self, paths: Sequence[str]) -> list[bytes | None]:
        return [self.get(path) for path in paths]

    def put_many(self, values: Mapping[str, bytes], *, lasting: bool = True) -> None:
        for path in values:
            inner_components(path)
        for path, value in values.items():
            self.put(path, value)


def components(path: str) -> tuple[str, ...]:
    """The names that make up `path`; ConfigError unless it is absolute and plain."""
    if path == "/":
        return ()
    names = tuple(path.split("/")[1:])
    if not path.startswith("/") or any(not name or name in (".", "..") or "\0" in name for name in names):
        raise ConfigError(f"{path!r} is not a path of a node: write /NAME/NAME, without '.', '..' and empty names")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{path!r} is not a path of a node: it is not Unicode text") from None
    return names


def inner_components(path: str) -> tuple[str, ...]:
    """As `components`; ConfigError for the root too, which has no value and can't be deleted."""
    names = components(path)
    if not names:
        raise ConfigError("the root '/' can be neither written nor deleted: name a node below it")
    return names
