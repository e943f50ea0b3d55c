"""PLAIN and SCRAM at Kafka 0.10.2.2, which takes bare tokens after SaslHandshake v0."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer as ConfluentProducer

from spark_klog.client import Admin, Consumer, Producer
from spark_klog.errors import SaslError
from tests.support.clients.consumers import SECONDS
from tests.support.servers.kafka import HOST, Kafka

pytestmark = [pytest.mark.peer, pytest.mark.test_all("version")]
MODULES = "org.apache.kafka.common.security"
PASSWORD = "alice-secret"
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


@pytest.fixture(scope="module")
def kafka(module_server_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    jaas = tmp_path_factory.mktemp("jaas") / "server.conf"
    jaas.write_text(
        f"KafkaServer {{\n {MODULES}.plain.PlainLoginModule required user_alice='{PASSWORD}';\n"
        f" {MODULES}.scram.ScramLoginModule required;\n}};\n".replace("'", '"')
    )
    properties = {"sasl.enabled.mechanisms": ",".join(MECHANISMS)}
    kafka = Kafka("0.10.2.2", module_server_dir, properties, listeners={"SASL": "SASL_PLAINTEXT"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_TOOL_OPTIONS", f"-Djava.security.auth.login.config={jaas}")
        kafka.start()
    with kafka:
        hashes = ",".join(f"{name}=[iterations=4096,password={PASSWORD}]" for name in MECHANISMS[1:])
        alice = ("--entity-type", "users", "--entity-name", "alice")
        assert kafka.zookeeper_connect is not None
        arguments = ("--zookeeper", kafka.zookeeper_connect, "--alter", "--add-config", hashes, *alice)
        done = kafka.tool("kafka.admin.ConfigCommand", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        yield kafka


def _settings(kafka: Kafka, mechanism: str, password: str = PASSWORD) -> dict[str, str]:
    return {
        "bootstrap.servers": f"{HOST}:{kafka.ports['SASL']}",
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.username": "alice",
        "sasl.password": password,
    }


def _wait_for(kafka: Kafka, mechanism: str) -> None:
    """Wait until the broker has the users from ZooKeeper."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return Admin(_settings(kafka, mechanism)).close()
        except SaslError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_client(kafka: Kafka, mechanism: str) -> None:
    settings, topic = _settings(kafka, mechanism), f"t-{mechanism}"
    _wait_for(kafka, mechanism)
    with Admin(settings) as admin:
        admin.create_topic(topic, 1, replication_factor=1)
    old = {"api.version.request": "false", "broker.version.fallback": "0.10.2", "log_level": 0}
    theirs = ConfluentProducer(settings | old)
    theirs.produce(topic, b"theirs")
    assert theirs.flush(SECONDS) == 0
    with Producer(settings) as producer:
        producer.send(topic, b"ours").result(SECONDS)
    with Consumer(settings | {"group.id": topic, "auto.offset.reset": "earliest"}) as consumer:
        consumer.subscribe([topic])
        values: list[bytes | None] = []
        deadline = time.monotonic() + SECONDS
        while len(values) < 2 and time.monotonic() < deadline:
            values += [record.value for record in consumer.poll(1.0)]
    assert values == [b"theirs", b"ours"]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_wrong_password_is_an_error_at_once(kafka: Kafka, mechanism: str) -> None:
    _wait_for(kafka, mechanism)
    begin = time.monotonic()
    with pytest.raises(
        SaslError, match=rf"refuses {mechanism}: it closed the connection\. Check name and password"
    ) as refused:
        Admin(_settings(kafka, mechanism, "wrong-secret"))
    assert time.monotonic() - begin < SECONDS / 2
    assert "wrong-secret" not in str(refused.value)


def test_a_mechanism_that_it_does_not_offer(kafka: Kafka) -> None:
    settings = _settings(kafka, "OAUTHBEARER") | {
        "sasl.oauthbearer.provider": "tests.client.security.test_sasl_of_old_kafka:token"
    }
    del settings["sasl.username"], settings["sasl.password"]
    with pytest.raises(SaslError, match=r"refuses OAUTHBEARER: it offers .*SCRAM-SHA-256"):
        Admin(settings)


def token() -> str:
    return "a-token"
