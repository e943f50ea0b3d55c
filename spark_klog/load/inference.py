"""The schema that a load infers of its JSON values: of a sample first, then of all that its tasks find.

The plan of a run has the schema by which its tasks write, so that a run that was killed goes on with it:

    schema    what the run's files have: the fields of `known`, with their types, and those that are new
    known     the schema of the run before, whose types stay; "" before the first one

A task that finds what the schema has no place for, and may get one, writes no more. It looks through the rest of its
ranges, and leaves what it has seen in the journal (`seen-TASK.json`). The run then begins anew by a schema with room
for all of that. A value for which none may be made is a bad value.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa

from spark_klog.base.durable import check_version
from spark_klog.errors import LoadError, SchemaError
from spark_klog.load.journal import paths
from spark_klog.load.journal.model import VERSION
from spark_klog.load.journal.store import Store, read_json, to_json
from spark_klog.load.settings import VALUES, WriteSettings
from spark_klog.load.table_columns import BESIDE_VALUES
from spark_klog.schemas.json_schema.columns import DDL
from spark_klog.schemas.json_schema.ddl import parse_schema, schema_text
from spark_klog.schemas.json_schema.decoder import JsonDecoder
from spark_klog.schemas.json_schema.from_arrow import column_of
from spark_klog.schemas.json_schema.inference import MOST_NAMES, Seen, grown_schema, rounded, unplaced
from spark_klog.schemas.json_schema.row_values import load_json
from spark_klog.schemas.rows import BadRow, Decoded
from spark_klog.tables.change_order import DELETED, LACKING, ORDER, OWN, PLACE
from spark_klog.tables.changes import debezium_type, envelope_order

#: Where Debezium's envelope has rows, and what may stand around it.
_ROWS, _WRAPPER = ("before", "after"), "payload"


def inferred_schema(settings: WriteSettings, seen: Seen) -> str:
    """The schema of a run by `settings` whose values were seen; `LoadError` if they have too many fields, or none."""
    known = parse_schema(settings.known) if settings.known else None
    is_enveloped = settings.envelope == "debezium"
    before = None if known is None else known.field("after").type if is_enveloped else known
    try:
        kind = grown_schema(before, _of_rows(seen) if is_enveloped else seen, _reserved_names(settings))
    except SchemaError as error:
        raise LoadError(f"the schema of the values can't be inferred: {error}") from None
    if not kind.num_fields:
        if is_enveloped and _of_rows(seen).type == pa.string():
            raise LoadError("the envelope's rows are text, and no JSON objects of Debezium's connector for MongoDB")
        raise LoadError(
            "the schema of the values can't be inferred: none of them is a JSON object with a field that is not null "
            "or empty. Load them later, when there are others, or give their schema as DDL"
        )
    if is_enveloped:
        order = _order_of(settings, seen) if known is None else envelope_order(known)
        return schema_text(debezium_type(kind, order))
    return schema_text(kind)


def _of_rows(seen: Seen) -> Seen:
    """What the rows in Debezium's envelopes are, with or without the wrapper of Kafka Connect's schemas."""
    rows = Seen()
    for envelope in filter(None, (seen, seen.fields.get(_WRAPPER))):
        for name in _ROWS:
            if (row := envelope.fields.get(name)) is not None:
                rows.merge(row)
    return rows


def _order_of(settings: WriteSettings, seen: Seen) -> dict[str, pa.DataType]:
    """The fields of the envelope by which changes are ordered, with their types; bigint of one that is not seen."""
    order = {}
    for path in filter(None, settings.order_by.split(",")):
        kinds = []
        for envelope in (seen, seen.fields.get(_WRAPPER)):
            at = envelope
            for name in path.split("."):
                at = None if at is None else at.fields.get(name)
            kinds.append(None if at is None else at.type)
        order[path] = next(filter(None, kinds), pa.int64())
    return order


def _reserved_names(settings: WriteSettings) -> set[str]:
    """The names of the columns of a table that stand beside the fields of values."""
    if settings.upsert_key:
        return {*PLACE.names, ORDER, DELETED, LACKING}
    if settings.table_columns != VALUES:
        return set()
    of_partitions = {"date", "hour"} if settings.layout in ("day", "hour") else set()
    return {f"{OWN}{name}" for name in BESIDE_VALUES} | of_partitions


class GrownError(Exception):
    """The run's schema has no place for what a task has read, and the next one may have."""


