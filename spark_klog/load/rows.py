"""Keys and values that are rows of a schema: which schema a run has, and how files of several schemas stay one table.

A run has one schema for a column of a topic, which its plan keeps: a run that is finished by a later call writes by
that one. The next run keeps it, or takes the subject's latest version if asked (`Evolution`); so does a run that was
refused as its schema could not read its records, which then begins anew. The files of a column
then have the fields of all schemas up to theirs, so those of later runs have those of earlier ones: nobody who reads
the folder finds a field missing in the newest file, or with another type. All fields are nullable.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal
from uuid import UUID

import pyarrow as pa

from spark_klog.base.names import Format
from spark_klog.errors import LoadError, SchemaError
from spark_klog.tables.columns import holds
from spark_klog.tables.table import aliases_of, with_aliases

if TYPE_CHECKING:
    from spark_klog.schemas.avro.schema import AvroSchema
    from spark_klog.schemas.column_format import Column, ColumnFormat, ReaderSchema

_log = logging.getLogger(__name__)
#: Which schema a new run takes: that of the run before it, or the one that is asked for.
Evolution = Literal["keep", "latest"]
#: What the job's users may use in place of a load that they can't go on with.
ANOTHER = "another --output or --table"
#: Metadata of the members of a union, as a JSON array: the name of the branch that each is, and its aliases.
_BRANCH = b"klog.branch"
#: Types whose values a later version of a branch may promote.
_PROMOTED = {"int": "long", "float": "double"}
_REMEDY = f"--schema-evolution latest takes it from this run on; or use {ANOTHER}"


@dataclass(frozen=True)
class RowSchema:
    """The schema of a topic's column in a run. `id`, `version` and `subject` are the registry's, None of a text.

    `has_ids`: the records name their own schemas, to be had of a registry; else all are bare records of this one.
    `message` is which of a Protobuf schema's messages they are, by its full name, None: the first.
    `file_type` is the type that the column has in files: the Arrow IPC message of a schema with it, in base64.
    """

    topic: str
    column: Column
    format: Format
    text: str
    has_ids: bool
    file_type: str
    references: Mapping[str, str] = dataclasses.field(default_factory=dict)
    id: int | None = None
    subject: str | None = None
    version: int | None = None
    message: str | None = None

    @property
    def type(self) -> pa.DataType:
        """The column's type in files; ValueError if `file_type` is damaged."""
        message = pa.py_buffer(b64decode(self.file_type, validate=True))
        return pa.ipc.read_schema(message).field(0).type

    def reader(self, source: ColumnFormat, evolution: Evolution) -> ReaderSchema:
        """What decodes the column, with the registry of a call's format, which is asked whose the schema's id is now.

        A registry that was made anew has other schemas by the ids of before: then the records' own schemas are all
        looked up there. Errors as of its client. Decoding raises `SchemaChanged` at a record of a newer version of the
        subject that this schema can't read, and at each one of a newer version if the evolution is to take the latest.
        """
        from spark_klog.schemas.column_format import ReaderSchema

        own = replace(
            source,
            text=None,
            schema_id=self.id if self.subject is None else None,
            subject=self.subject or source.subject,
            ends_at_unreadable=True,
            evolution="restart" if evolution == "latest" and self.subject is not None else "keep",
            message=self.message,
        )
        if self.id is None or self._has_id(source):
            return ReaderSchema(own, self.text, dict(self.references), self.id, self.version)
        _log.warning(
            "the schema registry has another schema by id %d than the load's %s of topic %s: it was made anew, and the "
            "%ss are read by the schemas that it has now",
            *(self.id, self.column, self.topic, self.column),
        )
        return ReaderSchema(own, self.text, dict(self.references))

    def _has_id(self, source: ColumnFormat) -> bool:
        """Whether the registry has this schema by its id, or none, as after it was deleted."""
        assert source.registry is not None
        assert self.id is not None
        registry, subject = source.registry.registry(), self.subject or ""
        try:
            schema = registry.schema(self.id, subject, is_new=True)
            references = registry.references(schema, self.id, subject, is_new=True)
        except SchemaError:
            return True
        return (schema.format, schema.text, references) == (self.format, self.text, self.references)


