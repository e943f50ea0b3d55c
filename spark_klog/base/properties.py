r"""Parser for java.util.Properties, the syntax of Kafka's server.properties.

    # comment, also with !          on a line of its own, after optional blanks
    name=value   name: value        blanks around the separator are dropped; "name value" works too
    name=one \                      an odd number of backslashes at the end continues the line;
        two                         blanks before the next part are dropped
    \t \n \r \f \u00e9              escapes; a backslash before any other character is dropped: \= \: \# \\

Lines end with LF, CR or CR LF. If a name comes twice, its last value counts. Blanks are space, tab and form feed. Bytes
are ISO 8859-1, as java.util.Properties.load(InputStream) reads them. Unlike there, a byte order mark that an editor has
written at the beginning is no part of the first name.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

from spark_klog.errors import ConfigError

_BLANKS = " \t\f"
_LINE_END = re.compile(r"\r\n|\r|\n")
_ENTRY = re.compile(r"((?:\\.|[^\\=: \t\f])*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPED = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def parse_properties(data: bytes, source: str) -> dict[str, str]:
    """Values by name; `ConfigError` names `source` and the line of an invalid \\u escape."""
    result = {}
    for number, line in _logical_lines(data.removeprefix(codecs.BOM_UTF8).decode("latin-1")):
        match = _ENTRY.fullmatch(line)
        assert match is not None, "it matches any line"
        try:
            name, value = (_unescaped(part) for part in match.groups())
        except ValueError:
            raise ConfigError(f"{source}, line {number}: \\u must be followed by 4 hexadecimal digits") from None
        result[name] = value
    return result


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of the first line, text) of each entry: continued lines joined, comments dropped."""
    entry, first = "", 0
    for number, line in enumerate(_LINE_END.split(text), 1):
        part = line.lstrip(_BLANKS)
        if not entry:
            if not part or part[0] in "#!":
                continue
            first = number
        entry += part
        if (len(part) - len(part.rstrip("\\"))) % 2:
            entry = entry[:-1]
            continue
        yield first, entry
        entry = ""
    if entry:
        yield first, entry


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text

    def character(match: re.Match[str]) -> str:
        digits, other = match.groups()
        if digits is not None:
            return chr(int(digits, 16))
        if other == "u":
            raise ValueError("not 4 digits")
        return _ESCAPED.get(other, other)

    # two escapes may be the surrogates of one character
    return _ESCAPE.sub(character, text).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
