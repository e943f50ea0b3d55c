"""`klog consume`: print records of topics."""

from __future__ import annotations

import json
import operator
import re
import signal
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from spark_klog.base.extras import is_usable
from spark_klog.base.interrupts import stop_signals
from spark_klog.base.names import OF_REGISTRY, TopicPartition, topic_pattern
from spark_klog.cli.clusters import ChosenCluster, cluster_options, partitions_of
from spark_klog.cli.foreign import RecordsCommand
from spark_klog.cli.output import Counter, reading_arguments
from spark_klog.cli.records.form import RecordForm, json_text, record_lines, whole_number
from spark_klog.cli.records.places import Place, check_until, parse_place, ranges
from spark_klog.cli.records.serdes import Serdes, SerdesOptions, serdes_options
from spark_klog.client import Admin, Consumer, RebalanceListener
from spark_klog.client.consumer.consumer import read_ranges
from spark_klog.client.consumer.decoding import ConsumerRecord
from spark_klog.client.consumer.settings import check_consumer_settings
from spark_klog.client.offsets import list_offsets
from spark_klog.client.settings import without_ids
from spark_klog.errors import CommitFailed, ConfigError, ErrorCode, KlogError, ProtocolError, WokenUp
from spark_klog.protocol.tables.records import LATEST

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_klog.cli.records.arrow_form import Form
    from spark_klog.cli.records.decoding import RecordTexts, Undecoded

#: An Arrow batch or None; without pyarrow a list of records.
_Batch = Any

_FILTER = re.compile(
    r"\s*(?P<field>key|value|topic|partition|offset|timestamp|header\.[^=!<>~]+?|\.[^=!<>~]+?)\s*"
    r"(?P<operator>!=|!~|>=|<=|=~|=|~|<|>)\s?(?P<value>.*)",
    re.DOTALL,
)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_ARROW = {"=": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}
_NUMBERS = ("partition", "offset", "timestamp")
_MISSING = object()
_POLL_SECONDS = 0.5
#: In format strings.
_LETTERS = {"key": "k", "value": "s"}
#: What --set can't do, as an option of the command does it.
_OF_OPTIONS = {"group.id": "--group", "group.instance.id": "--group", "auto.offset.reset": "--from"}


