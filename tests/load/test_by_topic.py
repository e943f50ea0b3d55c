"""A load for each topic: outputs by topic, side by side in one job, each with a journal and commits of its own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable
from prometheus_client.parser import text_string_to_metric_families

from spark_klog.cli.commands.load import load as klog_load
from spark_klog.cli.jobs import batch_load
from spark_klog.cli.main import main
from spark_klog.client import Admin
from spark_klog.client.cluster import Cluster
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, ConnectionFailed, DataLossError, LoadError
from spark_klog.files.folder import LocalFolder
from spark_klog.load import by_topic, files, follow
from spark_klog.load.audit import status
from spark_klog.load.by_topic import Loads, Outcome, existing, output_of
from spark_klog.load.driving import drive
from spark_klog.load.journal import paths
from spark_klog.load.journal.store import locked, open_store
from spark_klog.load.places import AtOffsets, read_offsets
from spark_klog.load.run import Loaded, LoadOptions, MaxBad, load
from spark_klog.load.settings import WriteSettings
from spark_klog.load.tasks.task import Work
from spark_klog.load.tasks.time_limit import TaskTime, TimeLimit
from spark_klog.protocol.apis import LIST_OFFSETS
from spark_klog.tables.opening import open_table
from tests.load.support import InProcess, Killed, by_duckdb, expected, failing, in_child, kills, run
from tests.load.tables import CATALOG, Kind, make_lake, places
from tests.spark.support import Sent, consume, create_topic, delete_topic, produce, values
from tests.support.clients.klog import klog

_DIED, _SECONDS = 9, 120


class _Shared(InProcess):
    """Counts the loads of each job."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[int] = []

    def run_all(self, works: Sequence[Work]) -> list[Exception | None]:
        self.jobs.append(len(works))
        return super().run_all(works)


def _loads(
    servers: str, output: str, *topics: str, pattern: str | None = None, every: float = 0.0, **options: Any
) -> Loads:
    asked = LoadOptions({"bootstrap.servers": servers}, list(topics[:1]), by_topic.example_of(output), **options)
    return Loads(asked, topics, pattern, output, _Shared(), lambda _total, _done: nullcontext(), every=every)


def _jobs(loads: Loads) -> list[int]:
    runner = loads._runner
    assert isinstance(runner, _Shared)
    return runner.jobs


def _runs(outcomes: Sequence[Outcome]) -> dict[str, list[int] | None]:
    return {outcome.topic: outcome.loaded.runs if outcome.loaded else None for outcome in outcomes}


def _delta(folder: Path) -> list[tuple[str, int, int]]:
    return places(DeltaTable(str(folder)).to_pyarrow_table())


@pytest.mark.parametrize(
    ("output", "topic", "made"),
    [
        ("delta:/lake/{topic}", "shop.public.orders", "delta:/lake/shop.public.orders"),
        ("s3://lake/{topic[1]}/{topic[2]}?region=x", "shop.public.orders", "s3://lake/public/orders?region=x"),
        ("delta:/lake/{topic[1]}_{topic[-1]}", "shop.public.orders", "delta:/lake/public_orders"),
        ("iceberg:lake.{topic[1]}.{topic[2]}", "shop.public.new-orders", "iceberg:lake.public.new_orders"),
        ("iceberg:lake.db.{topic}", "shop.public.orders", "iceberg:lake.db.shop_public_orders"),
    ],
)
def test_names(output: str, topic: str, made: str) -> None:
    assert output_of(output, topic) == made


def test_names_that_have_no_part() -> None:
    for topic in ("shop", "shop..orders"):
        with pytest.raises(ConfigError, match=rf"topic {topic} has no part for \{{topic\[1\]\}} of"):
            output_of("delta:/lake/{topic[1]}", topic)
    with pytest.raises(ConfigError, match=r"write \{topic\}, or"):
        by_topic.example_of("delta:/lake/{topic.x}")
    with pytest.raises(ConfigError, match=r"write \{topic\}, or"):
        existing("/lake/{topics}")


@pytest.fixture
def topics(cluster: EmbeddedCluster, topic: str) -> list[str]:
    """Three topics, `topic`.a to `topic`.c: ten records in each of the two partitions of the first two."""
    names = [f"{topic}.{letter}" for letter in "abc"]
    for name in names:
        create_topic(cluster.bootstrap_servers, name, 2)
    for name in names[:2]:
        produce(cluster.bootstrap_servers, name, values(20, partitions=2))
    return names


