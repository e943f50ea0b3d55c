"""Where an Iceberg table has its files: the properties of its catalog as what opens a store, with keys that may end.

A catalog that gives out keys (REST, as Polaris, Unity and Lakekeeper have it) says with a table what they are. Tasks
have them from the driver, and ask the catalog themselves before they end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.io import PY_IO_IMPL
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.typedef import EMPTY_DICT

from spark_klog.files.keys import KeyedUri, Keys, as_query
from spark_klog.files.store_requests import StoreRequests, azure_remover

Properties = Mapping[str, Any]
_S3, _GCS, _AZURE = ("s3", "s3a", "s3n"), ("gs", "gcs"), ("abfs", "abfss", "wasb", "wasbs")
#: By scheme: the property of a key that ends, and the property that says when.
_ENDING: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(_S3, ("s3.session-token", "s3.session-token-expires-at-ms")),
    **dict.fromkeys(_GCS, ("gcs.oauth2.token", "gcs.oauth2.token-expires-at")),
    **dict.fromkeys(_AZURE, ("adls.sas-token", "adls.sas-token-expires-at-ms")),
}
#: How long a REST catalog may take for an answer.
_ANSWER_SECONDS = 60.0
#: What a catalog's properties may be, to be of use on another host.
_PORTABLE = (str, int, float, bool, dict, list, type(None))


def opened(name: str, options: Properties) -> Catalog:
    """A catalog of pyiceberg's configuration, and of these properties; errors of any package."""
    catalog = load_catalog(name, **options)
    catalog.properties.setdefault(PY_IO_IMPL, f"{__name__}.{StoreIO.__name__}")
    if (session := getattr(catalog, "_session", None)) is not None:  # of REST, which waits for ever
        session.request = partial(session.request, timeout=_ANSWER_SECONDS)
    return catalog


def store_uri(location: str, properties: Properties, catalog: Catalog, identifier: Sequence[str]) -> str:
    """The URI of a table's folder, as `open_folder` takes it: with the endpoint and the keys of the properties.

    Of keys that end it is a `KeyedUri`, which has the catalog asked for others.
    """
    scheme = urlsplit(location).scheme
    if scheme in _ENDING and _value(properties, _ENDING[scheme][0]) is not None:
        known = {name: value for name, value in catalog.properties.items() if isinstance(value, _PORTABLE)}
        give = _Given(catalog.name, known, tuple(identifier), location)
        return KeyedUri(_quoted(location), give, _keys(location, properties))
    return _uri(location, properties)


@dataclass(frozen=True)
class _Given:
    """Asks a catalog for the keys of a table, on any host."""

    name: str
    properties: Properties
    identifier: tuple[str, ...]
    location: str

    def __call__(self) -> Keys:
        catalog = opened(self.name, self.properties)
        try:
            return _keys(self.location, table_place(catalog, self.identifier)[1])
        finally:
            catalog.close()


def table_place(catalog: Catalog, identifier: tuple[str, ...]) -> tuple[str, Properties]:
    """The location of a table, also of one that is yet to be created, and the properties of its store.

    As errors of any catalog's package.
    """
    try:
        table = catalog.load_table(identifier)
    except NoSuchTableError:
        staged = catalog.create_table_transaction(identifier, Schema())
        return staged.table_metadata.location, staged._table.io.properties
    return table.metadata.location, table.io.properties


