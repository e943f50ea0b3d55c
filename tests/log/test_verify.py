"""`klog log verify` finds nothing in intact logs of Kafka and ours, and finds every wrong byte."""

from __future__ import annotations

import json
import random
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from hypothesis import given, settings, strategies as st

from spark_klog.errors import ConfigError
from spark_klog.log.compaction.passes import empty_batch
from spark_klog.log.directory import CLEAN_STOP, LogDirectory
from spark_klog.log.partition_log import LogConfig, PartitionLog
from spark_klog.log.tools.upgrade import upgrade
from spark_klog.log.tools.verify import Finding, log_files, repair, verify
from spark_klog.records.formats.batch import iter_batches
from spark_klog.records.formats.batch_v2 import BatchHeader
from tests.support.brokers.batches import make_batch, walk
from tests.support.brokers.log_07 import GZIP, SNAPPY, compressed, message, write_log
from tests.support.brokers.logs import add_log
from tests.support.clients.klog import klog
from tests.support.servers.kafka import Kafka, Version

DATA = Path(__file__).parent.parent / "data"
TRANSACTIONS = DATA / "kafka-3.9.1" / "logs" / "v2-transactions-0"
NOW = 1_700_000_000_000


def _our_log(folder: Path) -> Path:
    """Make three segments of indexed batches of three records, so that no two last offsets differ in one bit."""
    log = PartitionLog(folder, LogConfig(segment_bytes=400, index_interval_bytes=1), uuid4())
    for number in range(9):
        codec = ("none", "gzip")[number % 2]
        pairs = [(b"k", b"v%d" % (3 * number + record)) for record in range(3)]
        log.append(memoryview(make_batch(pairs, [NOW + 100 * number + record for record in range(3)], codec)))
    log.close()
    assert len(list(folder.glob("*.log"))) == 3
    return folder


def _found(path: Path) -> list[Finding]:
    return list(verify(path))


def _told(folder: Path) -> set[str]:
    return {finding.file.name for finding in _found(folder)}


# ----- intact logs


def test_control_batches_that_compaction_has_emptied(tmp_path: Path) -> None:
    folder, emptied = tmp_path / "t-0", 0
    folder.mkdir()
    for log in TRANSACTIONS.glob("*.log"):
        with (folder / log.name).open("wb") as file:
            for header, batch in iter_batches(log.read_bytes()):
                assert isinstance(header, BatchHeader)
                emptied += header.is_control
                file.write(empty_batch(header) if header.is_control else batch)
    assert emptied
    assert _found(folder) == []


@pytest.mark.parametrize("version", ["kafka-0.10.2.2", "kafka-3.9.1"])
def test_nothing_is_wrong_with_logs_of_kafka(version: str) -> None:
    logs = DATA / version / "logs"
    assert _found(logs) == []
    assert len(log_files(logs)) >= 7
    for path in logs.rglob("*"):
        assert _found(path) == []


def test_nothing_is_wrong_with_ours(tmp_path: Path) -> None:
    folder = _our_log(tmp_path / "data" / "t-0")
    for path in (tmp_path / "data", folder, *folder.iterdir()):
        assert _found(path) == []
    seen: dict[Path, int] = {}
    assert list(verify(tmp_path / "data", seen.__setitem__)) == []
    assert seen == {path: path.stat().st_size for path in folder.glob("*.log")}


def test_nothing_is_wrong_with_upgraded_logs(tmp_path: Path) -> None:
    files = [[message(b"%d" % number) for number in range(3000)], [compressed([b"a", b"b"], GZIP)], [message(b"")]]
    write_log(tmp_path / "old" / "t-0", files, 99)
    assert _found(tmp_path / "old") == []
    upgrade(tmp_path / "old", tmp_path / "new")
    assert _found(tmp_path / "new") == []
    assert len(log_files(tmp_path / "new")) == 1


def _produce(servers: str, topic: str, version: Version) -> None:
    rng = random.Random(version)
    for codec in ("none", "gzip", "snappy", "lz4"):
        options = {"bootstrap.servers": servers, "linger.ms": 0, "batch.num.messages": 7, "compression.type": codec}
        if version == "0.10.2.2":
            options |= {"broker.version.fallback": "0.10.0"}
        producer = Producer(options)
        for number in range(200):
            value = bytes(rng.randrange(97, 123) for _ in range(rng.randrange(100)))
            producer.produce(topic, value, b"%d" % (number % 50), 0, timestamp=NOW + number + rng.randrange(99))
            if number % 7 == 6:
                producer.poll(0.001)
        assert producer.flush(30) == 0


