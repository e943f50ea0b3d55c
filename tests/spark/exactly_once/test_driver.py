"""The driver's steps against our broker and Kafka: claims, decisions, restarts between steps, timeouts.

Tasks are producers of this process; librdkafka reads the results with read_committed.
"""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spark_klog.client.admin.admin import Admin
from spark_klog.client.admin.topics import NewTopic
from spark_klog.client.cluster import Cluster
from spark_klog.client.producer.producer import Producer
from spark_klog.client.producer.transactions import PreparedTransaction
from spark_klog.client.requests import Steps
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, KlogError, ProducerFenced, ProtocolError
from spark_klog.protocol import apis
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api
from spark_klog.spark.write.decisions.decision_place import DecisionPlace, decision_place
from spark_klog.spark.write.exactly_once import DecidedButAborted, Decision, Superseded, Transaction
from spark_klog.spark.write.exactly_once_driver import Claimed, NotDecided, claim, continue_at, decide, settle
from spark_klog.spark.write.producers import SinkProducer
from tests.support.brokers.raw_client import RawClient
from tests.support.clients.transactional.readers import by_confluent
from tests.support.servers.kafka import NEWEST
from tests.support.servers.shared_kafka import SharedKafkas
from tests.support.waiting import wait_until

from .support import brokers_of

_SECONDS = 60
SHORT = {"transaction.timeout.ms": "5000"}


