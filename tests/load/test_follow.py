"""A load that follows its topics: when it runs, what ends it, what it reports."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from spark_klog.cli.jobs import batch_load
from spark_klog.cli.output import duration
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, ConnectionFailed, DataLossError, LoadError, SaslError
from spark_klog.load import follow
from spark_klog.load.by_topic import Outcome
from spark_klog.load.journal.model import PartitionAudit
from spark_klog.load.run import Loaded
from spark_klog.load.upkeep import Kempt, Upkept
from tests.load.job_program import Runner
from tests.load.support import by_duckdb, expected, run
from tests.spark.support import create_topic, delete_records, produce, values
from tests.support.runs.soak import SOAK
from tests.support.servers.kafka import free_port

_SECONDS = 60


def _loaded(runs: list[int], lag: int = 0, error: str = "") -> Loaded:
    audit = PartitionAudit("t", 0, 0, 10, 10, 10, 100, None, None, {}, 0, 10 + lag, error)
    return Loaded(runs, [audit], 1, [], [], {("t", 0): 10})


class _Clock:
    """Stands for the time: a sleep takes none."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(follow, "time", made)
    return made


def _runs(
    clock: _Clock, answers: list[Loaded | Exception], took: float = 1.0, **options: Any
) -> tuple[list[float], Any]:
    """When runs began that end so, and the error that ended them; they end for good after the last answer."""
    starts: list[float] = []
    left = iter(answers)

    def one() -> list[Outcome]:
        starts.append(clock.now)
        clock.now += took
        answer = next(left)
        return [Outcome("", "out", None, answer) if isinstance(answer, Exception) else Outcome("", "out", answer)]

    settings = {"every": 30.0, "max_failures": 10, "is_stopping": lambda: len(starts) == len(answers)} | options
    try:
        for _ in follow.follow(one, **settings):
            pass
    except Exception as error:
        return starts, error
    return starts, None


def test_a_run_begins_every_interval(clock: _Clock) -> None:
    starts, error = _runs(clock, [_loaded([1])] * 4)
    assert [round(after - before) for before, after in pairwise(starts)] == [30, 30, 30]
    assert error is None


def test_a_run_that_takes_longer_than_the_interval(clock: _Clock) -> None:
    starts, _ = _runs(clock, [_loaded([1])] * 3, took=70.0)
    assert [round(after - before) for before, after in pairwise(starts)] == [70, 70]


def test_pauses_after_failed_runs_double(clock: _Clock) -> None:
    failed = LoadError("the store is gone")
    starts, error = _runs(clock, [_loaded([1]), *[failed] * 5, _loaded([2]), failed, _loaded([3])])
    pauses = [round(after - before) for before, after in pairwise(starts)]
    assert pauses == [30, 60, 120, 240, 300, 300, 30, 60]
    assert error is None


@pytest.mark.parametrize(
    "error",
    [ConfigError("no such topic"), DataLossError("retention"), SaslError("wrong password")],
    ids=lambda error: type(error).__name__,
)
def test_errors_that_no_later_run_gets_over(clock: _Clock, error: Exception) -> None:
    starts, ended = _runs(clock, [_loaded([1]), error, _loaded([2])])
    assert (len(starts), ended) == (2, error)


def test_a_first_run_that_fails(clock: _Clock) -> None:
    failed = ConnectionFailed("no broker")
    starts, ended = _runs(clock, [failed, _loaded([1])])
    assert (len(starts), ended) == (1, failed)


def test_too_many_failed_runs_in_a_row(clock: _Clock) -> None:
    failed = LoadError("the store is gone")
    starts, ended = _runs(clock, [_loaded([1]), failed, _loaded([2]), *[failed] * 9], max_failures=3)
    assert (len(starts), ended) == (6, failed)
    partly = _loaded([1], lag=5, error="no leader")
    starts, ended = _runs(clock, [*[partly] * 9], max_failures=3)
    assert len(starts) == 3
    assert "3 runs in a row" in str(ended)


def test_spark_is_gone(clock: _Clock) -> None:
    starts, ended = _runs(clock, [_loaded([1])] * 3, has_ended=lambda: clock.now > 1010)
    assert len(starts) == 1
    assert "the Spark application has ended" in str(ended)


