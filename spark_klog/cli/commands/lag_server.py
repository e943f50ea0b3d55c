"""`klog groups lag --metrics`: the lag of groups for Prometheus."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import click

from spark_klog.cli.clusters import DEFAULT_SERVERS, client_settings, cluster_settings
from spark_klog.client import Admin
from spark_klog.errors import KlogError
from spark_klog.groups.lag_metrics import LagMetrics
from spark_klog.groups.stores import OffsetStore, open_store
from spark_klog.metrics.thread import LOOPBACK, MetricsThread
from spark_klog.wire.listening import parse_listen

_log = logging.getLogger(__name__)
#: Time of a call, unless the settings say otherwise: an outage should be seen soon.
_TIMEOUTS = {"default.api.timeout.ms": "10000", "request.timeout.ms": "10000"}


def serve_lag(
    groups: Sequence[str],
    address: str,
    interval: float,
    stores: Sequence[str],
    servers: str | None,
    command_config: Path | None,
) -> None:
    """Serve the lag until Ctrl-C or SIGTERM, read every `interval` seconds.

    A first look-up that fails ends the command; a later one is logged, and the last figures are served.
    """
    parse_listen(address, "--metrics", LOOPBACK)  # a mistyped one must not wait for a broker
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    own = client_settings(command_config)
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        settings = cluster_settings(servers, command_config)
        if not settings.keys() & _TIMEOUTS.keys():
            settings.update(_TIMEOUTS)
        settings.setdefault("bootstrap.servers", DEFAULT_SERVERS)
        admin = stack.enter_context(Admin(settings))
        opened: dict[str, list[OffsetStore]] = {}

        def others(group: str) -> list[OffsetStore]:
            if group not in opened:
                opened[group] = [stack.enter_context(open_store(one, group, own)) for one in stores]
            return opened[group]

        metrics = LagMetrics(admin, groups, others)
        metrics.refresh()
        served = stack.enter_context(closing(MetricsThread(address, metrics.page)))
        click.echo(f"metrics at http://{served.address}/metrics")
        is_failing = False
        while True:
            time.sleep(interval)
            try:
                metrics.refresh()
            except (KlogError, OSError) as error:
                if not is_failing:
                    _log.warning("can't read the lag, serving the last figures until it succeeds: %s", error)
                is_failing = True
            else:
                if is_failing:
                    _log.warning("the lag is read again")
                is_failing = False
