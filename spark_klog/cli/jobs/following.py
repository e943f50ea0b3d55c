"""A load that follows its topics: the signals that end it, a line for each run, metrics, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import datetime, timezone
from math import inf
from typing import TYPE_CHECKING, Any

import click

from spark_klog.base.interrupts import stop_signals
from spark_klog.cli.jobs.running import DONE, DONE_WITH_BAD, FAILED
from spark_klog.metrics import metrics_page
from spark_klog.wire.http import HttpThread

if TYPE_CHECKING:
    from spark_klog.load.follow import RunReport
    from spark_klog.load.run import Loaded
    from spark_klog.load.tasks.task import SparkRunner

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")
EVERY, MAX_FAILURES = 30.0, 10
_NOTE = b"ending after the run that is under way; a second signal ends it at once\n"


def duration(text: str) -> float:
    """The seconds of 30s, 5m, 1h, or of a number."""
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds < inf:
        raise click.BadParameter(f"{text!r} is not a positive duration: give one like 30s, 5m or 1h")
    return seconds


class Stop:
    """The first SIGTERM or SIGINT ends a load between two runs, the second one at once. Is called as their handler."""

    def __init__(self) -> None:
        self._is_asked = False
        #: spark-submit's JVM, which gets the signals itself.
        self._parent = os.getppid() if "PYSPARK_GATEWAY_PORT" in os.environ else None

    def __call__(self, *_: object) -> None:
        if self._is_asked:
            raise KeyboardInterrupt
        self._is_asked = True
        os.write(2, _NOTE)  # a print may be under way, and can't be entered twice

    def is_asked(self) -> bool:
        """Whether to end: after a signal, or if spark-submit has ended and left this process behind."""
        return self._is_asked or (self._parent is not None and os.getppid() != self._parent)

    def surviving(self, make_session: Callable[[], Any]) -> Callable[[], Any]:
        """`make_session`, after which this is the handler of SIGINT again: pyspark has one of its own."""

        def make() -> Any:
            session = make_session()
            signal.signal(signal.SIGINT, self)
            return session

        return make


def follow_topics(
    run: Callable[[], Loaded],
    runner: SparkRunner,
    stop: Stop,
    every: float,
    max_failures: int,
    metrics_address: str | None,
    output: str,
    as_json: bool,
) -> int:
    """Run until a signal comes, and return the exit code; what ends it otherwise is raised, as `follow` says."""
    from spark_klog.load.follow import LoadMetrics, follow

    metrics = LoadMetrics()
    code = DONE
    with stop_signals(stop), ExitStack() as stack:
        if metrics_address is not None:
            served = stack.enter_context(closing(HttpThread(metrics_address, metrics_page(metrics.page))))
            click.echo(f"metrics at http://{served.address}/metrics", err=as_json)
        has_bad = False
        for report in follow(run, every, max_failures, stop.is_asked, runner.has_ended):
            metrics.add(report)
            click.echo(json.dumps(_line(report, metrics.freshness, output)) if as_json else _text(report))
            has_bad = has_bad or (report.loaded is not None and report.loaded.bad > 0)
            code = FAILED if report.failures else DONE_WITH_BAD if has_bad else DONE
    return code


def _line(report: RunReport, freshness: float, output: str) -> dict[str, Any]:
    """The JSON of a run: what a call without --follow prints, and the run's time, result and lag."""
    from spark_klog.load.audit import loaded_json

    line: dict[str, Any] = {
        "time": _time(report),
        "seconds": round(report.seconds, 3),
        "result": report.result,
        "failures": report.failures,
        "lag": report.lag,
        "freshness": round(freshness, 3),
    }
    if report.error is not None:
        return line | {"error": _cause(report.error)}
    assert report.loaded is not None
    return line | loaded_json(report.loaded, output)


def _text(report: RunReport) -> str:
    if report.loaded is None:
        what = f"failed, {report.failures} in a row: {_cause(report.error)}" if report.error else "failed"
    else:
        records = sum(part.records for part in report.loaded.partitions)
        runs = ", ".join(map(str, report.loaded.runs))
        what = f"run {runs}: {records:,} records, lag {report.lag:,}" if runs else f"nothing new, lag {report.lag:,}"
        if bad := report.loaded.bad:
            what += f", {bad:,} bad"
        if failed := report.loaded.failed:
            what += f", failed for {', '.join(f'{part.topic}-{part.partition} ({part.error})' for part in failed)}"
    return f"{_time(report)}  {what}, {report.seconds:.1f}s"


def _time(report: RunReport) -> str:
    return datetime.fromtimestamp(report.began, timezone.utc).isoformat(timespec="seconds")


def _cause(error: Exception) -> str:
    from spark_klog.load.tasks.task import cause_of

    return cause_of(error)
