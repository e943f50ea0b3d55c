"""The one interface to a tree of nodes with values, as ZooKeeper has it, and the way from a URI to a tree."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol
from urllib.parse import unquote, urlsplit

from spark_klog.errors import ConfigError, DirectoryError

#: ZooKeeper's session timeout (0.10 documentation, "zookeeper.session.timeout.ms").
SESSION_SECONDS = 6.0


class NodeExists(DirectoryError):
    """A node that was to be created is there."""


class Tree(Protocol):
    """A tree of nodes. A path is "/a/b": absolute, without "." and ".."; a node has bytes and children.

    Parents come into being with their first child, with the value b"". Every method raises `ConfigError`
    for a path that is none and `DirectoryError` where the tree fails or is closed. Trees are safe to use
    from several threads.
    """

    def get(self, path: str) -> bytes | None:
        """The value of a node; None where there is no node."""

    def get_many(self, paths: Sequence[str]) -> list[bytes | None]:
        """The values of several nodes, in the order of `paths`; in ZooKeeper the requests are under way together."""

    def put(self, path: str, value: bytes) -> None:
        """Make or overwrite a node and its parents; readers see the old value or the new one.

        An ephemeral node stays one; on files only its creator may overwrite it.
        """

    def put_many(self, values: Mapping[str, bytes]) -> None:
        """As `put` for each; not all at once, but in ZooKeeper the requests are under way together."""

    def swap(self, path: str, old: bytes, value: bytes) -> bool:
        """Overwrite a node whose value is `old`; False where it is another, or there is no node.

        Not for ephemeral nodes. On file systems of pyarrow it excludes writers of this process only.
        """

    def create(self, path: str, value: bytes, ephemeral: bool = False) -> None:
        """Make a node and its parents; `NodeExists` where it is.

        An ephemeral node ends with this tree or its process, and has no children. Where a session is lost it is
        made again, unless its parent has been deleted since.
        """

    def delete(self, path: str) -> None:
        """Delete a node and all below it; no error where there is none. The root stays: ConfigError."""

    def children(self, path: str) -> list[str]:
        """The names of the children, sorted; [] where there is no node."""

    def watch(self, path: str, callback: Callable[[], None], values: bool = False) -> None:
        """Have `callback` called from some thread when the names of the children of `path` may have changed.

        With `values` also when the value of one of these children may have changed. Several changes may make one
        call. After a lost connection it is called once more. There need be no such node.
        """

    def close(self) -> None:
        """End the ephemeral nodes and the watches. May be called twice."""


def components(path: str) -> tuple[str, ...]:
    """The names that make up `path`; ConfigError unless it is absolute and plain."""
    if path == "/":
        return ()
    names = tuple(path.split("/")[1:])
    if not path.startswith("/") or any(not name or name in (".", "..") or "\0" in name for name in names):
        raise ConfigError(f"{path!r} is no path of a node: write /NAME/NAME, without '.', '..' and empty names")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{path!r} is no path of a node: it is not Unicode text") from None
    return names


def inner_components(path: str) -> tuple[str, ...]:
    """As `components`; ConfigError for the root too, which holds no value and is never deleted."""
    names = components(path)
    if not names:
        raise ConfigError("the root '/' can be neither written nor deleted: name a node below it")
    return names


def open_tree(uri: str, session_timeout: float = SESSION_SECONDS) -> Tree:
    """The tree of a URI; ConfigError where it names none, DirectoryError where it cannot be reached.

    `session_timeout` is ZooKeeper's, in seconds.

    zookeeper://HOST:PORT,HOST:PORT/CHROOT    ZooKeeper
    a path, or file:PATH                      a local folder
    s3://..., gs://..., hdfs://..., ...       whatever pyarrow.fs.FileSystem.from_uri takes
    """
    scheme, _, rest = uri.partition(":")
    if scheme.lower() == "zookeeper":
        from spark_klog.directories.zookeeper import ZooKeeperTree

        if not rest.startswith("//") or not rest[2:].strip("/"):
            raise ConfigError(f"{without_user(uri)!r} names no ZooKeeper: write zookeeper://HOST:PORT,HOST:PORT/CHROOT")
        return ZooKeeperTree(rest[2:], session_timeout)
    from spark_klog.directories.files import FileTree

    path = local_path(uri)
    if path is not None:
        from spark_klog.directories.local_files import LocalFiles

        return FileTree(LocalFiles(path))
    from spark_klog.directories.arrow_files import ArrowFiles

    return FileTree(ArrowFiles.from_uri(uri))


def without_user(text: str) -> str:
    """A text without the user and password of its URIs, for messages: s3://KEY:SECRET@BUCKET."""
    return re.sub(r"(?<=://)[^/\s]*@", "***@", text)


def local_path(uri: str) -> str | None:
    """The folder that a path or file:PATH names, None for a URI of another kind; ConfigError where it is neither."""
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", uri)  # two letters at least: C:\ is a path
    if scheme is None:
        if not uri:
            raise ConfigError("an empty URI names no directories: give a path or zookeeper://HOST:PORT")
        return uri
    if scheme[1].lower() != "file":
        return None
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ConfigError(f"{without_user(uri)!r} names no local folder: write file:///PATH")
    return unquote(parts.path)
