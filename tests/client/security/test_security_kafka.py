"""TLS and SASL of the client at Apache Kafka: every protocol and mechanism, refusals, and expiring sessions."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.ranges import fetch_range
from spark_klog.client.net.connection import BrokerIdentity, Connection
from spark_klog.client.producer.producer import Producer
from spark_klog.client.settings import client_config
from spark_klog.errors import ConfigError, ConnectionFailed, KlogError, SaslError, TlsError
from tests.support.brokers.kafka_python_wire import read_records
from tests.support.brokers.tcp_proxy import TcpProxy
from tests.support.clients.topics import create_topic
from tests.support.servers.certificates import make_certificates
from tests.support.servers.kafka import HOST, NEWEST, free_port, versions
from tests.support.servers.secure_kafka import MECHANISMS, PASSWORD, SESSION_SECONDS, SecureKafka, secure_kafka
from tests.support.servers.token_server import TokenServer, unsigned_token

pytestmark = pytest.mark.peer
WAYS = [
    ("SSL", None),
    ("MUTUAL", None),
    *((protocol, mechanism) for protocol in ("SASL_PLAINTEXT", "SASL_SSL") for mechanism in MECHANISMS),
]
SOON = 20.0


@pytest.fixture(scope="module", params=versions(NEWEST, "3.9.1"))
def kafka(request: pytest.FixtureRequest, module_server_dir: Path) -> Iterator[SecureKafka]:
    with secure_kafka(request.param, module_server_dir / request.param) as running:
        yield running


def _round_trip(settings: dict[str, str], topic: str, count: int = 50) -> None:
    values = [os.urandom(10_000) for _ in range(count)]
    with Cluster.connect(settings) as cluster:
        create_topic(cluster, topic)
        producer = Producer.of_cluster(cluster)
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


@pytest.mark.parametrize(("listener", "mechanism"), WAYS)
def test_every_way(kafka: SecureKafka, listener: str, mechanism: str | None) -> None:
    _round_trip(kafka.client(listener, mechanism), f"way-{listener}-{mechanism}")


@pytest.mark.parametrize(("listener", "mechanism"), [("SSL", None), ("SASL_PLAINTEXT", "SCRAM-SHA-512")])
def test_a_connection_for_another_broker(kafka: SecureKafka, listener: str, mechanism: str | None) -> None:
    """With SASL the broker checks it after the authentication only (KIP-1242)."""
    if kafka.kafka.version != NEWEST:
        pytest.skip("brokers before Kafka 4.4 do not check it")
    settings = kafka.client(listener, mechanism)
    port, config = int(kafka.servers(listener).rpartition(":")[2]), client_config(settings)
    with Cluster.connect(settings) as cluster:
        assert cluster.cluster_id is not None
        right = BrokerIdentity(cluster.cluster_id, kafka.kafka.broker_id)
        cluster.connection(kafka.kafka.broker_id)
    Connection(HOST, port, config, expected=right).close()
    with pytest.raises(ConnectionFailed, match="leads to another broker than 9 of cluster"):
        Connection(HOST, port, config, expected=right._replace(node_id=9))


def test_a_client_without_a_certificate(kafka: SecureKafka) -> None:
    settings = kafka.client("MUTUAL")
    del settings["ssl.keystore.location"]
    assert "ssl.keystore.location" in _refused(settings, KlogError)


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
        "from tests.support.servers.token_server import unsigned_token\n"
        "def give():\n    return unsigned_token('alice')\n"
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


def late_token() -> tuple[str, float]:
    """An expired token that claims another hour, so that only the broker finds that it has expired."""
    return unsigned_token("alice", -100), time.time() + 3600


def _expired_token(kafka: SecureKafka, folder: Path) -> dict[str, str]:
    file = folder / "token"
    file.write_text(unsigned_token("alice", -100))
    settings = kafka.client("SASL_SSL", "OAUTHBEARER") | {"sasl.oauthbearer.token.endpoint.url": f"file://{file}"}
    del settings["sasl.jaas.config"]
    return settings


def _late_token(kafka: SecureKafka, folder: Path) -> dict[str, str]:
    settings = kafka.client("SASL_SSL", "OAUTHBEARER") | {"sasl.oauthbearer.provider": f"{__name__}:late_token"}
    del settings["sasl.jaas.config"], settings["sasl.oauthbearer.token.endpoint.url"]
    return settings


#: A refusal: the listener, settings for it, the error and a part of its text.
_Trouble = tuple[str, Callable[[SecureKafka, Path], dict[str, str]], type[KlogError], str]
TROUBLES: dict[str, _Trouble] = {
    **{
        f"wrong password, {mechanism}": (
            "SASL_SSL",
            lambda kafka, _, mechanism=mechanism: kafka.client("SASL_SSL", mechanism, "wrong-secret"),
            SaslError,
            f"refuses {mechanism}: it says: Authentication failed",
        )
        for mechanism in MECHANISMS[:-1]
    },
    "expired token": ("SASL_SSL", _expired_token, SaslError, "expired 100 s ago: it must be renewed there"),
    "token that the broker finds expired": ("SASL_SSL", _late_token, SaslError, "the broker refuses the token"),
    "expired certificate of the broker": (
        "EXPIRED",
        lambda kafka, folder: kafka.client("EXPIRED") | {"ssl.truststore.location": str(kafka.expired_ca)},
        TlsError,
        "has expired: the broker needs a new one",
    ),
    "other authority": (
        "SSL",
        lambda kafka, folder: kafka.client("SSL") | {"ssl.truststore.location": str(make_certificates(folder).ca)},
        TlsError,
        "is signed by an authority that is not trusted: ssl.truststore.location must hold",
    ),
    "other host name": ("SSL", lambda kafka, _: kafka.client("SSL"), TlsError, "is not for this host name"),
    "client certificate of another authority": (
        "MUTUAL",
        lambda kafka, folder: kafka.client("MUTUAL") | {"ssl.keystore.location": str(make_certificates(folder).client)},
        KlogError,
        "ssl.keystore.location",
    ),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_no_attempt_follows_a_refusal(kafka: SecureKafka, tmp_path: Path, trouble: str) -> None:
    """The error says what was refused, and the client connects once: a storm of attempts would lock an account."""
    listener, settings, kind, text = TROUBLES[trouble]
    port = free_port()
    host = "localhost" if trouble == "other host name" else HOST
    with TcpProxy(port, kafka.kafka.ports[listener], 0) as proxy:
        said = _refused(settings(kafka, tmp_path) | {"bootstrap.servers": f"{host}:{port}"}, kind)
        time.sleep(0.3)
        connections = proxy.connections
    assert text in said
    if listener != "MUTUAL" and "token of" not in said:
        assert f"broker {host}:{port} " in said
    assert connections == 1


@pytest.mark.test_all("long")
def test_sessions_are_renewed_on_the_same_connection(kafka: SecureKafka) -> None:
    """Kafka closes a connection that sends a request after its session has expired."""
    topic = "renewed"
    with Cluster.connect(kafka.client("SASL_SSL", "SCRAM-SHA-256")) as cluster:
        create_topic(cluster, topic)
        producer = Producer.of_cluster(cluster)
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
