from tests.support.admins import admin, server, theirs

__all__ = ["admin", "server", "theirs"]
