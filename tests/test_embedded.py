"""Wrong uses of `EmbeddedCluster`, and `klog cluster`, which runs one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from kazoo.client import KazooClient

from spark_klog import embedded
from spark_klog.broker.faults import Drop, Fault
from spark_klog.embedded import ClusterStartError, EmbeddedCluster
from spark_klog.errors import ConfigError, DataDirectoryError
from tests.support.clients.klog import klog_command, klog_refusal
from tests.support.servers.kafka import free_port
from tests.support.waiting import wait_until


def test_brokers_that_are_not_there(tmp_path: Path) -> None:
    cluster = EmbeddedCluster(2, data_dir=tmp_path / "c", faults=[])
    for action in (cluster.kill, cluster.pid):
        with pytest.raises(ConfigError, match="broker 1 is not running; start the cluster first"):
            action(1)
    with pytest.raises(ConfigError, match=r"call start\(\) first"):
        cluster.restart(1)
    cluster.stop()
    assert not (tmp_path / "c").exists()
    with cluster:
        for action in (cluster.kill, cluster.pid, cluster.restart):
            for broker_id in (5, -1):
                with pytest.raises(
                    ConfigError, match=f"there is no broker {broker_id}: the cluster has 2, numbered 0 to 1"
                ):
                    action(broker_id)
        with pytest.raises(ConfigError, match="broker 0 is running; kill it first"):
            cluster.restart(0)
        with pytest.raises(ConfigError, match="is already started"):
            cluster.start()
        servers = cluster.bootstrap_servers
        cluster.kill(1)
        cluster.kill(1)
        assert cluster.ended() == {"broker 1": -signal.SIGKILL}
        cluster.inject(Fault(Drop(), api="Produce"))
        cluster.restart(1)
        assert (cluster.bootstrap_servers, cluster.ended()) == (servers, {})
    cluster.stop()


def test_what_can_not_start(tmp_path: Path) -> None:
    with pytest.raises(DataDirectoryError, match="data directory /proc/x can't be used"):
        EmbeddedCluster(data_dir="/proc/x").start()
    with pytest.raises(ConfigError, match="'9092' is not HOST:PORT"):
        EmbeddedCluster(listen="9092")
    with pytest.raises(ConfigError, match=r"EmbeddedCluster takes a dict of settings .*'num\.partitions'.*, not str"):
        EmbeddedCluster(settings="num.partitions=2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"brokers='127\.0\.0\.1:9092' must be a number"):
        EmbeddedCluster("127.0.0.1:9092")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="zookeeper_port=2181 needs zookeeper=True"):
        EmbeddedCluster(zookeeper_port=2181)
    with pytest.raises(ConfigError, match="exclude each other"):
        EmbeddedCluster(listen="127.0.0.1:9092", settings={"listeners": "PLAINTEXT://:9092"})
    # the broker ends before it reads its faults
    told = "broker 0 did not start: unknown setting 'num.partition'; did you mean num.partitions"
    with pytest.raises(ClusterStartError, match=told):
        EmbeddedCluster(data_dir=tmp_path, settings={"num.partition": "2"}, faults=[Fault(Drop())]).start()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        told = f"can't listen on {address}: Address already in use; choose another --"
        with pytest.raises(ClusterStartError, match=f"^broker 0 did not start: {told}listen$"):
            EmbeddedCluster(data_dir=tmp_path, listen=address).start()
        with pytest.raises(ConfigError, match=f"^{told}zookeeper-port"):
            EmbeddedCluster(data_dir=tmp_path / "z", zookeeper=True, zookeeper_port=int(address[10:])).start()


@pytest.mark.test_all("long")
def test_a_zookeeper_that_takes_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts connections long before it opens sessions; the brokers are started after that."""
    java = shutil.which("java")
    late = f"""#!{sys.executable}
import os, socket, sys, time
config = dict(line.split("=", 1) for line in open(sys.argv[-1]).read().splitlines())
with socket.create_server((config["clientPortAddress"], int(config["clientPort"]))):
    time.sleep(3)
os.execv({java!r}, [{java!r}, *sys.argv[1:]])
"""
    (tmp_path / "java").write_text(late)
    (tmp_path / "java").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    # a session is awaited for twice its timeout, which is shorter here than ZooKeeper takes
    monkeypatch.setattr(embedded, "open_tree", partial(embedded.open_tree, session_timeout=1))
    settings = {"zookeeper.session.timeout.ms": "1000"}
    with EmbeddedCluster(data_dir=tmp_path / "c", zookeeper=True, settings=settings) as cluster:
        assert len(AdminClient({"bootstrap.servers": cluster.bootstrap_servers}).list_topics(timeout=30).brokers) == 1


