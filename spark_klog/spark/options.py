"""Parse and check the connector's options, which have the names of Spark's Kafka connector."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from spark_klog.client.config import ClientConfig, check_names, client_config, is_known, without_effect
from spark_klog.client.security.secrets import Settings
from spark_klog.clock import system_ms
from spark_klog.errors import ConfigError
from spark_klog.spark.offsets import OffsetSpec, Spec, parse_assign, parse_offsets, parse_timestamp, parse_timestamps
from spark_klog.spark.option_values import boolean, canonical, choice, count, milliseconds

_log = logging.getLogger(__name__)

#: The prefix of Kafka's settings among the options.
PREFIX = "kafka."
_SUBSCRIPTIONS = ("assign", "subscribe", "subscribePattern")
#: Options for the end of a read; not allowed in a stream, which has no end.
_ENDING = ("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets")
#: Options of micro-batches; without effect in a batch query, as with Spark's Kafka connector.
_TRIGGER = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
_SOURCE = (
    "path",
    *_SUBSCRIPTIONS,
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsets",
    "startingOffsetsByTimestampStrategy",
    *_ENDING,
    *_TRIGGER,
    "minPartitions",
    "maxRecordsPerPartition",
    "maxBytesPerPartition",
    "failOnDataLoss",
    "badRecords",
    "badRecordsPath",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "kafkaConsumer.pollTimeoutMs",
    "groupIdPrefix",
    "offsetsPath",
    "estimateRecordBytes",
)
_SINK = ("topic", "createTopics", "deliveryGuarantee", "transactionalIdPrefix")
_KNOWN = (*_SOURCE, *_SINK, "includeHeaders")
#: Settings that users can't set, as with Spark's Kafka connector.
_PROTECTED = {
    "key.deserializer": "keys are binary: cast the column instead",
    "value.deserializer": "values are binary: cast the column instead",
    "key.serializer": "keys are binary or strings",
    "value.serializer": "values are binary or strings",
    "auto.offset.reset": "use startingOffsets and failOnDataLoss",
    "enable.auto.commit": "a query's progress is in Spark's checkpoint",
    "interceptor.classes": "interceptors are not supported",
    "transactional.id": "deliveryGuarantee=exactly-once writes in transactions and names them, see "
    "transactionalIdPrefix",
}
#: Secrets that Spark does not redact by name, but shows in the plans of streams.
_SHOWN_KEYS = frozenset({"ssl.keystore.key", "ssl.key.pem"})
#: Kafka's settings that apply to directories.
_OF_DIRECTORIES = ("isolation.level", "decompressed.max.bytes")
#: Spark's own options for a streaming write, which it passes to the sink, too.
_CHECKPOINT = "checkpointlocation"
_SPARKS = frozenset({_CHECKPOINT, "queryname"})
#: The default of transaction.timeout.ms in exactly-once writes: the brokers' default of transaction.max.timeout.ms.
_TRANSACTION_MS = 900_000
#: How the transactional ids of exactly-once writes begin, without the option transactionalIdPrefix.
DEFAULT_ID_PREFIX = "klog-"
#: In characters, far below Kafka's 32,767 bytes: the decision log repeats it for each task.
_LONGEST_ID_PREFIX = 249
#: The number of partitions in CreateTopics is an int32.
_MOST_PARTITIONS = 0x7FFFFFFF
#: Defaults for retries of ListOffsets: a broker may return latest offsets older than those it returned before.
_OFFSET_RETRIES, _OFFSET_RETRY_MS = 5, 200
_KNOWN_BY_KEY = {canonical(name): name for name in _KNOWN}


@dataclass(frozen=True)
class Subscription:
    """The topics or partitions to read: exactly one of the three. `assign` is {topic: [partitions]}."""

    topics: tuple[str, ...] | None = None
    pattern: str | None = None
    assign: dict[str, list[int]] | None = None

    def names(self, topic: str, partition: int) -> bool:
        """Whether the subscription includes a partition, if it exists and is not internal."""
        if self.assign is not None:
            return partition in self.assign.get(topic, ())
        if self.pattern is not None:
            return re.search(self.pattern, topic) is not None
        return topic in (self.topics or ())


#: All topics that are not internal: the empty pattern matches every name.
ALL_TOPICS = Subscription(pattern="")


@dataclass(frozen=True)
class GroupOffsetsOptions:
    """Where to publish a query's progress as offsets of `group`: at its coordinator, and in trees of directories.

    `trees` are addresses for `directories.opening.open_tree`. With `dual` the group migrates between coordinator and
    ZooKeeper, which is the last tree: reads take the larger offset of both.
    """

    group: str
    coordinator: bool
    trees: tuple[str, ...]
    dual: bool = False


@dataclass(frozen=True)
class TriggerLimits:
    """Limits of a micro-batch: maximum records and bytes; minimum records, which `max_delay_ms` overrides."""

    max_offsets: int | None = None
    max_bytes: int | None = None
    min_offsets: int | None = None
    max_delay_ms: int = 15 * 60_000

    @property
    def any(self) -> bool:
        return (self.max_offsets, self.max_bytes, self.min_offsets) != (None, None, None)


@dataclass(frozen=True)
class SplitLimits:
    """How to split partitions into tasks: the minimum of tasks, the maximum of records and bytes in each."""

    min_partitions: int | None = None
    max_records: int | None = None
    max_bytes: int | None = None


@dataclass(frozen=True)
class BadRecordsOptions:
    """How to handle corrupt record batches: "fail", "skip" or "deadletter" (to `path`, a folder or URI)."""

    mode: str = "fail"
    path: str | None = None


@dataclass(frozen=True)
class SourceOptions:
    """Checked options of a read. `on_data_loss` is "fail", "warn" or "report".

    `starting_option` and `ending_option` name the options that set `starting` and `ending`, for messages. With `paths`
    the query reads data directories without a broker; `client` then has only settings that apply there.
    """

    client: dict[str, str]
    subscription: Subscription
    starting: Spec
    starting_option: str
    ending: Spec
    ending_option: str
    on_data_loss: str
    trigger: TriggerLimits
    split: SplitLimits
    bad_records: BadRecordsOptions
    offset_retries: int
    offset_retry_ms: int
    group_offsets: GroupOffsetsOptions | None
    paths: tuple[str, ...] = ()
    #: How long a task waits for records that should exist; None means kafka.request.timeout.ms.
    poll_timeout_ms: int | None = None
    estimate_record_bytes: bool = False


@dataclass(frozen=True)
class SinkOptions:
    """Checked options of a write. Topics that do not exist get `create_topics` partitions; None: they are an error.

    `checkpoint` is the query's checkpoint if the write is exactly once, otherwise None. Its transactional ids begin
    with `id_prefix`.
    """

    client: dict[str, str]
    topic: str | None
    create_topics: int | None = None
    checkpoint: str | None = None
    id_prefix: str = DEFAULT_ID_PREFIX


def _split(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(client settings without their prefix, connector options by lower-case name); `ConfigError` for unknown names."""
    settings = Settings()
    own: dict[str, str] = {}
    for name, value in options.items():
        key = canonical(name)
        if key.startswith(PREFIX):
            setting = key[len(PREFIX) :]
            if setting in _PROTECTED:
                raise ConfigError(f"option {name} can't be set: {_PROTECTED[setting]}")
            if setting in _SHOWN_KEYS and "ENCRYPTED" not in value:
                raise ConfigError(
                    f"option {name} holds a key that is not encrypted, and Spark would show it in plans: encrypt it "
                    "and set kafka.ssl.key.password, which Spark hides, or set kafka.ssl.keystore.location to a file"
                )
            settings[setting] = value
        elif key in _KNOWN_BY_KEY:
            if key != "path" or value:  # without a path Spark passes an empty one
                own[key] = value
        else:
            if is_known(key):
                raise ConfigError(f"unknown option {name!r}: write {PREFIX}{key}")
            close = difflib.get_close_matches(key, [*_KNOWN_BY_KEY, "kafka.bootstrap.servers"], 1)
            hint = f"; did you mean {_KNOWN_BY_KEY.get(close[0], close[0])}?" if close else ""
            raise ConfigError(f"unknown option {name!r}{hint}")
    if "path" not in own:
        check_names(settings, PREFIX)
        if "bootstrap.servers" not in settings:
            raise ConfigError("option kafka.bootstrap.servers is required: HOST:PORT[,HOST:PORT...]")
        client_config(settings, PREFIX)
        _warn_without_effect(*without_effect(settings), *(name for name in settings if name == "linger.ms"))
    return settings, own


