"""Well-formed requests that would harm the broker's own state: lying batches, internal topics, impossible offsets."""

from __future__ import annotations

import json
import logging
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from spark_klog.cli.output import TextFormatter
from spark_klog.errors import ErrorCode
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.protocol import apis
from spark_klog.protocol.codec import encode_request
from spark_klog.protocol.schema import Api
from tests.support.brokers.batches import make_batch
from tests.support.brokers.raw_client import RawClient, error_codes
from tests.support.clients.tools import kcat
from tests.support.servers.broker import KlogBroker
from tests.support.waiting import wait_until

NOW = 1_700_000_000_000
INTERNAL = ["__consumer_offsets", "__transaction_state"]


@pytest.fixture
def broker(server_dir: Path) -> Iterator[KlogBroker]:
    with KlogBroker(server_dir, "--set", "log.retention.check.interval.ms=100") as running:
        yield running


def _create(client: RawClient, topic: str, **settings: str) -> None:
    configs = [{"name": name.replace("_", "."), "value": value} for name, value in settings.items()]
    entry = {"name": topic, "num_partitions": 1, "replication_factor": 1, "configs": configs}
    assert set(error_codes(client.request(apis.CREATE_TOPICS, 4, {"topics": [entry], "timeout_ms": 5000}))) == {0}


def _settings(client: RawClient, topic: str) -> dict[str, str]:
    request = {"resources": [{"resource_type": 2, "resource_name": topic, "configuration_keys": None}]}
    (found,) = client.request(apis.DESCRIBE_CONFIGS, 1, request)["results"]
    return {entry["name"]: entry["value"] for entry in found["configs"]}


def _claiming(count: int, codec: str = "none") -> bytes:
    """A batch of one record that claims to have `count`."""
    batch = make_batch([(b"k", b"v")], [NOW], codec)
    struct.pack_into(">i", batch, 23, count - 1)
    struct.pack_into(">i", batch, 57, count)
    struct.pack_into(">I", batch, 17, crc32c(bytes(batch[21:])))
    return bytes(batch)


def _producer(client: RawClient, transactional_id: str) -> dict[str, Any]:
    """The answer of InitProducerId once the coordinator is ready."""
    request = {"transactional_id": transactional_id, "transaction_timeout_ms": 60_000}
    deadline = time.monotonic() + 60
    while (answer := client.request(apis.INIT_PRODUCER_ID, 4, request))["error_code"] in (14, 16, 51):
        assert time.monotonic() < deadline, answer
        time.sleep(0.02)
    return answer


def test_a_batch_that_claims_more_than_it_has(broker: KlogBroker) -> None:
    """The broker refuses it whole, serves the partition, goes on with housekeeping, and restarts with the good ones."""
    codecs = ["none", "gzip", "zstd"]
    with RawClient(broker.port) as client:
        _create(client, "other", internal_segment_bytes="200", retention_ms="1")
        for codec in codecs:
            lie, good = _claiming(2**31 - 1, codec), bytes(make_batch([(b"k", b"good")], [NOW], codec))
            _create(client, codec, internal_segment_bytes="200", index_interval_bytes="1")
            for records in (lie, lie + lie, good + lie, good + good):
                assert client.produce(codec, records, 8)[0] == ErrorCode.INVALID_RECORD
            for _ in range(5):
                assert client.produce(codec, good, 8)[0] == 0
                assert client.produce("other", good, 8)[0] == 0
        deadline = time.monotonic() + 20  # housekeeping goes on
        while client.request(apis.LIST_OFFSETS, 1, _earliest("other"))["topics"][0]["partitions"][0]["offset"] < 14:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert broker.stop() == 0
    assert "Traceback" not in broker.log.read_text()
    broker.start()
    for codec in codecs:
        read = kcat("-b", broker.bootstrap_servers, "-C", "-t", codec, "-o", "beginning", "-e", "-q", "-f", "%o:%s,")
        assert read.decode() == "".join(f"{offset}:good," for offset in range(5))