def run_schemas(
    formats: Sequence[ColumnFormat],
    topics: Sequence[str],
    before: Sequence[RowSchema],
    evolution: Evolution,
    *,
    widens: bool = False,
    renames: bool = False,
) -> tuple[RowSchema, ...]:
    """The schemas of a new run, of columns by `formats`, in which a subject of None is that of each topic.

    `before` are those of the run before it, if there was one; those of other topics stay.

    Asks the registry unless the schemas are kept; errors as of its client. `LoadError` if the load has another schema
    than the one asked for, or if a field of the new one has another type than before; it `widens` if a table may take
    a larger number instead, and `renames` if the table can give a column the name that Avro's aliases say it has now.
    """
    known = {(row.topic, row.column): row for row in before}
    for topic in topics:
        for source in formats:
            if source.registry is not None and (source.text, source.schema_id, source.subject) == (None, None, None):
                source = replace(source, subject=f"{topic}-{source.column}")
            key = topic, source.column
            known[key] = _run_schema(source, topic, known.get(key), evolution, widens, renames)
    return tuple(known.values())


def _run_schema(
    source: ColumnFormat, topic: str, before: RowSchema | None, evolution: Evolution, widens: bool, renames: bool
) -> RowSchema:
    if before is not None:
        check_registry(source, before)
        if evolution == "keep":
            _check_kept(source, before)
            return before
        source = replace(source, message=source.message or before.message)
    schema = source.reader()
    kind = named_type(schema, renames=renames)
    kind = merged(kind if before is None else before.type, kind, source.column, widens=widens, renames=renames)
    assert not isinstance(schema.id, UUID)  # a load names schemas by ids
    assert source.format != "json"  # that of a load is in its settings
    return RowSchema(
        topic,
        source.column,
        source.format,
        schema.text,
        source.registry is not None,
        _encoded(kind),
        dict(schema.references),
        schema.id,
        None if source.text is not None or source.schema_id is not None else source.subject,
        schema.version,
        None if source.message is None else source.codec.name(source.codec.parse(schema.text, schema.references)),
    )


def check_registry(source: ColumnFormat, before: RowSchema) -> None:
    """`LoadError` if records are to have ids of schemas and those of the load have none, or the other way round."""
    if before.has_ids != (source.registry is not None):
        words = ("with", "without") if before.has_ids else ("without", "with")
        raise LoadError(
            f"the load has the {source.column}s {words[0]} --schema-registry, not {words[1]} it: use {ANOTHER}"
        )


def _check_kept(source: ColumnFormat, before: RowSchema) -> None:
    """`LoadError` if a call names another schema than that of the load."""
    column = source.column
    has = f"the load has the {column}s of topic {before.topic} by {_named(before)}"
    if source.text is not None:
        if source.text.strip() != before.text.strip():
            raise LoadError(f"{has}, and --{column}-schema is another one: {_REMEDY}")
    elif source.schema_id is not None:
        if source.schema_id != before.id:
            raise LoadError(f"{has}, not by id {source.schema_id}: {_REMEDY}")
    elif before.subject is not None and source.subject != before.subject:
        raise LoadError(f"{has}, not by subject {source.subject}: {_REMEDY}")
    if source.message is not None:
        codecs = source.codec, replace(source, message=before.message).codec
        asked, kept = (codec.name(codec.parse(before.text, before.references)) for codec in codecs)
        if asked != kept:
            raise LoadError(f"{has}, message {kept}, not {asked}: {_REMEDY}")


def _named(schema: RowSchema) -> str:
    if schema.subject is not None:
        return f"subject {schema.subject}, version {schema.version}"
    return "a schema of its own" if schema.id is None else f"schema id {schema.id}"


def _encoded(kind: pa.DataType) -> str:
    return b64encode(pa.schema([pa.field("column", kind)]).serialize().to_pybytes()).decode()


