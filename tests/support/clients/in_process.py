"""Run a Python client's group member in a process that can be killed; it takes the group commands of process.py.

python -m tests.support.clients.in_process CLASS SERVERS
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import ClassVar

from tests.support.clients.client import Client, Member
from tests.support.clients.confluent import Confluent
from tests.support.clients.kafka_python import KafkaPython
from tests.support.clients.process import ProcessClient

_CLIENTS: dict[str, type[Client]] = {kind.__name__: kind for kind in (Confluent, KafkaPython)}


class _InProcess(ProcessClient):
    kind: ClassVar[type[Client]]

    def command(self) -> tuple[list[str], Mapping[str, str]]:
        return [sys.executable, "-m", __name__, self.kind.__name__], os.environ


class ConfluentProcess(_InProcess):
    name, kind = Confluent.name, Confluent


class KafkaPythonProcess(_InProcess):
    name, kind = KafkaPython.name, KafkaPython


def main(name: str, servers: str) -> None:
    client = _CLIENTS[name](servers)
    member: Member | None = None
    for line in sys.stdin:
        request, *words = line.split()
        answer = "ok"
        try:
            if request == "join":
                member = client.member(*words[:2], session_ms=int(words[2]))
            else:
                assert member is not None
                answer = _answer(member, request, words)
        except Exception as error:
            answer = f"error {type(error).__name__} {error}".replace("\n", " ")
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _answer(member: Member, request: str, words: list[str]) -> str:
    if request == "poll":
        has, came = member.poll(int(words[0]) / 1000)
        return " ".join(["ok", *map(str, has), "|", *(f"{partition},{offset}" for partition, offset in came)])
    if request == "leave":
        member.leave()
        return "ok"
    try:
        member.commit()
    except Exception as error:
        return f"ok refused {type(error).__name__}"
    return "ok"


if __name__ == "__main__":
    main(*sys.argv[1:])
