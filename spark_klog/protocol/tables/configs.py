"""Settings of topics and brokers, and quotas of clients.

DescribeConfigs (key 32), AlterConfigs (33), IncrementalAlterConfigs (44) and ListConfigResources (74, KIP-714 and
KIP-1142; version 0 was ListClientMetricsResources).
Quotas (KIP-546): DescribeClientQuotas (48) and AlterClientQuotas (49).
"""

from __future__ import annotations

from spark_klog.protocol.schema import (
    BOOLEAN,
    ERROR,
    FLOAT64,
    INT8,
    INT16,
    INT32,
    STRING,
    F,
    api,
    array,
    struct,
    structs,
)

#: Resource types.
TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32
#: Sources of a value.
TOPIC_SOURCE, BROKER_SOURCE, DEFAULT_SOURCE, LOGGER_SOURCE, GROUP_SOURCE = 1, 4, 5, 6, 8
#: Operations.
SET, DELETE, APPEND, SUBTRACT = range(4)

DESCRIBE_CONFIGS = api(32, "DescribeConfigs", "0-4", flexible=4)(
    struct(
        structs(
            "resources",
            F("resource_type", INT8),
            F("resource_name", STRING),
            F("configuration_keys", array(STRING), nullable="0+"),
        ),
        F("include_synonyms", BOOLEAN, "1+"),
        F("include_documentation", BOOLEAN, "3+"),
    ),
    struct(
        F("throttle_time_ms", INT32),
        structs(
            "results",
            *ERROR,
            F("resource_type", INT8),
            F("resource_name", STRING),
            structs(
                "configs",
                F("name", STRING),
                F("value", STRING, nullable="0+"),
                F("read_only", BOOLEAN),
                F("config_source", INT8, "1+", default=-1),
                F("is_default", BOOLEAN, "0"),
                F("is_sensitive", BOOLEAN),
                structs(
                    "synonyms",
                    F("name", STRING, "1+"),
                    F("value", STRING, "1+", nullable="0+"),
                    F("source", INT8, "1+"),
                    versions="1+",
                ),
                F("config_type", INT8, "3+"),
                F("documentation", STRING, "3+", nullable="0+"),
            ),
        ),
    ),
)

_ALTERED = struct(
    F("throttle_time_ms", INT32),
    structs(
        "responses",
        *ERROR,
        F("resource_type", INT8),
        F("resource_name", STRING),
    ),
)

ALTER_CONFIGS = api(33, "AlterConfigs", "0-2", flexible=2)(
    struct(
        structs(
            "resources",
            F("resource_type", INT8),
            F("resource_name", STRING),
            structs("configs", F("name", STRING), F("value", STRING, nullable="0+")),
        ),
        F("validate_only", BOOLEAN),
    ),
    _ALTERED,
)

INCREMENTAL_ALTER_CONFIGS = api(44, "IncrementalAlterConfigs", "0-1", flexible=1)(
    struct(
        structs(
            "resources",
            F("resource_type", INT8),
            F("resource_name", STRING),
            structs("configs", F("name", STRING), F("config_operation", INT8), F("value", STRING, nullable="0+")),
        ),
        F("validate_only", BOOLEAN),
    ),
    _ALTERED,
)

LIST_CONFIG_RESOURCES = api(74, "ListConfigResources", "0-1", flexible=0)(
    struct(F("resource_types", array(INT8), "1+")),
    struct(
        F("throttle_time_ms", INT32),
        F("error_code", INT16),
        structs("config_resources", F("resource_name", STRING), F("resource_type", INT8, "1+", default=CLIENT_METRICS)),
    ),
)

_ENTITY = structs("entity", F("entity_type", STRING), F("entity_name", STRING, nullable="0+"))

DESCRIBE_CLIENT_QUOTAS = api(48, "DescribeClientQuotas", "0-1", flexible=1)(
    struct(
        structs("components", F("entity_type", STRING), F("match_type", INT8), F("match", STRING, nullable="0+")),
        F("strict", BOOLEAN),
    ),
    struct(
        F("throttle_time_ms", INT32),
        *ERROR,
        structs("entries", _ENTITY, structs("values", F("key", STRING), F("value", FLOAT64)), nullable="0+"),
    ),
)

ALTER_CLIENT_QUOTAS = api(49, "AlterClientQuotas", "0-1", flexible=1)(
    struct(
        structs("entries", _ENTITY, structs("ops", F("key", STRING), F("value", FLOAT64), F("remove", BOOLEAN))),
        F("validate_only", BOOLEAN),
    ),
    struct(
        F("throttle_time_ms", INT32),
        structs("entries", *ERROR, _ENTITY),
    ),
)
