"""Describe groups with Kafka's own ConsumerGroupCommand."""

from __future__ import annotations

import subprocess

from tests.support.servers.kafka import kafka_libs

#: CURRENT-OFFSET, LOG-END-OFFSET and LAG by topic and partition.
Figures = dict[tuple[str, int], tuple[int, int, int]]

_TOOL = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"


def seen_by_kafka(servers: str, group: str) -> Figures:
    """Run --describe of Kafka 3.9.1 and parse its table by the headings."""
    java = ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", f"{kafka_libs('3.9.1')}/*"]
    command = [*java, _TOOL, "--bootstrap-server", servers, "--describe", "--group", group]
    command += ["--timeout", "50000"]  # otherwise it gives up after five seconds, with exit code 0
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
    assert any(words[0] == "GROUP" for words in lines), done.stdout + done.stderr
    start = next(number for number, words in enumerate(lines) if words[0] == "GROUP")
    rows = [dict(zip(lines[start], words, strict=True)) for words in lines[start + 1 :]]
    assert {row["GROUP"] for row in rows} == {group}
    return {
        (row["TOPIC"], int(row["PARTITION"])): (
            int(row["CURRENT-OFFSET"]),
            int(row["LOG-END-OFFSET"]),
            int(row["LAG"]),
        )
        for row in rows
    }
