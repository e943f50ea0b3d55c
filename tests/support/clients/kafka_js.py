"""kafkajs, with its third-party codec plugins.

It has no consumer without a group, so its fetch request and record decoder are used directly to read partitions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.support.clients.build import built, copy_into
from tests.support.clients.process import ProcessClient, sources
from tests.support.packages.registries import download, program


class KafkaJs(ProcessClient):
    name = "kafkajs"
    has_null_headers = False

    def command(self) -> tuple[list[str], Mapping[str, str]]:
        node = program(("node", "nodejs"), "nodejs")
        folder = sources("kafkajs")
        files = [folder / "package.json", folder / "package-lock.json"]

        def install(work: Path) -> None:
            copy_into(work, files)
            npm = program(("npm",), "npm")
            download("kafkajs", [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=work)

        modules = built("kafkajs", files, install) / "node_modules"
        environment = {"NODE_PATH": str(modules), "KAFKAJS_NO_PARTITIONER_WARNING": "1"}
        return [node, str(folder / "driver.js")], {**os.environ, **environment}
