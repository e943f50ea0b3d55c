"""`klog transactions` with our broker and Apache Kafka, compared with Kafka's own TransactionsCommand."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from confluent_kafka import KafkaException, Producer

from spark_klog.cli.main import main
from spark_klog.client import Admin, Producer as OurProducer
from spark_klog.client.producer.transactions import PreparedTransaction
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ProducerFenced
from spark_klog.spark.write.decisions.decision_log import DecisionLog
from spark_klog.spark.write.decisions.decision_place import stream_key
from spark_klog.spark.write.decisions.entries import Identity
from spark_klog.spark.write.exactly_once import Claim, Decision, Entry, Transaction
from tests.spark.support import create_topic, wait_for
from tests.support.clients.klog import klog, klog_command, klog_lines, klog_refusal
from tests.support.clients.transactional.readers import by_confluent
from tests.support.servers.any_broker import serving
from tests.support.servers.java_tools import JavaTools
from tests.support.servers.kafka import NEWEST
from tests.support.servers.shared_kafka import SharedKafkas

_SECONDS = 60
_STATE = "__transaction_state"
_NOT_FOUND = "TRANSACTIONAL_ID_NOT_FOUND"
Tool = Callable[..., list[dict[str, str]]]


@pytest.fixture(scope="module")
def tools() -> Iterator[JavaTools]:
    with JavaTools(NEWEST) as running:
        yield running


on_ours = pytest.mark.parametrize("servers", ["ours"], indirect=True)


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[str]:
    with serving(request.param, module_server_dir, shared_kafkas) as address:
        yield address


def kafka_transactions(tools: JavaTools, servers: str, *arguments: str) -> list[dict[str, str]]:
    """Run Kafka's tool; the rows of its table by the heads, which it separates by tabs."""
    code, told = tools.run("org.apache.kafka.tools.TransactionsCommand", "--bootstrap-server", servers, *arguments)
    assert code == 0, told
    # not by spaces: other tests of this Kafka may have ids with some
    lines = [[word.strip() for word in line.split("\t")] for line in told.splitlines() if line.strip()]
    return [dict(zip(lines[0], words, strict=True)) for words in lines[1:]] if lines else []


@contextmanager
def open_transaction(servers: str, name: str, topic: str, partitions: int = 2) -> Iterator[Producer]:
    """A producer with an open transaction, which has a record in each partition."""
    producer = Producer({"bootstrap.servers": servers, "transactional.id": name, "log_level": 0})
    producer.init_transactions(_SECONDS)
    producer.begin_transaction()
    for number in range(partitions):
        producer.produce(topic, b"open", partition=number)
    assert producer.flush(_SECONDS) == 0
    yield producer


@pytest.mark.peer
@pytest.mark.parametrize("servers", [NEWEST], indirect=True)
def test_what_kafka_says(servers: str, topic: str, tools: JavaTools) -> None:
    create_topic(servers, topic, 2)
    b = ("--bootstrap-server", servers)
    with open_transaction(servers, topic, topic):
        (ours,) = klog_lines("transactions", "list", *b, "--state", "ongoing", "--transactional-id-pattern", topic)
        (theirs,) = [row for row in kafka_transactions(tools, servers, "list") if row["TransactionalId"] == topic]
        assert [ours[name] for name in ("transactionalId", "state")] == [topic, theirs["TransactionState"]]
        assert (str(ours["coordinator"]), str(ours["producerId"])) == (theirs["Coordinator"], theirs["ProducerId"])
        assert 0 <= ours["durationMs"] < _SECONDS * 1000
        assert (ours["query"], ours["task"]) == (None, None)
        assert klog_lines("transactions", "list", *b, "--state", "Empty", "--transactional-id-pattern", topic) == []
        assert klog_lines("transactions", "list", *b, "--duration-filter", "3600000", "--state", "ongoing") == []

        (described,) = klog_lines("transactions", "describe", *b, "--transactional-id", topic)
        (theirs,) = kafka_transactions(tools, servers, "describe", "--transactional-id", topic)
        assert [str(described[name]) for name in ("producerId", "producerEpoch", "timeoutMs", "startedMs")] == [
            theirs[name]
            for name in ("ProducerId", "ProducerEpoch", "TransactionTimeoutMs", "CurrentTransactionStartTimeMs")
        ]
        named = {f"{one['topic']}-{one['partition']}" for one in described["partitions"]}
        assert named == set(theirs["TopicPartitions"].split(","))
        text = klog("transactions", "describe", *b, "--transactional-id", topic).stdout
        assert f"{topic}  Ongoing  coordinator {described['coordinator']}" in text
        assert f"  {topic}:0,1\n" in text

        at = ("--topic", topic, "--partition", "1")
        (producer,) = klog_lines("transactions", "describe-producers", *b, *at)
        (theirs,) = kafka_transactions(tools, servers, "describe-producers", *at)
        assert producer["lastTimestampMs"] == int(theirs["LastTimestamp"])
        assert [str(producer[name]) for name in ("producerId", "producerEpoch", "lastSequence", "startOffset")] == [
            theirs[name] for name in ("ProducerId", "ProducerEpoch", "LastSequence", "CurrentTransactionStartOffset")
        ]
        # a transaction that its coordinator knows does not hang
        assert klog_lines("transactions", "hanging", *b, *at, "--max-transaction-timeout", "0") == []
        refusal = klog_refusal("transactions", "abort", *b, *at, "--start-offset", "0", "--yes")
        assert "does not hang: its coordinator ends it, after its timeout at the latest" in refusal
        assert f"Abort it by --transactional-id {topic}" in refusal
        assert "open ones begin at 0" in klog_refusal("transactions", "abort", *b, *at, "--start-offset", "7", "--yes")


