"""Client settings by Kafka's names, without the prefix `kafka.` of Spark's options; hints for unknown names.

A named cluster has its settings in a file, so that programs say "prod" and neither hosts nor secrets:
~/.config/klog/clusters.toml, or the file that KLOG_CONFIG names, with a table for each cluster.

    [prod]
    bootstrap.servers = ["kafka-1:9093", "kafka-2:9093"]
    security.protocol = "SASL_SSL"
    sasl.mechanism = "SCRAM-SHA-512"
    sasl.username = "loader"
    sasl.password = "env:KAFKA_PASSWORD"        # or "file:/run/secrets/kafka"

A reference to a secret stays one until a connection is made (see `security.config`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from spark_klog.base.names import OF_REGISTRY, SECURITY_PROTOCOLS
from spark_klog.base.settings import (
    BOOLEAN,
    INT,
    INT32_MAX,
    LONG,
    POSITIVE_INT,
    POSITIVE_LONG,
    TEXT,
    Kind,
    choice,
    items,
    nearest,
    setting,
    settings_of,
    value_of,
    words,
)
from spark_klog.errors import ConfigError
from spark_klog.protocol.tables.records import READ_COMMITTED, READ_UNCOMMITTED
from spark_klog.records.partitioning import KAFKAS, PARTITIONERS, Partitioning
from spark_klog.security import settings as security_settings
from spark_klog.security.config import SecurityConfig, Settings, check_holds_no_secret, is_plain_name, resolved
from spark_klog.wire.codecs import MAX_DECOMPRESSED, Codec, codec_by_name
from spark_klog.wire.primitives import MAX_FRAME

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_ACKS = {"0": 0, "1": 1, "-1": -1, "all": -1}
_ISOLATION = choice("isolation", {"read_uncommitted": READ_UNCOMMITTED, "read_committed": READ_COMMITTED})
_CODEC = Kind("codec", lambda text: codec_by_name(text).name)
#: The batches of a producer in each partition by which brokers recognise duplicates.
_MOST_IDEMPOTENT = 5
#: Settings of Kafka's own clients that are accepted and have no effect, so that users only have to replace the format.
_WITHOUT_EFFECT = security_settings.WITHOUT_EFFECT | words(
    """
    allow.auto.create.topics auto.commit.interval.ms auto.include.jmx.reporter auto.offset.reset
    bootstrap.resolve.timeout.ms check.crcs client.dns.lookup client.rack connections.max.idle.ms
    dead.letter.deserialization.errors dead.letter.topic
    default.api.timeout.ms enable.auto.commit enable.metrics.push exclude.internal.topics fetch.max.wait.ms
    fetch.min.bytes group.instance.id group.protocol group.remote.assignor heartbeat.interval.ms interceptor.classes
    key.deserializer key.serializer max.poll.interval.ms max.poll.records metadata.max.idle.ms
    metadata.recovery.rebootstrap.trigger.ms metadata.recovery.strategy metric.reporters metrics.num.samples
    metrics.recording.level metrics.sample.window.ms partition.assignment.strategy
    partitioner.adaptive.partitioning.enable partitioner.availability.timeout.ms partitioner.rack.aware
    receive.buffer.bytes reconnect.backoff.max.ms reconnect.backoff.ms
    retry.attempts retry.delays.ms retry.topics send.buffer.bytes session.timeout.ms
    share.acknowledgement.mode share.acquire.mode socket.connection.setup.timeout.max.ms
    transaction.two.phase.commit.enable value.deserializer value.serializer
    """
)
#: Settings that must not be ignored: that would silently do something else than the user asked for.
_REFUSED = {
    "bootstrap.controllers": "the client talks to brokers, set bootstrap.servers",
    "config.providers": "settings are taken as they are written",
    "oauth_cb": "set sasl.oauthbearer.provider=MODULE:FUNCTION instead",
}
_SCHEME = re.compile(r"([0-9a-zA-Z._%-]*)://")
#: What a host has not, and what people write between several.
_BETWEEN = re.compile(r"[\s;|'\"]")
#: librdkafka's names for Kafka's settings, used by kcat and confluent-kafka.
LIBRDKAFKAS = {
    "compression.codec": "compression.type",
    "fetch.message.max.bytes": "max.partition.fetch.bytes",
    "fetch.wait.max.ms": "fetch.max.wait.ms",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "message.max.bytes": "max.request.size",
    "message.send.max.retries": "retries",
    "message.timeout.ms": "delivery.timeout.ms",
    "metadata.broker.list": "bootstrap.servers",
    "queue.buffering.max.ms": "linger.ms",
    "request.required.acks": "acks",
    "socket.receive.buffer.bytes": "receive.buffer.bytes",
    "socket.send.buffer.bytes": "send.buffer.bytes",
    "socket.timeout.ms": "request.timeout.ms",
    "topic.metadata.refresh.interval.ms": "metadata.max.age.ms",
}
#: librdkafka's settings that count something else than bytes, and Kafka's that do what they are for.
LIBRDKAFKAS_COUNTS = {
    "batch.num.messages": "batch.size",
    "queue.buffering.max.kbytes": "buffer.memory",
    "queue.buffering.max.messages": "buffer.memory",
    "queued.max.messages.kbytes": "fetch.max.bytes",
    "queued.min.messages": "fetch.max.bytes",
}
_CALLS = "remove it: there are no callbacks,"
_LOGGED = "remove it, the client logs by Python's logging: logging.getLogger('spark_klog').setLevel"
#: librdkafka's settings of what this client does otherwise, and what to do instead.
LIBRDKAFKAS_OWN = {
    "broker.address.family": "remove it: the client tries all addresses of a host in turn",
    "debug": f"{_LOGGED}(logging.DEBUG)",
    "delivery.report.only.error": "remove it: look at the receipts that send returns",
    "enable.auto.offset.store": "the consumer commits up to where poll has read, so to commit what you have processed "
    "set enable.auto.commit=false and call commit with offsets, each that of the last record + 1",
    "enable.partition.eof": "remove it: no event tells a partition's end, compare position with Admin.list_offsets",
    "error_cb": f"{_CALLS} errors are raised by the calls",
    "log_level": f"{_LOGGED}(logging.WARNING)",
    "on_commit": f"{_CALLS} but give Consumer.commit_async one",
    "on_delivery": f"{_CALLS} look at the receipts that send returns",
    "socket.keepalive.enable": "remove it: the client connects anew when a broker has closed a connection",
    "statistics.interval.ms": "remove it: the client has no statistics",
    "stats_cb": f"{_CALLS} and no statistics",
}
#: Settings of Kafka Connect's sinks, and what a consumer and a load have for them.
CONNECTS = {
    "consumer.override.auto.offset.reset": "set auto.offset.reset; of a load --from-time",
    "errors.deadletterqueue.context.headers.enable": "remove it: a letter always has its headers",
    "errors.deadletterqueue.topic.name": "set dead.letter.topic; of a load --dead-letters topic:NAME",
    "errors.deadletterqueue.topic.replication.factor": "remove it, and create the topic",
    "errors.log.enable": "remove it: a letter has its error",
    "errors.log.include.messages": "remove it: a letter has its error",
    "errors.retry.delay.max.ms": "set retry.topics and retry.delays.ms",
    "errors.retry.timeout": "set retry.topics and retry.delays.ms",
    "errors.tolerance": "set dead.letter.topic, and dead.letter.deserialization.errors=true; of a load --max-bad",
}
#: kafka-python's settings whose names are not Kafka's with underscores.
KAFKA_PYTHONS = {
    "sasl_oauth_token_provider": "sasl.oauthbearer.provider",
    "sasl_plain_password": "sasl.password",
    "sasl_plain_username": "sasl.username",
    "ssl_cafile": "ssl.ca.location",
    "ssl_certfile": "ssl.certificate.location",
    "ssl_check_hostname": "ssl.endpoint.identification.algorithm",
    "ssl_ciphers": "ssl.cipher.suites",
    "ssl_crlfile": "ssl.crl.location",
    "ssl_keyfile": "ssl.key.location",
    "ssl_password": "ssl.key.password",
}
#: Names of a registry's settings that Confluent's clients, and so ours, take without `OF_REGISTRY`, too.
REGISTRY_LOGINS = ("basic.auth.", "bearer.auth.")
SERIALIZERS = frozenset({"key.serializer", "value.serializer", "key.deserializer", "value.deserializer"})
#: What else consumers and producers are told of keys and values, see client/serialization.py.
OF_ROWS = words(
    "key.schema key.schema.id key.subject key.message value.schema value.schema.id value.subject value.message"
)
OF_WRITTEN_ROWS = words(
    "auto.register.schemas use.latest.version key.subject.name.strategy value.subject.name.strategy"
)
BYTES = "keys and values are bytes: encode and decode them in your program"
#: What comes before clients' settings in Spark, Kafka Connect and Streams, Flink SQL and Spring.
_PREFIXES = re.compile(r"(?:spring\.)?(?:kafka\.)?(?:properties\.)?(?:(?:consumer|producer|admin)\.)?(?:override\.)?")
#: How close (a ratio of `difflib`) an unknown name is to the setting that it probably means. A short name may differ in
#: one letter, if it has at least so many.
_CLOSE, _SHORTEST = 0.85, 4
_VARIABLE = "KLOG_CONFIG"


def _level(codec: str) -> Kind:
    def parse(text: str) -> int:
        try:
            level = int(text)
        except ValueError:
            raise ValueError("a number") from None
        codec_by_name(codec).check_level(level)
        return level

    return Kind("level", parse)


def _partitioner(name: str) -> Kind:
    known = PARTITIONERS[name]
    wanted = f"one of {', '.join(known)}, or give each record its partition"
    return choice("partitioner", {one: one for one in known}, wanted)


@dataclass(frozen=True)
class ClientConfig:
    """Parsed settings. Times in ms, sizes in bytes."""

    bootstrap_servers: tuple[tuple[str, int], ...]
    client_id: str = setting("client.id", "spark_klog", TEXT)
    connect_timeout_ms: int = setting("socket.connection.setup.timeout.ms", 10_000, POSITIVE_LONG)
    request_timeout_ms: int = setting("request.timeout.ms", 30_000, POSITIVE_INT)
    retry_backoff_ms: int = setting("retry.backoff.ms", 100, LONG)
    retry_backoff_max_ms: int = setting("retry.backoff.max.ms", 1_000, LONG)
    delivery_timeout_ms: int = setting("delivery.timeout.ms", 120_000, POSITIVE_INT)
    fetch_max_bytes: int = setting("fetch.max.bytes", 50 * 1024 * 1024, INT)
    partition_fetch_bytes: int = setting("max.partition.fetch.bytes", 8 * 1024 * 1024, INT)
    isolation_level: int = setting("isolation.level", 0, _ISOLATION)
    acks: int = setting("acks", -1, choice("acks", _ACKS))
    enable_idempotence: bool | None = setting("enable.idempotence", None, BOOLEAN)
    compression_type: str = setting("compression.type", "none", _CODEC)
    batch_size: int = setting("batch.size", 256 * 1024, INT)
    max_request_size: int = setting("max.request.size", 1024 * 1024, INT)
    buffer_memory: int = setting("buffer.memory", 32 * 1024 * 1024, LONG)
    max_in_flight: int = setting("max.in.flight.requests.per.connection", 5, POSITIVE_INT)
    partitioner: str | None = setting("partitioner", None, _partitioner("partitioner"))
    partitioner_class: str | None = setting("partitioner.class", None, _partitioner("partitioner.class"))
    partitioner_ignore_keys: bool = setting("partitioner.ignore.keys", False, BOOLEAN)
    linger_ms: int = setting("linger.ms", 5, LONG)
    gzip_level: int | None = setting("compression.gzip.level", None, _level("gzip"))
    lz4_level: int | None = setting("compression.lz4.level", None, _level("lz4"))
    zstd_level: int | None = setting("compression.zstd.level", None, _level("zstd"))
    decompressed_max_bytes: int = setting("decompressed.max.bytes", MAX_DECOMPRESSED, POSITIVE_INT)
    #: How often a batch is sent again; nearly without end, as delivery.timeout.ms bounds it.
    retries: int = setting("retries", INT32_MAX, INT)
    metadata_max_age_ms: int = setting("metadata.max.age.ms", 300_000, POSITIVE_LONG)
    #: Whether brokers check that they are the ones that the client wants to reach (KIP-1242).
    cluster_check: bool = setting("metadata.cluster.check.enable", True, BOOLEAN)
    max_block_ms: int = setting("max.block.ms", 60_000, POSITIVE_LONG)
    transactional_id: str | None = setting("transactional.id", None, TEXT)
    transaction_timeout_ms: int = setting("transaction.timeout.ms", 60_000, POSITIVE_INT)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    #: The prefix of settings as the user wrote them.
    prefix: str = ""

    def named(self, name: str) -> str:
        return self.prefix + name

    @property
    def codec(self) -> Codec:
        return codec_by_name(self.compression_type)

    @property
    def compression_level(self) -> int | None:
        """The configured level of the codec, None for its default."""
        levels = {"gzip": self.gzip_level, "lz4": self.lz4_level, "zstd": self.zstd_level}
        return levels.get(self.compression_type)

    @property
    def is_idempotent(self) -> bool:
        """Whether the producer is idempotent: the default with acks=all and retries, as in Kafka."""
        return self.acks == _ACKS["all"] and self.retries > 0 and self.enable_idempotence is not False

    @property
    def partitioning(self) -> Partitioning:
        """How records without a partition get one."""
        if self.partitioner is not None:
            return PARTITIONERS["partitioner"][self.partitioner]
        rule = KAFKAS if self.partitioner_class is None else PARTITIONERS["partitioner.class"][self.partitioner_class]
        return replace(rule, hash=None) if self.partitioner_ignore_keys else rule

    @cached_property
    def response_max_bytes(self) -> int:
        """The largest response that a connection accepts."""
        return max(MAX_FRAME, 2 * self.fetch_max_bytes)


_KNOWN = settings_of(ClientConfig)
_ELSEWHERE = frozenset({"bootstrap.servers", "group.id", "zookeeper.connect", "offsets.storage", "dual.commit.enabled"})
#: All, in the order in which hints look for a similar one.
_NAMES = dict.fromkeys([*sorted(_ELSEWHERE), *_KNOWN, *sorted(security_settings.NAMES), *sorted(_WITHOUT_EFFECT)])


def client_config(settings: Mapping[str, Any], prefix: str = "") -> ClientConfig:
    """Parse settings by Kafka's names; `ConfigError` for an unknown name, a bad value, or no bootstrap.servers.

    Values are as of `setting_texts`. `prefix` is the prefix that the user wrote before the names, for messages.
    """
    check_names(settings, prefix)
    if "bootstrap.servers" not in settings:
        raise ConfigError(f"{prefix}bootstrap.servers is required: set HOST:PORT[,HOST:PORT...]")
    settings = {name: value for name, value in settings.items() if not _is_of_rows(name)}
    settings = resolved(setting_texts(settings, prefix), prefix)
    security = security_settings.security_config(settings, prefix)
    named = f"{prefix}bootstrap.servers"
    values: dict[str, Any] = {
        "bootstrap_servers": parse_bootstrap(settings["bootstrap.servers"], named, security.protocol),
        "prefix": prefix,
    }
    for name, row in _KNOWN.items():
        if name in settings:
            values[row.name] = value_of(row.metadata["kind"], prefix + name, settings[name])
    config = ClientConfig(**values, security=security)
    if config.enable_idempotence and not config.is_idempotent:
        if config.acks == _ACKS["all"]:
            raise ConfigError(f"{prefix}enable.idempotence=true needs {prefix}retries above 0")
        acks = f"{prefix}acks={settings['acks']}"
        raise ConfigError(f"{prefix}enable.idempotence=true needs {prefix}acks=all, not {acks}")
    if config.is_idempotent and config.max_in_flight > _MOST_IDEMPOTENT:
        typed = f"{prefix}max.in.flight.requests.per.connection={config.max_in_flight}"
        raise ConfigError(
            f"{typed}: set at most {_MOST_IDEMPOTENT}, as brokers recognise duplicates among a producer's last "
            f"{_MOST_IDEMPOTENT} batches, or {prefix}enable.idempotence=false"
        )
    if config.partitioner is not None and (config.partitioner_class is not None or config.partitioner_ignore_keys):
        raise ConfigError(
            f"{prefix}partitioner is librdkafka's, {prefix}partitioner.class and {prefix}partitioner.ignore.keys are "
            "Kafka's: set one of them"
        )
    if config.transactional_id is not None and not (config.transactional_id and config.is_idempotent):
        raise ConfigError(f"{prefix}transactional.id needs a name, {prefix}acks=all and idempotence")
    return config


def parse_bootstrap(text: str, name: str = "bootstrap.servers", protocol: str = "") -> tuple[tuple[str, int], ...]:
    """Parse "HOST:PORT,HOST:PORT" to (host, port) pairs; `ConfigError` if it is malformed.

    As Java's clients do, it drops a scheme before a host (`PLAINTEXT://`, or a listener's name); a protocol in it must
    be `protocol` if that is given, as in librdkafka.
    """
    if "@" in text:
        raise ConfigError(
            f"{name} has a character @, and is not shown, as a password may be before it: write HOST:PORT, and set "
            "sasl.username and sasl.password"
        )
    servers = []
    for part in items(text):
        if scheme := _SCHEME.match(part):
            part, given = part[scheme.end() :].rstrip("/"), scheme[1].upper()
            if protocol and given in SECURITY_PROTOCOLS and given != protocol:
                raise ConfigError(f"{name}: {scheme[0]}{part} contradicts security.protocol={protocol}: set {given}")
        host, colon, port = part.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{name}: {part!r} is not HOST:PORT")
        if _BETWEEN.search(host):
            raise ConfigError(f"{name}: {part!r} is not HOST:PORT; write commas between several: HOST:PORT,HOST:PORT")
        servers.append((host.strip("[]"), int(port)))
    if not servers:
        raise ConfigError(f"{name} is empty: set HOST:PORT[,HOST:PORT...]")
    return tuple(servers)


def setting_texts(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The settings' values as text; they may be str, int, float or bool, and bootstrap.servers a list or tuple of str.

    `ConfigError` for other values, None among them, with the setting's name.
    """
    return Settings({name: _text(name, value, prefix) for name, value in settings.items()})