@click.command(
    cls=RecordsCommand,
    epilog="""\b
Examples:
  klog consume clicks                              all records, their values a line each
  klog consume clicks --from -10 --follow          the last ten of each partition, and what comes
  klog consume clicks --from -1h --json | jq .key  those of the last hour, as JSON
  klog consume clicks -f '%o %k=%s\\n' -p 0 -n 5    offset, key and value of five records
  klog consume clicks --where '.user.id=42' --where 'header.trace~^ab'
  klog consume orders -s value=avro -r http://registry:8081 | jq .total
  klog consume orders -s key=i -s value=avro --json     the registry is the client settings' schema.registry.url
""",
)
@click.argument("topics", nargs=-1, required=True)
@click.option("--partition", "-p", "partitions", multiple=True, type=click.IntRange(0), help="Only this; repeatable.")
@click.option(
    "--from",
    "-o",
    "begin",
    metavar="PLACE",
    help="earliest (the default), latest, an offset, -10 (records before each end), -1h, or an ISO time (UTC without a "
    "zone).",
)
@click.option("--until", metavar="PLACE", help="The same words; by default the ends at the start of the command.")
@click.option("--follow", "-F", is_flag=True, help="Wait for more records, until Ctrl-C.")
@click.option("--exit", "-e", "exits", is_flag=True, hidden=True, help="The default; for fingers that know kcat.")
@click.option("--count", "-n", "-c", type=click.IntRange(1), metavar="N", help="Stop after N records.")
@click.option("--where", multiple=True, metavar="FILTER", help="FIELD OPERATOR VALUE, see the examples; repeatable.")
@click.option("--format", "-f", "form", metavar="FORMAT", help=r"%s %S %k %K %t %p %o %T %h %% \n \t \x00, as in kcat.")
@click.option("--key-separator", "-K", metavar="TEXT", help="Print the key and this before each value.")
@click.option("--delimiter", "-D", metavar="TEXT", help=r"Print this after each value.  [default: \n]")
@click.option("--null", "-Z", "shows_null", is_flag=True, help="Print NULL for a null key or value.")
@click.option("--group", "-G", metavar="GROUP", help="Read as a member of this group, and commit what was printed.")
@click.option("--isolation", type=click.Choice(["read_committed", "read_uncommitted"]), help="As of Kafka's consumer.")
@click.option("--set", "-X", "settings", multiple=True, metavar="NAME=VALUE", help="A consumer setting; repeatable.")
@serdes_options
@click.option("--stop-on-error", is_flag=True, help="Stop at the first record that does not decode by -s.")
@click.option("--stats/--quiet", "-v/-q", "shows_stats", default=None, help="Say how many; default: on a terminal.")
@cluster_options
def consume(
    topics: tuple[str, ...],
    partitions: tuple[int, ...],
    begin: str | None,
    until: str | None,
    follow: bool,
    exits: bool,
    count: int | None,
    where: tuple[str, ...],
    form: str | None,
    key_separator: str | None,
    delimiter: str | None,
    shows_null: bool,
    group: str | None,
    isolation: str | None,
    settings: tuple[str, ...],
    serdes: SerdesOptions,
    stop_on_error: bool,
    shows_stats: bool | None,
    cluster: ChosenCluster,
    as_json: bool,
) -> None:
    """Print the records of TOPICS: names, or patterns that begin with ^.

    Reads up to the ends of the partitions, or further with --follow. Bytes go to a pipe or file as they are; on a
    terminal control characters and bytes that are not UTF-8 are escaped.

    With -s values and keys are JSON, each of the schema that wrote it, or of --value-schema. A record that does not
    decode is left out and named on stderr, and the exit code is 1 in the end. With --group one whose schema the
    registry does not have ends the command, and the group stays before it: the registry may be the wrong one.
    """
    if follow and (until is not None or exits):
        raise click.UsageError("give only one of --follow and --until")
    if group is not None and (partitions or until is not None):
        raise click.UsageError("a group shares the partitions and has its own offsets: no --partition, --until")
    as_arrow = is_usable("pyarrow")  # the same, faster
    given = cluster.set_settings(settings)
    formats = serdes.parsed(cluster, given, topics)
    if stop_on_error and not formats:
        raise click.UsageError("--stop-on-error needs -s: without it all records are printed as they are")
    with reading_arguments():
        filters = [Where(text) for text in where]
        printed = _form(form, key_separator, delimiter, shows_null, as_json, as_arrow, formats)
    render = _json_lines(as_arrow) if printed is None else printed.render
    own = {name: value for name, value in given.items() if not name.startswith(OF_REGISTRY)}
    _check_own(own, group)
    chosen = {"auto.offset.reset": "earliest"} | cluster.local_settings() | own
    if isolation is not None:
        chosen["isolation.level"] = isolation
    if group is not None and begin not in (None, "earliest", "latest"):
        raise click.UsageError("with --group, --from is earliest or latest, for partitions without an offset")
    # a mistyped argument must not wait for a broker
    with reading_arguments():
        check_consumer_settings(chosen)
        for text in topics:
            _pattern(text)
        if group is None:
            place, stop = parse_place("--from", begin or "earliest"), parse_place("--until", until or "latest")
            check_until(stop)
        connected = Admin(chosen)
    with connected as admin:
        reading: _Group | _Partitions
        if group is not None:
            if not follow:
                _keys(admin, topics, ())  # refuses missing topics, which a member could only wait for
            reading = _Group(admin, chosen, group, _names(admin, topics), begin, follow, as_arrow)
        else:
            reading = _Partitions(admin, chosen, _keys(admin, topics, partitions), place, stop, follow, as_arrow)
        counter = Counter(shows_stats, reading.total if count is None and not filters else count)
        needs_headers = (
            printed is None
            or isinstance(printed, RecordForm)
            or printed.has_headers
            or any(each.needs_headers for each in filters)
            or bool(formats.by_schema)  # they may have the schema's id
        )
        decoding = _decoding(formats, ascii=printed is None and sys.stdout.isatty())
        with (
            counter,
            Consumer(reading.settings, include_headers=needs_headers, timestamp_unit="ms") as consumer,
            stop_signals(partial(_stop, consumer)),
        ):
            stops = _stops(stop_on_error, is_group=group is not None)
            stopped = _copy(consumer, reading, filters, count, render, counter, decoding, stops)
        if stopped is not None:
            advice = ""
            if stopped.is_unknown and not stop_on_error:
                advice = (
                    f", and group {group} stays before it: name the registry that has it, or set the group's offset "
                    "beyond it (klog offsets set)"
                )
            raise KlogError(f"{stopped}; the records after it are not read{advice}")
        if decoding is not None:
            decoding.end()


