"""The client by TLS and SASL at Apache Kafka: every protocol and mechanism, refusals, and sessions that end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_klog.client.cluster import Cluster
from spark_klog.client.fetcher import fetch_range
from spark_klog.client.producer import Producer
from spark_klog.errors import ConfigError, ConnectionFailed, KlogError, SaslError, TlsError
from tests.support.certificates import Certificates, make_certificates
from tests.support.kafka import HOST, Kafka, versions
from tests.support.kafka_python_wire import read_records
from tests.support.secure_kafka import JAAS, add_scram_users, tls_properties
from tests.support.token_server import TokenServer, unsigned_token
from tests.support.topics import create_topic

pytestmark = pytest.mark.peer
PASSWORD = 'alice\'s, "secret"=1'
LISTENERS = {"SSL": "SSL", "MUTUAL": "SSL", "SASL_PLAINTEXT": "SASL_PLAINTEXT", "SASL_SSL": "SASL_SSL"}
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
WAYS = [
    ("SSL", None),
    *((protocol, mechanism) for protocol in ("SASL_PLAINTEXT", "SASL_SSL") for mechanism in MECHANISMS),
]
#: How long a session by SCRAM-SHA-256 lasts.
SESSION_SECONDS = 6.0
SOON = 8.0


class SecureKafka:
    """A broker of Apache Kafka with a listener of each kind, and clients' settings for it."""

    def __init__(self, kafka: Kafka, certificates: Certificates, tokens: TokenServer) -> None:
        self.kafka, self.certificates, self.tokens = kafka, certificates, tokens

    def servers(self, listener: str) -> str:
        return f"{HOST}:{self.kafka.ports[listener]}"

    def client(self, listener: str, mechanism: str | None = None, password: str = PASSWORD) -> dict[str, str]:
        settings = {"bootstrap.servers": self.servers(listener), "security.protocol": LISTENERS[listener]}
        if "SSL" in LISTENERS[listener]:
            settings["ssl.truststore.location"] = str(self.certificates.ca)
        if mechanism == "OAUTHBEARER":
            settings["sasl.mechanism"] = mechanism
            settings["sasl.oauthbearer.token.endpoint.url"] = self.tokens.url
            settings["sasl.jaas.config"] = (
                f"{JAAS}.oauthbearer.OAuthBearerLoginModule required clientId='{self.tokens.client_id}' "
                f"clientSecret='{self.tokens.secret}' scope='kafka';"
            )
        elif mechanism is not None:
            settings |= {"sasl.mechanism": mechanism, "sasl.username": "alice", "sasl.password": password}
        return settings


def _properties(certificates: Certificates, folder: Path) -> dict[str, object]:
    properties: dict[str, object] = {
        **tls_properties(certificates, folder),
        "listener.name.mutual.ssl.client.auth": "required",
        "sasl.enabled.mechanisms": ",".join(MECHANISMS),
    }
    quoted = PASSWORD.replace('"', '\\\\"')
    modules = {
        "plain": f'plain.PlainLoginModule required user_alice="{quoted}";',
        "scram-sha-256": "scram.ScramLoginModule required;",
        "scram-sha-512": "scram.ScramLoginModule required;",
        "oauthbearer": 'oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";',
    }
    for listener in ("sasl_plaintext", "sasl_ssl"):
        start = f"listener.name.{listener}"
        properties |= {f"{start}.{name}.sasl.jaas.config": f"{JAAS}.{module}" for name, module in modules.items()}
        properties[f"{start}.scram-sha-256.connections.max.reauth.ms"] = round(1000 * SESSION_SECONDS)
    return properties


@pytest.fixture(scope="module", params=versions("4.1.0", "3.9.1"))
def kafka(
    request: pytest.FixtureRequest, module_server_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecureKafka]:
    folder = tmp_path_factory.mktemp("certificates")
    certificates = make_certificates(folder)
    properties = _properties(certificates, folder)
    server = Kafka(request.param, module_server_dir / request.param, properties, listeners=LISTENERS)
    with server, TokenServer() as tokens:
        add_scram_users(server, {"alice": PASSWORD})
        yield SecureKafka(server, certificates, tokens)


def _round_trip(settings: dict[str, str], topic: str, count: int = 50) -> None:
    values = [os.urandom(10_000) for _ in range(count)]
    with Cluster.connect(settings) as cluster:
        create_topic(cluster, topic)
        producer = Producer(cluster)
        for value in values:
            producer.send(topic, value)
        producer.flush()
        found = [
            value
            for fetched in fetch_range(cluster, topic, 0, 0, count)
            for _, _, value in read_records(bytes(fetched.data))
        ]
    assert found == values


def _refused(settings: dict[str, str], kind: type[KlogError]) -> str:
    begin = time.monotonic()
    with pytest.raises(kind) as caught:
        Cluster.connect(settings | {"socket.connection.setup.timeout.ms": "2000"})
    assert time.monotonic() - begin < SOON
    for secret in (PASSWORD, "wrong-secret", TokenServer.secret):
        assert secret not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("protocol", "mechanism"), WAYS)
def test_every_way(kafka: SecureKafka, protocol: str, mechanism: str | None) -> None:
    _round_trip(kafka.client(protocol, mechanism), f"way-{protocol}-{mechanism}")


