"""Partition folders of Kafka 0.7, made by hand: reads from any offset, and errors for damage."""

from __future__ import annotations

import gzip
import pickle
import random
from pathlib import Path

import pytest

from spark_klog.errors import ConfigError, CorruptBatchError, DecodeError, LogCorrupted, OffsetOutOfRange
from spark_klog.files.folder import LocalFolder
from spark_klog.log.stored import partition_07
from spark_klog.log.stored.partition_07 import NoMessageAtOffset, StoredPartition07
from spark_klog.log.tools.upgrade import _old_log
from tests.support.brokers.batches import read_records
from tests.support.brokers.log_07 import GZIP, SNAPPY, compressed, message, write_log

SETS = [
    [message(b"a", magic=0), message(b""), compressed([b"b", b"", b"c" * 1000], GZIP)],
    [message(b"d" * 100), compressed([b"e"], SNAPPY), compressed([], GZIP)],
    [message(b"last")],
]
PAYLOADS = [[b"a"], [b""], [b"b", b"", b"c" * 1000], [b"d" * 100], [b"e"], [], [b"last"]]


def _log(folder: Path, partition: int = 0) -> StoredPartition07:
    return StoredPartition07(LocalFolder(folder.parent), folder.name, "t", partition)


def _read(log: StoredPartition07, offset: int) -> list[tuple[int, bytes | None]]:
    found = [read_records(batches.data) for batches in log.read(offset, log.end_offset)]
    return [(record.offset, record.value) for records in found for record in records]


def _all(log: StoredPartition07) -> list[tuple[int, list[bytes | None]]]:
    return [(message.offset, [record.value for record in records]) for message, records in log.messages()]


@pytest.mark.parametrize("start", [0, 7, 5_000_000_000])
def test_read_from_every_offset(tmp_path: Path, start: int) -> None:
    """With `start` above 0 the oldest files were deleted."""
    offsets = write_log(tmp_path / "my.topic-x-3", SETS, start)
    topic, log = _old_log(tmp_path / "my.topic-x-3")
    assert (topic, log.start_offset, log.end_offset, log.tail) == ("my.topic-x", start, offsets[-1], (14, 0))
    expected = list(zip(offsets, PAYLOADS, strict=False))
    assert _all(log) == expected
    for number, offset in enumerate(offsets):
        assert _read(log, offset) == [(at, value) for at, values in expected[number:] for value in values]


@pytest.mark.parametrize("block_bytes", [16, 100, 1 << 20])
def test_a_position_within_a_message_names_its_neighbours(
    tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_07, "_BLOCK_BYTES", block_bytes)
    rng = random.Random(7)
    files = [*SETS, [message(bytes(rng.randrange(40))) for _ in range(30)]]
    offsets = write_log(tmp_path / "t-0", files, 50)
    log = _log(tmp_path / "t-0")
    bases = [int(path.stem) for path in sorted((tmp_path / "t-0").iterdir())]
    for wanted in range(50, offsets[-1]):
        if wanted in offsets:
            log.check_offset(wanted)
            continue
        before, after = max(o for o in offsets if o < wanted), min(o for o in offsets if o > wanted)
        file = f"t-0/{max(base for base in bases if base < wanted):020}.kafka"
        with pytest.raises(NoMessageAtOffset) as caught:
            log.check_offset(wanted)
        error = pickle.loads(pickle.dumps(caught.value))  # as out of a Spark task  # noqa: S301
        assert (error.topic, error.partition, error.file, error.before, error.after) == ("t", 0, file, before, after)
        for part in ("t-0", file, str(wanted), str(before), str(after)):
            assert part in str(error)
    assert issubclass(NoMessageAtOffset, ConfigError)


def test_offsets_out_of_range(tmp_path: Path) -> None:
    end = write_log(tmp_path / "t-4", SETS, 30)[-1]
    for start, until in ((-1, end), (0, end), (29, 40), (end, end + 1), (1 << 62, (1 << 62) + 1)):
        with pytest.raises(OffsetOutOfRange) as caught:
            list(_log(tmp_path / "t-4", 4).read(start, until))
        assert (caught.value.topic, caught.value.partition, caught.value.available) == ("t", 4, (30, end))


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_file_that_is_being_written_to(tmp_path: Path, cut: int) -> None:
    """The file may end anywhere within its last message; a log opened later has the completed message."""
    offsets = write_log(tmp_path / "t-0", SETS)
    path = max((tmp_path / "t-0").iterdir())
    whole = path.read_bytes() + message(b"next")
    path.write_bytes(whole[:-cut])
    _, log = _old_log(tmp_path / "t-0")
    assert log.end_offset == offsets[-1]
    assert log.tail == (14, 14 - cut)
    assert _read(log, offsets[-2]) == [(offsets[-2], b"last")]
    path.write_bytes(whole)
    assert [at for at, _ in _all(log)] == offsets[:-1]
    assert _read(_log(tmp_path / "t-0"), offsets[-1]) == [(offsets[-1], b"next")]


