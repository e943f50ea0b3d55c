"""Read the checkpoint of a Spark query; tell whether format("kafka") and format("klog") can both continue from it.

Both write the same line for a micro-batch's end. They differ in where they keep the start of the first micro-batch:
Spark's connector in sources/N/0, klog beside the end (client/places.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_klog.base.addresses import local_path, without_user
from spark_klog.errors import ConfigError, DecodeError
from spark_klog.trees.checkpoint import START_OF, from_json, offset_lines


@dataclass(frozen=True)
class Source:
    """A source of the query: its number, and the end of its last planned micro-batch; None if it reads no topics."""

    number: int
    offsets: dict[tuple[str, int], int] | None


@dataclass(frozen=True)
class CheckpointState:
    """The last micro-batch that was planned and the last one that is done (-1: none), and the reasons not to switch."""

    query: str | None
    planned: int
    done: int
    is_stateful: bool
    sources: list[Source]
    to_klog: list[str]
    to_kafka: list[str]


def checkpoint_state(address: str) -> CheckpointState:
    """Read a local checkpoint. `ConfigError` if there is none, `DecodeError` if it is malformed, `OSError`."""
    path = local_path(address)
    if path is None:
        raise ConfigError(f"{without_user(address)} is not a local folder: copy the checkpoint to one to look at it")
    root = Path(path)
    planned, done = _last(root / "offsets"), _last(root / "commits")
    if planned < 0 and not (root / "metadata").is_file():
        raise ConfigError(
            f"{without_user(address)} is not a checkpoint: it has neither offsets nor Spark's file metadata"
        )
    last = root / "offsets" / str(planned)
    values = offset_lines(last.read_bytes(), str(last)) if planned >= 0 else []
    sources = [Source(number, _offsets(value)) for number, value in enumerate(values)]
    to_klog: list[str] = []
    to_kafka: list[str] = []
    if planned < 0:
        reason = "no micro-batch is planned yet: the other format begins where its own startingOffsets say"
        to_klog.append(reason)
        to_kafka.append(reason)
    elif done < planned and planned == 0:
        reason = (
            "the first micro-batch is not done, and the other format does not find its start: let it end with the "
            "format that it began with"
        )
        to_klog.append(reason)
        to_kafka.append(reason)
    names = {name for value in values if isinstance(value, dict) for name in value if name.startswith(START_OF)}
    if any(value[name] for value in values if isinstance(value, dict) for name in names & value.keys()):
        to_kafka.append("the last entry was written by an older klog: run one more micro-batch with klog")
    elif done < planned and any(name.startswith(f"{START_OF}micro-batch ") for name in names):
        to_kafka.append(
            "the last micro-batch is not done, and begins elsewhere than the one before ended (a topic was created "
            "again, or a partition came back): let it end with klog"
        )
    waiting = [source.number for source in sources if source.offsets is None and _began_with_kafka(root, source.number)]
    if waiting:
        to_klog.append(
            f"source {waiting[0]} has read no partition yet, and klog does not find its start: run it with kafka until "
            "it reads a topic"
        )
    if not any(source.offsets is not None for source in sources) and planned >= 0:
        reason = "no source of the query reads topics"
        to_klog.append(reason)
        to_kafka.append(reason)
    return CheckpointState(_query(root), planned, done, (root / "state").is_dir(), sources, to_klog, to_kafka)


def _last(folder: Path) -> int:
    if not folder.is_dir():
        return -1
    return max((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), default=-1)


def _query(root: Path) -> str | None:
    try:
        found = json.loads((root / "metadata").read_text())["id"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise DecodeError(f"{root / 'metadata'} is not Spark's: it has no id of a query") from None
    return str(found)


def _began_with_kafka(root: Path, number: int) -> bool:
    """Whether Spark's connector has kept the start of a source: offsets by topic, {} if no topic was there."""
    try:
        lines = (root / "sources" / str(number) / "0").read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return False
    try:
        return _offsets(json.loads(lines[-1])) is not None
    except (IndexError, ValueError, RecursionError):
        return False


def _offsets(value: Any) -> dict[tuple[str, int], int] | None:
    try:
        return from_json(value)
    except (ValueError, AttributeError, TypeError):
        return None
