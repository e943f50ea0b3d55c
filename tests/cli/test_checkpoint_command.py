"""`klog checkpoint show` with checkpoints of both formats, klog and kafka, as Spark writes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from spark_klog.cli.main import main
from spark_klog.groups.checkpoint import checkpoint_state
from spark_klog.spark.write.decisions.decision_place import planned
from spark_klog.spark.write.decisions.log_states import LogState, restart
from spark_klog.spark.write.exactly_once import Claim, Decision, Ended, Entry, Log, Transaction

pytestmark = pytest.mark.usefixtures("logging_kept")

KAFKAS = '{"clicks":{"1":20,"0":10}}'
FIRST = r'{"clicks":{"0":10},"start of query {\"clicks\":{\"0\":7}}":{}}'
LATER = r'{"clicks":{"0":10},"start of micro-batch {\"clicks\":{\"0\":0}}":{}}'
QUERY = "7a11d2a1-0000-4000-8000-000000000000"


def _checkpoint(folder: Path, *lines: str, planned: int = 3, done: int = 3, state: bool = False) -> Path:
    folder.mkdir()
    (folder / "metadata").write_text(json.dumps({"id": QUERY}))
    for name in ("offsets", "commits"):
        (folder / name).mkdir()
    for number in range(planned + 1):
        (folder / "offsets" / str(number)).write_text("\n".join(["v1", '{"batchWatermarkMs":0}', *lines]))
    for number in range(done + 1):
        (folder / "commits" / str(number)).write_text('v1\n{"nextBatchWatermarkMs":0}')
    if state:
        (folder / "state").mkdir()
    return folder


def _show(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["checkpoint", "show", *map(str, arguments)])


def test_text(tmp_path: Path) -> None:
    address = f"file://{_checkpoint(tmp_path / 'c%20', KAFKAS, '-', state=True)}"
    done = _show(address)
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    told = json.loads(_show(address, "--json").output)["noDecisions"]
    assert lines == [
        ["query", f"{QUERY},", "stateful"],
        ["last", "micro-batch:", "3,", "done"],
        ["source", "topic", "partition", "offset"],
        ["0", "clicks", "0", "10"],
        ["0", "clicks", "1", "20"],
        ["1", "(reads", "no", "topics)", "-", "-"],
        ["to", 'format("klog"):', "safe"],
        ["to", 'format("kafka"):', "safe"],
        ["exactly", "once:", *told.split()],
    ]


def test_what_no_checkpoint_shows(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "c", KAFKAS)
    changes = _show(folder, "--to", "klog").output.partition("what else changes")[2]
    assert all(word in changes for word in ("foreachBatch", "AvailableNow", "commitOffsets"))
    assert "what else changes" not in _show(folder, "--to", "kafka").output + _show(folder).output
    assert "what else changes" not in _show(folder, "--to", "klog", "--json").output


@pytest.mark.parametrize(
    ("line", "planned", "done", "to_klog", "to_kafka"),
    [
        (KAFKAS, 3, 3, "", ""),
        (KAFKAS, 3, 2, "", ""),
        (KAFKAS, 0, 0, "", ""),
        (KAFKAS, 0, -1, "", "first micro-batch is not done, and kafka does not find its start: let it end with klog"),
        (FIRST, 0, 0, "", ""),
        (FIRST, 0, -1, "", "first micro-batch is not done"),
        (LATER, 3, 3, "", ""),
        (LATER, 3, 2, "", "let it end with klog"),
        ("0", 3, 3, "no source of the query reads topics", "no source of the query reads topics"),
        (KAFKAS, -1, -1, "", "no micro-batch is planned yet: kafka begins where its own startingOffsets say"),
    ],
)
def test_switches(tmp_path: Path, line: str, planned: int, done: int, to_klog: str, to_kafka: str) -> None:
    folder = _checkpoint(tmp_path / "c", line, planned=planned, done=done)
    found = json.loads(_show(folder, "--json").output)
    assert (found["query"], found["planned"], found["done"]) == (QUERY, planned, done)
    for name, reason in (("klog", to_klog), ("kafka", to_kafka)):
        reasons = found[f"to_{name}"]
        assert [reason in text for text in reasons] == ([True] if reason else []), reasons
        assert _show(folder, "--to", name).exit_code == (2 if reason else 0)


@pytest.mark.parametrize(
    ("planned", "reason"),
    [
        (0, "the first micro-batch is not done, and klog does not find its start: let it end with kafka"),
        (-1, "klog begins"),
    ],
)
def test_a_query_of_kafka_that_has_just_begun(tmp_path: Path, planned: int, reason: str) -> None:
    folder = _checkpoint(tmp_path / "c", KAFKAS, planned=planned, done=-1)
    (folder / "sources" / "0").mkdir(parents=True)
    (folder / "sources" / "0" / "0").write_bytes(b"\0v1\n" + KAFKAS.encode())
    found = json.loads(_show(folder, "--json").output)
    assert ([reason in text for text in found["to_klog"]], found["to_kafka"]) == ([True], [])


@pytest.mark.parametrize(
    ("start", "is_safe"),
    [("{}", False), ('{"path":"/data/x.csv","timestamp":1700000000000,"batchId":0}', True), ("1700000000000", True)],
)
def test_a_source_that_has_read_nothing(tmp_path: Path, start: str, is_safe: bool) -> None:
    """Spark's connector, whose pattern no topic matches yet, writes `{}`; other sources keep files there, too."""
    folder = _checkpoint(tmp_path / "c", KAFKAS, "-")
    (folder / "sources" / "1").mkdir(parents=True)
    (folder / "sources" / "1" / "0").write_bytes(b"\0v1\n" + start.encode())
    found = json.loads(_show(folder, "--json").output)
    assert ["source 1 has read no partition yet" in reason for reason in found["to_klog"]] == [True] * (not is_safe)
    assert found["to_kafka"] == []


