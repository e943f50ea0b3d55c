"""Warnings and errors of a consumer that gets no records because something is wrong."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_klog.client import Consumer
from spark_klog.client.consumer.assignment import Assigned, Leader, Troubles
from spark_klog.errors import ConnectionFailed, ErrorCode, ProtocolError
from tests.support.brokers import faults
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.brokers.simulated_cluster import SimulatedCluster
from tests.support.clients.consumers import SECONDS, Server, short
from tests.support.servers.broker import KlogBroker

pytestmark = pytest.mark.usefixtures("driver")


@pytest.fixture(scope="module")
def server(module_server_dir: Path) -> Iterator[Server]:
    with KlogBroker(module_server_dir / "klog") as broker:
        yield Server(broker.bootstrap_servers, None)


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def _poll_until(consumer: Consumer, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < deadline:
        consumer.poll(0.1)
    assert condition()


def test_a_wrong_port_is_a_warning_with_the_address(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "enable.auto.commit": False}
    with Consumer(settings) as consumer:
        consumer.assign([("t", 0, 0)])
        deadline = time.monotonic() + SECONDS
        while not (found := _warnings(caplog)) and time.monotonic() < deadline:
            assert consumer.poll_arrow(1.0) is None  # as in a user's loop
        assert found
        assert re.search(r"no records from .*127\.0\.0\.1:1.*[Rr]efused", found[0])
        assert "request.timeout.ms" not in found[0]
        consumer.poll(0.1)
        assert len(_warnings(caplog)) == len(found)  # not at each poll
        consumer.poll(2.5)
        assert not any("giving up" in warning for warning in _warnings(caplog))


def test_partitions_that_fail_together_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A broker of 500 partitions that is gone is one line, also when some of them are back."""
    troubles = Troubles()
    gone, refused = ConnectionFailed("broker 5 has refused"), ConnectionFailed("broker 6 has refused")
    of_5, of_6 = ([Assigned("t", number) for number in range(count)] for count in (500, 1))
    for node, states in ((5, of_5), (6, of_6)):
        for state in states:
            state.leader = Leader(node, 0)
    troubles.note_all({**dict.fromkeys(of_5, gone), **dict.fromkeys(of_6, refused)})
    assert _warnings(caplog) == [
        "no records from t-0 and 499 more, trying again: broker 5 has refused",
        "no records from t-0, trying again: broker 6 has refused",
    ]
    troubles.note_all(dict.fromkeys(of_5[7:], gone))
    assert len(_warnings(caplog)) == 2


@pytest.mark.parametrize("code", [ErrorCode.KAFKA_STORAGE_ERROR, ErrorCode.NOT_LEADER_OR_FOLLOWER])
def test_partitions_that_a_broker_refuses_are_one_warning(code: ErrorCode, caplog: pytest.LogCaptureFixture) -> None:
    """However many they are; errors that pass within moments are told if they last."""
    with SimulatedCluster(topics=110, partitions=10, brokers=2) as brokers:
        settings = {"bootstrap.servers": brokers.bootstrap_servers, "auto.offset.reset": "latest"}
        with Consumer(settings) as consumer:
            keys = [(f"t{topic:05}", number) for topic in range(110) for number in range(10)]
            consumer.assign(keys)
            for key in keys:
                consumer.position(*key)
            brokers.tell("refuse", code=code)
            end = time.monotonic() + 3.5
            while time.monotonic() < end:
                consumer.poll(0.5)
    found = _warnings(caplog)
    assert 1 <= len(found) <= 4  # two brokers; what they refuse, and that no other one leads
    assert any(
        re.match(r"no records from t\d+-\d( and \d+ more)?, trying again: fetch of .*" + code.name, each)
        for each in found
    )
    if code == ErrorCode.KAFKA_STORAGE_ERROR:
        assert sum(int(number) + 1 for each in found for number in re.findall(r"and (\d+) more", each)) == len(keys)


