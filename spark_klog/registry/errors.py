"""Refusals of a schema registry: an HTTP status, Confluent's error code, and the text of Confluent's registry."""

from __future__ import annotations

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


def subject_not_found(subject: str) -> RegistryRefusal:
    return RegistryRefusal(40401, f"Subject '{subject}' not found.")


def version_not_found(version: int) -> RegistryRefusal:
    return RegistryRefusal(40402, f"Version {version} not found.")


def schema_not_found(what: int | str | None = None) -> RegistryRefusal:
    return RegistryRefusal(40403, "Schema not found" if what is None else f"Schema {what} not found")


def subject_soft_deleted(subject: str) -> RegistryRefusal:
    return RegistryRefusal(40404, f"Subject '{subject}' was soft deleted. Set permanent=true to delete permanently")


def subject_not_soft_deleted(subject: str) -> RegistryRefusal:
    return RegistryRefusal(40405, f"Subject '{subject}' was not deleted first before being permanently deleted")


def version_soft_deleted(subject: str, version: int) -> RegistryRefusal:
    return RegistryRefusal(
        40406, f"Subject '{subject}' Version {version} was soft deleted. Set permanent=true to delete permanently"
    )


def version_not_soft_deleted(subject: str, version: int) -> RegistryRefusal:
    return RegistryRefusal(
        40407, f"Subject '{subject}' Version {version} was not deleted first before being permanently deleted"
    )


def no_level_of_subject(subject: str) -> RegistryRefusal:
    return RegistryRefusal(40408, f"Subject '{subject}' does not have subject-level compatibility configured")


def no_mode_of_subject(subject: str) -> RegistryRefusal:
    return RegistryRefusal(40409, f"Subject '{subject}' does not have subject-level mode configured")


def incompatible(subject: str, messages: list[str]) -> RegistryRefusal:
    return RegistryRefusal(
        # Confluent's registry sends the status as the code here
        409,
        f'Schema being registered is incompatible with an earlier schema for subject "{subject}", details: '
        f"[{', '.join(messages)}]",
    )


def invalid_schema(reason: str) -> RegistryRefusal:
    return RegistryRefusal(INVALID_SCHEMA, reason)


def invalid_version(version: str) -> RegistryRefusal:
    return RegistryRefusal(
        42202,
        f"The specified version '{version}' is not a valid version id. Allowed values are between [1, 2^31-1] and the "
        'string "latest"',
    )


def invalid_level() -> RegistryRefusal:
    return RegistryRefusal(
        42203,
        "Invalid compatibility level. Valid values are none, backward, forward, full, backward_transitive, "
        "forward_transitive, and full_transitive",
    )


def invalid_mode() -> RegistryRefusal:
    return RegistryRefusal(42204, f"Invalid mode. Valid values are {', '.join(MODES[:4])}")


def not_permitted(reason: str) -> RegistryRefusal:
    return RegistryRefusal(42205, reason)


def reference_exists(subject: str, version: int) -> RegistryRefusal:
    return RegistryRefusal(
        42206,
        f"One or more references exist to the schema {{magic=1,keytype=SCHEMA,subject={subject},version={version}}}.",
    )


def invalid_subject(subject: str) -> RegistryRefusal:
    return RegistryRefusal(42208, f"The specified subject '{subject}' is not a valid subject.")


def schema_too_large(reason: str) -> RegistryRefusal:
    return RegistryRefusal(42209, reason)


def invalid_rule_set() -> RegistryRefusal:
    return RegistryRefusal(42210, "Invalid rule set: migrationRules, domainRules and encodingRules are lists of rules")


def context_not_empty(context: str) -> RegistryRefusal:
    return RegistryRefusal(42211, f"The specified context '{context}' is not empty.")


def store_failed(reason: str) -> RegistryRefusal:
    return RegistryRefusal(50001, reason)


def timed_out(reason: str) -> RegistryRefusal:
    return RegistryRefusal(50002, reason)
