"""`--dead-letters`: a table has each letter of committed runs once, wherever a call is killed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from spark_klog.cli.jobs.batch_load import main as batch_load
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import LoadError
from spark_klog.files.folder import LocalFolder
from spark_klog.load.by_topic import Loads, Outcome, example_of, existing
from spark_klog.load.journal import paths
from spark_klog.load.run import LoadOptions, MaxBad
from spark_klog.load.settings import VALUES, WriteSettings
from spark_klog.load.upkeep import Upkeep
from spark_klog.tables.opening import open_table
from spark_klog.tables.upkeep import Kept
from tests.load.support import InProcess, Killed, die, failing, run
from tests.load.test_upserts import FORMATS, address_of, content, environment
from tests.spark.support import Sent, create_topic, produce
from tests.support.runs.soak import SOAK

__all__ = ["environment"]
_SETTINGS = WriteSettings(schema="id bigint")


def _letters_of(kind: str, folder: Path) -> str:
    return f"delta:{folder / 'letters'}" if kind == "delta" else "iceberg:local.space.letters"


def _rows(address: str) -> list[dict[str, Any]]:
    table = content(address)
    return table.sort_by([("run", "ascending"), ("offset", "ascending")]).to_pylist()


def _load(servers: str, output: Path | str, topic: str, letters: str, **options: Any) -> Any:
    options = {"settings": _SETTINGS, "max_bad": MaxBad(9), "max_task_records": 2} | options
    return run(servers, output, topic, dead_letters=letters, **options)


@pytest.mark.parametrize("kind", FORMATS)
def test_letters(cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str) -> None:
    """Values, corrupt batches; runs without any make no commit, and a load that is given the option later has all."""
    servers, letters, output = cluster.bootstrap_servers, _letters_of(kind, tmp_path), tmp_path / "out"
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b'{"id": 1}'), Sent(b"bad", b"k", headers=(("h", b"x"), ("n", None))), Sent(b"[]")])
    run(servers, output, topic, settings=_SETTINGS, max_bad=MaxBad(9))
    produce(servers, topic, [Sent(b'{"id": 2}')])
    _load(servers, output, topic, letters)
    first, second = _rows(letters)
    assert (first["topic"], first["partition"], first["offset"], first["run"]) == (topic, 0, 1, 1)
    assert (first["key"], first["value"], first["batch"]) == (b"k", b"bad", None)
    assert [(header["key"], header["value"]) for header in first["headers"]] == [("h", b"x"), ("n", None)]
    assert "no JSON" in first["reason"]
    assert first["timestamp"].year > 2020
    assert second["offset"] == 2
    assert (second["key"], second["headers"]) == (None, [])

    produce(servers, topic, [Sent(b'{"id": "x"}'), Sent(b'{"id": 3}')])
    _load(servers, output, topic, letters)
    _load(servers, output, topic, letters)
    assert [(row["run"], row["offset"]) for row in _rows(letters)] == [(1, 1), (1, 2), (3, 4)]
    # a letter's file that somebody has removed
    produce(servers, topic, [Sent(b'{"id": "y"}')])
    run(servers, output, topic, settings=_SETTINGS, max_bad=MaxBad(9))
    for path in (output / paths.LETTERS).iterdir():
        path.unlink()
    _load(servers, output, topic, letters)
    assert len(_rows(letters)) == 3
    with pytest.raises(LoadError, match=r"--dead-letters .* belongs to another load"):
        _load(servers, tmp_path / "other", topic, letters)
    assert not list((tmp_path / "other").glob("**/*.parquet"))
    with pytest.raises(LoadError, match="has the dead letters of another load"):
        run(servers, letters, topic)
    if kind == "iceberg":
        assert existing("iceberg:local.space.{topic}") == {}


@pytest.mark.parametrize("kind", FORMATS)
def test_the_upkeep_of_letters(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str
) -> None:
    servers, letters, output = cluster.bootstrap_servers, _letters_of(kind, tmp_path), tmp_path / "out"
    create_topic(servers, topic)
    upkeep, merged = Upkeep(0.0, Kept(0.001)), []
    for number in range(3):
        produce(servers, topic, [Sent(b"bad") for _ in range(number)])
        outcome = Outcome(topic, str(output), _load(servers, output, topic, letters), letters=letters)
        done = upkeep.after([outcome], lambda: False)
        assert done is not None
        assert [each.error for each in done.outputs] == [None] * len(done.outputs)
        merged.append({each.output: each.merged for each in done.outputs}.get(letters))
    assert merged == [0, 0, 2]
    assert [(row["run"], row["offset"]) for row in _rows(letters)] == [(1, 0), (2, 1), (2, 2)]


def test_letters_by_topic(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """A topic whose letters have no table of their own is refused, and the others are loaded."""
    servers, topics = cluster.bootstrap_servers, [f"{topic}.a", f"{topic}.a_dlq", topic, f"{topic}.b"]
    for name in topics:
        create_topic(servers, name)
        produce(servers, name, [Sent(b"bad")])
    output = f"delta:{tmp_path}/{{topic}}"
    asked = LoadOptions({"bootstrap.servers": servers}, topics[:1], example_of(output), _SETTINGS, max_bad=MaxBad(9))
    letters = f"delta:{tmp_path}/{topic}.{{topic[1]}}_dlq"
    runner: Any = InProcess()
    loads = Loads(asked, topics, None, output, runner, lambda *_: nullcontext(), letters=letters)
    *clash, short, good = loads.round()
    for outcome in clash:
        assert f"topics {topics[0]} and {topics[1]} would share delta:{tmp_path}/{topics[1]}" in str(outcome.error)
    assert f"topic {topic} has no part for {{topic[1]}}" in str(short.error)
    assert good.error is None
    assert [row["value"] for row in _rows(f"delta:{tmp_path}/{topic}.b_dlq")] == [b"bad"]


@pytest.mark.parametrize(
    "kind", ["files", *(pytest.param(kind, marks=pytest.mark.test_all("kill")) for kind in FORMATS)]
)
def test_kills(cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str) -> None:
    """Each record is in the output or among the letters, once."""
    servers, letters = cluster.bootstrap_servers, _letters_of("delta" if kind == "files" else kind, tmp_path)
    output = str(tmp_path / "out") if kind == "files" else address_of(kind, tmp_path)
    settings = _SETTINGS if kind == "files" else WriteSettings(schema="id bigint", table_columns=VALUES)
    create_topic(servers, topic)
    count, at = 0, 1
    while at < 100:
        produce(servers, topic, [Sent(b'{"id": %d}' % count), Sent(b"bad"), Sent(b"[]")])
        count += 3
        try:
            with failing(LocalFolder, at, die):
                _load(servers, output, topic, letters, settings=settings)
            break
        except Killed:
            _load(servers, output, topic, letters, settings=settings)
        at += 1 if SOAK else 5
    assert at < 100
    found = _rows(letters)
    assert sorted(row["offset"] for row in found) == [offset for offset in range(count) if offset % 3]
    # a call that is killed after the run's own commit leaves them to the next one
    produce(servers, topic, [Sent(b"last")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spark_klog.load.letter_table.LetterTable._add", lambda *_: die())
        with pytest.raises(Killed):
            _load(servers, output, topic, letters, settings=settings)
    _load(servers, output, topic, letters, settings=settings)
    assert [row["value"] for row in _rows(letters)][-1] == b"last"


@pytest.mark.parametrize("kind", FORMATS)
def test_a_lost_answer_before_another_call(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit was made, and another one has come after it: the letters stay."""
    servers, letters = cluster.bootstrap_servers, _letters_of(kind, tmp_path)
    table = type(open_table(letters))
    append: Any = table.append

    def lost(self: Any, files: Any, asked: Any) -> None:
        append(self, files, asked)
        append(self, [], replace(asked, number=2, token="other", before=1))
        append(self, files, asked)

    monkeypatch.setattr(table, "append", lost)
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b"bad")])
    _load(servers, tmp_path / "out", topic, letters)
    assert [row["value"] for row in _rows(letters)] == [b"bad"]


