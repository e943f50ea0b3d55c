"""The connector's options: their names, Kafka's settings among them, and parsers of their values."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache

from spark_klog.base.settings import BOOLEAN, choice, nearest, number, value_of
from spark_klog.client.security.config import Settings, check_holds_no_secret
from spark_klog.client.settings import check_names, client_config, is_known, named_cluster, without_effect
from spark_klog.errors import ConfigError

_log = logging.getLogger(__name__)
#: Additional keys of a progress record's latest offsets: the lost ranges (failOnDataLoss=report) and the bytes per
#: record of each partition (estimateRecordBytes). No topic has a space in its name.
LOST, RECORD_BYTES = "lost ranges", "record bytes"
#: The prefix of Kafka's settings among the options.
PREFIX = "kafka."
SUBSCRIPTIONS = ("assign", "subscribe", "subscribePattern")
#: Options for the end of a read; not allowed in a stream, which has no end.
ENDING = ("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets")
#: Options of micro-batches; without effect in a batch query, as with Spark's Kafka connector.
TRIGGER = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "commitOffsets")
SOURCE = (
    "path",
    *SUBSCRIPTIONS,
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsets",
    "startingOffsetsByTimestampStrategy",
    *ENDING,
    *TRIGGER,
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
SINK = ("topic", "createTopics", "deliveryGuarantee", "transactionalIdPrefix")
#: The name of a cluster in clusters.toml.
_CLUSTER = "cluster"
_KNOWN = (*SOURCE, *SINK, "includeHeaders", _CLUSTER)
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
_KNOWN_BY_KEY = {name.lower(): name for name in _KNOWN}
#: Spark keeps the options and TBLPROPERTIES of a table in its catalog, and passes none of them to a Python source.
_DROPPED = (
    "No option is set: Spark drops those of CREATE TABLE ... USING klog. Use CREATE TEMPORARY VIEW ... USING klog "
    "OPTIONS (...), or name them in each query: SELECT ... FROM table WITH ('kafka.bootstrap.servers' = '...', ...)"
)
#: What is meant by names of other connectors that look more like another option.
_MEANT = {"topics": "subscribe (to read; topics with commas between them) or topic (to write)"}
_WORDING = "option {}={} must be {}"
_DURATION = re.compile(r"(\d{1,18})\s*(ms|s|m|min|h|d)?")
_UNIT_MS = {None: 1, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


def boolean(own: dict[str, str], name: str, default: bool) -> bool:
    """Parse true or false."""
    return bool(value_of(BOOLEAN, name, own.get(name, str(default)).lower(), _WORDING))


def count(own: dict[str, str], name: str, smallest: int = 1) -> int | None:
    """Parse an integer of at least `smallest`; None if the option is not set."""
    text = own.get(name)
    wanted = "an integer of at least {}"
    kind = number("count", smallest, malformed=wanted, outside=wanted)
    return None if text is None else int(value_of(kind, name, text, _WORDING))


def milliseconds(own: dict[str, str], name: str, default: int) -> int:
    """Parse a duration as Spark writes it: 15m, 30s, 500ms; a bare number is ms."""
    text = own.get(name)
    if text is None:
        return default
    match = _DURATION.fullmatch(text.strip().lower())
    if not match:
        raise ConfigError(f"option {name}={text} must be a duration like 15m, 30s or 500ms")
    return int(match[1]) * _UNIT_MS[match[2]]


def chosen(own: dict[str, str], name: str, values: Mapping[str, str]) -> str:
    """The value of the chosen word; the first one is the default."""
    kind = choice("choice", values, f"one of {', '.join(values)}", any_case=True)
    return str(value_of(kind, name, own.get(name, next(iter(values))), _WORDING))


def split(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(client settings without their prefix, the connector's own options); `ConfigError` for unknown names.

    Spark ignores the case of names: the results have settings in lower case, options as the documents write them.
    """
    settings = Settings()
    own: dict[str, str] = {}
    for name, value in options.items():
        key = name.lower()
        check_holds_no_secret(f"option {name}", key, value)
        if key.startswith(PREFIX):
            setting = key[len(PREFIX) :]
            if setting in PROTECTED:
                raise ConfigError(f"option {name} can't be set: {PROTECTED[setting]}")
            if setting in _SHOWN_KEYS and "ENCRYPTED" not in value:
                raise ConfigError(
                    f"option {name} holds a key that is not encrypted, and Spark would show it in plans: encrypt it "
                    "and set kafka.ssl.key.password, which Spark hides, or set kafka.ssl.keystore.location to a file"
                )
            settings[setting] = value
        elif key in _KNOWN_BY_KEY:
            if key != "path" or value:  # without a path Spark passes an empty one
                own[_KNOWN_BY_KEY[key]] = value
        else:
            if is_known(key):
                raise ConfigError(f"unknown option {name!r}: write {PREFIX}{key}")
            meant = _MEANT.get(key)
            hint = f"did you mean {meant}?" if meant else nearest(key, [*_KNOWN, "kafka.bootstrap.servers"])
            raise ConfigError(f"unknown option {name!r}{hint and '; ' + hint}")
    cluster = own.pop(_CLUSTER, None)
    if cluster is not None:
        settings = _with_cluster(cluster, settings)
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


def _with_cluster(name: str, settings: Settings) -> Settings:
    """The settings of a named cluster, with those of the options in their place; it has to be one cluster."""
    if "bootstrap.servers" in settings:
        raise ConfigError(f"set only one of the options cluster={name} and kafka.bootstrap.servers")
    return named_cluster(name) | settings


@cache
def _warn_without_effect(*names: str) -> None:
    """Log settings without effect, once per process: linger.ms has one on `Producer.send` only."""
    if names:
        _log.warning("these options have no effect: %s", ", ".join(f"{PREFIX}{name}" for name in names))