@pytest.fixture(
    scope="module",
    params=[
        "ours",
        pytest.param(NEWEST, marks=pytest.mark.peer),
        pytest.param("3.9.1", marks=[pytest.mark.peer, pytest.mark.test_all("version")]),
    ],
)
def servers(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[str]:
    # the shared Kafkas look for timeouts as often
    settings = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"}
    with brokers_of(request.param, module_server_dir, shared_kafkas, settings) as servers:
        yield servers


@pytest.fixture(
    params=["ours", pytest.param("3.9.1", marks=[pytest.mark.peer, pytest.mark.test_all("version")])],
)
def unverified(request: pytest.FixtureRequest, server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[str]:
    """A broker, Kafka as before 3.6: it takes records of a transaction that its coordinator does not know."""
    if request.param == "ours":
        with EmbeddedCluster(data_dir=server_dir) as cluster:
            yield cluster.bootstrap_servers
    else:
        settings = {"transaction.partition.verification.enable": "false"}
        yield shared_kafkas.get(request.param, settings).bootstrap_servers


class Query:
    """A query that writes to one partition."""

    def __init__(self, servers: str, topic: str, place: DecisionPlace) -> None:
        self.topic, self.prefix = topic, "klog-"
        self.settings = {"bootstrap.servers": servers, "transaction.timeout.ms": "60000"}
        self.place = place
        self.producers: list[Producer] = []
        with Admin({"bootstrap.servers": servers}) as admin:
            admin.create_topic(topic, 1)

    def claim(self) -> Claimed:
        return claim(self.settings, self.place, self.prefix)

    def task(self, claimed: Claimed, number: int, *values: bytes, name: str = "") -> Transaction:
        """Write values in the transaction of a task, with a new worker's transactional id, or `name`."""
        name = name or f"{claimed.identity.id_prefix}{number}-{time.time_ns()}"
        producer = Producer({**self.settings, "transactional.id": name})
        self.producers.append(producer)
        producer.init_transactions()
        producer.begin_transaction()
        for value in values:
            producer.send(self.topic, value)
        found = producer.prepare_transaction()
        assert found is not None
        return Transaction(found.transactional_id, found.producer_id, found.epoch, number)

    @contextmanager
    def sink_producer(self, last: Transaction) -> Iterator[SinkProducer]:
        """The producer of a worker that goes on with the id of a transaction."""
        producer = SinkProducer({**self.settings, "transactional.id": last.transactional_id})
        yield producer
        producer.abort()

    def decide(self, claimed: Claimed, batch: int, *transactions: Transaction) -> None:
        decide(self.settings, claimed, batch, transactions)

    def append_decision(self, claimed: Claimed, *transactions: Transaction) -> None:
        """Append the decision of micro-batch 0 and do no more, as a driver that dies there."""
        log = claimed.place.open(self.settings, claimed.identity, is_claimed=True)
        assert log.append(claimed.begun.number, Decision(0, transactions))

    def settle(self, claimed: Claimed) -> None:
        settle(self.settings, claimed)

    def state(self, one: Transaction) -> str:
        return self.state_of(one.transactional_id)

    def epoch_of(self, one: Transaction) -> int:
        with Admin({"bootstrap.servers": self.settings["bootstrap.servers"]}) as admin:
            return admin.describe_transactions([one.transactional_id]).check()[one.transactional_id].producer_epoch

    def state_of(self, transactional_id: str) -> str:
        with Admin({"bootstrap.servers": self.settings["bootstrap.servers"]}) as admin:
            return admin.describe_transactions([transactional_id]).check()[transactional_id].state

    def read_until(self, *values: str) -> None:
        """Commit a last record `end` and wait until it is readable; then only it and `values` must be committed."""
        claimed = self.claim()
        end = self.task(claimed, 0, b"end")
        decide(self.settings, claimed, claimed.begun.decided + 1, [end])
        deadline = time.monotonic() + _SECONDS
        while "end" not in (found := by_confluent(self.settings["bootstrap.servers"], self.topic, 0)):
            assert time.monotonic() < deadline
        assert sorted(found) == sorted(["end", *values])

    def close(self) -> None:
        for producer in self.producers:
            producer.close()


def place_of(topic: str, folder: Path) -> DecisionPlace:
    """The place of a query with its checkpoint in a folder."""
    (folder / "metadata").write_text(json.dumps({"id": str(uuid.uuid4())}))
    return decision_place(str(folder), f"{topic}-decisions")


@pytest.fixture
def query(servers: str, topic: str, tmp_path: Path) -> Iterator[Query]:
    made = Query(servers, topic, place_of(topic, tmp_path))
    yield made
    made.close()


def test_what_no_driver_has_decided_is_aborted(query: Query) -> None:
    first = query.claim()
    copy, failed = query.task(first, 0, b"copy"), query.task(first, 1, b"failed")
    query.decide(first, 0, query.task(first, 0, b"a"), query.task(first, 1, b"b"))
    assert {query.state(copy), query.state(failed)} <= {"PrepareAbort", "CompleteAbort"}
    second = query.claim()
    lost = query.task(second, 0, b"lost")
    assert query.claim().begun.decided == 0
    assert query.state(lost) in ("PrepareAbort", "CompleteAbort")
    query.read_until("a", "b")


def test_an_attempt_that_writes_after_its_abort(unverified: str, topic: str, tmp_path: Path) -> None:
    query = Query(unverified, topic, place_of(topic, tmp_path))
    claimed = query.claim()
    late = Producer({**query.settings, "transactional.id": f"{claimed.identity.id_prefix}late"})
    late.init_transactions()
    late.begin_transaction()
    late.send(topic, b"first")
    late.flush()
    query.decide(claimed, 0, query.task(claimed, 0, b"a"))
    # until the marker is written, the leader takes the record into the transaction that it aborts
    wait_until(lambda: query.state_of(f"{claimed.identity.id_prefix}late") == "CompleteAbort")
    late.send(topic, b"second")
    with pytest.raises(KlogError):
        late.flush()
    late.abort()
    query.read_until("a")
    query.close()


@pytest.mark.parametrize(
    "servers",
    [
        "ours",
        pytest.param(NEWEST, marks=pytest.mark.peer),
        pytest.param("3.9.1", marks=[pytest.mark.peer, pytest.mark.test_all("version")]),
    ],
    indirect=True,
)
def test_fencing(query: Query) -> None:
    claimed = query.claim()
    done, task = query.task(claimed, 0, b"a"), query.task(claimed, 1, b"b")
    query.decide(claimed, 0, done)
    with Admin({"bootstrap.servers": query.settings["bootstrap.servers"]}) as admin:
        admin.fence_transactions([_prepared(task)]).check()  # the driver has fenced it
    with query.sink_producer(task) as fenced, pytest.raises(ProducerFenced):
        fenced.begin_transaction(_prepared(task))
    with query.sink_producer(done) as next_one:
        next_one.begin_transaction(_prepared(done))
    query.read_until("a")


def test_a_restart_with_another_prefix(query: Query) -> None:
    query.prefix = "team-a."
    claimed = query.claim()
    task = query.task(claimed, 0, b"lost")
    assert task.transactional_id.startswith("team-a.")
    query.prefix = "klog-"
    with pytest.raises(ConfigError, match=r"Set transactionalIdPrefix=team-a\. again") as caught:
        query.claim()
    assert f"option transactionalIdPrefix is klog-, but {query.place.key} has written with team-a. until now" in str(
        caught.value
    )
    assert query.state(task) == "Ongoing"
    query.prefix = "team-a."
    claimed = query.claim()
    assert query.state(task) in ("PrepareAbort", "CompleteAbort")
    query.decide(claimed, 0, query.task(claimed, 0, b"a"))
    query.read_until("a")


def test_a_driver_that_dies_after_its_decision(query: Query) -> None:
    claimed = query.claim()
    tasks = [query.task(claimed, 0, b"a"), query.task(claimed, 1, b"b")]
    query.append_decision(claimed, *tasks)
    again = query.claim()
    assert again.begun.decided == 0
    query.decide(again, 0)  # the tasks of a decided micro-batch write nothing
    assert query.claim().begun.decided == 0
    query.read_until("a", "b")


def test_a_worker_that_has_begun_another_transaction(query: Query) -> None:
    """The broker has aborted the one to decide; the one that is open by its name is of another epoch."""
    claimed = query.claim()
    lost = query.task(claimed, 0, b"lost")
    other = query.task(claimed, 0, b"other", name=lost.transactional_id)
    assert (other.producer_id, query.state(lost)) == (lost.producer_id, "Ongoing")
    with pytest.raises(NotDecided, match="the transaction of task 0 is over"):
        query.decide(claimed, 0, lost)
    query.decide(claimed, 0, other)
    query.read_until("other")


def test_two_runs_of_a_checkpoint(query: Query) -> None:
    old = query.claim()
    task = query.task(old, 0, b"old")
    new = query.claim()
    written = query.task(new, 0, b"new")
    with pytest.raises(NotDecided, match="the transaction of task 0 is over"):
        query.decide(old, 0, task)  # the new claim aborted it
    late = query.task(old, 0, b"late")
    with pytest.raises(Superseded):
        query.decide(old, 0, late)
    query.settle(old)  # leaves the new run's transaction open
    assert query.state(written) == "Ongoing"
    query.decide(new, 0, written)
    query.read_until("new")


def _ended(query: Query, one: Transaction, *, commits: bool) -> str:
    """End a transaction; return the name of the broker's error, or an empty string."""
    with Admin({"bootstrap.servers": query.settings["bootstrap.servers"]}) as admin:
        error = admin.end_transactions([_prepared(one)], commits=commits).failures.get(_prepared(one))
    if error is None:
        return ""
    assert isinstance(error, ProtocolError)
    return error.code.name


def test_ends_that_are_repeated(query: Query) -> None:
    """Only a transaction's own producer id and epoch can end it, also with transaction.version 2 (Kafka 4.4.0)."""
    claimed = query.claim()
    first = query.task(claimed, 0, b"a")
    assert [_ended(query, first, commits=True) for _ in range(3)] == ["", "", ""]
    assert _ended(query, first, commits=False) == "INVALID_TXN_STATE"
    producer = query.producers[-1]
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(query.topic, b"b")
    found = producer.prepare_transaction()
    assert found is not None
    assert found.epoch > first.epoch
    fenced = {"PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH"}
    assert {_ended(query, first, commits=commits) for commits in (True, False)} <= fenced
    second = dataclasses.replace(first, epoch=found.epoch)
    assert query.state(second) == "Ongoing"
    assert [_ended(query, second, commits=False) for _ in range(2)] == ["", ""]
    assert _ended(query, second, commits=True) == "INVALID_TXN_STATE"
    query.read_until("a")


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "abort"])
@pytest.mark.parametrize(
    "servers", ["ours", pytest.param(NEWEST, marks=[pytest.mark.peer, pytest.mark.test_all("version")])], indirect=True
)
def test_an_end_that_raises_the_epoch(query: Query, commits: bool) -> None:
    """EndTxn version 5, which another client may send (KIP-890): a task goes on after a commit only."""
    claimed = query.claim()
    task = query.task(claimed, 0, b"a")
    port = query.settings["bootstrap.servers"].rsplit(":", 1)[1]
    request = {
        "transactional_id": task.transactional_id,
        "producer_id": task.producer_id,
        "producer_epoch": task.epoch,
        "committed": commits,
    }
    with RawClient(int(port)) as raw:
        answer = raw.request(apis.END_TXN, 5, request)
    assert (answer["error_code"], answer["producer_epoch"]) == (0, task.epoch + 1)
    with query.sink_producer(task) as next_one:
        if not commits:
            with pytest.raises(ProducerFenced):
                next_one.begin_transaction(_prepared(task))
            return
        next_one.begin_transaction(_prepared(task))
        assert query.epoch_of(task) == task.epoch + 2


