"""Producers and transactions of a log: compared with files of Kafka 3.9.1, and over restarts and crashes."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from spark_klog.errors import DecodeError
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.producer_state import ProducerBatch, ProducerEntry, ProducerState
from spark_klog.wire.checksums import crc32c
from tests.log.faulty_files import FaultyFiles
from tests.log.faulty_logs import FOLDER, Clock
from tests.support.brokers.producer_batches import TIME, batch, marker
from tests.support.checker.log_model import ABORT, COMMIT

GOLDEN = Path(__file__).parent.parent / "data" / "kafka-3.9.1" / "logs" / "v2-transactions-0"


def test_the_transaction_index_is_kafkas_byte_for_byte(tmp_path: Path) -> None:
    """From Kafka's .log files alone we build the same transaction index as Kafka."""
    expected = {path.name: path.read_bytes() for path in GOLDEN.glob("*.txnindex") if path.stat().st_size}
    assert expected
    folder = tmp_path / "v2-transactions-0"
    folder.mkdir()
    for path in GOLDEN.glob("*.log"):
        shutil.copy(path, folder)
    log = PartitionLog(folder, LogConfig(), clean=False)
    assert {path.name: path.read_bytes() for path in folder.glob("*.txnindex")} == expected
    assert log.last_stable_offset == log.end_offset
    # if the index exists, no entry is added twice
    log.close()
    for path in folder.glob("*.snapshot"):
        path.unlink()
    PartitionLog(folder, LogConfig(), clean=False)
    assert {path.name: path.read_bytes() for path in folder.glob("*.txnindex")} == expected


def test_a_snapshot_is_of_kafkas_format() -> None:
    state = ProducerState()
    state.producers[7] = ProducerEntry(3, [ProducerBatch(11, 40, 4, TIME)], TIME, 9, 36)
    assert state.encode() != ProducerState().encode()
    entry = struct.pack(">qhiqiqiq", 7, 3, 11, 40, 4, TIME, 9, 36)
    body = struct.pack(">i", 1) + entry
    assert state.encode() == struct.pack(">hI", 1, crc32c(body)) + body
    again = ProducerState.decode(state.encode())
    assert again.producers == state.producers
    assert again.first_unstable_offset == 36


@given(st.binary(max_size=80) | st.just(ProducerState().encode()), st.integers(0, 79), st.integers(1, 255))
def test_any_bytes_decode_or_raise(data: bytes, place: int, flip: int) -> None:
    state = ProducerState()
    state.producers[1] = ProducerEntry(1, [ProducerBatch(1, 1, 0, TIME)], TIME)
    sound = bytearray(state.encode())
    if place < len(sound):
        sound[place] ^= flip
        with pytest.raises(DecodeError):
            ProducerState.decode(bytes(sound))
    try:
        ProducerState.decode(data)
    except DecodeError:
        pass


@pytest.mark.parametrize("end", ["closed", "killed", "power lost"])
def test_open_and_aborted_transactions_over_restarts(end: str) -> None:
    """Random producers, many small segments and regular restarts, with a dict as the model."""
    rng = random.Random(end)
    config = LogConfig(segment_bytes=600, flush_messages=1)
    files = FaultyFiles()
    log = PartitionLog(FOLDER, config, files=files, now_ms=Clock())
    opened: dict[int, int] = {}
    sequences = dict.fromkeys(range(4), 0)
    aborted: list[tuple[int, int, int]] = []
    for step in range(200):
        producer = rng.randrange(4)
        if producer in opened and rng.random() < 0.4:
            kind = rng.choice([ABORT, COMMIT])
            at = log.append(memoryview(marker(producer, 2, kind))).base_offset
            first = opened.pop(producer)
            if kind == ABORT:
                aborted.append((producer, first, at))
        else:
            records = rng.randrange(1, 4)
            at = log.append(memoryview(batch(producer, 2, sequences[producer], records))).base_offset
            sequences[producer] += records
            opened.setdefault(producer, at)
        if step % 17 == 16:
            if end == "closed":
                log.close()
            else:
                files = files.after_crash(rng, power=end == "power lost")
            point = log.recovery_point
            log = PartitionLog(FOLDER, config, files=files, now_ms=Clock(), clean=end == "closed", recovery_point=point)
        assert log.last_stable_offset == min(opened.values(), default=log.end_offset)
        found = log.aborted_transactions(0, log.end_offset)
        assert [item[:3] for item in found] == aborted
        for known, item in log.producers.producers.items():
            last = item.batches[-1] if item.batches else None
            assert last is None or last.last_sequence == sequences[known] - 1
            assert item.epoch == 2
            assert item.transaction_first_offset == opened.get(known, -1)
    assert len(log.segments) > 10
    assert aborted
    place = log.end_offset // 2
    assert [item[:3] for item in log.aborted_transactions(place, log.end_offset)] == [
        item for item in aborted if item[2] >= place
    ]


def test_reads_stop_at_the_last_stable_offset() -> None:
    files = FaultyFiles()
    log = PartitionLog(FOLDER, LogConfig(), files=files, now_ms=Clock())
    log.append(memoryview(batch(-1, -1, -1, 2, 0)))
    log.append(memoryview(batch(5, 0, 0, 3)))
    log.append(memoryview(batch(-1, -1, -1, 1, 0)))
    assert (log.last_stable_offset, log.high_watermark) == (2, 6)
    found = log.read(0, 1 << 20, log.last_stable_offset)
    everything = log.read(0, 1 << 20)
    assert found is not None
    assert everything is not None
    assert 0 < len(found) < len(everything)
    assert log.read(2, 1 << 20, log.last_stable_offset) is None
    log.append(memoryview(marker(5, 0, COMMIT)))
    assert log.last_stable_offset == log.end_offset == 7


def test_a_new_epoch_begins_anew_and_five_batches_are_remembered() -> None:
    log = PartitionLog(FOLDER, LogConfig(), files=FaultyFiles(), now_ms=Clock())
    for number in range(8):
        log.append(memoryview(batch(1, 0, 10 * number, 10, 0)))
    assert [item.last_sequence for item in log.producers.producers[1].batches] == [39, 49, 59, 69, 79]
    log.append(memoryview(batch(1, 1, 0, 2, 0)))
    assert [item.last_sequence for item in log.producers.producers[1].batches] == [1]
    log.producers.expire(TIME)
    assert 1 in log.producers.producers
    log.producers.expire(TIME + 1)
    assert not log.producers.producers
