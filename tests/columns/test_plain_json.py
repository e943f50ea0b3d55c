"""Values of Arrow columns as JSON has them."""

from __future__ import annotations

import json
from datetime import time, timedelta
from typing import Any

import pyarrow as pa
import pytest

from spark_klog.columns.plain_json import plain_json
from spark_klog.schemas.json_schema.texts import json_texts


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (timedelta(seconds=1, microseconds=500_000), pa.duration("us")),
        (timedelta(microseconds=-1), pa.duration("us")),
        (timedelta(days=-400, seconds=-1), pa.duration("us")),
        (timedelta(0), pa.duration("us")),
        (time(10, 0, 0, 5), pa.time64("us")),
    ],
)
def test_times_as_the_command_writes_them(value: Any, kind: pa.DataType) -> None:
    column = pa.array([value], kind)
    (text,) = json_texts(column).to_pylist()
    assert plain_json(column[0].as_py(), kind) == json.loads(text)
