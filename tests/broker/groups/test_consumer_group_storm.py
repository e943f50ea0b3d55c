"""A group whose members come, go and fall silent, by both protocols, while the broker is killed.

Nothing is skipped, and __consumer_offsets shows that no partition ever had two holders.
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer as ConfluentConsumer

from spark_klog.broker.groups.consumer_records import decode_consumer_key, load_record
from spark_klog.broker.groups.membership import Membership
from spark_klog.client import Admin, Consumer, Producer
from spark_klog.errors import KlogError
from spark_klog.protocol.tables.groups import CONSUMER_GROUP_METADATA_KEY
from tests.support.servers.broker import KlogBroker

_SECONDS = 60 if "SPARK_KLOG_KILLS" in os.environ else 12
_PARTITIONS, _MEMBERS, _GROUP = 6, 5, "g"
_SETTINGS = {
    "group.consumer.heartbeat.interval.ms": 300,
    "group.consumer.session.timeout.ms": 2000,
    "group.min.session.timeout.ms": 1000,
}


class Member:
    """A member by one of the protocols, until its time is over; then it leaves, or just falls silent."""

    def __init__(self, servers: str, assignor: str, seed: random.Random) -> None:
        self.values: set[bytes] = set()
        self.failure: BaseException | None = None
        self._until = time.monotonic() + seed.uniform(1, 5)
        self._falls_silent = seed.random() < 0.3
        settings: dict[str, Any] = {"bootstrap.servers": servers, "group.id": _GROUP, "auto.offset.reset": "earliest"}
        settings |= {"enable.auto.commit": False}
        if seed.random() < 0.6:
            settings["group.protocol"] = "consumer"
        else:
            settings |= {"group.protocol": "classic", "session.timeout.ms": 2000, "heartbeat.interval.ms": 300}
            settings["partition.assignment.strategy"] = assignor
        is_ours = self._falls_silent or seed.random() < 0.7
        self.thread = threading.Thread(target=self._run, args=(self._ours if is_ours else self._theirs, settings))
        self.thread.start()

    def _run(self, member: Any, settings: dict[str, Any]) -> None:
        try:
            member(settings)
        except BaseException as error:
            self.failure = error

    def _ours(self, settings: dict[str, Any]) -> None:
        consumer = Consumer(settings)
        consumer.subscribe(["t"])
        while time.monotonic() < self._until:
            self.values |= {record.value or b"" for record in consumer.poll(0.1)}
            try:
                consumer.commit()
            except KlogError:
                pass  # the group has rebalanced: the records are read again
        if self._falls_silent and consumer._group is not None:
            consumer._group._heartbeats.stop(time.monotonic() + 5)  # type: ignore[attr-defined]
            consumer._group.close_sockets()
        else:
            consumer.close()

    def _theirs(self, settings: dict[str, Any]) -> None:
        consumer = ConfluentConsumer(settings | {"log_level": 0})
        consumer.subscribe(["t"])
        while time.monotonic() < self._until:
            message = consumer.poll(0.1)
            if message is not None and message.error() is None:
                self.values.add(message.value() or b"")
                consumer.commit(message, asynchronous=True)
        consumer.close()


@pytest.mark.test_all("long")
@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
def test_a_storm_of_members_and_kills(server_dir: Path, assignor: str) -> None:
    seed = random.Random()
    settings = [word for name, value in _SETTINGS.items() for word in ("--set", f"{name}={value}")]
    with KlogBroker(server_dir, *settings) as broker:
        servers = broker.bootstrap_servers
        with Admin({"bootstrap.servers": servers}) as admin:
            admin.create_topic("t", _PARTITIONS)
        members: list[Member] = []
        sent = 0
        end = time.monotonic() + _SECONDS
        kill_at = time.monotonic() + 3
        with Producer({"bootstrap.servers": servers, "linger.ms": 5}) as producer:
            while time.monotonic() < end:
                while sum(member.thread.is_alive() for member in members) < _MEMBERS:
                    members.append(Member(servers, assignor, seed))
                for _ in range(5):
                    producer.send("t", b"%d" % sent, partition=sent % _PARTITIONS)
                    sent += 1
                time.sleep(0.05)
                if time.monotonic() > kill_at:
                    broker.kill()
                    broker.start()
                    kill_at = time.monotonic() + seed.uniform(2, 4)
        for member in members:
            member.thread.join(60)
        assert [member.failure for member in members if member.failure is not None] == []
        values = set().union(*(member.values for member in members))
        last = {"group.id": _GROUP, "group.protocol": "consumer", "auto.offset.reset": "earliest"}
        with Consumer({"bootstrap.servers": servers} | last) as consumer:
            consumer.subscribe(["t"])
            end = time.monotonic() + 30
            while len(values) < sent and time.monotonic() < end:
                values |= {record.value or b"" for record in consumer.poll(0.2)}
        assert values == {b"%d" % one for one in range(sent)}
        assert _check_holders(servers) > 10


def _check_holders(servers: str) -> int:
    """Read the group's records as a restart does; the number of its epochs. No partition has two holders."""
    membership = Membership()
    epochs: set[int] = set()
    with Consumer({"bootstrap.servers": servers, "auto.offset.reset": "earliest", "check.crcs": True}) as consumer:
        consumer.assign([("__consumer_offsets", 0, 0)])
        batch_at = -1
        while records := consumer.poll(1.0):
            for record in records:
                key = decode_consumer_key(int.from_bytes((record.key or b"")[:2], "big"), record.key or b"")
                if record.timestamp != batch_at:  # rows of one batch have one timestamp
                    held = [partition for member in membership.members.values() for partition in member.held]
                    assert len(held) == len(set(held)), record.offset
                    batch_at = record.timestamp
                if key is None:
                    continue
                if key.kind is CONSUMER_GROUP_METADATA_KEY and record.value is None:
                    membership = Membership()
                else:
                    load_record(membership, key, record.value)
                    epochs.add(membership.epoch)
    return len(epochs)