@on_ours
def test_abort_by_id(servers: str, topic: str) -> None:
    create_topic(servers, topic, 2)
    b = ("--bootstrap-server", servers)
    with open_transaction(servers, topic, topic) as producer:
        done = klog("transactions", "abort", *b, "--transactional-id", topic, "--yes")
        assert (done.returncode, done.stdout) == (0, f"{topic} aborted\n"), done.stderr
        with pytest.raises(KafkaException, match=r"FENCED|epoch"):
            producer.commit_transaction(_SECONDS)
    for number in range(2):
        assert by_confluent(servers, topic, number) == []
    with Admin({"bootstrap.servers": servers}) as admin:
        wait_for(
            lambda: admin.describe_transactions([topic]).check()[topic].state in ("CompleteAbort", "Empty"), "the abort"
        )
    assert "has no open transaction" in klog_refusal("transactions", "abort", *b, "--transactional-id", topic, "--yes")
    missing = klog("transactions", "describe", *b, "--transactional-id", f"{topic}-no", "--transactional-id", topic)
    assert (missing.returncode, _NOT_FOUND in missing.stderr, topic in missing.stdout) == (1, True, True)


@on_ours
def test_an_abort_by_id_spares_a_later_transaction(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With transaction.version 2 a producer that aborts late gets the new epoch, and may be faster than the fence."""
    create_topic(servers, topic, 1)
    given = {"bootstrap.servers": servers, "transactional.id": topic, "max.block.ms": str(_SECONDS * 1000)}
    with OurProducer(given) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"lost", partition=0).result(_SECONDS)
        fence = Admin.fence_transactions

        def fence_and_go_on(admin: Admin, transactions: list[PreparedTransaction]) -> object:
            done = fence(admin, transactions)
            producer.abort_transaction()
            producer.begin_transaction()
            producer.send(topic, b"kept", partition=0).result(_SECONDS)
            return done

        monkeypatch.setattr(Admin, "fence_transactions", fence_and_go_on)
        done = CliRunner().invoke(main, ["transactions", "abort", "-b", servers, "--transactional-id", topic, "--yes"])
        assert (done.exit_code, "producer goes on" in done.output) == (1, True), done.output
        producer.commit_transaction()
    assert by_confluent(servers, topic, 0) == ["kept"]


@pytest.mark.parametrize("servers", ["ours", pytest.param(NEWEST, marks=pytest.mark.peer)], indirect=True)
def test_an_abort_by_id_fences_the_producer(servers: str, topic: str) -> None:
    """With transaction.version 2 the producer's own abort would give it the new epoch, with which it would go on."""
    create_topic(servers, topic, 1)
    given = {"bootstrap.servers": servers, "transactional.id": topic, "max.block.ms": str(_SECONDS * 1000)}
    with OurProducer(given) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"lost", partition=0)
        producer.flush()
        assert klog("transactions", "abort", "-b", servers, "--transactional-id", topic, "--yes").returncode == 0
        with pytest.raises(ProducerFenced, match="or the transaction was aborted, as klog transactions abort"):
            producer.send(topic, b"late", partition=0).result(_SECONDS)
        with pytest.raises(ProducerFenced, match=r"make a new one and call init_transactions$"):
            producer.abort_transaction()
    assert by_confluent(servers, topic, 0) == []


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[str]:
    """A broker of its own, whose coordinators are to forget a transaction."""
    with EmbeddedCluster(data_dir=tmp_path / "klog") as cluster:
        yield cluster.bootstrap_servers


