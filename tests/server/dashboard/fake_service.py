"""The development server of the dashboard: serves its files and the records of a model, on loopback.

Owns a thread with the server. Each request for the view takes the model a second further, so that what a page shows
depends on how often it asked and on nothing else. It can be stopped and started again on its port, ask for a token,
and answer with errors. `python -m tests.server.dashboard.fake_service 8123` runs it for looking, in real time.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web
from tests.server.dashboard.fake_model import Model

import tangram.server
from tangram.runtime.action_timeline import trace_of_rows
from tangram.runtime.views import TIMELINE_ROWS_MAX, View

FILES = Path(tangram.server.__file__).parent / "dashboard"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
START_S = 10.0


class FakeService:
    """`changed` may be set to alter views before they are sent. `step_s`: how far each view takes the model."""

    def __init__(self, model: Model, *, token: str = "", port: int = 0, step_s: float = 1.0) -> None:
        self.model = model
        self.token = token
        self.port = port
        self.step_s = step_s
        self.error: tuple[int, str, str] | None = None
        self.changed: Callable[[View], View] = lambda view: view
        self.requests: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        assert self._thread is None, "it is running"
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), name="fake service")
        self._thread.start()
        assert ready.wait(START_S), "the server did not start"

    def stop(self) -> None:
        if self._thread is None:
            return
        assert self._loop is not None and self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._page)
        app.router.add_get("/dashboard/{name}", self._file)
        app.router.add_get("/v1/view", self._view)
        app.router.add_get("/v1/timeline", self._timeline)
        app.router.add_get("/v1/timeline/trace-events", self._trace_events)
        app.router.add_get("/v1/actions/{id}/story", self._story)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = runner.addresses[0][1]
        ready.set()
        await self._stop.wait()
        await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append(request.path_qs)
        answer = self._refusal(request) if request.path.startswith("/v1/") else None
        if answer is None:
            answer = await handler(request)
        answer.headers["Content-Security-Policy"] = POLICY
        answer.headers["X-Content-Type-Options"] = "nosniff"
        return answer

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return refused(401, "unauthorized", "expected the token of a run or of an admin")
        return refused(*self.error) if self.error else None

    async def _page(self, request: web.Request) -> web.Response:
        return served("index.html")

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in {path.name for path in FILES.iterdir()}:
            raise web.HTTPNotFound
        return served(name)

    async def _view(self, request: web.Request) -> web.Response:
        if self.step_s:
            self.model.advance(self.step_s)
        return encoded(self.changed(self.model.view()))

    async def _timeline(self, request: web.Request) -> web.Response:
        return encoded(self.model.timeline(int(request.query["after"]), int(request.query["limit"])))

    async def _trace_events(self, request: web.Request) -> web.Response:
        content = trace_of_rows(self.model.timeline(0, TIMELINE_ROWS_MAX).rows).encode()
        return web.Response(body=content, content_type="application/octet-stream")

    async def _story(self, request: web.Request) -> web.Response:
        story = self.model.story(request.match_info["id"])
        if story is None:
            return refused(404, "unknown_action", "no such action, or none that this token may see")
        return encoded(story)


def served(name: str) -> web.Response:
    path = FILES / name
    return web.Response(body=path.read_bytes(), content_type=TYPES[path.suffix], charset="utf-8")


def encoded(record: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(record), content_type="application/json")


def refused(status: int, code: str, message: str) -> web.Response:
    body = msgspec.json.encode({"error": {"code": code, "message": message}})
    return web.Response(status=status, body=body, content_type="application/json")


def main() -> None:
    model = Model()
    model.settle(3000)
    service = FakeService(model, port=int(sys.argv[1]) if len(sys.argv) > 1 else 8123)
    with service:
        print(service.url, flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
