"""Paths of a load's files below its output, and what their names tell."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spark_klog.load.journal.model import Range

FOLDER = "_klog"
LOAD = f"{FOLDER}/load.json"
LATEST = f"{FOLDER}/latest.json"
#: The audit of the last run that found nothing new, if it is later than the last committed one.
IDLE = f"{FOLDER}/idle.json"
LETTERS = f"{FOLDER}/dead-letters"
#: Markers of attempts of tasks in stores where files are uploaded to their final names.
ATTEMPTS = f"{FOLDER}/attempts"
#: How the names of files end that wait for the commit.
STAGED = ".part"
_RUNS = f"{FOLDER}/runs"
_DIGITS = 8
_HIDDEN = re.compile(r"^[_.]")
_OF_VALUES = "values+"
_TOKEN_LETTERS = string.digits + string.ascii_lowercase
_TOKEN = r"-([0-9a-z]{7})"
_FILE = re.compile(rf".*\+(\d+)\+(\d{{20}})\+\d{{20}}(?:\+(\d+))?{_TOKEN}\.[a-z.]+")
_OF_ATTEMPT = re.compile(rf".*\+\d{{20}}(?:\+\d+)?{_TOKEN}\.[a-z.]+")
_ATTEMPT = re.compile(rf"(\d{{{_DIGITS},}}){_TOKEN}")


def run_name(number: int) -> str:
    return f"{number:0{_DIGITS}d}"


def in_run(number: int, name: str) -> str:
    return f"{_RUNS}/{run_name(number)}/{name}"


def plan(number: int) -> str:
    return in_run(number, "plan.json")


def manifest(number: int) -> str:
    return in_run(number, "manifest.json")


def refused(number: int) -> str:
    """Tells that a run was not committed because of records that may decode another time, or by another schema."""
    return in_run(number, "refused")


def candidate(number: int, token: str) -> str:
    """The manifest that a run is to have once its table has committed it with this token."""
    return in_run(number, f"candidate-{token}.json")


def changes(number: int, name: str) -> str:
    """A file of changes that waits for the run's commit, or the folder of them."""
    return in_run(number, f"changes/{name}".rstrip("/"))


def task(number: int, task: int) -> str:
    return in_run(number, f"offsets-{task:05d}.json")


def seen(number: int, task: int) -> str:
    """What a task has found in JSON values that the run's schema has no place for."""
    return in_run(number, f"seen-{task:05d}.json")


def all_seen(number: int, names: Iterable[str]) -> list[str]:
    """The paths of `seen` among the names in a run's folder."""
    return [in_run(number, name) for name in names if name.startswith("seen-")]


def attempt(number: int, token: str) -> str:
    return f"{ATTEMPTS}/{run_name(number)}-{token}"


def attempt_of(name: str) -> tuple[int, str] | None:
    """The run and the token in the name of a marker; None if a load does not name markers so."""
    match = _ATTEMPT.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def staging(number: int) -> str:
    return in_run(number, "staging")


def staged(number: int, path: str) -> str:
    """Where a file waits for the commit on a local disk; its name ends so that no reader takes it for data."""
    return f"{staging(number)}/{path}{STAGED}"


def new_token() -> str:
    """The token of an attempt of a task: the names of its files end with it, so that no other attempt writes them."""
    return "".join(secrets.choice(_TOKEN_LETTERS) for _ in range(7))


def token_of(path: str) -> str | None:
    """The token of the attempt that has written a file; None for files of others."""
    match = _OF_ATTEMPT.fullmatch(path.rpartition("/")[2])
    return None if match is None else match[1]


def file(span: Range, first: int, last: int, layout: str, token: str, extension: str) -> str:
    """The path of a file that covers the offsets from `first` to `last`, below the output.

    A "+" precedes topics that readers of folders would skip (those with "_" or "." in front); no topic has one in its
    name. `layout` is the folder of the records' time, or "". Topics that were created again count up the incarnation.
    """
    name = topic_folder(span.topic)
    again = f"+{span.incarnation}" if span.incarnation else ""
    file = f"{name}+{span.partition}+{first:020d}+{last:020d}{again}-{token}.{extension}"
    return "/".join(filter(None, [name, layout, file]))


def dead_letter(name: str) -> str:
    return f"{LETTERS}/{name}"


def letters_in(topic: str) -> str:
    """Which dead letters a topic has: brokers forget the group with the progress, some days after the last letter."""
    return f"{FOLDER}/dead-letter-topics/{topic}.json"


def is_of_values(name: str) -> bool:
    """Whether a file of dead letters has values that did not parse; others have a corrupt batch."""
    return name.startswith(_OF_VALUES)


def letters(span: Range, token: str) -> str:
    """The name of a file of dead letters: the values of a range that an attempt could not parse."""
    again = f"+{span.incarnation}" if span.incarnation else ""
    return f"{_OF_VALUES}{span.topic}+{span.partition}+{span.start:020d}{again}-{token}.jsonl"


def topic_folder(topic: str) -> str:
    """The folder of a topic's files, below the output."""
    return f"+{topic}" if _HIDDEN.match(topic) else topic


def place_of(path: str) -> tuple[int, int, int] | None:
    """The partition, first offset and incarnation in the name of a file; None if a load does not name files so."""
    match = _FILE.fullmatch(path.rpartition("/")[2])
    return None if match is None else (int(match[1]), int(match[2]), int(match[3] or 0))
