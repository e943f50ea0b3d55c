"""Parse and check the options of writes. `spark_klog.spark.options` has the names and what reads share."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_klog.base.names import DECISION_TOPIC, check_topic_name
from spark_klog.client.settings import client_config
from spark_klog.errors import ConfigError
from spark_klog.spark.option_table import DEFAULT_ID_PREFIX, Use, option
from spark_klog.spark.options import PREFIX, column_formats, split

if TYPE_CHECKING:
    from spark_klog.schemas.column_writing import Strategy, WriteFormat, WriterSchema

_log = logging.getLogger(__name__)
#: Spark's own options for a streaming write, which it passes to the sink, too.
_CHECKPOINT = "checkpointlocation"
_SPARKS = frozenset({_CHECKPOINT, "queryname"})
#: The default of transaction.timeout.ms in exactly-once writes: the brokers' default of transaction.max.timeout.ms.
_TRANSACTION_MS = 900_000
#: Options of a registry's subjects.
_SUBJECTS = ("autoRegisterSchemas", "useLatestVersion", "keySubjectNameStrategy", "valueSubjectNameStrategy")
#: Options of exactly-once writes, and why others do not have them.
_OF_EXACTLY_ONCE = {
    **dict.fromkeys(("writeId", "writeVersion", "writePlan"), ""),
    "transactionalIdPrefix": ": only that has such ids",
    "decisionTopic": ": other writes decide nothing",
}
#: Of a writeId, writePlan or transactionalIdPrefix, in characters, far below Kafka's 32,767 bytes: a decision has the
#: prefix once for each task.
_LONGEST_NAME = 249
#: The number of partitions in CreateTopics is an int32.
_MOST_PARTITIONS = 0x7FFFFFFF


@dataclass(frozen=True)
class NamedWrite:
    """What distinguishes an exactly-once batch write from others: writeId, and writeVersion if it has one.

    `plan` is what the version is made of (writePlan): a repeated version has the same.
    """

    id: str
    version: int | None
    plan: str | None = None

    def __str__(self) -> str:
        return f"writeId={self.id}" if self.version is None else f"writeId={self.id} writeVersion={self.version}"


@dataclass(frozen=True)
class SinkOptions:
    """Checked options of a write. Topics that do not exist get `create_topics` partitions; None: they are an error.

    A stream that is exactly once has the query's `checkpoint`, a batch write its name; others have neither. Their
    transactional ids begin with `id_prefix`.
    """

    client: dict[str, str]
    topic: str | None
    create_topics: int | None = None
    checkpoint: str | None = None
    named: NamedWrite | None = None
    id_prefix: str = DEFAULT_ID_PREFIX
    decision_topic: str | None = None
    #: Columns of rows, and once they are looked up the schemas that they are written by.
    formats: tuple[WriteFormat, ...] = ()
    writers: tuple[WriterSchema, ...] = ()


def sink_options(options: Mapping[str, str], streaming: bool = False) -> SinkOptions:
    """Check the options of a write; `ConfigError` for options that are unknown, for reading, or for streams only."""
    settings, own = split({name: value for name, value in options.items() if name.lower() not in _SPARKS}, Use.WRITE)
    option(own, "includeHeaders")  # without effect, as with Spark's connector: a column headers is written
    create = option(own, "createTopics")
    if create is not None and create > _MOST_PARTITIONS:
        raise ConfigError(f"option createTopics={create} must be at most {_MOST_PARTITIONS}, Kafka's limit")
    is_exact = option(own, "deliveryGuarantee") == "exactly-once"
    named = _named_write(own, is_exact, streaming)
    for name in () if is_exact else (name for name in _OF_EXACTLY_ONCE if name in own):
        raise ConfigError(f"option {name} needs deliveryGuarantee=exactly-once{_OF_EXACTLY_ONCE[name]}")
    checkpoint = _checkpoint(options) if is_exact and streaming else None
    if not streaming and any(name.lower() == _CHECKPOINT for name in options):
        _log.warning("option checkpointLocation has no effect in a batch write%s", ": writeId names it" * is_exact)
    if is_exact:
        _complete_transactions(settings)
    several = "; to write to several topics add a column 'topic'"
    topic = _topic("topic", own.get("topic", "").strip() or None, several)
    formats = _write_formats(settings, own, topic)
    decision_topic = _topic("decisionTopic", own.get("decisionTopic"))
    if is_exact and topic == (decision_topic or DECISION_TOPIC):
        raise ConfigError(f"option topic={topic} is the topic of the decisions: set another one, or decisionTopic")
    id_prefix = _checked_name("transactionalIdPrefix", own.get("transactionalIdPrefix", DEFAULT_ID_PREFIX))
    return SinkOptions(settings, topic, create, checkpoint, named, id_prefix, decision_topic, formats)


def _write_formats(settings: dict[str, str], own: dict[str, str], topic: str | None) -> tuple[WriteFormat, ...]:
    """How to write the columns that are rows."""
    sources = column_formats(settings, own, None)
    given = next((name for name in _SUBJECTS if name in own), None)
    if given is not None and not any(source.registry for source in sources):
        raise ConfigError(f"option {given} needs schemaRegistryUrl, and valueFormat or keyFormat")
    registers, uses_latest = option(own, "autoRegisterSchemas"), option(own, "useLatestVersion")
    if uses_latest and registers and "autoRegisterSchemas" in own:
        raise ConfigError("options autoRegisterSchemas=true and useLatestVersion=true exclude each other")
    if not sources:
        return ()
    from spark_klog.schemas.column_writing import WriteFormat

    formats = []
    for source in sources:
        strategy: Strategy = option(own, f"{source.column}SubjectNameStrategy")
        formats.append(WriteFormat(source, topic, strategy, registers, uses_latest))
    return tuple(formats)


def _topic(option: str, topic: str | None, of_several: str = "") -> str | None:
    """The topic of an option, checked; `of_several` is advice for who names several topics."""
    try:
        if topic is not None:
            check_topic_name(topic)
    except ConfigError as error:
        raise ConfigError(f"option {option}: {error}{of_several * (',' in str(topic))}") from None
    return topic


def _checked_name(option: str, text: str) -> str:
    if text != text.strip() or not text.isprintable() or not 0 < len(text) <= _LONGEST_NAME:
        raise ConfigError(
            f"option {option}={text!r} must be 1 to {_LONGEST_NAME} printable characters, without spaces at its ends"
        )
    return text


def _named_write(own: dict[str, str], is_exact: bool, streaming: bool) -> NamedWrite | None:
    """The name of an exactly-once batch write."""
    version = option(own, "writeVersion")
    if streaming:
        for name in (name for name in ("writeId", "writeVersion", "writePlan") if name in own):
            raise ConfigError(f"option {name} is for batch writes: the checkpoint of a stream says what is written")
        return None
    if not is_exact:
        return None
    if "writeId" not in own:
        raise ConfigError(
            "deliveryGuarantee=exactly-once of a batch write needs the option writeId, a name of these rows that a "
            "second run gives again, such as 2026-11-27/clicks. In foreachBatch use spark_klog.write_updates"
        )
    plan = own.get("writePlan")
    if plan is not None and version is None:
        raise ConfigError("option writePlan needs writeVersion: it says what a version is made of")
    checked = None if plan is None else _checked_name("writePlan", plan)
    return NamedWrite(_checked_name("writeId", own["writeId"]), version, checked)


def _checkpoint(options: Mapping[str, str]) -> str:
    """The checkpoint of an exactly-once stream."""
    checkpoint = {name.lower(): value for name, value in options.items()}.get(_CHECKPOINT, "").strip()
    if not checkpoint:
        raise ConfigError(
            "deliveryGuarantee=exactly-once needs the option checkpointLocation on the writer: Spark does not show "
            "spark.sql.streaming.checkpointLocation to Python data sources"
        )
    return checkpoint


def _complete_transactions(settings: dict[str, str]) -> None:
    """Complete and check the settings of an exactly-once write."""
    settings.setdefault("transaction.timeout.ms", str(_TRANSACTION_MS))
    if not client_config(settings, PREFIX).is_idempotent:
        raise ConfigError("deliveryGuarantee=exactly-once needs kafka.acks=all and kafka.enable.idempotence=true")
