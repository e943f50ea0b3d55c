"""The producer under random faults, checked against the brokers' logs.

A seed makes a run: leaders move while requests are in flight, connections break before and after an append, responses
are late, duplicated, partial, missing or errors. SPARK_KLOG_PRODUCER_SECONDS runs random seeds for so long.
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable, Collection, Iterator

import pyarrow as pa
import pytest

from spark_klog.client import settings as settings_module
from spark_klog.client.producer.outcomes import Outcomes
from spark_klog.client.producer.producer import Producer
from spark_klog.client.producer.queues import Queue
from spark_klog.client.producer.receipts import Delivery, RecordMetadata
from spark_klog.errors import ErrorCode, KlogError
from tests.support.brokers.faults import Fault, empty, error, late
from tests.support.brokers.model_cluster import Fate, Key, ModelCluster
from tests.support.brokers.scripted_broker import ScriptedCluster

_SECONDS = float(os.environ.get("SPARK_KLOG_PRODUCER_SECONDS", "0"))
NODES, TOPICS = 3, {"t": 3, "u": 2}
BEFORE = [
    ErrorCode.CORRUPT_MESSAGE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.NOT_ENOUGH_REPLICAS,
    ErrorCode.KAFKA_STORAGE_ERROR,
]
AFTER = [ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND, ErrorCode.NETWORK_EXCEPTION]
FINAL = [ErrorCode.INVALID_RECORD, ErrorCode.TOPIC_AUTHORIZATION_FAILED]
SETTINGS = {
    "retry.backoff.ms": "1",
    "retry.backoff.max.ms": "10",
    "request.timeout.ms": "800",
    "delivery.timeout.ms": "60000",
    "socket.connection.setup.timeout.ms": "5000",
    "batch.size": "200",
    "max.request.size": "1500",
}


Told = tuple[bytes, "KlogError | None", "RecordMetadata | None"]


class Trouble:
    """Draw the fate of each Produce request; with `final` one in fifty gets an error that ends the producer."""

    def __init__(self, seed: int, final: bool) -> None:
        self._random = random.Random(seed)
        self._final = final

    def __call__(self, node: int, keys: list[Key]) -> Fate:
        draw = self._random
        some = [key for key in keys if draw.random() < 0.5] or [draw.choice(keys)]
        if self._final and draw.random() < 0.02:
            return Fate(errors={draw.choice(keys): draw.choice(FINAL)})
        move = {draw.choice(keys): draw.randrange(NODES)}
        unusual = [
            lambda: Fate(drop_before=True),
            lambda: Fate(answers=0),
            lambda: Fate(answers=2),
            lambda: Fate(wrong_id=True),
            lambda: Fate(left_out=frozenset(some)),
            lambda: Fate(errors={key: draw.choice(BEFORE) for key in some}),
            lambda: Fate(after={key: draw.choice(AFTER) for key in some}),
            lambda: Fate(moves=move),
            lambda: Fate(moves=move, moves_before=False, answers=draw.randrange(2)),
            lambda: Fate(delay_before=draw.uniform(0, 0.02)),
            lambda: Fate(delay_after=draw.uniform(0, 0.02)),
            lambda: Fate(throttle_ms=draw.randrange(20)),
            lambda: Fate(delay_before=0.9) if draw.random() < 0.1 else Fate(),
            lambda: Fate(delay_after=0.9) if draw.random() < 0.1 else Fate(),
        ]
        return draw.choice(unusual)() if draw.random() < 0.5 else Fate()


def _run(seed: int, idempotence: bool, final: bool) -> int:
    """Run a seed and check the outcome; return the most requests in flight to a broker."""
    draw = random.Random(-seed)
    sent: dict[Key, list[bytes]] = {}
    acknowledged: dict[Key, int] = {}
    deliveries: list[tuple[bytes, Delivery]] = []
    told: dict[Key, list[Told]] = {}
    failure: KlogError | None = None
    with ModelCluster(NODES, TOPICS, Trouble(seed, final)) as brokers:
        acks = "all" if idempotence else draw.choice(["1", "all"])
        settings = {"bootstrap.servers": brokers.servers, **SETTINGS, "acks": acks}
        settings["enable.idempotence"] = str(idempotence).lower()
        settings.setdefault("max.in.flight.requests.per.connection", str(draw.choice([1, 2, 5, 5])))
        brokers.takes_any_first = draw.random() < 0.5
        brokers.max_bytes = draw.choice([160, 1000])  # the size of a record, or of a whole batch
        weights = {topic: [draw.choice([1, 20]) for _ in range(count)] for topic, count in TOPICS.items()}
        settings["linger.ms"] = str(draw.choice([0, 1, 600_000]))
        producer = Producer(settings)
        try:
            try:
                for number in range(250):
                    topic = draw.choice(list(TOPICS))
                    [partition] = draw.choices(range(TOPICS[topic]), weights[topic])
                    value = b"%d" % number + bytes(draw.randrange(80))
                    sent.setdefault((topic, partition), []).append(value)
                    callback = functools.partial(_tell, told.setdefault((topic, partition), []), value)
                    delivery = producer.send(topic, value, partition=partition, on_delivery=callback)
                    deliveries.append((value, delivery))
                    if draw.random() < 0.04:
                        producer.flush()
                        acknowledged = {key: len(values) for key, values in sent.items()}
                producer.flush()
                acknowledged = {key: len(values) for key, values in sent.items()}
            except KlogError as error:
                failure = error
                with pytest.raises(type(error)):
                    producer.send("t", b"after the failure", partition=0)
                with pytest.raises(type(error)):
                    producer.flush()
        finally:
            producer.abort()
        _check_told(brokers, deliveries, told, failure, idempotence)
        assert final or failure is None, failure
        _check(brokers, sent, acknowledged, idempotence)
        return brokers.most_in_flight


def _tell(told: list[Told], value: bytes, error: KlogError | None, metadata: RecordMetadata | None) -> None:
    told.append((value, error, metadata))


def _check_told(
    brokers: ModelCluster,
    deliveries: list[tuple[bytes, Delivery]],
    told: dict[Key, list[Told]],
    failure: KlogError | None,
    idempotence: bool,
) -> None:
    """Check that callbacks ran once for each record, in order, with the offsets of the log."""
    by_value = {value: (error, metadata) for entries in told.values() for value, error, metadata in entries}
    assert len(by_value) == sum(map(len, told.values())), "a record was told of twice"
    assert by_value.keys() >= {value for value, _ in deliveries}
    for key, entries in told.items():
        numbers = [int(value.split(b"\0")[0]) for value, error, _ in entries if error is None]
        assert numbers == sorted(numbers), f"{key}: confirmed in another order"
    for value, delivery in deliveries:
        assert delivery.done()
        error, metadata = by_value[value]
        assert error is delivery.exception(0)
        if metadata is None:
            assert failure is not None
            continue
        assert metadata == delivery.result(0)
        values = brokers.log[delivery.topic, delivery.partition]
        assert value in values
        if metadata.offset >= 0 and idempotence:
            assert values[metadata.offset] == value


def _check(
    brokers: ModelCluster, sent: dict[Key, list[bytes]], acknowledged: dict[Key, int], idempotence: bool
) -> None:
    with brokers.lock:
        log = {key: list(values) for key, values in brokers.log.items()}
    for key, values in log.items():
        wanted = sent.get(key, [])
        seen = values if idempotence else list(dict.fromkeys(values))
        assert seen == wanted[: len(seen)], f"{key}: in order, nothing else, with idempotence nothing twice"
        assert len(seen) >= acknowledged.get(key, 0), f"{key}: an acknowledged record is missing"


def _seeds(of_make: range) -> Iterator[int]:
    if not _SECONDS:
        yield from of_make
        return
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        yield random.randrange(1 << 32)


@pytest.mark.usefixtures("driver")
@pytest.mark.timeout(max(600, 2 * _SECONDS))
@pytest.mark.parametrize(
    "seeds", [range(1), *([] if _SECONDS else [pytest.param(range(1, 6), marks=pytest.mark.test_all("long"))])], ids=str
)
def test_random_trouble(seeds: range) -> None:
    most = 0
    for seed in _seeds(seeds):
        for idempotence, final in ((True, False), (False, False), (True, True)):
            try:
                most = max(most, _run(seed, idempotence, final))
            except Exception as error:
                case = f"seed {seed}, idempotence {idempotence}, final errors {final}"
                raise AssertionError(case) from error
    assert most >= 2


KEY = ("t", 0)
_LOST, _REFUSED = Fate(left_out=frozenset([KEY])), Fate(errors={KEY: ErrorCode.NOT_LEADER_OR_FOLLOWER})
#: Fates of the first requests, of one batch each.
SCRIPTS = {
    "the first batch is refused, with others behind it": [_REFUSED],
    # at its third attempt more than five batches follow it, some of them already confirmed
    "an answer is lost twice": [Fate(), _LOST, _LOST, *[Fate()] * 4, _LOST],
}


def _run_script(fates: list[Fate]) -> None:
    left = iter(fates)
    values = [b"%d" % number for number in range(12)]
    with ModelCluster(1, {"t": 1}, lambda *_: next(left, Fate())) as brokers:
        brokers.takes_any_first = True
        settings = {"bootstrap.servers": brokers.servers, **SETTINGS, "batch.size": "0"}
        with Producer(settings) as producer:  # batches of `send_arrow` wait for the flush
            producer.send_arrow(pa.table({"value": values, "partition": [0] * len(values)}), "t")
        assert brokers.log[KEY] == values


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("fates", SCRIPTS.values(), ids=SCRIPTS)
def test_scripts(fates: list[Fate]) -> None:
    _run_script(fates)


def _new_sequences(patch: pytest.MonkeyPatch) -> None:
    """Batches that are sent again get the next sequences."""
    put_off = Outcomes.put_off

    def put_off_anew(self: Outcomes, queues: Collection[Queue], error: Exception) -> None:
        for queue in queues:
            if queue.numbering is not None and not queue.in_flight:
                queue.renumber(queue.numbering)
        put_off(self, queues, error)

    patch.setattr(Outcomes, "put_off", put_off_anew)


def _no_waiting(patch: pytest.MonkeyPatch) -> None:
    """Batches follow the first batch, or a failed one, before the leader has confirmed it."""
    patch.setattr(Queue, "is_open", property(lambda self: True, lambda self, value: None))
    patch.setattr(
        Queue, "next", lambda self, now, most: next((one for one in self.batches if not one.is_in_flight), None)
    )


def _too_many(patch: pytest.MonkeyPatch) -> None:
    """More batches are in flight than brokers remember to find duplicates."""
    patch.setattr(settings_module, "_MOST_IDEMPOTENT", 12)
    patch.setitem(SETTINGS, "max.in.flight.requests.per.connection", "12")


def _wrong_batch(patch: pytest.MonkeyPatch) -> None:
    """A response confirms the oldest batch, whichever batch it is for."""
    confirm = Queue.confirm
    patch.setattr(Queue, "confirm", lambda self, batch: confirm(self, self.batches[0]))


def _others_renumbered(patch: pytest.MonkeyPatch) -> None:
    """A batch whose response was lost gets another epoch, so that the broker can't recognise the duplicate."""
    put_off = Outcomes.put_off

    def put_off_renumbered(self: Outcomes, queues: Collection[Queue], error: Exception) -> None:
        for queue in queues:
            queue.must_renumber = queue.numbering is not None
        put_off(self, queues, error)

    patch.setattr(Outcomes, "put_off", put_off_renumbered)


