"""The metrics, read as Prometheus reads them, compared with what real clients have done."""

from __future__ import annotations

import http.client
import math
import random
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from prometheus_client.parser import text_string_to_metric_families

from spark_klog.broker import metrics_page
from spark_klog.broker.broker import Broker
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.metrics import COUNTER, GAUGE, HISTOGRAM, Family, Histogram, lines
from spark_klog.protocol.apis import FETCH
from spark_klog.protocol.codec import encode_request
from spark_klog.wire.http import Request, parse_head
from tests.support.brokers.batches import make_batch
from tests.support.brokers.logs import add_log
from tests.support.brokers.raw_client import RawClient
from tests.support.clients.tools import kcat
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import HOST, free_port
from tests.support.servers.samples import Samples, ask, parsed, scrape


class Measured(KlogBroker):
    """A broker with metrics."""

    def __init__(self, work_dir: Path, *arguments: str) -> None:
        self.metrics_port = free_port()
        super().__init__(work_dir, "--metrics", f"{HOST}:{self.metrics_port}", *arguments)

    def ask(self, method: str = "GET", target: str = "/metrics") -> tuple[http.client.HTTPResponse, bytes]:
        return ask(f"{HOST}:{self.metrics_port}", method, target)

    def samples(self) -> Samples:
        return scrape(f"{HOST}:{self.metrics_port}")


def value(samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return samples[f"klog_broker_{name}", frozenset(labels.items())]


@pytest.fixture
def broker(server_dir: Path) -> Iterator[Measured]:
    with Measured(server_dir, "--set", "num.partitions=2", "--set", "internal.segment.bytes=5000") as running:
        yield running


def produce(broker: KlogBroker, topic: str, count: int) -> dict[int, int]:
    """Produce `count` records; return how many each partition has got."""
    by_partition: dict[int, int] = {}
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 20, "log_level": 0})
    for number in range(count):
        producer.produce(
            topic,
            f"record {number} " + "x" * 100,
            on_delivery=lambda _, message: by_partition.update(
                {message.partition(): by_partition.get(message.partition(), 0) + 1}
            ),
            partition=number % 3 % 2,
        )
        if number % 40 == 0:
            producer.flush(10)
    assert producer.flush(10) == 0
    return by_partition


def test_what_clients_did_is_told(broker: Measured) -> None:
    produced = produce(broker, "clicks", 300)
    assert sum(produced.values()) == 300
    consumed = kcat("-C", "-b", broker.bootstrap_servers, "-t", "clicks", "-o", "beginning", "-e", "-q")
    assert consumed.count(b"\n") == 300
    consumer = Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "group.id": "readers", "enable.auto.commit": False}
    )
    consumer.commit(offsets=[TopicPartition("clicks", 0, 150), TopicPartition("clicks", 1, 100)], asynchronous=False)
    consumer.close()

    samples = broker.samples()
    files = {partition: sorted((broker.data_dir / f"clicks-{partition}").glob("*.log")) for partition in produced}
    sizes = {partition: sum(path.stat().st_size for path in paths) for partition, paths in files.items()}
    assert value(samples, "records_in_total", topic="clicks") == 300
    assert value(samples, "bytes_in_total", topic="clicks") == sum(sizes.values())
    # one reader has read everything once; a fetch may end within a batch, which is sent again
    assert value(samples, "records_out_total", topic="clicks") == 300
    assert value(samples, "bytes_out_total", topic="clicks") >= sum(sizes.values())
    for partition, count in produced.items():
        labels = {"topic": "clicks", "partition": str(partition)}
        assert value(samples, "log_end_offset", **labels) == count
        assert value(samples, "log_start_offset", **labels) == 0
        assert value(samples, "log_size_bytes", **labels) == sizes[partition]
        assert value(samples, "log_segments", **labels) == len(files[partition]) > 1
    assert value(samples, "group_lag", group="readers", topic="clicks", partition="0") == produced[0] - 150
    assert value(samples, "group_lag", group="readers", topic="clicks", partition="1") == produced[1] - 100
    assert value(samples, "records_in_total", topic="__consumer_offsets") == 2
    assert value(samples, "log_flushes_total", topic="clicks") == sum(len(paths) - 1 for paths in files.values())

    assert value(samples, "requests_total", api="Produce") >= 300 / 40
    assert value(samples, "requests_total", api="OffsetCommit") == 1
    for api in ("Produce", "Fetch", "OffsetCommit"):
        count = value(samples, "request_seconds_count", api=api)
        assert count == value(samples, "requests_total", api=api)
        assert count == value(samples, "request_seconds_bucket", api=api, le="+Inf")
        assert 0 < value(samples, "request_seconds_sum", api=api) < 60
    assert value(samples, "offline_partitions") == 0
    resident = samples["process_resident_memory_bytes", frozenset()]
    assert resident == pytest.approx(broker.rss_bytes(), rel=0.2)
    (build,) = [labels for name, labels in samples if name == "klog_broker_build_info"]
    assert dict(build)["kernel"] in ("native", "reference")


