"""Load again from a run, a time or offsets, into the same output, whose files are replaced, or into another one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spark_klog.client.places import TimeSpec
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, DataLossError
from spark_klog.files.folder import LocalFolder
from spark_klog.load import files
from spark_klog.load.audit import status
from spark_klog.load.places import AtRun, parse_run, parse_time, read_offsets
from spark_klog.load.planning import Limits
from spark_klog.load.settings import WriteSettings
from tests.load.support import Killed, by_duckdb, by_pyarrow, die, expected, failing, run
from tests.spark.support import Sent, create_topic, delete_records, delete_topic, produce
from tests.support.clients.klog import klog

_TIME = 1_700_002_800_000
_EACH = 40
_SMALL: dict[str, Any] = {"max_task_records": 15}


def _runs(servers: str, topic: str, output: Path, count: int = 3) -> None:
    """Load `count` runs, each with 20 records of each of two partitions; timestamps are a second apart."""
    create_topic(servers, topic, 2)
    for number in range(count):
        first = number * _EACH
        sent = [Sent(b"%d" % n, None, n % 2, _TIME + n * 1000) for n in range(first, first + _EACH)]
        produce(servers, topic, sent)
        run(servers, output, topic, **_SMALL)


def _content(output: Path) -> dict[str, bytes]:
    """Files by path, without the token of the attempt that has written them."""
    return {
        re.sub("-[0-9a-z]{7}[.]", ".", str(path.relative_to(output))): path.read_bytes()
        for path in output.rglob("*.parquet")
    }


def _check(output: Path, records: list[tuple[str, int, int]], missing: Sequence[str] = ()) -> None:
    assert by_pyarrow(output) == by_duckdb(output) == records
    assert by_pyarrow([item.path for item in files(str(output))]) == records
    found = status(str(output))
    assert ([item.what for item in found.findings], found.unfinished) == ([*missing], "")
    assert sum(item["records"] for item in found.partitions) == len(records)
    assert sum(sum(each.values()) for each in found.hours.values()) == len(records)


@pytest.mark.parametrize("place", ["run", "time", "offsets"])
def test_the_same_files(cluster: EmbeddedCluster, topic: str, tmp_path: Path, place: str) -> None:
    servers, output = cluster.bootstrap_servers, tmp_path / "out"
    _runs(servers, topic, output)
    before, old = _content(output), {path.name for path in output.rglob("*.parquet")}
    offsets = tmp_path / "offsets.json"
    offsets.write_text(klog("load", "offsets", str(output), "--run", "2").stdout)
    start = {
        "run": AtRun(2),
        "time": TimeSpec(_TIME + _EACH * 1000),
        "offsets": read_offsets("--from-offsets", offsets),
    }[place]
    loaded = run(servers, output, topic, start=start, **_SMALL)
    assert [(item.start, item.until, item.records) for item in loaded.partitions] == [(20, 60, 40)] * 2
    assert _content(output) == before
    again = {path.name for path in output.rglob("*.parquet")} - old
    assert again == {Path(item.path).name for item in files(str(output)) if item.first >= 20}
    _check(output, expected(topic, {0: 60, 1: 60}))
    assert run(servers, output, topic).runs == []


def test_part_of_a_load_with_other_settings(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """A reload from the middle of a range to the middle of another replaces whole ranges and leaves the rest."""
    servers = cluster.bootstrap_servers
    _runs(servers, topic, tmp_path)
    start, until = TimeSpec(_TIME + 2000 * 25), TimeSpec(_TIME + 2000 * 45)
    kept = {item.path: item.run for item in files(str(tmp_path)) if item.first < 20 or item.first >= 50}
    options = {"settings": WriteSettings(compression="snappy"), "max_task_records": 7}
    loaded = run(servers, tmp_path, topic, start=start, until=until, **options)
    assert [(item.start, item.until, item.records) for item in loaded.partitions] == [(20, 50, 30)] * 2
    assert loaded.offsets == {(topic, 0): 60, (topic, 1): 60}
    found = {item.path: item.run for item in files(str(tmp_path))}
    assert kept.items() <= found.items()
    assert len(found) > 12
    _check(tmp_path, expected(topic, {0: 60, 1: 60}))
    produce(servers, topic, [Sent(b"new", None, 0, _TIME)])
    run(servers, tmp_path, topic)
    # reload everything: ranges that were replaced before are not counted twice
    run(servers, tmp_path, topic, start=AtRun(1))
    run(servers, tmp_path, topic, start=AtRun(2), limits=Limits(max_records=10))
    _check(tmp_path, expected(topic, {0: 61, 1: 60}))


def test_into_another_output(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers, first, second = cluster.bootstrap_servers, tmp_path / "first", tmp_path / "second"
    _runs(servers, topic, first)
    start, until = tmp_path / "start.json", tmp_path / "until.json"
    start.write_text(klog("load", "offsets", str(first), "--run", "2").stdout)
    until.write_text(json.dumps({"offsets": {topic: {"0": 50}}}))
    places = {"start": read_offsets("--from-offsets", start), "until": read_offsets("--until", until)}
    run(servers, second, topic, **places)
    some = expected(topic, {0: 50, 1: 60})
    _check(second, [item for item in some if item[2] >= 20])
    run(servers, second, topic)
    _check(second, [item for item in expected(topic, {0: 60, 1: 60}) if item[2] >= 20])
    run(servers, second, topic, start=TimeSpec(_TIME), max_task_records=7)  # also the offsets before its first run
    _check(second, expected(topic, {0: 60, 1: 60}))
    printed = json.loads(klog("load", "offsets", str(second)).stdout)
    assert printed["offsets"] == {topic: {"0": 60, "1": 60}}


@pytest.mark.parametrize("bound", [{"until": TimeSpec(_TIME + 20_000)}, {"limits": Limits(max_records=20)}])
def test_offsets_before_the_first_run(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, bound: dict[str, Any]
) -> None:
    """Offsets before the first run are loaded later, in part: the next run goes on at the end and duplicates nothing.

    The status shows the hole until it is loaded.
    """
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b"%d" % n, None, 0, _TIME + n * 1000) for n in range(60)])
    run(servers, tmp_path, topic, start=TimeSpec(_TIME + 40_000))
    loaded = run(servers, tmp_path, topic, start=TimeSpec(_TIME), **bound)
    assert [(item.start, item.until, item.records) for item in loaded.partitions] == [(0, 20, 20)]
    assert loaded.offsets == {(topic, 0): 60}
    produce(servers, topic, [Sent(b"new", None, 0, _TIME)])
    assert [item.records for item in run(servers, tmp_path, topic).partitions] == [1]
    hole = "[20, 40) is in no run, and offsets after it are: --from-offsets loads it"
    _check(tmp_path, [item for item in expected(topic, {0: 61}) if not 20 <= item[2] < 40], [hole])
    [line] = json.loads(klog("load", "status", str(tmp_path), "--json").stdout)["partitions"]
    assert (line["from"], line["until"], line["holes"]) == (0, 61, [[20, 40]])
    asked = tmp_path / "_hole.json"
    asked.write_text(json.dumps({"offsets": {topic: {"0": 20}}}))
    run(servers, tmp_path, topic, start=read_offsets("--from-offsets", asked))
    _check(tmp_path, expected(topic, {0: 61}))


@pytest.mark.parametrize("side", [1, pytest.param(-1, marks=pytest.mark.test_all("kill"))], ids=["before", "after"])
def test_killed_at_each_change(cluster: EmbeddedCluster, topic: str, tmp_path: Path, side: int) -> None:
    servers, number, died = cluster.bootstrap_servers, 0, True
    whole = expected(topic, {0: 40, 1: 40})
    while died:
        number += 1 if side < 0 or not number else 3
        output = tmp_path / f"{number}"
        if number == 1:
            _runs(servers, topic, output, 2)
        else:
            run(servers, output, topic, until=TimeSpec(_TIME + _EACH * 1000), **_SMALL)
            run(servers, output, topic, **_SMALL)
        again: dict[str, Any] = {"start": AtRun(2), "max_task_records": 12}
        try:
            with failing(LocalFolder, side * number, die):
                run(servers, output, topic, **again)
            died = False
        except Killed:
            pass
        seen = by_pyarrow(output)
        assert len(set(seen)) == len(seen)
        committed = by_pyarrow([item.path for item in files(str(output))])
        assert committed == whole
        run(servers, output, topic, **again)
        _check(output, whole)
    assert number > 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offsets": {"nope": {"0": 1}}}, "topic nope is not loaded: the topics are "),
        ({"offsets": {"TOPIC": {"7": 1}}}, "has no partition 7"),
        ({"offsets": {"TOPIC": {"x": 1}}}, "has no partition 'x'"),
        ({"offsets": {"TOPIC": {"0": 99}}}, "offset 99 lies beyond the log's end, which is 40"),
        ({"offsets": {"TOPIC": {"0": 30}}}, "the load goes on at 20, so that 30 would skip offsets"),
        ({"offsets": {"TOPIC": {"0": -1}}}, "-1 is not an offset"),
        ({"offsets": {"TOPIC": {"0": "1"}}}, "'1' is not an offset"),
        ({"offsets": {"TOPIC": 1}}, "needs an offset for each partition"),
        ({"offsets": []}, "has no offsets"),
        ({"cluster_id": "another"}, "has offsets of cluster another, and this is cluster "),
        ({"topic_ids": {"TOPIC": "00000000-0000-0000-0000-000000000001"}}, "was created again since"),
        ({"version": 2}, "has version 2, and this klog reads version 1"),
    ],
)
def test_offsets_that_lie(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    servers, output, file = cluster.bootstrap_servers, tmp_path / "out", tmp_path / "offsets.json"
    _runs(servers, topic, output, 1)
    produce(servers, topic, [Sent(b"%d" % n, None, 0, _TIME) for n in range(20)])
    value = json.loads(klog("load", "offsets", str(output)).stdout) | change
    file.write_text(json.dumps(value).replace("TOPIC", topic))
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    for place in (output, tmp_path / "new"):
        if place != output and "skip" in words:
            continue
        with pytest.raises(ConfigError, match=words):
            run(servers, place, topic, start=read_offsets("--from-offsets", file))
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "new").exists()


def test_offsets_that_a_person_wrote(tmp_path: Path) -> None:
    """A mistyped name is refused, unless a klog wrote the file, whose version may have more fields than this one."""
    file = tmp_path / "offsets.json"
    for text, told in (
        ('{"offsets": {"t": {"0": 1}}, "start": 3}', "unknown start"),
        ('{"offsets": {"t": {"0": %s}}}' % ("1" * 5000), "is not an offset"),
        ('{"version": "1", "offsets": {}}', "has version '1', and this klog reads version 1: go on with"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=told):
            read_offsets("--from-offsets", file)
    file.write_text('{"version": 1, "offsets": {"t": {"0": 1}}, "later": 3}')
    assert read_offsets("--from-offsets", file).offsets == {("t", 0): 1}


def test_places_that_are_none(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    _runs(servers, topic, tmp_path, 1)
    with pytest.raises(ConfigError, match=r"has no run 00000009: the committed runs are 1 to 1"):
        run(servers, tmp_path, topic, start=AtRun(9))
    with pytest.raises(ConfigError, match="--from-run last is not a run"):
        parse_run("--from-run", "last")
    with pytest.raises(ConfigError, match="--from-time noon must be an ISO time"):
        parse_time("--from-time", "noon")
    with pytest.raises(ConfigError, match="is in the future"):
        parse_time("--until", "2990-01-01")
    assert parse_time("--until", "2023-11-14T23:00:00Z") == TimeSpec(_TIME)
    (tmp_path / "text").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_offsets("--from-offsets", tmp_path / "text")
    with pytest.raises(ConfigError, match=r"--from-run 9{40} is not a run"):
        parse_run("--from-run", "9" * 5000)
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        read_offsets("--from-offsets", tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, r"is not JSON \(maximum recursion depth"),
        ('{"offsets": {"t": {"' + "1" * 5000 + '": 1}}}', "topic t has no partition '1{40}'"),
        ('{"offsets": {"t": {"0": ' + "1" * 5000 + "}}}", "t-0: .* is not an offset"),
        ('{"offsets": {"t": {"7": 1, "07": 2}}}', "topic t has no partition '07'"),
        ('{"offsets": {"t": {"7": 1, "8": 1, "7": 2}}}', "has '7' twice in one object"),
        ('{"offsets": {"t": {"7": 1}, "t": {"8": 1}}}', "has 't' twice in one object"),
        ('{"offsets": {}, "run": "1", "offsets": {"t": {"8": 1}}}', "has 'offsets' twice in one object"),
    ],
)
def test_files_that_hold_no_offsets(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "offsets.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"^--until {file}.*{words}"):
        read_offsets("--until", file)


def test_what_the_log_has_no_more_stays(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    _runs(servers, topic, tmp_path)
    delete_records(servers, topic, {0: 25})
    before = by_duckdb(tmp_path)
    with pytest.raises(DataLossError, match="can't be loaded again"):
        run(servers, tmp_path, topic, start=AtRun(1))
    assert by_duckdb(tmp_path) == before
    loaded = run(servers, tmp_path, topic, start=AtRun(1), fail_on_loss=False)
    assert [item.start for item in loaded.partitions] == [30, 0]
    assert by_duckdb(tmp_path) == expected(topic, {0: 60, 1: 60})


@pytest.mark.parametrize("recreated", [True, False])
def test_what_the_log_has_lost_since_a_kill_stays(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, recreated: bool
) -> None:
    """A reload is killed after its plan; the run that finishes it finds a recreated topic, or fewer records."""
    servers = cluster.bootstrap_servers
    _runs(servers, topic, tmp_path)
    before = by_duckdb(tmp_path)
    with pytest.raises(Killed), failing(LocalFolder, -1, die):
        run(servers, tmp_path, topic, start=AtRun(1))
    assert status(str(tmp_path)).unfinished
    if recreated:
        delete_topic(servers, topic)
        create_topic(servers, topic, 2)
    else:
        delete_records(servers, topic, {0: 25})
    run(servers, tmp_path, topic, fail_on_loss=False)
    assert by_duckdb(tmp_path) == before
    assert [item.what for item in status(str(tmp_path)).findings if "lost" not in item.what] == []
    run(servers, tmp_path, topic, start=AtRun(1), fail_on_loss=False)
    assert by_duckdb(tmp_path) == before


def test_a_topic_that_was_created_again(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """A reload keeps the files of the old topic, because its records exist nowhere else."""
    servers = cluster.bootstrap_servers
    _runs(servers, topic, tmp_path, 1)
    delete_topic(servers, topic)
    create_topic(servers, topic, 2)
    produce(servers, topic, [Sent(b"%d" % n, None, n % 2, _TIME) for n in range(20)])
    run(servers, tmp_path, topic, fail_on_loss=False)
    run(servers, tmp_path, topic, start=AtRun(1))
    assert by_duckdb(tmp_path) == sorted(expected(topic, {0: 20, 1: 20}) + expected(topic, {0: 10, 1: 10}))
