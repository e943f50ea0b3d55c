"""Parse and check the connector's options, which have the names of Spark's Kafka connector."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from spark_klog.base.addresses import without_user
from spark_klog.base.clock import system_ms
from spark_klog.base.names import OF_REGISTRY, Format, TopicPartition, check_topic_name, topic_pattern
from spark_klog.base.settings import BOOLEAN, items, nearest, some_of, value_of
from spark_klog.client.places import (
    GroupSpec,
    OffsetSpec,
    Spec,
    parse_assign,
    parse_offsets,
    parse_timestamp,
    parse_timestamps,
)
from spark_klog.client.serialization import RowNames
from spark_klog.client.settings import (
    ClientConfig,
    check_names,
    client_config,
    is_known,
    named_cluster,
    without_effect,
)
from spark_klog.errors import ConfigError
from spark_klog.protocol.tables.records import EARLIEST, LATEST
from spark_klog.security.config import Settings, check_holds_no_secret
from spark_klog.spark.option_table import WORDING, Option, Use, names_for, option, option_named

if TYPE_CHECKING:
    from spark_klog.schemas.column_format import Column, ColumnFormat, Evolution, ReaderSchema
    from spark_klog.schemas.registry.client import RegistrySettings

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
#: Additional keys of a progress record's latest offsets: the lost ranges (failOnDataLoss=report), the bytes per record
#: of each partition (estimateRecordBytes), and the partitions that open transactions hold up (read_committed). No topic
#: has a space in its name.
LOST, RECORD_BYTES, HELD_UP = "lost ranges", "record bytes", "held up by open transactions"
#: The prefix of Kafka's settings among the options.
PREFIX = "kafka."
SUBSCRIPTIONS = ("assign", "subscribe", "subscribePattern")
#: Options of rows instead of bytes, of reads and writes, which need one of the two formats.
_OF_ROWS = tuple(f"{column}{name}" for column in ("key", "value") for name in ("Schema", "SchemaId", "Subject"))
_OF_ROWS += ("keyMessage", "valueMessage", "schemaRegistryUrl", "validate")
#: The prefix of a registry's settings among the options; Databricks' and Confluent's names mean the same.
REGISTRY_PREFIX = "schemaRegistry."
REGISTRY_PREFIXES = tuple(prefix.lower() for prefix in (REGISTRY_PREFIX, f"confluent.{OF_REGISTRY}", OF_REGISTRY))
#: Settings that users can't set, as with Spark's Kafka connector.
PROTECTED = {
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
_SHOWN_USER = "basic.auth.user.info"
_TWO = "; or set schemaRegistry.basic.auth.username and schemaRegistry.basic.auth.password, which Spark hides"
#: Spark keeps the options and TBLPROPERTIES of a table in its catalog, and passes none of them to a Python source.
_DROPPED = (
    "No option is set: Spark drops those of CREATE TABLE ... USING klog. Use CREATE TEMPORARY VIEW ... USING klog "
    "OPTIONS (...), or name them in each query: SELECT ... FROM table WITH ('kafka.bootstrap.servers' = '...', ...)"
)
#: What is meant by names of other connectors that look more like another option.
_MEANT = {"topics": "subscribe (to read; topics with commas between them) or topic (to write)"}
#: Kafka's settings that apply to directories.
_OF_DIRECTORIES = ("isolation.level", "decompressed.max.bytes")


def split(options: Mapping[str, str], use: Use) -> tuple[dict[str, str], dict[str, str]]:
    """(client settings without their prefix, the connector's own options); `ConfigError` for names not of this use.

    An option of streams has no effect in a batch query, and a warning says so, as with Spark's Kafka connector.
    Spark ignores the case of names: the results have settings in lower case, options as the documents write them.
    """
    settings = Settings()
    own: dict[str, str] = Settings()
    for name, value in options.items():
        key = name.lower()
        check_holds_no_secret(f"option {name}", key, value)
        if key.startswith(REGISTRY_PREFIXES):
            _add_registry_setting(own, name, value)
        elif key.startswith(PREFIX):
            setting = key[len(PREFIX) :]
            if setting in PROTECTED:
                raise ConfigError(f"option {name} can't be set: {PROTECTED[setting]}")
            if setting.startswith(OF_REGISTRY):  # as in files that programs share
                setting = setting.removeprefix(OF_REGISTRY)
                own_name = "schemaRegistryUrl" if setting == "url" else REGISTRY_PREFIX + setting
                raise ConfigError(f"unknown option {name!r}: write {own_name}")
            if setting in _SHOWN_KEYS and "ENCRYPTED" not in value:
                raise ConfigError(
                    f"option {name} holds a key that is not encrypted, and Spark would show it in plans: encrypt it "
                    "and set kafka.ssl.key.password, which Spark hides, or set kafka.ssl.keystore.location to a file"
                )
            settings[setting] = value
        elif row := option_named(key):
            if key == "path" and not value:  # without a path Spark passes an empty one
                continue
            if row.uses & use:
                own[row.name] = value
            else:
                _refuse(row, use)
        else:
            if is_known(key):
                raise ConfigError(f"unknown option {name!r}: write {PREFIX}{key}")
            meant = _MEANT.get(key)
            hint = (
                f"did you mean {meant}?"
                if meant
                else nearest(key, [*names_for(Use.READ | Use.WRITE), "kafka.bootstrap.servers"])
            )
            raise ConfigError(f"unknown option {name!r}{hint and '; ' + hint}")
    cluster = own.pop("cluster", None)
    if cluster is not None:
        if "bootstrap.servers" in settings:
            raise ConfigError(f"set only one of the options cluster={cluster} and kafka.bootstrap.servers")
        settings = _without_registry(named_cluster(cluster), own) | settings
    if "path" not in own:
        check_names(settings, PREFIX)
        if "bootstrap.servers" not in settings:
            dropped = "" if settings or own else f". {_DROPPED}"
            raise ConfigError(
                f"option kafka.bootstrap.servers is required: HOST:PORT[,HOST:PORT...], or cluster{dropped}"
            )
        client_config(settings, PREFIX)
        _warn_without_effect(*without_effect(settings), *(name for name in settings if name == "linger.ms"))
    return settings, own


def _refuse(row: Option, use: Use) -> None:
    """Raise `ConfigError` for an option of another use; log one that has no effect."""
    if use == Use.BATCH and row.uses & Use.STREAM:
        _log.warning("option %s has no effect in a batch query", row.name)
        return
    if use in Use.READ and row.uses & Use.READ:
        if row.name == "path":
            raise ConfigError("option path: only batch queries can read log directories; a stream needs brokers")
        raise ConfigError(f"option {row.name} is for batch queries: a stream has no end")
    if use in Use.READ:
        hint = ": use subscribe, subscribePattern or assign" if row.name == "topic" else ""
        raise ConfigError(f"option {row.name} is for writing{hint}")
    hint = ": set the option topic" if row.name in ("path", *SUBSCRIPTIONS) else ""
    raise ConfigError(f"option {row.name} is for reading{hint}")


def _without_registry(named: Settings, own: dict[str, str]) -> Settings:
    """The client settings of a named cluster; those of its registry are added to `own`, if it is needed."""
    registry = {name.removeprefix(OF_REGISTRY): value for name, value in named.items() if name.startswith(OF_REGISTRY)}
    if "url" in registry and has_formats(own):
        url = own.setdefault("schemaRegistryUrl", registry.pop("url"))
        if named[f"{OF_REGISTRY}url"] != url:  # which must not get the other's password
            raise ConfigError("option schemaRegistryUrl and schema.registry.url of the cluster differ: remove one")
        for name, value in registry.items():
            own.setdefault(REGISTRY_PREFIX + name, value)
    return Settings({name: value for name, value in named.items() if not name.startswith(OF_REGISTRY)})


def _add_registry_setting(own: dict[str, str], name: str, value: str, given: str | None = None) -> None:
    """Add a registry's setting as REGISTRY_PREFIX + its name in lower case; `ConfigError` if Spark would show it.

    `given` is the name as the user wrote it, if it is another one.
    """
    key, name = name.lower(), given or name
    setting = next(key.removeprefix(prefix) for prefix in REGISTRY_PREFIXES if key.startswith(prefix))
    is_reference = value.startswith(("env:", "file:"))
    if (setting == _SHOWN_USER or setting in _SHOWN_KEYS) and not is_reference and "ENCRYPTED" not in value:
        raise ConfigError(
            f"option {name} holds a secret, and Spark would show it in plans: set it to env:NAME or file:PATH, a "
            "variable or file of the driver and the executors that holds the secret"
            f"{_TWO if setting == _SHOWN_USER else ''}"
        )
    if setting == "url" and "@" in value:
        raise ConfigError(
            f"option {name} has a user in it, and Spark would show it: set {REGISTRY_PREFIX}basic.auth.username and "
            f"{REGISTRY_PREFIX}basic.auth.password"
        )
    if own.setdefault(REGISTRY_PREFIX + setting, value) != value:
        raise ConfigError(f"option {name} and another name of the same setting differ: remove one")


@cache
def _warn_without_effect(*names: str) -> None:
    """Log settings without effect, once per process: linger.ms has one on `Producer.send` only."""
    if names:
        _log.warning("these options have no effect: %s", ", ".join(f"{PREFIX}{name}" for name in names))


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

    def named(self, partitions: Mapping[TopicPartition, _T]) -> dict[TopicPartition, _T]:
        """Those of the partitions that the subscription includes."""
        if self.assign is None:  # a topic is looked at once, not once for each partition
            topics = {topic for topic in {topic for topic, _ in partitions} if self.names(topic, 0)}
            return {key: value for key, value in partitions.items() if key[0] in topics}
        return {key: value for key, value in partitions.items() if self.names(*key)}


#: All topics that are not internal: the empty pattern matches every name.
ALL_TOPICS = Subscription(pattern="")


@dataclass(frozen=True)
class GroupOffsetsOptions:
    """Where the offsets of `group` are: at its coordinator, and in trees of directories.

    If `commits`, a stream publishes its progress there; otherwise it only reads them, for `startingOffsets=group` (None
    if the options do not say whether). `trees` are addresses for `trees.opening.open_tree`. With `dual` the group
    migrates between coordinator and ZooKeeper, which is the last tree: reads take the larger offset of both.
    """

    group: str
    coordinator: bool
    trees: tuple[str, ...]
    dual: bool = False
    commits: bool | None = True


@dataclass(frozen=True)
class TriggerLimits:
    """Limits of a micro-batch: maximum records and bytes; minimum records, which `max_delay_ms` overrides.

    With `are_ignored` a pyspark that does not tell Trigger.AvailableNow from others reads all in one micro-batch.
    """

    max_offsets: int | None = None
    max_bytes: int | None = None
    min_offsets: int | None = None
    max_delay_ms: int = 15 * 60_000
    are_ignored: bool = False

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
    """How to handle corrupt record batches: "fail", "skip" or "deadletter" (to `path`, a folder or URI, or `topic`)."""

    mode: str = "fail"
    path: str | None = None
    topic: str | None = None


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
    #: Columns that are to be rows, and once they are looked up the schemas of these rows.
    formats: tuple[ColumnFormat, ...] = ()
    readers: tuple[ReaderSchema, ...] = ()


def _subscription(own: dict[str, str], default: Subscription | None) -> Subscription:
    given = [name for name in SUBSCRIPTIONS if name in own]
    if not given and default is not None:
        return default
    if len(given) != 1:
        shown = f"found {' and '.join(given)}" if given else "none is set"
        raise ConfigError(f"set exactly one of the options assign, subscribe and subscribePattern; {shown}")
    name, text = given[0], own[given[0]]
    if name == "assign":
        return Subscription(assign=parse_assign(text))
    if name == "subscribePattern":
        text = text.strip()
        if not text:
            raise ConfigError("option subscribePattern is empty")
        topic_pattern(f"option subscribePattern={text!r}", text)
        return Subscription(pattern=text)
    topics = tuple(dict.fromkeys(items(text)))
    if not topics:
        raise ConfigError(f"option subscribe={text!r} names no topic")
    return Subscription(topics=topics)


def _group_offsets(
    settings: dict[str, str], own: dict[str, str], *, streaming: bool, is_read: bool
) -> GroupOffsetsOptions | None:
    """Parse the group and its stores, with offsets.storage and dual.commit.enabled of Kafka's consumers (1.0 chapter
    "Distribution"). `is_read` if the query starts or ends at the group's offsets.

    The group alone does not make a stream commit: with format("kafka") it doesn't, and another application may use the
    group.
    """
    group, connect, path = settings.get("group.id"), settings.get("zookeeper.connect"), own.get("offsetsPath")
    commits: bool | None = option(own, "commitOffsets")
    if group is None:
        if commits:
            raise ConfigError("option commitOffsets needs kafka.group.id, the group whose offsets to commit")
        for name, value in (("offsetsPath", path), ("kafka.offsets.storage", settings.get("offsets.storage"))):
            if value is not None:
                raise ConfigError(f"option {name} needs kafka.group.id: offsets are stored per group")
        for name in ("zookeeper.connect", "dual.commit.enabled"):
            if name in settings:
                _log.warning("option kafka.%s has no effect without kafka.group.id: offsets are stored per group", name)
        return None
    if streaming and not commits and path is not None and not is_read:
        raise ConfigError("option offsetsPath needs commitOffsets=true, to commit a query's progress there")
    default = "zookeeper" if connect is not None else "kafka" if path is None else None
    storage = settings.get("offsets.storage", default)
    if storage not in (None, "kafka", "zookeeper"):
        raise ConfigError(f"option kafka.offsets.storage={storage} must be kafka or zookeeper")
    if storage == "zookeeper" and connect is None:
        raise ConfigError("option kafka.offsets.storage=zookeeper needs kafka.zookeeper.connect")
    # The default is Kafka's: on when offsets go to the coordinator.
    dual_text = settings.get("dual.commit.enabled", str(storage == "kafka"))
    dual = value_of(BOOLEAN, "kafka.dual.commit.enabled", dual_text, WORDING) and connect is not None
    trees = [path] if path is not None else []
    if connect is not None and (storage == "zookeeper" or dual):
        trees.append(f"zookeeper://{connect}")
    return GroupOffsetsOptions(group, storage == "kafka" or dual, tuple(trees), dual, commits)


def _bound(settings: dict[str, str], own: dict[str, str], which: str, default: str, strict: bool) -> tuple[str, Spec]:
    """(option, spec) of the start or end. By precedence: one timestamp, timestamps per partition, offsets."""
    name = f"{which}Timestamp"
    if name in own:
        return name, parse_timestamp(name, own[name], strict)
    name = f"{which}OffsetsByTimestamp"
    if name in own:
        return name, parse_timestamps(name, own[name], strict)
    name = f"{which}Offsets"
    return name, parse_offsets(name, own.get(name, default), system_ms, settings.get("group.id"))


def _paths(settings: dict[str, str], own: dict[str, str]) -> tuple[str, ...]:
    """The data directories of the option path, separated by commas as in Kafka's log.dirs; empty for brokers."""
    if "path" not in own:
        return ()
    if "bootstrap.servers" in settings:
        raise ConfigError("set only one of the options path and kafka.bootstrap.servers: directories need no broker")
    for name in settings:
        if name not in _OF_DIRECTORIES:
            raise ConfigError(f"option kafka.{name} does not apply to option path, which needs no broker: remove it")
    for name in ("startingOffsets", "endingOffsets"):
        if own.get(name, "").strip().lower() == "group":
            raise ConfigError(f"option {name}=group needs brokers: log directories have no offsets of groups")
    directory_config(settings)
    paths = tuple(items(own["path"]))
    if not paths:
        raise ConfigError(f"option path={without_user(own['path'])!r} names no directory")
    return paths


