"""`klog produce`: write records from lines, JSON or files."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from spark_klog.base.extras import is_usable
from spark_klog.base.interrupts import stop_signals
from spark_klog.base.names import OF_REGISTRY
from spark_klog.cli.clusters import ChosenCluster, cluster_options
from spark_klog.cli.foreign import RecordsCommand
from spark_klog.cli.output import INTERRUPTED, Counter, reading_arguments
from spark_klog.cli.records.form import JsonRecord, parse_json, parse_record, unescape
from spark_klog.cli.records.serdes import SerdesOptions, serdes_options
from spark_klog.client import Admin, Producer
from spark_klog.client.admin.topics import ConfigResource
from spark_klog.client.cluster import Cluster
from spark_klog.client.net.waiting import Waker
from spark_klog.client.settings import without_ids
from spark_klog.errors import ConfigError, ErrorCode, KlogError, ProtocolError
from spark_klog.protocol.apis import METADATA

if TYPE_CHECKING:
    from spark_klog.cli.records.encoding import ColumnValues

_READ_BYTES = 1 << 20
#: In which brokers with auto.create.topics.enable create a missing topic.
_CREATED_MS = 5_000
#: Fewer lines at once than this are sent one by one, and any number without pyarrow: an Arrow table's rows make record
#: batches of their own.
_ARROW_LINES = 256
#: Beyond any record that a broker takes.
_LONGEST = 1 << 30


@click.command(
    cls=RecordsCommand,
    epilog="""\b
Examples:
  klog produce clicks < lines.txt                  each line is a record
  echo 'user1:{"page":"/"}' | klog produce clicks -K :
  klog produce clicks -k user1 photo.jpg           each file is a record
  klog consume clicks --json | klog produce copy --json
  klog produce clicks -l lines.txt --transaction nightly   all lines or none, for read_committed consumers
  klog produce orders -s value=avro -r http://registry:8081 < lines.json    by the latest schema of orders-value
