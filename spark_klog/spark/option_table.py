"""The connector's own options, a row each: parsing, errors and the reference's tables go by it.

Names are those of Spark's Kafka connector, and for functions those of Databricks; the case of names does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Flag, auto
from typing import Any, NamedTuple

from spark_klog.base.names import DECISION_TOPIC, ROW_FORMATS, SUBJECT_STRATEGIES, Format
from spark_klog.base.settings import BOOLEAN, TEXT, Kind, nearest, number, value_of

_DURATION = re.compile(r"(\d{1,18})\s*(ms|s|m|min|h|d)?")
_UNIT_MS = {None: 1, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
#: How an error says what an option must be: its name, its text, and what to set instead.
WORDING = "option {}={} must be {}"
#: How the transactional ids of exactly-once writes begin, without the option transactionalIdPrefix.
DEFAULT_ID_PREFIX = "klog-"


class Use(Flag):
    """What an option is for: batch queries and streams that read, writes, functions that read and that write rows."""

    BATCH = auto()
    STREAM = auto()
    WRITE = auto()
    FROM = auto()
    TO = auto()
    READ = BATCH | STREAM
    ALL = READ | WRITE | FROM | TO


class Option(NamedTuple):
    """An option: how its text becomes its value, the value without it, and what it is for.

    `of` are the formats that a function's option is for; `others` its other names, in lower case. What it means says
    docs/reference_texts.py.
    """

    name: str
    kind: Kind
    default: Any
    uses: Use
    of: tuple[Format, ...] = ()
    others: tuple[str, ...] = ()


def _whole(least: int) -> Kind:
    wanted = "an integer of at least {}"
    return number("number", least, malformed=wanted, outside=wanted)


def _words(*words: str, **values: str) -> Kind:
    """The value of a word in any case: the word, unless `values` has another."""
    known = {word: word for word in words} | values
    by_lower = {word.lower(): value for word, value in known.items()}

    def parse(text: str) -> str:
        if text.lower() in by_lower:
            return by_lower[text.lower()]
        question = nearest(text, known)
        raise ValueError(f"one of {', '.join(known)}{question and f'; {question}'}")

    return Kind("word", parse)


def _strategy(text: str) -> str:
    """A strategy by the last part of its class's name."""
    value: str = _words(**SUBJECT_STRATEGIES).parse(text.rpartition(".")[2])
    return value


def _milliseconds(text: str) -> int:
    """A duration as Spark writes it: 15m, 30s, 500ms; a bare number is ms."""
    match = _DURATION.fullmatch(text.lower())
    if not match:
        raise ValueError("a duration like 15m, 30s or 500ms")
    return int(match[1]) * _UNIT_MS[match[2]]


