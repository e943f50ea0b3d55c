"""Dead letters of queries in a topic: each once, whatever attempts of tasks there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
from pyspark.sql import DataFrame, SparkSession

from spark_klog.client import Admin, Producer
from spark_klog.client.dead_letters import CORRUPT_BATCH
from spark_klog.client.letter_topics import Letter, LetterTopic as Letters
from spark_klog.columns.schema import WITHOUT_HEADERS
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, CorruptBatchError, DecodeError, KlogError, ProtocolError
from spark_klog.records.contract import Headers
from spark_klog.records.reading.reader import BadBatch, RecordFields
from spark_klog.spark.options import source_options
from spark_klog.spark.read.letter_topic import _ATTEMPTS, LetterTopic, _note, _ranges
from spark_klog.spark.read.ranges import OffsetRange
from spark_klog.spark.read.tasks import Plan, read_ranges
from tests.support.runs.soak import in_soak

_SECONDS = 60.0
#: Records of every third offset do not fit into a column of timestamps.
_FAR = 1 << 62
_HEADERS = (("traceparent", b"\xff"), ("none", None))


def _options(cluster: EmbeddedCluster, topic: str) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": cluster.bootstrap_servers,
        "subscribe": topic,
        "badRecords": "deadletter",
        "deadLetterTopic": f"{topic}-dlq",
    }


@pytest.fixture
def topic(cluster: EmbeddedCluster, topic: str) -> str:
    with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
        for name in (topic, f"{topic}-dlq"):
            admin.create_topic(name, 1, configs={"message.timestamp.after.max.ms": str((1 << 63) - 1)})
    _send(cluster, topic, 0, 30)
    return topic


def _send(cluster: EmbeddedCluster, topic: str, first: int, end: int) -> None:
    with Producer({"bootstrap.servers": cluster.bootstrap_servers}) as producer:
        for number in range(first, end):
            moment = 1000 + number if number % 3 else _FAR + number
            producer.send(topic, b"%d" % number, b"k", timestamp=moment, headers=_HEADERS)


def _read(cluster: EmbeddedCluster, topic: str, plan: Plan, start: int, end: int) -> list[int]:
    options = source_options(_options(cluster, topic), streaming=False)
    ranges = [OffsetRange(topic, 0, start, end)]
    batches = read_ranges(options, ranges, WITHOUT_HEADERS, plan=plan)
    return [offset for batch in batches for offset in batch["offset"].to_pylist()]


def _letters(cluster: EmbeddedCluster, topic: str) -> list[Letter]:
    return list(Letters({"bootstrap.servers": cluster.bootstrap_servers}, f"{topic}-dlq").letters())


def _offsets(letters: list[Letter]) -> list[int]:
    return sorted(each.said.offset for each in letters if each.said is not None)


def test_each_record_has_one_letter(cluster: EmbeddedCluster, topic: str) -> None:
    plan = Plan({})
    for start, end in ((0, 12), (0, 12), (5, 20), (0, 30), (9, 30)):
        assert _read(cluster, topic, plan, start, end) == [each for each in range(start, end) if each % 3]
    letters = _letters(cluster, topic)
    assert _offsets(letters) == list(range(0, 30, 3))
    record, said, own, _ = letters[0]
    assert (record.key, record.value, record.timestamp, own) == (b"k", b"0", _FAR, _HEADERS)
    assert said is not None
    assert (said.topic, said.partition, said.reader, said.stage) == (topic, 0, plan.identity, "KAFKA_CONSUME")
    assert (said.error, said.attempts) == ("spark_klog.errors.DecodeError", 1)
    assert "does not fit into microseconds" in said.reason
    _read(cluster, topic, Plan({}), 0, 3)  # another query has letters of its own
    assert _offsets(_letters(cluster, topic)) == [0, *range(0, 30, 3)]


def test_attempts_at_once(cluster: EmbeddedCluster, topic: str) -> None:
    """Of a task's two attempts, and of tasks with ranges of one partition."""
    options = source_options(_options(cluster, topic), streaming=False)
    failures: list[Exception] = []

    def attempt(start: int, end: int) -> None:
        letters = LetterTopic(options, f"{topic}-dlq", "q")
        for offset in range(start, end, 3):
            record = RecordFields(b"k", b"%d" % offset, ())
            letters.add(topic, 0, BadBatch(offset, memoryview(b""), DecodeError("no"), record))
        try:
            letters.flush([(topic, 0, start, end)])
        except Exception as error:
            failures.append(error)

    threads = [Thread(target=attempt, args=(start, start + 9)) for start in (0, 0, 9, 9, 18, 18)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS)
    assert failures == []
    assert _offsets(_letters(cluster, topic)) == list(range(0, 27, 3))


