"""The attempts of a call: what is raised at its end."""

from __future__ import annotations

import time

import pytest

from spark_klog.client.requests import retried
from spark_klog.client.retry import Retry
from spark_klog.client.settings import client_config
from spark_klog.errors import ErrorCode, ProtocolError, RequestTimedOut


def test_an_attempt_without_time_hides_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may be so busy that an attempt begins when its time is nearly over: the failure before it is told."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    retry = Retry(client_config({"bootstrap.servers": "h:1"}), now + 2.0)
    said = ProtocolError(ErrorCode.LEADER_NOT_AVAILABLE, "topic t")
    now += 0.5
    steps = retried(retry, said)
    next(steps)
    now = 1001.9999
    with pytest.raises(StopIteration):
        next(steps)
    now = 1002.0
    with pytest.raises(ProtocolError) as raised:
        next(retried(retry, RequestTimedOut("broker h:1 did not answer within 8e-05 s")))
    assert raised.value is said
