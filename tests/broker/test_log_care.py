"""A running broker's care of its logs, as clients and tools see it: retention, compaction, damage, a full disk."""

from __future__ import annotations

import asyncio
import errno
import json
import resource
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from spark_klog.errors import ErrorCode
from spark_klog.log.config import LogConfig
from spark_klog.log.file_system import FileSystem
from tests.support.brokers.batches import make_batch
from tests.support.brokers.compaction_logs import dumped_with_holes
from tests.support.brokers.loop_broker import running, send
from tests.support.brokers.raw_client import RawClient
from tests.support.clients.dump import dump_files
from tests.support.clients.tools import kcat
from tests.support.clients.topics import learn_topic
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import NEWEST, Kafka, Version
from tests.support.waiting import wait_until

Line = tuple[int, str, "str | None"]
QUICK = {
    "log.retention.check.interval.ms": 100,
    "log.cleaner.backoff.ms": 100,
    "log.segment.delete.delay.ms": 500,
    "log.flush.offset.checkpoint.interval.ms": 100,
}


def start(server_dir: Path, **settings: object) -> KlogBroker:
    named = QUICK | {name.replace("_", "."): value for name, value in settings.items()}
    arguments = [part for name, value in named.items() for part in ("--set", f"{name}={value}")]
    broker = KlogBroker(server_dir, *arguments)
    broker.start()
    return broker


