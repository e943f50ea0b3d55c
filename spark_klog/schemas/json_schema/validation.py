"""Records checked in full against their schema: minimum, pattern, required, and all else that a column does not say."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import urljoin

from spark_klog.base.extras import require
from spark_klog.errors import SchemaError
from spark_klog.schemas.json_references import base_of
from spark_klog.schemas.json_schema.row_values import load_json
from spark_klog.schemas.json_schema.schema import JsonSchema

#: Characters of a message: jsonschema's have the whole value.
_LONGEST: Final = 300


class Validator:
    """Checks records by one schema, with jsonschema. As with its validators, formats are not checked.

    `SchemaError` if the schema breaks the rules of its dialect. `MissingPackage` without jsonschema.
    """

    def __init__(self, schema: JsonSchema) -> None:
        require("JSON Schemas that records are validated by", "jsonschema")
        from jsonschema import FormatChecker
        from jsonschema.exceptions import SchemaError as InvalidSchema
        from jsonschema.validators import Draft202012Validator, validator_for
        from referencing import Registry, Resource
        from referencing.jsonschema import DRAFT202012

        dialect = validator_for(schema.document, default=Draft202012Validator)
        try:
            dialect.check_schema(schema.document, format_checker=FormatChecker(formats=()))
        except InvalidSchema as error:
            place = "/".join(map(str, error.absolute_path))
            raise SchemaError(f"#/{place}: {error.message[:_LONGEST]}") from None
        except RecursionError:
            raise SchemaError("the schema is nested too deeply") from None
        base = base_of(schema.document, "") if isinstance(schema.document, dict) else ""
        registry: Any = Registry()
        for name, document in schema.documents.items():
            resource = Resource.from_contents(document, default_specification=DRAFT202012)
            registry = registry.with_resources([(uri, resource) for uri in (name, urljoin(base, name))])
        self._validator = dialect(schema.document, registry=registry.crawl())

    def check(self, row: bytes) -> None:
        """ValueError says why a record is not of the schema."""
        from referencing.exceptions import Unresolvable

        try:
            error = next(self._validator.iter_errors(load_json(row)), None)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        except Unresolvable as unresolvable:
            raise ValueError(f"$ref {unresolvable.ref} is neither in the schema nor among its references") from None
        except re.error as invalid:
            raise ValueError(f"a pattern of the schema is none of Python's: {invalid}") from None
        if error is not None:
            path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
            where = f"field {path.removeprefix('.')}" if path else "the value"
            raise ValueError(f"{where} is not valid: {error.message[:_LONGEST]}")