def test_client_certificates(kafka: SecureKafka) -> None:
    settings = kafka.client("MUTUAL")
    with Cluster.connect(settings | {"ssl.keystore.location": str(kafka.certificates.client)}) as cluster:
        assert cluster.nodes
    assert "ssl.keystore.location" in _refused(settings, KlogError)


@pytest.mark.parametrize("mechanism", MECHANISMS[:-1])
def test_a_wrong_password(kafka: SecureKafka, mechanism: str) -> None:
    text = _refused(kafka.client("SASL_SSL", mechanism, "wrong-secret"), SaslError)
    assert f"broker {kafka.servers('SASL_SSL')} refuses {mechanism}: it says: Authentication failed" in text


def test_tokens_that_are_refused(kafka: SecureKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = kafka.client("SASL_PLAINTEXT", "OAUTHBEARER")
    wrong = settings["sasl.jaas.config"].replace(TokenServer.secret, "wrong-secret")
    text = _refused(settings | {"sasl.jaas.config": wrong}, SaslError)
    assert f"the token endpoint {kafka.tokens.url} answers 401 (invalid_client: something that is not shown" in text
    del settings["sasl.jaas.config"]
    file = tmp_path / "token"
    settings["sasl.oauthbearer.token.endpoint.url"] = f"file://{file}"
    assert "can't be read: No such file" in _refused(settings, ConfigError)
    file.write_text(unsigned_token("alice", -100))
    assert f"the OAUTHBEARER token of {file} expired " in _refused(settings, SaslError)
    file.write_text("not.a.token")
    text = _refused(settings, SaslError)
    assert f"broker {kafka.servers('SASL_PLAINTEXT')} refuses OAUTHBEARER: the broker refuses the token" in text
    file.write_text(f"{unsigned_token('alice')}\n")
    _round_trip(settings, "token-file")
    del settings["sasl.oauthbearer.token.endpoint.url"]
    (tmp_path / "my_tokens.py").write_text(
        "from tests.support.token_server import unsigned_token\ndef give():\n    return unsigned_token('alice')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    _round_trip(settings | {"sasl.oauthbearer.provider": "my_tokens:give"}, "token-provider")
    sys.modules.pop("my_tokens")
    text = _refused(settings | {"sasl.oauthbearer.provider": "my_tokens:none"}, ConfigError)
    assert "sasl.oauthbearer.provider=my_tokens:none can't be imported" in text


def test_tokens_are_used_again(kafka: SecureKafka) -> None:
    with TokenServer() as tokens:
        other = SecureKafka(kafka.kafka, kafka.certificates, tokens)
        for _ in range(3):
            _refused_or_connected(other.client("SASL_PLAINTEXT", "OAUTHBEARER"))
        assert tokens.given == 1


def _refused_or_connected(settings: dict[str, str]) -> None:
    with Cluster.connect(settings) as cluster:
        assert cluster.nodes


def test_protocols_that_do_not_fit_the_port(kafka: SecureKafka) -> None:
    def at(listener: str, settings: dict[str, str]) -> dict[str, str]:
        return settings | {"bootstrap.servers": kafka.servers(listener)}

    text = _refused(kafka.client("SSL") | {"bootstrap.servers": kafka.kafka.bootstrap_servers}, KlogError)
    assert "does it use TLS on this port?" in text or "does not speak TLS on this port" in text
    plain = {"bootstrap.servers": "", "security.protocol": "PLAINTEXT"}
    assert "TLS on this port" in _refused(at("SSL", plain), KlogError)
    assert "if it requires SASL on this port" in _refused(at("SASL_PLAINTEXT", plain), ConnectionFailed)
    sasl = kafka.client("SASL_PLAINTEXT", "PLAIN") | {"bootstrap.servers": kafka.kafka.bootstrap_servers}
    assert "this port takes no SASL" in _refused(sasl, SaslError)


def test_other_authorities_and_names(kafka: SecureKafka, tmp_path: Path) -> None:
    other = make_certificates(tmp_path)
    text = _refused(kafka.client("SSL") | {"ssl.truststore.location": str(other.ca)}, TlsError)
    assert "is signed by an authority that is not trusted: ssl.truststore.location must hold" in text
    named = kafka.client("SSL") | {"bootstrap.servers": f"localhost:{kafka.kafka.ports['SSL']}"}
    assert "is not for this host name" in _refused(named, TlsError)


def test_sessions_are_renewed_on_the_same_connection(kafka: SecureKafka) -> None:
    """Kafka closes a connection that sends a request after its session has ended."""
    topic = "renewed"
    with Cluster.connect(kafka.client("SASL_SSL", "SCRAM-SHA-256")) as cluster:
        create_topic(cluster, topic)
        producer = Producer(cluster)
        node = cluster.leader(topic, 0)
        connection = cluster.connection(node)
        begin, sent = time.monotonic(), 0
        while time.monotonic() - begin < 1.3 * SESSION_SECONDS:
            for _ in range(10):
                producer.send(topic, b"%d" % sent)
                sent += 1
            producer.flush()
            found = [
                value
                for fetched in fetch_range(cluster, topic, 0, sent - 10, sent)
                for _, _, value in read_records(bytes(fetched.data))
            ]
            assert found[-1] == b"%d" % (sent - 1)
            time.sleep(0.05)
        assert cluster.connection(node) is connection
        assert not connection.closed