@pytest.mark.peer
@pytest.mark.test_all("version")  # test_kafka_tools.py and test_compaction_kafka.py verify what Kafka 4.4.0 writes
@pytest.mark.parametrize("version", ["0.10.2.2", "3.9.1"])
def test_nothing_is_wrong_with_what_a_real_kafka_writes(version: Version, server_dir: Path) -> None:
    """While Kafka runs, and after a kill, zeros follow the entries of its newest indexes; a clean stop cuts them."""
    overrides = {"log.segment.bytes": 12000, "log.index.interval.bytes": 500}
    with Kafka(version, server_dir, overrides) as kafka:
        kafka.create_topic("t")
        _produce(kafka.bootstrap_servers, "t", version)
        folder = kafka.log_dir / "t-0"
        newest = max(folder.glob("*.index"))
        assert newest.stat().st_size == 10 * 1024 * 1024
        assert _found(folder) == []
        kafka.kill()
        assert newest.stat().st_size == 10 * 1024 * 1024
        assert _found(kafka.log_dir) == []
        kafka.start()
    assert _found(kafka.log_dir) == []
    assert newest.stat().st_size < 12000
    assert sum(path.stat().st_size for path in folder.glob("*index")) > 500


def _records(folder: Path) -> int | None:
    """The number of records in the batches of a log; None if a file is replaced meanwhile."""
    try:
        logs = [path.read_bytes() for path in folder.glob("*.log")]
    except FileNotFoundError:
        return None
    return sum(struct.unpack_from(">i", log, batch.position + 57)[0] for log in logs for batch in walk(log))


@pytest.mark.peer
@pytest.mark.test_all("version")
def test_nothing_is_wrong_with_what_kafka_compacts(server_dir: Path) -> None:
    overrides = {
        "log.segment.bytes": 20000,
        "log.index.interval.bytes": 300,
        "log.cleaner.backoff.ms": 100,
        "log.cleaner.min.cleanable.ratio": 0.01,
        "log.cleaner.io.buffer.size": 5000,
        "log.retention.check.interval.ms": 200,
    }
    with Kafka("3.9.1", server_dir, overrides) as kafka:
        kafka.create_topic("t", 1, {"cleanup.policy": "compact"})
        _produce(kafka.bootstrap_servers, "t", "3.9.1")
        folder = kafka.log_dir / "t-0"
        deadline = time.monotonic() + 60
        while (left := _records(folder)) is None or left > 600:
            assert time.monotonic() < deadline, left
            time.sleep(0.2)
    assert _found(kafka.log_dir) == []


# ----- damaged logs


def _flips(
    folder: Path, masks: Sequence[int] = (0x01, 0x80, 0xFF), names: str = "*"
) -> Iterator[tuple[Path, int, int, bytes]]:
    """Change each byte of each file in turn; yields (file, position, mask, original content)."""
    for path in sorted(folder.glob(names)):
        whole = path.read_bytes()
        for position in range(len(whole)):
            for mask in masks:
                changed = bytearray(whole)
                changed[position] ^= mask
                path.write_bytes(changed)
                yield path, position, mask, whole
        path.write_bytes(whole)


