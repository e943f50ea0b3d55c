"""The mirror, and a plain copy of batches as its bound."""

from __future__ import annotations

import itertools
import logging
import socket
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from confluent_kafka import Consumer, KafkaException, TopicPartition

from benchmarks.brokers import Broker, broker_pair, check_count, create_topic
from benchmarks.data import PARTITIONS, RECORD_SIZE, produce
from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.record_batches import take_turns
from benchmarks.sides import SideFailed
from spark_klog.client.settings import parse_bootstrap
from spark_klog.protocol.apis import FETCH, PRODUCE
from spark_klog.protocol.codec import decode_response, encode_request
from spark_klog.records.formats.batch import iter_batches, next_offset_after
from spark_klog.records.formats.batch_v2 import set_produced
from spark_klog.wire.primitives import SIZE
from tests.support.clients.klog import klog_command
from tests.support.servers.kafka import kafka_libs
from tests.support.servers.mirror_maker import mirror_maker, mirror_maker_libs

log = logging.getLogger(__name__)
_FETCH, _PRODUCE = 4, 3
_FETCH_BYTES = 4 * 1024 * 1024
_IN_FLIGHT = 5
_COPY_SECONDS = 120.0
_TOPIC = "bench"
_SECONDS = 1800.0


class _Plain:
    """A socket that sends frames, and receives them into one buffer."""

    def __init__(self, servers: str) -> None:
        [address] = parse_bootstrap(servers)
        self._socket = socket.create_connection(address, _COPY_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(2 * PARTITIONS * _FETCH_BYTES))

    def send(self, frame: bytes) -> None:
        self._socket.sendall(frame)

    def receive(self) -> memoryview:
        """Return the next response, valid until the next call."""
        [size] = SIZE.unpack(self._exactly(SIZE.size))
        return self._exactly(size)

    def _exactly(self, size: int) -> memoryview:
        filled = 0
        while filled < size:
            received = self._socket.recv_into(self._buffer[filled:size])
            if not received:
                raise SideFailed("the broker closed the connection")
            filled += received
        return self._buffer[:size]

    def close(self) -> None:
        self._socket.close()


def plain_copy(source: str, target: str, topic: str, copy: str) -> float:
    """Copy a topic of `PARTITIONS` partitions to a topic of another broker; return the seconds."""
    read: list[list[bytes]] = []
    reading = _Plain(source)
    seconds = 0.0
    for partition in range(PARTITIONS):
        parts, taken = _read(reading, topic, partition)
        seconds += taken
        read.append(parts)
    reading.close()
    frames = list(_frames(copy, [[bytes(_produced(one)) for part in parts for one in _split(part)] for parts in read]))
    writing = _Plain(target)
    started = time.perf_counter()
    waiting: deque[int] = deque()
    answers = []
    for frame in frames:
        writing.send(frame)
        waiting.append(0)
        if len(waiting) == _IN_FLIGHT:
            waiting.popleft()
            answers.append(bytes(writing.receive()))
    while waiting:
        waiting.popleft()
        answers.append(bytes(writing.receive()))
    seconds += time.perf_counter() - started
    writing.close()
    for answer in answers:
        for entry in decode_response(PRODUCE, _PRODUCE, memoryview(answer))[1]["responses"]:
            for one in entry["partition_responses"]:
                if one["error_code"]:
                    raise SideFailed(f"error {one['error_code']} of {copy}-{one['index']}")
    return seconds


def _read(plain: _Plain, topic: str, partition: int) -> tuple[list[bytes], float]:
    """Read the whole batches of a partition; return them and the seconds of sending and receiving."""
    offset, found, seconds = 0, [], 0.0
    while True:
        entry = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": _FETCH_BYTES}
        request = {
            "max_wait_ms": 0,
            "min_bytes": 0,
            "max_bytes": _FETCH_BYTES,
            "isolation_level": 0,
            "topics": [{"topic": topic, "partitions": [entry]}],
        }
        frame = _framed(encode_request(FETCH, _FETCH, 1, "plain", request).to_bytes())
        started = time.perf_counter()
        plain.send(frame)
        answer = plain.receive()
        seconds += time.perf_counter() - started
        records = decode_response(FETCH, _FETCH, answer)[1]["responses"][0]["partitions"][0]["records"]
        if not records:
            return found, seconds
        offset = next_offset_after(records, offset)
        found.append(bytes(records))


def _split(part: bytes) -> Iterator[memoryview]:
    for _, batch in iter_batches(part):
        yield batch


def _produced(batch: memoryview) -> bytearray:
    data = bytearray(batch)
    set_produced(memoryview(data), -1, -1, -1, is_transactional=False)
    return data


def _frames(topic: str, batches: list[list[bytes]]) -> Iterator[bytes]:
    """Produce requests with one batch of each partition, as brokers accept only one."""
    for number in range(max(map(len, batches))):
        entries = [
            {"index": partition, "records": of_partition[number]}
            for partition, of_partition in enumerate(batches)
            if number < len(of_partition)
        ]
        message = {
            "transactional_id": None,
            "acks": -1,
            "timeout_ms": 30_000,
            "topic_data": [{"name": topic, "partition_data": entries}],
        }
        yield _framed(encode_request(PRODUCE, _PRODUCE, 1, "plain", message).to_bytes())


def _framed(frame: bytes) -> bytes:
    return SIZE.pack(len(frame)) + frame


