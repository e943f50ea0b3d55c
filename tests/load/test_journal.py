"""What a load reads of its journal: people edit these files, and what can't be is named."""

from __future__ import annotations

from typing import Any

import pytest

from spark_klog.errors import LoadError
from spark_klog.load.journal.history import Identity
from spark_klog.load.journal.model import FileEntry, RangeResult, from_json
from spark_klog.load.settings import WriteSettings

_FILE = {"path": "t/t+0.parquet", "topic": "t", "partition": 0, "first": 0, "last": 3, "records": 4, "size": 9}
_RANGE: dict[str, Any] = {
    "topic": "t",
    "partition": 0,
    "start": 0,
    "until": 4,
    "records": 4,
    "bytes": 8,
    "min_time": -3_600_000,
    "max_time": None,
    "gaps": {"compaction": 2},
    "hours": {"1969-12-31T23": 4},
    "files": [{**_FILE, "min_time": -1, "max_time": 0}],
    "dead_letters": ["values+t+0.jsonl"],
}


def test_times_before_the_epoch_are_read() -> None:
    result = from_json(RangeResult, _RANGE, "offsets.json")
    assert (result.min_time, result.max_time) == (-3_600_000, None)
    assert result.files == [FileEntry(**_FILE, min_time=-1, max_time=0)]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("until", -1, "until: -1"),
        ("gaps", {"compaction": -2}, "gaps: -2"),
        ("records", True, "records: True"),
        ("records", None, "records: None"),
        ("min_time", "-1", "min_time: '-1'"),
        ("hours", [], r"hours: \[\]"),
        ("files", [{**_FILE, "min_time": 0, "max_time": 0, "size": -1}], "files: size: -1"),
        ("files", [_FILE], "files: without min_time, max_time"),
        ("files", ["t.parquet"], "no JSON object for FileEntry"),
    ],
)
def test_what_nobody_has_written_is_named(name: str, value: Any, words: str) -> None:
    with pytest.raises(LoadError, match=rf"^offsets\.json is not what a run has written \(.*{words}.*\): restore it$"):
        from_json(RangeResult, {**_RANGE, name: value}, "offsets.json")


def test_a_journal_of_another_version() -> None:
    with pytest.raises(
        LoadError, match=r"^load\.json has version 2, and this klog reads version 1: go on with the klog"
    ):
        from_json(Identity, {"load": "a", "version": 2, "new": []}, "load.json")
    written = {"load": "a", "cluster_id": "b", "format": "parquet"}
    for version, told in (({"version": "1"}, "version '1'"), ({"version": True}, "version True"), ({}, "no version")):
        with pytest.raises(LoadError, match=rf"^load\.json has {told}, and this klog reads version 1: "):
            from_json(Identity, {**written, **version}, "load.json")


def test_fields_of_a_later_version_are_passed_over() -> None:
    """A newer klog adds them only if an older one may do without."""
    assert from_json(RangeResult, {**_RANGE, "later": {"a": 1}}, "") == from_json(RangeResult, _RANGE, "")
    settings = WriteSettings().to_json()
    assert WriteSettings.of({**settings, "later": 1}) == WriteSettings.of(settings)


def test_ranges_as_one() -> None:
    """Two ranges may have one corrupt batch: it counts for each of them, and is one file."""
    first = from_json(RangeResult, {**_RANGE, "dead_letters": ["batch"], "error": ""}, "")
    second = from_json(
        RangeResult,
        {**_RANGE, "start": 4, "until": 9, "min_time": 5, "dead_letters": ["batch", "values+t"], "bad_values": 3},
        "",
    )
    both = RangeResult.joined([first, second], first.files)
    assert (both.start, both.until, both.records, both.min_time, both.max_time) == (0, 9, 8, -3_600_000, None)
    assert (both.gaps, both.hours) == ({"compaction": 4}, {"1969-12-31T23": 8})
    assert (both.dead_letters, both.bad) == (["batch", "values+t"], first.bad + second.bad)
