"""The application: routes behind their door, and the files of the dashboard.

Owns no state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.routing import Route as StarletteRoute

from tangram.runtime.error_records import Fault
from tangram.server.http.middleware import STATUS_BY_CODE, Ask, Door, problem
from tangram.server.http.openapi import document
from tangram.server.http.routes import ROUTES, Api

MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAFE = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def application(api: Api, door: Door) -> Starlette:
    routes = [
        StarletteRoute(
            route.path,
            door.open(route.handler.__get__(api), f"{route.method} {route.path}", public=route.public),
            methods=[route.method],
        )
        for route in ROUTES
    ]
    describing = asyncio.Lock()
    described = b""

    async def openapi(ask: Ask) -> Response:
        """Made when somebody asks for it: that takes longer than anything else of a start."""
        nonlocal described
        async with describing:
            described = described or await asyncio.to_thread(document)
        return Response(described, media_type="application/json")

    routes.append(StarletteRoute("/openapi.json", door.open(openapi, "GET /openapi.json", public=True)))
    for path, content, media in _dashboard():
        routes.append(StarletteRoute(path, _file(content, media)))
    app = Starlette(routes=routes, exception_handlers={HTTPException: _unknown})
    app.router.redirect_slashes = False  # an address is right or wrong, and where to go is not for the Host to say
    return app


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "no_such_method"}.get(error.status_code, "internal")
    said = {
        "not_found": "there is nothing at this address; GET /openapi.json lists what there is",
        "no_such_method": f"{request.method} is not for this address; GET /openapi.json lists what there is",
    }.get(code, str(error.detail))
    answer = problem(Fault(code=code, message=said), STATUS_BY_CODE[code])
    if code == "no_such_method":
        answer.headers["allow"] = ", ".join(sorted(_methods(request)))
    return answer


def _methods(request: Request) -> set[str]:
    """Of what is at its address."""
    routes = [route for route in request.app.routes if isinstance(route, StarletteRoute)]
    found = [route.methods or set() for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return set[str]().union(*found)


def _dashboard() -> list[tuple[str, bytes, str]]:
    """The address of each file, its content and its kind. All are read here: no request ever names a file."""
    found = []
    for file in (files("tangram.server") / "dashboard").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in MEDIA:
            path = "/" if file.name == "index.html" else f"/dashboard/{file.name}"
            found.append((path, file.read_bytes(), MEDIA[suffix]))
    return found


def _file(content: bytes, media: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return Response(content, media_type=media, headers=SAFE)

    return answer
