"""A client that sends valid frames with hostile values, and a record of what the broker has acknowledged.

After a restart the broker must serve all that is on record: each produced batch and each group's last commit.
"""

from __future__ import annotations

import contextlib
import random
import struct
import time
from collections.abc import Callable
from typing import Any

from crc32c import crc32c

from spark_klog.protocol import apis
from tests.support.brokers.batches import make_batch, walk
from tests.support.brokers.raw_client import RawClient
from tests.support.servers.broker import KlogBroker

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
_CRC_POSITION, _CRC_START = 17, 21
#: (position, struct format) of the header's fields that the checksum covers.
_FIELDS = ((21, ">h"), (23, ">i"), (27, ">q"), (35, ">q"), (43, ">q"), (51, ">h"), (53, ">i"), (57, ">i"))
_EDGES = (0, 1, -1, 2, -2, 7, 1000, 0x7FFF, 0x7FFFFFFE, 0x7FFFFFFF, -0x80000000, (1 << 63) - 1, -(1 << 63))
_RETRIABLE = (3, 5, 14, 15, 16, 41)
_SECONDS = 60

Key = tuple[str, int]


def lying(batch: bytes | bytearray, source: random.Random) -> bytes:
    """Return the batch with hostile values in its header and a correct CRC."""
    changed = bytearray(batch)
    for _ in range(source.choice((1, 1, 2, 3))):
        position, form = source.choice(_FIELDS)
        limit = 1 << (8 * struct.calcsize(form) - 1)
        struct.pack_into(form, changed, position, source.choice([edge for edge in _EDGES if -limit <= edge < limit]))
    if source.random() < 0.5:  # make count and last offset delta agree
        struct.pack_into(">i", changed, 57, (struct.unpack_from(">i", changed, 23)[0] + 1) & 0x7FFFFFFF)
    struct.pack_into(">I", changed, _CRC_POSITION, crc32c(bytes(changed[_CRC_START:])))
    return bytes(changed)


class Acknowledged:
    """The data that the broker has acknowledged, by topic and partition, and by group."""

    def __init__(self) -> None:
        self.partitions: dict[str, int] = {}
        #: By base offset: the batch's bytes from the checksum on.
        self.batches: dict[Key, dict[int, bytes]] = {}
        self.starts: dict[Key, int] = {}
        self.commits: dict[tuple[str, str, int], tuple[int, str]] = {}

    def forget(self, topic: str) -> None:
        """Forget a deleted topic."""
        count = self.partitions.pop(topic)
        for index in range(count):
            self.batches.pop((topic, index), None)
            self.starts.pop((topic, index), None)
        self.commits = {key: value for key, value in self.commits.items() if key[1] != topic}