def create(broker: KlogBroker, topic: str, **settings: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
    config = {name.replace("_", "."): value for name, value in settings.items()}
    admin.create_topics([NewTopic(topic, 1, 1, config=config)])[topic].result(20)


def produce(broker: KlogBroker, topic: str, lines: list[tuple[str, str | None]], **settings: object) -> None:
    """Produce the lines as one batch (only the flush ends the linger); fail on a delivery error."""
    failures: list[object] = []
    config = {"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 60_000, "log_level": 0, **settings}
    producer = Producer(config)
    learn_topic(producer, topic)
    for key, value in lines:
        producer.produce(topic, value, key, on_delivery=lambda error, _: error and failures.append(error))
    assert producer.flush(20) == 0
    assert not failures, failures


def consume(servers: str, topic: str) -> list[Line]:
    """Consume all records with kcat; return (offset, key, value) of each."""
    output = kcat(
        "-C", "-b", servers, "-t", topic, "-p", "0", "-o", "beginning", "-e", "-q", "-J", "-X", "check.crcs=true"
    )
    lines = [json.loads(line) for line in output.splitlines()]
    return [(line["offset"], line["key"], line["payload"]) for line in lines]


def is_clean(folder: Path) -> bool:
    """Whether all segments but the active one are compacted, and the checkpoint says so."""
    active = max(int(path.stem) for path in folder.glob("*.log"))
    checkpoint = folder.parent / "cleaner-offset-checkpoint"
    return checkpoint.exists() and f"t 0 {active}" in checkpoint.read_text().splitlines()


def test_retention_by_size_deletes_segments_and_their_files(server_dir: Path) -> None:
    broker = start(server_dir)
    create(broker, "t", internal_segment_bytes="2000", retention_bytes="5000")
    for number in range(30):
        produce(broker, "t", [("k", f"{number} " + "x" * 400)], **{"linger.ms": 0})
    folder = broker.data_dir / "t-0"

    def are_few_bytes_left() -> bool:
        with suppress(FileNotFoundError):  # a segment was renamed between its name and its size
            return sum(path.stat().st_size for path in folder.glob("*.log")) <= 7000
        return False

    wait_until(are_few_bytes_left, "retention")
    wait_until(lambda: not list(folder.glob("*.deleted")), "removal of the files")
    lines = consume(broker.bootstrap_servers, "t")
    assert [offset for offset, _, _ in lines] == list(range(lines[0][0], 30))
    assert 30 > lines[0][0] >= 30 - 7000 // 400
    broker.stop()


@pytest.mark.peer
@pytest.mark.parametrize("codec", [pytest.param("none", marks=pytest.mark.test_all("codec")), "lz4"])
def test_compaction_and_what_kafkas_tools_make_of_it(server_dir: Path, codec: str) -> None:
    _compacted(server_dir, codec, [NEWEST])


@pytest.mark.peer
@pytest.mark.test_all("version")
def test_an_older_kafka_goes_on_with_a_compacted_log(server_dir: Path) -> None:
    folder, seen = _compacted(server_dir, "lz4", ["3.9.1"])
    kafka = Kafka("3.9.1", server_dir / "kafka")
    kafka.log_dir.mkdir(parents=True)
    (folder / "partition.metadata").unlink()  # Kafka gives the topic an id of its own
    folder.rename(kafka.log_dir / "t-0")
    with kafka:
        kafka.create_topic("t", configs={"cleanup.policy": "compact"})
        assert consume(kafka.bootstrap_servers, "t") == seen


def _compacted(server_dir: Path, codec: str, versions: list[Version]) -> tuple[Path, list[Line]]:
    """Have a broker compact a log, and check the files with tools; return the partition's folder and its records."""
    broker = start(server_dir, log_cleaner_min_cleanable_ratio=0.01, log_cleaner_delete_retention_ms=600_000)
    create(broker, "t", internal_segment_bytes="3000", cleanup_policy="compact", index_interval_bytes="200")
    last: dict[str, Line] = {}
    offset = 0
    for turn in range(40):
        lines: list[tuple[str, str | None]] = [(f"key {(turn + step) % 7}", f"{turn}-{step} " * 9) for step in range(5)]
        if turn % 10 == 9:
            lines.append((f"key {turn % 7}", None))
        produce(broker, "t", lines, **{"compression.type": codec, "linger.ms": 20})
        for key, value in lines:
            last[key] = offset, key, value
            offset += 1
    folder = broker.data_dir / "t-0"
    wait_until(lambda: is_clean(folder), "compaction")
    seen = consume(broker.bootstrap_servers, "t")
    assert {key: (number, key, value) for number, key, value in seen} == last
    produce(broker, "t", [("key 1", "after")])
    wait_until(lambda: is_clean(folder), "compaction, if there was a roll")
    seen = consume(broker.bootstrap_servers, "t")
    assert len(seen) < offset / 2
    assert seen[-1] == (offset, "key 1", "after")
    assert broker.stop() == 0

    assert len(list(folder.glob("*.log"))) > 1
    for version in versions:
        dumped = {item.offset for path in folder.glob("*.log") for item in dumped_with_holes(version, path)}
        assert dumped == {number for number, _, _ in seen}
        indexes = [*folder.glob("*.index"), *folder.glob("*.timeindex")]
        sane = dump_files(version, indexes, "--index-sanity-check")
        filled = [path for path in indexes if path.stat().st_size]  # the tool reports empty ones in another way
        assert filled
        assert sane.count("passed sanity check") == len(filled)
    verified = subprocess.run(
        [sys.executable, "-m", "spark_klog.cli", "log", "verify", str(broker.data_dir)], capture_output=True, text=True
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    return folder, seen


def test_a_damaged_partition_is_named_the_others_are_served_and_repair_goes_on(server_dir: Path) -> None:
    broker = start(server_dir)
    for topic in ("good", "bad"):
        create(broker, topic)
        for number in range(5):
            produce(broker, topic, [("k", f"{topic} {number}")], **{"linger.ms": 0})
    broker.stop()
    path = broker.data_dir / "bad-0" / f"{0:020d}.log"
    data = path.read_bytes()
    size = len(data) // 5
    path.write_bytes(data[: 2 * size + 70] + b"\xff" + data[2 * size + 71 :])
    (broker.data_dir / ".kafka_cleanshutdown").unlink()
    broker.start()
    line = broker.wait_for_log("bad-0 is not served")
    assert f"{path} is damaged at position {2 * size}, offset 2" in line
    assert "klog log repair" in line
    assert len(consume(broker.bootstrap_servers, "good")) == 5
    with pytest.raises(subprocess.TimeoutExpired):  # clients retry, as after any storage error
        kcat("-C", "-b", broker.bootstrap_servers, "-t", "bad", "-p", "0", "-e", "-q", timeout=1)
    produce(broker, "good", [("k", "more")])
    command = [sys.executable, "-m", "spark_klog.cli", "log", "repair", str(path.parent)]
    held = subprocess.run(command, capture_output=True, text=True)
    assert held.returncode == 1
    assert "is in use by another broker or tool; stop that one first\n" in held.stderr  # no hint at --data-dir here
    broker.stop()
    assert path.read_bytes() == data[: 2 * size + 70] + b"\xff" + data[2 * size + 71 :]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "now ends at offset 2" in done.stdout
    kept = path.with_name(path.name + ".damaged")
    assert str(kept) in done.stdout
    assert len(kept.read_bytes()) == len(data)
    broker.start()
    assert [value for _, _, value in consume(broker.bootstrap_servers, "bad")] == ["bad 0", "bad 1"]
    produce(broker, "bad", [("k", "after")])
    assert consume(broker.bootstrap_servers, "bad")[-1] == (2, "k", "after")
    broker.stop()
    here = subprocess.run([*command[:-1], "."], capture_output=True, text=True, cwd=path.parent)
    assert "is not damaged" in here.stdout


def test_a_partition_that_has_lost_its_files_goes_on_where_it_ended(server_dir: Path) -> None:
    broker = start(server_dir)
    create(broker, "t")
    for number in range(5):
        produce(broker, "t", [("k", str(number))], **{"linger.ms": 0})
    broker.stop()
    folder = broker.data_dir / "t-0"
    for path in folder.glob("0*.log"):
        path.unlink()
    (broker.data_dir / ".kafka_cleanshutdown").unlink()  # as after a kill
    broker.start()
    advice = broker.wait_for_log("t-0 is not served", "has no .log files")
    command = advice.partition("`klog ")[2].partition("`")[0].split()
    broker.stop()
    verify = [sys.executable, "-m", "spark_klog.cli", "log", "verify", str(folder)]
    assert "it has no .log files" in subprocess.run(verify, capture_output=True, text=True).stderr
    done = subprocess.run([sys.executable, "-m", "spark_klog.cli", *command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ends at offset 5" in done.stdout
    assert subprocess.run(verify, capture_output=True, text=True).returncode == 0
    broker.start()
    produce(broker, "t", [("k", "after")])
    assert consume(broker.bootstrap_servers, "t") == [(5, "k", "after")]
    broker.stop()


def test_timestamps_in_the_future(server_dir: Path) -> None:
    """They keep a log beyond its retention: the broker says so, once, and has Kafka's setting against them."""
    broker = start(server_dir)
    day_ms = 24 * 3600 * 1000
    try:
        create(broker, "kept", **{"retention.ms": "1000", "internal.segment.bytes": "1000"})
        create(broker, "checked", **{"message.timestamp.after.max.ms": str(day_ms)})
        create(broker, "compacted", **{"cleanup.policy": "compact"})
        ahead, soon = (int(time.time() * 1000) + days * day_ms for days in (365, 0.5))
        far, near = (bytes(make_batch([(b"k", bytes(600))], [int(stamp)])) for stamp in (ahead, soon))
        with RawClient(broker.port) as client:
            for _ in range(3):
                assert client.produce("kept", far, 7)[0] == ErrorCode.NONE
            assert client.produce("compacted", far, 7)[0] == ErrorCode.NONE
            assert client.produce("checked", far, 7)[0] == ErrorCode.INVALID_TIMESTAMP
            assert client.produce("checked", near, 7) == (ErrorCode.NONE, 0)
        assert "365.0 days in the future" in broker.wait_for_log("kept-0", "message.timestamp.after.max.ms")
        create(broker, "expires", **{"retention.ms": "1000", "internal.segment.bytes": "1000"})
        with RawClient(broker.port) as client:
            assert client.produce("expires", bytes(make_batch([(b"k", b"v")], [1])), 7)[0] == ErrorCode.NONE
        broker.wait_for_log("expires-0", "deleted 1 segments")  # further rounds of retention
        assert broker.log.read_text().count("in the future: ") == 1
    finally:
        broker.stop()


def test_a_full_disk_refuses_appends_and_serves_reads_until_there_is_room(server_dir: Path) -> None:
    """A limit on the size of files stands for a full disk: writes beyond it fail at the same place."""
    broker = start(server_dir)
    create(broker, "t")
    produce(broker, "t", [("k", "before " + "x" * 2000)])
    size = (broker.data_dir / "t-0" / f"{0:020d}.log").stat().st_size
    _, hard = resource.prlimit(broker.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (size + 100, hard))
    with pytest.raises(AssertionError, match=r"KAFKA_STORAGE_ERROR|Disk error|_MSG_TIMED_OUT"):
        produce(broker, "t", [("k", "y" * 2000)], **{"message.timeout.ms": 1500, "linger.ms": 1000})
    assert "nothing appended" in broker.wait_for_log("KAFKA_STORAGE_ERROR")
    assert [value[:6] for _, _, value in consume(broker.bootstrap_servers, "t") if value] == ["before"]
    assert (broker.data_dir / "t-0" / f"{0:020d}.log").stat().st_size == size
    resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (hard, hard))
    produce(broker, "t", [("k", "after")])
    assert [offset for offset, _, _ in consume(broker.bootstrap_servers, "t")] == [0, 1]
    broker.kill()
    broker.start()
    assert consume(broker.bootstrap_servers, "t")[1] == (1, "k", "after")
    broker.stop()


def test_an_append_whose_flush_can_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The records are there, and can be read: the log must not say otherwise."""
    batch = make_batch([(b"k", b"v")], [1])

    def no_descriptor(files: FileSystem, path: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def run() -> None:
        async with running(tmp_path, log=LogConfig(flush_messages=1)) as broker:
            await broker.changes.create_topic("t", 1)
            with monkeypatch.context() as patch:
                patch.setattr(FileSystem, "open_folder", no_descriptor)
                assert (await send(broker, "t", bytes(batch)))["error_code"] == ErrorCode.KAFKA_STORAGE_ERROR
            answer = await send(broker, "t", bytes(batch))
            assert (answer["error_code"], answer["base_offset"]) == (ErrorCode.NONE, 1)

    asyncio.run(run())
    assert "KAFKA_STORAGE_ERROR, appended, but not acknowledged" in caplog.text


def test_a_roll_without_a_free_descriptor(server_dir: Path) -> None:
    """The partition takes records again once descriptors are free: nothing has failed to reach the disk."""
    broker = start(server_dir, **{"internal.segment.bytes": 1000})
    try:
        batch = bytes(make_batch([(None, bytes(600))], [1]))
        with RawClient(broker.port) as client:
            create(broker, "t")
            assert client.produce("t", batch, 7) == (0, 0)
            before = resource.prlimit(broker.pid, resource.RLIMIT_NOFILE)
            used = {int(path.name) for path in Path(f"/proc/{broker.pid}/fd").iterdir()}
            first_free = min(set(range(len(used) + 1)) - used)
            resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, (first_free, before[1]))
            for _ in range(3):
                assert client.produce("t", batch, 7)[0] == ErrorCode.KAFKA_STORAGE_ERROR
            resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, before)
            assert [client.produce("t", batch, 7) for _ in range(2)] == [(0, 1), (0, 2)]
    finally:
        broker.stop()
