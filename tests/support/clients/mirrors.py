"""Support for tests of the mirror: read topics with confluent-kafka, and run `klog mirror` as a process."""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, TopicPartition

from tests.support.clients.klog import klog, klog_command

#: Seconds that a test waits for a condition.
SECONDS = 60.0


class Seen(NamedTuple):
    """A record as confluent-kafka reads it; `timestamp` is (type, ms)."""

    key: bytes | None
    value: bytes | None
    timestamp: tuple[int, int]
    headers: tuple[tuple[str, bytes | None], ...]


def read_partition(servers: str, topic: str, partition: int, offset: int = 0) -> list[tuple[int, Seen]]:
    """Return (offset, record) of all committed records from `offset` to the partition's end."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": uuid.uuid4().hex,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # the last fetch, at the end of the partition, waits this long
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    found = []
    try:
        consumer.assign([TopicPartition(topic, partition, offset)])
        deadline = time.monotonic() + SECONDS
        while True:
            assert time.monotonic() < deadline, f"no end of {topic}-{partition} after {len(found)} records"
            message = consumer.poll(1)
            if message is None:
                continue
            error = message.error()
            if error is not None:
                assert error.code() == KafkaError._PARTITION_EOF, error
                return found
            headers = tuple(message.headers() or ())
            seen = Seen(message.key(), message.value(), message.timestamp(), headers)
            found.append((message.offset() or 0, seen))
    finally:
        consumer.close()


def read_topic(servers: str, topic: str, partitions: int) -> list[list[Seen]]:
    """All committed records of each partition, in order."""
    return [[seen for _, seen in read_partition(servers, topic, number)] for number in range(partitions)]


def mirror_once(source: str, target: str, *arguments: str) -> dict[str, Any]:
    """Run `klog mirror --until-end`; return its last line of JSON. Asserts that it succeeds."""
    done = klog("mirror", "--from", source, "--to", target, "--until-end", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last


def start_mirror(log: Path, source: str, target: str, *arguments: str) -> subprocess.Popen[str]:
    """Start `klog mirror`, whose standard error goes to `log`."""
    with log.open("a") as errors:
        return subprocess.Popen(
            klog_command("mirror", "--from", source, "--to", target, "--json", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def wait_for(process: subprocess.Popen[str], records: int) -> dict[str, Any]:
    """Read the mirror's JSON lines until one reports at least `records` mirrored records; return that line."""
    assert process.stdout is not None
    for line in process.stdout:
        told: dict[str, Any] = json.loads(line)
        if told["records"] >= records:
            return told
    raise AssertionError(f"the mirror ended with {process.wait(SECONDS)}")
