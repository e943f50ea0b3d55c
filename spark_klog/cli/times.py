"""Times as arguments of commands."""

from __future__ import annotations

from datetime import timezone

from spark_klog.clock import system_ms
from spark_klog.errors import ConfigError


def parse_time(option: str, text: str) -> int:
    """Parse an option's time to ms since the epoch, in UTC if it names no zone; `ConfigError` for anything else."""
    from spark_klog.spark.offsets import TimeSpec, parse_offsets, parse_timestamp

    try:
        if text.strip().isdecimal():
            spec: object = parse_timestamp(option, text, strict=False)
        else:
            spec = parse_offsets(option, text, system_ms, zone=timezone.utc)
    except ConfigError:
        spec = None
    if not isinstance(spec, TimeSpec) or spec.everywhere is None:
        raise ConfigError(
            f"{option} {text} must be an ISO time (2026-11-21T10:00:00Z), ms since the epoch, or a time before now "
            "(-10m; ms, s, m, h, d, w)"
        )
    return spec.everywhere
