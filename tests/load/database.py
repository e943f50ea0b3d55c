"""A table of PostgreSQL with columns of all types, changed at random, and what a table that follows it has to have."""

from __future__ import annotations

import json
import random
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal

import pyarrow as pa

from tests.support.servers.postgres import Postgres

#: How the connector writes times and decimals: as numbers and bytes, its default, or as texts.
Style = Literal["numbers", "texts"]
STYLES: Mapping[Style, Mapping[str, str]] = {
    "numbers": {},
    "texts": {
        "time.precision.mode": "isostring",
        "decimal.handling.mode": "string",
        "interval.handling.mode": "string",
    },
}
KEY = ("tenant", "id")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_US = timedelta(microseconds=1)
_LARGE = 3000
#: One of so many values is null.
_NULLS = 8


@dataclass(frozen=True)
class Form:
    """How a column is compared: its `kind` in a schema of JSON, and how the value that `sql` has of the database, and
    the value that is seen in the table, come to be one.
    """

    kind: str = "string"
    sql: str = "{}"
    told: Callable[[Any], Any] = lambda value: value
    seen: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Column:
    """A column of the database; `draw` returns a literal of SQL. Of a large one some values are not in the row."""

    name: str
    kind: str
    draw: Callable[[random.Random], str]
    numbers: Form = Form()
    texts: Form | None = None
    is_large: bool = False

    def form(self, style: Style) -> Form:
        return self.texts if style == "texts" and self.texts is not None else self.numbers


def _quoted(text: object) -> str:
    return "'" + str(text).replace("'", "''") + "'"


def _word(chance: random.Random, length: int = 8) -> str:
    return "".join(chance.choices("abcxyz äß€😀'\"\\{}\n", k=chance.randint(0, length)))


def _letters(chance: random.Random) -> str:
    """Few or many, of which the database can compress nothing."""
    return "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=_LARGE if chance.random() < 0.5 else 5))


def _moment(chance: random.Random) -> datetime:
    return _EPOCH + chance.randint(-3_000_000_000_000_000, 3_000_000_000_000_000) * _US