@cache
def _warn_without_effect(*names: str) -> None:
    """Log settings without effect, once per process: linger.ms has one on `Producer.send` only."""
    if names:
        _log.warning("these options have no effect: %s", ", ".join(f"{PREFIX}{name}" for name in names))


def _subscription(own: dict[str, str], default: Subscription | None) -> Subscription:
    given = [name for name in _SUBSCRIPTIONS if canonical(name) in own]
    if not given and default is not None:
        return default
    if len(given) != 1:
        found = f"found {' and '.join(given)}" if given else "none is set"
        raise ConfigError(f"set exactly one of the options assign, subscribe and subscribePattern; {found}")
    name, text = given[0], own[canonical(given[0])]
    if name == "assign":
        return Subscription(assign=parse_assign(text))
    if name == "subscribePattern":
        text = text.strip()
        if not text:
            raise ConfigError("option subscribePattern is empty")
        try:
            re.compile(text)
        except re.error as error:
            raise ConfigError(f"option subscribePattern={text!r} is not a regular expression: {error}") from None
        return Subscription(pattern=text)
    topics = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not topics:
        raise ConfigError(f"option subscribe={text!r} names no topic")
    return Subscription(topics=topics)


def _group_offsets(settings: dict[str, str], own: dict[str, str]) -> GroupOffsetsOptions | None:
    """Parse the group and its stores, with offsets.storage and dual.commit.enabled of Kafka's consumers (1.0 chapter
    "Distribution")."""
    group, connect, path = settings.get("group.id"), settings.get("zookeeper.connect"), own.get("offsetspath")
    if group is None:
        for name, value in (("offsetsPath", path), ("kafka.offsets.storage", settings.get("offsets.storage"))):
            if value is not None:
                raise ConfigError(f"option {name} needs kafka.group.id: offsets are stored per group")
        for name in ("zookeeper.connect", "dual.commit.enabled"):
            if name in settings:
                _log.warning("option kafka.%s has no effect without kafka.group.id: offsets are stored per group", name)
        return None
    default = "zookeeper" if connect is not None else "kafka" if path is None else None
    storage = settings.get("offsets.storage", default)
    if storage not in (None, "kafka", "zookeeper"):
        raise ConfigError(f"option kafka.offsets.storage={storage} must be kafka or zookeeper")
    if storage == "zookeeper" and connect is None:
        raise ConfigError("option kafka.offsets.storage=zookeeper needs kafka.zookeeper.connect")
    dotted = {f"{PREFIX}{name}": value for name, value in settings.items()}
    # The default is Kafka's: on when offsets go to the coordinator.
    dual = boolean(dotted, "kafka.dual.commit.enabled", storage == "kafka") and connect is not None
    trees = [path] if path is not None else []
    if connect is not None and (storage == "zookeeper" or dual):
        trees.append(f"zookeeper://{connect}")
    return GroupOffsetsOptions(group, storage == "kafka" or dual, tuple(trees), dual)


