"""Parse settings of TLS and SASL, by the names of Kafka's Java clients and of librdkafka, and reject contradictions.

`sasl.jaas.config` is read as Kafka's Java clients read it (Kafka documentation, "Security", JAAS):

    CLASS FLAG NAME=VALUE NAME="VALUE" ... ;

FLAG is required, requisite, sufficient or optional. Values in double or single quotes may hold Java's escapes. Comments
(`//` to the end of the line, `/* */`) are skipped. No message shows a value, since values may be passwords.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import urlsplit

from spark_klog.base.names import PLAIN, PLAINTEXT, SCRAM_SHA_256, SCRAM_SHA_512, SECURITY_PROTOCOLS
from spark_klog.base.settings import BOOLEAN, any_of, choice, items, nearest, value_of, words
from spark_klog.errors import ConfigError
from spark_klog.security.config import (
    GSSAPI,
    OAUTHBEARER,
    KerberosConfig,
    MskConfig,
    OAuthConfig,
    SaslConfig,
    SecurityConfig,
    Settings,
    Source,
    TlsConfig,
    dereferenced,
    is_secret,
)

#: The settings of SASL, and those of TLS that need TLS, by Java's names.
SASL = words(
    """
    https.ca.location sasl.client.callback.handler.class sasl.jaas.config sasl.kerberos.keytab sasl.kerberos.principal
    sasl.kerberos.service.name sasl.login.callback.handler.class sasl.mechanism
    sasl.oauthbearer.client.credentials.client.id sasl.oauthbearer.client.credentials.client.secret
    sasl.oauthbearer.extensions sasl.oauthbearer.header.urlencode sasl.oauthbearer.method sasl.oauthbearer.provider
    sasl.oauthbearer.scope sasl.oauthbearer.token.endpoint.url sasl.password sasl.username
    """
)
TLS = words(
    """
    enable.ssl.certificate.verification ssl.certificate.location ssl.cipher.suites ssl.crl.location ssl.key.location
    ssl.key.password ssl.keystore.certificate.chain ssl.keystore.key ssl.keystore.location ssl.keystore.password
    ssl.keystore.type ssl.truststore.certificates ssl.truststore.location ssl.truststore.password ssl.truststore.type
    """
)
#: Allowed without TLS too, since Java's clients have defaults for them.
TLS_DEFAULTS = words("ssl.endpoint.identification.algorithm ssl.enabled.protocols")
#: Java's name for each other name, mostly librdkafka's.
OTHER_NAMES = {
    "sasl.mechanisms": "sasl.mechanism",
    "sasl.oauthbearer.client.id": "sasl.oauthbearer.client.credentials.client.id",
    "sasl.oauthbearer.client.secret": "sasl.oauthbearer.client.credentials.client.secret",
    "ssl.ca.location": "ssl.truststore.location",
    "ssl.ca.pem": "ssl.truststore.certificates",
    "ssl.certificate.pem": "ssl.keystore.certificate.chain",
    "ssl.key.pem": "ssl.keystore.key",
}
#: All names that `security_config` parses.
NAMES = SASL | TLS | TLS_DEFAULTS | OTHER_NAMES.keys() | {"security.protocol"}
NO_JAVA = "it names a Java class, and there is no JVM here"
#: What `sasl.mechanism` may be. AWS_MSK_IAM is OAUTHBEARER on the wire, with tokens that AWS's signer makes.
AWS_MSK_IAM = "AWS_MSK_IAM"
MECHANISMS = (PLAIN, SCRAM_SHA_256, SCRAM_SHA_512, OAUTHBEARER, GSSAPI, AWS_MSK_IAM)
_MSK_OPTIONS = ("awsProfileName", "awsRoleArn", "awsRoleSessionName")
#: Login modules: the mechanisms that they are for (by their first letters), and their options.
_MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "org.apache.kafka.common.security.plain.PlainLoginModule": (PLAIN, ("username", "password")),
    "org.apache.kafka.common.security.scram.ScramLoginModule": ("SCRAM", ("username", "password")),
    "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule": (
        OAUTHBEARER,
        ("clientId", "clientSecret", "scope"),
    ),
    "com.sun.security.auth.module.Krb5LoginModule": (
        GSSAPI,
        ("useKeyTab", "keyTab", "principal", "serviceName", "useTicketCache", "ticketCache"),
    ),
    "software.amazon.msk.auth.iam.IAMLoginModule": (AWS_MSK_IAM, _MSK_OPTIONS),
}
#: Options that concern a JVM's login only: accepted without effect.
_JVM_OPTIONS = {
    GSSAPI: ("storeKey", "doNotPrompt", "refreshKrb5Config", "renewTGT", "isInitiator", "debug", "clearPass"),
    AWS_MSK_IAM: ("awsDebugCreds", "awsMaxRetries", "awsMaxBackOffTimeMs"),
}
#: Options of Java's login modules that are not supported.
_JAVAS_OPTIONS = frozenset({"serviceName", "tokenauth", "awsStsRegion", "awsRoleExternalId", "awsRoleAccessKeyId"})
_SHADED = "kafkashaded."
_MSK = "software.amazon.msk.auth.iam."
#: Callback handlers that are accepted: those implied by the mechanism, and those for Amazon MSK's tokens.
_OAUTH_HANDLERS = (
    "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler",
    "org.apache.kafka.common.security.oauthbearer.secured.OAuthBearerLoginCallbackHandler",
)
_MSK_LOGIN = f"{_MSK}IAMOAuthBearerLoginCallbackHandler"
_CLIENT_HANDLERS = {
    AWS_MSK_IAM: f"{_MSK}IAMClientCallbackHandler",
    OAUTHBEARER: f"{_MSK}IAMOAuthBearerSaslClientCallbackHandler",
}
_INSTEAD_OF_PASSWORDS = {AWS_MSK_IAM: "AWS credentials", OAUTHBEARER: "tokens", GSSAPI: "tickets of Kerberos"}
_CLAIM = "unsecuredLogin"
_FILE_URL = "file://"
#: Settings of the JVM, of brokers and of Java's login threads: accepted without effect.
WITHOUT_EFFECT = words(
    """
    sasl.kerberos.kinit.cmd sasl.kerberos.min.time.before.relogin sasl.kerberos.ticket.renew.jitter
    sasl.kerberos.ticket.renew.window.factor sasl.login.connect.timeout.ms sasl.login.read.timeout.ms
    sasl.login.refresh.buffer.seconds sasl.login.refresh.min.period.seconds sasl.login.refresh.window.factor
    sasl.login.refresh.window.jitter sasl.login.retry.backoff.max.ms sasl.login.retry.backoff.ms
    sasl.oauthbearer.allow.unverified.audience sasl.oauthbearer.allow.unverified.issuer
    sasl.oauthbearer.clock.skew.seconds sasl.oauthbearer.expected.audience sasl.oauthbearer.expected.issuer
    sasl.oauthbearer.jwks.endpoint.refresh.ms sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms
    sasl.oauthbearer.jwks.endpoint.retry.backoff.ms sasl.oauthbearer.jwks.endpoint.url
    sasl.oauthbearer.scope.claim.name sasl.oauthbearer.sub.claim.name ssl.keymanager.algorithm ssl.protocol
    ssl.provider ssl.secure.random.implementation ssl.trustmanager.algorithm
    """
)
#: Prefixes of settings that are refused, with the reason.
REFUSED = {
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
_FLAGS = frozenset({"required", "requisite", "sufficient", "optional"})
_TOKEN = re.compile(
    r"""(?:\s|//[^\n]*|/\*.*?\*/)*            # blanks and comments
        (?: (?P<mark>[=;])
          | "(?P<double>(?:\\.|[^"\\\n])*)"
          | '(?P<single>(?:\\.|[^'\\\n])*)'
          | (?P<word>(?:(?!//|/\*)[^\s=;"'])+)
          | (?P<end>\Z)
        )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\([0-3][0-7]{2}|[0-7]{1,2}|.)", re.DOTALL)
#: A Java class with its package; anything else in a class's place may be a password.
_CLASS = re.compile(r"[A-Za-z_$][\w$]*(?:\.[A-Za-z_$][\w$]*)+", re.ASCII)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "b": "\b", "a": "\a", "v": "\v"}


def refusal(name: str) -> str | None:
    """Why a setting of TLS or SASL is not supported; None if it is not one of `REFUSED`."""
    return next((why for start, why in REFUSED.items() if name.startswith(start)), None)


def security_config(settings: Mapping[str, str], prefix: str = "") -> SecurityConfig:
    """Parse the settings in `NAMES` and ignore all others; `ConfigError` for wrong or contradicting settings.

    `prefix` is the prefix that the user wrote before the names, for messages. Files are not read before connecting.
    """
    return _Parser(settings, prefix).config()


class _Parser:
    """The settings of `NAMES` among others; `ConfigError` if one is set by two of its names."""

    def __init__(self, settings: Mapping[str, str], prefix: str) -> None:
        self._prefix = prefix
        #: The name that the user typed, and the value, by Java's name.
        self._typed: dict[str, str] = {}
        self._given: dict[str, str] = {}
        for typed, value in settings.items():
            if typed not in NAMES:
                continue
            name = OTHER_NAMES.get(typed, typed)
            if name in self._given:
                raise ConfigError(f"{self._shown(name)} and {prefix}{typed} are the same setting: remove one of them")
            self._typed[name], self._given[name] = typed, value

    def config(self) -> SecurityConfig:
        protocol = self._choice("security.protocol", SECURITY_PROTOCOLS, PLAINTEXT)
        is_sasl, is_tls = protocol.startswith("SASL"), protocol.endswith("SSL")
        for names, has, what, others in (
            (SASL, is_sasl, "SASL", "SASL_SSL" if is_tls else "SASL_SSL or SASL_PLAINTEXT"),
            (TLS, is_tls, "TLS", "SASL_SSL" if is_sasl else "SSL or SASL_SSL"),
        ):
            given = next((name for name in self._given if name in names), None)
            if given is not None and not has:
                shown, setting = self._shown(given), f"{self._prefix}security.protocol"
                why = f"{shown} is set, but {setting}={protocol} uses no {what}"
                raise ConfigError(f"{why}: set {setting}={others}, or remove {shown}")
        tls, sasl = self._tls() if is_tls else None, self._sasl() if is_sasl else None
        return SecurityConfig(protocol, tls, sasl, self._prefix)

    def _shown(self, name: str) -> str:
        return self._prefix + self._typed.get(name, name)

    def _text(self, name: str) -> str:
        return self._given.get(name, "").strip()

    def _choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        """The one of `choices` that is set, in any case of letters."""
        kind = choice(name, {word.lower(): word for word in choices}, any_of(choices), any_case=True)
        return str(value_of(kind, self._shown(name), self._text(name) or default))

    def _truth(self, name: str, default: bool) -> bool:
        return bool(value_of(BOOLEAN, self._shown(name), self._text(name).lower() or str(default)))

    def _source(self, *names: str) -> Source | None:
        """The source in the one of these settings that is set: a file if its name ends with .location, else PEM."""
        given = [name for name in names if self._text(name)]
        if len(given) > 1:
            raise ConfigError(f"{self._shown(given[0])} and {self._shown(given[1])} exclude each other: remove one")
        if not given:
            return None
        name, text = given[0], self._text(given[0])
        if name.endswith(".location"):
            return Source(self._shown(name), location=text)
        if "-----BEGIN " not in text:
            raise ConfigError(f"{self._shown(name)} is not PEM: it has no line -----BEGIN ...-----")
        return Source(self._shown(name), pem=text)

    def _tls(self) -> TlsConfig:
        for name in ("ssl.truststore.type", "ssl.keystore.type"):
            self._choice(name, _STORE_TYPES, "PEM")
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
                f"{self._prefix}ssl.keystore.certificate.chain or {self._prefix}ssl.certificate.location"
            )
        algorithm = self._given.get("ssl.endpoint.identification.algorithm", "https").strip().lower()
        if algorithm not in ("https", "", "none"):
            name = self._shown("ssl.endpoint.identification.algorithm")
            raise ConfigError(f"{name}={algorithm}: set https, or nothing for no check")
        versions = tuple(items(self._text("ssl.enabled.protocols")))
        unknown = [version for version in versions if version not in _TLS_VERSIONS]
        if unknown:
            raise ConfigError(f"{self._shown('ssl.enabled.protocols')}={unknown[0]}: set TLSv1.2, TLSv1.3 or both")
        verify = self._truth("enable.ssl.certificate.verification", True)
        return TlsConfig(
            trust=self._source("ssl.truststore.location", "ssl.truststore.certificates"),
            trust_password=self._given.get("ssl.truststore.password", ""),
            chain=chain,
            key=key,
            store_password=self._given.get("ssl.keystore.password", ""),
            key_password=self._given.get("ssl.key.password", ""),
            revoked=self._source("ssl.crl.location"),
            verify=verify,
            check_hostname=verify and algorithm == "https",
            protocols=versions or _TLS_VERSIONS,
            ciphers=self._text("ssl.cipher.suites"),
            prefix=self._prefix,
        )

    # SASL

    def _sasl(self) -> SaslConfig:
        mechanism = self._mechanism()
        jaas = self._jaas_options(mechanism)
        is_msk = self._check_handlers(mechanism)
        for prefixes, its in ((("sasl.oauthbearer.", "https."), OAUTHBEARER), (("sasl.kerberos.",), GSSAPI)):
            foreign = next((name for name in self._given if name.startswith(prefixes)), None)
            if foreign is not None and mechanism != its:
                raise ConfigError(f"{self._shown(foreign)} is for {its}, but the mechanism is {mechanism}")
        options = jaas or {}
        meant = AWS_MSK_IAM if is_msk else mechanism
        instead = _INSTEAD_OF_PASSWORDS.get(meant)
        for name in ("sasl.username", "sasl.password"):
            if instead is not None and name in self._given:
                raise ConfigError(f"{self._shown(name)} is not for {meant}, which takes {instead}: remove it")
        if is_msk:
            msk = MskConfig(*(options.get(name, "") for name in _MSK_OPTIONS))
            return SaslConfig(OAUTHBEARER, oauth=OAuthConfig(msk=msk))
        if mechanism == OAUTHBEARER:
            return SaslConfig(mechanism, oauth=self._oauth(options))
        if mechanism == GSSAPI:
            return SaslConfig(mechanism, kerberos=self._kerberos(options))
        username = self._credential("username", mechanism, jaas)
        password = self._credential("password", mechanism, jaas)
        if mechanism == PLAIN and "\0" in username + password:
            raise ConfigError(f"{self._prefix}sasl.username and password can't hold the character NUL with PLAIN")
        return SaslConfig(mechanism, username, password)

    def _mechanism(self) -> str:
        """The mechanism; GSSAPI is the default of Kafka's clients, and taken for it only if something is set for it."""
        if self._text("sasl.mechanism"):
            return self._choice("sasl.mechanism", MECHANISMS, "")
        is_kerberos = any(name.startswith("sasl.kerberos.") for name in self._given)
        if is_kerberos or "Krb5LoginModule" in self._text("sasl.jaas.config"):
            return GSSAPI
        raise ConfigError(f"{self._shown('sasl.mechanism')} is not set: set {any_of(MECHANISMS)}")

    def _check_handlers(self, mechanism: str) -> bool:
        """Refuse callback handlers that are not known; return whether tokens are Amazon MSK's."""
        names = ("sasl.login.callback.handler.class", "sasl.client.callback.handler.class")
        login, client = (self._text(name).removeprefix(_SHADED) for name in names)
        is_msk = mechanism == AWS_MSK_IAM or (mechanism == OAUTHBEARER and login == _MSK_LOGIN)
        known = (*_OAUTH_HANDLERS, _MSK_LOGIN) if mechanism == OAUTHBEARER else ()
        refused = names[0] if login and login not in known else None
        if client and client != _CLIENT_HANDLERS.get(mechanism):
            refused = names[1]
        if refused is None:
            return is_msk
        can_set = mechanism == OAUTHBEARER
        hint = f": set {self._prefix}sasl.oauthbearer.provider=MODULE:FUNCTION" if can_set else ""
        raise ConfigError(f"setting {self._shown(refused)} is not supported: {NO_JAVA}{hint}")

    def _jaas_options(self, mechanism: str) -> dict[str, str] | None:
        """The options of the login module in `sasl.jaas.config`, which must be for this mechanism; None without it."""
        text, shown = self._text("sasl.jaas.config"), self._shown("sasl.jaas.config")
        if not text:
            return None
        module, options = parse_jaas(text, shown)
        its_mechanism, known = _MODULES.get(module.removeprefix(_SHADED), (None, ()))
        if its_mechanism is None:
            is_class = _CLASS.fullmatch(module) is not None
            misfit = f"unknown login module {module}" if is_class else "it does not begin with a class"
            raise ConfigError(f"{shown}: {misfit}; known are {', '.join(_MODULES)}")
        if not mechanism.startswith(its_mechanism):
            raise ConfigError(
                f"{shown}: {module} is for {its_mechanism}, but "
                f"{self._shown('sasl.mechanism')}={self._text('sasl.mechanism')}"
            )
        for number, option in enumerate(options, 1):
            is_known = option in known or option in _JVM_OPTIONS.get(mechanism, ())
            if not (is_known or (mechanism == OAUTHBEARER and option.startswith(("extension_", _CLAIM)))):
                # by its number: it may be a part of a password without quotation marks
                named = option if option in _JAVAS_OPTIONS else str(number)
                question = nearest(option, known)
                raise ConfigError(
                    f"{shown}: option {named} of {module} is not supported: {question}{question and ' '}"
                    f"{', '.join(known)} are. A value with blanks or = needs quotation marks"
                )
        return {
            name: dereferenced(f"{shown}: {name}", value) if is_secret(name) else value
            for name, value in options.items()
        }

    def _kerberos(self, options: Mapping[str, str]) -> KerberosConfig:
        by_option = {"serviceName": "service.name", "principal": "principal", "keyTab": "keytab"}
        chosen = {}
        for option, end in by_option.items():
            name = f"sasl.kerberos.{end}"
            if options.get(option) and self._text(name) not in ("", options[option]):
                raise ConfigError(f"{self._shown(name)} and {option} in sasl.jaas.config differ: remove one")
            chosen[option] = options.get(option) or self._text(name)
        is_on = {name: options.get(name, "").lower() == "true" for name in ("useKeyTab", "useTicketCache")}
        if options.get("keyTab") and not is_on["useKeyTab"]:
            chosen["keyTab"] = ""
        if chosen["keyTab"] and not chosen["principal"]:
            raise ConfigError(
                f"{self._prefix}sasl.kerberos.keytab needs {self._prefix}sasl.kerberos.principal: "
                "a keytab may hold several"
            )
        cache = options.get("ticketCache", "") if is_on["useTicketCache"] else ""
        return KerberosConfig(chosen["serviceName"] or "kafka", chosen["principal"], chosen["keyTab"], cache)

    def _credential(self, name: str, mechanism: str, jaas: Mapping[str, str] | None) -> str:
        own = f"sasl.{name}"
        if jaas is not None and own in self._given:
            raise ConfigError(
                f"{self._shown('sasl.jaas.config')} and {self._shown(own)} exclude each other: remove one"
            )
        value = (self._given.get(own) if jaas is None else jaas.get(name)) or ""
        if not value:
            where = (
                f"{self._shown('sasl.jaas.config')} has no {name}"
                if jaas is not None
                else f"{self._shown(own)} is not set"
            )
            raise ConfigError(
                f"{self._shown('sasl.mechanism')}={mechanism} needs a name and a password, and {where}: set "
                f"{self._prefix}sasl.username and {self._prefix}sasl.password, or "
                f"{self._prefix}sasl.jaas.config"
            )
        return value

    def _oauth(self, options: Mapping[str, str]) -> OAuthConfig:
        if self._text("sasl.oauthbearer.method").lower() not in ("", "default", "oidc"):
            raise ConfigError(f"{self._shown('sasl.oauthbearer.method')}: set oidc, or remove it")
        extensions: dict[str, str] = {}
        for pair in items(self._text("sasl.oauthbearer.extensions")):  # in librdkafka's syntax
            name, equals, value = pair.partition("=")
            if not equals:
                raise ConfigError(f"{self._shown('sasl.oauthbearer.extensions')}: set NAME=VALUE[,NAME=VALUE...]")
            extensions[name.strip()] = value.strip()
        extensions |= {
            name.removeprefix("extension_"): value for name, value in options.items() if name.startswith("extension_")
        }
        for name, value in extensions.items():
            if not name.isalpha() or name == "auth" or not all(char.isprintable() for char in value):
                raise ConfigError(f"{name!r} can't be an extension of OAUTHBEARER: its name is letters, and not auth")
        config = OAuthConfig(
            scope=options.get("scope", self._text("sasl.oauthbearer.scope")),
            urlencode=self._truth("sasl.oauthbearer.header.urlencode", False),
            ca=self._text("https.ca.location"),
            extensions=tuple(sorted(extensions.items())),
        )
        url, provider = self._text("sasl.oauthbearer.token.endpoint.url"), self._text("sasl.oauthbearer.provider")
        claims = {name: value for name, value in options.items() if name.startswith(_CLAIM)}
        named = self._shown("sasl.oauthbearer.token.endpoint.url")
        if sum(map(bool, (url, provider, claims))) != 1:
            raise ConfigError(
                f"OAUTHBEARER needs exactly one source of tokens: {named}=https://... or file:///..., or "
                f"{self._prefix}sasl.oauthbearer.provider=MODULE:FUNCTION"
            )
        if provider:
            module_name, colon, function = provider.partition(":")
            if not colon or not all(part.isidentifier() for part in [*module_name.split("."), function]):
                raise ConfigError(f"{self._shown('sasl.oauthbearer.provider')}={provider}: set MODULE:FUNCTION")
            return replace(config, provider=provider)
        if claims:
            return _unsecured(config, claims, self._shown("sasl.jaas.config"))
        if url.startswith(_FILE_URL):
            return replace(config, file=url.removeprefix(_FILE_URL))
        if not _is_web_address(url):
            raise ConfigError(
                f"{named} is not a URL of https, http or file: set https://HOST[:PORT]/PATH or file:///PATH"
            )
        pairs = (
            ("clientId", "sasl.oauthbearer.client.credentials.client.id"),
            ("clientSecret", "sasl.oauthbearer.client.credentials.client.secret"),
        )
        client_id, client_secret = (options.get(option, self._given.get(name, "")) for option, name in pairs)
        if not client_id or not client_secret:
            raise ConfigError(
                f"{named} needs the client's id and secret: clientId and clientSecret in {self._prefix}"
                f"sasl.jaas.config, or {' and '.join(self._prefix + name for _, name in pairs)}"
            )
        return replace(config, endpoint=url, client_id=client_id, client_secret=client_secret)


