"""Users' SCRAM credentials (KIP-554), access control lists (KIP-140, KIP-290) and quotas (KIP-546)."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from spark_klog.base.names import SCRAM_HASHES
from spark_klog.client.admin.calls import AdminCalls, Entries, Outcomes, by_field, checked
from spark_klog.client.answers import check_code
from spark_klog.client.arguments import items_of, mapping_of, name_of, names_of, number_of
from spark_klog.client.calls import call
from spark_klog.client.requests import Steps
from spark_klog.errors import ConfigError, DecodeError, ErrorCode
from spark_klog.protocol.apis import (
    ALTER_CLIENT_QUOTAS,
    ALTER_USER_SCRAM_CREDENTIALS,
    CREATE_ACLS,
    DELETE_ACLS,
    DESCRIBE_ACLS,
    DESCRIBE_CLIENT_QUOTAS,
    DESCRIBE_USER_SCRAM_CREDENTIALS,
)
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.security import MAX_ITERATIONS, MIN_ITERATIONS, SCRAM_MECHANISMS

ScramMechanism = Literal["SCRAM-SHA-256", "SCRAM-SHA-512"]
_MECHANISMS = {name: number for number, name in SCRAM_MECHANISMS.items()}
_SALT_BYTES = 24

_ANY = "any"
_RESOURCES = {_ANY: 1, "topic": 2, "group": 3, "cluster": 4, "transactional-id": 5, "delegation-token": 6, "user": 7}
_PATTERNS = {_ANY: 1, "match": 2, "literal": 3, "prefixed": 4}
_PERMISSIONS = {_ANY: 1, "deny": 2, "allow": 3}
_OPERATIONS = {
    _ANY: 1,
    "all": 2,
    "read": 3,
    "write": 4,
    "create": 5,
    "delete": 6,
    "alter": 7,
    "describe": 8,
    "cluster-action": 9,
    "describe-configs": 10,
    "alter-configs": 11,
    "idempotent-write": 12,
    "create-tokens": 13,
    "describe-tokens": 14,
    "two-phase-commit": 15,
}
_ONLY_IN_FILTERS = (_ANY, "match")
#: Stands for all users, client ids or addresses that have no quota of their own, as Kafka's tools show it.
DEFAULT: Final = "<default>"
#: In a filter: any user, client id or address, and the default.
ANY: Final = "<any>"
_EXACT, _OF_DEFAULT, _OF_ANY = 0, 1, 2


@dataclass(frozen=True)
class ScramCredential:
    """A credential to set: the password is hashed here, and only its hash is sent."""

    user: str
    mechanism: ScramMechanism
    password: str = field(repr=False)
    iterations: int = MIN_ITERATIONS

    def __post_init__(self) -> None:
        _check_user(self.user, self.mechanism)
        if not isinstance(self.password, str):
            raise TypeError(f"the password of {self.user} must be a str, not {type(self.password).__name__}")
        if not self.password:
            raise ConfigError(f"the password of {self.user} is empty")
        number_of(f"iterations of {self.user}", self.iterations, MIN_ITERATIONS, MAX_ITERATIONS)


@dataclass(frozen=True)
class ScramDeletion:
    """A credential to delete."""

    user: str
    mechanism: ScramMechanism

    def __post_init__(self) -> None:
        _check_user(self.user, self.mechanism)


@dataclass(frozen=True)
class Acl:
    """A rule: whether a principal ("User:alice") may do an operation on a resource.

    `resource` is topic, group, cluster (its name is "kafka-cluster"), transactional-id, delegation-token or user,
    `pattern` literal or prefixed, `permission` allow or deny. `operation` is all, read, write, create, delete, alter,
    describe, cluster-action, describe-configs, alter-configs, idempotent-write, create-tokens, describe-tokens or
    two-phase-commit. Calls take these names in any case, and with underscores as Java writes them.
    """

    resource: str
    name: str
    principal: str
    operation: str
    pattern: str = "literal"
    permission: str = "allow"
    host: str = "*"


@dataclass(frozen=True)
class AclFilter:
    """A filter of rules, as in `Acl`; "any" and None match all.

    The pattern "match" finds all rules that apply to a resource of this name, prefixes and "*" among them.
    """

    resource: str = _ANY
    name: str | None = None
    principal: str | None = None
    operation: str = _ANY
    pattern: str = _ANY
    permission: str = _ANY
    host: str | None = None


@dataclass(frozen=True)
class QuotaEntity:
    """Whose requests a quota limits: a user's, a client id's, those of both together, or an IP address's.

    A part is a name, `DEFAULT`, or None if the entity has no such part; in a filter also `ANY`.
    """

    user: str | None = None
    client_id: str | None = None
    ip: str | None = None

    def __post_init__(self) -> None:
        for kind, name in self._parts():
            name_of(f"the {kind} of a quota", name)
        if self.ip is not None and (self.user is not None or self.client_id is not None):
            raise ConfigError(f"a quota for the address {self.ip} can't be for a user or client id, too: set two")

    def _parts(self) -> Iterator[tuple[str, str]]:
        """The parts by the protocol's names."""
        for part in fields(self):
            name = getattr(self, part.name)
            if name is not None:
                yield part.name.replace("_", "-"), name

    def _message(self) -> list[Message]:
        return [{"entity_type": kind, "entity_name": None if name == DEFAULT else name} for kind, name in self._parts()]

    def _filter(self) -> Iterator[Message]:
        for kind, name in self._parts():
            match = {DEFAULT: _OF_DEFAULT, ANY: _OF_ANY}.get(name, _EXACT)
            yield {"entity_type": kind, "match_type": match, "match": None if match else name}


