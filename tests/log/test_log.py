"""Partition logs and data directories against plain lists, and with damage."""

from __future__ import annotations

import base64
import json
import random
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import pytest

from spark_klog.base.names import check_topic_name
from spark_klog.errors import (
    ConfigError,
    CorruptBatchError,
    DataDirectoryError,
    DecodeError,
    LogDirLocked,
    OffsetOutOfRange,
)
from spark_klog.log.config import LogConfig
from spark_klog.log.directory import LogDirectory
from spark_klog.log.file_system import FileSystem
from spark_klog.log.partition_log import BatchTooLarge, PartitionLog
from spark_klog.records.contract import Record
from tests.log.faulty_files import FaultyFiles
from tests.log.faulty_logs import FOLDER
from tests.support.brokers.batches import make_batch, read_records, walk
from tests.support.brokers.logs import add_log, searched

GOLDEN = Path(__file__).parent.parent / "data" / "kafka-3.9.1"
SMALL = LogConfig(segment_bytes=2000, index_interval_bytes=300)
NOW = 1_700_000_000_000


@dataclass
class Model:
    """The expected content of a log: batches as bytes, and (timestamp, offset) of every record."""

    batches: list[tuple[int, int, bytes]] = field(default_factory=list)
    records: list[tuple[int, int]] = field(default_factory=list)

    def append(self, batch: bytes, timestamps: list[int]) -> None:
        first = len(self.records)
        self.records += [(timestamp, first + delta) for delta, timestamp in enumerate(timestamps)]
        stored = struct.pack(">q", first) + batch[8:12] + struct.pack(">i", 0) + batch[16:]
        self.batches.append((first, len(self.records) - 1, stored))

    def bytes_from(self, offset: int) -> tuple[bytes, int]:
        """(all bytes from the batch with `offset` on, size of that batch)."""
        rest = [stored for _, last, stored in self.batches if last >= offset]
        return b"".join(rest), len(rest[0])

    def first_at(self, timestamp: int) -> tuple[int, int] | None:
        return next((record for record in self.records if record[0] >= timestamp), None)


def _append_random(rng: random.Random, log: PartitionLog, model: Model) -> None:
    """Append one to three batches at once, with timestamps in some disorder."""
    data = bytearray()
    first = len(model.records)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        count = rng.randrange(1, 9)
        timestamps = [NOW + 10 * len(model.records) + rng.randrange(-300, 300) for _ in range(count)]
        pairs = [(rng.choice((None, b"k")), rng.randbytes(rng.randrange(0, 60))) for _ in range(count)]
        batch = make_batch(pairs, timestamps, rng.choice(("none", "none", "gzip", "lz4")))
        model.append(bytes(batch), timestamps)
        data += batch
    appended = log.append(memoryview(data))
    assert appended == (first, len(model.records) - 1, -1)


def _check(log: PartitionLog, model: Model, rng: random.Random) -> None:
    assert (log.start_offset, log.end_offset) == (0, len(model.records))
    assert log.size == sum(len(stored) for *_, stored in model.batches)
    for offset in range(len(model.records)):
        expected, first_size = model.bytes_from(offset)
        max_bytes = rng.choice((0, 1, 100, 700, 10_000))
        found = log.read(offset, max_bytes)
        assert found is not None
        data = found.read()
        assert expected.startswith(data)
        assert len(data) == len(found) >= min(first_size, len(expected))
        assert len(data) <= max(max_bytes, first_size)
    assert log.read(len(model.records), 1000) is None
    for wrong in (-1, len(model.records) + 1):
        with pytest.raises(OffsetOutOfRange, match="t-0"):
            log.read(wrong, 100)
    times = [timestamp for timestamp, _ in model.records]
    for timestamp in {0, *times, *(time + 1 for time in times), NOW * 2}:
        assert searched(log, timestamp) == model.first_at(timestamp), timestamp
    assert searched(log, None) == (model.first_at(max(times)) if times else None)


