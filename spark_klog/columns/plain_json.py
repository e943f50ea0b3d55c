"""Values of Arrow columns as JSON has them."""

from __future__ import annotations

import json
import math
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

from spark_klog.records.contract import json_value

_MICROSECOND = timedelta(microseconds=1)


def plain_json(value: Any, kind: pa.DataType) -> Any:
    """A value of a column of type `kind`, as Arrow gives it, of what `json.dumps` takes.

    Bytes are text if they are UTF-8, else {"base64": ...}; times are ISO, durations seconds ("1.500000s", as in
    Protobuf's JSON); decimals are text, and so are the numbers that JSON does not have: "NaN", "Infinity", "-Infinity".
    A map is an object.
    """
    if isinstance(value, bytes):
        return json_value(value)
    if isinstance(value, list):
        if pa.types.is_map(kind):
            return {str(key): plain_json(entry, kind.item_type) for key, entry in value}
        return [plain_json(entry, kind.value_type) for entry in value]
    if isinstance(value, dict):
        return {field.name: plain_json(value[field.name], field.type) for field in kind}
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        seconds, fraction = divmod(abs(value // _MICROSECOND), 1_000_000)
        return f"{'-' if value < timedelta() else ''}{seconds}.{fraction:06}s"
    return f"{value:f}" if isinstance(value, Decimal) else value
