"""SCRAM credentials of users (KIP-554): DescribeUserScramCredentials (key 50) and AlterUserScramCredentials (51)."""

from __future__ import annotations

from spark_klog.protocol.schema import BYTES, INT8, INT16, INT32, STRING, F, api, array, struct

DESCRIBE_USER_SCRAM_CREDENTIALS = api(
    50,
    "DescribeUserScramCredentials",
    "0",
    0,
    struct(F("users", array(F("name", STRING)), nullable="0+")),
    struct(
        F("throttle_time_ms", INT32),
        F("error_code", INT16),
        F("error_message", STRING, nullable="0+", default=None),
        F(
            "results",
            array(
                F("user", STRING),
                F("error_code", INT16),
                F("error_message", STRING, nullable="0+", default=None),
                F("credential_infos", array(F("mechanism", INT8), F("iterations", INT32))),
            ),
        ),
    ),
)

ALTER_USER_SCRAM_CREDENTIALS = api(
    51,
    "AlterUserScramCredentials",
    "0",
    0,
    struct(
        F("deletions", array(F("name", STRING), F("mechanism", INT8))),
        F(
            "upsertions",
            array(
                F("name", STRING),
                F("mechanism", INT8),
                F("iterations", INT32),
                F("salt", BYTES),
                F("salted_password", BYTES),
            ),
        ),
    ),
    struct(
        F("throttle_time_ms", INT32),
        F(
            "results",
            array(
                F("user", STRING),
                F("error_code", INT16),
                F("error_message", STRING, nullable="0+", default=None),
            ),
        ),
    ),
)
