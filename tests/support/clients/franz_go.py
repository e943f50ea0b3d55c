"""franz-go."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.support.clients.build import built, compile_program, copy_into
from tests.support.clients.process import ProcessClient, sources
from tests.support.packages.registries import download, program


class FranzGo(ProcessClient):
    name = "franz-go"
    has_consumer_protocol = True

    def command(self) -> tuple[list[str], Mapping[str, str]]:
        go = program(("go",), "golang-go")
        files = [sources("franz_go") / file for file in ("go.mod", "go.sum", "main.go")]

        def build(folder: Path) -> None:
            copy_into(folder, files)
            download("the modules of franz-go", [go, "mod", "download"], cwd=folder)
            # Stripped and without cgo: saves a minute of CPU.
            offline = {"GOPROXY": "off", "CGO_ENABLED": "0"}
            compile_program([go, "build", "-ldflags=-s -w", "-o", "driver", "."], folder, offline)

        return [str(built("franz-go", files, build) / "driver")], os.environ