_COUNT, _LIMIT, _DURATION_KIND = _whole(0), _whole(1), Kind("duration", _milliseconds)
_LOSS = _words(true="fail", false="warn", report="report")
_READ, _BOTH, _WRITE, _FUNCTIONS = Use.READ, Use.READ | Use.WRITE, Use.WRITE, Use.FROM | Use.TO
#: Options of keys and of values.
_OF_COLUMNS = (
    Option("Format", _words(*ROW_FORMATS, "json"), None, _BOTH),
    Option("Subject", TEXT, None, _BOTH),
    Option("SchemaId", _COUNT, None, _BOTH),
    Option("Schema", TEXT, None, _BOTH),
    Option("Message", TEXT, None, _BOTH),
    Option("SubjectNameStrategy", Kind("strategy", _strategy), "topic", _WRITE),
)
_ROWS = (
    Option("cluster", TEXT, None, _BOTH),
    Option("topic", TEXT, None, _WRITE),
    Option("createTopics", _LIMIT, None, _WRITE),
    Option("deliveryGuarantee", _words("at-least-once", "exactly-once"), "at-least-once", _WRITE),
    Option("writeId", TEXT, None, _WRITE),
    Option("writeVersion", _COUNT, None, _WRITE),
    Option("writePlan", TEXT, None, _WRITE),
    Option("transactionalIdPrefix", TEXT, DEFAULT_ID_PREFIX, _WRITE),
    Option("decisionTopic", TEXT, DECISION_TOPIC, _WRITE),
    Option("path", TEXT, None, Use.BATCH),
    Option("subscribe", TEXT, None, _READ),
    Option("subscribePattern", TEXT, None, _READ),
    Option("assign", TEXT, None, _READ),
    Option("startingTimestamp", TEXT, None, _READ),
    Option("startingOffsetsByTimestamp", TEXT, None, _READ),
    Option("startingOffsets", TEXT, None, _READ),
    Option("startingOffsetsByTimestampStrategy", _words("error", "latest"), "error", _READ),
    Option("endingTimestamp", TEXT, None, Use.BATCH),
    Option("endingOffsetsByTimestamp", TEXT, None, Use.BATCH),
    Option("endingOffsets", TEXT, None, Use.BATCH),
    Option("maxOffsetsPerTrigger", _LIMIT, None, Use.STREAM),
    Option("maxBytesPerTrigger", _LIMIT, None, Use.STREAM),
    Option("minOffsetsPerTrigger", _LIMIT, None, Use.STREAM),
    Option("maxTriggerDelay", _DURATION_KIND, 15 * 60_000, Use.STREAM),
    Option("availableNow", _words("limited", "all"), "limited", Use.STREAM),
    Option("minPartitions", _LIMIT, None, _READ),
    Option("maxRecordsPerPartition", _LIMIT, None, _READ),
    Option("maxBytesPerPartition", _LIMIT, None, _READ),
    Option("failOnDataLoss", _LOSS, "fail", _READ),
    Option("badRecords", _words("fail", "skip", "deadletter"), "fail", _READ),
    Option("badRecordsPath", TEXT, None, _READ),
    Option("deadLetterTopic", TEXT, None, _READ),
    *(Option(f"{column}{row.name}", *row[1:]) for row in _OF_COLUMNS for column in ("value", "key")),
    Option("schemaRegistryUrl", TEXT, None, Use.ALL, others=("schema.registry.address",)),
    Option("autoRegisterSchemas", BOOLEAN, True, _WRITE | Use.TO),
    Option("useLatestVersion", BOOLEAN, False, _WRITE | Use.TO),
    Option("mode", _words("failfast", "permissive"), "failfast", _READ | Use.FROM),
    Option("validate", BOOLEAN, False, Use.ALL, of=("json-schema",)),
    Option(
        "schemaEvolution",
        _words("keep", "restart", "fail", none="keep"),
        "keep",
        Use.STREAM | Use.FROM,
        others=("avroschemaevolutionmode", "schema.registry.schema.evolution.mode"),
    ),
    Option("subject", TEXT, None, _FUNCTIONS, others=("schema.registry.subject",)),
    Option("schemaId", _COUNT, None, _FUNCTIONS),
    Option("messageName", TEXT, None, _FUNCTIONS, of=("protobuf",), others=("schema.registry.protobuf.name",)),
    Option("includeHeaders", BOOLEAN, False, _BOTH),
    Option("fetchOffset.numRetries", _COUNT, 5, _READ),
    Option("fetchOffset.retryIntervalMs", _COUNT, 200, _READ),
    Option("kafkaConsumer.pollTimeoutMs", _LIMIT, None, _READ),
    Option("estimateRecordBytes", BOOLEAN, False, _READ),
    Option("groupIdPrefix", TEXT, None, _READ),
    Option("commitOffsets", BOOLEAN, None, Use.STREAM),
    Option("offsetsPath", TEXT, None, _READ),
)
OPTIONS: Mapping[str, Option] = {row.name: row for row in _ROWS}
_BY_LOWER = {row.name.lower(): row for row in _ROWS if row.uses & _BOTH}


def names_for(uses: Use) -> tuple[str, ...]:
    """The names of options that are for any of these uses."""
    return tuple(row.name for row in _ROWS if row.uses & uses)


def option_named(name: str) -> Option | None:
    """An option of reads or writes by its name in any case."""
    return _BY_LOWER.get(name.lower())


def option(own: Mapping[str, str], name: str) -> Any:
    """The value of an option by its row: parsed, or its default; `ConfigError` names the option and what it must be."""
    row = OPTIONS[name]
    return value_of(row.kind, name, own[name], WORDING) if name in own else row.default