def _bound(settings: dict[str, str], own: dict[str, str], which: str, default: str, strict: bool) -> tuple[str, Spec]:
    """(option, spec) of the start or end. By precedence: one timestamp, timestamps per partition, offsets."""
    name = f"{which}Timestamp"
    if canonical(name) in own:
        return name, parse_timestamp(name, own[canonical(name)], strict)
    name = f"{which}OffsetsByTimestamp"
    if canonical(name) in own:
        return name, parse_timestamps(name, own[canonical(name)], strict)
    name = f"{which}Offsets"
    return name, parse_offsets(name, own.get(canonical(name), default), system_ms, settings.get("group.id"))


def _paths(settings: dict[str, str], own: dict[str, str], streaming: bool) -> tuple[str, ...]:
    """The data directories of the option path, separated by commas as in Kafka's log.dirs; empty for brokers."""
    if "path" not in own:
        return ()
    if streaming:
        raise ConfigError("option path: only batch queries can read log directories; a stream needs brokers")
    if "bootstrap.servers" in settings:
        raise ConfigError("set only one of the options path and kafka.bootstrap.servers: directories need no broker")
    for name in settings:
        if name not in _OF_DIRECTORIES:
            raise ConfigError(f"option kafka.{name} does not apply to option path, which needs no broker: remove it")
    for name in ("startingOffsets", "endingOffsets"):
        if own.get(canonical(name), "").strip().lower() == "group":
            raise ConfigError(f"option {name}=group needs brokers: log directories have no offsets of groups")
    directory_config(settings)
    paths = tuple(part.strip() for part in own["path"].split(",") if part.strip())
    if not paths:
        raise ConfigError(f"option path={own['path']!r} names no directory")
    return paths


