"""Run MirrorMaker 2 of Kafka 3.9.1 in a process of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.packages.maven import resolve

_SECONDS = 60.0


def mirror_maker_libs() -> Path:
    """The folder with MirrorMaker's jars."""
    artifacts = (
        "org.apache.kafka:connect-mirror:3.9.1",
        "org.apache.kafka:connect-runtime:3.9.1",
        "org.slf4j:slf4j-simple:1.7.36",
    )
    return resolve("connect-mirror-3.9.1", artifacts)


@contextmanager
def mirror_maker(
    libs: Path, source: str, target: str, alias: str, topic: str, folder: Path, more: Mapping[str, str], tasks: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Mirror `topic` from `source` to `target`, where it is `ALIAS.TOPIC`; logs to ALIAS.log in `folder`."""
    settings = {
        "clusters": f"{alias}, target",
        f"{alias}.bootstrap.servers": source,
        "target.bootstrap.servers": target,
        f"{alias}->target.enabled": "true",
        f"{alias}->target.topics": topic,
        f"target->{alias}.enabled": "false",
        "tasks.max": str(tasks),
        "emit.heartbeats.enabled": "false",
        "emit.checkpoints.enabled": "false",
        "sync.topic.acls.enabled": "false",
        "offset-syncs.topic.location": "target",
        **more,
    }
    settings |= dict.fromkeys(
        [
            *("replication.factor", "offset-syncs.topic.replication.factor"),
            *(f"{kind}.storage.replication.factor" for kind in ("config", "offset", "status")),
        ],
        "1",
    )
    file = folder / f"{alias}.properties"
    file.write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
    command = ["java", "-Xmx1g", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", f"{libs}/*"]
    with (folder / f"{alias}.log").open("w") as output:
        process = subprocess.Popen(
            [*command, "org.apache.kafka.connect.mirror.MirrorMaker", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
