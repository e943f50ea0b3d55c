"""Keep a Spark Python worker's connections for its next task, and remove the delays between two tasks.

`pyspark.daemon` forks workers that run task after task over one TCP connection to the JVM. Three things cost time:

    gc.collect()       the daemon calls it between tasks: 20 ms for the objects of imported modules, which gc.freeze()
                       excludes
    the command        the JVM writes a task's command in two pieces with Nagle's algorithm on: the second piece waits
                       40 ms for our delayed acknowledgement of the first. TCP_QUICKACK sends it at once
    the result         more than 64 KB leave in several pieces, too: TCP_NODELAY

With `spark.python.unix.domain.socket.enabled` the connection is a Unix socket, which has no such delays.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
import sys
import time
from collections.abc import Mapping

from spark_klog.client.cluster import Cluster
from spark_klog.client.settings import client_config
from spark_klog.spark.options import PREFIX

_OPEN_FILES = "/dev/fd"
_LOOPBACK = ("127.0.0.1", "::1")
_DAEMON = "pyspark.daemon"
#: Linux only.
_QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)
_OLDEST_GENERATION = 2
#: A worker rarely has work with more different settings; each cluster has two connections to a broker.
_MOST_CLUSTERS = 8
#: After that new connections are safer: proxies drop quiet ones.
_IDLE_SECONDS = 60.0

#: Clusters by their settings, with the reading of `time.monotonic` when they were last asked for; the newest is last.
_clusters: dict[tuple[tuple[str, str], ...], tuple[Cluster, float]] = {}
#: Modules there were at the last gc.freeze(); 0 before the first task.
_frozen_modules = 0


def prepare_worker() -> None:
    """Set up a worker forked by `pyspark.daemon`, at the start of a task; do nothing in other processes.

    The connections are set once; objects are frozen again when the task before has imported modules.
    """
    global _frozen_modules
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if main is None or main.name != _DAEMON:
        return
    if not _frozen_modules:
        set_on_connections(socket.TCP_NODELAY)
        if _QUICKACK is not None:
            gc.callbacks.append(_acknowledge_at_once)
    if len(sys.modules) != _frozen_modules:
        _frozen_modules = len(sys.modules)
        gc.freeze()


def cluster_of(settings: Mapping[str, str]) -> Cluster:
    """The cluster of these client settings: that of the last task or step with its connections, or a new one."""
    key, now = tuple(sorted(settings.items())), time.monotonic()
    kept = _clusters.pop(key, None)
    cluster, used = (Cluster(client_config(settings, PREFIX)), now) if kept is None else kept
    # A read that still uses a cluster that is closed reconnects.
    if now - used > _IDLE_SECONDS:
        cluster.close()
    _clusters[key] = cluster, now
    if len(_clusters) > _MOST_CLUSTERS:
        _clusters.pop(next(iter(_clusters)))[0].close()
    return cluster


def _forget_clusters() -> None:
    """Close the connections in a forked process: they belong to its parent."""
    while _clusters:
        _clusters.popitem()[1][0].close()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_clusters)


def _acknowledge_at_once(phase: str, info: dict[str, int]) -> None:
    """Set TCP_QUICKACK when the daemon's collection starts, between two tasks: each write of ours resets it."""
    if _QUICKACK is not None and phase == "start" and info["generation"] == _OLDEST_GENERATION:
        set_on_connections(_QUICKACK)


def set_on_connections(option: int) -> None:
    """Set a TCP option to 1 on the process's loopback connections, one of which goes to the JVM.

    pyspark keeps the socket in a local variable, so this searches the open files. It ignores errors, and does nothing
    if the system does not list open files (Windows).
    """
    try:
        files = os.listdir(_OPEN_FILES)
    except OSError:
        return
    for name in files:
        try:
            _set_option(int(name), option)
        except OSError:  # not connected, or closed since, as the listing's own descriptor
            pass


def _set_option(file: int, option: int) -> None:
    if not stat.S_ISSOCK(os.fstat(file).st_mode):
        return
    blocking = os.get_blocking(file)
    connection = socket.socket(fileno=file)
    try:
        is_tcp = connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and connection.getpeername()[0] in _LOOPBACK:
            connection.setsockopt(socket.IPPROTO_TCP, option, 1)
    finally:
        connection.detach()
        os.set_blocking(file, blocking)  # `socket.socket` makes it non-blocking if a default timeout is set
