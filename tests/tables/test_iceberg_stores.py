"""The place of an Iceberg table's files, by the properties of its catalog."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog

from spark_klog.errors import LoadError
from spark_klog.files.keys import KeyedUri
from spark_klog.tables import iceberg_stores
from spark_klog.tables.iceberg import IcebergTable
from spark_klog.tables.iceberg_stores import StoreIO, store_uri

_ACCOUNT = "abfss://c@acc.dfs.core.windows.net/w/t"


@pytest.fixture
def catalog(tmp_path: Path) -> SqlCatalog:
    return SqlCatalog("c", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=str(tmp_path))


@pytest.mark.parametrize(
    ("location", "properties", "uri"),
    [
        ("file:///w/t", {"s3.access-key-id": "k", "s3.secret-access-key": "s"}, "file:///w/t"),
        (
            "s3a://b/w/t",
            {"s3.access-key-id": "k", "s3.secret-access-key": "s/", "s3.endpoint": "http://h:1", "s3.region": "r"},
            "s3://k:s%2F@b/w/t?endpoint_override=http%3A%2F%2Fh%3A1&region=r",
        ),
        ("s3://b/w/t", {}, "s3://b/w/t"),
        ("gs://b/w/t", {}, "gs://b/w/t"),
        ("gs://b/a%20b/t#?", {}, "gs://b/a%2520b/t%23%3F"),
        (_ACCOUNT, {}, _ACCOUNT),
        (_ACCOUNT, {"adls.account-key": "k/="}, _ACCOUNT.replace("c@", "c:k%2F%3D@")),
        (
            "abfs://c/w/t",
            {"adls.account-key": "k", "adls.account-name": "acc"},
            "abfss://c:k@acc.dfs.core.windows.net/w/t",
        ),
        (
            "abfs://c/w/t",
            {
                "adls.account-key": "k",
                "adls.account-name": "acc",
                "adls.blob-storage-authority": "h:1",
                "adls.blob-storage-scheme": "http",
            },
            "abfs://acc:k@h:1/c/w/t?enable_tls=false",
        ),
    ],
)
def test_static_keys(catalog: SqlCatalog, location: str, properties: dict[str, Any], uri: str) -> None:
    made = store_uri(location, properties, catalog, ("ns", "t"))
    assert (made, isinstance(made, KeyedUri)) == (uri, False)


@pytest.mark.parametrize(
    ("location", "properties", "path", "known"),
    [
        (
            "s3://b/w/t",
            {"s3.session-token": "x", "s3.access-key-id": "k", "s3.secret-access-key": "s", "s3.region": "r"},
            "b/w/t",
            {"session_token": "x", "access_key": "k"},
        ),
        (
            _ACCOUNT,
            {"adls.sas-token.acc.dfs.core.windows.net": "sv=1&sig=2"},
            "c/w/t",
            {"account_name": "acc", "sas_token": "?sv=1&sig=2"},
        ),
        (
            "gs://b/w/t",
            {"gcs.oauth2.token": "x", "gcs.oauth2.token-expires-at": "4000000000000"},
            "b/w/t",
            {"access_token": "x"},
        ),
    ],
)
def test_keys_that_end(
    catalog: SqlCatalog, location: str, properties: dict[str, Any], path: str, known: dict[str, str]
) -> None:
    """Another process has them, and without a catalog it goes on with them."""
    uri = pickle.loads(pickle.dumps(store_uri(location, properties, catalog, ("ns", "t"))))  # noqa: S301
    assert (uri, uri.path) == (location, path)
    filesystem = uri.filesystem()
    assert filesystem is uri.filesystem()
    assert known.items() <= filesystem.__reduce__()[1][0].items()
    assert uri.filesystem(anew=True) is filesystem, "the catalog has no such namespace"


@pytest.mark.parametrize("location", ["s3://b/my%20w/t", "abfss://c@acc.dfs.core.windows.net/my%20w/t"])
def test_a_location_is_no_url(catalog: SqlCatalog, location: str) -> None:
    """A load's files are where those who read the table look for them."""
    properties = {f"s3.{name}": "x" for name in ("session-token", "access-key-id", "secret-access-key", "region")}
    properties["adls.sas-token"] = "x"
    uri = store_uri(location, properties, catalog, ("ns", "t"))
    assert isinstance(uri, KeyedUri)
    assert uri.path == StoreIO.parse_location(location)[2]


def test_when_keys_are_renewed(catalog: SqlCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    properties = {"s3.session-token": "x", "s3.access-key-id": "k", "s3.secret-access-key": "s", "s3.region": "r"}
    for seconds, at in ((90, 1060.0), (3600, 4300.0), (-5, 1000.0), (None, 1300.0)):
        end = {} if seconds is None else {"s3.session-token-expires-at-ms": str(1_000_000 + seconds * 1000)}
        uri = store_uri("s3://b/t", {**properties, **end}, catalog, ("ns", "t"))
        assert isinstance(uri, KeyedUri)
        assert uri._keys.renew_at == at


def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error at once: it would not come."""
    options = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": str(tmp_path)}
    table = IcebergTable("c.ns.t", options)

    def load(*_: Any) -> None:
        raise ModuleNotFoundError("No module named 'adlfs'")

    monkeypatch.setattr(SqlCatalog, "load_table", load)
    began = time.monotonic()
    with pytest.raises(LoadError, match="No module named 'adlfs'"):
        table._trying(table._table, "read")
    assert time.monotonic() - began < 5
    assert iceberg_stores.opened("c", options).properties["py-io-impl"].endswith(".StoreIO")
