"""SASL mechanisms as state machines without I/O: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512.

    PLAIN   client  [authzid] NUL authcid NUL password                           (RFC 4616)
    SCRAM   client  "n,," ["a=" name ","] "n=" user ",r=" nonce                  (RFC 5802, RFC 7677)
            server  "r=" nonce + own nonce ",s=" base64 of salt ",i=" iterations
            client  "c=" base64 of the first message's header ",r=" both nonces ",p=" base64 of proof
            server  "v=" base64 of the server's signature

    SaltedPassword = PBKDF2-HMAC-H(password, salt, iterations)
    StoredKey      = H(HMAC(SaltedPassword, "Client Key"))
    ServerKey      = HMAC(SaltedPassword, "Server Key")

As in Kafka, there is no channel binding, and names are not prepared by SASLprep. PLAIN is checked against the salted
credentials of SCRAM, so that no password is stored. An unknown user gets the complete exchange with made-up
credentials, so that neither the responses nor their timing reveal which users exist.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import os
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import NamedTuple

from spark_klog.base.names import SCRAM_HASHES, SCRAM_SHA_256, SCRAM_SHA_512
from spark_klog.errors import KlogError
from spark_klog.protocol.tables.security import MIN_ITERATIONS

_MAX_TOKEN = 16 * 1024
_MAX_NAME = 255
_SALT_BYTES = 20
_NONCE_BYTES = 18
_HEADERS = ("n", "y")
#: Secret of this process from which salts of unknown users derive: they can't be told from real salts.
_PRETENCE = os.urandom(32)


class Credential(NamedTuple):
    """A user's credential for one SCRAM mechanism: it does not contain the password."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int


#: Returns the credential of (user, SCRAM mechanism), None if there is none.
Lookup = Callable[[str, str], Credential | None]


class Refused(KlogError):
    """The client may not do this; the broker closes the connection. The text is for the log."""


class AuthenticationFailed(Refused):
    """The client failed to authenticate. The text has no secret; clients get a shorter one."""


def make_credential(mechanism: str, password: str, iterations: int = MIN_ITERATIONS) -> Credential:
    """Make a credential with a new salt."""
    return _credential(mechanism, password.encode(), os.urandom(_SALT_BYTES), iterations)


def _hmac(algorithm: str, key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, algorithm)


def _credential(mechanism: str, password: bytes, salt: bytes, iterations: int) -> Credential:
    salted = hashlib.pbkdf2_hmac(SCRAM_HASHES[mechanism], password, salt, iterations)
    return credential_of_salted(mechanism, salted, salt, iterations)


def credential_of_salted(mechanism: str, salted: bytes, salt: bytes, iterations: int) -> Credential:
    """Make a credential from a password that the client has salted itself, as admin clients do (KIP-554)."""
    algorithm = SCRAM_HASHES[mechanism]
    client_key = _hmac(algorithm, salted, b"Client Key")
    stored_key = hashlib.new(algorithm, client_key).digest()
    return Credential(salt, stored_key, _hmac(algorithm, salted, b"Server Key"), iterations)


def _pretended(mechanism: str, user: str) -> Credential:
    """Made-up credential of an unknown user: the same each time, with keys that match no password."""
    made = [_hmac("sha512", _PRETENCE, f"{part} {mechanism} {user}".encode()) for part in ("salt", "stored", "server")]
    size = hashlib.new(SCRAM_HASHES[mechanism]).digest_size
    return Credential(made[0][:_SALT_BYTES], made[1][:size], made[2][:size], MIN_ITERATIONS)


def _text(token: bytes) -> str:
    if len(token) > _MAX_TOKEN:
        raise AuthenticationFailed(f"a token of {len(token)} bytes, at most {_MAX_TOKEN} are allowed")
    try:
        return token.decode()
    except UnicodeDecodeError:
        raise AuthenticationFailed("a token that is not UTF-8") from None


def _shown(user: str) -> str:
    """A name for the log: truncated, without line breaks."""
    return repr(user if len(user) <= _MAX_NAME else user[:_MAX_NAME] + "...")