def _check_own(own: dict[str, str], group: str | None) -> None:
    """Refuse settings of --set that would have no effect."""
    for name in own:
        if (name == "group.id" and own[name] == group) or (name != "group.id" and group is not None):
            continue
        if option := _OF_OPTIONS.get(name):
            raise click.UsageError(f"--set {name}={own[name]} has no effect here: use {option}")


def _form(
    form: str | None,
    key_separator: str | None,
    delimiter: str | None,
    shows_null: bool,
    as_json: bool,
    as_arrow: bool,
    formats: Serdes,
) -> Form | RecordForm | None:
    """The form of printed records; None for lines of JSON."""
    if (form is not None or as_json) and (key_separator is not None or delimiter is not None):
        raise click.UsageError("--key-separator and --delimiter need neither --format nor --json")
    if form is not None and as_json:
        raise click.UsageError("give only one of --format and --json")
    if as_json:
        return None
    option = "--format"
    if form is None:
        before = "" if key_separator is None else "%k" + key_separator.replace("%", "%%")
        after = r"\n" if delimiter is None else delimiter
        form, option = before + "%s" + after.replace("%", "%%"), "--key-separator, --delimiter"
    null, is_terminal = b"NULL" if shows_null else b"", sys.stdout.isatty()
    if not as_arrow:
        return RecordForm(form, option=option, null=null, is_terminal=is_terminal)
    from spark_klog.cli.records.arrow_form import Form

    # so that `klog produce -s` reads them again
    nulls = {} if shows_null else {_LETTERS[column.column]: b"null" for column in formats.by_schema}
    return Form(form, option=option, null=null, nulls=nulls, is_terminal=is_terminal)


def _decoding(formats: Serdes, *, ascii: bool) -> RecordTexts | None:
    if not formats:
        return None
    from spark_klog.cli.records.decoding import RecordTexts

    return RecordTexts(formats, ascii=ascii)


def _json_lines(as_arrow: bool) -> Callable[[Any], bytes | memoryview]:
    made: Callable[..., bytes | memoryview] = record_lines
    if as_arrow:
        from spark_klog.cli.records.arrow_form import json_lines as made
    return partial(made, ascii=sys.stdout.isatty())


class _Partitions:
    """Reads ranges of partitions, without a group."""

    def __init__(
        self,
        admin: Admin,
        settings: dict[str, str],
        keys: list[TopicPartition],
        begin: Place,
        until: Place,
        follow: bool,
        as_arrow: bool,
    ) -> None:
        # retention may delete records that are still to be read
        self.settings = without_ids(settings) | {"enable.auto.commit": "false", "auto.offset.reset": "earliest"}
        chosen, warnings = ranges(admin.cluster, self.settings, keys, begin, until)
        for warning in warnings:
            click.echo(f"klog: {warning}", err=True)
        self._ranges, self._follows, self._as_arrow = chosen, follow, as_arrow
        #: Offsets to read, of which compaction and transactions may have taken some; None if there is no end.
        self.total = None if follow else sum(end - start for start, end in chosen.values() if start < end)

    def batches(self, consumer: Consumer) -> Iterator[_Batch]:
        """What each poll brings of the ranges; without an end if it follows."""
        if not self._follows:
            for batch, _ in read_ranges(consumer, self._ranges, as_arrow=self._as_arrow):
                yield batch
            return
        consumer.assign([(*key, start) for key, (start, _) in self._ranges.items()])
        while True:
            yield _poll(consumer, self._as_arrow)


class _Joining(RebalanceListener):
    has_joined = False

    def on_assigned(self, partitions: list[TopicPartition]) -> None:
        self.has_joined = True


