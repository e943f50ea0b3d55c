"""Hints for a broker that closes a connection at once or answers with another protocol."""

from __future__ import annotations

from spark_klog.client.security.config import SecurityConfig
from spark_klog.errors import HandshakeInterrupted, KlogError, TlsError

#: How a TLS record of type alert begins: 21, and the major version 3.
_ALERT = b"\x15\x03"


def security_error(answer: bytes | bytearray, address: str, security: SecurityConfig) -> TlsError | None:
    """The error for a TLS alert on a connection without TLS; None for other bytes."""
    if answer[: len(_ALERT)] != _ALERT or security.tls is not None:
        return None
    name = security.named("security.protocol")
    return TlsError(f"broker {address} uses TLS on this port: set {name} to {_with_tls(security)}")


def _with_tls(security: SecurityConfig) -> str:
    return "SASL_SSL" if security.sasl else "SSL, or to SASL_SSL if it requires SASL, too"


def closed_early(error: OSError, text: str, address: str, security: SecurityConfig, is_open: bool) -> KlogError:
    """The error for a connection that breaks before the first answer; `is_open` if its negotiation was done.

    `text` says what happened. With TLS 1.3 the broker checks the client's certificate only after the handshake.
    """
    if security.tls is not None:
        from spark_klog.client.security.tls import refusal

        refused = refusal(error, address, security.tls)
        if refused is not None:
            return refused
    interrupted = HandshakeInterrupted(f"{text}; {_hint(security, is_open)}")
    interrupted.is_by_broker = is_open
    return interrupted


def _hint(security: SecurityConfig, is_open: bool) -> str:
    name = security.named("security.protocol")
    if is_open and security.sasl is None:
        return f"if it requires SASL on this port, set {name} to {'SASL_SSL' if security.tls else 'SASL_PLAINTEXT'}"
    if security.tls is None:
        return f"if it uses TLS on this port, set {name} to {_with_tls(security)}"
    if security.tls.chain is None:
        return f"it may require a client certificate: set {security.named('ssl.keystore.location')}"
    return f"it may refuse the certificate in {security.tls.chain.setting}: its log says why"
