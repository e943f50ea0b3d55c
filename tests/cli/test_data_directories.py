"""Folders that `klog broker` and `klog cluster` accept as data directories; those that they reject stay unchanged."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.support.clients.klog import klog, klog_command, klog_refusal
from tests.support.clients.tools import kcat
from tests.support.servers.broker import KlogBroker

_SEGMENT = f"{0:020}"


def _tree(path: Path) -> dict[str, bytes | None]:
    """All paths in a folder, with the contents of files."""
    return {
        str(found.relative_to(path)): None if found.is_dir() else found.read_bytes()
        for found in sorted(path.rglob("*"))
    }


def _make(path: Path, *files: str) -> Path:
    for name in files:
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
    return path


def _broker(path: Path, *arguments: str) -> tuple[str, ...]:
    return ("broker", "--listen", "127.0.0.1:0", "--data-dir", str(path), *arguments)


def _cluster(path: Path, *arguments: str) -> tuple[str, ...]:
    return ("cluster", "--data-dir", str(path), *arguments)


@contextmanager
def _running(*arguments: str) -> Iterator[str]:
    """Run a broker or a cluster and yield its address; it must stop cleanly."""
    process = subprocess.Popen(klog_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        assert "ready on" in line, process.communicate()
        yield line.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0, log


def _refuses(path: Path, command: tuple[str, ...]) -> str:
    before = _tree(path)
    told = klog_refusal(*command)
    assert _tree(path) == before
    return told.replace(str(path), "PATH")


@pytest.mark.parametrize(
    "files",
    [
        ["klog-cluster.properties"],
        # of earlier versions; the last one after a broker had served broker-0 as a partition of a topic `broker`
        ["broker-0/meta.properties", "broker-1/meta.properties", "broker-0.log", "directories/.lock"],
        ["broker-0/meta.properties", f"broker-0/{_SEGMENT}.log", "meta.properties"],
    ],
)
def test_a_broker_does_not_start_on_the_directory_of_a_cluster(tmp_path: Path, files: list[str]) -> None:
    told = _refuses(_make(tmp_path / "c", *files), _broker(tmp_path / "c"))
    assert told.startswith("klog: PATH is the directory of a cluster, not of a broker (it holds ")
    assert told.endswith("start it with klog cluster --data-dir PATH, or choose another data directory")


def test_a_cluster_does_not_start_on_the_directory_of_a_broker(tmp_path: Path) -> None:
    with KlogBroker(tmp_path, name="b") as broker:
        kcat("-P", "-b", broker.bootstrap_servers, "-t", "clicks", stdin=b"k\n")
    (tmp_path / "b" / "meta.properties").rename(tmp_path / "meta.properties")
    told = _refuses(tmp_path / "b", _cluster(tmp_path / "b"))
    assert told == (
        "klog: PATH is the data directory of a broker, not of a cluster (it holds clicks-0): "
        "start it with klog broker --data-dir PATH, or choose another data directory"
    )
    (tmp_path / "meta.properties").rename(tmp_path / "b" / "meta.properties")
    assert "(it holds meta.properties)" in _refuses(tmp_path / "b", _cluster(tmp_path / "b"))


@pytest.mark.parametrize("beside", [[], ["meta.properties", f"clicks-0/{_SEGMENT}.log"]])
@pytest.mark.parametrize("command", [_broker, _cluster])
def test_logs_of_kafka_07_are_upgraded_first(tmp_path: Path, beside: list[str], command: object) -> None:
    assert callable(command)
    told = _refuses(_make(tmp_path / "old", f"clicks-0/{_SEGMENT}.kafka", *beside), command(tmp_path / "old"))
    assert told == (
        "klog: PATH holds logs of Kafka 0.7 (clicks-0): write them in today's format with klog log upgrade PATH NEW, "
        "and start on NEW"
    )


def test_what_is_no_data_directory_is_refused(tmp_path: Path) -> None:
    home = _make(tmp_path / "home", "notes.txt", "to-delete/x", "report-2024/january.csv", "a", "kafka/meta.properties")
    told = _refuses(home, _broker(home))
    assert told == (
        "klog: PATH is neither empty nor a data directory: it holds a, kafka, notes.txt and 2 more and no "
        "meta.properties; its folder kafka is a data directory: give PATH/kafka, or choose another data directory"
    )
    (tmp_path / "file").write_text("x")
    for command in (_broker, _cluster):
        assert "is a file" in klog_refusal(*command(tmp_path / "file"), code=2)
        assert klog_refusal(*command(tmp_path / "file" / "x")).endswith("can't be used: Not a directory")
        assert klog_refusal(*command(Path("/proc/x"))).startswith("klog: data directory /proc/x can't be used: ")


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ("version=0\nbroker.id=3\ncluster.id=x\n", "belongs to broker 3, not 0; start with --broker-id 3, or choose"),
        ("version=1\nnode.id=3\ncluster.id=x\n", "belongs to broker 3, not 0; start with --broker-id 3, or choose"),
        ("version=2\nnode.id=0\n", "has version 2, 0 and 1 are known"),
        ("", "has version none, 0 and 1 are known"),
        ("version=1\nbroker.id=0\n", "names no node.id"),
    ],
)
def test_meta_properties_that_are_not_this_brokers(tmp_path: Path, meta: str, reason: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meta.properties").write_text(meta)
    assert reason in _refuses(tmp_path / "data", _broker(tmp_path / "data"))


def test_a_directory_of_kraft_keeps_what_is_kafkas(tmp_path: Path) -> None:
    data = _make(tmp_path / "data", f"__cluster_metadata-0/{_SEGMENT}.log", "__cluster_metadata-0/quorum-state")
    meta = "#\n#Sun Nov 22 18:00:00 UTC 2026\ncluster.id=4L6g3nShT-eMCtK--X86sw\ndirectory.id=x\nnode.id=7\nversion=1\n"
    (data / "meta.properties").write_text(meta)
    metadata = _tree(data / "__cluster_metadata-0")
    with _running(*_broker(data, "--broker-id", "7")) as address:
        listed = klog("topics", "list", "--all", "--bootstrap-server", address)
        assert listed.stdout.split() == ["topic", "partitions"]
    assert (data / "meta.properties").read_text() == meta
    assert _tree(data / "__cluster_metadata-0") == metadata


def test_directories_without_meta_properties(tmp_path: Path) -> None:
    """A broker starts on a copy of partitions, a new file system, what an early failure left, and a new folder."""
    with KlogBroker(tmp_path / "b") as broker:
        kcat("-P", "-b", broker.bootstrap_servers, "-t", "clicks", stdin=b"k\n")
    (broker.data_dir / "meta.properties").unlink()
    (broker.data_dir / "notes.txt").write_text("a copy")
    with broker:
        assert kcat("-C", "-b", broker.bootstrap_servers, "-t", "clicks", "-e", "-q") == b"k\n"
    (tmp_path / "mounted" / "lost+found").mkdir(parents=True)
    (tmp_path / "mounted" / ".lock").touch()
    _make(tmp_path / "kafkas", "recovery-point-offset-checkpoint")
    for name in ("mounted", "kafkas", "new/and/deep"):
        with _running(*_broker(tmp_path / name)):
            pass


@pytest.mark.test_all("version")
def test_a_cluster_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    data = tmp_path / "cluster"
    with _running(*_cluster(data)) as address:
        assert klog("topics", "create", "clicks", "--bootstrap-server", address).returncode == 0
    (data / "klog-cluster.properties").unlink()
    with _running(*_cluster(data)) as address:
        assert "clicks" in klog("topics", "list", "--bootstrap-server", address).stdout
    assert "registry=files" in (data / "klog-cluster.properties").read_text()


def test_a_broker_of_a_cluster_does_not_start_alone(tmp_path: Path) -> None:
    """Alone it would not know the cluster's topics, and the cluster would not know those created meanwhile."""
    data = tmp_path / "cluster"
    with _running(*_cluster(data)):
        told = klog_refusal(*_broker(data / "broker-0"))
        assert told.startswith(
            f"klog: data directory {data / 'broker-0'} belongs to the cluster in {data}: start the cluster"
        )
    told = _refuses(data, _broker(data / "broker-0"))
    assert "start the cluster with klog cluster --data-dir PATH, or copy broker-0 elsewhere" in told
    os.chdir(data / "broker-0")
    assert "belongs to the cluster in" in klog_refusal(*_broker(Path(".")))
    with _running(*_broker(data / "broker-0", "--directories", str(data / "directories"))):
        pass


