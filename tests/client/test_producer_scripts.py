"""The producer through random sequences of trouble, compared with what the brokers' logs hold at the end.

Each run is a seed: leaders move while requests are under way, connections break before and after an append, answers
are late, double, partial, missing or errors. SPARK_KLOG_PRODUCER_SECONDS runs seeds for so long.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest

from spark_klog.client.cluster import Cluster
from spark_klog.client.producer import Producer
from spark_klog.errors import ErrorCode, KlogError
from tests.support.model_cluster import Fate, Key, ModelCluster

_SECONDS = float(os.environ.get("SPARK_KLOG_PRODUCER_SECONDS", "0"))
_SEEDS = 6
NODES, TOPICS = 3, {"t": 3, "u": 2}
BEFORE = [
    ErrorCode.CORRUPT_MESSAGE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.NOT_ENOUGH_REPLICAS,
    ErrorCode.KAFKA_STORAGE_ERROR,
]
AFTER = [ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND, ErrorCode.NETWORK_EXCEPTION]
FINAL = [ErrorCode.INVALID_RECORD, ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.MESSAGE_TOO_LARGE]
SETTINGS = {
    "retry.backoff.ms": "1",
    "retry.backoff.max.ms": "10",
    "request.timeout.ms": "250",
    "delivery.timeout.ms": "60000",
    "socket.connection.setup.timeout.ms": "5000",
    "batch.size": "200",
    "max.request.size": "1500",
}


class Trouble:
    """Draws what becomes of each Produce request; with `final` one of them in fifty ends the producer."""

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
            lambda: Fate(delay_before=0.3) if draw.random() < 0.1 else Fate(),
            lambda: Fate(delay_after=0.3) if draw.random() < 0.1 else Fate(),
        ]
        return draw.choice(unusual)() if draw.random() < 0.5 else Fate()


def _run(seed: int, idempotence: bool, final: bool) -> None:
    draw = random.Random(-seed)
    sent: dict[Key, list[bytes]] = {}
    acknowledged: dict[Key, int] = {}
    failure: KlogError | None = None
    with ModelCluster(NODES, TOPICS, Trouble(seed, final)) as brokers:
        acks = "all" if idempotence else draw.choice(["1", "all"])
        settings = {"bootstrap.servers": brokers.servers, **SETTINGS, "acks": acks}
        settings["enable.idempotence"] = str(idempotence).lower()
        with Cluster.connect(settings) as cluster:
            producer = Producer(cluster)
            try:
                for number in range(250):
                    topic = draw.choice(list(TOPICS))
                    partition = draw.randrange(TOPICS[topic])
                    value = b"%d" % number + bytes(draw.randrange(80))
                    sent.setdefault((topic, partition), []).append(value)
                    producer.send(topic, value, partition=partition)
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
        assert final or failure is None, failure
        _check(brokers, sent, acknowledged, idempotence)


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


def _seeds() -> Iterator[int]:
    if not _SECONDS:
        yield from range(_SEEDS)
        return
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        yield random.randrange(1 << 32)


@pytest.mark.timeout(max(600, 2 * _SECONDS))
def test_random_trouble() -> None:
    for seed in _seeds():
        for idempotence, final in ((True, False), (False, False), (True, True)):
            try:
                _run(seed, idempotence, final)
            except AssertionError as error:
                error.add_note(f"seed {seed}, idempotence {idempotence}, final errors {final}")
                raise