@pytest.mark.parametrize("kind", ["folder", "delta", "iceberg"])
def test_each_topic_is_a_load(
    cluster: EmbeddedCluster, topics: list[str], topic: str, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = cluster.bootstrap_servers
    output = str(tmp_path / "{topic}")
    if kind == "delta":
        output = f"delta:{output}"
    elif kind == "iceberg":
        lake = make_lake("iceberg", tmp_path, monkeypatch)
        output = f"iceberg:{CATALOG}.db.{{topic[-1]}}"
    loads = _loads(servers, output, pattern=rf"(?!__){topic}.*|__consumer_offsets")
    assert _runs(loads.round()) == {topics[0]: [1], topics[1]: [1], topics[2]: []}
    assert _jobs(loads) == [2]
    assert _runs(loads.round()) == {name: [] for name in topics}
    new = f"{topic}.d"
    create_topic(servers, new)
    produce(servers, new, values(5))
    produce(servers, topics[0], values(2, start=20))
    assert _runs(loads.round()) == {topics[0]: [2], topics[1]: [], topics[2]: [], new: [1]}
    counts = {topics[0]: {0: 12, 1: 10}, topics[1]: {0: 10, 1: 10}, topics[2]: {}, new: {0: 5}}
    for name, there in counts.items():
        if kind == "folder":
            assert by_duckdb(tmp_path / name) == expected(name, there)
        elif kind == "delta":
            assert _delta(tmp_path / name) == expected(name, there)
        else:
            table = lake.catalog.load_table(f"db.{name.rpartition('.')[2]}")
            assert places(table.scan().to_arrow()) == expected(name, there)
        assert status(output_of(output, name)).findings == []
    assert existing(output) == {output_of(output, name): "" for name in sorted(counts)}
    shown = json.loads(klog("load", "status", output, "-b", servers, "--json").stdout)
    assert {
        each["partitions"][0]["topic"]: sum(part["records"] for part in each["partitions"]) for each in shown["loads"]
    } == {name: sum(there.values()) for name, there in counts.items()}
    text = klog("load", "status", output).stdout
    assert [line.split()[0] for line in text.splitlines()[1:]] == sorted(counts)


def test_what_is_up_to_date_is_not_opened(
    cluster: EmbeddedCluster, topics: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round asks each broker once for ends, and once for first offsets if there is news, whatever the topics are."""
    servers = cluster.bootstrap_servers
    opened: list[str] = []
    asked: Counter[str] = Counter()
    real_steps, real_request = by_topic.load_steps, Cluster.asking_all

    def steps(options: LoadOptions, *arguments: Any) -> Any:
        opened.extend(options.topics)
        return real_steps(options, *arguments)

    def request(self: Cluster, api: Any, messages: Any) -> Any:
        asked[api.name] += bool(messages)
        return real_request(self, api, messages)

    monkeypatch.setattr(by_topic, "load_steps", steps)
    monkeypatch.setattr(Cluster, "asking_all", request)
    loads = _loads(servers, str(tmp_path / "{topic}"), *topics)
    for expected_topics, requests in ((topics, 2), (topics[:2], 1), ([], 1)):
        opened.clear()
        asked.clear()
        outcomes = loads.round()
        assert opened == expected_topics
        assert asked[LIST_OFFSETS.name] == requests
    assert [outcome.lag for outcome in outcomes] == [0, 0, 0]
    produce(servers, topics[2], values(1))
    opened.clear()
    assert _runs(loads.round()) == {topics[0]: [], topics[1]: [], topics[2]: [1]}
    assert opened == topics[2:]
    produce(servers, topics[0], values(1))
    asked.clear()
    assert _runs(loads.round())[topics[0]] == [2]
    assert asked[LIST_OFFSETS.name] == 2


def test_one_that_fails(cluster: EmbeddedCluster, topics: list[str], tmp_path: Path) -> None:
    """It is named, tried again after a while, and the others go on."""
    servers = cluster.bootstrap_servers
    (tmp_path / topics[0]).mkdir()
    (tmp_path / topics[0] / "others.csv").write_text("x")
    loads = _loads(servers, str(tmp_path / "{topic}"), *topics, f"{topics[0]}.none", every=30.0)
    first, second, _, none = loads.round()
    assert "belongs to another load" in str(first.error)
    assert "does not exist" in str(none.error)
    assert (second.has_failed, second.loaded is not None and second.loaded.runs) == (False, [1])
    (tmp_path / topics[0] / "others.csv").unlink()
    produce(servers, topics[1], values(1, start=20))
    outcomes = loads.round()
    assert (outcomes[0] is first, _runs(outcomes)[topics[1]]) == (True, [2])
    loads._known = {}
    assert _runs(loads.round()) == {topics[0]: [1], topics[1]: [], topics[2]: [], none.topic: None}


def test_topics_of_one_output(cluster: EmbeddedCluster, topics: list[str], tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    outcomes = _loads(servers, str(tmp_path / "{topic[0]}"), *topics[:2]).round()
    for outcome in outcomes:
        assert f"topics {topics[0]} and {topics[1]} would both be loaded into {tmp_path}" in str(outcome.error)
    assert list(tmp_path.iterdir()) == []


def test_a_pattern_of_nothing_and_one_load_of_a_pattern(
    cluster: EmbeddedCluster, topics: list[str], topic: str, tmp_path: Path
) -> None:
    servers = cluster.bootstrap_servers
    with pytest.raises(ConfigError, match=f"--topics-pattern {topic} matches no topic at {servers}"):
        _loads(servers, str(tmp_path / "{topic}"), pattern=topic).round()
    loads = _loads(servers, str(tmp_path / "all"), pattern=rf"{topic}\.[ab]")
    assert _runs(loads.round()) == {"": [1]}
    assert by_duckdb(tmp_path / "all") == sorted(
        expected(topics[0], {0: 10, 1: 10}) + expected(topics[1], {0: 10, 1: 10})
    )


def test_names_that_only_begin_so(cluster: EmbeddedCluster, topics: list[str], topic: str, tmp_path: Path) -> None:
    servers, output = cluster.bootstrap_servers, str(tmp_path / "{topic}")
    with pytest.raises(ConfigError, match=f"whole names have to match, and of {topics[0]} only a part does"):
        _loads(servers, output, pattern=rf"{topic}\.").round()
    [outcome] = _loads(servers, output, f"{topic}.*").round()
    assert "names are taken as they are; --topics-pattern takes a pattern" in str(outcome.error)


@pytest.mark.parametrize("kind", ["folder", "iceberg"])
def test_loads_of_another_address(
    cluster: EmbeddedCluster, topics: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A field stands for the load's own topic, and for nothing else; one that knows no topic yet is there."""
    servers, beginning = cluster.bootstrap_servers, f"{tmp_path}/"
    if kind == "iceberg":
        make_lake("iceberg", tmp_path, monkeypatch)
        beginning = f"iceberg:{CATALOG}.db."
    output, other = f"{beginning}{{topic}}", f"{beginning}{{topic[1]}}x"
    _loads(servers, output, topics[0]).round()
    _loads(servers, other, *topics).round()
    run(servers, f"{beginning}all", *topics)
    assert [*existing(output)] == [output_of(output, topics[0])]
    assert [*existing(other)] == [f"{beginning}{letter}x" for letter in "abc"]
    if kind == "folder":
        assert [*existing(f"{output}/")] == [output_of(output, topics[0])]
        idle = tmp_path / "cx/_klog/idle.json"
        assert "nothing loaded yet" in CliRunner().invoke(klog_load, ["verify", other]).stdout
        idle.unlink()
        assert [*existing(output)] == [output_of(output, topics[0]), str(tmp_path / "cx")]


def test_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_table("delta:~/lake").location == str(tmp_path / "lake")
    assert open_store("~/lake").address == str(tmp_path / "lake")
    assert open_store("lake/~").address.endswith("/lake/~")


def test_a_topic_that_is_deleted_and_created_again(cluster: EmbeddedCluster, topics: list[str], tmp_path: Path) -> None:
    servers, output = cluster.bootstrap_servers, str(tmp_path / "{topic}")
    loads = _loads(servers, output, *topics[:2])
    loads.round()
    delete_topic(servers, topics[0])
    produce(servers, topics[1], values(1, start=20))
    lost, other = loads.round()
    assert ("does not exist" in str(lost.error), other.loaded is not None and other.loaded.runs) == (True, [2])
    create_topic(servers, topics[0], 2)
    produce(servers, topics[0], values(3))
    loads = _loads(servers, output, *topics[:2])
    assert isinstance(loads.round()[0].error, DataLossError)
    again = _loads(servers, output, *topics[:2], fail_on_loss=False)
    assert _runs(again.round()) == {topics[0]: [2], topics[1]: []}
    assert len(by_duckdb(tmp_path / topics[0])) == 23


def test_offsets_of_several_topics(cluster: EmbeddedCluster, topics: list[str], tmp_path: Path) -> None:
    start = AtOffsets("begin.json", {(topics[0], 0): 5, (topics[1], 1): 9})
    loads = _loads(cluster.bootstrap_servers, str(tmp_path / "{topic}"), *topics[:2], start=start)
    loads.round()
    assert len(by_duckdb(tmp_path / topics[0])) == 15
    assert len(by_duckdb(tmp_path / topics[1])) == 11
    with pytest.raises(ConfigError, match=f"begin.json: topic {topics[0]} is not loaded"):
        _loads(cluster.bootstrap_servers, str(tmp_path / "{topic}"), topics[1], start=start).round()


def test_the_list_has_one_that_is_damaged(cluster: EmbeddedCluster, topics: list[str], tmp_path: Path) -> None:
    output = str(tmp_path / "{topic}")
    _loads(cluster.bootstrap_servers, output, *topics[:2]).round()
    (tmp_path / topics[0] / "_klog/latest.json").write_text("[]")
    shown = klog("load", "status", output)
    assert (shown.returncode, topics[1] in shown.stdout) == (1, True)
    assert shown.stdout.count(str(tmp_path / topics[0])) == 1
    assert f"can't be shown: {tmp_path / topics[0]}/_klog/latest.json is not a JSON object" in shown.stdout
    damaged, other = json.loads(klog("load", "status", output, "--json").stdout)["loads"]
    assert ("is not a JSON object" in damaged["error"], other["missing"]) == (True, [])


def _asked(*arguments: str, code: int) -> Any:
    """What `klog load` prints on stdout: JSON, or its lines."""
    done = CliRunner().invoke(klog_load, arguments)
    assert done.exit_code == code, (done.output, done.exception)
    return json.loads(done.stdout) if "--json" in arguments or arguments[0] == "offsets" else done.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status", "/lake/{tpoic}"], "/lake/{tpoic}: write {topic}, or {topic[0]}"),
        (["status", "/lake/{topics}"], "/lake/{topics}: write {topic}, or {topic[0]}"),
        (["verify", "s3://KEY:SECRET@lake/{Topic}"], "s3://***@lake/{Topic}: write {topic}, or {topic[0]}"),
        (["status", ""], "the output is empty"),
        (["status", "s4://lake"], "'s4://lake' names no directory"),
        (["files", "s4://lake/{topic}"], "names no directory"),
        (["compact", "delta:"], "give delta:FOLDER or delta:URI"),
        (["files", "iceberg:lake.{topic}"], "must be iceberg:CATALOG.NAMESPACE.TABLE"),
        (["expire", "/lake/{topic}"], "'/lake/{topic}' is not the address of a table"),
        (["offsets", "/lake/clicks", "--run", "last"], "--run last is not a run"),
    ],
)
def test_wrong_outputs(arguments: list[str], words: str) -> None:
    found = CliRunner().invoke(main, ["load", *arguments])
    assert (found.exit_code, words in found.stderr, "SECRET" in found.stderr) == (2, True, False), found.stderr