def test_large_letters(cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many are in memory as have so many bytes."""
    monkeypatch.setattr("spark_klog.load.journal.letters._BYTES", 1000)
    servers, letters = cluster.bootstrap_servers, _letters_of("delta", tmp_path)
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b"x" * 600) for _ in range(5)])
    _load(servers, tmp_path / "out", topic, letters)
    assert [row["offset"] for row in _rows(letters)] == list(range(5))
    [file] = (tmp_path / "letters").glob("*.parquet")
    assert pq.read_metadata(file).num_row_groups == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--output", "o", "--dead-letters", "/folder"], "--dead-letters is the address of a table"),
        (["--output", "/o/{topic}", "--dead-letters", "topic:l"], "--dead-letters has {topic} in it if --output"),
        (["--output", "o", "--dead-letters", "delta:/l/{topic}"], "--dead-letters has {topic} in it if --output"),
        (["--output", "/o/{topic}", "--dead-letters", "delta:/l"], "--dead-letters has {topic} in it if --output"),
        (["--table", "delta:/l", "--dead-letters", "delta:/l"], "--dead-letters is the table of the records"),
        (["--table", "delta:/l", "--dead-letters", "delta:/l/"], "are in one folder"),
        (["--table", "delta:/l", "--dead-letters", "delta:file:///l/x"], "are one within the other"),
        (["--output", "/l", "--dead-letters", "delta:/l/x"], "are one within the other"),
        (["--output", "/l/x", "--dead-letters", "delta:/l"], "are one within the other"),
        (["--output", "/l/{topic}", "--dead-letters", "delta:/l/{topic}/x"], "are one within the other"),
        (["--output", "/l/{topic}", "--dead-letters", "delta:/d/{topics}"], "write {topic}"),
    ],
)
def test_wrong_arguments(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        batch_load(["-b", "127.0.0.1:1", "--topics", "t", *options])
    assert words in capsys.readouterr().err