def _is_web_address(url: str) -> bool:
    """Whether an HTTP client can take it; not with a user and password, which messages could show."""
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        return False
    is_clean = url.startswith(("https://", "http://")) and url.isascii() and url.isprintable() and " " not in url
    return is_clean and has_port and bool(parts.hostname) and "@" not in parts.netloc


def _unsecured(config: OAuthConfig, options: Mapping[str, str], shown: str) -> OAuthConfig:
    """Parse the options of Java's OAuthBearerUnsecuredLoginCallbackHandler for tokens without a signature (KIP-255)."""
    claims: dict[str, str | float | tuple[str, ...]] = {}
    lifetime = OAuthConfig.lifetime_seconds
    for name, value in options.items():
        kind, _, claim = name.removeprefix(_CLAIM).partition("_")
        try:
            if kind == "LifetimeSeconds":
                lifetime = float(value)
            elif kind == "StringClaim":
                claims[claim] = value
            elif kind == "NumberClaim":
                claims[claim] = float(value)
            elif kind == "ListClaim":
                claims[claim] = tuple(part for part in value[1:].split(value[:1]) if part)
            elif kind not in ("PrincipalClaimName", "ScopeClaimName"):
                raise ConfigError(f"{shown}: unknown option {name}")
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{shown}: {name} is not a number") from None
    return replace(config, claims=tuple(claims.items()), lifetime_seconds=lifetime)