def _earliest(topic: str) -> dict[str, Any]:
    return {"replica_id": -1, "topics": [{"name": topic, "partitions": [{"partition_index": 0, "timestamp": -2}]}]}


def test_offsets_beyond_what_an_index_holds_are_in_another_segment(tmp_path: Path) -> None:
    """Batches may move the log's end far: the log rolls before a segment spans 2^31 offsets."""
    log = PartitionLog(tmp_path / "far-0", LogConfig(index_interval_bytes=1))
    for number in range(5):
        for _ in range(3):
            log.append(memoryview(bytearray(_claiming(2**30))))
        log.append(memoryview(make_batch([(b"k", b"%d" % number)], [NOW + number])))
    end = 5 * (3 * 2**30 + 1)
    assert log.end_offset == end
    log.close()
    again = PartitionLog(tmp_path / "far-0", LogConfig(index_interval_bytes=1), clean=True)
    assert again.end_offset == end
    for number in range(5):
        offset = (number + 1) * (3 * 2**30 + 1) - 1
        found = again.read(offset, 1000)
        assert found is not None
        assert struct.unpack_from(">q", found.read())[0] == offset
    again.close()


def test_nobody_produces_to_internal_topics(broker: KlogBroker) -> None:
    records = bytes(make_batch([(b"\0\0\0\6before", b"garbage")], [NOW]))
    with RawClient(broker.port) as client:
        for topic in INTERNAL:
            _create(client, topic)
        for topic in INTERNAL:
            producer = _producer(client, "before")
            (found,) = client.request(apis.METADATA, 12, {"topics": [{"name": topic}]})["topics"]
            for version in (2, 8, 13):
                name = {"topic_id": found["topic_id"]} if version == 13 else {"name": topic}
                data = [name | {"partition_data": [{"index": 0, "records": records}]}]
                answer = client.request(apis.PRODUCE, version, {"acks": -1, "timeout_ms": 1000, "topic_data": data})
                assert set(error_codes(answer)) == {ErrorCode.INVALID_TOPIC_EXCEPTION}
            names = {f"v3_and_below_{key}": producer[key] for key in ("producer_id", "producer_epoch")}
            names |= {"v3_and_below_transactional_id": "before"}
            names |= {"v3_and_below_topics": [{"name": topic, "partitions": [0]}]}
            answer = client.request(apis.ADD_PARTITIONS_TO_TXN, 3, names)
            refused = error_codes(answer["results_by_topic_v3_and_below"])
            assert refused == [ErrorCode.TOPIC_AUTHORIZATION_FAILED]
            partitions = [{"partition_index": 0, "offset": -1}]
            request = {"topics": [{"name": topic, "partitions": partitions}], "timeout_ms": 1000}
            answer = client.request(apis.DELETE_RECORDS, 1, request)
            assert set(error_codes(answer)) == {ErrorCode.INVALID_TOPIC_EXCEPTION}
    broker.kill()
    broker.start()
    with RawClient(broker.port) as client:
        assert _producer(client, "before")["error_code"] == 0


def test_one_record_that_can_not_be_read_is_one_transactional_id(broker: KlogBroker) -> None:
    """The broker serves the other ids; it refuses this one, as its epoch is unknown, and names it in the log."""
    with RawClient(broker.port) as client:
        for name in ("one", "two", "three"):
            assert _producer(client, name)["error_code"] == 0
    broker.stop()
    log = PartitionLog(broker.data_dir / "__transaction_state-0", LogConfig(), clean=True)
    for key in (b"\0\0\0\3two", b"\0\0\0\x99no key", b"\0\0\0\4\xff\xff\xff\xff"):
        log.append(memoryview(make_batch([(key, b"garbage")], [NOW])))
    log.close()
    broker.start()
    with RawClient(broker.port) as client:
        assert _producer(client, "one")["error_code"] == 0
        assert _producer(client, "three")["error_code"] == 0
        request = {"transactional_id": "two", "transaction_timeout_ms": 60_000}
        assert client.request(apis.INIT_PRODUCER_ID, 4, request)["error_code"] == ErrorCode.COORDINATOR_NOT_AVAILABLE
    broker.wait_for_log("transactional id 'two' can't be read, and is not served")


