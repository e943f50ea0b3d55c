"""The job of loads without Spark: its tasks run in the process of its driver, and in no JVM.

python -m tests.load.job_program ARGUMENTS...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from click.testing import CliRunner, Result

from spark_klog.cli.jobs import batch_load
from tests.load.support import InProcess


class Runner(InProcess):
    """In place of Spark's runner."""

    def __init__(self, _: Callable[[], Any]) -> None:
        super().__init__()

    def has_ended(self) -> bool:
        return False

    def stop(self) -> None:
        """Nothing is left to do."""


def run_job(arguments: Sequence[str]) -> Result:
    """Run the job in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_load, "SparkRunner", Runner)
        return CliRunner().invoke(batch_load.main, list(arguments))


if __name__ == "__main__":
    batch_load.SparkRunner = Runner  # type: ignore[assignment,misc]
    batch_load.main()
