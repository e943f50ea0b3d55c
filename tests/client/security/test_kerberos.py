"""GSSAPI at Apache Kafka, with a KDC for the tests: keytabs, ticket caches, TLS, refusals, a silent KDC."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Producer

from tests.support.servers.certificates import Certificates, make_certificates
from tests.support.servers.kafka import HOST, NEWEST, Kafka, versions
from tests.support.servers.kerberos import MODULE, REALM, Realm, gssapi_path, kerberos_kafka

pytestmark = [pytest.mark.peer, pytest.mark.test_all("mechanism")]
#: Settings of librdkafka for old brokers.
OLD = {"0.10.2.2": {"api.version.request": "false", "broker.version.fallback": "0.10.2"}}
#: Program that reads a topic of three records. It has its own process, as Kerberos's settings are per process.
READER = """
import json, sys, time
from spark_klog.client import Consumer
from spark_klog.errors import KlogError
settings, topic = json.loads(sys.argv[1]), sys.argv[2]
begin = time.monotonic()
try:
    with Consumer(settings) as consumer:
        consumer.assign([(topic, 0, 0)])
        values = []
        while len(values) < 3:
            values += [record.value.decode() for record in consumer.poll(10)]
        print(json.dumps(values))
except KlogError as error:
    print(json.dumps([type(error).__name__, str(error), time.monotonic() - begin]))
"""


class Peers(NamedTuple):
    kafka: Kafka
    realm: Realm
    keytab: Path
    library: Path
    #: None: the broker has no listener with TLS.
    certificates: Certificates | None

    def read(self, settings: dict[str, str], environment: dict[str, str] | None = None) -> Any:
        given = {
            "bootstrap.servers": f"{HOST}:{self.kafka.ports['KERBEROS']}",
            "security.protocol": "SASL_PLAINTEXT",
            "default.api.timeout.ms": "20000",
            **settings,
        }
        done = subprocess.run(
            [sys.executable, "-c", READER, json.dumps(given), "t"],
            env={**os.environ, **self.realm.environment, "PYTHONPATH": str(self.library), **(environment or {})},
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module", params=versions("3.9.1", NEWEST, "0.10.2.2"))
def peers(request: pytest.FixtureRequest, module_server_dir: Path) -> Iterator[Peers]:
    library, folder = gssapi_path(), module_server_dir / request.param
    # 0.10.2.2 reads no PEM files
    certificates = None if request.param in OLD else make_certificates(folder / "certificates")
    with Realm(folder / "kdc") as realm, kerberos_kafka(request.param, folder / "kafka", realm, certificates) as kafka:
        producer = Producer(
            {"bootstrap.servers": kafka.bootstrap_servers, "log_level": 0, **OLD.get(request.param, {})}
        )
        for value in ("a", "b", "c"):
            producer.produce("t", value)
        assert producer.flush(30) == 0
        yield Peers(kafka, realm, realm.keytab("alice"), library, certificates)


def test_keytabs_and_tickets(peers: Peers) -> None:
    """Settings of Java's clients and of librdkafka, and a ticket of kinit; GSSAPI is the default mechanism."""
    jaas = f'{MODULE} required useKeyTab=true storeKey=true keyTab="{peers.keytab}" principal="alice@{REALM}"'
    by_java = {"sasl.jaas.config": f'{jaas} serviceName="kafka";'}
    assert peers.read(by_java) == ["a", "b", "c"]
    by_c = {"sasl.mechanisms": "GSSAPI", "sasl.kerberos.keytab": str(peers.keytab), "sasl.kerberos.principal": "alice"}
    assert peers.read(by_c) == ["a", "b", "c"]
    cache = peers.realm.ticket("alice", peers.keytab)
    by_ticket = {"sasl.jaas.config": f'{MODULE} required useTicketCache=true ticketCache="{cache}";'}
    assert peers.read(by_ticket) == ["a", "b", "c"]
    assert peers.read({"sasl.mechanism": "GSSAPI"}, {"KRB5CCNAME": str(cache)}) == ["a", "b", "c"]


def test_by_tls(peers: Peers) -> None:
    if peers.certificates is None:
        pytest.skip("its listeners take no PEM files")
    by_tls = {
        "bootstrap.servers": f"{HOST}:{peers.kafka.ports['KERBEROS_TLS']}",
        "security.protocol": "SASL_SSL",
        "ssl.truststore.location": str(peers.certificates.ca),
        "sasl.kerberos.keytab": str(peers.keytab),
        "sasl.kerberos.principal": "alice",
    }
    assert peers.read(by_tls) == ["a", "b", "c"]


def test_refusals(peers: Peers, tmp_path: Path) -> None:
    gssapi = {"sasl.mechanism": "GSSAPI"}
    missing = {"KRB5CCNAME": str(tmp_path / "none")}
    kind, text, _ = peers.read(gssapi, missing)
    assert kind == "SaslError"
    assert f"(the service is kafka@{HOST}): get a ticket by kinit, or set sasl.kerberos.keytab" in text
    keytab = {"sasl.kerberos.keytab": str(peers.keytab), "sasl.kerberos.principal": "bob"}
    kind, text, _ = peers.read(gssapi | keytab)
    assert kind == "SaslError"
    assert f"(the keytab of bob is {peers.keytab}, the service kafka@{HOST})" in text
    service = {**keytab, "sasl.kerberos.principal": "alice", "sasl.kerberos.service.name": "other"}
    kind, text, _ = peers.read(gssapi | service)
    assert kind == "SaslError"
    assert "Kerberos database" in text
    assert f"the service other@{HOST}" in text


def test_a_silent_kdc(peers: Peers, tmp_path: Path) -> None:
    """The client's timeout ends the wait; Kerberos itself would wait longer."""
    with socket.create_server((HOST, 0)) as silent:
        conf = tmp_path / "krb5.conf"
        kdc = f"\n  kdc = {HOST}:"
        start, _, port = peers.realm.conf.read_text().partition(kdc)
        conf.write_text(f"{start}{kdc}{silent.getsockname()[1]}{port[port.index(chr(10)) :]}")
        keytab = {"sasl.kerberos.keytab": str(peers.keytab), "sasl.kerberos.principal": "alice"}
        settings = {"sasl.mechanism": "GSSAPI", "default.api.timeout.ms": "6000", **keytab}
        kind, why, seconds = peers.read(settings | {"request.timeout.ms": "5000"}, {"KRB5_CONFIG": str(conf)})
        assert "no KDC of Kerberos has answered in time" in why, (kind, why)
        assert seconds < 20
