"""Parse and check the options of a write, which have the names of Spark's Kafka connector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_klog.base.names import check_topic_name
from spark_klog.client.settings import client_config
from spark_klog.errors import ConfigError
from spark_klog.spark.options.names import PREFIX, SOURCE, SUBSCRIPTIONS, boolean, chosen, count, split

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


def sink_options(options: Mapping[str, str], streaming: bool = False) -> SinkOptions:
    """Check the options of a write; `ConfigError` for options that are unknown, for reading, or for streams only."""
    settings, own = split({name: value for name, value in options.items() if name.lower() not in _SPARKS})
    for name in SOURCE:
        if name in own:
            instead = ": set the option topic" if name == "path" or name in SUBSCRIPTIONS else ""
            raise ConfigError(f"option {name} is for reading{instead}")
    boolean(own, "includeHeaders", False)  # without effect, as with Spark's connector: a column headers is written
    create = count(own, "createTopics")
    if create is not None and create > _MOST_PARTITIONS:
        raise ConfigError(f"option createTopics={create} must be at most {_MOST_PARTITIONS}, Kafka's limit")
    guarantee = chosen(own, "deliveryGuarantee", {name: name for name in ("at-least-once", "exactly-once")})
    is_exact = guarantee == "exactly-once"
    checkpoint = _checkpoint(options, settings, streaming) if is_exact else None
    return SinkOptions(settings, _topic(own), create, checkpoint, _id_prefix(own, is_exact))


def _topic(own: dict[str, str]) -> str | None:
    """The option topic, one name."""
    topic = own.get("topic", "").strip()
    if not topic:
        return None
    try:
        check_topic_name(topic)
    except ConfigError as error:
        several = "; to write to several topics add a column 'topic'" if "," in topic else ""
        raise ConfigError(f"option topic: {error}{several}") from None
    return topic


def _id_prefix(own: dict[str, str], is_exact: bool) -> str:
    """The option transactionalIdPrefix."""
    text = own.get("transactionalIdPrefix")
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
    checkpoint = {name.lower(): value for name, value in options.items()}.get(_CHECKPOINT, "").strip()
    if not checkpoint:
        raise ConfigError(
            "deliveryGuarantee=exactly-once needs the option checkpointLocation on the writer: Spark does not show "
            "spark.sql.streaming.checkpointLocation to Python data sources"
        )
    settings.setdefault("transaction.timeout.ms", str(_TRANSACTION_MS))
    if not client_config(settings, PREFIX).is_idempotent:
        raise ConfigError("deliveryGuarantee=exactly-once needs kafka.acks=all and kafka.enable.idempotence=true")
    return checkpoint
