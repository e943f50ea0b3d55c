"""`klog bench`: how fast a cluster takes and gives records from here."""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from spark_klog.base.extras import require
from spark_klog.cli.clusters import ChosenCluster, cluster_options
from spark_klog.cli.output import Bar, print_table, reading_arguments
from spark_klog.client import Admin, Consumer, Producer
from spark_klog.client.offsets import list_offsets
from spark_klog.client.settings import without_ids
from spark_klog.errors import ConfigError, ErrorCode, KlogError, ProtocolError
from spark_klog.protocol.tables.records import LATEST

_CHUNK_BYTES = 1 << 20
_MOST_BYTES = 1 << 30
_POLL_SECONDS = 0.5
#: The longest wait for a record that is written and does not come.
_MISSING_SECONDS = 30.0
#: Seconds after which no further latency is measured.
_PROBE_SECONDS = 10.0
#: How the settings begin that the consumer and the admin client need as well.
_OF_CONNECTIONS = ("bootstrap.servers", "security.protocol", "ssl.", "sasl.", "enable.ssl.", "https.")


@click.command(
    epilog="""\b
Examples:
  klog bench -b broker:9092                        a topic of its own, deleted at the end
  klog bench -n 5000000 -s 1000 -z zstd --partitions 6 --replication-factor 3
  klog bench --acks 1 --json | jq .produce.recordsPerSecond
  klog bench --topic clicks-test --existing        write into a topic that is there
"""
)
@click.option(
    "--records", "-n", default=200_000, show_default=True, type=click.IntRange(1), metavar="N", help="Records to write."
)
@click.option(
    "--size", "-s", default=100, show_default=True, type=click.IntRange(1, _MOST_BYTES), help="Bytes of a value."
)
@click.option("--topic", metavar="NAME", help="Create this topic, in place of one with a name by chance.")
@click.option("--existing", is_flag=True, help="Write into --topic although it exists; its records stay.")
@click.option("--partitions", default=1, show_default=True, type=click.IntRange(1), help="Of a created topic.")
@click.option("--replication-factor", default=1, show_default=True, type=click.IntRange(1), help="Of a created topic.")
@click.option(
    "--compression", "-z", metavar="CODEC", help="gzip, snappy, lz4, zstd or none; default: compression.type."
)
@click.option("--acks", type=click.Choice(["0", "1", "all"]), help="Default: the setting acks, else all.")
@click.option(
    "--probes", default=200, show_default=True, type=click.IntRange(0, 10_000), help="Records sent alone for latency."
)
@click.option("--keep", is_flag=True, help="Do not delete the created topic.")
@click.option(
    "--set",
    "-X",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="A producer setting; repeatable. Those of connections are for all.",
)
@cluster_options
def bench(
    records: int,
    size: int,
    topic: str | None,
    existing: bool,
    partitions: int,
    replication_factor: int,
    compression: str | None,
    acks: str | None,
    probes: int,
    keep: bool,
    settings: tuple[str, ...],
    cluster: ChosenCluster,
    as_json: bool,
) -> None:
    """Measure how fast this machine writes records to a cluster and reads them, and their latency.

    First records are sent one at a time: the times until the broker acknowledges a record and until a consumer has it.
    Then N records are written and read as Arrow batches. Values are random hexadecimal digits, which codecs shrink to
    about half. MB are 1,000,000 bytes of values. The topic is deleted at the end, and after Ctrl-C.
    """
    if existing and topic is None:
        raise click.UsageError("--existing needs --topic")
    if existing and keep:
        raise click.UsageError(
            "--keep is for a topic that klog bench creates: it never deletes one that existed before"
        )
    require("klog bench", "pyarrow")
    shared = without_ids(cluster.local_settings())
    given = cluster.set_settings(settings)
    shared |= {name: value for name, value in given.items() if name.startswith(_OF_CONNECTIONS)}
    own = {"linger.ms": "0", **shared, **given}
    if compression is not None:
        own["compression.type"] = compression
    if acks is not None:
        own["acks"] = acks
    if "transactional.id" in own:
        raise click.UsageError("--set transactional.id: klog bench writes without transactions")
    name = topic or f"klog-bench-{secrets.token_hex(4)}"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with reading_arguments():
        clients = Producer(own), Admin(shared)
    with clients[0] as producer, clients[1] as admin:
        # in this order: the topic is deleted while the connections are there, and nothing of the producer follows
        with _topic(admin, name, existing, keep, partitions, replication_factor):
            count, speeds, latency = _measure(admin, producer, shared, name, records, size, probes)
    head = {
        "topic": name,
        "partitions": count,
        "records": records,
        "size": size,
        "compression": own.get("compression.type", "none"),
        "acks": own.get("acks", "all"),
    }
    if as_json:
        click.echo(json.dumps({**head, **speeds, "latencyMs": latency}))
        return
    said = "{topic}, partitions: {partitions}, compression: {compression}, acks: {acks}, values of {size:,} bytes"
    click.echo(said.format(**head))
    rows = [
        (kind, f"{records:,}", f"{speed['seconds']:.2f}", f"{speed['recordsPerSecond']:,}", f"{speed['mbPerSecond']:,}")
        for kind, speed in speeds.items()
    ]
    print_table(("", "records", "seconds", "records/s", "MB/s"), rows)
    if latency:
        print_table(
            ("a record alone is", "p50 ms", "p99 ms", "probes"),
            [(kind, str(one["p50"]), str(one["p99"]), str(one["probes"])) for kind, one in latency.items()],
        )


