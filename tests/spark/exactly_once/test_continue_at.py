"""A checkpoint and its decision log that disagree, against our broker and Kafka: restored, unknown, late."""

from __future__ import annotations

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
from spark_klog.spark.write.decisions.decision_place import decision_place
from spark_klog.spark.write.exactly_once import Decision, Superseded
from spark_klog.spark.write.exactly_once_driver import last_time_to_decide
from tests.support.servers.shared_kafka import SharedKafkas

from .support import OURS_AND_KAFKA, brokers_of
from .test_driver import Query, place_of

ABORTED = ("PrepareAbort", "CompleteAbort")


@pytest.fixture(scope="module", params=OURS_AND_KAFKA)
def servers(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[str]:
    with brokers_of(request.param, module_server_dir, shared_kafkas) as servers:
        yield servers


def remote(topic: str) -> str:
    return f"s3a://bucket/{topic}"


@pytest.fixture
def query(servers: str, topic: str) -> Iterator[Query]:
    made = Query(servers, topic, decision_place(remote(topic), None))
    yield made
    made.close()


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
    """Its driver has died before the commit: the next start commits it, unless the user gives it up."""
    given = options(query, remote(query.topic))
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


def test_a_decision_that_is_confirmed_late(tmp_path: Path, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after the brokers may have aborted its transactions: it is void, and the next run writes."""
    with EmbeddedCluster(data_dir=tmp_path, faults=[]) as cluster:
        query = Query(cluster.bootstrap_servers, topic, decision_place(remote(topic), None))
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


def test_a_local_checkpoint_with_micro_batches_that_the_topic_does_not_know(
    servers: str, topic: str, tmp_path: Path
) -> None:
    """Its tasks refuse to write until the user says how to go on; a copy of it uses the same log."""
    query = Query(servers, topic, place_of(topic, tmp_path))
    given = {**options(query, tmp_path), "decisionTopic": query.place.topic}
    with pytest.raises(ConfigError, match=r"no run of this query has used topic .*start the query once before"):
        continue_at(given, 1)
    assert query.claim().begun.decided == -1
    for folder in ("offsets", "commits"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0").write_text('v1\n{}\n{"t":{"0":5}}' if folder == "offsets" else "v1\n{}")
    with pytest.raises(ConfigError, match="batch=2 is beyond micro-batch 1, which Spark runs next"):
        continue_at(given, 2)
    continue_at(given, 1)
    claimed = query.claim()
    assert claimed.begun.decided == 0
    query.decide(claimed, 1, query.task(claimed, 0, b"a"))
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "metadata").write_bytes((tmp_path / "metadata").read_bytes())
    of_copy = decision_place(str(copy), query.place.topic)
    assert (of_copy.key, of_copy.folder) == (query.place.key, copy)
    query.read_until("a")
    query.close()