def directory_config(settings: Mapping[str, str]) -> ClientConfig:
    """The client settings for reading directories; the broker address is a dummy. `ConfigError` for a bad value."""
    return client_config({"bootstrap.servers": "no-broker:1", **settings}, PREFIX)


def source_options(options: Mapping[str, str], streaming: bool) -> SourceOptions:
    """Check the options of a read; `ConfigError` for options that are unknown, conflict, or don't suit the query."""
    settings, own = _split(options)
    paths = _paths(settings, own, streaming)
    for name in _SINK:
        if canonical(name) in own:
            hint = ": use subscribe, subscribePattern or assign" if name == "topic" else ""
            raise ConfigError(f"option {name} is for writing{hint}")
    strict = choice(own, "startingOffsetsByTimestampStrategy", {"error": "error", "latest": "latest"}) == "error"
    start_option, starting = _bound(settings, own, "starting", "latest" if streaming else "earliest", strict)
    end_option, ending = _bound(settings, own, "ending", "latest", False)
    _check_query(own, streaming, starting, start_option, ending, end_option)
    mode = choice(own, "badRecords", {"fail": "fail", "skip": "skip", "deadletter": "deadletter"})
    path = own.get("badrecordspath")
    if (mode == "deadletter") != (path is not None):
        raise ConfigError("options badRecords=deadletter and badRecordsPath require each other")
    retries, pause = count(own, "fetchOffset.numRetries", 0), count(own, "fetchOffset.retryIntervalMs", 0)
    return SourceOptions(
        client=settings,
        subscription=_subscription(own, ALL_TOPICS if paths else None),
        starting=starting,
        starting_option=start_option,
        ending=ending,
        ending_option=end_option,
        on_data_loss=choice(own, "failOnDataLoss", {"true": "fail", "false": "warn", "report": "report"}),
        trigger=_trigger_limits(own),
        split=SplitLimits(
            count(own, "minPartitions"), count(own, "maxRecordsPerPartition"), count(own, "maxBytesPerPartition")
        ),
        bad_records=BadRecordsOptions(mode, path),
        offset_retries=_OFFSET_RETRIES if retries is None else retries,
        offset_retry_ms=_OFFSET_RETRY_MS if pause is None else pause,
        group_offsets=_group_offsets(settings, own),
        paths=paths,
        poll_timeout_ms=count(own, "kafkaConsumer.pollTimeoutMs"),
        estimate_record_bytes=boolean(own, "estimateRecordBytes", False),
    )