def _run_all() -> None:
    for fates in SCRIPTS.values():
        _run_script(fates)
    for seed in range(100):
        _run(seed, True, False)


@pytest.mark.parametrize(
    "fault",
    [
        _no_waiting,
        _too_many,
        _others_renumbered,
        *(pytest.param(fault, marks=pytest.mark.test_all("long")) for fault in (_new_sequences, _wrong_batch)),
    ],
)
def test_planted_faults_are_found(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The logs show each planted fault, or the producer fails."""
    fault(monkeypatch)
    monkeypatch.setitem(SETTINGS, "delivery.timeout.ms", "3000")
    with pytest.raises((AssertionError, KlogError, OverflowError)):
        _run_all()


@pytest.mark.parametrize("fault", [error(ErrorCode.NOT_LEADER_OR_FOLLOWER), empty()])
def test_a_move_with_five_requests_in_flight_is_one_retry(fault: Fault) -> None:
    with ScriptedCluster({"t": 1}) as brokers:
        brokers.on("Produce", late(1), *[fault] * 5)
        settings = {"batch.size": "1", "linger.ms": "0", "retries": "1"}
        with Producer({"bootstrap.servers": brokers.bootstrap_servers, **settings}) as producer:
            for number in range(12):  # the first one alone, then five at a time
                producer.send("t", b"%d" % number)
        assert brokers.values("t", 0) == [b"%d" % number for number in range(12)]
        assert brokers.count("Produce") == 17
