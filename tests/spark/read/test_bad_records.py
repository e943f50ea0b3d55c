"""The option badRecords for corrupt batches. tests/records/test_bad_batches.py tests which batches are corrupt."""

from __future__ import annotations

import base64
import json
import logging
import time
import zlib
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from spark_klog.columns.decode import PartitionDecoder, Unreadable
from spark_klog.columns.schema import WITHOUT_HEADERS
from spark_klog.errors import CorruptBatchError, DecodeError
from spark_klog.records.reading.reader import BadBatch
from spark_klog.spark.options import BadRecordsOptions
from spark_klog.spark.read.tasks import BadRecords
from tests.support.brokers.batches import make_batch

TIME = 1_700_000_000_000
BYTES = b"\x00\xff any bytes"
LETTER = f"t-3-7-{zlib.crc32(BYTES):08x}.json"
BAD = BadBatch(7, memoryview(BYTES), CorruptBatchError("the CRC is wrong"))


def three_batches() -> tuple[list[bytes], bytes]:
    """(each batch, all in one): batches at offsets 0, 2 and 4, of which the one at 2 is corrupt."""
    batches = []
    for offset in (0, 2, 4):
        data = make_batch([(b"k", b"%d" % at) for at in (offset, offset + 1)], [TIME, TIME])
        data[:8] = offset.to_bytes(8, "big")
        batches.append(bytes(data))
    batches[1] = batches[1][:-1] + bytes([batches[1][-1] ^ 1])
    return batches, b"".join(batches)


def offsets_read(bad_records: BadRecords, data: bytes, first: int = 0, end: int = 6) -> list[int]:
    """The offsets that a task reads, through the partition's decoder."""
    decoder = PartitionDecoder("t", 3, WITHOUT_HEADERS, yields_bad=True)
    offsets: list[int] = []
    for part in chain(decoder.decode(data, first, end), decoder.finish()):
        if isinstance(part, Unreadable):
            bad_records.handle(*part)
        else:
            offsets += part.column("offset").to_pylist()
    return offsets


@pytest.mark.parametrize("error", [CorruptBatchError("the CRC is wrong"), DecodeError("it is cut off")])
def test_fail_raises(error: DecodeError) -> None:
    with pytest.raises(DecodeError, match=f"^t-3: {error}; badRecords=skip or deadletter reads") as caught:
        BadRecords(BadRecordsOptions("fail")).handle("t", 3, BAD._replace(error=error))
    assert type(caught.value) is type(error)


def test_fail_names_the_partition_once() -> None:
    _, data = three_batches()
    with pytest.raises(CorruptBatchError, match=r"^t-3: batch of offsets 2-3: CRC 0x\w+ is stored"):
        offsets_read(BadRecords(BadRecordsOptions("fail")), data)


def test_skip_logs_and_reads_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    batches, data = three_batches()
    with caplog.at_level(logging.ERROR, "spark_klog"):
        assert offsets_read(BadRecords(BadRecordsOptions("skip")), data) == [0, 1, 4, 5]
    (message,) = caplog.messages
    expected = f"t-3: skipped {len(batches[1])} bytes of bad records: batch of offsets 2-3: CRC"
    assert message.startswith(expected)


