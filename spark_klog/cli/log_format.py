"""Log to stderr, as lines of text or of JSON.

A line of JSON has time (ISO 8601, UTC, in ms), level, logger, message, and with an error exception (its traceback).

Names of clients, users and groups come from outside. A line break in one would forge a line of the log, and an escape
sequence would act on the reader's terminal: control characters are written as Python escapes, in text as in JSON, and
the lines of a traceback are indented.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import datetime, timezone
from typing import Any

TEXT, JSON = "text", "json"
FORMATS = (TEXT, JSON)
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: Controls (C0, DEL, C1), separators of lines and paragraphs, and marks that turn the direction of text.
_CONTROLS = "\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069"
_CONTROL = re.compile(f"[{_CONTROLS}]")
_CONTROL_IN_LINES = re.compile(f"(?![\n\t])[{_CONTROLS}]")


def escaped(text: str, *, has_lines: bool = False) -> str:
    """Escape control characters as Python does, "\\n" for a line break; with `has_lines` keep line breaks and tabs."""
    pattern = _CONTROL_IN_LINES if has_lines else _CONTROL
    return pattern.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class TextFormatter(logging.Formatter):
    """Formats each log record as one line of text, and its traceback as indented lines."""

    def __init__(self) -> None:
        super().__init__(_TEXT_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {line}" for line in escaped(super().formatException(ei), has_lines=True).split("\n"))


class JsonFormatter(logging.Formatter):
    """Formats each log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": escaped(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = escaped(self.formatException(record.exc_info), has_lines=True)
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(level: str, log_format: str) -> None:
    """Log to stderr in one of `FORMATS`, replacing earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == JSON else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("kazoo").setLevel(logging.WARNING)
