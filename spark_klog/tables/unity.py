"""Delta tables by their names in Unity Catalog: where one is, and keys for its store, which the catalog gives out.

    GET  /api/2.1/unity-catalog/tables/CATALOG.SCHEMA.TABLE, or ?catalog_name=...&schema_name=...
    POST /api/2.1/unity-catalog/temporary-table-credentials {"table_id", "operation": "READ_WRITE"}

The variables of the catalog's address and token are those of deltalake's own uc:// (`_HOSTS`, `_TOKENS`).
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from spark_klog.base.addresses import local_path
from spark_klog.errors import ConfigError, LoadError
from spark_klog.files.keys import KeyedUri, Keys, as_query

SCHEME = "uc://"
_HOSTS = ("UNITY_WORKSPACE_URL", "DATABRICKS_HOST", "DATABRICKS_WORKSPACE_URL")
_TOKENS = ("UNITY_ACCESS_TOKEN", "DATABRICKS_TOKEN", "DATABRICKS_ACCESS_TOKEN")
_API, _SECONDS, _MOST_BYTES = "/api/2.1/unity-catalog", 30, 1 << 25


def unity_location(address: str) -> str:
    """The folder of the table at delta:uc://CATALOG.SCHEMA.TABLE: a path, or a URI with its keys.

    Errors as of `check_unity`; `LoadError` if the catalog has no such table, or one that a load may not write to.
    """
    catalog, name = check_unity(address)
    table = catalog.call(f"/tables/{quote(name)}")
    kind, form = str(table.get("table_type")), str(table.get("data_source_format"))
    if form != "DELTA":
        raise LoadError(f"{address} is a table of format {form}, not of DELTA: name another table")
    if kind != "EXTERNAL":
        raise LoadError(
            f"{address} is of the type {kind}: the catalog itself makes the commits of managed tables, which deltalake "
            "does not know. Name an EXTERNAL table (CREATE TABLE ... USING delta LOCATION ...)"
        )
    location = str(table.get("storage_location"))
    if urlsplit(location).scheme in ("", "file"):
        return local_path(location) or location
    give = _Given(catalog, str(table.get("table_id")), location)
    return KeyedUri(location, give, give())


def check_unity(address: str) -> tuple[_Catalog, str]:
    """The catalog, which is not asked, and the table's name in it; `ConfigError` if either is not given."""
    name = address.partition(SCHEME)[2]
    if len(name.split(".")) != 3 or not all(name.split(".")):
        raise ConfigError(f"{address} must be delta:uc://CATALOG.SCHEMA.TABLE")
    return _catalog(address), name


def tables_of_unity(beginning: str) -> list[str]:
    """The addresses of the external Delta tables of a schema, which the beginning of an address names; `LoadError`."""
    catalog_name, _, rest = beginning.partition(SCHEME)[2].partition(".")
    schema, dot, _ = rest.partition(".")
    if not dot:
        raise ConfigError(f"{beginning}: write the names of the catalog and the schema as they are")
    catalog, names, page = _catalog(beginning), list[str](), ""
    while True:
        query = {"catalog_name": catalog_name, "schema_name": schema, **({"page_token": page} if page else {})}
        answer = catalog.call(f"/tables?{urlencode(query)}")
        for each in answer.get("tables") or ():
            if (each.get("table_type"), each.get("data_source_format")) == ("EXTERNAL", "DELTA"):
                names.append(f"delta:{SCHEME}{catalog_name}.{schema}.{each['name']}")
        page = answer.get("next_page_token") or ""
        if not page:
            return names


def _catalog(address: str) -> _Catalog:
    host, token = (next(filter(None, map(os.environ.get, names)), "") for names in (_HOSTS, _TOKENS))
    if not host:
        raise ConfigError(f"{address}: set {_HOSTS[0]} or {_HOSTS[1]} to the URL of Unity Catalog")
    return _Catalog(address, (host if "://" in host else f"https://{host}").rstrip("/"), token)


@dataclass(frozen=True)
class _Catalog:
    address: str
    url: str
    token: str

    def call(self, path: str, body: Any = None) -> dict[str, Any]:
        """The JSON of an answer; `LoadError`, which names the table."""
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{_API}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as response:
                value = json.loads(response.read(_MOST_BYTES))  # a list of tables has all their columns
        except urllib.error.HTTPError as error:
            reason = " ".join(error.read(500).decode(errors="replace").split())
            raise LoadError(f"{self.address}: {self.url} answers {error.code}: {reason or error.reason}") from None
        except (OSError, ValueError) as error:
            raise LoadError(f"{self.address}: {self.url} can't be asked: {error}") from None
        if not isinstance(value, dict):
            raise LoadError(f"{self.address}: {self.url} answers with no JSON object")
        return value


@dataclass(frozen=True)
class _Given:
    """Asks the catalog for the keys of a table, on any host."""

    catalog: _Catalog
    table_id: str
    location: str

    def __call__(self) -> Keys:
        from pyarrow import fs

        asked = {"table_id": self.table_id, "operation": "READ_WRITE"}
        given = self.catalog.call("/temporary-table-credentials", asked)
        scheme, place, *_ = urlsplit(self.location)
        end = given.get("expiration_time")
        if scheme in ("s3", "s3a") and (keys := given.get("aws_temp_credentials")):
            filesystem: Any = fs.S3FileSystem(
                access_key=keys.get("access_key_id"),
                secret_key=keys.get("secret_access_key"),
                session_token=keys.get("session_token"),
                region=os.environ.get("AWS_REGION") or None,
                endpoint_override=os.environ.get("AWS_ENDPOINT_URL") or None,
            )
        elif scheme in ("abfs", "abfss") and (keys := given.get("azure_user_delegation_sas")):
            account = place.rpartition("@")[2].partition(".")[0]
            filesystem = fs.AzureFileSystem(account_name=account, sas_token=as_query(keys.get("sas_token", "")))
        else:
            raise LoadError(
                f"{self.catalog.address}: the catalog gives no keys for {self.location} that a load can use: it takes "
                "those for s3:// and abfss://"
            )
        return Keys.until(filesystem, int(end) if end else None)
