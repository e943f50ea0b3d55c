"""Parsed settings of TLS and SASL. Secrets are left out of every repr.

A secret may be a reference: "env:NAME", an environment variable, or "file:PATH", a file's content. Each process
resolves it when it connects, executors included: plans, options and what Spark ships contain only the reference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spark_klog.base.names import PLAINTEXT
from spark_klog.errors import ConfigError

_SECRETS = frozenset({"sasl.jaas.config", "ssl.keystore.key", "ssl.key.pem"})
_SECRET_ENDS = ("password", "secret", "auth.user.info", "auth.token")
_HIDDEN = "[hidden]"
_NOT_SHOWN = "something that is not shown, as the secret is part of it"
_NAME = re.compile(r"[a-z0-9._-]{1,100}")
#: A secret's setting, or an option of a JAAS line, in the midst of other text; not a topic in JSON, such as
#: {"secret": {"0": 5}}.
_ASSIGNED = re.compile(
    r"(?:^|[\s;,\"'])[\w.]*(?:password|secret|sasl\.jaas\.config)[\"']?\s*(?:=|:(?!\s*[{\[]))", re.IGNORECASE
)
OAUTHBEARER, GSSAPI = "OAUTHBEARER", "GSSAPI"
_VARIABLE, FILE = "env:", "file:"


def is_secret(name: str) -> bool:
    """Whether a setting's value must not be shown; `name` may have the prefix `kafka.`."""
    name = name.lower().removeprefix("kafka.")
    return name in _SECRETS or name.endswith(_SECRET_ENDS)


def check_holds_no_secret(shown_name: str, name: str, value: str) -> None:
    """Raise `ConfigError` for a value that other settings were pasted into, a secret among them: errors show values."""
    if not is_secret(name) and _ASSIGNED.search(value):
        raise ConfigError(
            f"{shown_name} is not shown, as a password or another secret is in its value: set each setting by its own "
            "name, one at a time"
        )


def is_plain_name(name: str) -> bool:
    """Whether a setting's name may be shown: others may be lines of a key without backslashes in a properties file."""
    return _NAME.fullmatch(name) is not None


class Settings(dict[str, str]):
    """Settings by name, with a repr that hides secrets."""

    def __or__(self, other: Mapping[str, str]) -> Settings:  # type: ignore[override]
        return Settings({**self, **other})

    def __repr__(self) -> str:
        return repr(
            {
                name if is_plain_name(name) else _HIDDEN: value
                if is_plain_name(name) and not is_secret(name)
                else _HIDDEN
                for name, value in self.items()
            }
        )


def without_secrets(text: str, secrets: tuple[str, ...], longest: int = 300) -> str:
    """A peer's text made safe to show: on one line, at most `longest` characters, and not at all if it holds a secret.

    A secret may be a word of the peer's own sentence: what is left around it would tell which.
    """
    if any(secret and secret in text for secret in secrets):
        return _NOT_SHOWN
    printable = "".join(char if char.isprintable() else " " for char in text)
    return printable if len(printable) <= longest else printable[:longest] + "..."


@dataclass(frozen=True)
class Source:
    """Certificates or a key: a file or PEM text. `setting` is the name as the user typed it, for messages."""

    setting: str
    location: str = ""
    pem: str = field(default="", repr=False)


@dataclass(frozen=True)
class TlsConfig:
    """TLS settings of connections. Without `trust` the client trusts the operating system's authorities.

    `chain` is the client's certificate with those of its signers, `key` its key; both may be the same store. Without
    them the client sends no certificate.
    """

    trust: Source | None = None
    trust_password: str = field(default="", repr=False)
    chain: Source | None = None
    key: Source | None = None
    store_password: str = field(default="", repr=False)
    key_password: str = field(default="", repr=False)
    revoked: Source | None = None
    verify: bool = True
    check_hostname: bool = True
    protocols: tuple[str, ...] = ("TLSv1.2", "TLSv1.3")
    ciphers: str = ""
    #: The prefix of settings as the user wrote them.
    prefix: str = ""


@dataclass(frozen=True)
class MskConfig:
    """AWS credentials that sign tokens for Amazon MSK: a profile, a role to assume, or AWS's default chain."""

    profile: str = ""
    role: str = ""
    session: str = ""


@dataclass(frozen=True)
class KerberosConfig:
    """Kerberos credentials: a principal's keytab, or a ticket cache (both empty: the one of KRB5CCNAME)."""

    service: str
    principal: str = ""
    keytab: str = ""
    cache: str = ""


@dataclass(frozen=True)
class OAuthConfig:
    """The source of tokens: exactly one of `endpoint` (client credentials), `file`, `provider`, `claims`, `msk`."""

    endpoint: str = field(default="", repr=False)
    file: str = ""
    provider: str = ""
    #: The claims of a token without a signature, for development clusters (KIP-255); None for other sources.
    claims: tuple[tuple[str, str | float | tuple[str, ...]], ...] | None = field(default=None, repr=False)
    msk: MskConfig | None = None
    lifetime_seconds: float = 3600.0
    client_id: str = ""
    client_secret: str = field(default="", repr=False)
    scope: str = ""
    urlencode: bool = False
    ca: str = ""
    extensions: tuple[tuple[str, str], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class SaslConfig:
    """A mechanism, by its name on the wire, and its credentials."""

    mechanism: str
    username: str = ""
    password: str = field(default="", repr=False)
    oauth: OAuthConfig | None = None
    kerberos: KerberosConfig | None = None


@dataclass(frozen=True)
class SecurityConfig:
    """The security protocol; `tls` and `sasl` are set if the protocol uses them."""

    protocol: str = PLAINTEXT
    tls: TlsConfig | None = None
    sasl: SaslConfig | None = None
    #: The prefix of settings as the user wrote them.
    prefix: str = ""

    def named(self, name: str) -> str:
        return self.prefix + name


def resolved(settings: Mapping[str, str], prefix: str = "") -> Settings:
    """The settings with the values of secrets; `ConfigError` names a reference to nothing. `prefix` is for messages."""
    return Settings(
        {name: dereferenced(prefix + name, value) if is_secret(name) else value for name, value in settings.items()}
    )


def dereferenced(name: str, value: str) -> str:
    """What a secret's value refers to, or the value if it is no reference; `name` is for messages."""
    if value.startswith(_VARIABLE):
        variable = value.removeprefix(_VARIABLE)
        secret = os.environ.get(variable)
        if secret is None:
            raise ConfigError(f"{name}: the environment variable {variable} is not set in this process")
        return secret
    if value.startswith(FILE):
        path = Path(value.removeprefix(FILE)).expanduser()
        try:
            return path.read_text(encoding="utf-8").rstrip("\r\n")
        except OSError as error:
            raise ConfigError(f"{name}: {path} can't be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{name}: {path} is not UTF-8") from None
    return value
