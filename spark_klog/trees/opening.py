"""Opening of a tree by its URI."""

from __future__ import annotations

from spark_klog.base.addresses import local_path, without_user
from spark_klog.errors import ConfigError
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
    try:
        from spark_klog.trees.arrow_files import ArrowFiles
    except ImportError as error:
        raise ConfigError(f"directories at {without_user(uri)!r} need pyarrow, which is not installed") from error
    return FileTree(ArrowFiles.from_uri(uri))
