"""Records without a network: decode, encode, where the time of a read goes, codecs."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from struct import Struct
from typing import Any

import pyarrow as pa
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.memory_records import MemoryRecords

from benchmarks.data import PARTITIONS, produce
from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.record_batches import TIME, kernel, record_batches, speed, take_turns, value
from benchmarks.sides import SideFailed, SparkSide, beside_no_op, compile_c, read_all, recorded, topic_options
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.ranges import fetch_range
from spark_klog.client.offsets import offset_range
from spark_klog.client.settings import ClientConfig
from spark_klog.columns.decode import PartitionDecoder
from spark_klog.columns.encode import Placement
from spark_klog.columns.schema import WITHOUT_HEADERS
from spark_klog.records import kernels
from spark_klog.records.building.conversion import down_convert, up_convert
from spark_klog.records.contract import COLUMNS
from spark_klog.records.formats.batch import check_crc, iter_batches
from spark_klog.records.formats.batch_v2 import HEADER_SIZE, BatchHeader, body, build_batch
from spark_klog.wire.codecs import CODECS as CODEC_TABLE, Codec, codec_by_name
from spark_klog.wire.primitives import Buffer
from tests.support.servers.kafka import Kafka

#: (codec, batches, records per batch): batches of about 64 KB, and of 16 KB (Kafka's default batch.size); 8 MB of
#: records, as in one fetch.
_SHAPES = (("none", 120, 600), ("none", 480, 150), ("lz4", 120, 600))
_LOOP_SECONDS = "1"
_SOURCE = Path(__file__).with_name("walk.c")


def _decode(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("decode")
    for codec, batches, records in _SHAPES:
        data = record_batches(codec, batches, records)
        work = f"decode to all columns, values of 100 B, batches of {records} records, {codec}"
        for klog, peer in _sides(bench, folder, data, batches * records, is_plain=codec == "none"):
            yield Result(work, "M records/s", klog, peer, bench.command)


def _sides(bench: Bench, folder: Path, data: bytes, total: int, is_plain: bool) -> Iterator[tuple[Side, Side]]:
    """The native kernel's side with each of its peers."""
    runs: list[tuple[Side, Callable[[], float]]] = [
        (Side("native kernel"), lambda: _decoded_columns("native", data, total)),
        (Side("reference kernel"), lambda: _decoded_columns("reference", data, total)),
        (Side("kafka-python's MemoryRecords"), lambda: speed(lambda: _decoded_by_kafka_python(data, total))),
    ]
    if is_plain:
        c_loop = Side("a loop in C: no CRC, no Arrow")
        runs.append((c_loop, lambda: _c_loop(folder, total)))
        with recorded(c_loop):
            (folder / "batches").write_bytes(data)
            compile_c(_SOURCE, folder / "walk")
        # like the loop in C, without CRC and Arrow
        alone = Side("native kernel without CRC and Arrow")
        runs.append((alone, _walk_and_copy(data, total)))
    take_turns(runs, bench.repeat)
    (klog, _), *peers = runs
    if is_plain:
        peers.pop()
        yield alone, c_loop
    for peer, _ in peers:
        yield klog, peer


def _decoded_columns(name: str, data: bytes, total: int) -> float:
    with kernel(name):
        decoder = PartitionDecoder("bench", 0, WITHOUT_HEADERS)
    given = taken = 0

    def fetched() -> int:
        nonlocal given, taken
        taken += sum(batch.num_rows for batch in decoder.decode(data, 0, total))
        given += total
        return total

    figure = speed(fetched)
    _check(taken + sum(batch.num_rows for batch in decoder.finish()), given)
    return figure


def _walk_and_copy(data: bytes, total: int) -> Callable[[], float]:
    with kernel("native"):
        builder = kernels.load().builder(frozenset(WITHOUT_HEADERS.names) & frozenset(COLUMNS))
    bodies = [(header, bytes(batch[HEADER_SIZE:])) for header, batch in iter_batches(data)]

    def once() -> int:
        for header, data in bodies:
            assert isinstance(header, BatchHeader)
            builder.append(data, header.count, header.base_offset, header.base_timestamp, None, 0, total)
        _check(builder.finish().count, total)
        return total

    return lambda: speed(once)


