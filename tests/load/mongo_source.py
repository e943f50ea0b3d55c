"""A collection as MongoDB has it, and the events that Debezium's connector for MongoDB writes of its changes.

The events are as MongoDbCollectionSchema and JsonSerialization of Debezium 3 make them: rows are texts of JSON, in the
mode `json.serialization.mode`; updates have the whole document, its changed fields, or both, by `capture.mode`.
"""

from __future__ import annotations

import json
import random
from copy import deepcopy
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal

from tests.spark.support import Sent

Mode = Literal["strict", "extended", "relaxed"]
Capture = Literal["change_streams", "change_streams_with_pre_image", "change_streams_update_full"]
DDL = (
    "_id string, name string, amount bigint, at timestamp, price decimal(10,2), address struct<city: string, zip: "
    "bigint>, tags array<string>, items array<struct<n: bigint>>, any json"
)
_EPOCH = datetime(2026, 1, 1, tzinfo=timezone.utc)


class ObjectId(str):
    """An id of 24 digits."""

    __slots__ = ()


def extended(value: Any, mode: Mode) -> Any:
    """A value as MongoDB's JSON has it."""
    if isinstance(value, dict):
        return {name: extended(each, mode) for name, each in value.items()}
    if isinstance(value, list):
        return [extended(each, mode) for each in value]
    if isinstance(value, ObjectId):
        return {"$oid": str(value)}
    if isinstance(value, Decimal):
        return {"$numberDecimal": str(value)}
    if isinstance(value, datetime):
        ms = (value - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(milliseconds=1)
        if mode == "relaxed":
            return {"$date": value.isoformat(timespec="milliseconds").replace("+00:00", "Z")}
        return {"$date": ms if mode == "strict" else {"$numberLong": str(ms)}}
    if isinstance(value, int) and not isinstance(value, bool) and mode != "relaxed":
        return {"$numberLong": str(value)}
    return value


class Collection:
    """Documents by their ids, and the records of their changes."""

    def __init__(self, mode: Mode, capture: Capture, *, has_schemas: bool = False, seed: int = 58) -> None:
        self.mode, self.capture, self._has_schemas = mode, capture, has_schemas
        self.documents: dict[str, dict[str, Any]] = {}
        self._chance = random.Random(seed)
        self._count = 0

    def text(self, value: Any) -> str:
        return json.dumps(extended(value, self.mode))

    def event(self, key: str, op: str, **more: Any) -> Sent:
        """A record of a change, as of Connect's JsonConverter."""
        self._count += 1
        source = {"version": "3.3.1.Final", "connector": "mongodb", "name": "shop", "ts_ms": 1, "ord": self._count}
        value: Any = {"before": None, "after": None, "updateDescription": None, "source": source, "op": op, **more}
        of_key: Any = {"id": json.dumps(extended(ObjectId(key), "relaxed"))}
        if self._has_schemas:
            value, of_key = ({"schema": {"type": "struct"}, "payload": each} for each in (value, of_key))
        return Sent(json.dumps(value).encode(), json.dumps(of_key).encode(), 0)

    def insert(self, op: str = "c") -> Sent:
        number = self._count
        key = ObjectId(f"{number:024x}")
        document: dict[str, Any] = {"_id": key, "name": f"name {number}", "amount": (1 << 60) + number}
        document |= {"at": _EPOCH + timedelta(milliseconds=number), "price": Decimal("12.50") + number}
        document |= {"address": {"city": "Bonn", "zip": number}, "tags": ["a", "b", "c"], "items": [{"n": number}]}
        document["any"] = self._chance.choice([number, "text", {"x": [1]}])
        self.documents[key] = document
        return self.event(key, op, after=self.text(document))

    def delete(self) -> list[Sent]:
        key = self._chance.choice(sorted(self.documents))
        before = self.documents.pop(key)
        more = {"before": self.text(before)} if self.capture == "change_streams_with_pre_image" else {}
        record = self.event(key, "d", **more)
        return [record, record._replace(value=None)]

    def update(self) -> Sent:
        """A change of some fields, of parts of them, or of all of them at once."""
        key = self._chance.choice(sorted(self.documents))
        before, number = deepcopy(self.documents[key]), self._count
        document = self.documents[key]
        updated: dict[str, Any] = {}
        removed: list[str] = []
        truncated: list[dict[str, Any]] = []
        for kind in self._chance.sample(range(8), 3):
            if kind == 0:
                document["name"] = updated["name"] = f"name {number}"
            elif kind == 1 and document.get("address"):
                document["address"]["zip"] = updated["address.zip"] = number
            elif kind == 2 and document.get("address"):
                document["address"].pop("city", None)
                removed.append("address.city")
            elif kind == 3 and document.get("tags"):
                document["tags"].append(f"t{number}")
                updated[f"tags.{len(document['tags']) - 1}"] = f"t{number}"
            elif kind == 4 and document.get("items"):
                document["items"][0]["n"] = updated["items.0.n"] = number
            elif kind == 5 and "price" in document:
                del document["price"]
                removed.append("price")
            elif kind == 6 and "tags" in before and len(before["tags"]) > 1 and len(document["tags"]) > 1:
                if document["tags"] == before["tags"]:
                    document["tags"] = document["tags"][:1]
                    truncated.append({"field": "tags", "newSize": 1})
            elif kind == 7 and not any(name.startswith("address") for name in (*updated, *removed)):
                document["address"] = updated["address"] = {"city": f"c{number}"}
        more: dict[str, Any] = {}
        if self.capture == "change_streams_with_pre_image":
            more["before"] = self.text(before)
        if self.capture == "change_streams_update_full":
            more["after"] = self.text(document)
        more["updateDescription"] = {
            "removedFields": removed or None,
            "updatedFields": self.text(updated),
            "truncatedArrays": truncated or None,
        }
        return self.event(key, "u", **more)

    def change(self, count: int) -> list[Sent]:
        made: list[Sent] = []
        while len(made) < count:
            chance = self._chance.random()
            if chance < 0.2 or not self.documents:
                made.append(self.insert())
            elif chance < 0.9:
                made.append(self.update())
            else:
                made += self.delete()
        return made

    def rows(self) -> list[dict[str, Any]]:
        """What a table by `DDL` has to have."""
        made = []
        for document in self.documents.values():
            row = {name: document.get(name) for name in ("_id", "name", "amount", "at", "price", "tags", "items")}
            address = document.get("address")
            row["address"] = None if address is None else {"city": address.get("city"), "zip": address.get("zip")}
            row["any"] = json.dumps(document["any"], separators=(",", ":"))
            made.append(row)
        return sorted(made, key=lambda row: str(row["_id"]))