def merged(
    old: pa.DataType,
    new: pa.DataType,
    path: str,
    *,
    widens: bool = False,
    renames: bool = False,
    moves: bool = True,
) -> pa.DataType:
    """A type with the fields of both, those of `old` first, all nullable; `LoadError` names one that has two types.

    If it `widens`, one type may hold all values of the other, as of an int and a long, and is the one then. If it
    `renames`, a field of `new` that has an alias takes the place of the field of `old` that has that name. Aliases are
    those of `new`. The members of Avro's unions stay the same branches. Unless one `moves`, it is an error if one of
    `new` is another.
    """
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        fields = {field.name: field for field in old}
        if renames:
            names = _names_in(new, fields)
            fields = {names.get(name, name): field for name, field in fields.items()}
        members = _member_names(fields, new, path)
        if not moves and any(name != was for name, was in members.items()):
            raise LoadError(f"{path} is a union of other types, or in another order, in two topics: use {ANOTHER}")
        for field in new:
            name = members.get(field.name, field.name)
            was = fields.get(name, field).type
            kind = merged(was, field.type, f"{path}.{name}", widens=widens, renames=renames, moves=moves)
            fields[name] = pa.field(name, kind, metadata=field.metadata)
        # those that only the old one has, too
        return pa.struct(
            [
                pa.field(name, merged(field.type, field.type, f"{path}.{name}"), metadata=field.metadata)
                for name, field in fields.items()
            ]
        )
    if pa.types.is_map(old) and pa.types.is_map(new) and old.key_type == new.key_type:
        items = merged(old.item_type, new.item_type, f"{path}{{}}", widens=widens, renames=renames, moves=moves)
        return pa.map_(old.key_type, pa.field(old.item_field.name, items))
    if pa.types.is_list(old) and pa.types.is_list(new):
        element = merged(old.value_type, new.value_type, f"{path}[]", widens=widens, renames=renames, moves=moves)
        return pa.list_(pa.field(old.value_field.name, element))
    if widens and holds(new, old):
        return new
    if old != new and not (widens and holds(old, new)):
        raise LoadError(
            f"{path} is {new} by the new schema, and {old} in the load's files: use {ANOTHER}, or keep the "
            "schema (--schema-evolution keep)"
        )
    return old


def has_place(kind: pa.DataType, old: pa.DataType) -> bool:
    """Whether a type has all fields of an older one, by their names or aliases, with room for all values."""
    if pa.types.is_struct(kind) and pa.types.is_struct(old):
        fields = {name: field for field in kind for name in (*aliases_of(field), field.name)}
        return all(field.name in fields and has_place(fields[field.name].type, field.type) for field in old)
    if pa.types.is_map(kind) and pa.types.is_map(old):
        return bool(kind.key_type == old.key_type and has_place(kind.item_type, old.item_type))
    if pa.types.is_list(kind) and pa.types.is_list(old):
        return has_place(kind.value_type, old.value_type)
    return holds(kind, old)


def _names_in(new: pa.DataType, known: Collection[str]) -> dict[str, str]:
    """The names that fields have in `new`, of those `known` ones that it has under another name."""
    names: dict[str, str] = {}
    asked = {field.name for field in new}
    for field in new:
        if field.name not in known:
            was = next((name for name in aliases_of(field) if name in known and name not in asked | names.keys()), None)
            if was is not None:
                names[was] = field.name
    return names


def with_names_of(rows: Sequence[RowSchema], dropped: Sequence[RowSchema]) -> tuple[RowSchema, ...]:
    """The schemas of a run that begins anew, with the names as aliases that `dropped` ones had for their fields.

    Those have renamed columns, whose run has failed: they get back the names that they had.
    """
    types = {(row.topic, row.column): row.type for row in dropped}
    named = []
    for row in rows:
        kind = _named_back(row.type, types.get((row.topic, row.column), row.type))
        is_same = kind.equals(row.type, check_metadata=True)
        named.append(row if is_same else replace(row, file_type=_encoded(kind)))
    return tuple(named)


def _named_back(kind: pa.DataType, dropped: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind) and pa.types.is_struct(dropped):
        names, was = {field.name for field in kind}, {field.name: field for field in dropped}
        fields = []
        for field in kind:
            same = was.get(field.name)
            if same is None:
                renamed = [other for other in dropped if field.name in aliases_of(other) and other.name not in names]
                if renamed:
                    same = renamed[0]
                    field = with_aliases(field, [*aliases_of(field), same.name])
            fields.append(field if same is None else field.with_type(_named_back(field.type, same.type)))
        return pa.struct(fields)
    if pa.types.is_map(kind) and pa.types.is_map(dropped):
        return pa.map_(kind.key_field, kind.item_field.with_type(_named_back(kind.item_type, dropped.item_type)))
    if pa.types.is_list(kind) and pa.types.is_list(dropped):
        return pa.list_(kind.value_field.with_type(_named_back(kind.value_type, dropped.value_type)))
    return kind


