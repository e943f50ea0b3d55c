"""Protobuf records, without a network: decode to Arrow, encode from Arrow."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pyarrow as pa
from google.protobuf import timestamp_pb2  # noqa: F401 - in the default pool, for `_message_class`

from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.record_batches import speed, take_turns
from benchmarks.sides import SideFailed
from spark_klog.schemas.protobuf.decoder import ProtobufDecoder
from spark_klog.schemas.protobuf.encoder import ProtobufEncoder
from spark_klog.schemas.protobuf.schema import parse_schema
from spark_klog.schemas.protoc.files import parse_proto

_ROWS = 262_144
#: Rows of the sides that take one after the other.
_FEW = 8_192
#: What a Confluent serializer writes before a record: a zero, the schema's id, and which message: the first.
_PREFIX = b"\x00\x00\x00\x00\x01\x00"
#: Ten fields of an order.
SCHEMA = """syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
message Order {
  enum Status { NEW = 0; PAID = 1; SENT = 2; }
  int64 id = 1;
  int32 user = 2;
  string item = 3;
  double price = 4;
  int32 quantity = 5;
  Status status = 6;
  optional string note = 7;
  optional double discount = 8;
  bool paid = 9;
  google.protobuf.Timestamp at = 10;
}
"""


@cache
def _message_class() -> Any:
    """The class of the messages, in google.protobuf's own pool, where other libraries look for it."""
    from google.protobuf import descriptor_pool
    from google.protobuf.message_factory import GetMessageClass

    pool = descriptor_pool.Default()
    pool.AddSerializedFile(parse_proto(SCHEMA, {})[1][-1].SerializeToString())
    return GetMessageClass(pool.FindMessageTypeByName("shop.Order"))


def _records(count: int) -> list[bytes]:
    source = random.Random(7)
    order = _message_class()
    records = []
    for number in range(count):
        made = order(
            id=1_000_000_000 + number,
            user=source.randrange(1_000_000),
            item=f"item-{source.randrange(100_000)}",
            price=source.random() * 100,
            quantity=source.randrange(100),
            status=source.randrange(3),
            paid=source.random() < 0.5,
        )
        if source.random() < 0.3:
            made.note = "leave it with the neighbours"
        if source.random() < 0.5:
            made.discount = 0.1
        made.at.seconds, made.at.nanos = 1_700_000_000 + number // 1000, number % 1000 * 1_000_000
        records.append(made.SerializeToString())
    return records


def _speed(work: Callable[[], int]) -> float:
    """M records a second of processor time: a side may have threads."""
    return speed(work, time.process_time)


def _decode(bench: Bench) -> Iterator[Result]:
    records = _records(_ROWS)
    column = pa.array([_PREFIX + record for record in records], pa.binary())
    native = Side("klog, native kernel")
    python, rust, arrow = Side("google.protobuf, to dicts"), Side("ptars"), Side("protarrow")
    bare = pa.array(records, pa.binary())
    sides: list[tuple[Side, Callable[[], float]]] = [
        (native, lambda: _decoded(column)),
        (python, lambda: _speed(lambda: _by_google(records[:_FEW]))),
        (rust, lambda: _speed(_ptars_reader(bare))),
        (arrow, lambda: _speed(lambda: _by_protarrow(records[:_FEW]))),
    ]
    take_turns(sides, bench.repeat)
    size = sum(map(len, records)) // len(records)
    for peer in (python, rust, arrow):
        yield Result(
            f"decode Protobuf records of 10 fields, {size} B, to Arrow", "M records/s", native, peer, bench.command
        )


def _decoded(column: pa.Array) -> float:
    decoder = ProtobufDecoder(parse_schema(SCHEMA, {}))

    def once() -> int:
        decoded = decoder.decode(column, [decoder.reader], starts=len(_PREFIX))
        if decoded.bad or len(decoded.values) != len(column):
            raise SideFailed(f"{len(decoded.bad)} bad rows")
        return len(column)

    return _speed(once)


def _by_google(records: list[bytes]) -> int:
    order = _message_class()
    rows = []
    for record in records:
        one = order.FromString(record)
        rows.append(
            {
                "id": one.id,
                "user": one.user,
                "item": one.item,
                "price": one.price,
                "quantity": one.quantity,
                "status": one.status,
                "note": one.note if one.HasField("note") else None,
                "discount": one.discount if one.HasField("discount") else None,
                "paid": one.paid,
                "at": one.at.seconds * 1_000_000 + one.at.nanos // 1000,
            }
        )
    return len(rows)


def _ptars_reader(column: pa.Array) -> Callable[[], int]:
    handler = _ptars_handler()
    return lambda: int(handler.array_to_record_batch(column).num_rows)


@cache
def _ptars_handler() -> Any:
    import ptars

    descriptor = _message_class().DESCRIPTOR
    return ptars.HandlerPool([descriptor.file]).get_for_message(descriptor)


def _by_protarrow(records: list[bytes]) -> int:
    import protarrow

    order = _message_class()
    batch = protarrow.messages_to_record_batch([order.FromString(record) for record in records], order)
    return int(batch.num_rows)


def _encode(bench: Bench) -> Iterator[Result]:
    records = _records(_ROWS)
    decoder = ProtobufDecoder(parse_schema(SCHEMA, {}))
    rows = decoder.decode(pa.array(records, pa.binary()), [decoder.reader]).values
    native = Side("klog, native kernel")
    rust, arrow = Side("ptars"), Side("protarrow")
    sides: list[tuple[Side, Callable[[], float]]] = [
        (native, lambda: _encoded(rows, records)),
        (rust, lambda: _speed(_ptars_writer(pa.array(records, pa.binary())))),
        (arrow, lambda: _speed(_protarrow_writer(records[:_FEW]))),
    ]
    take_turns(sides, bench.repeat)
    for peer in (rust, arrow):
        yield Result("encode Arrow rows of 10 fields to Protobuf", "M records/s", native, peer, bench.command)


def _encoded(rows: pa.Array, records: list[bytes]) -> float:
    encoder = ProtobufEncoder(parse_schema(SCHEMA, {}), rows.type)
    if encoder.encode(rows).to_pylist() != records:
        raise SideFailed("other bytes than google.protobuf's")
    return _speed(lambda: len(encoder.encode(rows, _PREFIX[:5])))


def _ptars_writer(column: pa.Array) -> Callable[[], int]:
    handler = _ptars_handler()
    batch = handler.array_to_record_batch(column)
    return lambda: len(handler.record_batch_to_array(batch))


def _protarrow_writer(records: list[bytes]) -> Callable[[], int]:
    import protarrow

    order = _message_class()
    batch = protarrow.messages_to_record_batch([order.FromString(record) for record in records], order)
    return lambda: len([made.SerializeToString() for made in protarrow.record_batch_to_messages(batch, order)])


PROTOBUF = Work(
    "protobuf",
    lambda bench: iter((*_decode(bench), *_encode(bench))),
    (
        f"Protobuf: one process, processor time; {_ROWS:,} orders of ten fields (int64, int32, string, double, int32, "
        "enum, two that are there or not, bool, Timestamp) after a registry's prefix of six bytes, to Arrow and back. "
        "google.protobuf makes dicts of Python: the way to Arrow is not in its figure. ptars (Rust) and protarrow make "
        "Arrow of one schema without the prefix; with either one bad record fails the batch. The last peer of each is "
        "what a machine without a C compiler has.",
    ),
)
