"""An interrupt (Ctrl-C) in a request does not spoil the next one."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from spark_klog.client.cluster import Cluster
from spark_klog.protocol.apis import METADATA
from tests.support.scripted_broker import ScriptedCluster

_MODULES = ("client/network/connection.py", "client/network/frame_stream.py")
_OUTSIDE = ("close", "closed")


class _Interrupt:
    """Raise KeyboardInterrupt at the line numbered `at` of the modules; `is_over` if there is none."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.is_over = True

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        is_ours = frame.f_code.co_filename.endswith(_MODULES) and frame.f_code.co_name not in _OUTSIDE
        if event == "line" and is_ours:
            self._at -= 1
            if self._at == 0:
                self.is_over = False
                raise KeyboardInterrupt
        return self if is_ours else None


def _topics(cluster: Cluster, *names: str) -> list[str]:
    answer = cluster.request(0, METADATA, {"topics": [{"name": name} for name in names]})
    return [topic["name"] for topic in answer["topics"]]


def test_an_interrupt_at_each_line_of_a_request() -> None:
    with ScriptedCluster({"t": 1, "u": 1}) as brokers:
        with Cluster.connect({"bootstrap.servers": brokers.bootstrap_servers}) as cluster:
            at, is_over = 0, False
            while not is_over:
                at += 1
                interrupt = _Interrupt(at)
                before = sys.gettrace()
                sys.settrace(interrupt)
                try:
                    _topics(cluster, "t")
                except KeyboardInterrupt:
                    pass
                finally:
                    sys.settrace(before)
                is_over = interrupt.is_over
                assert _topics(cluster, "u") == ["u"], at
                assert cluster.plain_connection(0).pending == 0, at
    assert at > 50, at
