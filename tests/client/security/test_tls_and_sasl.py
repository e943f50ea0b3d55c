"""TLS and SASL of the client at our broker: every protocol and mechanism, and the errors of refusals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.ranges import fetch_range
from spark_klog.client.net.connection import Connection
from spark_klog.client.offsets import list_offsets
from spark_klog.client.producer.producer import Producer
from spark_klog.errors import (
    AuthenticationError,
    ConfigError,
    ConnectionFailed,
    HandshakeInterrupted,
    KlogError,
    RequestTimedOut,
    SaslError,
    TlsError,
)
from spark_klog.protocol.apis import SASL_AUTHENTICATE, SASL_HANDSHAKE
from spark_klog.protocol.tables.records import LATEST
from tests.support.brokers.kafka_python_wire import read_records
from tests.support.clients.topics import create_topic
from tests.support.servers.broker import KlogBroker
from tests.support.servers.certificates import KEY_PASSWORD, Certificates, Chained, make_certificates, make_chained
from tests.support.servers.kafka import HOST, free_port
from tests.support.servers.secure_broker import PASSWORDS, SecureBroker

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
WAYS = [
    ("SSL", None),
    *((protocol, mechanism) for protocol in ("SASL_PLAINTEXT", "SASL_SSL") for mechanism in MECHANISMS),
]
JAAS = "org.apache.kafka.common.security"
#: Seconds: a final refusal ends all attempts by then.
SOON = 20.0


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of another authority."""
    return make_certificates(tmp_path_factory.mktemp("others"))


