"""Support for tests of the consumer protocol (KIP-848): group members of the package and of librdkafka."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import Consumer as ConfluentConsumer

from spark_klog.client.cluster import Cluster
from spark_klog.client.coordinator import find_coordinator
from spark_klog.client.offsets import GroupMetadata
from spark_klog.protocol.apis import CONSUMER_GROUP_HEARTBEAT
from spark_klog.protocol.tables.groups import LEAVE_EPOCH
from tests.support.clients.consumers import SECONDS, Heard, Server


class Member:
    """Our consumer as a member of the topic's group, with the values it has read."""

    def __init__(self, server: Server, topic: str | re.Pattern[str], name: str = "", **settings: Any) -> None:
        given: dict[str, Any] = {"group_protocol": "consumer", "auto_offset_reset": "earliest"}
        self.consumer = server.consumer(**(given | {"group_id": f"g-{name or topic}"} | settings))
        self.heard = Heard()
        self.consumer.subscribe([topic] if isinstance(topic, str) else topic, self.heard)
        self.values: list[bytes | None] = []

    def poll(self) -> None:
        self.values += [record.value for record in self.consumer.poll(0.02)]

    def owned(self) -> set[int]:
        return {partition for _, partition in self.consumer.assignment()}


class Theirs:
    """librdkafka's, which subscribes to the topic, or to other text."""

    def __init__(self, server: Server, topic: str, subscribed: str = "") -> None:
        settings = {"bootstrap.servers": server.servers, "group.id": f"g-{topic}", "group.protocol": "consumer"}
        self.consumer = ConfluentConsumer(settings | {"auto.offset.reset": "earliest"})
        self.consumer.subscribe([subscribed or topic])
        self.values: list[bytes | None] = []

    def poll(self) -> None:
        message = self.consumer.poll(0.02)
        if message is not None:
            assert message.error() is None
            self.values.append(message.value())

    def owned(self) -> set[int]:
        return {entry.partition for entry in self.consumer.assignment()}


def poll_until(members: list[Any], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, [member.owned() for member in members]
        for member in members:
            member.poll()


def is_shared(members: list[Any], *counts: int) -> bool:
    owned = [member.owned() for member in members]
    return sorted(map(len, owned)) == sorted(counts) and set().union(*owned) == set(range(sum(counts)))


def evict(server: Server, member: GroupMetadata) -> None:
    """Have a member leave its group without its knowledge, as if its session had timed out."""
    with Cluster.connect({"bootstrap.servers": server.servers}) as cluster:
        request = {"group_id": member.group, "member_id": member.member, "member_epoch": LEAVE_EPOCH}
        answer = cluster.request(find_coordinator(cluster, member.group), CONSUMER_GROUP_HEARTBEAT, request)
        assert answer["error_code"] == 0
