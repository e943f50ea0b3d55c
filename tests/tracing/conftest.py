"""Without OpenTelemetry's SDK, which the extra `test` installs, there is nothing to test."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("opentelemetry") and find_spec("opentelemetry.sdk") else ["*.py"]
