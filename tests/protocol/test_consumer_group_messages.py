"""Messages of KIP-848's APIs against frames that librdkafka 2.16.1 has sent: kafka-python does not know these APIs."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from spark_klog.protocol.apis import CONSUMER_GROUP_DESCRIBE, CONSUMER_GROUP_HEARTBEAT
from spark_klog.protocol.codec import decode_request, decode_request_header, encode_request
from spark_klog.protocol.schema import Api
from spark_klog.wire.primitives import Reader

_MEMBER = "dq+iuWG8SZqXvmc1zyP/lQ"
_UNCHANGED = {
    "group_id": "g",
    "member_id": _MEMBER,
    "instance_id": None,
    "rack_id": None,
    "rebalance_timeout_ms": -1,
    "subscribed_topic_names": None,
    "subscribed_topic_regex": None,
    "server_assignor": None,
    "topic_partitions": None,
}
_JOINS = _UNCHANGED | {
    "member_epoch": 0,
    "instance_id": "i",
    "rack_id": "r",
    "rebalance_timeout_ms": 12345,
    "subscribed_topic_names": ["clicks"],
    "subscribed_topic_regex": "",
    "server_assignor": "range",
    "topic_partitions": [],
}
_OWNS = [{"topic_id": UUID("13c47dbb-fc57-4086-a1e1-2c7423c57f17"), "partitions": [0, 1, 2]}]
_START = "440001{:08x}0001630002671764712b6975574738535a7158766d63317a79502f6c51"
FRAMES: list[tuple[str, Api, int, int, dict[str, Any]]] = [
    (
        _START.format(3) + "00000000026902720000303902" + "07636c69636b7301" + "0672616e6765" + "0100",
        *(CONSUMER_GROUP_HEARTBEAT, 1, 3, _JOINS),
    ),
    (
        _START.format(6) + "000000010000ffffffff000000" + "0213c47dbbfc574086a1e12c7423c57f17"
        "040000000000000001000000020000",
        *(CONSUMER_GROUP_HEARTBEAT, 1, 6, _UNCHANGED | {"member_epoch": 1, "topic_partitions": _OWNS}),
    ),
    (
        _START.format(9) + "000000010000ffffffff0108285e636c2e2a29000000",
        *(CONSUMER_GROUP_HEARTBEAT, 1, 9),
        _UNCHANGED | {"member_epoch": 1, "subscribed_topic_names": [], "subscribed_topic_regex": "(^cl.*)"},
    ),
    (
        _START.format(13) + "fffffffe026900ffffffff0000000000",
        *(CONSUMER_GROUP_HEARTBEAT, 1, 13, _UNCHANGED | {"member_epoch": -2, "instance_id": "i"}),
    ),
    (
        "45000000000005000772646b61666b61000202670000",
        *(CONSUMER_GROUP_DESCRIBE, 0, 5, {"group_ids": ["g"], "include_authorized_operations": False}),
    ),
]


@pytest.mark.parametrize(
    ("frame", "api", "version", "number", "message"), FRAMES, ids=["joins", "owns", "regex", "leaves", "describes"]
)
def test_frames_of_librdkafka(frame: str, api: Api, version: int, number: int, message: dict[str, Any]) -> None:
    data = bytes.fromhex("00" + frame)
    reader = Reader(data)
    assert decode_request_header(reader) == (api.key, version, number)
    client_id, decoded = decode_request(api, version, reader)
    assert decoded == message
    assert client_id is not None
    assert encode_request(api, version, number, client_id, message).to_bytes() == data
