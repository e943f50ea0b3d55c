"""A broker with a listener for each security protocol, and client settings for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.clients.klog import klog
from tests.support.servers.broker import KlogBroker
from tests.support.servers.certificates import KEY_PASSWORD, Certificates
from tests.support.servers.kafka import HOST, free_port

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
PASSWORDS = {"alice": "alice's, secret=1", "bob": "bob-ü-secret-2"}


def add_user(file: Path, name: str, password: str, *options: str) -> None:
    """Add a user to the file with `klog users add`."""
    klog(
        "users", "add", name, "--file", str(file), "--password-stdin", *options, stdin=f"{password}\n"
    ).check_returncode()


class SecureBroker(KlogBroker):
    """A broker with the users alice and bob of PASSWORDS; `rules` are appended to the users' file."""

    def __init__(
        self, work_dir: Path, certificates: Certificates, rules: str = "", settings: dict[str, str] | None = None
    ) -> None:
        work_dir.mkdir(parents=True, exist_ok=True)
        self.certificates = certificates
        self.ports = {protocol: free_port() for protocol in PROTOCOLS}
        self.users = work_dir / "users"
        for name, password in PASSWORDS.items():
            add_user(self.users, name, password)
        with self.users.open("a") as file:
            file.write(rules)
        all_settings = {
            "listeners": ",".join(f"{protocol}://{HOST}:{port}" for protocol, port in self.ports.items()),
            "ssl.keystore.location": str(certificates.server),
            "ssl.keystore.type": "PEM",
            "ssl.key.password": KEY_PASSWORD,
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
            "klog.users.file": str(self.users),
        }
        arguments = [f"{name}={value}" for name, value in (all_settings | (settings or {})).items()]
        super().__init__(work_dir, *(part for argument in arguments for part in ("--set", argument)))
        self.port = self.ports["PLAINTEXT"]

    def servers(self, protocol: str) -> str:
        return f"{HOST}:{self.ports[protocol]}"

    def client(
        self, protocol: str, mechanism: str | None = None, user: str = "alice", password: str | None = None
    ) -> dict[str, Any]:
        """Settings for librdkafka."""
        settings = {"bootstrap.servers": self.servers(protocol), "security.protocol": protocol}
        if "SSL" in protocol:
            settings["ssl.ca.location"] = str(self.certificates.ca)
        if mechanism is not None:
            settings |= {
                "sasl.mechanism": mechanism,
                "sasl.username": user,
                "sasl.password": PASSWORDS[user] if password is None else password,
            }
        return settings

    def kcat(self, protocol: str, mechanism: str | None = None, **who: Any) -> list[str]:
        """Arguments for kcat."""
        return [part for item in self.client(protocol, mechanism, **who).items() for part in ("-X", "=".join(item))]

    def kafka_python(self, protocol: str, mechanism: str | None = None, user: str = "alice") -> dict[str, Any]:
        """Settings for kafka-python."""
        return {
            "bootstrap_servers": self.servers(protocol),
            "security_protocol": protocol,
            "ssl_cafile": str(self.certificates.ca),
            "sasl_mechanism": mechanism,
            "sasl_plain_username": user,
            "sasl_plain_password": PASSWORDS[user],
        }

    def java(self, protocol: str, mechanism: str | None = None, user: str = "alice") -> str:
        """Text of a properties file for the Java clients."""
        lines = [f"security.protocol={protocol}", "enable.idempotence=false"]
        if "SSL" in protocol:
            lines += ["ssl.truststore.type=PEM", f"ssl.truststore.location={self.certificates.ca}"]
        if mechanism is not None:
            module = "plain.PlainLoginModule" if mechanism == "PLAIN" else "scram.ScramLoginModule"
            lines += [
                f"sasl.mechanism={mechanism}",
                f"sasl.jaas.config=org.apache.kafka.common.security.{module} required "
                f'username="{user}" password="{PASSWORDS[user]}";',
            ]
        return "\n".join(lines) + "\n"
