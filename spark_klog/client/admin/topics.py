"""Topics and other resources: list, describe, create and delete topics, add partitions; settings; elections of leaders
(KIP-460) and reassignments of replicas (KIP-455).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args
from uuid import UUID

from spark_klog.base.names import TopicPartition, check_topic_name
from spark_klog.base.settings import INT32_MAX
from spark_klog.client.admin.calls import (
    AdminCalls,
    Entries,
    Outcomes,
    Routes,
    by_field,
    by_partition,
    entry_or_error,
    known,
)
from spark_klog.client.answers import answer_error
from spark_klog.client.arguments import (
    configs_of,
    items_of,
    mapping_of,
    name_of,
    names_of,
    number_of,
    partition_of,
    partitions_of,
)
from spark_klog.client.calls import call, steps_of
from spark_klog.client.offsets import topic_entries, topic_numbers
from spark_klog.client.requests import Steps
from spark_klog.errors import ConfigError, ErrorCode, KlogError, ProtocolError, UnsupportedVersionError
from spark_klog.protocol.apis import (
    ALTER_PARTITION_REASSIGNMENTS,
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    DESCRIBE_CONFIGS,
    ELECT_LEADERS,
    INCREMENTAL_ALTER_CONFIGS,
    LIST_PARTITION_REASSIGNMENTS,
    METADATA,
)
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables import configs

_BROKERS_DEFAULT = -1
#: The first versions of CreateTopics with validate_only (Kafka 0.10.2), and with the broker's defaults (KIP-464).
_FIRST_VALIDATING, _FIRST_WITH_DEFAULTS = 1, 4
_MAX_INT16 = 0x7FFF
ResourceKind = Literal["topic", "broker", "broker-logger", "client-metrics", "group"]
_KINDS: dict[ResourceKind, int] = {
    "topic": configs.TOPIC,
    "broker": configs.BROKER,
    "broker-logger": configs.BROKER_LOGGER,
    "client-metrics": configs.CLIENT_METRICS,
    "group": configs.GROUP,
}
_KIND_NAMES = {number: kind for kind, number in _KINDS.items()}
#: Kinds whose name is a node id: only that broker answers for them.
_OF_ONE_BROKER = ("broker", "broker-logger")
_SOURCES = {
    configs.TOPIC_SOURCE: "topic",
    2: "dynamic broker",
    3: "dynamic default broker",
    configs.BROKER_SOURCE: "static broker",
    configs.DEFAULT_SOURCE: "default",
    configs.LOGGER_SOURCE: "broker logger",
    7: "client metrics",
    8: "group",
}
_PREFERRED, _UNCLEAN = 0, 1
#: The first version of ElectLeaders with a choice of the election (Kafka 2.4).
_FIRST_WITH_TYPE = 1
_NOT_NEEDED = ErrorCode.ELECTION_NOT_NEEDED


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
            number_of(f"partitions of topic {self.name}", self.partitions, 1, INT32_MAX)
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


class ConfigResource(NamedTuple):
    """What has settings: ("topic", NAME), ("broker", NODE ID as text), or ("broker", "") for the default of brokers.

    Other kinds are broker-logger (a node id), client-metrics and group.
    """

    kind: ResourceKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name or '(default of all)'}"


@dataclass(frozen=True)
class ConfigEntry:
    """A setting; `value` is None if it is sensitive or has none.

    `source` says where the value comes from: topic, dynamic broker, dynamic default broker, static broker, default,
    broker logger, client metrics, group; or "" if the broker does not say.
    """

    name: str
    value: str | None
    source: str
    is_default: bool
    is_read_only: bool
    is_sensitive: bool


@dataclass(frozen=True)
class _ListChange:
    value: str

    def __post_init__(self) -> None:
        if not isinstance(self.value, str):
            kind, given = type(self).__name__, type(self.value).__name__
            raise TypeError(f"the value of {kind} must be a str, not {given}: separate several by commas")


class Append(_ListChange):
    """Add a value to a setting that is a list."""


class Subtract(_ListChange):
    """Remove a value from a setting that is a list."""


ConfigChange = str | Append | Subtract | None


@dataclass(frozen=True)
class Reassignment:
    """A partition whose replicas are being changed: the brokers that hold them, of which some come or go."""

    replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]


class TopicCalls(AdminCalls):
    """Calls about topics, settings of any resource, leaders and replicas."""

    @call
    def list_topics(self, *, include_internal: bool = False) -> Steps[list[TopicListing]]:
        """All topics, sorted by name. Metadata, any broker."""
        topics = yield from self._attempt(lambda: self.cluster.asking_metadata(None))
        return [
            TopicListing(name, _id(topic), topic["is_internal"], len(topic["partitions"]))
            for name, topic in sorted(topics.items())
            if (include_internal or not topic["is_internal"])
            and topic["error_code"] in (ErrorCode.NONE, ErrorCode.LEADER_NOT_AVAILABLE)
        ]

    @call
    def describe_topics(self, topics: Iterable[str]) -> Steps[Outcomes[str, TopicDescription]]:
        """Describe topics; a missing one has the error UNKNOWN_TOPIC_OR_PARTITION. Metadata, any broker.

        `ConfigError` for a name that no topic can have.
        """
        names = names_of("topics", topics)
        for name in names:
            check_topic_name(name)

        def ask(rest: list[str]) -> Steps[dict[str, TopicDescription | KlogError]]:
            topics = yield from self.cluster.asking_metadata(rest)
            return {name: _described(name, topics.get(name)) for name in rest}

        return self._each(names, ask)

    @call
    def describe_topic(self, name: str) -> Steps[TopicDescription]:
        """Describe a topic; `ProtocolError` UNKNOWN_TOPIC_OR_PARTITION if it does not exist."""
        return (yield from steps_of(self.describe_topics)([name_of("the name of a topic", name)])).check()[name]

    @call
    def create_topics(
        self, topics: Iterable[NewTopic], *, validate_only: bool = False
    ) -> Steps[Outcomes[str, CreatedTopic]]:
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

        def check(names: list[str]) -> Steps[None]:
            return self._check_creatable([wanted[name] for name in names], validate_only)

        def request(names: list[str]) -> Message:
            return {
                "topics": [wanted[name]._message() for name in names],
                "timeout_ms": self._broker_timeout_ms,
                "validate_only": validate_only,
            }

        def is_made(name: str, code: ErrorCode) -> bool:
            return not validate_only and code == ErrorCode.TOPIC_ALREADY_EXISTS

        def is_there(name: str) -> Steps[bool]:
            return _count(wanted[name]) in (None, len((yield from self.cluster.asking_partitions([name]))[name]))

        with self._turn, self._call():
            entries = by_field("topics", "name")
            doing, result = "creating topic", dict[str, Any]
            made = yield from self._each_at(
                CREATE_TOPICS, wanted, request, entries, doing, is_made, is_there=is_there, check=check, result=result
            )
            if not validate_only:
                yield from self._await_leaders(made, {name: _count(wanted[name]) or 1 for name in made.successes})
        return Outcomes({name: _created(name, entry) for name, entry in made.items()})

    @call
    def create_topic(
        self,
        name: str,
        partitions: int | None = None,
        *,
        replication_factor: int | None = None,
        configs: Mapping[str, str] | None = None,
        validate_only: bool = False,
    ) -> Steps[CreatedTopic]:
        """Create a topic and wait until its partitions have leaders; `ProtocolError` if the broker refuses.

        None means the broker's default, see `NewTopic`.
        """
        topic = NewTopic(name, partitions, replication_factor, configs or {})
        return (yield from steps_of(self.create_topics)([topic], validate_only=validate_only)).check()[name]

    def _check_creatable(self, topics: Collection[NewTopic], validate_only: bool) -> Steps[None]:
        version = yield from self.cluster.asking_version(self.cluster.controller_id, CREATE_TOPICS)
        if validate_only and version < _FIRST_VALIDATING:
            raise UnsupportedVersionError("CreateTopics with validate_only needs Kafka 0.10.2 or later")
        unset = [topic.name for topic in topics if topic._needs_defaults]
        if unset and version < _FIRST_WITH_DEFAULTS:
            raise UnsupportedVersionError(
                f"CreateTopics with the broker's defaults needs Kafka 2.4 or later: set partitions and "
                f"replication_factor of {', '.join(unset)}"
            )

    @call
    def delete_topics(self, topics: Iterable[str]) -> Steps[Outcomes[str, None]]:
        """Delete topics with all their records. DeleteTopics, at the controller.

        Other brokers may list the topics for a moment more.
        """
        names = names_of("topics", topics)

        def request(rest: list[str]) -> Message:
            return {
                "topics": [{"name": name} for name in rest],
                "topic_names": rest,
                "timeout_ms": self._broker_timeout_ms,
            }

        def is_made(name: str, code: ErrorCode) -> bool:
            return code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

        def is_gone(name: str) -> Steps[bool]:
            return not (yield from self.cluster.asking_partitions([name], missing_ok=True))

        with self._turn, self._call():
            entries = by_field("responses", "name")
            doing = "deleting topic"
            made = yield from self._each_at(DELETE_TOPICS, names, request, entries, doing, is_made, is_there=is_gone)
            self.cluster.forget_leaders()
        return made

    @call
    def delete_topic(self, name: str) -> Steps[None]:
        """Delete a topic; `ProtocolError` if it does not exist or the broker refuses."""
        (yield from steps_of(self.delete_topics)([name_of("the name of a topic", name)])).check()

    @call
    def create_partitions(
        self, counts: Mapping[str, int], *, validate_only: bool = False
    ) -> Steps[Outcomes[str, None]]:
        """Raise topics' numbers of partitions to `counts` and wait for leaders. CreatePartitions, at the controller.

        Needs Kafka 1.0. With `validate_only` the broker only checks whether it would add them.
        """
        wanted = mapping_of("counts", counts)
        for name, count in wanted.items():
            number_of(f"partitions of topic {name_of('the name of a topic', name)}", count, 1, INT32_MAX)

        def request(names: list[str]) -> Message:
            return {
                "topics": [{"name": name, "count": wanted[name], "assignments": None} for name in names],
                "timeout_ms": self._broker_timeout_ms,
                "validate_only": validate_only,
            }

        def is_made(name: str, code: ErrorCode) -> bool:
            return not validate_only and code == ErrorCode.INVALID_PARTITIONS

        def is_there(name: str) -> Steps[bool]:
            return len((yield from self.cluster.asking_partitions([name]))[name]) == int(wanted[name])

        with self._turn, self._call():
            entries = by_field("results", "name")
            doing = "partitions of topic"
            made = yield from self._each_at(
                CREATE_PARTITIONS, wanted, request, entries, doing, is_made, is_there=is_there
            )
            if not validate_only:
                yield from self._await_leaders(made, {name: wanted[name] for name in made.successes})
        return made

    def _await_leaders(self, made: Outcomes[str, Any], counts: Mapping[str, int]) -> Steps[None]:
        """Wait until the topics have so many partitions with leaders; note the errors of those that have not."""

        def ask(rest: list[str]) -> Steps[dict[str, KlogError | None]]:
            topics = yield from self.cluster.asking_metadata(rest)
            return {name: _leader_error(name, topics.get(name), counts[name]) for name in rest}

        for name, error in (yield from self._each(counts, ask, waits_for_topics=True)).failures.items():
            made[name] = error

    @call
    def describe_configs(
        self, resources: Iterable[ConfigResource | tuple[ResourceKind, str]]
    ) -> Steps[Outcomes[ConfigResource, dict[str, ConfigEntry]]]:
        """The settings of each resource, by name. DescribeConfigs (Kafka 0.11), at the broker that it is about."""
        wanted = [_resource(value) for value in items_of("resources", resources)]

        def request(keys: list[ConfigResource]) -> Message:
            entries = [
                {"resource_type": _KINDS[key.kind], "resource_name": key.name, "configuration_keys": None}
                for key in keys
            ]
            return {"resources": entries}

        return self._each_at(
            DESCRIBE_CONFIGS,
            wanted,
            request,
            _of_resources("results"),
            "settings of",
            places=self._at_own_brokers,
            result=lambda answer: {entry["name"]: _config_entry(entry) for entry in answer["configs"]},
        )

    @call
    def alter_configs(
        self,
        changes: Mapping[ConfigResource | tuple[ResourceKind, str], Mapping[str, ConfigChange]],
        *,
        validate_only: bool = False,
    ) -> Steps[Outcomes[ConfigResource, None]]:
        """Change settings, all of a resource or none: text sets one, None resets it to its default.

            admin.alter_configs({("topic", "clicks"): {"retention.ms": "1000", "segment.ms": None}}).check()

        `Append` and `Subtract` change lists; other settings stay. IncrementalAlterConfigs (Kafka 2.3), at the
        controller, or the broker that it is about. With `validate_only` the broker only checks the changes.
        """
        wanted: dict[ConfigResource, dict[str, ConfigChange]] = {}
        for value, of_resource in mapping_of("changes", changes).items():
            key = _resource(value)
            wanted[key] = mapping_of(f"changes of settings of {key}", of_resource)
            for name, change in wanted[key].items():
                name_of(f"each name in changes of settings of {key}", name)
                if not isinstance(change, str | Append | Subtract | None):
                    raise TypeError(f"{name} must be a str, Append, Subtract or None, not {type(change).__name__}")

        def request(keys: list[ConfigResource]) -> Message:
            entries = [
                {
                    "resource_type": _KINDS[key.kind],
                    "resource_name": key.name,
                    "configs": [_operation(name, change) for name, change in wanted[key].items()],
                }
                for key in keys
            ]
            return {"resources": entries, "validate_only": validate_only}

        entries, places = _of_resources("responses"), self._at_own_brokers
        return self._each_at(INCREMENTAL_ALTER_CONFIGS, wanted, request, entries, "settings of", places=places)

    def _at_own_brokers(self, keys: list[ConfigResource]) -> Steps[Routes[ConfigResource]]:
        """The broker that each resource is about, or else the controller."""
        controller = yield from self.cluster.asking_controller()
        return (
            yield from self._at_brokers(
                {key: int(key.name) if key.kind in _OF_ONE_BROKER and key.name else controller for key in keys}
            )
        )

    @call
    def elect_leaders(
        self, partitions: Iterable[TopicPartition] | None = None, *, unclean: bool = False
    ) -> Steps[Outcomes[TopicPartition, bool]]:
        """Make the first replica of each partition its leader; the result says whether the leader has changed.

        With `unclean` (Kafka 2.4), a partition without a leader gets any replica that lives, and may lose records.
        None: all partitions that need an election; only these are in the outcomes. ElectLeaders (Kafka 2.2), at the
        controller.
        """
        keys = None if partitions is None else partitions_of("partitions", partitions)

        def check(*_: object) -> Steps[None]:
            version = yield from self.cluster.asking_version(self.cluster.controller_id, ELECT_LEADERS)
            if unclean and version < _FIRST_WITH_TYPE:
                raise UnsupportedVersionError("ElectLeaders with unclean=True needs Kafka 2.4 or later")

        def request(wanted: list[TopicPartition] | None) -> Message:
            return {
                "election_type": _UNCLEAN if unclean else _PREFERRED,
                "topic_partitions": None if wanted is None else topic_numbers(wanted, "topic"),
                "timeout_ms": self._broker_timeout_ms,
            }

        entries = by_partition("replica_election_results", "topic", "partition_result", "partition_id")
        doing = "election of a leader of"
        if keys is None:
            answer = yield from self._ask_controller(ELECT_LEADERS, request(None), check)
            elected = {
                key: entry_or_error(ELECT_LEADERS, entry, f"{doing} {key[0]}-{key[1]}")
                for key, entry in entries(answer, ())
            }
        else:

            def is_made(_: TopicPartition, code: ErrorCode) -> bool:
                return code == _NOT_NEEDED

            elected = yield from self._each_at(
                ELECT_LEADERS, keys, request, entries, doing, is_made, check=check, result=dict
            )
        return Outcomes({key: _is_elected(outcome) for key, outcome in elected.items()})

    @call
    def alter_partition_reassignments(
        self, replicas: Mapping[TopicPartition, Sequence[int] | None]
    ) -> Steps[Outcomes[TopicPartition, None]]:
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
            ids = [number_of(f"a broker of {key}", node, 0, INT32_MAX) for node in items_of(f"brokers of {key}", nodes)]
            if not ids:
                raise ConfigError(f"the brokers of {key} are empty: name at least one, or None to cancel a move")
            wanted[key] = ids

        def request(keys: list[TopicPartition]) -> Message:
            topics = topic_entries((key, {"replicas": wanted[key]}) for key in keys)
            return {"timeout_ms": self._broker_timeout_ms, "topics": topics}

        def was_cancelled(key: TopicPartition, code: ErrorCode) -> bool:
            return wanted[key] is None and code == ErrorCode.NO_REASSIGNMENT_IN_PROGRESS

        entries = by_partition("responses")
        doing = "reassignment of"
        return self._each_at(ALTER_PARTITION_REASSIGNMENTS, wanted, request, entries, doing, was_cancelled)

    @call
    def list_partition_reassignments(
        self, partitions: Iterable[TopicPartition] | None = None
    ) -> Steps[dict[TopicPartition, Reassignment]]:
        """Those of the partitions (None: of all) that are being moved. ListPartitionReassignments (Kafka 2.4)."""
        keys = None if partitions is None else partitions_of("partitions", partitions)
        topics = None if keys is None else topic_numbers(keys, numbers="partition_indexes")

        answer = yield from self._ask_controller(
            LIST_PARTITION_REASSIGNMENTS, {"timeout_ms": self._broker_timeout_ms, "topics": topics}
        )
        return {
            (topic["name"], entry["partition_index"]): Reassignment(
                tuple(entry["replicas"]), tuple(entry["adding_replicas"]), tuple(entry["removing_replicas"])
            )
            for topic in answer["topics"]
            for entry in topic["partitions"]
        }


def _count(topic: NewTopic) -> int | None:
    return topic.partitions if topic.assignments is None else len(topic.assignments)


def _check_assignments(what: str, assignments: object) -> None:
    for ids in items_of(what, assignments):
        for node in items_of(f"each of {what}", ids):
            number_of(f"a broker in {what}", node, 0, INT32_MAX)


def _id(topic: Message) -> UUID | None:
    topic_id: UUID = topic["topic_id"]
    return topic_id if topic_id.int else None


def _described(name: str, topic: Message | None) -> TopicDescription | KlogError:
    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if topic is None else topic["error_code"]
    if topic is None or (code and not (code == ErrorCode.LEADER_NOT_AVAILABLE and topic["partitions"])):
        return answer_error(METADATA, code, f"topic {name}")
    partitions = [
        PartitionDescription(
            entry["partition_index"],
            known(entry["leader_id"]),
            known(entry["leader_epoch"]),
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
    return CreatedTopic(name, _id(entry), known(entry["num_partitions"]), known(entry["replication_factor"]))


def _resource(value: object) -> ConfigResource:
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"a resource must be (kind, name), for example ('topic', 'clicks'), not {value!r}")
    kind, name = value
    if kind not in get_args(ResourceKind):
        raise ConfigError(f"resource {value!r}: the kind must be one of {', '.join(_KINDS)}")
    if kind in _OF_ONE_BROKER and isinstance(name, int):
        raise TypeError(f"resource {value!r}: write the node id as text, {str(name)!r}")
    if kind in _OF_ONE_BROKER and name != "":
        is_number = isinstance(name, str) and name.isascii() and name.isdecimal()
        number_of(f"the node id of {value!r}", int(name) if is_number else name, 0, 0x7FFFFFFF)
    elif kind != "broker":
        name_of(f"the name of {value!r}", name)
    return ConfigResource(kind, name)


def _operation(name: str, change: ConfigChange) -> Message:
    if isinstance(change, Append):
        return {"name": name, "config_operation": configs.APPEND, "value": change.value}
    if isinstance(change, Subtract):
        return {"name": name, "config_operation": configs.SUBTRACT, "value": change.value}
    return {"name": name, "config_operation": configs.DELETE if change is None else configs.SET, "value": change}


def _of_resources(results: str) -> Entries[ConfigResource]:
    # an unknown kind is not one that was asked for
    return lambda answer, _: (
        (ConfigResource(_KIND_NAMES.get(entry["resource_type"], "topic"), entry["resource_name"]), entry)
        for entry in answer[results]
    )


def _config_entry(entry: Message) -> ConfigEntry:
    source = entry["config_source"]
    # version 0 has no source
    is_default = source == configs.DEFAULT_SOURCE if source >= 0 else entry["is_default"]
    return ConfigEntry(
        entry["name"],
        None if entry["is_sensitive"] else entry["value"],
        _SOURCES.get(source, ""),
        bool(is_default),
        entry["read_only"],
        entry["is_sensitive"],
    )


def _is_elected(outcome: Message | KlogError) -> bool | KlogError:
    if isinstance(outcome, ProtocolError) and outcome.code == _NOT_NEEDED:
        return False
    return outcome if isinstance(outcome, KlogError) else True
