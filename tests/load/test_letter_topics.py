"""`--dead-letters topic:NAME`: a topic has each letter of committed runs once, wherever a call is killed."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from spark_klog.client import Admin, Producer
from spark_klog.client.dead_letters import CORRUPT_BATCH
from spark_klog.client.letter_topics import Letter, LetterTopic
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, LoadError, ProtocolError
from spark_klog.load import letter_topic
from spark_klog.load.by_topic import Loads
from spark_klog.load.journal import paths
from spark_klog.load.journal.history import read_identity
from spark_klog.load.journal.letters import StoredLetter
from spark_klog.load.journal.store import open_store
from spark_klog.load.run import LoadOptions, MaxBad
from spark_klog.load.settings import WriteSettings
from spark_klog.load.upkeep import Upkeep
from spark_klog.tables.upkeep import Kept
from tests.load.support import InProcess, Killed, run
from tests.spark.support import Sent, create_topic, produce

_HEADERS = (("traceparent", b"\xff"), ("none", None))


def _load(servers: str, output: Path, topic: str, letters: str = "", **options: Any) -> Any:
    options = {"settings": WriteSettings(schema="id bigint"), "max_bad": MaxBad(9)} | options
    return run(servers, output, topic, dead_letters=letters and f"topic:{letters}", **options)


def _letters(servers: str, topic: str) -> list[Letter]:
    return sorted(LetterTopic({"bootstrap.servers": servers}, topic).letters(), key=lambda each: each.record.offset)


@pytest.fixture
def letters(cluster: EmbeddedCluster, topic: str) -> str:
    for name in (topic, f"{topic}-dlq"):
        create_topic(cluster.bootstrap_servers, name)
    return f"{topic}-dlq"


def test_letters(cluster: EmbeddedCluster, topic: str, letters: str, tmp_path: Path) -> None:
    servers, output = cluster.bootstrap_servers, tmp_path / "out"
    produce(servers, topic, [Sent(b'{"id": 1}'), Sent(b"bad", b"k", headers=_HEADERS), Sent(b"[]")])
    _load(servers, output, topic)
    produce(servers, topic, [Sent(b'{"id": 2}')])
    _load(servers, output, topic, letters)  # with those of the run before
    _load(servers, output, topic, letters)
    first, second = _letters(servers, letters)
    assert first.said is not None
    assert second.said is not None
    assert (first.record.key, first.record.value, first.own) == (b"k", b"bad", _HEADERS)
    assert (first.said.topic, first.said.partition, first.said.offset) == (topic, 0, 1)
    assert "no JSON" in first.said.reason
    assert first.said.stage == "VALUE_CONVERTER"
    assert second.said.offset == 2
    assert LetterTopic({"bootstrap.servers": servers}, letters).replay() == (2, 0)
    _load(servers, output, topic, letters)
    assert [each.said.offset for each in _letters(servers, letters) if each.said] == [1, 2, 4, 5]
    with pytest.raises(ProtocolError, match=f"{letters}-x"):
        _load(servers, tmp_path / "other", topic, f"{letters}-x")
    with pytest.raises(ConfigError, match="a/b"):
        _load(servers, tmp_path / "other", topic, "a/b")


def test_files_whose_letters_are_in_the_topic(
    cluster: EmbeddedCluster, topic: str, letters: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are not looked at again: people remove them, and nothing is said of that."""
    servers, output = cluster.bootstrap_servers, tmp_path / "out"
    for count in (1, 2):
        produce(servers, topic, [Sent(b"bad")])
        _load(servers, output, topic, letters)
        assert len(_letters(servers, letters)) == count
    first, last = sorted((output / paths.LETTERS).iterdir())
    first.write_text("damaged")
    last.unlink()
    _load(servers, output, topic, letters)
    first.unlink()
    _load(servers, output, topic, letters)
    assert "is not there" not in caplog.text
    produce(servers, topic, [Sent(b"bad")])
    _load(servers, output, topic)
    [path] = (output / paths.LETTERS).iterdir()
    path.unlink()
    _load(servers, output, topic, letters)
    assert f"{path.name} is not there, and its letters are left out" in caplog.text
    assert len(_letters(servers, letters)) == 2


def test_brokers_forget_the_progress(cluster: EmbeddedCluster, topic: str, letters: str, tmp_path: Path) -> None:
    """A week after the last letter, by default. A topic that is created again gets the letters again."""
    servers, output = cluster.bootstrap_servers, tmp_path / "out"
    produce(servers, topic, [Sent(b"bad"), Sent(b"[]")])
    _load(servers, output, topic, letters)
    with Admin({"bootstrap.servers": servers}) as admin:
        identity = read_identity(open_store(str(output)))
        assert identity is not None
        group = f"{letter_topic.GROUP}{identity.load}"
        admin.delete_group(group)
        _load(servers, output, topic, letters)
        produce(servers, topic, [Sent(b"bad")])
        _load(servers, output, topic, letters)
        assert [each.said.offset for each in _letters(servers, letters) if each.said] == [0, 1, 2]
        admin.delete_topic(letters)
        create_topic(servers, letters)
        with suppress(ProtocolError):  # it may have gone with its only offset
            admin.delete_group(group)
    _load(servers, output, topic, letters)
    assert [each.said.offset for each in _letters(servers, letters) if each.said] == [0, 1, 2]


