from tests.support.clients.admins import admin, server, theirs

__all__ = ["admin", "server", "theirs"]