def _check_indexes(folder: Path, interval: int) -> int:
    """Check that indexes are as Kafka's LogSegment.append writes them. Returns the number of .index entries."""
    entries = 0
    for path in sorted(folder.glob("*.log")):
        base = int(path.stem)
        index = time_index = b""
        since, largest, last_time = 0, (-1, base), -1
        for batch in walk(path.read_bytes()):
            if batch.max_timestamp > largest[0]:
                largest = batch.max_timestamp, batch.last_offset
            if since > interval:
                index += struct.pack(">ii", batch.last_offset - base, batch.position)
                if largest[0] > last_time:
                    time_index += struct.pack(">qi", largest[0], largest[1] - base)
                    last_time = largest[0]
                since = 0
            since += batch.size
        if largest[0] > last_time:
            time_index += struct.pack(">qi", largest[0], largest[1] - base)
        assert path.with_suffix(".index").read_bytes() == index, path
        assert path.with_suffix(".timeindex").read_bytes() == time_index, path
        entries += len(index) // 8
    return entries


@pytest.mark.parametrize("seed", range(6))
def test_log_is_what_was_appended(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder, topic_id = tmp_path / "t-0", UUID(int=7)
    log, model = PartitionLog(folder, SMALL, topic_id), Model()
    _check(log, model, rng)
    for round_ in range(4):
        for _ in range(rng.randrange(1, 15)):
            _append_random(rng, log, model)
        _check(log, model, rng)
        clean = round_ % 2 == 0
        if clean:
            log.close()
        log = PartitionLog(folder, SMALL, clean=clean)
        assert log.topic_id == topic_id
        _check(log, model, rng)
    log.close()
    names = sorted(path.name for path in folder.iterdir())
    bases = [int(name[:20]) for name in names if name.endswith(".log")]
    assert len(bases) > 3, "nothing rolled: the test is too small"
    assert set(bases) <= {first for first, *_ in model.batches}
    suffixes = (".log", ".index", ".timeindex")
    expected = {f"{base:020d}{suffix}" for base in bases for suffix in suffixes}
    # snapshots of the producers at each roll and at the end
    expected |= {f"{offset:020d}.snapshot" for offset in (*bases[1:], len(model.records))}
    assert set(names) == expected | {"partition.metadata", "leader-epoch-checkpoint"}
    assert (folder / "leader-epoch-checkpoint").read_text() == "0\n1\n0 0\n"
    encoded = base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")
    assert (folder / "partition.metadata").read_text() == f"version: 0\ntopic_id: {encoded}\n"
    for path in folder.glob("*.log"):
        assert path.stat().st_size <= SMALL.segment_bytes or len(list(walk(path.read_bytes()))) <= 3


@pytest.mark.parametrize("interval", [1, 200, 1000])
def test_indexes_are_those_of_kafka(tmp_path: Path, interval: int) -> None:
    config = LogConfig(segment_bytes=4000, index_interval_bytes=interval)
    rng, model = random.Random(interval), Model()
    log = PartitionLog(tmp_path / "t-0", config)
    for _ in range(60):
        _append_random(rng, log, model)
    log.close()
    assert _check_indexes(tmp_path / "t-0", interval) > 5
    for path in [*(tmp_path / "t-0").glob("*.index"), *(tmp_path / "t-0").glob("*.timeindex")]:
        path.unlink()
    log = PartitionLog(tmp_path / "t-0", config, clean=True)
    _check(log, model, rng)
    log.close()
    assert _check_indexes(tmp_path / "t-0", interval) > 5


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
@pytest.mark.parametrize("clean", [True, False])
def test_missing_index_files_are_built_again(tmp_path: Path, suffix: str, clean: bool) -> None:
    rng, model = random.Random(1), Model()
    log = PartitionLog(tmp_path / "t-0", SMALL)
    for _ in range(20):
        _append_random(rng, log, model)
    log.close()
    for path in (tmp_path / "t-0").glob(f"*{suffix}"):
        path.unlink()
    _check(PartitionLog(tmp_path / "t-0", SMALL, clean=clean), model, rng)


def _with_flipped_bits(files: FaultyFiles, path: Path) -> Iterator[tuple[int, PartitionLog]]:
    """Flip each bit of an index; yields (number of the bit, the log)."""
    data = files.read(path)
    for bit in range(8 * len(data)):
        files.replace(path, data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
        log = PartitionLog(path.parent, LogConfig(index_interval_bytes=100), clean=True, files=files)
        yield bit, log
        log.close()


def test_any_bit_of_a_time_index_that_flips() -> None:
    """Look-ups by time stay right, as an entry is compared with its batch before it is used."""
    files = FaultyFiles()
    log, model = _written(FOLDER, 4, files)
    log.close()
    path = FOLDER / f"{0:020d}.timeindex"
    assert len(files.read(path)) == 2 * 12
    for bit, log in _with_flipped_bits(files, path):
        found = [searched(log, NOW + number) for number in range(5)]
        assert found == [model.first_at(NOW + number) for number in range(5)], bit


def test_any_bit_of_an_offset_index_that_flips() -> None:
    """Records are found, and no range ends before its records, as it limits the listed aborted transactions."""
    files = FaultyFiles()
    log, model = _written(FOLDER, 10, files)
    log.close()
    path = FOLDER / f"{0:020d}.index"
    assert len(files.read(path)) == 4 * 8
    for bit, log in _with_flipped_bits(files, path):
        for offset in range(0, 20, 3):
            for count in (1, 5):
                content, first_size = model.bytes_from(offset)
                found = log.read(offset, count * first_size)
                assert found is not None
                assert content.startswith(found.read()), bit
                last = max(item.last_offset for item in walk(found.read()))
                assert log.offset_after(offset, found) > last, bit


def test_zeros_after_the_index_entries_are_ignored(tmp_path: Path) -> None:
    """Kafka preallocates its index files; after a crash the zeros remain."""
    rng, model = random.Random(2), Model()
    config = LogConfig(segment_bytes=1_000_000, index_interval_bytes=300)
    log = PartitionLog(tmp_path / "t-0", config)
    for _ in range(10):
        _append_random(rng, log, model)
    log.close()
    for suffix, size in ((".index", 8), (".timeindex", 12)):
        with (tmp_path / "t-0" / f"{0:020d}{suffix}").open("ab") as file:
            file.write(bytes(100 * size))
    for _ in range(3):
        log = PartitionLog(tmp_path / "t-0", config, clean=True)
        _check(log, model, rng)
        for _ in range(10):
            _append_random(rng, log, model)
        log.close()
    _check(PartitionLog(tmp_path / "t-0", config, clean=True), model, rng)


def _written(folder: Path, batches: int, files: FileSystem | None = None) -> tuple[PartitionLog, Model]:
    """A log of one segment; every batch has two records."""
    log, model = PartitionLog(folder, LogConfig(index_interval_bytes=100), files=files or FileSystem()), Model()
    for number in range(batches):
        pairs = [(None, b"value %d" % number), (b"key", b"second")]
        timestamps = [NOW + number, NOW + number]
        batch = make_batch(pairs, timestamps)
        log.append(memoryview(batch))
        model.append(bytes(batch), timestamps)
    return log, model


def _damaged(source: Path, target: Path, data: bytes) -> PartitionLog:
    shutil.copytree(source, target)
    (target / f"{0:020d}.log").write_bytes(data)
    return PartitionLog(target, LogConfig(index_interval_bytes=100), clean=False)


def test_a_tail_cut_at_any_byte_loses_only_the_last_batch(tmp_path: Path) -> None:
    log, model = _written(tmp_path / "t-0", 6)
    data = (tmp_path / "t-0" / f"{0:020d}.log").read_bytes()
    last = len(model.batches[-1][2])
    intact = data[:-last]
    del model.batches[-1], model.records[-2:]
    for cut in range(1, last + 1):
        target = tmp_path / str(cut) / "t-0"
        log = _damaged(tmp_path / "t-0", target, data[:-cut])
        assert (target / f"{0:020d}.log").read_bytes() == intact
        assert log.end_offset == 10
        if cut % 20 == 1:
            _check(log, model, random.Random(cut))
            batch = make_batch([(None, b"after")], [NOW + 1000])
            assert log.append(memoryview(batch)) == (10, 10, -1)
        log.close()
        _check_indexes(target, 100)


@pytest.mark.parametrize(
    "rubbish",
    [
        bytes(4096),
        b"\xff" * 300,
        b"\x00" * 7,
        random.Random(3).randbytes(5000),
        b"\x00" * 8 + b"\x7f\xff\xff\xff" + b"\x02" * 100,
    ],
    ids=["zeros", "ones", "seven", "random", "wild length"],
)
def test_rubbish_after_the_last_batch_is_cut(tmp_path: Path, rubbish: bytes) -> None:
    _, model = _written(tmp_path / "t-0", 5)
    data = (tmp_path / "t-0" / f"{0:020d}.log").read_bytes()
    log = _damaged(tmp_path / "t-0", tmp_path / "again" / "t-0", data + rubbish)
    assert (tmp_path / "again" / "t-0" / f"{0:020d}.log").read_bytes() == data
    _check(log, model, random.Random(0))


def test_a_flipped_byte_cuts_from_its_batch_on(tmp_path: Path) -> None:
    _, model = _written(tmp_path / "t-0", 8)
    data = (tmp_path / "t-0" / f"{0:020d}.log").read_bytes()
    start = sum(len(stored) for *_, stored in model.batches[:4])
    size = len(model.batches[4][2])
    del model.batches[4:], model.records[8:]
    for place in range(size):
        if 4 <= place < 8 or 12 <= place < 16:
            continue  # low bytes of the base offset, leader epoch: no CRC covers them
        flipped = bytearray(data)
        flipped[start + place] ^= 0x55
        target = tmp_path / str(place) / "t-0"
        log = _damaged(tmp_path / "t-0", target, bytes(flipped))
        assert (target / f"{0:020d}.log").read_bytes() == data[:start], place
        assert log.end_offset == 8
        if place % 16 == 0:
            _check(log, model, random.Random(place))
        log.close()


def test_what_is_not_whole_batches_is_refused(tmp_path: Path) -> None:
    log, model = _written(tmp_path / "t-0", 3)
    good = make_batch([(None, b"x")], [NOW])
    corrupt = bytearray(good)
    corrupt[-1] ^= 1
    old = bytearray(good)
    old[16] = 1
    with pytest.raises(CorruptBatchError, match="CRC"):
        log.append(memoryview(good + corrupt))
    for wrong in (b"", good[:-1], good + good[:30], bytes(100), old):
        with pytest.raises(DecodeError):
            log.append(memoryview(bytearray(wrong)))
    with pytest.raises(BatchTooLarge, match=r"max\.message\.bytes"):
        log.append(memoryview(make_batch([(None, bytes(1_100_000))], [NOW])))
    _check(log, model, random.Random(0))


def test_a_range_stays_readable_when_its_log_is_deleted(tmp_path: Path) -> None:
    log, model = _written(tmp_path / "t-0", 3)
    found = log.read(0, 1_000_000)
    assert found is not None
    log.files.remove_folder(log.retire("delete"))
    assert list(tmp_path.iterdir()) == []
    assert found.read() == model.bytes_from(0)[0]


_FILL = """
import sys, resource
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog
from tests.support.brokers.batches import make_batch
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
log = PartitionLog(Path(sys.argv[1]), LogConfig(index_interval_bytes=100))
for number in range(100):
    try:
        log.append(memoryview(make_batch([(None, b"v" * 400)], [1700000000000 + number])))
    except OSError as error:
        assert log.end_offset == number, (log.end_offset, number)
        log.append(memoryview(make_batch([(None, b"small")], [1700000001000])))
        log.close()
        sys.exit(number)
"""


def test_a_full_disk_harms_nothing(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes write() fail after writing a part, as a full disk does."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", _FILL, str(tmp_path / "t-0"), str(root)], timeout=60, check=False)
    written = done.returncode
    assert 5 < written < 13
    for clean in (True, False):
        log = PartitionLog(tmp_path / "t-0", LogConfig(index_interval_bytes=100), clean=clean)
        assert log.end_offset == written + 1
        found = log.read(0, 1_000_000)
        assert found is not None
        values = [record.value for record in read_records(found.read())]
        assert values == [b"v" * 400] * written + [b"small"]
    log.close()
    assert _check_indexes(tmp_path / "t-0", 100) > 3


def test_an_index_that_cannot_be_written_harms_nothing(tmp_path: Path) -> None:
    log, model = _written(tmp_path / "t-0", 3)
    log._segments[-1].seal()  # closes the index files
    for suffix in (".index", ".timeindex"):
        path = tmp_path / "t-0" / f"{0:020d}{suffix}"
        path.unlink()
        path.symlink_to("/dev/full")
    for number in range(10):
        timestamps = [NOW + 100 + number]
        batch = make_batch([(None, b"more")], timestamps)
        log.append(memoryview(batch))
        model.append(bytes(batch), timestamps)
    _check(log, model, random.Random(0))
    for suffix in (".index", ".timeindex"):
        (tmp_path / "t-0" / f"{0:020d}{suffix}").unlink()
    _check(PartitionLog(tmp_path / "t-0", LogConfig(), clean=False), model, random.Random(0))


def test_a_checkpoint_that_cannot_be_written_harms_nothing(tmp_path: Path) -> None:
    (tmp_path / "t-0" / "leader-epoch-checkpoint").mkdir(parents=True)
    log = PartitionLog(tmp_path / "t-0", SMALL)
    batch = make_batch([(None, b"v")], [NOW])
    with pytest.raises(OSError, match="leader-epoch-checkpoint"):
        log.append(memoryview(batch))
    assert (log.end_offset, log.size, log.read(0, 100)) == (0, 0, None)
    (tmp_path / "t-0" / "leader-epoch-checkpoint").rmdir()
    model = Model()
    model.append(bytes(batch), [NOW])
    assert log.append(memoryview(batch)) == (0, 0, -1)
    _check(log, model, random.Random(0))


_OPEN = """
import sys
from pathlib import Path
from spark_klog.log.directory import LogDirectory
from spark_klog.log.config import LogConfig
LogDirectory(Path(sys.argv[1]), 0, LogConfig())
"""


def test_one_broker_at_a_time(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path / "data", 0, LogConfig())
    command = [sys.executable, "-c", _OPEN, str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode == 1
    assert f"{LogDirLocked.__name__}: data directory {tmp_path / 'data'} is in use" in done.stderr
    directory.close()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


def test_a_directory_belongs_to_one_broker_of_one_cluster(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path, 3, LogConfig())
    directory.set_cluster_id("first")
    directory.close()
    assert "broker.id=3\n" in (tmp_path / "meta.properties").read_text()
    with pytest.raises(DataDirectoryError, match="belongs to broker 3, not 4"):
        LogDirectory(tmp_path, 4, LogConfig())
    directory = LogDirectory(tmp_path, 3, LogConfig())
    with pytest.raises(DataDirectoryError, match="belongs to cluster first, not second"):
        directory.set_cluster_id("second")
    directory.close()


def test_settings_change_while_a_log_runs(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path, 0, LogConfig(segment_bytes=10_000, retention_ms=-1))
    log = add_log(directory, "t", 0, overrides={"segment_bytes": 5000})
    batch = bytes(make_batch([(None, b"v" * 1000)], [1]))
    for _ in range(4):
        log.append(memoryview(bytearray(batch)))
    assert len(log.segments) == 1
    log.set_overrides({"max_message_bytes": 100, "segment_bytes": 1500})
    assert (log.config.segment_bytes, log.config.max_message_bytes, log.config.retention_ms) == (1500, 100, -1)
    with pytest.raises(BatchTooLarge):
        log.append(memoryview(bytearray(batch)))
    log.set_overrides({"segment_bytes": 1500})  # other settings return to the broker's
    for _ in range(3):
        log.append(memoryview(bytearray(batch)))
    assert len(log.segments) == 4
    directory.close()
    directory = LogDirectory(tmp_path, 0, LogConfig(segment_bytes=10_000))
    log = directory.logs["t", 0]
    assert (log.config.segment_bytes, log.overrides) == (1500, {"segment_bytes": 1500})
    log.set_overrides({})
    assert (log.config, log.end_offset) == (LogConfig(segment_bytes=10_000), 7)
    directory.close()


def test_logs_come_and_go(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path, 0, LogConfig())
    kept = add_log(directory, "kept", 1, overrides={"segment_bytes": 5000})
    add_log(directory, "gone-2", 0)
    assert directory.get("kept", 1) is kept
    for name in ("", ".", "..", "a/b", "a b", "ä", "x" * 250):
        with pytest.raises(ConfigError):
            check_topic_name(name)
    rename = directory.take("gone-2", 0)
    assert rename is not None
    assert rename().name.endswith("-delete")
    assert not (tmp_path / "gone-2-0").exists()
    assert directory.take("never-there", 0) is None
    assert not (tmp_path / ".kafka_cleanshutdown").exists()
    directory.close()
    assert (tmp_path / ".kafka_cleanshutdown").exists()
    half_deleted = tmp_path / f"half-0.{'0123' * 8}-delete"
    half_deleted.mkdir()
    (tmp_path / "not-ours-to-delete").mkdir()
    (tmp_path / "lost+found").mkdir()
    directory = LogDirectory(tmp_path, 0, LogConfig())
    assert not (tmp_path / ".kafka_cleanshutdown").exists()
    assert set(directory.logs) == {("kept", 1)}
    assert directory.logs["kept", 1].config == LogConfig(segment_bytes=5000)
    assert not half_deleted.exists()
    assert (tmp_path / "not-ours-to-delete").exists()
    directory.close()


def _golden(topic: str, name: str) -> list[tuple[int, int, bytes | None, bytes | None]]:
    def data(text: str | None) -> bytes | None:
        return None if text is None else base64.b64decode(text)

    lines = [json.loads(line) for line in (GOLDEN / f"{topic}{name}.jsonl").read_text().splitlines()]
    return [(line["offset"], line["timestamp"], data(line["key"]), data(line["value"])) for line in lines]


def _all_records(log: PartitionLog) -> list[Record]:
    records: list[Record] = []
    offset = log.start_offset
    while (found := log.read(offset, 1)) is not None:
        data = found.read()
        records += read_records(data)
        offset = max(batch.last_offset for batch in walk(data)) + 1
    return records


@pytest.mark.parametrize("clean", [True, False])
def test_logs_that_kafka_wrote(tmp_path: Path, clean: bool) -> None:
    for path in (GOLDEN / "logs").rglob("*"):
        if path.is_file():
            target = tmp_path / path.relative_to(GOLDEN / "logs")
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
    if clean:
        (tmp_path / ".kafka_cleanshutdown").touch()
    before = {path.name + path.parent.name: path.read_bytes() for path in tmp_path.rglob("*.log")}
    directory = LogDirectory(tmp_path, 1, LogConfig())
    assert {topic for topic, _ in directory.logs} == {path.name[:-2] for path in (GOLDEN / "logs").iterdir()}
    for (topic, _), log in directory.logs.items():
        expected = _golden(topic, ".read_uncommitted" if topic == "v2-transactions" else "")
        assert [record[:2] + record[3:5] for record in _all_records(log)] == expected
        if topic != "v2-transactions":
            for timestamp in {timestamp for _, timestamp, *_ in expected}:
                first = next(line for line in expected if line[1] >= timestamp)
                assert searched(log, timestamp) == (first[1], first[0])
        end = log.end_offset
        assert log.append(memoryview(make_batch([(b"k", b"ours")], [NOW]))) == (end, end, -1)
    directory.close()
    for path in tmp_path.rglob("*.log"):
        assert path.read_bytes().startswith(before[path.name + path.parent.name])
