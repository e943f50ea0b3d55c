"""Apache Kafka with TLS and SASL: broker properties, SCRAM users, and a broker with a listener for each case."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from tests.support.servers.certificates import KEY_PASSWORD, Certificates, make_certificates
from tests.support.servers.kafka import HOST, Kafka, Version
from tests.support.servers.token_server import TokenServer

JAAS = "org.apache.kafka.common.security"
PASSWORD = 'alice\'s, "secret"=1'
#: Security protocols by listener. MUTUAL requires client certificates; EXPIRED has an expired broker certificate.
LISTENERS = {
    "SSL": "SSL",
    "MUTUAL": "SSL",
    "EXPIRED": "SSL",
    "SASL_PLAINTEXT": "SASL_PLAINTEXT",
    "SASL_SSL": "SASL_SSL",
}
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
#: Lifetime of a SCRAM-SHA-256 session, after which the client must reauthenticate.
SESSION_SECONDS = 6.0


class SecureKafka:
    """A running broker. `client` returns client settings for a listener; with a mechanism the user is alice."""

    def __init__(self, kafka: Kafka, certificates: Certificates, tokens: TokenServer) -> None:
        self.kafka, self.certificates, self.tokens = kafka, certificates, tokens
        #: The CA of EXPIRED's certificate.
        self.expired_ca = certificates.ca.parent / "expired" / "ca.pem"

    def servers(self, listener: str) -> str:
        return f"{HOST}:{self.kafka.ports[listener]}"

    def client(self, listener: str, mechanism: str | None = None, password: str = PASSWORD) -> dict[str, str]:
        settings = {"bootstrap.servers": self.servers(listener), "security.protocol": LISTENERS[listener]}
        if "SSL" in LISTENERS[listener]:
            settings["ssl.truststore.location"] = str(self.certificates.ca)
        if listener == "MUTUAL":
            settings["ssl.keystore.location"] = str(self.certificates.client)
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


def tls_properties(certificates: Certificates, folder: Path) -> dict[str, object]:
    """Return a broker's TLS properties; Kafka can't read the encrypted key, so `folder` gets an unencrypted copy."""
    folder.mkdir(parents=True, exist_ok=True)
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
    """Add SCRAM-SHA-256 and SCRAM-SHA-512 credentials for each user, through the plaintext listener."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers, "log_level": 0})
    for user, password in passwords.items():
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):  # one per request
            change = UserScramCredentialUpsertion(user, ScramCredentialInfo(mechanism, 4096), password.encode())
            for future in admin.alter_user_scram_credentials([change]).values():
                future.result(timeout=30)


def _properties(certificates: Certificates, folder: Path) -> dict[str, object]:
    expired = tls_properties(make_certificates(certificates.ca.parent / "expired", expired=True), folder / "expired")
    properties: dict[str, object] = {
        **tls_properties(certificates, folder),
        **{f"listener.name.expired.{name}": value for name, value in expired.items() if "keystore" in name},
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


@contextmanager
def secure_kafka(version: Version, folder: Path) -> Iterator[SecureKafka]:
    """Start a broker and its token server."""
    certificates = make_certificates(folder / "certificates")
    properties = _properties(certificates, folder)
    with Kafka(version, folder / "kafka", properties, listeners=LISTENERS) as server, TokenServer() as tokens:
        add_scram_users(server, {"alice": PASSWORD})
        yield SecureKafka(server, certificates, tokens)
