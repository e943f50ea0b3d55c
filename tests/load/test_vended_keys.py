"""Loads into tables whose catalog gives out keys that end within a run: tasks and the commit renew them.

The store is moto's S3 behind a proxy that refuses keys that have ended.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.typedef import Properties

from spark_klog.cli.jobs import batch_load
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, LoadError
from spark_klog.files.keys import KeyedUri
from spark_klog.load.audit import status
from spark_klog.load.by_topic import existing, output_of
from spark_klog.load.journal.model import Range
from spark_klog.load.run import LoadOptions, load
from spark_klog.load.settings import WriteSettings
from spark_klog.load.tasks.task import Job, run_task
from spark_klog.tables.delta import DeltaLakeTable
from spark_klog.tables.opening import open_table
from tests.load.buckets import bucket
from tests.load.change_source import KEYED, ChangeSource, rows_of
from tests.load.real_lakes import RealLakes
from tests.load.support import InProcess, expected, run
from tests.load.tables import make_lake
from tests.spark.support import create_topic, produce, values
from tests.support.servers.http_proxy import HttpProxy, vended
from tests.support.servers.stores import ACCESS_KEY, SECRET_KEY
from tests.support.servers.unity import TOKEN, UnityCatalog, serving_unity

#: How long keys are good, and a task's pause, in seconds: a run of four tasks has several.
_SECONDS, _PAUSE = 6.0, 2.5
pytestmark = pytest.mark.usefixtures("short_leases")


class VendingCatalog(SqlCatalog):
    """Has other keys at each look, as a REST catalog gives them out with a table."""

    @property
    def properties(self) -> Properties:
        token, end = vended(_SECONDS)
        return {**self._own, "s3.session-token": token, "s3.session-token-expires-at-ms": str(end)}

    @properties.setter
    def properties(self, own: Properties) -> None:
        self._own = own


class SlowTasks(InProcess):
    """Tasks of other processes, which take their time."""

    def run(self, tasks: dict[int, list[Range]], job: Job) -> None:
        for number, ranges in tasks.items():
            time.sleep(_PAUSE)
            run_task(number, ranges, pickle.loads(pickle.dumps(job)))  # noqa: S301
        time.sleep(_PAUSE)


@pytest.fixture
def gate(s3_process: str) -> Iterator[HttpProxy]:
    """Before the S3 server, which itself takes any key."""
    with HttpProxy(int(s3_process.rpartition(":")[2]), "tokens") as proxy:
        yield proxy


@pytest.fixture
def unity(gate: HttpProxy, s3_process: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[UnityCatalog]:
    bucket(s3_process, "unity")
    for name, value in (
        ("DATABRICKS_TOKEN", TOKEN),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", f"http://{gate.address}"),
    ):
        monkeypatch.setenv(name, value)
    folder = f"s3://unity/{time.monotonic_ns()}"
    tables: Mapping[str, Mapping[str, str]] = {
        "main.web.clicks": {"storage_location": folder},
        "main.web.managed": {"storage_location": folder, "table_type": "MANAGED"},
        "main.web.csv": {"storage_location": folder, "data_source_format": "CSV"},
        "main.web.cloud": {"storage_location": "gs://bucket/folder"},
    }
    with serving_unity(tables, _SECONDS) as catalog:
        monkeypatch.setenv("DATABRICKS_HOST", catalog.url)
        yield catalog


def test_keys_that_end_within_a_run(cluster: EmbeddedCluster, topic: str, unity: UnityCatalog, gate: HttpProxy) -> None:
    """Of a Delta table by its name in Unity Catalog."""
    servers, address = cluster.bootstrap_servers, "delta:uc://main.web.clicks"
    create_topic(servers, topic, 2)
    produce(servers, topic, values(80, partitions=2))
    loaded = load(LoadOptions({"bootstrap.servers": servers}, [topic], address, max_task_records=40), SlowTasks())
    assert loaded.runs == [1]
    tokens, late = gate.tokens
    assert (late, tokens > 1, unity.given > 1) == (0, True, True)
    table = open_table(address)
    assert isinstance(table, DeltaLakeTable)
    rows = [places_of for batch in table.rows(["topic", "partition", "offset"]) for places_of in batch.to_pylist()]
    assert sorted(tuple(row.values()) for row in rows) == expected(topic, {0: 40, 1: 40})
    assert (table.journal_name, isinstance(table.location, KeyedUri)) == (address, True)
    found = status(address)
    assert (found.findings, len(found.runs)) == ([], 1)


@pytest.mark.test_all("long")
def test_keys_of_an_iceberg_catalog(
    cluster: EmbeddedCluster,
    topic: str,
    gate: HttpProxy,
    s3_process: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Changes of rows that are merged with keys that end between the tasks and the commit."""
    own = {"S3__ENDPOINT": f"http://{gate.address}"}
    monkeypatch.setattr("pyiceberg.catalog.sql.SqlCatalog", VendingCatalog)
    source = ChangeSource(cluster.bootstrap_servers, topic, 40)
    lake = make_lake("iceberg", tmp_path, monkeypatch, s3_process, "vended", own)
    source.change(60)
    options = LoadOptions({"bootstrap.servers": source.servers}, [topic], lake.address, settings=KEYED)
    load(options, SlowTasks())
    tokens, late = gate.tokens
    assert (late, tokens > 2) == (0, True)


