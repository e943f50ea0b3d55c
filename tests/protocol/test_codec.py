"""Rules of the codec: golden bytes, rejected input, and arbitrary bytes."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from uuid import UUID

import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.errors import DecodeError, EncodeError
from spark_klog.protocol import apis
from spark_klog.protocol.apis import API_VERSIONS, FETCH, METADATA, PRODUCE
from spark_klog.protocol.codec import (
    Message,
    decode_request,
    decode_request_header,
    decode_response,
    encode_request,
    encode_response,
)
from spark_klog.protocol.schema import (
    BOOLEAN,
    BYTES,
    FLOAT64,
    INT16,
    INT32,
    RECORDS,
    STRING,
    UUID as UUID_TYPE,
    Api,
    F,
    Versions,
    api,
    array,
    struct,
)
from spark_klog.wire.primitives import TAG_BYTES, Reader

CASES = [
    (entry, version)
    for entry in apis.BY_KEY.values()
    for version in range(entry.versions.first, entry.versions.last + 1)
]
_ZERO = UUID(int=0)

# (api, version, message, bytes of the request); sizes and values are counted by hand from the protocol guide
REQUESTS: list[tuple[Api, int, Message, str]] = [
    (API_VERSIONS, 0, {}, "0012 0000 00000007 0002 6d65"),
    (
        API_VERSIONS,
        3,
        {"client_software_name": "klog", "client_software_version": "1"},
        "0012 0003 00000007 0002 6d65 00  05 6b6c6f67  02 31  00",
    ),
    (METADATA, 0, {"topics": [{"name": "t"}]}, "0003 0000 00000007 0002 6d65  00000001 0001 74"),
    (METADATA, 1, {"topics": None}, "0003 0001 00000007 0002 6d65  ffffffff"),
    (
        METADATA,
        12,
        {"topics": [{"name": None, "topic_id": UUID(int=258)}], "allow_auto_topic_creation": False},
        "0003 000c 00000007 0002 6d65 00  02 00000000000000000000000000000102 00 00  00 00 00",
    ),
    (
        PRODUCE,
        3,
        {
            "acks": -1,
            "timeout_ms": 1000,
            "topic_data": [{"name": "t", "partition_data": [{"records": b"XY"}]}],
        },
        "0000 0003 00000007 0002 6d65  ffff ffff 000003e8  00000001 0001 74 00000001 00000000 00000002 5859",
    ),
]

RESPONSES: list[tuple[Api, int, Message, str]] = [
    # tags are never in the header (KIP-511), but in the body: tag 1, 8 bytes; tag 3, 1 byte
    (
        API_VERSIONS,
        3,
        {
            "api_keys": [{"api_key": 18, "min_version": 0, "max_version": 3}],
            "finalized_features_epoch": 5,
            "zk_migration_ready": True,
        },
        "00000007  0000  02 0012 0000 0003 00  00000000  02  01 08 0000000000000005  03 01 01",
    ),
    (
        METADATA,
        1,
        {"brokers": [{"node_id": 1, "host": "h", "port": 9092}], "controller_id": 1, "topics": []},
        "00000007  00000001 00000001 0001 68 00002384 ffff  00000001  00000000",
    ),
    (
        FETCH,
        12,
        {
            "responses": [
                {
                    "topic": "t",
                    "partitions": [
                        {
                            "high_watermark": 9,
                            "records": b"Z",
                            "current_leader": {"leader_id": 2, "leader_epoch": 3},
                        }
                    ],
                }
            ]
        },
        "00000007 00  00000000 0000 00000000  02 02 74"
        "  02 00000000 0000 0000000000000009 ffffffffffffffff ffffffffffffffff 00 ffffffff 02 5a"
        "  01 01 09 00000002 00000003 00  00  00",
    ),
]


def _name(case: object) -> str:
    return case.name if isinstance(case, Api) else str(case)[:16]


def _request(entry: Api, data: bytes) -> Message:
    reader = Reader(data)
    _, version, _ = decode_request_header(reader)
    return decode_request(entry, version, reader)[1]


@pytest.mark.parametrize(("entry", "version", "message", "expected"), REQUESTS, ids=_name)
def test_request_bytes(entry: Api, version: int, message: Message, expected: str) -> None:
    data = bytes.fromhex(expected)
    assert encode_request(entry, version, 7, "me", message).to_bytes() == data
    reader = Reader(data)
    assert decode_request_header(reader) == (entry.key, version, 7)
    client_id, decoded = decode_request(entry, version, reader)
    assert client_id == "me"
    assert {name: decoded[name] for name in message if name not in ("topics", "topic_data")} == {
        name: value for name, value in message.items() if name not in ("topics", "topic_data")
    }
    assert encode_request(entry, version, 7, "me", decoded).to_bytes() == data


@pytest.mark.parametrize(("entry", "version", "message", "expected"), RESPONSES, ids=_name)
def test_response_bytes(entry: Api, version: int, message: Message, expected: str) -> None:
    data = bytes.fromhex(expected)
    assert encode_response(entry, version, 7, message).to_bytes() == data
    correlation_id, decoded = decode_response(entry, version, data)
    assert correlation_id == 7
    assert encode_response(entry, version, 7, decoded).to_bytes() == data


@pytest.mark.parametrize(("entry", "version", "message", "data"), REQUESTS, ids=_name)
def test_every_truncated_request_is_refused(entry: Api, version: int, message: Message, data: str) -> None:
    whole = bytes.fromhex(data)
    for size in range(len(whole)):
        with pytest.raises(DecodeError):
            _request(entry, whole[:size])


@pytest.mark.parametrize(("entry", "version", "message", "data"), RESPONSES, ids=_name)
def test_every_truncated_response_is_refused(entry: Api, version: int, message: Message, data: str) -> None:
    whole = bytes.fromhex(data)
    for size in range(len(whole)):
        with pytest.raises(DecodeError):
            decode_response(entry, version, whole[:size])


@pytest.mark.parametrize(("entry", "version", "message", "data"), REQUESTS, ids=_name)
def test_bytes_left_over_after_a_request_are_ignored(entry: Api, version: int, message: Message, data: str) -> None:
    whole = bytes.fromhex(data)
    assert _request(entry, whole + bytes(3)) == _request(entry, whole)


def test_bytes_left_over_in_a_response_and_in_a_tagged_field_are_refused() -> None:
    whole = bytes.fromhex(RESPONSES[0][3])
    with pytest.raises(DecodeError, match="left over"):
        decode_response(API_VERSIONS, 3, whole + b"\x00")
    longer = bytes.fromhex("00000007 0000 01 00000000 01  01 09 0000000000000005 aa")
    with pytest.raises(DecodeError, match="left over"):
        decode_response(API_VERSIONS, 3, longer)


def test_memory_of_a_tagged_field_counts_for_what_follows() -> None:
    def spent(tag: int | None) -> float:
        made = api(99, "Numbers", "0", flexible=0)(struct(F("numbers", array(INT32), tag=tag)), struct())
        reader = Reader(encode_request(made, 0, 1, None, {"numbers": list(range(10))}).to_bytes(), 10_000)
        decode_request_header(reader)
        assert decode_request(made, 0, reader)[1] == {"numbers": list(range(10))}
        return 10_000 - reader.allowance

    assert spent(0) == spent(None) + TAG_BYTES


def test_unknown_tagged_fields_are_skipped() -> None:
    # in the request's header: tag 5, 2 bytes; in its body: tag 200, 1 byte
    data = bytes.fromhex("0012 0003 00000007 ffff 01 05 02 abcd  05 6b6c6f67  02 31  01 c801 01 ee")
    reader = Reader(data)
    decode_request_header(reader)
    assert decode_request(API_VERSIONS, 3, reader) == (
        None,
        {"client_software_name": "klog", "client_software_version": "1", "cluster_id": None, "node_id": -1},
    )


def test_more_elements_or_tagged_fields_than_kafka_reads_are_refused() -> None:
    """MessageUtil of Kafka 4.4: 1,000,000 elements of an array, 10,000 tagged fields of a structure."""
    made = api(99, "Flags", "0-1", flexible=1)(struct(F("flags", array(BOOLEAN))), struct())
    most = {"flags": [True] * 1_000_000}
    data = encode_request(made, 0, 7, None, most).to_bytes()
    assert _request(made, data) == most
    with pytest.raises(EncodeError, match="Flags v0 request: flags: 1000001 elements"):
        encode_request(made, 0, 7, None, {"flags": [True] * 1_000_001})
    longer = data[:-1_000_004] + (1_000_001).to_bytes(4, "big") + bytes(1_000_001)
    with pytest.raises(DecodeError, match=r"array of 1000001 elements .* at most 1000000"):
        _request(made, longer)
    start = bytes.fromhex("0063 0001 00000007 ffff 00 01")  # no tagged fields in the header, no flags
    fields = b"".join(bytes((0x80 | number & 0x7F, number >> 7, 0)) for number in range(128, 10_128))
    assert _request(made, start + bytes.fromhex("904e") + fields) == {"flags": []}
    with pytest.raises(DecodeError, match="10001 tagged fields"):
        _request(made, start + bytes.fromhex("914e") + fields + bytes(30))
    with pytest.raises(DecodeError, match=r"5 tagged fields .* 4 bytes are left"):
        _request(made, start + bytes.fromhex("05 01000200"))


def _request(made: Api, data: bytes) -> Message:
    reader = Reader(data)
    _, version, _ = decode_request_header(reader)
    return decode_request(made, version, reader)[1]


def test_reading_gives_fields_of_other_versions_by_their_defaults() -> None:
    message = _request(METADATA, bytes.fromhex(REQUESTS[2][3]))
    assert message == {
        "topics": [{"topic_id": _ZERO, "name": "t"}],
        "allow_auto_topic_creation": True,
        "include_cluster_authorized_operations": False,
        "include_topic_authorized_operations": False,
    }


# a table with every type; its bytes are counted by hand
SAMPLE = api(999, "Sample", "0-3", flexible=2)(
    struct(
        F("flag", BOOLEAN),
        F("number", FLOAT64, "1+", default=0.5),
        F("id", UUID_TYPE, "1-2"),
        F("name", STRING, nullable="1+"),
        F("raw", BYTES),
        F("records", RECORDS),
        F("items", array(INT16), nullable="1+"),
        F("pair", struct(F("left", INT32), F("right", INT32)), "1+"),
    ),
    struct(F("error_code", INT16)),
)
_HEAD = "03e7 {version:04x} 00000001 ffff"


@pytest.mark.parametrize(
    ("version", "message", "body"),
    [
        (
            0,
            {"name": "n", "raw": b"r", "records": b"", "items": [1]},
            "00 0001 6e 00000001 72 00000000 00000001 0001",
        ),
        (
            1,
            {"flag": True, "name": None, "raw": b"", "items": None, "pair": {"left": 1, "right": 2}},
            "01 3fe0000000000000 00000000000000000000000000000000 ffff 00000000 ffffffff ffffffff 00000001 00000002",
        ),
        (
            3,
            {"flag": True, "name": "n", "raw": b"rr", "items": [2, 3], "pair": {"right": -1}},
            "00 01 3fe0000000000000 02 6e 03 7272 00 03 0002 0003 00000000 ffffffff 00 00",
        ),
    ],
)
def test_table_of_every_type(version: int, message: Message, body: str) -> None:
    data = bytes.fromhex(_HEAD.format(version=version) + body)
    assert encode_request(SAMPLE, version, 1, None, message).to_bytes() == data
    decoded = _request(SAMPLE, data)
    assert {name: decoded[name] for name in message if name != "pair"} == {
        name: value for name, value in message.items() if name != "pair"
    }
    assert encode_request(SAMPLE, version, 1, None, decoded).to_bytes() == data


@pytest.mark.parametrize(
    ("version", "body"),
    [
        (0, "00 ffff 00000000 ffffffff 00000000"),  # name
        (0, "00 0000 ffffffff ffffffff 00000000"),  # raw
        (0, "00 0000 00000000 ffffffff ffffffff"),  # items
    ],
)
def test_null_where_it_is_not_allowed_is_refused(version: int, body: str) -> None:
    with pytest.raises(DecodeError, match="is null"):
        _request(SAMPLE, bytes.fromhex(_HEAD.format(version=version) + body))


@pytest.mark.parametrize("name", ["name", "raw", "items"])
def test_null_is_not_written_where_it_is_not_allowed(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        encode_request(SAMPLE, 0, 1, None, {name: None})


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="throttle"):
        encode_response(API_VERSIONS, 0, 1, {"throttle": 0})
    with pytest.raises(ValueError, match="hosts"):
        encode_response(METADATA, 1, 1, {"brokers": [{"hosts": "h"}]})
    # a field of another version is known, and left out
    assert encode_response(API_VERSIONS, 0, 1, {"throttle_time_ms": 9}).to_bytes() == bytes(10)[:3] + b"\x01" + bytes(6)


@pytest.mark.parametrize(
    ("text", "inside", "outside"), [("3+", (3, 99), (2,)), ("0-5", (0, 5), (6,)), ("2", (2,), (1, 3))]
)
def test_versions(text: str, inside: tuple[int, ...], outside: tuple[int, ...]) -> None:
    versions = Versions.parse(text)
    assert all(version in versions for version in inside)
    assert not any(version in versions for version in outside)


class _Range:
    def __len__(self) -> int:
        return 3


def test_records_stay_as_they_are() -> None:
    part = _Range()
    message = {"responses": [{"topic": "t", "partitions": [{"records": part}]}]}
    writer = encode_response(FETCH, 4, 1, message)
    assert any(entry is part for entry in writer.parts)
    _, decoded = decode_response(FETCH, 4, b"".join(b"abc" if e is part else bytes(e) for e in writer.parts))  # type: ignore[call-overload]
    records = decoded["responses"][0]["partitions"][0]["records"]
    assert isinstance(records, memoryview)
    assert bytes(records) == b"abc"


_HUGE = [bytes.fromhex(text) for text in ("7fffffff", "ffffffff0f", "7fffffff7fffffff", "ffffffff07" * 3, "ffffff7f")]


@pytest.mark.parametrize(("entry", "version"), CASES, ids=_name)
def test_huge_counts_in_short_frames_allocate_nothing(entry: Api, version: int) -> None:
    for decode in (
        lambda: decode_response(entry, version, bytes(9)),
        lambda: decode_request(entry, version, Reader(bytes(9))),
    ):
        with suppress(DecodeError):
            decode()  # the first time compiles the functions
    tracemalloc.start()
    try:
        for zeros in range(24):
            for huge in _HUGE:
                for data in (bytes(zeros) + huge, bytes(zeros) + huge + bytes(20)):
                    for decode in (
                        lambda data=data: decode_response(entry, version, data),
                        lambda data=data: decode_request(entry, version, Reader(data)),
                    ):
                        try:
                            decode()
                        except DecodeError:
                            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(CASES), st.binary(max_size=80))
def test_any_bytes_give_a_message_or_decode_error(case: tuple[Api, int], data: bytes) -> None:
    entry, version = case
    try:
        correlation_id, message = decode_response(entry, version, data)
    except DecodeError:
        pass
    else:
        assert len(encode_response(entry, version, correlation_id, message)) <= len(data)
    try:
        client_id, message = decode_request(entry, version, Reader(data))
    except DecodeError:
        pass
    else:
        encode_request(entry, version, 1, client_id, message)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*REQUESTS, *RESPONSES]),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_changed_messages_give_a_message_or_decode_error(
    sample: tuple[Api, int, Message, str], changes: list[tuple[int, int]]
) -> None:
    entry, version, _, text = sample
    data = bytearray.fromhex(text)
    for position, byte in changes:
        data[position % len(data)] = byte
    try:
        if sample in REQUESTS:
            reader = Reader(data)
            decode_request_header(reader)
            decode_request(entry, version, reader)
        else:
            decode_response(entry, version, data)
    except DecodeError:
        pass


_LONGEST = 32_767
_STRINGS = [("x" * _LONGEST, True), ("é" * (_LONGEST // 2), True), ("x" * (_LONGEST + 1), False), ("é" * 20_000, False)]


@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize(("text", "is_legal"), _STRINGS)
def test_a_string_has_one_limit_in_both_encodings(version: int, text: str, is_legal: bool) -> None:
    """Kafka's limit is Short.MAX_VALUE, whatever the length of the compact encoding could hold."""
    message: Message = {"name": text, "raw": b"", "records": b"", "items": [], "pair": {"left": 0, "right": 0}}
    if is_legal:
        assert _request(SAMPLE, encode_request(SAMPLE, version, 1, None, message).to_bytes())["name"] == text
        return
    with pytest.raises(EncodeError, match=f"Sample v{version} request: name: string of .* bytes"):
        encode_request(SAMPLE, version, 1, None, message)
    data = text.encode()
    size = len(data) + 1
    compact = bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14])
    whole = bytes.fromhex(_HEAD.format(version=2)) + bytes(1 + 1 + 8 + 16) + compact + data + bytes(20)
    with pytest.raises(DecodeError, match=r"Sample v2 request: string of .* bytes"):
        _request(SAMPLE, whole)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"items": [1 << 15]}, "items: "),
        ({"pair": {"left": 1 << 31, "right": 0}}, "pair: left: "),
        ({"name": "\ud800"}, "name: .*not Unicode"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_the_field(message: Message, reason: str) -> None:
    whole = {"name": "", "raw": b"", "records": b"", "pair": {"left": 0, "right": 0}} | message
    with pytest.raises(EncodeError, match=f"Sample v3 request: {reason}"):
        encode_request(SAMPLE, 3, 1, None, whole)
    with pytest.raises(EncodeError, match="Sample v3 response: error_code: "):
        encode_response(SAMPLE, 3, 1, {"error_code": 1 << 15})


@pytest.mark.parametrize("version", [1, 4])
def test_an_error_message_is_cut(version: int) -> None:
    """It may name what a client sent, which may fill a string by itself."""
    entry = {"resource_type": 2, "resource_name": "t", "error_code": 3, "error_message": "no topic " + "x" * 40_000}
    encoded = encode_response(apis.DESCRIBE_CONFIGS, version, 7, {"results": [entry | {"configs": []}]}).to_bytes()
    (found,) = decode_response(apis.DESCRIBE_CONFIGS, version, encoded)[1]["results"]
    assert found["error_message"].startswith("no topic xxx")
    assert found["error_message"].endswith("x...")
    assert len(found["error_message"]) == 1000
