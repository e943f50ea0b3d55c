"""Tables by their addresses: delta:URI, delta:uc://CATALOG.SCHEMA.TABLE, iceberg:CATALOG.NAMESPACE.TABLE."""

from __future__ import annotations

from spark_klog.base.addresses import without_user
from spark_klog.base.extras import packages_at, require
from spark_klog.errors import ConfigError, LoadError
from spark_klog.tables.table import Table

#: The command that loads, for messages.
LOADING = "python -m spark_klog.cli.jobs.batch_load"
_DELTA, _ICEBERG = "delta", "iceberg"
_UNITY = f"{_DELTA}:uc://"
_FORMS = f"{_DELTA}:URI, {_UNITY}CATALOG.SCHEMA.TABLE or {_ICEBERG}:CATALOG.NAMESPACE.TABLE"


def is_table(address: str) -> bool:
    """Whether an address is that of a table, and not a folder's."""
    return address.partition(":")[0] in (_DELTA, _ICEBERG)


def takes_plain_names(address: str) -> bool:
    """Whether names in an address are of letters, digits and _ alone, as a catalog's: dots separate namespaces."""
    return address.partition(":")[0] == _ICEBERG or address.startswith(_UNITY)


def open_table(address: str) -> Table:
    """The table at an address, which may not exist yet; `ConfigError`, `MissingPackage`, `LoadError`."""
    kind, _, place = address.partition(":")
    if kind == _DELTA:
        require("A Delta table", *packages_at(address))
        from spark_klog.tables.delta import DeltaLakeTable

        return DeltaLakeTable(place)
    if kind == _ICEBERG:
        require("An Iceberg table", *packages_at(address))
        from spark_klog.tables.iceberg import IcebergTable

        return IcebergTable(place)
    raise ConfigError(f"{without_user(address)!r} is not the address of a table: write {_FORMS}")


def check_address(address: str) -> None:
    """Raise `ConfigError` for what can't be the address of a table; `MissingPackage`. No catalog is asked."""
    if address.startswith(_UNITY):
        require("A Delta table", *packages_at(address))
        from spark_klog.tables.unity import check_unity

        check_unity(address)
    else:
        open_table(address)


def kind_and_folder(address: str) -> tuple[str, str]:
    """What precedes the folder in the address of a table that is named by it, and the folder; "" if that is all."""
    kind, colon, folder = address.partition(":")
    return (f"{_DELTA}{colon}", folder) if kind == _DELTA else ("", address)


def catalog_tables(beginning: str) -> list[str]:
    """The addresses of the tables in a catalog's namespaces that the beginning of an address names; `LoadError`."""
    if beginning.startswith(_UNITY):
        require("A Delta table", *packages_at(beginning))
        from spark_klog.tables.unity import tables_of_unity

        return tables_of_unity(beginning)
    require("An Iceberg table", *packages_at(beginning))
    from spark_klog.tables.iceberg import tables_below

    return [f"{_ICEBERG}:{name}" for name in tables_below(beginning.partition(":")[2])]


def named_table(name: str, folder: str) -> Table:
    """The table whose journal is in a folder and has this `journal_name`; errors as of `open_table`."""
    return open_table(name if ":" in name else f"{name}:{folder}")


def existing_table(address: str) -> Table:
    """The table at an address; errors as of `open_table`, and `LoadError` if it does not exist."""
    table = open_table(address)
    if table.schema() is None:
        raise LoadError(
            f"{table.address}: no table yet, nothing is loaded; the first `{LOADING}` with records makes it"
        )
    return table
