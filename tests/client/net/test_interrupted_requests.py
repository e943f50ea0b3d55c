"""An interrupt (Ctrl-C) in a request does not spoil the next one."""

from __future__ import annotations

import sys
import time

import pytest

from spark_klog.client.cluster import Cluster
from spark_klog.client.producer.producer import Producer
from spark_klog.client.requests import received, run
from spark_klog.errors import KlogError
from spark_klog.protocol.apis import METADATA
from tests.support.brokers.faults import late
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.checker.interrupts import Interrupt

_MODULES = ("client/net/connection.py",)
_OUTSIDE = ("close", "closed")
_HALFWAY = "an interrupt has ended a call of this producer halfway"
#: The code that moves a producer's gathered records into its queue of batches.
_QUEUEING = (
    "client/producer/producer.py",
    "client/producer/intake.py",
    "client/producer/sender.py",
    "client/producer/queues.py",
    "client/producer/numbering.py",
)
_QUEUEING_FUNCTIONS = (
    "_finish",
    "_finish_all",
    "remove",
    "add_records",
    "append",
    "_admit",
    "new_queue",
    "take_sequences",
)


def _flush(producer: Producer, interrupt: Interrupt) -> None:
    """Flush, and ignore the interrupt that may end the flush."""
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        producer.flush()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


def _topics(cluster: Cluster, *names: str) -> list[str]:
    answer = cluster.request(0, METADATA, {"topics": [{"name": name} for name in names]})
    return [topic["name"] for topic in answer["topics"]]


def test_an_answer_that_was_received_is_not_waited_for() -> None:
    """As after an interrupt between an answer and what the caller notes of it: it would wait for request.timeout.ms."""
    with ScriptedCluster({"t": 1}) as brokers:
        with Cluster.connect({"bootstrap.servers": brokers.bootstrap_servers}) as cluster:
            connection = cluster.plain_connection(0)
            handle = connection.send(METADATA, {"topics": [{"name": "t"}]})
            connection.receive(handle)
            now = time.monotonic()
            with pytest.raises(ValueError, match="is not under way"):
                run(received(connection, handle, now, now + 120))
            assert time.monotonic() - now < 60
            assert _topics(cluster, "t") == ["t"]


def test_an_interrupt_at_each_line_of_a_request() -> None:
    with ScriptedCluster({"t": 1, "u": 1}) as brokers:
        with Cluster.connect({"bootstrap.servers": brokers.bootstrap_servers}) as cluster:
            at, is_over = 0, False
            while not is_over:
                at += 1
                interrupt = Interrupt(at, _MODULES, outside=_OUTSIDE)
                before = sys.gettrace()
                sys.settrace(interrupt)
                try:
                    _topics(cluster, "t")
                except KeyboardInterrupt:
                    pass
                finally:
                    sys.settrace(before)
                is_over = interrupt.is_over
                assert _topics(cluster, "u") == ["u"], at
                assert cluster.plain_connection(0).pending == 0, at
    assert at > 50, at


def test_an_interrupt_at_each_line_that_queues_records() -> None:
    """The next flush writes all records once, or raises: no record is lost without an error."""
    with ScriptedCluster({"t": 1}) as brokers:
        at, is_over = 0, False
        written = 0
        while not is_over:
            at += 1
            settings = {"bootstrap.servers": brokers.bootstrap_servers, "linger.ms": "600000"}
            producer = Producer.of_cluster(Cluster.connect(settings))
            values = [b"%d %d" % (at, number) for number in range(3)]
            for value in values:
                producer.send("t", value)
            interrupt = Interrupt(at, _QUEUEING, _QUEUEING_FUNCTIONS)
            _flush(producer, interrupt)
            is_over = interrupt.is_over
            failure = ""
            try:
                producer.flush()
            except KlogError as error:
                failure = str(error)
            producer.abort()
            if failure:
                assert _HALFWAY in failure, at
            else:
                written += 1
                assert [one for one in brokers.values("t", 0) if one.startswith(b"%d " % at)] == values, at
    assert at - written > 10


def test_an_interrupt_at_each_line_that_waits_for_requests_of_an_aborted_transaction() -> None:
    """After the interrupt the producer can abort the transaction and commit another one."""
    with ScriptedCluster({"t": 2}, nodes=2) as brokers:
        at, is_over = 0, False
        while not is_over:
            at += 1
            settings = {"bootstrap.servers": brokers.bootstrap_servers, "transactional.id": "x", "linger.ms": "0"}
            producer = Producer.of_cluster(Cluster.connect(settings))
            producer.init_transactions()
            producer.begin_transaction()
            brokers.always("Produce", late(0.1))
            before = brokers.count("Produce")
            while brokers.count("Produce") < before + 2:
                for partition in range(2):
                    producer.send("t", b"", partition=partition)
            interrupt = Interrupt(at, ("producer/sender.py",), ("reset", "_end"))
            tracing = sys.gettrace()
            sys.settrace(interrupt)
            try:
                producer.abort_transaction()
            except KeyboardInterrupt:
                producer.abort_transaction()
            finally:
                sys.settrace(tracing)
            is_over = interrupt.is_over
            brokers.clear()
            producer.begin_transaction()
            producer.send("t", b"%d" % at, partition=0)
            producer.commit_transaction()
            producer.abort()
            assert brokers.values("t", 0)[-1] == b"%d" % at
    assert at > 5, at