def _unprotected(path: Path, position: int, whole: bytes) -> bool:
    """Whether nothing in the log determines a byte's value; `path` is the file with the changed byte."""
    changed = path.read_bytes()
    if path.suffix == ".log":
        batches = list(walk(whole))
        number = max(n for n, batch in enumerate(batches) if batch.position <= position)
        batch = batches[number]
        if 12 <= position - batch.position < 16:
            return True  # leader epoch
        (base,) = struct.unpack_from(">q", changed, batch.position)
        last_of_all = number + 1 == len(batches)
        in_order = base > batch.base_offset and (last_of_all or base + 2 < batches[number + 1].base_offset)
        return position - batch.position < 8 and in_order
    if path.suffix == ".timeindex" and position % 12 >= 8:
        before, after = (struct.unpack_from(">i", data, position // 12 * 12 + 8)[0] for data in (whole, changed))
        return before // 3 == after // 3  # a record of the same batch
    if path.name == "partition.metadata":
        byte = chr(changed[position])
        return byte.isspace() or (byte.isascii() and byte.isalnum()) or byte in "-_"
    return path.name == "leader-epoch-checkpoint" and chr(changed[position]).isdecimal()


@pytest.mark.parametrize("masks", [(0x01,), pytest.param((0x80, 0xFF), marks=pytest.mark.test_all("long"))])
def test_every_byte_of_our_log_that_is_changed_is_told(tmp_path: Path, masks: Sequence[int]) -> None:
    folder = _our_log(tmp_path / "t-0")
    silent, told = [], 0
    for path, position, mask, whole in _flips(folder, masks):
        names = _told(folder)
        if path.name in names:
            told += 1
        elif not names:
            silent.append((path.name, position))
            assert _unprotected(path, position, whole), (path, position, mask)
    assert _found(folder) == []
    assert told > 700 * len(masks)
    batches = sum(len(list(walk(path.read_bytes()))) for path in folder.glob("*.log"))
    assert len([name for name, _ in silent if name.endswith(".log")]) <= len(masks) * (batches * 4 + 8)
    assert not [name for name, _ in silent if name.endswith(".index")]


def test_every_byte_of_a_log_of_kafka_07_that_is_changed_is_told(tmp_path: Path) -> None:
    """Only a message's attributes are exempt: its CRC does not cover them, and a set may look like a payload."""
    first = [message(b"one", magic=0), compressed([b"a", b"b"], GZIP)]
    second = [compressed([b"c"], SNAPPY), message(b"two")]
    offsets = write_log(tmp_path / "t-0", [first, second])
    assert _found(tmp_path) == []
    attributes = {offset + 5 for offset in offsets[1:-1]}
    silent = {
        int(path.stem) + position
        for path, position, _, _ in _flips(tmp_path / "t-0")
        if path.name not in _told(tmp_path)
    }
    assert silent
    assert silent <= attributes


def test_every_byte_of_a_transaction_index_that_is_changed_is_told(tmp_path: Path) -> None:
    """Only a last stable offset that a follower could have written is exempt."""
    folder = shutil.copytree(TRANSACTIONS, tmp_path / "t-0")
    (path,) = folder.glob("*.txnindex")
    silent = [
        (position, mask) for _, position, mask, _ in _flips(folder, names=path.name) if path.name not in _told(folder)
    ]
    assert silent == [(33, 1), (67, 1), (101, 1)]  # 24 instead of 23 and so on
    path.unlink()
    missing = _found(folder)
    assert len(missing) == 3
    assert all("is missing" in finding.what for finding in missing)


def _change(path: Path, position: int, form: str, value: int) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, position, value)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("suffix", "entry", "field", "form", "by", "what"),
    [
        (".index", 8, 0, ">i", -1, "the batch there has offsets"),
        (".index", 8, 0, ">i", 2, "does not end with that offset"),
        (".index", 8, 4, ">i", 1, "no batch begins there"),
        (".index", 8, 4, ">i", 1 << 20, "no batch begins there"),
        (".timeindex", 12, 0, ">q", 1, "the largest timestamp of the batch"),
        (".timeindex", 12, 8, ">i", 3, "the largest timestamp of the batch"),
        (".timeindex", 12, 8, ">i", 1 << 20, "no such offset"),
    ],
)
def test_an_index_entry_that_does_not_agree_with_the_log(
    tmp_path: Path, suffix: str, entry: int, field: int, form: str, by: int, what: str
) -> None:
    folder = _our_log(tmp_path / "t-0")
    path = min(folder.glob(f"*{suffix}"))
    (value,) = struct.unpack_from(form, path.read_bytes(), entry + field)
    _change(path, entry + field, form, value + by)
    findings = _found(folder)
    assert findings == _found(path)
    assert (findings[0].file, findings[0].position) == (path, entry)
    assert what in findings[0].what


def test_an_entry_of_several_batches_is_right(tmp_path: Path) -> None:
    """Followers and compaction write such entries: the position of the first batch, the offset of the last."""
    folder = _our_log(tmp_path / "t-0")
    for log in folder.glob("*.log"):
        base, batches = int(log.stem), list(walk(log.read_bytes()))
        if len(batches) > 2:
            entry = struct.pack(">ii", batches[-1].last_offset - base, batches[1].position)
            log.with_suffix(".index").write_bytes(entry)
    assert _found(folder) == []