def test_a_topic_that_does_not_exist_is_an_error(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    topic = server.topic()
    server.send(topic, short(3))
    with server.consumer(auto_offset_reset="earliest") as consumer:
        for wrong, name in ((f"{topic}-wrong", f"topic {topic}-wrong"), (topic, f"{topic}-7")):
            consumer.assign([(topic, 0), (wrong, 7)])
            deadline = time.monotonic() + SECONDS
            raised: list[ProtocolError] = []
            while (consumer.position(topic, 0) != 3 or not raised) and time.monotonic() < deadline:
                try:
                    consumer.poll(0.1)
                except ProtocolError as error:
                    raised.append(error)
            assert consumer.position(topic, 0) == 3, "the existing partition is read"
            assert raised[0].code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            assert name in str(raised[0])
            assert any(name in text for text in _warnings(caplog))
            consumer.assign([])


@pytest.mark.parametrize("timeout", [0, 0.1, 2])
def test_the_first_poll_tells_of_a_partition_that_does_not_exist(server: Server, timeout: float) -> None:
    topic = server.topic()
    with server.consumer() as consumer:
        for assigned in ([(topic, 7)], [(topic, 0), (topic, 7)], [(f"{topic}-wrong", 0)]):
            consumer.assign(assigned)
            began = time.monotonic()
            with pytest.raises(ProtocolError, match="UNKNOWN_TOPIC_OR_PARTITION"):
                consumer.poll(timeout)
            assert time.monotonic() - began > 0.5, "a new topic needs a moment"


def test_one_late_answer_makes_no_topic_unknown() -> None:
    """Brokers must still say so in a look-up after some time."""
    with ScriptedCluster({"t": 1}) as brokers:
        brokers.append("t", 0, [b"a"])
        brokers.on("Metadata", faults.no_topics(delay=1.0))
        with Consumer({"bootstrap.servers": brokers.bootstrap_servers}) as consumer:
            consumer.assign([("t", 0, 0)])
            assert [record.value for record in consumer.poll(SECONDS)] == [b"a"]
            assert brokers.count("Metadata") > 1


def test_a_partition_without_a_leader_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with ScriptedCluster({"t": 1}) as brokers:
        brokers.leaders["t", 0] = -1
        brokers.append("t", 0, [b"a"])
        with Consumer({"bootstrap.servers": brokers.bootstrap_servers}) as consumer:
            consumer.assign([("t", 0, 0)])
            told = ("LEADER_NOT_AVAILABLE", "t-0")
            _poll_until(consumer, lambda: any(all(name in text for name in told) for text in _warnings(caplog)))
            brokers.leaders["t", 0] = 0
            assert [record.value for record in consumer.poll(SECONDS)] == [b"a"]


def test_a_broker_that_restarts_is_no_unknown_topic(caplog: pytest.LogCaptureFixture) -> None:
    """The consumer waits for a partition that it has known before."""
    with ScriptedCluster({"t": 1}) as brokers:
        brokers.append("t", 0, [b"a"])
        with Consumer({"bootstrap.servers": brokers.bootstrap_servers, "metadata.max.age.ms": 50}) as consumer:
            consumer.assign([("t", 0, 0)])
            assert [record.value for record in consumer.poll(SECONDS)] == [b"a"]
            brokers.always("Fetch", faults.error(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
            brokers.always("Metadata", faults.error(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
            begin, is_told = time.monotonic(), False
            while time.monotonic() < begin + 1.5 or not is_told:
                assert time.monotonic() < begin + SECONDS
                assert consumer.poll(0.1) == []
                is_told = any("UNKNOWN_TOPIC_OR_PARTITION" in text for text in _warnings(caplog))
            brokers.clear()
            brokers.append("t", 0, [b"b"])
            assert [record.value for record in consumer.poll(SECONDS)] == [b"b"]


@pytest.mark.parametrize("wanted", ["names", "^", "[^]", "pattern"])
def test_subscribed_topics_that_do_not_exist(server: Server, caplog: pytest.LogCaptureFixture, wanted: str) -> None:
    topic = server.topic()
    missing = f"{topic}-missing"
    forms: dict[str, Any] = {
        "names": [topic, missing],
        "^": f"^{missing}",
        "[^]": [topic, f"^{missing}"],
        "pattern": re.compile(f"{missing}.*"),
    }
    with server.consumer(group_id=topic + wanted) as consumer:
        consumer.subscribe(forms[wanted])
        _poll_until(consumer, lambda: any(missing in text for text in _warnings(caplog)))
        if wanted in ("names", "[^]"):
            _poll_until(consumer, lambda: consumer.assignment() == [(topic, 0)])
        assert len([text for text in _warnings(caplog) if missing in text]) == 1


def test_text_that_begins_with_a_caret_is_a_pattern(server: Server) -> None:
    first, second, third = (server.topic() for _ in range(3))
    for topic in (first, second, third):
        server.send(topic, short(2))
    with server.consumer(group_id=first, auto_offset_reset="earliest") as consumer:
        consumer.subscribe([f"^{first[:-2]}", second])  # matches prefixes, as in librdkafka
        _poll_until(consumer, lambda: consumer.assignment() == sorted([(first, 0), (second, 0)]))
        consumer.subscribe(f"^{third}$")
        _poll_until(consumer, lambda: consumer.assignment() == [(third, 0)])


def test_a_partition_with_open_offsets_holds_up_no_other() -> None:
    with ScriptedCluster({"t": 2}) as brokers:
        for partition in range(2):
            brokers.append("t", partition, [b"%d" % partition])
        brokers.always("OffsetFetch", faults.error(ErrorCode.UNSTABLE_OFFSET_COMMIT, 0))
        given = {"bootstrap.servers": brokers.bootstrap_servers, "group.id": "g", "enable.auto.commit": False}
        with Consumer({**given, "auto.offset.reset": "earliest"}) as consumer:
            consumer.assign([("t", 0), ("t", 1)])
            begin = time.monotonic()
            assert [record.value for record in consumer.poll(SECONDS)] == [b"1"]
            assert time.monotonic() < begin + SECONDS / 2
            brokers.clear()
            assert [record.value for record in consumer.poll(SECONDS)] == [b"0"]


def test_a_coordinator_that_can_not_be_reached(caplog: pytest.LogCaptureFixture) -> None:
    """The error comes after default.api.timeout.ms, names who advertised the address, and comes again."""
    with ScriptedCluster({"t": 1}, nodes=2) as brokers:
        bootstrap = f"127.0.0.1:{brokers.ports[0]}"
        brokers.ports[1] = 1  # of the coordinator
        settings = {"bootstrap.servers": bootstrap, "group.id": "g", "default.api.timeout.ms": 1000}
        with Consumer({**settings, "enable.auto.commit": False}) as consumer:
            consumer.subscribe(["t"])
            source = f"the address of broker 1 as {bootstrap} advertises it, check advertised.listeners"
            advertised = f"127.0.0.1:1 ({source})"
            for _ in range(2):
                with pytest.raises(ConnectionFailed, match=re.escape(f"no broker answers at {advertised}: ")):
                    _poll_until(consumer, lambda: False)
        assert advertised in _warnings(caplog)[0]


def test_partitions_that_fail_alike_are_one_error() -> None:
    """Not one of each, in as many calls."""
    with ScriptedCluster({"t": 20}, nodes=1) as brokers:
        for key in brokers.leaders:
            brokers.leaders[key] = -1
        with Consumer({"bootstrap.servers": brokers.bootstrap_servers, "default.api.timeout.ms": 500}) as consumer:
            consumer.assign([("t", partition, 0) for partition in range(20)])
            begin = time.monotonic()
            for _ in range(2):
                with pytest.raises(ProtocolError, match="LEADER_NOT_AVAILABLE"):
                    _poll_until(consumer, lambda: False)
            assert time.monotonic() > begin + 1.0


def test_a_broker_that_was_reached_and_is_down_is_no_matter_of_its_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with KlogBroker(tmp_path) as broker:
        server = Server(f"localhost:{broker.port}", None)  # the broker advertises 127.0.0.1
        topic = server.topic()
        server.send(topic, short(1))
        with server.consumer(auto_offset_reset="earliest") as consumer:
            consumer.assign([(topic, 0)])
            assert len(consumer.poll(SECONDS)) == 1
            broker.kill()
            _poll_until(consumer, lambda: any(broker.bootstrap_servers in text for text in _warnings(caplog)))
        assert not any("advertise" in text for text in _warnings(caplog))


def test_look_ups_of_a_missing_topic_ask_for_it_alone() -> None:
    topics, partitions = 50, 2
    settings = {"group.id": "g", "group.protocol": "consumer", "auto.offset.reset": "latest"}
    with SimulatedCluster(topics, partitions, brokers=2) as brokers:
        with Consumer({"bootstrap.servers": brokers.bootstrap_servers, **settings}) as consumer:
            consumer.subscribe([*(f"t{topic:05}" for topic in range(topics)), "t99999"])
            _poll_until(consumer, lambda: len(consumer.assignment()) == topics * partitions)
            consumer.poll(1)
            brokers.tell("forget")
            end = time.monotonic() + 4
            while time.monotonic() < end:
                consumer.poll(0.5)
            figures = brokers.figures()
    assert 1 <= figures["requests"]["Metadata"] <= 3  # a second after the first, two after the next, then four
    assert 1 <= figures["partitions"]["Metadata"] <= partitions * figures["requests"]["Metadata"]
