"""Third-party clients over TLS and SASL."""

from __future__ import annotations

import json
import os
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kafka as kafka_python
import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from spark_klog.broker.metadata.registry import Registry
from spark_klog.broker.security.config import SecurityConfig
from spark_klog.broker.security.tls import server_context
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError
from spark_klog.protocol.apis import API_VERSIONS, METADATA, SASL_AUTHENTICATE, SASL_HANDSHAKE
from spark_klog.protocol.codec import encode_request
from spark_klog.trees.memory import MemoryTree
from spark_klog.trees.paths import Endpoint
from tests.support.brokers.raw_client import CLIENT_ID, RawClient
from tests.support.clients.tools import ToolFailed, kcat
from tests.support.servers.broker import KlogBroker, broker_command, refusal
from tests.support.servers.certificates import KEY_PASSWORD, Certificates, make_certificates, trusting
from tests.support.servers.kafka import HOST, NEWEST, free_port, kafka_libs
from tests.support.servers.secure_broker import PASSWORDS, SecureBroker, add_user

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
WAYS = [
    ("PLAINTEXT", None),
    ("SSL", None),
    *((protocol, name) for protocol in ("SASL_PLAINTEXT", "SASL_SSL") for name in MECHANISMS),
]
QUICK = ("-X", "topic.metadata.propagation.max.ms=500", "-X", "message.timeout.ms=5000")


@pytest.fixture(scope="module")
def broker(module_server_dir: Path, certificates: Certificates) -> Iterator[SecureBroker]:
    with SecureBroker(module_server_dir, certificates) as running:
        yield running
    log = running.log.read_text()
    assert "Traceback" not in log
    for secret in (*PASSWORDS.values(), KEY_PASSWORD, "wrong-secret"):
        assert secret not in log
        assert repr(secret)[1:-1] not in log


@pytest.mark.parametrize(("protocol", "mechanism"), WAYS)
def test_kcat(broker: SecureBroker, topic: str, protocol: str, mechanism: str | None) -> None:
    way = broker.kcat(protocol, mechanism)
    text = b"".join(b"line %d\n" % number for number in range(100))
    kcat("-P", *way, "-t", topic, stdin=text)
    assert kcat("-C", *way, "-t", topic, "-e", "-q") == text
    metadata = json.loads(kcat("-L", "-J", *way, "-t", topic))
    assert metadata["brokers"] == [{"id": 0, "name": broker.servers(protocol)}]  # the listener that kcat connected to


@pytest.mark.parametrize(("protocol", "mechanism"), WAYS)
def test_confluent_kafka(broker: SecureBroker, topic: str, protocol: str, mechanism: str | None) -> None:
    """User bob; 4 MB are more than one write takes, so the broker sends files over TLS piece by piece."""
    way = broker.client(protocol, mechanism, user="bob")
    values = [os.urandom(100_000) for _ in range(40)]
    failures: list[KafkaError] = []
    producer = Producer(way)
    for value in values:
        producer.produce(topic, value, partition=0, on_delivery=lambda error, _: error and failures.append(error))
    assert producer.flush(20) == 0
    assert failures == []
    consumer = Consumer(way | {"group.id": "none", "enable.auto.commit": False, "check.crcs": True})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found = consumer.consume(len(values), 20)
    assert [(message.error(), message.value()) for message in found] == [(None, value) for value in values]
    consumer.close()


@pytest.mark.parametrize(("protocol", "mechanism"), WAYS)
def test_kafka_python(broker: SecureBroker, topic: str, protocol: str, mechanism: str | None) -> None:
    way = broker.kafka_python(protocol, mechanism, user="bob")
    producer = kafka_python.KafkaProducer(**way, enable_idempotence=False)
    producer.send(topic, b"one", partition=0).get(20)
    producer.close()
    consumer = kafka_python.KafkaConsumer(**way, consumer_timeout_ms=10_000, auto_offset_reset="earliest")
    consumer.assign([kafka_python.TopicPartition(topic, 0)])
    assert next(consumer).value == b"one"
    consumer.close()


