"""Parse settings of TLS and SASL, by the names of Kafka's Java clients and of librdkafka, and reject contradictions."""

from __future__ import annotations

from collections.abc import Mapping

from spark_klog.client.security.settings.config import PLAINTEXT, PROTOCOLS, SecurityConfig, Source, TlsConfig
from spark_klog.client.security.settings.sasl import NO_JAVA, SASL, SaslSettings
from spark_klog.client.security.settings.values import Values
from spark_klog.errors import ConfigError

_TLS = {
    "ssl.truststore.location": ("ssl.ca.location",),
    "ssl.truststore.certificates": ("ssl.ca.pem",),
    "ssl.truststore.password": (),
    "ssl.truststore.type": (),
    "ssl.keystore.location": (),
    "ssl.keystore.key": ("ssl.key.pem",),
    "ssl.keystore.certificate.chain": ("ssl.certificate.pem",),
    "ssl.keystore.password": (),
    "ssl.keystore.type": (),
    "ssl.certificate.location": (),
    "ssl.key.location": (),
    "ssl.key.password": (),
    "ssl.crl.location": (),
    "ssl.cipher.suites": (),
    "enable.ssl.certificate.verification": (),
}
#: Allowed without TLS too, since Java's clients have defaults for them.
_TLS_DEFAULTS = {"ssl.endpoint.identification.algorithm": (), "ssl.enabled.protocols": ()}
_CANONICAL = {
    alias: name
    for names in (SASL, _TLS, _TLS_DEFAULTS, {"security.protocol": ()})
    for name, aliases in names.items()
    for alias in (name, *aliases)
}
#: All names that `security_config` parses.
NAMES = frozenset(_CANONICAL)
#: Settings of the JVM, of brokers and of Java's login threads: accepted without effect.
WITHOUT_EFFECT = frozenset(
    [
        "sasl.kerberos.kinit.cmd",
        "sasl.kerberos.min.time.before.relogin",
        "sasl.kerberos.ticket.renew.jitter",
        "sasl.kerberos.ticket.renew.window.factor",
        "sasl.login.connect.timeout.ms",
        "sasl.login.read.timeout.ms",
        "sasl.login.refresh.buffer.seconds",
        "sasl.login.refresh.min.period.seconds",
        "sasl.login.refresh.window.factor",
        "sasl.login.refresh.window.jitter",
        "sasl.login.retry.backoff.max.ms",
        "sasl.login.retry.backoff.ms",
        "sasl.oauthbearer.clock.skew.seconds",
        "sasl.oauthbearer.expected.audience",
        "sasl.oauthbearer.expected.issuer",
        "sasl.oauthbearer.jwks.endpoint.refresh.ms",
        "sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms",
        "sasl.oauthbearer.jwks.endpoint.retry.backoff.ms",
        "sasl.oauthbearer.jwks.endpoint.url",
        "sasl.oauthbearer.scope.claim.name",
        "sasl.oauthbearer.sub.claim.name",
        "ssl.keymanager.algorithm",
        "ssl.protocol",
        "ssl.provider",
        "ssl.secure.random.implementation",
        "ssl.trustmanager.algorithm",
    ]
)
#: Prefixes of settings that are refused, with the reason.
_REFUSED = {
    "sasl.login.class": NO_JAVA,
    "sasl.server.": "it is a broker's",
    "sasl.oauthbearer.assertion.": "tokens come by client credentials, from a file, or from sasl.oauthbearer.provider",
    "sasl.oauthbearer.jwt.": "tokens come by client credentials, from a file, or from sasl.oauthbearer.provider",
    "sasl.oauthbearer.config": "set unsecuredLoginStringClaim_sub in sasl.jaas.config, or sasl.oauthbearer.provider",
    "ssl.ca.certificate.stores": "write the certificates into a file, and set ssl.ca.location",
    "ssl.curves.list": "the curves are OpenSSL's own choice; its configuration file can change it",
    "ssl.sigalgs.list": "the algorithms are OpenSSL's own choice; its configuration file can change it",
    "ssl.engine.factory.class": NO_JAVA,
    "ssl.engine.": "no engine of OpenSSL is loaded: set ssl.key.location and ssl.certificate.location to files",
    "security.providers": NO_JAVA,
}
_STORE_TYPES = ("PEM", "PKCS12", "JKS")
_TLS_VERSIONS = ("TLSv1.2", "TLSv1.3")


def refusal(name: str) -> str | None:
    """Why a setting of TLS or SASL is not supported; None if it is not one of `_REFUSED`."""
    return next((why for start, why in _REFUSED.items() if name.startswith(start)), None)


