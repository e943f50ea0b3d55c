"""Faults on demand: what is to go wrong, and which request it happens to. No input or output here.

    FaultScript([Fault(ErrorAnswer("NOT_LEADER_OR_FOLLOWER"), api="Produce", topic="orders", count=2),
                 Fault(Drop(after=True), api="Produce", topic="orders", skip=2, count=1)])

A fault is due for a request that it matches, after `skip` such requests and until it has fired `count` times. Of those
that are due the first one fires, alone. Each broker counts by itself.
"""

from __future__ import annotations

import difflib
import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from spark_klog.errors import ConfigError, ErrorCode
from spark_klog.protocol.apis import BY_KEY
from spark_klog.protocol.targets import EVERYTHING, Target

_MAX_DELAY_MS = 3_600_000
_INT16, _INT32, _INT64 = 2**15, 2**31, 2**63
RECORDS, ANSWER = "records", "answer"


def _advice(name: str, known: Iterable[str]) -> str:
    """What may have been meant by an unknown name, in capitals or not; else what is known."""
    by_lower = {one.lower(): one for one in known}
    nearest = [by_lower[one] for one in difflib.get_close_matches(name.lower(), by_lower, cutoff=0.75)]
    return f"did you mean {' or '.join(nearest)}?" if nearest else f"known are {', '.join(sorted(by_lower.values()))}"


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
    """The answer is an error: a name of `ErrorCode` or its number.

    It is said of the topics and partitions that the fault names, and those are not carried out; with `after` they are,
    as where a broker times out. Where the client wants no answer (acks=0) the connection is closed, as Kafka does it.
    """

    code: str | int
    after: bool = False

    @property
    def number(self) -> int:
        """The code as the protocol has it."""
        return ErrorCode[self.code] if isinstance(self.code, str) else self.code

    def __post_init__(self) -> None:
        _check_flag("after", self.after)
        if isinstance(self.code, str):
            if self.code not in ErrorCode.__members__:
                raise ConfigError(f"fault with code={self.code!r}: {_advice(self.code, ErrorCode.__members__)}")
        else:
            _check_number("code", self.code, -_INT16, _INT16 - 1)
        if self.number == ErrorCode.NONE:
            raise ConfigError(f"fault with code={self.code!r}: it must be an error; 0 is none")


@dataclass(frozen=True)
class Delay:
    """The request waits, and with it those after it on its connection; with `after` the answer does."""

    ms: int
    after: bool = False

    def __post_init__(self) -> None:
        _check_flag("after", self.after)
        _check_number("ms", self.ms, 0, _MAX_DELAY_MS)


@dataclass(frozen=True)
class Drop:
    """The connection is closed instead of an answer: before the request is carried out, or with `after` after it.

    `sent` is how many bytes of the answer, size prefix included, go out first; it implies `after`.
    """

    after: bool = False
    sent: int = 0

    def __post_init__(self) -> None:
        _check_flag("after", self.after)
        _check_number("sent", self.sent, 0)


