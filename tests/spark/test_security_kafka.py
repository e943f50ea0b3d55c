"""Spark over TLS and SASL at Apache Kafka: batch, stream and write, on the driver's machine and on `local-cluster`.

The tests of each protocol and mechanism (s: make soak only):

    at                     Python                     Spark, local[2]            Spark, local-cluster
    our broker             test_tls_and_sasl.py:      test_security.py:          here, s: SSL with client certificates,
                           all that it has            SASL_SSL + SCRAM-512       SASL_SSL with each mechanism
    Kafka 4.4.0, 3.9.1     test_security_kafka.py:    here: client certificates  here, s: all that Python is tested with
    (one of the two: s)    SSL, client certificates,  and SASL_SSL + SCRAM-512;
                           SASL_PLAINTEXT, SASL_SSL   the others: s
                           with PLAIN, SCRAM-256,
                           SCRAM-512, OAUTHBEARER
    .. GSSAPI              test_kerberos.py:          test_kerberos.py:          test_kerberos.py, s: both
                           SASL_PLAINTEXT, SASL_SSL   SASL_SSL; the other: s
    Kafka 0.10.2.2         test_sasl_of_old_kafka.py: PLAIN, SCRAM by SASL_PLAINTEXT; test_kerberos.py, s: GSSAPI

Our broker has no OAUTHBEARER and no GSSAPI. tests/client/security/test_security_kafka.py tests each refusal.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession, functions as f

from tests.support.brokers.tcp_proxy import TcpProxy
from tests.support.servers.certificates import make_certificates
from tests.support.servers.kafka import ALL_VERSIONS, HOST, NEWEST, free_port, versions
from tests.support.servers.secure_broker import SecureBroker
from tests.support.servers.secure_kafka import MECHANISMS, PASSWORD, SecureKafka, secure_kafka

from .security_program import VALUES, run, topics, write_read_and_stream
from .support import Job, error_of

# test_security.py has one mechanism, and a wrong password, at our broker
pytestmark = [pytest.mark.test_all("mechanism")]

_SASL = [(protocol, mechanism) for protocol in ("SASL_PLAINTEXT", "SASL_SSL") for mechanism in MECHANISMS]
WAYS = [("SSL", None), ("MUTUAL", None), *_SASL]
QUICK = [("MUTUAL", None), ("SASL_SSL", "SCRAM-SHA-512")]
LOCAL_CLUSTER = "local-cluster[2,1,1024]"
soak = pytest.mark.skipif(not ALL_VERSIONS, reason="part of make soak")


@pytest.fixture(scope="module", params=versions(NEWEST, "3.9.1"))
def kafka(request: pytest.FixtureRequest, module_server_dir: Path) -> Iterator[SecureKafka]:
    with secure_kafka(request.param, module_server_dir / request.param) as running:
        yield running


def _options(settings: dict[str, str]) -> dict[str, str]:
    return {f"kafka.{name}": value for name, value in settings.items()}


@pytest.mark.peer
@pytest.mark.parametrize(("listener", "mechanism"), WAYS if ALL_VERSIONS else QUICK)
def test_write_read_and_stream(
    spark: SparkSession, kafka: SecureKafka, tmp_path: Path, listener: str, mechanism: str | None
) -> None:
    way = f"{listener}-{mechanism}"
    for topic in topics(way):
        kafka.kafka.create_topic(topic)
    found = write_read_and_stream(spark, way, _options(kafka.client(listener, mechanism)), tmp_path)
    assert found == [VALUES, VALUES]


@soak
@pytest.mark.peer
def test_executors_in_processes_of_their_own(kafka: SecureKafka, tmp_path: Path) -> None:
    ways = {
        f"cluster-{listener}-{mechanism}": _options(kafka.client(listener, mechanism)) for listener, mechanism in WAYS
    }
    found = run(kafka.kafka.bootstrap_servers, tmp_path / "program", LOCAL_CLUSTER, ways)
    assert found == (2, {way: [VALUES, VALUES] for way in ways})


@soak
def test_executors_at_our_broker(module_server_dir: Path, tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "certificates")
    settings = {"ssl.truststore.location": str(certificates.ca), "ssl.client.auth": "requested"}
    with SecureBroker(module_server_dir / "klog", certificates, settings=settings) as broker:
        own = {"kafka.ssl.keystore.location": str(certificates.client)}
        ways = {"mutual": _options(broker.client("SSL")) | own}
        ways |= {name: _options(broker.client("SASL_SSL", name)) for name in MECHANISMS[:-1]}
        found = run(broker.bootstrap_servers, tmp_path / "program", LOCAL_CLUSTER, ways)
    assert found == (2, {way: [VALUES, VALUES] for way in ways})


@pytest.mark.peer
def test_a_wrong_password_makes_no_storm(spark: SparkSession, kafka: SecureKafka, tmp_path: Path) -> None:
    """A batch query or stream makes one connection, on the driver; a write one for each of its task's four attempts."""
    port = free_port()
    options = _options(
        kafka.client("SASL_SSL", "SCRAM-SHA-512", "wrong-secret") | {"bootstrap.servers": f"{HOST}:{port}"}
    )

    def read() -> None:
        spark.read.format("klog").options(**options).option("subscribe", "t").load().collect()

    def stream() -> None:
        Job(spark, "", tmp_path, **options, subscribe="t").start(availableNow=True).awaitTermination(60)

    def write() -> None:
        rows = spark.range(0, 1, 1, 1).select(f.lit("x").alias("value"))
        rows.write.format("klog").options(**options).option("topic", "t").mode("append").save()

    with TcpProxy(port, kafka.kafka.ports["SASL_SSL"], 0) as proxy:
        for action, most in ((read, 1), (stream, 1), (write, 4)):
            before = proxy.connections
            text = error_of(action)
            assert "refuses SCRAM-SHA-512: it says: Authentication failed" in text
            assert "wrong-secret" not in text
            assert PASSWORD not in text
            assert 1 <= proxy.connections - before <= most
