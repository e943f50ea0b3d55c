"""The Containerfile without a container: its files and its command exist, and its packages are enough."""

from __future__ import annotations

import json
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.servers.kafka import free_port

_ROOT = Path(__file__).parents[3]
_LINES = (_ROOT / "Containerfile").read_text().splitlines()
_SECONDS = 60
#: Runs the command as if some packages were not installed.
_COMMAND = "import sys; sys.modules |= dict.fromkeys({without}); from spark_klog.cli.main import main; main()"


def _instructions(name: str) -> list[str]:
    return [line.removeprefix(f"{name} ") for line in _LINES if line.startswith(f"{name} ")]


def _dependencies() -> set[str]:
    text = (_ROOT / "pyproject.toml").read_text()
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    return set(re.findall(r'^ *"([A-Za-z0-9-]+)', block, re.MULTILINE))


def test_its_files_are_there() -> None:
    copied = [word for line in _instructions("COPY") if "--from" not in line for word in line.split()[:-1]]
    assert [word for word in copied if not (_ROOT / word).exists()] == []
    kept = {line[1:] for line in (_ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) == kept


def test_its_command(server_dir: Path) -> None:
    """Clients reach the broker by its advertised name; it needs no package of an extra."""
    without = ["numpy", "pandas", "pyarrow", "pyspark", "zstandard"]
    assert not _dependencies() & set(without)
    (entry,), (default,) = map(_instructions, ("ENTRYPOINT", "CMD"))
    program, *words = [*json.loads(entry), *json.loads(default)]
    assert program == "klog"
    port = free_port()
    (check,) = (json.loads(line.strip().removeprefix("CMD ")) for line in _LINES if line.startswith("    CMD "))
    assert check[0] == "python"

    def is_healthy() -> bool:
        command = [sys.executable, *(word.replace("9092", str(port)) for word in check[1:])]
        return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=_SECONDS, check=False).returncode == 0

    assert not is_healthy()
    arguments = [word.replace("9092", str(port)).replace("/data", str(server_dir / "data")) for word in words]
    running = subprocess.Popen(
        [sys.executable, "-c", _COMMAND.format(without=without), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stdout is not None
        assert select.select([running.stdout], [], [], _SECONDS)[0]
        assert running.stdout.readline() == f"klog broker 0 ready on 0.0.0.0:{port}\n"
        assert is_healthy()
        admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{port}"})
        admin.create_topics([NewTopic("clicks", 2)])["clicks"].result(_SECONDS)
        found = admin.list_topics(timeout=_SECONDS)
        assert [(broker.host, broker.port) for broker in found.brokers.values()] == [("localhost", port)]
        assert len(found.topics["clicks"].partitions) == 2
        running.send_signal(signal.SIGTERM)
        assert running.wait(_SECONDS) == 0
    finally:
        running.kill()
        running.wait(_SECONDS)