def directory_config(settings: Mapping[str, str]) -> ClientConfig:
    """The client settings for reading directories; the broker address is a dummy. `ConfigError` for a bad value."""
    return client_config({"bootstrap.servers": "no-broker:1", **settings}, PREFIX)


def source_options(options: Mapping[str, str], streaming: bool) -> SourceOptions:
    """Check the options of a read; `ConfigError` for options that are unknown, conflict, or don't suit the query."""
    settings, own = split(options, Use.STREAM if streaming else Use.BATCH)
    paths = _paths(settings, own)
    strict = option(own, "startingOffsetsByTimestampStrategy") == "error"
    start_option, starting = _bound(settings, own, "starting", "latest" if streaming else "earliest", strict)
    end_option, ending = _bound(settings, own, "ending", "latest", False)
    _check_query(streaming, starting, start_option, ending, end_option)
    is_read = isinstance(starting, GroupSpec) or isinstance(ending, GroupSpec)
    mode = option(own, "badRecords")
    path, topic = own.get("badRecordsPath"), own.get("deadLetterTopic")
    if (mode == "deadletter") != ((path is None) is not (topic is None)):
        raise ConfigError(
            "option badRecords=deadletter needs either badRecordsPath or deadLetterTopic, and they need it"
        )
    if topic is not None:
        check_topic_name(topic)
        if paths:
            raise ConfigError("option deadLetterTopic needs brokers: keep letters of log directories by badRecordsPath")
    subscription = _subscription(own, ALL_TOPICS if paths else None)
    return SourceOptions(
        client=settings,
        subscription=subscription,
        starting=starting,
        starting_option=start_option,
        ending=ending,
        ending_option=end_option,
        on_data_loss=option(own, "failOnDataLoss"),
        trigger=_trigger_limits(own),
        split=SplitLimits(
            option(own, "minPartitions"), option(own, "maxRecordsPerPartition"), option(own, "maxBytesPerPartition")
        ),
        bad_records=BadRecordsOptions(mode, path, topic),
        offset_retries=option(own, "fetchOffset.numRetries"),
        offset_retry_ms=option(own, "fetchOffset.retryIntervalMs"),
        group_offsets=_group_offsets(settings, own, streaming=streaming, is_read=is_read),
        paths=paths,
        poll_timeout_ms=option(own, "kafkaConsumer.pollTimeoutMs"),
        estimate_record_bytes=option(own, "estimateRecordBytes"),
        formats=_read_formats(settings, own, subscription),
    )


