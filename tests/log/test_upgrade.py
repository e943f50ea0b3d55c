"""`klog log upgrade`: logs of Kafka 0.7, made by hand, then read by DumpLogSegments, Kafka 3.9.1 and our broker."""

from __future__ import annotations

import json
import random
import signal
import string
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from spark_klog.errors import ConfigError, DecodeError, LogDirLocked
from spark_klog.log.tools.upgrade import NotUpgraded, Upgraded, upgrade
from tests.support.brokers.batches import read_records
from tests.support.brokers.log_07 import GZIP, SNAPPY, compressed, message, write_log
from tests.support.clients.dump import DumpedRecord, dump_files, dump_log, dumped_batches, dumped_records
from tests.support.clients.klog import klog
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import NEWEST, Kafka

COMMAND = (sys.executable, "-m", "spark_klog.cli", "--log-level", "WARNING", "log", "upgrade")
#: (payloads of a message, its codec).
Old = tuple[list[bytes], int]
MANY: list[Old] = [
    ([b"first"], 0),
    ([b""], 0),
    ([b"g1", b"g2", b""], GZIP),
    ([b"between"], 0),
    ([b"s1"], SNAPPY),
    ([], GZIP),
    ([b"s2", b"s3"], SNAPPY),
    ([b"x" * 100_000], 0),
    ([b"last"], 0),
]


def _message(old: Old, magic: int = 1) -> bytes:
    payloads, codec = old
    return compressed(payloads, codec) if codec else message(payloads[0], magic)


def _write(folder: Path, olds: Sequence[Old], start: int = 0, file_messages: int = 4) -> list[int]:
    messages = [_message(old, number % 2) for number, old in enumerate(olds)]
    files = [messages[at : at + file_messages] for at in range(0, len(messages), file_messages)]
    return write_log(folder, files or [[]], start)


def _payloads(olds: Sequence[Old]) -> list[bytes]:
    return [payload for payloads, _ in olds for payload in payloads]


def _values(folder: Path) -> list[bytes | None]:
    return [record.value for path in sorted(folder.glob("*.log")) for record in read_records(path.read_bytes())]