def _next_run(folder: Path, *entries: Entry) -> list[str]:
    """What the next run will do; the log begins with the last decision, if it has one."""
    return restart(LogState("query", "topic", log=Log(entries)), checkpoint_state(str(folder)))


DECIDED = Decision(2, (Transaction("klog-x-1", 7, 0, 3), Transaction("klog-x-2", 8, 1, 0)))
ABORTS = "aborts open transactions of the query (none of them is decided)"
ABORTS_OTHERS = "aborts all other open transactions of the query"


@pytest.mark.parametrize(
    ("entries", "planned_and_done", "next_run"),
    [
        ((Claim(),), (0, -1), [ABORTS, "runs and writes micro-batch 0 again"]),
        ((DECIDED, Ended()), (2, 2), [ABORTS, "runs and writes micro-batch 3"]),
        ((DECIDED, Ended(), Claim()), (3, 2), [ABORTS, "runs and writes micro-batch 3 again"]),
        ((DECIDED,), (2, 1), ["commits the 2 transactions of micro-batch 2", ABORTS_OTHERS, "without writing"]),
        ((DECIDED, Ended()), (2, 1), [ABORTS, "runs micro-batch 2 without writing: it is decided"]),
        ((DECIDED, Ended()), (1, 0), [ABORTS, "Spark runs micro-batch 1, but the last decision is of 2"]),
        ((DECIDED, Ended()), (5, 5), [ABORTS, "fails with CheckpointMismatch: Spark runs micro-batch 6"]),
    ],
)
def test_the_next_run(
    tmp_path: Path, entries: tuple[Entry, ...], planned_and_done: tuple[int, int], next_run: list[str]
) -> None:
    folder = _checkpoint(tmp_path / "c", KAFKAS, planned=planned_and_done[0], done=planned_and_done[1])
    steps = _next_run(folder, *entries)
    assert [part in step for part, step in zip(next_run, steps, strict=True)] == [True] * len(next_run)


def test_a_decided_micro_batch_with_other_offsets(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "c", KAFKAS, planned=2, done=1)
    entries = (replace(DECIDED, planned=planned(folder, 2)), Ended())
    assert "without writing" in _next_run(folder, *entries)[-1]
    (folder / "offsets" / "2").write_text("\n".join(["v1", "{}", FIRST]))
    mismatch = "fails with CheckpointMismatch: micro-batch 2 is decided, and has other offsets"
    assert mismatch in _next_run(folder, *entries)[-1]


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    done = _show(tmp_path)
    assert (done.exit_code, "is not a checkpoint" in done.output) == (1, True)
    folder = _checkpoint(tmp_path / "c", KAFKAS)
    (folder / "metadata").write_text("{}")
    assert "no id of a query" in _show(folder).output
    (folder / "offsets" / "3").write_text("v9\n{}\n")
    assert "version 'v9'" in _show(folder).output
    assert "copy the checkpoint" in _show("s3://bucket/checkpoint").output
