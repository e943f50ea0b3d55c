"""Compare format("klog") with Spark's own connector on the JVM, format("kafka"), on the same topics.

Two brokers: Kafka 3.9.1, with logs of old formats copied into its data directory, and Kafka 0.10.2.2.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from tests.support.runs.soak import in_matrix
from tests.support.servers.kafka import Kafka, Version
from tests.support.spark.jvm_connector import JvmReader

from .support import Job, Sent, consume, create_topic, delete_records, mixed_values, produce, read, wait_for

# the first test starts two Kafkas and waits for the JVM connector's answers to all cases
pytestmark = [pytest.mark.peer, pytest.mark.timeout(1800), pytest.mark.test_all("long"), in_matrix]

DATA = Path(__file__).parent.parent / "data"
CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
OLD_CODECS = CODECS[:4]
#: message.format.version of a topic of Kafka 0.10.2.2, by magic.
FORMATS = {0: "0.9.0", 1: "0.10.2"}
NOW = 1_700_000_000_000
SECONDS = 60
_PLACE = ["topic", "partition", "offset"]
#: The JVM connector's admin client can't list offsets at 0.10.2.2; its deprecated way, with a consumer, can.
BY_CONSUMER = {"spark.sql.streaming.kafka.useDeprecatedOffsetFetching": "true"}
COMMITTED = {"kafka.isolation.level": "read_committed"}
UNCOMMITTED = {"kafka.isolation.level": "read_uncommitted"}


class Case(NamedTuple):
    """A read for both sides; `rows` is the expected number, so that two empty results do not count as equal."""

    rows: int
    options: dict[str, str]
    broker: Version = "3.9.1"
    #: Settings of the JVM side's session.
    confs: dict[str, str] = {}


def _offsets(**partitions: Iterable[int]) -> str:
    """Offsets by topic and partition as JSON; a "_" in a name stands for "-"."""
    return json.dumps(
        {
            topic.replace("_", "-"): {str(number): offset for number, offset in enumerate(offsets)}
            for topic, offsets in partitions.items()
        }
    )


RANGES = {"subscribe": "range-a,range-b"}
OLD_RANGE = {"startingOffsets": [13] * 4, "endingOffsets": [187] * 4}
CASES = {
    "codecs": Case(1000, {"subscribe": "codecs"}),
    "codecs, from within batches": Case(
        5 * 125,
        {
            "subscribe": "codecs",
            "startingOffsets": _offsets(codecs=[17] * 5),
            "endingOffsets": _offsets(codecs=[142] * 5),
        },
    ),
    "without headers": Case(1000, {"subscribe": "codecs", "includeHeaders": "false"}),
    "nulls, empty and big values": Case(42, {"subscribe": "values"}),
    "headers": Case(7, {"subscribe": "headers"}),
    "timestamps": Case(3, {"subscribe": "timestamps"}),
    "log append time": Case(60, {"subscribe": "append-time"}),
    "transactions, committed": Case(104, {"subscribe": "transactions", **COMMITTED}),
    "transactions, all": Case(205, {"subscribe": "transactions", **UNCOMMITTED}),
    "transactions, default": Case(205, {"subscribe": "transactions"}),
    "transactions, parts": Case(
        49,
        {
            "subscribe": "transactions",
            "startingOffsets": _offsets(transactions=[30, 3]),
            "endingOffsets": _offsets(transactions=[88, 60]),
            **COMMITTED,
        },
    ),
    "abort tail, committed": Case(10, {"subscribe": "abort-tail", **COMMITTED}),
    "abort tail, all": Case(60, {"subscribe": "abort-tail", **UNCOMMITTED}),
    "nothing but aborts": Case(0, {"subscribe": "aborts", **COMMITTED}),
    "compacted": Case(21, {"subscribe": "compacted"}),
    "compacted, from within a hole": Case(
        11,
        {
            "subscribe": "compacted",
            "startingOffsets": _offsets(compacted=[7]),
            "endingOffsets": _offsets(compacted=[191]),
        },
    ),
    "deleted records": Case(15, {"subscribe": "deleted"}),
    "from deleted records on": Case(
        15, {"subscribe": "deleted", "startingOffsets": _offsets(deleted=[3]), "failOnDataLoss": "false"}
    ),
    "empty topic": Case(0, {"subscribe": "empty"}),
    "offsets": Case(
        10 + 100 + 0 + 1 + 59,
        {
            **RANGES,
            "startingOffsets": _offsets(range_a=[10, -2, 50], range_b=[-2, 41]),
            "endingOffsets": _offsets(range_a=[20, -1, 50], range_b=[1, -1]),
        },
    ),
    "starting timestamp": Case(5 * 58, {**RANGES, "startingTimestamp": str(NOW + 415)}),
    "timestamps of both ends": Case(
        5 * 40, {**RANGES, "startingTimestamp": str(NOW + 200), "endingTimestamp": str(NOW + 600)}
    ),
    "timestamps by partition": Case(
        99 + 0 + 1 + 100 + 50,
        {
            **RANGES,
            "startingOffsetsByTimestamp": _offsets(range_a=[NOW + 1, NOW + 5000, NOW + 990], range_b=[0, NOW + 500]),
            "startingOffsetsByTimestampStrategy": "latest",
        },
    ),
    # must not match __transaction_state, which is internal
    "pattern": Case(3, {"subscribePattern": "^(_.*|patt?ern.[a-z])$"}),
    "pattern, anywhere in a name": Case(5, {"subscribePattern": "_.*|att?ern.[a-z]"}),
    "assigned partitions": Case(200, {"assign": '{"range-a": [2], "range-b": [0]}'}),
    "many tasks": Case(500, {**RANGES, "minPartitions": "13"}),
    "many tasks, transactions": Case(104, {"subscribe": "transactions", "minPartitions": "11", **COMMITTED}),
    **{
        f"magic {magic} at 3.9.1, {codec}": Case(120, {"subscribe": f"v{magic}-{codec}"})
        for magic in FORMATS
        for codec in OLD_CODECS
    },
    "all magics": Case(360, {"subscribe": "all-magics"}),
    "all magics, a part": Case(
        200,
        {
            "subscribe": "all-magics",
            "startingOffsets": _offsets(all_magics=[77]),
            "endingOffsets": _offsets(all_magics=[277]),
        },
    ),
    **{f"magic {magic}": Case(800, {"subscribe": f"magic-{magic}"}, "0.10.2.2", BY_CONSUMER) for magic in FORMATS},
    **{
        f"magic {magic}, a part": Case(
            4 * 174,
            {
                "subscribe": f"magic-{magic}",
                **{name: json.dumps({f"magic-{magic}": dict(enumerate(at))}) for name, at in OLD_RANGE.items()},
            },
            "0.10.2.2",
            BY_CONSUMER,
        )
        for magic in FORMATS
    },
    "magic 1, starting timestamp": Case(
        4 * 100, {"subscribe": "magic-1", "startingTimestamp": str(NOW + 100)}, "0.10.2.2", BY_CONSUMER
    ),
    # records of magic 0 have no timestamps
    "magic 0, starting timestamp": Case(
        0,
        {"subscribe": "magic-0", "startingTimestamp": str(NOW), "startingOffsetsByTimestampStrategy": "latest"},
        "0.10.2.2",
        BY_CONSUMER,
    ),
    "magic 0, ending timestamp": Case(
        800, {"subscribe": "magic-0", "endingTimestamp": str(NOW)}, "0.10.2.2", BY_CONSUMER
    ),
}
STREAMS = {
    "codecs": Case(1000, {"subscribe": "codecs", "maxOffsetsPerTrigger": "300"}),
    "transactions": Case(104, {"subscribe": "transactions", "maxOffsetsPerTrigger": "50", **COMMITTED}),
    "abort tail": Case(10, {"subscribe": "abort-tail", **COMMITTED}),
    "compacted": Case(21, {"subscribe": "compacted"}),
    "pattern": Case(500, {"subscribePattern": "^range-.$"}),
    "magic 0": Case(800, {"subscribe": "magic-0", "maxOffsetsPerTrigger": "500"}, "0.10.2.2", BY_CONSUMER),
}


def _fill(servers: str) -> None:
    """Create and fill the topics of Kafka 3.9.1."""
    create_topic(servers, "codecs", len(CODECS))
    for partition, codec in enumerate(CODECS):
        produce(servers, "codecs", mixed_values(200, partition), compression_type=codec)

    create_topic(servers, "values", 2)
    contents = [None, b"", b"\0", bytes(range(256)), b"v" * 200_000, b"long " * 180_000]
    pairs = [(key, value) for value in contents for key in (None, b"", b"k", b"\xff\xfe")][:-3]
    for partition, codec in enumerate(("none", "zstd")):
        records = [Sent(value, key, partition) for key, value in pairs]
        produce(servers, "values", records, compression_type=codec)

    create_topic(servers, "headers")
    headers: list[tuple[tuple[str, bytes | None], ...]] = [
        (),
        (("a", b"1"),),
        (("a", b"1"), ("a", b"1"), ("b", b"2"), ("a", b"3")),
        (("a", None), ("a", b""), ("", b"x"), ("", None)),
        (("ключ \N{GRINNING FACE}", bytes(range(256))),),
        tuple((f"h{number}", b"x" * number) for number in range(300)),
        (),
    ]
    produce(servers, "headers", [Sent(b"v", headers=entries) for entries in headers])

    create_topic(servers, "timestamps")
    produce(servers, "timestamps", [Sent(b"v", timestamp=at) for at in (1, 999, 253_402_300_799_999)])

    create_topic(servers, "append-time", 2, **{"message.timestamp.type": "LogAppendTime"})
    for partition, codec in enumerate(("none", "lz4")):
        produce(servers, "append-time", mixed_values(30, partition, with_headers=False), compression_type=codec)

    for topic, partitions in (("range-a", 3), ("range-b", 2)):
        create_topic(servers, topic, partitions)
        for partition in range(partitions):
            produce(servers, topic, mixed_values(100, partition, step=10, with_headers=False))
    for topic in ("_hidden", "pattern.a", "pattern-b", "pattern.a.not", "not.pattern-b"):
        create_topic(servers, topic)
        produce(servers, topic, [Sent(topic.encode())])
    create_topic(servers, "empty", 2)

    create_topic(servers, "deleted")
    produce(servers, "deleted", mixed_values(30, with_headers=False))
    delete_records(servers, "deleted", {0: 15})

    _compact(servers)


def _compact(servers: str) -> None:
    """Create a topic and wait for the cleaner: batches of ten of the twenty keys, one or a few per segment."""
    settings = {"cleanup.policy": "compact", "segment.bytes": "700", "min.cleanable.dirty.ratio": "0.001"}
    create_topic(servers, "compacted", **settings)
    for start in range(0, 200, 10):
        records = [
            Sent(None if number == 190 else b"%d" % number * 10, b"%d" % (number % 20), timestamp=NOW + number)
            for number in range(start, start + 10)
        ]
        # the cleaner keeps an idempotent producer's last batch, without records
        codec = CODECS[start // 10 % len(CODECS)]
        produce(servers, "compacted", records, compression_type=codec, enable_idempotence=True)
    # so large that it gets a segment of its own: the cleaner leaves out the last segment
    produce(servers, "compacted", [Sent(b"e" * 600, b"end")])
    wait_for(lambda: len(consume(servers, "compacted")) == 21, "the cleaner")


def _transact(servers: str) -> list[Producer]:
    """Create the topics with transactions; keep the returned producers, as one transaction stays open."""
    producers: list[Producer] = []

    def transaction(topic: str, end: str, count: int, partitions: int = 1) -> None:
        codec = CODECS[len(producers) % len(CODECS)]
        name = f"{topic}-{len(producers)}"
        settings = {"transactional.id": name, "compression.type": codec, "transaction.timeout.ms": 600_000}
        producer = Producer({"bootstrap.servers": servers, "log_level": 0, **settings})
        producers.append(producer)
        producer.init_transactions(SECONDS)
        producer.begin_transaction()
        for number in range(count):
            producer.produce(topic, f"{end}-{number}".encode(), partition=number % partitions)
        assert producer.flush(SECONDS) == 0
        if end != "open":
            (producer.commit_transaction if end == "commit" else producer.abort_transaction)(SECONDS)

    create_topic(servers, "transactions", 2)
    for end in ("commit", "abort", "abort", "commit", "open"):
        transaction("transactions", end, 48 if end == "commit" else 33, partitions=2)
        produce(servers, "transactions", [Sent(b"plain", partition=partition) for partition in range(2)])
    for topic, committed in (("abort-tail", 10), ("aborts", 0)):
        create_topic(servers, topic)
        if committed:
            transaction(topic, "commit", committed)
        transaction(topic, "abort", 30)
        transaction(topic, "abort", 20)

    for topic, count in (("transactions", 104), ("abort-tail", 10)):
        wait_for(lambda: len(consume(servers, topic, isolation_level="read_committed")) == count, "markers")  # noqa: B023
    return producers


def _fill_old(servers: str) -> None:
    """Create and fill the topics of Kafka 0.10.2.2."""
    for magic, version in FORMATS.items():
        create_topic(servers, f"magic-{magic}", len(OLD_CODECS), **{"message.format.version": version})
        for partition, codec in enumerate(OLD_CODECS):
            produce(servers, f"magic-{magic}", mixed_values(200, partition, with_headers=False), compression_type=codec)


def _put_old_logs(folder: Path) -> list[str]:
    """Put logs of magic 0 and 1, and one of all magics, into the folder of a stopped broker; return their topics."""
    old, new = DATA / "kafka-0.10.2.2" / "logs", DATA / "kafka-3.9.1" / "logs"
    name = f"{0:020}.log"
    for path in old.iterdir():
        shutil.copytree(path, folder / path.name)
    mixed = b""
    for number, path in enumerate((old / "v0-none-0", old / "v1-lz4-0", new / "v2-zstd-0")):
        data, position = bytearray((path / name).read_bytes()), 0
        while position < len(data):
            offset, length = struct.unpack_from(">qi", data, position)
            struct.pack_into(">q", data, position, offset + 120 * number)  # the CRC does not cover it
            position += 12 + length
        mixed += data
    (folder / "all-magics-0").mkdir()
    (folder / "all-magics-0" / name).write_bytes(mixed)
    return [path.name.removesuffix("-0") for path in folder.iterdir()]


class Sides(NamedTuple):
    """Bootstrap servers by broker, and the JVM connector's answers, with the folder of its Parquet files."""

    servers: dict[Version, str]
    answers: dict[str, dict[str, Any]]
    folder: Path