@pytest.mark.peer
@pytest.mark.test_all("client")
def test_keys_of_a_rest_catalog(
    cluster: EmbeddedCluster,
    topic: str,
    gate: HttpProxy,
    s3_process: str,
    real_lakes: RealLakes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Iceberg's own: from the first run on the catalog alone has keys. The gateway of other tests takes no tokens."""
    given = {"seconds": f"{_SECONDS:g}", "s3.endpoint": f"http://{gate.address}", "s3.region": "us-east-1"}
    given |= {"s3.access-key-id": ACCESS_KEY, "s3.secret-access-key": SECRET_KEY}
    server = real_lakes.rest_server(s3_process, given)
    properties = {"TYPE": "rest", "URI": f"http://{server.address}", "WAREHOUSE": ""}
    lake = make_lake("iceberg", tmp_path, monkeypatch, properties=properties)
    source = ChangeSource(cluster.bootstrap_servers, topic, 40)
    options = LoadOptions({"bootstrap.servers": source.servers}, [topic], lake.address, settings=KEYED)
    for _ in range(2):
        source.change(60)
        load(options, SlowTasks())
        assert rows_of(lake.catalog.load_table(lake.name).scan().to_arrow()) == source.rows(source.end)
    tokens, late = gate.tokens
    assert (late, tokens > 4) == (0, True)
    found = status(lake.address)
    assert (found.findings, len(found.runs)) == ([], 2)


def test_tables_of_unity_that_are_refused(unity: UnityCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, why in (
        ("main.web.managed", "main.web.managed is of the type MANAGED: the catalog itself makes the commits"),
        ("main.web.csv", "main.web.csv is a table of format CSV"),
        ("main.web.absent", "answers 404: .*Table not found: main.web.absent"),
        ("main.web.cloud", "gives no keys for gs://bucket/folder"),
    ):
        with pytest.raises(LoadError, match=why):
            open_table(f"delta:uc://{name}")
    for name in ("main.web", "main.web.", ""):
        with pytest.raises(ConfigError, match="must be delta:uc"):
            open_table(f"delta:uc://{name}")
    monkeypatch.setenv("DATABRICKS_TOKEN", "other")
    with pytest.raises(LoadError, match="answers 401"):
        open_table("delta:uc://main.web.clicks")
    monkeypatch.setenv("DATABRICKS_HOST", "http://127.0.0.1:1")
    with pytest.raises(LoadError, match="can't be asked"):
        open_table("delta:uc://main.web.clicks")
    monkeypatch.delenv("DATABRICKS_HOST")
    with pytest.raises(ConfigError, match="set UNITY_WORKSPACE_URL or DATABRICKS_HOST"):
        open_table("delta:uc://main.web.clicks")


def test_a_table_of_unity_on_a_disk(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABRICKS_TOKEN", TOKEN)
    create_topic(cluster.bootstrap_servers, topic)
    produce(cluster.bootstrap_servers, topic, values(20))
    table = output_of("delta:uc://a.b.{topic}", topic)
    tables = {f"a.b.{name}": {"storage_location": f"file://{tmp_path}/{name}"} for name in ("x", "table")}
    tables[table.removeprefix("delta:uc://")] = {"storage_location": f"file://{tmp_path}/c"}
    tables["a.b.managed"] = {"table_type": "MANAGED"}
    with serving_unity(tables) as catalog:
        monkeypatch.setenv("DATABRICKS_HOST", catalog.url)
        loaded = run(cluster.bootstrap_servers, table, topic, settings=WriteSettings(layout="day"))
        assert loaded.runs == [1]
        assert status(f"{tmp_path}/c").findings == []
        assert existing("delta:uc://a.b.{topic}") == {table: ""}
        assert output_of("delta:uc://a.b.{topic}", "shop.orders") == "delta:uc://a.b.shop_orders"
        with pytest.raises(ConfigError, match="the names of the catalog and the schema as they are"):
            existing("delta:uc://a.{topic}")
        # the catalog has no table for the topic that stands for all: the next argument is refused
        for named, why in (("a.b.{topic}", "is not a regular expression"), ("a.{topic}", "must be delta:uc")):
            arguments = ["-b", "127.0.0.1:1", "--topics-pattern", "(", "--table", f"delta:uc://{named}"]
            done = CliRunner().invoke(batch_load.main, arguments)
            assert (done.exit_code, why in done.stderr) == (2, True), done.stderr
    assert catalog.given == 0


def test_keys_that_can_not_be_renewed() -> None:
    """Those at hand are used until the store refuses them."""
    from pyarrow.fs import LocalFileSystem

    from spark_klog.files.keys import Keys

    def give() -> Keys:
        raise OSError("the catalog is down")

    uri = KeyedUri("s3://bucket/a%20b", give, Keys.until(LocalFileSystem(), int(time.time() * 1000)))
    assert uri.filesystem() is uri.filesystem(anew=True)
    assert (uri.path, f"{uri}") == ("bucket/a b", "s3://bucket/a%20b")