def security_config(settings: Mapping[str, str], prefix: str = "") -> SecurityConfig:
    """Parse the settings in `NAMES` and ignore all others; `ConfigError` for wrong or contradicting settings.

    `prefix` is the prefix that the user wrote before the names, for messages. Files are not read before connecting.
    """
    return _Parser(settings, prefix).config()


class _Parser:
    def __init__(self, settings: Mapping[str, str], prefix: str) -> None:
        self._values = Values(settings, prefix, _CANONICAL)

    def config(self) -> SecurityConfig:
        protocol = self._values.choice("security.protocol", PROTOCOLS, PLAINTEXT)
        is_sasl, is_tls = protocol.startswith("SASL"), protocol.endswith("SSL")
        for names, has, what, others in (
            (SASL, is_sasl, "SASL", "SASL_SSL" if is_tls else "SASL_SSL or SASL_PLAINTEXT"),
            (_TLS, is_tls, "TLS", "SASL_SSL" if is_sasl else "SSL or SASL_SSL"),
        ):
            given = next((name for name in names if name in self._values.given), None)
            if given is not None and not has:
                shown, setting = self._values.shown(given), f"{self._values.prefix}security.protocol"
                why = f"{shown} is set, but {setting}={protocol} uses no {what}"
                raise ConfigError(f"{why}: set {setting}={others}, or remove {shown}")
        tls, sasl = self._tls() if is_tls else None, SaslSettings(self._values).config() if is_sasl else None
        return SecurityConfig(protocol, tls, sasl, self._values.prefix)

    # TLS

    def _source(self, *names: str) -> Source | None:
        """The source in the one of these settings that is set: a file if its name ends with .location, else PEM."""
        given = [name for name in names if self._values.text(name)]
        if len(given) > 1:
            raise ConfigError(
                f"{self._values.shown(given[0])} and {self._values.shown(given[1])} exclude each other: remove one"
            )
        if not given:
            return None
        name, text = given[0], self._values.text(given[0])
        if name.endswith(".location"):
            return Source(self._values.shown(name), location=text)
        if "-----BEGIN " not in text:
            raise ConfigError(f"{self._values.shown(name)} is not PEM: it has no line -----BEGIN ...-----")
        return Source(self._values.shown(name), pem=text)

    def _tls(self) -> TlsConfig:
        for name in ("ssl.truststore.type", "ssl.keystore.type"):
            self._values.choice(name, _STORE_TYPES, "PEM")
        store = self._source("ssl.keystore.location")
        key = self._source("ssl.keystore.key", "ssl.key.location") or store
        chain = self._source("ssl.keystore.certificate.chain", "ssl.certificate.location") or store
        if store is not None and (key is not store or chain is not store):
            other = key if key is not store else chain
            assert other is not None
            raise ConfigError(f"{store.setting} and {other.setting} exclude each other: remove one")
        if key is None and chain is not None:
            key = chain  # one file may hold both
        if chain is None and key is not None:
            raise ConfigError(
                f"{key.setting} is set without the certificate of that key: set "
                f"{self._values.prefix}ssl.keystore.certificate.chain or {self._values.prefix}ssl.certificate.location"
            )
        algorithm = self._values.given.get("ssl.endpoint.identification.algorithm", "https").strip().lower()
        if algorithm not in ("https", "", "none"):
            name = self._values.shown("ssl.endpoint.identification.algorithm")
            raise ConfigError(f"{name}={algorithm}: set https, or nothing for no check")
        versions = tuple(part.strip() for part in self._values.text("ssl.enabled.protocols").split(",") if part.strip())
        unknown = [version for version in versions if version not in _TLS_VERSIONS]
        if unknown:
            raise ConfigError(
                f"{self._values.shown('ssl.enabled.protocols')}={unknown[0]}: set TLSv1.2, TLSv1.3 or both"
            )
        verify = self._values.truth("enable.ssl.certificate.verification", True)
        return TlsConfig(
            trust=self._source("ssl.truststore.location", "ssl.truststore.certificates"),
            trust_password=self._values.given.get("ssl.truststore.password", ""),
            chain=chain,
            key=key,
            store_password=self._values.given.get("ssl.keystore.password", ""),
            key_password=self._values.given.get("ssl.key.password", ""),
            revoked=self._source("ssl.crl.location"),
            verify=verify,
            check_hostname=verify and algorithm == "https",
            protocols=versions or _TLS_VERSIONS,
            ciphers=self._values.text("ssl.cipher.suites"),
            prefix=self._values.prefix,
        )
