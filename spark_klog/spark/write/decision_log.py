"""The decision log of a query: CHECKPOINT/klog_sink/NUMBER, a file of JSON for each entry.

    {"version": 1, "log": UUID, "prefix": "klog-", "entry": "claim"}
    {..., "entry": "decision", "batch": 5, "transactions": [[TRANSACTIONAL_ID, PRODUCER_ID, EPOCH, TASK], ...],
     "planned": SHA-256}
    {..., "entry": "ended"}

An entry is a hard link to a file that was flushed before: only one driver can make a link of that name. Claims of a log
are links to one file, and so are its ends (`.claim-UUID`, `.ended-UUID`); a file with many links is replaced by a new
one, as file systems limit them. A decision gets a file of its own.

Entries before the last decision are removed when the log is read. So that no driver can take a number whose file is
removed, a new entry counts only if no entry with a higher number is there; the highest ones are never removed. The link
of a driver that finds a higher number stays: another driver may have read it as an entry already. If no driver has, it
does no harm: it is older than the last decision, and no driver looks at such entries.

A micro-batch flushes the decision's file and the folder twice, after the decision and after its end. A claim is not
flushed: a power failure that takes it ends its driver, too, and the decision's flush comes before anything that relies
on the claim. The end is: tasks of the next micro-batch use the producers again, and the decision could not be ended
twice then.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import uuid
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from spark_klog.base.addresses import local_path, without_user
from spark_klog.base.durable import sync_folder, write_synced
from spark_klog.errors import ConfigError, DecodeError
from spark_klog.files.folder import LocalFolder
from spark_klog.spark.options import DEFAULT_ID_PREFIX
from spark_klog.spark.write.exactly_once import Claim, Decision, Ended, Entry, Log, Superseded, Transaction

#: The folder in the checkpoint.
FOLDER = "klog_sink"
_VERSION = 1
_TEMPORARY = ".new-"
_SHARED = (".claim-", ".ended-")
#: Of a file that claims share: restarts add claims until a decision is made. NTFS allows 1024 links, ext4 65,000.
_MOST_LINKS = 1000
#: Spark writes it into a checkpoint when the query starts.
_OF_SPARK = "metadata"
#: What os.link raises on file systems without hard links: FUSE mounts of object stores, FAT and others.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


def checkpoint_folder(location: str) -> Path:
    """The local folder of an option checkpointLocation, which Spark has made by now.

    Raises `ConfigError` if it is on a file system that is not local, or if the folder is another one than Spark's.
    """
    path = local_path(location)
    if path is None:
        raise ConfigError(
            "deliveryGuarantee=exactly-once needs a checkpointLocation that is a local or mounted folder of the "
            f"driver, not {without_user(location)}: its decision log relies on hard links. Use such a folder, or "
            "deliveryGuarantee=at-least-once"
        )
    folder = Path(path)
    if not (folder / _OF_SPARK).is_file():
        raise ConfigError(
            f"checkpointLocation={without_user(location)} is not a folder of the driver's machine with Spark's "
            "checkpoint in it: deliveryGuarantee=exactly-once needs a local or mounted one; write file:///PATH if "
            "Spark's default file system is another one"
        )
    return folder


def planned(checkpoint: Path, batch: int) -> str:
    """A hash of what Spark's file offsets/BATCH says a micro-batch reads; empty if the file is missing or unreadable.

    Its first two lines are a version, and the time and watermark of the plan.
    """
    try:
        lines = (checkpoint / "offsets" / str(batch)).read_bytes().splitlines()
    except OSError:
        return ""
    return hashlib.sha256(b"\n".join(lines[2:])).hexdigest() if len(lines) > 2 else ""


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
        self._files = LocalFolder(self._folder)
        self.identity = identity
        self._is_claimed = is_claimed
        has_batches = any(name.isdecimal() for name in LocalFolder(checkpoint).names("commits"))
        if has_batches and not self._folder.is_dir():
            raise ConfigError(
                f"the checkpoint has micro-batches, but no {self._folder}: the query has written at-least-once until "
                "now, or its decision log was deleted. If you go on, only rows of the micro-batch that was under way "
                "may be written twice: to go on, create that directory, empty"
            )

    def read(self) -> Log:
        """The entries from the last decision on; older ones are removed.

        Raises `DecodeError` if a file is damaged or missing, `ConfigError` if it has another transactionalIdPrefix,
        `Superseded` if the claimed log was removed and another run has begun a new one.
        """
        last = self._last()
        while True:
            try:
                log = self._read_back(last)
            except FileNotFoundError as error:
                before, last = last, self._last()
                if last == before:
                    raise DecodeError(f"{error.filename} is missing: restore the checkpoint's files") from None
            else:
                self._remove_before(log.first)
                return log

    def _read_back(self, number: int) -> Log:
        """The entries up to a number; `FileNotFoundError` if another driver removes them meanwhile."""
        entries: list[Entry] = []
        while number >= 0:
            entries.insert(0, self._entry(number))
            if isinstance(entries[0], Decision):
                return Log(tuple(entries), number)
            number -= 1
        return Log(tuple(entries))

    def append(self, number: int, entry: Entry) -> bool:
        """Make an entry durable; False if another driver has taken the number, or a later one.

        In the second case the entry may be in the log: a later driver goes on behind it, as after a crash of this one.
        A claim after the first entry is seen by all drivers, but may be lost by a power failure. Raises `ConfigError`
        on a file system without hard links, and other `OSError`.
        """
        if number == 0:
            self._folder.mkdir(exist_ok=True)
            sync_folder(self._folder.parent)
        elif not self._is_mine(number - 1):
            return False
        try:
            is_linked = self._link_entry(number, entry)
        except FileNotFoundError:  # a later driver has removed the temporary file, or someone the log
            return False
        if not is_linked or self._last() > number:
            return False
        if number > 0 and not self._is_mine(number - 1):  # the folder was emptied meanwhile, or a later driver has read
            return False
        if number == 0 or not isinstance(entry, Claim):
            sync_folder(self._folder)
        return True

    def _link_entry(self, number: int, entry: Entry) -> bool:
        """Link a decision's own file; else the one that such entries of the log share, made if it is missing, damaged
        or has many links."""
        file, data = self._folder / f"{_TEMPORARY}{number}-{uuid.uuid4()}", self._bytes(entry)
        if isinstance(entry, Decision):
            try:
                write_synced(file, data)
                return self._link(file, number)
            finally:
                file.unlink(missing_ok=True)
        shared = self._folder / f".{type(entry).__name__.lower()}-{self.identity.log}"
        try:
            is_usable = shared.stat().st_nlink < _MOST_LINKS and shared.read_bytes() == data
        except FileNotFoundError:
            is_usable = False
        if not is_usable:
            write_synced(file, data)
            file.replace(shared)
        return self._link(shared, number)

    def _bytes(self, entry: Entry) -> bytes:
        fields: dict[str, Any] = {"version": _VERSION, "log": self.identity.log, "prefix": self.identity.prefix}
        fields["entry"] = type(entry).__name__.lower()
        if isinstance(entry, Decision):
            fields["batch"] = entry.batch
            fields["transactions"] = [astuple(one) for one in entry.transactions]
            fields["planned"] = entry.planned
        return json.dumps(fields).encode()

    def _link(self, file: Path, number: int) -> bool:
        """Make an entry of a flushed file; False if the number is taken."""
        try:
            os.link(file, self._folder / str(number))
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise ConfigError(
                f"{self._folder} is on a file system without hard links ({error.strerror}), which the decision log "
                "of deliveryGuarantee=exactly-once relies on: set checkpointLocation to a folder of another one"
            ) from None
        return True

    def _last(self) -> int:
        """The highest number, -1 in an empty log."""
        return max((int(name) for name in self._files.names("") if name.isdecimal()), default=-1)

    def _is_mine(self, number: int) -> bool:
        """Whether an entry is there, and of this log: someone may have emptied the folder and begun another one."""
        try:
            return bool(json.loads((self._folder / str(number)).read_bytes())["log"] == self.identity.log)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _entry(self, number: int) -> Entry:
        path = self._folder / str(number)
        try:
            fields = json.loads(path.read_bytes())
            entry = _decoded(fields)
            # entries from before transactionalIdPrefix have none
            identity = Identity(str(fields.get("prefix", DEFAULT_ID_PREFIX)), str(uuid.UUID(fields["log"])))
        except (ValueError, KeyError, TypeError) as error:
            raise DecodeError(f"{path} is not an entry of a decision log: {error!r}") from error
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
        """Remove older entries, temporary files of drivers that died, and the shared files of other logs."""
        for name in self._files.names(""):
            text = name.removeprefix(_TEMPORARY).split("-")[0]
            is_old = text.isdecimal() and int(text) < first
            if is_old or (name.startswith(_SHARED) and not name.endswith(self.identity.log)):
                (self._folder / name).unlink(missing_ok=True)


def _decoded(fields: dict[str, Any]) -> Entry:
    if fields["version"] != _VERSION:
        raise ValueError(f"version {fields['version']!r}, not {_VERSION}")
    if fields["entry"] == "claim":
        return Claim()
    if fields["entry"] == "ended":
        return Ended()
    if fields["entry"] != "decision":
        raise ValueError(f"entry {fields['entry']!r}")
    transactions = tuple(
        Transaction(str(name), int(producer_id), int(epoch), int(task))
        for name, producer_id, epoch, task in fields["transactions"]
    )
    # decisions of earlier versions have no plan
    return Decision(int(fields["batch"]), transactions, str(fields.get("planned", "")))
