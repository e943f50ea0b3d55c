"""Renew the text files: `python -m tests.public.write`."""

from __future__ import annotations

from pathlib import Path

from tests.public.formats import format_lines
from tests.public.json_lines import json_lines
from tests.public.surface import command_lines, metric_lines, option_lines, python_lines, settings_lines

FOLDER = Path(__file__).parent
#: What makes the lines of each file.
FILES = {
    "commands.txt": command_lines,
    "formats.txt": format_lines,
    "json.txt": json_lines,
    "metrics.txt": metric_lines,
    "options.txt": option_lines,
    "python.txt": python_lines,
    "settings.txt": settings_lines,
}

if __name__ == "__main__":
    for name, lines in FILES.items():
        (FOLDER / name).write_text("".join(f"{line}\n" for line in lines()))
