"""GSSAPI, the client's side (RFC 4752, with Kerberos 5), by the package gssapi.

    client  tokens of the security context until both sides are authenticated      (RFC 4121)
    server  wrapped: 1 byte of layers, of which 1 is none, and 3 bytes, the largest message
    client  wrapped: the byte 1, three of 0, the client's principal

Kerberos reads krb5.conf (or the file in KRB5_CONFIG); java.security.krb5.conf has no meaning here.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

from spark_klog.base.in_a_thread import within
from spark_klog.errors import ConfigError, ConnectionFailed, SaslError
from spark_klog.security.config import KerberosConfig

_NO_LAYER = 1
_PACKAGE = "GSSAPI needs the package gssapi: pip install 'spark-klog[kerberos]'; it is built with Kerberos's headers"


class Kerberos:
    """GSSAPI at the broker on `host`; tickets are had before `deadline`, a reading of `time.monotonic`.

    Errors: `ConfigError` without the package or the keytab, `ConnectionFailed` if no KDC answers, `SaslError`.
    """

    def __init__(self, config: KerberosConfig, host: str, deadline: float, named: Callable[[str], str]) -> None:
        try:
            import gssapi
        except (ImportError, OSError):
            raise ConfigError(_PACKAGE) from None
        self._config, self._host, self._deadline, self._named = config, host, deadline, named
        self._gssapi: Any = gssapi
        self._context: Any = None
        self._has_answered = False
        self.secrets: tuple[str, ...] = ()

    @property
    def has_last_word(self) -> bool:
        return self._has_answered

    def first(self) -> bytes:
        return self._do(self._begin)

    def _begin(self) -> bytes:
        config, names = self._config, self._gssapi.NameType
        store = {}
        if config.keytab:
            key = f"{config.keytab}\0{config.principal}".encode()
            # a cache of its own: the default one may be another user's
            store = {"client_keytab": config.keytab, "ccache": f"MEMORY:klog-{sha256(key).hexdigest()[:16]}"}
        elif config.cache:
            store = {"ccache": config.cache}
        principal = self._gssapi.Name(config.principal, names.kerberos_principal) if config.principal else None
        credentials = self._gssapi.Credentials(usage="initiate", name=principal, store=store or None)
        service = self._gssapi.Name(f"{config.service}@{self._host}", names.hostbased_service)
        mechanism = self._gssapi.MechType.kerberos
        flags = self._gssapi.RequirementFlag.mutual_authentication
        self._context = self._gssapi.SecurityContext(
            name=service, creds=credentials, mech=mechanism, flags=flags, usage="initiate"
        )
        return self._context.step() or b""

    def step(self, answer: bytes) -> bytes | None:
        if self._has_answered:
            return None
        return self._do(lambda: self._next(answer))

    def _next(self, answer: bytes) -> bytes:
        if not self._context.complete:
            return self._context.step(answer) or b""
        offered = self._context.unwrap(answer).message
        if len(offered) != 4 or not offered[0] & _NO_LAYER:
            raise SaslError("the broker asks for a security layer of Kerberos, and Kafka has none: set SASL_SSL")
        self._has_answered = True
        principal = str(self._context.initiator_name).encode()
        return bytes(self._context.wrap(bytes([_NO_LAYER, 0, 0, 0]) + principal, False).message)

    def _do(self, work: Callable[[], bytes]) -> bytes:
        try:
            return within(self._deadline, work, "Kerberos")
        except TimeoutError:
            raise ConnectionFailed("no KDC of Kerberos has answered in time: check krb5.conf") from None
        except self._gssapi.exceptions.GSSError as error:
            raise SaslError(f"Kerberos: {self._reason(error)}") from None

    def _reason(self, error: Any) -> str:
        """Kerberos's own words for a failure, with what to do."""
        minor = error.get_all_statuses(error.min_code, False)
        text = "; ".join(minor) or "; ".join(error.get_all_statuses(error.maj_code, True))
        config = self._config
        if config.keytab:
            who = f" of {config.principal}" if config.principal else ""
            return f"{text} (the keytab{who} is {config.keytab}, the service {config.service}@{self._host})"
        return (
            f"{text} (the service is {config.service}@{self._host}): get a ticket by kinit, or set "
            f"{self._named('sasl.kerberos.keytab')} and {self._named('sasl.kerberos.principal')}"
        )