def test_an_entry_with_the_first_offset_is_right(tmp_path: Path) -> None:
    """Brokers before 0.11 write such entries."""
    folder = _our_log(tmp_path / "t-0")
    for log in folder.glob("*.log"):
        base, batches = int(log.stem), list(walk(log.read_bytes()))[1:]
        entries = [struct.pack(">ii", batch.base_offset - base, batch.position) for batch in batches]
        log.with_suffix(".index").write_bytes(b"".join(entries))
    assert _found(folder) == []


def test_zeros_after_the_entries_belong_to_the_newest_segment(tmp_path: Path) -> None:
    folder = _our_log(tmp_path / "t-0")
    for suffix, entry in ((".index", 8), (".timeindex", 12)):
        *_, older, newest = sorted(folder.glob(f"*{suffix}"))
        with newest.open("ab") as file:
            file.write(bytes(1000 * entry))
        assert _found(folder) == []
        size = older.stat().st_size
        with older.open("ab") as file:
            file.write(bytes(10 * entry))
        (finding,) = _found(folder)
        assert (finding.file, finding.position) == (older, size)
        with newest.open("ab") as file:
            file.write(b"\x00")
        assert [f.file for f in _found(folder)] == [older, newest]
        for path in (older, newest):
            path.unlink()
    assert _found(folder) == []


def test_segments_that_overlap_are_misnamed_or_missing(tmp_path: Path) -> None:
    folder = _our_log(tmp_path / "t-0")
    first, second, third = sorted(folder.glob("*.log"))
    shutil.copy(second, folder / "5.log")
    assert _told(folder) == {"5.log"}
    (folder / "5.log").unlink()
    copy = shutil.copy(third, folder / f"{int(third.stem) - 1:020}.log")
    assert _told(folder) == {second.name, copy.name}  # their last batches end beyond the next base offset
    copy.unlink()
    third.rename(folder / f"{int(third.stem) + 1:020}.log")
    assert {third.with_suffix(suffix).name for suffix in (".index", ".timeindex")} <= _told(folder)
    first.unlink()
    assert {first.with_suffix(suffix).name for suffix in (".index", ".timeindex")} <= _told(folder)


def test_zeros_after_the_batches_belong_to_the_newest_segment(tmp_path: Path) -> None:
    """As Kafka leaves them that was killed with `preallocate`."""
    folder = _our_log(tmp_path / "t-0")
    *_, older, newest = sorted(folder.glob("*.log"))
    for size in (1, 11, 12, 3_000_000):
        whole = newest.read_bytes()
        newest.write_bytes(whole + bytes(size))
        assert _found(folder) == []
        newest.write_bytes(whole + bytes(size) + b"x")
        (finding,) = _found(folder)
        assert (finding.file, finding.position) == (newest, len(whole))
        newest.write_bytes(whole)
    whole = older.read_bytes()
    older.write_bytes(whole + bytes(100))
    (finding,) = _found(folder)
    assert (finding.file, finding.position) == (older, len(whole))


def test_flushed_records_that_zeros_or_nothing_replaced(tmp_path: Path) -> None:
    """A broker refuses such a log: zeros may be writes that a disk lost."""
    directory = LogDirectory(tmp_path, 0, LogConfig())
    log = add_log(directory, "t", 0)
    for number in range(2):
        log.append(memoryview(make_batch([(b"k", b"v")], [NOW + number])))
    directory.close()
    folder = tmp_path / "t-0"
    assert _found(folder) == []
    (newest,) = folder.glob("*.log")
    whole = newest.read_bytes()
    newest.write_bytes(whole + bytes(100))
    (finding,) = _found(folder)
    assert (finding.file, finding.position) == (newest, len(whole))
    (tmp_path / CLEAN_STOP).unlink()
    assert _found(folder) == []
    half = len(whole) // 2
    for tail in (b"", bytes(half)):
        newest.write_bytes(whole[:half] + tail)
        finding = next(finding for finding in _found(folder) if finding.file == newest)
        assert finding.what == "it ends at offset 1, but had been flushed up to offset 2: records are missing"