@pytest.mark.parametrize("how", ["metadata", "create", "kafka"])
def test_internal_topics_are_compacted_whoever_creates_them(server_dir: Path, how: str) -> None:
    numbers = dict(zip(INTERNAL, (3, 4), strict=True))
    settings = [f"offsets.topic.num.partitions={numbers[INTERNAL[0]]}", "num.partitions=7"]
    settings.append(f"transaction.state.log.num.partitions={numbers[INTERNAL[1]]}")
    broker = KlogBroker(server_dir, *(word for text in settings for word in ("--set", text)))
    for topic in INTERNAL if how == "kafka" else ():  # data directories of Apache Kafka hold no topic settings
        for partition in range(numbers[topic]):
            folder = broker.data_dir / f"{topic}-{partition}"
            folder.mkdir(parents=True)
            (folder / f"{0:020d}.log").touch()
    with broker, RawClient(broker.port) as client:
        for topic in INTERNAL:
            if how == "metadata":
                client.request(apis.METADATA, 4, {"topics": [{"name": topic}], "allow_auto_topic_creation": True})
            elif how == "create":
                entry = {"name": topic, "num_partitions": -1, "replication_factor": -1}
                answer = client.request(apis.CREATE_TOPICS, 4, {"topics": [entry], "timeout_ms": 5000})
                assert set(error_codes(answer)) == {0}
            (found,) = client.request(apis.METADATA, 4, {"topics": [{"name": topic}]})["topics"]
            assert len(found["partitions"]) == numbers[topic]
            assert _settings(client, topic)["cleanup.policy"] == "compact"


def test_delete_records_beyond_the_log(broker: KlogBroker) -> None:
    with RawClient(broker.port) as client:
        _create(client, "t")
        assert client.produce("t", bytes(make_batch([(b"k", b"v")], [NOW])), 8) == (0, 0)
        for offset in (-2, -(2**63), 2, 2**63 - 1):
            partition = {"partition_index": 0, "offset": offset}
            request = {"topics": [{"name": "t", "partitions": [partition]}], "timeout_ms": 1000}
            (found,) = client.request(apis.DELETE_RECORDS, 1, request)["topics"][0]["partitions"]
            assert (found["error_code"], found["low_watermark"]) == (ErrorCode.OFFSET_OUT_OF_RANGE, -1)
        assert client.request(apis.LIST_OFFSETS, 1, _earliest("t"))["topics"][0]["partitions"][0]["offset"] == 0


