"""The fields that commands print with --json, from runs of each of them, and from the types of what few runs print.

`a[].b` is the field b of the objects in the list a; `*` stands for keys that are data (topics, numbers, times).
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

from click.testing import CliRunner

from spark_klog.cli.commands import transactions
from spark_klog.cli.jobs import following
from spark_klog.cli.main import main
from spark_klog.client import Consumer, Producer
from spark_klog.client.admin.admin import ProducerState
from spark_klog.client.dead_letters import DeadLetter
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ProducerFenced
from spark_klog.groups.stores import Change
from spark_klog.load import commit
from spark_klog.load.audit import HourOfTopic, loaded_json
from spark_klog.load.by_topic import Outcome
from spark_klog.load.follow import RunReport
from spark_klog.load.journal.summary import Finding
from spark_klog.load.run import MaxBad
from spark_klog.load.settings import WriteSettings
from spark_klog.load.tasks import task
from spark_klog.load.upkeep import Kempt, Upkept, expired_json
from spark_klog.load.verify import Verified
from spark_klog.mirror.mirror import Totals
from spark_klog.registry import differences
from spark_klog.restore import Restored
from spark_klog.spark.read.ranges import Lost
from spark_klog.spark.write.decisions.log_states import Holder
from spark_klog.tables.upkeep import Expired
from tests.load.support import run
from tests.public.surface import commands
from tests.support.brokers.log_07 import message, write_log

#: Of commands whose lines are not records or fields of their own: what `--json` says of their input.
_OTHERS = {"klog produce"}
#: Keys that are data.
_DATA = re.compile(r"clicks|\d.*")
_SCHEMA = '{"type": "record", "name": "Click", "fields": [{"name": "id", "type": "long"%s}]}'
_KINDS = {str: "text", int: "number", float: "number", bool: "boolean", type(None): "null"}
_OFFSETS = '{"clicks": {"0": 5, "1": 0}}'


class _Shapes:
    """The fields that were printed, by command."""

    def __init__(self) -> None:
        self.fields: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))

    def of_command(self, path: str, *arguments: str, stdin: str = "", codes: tuple[int, ...] = (0,)) -> None:
        """Run a command in this process, and note what it prints."""
        done = CliRunner().invoke(main, [*path.split()[1:], *arguments, "--json"], input=stdin)
        assert done.exit_code in codes, (path, done.output, done.exception)
        self.note(path, *(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")))

    def note(self, path: str, *values: Any) -> None:
        of_command = self.fields[path]
        for value in values:
            for name, kind in _flat(value, ""):
                of_command[name].add(kind)

    def declare(self, path: str, kind: Any, field: str = "") -> None:
        """Note the fields of a dataclass or named tuple by their types, below `field`."""
        hints = {name: hint for name, hint in get_type_hints(kind).items() if get_origin(hint) is not ClassVar}
        for name, hint in hints.items():
            for place, what in _declared(hint, f"{field}.{name}" if field else name):
                self.fields[path][place].add(what)

    def lines(self) -> Iterator[str]:
        for path in sorted(self.fields):
            for name, kinds in sorted(self.fields[path].items()):
                yield f"{path}: {name} {' or '.join(sorted(kinds))}"


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """The fields of a value, and their types."""
    if isinstance(value, dict):
        yield from [(path, "object")] if path and not value else []
        for key, each in value.items():
            name = "*" if _DATA.fullmatch(key) else key
            yield from _flat(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        yield from [] if value else [(path, "list")]
        for each in value:
            yield from _flat(each, f"{path}[]")
    else:
        yield path, _KINDS[type(value)]


def _declared(hint: Any, path: str) -> Iterator[tuple[str, str]]:
    """The fields of a type, and their types as JSON has them."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        for each in arguments:
            yield from _declared(each, path)
    elif origin in (list, tuple):
        yield from _declared(arguments[0], f"{path}[]")
    elif origin is dict:
        yield from _declared(arguments[1], f"{path}.*")
    elif is_dataclass(hint):
        for name, below in get_type_hints(hint).items():
            yield from _declared(below, f"{path}.{name}")
    elif hint is not Any:
        yield path, _KINDS[hint]


def json_lines() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        shapes = _Shapes()
        with EmbeddedCluster(data_dir=Path(folder) / "cluster", schema_registry=True) as cluster:
            _with_cluster(shapes, cluster, Path(folder))
        _without_cluster(shapes, Path(folder))
    having = {path for path, command in commands().items() if any(each.name == "as_json" for each in command.params)}
    assert having - _OTHERS == shapes.fields.keys(), "run each command with --json in tests/public/json_lines.py"
    return list(shapes.lines())


