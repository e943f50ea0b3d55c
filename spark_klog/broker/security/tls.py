"""TLS of a broker: its key and certificates, and what it asks of clients' certificates."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Sequence
from typing import Any

from spark_klog.broker.security.config import SecurityConfig
from spark_klog.errors import ConfigError

_REQUIREMENTS = {"none": ssl.CERT_NONE, "requested": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
#: RFC 2253, which is how Kafka names users by their certificates.
_SHORT_NAMES = {
    "commonName": "CN",
    "organizationalUnitName": "OU",
    "organizationName": "O",
    "localityName": "L",
    "stateOrProvinceName": "ST",
    "countryName": "C",
    "streetAddress": "STREET",
    "domainComponent": "DC",
    "userId": "UID",
}


def server_context(config: SecurityConfig) -> ssl.SSLContext:
    """TLS 1.2 and later; `ConfigError` where the files can't be read."""
    assert config.key_store is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A function, since without one OpenSSL would ask on the terminal.
        context.load_cert_chain(config.key_store, password=lambda: config.key_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"ssl.keystore.location={config.key_store}: {_reason(error)}; a PEM file with key and certificates is "
            "wanted, and ssl.key.password where the key is encrypted"
        ) from None
    context.verify_mode = _REQUIREMENTS[config.client_auth]
    if config.trust_store is not None:
        try:
            context.load_verify_locations(config.trust_store)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"ssl.truststore.location={config.trust_store}: {_reason(error)}; PEM is wanted"
            ) from None
    return context


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not PEM"
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


def subject_name(certificate: dict[str, Any] | None) -> str | None:
    """The subject of what `getpeercert` returned, as CN=...,O=...; None where there is no certificate."""
    if not certificate:
        return None
    subject: Sequence[Iterable[tuple[str, str]]] = certificate.get("subject", ())
    parts = []
    for names in reversed(subject):
        parts.append("+".join(f"{_SHORT_NAMES.get(name, name)}={_escaped(value)}" for name, value in names))
    return ",".join(parts) or None


def _escaped(value: str) -> str:
    escaped = "".join(f"\\{char}" if char in ',+"\\<>;' else char for char in value)
    if escaped.startswith(("#", " ")):
        escaped = "\\" + escaped
    return escaped[:-1] + "\\ " if escaped.endswith(" ") else escaped
