"""Opening of a tree by its URI."""

from __future__ import annotations

from spark_klog.base.addresses import local_path, without_user
from spark_klog.errors import ConfigError, DirectoryError
from spark_klog.files import open_filesystem
from spark_klog.trees.files import FileTree, LocalFiles
from spark_klog.trees.tree import SESSION_SECONDS, Tree


def open_tree(uri: str, session_timeout: float = SESSION_SECONDS) -> Tree:
    """Open the tree at a URI; ConfigError for an invalid URI, DirectoryError if the tree cannot be reached.

    `session_timeout` is ZooKeeper's, in seconds.

    zookeeper://HOST:PORT,HOST:PORT/CHROOT    ZooKeeper
    a path, or file:PATH                      a local folder
    s3://..., gs://..., hdfs://..., ...       whatever pyarrow.fs.FileSystem.from_uri takes
    """
    scheme, _, rest = uri.partition(":")
    if scheme.lower() == "zookeeper":
        from spark_klog.trees.zookeeper import ZooKeeperTree

        if not rest.startswith("//") or not rest[2:].strip("/"):
            raise ConfigError(f"{without_user(uri)!r} has no ZooKeeper address: write zookeeper://HOST:PORT/CHROOT")
        return ZooKeeperTree(rest[2:], session_timeout)
    path = local_path(uri)
    if path is not None:
        return FileTree(LocalFiles(path))
    filesystem, base = open_filesystem(uri, DirectoryError)
    from spark_klog.trees.arrow_files import ArrowFiles

    return FileTree(ArrowFiles(filesystem, base))
