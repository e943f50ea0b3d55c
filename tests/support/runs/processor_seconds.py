"""Run a command, and print at its end the processor seconds of all its processes: `make test`.

    python -m tests.support.runs.processor_seconds python -m pytest --quick

Seconds by a clock depend on what else the machine does; these can be compared. Of a process that has left its parent,
such as a JVM or a server whose parent was killed, the time would be nobody's: on Linux such processes come to this one.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
#: How long to wait, after the command, for what it has left. What runs on then is counted up to there.
_SECONDS = 15.0
#: Positions in /proc/PID/stat behind the command's name: parent, and ticks as user, as system, and of its children.
_PARENT, _FIRST_TICKS, _END_TICKS = 1, 11, 15


def _left(pid: int) -> dict[int, float]:
    """Processor seconds of the living descendants of a process, by pid."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            own = int(path.parent.name)
            children.setdefault(int(fields[_PARENT]), []).append(own)
            seconds[own] = sum(map(int, fields[_FIRST_TICKS:_END_TICKS])) / os.sysconf("SC_CLK_TCK")
    waiting, result = [*children.get(pid, [])], {}
    while waiting:
        own = waiting.pop()
        result[own] = seconds[own]
        waiting += children.get(own, [])
    return result


def main(command: list[str]) -> int:
    """Return the command's exit code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the command as well
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    code, deadline = None, 0.0
    while code is None or time.monotonic() < deadline:
        try:
            pid, status = os.waitpid(-1, 0 if code is None else os.WNOHANG)
        except ChildProcessError:
            break
        if pid == process.pid:
            code, deadline = os.waitstatus_to_exitcode(status), time.monotonic() + _SECONDS
        elif not pid:
            time.sleep(0.05)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    left = _left(os.getpid())
    total = usage.ru_utime + usage.ru_stime + sum(left.values())
    runs_on = f", of which {len(left)} run on: {' '.join(map(str, left))}" if left else ""
    print(f"{total:.0f} processor seconds of all processes{runs_on}", flush=True)  # noqa: T201 - a command
    assert code is not None
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