@pytest.mark.parametrize("kind", ["folder", "delta"])
def test_commands_go_over_all_loads(cluster: EmbeddedCluster, topics: list[str], tmp_path: Path, kind: str) -> None:
    servers, begin = cluster.bootstrap_servers, tmp_path / "begin.json"
    output = f"{'delta:' if kind == 'delta' else ''}{tmp_path}/{{topic}}"
    places = [output_of(output, name) for name in topics[:2]]
    for _ in range(2):
        _loads(servers, output, *topics[:2], max_task_records=4).round()
        produce(servers, topics[0], values(8, start=20, partitions=2))
    paths_of = [each.path for place in places for each in files(place)]
    assert _asked("files", output, code=0) == paths_of
    assert _asked("files", output, "--topic", topics[1], code=0) == [each.path for each in files(places[1])]

    text = _asked("verify", output, code=0)
    assert text == [
        line
        for place, records in zip(places, (28, 20), strict=True)
        for line in (f"{place}: {records} records of 2 partitions", "  all records are there once")
    ]
    told = _asked("verify", output, "-b", servers, "--hash", "--json", code=0)["loads"]
    assert [(each["output"], each["partitions"][0]["compared"]) for each in told] == [(places[0], 14), (places[1], 10)]

    offsets = _asked("offsets", output, code=0)
    assert offsets["offsets"] == {topics[0]: {"0": 14, "1": 14}, topics[1]: {"0": 10, "1": 10}}
    begin.write_text(json.dumps(offsets))
    again = _loads(servers, f"{tmp_path}/again/{{topic}}", *topics[:2], start=read_offsets("--from-offsets", begin))
    assert _runs(again.round()) == {topics[0]: [1], topics[1]: []}
    assert "--run is a run of one load" in CliRunner().invoke(klog_load, ["offsets", output, "--run", "1"]).stderr

    before = _asked("compact", output, "--json", code=0)["loads"]
    assert [(each["output"], each["files_before"] > 2) for each in before] == [(place, True) for place in places]
    assert _asked("compact", output, code=0) == [f"{place}: there is nothing to compact" for place in places]

    Path(files(places[0])[0].path).unlink()
    (tmp_path / topics[1] / "_klog/latest.json").write_text("[]")
    wrong, damaged = _asked("verify", output, "--json", code=1)["loads"]
    assert (wrong["findings"] != [], "is not a JSON object" in damaged["error"]) == (True, True)
    assert _asked("files", output, code=1) == [each.path for each in files(places[0])]
    assert [*_asked("offsets", output, code=1)["offsets"]] == topics[:1]
    told = CliRunner().invoke(klog_load, ["files", output]).stderr
    assert told.startswith(f"klog: {tmp_path}/{topics[1]}/_klog/latest.json is not a JSON object")


