"""The rule for names of topics."""

from __future__ import annotations

import re

from spark_klog.errors import ConfigError

_LEGAL = re.compile(r"[a-zA-Z0-9._-]{1,249}")


def check_topic_name(topic: str) -> None:
    """Raise `ConfigError` for a name that Kafka rejects (letters, digits, '.', '_', '-'; at most 249)."""
    if topic in (".", "..") or not _LEGAL.fullmatch(topic):
        raise ConfigError(f"illegal topic name {topic[:300]!r}: 1 to 249 of a-z A-Z 0-9 . _ - are allowed")
