"""Read all kept inputs, and fuzz: one target for a second in `make test`, all for two in `make test-all`, and longer
in `make soak`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs.figures import count

from .inputs import all_inputs
from .run import bounded_memory
from .targets import TARGETS

SECONDS = int(os.environ.get("SPARK_KLOG_FUZZ_SECONDS", "2"))
_QUICK = 1
_LONG = 60
#: Of each start most is the instrumentation of the code; of the other targets `make test` reads the kept inputs.
_IN_QUICK = ("reader",)
_ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("target", TARGETS)
def test_corpus(target: str) -> None:
    inputs = all_inputs(target)
    assert len(inputs) > 20
    with bounded_memory():
        for name, data in inputs.items():
            try:
                TARGETS[target](data)
            except Exception as error:
                raise AssertionError(f"{name}: {data.hex()}") from error


@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.skipif(
    not SECONDS or importlib.util.find_spec("atheris") is None,
    reason="NOT FUZZED: SPARK_KLOG_FUZZ_SECONDS=0, or atheris is not installed; run.py says where it has wheels",
)
@pytest.mark.parametrize(
    "target", [pytest.param(one, marks=() if one in _IN_QUICK else pytest.mark.test_all("long")) for one in TARGETS]
)
def test_fuzz(target: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    seconds = min(SECONDS, _QUICK) if pytestconfig.getoption("--quick") else SECONDS
    command = [sys.executable, "-m", "tests.fuzz.run", target, "--seconds", str(seconds), "--work", str(tmp_path)]
    # a short run only shows whether a change broke something, so it uses a fixed seed; a long run is worth a build
    command += ["--trace"] if SECONDS >= _LONG else ["--seed", "1"]
    # libFuzzer limits the peak memory of a process, which starts at its parent's peak; the shell in between resets it
    done = subprocess.run(
        ["sh", "-c", '"$@"; exit $?', "sh", *command],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    told = [line for line in done.stdout.splitlines() if not line.startswith(("#", "INFO:", "WARNING:"))]
    assert done.returncode == 0, "\n".join(told)
    [inputs] = re.findall(r"^stat::number_of_executed_units: (\d+)", done.stdout, re.MULTILINE)
    count("inputs", int(inputs))
    count("seconds", seconds)
