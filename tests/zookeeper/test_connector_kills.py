"""Kill processes with a ConsumerConnector while their group rebalances."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from confluent_kafka import Producer
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import ZooKeeperServer
from tests.support.servers.shared_tree import create_topic, leaders
from tests.support.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:No chroot path exists")

_PROGRAM = Path(__file__).parent / "connector_program.py"
_PARTITIONS = 12
_MEMBERS = 4
_KILLS = int(os.environ.get("SPARK_KLOG_KILLS", "1"))


class Process:
    """A member in its own process; `read` maps (partition, offset) to the value of each message that it printed."""

    def __init__(self, connect: str, group: str, topic: str, log: Path) -> None:
        settings = {"zookeeper.connect": connect, "group.id": group, "auto.offset.reset": "smallest"}
        settings |= {"zookeeper.session.timeout.ms": "2000", "auto.commit.interval.ms": "100"}
        settings |= {"rebalance.backoff.ms": "10000"}
        self.read: dict[tuple[int, int], str] = {}
        self.name = ""
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), json.dumps(settings), topic, "1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = line.split()
            if not line.endswith("\n"):
                continue
            if words[0] == "joined":
                self.name = words[1]
            else:
                self.read[int(words[1]), int(words[2])] = words[3]

    def end(self, *, kill: bool) -> None:
        assert self._process.stdin is not None
        if kill:
            self._process.kill()
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._thread.join(10)
            self._log.close()


def test_killed_while_it_rebalances(zookeeper: ZooKeeperServer, server_dir: Path) -> None:
    """Members join and are killed at random: no message is lost, and the survivors own all partitions."""
    rng = random.Random(20)
    connect = f"{zookeeper.connect}/kills"
    arguments = ["--broker-id", "0", "--zookeeper", connect, "--set", "auto.create.topics.enable=false"]
    with KlogBroker(server_dir, *arguments) as broker:
        create_topic(broker.bootstrap_servers, "t", _PARTITIONS)
        wait_until(lambda: len(leaders(broker.bootstrap_servers, "t")) == _PARTITIONS)
        tree = KazooClient(connect)
        tree.start(20)
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "acks": "all", "log_level": 0})
        log = server_dir / "members.log"
        members = [Process(connect, "g", "t", log) for _ in range(_MEMBERS)]
        everybody = list(members)
        sent = 0
        try:
            for _ in range(_KILLS):
                for _ in range(100):
                    producer.produce("t", str(sent), partition=sent % _PARTITIONS)
                    sent += 1
                assert producer.flush(20) == 0
                wait_until(lambda: all(member.name for member in members), seconds=60)
                # kill one member while another one joins: both change the ownership
                newcomer = Process(connect, "g", "t", log)
                everybody.append(newcomer)
                if rng.random() < 0.5:
                    wait_until(lambda: newcomer.name, seconds=60)  # noqa: B023
                victim = members.pop(rng.randrange(len(members)))
                victim.end(kill=True)
                members.append(newcomer)
            wait_until(lambda: all(member.name for member in members), seconds=60)

            def owned() -> dict[str, int]:
                found: Counter[str] = Counter()
                for number in range(_PARTITIONS):
                    try:
                        found[tree.get(f"/consumers/g/owners/t/{number}")[0].decode().rpartition("-")[0]] += 1
                    except NoNodeError:
                        return {}
                return dict(found)

            expected = {member.name: _PARTITIONS // _MEMBERS for member in members}
            wait_until(lambda: owned() == expected, seconds=60)
            wait_until(
                lambda: {value for each in everybody for value in each.read.values()} >= set(map(str, range(sent))),
                seconds=60,
            )
            for each in everybody:  # every message was read at the offset where it was written
                for (partition, offset), value in each.read.items():
                    assert int(value) % _PARTITIONS == partition
                    assert int(value) // _PARTITIONS == offset
        finally:
            for member in members:
                member.end(kill=False)
            tree.stop()
            tree.close()
