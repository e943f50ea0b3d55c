"""Every client against our broker: each creates a topic, writes it with every codec, and reads what each other wrote.

A client's class in tests/support/clients says what to expect of it. The first tests assign partitions; then two
consumers of each client share a topic as a group. With SPARK_KLOG_KAFKAS=all (`make soak`) Apache Kafka has the same
tests, which shows that they are right.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import kafka.errors
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from kafka.protocol.metadata import ApiVersionsRequest, ApiVersionsResponse
from kafka.record import MemoryRecords

from spark_klog.embedded import EmbeddedCluster
from spark_klog.protocol import apis
from tests.support.brokers.raw_client import RawClient
from tests.support.clients import ALL, CODECS, Client, Record, Seen, as_magic
from tests.support.clients.confluent import Confluent, ConfluentAs090
from tests.support.clients.java import Java0102, Java39, Java41, Java44
from tests.support.clients.kafka_python import KafkaPython
from tests.support.clients.kcat import Kcat
from tests.support.clients.process import ProcessClient
from tests.support.servers.kafka import ALL_VERSIONS, KRAFT, NEWEST, Kafka, Version

NOW = 1_700_000_000_000
PARTITIONS = 3
#: zstd has a partition of its own: fetches of versions before KIP-110 get an error there.
PARTITION_OF = {"none": 0, "gzip": 0, "snappy": 1, "lz4": 1, "zstd": 2}


def _records(start: int) -> list[Record]:
    """Awkward records; kcat needs those with nulls, and those with the same headers, next to each other."""
    text = b"some text " * 30
    return [
        Record(start, b"key", text),
        Record(start + 30, b"", text),
        Record(start + 10, bytes(range(256)), b"\x00\xff" * 200),
        Record(start + 20, b"long", b"long text " * 3000),
        Record(start + 20, "ключ".encode(), b""),
        Record(start + 25, None, text),
        Record(start + 5, b"deleted", None),
        Record(start + 40, b"one", text, (("a", b"1"),)),
        Record(start + 35, b"many", text, (("a", b"1"), ("b", b""), ("ü", "wert=ü".encode()))),
        Record(start + 50, b"repeated", text, (("a", b"1"), ("a", b"2"), ("n", None))),
    ]


class Stored(NamedTuple):
    """A record as kafka-python decodes it from a fetch of a version that carries all of it."""

    codec: str
    record: Record


class Written(NamedTuple):
    """A topic written by one client: given and stored records by partition, and epoch seconds around the writing."""

    topic: str
    given: dict[int, list[Stored]]
    stored: dict[int, list[Stored]]
    began: float
    ended: float

    def readable_by(self, reader: Client) -> dict[int, list[Record]]:
        """Records by partition, without the partition of a codec that is younger than the reader."""
        return {
            partition: [as_magic(line.record, reader.magic) for line in lines]
            for partition, lines in self.stored.items()
            if reader.magic == 2 or partition != PARTITION_OF["zstd"]
        }


class Matrix:
    """The clients, each started on first use, and their topics, at our broker or at a version of Kafka."""

    def __init__(self, servers: str, version: Version | None) -> None:
        self.servers, self.version = servers, version
        self._clients: dict[type[Client], Client] = {}
        self._written: dict[type[Client], Written | BaseException] = {}

    def client(self, kind: type[Client]) -> Client:
        if kind.magic < 2 and self.version in KRAFT:
            pytest.skip(f"Kafka {self.version} serves no clients that are so old (KIP-896)")
        if kind not in self._clients:
            self._clients[kind] = kind(self.servers)
        return self._clients[kind]

    def written(self, kind: type[Client]) -> Written:
        """The topic of a client, written at the first call; a failure is raised again at later calls."""
        if kind not in self._written:
            try:
                self._written[kind] = self._write(self.client(kind))
            except BaseException as error:
                self._written[kind] = error
        written = self._written[kind]
        if isinstance(written, BaseException):
            raise written
        return written

    def _write(self, client: Client) -> Written:
        topic = f"by-{type(client).__name__}"
        client.create(topic, PARTITIONS)
        given: dict[int, list[Stored]] = {partition: [] for partition in range(PARTITIONS)}
        began = time.time()
        for number, codec in enumerate(client.codecs):
            lines = given[PARTITION_OF[codec]]
            records = [client.carries(record) for record in _records(NOW + 1000 * number)]
            offsets = client.produce(topic, PARTITION_OF[codec], codec, records)
            assert offsets in (None, list(range(len(lines), len(lines) + len(records))))
            lines += [Stored(codec, record) for record in records]
        ended = time.time()
        stored = {partition: _stored(self.servers, topic, partition) for partition in given}
        return Written(topic, given, stored, began, ended)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def _stored(servers: str, topic: str, partition: int) -> list[Stored]:
    found: list[Stored] = []
    with RawClient(int(servers.rsplit(":", 1)[1])) as client:
        code, data = client.fetch(topic, 0, 12, 10_000_000, partition)
    assert code == 0
    batches = MemoryRecords(data)
    while batches.has_next():
        batch = batches.next_batch()
        assert batch.validate_crc()
        for record in batch:
            assert record.offset == len(found)
            line = Record(record.timestamp, record.key, record.value, tuple(record.headers))
            found.append(Stored(CODECS[batch.compression_type], line))
    return found


@pytest.fixture(scope="module", params=["klog", *([NEWEST, "3.9.1"] if ALL_VERSIONS else [])])
def server(request: pytest.FixtureRequest, module_server_dir: Path) -> Iterator[EmbeddedCluster | Kafka]:
    settings = {"num.partitions": str(PARTITIONS), "group.initial.rebalance.delay.ms": "0"}
    times = {f"group.consumer.{name}heartbeat.interval.ms": "200" for name in ("", "min.")}
    made = (
        EmbeddedCluster(data_dir=module_server_dir / "cluster", settings=settings | times)
        if request.param == "klog"
        else Kafka(
            request.param, module_server_dir / request.param, settings | (times if request.param in KRAFT else {})
        )
    )
    with made as running:
        yield running


@pytest.fixture(scope="module")
def cluster(server: EmbeddedCluster | Kafka) -> EmbeddedCluster:
    if not isinstance(server, EmbeddedCluster):
        pytest.skip("of our broker")
    return server


@pytest.fixture(scope="module")
def matrix(server: EmbeddedCluster | Kafka) -> Iterator[Matrix]:
    running = Matrix(server.bootstrap_servers, server.version if isinstance(server, Kafka) else None)
    yield running
    running.close()


def _row(*kinds: type[Client], marks: Sequence[pytest.MarkDecorator] = ()) -> object:
    """A case for these clients, marked `peer` if one runs in a process of its own: those do not come from PyPI."""
    marks = [*marks, *([pytest.mark.peer] if any(issubclass(kind, ProcessClient) for kind in kinds) else [])]
    marks += [pytest.mark.test_all("version")] if {Java0102, Java39, Java41} & {*kinds} else []
    return pytest.param(*kinds, marks=marks, id="-".join(map(_name, kinds)))


def _name(kind: type[Client]) -> str:
    return kind.name.replace(" ", "_")


each = pytest.mark.parametrize("kind", [_row(kind) for kind in ALL])


@each
def test_client_writes(matrix: Matrix, kind: type[Client]) -> None:
    written, client = matrix.written(kind), matrix.client(kind)
    (metadata,) = AdminClient({"bootstrap.servers": matrix.servers}).list_topics(written.topic, 10).topics.values()
    assert sorted(metadata.partitions) == list(range(PARTITIONS))
    for partition, given in written.given.items():
        stored = written.stored[partition]
        if not client.sets_timestamps:
            for line in stored:
                assert written.began - 1 <= line.record.timestamp / 1000 <= written.ended + 1
            stored = [_at(line, 0) for line in stored]
            given = [_at(line, 0) for line in given]
        assert stored == given


def _at(line: Stored, timestamp: int) -> Stored:
    return line._replace(record=line.record._replace(timestamp=timestamp))


def _pair(reader: type[Client], writer: type[Client]) -> object:
    """`make test` has each client with itself, and with Java's and librdkafka's newest."""
    is_telling = reader is writer or {Java44, Confluent} & {reader, writer}
    return _row(reader, writer, marks=[] if is_telling else [pytest.mark.test_all("client")])


@pytest.mark.parametrize(("reader", "writer"), [_pair(reader, writer) for reader in ALL for writer in ALL])
def test_client_reads_what_another_wrote(matrix: Matrix, reader: type[Client], writer: type[Client]) -> None:
    """The reader gets all records, from the beginning."""
    written, client = matrix.written(writer), matrix.client(reader)
    expected = written.readable_by(client)
    assert _consumed(client, written.topic, dict.fromkeys(expected, 0), expected) == expected


@each
def test_client_reads_from_an_offset(matrix: Matrix, kind: type[Client]) -> None:
    """The offsets are within batches, one in each partition."""
    written, client = matrix.written(kind), matrix.client(kind)
    wanted = written.readable_by(client)
    for starts in ({0: 3, 1: 7}, {1: len(wanted[1]) - 1}):
        expected = {partition: wanted[partition][offset:] for partition, offset in starts.items()}
        assert _consumed(client, written.topic, starts, expected) == expected


@pytest.mark.parametrize("kind", [_row(kind) for kind in ALL if kind.finds_times])
def test_client_reads_from_a_time(matrix: Matrix, kind: type[Client]) -> None:
    written, client = matrix.written(kind), matrix.client(kind)
    for partition, lines in written.readable_by(client).items():
        times = [line.timestamp for line in lines]
        for wanted in (min(times) - 1, times[2], times[-1], times[-2], max(times)):
            first = next(offset for offset, timestamp in enumerate(times) if timestamp >= wanted)
            assert client.offset_at(written.topic, partition, wanted) == first, (wanted, times)
        assert client.offset_at(written.topic, partition, max(times) + 1) in (-1, len(times))
        start = client.offset_at(written.topic, partition, times[-1])
        expected = {partition: lines[start:]}
        assert _consumed(client, written.topic, {partition: start}, expected) == expected


def _consumed(
    client: Client, topic: str, starts: dict[int, int], expected: dict[int, list[Record]]
) -> dict[int, list[Record]]:
    """Consume; return the records by partition, in the order of arrival; the offsets must have no gap."""
    found: dict[int, list[Seen]] = {partition: [] for partition in starts}
    for seen in client.consume(topic, starts, sum(map(len, expected.values()))):
        found[seen.partition].append(seen)
    for partition, start in starts.items():
        assert [seen.offset for seen in found[partition]] == list(range(start, start + len(found[partition])))
    return {partition: [seen.record for seen in lines] for partition, lines in found.items()}


class Share:
    """Two members of a group, and the partitions and records that each has."""

    def __init__(self, client: Client, topic: str, protocol: str) -> None:
        join = client.member if protocol == "classic" else client.consumer_member
        self.members = [join(topic, topic), join(topic, topic)]
        self._commits = client.commits_when_leaving
        self.has: list[set[int]] = [set(), set()]
        self.seen: list[list[tuple[int, int]]] = [[], []]

    def poll(self, number: int) -> None:
        self.has[number], came = self.members[number].poll(0.2)
        self.seen[number] += came

    def wait(self, is_so: Callable[[], bool], *numbers: int) -> None:
        """Poll each in a thread until `is_so`: a poll may last as long as a rebalance, which needs the other member."""
        deadline = time.monotonic() + 60

        def poll(number: int) -> None:
            while not is_so() and time.monotonic() < deadline:
                self.poll(number)

        with ThreadPoolExecutor() as threads:
            list(threads.map(poll, numbers))
        assert is_so(), (self.has, self.seen)

    def has_read_all(self) -> bool:
        """Whether the first ten records of each partition are read, by its member, whoever has read them before.

        A client that commits when it gives up a partition has read them for the next member, too.
        """
        everything = set(self.seen[0]) | set(self.seen[1])
        read = [everything] * 2 if self._commits else map(set, self.seen)
        return all(_lines(has, 0, 10) <= lines for has, lines in zip(self.has, read, strict=True))

    def take(self) -> list[list[tuple[int, int]]]:
        seen, self.seen = self.seen, [[], []]
        return [sorted(lines) for lines in seen]


#: Each step of the first two takes seconds; the third has the library of confluent-kafka, as kcat has.
_SLOW_IN_GROUPS = {Kcat, KafkaPython, ConfluentAs090}


@pytest.mark.parametrize(
    "kind",
    [
        _row(kind, marks=[pytest.mark.test_all("client")] if kind in _SLOW_IN_GROUPS else [])
        for kind in ALL
        if kind.has_groups
    ],
)
def test_two_of_a_group_share_a_topic(matrix: Matrix, kind: type[Client]) -> None:
    """If one leaves, the other one goes on from its committed offsets."""
    _check_sharing(matrix, kind, "classic")


@pytest.mark.test_all("client")  # test_consumer_group_clients.py has them together
@pytest.mark.parametrize("kind", [_row(kind) for kind in ALL if kind.has_consumer_protocol])
def test_two_of_a_consumer_group_share_a_topic(matrix: Matrix, kind: type[Client]) -> None:
    """The same by the consumer protocol (KIP-848)."""
    if matrix.version == "3.9.1":
        pytest.skip("Kafka 3.9.1 has no consumer protocol")
    _check_sharing(matrix, kind, "consumer")


def _check_sharing(matrix: Matrix, kind: type[Client], protocol: str) -> None:
    client, topic = matrix.client(kind), f"{protocol}-group-of-{kind.__name__}"
    admin = AdminClient({"bootstrap.servers": matrix.servers})
    admin.create_topics([NewTopic(topic, 4, 1)])[topic].result(30)
    producer = Producer({"bootstrap.servers": matrix.servers})

    def produce() -> None:
        for number in range(40):
            producer.produce(topic, b"value", partition=number % 4)
        assert producer.flush(30) == 0

    produce()
    share = Share(client, topic, protocol)
    # some clients read before the other one has joined; records that they have not committed come again
    share.wait(lambda: all(len(has) == 2 for has in share.has) and not set.intersection(*share.has), 0, 1)
    share.wait(share.has_read_all, 0, 1)
    time.sleep(0.3)
    for number, member in enumerate(share.members):
        share.poll(number)
        member.commit()
    share.take()
    produce()
    share.wait(lambda: sum(map(len, share.seen)) >= 40, 0, 1)
    first, second = share.take()
    assert (set(first), set(second)) == (_lines(share.has[0], 10, 20), _lines(share.has[1], 10, 20))
    assert len(first) == len(second) == 20
    share.members[0].commit()
    share.members[1].leave()
    share.wait(lambda: len(share.has[0]) == 4, 0)
    produce()
    uncommitted = [] if client.commits_when_leaving else second
    share.wait(lambda: len(share.seen[0]) >= 40 + len(uncommitted), 0)
    assert share.take()[0] == sorted([*uncommitted, *_lines(range(4), 20, 30)])
    share.members[0].commit()
    share.members[0].leave()
    # another client finds the committed offsets
    reader = Consumer({"bootstrap.servers": matrix.servers, "group.id": topic})
    places = reader.committed([TopicPartition(topic, partition) for partition in range(4)], 30)
    reader.close()
    assert [place.offset for place in places] == [30] * 4


def _lines(partitions: Iterable[int], start: int, end: int) -> set[tuple[int, int]]:
    return {(partition, offset) for partition in partitions for offset in range(start, end)}


#: The last version of ApiVersions that kafka-python has.
_LAST_OF_KAFKA_PYTHON = 4


@pytest.mark.parametrize("version", range(apis.API_VERSIONS.versions.first, _LAST_OF_KAFKA_PYTHON + 1))
def test_api_versions_as_kafka_python_reads_them(cluster: EmbeddedCluster, version: int) -> None:
    answer, left = _api_versions(cluster, version, version)
    assert (answer.error_code, left) == (0, 0)
    found = {entry.api_key: range(entry.min_version, entry.max_version + 1) for entry in answer.api_keys}
    assert found == {key: range(api.versions.first, api.versions.last + 1) for key, api in apis.BY_KEY.items()}


def test_an_unknown_version_of_api_versions(cluster: EmbeddedCluster) -> None:
    """The answer has version 0, and what the client needs to ask again."""
    answer, left = _api_versions(cluster, _LAST_OF_KAFKA_PYTHON, 0, asked=99)
    assert (answer.error_code, left) == (kafka.errors.UnsupportedVersionError.errno, 0)
    (own,) = (entry for entry in answer.api_keys if entry.api_key == apis.API_VERSIONS.key)
    assert own.max_version == apis.API_VERSIONS.versions.last


def _api_versions(
    cluster: EmbeddedCluster, sent: int, answered: int, asked: int | None = None
) -> tuple[ApiVersionsResponse, int]:
    """Send kafka-python's request; return the answer as it decodes it, and the number of bytes left over."""
    request = ApiVersionsRequest(version=sent, client_software_name="matrix", client_software_version="1")
    request.with_header(correlation_id=77, client_id="matrix")
    frame = bytearray(request.encode(header=True))
    if asked is not None:
        frame[2:4] = asked.to_bytes(2, "big")
    with RawClient(int(cluster.bootstrap_servers.rsplit(":", 1)[1])) as client:
        client.send_frame(bytes(frame))
        stream = io.BytesIO(client.receive_frame())
    assert ApiVersionsResponse.parse_header(stream, version=answered).correlation_id == 77
    answer = ApiVersionsResponse.decode(stream, version=answered)
    return answer, len(stream.read())