def test_a_partition_without_records(tmp_path: Path) -> None:
    """It has no .log file yet: nothing is wrong with it, unless records had been flushed."""
    folder = tmp_path / "t-0"
    PartitionLog(folder, LogConfig(), uuid4(), overrides={"retention_ms": 5}).close()
    assert not list(folder.glob("*.log"))
    assert _found(folder) == _found(tmp_path) == []
    assert repair(folder) is None
    assert klog("log", "dump", str(folder)).stdout == ""
    (tmp_path / "recovery-point-offset-checkpoint").write_text("0\n1\nt 0 5\n")
    (finding,) = _found(folder)
    assert (finding.file, finding.what) == (folder, "it has no .log files: its records are gone")
    repaired = repair(folder)
    assert repaired is not None
    assert repaired.end_offset == 5


def test_a_folder_without_a_log(tmp_path: Path) -> None:
    folder = _our_log(tmp_path / "t-0")
    for path in folder.glob("*.*"):
        if path.suffix in (".log", ".index", ".timeindex", ".txnindex"):
            path.unlink()
    (finding,) = _found(folder)
    assert (finding.file, finding.what) == (folder, "it has no .log files: its records are gone")


@pytest.mark.parametrize("tail", [b"\x00x", b"\xff" * 100, "half"])
def test_a_tail_that_is_no_whole_batch(tmp_path: Path, tail: bytes | str) -> None:
    folder = _our_log(tmp_path / "t-0")
    newest = max(folder.glob("*.log"))
    whole = newest.read_bytes()
    newest.write_bytes(whole + (whole[:70] if isinstance(tail, str) else tail))
    (finding,) = _found(folder)
    assert (finding.file, finding.position) == (newest, len(whole))


def test_a_hole_in_a_log_of_kafka_07(tmp_path: Path) -> None:
    write_log(tmp_path / "t-0", [[message(b"one")], [message(b"two")], [message(b"three")]])
    first, second, third = sorted((tmp_path / "t-0").iterdir())
    second.unlink()
    (finding,) = _found(tmp_path / "t-0")
    assert finding.file == third
    assert str(first) in finding.what
    third.rename(third.with_name("x.kafka"))
    assert [f.file.name for f in _found(tmp_path)] == ["x.kafka"]


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(
        [f"{5:020}{suffix}" for suffix in (".log", ".index", ".timeindex", ".txnindex", ".snapshot", ".kafka")]
        + ["leader-epoch-checkpoint", "partition.metadata"]
    ),
    content=st.binary(max_size=200),
    prefix=st.integers(0, 1221),
)
def test_rubbish_is_never_raised(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes, prefix: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "rubbish" / "t-0"
    if not folder.exists():
        shutil.copytree(TRANSACTIONS, folder)
    path = folder / name
    before = path.read_bytes() if path.exists() else None
    path.write_bytes((before or b"")[:prefix] + content)
    list(verify(folder))
    list(verify(path))
    path.unlink() if before is None else path.write_bytes(before)


def test_what_is_no_log_at_all(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.txt").write_text("x")
    for path in (tmp_path / "x", tmp_path / "x" / "notes.txt"):
        with pytest.raises(ConfigError, match=str(path)):
            list(verify(path))


# ----- the command


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return klog("log", "verify", *map(str, arguments))


def test_the_command(tmp_path: Path) -> None:
    folder = _our_log(tmp_path / "t-0")
    sound = DATA / "kafka-3.9.1" / "logs"
    done = _run(folder, sound)
    sizes = [[path.stat().st_size for path in root.rglob("*.log")] for root in (folder, sound)]
    lines = [
        f"{root}: no problem in {len(size)} log files, {sum(size):,} bytes\n"
        for root, size in zip((folder, sound), sizes, strict=True)
    ]
    assert (done.returncode, done.stdout, done.stderr) == (0, "".join(lines), "")
    log = min(folder.glob("*.log"))
    _change(log, 70, ">b", 99)
    _change(folder / "partition.metadata", 0, ">b", 0)
    done = _run(sound, folder)
    assert (done.returncode, done.stdout) == (1, lines[1])
    first, second = sorted(done.stderr.splitlines())
    assert first.startswith(f"{log}: position 0: batch of offsets 0-2: CRC 0x")
    assert second.startswith(f"{folder / 'partition.metadata'}: ")
    done = _run("--json", folder)
    assert (done.returncode, done.stderr) == (1, "")
    found = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda line: str(line["file"]))
    assert [(line["file"], line["position"]) for line in found] == [
        (str(log), 0),
        (str(folder / "partition.metadata"), None),
    ]
    assert _run(tmp_path / "no").returncode == 2
    (tmp_path / "no").mkdir()
    done = _run(tmp_path / "no")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
