"""Fault scripts: which faults happen to which requests. No I/O.

    FaultScript([Fault(ErrorAnswer("NOT_LEADER_OR_FOLLOWER"), api="Produce", topic="orders", count=2),
                 Fault(Drop(after=True), api="Produce", topic="orders", skip=2, count=1)])

A fault matches requests. It is due after `skip` matching requests, until it has fired `count` times. Only the first of
the due faults fires for a request. Each broker counts for itself.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from spark_klog.base.settings import advice
from spark_klog.errors import ConfigError, ErrorCode
from spark_klog.protocol.apis import BY_KEY
from spark_klog.protocol.targets import EVERYTHING, Target

_MAX_DELAY_MS = 3_600_000
_INT16, _INT32, _INT64 = 2**15, 2**31, 2**63
RECORDS, ANSWER = "records", "answer"


def _check_number(name: str, value: object, least: int, most: int = _INT64 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        allowed = f"{least} or more" if most == _INT64 - 1 else f"{least} to {most}"
        raise ConfigError(f"fault with {name}={value!r}: it must be a number, {allowed}")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"fault with {name}={value!r}: it must be True or False")


def _check_text(name: str, value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"fault with {name}={value!r}: it must be a string")


@dataclass(frozen=True)
class ErrorAnswer:
    """Answer with an error: a name of `ErrorCode` or its number.

    The error concerns the topics and partitions that the fault names, whose part of the request is not carried out.
    With `after` it is carried out first, as by a broker that times out. With acks=0 there is no response: the broker
    closes the connection, as Kafka does.
    """

    code: str | int
    after: bool = False

    @property
    def number(self) -> int:
        """The code's number in the protocol."""
        return ErrorCode[self.code] if isinstance(self.code, str) else self.code

    def __post_init__(self) -> None:
        _check_flag("after", self.after)
        if isinstance(self.code, str):
            if self.code not in ErrorCode.__members__:
                raise ConfigError(f"fault with code={self.code!r}: {advice(self.code, ErrorCode.__members__)}")
        else:
            _check_number("code", self.code, -_INT16, _INT16 - 1)
        if self.number == ErrorCode.NONE:
            raise ConfigError(f"fault with code={self.code!r}: it must be an error; 0 is none")


@dataclass(frozen=True)
class Delay:
    """Delay the request, and later ones on its connection; with `after`, delay the response."""

    ms: int
    after: bool = False

    def __post_init__(self) -> None:
        _check_flag("after", self.after)
        _check_number("ms", self.ms, 0, _MAX_DELAY_MS)


@dataclass(frozen=True)
class Drop:
    """Close the connection instead of answering: before the request is carried out, or with `after` after it.

    `sent` is the number of bytes of the response, size prefix included, that are sent first; it implies `after`.
    """

    after: bool = False
    sent: int = 0

    def __post_init__(self) -> None:
        _check_flag("after", self.after)
        _check_number("sent", self.sent, 0)


@dataclass(frozen=True)
class Corrupt:
    """Flip `bits` bits of the response: different bits each time, but always the same ones for the same `seed`.

    "records": in the part under the checksum of the first batch of each partition in a Fetch response; the fault waits
    for a response with records. "answer": anywhere after the size prefix.
    """

    where: str = RECORDS
    bits: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.where not in (RECORDS, ANSWER):
            raise ConfigError(f"fault with where={self.where!r}: it must be {RECORDS!r} or {ANSWER!r}")
        _check_number("bits", self.bits, 1)
        _check_number("seed", self.seed, -_INT64)


@dataclass(frozen=True)
class Truncate:
    """Cut the last bytes off a response; its size prefix is adapted, so that the next response is found."""

    missing: int = 1

    def __post_init__(self) -> None:
        _check_number("missing", self.missing, 1)


Action = ErrorAnswer | Delay | Drop | Corrupt | Truncate
_ACTIONS: dict[str, type[Action]] = {kind.__name__: kind for kind in (ErrorAnswer, Delay, Drop, Corrupt, Truncate)}