def test_connections_and_waiting_fetches_and_errors(broker: Measured) -> None:
    produce(broker, "t", 10)
    before = broker.samples()
    waiting = RawClient(broker.port)
    partition = {"partition": 0, "fetch_offset": value(before, "log_end_offset", topic="t", partition="0")}
    partition = {name: int(number) for name, number in partition.items()} | {"partition_max_bytes": 1000}
    request = {"max_wait_ms": 100_000, "min_bytes": 1, "topics": [{"topic": "t", "partitions": [partition]}]}
    waiting.send_frame(encode_request(FETCH, 4, 1, "waits", request).to_bytes())
    wrong = RawClient(broker.port)
    assert wrong.fetch("t", 10_000, 4)[0] == 1
    wrong.send_frame(b"\xff\xff\xff\xff\xff")
    assert wrong.is_closed()
    deadline = time.monotonic() + 60
    while value(samples := broker.samples(), "purgatory_size") != 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert value(samples, "purgatory_size") == 1
    assert value(samples, "connections") == 1
    assert value(samples, "connections_total") - value(before, "connections_total") == 2
    assert value(samples, "connections_dropped_total") - value(before, "connections_dropped_total") == 1
    assert value(samples, "errors_total", api="Fetch", code="OFFSET_OUT_OF_RANGE") == 1
    time.sleep(0.3)
    produce(broker, "t", 10)
    waiting.receive_frame()
    after = broker.samples()
    assert value(after, "purgatory_size") == 0
    soon = value(after, "request_seconds_bucket", api="Fetch", le="0.25")
    assert value(after, "request_seconds_count", api="Fetch") - soon >= 1
    assert value(after, "request_seconds_sum", api="Fetch") >= 0.3


def test_a_deleted_topic_is_no_longer_told(broker: Measured) -> None:
    produce(broker, "gone", 5)
    kcat("-C", "-b", broker.bootstrap_servers, "-t", "gone", "-o", "beginning", "-e", "-q")
    assert value(broker.samples(), "records_out_total", topic="gone") == 5
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
    admin.delete_topics(["gone"])["gone"].result(10)
    assert not [labels for _, labels in broker.samples() if ("topic", "gone") in labels]


def test_http(broker: Measured) -> None:
    response, body = broker.ask("HEAD")
    assert (response.status, body) == (200, b"")
    assert int(response.getheader("Content-Length") or 0) > 1000
    assert broker.ask(target="/metrics?name=x")[0].status == 200
    assert broker.ask(target="/")[0].status == 404
    response, _ = broker.ask("POST")
    assert (response.status, response.getheader("Allow")) == (405, "GET, HEAD")
    for data, status in (
        (b"x" * 10_000, b"431"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET  /metrics HTTP/2\r\n\r\n", b"400"),
    ):
        with socket.create_connection((HOST, broker.metrics_port), 10) as client:
            client.sendall(data)
            assert client.recv(100).startswith(b"HTTP/1.1 " + status)


def test_a_metric_has_so_many_samples_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "MAX_SERIES", 3)
    broker = Broker(BrokerConfig(HOST, 0, tmp_path))
    for partition in range(5):
        add_log(broker.logs, "t", partition)
    samples = parsed("".join(metrics_page.page(broker, 0)))
    broker.close()
    assert len([name for name, _ in samples if name == "klog_broker_log_end_offset"]) == 3
    assert value(samples, "series_left_out", metric="klog_broker_log_end_offset") == 2