class HostileClient:
    """A client that takes random steps from a seed. Its topics, and the groups that it commits for, are "kept-..."."""

    def __init__(self, seed: object) -> None:
        self.random = random.Random(repr(seed))
        self.acknowledged = Acknowledged()
        self.number = 0
        self.trace: list[str] = []

    def step(self, client: RawClient) -> None:
        """Take one step; ConnectionError if the caller must connect again."""
        steps: list[Callable[[RawClient], None]] = [
            *(self._create, self._delete, self._delete_records),
            *[self._produce] * 6,
            *[self._lie] * 6,
            *[self._commit] * 2,
            *(self._join, self._transaction),
        ]
        chosen = self.random.choice(steps)
        self.number += 1
        self.trace = [*self.trace[-30:], chosen.__name__]
        chosen(client)

    def _partition(self) -> Key | None:
        topics = sorted(self.acknowledged.partitions)
        if not topics:
            return None
        topic = self.random.choice(topics)
        return topic, self.random.randrange(self.acknowledged.partitions[topic])

    def _create(self, client: RawClient) -> None:
        name, count = f"kept-{self.random.randrange(4)}", self.random.randint(1, 3)
        settings = {
            "internal.segment.bytes": self.random.choice(("300", "5000", "1000000")),
            "index.interval.bytes": "1",
        }
        configs = [{"name": key, "value": value} for key, value in settings.items()]
        entry = {"name": name, "num_partitions": count, "replication_factor": 1, "configs": configs}
        (made,) = client.request(apis.CREATE_TOPICS, 4, {"topics": [entry], "timeout_ms": 10_000})["topics"]
        assert (made["error_code"] == 0) == (name not in self.acknowledged.partitions), (name, made)
        if not made["error_code"]:
            self.acknowledged.partitions[name] = count

    def _delete(self, client: RawClient) -> None:
        if self.random.random() < 0.3 and (key := self._partition()) is not None:
            request = {"topic_names": [key[0]], "timeout_ms": 10_000}
            (deleted,) = client.request(apis.DELETE_TOPICS, 3, request)["responses"]
            assert deleted["error_code"] == 0, deleted
            self.acknowledged.forget(key[0])

    def _delete_records(self, client: RawClient) -> None:
        if (key := self._partition()) is None:
            return
        offset = self.random.choice((*_EDGES, *self.acknowledged.batches.get(key, ())))
        entry = {"name": key[0], "partitions": [{"partition_index": key[1], "offset": offset}]}
        request = {"topics": [entry], "timeout_ms": 10_000}
        (done,) = client.request(apis.DELETE_RECORDS, 1, request)["topics"][0]["partitions"]
        assert done["error_code"] in (0, 1), done
        if not done["error_code"]:
            self.acknowledged.starts[key] = done["low_watermark"]

    def _good(self) -> bytes:
        now = time.time_ns() // 1_000_000
        count = self.random.choice((1, 1, 3, 50))
        rows = [
            (b"key", b"%d %d" % (self.number, row) + bytes(self.random.choice((0, 0, 200)))) for row in range(count)
        ]
        return bytes(make_batch(rows, [now] * count, self.random.choice(CODECS)))

    def _send(self, client: RawClient, key: Key, records: bytes, version: int = 8) -> int:
        data = [{"name": key[0], "partition_data": [{"index": key[1], "records": records}]}]
        request = {"acks": -1, "timeout_ms": 10_000, "topic_data": data}
        entry = client.request(apis.PRODUCE, version, request)["responses"][0]["partition_responses"][0]
        if not entry["error_code"]:
            batches = self.acknowledged.batches.setdefault(key, {})
            batches[entry["base_offset"]] = records[_CRC_POSITION:]
        return int(entry["error_code"])

    def _produce(self, client: RawClient) -> None:
        if (key := self._partition()) is not None:
            code = self._send(client, key, self._good(), self.random.choice((3, 8, 9)))
            assert code == 0, (key, code)

    def _lie(self, client: RawClient) -> None:
        if (key := self._partition()) is None:
            return
        good, lie = self._good(), lying(self._good(), self.random)
        records = self.random.choice((lie, lie, lie, lie + lie, good + lie, lie[:-5], b""))
        code = self._send(client, key, records)
        if len(records) != len(lie):  # more or less than one batch
            assert code != 0, records[:200].hex()

    def _commit(self, client: RawClient) -> None:
        if (key := self._partition()) is None:
            return
        group = self.random.choice(("kept-group", "kept-other"))
        offset, metadata = self.random.choice(_EDGES), self.random.choice(("", "m", "é" * 100))
        entry = {"partition_index": key[1], "committed_offset": offset, "committed_metadata": metadata}
        topics = [{"name": key[0], "partitions": [entry]}]
        request = {"group_id": group, "generation_id_or_member_epoch": -1, "topics": topics}
        answer = client.request(apis.OFFSET_COMMIT, 6, request)["topics"][0]["partitions"][0]
        if not answer["error_code"]:
            self.acknowledged.commits[group, key[0], key[1]] = offset, metadata

    def _join(self, client: RawClient) -> None:
        protocols = [{"name": "range", "metadata": self.random.randbytes(self.random.randrange(40))}]
        protocols *= self.random.choice((0, 1, 1, 3))
        request = {"group_id": "joined", "session_timeout_ms": self.random.choice((6000, *(_EDGES[:11])))}
        request |= {"rebalance_timeout_ms": self.random.choice((1000, *(_EDGES[:11]))), "protocol_type": "consumer"}
        request |= {"member_id": self.random.choice(("", "known")), "protocols": protocols}
        client.socket.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            answer = client.request(apis.JOIN_GROUP, self.random.choice((0, 2, 5)), request)
            member = {name: answer[name] for name in ("generation_id", "member_id")} | {"group_id": "joined"}
            client.request(apis.HEARTBEAT, 3, member)
            entry = {"member_id": answer["member_id"], "assignment": bytes(self.random.randrange(50))}
            client.request(apis.SYNC_GROUP, 3, member | {"assignments": [entry] * self.random.choice((0, 1, 2))})
            leaving = {"group_id": "joined", "member_id": answer["member_id"]}
            client.request(apis.LEAVE_GROUP, 1, leaving)
            client.socket.settimeout(_SECONDS)
            return
        raise ConnectionError("the answer waits for the other members")

    def _transaction(self, client: RawClient) -> None:
        """Run a transaction with a hostile epoch, sequence or partitions; its markers go into the recorded logs."""
        if (key := self._partition()) is None:
            return
        name = f"transaction-{self.random.randrange(3)}"
        request = {"transactional_id": name, "transaction_timeout_ms": self.random.choice((1000, 60_000, *_EDGES[:11]))}
        found = client.request(apis.INIT_PRODUCER_ID, 1, request)
        if found["error_code"]:
            return
        epoch = self.random.choice((found["producer_epoch"],) * 4 + (0, -1, 0x7FFF))
        producer = {"transactional_id": name, "producer_id": found["producer_id"], "producer_epoch": epoch}
        partitions = [key[1], *self.random.sample(range(-1, 3), 2)][: self.random.choice((1, 1, 3))]
        adding = {f"v3_and_below_{key}": value for key, value in producer.items()}
        adding |= {"v3_and_below_topics": [{"name": key[0], "partitions": partitions}]}
        client.request(apis.ADD_PARTITIONS_TO_TXN, 3, adding)
        batch = bytearray(self._good())
        struct.pack_into(">h", batch, 21, struct.unpack_from(">h", batch, 21)[0] | 0x10)
        sequence = self.random.choice((0, 0, 0, 0x7FFFFFFF, -1))
        struct.pack_into(">qhi", batch, 43, found["producer_id"], epoch, sequence)
        struct.pack_into(">I", batch, _CRC_POSITION, crc32c(bytes(batch[_CRC_START:])))
        data = [{"name": key[0], "partition_data": [{"index": key[1], "records": bytes(batch)}]}]
        request = {"transactional_id": name, "acks": -1, "timeout_ms": 10_000, "topic_data": data}
        entry = client.request(apis.PRODUCE, 8, request)["responses"][0]["partition_responses"][0]
        if not entry["error_code"]:
            self.acknowledged.batches.setdefault(key, {})[entry["base_offset"]] = bytes(batch[_CRC_POSITION:])
        if self.random.random() < 0.8:
            client.request(apis.END_TXN, 1, producer | {"committed": self.random.random() < 0.5})


