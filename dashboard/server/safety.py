"""Safety: who may access the dashboard, and what a page may do.

Host     must be loopback or the served address, against DNS rebinding
token    in the printed address; the first visit stores it in a cookie (SameSite=Strict, HttpOnly)
Origin   must be the address itself for anything but a plain GET
CSP      scripts and styles from this address only, none inline; no frames, no forms to other sites
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
MAX_BODY = 1 << 20
"""[bytes] Largest request body."""


@dataclass(frozen=True)
class Access:
    """Who may access the dashboard.

    Args:
        token: token in the dashboard's address; empty for none.
        names: host names of the address, besides localhost.
        any_address: allow any IP address as the host of a request, if the server listens on more
            than loopback.
    """

    token: str
    names: frozenset[str] = field(default_factory=frozenset)
    any_address: bool = False

    @property
    def cookie(self) -> str:
        """Cookie name, unique to each dashboard because browsers share cookies among ports."""
        return f"weft_{hashlib.sha256(self.token.encode()).hexdigest()[:12]}"

    def knows_host(self, host: str) -> bool:
        """
        >>> access = Access("t")
        >>> [access.knows_host(host) for host in ("127.0.0.1:8000", "localhost", "[::1]:1", "evil.example", "10.0.0.1:80", "")]
        [True, True, True, False, False, False]
        """
        name = (
            host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
        )
        if name.lower() in LOOPBACK or name.lower() in self.names:
            return True
        return self.any_address and _is_address(name)

    def knows(self, token: str) -> bool:
        # The comparison's time must not reveal how much of a token is right.
        return hmac.compare_digest(token.encode(), self.token.encode())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Guard:
    """Middleware that checks access, and adds the security headers to every response."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # there are no websockets

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refuse(scope)
        await (refusal or self._app)(scope, receive, with_headers)

    def _refuse(self, scope: Scope) -> Response | None:
        headers, access = Headers(scope=scope), self._access
        host = headers.get("host", "")
        if not access.knows_host(host):
            return PlainTextResponse(f"this dashboard does not serve the host {host!r}", 421)
        if not _same_site(headers, scope["method"], host):
            return PlainTextResponse("requests from other sites are refused", 403)
        # A chunked body has no length to check.
        if "transfer-encoding" in headers:
            return PlainTextResponse("the request must have a content-length", 411)
        if int(headers.get("content-length") or 0) > MAX_BODY:
            return PlainTextResponse("the request is too large", 413)
        if not access.token:
            return None
        asked = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if "token" in asked and access.knows(asked["token"]):
            return self._welcome(
                scope, {name: value for name, value in asked.items() if name != "token"}
            )
        if self._is_known(headers):
            return None
        return PlainTextResponse(
            "open the address that `weft dashboard` printed: it has the token\n", 401
        )

    def _is_known(self, headers: Headers) -> bool:
        sent = headers.get("authorization", "").removeprefix("Bearer ")
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._access.cookie)
        except CookieError:
            cookie = None
        return self._access.knows(sent) or (cookie is not None and self._access.knows(cookie.value))

    def _welcome(self, scope: Scope, rest: Mapping[str, str]) -> Response:
        """Store the token in a cookie, and continue without it in the address.

        Uses a page that refreshes, because after a link from another site a redirect would not send
        a strict cookie.
        """
        target = quote(scope["path"], safe="/") + (f"?{urlencode(rest)}" if rest else "")
        target = "/" + target.lstrip("/")  # never an address of another site
        escaped = target.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
        page = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url={escaped}"><title>Weft</title>'
        response = HTMLResponse(page, headers={"cache-control": "no-store"})
        response.set_cookie(
            self._access.cookie, self._access.token, httponly=True, samesite="strict", path="/"
        )
        return response


def _same_site(headers: Headers, method: str, host: str) -> bool:
    """Return whether a request comes from this site, the address bar or a program."""
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        return False
    site = headers.get("sec-fetch-site", "none")
    if method in ("GET", "HEAD"):
        # Links on other sites may open the dashboard.
        return site != "cross-site" or headers.get("sec-fetch-mode") == "navigate"
    return site in ("same-origin", "none") and (origin is not None or "sec-fetch-site" not in headers)
