"""Loads in buckets of an S3 server: their URIs, and the records that readers find there."""

from __future__ import annotations

from urllib.parse import quote

import pyarrow.dataset as ds
from pyarrow.fs import FileSelector, FileSystem, FileType

from spark_klog.load import files
from tests.load.support import Place


def bucket(s3: str, name: str) -> str:
    """Create a bucket and return the URI of a load in it."""
    options = f"endpoint_override={quote(f'http://{s3}')}&region=us-east-1&allow_bucket_creation=true"
    uri = f"s3://key:secret@{name}?{options}"
    filesystem, path = FileSystem.from_uri(uri)
    filesystem.create_dir(path)
    return f"s3://key:secret@{name}/out?{options}"


def seen(uri: str) -> list[Place]:
    """Records that a plain reader of the bucket sees, committed or not."""
    filesystem, path = FileSystem.from_uri(uri)
    found = filesystem.get_file_info(FileSelector(path, recursive=True, allow_not_found=True))
    names = [item.path for item in found if item.type == FileType.File and item.path.endswith(".parquet")]
    return _records(filesystem, names)


def _records(filesystem: FileSystem, names: list[str]) -> list[Place]:
    if not names:
        return []
    table = ds.dataset(names, format="parquet", filesystem=filesystem).to_table(["topic", "partition", "offset"])
    return sorted(zip(*(table[name].to_pylist() for name in table.column_names), strict=True))


def committed(uri: str) -> list[Place]:
    filesystem, _ = FileSystem.from_uri(uri)
    return _records(filesystem, [item.path.removeprefix("s3://") for item in files(uri)])
