"""The routes: what can be asked over HTTP, each with its record in and its record out.

Owns the table of which the OpenAPI document and the reference are made, and the handlers. A handler reads the request,
lets the desk or a manager do it, and answers; it keeps nothing.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any, BinaryIO, NamedTuple

import msgspec
from starlette.responses import Response, StreamingResponse

from tangram.core.messages import NodeChanged, NodeState, PoolChanged
from tangram.errors import AdmissionRefused, InvalidAction, InvalidInput, ManagerError, TangramError
from tangram.managers.base import Manager
from tangram.managers.quotas.manager import Quota
from tangram.runtime.error_records import NotFound, fault_of
from tangram.runtime.orchestrator import Settled
from tangram.runtime.views import Story, Timeline, View
from tangram.runtime.wire import (
    About,
    Acknowledged,
    Chunk,
    Entries,
    Heard,
    ImageReply,
    LetGo,
    NodeRequest,
    PoolRequest,
    Quotas,
    Remember,
    Reply,
    RunReply,
    RunRequest,
    RunsReply,
    Sandboxes,
    SandboxReply,
    Services,
    Submission,
    WeightRequest,
    require_name,
)
from tangram.server.actions.images import OwnedImages
from tangram.server.actions.service import Desk
from tangram.server.http.auth import Runs
from tangram.server.http.middleware import (
    JSON,
    LARGE_BYTES,
    WHOLE_MAX,
    Answers,
    Ask,
    FileAnswer,
    Uploads,
    encode,
    json_answer,
    nothing,
    read_json,
)
from tangram.server.observe.visibility import Sight

FILE_BYTES_MAX = 256 << 20
"""Of one file that is read or written as such; larger ones go as trees."""
READS_MAX = 8
"""Files that are read into memory at once."""
TIMELINE_ROWS = 5000
MODE = 0o644
LINE = msgspec.json.Encoder()

log = logging.getLogger("tangram.server")


class Query(NamedTuple):
    """A word of the query."""

    name: str
    kind: dict[str, Any]
    """Its JSON schema."""
    about: str
    required: bool = False


class Route(NamedTuple):
    """One thing that can be asked."""

    method: str
    path: str
    handler: Callable[[Any, Ask], Any]
    operation: str
    """The `operationId` of the OpenAPI document. Generated clients are named after it: it stays as it is."""
    about: str
    takes: Any = None
    """The record of the body; `bytes` for a raw one."""
    gives: Any = None
    """The record of the answer; `bytes` for a raw one, None for nothing."""
    query: tuple[Query, ...] = ()
    public: bool = False
    """Anybody may ask."""
    status: int = 200
    also: tuple[int, ...] = ()
    """Other ways to say that it was done."""


PATH = Query(
    "path", {"type": "string", "minLength": 1}, "inside the sandbox; relative ones begin at /work", required=True
)
WAIT = Query(
    "wait_s", {"type": "number", "minimum": 0, "maximum": 60, "default": 20}, "how long to wait for it to settle"
)
UNTIL = Query("until", {"enum": ["settled", "started"], "default": "settled"}, "what to wait for")
AFTER = Query("after", {"type": "integer", "minimum": 0, "default": 0}, "where to go on: bytes, or the number of a row")


class Api:
    def __init__(
        self,
        desk: Desk,
        runs: Runs,
        manager: Manager,
        images: OwnedImages,
        sight: Sight,
        about: Callable[[], About],
    ) -> None:
        self._desk = desk
        self._runs = runs
        self._gate = desk.gate
        self._manager = manager
        self._images = images
        self._sight = sight
        self._about = about
        self._uploads = Uploads()
        self._answers = Answers()
        self._reading = asyncio.Semaphore(READS_MAX)
        self._encoding = asyncio.Lock()
        """Large results are read and encoded one by one: each is in memory twice, and the loop waits for the
        interpreter meanwhile."""
        self._submission = msgspec.json.Decoder(Submission)

    async def about(self, ask: Ask) -> Response:
        said = self._about()
        return json_answer(msgspec.structs.replace(said, run=ask.caller.run, admin=ask.caller.admin))

    # ---- actions ----

    async def submit(self, ask: Ask) -> Response:
        reply = await self._submitted(ask, ask.wait_s())
        return await self._answer(ask, reply, 200 if reply.state == "settled" else 202)

    async def _submitted(self, ask: Ask, wait_s: float) -> Reply:
        """Apart, so that nobody holds what was sent while its result waits for its turn."""
        asked = await read_json(ask, self._submission, self._desk.limits.body_bytes_max)
        found = await self._desk.submit(ask.caller, asked)
        if isinstance(found, Settled):
            return self._desk.reply(ask.caller, asked.id, found)
        return await self._desk.wait(ask.caller, found, asked.id, wait_s=wait_s)

    async def _answer(self, ask: Ask, reply: Reply, status: int = 200) -> Response:
        """One whose result is large is read again when it is its turn, and is not encoded on the loop."""
        if reply.state != "settled" or reply.settled is not None:
            return json_answer(reply, status)

        async def write(file: BinaryIO) -> None:
            async with self._encoding:
                ask.caller.require_standing()
                whole = await self._desk.whole(ask.caller, reply.id)
                content = await asyncio.to_thread(encode, whole)
                del whole
                await asyncio.to_thread(file.write, content)

        return await self._answers.spooled(ask, write, JSON, status)

    async def look(self, ask: Ask) -> Response:
        until = ask.text("until", "settled")
        if until not in ("settled", "started"):
            raise InvalidAction("until", until, "'settled' or 'started'")
        reply = await self._desk.look(ask.caller, ask.part("id"), wait_s=ask.wait_s(), until_started=until == "started")
        return await self._answer(ask, reply)

    async def output(self, ask: Ask) -> Response:
        chunks = self._desk.follow(ask.caller, ask.part("id"), ask.whole("after", 0, WHOLE_MAX))

        async def lines() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                yield LINE.encode(chunk) + b"\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def cancel(self, ask: Ask) -> Response:
        await self._desk.cancel(ask.caller, ask.part("id"))
        return nothing()

    async def let_go(self, ask: Ask) -> Response:
        asked: LetGo = await read_json(ask, _LET_GO, self._desk.limits.body_bytes_max)
        self._desk.let_go(ask.caller, ask.part("id"), asked.spent)
        return nothing()

    async def acknowledge(self, ask: Ask) -> Response:
        asked: Acknowledged = await read_json(ask, _ACKNOWLEDGED, self._desk.limits.body_bytes_max)
        self._desk.acknowledge(ask.caller, asked.actions)
        return nothing()

    async def story(self, ask: Ask) -> Response:
        found = self._sight.story(ask.part("id"), ask.caller)
        if found is None:
            raise NotFound("action", ask.part("id"))
        return json_answer(found)

    # ---- sandboxes ----

    async def sandboxes(self, ask: Ask) -> Response:
        return json_answer(Sandboxes(sandboxes=self._desk.sandboxes(ask.caller)))

    async def sandbox(self, ask: Ask) -> Response:
        inner = self._desk.sandbox(ask.caller, ask.part("name"))
        return json_answer(self._desk.sandbox_reply(ask.caller, inner))

    async def discard(self, ask: Ask) -> Response:
        with self._gate.passing():
            await self._desk.discard(ask.caller, ask.part("name"))
        return nothing()

    def _using(self, ask: Ask) -> AbstractContextManager[str]:
        return self._desk.using(ask.caller, ask.part("name"))

    async def read_file(self, ask: Ask) -> Response:
        with self._using(ask) as box:
            path, most = ask.text("path"), ask.at_most("bytes_max", FILE_BYTES_MAX)

            async def write(file: BinaryIO) -> None:
                async with self._reading:
                    ask.caller.require_standing()
                    with self._gate.passing():
                        content = await self._manager.read(box, path, bytes_max=most)
                    if len(content) <= LARGE_BYTES:
                        file.write(content)
                    else:
                        await asyncio.to_thread(file.write, content)

            return await self._answers.spooled(ask, write)

    async def write_file(self, ask: Ask) -> Response:
        with self._using(ask) as box:
            path, mode = ask.text("path"), ask.octal("mode", MODE)

            async def write(file: BinaryIO) -> None:
                content = await asyncio.to_thread(file.read)
                with self._gate.passing():
                    await self._manager.write(box, path, content, mode=mode)

            await self._uploads.spooled(ask, min(FILE_BYTES_MAX, self._desk.limits.file_bytes_max), write)
        return nothing()

    async def delete_file(self, ask: Ask) -> Response:
        with self._using(ask) as box, self._gate.passing():
            await self._manager.delete(box, ask.text("path"))
        return nothing()

    async def list_files(self, ask: Ask) -> Response:
        with self._using(ask) as box, self._gate.passing():
            return json_answer(Entries(entries=await self._manager.list(box, ask.text("path"))))

    async def read_tree(self, ask: Ask) -> Response:
        with self._using(ask) as box:
            path, most = ask.text("path"), ask.at_most("bytes_max", self._desk.limits.file_bytes_max)

            async def write(file: BinaryIO) -> None:
                async with self._reading:
                    ask.caller.require_standing()
                    with self._gate.passing():
                        await self._manager.pack(box, path, file, bytes_max=most)

            return await self._answers.spooled(ask, write)

    async def write_tree(self, ask: Ask) -> Response:
        with self._using(ask) as box:
            path = ask.text("path")

            async def write(file: BinaryIO) -> None:
                with self._gate.passing():
                    await self._manager.unpack(box, path, file)

            await self._uploads.spooled(ask, self._desk.limits.file_bytes_max, write)
        return nothing()

    # ---- images ----

    async def add_image(self, ask: Ask) -> Response:
        self._images.require_room(ask.caller.space, self._desk.limits.images_max)

        async def add(file: BinaryIO) -> str:
            with tempfile.NamedTemporaryFile(suffix=".tar") as named:
                await asyncio.to_thread(_copy, file, named)
                with self._gate.passing():
                    return await self._images.alias(ask.caller, await self._added(named.name))

        return json_answer(ImageReply(name=await self._uploads.spooled(ask, self._desk.limits.file_bytes_max, add)))

    async def _added(self, path: str) -> str:
        try:
            return await self._manager.add_image(path)
        except (InvalidInput, AdmissionRefused, ManagerError) as error:
            raise _of_upload(error, path) from error

    async def forget_image(self, ask: Ask) -> Response:
        with self._gate.passing():
            await self._images.forget(self._desk.names(ask.caller), ask.part("name"))
        return nothing()

    async def recall_image(self, ask: Ask) -> Response:
        with self._gate.passing():
            name = await self._images.recall(self._desk.names(ask.caller), ask.part("key"))
        return json_answer(ImageReply(name=name))

    async def remember_image(self, ask: Ask) -> Response:
        asked: Remember = await read_json(ask, _REMEMBER, self._desk.limits.body_bytes_max)
        with self._gate.passing():
            await self._images.remember(self._desk.names(ask.caller), ask.part("key"), asked.name)
        return nothing()

    # ---- services and quotas ----

    async def services(self, ask: Ask) -> Response:
        return json_answer(Services(services=self._sight.services()))

    async def quotas(self, ask: Ask) -> Response:
        return json_answer(Quotas(quotas=self._desk.quotas()))

    async def set_quota(self, ask: Ask) -> Response:
        ask.require_admin()
        asked: Quota = await read_json(ask, _QUOTA, self._desk.limits.body_bytes_max)
        self._desk.set_quota(asked)
        log.info("quota set quota=%s", asked.name)
        return nothing()

    async def heard(self, ask: Ask) -> Response:
        asked: Heard = await read_json(ask, _HEARD, self._desk.limits.body_bytes_max)
        self._desk.heard(ask.caller, ask.part("name"), asked.status, asked.headers, asked.action, time.time())
        return nothing()

    # ---- runs, pools and nodes ----

    async def runs(self, ask: Ask) -> Response:
        ask.require_admin()
        return json_answer(RunsReply(runs=self._runs.all()))

    async def make_run(self, ask: Ask) -> Response:
        ask.require_admin()
        asked: RunRequest = await read_json(ask, _RUN, self._desk.limits.body_bytes_max)
        with self._gate.passing():
            made = await self._runs.make(ask.part("name"), asked)
            log.info("run made run=%s weight=%g", made.name, made.weight)
            self._desk.weigh(made.name, made.weight)
            self._desk.cap(made.name, made.caps)
        return json_answer(made, 201)

    async def change_run(self, ask: Ask) -> Response:
        ask.require_admin()
        asked: RunRequest = await read_json(ask, _RUN, self._desk.limits.body_bytes_max)
        changed = await self._runs.change(ask.part("name"), asked)
        log.info("run changed run=%s weight=%g", changed.name, changed.weight)
        self._desk.weigh(changed.name, changed.weight)
        self._desk.cap(changed.name, changed.caps)
        return json_answer(changed)

    async def revoke_run(self, ask: Ask) -> Response:
        ask.require_admin()
        name = ask.part("name")
        with self._gate.passing():
            async with self._runs.revoking(name):
                await self._desk.end_run(name)
                self._sight.forget(name)
        log.info("run revoked run=%s", name)
        return nothing()

    async def renew_token(self, ask: Ask) -> Response:
        ask.require_admin()
        renewed = await self._runs.renew(ask.part("name"))
        log.info("token renewed run=%s", renewed.name)
        return json_answer(renewed)

    async def weigh(self, ask: Ask) -> Response:
        ask.require_admin()
        asked: WeightRequest = await read_json(ask, _WEIGHT, self._desk.limits.body_bytes_max)
        self._desk.weigh(require_name("run", ask.part("run")), asked.weight)
        return nothing()

    async def resize_pool(self, ask: Ask) -> Response:
        ask.require_admin()
        asked: PoolRequest = await read_json(ask, _POOL, self._desk.limits.body_bytes_max)
        self._desk.orchestrator.tell(PoolChanged(pool=self._sight.resized(ask.part("name"), asked.total)))
        log.info("pool resized pool=%s total=%d", ask.part("name"), asked.total)
        return json_answer(self._sight.view(ask.caller))

    async def change_node(self, ask: Ask) -> Response:
        ask.require_admin()
        asked: NodeRequest = await read_json(ask, _NODE, self._desk.limits.body_bytes_max)
        if not self._sight.has_node(ask.part("name")):
            raise NotFound("node", ask.part("name"))
        self._desk.orchestrator.tell(NodeChanged(node=ask.part("name"), state=NodeState(asked.state)))
        log.info("node changed node=%s state=%s", ask.part("name"), asked.state)
        return json_answer(self._sight.view(ask.caller))

    # ---- seeing ----

    async def view(self, ask: Ask) -> Response:
        return json_answer(self._sight.view(ask.caller))

    async def timeline(self, ask: Ask) -> Response:
        after, limit = ask.whole("after", 0, WHOLE_MAX), ask.whole("limit", TIMELINE_ROWS, 1 << 20)
        return json_answer(self._sight.timeline(after, min(limit, TIMELINE_ROWS), ask.caller))

    async def trace(self, ask: Ask) -> Response:
        ask.require_admin()
        file, size = self._sight.trace()
        held = AsyncExitStack()
        held.enter_context(file)
        return FileAnswer(file, size, held)

    async def metrics(self, ask: Ask) -> Response:
        ask.require_admin()
        return Response(self._sight.metrics(), media_type="text/plain; version=0.0.4")

    async def is_alive(self, ask: Ask) -> Response:
        return Response("alive\n", media_type="text/plain")

    async def is_ready(self, ask: Ask) -> Response:
        ready = not self._desk.draining
        return Response("ready\n" if ready else "draining\n", 200 if ready else 503, media_type="text/plain")


def _of_upload(error: TangramError, path: str) -> TangramError:
    """What a manager found wrong with what was sent: where it lies here is nobody's business, and helps nobody."""
    fault = fault_of(error)
    said = {
        field: getattr(fault, field).replace(repr(path), "the upload").replace(path, "the upload")
        for field in ("message", "value", "expected")
    }
    return msgspec.structs.replace(fault, **said).exception()


