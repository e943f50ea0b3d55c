"""How a broker stops: acknowledged records are kept, waiting clients get answers, the next start need not recover."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Message, Producer

from spark_klog.protocol.apis import DESCRIBE_GROUPS, FETCH, JOIN_GROUP, PRODUCE
from spark_klog.protocol.codec import decode_response, encode_request
from tests.support.brokers.batches import make_batch
from tests.support.brokers.raw_client import RawClient
from tests.support.clients.tools import kcat
from tests.support.servers.broker import KlogBroker, broker_command
from tests.support.servers.certificates import make_certificates, trusting
from tests.support.servers.kafka import HOST, free_port
from tests.support.servers.secure_broker import SecureBroker
from tests.support.waiting import wait_until

#: Longer than a stop waits for requests under way (5 s), shorter than a fetch or a member waits.
_SECONDS = 20.0
_UNDER_WAY = "connections closed with requests under way"


def wait_request(offset: int) -> bytes:
    """A fetch that waits half a minute for a record."""
    partition = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1000}
    message = {"max_wait_ms": 30_000, "min_bytes": 1, "topics": [{"topic": "t", "partitions": [partition]}]}
    return encode_request(FETCH, 4, 7, "waits", message).to_bytes()


def state_of_group(client: RawClient) -> str:
    (group,) = client.request(DESCRIBE_GROUPS, 0, {"groups": ["g"]})["groups"]
    return str(group["group_state"])


def read_all_before(broker: KlogBroker) -> None:
    """Return when the broker has read what other connections sent: it answers one that comes after them."""
    for _ in range(2):
        with RawClient(broker.port) as last:
            last.fetch("t", 0, 4)


def test_under_load_nothing_acknowledged_is_lost_and_the_next_start_is_clean(server_dir: Path) -> None:
    broker = KlogBroker(server_dir, "--set", "num.partitions=2", "--set", "internal.segment.bytes=200000")
    broker.start()
    kcat("-P", "-b", broker.bootstrap_servers, "-t", "t", "-p", "0", stdin=b"0\n")
    acknowledged: set[int] = set()
    is_writing, done = threading.Event(), threading.Event()

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is None:
            acknowledged.add(int(message.value() or b""))
            if len(acknowledged) > 500:
                is_writing.set()

    def write(first: int) -> None:
        settings = {"bootstrap.servers": broker.bootstrap_servers, "acks": "all", "linger.ms": 1, "log_level": 0}
        producer = Producer(settings | {"batch.num.messages": 20, "message.timeout.ms": 1000, "retries": 0})
        number = first
        while not done.is_set():
            producer.produce("t", str(number), on_delivery=delivered)
            number += 4
            producer.poll(0.0002)
        producer.flush(2)

    writers = [threading.Thread(target=write, args=(first,)) for first in range(4)]
    for writer in writers:
        writer.start()
    try:
        assert is_writing.wait(20)
        began = time.monotonic()
        assert broker.stop() == 0
        assert time.monotonic() - began < _SECONDS
    finally:
        done.set()
        for writer in writers:
            writer.join()
    assert (broker.data_dir / ".kafka_cleanshutdown").exists()
    assert _UNDER_WAY not in broker.log.read_text()
    before = broker.log.stat().st_size
    broker.start()
    started = broker.log.read_text()[before:]
    assert f"{broker.data_dir}: 2 partitions, clean stop before" in started
    assert "recover" not in started
    lines = kcat(
        "-C", "-b", broker.bootstrap_servers, "-t", "t", "-o", "beginning", "-e", "-q", "-X", "check.crcs=true"
    )
    assert len(acknowledged) > 500
    assert acknowledged <= {int(line) for line in lines.split()}
    broker.stop()


def test_tls_clients_that_do_not_read_hold_up_no_stop(server_dir: Path) -> None:
    """Such a client never agrees to close TLS; asyncio's transport breaks if it is closed again meanwhile."""
    with SecureBroker(server_dir, make_certificates(server_dir / "certificates")) as broker:
        context = trusting(broker.certificates.ca)
        context.check_hostname = False
        raw = socket.create_connection((HOST, broker.ports["SSL"]), 20)
        with context.wrap_socket(raw) as silent, socket.create_connection((HOST, broker.ports["SSL"]), 20):
            silent.sendall(b"\0\0")  # half of a size: the broker has read it when it answers the next client
            read_all_before(broker)
            assert broker.stop() == 0
        log = broker.log.read_text()
    assert "Traceback" not in log
    assert (broker.data_dir / ".kafka_cleanshutdown").exists()


