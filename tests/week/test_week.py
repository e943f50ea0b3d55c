"""A week in a shorter time: micro-batches and requests follow each other at once, retention is of megabytes, tokens end
after seconds, and servers are killed and get new certificates. What all of it takes stays flat, and no record is lost.

SPARK_KLOG_WEEK_SECONDS is how long (`make soak`: 5,400; in the two minutes of `make test-all` nothing could grow much).
Its folder keeps samples.jsonl and figures.json.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.jobs.support import ROOT, environment
from tests.spark.support import create_topic, wait_for
from tests.support.clients.klog import klog_command
from tests.support.runs.soak import SOAK
from tests.support.servers.broker import KlogBroker
from tests.support.servers.certificates import make_certificates
from tests.support.servers.kafka import HOST, NEWEST, free_port
from tests.support.servers.secure_kafka import SecureKafka, secure_kafka, tls_properties
from tests.week.watch import SETTLED, Watch

_SECONDS = float(os.environ.get("SPARK_KLOG_WEEK_SECONDS", "120"))
_PARTITIONS, _TOKEN_SECONDS = 4, 20.0
_SAMPLES = 100
#: Processes end, and records arrive, within this time.
_PATIENCE = 300.0
_BROKER = {
    # of a partition's 7 KB a second: after a quarter of the time as much is deleted as is written
    "log.segment.bytes": 1 << 20,
    "log.retention.bytes": max(2 << 20, int(1500 * _SECONDS)),
    "log.retention.check.interval.ms": 5000,
    "log.segment.delete.delay.ms": 1000,
    "log.cleaner.backoff.ms": 5000,
    "log.cleaner.delete.retention.ms": 30_000,
    "transaction.remove.expired.transaction.cleanup.interval.ms": 10_000,
}
_SPARK = {
    "spark.ui.enabled": "false",
    "spark.driver.memory": "1g",
    "spark.driver.bindAddress": HOST,
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.streaming.minBatchesToRetain": "20",
    "spark.ui.showConsoleProgress": "false",
    "spark.python.authenticate.socketTimeout": "300s",  # of a busy machine; heartbeats, too
    "spark.network.timeout": "600s",
}
_SUBMIT = {
    "PYSPARK_SUBMIT_ARGS": " ".join(f"--conf {name}={value}" for name, value in _SPARK.items()) + " pyspark-shell"
}
pytestmark = [pytest.mark.peer, pytest.mark.test_all("long")]


class _Running:
    """A process whose lines of JSON say what it has done."""

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self.name = name
        self._output, self._errors = folder / f"{name}.jsonl", folder / f"{name}.log"
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=environment(folder) | _SUBMIT,
                cwd=ROOT,
            )
        self.pid = self._process.pid

    def last(self) -> dict[str, Any]:
        """The last line; {} before it."""
        with self._output.open("rb") as file:
            file.seek(max(0, self._output.stat().st_size - 65_536))
            lines = file.read().split(b"\n")[:-1]
        told = [line for line in lines if line.startswith(b"{")]
        return dict(json.loads(told[-1])) if told else {}

    def has_begun(self) -> bool:
        told = self.last()
        return self.name == "page" or (bool(told) and -1 not in told.values())

    def output(self) -> str:
        return self._output.read_text()

    def check(self) -> None:
        if (code := self._process.poll()) is not None:
            tail = self._errors.read_text(errors="replace")[-4000:]
            raise AssertionError(f"{self.name} has ended with {code}:\n{tail}")

    def end(self) -> None:
        """SIGTERM; it must end cleanly."""
        self.check()
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(_PATIENCE)
        assert code == 0, f"{self.name}: {code}\n{self._errors.read_text(errors='replace')[-4000:]}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _program(name: str, asked: Mapping[str, Any]) -> list[str]:
    return [sys.executable, "-m", "tests.week.programs", name, json.dumps(asked)]


class _Week:
    def __init__(self, folder: Path, broker: KlogBroker, registry: int, secure: SecureKafka) -> None:
        self.folder, self.broker, self.secure = folder, broker, secure
        self._registry = f"http://{HOST}:{registry}"
        self._secured = secure.client("SASL_SSL", "OAUTHBEARER")
        self.running: dict[str, _Running] = {}

    def start(self) -> None:
        """All programs."""
        ours, registry = {"bootstrap.servers": self.broker.bootstrap_servers}, {"schema.registry.url": self._registry}
        reading = {"auto.offset.reset": "earliest", "isolation.level": "read_committed", "enable.auto.commit": "false"}
        new = {"group.protocol": "consumer"}
        self._run("produce", {
            "client": ours, "registry": self._registry, "topic": "clicks", "partitions": _PARTITIONS, "each": 100,
            "bytes": 100, "pause": 0.25, "schema_seconds": max(10.0, _SECONDS / 20),
        })  # fmt: skip
        member = {"partitions": _PARTITIONS, "member_seconds": max(10.0, _SECONDS / 100)}
        for name, topic, client in (
            ("numbers", "clicks", ours | registry | {"value.deserializer": "avro"} | new),
            ("copies", "copies", ours),
            ("mirrored", "clicks", self._secured | registry | {"value.deserializer": "avro"}),
        ):
            self._run(
                f"consume-{name}", {**member, "topic": topic, "client": client | reading | {"group.id": f"w-{name}"}}
            )
        self._run("answer", {
            "client": self._secured | {"auto.offset.reset": "earliest", "linger.ms": "0"},
            "topics": ["questions", "answers"], "each": 20, "pause": 0.2,
        })  # fmt: skip
        target = self.folder / "target.properties"
        target.write_text("".join(f"{name}={value}\n" for name, value in self._secured.items()))
        words = ["--from", self.broker.bootstrap_servers, "--to", str(target), "--topics", "clicks", "--name", "week"]
        self._start("mirror", klog_command("mirror", *words, "--exactly-once", "--json", "--replication-factor", "1"))
        loading = ["-b", self.broker.bootstrap_servers, "--topics", "clicks", "--table", f"delta:{self._table}"]
        loading += ["--table-columns", "values", "--value-format", "avro", "-r", self._registry, "--follow"]
        loading += ["--schema-evolution", "latest", "--every", "2s", "--compact-every", "20s", "--expire", "20s"]
        # not by spark-submit, whose JVM would get the SIGTERM
        self._start("load", [sys.executable, "-m", "spark_klog.cli.jobs.batch_load", *loading, "--json"])
        shown = ["--checkpoint", str(self.folder / "checkpoints" / "copied"), "--load", str(self._table)]
        listen = ["--listen", str(free_port()), "-b", self.broker.bootstrap_servers, "-r", self._registry]
        self._start("page", klog_command("ui", *listen, *shown))
        query = {f"kafka.{name}": value for name, value in self._secured.items()}
        self._run("query", {
            "spark": _SPARK, "registry": self._registry, "topic": "clicks", "to": "copies", "quiet": "quiet",
            "mirrored": "clicks", "ours": {"kafka.bootstrap.servers": self.broker.bootstrap_servers},
            "secured": query, "checkpoints": str(self.folder / "checkpoints"), "every": "0 seconds",
            "idle_every": "200 milliseconds",
        })  # fmt: skip
        address = re.compile(r"(http://\S+/)\?token=(\S+)\n")
        wait_for(lambda: address.search(self.running["page"].output()) is not None, "the page")
        told = address.search(self.running["page"].output())
        assert told is not None
        self._run("look", {"address": told[1], "token": told[2], "topic": "clicks", "pause": 1.0})

    @property
    def _table(self) -> Path:
        return self.folder / "table"

    def _run(self, name: str, asked: Mapping[str, Any]) -> None:
        self._start(name, _program(name.split("-")[0], asked))

    def _start(self, name: str, command: Sequence[str]) -> None:
        self.running[name] = _Running(name, command, self.folder)

    def watch(self) -> Watch:
        trees = {name: partial(getattr, each, "pid") for name, each in self.running.items()}
        folders: dict[str, Callable[[], Iterable[Path]]] = {
            "checkpoints": lambda: [self.folder / "checkpoints"],
            "log of the table": lambda: [self._table / "_delta_log"],
        }
        for topic in ("clicks", "copies", "quiet", "_schemas", "__consumer_offsets", "__transaction_state"):
            folders[topic] = partial(self.broker.data_dir.glob, f"{topic}-*")
        return Watch(trees | {"broker": lambda: self.broker.pid}, folders, self.folder / "samples.jsonl")

    def restart_broker(self, end: Callable[[], object]) -> None:
        end()
        self.broker.start()

    def renew_certificates(self) -> None:
        """A new authority and a new certificate of the server: clients trust both authorities for a time."""
        files, made = self.secure.certificates, make_certificates(self.folder / "renewed")
        old, new = files.ca.read_text(), made.ca.read_text()
        _replace(files.ca, old + new)
        shutil.copy(made.server, files.server)
        tls_properties(files, self.folder / "secure")
        self.secure.kafka.stop()
        self.secure.kafka.start()
        _replace(files.ca, new)

    def wait_for_all(self) -> None:
        """Until each program has done something."""
        for each in self.running.values():
            self._wait(each.has_begun, each.name)

    def check(self) -> None:
        for each in self.running.values():
            each.check()

    def finish(self) -> int:
        """End all programs once all have what was produced; the number of records."""
        self.running.pop("produce").end()
        last = json.loads((self.folder / "produce.jsonl").read_bytes().splitlines()[-1])
        records = int(last["records"])
        for name in ("consume-numbers", "consume-copies", "consume-mirrored"):
            self._wait(lambda name=name: self.running[name].last().get("next", 0) >= records, name)  # type: ignore[misc]
        self._wait(lambda: self._loaded() == records, "the table")
        table = DeltaTable(str(self._table)).to_pyarrow_table(columns=["number"])
        assert sorted(table["number"].to_pylist()) == list(range(records))
        self.running.pop("look").end()  # before the page
        for each in self.running.values():
            each.end()
        return records

    def check_journal(self) -> None:
        """The load's journal keeps all runs: some files of a few KB each."""
        files = [path for path in (self._table / "_klog").rglob("*") if path.is_file()]
        runs = sum(path.name == "plan.json" for path in files)
        assert len(files) <= 4 * runs + 20
        assert sum(path.stat().st_size for path in files) <= 12_000 * runs + (1 << 20)

    def told(self) -> dict[str, dict[str, Any]]:
        """The last line of each program."""
        return {name: each.last() for name, each in self.running.items()}

    def _loaded(self) -> int:
        return int(DeltaTable(str(self._table)).to_pyarrow_dataset().count_rows())

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not done():
            self.check()
            assert time.monotonic() < deadline, f"{what} is not where it should be: {self.told()}"
            time.sleep(0.5)


