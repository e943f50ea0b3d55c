"""Both drivers of the consumer for the tests that use the fixture `driver`: a thread, and asyncio's loop."""

from __future__ import annotations

import pytest

from tests.support.clients import consumers
from tests.support.clients.on_loop import LoopConsumer


@pytest.fixture(params=["thread", pytest.param("loop", marks=pytest.mark.test_all("client"))])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the driver, of which the module's `Consumer`, and that of group members, is for the test."""
    if request.param == "loop":
        monkeypatch.setattr(request.module, "Consumer", LoopConsumer, raising=False)
        monkeypatch.setattr(consumers, "Consumer", LoopConsumer)
    return str(request.param)