def test_deadletter_keeps_the_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    batches, data = three_batches()
    folder = tmp_path / "dead" / "letters"
    before = time.time_ns() // 1_000_000
    options = BadRecordsOptions("deadletter", str(folder))
    assert offsets_read(BadRecords(options), data) == [0, 1, 4, 5]
    assert [path.name for path in folder.iterdir()] == [f"t-3-2-{zlib.crc32(batches[1]):08x}.json"]
    letter = json.loads((folder / f"t-3-2-{zlib.crc32(batches[1]):08x}.json").read_text())
    assert before <= letter.pop("time") <= time.time_ns() // 1_000_000
    assert base64.b64decode(letter.pop("bytes"), validate=True) == batches[1]
    assert letter.pop("reason").startswith("batch of offsets 2-3: CRC 0x")
    assert letter == {"version": 1, "topic": "t", "partition": 3, "offset": 2}
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("mode", ["skip", "deadletter"])
def test_a_timestamp_without_microseconds(mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only the record with that timestamp is skipped; a dead letter keeps its value."""
    data = bytes(make_batch([(b"k", b"%d" % at) for at in range(3)], [TIME, 2**62, TIME]))
    options = BadRecordsOptions(mode, str(tmp_path) if mode == "deadletter" else None)
    assert offsets_read(BadRecords(options), data) == [0, 2]
    (message,) = caplog.messages
    assert message.startswith(f"t-3: skipped 1 bytes of bad records: the record at offset 1 has the timestamp {2**62}")
    letters = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert [(item["offset"], base64.b64decode(item["bytes"])) for item in letters] == [(1, b"1")] * len(letters)
    assert len(letters) == (mode == "deadletter")


def test_nothing_is_made_without_a_bad_batch(tmp_path: Path) -> None:
    folder = tmp_path / "dead"
    good = three_batches()[0][0]
    assert offsets_read(BadRecords(BadRecordsOptions("deadletter", str(folder))), good) == [0, 1]
    assert not folder.exists()


def _plain(folder: Path) -> str:
    return str(folder)


def _uri(folder: Path) -> str:
    return f"file://{folder}"


def _short_uri(folder: Path) -> str:
    """The form that Hadoop writes."""
    return f"file:{folder}"


@pytest.mark.parametrize(
    "form", [_plain, _uri, _short_uri, lambda folder: f"{folder}/", lambda folder: f"{_uri(folder)}/"]
)
def test_where_dead_letters_go(tmp_path: Path, form: Callable[[Path], str]) -> None:
    folder = tmp_path / "a" / "b"
    BadRecords(BadRecordsOptions("deadletter", form(folder))).handle("t", 3, BAD)
    letter = json.loads((folder / LETTER).read_text())
    assert base64.b64decode(letter["bytes"]) == BYTES
    assert letter["reason"] == "the CRC is wrong"


@pytest.mark.parametrize("form", [_plain, _uri])
def test_a_folder_of_an_unusual_name(tmp_path: Path, form: Callable[[Path], str]) -> None:
    folder = tmp_path / "with space, ü and %20"
    BadRecords(BadRecordsOptions("deadletter", form(folder))).handle("t", 3, BAD)
    assert (folder / LETTER).exists()


def test_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    BadRecords(BadRecordsOptions("deadletter", "dead")).handle("t", 3, BAD)
    assert (tmp_path / "dead" / LETTER).exists()


def test_a_task_that_runs_again_writes_the_same_files(tmp_path: Path) -> None:
    options = BadRecordsOptions("deadletter", str(tmp_path))
    (tmp_path / LETTER).write_text("what a task that was killed has left" * 100)
    contents: list[dict[str, Any]] = []
    for _ in range(2):
        BadRecords(options).handle("t", 3, BAD)
        contents.append(json.loads((tmp_path / LETTER).read_text()) | {"time": None})
    assert contents[0] == contents[1]
    assert len(list(tmp_path.iterdir())) == 1


def test_each_batch_has_a_file_of_its_own(tmp_path: Path) -> None:
    options = BadRecordsOptions("deadletter", str(tmp_path))
    for topic, partition, offset in [("t", 3, 7), ("t", 3, 8), ("t", 4, 7), ("t-3", 7, 0), ("a.b_c", 0, -5)]:
        BadRecords(options).handle(topic, partition, BAD._replace(offset=offset))
    found = {
        (letter["topic"], letter["partition"], letter["offset"])
        for letter in (json.loads(path.read_text()) for path in tmp_path.iterdir())
    }
    assert found == {("t", 3, 7), ("t", 3, 8), ("t", 4, 7), ("t-3", 7, 0), ("a.b_c", 0, -5)}


def test_batches_that_claim_the_same_offset_are_kept_both_and_one_met_again_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad_records = BadRecords(BadRecordsOptions("deadletter", str(tmp_path)))
    for data in (BYTES, BYTES, b"other", b"other"):
        bad_records.handle("t", 3, BAD._replace(data=memoryview(data)))
    found = {base64.b64decode(json.loads(path.read_text())["bytes"]) for path in tmp_path.iterdir()}
    assert found == {BYTES, b"other"}
    assert len(caplog.messages) == 2


def test_a_dead_letter_that_can_not_be_written_ends_the_task(tmp_path: Path) -> None:
    """If the task went on, the bytes would be lost."""
    (tmp_path / "file").touch()
    bad_records = BadRecords(BadRecordsOptions("deadletter", str(tmp_path / "file" / "dead")))
    with pytest.raises(OSError, match="file/dead"):
        offsets_read(bad_records, three_batches()[1])


def test_a_task_logs_some_of_many(caplog: pytest.LogCaptureFixture) -> None:
    bad_records = BadRecords(BadRecordsOptions("skip"))
    for offset in range(1000):
        bad_records.handle("t", 3, BAD._replace(offset=offset))
    assert len(caplog.messages) == 100
    assert caplog.messages[0] == "t-3: skipped 12 bytes of bad records: the CRC is wrong"
    assert caplog.messages[-1].endswith("; this task logs no more of them")
