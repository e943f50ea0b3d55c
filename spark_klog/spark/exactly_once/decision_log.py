"""The decision log of a query: CHECKPOINT/klog_sink/NUMBER, a file of JSON for each entry.

    {"version": 1, "log": UUID, "prefix": "klog-", "entry": "claim"}
    {..., "entry": "decision", "batch": 5, "transactions": [[TRANSACTIONAL_ID, PRODUCER_ID, EPOCH, TASK], ...]}
    {..., "entry": "ended"}

An entry is written to a temporary file, flushed, and hard-linked to its number: only one driver can make a link of that
name. Entries before the last decision are removed when the log is read. So that no driver can take a number whose file
is removed, a new entry counts only if no entry with a higher number is there; the highest ones are never removed.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from spark_klog.errors import ConfigError, DecodeError
from spark_klog.spark.exactly_once.protocol import Claim, Decision, Ended, Entry, Log, Superseded, Transaction
from spark_klog.spark.options.writes import DEFAULT_ID_PREFIX

#: The folder in the checkpoint.
FOLDER = "klog_sink"
_VERSION = 1
_TEMPORARY = ".new-"
_LOCAL = ("", "file")
#: Spark writes it into a checkpoint when the query starts.
_OF_SPARK = "metadata"
#: What os.link raises on file systems without hard links: FUSE mounts of object stores, FAT and others.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


def checkpoint_folder(location: str) -> Path:
    """The local folder of an option checkpointLocation, which Spark has made by now.

    Raises `ConfigError` if it is on a file system that is not local, or if the folder is another one than Spark's.
    """
    parts = urlsplit(location)
    if parts.scheme not in _LOCAL or parts.netloc not in ("", "localhost"):
        raise ConfigError(
            "deliveryGuarantee=exactly-once needs a checkpointLocation that is a local or mounted folder of the "
            f"driver, not {location}: its decision log relies on hard links. Use such a folder, or "
            "deliveryGuarantee=at-least-once"
        )
    folder = Path(unquote(parts.path) if parts.scheme else location)
    if not (folder / _OF_SPARK).is_file():
        raise ConfigError(
            f"checkpointLocation={location} is no folder of the driver's machine with Spark's checkpoint in it: "
            "deliveryGuarantee=exactly-once needs a local or mounted one; write file:///PATH if Spark's default file "
            "system is another one"
        )
    return folder


@dataclass(frozen=True)
class Identity:
    """What distinguishes a log from those of other queries: a UUID, which entry 0 draws, and transactionalIdPrefix."""

    prefix: str = DEFAULT_ID_PREFIX
    log: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def id_prefix(self) -> str:
        """The beginning of the query's transactional ids, and of no other query's."""
        return f"{self.prefix}{self.log}-"


class DecisionLog:
    """The log in a checkpoint. `identity` is that of its entries, once they are read."""

    def __init__(self, checkpoint: Path, identity: Identity, *, is_claimed: bool = False) -> None:
        """`identity` is of the entries that were read before (`is_claimed`), or of a log that is empty.

        `ConfigError` if the checkpoint has micro-batches but no log.
        """
        self._folder = checkpoint / FOLDER
        self.identity = identity
        self._is_claimed = is_claimed
        if not self._folder.is_dir() and _has_batches(checkpoint):
            raise ConfigError(
                f"the checkpoint has micro-batches, but no {self._folder}: the query has written at-least-once until "
                "now, or its decision log was deleted. Rows of the micro-batch that was under way may be written twice "
                "now, and only these: to go on, make that directory, empty"
            )

    def read(self) -> Log:
        """The entries from the last decision on; older ones are removed.

        Raises `DecodeError` if a file is damaged or missing, `ConfigError` if it has another transactionalIdPrefix,
        `Superseded` if the claimed log was removed and another run has begun a new one.
        """
        numbers = self._numbers()
        entries: list[Entry] = []
        number = max(numbers, default=-1)
        while number >= 0:
            if number not in numbers:
                raise DecodeError(f"{self._folder / str(number)} is missing: restore the checkpoint's files")
            entry = self._entry(number)
            entries.insert(0, entry)
            if isinstance(entry, Decision):
                break
            number -= 1
        first = max(0, number)
        self._remove_before(first)
        return Log(tuple(entries), first)

    def append(self, number: int, entry: Entry) -> bool:
        """Make an entry durable; False, and no change, if the number is taken.

        Raises `ConfigError` on a file system without hard links, and other `OSError`.
        """
        if number == 0:
            self._folder.mkdir(exist_ok=True)
            _flush_folder(self._folder.parent)
        elif not self._is_mine(number - 1):
            return False
        path = self._folder / str(number)
        temporary = self._folder / f"{_TEMPORARY}{number}-{uuid.uuid4()}"
        try:
            with temporary.open("xb") as file:
                file.write(json.dumps(_encoded(self.identity, entry)).encode())
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                raise ConfigError(
                    f"{self._folder} is on a file system without hard links ({error.strerror}), which the decision log "
                    "of deliveryGuarantee=exactly-once relies on: set checkpointLocation to a folder of another one"
                ) from None
        finally:
            temporary.unlink(missing_ok=True)
        if max(self._numbers(), default=-1) > number:
            path.unlink(missing_ok=True)
            return False
        _flush_folder(self._folder)
        return True

    def _numbers(self) -> set[int]:
        try:
            return {int(name) for name in os.listdir(self._folder) if name.isdecimal()}
        except FileNotFoundError:
            return set()

    def _is_mine(self, number: int) -> bool:
        """Whether an entry is there, and of this log: someone may have emptied the folder and begun another one."""
        try:
            return bool(json.loads((self._folder / str(number)).read_bytes())["log"] == self.identity.log)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _entry(self, number: int) -> Entry:
        path = self._folder / str(number)
        try:
            found = json.loads(path.read_bytes())
            entry = _decoded(found)
            # entries from before transactionalIdPrefix have none
            identity = Identity(str(found.get("prefix", DEFAULT_ID_PREFIX)), str(uuid.UUID(found["log"])))
        except FileNotFoundError:
            raise DecodeError(f"{path} is missing: another run of this query goes on, or restore it") from None
        except (ValueError, KeyError, TypeError) as error:
            raise DecodeError(f"{path} is no entry of a decision log: {error!r}") from error
        if self._is_claimed and identity.log != self.identity.log:
            raise Superseded
        if identity.prefix != self.identity.prefix:
            raise ConfigError(
                f"option transactionalIdPrefix is {self.identity.prefix}, but the query has written with "
                f"{identity.prefix} until now ({path}): what it left open could not be found and aborted. Set "
                f"transactionalIdPrefix={identity.prefix} again; or stop the query and empty the directory {FOLDER} of "
                "its checkpoint: rows of the micro-batch that was under way may be written twice then"
            )
        self.identity = identity
        return entry

    def _remove_before(self, first: int) -> None:
        """Remove older entries, and temporary files of drivers that ended before they could link them."""
        with suppress(FileNotFoundError):
            for name in os.listdir(self._folder):
                text = name.removeprefix(_TEMPORARY).split("-")[0]
                if text.isdecimal() and int(text) < first:
                    (self._folder / name).unlink(missing_ok=True)


def _has_batches(checkpoint: Path) -> bool:
    """Whether Spark has ended a micro-batch with this checkpoint."""
    try:
        return any(name.isdecimal() for name in os.listdir(checkpoint / "commits"))
    except FileNotFoundError:
        return False


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _encoded(identity: Identity, entry: Entry) -> dict[str, Any]:
    fields: dict[str, Any] = {"version": _VERSION, "log": identity.log, "prefix": identity.prefix}
    fields["entry"] = type(entry).__name__.lower()
    if isinstance(entry, Decision):
        fields["batch"] = entry.batch
        fields["transactions"] = [
            [one.transactional_id, one.producer_id, one.epoch, one.task] for one in entry.transactions
        ]
    return fields


def _decoded(found: dict[str, Any]) -> Entry:
    if found["version"] != _VERSION:
        raise ValueError(f"version {found['version']!r}, not {_VERSION}")
    if found["entry"] == "claim":
        return Claim()
    if found["entry"] == "ended":
        return Ended()
    if found["entry"] != "decision":
        raise ValueError(f"entry {found['entry']!r}")
    transactions = tuple(
        Transaction(str(name), int(producer_id), int(epoch), int(task))
        for name, producer_id, epoch, task in found["transactions"]
    )
    return Decision(int(found["batch"]), transactions)
