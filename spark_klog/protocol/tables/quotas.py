"""Quotas of clients (KIP-546): DescribeClientQuotas (key 48) and AlterClientQuotas (49)."""

from __future__ import annotations

from spark_klog.protocol.schema import BOOLEAN, FLOAT64, INT8, INT16, INT32, STRING, F, api, array, struct

_ENTITY = F("entity", array(F("entity_type", STRING), F("entity_name", STRING, nullable="0+")))

DESCRIBE_CLIENT_QUOTAS = api(
    48,
    "DescribeClientQuotas",
    "0-1",
    1,
    struct(
        F(
            "components",
            array(F("entity_type", STRING), F("match_type", INT8), F("match", STRING, nullable="0+")),
        ),
        F("strict", BOOLEAN),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F("error_code", INT16),
        F("error_message", STRING, nullable="0+", default=None),
        F("entries", array(_ENTITY, F("values", array(F("key", STRING), F("value", FLOAT64)))), nullable="0+"),
    ),
)

ALTER_CLIENT_QUOTAS = api(
    49,
    "AlterClientQuotas",
    "0-1",
    1,
    struct(
        F(
            "entries",
            array(_ENTITY, F("ops", array(F("key", STRING), F("value", FLOAT64), F("remove", BOOLEAN)))),
        ),
        F("validate_only", BOOLEAN),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F(
            "entries",
            array(F("error_code", INT16), F("error_message", STRING, nullable="0+", default=None), _ENTITY),
        ),
    ),
)
