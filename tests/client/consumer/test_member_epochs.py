"""Commits and positions of KIP-848's members while their epoch moves, is refused, or ends (our broker, with faults).

Whatever happens, a partition begins where its group has committed, never at auto.offset.reset. The last test plays
random orders of commits, rebalances, evictions and lost answers against a model of what is committed.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from spark_klog.base.names import TopicPartition
from spark_klog.broker.faults import Delay, Drop, ErrorAnswer, Fault
from spark_klog.client import Admin, Consumer, Producer, RebalanceListener
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer import consumer_protocol_group
from spark_klog.client.consumer.consumer_protocol_group import EpochHeartbeats
from spark_klog.client.consumer.settings import consumer_config
from spark_klog.client.requests import Steps, at_once, run
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import CommitFailed, ErrorCode, KlogError, ProtocolError, UnsupportedVersionError
from spark_klog.protocol.apis import CONSUMER_GROUP_HEARTBEAT
from spark_klog.protocol.schema import Api
from tests.support.brokers.faults import run_seeds
from tests.support.clients.consumer_protocol import Member, evict, poll_until
from tests.support.clients.consumers import SECONDS, Server, short

pytestmark = pytest.mark.usefixtures("driver")


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(faults=[]) as cluster:
        yield cluster


@pytest.fixture
def server(cluster: EmbeddedCluster) -> Iterator[Server]:
    yield Server(cluster.bootstrap_servers, None)
    cluster.clear_faults()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> list[EpochHeartbeats]:
    """The heartbeats that were told to send one at once, in order."""
    told: list[EpochHeartbeats] = []
    hurry = EpochHeartbeats.hurry

    def note(heartbeats: EpochHeartbeats) -> None:
        told.append(heartbeats)
        hurry(heartbeats)

    monkeypatch.setattr(EpochHeartbeats, "hurry", note)
    return told


def _committed(server: Server, offset: int) -> str:
    """A topic with ten records, of which its group has committed some."""
    topic = server.topic(1)
    server.send(topic, short(10))
    with Admin({"bootstrap.servers": server.servers}) as admin:
        admin.alter_group_offsets(f"g-{topic}", {(topic, 0): offset})
    return topic


@pytest.mark.parametrize("code", ["STALE_MEMBER_EPOCH", "UNKNOWN_MEMBER_ID"])
def test_a_refused_epoch_is_no_reason_to_reset(
    cluster: EmbeddedCluster, server: Server, hurried: list[EpochHeartbeats], code: str
) -> None:
    topic = _committed(server, 3)
    fault = Fault(ErrorAnswer(code), api="OffsetFetch", count=3)
    cluster.inject(fault)
    member = Member(server, topic, auto_offset_reset="latest")
    poll_until([member], lambda: len(member.values) == 7)
    assert cluster.faults_fired()[fault] == len(hurried) == 3
    assert member.values[0] == b"3"
    assert [call for call, _ in member.heard.calls] == ["assigned"]
    member.consumer.close()


def test_a_commit_while_the_epoch_moves(cluster: EmbeddedCluster, server: Server) -> None:
    topic = _committed(server, 3)
    member = Member(server, topic, enable_auto_commit=False)
    poll_until([member], lambda: len(member.values) == 7)
    cluster.inject(Fault(ErrorAnswer("STALE_MEMBER_EPOCH"), api="OffsetCommit", count=2))
    member.consumer.commit()
    assert member.consumer.committed([(topic, 0)])[topic, 0].offset == 10
    cluster.inject(Fault(ErrorAnswer("STALE_MEMBER_EPOCH"), api="OffsetCommit", count=1))
    heard: list[KlogError | None] = []
    member.consumer.commit_async({(topic, 0): 4}, lambda _, error: heard.append(error))
    poll_until([member], lambda: bool(heard))
    assert isinstance(heard[0], ProtocolError)
    assert heard[0].retriable
    assert member.consumer.committed([(topic, 0)])[topic, 0].offset == 10
    member.consumer.close()


def test_a_member_that_was_removed_looks_for_it_at_once(server: Server, hurried: list[EpochHeartbeats]) -> None:
    """Not only with its next heartbeat, which may be 5 s away."""
    topic = _committed(server, 3)
    member = Member(server, topic, enable_auto_commit=False)
    poll_until([member], lambda: len(member.values) == 7)
    assert hurried == []
    evict(server, member.consumer.group_metadata())
    with pytest.raises(CommitFailed):
        member.consumer.commit()
    poll_until([member], lambda: len(member.values) == 14)  # again from the committed offset
    assert [call for call, _ in member.heard.calls] == ["assigned", "lost", "assigned"]
    member.consumer.close()


def test_a_leave_that_is_refused_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that joins again has to have left: Kafka fences one that joins twice."""
    config = consumer_config({"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "group.protocol": "consumer"})
    heartbeats, codes = EpochHeartbeats(config, lambda: None), [ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.NOT_COORDINATOR]
    monkeypatch.setattr(consumer_protocol_group, "finding_coordinator", lambda *_: at_once(lambda: 0))
    monkeypatch.setattr(Cluster, "asking", lambda *_: at_once(lambda: {"error_code": codes.pop()}))
    heartbeats.may_be_known = True
    with pytest.raises(ProtocolError, match="leaving group g: NOT_COORDINATOR"):
        run(heartbeats.leave(heartbeats.cluster))
    assert heartbeats.may_be_known
    run(heartbeats.leave(heartbeats.cluster))
    assert not heartbeats.may_be_known


def test_a_loss_within_a_step_is_told_before_the_member_joins_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would go on with positions of partitions that others may have read, and commit them in its new epoch."""
    topic = _committed(server, 3)
    member = Member(server, topic, enable_auto_commit=False)
    poll_until([member], lambda: len(member.values) == 7)
    take_news, losses = EpochHeartbeats.take_news, [consumer_protocol_group._News(is_lost=True)]

    def then_lose(heartbeats: EpochHeartbeats) -> Any:
        news = take_news(heartbeats)
        if losses:  # as if the thread had just heard of it
            with heartbeats._lock:
                heartbeats.epoch, heartbeats._news = consumer_protocol_group._OUTSIDE, losses.pop()
        return news

    monkeypatch.setattr(EpochHeartbeats, "take_news", then_lose)
    poll_until([member], lambda: len(member.values) == 14)
    assert [call for call, _ in member.heard.calls] == ["assigned", "lost", "assigned"]
    member.consumer.close()


def test_a_coordinator_that_resolves_no_regular_expressions(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of Kafka 3.7 to 3.9: they would ignore it."""
    version_of = Cluster.asking_version

    def old(cluster: Cluster, node: int, api: Api) -> Steps[int]:
        return at_once(lambda: 0) if api is CONSUMER_GROUP_HEARTBEAT else version_of(cluster, node, api)

    monkeypatch.setattr(Cluster, "asking_version", old)
    topic = server.topic(1)
    member = Member(server, f"^{topic}", topic)
    with pytest.raises(UnsupportedVersionError, match=r"Kafka does from 4\.0 on: set group\.protocol=classic"):
        poll_until([member], lambda: False)
    member.consumer.subscribe(re.compile(topic))
    poll_until([member], lambda: len(member.owned()) == 1)
    member.consumer.close()


def test_the_end_of_a_member_that_has_lost_its_partitions(cluster: EmbeddedCluster, server: Server) -> None:
    """Its listener is not told to commit, and the offsets stay."""
    topic = _committed(server, 3)
    member = Member(server, topic)
    poll_until([member], lambda: len(member.values) == 7)
    evict(server, member.consumer.group_metadata())
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            member.consumer.group_metadata()
        except CommitFailed:
            break
        assert time.monotonic() < deadline
        time.sleep(0.02)
    member.consumer.close()
    assert [call for call, _ in member.heard.calls] == ["assigned", "lost"]
    with Admin({"bootstrap.servers": server.servers}) as admin:
        assert admin.list_group_offsets(f"g-{topic}")[topic, 0].offset == 3
        assert admin.describe_group(f"g-{topic}").members == ()


_OWN, _GROUP = "t", "g"
_ROUNDS = 60
_FAULTS = (
    Fault(Drop(after=True), api="ConsumerGroupHeartbeat", count=1),
    Fault(Drop(after=True), api="OffsetCommit", count=1),
    Fault(Drop(), api="OffsetFetch", count=1),
    Fault(Delay(150, after=True), api="ConsumerGroupHeartbeat", count=2),
    Fault(Delay(150), api="OffsetCommit", count=1),
    Fault(Delay(150), api="OffsetFetch", count=1),
    Fault(ErrorAnswer("STALE_MEMBER_EPOCH"), api="OffsetFetch", count=2),
    Fault(ErrorAnswer("STALE_MEMBER_EPOCH"), api="OffsetCommit", count=1),
    Fault(ErrorAnswer("FENCED_MEMBER_EPOCH"), api="ConsumerGroupHeartbeat", count=1),
    Fault(ErrorAnswer("NOT_COORDINATOR"), api="ConsumerGroupHeartbeat", count=1),
)


class Offsets:
    """The model: what may be committed for each partition of the group, and where members began."""

    def __init__(self) -> None:
        self._possible: dict[TopicPartition, set[int]] = {}

    def begun(self, offsets: dict[TopicPartition, int]) -> None:
        """A commit may be carried out from now on."""
        for key, offset in offsets.items():
            self._possible.setdefault(key, {0}).add(offset)

    def done(self, offsets: dict[TopicPartition, int]) -> None:
        """A commit has been carried out, after all that began before it, and nobody else may commit."""
        for key, offset in offsets.items():
            self._possible[key] = {offset}

    def check_start(self, key: TopicPartition, offset: int) -> None:
        assert offset in self._possible.get(key, {0}), (key, offset, self._possible.get(key))


class Player(RebalanceListener):
    """A member with all that it does by chance."""

    def __init__(self, server: Server, offsets: Offsets, chance: random.Random) -> None:
        self._offsets, self._chance, self._server = offsets, chance, server
        self.values: set[bytes] = set()
        #: What the listener has been told.
        self.owned: set[TopicPartition] = set()
        settings: dict[str, Any] = {
            "bootstrap.servers": server.servers,
            "group.id": _GROUP,
            "group.protocol": "consumer",
        }
        settings |= {"auto.offset.reset": "earliest", "enable.auto.commit": False, "metadata.max.age.ms": 300}
        settings |= {
            "retry.backoff.ms": 20,
            "retry.backoff.max.ms": 100,
            "group.remote.assignor": chance.choice(["range", "uniform"]),
        }
        self.consumer = Consumer(settings)
        self.subscribe()

    def subscribe(self) -> None:
        """All that exists and may come, in one of the ways to say it."""
        ways: list[Any] = [f"^{_OWN}-", re.compile(f"{_OWN}-.*"), [f"{_OWN}-0", f"^{_OWN}-[1-9]"]]
        self.consumer.subscribe(self._chance.choice(ways), self)

    def on_assigned(self, partitions: list[TopicPartition]) -> None:
        assert self.owned.isdisjoint(partitions)
        self.owned.update(partitions)
        for key in partitions:
            self._offsets.check_start(key, self.consumer.position(*key))

    def on_revoked(self, partitions: list[TopicPartition]) -> None:
        if self._chance.random() < 0.5:
            self.commit()
        self.on_lost(partitions)

    def on_lost(self, partitions: list[TopicPartition]) -> None:
        assert self.owned.issuperset(partitions)
        self.owned.difference_update(partitions)

    def poll(self) -> None:
        self.values |= {record.value or b"" for record in self.consumer.poll(self._chance.choice([0.0, 0.02]))}
        assert self.owned == set(self.consumer.assignment())

    def _positions(self) -> dict[TopicPartition, int]:
        assert self.consumer._group is not None
        return {key: item.offset for key, item in self.consumer._group.consumed().items()}

    def commit(self) -> None:
        positions = self._positions()
        self._offsets.begun(positions)
        try:
            self.consumer.commit()
        except CommitFailed:
            return
        self._offsets.done(positions)

    def commit_async(self) -> None:
        self._offsets.begun(self._positions())
        self.consumer.commit_async(on_done=lambda *_: None)

    def interrupt(self) -> None:
        assert self.consumer._group is not None
        if self.consumer._group._beside is None:  # on a loop what a poll has begun goes on
            self.consumer._group.mend()

    def evict(self) -> None:
        try:
            evict(self._server, self.consumer.group_metadata())
        except (KlogError, AssertionError):
            pass  # it is no member, or a fault has hit this


def test_random_orders() -> None:
    """A seed fixes what members do, not when it happens."""
    run_seeds(_play)


def _play(seed: int) -> None:
    chance = random.Random(seed)
    offsets = Offsets()
    with EmbeddedCluster(faults=[]) as cluster, Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
        server = Server(cluster.bootstrap_servers, None)
        topics = [f"{_OWN}-0"]
        admin.create_topic(topics[0], 2)
        players: list[Player] = [Player(server, offsets, chance)]
        sent: list[bytes] = []
        values: set[bytes] = set()
        with Producer({"bootstrap.servers": server.servers}) as producer:

            def send() -> None:
                for _ in range(5):
                    sent.append(b"%d" % len(sent))
                    producer.send(chance.choice(topics), sent[-1], partition=chance.randrange(2))
                producer.flush()

            def come() -> None:
                if len(players) < 4:
                    players.append(Player(server, offsets, chance))

            def go() -> None:
                if len(players) > 1:
                    player = players.pop(chance.randrange(len(players)))
                    player.consumer.close()
                    values.update(player.values)

            def create() -> None:
                if len(topics) < 4:
                    topics.append(f"{_OWN}-{len(topics)}")
                    admin.create_topic(topics[-1], 2)

            def one(do: Callable[[Player], None]) -> Callable[[], None]:
                return lambda: do(chance.choice(players))

            moves = (
                [send, send, come, go, create, lambda: cluster.inject(chance.choice(_FAULTS))]
                + [
                    one(do)
                    for do in (Player.commit, Player.commit, Player.commit_async, Player.subscribe, Player.interrupt)
                ]
                + [one(Player.evict)]
            )
            for _ in range(_ROUNDS):
                chance.choice(moves)()
                for player in players:
                    for _ in range(chance.randrange(4)):
                        player.poll()
        cluster.clear_faults()
        deadline = time.monotonic() + SECONDS
        every = sorted((topic, number) for topic in topics for number in range(2))
        while values != set(sent) or sorted(key for player in players for key in player.owned) != every:
            assert time.monotonic() < deadline, (seed, set(sent) - values, [player.owned for player in players])
            for player in players:
                player.poll()
                values |= player.values
        for player in players:
            player.consumer.close()
