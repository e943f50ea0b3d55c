"""Producers and consumers while the broker is killed; a checker searches their history for anomalies.

Each run is one seed. CI has a short one; `make soak`, which sets SPARK_KLOG_KILLS, ten of a minute.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.support.checker.history import History, Outcome
from tests.support.checker.log_checker import anomalies
from tests.support.checker.log_mutations import MUTATIONS
from tests.support.checker.recording_clients import (
    PARTITIONS,
    Client,
    IdempotentClient,
    RecordingConsumer,
    TransactionalClient,
    read_finally,
)
from tests.support.servers.broker import KlogBroker

_IS_SOAK = "SPARK_KLOG_KILLS" in os.environ
_RUNS, _RUN_SECONDS = (10, 60) if _IS_SOAK else (1, 5)
#: Seconds until the next kill if the broker started after the kill was due.
_LEAST_UPTIME = 0.2
_logger = logging.getLogger(__name__)


@pytest.fixture
def broker(server_dir: Path) -> Iterator[KlogBroker]:
    settings = ("internal.segment.bytes=200000", "log.index.interval.bytes=500")
    with KlogBroker(server_dir, *(word for setting in settings for word in ("--set", setting))) as running:
        admin = AdminClient({"bootstrap.servers": running.bootstrap_servers, "log_level": 0})
        admin.create_topics([NewTopic("t", PARTITIONS, 1)])["t"].result(20)
        yield running


def _ends(broker: KlogBroker) -> dict[int, int]:
    reader = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "none", "log_level": 0})
    ends = {number: reader.get_watermark_offsets(TopicPartition("t", number), 30)[1] for number in range(PARTITIONS)}
    reader.close()
    return ends


def _run(broker: KlogBroker, seed: int, seconds: float, producers: dict[str, type[Client]]) -> tuple[History, str]:
    """Run clients while the broker is killed; return the history without its final reads, and its figures."""
    history, rng = History(), Random(seed)
    common = (broker.bootstrap_servers, "t", history, seed)
    consumers = [
        RecordingConsumer("committed-0", *common, is_committed=True, lives_for=2 * seconds),
        RecordingConsumer("committed-1", *common, is_committed=True, lives_for=8),
        RecordingConsumer("uncommitted-0", *common, is_committed=False, lives_for=13),
    ]
    writers = [kind(name, *common) for name, kind in producers.items()]
    kills, killed_at = 0, time.monotonic()
    end = killed_at + seconds
    try:
        while time.monotonic() < end:
            due = killed_at + rng.uniform(0.5, 3)
            time.sleep(max(_LEAST_UPTIME, due - time.monotonic()))
            killed_at = time.monotonic()
            broker.kill()
            broker.start()
            kills += 1
        time.sleep(0.5)
        for writer in writers:
            writer.stop()
        for writer in writers:
            writer.finish()
        ends = _ends(broker)
        for consumer in consumers:
            consumer.read_up_to(ends)
    finally:
        for client in (*writers, *consumers):
            client.stop()
    for consumer in consumers:
        consumer.finish()
    outcomes = Counter((write.is_transaction, write.outcome) for write in history.writes)
    single, whole = (
        ", ".join(f"{outcomes[is_transaction, outcome]} {outcome.value}" for outcome in Outcome)
        for is_transaction in (False, True)
    )
    errors = sum((client.errors for client in (*writers, *consumers)), Counter[str]())
    return history, (
        f"seed {seed}: {kills} kills; {sum(ends.values())} offsets; "
        f"idempotent records: {single}; transactions: {whole}; "
        f"{len(history.reads)} polls of {sum(len(read.seen) for read in history.reads)} records by "
        f"{len({read.process for read in history.reads})} consumers; errors {dict(errors)}"
    )


@pytest.mark.parametrize("seed", range(_RUNS))
def test_no_anomaly_when_the_broker_is_killed(broker: KlogBroker, seed: int) -> None:
    """The checker finds no anomaly, and each fault that is planted into the same history."""
    producers: dict[str, type[Client]] = {f"idempotent-{number}": IdempotentClient for number in range(2)}
    producers |= {f"transactional-{number}": TransactionalClient for number in range(6)}
    history, figures = _run(broker, seed, _RUN_SECONDS, producers)
    read_finally(broker.bootstrap_servers, "t", history)
    _logger.info("%s", figures)
    assert [str(anomaly) for anomaly in anomalies(history)] == [], figures
    outcomes = Counter((write.is_transaction, write.outcome) for write in history.writes)
    assert min(outcomes[key] for key in ((False, Outcome.OK), (True, Outcome.OK), (True, Outcome.FAILED))) > 5, figures
    for plant, kind in MUTATIONS.items():
        planted = plant(history, Random(seed))
        assert planted is not None, (plant, figures)
        found = anomalies(planted[0])
        assert {anomaly.kind for anomaly in found} == {kind}, (plant, figures)
        assert planted[1] <= {(anomaly.partition, anomaly.value) for anomaly in found}, (plant, figures)
