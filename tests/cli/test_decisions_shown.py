"""What `klog checkpoint show` and `klog transactions` say of decisions, beside what the next run then does."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from spark_klog.cli.main import main
from spark_klog.client import Admin, Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import KlogError, UnsupportedVersionError
from spark_klog.spark.decisions import continue_at
from spark_klog.spark.write.decisions.decision_place import DecisionPlace, decision_place, planned
from spark_klog.spark.write.exactly_once import DecidedButAborted, Decision, Ended, Transaction
from spark_klog.spark.write.exactly_once_driver import Claimed, claim
from tests.spark.support import create_topic, wait_for
from tests.support.clients.klog import klog, klog_lines, klog_refusal
from tests.support.clients.transactional.readers import by_confluent

_STATE = "__transaction_state"


@pytest.fixture(scope="module")
def servers(module_server_dir: Path) -> Iterator[str]:
    with EmbeddedCluster(data_dir=module_server_dir) as cluster:
        yield cluster.bootstrap_servers


@dataclass
class _Run:
    """A run of a query or a call of `write_updates`, which has claimed its next micro-batch."""

    servers: str
    place: DecisionPlace
    claimed: Claimed

    @classmethod
    def begin(cls, servers: str, place: DecisionPlace) -> _Run:
        return cls(servers, place, claim({"bootstrap.servers": servers}, place, "klog-"))

    def write(self, topic: str, value: bytes) -> Transaction:
        """An open transaction with a record, as a task leaves it."""
        name = f"{self.claimed.identity.id_prefix}{uuid.uuid4()}"
        producer = Producer({"bootstrap.servers": self.servers, "transactional.id": name})
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, value, partition=0)
        prepared = producer.prepare_transaction()
        assert prepared is not None
        return Transaction(**vars(prepared), task=0)

    def decide(self, batch: int, *transactions: Transaction, plan: str = "") -> None:
        log = self.place.open({"bootstrap.servers": self.servers}, self.claimed.identity, is_claimed=True)
        assert log.append(self.claimed.begun.number, Decision(batch, transactions, plan))


def _checkpoint(folder: Path, planned: int, done: int) -> str:
    """A checkpoint as Spark writes it; its query's id."""
    query = str(uuid.uuid4())
    for name, last in (("offsets", planned), ("commits", done)):
        (folder / name).mkdir(parents=True)
        for number in range(last + 1):
            (folder / name / str(number)).write_text('v1\n{}\n{"t":{"0":5}}' if name == "offsets" else "v1\n{}")
    (folder / "metadata").write_text(json.dumps({"id": query}))
    return query


def _show(folder: Path, *words: str) -> dict[str, Any]:
    (line,) = klog_lines("checkpoint", "show", str(folder), *words)
    return line


def test_calls_of_write_updates(servers: str, topic: str, tmp_path: Path) -> None:
    create_topic(servers, topic, 1)
    query, decisions = _checkpoint(tmp_path, 0, -1), f"{topic}-decisions"
    counts = _Run.begin(servers, DecisionPlace(decisions, f"write/{query}/counts"))
    totals = _Run.begin(servers, DecisionPlace(decisions, f"write/{query}/totals"))
    _Run.begin(servers, DecisionPlace(decisions, f"write/{uuid.uuid4()}/counts"))
    decided, undecided = counts.write(topic, b"count"), totals.write(topic, b"total")
    counts.decide(0, decided)
    where = ("-b", servers, "--decision-topic", decisions)

    shown = _show(tmp_path, *where)
    assert (shown["decisions"], shown["noDecisions"]) == (None, None)
    first, second = shown["updates"]
    assert [(one["name"], one["decided"], one["isEnded"]) for one in (first, second)] == [
        ("counts", 0, False),
        ("totals", None, True),
    ]
    opened = [[(one["transactionalId"], one["isDecided"]) for one in call["open"]] for call in (first, second)]
    assert opened == [[(decided.transactional_id, True)], [(undecided.transactional_id, False)]]
    text = klog("checkpoint", "show", str(tmp_path), *where).stdout
    assert f"write_updates counts: decisions are in topic {decisions} (write/{query}/counts)\n" in text
    assert "last decided micro-batch: 0, 1 transactions, to be committed\n" in text
    assert "  commits the 1 transactions of micro-batch 0\n" in text
    assert "  runs micro-batch 0 without writing: it is decided\n" in text
    assert "  runs and writes micro-batch 0 again\n" in text

    for checkpoint in ((), ("--checkpoint", str(tmp_path))):
        listed = klog_lines("transactions", "list", *where, *checkpoint, "--state", "ongoing")
        told = {one["name"]: (one["query"], one["batch"], one["task"]) for one in listed if one["name"]}
        of_query = str(tmp_path) if checkpoint else query
        assert told == {"counts": (of_query, 0, 0), "totals": (of_query, None, None)}
    abort = ("transactions", "abort", *where, "--yes", "--transactional-id")
    refusal = klog_refusal(*abort, decided.transactional_id)
    assert f"query {query}, write_updates counts, micro-batch 0, task 0: decided; the query commits it" in refusal
    assert klog(*abort, undecided.transactional_id).returncode == 0

    # what it said of the next run
    assert _Run.begin(servers, counts.place).claimed.begun.decided == 0
    assert by_confluent(servers, topic, 0) == ["count"]
    assert "fails with EarlierWrite" not in str(_show(tmp_path, *where))
    _Run.begin(servers, counts.place).decide(0, plan=f"plan {planned(tmp_path, 0)}")
    assert "  runs micro-batch 0 without writing" in klog("checkpoint", "show", str(tmp_path), *where).stdout
    _Run.begin(servers, counts.place).decide(0, plan="plan of others")
    assert _show(tmp_path, *where)["updates"][0]["nextRun"] == [
        "fails with ReplannedWrite: micro-batch 0 is decided, and has other offsets in the checkpoint now"
    ]
    _Run.begin(servers, counts.place).decide(2)
    assert "fails with EarlierWrite: Spark runs micro-batch 0, but" in str(_show(tmp_path, *where)["updates"][0])


