"""The producer at model brokers: every error code, and responses that are late, duplicated, missing or partial."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from spark_klog.client.cluster import Cluster
from spark_klog.client.producer import sender
from spark_klog.client.producer.producer import Producer
from spark_klog.client.settings import client_config
from spark_klog.errors import (
    ConfigError,
    ConnectionFailed,
    ErrorCode,
    ProtocolError,
    RequestTimedOut,
    UnsupportedVersionError,
)
from tests.support.brokers.model_cluster import Fate, Key, ModelCluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("driver")

RETRIED, RENUMBERED, CONFIRMED, FINAL = "retried", "renumbered", "confirmed", "final"
#: The producer's reaction to a partition's error in a Produce response, by Kafka's table of error codes (which are
#: retriable), KIP-98 and KIP-360 (sequences). All other codes are final.
PRODUCE_ERRORS = {
    ErrorCode.NONE: CONFIRMED,
    ErrorCode.CORRUPT_MESSAGE: RETRIED,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: RETRIED,
    ErrorCode.LEADER_NOT_AVAILABLE: RETRIED,
    ErrorCode.NOT_LEADER_OR_FOLLOWER: RETRIED,
    ErrorCode.REQUEST_TIMED_OUT: RETRIED,
    ErrorCode.REPLICA_NOT_AVAILABLE: RETRIED,
    ErrorCode.NETWORK_EXCEPTION: RETRIED,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS: RETRIED,
    ErrorCode.COORDINATOR_NOT_AVAILABLE: RETRIED,
    ErrorCode.NOT_COORDINATOR: RETRIED,
    ErrorCode.NOT_ENOUGH_REPLICAS: RETRIED,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND: RETRIED,
    ErrorCode.NOT_CONTROLLER: RETRIED,
    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER: RENUMBERED,
    ErrorCode.DUPLICATE_SEQUENCE_NUMBER: CONFIRMED,
    ErrorCode.KAFKA_STORAGE_ERROR: RETRIED,
    ErrorCode.UNKNOWN_PRODUCER_ID: RENUMBERED,
    ErrorCode.FENCED_LEADER_EPOCH: RETRIED,
    ErrorCode.UNKNOWN_LEADER_EPOCH: RETRIED,
    ErrorCode.OFFSET_NOT_AVAILABLE: RETRIED,
    ErrorCode.UNSTABLE_OFFSET_COMMIT: RETRIED,
    ErrorCode.THROTTLING_QUOTA_EXCEEDED: RETRIED,
    **dict.fromkeys(
        (
            ErrorCode.CONCURRENT_TRANSACTIONS,
            ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
            ErrorCode.INVALID_FETCH_SESSION_EPOCH,
            ErrorCode.LISTENER_NOT_FOUND,
            ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE,
            ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE,
            ErrorCode.UNKNOWN_TOPIC_ID,
            ErrorCode.INCONSISTENT_TOPIC_ID,
            ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
        ),
        RETRIED,
    ),
}
#: The producer sends a batch when it is full or on a flush.
QUICK = {"linger.ms": "600000", "retry.backoff.ms": "1", "retry.backoff.max.ms": "20", "request.timeout.ms": "20000"}
A, B = ("t", 0), ("t", 1)
_SECONDS = 30.0


def settings(brokers: ModelCluster, **more: str) -> dict[str, str]:
    return {
        "bootstrap.servers": brokers.servers,
        **QUICK,
        **{name.replace("_", "."): value for name, value in more.items()},
    }


@contextmanager
def producing(brokers: ModelCluster, **more: str) -> Iterator[Producer]:
    """A producer that is aborted at the end, also after errors."""
    producer = Producer(settings(brokers, **more))
    try:
        yield producer
    finally:
        producer.abort()


def scripted(nodes: int, topics: dict[str, int], *fates: Fate) -> ModelCluster:
    """Brokers with these fates for the first requests, whichever broker gets them."""
    following = itertools.chain(fates, itertools.repeat(Fate()))
    return ModelCluster(nodes, topics, lambda node, keys: next(following))


@pytest.mark.parametrize("code", list(range(-1, 121)), ids=lambda code: ErrorCode(code).name)
def test_each_error_of_a_partition(code: int) -> None:
    """If one of a request's two partitions has an error, the producer does not resend the confirmed one."""
    wanted = PRODUCE_ERRORS.get(ErrorCode(code), FINAL)
    # codes that confirm a batch come after its append, all others without one
    fate = Fate(after={A: code}) if wanted == CONFIRMED else Fate(errors={A: code})
    with scripted(1, {"t": 2}, fate) as brokers, producing(brokers) as producer:
        producer.send("t", b"a", partition=0)
        producer.send("t", b"b", partition=1)
        if wanted == FINAL:
            with pytest.raises(ProtocolError, match="t-0") as failed:
                producer.flush()
            assert failed.value.code == code
            for call in (producer.flush, lambda: producer.send("t", b"c", partition=1), producer.close):
                with pytest.raises(ProtocolError) as again:
                    call()
                assert str(again.value) == str(failed.value)
            assert brokers.requests == [(0, [A, B])]
            return
        producer.flush()
        assert brokers.log == {A: [b"a"], B: [b"b"]}
        assert brokers.batches_received == {A: 1 if wanted == CONFIRMED else 2, B: 1}
        assert brokers.numbers[A][-1][1:] == ((1, 0) if wanted == RENUMBERED else (0, 0))


