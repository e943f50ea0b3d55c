"""Tables that follow collections of MongoDB, by the events of Debezium's connector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import LoadError
from spark_klog.files.folder import LocalFolder
from spark_klog.load.audit import status
from spark_klog.load.run import MaxBad
from spark_klog.load.settings import WriteSettings
from spark_klog.load.values import parse_schema, schema_text
from spark_klog.tables.changes import debezium_type
from tests.load import mongo_source
from tests.load.mongo_source import Capture, Collection, Mode
from tests.load.support import Killed, die, failing, run
from tests.load.test_upserts import FORMATS, address_of, content, environment
from tests.spark.support import create_topic, produce

__all__ = ["environment"]
_GIVEN = WriteSettings(
    schema=schema_text(debezium_type(parse_schema(mongo_source.DDL))), upsert_key="_id", envelope="debezium"
)
_INFERRED = WriteSettings(infers=True, upsert_key="_id", envelope="debezium")


def _rows(address: str) -> list[dict[str, Any]]:
    table = content(address)
    rows = table.drop_columns([name for name in table.column_names if name[:1] == "_" and name != "_id"]).to_pylist()
    for row in rows:
        row["any"] = json.dumps(json.loads(row["any"]), separators=(",", ":"))
    return sorted(rows, key=lambda row: str(row["_id"]))


@pytest.mark.parametrize(
    ("kind", "mode", "capture", "has_schemas"),
    [
        ("delta", "strict", "change_streams", False),
        ("iceberg", "relaxed", "change_streams", True),
        ("delta", "extended", "change_streams_with_pre_image", True),
        ("iceberg", "strict", "change_streams_update_full", False),
    ],
)
def test_a_table_follows_a_collection(
    cluster: EmbeddedCluster,
    topic: str,
    tmp_path: Path,
    environment: Any,
    kind: str,
    mode: Mode,
    capture: Capture,
    has_schemas: bool,
) -> None:
    """Over several runs, each of which is killed somewhere."""
    servers, address = cluster.bootstrap_servers, address_of(kind, tmp_path)
    create_topic(servers, topic)
    source = Collection(mode, capture, has_schemas=has_schemas)
    produce(servers, topic, [source.insert("r") for _ in range(20)])
    for number in (2, 9, 16):
        produce(servers, topic, source.change(60))
        try:
            with failing(LocalFolder, number, die):
                run(servers, address, topic, settings=_GIVEN, max_task_records=40)
        except Killed:
            pass
        loaded = run(servers, address, topic, settings=_GIVEN)
        assert loaded.bad == 0
        assert _rows(address) == source.rows()
    assert status(address).findings == []


@pytest.mark.parametrize("kind", FORMATS)
def test_inferred_columns(cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str) -> None:
    """Fields that only updates have, also within others, get their columns."""
    servers, address = cluster.bootstrap_servers, address_of(kind, tmp_path)
    create_topic(servers, topic)
    source = Collection("strict", "change_streams")
    key = "0" * 24
    row = {"_id": mongo_source.ObjectId(key), "n": 1, "in": {"a": 1}, "list": [1, 2]}

    def update(removed: list[str], truncated: list[Any], **fields: Any) -> None:
        names = {name.replace("__", "."): value for name, value in fields.items()}
        given = {"removedFields": removed, "updatedFields": source.text(names), "truncatedArrays": truncated}
        produce(servers, topic, [source.event(key, "u", updateDescription=given)])
        run(servers, address, topic, settings=_INFERRED)

    def there() -> dict[str, Any]:
        (found,) = content(address).to_pylist()
        return {name: value for name, value in found.items() if name[:1] != "_"}

    produce(servers, topic, [source.event(key, "c", after=source.text(row))])
    update([], [], n=2)
    assert there() == {"n": 2, "in": {"a": 1}, "list": [1, 2]}
    update(["n"], [], new="x", in__b=True, list__3=4)
    assert there() == {"n": None, "in": {"a": 1, "b": True}, "list": [1, 2, None, 4], "new": "x"}
    update(["in.a"], [{"field": "list", "newSize": 1}], when=mongo_source.Decimal("1.50"))
    assert there() == {"n": None, "in": {"a": None, "b": True}, "list": [1], "new": "x", "when": "1.50"}


@pytest.mark.parametrize("kind", FORMATS)
def test_updates_that_have_no_row(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str
) -> None:
    """They are dead letters, as are those that change a part of what is no object; the row is as it was."""
    servers, address = cluster.bootstrap_servers, address_of(kind, tmp_path)
    create_topic(servers, topic)
    source = Collection("relaxed", "change_streams")
    produce(servers, topic, [source.insert(), source.insert()])
    first, second = sorted(source.documents)

    def update(key: str, **fields: Any) -> Any:
        names = {name.replace("__", "."): value for name, value in fields.items()}
        return source.event(key, "u", updateDescription={"updatedFields": source.text(names)})

    run(servers, address, topic, settings=_GIVEN)
    before = source.rows()
    lost = update("f" * 24, name="lost")._replace(headers=(("lines\u2028and\x85lines", b"x"),))
    produce(servers, topic, [lost, update(first, tags__x__y=1), update(second, name="good")])
    rubbish = [source.event(first, "u", updateDescription={"updatedFields": "{", "truncatedArrays": 5})]
    rubbish += [source.event(first, "c", after="[1"), source.event(first, "u")]
    produce(servers, topic, rubbish)
    with pytest.raises(LoadError, match="has 5 bad record batches or values"):
        run(servers, address, topic, settings=_GIVEN)
    assert run(servers, address, topic, settings=_GIVEN, max_bad=MaxBad(5)).bad == 5
    before[1]["name"] = "good"
    assert _rows(address) == before
    folder = Path(address.partition(":")[2]) if kind == "delta" else tmp_path
    letters = [json.loads(line) for path in folder.rglob("values+*.jsonl") for line in path.open()]
    reasons = [letter["reason"] for letter in letters]
    assert sum("updates a row that is not there, or that has not what it changes" in reason for reason in reasons) == 1
    assert "field after.tags must be an array, not an object" in reasons
    assert ["lines\u2028and\x85lines", "eA=="] in [header for letter in letters for header in letter["headers"]]
    assert status(address).findings == []


def test_an_update_of_a_stream_by_dead_letters(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Without rows that keep their values, an update that has no whole document is bad."""
    servers, address = cluster.bootstrap_servers, address_of("delta", tmp_path)
    create_topic(servers, topic)
    source = Collection("strict", "change_streams")
    produce(servers, topic, [source.insert(), source.update()])
    settings = WriteSettings(schema=_GIVEN.schema, upsert_key="_id", envelope="debezium", unavailable="dead-letter")
    with pytest.raises(LoadError, match="has the changed fields of a document only: give --unavailable keep"):
        run(servers, address, topic, settings=settings)
