"""`klog mirror`, Kafka's MirrorMaker 2, and plain sockets that copy the same bytes."""

from __future__ import annotations

import itertools
import logging
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from confluent_kafka import Consumer, KafkaException, TopicPartition

from benchmarks.broker_pair import broker_pair, check_count, create_topic
from benchmarks.broker_process import Broker
from benchmarks.data import PARTITIONS, RECORD_SIZE, produce
from benchmarks.figures import Result, Side
from benchmarks.plain_copy import plain_copy
from benchmarks.record_batches import take_turns
from benchmarks.sides import SideFailed
from benchmarks.work import Bench, Work
from tests.support.kafka import kafka_libs
from tests.support.klog import klog_command
from tests.support.mirror_maker import mirror_maker, mirror_maker_libs

log = logging.getLogger(__name__)

_TOPIC = "bench"
_SECONDS = 1800.0


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
            if work.cold is None:
                work.cold = figure
            else:
                work.samples.append(figure)
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