def _with_cluster(shapes: _Shapes, cluster: EmbeddedCluster, folder: Path) -> None:
    servers, settings = cluster.bootstrap_servers, {"bootstrap.servers": cluster.bootstrap_servers}
    b = ("-b", servers)
    shapes.of_command("klog topics create", "clicks", "--partitions", "2", *b)
    shapes.of_command("klog topics create", "others", *b)
    with Producer(settings) as producer:
        for number in range(20):
            producer.send("clicks", b'{"id":%d}' % number, b"key", partition=0, headers=[("trace", b"x")])
        producer.send("clicks", b"bad", None, partition=1)
    _loads(shapes, servers, folder)
    shapes.of_command("klog consume", "clicks", *b)
    _values(shapes, settings, ("-r", str(cluster.schema_registry_url)), b, folder)
    for command in ("list", "describe", "offsets"):
        shapes.of_command(f"klog topics {command}", *b)
    shapes.of_command("klog topics alter", "clicks", "--config", "retention.ms=86400000000", *b)
    _groups(shapes, settings, b, folder)
    _transactions(shapes, settings, b)
    _schemas(shapes, ("-r", str(cluster.schema_registry_url)), folder)
    _dead_letters(shapes, settings, b)
    shapes.of_command("klog bench", "-n", "100", "--probes", "2", *b)
    shapes.of_command("klog doctor", "--no-spark", *b, codes=(0, 1))
    shapes.of_command("klog topics delete", "others", "--yes", *b)


def _values(shapes: _Shapes, settings: dict[str, str], r: tuple[str, ...], b: tuple[str, ...], folder: Path) -> None:
    """Records without a value, of bytes that are no text, and decoded by a schema."""
    shapes.of_command("klog topics create", "values", *b)
    with Producer(settings) as producer:
        producer.send("values", None, b"\xff", headers=[("trace", None), ("trace", b"\xff")])
        producer.send("values", b"\xff", None)
    shapes.of_command("klog consume", "values", *b)
    shapes.of_command("klog topics create", "decoded", *b)
    schema = folder / "decoded.avsc"
    schema.write_text(_SCHEMA.replace("id", "clicks") % "")  # names of a schema's fields are data
    arguments = ["produce", "decoded", "-s", "avro", "--key-schema", str(schema), "--value-schema", str(schema)]
    (folder / "decoded.json").write_text('{"key": {"clicks": 1}, "value": {"clicks": 1}}\n')
    done = CliRunner().invoke(main, [*arguments, "--json", "-l", str(folder / "decoded.json"), *r, *b])
    assert done.exit_code == 0, done.output
    shapes.of_command("klog consume", "decoded", "-s", "avro", *r, *b)


