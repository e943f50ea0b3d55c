"""The settings of a log, Kafka's topic settings of the same names and defaults."""

from __future__ import annotations

from dataclasses import dataclass

CREATE_TIME, LOG_APPEND_TIME = "CreateTime", "LogAppendTime"
DELETE, COMPACT = "delete", "compact"
_NEVER = (1 << 63) - 1


@dataclass(frozen=True)
class LogConfig:
    """Sizes in bytes, times in ms; a retention of -1 is unlimited."""

    segment_bytes: int = 1024 * 1024 * 1024
    index_interval_bytes: int = 4096
    max_message_bytes: int = 1024 * 1024 + 12
    segment_ms: int = 7 * 24 * 3600 * 1000
    segment_index_bytes: int = 10 * 1024 * 1024
    flush_messages: int = _NEVER
    flush_ms: int = _NEVER
    retention_ms: int = 7 * 24 * 3600 * 1000
    retention_bytes: int = -1
    file_delete_delay_ms: int = 60_000
    #: DELETE, COMPACT, or both with a comma.
    cleanup_policy: str = DELETE
    min_cleanable_dirty_ratio: float = 0.5
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = _NEVER
    delete_retention_ms: int = 24 * 3600 * 1000
    message_timestamp_type: str = CREATE_TIME
    #: How far ahead of the broker's clock a producer's timestamps may be.
    message_timestamp_after_max_ms: int = _NEVER

    @property
    def deletes(self) -> bool:
        """Whether old segments are deleted."""
        return DELETE in self.cleanup_policy.split(",")

    @property
    def compacts(self) -> bool:
        """Whether only the last value of each key is kept."""
        return COMPACT in self.cleanup_policy.split(",")
