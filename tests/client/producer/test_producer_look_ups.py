"""Sends go on while the producer asks for a producer id, for metadata of other topics, or a coordinator."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest

from spark_klog.client import Producer
from spark_klog.client.cluster import Cluster
from spark_klog.client.coordinator import find_coordinator
from spark_klog.client.producer.outcomes import Outcomes
from spark_klog.client.producer.queues import Queue
from spark_klog.errors import (
    ConnectionFailed,
    ErrorCode,
    KlogError,
    ProducerClosed,
    ProducerFenced,
    ProtocolError,
    RequestTimedOut,
    TransactionAborted,
)
from spark_klog.protocol.tables.groups import TRANSACTION
from tests.support.brokers.faults import Fault, cut, dropped, error, late, lost, silent
from tests.support.brokers.kafka_python_wire import Message
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("driver")

SECONDS = 60
#: Seconds: far longer than a test takes, so that a wait for the response would show.
LATE = 100
LONG = {"request.timeout.ms": "100000", "delivery.timeout.ms": "100000", "linger.ms": "0"}


@pytest.fixture
def brokers() -> Iterator[ScriptedCluster]:
    with ScriptedCluster({"known": 1, "late": 1}, nodes=2) as running:
        running.leaders.update({("known", 0): 0, ("late", 0): 1})
        yield running


@pytest.fixture
def producer(brokers: ScriptedCluster) -> Iterator[Producer]:
    producer = Producer({"bootstrap.servers": brokers.bootstrap_servers, "retry.backoff.ms": "1", **LONG})
    try:
        producer.send("known", b"0").result(SECONDS)
        yield producer
    finally:
        producer.abort()


class _Sending(threading.Thread):
    """Send a record in a thread: as a row of Arrow, or by `send` with a wait for its confirmation."""

    def __init__(self, producer: Producer, topic: str, *, as_arrow: bool = False) -> None:
        super().__init__(daemon=True)
        self._producer, self._topic, self._as_arrow = producer, topic, as_arrow
        self.failure: KlogError | None = None
        self.start()

    def run(self) -> None:
        try:
            if self._as_arrow:
                row = {"topic": self._topic, "value": b"in a thread"}
                self._producer.send_arrow(pa.Table.from_pylist([{**row, "topic": "known"}, row]))
            else:
                self._producer.send(self._topic, b"in a thread").result(SECONDS)
        except KlogError as failure:
            self.failure = failure


def _asked_for(brokers: ScriptedCluster, topic: str) -> int:
    return sum(
        asked.name == "Metadata" and topic in [entry["name"] for entry in asked.message["topics"] or ()]
        for asked in list(brokers.asked)
    )


@pytest.mark.parametrize("as_arrow", [False, True])
def test_while_a_call_looks_up_a_topic(brokers: ScriptedCluster, producer: Producer, as_arrow: bool) -> None:
    brokers.always("Metadata", late(LATE))
    sending = _Sending(producer, "late", as_arrow=as_arrow)
    wait_until(lambda: _asked_for(brokers, "late"), seconds=SECONDS)
    for number in range(1, 20):
        producer.send("known", b"%d" % number).result(SECONDS)
    assert sending.is_alive()
    producer.abort()
    sending.join(SECONDS)
    assert isinstance(sending.failure, ProducerClosed)
    assert brokers.values("known", 0) == [b"%d" % number for number in range(20)]


def test_while_the_thread_looks_for_a_leader(brokers: ScriptedCluster, producer: Producer) -> None:
    """A leader has moved and the metadata with the new one are late: records for another partition go on."""
    producer.send("late", b"0").result(SECONDS)
    before = _asked_for(brokers, "late")
    brokers.always("Metadata", late(LATE))
    brokers.on("Produce", error(ErrorCode.NOT_LEADER_OR_FOLLOWER))
    waiting = producer.send("late", b"1")
    wait_until(lambda: _asked_for(brokers, "late") > before, seconds=SECONDS)
    for number in range(1, 20):
        producer.send("known", b"%d" % number).result(SECONDS)
    assert not waiting.done()
    assert brokers.values("late", 0) == [b"0"]


def test_the_leader_is_found_in_the_end(brokers: ScriptedCluster, producer: Producer) -> None:
    """After late metadata and LEADER_NOT_AVAILABLE all records are written once, in order."""
    producer.send("late", b"0").result(SECONDS)
    brokers.leaders["late", 0] = 0
    brokers.on("Metadata", late(0.2), error(ErrorCode.LEADER_NOT_AVAILABLE), late(0.2))
    deliveries = [producer.send("late", b"%d" % number) for number in range(1, 50)]
    deliveries += [producer.send("known", b"%d" % number) for number in range(1, 50)]
    for delivery in deliveries:
        delivery.result(SECONDS)
    for topic in ("known", "late"):
        assert brokers.values(topic, 0) == [b"%d" % number for number in range(50)]


def test_while_known_partitions_are_renewed(brokers: ScriptedCluster) -> None:
    settings = {"bootstrap.servers": brokers.bootstrap_servers, "metadata.max.age.ms": "1", **LONG}
    with Producer(settings) as producer:
        producer.send("known", b"0").result(SECONDS)
        brokers.on("Metadata", *[silent()] * 1000)
        before = _asked_for(brokers, "known")
        number = 0
        while _asked_for(brokers, "known") == before:
            number += 1
            producer.send("known", b"%d" % number).result(SECONDS)
        for more in range(number + 1, number + 20):
            producer.send("known", b"%d" % more).result(SECONDS)
        brokers.clear()
    assert brokers.values("known", 0) == [b"%d" % one for one in range(number + 20)]


def test_while_the_thread_asks_for_a_producer_id(brokers: ScriptedCluster) -> None:
    """If the thread blocked the producer while it waits, calls would end with RequestTimedOut."""
    brokers.always("InitProducerId", late(LATE))
    settings = {"bootstrap.servers": brokers.bootstrap_servers, "max.block.ms": "4000", "batch.size": "100", **LONG}
    producer = Producer(settings)
    try:
        assert [producer.partitions(topic) for topic in ("known", "late")] == [1, 1]
        deliveries = [producer.send("known", b"0")]
        wait_until(lambda: brokers.count("InitProducerId"), seconds=SECONDS)
        for number in range(1, 50):  # several batches
            deliveries += [producer.send(topic, b"%d" % number) for topic in ("known", "late")]
        assert not any(delivery.done() for delivery in deliveries)
    finally:
        producer.abort()
    for delivery in deliveries:
        with pytest.raises(ProducerClosed):
            delivery.result(SECONDS)
    assert brokers.values("known", 0) == []


def test_the_producer_id_comes_in_the_end(brokers: ScriptedCluster) -> None:
    """After a lost connection and an error all records are written once, in order."""
    brokers.on("InitProducerId", dropped(), error(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS), late(0.2))
    settings = {"bootstrap.servers": brokers.bootstrap_servers, "retry.backoff.ms": "1", "batch.size": "100", **LONG}
    with Producer(settings) as producer:
        for number in range(50):
            for topic in ("known", "late"):
                producer.send(topic, b"%d" % number)
        producer.flush()
    for topic in ("known", "late"):
        assert brokers.values(topic, 0) == [b"%d" % number for number in range(50)]
    assert brokers.count("InitProducerId") == 3


@pytest.fixture
def transactional(brokers: ScriptedCluster) -> Iterator[Producer]:
    """A producer in a transaction; the coordinator is node 1."""
    settings = {"transactional.id": "x", "max.block.ms": "20000", "batch.size": "100", "retry.backoff.ms": "1"}
    producer = Producer({"bootstrap.servers": brokers.bootstrap_servers, **settings, **LONG})
    try:
        producer.init_transactions()
        producer.begin_transaction()
        yield producer
    finally:
        producer.abort()


def _refused(code: ErrorCode) -> Fault:
    def change(answer: Message) -> None:
        for topic in answer["results_by_topic_v3_and_below"]:
            for entry in topic["results_by_partition"]:
                entry["partition_error_code"] = code

    return Fault(change, is_applied=False)


def test_while_the_thread_adds_partitions_to_a_transaction(brokers: ScriptedCluster, transactional: Producer) -> None:
    """Sends to added partitions go on; an abort and another transaction do not wait for the missing response."""
    transactional.send("known", b"0").result(SECONDS)
    brokers.on("AddPartitionsToTxn", silent())
    lost = [transactional.send("late", b"lost")]
    wait_until(lambda: brokers.count("AddPartitionsToTxn") == 2, seconds=SECONDS)
    for number in range(1, 50):
        delivery = transactional.send("known", b"%d" % number)
        lost.append(transactional.send("late", b"lost"))
        delivery.result(SECONDS)
    transactional.abort_transaction()
    for delivery in lost:
        with pytest.raises(TransactionAborted):
            delivery.result(SECONDS)
    transactional.begin_transaction()
    transactional.send("late", b"0")
    transactional.commit_transaction()
    assert brokers.values("known", 0) == [b"%d" % number for number in range(50)]
    assert brokers.values("late", 0) == [b"0"]


def test_partitions_are_added_in_the_end(brokers: ScriptedCluster, transactional: Producer) -> None:
    """After errors, lost connections and a move of the coordinator all records are written once, in order."""
    brokers.on(
        *("AddPartitionsToTxn", dropped(), _refused(ErrorCode.CONCURRENT_TRANSACTIONS), late(0.2)),
        *(_refused(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS), lost()),
    )
    for number in range(50):
        for topic in ("known", "late"):
            transactional.send(topic, b"%d" % number)
        if number == 10:
            brokers.coordinator = 0
    transactional.commit_transaction()
    for topic in ("known", "late"):
        assert brokers.values(topic, 0) == [b"%d" % number for number in range(50)]
    assert not brokers.added


def test_partitions_that_are_not_added(brokers: ScriptedCluster, transactional: Producer) -> None:
    """After TOPIC_AUTHORIZATION_FAILED only an abort is possible, after PRODUCER_FENCED not even that."""
    brokers.on("AddPartitionsToTxn", _refused(ErrorCode.TOPIC_AUTHORIZATION_FAILED))
    with pytest.raises(ProtocolError, match="known-0 added to the transaction: TOPIC_AUTHORIZATION_FAILED"):
        transactional.send("known", b"").result(SECONDS)
    with pytest.raises(KlogError):
        transactional.commit_transaction()
    transactional.abort_transaction()
    transactional.begin_transaction()
    brokers.on("AddPartitionsToTxn", _refused(ErrorCode.PRODUCER_FENCED))
    with pytest.raises(ProducerFenced):
        transactional.send("known", b"").result(SECONDS)
    with pytest.raises(ProducerFenced):
        transactional.abort_transaction()
    assert brokers.values("known", 0) == []


def test_a_coordinator_that_does_not_answer_in_time(brokers: ScriptedCluster) -> None:
    brokers.always("AddPartitionsToTxn", silent())
    settings = {"transactional.id": "x", "max.block.ms": "1000", "retry.backoff.ms": "1", **LONG}
    producer = Producer({"bootstrap.servers": brokers.bootstrap_servers, **settings})
    producer.init_transactions()
    producer.begin_transaction()
    with pytest.raises(RequestTimedOut, match=r"tried for \d+\.\d s \(max\.block\.ms\)"):
        producer.send("known", b"").result(SECONDS)
    brokers.always("EndTxn", silent())
    with pytest.raises(RequestTimedOut, match=r"tried for \d+\.\d s \(max\.block\.ms\)"):
        producer.abort_transaction()
    producer.abort()
    assert brokers.values("known", 0) == []


def test_a_leader_that_no_batch_waits_for_any_more(brokers: ScriptedCluster) -> None:
    """Its look-up is dropped, for example after the end of its transaction, and not taken for that of other topics."""
    with Cluster.connect({"bootstrap.servers": brokers.bootstrap_servers, "request.timeout.ms": "2000"}) as cluster:
        brokers.always("Metadata", silent())
        outcomes = Outcomes(cluster, None)
        before, following = Queue(("known", 0), None), Queue(("late", 0), None)
        assert outcomes.by_leader([before]) == {}
        while following.failure is None:
            assert outcomes.by_leader([following]) == {}
            time.sleep(0.01)
        assert before.failure is None
        assert "did not answer within" in str(following.failure)


def test_errors_of_a_look_up(brokers: ScriptedCluster) -> None:
    quick = {"request.timeout.ms": "3000", "retry.backoff.ms": "1", "linger.ms": "0"}
    with Producer({"bootstrap.servers": brokers.bootstrap_servers, **quick}) as producer:
        with pytest.raises(ProtocolError, match="topic no: UNKNOWN_TOPIC_OR_PARTITION"):
            producer.send("no", b"")
        brokers.always("Metadata", silent())
        with pytest.raises(ConnectionFailed, match=r"did not answer within.*request\.timeout\.ms"):
            producer.send("known", b"")
        brokers.clear()
        producer.send("known", b"0").result(SECONDS)
    assert brokers.values("known", 0) == [b"0"]


@pytest.mark.parametrize("as_arrow", [False, True])
def test_a_garbled_answer_to_a_look_up_is_asked_for_again(
    brokers: ScriptedCluster, producer: Producer, as_arrow: bool
) -> None:
    """As a lost one is: the cluster is known, so one answer that can't be read says nothing of its address."""
    brokers.on("Metadata", cut(), cut())
    sending = _Sending(producer, "late", as_arrow=as_arrow)
    sending.join(SECONDS)
    producer.flush()
    assert not sending.is_alive()
    assert sending.failure is None
    assert brokers.values("late", 0) == [b"in a thread"]


def test_a_coordinator_that_is_silent_is_asked_last_for_the_coordinator(brokers: ScriptedCluster) -> None:
    settings = {"bootstrap.servers": brokers.bootstrap_servers, "request.timeout.ms": "3000", "linger.ms": "0"}
    with Producer({**settings, "transactional.id": "x", "delivery.timeout.ms": "100000"}) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        node = find_coordinator(producer._cluster, "x", TRANSACTION)
        brokers.on("AddPartitionsToTxn", silent())
        producer.send("known", b"0").result(SECONDS)
        producer.commit_transaction()
        assert producer._cluster.candidates()[-1] == producer._cluster.address(node)
