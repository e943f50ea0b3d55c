"""SASL on a connection: the requests that authenticate it, and when to authenticate again. No I/O.

SaslHandshake v1 (KIP-43), then tokens in SaslAuthenticate (KIP-152) until the mechanism is done. Since
SaslAuthenticate v1 the broker returns the session's lifetime (KIP-368); before it ends, the client sends the same
requests again on the same connection. Brokers before 1.0 have SaslHandshake v0 alone: the connection sends and receives
the tokens without any header, and a refusal is a closed connection. The mechanisms' tokens:

    PLAIN        client  NUL name NUL password                                          (RFC 4616)
    SCRAM        client  "n,,n=" name ",r=" nonce                                       (RFC 5802, RFC 7677)
                 server  "r=" nonce + own nonce ",s=" base64 of salt ",i=" iterations
                 client  "c=biws,r=" both nonces ",p=" base64 of proof
                 server  "v=" base64 of the server's signature
    OAUTHBEARER  client  "n,," %x01 "auth=Bearer " token %x01 *(name "=" value %x01) %x01   (RFC 7628, KIP-255)
                 server  nothing, or JSON with the reason of a refusal
                 client  %x01

There is no channel binding and no SASLprep of names and passwords, as in Kafka's Java clients.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import json
import math
import os
import random
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Protocol

from spark_klog.base.names import PLAIN, SCRAM_HASHES
from spark_klog.errors import ErrorCode, SaslError
from spark_klog.protocol.apis import SASL_AUTHENTICATE, SASL_HANDSHAKE
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.security import MIN_ITERATIONS
from spark_klog.security.config import GSSAPI, OAUTHBEARER, SecurityConfig, without_secrets

#: Keeps a server from making the client compute for minutes; brokers other than Kafka's may have more than it allows.
_MAX_ITERATIONS = 1_000_000
_NONCE_BYTES = 24
#: The part of a session's lifetime after which to renew it, as in Kafka's Java clients; random, to spread clients.
_RENEWED_AFTER = (0.85, 0.95)


class Mechanism(Protocol):
    """One authentication. Errors: `SaslError`, without the broker's address and without secrets."""

    #: Secrets to hide if the broker's answers are shown.
    secrets: tuple[str, ...]

    @property
    def has_last_word(self) -> bool:
        """Whether the last token ends the exchange: the mechanism gives the broker nothing to answer."""

    def first(self) -> bytes:
        """The first token."""

    def step(self, answer: bytes) -> bytes | None:
        """The next token after an answer of the broker; None if the mechanism is done."""


class Plain:
    """PLAIN: name and password in one token."""

    has_last_word = False

    def __init__(self, username: str, password: str) -> None:
        self._username, self._password = username, password
        self.secrets: tuple[str, ...] = (password,)

    def first(self) -> bytes:
        return f"\0{self._username}\0{self._password}".encode()

    def step(self, answer: bytes) -> bytes | None:
        return None


