"""Deliveries and callbacks of `Producer.send`, its thread and limits; at model brokers, our broker and Kafka 3.9.1."""

from __future__ import annotations

import concurrent.futures
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spark_klog.client import Delivery, Producer, RecordMetadata
from spark_klog.client.cluster import Cluster
from spark_klog.client.net.waiting import Waker
from spark_klog.client.producer.intake import Gathering
from spark_klog.client.producer.sender import Sender
from spark_klog.client.settings import client_config
from spark_klog.errors import (
    BufferExhausted,
    ConcurrentUse,
    ErrorCode,
    KlogError,
    ProducerClosed,
    ProtocolError,
    RequestTimedOut,
    TransactionAborted,
)
from spark_klog.protocol.codec import Message
from tests.spark.support import consume
from tests.support.brokers.model_cluster import Fate, ModelCluster
from tests.support.clients.topics import make_topic
from tests.support.servers.any_broker import serving
from tests.support.servers.kafka import NEWEST
from tests.support.servers.shared_kafka import SharedKafkas
from tests.support.waiting import wait_until

SECONDS = 60
A, B = ("t", 0), ("t", 1)
Told = tuple["KlogError | None", "RecordMetadata | None"]


@pytest.fixture(scope="module", params=["ours", pytest.param(NEWEST, marks=pytest.mark.peer)])
def servers(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[str]:
    with serving(request.param, module_server_dir, shared_kafkas) as address:
        yield address


@contextmanager
def producing(servers: str, **more: str) -> Iterator[Producer]:
    settings = {name.replace("_", "."): value for name, value in more.items()}
    producer = Producer({"bootstrap.servers": servers, "retry.backoff.ms": "1", **settings})
    try:
        yield producer
    finally:
        producer.abort()


def threads() -> set[threading.Thread]:
    """Those of all producers in this process: one that has been closed may still be ending."""
    return {thread for thread in threading.enumerate() if thread.name == "spark_klog-producer"}


def test_deliveries_without_a_flush(servers: str, topic: str) -> None:
    """Records are sent without a flush; offsets and timestamps are those that confluent-kafka reads."""
    make_topic(servers, topic, 2)
    told: list[Told] = []
    with producing(servers, compression_type="lz4") as producer:
        sent = [
            producer.send(
                topic,
                b"%d" % number,
                partition=number % 2,
                timestamp=1000 + number,
                on_delivery=lambda *x: told.append(x),
            )
            for number in range(200)
        ]
        found = [delivery.result(SECONDS) for delivery in sent]
        assert [(delivery.topic, delivery.partition, delivery.done()) for delivery in sent[:2]] == [
            (topic, 0, True),
            (topic, 1, True),
        ]
        wait_until(lambda: len(told) == 200, seconds=SECONDS)
    assert sorted(found) == sorted(metadata for error, metadata in told if metadata and error is None)
    there = {(record.partition, record.offset): record for record in consume(servers, topic)}
    for number, metadata in enumerate(found):
        assert metadata == (topic, number % 2, number // 2, 1000 + number)
        assert there[number % 2, metadata.offset].value == b"%d" % number


def test_threads_share_a_producer(servers: str, topic: str) -> None:
    make_topic(servers, topic, 3)
    with Producer({"bootstrap.servers": servers, "batch.size": "2000"}) as producer:

        def write(place: int) -> list[Delivery]:
            sent = []
            for number in range(500):
                sent.append(producer.send(topic, b"%d %06d" % (place, number), key=b"%d" % place))
                if number % 200 == 199:
                    producer.flush()
                    assert all(delivery.done() for delivery in sent)
            return sent

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            sent = [delivery for deliveries in pool.map(write, range(4)) for delivery in deliveries]
        results = [delivery.result(SECONDS) for delivery in sent]
    assert len({(found.partition, found.offset) for found in results}) == 2000
    values = [record.value or b"" for record in sorted(consume(servers, topic), key=lambda r: (r.partition, r.offset))]
    for place in range(4):
        own = [value for value in values if value.startswith(b"%d " % place)]
        assert own == [b"%d %06d" % (place, number) for number in range(500)]


def test_linger() -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        with producing(brokers.servers, linger_ms="600000") as producer:
            delivery = producer.send("t", b"a")
            for call in (delivery.result, delivery.exception):
                with pytest.raises(
                    concurrent.futures.TimeoutError, match=r"t-0 was .* within 0\.3 s.* delivery\.timeout\.ms"
                ):
                    call(0.3)
            assert not brokers.requests
            producer.send("t", b"b")
            producer.flush()
            assert (delivery.result(0).offset, len(brokers.requests)) == (0, 1)
        with producing(brokers.servers, linger_ms="0") as producer:
            assert producer.send("t", b"c").result(SECONDS).offset == 2
        with producing(brokers.servers, linger_ms="600000", batch_size="1000") as producer:
            deliveries = [producer.send("t", bytes(100)) for _ in range(15)]
            assert deliveries[0].result(SECONDS).offset == 3, "a full batch does not linger"
            assert not deliveries[-1].done()


def test_a_thread_only_for_send() -> None:
    before = threads()
    with ModelCluster(1, {"t": 1}) as brokers:
        import pyarrow as pa

        with producing(brokers.servers) as producer:
            producer.send_arrow(pa.table({"value": ["a"]}), "t")
            producer.flush()
            assert threads() <= before
            producer.send("t", b"b")
            assert len(threads() - before) == 1
        assert threads() <= before


def test_each_record_is_told_its_error() -> None:
    told: list[Told] = []

    def script(node: int, keys: list[tuple[str, int]]) -> Fate:
        return Fate(errors={A: ErrorCode.INVALID_RECORD})

    with ModelCluster(1, {"t": 2}, script) as brokers, producing(brokers.servers, linger_ms="600000") as producer:
        wrong = [producer.send("t", b"a", partition=0, on_delivery=lambda *x: told.append(x)) for _ in range(2)]
        right = producer.send("t", b"b", partition=1)
        with pytest.raises(ProtocolError, match=r"t-0.*INVALID_RECORD"):
            producer.flush()
        assert right.result(0).offset == 0
        for delivery in wrong:
            with pytest.raises(ProtocolError, match="INVALID_RECORD"):
                delivery.result(0)
        assert [(type(error), metadata) for error, metadata in told] == [(ProtocolError, None)] * 2


def test_an_error_that_the_thread_meets() -> None:
    fate = Fate(errors={A: ErrorCode.TOPIC_AUTHORIZATION_FAILED})
    with ModelCluster(1, {"t": 1}, lambda node, keys: fate) as brokers, producing(brokers.servers) as producer:
        told: list[Told] = []
        delivery = producer.send("t", b"a", on_delivery=lambda *x: told.append(x))
        error = delivery.exception(SECONDS)
        assert isinstance(error, ProtocolError)
        wait_until(lambda: told, seconds=SECONDS)
        with pytest.raises(ProtocolError, match="TOPIC_AUTHORIZATION_FAILED"):
            producer.send("t", b"b")
        assert len(brokers.requests) == 1


def test_delivery_timeout_without_a_call() -> None:
    with ModelCluster(1, {"t": 1}) as brokers, producing(brokers.servers, delivery_timeout_ms="500") as producer:
        producer.partitions("t")
        brokers.leaders[A] = -1
        error = producer.send("t", b"a").exception(SECONDS)
        assert isinstance(error, RequestTimedOut)


def test_a_flush_with_a_timeout() -> None:
    """What it leaves stays under way."""
    with ModelCluster(1, {"t": 1}) as brokers, producing(brokers.servers, linger_ms="600000") as producer:
        producer.partitions("t")
        brokers.leaders[A] = -1
        sent = producer.send("t", b"a")
        producer.flush(0.2)
        assert not sent.done()
        brokers.leaders[A] = 0
        producer.flush(SECONDS)
        assert sent.result(0).offset == 0
        assert brokers.log[A] == [b"a"]


def test_callbacks_may_send_and_their_errors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with ModelCluster(1, {"t": 1}) as brokers, producing(brokers.servers) as producer:
        second: list[Delivery] = []

        def send_on(error: KlogError | None, metadata: RecordMetadata | None) -> None:
            second.append(producer.send("t", b"b"))
            raise ValueError("my mistake")

        producer.send("t", b"a", on_delivery=send_on)
        wait_until(lambda: second, seconds=SECONDS)
        assert second[0].result(SECONDS).offset == 1
        wait_until(lambda: "my mistake" in caplog.text, seconds=SECONDS)
        assert brokers.log[A] == [b"a", b"b"]


def test_a_full_buffer() -> None:
    """`send` waits for max.block.ms and then adds nothing; the producer goes on once there is a leader again."""
    with ModelCluster(1, {"t": 2}) as brokers:
        more = {"batch_size": "1000", "buffer_memory": "5000", "max_block_ms": "1000"}
        with producing(brokers.servers, linger_ms="600000", **more) as producer:
            producer.partitions("t")
            brokers.leaders[A] = -1
            sent: list[Delivery] = []

            def fill() -> None:
                for _ in range(20):
                    sent.append(producer.send("t", bytes(600), partition=0))

            with pytest.raises(BufferExhausted, match=r"buffer\.memory=5000, .* 1 s \(max\.block\.ms\).* t-0"):
                fill()
            brokers.leaders[A] = 0
            producer.flush()
            assert [delivery.result(0).offset for delivery in sent] == list(range(len(sent)))
            assert len(brokers.log[A]) == len(sent)
            assert 4 < len(sent) < 12


def test_what_is_dropped_is_told() -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        with producing(brokers.servers, linger_ms="600000") as producer:
            told: list[Told] = []
            delivery = producer.send("t", b"a", on_delivery=lambda *x: told.append(x))
        assert isinstance(delivery.exception(0), ProducerClosed)
        assert told == [(delivery.exception(0), None)]


def test_transactions(servers: str, topic: str) -> None:
    make_topic(servers, topic, 1)
    with producing(servers, transactional_id=topic, linger_ms="600000") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        dropped = producer.send(topic, b"a")
        producer.abort_transaction()
        assert isinstance(dropped.exception(0), TransactionAborted)
        producer.begin_transaction()
        kept = producer.send(topic, b"b")
        producer.commit_transaction()
        assert kept.result(0).offset == 0
    with producing(servers, transactional_id=f"{topic}-2") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        # the thread sends it, after a marker or before: Kafka answers a commit before it writes markers
        assert producer.send(topic, b"c").result(SECONDS).offset in (1, 2)
        producer.commit_transaction()


def test_a_call_waits_for_another_threads_call_for_its_time_only() -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        with producing(brokers.servers, max_block_ms="2000", linger_ms="600000") as producer:
            producer.send("t", b"a")
            brokers.leaders[A] = -1
            producer._cluster.forget_leaders()
            flusher = threading.Thread(target=producer.flush)
            flusher.start()

            def send_on() -> None:
                while flusher.is_alive():  # the flush may not have begun
                    producer.send("t", b"b")

            with pytest.raises(RequestTimedOut, match=r"another thread .* 2 s \(max\.block\.ms\)"):
                send_on()
            brokers.leaders[A] = 0
            flusher.join(SECONDS)
            producer.flush()
            assert brokers.log[A][0] == b"a"


def test_no_thread_uses_a_cluster_of_the_caller() -> None:
    """The caller may use the cluster at the same time. The producer's calls send records once linger.ms is over."""
    before = threads()
    with ModelCluster(1, {"t": 1}) as brokers:
        producer = Producer.of_cluster(Cluster(client_config({"bootstrap.servers": brokers.servers, "linger.ms": "0"})))
        told: list[Told] = []
        delivery = producer.send("t", b"a", on_delivery=lambda *x: told.append(x))
        assert threads() <= before
        wait_until(lambda: producer.send("t", b"b") and brokers.log[A], seconds=SECONDS)
        producer.flush()
        assert told == [(None, delivery.result(0))]
        producer.close()


def test_a_signal_handler_does_not_use_the_producer_within_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush halfway through `send` would confirm a batch to which send then adds its record."""
    with ModelCluster(1, {"t": 1}) as brokers, producing(brokers.servers, linger_ms="600000") as producer:
        producer.send("t", b"a")
        refused: list[BaseException] = []
        add_record = Gathering.add_record

        def interrupted(gathering: Gathering, *record: object) -> int:
            for call in (producer.flush, producer.close, producer.abort, lambda: producer.send("t", b"x")):
                try:
                    call()
                except ConcurrentUse as error:
                    refused.append(error)
            return add_record(gathering, *record)  # type: ignore[arg-type]

        monkeypatch.setattr(Gathering, "add_record", interrupted)
        delivery = producer.send("t", b"b")
        producer.flush()
        assert len(refused) == 4
        assert brokers.log[A] == [b"a", b"b"]
        assert delivery.result(0).offset == 1


def test_a_forked_process_writes_nothing() -> None:
    """The child has the parent's producer id and sequences, so that its records would replace the parent's."""
    with ModelCluster(1, {"t": 1}) as brokers, producing(brokers.servers, linger_ms="600000") as producer:
        producer.send("t", b"a")
        producer.flush()
        kept = producer.send("t", b"b")
        child = os.fork()
        if not child:
            passed = 0
            for call in (lambda: producer.send("t", b"c"), producer.flush, producer.begin_transaction):
                try:
                    call()
                except ProducerClosed:
                    passed += 1
            producer.close()
            os._exit(0 if passed == 3 else 1)
        assert os.waitpid(child, 0)[1] == 0
        producer.flush()
        assert (kept.result(0).offset, brokers.log[A]) == (1, [b"a", b"b"])


def test_two_node_ids_at_one_address() -> None:
    """Both nodes have one connection, and a selector accepts it only once."""
    before = threads()
    with ModelCluster(2, {"t": 2}, lambda node, keys: Fate(delay_after=0.2)) as brokers:
        metadata = brokers._metadata

        def at_one_address(message: Message) -> Message:
            answer = metadata(message)
            for broker in answer["brokers"]:
                broker["port"] = brokers._brokers[0].port
            return answer

        brokers._metadata = at_one_address  # type: ignore[method-assign]
        with producing(brokers.servers.split(",")[0], linger_ms="0", delivery_timeout_ms="2000") as producer:
            sent = [producer.send("t", b"a", partition=number) for number in range(2)]
            assert all(delivery.exception(SECONDS) is None or delivery.done() for delivery in sent)
            assert len(threads() - before) == 1


def test_a_callback_that_exits_does_not_end_the_thread() -> None:
    with ModelCluster(1, {"t": 1}) as brokers, producing(brokers.servers, linger_ms="0") as producer:
        told: list[Told] = []
        producer.send("t", b"a", on_delivery=lambda *_: sys.exit(1)).result(SECONDS)
        producer.send("t", b"b", on_delivery=lambda *x: told.append(x)).result(SECONDS)
        wait_until(lambda: told, seconds=SECONDS)


def test_an_unknown_error_of_the_thread_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Sender) -> None:
        raise RuntimeError("of a bug")

    monkeypatch.setattr(Sender, "step", failing)
    with ModelCluster(1, {"t": 1}) as brokers, producing(brokers.servers, linger_ms="0") as producer:
        assert "of a bug" in str(producer.send("t", b"a").exception(SECONDS))
        with pytest.raises(KlogError, match="of a bug"):
            producer.flush()


def test_close_while_another_thread_waits() -> None:
    """Close ends the other thread's flush even if max.block.ms is short; no record is written after its error."""
    before = threads()
    with ModelCluster(1, {"t": 1}) as brokers:
        with producing(brokers.servers, max_block_ms="3000", linger_ms="600000") as producer:
            delivery = producer.send("t", b"a")
            brokers.leaders[A] = -1
            producer._cluster.forget_leaders()
            ended: list[BaseException] = []

            def flush() -> None:
                try:
                    producer.flush()
                except KlogError as error:
                    ended.append(error)

            has_turn = threading.Event()
            wait = producer._sender.flush

            def flush_in_turn(until: float = math.inf) -> None:
                has_turn.set()
                wait(until)

            producer._sender.flush = flush_in_turn  # type: ignore[method-assign]
            flusher = threading.Thread(target=flush)
            flusher.start()
            assert has_turn.wait(SECONDS)
            with pytest.raises(RequestTimedOut):
                producer.close()
            flusher.join(SECONDS)
            assert [type(error) for error in ended] == [ProducerClosed]
            assert isinstance(delivery.exception(0), ProducerClosed)
            wait_until(lambda: threads() <= before, seconds=SECONDS)  # close may not have had its turn
            brokers.leaders[A] = 0
            producer.close()
            assert brokers.log[A] == []


def test_close_while_the_thread_begins_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threads()
    with ModelCluster(1, {"t": 1}) as brokers, producing(brokers.servers, linger_ms="0") as producer:
        producer.send("t", b"a").result(SECONDS)
        thread = producer._background
        assert thread is not None
        clear = Waker.clear

        def clear_after_stop(waker: Waker) -> None:
            thread.stop()  # as close does before it waits for its own turn
            clear(waker)

        monkeypatch.setattr(Waker, "clear", clear_after_stop)
        thread.wake()
        wait_until(lambda: threads() <= before, seconds=SECONDS)


def test_close_in_a_callback_of_flush() -> None:
    with ModelCluster(1, {"t": 1}) as brokers, producing(brokers.servers, linger_ms="600000") as producer:
        took: list[float] = []

        def close(*_: object) -> None:
            begin = time.monotonic()
            producer.close()
            took.append(time.monotonic() - begin)

        producer.send("t", b"a", on_delivery=close)
        producer.flush()
        assert took
        assert took[0] < 25, "it does not wait for the thread, which may wait for the callbacks"
        with pytest.raises(ProducerClosed):
            producer.partitions("t")


def test_an_interrupt_in_a_callback_leaves_the_others_to_be_called() -> None:
    with ModelCluster(1, {"t": 1}) as brokers, producing(brokers.servers, linger_ms="600000") as producer:
        told: list[int] = []

        def tell(number: int) -> None:
            if not number:
                raise KeyboardInterrupt
            told.append(number)

        producer.partitions("t")
        for number in range(3):
            producer.send("t", b"a", on_delivery=lambda *_, number=number: tell(number))
        producer._background.stop()  # type: ignore[union-attr]
        producer._background.join()  # type: ignore[union-attr]  # else the thread may call the callbacks
        with pytest.raises(KeyboardInterrupt):
            producer.flush()
        producer.flush()
        assert told == [1, 2]


def test_a_limit_beyond_what_a_lock_takes() -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        with producing(brokers.servers, max_block_ms=str(2**63 - 1)) as producer:
            producer.send("t", b"a").result(SECONDS)
            producer.flush()


def test_a_thread_that_could_not_start_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with ModelCluster(1, {"t": 1}) as brokers, producing(brokers.servers, linger_ms="0") as producer:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            with pytest.raises(RuntimeError):
                producer.send("t", b"a")
        assert producer.send("t", b"b").result(SECONDS).offset == 0


def test_an_error_that_is_raised_again_keeps_no_frames() -> None:
    """If one exception were raised each time, its traceback would grow and keep the values of all frames."""
    with ModelCluster(1, {"t": 1}, lambda node, keys: Fate(errors={A: ErrorCode.INVALID_RECORD})) as brokers:
        with producing(brokers.servers, linger_ms="0") as producer:
            delivery = producer.send("t", b"a")
            assert delivery.exception(SECONDS)

            def depth(call: Callable[[], object]) -> int:
                with pytest.raises(ProtocolError, match="INVALID_RECORD") as failed:
                    call()
                return len(failed.traceback)

            for call in (producer.flush, delivery.result, lambda: producer.send("t", b"b")):
                assert len({depth(call) for _ in range(3)}) == 1
            error = delivery.exception(0)
            assert error is not None
            assert error.__traceback__ is None
