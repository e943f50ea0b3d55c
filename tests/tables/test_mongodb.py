"""Changes of MongoDB's collections, in any cut of runs and files: after each run the table is the collection."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given, settings, strategies as st

from spark_klog.schemas.json_schema.columns import DDL, stored_type
from spark_klog.schemas.json_schema.ddl import parse_schema
from spark_klog.schemas.json_schema.decoder import JsonDecoder
from spark_klog.schemas.json_schema.from_arrow import column_of
from spark_klog.tables.change_files import ChangeFiles
from spark_klog.tables.change_order import DELETED, LACKING, LACKING_TYPE, OFFSET, PARTITION, PLACE
from spark_klog.tables.changes import ChangeFormat, debezium_type
from spark_klog.tables.mongodb import plain_events, plain_keys
from tests.load import mongo_source
from tests.load.mongo_source import Capture, Collection, Mode
from tests.spark.support import Sent
from tests.tables.change_support import written
from tests.tables.test_upserts import FORMATS, content, make_table, run

_KIND = debezium_type(parse_schema(mongo_source.DDL))
_FORMAT = ChangeFormat(pa.binary(), stored_type(_KIND), ("_id",), "debezium")
_DECODER = JsonDecoder(column_of(_KIND, DDL))


def _changes(sent: list[Sent], start: int) -> pa.RecordBatch:
    """What records say, as a task of a load reads them."""
    values = plain_events(pa.array([each.value for each in sent], pa.binary()))
    decoded = _DECODER.decode(values, [None])
    assert decoded.bad == []
    columns = {
        "key": pa.array([each.key for each in sent], pa.binary()),
        "value": decoded.values,
        "topic": pa.array(["documents"] * len(sent)),
        "partition": pa.array([0] * len(sent), pa.int32()),
        "offset": pa.array(range(start, start + len(sent)), pa.int64()),
        "timestamp": pa.array(range(start, start + len(sent))).cast(pa.timestamp("us", tz="UTC")),
    }
    return _FORMAT.changes(pa.RecordBatch.from_pydict(columns))


def _check(kind: str, mode: Mode, capture: Capture, seed: int, cuts: list[int], slice_bytes: int) -> None:
    source, count = Collection(mode, capture, seed=seed), 0
    with TemporaryDirectory() as name:
        folder = Path(name)
        table = make_table(kind, folder)
        for number, cut in enumerate(cuts, 1):
            sent = [source.insert("r"), *source.change(cut)] if number == 1 else source.change(cut)
            batches = []
            for first in range(0, len(sent), 7):
                batches.append(_changes(sent[first : first + 7], count))
                count += len(sent[first : first + 7])
            table.prepare(_FORMAT.row, "none", "", "load", key=_FORMAT.key)
            files = written(folder / f"changes{number}", batches, slice_bytes, _FORMAT.key)
            schema = table.schema()
            assert schema is not None
            assert list(files.without_row(schema, table.rows)) == []
            table.upsert(replace(files, letters=frozenset()), run(number))
            rows = content(kind, folder).drop_columns(PLACE.names)
            found: list[dict[str, Any]] = sorted(rows.to_pylist(), key=lambda row: str(row["_id"]))
            for row in found:
                row["any"] = json.dumps(json.loads(row["any"]), separators=(",", ":"))
            names = [field.name for field in parse_schema(mongo_source.DDL)]
            assert [{name: row[name] for name in names} for row in found] == [
                {name: row[name] for name in names} for row in source.rows()
            ]


@pytest.mark.parametrize("kind", FORMATS)
@settings(deadline=None, max_examples=8)
@given(
    mode=st.sampled_from(get_args(Mode)),
    capture=st.sampled_from(get_args(Capture)),
    seed=st.integers(0, 1_000),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    slice_bytes=st.sampled_from([300, 1 << 27]),
)
def test_the_table_is_the_collection(
    kind: str, mode: Mode, capture: Capture, seed: int, cuts: list[int], slice_bytes: int
) -> None:
    _check(kind, mode, capture, seed, cuts, slice_bytes)


def test_updates_of_a_row_that_is_not_there_in_several_partitions(tmp_path: Path) -> None:
    """None of them becomes a row."""
    table, names = make_table("delta", tmp_path), [field.name for field in parse_schema(mongo_source.DDL)]
    table.prepare(_FORMAT.row, "none", "", "load", key=_FORMAT.key)
    batches = []
    for partition, name in enumerate([name for name in names if name != "_id"][:2]):
        update = {"updatedFields": json.dumps({name: None}), "removedFields": None, "truncatedArrays": None}
        event = {"op": "u", "before": None, "after": None, "updateDescription": update}
        value = json.dumps(event | {"source": {"connector": "mongodb"}}).encode()
        batch = _changes([Sent(value, b'{"id": "\\"x\\""}')], 0)
        place = batch.schema.get_field_index("_klog_partition")
        batches.append(batch.set_column(place, "_klog_partition", pa.array([partition], pa.int32())))
    files = written(tmp_path / "changes", batches, key=_FORMAT.key)
    schema = table.schema()
    assert schema is not None
    lost = frozenset((one["_klog_partition"], one["_klog_offset"]) for one in files.without_row(schema, table.rows))
    assert lost == {(0, 0), (1, 0)}
    table.upsert(replace(files, letters=lost), run(1))
    assert content("delta", tmp_path).num_rows == 0


def _update(key: str, **fields: Any) -> Sent:
    names = {name.replace("__", "."): value for name, value in fields.items()}
    update = {"updatedFields": json.dumps(names), "removedFields": None, "truncatedArrays": None}
    event = {"op": "u", "before": None, "after": None, "updateDescription": update, "source": {"connector": "mongodb"}}
    return Sent(json.dumps(event).encode(), _key(key))


def _key(key: str) -> bytes:
    return json.dumps({"id": json.dumps(key)}).encode()


class _Rows:
    """Rows by their ids, as a table gives them to a merge, and the outcome of merges of one partition."""

    def __init__(self) -> None:
        self.rows = pa.schema(_FORMAT.row).empty_table()

    def merge(self, files: ChangeFiles) -> set[int]:
        """The offsets of what is a dead letter."""

        def rows(names: Sequence[str], _: pa.Table) -> list[pa.RecordBatch]:
            batches: list[pa.RecordBatch] = self.rows.select(names).to_batches()
            return batches

        lost = list(files.without_row(self.rows.schema, rows))
        letters = frozenset((each[PARTITION], each[OFFSET]) for each in lost)
        for changes in replace(files, letters=letters).whole(self.rows.schema, rows):
            assert len(changes["_id"].unique()) == len(changes)
            left = self.rows.filter(pc.invert(pc.is_in(self.rows["_id"], changes["_id"].combine_chunks())))
            new = changes.filter(pc.invert(changes[DELETED])).drop_columns([DELETED]).cast(left.schema)
            self.rows = pa.concat_tables([left, new])
        return {int(line) for each in lost for line in each[LACKING]["letter"].splitlines()}


_OPERATIONS = ("insert", "delete", "city", "zip", "amount", "impossible", "impossible too")


@settings(deadline=None, max_examples=12)
@given(
    runs=st.lists(
        st.lists(
            st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(_OPERATIONS)), min_size=1, max_size=6),
            min_size=1,
            max_size=3,
        ),
        max_size=4,
    ),
    slice_bytes=st.sampled_from([300, 1 << 27]),
)
@example([[[("a", "insert"), ("a", "impossible"), ("a", "city")]]], 300)
@example([[[("a", "insert")], [("a", "impossible"), ("a", "amount")]], [[("a", "zip"), ("a", "impossible")]]], 300)
@example([[[("a", "city"), ("a", "amount")], [("a", "amount"), ("b", "amount")], [("b", "amount")]]], 300)
def test_an_impossible_update_is_a_dead_letter_of_its_own(
    runs: list[list[list[tuple[str, str]]]], slice_bytes: int
) -> None:
    """The others are applied in their order, in any cut of runs and files."""
    table, documents, offset = _Rows(), dict[str, dict[str, Any]](), 0
    for run_of in runs:
        batches, letters = [], dict[str, set[int]]()
        for part in run_of:
            sent = []
            for key, operation in part:
                known, bad = documents.get(key), letters.setdefault(key, set())
                if operation == "insert":
                    documents[key] = {"_id": key, "amount": offset, "address": {"city": "x", "zip": offset}}
                    whole = json.dumps(documents[key] | {"any": "text", "tags": []})
                    event = {"op": "c", "after": whole, "source": {"connector": "mongodb"}}
                    sent.append(Sent(json.dumps(event).encode(), _key(key)))
                elif operation == "delete":
                    documents.pop(key, None)
                    sent.append(Sent(json.dumps({"op": "d", "source": {"connector": "mongodb"}}).encode(), _key(key)))
                elif operation.startswith("impossible"):
                    more = {"any__part": 1} if operation == "impossible" else {"tags__5000000": "too far"}
                    sent.append(_update(key, amount=-1, **more))
                    bad.add(offset)
                elif operation == "amount":
                    sent.append(_update(key, amount=offset))
                    bad.update([offset] if known is None else [])
                    documents.update({} if known is None else {key: known | {"amount": offset}})
                else:
                    value = str(offset) if operation == "city" else offset
                    sent.append(_update(key, **{f"address__{operation}": value}))
                    bad.update([offset] if known is None else [])
                    if known is not None:
                        documents[key] = known | {"address": {**known["address"], operation: value}}
                if operation in ("insert", "delete"):
                    bad.clear()  # updates before it change nothing
                offset += 1
            changes = _changes(sent, offset - len(sent))
            names, _, parts = changes[LACKING].flatten()
            numbered = pc.if_else(changes[LACKING].is_valid(), changes[OFFSET].cast(pa.string()), None)
            arrays = [names, numbered, parts]
            marked = pa.StructArray.from_arrays(arrays, fields=list(LACKING_TYPE), mask=changes[LACKING].is_null())
            batches.append(changes.set_column(changes.schema.get_field_index(LACKING), LACKING, marked))
        with TemporaryDirectory() as name:
            lost = table.merge(written(Path(name), batches, slice_bytes, _FORMAT.key))
        assert lost == set().union(*letters.values())
        found = table.rows.select(["_id", "amount", "address"]).sort_by("_id").to_pylist()
        assert found == [documents[key] for key in sorted(documents)]


def test_kinds_of_values() -> None:
    given = {
        "old": {"$binary": "AAAA", "$type": "00"},
        "new": {"$binary": {"base64": "AAAA", "subType": "00"}},
        "uuid": {"$binary": {"base64": "AAAAAAAAAAAAAAAAAAAAAA==", "subType": "04"}},
        "time": {"$timestamp": {"t": 60, "i": 1}},
        "before": {"$date": {"$numberLong": "-1"}},
        "double": {"$numberDouble": "1.5"},
        "none": {"$numberDouble": "NaN"},
    }
    same = {
        "least": {"$minKey": 1},
        "empty": {},
        "own": {"$oid": "1", "a": 2, "b": 3},
        "wrong": {"$numberLong": "x"},
    }
    event = {"op": "c", "after": json.dumps(given | same), "source": {"connector": "mongodb"}}
    (made,) = plain_events(pa.array([json.dumps(event).encode()])).to_pylist()
    assert json.loads(made)["after"] == same | {
        "old": "AAAA",
        "new": "AAAA",
        "uuid": "00000000-0000-0000-0000-000000000000",
        "time": "1970-01-01T00:01:00Z",
        "before": "1969-12-31T23:59:59.999Z",
        "double": 1.5,
        "none": "NaN",
    }


def test_keys() -> None:
    keys = [b'{"id": "1004"}', b'{"payload": {"id": "{\\"$oid\\": \\"5f\\"}"}}', b'{"id": 5}', None, b"x", b"[]"]
    assert plain_keys(pa.array(keys, pa.binary())).to_pylist() == [b'{"_id": 1004}', b'{"_id": "5f"}', *keys[2:]]


@pytest.mark.parametrize("more", [{"after": "[1"}, {"updateDescription": {"truncatedArrays": 5}}, {"before": "{"}])
def test_rubbish_stays(more: dict[str, Any]) -> None:
    event = json.dumps({"op": "u", "source": {"connector": "mongodb"}, **more}).encode()
    (made,) = plain_events(pa.array([event])).to_pylist()
    assert made == event or json.loads(made).get("after", "") in ("[1", "")
