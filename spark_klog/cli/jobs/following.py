"""Loads that follow their topics: the signals that end it, a line for each run, metrics, exit codes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from spark_klog.base.addresses import without_user
from spark_klog.base.interrupts import stop_signals
from spark_klog.base.settings import some_of
from spark_klog.cli.jobs.running import DONE, DONE_WITH_BAD, FAILED
from spark_klog.metrics import metrics_page
from spark_klog.wire.http import HttpThread

if TYPE_CHECKING:
    from spark_klog.load.by_topic import Loads, Outcome
    from spark_klog.load.follow import RunReport
    from spark_klog.load.run import Loaded
    from spark_klog.load.tasks.task import SparkRunner
    from spark_klog.load.upkeep import Upkeep, Upkept

EVERY, MAX_FAILURES, EXPIRE = 30.0, 10, 24 * 3600.0
_NOTE = b"ending after the run that is under way; a second signal ends it at once\n"


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
    loads: Loads,
    runner: SparkRunner,
    stop: Stop,
    every: float,
    max_failures: int,
    metrics_address: str | None,
    output: str,
    as_json: bool,
    upkeep: Upkeep | None = None,
) -> int:
    """Run until a signal comes, with `upkeep` between rounds, and return the exit code.

    What ends it otherwise is raised, as `follow` says.
    """
    from spark_klog.load.follow import LoadMetrics, follow

    metrics = LoadMetrics(by_topic=loads.is_by_topic)
    code = DONE
    with stop_signals(stop), ExitStack() as stack:
        if metrics_address is not None:
            served = stack.enter_context(closing(HttpThread(metrics_address, metrics_page(metrics.page))))
            click.echo(f"metrics at http://{served.address}/metrics", err=as_json)
        has_bad = False
        for report in follow(loads.round, every, max_failures, stop.is_asked, runner.has_ended):
            metrics.add(report)
            line = _line(report, metrics.freshness, output, by_topic=loads.is_by_topic)
            click.echo(json.dumps(line) if as_json else _text(report, by_topic=loads.is_by_topic))
            has_bad = has_bad or any(outcome.loaded is not None and outcome.loaded.bad for outcome in report.outcomes)
            code = FAILED if report.result == "failed" else DONE_WITH_BAD if has_bad else DONE
            if upkeep is not None and (kept := upkeep.after(report.outcomes, stop.is_asked)):
                metrics.add_upkeep(kept)
                click.echo(json.dumps(_upkeep_line(kept)) if as_json else _upkeep_text(kept))
    return code


def _line(report: RunReport, freshness: float, output: str, *, by_topic: bool) -> dict[str, Any]:
    """The JSON of a round: what a call without --follow prints, and the round's time, result and lag."""
    from spark_klog.load.audit import loaded_json

    line: dict[str, Any] = {
        "time": _time(report),
        "seconds": round(report.seconds, 3),
        "result": report.result,
        "failures": report.failures,
        "lag": report.lag,
        "freshness": round(freshness, 3),
    }
    if by_topic and report.outcomes:
        return line | loads_json(report.outcomes)
    if report.error is not None:
        return line | {"error": _cause(report.error)}
    [outcome] = report.outcomes
    assert outcome.loaded is not None
    return line | loaded_json(outcome.loaded, output)


def loads_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What loads by topic have done: those that have loaded something or failed, and how many others there are."""
    from spark_klog.load.audit import loaded_json

    loads: list[dict[str, Any]] = []
    for outcome in outcomes:
        if outcome.loaded is not None and outcome.has_news:
            loads.append({"topic": outcome.topic, **loaded_json(outcome.loaded, outcome.output)})
        elif outcome.error is not None:
            text, failures = _cause(outcome.error), outcome.failures
            place = without_user(outcome.output)
            loads.append({"topic": outcome.topic, "output": place, "error": text, "failures": failures})
    return {"loads": loads, "nothing_new": len(outcomes) - len(loads)}


def _upkeep_line(done: Upkept) -> dict[str, Any]:
    outputs = [kempt.to_json() for kempt in done.outputs]
    return {"time": _time(done), "seconds": round(done.seconds, 3), "upkeep": outputs}


def _upkeep_text(done: Upkept) -> str:
    lines = [f"  {without_user(kempt.output)}  {kempt.text()}" for kempt in done.outputs]
    return "\n".join([f"{_time(done)}  upkeep, {done.seconds:.1f}s", *lines])


def _text(report: RunReport, *, by_topic: bool) -> str:
    begin, end = f"{_time(report)}  ", f", {report.seconds:.1f}s"
    if report.error is not None and not (by_topic and report.outcomes):
        return f"{begin}failed, {report.failures} in a row: {_cause(report.error)}{end}"
    if not by_topic:
        [outcome] = report.outcomes
        assert outcome.loaded is not None
        return f"{begin}{_loaded_text(outcome.loaded, outcome.lag or 0)}{end}"
    shown = [outcome for outcome in report.outcomes if outcome.has_news]
    lines = [f"{begin}{len(report.outcomes) - len(shown):,} of {len(report.outcomes):,} loads have nothing new{end}"]
    for outcome in shown:
        what = f"failed, {outcome.failures} in a row: {_cause(outcome.error)}" if outcome.error else ""
        if outcome.loaded is not None:
            what = _loaded_text(outcome.loaded, outcome.lag or 0)
        lines.append(f"  {outcome.topic}  {what}")
    return "\n".join(lines)


def _loaded_text(loaded: Loaded, lag: int) -> str:
    records = sum(part.records for part in loaded.partitions)
    runs = ", ".join(map(str, loaded.runs))
    what = f"run {runs}: {records:,} records, lag {lag:,}" if runs else f"nothing new, lag {lag:,}"
    if bad := loaded.bad:
        what += f", {bad:,} bad"
    if loaded.left_out:
        what += f", without {some_of(list(loaded.left_out))}"
    if failed := loaded.failed:
        what += f", failed for {some_of([f'{part.topic}-{part.partition} ({part.error})' for part in failed])}"
    return what


def _time(report: RunReport | Upkept) -> str:
    return datetime.fromtimestamp(report.began, timezone.utc).isoformat(timespec="seconds")


def _cause(error: Exception) -> str:
    from spark_klog.load.tasks.task import cause_of

    return cause_of(error)
