"""The same SDK without `await`: a thread runs the event loop, and every call blocks until it has ended.

Owns that thread. Thin on purpose: each method is the asynchronous one, with its arguments and documentation. Ctrl-C
cancels the blocked call, which returns when its action has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from tangram.client.api import Api
from tangram.client.client import Client, connect
from tangram.client.quota_use import QuotaUse
from tangram.client.sandbox import Sandbox, Server, Session
from tangram.client.validation import Lifecycle
from tangram.errors import TangramError

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")


class _Portal:
    """An event loop in a thread, with a client that is entered and exited there."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lifecycle = Lifecycle("the connection")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leave_event: asyncio.Event | None = None
        self._opened: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="tangram", daemon=True)
        self._failure: BaseException | None = None

    def enter(self) -> None:
        self._lifecycle.begin()
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:
            self._thread.join()
            raise

    def leave(self) -> None:
        if self._failure is None:
            self._require_usable()
        self._lifecycle.mark_closed()
        assert self._loop is not None and self._leave_event is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended already; `failure` has the reason
            self._loop.call_soon_threadsafe(self._leave_event.set)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    async def _run(self) -> None:
        self._loop, self._leave_event = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with self._client:
                self._lifecycle.mark_open()
                self._opened.set_result(None)
                await self._leave_event.wait()
        except BaseException as error:
            if self._opened.done():
                self._failure = error
            else:
                self._opened.set_exception(error)
        finally:
            self._lifecycle.mark_closed()

    def wait(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Starts the coroutine only if the loop can run it."""
        self._require_usable()
        assert self._loop is not None

        async def doing() -> T:
            return await begin()

        future = asyncio.run_coroutine_threadsafe(doing(), self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            with contextlib.suppress(CancelledError, Exception):
                future.result()
            raise

    def _require_usable(self) -> None:
        self._lifecycle.require_open()
        if threading.current_thread() is self._thread:
            raise TangramError(
                "called on the thread of the event loop, as from `on_output`: waiting here would block forever;"
                " call it from another thread, or after the call that runs now"
            )


def _blocking(method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """A method that runs the asynchronous method of the wrapped object and blocks until it has ended."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._portal.wait(lambda: method(self._wrapped, *args, **kwargs))
        return result

    functools.update_wrapper(call, method)
    return call


def _on_loop(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Any, P], T]:
    """`_blocking` for a plain method, which is called on the loop."""

    async def call(wrapped: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(wrapped, *args, **kwargs)

    return _blocking(functools.wraps(method)(call))


def _returning(
    kind: Callable[[_Portal, T], R], method: Callable[Concatenate[Any, P], T]
) -> Callable[Concatenate[Any, P], R]:
    """Wraps what a method of a wrapper returns."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return kind(self._portal, method(self, *args, **kwargs))

    functools.update_wrapper(call, method)
    return call


class _Wrapper:
    def __init__(self, portal: _Portal, wrapped: Any) -> None:
        self._portal = portal
        self._wrapped = wrapped

    def __enter__(self) -> Self:
        self._portal.wait(lambda: self._wrapped.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.wait(lambda: self._wrapped.__aexit__(kind, error, trace))


class SyncSession(_Wrapper):
    exec = _blocking(Session.exec)
    become = _blocking(Session.become)
    close = _blocking(Session.close)


class SyncServer(_Wrapper):
    stop = _blocking(Server.stop)
    wait = _blocking(Server.wait)


class SyncSandbox(_Wrapper):
    exec = _blocking(Sandbox.exec)
    read = _blocking(Sandbox.read)
    read_text = _blocking(Sandbox.read_text)
    write = _blocking(Sandbox.write)
    list = _blocking(Sandbox.list)
    delete = _blocking(Sandbox.delete)
    upload = _blocking(Sandbox.upload)
    download = _blocking(Sandbox.download)
    commit = _blocking(Sandbox.commit)
    close = _blocking(Sandbox.close)
    start = _returning(SyncServer, _blocking(Sandbox.start))

    def session(self) -> SyncSession:
        return SyncSession(self._portal, self._wrapped.session())


class SyncQuotaUse(_Wrapper):
    spent = _on_loop(QuotaUse.spent)
    report_response = _on_loop(QuotaUse.report_response)


class SyncApi(_Wrapper):
    get = _blocking(Api.get)
    post = _blocking(Api.post)
    request = _blocking(Api.request)


class SyncClient:
    """An open connection. Use it as `with tangram.connect_sync() as t:`."""

    def __init__(self, client: Client) -> None:
        self._wrapped = client
        self._portal = _Portal(client)

    def __enter__(self) -> Self:
        self._portal.enter()
        return self

    def __exit__(self, *error: object) -> None:
        self._portal.leave()

    @functools.wraps(Client.sandbox)
    def sandbox(self, **options: Any) -> SyncSandbox:
        return SyncSandbox(self._portal, self._wrapped.sandbox(**options))

    quota = _returning(SyncQuotaUse, _on_loop(Client.quota))
    api = _returning(SyncApi, _on_loop(Client.api))
    add_quota = _blocking(Client.add_quota)
    weigh = _blocking(Client.weigh)
    infer = _blocking(Client.infer)
    call = _blocking(Client.call)
    try_call = _blocking(Client.try_call)
    image = _blocking(Client.image)
    forget = _blocking(Client.forget)


@functools.wraps(connect)
def connect_sync(*args: Any, **kwargs: Any) -> SyncClient:
    return SyncClient(connect(*args, **kwargs))
