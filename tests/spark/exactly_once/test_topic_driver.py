"""The driver's steps with decisions in a topic, against our broker and Kafka: restarts, zombies, moves, copies.

`test_driver` has what does not depend on the place of the decisions.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_klog.broker.faults import Delay, Fault
from spark_klog.client.admin.admin import Admin
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, RequestTimedOut
from spark_klog.spark.decisions import continue_at
from spark_klog.spark.write import exactly_once_driver
from spark_klog.spark.write.decisions.decision_place import DecisionPlace, decision_place
from spark_klog.spark.write.exactly_once import Decision, Superseded
from spark_klog.spark.write.exactly_once_driver import last_time_to_decide
from tests.support.shared_kafka import SharedKafkas

from .support import OURS_AND_KAFKA, brokers_of
from .test_driver import Query, test_a_driver_that_dies_after_its_decision, test_two_runs_of_a_checkpoint

#: Tests of `test_driver` that are run here, too, with this module's query.
__all__ = ["test_a_driver_that_dies_after_its_decision", "test_two_runs_of_a_checkpoint"]

ABORTED = ("PrepareAbort", "CompleteAbort")


@pytest.fixture(scope="module", params=OURS_AND_KAFKA)
def servers(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[str]:
    with brokers_of(request.param, module_server_dir, shared_kafkas) as servers:
        yield servers


def remote(topic: str) -> str:
    return f"s3a://bucket/{topic}"


@pytest.fixture
def query(servers: str, topic: str) -> Iterator[Query]:
    made = Query(servers, topic, decision_place(remote(topic), "auto", None))
    yield made
    made.close()


@pytest.fixture
def local(servers: str, topic: str, tmp_path: Path) -> Iterator[Query]:
    """A query whose decisions are in its checkpoint."""
    (tmp_path / "metadata").touch()
    made = Query(servers, topic, decision_place(str(tmp_path), "auto", None))
    assert made.place == DecisionPlace(tmp_path)
    yield made
    made.close()


def test_micro_batches(query: Query) -> None:
    first = query.claim()
    assert first.begun.decided == -1
    failed = query.task(first, 1, b"failed")
    query.decide(first, 0, query.task(first, 0, b"a"), query.task(first, 1, b"b"))
    assert query.state(failed) in ABORTED
    second = query.claim()
    assert second.begun.decided == 0
    lost = query.task(second, 0, b"lost")
    assert query.claim().begun.decided == 0
    assert query.state(lost) in ABORTED
    query.read_until("a", "b")


def test_a_micro_batch_that_spark_gives_up(query: Query) -> None:
    claimed = query.claim()
    task = query.task(claimed, 0, b"given up")
    query.settle(claimed)
    assert query.state(task) in ABORTED
    claimed = query.claim()
    task = query.task(claimed, 0, b"decided")
    query.append_decision(claimed, task)
    query.settle(claimed)
    query.read_until("decided")


def options(query: Query, location: object) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": query.settings["bootstrap.servers"],
        "deliveryGuarantee": "exactly-once",
        "checkpointLocation": str(location),
    }


def test_a_checkpoint_that_was_restored(query: Query) -> None:
    """Micro-batches 3 to 5 are written again if the user says so; a run that is alive ends."""
    for batch in range(6):
        query.decide(query.claim(), batch)
    alive = query.claim()
    late = query.task(alive, 0, b"late")
    continue_at(options(query, remote(query.topic)), 3)
    with pytest.raises(Superseded):
        query.decide(alive, 6, late)
    claimed = query.claim()
    assert (claimed.begun.decided, query.state(late) in ABORTED) == (2, True)
    query.decide(claimed, 3, query.task(claimed, 0, b"again"))
    query.read_until("again")


def test_a_decided_micro_batch_is_not_skipped(query: Query) -> None:
    check_it_is_not_skipped(query, options(query, remote(query.topic)))


def test_a_micro_batch_that_is_decided_in_the_checkpoint_is_not_skipped(local: Query, tmp_path: Path) -> None:
    check_it_is_not_skipped(local, options(local, tmp_path))


def check_it_is_not_skipped(query: Query, given: dict[str, str]) -> None:
    """Its driver has died before the commit: the next start commits it, unless the user gives it up."""
    claimed = query.claim()
    task = query.task(claimed, 3, b"decided")
    query.append_decision(claimed, task)
    with pytest.raises(ConfigError) as caught:
        continue_at(given, 1)
    assert f"{task.transactional_id} (task 3). A start of the query commits them" in str(caught.value)
    assert "call continue_at(OPTIONS, 0) to write these rows again, or with drop_decided=True" in str(caught.value)
    assert query.claim().begun.decided == 0
    continue_at(given, 2)
    claimed = query.claim()
    task = query.task(claimed, 0, b"given up")
    log = query.place.open(query.settings, claimed.identity, is_claimed=True)
    assert log.append(claimed.begun.number, Decision(2, (task,)))
    continue_at(given, 3, drop_decided=True)
    assert query.claim().begun.decided == 2
    assert query.state(task) in ABORTED
    query.read_until("decided")


def test_a_log_that_no_run_has_used(query: Query, caplog: pytest.LogCaptureFixture) -> None:
    """A mistyped address changes nothing; the right one is told, with its last decision."""
    query.decide(query.claim(), 0)
    for typo in (
        {"checkpointLocation": f"{remote(query.topic)}-"},
        {"checkpointLocation": f"/no/such/{query.topic}"},
        {"decisionTopic": f"{query.topic}-decisions"},
    ):
        with pytest.raises(ConfigError, match=r"no run of this query has used topic .* check checkpointLocation"):
            continue_at({**options(query, remote(query.topic)), **typo}, 1)
    with Admin({"bootstrap.servers": query.settings["bootstrap.servers"]}) as admin:
        assert f"{query.topic}-decisions" not in [one.name for one in admin.list_topics(include_internal=True)]
    caplog.clear()
    continue_at({**options(query, remote(query.topic)), "createTopics": 3, "includeHeaders": True}, 5)
    (told,) = [record.getMessage() for record in caplog.records if record.name == "spark_klog.spark.decisions"]
    log = f"topic __klog_decisions (stream/{remote(query.topic)})"
    assert told == f"{log}: the query goes on with micro-batch 5; the last decision was of micro-batch 0"
    assert query.claim().begun.decided == 4


def test_a_move_from_a_checkpoint_to_a_topic(local: Query, tmp_path: Path) -> None:
    for batch in range(3):
        claimed = local.claim()
        local.decide(claimed, batch, local.task(claimed, 0, b"%d" % batch))
    zombie = local.claim()
    open_one = local.task(zombie, 0, b"zombie")
    local.place = moved = decision_place(str(tmp_path), "topic", f"{local.topic}-decisions")
    first = local.claim()
    assert (first.begun.decided, first.identity) == (2, zombie.identity)
    assert first.begun.number > zombie.begun.number
    assert local.state(open_one) in ABORTED
    with pytest.raises(Superseded):
        local.decide(zombie, 3, local.task(zombie, 0, b"late"))
    with pytest.raises(ConfigError, match=r"decisions of this query are in topic .*-decisions"):
        decision_place(str(tmp_path), "checkpoint", None).open({}, zombie.identity).read()
    assert decision_place(str(tmp_path), "auto", None) == moved
    first = local.claim()
    local.decide(first, 3, local.task(first, 0, b"3"))
    assert local.claim().begun.decided == 3
    local.read_until("0", "1", "2", "3")


def test_a_move_that_is_interrupted(local: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the old log is ended, and before the topic has its last decision."""
    claimed = local.claim()
    local.append_decision(claimed, local.task(claimed, 0, b"a"))
    local.place = decision_place(str(tmp_path), "topic", f"{local.topic}-decisions")
    with monkeypatch.context() as patch:
        patch.setattr(DecisionPlace, "open", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            local.claim()
    local.place = decision_place(str(tmp_path), "auto", None)
    assert local.place.topic == f"{local.topic}-decisions"
    for _ in range(2):
        assert local.claim().begun.decided == 0
    local.read_until("a")


def test_a_decision_that_is_confirmed_late(tmp_path: Path, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after the brokers may have aborted its transactions: it is void, and the next run writes."""
    with EmbeddedCluster(data_dir=tmp_path, faults=[]) as cluster:
        query = Query(cluster.bootstrap_servers, topic, decision_place(remote(topic), "auto", None))
        claimed = query.claim()
        assert last_time_to_decide(query.settings, claimed.at) == claimed.at + 45
        written = query.task(claimed, 0, b"late")
        monkeypatch.setattr(exactly_once_driver, "last_time_to_decide", lambda *_: time.time() + 0.5)
        cluster.inject(Fault(Delay(2000), api="Produce", topic="__klog_decisions", count=1))
        with pytest.raises(RequestTimedOut, match=r"three quarters of kafka\.transaction\.timeout\.ms are over"):
            query.decide(claimed, 0, written)
        query.settle(claimed)
        assert query.state(written) in ABORTED
        time.sleep(2)  # it lands meanwhile
        assert query.claim().begun.decided == -1
        query.close()


def test_a_topic_of_a_local_checkpoint(local: Query, tmp_path: Path) -> None:
    """The checkpoint notes it before the first decision; a copy of it uses the same log."""
    local.place = decision_place(str(tmp_path), "topic", None)
    claimed = local.claim()
    assert decision_place(str(tmp_path), "auto", None) == local.place
    local.decide(claimed, 0, local.task(claimed, 0, b"a"))
    (tmp_path / "copy" / "klog_sink").mkdir(parents=True)
    (tmp_path / "copy" / "metadata").touch()
    (tmp_path / "copy" / "klog_sink" / "0").write_bytes((tmp_path / "klog_sink" / "0").read_bytes())
    copy = decision_place(str(tmp_path / "copy"), "auto", None)
    assert copy == dataclasses.replace(local.place, folder=tmp_path / "copy")
    local.read_until("a")


def test_a_checkpoint_with_micro_batches_that_the_topic_does_not_know(local: Query, tmp_path: Path) -> None:
    """Its tasks refuse to write; the checkpoint notes nothing until the user says how to go on."""
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "0").touch()
    local.place = decision_place(str(tmp_path), "topic", None)
    assert local.claim().begun.decided == -1
    assert not (tmp_path / "klog_sink").exists()
    continue_at({**options(local, tmp_path), "decisionLog": "topic"}, 1)
    claimed = local.claim()
    assert claimed.begun.decided == 0
    assert decision_place(str(tmp_path), "auto", None) == local.place
    local.decide(claimed, 1, local.task(claimed, 0, b"a"))
    local.read_until("a")