class Plain:
    """PLAIN: one token with name and password."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        #: Set when the client is authenticated.
        self.user: str | None = None

    def step(self, token: bytes) -> bytes:
        """Answer a client's token. Raises `AuthenticationFailed`."""
        parts = _text(token).split("\0")
        if self.user is not None or len(parts) != 3:
            raise AuthenticationFailed("not a PLAIN token of three parts")
        authorized, user, password = parts
        if not user or len(user) > _MAX_NAME or not password:
            raise AuthenticationFailed("a PLAIN token without a name or without a password")
        if authorized not in ("", user):
            raise AuthenticationFailed(f"user {_shown(user)} asks for another authorization id, which is not supported")
        mechanism, credential = SCRAM_SHA_256, self._lookup(user, SCRAM_SHA_256)
        if credential is None and (other := self._lookup(user, SCRAM_SHA_512)) is not None:
            mechanism, credential = SCRAM_SHA_512, other
        known = credential or _pretended(mechanism, user)
        given = _credential(mechanism, password.encode(), known.salt, known.iterations)
        if not hmac.compare_digest(given.stored_key, known.stored_key) or credential is None:
            raise AuthenticationFailed(f"wrong name or password for user {_shown(user)}")
        self.user = user
        return b""


class Scram:
    """SCRAM: two tokens; the password is never sent."""

    def __init__(self, mechanism: str, lookup: Lookup, nonce: str | None = None) -> None:
        self._mechanism, self._algorithm = mechanism, SCRAM_HASHES[mechanism]
        self._lookup = lookup
        self._own_nonce = nonce or b64encode(os.urandom(_NONCE_BYTES)).decode()
        self._server_first = ""
        self.user: str | None = None

    def step(self, token: bytes) -> bytes:
        if self.user is not None:
            raise AuthenticationFailed("a token after the last one")
        text = _text(token)
        return (self._last(text) if self._server_first else self._first(text)).encode()

    def _first(self, text: str) -> str:
        parts = text.split(",")
        if len(parts) != 4 or parts[0] not in _HEADERS:
            raise AuthenticationFailed("not a first SCRAM message, or one with channel binding or extensions")
        header, authorized, name, nonce = parts
        if not name.startswith("n=") or not nonce.startswith("r=") or len(nonce) < 3:
            raise AuthenticationFailed("a first SCRAM message without a name or a nonce")
        user = _unescaped(name[2:])
        if authorized not in ("", f"a={name[2:]}"):
            raise AuthenticationFailed(f"user {_shown(user)} asks for another authorization id, which is not supported")
        self._header = f"{header},{authorized},"
        self._client_first = f"{name},{nonce}"
        self._client_nonce = nonce[2:]
        self._nonce = self._client_nonce + self._own_nonce
        credential = self._lookup(user, self._mechanism)
        self._name, self._is_known = user, credential is not None
        self._credential = credential or _pretended(self._mechanism, user)
        salt = b64encode(self._credential.salt).decode()
        self._server_first = f"r={self._nonce},s={salt},i={self._credential.iterations}"
        return self._server_first

    def _last(self, text: str) -> str:
        unproved, comma, proof = text.rpartition(",p=")
        binding, _, nonce = unproved.partition(",r=")
        # librdkafka before 2.6.1 repeats its own nonce before both; Kafka 3.9 accepts that, and so do we
        is_ours = nonce in (self._nonce, self._client_nonce + self._nonce)
        if not comma or not is_ours or binding != f"c={b64encode(self._header.encode()).decode()}":
            raise AuthenticationFailed("a last SCRAM message that does not continue the first one")
        message = f"{self._client_first},{self._server_first},{unproved}".encode()
        signature = _hmac(self._algorithm, self._credential.stored_key, message)
        try:
            proved = b64decode(proof, validate=True)
        except (binascii.Error, ValueError):
            raise AuthenticationFailed("a SCRAM proof that is not base64") from None
        if len(proved) != len(signature):
            raise AuthenticationFailed(f"a SCRAM proof of {len(proved)} bytes instead of {len(signature)}")
        client_key = bytes(left ^ right for left, right in zip(proved, signature, strict=True))
        stored_key = hashlib.new(self._algorithm, client_key).digest()
        if not hmac.compare_digest(stored_key, self._credential.stored_key) or not self._is_known:
            raise AuthenticationFailed(f"wrong name or password for user {_shown(self._name)}")
        self.user = self._name
        return f"v={b64encode(_hmac(self._algorithm, self._credential.server_key, message)).decode()}"


def _unescaped(name: str) -> str:
    """Decode a SCRAM name, which has "=2C" for a comma and "=3D" for "="."""
    user = name.replace("=2C", ",").replace("=3D", "=")
    if name.count("=") != name.count("=2C") + name.count("=3D") or not user or len(user) > _MAX_NAME:
        raise AuthenticationFailed("a SCRAM name that is empty, too long, or not escaped")
    return user