def test_a_cluster_on_ports_of_choice(tmp_path: Path) -> None:
    """Run `klog cluster` with settings and addresses, kill a broker, and stop it with Ctrl-C."""
    port, zookeeper_port = free_port(), free_port()
    command = klog_command(
        *("cluster", "--data-dir", str(tmp_path / "c"), "--brokers", "2", "--listen", f"127.0.0.1:{port}"),
        *("--zookeeper", "--zookeeper-port", str(zookeeper_port), "--set", "num.partitions=3"),
    )
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        assert first.startswith(f"klog cluster ready on 127.0.0.1:{port},127.0.0.1:"), process.communicate()
        assert process.stdout.readline() == f"zookeeper ready on 127.0.0.1:{zookeeper_port}\n"
        client = KazooClient(f"127.0.0.1:{zookeeper_port}")
        client.start()
        assert sorted(client.get_children("/brokers/ids")) == ["0", "1"]
        client.stop()
        client.close()
        admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{port}"})
        # at first the topic has no leader yet
        wait_until(lambda: len(admin.list_topics("made", timeout=30).topics["made"].partitions) == 3, seconds=60)
        (broker,) = [
            pid for pid in _children(process) if f"{tmp_path}/c/broker-1" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        os.kill(broker, signal.SIGKILL)
        line = process.stderr.readline()
        assert line == f"klog: broker 1 ended with signal 9; see {tmp_path}/c/broker-1.log, and restart the cluster\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_options_that_are_mistyped(tmp_path: Path) -> None:
    assert "'FOO' is not one of" in klog_refusal("--log-level", "FOO", "version", code=2)
    folder = ("cluster", "--data-dir", str(tmp_path / "c"))
    assert "--zookeeper-port needs --zookeeper" in klog_refusal(*folder, "--zookeeper-port", "2181", code=2)
    assert klog_refusal(*folder, "--set", "a", code=2) == "klog: setting 'a' is not NAME=VALUE"
    assert klog_refusal(*folder, "--listen", "x", code=2) == "klog: listen: 'x' is not HOST:PORT"
    assert not (tmp_path / "c").exists()
    told = klog_refusal(*folder, "--set", "num.partition=2", code=2)
    assert told.startswith("klog: broker 0 did not start: unknown setting 'num.partition'")


def _children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def test_a_cluster_waits_for_one_that_was_killed(tmp_path: Path) -> None:
    """The brokers of a killed cluster live on for a while and hold its ports and directories until they end."""
    command = klog_command("cluster", "--data-dir", str(tmp_path / "c"), "--listen", f"127.0.0.1:{free_port()}")
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    assert killed.stdout.readline().startswith("klog cluster ready on")
    (broker,) = _children(killed)
    os.kill(broker, signal.SIGSTOP)
    killed.kill()
    killed.wait()
    killed.stdout.close()
    new = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert new.stdout is not None
    assert new.stderr is not None
    try:
        assert "waiting for processes of a killed cluster to stop" in new.stderr.readline()
        os.kill(broker, signal.SIGCONT)
        assert new.stdout.readline().startswith("klog cluster ready on")
    finally:
        with suppress(ProcessLookupError):
            os.kill(broker, signal.SIGCONT)
        new.terminate()
        new.communicate(timeout=60)
    assert new.returncode == 0


@pytest.mark.test_all("long")
def test_a_free_port_that_is_taken_before_zookeeper_binds_it(server_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JVM takes half a second until it does."""
    real, chosen = embedded.bind, list[int]()

    def taken_at_first(host: str, port: int, option: str) -> socket.socket:
        if not chosen:
            chosen.append(taken.getsockname()[1])
            return taken.dup()
        free = real(host, port, option)
        chosen.append(free.getsockname()[1])
        return free

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # as the port of a connection
        monkeypatch.setattr(embedded, "bind", taken_at_first)
        with EmbeddedCluster(data_dir=server_dir / "cluster", zookeeper=True) as cluster:
            assert cluster.zookeeper_connect == f"127.0.0.1:{chosen[-1]}"
    assert len(chosen) == 2
