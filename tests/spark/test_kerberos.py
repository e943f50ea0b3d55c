"""Spark with GSSAPI and a keytab, with and without TLS: batch, stream and write at Kafka, with a KDC of the test.

The cases without TLS and those on `local-cluster` are part of make soak.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.servers.certificates import make_certificates
from tests.support.servers.kafka import ALL_VERSIONS, HOST, NEWEST, Version, versions
from tests.support.servers.kerberos import LISTENERS, Realm, gssapi_path, kerberos_kafka

from .security_program import VALUES, run

pytestmark = [pytest.mark.peer, pytest.mark.test_all("mechanism")]


@pytest.mark.parametrize("version", versions(NEWEST, "3.9.1"))
def test_write_read_and_stream(module_server_dir: Path, tmp_path: Path, version: Version) -> None:
    library, folder = gssapi_path(), module_server_dir / version
    certificates = make_certificates(tmp_path / "certificates")
    with Realm(folder / "kdc") as realm, kerberos_kafka(version, folder / "kafka", realm, certificates) as kafka:
        keytab = str(realm.keytab("alice"))
        ways = {
            listener.lower(): {
                "kafka.bootstrap.servers": f"{HOST}:{kafka.ports[listener]}",
                "kafka.security.protocol": protocol,
                "kafka.sasl.mechanism": "GSSAPI",
                "kafka.sasl.kerberos.keytab": keytab,
                "kafka.sasl.kerberos.principal": "alice",
            }
            for listener, protocol in LISTENERS.items()
            if ALL_VERSIONS or protocol == "SASL_SSL"
        }
        ways["kerberos_tls"]["kafka.ssl.truststore.location"] = str(certificates.ca)
        masters = [("local[1]", 0), ("local-cluster[2,1,1024]", 2)]
        for master, executors in masters if ALL_VERSIONS else masters[:1]:
            given = {f"{way}-{executors}": options for way, options in ways.items()}
            folder = tmp_path / f"program-{executors}"
            found = run(kafka.bootstrap_servers, folder, master, given, [library], realm.environment)
            assert found == (executors, {way: [VALUES, VALUES] for way in given})
