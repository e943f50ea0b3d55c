"""Tables of the tests: on a local disk or in a store, and what several readers find in them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.io import ARROW_FILE_IO
from pyiceberg.utils.config import Config

from tests.load.buckets import bucket
from tests.load.support import Place, expected
from tests.support.spark.spark_tables import Kind, SparkTables

CATALOG = "tests"
NAME = "db.clicks"


@dataclass(frozen=True)
class Lake:
    """A table that may not exist yet; `environment` has what a process needs to open its address."""

    kind: Kind
    address: str
    environment: Mapping[str, str]
    #: The folder of Iceberg's catalog.
    warehouse: Path
    #: The folder of a Delta table, as deltalake and Polars take it.
    uri: str = ""
    storage: Mapping[str, str] = field(default_factory=dict)
    is_local: bool = True
    #: Of Iceberg's table in its catalog.
    name: str = NAME

    @property
    def catalog(self) -> Catalog:
        prefix = f"PYICEBERG_CATALOG__{CATALOG.upper()}__"
        names = {key.removeprefix(prefix): value for key, value in self.environment.items()}
        options = {name.lower().replace("__", ".").replace("_", "-"): value for name, value in names.items()}
        return load_catalog(CATALOG, **{"py-io-impl": ARROW_FILE_IO, **options})

    def exists(self) -> bool:
        if self.kind == "delta":
            return DeltaTable.is_deltatable(self.uri, dict(self.storage))
        try:
            return bool(self.catalog.load_table(self.name))
        except NoSuchTableError:
            return False

    def readers(self) -> dict[str, Callable[[], pa.Table]]:
        """Readers of all columns by their names, that know nothing of the loader."""
        readers: dict[str, Callable[[], pa.Table]]
        if self.kind == "delta":
            storage = dict(self.storage) or None
            readers = {
                "deltalake": lambda: DeltaTable(self.uri, storage_options=storage).to_pyarrow_table(),
                "polars": lambda: pl.read_delta(self.uri, storage_options=storage).to_arrow(),
            }
        else:
            readers = {
                "pyiceberg": lambda: self.catalog.load_table(self.name).scan().to_arrow(),
                "polars": self._by_polars,
            }
        if self.is_local:
            readers["duckdb"] = self._by_duckdb
        return readers

    def _by_polars(self) -> pa.Table:
        stored = self.catalog.load_table(self.name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a package of its own would plan the scan more quickly
            return pl.scan_iceberg(stored, storage_options=dict(self.storage) or None).collect().to_arrow()

    def data_files(self) -> list[str]:
        """The files of the current table, with their paths or URIs."""
        if self.kind == "delta":
            return DeltaTable(self.uri, storage_options=dict(self.storage) or None).file_uris()
        files = self.catalog.load_table(self.name).scan().plan_files()
        return [item.file.file_path.removeprefix("file://") for item in files]

    def _by_duckdb(self) -> pa.Table:
        """Its reader of Parquet: its extensions for tables come from a registry of its own."""
        if not (files := self.data_files()):
            return pa.table({name: [] for name in ("topic", "partition", "offset")})
        with duckdb.connect() as connection:
            query = "SELECT * FROM read_parquet($files, hive_partitioning=false, union_by_name=true)"
            return connection.sql(query, params={"files": files}).to_arrow_table()


def places(table: pa.Table) -> list[Place]:
    """(topic, partition, offset) of all rows, sorted."""
    return sorted(zip(*(table[name].to_pylist() for name in ("topic", "partition", "offset")), strict=True))


def check_each_once(lake: Lake, topic: str, sent: int) -> int:
    """No reader finds a record twice, and none of a partition is missing before its last one; how many there are."""
    if not lake.exists():
        return 0
    seen = {name: places(read()) for name, read in lake.readers().items()}
    first = next(iter(seen.values()))
    assert all(other == first for other in seen.values())
    counts = Counter(partition for _, partition, _ in first)
    assert first == expected(topic, dict(counts))
    assert counts.total() <= sent
    return counts.total()


def by_spark(lake: Lake, folder: Path) -> list[Place]:
    """(topic, partition, offset) of all rows, sorted, as Spark with the real jars has them. For local tables."""
    name = f"delta.`{lake.uri}`" if lake.kind == "delta" else f"{CATALOG}.{NAME}"
    with SparkTables(lake.kind, folder / "spark", CATALOG, lake.warehouse) as spark:
        return places(spark.sql(f"SELECT topic, partition, offset FROM {name}"))


def make_lake(
    kind: Kind,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    s3: str = "",
    name: str = "lake",
    properties: Mapping[str, str] = MappingProxyType({}),
    table: str = NAME,
) -> Lake:
    """A place for a table in a folder, or in a new bucket of the S3 server at this address.

    `properties` are of Iceberg's catalog, by their names in variables, instead of those of one in SQLite.
    """
    warehouse = folder / "warehouse"
    warehouse.mkdir(parents=True, exist_ok=True)
    uri, storage, address = str(folder / "table"), {}, f"delta:{folder / 'table'}"
    catalog: dict[str, Any] = {"URI": f"sqlite:///{warehouse / 'catalog.db'}", "WAREHOUSE": str(warehouse)}
    if s3:
        address = f"delta:{bucket(s3, name)}"
        uri, catalog["WAREHOUSE"] = f"s3://{name}/out", f"s3://{name}/warehouse"
        login = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        storage = {**login, "AWS_ENDPOINT_URL": f"http://{s3}", "AWS_ALLOW_HTTP": "true"}
        catalog |= {"S3__ENDPOINT": f"http://{s3}", "S3__REGION": "us-east-1"}
        catalog |= {"S3__ACCESS_KEY_ID": "key", "S3__SECRET_ACCESS_KEY": "secret"}
    catalog |= properties
    if kind == "delta":
        return Lake(kind, address, {}, warehouse, uri, storage, not s3)
    environment = {f"PYICEBERG_CATALOG__{CATALOG.upper()}__{name}": value for name, value in catalog.items()}
    environment.setdefault(f"PYICEBERG_CATALOG__{CATALOG.upper()}__TYPE", "sql")
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # it was read at the first import
    return Lake(kind, f"iceberg:{CATALOG}.{table}", environment, warehouse, "", storage, not s3, table)
