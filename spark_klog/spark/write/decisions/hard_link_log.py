"""The decision log of a query in files of its checkpoint: CHECKPOINT/klog_sink/NUMBER, one for each entry.

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

A log that goes on in a topic ends with an entry that says so, `Moved`. On a file system without hard links it is the
only one, a plain file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from spark_klog.base.addresses import local_path, without_user
from spark_klog.base.durable import sync_folder, write_synced
from spark_klog.errors import ConfigError, DecodeError
from spark_klog.files.folder import LocalFolder
from spark_klog.spark.write.decisions.decision_log import Identity, decode_entry, encode_entry
from spark_klog.spark.write.exactly_once import Claim, Decision, Entry, Log

#: The folder in the checkpoint.
FOLDER = "klog_sink"
_VERSION = 1
_MOVED = "moved"
_TEMPORARY = ".new-"
_SHARED = (".claim-", ".ended-")
#: Of a file that claims share: restarts add claims until a decision is made. NTFS allows 1024 links, ext4 65,000.
_MOST_LINKS = 1000
#: Spark writes it into a checkpoint when the query starts: JSON with the query's id.
METADATA = "metadata"
#: What os.link raises on file systems without hard links: FUSE mounts of object stores, FAT and others.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


def checkpoint_folder(location: str) -> Path:
    """The local folder of an option checkpointLocation, which Spark has made by now.

    Raises `ConfigError` if it is on a file system that is not local, or if the folder is another one than Spark's.
    """
    path = local_path(location)
    if path is None:
        raise ConfigError(
            "decisionLog=checkpoint needs a checkpointLocation that is a local or mounted folder of the driver, not "
            f"{without_user(location)}: the decision log relies on hard links there. Leave decisionLog out, or set "
            "decisionLog=topic, to keep decisions in a topic of the target cluster"
        )
    folder = Path(path)
    if not is_checkpoint(folder):
        raise ConfigError(
            f"checkpointLocation={without_user(location)} is not a folder of the driver's machine with Spark's "
            "checkpoint in it: decisionLog=checkpoint needs a local or mounted one; write file:///PATH if Spark's "
            "default file system is another one, or leave decisionLog out"
        )
    return folder


def is_checkpoint(folder: Path) -> bool:
    """Whether Spark has begun a checkpoint in this folder, so that it is the one that Spark means by its path."""
    return (folder / METADATA).is_file()


def has_hard_links(folder: Path) -> bool:
    """Whether hard links can be made in a folder; tries it, and raises `OSError` if no file can be written there."""
    file = folder / f".klog-{uuid.uuid4()}"
    link = file.with_suffix(".link")
    try:
        file.touch()
        os.link(file, link)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    finally:
        file.unlink(missing_ok=True)
        link.unlink(missing_ok=True)
    return True


def planned(checkpoint: Path | None, batch: int) -> str:
    """`hash_of_plan` of Spark's file offsets/BATCH; empty if the file is missing or unreadable."""
    if checkpoint is None:
        return ""
    try:
        return hash_of_plan((checkpoint / "offsets" / str(batch)).read_bytes())
    except OSError:
        return ""


def hash_of_plan(data: bytes) -> str:
    """A hash of what a micro-batch reads, as Spark writes it into `offsets`; empty if it reads nothing.

    The first two lines are a version, and the time and watermark of the plan.
    """
    lines = data.splitlines()
    return hashlib.sha256(b"\n".join(lines[2:])).hexdigest() if len(lines) > 2 else ""


def read_back(files: LocalFolder, entry_of: Callable[[int], Entry]) -> Log:
    """The entries of a log's folder from the last decision on, read from the highest number down; nothing is changed.

    `entry_of` reads the one of a number, with `FileNotFoundError` if it is gone, as a driver may have removed it since.
    `DecodeError` if none has.
    """
    last = _last(files)
    while True:
        try:
            return _read_back(last, entry_of)
        except FileNotFoundError as error:
            before, last = last, _last(files)
            if last == before:
                raise DecodeError(f"{error.filename} is missing: restore the checkpoint's files") from None


def _read_back(number: int, entry_of: Callable[[int], Entry]) -> Log:
    entries: list[Entry] = []
    while number >= 0:
        entries.insert(0, entry_of(number))
        if isinstance(entries[0], Decision):
            return Log(tuple(entries), number)
        number -= 1
    return Log(tuple(entries))


def _last(files: LocalFolder) -> int:
    """The highest number, -1 in an empty log."""
    return max((int(name) for name in files.names("") if name.isdecimal()), default=-1)


@dataclass(frozen=True)
class Moved:
    """The last entry of a log that goes on in a topic, by its number, with the last decision before it.

    The decision is ended; `batch` is -1 if there was none.
    """

    topic: str
    key: str
    number: int = 0
    batch: int = -1
    planned: str = ""


