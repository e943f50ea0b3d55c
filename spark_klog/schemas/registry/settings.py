"""Settings of a schema registry, by the names of Confluent's clients, without their prefix `schema.registry.`.

    url                              http(s)://HOST:PORT, several with commas between them
    basic.auth.credentials.source    USER_INFO, URL (the default if a URL has a user), SASL_INHERIT
    basic.auth.user.info             USER:PASSWORD
    basic.auth.username, basic.auth.password    the same in two, of which Spark hides the second (ours)
    bearer.auth.credentials.source   STATIC_TOKEN, OAUTHBEARER
    bearer.auth.token                of STATIC_TOKEN
    bearer.auth.issuer.endpoint.url, .client.id, .client.secret, .scope      of OAUTHBEARER: client credentials
    bearer.auth.logical.cluster, bearer.auth.identity.pool.id                what Confluent Cloud wants beside a token
    ssl.*                            as a client's, see security/settings.py

Secrets may be references, "env:NAME" or "file:PATH", which each process resolves by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from urllib.parse import unquote, urlsplit

from spark_klog.base.names import OF_REGISTRY
from spark_klog.base.settings import POSITIVE_INT, advice, any_of, choice, items, setting, settings_of, value_of, words
from spark_klog.errors import ConfigError
from spark_klog.security.config import OAuthConfig, Settings, TlsConfig, resolved
from spark_klog.security.settings import OTHER_NAMES, TLS, TLS_DEFAULTS, security_config

__all__ = ["RegistryConfig", "registry_config"]

_TLS_NAMES = TLS | TLS_DEFAULTS | {name for name, own in OTHER_NAMES.items() if own in TLS}
_TEXTS = words(
    """
    url basic.auth.credentials.source basic.auth.user.info basic.auth.username basic.auth.password
    bearer.auth.credentials.source bearer.auth.token
    bearer.auth.issuer.endpoint.url bearer.auth.client.id bearer.auth.client.secret bearer.auth.scope
    bearer.auth.logical.cluster bearer.auth.identity.pool.id
    """
)
_BASIC = ("URL", "USER_INFO", "SASL_INHERIT")
_BEARER = ("STATIC_TOKEN", "OAUTHBEARER")
_SCHEMES = ("http", "https")
#: What a broker's settings of a registry begin with, as Confluent Server's, and its URL.
BROKER_PREFIX, BROKER_URL = "confluent.", "confluent.schema.registry.url"


@dataclass(frozen=True)
class RegistryConfig:
    """Where a registry is and how to ask it. No secret is in its repr, which hashes and compares by all of them."""

    urls: tuple[str, ...]
    user: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    oauth: OAuthConfig | None = None
    #: Sent with each request.
    headers: tuple[tuple[str, str], ...] = ()
    tls: TlsConfig | None = None
    #: How users write names of settings, for messages.
    prefix: str = ""
    #: The setting that names the user, for messages; "" without one.
    credentials: str = field(default="", compare=False)
    connect_ms: int = setting("http.connect.timeout.ms", 10_000, POSITIVE_INT)
    read_ms: int = setting("http.read.timeout.ms", 10_000, POSITIVE_INT)
    wait_ms: int = setting("retries.wait.ms", 200, POSITIVE_INT)
    longest_wait_ms: int = setting("retries.max.wait.ms", 5_000, POSITIVE_INT)
    #: How long a call goes on trying a registry that is down.
    deadline_ms: int = setting("retries.deadline.ms", 120_000, POSITIVE_INT)
    #: How many schemas a process keeps, and for how long it takes a subject's latest version for that.
    capacity: int = setting("cache.capacity", 1_000, POSITIVE_INT)
    latest_seconds: int = setting("cache.latest.ttl.sec", 60, POSITIVE_INT)
    #: Whether records without a schema id are of the latest version of their subject; else they do not decode.
    has_bare: bool = setting("bare", False, choice("bare", {"none": False, "latest": True}))

    def named(self, name: str) -> str:
        return shown(self.prefix, name)


def shown(prefix: str, name: str) -> str:
    """A setting's name as users write it: Spark's option for the URL has no dot, a broker's a longer prefix."""
    if (prefix, name) == (BROKER_PREFIX, "url"):
        return BROKER_URL
    return f"{prefix.removesuffix('.')}Url" if (prefix, name) == ("schemaRegistry.", "url") else prefix + name


