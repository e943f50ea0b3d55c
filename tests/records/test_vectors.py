"""Segments that Apache Kafka 3.9.1 wrote, against what a real client read from them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from spark_klog.log.transaction_index import read_transaction_index
from spark_klog.records.contract import Record
from spark_klog.records.reader import AbortedTransactions, read_records

DATA = Path(__file__).parent.parent / "data" / "kafka-3.9.1"
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def _line(record: Record) -> dict[str, object]:
    def text(value: bytes | None) -> str | None:
        return None if value is None else base64.b64encode(value).decode()

    return {
        "offset": record.offset,
        "timestamp": record.timestamp,
        "timestampType": record.timestamp_type + 1,
        "key": text(record.key),
        "value": text(record.value),
        "headers": [[name, text(value)] for name, value in record.headers],
    }


def _expected(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def _segments(topic: str) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((DATA / "logs" / f"{topic}-0").glob("*.log")))


@pytest.mark.parametrize("codec", CODECS)
def test_segment_gives_exactly_what_a_client_read(codec: str) -> None:
    assert [_line(record) for record in read_records(_segments(f"v2-{codec}"))] == _expected(f"v2-{codec}")


def test_read_uncommitted_skips_control_batches() -> None:
    read = [_line(record) for record in read_records(_segments("v2-transactions"))]
    assert read == _expected("v2-transactions.read_uncommitted")


def test_read_committed_skips_aborted_transactions() -> None:
    index = DATA / "logs" / "v2-transactions-0" / "00000000000000000005.txnindex"
    aborted = AbortedTransactions((entry.producer_id, entry.first_offset) for entry in read_transaction_index(index))
    read = [_line(record) for record in read_records(_segments("v2-transactions"), aborted)]
    assert read == _expected("v2-transactions.read_committed")
