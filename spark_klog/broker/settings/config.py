"""A broker's configuration, from server.properties and other sources, under Kafka's names.

    broker.id, node.id     the broker's id
    host.name, port        its address, as before Kafka 0.9; for `listeners` and related settings see `security.config`
    log.dirs, log.dir      its data directory: exactly one
    zookeeper.connect      HOST:PORT[,HOST:PORT...][/CHROOT]; empty for a standalone broker
    metrics.listen         HOST:PORT where Prometheus finds /metrics (not a setting of Kafka's)

Listeners of controllers (controller.listener.names) are ignored: there are no controller processes here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from spark_klog.base.names import TRANSACTION_VERSION, TRANSACTIONS_2
from spark_klog.base.settings import BOOLEAN, SECRET_NAME, advice, items, number, setting, settings_of, value_of, words
from spark_klog.broker.metadata.internal_topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from spark_klog.broker.security.config import SECURITY_SETTINGS, SecurityConfig, security_settings
from spark_klog.broker.settings.log_settings import (
    BROKER_LOG_SETTINGS,
    INTERNAL_SEGMENT_BYTES,
    TOPIC_SETTINGS,
    WORDING,
    broker_name,
    topic_settings,
)
from spark_klog.errors import ConfigError
from spark_klog.log.config import LogConfig
from spark_klog.schemas.registry.settings import (
    BROKER_PREFIX,
    NAMES as REGISTRY_NAMES,
    registry_config,
    shown as shown_of_registry,
)
from spark_klog.security.config import FILE, Settings, is_secret
from spark_klog.trees.tree import SESSION_SECONDS
from spark_klog.wire.codecs import MAX_DECOMPRESSED
from spark_klog.wire.listening import parse_listen
from spark_klog.wire.primitives import MAX_FRAME

_log = logging.getLogger(__name__)
_HOST, _PORT = "127.0.0.1", "9092"
_LISTENERS, _ADVERTISED, _OF_CONTROLLERS = "listeners", "advertised.listeners", "controller.listener.names"
#: Settings of addresses, directories and the id, which `broker_config` reads itself.
PLACES = words(
    "broker.id controller.listener.names host.name log.dir log.dirs metrics.listen node.id port zookeeper.connect"
)
#: Names, or prefixes of names, that are rejected: ignoring them would open what the configuration closes.
_REFUSED = {
    "authorizer.class.name": "authorizer classes are not supported: use the rules of klog.users.file",
    "config.providers": "values are not looked up by providers: write the values themselves",
    "listener.name.": "settings of a single listener are not supported: they apply to all listeners",
}
_number = partial(number, malformed="a number", outside="{} or more")
#: "int" are Kafka's 32-bit numbers.
_INT, _NATURAL_INT, _LONG = _number("int", 1), _number("int", 0), _number("long", 1)
#: Names in KafkaConfig of 0.10.2, 3.9, 4.1 and 4.4 that have no use here. A configuration written for Kafka must start
#: this broker, too: they are accepted, and one line of the log lists them. First, how the names begin of features that
#: this broker does not have; a name that begins so need not be one of Kafka's.
_FEATURES = tuple(
    words(
        """
        alter. controlled. controller.quorum. delegation. errors.deadletterqueue. group.coordinator.
        group.share. group.streams. log.cleaner.io. log.remote. metadata. password. quota. remote. replica.
        sasl.kerberos. sasl.login. sasl.oauthbearer. share. zookeeper.ssl.
        """
    )
)
_WITHOUT_USE = words(
    """
    add.partitions.to.txn.retry.backoff.max.ms add.partitions.to.txn.retry.backoff.ms advertised.host.name
    advertised.port auto.include.jmx.reporter auto.leader.rebalance.enable background.threads
    broker.heartbeat.interval.ms broker.id.generation.enable broker.rack broker.session.timeout.ms
    client.quota.callback.class connections.max.reauth.ms control.plane.listener.name controller.quota.window.num
    cordoned.log.dirs follower.fetch.last.tiered.offset.enable follower.replication.throttled.rate
    leader.replication.throttled.rate max.decompressed.message.bytes
    controller.quota.window.size.seconds controller.socket.timeout.ms create.topic.policy.class.name
    default.replication.factor delete.records.purgatory.purge.interval.requests delete.topic.enable
    early.start.listeners eligible.leader.replicas.enable fetch.purgatory.purge.interval.requests
    group.consumer.assignment.interval.ms group.consumer.assignors group.consumer.max.assignment.interval.ms
    group.consumer.max.heartbeat.interval.ms group.consumer.max.session.timeout.ms group.consumer.migration.policy
    group.consumer.min.assignment.interval.ms group.consumer.min.heartbeat.interval.ms
    group.consumer.min.session.timeout.ms group.consumer.regex.refresh.interval.ms
    initial.broker.registration.timeout.ms inter.broker.listener.name inter.broker.protocol.version
    kafka.metrics.polling.interval.secs kafka.metrics.reporters leader.imbalance.check.interval.seconds
    leader.imbalance.per.broker.percentage log.cleaner.threads log.dir.failure.timeout.ms
    log.flush.scheduler.interval.ms log.flush.start.offset.checkpoint.interval.ms log.local.retention.bytes
    log.local.retention.ms log.message.downconversion.enable log.message.format.version
    log.message.timestamp.before.max.ms log.message.timestamp.difference.max.ms log.preallocate log.roll.jitter.hours
    log.roll.jitter.ms max.connection.creation.rate max.connections.per.ip.overrides max.request.partition.size.limit
    metric.reporters metrics.num.samples metrics.recording.level metrics.sample.window.ms min.insync.replicas
    num.io.threads num.network.threads num.recovery.threads.per.data.dir num.replica.alter.log.dirs.threads
    num.replica.fetchers offsets.commit.required.acks offsets.commit.timeout.ms offsets.load.buffer.size
    offsets.topic.compression.codec offsets.topic.replication.factor offsets.topic.segment.bytes
    principal.builder.class process.roles producer.id.expiration.ms producer.purgatory.purge.interval.requests
    queued.max.requests replication.quota.window.num replication.quota.window.size.seconds request.timeout.ms
    reserved.broker.max.id sasl.client.callback.handler.class sasl.jaas.config sasl.mechanism.controller.protocol
    sasl.mechanism.inter.broker.protocol sasl.server.callback.handler.class sasl.server.max.receive.size
    security.inter.broker.protocol security.providers socket.connection.setup.timeout.max.ms
    socket.connection.setup.timeout.ms socket.listen.backlog.size socket.receive.buffer.bytes socket.send.buffer.bytes
    ssl.allow.dn.changes ssl.allow.san.changes ssl.cipher.suites ssl.enabled.protocols
    ssl.endpoint.identification.algorithm ssl.engine.factory.class ssl.keymanager.algorithm
    ssl.keystore.certificate.chain ssl.keystore.key ssl.keystore.password ssl.principal.mapping.rules ssl.protocol
    ssl.provider ssl.secure.random.implementation ssl.trustmanager.algorithm ssl.truststore.certificates
    ssl.truststore.password telemetry.max.bytes transaction.partition.verification.enable
    transaction.state.log.load.buffer.size transaction.state.log.min.isr transaction.state.log.replication.factor
    transaction.state.log.segment.bytes transaction.two.phase.commit.enable unclean.leader.election.enable
    zookeeper.connection.timeout.ms zookeeper.max.in.flight.requests zookeeper.metadata.migration.enable
    zookeeper.set.acl zookeeper.sync.time.ms
    """
)


@dataclass(frozen=True)
class BrokerConfig:
    """Configuration of a broker: addresses, data directory and settings. Sizes in bytes, times in ms.

    `directories` is the tree that brokers share: "zookeeper://CONNECT", a folder, or None for a standalone broker.
    """

    host: str
    port: int
    data_dir: Path
    broker_id: int = 0
    directories: str | None = None
    #: Address that serves metrics; None serves none.
    metrics_address: tuple[str, int] | None = None
    num_partitions: int = setting("num.partitions", 1, _INT)
    auto_create_topics: bool = setting("auto.create.topics.enable", True, BOOLEAN)
    log: LogConfig = field(default_factory=LogConfig)
    housekeeping_ms: int = setting("log.retention.check.interval.ms", 300_000, _LONG)
    checkpoint_ms: int = setting("log.flush.offset.checkpoint.interval.ms", 60_000, _INT)
    cleaner_enabled: bool = setting("log.cleaner.enable", True, BOOLEAN)
    cleaner_backoff_ms: int = setting("log.cleaner.backoff.ms", 15_000, _LONG)
    cleaner_memory_bytes: int = setting("log.cleaner.dedupe.buffer.size", 128 * 1024 * 1024, _LONG)
    request_max_bytes: int = setting("socket.request.max.bytes", MAX_FRAME, _INT)
    fetch_max_bytes: int = setting("fetch.max.bytes", 55 * 1024 * 1024, _INT)
    offsets_retention_minutes: int = setting("offsets.retention.minutes", 7 * 24 * 60, _INT)
    offsets_check_ms: int = setting("offsets.retention.check.interval.ms", 600_000, _LONG)
    group_initial_delay_ms: int = setting("group.initial.rebalance.delay.ms", 3000, _NATURAL_INT)
    group_min_session_ms: int = setting("group.min.session.timeout.ms", 6000, _INT)
    group_max_session_ms: int = setting("group.max.session.timeout.ms", 1_800_000, _INT)
    group_max_size: int = setting("group.max.size", 0x7FFFFFFF, _INT)
    consumer_heartbeat_ms: int = setting("group.consumer.heartbeat.interval.ms", 5000, _INT)
    consumer_session_ms: int = setting("group.consumer.session.timeout.ms", 45_000, _INT)
    consumer_max_size: int = setting("group.consumer.max.size", 0x7FFFFFFF, _INT)
    fetch_session_slots: int = setting("max.incremental.fetch.session.cache.slots", 1000, _INT)
    fetch_session_eviction_ms: int = setting("min.incremental.fetch.session.eviction.ms", 120_000, _LONG)
    decompressed_max_bytes: int = setting("decompressed.max.bytes", MAX_DECOMPRESSED, _LONG)
    offsets_partitions: int = setting("offsets.topic.num.partitions", 1, _INT)
    transaction_partitions: int = setting("transaction.state.log.num.partitions", 1, _INT)
    #: Kafka has this as a feature of the cluster. The one that applies is the lowest of all live brokers.
    transaction_version: int = setting(TRANSACTION_VERSION, TRANSACTIONS_2, number("int", 0, TRANSACTIONS_2))
    transaction_max_timeout_ms: int = setting("transaction.max.timeout.ms", 900_000, _INT)
    transaction_check_ms: int = setting("transaction.abort.timed.out.transaction.cleanup.interval.ms", 10_000, _INT)
    transactional_id_expiration_ms: int = setting("transactional.id.expiration.ms", 7 * 24 * 3600 * 1000, _INT)
    transactional_id_check_ms: int = setting(
        "transaction.remove.expired.transaction.cleanup.interval.ms", 3_600_000, _INT
    )
    offset_metadata_max_bytes: int = setting("offset.metadata.max.bytes", 4096, _INT)
    # The first four are not Kafka's, which has no such limits.
    queued_max_response_bytes: int = setting("queued.max.response.bytes", 256 * 1024 * 1024, _LONG)
    authentication_timeout_ms: int = setting("authentication.timeout.ms", 30_000, _LONG)
    receive_timeout_ms: int = setting("request.receive.timeout.ms", 120_000, _LONG)
    send_timeout_ms: int = setting("response.send.timeout.ms", 60_000, _LONG)
    failed_authentication_delay_ms: int = setting("connection.failed.authentication.delay.ms", 100, _INT)
    max_idle_ms: int = setting("connections.max.idle.ms", 600_000, _LONG)
    max_connections: int = setting("max.connections", 10_000, _INT)
    max_connections_per_ip: int = setting("max.connections.per.ip", 10_000, _INT)
    queued_max_bytes: int = setting("queued.max.request.bytes", 256 * 1024 * 1024, _LONG)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    #: Where schemas are validated, by `schemas.registry.settings.NAMES`; empty without one. `url` may be file:PATH.
    schema_registry: Settings = field(default_factory=Settings)
    paths_07: bool = setting("klog.zookeeper.paths.0.7", True, BOOLEAN)
    zookeeper_session_timeout_ms: int = setting("zookeeper.session.timeout.ms", int(1000 * SESSION_SECONDS), _INT)

    def default_partitions(self, topic: str) -> int:
        """The number of partitions of a topic that is created without one."""
        of_internal = {OFFSETS_TOPIC: self.offsets_partitions, TRANSACTIONS_TOPIC: self.transaction_partitions}
        return of_internal.get(topic, self.num_partitions)


BROKER_SETTINGS = settings_of(BrokerConfig)
#: Names of `registry_config` by those that a broker's settings have.
REGISTRY_SETTINGS = {shown_of_registry(BROKER_PREFIX, name): name for name in REGISTRY_NAMES - {"bare"}}


def has_no_use(name: str) -> bool:
    """Whether a setting of Kafka's brokers has no use here."""
    return name in _WITHOUT_USE or (name.startswith(_FEATURES) and name not in BROKER_SETTINGS)