@pytest.fixture(scope="module")
def sides(module_server_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    folder = tmp_path_factory.mktemp("jvm")
    new = Kafka("3.9.1", module_server_dir / "new", {"log.cleaner.backoff.ms": 100})
    old = Kafka("0.10.2.2", module_server_dir / "old")
    topics = _put_old_logs(new.log_dir)
    with JvmReader(module_server_dir) as jvm, new, old:
        servers = {broker.version: broker.bootstrap_servers for broker in (new, old)}
        for topic in topics:
            create_topic(new.bootstrap_servers, topic)
        _fill_old(old.bootstrap_servers)
        producers = _transact(new.bootstrap_servers)
        _fill(new.bootstrap_servers)
        reads = {}
        for cases, stream in ((CASES, False), (STREAMS, True)):
            for name, case in cases.items():
                options = {"kafka.bootstrap.servers": servers[case.broker], **_options(case, stream)}
                key = _key(name, stream)
                path = str(folder / key)
                reads[key] = {"options": options, "confs": case.confs, "stream": stream, "path": path}
        yield Sides(servers, jvm.read(reads), folder)
        del producers


def _options(case: Case, stream: bool) -> dict[str, str]:
    first = {"startingOffsets": "earliest"} if stream else {}
    return {"includeHeaders": "true", **first, **case.options}


def _key(name: str, stream: bool) -> str:
    """The key of a case in the answers, and the name of its folder."""
    return f"{'stream' if stream else 'batch'} {name}".replace(",", "").replace(" ", "-")


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows in the order of the log, with timestamps in UTC, also those of INT96, which has no zone."""
    at = table.column("timestamp").cast(pa.timestamp("us", "UTC"))
    table = table.set_column(table.schema.get_field_index("timestamp"), "timestamp", at)
    found: list[dict[str, Any]] = table.sort_by([(name, "ascending") for name in _PLACE]).to_pylist()
    return found


def _parquet(folder: Path) -> list[dict[str, Any]]:
    """The rows of Parquet files, read by pyarrow: Spark would need several jobs for a comparison."""
    if not any(folder.glob("*.parquet")):
        return []
    return _rows(pq.read_table(folder, coerce_int96_timestamp_unit="us"))


def _compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], rows: int) -> None:
    assert ours == theirs
    assert len(theirs) == rows


@pytest.mark.parametrize("name", CASES)
def test_batch(spark: SparkSession, sides: Sides, name: str) -> None:
    case, key = CASES[name], _key(name, False)
    answer = sides.answers[key]
    assert answer.get("error") is None
    ours = read(spark, sides.servers[case.broker], **_options(case, False))
    assert ours.schema == StructType.fromJson(answer["schema"])
    _compare(_rows(ours.toArrow()), _parquet(sides.folder / key), case.rows)


@pytest.mark.parametrize("name", STREAMS)
def test_stream(spark: SparkSession, sides: Sides, tmp_path: Path, name: str) -> None:
    case, key = STREAMS[name], _key(name, True)
    answer = sides.answers[key]
    assert answer.get("error") is None
    job = Job(spark, sides.servers[case.broker], tmp_path, **_options(case, True))
    batches = job.run()
    _compare(_parquet(Path(job.output)), _parquet(sides.folder / key), case.rows)
    assert batches == answer["batches"]