class InferringDecoder:
    """Decodes the values of a task by the run's schema, and keeps what it has no place for in `seen`.

    It begins with what all tasks of the run have `seen`. So an object that has got too many names for a struct, over
    several tasks or batches, gets no more fields in the next attempt: its other names are of bad values.
    """

    def __init__(self, settings: WriteSettings, seen: Seen) -> None:
        self._settings, self.seen = settings, seen
        self._use(settings.schema)
        self.has_grown = False

    def _use(self, schema: str) -> None:
        self._schema, self.type = schema, parse_schema(schema)
        around = _ROWS if self._settings.envelope == "debezium" else ()
        whole = partial(self.seen.with_silent, around=around)
        self._decoder = JsonDecoder(column_of(self.type, DDL), whole=whole)

    def decode(self, values: pa.Array) -> Decoded:
        """The rows; `GrownError` if the schema has grown, now or before: then they are of no use.

        `LoadError` as of `inferred_schema`.
        """
        strange: list[int] = []
        decoded = self._decoder.decode(values, [None], strange=strange)
        if strange:
            rows = [(row, values[row].as_py()) for row in strange]
            for _, value in rows:
                if value is not None:
                    self.seen.add_row(value)
            schema = inferred_schema(self._settings, self.seen)
            self.has_grown |= schema != self._schema
            self._use(schema)
            if not self.has_grown:
                decoded = self._without_unplaced(decoded, rows)
        if self.has_grown:
            raise GrownError
        return decoded

    def _without_unplaced(self, decoded: Decoded, rows: list[tuple[int, bytes | None]]) -> Decoded:
        """The rows, of which those are bad, too, that have a field without a place, or an integer that a column of
        doubles rounds, as it would be lost."""
        bad = dict(decoded.bad)
        for row, text in rows:
            if text is None or row in bad:
                continue
            value = load_json(text)
            if path := self._unplaced(value):
                bad[row] = (
                    f"field {path} gets no column: its name is empty, that of another column or of another field in "
                    f"other case, or there are more than {MOST_NAMES:,} fields"
                )
            elif path := rounded(value, self.type).lstrip("."):
                bad[row] = f"field {path} is an integer that its column rounds, whose values were fractions before"
        return Decoded(decoded.values, [BadRow(row, bad[row]) for row in sorted(bad)])

    def _unplaced(self, value: Any) -> str:
        if self._settings.envelope != "debezium":
            return unplaced(value, self.type)
        paths = []
        for envelope in (value, value.get(_WRAPPER) if isinstance(value, dict) else None):
            if isinstance(envelope, dict):
                paths += [unplaced(envelope.get(name), self.type.field("after").type) for name in _ROWS]
        return next(filter(None, paths), "")


def keep_seen(store: Store, run: int, task: int, seen: Seen) -> None:
    """Leave what a task has seen in the journal."""
    store.write(paths.seen(run, task), to_json({"version": VERSION, "seen": seen.to_json()}))


def seen_so_far(store: Store, run: int, settings: WriteSettings) -> Seen:
    """What the tasks of a run have seen, beside what its schema has; `LoadError` for a file that no run has written."""
    seen = Seen.of_type(parse_schema(settings.schema))
    for path in paths.all_seen(run, store.names(paths.in_run(run, ""))):
        value = read_json(store, path)
        if value is not None:
            check_version(value.get("version"), VERSION, f"{store.address}/{path}", "remove it", LoadError)
        try:
            assert value is not None
            seen.merge(Seen.of_json(value["seen"]))
        except (AssertionError, KeyError, TypeError, ValueError, AttributeError):
            raise LoadError(f"{store.address}/{path} is not what a run has written: remove it") from None
    return seen
