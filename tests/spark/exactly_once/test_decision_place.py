"""Where the decisions of a checkpoint are: the key of its log by its address or by Spark's id, and its plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_klog.errors import ConfigError
from spark_klog.spark.write.decisions.decision_place import DecisionPlace, decision_place, planned, stream_key

STORE = "s3a://bucket/a"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "metadata").write_text('{"id":"6ba7b810-9dad-11d1-80b4-00c04fd430c8"}')
    return tmp_path


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
    before = [decision_place(location, None).key for location in (str(checkpoint), STORE)]
    (checkpoint / "metadata").write_text('{"id":"6ba7b811-9dad-11d1-80b4-00c04fd430c8"}')
    after = [decision_place(location, None).key for location in (str(checkpoint), STORE)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True]


def test_places(checkpoint: Path, tmp_path: Path) -> None:
    key = "stream/6ba7b810-9dad-11d1-80b4-00c04fd430c8"
    assert decision_place(STORE, None) == DecisionPlace("__klog_decisions", f"stream/{STORE}")
    assert decision_place(STORE, "d") == DecisionPlace("d", f"stream/{STORE}")
    assert decision_place(str(checkpoint), "d") == DecisionPlace("d", key, checkpoint)
    elsewhere = tmp_path / "elsewhere"  # as a path of Spark's default file system
    assert decision_place(str(elsewhere), None) == DecisionPlace("__klog_decisions", f"stream/file:{elsewhere}")


def test_spellings_of_a_local_checkpoint(tmp_path: Path) -> None:
    """Locations are not decoded, as in Hadoop's Path: Spark creates the folder a%20b for file:///a%20b."""
    name = "a b%20c#d?e"
    (tmp_path / name).mkdir()
    (tmp_path / name / "metadata").write_text('{"id":"6ba7b810-9dad-11d1-80b4-00c04fd430c8"}')
    spellings = (
        f"{tmp_path}/{name}",
        f"file:{tmp_path}/{name}",
        f"FILE://{tmp_path}/{name}",
        f"file://localhost{tmp_path}/{name}",
    )
    assert {decision_place(location, None).folder for location in spellings} == {tmp_path / name}
    with pytest.raises(ConfigError, match=r"'file://host/a' is not a local folder: write file:///PATH"):
        decision_place("file://host/a", None)


def test_a_plan_is_known_by_its_offsets(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    plans = [planned(tmp_path, 3)]
    for text in ("", "v1\n", "v1\n{1}", "v1\n{1}\na\nb", "v1\n{2}\na\nb", "v1\n{1}\na\nc"):
        (tmp_path / "offsets" / "3").write_text(text)
        plans.append(planned(tmp_path, 3))
    assert plans[:4] == [""] * 4
    assert plans[4] == plans[5] != plans[6]
    assert all(plans[4:])