@dataclass(frozen=True)
class Corrupt:
    """`bits` bits of the answer are flipped, others each time, the same ones for the same `seed`.

    Of "records": in the first batch of each partition in a Fetch answer, where its checksum looks; such a fault waits
    for an answer with records in it. Of "answer": anywhere after the size prefix.
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
    """The answer lacks its last bytes; its size prefix fits what is left, so that the next answer is found."""

    missing: int = 1

    def __post_init__(self) -> None:
        _check_number("missing", self.missing, 1)


Action = ErrorAnswer | Delay | Drop | Corrupt | Truncate
_ACTIONS: dict[str, type[Action]] = {kind.__name__: kind for kind in (ErrorAnswer, Delay, Drop, Corrupt, Truncate)}


@dataclass(frozen=True)
class Fault:
    """What happens (`do`), and to which requests: None matches all.

    `api` is a name of the protocol guide, as "Produce"; `topic` and `partition` match a request that asks for them
    among others; `client_id` is the whole one. `skip` requests are spared, then `count` are hit (None: all that come).
    `broker` is the id of the one broker that does it (None: each). `ConfigError` where a value is impossible.
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
            raise ConfigError(f"fault with api={self.api!r}: {_advice(str(self.api), known)}")
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
        """It happens to answers that hold records, others do not count."""
        return isinstance(self.do, Corrupt) and self.do.where == RECORDS

    def is_about(self, topic: str | None, partition: int | None) -> bool:
        """Whether it concerns this target of a request."""
        return self.topic in (None, topic) and self.partition in (None, partition)

    def to_json(self) -> dict[str, Any]:
        """Values for `json.dumps`."""
        return asdict(self) | {"do": {"kind": type(self.do).__name__, **asdict(self.do)}}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Fault:
        """The fault that `to_json` wrote; `ConfigError` where it is none."""
        try:
            action = dict(values["do"])
            return cls(**values | {"do": _ACTIONS[action.pop("kind")](**action)})
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{values!r} is no fault: {error!r}; its fields: {_names(cls)}") from None


def _names(kind: type[Fault]) -> str:
    return ", ".join(field.name for field in fields(kind))


@dataclass(frozen=True)
class Asked:
    """What of a request the matching looks at; `targets` of the answer's records where `has_records`."""

    api: str
    client_id: str | None
    targets: Sequence[Target]
    has_records: bool = False


@dataclass
class _Armed:
    fault: Fault
    matched: int = 0
    fired: int = 0

    def matches(self, asked: Asked) -> bool:
        fault = self.fault
        if fault.waits_for_records != asked.has_records:
            return False
        if fault.api not in (None, asked.api) or fault.client_id not in (None, asked.client_id):
            return False
        if fault.topic is None and fault.partition is None:
            return True
        return any(target == EVERYTHING or fault.is_about(*target) for target in asked.targets)

    @property
    def is_due(self) -> bool:
        count = self.fault.count
        return self.matched > self.fault.skip and (count is None or self.fired < count)


@dataclass(frozen=True)
class Firing:
    """A fault, and the how-maniest time (from 0 on) it fires."""

    fault: Fault
    number: int


class FaultScript:
    """The faults of one broker, in order. For several threads: it is changed while requests come."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._armed = [_Armed(fault) for fault in faults]
        self._lock = threading.Lock()

    def add(self, faults: Iterable[Fault]) -> None:
        """Put faults at the end."""
        with self._lock:
            self._armed += [_Armed(fault) for fault in faults]

    def clear(self) -> None:
        """Forget all faults."""
        with self._lock:
            self._armed = []

    def fired(self) -> list[tuple[Fault, int]]:
        """How often each fired."""
        with self._lock:
            return [(armed.fault, armed.fired) for armed in self._armed]

    @property
    def waits_for_records(self) -> bool:
        """Whether answers with records are to be asked about."""
        return any(armed.fault.waits_for_records for armed in self._armed)

    def choose(self, asked: Asked) -> Firing | None:
        """The fault that fires for a request, None for most; every fault that matches has then counted it."""
        chosen: Firing | None = None
        with self._lock:
            for armed in self._armed:
                if not armed.matches(asked):
                    continue
                armed.matched += 1
                if chosen is None and armed.is_due:
                    chosen = Firing(armed.fault, armed.fired)
                    armed.fired += 1
        return chosen


def flip_bits(data: bytearray, start: int, end: int, corrupt: Corrupt, number: int) -> None:
    """Flip `corrupt.bits` bits of data[start:end] in place: others for another seed or number."""
    chooser = random.Random(f"{corrupt.seed} {number}")
    bits = 8 * (end - start)
    for bit in chooser.sample(range(bits), min(corrupt.bits, bits)):
        data[start + bit // 8] ^= 1 << bit % 8