def _check_query(
    own: dict[str, str], streaming: bool, starting: Spec, start_option: str, ending: Spec, end_option: str
) -> None:
    if streaming:
        for name in _ENDING:
            if canonical(name) in own:
                raise ConfigError(f"option {name} is for batch queries: a stream has no end")
    else:
        for name in _TRIGGER:
            if own.pop(canonical(name), None) is not None:  # its value does not matter then
                _log.warning("option %s has no effect in a batch query", name)
    if not streaming and isinstance(starting, OffsetSpec) and starting.holds_latest:
        raise ConfigError(
            f"option {start_option} can't be latest (-1) in a batch query: there would be nothing to read"
        )
    if isinstance(ending, OffsetSpec) and ending.holds_earliest:
        raise ConfigError(f"option {end_option} can't be earliest (-2): there would be nothing to read")


def _trigger_limits(own: dict[str, str]) -> TriggerLimits:
    limits = TriggerLimits(
        count(own, "maxOffsetsPerTrigger"),
        count(own, "maxBytesPerTrigger"),
        count(own, "minOffsetsPerTrigger"),
        milliseconds(own, "maxTriggerDelay", TriggerLimits.max_delay_ms),
    )
    if limits.max_offsets is not None and limits.min_offsets is not None and limits.max_offsets < limits.min_offsets:
        raise ConfigError(
            f"option maxOffsetsPerTrigger={limits.max_offsets} is below minOffsetsPerTrigger={limits.min_offsets}"
        )
    return limits


def sink_options(options: Mapping[str, str], streaming: bool = False) -> SinkOptions:
    """Check the options of a write; `ConfigError` for options that are unknown, for reading, or for streams only."""
    settings, own = _split({name: value for name, value in options.items() if canonical(name) not in _SPARKS})
    for name in _SOURCE:
        if canonical(name) in own:
            raise ConfigError(f"option {name} is for reading")
    boolean(own, "includeHeaders", False)  # without effect, as with Spark's connector: a column headers is written
    create = count(own, "createTopics")
    if create is not None and create > _MOST_PARTITIONS:
        raise ConfigError(f"option createTopics={create} must be at most {_MOST_PARTITIONS}, Kafka's limit")
    guarantee = choice(own, "deliveryGuarantee", {name: name for name in ("at-least-once", "exactly-once")})
    is_exact = guarantee == "exactly-once"
    checkpoint = _checkpoint(options, settings, streaming) if is_exact else None
    return SinkOptions(settings, own.get("topic", "").strip() or None, create, checkpoint, _id_prefix(own, is_exact))


def _id_prefix(own: dict[str, str], is_exact: bool) -> str:
    """The option transactionalIdPrefix."""
    text = own.get(canonical("transactionalIdPrefix"))
    if text is None:
        return DEFAULT_ID_PREFIX
    if not is_exact:
        raise ConfigError("option transactionalIdPrefix needs deliveryGuarantee=exactly-once: only that has such ids")
    if text != text.strip() or not text.isprintable() or not 0 < len(text) <= _LONGEST_ID_PREFIX:
        raise ConfigError(
            f"option transactionalIdPrefix={text!r} must be 1 to {_LONGEST_ID_PREFIX} printable characters, without "
            "spaces at its ends"
        )
    return text


def _checkpoint(options: Mapping[str, str], settings: dict[str, str], streaming: bool) -> str:
    """The checkpoint of an exactly-once write; completes the settings of its transactions."""
    if not streaming:
        raise ConfigError(
            "deliveryGuarantee=exactly-once is for streams (writeStream): a batch write, in foreachBatch too, has no "
            "checkpoint to keep its decisions in"
        )
    found = {canonical(name): value for name, value in options.items()}.get(_CHECKPOINT, "").strip()
    if not found:
        raise ConfigError(
            "deliveryGuarantee=exactly-once needs the option checkpointLocation on the writer: Spark does not show "
            "spark.sql.streaming.checkpointLocation to Python data sources"
        )
    settings.setdefault("transaction.timeout.ms", str(_TRANSACTION_MS))
    if not client_config(settings, PREFIX).is_idempotent:
        raise ConfigError("deliveryGuarantee=exactly-once needs kafka.acks=all and kafka.enable.idempotence=true")
    return found


def include_headers(options: Mapping[str, Any]) -> bool:
    """Parse the option includeHeaders."""
    return boolean({canonical(name): value for name, value in options.items()}, "includeHeaders", False)