def test_metrics_of_runs(clock: _Clock) -> None:
    metrics = follow.LoadMetrics()
    for answer in (_loaded([7]), _loaded([]), _loaded([8], lag=3), None):
        error, failures = (LoadError("gone"), 1) if answer is None else (None, 0)
        outcome = Outcome("", "out", answer, error, failures)
        metrics.add(follow.RunReport(clock.now, 1.5, [outcome], error, failures))
        clock.now += 10
    done = [Kempt("out", "", 3), Kempt("out", "", error=LoadError("gone"))]
    metrics.add_upkeep(Upkept(clock.now, 2.5, done))
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families("".join(metrics.page()))
        for sample in family.samples
    }
    assert found == {
        ("klog_load_runs_total", "committed"): 2,
        ("klog_load_runs_total", "nothing_new"): 1,
        ("klog_load_runs_total", "failed"): 1,
        ("klog_load_records_total", "t"): 30,
        ("klog_load_bytes_total", "t"): 300,
        ("klog_load_bad_total", "t"): 0,
        ("klog_load_lag_records", "t", "0"): 3,
        ("klog_load_series_left_out",): 0,
        ("klog_load_failures_in_a_row",): 1,
        ("klog_load_freshness_seconds",): 30,
        ("klog_load_last_committed_run",): 8,
        ("klog_load_last_run_timestamp_seconds",): 1030,
        ("klog_load_last_run_seconds",): 1.5,
        ("klog_load_upkeeps_total", "done"): 1,
        ("klog_load_upkeeps_total", "failed"): 1,
        ("klog_load_last_upkeep_timestamp_seconds",): 1040,
        ("klog_load_last_upkeep_seconds",): 2.5,
    }
    documented = {line.split("|")[1].strip() for line in (follow.__doc__ or "").splitlines() if "| klog_" in line}
    assert documented == {name for name, *_ in found}


# The command


