"""Errors that close a client's connection: it did not authenticate, or may not send its request."""

from __future__ import annotations

from spark_klog.errors import KlogError


class Refused(KlogError):
    """What a client may not do; its connection is closed. The text is for the log."""


class AuthenticationFailed(Refused):
    """A client that did not show who it is. The text holds no secret, and clients are told less."""