class DecisionsMoved(ConfigError):
    """The decisions of this checkpoint are in a topic now, and the options say that they are in the checkpoint."""


class HardLinkLog:
    """A `DecisionLog` in a checkpoint."""

    def __init__(self, checkpoint: Path, identity: Identity, *, is_claimed: bool = False, is_any: bool = False) -> None:
        """`identity` is of the entries that were read before (`is_claimed`), or of a log that is empty.

        `ConfigError` if the checkpoint has micro-batches but no log, unless `is_any`.
        """
        self._folder = checkpoint / FOLDER
        self._files = LocalFolder(self._folder)
        self.identity = identity
        self._is_claimed = is_claimed
        #: Whether Spark has completed a micro-batch.
        self.has_batches = any(name.isdecimal() for name in LocalFolder(checkpoint).names("commits"))
        if self.has_batches and not self.is_there and not is_any:
            raise ConfigError(
                f"the checkpoint has micro-batches, but no {self._folder}: the query has written at-least-once until "
                "now, or its decision log was deleted. If you go on, only rows of the micro-batch that was under way "
                "may be written twice: to go on, create that directory, empty"
            )

    @property
    def is_there(self) -> bool:
        """Whether the log has a folder, be it empty."""
        return self._folder.is_dir()

    def moved(self) -> Moved | None:
        """The entry that ends the log, with the log's `identity`; None if it goes on here. `DecodeError`."""
        path = self._folder / str(self._last())
        try:
            fields = json.loads(path.read_bytes())
            if fields["entry"] != _MOVED:
                return None
            self.identity = Identity(str(fields["prefix"]), str(uuid.UUID(fields["log"])))
            moved = fields["moved"]
            return Moved(
                str(moved["topic"]), str(moved["key"]), int(moved["number"]), int(moved["batch"]), str(moved["planned"])
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise DecodeError(f"{path} is not an entry of a decision log: {error!r}") from error

    def move(self, moved: Moved) -> bool:
        """End the log: nothing can be appended any more. False if another driver has taken the number, or a later one.

        An empty log is ended on a file system without hard links, too.
        """
        self._folder.mkdir(exist_ok=True)
        sync_folder(self._folder.parent)
        last = self._last()
        if moved.number != last + 1:
            return False
        fields = {"version": _VERSION, "log": self.identity.log, "prefix": self.identity.prefix, "entry": _MOVED}
        file = self._folder / f"{_TEMPORARY}{moved.number}-{uuid.uuid4()}"
        try:
            write_synced(file, json.dumps({**fields, "moved": asdict(moved)}).encode())
            try:
                os.link(file, self._folder / str(moved.number))
            except (FileExistsError, FileNotFoundError):
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS or moved.number:
                    raise
                file.replace(self._folder / "0")  # no driver can have made another entry
        finally:
            file.unlink(missing_ok=True)
        sync_folder(self._folder)
        return self._last() == moved.number

    def read(self, *, may_lag: bool = False) -> Log:
        """The entries from the last decision on; older ones are removed. Never lags.

        Raises `DecodeError` if a file is damaged or missing, `ConfigError` if it has another transactionalIdPrefix,
        `Superseded` if the claimed log was removed and another run has begun a new one.
        """
        log = read_back(self._files, self._entry)
        self._remove_before(log.first)
        return log

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
        file, data = self._folder / f"{_TEMPORARY}{number}-{uuid.uuid4()}", encode_entry(self.identity, entry)
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
        return _last(self._files)

    def _is_mine(self, number: int) -> bool:
        """Whether an entry is there, and of this log: someone may have emptied the folder and begun another one."""
        try:
            return bool(json.loads((self._folder / str(number)).read_bytes())["log"] == self.identity.log)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _entry(self, number: int) -> Entry:
        path = self._folder / str(number)
        try:
            identity, entry = decode_entry(path.read_bytes(), str(path))
        except DecodeError:
            if (moved := self.moved()) is None:
                raise
            raise DecisionsMoved(
                f"the decisions of this query are in topic {moved.topic} ({path} says so), not in the checkpoint: set "
                f"decisionLog=topic and decisionTopic={moved.topic}, or leave both out"
            ) from None
        otherwise = (
            f"; or stop the query and empty the directory {FOLDER} of its checkpoint: rows of the micro-batch that was "
            "under way may be written twice then"
        )
        self.identity.check(identity, "the query", str(path), is_claimed=self._is_claimed, otherwise=otherwise)
        self.identity = identity
        return entry

    def _remove_before(self, first: int) -> None:
        """Remove older entries, temporary files of drivers that died, and the shared files of other logs."""
        for name in self._files.names(""):
            text = name.removeprefix(_TEMPORARY).split("-")[0]
            is_old = text.isdecimal() and int(text) < first
            if is_old or (name.startswith(_SHARED) and not name.endswith(self.identity.log)):
                (self._folder / name).unlink(missing_ok=True)
