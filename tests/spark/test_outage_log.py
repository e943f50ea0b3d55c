"""A driver's standard error, and the query's final error, when a broker goes away."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.jobs.support import ROOT
from tests.support.broker import KlogBroker

from .support import create_topic, produce, values

_PROGRAM = Path(__file__).with_name("outage_program.py")


def test_the_log_names_the_time_waited_and_the_setting(server_dir: Path, topic: str, tmp_path: Path) -> None:
    with KlogBroker(server_dir) as broker:
        create_topic(broker.bootstrap_servers, topic, 1)
        produce(broker.bootstrap_servers, topic, values(10))
        command = [sys.executable, str(_PROGRAM), broker.bootstrap_servers, topic, str(tmp_path)]
        log = tmp_path / "stderr"
        with (
            log.open("w") as stderr,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT) as process,
        ):
            assert process.stdout is not None
            assert process.stdout.readline() == "written\n", log.read_text()
            broker.kill()
            output, _ = process.communicate(timeout=120)
    port = broker.bootstrap_servers.rpartition(":")[2]
    # while the query waits, the log has the time waited, the time left, the setting and the broker
    assert re.search(
        rf"still trying after [1-5] s, giving up in [1-5] s \(kafka\.[a-z.]+\.ms\): .*{port}", log.read_text()
    )
    assert re.search(
        rf"{port}.*; tried for \d(\.\d)? s \(kafka\.(request|socket\.connection\.setup)\.timeout\.ms\)", output
    )