def _replace(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


@contextmanager
def _running(folder: Path) -> Iterator[_Week]:
    registry = free_port()
    settings = [word for name, value in _BROKER.items() for word in ("--set", f"{name}={value}")]
    broker = KlogBroker(folder / "ours", *settings, "--schema-registry", f"{HOST}:{registry}")
    with broker, secure_kafka(NEWEST, folder / "secure") as secure:
        secure.tokens.lifetime = _TOKEN_SECONDS
        create_topic(broker.bootstrap_servers, "clicks", _PARTITIONS)
        # copies have a third of the bytes
        least = str(max(1 << 20, int(500 * _SECONDS)))
        create_topic(broker.bootstrap_servers, "copies", _PARTITIONS, **{"retention.bytes": least})
        create_topic(broker.bootstrap_servers, "quiet")
        for topic, partitions in (("clicks", _PARTITIONS), ("questions", 1), ("answers", 1)):
            create_topic(secure.kafka.bootstrap_servers, topic, partitions)
        week = _Week(folder, broker, registry, secure)
        try:
            week.start()
            week.wait_for_all()
            yield week
        finally:
            for each in week.running.values():
                each.kill()


def test_a_week(tmp_path: Path) -> None:
    with _running(tmp_path) as week:
        watch = week.watch()
        began = time.monotonic()
        # by the share of the time; all before SETTLED
        events: list[tuple[float, Callable[[], object]]] = [
            (0.10, lambda: week.restart_broker(week.broker.kill)),
            (0.15, week.renew_certificates),
            (0.25, lambda: week.restart_broker(week.broker.stop)),
            (0.35, week.renew_certificates),
            (0.40, lambda: week.restart_broker(week.broker.kill)),
        ]
        assert events[-1][0] < SETTLED
        for number in range(_SAMPLES + 1):
            share = number / _SAMPLES
            while events and events[0][0] <= share:
                events.pop(0)[1]()
            time.sleep(max(0.0, began + share * _SECONDS - time.monotonic()))
            week.check()
            watch.sample(share)
        done = week.told()
        records = week.finish()
        week.check_journal()
    figures = {f"{name}, {figure}": pair for name, figure, *pair in watch.table()}
    (tmp_path / "figures.json").write_text(json.dumps({"records": records, "done": done, "figures": figures}, indent=1))
    assert week.secure.tokens.given > _SECONDS / _TOKEN_SECONDS
    if SOAK:
        assert watch.grown() == []