class UserCalls(AdminCalls):
    """Calls about users, rules and quotas."""

    @call
    def describe_scram_credentials(self, users: Iterable[str] | None = None) -> Steps[Outcomes[str, dict[str, int]]]:
        """The SCRAM mechanisms of users (None: all), each with its iterations.

        A user without credentials has the error RESOURCE_NOT_FOUND. DescribeUserScramCredentials (Kafka 2.7).
        """
        names = None if users is None else names_of("users", users)

        def request(keys: list[str]) -> Message:
            return {"users": [{"name": name} for name in keys]}

        with self._turn, self._call():
            if names is None:
                answer = yield from self._ask_controller(DESCRIBE_USER_SCRAM_CREDENTIALS, {"users": None})
                names = [entry["user"] for entry in answer["results"]]
            entries = by_field("results", "user")
            doing = "SCRAM credentials of"
            return (
                yield from self._each_at(
                    DESCRIBE_USER_SCRAM_CREDENTIALS, names, request, entries, doing, result=_iterations
                )
            )

    @call
    def alter_scram_credentials(self, changes: Iterable[ScramCredential | ScramDeletion]) -> Steps[Outcomes[str, None]]:
        """Set and delete SCRAM credentials; the outcome is by user. AlterUserScramCredentials (Kafka 2.7)."""
        by_user: dict[str, list[ScramCredential | ScramDeletion]] = {}
        for change in items_of("changes", changes):
            if not isinstance(change, ScramCredential | ScramDeletion):
                raise TypeError(
                    f"each of changes must be a ScramCredential or ScramDeletion, not {type(change).__name__}"
                )
            by_user.setdefault(change.user, []).append(change)

        def request(users: list[str]) -> Message:
            wanted = [change for user in users for change in by_user[user]]
            return {
                "deletions": [
                    {"name": change.user, "mechanism": _MECHANISMS[change.mechanism]}
                    for change in wanted
                    if isinstance(change, ScramDeletion)
                ],
                "upsertions": [_salted(change) for change in wanted if isinstance(change, ScramCredential)],
            }

        return self._each_at(
            ALTER_USER_SCRAM_CREDENTIALS,
            by_user,
            request,
            by_field("results", "user"),
            "altering SCRAM credentials of",
            lambda _, code: code == ErrorCode.RESOURCE_NOT_FOUND,
        )

    @call
    def describe_acls(self, which: AclFilter | None = None) -> Steps[list[Acl]]:
        """The rules that a filter matches; `ProtocolError` SECURITY_DISABLED without an authorizer.

        DescribeAcls (Kafka 0.11; from 2.0 in this client).
        """
        request = _rule(AclFilter() if which is None else which, AclFilter)
        answer = yield from self._ask_controller(DESCRIBE_ACLS, request)
        return [_acl({**resource, **entry}) for resource in answer["resources"] for entry in resource["acls"]]

    @call
    def create_acls(self, acls: Iterable[Acl]) -> Steps[Outcomes[Acl, None]]:
        """Add rules. CreateAcls (Kafka 0.11; from 2.0 in this client), at the controller."""
        rules = {rule: _rule(rule, Acl) for rule in items_of("acls", acls)}

        def request(keys: list[Acl]) -> Message:
            return {"creations": [rules[rule] for rule in keys]}

        return self._each_at(CREATE_ACLS, rules, request, _in_order(CREATE_ACLS, "results"), "creating")

    @call
    def delete_acls(self, filters: Iterable[AclFilter]) -> Steps[Outcomes[AclFilter, list[Acl]]]:
        """Delete the rules that match; the result is those that were deleted.

        DeleteAcls (Kafka 0.11; from 2.0 in this client), at the controller.
        """
        rules = {rule: _rule(rule, AclFilter) for rule in items_of("filters", filters)}

        def request(keys: list[AclFilter]) -> Message:
            return {"filters": [rules[rule] for rule in keys]}

        def deleted(entry: Message) -> list[Acl]:
            for rule in entry["matching_acls"]:
                check_code(DELETE_ACLS, rule["error_code"], f"deleting {_acl(rule)}")
            return [_acl(rule) for rule in entry["matching_acls"]]

        entries = _in_order(DELETE_ACLS, "filter_results")
        return self._each_at(DELETE_ACLS, rules, request, entries, "deleting", result=deleted)

    @call
    def describe_client_quotas(
        self, match: QuotaEntity | None = None, *, strict: bool = False
    ) -> Steps[dict[QuotaEntity, dict[str, float]]]:
        """The quotas of each entity by their names: producer_byte_rate, consumer_byte_rate (bytes a second), ...

        `match` filters by its parts; with `strict` entities that have further parts are left out. None: all entities.
        DescribeClientQuotas (Kafka 2.6), at any broker.
        """
        if match is not None and not isinstance(match, QuotaEntity):
            raise TypeError(f"match must be a QuotaEntity, not {type(match).__name__}")
        request = {"components": [] if match is None else list(match._filter()), "strict": strict}

        def ask() -> Steps[Message]:
            answer = yield from self.cluster.asking_any(DESCRIBE_CLIENT_QUOTAS, lambda _: request)
            return checked(DESCRIBE_CLIENT_QUOTAS, answer, "client quotas")

        answer = yield from self._attempt(ask)
        return {
            _quota_entity(entry["entity"]): {value["key"]: value["value"] for value in entry["values"]}
            for entry in answer["entries"] or ()
        }

    @call
    def alter_client_quotas(
        self, changes: Mapping[QuotaEntity, Mapping[str, float | None]], *, validate_only: bool = False
    ) -> Steps[Outcomes[QuotaEntity, None]]:
        """Set quotas, or remove those that are None, all of an entity or none; others stay.

            admin.alter_client_quotas({QuotaEntity(user="alice"): {"producer_byte_rate": 1e6}}).check()

        AlterClientQuotas (Kafka 2.6), at the controller. With `validate_only` the broker only checks the changes.
        """
        wanted: dict[QuotaEntity, dict[str, float | None]] = {}
        for entity, quotas in mapping_of("changes", changes).items():
            _check_entity(entity)
            wanted[entity] = mapping_of(f"changes of {entity}", quotas)
            for name, value in wanted[entity].items():
                _check_quota(name_of(f"each name in changes of {entity}", name), value)

        def request(keys: list[QuotaEntity]) -> Message:
            entries = [
                {
                    "entity": entity._message(),
                    "ops": [
                        {"key": name, "value": value or 0.0, "remove": value is None}
                        for name, value in wanted[entity].items()
                    ],
                }
                for entity in keys
            ]
            return {"entries": entries, "validate_only": validate_only}

        def entries(answer: Message, _: Collection[QuotaEntity]) -> Iterable[tuple[QuotaEntity, Message]]:
            return ((_quota_entity(entry["entity"]), entry) for entry in answer["entries"])

        return self._each_at(ALTER_CLIENT_QUOTAS, wanted, request, entries, "quotas of")


