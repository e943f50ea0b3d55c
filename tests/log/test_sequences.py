"""Epochs and sequences of producers: the rules, a model of them, and restarts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.errors import DecodeError, ErrorCode
from spark_klog.log.config import LOG_APPEND_TIME, LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.producer_state import ProducerRefused
from spark_klog.records.formats.batch_v2 import read_batch_header
from tests.log.faulty_files import FaultyFiles
from tests.log.faulty_logs import FOLDER, Clock
from tests.support.brokers.logs import append_of_client
from tests.support.brokers.producer_batches import TIME, batch, marker
from tests.support.checker.log_model import COMMIT, TRANSACTIONAL

OUT_OF_ORDER, OLD_EPOCH = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.INVALID_PRODUCER_EPOCH
LAST = 0x7FFFFFFF


def new_log(config: LogConfig | None = None) -> PartitionLog:
    return PartitionLog(FOLDER, config or LogConfig(), files=FaultyFiles(), now_ms=Clock())


def send(log: PartitionLog, *batches: bytearray) -> tuple[int, int] | ErrorCode:
    """Append batches as a client; return the first and last offset, or the error code."""
    end, state = log.end_offset, log.producers.encode()
    try:
        return append_of_client(log, b"".join(batches))[:2]
    except ProducerRefused as error:
        assert (log.end_offset, log.producers.encode()) == (end, state)
        return error.code


def plain(epoch: int, sequence: int, records: int = 1, producer: int = 1) -> bytearray:
    return batch(producer, epoch, sequence, records, 0)


def test_the_next_sequence_is_taken_and_no_other() -> None:
    log = new_log()
    assert send(log, plain(0, 0, 3)) == (0, 2)
    assert send(log, plain(0, 2)) == OUT_OF_ORDER
    assert send(log, plain(0, 4)) == OUT_OF_ORDER
    assert send(log, plain(0, 3, 2)) == (3, 4)
    assert send(log, plain(0, 0, 1, producer=2)) == (5, 5)


def test_an_unknown_producer_begins_anywhere() -> None:
    log = new_log()
    assert send(log, plain(3, 17, 2)) == (0, 1)
    assert send(log, plain(3, 19)) == (2, 2)


def test_nothing_comes_before_what_was_refused() -> None:
    """An unknown producer must send its refused batch again, or begin a later epoch."""
    log = new_log()
    for sequence in (7, 3, 5):
        log.note_refused(read_batch_header(plain(1, sequence)))
    assert send(log, plain(1, 4)) == OUT_OF_ORDER
    assert send(log, plain(1, 4, producer=2)) == (0, 0)
    assert send(log, plain(1, 3)) == (1, 1)
    assert send(log, plain(1, 4, 3)) == (2, 4)
    log.note_refused(read_batch_header(plain(1, 0, producer=3)))
    log.note_refused(read_batch_header(plain(2, 4, producer=3)))
    log.note_refused(read_batch_header(plain(1, 1, producer=3)))
    assert send(log, plain(2, 5, producer=3)) == OUT_OF_ORDER
    assert send(log, plain(3, 5, producer=3)) == (5, 5)


def test_what_was_refused_is_forgotten_after_a_day() -> None:
    clock = Clock()
    log = PartitionLog(FOLDER, LogConfig(), files=FaultyFiles(), now_ms=clock)
    log.note_refused(read_batch_header(plain(1, 0)))
    log.forget_producers()
    assert send(log, plain(1, 4)) == OUT_OF_ORDER
    clock.now += 2 * 24 * 3600 * 1000
    log.forget_producers()
    assert send(log, plain(1, 4)) == (0, 0)


def test_so_many_refused_producers_are_remembered_and_no_more() -> None:
    log = new_log()
    for producer in range(10_001):
        log.note_refused(read_batch_header(plain(1, 0, producer=producer)))
    assert send(log, plain(1, 4, producer=1)) == OUT_OF_ORDER
    assert send(log, plain(1, 4, producer=0)) == (0, 0)


def test_the_last_five_batches_are_duplicates_and_the_sixth_is_none() -> None:
    log = new_log()
    for number in range(6):
        assert send(log, plain(0, 10 * number, 10)) == (10 * number, 10 * number + 9)
    assert [send(log, plain(0, 10 * number, 10)) for number in range(1, 6)] == [
        (10 * number, 10 * number + 9) for number in range(1, 6)
    ]
    assert send(log, plain(0, 0, 10)) == OUT_OF_ORDER
    assert send(log, plain(0, 50, 9)) == OUT_OF_ORDER  # the same first sequence as one of them, but another count
    assert log.end_offset == 60


def test_epochs() -> None:
    log = new_log()
    send(log, plain(2, 0))
    assert send(log, plain(1, 1)) == OLD_EPOCH
    assert send(log, plain(3, 1)) == OUT_OF_ORDER
    assert send(log, plain(3, 0)) == (1, 1)
    assert send(log, plain(2, 0)) == OLD_EPOCH
    assert send(log, plain(3, 0)) == (1, 1)


def test_sequences_wrap() -> None:
    log = new_log()
    assert send(log, plain(0, LAST - 1, 2)) == (0, 1)
    assert send(log, plain(0, 1)) == OUT_OF_ORDER
    assert send(log, plain(0, 0)) == (2, 2)
    log = new_log()
    assert send(log, plain(0, LAST, 3)) == (0, 2)  # wraps within a batch
    assert send(log, plain(0, 2)) == (3, 3)
    assert send(log, plain(0, LAST, 3)) == (0, 2)


def test_several_batches_at_once_are_all_taken_or_none() -> None:
    log = new_log()
    both = plain(0, 0, 2), plain(0, 2, 2)
    assert send(log, *both) == (0, 3)
    assert send(log, *both) == (0, 3)
    assert send(log, plain(0, 4), plain(0, 6)) == OUT_OF_ORDER
    assert send(log, plain(0, 2, 2), plain(0, 4)) == OUT_OF_ORDER  # a duplicate and a new one
    assert send(log, plain(0, 4), plain(0, 0, 1, producer=2), plain(0, 5)) == (4, 6)
    assert send(log, plain(1, 0), plain(0, 6)) == OLD_EPOCH


@pytest.mark.parametrize(("epoch", "sequence"), [(-1, 0), (0, -1)])
def test_numbers_below_0(epoch: int, sequence: int) -> None:
    log = new_log()
    with pytest.raises(DecodeError, match="negative epoch or sequence"):
        send(log, plain(epoch, sequence))
    assert log.end_offset == 0


def test_in_a_transaction_nothing_else_is_sent() -> None:
    log = new_log()
    assert send(log, batch(1, 0, 0, 1, TRANSACTIONAL)) == (0, 0)
    assert send(log, plain(0, 1)) == ErrorCode.INVALID_TXN_STATE
    log.append(memoryview(marker(1, 0, COMMIT)))
    assert send(log, plain(0, 1)) == (2, 2)


def test_markers_fence() -> None:
    log = new_log()
    send(log, batch(1, 4, 0, 1, TRANSACTIONAL))
    log.append(memoryview(marker(1, 5, COMMIT)))
    assert send(log, batch(1, 4, 1, 1, TRANSACTIONAL)) == OLD_EPOCH
    with pytest.raises(ProducerRefused) as refused:
        log.append(memoryview(marker(1, 4, COMMIT)))
    assert refused.value.code == OLD_EPOCH
    assert send(log, batch(1, 5, 1, 1, TRANSACTIONAL)) == OUT_OF_ORDER
    assert send(log, batch(1, 5, 0, 1, TRANSACTIONAL)) == (2, 2)


def test_a_coordinator_of_before_is_fenced() -> None:
    log = new_log()
    log.append(memoryview(marker(1, 0, COMMIT)))  # has coordinator epoch 4
    log.producers.producers[1].coordinator_epoch = 5
    with pytest.raises(ProducerRefused) as refused:
        log.append(memoryview(marker(1, 0, COMMIT)))
    assert refused.value.code == ErrorCode.TRANSACTION_COORDINATOR_FENCED


def test_a_duplicate_has_the_time_of_its_first_append() -> None:
    clock = Clock()
    config = LogConfig(message_timestamp_type=LOG_APPEND_TIME)
    log = PartitionLog(FOLDER, config, files=FaultyFiles(), now_ms=clock)
    first = append_of_client(log, plain(0, 0))
    clock.now += 1000
    later = append_of_client(log, plain(0, 1))
    assert later.append_time > first.append_time > 0
    assert append_of_client(log, plain(0, 0)) == first


@pytest.mark.parametrize("end", ["closed", "killed", "power lost"])
@pytest.mark.parametrize("segment_bytes", [600, 1 << 20])
def test_duplicates_are_known_after_a_restart(end: str, segment_bytes: int) -> None:
    """All of the last five are known, even if only a snapshot has them."""
    rng = random.Random(end)
    files = FaultyFiles()
    config = LogConfig(segment_bytes=segment_bytes, flush_messages=1)
    log = PartitionLog(FOLDER, config, files=files, now_ms=Clock())
    sent: list[tuple[int, int, tuple[int, int] | ErrorCode]] = []
    sequence = 0
    for step in range(60):
        records = rng.randrange(1, 4)
        sent.append((sequence, records, send(log, plain(7, sequence, records))))
        sequence += records
        send(log, plain(0, step, producer=2))
        if step % 9 == 8:
            if end == "closed":
                log.close()
            else:
                files = files.after_crash(rng, power=end == "power lost")
            point = log.recovery_point
            log = PartitionLog(FOLDER, config, files=files, now_ms=Clock(), clean=end == "closed", recovery_point=point)
            assert [send(log, plain(7, first, count)) for first, count, _ in sent[-5:]] == [
                answer for *_, answer in sent[-5:]
            ]
            assert send(log, plain(7, *sent[-6][:2])) == OUT_OF_ORDER
    assert not any(isinstance(answer, ErrorCode) for *_, answer in sent)


@dataclass
class Model:
    """Kafka's rules, applied to a producer's whole history of (epoch, sequences of a batch, first offset)."""

    history: list[tuple[int, range, int]] = field(default_factory=list)
    end: int = 0

    def send(self, epoch: int, sequence: int, records: int) -> tuple[int, int] | ErrorCode:
        wanted = epoch, range(sequence, sequence + records)
        for known_epoch, known, offset in self.history[-5:]:
            if (known_epoch, known) == wanted and known_epoch == self.history[-1][0]:
                return offset, offset + records - 1
        if self.history:
            last_epoch, last, _ = self.history[-1]
            if epoch < last_epoch:
                return OLD_EPOCH
            if sequence != (0 if epoch > last_epoch else last.stop):
                return OUT_OF_ORDER
        self.history.append((*wanted, self.end))
        self.end += records
        return self.end - records, self.end - 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8), st.integers(1, 3)), max_size=40))
def test_any_history_is_answered_as_the_model_does(steps: list[tuple[int, int, int]]) -> None:
    log, model = new_log(), Model()
    for epoch, sequence, records in steps:
        assert send(log, plain(epoch, sequence, records)) == model.send(epoch, sequence, records)
    assert log.end_offset == model.end


def test_a_snapshot_has_an_entry_a_batch(tmp_path: Path) -> None:
    """Entries are ordered from the oldest on: Kafka keeps one per producer, the last one."""
    log = PartitionLog(tmp_path / "t-0", LogConfig())
    for number in range(7):
        send(log, plain(0, number))
    data = log.producers.encode()
    again = type(log.producers).decode(data)
    assert [item.last_sequence for item in again.producers[1].batches] == [2, 3, 4, 5, 6]
    assert again.encode() == data
    assert again.producers[1].last_timestamp == TIME