class _Group:
    """Reads as a member of a group."""

    total = None

    def __init__(
        self,
        admin: Admin,
        settings: dict[str, str],
        group: str,
        names: list[str],
        begin: str | None,
        follow: bool,
        as_arrow: bool,
    ) -> None:
        self._admin, self._group, self._names = admin, group, names
        self._follows, self._as_arrow = follow, as_arrow
        self.settings: dict[str, Any] = {**settings, "group.id": group}
        if begin is not None:
            self.settings["auto.offset.reset"] = begin
        self._ends: dict[TopicPartition, int] = {}
        self._joining = _Joining()

    def batches(self, consumer: Consumer) -> Iterator[_Batch]:
        """What each poll brings: all records, as where the others of the group stop is not known."""
        consumer.subscribe(self._names, self._joining)
        while not self._is_done(consumer):
            yield _poll(consumer, self._as_arrow)

    def _is_done(self, consumer: Consumer) -> bool:
        """Whether all of this member's partitions are read up to where they ended when it got them."""
        if self._follows:
            return False
        mine = consumer.assignment()
        if not mine:
            if not self._joining.has_joined or not self._is_shared(consumer):
                return False
            click.echo("klog: the group's other members have all partitions", err=True)
            return True
        if new := [key for key in mine if key not in self._ends]:
            self._ends |= list_offsets(self._admin.cluster, dict.fromkeys(new, LATEST))
        return all(consumer.position(*key) >= self._ends[key] for key in mine)

    def _is_shared(self, consumer: Consumer) -> bool:
        """Whether others have all partitions, and none has to give one up, of which this one may get some.

        What the group has given to this member, it may not know yet.
        """
        try:
            own = consumer.group_metadata().member
        except CommitFailed:
            return False  # it is joining again
        described = self._admin.describe_group(self._group)
        assigned = {
            (topic, number)
            for member in described.members
            for topic, numbers in (member.assignment or {}).items()
            if member.member_id != own
            for number in numbers
        }
        partitions = partitions_of(self._admin.cluster, dict.fromkeys(self._names))
        return described.state == "Stable" and assigned.issuperset(partitions)


def _poll(consumer: Consumer, as_arrow: bool) -> _Batch:
    return consumer.poll_arrow(_POLL_SECONDS) if as_arrow else consumer.poll(_POLL_SECONDS)


def _last(batch: _Batch) -> tuple[str, int, int]:
    """Topic, partition and offset of the last record."""
    if isinstance(batch, list):
        return batch[-1].topic, batch[-1].partition, batch[-1].offset
    topic, partition, offset = (batch.column(name)[-1].as_py() for name in ("topic", "partition", "offset"))
    return topic, partition, offset


def _stops(stop_on_error: bool, *, is_group: bool) -> Callable[[Undecoded], bool]:
    """Whether a record that does not decode ends the reading. The wrong registry must not move a group's offsets."""
    return lambda row: stop_on_error or (is_group and row.is_unknown)


def _copy(
    consumer: Consumer,
    reading: _Group | _Partitions,
    filters: list[Where],
    count: int | None,
    render: Callable[[Any], bytes | memoryview],
    counter: Counter,
    decoding: RecordTexts | None,
    stops: Callable[[Undecoded], bool],
) -> Undecoded | None:
    """Print records until the reading is done, or `count` are printed, or a signal stops it.

    Also until a record that does not decode and `stops` it, which is returned: the consumer stands there.
    """
    left = sys.maxsize if count is None else count
    # keys and values need not be decoded of what other filters leave out
    first = [each for each in filters if decoding is not None and not each.is_of_texts]
    filters = [each for each in filters if each not in first]
    try:
        for batch in reading.batches(consumer):
            if not batch:
                continue
            records = apply(first, batch)
            undecoded: list[Undecoded] = []
            stop: Undecoded | None = None
            if decoding is not None and records.num_rows:
                records, undecoded = decoding.decode(records)
                stop = next(filter(stops, undecoded), None)
            if stop is not None:
                records = _before(records, stop.offset)
                undecoded = [row for row in undecoded if row.offset < stop.offset]
            kept = apply(filters, records)
            if len(kept) >= left:
                kept = kept[:left]
                topic, partition, offset = _last(kept)
                consumer.seek(topic, partition, offset + 1)  # what is committed
                undecoded = [row for row in undecoded if row.offset < offset]
                stop = None
            elif stop is not None:
                consumer.seek(*stop[:3])
            if kept:
                data = render(kept)
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
                left -= len(kept)
                counter.add(len(kept), len(data))
            if undecoded and decoding is not None:
                decoding.report(undecoded)
            if stop is not None:
                return stop
            if not left:
                break
    except WokenUp:
        pass
    return None