def has_formats(options: Mapping[str, Any]) -> bool:
    """Whether keys or values are to be rows."""
    return not {"keyformat", "valueformat"}.isdisjoint(name.lower() for name in options)


def source_formats(options: Mapping[str, str]) -> tuple[ColumnFormat, ...]:
    """The formats of a read, before it is known whether it is a stream; errors as of `source_options`."""
    settings, own = split(options, Use.READ)
    return _read_formats(settings, own, _subscription(own, ALL_TOPICS if "path" in own else None))


def _read_formats(
    settings: dict[str, str], own: dict[str, str], subscription: Subscription
) -> tuple[ColumnFormat, ...]:
    """The formats of keys and values that are to be rows."""
    topics = list(subscription.topics or subscription.assign or ())
    topic = topics[0] if len(topics) == 1 else None
    formats = column_formats(settings, own, topic, is_permissive=option(own, "mode") == "permissive", is_read=True)
    evolution: Evolution = option(own, "schemaEvolution")
    for name in ("mode", "schemaEvolution"):
        if name in own and not formats:
            raise ConfigError(f"option {name} needs valueFormat or keyFormat")
    for form in formats:
        if form.format == "json" and form.text is None:
            name = form.column
            raise ConfigError(
                f"option {name}Format=json needs {name}Schema: its fields as DDL, 'id bigint, at timestamp', or infer"
            )
        if form.registry is None and form.text is None:
            raise _row_names(form.column).no_schema(form.format)
        if form.registry is not None and (form.text, form.schema_id, form.subject) == (None, None, None):
            raise _row_names(form.column).no_one_schema(form.format)
        check_evolution(form, evolution, _row_names(form.column))
    return tuple(replace(form, evolution=evolution, ends_at_unreadable=True) for form in formats)


