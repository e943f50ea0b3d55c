"""Parse the settings of SASL, by the names of Kafka's Java clients and of librdkafka, and reject contradictions."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from urllib.parse import urlsplit

from spark_klog.client.security.settings.config import (
    GSSAPI,
    OAUTHBEARER,
    PLAIN,
    SCRAM_SHA_256,
    SCRAM_SHA_512,
    KerberosConfig,
    MskConfig,
    OAuthConfig,
    SaslConfig,
)
from spark_klog.client.security.settings.jaas import LoginModule, parse_jaas
from spark_klog.client.security.settings.references import dereferenced
from spark_klog.client.security.settings.secrets import is_secret
from spark_klog.client.security.settings.values import Values
from spark_klog.errors import ConfigError

#: The settings of SASL by Java's name, with their other names.
SASL = {
    "sasl.mechanism": ("sasl.mechanisms",),
    "sasl.jaas.config": (),
    "sasl.username": (),
    "sasl.password": (),
    "sasl.login.callback.handler.class": (),
    "sasl.client.callback.handler.class": (),
    "sasl.kerberos.service.name": (),
    "sasl.kerberos.principal": (),
    "sasl.kerberos.keytab": (),
    "sasl.oauthbearer.token.endpoint.url": (),
    "sasl.oauthbearer.client.credentials.client.id": ("sasl.oauthbearer.client.id",),
    "sasl.oauthbearer.client.credentials.client.secret": ("sasl.oauthbearer.client.secret",),
    "sasl.oauthbearer.scope": (),
    "sasl.oauthbearer.extensions": (),
    "sasl.oauthbearer.header.urlencode": (),
    "sasl.oauthbearer.method": (),
    "sasl.oauthbearer.provider": (),
    "https.ca.location": (),
}
NO_JAVA = "it names a Java class, and there is no JVM here"
#: What `sasl.mechanism` may be. AWS_MSK_IAM is OAUTHBEARER on the wire, with tokens that AWS's signer makes.
AWS_MSK_IAM = "AWS_MSK_IAM"
MECHANISMS = (PLAIN, SCRAM_SHA_256, SCRAM_SHA_512, OAUTHBEARER, GSSAPI, AWS_MSK_IAM)
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
    "software.amazon.msk.auth.iam.IAMLoginModule": (
        AWS_MSK_IAM,
        ("awsProfileName", "awsRoleArn", "awsRoleSessionName"),
    ),
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
_CLAIM = "unsecuredLogin"
_FILE_URL = "file://"


class SaslSettings:
    """The settings of SASL among `values`; files are not read."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def config(self) -> SaslConfig:
        mechanism = self._mechanism()
        module = self._module(mechanism)
        is_msk = self._check_handlers(mechanism)
        for prefixes, its in ((("sasl.oauthbearer.", "https."), OAUTHBEARER), (("sasl.kerberos.",), GSSAPI)):
            found = next((name for name in self._values.given if name.startswith(prefixes)), None)
            if found is not None and mechanism != its:
                raise ConfigError(f"{self._values.shown(found)} is for {its}, but the mechanism is {mechanism}")
        if is_msk:
            return SaslConfig(OAUTHBEARER, oauth=OAuthConfig(msk=self._msk(module)))
        if mechanism == OAUTHBEARER:
            return SaslConfig(mechanism, oauth=self._oauth(module))
        if mechanism == GSSAPI:
            return SaslConfig(mechanism, kerberos=self._kerberos(module))
        username = self._credential("username", mechanism, module)
        password = self._credential("password", mechanism, module)
        if mechanism == PLAIN and "\0" in username + password:
            raise ConfigError(
                f"{self._values.prefix}sasl.username and password can't hold the character NUL with PLAIN"
            )
        return SaslConfig(mechanism, username, password)

    def _mechanism(self) -> str:
        """The mechanism; GSSAPI is the default of Kafka's clients, and taken for it only if something is set for it."""
        if self._values.text("sasl.mechanism"):
            return self._values.choice("sasl.mechanism", MECHANISMS, "")
        is_kerberos = any(name.startswith("sasl.kerberos.") for name in self._values.given)
        if is_kerberos or "Krb5LoginModule" in self._values.text("sasl.jaas.config"):
            return GSSAPI
        raise ConfigError(
            f"{self._values.shown('sasl.mechanism')} is not set: set {', '.join(MECHANISMS[:-1])} or {MECHANISMS[-1]}"
        )

    def _check_handlers(self, mechanism: str) -> bool:
        """Refuse callback handlers that are not known; return whether tokens are Amazon MSK's."""
        names = ("sasl.login.callback.handler.class", "sasl.client.callback.handler.class")
        login, client = (self._values.text(name).removeprefix(_SHADED) for name in names)
        is_msk = mechanism == AWS_MSK_IAM or (mechanism == OAUTHBEARER and login == _MSK_LOGIN)
        known = (*_OAUTH_HANDLERS, _MSK_LOGIN) if mechanism == OAUTHBEARER else ()
        refused = names[0] if login and login not in known else None
        if client and client != _CLIENT_HANDLERS.get(mechanism):
            refused = names[1]
        if refused is None:
            return is_msk
        can_set = mechanism == OAUTHBEARER
        hint = f": set {self._values.prefix}sasl.oauthbearer.provider=MODULE:FUNCTION" if can_set else ""
        raise ConfigError(f"setting {self._values.shown(refused)} is not supported: {NO_JAVA}{hint}")

    def _module(self, mechanism: str) -> LoginModule | None:
        """The login module in `sasl.jaas.config` for this mechanism; None without the setting."""
        text, shown = self._values.text("sasl.jaas.config"), self._values.shown("sasl.jaas.config")
        if not text:
            return None
        module = parse_jaas(text, shown)
        its_mechanism, known = _MODULES.get(module.name.removeprefix(_SHADED), (None, ()))
        if its_mechanism is None:
            found = f"unknown login module {module.shown}" if "." in module.shown else "it does not begin with a class"
            raise ConfigError(f"{shown}: {found}; known are {', '.join(_MODULES)}")
        if not mechanism.startswith(its_mechanism):
            raise ConfigError(
                f"{shown}: {module.name} is for {its_mechanism}, but "
                f"{self._values.shown('sasl.mechanism')}={self._values.text('sasl.mechanism')}"
            )
        for number, option in enumerate(module.options, 1):
            is_known = option in known or option in _JVM_OPTIONS.get(mechanism, ())
            if not (is_known or (mechanism == OAUTHBEARER and option.startswith(("extension_", _CLAIM)))):
                # by its number: it may be a part of a password without quotation marks
                named = option if option in _JAVAS_OPTIONS else str(number)
                close = difflib.get_close_matches(option, known, 1)
                hint = f"did you mean {close[0]}? " if close else ""
                raise ConfigError(
                    f"{shown}: option {named} of {module.name} is not supported: {hint}{', '.join(known)} are. A value "
                    "with blanks or = needs quotation marks"
                )
        secrets = {
            name: dereferenced(f"{shown}: {name}", value) for name, value in module.options.items() if is_secret(name)
        }
        return replace(module, options=module.options | secrets)

    def _no_password(self, mechanism: str, instead: str) -> None:
        for name in ("sasl.username", "sasl.password"):
            if name in self._values.given:
                raise ConfigError(
                    f"{self._values.shown(name)} is not for {mechanism}, which takes {instead}: remove it"
                )

    def _msk(self, module: LoginModule | None) -> MskConfig:
        self._no_password(AWS_MSK_IAM, "AWS credentials")
        options = {} if module is None else module.options
        return MskConfig(*(options.get(name, "") for name in ("awsProfileName", "awsRoleArn", "awsRoleSessionName")))

    def _kerberos(self, module: LoginModule | None) -> KerberosConfig:
        self._no_password(GSSAPI, "tickets of Kerberos")
        options = {} if module is None else module.options
        by_option = {"serviceName": "service.name", "principal": "principal", "keyTab": "keytab"}
        found = {}
        for option, end in by_option.items():
            name = f"sasl.kerberos.{end}"
            if options.get(option) and self._values.text(name) not in ("", options[option]):
                raise ConfigError(f"{self._values.shown(name)} and {option} in sasl.jaas.config differ: remove one")
            found[option] = options.get(option) or self._values.text(name)
        is_on = {name: options.get(name, "").lower() == "true" for name in ("useKeyTab", "useTicketCache")}
        if options.get("keyTab") and not is_on["useKeyTab"]:
            found["keyTab"] = ""
        if found["keyTab"] and not found["principal"]:
            raise ConfigError(
                f"{self._values.prefix}sasl.kerberos.keytab needs {self._values.prefix}sasl.kerberos.principal: "
                "a keytab may hold several"
            )
        cache = options.get("ticketCache", "") if is_on["useTicketCache"] else ""
        return KerberosConfig(found["serviceName"] or "kafka", found["principal"], found["keyTab"], cache)

    def _credential(self, name: str, mechanism: str, module: LoginModule | None) -> str:
        own = f"sasl.{name}"
        if module is not None and own in self._values.given:
            raise ConfigError(
                f"{self._values.shown('sasl.jaas.config')} and {self._values.shown(own)} exclude each other: remove one"
            )
        value = module.options.get(name, "") if module is not None else self._values.given.get(own, "")
        if not value:
            where = (
                f"{self._values.shown('sasl.jaas.config')} has no {name}"
                if module
                else f"{self._values.shown(own)} is not set"
            )
            raise ConfigError(
                f"{self._values.shown('sasl.mechanism')}={mechanism} needs a name and a password, and {where}: set "
                f"{self._values.prefix}sasl.username and {self._values.prefix}sasl.password, or "
                f"{self._values.prefix}sasl.jaas.config"
            )
        return value

    def _oauth(self, module: LoginModule | None) -> OAuthConfig:
        self._no_password(OAUTHBEARER, "tokens")
        if self._values.text("sasl.oauthbearer.method").lower() not in ("", "default", "oidc"):
            raise ConfigError(f"{self._values.shown('sasl.oauthbearer.method')}: set oidc, or remove it")
        options = {} if module is None else module.options
        extensions = dict(
            _pairs(self._values.text("sasl.oauthbearer.extensions"), self._values.shown("sasl.oauthbearer.extensions"))
        )
        extensions |= {
            name.removeprefix("extension_"): value for name, value in options.items() if name.startswith("extension_")
        }
        for name, value in extensions.items():
            if not name.isalpha() or name == "auth" or not all(char.isprintable() for char in value):
                raise ConfigError(f"{name!r} can't be an extension of OAUTHBEARER: its name is letters, and not auth")
        config = OAuthConfig(
            scope=options.get("scope", self._values.text("sasl.oauthbearer.scope")),
            urlencode=self._values.truth("sasl.oauthbearer.header.urlencode", False),
            ca=self._values.text("https.ca.location"),
            extensions=tuple(sorted(extensions.items())),
        )
        url, provider = (
            self._values.text("sasl.oauthbearer.token.endpoint.url"),
            self._values.text("sasl.oauthbearer.provider"),
        )
        claims = {name: value for name, value in options.items() if name.startswith(_CLAIM)}
        named = self._values.shown("sasl.oauthbearer.token.endpoint.url")
        if sum(map(bool, (url, provider, claims))) != 1:
            raise ConfigError(
                f"OAUTHBEARER needs exactly one source of tokens: {named}=https://... or file:///..., or "
                f"{self._values.prefix}sasl.oauthbearer.provider=MODULE:FUNCTION"
            )
        if provider:
            module_name, colon, function = provider.partition(":")
            if not colon or not all(part.isidentifier() for part in [*module_name.split("."), function]):
                raise ConfigError(f"{self._values.shown('sasl.oauthbearer.provider')}={provider}: set MODULE:FUNCTION")
            return replace(config, provider=provider)
        if claims:
            return _unsecured(config, claims, self._values.shown("sasl.jaas.config"))
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
        client_id, client_secret = (options.get(option, self._values.given.get(name, "")) for option, name in pairs)
        if not client_id or not client_secret:
            raise ConfigError(
                f"{named} needs the client's id and secret: clientId and clientSecret in {self._values.prefix}"
                f"sasl.jaas.config, or {' and '.join(self._values.prefix + name for _, name in pairs)}"
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


def _pairs(text: str, shown: str) -> list[tuple[str, str]]:
    """Parse NAME=VALUE,... (librdkafka's syntax)."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"{shown}: set NAME=VALUE[,NAME=VALUE...]")
        found.append((name.strip(), value.strip()))
    return found


def _unsecured(config: OAuthConfig, options: Mapping[str, str], shown: str) -> OAuthConfig:
    """Parse the options of Java's OAuthBearerUnsecuredLoginCallbackHandler for tokens without a signature (KIP-255)."""
    claims: dict[str, str | float | tuple[str, ...]] = {}
    lifetime = OAuthConfig.lifetime_seconds
    number: Callable[[str], float] = float
    for name, value in options.items():
        kind, _, claim = name.removeprefix(_CLAIM).partition("_")
        try:
            if kind == "LifetimeSeconds":
                lifetime = number(value)
            elif kind == "StringClaim":
                claims[claim] = value
            elif kind == "NumberClaim":
                claims[claim] = number(value)
            elif kind == "ListClaim":
                claims[claim] = tuple(part for part in value[1:].split(value[:1]) if part)
            elif kind not in ("PrincipalClaimName", "ScopeClaimName"):
                raise ConfigError(f"{shown}: unknown option {name}")
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{shown}: {name} is not a number") from None
    return replace(config, claims=tuple(claims.items()), lifetime_seconds=lifetime)
