"""A table follows one of PostgreSQL, by Debezium's connector in Kafka Connect on our broker, and equals it.

SPARK_KLOG_KILLS sets the number of kills (default: one of each process), and SPARK_KLOG_SEED the random choices.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from confluent_kafka import KafkaException

from spark_klog.load.audit import status
from tests.conftest import kept_on_failure
from tests.load.database import COLUMNS, KEY, STYLES, Style, Table
from tests.load.job_program import run_job
from tests.load.support import kills
from tests.load.tables import Kind, Lake, make_lake
from tests.spark.support import consume, create_topic
from tests.support.runs.soak import in_soak
from tests.support.servers.broker import KlogBroker
from tests.support.servers.connect import AVRO_CONVERTER, JSON_CONVERTER, ConnectWorker
from tests.support.servers.kafka import HOST, free_port
from tests.support.servers.postgres import Postgres
from tests.support.waiting import wait_until

pytestmark = pytest.mark.peer
#: JSON without and with Connect's schemas, and Avro by our registry.
Values = Literal["json", "schemas", "avro"]
_SECONDS = 60
_DONE, _NOTHING_NEW = 0, 3
_VICTIMS = ("connect", "broker", "load")


@dataclass
class Servers:
    """A database, our broker with a registry, and a worker of Connect."""

    database: Postgres
    broker: KlogBroker
    connect: ConnectWorker
    registry: str

    @property
    def bootstrap(self) -> str:
        return self.broker.bootstrap_servers


def _serving(folder: Path, is_exact: bool = False) -> Iterator[Servers]:
    port = free_port()
    with (
        Postgres(folder) as database,
        KlogBroker(folder, "--schema-registry", f"{HOST}:{port}") as broker,
        ConnectWorker(folder, broker.bootstrap_servers, is_exact) as connect,
    ):
        yield Servers(database, broker, connect, f"http://{HOST}:{port}")


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    """Servers of all tests of the module: a test has its own table, by its name."""
    for folder in kept_on_failure(request):
        yield from _serving(folder)


@dataclass
class Followed:
    """A table of the database, the connector `name` that follows it, and the table of the lake."""

    servers: Servers
    name: str
    lake: Lake
    values: Values
    style: Style = "numbers"
    seed: int = 1
    partitions: int = 1
    #: The database sends no old rows, the connector truncations too, and the database's order decides.
    is_plain: bool = False
    #: The connector takes signals: see `snapshot`.
    takes_signals: bool = False

    def __post_init__(self) -> None:
        columns = [each for each in COLUMNS if each.name not in self._left_out]
        self.table = Table(self.servers.database, self.name, self.seed, columns, not self.is_plain)
        self._marks = 0
        self.servers.database.sql(
            f"CREATE TABLE {self.table.full_name}_marks (mark text PRIMARY KEY)",
            f"CREATE TABLE {self._signals} (id text PRIMARY KEY, type text, data text)",
        )
        create_topic(self.servers.bootstrap, self._marks_topic)

    @property
    def _left_out(self) -> Sequence[str]:
        """As numbers money is a decimal of 64 digits in Avro, which no column holds."""
        return ["cost"] if self.values == "avro" and self.style == "numbers" else []

    @property
    def topic(self) -> str:
        return f"{self.name}.{self.table.full_name}"

    @property
    def _marks_topic(self) -> str:
        return f"{self.topic}_marks"

    @property
    def _signals(self) -> str:
        return f"{self.table.full_name}_signals"

    def snapshot(self) -> None:
        """Signal the connector to read the table again, in parts, while it goes on with the changes."""
        self._marks += 1
        asked = json.dumps({"data-collections": [self.table.full_name], "type": "incremental"})
        values = f"'signal-{self._marks:06}', 'execute-snapshot', '{asked}'"
        self.servers.database.sql(f"INSERT INTO {self._signals} VALUES ({values})")

    def follow(self, **settings: object) -> None:
        """Have the connector write the changes, after a snapshot."""
        given: dict[str, object] = {**STYLES[self.style], "topic.creation.default.replication.factor": 1}
        given["topic.creation.default.partitions"] = self.partitions
        if self.is_plain:
            given["skipped.operations"] = "none"
        for column in ("key", "value"):
            is_avro = self.values == "avro"
            given[f"{column}.converter"] = AVRO_CONVERTER if is_avro else JSON_CONVERTER
            given[f"{column}.converter.schemas.enable"] = "true" if self.values == "schemas" else "false"
            given[f"{column}.converter.replace.null.with.default"] = "false"
            given[f"{column}.converter.schema.registry.url"] = self.servers.registry
        given |= {name.replace("_", "."): value for name, value in settings.items()}
        tables = ",".join(f"{self.table.full_name}{ending}" for ending in ("", "_marks"))
        if self.takes_signals:
            tables += f",{self._signals}"
            given |= {"signal.data.collection": self._signals, "incremental.snapshot.chunk.size": 7}
        self.servers.connect.follow(self.name, self.servers.database, tables, given)

    @property
    def arguments(self) -> list[str]:
        """Of the job."""
        given = ["-b", self.servers.bootstrap, "--topics", self.topic, "--table", self.lake.address]
        given += ["--envelope", "debezium", *(["--order-by", "source.lsn"] if self.is_plain else [])]
        if self.values == "avro":
            given += ["--key-format", "avro", "--value-format", "avro", "-r", self.servers.registry]
            return [*given, "--schema-evolution", "latest"]
        schema = self.table.schema(self.style)
        return [*given, "--upsert-key", ",".join(KEY), "--value-format", "json", "--schema", schema]

    def load(self) -> int:
        """Run the job; return its exit code: it has loaded something, nothing was new, or there is no topic yet, as the
        marks' may be the first one."""
        done = run_job(self.arguments)
        is_early = f"topic {self.topic} does not exist" in done.output
        assert done.exit_code in (_DONE, _NOTHING_NEW) or is_early, done.output
        return done.exit_code

    def settle(self) -> None:
        """Wait until the broker has all changes that the database has committed."""
        self._marks += 1
        mark = f"mark-{self._marks:06}"
        self.servers.database.sql(f"INSERT INTO {self.table.full_name}_marks VALUES ('{mark}')")

        def is_there() -> bool:
            with suppress(KafkaException, KeyError):
                return any(
                    mark.encode() in (each.key or b"") for each in consume(self.servers.bootstrap, self._marks_topic)
                )
            return False

        wait_until(is_there, f"{mark} of {self.name}", _SECONDS)

    def check(self) -> None:
        """After a run the table equals the database, for each reader, and the next run finds nothing new."""
        self.settle()
        # Records of two partitions go into requests of their own: the mark's may be the first one.
        wait_until(lambda: self.load() == _NOTHING_NEW, f"the end of {self.topic}", _SECONDS)
        rows = self.table.rows(self.style)
        for reader, read in self.lake.readers().items():
            seen = self.table.seen(read(), self.style)
            assert seen == rows, f"{reader}: {difference(rows, seen)}"
        assert status(self.lake.address).findings == []