def named_type(reader: ReaderSchema, *, renames: bool = False) -> pa.DataType:
    """The type of a reader's rows, in which the members of Avro's unions have the names of their branches as metadata.

    If it `renames`, fields have their aliases, too.
    """
    kind = reader.type  # what it refuses names the column; without the native kernel there is none
    if reader.format.format != "avro":
        return kind
    from spark_klog.schemas.avro.columns import columns_of
    from spark_klog.schemas.avro.schema import AvroField

    def label(field: pa.Field, of: AvroField | AvroSchema) -> pa.Field:
        if isinstance(of, AvroField):
            return with_aliases(field, of.aliases if renames else ())
        return field.with_metadata({_BRANCH: json.dumps([of.name or of.kind, *of.aliases])})

    return columns_of(reader.format.codec.parse(reader.text, reader.references), label=label).type


def _branch_names(field: pa.Field) -> list[str]:
    """The name of the branch that a member of a union is, and its aliases; [] of any other field."""
    return [str(name) for name in json.loads((field.metadata or {}).get(_BRANCH, b"[]"))]


def _member_names(known: Mapping[str, pa.Field], new: pa.DataType, path: str) -> dict[str, str]:
    """By the names of a union's members in `new` those that files have for the same branches, by Avro's own rules.

    Members of new branches come after the `known` ones. Empty of a struct that is no union; `LoadError` if it was one,
    or is one now.
    """
    left = {name: branch[:1] for name, field in known.items() if (branch := _branch_names(field))}
    is_union = any(map(_branch_names, new))
    if known and bool(left) != is_union:
        raise LoadError(
            f"{path} is of one type by one schema, and a union of several by another: use {ANOTHER}, or keep the "
            "schema (--schema-evolution keep)"
        )
    if not is_union:
        return {}
    names: dict[str, str] = {}
    for nearness in range(4):
        for field in new:
            near = _near_names(_branch_names(field), nearness)
            same = [name for name, branch in left.items() if near.intersection(_near_names(branch, nearness))]
            if same and field.name not in names:
                names[field.name] = same[0]
                del left[same[0]]
    count = len(known)
    for field in new:
        if field.name not in names:
            names[field.name] = f"member{count}"
            count += 1
    return names


def _near_names(names: Sequence[str], nearness: int) -> set[str]:
    """By what a branch is the same: its name, an alias, its name without namespace, or the type it is promoted to."""
    if nearness < 2:
        return set(names[: None if nearness else 1])
    return {_PROMOTED.get(name, name) if nearness == 3 else name.rpartition(".")[2] for name in names[:1]}


def fitted(array: pa.Array, kind: pa.DataType, own: pa.DataType | None = None) -> pa.Array:
    """A column by its type in files, which `merged` has made of its own: fields that it has not are null.

    `own` is the column's type with the names of branches (`named_type`), by which members of unions find their places.
    """
    if (array.type if own is None else own).equals(kind, check_metadata=True):
        return array
    nulls = array.is_null() if array.null_count else None
    if pa.types.is_struct(kind):
        place = _name if own is None else _branch
        numbers = {place(field): number for number, field in enumerate(array.type if own is None else own)}
        parts = []
        for field in kind:
            number = numbers.get(place(field))
            if number is None:
                parts.append(pa.nulls(len(array), field.type))
            else:
                parts.append(fitted(array.field(number), field.type, None if own is None else own[number].type))
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=nulls)
    if not pa.types.is_nested(kind):  # a table may have wider numbers
        return array.cast(kind)
    if array.offset:
        array = pa.concat_arrays([array])
    buffers = array.buffers()[:2]
    if pa.types.is_map(kind):
        items = [array.keys, fitted(array.items, kind.item_type, None if own is None else own.item_type)]
        entries = pa.StructArray.from_arrays(items, fields=[kind.key_field, kind.item_field])
        return pa.Array.from_buffers(kind, len(array), buffers, array.null_count, children=[entries])
    values = fitted(array.values, kind.value_type, None if own is None else own.value_type)
    return pa.Array.from_buffers(kind, len(array), buffers, array.null_count, children=[values])


def _name(field: pa.Field) -> str:
    return str(field.name)


def _branch(field: pa.Field) -> str:
    """The branch of a union that a field is, else its name."""
    return next(iter(_branch_names(field)), str(field.name))