@pytest.mark.parametrize("code", [ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID])
def test_errors_of_sequences_are_final_without_idempotence(code: int) -> None:
    with scripted(1, {"t": 1}, Fate(errors={A: code})) as brokers, producing(brokers, acks="1") as producer:
        producer.send("t", b"a")
        with pytest.raises(ProtocolError, match=ErrorCode(code).name):
            producer.flush()


#: Errors of InitProducerId that the producer retries. All others are final.
PASSING_OF_INIT = [
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.REQUEST_TIMED_OUT,
]


@pytest.mark.parametrize("code", PASSING_OF_INIT, ids=lambda code: code.name)
def test_errors_of_init_producer_id_that_pass(code: int) -> None:
    with ModelCluster(1, {"t": 1}) as brokers, producing(brokers) as producer:
        brokers.init_errors = [code] * 3
        producer.send("t", b"a")
        producer.flush()
        assert (brokers.log, brokers.inits) == ({A: [b"a"]}, 4)


@pytest.mark.parametrize(
    "code",
    [ErrorCode.CLUSTER_AUTHORIZATION_FAILED, ErrorCode.INVALID_REQUEST, ErrorCode.UNKNOWN_SERVER_ERROR],
    ids=lambda code: code.name,
)
def test_errors_of_init_producer_id_that_are_final(code: int) -> None:
    with ModelCluster(1, {"t": 1}) as brokers, producing(brokers) as producer:
        brokers.init_errors = [code]
        producer.send("t", b"a")
        for _ in range(2):
            with pytest.raises(ProtocolError, match=r"enable\.idempotence=false.*" + ErrorCode(code).name):
                producer.flush()
        assert (brokers.requests, brokers.inits) == ([], 1)


@pytest.mark.parametrize("drops", [3, math.inf])
def test_a_producer_id_that_can_not_be_had_again(drops: float) -> None:
    """After the last epoch the producer asks for a new id while it handles a response, whose other result counts."""
    lasts = drops == math.inf
    fate = Fate(errors={A: ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER})
    timeout = "1500" if lasts else "120000"
    with ModelCluster(1, {"t": 2}) as brokers, producing(brokers, delivery_timeout_ms=timeout) as producer:
        brokers.init_epoch = 0x7FFF
        for partition in range(2):
            producer.send("t", b"a%d" % partition, partition=partition)
        brokers.script = dropping(brokers, fate, drops)
        if lasts:
            with pytest.raises(RequestTimedOut, match=r"t-0 .*within 1\.5 s \(delivery\.timeout\.ms\)"):
                producer.flush()
            assert brokers.log == {A: [], B: [b"a1"]}
        else:
            producer.flush()
            assert brokers.log == {A: [b"a0"], B: [b"a1"]}
            ids = [number[0] for number in brokers.numbers[A]]
            assert ids[-1] > brokers.numbers[B][0][0]


def dropping(brokers: ModelCluster, first: Fate, drops: float) -> Callable[[int, list[Key]], Fate]:
    """Give the first request (if `drops` is infinite, all) this fate; then `drops` InitProducerId requests fail."""
    fates = iter([first])

    def script(node: int, keys: list[Key]) -> Fate:
        fate = next(fates, None)
        if fate is not None:
            brokers.init_drops = drops
        return fate or (first if drops == math.inf else Fate())

    return script