def _in_order(api: Api, results: str) -> Entries[Any]:
    """The entries in the field `results` of a response, in the order of the request."""

    def entries(answer: Message, keys: Collection[Any]) -> Iterable[tuple[Any, Message]]:
        if len(answer[results]) > len(keys):
            raise DecodeError(f"{api.name} response with {len(answer[results])} entries for {len(keys)}")
        return zip(keys, answer[results], strict=False)

    return entries


def _check_user(user: object, mechanism: object) -> None:
    name_of("the name of a user", user)
    if mechanism not in _MECHANISMS:
        raise ConfigError(f"mechanism {mechanism!r} of {user}: set {' or '.join(_MECHANISMS)}")


def _salted(change: ScramCredential) -> Message:
    salt = os.urandom(_SALT_BYTES)
    text = change.password.encode()
    return {
        "name": change.user,
        "mechanism": _MECHANISMS[change.mechanism],
        "iterations": change.iterations,
        "salt": salt,
        "salted_password": hashlib.pbkdf2_hmac(SCRAM_HASHES[change.mechanism], text, salt, change.iterations),
    }


def _iterations(entry: Message) -> dict[str, int]:
    return {
        SCRAM_MECHANISMS.get(info["mechanism"], f"unknown-{info['mechanism']}"): info["iterations"]
        for info in entry["credential_infos"]
    }