class StoreIO(PyArrowFileIO):
    """pyiceberg's files of pyarrow, with what they lack in Azure.

    A location may be abfss://CONTAINER@ACCOUNT/..., a shared access signature may be without its "?", and a file is
    removed as `azure_remover` says.
    """

    def __init__(self, properties: Properties = EMPTY_DICT) -> None:
        signed = {name: as_query(value) for name, value in properties.items() if name.startswith("adls.sas-token")}
        super().__init__({**properties, **signed})
        self._removers: dict[str, StoreRequests | None] = {}

    @staticmethod
    def parse_location(location: str, properties: Properties = EMPTY_DICT) -> tuple[str, str, str]:
        scheme, place, path = PyArrowFileIO.parse_location(location, dict(properties))
        container, _, account = place.partition("@")
        if scheme not in _AZURE or not account:
            return scheme, place, path
        return scheme, place, container + path.removeprefix(place)

    def delete(self, location: Any) -> None:
        scheme, bucket, path = self.parse_location(str(location), self.properties)
        container, _, key = path.partition("/")
        if scheme in _AZURE and container not in self._removers:
            self._removers[container] = azure_remover(self.fs_by_scheme(scheme, bucket), container, "")
        requests = self._removers.get(container) if scheme in _AZURE else None
        if requests is None:
            super().delete(location)
        else:
            requests.remove(key)


def renewing(table: Table, uri: str) -> None:
    """Let a table read and write its files with keys that have not ended."""
    if isinstance(uri, KeyedUri):
        table.io = _RenewingIO(table.io.properties, uri)


class _RenewingIO(StoreIO):
    def __init__(self, properties: Properties, uri: KeyedUri) -> None:
        super().__init__(properties)
        self.fs_by_scheme = _Opener(uri)


@dataclass(frozen=True)
class _Opener:
    uri: KeyedUri

    def __call__(self, _scheme: str, _bucket: str | None = None) -> Any:
        return self.uri.filesystem()


def _value(properties: Properties, name: str) -> str | None:
    """Of a property, which Azure's may have by account: adls.sas-token.ACCOUNT.blob.core.windows.net."""
    values = (value for known, value in properties.items() if known == name or known.startswith(f"{name}."))
    return next(values, None)


def _keys(location: str, properties: Properties) -> Keys:
    scheme, bucket, *_ = urlsplit(location)
    name, end = _ENDING[scheme]
    known = {**properties, name: _value(properties, name)}
    if scheme in _AZURE and "adls.account-name" not in known:  # abfss://CONTAINER@ACCOUNT.dfs.core.windows.net
        known["adls.account-name"] = bucket.rpartition("@")[2].partition(".")[0]
    end_ms = _value(properties, end)
    return Keys.until(StoreIO(known).fs_by_scheme(scheme, bucket), None if end_ms is None else int(end_ms))


def _uri(location: str, properties: Properties) -> str:
    """The location as a URI of pyarrow's file systems."""
    parts = urlsplit(location)
    options: dict[str, str | None] = {}
    if parts.scheme in _S3:
        key, secret = properties.get("s3.access-key-id"), properties.get("s3.secret-access-key")
        user = f"{quote(key, '')}:{quote(secret, '')}@" if key and secret else ""
        options = {"endpoint_override": properties.get("s3.endpoint"), "region": properties.get("s3.region")}
        place = f"s3://{user}{parts.netloc}{quote(parts.path)}"
    elif parts.scheme in _AZURE and (key := properties.get("adls.account-key")):
        container, _, host = parts.netloc.partition("@")
        account = properties.get("adls.account-name") or host.partition(".")[0]
        place = f"abfss://{container}:{quote(key, '')}@{host or f'{account}.dfs.core.windows.net'}{quote(parts.path)}"
        if authority := properties.get("adls.blob-storage-authority"):
            options = {"enable_tls": "false" if properties.get("adls.blob-storage-scheme") == "http" else None}
            place = f"abfs://{quote(account, '')}:{quote(key, '')}@{authority}/{container}{quote(parts.path)}"
    else:
        return _quoted(location) if parts.scheme in (*_GCS, *_AZURE) else location
    query = "&".join(f"{name}={quote(value, '')}" for name, value in options.items() if value)
    return f"{place}?{query}" if query else place


def _quoted(location: str) -> str:
    """A location, which is no URL: what stands in it is the name of files."""
    scheme, _, rest = location.partition("://")
    bucket, slash, path = rest.partition("/")
    return f"{scheme}://{bucket}{slash}{quote(path)}"
