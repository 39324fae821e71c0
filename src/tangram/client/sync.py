"""The same SDK without `await`: a thread runs the event loop, and every call waits for its end.

Owns that thread. Thin on purpose: each method is the asynchronous one, with its arguments and its documentation.
Ctrl-C cancels the call that waits and returns when its action has ended.
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
from tangram.client.quota import QuotaUse
from tangram.client.sandbox import Sandbox, Server, Session
from tangram.client.validation import Life
from tangram.errors import TangramError

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class _Portal:
    """An event loop in a thread, with a client that is entered and left there."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._life = Life("the connection")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leave: asyncio.Event | None = None
        self._open: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name="tangram", daemon=True)
        self._failure: BaseException | None = None

    def enter(self) -> None:
        self._life.begin()
        self._thread.start()
        try:
            self._open.result()
        except BaseException:
            self._thread.join()
            raise

    def leave(self) -> None:
        if self._failure is None:
            self._require()
        self._life.closed()
        assert self._loop is not None and self._leave is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended already; the failure says why
            self._loop.call_soon_threadsafe(self._leave.set)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    async def _live(self) -> None:
        self._loop, self._leave = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with self._client:
                self._life.opened()
                self._open.set_result(None)
                await self._leave.wait()
        except BaseException as error:
            if self._open.done():
                self._failure = error
            else:
                self._open.set_exception(error)
        finally:
            self._life.closed()

    def wait(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What is begun only if it can be waited for."""
        self._require()
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

    def _require(self) -> None:
        self._life.require()
        if threading.current_thread() is self._thread:
            raise TangramError(
                "called on the thread of the event loop, as from `on_output`: waiting here would wait for ever;"
                " let another thread do it, or do it after the call"
            )


def _soon(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Callable[[], Coroutine[Any, Any, T]]:
    """A plain function, to be called on the loop."""

    async def on_the_loop() -> T:
        return call(*args, **kwargs)

    return on_the_loop


def _waiting(method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """The method of a wrapper that calls the asynchronous method of what it wraps and waits for it."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        found: T = self._portal.wait(lambda: method(self._wrapped, *args, **kwargs))
        return found

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
    exec = _waiting(Session.exec)
    become = _waiting(Session.become)
    close = _waiting(Session.close)


class SyncServer(_Wrapper):
    stop = _waiting(Server.stop)
    wait = _waiting(Server.wait)


class SyncSandbox(_Wrapper):
    exec = _waiting(Sandbox.exec)
    read = _waiting(Sandbox.read)
    read_text = _waiting(Sandbox.read_text)
    write = _waiting(Sandbox.write)
    list = _waiting(Sandbox.list)
    delete = _waiting(Sandbox.delete)
    upload = _waiting(Sandbox.upload)
    download = _waiting(Sandbox.download)
    commit = _waiting(Sandbox.commit)
    close = _waiting(Sandbox.close)

    def session(self) -> SyncSession:
        return SyncSession(self._portal, self._wrapped.session())

    @functools.wraps(Sandbox.start)
    def start(self, *args: Any, **kwargs: Any) -> SyncServer:
        return SyncServer(self._portal, self._portal.wait(lambda: self._wrapped.start(*args, **kwargs)))


class SyncQuotaUse(_Wrapper):
    @functools.wraps(QuotaUse.spent)
    def spent(self, **options: Any) -> None:
        self._portal.wait(_soon(self._wrapped.spent, **options))

    @functools.wraps(QuotaUse.heard)
    def heard(self, *args: Any) -> None:
        self._portal.wait(_soon(self._wrapped.heard, *args))


class SyncApi(_Wrapper):
    get = _waiting(Api.get)
    post = _waiting(Api.post)
    request = _waiting(Api.request)


class SyncClient:
    """An open connection. Use it as `with tangram.connect_sync() as t:`."""

    def __init__(self, client: Client) -> None:
        self._wrapped = client
        self._portal = _Portal(client)

    def __enter__(self) -> Self:
        self._portal.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.leave()

    @functools.wraps(Client.sandbox)
    def sandbox(self, **options: Any) -> SyncSandbox:
        return SyncSandbox(self._portal, self._wrapped.sandbox(**options))

    @functools.wraps(Client.quota)
    def quota(self, *args: Any, **options: Any) -> SyncQuotaUse:
        return SyncQuotaUse(self._portal, self._portal.wait(_soon(self._wrapped.quota, *args, **options)))

    @functools.wraps(Client.api)
    def api(self, *args: Any, **options: Any) -> SyncApi:
        return SyncApi(self._portal, self._portal.wait(_soon(self._wrapped.api, *args, **options)))

    add_quota = _waiting(Client.add_quota)
    weigh = _waiting(Client.weigh)
    infer = _waiting(Client.infer)
    call = _waiting(Client.call)
    try_call = _waiting(Client.try_call)
    image = _waiting(Client.image)
    forget = _waiting(Client.forget)


@functools.wraps(connect)
def connect_sync(*args: Any, **kwargs: Any) -> SyncClient:
    return SyncClient(connect(*args, **kwargs))
