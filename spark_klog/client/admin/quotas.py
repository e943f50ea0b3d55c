"""Quotas of clients (KIP-546)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Final

from spark_klog.client.admin.calls import AdminCalls, Outcomes, without_results
from spark_klog.client.answers import answer_error
from spark_klog.client.arguments import mapping_of, name_of
from spark_klog.errors import ConfigError
from spark_klog.protocol.apis import ALTER_CLIENT_QUOTAS, DESCRIBE_CLIENT_QUOTAS
from spark_klog.protocol.codec import Message

#: Stands for all users, client ids or addresses that have no quota of their own, as Kafka's tools show it.
DEFAULT: Final = "<default>"
#: In a filter: any user, client id or address, and the default.
ANY: Final = "<any>"
_EXACT, _OF_DEFAULT, _OF_ANY = 0, 1, 2


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
        for item in fields(self):
            name = getattr(self, item.name)
            if name is not None:
                yield item.name.replace("_", "-"), name

    def _message(self) -> list[Message]:
        return [{"entity_type": kind, "entity_name": None if name == DEFAULT else name} for kind, name in self._parts()]

    def _filter(self) -> Iterator[Message]:
        for kind, name in self._parts():
            match = {DEFAULT: _OF_DEFAULT, ANY: _OF_ANY}.get(name, _EXACT)
            yield {"entity_type": kind, "match_type": match, "match": None if match else name}


class QuotaCalls(AdminCalls):
    """Calls about quotas."""

    def describe_client_quotas(
        self, match: QuotaEntity | None = None, *, strict: bool = False
    ) -> dict[QuotaEntity, dict[str, float]]:
        """The quotas of each entity by their names: producer_byte_rate, consumer_byte_rate (bytes a second), ...

        `match` filters by its parts; with `strict` entities that have further parts are left out. None: all entities.
        DescribeClientQuotas (Kafka 2.6), at any broker.
        """
        if match is not None and not isinstance(match, QuotaEntity):
            raise TypeError(f"match must be a QuotaEntity, not {type(match).__name__}")
        request = {"components": [] if match is None else list(match._filter()), "strict": strict}

        def ask() -> Message:
            answer = self.cluster.any_broker(DESCRIBE_CLIENT_QUOTAS, lambda _: request)
            if answer["error_code"]:
                reason = f"client quotas ({answer['error_message']})" if answer["error_message"] else "client quotas"
                raise answer_error(DESCRIBE_CLIENT_QUOTAS, answer["error_code"], reason)
            return answer

        with self._turn, self._call():
            answer = self._attempt(ask)
        return {
            _entity(entry["entity"]): {value["key"]: value["value"] for value in entry["values"]}
            for entry in answer["entries"] or ()
        }

    def alter_client_quotas(
        self, changes: Mapping[QuotaEntity, Mapping[str, float | None]], *, validate_only: bool = False
    ) -> Outcomes[QuotaEntity, None]:
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

        def request(keys: Collection[QuotaEntity]) -> Message:
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

        def entries(answer: Message) -> Iterable[tuple[QuotaEntity, Message]]:
            return ((_entity(entry["entity"]), entry) for entry in answer["entries"])

        with self._turn, self._call():
            altered = self._change(ALTER_CLIENT_QUOTAS, wanted, request, entries, lambda entity: f"quotas of {entity}")
        return without_results(altered)


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


def _entity(parts: Iterable[Message]) -> QuotaEntity:
    """The entity of a response; parts of kinds that this client does not know are left out."""
    known = {item.name for item in fields(QuotaEntity)}
    named = {
        part["entity_type"].replace("-", "_"): DEFAULT if part["entity_name"] is None else part["entity_name"]
        for part in parts
    }
    return QuotaEntity(**{kind: name for kind, name in named.items() if kind in known})
