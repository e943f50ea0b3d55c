"""`klog log dump` of index files, compared with Kafka's DumpLogSegments and with bytes made by hand."""

from __future__ import annotations

import json
import re
import struct
import subprocess
from pathlib import Path

import pytest

from spark_klog.log.partition_log import LogConfig, PartitionLog
from tests.support.brokers.batches import make_batch
from tests.support.clients.dump import dump_files
from tests.support.clients.klog import klog
from tests.support.servers.kafka import NEWEST

TRANSACTIONS = Path(__file__).parent.parent / "data" / "kafka-3.9.1" / "logs" / "v2-transactions-0"
_FIELD = re.compile(r"(\w+): (-?\d+)")


def _run(*paths: Path) -> subprocess.CompletedProcess[str]:
    return klog("log", "dump", *map(str, paths))


def _good(*paths: Path) -> list[dict[str, int]]:
    done = _run(*paths)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def _kafkas(*paths: Path) -> list[dict[str, int]]:
    """The fields that DumpLogSegments prints, one dict per line."""
    lines = dump_files(NEWEST, list(paths)).splitlines()
    entries = [{name: int(value) for name, value in _FIELD.findall(line)} for line in lines]
    return [entry for entry in entries if entry]


@pytest.mark.peer
def test_as_dump_log_segments(tmp_path: Path) -> None:
    log = PartitionLog(tmp_path / "t-0", LogConfig(segment_bytes=3000, index_interval_bytes=100))
    for number in range(100):
        log.append(memoryview(make_batch([(b"k", b"v" * 100)] * 2, [1_700_000_000_000 + number] * 2)))
    log.close()
    indexes, time_indexes = (sorted((tmp_path / "t-0").glob(f"*{suffix}")) for suffix in (".index", ".timeindex"))
    assert len(indexes) == len(time_indexes) > 5
    paths = [*indexes, *time_indexes, *TRANSACTIONS.glob("*.txnindex")]
    found = _good(*paths)
    assert found == _kafkas(*paths)
    for name, least in (("position", 80), ("timestamp", 80), ("producerId", 2)):
        assert sum(name in entry for entry in found) > least


def test_entries_made_by_hand(tmp_path: Path) -> None:
    index, time_index, transactions = (tmp_path / f"{1000:020}{s}" for s in (".index", ".timeindex", ".txnindex"))
    index.write_bytes(struct.pack(">iiii", 5, 4100, 2_000_000_000, 9000) + bytes(80_000))
    time_index.write_bytes(struct.pack(">qiqi", 1_700_000_000_000, 0, 1_700_000_000_001, 9) + bytes(1200))
    transactions.write_bytes(struct.pack(">hqqqq", 0, 77, 1001, 1009, 1003))
    assert _good(index, time_index, transactions) == [
        {"offset": 1005, "position": 4100},
        {"offset": 2_000_001_000, "position": 9000},
        {"timestamp": 1_700_000_000_000, "offset": 1000},
        {"timestamp": 1_700_000_000_001, "offset": 1009},
        {"version": 0, "producerId": 77, "firstOffset": 1001, "lastOffset": 1009, "lastStableOffset": 1003},
    ]
    for path in (index, time_index, transactions):
        path.write_bytes(b"")
    assert _good(index, time_index, transactions) == []


def test_damaged_index_files(tmp_path: Path) -> None:
    """Intact entries are printed; zeros between entries do not count as preallocation."""
    index, transactions, other = (tmp_path / name for name in (f"{7:020}.index", f"{7:020}.txnindex", "x.timeindex"))
    index.write_bytes(struct.pack(">iiiiii", 1, 10, 0, 0, 3, 30) + b"\x00\x01\x02")
    transactions.write_bytes(struct.pack(">hqqqq", 1, 1, 2, 3, 4) + struct.pack(">hqqqq", 0, 5, 6, 7, 8) + b"x")
    other.write_bytes(bytes(12))
    done = _run(index, transactions, other)
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("offset", line.get("producerId")) for line in lines] == [8, 7, 10, 5]
    told = [line.split(" bytes: ")[0] for line in done.stderr.splitlines()]
    assert told == [
        f"{index}: position 24, 3",
        f"{transactions}: position 0, 34",
        f"{transactions}: position 68, 1",
        f"{other}: position 0, 12",
    ]