def _loads(shapes: _Shapes, servers: str, folder: Path) -> None:
    output = str(folder / "clicks")
    asked: dict[str, Any] = {"settings": WriteSettings(schema="id bigint"), "max_bad": MaxBad(50, is_percent=True)}
    loaded = run(servers, output, "clicks", **asked)
    shapes.note("batch_load.py", loaded_json(loaded, output), {"records": 20, "output": output})
    done, failed = Outcome("clicks", output, loaded), Outcome("views", output, None, ValueError("x"), 1)
    for report in (RunReport(0.0, 1.0, [done], None, 0), RunReport(0.0, 1.0, [], ValueError("x"), 1)):
        shapes.note("batch_load.py", following._line(report, 1.0, output, by_topic=False))
    report = RunReport(0.0, 1.0, [done, failed], None, 0)
    shapes.note("batch_load.py", following._line(report, 1.0, output, by_topic=True))
    shapes.note("restore.py", {"records": 20, "partitions": [vars(Restored("clicks", 0, 20))]})
    for command in ("klog mirror", "mirror.py"):
        shapes.note(command, vars(Totals()), vars(Totals(lag=0)))
    shapes.declare("batch_load.py", Lost, "lost[]")
    causes = (task.TRANSACTIONS, task.COMPACTION, task.CORRUPT, task.UNPARSED, *commit._LOST)
    for path in ("batch_load.py", "klog load status"):
        shapes.note(path, {"partitions": [{"gaps": dict.fromkeys(causes, 1)}]})
    shapes.declare("klog load status", Finding, "missing[]")
    schema = {"topic": "t", "column": "value", "format": "avro"}
    for more in ({"subject": "s", "version": 1, "id": 1}, dict.fromkeys(("subject", "version", "id"))):
        shapes.note("klog load status", {"schemas": [{**schema, **more}]})
    shapes.declare("klog load status", HourOfTopic, "log.hours[]")
    shapes.note("klog load status", {"partitions": [{"holes": [[0, 9]]}], "runs": [{"files": None, "failed": ["t-0"]}]})
    shapes.declare("klog load verify", Verified)
    shapes.of_command("klog load status", output, "-b", servers)
    shapes.of_command("klog load status", output)
    shapes.of_command("klog load verify", output, "-b", servers)
    shapes.of_command("klog load files", output)
    shapes.of_command("klog load compact", output)
    set_property = Expired(0, {}, {"delta.deletedFileRetentionDuration": ("interval 1 week", "interval 1 second")})
    upkept = Upkept(0.0, 1.0, [Kempt(output, "clicks", expired=set_property, error=ValueError("x"))])
    shapes.note("batch_load.py", following._upkeep_line(upkept))
    run(servers, table := f"delta:{folder / 'lake' / 'table'}", "clicks", **asked)
    shapes.of_command("klog load expire", table)
    shapes.note("klog load expire", {"paths": ["clicks/0.parquet"], **expired_json(set_property)})
    shapes.of_command("klog load replay", output, "--topic", "others", "-b", servers)
    by_topic = str(folder / "{topic}")
    shapes.of_command("klog load replay", by_topic, "--topic", "others", "-b", servers)
    for path in (f"klog load {name}" for name in ("compact", "status", "verify")):
        shapes.of_command(path, by_topic)
        shapes.note(path, {"loads": [{"error": "x"}]})
    shapes.note("klog load replay", {"loads": [{"error": "x"}]})


def _groups(shapes: _Shapes, settings: dict[str, str], b: tuple[str, ...], folder: Path) -> None:
    with Consumer({**settings, "group.id": "readers", "auto.offset.reset": "earliest"}) as consumer:
        consumer.subscribe(["clicks"])
        while not consumer.poll(10.0):
            pass
        consumer.commit({("clicks", 0): 3, ("clicks", 1): 0})
        shapes.of_command("klog groups list", *b)
        shapes.of_command("klog groups describe", "readers", *b)
        shapes.of_command("klog groups lag", "readers", *b)
    kafka = f"kafka://{b[1]}"
    stores = ("--offsets-path", f"{folder}/offsets")
    shapes.of_command("klog offsets show", "--from", kafka, "--group", "readers")
    shapes.of_command("klog offsets copy", "--from", kafka, "--to", f"file://{folder}/offsets", "--group", "readers")
    shapes.declare("klog offsets copy", Change)
    shapes.declare("klog offsets set", Change)
    for command in ("describe", "lag"):
        path = f"klog groups {command}"
        shapes.of_command(path, "readers", *stores, *b)
        shapes.note(path, {"partitions": [{"error": "no answer"}]})
        for name in [name for name in shapes.fields[path] if "stores.files." in name]:
            shapes.fields[path][name.replace(".files.", ".zookeeper.")] |= shapes.fields[path][name]
    member = {"instance": "one", "assignment": None}
    shapes.note("klog groups describe", {"type": None, "protocolType": None, "protocol": None, "members": [member]})
    moved = ("--to", kafka, "--group", "readers", "--to-offset", "3", "--topic", "clicks:0")
    shapes.of_command("klog offsets set", *moved)
    shapes.of_command("klog groups delete", "readers", "--yes", *b)


def _transactions(shapes: _Shapes, settings: dict[str, str], b: tuple[str, ...]) -> None:
    with suppress(ProducerFenced), Producer({**settings, "transactional.id": "writer"}) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send("clicks", b"open", partition=0)
        producer.flush()
        shapes.of_command("klog transactions list", *b)
        shapes.of_command("klog transactions describe", "--transactional-id", "writer", *b)
        place = ("--topic", "clicks", "--partition", "0")
        shapes.of_command("klog transactions describe-producers", *place, *b)
        shapes.of_command("klog transactions hanging", *place, *b)
        state = ProducerState(1, 0, None, None, 0, 5)
        for line in (transactions._producer(state), transactions._producer(replace(state, last_sequence=3))):
            age = transactions._age(state.last_timestamp if line["lastSequence"] is None else 5)
            shapes.note("klog transactions hanging", {"topic": "clicks", "partition": 0, **line, **age})
            shapes.note("klog transactions describe-producers", line)
        shapes.note("klog transactions hanging", {"lastTimestampMs": 5})
        shapes.note("klog transactions abort", {"topic": "clicks", "partition": 0, "producerId": 1, "aborted": True})
        for holder in (Holder("q", "p", None, None, False), Holder("q", "p", 5, 3, True, "name")):
            shapes.note("klog transactions list", transactions._held(holder))
            shapes.note("klog transactions describe", transactions._held(holder))
        shapes.of_command("klog transactions abort", "--transactional-id", "writer", "--yes", *b)


