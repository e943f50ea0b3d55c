"""Parsed settings of TLS and SASL. Secrets are left out of every repr."""

from __future__ import annotations

from dataclasses import dataclass, field

PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL = "PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"
PROTOCOLS = (PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL)
PLAIN, SCRAM_SHA_256, SCRAM_SHA_512, OAUTHBEARER = "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"
GSSAPI = "GSSAPI"


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
        """A setting's name as the user writes it, for messages."""
        return self.prefix + name
