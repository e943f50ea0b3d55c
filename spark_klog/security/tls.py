"""Non-blocking TLS sockets, and messages for their errors.

A `TlsSocket` decrypts directly into the reader's buffer. If an `ssl.SSLSocket` would raise SSLWantReadError or
SSLWantWriteError, it raises `BlockingIOError`, as a plain socket does.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
from collections.abc import Callable
from typing import Any

from spark_klog.errors import HandshakeInterrupted, TlsError
from spark_klog.security.config import TlsConfig
from spark_klog.security.key_stores import client_context

_WANTS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
#: OpenSSL's X509_V_ERR_*.
_NOT_YET_VALID, _EXPIRED, _REVOKED = 9, 10, 23
_NOT_TRUSTED = frozenset({2, 18, 19, 20, 21})
_OTHER_NAME = frozenset({62, 64})
#: OpenSSL's errors for an answer that is not TLS.
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE"})


class TlsSocket(ssl.SSLSocket):
    """The socket class that `handshakes` sets in its context."""

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Read all that has arrived and fits: OpenSSL gives no more than a TLS record, of 16 KiB, at a time.

        An `ssl.SSLObject` that gets 1 MiB a system call was no faster (2 to 4 % of CPU time): its copies take what the
        calls save.
        """
        size, filled = nbytes or len(buffer), 0
        with memoryview(buffer) as view:
            while filled < size:
                try:
                    received = self.read(size - filled, view[filled:])
                except _WANTS:
                    if filled:
                        break
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
                if not received:
                    break
                filled += received  # type: ignore[operator]
        return filled

    def send(self, data: Any, flags: int = 0) -> int:
        try:
            return super().send(data, flags)
        except _WANTS:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None


class Handshake:
    """A non-blocking TLS handshake on a connected socket."""

    def __init__(self, context: ssl.SSLContext, connected: socket.socket, host: str, address: str, config: TlsConfig):
        """`host` must be in the broker's certificate; `address` is for messages."""
        self._address, self._config = address, config
        #: The event of `select.poll` that `step` waits for.
        self.awaited_events = select.POLLOUT
        try:
            connected.setblocking(False)
            self.socket = context.wrap_socket(connected, do_handshake_on_connect=False, server_hostname=host)
        except (OSError, ValueError) as error:  # ValueError: a host name that no certificate can have
            connected.close()
            raise self._failed(error) from None

    def step(self) -> bool:
        """Continue; return whether the handshake is done. `TlsError` if a side refuses, else `HandshakeInterrupted`."""
        try:
            self.socket.do_handshake()
        except ssl.SSLWantReadError:
            self.awaited_events = select.POLLIN
        except ssl.SSLWantWriteError:
            self.awaited_events = select.POLLOUT
        except (OSError, ValueError) as error:
            self.socket.close()
            raise self._failed(error) from None
        else:
            return True
        return False

    def _failed(self, error: Exception) -> Exception:
        refused = refusal(error, self._address, self._config)
        if refused is not None:
            return refused
        return HandshakeInterrupted(
            f"broker {self._address} closed the connection during the TLS handshake: does it use TLS on this port? "
            f"If not, set {self._config.prefix}security.protocol to PLAINTEXT or SASL_PLAINTEXT"
        )


def handshakes(config: TlsConfig) -> Callable[[socket.socket, str, str], Handshake]:
    """A function of (connected socket, host, address) that begins a handshake; `ConfigError`: see `client_context`."""
    context = client_context(config)
    context.sslsocket_class = TlsSocket
    return lambda connected, host, address: Handshake(context, connected, host, address, config)


def refusal(error: Exception, address: str, config: TlsConfig) -> TlsError | None:
    """The error if one side refuses the other; None if the connection only broke."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsError(f"the certificate of broker {address} {_unverified(error, config)}")
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return None
    if not isinstance(error, ssl.SSLError):
        return None if isinstance(error, OSError) else TlsError(f"broker {address}: {error}")
    reason = error.reason or "unknown error"
    if reason in _NO_TLS:
        return TlsError(
            f"broker {address} does not speak TLS on this port: set {config.prefix}security.protocol to PLAINTEXT or "
            "SASL_PLAINTEXT, or connect to the port of its TLS listener"
        )
    if "ALERT" in reason:
        said = reason.partition("ALERT_")[2].replace("_", " ").lower()
        own = f"the certificate in {config.chain.setting}" if config.chain else "a client without a certificate"
        if "certificate" in said or "unknown ca" in said or "access denied" in said:
            hint = "check that it is valid and signed by whom the broker trusts" if config.chain else ""
            return TlsError(
                f"broker {address} refuses {own} ({said}): "
                + (hint or f"set {config.prefix}ssl.keystore.location or ssl.keystore.key and .certificate.chain")
            )
        return TlsError(f"broker {address} refuses the TLS handshake ({said}): TLS versions, ciphers or certificates")
    return TlsError(f"TLS with broker {address} failed: {reason.replace('_', ' ').lower()}")


def _unverified(error: ssl.SSLCertVerificationError, config: TlsConfig) -> str:
    trust = config.trust.setting if config.trust else f"{config.prefix}ssl.truststore.location"
    code = error.verify_code
    if code in _OTHER_NAME:
        return (
            "is not for this host name: connect by a name in the certificate, or set "
            f"{config.prefix}ssl.endpoint.identification.algorithm to nothing (then any host that has a trusted "
            "certificate is taken for the broker)"
        )
    if code == _EXPIRED:
        return "has expired: the broker needs a new one"
    if code == _NOT_YET_VALID:
        return "is not valid yet: compare the clocks"
    if code == _REVOKED:
        return "has been revoked"
    if code in _NOT_TRUSTED:
        return f"is signed by an authority that is not trusted: {trust} must hold the authority's certificate"
    return f"is not valid: {error.verify_message}"