@dataclass(frozen=True)
class Fault:
    """A fault (`do`) and the requests it happens to; None matches all.

    `api` is a name from the protocol guide, such as "Produce". `topic` and `partition` match a request that names them
    among others; `client_id` must be equal. The first `skip` matching requests are spared, then `count` are hit (None:
    all). `broker` is the id of the only broker that applies the fault (None: each). Raises `ConfigError` for an
    invalid value.
    """

    do: Action
    api: str | None = None
    topic: str | None = None
    partition: int | None = None
    client_id: str | None = None
    skip: int = 0
    count: int | None = None
    broker: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.do, Action):
            example = f"{self.do.__name__}(...)" if self.do in _ACTIONS.values() else f"one of {', '.join(_ACTIONS)}"
            raise ConfigError(f"fault with do={self.do!r}: it must be {example}")
        known = {api.name for api in BY_KEY.values()}
        if self.api is not None and self.api not in known:
            raise ConfigError(f"fault with api={self.api!r}: {advice(str(self.api), known)}")
        _check_text("topic", self.topic)
        _check_text("client_id", self.client_id)
        _check_number("skip", self.skip, 0)
        if self.count is not None:
            _check_number("count", self.count, 1)
        for name, value in (("partition", self.partition), ("broker", self.broker)):
            if value is not None:
                _check_number(name, value, 0, _INT32 - 1)
        if self.waits_for_records and self.api not in (None, "Fetch"):
            raise ConfigError(f"fault with api={self.api!r}: records are corrupted in answers of Fetch only")

    @property
    def waits_for_records(self) -> bool:
        """Whether the fault concerns only responses with records; others are not counted."""
        return isinstance(self.do, Corrupt) and self.do.where == RECORDS

    def is_about(self, topic: str | None, partition: int | None) -> bool:
        """Whether the fault concerns this target of a request."""
        return self.topic in (None, topic) and self.partition in (None, partition)

    def to_json(self) -> dict[str, Any]:
        """A dictionary for `json.dumps`."""
        return asdict(self) | {"do": {"kind": type(self.do).__name__, **asdict(self.do)}}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Fault:
        """The inverse of `to_json`; `ConfigError` if the values are not a fault."""
        try:
            action = dict(values["do"])
            kind = action.pop("kind")
            if kind not in _ACTIONS:
                raise ConfigError(f"{values!r} is not a fault: kind={kind!r}: {advice(str(kind), _ACTIONS)}")
            return cls(**values | {"do": _ACTIONS[kind](**action)})
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            names = ", ".join(field.name for field in fields(cls))
            raise ConfigError(f"{values!r} is not a fault: {error!r}; its fields: {names}") from None


@dataclass(frozen=True)
class MatchedRequest:
    """The parts of a request that faults match; if `has_records`, `targets` are those of the response's records."""

    api: str
    client_id: str | None
    targets: Sequence[Target]
    has_records: bool = False


@dataclass
class _Armed:
    id: int
    fault: Fault
    matched: int = 0
    fired: int = 0

    def matches(self, request: MatchedRequest) -> bool:
        fault = self.fault
        if fault.waits_for_records != request.has_records:
            return False
        if fault.api not in (None, request.api) or fault.client_id not in (None, request.client_id):
            return False
        if fault.topic is None and fault.partition is None:
            return True
        return any(target == EVERYTHING or fault.is_about(*target) for target in request.targets)

    @property
    def is_due(self) -> bool:
        count = self.fault.count
        return self.matched > self.fault.skip and (count is None or self.fired < count)


@dataclass(frozen=True)
class Firing:
    """A fault that fires, with the number of its firings before (0 for the first)."""

    fault: Fault
    number: int


class FaultScript:
    """The faults of one broker, in order. Thread-safe: it may change while requests are served."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._armed: list[_Armed] = []
        self._lock = threading.Lock()
        self._last_id = 0
        self.add(faults)

    def add(self, faults: Iterable[Fault]) -> list[int]:
        """Append faults; return their ids."""
        with self._lock:
            added = [_Armed(self._last_id + number, fault) for number, fault in enumerate(faults, 1)]
            self._last_id += len(added)
            self._armed = self._armed + added
            return [armed.id for armed in added]

    def clear(self) -> int:
        """Forget all faults; return how many there were."""
        with self._lock:
            forgotten, self._armed = self._armed, []
            return len(forgotten)

    def remove(self, fault_id: int) -> bool:
        """Forget one fault; False if there is none with this id."""
        with self._lock:
            kept = [armed for armed in self._armed if armed.id != fault_id]
            is_found = len(kept) < len(self._armed)
            self._armed = kept
            return is_found

    def listed(self) -> list[tuple[int, Fault, int]]:
        """All faults in order: the id of each, the fault, and how often it has fired."""
        with self._lock:
            return [(armed.id, armed.fault, armed.fired) for armed in self._armed]

    def fired(self) -> list[tuple[Fault, int]]:
        return [(fault, count) for _, fault, count in self.listed()]

    @property
    def waits_for_records(self) -> bool:
        """Whether a fault waits for responses with records."""
        return any(armed.fault.waits_for_records for armed in self._armed)

    def choose(self, request: MatchedRequest) -> Firing | None:
        """The fault that fires for a request, None if none is due; all matching faults count the request."""
        chosen: Firing | None = None
        with self._lock:
            for armed in self._armed:
                if not armed.matches(request):
                    continue
                armed.matched += 1
                if chosen is None and armed.is_due:
                    chosen = Firing(armed.fault, armed.fired)
                    armed.fired += 1
        return chosen


def flip_bits(data: bytearray, start: int, end: int, corrupt: Corrupt, number: int) -> None:
    """Flip `corrupt.bits` bits of data[start:end] in place; seed and number determine which."""
    chooser = random.Random(f"{corrupt.seed} {number}")
    bits = 8 * (end - start)
    for bit in chooser.sample(range(bits), min(corrupt.bits, bits)):
        data[start + bit // 8] ^= 1 << bit % 8