def _text(name: str, value: Any, prefix: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if name == "bootstrap.servers" and isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        value = ",".join(value)
    if isinstance(value, str | int | float):
        if is_plain_name(name):
            check_holds_no_secret(prefix + name, name, str(value))
        return str(value)
    shown = prefix + name if is_plain_name(name) else "a setting"
    if value is None:
        raise ConfigError(f"{shown} is None: set a value, or leave the setting out")
    told = f"leave it out, {BYTES}" if name in SERIALIZERS else "set text, a number, True or False"
    raise ConfigError(f"{shown} is of type {type(value).__name__}: {told}")


def without_effect(settings: Mapping[str, str]) -> list[str]:
    """The names of the given settings that `client_config` accepts and ignores, sorted."""
    return sorted(name for name in settings if name in _WITHOUT_EFFECT)


def is_known(name: str) -> bool:
    return name in _NAMES


def check_settings(client: str, settings: object, example: str = "'bootstrap.servers': 'HOST:PORT'") -> None:
    """`ConfigError` unless they are settings by their names; their values are not shown, which may be passwords."""
    if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
        kind = "a dict with other keys than names" if isinstance(settings, Mapping) else type(settings).__name__
        raise ConfigError(f"{client} takes a dict of settings by Kafka's names, {{{example}, ...}}, not {kind}")


def check_names(settings: Mapping[str, Any], prefix: str = "") -> None:
    """Raise a `ConfigError` that names all settings that are unknown or refused; `prefix` as in `client_config`.

    Without a prefix, as in a named cluster or a file that programs share, there may be those of a schema registry, and
    of what consumers and producers do with schemas.
    """
    wrong = (name for name in settings if not is_known(name) and (prefix or not _is_of_rows(name)))
    problems = dict.fromkeys(_problem(name, prefix) for name in wrong)
    if problems:
        raise ConfigError("; and ".join(problems))


def _is_of_rows(name: str) -> bool:
    return name in OF_ROWS | OF_WRITTEN_ROWS or name.startswith((OF_REGISTRY, *REGISTRY_LOGINS))


def _problem(name: str, prefix: str) -> str:
    """Why a setting that is not known is refused, and what to do."""
    why = _REFUSED.get(name) or security_settings.refusal(name)
    if why is not None:
        return f"setting {prefix}{name} is not supported: {why}"
    if not is_plain_name(name):
        return (
            "unknown client setting, not shown as it may be a line of a key (in a properties file each line of PEM but "
            f"the last ends with a backslash); {_hint(name, prefix)}"
        )
    return f"unknown client setting {prefix + name!r}; {_hint(name, prefix)}"


def _hint(name: str, prefix: str) -> str:
    if name in LIBRDKAFKAS:
        return f"it is librdkafka's, Kafka's name for it is {prefix}{LIBRDKAFKAS[name]}"
    if name in LIBRDKAFKAS_COUNTS:
        return f"it is librdkafka's: set {prefix}{LIBRDKAFKAS_COUNTS[name]}, in bytes"
    if name in LIBRDKAFKAS_OWN:
        return f"it is librdkafka's: {LIBRDKAFKAS_OWN[name]}"
    if name in CONNECTS and not prefix:  # streams have options of their own
        return f"it is Kafka Connect's: {CONNECTS[name]}"
    if name == "compression.level":
        codecs = ", ".join(f"{prefix}compression.{codec}.level" for codec in ("gzip", "lz4", "zstd"))
        return f"it is librdkafka's: set that of the codec, {codecs}"
    if name.replace("_", ".") in SERIALIZERS:
        return f"remove it, {BYTES}" if prefix else f"it is kafka-python's, write {name.replace('_', '.')}"
    if name in KAFKA_PYTHONS:
        return f"it is kafka-python's, write {prefix}{KAFKA_PYTHONS[name]}"
    name = name.lower()
    for other in (name, _PREFIXES.sub("", name, count=1), name.replace("_", ".")):
        if other in _NAMES:
            return f"write {prefix}{other}"
    if question := nearest(name, _NAMES, min(_CLOSE, 1 - 1 / max(len(name), _SHORTEST))):
        return question.replace("mean ", f"mean {prefix}")
    beginning = [other for other in _NAMES if other.startswith(name)]
    beginning = [other for other in beginning if other not in _WITHOUT_EFFECT] or beginning
    if len(beginning) == 1:
        return f"did you mean {prefix}{beginning[0]}?"
    return "remove it: it is not known to this version"


def without_ids(settings: Mapping[str, str]) -> Settings:
    """Settings without the ids of a program that shares their file: to join its group, or to fence its producer."""
    ids = ("group.id", "group.instance.id", "transactional.id")
    return Settings({name: value for name, value in settings.items() if name not in ids})


def of_bytes(settings: Mapping[str, Any]) -> Settings:
    """Settings without those of a program that shares their file for its keys and values: for a client of bytes.

    Those of the registry stay, all with their prefix.
    """
    rest = Settings()
    for name, value in settings.items():
        if name not in SERIALIZERS | OF_ROWS | OF_WRITTEN_ROWS:
            rest.setdefault(OF_REGISTRY + name if name.startswith(REGISTRY_LOGINS) else name, value)
    return rest | {name: value for name, value in settings.items() if name.startswith(OF_REGISTRY)}


def named_cluster(name: str) -> Settings:
    """The settings of a cluster by Kafka's names; `ConfigError` if the file or the cluster is not there, or malformed.

    Secrets may still be references, which `client_config` resolves.
    """
    path = _path()
    clusters = _read(path)
    if name not in clusters:
        there = f"it has {', '.join(sorted(clusters))}" if clusters else "it has none"
        question = nearest(name, clusters)
        raise ConfigError(f"no cluster {name!r} in {path}: {there}{question and '; ' + question}")
    table = clusters[name]
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {name} must be a table of settings: [{name}]")
    return Settings(_flat(table, f"{path}: cluster {name}: "))


def _path() -> Path:
    given = os.environ.get(_VARIABLE)
    if given:
        return Path(given).expanduser()
    folder = os.environ.get("XDG_CONFIG_HOME")
    return (Path(folder) if folder else Path("~/.config").expanduser()) / "klog" / "clusters.toml"


def _read(path: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        return table
    except FileNotFoundError:
        raise ConfigError(
            f"there is no {path}, which defines clusters: write it, or set the environment variable {_VARIABLE} to "
            "another file, before Spark starts"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}, which defines clusters, can't be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not TOML: it is not UTF-8") from None


def _flat(table: Mapping[str, Any], where: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The settings of a table; TOML reads `sasl.password` without quotes as tables within tables."""
    for key, value in table.items():
        name = prefix + key
        if isinstance(value, dict):
            yield from _flat(value, where, f"{name}.")
        elif isinstance(value, bool):
            yield name, str(value).lower()
        elif isinstance(value, str | int):
            yield name, str(value)
        elif isinstance(value, list) and value and all(isinstance(element, str) for element in value):
            yield name, ",".join(value)
        else:
            raise ConfigError(f"{where}{name} must be a text, a whole number, true, false or a list of texts")
