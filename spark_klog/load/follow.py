"""Runs of a load one after the other, in one process: what `--follow` does, and its metrics.

| metric | kind | labels | what |
| --- | --- | --- | --- |
| klog_load_runs_total | counter | result | runs: committed, nothing_new, or failed (also for single partitions) |
| klog_load_failures_in_a_row | gauge | | failed runs since the last one that did not fail |
| klog_load_records_total | counter | topic | records loaded |
| klog_load_bytes_total | counter | topic | bytes of their keys and values |
| klog_load_bad_total | counter | topic | corrupt batches, and records that are dead letters |
| klog_load_lag_records | gauge | topic, partition | offsets up to the log's end that the last run has left |
| klog_load_freshness_seconds | gauge | | how long ago the last run began that loaded all that the log had then |
| klog_load_last_run_timestamp_seconds | gauge | | when the last run began, since the epoch |
| klog_load_last_run_seconds | gauge | | how long it took |
| klog_load_last_committed_run | gauge | | the number of the last committed run of this process |
| klog_load_series_left_out | gauge | | partitions beyond 10,000: their lag is not shown |

Counters start at 0 with the process. Until the first run that loads everything the freshness counts from the start.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from spark_klog.base.clock import doubled
from spark_klog.errors import AuthenticationError, ConfigError, DataLossError, LoadError, UnsupportedVersionError
from spark_klog.load.run import Loaded
from spark_klog.metrics import COUNTER, GAUGE, Family, Labels, lines

#: Errors that no later run can get over.
FINAL = (ConfigError, DataLossError, AuthenticationError, UnsupportedVersionError)
#: The longest pause after failures in seconds, if the interval is not longer.
_LONGEST_PAUSE = 300.0
_LOOK_SECONDS = 0.2
_MAX_SERIES = 10_000
Result = Literal["committed", "nothing_new", "failed"]
_RESULTS: tuple[Result, ...] = ("committed", "nothing_new", "failed")


@dataclass(frozen=True)
class RunReport:
    """A run, which either has loaded something (or looked) or ended with an error.

    `began` is in seconds since the epoch, `seconds` what it took; `failures` are the failed runs in a row up to this
    one.
    """

    began: float
    seconds: float
    loaded: Loaded | None
    error: Exception | None
    failures: int

    @property
    def result(self) -> Result:
        if self.failures:
            return "failed"
        return "committed" if self.loaded is not None and self.loaded.runs else "nothing_new"

    @property
    def lag(self) -> int | None:
        """Records that the log had when the run planned, and that are not loaded; None after an error."""
        return None if self.loaded is None else sum(part.lag for part in self.loaded.partitions)

    @property
    def is_complete(self) -> bool:
        """Whether the output has all that the log had when the run began."""
        return not self.failures and self.lag == 0


def follow(
    run: Callable[[], Loaded],
    every: float,
    max_failures: int,
    is_stopping: Callable[[], bool],
    has_ended: Callable[[], bool] = lambda: False,
) -> Iterator[RunReport]:
    """Yield a report of each run. A run begins `every` seconds after the last one began, or at its end if it is later.

    It ends between two runs if `is_stopping`. After a failed run the pause doubles, up to five minutes. The error of a
    run is raised if it is the first run, if the error is one of `FINAL`, or if `max_failures` runs in a row have
    failed. `LoadError` if `has_ended` says that there is no Spark to run anything.
    """
    failures, is_first = 0, True
    while not is_stopping():
        began, start = time.time(), time.monotonic()
        loaded, error = None, None
        try:
            loaded = run()
        except Exception as failure:
            error = failure
        failures = failures + 1 if loaded is None or loaded.failed else 0
        yield RunReport(began, time.monotonic() - start, loaded, error, failures)
        if error is not None and (is_first or isinstance(error, FINAL) or failures >= max_failures):
            raise error
        if failures >= max_failures:
            raise LoadError(f"{failures} runs in a row could not load all partitions")
        is_first, error = False, None  # its traceback keeps the run's objects alive
        pause = doubled(every, max(every, _LONGEST_PAUSE), failures + 1)
        while not is_stopping():
            if has_ended():
                raise LoadError("the Spark application has ended: call the job again, which goes on where it stopped")
            left = start + pause - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(_LOOK_SECONDS, left))


class LoadMetrics:
    """Counts the runs of a load that follows its topics. `page` may be called by another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: Counter[str] = Counter()
        self._records: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()
        self._lag: dict[Labels, int] = {}
        self._fresh_at = time.time()
        self._last: RunReport | None = None
        self._committed = 0

    def add(self, report: RunReport) -> None:
        """Count a run."""
        with self._lock:
            self._runs[report.result] += 1
            self._last = report
            if report.is_complete:
                self._fresh_at = report.began
            if report.loaded is None:
                return
            self._committed = max((self._committed, *report.loaded.runs))
            self._lag = {(part.topic, str(part.partition)): part.lag for part in report.loaded.partitions}
            for part in report.loaded.partitions:
                self._records[part.topic] += part.records
                self._bytes[part.topic] += part.bytes
                self._bad[part.topic] += part.bad

    @property
    def freshness(self) -> float:
        """Seconds since the last run began that loaded all that the log had then."""
        return max(0.0, time.time() - self._fresh_at)

    def page(self) -> Iterator[str]:
        """The lines for Prometheus."""
        with self._lock:
            families = self._families()
        for family in families:
            yield from lines(family)

    def _families(self) -> list[Family]:
        last = self._last
        shown = sorted(self._lag.items())[:_MAX_SERIES]
        runs = [((result,), self._runs[result]) for result in _RESULTS]

        def by_topic(counts: Counter[str]) -> list[tuple[Labels, float]]:
            return [((topic,), count) for topic, count in sorted(counts.items())]

        def one(name: str, text: str, value: float) -> Family:
            return Family(name, GAUGE, text, (), [((), value)])

        families = [
            Family("klog_load_runs_total", COUNTER, "Runs by result", ("result",), runs),
            Family("klog_load_records_total", COUNTER, "Records loaded", ("topic",), by_topic(self._records)),
            Family("klog_load_bytes_total", COUNTER, "Bytes loaded", ("topic",), by_topic(self._bytes)),
            Family("klog_load_bad_total", COUNTER, "Bad batches and records", ("topic",), by_topic(self._bad)),
            Family("klog_load_lag_records", GAUGE, "Lag as of the last run", ("topic", "partition"), shown),
            one("klog_load_series_left_out", "Partitions that are not shown", len(self._lag) - len(shown)),
            one("klog_load_failures_in_a_row", "Failed runs in a row", 0 if last is None else last.failures),
            one("klog_load_freshness_seconds", "Age of what is not loaded, at most", round(self.freshness, 3)),
            one("klog_load_last_committed_run", "Number of the last committed run", self._committed),
        ]
        if last is not None:
            families.append(one("klog_load_last_run_timestamp_seconds", "Start of the last run", last.began))
            families.append(one("klog_load_last_run_seconds", "Duration of the last run", round(last.seconds, 3)))
        return families