def test_a_short_time_for_delivery_is_named() -> None:
    with ModelCluster(1, {"t": 1}) as brokers, producing(brokers, delivery_timeout_ms="10") as producer:
        brokers.init_drops = math.inf
        producer.send("t", b"a")
        with pytest.raises(RequestTimedOut, match=r"within 0\.01 s \(delivery\.timeout\.ms\)") as failed:
            producer.flush()
        assert "request.timeout.ms" not in str(failed.value)
        assert " 0.0 s" not in str(failed.value)


def test_brokers_without_producer_ids() -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        brokers.init_version = None
        with producing(brokers) as producer:
            producer.send("t", b"a")
            producer.flush()
        assert [number[0] for number in brokers.numbers[A]] == [-1]
        with producing(brokers, enable_idempotence="true") as producer:
            producer.send("t", b"a")
            with pytest.raises(UnsupportedVersionError, match="InitProducerId"):
                producer.flush()


@pytest.mark.parametrize(
    ("more", "is_idempotent"),
    [
        ({}, True),
        ({"acks": "all", "enable.idempotence": "true"}, True),
        ({"enable.idempotence": "false"}, False),
        ({"acks": "1"}, False),
        ({"acks": "0"}, False),
        ({"retries": "0"}, False),
        ({"retries": "1"}, True),
    ],
)
def test_which_settings_make_a_producer_idempotent(more: dict[str, str], is_idempotent: bool) -> None:
    assert client_config({"bootstrap.servers": "a:1", **more}).is_idempotent is is_idempotent
    with ModelCluster(1, {"t": 1}) as brokers, Producer({**settings(brokers), **more}) as producer:
        for number in range(3):
            producer.send("t", b"%d" % number)
            producer.flush()
        wait_until(lambda: len(brokers.log[A]) == 3)
        first = 1001 if is_idempotent else -1
        wanted = [(first, 0, number) for number in range(3)] if is_idempotent else [(-1, -1, -1)] * 3
        assert brokers.numbers[A] == wanted


def test_idempotence_that_the_settings_rule_out_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"enable\.idempotence=true needs acks=all, not acks=1"):
        client_config({"bootstrap.servers": "a:1", "acks": "1", "enable.idempotence": "true"})
    with pytest.raises(ConfigError, match=r"enable\.idempotence=yes"):
        client_config({"bootstrap.servers": "a:1", "enable.idempotence": "yes"})


def _name_of(fate: Fate) -> str:
    """A test id that is the same in each process of a run, unlike the order of a set."""
    plain = vars(Fate())
    changed = {name: value for name, value in vars(fate).items() if value != plain[name]}
    return ", ".join(f"{name} {sorted(v) if isinstance(v, frozenset) else v}" for name, v in changed.items())


@pytest.mark.parametrize(
    "fate",
    [
        Fate(drop_before=True),
        Fate(answers=0),
        Fate(answers=2),
        Fate(wrong_id=True),
        Fate(left_out=frozenset([A])),
        Fate(left_out=frozenset([A, B])),
        Fate(delay_before=2.0),
        Fate(delay_after=2.0),
        Fate(throttle_ms=50),
        Fate(after={A: ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND, B: ErrorCode.REQUEST_TIMED_OUT}),
        Fate(after={A: ErrorCode.NETWORK_EXCEPTION}, moves={A: 1}, moves_before=False),
        Fate(moves={A: 1, B: 1}),
    ],
    ids=_name_of,
)
def test_each_answer_that_is_not_plain(fate: Fate) -> None:
    """Whatever happens to a request, each record is written once and in order."""
    topics = {"t": 2}
    with scripted(2, topics, fate) as brokers, producing(brokers, request_timeout_ms="1500") as producer:
        brokers.leaders = {A: 0, B: 0}
        for number in range(6):
            producer.send("t", b"%d" % number, partition=number % 2)
            if number % 2:
                producer.flush()
        assert brokers.log == {A: [b"0", b"2", b"4"], B: [b"1", b"3", b"5"]}


