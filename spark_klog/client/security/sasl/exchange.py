"""SASL on a connection: the requests that authenticate it, and when to authenticate again. No I/O.

SaslHandshake v1 (KIP-43), then tokens in SaslAuthenticate (KIP-152) until the mechanism is done. Since
SaslAuthenticate v1 the broker returns the session's lifetime (KIP-368); before it ends, the client sends the same
requests again on the same connection. Brokers before 1.0 have SaslHandshake v0 alone: the connection sends and receives
the tokens without any header, and a refusal is a closed connection.
"""

from __future__ import annotations

import math
import random

from spark_klog.client.security.sasl.mechanisms import Mechanism, OAuthBearer, Plain, Scram
from spark_klog.client.security.settings.config import GSSAPI, OAUTHBEARER, PLAIN, SecurityConfig
from spark_klog.client.security.settings.secrets import without_secrets
from spark_klog.errors import ErrorCode, SaslError
from spark_klog.protocol.apis import SASL_AUTHENTICATE, SASL_HANDSHAKE
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api

#: The part of a session's lifetime after which to renew it, as in Kafka's Java clients; random, to spread clients.
_RENEWED_AFTER = (0.85, 0.95)


class SaslExchange:
    """The authentication of one connection; `address` is the broker's, for messages.

    `begin` returns the first request, `next` takes an answer and returns the next request. Errors: `SaslError` with
    broker, mechanism and what to do; for tokens also `ConnectionFailed`, `ConfigError`.
    """

    def __init__(self, security: SecurityConfig, address: str) -> None:
        assert security.sasl is not None
        self._config = security.sasl
        self._address = address
        self._named = security.named
        self._mechanism: Mechanism | None = None
        #: When to authenticate again, a reading of the clock passed to `next`.
        self.renew_at = math.inf

    def begin(self, deadline: float) -> tuple[Api, Message]:
        """The first request. Fetching a token or ticket ends by `deadline`, a reading of `time.monotonic`."""
        config = self._config
        host = self._address.rpartition(":")[0].strip("[]")
        if config.mechanism == OAUTHBEARER:
            from spark_klog.client.security.sasl.tokens import token_of  # urllib takes long to import

            assert config.oauth is not None
            token = token_of(config.oauth, host, deadline, self._named)
            self._mechanism = OAuthBearer(token.value, config.oauth.extensions)
        elif config.mechanism == GSSAPI:
            from spark_klog.client.security.sasl.kerberos import Kerberos  # needs the package gssapi

            assert config.kerberos is not None
            self._mechanism = Kerberos(config.kerberos, host, deadline, self._named)
        elif config.mechanism == PLAIN:
            self._mechanism = Plain(config.username, config.password)
        else:
            self._mechanism = Scram(config.mechanism, config.username, config.password)
        self.renew_at = math.inf
        return SASL_HANDSHAKE, {"mechanism": config.mechanism}

    def next(self, api: Api, answer: Message, now: float) -> tuple[Api, Message] | None:
        """The next request after an answer; None if the connection is authenticated. `now` is the current time."""
        assert self._mechanism is not None
        if api is SASL_HANDSHAKE:
            self._check_handshake(answer)
            return SASL_AUTHENTICATE, {"auth_bytes": self._mechanism.first()}
        self._check_authenticate(answer)
        try:
            token = self._mechanism.step(bytes(answer["auth_bytes"]))
        except SaslError as error:
            raise self._refused(error.args[0]) from None
        if token is not None:
            return SASL_AUTHENTICATE, {"auth_bytes": token}
        self._mechanism = None
        lifetime = answer.get("session_lifetime_ms", 0) / 1000
        if lifetime > 0:
            self.renew_at = now + lifetime * random.uniform(*_RENEWED_AFTER)
        return None

    @property
    def has_last_word(self) -> bool:
        """Whether the token that `next` returned last ends the exchange: the broker answers no bare one."""
        return self._mechanism is not None and self._mechanism.has_last_word

    def cut_off(self) -> SaslError:
        """The error for a connection that a broker before 1.0 has closed instead of answering a bare token."""
        return self._refused(f"it closed the connection. {self._advice()}")

    def _advice(self) -> str:
        if self._config.mechanism in (OAUTHBEARER, GSSAPI):
            return f"Check where the {'token' if self._config.mechanism == OAUTHBEARER else 'ticket'} comes from"
        return f"Check name and password of user {self._config.username!r}"

    def _check_handshake(self, answer: Message) -> None:
        code = answer["error_code"]
        if code == ErrorCode.UNSUPPORTED_SASL_MECHANISM:
            offered = without_secrets(", ".join(answer["mechanisms"]), ()) or "none"
            raise self._refused(f"it offers {offered}: set {self._named('sasl.mechanism')} to one of these")
        if code == ErrorCode.ILLEGAL_SASL_STATE:
            raise self._refused(
                f"this port takes no SASL: set {self._named('security.protocol')} to PLAINTEXT or SSL, or connect to "
                "the port of another listener"
            )
        if code:
            raise self._refused(f"SaslHandshake is answered with error {code}")

    def _check_authenticate(self, answer: Message) -> None:
        assert self._mechanism is not None
        code = answer["error_code"]
        if not code:
            return
        if isinstance(self._mechanism, OAuthBearer) and self._mechanism.refusal is not None:
            raise self._refused(self._mechanism.refusal)
        said = without_secrets(answer["error_message"] or f"error {code}", self._mechanism.secrets)
        if code != ErrorCode.SASL_AUTHENTICATION_FAILED:
            raise self._refused(f"it says: {said}")
        raise self._refused(f"it says: {said}. {self._advice()}")

    def _refused(self, why: str) -> SaslError:
        return SaslError(f"broker {self._address} refuses {self._config.mechanism}: {why}")
