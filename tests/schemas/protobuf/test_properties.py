"""Random schemas and messages: the native kernel reads what google.protobuf reads, and writes what it reads back."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from spark_klog.schemas.protobuf.decoder import ProtobufDecoder
from spark_klog.schemas.protobuf.encoder import ProtobufEncoder
from spark_klog.schemas.protobuf.schema import ProtobufSchema, parse_schema
from spark_klog.schemas.rows import Decoded
from tests.schemas.oracles import of_kernel
from tests.support.runs.soak import SOAK

from .random_messages import damaged, fill, random_schema, shuffled
from .support import message_class, plain

_SEEDS = st.integers(0, 2**32 - 1)


def _decoded(made: ProtobufSchema, values: list[bytes | None], kernel: str) -> Decoded:
    with of_kernel(kernel):
        decoded = ProtobufDecoder(made).decode(pa.array(values, pa.binary()), [made])
    decoded.values.validate(full=True)
    return decoded


def _messages(seed: int) -> tuple[random.Random, ProtobufSchema, list[bytes]]:
    rng = random.Random(seed)
    made = parse_schema(random_schema(rng, rng.choice(("proto2", "proto3"))), {})
    rows = []
    for _ in range(20):
        message = message_class(made)()
        fill(rng, message)
        rows.append(message.SerializePartialToString())
    return rng, made, rows + [shuffled(rng, row, rows) for row in rows]


def _check_decoding(seed: int) -> None:
    rng, made, rows = _messages(seed)
    values: list[Any] = [*rows, None, *(damaged(rng, row) for row in rows)]
    native, expected = _decoded(made, values, "native"), _decoded(made, values, "reference")
    bad, expected_bad = dict(native.bad), dict(expected.bad)
    assert bad.keys() <= expected_bad.keys()
    # what does not count, as an earlier value of a field, is not looked at
    assert len(bad) >= len(expected_bad) - 3
    for row, (one, other) in enumerate(zip(plain(native.values), plain(expected.values), strict=True)):
        if row in bad or row not in expected_bad:
            assert one == other


def _check_encoding(seed: int) -> None:
    rng, made, rows = _messages(seed)
    decoded = _decoded(made, [*rows, None], "native").values
    written = {}
    for kernel in ("native", "reference"):
        with of_kernel(kernel):
            written[kernel] = ProtobufEncoder(made, decoded.type).encode(decoded)
    assert plain(_decoded(made, written["native"].to_pylist(), "reference").values) == plain(decoded)
    kind = message_class(made)
    for one, other in zip(*(values.to_pylist() for values in written.values()), strict=True):
        if one is not None:
            assert repr(kind.FromString(one)) == repr(kind.FromString(other))
            assert len(one) == len(other)
    start = rng.randrange(len(rows))
    encoder = ProtobufEncoder(made, decoded.type)
    assert encoder.encode(decoded.slice(start)).to_pylist() == written["native"].to_pylist()[start:]


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(_SEEDS)
def test_decoding_and_encoding(seed: int) -> None:
    _check_decoding(seed)
    _check_encoding(seed)


@pytest.mark.test_all("long")
@settings(max_examples=150 if SOAK else 30, deadline=None, suppress_health_check=list(HealthCheck))
@given(_SEEDS)
def test_much(seed: int) -> None:
    _check_decoding(seed)
    _check_encoding(seed)
