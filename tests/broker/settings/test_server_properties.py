"""Brokers started with Kafka's server.properties files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from spark_klog.base.properties import parse_properties
from spark_klog.broker.security.config import SECURITY_SETTINGS
from spark_klog.broker.settings.config import BROKER_SETTINGS, PLACES, broker_config, broker_settings, has_no_use
from spark_klog.broker.settings.log_settings import BROKER_LOG_SETTINGS
from spark_klog.errors import ConfigError
from tests.support.clients.tools import kcat
from tests.support.servers.broker import refusal
from tests.support.servers.kafka import HOST, NEWEST, Version, free_port, kafka_libs

#: The settings of the files that Kafka ships, without their comments.
_COMMON = """
num.network.threads=3
num.io.threads=8
socket.send.buffer.bytes=102400
socket.receive.buffer.bytes=102400
socket.request.max.bytes=104857600
num.partitions=1
num.recovery.threads.per.data.dir=1
log.retention.hours=168
log.retention.check.interval.ms=300000
"""
_INTERNAL_TOPICS = """
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
"""
_SHIPPED = {
    "0.10": f"""{_COMMON}
broker.id=0
log.dirs=/tmp/kafka-logs
log.segment.bytes=1073741824
zookeeper.connect=localhost:2181
zookeeper.connection.timeout.ms=6000
""",
    "3.9": f"""{_COMMON}{_INTERNAL_TOPICS}
broker.id=0
log.dirs=/tmp/kafka-logs
zookeeper.connect=localhost:2181
zookeeper.connection.timeout.ms=18000
group.initial.rebalance.delay.ms=0
""",
    "3.9 KRaft": f"""{_COMMON}{_INTERNAL_TOPICS}
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@localhost:9093
listeners=PLAINTEXT://:9092,CONTROLLER://:9093
inter.broker.listener.name=PLAINTEXT
advertised.listeners=PLAINTEXT://localhost:9092,CONTROLLER://localhost:9093
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT
log.dirs=/tmp/kraft-combined-logs
log.segment.bytes=1073741824
""",
}


def command(config: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "spark_klog.cli", "broker", "--config", str(config), *arguments]


def write(folder: Path, text: str) -> Path:
    path = folder / "server.properties"
    path.write_text(text)
    return path


@contextmanager
def running(command: list[str], log: Path) -> Iterator[str]:
    """Run a broker and yield its ready line; SIGTERM must end it with exit code 0."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line, log.read_text()
        yield line
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "version",
    [
        "3.9 KRaft",
        pytest.param("3.9", marks=pytest.mark.test_all("version")),
        pytest.param("0.10", marks=pytest.mark.test_all("version")),
    ],
)
def test_the_files_that_kafka_ships(tmp_path: Path, version: str) -> None:
    port = free_port()
    # changes to the files: a port and a folder of the test's own, and no ZooKeeper
    text = _SHIPPED[version].replace("://:9092", f"://:{port}").replace("localhost:9092", f"{HOST}:{port}")
    options = () if "listeners" in text else ("--listen", f"{HOST}:{port}")
    config = write(tmp_path, text + f"log.dirs={tmp_path / 'data'}\n")
    log = tmp_path / "log"
    with running(command(config, *options, "--set", "zookeeper.connect="), log) as line:
        broker_id = 1 if "KRaft" in version else 0
        assert line == f"klog broker {broker_id} ready on {HOST}:{port}"
        kcat("-P", "-b", f"{HOST}:{port}", "-t", "t", stdin=b"record\n")
        assert kcat("-C", "-b", f"{HOST}:{port}", "-t", "t", "-e", "-q", "-o", "beginning") == b"record\n"
    assert (tmp_path / "data" / "t-0").is_dir()
    (told,) = [line for line in log.read_text().splitlines() if "have no effect" in line]
    assert "num.io.threads, num.network.threads" in told
    assert set(told.partition("no effect: ")[2].split(", ")) == {
        name for name in re.findall(r"^([a-z.]+)=", text, re.MULTILINE) if has_no_use(name)
    }