def test_letters_of_letters(cluster: EmbeddedCluster, topic: str, letters: str, tmp_path: Path) -> None:
    """A load does not write into a topic that it reads: it would never come to an end."""
    servers = cluster.bootstrap_servers
    produce(servers, topic, [Sent(b"bad")])
    with pytest.raises(ConfigError, match=f"--dead-letters topic:{topic} is loaded itself"):
        _load(servers, tmp_path / "out", topic, topic)
    for output, into in ((f"{tmp_path}/out", f"topic:{letters}"), (f"{tmp_path}/{{topic}}", "topic:{topic}")):
        by_topic = "{" in output
        asked = LoadOptions(
            {"bootstrap.servers": servers},
            [topic],
            f"{tmp_path}/out",
            settings=WriteSettings(schema="id bigint"),
            dead_letters="" if by_topic else into,
        )
        runner, pattern = InProcess(), f"{topic}.*"
        loads = Loads(asked, [], pattern, output, runner, lambda *_: nullcontext(), letters=into if by_topic else "")
        with pytest.raises(ConfigError, match="is loaded itself"):
            loads.round()
        assert runner.ran == []


def test_the_upkeep_is_of_the_output_alone(cluster: EmbeddedCluster, topic: str, letters: str, tmp_path: Path) -> None:
    """A topic of dead letters has no files to merge."""
    produce(cluster.bootstrap_servers, topic, [Sent(b'{"id": 1}'), Sent(b"bad")])
    asked = LoadOptions(
        {"bootstrap.servers": cluster.bootstrap_servers},
        [topic],
        str(tmp_path),
        settings=WriteSettings(schema="id bigint"),
        max_bad=MaxBad(9),
        dead_letters=f"topic:{letters}",
    )
    loads = Loads(asked, [topic], None, str(tmp_path), InProcess(), lambda _total, _done: nullcontext())
    outcomes = loads.round()
    assert [outcome.loaded and outcome.loaded.bad for outcome in outcomes] == [1]
    done = Upkeep(0.0, Kept()).after(outcomes, lambda: False)
    assert done is not None
    assert [(each.output, each.error) for each in done.outputs] == [(str(tmp_path), None)]


def test_corrupt_batches_and_damaged_letters(
    cluster: EmbeddedCluster, topic: str, letters: str, tmp_path: Path
) -> None:
    servers, output = cluster.bootstrap_servers, tmp_path / "out"
    produce(servers, topic, [Sent(b"bad")])
    _load(servers, output, topic)
    (file,) = (output / paths.LETTERS).iterdir()
    whole = file.read_text()
    file.write_text(whole.replace('"value": "', '"value": "?'))
    with pytest.raises(LoadError, match=r"line 1, is not a dead letter .*: restore it, or remove it"):
        _load(servers, output, topic, letters)
    assert _letters(servers, letters) == []
    file.write_text(whole)
    _load(servers, output, topic, letters)
    assert len(_letters(servers, letters)) == 1
    batch = StoredLetter(topic, 0, 5, "the CRC is wrong", None, 5, None, None, [], b"\xff")
    made = letter_topic.LetterTopic(f"topic:{letters}", {"bootstrap.servers": servers}, "load")
    with Producer({"bootstrap.servers": servers}) as producer:
        made._send(producer, batch)
    said = _letters(servers, letters)[-1].said
    assert said is not None
    assert (said.error, said.stage, said.offset, said.time) == (CORRUPT_BATCH, "KAFKA_CONSUME", 5, 5)


def test_kills(
    cluster: EmbeddedCluster, topic: str, letters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each letter is there once, whatever call of the producer is the last one."""
    servers, output = cluster.bootstrap_servers, tmp_path / "out"
    monkeypatch.setattr("spark_klog.load.journal.letters._MOST", 1)
    produce(servers, topic, [Sent(b"bad"), Sent(b"[]"), Sent(b'{"id": 1}')])
    _load(servers, output, topic)
    for name in ("begin_transaction", "send", "send_offsets_to_transaction", "commit_transaction"):
        for is_done in (False, True):
            own = getattr(Producer, name)

            def dying(*given: Any, _own: Any = own, _is_done: bool = is_done, **more: Any) -> Any:
                if _is_done:
                    _own(*given, **more)
                raise Killed

            with monkeypatch.context() as patch:
                patch.setattr(Producer, name, dying)
                patch.setattr(Producer, "__exit__", lambda self, *_: self.abort())  # no abort of the transaction
                try:
                    _load(servers, output, topic, letters)
                except Killed:
                    pass
    _load(servers, output, topic, letters)
    assert sorted(each.said.offset for each in _letters(servers, letters) if each.said) == [0, 1]
