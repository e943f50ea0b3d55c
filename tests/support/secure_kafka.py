"""Apache Kafka with TLS and SASL: what its broker needs beside listeners, and its users."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from .certificates import KEY_PASSWORD, Certificates
from .kafka import Kafka

JAAS = "org.apache.kafka.common.security"


def tls_properties(certificates: Certificates, folder: Path) -> dict[str, object]:
    """Broker properties; the key, which Kafka can't read as it is encrypted, is written to `folder` in plain text."""
    key = folder / "server.pem"
    plain = subprocess.run(
        ["openssl", "pkey", "-in", str(certificates.server), "-passin", f"pass:{KEY_PASSWORD}"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    text = certificates.server.read_text()
    key.write_text(plain + text[text.index("-----BEGIN CERTIFICATE") :])
    return {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": key,
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": certificates.ca,
    }


def add_scram_users(kafka: Kafka, passwords: Mapping[str, str]) -> None:
    """Give each user credentials of SCRAM-SHA-256 and SCRAM-SHA-512, through the listener in plain text."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers, "log_level": 0})
    for user, password in passwords.items():
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):  # one a request
            change = UserScramCredentialUpsertion(user, ScramCredentialInfo(mechanism, 4096), password.encode())
            for future in admin.alter_user_scram_credentials([change]).values():
                future.result(timeout=30)
