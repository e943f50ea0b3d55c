"""Rounds of a job's loads one after the other, in one process: what `--follow` does, and its metrics.

| metric | kind | labels | what |
| --- | --- | --- | --- |
| klog_load_runs_total | counter | result | runs: committed, nothing_new, or failed (also for single partitions) |
| klog_load_failures_in_a_row | gauge | | failed runs since the last one that did not fail |
| klog_load_records_total | counter | topic | records loaded |
| klog_load_bytes_total | counter | topic | bytes of their keys and values |
| klog_load_bad_total | counter | topic | corrupt batches, and records that are dead letters |
| klog_load_lag_records | gauge | topic, partition | offsets up to the log's end that the last run has left |
| klog_load_freshness_seconds | gauge | | how long ago the last run began that loaded all that the log had then |
| klog_load_last_run_timestamp_seconds | gauge | | when the last run, or round of runs, began, since the epoch |
| klog_load_last_run_seconds | gauge | | how long it took |
| klog_load_last_committed_run | gauge | | the number of the last committed run of this process |
| klog_load_upkeeps_total | counter | result | upkeeps of outputs (--compact-every): done, or failed |
| klog_load_last_upkeep_timestamp_seconds | gauge | | when the last upkeep began, since the epoch |
| klog_load_last_upkeep_seconds | gauge | | how long it took |
| klog_load_series_left_out | gauge | | partitions beyond 10,000: their lag is not shown |

Counters start at 0 with the process. Until the first run that loads everything the freshness counts from the start.
If each topic is a load of its own, runs, upkeeps, failures, freshness and committed runs have the label topic, too. A
round in which a load is not opened, as its topic has nothing new, counts as its run; one that waits after a failure
counts none.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from spark_klog.base.clock import doubled
from spark_klog.errors import AuthenticationError, ConfigError, DataLossError, LoadError, UnsupportedVersionError
from spark_klog.load.by_topic import LONGEST_PAUSE, Outcome
from spark_klog.load.upkeep import Upkept
from spark_klog.metrics import COUNTER, GAUGE, Family, Labels, lines
from spark_klog.metrics.otel import export

#: Errors that no later run can get over.
FINAL = (ConfigError, DataLossError, AuthenticationError, UnsupportedVersionError)
_LOOK_SECONDS = 0.2
_MAX_SERIES = 10_000
Result = Literal["committed", "nothing_new", "failed"]
_RESULTS: tuple[Result, ...] = ("committed", "nothing_new", "failed")


@dataclass(frozen=True)
class RunReport:
    """A round: what its loads have come to, or the error that ended it before there were any, or ended all of them.

    `began` is in seconds since the epoch, `seconds` what it took; `failures` are the rounds in a row, up to this one,
    of which no load was without a failure.
    """

    began: float
    seconds: float
    outcomes: Sequence[Outcome]
    error: Exception | None
    failures: int

    @property
    def result(self) -> Result:
        if self.error is not None or any(outcome.has_failed for outcome in self.outcomes):
            return "failed"
        return "committed" if any(outcome.has_news for outcome in self.outcomes) else "nothing_new"

    @property
    def lag(self) -> int | None:
        """Records that the log had when the runs planned, and that are not loaded; None if an error has ended one."""
        lags = [outcome.lag for outcome in self.outcomes]
        return None if self.error is not None or None in lags else sum(lag or 0 for lag in lags)


def follow(
    run: Callable[[], Sequence[Outcome]],
    every: float,
    max_failures: int,
    is_stopping: Callable[[], bool],
    has_ended: Callable[[], bool] = lambda: False,
) -> Iterator[RunReport]:
    """Yield a report of each round. One begins `every` seconds after the last one began, or at its end if it is later.

    It ends between two rounds if `is_stopping`. A round has failed if all its loads have, if only in part: after it the
    pause doubles, up to five minutes. If errors have ended all of them, one is raised after the first round, if all are
    of `FINAL`, or if `max_failures` rounds in a row have failed. `LoadError` if `has_ended` says that there is no Spark
    to run anything.
    """
    failures, is_first = 0, True
    while not is_stopping():
        began, start = time.time(), time.monotonic()
        outcomes: Sequence[Outcome] = ()
        error: Exception | None = None
        try:
            outcomes = run()
            error = _error_of_all(outcomes)
        except Exception as failure:
            error = failure
        failures = failures + 1 if error or all(outcome.has_failed for outcome in outcomes) else 0
        yield RunReport(began, time.monotonic() - start, outcomes, error, failures)
        if error is not None and (is_first or isinstance(error, FINAL) or failures >= max_failures):
            raise error
        if failures >= max_failures:
            raise LoadError(f"{failures} runs in a row could not load all partitions")
        is_first, error, outcomes = False, None, ()  # a traceback keeps the run's objects alive
        pause = doubled(every, max(every, LONGEST_PAUSE), failures + 1)
        while not is_stopping():
            if has_ended():
                raise LoadError("the Spark application has ended: call the job again, which goes on where it stopped")
            left = start + pause - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(_LOOK_SECONDS, left))


def _error_of_all(outcomes: Sequence[Outcome]) -> Exception | None:
    """The error, if all loads have ended with one; rather one that a later round may get over."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if len(errors) < len(outcomes):
        return None
    return next((error for error in errors if not isinstance(error, FINAL)), errors[0])