def _copy(file: BinaryIO, named: Any) -> None:
    shutil.copyfileobj(file, named)
    named.flush()


_LET_GO = msgspec.json.Decoder(LetGo)
_ACKNOWLEDGED = msgspec.json.Decoder(Acknowledged)
_HEARD = msgspec.json.Decoder(Heard)
_REMEMBER = msgspec.json.Decoder(Remember)
_QUOTA = msgspec.json.Decoder(Quota)
_RUN = msgspec.json.Decoder(RunRequest)
_WEIGHT = msgspec.json.Decoder(WeightRequest)
_POOL = msgspec.json.Decoder(PoolRequest)
_NODE = msgspec.json.Decoder(NodeRequest)

BYTES_MAX = Query(
    "bytes_max",
    {"type": "integer", "minimum": 0},
    f"refuse what is larger; never more than {FILE_BYTES_MAX >> 20} MiB of a file and limits.file_bytes_max of a tree",
)
FILE_MODE = Query(
    "mode", {"type": "string", "pattern": "^[0-7]{3,4}$", "default": f"{MODE:04o}"}, "permissions of the file, in octal"
)
LIMIT = Query("limit", {"type": "integer", "minimum": 0, "maximum": 1 << 20, "default": TIMELINE_ROWS}, "rows at most")

