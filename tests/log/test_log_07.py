"""Partition folders of Kafka 0.7, made by hand: reads from any offset, and errors for damage."""

from __future__ import annotations

import gzip
import pickle
import random
from pathlib import Path

import pytest

from spark_klog.errors import ConfigError, CorruptBatchError, DecodeError, LogCorrupted, OffsetOutOfRange
from spark_klog.log import log_07
from spark_klog.log.log_07 import Log07, NoMessageAtOffset
from tests.support.log_07 import GZIP, SNAPPY, compressed, message, write_log

SETS = [
    [message(b"a", magic=0), message(b""), compressed([b"b", b"", b"c" * 1000], GZIP)],
    [message(b"d" * 100), compressed([b"e"], SNAPPY), compressed([], GZIP)],
    [message(b"last")],
]
PAYLOADS = [[b"a"], [b""], [b"b", b"", b"c" * 1000], [b"d" * 100], [b"e"], [], [b"last"]]


def _read(log: Log07, offset: int) -> list[tuple[int, list[bytes | None]]]:
    return [(found.offset, [record.value for record in log.records(found)]) for found in log.messages(offset)]


@pytest.mark.parametrize("start", [0, 7, 5_000_000_000])
def test_read_from_every_offset(tmp_path: Path, start: int) -> None:
    """With `start` above 0 the oldest files were deleted."""
    offsets = write_log(tmp_path / "my.topic-x-3", SETS, start)
    log = Log07(tmp_path / "my.topic-x-3")
    assert (log.topic, log.partition, log.start_offset, log.end_offset) == ("my.topic-x", 3, start, offsets[-1])
    assert log.tail is None
    expected = list(zip(offsets, PAYLOADS, strict=False))
    for number, offset in enumerate(offsets):
        assert _read(Log07(log.directory), offset) == _read(log, offset) == expected[number:]


def test_a_position_within_a_message_names_its_neighbours(tmp_path: Path) -> None:
    offsets = write_log(tmp_path / "t-0", SETS, 50)
    log = Log07(tmp_path / "t-0")
    bases = [int(path.stem) for path in sorted((tmp_path / "t-0").iterdir())]
    for wanted in range(50, offsets[-1]):
        if wanted in offsets:
            continue
        before, after = max(o for o in offsets if o < wanted), min(o for o in offsets if o > wanted)
        file = str(tmp_path / "t-0" / f"{max(base for base in bases if base < wanted):020}.kafka")
        with pytest.raises(NoMessageAtOffset) as caught:
            log.messages(wanted)
        error = pickle.loads(pickle.dumps(caught.value))  # as out of a Spark task  # noqa: S301
        assert (error.topic, error.partition, error.file, error.before, error.after) == ("t", 0, file, before, after)
        for part in ("t-0", file, str(wanted), str(before), str(after)):
            assert part in str(error)
    assert issubclass(NoMessageAtOffset, ConfigError)