class LoadMetrics:
    """Counts the runs of loads that follow their topics. `page` may be called by another thread.

    If each topic is a load of its own (`by_topic`), what is one number for a load has the label topic.
    """

    def __init__(self, *, by_topic: bool = False) -> None:
        self._lock = threading.Lock()
        self._labels: Labels = ("topic",) if by_topic else ()
        self._runs: Counter[tuple[Labels, Result]] = Counter()
        self._records: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()
        self._lag: dict[Labels, int] = {}
        self._began = time.time()
        self._fresh_at: dict[Labels, float] = {} if by_topic else {(): self._began}
        self._failures: dict[Labels, int] = {} if by_topic else {(): 0}
        self._committed: dict[Labels, int] = {} if by_topic else {(): 0}
        self._outcomes: dict[Labels, Outcome] = {}
        self._last: RunReport | None = None
        self._upkeeps: Counter[tuple[Labels, str]] = Counter()
        self._upkept: Upkept | None = None
        export(self.families)

    def add_upkeep(self, done: Upkept) -> None:
        """Count an upkeep between two rounds."""
        with self._lock:
            self._upkept = done
            for kempt in done.outputs:
                labels: Labels = (kempt.topic,) if self._labels else ()
                self._upkeeps[labels, "done" if kempt.error is None else "failed"] += 1
        export(self.families)

    def add(self, report: RunReport) -> None:
        """Count a round."""
        with self._lock:
            self._last = report
            for outcome in report.outcomes:
                self._add(outcome, report.began)
            if not report.outcomes:  # the loads are not known, or all of them
                for labels in self._failures:
                    self._failures[labels] += 1
                    self._runs[labels, "failed"] += 1
        export(self.families)

    def _add(self, outcome: Outcome, began: float) -> None:
        labels: Labels = (outcome.topic,) if self._labels else ()
        self._fresh_at.setdefault(labels, self._began)
        if not outcome.has_failed and outcome.lag == 0:
            self._fresh_at[labels] = began
        if self._outcomes.get(labels) is outcome:  # it was not opened in this round
            self._runs[labels, "nothing_new"] += not outcome.has_failed
            return
        self._outcomes[labels] = outcome
        result: Result = "failed" if outcome.has_failed else "committed" if outcome.has_news else "nothing_new"
        self._runs[labels, result] += 1
        self._failures[labels] = outcome.failures
        self._committed.setdefault(labels, 0)
        if outcome.loaded is None:
            return
        self._committed[labels] = max((self._committed[labels], *outcome.loaded.runs))
        if not self._labels:
            self._lag.clear()
        for part in outcome.loaded.partitions:
            self._lag[part.topic, str(part.partition)] = part.lag
            self._records[part.topic] += part.records
            self._bytes[part.topic] += part.bytes
            self._bad[part.topic] += part.bad

    @property
    def freshness(self) -> float:
        """Seconds since the last round began after which a load had all that the log had then: of the load for which
        that is longest."""
        return max((self._age(at) for at in self._fresh_at.values()), default=self._age(self._began))

    @staticmethod
    def _age(at: float) -> float:
        return max(0.0, time.time() - at)

    def page(self) -> Iterator[str]:
        """The lines for Prometheus."""
        for family in self.families():
            yield from lines(family)

    def families(self) -> list[Family]:
        with self._lock:
            return self._families()

    def _families(self) -> list[Family]:
        last = self._last
        shown = sorted(self._lag.items())[:_MAX_SERIES]
        loads = sorted(self._failures)
        runs = [((*labels, result), self._runs[labels, result]) for labels in loads for result in _RESULTS]

        def by_topic(counts: Counter[str]) -> list[tuple[Labels, float]]:
            return [((topic,), count) for topic, count in sorted(counts.items())]

        def by_load(name: str, text: str, values: Mapping[Labels, float]) -> Family:
            return Family(name, GAUGE, text, self._labels, sorted(values.items()))

        def one(name: str, text: str, value: float) -> Family:
            return Family(name, GAUGE, text, (), [((), value)])

        ages = {labels: round(self._age(at), 3) for labels, at in self._fresh_at.items()}
        families = [
            Family("klog_load_runs_total", COUNTER, "Runs by result", (*self._labels, "result"), runs),
            Family("klog_load_records_total", COUNTER, "Records loaded", ("topic",), by_topic(self._records)),
            Family("klog_load_bytes_total", COUNTER, "Bytes loaded", ("topic",), by_topic(self._bytes)),
            Family("klog_load_bad_total", COUNTER, "Bad batches and records", ("topic",), by_topic(self._bad)),
            Family("klog_load_lag_records", GAUGE, "Lag as of the last run", ("topic", "partition"), shown),
            one("klog_load_series_left_out", "Partitions that are not shown", len(self._lag) - len(shown)),
            by_load("klog_load_failures_in_a_row", "Failed runs in a row", self._failures),
            by_load("klog_load_freshness_seconds", "Age of what is not loaded, at most", ages),
            by_load("klog_load_last_committed_run", "Number of the last committed run", self._committed),
        ]
        if last is not None:
            families.append(one("klog_load_last_run_timestamp_seconds", "Start of the last run", last.began))
            families.append(one("klog_load_last_run_seconds", "Duration of the last run", round(last.seconds, 3)))
        if (upkept := self._upkept) is not None:
            kept = sorted({labels for labels, _ in self._upkeeps})
            counts = [((*labels, how), self._upkeeps[labels, how]) for labels in kept for how in ("done", "failed")]
            names = (*self._labels, "result")
            families.append(Family("klog_load_upkeeps_total", COUNTER, "Upkeeps of outputs", names, counts))
            families.append(one("klog_load_last_upkeep_timestamp_seconds", "Start of the last upkeep", upkept.began))
            families.append(one("klog_load_last_upkeep_seconds", "Its duration", round(upkept.seconds, 3)))
        return families
