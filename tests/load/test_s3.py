"""A load into an object store: moto's S3 server. A run dies at each change that it makes there."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pyarrow.dataset as ds
import pytest
from moto.server import ThreadedMotoServer
from pyarrow.fs import FileSelector, FileSystem, FileType

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import LoadError
from spark_klog.load import files
from spark_klog.load.audit import status
from spark_klog.load.store import ArrowStore
from tests.load.support import Killed, Place, expected, failing, run
from tests.spark.support import create_topic, produce, values
from tests.support.kafka import free_port

_HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of a server, as pyarrow's URIs want it."""
    port = free_port()
    server = ThreadedMotoServer(ip_address=_HOST, port=port, verbose=False)
    server.start()
    yield f"{_HOST}:{port}"
    server.stop()


def _bucket(s3: str, name: str) -> str:
    """The URI of a load in a new bucket."""
    options = f"endpoint_override={quote(f'http://{s3}')}&region=us-east-1&allow_bucket_creation=true"
    uri = f"s3://key:secret@{name}?{options}"
    filesystem, path = FileSystem.from_uri(uri)
    filesystem.create_dir(path)
    return f"s3://key:secret@{name}/out?{options}"


def _seen(uri: str) -> list[Place]:
    """What a plain reader of the bucket sees."""
    filesystem, path = FileSystem.from_uri(uri)
    found = filesystem.get_file_info(FileSelector(path, recursive=True, allow_not_found=True))
    names = [item.path for item in found if item.type == FileType.File and item.path.endswith(".parquet")]
    return _records(filesystem, names)


def _records(filesystem: FileSystem, names: list[str]) -> list[Place]:
    if not names:
        return []
    table = ds.dataset(names, format="parquet", filesystem=filesystem).to_table(["topic", "partition", "offset"])
    return sorted(zip(*(table[name].to_pylist() for name in table.column_names), strict=True))


def _committed(uri: str) -> list[Place]:
    filesystem, _ = FileSystem.from_uri(uri)
    return _records(filesystem, [item.path.removeprefix("s3://") for item in files(uri)])


def _die() -> None:
    raise Killed


@pytest.mark.parametrize("side", [1, -1], ids=["before", "after"])
def test_killed_at_each_change(cluster: EmbeddedCluster, topic: str, s3: str, side: int) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    produce(servers, topic, values(120, partitions=2))
    whole = expected(topic, {0: 60, 1: 60})
    number, died = 0, True
    while died:
        number += 1
        uri = _bucket(s3, f"b{number}{'ab'[side > 0]}")
        try:
            with failing(ArrowStore, side * number, _die):
                run(servers, uri, topic, max_task_records=40)
            died = False
        except Killed:
            pass
        seen = _seen(uri)
        assert len(set(seen)) == len(seen)
        assert set(seen) <= set(whole)
        run(servers, uri, topic, max_task_records=40)
        assert _seen(uri) == _committed(uri) == whole
        assert status(uri).findings == []
    assert number > 8


def test_a_store_that_fails(cluster: EmbeddedCluster, topic: str, s3: str) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, values(10))
    with pytest.raises(LoadError, match="can't be") as found:
        run(
            servers, _bucket(s3, "there").replace("@there", "@missing").replace("allow_bucket_creation=true", ""), topic
        )
    assert "secret" not in str(found.value)