@pytest.fixture(scope="module")
def broker(module_server_dir: Path, certificates: Certificates) -> Iterator[SecureBroker]:
    settings = {"ssl.truststore.location": str(certificates.ca), "ssl.client.auth": "requested"}
    with SecureBroker(module_server_dir, certificates, settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def strict_broker(module_server_dir: Path, certificates: Certificates) -> Iterator[SecureBroker]:
    """A broker that requires client certificates."""
    settings = {"ssl.truststore.location": str(certificates.ca), "ssl.client.auth": "required"}
    with SecureBroker(module_server_dir / "strict", certificates, settings=settings) as running:
        yield running


def _round_trip(settings: dict[str, str], topic: str, count: int = 200) -> None:
    """Write and read more than fits into one TLS record."""
    values = [os.urandom(10_000) for _ in range(count)]
    with Cluster.connect(settings) as cluster:
        create_topic(cluster, topic, 1)
        producer = Producer.of_cluster(cluster)
        for value in values:
            producer.send(topic, value)
        producer.flush()
        assert list_offsets(cluster, {(topic, 0): LATEST}) == {(topic, 0): count}
        found = [
            value
            for fetched in fetch_range(cluster, topic, 0, 0, count)
            for _, _, value in read_records(bytes(fetched.data))
        ]
    assert found == values


def _refused(settings: dict[str, str], kind: type[KlogError], soon: float = SOON) -> str:
    begin = time.monotonic()
    with pytest.raises(kind) as caught:
        Cluster.connect(settings)
    assert time.monotonic() - begin < soon
    text = str(caught.value)
    for secret in (*PASSWORDS.values(), KEY_PASSWORD, "wrong-secret"):
        assert secret not in text
    return text


@pytest.mark.parametrize(("protocol", "mechanism"), WAYS)
def test_every_way(broker: SecureBroker, protocol: str, mechanism: str | None) -> None:
    for user in PASSWORDS if mechanism else ["alice"]:
        _round_trip(broker.client(protocol, mechanism, user), f"way-{protocol}-{mechanism}-{user}")


def test_close_loses_no_records_without_acks(broker: SecureBroker) -> None:
    settings = broker.client("SSL")
    with Cluster.connect(settings) as cluster:
        create_topic(cluster, "unconfirmed", 1)
        with Producer(settings | {"acks": "0"}) as producer:
            for _ in range(20):
                producer.send("unconfirmed", bytes(100_000))
        deadline = time.monotonic() + 60
        while list_offsets(cluster, {("unconfirmed", 0): LATEST}) != {("unconfirmed", 0): 20}:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_flush_of_nothing_waits_for_no_broker(module_server_dir: Path, certificates: Certificates) -> None:
    with SecureBroker(module_server_dir / "stopped", certificates) as broker:
        settings = broker.client("SSL") | {"acks": "0", "request.timeout.ms": "6000"}
        with Cluster.connect(settings) as cluster:
            create_topic(cluster, "t", 1)
        with Producer(settings) as producer:
            producer.send("t", b"v")
            producer.flush()
            os.kill(broker.pid, signal.SIGSTOP)
            try:
                begin = time.monotonic()
                producer.flush()
                assert time.monotonic() - begin < 5
                producer.send("t", b"w")
                producer.flush()  # the records are sent, and nobody says more of them
                assert 5 < time.monotonic() - begin < 60
            finally:
                os.kill(broker.pid, signal.SIGCONT)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_bare_tokens(broker: SecureBroker, mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers before Kafka 1.0 have no SaslAuthenticate; ours takes the tokens of such an exchange, too."""
    speaks, version_of = Connection.speaks, Connection.version_of
    monkeypatch.setattr(
        Connection, "speaks", lambda self, api, version: api is not SASL_AUTHENTICATE and speaks(self, api, version)
    )
    monkeypatch.setattr(
        Connection, "version_of", lambda self, api: 0 if api is SASL_HANDSHAKE else version_of(self, api)
    )
    _round_trip(broker.client("SASL_PLAINTEXT", mechanism), f"bare-{mechanism}", 5)
    refused = rf"refuses {mechanism}: it closed the connection\. Check name and password"
    assert re.search(
        refused, _refused(broker.client("SASL_PLAINTEXT", mechanism) | {"sasl.password": "wrong-secret"}, SaslError)
    )


def test_settings_of_java(broker: SecureBroker, certificates: Certificates) -> None:
    settings = {
        "bootstrap.servers": broker.servers("SASL_SSL"),
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.jaas.config": f'kafkashaded.{JAAS}.scram.ScramLoginModule required username="alice" '
        f'password="{PASSWORDS["alice"]}";',
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": certificates.ca.read_text(),
    }
    _round_trip(settings, "java")


def _client_certificates(certificates: Certificates, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the name and settings of each form of the client's certificate."""
    pem = certificates.client.read_text()
    key, chain = pem[: pem.index("-----BEGIN CERT")], pem[pem.index("-----BEGIN CERT") :]
    encrypted = folder / "encrypted.key"
    command = ["openssl", "pkcs8", "-topk8", "-in", str(certificates.client), "-out", str(encrypted)]
    subprocess.run([*command, "-passout", "pass:client-secret"], check=True, capture_output=True)
    (folder / "key.pem").write_text(key)
    (folder / "chain.pem").write_text(chain)
    yield "one PEM file", {"ssl.keystore.location": str(certificates.client), "ssl.keystore.type": "PEM"}
    yield "PEM text", {"ssl.keystore.key": key, "ssl.keystore.certificate.chain": chain}
    store = folder / "store.p12"
    command = ["openssl", "pkcs12", "-export", "-in", str(certificates.client), "-out", str(store)]
    subprocess.run([*command, "-passout", "pass:client-secret"], check=True, capture_output=True)
    passwords = {"ssl.keystore.password": "client-secret"}
    yield "PKCS12", {"ssl.keystore.location": str(store), "ssl.keystore.type": "PKCS12"} | passwords
    jks = folder / "store.jks"
    keytool = ["keytool", "-importkeystore", "-srckeystore", str(store), "-destkeystore", str(jks), "-noprompt"]
    keytool += ["-srcstorepass", "client-secret", "-deststorepass", "client-secret", "-deststoretype", "JKS"]
    subprocess.run(keytool, check=True, capture_output=True)
    yield "JKS", {"ssl.keystore.location": str(jks), "ssl.keystore.type": "JKS"} | passwords
    yield (
        "librdkafka's files",
        {"ssl.key.location": str(folder / "key.pem"), "ssl.certificate.location": str(folder / "chain.pem")},
    )
    yield (
        "an encrypted key",
        {"ssl.keystore.key": encrypted.read_text(), "ssl.certificate.pem": chain, "ssl.key.password": "client-secret"},
    )


def test_client_certificates(strict_broker: SecureBroker, certificates: Certificates, tmp_path: Path) -> None:
    for _, settings in _client_certificates(certificates, tmp_path):
        with Cluster.connect(strict_broker.client("SSL") | settings) as cluster:
            assert cluster.nodes == [0]


@pytest.mark.parametrize("kind", ["PKCS12", "JKS"])
def test_trust_stores_of_keytool(broker: SecureBroker, certificates: Certificates, tmp_path: Path, kind: str) -> None:
    store = tmp_path / "trust"
    keytool = ["keytool", "-importcert", "-noprompt", "-alias", "ca", "-file", str(certificates.ca)]
    keytool += ["-keystore", str(store), "-storetype", kind, "-storepass", "store-secret"]
    subprocess.run(keytool, check=True, capture_output=True)
    settings = broker.client("SSL")
    del settings["ssl.ca.location"]
    settings |= {"ssl.truststore.location": str(store), "ssl.truststore.password": "store-secret"}
    for declared in ("PKCS12", "JKS"):  # keytool's .jks files often are PKCS12
        with Cluster.connect(settings | {"ssl.truststore.type": declared}) as cluster:
            assert cluster.nodes == [0]
    text = _refused(settings | {"ssl.truststore.password": "wrong-secret"}, ConfigError)
    assert f"ssl.truststore.location={store} can't be opened: " in text
    store.write_bytes(store.read_bytes()[:-100])
    assert f"ssl.truststore.location={store} can't be opened: " in _refused(settings, ConfigError)


def test_client_certificates_that_are_refused(
    strict_broker: SecureBroker, certificates: Certificates, others: Certificates, tmp_path: Path
) -> None:
    settings = strict_broker.client("SSL")
    text = _refused(settings, KlogError)
    assert strict_broker.servers("SSL") in text
    assert "ssl.keystore.location" in text
    text = _refused(settings | {"ssl.keystore.location": str(others.client)}, KlogError)
    assert "ssl.keystore.location" in text
    forms = dict(_client_certificates(certificates, tmp_path))
    wrong = settings | forms["an encrypted key"] | {"ssl.key.password": "wrong-secret"}
    assert "can't be decrypted: check ssl.key.password" in _refused(wrong, ConfigError)
    del wrong["ssl.key.password"]  # the client must not ask for it at a terminal
    assert "can't be decrypted: check ssl.key.password" in _refused(wrong, ConfigError)
    for setting in ("ssl.key.password", "ssl.keystore.password"):  # OpenSSL takes 1,024 bytes
        text = _refused(wrong | {setting: "x" * 1025}, ConfigError)
        assert text.startswith(f"{setting}: password cannot be longer than 1024 bytes")
    mixed = settings | forms["librdkafka's files"] | {"ssl.certificate.location": str(others.client)}
    assert "is not the key of the certificate in ssl.certificate.location" in _refused(mixed, ConfigError)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_wrong_password(broker: SecureBroker, mechanism: str) -> None:
    text = _refused(broker.client("SASL_SSL", mechanism, password="wrong-secret"), SaslError)
    assert f"broker {broker.servers('SASL_SSL')} refuses {mechanism}: " in text
    assert "Check name and password of user 'alice'" in text


def test_a_mechanism_that_is_not_enabled(broker: SecureBroker) -> None:
    settings = {
        "bootstrap.servers": broker.servers("SASL_PLAINTEXT"),
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.jaas.config": f"{JAAS}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub='a';",
    }
    assert "refuses OAUTHBEARER: it offers PLAIN, SCRAM-SHA-256, SCRAM-SHA-512" in _refused(settings, SaslError)


def test_another_authority(broker: SecureBroker, others: Certificates) -> None:
    text = _refused(broker.client("SSL") | {"ssl.ca.location": str(others.ca)}, TlsError)
    assert f"the certificate of broker {broker.servers('SSL')} is signed by an authority that is not trusted" in text
    assert "ssl.ca.location must hold" in text
    unchecked = broker.client("SSL") | {"enable.ssl.certificate.verification": "false"}
    with Cluster.connect(unchecked | {"ssl.ca.location": str(others.ca)}):
        pass


def test_another_host_name(broker: SecureBroker) -> None:
    settings = broker.client("SSL") | {"bootstrap.servers": f"localhost:{broker.ports['SSL']}"}
    text = _refused(settings, TlsError)
    assert f"the certificate of broker localhost:{broker.ports['SSL']} is not for this host name" in text
    with Cluster.connect(settings | {"ssl.endpoint.identification.algorithm": ""}):
        pass


def test_an_expired_certificate(tmp_path: Path, server_dir: Path) -> None:
    expired = make_certificates(tmp_path, expired=True)
    with SecureBroker(server_dir, expired) as broker:
        text = _refused(broker.client("SASL_SSL", "PLAIN"), TlsError)
    assert f"the certificate of broker {broker.servers('SASL_SSL')} has expired: the broker needs a new one" in text


def test_protocols_that_do_not_fit_the_port(broker: SecureBroker) -> None:
    def at(port: str, settings: dict[str, str]) -> dict[str, str]:
        return settings | {"bootstrap.servers": broker.servers(port), "socket.connection.setup.timeout.ms": "1500"}

    five_rounds = {"socket.connection.setup.timeout.ms": "60000"}  # time for five attempts on a stalled machine
    text = _refused(at("PLAINTEXT", broker.client("SSL")) | five_rounds, HandshakeInterrupted, 30)
    assert "closed the connection during the TLS handshake: does it use TLS on this port?" in text
    for port in ("SSL", "SASL_SSL"):
        text = _refused(at(port, broker.client("PLAINTEXT")) | five_rounds, TlsError)
        assert "uses TLS on this port: set security.protocol to SSL, or to SASL_SSL if it requires SASL" in text
    text = _refused(at("SASL_SSL", broker.client("SASL_PLAINTEXT", "PLAIN")) | five_rounds, TlsError)
    assert "set security.protocol to SASL_SSL" in text
    text = _refused(at("SASL_PLAINTEXT", broker.client("PLAINTEXT")) | five_rounds, HandshakeInterrupted, 30)
    assert "if it requires SASL on this port, set security.protocol to SASL_PLAINTEXT" in text
    text = _refused(at("PLAINTEXT", broker.client("SASL_PLAINTEXT", "PLAIN")), SaslError)
    assert "this port takes no SASL: set security.protocol to PLAINTEXT or SSL" in text


def test_no_attempt_follows_a_refusal(broker: SecureBroker) -> None:
    """A storm of attempts would lock an account."""
    before = broker.log.read_text().count("wrong name or password")
    settings = broker.client("SASL_PLAINTEXT", "SCRAM-SHA-256", password="wrong-secret")
    _refused(settings, AuthenticationError)
    deadline = time.monotonic() + 60
    while broker.log.read_text().count("wrong name or password") == before and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    assert broker.log.read_text().count("wrong name or password") == before + 1


def test_files_that_are_not_there_or_something_else(broker: SecureBroker, tmp_path: Path) -> None:
    settings = broker.client("SSL")
    text = _refused(settings | {"ssl.ca.location": str(tmp_path / "none.pem")}, ConfigError)
    assert text == f"ssl.ca.location={tmp_path}/none.pem can't be read: No such file or directory"
    (tmp_path / "text").write_text("no certificate")
    text = _refused(settings | {"ssl.ca.location": str(tmp_path / "text")}, ConfigError)
    assert text == f"ssl.ca.location={tmp_path}/text must be PEM, PKCS12 or JKS"


def test_a_certificate_that_is_renewed_counts_at_once(
    strict_broker: SecureBroker, certificates: Certificates, others: Certificates, tmp_path: Path
) -> None:
    own = tmp_path / "client.pem"
    own.write_bytes(others.client.read_bytes())
    settings = strict_broker.client("SSL") | {"ssl.keystore.location": str(own)}
    _refused(settings, KlogError)
    own.write_bytes(certificates.client.read_bytes())
    with Cluster.connect(settings):
        pass


class _Silent:
    """A server that accepts connections and keeps them open in silence."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self._taken: list[socket.socket] = []
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self._taken.append(peer)

    def close(self) -> None:
        for taken in (self._listener, *self._taken):
            taken.close()


@pytest.mark.parametrize(
    ("protocol", "mechanism"),
    [
        ("SASL_SSL", "PLAIN"),
        pytest.param("SSL", None, marks=pytest.mark.test_all("mechanism")),
        pytest.param("SASL_PLAINTEXT", "PLAIN", marks=pytest.mark.test_all("mechanism")),
    ],
)
def test_a_silent_broker_holds_up_nobody(broker: SecureBroker, protocol: str, mechanism: str | None) -> None:
    """A broker that answers no handshake does not block the next one in bootstrap.servers."""
    silent = _Silent()
    try:
        settings = broker.client(protocol, mechanism) | {"request.timeout.ms": "3000"}
        with Cluster.connect(
            settings | {"bootstrap.servers": f"{HOST}:{silent.port},{broker.servers(protocol)}"}
        ) as cluster:
            assert cluster.nodes == [0]
        alone = settings | {"bootstrap.servers": f"{HOST}:{silent.port}", "request.timeout.ms": "700"}
        with pytest.raises((ConnectionFailed, RequestTimedOut)):
            Cluster.connect(alone)
    finally:
        silent.close()


@pytest.mark.parametrize("trusted", ["root", "intermediate", "own"])
def test_each_certificate_of_a_chain_may_be_trusted(trusted: str, chained: Chained, tmp_path: Path) -> None:
    """On both sides, as in Java: the root, the intermediate authority, or the other side's own certificate."""
    of_server, of_client = {
        "root": (chained.root, chained.root),
        "intermediate": (chained.intermediate, chained.intermediate),
        "own": (chained.own_server, chained.own_client),
    }[trusted]
    with _chained_broker(tmp_path, chained, of_client) as broker:
        settings = {"bootstrap.servers": broker.bootstrap_servers, "security.protocol": "SSL"}
        settings |= {"ssl.keystore.location": str(chained.client)}
        _round_trip(settings | {"ssl.truststore.location": str(of_server)}, "t", count=3)
        stranger = settings | {"ssl.truststore.location": str(chained.other_intermediate)}
        assert "is not trusted" in _refused(stranger, TlsError)


def test_a_client_of_another_intermediate_authority_is_refused(chained: Chained, tmp_path: Path) -> None:
    with _chained_broker(tmp_path, chained, chained.other_intermediate) as broker:
        settings = {"bootstrap.servers": broker.bootstrap_servers, "security.protocol": "SSL"}
        settings |= {"ssl.keystore.location": str(chained.client), "ssl.truststore.location": str(chained.root)}
        # TLS 1.3: the broker's alert comes before the client's first request breaks, or after
        assert re.search(r"refuses? the certificate in ssl\.keystore\.location", _refused(settings, KlogError))


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Chained:
    return make_chained(tmp_path_factory.mktemp("chained"))


def _chained_broker(folder: Path, chained: Chained, trust: Path) -> KlogBroker:
    port = free_port()
    settings = {
        "listeners": f"SSL://{HOST}:{port}",
        "ssl.keystore.location": str(chained.server),
        "ssl.keystore.type": "PEM",
        "ssl.truststore.location": str(trust),
        "ssl.client.auth": "required",
    }
    broker = KlogBroker(folder, *(part for name, text in settings.items() for part in ("--set", f"{name}={text}")))
    broker.port = port
    return broker
