"""Regular expressions over topic names that groups subscribe to (KIP-848), in the syntax of RE2.

Clients choose them, so matching takes time in proportion to the name, whatever the expression is: Python's `re` would
take years for some. An expression becomes a nondeterministic automaton, whose sets of states (numbers with a bit for
each) are looked up in a table that grows with the names matched, up to a limit; characters that no part of the
expression tells apart are one in it. There are no back-references, look-around and word boundaries (the first two are
not in RE2 either), and no Unicode classes: topics' names are ASCII. Of other names, such as transactional ids, all
characters beyond ASCII are one: what matches any character matches them, too.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from typing import NamedTuple

from spark_klog.broker.event_loop import Turns
from spark_klog.errors import ConfigError

_ASCII = frozenset(map(chr, range(128)))
#: Stands for each character beyond ASCII.
_OTHER = "\x80"
_ALPHABET = _ASCII | {_OTHER}
_DIGITS, _WORDS = frozenset(string.digits), frozenset(string.ascii_letters + string.digits + "_")
_NOTHING: frozenset[str] = frozenset()
_CLASSES = {"d": _DIGITS, "w": _WORDS, "s": frozenset("\t\n\f\r ")}
_GRAPH = _WORDS | frozenset(string.punctuation)
_POSIX = {
    "alnum": frozenset(string.ascii_letters + string.digits),
    "alpha": frozenset(string.ascii_letters),
    "ascii": _ASCII,
    "blank": frozenset("\t "),
    "cntrl": _ASCII - _GRAPH - {" "},
    "digit": _DIGITS,
    "graph": _GRAPH,
    "lower": frozenset(string.ascii_lowercase),
    "print": _GRAPH | {" "},
    "punct": frozenset(string.punctuation),
    "space": frozenset("\t\n\v\f\r "),
    "upper": frozenset(string.ascii_uppercase),
    "word": _WORDS,
    "xdigit": frozenset(string.hexdigits),
}
_MAX_LENGTH, _MAX_DEPTH, _MAX_NODES, _MAX_COUNT = 2048, 50, 2000, 1000
#: Entries of the table of a pattern, of some 300 bytes; beyond them it begins anew.
_MAX_STEPS = 5000
#: Parts that an expression has once its repetitions are written out; empty ones need no state.
_MAX_PARTS = 20_000
_COUNTS = re.compile(r"\{(\d{1,5})(,(\d{1,5})?)?\}")
_GROUP = re.compile(r"\?(?:P?<\w+>|([imsU]*)(-[imsU]+)?(:|\)))")
_HEX = re.compile(r"x(?:([0-9A-Fa-f]{2})|\{([0-9A-Fa-f]{1,6})\})")


class _Repeat(NamedTuple):
    node: _Node
    least: int
    most: int | None


class _Sequence(NamedTuple):
    parts: tuple[_Node, ...]


class _Choice(NamedTuple):
    options: tuple[_Node, ...]


class _Anchor(NamedTuple):
    is_start: bool


#: A set of characters is one character of it.
_Node = frozenset[str] | _Repeat | _Sequence | _Choice | _Anchor


class _Parser:
    """The parts of an expression; `ConfigError` names what can't be read."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._ignores_case = text, 0, False

    def fail(self, reason: str) -> ConfigError:
        return ConfigError(f"regular expression {self._text[:200]!r}: {reason} (the syntax is RE2's)")

    def parse(self) -> _Node:
        if len(self._text) > _MAX_LENGTH:
            raise self.fail(f"it has {len(self._text)} characters, the limit is {_MAX_LENGTH}")
        node = self._choice(0)
        if self._at < len(self._text):
            raise self.fail("unexpected )")
        return node

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _accept(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _choice(self, depth: int) -> _Node:
        if depth > _MAX_DEPTH:
            raise self.fail(f"more than {_MAX_DEPTH} parentheses in each other")
        before = self._ignores_case
        options = [self._sequence(depth)]
        while self._accept("|"):
            options.append(self._sequence(depth))
        self._ignores_case = before
        return options[0] if len(options) == 1 else _Choice(tuple(options))

    def _sequence(self, depth: int) -> _Node:
        parts: list[_Node] = []
        while self._peek() not in ("", "|", ")"):
            parts += self._repeated(depth)
        return _Sequence(tuple(parts))

    def _repeated(self, depth: int) -> list[_Node]:
        nodes = self._atoms(depth)
        counts = self._counts()
        if counts is None:
            return nodes
        if not nodes:
            raise self.fail("nothing to repeat")
        self._accept("?")  # the shortest match: of no matter, as the whole name must match
        if self._counts() is not None:
            raise self.fail("repeated repetition")
        return [*nodes[:-1], _Repeat(nodes[-1], *counts)]

    def _counts(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._accept(sign):
                return counts
        match = _COUNTS.match(self._text, self._at)
        if match is None:
            return None
        self._at = match.end()
        least = int(match[1])
        most = int(match[3]) if match[3] else None if match[2] else least
        if max(least, most or 0) > _MAX_COUNT or (most is not None and most < least):
            raise self.fail(f"bad repetition {match[0]}")
        return least, most

    def _atoms(self, depth: int) -> list[_Node]:
        character = self._text[self._at]
        self._at += 1
        if character == "(":
            return self._group(depth)
        if character == "[":
            return [self._set()]
        if character == ".":
            return [_ALPHABET - {"\n"}]
        if character in "^$":
            return [_Anchor(character == "^")]
        if character == "\\":
            return self._escape()
        if character in "*+?":
            raise self.fail(f"nothing to repeat before {character}")
        return [self._literal(character)]

    def _literal(self, character: str) -> frozenset[str]:
        return frozenset((character.lower(), character.upper())) if self._ignores_case else frozenset(character)

    def _group(self, depth: int) -> list[_Node]:
        before = self._ignores_case
        if self._peek() == "?":
            match = _GROUP.match(self._text, self._at)
            if match is None:
                raise self.fail("only (?:...), (?P<name>...) and the flags i and s can follow (?")
            if {"m", "U"} & set(match[1] or ""):
                raise self.fail("of the flags only i and s are supported")
            self._at = match.end()
            if match[1] and "i" in match[1]:
                self._ignores_case = True
            if match[2] and "i" in match[2]:
                self._ignores_case = False
            if match[3] == ")":  # to the end of the group around it
                return []
        node = self._choice(depth + 1)
        self._ignores_case = before
        if not self._accept(")"):
            raise self.fail("missing )")
        return [node]

    def _escape(self) -> list[_Node]:
        character = self._peek()
        if self._accept("Q"):
            end = self._text.find("\\E", self._at)
            quoted = self._text[self._at : None if end < 0 else end]
            self._at = len(self._text) if end < 0 else end + 2
            return [self._literal(each) for each in quoted]
        if character in ("A", "z"):
            self._at += 1
            return [_Anchor(character == "A")]
        return [self._escaped()]

    def _escaped(self) -> frozenset[str]:
        """The characters that an escape stands for, after its backslash."""
        character = self._peek()
        if character.lower() in _CLASSES and character:
            self._at += 1
            known = _CLASSES[character.lower()]
            return known if character in _CLASSES else _ALPHABET - known
        if match := _HEX.match(self._text, self._at):
            self._at = match.end()
            code = int(match[1] or match[2], 16)
            return self._literal(chr(code)) if code < 128 else _NOTHING
        if not character or character.isalnum() or not character.isascii():
            raise self.fail(f"\\{character} is not supported")
        self._at += 1
        return self._literal(character)

    def _set(self) -> frozenset[str]:
        is_negated = self._accept("^")
        members: set[str] = set()
        is_first = True
        while is_first or self._peek() != "]":
            is_first = False
            if not self._peek():
                raise self.fail("missing ]")
            begin = self._set_entry(members)
            if begin is not None and self._text[self._at + 1 : self._at + 2] not in ("", "]") and self._accept("-"):
                end = self._set_entry(members)
                if end is None or end < begin:
                    raise self.fail("bad range in [...]")
                members.update(each for each in _ALPHABET if begin <= each <= end)
        self._at += 1
        if self._ignores_case:
            members |= {each.swapcase() for each in members}
        return _ALPHABET - members if is_negated else frozenset(members)

    def _set_entry(self, members: set[str]) -> str | None:
        """Add an entry of [...]; return it if it is a character, which a range may begin or end with."""
        if match := re.compile(r"\[:(\^?)(\w+):\]").match(self._text, self._at):
            if match[2] not in _POSIX:
                raise self.fail(f"unknown class {match[0]}")
            self._at = match.end()
            members |= _ALPHABET - _POSIX[match[2]] if match[1] else _POSIX[match[2]]
            return None
        if self._accept("\\"):
            is_class = self._peek().lower() in _CLASSES
            escaped = self._escaped()
            members |= escaped
            return None if is_class or len(escaped) != 1 else next(iter(escaped))
        character = self._text[self._at]
        self._at += 1
        members.add(character)
        return character


class TopicPattern:
    """A regular expression that matches whole topic names; `ConfigError` if it is none, or too large."""

    def __init__(self, text: str) -> None:
        self.text = text
        #: Of each state: the characters that it takes (None: none, it only leads on), and the states after it.
        self._takes: list[frozenset[str] | _Anchor | None] = []
        self._nexts: list[list[int]] = []
        self._final = -1
        self._parts = 0
        parser = _Parser(text)
        node = parser.parse()
        self._fail = parser.fail
        self._final = self._state(None)
        start = self._add(node, self._final)
        self._closed = begins = ends = both = self._closures()
        if any(isinstance(taken, _Anchor) for taken in self._takes):
            begins, ends = self._closures(is_start=True), self._closures(is_end=True)
            both = self._closures(is_start=True, is_end=True)
        final = 1 << self._final
        self._start = begins[start]
        self._matches_empty = bool(both[start] & final)
        #: The states in which a name may end.
        self._ends = sum(1 << state for state, closed in enumerate(ends) if closed & final)
        #: One character for all that the expression does not tell apart.
        self._alike = _alike({taken for taken in self._takes if isinstance(taken, frozenset)})
        #: The states that take a character.
        self._takers: dict[str, int] = {}
        self._steps: dict[tuple[int, str], int] = {}

    def matches(self, name: str) -> bool:
        """Whether the whole name matches."""
        *_, matches = self.steps(name)
        return bool(matches)

    def steps(self, name: str) -> Iterator[bool | None]:
        """Match a name with a pause (None) after each step that takes time; the last value says whether it matches."""
        states = self._start
        for character in name:
            step = states, self._alike.get(character, self._alike[_OTHER])
            following = self._steps.get(step)
            if following is None:
                if len(self._steps) >= _MAX_STEPS:
                    self._steps.clear()
                following = self._steps[step] = self._after(*step)
                yield None
            if not following:
                yield False
                return
            states = following
        yield bool(states & self._ends) if name else self._matches_empty

    def _after(self, states: int, character: str) -> int:
        """The states that these lead to with a character."""
        takers = self._takers.get(character)
        if takers is None:
            those = (isinstance(taken, frozenset) and character in taken for taken in self._takes)
            takers = self._takers[character] = sum(1 << state for state, takes in enumerate(those) if takes)
        left, following = states & takers, 0
        while left:
            state = left.bit_length() - 1
            left ^= 1 << state
            for after in self._nexts[state]:
                following |= self._closed[after]
        return following

    def _closures(self, *, is_start: bool = False, is_end: bool = False) -> list[int]:
        """For each state: itself, and those that it leads on to without a character."""
        closed = [1 << state for state in range(len(self._takes))]
        is_changed = True
        while is_changed:
            is_changed = False
            for state, taken in enumerate(self._takes):  # most lead to earlier ones, so that few rounds do
                if taken is None or (isinstance(taken, _Anchor) and (is_start if taken.is_start else is_end)):
                    before = closed[state]
                    for after in self._nexts[state]:
                        closed[state] |= closed[after]
                    is_changed |= closed[state] != before
        return closed

    def _state(self, taken: frozenset[str] | _Anchor | None, *nexts: int) -> int:
        if len(self._takes) >= _MAX_NODES:
            raise self._fail("it is too large")
        self._takes.append(taken)
        self._nexts.append(list(nexts))
        return len(self._takes) - 1

    def _add(self, node: _Node, after: int) -> int:
        """Add the states of a part that lead to the state `after`; return the first."""
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise self._fail("it is too large")
        if isinstance(node, frozenset | _Anchor):
            return self._state(node, after)
        if isinstance(node, _Sequence):
            for part in reversed(node.parts):
                after = self._add(part, after)
            return after
        if isinstance(node, _Choice):
            return self._state(None, *[self._add(option, after) for option in node.options])
        first = after
        if node.most is None:
            first = self._state(None, after)
            self._nexts[first].append(self._add(node.node, first))
        else:
            for _ in range(node.most - node.least):
                first = self._state(None, after, self._add(node.node, first))
        for _ in range(node.least):
            behind, first = first, self._add(node.node, first)
            if first == behind:  # nothing, however often
                break
        return first


async def matches_in_turns(pattern: TopicPattern, name: str, turns: Turns) -> bool:
    """As `TopicPattern.matches`, in steps between which others run."""
    matches: bool | None = None
    for matches in pattern.steps(name):  # noqa: B007 (the last value is used)
        await turns.take()
    return bool(matches)


def _alike(sets: set[frozenset[str]]) -> dict[str, str]:
    """For each character the first that is in the same ones of these sets."""
    first: dict[tuple[bool, ...], str] = {}
    ordered = list(sets)
    return {
        character: first.setdefault(tuple(character in each for each in ordered), character)
        for character in sorted(_ALPHABET)
    }
