"""Kafka Connect's distributed worker with Debezium's connector for PostgreSQL, in a process of its own.

Its converters are Connect's own of JSON, and one of Avro that writes to a registry as Confluent's does.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.clients.build import built, compile_program
from tests.support.packages.maven import resolve
from tests.support.servers.kafka import HOST, QUICK_START, Process, ServerStartError, free_port, write_properties
from tests.support.servers.postgres import Postgres

AVRO_CONVERTER = "RegistryAvroConverter"
JSON_CONVERTER = "org.apache.kafka.connect.json.JsonConverter"
_CONVERTER = Path(__file__).parent / "connect_converter" / f"{AVRO_CONVERTER}.java"
_SECONDS = 60.0


def _connect_libs() -> Path:
    names = "connect-runtime", "connect-json"
    artifacts = [*(f"org.apache.kafka:{name}:4.3.1" for name in names), "org.slf4j:slf4j-simple:1.7.36"]
    return resolve("connect-4.3.1", artifacts)


def _debezium_libs() -> Path:
    return resolve("debezium-postgres-3.6.1.Final", ["io.debezium:debezium-connector-postgres:3.6.1.Final"])


def _converter_jars() -> list[Path]:
    """Our converter's jar and those that it needs."""
    libs = resolve("apicurio-converter-2.6.13", ["io.apicurio:apicurio-registry-utils-converter:2.6.13.Final"])

    def build(folder: Path) -> None:
        classes = folder / "classes"
        command = ["javac", "-cp", f"{_connect_libs()}/*:{libs}/*", "-d", str(classes), str(_CONVERTER)]
        compile_program(command, _CONVERTER.parent, {})
        services = classes / "META-INF" / "services"
        services.mkdir(parents=True)
        (services / "org.apache.kafka.connect.storage.Converter").write_text(f"{AVRO_CONVERTER}\n")
        compile_program(["jar", "--create", "--file", "converter.jar", "-C", str(classes), "."], folder, {})

    return [built("connect-converter", [_CONVERTER], build) / "converter.jar", *libs.glob("*.jar")]


class ConnectWorker(Process):
    """A worker that keeps its state in topics of the cluster; `settings` are more of its own. A context manager.

    With `is_exact` its connectors write exactly once.
    """

    def __init__(
        self, work_dir: Path, servers: str, is_exact: bool = False, settings: Mapping[str, object] | None = None
    ) -> None:
        super().__init__("connect", work_dir)
        self._port = free_port()
        self._libs = _connect_libs()
        plugins = self.work_dir / "plugins"
        plugins.mkdir(exist_ok=True)
        _link(plugins / "debezium", _debezium_libs().glob("*.jar"))
        _link(plugins / "avro", _converter_jars())
        self._config = write_properties(
            self.work_dir / "connect.properties",
            {
                "bootstrap.servers": servers,
                "listeners": f"http://{HOST}:{self._port}",
                "plugin.path": plugins,
                "plugin.discovery": "service_load",
                "group.id": "connect",
                **{f"{kind}.storage.topic": f"connect-{kind}" for kind in ("config", "offset", "status")},
                **{f"{kind}.storage.replication.factor": 1 for kind in ("config", "offset", "status")},
                **{f"{kind}.storage.partitions": 1 for kind in ("offset", "status")},
                "key.converter": JSON_CONVERTER,
                "value.converter": JSON_CONVERTER,
                "exactly.once.source.support": "enabled" if is_exact else "disabled",
                "offset.flush.interval.ms": 500,
                # After a kill the group waits for the killed member.
                "session.timeout.ms": 6000,
                "heartbeat.interval.ms": 1000,
                "scheduled.rebalance.max.delay.ms": 0,
                **(settings or {}),
            },
        )

    def __enter__(self) -> ConnectWorker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _command(self) -> Sequence[str]:
        logging = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        main = "org.apache.kafka.connect.cli.ConnectDistributed"
        return ["java", "-Xmx512m", *QUICK_START, logging, "-cp", f"{self._libs}/*", main, str(self._config)]

    def _is_ready(self) -> bool:
        """Whether it is a member of its group: until then it takes no connectors."""
        with suppress(OSError, http.client.HTTPException):
            return isinstance(self._ask("GET", "/connectors"), list)
        return False

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        """Ask the worker's REST API; `OSError`, also for a refusal."""
        request = urllib.request.Request(f"http://{HOST}:{self._port}{path}", method=method)
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise OSError(f"{method} {path}: {error.code} {error.read().decode()}") from None
        return json.loads(text) if text else None

    def follow(self, name: str, database: Postgres, tables: str, settings: Mapping[str, object]) -> None:
        """Have a connector write the changes of tables (`SCHEMA.TABLE`, by commas) to topics `NAME.SCHEMA.TABLE`.

        Returns when it runs. A call with other settings changes them.
        """
        config = {
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "tasks.max": "1",
            "plugin.name": "pgoutput",
            "database.hostname": HOST,
            "database.port": str(database.port),
            "database.user": database.user,
            "database.password": "any",
            "database.dbname": database.user,
            "topic.prefix": name,
            "slot.name": name,
            "publication.name": name,
            "publication.autocreate.mode": "filtered",
            "table.include.list": tables,
            "slot.drop.on.stop": "false",
            "poll.interval.ms": "50",
            **{key: str(value) for key, value in settings.items()},
        }
        self._ask("PUT", f"/connectors/{name}/config", config)
        self.wait_for(name)

    def wait_for(self, name: str, restarts: bool = False) -> None:
        """Wait until the connector and its task run; `ServerStartError` with its words if it has failed.

        One that has failed is started again if `restarts`, as a user does.
        """
        deadline = time.monotonic() + _SECONDS
        found: Any = None
        while time.monotonic() < deadline:
            with suppress(OSError, http.client.HTTPException):  # while the group rebalances, or before the first task
                found = self._ask("GET", f"/connectors/{name}/status")
                states = [each["state"] for each in (found["connector"], *found["tasks"])]
                if "FAILED" in states and restarts:
                    self._ask("POST", f"/connectors/{name}/restart?includeTasks=true&onlyFailed=true")
                elif "FAILED" in states:
                    raise ServerStartError(f"connector {name} has failed: {json.dumps(found, indent=1)}")
                if states == ["RUNNING"] * 2:
                    return
            time.sleep(0.05)
        raise ServerStartError(f"connector {name} does not run: {found}\n{self._tail()}")

    def end(self, name: str) -> None:
        """Remove a connector, which frees its slot."""
        self._ask("DELETE", f"/connectors/{name}")


def _link(folder: Path, files: Iterable[Path]) -> None:
    folder.mkdir(exist_ok=True)
    for file in files:
        link = folder / file.name
        if not link.is_symlink():
            link.symlink_to(file)
