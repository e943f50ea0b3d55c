"""The table of settings: what clients, consumers, brokers, topics and Spark's options parse their settings with.

A configuration is a frozen dataclass. `setting` makes a field of it with the name by which users know the setting, its
default, and its `Kind`, which turns a text into the value. A kind raises `ValueError` with what to set instead;
`value_of` puts that into a sentence with the name and the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import Field, field, fields
from typing import Any, NamedTuple

from spark_klog.base.names import TopicPartition
from spark_klog.errors import ConfigError

INT32_MAX, INT64_MAX = (1 << 31) - 1, (1 << 63) - 1
SECRET_NAME = re.compile(r"password|secret|passphrase|jaas|private\.key|master\.key|keystore\.key", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?[0-9]{1,19}")
_TRUTH = {"true": True, "false": False}


class Kind(NamedTuple):
    """How a setting's text becomes its value. `name` is for the reference; `parse` gets a text without outer blanks."""

    name: str
    parse: Callable[[str], Any]


def number(
    name: str,
    least: int,
    most: int = INT64_MAX,
    factor: int = 1,
    *,
    malformed: str = "a number from {} to {}",
    outside: str = "a number from {} to {}",
) -> Kind:
    """Whole numbers from `least` to `most`, times `factor` unless negative; the texts are for errors."""

    def parse(text: str) -> int:
        if not _NUMBER.fullmatch(text):
            raise ValueError(malformed.format(least, most))
        value = int(text)
        if not least <= value <= most:
            raise ValueError(outside.format(least, most))
        return value * factor if value > 0 else value

    return Kind(name, parse)


def choice(name: str, values: Mapping[str, Any], wanted: str | None = None, *, any_case: bool = False) -> Kind:
    """The value of a word; `wanted` says in errors what to set, by default the words."""

    def parse(text: str) -> Any:
        word = text.lower() if any_case else text
        if word not in values:
            raise ValueError(any_of(list(values)) if wanted is None else wanted)
        return values[word]

    return Kind(name, parse)


BOOLEAN = choice("boolean", _TRUTH, any_case=True)
TEXT = Kind("text", str)
INT, POSITIVE_INT = number("int", 0, INT32_MAX), number("positive int", 1, INT32_MAX)
LONG, POSITIVE_LONG = number("long", 0), number("positive long", 1)


def setting(name: str, default: Any, kind: Kind, *, broker: str = "") -> Any:
    """A field of a configuration, for the setting that users call `name`; `broker` is a topic setting's other name."""
    return field(default=default, metadata={"name": name, "kind": kind, "broker": broker})


def settings_of(config: Any) -> dict[str, Field[Any]]:
    """The fields of a configuration that are settings, by the names that users know."""
    return {setting.metadata["name"]: setting for setting in fields(config) if setting.metadata}


def value_of(kind: Kind, name: str, text: str, wording: str = "{}={}: set {}") -> Any:
    """Parse a setting's text; `ConfigError` by `wording`: of the name, the text, and what to set instead."""
    text = text.strip()
    try:
        return kind.parse(text)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(wording.format(name, text, error)) from None


def parse_settings(texts: Iterable[str]) -> dict[str, str]:
    """Parse "NAME=VALUE" texts into values by name; `ConfigError` for any other text."""
    result = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            secret = SECRET_NAME.search(text)
            seen = text[: secret.end()] + "[hidden]" if secret else text
            raise ConfigError(f"setting {seen!r} is not NAME=VALUE")
        result[name] = value
    return result


def words(text: str) -> frozenset[str]:
    """The words of a text with blanks between them."""
    return frozenset(text.split())


def items(text: str) -> list[str]:
    """The parts of a text with commas between them."""
    return [part.strip() for part in text.split(",") if part.strip()]


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; `ConfigError` for a name that is there twice: Python's parser would take the last value."""
    names: dict[str, Any] = {}
    for name, value in pairs:
        if name in names:
            raise ConfigError(f"has {name!r} twice in one object: remove one of them")
        names[name] = value
    return names


def any_of(names: Sequence[str]) -> str:
    """The names as English: a, b or c."""
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]


def some_of(names: Sequence[str], most: int = 10, separator: str = ", ") -> str:
    """The first names, and how many more there are, for a message that may be about very many."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def some_partitions(keys: Collection[TopicPartition], most: int = 10) -> str:
    """As `some_of`, of partitions in order."""
    return some_of([f"{topic}-{partition}" for topic, partition in sorted(keys)], most)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6, most: int = 1) -> str:
    """A question for a misspelt name, such as "did you mean acks?"; "" if no known one is near. Ignores case.

    `cutoff` is a ratio of `difflib`.
    """
    from difflib import get_close_matches  # only for errors

    by_lower = {candidate.lower(): candidate for candidate in known}
    close = [by_lower[match] for match in get_close_matches(name.lower(), by_lower, most, cutoff)]
    return f"did you mean {' or '.join(close)}?" if close else ""


def advice(name: str, known: Iterable[str], others: Iterable[str] = ()) -> str:
    """Advice for an unknown name: the nearest of the `known` and `others`; else the `known` ones."""
    known = sorted(known)
    unknown = f"it is not known to this version, which acts on {', '.join(known)}"
    return nearest(name, (*known, *others), 0.75, 3) or unknown
