"""What the maker of golden directories and their tests share."""

from __future__ import annotations

import json
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.spark.spark_tables import Kind

GOLDEN = Path(__file__).parent
#: Of the releases that wrote golden directories.
VERSIONS = sorted(path.name for path in GOLDEN.iterdir() if (path / "expected.json").exists())
#: The topic that loads, streams and the mirror read; its records have the values {"id": N}, N in partition N % 2. Its
#: first records were read by all of them, what follows by none.
NUMBERS, PARTITIONS, FIRST, MORE = "numbers", 2, 40, 10
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
#: Groups: with a static member of either protocol, and one whose offsets were set.
CLASSIC, CONSUMER, SIMPLE = "classic-group", "consumer-group", "simple-group"
#: The folder of tables: Iceberg's metadata have absolute paths, which this one makes paths of the current directory.
TABLES = Path("/proc/self/cwd/tables")
KINDS: tuple[Kind, ...] = ("delta", "iceberg")
#: Nothing expires, no member and no transaction for its age: golden directories are old.
KEEP_ALL = tuple(
    word
    for setting in (
        "offsets.retention.minutes=2147483647",
        "transactional.id.expiration.ms=2147483647",
        "transaction.abort.timed.out.transaction.cleanup.interval.ms=2147483647",
        "group.consumer.session.timeout.ms=1800000",
        "log.segment.bytes=1048576",
    )
    for word in ("--set", setting)
)
_CLICK = '{"type":"record","name":"Number","fields":[{"name":"id","type":"long"}%s]}'
#: What is registered, in order: the ids are 1 to 4.
SCHEMAS: list[tuple[str, dict[str, Any]]] = [
    ("numbers-value", {"schema": _CLICK % ""}),
    ("numbers-value", {"schema": _CLICK % ',{"name":"more","type":"string","default":""}'}),
    ("place", {"schema": '{"type":"object"}', "schemaType": "JSON"}),
    ("gone-value", {"schema": '"string"'}),
]


def ask_registry(url: str, path: str, body: Any = None, method: str = "") -> Any:
    """Send a request to a schema registry; the JSON that it answers."""
    data = None if body is None else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def unpack(version: str, name: str, folder: Path) -> Path:
    """A copy of a golden directory."""
    with tarfile.open(GOLDEN / version / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def expected(version: str) -> dict[str, Any]:
    """What the maker has noted."""
    found: dict[str, Any] = json.loads((GOLDEN / version / "expected.json").read_text())
    return found
