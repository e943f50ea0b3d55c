"""Parse `sasl.jaas.config` as Kafka's Java clients do (Kafka documentation, "Security", JAAS).

    CLASS FLAG NAME=VALUE NAME="VALUE" ... ;

FLAG is required, requisite, sufficient or optional. Values in double or single quotes may hold Java's escapes. Comments
(`//` to the end of the line, `/* */`) are skipped. No message shows a value, since values may be passwords.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from spark_klog.errors import ConfigError

_FLAGS = frozenset({"required", "requisite", "sufficient", "optional"})
_TOKEN = re.compile(
    r"""(?:\s|//[^\n]*|/\*.*?\*/)*            # blanks and comments
        (?: (?P<mark>[=;])
          | "(?P<double>(?:\\.|[^"\\\n])*)"
          | '(?P<single>(?:\\.|[^'\\\n])*)'
          | (?P<word>(?:(?!//|/\*)[^\s=;"'])+)
          | (?P<end>\Z)
        )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\([0-3][0-7]{2}|[0-7]{1,2}|.)", re.DOTALL)
#: A Java class with its package; anything else in a class's place may be a password.
_CLASS = re.compile(r"[A-Za-z_$][\w$]*(?:\.[A-Za-z_$][\w$]*)+", re.ASCII)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "b": "\b", "a": "\a", "v": "\v"}


@dataclass(frozen=True)
class LoginModule:
    """A login module's class, and its options by name."""

    name: str = field(repr=False)
    options: dict[str, str] = field(repr=False)

    @property
    def shown(self) -> str:
        """The class for messages, if it is a class's name."""
        return self.name if _CLASS.fullmatch(self.name) else "the class"


def parse_jaas(text: str, setting: str) -> LoginModule:
    """Parse the one login module of a JAAS configuration; `ConfigError` names `setting` and the problem, no values."""
    tokens = _tokens(text, setting)
    if len(tokens) < 2 or tokens[0][0] != "word" or tokens[1][0] != "word" or tokens[1][1].lower() not in _FLAGS:
        raise _error(setting, "it does not begin with a class and a flag")
    if tokens[-1] != ("mark", ";"):
        raise _error(setting, "the ; at its end is missing")
    options: dict[str, str] = {}
    position, last = 2, len(tokens) - 1
    while position < last:
        if tokens[position] == ("mark", ";"):
            raise _error(setting, "it has several login modules: write only one")
        name = tokens[position][1]
        if position + 2 >= last + 1 or tokens[position][0] == "mark" or tokens[position + 1] != ("mark", "="):
            raise _error(setting, f"option {len(options) + 1} is not NAME=VALUE")
        if tokens[position + 2][0] == "mark":
            raise _error(setting, f"option {len(options) + 1} has no value")
        options[name] = tokens[position + 2][1]
        position += 3
    return LoginModule(tokens[0][1], options)


def _error(setting: str, what: str) -> ConfigError:
    return ConfigError(f'{setting}: {what}. Write it as CLASS required NAME="VALUE" ... ;')


def _tokens(text: str, setting: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    position = 0
    while True:
        match = _TOKEN.match(text, position)
        if match is None:
            raise _error(setting, "a quotation mark or a comment has no end")
        kind = match.lastgroup
        assert kind is not None  # each alternative is named
        if kind == "end":
            return found
        value = match[kind]
        found.append((kind, value) if kind in ("mark", "word") else ("text", _ESCAPE.sub(_unescaped, value)))
        position = match.end()


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code, 8)) if code[0] in "01234567" else _ESCAPED.get(code, code)