def test_waiting_fetches_are_answered_at_once_and_silent_clients_are_closed(server_dir: Path) -> None:
    with KlogBroker(server_dir) as broker:
        kcat("-P", "-b", broker.bootstrap_servers, "-t", "t", stdin=b"record\n")
        waiting = [RawClient(broker.port) for _ in range(3)]
        for client in waiting:
            client.send_frame(wait_request(1))
        half = RawClient(broker.port)
        half.socket.sendall(b"\x00\x00\x01\x00half")
        silent = RawClient(broker.port)
        read_all_before(broker)
        began = time.monotonic()
        assert broker.stop() == 0
        assert time.monotonic() - began < _SECONDS
        assert _UNDER_WAY not in broker.log.read_text()
        for client in waiting:
            _, answer = decode_response(FETCH, 4, client.receive_frame())
            (partition,) = answer["responses"][0]["partitions"]
            assert (partition["error_code"], bytes(partition["records"] or b"")) == (0, b"")
            assert partition["high_watermark"] == 1
            assert client.is_closed()
        assert half.is_closed()
        assert silent.is_closed()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, broker.port), 5)


def test_requests_that_had_arrived_are_answered(server_dir: Path) -> None:
    """A fetch that waits holds up the produce requests behind it, on the same connection."""
    with KlogBroker(server_dir) as broker:
        kcat("-P", "-b", broker.bootstrap_servers, "-t", "t", stdin=b"record\n")
        client = RawClient(broker.port)
        client.send_frame(wait_request(1))
        for number in range(10):
            records = bytes(make_batch([(None, f"value {number}".encode())], [0]))
            data = [{"name": "t", "partition_data": [{"index": 0, "records": records}]}]
            message = {"acks": 1, "timeout_ms": 1000, "topic_data": data}
            client.send_frame(encode_request(PRODUCE, 3, number, "sends", message).to_bytes())
        read_all_before(broker)
        assert broker.stop() == 0
        client.receive_frame()
        for number in range(10):
            correlation_id, answer = decode_response(PRODUCE, 3, client.receive_frame())
            (partition,) = answer["responses"][0]["partition_responses"]
            assert (correlation_id, partition["error_code"], partition["base_offset"]) == (number, 0, number + 1)
        broker.start()
        lines = kcat("-C", "-b", broker.bootstrap_servers, "-t", "t", "-o", "beginning", "-e", "-q")
        assert lines.split(b"\n")[1:-1] == [f"value {number}".encode() for number in range(10)]


@pytest.mark.parametrize("signals", [pytest.param(1, marks=pytest.mark.test_all("long")), 2])
def test_a_client_that_takes_no_answers_holds_nobody_up_and_a_second_signal_waits_for_nobody(
    server_dir: Path, signals: int
) -> None:
    port = free_port()
    log = server_dir / "log"
    with log.open("wb") as file:
        command = broker_command(server_dir / "data", port)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        kcat("-P", "-b", f"{HOST}:{port}", "-t", "t", stdin=b"x" * 900_000 + b"\n")
        deaf = RawClient(port)
        partition = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 10_000_000}
        message = {"max_wait_ms": 0, "topics": [{"topic": "t", "partitions": [partition]}]}
        for number in range(30):
            deaf.send_frame(encode_request(FETCH, 4, number, "deaf", message).to_bytes())
        assert deaf.socket.recv(1, socket.MSG_PEEK)
        time.sleep(0.5)  # until the socket buffers are full
        began = time.monotonic()
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: "stopping" in log.read_text())  # two signals at once count as one
        assert process.wait(20) == 0
        took = time.monotonic() - began
    finally:
        process.kill()
        process.wait()
    assert f"1 {_UNDER_WAY}" in log.read_text()
    assert (server_dir / "data" / ".kafka_cleanshutdown").exists()
    assert took > 4 if signals == 1 else took < 4


def test_members_that_wait_for_a_rebalance_are_answered(server_dir: Path) -> None:
    with KlogBroker(server_dir, "--set", "group.initial.rebalance.delay.ms=30000") as broker:
        client = RawClient(broker.port)
        protocols = [{"name": "range", "metadata": b""}]
        join = {"group_id": "g", "session_timeout_ms": 30_000, "rebalance_timeout_ms": 60_000, "member_id": ""}
        message = join | {"protocol_type": "consumer", "protocols": protocols}
        client.send_frame(encode_request(JOIN_GROUP, 1, 7, "joins", message).to_bytes())
        with RawClient(broker.port) as other:
            wait_until(lambda: state_of_group(other) == "PreparingRebalance")
        began = time.monotonic()
        assert broker.stop() == 0
        assert time.monotonic() - began < _SECONDS
        assert _UNDER_WAY not in broker.log.read_text()
        _, answer = decode_response(JOIN_GROUP, 1, client.receive_frame())
        assert answer["error_code"] == 15  # the client looks for the coordinator again