def _rule(acl: object, kind: type[Acl] | type[AclFilter]) -> Message:
    """The fields of a rule or a filter in a request; `TypeError` or `ConfigError` for a wrong one."""
    is_filter = kind is AclFilter
    if not isinstance(acl, kind):
        what = "a filter" if is_filter else "each of acls"
        raise TypeError(f"{what} must be an {kind.__name__}, not {type(acl).__name__}")
    for field_name in ("name", "principal", "host"):
        text = getattr(acl, field_name)
        if text is not None or not is_filter:
            name_of(f"the {field_name} of {'a filter' if is_filter else 'an ACL'}", text)

    def number(field_name: str, numbers: dict[str, int]) -> int:
        value = getattr(acl, field_name)
        allowed = [name for name in numbers if is_filter or name not in _ONLY_IN_FILTERS]
        name = str(value).lower().replace("_", "-")  # Java writes DESCRIBE_CONFIGS
        if name not in allowed:
            raise ConfigError(f"{field_name} {value!r} of an ACL: set one of {', '.join(allowed)}")
        return numbers[name]

    end = "_filter" if is_filter else ""
    return {
        f"resource_type{end}": number("resource", _RESOURCES),
        f"resource_name{end}": acl.name,
        "pattern_type_filter" if is_filter else "resource_pattern_type": number("pattern", _PATTERNS),
        f"principal{end}": acl.principal,
        f"host{end}": acl.host,
        "operation": number("operation", _OPERATIONS),
        "permission_type": number("permission", _PERMISSIONS),
    }


def _acl(entry: Message) -> Acl:
    def name(numbers: dict[str, int], number: int) -> str:
        return next((name for name, value in numbers.items() if value == number), f"unknown-{number}")

    return Acl(
        name(_RESOURCES, entry["resource_type"]),
        entry["resource_name"],
        entry["principal"],
        name(_OPERATIONS, entry["operation"]),
        name(_PATTERNS, entry["pattern_type"]),
        name(_PERMISSIONS, entry["permission_type"]),
        entry["host"],
    )


def _check_entity(entity: object) -> None:
    if not isinstance(entity, QuotaEntity):
        raise TypeError(f"a key of changes must be a QuotaEntity, not {type(entity).__name__}")
    names = [name for _, name in entity._parts()]
    if not names or ANY in names:
        raise ConfigError(f"a change of {entity}: name a user, client_id or ip, or set it to DEFAULT")


def _check_quota(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number or None, not {type(value).__name__}")
    if not math.isfinite(value):
        raise ConfigError(f"{name}={value}: set a finite number, or None to remove the quota")


def _quota_entity(parts: Iterable[Message]) -> QuotaEntity:
    """The entity of a response; parts of kinds that this client does not know are left out."""
    known = {part.name for part in fields(QuotaEntity)}
    named = {
        part["entity_type"].replace("-", "_"): DEFAULT if part["entity_name"] is None else part["entity_name"]
        for part in parts
    }
    return QuotaEntity(**{kind: name for kind, name in named.items() if kind in known})