@pytest.mark.peer
@pytest.mark.parametrize(
    ("protocol", "mechanism"),
    [
        ("SASL_SSL", "SCRAM-SHA-512"),
        pytest.param("SSL", None, marks=pytest.mark.test_all("mechanism")),
        pytest.param("SASL_PLAINTEXT", "PLAIN", marks=pytest.mark.test_all("mechanism")),
    ],
)
def test_java_tools(broker: SecureBroker, topic: str, tmp_path: Path, protocol: str, mechanism: str | None) -> None:
    settings = tmp_path / "client.properties"
    settings.write_text(broker.java(protocol, mechanism))
    java = ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m", "-cp", f"{kafka_libs(NEWEST)}/*"]
    wanted = ["--num-records", "500", "--record-size", "100", "--throughput", "-1", "--producer.config", str(settings)]
    command = [*java, "org.apache.kafka.tools.ProducerPerformance", "--topic", topic, *wanted]
    command += ["--producer-props", f"bootstrap.servers={broker.servers(protocol)}"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "500 records sent" in made.stdout, made
    sent = kcat("-C", *broker.kcat("PLAINTEXT"), "-t", topic, "-e", "-q", "-f", "%S\n")
    assert sent == b"100\n" * 500


def _errors(settings: dict[str, Any], wanted: str = "") -> str:
    """Return librdkafka's errors when it can't list topics; poll until they contain `wanted`."""
    said: list[str] = []
    client = AdminClient(settings | {"error_cb": lambda error: said.append(f"{error.name()} {error.str()}")})
    with pytest.raises(Exception, match=r"_TRANSPORT|_TIMED_OUT"):  # depends on whether it has a connection just then
        client.list_topics(timeout=0.7)
    client.poll(0)
    deadline = time.monotonic() + 60
    while not (said and wanted in " ".join(said)) and time.monotonic() < deadline:
        client.poll(0.1)
    return " ".join(said)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("user", ["alice", "mallory"])
def test_wrong_passwords_and_unknown_users_look_alike(broker: SecureBroker, user: str, mechanism: str) -> None:
    way = broker.client("SASL_PLAINTEXT", mechanism, user=user, password="wrong-secret")
    said = _errors(way, "wrong name or password")
    assert "_AUTHENTICATION" in said
    assert "wrong name or password" in said
    line = broker.wait_for_log(f"wrong name or password for user '{user}'")
    assert "127.0.0.1:" in line


def test_who_does_not_authenticate_is_not_served(broker: SecureBroker) -> None:
    assert _errors({"bootstrap.servers": broker.servers("SASL_PLAINTEXT")})
    assert "API 3 before authentication" in broker.wait_for_log("before authentication")


def test_a_password_of_another_user_is_wrong(broker: SecureBroker) -> None:
    assert "_AUTHENTICATION" in _errors(
        broker.client("SASL_SSL", "SCRAM-SHA-256", password=PASSWORDS["bob"]), "_AUTHENTICATION"
    )


def test_plaintext_on_a_tls_listener(broker: SecureBroker) -> None:
    with RawClient(broker.ports["SSL"]) as client:
        client.send_frame(encode_request(METADATA, 4, 1, CLIENT_ID, {"topics": []}).to_bytes())
        assert client.socket.recv(7, socket.MSG_WAITALL).startswith(b"\x15\x03")  # a TLS alert
        assert client.is_closed()
        port = client.socket.getsockname()[1]
    broker.wait_for_log(f"127.0.0.1:{port}", "connection to SSL failed: the client does not use TLS")


def test_a_client_that_trusts_another_signer(broker: SecureBroker, tmp_path: Path) -> None:
    other = make_certificates(tmp_path)
    assert "SSL" in _errors(broker.client("SSL") | {"ssl.ca.location": str(other.ca)}, "SSL")


def test_old_tls_is_refused(broker: SecureBroker) -> None:
    context = trusting(broker.certificates.ca)
    for version, accepted in (("TLSv1.2", True), ("TLSv1.3", True)):
        context.minimum_version = context.maximum_version = ssl.TLSVersion[version.replace(".", "_")]
        with socket.create_connection((HOST, broker.ports["SSL"])) as plain:
            with context.wrap_socket(plain, server_hostname=HOST) as tls:
                assert (tls.version() == version) is accepted
    old = subprocess.run(
        ["openssl", "s_client", "-connect", broker.servers("SSL"), "-tls1_1", "-cipher", "ALL:@SECLEVEL=0"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert old.returncode != 0
    assert "Cipher is (NONE)" in old.stdout


def _plain(user: str, password: str) -> bytes:
    return f"\0{user}\0{password}".encode()


def test_the_old_handshake_takes_bare_tokens(broker: SecureBroker) -> None:
    """Clients older than Kafka 1.0 send SaslHandshake 0, then frames that hold nothing but the token."""
    with RawClient(broker.ports["SASL_PLAINTEXT"]) as client:
        answer = client.request(SASL_HANDSHAKE, 0, {"mechanism": "PLAIN"})
        assert answer == {"error_code": 0, "mechanisms": list(MECHANISMS)}
        client.send_frame(_plain("alice", PASSWORDS["alice"]))
        assert client.receive_frame() == b""
        assert client.request(METADATA, 4, {"topics": []})["brokers"]
    with RawClient(broker.ports["SASL_PLAINTEXT"]) as client:
        client.request(SASL_HANDSHAKE, 0, {"mechanism": "PLAIN"})
        client.send_frame(_plain("alice", "wrong-secret"))
        assert client.is_closed()


def test_kafka_python_of_old_kafka(broker: SecureBroker, topic: str) -> None:
    way = broker.kafka_python("SASL_PLAINTEXT", "SCRAM-SHA-256") | {"api_version": (0, 11)}
    producer = kafka_python.KafkaProducer(**way, enable_idempotence=False)
    assert producer.send(topic, b"one", partition=0).get(20).offset == 0
    producer.close()


def test_requests_in_the_middle_of_the_handshake(broker: SecureBroker) -> None:
    port = broker.ports["SASL_PLAINTEXT"]
    with RawClient(port) as client:
        assert client.request(API_VERSIONS, 0, {})["error_code"] == 0
        assert client.request(SASL_AUTHENTICATE, 1, {"auth_bytes": b"x"})["error_code"] == 34
        assert client.request(SASL_HANDSHAKE, 1, {"mechanism": "PLAIN"})["error_code"] == 0
        assert client.request(SASL_HANDSHAKE, 1, {"mechanism": "PLAIN"})["error_code"] == 34
        client.send_frame(encode_request(METADATA, 4, 1, CLIENT_ID, {"topics": []}).to_bytes())
        assert client.is_closed()
    with RawClient(port) as client:
        answer = client.request(SASL_HANDSHAKE, 1, {"mechanism": "GSSAPI"})
        assert answer == {"error_code": 33, "mechanisms": list(MECHANISMS)}
        assert client.is_closed()
    with RawClient(port) as client:
        client.request(SASL_HANDSHAKE, 1, {"mechanism": "PLAIN"})
        answer = client.request(SASL_AUTHENTICATE, 2, {"auth_bytes": _plain("bob", "wrong-secret")})
        assert answer["error_code"] == 58
        assert client.is_closed()
    with RawClient(port) as client:
        client.request(SASL_HANDSHAKE, 1, {"mechanism": "PLAIN"})
        answer = client.request(SASL_AUTHENTICATE, 1, {"auth_bytes": _plain("bob", PASSWORDS["bob"])})
        assert (answer["error_code"], answer["session_lifetime_ms"]) == (0, 0)
        assert client.request(SASL_HANDSHAKE, 1, {"mechanism": "PLAIN"})["error_code"] == 34
        assert client.request(METADATA, 4, {"topics": []})["brokers"]
    with RawClient(port) as client:  # a frame larger than any token
        client.socket.sendall(struct.pack(">i", 1_000_000))
        assert client.is_closed()


def test_the_users_file_is_read_again(broker: SecureBroker) -> None:
    add_user(broker.users, "carol", "first-secret", "--mechanism", "SCRAM-SHA-512")
    assert broker.users.stat().st_mode & 0o777 == 0o600
    way = broker.client("SASL_PLAINTEXT", "SCRAM-SHA-512", "carol", "first-secret")
    assert AdminClient(way).list_topics(timeout=60).brokers  # librdkafka retries
    broker.wait_for_log("3 users in")
    # carol has no SCRAM-SHA-256 credentials
    assert "_AUTHENTICATION" in _errors(way | {"sasl.mechanism": "SCRAM-SHA-256"}, "_AUTHENTICATION")
    assert AdminClient(way | {"sasl.mechanism": "PLAIN"}).list_topics(timeout=20).brokers


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[SecureBroker]:
    """A broker that requires client certificates; that of the tests' client may read and write open-*."""
    rules = "\n[user CN=reader,O=Example\\, Inc.]\nread = open-*\nwrite = open-*\n"
    settings = {"ssl.client.auth": "required", "ssl.truststore.location": str(certificates.ca)}
    with SecureBroker(tmp_path_factory.mktemp("mutual"), certificates, rules, settings) as running:
        yield running


def test_client_certificates(mutual: SecureBroker, tmp_path: Path) -> None:
    mine = str(mutual.certificates.client)
    own = {"ssl.certificate.location": mine, "ssl.key.location": mine}
    arguments = [*mutual.kcat("SSL"), *(part for item in own.items() for part in ("-X", "=".join(item)))]
    kcat("-P", *arguments, "-t", "open-1", stdin=b"x\n")
    assert kcat("-C", *arguments, "-t", "open-1", "-e", "-q") == b"x\n"
    with pytest.raises(ToolFailed, match="uthorization"):
        kcat("-P", *arguments, *QUICK, "-t", "closed", stdin=b"x\n")
    assert _errors(mutual.client("SSL"))
    mutual.wait_for_log("PEER_DID_NOT_RETURN_A_CERTIFICATE")
    other = str(make_certificates(tmp_path).client)
    assert _errors(mutual.client("SSL") | {"ssl.certificate.location": other, "ssl.key.location": other})
    mutual.wait_for_log("CERTIFICATE_VERIFY_FAILED")


def test_named_and_advertised_listeners(tmp_path: Path) -> None:
    inside, outside, told = free_port(), free_port(), free_port()
    settings = {
        "listeners": f"INSIDE://:{inside},OUTSIDE://0.0.0.0:{outside}",
        "advertised.listeners": f"OUTSIDE://localhost:{told}",
        "listener.security.protocol.map": "INSIDE:PLAINTEXT,OUTSIDE:PLAINTEXT",
    }
    arguments = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    with KlogBroker(tmp_path, *arguments) as broker:
        found = {}
        for port in (inside, outside):
            with RawClient(port) as client:
                (entry,) = client.request(METADATA, 4, {"topics": []})["brokers"]
                found[port] = (entry["host"], entry["port"])
        assert found == {inside: (HOST, inside), outside: ("localhost", told)}
        assert f"ready on {HOST}:{inside}" in broker.ready_line


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"listeners": "SSL://:0"}, "ssl.keystore.location"),
        ({"listeners": "SASL_PLAINTEXT://:0"}, "klog.users.file"),
        ({"listeners": "OUT://:0"}, "listener.security.protocol.map"),
        ({"listeners": "PLAINTEXT://:x"}, "NAME://HOST:PORT"),
        ({"listeners": "PLAINTEXT://0.0.0.0:0"}, "advertised.listeners"),
        ({"listeners": "PLAINTEXT://:0,PLAINTEXT://:0"}, "twice"),
        ({"ssl.keystore.type": "JKS"}, "keytool"),
        ({"listeners": "SSL://:0", "ssl.keystore.location": "SERVER"}, "ssl.key.password"),
        ({"listeners": "SSL://:0", "ssl.keystore.location": "SERVER", "ssl.key.password": "no"}, "ssl.key.password"),
        ({"listeners": "SSL://:0", "ssl.keystore.location": "/not/there"}, "No such file"),
        ({"ssl.client.auth": "required"}, "ssl.truststore.location"),
        ({"sasl.enabled.mechanisms": "GSSAPI"}, "SCRAM-SHA-256"),
        ({"klog.users.file": "/not/there"}, "klog users add"),
    ],
)
def test_settings_that_are_refused(
    tmp_path: Path, certificates: Certificates, settings: dict[str, str], text: str
) -> None:
    arguments = ["listeners=PLAINTEXT://:0"] if "listeners" not in settings else []
    arguments += [f"{name}={value.replace('SERVER', str(certificates.server))}" for name, value in settings.items()]
    command = broker_command(tmp_path, 0, *(part for argument in arguments for part in ("--set", argument)))
    told = refusal(command)
    assert text in told


@pytest.mark.parametrize(
    ("parts", "password", "why"),
    [
        (["server.crt"], "", "it holds no private key"),
        (["client.key"], "", "it holds no certificate"),
        (["server.key", "server.crt"], "no", "the key can't be decrypted: check ssl.key.password"),
        (["client.key", "server.crt"], "", "KEY_VALUES_MISMATCH"),
        ([], "", "not PEM"),
    ],
)
def test_what_is_wrong_with_a_key_store(
    certificates: Certificates, tmp_path: Path, parts: list[str], password: str, why: str
) -> None:
    store = tmp_path / "store.pem"
    store.write_text("".join((certificates.server.parent / part).read_text() for part in parts))
    with pytest.raises(ConfigError, match=f"{store}: {why}; it must be a PEM file with key and certificates"):
        server_context(SecurityConfig(key_store=store, key_password=password))


@pytest.mark.parametrize(
    "text",
    [
        "[user a]\nSCRAM-SHA-256 = c2VjcmV0\n",
        "[user a]\npassword = c2VjcmV0\n",
        "c2VjcmV0\n",
        "[a]\n",
        "[user a]\nread=a*b",
    ],
)
def test_a_bad_users_file_is_refused_and_not_quoted(tmp_path: Path, text: str) -> None:
    file = tmp_path / "users"
    file.write_text(text)
    told = refusal(broker_command(tmp_path / "data", 0, "--set", f"klog.users.file={file}"))
    assert f"users file {file}" in told
    assert "c2VjcmV0" not in told


def test_an_embedded_cluster_with_passwords(make_cluster: Callable[..., EmbeddedCluster], tmp_path: Path) -> None:
    """Two brokers whose listeners have the same names; Metadata lists both."""
    add_user(tmp_path / "users", "alice", "embedded-secret")
    settings = {"listeners": "SASL_PLAINTEXT://127.0.0.1:0", "klog.users.file": str(tmp_path / "users")}
    cluster = make_cluster(2, settings=settings)
    first, second = cluster.bootstrap_servers.split(",")
    way = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "SCRAM-SHA-256"}
    way |= {"sasl.username": "alice", "sasl.password": "embedded-secret", "bootstrap.servers": second}
    admin = AdminClient(way)
    deadline = time.monotonic() + 60
    while True:  # the brokers learn of each other from the tree
        found = {f"{broker.host}:{broker.port}" for broker in admin.list_topics(timeout=60).brokers.values()}
        if found == {first, second} or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert found == {first, second}


def test_brokers_without_a_listener_are_left_out_of_it() -> None:
    tree = MemoryTree()
    plain = Endpoint("IN", "PLAINTEXT", "a", 1), Endpoint("IN", "PLAINTEXT", "b", 1)
    Registry(tree, 0).registration.register([plain[0], Endpoint("OUT", "SSL", "a.example", 2)])
    registry = Registry(tree, 1)
    registry.registration.register([plain[1]])
    registry.refresh()
    assert registry.addresses("IN") == {0: ("a", 1), 1: ("b", 1)}
    assert registry.addresses("OUT") == {0: ("a.example", 2)}
    assert sorted(registry.brokers) == [0, 1]
