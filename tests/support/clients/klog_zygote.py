"""Run `klog` commands in forks of a process with preloaded modules: python -m tests.support.clients.klog_zygote FD.

This saves half a second of CPU per command, and a whole one if it asks a schema registry or makes Arrow's columns,
as pyarrow then imports pandas, and httpx all that httpcore can work with. A request is a line of JSON on the socket FD,
{"argv": [...], "files": [stdin, stdout, stderr], "env": {...}, "cwd": ...}; the answer is a line with the exit code,
negative for a signal.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

_PRELOADED = [
    "pyarrow.compute",
    "spark_klog.cli.main",
    *(
        f"spark_klog.cli.commands.{name}"
        for name in ("groups", "log", "mirror", "offsets", "schemas", "topics", "users")
    ),
    *(f"spark_klog.cli.records.{name}" for name in ("consume", "produce", "arrow_form", "decoding", "encoding")),
    "httpx",
    "httpcore",
    "pandas",
    "encodings.idna",
    "spark_klog.base.properties",
    "spark_klog.schemas.avro.codec",
    "spark_klog.schemas.registry.client",
    "spark_klog.registry.differences",
    "spark_klog.registry.formats.avro",
    "spark_klog.client.admin.admin",
    "spark_klog.columns.decode",
    "spark_klog.client.consumer.consumer",
    "spark_klog.columns.encode",
    "spark_klog.client.producer.producer",
]


def _run(request: dict[str, Any]) -> int:
    """Run the command in this process, and return its exit code."""
    for number, (path, flags) in enumerate(
        zip(request["files"], (os.O_RDONLY, os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_TRUNC), strict=True)
    ):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["klog", *request["argv"]]
    from spark_klog.cli.main import main

    try:
        main(prog_name="klog")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 0 if exit_.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _serve(channel: socket.socket) -> None:
    lines = channel.makefile("rb")
    for line in lines:
        child = os.fork()
        if not child:
            channel.close()
            code = 1
            try:
                code = _run(json.loads(line))
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        channel.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    for name in _PRELOADED:
        with suppress(ImportError):  # of an extra that is not installed: the command that needs it says so
            import_module(name)
    _serve(socket.socket(fileno=int(sys.argv[1])))
