"""The emitter: in order, never waiting, bounded, and what is lost when a server is slow, down or refuses."""

from __future__ import annotations

import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from openlineage.client import OpenLineageClient
from openlineage.client.event_v2 import Job, Run, RunEvent, RunState
from openlineage.client.transport import Transport

from spark_klog.client import Admin
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError
from spark_klog.lineage.emitter import Emitter
from tests.support.servers.openlineage import lineage_server
from tests.support.waiting import wait_until


def event(number: int, state: RunState = RunState.RUNNING) -> RunEvent:
    return RunEvent(
        eventTime="2026-11-27T10:00:00Z", eventType=state, run=Run(str(uuid4())), job=Job("default", str(number))
    )


class Gate(Transport):
    """Keeps events; waits for `is_open` with each."""

    kind = "gate"

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.taken: list[RunEvent] = []

    def emit(self, event: RunEvent) -> None:  # type: ignore[override]
        assert self.is_open.wait(30)
        self.taken.append(event)

    @property
    def names(self) -> list[int]:
        return [int(one.job.name) for one in self.taken]


def test_events_are_sent_in_order_and_none_waits() -> None:
    gate = Gate()
    emitter = Emitter(OpenLineageClient(transport=gate))
    began = time.monotonic()
    for number in range(100):
        emitter.emit(event(number))
    assert time.monotonic() - began < 5
    assert not emitter.flush(0.05)
    gate.is_open.set()
    assert emitter.close(20)
    assert gate.names == list(range(100))
    assert (emitter.sent, emitter.dropped, emitter.failed) == (100, 0, 0)
    emitter.emit(event(100))
    assert emitter.dropped == 1
    assert emitter.close(0)


def test_a_full_queue_keeps_starts_and_ends_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    emitter = Emitter(OpenLineageClient(transport=gate), bound=4)
    emitter.emit(event(0, RunState.START))
    wait_until(lambda: not emitter._queue, "the thread takes the first one")
    for number in range(1, 9):
        emitter.emit(event(number))
    emitter.emit(event(9, RunState.COMPLETE))
    assert emitter.dropped == 5
    for number in range(10, 14):
        emitter.emit(event(number, RunState.START))
    # of starts and ends the newest are dropped
    assert emitter.dropped == 9
    gate.is_open.set()
    assert emitter.close(20)
    assert gate.names == [0, 9, 10, 11, 12]
    lost = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lost) == 2
    assert lost[0].startswith("OpenLineage events are lost by the transport gate (the queue is full")
    assert lost[1] == "5 OpenLineage events sent, 9 dropped, 0 refused"


def test_the_end_does_not_wait_longer_than_its_deadline() -> None:
    with lineage_server() as server:
        server.get_stuck()
        config = {"transport": {"type": "http", "url": server.url}}
        emitter = Emitter(OpenLineageClient(config=config))
        for number in range(5):
            emitter.emit(event(number))
        began = time.monotonic()
        assert not emitter.close(0.3)
        assert 0.2 < time.monotonic() - began < 5
        assert emitter.dropped == 4


@pytest.mark.parametrize("status", [500, 401])
def test_refused_events_are_counted_and_the_warning_has_no_secret(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with lineage_server() as server:
        server.status = status
        url = server.url.replace("//", "//user:hunter2@")
        transport = {
            "type": "http",
            "url": url,
            "retry": {"total": 0},
            "auth": {"type": "api_key", "apiKey": "hunter3"},
        }
        emitter = Emitter(OpenLineageClient(config={"transport": transport}))
        emitter.emit(event(0))
        emitter.emit(event(1))
        assert emitter.flush(20)
        assert (emitter.sent, emitter.failed) == (0, 2)
        server.status = 201
        emitter.emit(event(2))
        assert emitter.close(20)
        assert (emitter.sent, emitter.failed) == (1, 2)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("spark_klog")]
    assert len(ours) == 2
    assert status == 500 or "(HTTPError: status 401)" in ours[0]  # the client tries again after 500
    assert "hunter" not in "".join(ours)


