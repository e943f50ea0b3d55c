"""Messages do not contain the secrets of URIs."""

from __future__ import annotations

import json
from contextlib import closing
from unittest.mock import MagicMock

import pytest

from spark_klog.base.addresses import without_user
from spark_klog.errors import ConfigError, KlogError
from spark_klog.groups.checkpoint import checkpoint_offsets, checkpoint_state
from spark_klog.load import audit
from spark_klog.load.journal.history import Identity
from spark_klog.load.journal.summary import Summary
from spark_klog.load.run import Loaded
from spark_klog.spark.options import source_options
from spark_klog.spark.read import directory_source
from spark_klog.spark.read.directory_source import DirectorySource, directory
from spark_klog.spark.write.decisions.decision_place import decision_place
from spark_klog.trees.opening import open_tree
from spark_klog.ui import views


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("s3://KEY:SECRET@bucket/a@b", "s3://***@bucket/a@b"),
        ("s3://KEY:SEC@RET@bucket", "s3://***@bucket"),
        ("no way to hdfs://user@host:8020/x, nor s3://k:s@b", "no way to hdfs://***@host:8020/x, nor s3://***@b"),
        ("/a/path@home", "/a/path@home"),
        ("abfss://container@account/a or wasb://c@d", "abfss://container@account/a or wasb://c@d"),
        ("abfss://KEY:SECRET@account/a", "abfss://***@account/a"),
        ("abfs://a@h/c/x?enable_tls=false&sv=1&sig=S%2B/=&se=2", "abfs://a@h/c/x?enable_tls=false&sv=1&sig=***&se=2"),
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


def test_what_is_shown_of_a_load_and_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load's status, a topic that is not in directories, exactly-once writes, `klog checkpoint show`, the page."""
    bucket = "s3://KEY:SECRET@bucket/out"
    store = MagicMock(address="s3://***@bucket/out")
    monkeypatch.setattr(audit, "open_load", lambda _: (store, Identity("id", "", "parquet")))
    monkeypatch.setattr(audit, "read_summary", lambda _: Summary())
    monkeypatch.setattr(audit, "read_plan", lambda *_: None)
    monkeypatch.setattr(audit, "read_idle", lambda *_: None)
    shown = [json.dumps(audit.status_json(audit.status(bucket)))]
    shown.append(json.dumps(audit.loaded_json(Loaded([], [], 0, [], [], {}), bucket)))
    monkeypatch.setattr(audit, "open_load", checkpoint_state)
    shown.append(json.dumps(views.loads([bucket])))
    shown.append(json.dumps(views.queries(MagicMock(), [bucket])))
    with pytest.raises(ConfigError) as caught:
        checkpoint_state(bucket)
    shown.append(str(caught.value))
    assert "SECRET" not in decision_place(bucket, None).told
    options = source_options({"path": f"/nowhere,{bucket}", "subscribe": "t"}, streaming=False)
    monkeypatch.setattr(directory_source, "directory", lambda _: None)
    monkeypatch.setattr(directory_source, "StoredDirectories", lambda *_, **__: MagicMock(partitions=list))
    with closing(DirectorySource(options)) as source, pytest.raises(ConfigError) as caught:
        source.partitions()
    shown.append(str(caught.value))
    assert [text for text in shown if "SECRET" in text or "***@bucket" not in text] == []


@pytest.mark.parametrize("address", ["zookeeper://user:SECRET@127.0.0.1:1/x", "zookeeper:user:SECRET@127.0.0.1:1"])
def test_a_password_before_the_address_of_zookeeper_is_refused_unseen(address: str) -> None:
    with pytest.raises(ConfigError, match=r"character @|no ZooKeeper address") as caught:
        open_tree(address)
    assert "SECRET" not in str(caught.value)
