"""Errors that close a client's connection: failed authentication, or a request that is not allowed."""

from __future__ import annotations

from spark_klog.errors import KlogError


class Refused(KlogError):
    """The client may not do this; the broker closes the connection. The text is for the log."""


class AuthenticationFailed(Refused):
    """The client failed to authenticate. The text has no secret; clients get a shorter one."""
