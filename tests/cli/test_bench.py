"""`klog bench` and `klog version`: their output, and topics that stay."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient

from spark_klog import __version__
from spark_klog.embedded import EmbeddedCluster
from spark_klog.records import kernels
from tests.support.clients.klog import klog, klog_command, klog_refusal
from tests.support.clients.topics import make_topic


def topics(servers: str) -> set[str]:
    return set(AdminClient({"bootstrap.servers": servers, "log_level": 0}).list_topics(timeout=30).topics)


def values(servers: str, topic: str) -> list[bytes]:
    """All values of partition 0, as librdkafka reads them."""
    settings = {"bootstrap.servers": servers, "group.id": "g", "log_level": 0, "enable.partition.eof": True}
    consumer = Consumer(settings | {"fetch.wait.max.ms": 10})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[bytes] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        message = consumer.poll(1)
        if message is None:
            continue
        if message.error() is not None:
            assert message.error().code() == KafkaError._PARTITION_EOF
            break
        found.append(message.value())
    consumer.close()
    return found


def test_it_writes_and_reads_and_deletes_its_topic(cluster: EmbeddedCluster, topic: str) -> None:
    servers = cluster.bootstrap_servers
    before = topics(servers)
    done = klog(
        "bench", "-b", servers, "-n", "5000", "-s", "33", "--partitions", "3", "--probes", "5", "-z", "zstd", "--json"
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["topic"].startswith("klog-bench-")
    expected = {"partitions": 3, "records": 5000, "size": 33, "compression": "zstd", "acks": "all"}
    assert found.items() >= expected.items()
    for phase in ("produce", "consume"):
        assert found[phase]["seconds"] > 0
        assert found[phase]["recordsPerSecond"] > 0
    for times in found["latencyMs"].values():
        assert times["probes"] <= 5
        assert 0 < times["p50"] <= times["p99"]
    assert found["latencyMs"]["acknowledged"]["p50"] > 0
    assert topics(servers) == before

    # an existing topic needs --existing, and keeps its records
    make_topic(servers, topic, 1)
    line = klog_refusal("bench", "-b", servers, "--topic", topic, "-n", "10")
    assert "--existing" in line
    assert values(servers, topic) == []
    text = klog("bench", "-b", servers, "--topic", topic, "--existing", "-n", "10", "-s", "7", "--probes", "0").stdout
    assert text.startswith(f"{topic}, partitions: 1, compression: none, acks: all, values of 7 bytes\n")
    written = values(servers, topic)
    assert [len(value) for value in written] == [7] * 10
    assert klog("bench", "-b", servers, "--topic", f"{topic}-kept", "--keep", "-n", "2", "--acks", "0").returncode == 0
    assert f"{topic}-kept" in topics(servers)


def test_an_interrupted_one_deletes_its_topic(cluster: EmbeddedCluster, topic: str) -> None:
    servers = cluster.bootstrap_servers
    command = klog_command("bench", "-b", servers, "--topic", topic, "-n", "1000000000", "-s", "1000", "--probes", "0")
    for number in (signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                deadline = time.monotonic() + 60
                while topic not in topics(servers):
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                process.send_signal(number)
                out, errors = process.communicate(timeout=60)
            finally:
                process.kill()
        assert (process.returncode, out, errors) == (130, "", "klog: interrupted\n")
        assert topic not in topics(servers)


def test_an_interrupted_import_leaves_the_exit_code(tmp_path: Path) -> None:
    # an interrupt within exec, as of a dataclass in an import: Python then exits by SIGINT, whatever the exit code
    (tmp_path / "interrupted.py").write_text(
        "from spark_klog.cli.main import main\n"
        "@main.command()\n"
        "def interrupted():\n"
        "    exec('raise KeyboardInterrupt')\n"
        "main(['interrupted'])\n"
    )
    found = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "klog: interrupted\n")


def test_what_bench_refuses(cluster: EmbeddedCluster, topic: str) -> None:
    servers = cluster.bootstrap_servers
    missing = klog_refusal("bench", "-b", servers, "--topic", f"{topic}-none", "--existing")
    assert "UNKNOWN_TOPIC_OR_PARTITION" in missing
    assert "max.request.size" in klog_refusal("bench", "-b", servers, "-s", "2000000", "--probes", "0")
    assert klog("bench", "--existing").returncode == 2
    assert klog("bench", "--topic", "t", "--existing", "--keep").returncode == 2
    assert not any(name.startswith("klog-bench-") for name in topics(servers))


def test_settings_of_connections_are_for_all_clients(cluster: EmbeddedCluster) -> None:
    servers = f"bootstrap.servers={cluster.bootstrap_servers}"
    found = json.loads(klog("bench", "-X", servers, "-n", "10", "--probes", "0", "--json").stdout)
    assert found["consume"]["recordsPerSecond"] > 0
    refused = klog_refusal("bench", "-X", servers, "-X", "security.protocol=SASL_PLAINTEXT", "-n", "1", code=2)
    assert "sasl.mechanism" in refused


def test_version() -> None:
    found = json.loads(klog("version", "--json").stdout)
    assert found == {
        "klog": __version__,
        "python": platform.python_version(),
        "pyspark": metadata.version("pyspark"),
        "kernel": kernels.load().name,
    }
    line = klog("version").stdout
    assert line == klog("--version").stdout
    for text in found.values():
        assert text in line
