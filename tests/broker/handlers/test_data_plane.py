"""Produce and Fetch over the wire: acks, limits, timestamps, errors by partition, waiting, sendfile, old versions."""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from crc32c import crc32c

from tests.support.brokers.batches import make_batch
from tests.support.brokers.kafka_python_wire import KafkaPythonWire, Message, encode, make_records, read_records
from tests.support.packages.registries import program
from tests.support.servers.broker import KlogBroker

NOW = 1_700_000_000_000
NONE, OUT_OF_RANGE, CORRUPT, UNKNOWN_PARTITION, TOO_LARGE, INVALID_ACKS, INVALID_RECORD = 0, 1, 2, 3, 10, 21, 87
LARGE = 50_000


@pytest.fixture(scope="module")
def broker(module_server_dir: Path) -> Iterator[KlogBroker]:
    with KlogBroker(module_server_dir) as running:
        yield running


@pytest.fixture
def wire(broker: KlogBroker) -> Iterator[KafkaPythonWire]:
    with closing(KafkaPythonWire(broker.bootstrap_servers)) as connected:
        yield connected


def _create(wire: KafkaPythonWire, topic: str, partitions: int = 1, **configs: str) -> uuid.UUID:
    settings = [{"name": name.replace("_", "."), "value": value} for name, value in configs.items()]
    entry = {"name": topic, "num_partitions": partitions, "replication_factor": 1, "assignments": []}
    request = {"topics": [entry | {"configs": settings}], "timeout_ms": 5000}
    (made,) = wire.ask("CreateTopics", 7, request)["topics"]
    assert made["error_code"] == NONE, made
    topic_id: uuid.UUID = made["topic_id"]
    return topic_id


def _produce_request(topic: str, records: dict[int, bytes], acks: int = -1) -> Message:
    data = [{"index": index, "records": entry} for index, entry in records.items()]
    return {
        "transactional_id": None,
        "acks": acks,
        "timeout_ms": 5000,
        "topic_data": [{"name": topic, "partition_data": data}],
    }


def _produce(wire: KafkaPythonWire, topic: str, records: dict[int, bytes], acks: int = -1, version: int = 8) -> Any:
    (answer,) = wire.ask("Produce", version, _produce_request(topic, records, acks))["responses"]
    assert answer["name"] == topic
    return answer["partition_responses"]


def _fetch_request(topic: str, offsets: dict[int, int], **limits: int) -> Message:
    partitions = [
        {
            "partition": index,
            "current_leader_epoch": -1,
            "fetch_offset": offset,
            "log_start_offset": -1,
            "partition_max_bytes": limits.get("partition_max_bytes", 1_000_000),
        }
        for index, offset in offsets.items()
    ]
    return {
        "replica_id": -1,
        "max_wait_ms": limits.get("max_wait_ms", 0),
        "min_bytes": limits.get("min_bytes", 1),
        "max_bytes": limits.get("max_bytes", 10_000_000),
        "isolation_level": 0,
        "session_id": 0,
        "session_epoch": -1,
        "topics": [{"topic": topic, "partitions": partitions}],
        "forgotten_topics_data": [],
    }


def _fetch(wire: KafkaPythonWire, topic: str, offsets: dict[int, int], version: int = 11, **limits: int) -> Any:
    (answer,) = wire.ask("Fetch", version, _fetch_request(topic, offsets, **limits))["responses"]
    assert answer["topic"] == topic
    return answer["partitions"]


def _corrupt(records: bytes) -> bytes:
    return records[:-1] + bytes([records[-1] ^ 1])


@pytest.mark.parametrize("version", [0, 2, 3, 12])
def test_each_partition_has_its_own_error(wire: KafkaPythonWire, topic: str, version: int) -> None:
    _create(wire, topic, 3)
    good = make_records(0 if version < 2 else min(version - 1, 2), [b"good"], NOW)
    records = {0: good, 7: good, 1: _corrupt(good), 2: good}
    answers = _produce(wire, topic, records, version=version)
    assert [(entry["index"], entry["error_code"], entry["base_offset"]) for entry in answers] == [
        (0, NONE, 0),
        (7, UNKNOWN_PARTITION, -1),
        (1, CORRUPT, -1),
        (2, NONE, 0),
    ]
    fetched = _fetch(wire, topic, {0: 0, 7: 0, 1: 0, 2: 5}, max_wait_ms=5000)
    assert [(entry["partition_index"], entry["error_code"], entry["high_watermark"]) for entry in fetched] == [
        (0, NONE, 1),
        (7, UNKNOWN_PARTITION, -1),
        (1, NONE, 0),
        (2, OUT_OF_RANGE, 1),
    ]
    assert read_records(fetched[0]["records"]) == [(2, 0, b"good")]
    assert [bool(entry["records"]) for entry in fetched] == [True, False, False, False]