def shown(name: str, value: str) -> str:
    """NAME=VALUE for logs and errors, with secrets hidden."""
    own = REGISTRY_SETTINGS.get(name, "")
    is_hidden = SECRET_NAME.search(name) or (own and (is_secret(own) or "@" in value))
    return f"{name}={'[hidden]' if is_hidden else value}"


def broker_settings(settings: Mapping[str, str], known_elsewhere: Iterable[str] = ()) -> dict[str, Any]:
    """`BrokerConfig` arguments from settings under Kafka's names; `ConfigError` for an unknown name or a bad value.

    `known_elsewhere` has further names to suggest for a misspelled one.
    """
    result: dict[str, Any] = {}
    of_security, of_registry = {}, Settings()
    for name, value in settings.items():
        if name in SECURITY_SETTINGS:
            of_security[name] = value
        elif name in REGISTRY_SETTINGS:
            of_registry[REGISTRY_SETTINGS[name]] = value
        elif name in BROKER_SETTINGS:
            row = BROKER_SETTINGS[name]
            result[row.name] = value_of(row.metadata["kind"], name, value, "setting {}={} must be {}")
        elif name not in BROKER_LOG_SETTINGS and name != INTERNAL_SEGMENT_BYTES:
            known = {*BROKER_SETTINGS, *BROKER_LOG_SETTINGS, *SECURITY_SETTINGS, *REGISTRY_SETTINGS, *known_elsewhere}
            raise ConfigError(f"unknown setting {name!r}; {advice(name, known, _WITHOUT_USE)}")
    of_logs = {
        attribute: value_of(kind, name, settings[name], WORDING)
        for name, (attribute, kind) in BROKER_LOG_SETTINGS.items()  # in their order: the last unit wins
        if name in settings
    }
    if INTERNAL_SEGMENT_BYTES in settings:
        of_logs |= topic_settings({INTERNAL_SEGMENT_BYTES: settings[INTERNAL_SEGMENT_BYTES]})
    if of_registry and not of_registry.get("url", "").startswith(FILE):
        registry_config(of_registry, BROKER_PREFIX)
    return result | {
        "log": LogConfig(**of_logs),
        "security": security_settings(of_security),
        "schema_registry": of_registry,
    }