def test_a_cluster_keeps_its_registry(tmp_path: Path) -> None:
    """The topics are in ZooKeeper or in a folder: with the other registry they would be gone."""
    for found, files in (("with", ["zookeeper/x"]), ("without", ["directories/x"])):
        data = _make(tmp_path / found, "broker-0/meta.properties", *files)
        arguments = [] if found == "with" else ["--zookeeper"]
        told = _refuses(data, _cluster(data, *arguments))
        assert told.startswith(f"klog: the cluster in PATH was made {found} ZooKeeper, which keeps its topics: ")
    data = tmp_path / "marked"
    with _running(*_cluster(data)):
        assert "is in use by another broker or tool" in klog_refusal(*_cluster(data))
    assert "was made without ZooKeeper" in _refuses(data, _cluster(data, "--zookeeper"))
    (data / "klog-cluster.properties").write_text("version=2\n")
    assert "klog-cluster.properties is not of version 1" in _refuses(data, _cluster(data))


@pytest.mark.test_all("long")
def test_fewer_brokers_than_before_are_told(tmp_path: Path) -> None:
    data = tmp_path / "cluster"
    with _running(*_cluster(data, "--brokers", "2")):
        pass
    process = subprocess.Popen(klog_command(*_cluster(data)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"{data} has data of 2 brokers, only 1 started: partitions of broker 1 are unavailable" in log


def test_another_clusters_directory(tmp_path: Path) -> None:
    _make(tmp_path, "tree/.keep")
    arguments = ("--directories", str(tmp_path / "tree"))
    with _running(*_broker(tmp_path / "first", *arguments)), _running(*_broker(tmp_path / "second")):
        pass
    told = klog_refusal(*_broker(tmp_path / "second", *arguments))
    assert f"data directory {tmp_path / 'second'} belongs to cluster " in told
    assert told.endswith("connect to the ZooKeeper or the directories of that cluster, or choose another --data-dir")
    with _running(*_broker(tmp_path / "second")):
        pass


def test_logs_that_the_registry_does_not_know_are_told(tmp_path: Path) -> None:
    """A broker that ran alone and then joins a cluster logs a warning."""
    with KlogBroker(tmp_path, name="b") as broker:
        kcat("-P", "-b", broker.bootstrap_servers, "-t", "clicks", stdin=b"k\n")
    with KlogBroker(tmp_path, "--directories", str(tmp_path / "tree"), name="b") as broker:
        line = broker.wait_for_log("WARNING")
        told = "has logs of topics that the cluster does not know, which are not served: clicks"
        assert line.endswith(f"{broker.data_dir} {told}")


def test_a_disk_that_is_full_is_named(tmp_path: Path) -> None:
    """A limit on file sizes simulates it: the first byte written to a file fails."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    arguments = klog_command(*_cluster(tmp_path / "full"))
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, preexec_fn=limit)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    reason = f"klog: data directory {tmp_path / 'full'} can't be used: File too large"
    assert done.stderr.splitlines()[-1] == reason
    with _running(*_cluster(tmp_path / "full")):  # there is room again
        pass


def test_a_full_disk_keeps_meta_properties(tmp_path: Path) -> None:
    with _running(*_broker(tmp_path)):
        pass
    before = (tmp_path / "meta.properties").read_bytes()
    command = klog_command(*_broker(tmp_path))
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limit)
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    _, log = process.communicate(timeout=60)
    assert "Traceback" not in log
    assert (tmp_path / "meta.properties").read_bytes() == before
    assert not (tmp_path / ".kafka_cleanshutdown").exists()


def test_verify_names_a_clusters_directory(tmp_path: Path) -> None:
    data = _make(tmp_path / "c", "broker-0/meta.properties", "broker-1/meta.properties")
    told = _refuses(data, ("log", "verify", str(data)))
    assert told.endswith("give the data directories of its brokers, PATH/broker-0 PATH/broker-1")


def test_dump_takes_the_folder_of_a_partition(tmp_path: Path) -> None:
    with KlogBroker(tmp_path, "--set", "log.roll.ms=1", name="b") as broker:
        for value in (b"1", b"2", b"3"):
            kcat("-P", "-b", broker.bootstrap_servers, "-t", "clicks", stdin=value)
    folder = tmp_path / "b" / "clicks-0"
    files = sorted(map(str, folder.glob("*.log")))
    assert len(files) > 1
    assert klog("log", "dump", str(folder)).stdout == klog("log", "dump", *files).stdout
    assert len(klog("log", "dump", str(folder)).stdout.splitlines()) == 3
    told = klog_refusal("log", "dump", str(tmp_path / "b"))
    assert told.endswith("contains neither .log nor .kafka files: give the folder of one partition")


def test_dump_names_what_is_no_file_of_a_log(tmp_path: Path) -> None:
    _make(tmp_path, "leader-epoch-checkpoint", "00000000000000000000.log.damaged")
    told = klog_refusal("log", "dump", str(tmp_path / "leader-epoch-checkpoint"))
    assert told.endswith("is not a log file: these end with .log, .kafka, .index, .timeindex, .txnindex")
    assert klog("log", "dump", str(tmp_path / "00000000000000000000.log.damaged")).stdout == ""


@pytest.mark.parametrize("folder", ["", "clicks-0"])
def test_logs_of_today_are_not_upgraded(tmp_path: Path, folder: str) -> None:
    old = _make(tmp_path / "old", "meta.properties", f"clicks-0/{_SEGMENT}.log", f"clicks-1/{_SEGMENT}.log") / folder
    told = _refuses(old, ("log", "upgrade", str(old), str(tmp_path / "new")))
    found = "clicks-0" if folder else "clicks-0 and 1 more"
    assert told == (
        f"klog: PATH holds logs of today's format ({found}) and none of Kafka 0.7: there is nothing to upgrade, a "
        "broker can start on it"
    )
    assert not (tmp_path / "new").exists()


def test_a_password_is_not_asked_for_where_there_is_no_terminal(tmp_path: Path) -> None:
    told = klog_refusal("users", "add", "ann", "--file", str(tmp_path / "users"), code=2)
    assert told.endswith("there is no terminal to ask for the password: give it by --password-stdin")
    assert not (tmp_path / "users").exists()