def test_a_second_topic_after_a_full_request() -> None:
    """The producer asks for metadata of a new topic while a Produce request is in flight."""
    with scripted(1, {"t": 1, "u": 1}, Fate(delay_after=0.3)) as brokers:
        with producing(brokers, batch_size="1000", max_request_size="1200") as producer:
            producer.send("t", bytes(1000))
            producer.send("t", bytes(1000))
            producer.send("u", b"second")
            producer.flush()
        assert {key: len(values) for key, values in brokers.log.items()} == {A: 2, ("u", 0): 1}


@pytest.mark.parametrize("idempotence", ["true", "false"])
def test_a_leader_that_moves_concerns_nobody_else(idempotence: str) -> None:
    """Batches in flight to other brokers are confirmed by their own responses and sent once."""
    keys = [("t", number) for number in range(3)]

    def script(node: int, asked: list[Key]) -> Fate:
        if keys[0] in asked and node == 0:
            return Fate(moves={keys[0]: 1})
        return Fate(delay_after=0.1 if node else 0)

    with ModelCluster(3, {"t": 3}, script) as brokers:
        with producing(brokers, enable_idempotence=idempotence) as producer:
            for number in range(3):
                producer.send("t", b"%d" % number, partition=number)
            producer.flush()
        assert brokers.log == {key: [b"%d" % key[1]] for key in keys}
        assert brokers.batches_received == {keys[0]: 2, keys[1]: 1, keys[2]: 1}


def test_a_partition_without_a_leader_holds_up_no_other() -> None:
    with ModelCluster(2, {"t": 2}) as brokers:
        with producing(brokers, batch_size="1000", max_request_size="2000", delivery_timeout_ms="60000") as producer:
            brokers.leaders = {A: -1, B: 1}
            for number in range(40):
                producer.send("t", b"%d " % number + bytes(1000), partition=number % 2)
            wait_until(lambda: len(brokers.log[B]) >= 15)
            assert not brokers.log[A]
            brokers.leaders[A] = 0
            producer.flush()
        found = {key: [int(value.split()[0]) for value in values] for key, values in brokers.log.items()}
        assert found == {A: list(range(0, 40, 2)), B: list(range(1, 40, 2))}


def test_a_partition_that_gets_no_leader_fails_in_time() -> None:
    with ModelCluster(2, {"t": 2}) as brokers:
        with producing(brokers, delivery_timeout_ms="2000") as producer:
            brokers.leaders = {A: -1, B: 1}
            producer.send("t", b"a", partition=0)
            producer.send("t", b"b", partition=1)
            told = r"t-0 were not written within 2 s \(delivery\.timeout\.ms\)"
            with pytest.raises(RequestTimedOut, match=told) as failed:
                producer.flush()
            assert brokers.log == {A: [], B: [b"b"]}
            brokers.leaders[A] = 0
            for call in (producer.flush, lambda: producer.send("t", b"c"), producer.close):
                with pytest.raises(RequestTimedOut) as again:
                    call()
                assert str(again.value) == str(failed.value)
        assert brokers.log[A] == []


def test_the_buffer_is_bounded() -> None:
    """`send` waits while buffer.memory is full, up to delivery.timeout.ms."""
    with ModelCluster(1, {"t": 1}) as brokers:
        with producing(brokers, batch_size="1000", buffer_memory="20000", delivery_timeout_ms="2000") as producer:
            producer.partitions("t")
            brokers.leaders[A] = -1
            sent = itertools.count()

            def send_on() -> None:
                while next(sent) < 1000:
                    producer.send("t", bytes(1000))

            with pytest.raises(RequestTimedOut, match="t-0"):
                send_on()
            assert 10 <= next(sent) <= 25