def test_options_win_over_settings_and_these_over_the_file(tmp_path: Path) -> None:
    port = free_port()
    text = f"""
        listeners = PLAINTEXT://{HOST}:1
        broker.id : 3
        log.dirs {tmp_path}/file
        num.partitions=2
        ssl.key.password=hunter2
        default.replication.factor=1
        auto.create.topics.enable=false"""
    settings = [
        "--set",
        "num.partitions=5",
        "--set",
        f"log.dirs={tmp_path}/data",
        "--set",
        "auto.create.topics.enable=TRUE",
    ]
    log = tmp_path / "log"
    with running(command(write(tmp_path, text), "--listen", f"{HOST}:{port}", *settings), log) as line:
        assert line == f"klog broker 3 ready on {HOST}:{port}"
        kcat("-P", "-b", f"{HOST}:{port}", "-t", "t", stdin=b"record\n")
        admin = AdminClient({"bootstrap.servers": f"{HOST}:{port}", "log_level": 0})
        assert len(admin.list_topics(timeout=60).topics["t"].partitions) == 5
    assert (tmp_path / "data" / "t-0").is_dir()
    assert not (tmp_path / "file").exists()
    assert "ssl.key.password=[hidden]" in log.read_text()
    assert "hunter2" not in log.read_text()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("log.dirs=/a,/b", "setting log.dirs=/a,/b must be one data directory, not 2"),
        ("", "there is no data directory: give --data-dir, or log.dirs in the configuration"),
        ("num.partitons=1", "unknown setting 'num.partitons'; did you mean num.partitions"),
        ("num.io.thread=1", "unknown setting 'num.io.thread'; did you mean num.io.threads"),
        ("log.dri=/a", "unknown setting 'log.dri'; did you mean log.dir or log.dirs?"),
        ("log.dir=/a\nbroker.id=one", "setting broker.id=one must be a number of at least 0"),
        ("log.dir=/a\nbroker.id=1\nnode.id=2", "broker.id=1 and node.id=2: they are the same setting"),
        (
            "listener.name.x.ssl.key.password=y",
            "setting listener.name.x.ssl.key.password=[hidden]: settings",
        ),
        (
            "authorizer.class.name=kafka.Any",
            "setting authorizer.class.name=kafka.Any: authorizer classes are not supported",
        ),
        (
            "group.consumer.sesion.timeout.ms=1",
            "unknown setting 'group.consumer.sesion.timeout.ms'; did you mean group.",
        ),
        (
            "log.dir=/a\ngroup.consumer.session.timeout.ms=3000",
            "group.consumer.session.timeout.ms=3000 must be greater than group.consumer.heartbeat.interval.ms=5000",
        ),
        ("config.providers=file", "setting config.providers=file: values are not looked up by providers"),
        (
            "log.dir=/a\nlog.segment.bytes=1048575",
            "setting log.segment.bytes=1048575: must be from 1048576 to 2147483647",
        ),
        ("metrics.listen=9100\nlog.dir=/a", "setting metrics.listen: '9100' is not HOST:PORT"),
    ],
)
def test_what_is_refused(line: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        broker_config(parse_properties(line.encode(), "server.properties"), {})
    assert str(refused.value).startswith(told)


def test_tests_may_have_segments_of_any_size() -> None:
    assert broker_settings({"internal.segment.bytes": "10"})["log"].segment_bytes == 10


def test_a_refusal_is_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, "num.partitions=1\na=\\u1")
    assert refusal(command(path)) == f"klog: {path}, line 2: \\u must be followed by 4 hexadecimal digits"


def test_a_secret_is_in_no_error(tmp_path: Path) -> None:
    told = refusal(command(write(tmp_path, ""), "--set", "ssl.key.password:hunter2"))
    assert told == "klog: setting 'ssl.key.password[hidden]' is not NAME=VALUE"


@pytest.mark.peer
@pytest.mark.parametrize(
    "version",
    [
        NEWEST,
        pytest.param("4.1.0", marks=pytest.mark.test_all("version")),
        pytest.param("3.9.1", marks=pytest.mark.test_all("version")),
        pytest.param("0.10.2.2", marks=pytest.mark.test_all("version")),
    ],
)
def test_every_setting_that_kafka_knows_is_known(version: Version) -> None:
    """KafkaConfig's main prints the documentation of its settings as HTML."""
    java = ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", f"{kafka_libs(version)}/*"]
    done = subprocess.run([*java, "kafka.server.KafkaConfig"], capture_output=True, text=True, timeout=60)
    names = set(re.findall(r'<a id="([a-z0-9.]+)"></a>|<tr>\s*<td>([a-z0-9.]+)</td>', done.stdout))
    known = {first or second for first, second in names}
    assert len(known) > 100
    unknown = set()
    assert not any(map(has_no_use, [*PLACES, *BROKER_SETTINGS, *BROKER_LOG_SETTINGS, *SECURITY_SETTINGS]))
    for name in known - PLACES - {"authorizer.class.name", "config.providers"}:
        try:
            if not has_no_use(name):
                broker_settings({name: "1"})
        except ConfigError as error:
            if "unknown setting" in str(error):
                unknown.add(name)
    assert not unknown


def test_logs_as_json(tmp_path: Path) -> None:
    port = free_port()
    log = tmp_path / "log"
    options = ["--data-dir", str(tmp_path / "data"), "--listen", f"{HOST}:{port}", "--log-format", "json"]
    began = datetime.now(timezone.utc)
    with running(command(write(tmp_path, "num.io.threads=1"), *options), log):
        kcat("-P", "-b", f"{HOST}:{port}", "-t", "t", stdin=b"record\n")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["message"] for line in lines} >= {"created topic t with 1 partitions", "stopping"}
    for line in lines:
        assert set(line) == {"time", "level", "logger", "message"}
        assert line["time"].endswith("Z")
        assert began.timestamp() - 1 <= datetime.fromisoformat(line["time"][:-1] + "+00:00").timestamp()
        assert line["level"] in ("INFO", "WARNING")
        assert line["logger"].startswith("spark_klog.broker") or line["logger"].startswith("spark_klog.log")
