"""Loads of several topics into one output, while topics and leaders are missing for a while, or for good."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from spark_klog.errors import DataLossError, LoadError, ProtocolError
from spark_klog.load import by_topic
from spark_klog.load.by_topic import Loads
from spark_klog.load.run import Loaded, LoadOptions
from tests.load.support import InProcess
from tests.support.brokers.scripted_broker import ScriptedCluster

_TOPICS, _PARTITIONS = ("t0", "t1", "t2"), 2


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedCluster]:
    monkeypatch.setattr(by_topic, "_MOVING_MS", 100.0)
    with ScriptedCluster(dict.fromkeys(_TOPICS, _PARTITIONS), nodes=2) as brokers:
        for key in brokers.logs:
            brokers.append(*key, [b"x"] * 3)
        yield brokers


def _loads(brokers: ScriptedCluster, output: Path, *topics: str, follows: bool = True, **options: Any) -> Loads:
    client = {"bootstrap.servers": brokers.bootstrap_servers, "request.timeout.ms": "2000"}
    asked, pattern = LoadOptions(client, list(topics), str(output), **options), None if topics else "t.*"
    runner = InProcess()
    return Loads(
        asked, topics, pattern, str(output), runner, lambda _total, _done: nullcontext(), every=1.0, follows=follows
    )


def _round(loads: Loads) -> Loaded:
    [outcome] = loads.round()
    assert outcome.loaded is not None, outcome.error
    assert not outcome.has_failed
    return outcome.loaded


class _Hidden:
    """Topics that no broker knows for a while."""

    def __init__(self, brokers: ScriptedCluster) -> None:
        self._brokers = brokers
        self._kept: dict[str, dict[tuple[str, int], Any]] = {}

    def hide(self, topic: str) -> None:
        keys = [key for key in self._brokers.logs if key[0] == topic]
        self._kept[topic] = {key: (self._brokers.logs.pop(key), self._brokers.leaders.pop(key)) for key in keys}

    def show(self, topic: str) -> None:
        for key, (log, leader) in self._kept.pop(topic).items():
            self._brokers.logs[key], self._brokers.leaders[key] = log, leader


def _counts(output: Path) -> Counter[tuple[str, int]]:
    rows = ds.dataset(output, exclude_invalid_files=True).to_table(["topic", "partition", "offset"]).to_pylist()
    places = Counter((row["topic"], row["partition"], row["offset"]) for row in rows)
    assert set(places.values()) <= {1}, "a record is there twice"
    return Counter(place[:2] for place in places)


@pytest.mark.parametrize("seed", range(2))
def test_others_go_on_and_each_record_is_loaded_once(brokers: ScriptedCluster, tmp_path: Path, seed: int) -> None:
    choose, hidden = random.Random(seed), _Hidden(brokers)
    loads, output = _loads(brokers, tmp_path / "out"), tmp_path / "out"
    _round(loads)
    missing, leaderless = "", ("", 0)
    for _ in range(10):
        if missing:
            hidden.show(missing)
        if leaderless in brokers.leaders:
            brokers.leaders[leaderless] = choose.randrange(2)
        missing = choose.choice(["", *_TOPICS])
        if missing:
            hidden.hide(missing)
        leaderless = choose.choice([("", 0), *brokers.logs])
        if leaderless[0]:
            brokers.leaders[leaderless] = -1
        for key in brokers.logs:
            brokers.append(*key, [b"y"] * choose.randrange(3))
        loaded = _round(loads)
        names = ({f"topic {missing}"} if missing else set()) | ({"-".join(map(str, leaderless))} - {"-0"})
        assert set(loaded.left_out) == names
        counts = _counts(output)
        assert {key: log.end for key, log in brokers.logs.items() if key != leaderless} == {
            key: counts[key] for key in brokers.logs if key != leaderless
        }


def test_what_is_left_out_for_long_is_told_at_growing_intervals(
    brokers: ScriptedCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loads = _loads(brokers, tmp_path / "out")
    told = []
    for leader in (-1, -1, -1, 0, -1):
        brokers.leaders["t1", 0] = leader
        _round(loads)
        told.append(sum("not loaded in this round" in message for message in caplog.messages))
    assert told == [1, 1, 1, 1, 2]


@pytest.mark.parametrize("fails", [False, True], ids=["goes on", "fails"])
def test_a_topic_that_stays_away_is_left_out(
    brokers: ScriptedCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: bool,
) -> None:
    caplog.set_level(logging.WARNING, "spark_klog.load")
    hidden = _Hidden(brokers)
    loads = _loads(brokers, tmp_path / "out", fail_on_loss=fails)
    _round(loads)
    hidden.hide("t1")
    assert set(_round(loads).left_out) == {"topic t1"}
    monkeypatch.setattr(by_topic, "_GONE_SECONDS", 0.0)
    assert not _round(loads).left_out  # all that was known of it is loaded
    assert any("topic t1" in message and "deleted" in message for message in caplog.messages)
    hidden.show("t1")
    brokers.append("t1", 0, [b"z"])
    assert _round(loads).offsets["t1", 0] == 4
    part = loads._parts["t1", 0]
    loads._parts["t1", 0] = by_topic.replace(part, log_end=9)
    hidden.hide("t1")
    if fails:
        with pytest.raises(DataLossError, match=r"topic t1; not loaded of what the log had .*: t1-0 \[4, 9\); --fail"):
            loads.round()
    else:
        _round(loads)
        assert "t1-0 [4, 9)" in caplog.messages[-1]


def test_a_named_topic_that_is_missing_is_an_error_to_get_over(brokers: ScriptedCluster, tmp_path: Path) -> None:
    loads, hidden = _loads(brokers, tmp_path / "out", *_TOPICS), _Hidden(brokers)
    _round(loads)
    hidden.hide("t2")
    with pytest.raises(LoadError, match="topic t2 does not exist at"):
        loads.round()
    hidden.show("t2")
    brokers.append("t2", 1, [b"z"])
    assert _round(loads).offsets["t2", 1] == 4


def test_a_run_that_does_not_follow_waits_for_leaders_and_says_what_it_lacks(
    brokers: ScriptedCluster, tmp_path: Path
) -> None:
    brokers.leaders["t1", 1] = -1
    begin = time.monotonic()
    [outcome] = _loads(brokers, tmp_path / "out", follows=False).round()
    assert time.monotonic() - begin > 1.5
    assert outcome.loaded is not None
    assert (set(outcome.loaded.left_out), outcome.lag) == ({"t1-1"}, None)
    assert _counts(tmp_path / "out") == {key: 3 for key in brokers.logs if key != ("t1", 1)}


def test_without_any_leader_the_round_fails(brokers: ScriptedCluster, tmp_path: Path) -> None:
    for key in brokers.leaders:
        brokers.leaders[key] = -1
    with pytest.raises(ProtocolError, match="LEADER_NOT_AVAILABLE"):
        _loads(brokers, tmp_path / "out").round()