@contextmanager
def _topic(
    admin: Admin, name: str, is_existing: bool, is_kept: bool, partitions: int, replication_factor: int
) -> Iterator[None]:
    """Create the topic, and delete it at the end; `ConfigError` if it is there, or is not."""
    if is_existing:
        admin.describe_topic(name)
        yield
        return
    is_ours = True
    try:
        try:
            admin.create_topic(name, partitions, replication_factor=replication_factor)
        except ProtocolError as error:
            is_ours = False
            if error.code == ErrorCode.TOPIC_ALREADY_EXISTS:
                raise ConfigError(
                    f"topic {name} exists, and klog bench would leave its records in it: give another --topic, or "
                    "--existing if that is what you want"
                ) from None
            raise
        yield
    finally:
        if is_ours and not is_kept:
            _delete(admin, name)


def _delete(admin: Admin, name: str) -> None:
    """Delete the topic; a second Ctrl-C or an error names what is left."""
    try:
        (error,) = admin.delete_topics([name]).values()
    except (KlogError, OSError, KeyboardInterrupt) as raised:
        error = raised if isinstance(raised, KlogError) else KlogError(str(raised) or "interrupted")
    if isinstance(error, ProtocolError) and error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        return  # interrupted before it was created
    if error is not None:
        click.echo(f"klog: topic {name} is left, delete it by `klog topics delete {name}`: {error}", err=True)


