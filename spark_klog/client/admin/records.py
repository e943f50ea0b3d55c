"""Records and logs: offsets by time, deletion of records, log directories, producers of partitions; the cluster."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from spark_klog.client.admin.calls import AdminCalls, Outcomes, mapped
from spark_klog.client.answers import answer_error
from spark_klog.client.arguments import items_of, mapping_of, number_of, partition_of, partitions_of
from spark_klog.client.cluster import TopicPartition
from spark_klog.client.offsets import by_topic, numbers_by_topic, partition_entries
from spark_klog.errors import ConfigError, DecodeError, KlogError, UnsupportedVersionError
from spark_klog.protocol.apis import DELETE_RECORDS, DESCRIBE_LOG_DIRS, LIST_OFFSETS, METADATA
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.records import EARLIEST, LATEST, MAX_TIMESTAMP

OffsetTime = Literal["earliest", "latest", "max-timestamp"] | int
_PLACES = {"earliest": EARLIEST, "latest": LATEST, "max-timestamp": MAX_TIMESTAMP}
#: The first version of ListOffsets with MAX_TIMESTAMP (KIP-734).
_FIRST_WITH_MAX = 7
#: DeleteRecords up to the high watermark.
_TO_END = -1


@dataclass(frozen=True)
class FoundOffset:
    """An offset, with the timestamp (ms) and the leader epoch of its record where the broker tells them.

    `offset` is None if no record has the timestamp or a later one.
    """

    offset: int | None
    timestamp: int | None
    leader_epoch: int | None


@dataclass(frozen=True)
class BrokerDescription:
    """A broker: its node id, address and rack."""

    node: int
    host: str
    port: int
    rack: str | None


@dataclass(frozen=True)
class ClusterDescription:
    """The cluster; `controller` is a node id, with KRaft any broker, which passes changes on; None if unknown."""

    cluster_id: str | None
    controller: int | None
    brokers: tuple[BrokerDescription, ...]


@dataclass(frozen=True)
class Replica:
    """A log in a directory: its size in bytes, and how many records it is behind.

    `is_future`: it will replace the log in another directory of the broker.
    """

    size: int
    offset_lag: int
    is_future: bool


@dataclass(frozen=True)
class LogDir:
    """A log directory of a broker; `error` says why it can't be used.

    `total_bytes` and `usable_bytes` of its volume are None from brokers before 3.3.
    """

    error: KlogError | None
    replicas: dict[TopicPartition, Replica]
    total_bytes: int | None
    usable_bytes: int | None


class RecordCalls(AdminCalls):
    """Calls about records, logs and brokers."""

    def describe_cluster(self) -> ClusterDescription:
        """The brokers, the controller and the id of the cluster. Metadata, any broker."""
        with self._turn, self._call():
            answer = self._attempt(lambda: self.cluster.any_broker(METADATA, lambda _: {"topics": []}))
        brokers = [
            BrokerDescription(entry["node_id"], entry["host"], entry["port"], entry["rack"])
            for entry in sorted(answer["brokers"], key=lambda entry: int(entry["node_id"]))
        ]
        controller = answer["controller_id"]
        return ClusterDescription(answer["cluster_id"], controller if controller >= 0 else None, tuple(brokers))

    def list_offsets(self, times: Mapping[TopicPartition, OffsetTime]) -> Outcomes[TopicPartition, FoundOffset]:
        """The offset of each partition at a time. ListOffsets, at the leaders.

        A time is "earliest", "latest", "max-timestamp" (the record with the largest timestamp, Kafka 3.0) or ms since
        1970: the first record with this timestamp or a later one. With isolation.level=read_committed, "latest" is the
        last stable offset.
        """
        wanted = {partition_of("times", key): _time(key, value) for key, value in mapping_of("times", times).items()}

        def request(keys: Collection[TopicPartition]) -> Message:
            entries = ((key, {"partition_index": key[1], "timestamp": wanted[key]}) for key in keys)
            return {"isolation_level": self.cluster.config.isolation_level, "topics": _topics(entries)}

        def ask(rest: list[TopicPartition]) -> dict[TopicPartition, Message | KlogError]:
            if MAX_TIMESTAMP in wanted.values():
                self._check_max_timestamp()
            return self._ask_leaders(LIST_OFFSETS, rest, request, partition_entries)

        with self._turn, self._call():
            return mapped(self._each(wanted, ask), _found)

    def _check_max_timestamp(self) -> None:
        for node in self.cluster.nodes:
            if self.cluster.version_of(node, LIST_OFFSETS) < _FIRST_WITH_MAX:
                raise UnsupportedVersionError(f"ListOffsets by max-timestamp needs Kafka 3.0 or later at broker {node}")

    def delete_records(self, offsets: Mapping[TopicPartition, int]) -> Outcomes[TopicPartition, int]:
        """Delete the records before an offset of each partition (-1: all); the result is the first offset left.

        DeleteRecords (Kafka 0.11), at the leaders. An offset that the log does not have is OFFSET_OUT_OF_RANGE, a
        compacted topic POLICY_VIOLATION.
        """
        wanted = {
            partition_of("offsets", key): number_of(f"the offset of {key}", offset, _TO_END)
            for key, offset in mapping_of("offsets", offsets).items()
        }

        def request(keys: Collection[TopicPartition]) -> Message:
            entries = ((key, {"partition_index": key[1], "offset": wanted[key]}) for key in keys)
            return {"topics": _topics(entries), "timeout_ms": self._broker_timeout_ms}

        def ask(rest: list[TopicPartition]) -> dict[TopicPartition, Message | KlogError]:
            return self._ask_leaders(DELETE_RECORDS, rest, request, partition_entries)

        with self._turn, self._call():
            return mapped(self._each(wanted, ask), lambda entry: int(entry["low_watermark"]))

    def describe_log_dirs(
        self, brokers: Iterable[int] | None = None, partitions: Iterable[TopicPartition] | None = None
    ) -> Outcomes[int, dict[str, LogDir]]:
        """The log directories of brokers (None: all) by path, with the logs of the partitions (None: all) in them.

        DescribeLogDirs (Kafka 1.0), at each broker.
        """
        nodes = None if brokers is None else [number_of("a broker", node) for node in items_of("brokers", brokers)]
        wanted = None if partitions is None else partitions_of("partitions", partitions)

        def ask(rest: list[int]) -> dict[int, Message | KlogError]:
            return self._ask_nodes(DESCRIBE_LOG_DIRS, rest, {"topics": None if wanted is None else _numbers(wanted)})

        with self._turn, self._call():
            if nodes is None:
                self._attempt(lambda: self.cluster.metadata([]))
                nodes = self.cluster.nodes
            return mapped(self._each(nodes, ask), _directories)


def _time(key: object, value: object) -> int:
    if isinstance(value, str):
        if value not in _PLACES:
            raise ConfigError(f"the time {value!r} of {key}: set earliest, latest, max-timestamp or ms since 1970")
        return _PLACES[value]
    return number_of(f"the time of {key}", value)


def _topics(entries: Iterable[tuple[TopicPartition, Message]]) -> list[Message]:
    return [{"name": topic, "partitions": partitions} for topic, partitions in by_topic(entries).items()]


def _numbers(partitions: Iterable[TopicPartition]) -> list[Message]:
    return [{"topic": topic, "partitions": numbers} for topic, numbers in numbers_by_topic(partitions).items()]


def _found(entry: Message) -> FoundOffset:
    offset, timestamp, epoch = entry["offset"], entry["timestamp"], entry["leader_epoch"]
    return FoundOffset(
        offset if offset >= 0 else None, timestamp if timestamp >= 0 else None, epoch if epoch >= 0 else None
    )


def _directories(answer: Message) -> dict[str, LogDir]:
    found: dict[str, LogDir] = {}
    for entry in answer["results"]:
        if entry["log_dir"] in found:
            raise DecodeError(f"DescribeLogDirs response with {entry['log_dir']!r} twice")
        code = entry["error_code"]
        found[entry["log_dir"]] = LogDir(
            answer_error(DESCRIBE_LOG_DIRS, code, f"log directory {entry['log_dir']}") if code else None,
            dict(_replicas(entry)),
            entry["total_bytes"] if entry["total_bytes"] >= 0 else None,
            entry["usable_bytes"] if entry["usable_bytes"] >= 0 else None,
        )
    return found


def _replicas(entry: Message) -> Iterator[tuple[TopicPartition, Replica]]:
    for topic in entry["topics"]:
        for one in topic["partitions"]:
            replica = Replica(one["partition_size"], one["offset_lag"], one["is_future_key"])
            yield (topic["name"], one["partition_index"]), replica
