"""`klog consume` and `klog produce` with our broker and Apache Kafka, compared with kcat and librdkafka."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from spark_klog.cli.records import places
from spark_klog.cli.records.consume import _Group
from spark_klog.client import Admin, Consumer
from spark_klog.client.cluster import Cluster
from spark_klog.client.places import OffsetSpec
from spark_klog.embedded import EmbeddedCluster
from spark_klog.protocol.tables.records import LATEST
from tests.cli.place import NO_DELAY
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.clients.klog import klog_bytes, klog_command
from tests.support.clients.tools import kcat
from tests.support.clients.topics import make_topic
from tests.support.servers.broker import KlogBroker

#: A release's tests run without the extra.
_NEEDS_UI = pytest.mark.skipif(find_spec("starlette") is None, reason="klog ui needs the extra ui")
_FIELDS = r"%t %p %o %k|%K %s|%S %h %T\n"


@pytest.fixture(scope="module")
def servers(module_server_dir: Path) -> Iterator[str]:
    with KlogBroker(module_server_dir, *NO_DELAY) as broker:
        yield broker.bootstrap_servers


@pytest.fixture
def topic(servers: str, request: pytest.FixtureRequest) -> str:
    """A topic of two partitions, for one test only."""
    name = request.node.originalname.removeprefix("test_").replace("_", "-")
    make_topic(servers, name, 2)
    return name


def command(name: str, servers: str, *arguments: str) -> list[str]:
    return klog_command(name, "--bootstrap-server", servers, *arguments)


def klog(name: str, servers: str, *arguments: str, stdin: bytes = b"", code: int = 0) -> bytes:
    done = klog_bytes(name, "--bootstrap-server", servers, *arguments, stdin=stdin)
    assert done.returncode == code, done.stderr.decode()
    if code:
        assert b"Traceback" not in done.stderr
        return done.stderr
    return done.stdout


def write(servers: str, topic: str, records: list[dict[str, Any]]) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, "compression.type": "lz4"})
    for record in records:
        producer.produce(topic, **record)
    assert producer.flush(30) == 0


def read(servers: str, topic: str, isolation: str = "read_committed") -> list[tuple[Any, ...]]:
    """(partition, key, value, headers) of all records, as librdkafka reads them."""
    settings = {"bootstrap.servers": servers, "group.id": "reader", "isolation.level": isolation}
    consumer = confluent_kafka.Consumer(settings | {"enable.partition.eof": True, "fetch.wait.max.ms": 10})
    consumer.assign([confluent_kafka.TopicPartition(topic, number, 0) for number in (0, 1)])
    found, ended, deadline = [], 0, time.monotonic() + 30
    while ended < 2:
        assert time.monotonic() < deadline
        message = consumer.poll(1)
        if message is None:
            continue
        if message.error() is None:
            found.append((message.partition(), message.key(), message.value(), message.headers()))
        else:
            assert message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF
            ended += 1
    consumer.close()
    return sorted(found, key=lambda record: record[0])


def numbered(count: int) -> list[dict[str, Any]]:
    return [
        {
            "value": None if number % 7 == 3 else b"v%d" % number,
            "key": None if number % 5 == 2 else b"k%d" % number,
            "partition": number % 2,
            "timestamp": 1_700_000_000_000 + number,
            "headers": [("n", b"%d" % number), ("m", b"x")] if number % 3 else None,
        }
        for number in range(count)
    ]


def test_prints_as_kcat(servers: str, topic: str) -> None:
    write(servers, topic, numbered(40))
    for partition, form in (
        ("0", ["-f", _FIELDS, "-Z"]),
        ("1", ["-f", _FIELDS]),
        ("0", ["-Z"]),
        ("1", ["-K", ":", "-D", r";\t"]),
    ):
        printed = kcat("-C", "-q", "-e", "-b", servers, "-t", topic, "-p", partition, *form)
        assert klog("consume", servers, topic, "-p", partition, *form) == printed


def offsets(servers: str, topic: str, *arguments: str) -> list[tuple[int, int]]:
    """(partition, offset) of each printed record."""
    lines = klog("consume", servers, topic, "-f", r"%p %o\n", *arguments).decode().splitlines()
    return sorted((int(line.split()[0]), int(line.split()[1])) for line in lines)


def test_places(servers: str, topic: str) -> None:
    write(servers, topic, numbered(20))  # ten in each partition, timestamps with the number
    everything = [(partition, offset) for partition in (0, 1) for offset in range(10)]
    assert offsets(servers, topic) == everything
    assert offsets(servers, topic, "--from", "-3") == [each for each in everything if each[1] >= 7]
    assert offsets(servers, topic, "--from", "4", "--until", "6") == [each for each in everything if 4 <= each[1] < 6]
    assert offsets(servers, topic, "--from", "latest") == []
    assert offsets(servers, topic, "--from", "-1h") == []
    done = klog_bytes("consume", topic, "-b", servers, "--from", "2999-01-01")
    assert (done.stdout, b"klog: --from is in the future, and no record is as late" in done.stderr) == (b"", True)
    middle = "2023-11-14T22:13:20.010Z"  # the time of record 10: offset 5 in both partitions
    assert offsets(servers, topic, "--from", middle) == [each for each in everything if each[1] >= 5]
    assert offsets(servers, topic, "--until", middle) == [each for each in everything if each[1] < 5]
    assert len(offsets(servers, topic, "--count", "7")) == 7
    assert offsets(servers, topic, "--where", "header.n>=15") == [(0, 8), (1, 8), (1, 9)]
    assert offsets(servers, "^places$", "--where", "key=k15") == [(1, 7)]


def _transactions(servers: str, topic: str, *sizes: int) -> None:
    """Write transactions of so many records to partition 0; negative sizes are aborted."""
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, "transactional.id": topic})
    producer.init_transactions(30)
    for size in sizes:
        producer.begin_transaction()
        for number in range(abs(size)):
            producer.produce(topic, b"%d" % number, partition=0)
        if size > 0:
            producer.commit_transaction(30)
        else:
            producer.flush(30)
            producer.abort_transaction(30)


def test_the_last_records_are_counted(servers: str, topic: str) -> None:
    """Markers, and with read_committed aborted records, are offsets without a record."""
    _transactions(servers, topic, 4, -40, 2, 1, -3)  # with a marker each: offsets 0-3, 5-44, 46-47, 49, 51-53
    committed = [(0, offset) for offset in (0, 1, 2, 3, 46, 47, 49)]
    every = [(0, offset) for offset in (*range(4), *range(5, 45), 46, 47, 49, 51, 52, 53)]
    for isolation, expected, counts in (
        ("read_committed", committed, (1, 2, 3, 4, 6, 7, 8)),
        ("read_uncommitted", every, (1, 4, 30, 100)),
    ):
        settings = {"bootstrap.servers": servers, "isolation.level": isolation, "auto.offset.reset": "earliest"}
        with Cluster.connect(settings) as cluster:
            for count in counts:
                begin = places.parse_place("--from", f"-{count}")
                found, _ = places.ranges(cluster, settings, [(topic, 0)], begin, OffsetSpec(LATEST))
                start = found[topic, 0][0]
                assert [offset for _, offset in expected if offset >= start] == [o for _, o in expected[-count:]]
    arguments = ("--isolation", "read_committed")
    assert offsets(servers, topic, "--from", "-2", *arguments) == committed[-2:]
    assert offsets(servers, topic, "--until", "-3", *arguments) == committed[:-3]


def test_the_search_for_the_last_records_is_bounded(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _transactions(servers, topic, 3, -40, 1)
    monkeypatch.setattr(places, "_FARTHEST", 20)
    settings = {"bootstrap.servers": servers, "isolation.level": "read_committed", "auto.offset.reset": "earliest"}
    with Cluster.connect(settings) as cluster:
        found, warnings = places.ranges(
            cluster, settings, [(topic, 0), (topic, 1)], places.parse_place("--from", "-2"), OffsetSpec(LATEST)
        )
    assert found == {(topic, 0): (27, 47), (topic, 1): (0, 0)}
    assert warnings == [f"{topic}-0 has 1 records in its last 20 offsets"]


def test_follow(servers: str, topic: str) -> None:
    with subprocess.Popen(
        command("consume", servers, topic, "--follow", "-p", "0"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        for round_ in range(3):
            write(servers, topic, [{"value": b"round %d" % round_, "partition": 0}])
            assert running.stdout.readline() == b"round %d\n" % round_
        running.send_signal(signal.SIGINT)
        assert running.stdout.read() == b""
        assert running.stderr.read() == b""
    assert running.returncode == 0


def test_a_group_goes_on_where_it_stopped(servers: str, topic: str, tmp_path: Path) -> None:
    write(servers, topic, numbered(20))
    way = (topic, "--group", "printers", "--json")
    first = [json.loads(line) for line in klog("consume", servers, *way, "-n", "7").splitlines()]
    second = [json.loads(line) for line in klog("consume", servers, *way).splitlines()]
    assert (len(first), len(second)) == (7, 13)
    assert {(each["partition"], each["offset"]) for each in first + second} == {
        (p, o) for p in (0, 1) for o in range(10)
    }
    assert klog("consume", servers, *way) == b""
    # without --group no offsets move, even if the file has a group.id
    file = tmp_path / "consumer.properties"
    file.write_text("group.id=printers\nauto.offset.reset=latest\n")
    assert len(klog("consume", servers, topic, "--command-config", str(file)).splitlines()) == 20


@pytest.mark.parametrize("setting", ["group.protocol=consumer", "partition.assignment.strategy=cooperative-sticky"])
def test_a_member_waits_for_its_share(setting: str) -> None:
    """Another member has all partitions at first, and has to give one up."""
    with EmbeddedCluster() as cluster:
        servers = cluster.bootstrap_servers
        make_topic(servers, "t", 2)
        write(servers, "t", numbered(20))
        settings = {"bootstrap.servers": servers, "group.id": "printers", **dict([setting.split("=")])}
        with Consumer({**settings, "enable.auto.commit": False}) as other:
            other.subscribe(["t"])
            while len(other.assignment()) < 2:
                other.poll(0.05)
            program = command("consume", servers, "t", "--group", "printers", "--set", setting)
            with subprocess.Popen(program, stdout=subprocess.PIPE) as running:
                while running.poll() is None:
                    other.poll(0.05)
                assert running.stdout is not None
                assert len(running.stdout.read().splitlines()) == 10
            assert running.returncode == 0


def test_what_a_member_does_not_know_yet_is_its_share(servers: str, topic: str) -> None:
    """The coordinator may have given it all partitions while it still takes itself to have none."""
    settings = {"bootstrap.servers": servers, "group.id": topic}
    with Admin({"bootstrap.servers": servers}) as admin, Consumer(settings) as consumer:
        group = _Group(admin, settings, topic, [topic], None, follow=False, as_arrow=False)
        consumer.subscribe([topic])
        while len(consumer.assignment()) < 2:
            consumer.poll(0.05)
        assert not group._is_shared(consumer)
        with Consumer(settings) as other:
            other.subscribe([topic])
            while not other.assignment():
                other.poll(0.05)
                consumer.poll(0.05)
            assert not group._is_shared(consumer)


def test_produce_lines(servers: str, topic: str) -> None:
    lines = b"a:1\nb:2:3\nnone\n:empty\nlast:\n"
    klog("produce", servers, topic, "-K", ":", "-p", "1", "-H", "h=1", "-H", "h=", stdin=lines)
    klog("produce", servers, topic, "-K", ":", "-p", "0", "-Z", stdin=lines.rstrip(b"\n"))
    headers = [("h", b"1"), ("h", b"")]
    assert read(servers, topic) == [
        (0, b"a", b"1", None),
        (0, b"b", b"2:3", None),
        (0, None, b"none", None),
        (0, None, b"empty", None),
        (0, b"last", None, None),
        (1, b"a", b"1", headers),
        (1, b"b", b"2:3", headers),
        (1, None, b"none", headers),
        (1, b"", b"empty", headers),
        (1, b"last", b"", headers),
    ]


def _partitions_by_librdkafka(servers: str, topic: str, partitioner: str) -> dict[int, int]:
    """The partition, of two, that librdkafka chooses for each key from 0 to 9,999."""
    make_topic(servers, topic, 2)
    found: dict[int, int] = {}

    def note(error: object, message: confluent_kafka.Message) -> None:
        assert error is None
        found[int(message.key() or b"")] = message.partition() or 0

    settings = {"queue.buffering.max.messages": 100_000, "partitioner": partitioner, "log_level": 0}
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, **settings})
    for number in range(10_000):
        producer.produce(topic, None, b"%d" % number, on_delivery=note)
    assert producer.flush(60) == 0
    return found


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_produce_many_lines(servers: str, tmp_path: Path, codec: str) -> None:
    topic = f"many-{codec}"
    make_topic(servers, topic, 2)
    file = tmp_path / "lines"
    file.write_bytes(b"".join(b"%d=%d\n" % (number, number * number) for number in range(10_000)))
    # the default is that of Java's clients; librdkafka has another one
    partitioner, option = (
        ("murmur2_random", []) if codec == "none" else ("consistent_random", ["-X", "partitioner=consistent_random"])
    )
    klog("produce", servers, topic, "-l", str(file), "-K", "=", "-z", codec, *option)
    found = read(servers, topic)
    assert sorted(int(key) for _, key, _, _ in found) == list(range(10_000))
    for partition in (0, 1):  # each partition is in order
        keys = [int(key) for number, key, _, _ in found if number == partition]
        assert keys == sorted(keys)
    expected = _partitions_by_librdkafka(servers, f"{topic}-theirs", partitioner)
    assert {int(key): number for number, key, _, _ in found} == expected
    assert all(int(value) == int(key) ** 2 for _, key, value, _ in found)


def test_an_empty_delimiter(servers: str, topic: str) -> None:
    """Nothing is between the printed records, as with kcat, and all input is one record, which kcat refuses."""
    klog("produce", servers, topic, "-p", "0", stdin=b"a\nb\n")
    printed = kcat("-C", "-q", "-e", "-b", servers, "-t", topic, "-p", "0", "-D", "")
    assert klog("consume", servers, topic, "-p", "0", "-D", "") == printed == b"ab"
    assert klog("consume", servers, topic, "-p", "0", "-D", "", "-K", ":") == b":a:b"
    whole = b"line\n" * 100_000 + b"end"
    klog("produce", servers, topic, "-p", "1", "-D", "", stdin=whole)
    assert klog("consume", servers, topic, "-p", "1", "-f", "%S\\n") == b"%d\n" % len(whole)
    assert klog("consume", servers, topic, "-p", "1", "-D", "") == whole


def test_produce_files(servers: str, topic: str, tmp_path: Path) -> None:
    contents = [b"\0\xff\n" * 99, b"", b"x"]
    paths = [tmp_path / f"{number}" for number in range(3)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    klog("produce", servers, topic, "-k", "key", "-p", "0", *map(str, paths))
    assert read(servers, topic) == [(0, b"key", content, None) for content in contents]


def test_a_copy_by_json(servers: str, topic: str) -> None:
    write(servers, topic, [*numbered(20), {"value": b"\xff\x00", "partition": 0, "headers": [("b", b"\xfe")]}])
    make_topic(servers, "copied", 2)
    klog("produce", servers, "copied", "--json", stdin=klog("consume", servers, topic, "--json"))
    assert read(servers, "copied") == read(servers, topic)


def test_a_transaction_is_written_whole_or_not_at_all(servers: str, topic: str) -> None:
    good, bad = b'{"value": "1"}\n' * 5, b'{"value": "2"}\n' * 5 + b"rubbish\n"
    klog("produce", servers, topic, "--json", "--transaction", "t", stdin=good)
    refused = klog("produce", servers, topic, "--json", "--transaction", "t", "--stats", stdin=bad, code=1)
    assert b"record 6: it is not JSON" in refused
    assert b"the transaction is aborted: none of its records count" in refused
    assert b"\n0 records, 0 bytes in " in refused
    assert [value for _, _, value, _ in read(servers, topic)] == [b"1"] * 5
    committed = klog("consume", servers, topic, "--isolation", "read_committed").splitlines()
    assert committed == [b"1"] * 5
    assert set(klog("consume", servers, topic).splitlines()) <= {b"1", b"2"}
    # without a transaction the records before the bad line are written
    klog("produce", servers, topic, "--json", stdin=bad, code=1)
    assert [value for _, _, value, _ in read(servers, topic)].count(b"2") == 5


def test_a_start_in_an_open_transaction(servers: str, topic: str) -> None:
    """Such a start is not beyond the end, although read_committed ends before it."""
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, "transactional.id": topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    for _ in range(3):
        producer.produce(topic, b"open", partition=0)
    producer.flush(30)
    arguments = ("consume", servers, topic, "-p", "0", "--isolation", "read_committed", "--from")
    assert klog(*arguments, "2") == b""
    assert b"--from 4 is beyond the end" in klog(*arguments, "4", code=1)
    producer.commit_transaction(30)
    assert klog(*arguments, "2") == b"open\n"


def test_a_terminal_gets_no_control_characters(servers: str, topic: str) -> None:
    write(servers, topic, [{"value": b"\x1b[2J\xff\xc2\x9b", "partition": 0}])
    ours, its = pty.openpty()
    subprocess.run(command("consume", servers, topic, "-q"), stdout=its, check=True, timeout=60)
    os.close(its)
    assert os.read(ours, 4096) == b"\\x1b[2J\\xff\\x9b\r\n"
    os.close(ours)
    assert klog("consume", servers, topic) == b"\x1b[2J\xff\xc2\x9b\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "yesterday"], b"--from yesterday must be earliest"),
        (["--until", "2999-01-01"], b"--until must not be in the future"),
        (["^("], b"is not a regular expression"),
        (["-X", "fetch.min.bytes=x"], b"fetch.min.bytes=x"),
        (["-X", "isolation.lvel=read_committed"], b"isolation.level"),
        (["-X", "isolation.level"], b"isolation.level"),
        (["--group", "g", "--from", "-1h"], b"with --group, --from is earliest or latest"),
        (["--where", "key"], b"--where 'key' must be FIELD OPERATOR VALUE"),
        (["-f", "%x"], b"--format: %x is not known"),
        (["-s", "value=avro", "-r", "ftp://x"], b"schema.registry.url must be http"),
        (["-s", "value=avro", "--value-schema", __file__], b"--value-schema: "),
    ],
)
def test_arguments_are_checked_before_connecting(arguments: list[str], message: bytes) -> None:
    refused = klog("consume", "127.0.0.1:1", "topic", *arguments, code=2)
    assert message in refused
    assert b"no broker answers" not in refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("produce t -X linger.ms=x", b"linger.ms"),
        ("topics create t --config x", b"NAME=VALUE"),
        ("topics list -b nowhere", b"'nowhere' is not HOST:PORT"),
        ("topics list --cluster nowhere", b"clusters"),
        ("offsets show --group g --from kafka://nowhere", b"'nowhere' is not HOST:PORT"),
        ("groups lag g --metrics x", b"--metrics: 'x' is not HOST:PORT"),
        ("mirror --from nowhere --to 127.0.0.1:1 --topics t", b"--from: nowhere is neither"),
        ("broker --data-dir /nowhere --set log.segment.bytes=x", b"log.segment.bytes"),
        ("cluster --data-dir /nowhere --set x", b"NAME=VALUE"),
        ("schemas list -r ftp://x", b"schema.registry.url must be http"),
        ("schema-registry --listen x", b"'x' is not HOST:PORT"),
        pytest.param("ui --listen x:y", b"'x:y' is not HOST:PORT", marks=_NEEDS_UI),
        ("users add ANONYMOUS --file /nowhere/users --password-stdin", b"ANONYMOUS stands for"),
    ],
)
def test_commands_end_with_2_for_wrong_arguments(arguments: str, message: bytes) -> None:
    done = klog_bytes(*arguments.split(), stdin=b"")
    assert (done.returncode, message in done.stderr, done.stdout) == (2, True, b""), done


def test_lines_are_written_as_they_come_and_before_an_interrupt(servers: str, topic: str) -> None:
    with subprocess.Popen(
        command("produce", servers, topic, "-p", "0"), stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdin is not None
        assert running.stderr is not None
        lines = b""
        for line in (b"1\n", b"2\n"):
            lines += line
            running.stdin.write(line)
            running.stdin.flush()
            deadline = time.monotonic() + 60
            while klog("consume", servers, topic, "-p", "0") != lines:
                assert time.monotonic() < deadline
        running.send_signal(signal.SIGINT)
        assert running.stderr.read() == b"klog: interrupted; what was sent before is written\n"
    assert running.returncode == 130


@pytest.mark.test_all("long")
def test_a_producer_writes_all_that_it_has_read_before_a_signal(servers: str, topic: str) -> None:
    choose = random.Random(4)
    until = time.monotonic() + float(os.environ.get("SPARK_KLOG_INTERRUPT_SECONDS", "0"))
    expected: list[bytes] = []
    arguments = command("produce", servers, topic, "--json", "-z", "lz4", "-X", "batch.size=1000")
    while len(expected) < 4_000 or time.monotonic() < until:
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as running:
            assert running.stdin is not None
            assert running.stderr is not None
            for _ in range(choose.randrange(1, 5)):
                values = [f"{len(expected) + number}".encode() for number in range(choose.randrange(1, 3_000))]
                expected += values
                running.stdin.write(b"".join(b'{"value": "%s", "partition": 0}\n' % value for value in values))
                running.stdin.flush()
            deadline = time.monotonic() + 60
            while struct.unpack("i", fcntl.ioctl(running.stdin, termios.FIONREAD, bytes(4)))[0]:
                assert time.monotonic() < deadline
            time.sleep(choose.choice([0, 0.005, 0.02]))
            running.send_signal(choose.choice([signal.SIGTERM, signal.SIGINT]))
            assert running.stderr.read() == b"klog: interrupted; what was sent before is written\n"
        assert running.returncode == 130
    assert klog("consume", servers, topic, "-p", "0").split() == expected


def test_what_users_mistype(servers: str, topic: str, tmp_path: Path) -> None:
    write(servers, topic, numbered(4))
    for arguments, message in (
        (["missing-topic"], b"klog topics list"),
        (["missing-topic", "--group", "g-missing"], b"klog topics list"),
        ([topic, "-p", "2"], b"has no partition 2, only 0 to 1"),
        ([topic, "--from", "99"], b"is beyond the end of"),
        (["^nothing"], b"no topic matches"),
    ):
        assert message in klog("consume", servers, *arguments, code=1), arguments
    for arguments in (["--follow", "--until", "3"], ["--group", "g", "-p", "0"], ["--json", "-f", "%s"]):
        klog("consume", servers, topic, *arguments, code=2)
    assert b"needs a delimiter" in klog("produce", servers, topic, "--json", "-D", "", code=2)
    assert klog_bytes("consume", topic, "-b", servers, "-n", "1").stdout, "kcat's -b"
    assert b"partitions 0 to 1, not 5" in klog("produce", servers, topic, "-p", "5", stdin=b"x\n", code=1)
    assert b"nowhere" in klog("produce", servers, topic, str(tmp_path / "nowhere"), code=2)
    assert b"with --json" in klog("produce", servers, topic, "--json", "-k", "k", code=2)


def test_a_missing_topic_that_no_broker_creates_is_refused_soon() -> None:
    with EmbeddedCluster(settings={"auto.create.topics.enable": "false"}) as cluster:
        began = time.monotonic()
        assert b"klog topics create" in klog("produce", cluster.bootstrap_servers, "missing", stdin=b"x\n", code=1)
        assert time.monotonic() - began < 4, "it has waited for the topic to be created"


def test_a_topic_that_is_missing_or_can_not_be_reached() -> None:
    """The command fails before it reads its input."""
    with ScriptedCluster({"there": 2}, nodes=2) as brokers:
        servers = f"127.0.0.1:{brokers.ports[0]}"
        assert b"klog topics create" in klog("produce", servers, "missing", stdin=b"x\n", code=1)
        brokers.ports[1] = 1  # of the leader of partition 1
        own = ("-X", "socket.connection.setup.timeout.ms=500")
        refused = klog("produce", servers, "there", *own, stdin=b"x\n", code=1)
        advertised = f"127.0.0.1:1 (the address of broker 1 as {servers} advertises it, check advertised.listeners)"
        assert f"no broker answers at {advertised}: ".encode() in refused
        assert b"socket.connection.setup.timeout.ms" in refused
        klog("produce", servers, "there", *own, "-p", "0", stdin=b"x\n")
        assert (brokers.values("there", 0), brokers.values("there", 1)) == ([b"x"], [])


def test_a_pipe_that_closes(servers: str, topic: str) -> None:
    write(servers, topic, [{"value": b"x" * 1000}] * 500)
    shell = f"{' '.join(command('consume', servers, topic))} | head -n 1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, timeout=60)
    assert (done.stdout, done.stderr) == (b"x" * 1000 + b"\n", b"")


def test_produce_leaves_the_transactions_of_a_file(servers: str, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "of-a-program.properties"
    file.write_text(f"transactional.id={topic}\n")
    program = confluent_kafka.Producer({"bootstrap.servers": servers, "transactional.id": topic, "log_level": 0})
    program.init_transactions(30)
    klog("produce", servers, topic, "--command-config", str(file), stdin=b"ours\n")
    program.begin_transaction()
    program.produce(topic, b"theirs")
    program.commit_transaction(30)  # `program` is not fenced
    assert set(klog("consume", servers, topic).split()) == {b"ours", b"theirs"}


_PRINTED = (
    ("--json",),
    ("-f", _FIELDS),
    ("-K", ":", "-Z", "-D", "|"),
    ("-n", "7", "-p", "1"),
    ("--from", "-3", "--json"),
    ("--from", "2", "--until", "9", "-f", r"%p %o\n"),
    ("--where", "value~[05]$", "--where", "header.h=1", "--json"),
    ("-G", "GROUP", "--from", "earliest", "-f", r"%p %o\n"),
)


def test_consume_prints_the_same_without_pyarrow(servers: str, topic: str) -> None:
    records = [{"value": b"v%d" % number, "key": b"k\xff", "partition": number % 2} for number in range(60)]
    write(servers, topic, [{**record, "headers": [("h", b"1")]} for record in records])
    write(servers, topic, [{"value": None, "partition": 0}])
    printed = []
    for missing in ((), ("pyarrow", "numpy", "pandas")):
        group = f"{topic}-{len(missing)}"
        words = [
            command("consume", servers, topic, *(group if one == "GROUP" else one for one in arguments))[3:]
            for arguments in _PRINTED
        ]
        program = (
            f"import sys; sys.modules |= dict.fromkeys({missing!r})\n"
            "from spark_klog.cli.main import main\n"
            f"for arguments in {words!r}:\n"
            "    main(arguments, standalone_mode=False)\n"
            "    print('END', flush=True)"
        )
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        parts = ran.stdout.split(b"END\n")[:-1]  # the order of partitions is not the same each time
        assert len(parts) == len(_PRINTED)
        printed.append([sorted(part.split(b"\n" if b"\n" in part else b"|")) for part in parts])
    assert printed[0] == printed[1]
    assert [len(part) - 1 for part in printed[0]] == [61, 61, 61, 7, 6, 14, 12, 61]


def test_times_that_do_not_fit_into_microseconds(servers: str, topic: str) -> None:
    """Nanoseconds that a producer took for milliseconds."""
    times = (1_700_000_000_123, 1_700_000_000_123_456_789, 1_700_000_000_125)
    write(servers, topic, [{"value": b"v", "timestamp": time, "partition": 0} for time in times])
    forms = (["-f", r"%o %T\n"], ["--json"], ["--where", f"timestamp>{times[2]}", "-f", r"%o\n"])
    commands = [command("consume", servers, topic, *form)[3:] for form in forms]
    for missing in ((), ("pyarrow", "numpy", "pandas")):
        program = (
            f"import sys; sys.modules |= dict.fromkeys({missing!r})\n"
            "from spark_klog.cli.main import main\n"
            f"for arguments in {commands!r}: main(arguments, standalone_mode=False)"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[:3] == [f"{offset} {time}" for offset, time in enumerate(times)]
        assert [json.loads(line)["timestamp"] for line in lines[3:6]] == [*times]
        assert lines[6:] == ["1"]


def test_consume_does_without_pandas(servers: str, topic: str) -> None:
    """The import of pandas, which pyarrow does at the first scalar of a Python object, doubles the start-up time."""
    write(servers, topic, [{"value": b"v", "key": None}, {"value": None, "key": "ä"}])
    forms = (["--json"], ["-f", r"%t %p %o %k|%K %s|%S %T\n"], ["-K", ":", "-Z"])
    commands = [command("consume", servers, topic, *form)[3:] for form in forms]
    program = (
        "import sys; from spark_klog.cli.main import main\n"
        f"for arguments in {commands!r}: main(arguments, standalone_mode=False)\n"
        "sys.exit('pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60)
    assert done.returncode == 0
