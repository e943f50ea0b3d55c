"""Schemas and messages of the Protobuf tests."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from google.protobuf.message_factory import GetMessageClass

from spark_klog.schemas.protobuf.schema import ProtobufSchema, parse_schema

from .google_writer import numbers

#: All kinds of fields.
WIDE = """syntax = "proto3";
package shop;
import "google/protobuf/any.proto";
import "google/protobuf/duration.proto";
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
import "confluent/type/decimal.proto";
message Order {
  enum Kind { UNKNOWN = 0; RETAIL = 1; BULK = -2; }
  message Line { string sku = 1; int32 count = 2; repeated double prices = 3; }
  message Nothing {}
  int64 id = 1;
  optional string name = 2;
  google.protobuf.Timestamp at = 3;
  google.protobuf.Duration took = 4;
  map<string, Line> lines = 5;
  repeated Line more = 6;
  Kind kind = 7;
  repeated Kind kinds = 8;
  oneof payment { int32 card = 9; string cash = 10; Line gift = 11; }
  google.protobuf.Int64Value tip = 12;
  google.protobuf.Any extra = 13;
  repeated sint32 deltas = 14;
  uint32 u32 = 15;
  uint64 u64 = 16;
  fixed32 f32 = 17;
  fixed64 f64 = 18;
  sfixed32 s32 = 19;
  sfixed64 s64 = 20;
  sint64 zig = 21;
  bytes raw = 22;
  double weight = 23;
  float ratio = 24;
  bool paid = 25;
  map<int32, bool> flags = 26;
  Nothing nothing = 27;
  repeated string tags = 28;
  confluent.type.Decimal price = 29;
  repeated bool bits = 30;
  int32 far = 2000;
}
message Other { int64 id = 1; }
"""


def schema(text: str, message: str | None = None, **files: str) -> ProtobufSchema:
    return parse_schema(text, {name.replace("__", "/") + ".proto": content for name, content in files.items()}, message)


def message_class(made: ProtobufSchema) -> Any:
    return GetMessageClass(made.message)


def order(made: ProtobufSchema, number: int) -> Any:
    """A message of WIDE, with more in it for larger numbers."""
    result = message_class(made)(id=number)
    if number % 2:
        result.name = f"\u20ac {number}"
        result.at.seconds, result.at.nanos = 1_700_000_000 - number, 5_000
        result.took.seconds, result.took.nanos = -number, -7_000
        result.lines[f"k{number}"].sku = "a"
        result.lines["l"].prices.extend([1.5, -number])
        result.u32, result.u64, result.f32, result.f64 = 2**32 - number, 2**64 - number, 2**31, 2**63
        result.extra.type_url, result.extra.value = "x/y", b"\xff"
        result.cash = ""
    if number % 3:
        result.more.add(sku="b", count=-number)
        result.more.add()
        result.kind, result.zig, result.s32, result.s64 = -2, -number, -number, -(2**63)
        result.kinds.extend([1, 0, 7])
        result.gift.count = 3
        result.tip.value = 0
        result.deltas.extend(range(-number, number))
        result.raw, result.weight, result.ratio, result.paid, result.far = b"\0\xff", 0.1, 0.5, True, number
        result.flags[-number] = True
        result.flags[0] = False
        result.tags.extend(["", "t"])
        result.nothing.SetInParent()
        result.price.value, result.price.scale = b"\1", 2
        result.bits.extend([True, False])
    return result


def plain(values: pa.Array) -> list[Any]:
    """Rows in which times are numbers, floats texts, and maps in order: what may be compared."""
    return [_plain(row) for row in numbers(values).to_pylist()]


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        if value and isinstance(value[0], tuple):
            return sorted(repr(_plain(item)) for item in value)
        return [_plain(item) for item in value]
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value