def _micros(value: Any) -> int | None:
    """Of a timestamp, or of the text of a time or of one."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, str):
        date, hour, minute, second, fraction = re.fullmatch(
            r"(?:(.*)T)?(\d\d):(\d\d)(?::(\d\d))?(?:\.(\d+))?Z", value
        ).groups()  # type: ignore[union-attr]
        day = datetime.fromisoformat(date).replace(tzinfo=timezone.utc) if date else _EPOCH
        seconds = int(hour) * 3600 + int(minute) * 60 + int(second or 0)
        return (day - _EPOCH) // _US + seconds * 1_000_000 + int((fraction or "0").ljust(6, "0")[:6])
    return (value - _EPOCH) // _US


def _span_micros(value: Any) -> int | None:
    if value is None or isinstance(value, int):
        return value
    number = r"(-?[\d.]+)"
    [parts] = re.findall(f"^P0Y0M{number}DT{number}H{number}M{number}S$", value)
    days, hours, minutes, seconds = map(Decimal, parts)
    return int((((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1_000_000)


def _bytes(value: Any) -> bytes | None:
    return b64decode(value) if isinstance(value, str) else value


def _hex(value: Any) -> str | None:
    found = _bytes(value)
    return None if found is None else found.hex()


def _decimal(value: Any) -> Decimal | None:
    return None if value is None else Decimal(value)


def _unscaled(scale: int) -> Callable[[Any], Decimal | None]:
    """Of a decimal, or of its digits as bytes, which are base64 in JSON."""

    def decimal(value: Any) -> Decimal | None:
        if isinstance(value, (str, bytes)):
            return Decimal(int.from_bytes(_bytes(value) or b"", "big", signed=True)).scaleb(-scale)
        return _decimal(value)

    return decimal


def _bits(value: Any) -> int | None:
    found = _bytes(value)
    return None if found is None else int.from_bytes(found, "little")


def _each(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda values: None if values is None else [function(value) for value in values]


def _list(values: Iterable[object]) -> str:
    return "'{" + ",".join(map(str, values)) + "}'"


_US_OF = "(extract(epoch FROM {}) * 1000000)::bigint"
COLUMNS = (
    Column("small", "smallint", lambda chance: str(chance.randint(-32768, 32767)), Form("int")),
    Column("number", "integer", lambda chance: str(chance.randint(-(2**31), 2**31 - 1)), Form("int")),
    Column("large", "bigint", lambda chance: str(chance.randint(-(2**63), 2**63 - 1)), Form("bigint")),
    Column("ratio", "real", lambda chance: f"'{chance.uniform(-9, 9):.5f}'", Form("float", "{}::float8")),
    Column("share", "double precision", lambda chance: f"'{chance.uniform(-9, 9)}'", Form("double")),
    Column("is_on", "boolean", lambda chance: chance.choice(["true", "false"]), Form("boolean")),
    Column("code", "char(5)", lambda chance: _quoted(_word(chance, 5))),
    Column("name", "varchar(40)", lambda chance: _quoted(_word(chance))),
    Column("note", "text", lambda chance: _quoted(_letters(chance)), is_large=True),
    Column(
        "data",
        "bytea",
        lambda chance: f"'\\x{_letters(chance).encode().hex()}'",
        Form("string", "encode({}, 'hex')", seen=_hex),
        is_large=True,
    ),
    Column(
        "price",
        "numeric(12,2)",
        lambda chance: f"{chance.uniform(-1e9, 1e9):.2f}",
        Form("string", "{}::text", _decimal, _unscaled(2)),
        Form("decimal(12,2)", "{}::text", _decimal, _decimal),
    ),
    Column(
        "any",
        "numeric",
        lambda chance: f"{chance.uniform(-1e9, 1e9):.{chance.randint(0, 9)}f}",
        Form(
            "struct<scale: int, value: string>",
            "{}::text",
            _decimal,
            lambda value: None if value is None else _unscaled(value["scale"])(value["value"]),
        ),
        Form("string", "{}::text", _decimal, _decimal),
    ),
    Column(
        "cost",
        "money",
        lambda chance: f"'{chance.uniform(-1e6, 1e6):.2f}'",
        Form("string", "{}::numeric::text", _decimal, _unscaled(2)),
        Form("string", "{}::numeric::text", _decimal, _decimal),
    ),
    Column(
        "day",
        "date",
        lambda chance: f"'{_moment(chance).date()}'",
        Form("int", "{} - DATE '1970-01-01'", seen=lambda value: value),
        Form("date", seen=lambda value: value and str(value).rstrip("Z")),
    ),
    Column(
        "at",
        "time",
        lambda chance: f"'{_moment(chance).time()}'",
        Form("bigint", _US_OF),
        Form("string", _US_OF, seen=_micros),
    ),
    Column(
        "at_zone",
        "timetz",
        lambda chance: f"'{_moment(chance).time()}+0{chance.randint(0, 9)}'",
        Form("string", _US_OF.format("({} AT TIME ZONE 'UTC')::time"), seen=_micros),
    ),
    Column(
        "moment",
        "timestamp",
        lambda chance: f"'{_moment(chance).replace(tzinfo=None)}'",
        Form("bigint", _US_OF),
        Form("timestamp", _US_OF, seen=_micros),
    ),
    Column(
        "moment_zone",
        "timestamptz",
        lambda chance: f"'{_moment(chance)}'",
        Form("string", _US_OF, seen=_micros),
        Form("timestamp", _US_OF, seen=_micros),
    ),
    Column(
        "span",
        "interval",
        lambda chance: f"'{chance.randint(0, 99)} days {chance.randint(0, 86399)} seconds'",
        Form("bigint", _US_OF),
        Form("string", _US_OF, seen=_span_micros),
    ),
    Column("ident", "uuid", lambda chance: f"'{chance.randbytes(16).hex()}'"),
    Column("doc", "json", lambda chance: _quoted(json.dumps({"a": [1, _word(chance)]})), Form(sql="{}::text")),
    Column(
        "docb",
        "jsonb",
        lambda chance: _quoted(json.dumps({"b": _letters(chance), "a": 1.5})),
        Form(sql="{}::text"),
        is_large=True,
    ),
    Column("xml", "xml", lambda chance: f"'<a>{chance.randint(0, 9)}</a>'", Form(sql="{}::text")),
    Column("address", "inet", lambda chance: f"'10.0.0.{chance.randint(0, 255)}'"),
    Column("net", "cidr", lambda chance: f"'10.{chance.randint(0, 255)}.0.0/16'"),
    Column("mac", "macaddr", lambda chance: f"'08:00:2b:01:02:{chance.randint(10, 99)}'"),
    Column("bit", "bit(1)", lambda chance: f"B'{chance.randint(0, 1)}'", Form("boolean", "{} = B'1'")),
    Column(
        "bits",
        "bit(12)",
        lambda chance: f"B'{chance.randint(0, 4095):012b}'",
        Form("string", "{}::int", seen=_bits),
    ),
    Column("words", "text[]", lambda chance: _list(chance.choices(["a", "NULL", '"b c"'], k=2)), Form("array<string>")),
    Column(
        "counts",
        "int[]",
        lambda chance: _list(chance.choices(range(10**9), k=_LARGE // 4 if chance.random() < 0.5 else 3)),
        Form("array<int>"),
        is_large=True,
    ),
    Column(
        "sums",
        "numeric(8,2)[]",
        lambda chance: _list(f"{chance.uniform(-9, 9):.2f}" for _ in range(2)),
        Form("array<string>", "{}::text[]", _each(_decimal), _each(_unscaled(2))),
        Form("array<decimal(8,2)>", "{}::text[]", _each(_decimal), _each(_decimal)),
    ),
    Column("mood", "mood", lambda chance: chance.choice(["'sad'", "'fine'"])),
    Column(
        "spot",
        "point",
        lambda chance: f"'({chance.randint(-9, 9)}.5,{chance.randint(-9, 9)})'",
        Form(
            "struct<x: double, y: double>",
            "CASE WHEN {0} IS NULL THEN NULL ELSE ARRAY[{0}[0], {0}[1]] END",
            seen=lambda value: value and [value["x"], value["y"]],
        ),
    ),
    Column("terms", "tsvector", lambda chance: _quoted(chance.choice(["a", "b c"]))),
    Column("range", "int4range", lambda chance: f"'[{chance.randint(0, 9)},20)'"),
    Column(
        "extra",
        "hstore",
        lambda chance: _quoted(f'a=>"{_letters(chance)}"'),
        Form(
            sql="{}::json::text",
            told=lambda text: text and json.loads(text),
            seen=lambda text: text and json.loads(text),
        ),
        is_large=True,
    ),
    Column("any_case", "citext", lambda chance: _quoted(chance.choice(["Aa", "b"]))),
    Column("path", "ltree", lambda chance: chance.choice(["'top'", "'top.of'"])),
)


#: Of columns that come later, by type.
_ADDED: Mapping[str, tuple[Callable[[random.Random], str], Form]] = {
    "text": (lambda chance: _quoted(_word(chance)), Form()),
    "int[]": (lambda chance: _list(chance.choices(range(99), k=3)), Form("array<int>")),
    "bigint": (lambda chance: str(chance.randint(-(2**63), 2**63 - 1)), Form("bigint")),
}


@dataclass
class Table:
    """A table `shop.NAME` with the key `tenant`, `id`."""

    database: Postgres
    name: str
    seed: int = 1
    columns: list[Column] = field(default_factory=lambda: list(COLUMNS))
    #: Whether changes have the row before them, and with it large values that they do not change.
    has_old_rows: bool = True

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self._keys: set[tuple[int, int]] = set()
        self._dropped: list[Column] = []
        kinds = ", ".join(f"{_name(each.name)} {each.kind}" for each in self.columns)
        self.database.sql(
            "CREATE SCHEMA IF NOT EXISTS shop",
            *(f"CREATE EXTENSION IF NOT EXISTS {name}" for name in ("hstore", "citext", "ltree")),
            "DO $$ BEGIN CREATE TYPE mood AS ENUM ('sad', 'fine'); EXCEPTION WHEN duplicate_object THEN END $$",
            f"CREATE TABLE {self.full_name} (tenant int, id bigint, {kinds}, PRIMARY KEY (tenant, id))",
            *(
                f"ALTER TABLE {self.full_name} ALTER {each.name} SET STORAGE EXTERNAL"
                for each in self.columns
                if each.is_large
            ),
            f"ALTER TABLE {self.full_name} REPLICA IDENTITY {'FULL' if self.has_old_rows else 'DEFAULT'}",
        )

    @property
    def full_name(self) -> str:
        return f"shop.{self.name}"

    def schema(self, style: Style) -> str:
        """The row as a schema of JSON: a load keeps columns that the database has no more."""
        columns = [*self.columns, *self._dropped]
        kinds = ", ".join(f"`{each.name}` {each.form(style).kind}" for each in columns)
        return f"tenant int, id bigint, {kinds}"

    def rows(self, style: Style) -> list[dict[str, Any]]:
        """What the database has, by the key."""
        forms = {each.name: each.form(style) for each in self.columns}
        parts = ", ".join(f"{form.sql.format(_name(name))} AS {_name(name)}" for name, form in forms.items())
        query = f"SELECT row_to_json(s) FROM (SELECT tenant, id, {parts} FROM {self.full_name} ORDER BY tenant, id) s"
        rows = [json.loads(line) for line in self.database.sql(query).splitlines()]
        return [
            {name: forms[name].told(value) if name in forms else value for name, value in row.items()} for row in rows
        ]

    def seen(self, table: pa.Table, style: Style) -> list[dict[str, Any]]:
        """The rows of a table that follows this one, in the same form: those of the columns that this one has."""
        if not len(table):  # there may be no file to tell the columns
            return []
        forms = {each.name: each.form(style) for each in self.columns}
        rows = sorted(table.select([*KEY, *forms]).to_pylist(), key=lambda row: (row["tenant"], row["id"]))
        return [
            {name: forms[name].seen(value) if name in forms else value for name, value in row.items()} for row in rows
        ]

    def columns_have_changed(self, commands: str) -> None:
        """Keep up with what ALTER TABLE has done: ADD, DROP, RENAME, or another TYPE."""
        named = {each.name: each for each in self.columns}
        for command in commands.split(", "):
            match command.split():
                case ["ADD", name, kind, *_]:
                    named[name] = Column(name, kind, *_ADDED[kind])
                case ["DROP", name]:
                    self._dropped.append(named.pop(name))
                case ["RENAME", name, "TO", new]:
                    self._dropped.append(named.pop(name))
                    named[new] = replace(self._dropped[-1], name=new)
                case ["ALTER", name, "TYPE", kind]:
                    named[name] = Column(name, kind, *_ADDED[kind])
        self.columns = list(named.values())

    def insert(self, count: int) -> None:
        """New rows, in one transaction."""
        self._run([self._insert() for _ in range(count)])

    def change(self, count: int, truncates: bool = False) -> None:
        """Random changes, in transactions of some; one of them is rolled back."""
        while count > 0:
            size = min(count, self.chance.randint(1, 8))
            count -= size
            kept = set(self._keys)
            statements = [self._statement(truncates) for _ in range(size)]
            if self.chance.random() < 0.1:
                self._keys = kept
                self._run(statements, "ROLLBACK")
            else:
                self._run(statements)

    def _run(self, statements: list[str], end: str = "COMMIT") -> None:
        self.database.sql("BEGIN", *statements, end)

    def _value(self, column: Column) -> str:
        return f"{column.draw(self.chance)}::{column.kind}" if self.chance.randrange(_NULLS) else "NULL"

    def _large_values(self) -> str:
        """Of a row that gets another key: the log would not have them, and no row has them under that key."""
        if self.has_old_rows:
            return ""
        return "".join(f", {_name(each.name)} = {self._value(each)}" for each in self.columns if each.is_large)

    def _insert(self, key: tuple[int, int] | None = None) -> str:
        key = key or self._new_key()
        self._keys.add(key)
        names = ", ".join(_name(each.name) for each in self.columns)
        values = ", ".join(map(self._value, self.columns))
        return f"INSERT INTO {self.full_name} (tenant, id, {names}) VALUES ({key[0]}, {key[1]}, {values})"

    def _new_key(self) -> tuple[int, int]:
        while (key := (self.chance.randint(1, 3), self.chance.randint(1, 10**6))) in self._keys:
            pass
        return key

    def _statement(self, truncates: bool) -> str:
        drawn = self.chance.random()
        if not self._keys or drawn < 0.3:
            return self._insert()
        if truncates and drawn > 0.97:
            self._keys.clear()
            return f"TRUNCATE {self.full_name}"
        key = self.chance.choice(sorted(self._keys))
        where = f"WHERE (tenant, id) = ({key[0]}, {key[1]})"
        if drawn < 0.4:
            self._keys.remove(key)
            return f"DELETE FROM {self.full_name} {where}"
        if drawn < 0.5:
            other = self._new_key()
            self._keys = self._keys - {key} | {other}
            return f"UPDATE {self.full_name} SET tenant = {other[0]}, id = {other[1]}{self._large_values()} {where}"
        if drawn < 0.55:
            return f"DELETE FROM {self.full_name} {where}; {self._insert(key)}"
        # most updates change no large column, so that the log has none of its values
        changed = [each for each in self.columns if not each.is_large or drawn > 0.9]
        changed = self.chance.sample(changed, self.chance.randint(1, min(5, len(changed))))
        settings = ", ".join(f"{_name(each.name)} = {self._value(each)}" for each in changed)
        return f"UPDATE {self.full_name} SET {settings} {where}"


def _converted(row: Mapping[str, Any], functions: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    return {name: functions[name](value) if name in functions else value for name, value in row.items()}


def _name(name: str) -> str:
    """Some are words of SQL."""
    return f'"{name}"'
