"""Settings of listeners, TLS, SASL and users, under Kafka's names.

`listeners` is NAME://HOST:PORT,...; a name is a security protocol, or `listener.security.protocol.map` maps it to one
(KIP-103). An empty host means the loopback address, port 0 any free port.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from spark_klog.base.names import (
    PLAIN,
    PLAINTEXT,
    SASL_PLAINTEXT,
    SASL_SSL,
    SCRAM_SHA_256,
    SCRAM_SHA_512,
    SECURITY_PROTOCOLS,
    SSL,
)
from spark_klog.base.settings import items, words
from spark_klog.errors import ConfigError
from spark_klog.trees.paths import Endpoint, host_and_port

MECHANISMS = (PLAIN, SCRAM_SHA_256, SCRAM_SHA_512)
#: The user name of clients that do not authenticate.
ANONYMOUS = "ANONYMOUS"
CLIENT_AUTH = ("none", "requested", "required")

SECURITY_SETTINGS = words(
    """
    advertised.listeners klog.users.file listener.security.protocol.map listeners sasl.enabled.mechanisms
    ssl.client.auth ssl.key.password ssl.keystore.location ssl.keystore.type ssl.truststore.location ssl.truststore.type
    """
)
_LOOPBACK = "127.0.0.1"
_ANY_ADDRESS = ("0.0.0.0", "::")
_LISTENER = re.compile(r"([A-Za-z][A-Za-z0-9._-]*)://(.*):([0-9]{1,5})")


class Listener(NamedTuple):
    """An address to listen on, or to advertise."""

    name: str
    protocol: str
    host: str
    port: int

    @property
    def is_tls(self) -> bool:
        return self.protocol in (SSL, SASL_SSL)

    @property
    def is_sasl(self) -> bool:
        return self.protocol in (SASL_PLAINTEXT, SASL_SSL)

    def __str__(self) -> str:
        return f"{self.name}://{host_and_port(self.host, self.port)}"


@dataclass(frozen=True)
class SecurityConfig:
    """Security settings. Files are PEM; `key_password` decrypts the key in the key store."""

    listeners: tuple[Listener, ...] = ()
    advertised: tuple[Listener, ...] = ()
    key_store: Path | None = None
    key_password: str = field(default="", repr=False)
    trust_store: Path | None = None
    client_auth: str = "none"
    mechanisms: tuple[str, ...] = (SCRAM_SHA_256, SCRAM_SHA_512)
    users_file: Path | None = None

    def endpoints(self, bound: list[Listener]) -> list[Endpoint]:
        """Addresses for clients: the advertised one of each listener, else the bound one."""
        endpoints = {each.name: each for each in bound} | {each.name: each for each in self.advertised}
        result = []
        for listener in bound:
            host, port = endpoints[listener.name][2:]
            if host in _ANY_ADDRESS:
                raise ConfigError(
                    f"{listener} listens on all addresses: set advertised.listeners to the one that clients can reach"
                )
            result.append(Endpoint(listener.name, listener.protocol, host, port or listener.port))
        return result


def security_settings(settings: Mapping[str, str]) -> SecurityConfig:
    """Parse the settings of `SECURITY_SETTINGS`; `ConfigError` for invalid values and combinations."""
    protocols = _protocol_map(settings.get("listener.security.protocol.map", ""))
    listeners = _listeners("listeners", settings, protocols)
    advertised = _listeners("advertised.listeners", settings, protocols)
    for listener in advertised:
        if listener.name not in {other.name for other in listeners} and not (
            not listeners and listener.name == PLAINTEXT
        ):
            raise ConfigError(f"advertised.listeners: {listener.name} is not among the listeners")
    for store in ("ssl.keystore", "ssl.truststore"):
        kind = settings.get(f"{store}.type", "PEM")
        if kind.upper() != "PEM":
            raise ConfigError(
                f"setting {store}.type={kind}: only PEM is read; convert the store by "
                "`keytool -importkeystore ... -deststoretype PKCS12` and `openssl pkcs12 -in FILE -out FILE.pem`"
            )
    client_auth = settings.get("ssl.client.auth", "none").lower()
    if client_auth not in CLIENT_AUTH:
        raise ConfigError(f"setting ssl.client.auth={client_auth} must be one of {', '.join(CLIENT_AUTH)}")
    mechanisms = settings.get("sasl.enabled.mechanisms", f"{SCRAM_SHA_256},{SCRAM_SHA_512}")
    names = tuple(items(mechanisms.upper()))
    if not names or not set(names) <= set(MECHANISMS):
        raise ConfigError(f"setting sasl.enabled.mechanisms={mechanisms} must be of {', '.join(MECHANISMS)}")
    key_store, trust_store, users_file = (
        Path(settings[name]) if settings.get(name) else None
        for name in ("ssl.keystore.location", "ssl.truststore.location", "klog.users.file")
    )
    for listener in listeners:
        if listener.is_tls and key_store is None:
            raise ConfigError(f"listener {listener} needs ssl.keystore.location, a PEM file with key and certificates")
        if listener.is_sasl and users_file is None:
            raise ConfigError(f"listener {listener} needs klog.users.file; `klog users add` writes it")
    if client_auth != "none" and trust_store is None:
        raise ConfigError(
            f"ssl.client.auth={client_auth} needs ssl.truststore.location, a PEM file with the CA certificates that "
            "clients' certificates are signed with"
        )
    return SecurityConfig(
        listeners=listeners,
        advertised=advertised,
        key_store=key_store,
        key_password=settings.get("ssl.key.password", ""),
        trust_store=trust_store,
        client_auth=client_auth,
        mechanisms=names,
        users_file=users_file,
    )


def _protocol_map(text: str) -> dict[str, str]:
    protocols = dict(zip(SECURITY_PROTOCOLS, SECURITY_PROTOCOLS, strict=True))
    for entry in items(text):
        name, _, protocol = entry.partition(":")
        if protocol.upper() not in SECURITY_PROTOCOLS:
            raise ConfigError(
                f"setting listener.security.protocol.map: {entry!r} is not NAME:PROTOCOL with one of "
                f"{', '.join(SECURITY_PROTOCOLS)}"
            )
        protocols[name.strip().upper()] = protocol.upper()
    return protocols


def _listeners(setting: str, settings: Mapping[str, str], protocols: Mapping[str, str]) -> tuple[Listener, ...]:
    result: list[Listener] = []
    for entry in items(settings.get(setting, "")):
        match = _LISTENER.fullmatch(entry)
        if match is None or int(match[3]) > 65535:
            raise ConfigError(f"setting {setting}: {entry!r} is not NAME://HOST:PORT")
        name, host = match[1].upper(), match[2].strip("[]") or _LOOPBACK
        if name not in protocols:
            raise ConfigError(f"setting {setting}: give {name} a protocol in listener.security.protocol.map")
        if name in {other.name for other in result}:
            raise ConfigError(f"setting {setting}: {name} is there twice; rename one of them")
        result.append(Listener(name, protocols[name], host, int(match[3])))
    if setting in settings and not result:
        raise ConfigError(f"setting {setting} names no listener; give NAME://HOST:PORT")
    return tuple(result)
