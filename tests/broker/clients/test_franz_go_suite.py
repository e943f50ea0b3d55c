"""franz-go's own tests, at our broker and Kafka: groups of both protocols whose members come and go, transactions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Literal

import pytest

from tests.support.clients.build import built, compile_program, copy_into
from tests.support.clients.process import sources
from tests.support.packages.registries import download, program, run
from tests.support.runs.figures import count, note
from tests.support.runs.soak import SOAK, in_soak
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import NEWEST, Kafka

pytestmark = [pytest.mark.peer, pytest.mark.test_all("client")]

_MODULE = "github.com/twmb/franz-go"
#: UNSUPPORTED.md has why.
_SKIPPED = "Test848RegexBrokerResolves"
_WHY = "at our broker no internal topic is assigned by a regular expression"
_SETTINGS = {
    "KGO_TEST_RF": "1",
    "KGO_TEST_RECORDS": "20000" if SOAK else "3000",
    "KGO_TEST_MAX_TOPIC_PARTS": "7",
    "KGO_LOG_LEVEL": "none",
}
_SECONDS = 400


def _suite() -> Path:
    """The folder of the compiled tests, which also has the sources."""
    go = program(("go",), "golang-go")
    files = [sources("franz_go") / file for file in ("go.mod", "go.sum")]

    def build(folder: Path) -> None:
        copy_into(folder, files)
        download("the modules of franz-go", [go, "mod", "download"], cwd=folder)
        status, place = run([go, "list", "-m", "-f", "{{.Dir}}", _MODULE], folder, {})
        assert status == 0, place
        module = folder / "module"
        shutil.copytree(place.strip(), module, copy_function=shutil.copyfile)
        for each in (module, *module.rglob("*")):
            each.chmod(0o755)  # those of the module cache are read-only
        download("the modules of franz-go's tests", [go, "mod", "download"], cwd=module)
        command = [go, "test", "-c", "-o", str(module / "pkg/kgo/kgo.test"), "./pkg/kgo"]
        compile_program(command, module, {"GOPROXY": "off", "CGO_ENABLED": "0"})

    return built("franz-go-suite", files, build) / "module/pkg/kgo"


@pytest.mark.parametrize("server", ["klog", pytest.param(NEWEST, marks=in_soak)])
def test_the_suite_of_franz_go_passes(server_dir: Path, server: Literal["klog", "4.4.0"]) -> None:
    folder = _suite()
    left_out = ["-test.skip", f"^{_SKIPPED}$"] if server == "klog" else []
    running = (
        KlogBroker(server_dir, "--set", "num.partitions=3")
        if server == "klog"
        else Kafka(server, server_dir, {"num.partitions": 3})
    )
    with running as broker:
        done = subprocess.run(
            ["./kgo.test", "-test.v", *left_out, "-test.timeout", f"{_SECONDS}s"],
            cwd=folder,
            env=os.environ | _SETTINGS | {"KGO_SEEDS": broker.bootstrap_servers},
            capture_output=True,
            text=True,
            timeout=_SECONDS + 20,
        )
    results = re.findall(r"^ *--- (PASS|FAIL|SKIP): (\S+)", done.stdout, re.MULTILINE)
    for result, _ in results:
        count({"PASS": "suite: passed", "FAIL": "suite: failed", "SKIP": "suite: skipped"}[result])
    if left_out:
        count("suite: failed")
        note(f"franz-go's suite: {_SKIPPED} is left out at our broker, where it fails: {_WHY}.")
    assert done.returncode == 0, [name for result, name in results if result == "FAIL"]
    passed = {name for result, name in results if result == "PASS"}
    for test in ("TestGroupETL", "TestTxnEtl"):
        assert {
            f"{test}/{kind}" for kind in ("range", "cooperative-sticky/static", "range/848", "sticky/848")
        } <= passed