@pytest.mark.parametrize("acks", [1, pytest.param(-1, id="all")])
def test_acks_that_are_answered(wire: KafkaPythonWire, topic: str, acks: int) -> None:
    _create(wire, topic)
    (answer,) = _produce(wire, topic, {0: make_records(2, [b"v"], NOW)}, acks)
    assert (answer["error_code"], answer["base_offset"]) == (NONE, 0)


def test_acks_0_is_not_answered(wire: KafkaPythonWire, topic: str) -> None:
    _create(wire, topic)
    for _ in range(3):
        wire.send(encode("Produce", 8, _produce_request(topic, {0: make_records(2, [b"v"], NOW)}, acks=0)))
    (entry,) = _fetch(wire, topic, {0: 0}, max_wait_ms=5000)  # acks=0 has no response: the next one is the Fetch's
    assert entry["high_watermark"] == 3


@pytest.mark.parametrize("acks", [2, pytest.param(-2, id="minus-2"), 32767])
def test_acks_that_are_none(wire: KafkaPythonWire, topic: str, acks: int) -> None:
    _create(wire, topic)
    (answer,) = _produce(wire, topic, {0: make_records(2, [b"v"], NOW)}, acks)
    assert answer["error_code"] == INVALID_ACKS
    assert _fetch(wire, topic, {0: 0})[0]["high_watermark"] == 0


def test_the_largest_message_is_a_setting_of_a_topic(wire: KafkaPythonWire, topic: str) -> None:
    records = make_records(2, [bytes(2000)], NOW)
    _create(wire, topic, max_message_bytes=str(len(records) - 1))
    assert _produce(wire, topic, {0: records})[0]["error_code"] == TOO_LARGE
    change = {"name": "max.message.bytes", "config_operation": 0, "value": str(len(records))}
    resource = {"resource_type": 2, "resource_name": topic, "configs": [change]}
    (done,) = wire.ask("IncrementalAlterConfigs", 1, {"resources": [resource], "validate_only": False})["responses"]
    assert done["error_code"] == NONE
    assert _produce(wire, topic, {0: records})[0]["error_code"] == NONE
    assert _produce(wire, topic, {0: make_records(2, [bytes(2001)], NOW)})[0]["error_code"] == TOO_LARGE


@pytest.mark.parametrize("version", [2, 8, 12])
def test_log_append_time(wire: KafkaPythonWire, topic: str, version: int) -> None:
    _create(wire, topic, message_timestamp_type="LogAppendTime")
    begin = time.time_ns() // 1_000_000
    (answer,) = _produce(wire, topic, {0: make_records(1 if version == 2 else 2, [b"a", b"b"], NOW)}, version=version)
    end = time.time_ns() // 1_000_000
    assert begin <= answer["log_append_time_ms"] <= end
    (entry,) = _fetch(wire, topic, {0: 0})
    attributes, _, base, largest = struct.unpack_from(">hiqq", entry["records"], 21)
    assert (attributes & 8, largest) == (8, answer["log_append_time_ms"])
    assert base <= largest
    assert [value for _, _, value in read_records(entry["records"])] == [b"a", b"b"]


def test_what_a_compacted_topic_refuses(wire: KafkaPythonWire, topic: str) -> None:
    _create(wire, topic, cleanup_policy="compact")
    assert _produce(wire, topic, {0: make_records(2, [b"v"], NOW)})[0]["error_code"] == INVALID_RECORD
    assert _produce(wire, topic, {0: make_records(2, [b"v"], NOW, key=b"k")})[0]["error_code"] == NONE


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_the_records_that_a_compacted_topic_refuses(wire: KafkaPythonWire, topic: str, codec: str) -> None:
    _create(wire, topic, cleanup_policy="compact")
    keys = [b"k" if number not in (1, 9) else None for number in range(12)]
    records = bytes(make_batch([(key, b"v") for key in keys], [NOW] * 12, codec))
    refused = _produce(wire, topic, {0: records})[0]
    assert refused["error_code"] == INVALID_RECORD
    assert "2 of 12 records of a batch have no key" in refused["error_message"]
    assert [entry["batch_index"] for entry in refused["record_errors"]] == [1, 9]
    assert all("no key" in entry["batch_index_error_message"] for entry in refused["record_errors"])


