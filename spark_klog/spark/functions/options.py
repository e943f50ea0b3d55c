"""Options of the functions for columns: Databricks' names and those of the source and sink. Case does not matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_klog.base.names import Format
from spark_klog.base.settings import advice, nearest
from spark_klog.client.serialization import RowNames
from spark_klog.errors import ConfigError
from spark_klog.schemas.codec import names_file
from spark_klog.schemas.column_format import Column, ColumnFormat, Evolution
from spark_klog.schemas.column_writing import WriteFormat
from spark_klog.schemas.registry.client import RegistrySettings
from spark_klog.schemas.registry.settings import NAMES
from spark_klog.security.config import Settings
from spark_klog.spark.option_table import OPTIONS, Use, names_for, option
from spark_klog.spark.options import REGISTRY_PREFIX, REGISTRY_PREFIXES, check_evolution

_BY_NAME = {name.lower(): OPTIONS[own] for own in names_for(Use.FROM | Use.TO) for name in (own, *OPTIONS[own].others)}
#: Options of Spark's and Databricks' functions that there is no need for here.
_ADVICE = {
    "avroschema": "give the schema that rows are to have as schema=; with a registry each record is read by its own",
    "compression": "records are not compressed one by one; a producer compresses batches, see compression.type",
    "recursivefieldmaxdepth": "recursive schemas are not supported: Spark has no type for them",
    "recursive.fields.max.depth": "recursive schemas are not supported: Spark has no type for them",
}


@dataclass(frozen=True)
class FunctionOptions:
    """The options of one call of `function`, parsed by name; `ConfigError` for unknown, wrong or contradicting ones.

    The keywords of a call, such as `subject`, are options too: each is set in one of the two places.
    """

    function: str
    format: Format
    column: Column
    registry: RegistrySettings | None
    own: dict[str, str] = field(repr=False)
    text: str | None = None

    @classmethod
    def of(
        cls,
        function: str,
        form: Format,
        options: Mapping[str, Any] | None,
        keywords: Mapping[str, Any],
        *,
        schema: str | None,
        is_key: bool = False,
    ) -> FunctionOptions:
        use = Use.FROM if function.startswith("from_") else Use.TO
        own, settings = Settings(), Settings()
        given = [*(options or {}).items(), *((name, value) for name, value in keywords.items() if value is not None)]
        for name, value in given:
            if not isinstance(value, str | bool | int):
                raise ConfigError(f"{function}: option {name} must be a text, not a {type(value).__name__}")
            target, setting = _place(function, name, use, form)
            place = own if target else settings
            if place.setdefault(setting, str(value)) != str(value):
                raise ConfigError(f"{function}: option {name} and another name of the same option differ: remove one")
        url = own.pop("schemaRegistryUrl", "").strip()
        if url and settings.setdefault("url", url) != url:
            raise ConfigError(f"{function}: options schemaRegistryUrl and {REGISTRY_PREFIX}url differ: remove one")
        registry = None
        if settings:
            if "url" not in settings:
                raise ConfigError(f"{function}: option {REGISTRY_PREFIX}{next(iter(settings))} needs schemaRegistryUrl")
            registry = RegistrySettings(settings, REGISTRY_PREFIX)
            registry.registry()  # its settings are right, and its packages are there
        made = cls(function, form, "key" if is_key else "value", registry, own, schema)
        made._check()
        return made

    def _check(self) -> None:
        if self.text is not None and names_file(self.text):
            raise self._error(f"schema {self.text!r} looks like a file's name, and must be the text of the schema")
        given = self.own.keys() if self.text is None else {*self.own, "schema"}
        self._names.check(self.format, given, has_registry=self.registry is not None)
        for name in ("schemaEvolution", "autoRegisterSchemas", "useLatestVersion") if self.registry is None else ():
            if name in self.own:
                raise self._error(f"option {name} needs schemaRegistryUrl")

    @property
    def _names(self) -> RowNames:
        own = "schema", "schemaId", "subject", "messageName"
        return RowNames(f"{self.function}: option", "schemaRegistryUrl", "format", *own)

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.function}: {what}")

    def _source(self, **more: Any) -> ColumnFormat:
        number, subject = option(self.own, "schemaId"), self.own.get("subject", "").strip() or None
        if "messageName" in self.own:
            more["message"] = self.own["messageName"].strip() or None
        if "validate" in self.own:
            more["validates"] = option(self.own, "validate")
        return ColumnFormat(self.column, self.format, self.registry, self.text, number, subject, **more)

    def reading(self) -> ColumnFormat:
        """How a column is read."""
        evolution: Evolution = option(self.own, "schemaEvolution")
        is_permissive = option(self.own, "mode") == "permissive"
        source = self._source(is_permissive=is_permissive, evolution=evolution, ends_at_unreadable=True)
        if source.text is None and source.schema_id is None and source.subject is None:
            has = "subject, or schema" if self.registry is not None else "schema, or subject and schemaRegistryUrl"
            raise self._error(f"set {has}: Spark has to know the type of the rows before it reads them")
        check_evolution(source, evolution, self._names)
        return source

    def writing(self) -> WriteFormat:
        """How a column is written."""
        source = self._source()
        registers = option(self.own, "autoRegisterSchemas")
        uses_latest = option(self.own, "useLatestVersion")
        if uses_latest and registers and "autoRegisterSchemas" in self.own:
            raise self._error("options autoRegisterSchemas=true and useLatestVersion=true exclude each other")
        other = "schema" if source.text is not None else "option schemaId" if source.schema_id is not None else None
        if uses_latest and other is not None:
            raise self._error(f"{other} and option useLatestVersion exclude each other: remove one of them")
        if source.registry is not None and source.subject is None and source.schema_id is None:
            raise self._error("set subject, such as TOPIC-value, or option schemaId")
        return WriteFormat(source, registers=registers, uses_latest=uses_latest)


def _place(function: str, name: str, use: Use, form: Format) -> tuple[bool, str]:
    """(whether it is an option of ours, its name there or the registry's setting)."""
    key = name.lower()
    row = _BY_NAME.get(key)
    if row is not None:
        if row.of and form not in row.of:
            raise ConfigError(f"{function}: option {name} is for the functions of {row.of[0]}")
        if not row.uses & use:
            direction = "reading" if row.uses & Use.FROM else "writing"
            raise ConfigError(f"{function}: option {name} is for the functions of {direction}")
        return True, row.name
    for prefix in REGISTRY_PREFIXES:
        setting = key.removeprefix(prefix)
        if setting != key:
            if setting not in NAMES:
                raise ConfigError(f"{function}: unknown option {name!r}: {advice(setting, NAMES)}")
            return False, setting
    if key in _ADVICE:
        raise ConfigError(f"{function}: option {name} is not supported: {_ADVICE[key]}")
    known = [own for own in names_for(use) if not OPTIONS[own].of or form in OPTIONS[own].of]
    others = [other for own in known for other in OPTIONS[own].others]
    hint = nearest(key, (*known, *others, f"{REGISTRY_PREFIX}url")) or f"the known ones are {', '.join(known)}"
    raise ConfigError(f"{function}: unknown option {name!r}; {hint}, and {REGISTRY_PREFIX}*")