def _before(records: pa.RecordBatch, offset: int) -> pa.RecordBatch:
    """The records before an offset of their partition."""
    return records.slice(0, bisect_left(records.column("offset").to_pylist(), offset))


def _stop(consumer: Consumer, number: int, _: FrameType | None) -> None:
    """Handle a signal: end the reading between two batches, so that what is committed was printed."""
    signal.signal(number, signal.SIG_DFL)  # the second one ends a write to a pipe that nobody reads
    consumer.wakeup()


def _pattern(text: str) -> re.Pattern[str] | None:
    """The pattern that begins with ^, None for a name; `ConfigError` if it is malformed."""
    if not text.startswith("^"):
        return None
    return topic_pattern(text, text)


def _names(admin: Admin, topics: tuple[str, ...]) -> list[str]:
    """The topics that names and patterns select; `ConfigError` if a pattern selects none."""
    names: dict[str, None] = {}
    for text in topics:
        pattern = _pattern(text)
        if pattern is None:
            names[text] = None
            continue
        matching = [topic.name for topic in admin.list_topics() if pattern.search(topic.name)]
        if not matching:
            raise ConfigError(f"no topic matches {text}; `klog topics list` shows them")
        names |= dict.fromkeys(matching)
    return list(names)


def _keys(admin: Admin, topics: tuple[str, ...], partitions: tuple[int, ...]) -> list[TopicPartition]:
    """The partitions to read; `ProtocolError` or `ConfigError` for one that does not exist."""
    try:
        return partitions_of(admin.cluster, dict.fromkeys(_names(admin, topics), set(partitions) or None))
    except ProtocolError as error:
        if error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            raise ConfigError(f"{error}; `klog topics list` shows the topics") from None
        raise


class Where:
    """A filter of --where, FIELD OPERATOR VALUE. `ConfigError` for one that can't be parsed.

    Fields: key, value, topic, partition, offset, timestamp (ms or ISO), header.NAME (the last one of that name), and
    .a.b.0 for a field within a value of JSON. Operators: = != < <= > >= and ~ !~ for regular expressions, which need
    to match anywhere. A record that does not have the field (a null key, no such header, no JSON) matches no filter.
    """

    def __init__(self, text: str) -> None:
        match = _FILTER.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"--where {text!r} must be FIELD OPERATOR VALUE: key, value, topic, partition, offset, timestamp, "
                "header.NAME or .json.field; = != < <= > >= ~ !~; for example 'key=42' or '.user.id >= 7'"
            )
        self._field, self._operator, self._text = match["field"], match["operator"], match["value"]
        if self._operator == "=~":
            self._operator = "~"
        self._regex = self._compiled() if self._operator in ("~", "!~") else None
        self._number: int | Decimal | None = _number(self._text)
        if self._field in _NUMBERS:
            self._number = self._whole_number()
        self._parsed = _json_or(self._text)

    @property
    def needs_headers(self) -> bool:
        return self._field.startswith("header.")

    @property
    def is_of_texts(self) -> bool:
        """Whether it is about keys or values."""
        return self._field in ("key", "value") or self._field.startswith(".")

    def _compiled(self) -> re.Pattern[str]:
        if self._field in _NUMBERS:
            raise ConfigError(f"--where: {self._field} is a number: compare it by = != < <= > >=")
        try:
            return re.compile(self._text)
        except re.error as error:
            raise ConfigError(f"--where: {self._text!r} is not a regular expression: {error}") from None

    def _whole_number(self) -> int:
        if self._field == "timestamp" and not self._text.strip().isdecimal():
            from spark_klog.client.places import TimeSpec

            place = parse_place("--where timestamp", self._text)
            if isinstance(place, TimeSpec) and place.everywhere is not None:
                return place.everywhere
        elif re.fullmatch(r"\s*\d{1,18}\s*", self._text):
            return int(self._text)
        raise ConfigError(f"--where: {self._text!r} is not {'an' if self._field == 'offset' else 'a'} {self._field}")

    def mask(self, batch: pa.RecordBatch) -> pa.Array:
        """Whether each record of an Arrow batch matches; no entry is null."""
        import pyarrow as pa
        import pyarrow.compute as pc

        from spark_klog.cli.records.arrow_form import milliseconds

        if self._field in _NUMBERS:
            column = milliseconds(batch) if self._field == "timestamp" else batch.column(self._field)
            return pc.call_function(_ARROW[self._operator], [column, pa.scalar(self._number, pa.int64())])
        if self._field in ("key", "value") and self._operator in ("=", "!="):
            column = batch.column(self._field)
            wanted = pa.scalar(self._text.encode(), column.type)
            return pc.call_function(_ARROW[self._operator], [column, wanted]).fill_null(False)
        return pa.array([self._matches(value) for value in self._values(batch)], pa.bool_())

    def matches(self, record: ConsumerRecord) -> bool:
        if self._field in _NUMBERS:
            return _COMPARE[self._operator](getattr(record, self._field), self._number)
        if self._field in ("key", "value") and self._operator in ("=", "!="):
            data = getattr(record, self._field)
            return data is not None and _COMPARE[self._operator](data, self._text.encode())
        return self._matches(self._value(record))

    def _value(self, record: ConsumerRecord) -> Any:
        """The field of a record; see `_values`."""
        if self._field in ("key", "value", "topic"):
            return _text(getattr(record, self._field))
        if self._field.startswith("header."):
            return _header(record.headers, self._field.removeprefix("header."))
        return _within(record.value, self._field.split(".")[1:])

    def _values(self, batch: pa.RecordBatch) -> list[Any]:
        """The field of each record: text, or what JSON has; `_MISSING` if there is none."""
        if self._field in ("key", "value", "topic"):
            return [_text(value) for value in batch.column(self._field).to_pylist()]
        if self._field.startswith("header."):
            name = self._field.removeprefix("header.")
            rows = batch.column("headers").to_pylist()
            return [_header([(each["key"], each["value"]) for each in headers or ()], name) for headers in rows]
        path = self._field.split(".")[1:]
        return [_within(value, path) for value in batch.column("value").to_pylist()]

    def _matches(self, value: Any) -> bool:
        if value is _MISSING:
            return False
        if self._regex is not None:
            text = value if isinstance(value, str) else json_text(value)
            return (self._regex.search(text) is not None) == (self._operator == "~")
        compare = _COMPARE[self._operator]
        if self._operator in ("=", "!="):
            is_equal = value == self._text if isinstance(value, str) else _same(value, self._parsed)
            return is_equal == (self._operator == "=")
        if self._number is not None:
            number = _number(value) if isinstance(value, str) else value
            return _is_ordered(number) and compare(number, self._number)
        return isinstance(value, str) and compare(value, self._text)