def test_letters_of_a_corrupt_batch_and_of_letters(cluster: EmbeddedCluster, topic: str) -> None:
    options = source_options(_options(cluster, topic), streaming=False)
    letters = LetterTopic(options, f"{topic}-dlq", "q")
    letters.add(topic, 0, BadBatch(7, memoryview(b"bytes"), CorruptBatchError("the CRC is wrong")))
    letters.flush([(topic, 0, 0, 9)])
    (letter,) = _letters(cluster, topic)
    assert not letter.is_sendable
    assert letter.said is not None
    assert (letter.record.value, letter.said.offset, letter.said.error) == (b"bytes", 7, CORRUPT_BATCH)
    with pytest.raises(ConfigError, match="letters can't go"):
        letters.add(f"{topic}-dlq", 0, BadBatch(7, memoryview(b"bytes"), CorruptBatchError("wrong")))


def test_sources_of_one_query(cluster: EmbeddedCluster, topic: str) -> None:
    """What one of them has written says nothing about the letters of another topic, or of another format."""
    plain = source_options(_options(cluster, topic), streaming=False)
    schema = '{"type":"record","name":"R","fields":[{"name":"a","type":"long"}]}'
    avro = source_options(_options(cluster, topic) | {"valueFormat": "avro", "valueSchema": schema}, streaming=False)
    with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
        admin.create_topic(f"{topic}-other", 1)
    sources = ((plain, "dlq", 3), (plain, "other", 4), (avro, "dlq", 5), (plain, "dlq", 6), (avro, "dlq", 7))
    for options, name, offset in sources:
        letters = LetterTopic(options, f"{topic}-{name}", "q")
        letters.add(topic, 0, BadBatch(offset, memoryview(b""), DecodeError("no"), RecordFields(None, b"", ())))
        letters.flush([(topic, 0, 0, 9)])
    assert _offsets(_letters(cluster, topic)) == [3, 5]
    other = Letters({"bootstrap.servers": cluster.bootstrap_servers}, f"{topic}-other")
    assert _offsets(list(other.letters())) == [4]


def test_letters_in_memory_are_bounded(cluster: EmbeddedCluster, topic: str) -> None:
    """Of small records what they take besides their bytes, of others their headers."""
    options = source_options(_options(cluster, topic), streaming=False)
    cases: list[tuple[Headers, int]] = [((), 20_000), ((("h", b"0" * 1_000_000),), 20)]
    for headers, count in cases:
        letters = LetterTopic(options, f"{topic}-dlq", "q")
        for offset in range(count):
            record = RecordFields(None, b"", headers)
            letters.add(topic, 0, BadBatch(offset, memoryview(b""), DecodeError("no"), record))
            assert not letters.is_full or offset > count // 2
        assert letters.is_full


