"""What fuzzing found once is read for ever, and a short slice of fuzzing; make soak has the long runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .inputs import all_inputs
from .run import bounded_memory
from .targets import TARGETS

SECONDS = int(os.environ.get("SPARK_KLOG_FUZZ_SECONDS", "5"))
_LONG = 60
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


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.skipif(
    not SECONDS or importlib.util.find_spec("atheris") is None,
    reason="NOT FUZZED: SPARK_KLOG_FUZZ_SECONDS=0, or atheris is not installed; run.py says where it has wheels",
)
@pytest.mark.parametrize("target", TARGETS)
def test_fuzz(target: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.run", target, "--seconds", str(SECONDS), "--work", str(tmp_path)]
    # a short slice says of a change whether it broke something, and says it twice; a long one is worth a build
    command += ["--trace"] if SECONDS >= _LONG else ["--seed", "1"]
    # a shell in between: a process's peak of memory, which libFuzzer bounds, begins with that of who starts it
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
    assert "stat::number_of_executed_units" in done.stdout