@pytest.mark.parametrize("mark_bytes", [1, 100, 1 << 20])
def test_positions_are_found_in_large_files(tmp_path: Path, mark_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distance of the remembered positions changes neither messages nor errors."""
    monkeypatch.setattr(log_07, "_MARK_BYTES", mark_bytes)
    rng = random.Random(7)
    files = [[message(bytes(rng.randrange(40))) for _ in range(100)] for _ in range(3)]
    offsets = write_log(tmp_path / "t-0", files)
    log = Log07(tmp_path / "t-0")
    for _ in range(300):
        wanted = rng.choice(offsets) if rng.random() < 0.5 else rng.randrange(offsets[-1])
        if wanted in offsets:
            assert [found.offset for found in log.messages(wanted)] == [o for o in offsets[:-1] if o >= wanted]
        else:
            with pytest.raises(NoMessageAtOffset) as caught:
                log.messages(wanted)
            assert caught.value.before == max(o for o in offsets if o < wanted)
            assert caught.value.after == min(o for o in offsets if o > wanted)


def test_offsets_out_of_range(tmp_path: Path) -> None:
    end = write_log(tmp_path / "t-4", SETS, 30)[-1]
    log = Log07(tmp_path / "t-4")
    for wanted in (-1, 0, 29, end + 1, 1 << 62):
        with pytest.raises(OffsetOutOfRange) as caught:
            log.messages(wanted)
        assert (caught.value.topic, caught.value.partition, caught.value.available) == ("t", 4, (30, end))


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_file_that_is_being_written_to(tmp_path: Path, cut: int) -> None:
    """The file may end anywhere within its last message; a log opened later has the completed message."""
    offsets = write_log(tmp_path / "t-0", SETS)
    path = max((tmp_path / "t-0").iterdir())
    whole = path.read_bytes() + message(b"next")
    path.write_bytes(whole[:-cut])
    log = Log07(tmp_path / "t-0")
    assert log.end_offset == offsets[-1]
    assert log.tail is not None
    assert (log.tail.path, log.tail.position, log.tail.size) == (path, 14, 14 - cut)
    assert _read(log, offsets[-2]) == [(offsets[-2], [b"last"])]
    with pytest.raises(OffsetOutOfRange):
        log.messages(offsets[-1] + 1)
    path.write_bytes(whole)
    assert _read(log, offsets[-1]) == []
    assert _read(Log07(tmp_path / "t-0"), offsets[-1]) == [(offsets[-1], [b"next"])]


def test_the_newest_file_may_be_empty_or_the_only_one(tmp_path: Path) -> None:
    offsets = write_log(tmp_path / "t-0", [*SETS, []], 9)
    assert len(list((tmp_path / "t-0").iterdir())) == 4
    assert Log07(tmp_path / "t-0").end_offset == offsets[-1]
    assert len(_read(Log07(tmp_path / "t-0"), 9)) == 7
    (tmp_path / "t-1").mkdir()
    (tmp_path / "t-1" / "00000001234.kafka").touch()  # as the design chapter names files
    log = Log07(tmp_path / "t-1")
    assert (log.start_offset, log.end_offset, _read(log, 1234)) == (1234, 1234, [])


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
        Log07(tmp_path / "t-0")
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
    log = Log07(tmp_path / "t-0")
    found = []
    with pytest.raises(CorruptBatchError) as caught:
        found += (one.offset for one in log.messages(1000))
    assert found == offsets[:number]
    assert str(caught.value).startswith(f"{path} at position {offsets[number] - int(path.stem)}: ")
    assert [one.offset for one in log.messages(offsets[number + 1])] == offsets[number + 1 : -1]


def test_damage_inside_a_set_names_file_and_position(tmp_path: Path) -> None:
    inner = bytearray(message(b"good") + message(b"bad"))
    inner[-1] ^= 1
    offsets = write_log(tmp_path / "t-0", [[message(b"x"), message(gzip.compress(bytes(inner)), attributes=GZIP)]])
    log = Log07(tmp_path / "t-0")
    (found,) = log.messages(offsets[1])
    with pytest.raises(CorruptBatchError, match=rf"0\.kafka at position {offsets[1]}: "):
        list(log.records(found))


@pytest.mark.parametrize("place", [0, 1])
def test_what_is_no_message_names_file_and_position(tmp_path: Path, place: int) -> None:
    """An unknown magic; in the last file, the search for the log's end finds it."""
    offsets = write_log(tmp_path / "t-0", [[message(b"one"), message(b"two")], [message(b"three"), message(b"four")]])
    path = sorted((tmp_path / "t-0").iterdir())[place]
    data = bytearray(path.read_bytes())
    position = offsets[2 * place + 1] - int(path.stem)
    data[position + 4] = 9
    path.write_bytes(data)
    log = Log07(tmp_path / "t-0")
    with pytest.raises(DecodeError, match="unknown magic 9") as caught:
        list(log.messages(0))
    assert str(caught.value).startswith(f"{path} at position {position}: ")


def test_a_length_that_leads_beyond_a_file_that_is_not_the_last(tmp_path: Path) -> None:
    write_log(tmp_path / "t-0", [[message(b"one"), message(b"two")], [message(b"three")]])
    path = min((tmp_path / "t-0").iterdir())
    data = bytearray(path.read_bytes())
    data[13 + 2] = 1
    path.write_bytes(data)
    with pytest.raises(DecodeError, match="incomplete message") as caught:
        list(Log07(tmp_path / "t-0").messages(0))
    assert str(caught.value).startswith(f"{path} at position 13: ")


def test_folders_that_hold_no_log_of_kafka_07(tmp_path: Path) -> None:
    (tmp_path / "t-0").mkdir()
    (tmp_path / "t-0" / f"{0:020}.log").touch()
    with pytest.raises(ConfigError, match=r"no \.kafka file"):
        Log07(tmp_path / "t-0")
    with pytest.raises(ConfigError, match="TOPIC-PARTITION"):
        Log07(tmp_path)
    (tmp_path / "t-0" / "x.kafka").touch()
    with pytest.raises(DecodeError, match=r"x\.kafka"):
        Log07(tmp_path / "t-0")