@pytest.mark.parametrize("interval", [1, 700, 4096])
def test_records_of_a_range_are_those_of_its_whole_batches(tmp_path: Path, interval: int) -> None:
    log = PartitionLog(tmp_path / "t-0", LogConfig(index_interval_bytes=interval, segment_bytes=20_000))
    rng = random.Random(interval)
    for _ in range(60):
        count = rng.randrange(1, 20)
        log.append(memoryview(make_batch([(None, b"x" * rng.randrange(200))] * count, [0] * count)))
    for _ in range(300):
        found = log.read(rng.randrange(log.end_offset), rng.randrange(1, 8000))
        assert found is not None
        data, position, records = found.read(), 0, 0
        while len(data) - position >= 61:
            size = 12 + int.from_bytes(data[position + 8 : position + 12], "big")
            if position + size <= len(data):
                records += int.from_bytes(data[position + 57 : position + 61], "big")
            position += size
        assert log.records_in(found) == records > 0
    log.close()


def test_without_the_option_nothing_listens(server_dir: Path) -> None:
    with KlogBroker(server_dir) as plain:
        listening = [line.split() for line in Path(f"/proc/{plain.pid}/net/tcp").read_text().splitlines()[1:]]
        inodes = {row[9] for row in listening if row[3] == "0A"}
        mine = {path.readlink().name for path in Path(f"/proc/{plain.pid}/fd").iterdir() if path.is_symlink()}
        assert len({f"socket:[{inode}]" for inode in inodes} & mine) == 1


def test_the_format_is_what_the_parser_reads() -> None:
    odd = 'a "quoted" \\ back\\nslash\nand a line'
    families = [
        Family("plain", GAUGE, odd, (), [((), -1.5)]),
        Family("labelled_total", COUNTER, "Some", ("name", "other"), [((odd, ""), 3), (("é", "x"), 2**60)]),
        Family("times", HISTOGRAM, "Of", ("api",), [(("A",), Histogram((0.1, 1.0), (2, 0, 5), 7.25))]),
        Family("none_total", COUNTER, "No samples", ("x",), []),
    ]
    text = "".join(line for family in families for line in lines(family))
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert [found[name].type for name in ("plain", "labelled", "times", "none")] == [
        "gauge",
        "counter",
        "histogram",
        "counter",
    ]
    assert found["plain"].documentation == odd
    assert parsed(text) == {
        ("plain", frozenset()): -1.5,
        ("labelled_total", frozenset({("name", odd), ("other", "")})): 3,
        ("labelled_total", frozenset({("name", "é"), ("other", "x")})): 2**60,
        ("times_bucket", frozenset({("api", "A"), ("le", "0.1")})): 2,
        ("times_bucket", frozenset({("api", "A"), ("le", "1.0")})): 2,
        ("times_bucket", frozenset({("api", "A"), ("le", "+Inf")})): 7,
        ("times_sum", frozenset({("api", "A")})): 7.25,
        ("times_count", frozenset({("api", "A")})): 7,
    }
    assert not any(math.isnan(number) for number in parsed(text).values())


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", ("GET", "/metrics", {"host": "x"}, None, "")),
        (b"HEAD /metrics?x=1 HTTP/1.0\r\n\r\n", ("HEAD", "/metrics", {}, None, "x=1")),
        (b"GET /metrics\r\n\r\n", None),
        (b"\r\n\r\n", None),
    ],
)
def test_the_head_of_a_request(head: bytes, expected: tuple[str, str, dict[str, str], None, str] | None) -> None:
    found = parse_head(head, client=None)  # type: ignore[arg-type]
    assert found == (expected and Request(*expected))  # type: ignore[arg-type]