@pytest.mark.parametrize(
    "asked",
    [
        {apis.METADATA, apis.OFFSET_FETCH},
        pytest.param(
            {apis.DELETE_RECORDS, apis.LIST_OFFSETS, apis.OFFSET_COMMIT, apis.FETCH, apis.DESCRIBE_CONFIGS},
            marks=pytest.mark.test_all("long"),
        ),
    ],
    ids=["reading", "others"],
)
def test_large_requests_of_real_clients_are_answered(broker: KlogBroker, asked: set[Api]) -> None:
    """Requests for 10,000 topics or 50,000 partitions stay below the limit on the memory of a request's elements."""
    names = [f"topic-number-{number}" for number in range(10_000)]
    indexes = range(50_000)
    offsets = [{"partition_index": index, "committed_offset": 1 << 40, "committed_metadata": "m"} for index in indexes]
    requests: list[tuple[Any, int, dict[str, Any], str, str]] = [
        *[
            (apis.METADATA, version, {"topics": [{"name": name} for name in names],
                "allow_auto_topic_creation": False}, "topics", "") for version in (4, 12)
        ],
        (apis.DELETE_RECORDS, 2, {"topics": [{"name": "t", "partitions": _indexed(offset=5)}]}, "topics", "partitions"),
        (apis.LIST_OFFSETS, 7, {"topics": [{"name": "t", "partitions": _indexed(timestamp=-1)}]},
            "topics", "partitions"),
        (apis.OFFSET_COMMIT, 8, {"group_id": "g", "generation_id_or_member_epoch": -1,
            "topics": [{"name": "t", "partitions": offsets}]}, "topics", "partitions"),
        (apis.OFFSET_FETCH, 5, {"group_id": "g", "topics": [{"name": "t", "partition_indexes": indexes}]},
            "topics", "partitions"),
        (apis.FETCH, 11, {"session_epoch": -1, "topics": [{"topic": "t", "partitions": [
            {"partition": index, "fetch_offset": 0, "partition_max_bytes": 1} for index in range(40_000)]}]},
            "responses", "partitions"),
        (apis.DESCRIBE_CONFIGS, 4, {"resources": [
            {"resource_type": 2, "resource_name": name, "configuration_keys": None} for name in names]}, "results", ""),
    ]  # fmt: skip
    with RawClient(broker.port, 60) as client:
        for api, version, message, field, inner in requests:
            if api not in asked:
                continue
            answer = client.request(api, version, message)[field]
            wanted = 40_000 if api is apis.FETCH else 50_000 if inner else 10_000
            assert len(answer[0][inner] if inner else answer) == wanted, api.name


def _indexed(**fields: int) -> list[dict[str, int]]:
    return [{"partition_index": index} | fields for index in range(50_000)]


def test_more_elements_than_allowed_close_the_connection(broker: KlogBroker) -> None:
    with RawClient(broker.port) as client:
        with pytest.raises(ConnectionError):
            client.request(apis.METADATA, 4, {"topics": [{"name": ""}] * 500_000})
        broker.wait_for_log("Metadata v4 request: its elements would take more memory than allowed")
    with RawClient(broker.port) as client:
        assert client.request(apis.METADATA, 4, {"topics": []})["brokers"]


