"""Tables of the tests in catalogs and stores that are neither ours nor a mock, each behind a proxy that loses answers.

gateway   Delta in S3 of versitygw
rest      Iceberg's REST catalog, with its tables there
hive      Hive's metastore, with its tables on disk
glue      moto's Glue (the only mock: AWS has no other), with the tables in S3 of versitygw
azurite   Delta, and Iceberg by a catalog in SQLite, in Azure's storage
gcs       the same in Google's
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Literal
from urllib.parse import quote

import pytest
from pyarrow.fs import AzureFileSystem

from tests.load.buckets import bucket
from tests.load.tables import Kind, Lake, make_lake
from tests.support.brokers.tcp_proxy import TcpProxy
from tests.support.servers.catalogs import hive_metastore, rest_catalog
from tests.support.servers.http_proxy import HttpProxy
from tests.support.servers.kafka import HOST, free_port
from tests.support.servers.s3_server import serving_s3
from tests.support.servers.stores import (
    ACCESS_KEY,
    ACCOUNT,
    ACCOUNT_KEY,
    SECRET_KEY,
    Server,
    azure_emulator,
    gcs_emulator,
    s3_gateway,
)

RealPlace = Literal["gateway", "rest", "hive", "glue", "azurite", "gcs"]
#: All of them, with the kind of tables.
REAL: tuple[tuple[Kind, RealPlace], ...] = (
    ("delta", "gateway"),
    ("iceberg", "rest"),
    ("iceberg", "hive"),
    ("iceberg", "glue"),
    ("delta", "azurite"),
    ("iceberg", "azurite"),
    ("delta", "gcs"),
    ("iceberg", "gcs"),
)


class RealLakes:
    """Servers, which are started when a first table is in them; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._numbers = count(1)

    def __enter__(self) -> RealLakes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def make(
        self, kind: Kind, place: RealPlace, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> tuple[Lake, HttpProxy | TcpProxy]:
        """A place for a table, and the proxy before what takes its commits."""
        number = next(self._numbers)
        name, table = f"lake{number}", f"db{number}.clicks"
        if place == "gateway":
            return make_lake(kind, folder, monkeypatch, self.s3.address, name), self.s3
        if place == "rest":
            properties = {"TYPE": "rest", "URI": f"http://{self.rest.address}"}
            return make_lake(kind, folder, monkeypatch, self.s3.address, name, properties, table), self.rest
        if place == "hive":
            proxy = self.hive
            properties = {"TYPE": "hive", "URI": f"thrift://{HOST}:{proxy.port}", "HIVE__HIVE2_COMPATIBLE": "true"}
            return make_lake(kind, folder, monkeypatch, properties=properties, table=table), proxy
        if place == "glue":
            login = {"GLUE__ACCESS_KEY_ID": "key", "GLUE__SECRET_ACCESS_KEY": "secret", "GLUE__REGION": "us-east-1"}
            properties = {"TYPE": "glue", "GLUE__ENDPOINT": f"http://{self.glue.address}", **login}
            return make_lake(kind, folder, monkeypatch, self.s3.address, name, properties, table), self.glue
        return self._in_cloud(kind, place, folder, monkeypatch, name)

    def _in_cloud(
        self, kind: Kind, place: RealPlace, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> tuple[Lake, HttpProxy]:
        if place == "azurite":
            proxy = self.azure
            uri = f"abfs://{ACCOUNT}:{quote(ACCOUNT_KEY, '')}@{proxy.address}/{name}/out?enable_tls=false"
            properties = {
                "WAREHOUSE": f"abfs://{name}/warehouse",
                "ADLS__ACCOUNT_NAME": ACCOUNT,
                "ADLS__ACCOUNT_KEY": ACCOUNT_KEY,
                "ADLS__BLOB_STORAGE_AUTHORITY": proxy.address,
                "ADLS__BLOB_STORAGE_SCHEME": "http",
                "ADLS__DFS_STORAGE_AUTHORITY": proxy.address,
                "ADLS__DFS_STORAGE_SCHEME": "http",
            }
            storage = {
                "azure_storage_account_name": ACCOUNT,
                "azure_storage_account_key": ACCOUNT_KEY,
                "azure_storage_endpoint": f"http://{proxy.address}/{ACCOUNT}",
                "allow_http": "true",
            }
            plain = f"az://{name}/out"
        else:
            proxy = self.gcs
            uri = f"gs://anonymous@{name}/out?scheme=http&endpoint_override={quote(proxy.address, '')}"
            properties = {
                "WAREHOUSE": f"gs://{name}/warehouse",
                "GCS__SERVICE__HOST": f"http://{proxy.address}",
                "GCS__OAUTH2__TOKEN": "any",
                "GCS__OAUTH2__TOKEN_EXPIRES_AT": str(4_000_000_000_000),
            }
            account = {"gcs_base_url": f"http://{proxy.address}", "disable_oauth": True}
            account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
            storage = {"google_service_account_key": json.dumps(account), "allow_http": "true"}
            plain = f"gs://{name}/out"
        if place == "gcs":
            _new_gcs_bucket(proxy.address, name)
        else:
            authorities = {f"{part}_storage_authority": proxy.address for part in ("blob", "dfs")}
            schemes = {f"{part}_storage_scheme": "http" for part in ("blob", "dfs")}
            AzureFileSystem(account_name=ACCOUNT, account_key=ACCOUNT_KEY, **authorities, **schemes).create_dir(name)
        lake = make_lake(kind, folder, monkeypatch, properties=properties)
        if kind == "delta":
            return replace(lake, address=f"delta:{uri}", uri=plain, storage=storage, is_local=False), proxy
        return replace(lake, storage=storage, is_local=False), proxy

    @cached_property
    def s3(self) -> HttpProxy:
        server = self._stack.enter_context(s3_gateway(self._folder / "s3"))
        return self._stack.enter_context(HttpProxy(server.port))

    @cached_property
    def rest(self) -> HttpProxy:
        return self._stack.enter_context(HttpProxy(self.rest_server(self.s3.address).port))

    def rest_server(self, s3: str, vended: Mapping[str, str] = MappingProxyType({})) -> Server:
        """Iceberg's REST catalog, whose tables are in a new bucket of the S3 server at this address.

        With each table it gives out the properties `vended`, and a token that is good for its `seconds`.
        """
        folder = self._folder / f"rest{next(self._numbers)}"
        folder.mkdir(parents=True)
        bucket(s3, folder.name)
        properties = {
            "io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
            "client.region": "us-east-1",
            "s3.endpoint": f"http://{s3}",
            "s3.path-style-access": "true",
            "s3.access-key-id": ACCESS_KEY,
            "s3.secret-access-key": SECRET_KEY,
            **{f"vended.{name}": value for name, value in vended.items()},
        }
        return self._stack.enter_context(rest_catalog(folder, f"s3://{folder.name}/warehouse", properties))

    @cached_property
    def hive(self) -> TcpProxy:
        server = self._stack.enter_context(hive_metastore(self._folder / "hive"))
        return self._stack.enter_context(TcpProxy(free_port(), server.port, seed=1))

    @cached_property
    def glue(self) -> HttpProxy:
        server = self._stack.enter_context(serving_s3())
        return self._stack.enter_context(HttpProxy(int(server.rpartition(":")[2]), "glue"))

    @cached_property
    def azure(self) -> HttpProxy:
        server = self._stack.enter_context(azure_emulator(self._folder / "azure"))
        return self._stack.enter_context(HttpProxy(server.port))

    @cached_property
    def gcs(self) -> HttpProxy:
        server = self._stack.enter_context(gcs_emulator(self._folder / "gcs"))
        return self._stack.enter_context(HttpProxy(server.port, "gcs"))


def _new_gcs_bucket(address: str, name: str) -> None:
    body = f'{{"name": "{name}"}}'.encode()
    request = urllib.request.Request(f"http://{address}/storage/v1/b", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        assert response.status == 200
