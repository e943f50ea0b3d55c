"""Both drivers of the producer for the tests that use the fixture `driver`: a thread, and asyncio's loop."""

from __future__ import annotations

import pytest

from tests.support.clients.on_loop import LoopProducer


@pytest.fixture(params=["thread", pytest.param("loop", marks=pytest.mark.test_all("client"))])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the driver, of which the module's `Producer` is for the test."""
    if request.param == "loop":
        monkeypatch.setattr(request.module, "Producer", LoopProducer)
    return str(request.param)
