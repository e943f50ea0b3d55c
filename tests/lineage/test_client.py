"""Where events go: by Spark's settings, the environment and files; what is wrong is told, without secrets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from openlineage.client.event_v2 import Job, Run, RunEvent, RunState
from openlineage.client.transport import CompositeTransport, FileTransport, HttpTransport, KafkaTransport

from spark_klog.errors import ConfigError, MissingPackage
from spark_klog.lineage.client import open_client
from spark_klog.lineage.emitter import Emitter
from tests.support.servers.openlineage import lineage_server

SPARK = "spark.openlineage.transport."


@pytest.fixture(autouse=True)
def no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def event() -> RunEvent:
    return RunEvent(
        eventTime="2026-11-27T10:00:00Z", eventType=RunState.START, run=Run(str(uuid4())), job=Job("default", "j")
    )


def test_settings_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"type": "http", "url": "http://127.0.0.1:1", "auth": {"type": "api_key", "apiKey": "of another server"}}
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT", json.dumps(other))
    with lineage_server() as server:
        conf = {f"{SPARK}type": "http", f"{SPARK}url": server.url, f"{SPARK}timeoutInMillis": "2500"}
        emitter = Emitter(conf=conf)
        emitter.emit(event())
        assert emitter.close(20)
        assert (emitter.sent, len(server.events)) == (1, 1)
    transport = open_client(conf).transport
    assert isinstance(transport, HttpTransport)
    assert transport.timeout == 2.5
    assert transport.config.auth.get_bearer() is None
    transport = open_client({**conf, f"{SPARK}auth.type": "api_key", f"{SPARK}auth.apiKey": "k"}).transport
    assert isinstance(transport, HttpTransport)
    assert transport.config.auth.get_bearer() == "Bearer k"


def test_other_transports_of_the_agent(tmp_path: Path) -> None:
    path = str(tmp_path / "events.jsonl")
    file = open_client({f"{SPARK}type": "file", f"{SPARK}location": path}).transport
    assert isinstance(file, FileTransport)
    assert (file.config.log_file_path, file.config.append) == (path, True)
    conf = {
        f"{SPARK}type": "composite",
        f"{SPARK}continueOnFailure": "false",
        f"{SPARK}transports.a.type": "http",
        f"{SPARK}transports.a.url": "http://127.0.0.1:1",
        f"{SPARK}transports.b.type": "kafka",
        f"{SPARK}transports.b.topicName": "lineage",
        f"{SPARK}transports.b.properties.bootstrap.servers": "127.0.0.1:1",
        f"{SPARK}transports.b.properties.key.serializer": "org.apache.kafka.common.serialization.StringSerializer",
    }
    composite = open_client(conf).transport
    assert isinstance(composite, CompositeTransport)
    assert not composite.config.continue_on_failure
    http, kafka = composite.transports
    assert isinstance(http, HttpTransport)
    assert isinstance(kafka, KafkaTransport)
    assert (kafka.topic, kafka.kafka_config.config) == ("lineage", {"bootstrap.servers": "127.0.0.1:1"})


def test_the_agent_is_disabled() -> None:
    emitter = Emitter(conf={"spark.openlineage.disabled": "true", f"{SPARK}type": "nonsense"})
    emitter.emit(event())
    assert emitter.is_disabled
    assert emitter.close(1)


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"url": "http://h:1"}, "spark.openlineage.transport.type is missing"),
        ({"type": "s3"}, "spark.openlineage.transport.type is 's3': of Spark's settings klog takes composite, console"),
        ({"type": "http"}, "spark.openlineage.transport.url is missing"),
        ({"type": "http", "url": "marquez:5000"}, "spark.openlineage.transport.url is 'marquez:5000': write http://"),
        ({"type": "http", "url": "http://h:1", "timeoutInMillis": "5s"}, "timeoutInMillis is '5s'"),
        ({"type": "http", "url": "http://h:1", "auth": "a", "auth.type": "api_key"}, "auth.type is set beside another"),
        ({"type": "composite"}, "spark.openlineage.transport.transports.NAME.type is missing"),
        ({"type": "composite", "transports.a.url": "u"}, "spark.openlineage.transport.transports.a.type is missing"),
        ({"type": "kafka"}, "OpenLineage's client refuses its settings"),
    ],
)
def test_wrong_settings_of_the_agent(conf: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        open_client({f"{SPARK}{name}": value for name, value in conf.items()})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"OPENLINEAGE__TRANSPORT__TYPE": "htpp"}, "OPENLINEAGE__TRANSPORT__TYPE is 'htpp', which is no transport"),
        ({"OPENLINEAGE__TRANSPORT": '{"type": "htpp"}'}, "OPENLINEAGE__TRANSPORT, type, is 'htpp'"),
        ({"OPENLINEAGE_URL": "marquez:5000"}, "OPENLINEAGE_URL is 'marquez:5000': write http://HOST:PORT"),
        (
            {"OPENLINEAGE__TRANSPORT__TYPE": "http", "OPENLINEAGE__TRANSPORT__URL": "http://"},
            "OPENLINEAGE__TRANSPORT__URL is 'http://': write http://HOST:PORT",
        ),
        ({"OPENLINEAGE_CONFIG": "missing.yml"}, "OPENLINEAGE_CONFIG is missing.yml, which is no file that can be read"),
    ],
)
def test_wrong_variables(environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        open_client({})
    assert str(caught.value).startswith(message)
    monkeypatch.setenv("OPENLINEAGE_DISABLED", "true")
    assert open_client({}).transport.kind == "noop"


@pytest.mark.parametrize("name", ["openlineage.yml", "named.yml"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("transport:\n  type: http\n url: http://hunter2\n", "is OpenLineage's settings, but no YAML in line 3"),
        ("- hunter2\n", "is OpenLineage's settings, but has no mapping"),
        ("", "is OpenLineage's settings, but has no mapping"),
        ("transport:\n  type: htpp\n", "is 'htpp', which is no transport"),
    ],
)
def test_wrong_files(name: str, text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_text(text)
    if name == "named.yml":
        monkeypatch.setenv("OPENLINEAGE_CONFIG", name)
    with pytest.raises(ConfigError) as caught:
        open_client({})
    assert message in str(caught.value)
    assert name in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_nothing_says_where_events_go(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name.startswith("spark_klog")]

    assert open_client({}).transport.kind == "console"
    (warning,) = warnings()
    assert "Set OPENLINEAGE_URL, OPENLINEAGE_CONFIG, or spark.openlineage.transport.type and" in warning
    assert open_client({f"{SPARK}type": "console"}).transport.kind == "console"
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "console")
    assert open_client({}).transport.kind == "console"
    assert warnings() == [warning]


def test_a_transport_that_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    config = {"type": "kafka", "topic": "t", "config": {"bootstrap.servers": "127.0.0.1:1"}}
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT", json.dumps(config))
    with pytest.raises(MissingPackage) as caught:
        open_client({})
    message = "OpenLineage's transport needs confluent-kafka, which is not installed: pip install confluent-kafka"
    assert str(caught.value) == message