def test_a_server_that_is_down_costs_events_only() -> None:
    with lineage_server() as server:
        url = server.url
    retry = {"total": 1, "connect": 1, "backoff_factor": 0.01}
    emitter = Emitter(OpenLineageClient(config={"transport": {"type": "http", "url": url, "retry": retry}}))
    emitter.emit(event(0))
    assert emitter.flush(20)
    assert (emitter.sent, emitter.failed) == (0, 1)


def kafka_transport(servers: str, **settings: Any) -> dict[str, Any]:
    config = {"bootstrap.servers": servers, "message.timeout.ms": "300", "log_level": "0"}
    return {"type": "kafka", "topic": "lineage", "config": config, **settings}


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("within", ["alone", "composite", "without flush"])
def test_events_that_kafka_does_not_acknowledge(within: str, caplog: pytest.LogCaptureFixture) -> None:
    transport = kafka_transport(f"127.0.0.1:{closed_port()}", flush=within != "without flush")
    if within == "composite":
        transport = {"type": "composite", "transports": [transport]}
    client = OpenLineageClient(config={"transport": transport})
    emitter = Emitter(client)
    emitter.emit(event(0))
    emitter.emit(event(1))
    assert emitter.flush(20)
    if within == "without flush":
        assert emitter.sent == 2  # they are in the producer's queue
        assert client.close(20)
    assert (emitter.sent, emitter.failed) == (0, 2)
    assert emitter.close(20)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("spark_klog")]
    assert "(_MSG_TIMED_OUT)" in ours[0]
    assert ours[1:] == ["0 OpenLineage events sent, 0 dropped, 2 refused"]


def test_events_that_kafka_acknowledges() -> None:
    with EmbeddedCluster() as cluster:
        with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
            admin.create_topic("lineage", 1)
        transport = kafka_transport(cluster.bootstrap_servers)
        transport["config"]["message.timeout.ms"] = "30000"
        emitter = Emitter(OpenLineageClient(config={"transport": transport}))
        emitter.emit(event(0))
        assert emitter.flush(20)
        assert (emitter.sent, emitter.failed) == (1, 0)
        assert emitter.close(20)


def test_after_the_first_loss_other_loggers_are_quiet(caplog: pytest.LogCaptureFixture) -> None:
    with lineage_server() as server:
        url = server.url
    retry = {"total": 1, "connect": 1, "backoff_factor": 0.01}
    http = {"type": "http", "url": url, "retry": retry}
    emitter = Emitter(OpenLineageClient(config={"transport": {"type": "composite", "transports": [http]}}))
    emitter.emit(event(0))
    assert emitter.flush(20)
    first = [record.name.partition(".")[0] for record in caplog.records if record.levelno >= logging.WARNING]
    assert set(first) == {"urllib3", "openlineage", "spark_klog"}
    caplog.clear()
    for number in range(3):
        emitter.emit(event(number))
    assert emitter.flush(20)
    assert emitter.failed == 4
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    logging.getLogger("urllib3.connectionpool").warning("another thread's")
    assert caplog.records[-1].getMessage() == "another thread's"


def test_a_file_that_can_not_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "missing" / "events.jsonl"
    transport = {"type": "file", "log_file_path": str(path), "append": True}
    emitter = Emitter(OpenLineageClient(config={"transport": transport}))
    emitter.emit(event(0))
    assert emitter.flush(20)
    assert f"(FileNotFoundError: No such file or directory: {path})" in caplog.records[-1].getMessage()


def test_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENLINEAGE_DISABLED", "true")
    emitter = Emitter()
    emitter.emit(event(0))
    assert emitter.close(1)
    assert (emitter._thread, emitter.sent, emitter.dropped) == (None, 0, 0)


def test_settings_that_the_client_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT", '{"type": "http", "auth": {"type": "api_key", "apiKey": "hunter2"}}')
    with pytest.raises(ConfigError, match="OpenLineage's client refuses its settings") as caught:
        Emitter()
    assert "hunter2" not in str(caught.value)