def test_control_batches_are_the_brokers(wire: KafkaPythonWire, topic: str) -> None:
    _create(wire, topic)
    records = bytearray(make_records(2, [b"v"], NOW))
    records[22] |= 0x20
    assert _produce(wire, topic, {0: bytes(records)})[0]["error_code"] == CORRUPT
    struct.pack_into(">I", records, 17, crc32c(bytes(records[21:])))
    assert _produce(wire, topic, {0: bytes(records)})[0]["error_code"] == INVALID_RECORD
    assert _fetch(wire, topic, {0: 0})[0]["high_watermark"] == 0


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_waiting_fetches_cost_nothing_and_wake_at_once(broker: KlogBroker, wire: KafkaPythonWire, topic: str) -> None:
    _create(wire, topic, 2)
    with ExitStack() as stack:
        waiting = [stack.enter_context(closing(KafkaPythonWire(broker.bootstrap_servers))) for _ in range(50)]
        for number, other in enumerate(waiting):
            other.send(encode("Fetch", 11, _fetch_request(topic, {0: 0, number % 2: 0}, max_wait_ms=30_000)))
        took = []
        for _ in range(5):  # a busy machine may be late with the first ones; polling would cost CPU in all rounds
            before = _cpu_seconds(broker.pid)
            time.sleep(2)
            took.append(_cpu_seconds(broker.pid) - before)
            if took[-1] < 0.1:
                break
        assert took[-1] < 0.1, took
        begin = time.monotonic()
        assert _produce(wire, topic, {0: make_records(2, [b"v"], NOW)})[0]["error_code"] == NONE
        for other in waiting:
            assert b"v" in other.receive()
        assert time.monotonic() - begin < 15  # half of their max_wait_ms


def test_an_append_without_an_answer_wakes_a_fetch(broker: KlogBroker, wire: KafkaPythonWire, topic: str) -> None:
    """A produce with acks=0 wakes a waiting fetch; the section end-to-end of the benchmarks measures how soon."""
    _create(wire, topic)
    with closing(KafkaPythonWire(broker.bootstrap_servers)) as reader:
        reader.socket.settimeout(30)
        for offset in range(5):
            reader.send(encode("Fetch", 11, _fetch_request(topic, {0: offset}, max_wait_ms=100_000)))
            records = make_records(2, [b"value %d" % offset], NOW)
            wire.send(encode("Produce", 8, _produce_request(topic, {0: records}, acks=0)))
            assert b"value %d" % offset in reader.receive()


def test_min_bytes_are_counted_over_partitions(broker: KlogBroker, wire: KafkaPythonWire, topic: str) -> None:
    _create(wire, topic, 3)
    records = make_records(2, [bytes(1000)], NOW)
    with closing(KafkaPythonWire(broker.bootstrap_servers)) as reader:
        request = _fetch_request(topic, {0: 0, 1: 0, 2: 0}, max_wait_ms=30_000, min_bytes=3 * len(records))
        reader.send(encode("Fetch", 11, request))
        reader.socket.settimeout(0.3)
        for index in (0, 1):
            assert _produce(wire, topic, {index: records})[0]["error_code"] == NONE
            with pytest.raises(TimeoutError):
                reader.receive()
        reader.socket.settimeout(10)
        assert _produce(wire, topic, {2: records})[0]["error_code"] == NONE
        assert len(reader.receive()) > 3 * len(records)


def test_the_rest_of_an_older_segment_does_not_wait(broker: KlogBroker, wire: KafkaPythonWire, topic: str) -> None:
    """A range ends with its segment, so min.bytes may never be reached: Kafka answers at once (`DelayedFetch`)."""
    _create(wire, topic, 2, internal_segment_bytes="3000")
    records = make_records(2, [bytes(1000)], NOW)
    for index in (1, 0, 0, 0):
        assert _produce(wire, topic, {index: records})[0]["error_code"] == NONE
    with closing(KafkaPythonWire(broker.bootstrap_servers)) as reader:
        reader.socket.settimeout(20)
        request = _fetch_request(topic, {1: 0, 0: 1}, max_wait_ms=100_000, min_bytes=1_000_000)
        reader.send(encode("Fetch", 11, request))
        assert len(reader.receive()) > 2 * len(records)


def test_max_bytes_are_shared_by_partitions(wire: KafkaPythonWire, topic: str) -> None:
    _create(wire, topic, 3)
    records = make_records(2, [bytes(1000)], NOW)
    _produce(wire, topic, dict.fromkeys(range(3), records))

    def sizes(**limits: int) -> list[int]:
        return [len(entry["records"] or b"") for entry in _fetch(wire, topic, dict.fromkeys(range(3), 0), **limits)]

    size = len(records)
    assert sizes() == [size, size, size]
    assert sizes(max_bytes=1) == [size, 0, 0]  # the first batch comes whole
    assert sizes(max_bytes=2 * size) == [size, size, 0]
    assert sizes(max_bytes=0) == sizes(max_bytes=-1) == [size, 0, 0]
    assert sizes(partition_max_bytes=-1)[0] == size


