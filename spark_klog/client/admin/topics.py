"""Topics: list, describe, create and delete them; add partitions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from spark_klog.base.names import check_topic_name
from spark_klog.client.admin.calls import AdminCalls, Outcomes, by_field, without_results
from spark_klog.client.answers import answer_error
from spark_klog.client.arguments import configs_of, items_of, mapping_of, name_of, names_of, number_of
from spark_klog.errors import ConfigError, ErrorCode, KlogError, UnsupportedVersionError
from spark_klog.protocol.apis import CREATE_PARTITIONS, CREATE_TOPICS, DELETE_TOPICS, METADATA
from spark_klog.protocol.codec import Message

_BROKERS_DEFAULT = -1
#: The first versions of CreateTopics with validate_only (Kafka 0.10.2), and with the broker's defaults (KIP-464).
_FIRST_VALIDATING, _FIRST_WITH_DEFAULTS = 1, 4
_MAX_INT16, _MAX_INT32 = 0x7FFF, 0x7FFFFFFF


@dataclass(frozen=True)
class NewTopic:
    """A topic to create.

    `partitions` and `replication_factor` are the broker's defaults if they are None (Kafka 2.4 and later).
    `assignments` gives the brokers of each partition instead of both, the preferred leader first.
    """

    name: str
    partitions: int | None = None
    replication_factor: int | None = None
    configs: Mapping[str, str] = field(default_factory=dict)
    assignments: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        name_of("the name of a topic", self.name)
        if self.partitions is not None:
            number_of(f"partitions of topic {self.name}", self.partitions, 1, _MAX_INT32)
        if self.replication_factor is not None:
            number_of(f"replication_factor of topic {self.name}", self.replication_factor, 1, _MAX_INT16)
        configs_of(f"configs of topic {self.name}", self.configs)
        if self.assignments is not None:
            if self.partitions is not None or self.replication_factor is not None:
                raise ConfigError(f"topic {self.name}: assignments replace partitions and replication_factor")
            _check_assignments(f"assignments of topic {self.name}", self.assignments)

    @property
    def _needs_defaults(self) -> bool:
        return self.assignments is None and None in (self.partitions, self.replication_factor)

    def _message(self) -> Message:
        assignments = self.assignments or ()
        return {
            "name": self.name,
            "num_partitions": _BROKERS_DEFAULT if self.partitions is None else self.partitions,
            "replication_factor": _BROKERS_DEFAULT if self.replication_factor is None else self.replication_factor,
            "assignments": [{"partition_index": n, "broker_ids": list(ids)} for n, ids in enumerate(assignments)],
            "configs": [{"name": name, "value": value} for name, value in self.configs.items()],
        }


@dataclass(frozen=True)
class CreatedTopic:
    """A topic that was created, or with validate_only could be.

    Brokers before 2.4 do not return partitions and replication_factor, those before 2.8 no id: they are None.
    """

    name: str
    topic_id: UUID | None = None
    partitions: int | None = None
    replication_factor: int | None = None


@dataclass(frozen=True)
class TopicListing:
    """A topic in a list; `topic_id` is None from brokers before 2.8."""

    name: str
    topic_id: UUID | None
    is_internal: bool
    partitions: int


@dataclass(frozen=True)
class PartitionDescription:
    """A partition with node ids; `leader` is None if there is none now, `leader_epoch` from brokers before 2.1."""

    partition: int
    leader: int | None
    leader_epoch: int | None
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    offline: tuple[int, ...]


@dataclass(frozen=True)
class TopicDescription:
    """A topic and its partitions, in order; `topic_id` is None from brokers before 2.8."""

    name: str
    topic_id: UUID | None
    is_internal: bool
    partitions: tuple[PartitionDescription, ...]


class TopicCalls(AdminCalls):
    """Calls about topics."""

    def list_topics(self, *, include_internal: bool = False) -> list[TopicListing]:
        """All topics, sorted by name. Metadata, any broker."""
        with self._turn, self._call():
            found = self._attempt(lambda: self.cluster.metadata(None))
        return [
            TopicListing(name, _id(topic), topic["is_internal"], len(topic["partitions"]))
            for name, topic in sorted(found.items())
            if (include_internal or not topic["is_internal"])
            and topic["error_code"] in (ErrorCode.NONE, ErrorCode.LEADER_NOT_AVAILABLE)
        ]

    def describe_topics(self, topics: Iterable[str]) -> Outcomes[str, TopicDescription]:
        """Describe topics; a missing one has the error UNKNOWN_TOPIC_OR_PARTITION. Metadata, any broker.

        `ConfigError` for a name that no topic can have.
        """
        names = names_of("topics", topics)
        for name in names:
            check_topic_name(name)

        def ask(rest: list[str]) -> dict[str, TopicDescription | KlogError]:
            found = self.cluster.metadata(rest)
            return {name: _described(name, found.get(name)) for name in rest}

        with self._turn, self._call():
            return self._each(names, ask)

    def describe_topic(self, name: str) -> TopicDescription:
        """Describe a topic; `ProtocolError` UNKNOWN_TOPIC_OR_PARTITION if it does not exist."""
        return self.describe_topics([name_of("the name of a topic", name)]).check()[name]

    def create_topics(self, topics: Iterable[NewTopic], *, validate_only: bool = False) -> Outcomes[str, CreatedTopic]:
        """Create topics and wait until their partitions have leaders. CreateTopics, at the controller.

        With `validate_only` the broker only checks whether it would create them.
        """
        wanted: dict[str, NewTopic] = {}
        for topic in items_of("topics", topics):
            if not isinstance(topic, NewTopic):
                raise TypeError(f"each of topics must be a NewTopic, not {type(topic).__name__}")
            if topic.name in wanted:
                raise ConfigError(f"topic {topic.name} is given twice")
            wanted[topic.name] = topic

        def request(names: Collection[str]) -> Message:
            self._check_creatable([wanted[name] for name in names], validate_only)
            return {
                "topics": [wanted[name]._message() for name in names],
                "timeout_ms": self._broker_timeout_ms,
                "validate_only": validate_only,
            }

        def is_made(name: str, code: ErrorCode) -> bool:
            if validate_only or code != ErrorCode.TOPIC_ALREADY_EXISTS:
                return False
            return _count(wanted[name]) in (None, len(self.cluster.partitions([name])[name]))

        with self._turn, self._call():
            made = self._change(
                CREATE_TOPICS,
                wanted,
                request,
                by_field("topics", "name"),
                lambda name: f"creating topic {name}",
                is_made,
            )
            if not validate_only:
                self._await_leaders(made, {name: _count(wanted[name]) or 1 for name in made.successes})
        return Outcomes({name: _created(name, entry) for name, entry in made.items()})

    def create_topic(
        self,
        name: str,
        partitions: int | None = None,
        *,
        replication_factor: int | None = None,
        configs: Mapping[str, str] | None = None,
        validate_only: bool = False,
    ) -> CreatedTopic:
        """Create a topic and wait until its partitions have leaders; `ProtocolError` if the broker refuses.

        None means the broker's default, see `NewTopic`.
        """
        topic = NewTopic(name, partitions, replication_factor, configs or {})
        return self.create_topics([topic], validate_only=validate_only).check()[name]

    def _check_creatable(self, topics: Collection[NewTopic], validate_only: bool) -> None:
        version = self.cluster.version_of(self.cluster.controller_id, CREATE_TOPICS)
        if validate_only and version < _FIRST_VALIDATING:
            raise UnsupportedVersionError("CreateTopics with validate_only needs Kafka 0.10.2 or later")
        unset = [topic.name for topic in topics if topic._needs_defaults]
        if unset and version < _FIRST_WITH_DEFAULTS:
            raise UnsupportedVersionError(
                f"CreateTopics with the broker's defaults needs Kafka 2.4 or later: set partitions and "
                f"replication_factor of {', '.join(unset)}"
            )

    def delete_topics(self, topics: Iterable[str]) -> Outcomes[str, None]:
        """Delete topics with all their records. DeleteTopics, at the controller.

        Other brokers may list the topics for a moment more.
        """
        names = names_of("topics", topics)

        def request(rest: Collection[str]) -> Message:
            return {
                "topics": [{"name": name} for name in rest],
                "topic_names": list(rest),
                "timeout_ms": self._broker_timeout_ms,
            }

        def is_made(name: str, code: ErrorCode) -> bool:
            is_gone = code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            return is_gone and not self.cluster.partitions([name], missing_ok=True)

        with self._turn, self._call():
            made = self._change(
                DELETE_TOPICS,
                names,
                request,
                by_field("responses", "name"),
                lambda name: f"deleting topic {name}",
                is_made,
            )
            self.cluster.forget_leaders()
        return without_results(made)

    def delete_topic(self, name: str) -> None:
        """Delete a topic; `ProtocolError` if it does not exist or the broker refuses."""
        self.delete_topics([name_of("the name of a topic", name)]).check()

    def create_partitions(self, counts: Mapping[str, int], *, validate_only: bool = False) -> Outcomes[str, None]:
        """Raise topics' numbers of partitions to `counts` and wait for leaders. CreatePartitions, at the controller.

        Needs Kafka 1.0. With `validate_only` the broker only checks whether it would add them.
        """
        wanted = mapping_of("counts", counts)
        for name, count in wanted.items():
            number_of(f"partitions of topic {name_of('the name of a topic', name)}", count, 1, _MAX_INT32)

        def request(names: Collection[str]) -> Message:
            return {
                "topics": [{"name": name, "count": wanted[name], "assignments": None} for name in names],
                "timeout_ms": self._broker_timeout_ms,
                "validate_only": validate_only,
            }

        def is_made(name: str, code: ErrorCode) -> bool:
            if validate_only or code != ErrorCode.INVALID_PARTITIONS:
                return False
            return len(self.cluster.partitions([name])[name]) == int(wanted[name])

        with self._turn, self._call():
            made = self._change(
                CREATE_PARTITIONS,
                wanted,
                request,
                by_field("results", "name"),
                lambda name: f"partitions of topic {name}",
                is_made,
            )
            if not validate_only:
                self._await_leaders(made, {name: wanted[name] for name in made.successes})
        return without_results(made)

    def _await_leaders(self, made: Outcomes[str, Message], counts: Mapping[str, int]) -> None:
        """Wait until the topics have so many partitions with leaders; note the errors of those that have not."""

        def ask(rest: list[str]) -> dict[str, KlogError | None]:
            found = self.cluster.metadata(rest)
            return {name: _leader_error(name, found.get(name), counts[name]) for name in rest}

        for name, error in self._each(counts, ask, waits_for_topics=True).failures.items():
            made[name] = error


def _count(topic: NewTopic) -> int | None:
    return topic.partitions if topic.assignments is None else len(topic.assignments)


def _check_assignments(what: str, assignments: object) -> None:
    for ids in items_of(what, assignments):
        for node in items_of(f"each of {what}", ids):
            number_of(f"a broker in {what}", node, 0, _MAX_INT32)


def _id(topic: Message) -> UUID | None:
    found: UUID = topic["topic_id"]
    return found if found.int else None


def _described(name: str, topic: Message | None) -> TopicDescription | KlogError:
    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if topic is None else topic["error_code"]
    if topic is None or (code and not (code == ErrorCode.LEADER_NOT_AVAILABLE and topic["partitions"])):
        return answer_error(METADATA, code, f"topic {name}")
    partitions = [
        PartitionDescription(
            entry["partition_index"],
            entry["leader_id"] if entry["leader_id"] >= 0 else None,
            entry["leader_epoch"] if entry["leader_epoch"] >= 0 else None,
            tuple(entry["replica_nodes"]),
            tuple(entry["isr_nodes"]),
            tuple(entry["offline_replicas"]),
        )
        for entry in sorted(topic["partitions"], key=lambda entry: int(entry["partition_index"]))
    ]
    return TopicDescription(name, _id(topic), topic["is_internal"], tuple(partitions))


def _leader_error(name: str, topic: Message | None, count: int) -> KlogError | None:
    """Why the topic has not yet `count` partitions with leaders."""
    described = _described(name, topic)
    if isinstance(described, KlogError):
        return described
    led = sum(partition.leader is not None for partition in described.partitions)
    if led >= count:
        return None
    return answer_error(
        METADATA, ErrorCode.LEADER_NOT_AVAILABLE, f"topic {name}: {led} of {count} partitions have leaders"
    )


def _created(name: str, entry: Message | KlogError) -> CreatedTopic | KlogError:
    if isinstance(entry, KlogError):
        return entry
    if not entry:
        return CreatedTopic(name)
    partitions, replicas = entry["num_partitions"], entry["replication_factor"]
    return CreatedTopic(name, _id(entry), partitions if partitions >= 0 else None, replicas if replicas >= 0 else None)
