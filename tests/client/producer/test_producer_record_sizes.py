"""Records larger than max.request.size or buffer.memory: a producer rejects them, with sizes as of kafka-python."""

from __future__ import annotations

import pyarrow as pa
import pytest
from kafka.record.default_records import DefaultRecordBatchBuilder

from spark_klog.client.cluster import Cluster
from spark_klog.client.producer.producer import Producer
from spark_klog.client.settings import client_config
from spark_klog.errors import RecordTooLargeToSend
from spark_klog.records.contract import Headers
from spark_klog.records.partitioning import largest_size
from tests.support.brokers.model_cluster import ModelCluster

LENGTHS = [0, 1, 63, 64, 8191, 8192, 1 << 20]


@pytest.mark.parametrize("headers", [[], [("ü", b"1"), ("b", None)], [("h", bytes(100))] * 64])
def test_sizes_are_those_of_kafka_python(headers: list[tuple[str, bytes | None]]) -> None:
    for key, value in [(None, None), *((bytes(length), bytes(length)) for length in LENGTHS)]:
        wanted = DefaultRecordBatchBuilder.estimate_size_in_bytes(key, value, headers)
        assert largest_size(key, value, tuple(headers)) == wanted


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("key", "headers"), [(None, ()), (b"k" * 300, ()), (None, [("h", b"v" * 300)]), (None, [("h" * 300, None)])]
)
def test_a_record_that_is_too_large_is_refused_and_others_are_written(key: bytes | None, headers: Headers) -> None:
    limit = DefaultRecordBatchBuilder.estimate_size_in_bytes(key, bytes(500), list(headers))
    settings = {"max.request.size": limit, "linger.ms": 600_000}
    with ModelCluster(1, {"t": 1}) as brokers:
        with Producer({"bootstrap.servers": brokers.servers, **settings}) as producer:
            producer.send("t", b"before")
            with pytest.raises(RecordTooLargeToSend) as refused:
                producer.send("t", bytes(501), key=key, headers=headers)
            fits = producer.send("t", bytes(500), key=key, headers=headers)
            producer.flush()
            assert fits.result(0).offset == 1
        assert brokers.log["t", 0] == [b"before", bytes(500)]
    error = refused.value
    assert (error.topic, error.size, error.limit, error.setting) == ("t", limit + 1, limit, "max.request.size")
    told = rf"a record for t takes {limit + 1} bytes, max.request.size={limit}: it is not sent"
    assert told in str(error)


@pytest.mark.parametrize("setting", ["max.request.size", "buffer.memory"])
@pytest.mark.parametrize(
    ("key", "headers"),
    [(None, None), (b"k" * 300, []), (b"", [("h", b"v" * 300), ("ü", None)]), (None, [("h" * 99, b"")])],
)
def test_a_row_that_is_too_large_is_refused_before_any_is_sent(
    setting: str, key: bytes | None, headers: list[tuple[str, bytes | None]] | None
) -> None:
    limit = DefaultRecordBatchBuilder.estimate_size_in_bytes(key, bytes(500), headers or [])
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    entries = None if headers is None else [{"key": name, "value": content} for name, content in headers]

    def table(length: int) -> pa.Table:
        columns = {
            "key": pa.array([None, b"first", key, None], pa.binary()),
            "value": pa.array([None, bytes(2), bytes(length), b"last"], pa.binary()),
            "headers": pa.array([[], None, entries, [{"key": "a", "value": None}]], kind),
        }
        return pa.table(columns if headers is not None else {name: columns[name] for name in ("key", "value")}).slice(1)

    with ModelCluster(1, {"t": 1}) as brokers:
        with Producer({"bootstrap.servers": brokers.servers, setting: limit}) as producer:
            with pytest.raises(RecordTooLargeToSend) as refused:
                producer.send_arrow(table(501), "t")
            producer.send_arrow(table(500), "t")
        assert brokers.log["t", 0] == [bytes(2), bytes(500), b"last"]
    error = refused.value
    assert (error.topic, error.size, error.limit, error.setting, error.row) == ("t", limit + 1, limit, setting, 1)
    assert f"row 1, a record for t, takes {limit + 1} bytes, {setting}={limit}: it is not sent" in str(error)


def test_the_topic_of_a_row_that_is_too_large_is_named() -> None:
    rows = pa.table({"topic": ["t", "u"], "value": [b"", bytes(2_000_000)]})
    with ModelCluster(1, {"t": 1, "u": 1}) as brokers:
        with Producer({"bootstrap.servers": brokers.servers}) as producer:
            with pytest.raises(RecordTooLargeToSend, match="row 1, a record for u, takes 2000088 bytes"):
                producer.send_arrow(rows)


@pytest.mark.usefixtures("driver")
def test_a_record_beyond_buffer_memory_is_refused_at_once() -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        with Producer({"bootstrap.servers": brokers.servers, "buffer.memory": 1000}) as producer:
            with pytest.raises(RecordTooLargeToSend, match=r"buffer\.memory=1000"):
                producer.send("t", bytes(1000))


def test_the_setting_is_named_as_it_was_typed() -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        settings = {"bootstrap.servers": brokers.servers, "max.request.size": "100"}
        with Producer.of_cluster(Cluster(client_config(settings, "kafka."))) as producer:
            with pytest.raises(RecordTooLargeToSend, match=r"kafka\.max\.request\.size=100"):
                producer.send("t", bytes(100))