def test_a_topic_that_is_created_again_between_decision_and_commits(query: Query) -> None:
    claimed = query.claim()
    query.append_decision(claimed, query.task(claimed, 0, b"gone"))
    with Admin({"bootstrap.servers": query.settings["bootstrap.servers"]}) as admin:
        admin.delete_topic(query.topic)
        deadline = time.monotonic() + _SECONDS
        while True:
            error = admin.create_topics([NewTopic(query.topic, 1)]).failures.get(query.topic)
            if error is None:
                break
            assert time.monotonic() < deadline, error  # Kafka may still be deleting the old topic
            time.sleep(0.1)
    again = query.claim()
    assert again.begun.decided == 0
    query.decide(again, 1, query.task(again, 0, b"new"))
    query.read_until("new")


def _prepared(one: Transaction) -> PreparedTransaction:
    return PreparedTransaction(one.transactional_id, one.producer_id, one.epoch)


def test_a_micro_batch_that_spark_gives_up(query: Query) -> None:
    claimed = query.claim()
    task = query.task(claimed, 0, b"given up")
    query.settle(claimed)
    assert query.state(task) in ("PrepareAbort", "CompleteAbort")
    claimed = query.claim()
    task = query.task(claimed, 0, b"decided")
    query.append_decision(claimed, task)
    query.settle(claimed)  # commits decided transactions
    assert query.state(task) in ("PrepareCommit", "CompleteCommit")
    query.read_until("decided")