def check_served(broker: KlogBroker, acknowledged: Acknowledged) -> None:
    """Assert that the broker serves all acknowledged data: batches byte for byte, and committed offsets."""
    with RawClient(broker.port, _SECONDS) as client:
        for (topic, index), batches in acknowledged.batches.items():
            start = acknowledged.starts.get((topic, index), 0)
            for offset, expected in batches.items():
                if offset < start:
                    continue
                deadline = time.monotonic() + _SECONDS
                while (found := client.fetch(topic, offset, 11, 1, index))[0] in _RETRIABLE:
                    assert time.monotonic() < deadline, (topic, index, found[0])
                assert found[0] == 0, (topic, index, offset, found[0])
                first = next(walk(found[1]))
                assert first.base_offset == offset, (topic, index, offset, first)
                assert found[1][_CRC_POSITION : first.size] == expected, (topic, index, offset)
        for (group, topic, index), committed in acknowledged.commits.items():
            request: dict[str, Any] = {"group_id": group, "topics": [{"name": topic, "partition_indexes": [index]}]}
            deadline = time.monotonic() + _SECONDS
            while (answer := client.request(apis.OFFSET_FETCH, 3, request))["error_code"] in _RETRIABLE:
                assert time.monotonic() < deadline, answer
            (entry,) = answer["topics"][0]["partitions"]
            assert (entry["committed_offset"], entry["metadata"]) == committed, (group, topic, index)
