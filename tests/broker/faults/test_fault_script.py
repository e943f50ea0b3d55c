"""Which requests a fault applies to: tables, without a broker."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest

from spark_klog.broker.faults.control import decode_answer, encode, follow, lines_of, obey
from spark_klog.broker.faults.script import (
    Corrupt,
    Delay,
    Drop,
    ErrorAnswer,
    Fault,
    FaultScript,
    MatchedRequest,
    Truncate,
    flip_bits,
)
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError
from spark_klog.protocol.targets import EVERYTHING, Target

DROP = Drop()


def make_request(
    api: str = "Produce", client: str | None = "c", *targets: Target, has_records: bool = False
) -> MatchedRequest:
    return MatchedRequest(api, client, targets or (("t", 0), ("u", 1)), has_records)


@pytest.mark.parametrize(
    ("fault", "request_", "fires"),
    [
        (Fault(DROP), make_request(), True),
        (Fault(DROP, api="Produce"), make_request(), True),
        (Fault(DROP, api="Fetch"), make_request(), False),
        (Fault(DROP, client_id="c"), make_request(), True),
        (Fault(DROP, client_id="d"), make_request(), False),
        (Fault(DROP, client_id="c"), make_request("Produce", None), False),
        (Fault(DROP, topic="u"), make_request(), True),
        (Fault(DROP, topic="v"), make_request(), False),
        (Fault(DROP, topic="t", partition=0), make_request(), True),
        (Fault(DROP, topic="t", partition=1), make_request(), False),
        (Fault(DROP, partition=1), make_request(), True),
        (Fault(DROP, partition=2), make_request(), False),
        (Fault(DROP, topic="t"), make_request("Metadata", "c", EVERYTHING), True),
        (Fault(DROP, topic="t"), make_request("Metadata", "c", ("t", None)), True),
        (Fault(DROP, topic="t", partition=0), make_request("Metadata", "c", ("t", None)), False),
        (Fault(Corrupt(), topic="t"), make_request("Fetch"), False),
        (Fault(Corrupt(), topic="t"), make_request("Fetch", "c", ("t", 0), has_records=True), True),
        (Fault(Corrupt("answer"), topic="t"), make_request("Fetch"), True),
        (Fault(DROP), make_request("Fetch", "c", ("t", 0), has_records=True), False),
    ],
)
def test_what_matches(fault: Fault, request_: MatchedRequest, fires: bool) -> None:
    assert (FaultScript([fault]).choose(request_) is not None) == fires


def _fired(script: FaultScript, requests: str) -> str:
    """Send one request a letter, its client id; return for each the delay of the fault that fired, or a dot."""
    firings = [script.choose(make_request("Produce", client)) for client in requests]
    return "".join("." if firing is None else str(firing.fault.do.ms) for firing in firings)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("faults", "requests", "expected"),
    [
        ([Fault(Delay(1))], "aaaa", "1111"),
        ([Fault(Delay(1), count=2)], "aaaa", "11.."),
        ([Fault(Delay(1), skip=2)], "aaaa", "..11"),
        ([Fault(Delay(1), skip=1, count=2)], "aaaa", ".11."),
        ([Fault(Delay(1), client_id="a", skip=1, count=1)], "bababa", "...1.."),
        ([Fault(Delay(1), count=2), Fault(Delay(2), count=1)], "aaaa", "112."),
        # skipped requests are counted, whichever fault fires
        ([Fault(Delay(1), count=2), Fault(Delay(2), skip=2)], "aaaa", "1122"),
        ([Fault(Delay(1), client_id="a"), Fault(Delay(2))], "abba", "1221"),
    ],
)
def test_how_often(faults: list[Fault], requests: str, expected: str) -> None:
    script = FaultScript(faults)
    assert _fired(script, requests) == expected
    assert [count for _, count in script.fired()] == [expected.count(str(fault.do.ms)) for fault in faults]  # type: ignore[union-attr]


def test_faults_are_added_and_cleared() -> None:
    script = FaultScript()
    assert _fired(script, "a") == "."
    script.add([Fault(Delay(1), count=1), Fault(Delay(2))])
    assert _fired(script, "aa") == "12"
    script.clear()
    assert _fired(script, "a") == "."
    assert script.fired() == []


@pytest.mark.parametrize(
    "fault",
    [
        Fault(DROP),
        Fault(ErrorAnswer("NOT_COORDINATOR", after=True), "OffsetFetch", "t", 3, "c", 4, 5, 6),
        Fault(ErrorAnswer(999)),
        Fault(Delay(20, after=True)),
        Fault(Drop(after=True, sent=7)),
        Fault(Corrupt("answer", 3, 42)),
        Fault(Truncate(9)),
    ],
)
def test_json_and_back(fault: Fault) -> None:
    assert Fault.from_json(json.loads(json.dumps(fault.to_json()))) == fault


IMPOSSIBLE: list[tuple[Callable[[], object], str]] = [
    (lambda: Fault(DROP, api="Prodoce"), "api='Prodoce': did you mean Produce?"),
    (lambda: Fault(DROP, api="fetch"), "api='fetch': did you mean Fetch?"),
    (lambda: Fault(DROP, api=0), "api=0: it is not known to this version, which acts on "),
    (lambda: Fault(DROP, count=0), "count=0: it must be a number, 1 or more"),
    (lambda: Fault(DROP, count="2"), "count='2': it must be a number, 1 or more"),
    (lambda: Fault(DROP, skip=-1), "skip=-1: it must be a number, 0 or more"),
    (lambda: Fault(DROP, skip=None), "skip=None: it must be a number, 0 or more"),
    (lambda: Fault(DROP, topic=5), "topic=5: it must be a string"),
    (lambda: Fault(DROP, topic=["a"]), "topic=['a']: it must be a string"),
    (lambda: Fault(DROP, client_id=b"c"), "client_id=b'c': it must be a string"),
    (lambda: Fault(DROP, partition="0"), "partition='0': it must be a number, 0 to 2147483647"),
    (lambda: Fault(DROP, partition=-1), "partition=-1: it must be a number, 0 to 2147483647"),
    (lambda: Fault(DROP, broker=-1), "broker=-1: it must be a number, 0 to 2147483647"),
    (lambda: Fault(Drop), "it must be Drop(...)"),
    (lambda: Fault("Drop"), "do='Drop': it must be one of ErrorAnswer, Delay, Drop, Corrupt, Truncate"),
    (lambda: Fault(Corrupt(), api="Produce"), "api='Produce': records are corrupted in answers of Fetch only"),
    (
        lambda: ErrorAnswer("NOT_LEADER"),
        "code='NOT_LEADER': it is not known to this version, which acts on BROKER_ID_NOT_REGISTERED, ",
    ),
    (lambda: ErrorAnswer("not_leader_or_follower"), "did you mean NOT_LEADER_OR_FOLLOWER?"),
    (lambda: ErrorAnswer("NONE"), "code='NONE': it must be an error; 0 is none"),
    (lambda: ErrorAnswer(0), "code=0: it must be an error; 0 is none"),
    (lambda: ErrorAnswer(40_000), "code=40000: it must be a number, -32768 to 32767"),
    (lambda: ErrorAnswer(None), "code=None: it must be a number"),
    (lambda: ErrorAnswer(6, after=1), "after=1: it must be True or False"),
    (lambda: Delay(-1), "ms=-1: it must be a number, 0 to 3600000"),
    (lambda: Delay("5"), "ms='5': it must be a number, 0 to 3600000"),
    (lambda: Delay(0.5), "ms=0.5: it must be a number, 0 to 3600000"),
    (lambda: Delay(5, "yes"), "after='yes': it must be True or False"),
    (lambda: Drop(sent=-1), "sent=-1: it must be a number, 0 or more"),
    (lambda: Drop(10), "after=10: it must be True or False"),
    (lambda: Corrupt("everywhere"), "where='everywhere': it must be 'records' or 'answer'"),
    (lambda: Corrupt(bits=0), "bits=0: it must be a number, 1 or more"),
    (lambda: Corrupt(bits=True), "bits=True: it must be a number, 1 or more"),
    (lambda: Corrupt(seed="x"), "seed='x': it must be a number"),
    (lambda: Truncate(0), "missing=0: it must be a number, 1 or more"),
    (lambda: Truncate(None), "missing=None: it must be a number, 1 or more"),
    (lambda: EmbeddedCluster(faults=[Drop()]), "Drop(after=False, sent=0) is not a Fault: give Fault(Drop("),
    (lambda: EmbeddedCluster(faults=Fault(DROP)), "faults is a single Fault: give a list of faults"),
    (lambda: EmbeddedCluster(faults=[Fault(DROP, broker=1)]), "fault for broker 1: the cluster has 1, numbered from 0"),
]


@pytest.mark.parametrize(("make", "reason"), IMPOSSIBLE)
def test_what_cannot_be_is_refused_when_it_is_made(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        make()


@pytest.mark.parametrize("values", [{}, {"do": {}}, {"do": {"kind": "Exit"}}, {"do": {"kind": "Drop"}, "apis": 1}])
def test_json_that_is_no_fault(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is not a fault"):
        Fault.from_json(values)


@pytest.mark.parametrize("line", [b"", b"{", b"5", b"[]", b"{}", b'{"add": 1}', b'{"add": [{"do": {}}]}', b"\xff"])
def test_a_line_that_is_no_command_changes_nothing(line: bytes) -> None:
    script = FaultScript([Fault(Delay(1))])
    assert json.loads(obey(script, line)).keys() == {"error"}
    with pytest.raises(ConfigError):
        decode_answer(obey(script, line))
    assert script.fired() == [(Fault(Delay(1)), 0)]


def test_commands_in_pieces() -> None:
    first, second = Fault(Delay(1), count=3), Fault(Truncate(2))
    script = FaultScript()
    read_end, write_end = os.pipe()
    written = encode("add", [first, second]) + encode("fired") + encode("clear") + encode("add", [second]) + b"half"
    answers: list[str] = []
    with os.fdopen(write_end, "wb", buffering=0) as pipe:
        for start in range(0, len(written), 50):
            pipe.write(written[start : start + 50])
    follow(script, lines_of(read_end), answers.append)
    os.close(read_end)
    both = [(first, 0), (second, 0)]
    assert [decode_answer(answer) for answer in answers] == [both, both, [], [(second, 0)]]


def _flipped(corrupt: Corrupt, number: int) -> set[int]:
    data = bytearray(100)
    flip_bits(data, 10, 20, corrupt, number)
    return {8 * at + bit for at, byte in enumerate(data) for bit in range(8) if byte >> bit & 1}


def test_flipped_bits_are_as_many_as_told_and_the_same_again() -> None:
    corrupt = Corrupt(bits=5, seed=1)
    first = _flipped(corrupt, 0)
    assert len(first) == 5
    assert first <= set(range(80, 160))
    assert _flipped(corrupt, 0) == first
    assert _flipped(corrupt, 1) != first
    assert _flipped(Corrupt(bits=5, seed=2), 0) != first
    assert _flipped(Corrupt(bits=1000), 0) == set(range(80, 160))
