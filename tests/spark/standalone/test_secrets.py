"""A password that a query is given is nowhere to be seen: not in logs, command lines, pages, plans or files."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.spark.support import create_topic
from tests.support.servers.certificates import Certificates
from tests.support.servers.kafka import HOST, free_port
from tests.support.servers.secure_broker import SecureBroker, add_user
from tests.support.spark.standalone import Standalone

from .conftest import Programs
from .support import Copy, fill

PARTITIONS, RECORDS = 4, 200
#: Spark hides values in which it finds a word such as secret: these have none.
_TOPIC, _USER, _WORD, _STORE = "seen-everywhere", "carol", "quite-plain-8", "even-plainer-9"


def _below(folder: Path, pattern: str = "*") -> Iterator[bytes]:
    for path in folder.rglob(pattern):
        if path.is_file() and "environment" not in path.parts:  # the packed one
            yield path.read_bytes()


def _command_lines() -> Iterator[bytes]:
    for process in psutil.process_iter(["cmdline"]):
        yield " ".join(process.info["cmdline"] or ()).encode()


def _pages(address: str) -> Iterator[bytes]:
    """What Spark's page and its REST API say of the application."""

    def get(path: str) -> bytes:
        with urllib.request.urlopen(f"{address}/{path}", timeout=60) as answer:
            return bytes(answer.read())

    [application] = json.loads(get("api/v1/applications"))
    rest = f"api/v1/applications/{application['id']}"
    for name in ("environment", "sql?details=true&length=1000", "jobs", "stages?details=true", "allexecutors"):
        yield get(f"{rest}/{name}")
    for name in ("environment/", "SQL/", "StreamingQuery/", "jobs/", "stages/"):
        yield get(name)


def test_a_secured_stream(
    tmp_path: Path, server_dir: Path, certificates: Certificates, spark_cluster: Standalone, programs: Programs
) -> None:
    """The name of the topic is, by the same look, in all of these places."""
    port, events, copy = free_port(), tmp_path / "events", Copy(tmp_path / "checkpoint")
    events.mkdir()
    secured = SecureBroker(server_dir, certificates)
    add_user(secured.users, _USER, _WORD)
    with secured as broker:
        servers, output = broker.servers("PLAINTEXT"), f"{_TOPIC}-out"
        for name in (_TOPIC, output):
            create_topic(servers, name, PARTITIONS)
        fill(servers, _TOPIC, 0, RECORDS, PARTITIONS)
        login = f'username="{_USER}" password="{_WORD}"'
        options = {
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "SCRAM-SHA-512",
            "kafka.sasl.jaas.config": f"org.apache.kafka.common.security.scram.ScramLoginModule required {login};",
            "kafka.ssl.truststore.location": str(certificates.ca),
            "kafka.ssl.truststore.password": _STORE,
        }
        given = {"servers": broker.servers("SASL_SSL"), "options": options, "checkpoint": str(copy.checkpoint)}
        given |= {"from": _TOPIC, "to": output, "records": RECORDS // 2}
        confs = {"spark.ui.enabled": "true", "spark.ui.port": str(port), "spark.eventLog.enabled": "true"}
        confs |= {"spark.eventLog.dir": events.as_uri(), "spark.eventLog.compress": "false"}
        confs |= {"spark.executor.extraJavaOptions": f"-Dtopic={_TOPIC}"}
        running = programs.start("copy", given, spark__cores__max="2", **confs)
        copy.wait_for(running, RECORDS)
        looks: dict[str, Callable[[], Iterator[bytes]]] = {
            "command lines": _command_lines,
            "pages": lambda: _pages(f"http://{HOST}:{port}"),
            "event log": lambda: _below(events),
            "files of workers": lambda: _below(spark_cluster.folder),
            "output of the driver": lambda: _below(tmp_path, "run-*"),
            "checkpoint": lambda: _below(copy.checkpoint),
        }
        seen = {place: b"\n".join(look()) for place, look in looks.items()}

    def places(text: str) -> set[str]:
        return {place for place, found in seen.items() if text.encode() in found}

    assert places(_TOPIC) == looks.keys()
    assert places(_WORD) | places(_STORE) == set()
