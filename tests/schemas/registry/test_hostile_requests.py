"""Requests that nobody should send: each gets an answer, and none a fault of the server."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings, strategies as st

from spark_klog.schemas.registry.server.api import answer
from spark_klog.schemas.registry.server.registry import Registry
from tests.schemas.registry.memory_log import MemoryLog

_NAMES = """subjects versions schemas ids guids schema types compatibility config mode contexts metadata latest
referencedby a :.x:a :.: :*: .x 1 0 -1 999999999999 %00 %2F"""
_WORDS = st.one_of(st.sampled_from(_NAMES.split()), st.text(max_size=5))
_PATHS = st.one_of(
    st.lists(_WORDS, max_size=6).map(lambda words: "/" + "/".join(words)),
    st.sampled_from(
        ["/subjects/a/versions", "/subjects/a", "/compatibility/subjects/a/versions", "/config", "/mode/a"]
    ),
)
_QUERIES = st.sampled_from(
    [
        "",
        "deleted=true",
        "permanent=true&force=true",
        "format=resolved",
        "offset=-1&limit=x",
        "verbose=true",
        "subject=:.:",
        "%",
    ]
)
_JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(max_size=8),
        st.sampled_from(["record", "int", "R", "a", "AVRO", "FULL", "IMPORT"]),
    ),
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "name",
                    "fields",
                    "items",
                    "symbols",
                    "default",
                    "size",
                    "properties",
                    "tags",
                    "x",
                    "aliases",
                    "namespace",
                ]
            ),
            below,
            max_size=4,
        ),
    ),
    max_leaves=12,
)
_FIELDS = st.dictionaries(
    st.sampled_from(
        [
            "schema",
            "schemaType",
            "references",
            "metadata",
            "ruleSet",
            "id",
            "version",
            "compatibility",
            "mode",
            "normalize",
        ]
    ),
    st.one_of(_JSON, _JSON.map(json.dumps)),
    max_size=5,
)
_BODIES = st.one_of(
    st.binary(max_size=10),
    _FIELDS.map(lambda fields: json.dumps(fields).encode()),
    _JSON.map(lambda value: json.dumps({"schema": json.dumps(value)}).encode()),
)
_METHODS = st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH"])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(_METHODS, _PATHS, _QUERIES, _BODIES), min_size=1, max_size=8))
def test_every_request_gets_an_answer(requests: list[tuple[Any, ...]]) -> None:
    registry = Registry(MemoryLog())  # type: ignore[arg-type]
    for method, path, query, body in requests:
        made = answer(registry, method, path, query, body)
        assert made.status in (200, 204, 400, 404, 405, 409, 422), (method, path, query, body)
        if made.status >= 400:
            refusal = json.loads(made.body)
            assert int(str(refusal["error_code"])[:3]) == made.status
