"""The topics and partitions that requests name, and error responses built from the tables."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from spark_klog.errors import ErrorCode
from spark_klog.protocol import apis
from spark_klog.protocol.codec import Message, decode_response, encode_response
from spark_klog.protocol.schema import STRING, Api, Array, Struct
from spark_klog.protocol.targets import EVERYTHING, Target, error_response, merge, narrow, set_error, targets

CASES = [(api, version) for api in apis.BY_KEY.values() for version in range(api.versions.first, api.versions.last + 1)]
NOT_LEADER, NOT_COORDINATOR = int(ErrorCode.NOT_LEADER_OR_FOLLOWER), int(ErrorCode.NOT_COORDINATOR)
NAMED = ("name", "topic", "key", "group_id", "resource_name", "transactional_id", "member_id")
TOPIC_ID = UUID(int=7)

PRODUCE = {
    "acks": 1,
    "topic_data": [
        {"name": "a", "partition_data": [{"index": 0, "records": b"0"}, {"index": 1, "records": b"1"}]},
        {"name": "b", "partition_data": [{"index": 0, "records": b"2"}]},
    ],
}
FETCH = {
    "topics": [
        {"topic": "a", "partitions": [{"partition": 0}, {"partition": 1}]},
        {"topic": "b", "partitions": [{"partition": 0}]},
    ],
    "forgotten_topics_data": [{"topic": "c", "partitions": [0]}],
}
FETCH_BY_ID = {
    "topics": [
        {"topic_id": TOPIC_ID, "partitions": [{"partition": 0}, {"partition": 3}]},
        {"topic_id": UUID(int=8), "partitions": [{"partition": 0}]},
    ]
}
A_AND_B = [("a", 0), ("a", 1), ("b", 0)]
COMMITTED = {"groups": [{"group_id": "g", "topics": [{"name": "a", "partition_indexes": [0, 1]}]}]}
ALL_COMMITTED = {"groups": [{"group_id": "g", "topics": None}]}
CREATED = {"topics": [{"name": "a", "num_partitions": 2}, {"name": "b", "num_partitions": 1}]}


def everything(topic: str | None, partition: int | None) -> bool:
    return True


def only(topic: str, *partitions: int | None) -> Any:
    return lambda *place: place[0] == topic and (not partitions or place[1] in partitions)


def answer_of(api: Api, version: int, request: Message, code: int, chosen: Any = everything) -> Message:
    """An error response as a client decodes it."""
    message = set_error(api, version, error_response(api, version, request), code, {}, chosen)
    return decode_response(api, version, encode_response(api, version, 1, message).to_bytes())[1]


def codes(value: object, path: str = "") -> dict[str, int]:
    """Map the path of each error code in a response to the code, without zeros."""
    if isinstance(value, list):
        return {key: code for at, entry in enumerate(value) for key, code in codes(entry, f"{path}[{at}]").items()}
    if not isinstance(value, dict):
        return {}
    code = value.get("error_code") or value.get("partition_error_code")
    found = {path: code} if code else {}
    for name, entry in value.items():
        found |= codes(entry, f"{path}.{name}" if path else name)
    return found


def sample(struct: Struct, version: int) -> Message:
    """A request with one entry in every array."""
    message: Message = {}
    for field in struct.fields:
        if version not in field.versions or field.tag is not None:
            continue
        if isinstance(field.type, Array):
            element = field.type.element
            if isinstance(element, Struct):
                message[field.name] = [sample(element, version)]
            else:
                message[field.name] = ["x" if element is STRING else 5]
        elif field.type is STRING and field.name in NAMED:
            message[field.name] = "x"
        elif field.name in ("index", "partition", "partition_index"):
            message[field.name] = 5
    return message


@pytest.mark.parametrize(
    ("api", "version", "request_", "expected"),
    [
        (apis.PRODUCE, 0, PRODUCE, A_AND_B),
        (apis.FETCH, 12, FETCH, A_AND_B),
        (apis.FETCH, 13, FETCH_BY_ID, [("by id", 0), ("by id", 3)]),
        (apis.METADATA, 1, {"topics": None}, [EVERYTHING]),
        (apis.METADATA, 4, {"topics": [{"name": "a"}]}, [("a", None)]),
        (apis.METADATA, 12, {"topics": [{"name": None, "topic_id": TOPIC_ID}]}, [("by id", None)]),
        (apis.OFFSET_FETCH, 8, COMMITTED, [("a", 0), ("a", 1)]),
        (apis.OFFSET_FETCH, 8, ALL_COMMITTED, [EVERYTHING]),
        (apis.CREATE_TOPICS, 5, CREATED, [("a", None), ("b", None)]),
        (apis.DELETE_TOPICS, 3, {"topic_names": ["a", "b"]}, [("a", None), ("b", None)]),
        (apis.DELETE_TOPICS, 6, {"topics": [{"name": "a"}, {"topic_id": TOPIC_ID}]}, [("a", None), ("by id", None)]),
        (apis.FIND_COORDINATOR, 4, {"coordinator_keys": ["a"], "key_type": 0}, []),
        (apis.API_VERSIONS, 3, {}, []),
    ],
)
def test_what_a_request_asks_for(api: Api, version: int, request_: Message, expected: list[Target]) -> None:
    assert targets(api, version, request_, {TOPIC_ID: "by id"}) == expected


@pytest.mark.parametrize(
    ("api", "version", "request_", "code", "expected"),
    [
        (apis.PRODUCE, 0, PRODUCE, NOT_LEADER, ["responses[0].partition_responses[0]"]),
        (apis.FETCH, 12, FETCH, NOT_LEADER, ["responses[0].partitions[0]", "responses[1].partitions[0]"]),
        (apis.FETCH, 12, FETCH, int(ErrorCode.FETCH_SESSION_ID_NOT_FOUND), [""]),
        (apis.FETCH, 12, {"topics": []}, NOT_LEADER, [""]),
        (apis.CREATE_TOPICS, 7, CREATED, NOT_LEADER, ["topics[0]", "topics[1]"]),
        (apis.DELETE_TOPICS, 3, {"topic_names": ["a", "b"]}, NOT_LEADER, ["responses[0]", "responses[1]"]),
        (apis.FIND_COORDINATOR, 2, {"key": "g"}, NOT_COORDINATOR, [""]),
        (apis.FIND_COORDINATOR, 4, {"coordinator_keys": ["g"]}, NOT_COORDINATOR, ["coordinators[0]"]),
        (apis.OFFSET_FETCH, 8, COMMITTED, NOT_COORDINATOR, ["groups[0]"]),
        (apis.OFFSET_FETCH, 8, COMMITTED, NOT_LEADER, ["groups[0].topics[0].partitions[1]"]),
        (apis.OFFSET_FETCH, 8, ALL_COMMITTED, NOT_LEADER, ["groups[0]"]),
        (apis.OFFSET_FETCH, 2, {"group_id": "g", "topics": None}, NOT_COORDINATOR, [""]),
        (apis.API_VERSIONS, 3, {}, NOT_LEADER, [""]),
    ],
)
def test_where_a_code_stands(api: Api, version: int, request_: Message, code: int, expected: list[str]) -> None:
    found = codes(answer_of(api, version, request_, code))
    assert set(found.values()) == {code}
    assert set(expected) <= set(found)
    assert ("" in found) == (expected == [""])  # the code is in the entries or at the top level, never both


@pytest.mark.parametrize("code", [NOT_LEADER, NOT_COORDINATOR])
@pytest.mark.parametrize(("api", "version"), CASES, ids=lambda value: getattr(value, "name", value))
def test_every_api_has_error_answers(api: Api, version: int, code: int) -> None:
    found = codes(answer_of(api, version, sample(api.request, version), code))
    assert list(found.values()) == [code]


def test_an_entry_with_a_code_holds_its_names_and_nothing_else() -> None:
    true = {"responses": [{"name": "a", "partition_responses": [{"index": 0, "base_offset": 5}, {"index": 1}]}]}
    answer = set_error(apis.PRODUCE, 8, true, NOT_LEADER, {}, only("a", 0))
    first, second = answer["responses"][0]["partition_responses"]
    assert first == {"index": 0, "error_code": NOT_LEADER, "error_message": "injected fault"}
    assert second == {"index": 1}


def test_a_topic_that_is_known_by_its_id() -> None:
    names = {TOPIC_ID: "by id"}
    answer = error_response(apis.FETCH, 13, FETCH_BY_ID)
    found = set_error(apis.FETCH, 13, answer, NOT_LEADER, names, only("by id", 3))
    decoded = decode_response(apis.FETCH, 13, encode_response(apis.FETCH, 13, 1, found).to_bytes())[1]
    assert [topic["topic_id"] for topic in decoded["responses"]] == [TOPIC_ID, UUID(int=8)]
    assert codes(decoded) == {"responses[0].partitions[1]": NOT_LEADER}
    rest = narrow(apis.FETCH, 13, FETCH_BY_ID, names, lambda *place: place != ("by id", 3))
    assert targets(apis.FETCH, 13, rest, names) == [("by id", 0)]
    assert rest["topics"][1] == FETCH_BY_ID["topics"][1]


def test_a_part_of_a_request_still_asks_for_all_offsets_of_a_group() -> None:
    named = {"group_id": "h", "topics": [{"name": "a", "partition_indexes": [0]}]}
    request = {"groups": [*ALL_COMMITTED["groups"], named]}
    assert targets(apis.OFFSET_FETCH, 8, request, {}) == [EVERYTHING, ("a", 0)]
    rest = narrow(apis.OFFSET_FETCH, 8, request, {}, lambda *place: place != ("a", 0))
    assert rest == ALL_COMMITTED


def test_a_request_in_two_parts_and_its_answer_of_two() -> None:
    chosen = only("a", 1)
    failed = narrow(apis.PRODUCE, 8, PRODUCE, {}, chosen)
    rest = narrow(apis.PRODUCE, 8, PRODUCE, {}, lambda *place: not chosen(*place))
    assert targets(apis.PRODUCE, 8, failed, {}) == [("a", 1)]
    assert targets(apis.PRODUCE, 8, rest, {}) == [("a", 0), ("b", 0)]
    true = error_response(apis.PRODUCE, 8, rest)
    answer = merge(apis.PRODUCE, 8, true, error_response(apis.PRODUCE, 8, failed))
    found = set_error(apis.PRODUCE, 8, answer, NOT_LEADER, {}, chosen)["responses"]
    assert [(topic["name"], len(topic["partition_responses"])) for topic in found] == [("a", 2), ("b", 1)]
    assert codes(found) == {"[0].partition_responses[1]": NOT_LEADER}