def test_no_decisions_are_found(servers: str, topic: str, tmp_path: Path) -> None:
    folder, decisions, location = tmp_path / "copy", f"{topic}-decisions", f"s3a://bucket/{topic}"
    query = _checkpoint(folder, 1, 0)
    _Run.begin(servers, decision_place(location, decisions)).decide(0)
    where = ("-b", servers, "--decision-topic", decisions)
    assert _show(folder, *where, "--location", location)["decisions"]["decided"] == 0
    give_b = "give -b HOST:PORT of the sink's cluster to see decisions"
    copied, check = f"and --location, if {folder} is a copy", "if the query writes exactly once, check --decision-topic"
    for words, told in [
        ((), f"{give_b}, {copied}"),
        (("--location", location), give_b),
        (where, f"no decisions in topic {decisions} (stream/{query} or write/{query}/NAME); {check}, {copied}"),
        (
            (*where, "--location", f"{location}x"),
            f"no decisions in topic {decisions} (stream/{location}x or write/{query}/NAME); {check} and --location",
        ),
        (
            ("-b", servers, "--location", location, "--decision-topic", "nope"),
            f"no decisions in topic nope (stream/{location} or write/{query}/NAME), which does not exist; {check} and "
            "--location",
        ),
    ]:
        assert klog("checkpoint", "show", str(folder), *words).stdout.endswith(f"\nexactly once: {told}\n")
    shown = _show(folder)
    assert (shown["decisions"], shown["updates"]) == (None, [])
    assert shown["noDecisions"].endswith(copied)
    refusal = klog_refusal("transactions", "list", *where, "--checkpoint", f"{location}x")
    assert f"has no decisions in topic {decisions} (stream/{location}x): is its query " in refusal


def test_after_continue_at(servers: str, topic: str, tmp_path: Path) -> None:
    _checkpoint(tmp_path, 1, 0)
    options = {"kafka.bootstrap.servers": servers, "deliveryGuarantee": "exactly-once"}
    options |= {"checkpointLocation": str(tmp_path), "decisionTopic": f"{topic}-decisions"}
    _Run.begin(servers, decision_place(str(tmp_path), f"{topic}-decisions")).decide(0)
    where = ("-b", servers, "--decision-topic", f"{topic}-decisions")
    continue_at(options, 1)
    shown = _show(tmp_path, *where)["decisions"]
    assert (shown["decided"], shown["isEnded"], shown["nextRun"][-1]) == (
        0,
        True,
        "runs and writes micro-batch 1 again",
    )
    assert "micro-batch: 0, no transactions to commit\n" in klog("checkpoint", "show", str(tmp_path), *where).stdout
    continue_at(options, 0)
    shown = _show(tmp_path, *where)["decisions"]
    last = "fails with CheckpointMismatch: Spark runs micro-batch 1, but no decision is there"
    assert (shown["decided"], shown["isEnded"], shown["nextRun"][-1]) == (None, True, last)
    assert "last decided micro-batch: none\n" in klog("checkpoint", "show", str(tmp_path), *where).stdout


def _commit(admin: Admin, one: Transaction) -> None:
    admin.end_transactions([one], commits=True).check()


