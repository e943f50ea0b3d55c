"""The log-in of `klog ui`: one token in the address, as notebooks have it, then a cookie.

    GET /?token=TOKEN                  sets the cookie, and redirects to the address without the token
    Cookie: klog-PORT=VALUE            VALUE is HMAC-SHA-256 of the token, in hexadecimal
    Authorization: Bearer TOKEN        for programs

Cookies do not tell ports apart, so the cookie's name has the port.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import re
import secrets
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from spark_klog.errors import ConfigError

OFF = "off"
_PARAMETER = "token"
#: Characters that need no quoting in an address; so many that guessing takes for ever, if they are random.
_TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,200}")
_COOKIE_TEXT = b"the cookie of klog ui"
_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>klog: log in</title><link rel="icon" href="data:,"></head>
<body>
<h1>{reason}</h1>
<p>Open the address that <code>klog ui</code> has printed when it started: <code>http://{host}/?token=TOKEN</code></p>
<p>If the token was set by <code>--token</code> or <code>KLOG_UI_TOKEN</code>, write that instead of TOKEN. Otherwise
each start of <code>klog ui</code> has a new one, and the address of an earlier start is not valid any more.</p>
</body>
</html>
"""


class Token(NamedTuple):
    """What opens the page. `is_given` if the user has chosen it: then it is not printed."""

    text: str
    is_given: bool

    def __repr__(self) -> str:
        return "Token(...)"


def chosen_token(given: str | None, *, is_loopback: bool) -> Token | None:
    """The token of --token, by default a new one; None for "off", which is for loopback. `ConfigError` if it is bad."""
    if given is None:
        return Token(secrets.token_urlsafe(24), is_given=False)
    if given == OFF:
        if not is_loopback:
            raise ConfigError(
                "--token off is for loopback addresses: everybody who reaches --listen would see all records"
            )
        return None
    if not _TOKEN.fullmatch(given):
        raise ConfigError("--token must be 16 to 200 of a-z A-Z 0-9 . _ ~ -, or off; without it there is a new one")
    return Token(given, is_given=True)


class LogIn:
    """ASGI middleware: answers 401 to requests that have neither the token nor its cookie."""

    def __init__(self, app: ASGIApp, token: Token, port: int) -> None:
        self._app, self._token, self._name = app, token.text.encode(), f"klog-{port}"
        self._cookie = hmac.new(self._token, _COOKIE_TEXT, hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        if _PARAMETER in request.query_params and (request.method, request.url.path) == ("GET", "/"):
            await self._with_parameter(request)(scope, receive, send)
        elif self._is_known(request):
            await self._app(scope, receive, send)
        else:
            await self._refusal(request, "Log in to see this page")(scope, receive, send)

    def _is_known(self, request: Request) -> bool:
        kind, _, text = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is_token(text.strip()):
            return True
        return secrets.compare_digest(request.cookies.get(self._name, "").encode(), self._cookie.encode())

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self._token)

    def _with_parameter(self, request: Request) -> Response:
        """Redirect to the address without the token, which does not belong in a browser's history or a bookmark."""
        if not self._is_token(request.query_params[_PARAMETER]):
            return self._refusal(request, "This is not the token of this page")
        answer = RedirectResponse("/", 303)
        answer.set_cookie(self._name, self._cookie, path="/", httponly=True, samesite="strict")
        return answer

    def _refusal(self, request: Request, reason: str) -> Response:
        headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
        if request.url.path.startswith("/api/"):
            error = f"{reason.lower()}: open the address that klog ui has printed, or send Authorization: Bearer TOKEN"
            return JSONResponse({"error": error}, 401, headers)
        host = html.escape(request.headers.get("host", ""))
        return HTMLResponse(_PAGE.format(reason=reason, host=host), 401, headers)
