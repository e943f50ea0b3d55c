"""Authentication state of one connection. No I/O.

    listener without SASL   the user is ANONYMOUS, or the subject of the client's certificate
    listener with SASL      SaslHandshake v1, then tokens in SaslAuthenticate
                            SaslHandshake v0, then tokens in bare frames: INT32 size, token
                            until authenticated, only ApiVersions and these two APIs are answered

Sources: KIP-43, KIP-152 (SaslAuthenticate), KIP-368 (session lifetime, here 0: no re-authentication).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from spark_klog.base.names import PLAIN
from spark_klog.broker.security.config import ANONYMOUS, Listener
from spark_klog.broker.security.mechanisms import Lookup, Plain, Scram
from spark_klog.errors import ErrorCode
from spark_klog.protocol import apis

_BEFORE_AUTHENTICATION = frozenset({apis.API_VERSIONS.key, apis.SASL_HANDSHAKE.key, apis.SASL_AUTHENTICATE.key})
_FIRST_SASL_AUTHENTICATE = 1


class _State(Enum):
    HANDSHAKE = "before SaslHandshake"
    TOKENS = "within SaslAuthenticate"
    RAW_TOKENS = "within tokens of their own"
    OPEN = "open"
    FAILED = "failed"


class Session:
    """Authentication state of one connection; see the module. `address` is HOST:PORT."""

    def __init__(self, listener: Listener, address: str, mechanisms: Sequence[str], lookup: Lookup) -> None:
        self.listener = listener.name
        self.is_tls = listener.is_tls
        self.user = ANONYMOUS
        self.mechanisms = list(mechanisms)
        self._address = address
        self._lookup = lookup
        self._mechanism: Plain | Scram | None = None
        self._enter(_State.HANDSHAKE if listener.is_sasl else _State.OPEN)

    @property
    def host(self) -> str:
        """The client's address without its port."""
        return self._address.rpartition(":")[0].strip("[]")

    @property
    def peer(self) -> str:
        """The client's address and, unless anonymous, its user: for the log."""
        return self._address if self.user == ANONYMOUS else f"{self._address} (User:{self.user})"

    def _enter(self, state: _State) -> None:
        self._state = state
        #: Whether the client is authenticated, or need not be: all APIs are allowed.
        self.is_open = state is _State.OPEN
        #: Whether the connection must be closed after the response is sent.
        self.has_failed = state is _State.FAILED
        #: Whether the next frame is a bare token, not a request.
        self.takes_raw_tokens = state is _State.RAW_TOKENS

    def take_certificate(self, certificate: dict[str, Any] | None) -> None:
        """Take the user from the client's certificate: the result of `getpeercert`, verified by TLS."""
        from spark_klog.broker.security.tls import subject_name

        self.user = subject_name(certificate) or self.user

    def admits(self, key: int) -> bool:
        """Whether a request of this API is allowed now."""
        return self.is_open or key in _BEFORE_AUTHENTICATION

    def handshake(self, mechanism: str, version: int) -> ErrorCode:
        """Handle the client's choice of a mechanism; one that is not enabled ends the connection."""
        if self._state is not _State.HANDSHAKE:
            return ErrorCode.ILLEGAL_SASL_STATE
        if mechanism not in self.mechanisms:
            self._enter(_State.FAILED)
            return ErrorCode.UNSUPPORTED_SASL_MECHANISM
        self._mechanism = Plain(self._lookup) if mechanism == PLAIN else Scram(mechanism, self._lookup)
        self._enter(_State.TOKENS if version >= _FIRST_SASL_AUTHENTICATE else _State.RAW_TOKENS)
        return ErrorCode.NONE

    @property
    def takes_tokens(self) -> bool:
        """Whether a mechanism waits for the client's next token."""
        return self._mechanism is not None and self._state in (_State.TOKENS, _State.RAW_TOKENS)

    def authenticate(self, token: bytes) -> bytes:
        """Answer a token. After `AuthenticationFailed` the connection must be closed."""
        assert self._mechanism is not None
        try:
            answer = self._mechanism.step(token)
        except BaseException:
            self._enter(_State.FAILED)
            raise
        if self._mechanism.user is not None:
            self.user = self._mechanism.user
            self._enter(_State.OPEN)
            self._mechanism = None
        return answer
