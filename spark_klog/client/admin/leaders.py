"""Leaders and replicas of partitions: elections (KIP-460) and reassignments (KIP-455)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from spark_klog.client.admin.calls import AdminCalls, Outcomes, without_results
from spark_klog.client.answers import answer_error, check_code
from spark_klog.client.arguments import items_of, mapping_of, number_of, partition_of, partitions_of
from spark_klog.client.cluster import TopicPartition
from spark_klog.client.offsets import numbers_by_topic
from spark_klog.errors import ConfigError, ErrorCode, KlogError, ProtocolError, UnsupportedVersionError
from spark_klog.protocol.apis import ALTER_PARTITION_REASSIGNMENTS, ELECT_LEADERS, LIST_PARTITION_REASSIGNMENTS
from spark_klog.protocol.codec import Message

_PREFERRED, _UNCLEAN = 0, 1
#: The first version of ElectLeaders with a choice of the election (Kafka 2.4).
_FIRST_WITH_TYPE = 1
_MAX_INT32 = 0x7FFFFFFF
_NOT_NEEDED = ErrorCode.ELECTION_NOT_NEEDED


@dataclass(frozen=True)
class Reassignment:
    """A partition whose replicas are being changed: the brokers that hold them, of which some come or go."""

    replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]


class LeaderCalls(AdminCalls):
    """Calls about leaders and replicas."""

    def elect_leaders(
        self, partitions: Iterable[TopicPartition] | None = None, *, unclean: bool = False
    ) -> Outcomes[TopicPartition, bool]:
        """Make the first replica of each partition its leader; the result says whether the leader has changed.

        With `unclean` (Kafka 2.4), a partition without a leader gets any replica that lives, and may lose records.
        None: all partitions that need an election; only these are in the outcomes. ElectLeaders (Kafka 2.2), at the
        controller.
        """
        keys = None if partitions is None else partitions_of("partitions", partitions)

        def request(wanted: Collection[TopicPartition] | None) -> Message:
            if unclean and self.cluster.version_of(self.cluster.controller(), ELECT_LEADERS) < _FIRST_WITH_TYPE:
                raise UnsupportedVersionError("ElectLeaders with unclean=True needs Kafka 2.4 or later")
            return {
                "election_type": _UNCLEAN if unclean else _PREFERRED,
                "topic_partitions": None
                if wanted is None
                else [{"topic": topic, "partitions": numbers} for topic, numbers in numbers_by_topic(wanted).items()],
                "timeout_ms": self._broker_timeout_ms,
            }

        def entries(answer: Message) -> Iterator[tuple[TopicPartition, Message]]:
            check_code(ELECT_LEADERS, answer["error_code"], "election of leaders")
            for topic in answer["replica_election_results"]:
                for entry in topic["partition_result"]:
                    yield (topic["topic"], entry["partition_id"]), entry

        def elect_all() -> dict[TopicPartition, Message | KlogError]:
            answer = self.cluster.request(self.cluster.controller(), ELECT_LEADERS, request(None))
            return {
                key: answer_error(ELECT_LEADERS, entry["error_code"], _election_of(key))
                if entry["error_code"]
                else entry
                for key, entry in entries(answer)
            }

        with self._turn, self._call():
            if keys is None:
                found = Outcomes(self._attempt(elect_all))
            else:
                found = self._change(
                    ELECT_LEADERS, keys, request, entries, _election_of, lambda _, code: code == _NOT_NEEDED
                )
        return Outcomes({key: _is_elected(outcome) for key, outcome in found.items()})

    def alter_partition_reassignments(
        self, replicas: Mapping[TopicPartition, Sequence[int] | None]
    ) -> Outcomes[TopicPartition, None]:
        """Begin to move partitions to these brokers, the preferred leader first; None cancels a move.

        The move itself takes as long as the brokers copy: see `list_partition_reassignments`.
        AlterPartitionReassignments (Kafka 2.4), at the controller.
        """
        wanted: dict[TopicPartition, list[int] | None] = {}
        for value, nodes in mapping_of("replicas", replicas).items():
            key = partition_of("replicas", value)
            if nodes is None:
                wanted[key] = None
                continue
            ids = [
                number_of(f"a broker of {key}", node, 0, _MAX_INT32) for node in items_of(f"brokers of {key}", nodes)
            ]
            if not ids:
                raise ConfigError(f"the brokers of {key} are empty: name at least one, or None to cancel a move")
            wanted[key] = ids

        def request(keys: Collection[TopicPartition]) -> Message:
            topics: dict[str, list[Message]] = {}
            for topic, partition in keys:
                entry = {"partition_index": partition, "replicas": wanted[topic, partition]}
                topics.setdefault(topic, []).append(entry)
            return {
                "timeout_ms": self._broker_timeout_ms,
                "topics": [{"name": topic, "partitions": entries} for topic, entries in topics.items()],
            }

        def entries(answer: Message) -> Iterator[tuple[TopicPartition, Message]]:
            check_code(ALTER_PARTITION_REASSIGNMENTS, answer["error_code"], "reassignment of partitions")
            for topic in answer["responses"]:
                for entry in topic["partitions"]:
                    yield (topic["name"], entry["partition_index"]), entry

        def was_cancelled(key: TopicPartition, code: ErrorCode) -> bool:
            return wanted[key] is None and code == ErrorCode.NO_REASSIGNMENT_IN_PROGRESS

        with self._turn, self._call():
            altered = self._change(
                ALTER_PARTITION_REASSIGNMENTS,
                wanted,
                request,
                entries,
                lambda key: f"reassignment of {key[0]}-{key[1]}",
                was_cancelled,
            )
        return without_results(altered)

    def list_partition_reassignments(
        self, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, Reassignment]:
        """Those of the partitions (None: of all) that are being moved. ListPartitionReassignments (Kafka 2.4)."""
        keys = None if partitions is None else partitions_of("partitions", partitions)
        topics = None
        if keys is not None:
            topics = [{"name": topic, "partition_indexes": found} for topic, found in numbers_by_topic(keys).items()]

        def ask() -> Message:
            request = {"timeout_ms": self._broker_timeout_ms, "topics": topics}
            answer = self.cluster.request(self.cluster.controller(), LIST_PARTITION_REASSIGNMENTS, request)
            check_code(LIST_PARTITION_REASSIGNMENTS, answer["error_code"], "list of reassignments")
            return answer

        with self._turn, self._call():
            answer = self._attempt(ask)
        return {
            (topic["name"], entry["partition_index"]): Reassignment(
                tuple(entry["replicas"]), tuple(entry["adding_replicas"]), tuple(entry["removing_replicas"])
            )
            for topic in answer["topics"]
            for entry in topic["partitions"]
        }


def _election_of(key: TopicPartition) -> str:
    return f"election of a leader of {key[0]}-{key[1]}"


def _is_elected(outcome: Message | KlogError) -> bool | KlogError:
    if isinstance(outcome, ProtocolError) and outcome.code == _NOT_NEEDED:
        return False
    return outcome if isinstance(outcome, KlogError) else True