def broker_setting_values(config: BrokerConfig) -> dict[str, Any]:
    """Values of a broker's settings, by Kafka's names."""
    values = {name: getattr(config, row.name) for name, row in BROKER_SETTINGS.items()}
    of_logs = {name: TOPIC_SETTINGS[topic].name for topic in TOPIC_SETTINGS if (name := broker_name(topic))}
    return values | {name: getattr(config.log, attribute) for name, attribute in of_logs.items()}


def broker_config(
    file: Mapping[str, str],
    chosen: Mapping[str, str],
    *,
    listen: str | None = None,
    data_dir: Path | None = None,
    broker_id: int | None = None,
    directories: str | None = None,
    metrics: str | None = None,
) -> BrokerConfig:
    """Build the configuration: `chosen` settings override those of the file, and arguments override both.

    Arguments are as in `BrokerConfig`; `listen` and `metrics` are HOST:PORT. `ConfigError` names the setting that is
    unknown, invalid or missing.
    """
    if listen is not None:
        file = {name: value for name, value in file.items() if name not in (_LISTENERS, _ADVERTISED)}
    settings = {**file, **chosen}
    for name, value in settings.items():
        for refused, reason in _REFUSED.items():
            if name.startswith(refused) and value:
                raise ConfigError(f"setting {shown(name, value)}: {reason}; leave it out")
    without_use = sorted(filter(has_no_use, settings))
    others = {name: value for name, value in settings.items() if name not in (*PLACES, *_REFUSED, *without_use)}
    values = broker_settings(_without_controllers(others, settings), PLACES)
    zookeeper = settings.get("zookeeper.connect", "").strip()
    listed = f"{settings.get('host.name') or _HOST}:{settings.get('port') or _PORT}"
    host, port = parse_listen(listen or listed, "--listen" if listen else "settings host.name and port")
    metrics_option = "--metrics" if metrics else "setting metrics.listen"
    metrics = metrics or settings.get("metrics.listen")
    config = BrokerConfig(
        host=host,
        port=port,
        data_dir=data_dir or _data_dir(settings),
        broker_id=_id(settings) if broker_id is None else broker_id,
        directories=directories or (f"zookeeper://{zookeeper}" if zookeeper else None),
        metrics_address=parse_listen(metrics, metrics_option) if metrics else None,
        **values,
    )
    if config.consumer_session_ms <= config.consumer_heartbeat_ms:
        raise ConfigError(
            f"group.consumer.session.timeout.ms={config.consumer_session_ms} must be greater than group.consumer."
            f"heartbeat.interval.ms={config.consumer_heartbeat_ms}: members would be removed between heartbeats"
        )
    if without_use:
        _log.warning("these Kafka settings have no effect: %s", ", ".join(without_use))
    if settings:
        _log.info("settings: %s", ", ".join(shown(*pair) for pair in sorted(settings.items())))
    return config