""",
)
@click.argument("topic")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--lines", "-l", is_flag=True, help="Each line of FILES is a record, not each file.")
@click.option(
    "--delimiter",
    "-D",
    default=r"\n",
    show_default=True,
    metavar="TEXT",
    help="What ends a record; if empty, all of stdin is one.",
)
@click.option("--key-separator", "-K", metavar="TEXT", help="What is between key and value.")
@click.option("--key", "-k", metavar="KEY", help="The key of all records.")
@click.option("--header", "-H", "headers", multiple=True, metavar="NAME=VALUE", help="Of all records; repeatable.")
@click.option("--partition", "-p", type=click.IntRange(0), help="Default: by the key; without one they take turns.")
@click.option("--null", "-Z", "empty_is_null", is_flag=True, help="An empty key or value is null.")
@click.option(
    "--compression", "-z", metavar="CODEC", help="gzip, snappy, lz4, zstd or none; default: compression.type."
)
@click.option("--transaction", metavar="ID", help="Write everything in one transaction with this transactional id.")
@click.option("--set", "-X", "settings", multiple=True, metavar="NAME=VALUE", help="A producer setting; repeatable.")
@serdes_options
@click.option("--stats/--quiet", "-v/-q", "shows_stats", default=None, help="Say how many; default: on a terminal.")
@cluster_options
def produce(
    topic: str,
    files: tuple[Path, ...],
    lines: bool,
    delimiter: str,
    key_separator: str | None,
    key: str | None,
    headers: tuple[str, ...],
    partition: int | None,
    empty_is_null: bool,
    compression: str | None,
    transaction: str | None,
    settings: tuple[str, ...],
    serdes: SerdesOptions,
    shows_stats: bool | None,
    cluster: ChosenCluster,
    as_json: bool,
) -> None:
    """Write records to TOPIC: the lines of stdin, or FILES.

    With --json each line is a record as `klog consume --json` prints it. Lines are sent as they come. A line that can't
    be a record ends the command with its number; the lines before it are written, except in a transaction.

    With -s each value or key is JSON, as klog consume -s prints it, and is encoded by the latest schema of the subject
    TOPIC-value or TOPIC-key, or by --value-schema, which is registered there. null is a record without a value.
    """
    if lines and not files:
        raise click.UsageError("--lines needs files")
    if key is not None and key_separator is not None:
        raise click.UsageError("give only one of --key and --key-separator")
    if as_json and (key is not None or key_separator is not None or headers or partition is not None or empty_is_null):
        raise click.UsageError("with --json each record has its own key, headers and partition, and its own nulls")
    chosen = without_ids(cluster.local_settings())
    given = cluster.set_settings(settings)
    formats = serdes.parsed(cluster, given, [topic], is_writing=True)
    own = {name: value for name, value in given.items() if not name.startswith(OF_REGISTRY)}
    if "transactional.id" in own:
        raise click.UsageError("--set transactional.id has no effect here: use --transaction ID")
    chosen |= own
    if compression is not None:
        chosen["compression.type"] = compression
    if transaction is not None:
        chosen["transactional.id"] = transaction
    with reading_arguments():
        end = unescape("--delimiter", delimiter)
        separator = None if key_separator is None else unescape("--key-separator", key_separator)
    if as_json and not end:
        raise click.UsageError("--json needs a delimiter: each record is a line")
    if separator == b"":
        raise click.UsageError("--key-separator must not be empty")
    of_all = tuple(_header(text) for text in headers)
    key_of_all = None if key is None else key.encode("utf-8", "surrogateescape")
    # a schema is registered for a topic that is there
    _check_topic(chosen, topic, partition)
    parts = (topic, separator, key_of_all, of_all, partition, empty_is_null)
    if formats:
        from spark_klog.cli.records.encoding import ColumnValues

        columns = [ColumnValues(one, topic) for one in formats.by_schema]
        writer: _Lines = _EncodedLines(*parts, columns=columns, as_json=as_json)
    else:
        writer = (_JsonLines if as_json else _Lines)(*parts)
    with (
        Counter(shows_stats) as counter,
        Producer(chosen) as producer,
        closing(_Signals()) as signals,
        stop_signals(signals.stop),
    ):
        if transaction is not None:
            producer.init_transactions()
            producer.begin_transaction()
        try:
            try:
                for chunk in _chunks(files, lines or as_json, end, signals):
                    writer.send(producer, chunk)
                    counter.add(len(chunk), sum(map(len, chunk)))
                    if signals.has_come:
                        break
            finally:
                if transaction is None:
                    producer.flush()
            if signals.has_come:
                if transaction is None:
                    click.echo("klog: interrupted; what was sent before is written", err=True)
                raise SystemExit(INTERRUPTED)
            if transaction is not None:
                producer.commit_transaction()
        except BaseException:
            if transaction is not None:
                producer.abort_transaction()
                counter.forget()
                click.echo("klog: the transaction is aborted: none of its records count", err=True)
            raise


def _check_topic(settings: Mapping[str, str], topic: str, partition: int | None) -> None:
    """Have the topic created if brokers do that, and reach the leaders: records would fail after delivery.timeout.ms.

    `ConfigError` for a topic that does not exist, `ConnectionFailed`, `ProtocolError`.
    """
    with reading_arguments():
        connected = Cluster.connect(settings)
    with connected as cluster:
        try:
            there = cluster.attempt(lambda: cluster.partitions([topic], create=True, missing_ok=True), _CREATED_MS)
            if not there and not _create_topics(settings):
                cluster.partitions([topic])
            numbers = cluster.attempt(lambda: cluster.partitions([topic], create=True)[topic], _CREATED_MS)
        except ProtocolError as error:
            if error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise ConfigError(f"{error}; `klog topics create` makes one") from None
            raise
        wanted = [(topic, number) for number in numbers if partition in (None, number)]

        def reach() -> None:
            leaders, _ = cluster.by_leader(wanted)  # the producer waits for leaders that are elected
            probe = cluster.metadata_message(1, [], create=False)
            for answer in cluster.request_each(METADATA, dict.fromkeys(leaders, probe)).values():
                if isinstance(answer, KlogError):
                    raise answer

        cluster.attempt(reach, cluster.config.connect_timeout_ms, "socket.connection.setup.timeout.ms")


def _create_topics(settings: Mapping[str, str]) -> bool:
    """Whether the brokers may create missing topics; True if they do not tell."""
    limits = {"default.api.timeout.ms": str(_CREATED_MS), "request.timeout.ms": str(_CREATED_MS)}
    try:
        with Admin({**settings, **limits}) as admin:
            broker = ConfigResource("broker", str(admin.describe_cluster().brokers[0].node))
            found = admin.describe_configs([broker]).check()[broker].get("auto.create.topics.enable")
    except KlogError:
        return True
    return found is None or found.value != "false"


class _Signals:
    """Ctrl-C and SIGTERM end the reading, so that what was read is written; a second one ends the process."""

    def __init__(self) -> None:
        self.has_come = False
        self._waker = Waker()
        self.close = self._waker.close

    def stop(self, number: int, _: FrameType | None) -> None:
        self.has_come = True
        signal.signal(number, signal.SIG_DFL)
        self._waker.wake()

    def wait(self, descriptor: int) -> bool:
        """Wait until there is something to read; False if a signal has come."""
        select.select([descriptor, self._waker.fileno()], [], [])
        return not self.has_come


def _header(text: str) -> tuple[str, bytes | None]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.UsageError(f"--header {text}: must be NAME=VALUE")
    return name, value.encode("utf-8", "surrogateescape")


def _chunks(files: tuple[Path, ...], by_line: bool, end: bytes, signals: _Signals) -> Iterator[list[bytes]]:
    """Yield the records to write, as many at once as have arrived; none after a signal."""
    if not files:
        yield from _split(partial(_read, signals, sys.stdin.fileno()), "stdin", end)
    for path in files:
        try:
            with path.open("rb") as opened:
                if by_line:
                    yield from _split(partial(_read, signals, opened.fileno()), str(path), end)
                else:
                    content = opened.read(_LONGEST + 1)
                    _check_length(str(path), len(content))
                    yield [content]
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}") from None


def _read(signals: _Signals, descriptor: int) -> bytes | None:
    """Read what has arrived; b"" at the end, None after a signal."""
    return os.read(descriptor, _READ_BYTES) if signals.wait(descriptor) else None


def _split(read: Callable[[], bytes | None], name: str, end: bytes) -> Iterator[list[bytes]]:
    """Split what comes from a file at its delimiters; what has none at the end is a record, too.

    After a signal (None) that may be half a record, and is left out. With an empty delimiter all is one record.
    """
    rest = bytearray()
    while data := read():
        # the delimiter may begin in an earlier read
        looked = max(0, len(rest) - len(end) + 1)
        rest += data
        if end and rest.find(end, looked) >= 0:
            *whole, left = bytes(rest).split(end)
            yield whole
            rest = bytearray(left)
        _check_length(name, len(rest))
    if rest and data is not None:
        yield [bytes(rest)]


def _check_length(name: str, size: int) -> None:
    if size > _LONGEST:
        raise ConfigError(f"{name} has a record of more than {_LONGEST:,} bytes: no broker takes it")


@dataclass
class _Lines:
    topic: str
    separator: bytes | None
    key: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    partition: int | None
    empty_is_null: bool
    #: Lines sent so far.
    count: int = 0

    @cached_property
    def _has_arrow(self) -> bool:
        return is_usable("pyarrow")  # where it is not, asking again is slow

    def send(self, producer: Producer, lines: list[bytes]) -> None:
        """Write the lines; `ConfigError` names the one that can't be a record."""
        if len(lines) >= _ARROW_LINES and self._has_arrow:
            self._send_table(producer, lines)
            self.count += len(lines)
            return
        for line in lines:
            self.count += 1
            key, value = self._record(line)
            try:
                producer.send(self.topic, value, key, self.partition, headers=self.headers)
            except ConfigError as error:
                raise ConfigError(f"record {self.count:,}: {error}") from None

    def _record(self, line: bytes) -> tuple[bytes | None, bytes | None]:
        """Key and value; a line without the separator has no key, as with kcat."""
        key, value = self.key, line
        if self.separator is not None and self.separator in line:
            key, _, value = line.partition(self.separator)
        if self.empty_is_null:
            return key or None, value or None
        return key, value

    def _send_table(self, producer: Producer, lines: list[bytes]) -> None:
        if self.separator is None and not self.empty_is_null:
            self._send_columns(producer, None if self.key is None else [self.key] * len(lines), lines)
        else:
            keys, values = zip(*map(self._record, lines), strict=True)
            self._send_columns(producer, keys, values)

    def _send_columns(
        self, producer: Producer, keys: Sequence[bytes | None] | None, values: Sequence[bytes | None]
    ) -> None:
        import pyarrow as pa

        from spark_klog.columns.schema import FULL

        columns = {"value": pa.array(values, pa.large_binary())}
        if keys is not None:
            columns["key"] = pa.array(keys, pa.large_binary())
        if self.partition is not None:
            columns["partition"] = pa.array([self.partition] * len(values), pa.int32())
        if self.headers:
            pairs = [{"key": name, "value": value} for name, value in self.headers]
            columns["headers"] = pa.array([pairs] * len(values), FULL.field("headers").type)
        try:
            producer.send_arrow(pa.table(columns), self.topic)
        except ConfigError as error:
            raise ConfigError(f"of the lines from {self.count + 1:,} on, counted from 0: {error}") from None


