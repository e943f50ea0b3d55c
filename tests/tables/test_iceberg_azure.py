"""pyiceberg's files in Azurite: locations as Spark writes them, signatures as catalogs give them, removals."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from urllib.parse import quote

import pytest
from pyarrow.fs import AzureFileSystem

from spark_klog.tables.iceberg_stores import StoreIO
from tests.support.servers.stores import ACCOUNT, ACCOUNT_KEY, azure_emulator

pytestmark = [pytest.mark.peer, pytest.mark.test_all("client")]
_CONTAINERS = ("meta", "data")
_VERSION = "2020-02-10"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The properties of a store with two containers, without a key."""
    with azure_emulator(tmp_path_factory.mktemp("azure")) as server:
        place = dict.fromkeys(("blob-storage-authority", "dfs-storage-authority"), server.address)
        place |= dict.fromkeys(("blob-storage-scheme", "dfs-storage-scheme"), "http")
        known = {name.replace("-", "_"): value for name, value in place.items()}
        filesystem = AzureFileSystem(ACCOUNT, account_key=ACCOUNT_KEY, **known)
        for container in _CONTAINERS:
            filesystem.create_dir(container)
        yield {"adls.account-name": ACCOUNT, **{f"adls.{name}": value for name, value in place.items()}}


def _signature() -> str:
    """A shared access signature of the account, without a "?", as catalogs give them out."""
    end = (datetime.now(timezone.utc) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    text = "\n".join([ACCOUNT, "rwdlac", "b", "sco", "", end, "", "https,http", _VERSION, ""])
    signed = hmac.new(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256).digest()
    options = f"sv={_VERSION}&ss=b&srt=sco&sp=rwdlac&se={quote(end, '')}&spr=https,http"
    return f"{options}&sig={quote(base64.b64encode(signed).decode(), '')}"


@pytest.mark.parametrize("key", ["account key", "signature", "signature with a mark"])
@pytest.mark.parametrize("form", ["abfs://{}", f"abfss://{{}}@{ACCOUNT}.dfs.core.windows.net"])
def test_files(store: dict[str, str], key: str, form: str) -> None:
    keys = {
        "account key": {"adls.account-key": ACCOUNT_KEY},
        "signature": {"adls.sas-token": _signature()},
        "signature with a mark": {"adls.sas-token": f"?{_signature()}"},
    }
    files = StoreIO({**store, **keys[key]})
    places = [f"{form.format(container)}/a b/%20/x.parquet" for container in _CONTAINERS]
    for number, place in enumerate(places):
        with files.new_output(place).create(overwrite=True) as stream:
            stream.write(b"%d" % number)
    for number, place in enumerate(places):
        assert files.new_input(place).open().read() == b"%d" % number
    files.delete(places[1])
    assert [files.new_input(place).exists() for place in places] == [True, False]
    with pytest.raises(FileNotFoundError):
        files.delete(places[1])
    files.delete(places[0])
    assert not files.new_input(places[0]).exists()
