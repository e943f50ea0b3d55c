"""franz-go's own tests, at our broker: groups of both protocols whose members come and go, and transactional chains."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.clients.build import built, compile_program, copy_into
from tests.support.clients.process import sources
from tests.support.packages.registries import download, program, run
from tests.support.runs.soak import SOAK
from tests.support.servers.broker import KlogBroker

pytestmark = [pytest.mark.peer, pytest.mark.test_all("client")]

_MODULE = "github.com/twmb/franz-go"
#: UNSUPPORTED.md has why: here no internal topic is assigned by a regular expression.
_SKIPPED = "^Test848RegexBrokerResolves$"
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


def test_the_suite_of_franz_go_passes(server_dir: Path) -> None:
    folder = _suite()
    with KlogBroker(server_dir, "--set", "num.partitions=3") as broker:
        done = subprocess.run(
            ["./kgo.test", "-test.v", "-test.skip", _SKIPPED, "-test.timeout", f"{_SECONDS}s"],
            cwd=folder,
            env=os.environ | _SETTINGS | {"KGO_SEEDS": broker.bootstrap_servers},
            capture_output=True,
            text=True,
            timeout=_SECONDS + 20,
        )
    results = re.findall(r"^ *--- (PASS|FAIL|SKIP): (\S+)", done.stdout, re.MULTILINE)
    assert done.returncode == 0, [name for result, name in results if result == "FAIL"]
    passed = {name for result, name in results if result == "PASS"}
    for test in ("TestGroupETL", "TestTxnEtl"):
        assert {
            f"{test}/{kind}" for kind in ("range", "cooperative-sticky/static", "range/848", "sticky/848")
        } <= passed
