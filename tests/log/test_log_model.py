"""The log against a model of plain lists: random events on a data directory whose disk fails (faulty_files.py).

Acknowledged records are served, or an error names their damage. Look-ups by time, aborted transactions, leader epochs
and producer state agree with the model. SPARK_KLOG_MODEL_SECONDS: how long to search for a failing sequence.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from spark_klog.errors import ErrorCode
from spark_klog.log.compaction.cleaner import compact
from spark_klog.log.compaction.passes import OffsetMap
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_files import RECOVERY_POINT, read_checkpoint
from spark_klog.log.producer_state import ProducerRefused
from tests.log.faulty_files import Faults
from tests.log.faulty_logs import NOW, check_indexes
from tests.log.log_events import COMPACTED, DELETED, IDEMPOTENT, NONE, TRANSACTIONS, LogEvents
from tests.log.model_checks import check_after_damage, check_served, check_state, check_times
from tests.support.brokers.logs import append_of_client
from tests.support.checker.log_model import (
    ABORT,
    COMMIT,
    TRANSACTIONAL,
    encoded,
)
from tests.support.runs.figures import count

SECONDS = float(os.environ.get("SPARK_KLOG_MODEL_SECONDS", "0"))
#: One process searches this long, since its output is kept in memory.
_SLICE_SECONDS = 60
KEYS = st.sampled_from([DELETED, COMPACTED])
OPERATIONS = ["write", "sync", "open", "rename", "truncate", "remove", "read"]
ENDS = st.sampled_from(["", "stop", "kill", "power"])
#: Shrinking takes minutes, so it is optional.
SHRINKS = [Phase.shrink] if "SPARK_KLOG_MODEL_SHRINK" in os.environ else []
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, *SHRINKS]


class LogModel(LogEvents):
    #: How many were made in this process.
    sequences = 0

    @initialize(
        every=st.sampled_from([1, 4, 1 << 40]), retained=st.sampled_from([-1, -1, 1500]), seed=st.integers(0, 1 << 20)
    )
    def opened(self, every: int, retained: int, seed: int) -> None:
        LogModel.sequences += 1
        self.config = LogConfig(
            segment_bytes=700,
            index_interval_bytes=150,
            flush_messages=every,
            retention_ms=-1,
            min_cleanable_dirty_ratio=0,
            delete_retention_ms=100,
            file_delete_delay_ms=20,
        )
        self.overrides = {DELETED: {"retention_bytes": retained}, COMPACTED: {"cleanup_policy": "compact,delete"}}
        self.logs = self.start()
        for key in self.overrides:
            self.created(key)
            self.append_many(key, seed, 8)

    # appends

    @rule(key=KEYS)
    def create(self, key: tuple[str, int]) -> None:
        self.created(key)

    @rule(key=KEYS)
    def delete(self, key: tuple[str, int]) -> None:
        self.deleted(key)

    @rule(
        key=KEYS,
        producer=st.sampled_from([NONE, NONE, *IDEMPOTENT, *TRANSACTIONS]),
        names=st.lists(st.integers(0, 4), min_size=1, max_size=5),
        size=st.integers(0, 80),
        codec=st.sampled_from(["none", "none", "gzip", "lz4"]),
        epoch_grows=st.sampled_from([False] * 9 + [True]),
    )
    def append(
        self, key: tuple[str, int], producer: int, names: list[int], size: int, codec: str, epoch_grows: bool
    ) -> None:
        self.appended(key, producer, names, size, codec, epoch_grows=epoch_grows)

    @rule(key=KEYS, seed=st.integers(0, 1 << 20), count=st.integers(2, 15))
    def append_many(self, key: tuple[str, int], seed: int, count: int) -> None:
        """Append batches of all producers, with ends of transactions in between, or of no producer."""
        rng = random.Random(seed)
        producers = rng.choice([[NONE], [NONE, *IDEMPOTENT, *TRANSACTIONS]])
        for _ in range(count):
            producer = rng.choice(producers)
            names = [rng.randrange(5) for _ in range(rng.randrange(1, 5))]
            self.appended(key, producer, names, rng.randrange(60))
            if rng.random() < 0.4:
                self.transaction_ended(key, rng.choice(TRANSACTIONS), rng.choice([ABORT, COMMIT]))

    @rule(key=KEYS, producer=st.sampled_from(TRANSACTIONS), kind=st.sampled_from([ABORT, COMMIT]))
    def end_transaction(self, key: tuple[str, int], producer: int, kind: int) -> None:
        self.transaction_ended(key, producer, kind)

    @rule(key=KEYS, producer=st.sampled_from([*IDEMPOTENT, *TRANSACTIONS]), which=st.integers(0, 4))
    def send_again(self, key: tuple[str, int], producer: int, which: int) -> None:
        found = self.there(key)
        known = found[1].derived.producers.get(producer, (0, []))[1] if found else []
        if found is None or not known or found[0].failure is not None:
            return
        batch = known[which % len(known)]
        again = self.attempt(lambda: append_of_client(found[0], batch.data))
        if not isinstance(again, OSError):
            assert again[:2] == (batch.base, batch.last)

    @rule(key=KEYS, producer=st.sampled_from([*IDEMPOTENT, *TRANSACTIONS]), by=st.integers(1, 9))
    def skip_a_sequence(self, key: tuple[str, int], producer: int, by: int) -> None:
        found = self.there(key)
        known = found[1].derived.producers.get(producer, (0, []))[1] if found else []
        if found is None or not known or found[0].failure is not None:
            return
        last = known[-1]
        sequence = last.sequence + len(last.records) + by
        attributes = TRANSACTIONAL if last.is_transactional else 0
        data = encoded(
            [(b"k", b"")], [NOW], producer=producer, epoch=last.epoch, sequence=sequence, attributes=attributes
        )
        with pytest.raises((ProducerRefused, OSError)) as refused:
            append_of_client(found[0], data)
        if isinstance(refused.value, ProducerRefused):
            assert refused.value.code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER

    # maintenance

    @rule(key=KEYS)
    def flush(self, key: tuple[str, int]) -> None:
        found = self.there(key)
        if found is not None and found[0].failure is None:
            self.attempt(found[0].flush)

    @rule(step=st.integers(1, 80))
    def time_passes(self, step: int) -> None:
        self.clock.now += step
        for log in list(self.logs.logs.values()):
            if log.is_flush_due:
                self.attempt(log.flush)
            for care in (log.delete_expired, log.deleted_files.remove_due, log.forget_producers):
                self.attempt(care)
        self.note_starts()

    @rule(key=KEYS, part=st.floats(0, 1))
    def delete_records(self, key: tuple[str, int], part: float) -> None:
        self.records_deleted(key, part)

    @rule()
    def write_checkpoints(self) -> None:
        self.attempt(self.logs.write_checkpoints)

    @rule(
        step=st.integers(1, 200),
        before=st.sampled_from(["swap", "_make_cleaned", "_opened"]),
        at=st.sampled_from([1, 1, 2, 3, 4]),
        what=st.sampled_from(["", "", "delete", "anew", "records", "append"]),
        seed=st.integers(0, 1 << 20),
        kind=st.sampled_from([None, ABORT, COMMIT]),
    )
    def compacted(self, step: int, before: str, at: int, what: str, seed: int, kind: int | None) -> None:
        """Append and compact; another event happens before one of the round's steps."""
        if kind is not None:  # otherwise open transactions may leave nothing to clean
            for producer in TRANSACTIONS:
                self.transaction_ended(COMPACTED, producer, kind)
        self.append_many(COMPACTED, seed, 8)
        self.clock.now += step
        self.run_round(before, at, what)

    def run_round(self, before: str, at: int, what: str) -> None:
        log = self.logs.get(*COMPACTED)
        found = self.attempt(lambda: self.logs.cleanable(log, self.clock.now)) if log is not None else None
        if log is None or found is None or isinstance(found, OSError):
            return
        left = [at]

        def in_owner(function: Callable[[], Any], /) -> Any:
            if getattr(function, "func", function).__name__ == before:
                left[0] -= 1
                if left[0] == 0:
                    self.happens(what)
            return function()

        model = self.models[COMPACTED]
        model.clean_offset = max(model.clean_offset, found.first_uncleanable_offset)
        end = self.attempt(lambda: compact(log, found, OffsetMap(1 << 12), self.clock.now, in_owner))
        if isinstance(end, OSError):
            return
        self.attempt(lambda: self.logs.note_clean(log, end))

    def happens(self, what: str) -> None:
        if what in ("delete", "anew"):
            self.deleted(COMPACTED)
        if what == "anew":
            self.created(COMPACTED)
            for number in range(4):
                self.appended(COMPACTED, NONE, [number, number + 1], 60)
        if what == "records":
            self.records_deleted(COMPACTED, 0.5)
        if what == "append":
            self.appended(COMPACTED, NONE, [1, 2, 3], 70)

    # faults and restarts

    @rule(
        operation=st.sampled_from(OPERATIONS),
        after=st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5, 6]),
        code=st.sampled_from([errno.EIO, errno.ENOSPC]),
        suffix=st.sampled_from(["", "", "", ".txnindex", ".snapshot", ".swap"]),
    )
    def arm(self, operation: str, after: int, code: int, suffix: str) -> None:
        """Let one call fail, `after` calls later; only calls for files with the suffix count."""
        left = [after]

        def fails(name: str, path: Path) -> bool:
            if name != operation or not path.name.endswith(suffix):
                return False
            left[0] -= 1
            if left[0] == -1:
                self.has_failed = True
                raise OSError(code, os.strerror(code), str(path))
            return False

        self.files.faults = Faults(fails=fails)

    @rule()
    def disarm(self) -> None:
        self.files.faults = Faults()

    # short sequences that random rules seldom produce, then maybe a restart

    @rule(key=KEYS, operation=st.sampled_from(["open", "truncate"]), after=st.integers(0, 3), end=ENDS)
    def roll_fails(self, key: tuple[str, int], operation: str, after: int, end: str) -> None:
        """After a failed roll, the next append may fit into the segment that is still active."""
        found = self.there(key)
        if found is None or found[0].failure is not None:
            return
        self.arm(operation, after, errno.ENOSPC, "")
        self.attempt(found[0].roll)
        self.disarm()
        self.appended(key, NONE, [0], 0)
        self.restarted(end)

    @rule(key=KEYS, operation=st.sampled_from(["open", "write"]), end=ENDS)
    def abort_is_not_noted(self, key: tuple[str, int], operation: str, end: str) -> None:
        """The disk rejects the transaction index entry of an abort once."""
        self.appended(key, TRANSACTIONS[0], [0, 1], 20)
        self.arm(operation, 0, errno.ENOSPC, ".txnindex")
        self.transaction_ended(key, TRANSACTIONS[0], ABORT)
        self.disarm()
        self.restarted(end)

    @rule(key=KEYS, seed=st.integers(0, 1 << 20), count=st.integers(0, 2), part=st.floats(0, 1), end=ENDS)
    def made_anew(self, key: tuple[str, int], seed: int, count: int, part: float, end: str) -> None:
        """Checkpoints of a deleted topic must not apply to a new topic of that name."""
        self.append_many(key, seed, 5)
        self.records_deleted(key, part)
        self.flush(key)
        self.write_checkpoints()
        self.deleted(key)
        self.created(key)
        for number in range(count):
            self.appended(key, NONE, [number], 20)
        self.restarted(end)

    @rule(end=ENDS)
    def first_segment_is_superseded(self, end: str) -> None:
        """Compaction empties the first segment."""
        self.deleted(COMPACTED)
        self.created(COMPACTED)
        for _ in range(14):
            self.appended(COMPACTED, NONE, [0], 60)
        self.run_round("", 0, "")
        self.appended(COMPACTED, NONE, [0], 10)
        self.restarted(end)

    def restarted(self, end: str) -> None:
        if end == "stop":
            self.stop_and_start(power=False, seed=0)
        elif end:
            self.crash(power=end == "power", seed=0)

    @rule(power=st.booleans(), seed=st.integers(0, 1 << 20))
    def stop_and_start(self, power: bool, seed: int) -> None:
        """Stop cleanly; a power failure afterwards does no harm."""
        is_clean = self.stop()
        self.files = self.files.after_crash(random.Random(seed), power=power and is_clean)
        self.begin_again(is_clean=is_clean, was_killed=power and not is_clean)

    @rule(power=st.booleans(), seed=st.integers(0, 1 << 20))
    def crash(self, power: bool, seed: int) -> None:
        self.drop()
        self.files = self.files.after_crash(random.Random(seed), power=power)
        self.begin_again(is_clean=False, was_killed=power)

    def begin_again(self, *, is_clean: bool, was_killed: bool) -> None:
        flushed = {key: log.recovery_point for key, log in self.logs.logs.items()}
        failures = self.has_failed
        self.has_failed = False
        self.logs = self.start()
        assert not self.logs.offline
        for key, log in list(self.logs.logs.items()):
            if key not in self.models or log.topic_id != self.ids[key]:
                # the folder of a deleted topic is back: the registry, which knows the ids, removes it
                assert was_killed
                rename = self.logs.take(*key)
                assert rename is not None
                self.files.remove_folder(rename())
        for key, model in list(self.models.items()):
            if key not in self.logs.logs:
                assert was_killed
                assert not flushed[key]
                del self.models[key]
                continue
            log = self.logs.logs[key]
            self.resume(key, log, model, flushed[key], was_killed=was_killed)
            assert log.start_offset <= model.largest_start
            assert log.start_offset == model.start or not is_clean or failures
            model.start = log.start_offset
            check_indexes(self.files, log)
        assert set(self.logs.logs) == set(self.models)

    # damage

    @precondition(lambda self: any(model.batches for model in self.models.values()))
    @rule(
        data=st.data(),
        key=KEYS,
        suffix=st.sampled_from([".log", ".log", ".log", ".index", ".timeindex", ".snapshot"]),
        kind=st.sampled_from(["flip", "flip", "cut", "half"]),
        is_clean=st.booleans(),
    )
    def damage(self, data: st.DataObject, key: tuple[str, int], suffix: str, kind: str, is_clean: bool) -> None:
        """Damage a file between two starts; check, then restore the file."""
        if self.there(key) is None:
            return
        self.files.faults = Faults()
        point = (read_checkpoint(self.files, self.path / RECOVERY_POINT) or {}).get(key, 0)
        if is_clean:
            is_clean = self.stop()
            if is_clean:
                point = self.models[key].end
        else:
            self.drop()
        self.files = self.files.after_crash(random.Random(0), power=False)
        folder = self.path / f"{key[0]}-{key[1]}"
        names = sorted(name for name in self.files.names(folder) if name.endswith(suffix))
        name = data.draw(st.sampled_from(names)) if names else ""
        content = self.files.read(folder / name) if names else b""
        if content:
            intact = self.files.after_crash(random.Random(0), power=False)
            at = data.draw(st.integers(0, len(content) - 1)) if kind != "half" else len(content) // 2
            file = self.files.open(folder / name)
            if kind == "flip":
                file.write_at(at, bytes([content[at] ^ 1 << data.draw(st.integers(0, 7))]))
            else:
                file.truncate(at)
            self.check_damaged(key, folder / name, content, at, kind, point, is_clean=is_clean)
            self.files = intact
        self.begin_again(is_clean=is_clean, was_killed=False)

    def check_damaged(
        self, key: tuple[str, int], path: Path, content: bytes, at: int, kind: str, point: int, *, is_clean: bool
    ) -> None:
        """Check that flushed records are served, or that an error names the damaged file."""
        damaged = self.files.read(path)
        before, self.logs = self.logs, self.start()
        try:
            if key in self.logs.offline:
                assert str(path.parent) in str(self.logs.offline[key])
                assert path.suffix == ".log"
                assert self.files.read(path) == damaged  # a damaged file is never cut
                return
            log, model = self.logs.logs[key], self.models[key]
            if path.suffix != ".log":
                assert log.end_offset >= model.end
                check_served(log, model, self.number)
                if path.suffix != ".timeindex" or kind == "flip":  # UNSUPPORTED.md: a cut one looks intact
                    check_times(log, model, self.number)
                return
            assert log.end_offset >= point
            check_after_damage(log, path, content, at, kind)
        finally:
            self.drop()
            self.logs = before

    # invariants

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "logs"):
            return
        armed, self.files.faults = self.files.faults, Faults()
        self.note_starts()
        for key, log in self.logs.logs.items():
            model = self.models[key]
            assert log.end_offset == model.end
            if log.failure is not None:
                continue  # its files may be those of an unfinished swap
            check_served(log, model, self.number)
            check_times(log, model, self.number)
            check_state(self.files, log, model)
        self.files.faults = armed


def _run(examples: int, *, is_fixed: bool = False) -> None:
    """Run random sequences; with `is_fixed` the same ones each time."""
    run_state_machine_as_test(
        LogModel,
        settings=settings(
            max_examples=examples,
            derandomize=is_fixed,
            phases=PHASES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def _run_for(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        _run(100)


def _in_a_process(code: str, seconds: float) -> None:
    """Run code in another process: Hypothesis draws constants from all loaded modules, and pytest keeps all logs."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from tests.log.test_log_model import LogModel, _run, _run_for; {code}; print(LogModel.sequences)",
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr[-20_000:]
    count("sequences", int(done.stdout.split()[-1]))


@pytest.mark.parametrize("examples", [20, pytest.param(60, marks=pytest.mark.test_all("long"))])
def test_the_log_is_what_the_model_says(examples: int) -> None:
    _in_a_process(f"_run({examples}, is_fixed=True)", 300)


@pytest.mark.skipif(not SECONDS, reason="part of make soak")
@pytest.mark.timeout(SECONDS + 600)
def test_the_log_is_what_the_model_says_for_long() -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        _in_a_process(f"_run_for({_SLICE_SECONDS})", 600)
