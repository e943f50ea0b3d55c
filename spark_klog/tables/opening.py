"""Tables by their addresses: delta:URI, iceberg:CATALOG.NAMESPACE.TABLE."""

from __future__ import annotations

from spark_klog.base.addresses import without_user
from spark_klog.base.extras import require
from spark_klog.errors import ConfigError, LoadError
from spark_klog.tables.table import Table

DELTA, ICEBERG = "delta", "iceberg"
_FORMS = f"{DELTA}:URI or {ICEBERG}:CATALOG.NAMESPACE.TABLE"


def is_table(address: str) -> bool:
    """Whether an address is that of a table, and not a folder's."""
    return format_of(address) in (DELTA, ICEBERG)


def format_of(address: str) -> str:
    """What stands before the colon of an address."""
    return address.partition(":")[0]


def open_table(address: str) -> Table:
    """The table at an address, which may not exist yet; `ConfigError`, `MissingPackage`, `LoadError`."""
    kind, _, place = address.partition(":")
    if kind == DELTA:
        require("A Delta table", "pyarrow", "deltalake")
        from spark_klog.tables.delta import DeltaLakeTable

        return DeltaLakeTable(place)
    if kind == ICEBERG:
        require("An Iceberg table", "pyarrow", "pyiceberg")
        from spark_klog.tables.iceberg import IcebergTable

        return IcebergTable(place)
    raise ConfigError(f"{without_user(address)!r} is not the address of a table: write {_FORMS}")


def existing_table(address: str) -> Table:
    """The table at an address; errors as of `open_table`, and `LoadError` if it does not exist."""
    table = open_table(address)
    if table.schema() is None:
        raise LoadError(f"{table.address} does not exist: name the --table of jobs/batch_load.py")
    return table