def test_hanging(forgetful: str, topic: str) -> None:
    """The coordinators forget a transaction with their topic: found and ended without its id."""
    create_topic(forgetful, topic, 2)
    b = ("--bootstrap-server", forgetful)
    committed = {"bootstrap.servers": forgetful, "isolation.level": "read_committed"}
    with open_transaction(forgetful, topic, topic), Admin(committed) as admin:
        admin.delete_topics([_STATE]).check()
        wait_for(lambda: not admin.list_transactions(), "coordinators that know nothing")
        found = klog_lines("transactions", "hanging", *b, "--max-transaction-timeout", "0")
        assert [(one["topic"], one["partition"], one["startOffset"]) for one in found] == [(topic, 0, 0), (topic, 1, 0)]
        assert klog_lines("transactions", "hanging", *b) == []  # not older than 15 minutes
        broker = str(next(iter(admin.cluster.nodes)))
        refused = klog_refusal("transactions", "hanging", *b, "--broker-id", "777")
        assert refused == f"klog: there is no broker 777: the cluster has {broker}"
        limited = ("--broker-id", broker, "--topic", topic, "--partition", "1", "--max-transaction-timeout", "0")
        (one,) = klog_lines("transactions", "hanging", *b, *limited)
        assert one | {"durationMs": 0} == found[1] | {"durationMs": 0}
        at = ("abort", *b, "--topic", topic, "--yes", "--json", "--partition")
        (line,) = klog_lines("transactions", *at, "0", "--start-offset", "0")
        assert line == {"topic": topic, "partition": 0, "producerId": found[0]["producerId"], "aborted": True}
        given = (found[1][name] for name in ("producerId", "producerEpoch", "coordinatorEpoch"))
        names = ("--producer-id", "--producer-epoch", "--coordinator-epoch")
        words = [word for name, value in zip(names, given, strict=True) for word in (name, str(value))]
        klog_lines("transactions", *at, "1", *words)
        assert klog_lines("transactions", "hanging", *b, "--max-transaction-timeout", "0") == []
        ends = admin.list_offsets({(topic, number): "latest" for number in range(2)}).check()
        assert [end.offset for end in ends.values()] == [2, 2], "the record and its marker"


@on_ours
def test_transactions_of_a_sink(servers: str, topic: str) -> None:
    create_topic(servers, topic, 2)
    identity = Identity(f"{topic}.")
    first, second = (f"{identity.id_prefix}{uuid.uuid4()}" for _ in range(2))
    b = ("--bootstrap-server", servers)
    where = ("--decision-topic", f"{topic}-decisions")
    with (
        open_transaction(servers, first, topic),
        open_transaction(servers, second, topic),
        Admin({"bootstrap.servers": servers}) as admin,
    ):
        now = admin.describe_transactions([first]).check()[first]
        decided = Transaction(first, now.producer_id, now.producer_epoch, 3)
        log = DecisionLog({"bootstrap.servers": servers}, f"{topic}-decisions", f"write/{topic}/sink", identity)
        entries: tuple[Entry, ...] = (Claim(), Decision(7, (decided,)))
        for number, entry in enumerate(entries):
            assert log.append(number, entry)

        listed = ("list", *b, "--transactional-id-pattern", f"{topic}.*")
        found = {line["transactionalId"]: line for line in klog_lines("transactions", *listed, *where)}
        told = {name: [found[name][key] for key in ("batch", "task", "isDecided")] for name in (first, second)}
        assert told == {first: [7, 3, True], second: [8, None, False]}
        assert {line["query"] for line in found.values()} == {f"write/{topic}/sink"}
        text = klog("transactions", "describe", *b, *where, "--transactional-id", first).stdout
        assert f"write {topic}/sink, version 7, task 3: decided" in text

        abort = ("abort", *b, "--yes", "--transactional-id")
        assert "whose decision log is not known" in klog_refusal("transactions", *abort, second)
        assert "decided; the " in klog_refusal("transactions", *abort, first, *where)
        assert klog("transactions", *abort, second, *where).returncode == 0
        assert klog("transactions", *abort, first, "--force").returncode == 0