@pytest.mark.parametrize("driver", ["thread"], indirect=True)
def test_time_between_calls_is_not_held_against_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer with the caller's cluster has no thread, so it can't send between calls."""
    waited = 0.0
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + waited, sleep=time.sleep)
    monkeypatch.setattr(sender, "time", later)
    with ModelCluster(1, {"t": 1}) as brokers:
        given = settings(brokers, batch_size="10", delivery_timeout_ms="60000")
        with Cluster.connect(given) as cluster, Producer.of_cluster(cluster) as producer:
            producer.send("t", b"a full batch")
            waited = 100.0
            producer.flush()
        assert brokers.log[A] == [b"a full batch"]


def test_an_answer_that_came_long_ago_is_taken() -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        with producing(brokers, batch_size="10", max_request_size="100", request_timeout_ms="1000") as producer:
            producer.send("t", b"a full batch")
            time.sleep(1.2)
            producer.flush()
        assert brokers.batches_received[A] == 1


def test_a_throttled_broker_is_given_its_time_and_others_are_not_held_up() -> None:
    seen: list[tuple[float, int]] = []

    def script(node: int, keys: list[Key]) -> Fate:
        seen.append((time.monotonic(), node))
        return Fate(throttle_ms=300 if node == 0 else 0)

    with ModelCluster(2, {"t": 2}, script) as brokers:
        with producing(brokers, batch_size="10", max_request_size="100") as producer:
            for number in range(6):
                producer.send("t", b"number %06d" % number, partition=0 if number in (0, 5) else 1)
            producer.flush()
    first, second = (moment for moment, node in seen if node == 0)
    assert second - first >= 0.3
    *others, last = (node for _, node in seen)
    assert (sorted(others), last) == ([0, 1, 1, 1, 1], 0)  # either connection may be open first


def test_sequences_wrap_around() -> None:
    with ModelCluster(1, {"t": 1}) as brokers, producing(brokers) as producer:
        producer.send("t", b"0")
        producer.flush()
        near_the_end = 0x7FFFFFFF - 1
        [queue] = producer._sender._queues.values()
        assert queue.numbering is not None
        queue.numbering.next_sequence = near_the_end
        brokers.expect(A, 1001, near_the_end - 1)
        for number in range(1, 5):
            producer.send("t", b"%d" % number)
            producer.send("t", b"%d+" % number)
            producer.flush()
        assert [sequence for _, _, sequence in brokers.numbers[A]] == [0, near_the_end, 0, 2, 4]
        assert len(brokers.log[A]) == 9


@pytest.mark.parametrize(
    ("most", "idempotence", "wanted"), [(1, "true", 1), (3, "true", 3), (5, "true", 5), (9, "false", 1)]
)
def test_how_many_requests_are_in_flight(most: int, idempotence: str, wanted: int) -> None:
    """Without idempotence one batch per partition is in flight: resent after a later one, it would be out of order."""
    with ModelCluster(1, {"t": 1}) as brokers:
        behind = iter([0, wanted - 1])  # a partition's first batch is in flight alone
        brokers.script = lambda node, keys: Fate(behind=next(behind, 0), delay_before=0.05)
        more = {"batch_size": "100", "max_in_flight_requests_per_connection": str(most)}
        with producing(brokers, enable_idempotence=idempotence, **more) as producer:
            for number in range(12):
                producer.send("t", b"%0100d" % number)
            producer.flush()
        assert brokers.most_in_flight == wanted
        assert brokers.log[A] == [b"%0100d" % number for number in range(12)]


def test_requests_of_other_partitions_need_no_sequences() -> None:
    with scripted(1, {"t": 4}, Fate(behind=3)) as brokers:
        with producing(brokers, acks="1", batch_size="100", max_request_size="200") as producer:
            for number in range(4):
                producer.send("t", bytes(100), partition=number)
            producer.flush()
        assert brokers.most_in_flight == 4


def test_more_requests_in_flight_than_idempotence_allows() -> None:
    name = "max.in.flight.requests.per.connection"
    for prefix in ("", "kafka."):
        told = rf"^{prefix}{name}=6: set at most 5, .* or {prefix}enable\.idempotence=false$"
        with pytest.raises(ConfigError, match=told):
            client_config({"bootstrap.servers": "a:1", name: "6"}, prefix)
    assert client_config({"bootstrap.servers": "a:1", name: "6", "acks": "1"}).max_in_flight == 6


@pytest.mark.parametrize("driver", ["thread"], indirect=True)
@pytest.mark.parametrize("code", [ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.REQUEST_TIMED_OUT])
@pytest.mark.parametrize("is_appended", [False, True])
def test_requests_behind_one_that_failed(code: ErrorCode, is_appended: bool) -> None:
    """They wait until it is confirmed and keep their sequences; those of the other partition are sent once."""
    seen: Counter[Key] = Counter()

    def script(node: int, keys: list[Key]) -> Fate:
        seen.update(keys)
        if seen[A] == 3 and A in keys:
            return Fate(after={A: code}, behind=4) if is_appended else Fate(errors={A: code}, behind=4)
        return Fate()

    with ModelCluster(1, {"t": 2}, script) as brokers:
        with producing(brokers, batch_size="100") as producer:
            for number in range(20):
                producer.send("t", b"%0100d" % number, partition=number % 2)
            producer.flush()
        assert brokers.most_in_flight > 1
        for key in (A, B):
            assert brokers.log[key] == [b"%0100d" % number for number in range(key[1], 20, 2)]
        sequences = [(epoch, sequence) for _, epoch, sequence in brokers.numbers[A]]
        assert set(sequences) == {(0, number) for number in range(10)}
        assert brokers.batches_received[A] > 10
        assert brokers.batches_received[B] == 10


@pytest.mark.parametrize("count", [1, 3, 8])
def test_records_without_a_key_take_turns(count: int) -> None:
    with ModelCluster(2, {"t": count}) as brokers, producing(brokers, batch_size="1000") as producer:
        for number in range(60 * count):
            producer.send("t", b"%090d" % number)
        producer.flush()
        lengths = [len(values) for values in brokers.log.values()]
        assert max(lengths) - min(lengths) <= 11, lengths


def test_small_producers_spread_records_without_a_key() -> None:
    with ModelCluster(2, {"t": 4}) as brokers:
        for _ in range(100):
            with producing(brokers, acks="1") as producer:
                producer.send("t", b"v")
                producer.flush()
        lengths = [len(values) for values in brokers.log.values()]
    assert min(lengths) >= 7, lengths  # fails by chance in one of a hundred million runs


def test_records_without_a_key_avoid_partitions_without_a_leader() -> None:
    with ModelCluster(2, {"t": 3}) as brokers:
        brokers.leaders["t", 1] = -1
        with producing(brokers, batch_size="100") as producer:
            for _ in range(30):
                producer.send("t", bytes(100))
            producer.flush()
        assert [len(values) for values in brokers.log.values()] == [15, 0, 15]


def test_a_record_in_many_partitions_of_many_topics() -> None:
    topics = {f"topic-{number}": 20 for number in range(5)}
    with ModelCluster(3, topics) as brokers, producing(brokers, max_request_size="300") as producer:
        sent: Counter[Key] = Counter()
        for number, key in enumerate(list(brokers.log) * 3):
            producer.send(key[0], b"%030d" % number, partition=key[1])
            sent[key] += 1
        producer.flush()
        assert {key: len(values) for key, values in brokers.log.items()} == sent


def test_records_join_while_a_batch_waits_to_be_sent() -> None:
    """At a slow broker linger.ms makes no batch of each record: they would be sent one after the other."""
    got, goes_on = threading.Event(), threading.Event()

    def answer(node: int, keys: list[Key]) -> Fate:
        got.set()
        assert goes_on.wait(_SECONDS)
        return Fate()

    values = [b"%d" % number for number in range(12)]
    with ModelCluster(1, {"t": 1}, answer) as brokers:
        more = {"linger_ms": "0", "max_in_flight_requests_per_connection": "1"}
        try:
            with producing(brokers, **more) as producer:
                for value in values:
                    producer.send("t", value)
                    assert got.wait(_SECONDS)
                    time.sleep(0.02)
                goes_on.set()
                producer.flush()
        finally:
            goes_on.set()
        assert brokers.log == {A: values}
        assert len(brokers.requests) <= 3


def test_no_answer_at_all_ends_in_time() -> None:
    with ModelCluster(1, {"t": 1}, lambda node, keys: Fate(drop_before=True)) as brokers:
        with producing(brokers, delivery_timeout_ms="500") as producer:
            producer.send("t", b"a")
            with pytest.raises(RequestTimedOut, match=r"t-0 .*delivery\.timeout\.ms"):
                producer.flush()
            pauses = len(brokers.requests)
    assert 0 < pauses < 100, "with a pause between attempts"


def test_brokers_that_are_gone_end_in_time() -> None:
    brokers = ModelCluster(2, {"t": 2})
    with producing(brokers, delivery_timeout_ms="500") as producer:
        producer.send("t", b"a", partition=0)
        brokers.close()
        begin = time.monotonic()
        with pytest.raises(RequestTimedOut, match=r"within 0\.5 s \(delivery\.timeout\.ms\)"):
            producer.flush()
        assert time.monotonic() - begin < 15


def test_a_failed_producer_says_so_when_it_is_closed() -> None:
    def write(producer: Producer) -> None:
        with producer:
            producer.send("t", b"a")
            with suppress(ProtocolError):
                producer.flush()

    with ModelCluster(1, {"t": 1}, lambda node, keys: Fate(errors={A: ErrorCode.INVALID_RECORD})) as brokers:
        with pytest.raises(ProtocolError, match="INVALID_RECORD"):
            write(Producer(settings(brokers)))
        assert len(brokers.requests) == 1


def test_a_record_that_can_not_be_encoded_leaves_nothing_behind() -> None:
    with scripted(1, {"t": 2}) as brokers, producing(brokers) as producer:
        value: Any = "text"
        with pytest.raises(TypeError):
            producer.send("t", value, partition=0)
        producer.send("t", b"b", partition=1)
        producer.flush()
        assert (brokers.log[B], brokers.batches_received) == ([b"b"], {B: 1})


@pytest.mark.parametrize(
    ("record", "error", "told"),
    [
        ({"timestamp": 1 << 63}, ConfigError, r"timestamp 9223372036854775808: .* to 9223372036854775807"),
        ({"timestamp": 1 << 70}, ConfigError, "timestamp 1180591620717411303424"),
        ({"timestamp": -2}, ConfigError, "timestamp -2: .* or -1 for none"),
        ({"timestamp": 1.5}, TypeError, "float"),
        ({"topic": None}, TypeError, "send: the topic must be a str, not NoneType"),
        ({"topic": b"t"}, TypeError, "send: the topic must be a str, not bytes"),
        ({"value": "text"}, TypeError, "value must be bytes or None, not str"),
        ({"value": memoryview(b"12345678").cast("i")}, TypeError, "value .* memoryview of 'i'"),
        ({"key": 7}, TypeError, "key must be bytes or None, not int"),
        ({"partition": "0"}, TypeError, "str"),
        ({"headers": {"a": b"b"}}, TypeError, "headers must be pairs of str and bytes, not dict"),
        ({"headers": [(b"name", b"v")]}, TypeError, "name of header b'name' must be str, not bytes"),
        ({"headers": [("name", "v")]}, TypeError, "header 'name' must be bytes or None, not str"),
        ({"headers": [("name",)]}, TypeError, "must be a pair"),
    ],
)
def test_what_no_record_can_hold_is_named_when_it_is_sent(
    record: dict[str, Any], error: type[Exception], told: str
) -> None:
    with scripted(1, {"t": 1}) as brokers, producing(brokers) as producer:
        producer.send("t", b"a", partition=0)
        with pytest.raises(error, match=told):
            producer.send(**{"topic": "t", "value": b"v", "partition": 0, **record})
        producer.send("t", b"b", partition=0, timestamp=(1 << 63) - 1, headers=(pair for pair in [("h", None)]))
        producer.send("t", b"c", partition=0, timestamp=-1)
        producer.flush()
        assert (brokers.log[A], brokers.batches_received) == ([b"a", b"b", b"c"], {A: 1})


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize(
    "fate", [Fate(errors={("t", 0): 6}), Fate(drop_before=True), Fate(left_out=frozenset({("t", 0)}))]
)
def test_a_batch_is_sent_again_as_often_as_retries_says(retries: int, fate: Fate) -> None:
    with ModelCluster(1, {"t": 1}, lambda node, keys: fate) as brokers:
        settings = {"bootstrap.servers": brokers.servers, "retries": retries, "retry.backoff.ms": 10}
        producer = Producer(settings)
        delivery = producer.send("t", b"record")
        with pytest.raises((ProtocolError, ConnectionFailed)):
            producer.flush()
        with pytest.raises((ProtocolError, ConnectionFailed)):
            delivery.result(0)
        producer.abort()
        assert len(brokers.requests) == 1 + retries


def test_idempotence_without_retries_is_refused_as_by_kafka() -> None:
    with pytest.raises(ConfigError, match=r"enable\.idempotence=true needs retries above 0"):
        client_config({"bootstrap.servers": "h:1", "retries": "0", "enable.idempotence": "true"})
