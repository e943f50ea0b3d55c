"""Authentication and authorization.

SaslHandshake (key 17, KIP-43) and SaslAuthenticate (36, KIP-152, KIP-368).
Access control lists (KIP-140, KIP-290): DescribeAcls (29), CreateAcls (30) and DeleteAcls (31).
SCRAM credentials of users (KIP-554): DescribeUserScramCredentials (50) and AlterUserScramCredentials (51).
"""

from __future__ import annotations

from enum import IntEnum

from spark_klog.base.names import SCRAM_SHA_256, SCRAM_SHA_512
from spark_klog.protocol.schema import BYTES, ERROR, INT8, INT16, INT32, INT64, STRING, F, api, array, struct, structs

#: SCRAM's mechanisms by the numbers that requests have, and the bounds of iterations: RFC 7677 and Kafka require at
#: least 4096; Kafka's brokers allow at most 16384.
SCRAM_MECHANISMS = {1: SCRAM_SHA_256, 2: SCRAM_SHA_512}
MIN_ITERATIONS, MAX_ITERATIONS = 4096, 16384
_NEVER_FLEXIBLE = 1 << 15
#: Types of resources, patterns and permissions; a filter matches anything with ANY.
ANY, TOPIC = 1, 2
MATCH, LITERAL, PREFIXED = 2, 3, 4
ALLOW = 3


class AclOperation(IntEnum):
    """Operations on a resource. Only filters have ANY."""

    ANY = 1
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


_FILTER = (
    F("resource_type_filter", INT8),
    F("resource_name_filter", STRING, nullable="0+"),
    F("pattern_type_filter", INT8, "1+", default=LITERAL),
    F("principal_filter", STRING, nullable="0+"),
    F("host_filter", STRING, nullable="0+"),
    F("operation", INT8),
    F("permission_type", INT8),
)

SASL_HANDSHAKE = api(17, "SaslHandshake", "0-1", flexible=_NEVER_FLEXIBLE)(
    struct(F("mechanism", STRING)),
    struct(F("error_code", INT16), F("mechanisms", array(STRING))),
)

SASL_AUTHENTICATE = api(36, "SaslAuthenticate", "0-2", flexible=2)(
    struct(F("auth_bytes", BYTES)),
    struct(
        *ERROR,
        F("auth_bytes", BYTES),
        F("session_lifetime_ms", INT64, "1+"),
    ),
)

DESCRIBE_ACLS = api(29, "DescribeAcls", "1-3", flexible=2)(
    struct(*_FILTER),
    struct(
        F("throttle_time_ms", INT32),
        *ERROR,
        structs(
            "resources",
            F("resource_type", INT8),
            F("resource_name", STRING),
            F("pattern_type", INT8, "1+", default=LITERAL),
            structs(
                "acls",
                F("principal", STRING),
                F("host", STRING),
                F("operation", INT8),
                F("permission_type", INT8),
            ),
        ),
    ),
)

CREATE_ACLS = api(30, "CreateAcls", "1-3", flexible=2)(
    struct(
        structs(
            "creations",
            F("resource_type", INT8),
            F("resource_name", STRING),
            F("resource_pattern_type", INT8, "1+", default=LITERAL),
            F("principal", STRING),
            F("host", STRING),
            F("operation", INT8),
            F("permission_type", INT8),
        ),
    ),
    struct(
        F("throttle_time_ms", INT32),
        structs(
            "results",
            *ERROR,
        ),
    ),
)

DELETE_ACLS = api(31, "DeleteAcls", "1-3", flexible=2)(
    struct(structs("filters", *_FILTER)),
    struct(
        F("throttle_time_ms", INT32),
        structs(
            "filter_results",
            *ERROR,
            structs(
                "matching_acls",
                *ERROR,
                F("resource_type", INT8),
                F("resource_name", STRING),
                F("pattern_type", INT8, "1+", default=LITERAL),
                F("principal", STRING),
                F("host", STRING),
                F("operation", INT8),
                F("permission_type", INT8),
            ),
        ),
    ),
)

DESCRIBE_USER_SCRAM_CREDENTIALS = api(50, "DescribeUserScramCredentials", "0", flexible=0)(
    struct(structs("users", F("name", STRING), nullable="0+")),
    struct(
        F("throttle_time_ms", INT32),
        *ERROR,
        structs(
            "results",
            F("user", STRING),
            *ERROR,
            structs("credential_infos", F("mechanism", INT8), F("iterations", INT32)),
        ),
    ),
)

ALTER_USER_SCRAM_CREDENTIALS = api(51, "AlterUserScramCredentials", "0", flexible=0)(
    struct(
        structs("deletions", F("name", STRING), F("mechanism", INT8)),
        structs(
            "upsertions",
            F("name", STRING),
            F("mechanism", INT8),
            F("iterations", INT32),
            F("salt", BYTES),
            F("salted_password", BYTES),
        ),
    ),
    struct(
        F("throttle_time_ms", INT32),
        structs(
            "results",
            F("user", STRING),
            *ERROR,
        ),
    ),
)
