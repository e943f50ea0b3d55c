"""Find and kill the processes of a program."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from contextlib import suppress

import psutil


def tree_of(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> list[psutil.Process]:
    """The process, then its descendants; nothing once it has ended: its pid may be another process's."""
    with suppress(psutil.NoSuchProcess):
        if process.poll() is None:
            top = psutil.Process(process.pid)
            return [top, *top.children(recursive=True)]
    return []


def named(processes: list[psutil.Process], word: str) -> list[psutil.Process]:
    """The processes with the word in their command line."""
    found = []
    for process in processes:
        try:
            if any(word in part for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill(processes: Iterable[psutil.Process]) -> int:
    """Send SIGKILL; return the number of processes that still existed."""
    hit = 0
    for process in processes:
        try:
            process.kill()
            hit += 1
        except psutil.NoSuchProcess:
            continue
    return hit
