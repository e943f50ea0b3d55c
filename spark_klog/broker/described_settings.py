"""Settings as DescribeConfigs and CreateTopics answer with them: text, type and where each value comes from."""

from __future__ import annotations

from dataclasses import replace

from spark_klog.broker.broker import Broker
from spark_klog.broker.config import BrokerConfig, broker_setting_values
from spark_klog.broker.log_settings import is_list, known_topic_settings, setting_texts
from spark_klog.broker.registry import Topic
from spark_klog.log.config import LogConfig
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.configs import BROKER_SOURCE, DEFAULT_SOURCE, TOPIC_SOURCE

_BOOLEAN, _STRING, _LONG, _DOUBLE, _LIST = 1, 2, 5, 6, 7
_TYPES = {bool: _BOOLEAN, int: _LONG, float: _DOUBLE}


def topic_entries(broker: Broker, topic: Topic) -> list[Message]:
    """All settings of a topic: its own ones, else the broker's."""
    own = known_topic_settings(topic.name, topic.settings)
    values = setting_texts(replace(broker.config.log, **own))
    defaults = setting_texts(LogConfig())
    of_broker = setting_texts(broker.config.log)
    entries = []
    for name, (text, value) in values.items():
        if name in topic.settings:
            source = TOPIC_SOURCE
        else:
            source = DEFAULT_SOURCE if of_broker[name] == defaults[name] else BROKER_SOURCE
        entries.append(_entry(name, topic.settings.get(name, text), value, source, read_only=False))
    return entries


def broker_entries(config: BrokerConfig) -> list[Message]:
    """The broker's settings; they change by a restart alone."""
    values = broker_setting_values(config)
    defaults = broker_setting_values(BrokerConfig(config.host, config.port, config.data_dir))
    return [
        _entry(name, _text(value), value, DEFAULT_SOURCE if value == defaults[name] else BROKER_SOURCE, read_only=True)
        for name, value in sorted(values.items())
    ]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _entry(name: str, text: str, value: object, source: int, *, read_only: bool) -> Message:
    kind = _LIST if is_list(name) else _TYPES.get(type(value), _STRING)
    return {"name": name, "value": text, "read_only": read_only, "config_source": source, "config_type": kind}
