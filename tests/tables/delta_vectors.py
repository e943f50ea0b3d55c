"""Deletion vectors of Delta tables, written by hand: deltalake reads them, and writes none.

    file     version (1), size (4, big endian), vector, CRC-32 of it (4, big endian)
    vector   magic 1681511377, number of bitmaps (8), and of each the upper half of its numbers (4) and the bitmap

Bitmaps are Roaring's portable ones, here of one array. See Delta's PROTOCOL.md, "Deletion Vector Format".
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

_MAGIC, _COOKIE = 1681511377, 12346
_HEADER_SIZE = 16


def delete_by_vector(table: Path, file: str, rows: Sequence[int]) -> None:
    """Commit a deletion vector for a file with no vector; the rows are less than 65,536."""
    values = struct.pack(f"<{len(rows)}H", *sorted(rows))
    bitmap = struct.pack("<IIHHI", _COOKIE, 1, 0, len(rows) - 1, _HEADER_SIZE) + values
    vector = struct.pack("<IQI", _MAGIC, 1, 0) + bitmap
    place = table / "vector.bin"
    place.write_bytes(b"\1" + struct.pack(">I", len(vector)) + vector + struct.pack(">I", zlib.crc32(vector)))
    log = table / "_delta_log"
    actions = [json.loads(line) for each in sorted(log.glob("*.json")) for line in each.read_text().splitlines()]
    path = Path(file).relative_to(table).as_posix()
    [add] = [one["add"] for one in actions if "add" in one and one["add"]["path"] == path]
    of_vector = {
        "storageType": "p",
        "pathOrInlineDv": place.as_uri(),
        "offset": 1,
        "sizeInBytes": len(vector),
        "cardinality": len(rows),
    }
    features = ["deletionVectors"]
    made = [
        {
            "protocol": {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": features,
                "writerFeatures": features,
            }
        },
        {"remove": {"path": path, "dataChange": True, "deletionTimestamp": add["modificationTime"]}},
        {"add": {**add, "deletionVector": of_vector}},
    ]
    version = len(list(log.glob("*.json")))
    (log / f"{version:020}.json").write_text("\n".join(map(json.dumps, made)))
