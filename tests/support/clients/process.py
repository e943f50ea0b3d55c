"""Clients in other languages, run as a process that takes commands.

A command is a line of words; the answer is a line that begins with `ok` or `error`:

    create TOPIC PARTITIONS                     ok
    produce TOPIC PARTITION CODEC RECORD...     ok OFFSET...
    consume TOPIC COUNT PARTITION:OFFSET...     ok PARTITION,OFFSET,RECORD...
    offset-at TOPIC PARTITION TIMESTAMP         ok OFFSET
    join TOPIC GROUP SESSION_MS [ASSIGNOR]      ok    (one member per process; only Java takes ASSIGNOR)
    join TOPIC GROUP consumer                   ok    (the member uses the consumer protocol)
    poll MILLISECONDS                           ok PARTITION... | PARTITION,OFFSET...    (owned, received)
    commit                                      ok [refused REASON]
    leave                                       ok

    RECORD is TIMESTAMP,KEY,VALUE followed by ,NAME:VALUE for each header. Bytes, and header names as UTF-8, are in
    base64; `-` is null, `=` is empty. The process ends when its standard input ends.
"""

from __future__ import annotations

import base64
import select
import subprocess
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.clients.client import SECONDS, SESSION_MS, Client, Member, Record, Seen

#: Longer than the clients' own timeouts, so that they time out first.
_ANSWER_SECONDS = 2 * SECONDS


class ClientFailed(Exception):
    """A client answered with an error, or its process ended; the text is its message."""


class ProcessClient(Client):
    """A client whose process starts with the first command."""

    _process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> tuple[list[str], Mapping[str, str]]:
        """The command line, to which the servers are appended, and the environment."""

    def create(self, topic: str, partitions: int) -> None:
        self.ask("create", topic, str(partitions))

    def produce(self, topic: str, partition: int, codec: str, records: Sequence[Record]) -> list[int]:
        words = [_record_word(record) for record in records]
        return [int(word) for word in self.ask("produce", topic, str(partition), codec, *words)]

    def consume(self, topic: str, starts: Mapping[int, int], count: int) -> list[Seen]:
        offsets = [f"{partition}:{offset}" for partition, offset in starts.items()]
        return [_seen(word) for word in self.ask("consume", topic, str(count), *offsets)]

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        (offset,) = self.ask("offset-at", topic, str(partition), str(timestamp))
        return int(offset)

    def member(self, topic: str, group: str, session_ms: int = SESSION_MS) -> ProcessMember:
        """Make a member in a process of its own."""
        return ProcessMember(type(self)(self.servers), topic, group, str(session_ms))

    def consumer_member(self, topic: str, group: str) -> ProcessMember:
        return ProcessMember(type(self)(self.servers), topic, group, "consumer")

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.close()
            process.wait(5)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
        process.stdout.close()

    def ask(self, *words: str) -> list[str]:
        """Send a command; return the words of the answer. `ClientFailed` for an error or no answer."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(" ".join(words).encode() + b"\n")
        process.stdin.flush()
        # The process writes one line per answer: after it is read the buffer is empty, so `select` works.
        readable, _, _ = select.select([process.stdout], [], [], _ANSWER_SECONDS)
        answer = process.stdout.readline().decode().split() if readable else ["error", "no", "answer"]
        if answer[:1] != ["ok"]:
            self.close()
            reason = " ".join(answer[1:]) or "it ended; see standard error"
            raise ClientFailed(f"{self.name}, asked to {' '.join(words)[:80]}: {reason}")
        return answer[1:]

    def _start(self) -> subprocess.Popen[bytes]:
        command, environment = self.command()
        self._process = subprocess.Popen(
            [*command, self.servers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
        return self._process


class ProcessMember(Member):
    """The group member of a process."""

    def __init__(self, client: ProcessClient, topic: str, group: str, session: str) -> None:
        self._client = client
        client.ask("join", topic, group, session)

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        self._client.kill()
        self._client.close()

    def poll(self, seconds: float) -> tuple[set[int], list[tuple[int, int]]]:
        has, _, came = " ".join(self._client.ask("poll", str(int(seconds * 1000)))).partition("|")
        records = [word.split(",") for word in came.split()]
        return {int(word) for word in has.split()}, [(int(partition), int(offset)) for partition, offset in records]

    def commit(self) -> None:
        refusal = self._client.ask("commit")
        if refusal:
            raise ClientFailed(f"{self._client.name} could not commit: {refusal}")

    def leave(self) -> None:
        self._client.ask("leave")
        self._client.close()


def _word(data: bytes | None) -> str:
    if data is None:
        return "-"
    return base64.b64encode(data).decode() or "="


def _bytes(word: str) -> bytes | None:
    if word == "-":
        return None
    return b"" if word == "=" else base64.b64decode(word, validate=True)


def _record_word(record: Record) -> str:
    headers = [f"{_word(name.encode())}:{_word(value)}" for name, value in record.headers]
    return ",".join([str(record.timestamp), _word(record.key), _word(record.value), *headers])


def _seen(word: str) -> Seen:
    partition, offset, timestamp, key, value, *headers = word.split(",")
    pairs = []
    for header in headers:
        name, _, data = header.partition(":")
        pairs.append(((_bytes(name) or b"").decode(), _bytes(data)))
    return Seen(int(partition), int(offset), Record(int(timestamp), _bytes(key), _bytes(value), tuple(pairs)))


def sources(folder: str) -> Path:
    """The folder with a client's source, beside this file."""
    return Path(__file__).parent / folder