def _mirror(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("mirror")
    libs = kafka_libs("3.9.1")
    maker = mirror_maker_libs()
    numbers = itertools.count()
    with broker_pair(folder) as (source, target):
        create_topic(source.bootstrap_servers, _TOPIC)
        produce(libs, source.bootstrap_servers, _TOPIC, bench.records, "lz4", folder)
        check_count(source, _TOPIC, bench.records)

        def plain() -> float:
            copy = f"plain{next(numbers)}.{_TOPIC}"
            create_topic(target.bootstrap_servers, copy)
            seconds = plain_copy(source.bootstrap_servers, target.bootstrap_servers, _TOPIC, copy)
            check_count(target, copy, bench.records)
            return _rate("plain sockets", bench.records, seconds)

        def ours(work: Side, *more: str) -> float:
            """Return the rate of the whole command; add the rate without its start and end to `work`."""
            name = f"klog{next(numbers)}"
            seconds = _klog(source, target, name, *more)
            idle = _klog(source, target, name, *more)
            check_count(target, f"{name}.{_TOPIC}", bench.records + (0 if not more else _extra(target, name, bench)))
            figure = _rate(f"{work.name} {' '.join(more)}", bench.records, seconds - idle)
            work.add(figure)
            return _rate(f"klog {' '.join(more)}", bench.records, seconds)

        def theirs() -> float:
            return _rate("MirrorMaker 2", *_mirror_maker(maker, source, target, f"m{next(numbers)}", bench, folder))

        whole = [Side("klog"), Side("klog, --exactly-once")]
        works = [Side("klog, without its start"), Side("klog, --exactly-once, without its start")]
        maker_2, sockets = Side("MirrorMaker 2 of 3.9.1"), Side("plain sockets")
        runs = [lambda: ours(works[0]), lambda: ours(works[1], "--exactly-once"), theirs, plain]
        take_turns(list(zip([*whole, maker_2, sockets], runs, strict=True)), bench.repeat)
        records = f"{bench.records:,} records of {RECORD_SIZE} B, lz4"
        for sides, what in ((whole, ""), (works, ", without its start")):
            for klog, command in zip(sides, ("klog mirror", "klog mirror --exactly-once"), strict=True):
                for peer in (maker_2, sockets):
                    name = f"{command}{what}, {records}, and {peer.name}"
                    yield Result(name, "M records/s", klog, peer, bench.command)


def _rate(name: str, records: int, seconds: float) -> float:
    rate = records / seconds / 1e6
    log.info("%s: %.3f M records/s", name, rate)
    return rate


def _klog(source: Broker, target: Broker, name: str, *more: str) -> float:
    """Seconds of the whole command, from its start to its end."""
    sides = ("--from", source.bootstrap_servers, "--to", target.bootstrap_servers)
    command = klog_command("mirror", *sides, "--topics", _TOPIC, "--name", name, "--prefix", f"{name}.", *more)
    started = time.perf_counter()
    done = subprocess.run([*command, "--until-end"], capture_output=True, text=True, timeout=_SECONDS)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SideFailed(f"klog mirror ended with {done.returncode}: {done.stderr[-1000:]}")
    return seconds


def _extra(target: Broker, name: str, bench: Bench) -> int:
    """The number of transaction markers at the target."""
    return sum(_ends(target, f"{name}.{_TOPIC}")) - bench.records


def _mirror_maker(
    libs: Path, source: Broker, target: Broker, alias: str, bench: Bench, folder: Path
) -> tuple[int, float]:
    """Return the number of records, and the seconds from the first ones at the target to the last."""
    topic = f"{alias}.{_TOPIC}"
    # the same settings as the source topic was written with
    more = {
        "target.producer.compression.type": "lz4",
        "target.producer.batch.size": "65536",
        "target.producer.linger.ms": "20",
    }
    sides = source.bootstrap_servers, target.bootstrap_servers
    with mirror_maker(libs, *sides, alias, _TOPIC, folder, more, PARTITIONS) as process:
        first: tuple[int, float] | None = None
        until = time.perf_counter() + _SECONDS
        while True:
            now, count = time.perf_counter(), sum(_ends(target, topic))
            if count and first is None:
                first = count, now
            if first is not None and count >= bench.records:
                return count - first[0], max(now - first[1], 0.001)
            if process.poll() is not None or now > until:
                tail = (folder / f"{alias}.log").read_text()[-1000:]
                raise SideFailed(f"MirrorMaker 2 has copied {count} records: {tail}")
            time.sleep(0.05)


def _ends(broker: Broker, topic: str) -> list[int]:
    """The end offsets of the topic's partitions; zeros while it does not exist."""
    consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "bench", "log_level": 2})
    try:
        if topic not in consumer.list_topics(timeout=30).topics:
            return [0]
        places = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
        return [consumer.get_watermark_offsets(place, timeout=30)[1] for place in places]
    except KafkaException:
        return [0]
    finally:
        consumer.close()


MIRROR = Work(
    "mirror",
    _mirror,
    (
        "Mirror: a topic of 4 partitions at our broker, written once by ProducerPerformance (lz4, batches of up to "
        "64 KB), copied into a new topic of Kafka 3.9.1 on the same machine, by each side in turn. klog mirror has one "
        "process and thread. It is timed as a whole command, from its start to its end; without its start means "
        "that the seconds of the same command are taken off that is run again, with nothing to copy.",
        "MirrorMaker 2 of 3.9.1 is a process of its own with 4 tasks and the settings of the producer that wrote the "
        "topic; it is timed from the first records at the target to the last, without the start of its JVM.",
        "Plain sockets: all bytes are read by Fetch requests, then written by Produce requests that were made before "
        "(a batch a partition, 5 in flight, no idempotence); only sending and receiving is timed. Wanted: 5 times "
        "MirrorMaker 2, 0.7 of plain sockets.",
    ),
)