@pytest.mark.parametrize("kind", ["iceberg"])
def test_one_table_of_a_catalog_is_damaged(
    cluster: EmbeddedCluster, topics: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """It is named, and the others are looked at."""
    make_lake(kind, tmp_path, monkeypatch)
    output = f"iceberg:{CATALOG}.db.{{topic}}"
    _loads(cluster.bootstrap_servers, output, *topics[:2]).round()
    places = [output_of(output, name) for name in topics[:2]]
    folder = Path(open_table(places[0]).location.removeprefix("file://"))
    for path in folder.glob("metadata/*.metadata.json"):
        path.write_text("{}")
    assert "pyiceberg.io" not in klog("load", "status", output).stderr
    damaged, other = _asked("verify", output, "--json", code=1)["loads"]
    assert (damaged["output"], other["output"]) == tuple(places)
    assert ("error" in damaged, other["findings"]) == (True, [])
    assert _asked("files", output, code=1) == [each.path for each in files(places[1])]


@pytest.mark.parametrize("kind", ["iceberg"])
def test_nothing_is_done_with_a_table_that_may_be_of_others(
    cluster: EmbeddedCluster, topics: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """It can't be read when its owner is looked up, and could be a moment later."""
    lake = make_lake(kind, tmp_path, monkeypatch)
    output = f"iceberg:{CATALOG}.db.{{topic}}"
    _loads(cluster.bootstrap_servers, output, *topics[:1]).round()
    [place] = existing(output)
    lake.catalog.create_table("db.theirs", pa.schema([pa.field("a", pa.int64())]))
    assert [*existing(output)] == [place]
    known = type(open_table(place))
    real = known.load_id

    def load_id(self: Any) -> str | None:
        if self.address.endswith("theirs"):
            raise LoadError("the catalog is busy")
        return real(self)

    monkeypatch.setattr(known, "load_id", load_id)
    worked: list[str] = []
    done = dict(by_topic.of_each(output, lambda each: worked.append(each) or "done"))
    assert worked == [place]
    assert done == {place: "done", output_of(output, "theirs"): "the catalog is busy"}


def test_a_cluster_that_does_not_answer_is_asked_once(
    cluster: EmbeddedCluster, topics: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _loads(cluster.bootstrap_servers, str(tmp_path / "{topic}"), *topics[:2]).round()
    asked: list[Any] = []

    def connect(settings: Any) -> Any:
        asked.append(settings)
        raise ConnectionFailed("no broker answers")

    monkeypatch.setattr(Cluster, "connect", connect)
    done = CliRunner().invoke(main, ["load", "verify", str(tmp_path / "{topic}"), "-b", "nowhere:9092"])
    assert (done.exit_code, len(asked), done.stderr) == (1, 1, "klog: no broker answers\n")


def test_dead_letters_of_all_loads(cluster: EmbeddedCluster, topics: list[str], topic: str, tmp_path: Path) -> None:
    servers, output, again = cluster.bootstrap_servers, str(tmp_path / "{topic}"), f"{topic}-again"
    settings = WriteSettings(schema="id bigint")
    produce(servers, topics[2], [Sent(b'{"id": 1}', b"k")])
    _loads(servers, output, *topics, settings=settings, max_bad=MaxBad(100, is_percent=True)).round()
    create_topic(servers, again)
    told = _asked("replay", output, "--topic", again, "-b", servers, "--json", code=0)["loads"]
    assert [(each["output"], each["records"]) for each in told] == [
        (output_of(output, name), records) for name, records in zip(topics, (20, 20, 0), strict=True)
    ]
    assert len(consume(servers, again)) == 40
    assert _asked("replay", output, "--topic", again, "--from-topic", "other", "-b", servers, code=3) == [
        f"{output_of(output, name)}: sent 0 records to {again}; 0 corrupt batches can't be sent" for name in topics
    ]


# Driving


def _steps(folder: Path, name: str, fails: bool = False) -> Iterator[Any]:
    with locked(open_store(str(folder / name))):
        yield None
        if fails:
            raise LoadError(name)
        job: Any = SimpleNamespace(run=1)
        try:
            yield Work({}, job, open_store(str(folder / name)), 1, lambda: 0)
        except LoadError as error:
            return f"{name} failed: {error}"
    return name


def test_loads_side_by_side(tmp_path: Path) -> None:
    class Runner(InProcess):
        def run_all(self, works: Sequence[Work]) -> list[Exception | None]:
            return [LoadError("lost") if work.store.address.endswith("bad") else None for work in works]

    names = [f"{number}" for number in range(100)] + ["bad"]
    steps: list[Any] = [_steps(tmp_path, name, name == "7") for name in names]
    ended = drive(steps, Runner(), TimeLimit(None), lambda _total, _done: nullcontext())
    assert (str(ended[7]), ended[-1]) == ("7", "bad failed: lost")
    assert [*ended[:7], *ended[8:-1]] == [*names[:7], *names[8:-1]]


def test_loads_that_plan_while_others_load(tmp_path: Path) -> None:
    """The first job of Spark ends when all other loads have come to their tasks."""
    waiting = [*range(20)]

    def steps(number: int) -> Iterator[Any]:
        if number >= 16:  # enough for a job
            assert is_loading.wait(_SECONDS)
        yield None
        waiting.remove(number)
        yield Work({0: []}, job, open_store(str(tmp_path)), 1, lambda: 0)

    class Runner(InProcess):
        def run_all(self, works: Sequence[Work]) -> list[Exception | None]:
            is_loading.set()
            end = time.monotonic() + _SECONDS
            while waiting and time.monotonic() < end:
                time.sleep(0.01)
            left.append(len(waiting))
            return [None for _ in works]

    left: list[int] = []
    is_loading, job = threading.Event(), cast("Any", SimpleNamespace(run=1))
    drive([steps(number) for number in range(20)], Runner(), TimeLimit(None), lambda _total, _done: nullcontext())
    assert left[0] == 0


def test_a_signal_begins_no_more_loads(tmp_path: Path) -> None:
    """Those that have begun come to their ends."""
    steps: list[Any] = [_steps(tmp_path, f"{number}") for number in range(100)]
    asked: list[int] = []

    def is_stopping() -> bool:
        asked.append(1)
        return len(asked) > 10

    ended = drive(steps, InProcess(), TimeLimit(None), lambda _total, _done: nullcontext(), is_stopping)
    assert ended == [f"{number}" for number in range(len(ended))]
    assert 1 <= len(ended) <= 11
    assert sorted(path.name for path in tmp_path.iterdir()) == []


def test_an_interrupt_lets_all_locks_go(tmp_path: Path) -> None:
    class Runner(InProcess):
        def run_all(self, works: Sequence[Work]) -> list[Exception | None]:
            raise KeyboardInterrupt

    steps: list[Any] = [_steps(tmp_path, f"{number}") for number in range(10)]
    with pytest.raises(KeyboardInterrupt):
        drive(steps, Runner(), TimeLimit(None), lambda _total, _done: nullcontext())
    for number in range(10):
        with locked(open_store(str(tmp_path / f"{number}"))):
            pass


def test_the_time_of_the_others_if_a_folder_is_lost(tmp_path: Path) -> None:
    bad, good = (open_store(str(tmp_path / name)) for name in ("bad", "good"))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/_klog").write_text("no folder")
    limit, end = TimeLimit(0.05), time.monotonic() + _SECONDS
    with limit.watched([(bad, 1), (good, 1)]):
        task_time = TaskTime(good, 1, is_limited=True)
        while not task_time.is_over():
            assert time.monotonic() < end
            time.sleep(0.05)
    assert limit.is_over
    assert good.names(paths.in_run(1, "")) == []


def test_topics_without_leaders_wait_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are loaded before, and after the first round nobody waits."""
    real, waited = by_topic.list_offsets, []

    def wait(asked: Cluster, times: Any) -> Any:
        waited.append({topic for topic, _ in times})
        assert (tmp_path / "t0/_klog/latest.json").exists()
        return real(asked, times)

    def driven(steps: Any, runner: Any, limit: TimeLimit, *others: Any) -> Any:
        limits.append(limit)
        return drive(steps, runner, limit, *others)

    limits: list[TimeLimit] = []
    monkeypatch.setattr(by_topic, "drive", driven)
    monkeypatch.setattr(by_topic, "list_offsets", wait)
    names = [f"t{number}" for number in range(6)]
    with EmbeddedCluster(2) as cluster:
        servers = cluster.bootstrap_servers
        for name in names:
            create_topic(servers, name)
            produce(servers, name, values(10))
        with Admin({"bootstrap.servers": servers}) as admin:
            leaders = {name: admin.describe_topic(name).partitions[0].leader for name in names}
        dead = {name for name in names if leaders[name] != leaders["t0"]}
        assert len(dead) > 1
        cluster.kill(leaders[min(dead)])
        loads = _loads(servers, str(tmp_path / "{topic}"), *names)
        loads._asked.client["request.timeout.ms"] = "3000"
        for failures in (1, 2):
            outcomes = loads.round()
            assert {outcome.topic for outcome in outcomes if outcome.error} == dead
            assert {outcome.failures for outcome in outcomes if outcome.error} == {failures}
        assert waited == [dead]
        assert limits[0] is limits[1] is not limits[-1]  # --max-time is that of a round
        assert status(str(tmp_path / "t0")).findings == []


def test_a_session_that_does_not_begin(cluster: EmbeddedCluster, topics: list[str], tmp_path: Path) -> None:
    class Runner(_Shared):
        def cores(self) -> int:
            raise LoadError("no Java")

    loads = _loads(cluster.bootstrap_servers, str(tmp_path / "{topic}"), *topics)
    loads._runner = Runner()
    assert [str(outcome.error) for outcome in loads.round()] == ["no Java", "no Java", "None"]


# Metrics and the command


def test_metrics_have_the_topic() -> None:
    metrics = follow.LoadMetrics(by_topic=True)
    failed = Outcome("b", "out/b", None, LoadError("x"), 2)
    metrics.add(follow.RunReport(1000.0, 1.0, [failed], None, 0))
    metrics.add(follow.RunReport(1000.0, 1.0, [failed], None, 0))  # not tried again
    idle = Outcome("a", "out/a", Loaded([], [], 0, 0, 0, 0))
    metrics.add(follow.RunReport(1000.0, 1.0, [idle], None, 0))
    metrics.add(follow.RunReport(1000.0, 1.0, [idle], None, 0))  # not opened
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families("".join(metrics.page()))
        for sample in family.samples
    }
    assert found["klog_load_runs_total", "b", "failed"] == 1
    assert found["klog_load_runs_total", "b", "nothing_new"] == 0
    assert found["klog_load_runs_total", "a", "nothing_new"] == 2
    assert found["klog_load_failures_in_a_row", "b"] == 2
    assert found["klog_load_last_committed_run", "b"] == 0
    assert ("klog_load_freshness_seconds", "b") in found


class _Runner(_Shared):
    """In place of Spark's runner."""

    def __init__(self, _: object) -> None:
        super().__init__()

    def stop(self) -> None:
        """Nothing is left to do."""


def test_the_command(
    cluster: EmbeddedCluster, topics: list[str], topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = cluster.bootstrap_servers
    monkeypatch.setattr(batch_load, "SparkRunner", _Runner)
    (tmp_path / topics[1]).mkdir()
    (tmp_path / topics[1] / "others.csv").write_text("x")
    arguments = ["-b", servers, "--topics-pattern", rf"{topic}\..*", "--output", str(tmp_path / "{topic}")]
    failed = CliRunner().invoke(batch_load.main, [*arguments, "--json"])
    assert failed.exit_code == 1
    line = json.loads(failed.stdout)
    assert line["nothing_new"] == 1
    assert [(each["topic"], each.get("runs"), "error" in each) for each in line["loads"]] == [
        (topics[0], ["00000001"], False),
        (topics[1], None, True),
    ]
    assert f"batch_load: {topics[1]}: " in failed.stderr
    alone = ["-b", servers, "--topics", topics[1], "--output", str(tmp_path / "{topic}")]
    assert CliRunner().invoke(batch_load.main, alone).stdout == "0 of 1 topics are loaded\n"
    (tmp_path / topics[1] / "others.csv").unlink()
    done = CliRunner().invoke(batch_load.main, arguments)
    assert (done.exit_code, "2 of 3 topics have nothing new" in done.stdout) == (0, True), done.output
    assert CliRunner().invoke(batch_load.main, arguments).exit_code == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--output", "o"], "give either --topics or --topics-pattern"),
        (["--topics", "t", "--topics-pattern", "t", "--output", "o"], "give either --topics or --topics-pattern"),
        (["--topics-pattern", "(", "--output", "o"], "is not a regular expression"),
        (["--topics", "t", "--output", "o/{topics}"], "write {topic}, or {topic[0]}"),
        (["--topics", "t", "--output", "o/{Topic}"], "write {topic}, or {topic[0]}"),
        (["--topics-pattern", "t.*", "--table", "delta:/x/{tpoic}"], "delta:/x/{tpoic}: write {topic}, or {topic[0]}"),
        (["--topics-pattern", "t.*", "--output", "/x/{ topic }"], "/x/{ topic }: write {topic}, or {topic[0]}"),
        (["--topics", "t", "--table", "iceberg:lake.shop.{tpoic}"], "write {topic}, or {topic[0]}"),
        (["--topics", "t", "--output", "{{topic}}"], "{{topic}}: write {topic}, or {topic[0]}"),
        (
            ["--topics", "t", "--table", "delta:/x/{topic}", "--dead-letters", "delta:/y/{tpoic}"],
            "delta:/y/{tpoic}: write {topic}, or {topic[0]}",
        ),
        (["--topics", "t", "--table", "iceberg:a.b.c", "--partition-by", "bucket(4)"], "write bucket(4, COLUMN)"),
        (["--topics", "t", "--output", "o/{topic}", "--from-run", "1"], "each topic has runs of its own"),
        (["--topics-pattern", "t", "--table", "delta:o", "--upsert-key", "key"], "write {topic} into --table"),
        (
            ["--topics", "t", "--output", "o/{topic}", "--format", "orc", "--checkpoint", "c"],
            "an output by topic is for",
        ),
    ],
)
def test_wrong_arguments(options: list[str], words: str) -> None:
    found = CliRunner().invoke(batch_load.main, ["-b", "127.0.0.1:1", *options])
    assert (found.exit_code, words in found.stderr) == (2, True), found.stderr


# Kills


def dying(at: int, servers: str, output: str, *names: str) -> None:
    """A round of loads whose process dies at change `at`."""
    with failing(LocalFolder, at, lambda: os._exit(_DIED)):
        _loads(servers, output, *names, max_task_records=4).round()


_OTHERS = [pytest.param(kind, marks=pytest.mark.test_all("kill")) for kind in ("delta", "iceberg")]


@pytest.mark.parametrize("kind", ["folder", *_OTHERS])
def test_kills(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads of several outputs are killed at some change to one of them, again and again; each row is there once."""
    servers, count = cluster.bootstrap_servers, 5
    names = [f"{topic}.{number}" for number in range(count)]
    for name in names:
        create_topic(servers, name)
    lake = make_lake("iceberg", tmp_path, monkeypatch)
    output = f"{'delta:' if kind == 'delta' else ''}{tmp_path}/out/{{topic}}"
    if kind == "iceberg":
        output = f"iceberg:{CATALOG}.db.t{{topic[-1]}}"
    chance = random.Random(58)
    sent: Counter[str] = Counter()

    def rows(name: str) -> list[tuple[str, int, int]]:
        folder = tmp_path / "out" / name
        if kind == "folder":
            return by_duckdb(folder)
        if kind == "delta":
            return _delta(folder) if DeltaTable.is_deltatable(str(folder)) else []
        identifier = f"db.t{name.rpartition('.')[2]}"
        if not lake.catalog.table_exists(identifier):
            return []
        return places(lake.catalog.load_table(identifier).scan().to_arrow())

    died = 0
    for _ in range(kills() or 6):
        for name in chance.sample(names, 3):
            produce(servers, name, values(10, start=sent[name]))
            sent[name] += 10
        at = chance.randrange(1, 100)
        if kind == "folder":
            code = in_child(lambda at=at: dying(at, servers, output, *names))
        else:  # deltalake's threads do not survive a fork
            command = [sys.executable, "-m", "tests.load.test_by_topic", str(at), servers, output, *names]
            code = subprocess.run(command, check=False, timeout=_SECONDS).returncode
        assert code in (0, _DIED)
        died += code == _DIED
        for name in names:
            seen = rows(name)
            assert seen == expected(name, {0: len(seen)} if seen else {})
            assert len(seen) <= sent[name]
    assert died
    outcomes = _loads(servers, output, *names).round()
    assert [str(outcome.error) for outcome in outcomes if outcome.error] == []
    for name in names:
        assert rows(name) == expected(name, {0: sent[name]} if sent[name] else {})
        assert status(output_of(output, name)).findings == []


def test_one_is_killed_and_another_call_goes_on(cluster: EmbeddedCluster, topics: list[str], tmp_path: Path) -> None:
    """What one call was killed in, a load of the topic alone finishes: they are the same load."""
    servers, output = cluster.bootstrap_servers, str(tmp_path / "{topic}")
    with pytest.raises(Killed), _dying(servers, output, topics):
        pass
    loaded = run(servers, output_of(output, topics[0]), topics[0])
    assert sum(part.records for part in loaded.partitions) == 20
    assert _runs(_loads(servers, output, *topics).round())[topics[1]] == [1]


@contextmanager
def _dying(servers: str, output: str, topics: list[str]) -> Iterator[None]:
    class Runner(_Shared):
        def run_all(self, works: Sequence[Work]) -> list[Exception | None]:
            super().run_all(works)
            raise Killed

    loads = _loads(servers, output, *topics)
    loads._runner = Runner()
    loads.round()
    yield


def test_a_limit_of_time_is_that_of_the_call(cluster: EmbeddedCluster, topics: list[str], tmp_path: Path) -> None:
    loads = _loads(cluster.bootstrap_servers, str(tmp_path / "{topic}"), *topics, max_seconds=1000.0)
    assert _runs(loads.round()) == {topics[0]: [1], topics[1]: [1], topics[2]: []}
    assert (
        load(
            LoadOptions({"bootstrap.servers": cluster.bootstrap_servers}, [topics[0]], str(tmp_path / topics[0])),
            InProcess(),
        ).runs
        == []
    )


def test_upserts(cluster: EmbeddedCluster, topics: list[str], tmp_path: Path) -> None:
    """Changes of several topics have no order; each of them has a table of its own here."""
    servers = cluster.bootstrap_servers
    for name in topics:
        produce(servers, name, [Sent(b"v", b"%d" % (number % 3)) for number in range(9)])
    loads = _loads(servers, f"delta:{tmp_path}/{{topic}}", topics[2], settings=WriteSettings(upsert_key="key"))
    assert _runs(loads.round()) == {topics[2]: [1]}
    assert DeltaTable(str(tmp_path / topics[2])).to_pyarrow_table().num_rows == 3


if __name__ == "__main__":
    dying(int(sys.argv[1]), *sys.argv[2:])
