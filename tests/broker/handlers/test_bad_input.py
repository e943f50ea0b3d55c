"""Malformed input over raw sockets, and requests whose answers are timed."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_klog.errors import ErrorCode
from spark_klog.protocol.apis import API_VERSIONS, CREATE_TOPICS, FETCH, LIST_OFFSETS, METADATA, PRODUCE
from spark_klog.protocol.codec import decode_response, encode_request
from tests.support.brokers.batches import make_batch
from tests.support.brokers.raw_client import CLIENT_ID, RawClient
from tests.support.clients.tools import kcat
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import HOST

NOW = 1_700_000_000_000


@pytest.fixture(scope="module")
def broker(module_server_dir: Path) -> Iterator[KlogBroker]:
    with KlogBroker(module_server_dir, "--set", "socket.request.max.bytes=104857600") as running:
        yield running


@pytest.fixture
def client(broker: KlogBroker) -> Iterator[RawClient]:
    with RawClient(broker.port) as connected:
        yield connected


@pytest.fixture
def partition(broker: KlogBroker, topic: str) -> str:
    """A topic with one partition."""
    with RawClient(broker.port) as connected:
        entry = {"name": topic, "num_partitions": 1, "replication_factor": 1}
        answer = connected.request(CREATE_TOPICS, 2, {"topics": [entry], "timeout_ms": 1000})
        assert answer["topics"][0]["error_code"] == 0
    return topic


def _is_served(broker: KlogBroker) -> bool:
    with RawClient(broker.port, 10) as other:
        return bool(other.request(METADATA, 4, {"topics": []})["brokers"])


def _produce(client: RawClient, topic: str, records: bytes | None, version: int = 8) -> int:
    return client.produce(topic, records, version)[0]


def _end(client: RawClient, topic: str) -> int:
    request = {"replica_id": -1, "topics": [{"name": topic, "partitions": [{"partition_index": 0, "timestamp": -1}]}]}
    answer = client.request(LIST_OFFSETS, 1, request)
    offset: int = answer["topics"][0]["partitions"][0]["offset"]
    return offset


def _own_port(client: RawClient) -> int:
    """The client's port, which identifies it in the broker's log."""
    port: int = client.socket.getsockname()[1]
    return port


@pytest.mark.parametrize("size", [-1, -(2**31), 2**31 - 1, 100 * 1024 * 1024 + 1])
def test_a_wild_frame_length_closes_the_connection(broker: KlogBroker, client: RawClient, size: int) -> None:
    client.socket.sendall(struct.pack(">i", size) + b"some bytes")
    assert client.is_closed()
    told = f"frame of {size} bytes, the limit is 104857600 (socket.request.max.bytes): "
    broker.wait_for_log(f"{HOST}:{_own_port(client)}", told)
    assert _is_served(broker)


@pytest.mark.parametrize(
    "frame",
    [b"", b"\x00", b"\x00\x03\x00\x04\x00\x00\x00\x01", b"\xff" * 50, b"GET / HTTP/1.1\r\n"],
)
def test_a_frame_that_is_no_request_closes_the_connection(broker: KlogBroker, client: RawClient, frame: bytes) -> None:
    client.send_frame(frame)
    assert client.is_closed()
    broker.wait_for_log(f"{HOST}:{_own_port(client)}")
    assert _is_served(broker)


def test_half_a_frame_is_nothing(broker: KlogBroker, client: RawClient) -> None:
    frame = encode_request(METADATA, 4, 1, CLIENT_ID, {"topics": []}).to_bytes()
    client.socket.sendall(struct.pack(">i", len(frame)) + frame[: len(frame) // 2])
    assert _is_served(broker)
    client.socket.shutdown(socket.SHUT_WR)
    assert client.is_closed()


def test_a_byte_at_a_time(client: RawClient) -> None:
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    frame = encode_request(METADATA, 4, 7, CLIENT_ID, {"topics": []}).to_bytes()
    for byte in struct.pack(">i", len(frame)) + frame:
        client.socket.sendall(bytes([byte]))
    _, answer = decode_response(METADATA, 4, client.receive_frame())
    assert [entry["node_id"] for entry in answer["brokers"]] == [0]


def test_many_requests_in_one_segment_are_answered_in_order(client: RawClient) -> None:
    data = b""
    for number in range(200):
        frame = encode_request(METADATA, 4, number, CLIENT_ID, {"topics": []}).to_bytes()
        data += struct.pack(">i", len(frame)) + frame
    client.socket.sendall(data)
    for number in range(200):
        assert decode_response(METADATA, 4, client.receive_frame())[0] == number


@pytest.mark.parametrize(("key", "version"), [(999, 0), (-1, 0), (4, 0), (3, 99), (0, -1)])
def test_an_unknown_api_closes_the_connection(broker: KlogBroker, client: RawClient, key: int, version: int) -> None:
    client.send_frame(struct.pack(">hhih", key, version, 1, len(CLIENT_ID)) + CLIENT_ID.encode() + bytes(20))
    assert client.is_closed()
    broker.wait_for_log(f"{HOST}:{_own_port(client)}", CLIENT_ID, f"API {key} version {version}")
    assert _is_served(broker)


@pytest.mark.parametrize("version", [API_VERSIONS.versions.last + 1, 99, -1])
def test_api_versions_of_an_unknown_version_is_answered_by_version_0(client: RawClient, version: int) -> None:
    client.send_frame(struct.pack(">hhih", 18, version, 7, len(CLIENT_ID)) + CLIENT_ID.encode() + b"\x00\x00\x00\x00")
    answer = client.receive_frame()
    correlation_id, code, count = struct.unpack_from(">ihi", answer)
    assert (correlation_id, code) == (7, 35)
    apis = {struct.unpack_from(">h", answer, 10 + 6 * number)[0] for number in range(count)}
    assert len(answer) == 10 + 6 * count
    assert {0, 1, 3, 18} <= apis
    assert client.request(API_VERSIONS, 0, {})["error_code"] == 0  # the connection still works


def test_a_wrong_crc_is_refused(broker: KlogBroker, client: RawClient, partition: str) -> None:
    good = make_batch([(b"k", b"value")], [NOW])
    for place in (17, 25, 60, len(good) - 1):
        bad = bytearray(good)
        bad[place] ^= 1
        assert _produce(client, partition, bytes(bad)) == ErrorCode.CORRUPT_MESSAGE
    assert _end(client, partition) == 0
    log = broker.data_dir / f"{partition}-0" / f"{0:020d}.log"
    assert not log.exists() or not log.stat().st_size
    assert _produce(client, partition, bytes(good)) == 0
    assert _end(client, partition) == 1


def test_too_large_a_batch_is_refused(client: RawClient, partition: str) -> None:
    assert _produce(client, partition, bytes(make_batch([(None, bytes(1_100_000))], [NOW]))) == 10
    assert _end(client, partition) == 0


@pytest.mark.parametrize("magic", [0, 1])
def test_message_sets_have_their_versions(client: RawClient, partition: str, magic: int) -> None:
    """The message is made by hand: offset, size, CRC, magic, attributes, (timestamp,) key, value."""
    body = struct.pack(">bb", magic, 0) + (struct.pack(">q", NOW) if magic else b"")
    body += struct.pack(">i", -1) + struct.pack(">i", 100) + b"v" * 100
    message = struct.pack(">qiI", 0, len(body) + 4, zlib.crc32(body)) + body
    bad = bytearray(message)
    for place in (14, 16, 40, len(bad) - 1):  # in the CRC, the magic, the value, the end of the value
        bad[place] ^= 1
        assert _produce(client, partition, bytes(message + bad), 2) == ErrorCode.CORRUPT_MESSAGE
        bad[place] ^= 1
    for size in (0, 8, 13, len(body) + 5, 2**31 - 1):
        wild = message[:8] + struct.pack(">i", size) + message[12:]
        assert _produce(client, partition, wild, 2) in (ErrorCode.INVALID_RECORD, ErrorCode.CORRUPT_MESSAGE)
    for version in range(3, 10):
        assert _produce(client, partition, message, version) == ErrorCode.INVALID_RECORD
    assert _end(client, partition) == 0
    for version in range(3):
        assert _produce(client, partition, message, version) == 0
    assert _end(client, partition) == 3


@pytest.mark.parametrize("records", [None, b"", b"x", bytes(100)])
def test_rubbish_instead_of_records_is_refused(client: RawClient, partition: str, records: bytes | None) -> None:
    assert _produce(client, partition, records) in (ErrorCode.INVALID_RECORD, ErrorCode.CORRUPT_MESSAGE, 43)
    assert _end(client, partition) == 0


@pytest.mark.parametrize(("key", "version"), [(3, 4), (3, 9), (0, 8), (1, 11), (1, 12), (19, 5)])
def test_a_wild_array_length_closes_the_connection(
    broker: KlogBroker, client: RawClient, key: int, version: int
) -> None:
    header = struct.pack(">hhih", key, version, 1, len(CLIENT_ID)) + CLIENT_ID.encode()
    fields = {3: b"", 0: struct.pack(">hhi", -1, -1, 1000), 1: struct.pack(">iiiibii", -1, 0, 1, 1, 0, 0, -1), 19: b""}
    before = broker.rss_bytes()
    if (key, version) in ((3, 9), (1, 12), (19, 5)):  # flexible: tags, then the length plus 1 as a varint
        client.send_frame(header + b"\x00" + fields[key] + b"\xff\xff\xff\xff\x0f")
    else:
        client.send_frame(header + fields[key] + b"\x7f\xff\xff\xff")
    assert client.is_closed()
    broker.wait_for_log(f"{HOST}:{_own_port(client)}")
    assert broker.rss_bytes() - before < 20_000_000
    assert _is_served(broker)


def test_announced_frames_cost_no_memory(broker: KlogBroker, partition: str) -> None:
    assert _is_served(broker)
    before = broker.rss_bytes()
    with contextlib.ExitStack() as stack:
        for number in range(200):
            client = stack.enter_context(RawClient(broker.port))
            client.socket.sendall(struct.pack(">i", 100 * 1024 * 1024) + (b"\x00" * 100 if number % 2 else b""))
        assert _is_served(broker)
        kcat("-P", "-b", broker.bootstrap_servers, "-t", partition, stdin=b"served\n")
        assert kcat("-C", "-b", broker.bootstrap_servers, "-t", partition, "-e", "-q") == b"served\n"
        # 200 announced frames are 20 GB; a connection may keep its receive buffers
        assert broker.rss_bytes() - before < 60_000_000
    assert _is_served(broker)


def _fetch(topic: str, offset: int, max_wait_ms: int, min_bytes: int) -> dict[str, Any]:
    partition = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1_000_000}
    topics = [{"topic": topic, "partitions": [partition]}]
    return {"max_wait_ms": max_wait_ms, "min_bytes": min_bytes, "max_bytes": 1_000_000, "topics": topics}


def _answered(answer: dict[str, Any]) -> bytes:
    entry = answer["responses"][0]["partitions"][0]
    assert entry["error_code"] == 0
    return bytes(entry["records"] or b"")


def test_a_fetch_waits_no_longer_than_it_wants(client: RawClient, partition: str) -> None:
    begin = time.monotonic()
    assert _answered(client.request(FETCH, 11, _fetch(partition, 0, 400, 1))) == b""
    assert 0.35 < time.monotonic() - begin < 10
    begin = time.monotonic()
    assert _answered(client.request(FETCH, 11, _fetch(partition, 0, 20_000, 0))) == b""
    assert time.monotonic() - begin < 10


def test_a_waiting_fetch_is_answered_by_a_produce(broker: KlogBroker, client: RawClient, partition: str) -> None:
    batch = make_batch([(b"k", b"value")], [NOW])
    for number in range(5):
        client.send_frame(encode_request(FETCH, 11, 7, CLIENT_ID, _fetch(partition, number, 15_000, 1)).to_bytes())
        client.socket.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.socket.recv(1)
        client.socket.settimeout(20)
        with RawClient(broker.port) as producer:
            begin = time.monotonic()
            assert _produce(producer, partition, bytes(batch)) == 0
        records = _answered(decode_response(FETCH, 11, client.receive_frame())[1])
        assert time.monotonic() - begin < 10
        assert records == struct.pack(">q", number) + batch[8:12] + bytes(4) + batch[16:]


def test_min_bytes_are_awaited(broker: KlogBroker, client: RawClient, partition: str) -> None:
    batch = make_batch([(None, bytes(1000))], [NOW])
    answers: list[bytes] = []
    wanted = _fetch(partition, 0, 15_000, 3 * len(batch))

    def fetch() -> None:
        answers.append(_answered(client.request(FETCH, 11, wanted)))

    waiting = threading.Thread(target=fetch)
    waiting.start()
    with RawClient(broker.port) as producer:
        for _ in range(2):
            assert _produce(producer, partition, bytes(batch)) == 0
            waiting.join(0.2)
            assert waiting.is_alive()
        begin = time.monotonic()
        assert _produce(producer, partition, bytes(batch)) == 0
    waiting.join(10)
    assert time.monotonic() - begin < 10
    assert [len(answer) for answer in answers] == [3 * len(batch)]


def test_a_client_that_goes_away_while_it_waits_is_forgotten(broker: KlogBroker, partition: str) -> None:
    for _ in range(50):
        with RawClient(broker.port) as gone:
            gone.send_frame(encode_request(FETCH, 11, 7, CLIENT_ID, _fetch(partition, 0, 60_000, 1)).to_bytes())
    with RawClient(broker.port) as producer:
        assert _produce(producer, partition, bytes(make_batch([(None, b"v")], [NOW]))) == 0
    assert _is_served(broker)
    assert "Traceback" not in broker.log.read_text()


def test_a_client_that_does_not_read_blocks_no_other(broker: KlogBroker, partition: str) -> None:
    with RawClient(broker.port) as producer:
        for _ in range(20):
            assert _produce(producer, partition, bytes(make_batch([(None, bytes(900_000))], [NOW]))) == 0
    before = broker.rss_bytes()
    request = _fetch(partition, 0, 0, 1) | {"max_bytes": 50_000_000}
    request["topics"][0]["partitions"][0]["partition_max_bytes"] = 50_000_000
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            lazy = stack.enter_context(RawClient(broker.port))
            for _ in range(5):
                lazy.send_frame(encode_request(FETCH, 11, 7, CLIENT_ID, request).to_bytes())
        for _ in range(5):
            assert _is_served(broker)
        assert broker.rss_bytes() - before < 60_000_000
    assert _is_served(broker)


def test_acks_0_failing_closes_the_connection(client: RawClient, partition: str) -> None:
    data = [{"name": partition, "partition_data": [{"index": 9, "records": bytes(make_batch([(None, b"v")], [NOW]))}]}]
    message = {"acks": 0, "timeout_ms": 1000, "topic_data": data}
    client.send_frame(encode_request(PRODUCE, 8, 7, CLIENT_ID, message).to_bytes())
    assert client.is_closed()
