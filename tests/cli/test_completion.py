"""`klog completion`: bash completes words; zsh and fish get their scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clients.klog import klog, klog_refusal

_LINE = """
eval "$(klog completion bash)"
COMP_WORDS=({words}) COMP_CWORD={last}
_klog_completion klog
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["klog", "cons"], ["consume"]),
        (["klog", "groups", "da"], ["dashboard"]),
        (["klog", "consume", "clicks", "--iso"], ["--isolation"]),
        (["klog", "consume", "clicks", "--isolation", "read_c"], ["read_committed"]),
    ],
)
def test_bash(words: list[str], found: list[str]) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", _LINE.format(words=" ".join(words), last=len(words) - 1)],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": path},
        timeout=60,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == (found, "")


@pytest.mark.parametrize(("shell", "line"), [("zsh", "#compdef klog"), ("fish", "function _klog_completion;")])
def test_other_shells(shell: str, line: str) -> None:
    done = klog("completion", shell)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == line
    assert "_KLOG_COMPLETE" in done.stdout


def test_an_unknown_shell_is_refused() -> None:
    assert "'bash', 'zsh', 'fish'" in klog_refusal("completion", "tcsh", code=2)