def _same(left: Any, right: Any) -> bool:
    """Equality of JSON, in which 1 is not true."""
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return None if number.is_nan() else number


def _is_ordered(value: Any) -> bool:
    """Whether it is a number, and not NaN."""
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool) and value == value


def _exact_json(text: str | bytes) -> Any:
    """Parse JSON, fractions as `Decimal`: floats have 17 digits at most. `ValueError`."""
    try:
        return json.loads(text, parse_float=Decimal, parse_int=whole_number)
    except (ArithmeticError, RecursionError) as error:
        raise ValueError from error


def _json_or(text: str) -> Any:
    try:
        return _exact_json(text)
    except ValueError:
        return text


def _text(value: bytes | str | None) -> Any:
    if value is None:
        return _MISSING
    return value if isinstance(value, str) else value.decode("utf-8", "backslashreplace")


def _header(headers: Sequence[tuple[str, bytes | None]], name: str) -> Any:
    for key, value in reversed(headers):
        if key == name:
            return _text(value)
    return _MISSING


def _within(value: bytes | None, path: list[str]) -> Any:
    """The field of a JSON value at a path of names and list indexes."""
    if value is None:
        return _MISSING
    try:
        inner = _exact_json(value)
    except ValueError:
        return _MISSING
    for name in path:
        if isinstance(inner, dict) and name in inner:
            inner = inner[name]
        elif isinstance(inner, list) and name.isdecimal() and int(name) < len(inner):
            inner = inner[int(name)]
        else:
            return _MISSING
    return inner


def apply(filters: list[Where], batch: _Batch) -> _Batch:
    """The records that all filters match."""
    if isinstance(batch, list):
        return [record for record in batch if all(each.matches(record) for each in filters)]
    for each in filters:
        if batch.num_rows:
            batch = batch.filter(each.mask(batch))
    return batch