class _JsonLines(_Lines):
    def send(self, producer: Producer, lines: list[bytes]) -> None:
        """Write the lines but empty ones; `ConfigError` names the one that can't be a record."""
        for line in lines:
            self.count += 1
            if not line.strip():
                continue
            try:
                record = parse_record(line)
                producer.send(self.topic, record.value, record.key, record.partition, record.timestamp, record.headers)
            except ConfigError as error:
                raise ConfigError(f"record {self.count:,}: {error}") from None


def _without_id(record: JsonRecord, column: str) -> JsonRecord:
    """A record without the header that names the schema of a column's bytes before they became JSON."""
    name = f"__{column}_schema_id"
    return record._replace(headers=tuple(header for header in record.headers if header[0] != name))


@dataclass
class _EncodedLines(_Lines):
    """Lines, or records as JSON, of which keys, values or both are JSON that is encoded by a schema."""

    columns: Sequence[ColumnValues] = ()
    as_json: bool = False

    def send(self, producer: Producer, lines: list[bytes]) -> None:
        """Write the lines; `ConfigError` names the one that can't be a record, after those before it are sent."""
        from spark_klog.cli.records.encoding import BadValue

        failure: ConfigError | None = None
        records: list[JsonRecord] = []
        numbers: list[int] = []
        for number, line in enumerate(lines, self.count + 1):
            if self.as_json and not line.strip():
                continue
            try:
                records.append(self._parsed(line))
            except ConfigError as error:
                failure = ConfigError(f"record {number:,}: {error}")
                break
            numbers.append(number)
        parts = {"key": [record.key for record in records], "value": [record.value for record in records]}
        count = len(records)
        for column in self.columns:
            values = parts[column.column][:count]
            try:
                parts[column.column] = column.encode(values)
            except BadValue as error:
                failure = ConfigError(f"record {numbers[error.index]:,}: {error.reason}")
                count = error.index
                parts[column.column] = column.encode(values[:count])
            records = [_without_id(record, column.column) for record in records]
        keys, values = parts["key"][:count], parts["value"][:count]
        if count >= _ARROW_LINES and not self.as_json:
            self._send_columns(producer, keys, values)
        else:
            for number, record, key, value in zip(numbers, records, keys, values, strict=False):
                try:
                    producer.send(self.topic, value, key, record.partition, record.timestamp, record.headers)
                except ConfigError as error:
                    raise ConfigError(f"record {number:,}: {error}") from None
        self.count += len(lines)
        if failure is not None:
            raise failure

    def _parsed(self, line: bytes) -> JsonRecord:
        names = [column.column for column in self.columns]
        if self.as_json:
            return parse_record(line, names)
        key, value = self._record(line)
        return JsonRecord(
            _json("value", value) if "value" in names else value,
            _json("key", key) if "key" in names else key,
            self.partition,
            None,
            self.headers,
        )


def _json(name: str, text: bytes | None) -> Any:
    try:
        return None if text is None else parse_json(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