@on_ours
def test_what_changes_before_the_answer(servers: str, topic: str) -> None:
    """The question may be open for long: a decision in that time, or another transaction, is noticed."""
    create_topic(servers, topic, 2)
    identity, decisions = Identity(), f"{topic}-decisions"
    log = DecisionLog({"bootstrap.servers": servers}, decisions, f"write/{topic}", identity)
    assert log.append(0, Claim())
    first, second = (f"{identity.id_prefix}{uuid.uuid4()}" for _ in range(2))
    with (
        open_transaction(servers, first, topic),
        open_transaction(servers, second, topic) as producer,
        Admin({"bootstrap.servers": servers}) as admin,
    ):
        now = admin.describe_transactions([first]).check()[first]
        with asked_to_abort(servers, first, "--decision-topic", decisions) as command:
            assert log.append(1, Decision(0, (Transaction(first, now.producer_id, now.producer_epoch, 3),)))
            assert "task 3: decided; the write commits it" in command.communicate("y\n", _SECONDS)[0]
        assert command.returncode == 1
        with asked_to_abort(servers, second, "--force") as command:
            producer.abort_transaction(_SECONDS)
            producer.begin_transaction()
            producer.produce(topic, b"later", partition=0)
            assert producer.flush(_SECONDS) == 0
            assert "is in another transaction by now" in command.communicate("y\n", _SECONDS)[0]
        assert command.returncode == 1
        described = admin.describe_transactions([first, second]).check()
        assert [one.state for one in described.values()] == ["Ongoing", "Ongoing"]
        with asked_to_abort(servers, first, "--force") as command:
            assert "aborted" in command.communicate("y\n", _SECONDS)[0]


@contextmanager
def asked_to_abort(servers: str, name: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    """`klog transactions abort` that waits for the answer to its question."""
    words = klog_command("transactions", "abort", "-b", servers, "--transactional-id", name, *more)
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True) as command:
        assert command.stdout is not None
        told = ""
        while not told.endswith("[y/N]: "):
            told += command.stdout.read(1) or pytest.fail(f"no question: {told}")
        yield command


@on_ours
def test_a_checkpoint_whose_decisions_are_in_a_topic(topic: str, tmp_path: Path, servers: str) -> None:
    """`klog checkpoint show` with a cluster, and transactions by the address of the checkpoint."""
    create_topic(servers, topic, 1)
    address, decisions = f"s3a://user:secret@b/{topic}", f"{topic}-decisions"
    identity = Identity()
    log = DecisionLog({"bootstrap.servers": servers}, decisions, stream_key(address), identity)
    first, second = (f"{identity.id_prefix}{uuid.uuid4()}" for _ in range(2))
    copy = tmp_path / "copy"
    for name in ("offsets", "commits"):
        (copy / name).mkdir(parents=True)
    (copy / "offsets" / "7").write_text('v1\n{}\n{"t":{"0":5}}')
    (copy / "commits" / "6").write_text("v1\n{}")
    show = ("checkpoint", "show", str(copy), "-b", servers, "--location", address, "--decision-topic", decisions)
    with (
        open_transaction(servers, first, topic, 1),
        open_transaction(servers, second, topic, 1),
        Admin({"bootstrap.servers": servers}) as admin,
    ):
        (line,) = klog_lines(*show)
        assert line["decisions"] is None
        now = admin.describe_transactions([first]).check()[first]
        decided = Transaction(first, now.producer_id, now.producer_epoch, 3)
        for number, entry in enumerate((Claim(), Decision(7, (decided,)))):
            assert log.append(number, entry)
        (line,) = klog_lines(*show)
        told = line["decisions"]
        assert told["place"] == f"topic {decisions} (stream/s3a://b/{topic})"
        assert (told["decided"], told["isEnded"]) == (7, False)
        opened = {one["transactionalId"]: (one["batch"], one["task"], one["isDecided"]) for one in told["open"]}
        assert opened == {first: (7, 3, True), second: (8, None, False)}
        text = klog(*show).stdout
        assert f"open: {first}, decided, task 3\n" in text
        assert "  commits the 1 transactions of micro-batch 7" in text
        assert "  runs micro-batch 7 without writing: it is decided\n" in text
        where = ("--checkpoint", address, "--decision-topic", decisions)
        (line,) = klog_lines("transactions", "describe", "-b", servers, *where, "--transactional-id", first)
        assert (line["query"], line["task"]) == (f"s3a://***@b/{topic}", 3)
        abort = ("transactions", "abort", "-b", servers, "--yes", "--transactional-id")
        assert klog(*abort, second, *where).returncode == 0
        assert klog(*abort, first, "--force").returncode == 0


def test_refusals(tmp_path: Path) -> None:
    nobody = ("-b", "127.0.0.1:1")
    for words, told in [
        (("abort",), "give either --transactional-id"),
        (("abort", "--transactional-id", "x", "--topic", "t"), "give either --transactional-id"),
        (("abort", "--topic", "t"), "need each other"),
        (("abort", "--topic", "t", "--partition", "0"), "give either --start-offset"),
        (("hanging", "--partition", "0"), "--partition needs --topic"),
        (("list", "--transactional-id-pattern", "("), "--transactional-id-pattern '('"),
        (("find-hanging",), "use klog transactions hanging"),
        (("describe-producers", "--broker-id", "1"), "No such option '--broker-id': the leader of the partition is"),
    ]:
        done = klog("transactions", *words, *nobody)
        assert (done.returncode, told in done.stderr) == (2, True), done.stderr
