"""kcat 1.7.1 (librdkafka 2.0.2)."""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from itertools import groupby

from tests.support.clients.client import SECONDS, SESSION_MS, Client, Member, Record, Seen
from tests.support.clients.tools import kcat, kcat_path

_KEY, _END = b"|key|", b"|end|"
_REBALANCED = re.compile(rb"rebalanced .*?: (assigned|revoked):?(.*)")
_PARTITION = re.compile(rb"\[(\d+)\]")
_FIELDS = re.compile(rb"@(\d+) (\d+) (-?\d+) (-?\d+) (-?\d+) ([^\n]*)\n")


class Kcat(Client):
    name = "kcat"
    has_admin = False
    sets_timestamps = False
    commits_when_leaving = True
    has_null_headers = False

    def create(self, topic: str, partitions: int) -> None:
        kcat("-L", "-b", self.servers, "-t", topic)

    def produce(self, topic: str, partition: int, codec: str, records: Sequence[Record]) -> None:
        for (headers, has_nulls), together in groupby(records, lambda record: (record.headers, _has_nulls(record))):
            group = list(together)
            # One batch for all records: librdkafka does not compress if that saves nothing.
            arguments = ["-P", "-b", self.servers, "-t", topic, "-p", str(partition), "-z", codec, "-X", "acks=all"]
            arguments += [
                "-X",
                "linger.ms=60000",
                "-X",
                f"batch.num.messages={len(group)}",
                "-K",
                _KEY.decode(),
                "-D",
                _END.decode(),
                *(["-Z"] if has_nulls else []),
            ]
            for name, value in headers:
                arguments += ["-H", f"{name}={(value or b'').decode()}"]
            messages = [(record.key or b"") + _KEY + (record.value or b"") for record in group]
            kcat(*arguments, stdin=_END.join(messages))

    def consume(self, topic: str, starts: Mapping[int, int], count: int) -> list[Seen]:
        """Read each partition to its end, where kcat stops; ignores `count`."""
        found = []
        for partition, offset in starts.items():
            source = ("-b", self.servers, "-t", topic, "-p", str(partition), "-o", str(offset))
            settings = ("-X", "check.crcs=true", "-X", "fetch.wait.max.ms=20")
            output = kcat("-C", *source, "-e", "-q", *settings, "-f", r"@%p %o %T %K %S %h\n%k%s")
            found += _parsed(output)
        return found

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        answer = kcat("-Q", "-b", self.servers, "-t", f"{topic}:{partition}:{timestamp}")
        return int(answer.split()[-1])

    def member(self, topic: str, group: str, session_ms: int = SESSION_MS) -> Member:
        return _Member(self.servers, topic, group, session_ms)


class _Member(Member):
    """A process that auto-commits ten times a second."""

    def __init__(self, servers: str, topic: str, group: str, session_ms: int) -> None:
        settings = (
            f"session.timeout.ms={session_ms}",
            "auto.offset.reset=earliest",
            "auto.commit.interval.ms=100",
            "heartbeat.interval.ms=200",
        )
        options = [word for setting in settings for word in ("-X", setting)]
        self._process = subprocess.Popen(
            [kcat_path(), "-b", servers, *options, "-u", "-f", r"%p,%o\n", "-G", group, topic],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._partitions: set[int] = set()
        self._rest = {True: b"", False: b""}

    def poll(self, seconds: float) -> tuple[set[int], list[tuple[int, int]]]:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        found: list[tuple[int, int]] = []
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([self._process.stdout, self._process.stderr], [], [], left)
            for pipe in readable:
                is_output = pipe is self._process.stdout
                *lines, self._rest[is_output] = (self._rest[is_output] + os.read(pipe.fileno(), 65536)).split(b"\n")
                for line in lines:
                    if is_output:
                        partition, offset = line.split(b",")
                        found.append((int(partition), int(offset)))
                    elif assigned := _REBALANCED.search(line):
                        numbers = {int(number) for number in _PARTITION.findall(assigned.group(2))}
                        self._partitions = numbers if assigned.group(1) == b"assigned" else set()
        return self._partitions, found

    def commit(self) -> None:
        time.sleep(0.5)

    def leave(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=SECONDS)


def _has_nulls(record: Record) -> bool:
    return record.key is None or record.value is None


def _parsed(output: bytes) -> list[Seen]:
    found = []
    position = 0
    while position < len(output):
        fields = _FIELDS.match(output, position)
        assert fields is not None, output[position : position + 200]
        partition, offset, timestamp, key_size, value_size = (int(number) for number in fields.groups()[:5])
        middle = fields.end() + max(key_size, 0)
        position = middle + max(value_size, 0)
        key, value = output[fields.end() : middle], output[middle:position]
        record = Record(
            timestamp, key if key_size >= 0 else None, value if value_size >= 0 else None, _headers(fields.group(6))
        )
        found.append(Seen(partition, offset, record))
    return found


def _headers(text: bytes) -> tuple[tuple[str, bytes | None], ...]:
    """Parse NAME=VALUE,...; the word NULL is a null value."""
    pairs = [header.partition(b"=") for header in text.split(b",")] if text else []
    return tuple((name.decode(), None if value == b"NULL" else value) for name, _, value in pairs)