#: All names that `registry_config` parses.
NAMES = _TEXTS | _TLS_NAMES | {field.metadata["name"] for field in fields(RegistryConfig) if field.metadata}


def check_names(settings: Mapping[str, str], prefix: str) -> None:
    """Raise `ConfigError` for a name that is not in `NAMES`."""
    for name in settings:
        if name not in NAMES:
            raise ConfigError(f"unknown setting {prefix}{name}: {advice(name, NAMES)}")


def registry_config(
    settings: Mapping[str, str], prefix: str = OF_REGISTRY, client: Mapping[str, str] | None = None
) -> RegistryConfig:
    """Parse settings, by `NAMES`; `ConfigError` for wrong, unknown or contradicting ones, without their values.

    `prefix` is what the user wrote before the names. `client` are the settings of the Kafka client, for SASL_INHERIT.
    """
    check_names(settings, prefix)
    return _Parser(resolved(settings, prefix), prefix, client or {}).config()


@dataclass
class _Parser:
    settings: Settings
    prefix: str
    client: Mapping[str, str]

    def config(self) -> RegistryConfig:
        urls, (user, password) = self._urls()
        source = self._choice("basic.auth.credentials.source", _BASIC)
        info = self._info()
        if source == "USER_INFO" or (source is None and info):
            user, password = self._pair(info)
        elif source == "SASL_INHERIT":
            user, password = self._inherited()
        elif info:
            raise self._needs("basic.auth.user.info", "basic.auth.credentials.source=USER_INFO")
        elif source == "URL" and not user:
            raise self._error("basic.auth.credentials.source", "is URL, but the URL has no user")
        bearer, token, oauth = self._bearer()
        if bearer and user:
            raise self._error("bearer.auth.credentials.source", "excludes a user and password: remove one of them")
        headers = [
            (header, self._text(name))
            for name, header in (
                ("bearer.auth.logical.cluster", "target-sr-cluster"),
                ("bearer.auth.identity.pool.id", "Confluent-Identity-Pool-Id"),
            )
            if self._text(name)
        ]
        numbers = {
            row.name: value_of(row.metadata["kind"], self.prefix + name, self.settings[name])
            for name, row in settings_of(RegistryConfig).items()
            if name in self.settings
        }
        tls = self._tls(urls)
        credentials = self._credentials(source, info, user, token, oauth)
        return RegistryConfig(
            *(urls, user, password, token, oauth, tuple(headers), tls, self.prefix, credentials),
            **numbers,
        )

    def _credentials(self, source: str | None, info: str, user: str, token: str, oauth: OAuthConfig | None) -> str:
        if oauth is not None or token:
            return "bearer.auth.token" if token else "bearer.auth.client.id"
        if source == "SASL_INHERIT":
            return "basic.auth.credentials.source"
        if info:
            return "basic.auth.user.info" if self._text("basic.auth.user.info") else "basic.auth.username"
        return "url" if user else ""

    def _text(self, name: str) -> str:
        return self.settings.get(name, "").strip()

    def _error(self, name: str, what: str) -> ConfigError:
        return ConfigError(f"{shown(self.prefix, name)} {what}")

    def _needs(self, name: str, other: str) -> ConfigError:
        return self._error(name, f"needs {self.prefix}{other}")

    def _choice(self, name: str, choices: tuple[str, ...]) -> str | None:
        text = self._text(name)
        if not text:
            return None
        kind = choice(name, {word.lower(): word for word in choices}, any_of(choices), any_case=True)
        return str(value_of(kind, self.prefix + name, text))

    def _urls(self) -> tuple[tuple[str, ...], tuple[str, str]]:
        """The URLs without users, and the user and password of the first that has one."""
        urls, pair = [], ("", "")
        for number, text in enumerate(items(self._text("url")), 1):
            try:
                parts = urlsplit(text)
                host, _ = parts.hostname, parts.port
            except ValueError:
                host = None
            # an @ after the host: a password with a slash that is not encoded
            if not host or parts.scheme not in _SCHEMES or parts.query or parts.fragment or "@" in parts.path:
                # one that may have a secret is not shown, nor a part of one with a comma in its password
                which = f"its URL {number}" if {*"@?#"}.intersection(self._text("url")) else repr(text)
                raise self._error("url", f"must be http://HOST:PORT or https://HOST:PORT, and {which} is not")
            if (last := parts.path.rstrip("/").rpartition("/")[2]) in ("subjects", "schemas"):
                raise self._error("url", f"is the registry's address, without /{last}")
            if parts.username and not pair[0]:
                pair = unquote(parts.username), unquote(parts.password or "")
            urls.append(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/"))
        if not urls:
            raise ConfigError(f"{shown(self.prefix, 'url')} is required: http://HOST:PORT of the schema registry")
        return tuple(urls), pair

    def _info(self) -> str:
        """USER:PASSWORD, from one setting or two."""
        info, name = self._text("basic.auth.user.info"), self._text("basic.auth.username")
        password = self.settings.get("basic.auth.password", "")
        if not name and not password:
            return info
        if info:
            raise self._error("basic.auth.user.info", f"excludes {self.prefix}basic.auth.username: remove one of them")
        if not name or not password or ":" in name:
            raise self._error("basic.auth.username", f"needs {self.prefix}basic.auth.password, and has no colon")
        return f"{name}:{password}"

    def _pair(self, info: str) -> tuple[str, str]:
        user, colon, password = info.partition(":")
        if not user or not colon:
            raise self._error("basic.auth.user.info", "must be USER:PASSWORD, or env:NAME of a variable that holds it")
        return user, password

    def _inherited(self) -> tuple[str, str]:
        sasl = security_config(resolved(self.client)).sasl
        if sasl is None or not sasl.username:
            raise self._error(
                "basic.auth.credentials.source", "is SASL_INHERIT, but the client has no SASL user and password"
            )
        return sasl.username, sasl.password

    def _bearer(self) -> tuple[str | None, str, OAuthConfig | None]:
        source = self._choice("bearer.auth.credentials.source", _BEARER)
        token = self._text("bearer.auth.token")
        if source is None and token:
            source = "STATIC_TOKEN"
        given = next((name for name in sorted(self.settings) if name.startswith("bearer.auth.")), None)
        if source is None:
            if given is not None:
                raise self._needs(given, "bearer.auth.credentials.source")
            return None, "", None
        if source == "STATIC_TOKEN":
            if not token or not token.isascii() or not token.isprintable():
                raise self._error("bearer.auth.token", "must be a token")
            return source, token, None
        parts = {}
        for name in ("issuer.endpoint.url", "client.id", "client.secret"):
            parts[name] = self._text(f"bearer.auth.{name}")
            if not parts[name]:
                raise self._error(
                    "bearer.auth.credentials.source", f"is OAUTHBEARER: set {self.prefix}bearer.auth.{name}"
                )
        url = urlsplit(parts["issuer.endpoint.url"])
        if url.scheme not in _SCHEMES or not url.hostname:
            raise self._error("bearer.auth.issuer.endpoint.url", "must be https://HOST/...")
        oauth = OAuthConfig(
            endpoint=parts["issuer.endpoint.url"],
            client_id=parts["client.id"],
            client_secret=parts["client.secret"],
            scope=self._text("bearer.auth.scope"),
            ca=self._text("ssl.truststore.location") or self._text("ssl.ca.location"),
        )
        return source, "", oauth

    def _tls(self, urls: tuple[str, ...]) -> TlsConfig | None:
        given = {name: value for name, value in self.settings.items() if name in _TLS_NAMES}
        if not any(url.startswith("https:") for url in urls):
            if given:
                raise self._error(next(iter(given)), f"is set, but {self.prefix}url is not https")
            return None
        return security_config({"security.protocol": "SSL", **given}, self.prefix).tls