def parse_jaas(text: str, setting: str) -> tuple[str, Settings]:
    """Parse the class and the options of the one login module of a JAAS configuration.

    `ConfigError` names `setting` and the problem, no values.
    """
    tokens = _tokens(text, setting)
    if len(tokens) < 2 or tokens[0][0] != "word" or tokens[1][0] != "word" or tokens[1][1].lower() not in _FLAGS:
        raise _error(setting, "it does not begin with a class and a flag")
    if tokens[-1] != ("mark", ";"):
        raise _error(setting, "the ; at its end is missing")
    options = Settings()
    position, last = 2, len(tokens) - 1
    while position < last:
        if tokens[position] == ("mark", ";"):
            raise _error(setting, "it has several login modules: write only one")
        name = tokens[position][1]
        if position + 2 >= last + 1 or tokens[position][0] == "mark" or tokens[position + 1] != ("mark", "="):
            raise _error(setting, f"option {len(options) + 1} is not NAME=VALUE")
        if tokens[position + 2][0] == "mark":
            raise _error(setting, f"option {len(options) + 1} has no value")
        options[name] = tokens[position + 2][1]
        position += 3
    return tokens[0][1], options


def _error(setting: str, what: str) -> ConfigError:
    return ConfigError(f'{setting}: {what}. Write it as CLASS required NAME="VALUE" ... ;')


def _tokens(text: str, setting: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    position = 0
    while True:
        match = _TOKEN.match(text, position)
        if match is None:
            raise _error(setting, "a quotation mark or a comment has no end")
        kind = match.lastgroup
        assert kind is not None  # each alternative is named
        if kind == "end":
            return tokens
        value = match[kind]
        tokens.append((kind, value) if kind in ("mark", "word") else ("text", _ESCAPE.sub(_unescaped, value)))
        position = match.end()


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code, 8)) if code[0] in "01234567" else _ESCAPED.get(code, code)