def _without_controllers(others: dict[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    names = {name.strip() for name in settings.get(_OF_CONTROLLERS, "").split(",")}
    for name in (_LISTENERS, _ADVERTISED):
        if name in others:
            listed = items(others[name])
            others[name] = ",".join(listener for listener in listed if listener.partition("://")[0] not in names)
    return others


def _id(settings: Mapping[str, str]) -> int:
    """The broker's id, 0 by default; -1 lets Kafka's cluster choose an id, and means 0 here."""
    texts = {name: settings[name].strip() for name in ("broker.id", "node.id") if name in settings}
    for name, text in texts.items():
        if not text.isdecimal() and text != "-1":
            raise ConfigError(f"setting {name}={text} must be a number of at least 0")
    ids = {int(text) for text in texts.values()}
    if len(ids) > 1:
        raise ConfigError(f"broker.id={texts['broker.id']} and node.id={texts['node.id']}: they are the same setting")
    return max(0, *ids) if ids else 0


def _data_dir(settings: Mapping[str, str]) -> Path:
    name = "log.dirs" if settings.get("log.dirs", "").strip() else "log.dir"
    folders = items(settings.get(name, ""))
    if len(folders) > 1:
        raise ConfigError(f"setting {name}={settings[name]} must be one data directory, not {len(folders)}")
    if not folders:
        raise ConfigError("there is no data directory: give --data-dir, or log.dirs in the configuration")
    return Path(folders[0])
