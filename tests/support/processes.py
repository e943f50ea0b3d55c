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


def workers(processes: list[psutil.Process]) -> list[psutil.Process]:
    """The processes that pyspark.daemon forked: tasks, and the sink's steps on the driver."""
    daemons = named(processes, "pyspark.daemon")
    pids = {daemon.pid for daemon in daemons}
    return [process for process in daemons if _parent(process) in pids]


def _parent(process: psutil.Process) -> int:
    try:
        return int(process.ppid())
    except psutil.Error:
        return -1


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
