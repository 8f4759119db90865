"""Who may ask: the API key, and the host name that a request to this computer alone must give.

Knows no endpoint but the one that is open.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from forge.engines.serving.refusal import ApiRefusal

OPEN_PATHS = ("/health",)
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")


class HttpGate:
    """An application behind its checks. An empty key asks for none.

    loopback_only: a page in a browser can make a name of its own lead to this computer, and would
    then be the same origin as this server; so requests must name the host in one of its own ways.
    Where a key is asked for, such a page lacks that, and a proxy may give whatever name it has.
    """

    def __init__(self, app: ASGIApp, api_key: str, loopback_only: bool) -> None:
        self._app = app
        self._key = api_key.encode()
        self._loopback_only = loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
        await JSONResponse(refusal.body(), refusal.status, headers)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiRefusal | None:
        headers = Headers(scope=scope)
        if not self._key:
            host = headers.get("host", "").lower()
            name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
            if self._loopback_only and name not in _LOOPBACK_HOSTS:
                return ApiRefusal(403, "this server answers to localhost alone", code="wrong_host")
            return None
        if scope["path"] in OPEN_PATHS:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Compared whole whatever stands in it, so that the time it takes tells nothing.
        same = hmac.compare_digest(key.strip().encode(), self._key)
        if scheme.lower() != "bearer" or not same:
            return ApiRefusal(401, "the API key is missing or wrong", code="invalid_api_key")
        return None