def _decoded_by_kafka_python(data: bytes, total: int) -> int:
    records = size = 0
    batches = MemoryRecords(data)
    while batches.has_next():
        batch = batches.next_batch()
        if not batch.validate_crc():
            raise SideFailed("a wrong CRC")
        for record in batch:
            size += (record.offset >= 0) + (record.timestamp >= 0) + (record.key is None) + len(record.value)
            records += 1
    _check(records, total)
    return records


def _c_loop(folder: Path, total: int) -> float:
    command = [str(folder / "walk"), str(folder / "batches"), _LOOP_SECONDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SideFailed(f"ended with {done.returncode}: {done.stderr}")
    records, figure = done.stdout.split()
    _check(int(records), total)
    return float(figure)


def _check(records: int, total: int) -> None:
    if records != total:
        raise SideFailed(f"read {records} of {total} records")


DECODE = Work(
    "decode",
    _decode,
    (
        "Decode: one process, one core; 8 MB of records again and again: CRC, decompression, the walk over records, "
        "Arrow batches of all columns. kafka-python checks the CRCs and makes an object of each record. The loop in C "
        "only walks the varints of uncompressed batches and copies what the same columns want; the first of its lines "
        "is the kernel at that work alone, with all its checks of lengths, the other the whole way with CRC and Arrow.",
    ),
)


_ROWS = 65_536
_TARGET = ClientConfig.__dataclass_fields__["batch_size"].default


def _encode(bench: Bench) -> Iterator[Result]:
    values = [value(index // 600, index % 600) for index in range(_ROWS)]
    batch = pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], names=["value"])
    for codec in map(codec_by_name, ("none", "lz4")):
        native, reference = Side("native kernel"), Side("reference kernel")
        kafka_python = Side("kafka-python's DefaultRecordBatchBuilder")
        sides: list[tuple[Side, Callable[[], float]]] = [
            (native, lambda codec=codec: _encoded_columns("native", batch, codec)),
            (reference, lambda codec=codec: _encoded_columns("reference", batch, codec)),
            (kafka_python, lambda codec=codec: speed(lambda: _encoded_by_kafka_python(values, codec))),
        ]
        take_turns(sides, bench.repeat)
        for peer in (reference, kafka_python):
            work = f"encode Arrow batches of {_ROWS:,} rows, values of 100 B, {codec.name}"
            yield Result(work, "M records/s", native, peer, bench.command)


def _encoded_columns(name: str, batch: pa.RecordBatch, codec: Codec) -> float:
    with kernel(name):
        chosen = kernels.load()

    def once() -> int:
        records = 0
        placement = Placement(batch, 4, _TARGET)
        for _, columns in placement.records([0] * placement.turns):
            row = 0
            while row < columns.count:
                body, following, base, maximum = chosen.encode(columns, row, _TARGET)
                build_batch(body, following - row, base_timestamp=base, max_timestamp=maximum, codec=codec)
                row = following
            records += row
        assert records == batch.num_rows
        return records

    return speed(once)


def _encoded_by_kafka_python(values: list[bytes], codec: Codec) -> int:
    def new_builder() -> DefaultRecordBatchBuilder:
        return DefaultRecordBatchBuilder(2, codec.id, False, -1, -1, -1, _TARGET)

    builder = new_builder()
    count = 0
    for content in values:
        if builder.append(count, TIME, None, content, []) is None:
            builder.build()
            builder, count = new_builder(), 0
            builder.append(count, TIME, None, content, [])
        count += 1
    builder.build()
    return len(values)


ENCODE = Work(
    "encode",
    _encode,
    (
        f"Encode: one process, one core; Arrow batches without keys to finished record batches of {_TARGET:,} bytes: "
        "split by partition, records, compression, CRC. kafka-python is given the same values as Python's bytes.",
    ),
)


#: (codec, batches, records per batch): batches of nearly 1 MB and of 16 KB, and of one record.
_CONVERTED = (("none", 8, 9000), ("none", 480, 150), ("none", 20_000, 1), ("lz4", 480, 150), ("gzip", 100, 150))


def _convert(bench: Bench) -> Iterator[Result]:
    for codec, batches, records in _CONVERTED:
        data, total = record_batches(codec, batches, records), batches * records
        sets = bytes(down_convert(data, 1).data)
        for work, convert in (
            ("down to magic 1", lambda data=data: down_convert(data, 1).data),
            ("up from magic 1", lambda sets=sets: up_convert(sets)),
        ):
            native, reference = Side("native kernel"), Side("reference kernel")
            sides = [(side, partial(_converted, side.name.split()[0], convert, total)) for side in (native, reference)]
            take_turns(sides, bench.repeat)
            name = f"conversion {work}, batches of {records:,} records of 100 B, {codec}"
            yield Result(name, "M records/s", native, reference, bench.command)


def _converted(name: str, convert: Callable[[], object], records: int) -> float:
    def once() -> int:
        convert()
        return records

    with kernel(name):
        return speed(once)


CONVERT = Work(
    "convert",
    _convert,
    (
        "Conversion: what the broker does in a thread for clients before 0.11, one process, one core. Compressed "
        "batches are decompressed and compressed again.",
    ),
)


def _breakdown(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("breakdown")
    with Kafka("3.9.1", folder / "broker", full_speed=True) as kafka:
        for codec in ("none", "lz4"):
            topic = f"parts-{codec}"
            kafka.create_topic(topic, partitions=PARTITIONS)
            produce(kafka.libs, kafka.bootstrap_servers, topic, bench.records, codec, folder)
            yield from _stages(bench, kafka.bootstrap_servers, topic, codec)
            yield _whole(bench, folder / codec, kafka.bootstrap_servers, topic, codec)


def _stages(bench: Bench, servers: str, topic: str, codec: str) -> Iterator[Result]:
    with Cluster.connect({"bootstrap.servers": servers}) as cluster:
        ranges = [(partition, *offset_range(cluster, topic, partition)) for partition in range(PARTITIONS)]

        def fetch(take: Callable[[memoryview, int, int], object]) -> int:
            for partition, start, end in ranges:
                for fetched in fetch_range(cluster, topic, partition, start, end):
                    take(fetched.data, fetched.offset, end)
            return bench.records

        decoder = PartitionDecoder(topic, 0, WITHOUT_HEADERS)
        chunk: list[tuple[bytes, int, int]] = []
        fetch(lambda data, first, end: chunk.append((bytes(data), first, end)) if len(chunk) < 16 else None)
        batches = [batch for data, _, _ in chunk for batch in iter_batches(data)]
        records = sum(header.count for header, _ in batches if isinstance(header, BatchHeader))

        def every(take: Callable[[BatchHeader, memoryview], object]) -> Callable[[], int]:
            def run() -> int:
                for header, batch in batches:
                    assert isinstance(header, BatchHeader)
                    take(header, batch)
                return records

            return run

        def decode(data: Buffer, first: int, end: int) -> None:
            for _ in decoder.decode(data, first, end):
                pass

        def decode_chunk() -> int:
            for item in chunk:
                decode(*item)
            return records

        stages: list[tuple[str, Callable[[], int]]] = [
            ("socket: fetch only", lambda: fetch(lambda *_: None)),
            ("CRC-32C only", every(check_crc)),
            *([("decompress only", every(body))] if codec != "none" else []),
            ("CRC, decompress, records to Arrow", decode_chunk),
            ("all of these: fetch to Arrow", lambda: fetch(decode)),
        ]
        sides = [(Side("klog"), partial(speed, run)) for _, run in stages]
        take_turns(sides, bench.repeat)
        for (name, _), (side, _) in zip(stages, sides, strict=True):
            yield Result(f"breakdown, one core, {codec}: {name}", "M records/s", side, None, bench.command)


def _whole(bench: Bench, folder: Path, servers: str, topic: str, codec: str) -> Result:
    def run(side: SparkSide, options: dict[str, str]) -> float:
        return bench.records / 1e6 / read_all(side, options, bench.records)

    work = f"breakdown, local[2], {codec}: Spark batch read"
    options = topic_options(servers, topic)
    return beside_no_op(bench, work, "M rows/s", folder, options, run, records=bench.records)


BREAKDOWN = Work(
    "breakdown",
    _breakdown,
    (
        "Breakdown: the stages of a read without Spark, in one process on one core; fetches go to Kafka on the same "
        "machine, whose own work is in them. The source that does nothing yields one prebuilt Arrow batch of 65,536 "
        "rows with the same columns again and again: what is left of the ratio to 1 is ours, the rest is Spark's way "
        "from a Python worker's Arrow stream to rows in the JVM.",
    ),
)


_LINE = (
    b'{"ts":"2024-05-13T08:%02d:%02d.%03dZ","level":"%s","user":%d,"ip":"10.%d.%d.%d","path":"/products/%d/reviews",'
    b'"ms":%d,"trace":"%016x","agent":"%s"}'
)
_LEVELS = (b"INFO", b"INFO", b"INFO", b"WARN")
_AGENTS = (
    b"Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 Chrome/126.0",
    b"Mozilla/5.0 (iPhone; CPU iPhone OS 17_5 like Mac OS X)",
    b"curl/8.5.0",
    b"kube-probe/1.29",
)
_SIZE, _BLOCK = 60_000, 32 * 1024
_CODEC_SECONDS = 0.2
_LIMIT = 1 << 24
_INT32, _UINT32 = Struct(">i"), Struct("<I")

Function = Callable[[bytes], Any]


def _body() -> bytes:
    """Log lines, each with the few bytes that a record has around its value."""
    source = random.Random(7)
    body = bytearray()
    index = 0
    while len(body) < _SIZE:
        line = _LINE % (
            index // 60,
            index % 60,
            source.randrange(1000),
            source.choice(_LEVELS),
            source.randrange(100_000),
            source.randrange(256),
            source.randrange(256),
            source.randrange(256),
            source.randrange(5000),
            source.randrange(900),
            source.getrandbits(64),
            source.choice(_AGENTS),
        )
        body += b"\xd8\x03\x00" + bytes((index & 0x7F | 0x80, index >> 7)) * 2 + b"\x01\xc8\x03" + line + b"\x00"
        index += 1
    return bytes(body)


def _zlib(name: str, level: int) -> tuple[Function, Function]:
    """Functions of a module that has the interface of the standard library's zlib."""
    module = import_module(name)

    def compress(data: bytes) -> bytes:
        deflate = module.compressobj(level, 8, 31)
        result: bytes = deflate.compress(data) + deflate.flush()
        return result

    return compress, lambda data: module.decompressobj(31).decompress(data, _LIMIT)


def _cramjam(name: str, **options: int) -> tuple[Function, Function]:
    module = getattr(import_module("cramjam"), name)
    return lambda data: module.compress(data, **options), module.decompress


def _cramjam_snappy() -> tuple[Function, Function]:
    """The codec's blocks, decompressed into one buffer of the known size, without a check of each block."""
    snappy = import_module("cramjam").snappy

    def compress(data: bytes) -> bytearray:
        view, result = memoryview(data), bytearray(bytes.fromhex("82534e41505059000000000100000001"))
        for start in range(0, len(view), _BLOCK):
            block = memoryview(snappy.compress_raw(view[start : start + _BLOCK]))
            result += _INT32.pack(len(block))
            result += block
        return result

    size = len(BODY)

    def decompress(data: bytes) -> bytearray:
        view, result = memoryview(data), bytearray(size)
        position, target = 16, memoryview(result)
        while position < len(view):
            end = position + 4 + _INT32.unpack_from(view, position)[0]
            target = target[snappy.decompress_raw_into(view[position + 4 : end], target) :]
            position = end
        return result

    return compress, decompress


def _lz4_blocks() -> tuple[Function, Function]:
    """The `lz4` package's block functions, with the frame built here."""
    block = import_module("lz4.block")
    size = 64 * 1024

    def compress(data: bytes) -> bytes:
        view, parts = memoryview(data), [bytes.fromhex("04224d18604082")]
        for start in range(0, len(view), size):
            part = block.compress(view[start : start + size], store_size=False)
            parts += (_UINT32.pack(len(part)), part)
        return b"".join([*parts, bytes(4)])

    def decompress(data: bytes) -> bytes:
        view, parts, position = memoryview(data), [], 7
        while part := _UINT32.unpack_from(view, position)[0]:
            position += 4
            parts.append(block.decompress(view[position : position + part], uncompressed_size=size))
            position += part
        return parts[0] if len(parts) == 1 else b"".join(parts)

    return compress, decompress


def _lz4_frame() -> tuple[Function, Function]:
    """The package's own frame functions, which our codec wraps: shows the cost of its size limit and header check."""
    frame = import_module("lz4.frame")
    return lambda data: frame.compress(data, block_size=4, block_linked=False, store_size=False), frame.decompress


def _standard_zstd(name: str) -> tuple[Function, Function]:
    module = import_module(name)
    return module.compress, module.decompress


#: (codec, peer, function that returns its compress and decompress).
_PEERS: tuple[tuple[int, str, Callable[[], tuple[Function, Function]]], ...] = (
    (1, "zlib", lambda: _zlib("zlib", -1)),
    (1, "isal, level 2", lambda: _zlib("isal.isal_zlib", 2)),
    (1, "cramjam", lambda: _cramjam("gzip", level=6)),
    (2, "cramjam", _cramjam_snappy),
    (3, "lz4.frame", _lz4_frame),
    (3, "lz4.block", _lz4_blocks),
    (3, "cramjam", lambda: _cramjam("lz4", level=0)),
    (4, "cramjam", lambda: _cramjam("zstd", level=3)),
    (4, "compression.zstd", lambda: _standard_zstd("compression.zstd")),
    (4, "backports.zstd", lambda: _standard_zstd("backports.zstd")),
)

BODY = _body()


def _speed(function: Function, data: bytes) -> float:
    """MB of `BODY` per second."""
    calls = 0
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < _CODEC_SECONDS:
        function(data)
        calls += 1
    return calls * len(BODY) / elapsed / 1e6


def _codecs(bench: Bench) -> Iterator[Result]:
    for codec_id, peer_name, make in _PEERS:
        try:
            peer_compress, peer_decompress = make()
        except ImportError:
            continue
        codec = CODEC_TABLE[codec_id]
        ours, theirs = bytes(codec.compress(BODY)), bytes(peer_compress(BODY))
        if bytes(codec.decompress(theirs, _LIMIT)) != BODY or bytes(peer_decompress(ours)) != BODY:
            raise AssertionError(f"{codec.name} and {peer_name} do not read each other's data")
        for work, sizes, functions, data in (
            ("compress", f" ({len(ours)} B)", (codec.compress, peer_compress), BODY),
            ("decompress", "", (lambda data, codec=codec: codec.decompress(data, _LIMIT), peer_decompress), ours),
        ):
            sides = (Side("klog"), Side(peer_name + (f" ({len(theirs)} B)" if sizes else "")))
            for _ in range(bench.repeat + 1):
                for side, function in zip(sides, functions, strict=True):
                    speed = _speed(function, data)
                    side.add(speed)
            yield Result(f"{codec.name} {work}{sizes}, {peer_name}", "MB/s", *sides, bench.command)


CODECS = Work(
    "codecs",
    _codecs,
    (
        f"Codecs: one process, one core, a body of {len(BODY)} B of JSON log lines at each codec's default level; "
        "MB of it a second. In brackets the compressed size.",
    ),
)
