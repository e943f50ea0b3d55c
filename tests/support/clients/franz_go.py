"""franz-go."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tests.support.clients.build import go_program
from tests.support.clients.process import ProcessClient


class FranzGo(ProcessClient):
    name = "franz-go"
    has_consumer_protocol = True

    def command(self) -> tuple[list[str], Mapping[str, str]]:
        return [str(go_program("franz_go"))], os.environ
