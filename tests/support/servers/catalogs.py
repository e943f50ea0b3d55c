"""Catalogs of Iceberg's tables that are neither ours nor a mock: Apache's REST catalog, and Hive's metastore."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.support.clients.build import built, compile_program
from tests.support.packages.maven import resolve
from tests.support.servers.kafka import pyspark_jars
from tests.support.servers.stores import Server

_PROGRAMS = Path(__file__).with_name("programs")
_REST, _HIVE = _PROGRAMS / "rest_catalog" / "RestCatalog.java", _PROGRAMS / "hive_metastore" / "Metastore.java"
_MAIN = "org.apache.iceberg.rest.RestCatalog"
_ICEBERG, _HADOOP = "1.10.1", "3.4.1"
_REST_ARTIFACTS = (
    f"org.apache.iceberg:iceberg-core:{_ICEBERG}",
    f"org.apache.iceberg:iceberg-core:{_ICEBERG}:tests",  # has the servlet
    f"org.apache.iceberg:iceberg-aws:{_ICEBERG}",
    f"org.apache.iceberg:iceberg-aws-bundle:{_ICEBERG}",
    f"org.apache.hadoop:hadoop-client-api:{_HADOOP}",
    f"org.apache.hadoop:hadoop-client-runtime:{_HADOOP}",
    "org.eclipse.jetty:jetty-servlet:11.0.25",
    "org.xerial:sqlite-jdbc:3.50.3.0",
    "org.slf4j:slf4j-simple:2.0.16",
)
_QUICK = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")


def rest_catalog(folder: Path, warehouse: str, properties: Mapping[str, str]) -> Server:
    """Iceberg's RESTCatalogServlet over its JdbcCatalog, in SQLite; properties as of programs/rest_catalog."""
    jars = resolve(f"iceberg-rest-{_ICEBERG}", _REST_ARTIFACTS)

    def build(classes: Path) -> None:
        compile_program(["javac", "-cp", f"{jars}/*", "-d", str(classes), str(_REST)], _REST.parent, {})

    classes = built(f"rest-catalog-{_ICEBERG}", [_REST], build)
    database = {"uri": f"jdbc:sqlite:{folder}/catalog.db?busy_timeout=20000", "clients": "1", "warehouse": warehouse}
    pairs = [f"{name}={value}" for name, value in {**database, **properties}.items()]
    return Server(
        "rest-catalog",
        folder,
        lambda port: ["java", *_QUICK, "-cp", f"{classes}:{jars}/*", _MAIN, str(port), *pairs],
    )


def hive_metastore(folder: Path) -> Server:
    """The metastore of Hive 2.3.10, of the jars that pyspark includes, with Derby.

    Its warehouse is in the folder. Locks of clients that died end after two seconds.
    """
    settings = {
        "javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={folder}/metastore;create=true",
        "hive.metastore.warehouse.dir": f"{folder}/warehouse",
        "hive.metastore.schema.verification": "false",
        "hive.metastore.server.min.threads": "4",
        "datanucleus.schema.autoCreateAll": "true",
        "datanucleus.connectionPoolingType": "none",  # pyspark includes no pool, and none of what this would need
        "hive.async.log.enabled": "false",
        "hive.compactor.initiator.on": "true",  # with it what ends locks
        "hive.txn.timeout": "2s",
        "hive.timedout.txn.reaper.start": "1s",
        "hive.timedout.txn.reaper.interval": "1s",
        "hive.log.dir": str(folder),
        "derby.stream.error.file": f"{folder}/derby.log",
    }
    jars = pyspark_jars()

    def build(classes: Path) -> None:
        compile_program(["javac", "-cp", f"{jars}/*", "-d", str(classes), str(_HIVE)], _HIVE.parent, {})

    classes = built("hive-metastore", [_HIVE], build)
    options = [*_QUICK, *(f"-D{name}={value}" for name, value in settings.items())]
    return Server(
        "hive-metastore",
        folder,
        lambda port: ["java", *options, "-cp", f"{classes}:{jars}/*", "Metastore", "-p", str(port)],
    )
