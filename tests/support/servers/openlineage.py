"""OpenLineage's events, checked and received: JSON schemas of their form, and a server for the client's HTTP transport.

`check_event` checks an event by one of two sets of schemas:

* those that OpenLineage publishes, if the environment variable OPENLINEAGE_SPEC names the folder `spec` of its sources;
* else schemas made from the classes of its official client, which OpenLineage generates from the published ones. They
  are stricter: a field that no class has is an error.

Our own facets are checked by the schema in docs/reference.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import threading
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attr
from jsonschema import Draft202012Validator, FormatChecker
from openlineage.client import generated
from openlineage.client.generated import base
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tests.support.papers.pages import ROOT

OUR_FACETS = ROOT / "docs" / "reference" / "lineage-facets.json"
_SPEC = os.environ.get("OPENLINEAGE_SPEC")
_FORMATS = {"eventTime": "date-time", "producer": "uri", "schemaURL": "uri", "runId": "uuid", "uri": "uri"}
_CLASSES = "urn:classes"


def check_event(event: dict[str, Any]) -> None:
    """Raise `jsonschema.ValidationError` if an event, or a facet of it, is not as its schema says."""
    _validator(event["schemaURL"]).validate(event)
    parts = [event["run"], event["job"], *event["inputs"], *event["outputs"]]
    facets = [part.get(kind, {}) for part in parts for kind in ("facets", "inputFacets", "outputFacets")]
    for facet in (facet for kind in facets for facet in kind.values()):
        _validator(facet["_schemaURL"]).validate(facet)


@cache
def _validator(url: str) -> Draft202012Validator:
    registry = _registry()
    assert registry.get(url.partition("#")[0]) is not None, f"nobody publishes {url}"
    checker = FormatChecker(("date-time", "uri", "uuid"))
    return Draft202012Validator({"$ref": url}, registry=registry, format_checker=checker)


@cache
def _registry() -> Registry[Any]:
    if _SPEC is not None:
        files = [Path(_SPEC, "OpenLineage.json"), *Path(_SPEC, "facets").glob("*.json")]
        schemas = [json.loads(path.read_text()) for path in files]
    else:
        schemas = list(_schemas_of_classes())
    schemas.append(json.loads(OUR_FACETS.read_text()))
    resources = [(schema["$id"], Resource(schema, DRAFT202012)) for schema in schemas]
    return Registry().with_resources(resources)


def _schemas_of_classes() -> Iterator[dict[str, Any]]:
    """A schema for each class; and those by the addresses of the published ones, which refer to it."""
    classes: dict[str, dict[str, Any]] = {}
    files: dict[str, dict[str, Any]] = {}
    for item in pkgutil.iter_modules(generated.__path__):
        for kind in vars(importlib.import_module(f"{generated.__name__}.{item.name}")).values():
            if not isinstance(kind, type) or not attr.has(kind) or kind.__module__ == "openlineage.client.utils":
                continue
            classes[_key(kind)] = _of_class(kind)
            file, _, path = getattr(kind, "_get_schema", str)().partition("#/$defs/")
            if path == kind.__name__:
                files.setdefault(file, {})[path] = _of_type(kind)
    yield {"$id": _CLASSES, "$defs": classes}
    for file, definitions in files.items():
        yield {"$id": file, "$defs": definitions}


def _key(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def _of_class(kind: type) -> dict[str, Any]:
    names = {item.name for item in attr.fields(kind)}
    hints = typing.get_type_hints(kind, vars(base) | vars(importlib.import_module(kind.__module__)))
    properties = {name: _of_type(hints[name]) for name in names}
    for name, word in _FORMATS.items():
        if name in names and properties[name].get("type") == "string":
            properties[name]["format"] = word
    required = {"_producer", "_schemaURL", "producer", "schemaURL"} & names
    required |= {item.name for item in attr.fields(kind) if item.default is attr.NOTHING}
    is_open = kind in (base.BaseFacet, base.RunFacet, base.JobFacet, base.DatasetFacet)
    is_open |= kind in (base.InputDatasetFacet, base.OutputDatasetFacet)
    return {"type": "object", "properties": properties, "required": sorted(required), "additionalProperties": is_open}


def _of_type(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in arguments:  # the client leaves out what is None
        (hint,) = (one for one in arguments if one is not type(None))
        return _of_type(hint)
    if origin is list:
        return {"type": "array", "items": _of_type(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of_type(arguments[1])}
    simple = {str: "string", int: "integer", bool: "boolean", float: "number"}
    if hint in simple:
        return {"type": simple[hint]}
    if hint is base.EventType:
        return {"enum": [state.value for state in base.EventType]}
    return {"$ref": f"{_CLASSES}#/$defs/{_key(hint)}"} if attr.has(hint) else {}


class LineageServer:
    """What OpenLineage's servers do with events: keeps them, by default answers 201.

    While `is_stuck` is set, it answers nothing.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.status = 201
        self._may_answer = threading.Event()
        self._may_answer.set()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                owner._may_answer.wait(60)
                if self.path == "/api/v1/lineage" and owner.status < 300:
                    owner.bodies.append(body)
                    owner.events.append(json.loads(body))
                try:
                    self.send_response(owner.status)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                except OSError:  # the client has closed the connection
                    pass

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def get_stuck(self) -> None:
        self._may_answer.clear()

    def close(self) -> None:
        self._may_answer.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def lineage_server() -> Iterator[LineageServer]:
    server = LineageServer()
    try:
        yield server
    finally:
        server.close()
