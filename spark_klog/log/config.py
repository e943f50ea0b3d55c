"""The settings of a log: Kafka's topic settings, with their names and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

from spark_klog.base.names import SUBJECT_STRATEGIES
from spark_klog.base.settings import BOOLEAN, INT32_MAX, INT64_MAX, Kind, choice, number, setting
from spark_klog.errors import ConfigError
from spark_klog.wire.codecs import CODECS, GZIP, LZ4, NONE, ZSTD, Codec, codec_by_name

CREATE_TIME, LOG_APPEND_TIME = "CreateTime", "LogAppendTime"
DELETE, COMPACT = "delete", "compact"
_NEVER = INT64_MAX
log_number = partial(number, malformed="an integer", outside="from {} to {}")
_SIZE = log_number("int", 1, INT32_MAX)
_NATURAL, _POSITIVE, _OR_NO_LIMIT = log_number("long", 0), log_number("long", 1), log_number("long", -1)
_TIMESTAMPS = choice("string", {CREATE_TIME: CREATE_TIME, LOG_APPEND_TIME: LOG_APPEND_TIME})


#: Values of compression.type beside the names of codecs: batches as their producer has made them, and without a codec.
PRODUCER, UNCOMPRESSED = "producer", "uncompressed"
_COMPRESSIONS = choice(
    "string",
    {word: word for word in (PRODUCER, UNCOMPRESSED, *(codec.name for codec in CODECS.values() if codec is not NONE))},
)

#: Confluent's classes, by their names and by the last parts of these.
_SUBJECTS = "io.confluent.kafka.serializers.subject."
_STRATEGIES = choice(
    "string",
    {f"{before}{name}": f"{_SUBJECTS}{name}" for name in SUBJECT_STRATEGIES for before in (_SUBJECTS, "")},
    f"{_SUBJECTS}NAME, of the names {', '.join(SUBJECT_STRATEGIES)}",
)


def _level(codec_id: int) -> Kind:
    def parse(text: str) -> int:
        try:
            CODECS[codec_id].check_level(level := int(text))
        except (ValueError, ConfigError) as error:
            raise ValueError(CODECS[codec_id].level_words if isinstance(error, ConfigError) else "an integer") from None
        return level

    return Kind("int", parse)


def _level_setting(codec_id: int) -> int:
    name = f"compression.{CODECS[codec_id].name}.level"
    level: int = setting(name, CODECS[codec_id].default_level, _level(codec_id), broker=name)
    return level


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("a number from 0 to 1") from None
    if not 0 <= value <= 1:
        raise ValueError("from 0 to 1")
    return value


def _policy(text: str) -> str:
    policies = [word.strip() for word in text.split(",")]
    if not set(policies) <= {DELETE, COMPACT}:
        raise ValueError(f"{DELETE}, {COMPACT} or both")
    return ",".join(policies)


@dataclass(frozen=True)
class LogConfig:
    """Sizes in bytes, times in ms; a retention of -1 is unlimited. `broker` is the name of the broker's default."""

    segment_bytes: int = setting("segment.bytes", 1024 * 1024 * 1024, _SIZE, broker="log.segment.bytes")
    segment_ms: int = setting("segment.ms", 7 * 24 * 3600 * 1000, _POSITIVE, broker="log.roll.ms")
    segment_index_bytes: int = setting(
        "segment.index.bytes", 10 * 1024 * 1024, log_number("int", 24, INT32_MAX), broker="log.index.size.max.bytes"
    )
    index_interval_bytes: int = setting(
        "index.interval.bytes", 4096, log_number("int", 0, INT32_MAX), broker="log.index.interval.bytes"
    )
    max_message_bytes: int = setting("max.message.bytes", 1024 * 1024 + 12, _SIZE, broker="message.max.bytes")
    flush_messages: int = setting("flush.messages", _NEVER, _POSITIVE, broker="log.flush.interval.messages")
    flush_ms: int = setting("flush.ms", _NEVER, _NATURAL, broker="log.flush.interval.ms")
    retention_ms: int = setting("retention.ms", 7 * 24 * 3600 * 1000, _OR_NO_LIMIT, broker="log.retention.ms")
    retention_bytes: int = setting("retention.bytes", -1, _OR_NO_LIMIT, broker="log.retention.bytes")
    file_delete_delay_ms: int = setting("file.delete.delay.ms", 60_000, _NATURAL, broker="log.segment.delete.delay.ms")
    #: DELETE, COMPACT, or both with a comma.
    cleanup_policy: str = setting("cleanup.policy", DELETE, Kind("list", _policy), broker="log.cleanup.policy")
    min_cleanable_dirty_ratio: float = setting(
        "min.cleanable.dirty.ratio", 0.5, Kind("double", _ratio), broker="log.cleaner.min.cleanable.ratio"
    )
    min_compaction_lag_ms: int = setting(
        "min.compaction.lag.ms", 0, _NATURAL, broker="log.cleaner.min.compaction.lag.ms"
    )
    max_compaction_lag_ms: int = setting(
        "max.compaction.lag.ms", _NEVER, _POSITIVE, broker="log.cleaner.max.compaction.lag.ms"
    )
    delete_retention_ms: int = setting(
        "delete.retention.ms", 24 * 3600 * 1000, _NATURAL, broker="log.cleaner.delete.retention.ms"
    )
    message_timestamp_type: str = setting(
        "message.timestamp.type", CREATE_TIME, _TIMESTAMPS, broker="log.message.timestamp.type"
    )
    #: How far ahead of the broker's clock a producer's timestamps may be.
    message_timestamp_after_max_ms: int = setting(
        "message.timestamp.after.max.ms", _NEVER, _NATURAL, broker="log.message.timestamp.after.max.ms"
    )

    compression_type: str = setting("compression.type", PRODUCER, _COMPRESSIONS, broker="compression.type")
    compression_gzip_level: int = _level_setting(GZIP)
    compression_lz4_level: int = _level_setting(LZ4)
    compression_zstd_level: int = _level_setting(ZSTD)

    key_schema_validation: bool = setting("confluent.key.schema.validation", False, BOOLEAN)
    value_schema_validation: bool = setting("confluent.value.schema.validation", False, BOOLEAN)
    key_strategy: str = setting("confluent.key.subject.name.strategy", f"{_SUBJECTS}TopicNameStrategy", _STRATEGIES)
    value_strategy: str = setting("confluent.value.subject.name.strategy", f"{_SUBJECTS}TopicNameStrategy", _STRATEGIES)

    @cached_property
    def validated(self) -> dict[str, str]:
        """Columns ("key", "value") whose schemas are validated, with how subjects are called (`SUBJECT_STRATEGIES`)."""
        chosen = {"key": self.key_strategy, "value": self.value_strategy}
        needs = {"key": self.key_schema_validation, "value": self.value_schema_validation}
        return {
            column: SUBJECT_STRATEGIES[name.removeprefix(_SUBJECTS)] for column, name in chosen.items() if needs[column]
        }

    @cached_property
    def codec(self) -> Codec | None:
        """The codec of all batches; None if each has that of its producer."""
        if self.compression_type == PRODUCER:
            return None
        return NONE if self.compression_type == UNCOMPRESSED else codec_by_name(self.compression_type)

    @cached_property
    def level(self) -> int | None:
        """The level of `codec`; None if it has none."""
        levels = {GZIP: self.compression_gzip_level, LZ4: self.compression_lz4_level, ZSTD: self.compression_zstd_level}
        return None if self.codec is None else levels.get(self.codec.id)

    @cached_property
    def deletes(self) -> bool:
        """Whether old segments are deleted."""
        return DELETE in self.cleanup_policy.split(",")

    @cached_property
    def compacts(self) -> bool:
        """Whether only the last value of each key is kept."""
        return COMPACT in self.cleanup_policy.split(",")
