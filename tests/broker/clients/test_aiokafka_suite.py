"""aiokafka's own tests of its consumer and producer, with the clients of `spark_klog.aio` in their place, at our broker
and Kafka.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Literal

import pytest

from tests.support.clients.aiokafka_suite import LEFT_OUT
from tests.support.runs.figures import count, note
from tests.support.runs.soak import in_soak
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import NEWEST, Kafka

# In soak alone: some of its tests give a record half a second, which a machine that runs all tests may not have.
pytestmark = [pytest.mark.test_all("client"), in_soak]

_ROOT = Path(__file__).parents[3]
#: The tests of aiokafka's version 0.14.0, with its licence: no registry has them.
_TESTS = _ROOT / "tests/data/aiokafka-0.14.0-tests.tar.xz"
_SECONDS = 400


@pytest.mark.parametrize("server", ["klog", pytest.param(NEWEST, marks=pytest.mark.peer)])
def test_the_suite_of_aiokafka_passes(server_dir: Path, tmp_path: Path, server: Literal["klog", "4.4.0"]) -> None:
    with tarfile.open(_TESTS) as archive:
        archive.extractall(tmp_path, filter="data")
    plugin = ("-p", "tests.support.clients.aiokafka_suite", "-c", os.devnull, "--rootdir", str(tmp_path))
    options = ("-v", "--tb=short", "-p", "no:cacheprovider", "--timeout=120")
    running = (
        KlogBroker(server_dir, "--set", "num.partitions=2")
        if server == "klog"
        else Kafka(server, server_dir, {"num.partitions": 2})
    )
    with running as broker:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *plugin, *options, str(tmp_path / "aiokafka_tests")],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(_ROOT), "SPARK_KLOG_SUITE_SERVERS": broker.bootstrap_servers},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    results = re.findall(r"^\S+::(\w+) (PASSED|FAILED|ERROR|SKIPPED)", done.stdout, re.MULTILINE)
    for _, result in results:
        count({"PASSED": "suite: passed", "SKIPPED": "suite: skipped"}.get(result, "suite: failed"))
    for reason, names in LEFT_OUT.items():
        count("suite: skipped", len(names.split()))
        note(f"aiokafka's suite: {len(names.split())} tests are left out: {reason}.")
    assert done.returncode == 0, done.stdout[-20_000:]
    assert len(results) > 50