def test_what_is_asked_for_twice_is_answered_once(broker: KlogBroker) -> None:
    """A short request must not get a long answer many times over."""
    with RawClient(broker.port) as client:
        _create(client, "t")
        for version in (1, 4, 9, 12):
            answer = client.request(apis.METADATA, version, {"topics": [{"name": "t"}] * 1000})
            assert [topic["name"] for topic in answer["topics"]] == ["t"]
        resource = {"resource_type": 2, "resource_name": "t", "configuration_keys": None}
        assert len(client.request(apis.DESCRIBE_CONFIGS, 4, {"resources": [resource] * 1000})["results"]) == 1
        assert client.produce("t", bytes(make_batch([(b"k", bytes(50_000))], [NOW])), 8) == (0, 0)
        (found,) = client.request(apis.METADATA, 12, {"topics": [{"name": "t"}]})["topics"]
        for version in (1, 4, 11, 13):  # the last entry counts, as in Kafka
            name = {"topic": "t"} if version < 13 else {"topic_id": found["topic_id"]}
            offsets = [{"partition": 0, "fetch_offset": at, "partition_max_bytes": 100_000} for at in [99] * 999 + [0]]
            fetch = {"max_wait_ms": 0, "min_bytes": 1, "session_epoch": -1 if version < 11 else 0}
            fetch |= {"topics": [name | {"partitions": offsets}, name | {"partitions": offsets}]}
            (topic,) = client.request(apis.FETCH, version, fetch)["responses"]
            (entry,) = topic["partitions"]
            assert (entry["error_code"], len(entry["records"]) > 50_000) == (0, True)
        searched = {"topics": [{"name": "t", "partitions": [{"partition_index": 0, "timestamp": 5}] * 1000}]}
        for version in (0, 1, 7):
            answer = client.request(apis.LIST_OFFSETS, version, {"replica_id": -1} | searched)
            assert set(error_codes(answer)) == {ErrorCode.INVALID_REQUEST}
        answer = client.request(apis.FIND_COORDINATOR, 4, {"coordinator_keys": ["g"] * 1000, "key_type": 0})
        assert len(answer["coordinators"]) == 1
        _producer(client, "id")
        answer = client.request(apis.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": ["id"] * 1000})
        assert len(answer["transaction_states"]) == 1
        assert len(client.request(apis.DESCRIBE_GROUPS, 5, {"groups": ["g"] * 1000})["groups"]) == 1
        groups = [{"group_id": "g", "topics": [{"name": "t", "partition_indexes": [0] * 100}]}] * 100
        (group,) = client.request(apis.OFFSET_FETCH, 8, {"groups": groups})["groups"]
        assert len(group["topics"][0]["partitions"]) == 1


def test_strings_have_kafkas_limit(broker: KlogBroker) -> None:
    """The compact encoding could hold 2 GiB; a key of 40 MB once stopped the event loop for 15 s."""
    size = 40_000_000
    length = bytes([(size + 1) >> shift & 0x7F | (0x80 if shift < 21 else 0) for shift in (0, 7, 14, 21)])
    header = struct.pack(">hhih", apis.FIND_COORDINATOR.key, 3, 7, -1) + b"\0"
    with RawClient(broker.port) as client:
        client.send_frame(header + length + b"k" * size + b"\0\0")
        assert client.is_closed()
    broker.wait_for_log(f"FindCoordinator v3 request: string of {size} bytes")


def test_ids_have_a_limit_of_their_own(broker: KlogBroker) -> None:
    """What clients choose becomes part of other ids, of records and of answers: a long one once ended ListGroups."""
    longest, longer, widest = "i" * 1024, "i" * 1025, "i" * 32_767
    member = {"session_timeout_ms": 6000, "rebalance_timeout_ms": 6000, "protocol_type": "consumer"}
    member |= {"member_id": "", "protocols": [{"name": "range", "metadata": b""}]}
    with RawClient(broker.port) as client:
        _create(client, "t")
        _producer(client, "ready")

        def joined(version: int, **fields: Any) -> int:
            request = member | {"group_id": "g"} | fields
            return int(client.request(apis.JOIN_GROUP, version, request)["error_code"])

        deadline = time.monotonic() + 60
        while (code := joined(5, group_id=longest)) != ErrorCode.MEMBER_ID_REQUIRED:
            assert code in (14, 15, 16), code
            assert time.monotonic() < deadline
        for name in (longer, widest):
            for version in (2, 5, 9):
                assert joined(version, group_id=name) == ErrorCode.INVALID_GROUP_ID
                for fields in ({"group_instance_id": name}, {"protocol_type": name}):
                    if version > 2 or "protocol_type" in fields:
                        assert joined(version, **fields) == ErrorCode.INVALID_REQUEST
                protocols = [{"name": name, "metadata": b""}]
                assert joined(version, protocols=protocols) == ErrorCode.INVALID_REQUEST
            request = {"transactional_id": name, "transaction_timeout_ms": 60_000}
            assert client.request(apis.INIT_PRODUCER_ID, 4, request)["error_code"] == ErrorCode.INVALID_REQUEST
            offset = {"partition_index": 0, "committed_offset": 5, "committed_metadata": ""}
            topics = [{"name": "t", "partitions": [offset]}]
            request = {"group_id": name, "generation_id_or_member_epoch": -1, "topics": topics}
            assert set(error_codes(client.request(apis.OFFSET_COMMIT, 8, request))) == {ErrorCode.INVALID_GROUP_ID}
        many = [{"name": str(number), "metadata": b""} for number in range(101)]
        assert joined(5, protocols=many) == ErrorCode.INVALID_REQUEST
        large = [{"name": "range", "metadata": bytes(2_000_000)}]
        assert joined(5, protocols=large) == ErrorCode.UNKNOWN_SERVER_ERROR
        groups = client.request(apis.LIST_GROUPS, 4, {})["groups"]
        assert [group["group_id"] for group in groups] == [longest]
    with RawClient(broker.port) as client:
        frame = encode_request(apis.METADATA, 4, 7, longer, {"topics": []}).to_bytes()
        client.send_frame(frame)
        assert client.is_closed()
    broker.wait_for_log("client id of 1025 characters")


def test_long_ids_that_kafka_has_written_are_served_and_expire(server_dir: Path) -> None:
    """Kafka limits ids as strings only; one record has a string that no STRING can hold."""
    name, now = "k" * 32_767, time.time_ns() // 1_000_000
    key = struct.pack(">hh", 2, len(name)) + name.encode()
    group = struct.pack(">hh", 3, 8) + b"consumer" + struct.pack(">ihhqi", 1, -1, -1, 1, 0)
    wide = struct.pack(">h", 4) + b"\x81\x80\x04" + b"w" * 65_536 + bytes(20)  # its compact protocol type
    offset_key = struct.pack(">hh", 1, len(name)) + name.encode() + struct.pack(">h", 1) + b"t" + struct.pack(">i", 0)
    offset = struct.pack(">hqihq", 3, 42, -1, 0, 1)  # committed in 1970: it has expired
    broker = KlogBroker(server_dir)
    log = PartitionLog(broker.data_dir / "__consumer_offsets-0", LogConfig(), clean=True)
    rows = [(key, group), (struct.pack(">hh", 2, 4) + b"wide", wide), (offset_key, offset)]
    log.append(memoryview(make_batch(rows, [now] * len(rows))))
    log.close()
    PartitionLog(broker.data_dir / "t-0", LogConfig(), clean=True).close()

    def offsets(client: RawClient) -> list[int]:
        request = {"groups": [{"group_id": name, "topics": None}]}
        (found,) = client.request(apis.OFFSET_FETCH, 8, request)["groups"]
        return [entry["committed_offset"] for topic in found["topics"] for entry in topic["partitions"]]

    def listed(client: RawClient) -> list[str]:
        return [group["group_id"] for group in client.request(apis.LIST_GROUPS, 4, {})["groups"]]

    with broker, RawClient(broker.port) as client:
        wait_until(lambda: offsets(client), "loading", seconds=30)
        assert (offsets(client), listed(client)) == ([42], [name])
    expiring = KlogBroker(server_dir, "--set", "offsets.retention.check.interval.ms=50")
    with expiring, RawClient(expiring.port) as client:
        wait_until(lambda: not offsets(client) and not listed(client), "expiry", seconds=30)
    assert "failed" not in broker.log.read_text()


def test_what_a_request_names_twice_is_not_changed(broker: KlogBroker) -> None:
    """As Kafka 4: INVALID_REQUEST, once for each name; the others are served."""
    invalid, none = ErrorCode.INVALID_REQUEST, ErrorCode.NONE
    with RawClient(broker.port) as client:
        one = {"num_partitions": 1, "replication_factor": 1}
        new = [one | {"name": name} for name in ("a", "b", "a", "a")]
        answer = client.request(apis.CREATE_TOPICS, 4, {"topics": new, "timeout_ms": 5000})
        assert {entry["name"]: entry["error_code"] for entry in answer["topics"]} == {"a": invalid, "b": none}
        assert len(answer["topics"]) == 2
        _create(client, "a")
        grown = [{"name": name, "count": count} for name, count in (("a", 2), ("a", 3), ("b", 2))]
        answer = client.request(apis.CREATE_PARTITIONS, 1, {"topics": grown, "timeout_ms": 5000})
        assert {entry["name"]: entry["error_code"] for entry in answer["results"]} == {"a": invalid, "b": none}
        values = [("a", "1"), ("b", "2"), ("a", "3")]
        changed = [
            {"resource_type": 2, "resource_name": name, "configs": [{"name": "retention.ms", "value": value}]}
            for name, value in values
        ]
        for api in (apis.ALTER_CONFIGS, apis.INCREMENTAL_ALTER_CONFIGS):
            answer = client.request(api, 0, {"resources": changed})
            assert sorted(error_codes(answer)) == [none, invalid]
        assert _settings(client, "a")["retention.ms"] == "-1"
        assert _settings(client, "b")["retention.ms"] == "2"
        answer = client.request(apis.DELETE_TOPICS, 4, {"topic_names": ["a", "b", "a"], "timeout_ms": 5000})
        assert {entry["name"]: entry["error_code"] for entry in answer["responses"]} == {"a": invalid, "b": none}
        assert _settings(client, "a")


def test_names_write_no_lines_of_the_log(broker: KlogBroker, server_dir: Path) -> None:
    """A client id with a line break, an escape sequence and a mark that turns the text around."""
    forged = "x\n2026-01-01 00:00:00,000 INFO spark_klog.broker: forged\x1b[2J\x85\u2028\u202e"
    message = {"acks": -1, "timeout_ms": 1000, "topic_data": [{"name": "t", "partition_data": _PART}]}
    request = encode_request(apis.PRODUCE, 7, 1, forged, message).to_bytes()
    as_json = KlogBroker(server_dir, "--log-format", "json", name="json")
    with as_json, RawClient(broker.port) as client, RawClient(as_json.port) as other:
        for one in (client, other):
            _create(one, "t")
            one.send_frame(request)
            one.receive_frame()
            one.send_frame(struct.pack(">hhi", 999, 0, 1) + struct.pack(">h", len(forged.encode())) + forged.encode())
            assert one.is_closed()
        line = broker.wait_for_log("nothing appended", "forged")
        assert r"x\n2026-01-01 00:00:00,000 INFO spark_klog.broker: forged\x1b[2J\x85\u2028\u202e (" in line
        broker.wait_for_log("API 999")
        lines = broker.log.read_bytes().decode().split("\n")
        assert all(re.match(r"[0-9-]+ [0-9:,]+ [A-Z]+ spark_klog\.", line) for line in lines if line)
        assert "\x1b" not in broker.log.read_text()
        found = json.loads(as_json.wait_for_log("nothing appended"))["message"]
        assert found[found.index(r"x\n2026") :].startswith(r"x\n2026-01-01 00:00:00,000 INFO")
    assert not re.search("[\x1b\x85\u2028\u202e]", as_json.log.read_text())


_PART = [{"index": 0, "records": b"no batch"}]


def test_a_traceback_is_indented() -> None:
    record = logging.LogRecord("spark_klog.broker", logging.ERROR, __file__, 1, "failed: %s", ("a\nb",), None)
    try:
        raise ValueError("a\n2026-01-01 00:00:00,000 INFO spark_klog.broker: forged\x1b[2J")
    except ValueError:
        record.exc_info = sys.exc_info()
    first, *lines = TextFormatter().format(record).splitlines()
    assert first.endswith(r"ERROR spark_klog.broker: failed: a\nb")
    assert all(line.startswith("  ") for line in lines)
    assert lines[-1] == r"  2026-01-01 00:00:00,000 INFO spark_klog.broker: forged\x1b[2J"


def test_a_group_writes_no_lines_of_a_table(broker: KlogBroker) -> None:
    group = "g\n\x1b[2Jforged"
    entry = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}
    topics = [{"name": "t", "partitions": [entry]}]
    with RawClient(broker.port) as client:
        _create(client, "t")
        request = {"group_id": group, "generation_id_or_member_epoch": -1, "topics": topics}
        assert error_codes(client.request(apis.OFFSET_COMMIT, 7, request)) == [0]
    command = [sys.executable, "-m", "spark_klog.cli", "groups"]
    for arguments in (["list"], ["describe", group]):
        where = ["-b", broker.bootstrap_servers]
        done = subprocess.run([*command, *arguments, *where], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done
        assert r"g\n\x1b[2Jforged" in done.stdout
        assert "\x1b" not in done.stdout