def _tree(folder: Path) -> dict[str, bytes]:
    """All files by path, except the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return klog("--log-level", "WARNING", "log", "upgrade", *map(str, arguments))


@pytest.mark.parametrize("start", [0, 5_000_000_000])
def test_the_map_leads_from_every_message_to_its_first_record(tmp_path: Path, start: int) -> None:
    offsets = _write(tmp_path / "old" / "t-0", MANY, start)
    (done,) = upgrade(tmp_path / "old", tmp_path / "new")
    assert done == Upgraded("t-0", start, offsets[-1], len(_payloads(MANY)))
    folder = tmp_path / "new" / "t-0"
    assert _values(folder) == _payloads(MANY)
    expected = [len(_payloads(MANY[:number])) for number in range(len(MANY) + 1)]
    lines = (folder / "offsets-of-kafka-0.7").read_text().splitlines()
    assert lines == ["0", *(f"{old} {new}" for old, new in zip(offsets, expected, strict=True))]


def test_a_long_map(tmp_path: Path) -> None:
    rng = random.Random(3)
    olds: list[Old] = [([bytes(rng.randrange(99))], 0) for _ in range(3000)]
    offsets = _write(tmp_path / "t-0", olds, 990, 700)
    seen: list[tuple[str, int]] = []
    upgrade(tmp_path / "t-0", tmp_path / "new", lambda *progress: seen.append(progress))
    lines = (tmp_path / "new" / "t-0" / "offsets-of-kafka-0.7").read_text().splitlines()
    assert lines == ["0", *(f"{old} {new}" for new, old in enumerate(offsets))]
    assert _values(tmp_path / "new" / "t-0") == _payloads(olds)
    assert {name for name, _ in seen} == {"t-0"}
    assert [size for _, size in seen] == sorted(size for _, size in seen)
    assert seen[-1][1] == offsets[-1] - 990


@pytest.mark.parametrize("text", ["", "0", "1\n0 0\n5 1\n", "0\n0 0\n5", "0\nx y\n9 9\n", "0\n"])
def test_a_damaged_map(tmp_path: Path, text: str) -> None:
    _write(tmp_path / "t-0", MANY, 0)
    upgrade(tmp_path / "t-0", tmp_path / "new")
    (tmp_path / "new" / "t-0" / "offsets-of-kafka-0.7").write_text(text)
    (failed,) = upgrade(tmp_path / "t-0", tmp_path / "new")
    assert isinstance(failed, NotUpgraded)
    assert isinstance(failed.error, DecodeError)
    assert "not a map of offsets" in str(failed.error)


def _ascii(count: int) -> list[Old]:
    rng = random.Random(count)
    olds: list[Old] = []
    while len(_payloads(olds)) < count:
        codec = rng.choice((0, 0, GZIP, SNAPPY))
        sizes = [rng.randrange(1, 300) for _ in range(rng.randrange(1, 20) if codec else 1)]
        olds.append((["".join(rng.choices(string.ascii_letters, k=size)).encode() for size in sizes], codec))
    return olds


@pytest.mark.peer
def test_dump_log_segments_reads_what_was_there(tmp_path: Path) -> None:
    olds = _ascii(600)
    _write(tmp_path / "old" / "t-7", olds, 77, 50)
    upgrade(tmp_path / "old", tmp_path / "new")
    folder = tmp_path / "new" / "t-7"
    (log,) = folder.glob("*.log")
    records = dumped_records(dump_log(NEWEST, log))
    assert records == [
        DumpedRecord(number, 2, "CreateTime", -1, None, payload.decode())
        for number, payload in enumerate(_payloads(olds))
    ]
    last, expected = -1, []
    for payloads, codec in olds:
        last += len(payloads)
        if codec == 0 and expected and expected[-1][1] == "none":
            expected.pop()
        expected.append((last, ("none", "gzip", "snappy")[codec]))
    batches = dumped_batches(dump_log(NEWEST, log, deep=False))
    assert [(batch.last_offset, batch.codec) for batch in batches] == expected
    index = log.with_suffix(".index")
    assert "passed sanity check" in dump_files(NEWEST, [index], "--index-sanity-check")
    dump_files(NEWEST, [index, log.with_suffix(".timeindex")])


def _consume(
    servers: str, topic: str, partitions: int, counts: int
) -> dict[int, list[tuple[int, object, bytes | None]]]:
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "any", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    found: dict[int, list[tuple[int, object, bytes | None]]] = {partition: [] for partition in range(partitions)}
    deadline = time.monotonic() + 60
    while sum(map(len, found.values())) < counts:
        assert time.monotonic() < deadline
        for one in consumer.consume(1000, 0.5):
            assert one.error() is None
            found[one.partition() or 0].append((one.offset() or 0, one.key(), one.value()))
    consumer.close()
    return found


def _expected(logs: Sequence[Sequence[Old]]) -> dict[int, list[tuple[int, object, bytes | None]]]:
    return {
        partition: [(offset, None, payload) for offset, payload in enumerate(_payloads(olds))]
        for partition, olds in enumerate(logs)
    }


def test_our_broker_serves_it(server_dir: Path) -> None:
    logs = [MANY, _ascii(300), [([b"only"], 0)]]
    for partition, olds in enumerate(logs):
        _write(server_dir / "old" / f"upgraded-{partition}", olds, 1000 * partition)
    upgrade(server_dir / "old", server_dir / "broker")
    with KlogBroker(server_dir) as broker:
        count = sum(len(_payloads(olds)) for olds in logs)
        assert _consume(broker.bootstrap_servers, "upgraded", 3, count) == _expected(logs)


@pytest.mark.peer
@pytest.mark.test_all("version")
def test_a_real_kafka_serves_it(server_dir: Path) -> None:
    logs = [MANY, _ascii(300)]
    for partition, olds in enumerate(logs):
        _write(server_dir / "old" / f"upgraded-{partition}", olds, 1000 * partition)
    kafka = Kafka("3.9.1", server_dir / "kafka")
    done = _run(server_dir / "old", kafka.log_dir, "--no-topic-ids")
    assert (done.returncode, done.stderr) == (0, "")
    with kafka:
        kafka.create_topic("upgraded", 2)
        count = sum(len(_payloads(olds)) for olds in logs)
        assert _consume(kafka.bootstrap_servers, "upgraded", 2, count) == _expected(logs)


# ----- what goes wrong


def test_a_damaged_log_is_left_out_and_the_others_are_not(tmp_path: Path) -> None:
    for partition in range(4):
        _write(tmp_path / "old" / f"t-{partition}", MANY)
    before = _tree(tmp_path / "old")
    crc, cut = (tmp_path / "old" / name / f"{0:020}.kafka" for name in ("t-1", "t-2"))
    data = bytearray(crc.read_bytes())
    data[12] ^= 1  # of the first message's payload
    crc.write_bytes(data)
    cut = max((tmp_path / "old" / "t-2").iterdir())
    cut.write_bytes(cut.read_bytes()[:-1])
    done = _run(tmp_path / "old", tmp_path / "new")
    assert done.returncode == 1
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["t-0", "t-3"]
    first, second = done.stderr.splitlines()  # each partition is named once
    assert first.startswith(f"t-1: {crc} at position 0: ")
    assert second.startswith(f"t-2: {cut} at position 0: ")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [".lock", "t-0", "t-3"]
    crc.write_bytes(before[str(crc.relative_to(tmp_path / "old"))])
    cut.write_bytes(b"")
    kept = _tree(tmp_path / "new")
    again = _run("--json", tmp_path / "old", tmp_path / "new")
    assert (again.returncode, again.stderr) == (0, "")
    lines = [json.loads(line) for line in again.stdout.splitlines()]
    assert [(line["partition"], line["state"], line["new_end"]) for line in lines] == [
        ("t-0", "done before", 11),
        ("t-1", "upgraded", 11),
        ("t-2", "upgraded", 10),
        ("t-3", "done before", 11),
    ]
    assert kept.items() <= _tree(tmp_path / "new").items()
    ids = {(tmp_path / "new" / f"t-{partition}" / "partition.metadata").read_text() for partition in range(4)}
    assert len(ids) == 1


def test_what_is_in_the_way(tmp_path: Path) -> None:
    _write(tmp_path / "old" / "t-0", MANY)
    _write(tmp_path / "old" / "t-1", MANY)
    (tmp_path / "new" / "t-0").mkdir(parents=True)
    (tmp_path / "new" / "t-0" / f"{0:020}.log").write_bytes(b"data")
    refused, done = upgrade(tmp_path / "old", tmp_path / "new")
    assert isinstance(refused, NotUpgraded)
    assert str(tmp_path / "new" / "t-0") in str(refused.error)
    assert isinstance(done, Upgraded)
    assert _tree(tmp_path / "new" / "t-0") == {f"{0:020}.log": b"data"}
    with max((tmp_path / "old" / "t-1").iterdir()).open("ab") as file:
        file.write(message(b"more"))
    before = _tree(tmp_path / "new")
    _, changed = upgrade(tmp_path / "old", tmp_path / "new")
    assert isinstance(changed, NotUpgraded)
    assert isinstance(changed.error, ConfigError)
    assert _tree(tmp_path / "new") == before


def test_a_data_directory_in_use(tmp_path: Path) -> None:
    _write(tmp_path / "old" / "t-0", MANY)
    (tmp_path / "new").mkdir()
    code = "import fcntl,os,sys;fcntl.lockf(os.open(sys.argv[1],66),fcntl.LOCK_EX);print(1,flush=True);sys.stdin.read()"
    holder = [sys.executable, "-c", code, str(tmp_path / "new" / ".lock")]
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(LogDirLocked):
            upgrade(tmp_path / "old", tmp_path / "new")
        process.stdin.close()
    assert _tree(tmp_path / "new") == {}


def test_what_is_no_log_of_kafka_07(tmp_path: Path) -> None:
    (tmp_path / "old" / "t-0").mkdir(parents=True)
    (tmp_path / "old" / "t-0" / f"{0:020}.log").touch()
    _write(tmp_path / "old" / "a b-0", MANY)
    for result, part in zip(upgrade(tmp_path / "old", tmp_path / "new"), ("illegal topic", "no .kafka"), strict=True):
        assert isinstance(result, NotUpgraded)
        assert part in str(result.error)
    done = _run(tmp_path, tmp_path / "other")
    assert (done.returncode, done.stdout) == (1, "")
    assert "TOPIC-PARTITION" in done.stderr
    assert not (tmp_path / "other").exists()


def test_a_full_disk_leaves_no_half_partition(tmp_path: Path) -> None:
    """Simulate a full disk without root: no file may grow beyond 80 KiB."""
    _write(tmp_path / "old" / "t-0", [([b"first"], 0)])
    _write(tmp_path / "old" / "t-1", MANY)
    limited = ["bash", "-c", 'ulimit -f 80; trap "" XFSZ; exec "$@"', "_", *COMMAND]
    arguments = [str(tmp_path / "old"), str(tmp_path / "new")]
    done = subprocess.run([*limited, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [".lock", "t-0"]
    assert _run(*arguments).returncode == 0
    assert _values(tmp_path / "new" / "t-1") == _payloads(MANY)


def test_where_the_new_logs_can_go(tmp_path: Path) -> None:
    _write(tmp_path / "old" / "t-0", MANY)
    before = _tree(tmp_path / "old")
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "klog-cluster.properties").touch()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "notes.txt").touch()
    for new, reason in (
        (tmp_path / "old", "holds logs of Kafka 0.7 (t-0)"),
        (tmp_path / "cluster", "is the directory of a cluster"),
        (tmp_path / "home", "it holds notes.txt and no meta.properties"),
        (Path("/proc/x"), "No such file or directory"),
    ):
        done = _run(tmp_path / "old", new)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("klog: "), done
        assert reason in done.stderr
    assert _tree(tmp_path / "old") == before
    assert len(list((tmp_path / "cluster").iterdir())) == 1


def test_records_of_a_later_broker_are_not_left_out(tmp_path: Path) -> None:
    """Earlier versions of our broker started on a directory of Kafka 0.7, and wrote beside its logs."""
    for name in ("begun-0", "mixed-0"):
        _write(tmp_path / "old" / name, MANY)
        (tmp_path / "old" / name / f"{0:020}.log").touch()
    upgrade(tmp_path / "old" / "begun-0", tmp_path / "made")
    written = next((tmp_path / "made" / "begun-0").glob("*.log"))
    (tmp_path / "old" / "mixed-0" / written.name).write_bytes(written.read_bytes())
    done = _run(tmp_path / "old", tmp_path / "new")
    assert done.returncode == 1
    assert done.stdout.startswith("begun-0: upgraded, ")
    assert done.stderr == (
        f"mixed-0: {tmp_path / 'old' / 'mixed-0'} holds records of a later broker beside those of Kafka 0.7: "
        f"{0:020}.log; move these .log files elsewhere to upgrade the others (klog log dump shows what they hold)\n"
    )


def test_empty_logs(tmp_path: Path) -> None:
    write_log(tmp_path / "old" / "t-0", [[]], 1234)
    write_log(tmp_path / "old" / "t-1", [[compressed([], GZIP)]])
    first, second = upgrade(tmp_path / "old", tmp_path / "new")
    assert (first, second) == (Upgraded("t-0", 1234, 1234, 0), Upgraded("t-1", 0, len(compressed([], GZIP)), 0))
    assert (tmp_path / "new" / "t-0" / "offsets-of-kafka-0.7").read_text() == "0\n1234 0\n"
    assert _values(tmp_path / "new" / "t-1") == []


def test_a_kill_leaves_no_half_partition(tmp_path: Path) -> None:
    """After a kill each partition under its final name is complete; another run completes all."""
    olds = _ascii(4_000)
    for partition in range(4):
        _write(tmp_path / "old" / f"t-{partition}", olds, 0, 1000)
    states = set()
    for until in (".klog-upgrade", "t-1"):
        arguments = [*COMMAND, str(tmp_path / "old"), str(tmp_path / "new")]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            work = tmp_path / "new" / ".klog-upgrade"
            deadline = time.monotonic() + 60
            while not (tmp_path / "new" / until).exists() and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            process.send_signal(signal.SIGKILL)
        there = sorted(path.name for path in (tmp_path / "new").iterdir() if path.name.startswith("t-"))
        states.add((len(there), work.exists()))
        for name in there:
            assert _values(tmp_path / "new" / name) == _payloads(olds)
            assert (tmp_path / "new" / name / "offsets-of-kafka-0.7").exists()
    assert any(unfinished for _, unfinished in states), states
    assert _run(tmp_path / "old", tmp_path / "new").returncode == 0
    assert not work.exists()
    for partition in range(4):
        assert _values(tmp_path / "new" / f"t-{partition}") == _payloads(olds)