def test_a_topic_that_is_missing_fails_the_task(
    cluster: EmbeddedCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer has waited for it as long as it is to wait: the task does not do so again and again."""
    write, attempts = LetterTopic._write, []
    monkeypatch.setattr(LetterTopic, "_write", lambda *arguments: attempts.append(1) or write(*arguments))
    named = _options(cluster, topic) | {"deadLetterTopic": f"{topic}-x", "kafka.request.timeout.ms": "2000"}
    options = source_options(named, streaming=False)
    with pytest.raises(ProtocolError, match=f"{topic}-x"):
        list(read_ranges(options, [OffsetRange(topic, 0, 0, 3)], WITHOUT_HEADERS, plan=Plan({})))
    assert len(attempts) < _ATTEMPTS


def test_what_options_refuse(tmp_path: Path) -> None:
    base = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "t"}
    for more in (
        {"badRecords": "deadletter"},
        {"deadLetterTopic": "dlq"},
        {"badRecords": "deadletter", "deadLetterTopic": "dlq", "badRecordsPath": "/tmp/x"},
    ):
        with pytest.raises(ConfigError, match="either badRecordsPath or deadLetterTopic"):
            source_options(base | more, streaming=True)
    with pytest.raises(ConfigError, match="a/b"):
        source_options(base | {"badRecords": "deadletter", "deadLetterTopic": "a/b"}, streaming=True)
    with pytest.raises(ConfigError, match="needs brokers"):
        source_options({"path": str(tmp_path), "badRecords": "deadletter", "deadLetterTopic": "dlq"}, streaming=False)


def test_notes() -> None:
    assert _ranges(_note([(5, 7), (0, 2), (2, 4), (6, 9)]).metadata, "g") == [(0, 4), (5, 9)]
    many = _note([(1 << 50 | 2 * number, 1 << 50 | 2 * number + 1) for number in range(300)])
    assert len(many.metadata) < 4096
    assert _ranges(many.metadata, "g")[-1] == (1 << 50 | 598, 1 << 50 | 599)
    for text, match in (("mine", "no query"), ('{"version":2,"done":[]}', "version 2")):
        with pytest.raises(KlogError, match=match):
            _ranges(text, "g")


_KILLED = """
import sys
from tests.spark.read import test_letter_topic
from spark_klog.client.producer import transactions
from tests.support.checker.interrupts import LinesRun
from spark_klog.spark.read import letter_topic
from spark_klog.spark.read.tasks import Plan
servers, topic, last = sys.argv[1], sys.argv[2], int(sys.argv[3])

class cluster:
    bootstrap_servers = servers

with LinesRun(last, letter_topic, transactions) as lines:
    test_letter_topic._read(cluster, topic, Plan({}, identity="q"), 0, 30)
print(lines.seen)
"""


@pytest.mark.parametrize("parts", [2, pytest.param(100, marks=in_soak)])
def test_tasks_that_are_killed(cluster: EmbeddedCluster, topic: str, parts: int) -> None:
    for part in range(parts + 1):
        line = 0 if part == parts else 60 + 500 * part // parts
        command = [sys.executable, "-c", _KILLED, cluster.bootstrap_servers, topic, str(line)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_SECONDS, check=False)
        assert done.returncode == (0 if done.stdout else 9)
    assert _offsets(_letters(cluster, topic)) == list(range(0, 30, 3))


def test_a_stream(spark: SparkSession, cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Its micro-batches are read twice each, and the last one is run again."""
    counts: list[int] = []

    def count(rows: DataFrame, _: int) -> None:
        counts.extend([rows.count(), rows.count()])

    for run in range(3):
        if run == 1:
            _send(cluster, topic, 30, 45)
        source = spark.readStream.format("klog").options(**_options(cluster, topic), startingOffsets="earliest")
        stream = source.load().writeStream.foreachBatch(count).option("checkpointLocation", str(tmp_path))
        stream.trigger(availableNow=True).start().awaitTermination()
        for name in ("1", ".1.crc"):
            (tmp_path / "commits" / name).unlink(missing_ok=True)
    assert counts == [20, 20, 10, 10, 10, 10]
    assert _offsets(_letters(cluster, topic)) == list(range(0, 45, 3))
