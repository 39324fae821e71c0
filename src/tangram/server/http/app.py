"""The application: API routes behind the middleware, and the files of the dashboard. Stateless."""

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

from tangram.runtime.error_records import ErrorRecord
from tangram.server.http.middleware import ApiMiddleware
from tangram.server.http.openapi import openapi_document
from tangram.server.http.request_context import RequestContext
from tangram.server.http.responses import STATUS_BY_CODE, problem_response
from tangram.server.http.routes import ROUTES, RouteHandlers

MEDIA_TYPE_BY_SUFFIX = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def create_app(handlers: RouteHandlers, middleware: ApiMiddleware) -> Starlette:
    routes = [
        StarletteRoute(
            route.path,
            middleware.wrap(route.handler.__get__(handlers), f"{route.method} {route.path}", is_public=route.is_public),
            methods=[route.method],
        )
        for route in ROUTES
    ]
    lock = asyncio.Lock()
    document = b""

    async def openapi(context: RequestContext) -> Response:
        """Builds the document on first use: that takes longer than the rest of a start."""
        nonlocal document
        async with lock:
            document = document or await asyncio.to_thread(openapi_document)
        return Response(document, media_type="application/json")

    routes.append(StarletteRoute("/openapi.json", middleware.wrap(openapi, "GET /openapi.json", is_public=True)))
    for path, content, media in _dashboard_files():
        routes.append(StarletteRoute(path, _static_handler(content, media)))
    app = Starlette(routes=routes, exception_handlers={HTTPException: _unknown_route_response})
    app.router.redirect_slashes = False  # no redirects: their target would come from the Host header
    return app


async def _unknown_route_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "no_such_method"}.get(error.status_code, "internal")
    messages = {
        "not_found": "there is nothing at this address; GET /openapi.json lists the API",
        "no_such_method": f"{request.method} is not allowed at this address; GET /openapi.json lists the API",
    }.get(code, str(error.detail))
    response = problem_response(ErrorRecord(code=code, message=messages), STATUS_BY_CODE[code])
    if code == "no_such_method":
        response.headers["allow"] = ", ".join(sorted(_allowed_methods(request)))
    return response


def _allowed_methods(request: Request) -> set[str]:
    routes = [route for route in request.app.routes if isinstance(route, StarletteRoute)]
    methods = [route.methods or set() for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return set[str]().union(*methods)


def _dashboard_files() -> list[tuple[str, bytes, str]]:
    """Path, content and media type of each file. All are read here: a request never names a file."""
    served = []
    for file in (files("tangram.server") / "dashboard").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in MEDIA_TYPE_BY_SUFFIX:
            path = "/" if file.name == "index.html" else f"/dashboard/{file.name}"
            served.append((path, file.read_bytes(), MEDIA_TYPE_BY_SUFFIX[suffix]))
    return served


def _static_handler(content: bytes, media: str) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        return Response(content, media_type=media, headers=SECURITY_HEADERS)

    return handle
