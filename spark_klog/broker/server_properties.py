"""A broker's configuration, of a server.properties and of what is given beside it, by Kafka's names.

    broker.id, node.id     its id
    host.name, port        where it listens, as before 0.9; `listeners` and the like are `security.config`'s
    log.dirs, log.dir      its data directory: one
    zookeeper.connect      HOST:PORT[,HOST:PORT...][/CHROOT], empty for a broker that is alone
    metrics.listen         HOST:PORT where Prometheus finds /metrics (a setting of ours)

The other settings are those of `config`. Listeners of controllers (controller.listener.names) are left out: there is
none here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from spark_klog.broker.config import BrokerConfig, broker_settings, parse_listen
from spark_klog.broker.kafka_names import WITHOUT_USE, shown
from spark_klog.errors import ConfigError

_log = logging.getLogger(__name__)
_HOST, _PORT = "127.0.0.1", "9092"
_LISTENERS, _ADVERTISED, _OF_CONTROLLERS = "listeners", "advertised.listeners", "controller.listener.names"
#: What is read here.
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
#: To leave these out would open what the configuration closes: names, or their beginnings.
_REFUSED = {
    "authorizer.class.name": "there are no authorizer classes here, see the rules of klog.users.file",
    "listener.name.": "settings of one listener are not known here, they hold for all",
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
    """The configuration of the settings of a file, of `chosen` ones, which win, and of the arguments, which win again.

    They are as in `BrokerConfig`; `listen` and `metrics` are HOST:PORT. `ConfigError` names the setting that is
    unknown, bad or missing.
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
    metrics = metrics or settings.get("metrics.listen")
    host, port = parse_listen(listen or f"{settings.get('host.name') or _HOST}:{settings.get('port') or _PORT}")
    config = BrokerConfig(
        host=host,
        port=port,
        data_dir=data_dir or _data_dir(settings),
        broker_id=_id(settings) if broker_id is None else broker_id,
        directories=directories or (f"zookeeper://{zookeeper}" if zookeeper else None),
        metrics_address=parse_listen(metrics) if metrics else None,
        **values,
    )
    if without_use:
        _log.warning("settings of Kafka without a use here: %s", ", ".join(without_use))
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
    """-1 is Kafka's for one that the cluster chooses: 0 is chosen here."""
    found = {name: settings[name].strip() for name in ("broker.id", "node.id") if name in settings}
    for name, text in found.items():
        if not text.isdecimal() and text != "-1":
            raise ConfigError(f"setting {name}={text}: a number from 0 on is wanted")
    ids = {int(text) for text in found.values()}
    if len(ids) > 1:
        raise ConfigError(f"broker.id={found['broker.id']} and node.id={found['node.id']}: they are the same setting")
    return max(0, *ids) if ids else 0


def _data_dir(settings: Mapping[str, str]) -> Path:
    name = "log.dirs" if settings.get("log.dirs", "").strip() else "log.dir"
    folders = [part.strip() for part in settings.get(name, "").split(",") if part.strip()]
    if len(folders) > 1:
        raise ConfigError(f"setting {name}={settings[name]}: one data directory is wanted, {len(folders)} are given")
    if not folders:
        raise ConfigError("there is no data directory: give --data-dir, or log.dirs in the configuration")
    return Path(folders[0])
