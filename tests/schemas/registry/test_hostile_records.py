"""Records that nobody should write into a registry's topic: they are passed over, and the others count."""

from __future__ import annotations

import json
from typing import Any

import pytest
from confluent_kafka import Producer
from hypothesis import given, settings as hypothesis_settings, strategies as st

from spark_klog.embedded import EmbeddedCluster
from spark_klog.registry.api import answer
from spark_klog.registry.records import SCHEMA, Key
from spark_klog.registry.registry import Registry
from spark_klog.registry.state import State
from spark_klog.schema_registry import SchemaRegistry
from tests.schemas.registry.asking import ask, register
from tests.schemas.registry.memory_log import MemoryLog

_KEY = Key(SCHEMA, "x", 1).encode()
_HOSTILE = [
    (_KEY, b'{"subject":"x","version":1,"id":1e999,"schema":"\\"int\\""}'),
    (_KEY, b'{"subject":"x","version":1,"id":5000000000,"schema":"\\"int\\""}'),
    (_KEY, b'{"subject":"x","version":1,"id":-1,"schema":"\\"int\\""}'),
    (_KEY, b'{"subject":"x","version":1,"id":1,"schema":"\\ud800"}'),
    (_KEY, b'{"subject":"x","version":1,"id":1,"schema":"\\"int\\"","references":[{"name":"a","subject":"b",'
     b'"version":9999999999}]}'),
    (_KEY, b'{"subject":"x","version":1,"id":1,"schema":"\\"int\\"","metadata":{"properties":[1]}}'),
    (_KEY, b"[" * 100_000),
    (b'{"keytype":"SCHEMA","subject":"x","version":5000000000,"magic":1}', b'{"id":1,"schema":"\\"int\\""}'),
    (b'{"keytype":"SCHEMA","subject":"\\ud800","version":1,"magic":1}', b'{"id":1,"schema":"\\"int\\""}'),
    (b'{"keytype":"DELETE_SUBJECT","subject":"x","magic":0}', b'{"subject":"x","version":1e999}'),
    (b'{"keytype":"CLEAR_SUBJECT","subject":"x","magic":0}', b'{"subject":[]}'),
    (b'{"keytype":"MODE","subject":null,"magic":0}', b"{}"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), _HOSTILE)
def test_a_record_is_passed_over(key: bytes, value: bytes) -> None:
    log = MemoryLog()
    registry = Registry(log)  # type: ignore[arg-type]
    body = json.dumps({"schema": '"string"'}).encode()
    assert answer(registry, "POST", "/subjects/x/versions", "", body).status == 200
    log.state.apply(key, value, 0)
    for path in ("/subjects", "/schemas", "/subjects/x/versions/1", "/config", "/mode"):
        assert answer(registry, "GET", path, "", b"").status == 200
    made = answer(registry, "POST", "/subjects/y/versions", "", json.dumps({"schema": '"long"'}).encode())
    assert json.loads(made.body)["id"] == 2


_SCALARS: list[Any] = [None, True, 0, 1, -1, 1 << 40, 1e999, 0.5, "", "x", ":.x:a", "int", "\ud800"]
_SCALAR = st.sampled_from(_SCALARS)
_JSON = st.one_of(
    _SCALAR,
    st.lists(_SCALAR, max_size=2),
    st.lists(st.fixed_dictionaries(dict.fromkeys(["name", "subject", "version"], _SCALAR)), max_size=2),
    st.dictionaries(
        st.sampled_from(["tags", "properties", "domainRules"]), st.sampled_from([*_SCALARS, [], {}, {"x": 1}])
    ),
)
_NAMES = ["subject", "version", "id", "schema", "references", "metadata", "ruleSet", "mode"]
_VALUES = st.dictionaries(st.sampled_from(_NAMES), _JSON)
_KEYS = st.fixed_dictionaries(
    {
        "keytype": st.sampled_from(["SCHEMA", "CONFIG", "MODE", "DELETE_SUBJECT", "CLEAR_SUBJECT", "CONTEXT"]),
        "subject": _JSON,
        "version": _JSON,
        "context": _JSON,
    }
)


@hypothesis_settings(deadline=None)
@given(_KEYS, _VALUES)
def test_any_record_is_followed_or_passed_over(key: Any, value: Any) -> None:
    State().apply(json.dumps(key).encode(), json.dumps(value).encode(), 0)


def test_the_registry_goes_on(cluster: EmbeddedCluster, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"bootstrap.servers": cluster.bootstrap_servers}
    with SchemaRegistry(settings, "0", "hostile") as registry:
        assert register(registry.url, "a", '"int"') == 1
        producer = Producer(settings)
        for key, value in _HOSTILE:
            producer.produce("hostile", value, key)
        producer.flush(20)
        assert register(registry.url, "b", '"long"') == 2
    with SchemaRegistry(settings, "0", "hostile") as registry:
        assert ask(registry.url, "GET", "/subjects") == (200, ["a", "b"])
    assert caplog.text.count("is passed over") >= 2 * 10


def test_an_end_of_reading_is_said_at_once(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"bootstrap.servers": cluster.bootstrap_servers}
    with SchemaRegistry(settings, "0", "ended") as registry:
        register(registry.url, "a", '"int"')
        monkeypatch.setattr(State, "apply", lambda *_, **__: 1 // 0)
        for _ in range(2):
            status, refused = ask(registry.url, "POST", "/subjects/b/versions", {"schema": '"long"'})
            assert (status, refused["error_code"]) == (500, 50001)
            assert "restart the registry" in refused["message"]
        assert ask(registry.url, "GET", "/subjects") == (200, ["a"])
    assert "is no longer read" in caplog.text
