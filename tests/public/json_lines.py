"""The fields that commands print with --json, from a run of each of them.

`a[].b` is the field b of the objects in the list a; `*` stands for keys that are data (topics, numbers, times).
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from spark_klog.cli.jobs import following
from spark_klog.cli.main import main
from spark_klog.client import Consumer, Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ProducerFenced
from spark_klog.load.audit import loaded_json
from spark_klog.load.by_topic import Outcome
from spark_klog.load.follow import RunReport
from spark_klog.load.run import MaxBad
from spark_klog.load.settings import WriteSettings
from spark_klog.mirror.mirror import Totals
from spark_klog.restore import Restored
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
    for command in ("list", "describe", "offsets"):
        shapes.of_command(f"klog topics {command}", *b)
    shapes.of_command("klog topics alter", "clicks", "--config", "retention.ms=86400000000", *b)
    _groups(shapes, settings, b, folder)
    _transactions(shapes, settings, b)
    _schemas(shapes, ("-r", str(cluster.schema_registry_url)), folder)
    shapes.of_command("klog bench", "-n", "100", "--probes", "2", *b)
    shapes.of_command("klog doctor", "--no-spark", *b, codes=(0, 1))
    shapes.of_command("klog topics delete", "others", "--yes", *b)


def _loads(shapes: _Shapes, servers: str, folder: Path) -> None:
    output = str(folder / "load")
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
    shapes.of_command("klog load status", output)
    shapes.of_command("klog load verify", output, "-b", servers)
    shapes.of_command("klog load files", output)
    shapes.of_command("klog load compact", output)
    shapes.of_command("klog load replay", output, "--topic", "others", "-b", servers)


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
    shapes.of_command("klog offsets show", "--from", kafka, "--group", "readers")
    shapes.of_command("klog offsets copy", "--from", kafka, "--to", f"file://{folder}/offsets", "--group", "readers")
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
        shapes.of_command("klog transactions abort", "--transactional-id", "writer", "--yes", *b)


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
    (segment,) = log.glob("*.log")
    damaged = bytearray(segment.read_bytes())
    damaged[-3] ^= 1
    segment.write_bytes(damaged)
    shapes.of_command("klog log verify", str(log), codes=(1,))
    shapes.of_command("klog log repair", str(log))
    write_log(folder / "old" / "clicks-0", [[message(b"x")]])
    shapes.of_command("klog log upgrade", str(folder / "old"), str(folder / "new"))
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
    users.write_text("")
    CliRunner().invoke(main, ["users", "add", "ann", "--file", str(users), "--password-stdin"], input="secret\n")
    shapes.of_command("klog users list", "--file", str(users))
    shapes.of_command("klog version")
