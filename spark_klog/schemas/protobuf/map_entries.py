"""Entries of maps whose key comes again: the last one counts, in Protobuf."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def has_maps(kind: pa.DataType) -> bool:
    """Whether a type is a map, or has one in it."""
    if pa.types.is_map(kind):
        return True
    if pa.types.is_struct(kind):
        return any(has_maps(field.type) for field in kind)
    return pa.types.is_list(kind) and has_maps(kind.value_type)


def with_last_entries(values: pa.Array) -> pa.Array:
    """The values, without the entries of maps whose key a later one has. `values` are whole, and no slice."""
    kind = values.type
    if not has_maps(kind):
        return values
    validity = values.buffers()[0]
    if pa.types.is_struct(kind):
        children = [with_last_entries(values.field(index)) for index in range(kind.num_fields)]
        return pa.Array.from_buffers(kind, len(values), [validity], values.null_count, children=children)
    offsets = values.buffers()[1]
    if pa.types.is_list(kind):
        children = [with_last_entries(values.values)]
        return pa.Array.from_buffers(kind, len(values), [validity, offsets], values.null_count, children=children)
    keys, items = values.keys, with_last_entries(values.items)
    ends = np.frombuffer(offsets, np.int32, len(values) + 1)
    kept = _last(keys, ends)
    if kept is not None:
        counts = np.concatenate(([0], np.cumsum(kept, dtype=np.int32)))
        offsets = pa.py_buffer(counts[ends].astype(np.int32))
        mask = pa.array(kept)
        keys, items = keys.filter(mask), items.filter(mask)
    entries = pa.StructArray.from_arrays([keys, items], fields=[kind.key_field, kind.item_field])
    return pa.Array.from_buffers(kind, len(values), [validity, offsets], values.null_count, children=[entries])


def _last(keys: pa.Array, ends: np.ndarray[tuple[int], np.dtype[np.int32]]) -> np.ndarray | None:
    """Which entries are the last of their map with their key; None if all are."""
    sizes = np.diff(ends)
    if not len(sizes) or sizes.max() < 2:
        return None
    codes = keys.dictionary_encode().indices.to_numpy().astype(np.int64)
    places = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes) * (int(codes.max()) + 1) + codes
    # the first in reverse order
    _, found = np.unique(places[::-1], return_index=True)
    if len(found) == len(places):
        return None
    kept = np.zeros(len(places), np.bool_)
    kept[len(places) - 1 - found] = True
    return kept
