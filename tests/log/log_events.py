"""Events of test_log_model.py: each one changes a log, and its model if it succeeds."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from hypothesis.stateful import RuleBasedStateMachine

from spark_klog.errors import LogRetired
from spark_klog.log.config import LogConfig
from spark_klog.log.directory import CLEAN_STOP, LogDirectory
from spark_klog.log.partition_files import LEADER_EPOCHS, RECOVERY_POINT, read_checkpoint
from spark_klog.log.partition_log import PartitionLog
from tests.log.faulty_files import Faults, FaultyFiles
from tests.log.faulty_logs import Clock
from tests.log.model_checks import are_known
from tests.support.brokers.logs import add_log, append_of_client
from tests.support.checker.log_model import (
    CONTROL,
    TRANSACTIONAL,
    Batch,
    Model,
    Record,
    encoded,
    marker_pair,
    stored,
)

DELETED, COMPACTED = ("deleted", 0), ("compacted", 0)
#: Producer ids: none, idempotent ones, transactional ones.
NONE, IDEMPOTENT, TRANSACTIONS = -1, (1, 2), (3, 4, 5)


class LogEvents(RuleBasedStateMachine):
    config: LogConfig
    overrides: dict[tuple[str, int], dict[str, Any]]
    logs: LogDirectory

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="klog-model"))
        self.clock, self.files = Clock(), FaultyFiles()
        self.models: dict[tuple[str, int], Model] = {}
        self.ids: dict[tuple[str, int], UUID] = {}
        self.number = 0
        self.has_failed = False  # a fault has occurred since the last start

    def start(self) -> LogDirectory:
        logs = LogDirectory(self.path, 0, self.config, files=self.files, now_ms=self.clock)
        logs.index_memory.limit = 200
        return logs

    def teardown(self) -> None:
        if hasattr(self, "logs"):
            self.drop()
        shutil.rmtree(self.path, ignore_errors=True)

    def drop(self) -> None:
        """Release the lock, as the death of the process does."""
        try:
            os.close(self.logs._lock)
        except OSError:
            pass  # closed before

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Return the action's result, or the OSError of the failing disk."""
        try:
            return action()
        except LogRetired:
            raise
        except OSError as error:
            if not self.has_failed:
                raise
            return error

    def created(self, key: tuple[str, int]) -> None:
        if self.logs.get(*key) is not None:
            return
        topic_id = self.ids[key] = uuid4()
        made = self.attempt(lambda: add_log(self.logs, *key, self.overrides[key], topic_id))
        if isinstance(made, OSError):
            # the creation failed, but the folder may exist
            self.files.faults = Faults()
            add_log(self.logs, *key, self.overrides[key], topic_id)
        self.models[key] = Model()
        assert self.logs.logs[key].end_offset == 0

    def deleted(self, key: tuple[str, int]) -> None:
        rename = self.logs.take(*key)
        if rename is None:
            return
        path = self.attempt(rename)
        if isinstance(path, OSError):
            self.files.faults = Faults()
            path = rename()
        self.files.remove_folder(path)
        del self.models[key]

    def there(self, key: tuple[str, int]) -> tuple[PartitionLog, Model] | None:
        log = self.logs.get(*key)
        return (log, self.models[key]) if log is not None else None

    def appended(
        self,
        key: tuple[str, int],
        producer: int,
        names: list[int],
        size: int,
        codec: str = "none",
        *,
        epoch_grows: bool = False,
    ) -> None:
        found = self.there(key)
        if found is None:
            return
        log, model = found
        self.number += 1
        rng = random.Random(self.number)
        pairs = [(b"%d" % name, None if rng.random() < 0.2 else rng.randbytes(size)) for name in names]
        times = [self.clock.now + rng.randrange(-30, 30) for _ in names]
        epoch = sequence = -1
        if producer >= 0:
            epoch, known = model.derived.producers.get(producer, (0, []))
            if epoch_grows and producer not in model.derived.open:
                epoch, known = epoch + 1, []
            sequence = known[-1].sequence + len(known[-1].records) if known else 0
        attributes = TRANSACTIONAL if producer in TRANSACTIONS else 0
        data = encoded(
            pairs, times, codec=codec, producer=producer, epoch=epoch, sequence=sequence, attributes=attributes
        )
        end = model.end
        records = tuple(
            Record(end + delta, when, *pair) for delta, (pair, when) in enumerate(zip(pairs, times, strict=True))
        )
        self.send(log, model, Batch(end, stored(data, end), records, producer, epoch, sequence, bool(attributes)), data)

    def send(self, log: PartitionLog, model: Model, batch: Batch, data: bytes) -> None:
        """Append a batch; if that fails, the log must not have it, unless only the flush after it failed."""
        epochs, is_empty = log.directory / LEADER_EPOCHS, log.start_offset == log.end_offset
        written = self.files.replaced[epochs]
        result = self.attempt(
            lambda: append_of_client(log, data) if batch.marker is None else log.append(memoryview(bytearray(data)))
        )
        assert is_empty or self.files.replaced[epochs] == written  # only an append to an empty log writes it
        if not isinstance(result, OSError):
            assert result[:2] == (batch.base, batch.last)
            model.add([batch])
        elif log.end_offset > batch.base:
            assert log.failure is not None
            model.add([batch])
        else:
            model.unsure.append([batch])

    def transaction_ended(self, key: tuple[str, int], producer: int, kind: int) -> None:
        found = self.there(key)
        if found is None or producer not in found[1].derived.open:
            return
        log, model = found
        epoch, _ = model.derived.producers[producer]
        pair, end = marker_pair(kind), model.end
        data = encoded([pair], [self.clock.now], producer=producer, epoch=epoch, attributes=TRANSACTIONAL | CONTROL)
        records = (Record(end, self.clock.now, *pair),)
        self.send(log, model, Batch(end, stored(data, end), records, producer, epoch, -1, True, kind), data)

    def records_deleted(self, key: tuple[str, int], part: float) -> None:
        found = self.there(key)
        if found is None:
            return
        log, model = found
        before = int(part * log.end_offset)
        start = self.attempt(lambda: log.delete_records(before))
        if not isinstance(start, OSError):
            assert start >= max(model.start, before)
            assert key == DELETED or start == max(model.start, before)
        self.note_starts()

    def note_starts(self) -> None:
        for key, log in self.logs.logs.items():
            model = self.models[key]
            assert log.start_offset >= model.start
            model.start = log.start_offset
            model.largest_start = max(model.largest_start, model.start)

    def stop(self) -> bool:
        failed = [log for log in self.logs.logs.values() if log.failure is not None]
        self.logs.close()
        self.files.faults = Faults()
        is_clean = CLEAN_STOP in self.files.names(self.path)
        assert not (is_clean and failed)
        assert is_clean or self.has_failed
        points = read_checkpoint(self.files, self.path / RECOVERY_POINT) or {} if is_clean else {}
        assert not is_clean or points == {key: model.end for key, model in self.models.items()}
        return is_clean

    def resume(self, key: tuple[str, int], log: PartitionLog, model: Model, flushed: int, *, was_killed: bool) -> None:
        """Check a restarted log: a prefix of the appends, at least the flushed ones, then maybe a failed one."""
        end = log.end_offset
        assert end >= min(flushed, model.end)
        if end < model.end:
            assert was_killed
        kept = [batch for batch in model.batches if batch.last < end]
        if was_killed and end == log.start_offset and not any(segment.size for segment in log.segments):
            # batches before the log's start are lost, too; a producer snapshot may still know them
            while kept and kept[-1].last >= flushed and not are_known(kept, log):
                kept.pop()
        at = kept[-1].last + 1 if kept else 0
        if at < end and end != model.largest_start:
            data = b"".join(self.files.read(segment.path) for segment in log.segments)
            for batches in reversed(model.unsure):
                if batches[0].base >= at and batches[-1].last + 1 == end and data.endswith(batches[-1].data):
                    kept = [batch for batch in kept if batch.last < batches[0].base] + batches
                    break
            else:
                raise AssertionError(f"{key} ends at {end}, and nothing appended does")
        model.cut(kept)
        # if the records that DeleteRecords left are lost, so may be the new start offset
        model.largest_start = min(model.largest_start, end)
        model.unsure.clear()
