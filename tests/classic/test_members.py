"""Members of a ZooKeeper group that rebalance in any order, with an in-memory tree and no broker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.base.names import TopicPartition
from spark_klog.classic.member import Member
from spark_klog.classic.settings import connector_config
from spark_klog.classic.streams import KafkaStream
from spark_klog.errors import KlogError, RebalanceFailed
from spark_klog.trees.consumers import STATIC, WHITE_LIST, OffsetDirectory, Registration
from spark_klog.trees.memory import MemoryTree
from spark_klog.trees.paths import Endpoint, broker_payload, topic_payload

_CONFIG = connector_config({"zookeeper.connect": "unused:1", "group.id": "g"})
_TOPICS = ("a", "b")
_MOST = 12


class Group:
    def __init__(self) -> None:
        self.tree = MemoryTree()
        endpoint = Endpoint("PLAINTEXT", "PLAINTEXT", "127.0.0.1", 1)
        self.tree.create("/brokers/ids/0", broker_payload([endpoint], 0))
        self.partitions = dict.fromkeys(_TOPICS, 0)
        for topic in _TOPICS:
            self.resize(topic, 4)
        # with committed offsets, no member asks a broker
        everything = {(topic, number): 5 for topic in _TOPICS for number in range(_MOST)}
        OffsetDirectory(self.tree, "g").commit(everything)
        self.members: dict[str, tuple[Member, MemoryTree]] = {}
        self._count = 0

    def resize(self, topic: str, partitions: int) -> None:
        self.partitions[topic] = partitions
        self.tree.put(f"/brokers/topics/{topic}", topic_payload({number: [0] for number in range(partitions)}, None))

    def join(self, registration: Registration) -> None:
        tree = self.tree.session()
        streams = [stream() for _ in range(4)]
        name = f"m{self._count}"
        self._count += 1
        member = Member(_CONFIG, tree, name, registration, lambda _, number: streams[number], ignore, False)
        member.register()
        self.members[name] = member, tree

    def rebalance_all(self) -> list[TopicPartition]:
        """Let each member rebalance once; return the partitions that they wait for."""
        return [key for member, _ in self.members.values() for key in member.rebalance()]

    def check(self) -> dict[TopicPartition, str]:
        """Check that each partition has one reader at most, which owns it in the tree; return the owners."""
        owners: dict[TopicPartition, str] = {}
        for member, _ in self.members.values():
            for key, thread in member.owned.items():
                assert key not in owners
                owners[key] = thread
                assert self.tree.get(f"/consumers/g/owners/{key[0]}/{key[1]}") == thread.encode()
        return owners


def stream() -> KafkaStream:
    return KafkaStream(2, None, (None, None), lambda: None)


def ignore(error: KlogError) -> None:
    raise error


_JOINS = st.sampled_from(
    [
        Registration(STATIC, {"a": 1}),
        Registration(STATIC, {"a": 2, "b": 1}),
        Registration(STATIC, {"b": 4}),
        Registration(WHITE_LIST, {".*": 1}),
        Registration(WHITE_LIST, {"b|c": 2}),
    ]
)


def test_partitions_that_nobody_releases() -> None:
    group = Group()
    group.tree.create("/consumers/g/owners/a/2", b"someone-0")
    config = connector_config(
        {"zookeeper.connect": "unused:1", "group.id": "g", "rebalance.max.retries": 1, "rebalance.backoff.ms": 50}
    )
    member = Member(
        *(config, group.tree.session(), "m", Registration(STATIC, {"a": 1}), lambda _, __: stream(), ignore, False)
    )
    with pytest.raises(RebalanceFailed, match=r"other members still own a-2 after 0\.05 s \(rebalance\.max\.retries"):
        member.join()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_order(data: st.DataObject) -> None:
    group = Group()
    steps: dict[str, Callable[[], None]] = {
        "join": lambda: group.join(data.draw(_JOINS)),
        "resize": lambda: group.resize(data.draw(st.sampled_from(_TOPICS)), data.draw(st.integers(1, _MOST))),
    }

    def some() -> str:
        return data.draw(st.sampled_from(sorted(group.members)))

    def kill() -> None:
        _, tree = group.members.pop(some())
        tree.close()  # removes its ephemeral nodes, like an expired session

    def leave() -> None:
        member, tree = group.members.pop(some())
        member.leave(commits=True, counts_own=False)
        tree.close()

    def rebalance() -> None:
        group.members[some()][0].rebalance()

    for _ in range(data.draw(st.integers(1, 25))):
        choices = ["join", "resize", *(["rebalance", "rebalance", "rebalance", "kill", "leave"] * bool(group.members))]
        step = data.draw(st.sampled_from(choices))
        {**steps, "kill": kill, "leave": leave, "rebalance": rebalance}[step]()
        group.check()

    # without further changes it settles in few rounds: one member releases, the next one claims
    rounds = 0
    while group.rebalance_all():
        rounds += 1
        assert rounds <= 2
        group.check()
    owners = group.check()
    for topic in _TOPICS:
        counts = [sum(key[0] == topic for key in member.owned) for member, _ in group.members.values()]
        assert sum(counts) in (0, group.partitions[topic])
    before = owners
    assert not group.rebalance_all()
    assert group.check() == before
