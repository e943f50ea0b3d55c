"""Refusals of a schema registry: an HTTP status, Confluent's error code, and the text of Confluent's registry."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from spark_klog.wire.listening import RequestRefused

#: The code of `invalid_schema`.
INVALID_SCHEMA = 42201
MODES = ("READWRITE", "READONLY", "READONLY_OVERRIDE", "IMPORT", "FORWARD")


class RegistryRefusal(RequestRefused):
    """A request that the registry does not carry out. `code` has the status as its first three digits."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code if code < 1000 else code // 100, reason)
        self.code = code
        self.reason = reason

    def __reduce__(self) -> tuple[type[RegistryRefusal], tuple[int, str]]:
        return type(self), (self.code, self.reason)


def bare(status: HTTPStatus, detail: str = "") -> RegistryRefusal:
    """A refusal that has nothing to do with schemas, such as that of an unknown path."""
    return RegistryRefusal(status, detail or f"HTTP {status.value} {status.phrase}")


def _refusal(code: int, text: str = "{}") -> Callable[..., RegistryRefusal]:
    """What makes the refusal with a code; its arguments take the places in the text."""
    return lambda *values: RegistryRefusal(code, text.format(*values))


subject_not_found = _refusal(40401, "Subject '{}' not found.")
version_not_found = _refusal(40402, "Version {} not found.")
subject_soft_deleted = _refusal(40404, "Subject '{}' was soft deleted. Set permanent=true to delete permanently")
subject_not_soft_deleted = _refusal(40405, "Subject '{}' was not deleted first before being permanently deleted")
version_soft_deleted = _refusal(
    40406, "Subject '{}' Version {} was soft deleted. Set permanent=true to delete permanently"
)
version_not_soft_deleted = _refusal(
    40407, "Subject '{}' Version {} was not deleted first before being permanently deleted"
)
no_level_of_subject = _refusal(40408, "Subject '{}' does not have subject-level compatibility configured")
no_mode_of_subject = _refusal(40409, "Subject '{}' does not have subject-level mode configured")
invalid_schema = _refusal(INVALID_SCHEMA)
invalid_version = _refusal(
    42202,
    "The specified version '{}' is not a valid version id. Allowed values are between [1, 2^31-1] and the string "
    '"latest"',
)
invalid_level = _refusal(
    42203,
    "Invalid compatibility level. Valid values are none, backward, forward, full, backward_transitive, "
    "forward_transitive, and full_transitive",
)
invalid_mode = _refusal(42204, f"Invalid mode. Valid values are {', '.join(MODES[:4])}")
not_permitted = _refusal(42205)
reference_exists = _refusal(
    42206, "One or more references exist to the schema {{magic=1,keytype=SCHEMA,subject={},version={}}}."
)
invalid_subject = _refusal(42208, "The specified subject '{}' is not a valid subject.")
schema_too_large = _refusal(42209)
invalid_rule_set = _refusal(42210, "Invalid rule set: migrationRules, domainRules and encodingRules are lists of rules")
context_not_empty = _refusal(42211, "The specified context '{}' is not empty.")
store_failed = _refusal(50001)
timed_out = _refusal(50002)


def schema_not_found(what: int | str | None = None) -> RegistryRefusal:
    return RegistryRefusal(40403, "Schema not found" if what is None else f"Schema {what} not found")


def incompatible(subject: str, messages: list[str]) -> RegistryRefusal:
    return RegistryRefusal(
        # Confluent's registry sends the status as the code here
        409,
        f'Schema being registered is incompatible with an earlier schema for subject "{subject}", details: '
        f"[{', '.join(messages)}]",
    )