def test_the_newest_file_may_be_empty_or_the_only_one(tmp_path: Path) -> None:
    offsets = write_log(tmp_path / "t-0", [*SETS, []], 9)
    assert len(list((tmp_path / "t-0").iterdir())) == 4
    log = _log(tmp_path / "t-0")
    assert (log.end_offset, len(_all(log))) == (offsets[-1], 7)
    (tmp_path / "t-1").mkdir()
    (tmp_path / "t-1" / "00000001234.kafka").touch()  # as the design chapter names files
    log = _log(tmp_path / "t-1")
    assert (log.start_offset, log.end_offset, _all(log)) == (1234, 1234, [])


@pytest.mark.parametrize("change", ["removed", "shorter", "longer"])
def test_a_hole_names_both_files(tmp_path: Path, change: str) -> None:
    write_log(tmp_path / "t-0", SETS)
    first, second, third = sorted((tmp_path / "t-0").iterdir())
    if change == "removed":
        second.unlink()
        before, after = first, third
    else:
        data = second.read_bytes()
        second.write_bytes(data[:-1] if change == "shorter" else data + message(b""))
        before, after = second, third
    with pytest.raises(LogCorrupted) as caught:
        _old_log(tmp_path / "t-0")
    assert str(before) in str(caught.value)
    assert after.name in str(caught.value)
    assert ("overlap" if change == "longer" else "missing") in str(caught.value)


@pytest.mark.parametrize("number", [0, 3])
def test_a_wrong_checksum_names_file_and_position(tmp_path: Path, number: int) -> None:
    offsets = write_log(tmp_path / "t-0", SETS, 1000)
    path = sorted((tmp_path / "t-0").iterdir())[number // 3]
    end = offsets[number + 1] - int(path.stem)
    data = bytearray(path.read_bytes())
    data[end - 1] ^= 1
    path.write_bytes(data)
    _, log = _old_log(tmp_path / "t-0")
    found = []
    with pytest.raises(CorruptBatchError) as caught:
        found += (one.offset for one, _ in log.messages())
    assert found == offsets[:number]
    assert str(caught.value).startswith(f"{path} at position {offsets[number] - int(path.stem)}: ")


def test_damage_inside_a_set_names_file_and_position(tmp_path: Path) -> None:
    inner = bytearray(message(b"good") + message(b"bad"))
    inner[-1] ^= 1
    offsets = write_log(tmp_path / "t-0", [[message(b"x"), message(gzip.compress(bytes(inner)), attributes=GZIP)]])
    with pytest.raises(CorruptBatchError, match=rf"0\.kafka at position {offsets[1]}: "):
        list(_log(tmp_path / "t-0").messages())


@pytest.mark.parametrize("place", [0, 1])
def test_what_is_no_message_names_file_and_position(tmp_path: Path, place: int) -> None:
    """An unknown magic; in the last file, the search for the log's end finds it."""
    offsets = write_log(tmp_path / "t-0", [[message(b"one"), message(b"two")], [message(b"three"), message(b"four")]])
    path = sorted((tmp_path / "t-0").iterdir())[place]
    data = bytearray(path.read_bytes())
    position = offsets[2 * place + 1] - int(path.stem)
    data[position + 4] = 9
    path.write_bytes(data)
    with pytest.raises(DecodeError, match="unknown magic 9") as caught:
        list(_old_log(tmp_path / "t-0")[1].messages())
    assert str(caught.value).startswith(f"{path} at position {position}: ")


def test_a_length_that_leads_beyond_a_file_that_is_not_the_last(tmp_path: Path) -> None:
    write_log(tmp_path / "t-0", [[message(b"one"), message(b"two")], [message(b"three")]])
    path = min((tmp_path / "t-0").iterdir())
    data = bytearray(path.read_bytes())
    data[13 + 2] = 1
    path.write_bytes(data)
    with pytest.raises(DecodeError, match="the last complete message ends at offset 13, the next file") as caught:
        list(_old_log(tmp_path / "t-0")[1].messages())
    assert str(caught.value).startswith(f"{path}: ")


def test_folders_that_hold_no_log_of_kafka_07(tmp_path: Path) -> None:
    (tmp_path / "t-0").mkdir()
    (tmp_path / "t-0" / f"{0:020}.log").touch()
    with pytest.raises(ConfigError, match=r"no \.kafka file"):
        _old_log(tmp_path / "t-0")
    with pytest.raises(ConfigError, match="TOPIC-PARTITION"):
        _old_log(tmp_path)
    (tmp_path / "t-0" / "x.kafka").touch()
    with pytest.raises(DecodeError, match=r"x\.kafka"):
        _old_log(tmp_path / "t-0")
