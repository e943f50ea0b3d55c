"""TLS of a broker: its key and certificates, and its requirements for client certificates."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from spark_klog.broker.security.config import SecurityConfig
from spark_klog.errors import ConfigError

_REQUIREMENTS = {"none": ssl.CERT_NONE, "requested": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
#: Attribute names of RFC 2253, with which Kafka names users by their certificates.
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
    """Make a context for TLS 1.2 and later; `ConfigError` if the files can't be read."""
    assert config.key_store is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # a function, since without one OpenSSL would prompt on the terminal
        context.load_cert_chain(config.key_store, password=lambda: config.key_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"ssl.keystore.location={config.key_store}: {_key_reason(config.key_store, error)}; it must be a PEM "
            "file with key and certificates; set ssl.key.password if the key is encrypted"
        ) from None
    context.verify_mode = _REQUIREMENTS[config.client_auth]
    # as in Java any certificate in the store is trusted, also an intermediate authority or a client's own
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if config.trust_store is not None:
        try:
            context.load_verify_locations(config.trust_store)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"ssl.truststore.location={config.trust_store}: {_reason(error)}; it must be a PEM file"
            ) from None
    return context


def _key_reason(key_store: Path, error: Exception) -> str:
    """Explain why a key store can't be read. OpenSSL has one error for everything that is wrong with PEM."""
    if not isinstance(error, ssl.SSLError) or error.reason:
        return _reason(error)
    try:
        content = key_store.read_bytes()
    except OSError as unreadable:
        return _reason(unreadable)
    if b"-----BEGIN " not in content:
        return "not PEM"
    if b"PRIVATE KEY-----" not in content:
        return "it holds no private key"
    if b"-----BEGIN CERTIFICATE-----" not in content:
        return "it holds no certificate"
    if b"ENCRYPTED" in content:
        return "the key can't be decrypted: check ssl.key.password"
    return "the key or a certificate is damaged"


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not PEM"
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


def subject_name(certificate: dict[str, Any] | None) -> str | None:
    """The subject in the result of `getpeercert`, as CN=...,O=...; None without a certificate."""
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