@contextmanager
def _traced(broker: KlogBroker, calls: str, folder: Path) -> Iterator[Path]:
    """Trace these system calls of the broker with strace; the file is complete after the block."""
    trace = folder / "trace"
    strace = subprocess.Popen(
        [program(("strace",), "strace"), "-f", "-e", f"trace={calls}", "-o", str(trace), "-p", str(broker.pid)],
        stderr=subprocess.PIPE,
    )
    assert strace.stderr is not None
    try:
        attached = strace.stderr.readline().decode()
        if "attached" not in attached:
            pytest.skip(f"NOT SHOWN: strace may not look at processes here: {attached.strip()}")
        yield trace
    finally:
        strace.send_signal(signal.SIGINT)
        strace.wait(20)


def test_the_end_of_an_answer_waits_for_no_acknowledgement(broker: KlogBroker, tmp_path: Path) -> None:
    with _traced(broker, "setsockopt", tmp_path) as trace, closing(KafkaPythonWire(broker.bootstrap_servers)) as wire:
        wire.ask("ApiVersions", 0, {})
    assert re.search(r"TCP_NODELAY, \[1\]", trace.read_text())


def test_large_answers_leave_by_sendfile(broker: KlogBroker, wire: KafkaPythonWire, topic: str, tmp_path: Path) -> None:
    _create(wire, topic)
    for _ in range(8):
        assert _produce(wire, topic, {0: make_records(2, [os.urandom(500_000)], NOW)})[0]["error_code"] == NONE
    with _traced(broker, "sendfile,read,pread64,preadv,sendto,write,writev,sendmsg", tmp_path) as trace:
        (entry,) = _fetch(wire, topic, {0: 0}, partition_max_bytes=10_000_000)
    assert len(entry["records"]) > 4_000_000
    # of several threads: "sendfile(21, 9 <unfinished ...>", and later "<... sendfile resumed>, ...) = 1048576"
    done = re.findall(r"(\w+)(?:\(| resumed>).*\) += (\d+)$", trace.read_text(), re.MULTILINE)
    by_call: dict[str, int] = {}
    for call, size in done:
        by_call[call] = by_call.get(call, 0) + int(size)
    assert by_call.pop("sendfile") == len(entry["records"])
    assert sum(by_call.values()) < 100_000, by_call


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_old_fetchers_get_a_part_of_a_message_or_a_whole_one(wire: KafkaPythonWire, topic: str, version: int) -> None:
    _create(wire, topic)
    values = [bytes([number]) * 1000 for number in range(5)]
    for value in values:
        assert _produce(wire, topic, {0: make_records(2, [value], NOW)})[0]["error_code"] == NONE
    whole = _fetch(wire, topic, {0: 0}, version)[0]["records"]
    magic = 1 if version >= 2 else 0
    assert read_records(whole) == [(magic, offset, value) for offset, value in enumerate(values)]
    one = len(whole) // 5
    for limit in (1, 500, one - 1, one, one + 1, 2 * one + 500, len(whole) + 1):
        data = _fetch(wire, topic, {0: 0}, version, partition_max_bytes=limit)[0]["records"]
        assert whole.startswith(data)
        if version < 3:
            # the broker picks batches by their size in the log, which is larger than that of the converted message
            assert len(data) <= limit
            assert len(data) >= min(limit, one)
        else:
            assert len(data) >= one
            assert len(data) % one == 0


@pytest.mark.parametrize("fallback", ["0.8.2", "0.9.0"])
def test_old_consumers_ask_for_more(broker: KlogBroker, wire: KafkaPythonWire, topic: str, fallback: str) -> None:
    _create(wire, topic)
    values = [b"small", b"x" * LARGE, b"last"]
    for value in values:
        assert _produce(wire, topic, {0: make_records(2, [value], NOW)})[0]["error_code"] == NONE
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": topic,
            "api.version.request": False,
            "broker.version.fallback": fallback,
            "fetch.message.max.bytes": 1000,
            "fetch.wait.max.ms": 20,
            "enable.auto.commit": False,
        }
    )
    with closing(consumer):
        consumer.assign([TopicPartition(topic, 0, 0)])
        found: list[bytes | None] = []
        deadline = time.monotonic() + 60
        while len(found) < len(values) and time.monotonic() < deadline:
            message = consumer.poll(1)
            if message is not None:
                assert message.error() is None, message.error()
                found.append(message.value())
    assert found == values
