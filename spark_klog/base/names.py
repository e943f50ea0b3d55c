"""The version, and names: of topics, with their rule, of security protocols, SASL mechanisms and formats of rows."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final, Literal, get_args

from spark_klog.errors import ConfigError

VERSION: Final = "0.1.0"
#: A topic and the number of one of its partitions.
TopicPartition = tuple[str, int]
#: Where exactly-once writes keep their decisions, unless their options name another topic.
DECISION_TOPIC: Final = "__klog_decisions"
#: The feature of a cluster whose level says which transactions its brokers serve (KIP-890, KIP-1022), and its version
#: with which the epoch rises with each end of a transaction, and leaders add partitions.
TRANSACTION_VERSION: Final = "transaction.version"
TRANSACTIONS_2: Final = 2
PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL = "PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"
SECURITY_PROTOCOLS = (PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL)
PLAIN, SCRAM_SHA_256, SCRAM_SHA_512 = "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"
#: SCRAM's mechanisms, with their hash functions.
SCRAM_HASHES = {SCRAM_SHA_256: "sha256", SCRAM_SHA_512: "sha512"}
#: How keys and values may be rows by a schema.
Format = Literal["avro", "protobuf", "json-schema"]
ROW_FORMATS: Final[tuple[Format, ...]] = get_args(Format)
#: What begins the settings of a schema registry, which may stand beside a client's.
OF_REGISTRY: Final = "schema.registry."
#: How subjects of a schema registry are called, by the last part of the names of Confluent's classes, and in short.
SUBJECT_STRATEGIES: Final = {
    "TopicNameStrategy": "topic",
    "RecordNameStrategy": "record",
    "TopicRecordNameStrategy": "topic-record",
}
_LEGAL = re.compile(r"[a-zA-Z0-9._-]{1,249}")
#: What Python's re reads otherwise than Java, outside and inside of [...]: octal escapes. Java's \0 takes up to three
#: more digits; its \101 is a reference to a group.
_OCTAL = re.compile(r"\\(?:0|[1-3][0-7][0-7])")


def check_topic_name(topic: str) -> None:
    """Raise `ConfigError` for a name that Kafka rejects (letters, digits, '.', '_', '-'; at most 249)."""
    if topic in (".", "..") or not _LEGAL.fullmatch(topic):
        raise ConfigError(f"illegal topic name {topic[:300]!r}: 1 to 249 of a-z A-Z 0-9 . _ - are allowed")


def topic_pattern(what: str, text: str) -> re.Pattern[str]:
    """Compile a pattern for names of topics; `ConfigError`, which names it as `what`.

    Refuses what Java, for which such patterns are often written, reads otherwise: Python's re takes `[a-z&&[^b]]`, and
    matches other names. What Python does not know (`\\p{Alpha}`, `\\Q`, `(?<name>...)`) is an error of its own.
    """
    _check_means_the_same(what, text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of sets in classes: Java takes || and -- as Python does
            warnings.simplefilter(
                "error", DeprecationWarning
            )  # (?i) within a pattern, which Python 3.10 applies to all
            return re.compile(text)
    except (re.error, DeprecationWarning) as error:
        raise ConfigError(f"{what} is not a regular expression: {error}") from None


def _check_means_the_same(what: str, text: str) -> None:
    is_class, first, place = False, 0, 0  # `first` is where a ] is a character of the class
    while place < len(text):
        character = text[place]
        if character == "\\":
            if _OCTAL.match(text, place):
                raise ConfigError(f"{what} has an octal escape at position {place}: write the character itself")
            place += 2
            continue
        if is_class and character == "]" and place != first:
            is_class = False
        elif is_class and (character == "[" or text.startswith("&&", place)):
            kind = "a class within a class" if character == "[" else "an intersection of classes"
            raise ConfigError(
                f"{what} has {kind} at position {place}, which Java knows and Python does not: list the characters, "
                r"use a lookahead ((?![b])[a-z]), or write \[ and \& for the characters themselves"
            )
        elif not is_class and character == "[":
            is_class = True
            first = place + (2 if text.startswith("^", place + 1) else 1)
        place += 1


def imported_at_first_use(package: str, names: Mapping[str, str], home: str = "") -> Callable[[str], Any]:
    """The `__getattr__` of a package: imports public `names`, with blanks between them, from modules of the package
    `home`, by default itself.
    """
    modules = {name: f"{home or package}.{module}" for module, words in names.items() for name in words.split()}

    def public(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return public