def _abort(admin: Admin, one: Transaction) -> None:
    admin.fence_transactions([one]).check()


def _forget(admin: Admin, one: Transaction) -> None:
    admin.delete_topics([_STATE]).check()
    wait_for(lambda: not admin.list_transactions(), "coordinators that know nothing")


@pytest.mark.parametrize(
    ("happens", "told", "error"),
    [
        (lambda admin, one: None, "commits the 2 transactions of micro-batch 1", None),
        pytest.param(_commit, "commits the 2 transactions of micro-batch 1", None, marks=pytest.mark.test_all("long")),
        (
            _abort,
            "commits 1 of the 2 transactions of micro-batch 1, and fails with DecidedButAborted: the brokers have "
            "aborted those of task 0",
            DecidedButAborted,
        ),
        (_forget, "and fails: the brokers have forgotten those of task 0, 0 (transactional.id", KlogError),
    ],
)
def test_what_became_of_a_decision(
    tmp_path: Path, topic: str, happens: Callable[[Admin, Transaction], None], told: str, error: type[Exception] | None
) -> None:
    """Compared with what the next claim does."""
    _checkpoint(tmp_path / "c", 1, 0)
    with (
        EmbeddedCluster(data_dir=tmp_path / "klog") as cluster,
        Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin,
    ):
        servers = cluster.bootstrap_servers
        create_topic(servers, topic, 1)
        run = _Run.begin(servers, decision_place(str(tmp_path / "c"), None))
        one, other = run.write(topic, b"one"), run.write(topic, b"other")
        run.decide(1, one, other)
        happens(admin, one)
        shown = _show(tmp_path / "c", "-b", servers)["decisions"]
        assert told in shown["nextRun"][0]
        assert any("without writing: it is decided" in step for step in shown["nextRun"]) == (error is None)
        text = klog("checkpoint", "show", str(tmp_path / "c"), "-b", servers).stdout
        lost = {None: "to be committed", DecidedButAborted: "1 of them lost", KlogError: "2 of them lost"}[error]
        assert f"last decided micro-batch: 1, 2 transactions, {lost}\n" in text
        if error is None:
            assert _Run.begin(servers, run.place).claimed.begun.decided == 1
            assert sorted(by_confluent(servers, topic, 0)) == ["one", "other"]
        else:
            with pytest.raises(error, match=r"task 0|forgotten"):
                _Run.begin(servers, run.place)


def test_abort_by_the_producer_asks_the_coordinator(servers: str, topic: str, tmp_path: Path) -> None:
    create_topic(servers, topic, 1)
    run = _Run.begin(servers, DecisionPlace(f"{topic}-decisions", f"write/{topic}"))
    one = run.write(topic, b"row")
    run.decide(0, one)
    given = ("--producer-epoch", str(one.epoch), "--coordinator-epoch", "-1", "--yes")
    abort = ("transactions", "abort", "-b", servers, "--topic", topic, "--partition", "0", *given, "--producer-id")
    refusal = klog_refusal(*abort, str(one.producer_id))
    assert re.search(rf"does not hang: its coordinator ends it.*--transactional-id {one.transactional_id};", refusal)
    assert f"has no open transaction in {topic}-0" in klog_refusal(*abort, str(one.producer_id + 1000))
    assert Ended() not in run.place.open({"bootstrap.servers": servers}, run.claimed.identity).read().entries
    _Run.begin(servers, run.place)
    assert by_confluent(servers, topic, 0) == ["row"]


@pytest.mark.usefixtures("logging_kept")
def test_abort_by_the_producer_where_no_broker_tells(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka before 2.8 has no DescribeProducers."""
    create_topic(servers, topic, 1)
    run = _Run.begin(servers, DecisionPlace(f"{topic}-decisions", f"write/{topic}"))
    one = run.write(topic, b"row")

    def refuse(*_: object) -> None:
        raise UnsupportedVersionError("no DescribeProducers")

    monkeypatch.setattr(Admin, "describe_producers", refuse)
    where = ("transactions", "abort", "-b", servers, "--topic", topic, "--partition", "0")
    given = ("--producer-id", str(one.producer_id), "--producer-epoch", str(one.epoch), "--coordinator-epoch", "-1")
    for words, code in [((*where, "--start-offset", "0"), 1), ((*where, *given), 0)]:
        done = CliRunner().invoke(main, words, input="y\n")
        assert done.exit_code == code, done.output
    with Admin({"bootstrap.servers": servers}) as admin:
        assert admin.list_offsets({(topic, 0): "latest"}).check()[topic, 0].offset == 2, "the record and its marker"
