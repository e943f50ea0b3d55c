"""Members of our client, Java's and librdkafka's in one group at Kafka; some are killed while the group rebalances.

SPARK_KLOG_KAFKAS=all runs all assignors, otherwise only cooperative-sticky runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.support.clients.consumers import MEMBER_PROGRAM, NOW, Line, Ours, Server, Theirs, is_shared
from tests.support.clients.java import Java39
from tests.support.clients.process import ClientFailed
from tests.support.servers.shared_kafka import SharedKafkas

pytestmark = [pytest.mark.peer, pytest.mark.test_all("client"), pytest.mark.usefixtures("driver")]
_ALL = ("range", "roundrobin", "sticky", "cooperative-sticky")
_STRATEGIES = _ALL if os.environ.get("SPARK_KLOG_KAFKAS") == "all" else ("cooperative-sticky",)
_JAVAS = {
    "range": "RangeAssignor",
    "roundrobin": "RoundRobinAssignor",
    "sticky": "StickyAssignor",
    "cooperative-sticky": "CooperativeStickyAssignor",
}
_PARTITIONS, _RECORDS = 6, 50
_SECONDS = 90.0
#: The poll of the member to be killed: it prints each record before it commits.
_TELLING = "for record in consumer.poll(0.1): print(record.value.decode(), flush=True)"


class _Java:
    """A group member of Java's client; it commits after each poll."""

    def __init__(self, server: Server, topic: str, strategy: str) -> None:
        self._client = Java39(server.servers)
        assignor = f"org.apache.kafka.clients.consumer.{_JAVAS[strategy]}"
        self._client.ask("join", topic, f"g-{topic}", "6000", assignor)
        self._owned: set[int] = set()
        self.values: list[bytes | None] = []

    def poll(self) -> None:
        has, _, came = " ".join(self._client.ask("poll", "50")).partition("|")
        self._owned = {int(word) for word in has.split()}
        for word in came.split():
            partition, offset = word.split(",")
            self.values.append(_value(int(partition), int(offset)))
        if came:
            self._client.ask("commit")  # fails while the group rebalances; the records are read again then

    def owned(self) -> set[int]:
        return self._owned

    def kill(self) -> None:
        self._client.kill()

    def close(self) -> None:
        try:
            self._client.ask("leave")
        except (ClientFailed, OSError):
            pass  # it was killed
        self._client.close()


_Member = Ours | Theirs | _Java


@pytest.fixture(scope="module")
def server(shared_kafkas: SharedKafkas) -> Server:
    return Server(shared_kafkas.get("3.9.1").bootstrap_servers, "3.9.1")


def _value(partition: int, offset: int) -> bytes:
    return b"%d-%d" % (partition, offset)


def _send(server: Server, topic: str, start: int) -> list[bytes]:
    """Send the next records to each partition; return their values."""
    sent = []
    for partition in range(_PARTITIONS):
        values = [_value(partition, start + number) for number in range(_RECORDS)]
        server.send(topic, [Line(NOW, None, value, ()) for value in values], partition)
        sent += values
    return sent


def _poll_until(members: list[_Member], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline, [(type(item).__name__, item.owned(), len(item.values)) for item in members]
        for member in members:
            member.poll()


def _values(members: list[_Member]) -> list[bytes | None]:
    return [value for member in members for value in member.values]


@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_members_of_three_clients_some_of_them_killed(server: Server, strategy: str) -> None:
    topic = server.topic(_PARTITIONS)
    first = _send(server, topic, 0)
    members: list[_Member] = []
    java: _Java | None = None
    program = MEMBER_PROGRAM.replace('"range"', repr(strategy)).replace("consumer.poll(0.1)", _TELLING)
    command = [sys.executable, "-c", program, server.servers, f"g-{topic}", topic]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        try:
            assert killed.stdout is not None
            assert "assigned\n" in iter(killed.stdout.readline, "")
            java = _Java(server, topic, strategy)
            members += [Ours(server, topic, strategy), java, _Java(server, topic, strategy)]
            if strategy != "sticky":  # librdkafka has no sticky assignor
                members.append(Theirs(server, topic, strategy))
            _poll_until(members, lambda: all(member.owned() for member in members))
            members.append(Ours(server, topic, strategy))
            members[-1].poll()  # the group begins to rebalance
            java.kill()
            killed.kill()
            dead = members.pop(members.index(java))
            _poll_until(members, lambda: _is_shared(members))
            second = _send(server, topic, _RECORDS)
            _poll_until(members, lambda: set(second) <= set(_values(members)))
            found = _values(members)
            assert [value for value in found if found.count(value) > 1 and value in set(second)] == []
            told = {line.strip().encode() for line in killed.stdout}
            assert set(first) <= {*found, *dead.values, *told}
        finally:
            killed.kill()
            for member in members:
                member.close()
            if java is not None:
                java.close()


def _is_shared(members: list[_Member]) -> bool:
    return is_shared(members, _PARTITIONS)  # type: ignore[arg-type]
