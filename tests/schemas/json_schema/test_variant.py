"""JSON as VARIANT: pyspark reads what `variant` writes as it reads what it writes itself."""

from __future__ import annotations

import json
import random

import pyarrow as pa
import pytest

from spark_klog.schemas.json_schema import variant as module
from spark_klog.schemas.json_schema.columns import VARIANT
from spark_klog.schemas.json_schema.variant import variant, variants

_TEXTS = [
    *("null", "true", "false", "[]", "{}", '""', '"a"', " 1 ", "-1", "-0", "1.5", "-0.05", "-0.0", "1e3", "1.5e-7"),
    *(str((1 << bits) + more) for bits in (7, 8, 15, 16, 31, 32, 63, 64) for more in (-1, 0, 1)),
    *(str(-(1 << bits) + more) for bits in (7, 8, 15, 16, 31, 32, 63, 64) for more in (-1, 0, 1)),
    *("9" * count for count in (9, 10, 18, 19, 38, 39, 300)),
    *("0." + "0" * count + "1" for count in (7, 8, 9, 17, 18, 36, 37, 38, 60)),
    *("1" * 10 + "." + "2" * count for count in (8, 9, 28, 29)),
    *(json.dumps("é" * count) for count in (31, 32, 200)),
    json.dumps("\U0001f600 ﹢"),
    json.dumps([1, [2, [3, {"a": [None]}]]]),
    json.dumps({"b": 1, "a": {"b": "again", "c": 1.25}, "": 0, "é": [], "\U0001f600": 1, "\uffee": 2}),
    '{"a": 1, "a": 2}',
    json.dumps([*range(300)]),
    json.dumps({f"key{number}": number for number in range(300)}),
    json.dumps(["x" * 300] * 300),
    json.dumps(["x" * 70_000] * 3),
    json.dumps({f"key{number}" * 300: number for number in range(40)}),
]


def _any(chance: random.Random, depth: int = 0) -> object:
    kind = chance.randrange(7 if depth < 4 else 5)
    if kind < 5:
        text = "".join(chance.choices("ab é\U0001f600", k=chance.randrange(80)))
        number = chance.randrange(-(1 << 70), 1 << 70) >> chance.randrange(72)
        return (None, chance.random() < 0.5, number, round(chance.uniform(-1e6, 1e6), chance.randrange(9)), text)[kind]
    below = [_any(chance, depth + 1) for _ in range(chance.randrange(6))]
    return below if kind == 5 else {f"{chance.randrange(20)}": each for each in below}


def _both(text: str) -> None:
    from pyspark.sql.variant_utils import VariantUtils

    made = variant(text.encode())
    own = VariantUtils.to_python(made["value"], made["metadata"])
    other = VariantUtils.to_python(*VariantUtils.parse_json(text))
    assert (own, type(own)) == (other, type(other))
    assert json.loads(VariantUtils.to_json(made["value"], made["metadata"])) == json.loads(
        VariantUtils.to_json(*VariantUtils.parse_json(text))
    )


@pytest.mark.parametrize("text", _TEXTS, ids=range(len(_TEXTS)))
def test_values(text: str) -> None:
    _both(text)


def test_any_values() -> None:
    chance = random.Random(7)
    for _ in range(300):
        _both(json.dumps(_any(chance), ensure_ascii=False))


def test_names_that_are_keys() -> None:
    """Other ones in each value: their metadata is not kept in memory."""
    before = module._kept_metadata.cache_info().currsize
    for number in range(5):
        _both(json.dumps({f"{number}-{key}": key for key in range(1000)}))
    assert module._kept_metadata.cache_info().currsize == before
    _both(json.dumps({"a name": 1, "of many values": 2}))
    assert module._kept_metadata.cache_info().currsize == before + 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "it is empty"),
        (b"NaN", "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b'{"a":', "no JSON: Expecting value at character 5"),
        (b"1 2", "no JSON: Extra data"),
        (b'"\\ud800"', "half of a surrogate pair"),
        (b'{"\\udc00": 1}', "half of a surrogate pair"),
        (b"[1e999]", "a number beyond all doubles"),
        (b"1" * 400, "a number beyond all doubles"),
        (b"[" * 100_000, "nested too deeply"),
        (b"\xff", "not UTF-8"),
        (b'"' + b"x" * (16 << 20) + b'"', "a VARIANT of 16777221 bytes, and readers take 16777216"),
        (b'{"' + b"x" * (16 << 20) + b'": 1}', "a VARIANT of 16777229 bytes, and readers take 16777216"),
    ],
)
def test_bad_values(text: bytes, reason: str) -> None:
    made, bad = variants(pa.array([b"1", text, None, b"[2]"], pa.binary()))
    assert made.type == VARIANT.storage_type
    assert made.is_valid().to_pylist() == [True, False, False, True]
    [(row, why)] = bad
    assert row == 1
    assert reason in why
