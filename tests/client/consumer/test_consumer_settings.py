"""Consumer settings: those that it rejects, those without effect, and the effect of others."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer as ConfluentProducer

from spark_klog.client import Consumer
from spark_klog.client.consumer.settings import ConsumerConfig, consumer_config
from spark_klog.client.settings import _WITHOUT_EFFECT, SERIALIZERS
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, DecodeError
from tests.support.brokers.scripted_broker import ScriptedCluster

pytestmark = pytest.mark.usefixtures("driver")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auto.offset.rset": "latest"}, r"did you mean auto\.offset\.reset"),
        ({"auto.offset.reset": "newest"}, r"auto\.offset\.reset=newest: set earliest, latest, none"),
        ({"auto.offset.reset": "by_duration:P"}, r"by_duration: with a duration"),
        ({"max.poll.records": 0}, r"max\.poll\.records=0: set a number from 1"),
        ({"session.timeout.ms": 1000}, "heartbeat.interval.ms=3000 must be less than session.timeout.ms=1000"),
        ({"partition.assignment.strategy": "rangy"}, "'rangy' is unknown; set one or more of range"),
        ({"group.id": ""}, "group.id is empty"),
        ({"group.protocol": "share"}, "group.protocol=share: set classic or consumer"),
        (
            {"group.protocol": "consumer", "session.timeout.ms": 9000},
            "session.timeout.ms has no effect .*the broker's group.consumer.session.timeout.ms is",
        ),
        (
            {"group.protocol": "consumer", "heartbeat.interval.ms": 9000},
            "heartbeat.interval.ms has no effect .*the broker's group.consumer.heartbeat.interval.ms is",
        ),
        (
            {"group.protocol": "CONSUMER", "partition.assignment.strategy": "range"},
            "partition.assignment.strategy has no effect .*set group.remote.assignor or leave both out",
        ),
        ({"group.remote.assignor": "range"}, "group.remote.assignor has no effect with group.protocol=classic"),
        ({"isolation.level": "serializable"}, "set read_uncommitted or read_committed"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Consumer({"bootstrap.servers": "127.0.0.1:1", **settings})


def test_names_of_javas_assignors() -> None:
    names = "org.apache.kafka.clients.consumer.CooperativeStickyAssignor"
    found = consumer_config({"bootstrap.servers": "127.0.0.1:1", "partition.assignment.strategy": names})
    assert found.assignors == ("cooperative-sticky",)
    assert found.is_cooperative


def test_a_consumer_without_a_group() -> None:
    with Consumer({"bootstrap.servers": "127.0.0.1:1"}) as consumer:
        for action in (lambda: consumer.subscribe(["t"]), consumer.commit, lambda: consumer.committed([("t", 0)])):
            with pytest.raises(ConfigError, match=r"group\.id is not set"):
                action()


def test_assign_and_subscribe_exclude_each_other() -> None:
    with Consumer({"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "enable.auto.commit": False}) as consumer:
        consumer.assign([("t", 0, 0)])
        with pytest.raises(ConfigError, match="call assign"):
            consumer.subscribe(["t"])
        consumer.assign([])
        with pytest.raises(TypeError, match="takes a list of topics"):
            consumer.subscribe("t")
        consumer.subscribe(["t"])
        with pytest.raises(ConfigError, match="call unsubscribe"):
            consumer.assign([("t", 0, 0)])


def test_what_has_no_effect_is_told(caplog: pytest.LogCaptureFixture) -> None:
    consumer_config({"bootstrap.servers": "127.0.0.1:1", "check.crcs": True, "max.poll.records": 5})
    assert caplog.messages == []
    consumer_config({"bootstrap.servers": "127.0.0.1:1", "check.crcs": False, "interceptor.classes": "com.example.I"})
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith(": interceptor.classes")


def test_wrong_checksums_are_read_only_if_they_are_not_to_be_checked(tmp_path: Path) -> None:
    with EmbeddedCluster(data_dir=tmp_path) as cluster:
        theirs = ConfluentProducer({"bootstrap.servers": cluster.bootstrap_servers, "compression.type": "lz4"})
        for value in (b"first", b"second"):
            theirs.produce("t", value, partition=0)
            assert theirs.flush(30) == 0
    (log,) = tmp_path.rglob("t-0/*.log")
    data = bytearray(log.read_bytes())
    data[17] ^= 1  # the first byte of the first batch's CRC
    log.write_bytes(data)
    with EmbeddedCluster(data_dir=tmp_path) as cluster:
        settings = {"bootstrap.servers": cluster.bootstrap_servers}
        for checks in (True, False):
            with Consumer({**settings, "check.crcs": checks}) as consumer:
                consumer.assign([("t", 0, 0)])
                if checks:
                    with pytest.raises(DecodeError, match="t-0"):
                        consumer.poll(30)
                    continue
                found = [record.value for record in consumer.poll(30)]
                consumer.seek("t", 0, 0)
                batch = consumer.poll_arrow(30)
                assert batch is not None
                assert found == batch.column("value").to_pylist() == [b"first", b"second"]


def test_settings_without_effect_are_in_the_reference() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "consumer.md").read_text()
    own = {item.metadata["name"] for item in fields(ConsumerConfig) if item.metadata}
    own |= SERIALIZERS
    assert [name for name in sorted(_WITHOUT_EFFECT - own) if f"`{name}`" not in page] == []


def test_a_nearest_name_for_the_groups_settings() -> None:
    for wrong, right in {"group.ids": "group.id", "sesion.timeout.ms": "session.timeout.ms"}.items():
        with pytest.raises(ConfigError, match=f"did you mean {right}"):
            consumer_config({"bootstrap.servers": "127.0.0.1:1", wrong: "1"})


def test_missing_topics_are_created_only_if_asked_for() -> None:
    for creates in (False, True):
        with ScriptedCluster({"t": 1}) as brokers:
            given = {"bootstrap.servers": brokers.bootstrap_servers, "allow.auto.create.topics": creates}
            with Consumer(given) as consumer:
                consumer.assign([("t", 0, 0)])
                consumer.poll(0)
            asked = [item.message for item in brokers.asked if item.name == "Metadata" and item.message["topics"]]
            assert {item["allow_auto_topic_creation"] for item in asked} == {creates}


@pytest.mark.parametrize("excludes", [True, False])
def test_a_pattern_selects_internal_topics_if_they_are_not_excluded(excludes: bool) -> None:
    with EmbeddedCluster() as cluster:
        given = {"bootstrap.servers": cluster.bootstrap_servers, "group.id": "g", "metadata.max.age.ms": 100}
        with Consumer({**given, "exclude.internal.topics": excludes}) as consumer:
            consumer.committed([("t", 0)])  # creates __consumer_offsets
            consumer.subscribe("^__consumer")
            deadline = time.monotonic() + (30 if not excludes else 2)
            while not consumer.assignment() and time.monotonic() < deadline:
                consumer.poll(0.1)
            assert {topic for topic, _ in consumer.assignment()} == (set() if excludes else {"__consumer_offsets"})
