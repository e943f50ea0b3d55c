"""The columns of a load beside those of a table that exists: what the table lacks, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Set as AbstractSet

import pyarrow as pa

_NUMBERS = {pa.int8(): 8, pa.int16(): 16, pa.int32(): 32, pa.int64(): 64}


def differences(table: pa.Schema, columns: pa.Schema, others: AbstractSet[str]) -> tuple[list[pa.Field], list[str]]:
    """The columns that a table lacks, or that lack fields in it (then with all fields of both), and what does not fit.

    What does not fit: a column of another type, unless the table's holds all its values, and a column that the table
    requires. `others` are columns of the table that files do not have.
    """
    missing: list[pa.Field] = []
    wrong: list[str] = []
    known = {one.name: one for one in table}
    for one in columns:
        if one.name not in known:
            if not _differs_by_case(one.name, known, "", wrong):
                missing.append(pa.field(one.name, one.type))
            continue
        mine = known[one.name]
        kind = _merged(mine.type, one.type, one.name, wrong)
        if kind != mine.type:
            missing.append(pa.field(one.name, kind))
    for name in sorted(known.keys() - others):
        if not known[name].nullable:
            wrong.append(f"{name} is required, and the load may have nulls")
    return missing, wrong


def _differs_by_case(name: str, names: Iterable[str], path: str, wrong: list[str]) -> bool:
    """Whether a new name is one of the table's but for its case; appends to `wrong` if so."""
    other = next((one for one in names if one.lower() == name.lower()), None)
    if other is not None:
        wrong.append(f"{path}{name} differs from {path}{other} by case only, which Spark takes for one")
    return other is not None


def _merged(mine: pa.DataType, theirs: pa.DataType, path: str, wrong: list[str]) -> pa.DataType:
    """The table's type with the fields that are new in `theirs`; appends to `wrong` what does not fit."""
    if pa.types.is_struct(mine) and pa.types.is_struct(theirs):
        fields = list(mine)
        names = {one.name: number for number, one in enumerate(fields)}
        for one in theirs:
            number = names.get(one.name)
            if number is None:
                if not _differs_by_case(one.name, names, f"{path}.", wrong):
                    fields.append(pa.field(one.name, one.type))
            else:
                kind = _merged(fields[number].type, one.type, f"{path}.{one.name}", wrong)
                fields[number] = fields[number].with_type(kind)
        absent = names.keys() - {one.name for one in theirs}
        for one in mine:
            if not one.nullable:
                what = "which the load has not" if one.name in absent else "and the load may have nulls"
                wrong.append(f"{path}.{one.name} is required, {what}")
        return pa.struct(fields)
    if pa.types.is_map(mine) and pa.types.is_map(theirs):
        keys = _merged(mine.key_type, theirs.key_type, f"{path}{{key}}", wrong)
        items = _merged(mine.item_type, theirs.item_type, f"{path}{{}}", wrong)
        if (keys, items) == (mine.key_type, mine.item_type):
            return mine
        return pa.map_(mine.key_field.with_type(keys), mine.item_field.with_type(items))
    if pa.types.is_list(mine) and pa.types.is_list(theirs):
        item = _merged(mine.value_type, theirs.value_type, f"{path}[]", wrong)
        return mine if item == mine.value_type else pa.list_(mine.value_field.with_type(item))
    if not holds(mine, theirs):
        wrong.append(f"{path} is {mine} in the table and {theirs} in the load")
    return mine


def holds(mine: pa.DataType, theirs: pa.DataType) -> bool:
    """Whether a column of the type `mine` holds all values of `theirs`."""
    if mine == theirs:
        return True
    if mine in _NUMBERS and theirs in _NUMBERS:
        return _NUMBERS[mine] >= _NUMBERS[theirs]
    if mine == pa.float64():
        return theirs == pa.float32() or _NUMBERS.get(theirs, 64) <= 32
    if pa.types.is_decimal(mine) and pa.types.is_decimal(theirs):
        return bool(mine.scale >= theirs.scale and mine.precision - mine.scale >= theirs.precision - theirs.scale)
    return False
