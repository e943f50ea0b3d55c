"""SaslHandshake (key 17, KIP-43) and SaslAuthenticate (key 36, KIP-152, KIP-368)."""

from __future__ import annotations

from spark_klog.protocol.schema import BYTES, INT16, INT64, STRING, F, api, array, struct

_NEVER_FLEXIBLE = 1 << 15

SASL_HANDSHAKE = api(
    17,
    "SaslHandshake",
    "0-1",
    _NEVER_FLEXIBLE,
    struct(F("mechanism", STRING)),
    struct(F("error_code", INT16), F("mechanisms", array(STRING))),
)

SASL_AUTHENTICATE = api(
    36,
    "SaslAuthenticate",
    "0-2",
    2,
    struct(F("auth_bytes", BYTES)),
    struct(
        F("error_code", INT16),
        F("error_message", STRING, nullable="0+", default=None),
        F("auth_bytes", BYTES),
        F("session_lifetime_ms", INT64, "1+"),
    ),
)
