"""Topics with log-like records, written by Kafka's own ProducerPerformance."""

from __future__ import annotations

import json
import logging
import random
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

RECORD_SIZE = 100
PARTITIONS = 4
_LINES = 10_000
_RATE = re.compile(r"records sent, ([\d.]+) records/sec")
_WORDS = ["request", "served", "from", "cache", "order", "paid", "by", "card", "user", "retry", "timeout"]


class ToolFailed(Exception):
    """One of Kafka's tools ended with an error."""


def payload_file(folder: Path, size: int = RECORD_SIZE) -> Path:
    """Write a file of distinct JSON lines, each `size` bytes of ASCII, the same on every run."""
    path = folder / f"payload-{size}.jsonl"
    if not path.exists():
        count = max(100, _LINES * RECORD_SIZE // size)
        path.write_text("".join(f"{_line(number, size)}\n" for number in range(count)))
    return path


def _line(number: int, size: int) -> str:
    chance = random.Random(number)
    fields: dict[str, object] = {
        "ts": 1_700_000_000_000 + number * 17,
        "level": chance.choice(["INFO", "INFO", "INFO", "WARN", "ERROR"]),
        "host": f"web-{chance.randrange(20):02d}",
        "ms": chance.randrange(2000),
    }
    text = " ".join(chance.choices(_WORDS, k=size // 5))
    room = size - len(json.dumps({**fields, "msg": ""}, separators=(",", ":")))
    return json.dumps({**fields, "msg": text[:room]}, separators=(",", ":"))


def create_topic(libs: Path, bootstrap_servers: str, topic: str) -> None:
    """Create a topic with PARTITIONS partitions on any broker."""
    arguments = ["--create", "--topic", topic, "--partitions", str(PARTITIONS), "--replication-factor", "1"]
    run_java(f"{libs}/*", "org.apache.kafka.tools.TopicCommand", "--bootstrap-server", bootstrap_servers, *arguments)


def produce(
    libs: Path, bootstrap_servers: str, topic: str, records: int, codec: str, folder: Path, size: int = RECORD_SIZE
) -> None:
    """Fill a topic. The tool reports failed sends, but succeeds: readers must count the records."""
    properties = {
        "compression.type": codec,
        "batch.size": "65536",
        "linger.ms": "20",
        # the same for both sides; clients.py measures idempotence with acks=all
        "enable.idempotence": "false",
    }
    producer_performance(libs, bootstrap_servers, topic, records, folder, size, properties)


def producer_performance(
    libs: Path,
    bootstrap_servers: str,
    topic: str,
    records: int,
    folder: Path,
    size: int,
    properties: Mapping[str, str],
) -> float:
    """Return the records per second that the tool prints. It reports failed sends, but succeeds: count the records."""
    output = run_java(
        f"{libs}/*",
        "org.apache.kafka.tools.ProducerPerformance",
        *("--topic", topic, "--num-records", str(records), "--throughput", "-1"),
        *("--payload-file", str(payload_file(folder, size)), "--producer-props"),
        *(f"{name}={value}" for name, value in {"bootstrap.servers": bootstrap_servers, **properties}.items()),
    )
    last = output.strip().splitlines()[-1]
    log.info("filled %s: %s", topic, last)
    found = _RATE.search(last)
    if found is None:
        raise ToolFailed(f"ProducerPerformance ended with {last!r}")
    return float(found[1])


def run_java(class_path: str, class_name: str, *arguments: str, timeout: float = 1200) -> str:
    """Run a class and return its output; raise `ToolFailed` if it fails."""
    try:
        done = subprocess.run(
            ["java", "-Xmx512m", "-cp", class_path, class_name, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise ToolFailed(f"{class_name} did not end in {timeout:.0f} s") from None
    if done.returncode != 0 or not done.stdout.strip():
        raise ToolFailed(f"{class_name} ended with {done.returncode}: {done.stdout[-1500:]}")
    return done.stdout