def test_a_decided_micro_batch_with_other_offsets(query: Query, tmp_path: Path) -> None:
    """The first lines of Spark's file, a version and the time of the plan, differ without meaning that."""
    (tmp_path / "offsets").mkdir()
    offsets = tmp_path / "offsets" / "0"
    offsets.write_text('v1\n{"batchTimestampMs":1}\n{"t":{"0":5}}')
    claimed = query.claim()
    query.decide(claimed, 0, query.task(claimed, 0, b"a"))
    assert not query.claim().is_replanned
    offsets.write_text('v1\n{"batchTimestampMs":2}\n{"t":{"0":5}}')
    assert not query.claim().is_replanned
    offsets.write_text('v1\n{"batchTimestampMs":2}\n{"t":{"0":6}}')
    assert query.claim().is_replanned
    offsets.unlink()
    assert not query.claim().is_replanned


def test_coordinators_are_looked_up_once(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = query.claim()
    tasks = [query.task(claimed, number, b"%d" % number) for number in range(5)]
    asked: list[str] = []
    asking_any = Cluster.asking_any

    def count(self: Cluster, api: Api, *arguments: Any, **more: Any) -> Steps[Message]:
        asked.append(api.name)
        return asking_any(self, api, *arguments, **more)

    monkeypatch.setattr(Cluster, "asking_any", count)
    query.decide(claimed, 0, *tasks)
    monkeypatch.undo()
    assert asked.count("FindCoordinator") == 1
    query.read_until("0", "1", "2", "3", "4")


def _wait_for_abort(query: Query, task: Transaction) -> None:
    deadline = time.monotonic() + _SECONDS
    while query.state(task) == "Ongoing":
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_transactions_that_time_out_before_the_decision(query: Query) -> None:
    query.settings |= SHORT
    claimed = query.claim()
    task = query.task(claimed, 0, b"late")
    _wait_for_abort(query, task)
    with pytest.raises(NotDecided, match=r"micro-batch 0 took .* more than half of kafka\.transaction\.timeout\.ms"):
        query.decide(claimed, 0, task)
    with pytest.raises(NotDecided, match=r"micro-batch 0: the transaction of task 0 is over before it was decided"):
        query.decide(dataclasses.replace(claimed, at=time.time()), 0, task)
    query.settings |= {"transaction.timeout.ms": "60000"}
    claimed = query.claim()
    assert claimed.begun.decided == -1
    query.decide(claimed, 0, query.task(claimed, 0, b"again"))
    query.read_until("again")


#: Each waits for 5 s; what Kafka answers after a timeout, the test above shows.
_OURS_FIRST = [
    "ours",
    pytest.param("3.9.1", marks=[pytest.mark.peer, pytest.mark.test_all("version")]),
]


@pytest.mark.parametrize("servers", _OURS_FIRST, indirect=True)
def test_transactions_that_time_out_after_the_decision(query: Query) -> None:
    claimed = query.claim()
    in_time = query.task(claimed, 0, b"in time")
    query.settings |= SHORT
    late = query.task(claimed, 1, b"late")
    query.append_decision(claimed, in_time, late)
    _wait_for_abort(query, late)
    for _ in range(2):  # the error stays
        with pytest.raises(DecidedButAborted, match=r"micro-batch 0: the rows of task 1 are not .*_at\(OPTIONS, 0"):
            query.claim()
    assert query.state(in_time) in ("PrepareCommit", "CompleteCommit")
    query.settings |= {"transaction.timeout.ms": "60000"}
    continue_at(query.settings, query.place, query.prefix, 0)  # the error advises this
    claimed = query.claim()
    assert claimed.begun.decided == -1
    query.decide(claimed, 0, query.task(claimed, 0, b"in time", b"late"))
    query.read_until("in time", "in time", "late")


def test_a_decided_transaction_that_the_brokers_have_forgotten(query: Query) -> None:
    claimed = query.claim()
    unknown = Transaction(f"{claimed.identity.id_prefix}unknown", 7, 0, 0)
    query.append_decision(claimed, unknown)
    with pytest.raises(ProtocolError, match=r"INVALID_PRODUCER_ID_MAPPING.*nobody knows whether it was committed"):
        query.claim()