@contextmanager
def _doing(action: Callable[[], None]) -> Iterator[None]:
    """Do something in a thread meanwhile; what it raises is raised at the end."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            action()
        except BaseException as error:
            failed.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join(_SECONDS)
    if failed:
        raise failed[0]


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_follow(cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers, port = cluster.bootstrap_servers, free_port()
    monkeypatch.setattr(batch_load, "SparkRunner", Runner)
    create_topic(servers, topic)
    page = ""

    def read() -> str:
        with suppress(ConnectionError, URLError):  # it has not begun
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_SECONDS) as answer:
                return str(answer.read(), "utf-8")
        return ""

    def meanwhile() -> None:
        nonlocal page
        for number in range(3):
            produce(servers, topic, values(10, start=10 * number))
            _wait(lambda number=number: f"klog_load_last_committed_run {number + 1}\n" in read())
        page = read()
        os.kill(os.getpid(), signal.SIGTERM)

    arguments = ["-b", servers, "--topics", topic, "--output", str(tmp_path), "--follow", "--every", "0.2s", "--json"]
    before = signal.getsignal(signal.SIGTERM)
    with _doing(meanwhile):
        found = CliRunner().invoke(batch_load.main, [*arguments, "--metrics", str(port)])
    assert found.exit_code == 0, found.output
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    assert [line["result"] for line in lines if line["runs"]] == ["committed"] * 3
    assert [line["runs"] for line in lines if line["runs"]] == [["00000001"], ["00000002"], ["00000003"]]
    assert {line["failures"] for line in lines} == {0}
    assert lines[-1]["lag"] == 0
    assert lines[-1]["freshness"] < _SECONDS
    assert 'klog_load_runs_total{result="committed"} 3\n' in page
    assert f'klog_load_records_total{{topic="{topic}"}} 30\n' in page
    assert by_duckdb(tmp_path) == expected(topic, {0: 30})
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_failed_run_goes_on(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker is down for a run, then retention takes records that nobody has loaded: that ends it."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, values(10))
    runs = 0

    class Failing(Runner):
        def run(self, *arguments: Any) -> None:
            nonlocal runs
            runs += 1
            if runs == 2:
                raise LoadError("the store is gone")
            super().run(*arguments)
            if runs == 3:
                produce(servers, topic, values(10, start=20))
                delete_records(servers, topic, {0: 25})
                return
            produce(servers, topic, values(10, start=10 * runs))

    monkeypatch.setattr(batch_load, "SparkRunner", Failing)
    arguments = ["-b", servers, "--topics", topic, "--output", str(tmp_path), "--follow", "--every", "0.1"]
    found = CliRunner().invoke(batch_load.main, arguments)
    assert found.exit_code == 1
    assert "failed, 1 in a row: the store is gone" in found.stdout
    assert f"{topic}-0: wanted [20, 25), available [25, 30) (retention)" in found.stderr
    assert by_duckdb(tmp_path) == expected(topic, {0: 20})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--every", "30s"], "--every is for --follow"),
        (["--metrics", "9404"], "--metrics is for --follow"),
        (["--compact-every", "1h"], "--compact-every is for --follow"),
        (["--follow", "--expire", "1d"], "--expire is for --table: a folder has no old states"),
        (["--follow", "--compact-every", "1h", "--format", "json"], "is for --format parquet and --table, not json"),
        (["--follow", "--every", "0s"], "'0s' is not a positive duration: give one like 30s, 5m, 1h or 7d"),
        (["--follow", "--from-run", "3"], "exclude --follow: load once from there, then follow"),
        (["--follow", "--format", "delta", "--checkpoint", "c"], "a query of Spark has a trigger of its own"),
    ],
)
def test_wrong_arguments(options: list[str], words: str) -> None:
    found = CliRunner().invoke(batch_load.main, ["-b", "127.0.0.1:1", "--topics", "t", "--output", "o", *options])
    assert (found.exit_code, words in found.stderr) == (2, True), found.stderr


def test_durations() -> None:
    assert [duration(text) for text in ("30s", "1.5m", "1h", "2")] == [30, 90, 3600, 2]


@pytest.mark.test_all("long")
def test_memory_does_not_grow(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers, runs = cluster.bootstrap_servers, int(os.environ.get("SPARK_KLOG_KILLS") or 60)
    create_topic(servers, topic)
    metrics, sizes = follow.LoadMetrics(), []

    def one() -> list[Outcome]:
        produce(servers, topic, values(10, start=10 * len(sizes)))
        return [Outcome("", str(tmp_path), run(servers, tmp_path, topic))]

    tracemalloc.start()
    try:
        for report in follow.follow(one, 0.001, 1, lambda: len(sizes) >= runs):
            metrics.add(report)
            "".join(metrics.page())
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert by_duckdb(tmp_path) == expected(topic, {0: 10 * runs})
    middle = max(sizes[runs // 3 : runs // 2])
    assert max(sizes[-runs // 4 :]) - middle < 300_000, sizes


@pytest.mark.test_all("long")
def test_signals_to_a_job_of_spark(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """SIGTERM in a run ends the job after it; Spark's own handler of SIGINT does not come first."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    signals = (signal.SIGINT, signal.SIGTERM) if SOAK else (signal.SIGINT,)
    for number, sent in enumerate(signals):
        produce(servers, topic, values(1000, start=1000 * number))
        arguments = ["-b", servers, "--topics", topic, "--output", str(tmp_path / "out"), "--follow", "--every", "1h"]
        command = [sys.executable, "-m", "spark_klog.cli.jobs.batch_load", *arguments]
        errors = (tmp_path / f"{number}.err").open("w")
        with errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as job:
            try:
                plan = tmp_path / f"out/_klog/runs/{number + 1:08d}/plan.json"
                _wait(plan.exists)
                job.send_signal(sent)
                output, _ = job.communicate(timeout=_SECONDS)
            finally:
                job.kill()
        said = Path(errors.name).read_text()
        assert job.returncode == 0, said
        assert f"run {number + 1}: 1,000 records, lag 0" in output
        assert "ending after the run that is under way" in said
    assert by_duckdb(tmp_path / "out") == expected(topic, {0: 1000 * len(signals)})
