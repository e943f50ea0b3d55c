"""A broker's configuration from server.properties and other sources, under Kafka's names.

    broker.id, node.id     the broker's id
    host.name, port        its address, as before Kafka 0.9; for `listeners` and related settings see `security.config`
    log.dirs, log.dir      its data directory: exactly one
    zookeeper.connect      HOST:PORT[,HOST:PORT...][/CHROOT]; empty for a standalone broker
    metrics.listen         HOST:PORT where Prometheus finds /metrics (not a setting of Kafka's)

The other settings are those of `config`. Listeners of controllers (controller.listener.names) are ignored: there are no
controller processes here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from spark_klog.broker.settings.config import BrokerConfig, broker_settings
from spark_klog.broker.settings.kafka_names import WITHOUT_USE, shown
from spark_klog.errors import ConfigError
from spark_klog.wire.listening import parse_listen

_log = logging.getLogger(__name__)
_HOST, _PORT = "127.0.0.1", "9092"
_LISTENERS, _ADVERTISED, _OF_CONTROLLERS = "listeners", "advertised.listeners", "controller.listener.names"
#: Settings that this module reads.
PLACES = frozenset(
    {
        _OF_CONTROLLERS,
        "broker.id",
        "host.name",
        "log.dir",
        "log.dirs",
        "metrics.listen",
        "node.id",
        "port",
        "zookeeper.connect",
    }
)
#: Names, or prefixes of names, that are rejected: ignoring them would open what the configuration closes.
_REFUSED = {
    "authorizer.class.name": "authorizer classes are not supported: use the rules of klog.users.file",
    "listener.name.": "settings of a single listener are not supported: they apply to all listeners",
}


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
    without_use = sorted(WITHOUT_USE & set(settings))
    others = {name: value for name, value in settings.items() if name not in PLACES | WITHOUT_USE | set(_REFUSED)}
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
    if without_use:
        _log.warning("these Kafka settings have no effect: %s", ", ".join(without_use))
    if settings:
        _log.info("settings: %s", ", ".join(shown(*item) for item in sorted(settings.items())))
    return config


def _without_controllers(others: dict[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    names = {name.strip() for name in settings.get(_OF_CONTROLLERS, "").split(",")}
    for setting in (_LISTENERS, _ADVERTISED):
        if setting in others:
            parts = (part.strip() for part in others[setting].split(","))
            others[setting] = ",".join(part for part in parts if part.partition("://")[0] not in names)
    return others


def _id(settings: Mapping[str, str]) -> int:
    """The broker's id, 0 by default; -1 lets Kafka's cluster choose an id, and means 0 here."""
    found = {name: settings[name].strip() for name in ("broker.id", "node.id") if name in settings}
    for name, text in found.items():
        if not text.isdecimal() and text != "-1":
            raise ConfigError(f"setting {name}={text} must be a number of at least 0")
    ids = {int(text) for text in found.values()}
    if len(ids) > 1:
        raise ConfigError(f"broker.id={found['broker.id']} and node.id={found['node.id']}: they are the same setting")
    return max(0, *ids) if ids else 0


def _data_dir(settings: Mapping[str, str]) -> Path:
    name = "log.dirs" if settings.get("log.dirs", "").strip() else "log.dir"
    folders = [part.strip() for part in settings.get(name, "").split(",") if part.strip()]
    if len(folders) > 1:
        raise ConfigError(f"setting {name}={settings[name]} must be one data directory, not {len(folders)}")
    if not folders:
        raise ConfigError("there is no data directory: give --data-dir, or log.dirs in the configuration")
    return Path(folders[0])
