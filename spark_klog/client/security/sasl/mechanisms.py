"""The client's side of SASL mechanisms as state machines without I/O: PLAIN, SCRAM, OAUTHBEARER.

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
import os
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Protocol

from spark_klog.client.security.settings.config import SCRAM_SHA_256, SCRAM_SHA_512
from spark_klog.client.security.settings.secrets import without_secrets
from spark_klog.errors import SaslError

_HASHES = {SCRAM_SHA_256: "sha256", SCRAM_SHA_512: "sha512"}
#: RFC 7677 requires at least 4096. The maximum keeps a server from making the client compute for minutes.
_MIN_ITERATIONS, _MAX_ITERATIONS = 4096, 1_000_000
_NONCE_BYTES = 24


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
        self._algorithm = _HASHES[mechanism]
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
        if not _MIN_ITERATIONS <= iterations <= _MAX_ITERATIONS:
            raise SaslError(
                f"the broker asks for {iterations} SCRAM iterations: they must be from {_MIN_ITERATIONS} to "
                f"{_MAX_ITERATIONS}"
            )
        salted = hashlib.pbkdf2_hmac(self._algorithm, self._password.encode(), salt, iterations)
        client_key = hmac.digest(salted, b"Client Key", self._algorithm)
        stored_key = hashlib.new(self._algorithm, client_key).digest()
        unproved = f"c=biws,r={nonce}"
        message = f"{self._first},{server_first},{unproved}".encode()
        proof = bytes(
            one ^ other
            for one, other in zip(client_key, hmac.digest(stored_key, message, self._algorithm), strict=True)
        )
        server_key = hmac.digest(salted, b"Server Key", self._algorithm)
        self._signature = hmac.digest(server_key, message, self._algorithm)
        return f"{unproved},p={b64encode(proof).decode()}".encode()


class OAuthBearer:
    """OAUTHBEARER: one message with the token. The broker refuses with JSON, which the client acknowledges."""

    has_last_word = False

    def __init__(self, token: str, extensions: Sequence[tuple[str, str]] = ()) -> None:
        self._token, self._extensions = token, extensions
        self._refusal: str | None = None
        self.secrets: tuple[str, ...] = (token,)

    def first(self) -> bytes:
        extensions = "".join(f"{name}={value}\1" for name, value in self._extensions)
        return f"n,,\1auth=Bearer {self._token}\1{extensions}\1".encode()

    def step(self, answer: bytes) -> bytes | None:
        if not answer:
            return None
        if self._refusal is not None:
            raise SaslError(self._refusal)
        try:
            status = str(json.loads(answer)["status"])
        except (ValueError, KeyError, TypeError, RecursionError):  # deep nesting
            status = answer.decode("utf-8", "replace")
        shown = without_secrets(status, self.secrets)
        self._refusal = f"the broker refuses the token ({shown}): it has expired, or is of another issuer or audience"
        return b"\1"

    @property
    def refusal(self) -> str | None:
        """Why the broker has refused the token; None if it has not."""
        return self._refusal
