"""Where the decisions of a checkpoint are: the key of its log, the choice by its folder, and what it notes itself."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from spark_klog.errors import ConfigError
from spark_klog.spark.write.decisions.decision_log import Identity
from spark_klog.spark.write.decisions.decision_place import DecisionPlace, decision_place, stream_key
from spark_klog.spark.write.decisions.hard_link_log import DecisionsMoved, HardLinkLog, Moved, has_hard_links
from spark_klog.spark.write.exactly_once import Claim, Decision

STORE = "s3a://bucket/a"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "metadata").write_text('{"id":"6ba7b810-9dad-11d1-80b4-00c04fd430c8"}')
    return tmp_path


def refuse_links(*_: Any, **__: Any) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize(
    ("location", "key"),
    [
        ("s3a://bucket/a/b", "stream/s3a://bucket/a/b"),
        ("s3a://bucket//a/./b/", "stream/s3a://bucket/a/b"),
        ("S3://bucket/a/b", "stream/s3a://bucket/a/b"),
        ("s3a://KEY:SECRET@bucket/a/b", "stream/s3a://bucket/a/b"),
        ("s3a://KEY:SE/CRET@bucket/a/b", "stream/s3a://bucket/a/b"),
        ("abfss://container@account.dfs.core.windows.net/a", "stream/abfss://container@account.dfs.core.windows.net/a"),
        ("abfs://container@account.dfs.core.windows.net/a", "stream/abfss://container@account.dfs.core.windows.net/a"),
        ("gs://bucket/a b%20", "stream/gs://bucket/a b%20"),
        ("hdfs:///a", "stream/hdfs:///a"),
        ("hdfs:/a", "stream/hdfs:///a"),
        ("hdfs://namenode:8020/a", "stream/hdfs://namenode:8020/a"),
        ("dbfs:/a/b/", "stream/dbfs:///a/b"),
        ("s3a://bucket", "stream/s3a://bucket"),
        ("s3a://bucket/", "stream/s3a://bucket"),
        ("/a/b/", "stream/file:/a/b"),
        ("file:///a/b", "stream/file:/a/b"),
        ("file:/a/../b", "stream/file:/b"),
        ("/Volumes/main/default/v/a", "stream/file:/Volumes/main/default/v/a"),
    ],
)
def test_keys(location: str, key: str) -> None:
    assert stream_key(location) == key


def test_a_checkpoint_that_was_deleted(checkpoint: Path) -> None:
    """A new query in a folder has a key of its own; one in a store that klog does not read has the old one's."""
    before = [decision_place(location, "topic", None).key for location in (str(checkpoint), STORE)]
    (checkpoint / "metadata").write_text('{"id":"6ba7b811-9dad-11d1-80b4-00c04fd430c8"}')
    after = [decision_place(location, "topic", None).key for location in (str(checkpoint), STORE)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True]


def test_the_choice(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "stream/6ba7b810-9dad-11d1-80b4-00c04fd430c8"
    assert decision_place(STORE, "auto", None) == DecisionPlace(None, "__klog_decisions", f"stream/{STORE}")
    assert decision_place(STORE, "topic", "d") == DecisionPlace(None, "d", f"stream/{STORE}")
    with pytest.raises(ConfigError, match="decisionLog=checkpoint needs a checkpointLocation that is a local"):
        decision_place(STORE, "checkpoint", None)
    assert decision_place(str(checkpoint), "auto", None) == DecisionPlace(checkpoint)
    assert decision_place(str(checkpoint), "topic", None) == DecisionPlace(checkpoint, "__klog_decisions", key)
    elsewhere = str(tmp_path / "elsewhere")  # as a path of Spark's default file system
    assert decision_place(elsewhere, "auto", None).topic == "__klog_decisions"
    assert sorted(os.listdir(checkpoint)) == ["metadata"]
    monkeypatch.setattr(os, "link", refuse_links)
    assert not has_hard_links(checkpoint)
    assert decision_place(str(checkpoint), "auto", None) == DecisionPlace(checkpoint, "__klog_decisions", key)
    assert sorted(os.listdir(checkpoint)) == ["metadata"]
    (checkpoint / "klog_sink").mkdir()
    assert decision_place(str(checkpoint), "auto", None) == DecisionPlace(checkpoint)


@pytest.mark.parametrize("has_links", [True, False])
def test_a_checkpoint_says_that_its_decisions_are_in_a_topic(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", refuse_links)
    log = HardLinkLog(checkpoint, Identity())
    assert log.move(Moved("d", "k"))
    assert not HardLinkLog(checkpoint, Identity()).move(Moved("e", "k"))
    monkeypatch.undo()
    assert os.listdir(checkpoint / "klog_sink") == ["0"]
    for kind in ("auto", "topic"):
        assert decision_place(str(checkpoint), kind, None) == DecisionPlace(checkpoint, "d", "k")
        with pytest.raises(ConfigError, match=r"decisionTopic is e, but the decisions of .* are in topic d"):
            decision_place(str(checkpoint), kind, "e")
    local = decision_place(str(checkpoint), "checkpoint", None).open({}, Identity())
    with pytest.raises(DecisionsMoved, match=r"are in topic d .*set decisionLog=topic and decisionTopic=d"):
        local.read()
    assert not local.append(0, Claim())


def test_a_log_that_has_moved_takes_no_entry(checkpoint: Path) -> None:
    log = HardLinkLog(checkpoint, Identity())
    for number in range(3):
        assert log.append(number, Claim())
    zombie = HardLinkLog(checkpoint, log.identity, is_claimed=True)
    assert zombie.read().end == 3
    assert not log.move(Moved("d", "k", 2))
    assert log.move(Moved("d", "k", 3, 7, "plan"))
    assert not zombie.append(3, Decision(8, ()))
    with pytest.raises(DecisionsMoved):
        zombie.read()
    found = HardLinkLog(checkpoint, Identity())
    assert found.moved() == Moved("d", "k", 3, 7, "plan")
    assert found.identity == log.identity
