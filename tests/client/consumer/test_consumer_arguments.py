"""Arguments that the consumer's methods reject, and the error messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spark_klog.client import Committed, Consumer
from spark_klog.errors import ConfigError

pytestmark = pytest.mark.usefixtures("driver")

_CALLS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda it: it.assign(["in"]), r"assign: 'in' must be \(topic, partition\) or"),
    (lambda it: it.assign("in"), "assign takes a list of .*, not str"),
    (lambda it: it.assign([("in", "0")]), "assign: partition '0' must be int, not str"),
    (lambda it: it.assign([(b"in", 0)]), "assign: topic b'in' must be str, not bytes"),
    (lambda it: it.assign([("in", 0, 1.5)]), "assign: offset 1.5 must be int"),
    (lambda it: it.subscribe("t"), r"subscribe takes a list of topics.*subscribe\(\['t'\]\)"),
    (lambda it: it.subscribe([1]), "subscribe: topic 1 must be str"),
    (lambda it: it.subscribe(["t"], print), "subscribe: listener must be a RebalanceListener"),
    (lambda it: it.commit(5), "commit: offsets must be a dict"),
    (lambda it: it.commit([("t", 0, 5)]), "commit: offsets must be a dict"),
    (lambda it: it.commit({"t": 5}), r"commit: 't' must be \(topic, partition\)"),
    (lambda it: it.commit({("t", 0): "5"}), "commit: offset '5' must be int"),
    (lambda it: it.commit({("t", 0): Committed("5")}), "commit: offset '5' must be int"),  # type: ignore[arg-type]
    (lambda it: it.commit_async({("t", 0): 5}, "done"), "commit_async: on_done must be a function"),
    (lambda it: it.seek("t", None, 5), "seek: partition None must be int"),
    (lambda it: it.pause(["t"]), r"pause: 't' must be \(topic, partition\)"),
    (lambda it: it.committed(("t", 0)), r"committed: 't' must be \(topic, partition\)"),
]
_VALUES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda it: it.assign([("in", -1)]), "assign: partition -1"),
    (lambda it: it.assign([("in", 0, -3)]), "assign: offset -3"),
    (lambda it: it.assign([("in", 0), ("in", 0, 5)]), "assigned twice"),
    (lambda it: it.subscribe([]), "the list of topics is empty"),
    (lambda it: it.subscribe("^("), r"subscribe: '\^\(' is not a regular expression"),
]


@pytest.mark.parametrize(("call", "message"), _CALLS)
def test_types(call: Callable[[Any], Any], message: str) -> None:
    _refused(call, message, TypeError)


@pytest.mark.parametrize(("call", "message"), _VALUES)
def test_values(call: Callable[[Any], Any], message: str) -> None:
    _refused(call, message, ConfigError)


def _refused(call: Callable[[Any], Any], message: str, kind: type[Exception]) -> None:
    settings = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "enable.auto.commit": False}
    with Consumer(settings) as consumer, pytest.raises(kind, match=message):
        call(consumer)
