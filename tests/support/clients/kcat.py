"""kcat 1.7.1 (librdkafka 2.0.2)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby

from tests.support.clients.client import Client, Record, Seen
from tests.support.tools import kcat

_KEY, _END = b"|key|", b"|end|"
_FIELDS = re.compile(rb"@(\d+) (\d+) (-?\d+) (-?\d+) (-?\d+) ([^\n]*)\n")


class Kcat(Client):
    name = "kcat"
    has_admin = False
    sets_timestamps = False
    has_null_headers = False

    def create(self, topic: str, partitions: int) -> None:
        kcat("-L", "-b", self.servers, "-t", topic)

    def produce(self, topic: str, partition: int, codec: str, records: Sequence[Record]) -> None:
        for (headers, has_nulls), group in groupby(records, lambda record: (record.headers, _has_nulls(record))):
            arguments = ["-P", "-b", self.servers, "-t", topic, "-p", str(partition), "-z", codec, "-X", "acks=all"]
            arguments += [
                "-X",
                "linger.ms=50",
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
        """All that is there: kcat ends at the end of the partition."""
        found = []
        for partition, offset in starts.items():
            place = ("-b", self.servers, "-t", topic, "-p", str(partition), "-o", str(offset))
            settings = ("-X", "check.crcs=true", "-X", "fetch.wait.max.ms=20")
            output = kcat("-C", *place, "-e", "-q", *settings, "-f", r"@%p %o %T %K %S %h\n%k%s")
            found += _parsed(output)
        return found

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        answer = kcat("-Q", "-b", self.servers, "-t", f"{topic}:{partition}:{timestamp}")
        return int(answer.split()[-1])


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
    """NAME=VALUE,...; a value that is null is the word NULL."""
    pairs = [header.partition(b"=") for header in text.split(b",")] if text else []
    return tuple((name.decode(), None if value == b"NULL" else value) for name, _, value in pairs)
