"""Messages do not contain the secrets of URIs."""

from __future__ import annotations

import pytest

from spark_klog.directories.checkpoint import checkpoint_offsets
from spark_klog.directories.trees.addresses import without_user
from spark_klog.directories.trees.opening import open_tree
from spark_klog.errors import ConfigError, KlogError
from spark_klog.spark.planning.log_files import directory


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("s3://KEY:SECRET@bucket/a@b", "s3://***@bucket/a@b"),
        ("s3://KEY:SEC@RET@bucket", "s3://***@bucket"),
        ("no way to hdfs://user@host:8020/x, nor s3://k:s@b", "no way to hdfs://***@host:8020/x, nor s3://***@b"),
        ("/a/path@home", "/a/path@home"),
        ("zookeeper://h:2181/x", "zookeeper://h:2181/x"),
        ("zookeeper:user:SECRET@h:2181/x", "zookeeper:***@h:2181/x"),
        ("no file system of 's3://KEY:SEC/RET@bucket/a'", "no file system of 's3://***@bucket/a'"),
    ],
)
def test_without_user(text: str, told: str) -> None:
    assert without_user(text) == told


@pytest.mark.parametrize("ask", [open_tree, checkpoint_offsets, directory])
@pytest.mark.parametrize("scheme", ["nosuch", "file", "zookeeper"])
def test_no_message_has_a_secret(ask: object, scheme: str) -> None:
    assert callable(ask)
    with pytest.raises(KlogError) as caught:
        ask(f"{scheme}://KEY:SECRET@")
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("address", ["zookeeper://user:SECRET@127.0.0.1:1/x", "zookeeper:user:SECRET@127.0.0.1:1"])
def test_a_password_before_the_address_of_zookeeper_is_refused_unseen(address: str) -> None:
    with pytest.raises(ConfigError, match=r"character @|no ZooKeeper address") as caught:
        open_tree(address)
    assert "SECRET" not in str(caught.value)