def difference(rows: list[dict[str, Any]], seen: list[dict[str, Any]]) -> str:
    """What of the database's rows is not seen, or is seen otherwise, in a few words."""
    wanted, there = ({tuple(row[name] for name in KEY): row for row in each} for each in (rows, seen))
    lines = [f"{len(rows)} rows, seen {len(seen)}"]
    lines += [f"missing {key}" for key in wanted.keys() - there.keys()]
    lines += [f"not in the database: {key}" for key in there.keys() - wanted.keys()]
    for key in wanted.keys() & there.keys():
        for name, value in wanted[key].items():
            if there[key][name] != value:
                lines.append(f"{key} {name}: {str(value)[:100]!r}, seen {str(there[key][name])[:100]!r}")
    return "\n".join(lines[:20])


@pytest.mark.test_all("long")  # test_change_events.py has events of each kind
@pytest.mark.parametrize(
    ("kind", "values", "style"),
    [
        ("iceberg", "avro", "numbers"),
        ("delta", "json", "texts"),
        ("delta", "schemas", "numbers"),
        ("iceberg", "avro", "texts"),
    ],
)
def test_a_snapshot_and_then_changes(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, values: Values, style: Style
) -> None:
    """Of all types, with updates of keys, deletions, and transactions that are rolled back."""
    lake = make_lake(kind, tmp_path, monkeypatch)
    followed = Followed(servers, f"t_{kind}_{values}_{style}", lake, values, style)
    followed.table.insert(20)
    followed.follow()
    followed.check()
    for _ in range(3):
        followed.table.change(40)
        followed.check()
    servers.connect.end(followed.name)


@pytest.mark.test_all("long")
@pytest.mark.parametrize(("kind", "values"), [("delta", "avro"), ("iceberg", "json")])
def test_columns_come_and_go(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, values: Values
) -> None:
    """The database writes no change for the rows that get a default, or another name: they are to be written anew."""
    lake = make_lake(kind, tmp_path, monkeypatch)
    followed = Followed(servers, f"c_{kind}_{values}", lake, values)
    table = followed.table
    table.insert(20)
    followed.follow()
    followed.check()
    # Avro's converter writes the default where the value is null
    added = "ADD more text" if values == "avro" else "ADD more text DEFAULT 'd'"
    wider = ["ALTER number TYPE bigint"] if kind == "iceberg" else []  # deltalake makes no column wider
    for columns in (f"{added}, ADD still int[]", "DROP words, DROP price", "RENAME name TO title", *wider):
        table.change(10)
        servers.database.sql(f"ALTER TABLE {table.full_name} {columns}")
        table.columns_have_changed(columns)
        table.change(10)
        servers.database.sql(f"UPDATE {table.full_name} SET id = id")
        followed.check()
    servers.connect.end(followed.name)


