"""Addresses to listen on: their text, and sockets bound to them; and what refuses a request that came in."""

from __future__ import annotations

import ipaddress
import socket

from spark_klog.errors import ConfigError

#: A large backlog: thousands of clients may connect at once after a restart.
_BACKLOG = 512


def parse_listen(text: str, option: str, default_host: str | None = None) -> tuple[str, int]:
    """Parse "HOST:PORT" into (host, port); port 0 means any free port.

    With `default_host` a port alone means that host. `ConfigError`, which names `option`, if the text is malformed.
    """
    host, colon, port = text.rpartition(":")
    if default_host is not None and not colon:
        host, colon = default_host, ":"
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{option}: {text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


class AddressRefused(ConfigError):
    """An address at which this machine can't listen now: another process may have it."""


def bind(host: str, port: int, option: str = "--listen") -> socket.socket:
    """Open a listening socket; `AddressRefused` names the option whose address can't be bound."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        text = getattr(error, "strerror", None) or str(error)
        reason = text.partition(" (while")[0]  # what follows repeats the address
        raise AddressRefused(f"can't listen on {host}:{port}: {reason}; choose another {option}") from None


def is_loopback(host: str) -> bool:
    """Whether a host, as a user wrote it, is this machine's loopback interface."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_own_host(header: str, bound: str) -> bool:
    """Whether the Host header of an HTTP request names this server.

    A page of another site can make a browser send requests here under its own name (DNS rebinding), so a name must be
    localhost or the one that the server was told to listen on. An IP address can't be rebound.
    """
    name = header.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    if name in ("localhost", bound.lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class RequestRefused(Exception):
    """A request that is not carried out: an HTTP status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
