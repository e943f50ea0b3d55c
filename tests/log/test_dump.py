"""The command `klog log dump`: Kafka's own logs against what clients read from them, and damaged files."""

from __future__ import annotations

import base64
import gzip
import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka.record.memory_records import MemoryRecords
from kafka.record.util import calc_crc32c

from spark_klog.log.tools.dump import Damage, Dumped, dump
from tests.support.brokers.log_07 import message as message_07
from tests.support.clients.klog import klog

DATA = Path(__file__).parent.parent / "data"
NEW = DATA / "kafka-3.9.1"
#: By .jsonl file: the segments from which a client read its records.
GOLDEN: dict[Path, list[Path]] = {
    lines: sorted((lines.parent / "logs" / f"{lines.stem.split('.')[0]}-0").glob("*.log"))
    for lines in sorted(DATA.glob("kafka-*/*.jsonl"))
    if ".read_committed" not in lines.name
}
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
COMMAND = (sys.executable, "-m", "spark_klog.cli", "log", "dump")
GZIP = 1


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return klog("log", "dump", *map(str, arguments))


def _good(*arguments: str | Path) -> list[str]:
    """Run a dump that must succeed without errors; return its lines."""
    done = _run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def _raw_batches(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (position, batch), found by the size fields alone."""
    position = 0
    while position < len(data):
        size = 12 + struct.unpack_from(">i", data, position + 8)[0]
        yield position, data[position : position + size]
        position += size


def _segment(codec: str, version: str = "kafka-3.9.1", magic: int = 2) -> bytes:
    return (DATA / version / "logs" / f"v{magic}-{codec}-0" / f"{0:020}.log").read_bytes()


def _lines(codec: str, version: str = "kafka-3.9.1", magic: int = 2) -> list[str]:
    return _golden(DATA / version / f"v{magic}-{codec}.jsonl")


def _golden(path: Path) -> list[str]:
    """The records that a client read, with Kafka's timestamp types: librdkafka's numbers are one higher."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [json.dumps(row | {"timestampType": row["timestampType"] - 1}) for row in rows]


# ----- intact files


def test_there_are_golden_files() -> None:
    assert len(GOLDEN) == 14
    assert sum(len(segments) for segments in GOLDEN.values()) == 15


@pytest.mark.parametrize("lines", GOLDEN, ids=[f"{path.parent.name}-{path.stem}" for path in GOLDEN])
def test_a_dump_is_what_a_client_read(lines: Path) -> None:
    assert _good(*GOLDEN[lines]) == _golden(lines)


def test_several_files_one_after_the_other() -> None:
    files = [path for segments in GOLDEN.values() for path in segments]
    assert _good(*files) == [line for lines in GOLDEN for line in _golden(lines)]


def test_an_empty_file_has_nothing(tmp_path: Path) -> None:
    for name in (f"{0:020}.log", f"{0:011}.kafka"):
        (tmp_path / name).touch()
        assert _good(tmp_path / name) == []
    assert _good(tmp_path / f"{0:020}.log", NEW / "logs" / "v2-lz4-0" / f"{0:020}.log") == _lines("lz4")


def test_files_that_are_not_there() -> None:
    for arguments in (["/no/such/file.log"], []):
        done = _run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
    done = _run(DATA)  # a folder, but not of a partition
    assert (done.returncode, done.stdout) == (1, "")
    assert str(DATA) in done.stderr


def test_a_reader_that_goes_away_is_no_failure_to_shout_about() -> None:
    """`klog log dump FILE | head -1` prints no errors."""
    files = [str(path) for segments in GOLDEN.values() for path in segments]
    with subprocess.Popen([*COMMAND, *files * 3], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


def _on_a_terminal(*arguments: str | Path, stdout_too: bool) -> tuple[bytes, bytes]:
    """Run a dump with a terminal as stderr; return what it writes to stdout and to the terminal."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    stdout = theirs if stdout_too else subprocess.PIPE
    shown = b""
    with subprocess.Popen([*COMMAND, *map(str, arguments)], stdout=stdout, stderr=theirs, env=environment) as process:
        os.close(theirs)
        output = b"" if process.stdout is None else process.stdout.read()
        try:
            while part := os.read(ours, 100_000):
                shown += part
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    assert process.returncode == 0
    return output, shown


def test_progress_is_shown_on_a_terminal() -> None:
    """Progress is not shown if the records go to the terminal, too, nor with --json."""
    path = NEW / "logs" / "v2-gzip-0" / f"{0:020}.log"
    output, shown = _on_a_terminal(path, stdout_too=False)
    assert output.decode().splitlines() == _lines("gzip")
    assert path.name.encode() in shown
    output, shown = _on_a_terminal("--json", path, stdout_too=False)
    assert output.decode().splitlines() == _lines("gzip")
    assert shown == b""
    _, shown = _on_a_terminal(path, stdout_too=True)
    assert shown.decode().splitlines() == _lines("gzip")


# ----- batches


def _fields(position: int, batch: bytes) -> dict[str, Any]:
    """The fields that `--batches` must print, read by struct and kafka-python."""
    magic = batch[16]
    known = {"position": position, "size": len(batch), "magic": magic}
    (theirs,) = MemoryRecords(batch)
    records = list(theirs)
    if magic < 2:
        last, _, crc = struct.unpack_from(">qiI", batch)
        times = [-1 if record.timestamp is None else record.timestamp for record in records]
        return known | {
            "baseOffset": records[0].offset,
            "lastOffset": last,
            "count": len(records),
            "codec": CODECS[batch[17] & 7],
            "timestampType": 0 if magic else -1,
            "maxTimestamp": max(times),
            "crc": crc,
        }
    first, _, epoch, _, crc, attributes, delta, base_time, max_time, producer, producer_epoch, sequence, count = (
        struct.unpack_from(">qiibIhiqqqhii", batch)
    )
    return known | {
        "baseOffset": first,
        "lastOffset": first + delta,
        "count": count,
        "codec": CODECS[attributes & 7],
        "timestampType": 1 if attributes & 8 else 0,
        "baseTimestamp": base_time,
        "maxTimestamp": max_time,
        "producerId": producer,
        "producerEpoch": producer_epoch,
        "baseSequence": sequence,
        "partitionLeaderEpoch": epoch,
        "isTransactional": bool(attributes & 16),
        "isControl": bool(attributes & 32),
        "deleteHorizon": base_time if attributes & 64 else None,
        "crc": crc,
    }


def test_batches_have_their_fields() -> None:
    files = [path for segments in GOLDEN.values() for path in segments]
    expected = [_fields(*found) for path in files for found in _raw_batches(path.read_bytes())]
    assert [json.loads(line) for line in _good("--batches", *files)] == expected
    assert {fields["magic"] for fields in expected} == {0, 1, 2}
    assert {fields["codec"] for fields in expected} == set(CODECS)
    assert any(fields.get("isControl") for fields in expected)


def test_batches_with_log_append_time_and_a_delete_horizon(tmp_path: Path) -> None:
    data = bytearray(_segment("none"))
    (_, first), (start, second) = list(_raw_batches(bytes(data)))[:2]
    for position, batch, bits in ((0, first, 8), (start, second, 64)):
        data[position + 22] |= bits
        struct.pack_into(">I", data, position + 17, calc_crc32c(bytes(data[position + 21 : position + len(batch)])))
    path = tmp_path / "0.log"
    path.write_bytes(data)
    expected = [_fields(*found) for found in _raw_batches(bytes(data))]
    assert [json.loads(line) for line in _good(path, "--batches")] == expected
    assert (expected[0]["timestampType"], expected[1]["deleteHorizon"]) == (1, expected[1]["baseTimestamp"])
    assert {json.loads(line)["timestampType"] for line in _good(path)} == {0, 1}


# ----- Kafka 0.7


def _line_07(offset: int, payload: bytes) -> dict[str, Any]:
    value = base64.b64encode(payload).decode()
    return {"offset": offset, "timestamp": None, "timestampType": -1, "key": None, "value": value, "headers": []}


def test_a_file_of_kafka_07_is_named_by_its_first_offset(tmp_path: Path) -> None:
    wrapper = message_07(gzip.compress(message_07(b"a") + message_07(b"b")), attributes=GZIP)
    path = tmp_path / "00000001000.kafka"
    path.write_bytes(message_07(b"first") + wrapper + message_07(gzip.compress(b""), attributes=GZIP) + message_07(b""))
    empty = 1015 + len(wrapper)
    last = path.stat().st_size + 1000 - 10
    expected = [_line_07(1000, b"first"), _line_07(1015, b"a"), _line_07(1015, b"b"), _line_07(last, b"")]
    assert [json.loads(line) for line in _good(path)] == expected
    batches = [json.loads(line) for line in _good("--batches", path)]
    assert [(b["position"], b["baseOffset"], b["lastOffset"], b["count"], b["codec"], b["magic"]) for b in batches] == [
        (0, 1000, 1000, 1, "none", 1),
        (15, 1015, 1015, 2, "gzip", 1),
        (empty - 1000, empty, empty, 0, "gzip", 1),
        (last - 1000, last, last, 1, "none", 1),
    ]
    assert [b["crc"] for b in batches][::3] == [zlib.crc32(b"first"), 0]
    assert {b["timestampType"] for b in batches} == {-1}


def test_damage_in_a_file_of_kafka_07(tmp_path: Path) -> None:
    good, bad = message_07(b"good"), message_07(b"bad")[:-1] + b"D"
    inside = message_07(gzip.compress(bad), attributes=GZIP)
    path = tmp_path / "00000000050.kafka"
    path.write_bytes(good + bad + good + inside + good + b"\x00\x00\x00\x09\x02 no message")
    end = 3 * len(good) + len(bad) + len(inside)
    done = _run(path)
    assert done.returncode == 1
    offsets = [50, 50 + len(good) + len(bad), 50 + end - len(good)]
    assert [json.loads(line) for line in done.stdout.splitlines()] == [_line_07(offset, b"good") for offset in offsets]
    first, second, third = done.stderr.splitlines()
    assert first.startswith(f"{path}: position 14, 13 bytes: message of offset 64: CRC 0x")
    assert second.startswith(f"{path}: position {2 * 14 + 13}, {len(inside)} bytes: ")
    assert third == f"{path}: position {end}, 16 bytes: no message at offset {50 + end}: unknown magic 2, length 9"
    path.write_bytes(good + good[:-1])
    assert _run(path).stderr == f"{path}: position 14, 13 bytes: cut off: 13 bytes are left\n"


def test_a_file_of_kafka_07_whose_name_is_no_offset(tmp_path: Path) -> None:
    path = tmp_path / "messages.kafka"
    path.write_bytes(message_07(b"good"))
    done = _run(path, NEW / "logs" / "v2-none-0" / f"{0:020}.log")
    assert done.returncode == 1
    assert done.stderr.startswith(f"{path}: position 0, 14 bytes: ")
    assert "named by the offset" in done.stderr
    assert done.stdout.splitlines() == _lines("none")


# ----- damage


_OLD, _NEW = "kafka-0.10.2.2", "kafka-3.9.1"


@pytest.mark.parametrize(
    ("version", "magic", "codec"), [(_OLD, 0, "gzip"), (_OLD, 1, "none"), ("kafka-3.9.1", 2, "lz4")]
)
@pytest.mark.parametrize("option", [[], ["--batches"]])
def test_a_damaged_batch_is_named_and_the_others_are_printed(
    tmp_path: Path, version: str, magic: int, codec: str, option: list[str]
) -> None:
    data = bytearray(_segment(codec, version, magic))
    batches = list(_raw_batches(bytes(data)))
    position, batch = batches[2]
    data[position + len(batch) // 2] ^= 4
    path = tmp_path / "damaged.log"
    path.write_bytes(data)
    done = _run(path, *option)
    assert done.returncode == 1
    (told,) = done.stderr.splitlines()
    assert told.startswith(f"{path}: position {position}, {len(batch)} bytes: ")
    assert "CRC 0x" in told
    lost = _fields(*batches[2])
    if option:
        expected = [_fields(*found) for found in batches if found[0] != position]
    else:
        lines = [json.loads(line) for line in _lines(codec, version, magic)]
        expected = [line for line in lines if not lost["baseOffset"] <= line["offset"] <= lost["lastOffset"]]
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected


def test_damage_in_one_file_does_not_hide_the_next(tmp_path: Path) -> None:
    whole = NEW / "logs" / "v2-gzip-0" / f"{0:020}.log"
    rubbish = tmp_path / "rubbish.log"
    rubbish.write_bytes(b"\xff" * 1000)
    done = _run(rubbish, whole, rubbish)
    assert done.returncode == 1
    assert done.stdout.splitlines() == _lines("gzip")
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [str(rubbish)] * 2


@pytest.mark.parametrize("tail", [b"\x00", bytes(100), b"\xff" * 100, b"cut", b"batch"])
def test_a_tail_that_is_no_whole_batch(tmp_path: Path, tail: bytes) -> None:
    """The tail is garbage, zeros as after lost writes, or a batch that is cut off."""
    data = _segment("snappy")
    if tail in (b"cut", b"batch"):
        tail = data[: 8 if tail == b"cut" else 200]
    path = tmp_path / "tail.log"
    path.write_bytes(data + tail)
    done = _run(path)
    assert done.returncode == 1
    assert done.stdout.splitlines() == _lines("snappy")
    assert done.stderr.startswith(f"{path}: position {len(data)}, {len(tail)} bytes: ")
    assert len(done.stderr.splitlines()) == 1


def test_records_that_are_none_though_the_checksum_is_right(tmp_path: Path) -> None:
    inner = gzip.compress(b"these are no messages, whatever the wrapper says")
    content = struct.pack(">bbqii", 1, GZIP, 0, -1, len(inner)) + inner
    bad = struct.pack(">qiI", 3, 4 + len(content), zlib.crc32(content)) + content
    good = next(_raw_batches(_segment("none")))[1]
    path = tmp_path / "wrapper.log"
    path.write_bytes(bad + good)
    for option in ([], ["--batches"]):
        done = _run(path, *option)
        assert done.returncode == 1
        assert done.stderr.startswith(f"{path}: position 0, {len(bad)} bytes: ")
        assert len(done.stdout.splitlines()) == (1 if option else _fields(0, good)["count"])


_MAGIC_2 = {"offset": 0, "length": 8, "leader epoch": 12, "magic": 16, "crc": 17, "attributes": 21, "delta": 23}
_MAGIC_2 |= {"base timestamp": 27, "max timestamp": 35, "producer id": 43, "epoch": 51, "sequence": 53, "count": 57}
_MAGIC_2 |= {"records": 61}
_MAGIC_1 = {"offset": 0, "length": 8, "crc": 12, "magic": 16, "attributes": 17, "timestamp": 18, "key": 26}
#: The checksum does not cover these fields, so their damage is not detected.
_UNSEEN = ("offset", "leader epoch")


@pytest.mark.parametrize(("version", "magic", "fields"), [(_OLD, 1, _MAGIC_1), (_NEW, 2, _MAGIC_2)])
@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_a_flipped_bit_in_every_field(
    tmp_path: Path, version: str, magic: int, fields: dict[str, int], codec: str
) -> None:
    data = _segment(codec, version, magic)
    one, two, three = [batch for _, batch in _raw_batches(data)][1:4]
    for name, start in fields.items():
        end = min([start + 20, len(two), *(field for field in fields.values() if field > start)])
        for place in range(start, end):
            for bit in range(8):
                damaged = bytearray(one + two + three)
                damaged[len(one) + place] ^= 1 << bit
                path = tmp_path / "flipped.log"
                path.write_bytes(damaged)
                found = list(dump(path))
                assert isinstance(found[0], Dumped)
                assert bytes(found[0].data) == one
                negative = place == 0 and bit == 7 and magic == 2
                assert isinstance(found[1], Damage) == (name not in _UNSEEN or negative)
                assert found[1].position == len(one)
                if name not in ("length", "magic"):
                    assert isinstance(found[2], Dumped)
                    assert bytes(found[2].data) == three
                    assert len(found) == 3
                else:
                    assert sum(part.size for part in found) == len(damaged)


def test_flipped_bits_end_with_1(tmp_path: Path) -> None:
    """Run the command with one file for each damaged field of the second batch."""
    data = _segment("gzip")
    paths = []
    for name, start in _MAGIC_2.items():
        damaged = bytearray(data)
        damaged[list(_raw_batches(data))[1][0] + start + 1] ^= 1
        paths.append(tmp_path / f"{name.replace(' ', '-')}.log")
        paths[-1].write_bytes(damaged)
    done = _run(*paths)
    assert done.returncode == 1
    told = {line.split(":")[0] for line in done.stderr.splitlines()}
    assert told == {str(path) for path in paths if path.stem.replace("-", " ") not in _UNSEEN}
    unseen = [path for path in paths if str(path) not in told]
    assert _run(*unseen).returncode == 0