def _dead_letters(shapes: _Shapes, settings: dict[str, str], b: tuple[str, ...]) -> None:
    shapes.of_command("klog topics create", "letters", *b)
    letter = DeadLetter("clicks", 0, 5, "readers", error="ValueError", reason="why", trace="where", time=5, attempts=1)
    with Producer(settings) as producer:
        producer.send("letters", b"letter", b"key", headers=letter.headers)
        producer.send("letters", None, None, headers=DeadLetter("clicks", 0, 5).headers)
        producer.send("letters", b"no letter", None)
    shapes.of_command("klog dead-letters show", "letters", *b)
    shapes.of_command("klog dead-letters replay", "letters", *b, codes=(4,))


def _schemas(shapes: _Shapes, r: tuple[str, ...], folder: Path) -> None:
    for number, more in enumerate(("", ', "default": 0')):
        (folder / f"{number}.avsc").write_text(_SCHEMA % more)
        shapes.of_command("klog schemas register", str(folder / f"{number}.avsc"), "--subject", "clicks-value", *r)
    (folder / "other.avsc").write_text('"string"')
    for name in ("0", "other"):
        checked = str(folder / f"{name}.avsc")
        shapes.of_command("klog schemas check", checked, "--subject", "clicks-value", *r, codes=(0, 1))
    shapes.of_command("klog schemas list", *r)
    shapes.of_command("klog schemas list", "--long", *r)
    for command in ("versions", "show", "diff"):
        shapes.of_command(f"klog schemas {command}", "clicks-value", *r)
    shapes.of_command("klog schemas show", "--id", "1", *r)
    shapes.of_command("klog schemas config", "clicks-value", *r)
    shapes.of_command("klog schemas delete", "clicks-value", "--yes", *r)


def _without_cluster(shapes: _Shapes, folder: Path) -> None:
    log = folder / "cluster" / "broker-0" / "clicks-0"
    shapes.of_command("klog log dump", str(log))
    shapes.of_command("klog log dump", "--batches", str(log))
    for name in ("index", "timeindex"):
        shapes.of_command("klog log dump", *map(str, log.glob(f"*.{name}")))
    shapes.note("klog log dump", {"deleteHorizon": 5, "timestamp": None, "value": None, "headers": [["name", None]]})
    (segment,) = log.glob("*.log")
    damaged = bytearray(segment.read_bytes())
    damaged[-3] ^= 1
    segment.write_bytes(damaged)
    shapes.of_command("klog log verify", str(log), codes=(1,))
    shapes.of_command("klog log repair", str(log))
    write_log(folder / "old" / "clicks-0", [[message(b"x")]])
    shapes.of_command("klog log upgrade", str(folder / "old"), str(folder / "new"))
    shapes.note("klog log upgrade", {"error": "why"})
    no_leader = {"leader": None, "earliest": None, "latest": None}
    shapes.note("klog topics describe", {"id": None, "partitions": [no_leader]})
    shapes.note("klog topics offsets", {"offset": None})
    shapes.note("klog version", {"pyspark": None})
    shapes.declare("klog schemas diff", differences.Change, "changes[]")
    shapes.note("klog schemas diff", {"changes": None, "compatibility": None, "reasons": None})
    for name, content in {
        "metadata": '{"id": "b4a5a5c8-6a4f-4b0e-9a9f-0c8b1c3a7a11"}',
        "offsets/0": f'v1\n{{"batchWatermarkMs":0,"batchTimestampMs":0,"conf":{{}}}}\n{_OFFSETS}',
        "commits/0": 'v1\n{"nextBatchWatermarkMs":0}',
    }.items():
        path = folder / "checkpoint" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    shapes.of_command("klog checkpoint show", str(folder / "checkpoint"))
    users = folder / "users.conf"
    users.write_text("[user bob]\nread = clicks\nwrite = clicks\n")
    CliRunner().invoke(main, ["users", "add", "ann", "--file", str(users), "--password-stdin"], input="secret\n")
    shapes.of_command("klog users list", "--file", str(users))
    shapes.of_command("klog version")
