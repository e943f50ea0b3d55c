"""Faults on demand: what is to go wrong, and which request it happens to. No input or output here.

    FaultScript([Fault(ErrorAnswer("NOT_LEADER_OR_FOLLOWER"), api="Produce", topic="orders", count=2),
                 Fault(Drop(after=True), api="Produce", topic="orders", skip=2, count=1)])

A fault is due for a request that it matches, after `skip` such requests and until it has fired `count` times. Of those
that are due the first one fires, alone. Each broker counts by itself.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from spark_klog.errors import ConfigError, ErrorCode
from spark_klog.protocol.apis import BY_KEY
from spark_klog.protocol.places import EVERYTHING, Place

_MAX_DELAY_MS = 3_600_000
RECORDS, ANSWER = "records", "answer"


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

    def check(self) -> None:
        known = self.code in ErrorCode.__members__ if isinstance(self.code, str) else -(2**15) <= self.code < 2**15
        if not known or self.number == ErrorCode.NONE:
            raise ConfigError(f"fault with code={self.code!r}: a name of ErrorCode or an INT16 but 0 is wanted")


@dataclass(frozen=True)
class Delay:
    """The request waits, and with it those after it on its connection; with `after` the answer does."""

    ms: int
    after: bool = False

    def check(self) -> None:
        if not 0 <= self.ms <= _MAX_DELAY_MS:
            raise ConfigError(f"fault with ms={self.ms}: 0 to {_MAX_DELAY_MS} are allowed")


@dataclass(frozen=True)
class Drop:
    """The connection is closed instead of an answer: before the request is carried out, or with `after` after it.

    `sent` is how many bytes of the answer, size prefix included, go out first; it implies `after`.
    """

    after: bool = False
    sent: int = 0

    def check(self) -> None:
        if self.sent < 0:
            raise ConfigError(f"fault with sent={self.sent}: a number of bytes is wanted")


@dataclass(frozen=True)
class Corrupt:
    """`bits` bits of the answer are flipped, others each time, the same ones for the same `seed`.

    Of "records": in the first batch of each partition in a Fetch answer, where its checksum looks; such a fault waits
    for an answer with records in it. Of "answer": anywhere after the size prefix.
    """

    where: str = RECORDS
    bits: int = 1
    seed: int = 0

    def check(self) -> None:
        if self.where not in (RECORDS, ANSWER) or self.bits < 1:
            raise ConfigError(f"{self}: where is {RECORDS!r} or {ANSWER!r}, bits 1 or more")


@dataclass(frozen=True)
class Truncate:
    """The answer lacks its last bytes; its size prefix fits what is left, so that the next answer is found."""

    missing: int = 1

    def check(self) -> None:
        if self.missing < 1:
            raise ConfigError(f"fault with missing={self.missing}: 1 or more is wanted")


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
        known = sorted(api.name for api in BY_KEY.values())
        if self.api is not None and self.api not in known:
            raise ConfigError(f"fault for api={self.api!r}; known are {', '.join(known)}")
        if self.skip < 0 or (self.count is not None and self.count < 1):
            raise ConfigError(f"fault with skip={self.skip}, count={self.count}: 0 or more, and 1 or more, are wanted")
        if self.waits_for_records and self.api not in (None, "Fetch"):
            raise ConfigError(f"fault for api={self.api!r}: records are corrupted in answers of Fetch only")
        self.do.check()

    @property
    def waits_for_records(self) -> bool:
        """It happens to answers that hold records, others do not count."""
        return isinstance(self.do, Corrupt) and self.do.where == RECORDS

    def is_about(self, topic: str | None, partition: int | None) -> bool:
        """Whether it concerns this place of a request."""
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
    """What of a request the matching looks at; `places` of the answer's records where `has_records`."""

    api: str
    client_id: str | None
    places: Sequence[Place]
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
        return any(place == EVERYTHING or fault.is_about(*place) for place in asked.places)

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