ROUTES = (
    # The most frequent first: they are tried in this order.
    Route(
        "POST",
        "/v1/actions",
        Api.submit,
        "submit",
        "Submit an action, and wait for it",
        Submission,
        Reply,
        (WAIT,),
        also=(202,),
    ),
    Route(
        "POST", "/v1/acknowledge", Api.acknowledge, "acknowledge", "Results that have arrived", Acknowledged, status=204
    ),
    Route("GET", "/v1/actions/{id}", Api.look, "look", "What has become of an action", None, Reply, (WAIT, UNTIL)),
    Route(
        "GET",
        "/v1/actions/{id}/output",
        Api.output,
        "output",
        "Follow what it writes, as lines of JSON",
        None,
        Chunk,
        (AFTER,),
    ),
    Route("POST", "/v1/actions/{id}/cancel", Api.cancel, "cancel", "Have it stopped", status=204),
    Route(
        "POST", "/v1/actions/{id}/release", Api.let_go, "let_go", "Let go of the quota that it holds", LetGo, status=204
    ),
    Route("GET", "/v1/actions/{id:path}/story", Api.story, "story", "What happened to it, line by line", None, Story),
    Route("GET", "/v1/sandboxes", Api.sandboxes, "sandboxes", "Open sandboxes", None, Sandboxes),
    Route("GET", "/v1/sandboxes/{name}", Api.sandbox, "sandbox", "One sandbox", None, SandboxReply),
    Route(
        "DELETE", "/v1/sandboxes/{name}", Api.discard, "discard", "End it at once, with all that runs in it", status=204
    ),
    Route(
        "GET",
        "/v1/sandboxes/{name}/files",
        Api.read_file,
        "read_file",
        "The content of a file",
        None,
        bytes,
        (PATH, BYTES_MAX),
    ),
    Route(
        "PUT",
        "/v1/sandboxes/{name}/files",
        Api.write_file,
        "write_file",
        "Make or replace a file",
        bytes,
        None,
        (PATH, FILE_MODE),
        status=204,
    ),
    Route(
        "DELETE",
        "/v1/sandboxes/{name}/files",
        Api.delete_file,
        "delete_file",
        "Delete a file or a tree",
        None,
        None,
        (PATH,),
        status=204,
    ),
    Route(
        "GET",
        "/v1/sandboxes/{name}/list",
        Api.list_files,
        "list_files",
        "What is in a directory",
        None,
        Entries,
        (PATH,),
    ),
    Route(
        "GET",
        "/v1/sandboxes/{name}/tree",
        Api.read_tree,
        "read_tree",
        "A file or a directory as a tar",
        None,
        bytes,
        (PATH, BYTES_MAX),
    ),
    Route(
        "PUT",
        "/v1/sandboxes/{name}/tree",
        Api.write_tree,
        "write_tree",
        "Unpack a tar below a directory",
        bytes,
        None,
        (PATH,),
        status=204,
    ),
    Route(
        "POST",
        "/v1/images",
        Api.add_image,
        "add_image",
        "An image from a tar, as `docker save` or OCI write it",
        bytes,
        ImageReply,
    ),
    Route("DELETE", "/v1/images/{name}", Api.forget_image, "forget_image", "Forget an image", status=204),
    Route(
        "GET",
        "/v1/image-keys/{key}",
        Api.recall_image,
        "recall_image",
        "The image that is remembered under a key",
        None,
        ImageReply,
    ),
    Route(
        "PUT",
        "/v1/image-keys/{key}",
        Api.remember_image,
        "remember_image",
        "Remember an image under a key",
        Remember,
        status=204,
    ),
    Route("GET", "/v1/services", Api.services, "services", "Model services", None, Services),
    Route("GET", "/v1/quotas", Api.quotas, "quotas", "Quotas of APIs", None, Quotas),
    Route("PUT", "/v1/quotas", Api.set_quota, "set_quota", "Add a quota, or change one (admin)", Quota, status=204),
    Route(
        "POST",
        "/v1/quotas/{name}/heard",
        Api.heard,
        "heard",
        "What an API answered about its limits",
        Heard,
        status=204,
    ),
    Route("GET", "/v1/about", Api.about, "about", "Who answers, and whom it takes the caller for", None, About),
    Route("GET", "/v1/view", Api.view, "view", "Pools, queue, runs and sandboxes as they are now", None, View),
    Route("GET", "/v1/timeline", Api.timeline, "timeline", "Actions that have settled", None, Timeline, (AFTER, LIMIT)),
    Route("GET", "/v1/runs", Api.runs, "runs", "Runs that have a token (admin)", None, RunsReply),
    Route(
        "POST",
        "/v1/runs/{name}",
        Api.make_run,
        "make_run",
        "Make a run; its token is told once (admin)",
        RunRequest,
        RunReply,
        status=201,
    ),
    Route(
        "POST",
        "/v1/runs/{name}/token",
        Api.renew_token,
        "renew_token",
        "A new token; the old one is void (admin)",
        None,
        RunReply,
    ),
    Route(
        "PATCH", "/v1/runs/{name}", Api.change_run, "change_run", "Its weight and caps (admin)", RunRequest, RunReply
    ),
    Route(
        "DELETE",
        "/v1/runs/{name}",
        Api.revoke_run,
        "revoke_run",
        "Revoke its token and end all that it has (admin)",
        status=204,
    ),
    Route("PUT", "/v1/weights/{run}", Api.weigh, "weigh", "The weight of a run (admin)", WeightRequest, status=204),
    Route(
        "PATCH",
        "/v1/pools/{name}",
        Api.resize_pool,
        "resize_pool",
        "Change the size of a pool (admin)",
        PoolRequest,
        View,
    ),
    Route(
        "PATCH",
        "/v1/nodes/{name}",
        Api.change_node,
        "change_node",
        "Drain a node, or take it up again (admin)",
        NodeRequest,
        View,
    ),
    Route(
        "GET",
        "/v1/trace",
        Api.trace,
        "trace",
        "The trace so far, for `tangram sim` and `tangram plan` (admin)",
        None,
        bytes,
    ),
    Route("GET", "/metrics", Api.metrics, "metrics", "Metrics for Prometheus (admin)", None, str),
    Route("GET", "/healthz", Api.is_alive, "is_alive", "It answers", None, str, public=True),
    Route("GET", "/readyz", Api.is_ready, "is_ready", "It takes in actions", None, str, public=True, also=(503,)),
)
