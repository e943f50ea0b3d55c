"""A registry's requests at their largest, in time and memory, beside a client that must be answered all the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import lt
from typing import Any

import pytest

from spark_klog.embedded import EmbeddedCluster
from tests.schemas.registry.asking import ask, record, register, with_default

#: Seconds of each kind of request in `make soak`, on a machine that does nothing else: then answers have a bound, too.
SECONDS = float(os.environ.get("SPARK_KLOG_REGISTRY_SECONDS", "0"))
#: Of what reads, and of all.
_QUIET_P99 = (0.1, 0.5)
#: Seconds within which each of the client's requests is answered, however slow the machine is.
_ANSWERED = 10.0
#: MiB of the registry's process, and of those that it has started.
_MOST_OWN, _MOST_OTHERS = 400, 1100

_Body = dict[str, Any]
_Request = tuple[str, str, _Body | bytes | None]
_MESSAGES = "\n".join(f"message M{n} {{ M{n} a = 1; }}" for n in range(3_000))


def _json(schema: Any, **more: Any) -> _Body:
    return {"schemaType": "JSON", "schema": json.dumps(schema, separators=(",", ":")), **more}


def _avro(schema: Any) -> _Body:
    return {"schema": json.dumps(schema, separators=(",", ":"))}


def _record(name: str, **more: Any) -> _Body:
    return {"type": "record", "name": name, "fields": [], **more}


def _wide_enum(first: int) -> _Body:
    """Each value is compared with each other one."""
    return {"enum": [{"a": [n, {"b": "x" * 500}]} for n in range(first, first + 2_900)]}


def _hard_pattern(letter: str) -> _Body:
    """Patterns that are looked for in a name for ever."""
    names = {letter * 40 + f"{n}!": {"type": "string"} for n in range(20)}
    return {"type": "object", "properties": names, "patternProperties": {f"(({letter}+)+)+{n}$": {} for n in range(20)}}


#: What is registered before, under the name of a subject.
_BEFORE: dict[str, _Body] = {
    "honest": {"schema": record("a")},
    "large": _json({"x": [{}] * 30_000}),
    "pattern": _json(_hard_pattern("a")),
    "union": _avro([_record(f"A{n}") for n in range(150)]),
    "text": _avro(_record("T", doc="x" * 900_000)),
}
_REFERENCES = [{"name": f"r{n}.json", "subject": "large", "version": 1} for n in range(1_000)]
_ALIASES = {"name": "f", "type": "null", "default": None, "aliases": [f"b{n}" for n in range(80_000)]}


def _post(path: str, body: _Body | bytes) -> Callable[[int], _Request]:
    return lambda _: ("POST", path, body)


#: Requests by their kinds, from a number.
_KINDS: dict[str, Callable[[int], _Request]] = {
    "references": _post("/subjects/x", _json({"type": "object"}, references=_REFERENCES)),
    "enum": _post("/subjects/x", _json(_wide_enum(0))),
    "enum in a comparison": _post("/compatibility/subjects/large/versions", _json(_wide_enum(9))),
    "objects in a schema": _post("/subjects/x/versions", _json({"x": [{}] * 1_200_000})),
    "objects beside a schema": _post("/subjects/x", b'{"schema":"1","metadata":{"x":[%s{}]}}' % (b"{}," * 1_200_000)),
    "pattern": _post("/compatibility/subjects/pattern/versions", _json(_hard_pattern("b"))),
    "aliases": lambda n: (
        *("POST", "/subjects/union/versions"),
        _avro(_record(f"R{n}", aliases=[f"A{n}" for n in range(12_000)], fields=[_ALIASES])),
    ),
    "union": lambda n: ("POST", "/subjects/union/versions", _avro([_record(f"A{m}") for m in range(10_000 + n)])),
    "protobuf": _post("/subjects/x", {"schemaType": "PROTOBUF", "schema": f'syntax = "proto3";\n{_MESSAGES}'}),
    "format": lambda _: ("GET", "/schemas?format=resolved", None),
    "text": lambda _: ("GET", "/subjects/text/versions/1?format=resolved", None),
}


@contextmanager
def _hostile(url: str, request: Callable[[int], _Request], count: int) -> Iterator[list[int]]:
    """The statuses of requests that so many clients send again and again."""
    is_over = threading.Event()
    statuses: list[int] = []

    def send(number: int) -> None:
        while not is_over.is_set():
            with suppress(OSError):  # an answer that came before all was sent
                statuses.append(ask(url, *request(number))[0])
            number += count

    for n in range(count):
        threading.Thread(target=send, args=(n,), daemon=True).start()
    try:
        yield statuses
    finally:
        is_over.set()  # nobody waits for their last requests


class _Watch:
    """The most memory that a registry and the processes that it has started take, in MiB."""

    def __init__(self, cluster: EmbeddedCluster) -> None:
        assert cluster._registry is not None
        self._pid = cluster._registry.popen.pid
        self.own = self.others = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._is_over.wait(0.1):
            output = subprocess.run(["ps", "-eo", "pid,ppid,rss"], capture_output=True, check=True).stdout.decode()
            rows = [tuple(map(int, line.split())) for line in output.splitlines()[1:]]
            family = {self._pid}
            while more := {pid for pid, parent, _ in rows if parent in family} - family:
                family |= more
            sizes = {pid: size >> 10 for pid, _, size in rows if pid in family}
            self.own = max(self.own, sizes.pop(self._pid, 0))
            self.others = max(self.others, sum(sizes.values()))

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def _client(url: str, seconds: float, rounds: int) -> dict[str, list[float]]:
    """Seconds until each request of a client is answered, which it does so long and so often at least."""
    body = {"schema": record("a")}
    later = {"schema": record("a", with_default("b"))}
    requests: dict[str, Callable[[int], _Request]] = {
        "read": lambda _: ("GET", "/schemas/ids/1", None),
        "list": lambda _: ("GET", "/subjects?limit=10", None),
        "look-up": lambda _: ("POST", "/subjects/honest", body),
        "check": lambda _: ("POST", "/compatibility/subjects/honest/versions/latest", later),
        "register": lambda n: (
            *("POST", "/subjects/honest-new/versions"),
            {"schema": record(*(with_default(f"f{m}") for m in range(n % 50)))},
        ),
        "configure": lambda _: ("PUT", "/config/other", {"compatibility": "FULL"}),
    }
    took: dict[str, list[float]] = {name: [] for name in requests}
    started, number = time.monotonic(), 0
    while number < rounds or time.monotonic() < started + seconds:
        for name, request in requests.items():
            began = time.monotonic()
            status, answer = ask(url, *request(number))
            while status == 503 and not SECONDS and time.monotonic() < began + _ANSWERED:  # of a busy machine
                status, answer = ask(url, *request(number))
            took[name].append(time.monotonic() - began)
            assert status == 200, (name, answer)
        number += 1
        time.sleep(0.02)
    return took


def _run(cluster: EmbeddedCluster, before: list[str], kinds: list[str], count: int, seconds: float) -> None:
    url = cluster.schema_registry_url
    assert url is not None
    for subject in before:
        body = _BEFORE[subject]
        register(url, subject, body["schema"], body.get("schemaType", "AVRO"))
    _client(url, 0, 1)  # the processes start
    with _Watch(cluster) as watch:
        for kind in kinds:
            with _hostile(url, _KINDS[kind], count) as statuses:
                time.sleep(0.1)
                took = _client(url, seconds, 2)
            times = sorted(second for some in took.values() for second in some)
            reads = sorted(took["read"] + took["list"])
            slowest = {name: round(max(some), 3) for name, some in took.items()}
            p99 = reads[len(reads) * 99 // 100], times[len(times) * 99 // 100]
            sys.stdout.write(
                f"{kind}: {sorted(set(statuses))}, p99 {p99[0]:.3f} and {p99[1]:.3f} s, {slowest}, "
                f"{watch.own} + {watch.others} MiB\n"
            )
            assert times[-1] < _ANSWERED, kind
            assert not SECONDS or all(map(lt, p99, _QUIET_P99)), kind
    assert (watch.own < _MOST_OWN, watch.others < _MOST_OTHERS) == (True, True), (watch.own, watch.others)


def test_a_client_beside_the_largest_requests(make_cluster: Callable[..., EmbeddedCluster]) -> None:
    _run(make_cluster(schema_registry=True), ["honest", "large"], ["references", "enum"], 4, 0)


@pytest.mark.test_all("long")
def test_a_client_beside_all_kinds_of_large_requests(make_cluster: Callable[..., EmbeddedCluster]) -> None:
    _run(make_cluster(schema_registry=True), list(_BEFORE), list(_KINDS), 8, SECONDS or 1)