def check_evolution(form: ColumnFormat, evolution: Evolution, names: RowNames) -> None:
    """Raise `ConfigError` if a format does not say what a stream of this evolution needs."""
    named = f"schemaEvolution={evolution}"
    if evolution != "keep" and (form.subject is None or form.text is not None):
        raise ConfigError(f"{names.kind} {named} needs {names.subject}, and no {names.schema}")
    if evolution == "fail" and form.schema_id is None:
        raise ConfigError(
            f"{names.kind} {named} needs {names.schema_id}, the version to stay with: without it a restart would take "
            "the subject's latest, which is schemaEvolution=restart"
        )
    if evolution == "restart" and form.schema_id is not None:
        raise ConfigError(f"{names.kind}s {named} and {names.schema_id} exclude each other")


def column_formats(
    settings: dict[str, str],
    own: dict[str, str],
    topic: str | None,
    *,
    is_permissive: bool = False,
    is_read: bool = False,
) -> tuple[ColumnFormat, ...]:
    """Parse the options of rows instead of bytes. `topic` names the subjects, if it is the only one."""
    registry = _registry(settings, own)
    names = ("key", "value")
    if not any(f"{name}Format" in own for name in names):
        alone = next((name for name in _OF_ROWS if name in own), None)
        if alone is not None or registry is not None:
            raise ConfigError(f"option {alone or 'schemaRegistryUrl'} needs valueFormat or keyFormat, such as avro")
        return ()
    from spark_klog.schemas.codec import names_file
    from spark_klog.schemas.column_format import ColumnFormat
    from spark_klog.schemas.json_schema.ddl import INFER

    formats = []
    column: Column
    for column in ("key", "value"):
        named = _row_names(column)
        given = {name: own[name].strip() for name in named[3:] if own.get(name, "").strip()}
        kind: Format | Literal["json"] | None = option(own, named.format)
        if kind == "json" and not is_read:
            raise ConfigError(
                f"option {named.format}=json is for reading: leave it out, and write to_json(...) of the columns"
            )
        named.check(kind, given, has_registry=registry is not None and kind != "json")
        if kind is None:
            continue
        schema_id = option(own, named.schema_id)
        subject, text = given.get(named.subject), given.get(named.schema)
        if text is not None and text.lower() == INFER:
            if kind != "json":
                raise ConfigError(
                    f"option {named.schema}={text} is for {named.format}=json: give {kind} the text of its schema, or "
                    "leave it out if schemaRegistryUrl has it"
                )
            text = INFER
        if registry is not None and subject is None and topic is not None and kind != "json":
            subject = f"{topic}-{column}"
        if text is not None and names_file(text):
            raise ConfigError(
                f"option {named.schema}={text} looks like a file's name, and must be the text of the schema: read the "
                "file, and give what is in it"
            )
        made = ColumnFormat(column, kind, None if kind == "json" else registry, text, schema_id, subject, is_permissive)
        formats.append(replace(made, message=given.get(named.message)))
    validates = option(own, "validate")
    if validates and not any(form.format == "json-schema" for form in formats):
        raise ConfigError("option validate=true needs valueFormat=json-schema or keyFormat=json-schema")
    return tuple(replace(form, validates=validates and form.format == "json-schema") for form in formats)