@pytest.mark.test_all("long")
@pytest.mark.parametrize(
    ("kind", "values", "partitions"), [("iceberg", "avro", 3), ("delta", "json", 3), ("delta", "schemas", 1)]
)
def test_truncations_and_large_values_that_do_not_change(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, values: Values, partitions: int
) -> None:
    """The log has no old rows, and a truncation is in any partition: the database's own order decides."""
    lake = make_lake(kind, tmp_path, monkeypatch)
    followed = Followed(servers, f"p_{kind}_{values}", lake, values, partitions=partitions, is_plain=True)
    followed.table.insert(30)
    followed.follow()
    followed.check()
    for _ in range(4):
        followed.table.change(50, truncates=True)
        followed.check()
    servers.database.sql(f"TRUNCATE {followed.table.full_name}")
    followed.check()
    servers.connect.end(followed.name)


@pytest.mark.test_all("long")
@pytest.mark.parametrize(("kind", "values"), [("delta", "json"), ("iceberg", "avro")])
def test_a_snapshot_by_a_signal(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, values: Values
) -> None:
    """It comes in parts among the changes, also of rows that the table does not have yet."""
    lake = make_lake(kind, tmp_path, monkeypatch)
    followed = Followed(servers, f"s_{kind}_{values}", lake, values, takes_signals=True)
    followed.table.insert(60)
    followed.follow(snapshot_mode="no_data")
    followed.table.change(30)
    followed.snapshot()
    followed.table.change(60)

    def is_whole() -> bool:
        followed.load()
        rows = followed.table.rows(followed.style)
        return all(followed.table.seen(read(), followed.style) == rows for read in lake.readers().values())

    wait_until(is_whole, f"the rows of {followed.name}", _SECONDS)
    followed.check()
    servers.connect.end(followed.name)


class _Load:
    """The job in a process of its own, which is killed or ends."""

    def __init__(self, followed: Followed, log: Path) -> None:
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.load.job_program", *followed.arguments],
                cwd=Path(__file__).parents[2],
                env=os.environ | followed.lake.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )


def _kill(servers: Servers, followed: Followed, victim: str, chance: random.Random) -> None:
    """Change the database while a load runs, and kill one of the processes meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        changes = pool.submit(followed.table.change, 60, followed.is_plain)
        load = _Load(followed, servers.broker.log.with_name("load.log")).process
        time.sleep(chance.uniform(0, 4))
        if victim == "load":
            load.kill()
        elif victim == "broker":
            servers.broker.kill()
            time.sleep(chance.uniform(0, 1))
            servers.broker.start()
        else:
            servers.connect.kill()
            time.sleep(chance.uniform(0, 1))
            servers.connect.start()
        changes.result(_SECONDS)
    with load:  # one that met no broker has failed
        assert load.wait(_SECONDS) in (_DONE, 1, _NOTHING_NEW, -signal.SIGKILL)
    servers.connect.wait_for(followed.name, restarts=True)


@pytest.mark.test_all("kill")
@pytest.mark.timeout(0)  # SPARK_KLOG_KILLS sets the duration; each step has its own deadline
@pytest.mark.parametrize(
    ("kind", "values", "is_exact", "is_plain"),
    [
        ("iceberg", "avro", False, True),
        *(
            pytest.param(*each, marks=in_soak)
            for each in (
                ("delta", "json", True, False),
                ("delta", "avro", False, False),
                ("iceberg", "json", True, True),
            )
        ),
    ],
)
def test_the_table_equals_the_database_whatever_dies(
    server_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    values: Values,
    is_exact: bool,
    is_plain: bool,
) -> None:
    """Connect, the broker or the load; an exactly-once connector writes in transactions."""
    chance = random.Random(int(os.environ.get("SPARK_KLOG_SEED", "1")))
    lake = make_lake(kind, tmp_path, monkeypatch)
    for servers in _serving(server_dir, is_exact):
        style: Style = "texts" if values == "json" else "numbers"
        seed = chance.randrange(1000)
        # Debezium sends rows of a snapshot by a signal after a truncation that came between
        followed = Followed(servers, "killed", lake, values, style, seed, 3 if is_plain else 1, is_plain, not is_plain)
        followed.table.insert(50)
        followed.follow(**({"exactly_once_support": "required"} if is_exact else {}))
        for number in range(kills() or len(_VICTIMS)):
            if followed.takes_signals and number % 4 == 0:
                followed.snapshot()
            _kill(servers, followed, _VICTIMS[number % len(_VICTIMS)], chance)
            followed.check()
