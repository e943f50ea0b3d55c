"""Our consumers and Kafka 0.10.2.2's own (`--zookeeper`) in one group, and what Kafka's tools report about it."""

from __future__ import annotations

import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Producer
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from spark_klog.classic import ConsumerConnector, KafkaStream
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import ZooKeeperServer, kafka_libs, versions
from tests.support.servers.shared_kafka import SharedKafkas
from tests.support.servers.shared_tree import create_topic, leaders, old_tool
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.peer,
    pytest.mark.test_all("version"),
    pytest.mark.filterwarnings("ignore:No chroot path exists"),
]

_PARTITIONS = 6


@pytest.fixture(scope="module", params=["ours", *versions("0.10.2.2", "3.9.1")])
def place(
    request: pytest.FixtureRequest, zookeeper: ZooKeeperServer, module_server_dir: Path, shared_kafkas: SharedKafkas
) -> Iterator[tuple[str, str]]:
    """(bootstrap servers, zookeeper.connect) of each kind of broker."""
    if request.param == "ours":
        connect = f"{zookeeper.connect}/beside"
        arguments = ["--broker-id", "0", "--zookeeper", connect, "--set", "auto.create.topics.enable=false"]
        with KlogBroker(module_server_dir / "ours", *arguments) as broker:
            yield broker.bootstrap_servers, connect
        return
    kafka = shared_kafkas.get(request.param)
    assert kafka.zookeeper_connect is not None
    yield kafka.bootstrap_servers, kafka.zookeeper_connect


class Theirs:
    """A ConsoleConsumer of Kafka; `read` has the values that it printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.read: list[int] = []
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.read.append(int(line))

    def stop(self) -> None:
        """Stop it with SIGTERM, so that it commits."""
        self._process.terminate()
        self._process.wait(30)
        self._thread.join(10)


@contextmanager
def console_consumer(connect: str, topic: str, log: Path, *more: str) -> Iterator[Theirs]:
    command = ["java", "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
    command += ["-cp", f"{kafka_libs('0.10.2.2')}/*", "kafka.tools.ConsoleConsumer", "--zookeeper", connect]
    command += ["--topic", topic, *more]
    for setting in (f"group.id={topic}", "zookeeper.session.timeout.ms=6000"):
        command += ["--consumer-property", setting]
    with log.open("ab") as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True)
    theirs = Theirs(process)
    try:
        yield theirs
    finally:
        process.kill()
        process.wait()


class Ours:
    def __init__(self, stream: KafkaStream) -> None:
        self.read: list[int] = []
        self._thread = threading.Thread(target=self._follow, args=(stream,), daemon=True)
        self._thread.start()

    def _follow(self, stream: KafkaStream) -> None:
        for message in stream:
            self.read.append(int(message.value or b""))

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


def produce(servers: str, topic: str, numbers: range) -> None:
    producer = Producer({"bootstrap.servers": servers, "acks": "all", "log_level": 0})
    for number in numbers:
        producer.produce(topic, str(number), partition=number % _PARTITIONS)
    assert producer.flush(20) == 0


def test_one_group(place: tuple[str, str], topic: str, server_dir: Path) -> None:
    """The names of topic and group are unique to the test, since the brokers are shared."""
    servers, connect = place
    create_topic(servers, topic, _PARTITIONS)
    wait_until(lambda: sorted(leaders(servers, topic)) == list(range(_PARTITIONS)))
    wait_until(lambda: min(leaders(servers, topic).values()) >= 0)
    tree = KazooClient(connect)
    tree.start(20)

    def owners() -> Counter[str]:
        found: Counter[str] = Counter()
        for number in range(_PARTITIONS):
            try:
                found[tree.get(f"/consumers/{topic}/owners/{topic}/{number}")[0].decode()] += 1
            except NoNodeError:
                pass
        return found

    settings = {"zookeeper.connect": connect, "group.id": topic, "auto.offset.reset": "smallest"}
    settings |= {"rebalance.backoff.ms": "5000"}
    try:
        with console_consumer(connect, topic, server_dir / "theirs.log", "--from-beginning") as theirs:
            wait_until(lambda: sum(owners().values()) == _PARTITIONS, seconds=60)
            produce(servers, topic, range(60))
            wait_until(lambda: sorted(theirs.read) == list(range(60)), seconds=60)
            # ours joins: the two share the partitions, and ours goes on where the other one committed
            with ConsumerConnector(settings) as connector:
                ours = Ours(connector.create_message_streams({topic: 1})[topic][0])
                wait_until(lambda: sorted(owners().values()) == [3, 3], seconds=60)
                assert {owner.rpartition("-")[0] for owner in owners()} > {connector.consumer_id}
                produce(servers, topic, range(60, 120))
                wait_until(lambda: sorted(theirs.read + ours.read) == list(range(120)), seconds=60)
                assert len(ours.read) == len(theirs.read) - 60 == 30
                connector.commit_offsets()
                # Kafka's tools describe the group
                shown = old_tool("kafka.admin.ConsumerGroupCommand", connect, "--describe", "--group", topic)
                rows = [line.split() for line in shown.splitlines() if line.startswith(topic)]
                mine = {int(row[1]): row for row in rows if connector.consumer_id in row[-1]}
                assert len(rows) == _PARTITIONS
                assert len(mine) == 3
                assert {(row[2], row[3], row[4]) for row in mine.values()} == {("20", "20", "0")}, shown
                checked = old_tool("kafka.tools.ConsumerOffsetChecker", connect, "--group", topic)
                rows = [line.split() for line in checked.splitlines() if line.startswith(topic)]
                found = {int(row[2]): (row[3], row[4], row[5], row[6]) for row in rows}
                for number in mine:
                    assert found[number] == ("20", "20", "0", f"{connector.consumer_id}-0"), checked
                # theirs leaves, and ours gets all partitions
                theirs.stop()
                wait_until(lambda: owners() == {f"{connector.consumer_id}-0": _PARTITIONS}, seconds=60)
                produce(servers, topic, range(120, 180))
                wait_until(lambda: sorted(theirs.read + ours.read) == list(range(180)), seconds=60)
            ours.join()
        stored = [tree.get(f"/consumers/{topic}/offsets/{topic}/{number}")[0] for number in range(_PARTITIONS)]
        assert stored == [b"30"] * _PARTITIONS
        # theirs goes on where ours committed
        with console_consumer(connect, topic, server_dir / "theirs.log") as again:
            produce(servers, topic, range(180, 200))
            wait_until(lambda: sorted(again.read) == list(range(180, 200)), seconds=60)
    finally:
        tree.stop()
        tree.close()
