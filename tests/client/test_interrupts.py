"""A signal (Ctrl-C) at any step of a client's calls: the next calls work, or say that they can't; nothing is lost.

Each round has the signal arrive at another step of the code, chosen at random, and compares what is delivered with what
the calls have said. SPARK_KLOG_INTERRUPT_SECONDS is the time of each test; 600 reach most steps.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from confluent_kafka import Consumer as ConfluentConsumer, TopicPartition as ConfluentPartition

from spark_klog.client import Admin, Consumer, Delivery, Producer
from spark_klog.client.producer.transactions import State, Transactions
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import CallInterrupted, InvalidTransactionState, KlogError, ProducerClosed
from tests.support.checker.interrupts import Signal, signalled

_log = logging.getLogger(__name__)
_SECONDS = float(os.environ.get("SPARK_KLOG_INTERRUPT_SECONDS", "0.7"))
#: Seconds in which any call and any close ends.
_PATIENCE = 20.0


class _Stop(Exception):
    """What a signal handler of a program raises."""


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    with EmbeddedCluster(settings={"group.min.session.timeout.ms": "500"}) as cluster:
        yield cluster.bootstrap_servers


@pytest.fixture
def topic(servers: str) -> str:
    name = f"t-{uuid.uuid4().hex[:8]}"
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topic(name, 1)
    return name


def _rounds(play: Callable[[int, Callable[[], BaseException]], Signal]) -> None:
    """Play rounds with a signal at a step chosen at random; the first one without a signal counts the steps."""
    choose = random.Random(seed := random.randrange(1 << 32))
    steps = play(sys.maxsize, KeyboardInterrupt).steps
    assert steps > 500
    until = time.monotonic() + _SECONDS
    number = 0
    while number < 10 or time.monotonic() < until:
        number += 1
        at = choose.randint(1, steps)
        try:
            play(at, choose.choice([KeyboardInterrupt, _Stop]))
        except BaseException:
            _log.error("round %d: signal at step %d of %d, seed %d", number, at, steps, seed)
            raise


def _within(call: Callable[[], Any], what: object) -> Any:
    began = time.monotonic()
    try:
        return call()
    except BaseException:
        _log.error("the call after the interrupt at %s", what)
        raise
    finally:
        assert time.monotonic() - began < _PATIENCE, what


def _values(servers: str, topic: str) -> list[bytes]:
    """All values of committed records, by another client, which checks them."""
    consumer = ConfluentConsumer(
        {"bootstrap.servers": servers, "group.id": "reader", "check.crcs": True, "enable.partition.eof": True}
    )
    consumer.assign([ConfluentPartition(topic, 0, 0)])
    values: list[bytes] = []
    deadline = time.monotonic() + _PATIENCE * 3
    while time.monotonic() < deadline:
        message = consumer.poll(1.0)
        if message is None:
            continue
        if message.error() is not None:
            assert message.error().name() == "_PARTITION_EOF", message.error()
            consumer.close()
            return values
        values.append(message.value())
    raise AssertionError("the end of the partition was not reached")


def _outcomes(deliveries: list[tuple[bytes, Delivery]]) -> dict[bytes, bool]:
    """Whether each record is confirmed; all must be decided."""
    found = {}
    for value, delivery in deliveries:
        error = delivery.exception(_PATIENCE)
        assert error is None or isinstance(error, CallInterrupted | ProducerClosed), error
        found[value] = error is None
    return found


@pytest.mark.parametrize("codec", ["none", pytest.param("lz4", marks=pytest.mark.test_all("codec"))])
def test_send_flush_and_close(servers: str, topic: str, codec: str) -> None:
    confirmed: set[bytes] = set()
    failed: set[bytes] = set()
    unknown: set[bytes] = set()
    batches = {"linger.ms": "1", "batch.size": "300", "compression.type": codec}

    def play(at: int, raised: Callable[[], BaseException]) -> Signal:
        producer = Producer({"bootstrap.servers": servers, **batches})
        names = iter(f"{uuid.uuid4().hex[:12]}-{number}-{'v' * 30}".encode() for number in range(100))
        sent: list[tuple[bytes, Delivery]] = []
        called: list[bytes] = []

        def send(count: int) -> None:
            for value in names:
                unknown.add(value)
                delivery = producer.send(topic, value, on_delivery=lambda *_: called.append(value))  # noqa: B023
                sent.append((value, delivery))
                unknown.discard(value)
                if not (count := count - 1):
                    return

        with signalled(at, raised=raised) as interrupt:
            send(12)
            producer.flush()
            send(3)
            producer.close()
        is_halfway = False
        try:
            _within(lambda: send(4), interrupt.place)
            _within(producer.flush, interrupt.place)
        except CallInterrupted:
            is_halfway = True
        except ProducerClosed:
            pass
        for value, is_there in _outcomes(sent).items():
            (confirmed if is_there else failed).add(value)
            assert is_there or is_halfway or interrupt.place is not None
        with suppress(CallInterrupted):
            _within(producer.close, interrupt.place)
        _within(producer.close, interrupt.place)
        return interrupt

    _rounds(play)
    found = _values(servers, topic)
    assert len(found) == len(set(found)), "written twice"
    assert confirmed <= set(found), "lost"
    assert set(found) <= confirmed | failed | unknown


def test_order_goes_on(servers: str, topic: str) -> None:
    """A producer that no call says is halfway loses nothing of what was sent before, and keeps its order."""
    expected: list[list[bytes]] = []

    def play(at: int, raised: Callable[[], BaseException]) -> Signal:
        values = [f"{uuid.uuid4().hex[:12]}-{number}".encode() for number in range(20)]
        returned: list[bytes] = []
        producer = Producer({"bootstrap.servers": servers, "linger.ms": "1", "batch.size": "200"})
        with signalled(at, raised=raised) as interrupt:
            for value in values[:15]:
                producer.send(topic, value)
                returned.append(value)
        with suppress(CallInterrupted):
            for value in values[15:]:
                producer.send(topic, value)
                returned.append(value)
            producer.close()
            expected.append(returned)
        _within(producer.abort, interrupt.place)
        return interrupt

    _rounds(play)
    wanted = {value for values in expected for value in values}
    assert [value for value in _values(servers, topic) if value in wanted] == [v for some in expected for v in some]


def test_an_interrupt_just_after_the_answer_of_a_commit(
    servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer has the next transaction's epoch: the commit is not asked for again with it."""
    with Producer({"bootstrap.servers": servers, "transactional.id": "after-the-answer"}) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"1")
        with monkeypatch.context() as patch:
            patch.setattr(Transactions, "_ended", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                producer.commit_transaction()
        producer.commit_transaction()
        producer.begin_transaction()
        with pytest.raises(CallInterrupted):  # of this one, as the interrupt came after the end of the first
            producer.commit_transaction()
        producer.abort_transaction()
        producer.begin_transaction()
        producer.send(topic, b"2")
        producer.commit_transaction()
    assert sorted(_values(servers, topic)) == [b"1", b"2"]


def _interrupted(_: object) -> None:
    raise KeyboardInterrupt


def test_transactions(servers: str, topic: str) -> None:
    committed: set[bytes] = set()
    aborted: set[bytes] = set()

    def play(at: int, raised: Callable[[], BaseException]) -> Signal:
        producer = Producer({"bootstrap.servers": servers, "transactional.id": "x", "linger.ms": "0"})
        producer.init_transactions()
        values = {f"{uuid.uuid4().hex[:12]}-{number}".encode() for number in range(3)}
        is_committing = is_over = False
        with signalled(at, raised=raised) as interrupt:
            producer.begin_transaction()
            for value in values:
                producer.send(topic, value)
            is_committing = True
            producer.commit_transaction()
            is_over = True
        try:
            if is_committing and not is_over:
                try:
                    _within(producer.commit_transaction, interrupt.place)
                    is_over = True
                except InvalidTransactionState:
                    is_over = producer._transactions is not None and producer._transactions.state is State.READY
        except CallInterrupted:
            pass
        if is_over:
            committed.update(values)
        else:
            aborted.update(values)
            with suppress(InvalidTransactionState):  # the interrupt came before it began
                _within(producer.abort_transaction, interrupt.place)
        value = uuid.uuid4().hex.encode()
        for _ in range(2):
            producer.begin_transaction()
            try:
                producer.send(topic, value)
                _within(producer.commit_transaction, interrupt.place)
                committed.add(value)
                break
            except CallInterrupted:  # the interrupt came after the end of the first transaction
                _within(producer.abort_transaction, interrupt.place)
        assert value in committed
        _within(producer.close, interrupt.place)
        return interrupt

    _rounds(play)
    found = _values(servers, topic)
    assert len(found) == len(set(found))
    assert set(found) == committed, (len(found), len(committed), len(set(found) & aborted))


@pytest.mark.parametrize(
    ("is_subscribed", "is_arrow"),
    [
        (False, False),
        (True, True),
    ],
)
def test_poll(servers: str, topic: str, is_arrow: bool, is_subscribed: bool) -> None:
    """All records come once, and what the group has committed are records that the calls have returned."""
    values = [b"%d" % number for number in range(40)]
    with Producer({"bootstrap.servers": servers, "batch.size": "100"}) as producer:
        for value in values:
            producer.send(topic, value)

    def play(at: int, raised: Callable[[], BaseException]) -> Signal:
        settings = {"bootstrap.servers": servers, "group.id": uuid.uuid4().hex, "auto.offset.reset": "earliest"}
        # the group waits so long for a member whose first JoinGroup has lost its answer
        settings |= {"session.timeout.ms": "2000", "heartbeat.interval.ms": "500"}
        settings |= {"max.poll.records": "7", "auto.commit.interval.ms": "1", "max.partition.fetch.bytes": "300"}
        consumer = Consumer(settings)
        if is_subscribed:
            consumer.subscribe([topic])
        else:
            consumer.assign([(topic, 0)])
        poll = consumer.poll_arrow if is_arrow else consumer.poll
        polled: list[Any] = []

        def read(count: int) -> None:
            until = time.monotonic() + _PATIENCE
            while len(_once(_found(polled))) < count and time.monotonic() < until:
                polled.append(poll(0.5))  # in one step: nothing comes between the two calls

        with signalled(at, raised=raised) as interrupt:
            read(20)
        read(30)
        found = _found(polled)
        # a lost member reads again from what it has committed
        assert len(_once(found)) >= 30, (interrupt.place, len(_once(found)))
        assert _once(found) == values[: len(_once(found))], (interrupt.place, found)
        assert is_subscribed or found == _once(found), (interrupt.place, found)
        closing = threading.Thread(target=consumer.close, daemon=True)
        closing.start()
        closing.join(_PATIENCE)
        assert not closing.is_alive(), interrupt.place
        with Consumer(settings) as second:
            second.assign([(topic, 0)])
            committed = second.committed([(topic, 0)])
            assert committed, interrupt.place
            offset = committed[topic, 0].offset
        assert offset <= len(_once(found)), (interrupt.place, offset, len(found))
        return interrupt

    _rounds(play)


def _found(polled: list[Any]) -> list[bytes]:
    """The values of all that the calls have returned."""
    found: list[bytes] = []
    for result in polled:
        if isinstance(result, list):
            found += [record.value for record in result]
        elif result is not None:
            found += result.column("value").to_pylist()
    return found


def _once(values: list[bytes]) -> list[bytes]:
    return list(dict.fromkeys(values))


def test_admin(servers: str, topic: str) -> None:
    with Admin(
        {"bootstrap.servers": servers, "request.timeout.ms": "10000", "default.api.timeout.ms": "10000"}
    ) as admin:

        def play(at: int, raised: Callable[[], BaseException]) -> Signal:
            with signalled(at, raised=raised) as interrupt:
                admin.describe_topic(topic)
                admin.list_groups()
            found: list[object] = []
            other = threading.Thread(target=lambda: found.append(admin.describe_topic(topic)), daemon=True)
            other.start()
            other.join(_PATIENCE)
            assert not other.is_alive(), interrupt.place
            assert len(found) == 1
            _within(lambda: admin.describe_topic(topic), interrupt.place)
            return interrupt

        _rounds(play)


def test_a_close_that_is_interrupted_can_be_repeated(servers: str, topic: str) -> None:
    def play(at: int, raised: Callable[[], BaseException]) -> Signal:
        producer = Producer({"bootstrap.servers": servers})
        producer.send(topic, b"a")
        consumer = Consumer({"bootstrap.servers": servers, "group.id": "g"})
        consumer.assign([(topic, 0, 0)])
        consumer.poll(0.1)
        with signalled(at, raised=raised) as interrupt:
            consumer.close()
            producer.close()
        with suppress(KlogError):
            _within(consumer.close, interrupt.place)
        with suppress(CallInterrupted):
            _within(producer.close, interrupt.place)
        thread = producer._background._thread if producer._background is not None else None
        assert thread is None or not thread.is_alive(), interrupt.place
        assert consumer._waker.closed
        return interrupt

    _rounds(play)