def _row_names(column: Column) -> RowNames:
    names = (f"{column}{name}" for name in ("Format", "Schema", "SchemaId", "Subject", "Message"))
    return RowNames("option", "schemaRegistryUrl", *names)


def _registry(settings: dict[str, str], own: dict[str, str]) -> RegistrySettings | None:
    """The registry's settings, checked; None without any."""
    given = Settings(
        {name.removeprefix(REGISTRY_PREFIX): value for name, value in own.items() if name.startswith(REGISTRY_PREFIX)}
    )
    url = own.get("schemaRegistryUrl", "").strip()
    if not url and not given:
        return None
    if url:
        _add_registry_setting(own, f"{REGISTRY_PREFIX}url", url, "schemaRegistryUrl")
        given["url"] = url
    from spark_klog.schemas.registry.client import RegistrySettings
    from spark_klog.schemas.registry.settings import check_names as check_registry_names

    if "url" not in given:
        raise ConfigError(f"option {REGISTRY_PREFIX}{next(iter(given))} needs schemaRegistryUrl")
    check_registry_names(given, REGISTRY_PREFIX)
    return RegistrySettings.beside(settings, given, REGISTRY_PREFIX)


def _check_query(streaming: bool, starting: Spec, start_option: str, ending: Spec, end_option: str) -> None:
    nothing = "there would be nothing to read of"
    if not streaming and isinstance(starting, OffsetSpec) and (names := starting.holders(LATEST)):
        raise ConfigError(f"option {start_option} can't be latest (-1) in a batch query: {nothing} {some_of(names)}")
    if isinstance(ending, OffsetSpec) and (names := ending.holders(EARLIEST)):
        raise ConfigError(f"option {end_option} can't be earliest (-2): {nothing} {some_of(names)}")


def _trigger_limits(own: dict[str, str]) -> TriggerLimits:
    limits = TriggerLimits(
        option(own, "maxOffsetsPerTrigger"),
        option(own, "maxBytesPerTrigger"),
        option(own, "minOffsetsPerTrigger"),
        option(own, "maxTriggerDelay"),
        option(own, "availableNow") == "all",
    )
    if limits.max_offsets is not None and limits.min_offsets is not None and limits.max_offsets < limits.min_offsets:
        raise ConfigError(
            f"option maxOffsetsPerTrigger={limits.max_offsets} is below minOffsetsPerTrigger={limits.min_offsets}"
        )
    return limits


def include_headers(options: Mapping[str, Any]) -> bool:
    given = {name.lower(): value for name, value in options.items()}
    return bool(option({"includeHeaders": given.get("includeheaders", "false")}, "includeHeaders"))
