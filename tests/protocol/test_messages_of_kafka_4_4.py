"""Messages of Kafka 4.4 that kafka-python does not know, against what the classes of kafka-clients 4.4.0 write."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from spark_klog.errors import ErrorCode
from spark_klog.protocol.apis import API_VERSIONS, DELETE_GROUPS, TXN_OFFSET_COMMIT
from spark_klog.protocol.codec import (
    decode_request,
    decode_request_header,
    decode_response,
    encode_request,
    encode_response,
)
from spark_klog.protocol.schema import Api
from spark_klog.wire.primitives import Reader

_ID = UUID("13c47dbb-fc57-4086-a1e1-2c7423c57f17")
_SOFTWARE = {"client_software_name": "klog", "client_software_version": "1"}
_COMMIT = {
    "transactional_id": "x",
    "group_id": "g",
    "producer_id": 5,
    "producer_epoch": 2,
    "generation_id": 4,
    "member_id": "m",
    "topics": [
        {
            "topic_id": _ID,
            "partitions": [
                {
                    "partition_index": 1,
                    "committed_offset": 42,
                    "committed_leader_epoch": 3,
                    "committed_metadata": "s",
                }
            ],
        }
    ],
}
REQUESTS: list[tuple[Api, int, dict[str, Any], str]] = [
    (API_VERSIONS, 5, _SOFTWARE | {"cluster_id": "Aq1", "node_id": 7}, "056b6c6f670231044171310000000700"),
    (API_VERSIONS, 5, _SOFTWARE, "056b6c6f67023100ffffffff00"),
    (
        *(TXN_OFFSET_COMMIT, 6, _COMMIT),
        "027802670000000000000005000200000004026d0002" + _ID.hex + "0200000001000000000000002a000000030273000000",
    ),
    (DELETE_GROUPS, 3, {"groups_names": ["g"]}, "02026700"),
]
RESPONSES: list[tuple[Api, int, dict[str, Any], str]] = [
    (API_VERSIONS, 5, {"error_code": int(ErrorCode.REBOOTSTRAP_REQUIRED)}, "0081010000000000"),
    (
        *(TXN_OFFSET_COMMIT, 6),
        {
            "throttle_time_ms": 9,
            "topics": [{"topic_id": _ID, "partitions": [{"partition_index": 1, "error_code": 100}]}],
        },
        "0000000902" + _ID.hex + "02000000010064000000",
    ),
    (
        *(DELETE_GROUPS, 3),
        {
            "results": [
                {"group_id": "g", "error_code": 134, "error_message": "why"},
                {"group_id": "h", "error_code": 0, "error_message": None},
            ]
        },
        "000000000302670086047768790002680000000000",
    ),
]


@pytest.mark.parametrize(("api", "version", "message", "body"), REQUESTS)
def test_requests(api: Api, version: int, message: dict[str, Any], body: str) -> None:
    data = encode_request(api, version, 7, None, message).to_bytes()
    assert data[:11].hex() == f"{api.key:04x}{version:04x}00000007ffff00"
    assert data[11:].hex() == body
    reader = Reader(data)
    decode_request_header(reader)
    assert _part(decode_request(api, version, reader)[1], message) == message


@pytest.mark.parametrize(("api", "version", "message", "body"), RESPONSES)
def test_responses(api: Api, version: int, message: dict[str, Any], body: str) -> None:
    head = "00000007" if api is API_VERSIONS else "0000000700"
    data = encode_response(api, version, 7, message).to_bytes()
    assert data.hex() == head + body
    assert _part(decode_response(api, version, data)[1], message) == message


def test_an_unknown_version_of_api_versions_is_answered_in_version_0() -> None:
    data = bytes.fromhex("00000007 0023 00000001 0012 0000 0004")
    answer = decode_response(API_VERSIONS, 5, data)[1]
    assert answer["error_code"] == ErrorCode.UNSUPPORTED_VERSION
    assert answer["api_keys"] == [{"api_key": 18, "min_version": 0, "max_version": 4}]
    assert decode_response(API_VERSIONS, 5, bytes.fromhex("00000007 0023 00000000"))[1]["api_keys"] == []  # before 2.4


def _part(value: Any, wanted: Any) -> Any:
    """What `wanted` has of a decoded message, which has all fields."""
    if isinstance(wanted, dict):
        return {name: _part(value[name], wanted[name]) for name in wanted}
    if isinstance(wanted, list):
        return [_part(one, part) for one, part in zip(value, wanted, strict=True)]
    return value