class Scram:
    """SCRAM: the password is never sent, and the broker also proves that it knows it."""

    has_last_word = False

    def __init__(self, mechanism: str, username: str, password: str) -> None:
        self._algorithm = SCRAM_HASHES[mechanism]
        self._password = password
        self._nonce = b64encode(os.urandom(_NONCE_BYTES)).decode()
        self._first = f"n={username.replace('=', '=3D').replace(',', '=2C')},r={self._nonce}"
        self._signature: bytes | None = None
        self.secrets: tuple[str, ...] = (password,)

    def first(self) -> bytes:
        return f"n,,{self._first}".encode()

    def step(self, answer: bytes) -> bytes | None:
        try:
            fields = dict(part.split("=", 1) for part in answer.decode().split(","))
            if "e" in fields:
                raise SaslError(f"the broker answers {without_secrets(fields['e'], self.secrets)!r}")
            if self._signature is None:
                return self._final(answer.decode(), fields)
            signature = b64decode(fields["v"], validate=True)
        except (KeyError, ValueError, binascii.Error):
            raise SaslError("the broker's answer is not a SCRAM message") from None
        if not hmac.compare_digest(signature, self._signature):
            raise SaslError("the broker could not prove that it knows the user's password: is it the right broker?")
        return None

    def _final(self, server_first: str, fields: dict[str, str]) -> bytes:
        nonce, salt, iterations = fields["r"], b64decode(fields["s"], validate=True), int(fields["i"])
        if "m" in fields or not nonce.startswith(self._nonce) or nonce == self._nonce:
            raise SaslError("the broker's SCRAM message does not answer the client's")
        if not MIN_ITERATIONS <= iterations <= _MAX_ITERATIONS:
            raise SaslError(
                f"the broker asks for {iterations} SCRAM iterations: they must be from {MIN_ITERATIONS} to "
                f"{_MAX_ITERATIONS}"
            )
        salted = hashlib.pbkdf2_hmac(self._algorithm, self._password.encode(), salt, iterations)
        client_key = hmac.digest(salted, b"Client Key", self._algorithm)
        stored_key = hashlib.new(self._algorithm, client_key).digest()
        unproved = f"c=biws,r={nonce}"
        message = f"{self._first},{server_first},{unproved}".encode()
        proof = bytes(
            left ^ right
            for left, right in zip(client_key, hmac.digest(stored_key, message, self._algorithm), strict=True)
        )
        server_key = hmac.digest(salted, b"Server Key", self._algorithm)
        self._signature = hmac.digest(server_key, message, self._algorithm)
        return f"{unproved},p={b64encode(proof).decode()}".encode()


class OAuthBearer:
    """OAUTHBEARER: one message with the token. The broker refuses with JSON, which the client acknowledges."""

    has_last_word = False

    def __init__(self, token: str, extensions: Sequence[tuple[str, str]] = ()) -> None:
        self._token, self._extensions = token, extensions
        #: Why the broker has refused the token.
        self.refusal: str | None = None
        self.secrets: tuple[str, ...] = (token,)

    def first(self) -> bytes:
        extensions = "".join(f"{name}={value}\1" for name, value in self._extensions)
        return f"n,,\1auth=Bearer {self._token}\1{extensions}\1".encode()

    def step(self, answer: bytes) -> bytes | None:
        if not answer:
            return None
        if self.refusal is not None:
            raise SaslError(self.refusal)
        try:
            status = str(json.loads(answer)["status"])
        except (ValueError, KeyError, TypeError, RecursionError):  # deep nesting
            status = answer.decode("utf-8", "replace")
        shown = without_secrets(status, self.secrets)
        self.refusal = f"the broker refuses the token ({shown}): it has expired, or is of another issuer or audience"
        return b"\1"


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
            from spark_klog.security.tokens import token_of  # urllib takes long to import

            assert config.oauth is not None
            token = token_of(config.oauth, host, deadline, self._named)
            self._mechanism = OAuthBearer(token, config.oauth.extensions)
        elif config.mechanism == GSSAPI:
            from spark_klog.security.kerberos import Kerberos  # needs the package gssapi

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
        if code := answer["error_code"]:
            if isinstance(self._mechanism, OAuthBearer) and self._mechanism.refusal is not None:
                raise self._refused(self._mechanism.refusal)
            said = without_secrets(answer["error_message"] or f"error {code}", self._mechanism.secrets)
            is_refusal = code == ErrorCode.SASL_AUTHENTICATION_FAILED
            raise self._refused(f"it says: {said}. {self._advice()}" if is_refusal else f"it says: {said}")
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
    def is_quick(self) -> bool:
        """Whether `begin` and `next` take no time: other mechanisms hash passwords, or ask others for a token."""
        return self._config.mechanism == PLAIN

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

    def _refused(self, why: str) -> SaslError:
        return SaslError(f"broker {self._address} refuses {self._config.mechanism}: {why}")