def _measure(
    admin: Admin,
    producer: Producer,
    settings: dict[str, str],
    topic: str,
    records: int,
    size: int,
    probes: int,
) -> tuple[int, dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """The number of partitions, the figures of the two phases, and those of the latencies, by what was waited for."""
    reading = {**settings, "enable.auto.commit": "false", "auto.offset.reset": "earliest"}
    numbers = list(admin.cluster.partitions([topic])[topic])
    latest = {(topic, number): LATEST for number in numbers}
    with Consumer(reading) as consumer:
        first = (topic, numbers[0])
        consumer.assign([(*first, list_offsets(admin.cluster, {first: LATEST})[first])])
        with Bar("latency", probes) as bar:
            latencies = _probe(producer, consumer, topic, numbers[0], size, probes, bar)
        starts = list_offsets(admin.cluster, latest)
        with Bar("produce", records) as bar:
            produced = _produce(producer, topic, records, size, bar)
        with Bar("consume", records) as bar:
            consumed = _consume(consumer, starts, records, bar)
    speeds = {"produce": _speed(records, size, produced), "consume": _speed(records, size, consumed)}
    return len(numbers), speeds, {kind: _latency(times) for kind, times in latencies.items() if times}


def _probe(
    producer: Producer, consumer: Consumer, topic: str, partition: int, size: int, count: int, bar: Bar
) -> dict[str, list[float]]:
    """Send records one at a time; seconds until each is acknowledged, and until the consumer has it."""
    acknowledged: list[float] = []
    delivered: list[float] = []
    value, run = _value(size), secrets.token_hex(8)
    until = time.monotonic() + _PROBE_SECONDS
    for number in range(count):
        if time.monotonic() > until:
            break
        key = f"{run}-{number}".encode()
        began = time.perf_counter()
        confirmed: list[float] = []
        delivery = producer.send(
            topic, value, key, partition, on_delivery=lambda *_, to=confirmed: to.append(time.perf_counter())
        )
        _await(consumer, key)
        delivered.append(time.perf_counter() - began)
        delivery.result(_MISSING_SECONDS)
        producer.flush()  # after it the callback was called
        acknowledged.append(confirmed[0] - began)
        bar.update(number + 1)
    return {"acknowledged": acknowledged, "delivered": delivered}


def _await(consumer: Consumer, key: bytes) -> None:
    """Read until the record with this key; `KlogError` if it does not come."""
    deadline = time.monotonic() + _MISSING_SECONDS
    while time.monotonic() < deadline:
        batch = consumer.poll_arrow(_POLL_SECONDS)
        if batch is not None and key in batch.column("key").to_pylist():
            return
    raise KlogError(f"a record was written and did not come back within {_MISSING_SECONDS:.0f} s")


def _produce(producer: Producer, topic: str, records: int, size: int, bar: Bar) -> float:
    """Write the records, and return the seconds until all are acknowledged."""
    import pyarrow as pa

    rows = max(1, min(records, _CHUNK_BYTES // size))
    table = pa.table({"value": pa.array([_value(size) for _ in range(rows)], pa.large_binary())})
    began, left = time.perf_counter(), records
    while left:
        count = min(rows, left)
        producer.send_arrow(table.slice(0, count), topic)
        left -= count
        bar.update(records - left)
    producer.flush()
    return time.perf_counter() - began


def _consume(consumer: Consumer, starts: dict[tuple[str, int], int], records: int, bar: Bar) -> float:
    """Read the records, and return the seconds; `KlogError` if some do not come."""
    began = time.perf_counter()
    consumer.assign([(*key, start) for key, start in starts.items()])
    left, deadline = records, time.monotonic() + _MISSING_SECONDS
    while left > 0:
        batch = consumer.poll_arrow(_POLL_SECONDS)
        if batch is not None:
            left -= batch.num_rows
            deadline = time.monotonic() + _MISSING_SECONDS
            bar.update(records - left)
        elif time.monotonic() > deadline:
            raise KlogError(f"{left:,} of {records:,} records did not come back within {_MISSING_SECONDS:.0f} s")
    return time.perf_counter() - began


def _value(size: int) -> bytes:
    return os.urandom(size // 2 + 1).hex()[:size].encode()


def _speed(records: int, size: int, seconds: float) -> dict[str, float]:
    return {
        "seconds": round(seconds, 3),
        "recordsPerSecond": round(records / seconds),
        "mbPerSecond": round(records * size / seconds / 1e6, 2),
    }


def _latency(seconds: Sequence[float]) -> dict[str, float]:
    """In ms; a percentile is the smallest time that so many of the probes did not exceed."""
    ordered = sorted(seconds)
    ranks = {"p50": 0.5, "p99": 0.99}
    times = {name: ordered[math.ceil(part * len(ordered)) - 1] for name, part in ranks.items()}
    return {"probes": len(ordered), **{name: round(1000 * each, 3) for name, each in times.items()}}
