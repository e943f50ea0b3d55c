"""Streams and writes go on from checkpoints, decisions and tables that each release wrote: see tests/golden."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

import spark_klog
from tests.golden.streams import ONCE, STREAMS, UPSERTED, start_copy, start_upsert, write_once
from tests.golden.support import FIRST, KEEP_ALL, MORE, VERSIONS, unpack
from tests.spark.exactly_once.support import once, read
from tests.spark.exactly_once.test_streams import forget_last
from tests.support.servers.broker import KlogBroker

_SECONDS = 200


def _numbers(count: int) -> Counter[str]:
    return Counter(f'{{"id":{number}}}' for number in range(count))


@pytest.mark.parametrize("version", VERSIONS)
def test_streams_and_writes_go_on(spark: SparkSession, version: str, server_dir: Path) -> None:
    """Two streams have lost the end of their last micro-batch, which is done: Spark runs it again."""
    checkpoints, tables, _ = (unpack(version, name, server_dir) for name in ("checkpoints", "tables", "source"))
    for lost in ("exact", UPSERTED):
        forget_last(checkpoints / lost, "commits")
    with KlogBroker(server_dir, *KEEP_ALL, name="source") as broker:
        servers = broker.bootstrap_servers
        assert [read(servers, to) for to in STREAMS] == [_numbers(FIRST)] * 2
        for to in STREAMS:
            spark_klog.run_available_now(partial(start_copy, spark, servers, checkpoints, to), _SECONDS)
        assert [read(servers, to) for to in STREAMS] == [_numbers(FIRST + MORE)] * 2
        table = tables / UPSERTED
        spark_klog.run_available_now(partial(start_upsert, spark, servers, checkpoints, table), _SECONDS)
        ids = DeltaTable(table).to_pyarrow_table()["id"].to_pylist()
        assert sorted(ids) == list(range(FIRST + MORE))
        write_once(spark, servers)
        assert read(servers, ONCE) == once(5)
