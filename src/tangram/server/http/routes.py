"""The routes of the HTTP API, each with its request and response records.

Owns the table from which the OpenAPI document and the reference page are generated, and the handlers. A handler decodes
the request, calls the action service or a manager, and encodes the response; it keeps no state.

The path of an HTTP request to the scheduler:

    middleware                   authenticates the caller and applies its rate limit
    routes                       a handler decodes the request
    ActionService.submit         checks the limits of the tenant and writes the action to the journal
    Orchestrator.submit_ticket   hands the action to the scheduler; executes the effects that the scheduler returns
    Scheduler.handle             decides when the action starts, and with which units
    managers                     run the work
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any, BinaryIO, NamedTuple, TypeVar

import msgspec
from starlette.responses import Response, StreamingResponse

from tangram.core.messages import NodeChanged, NodeState, PoolChanged
from tangram.errors import AdmissionRefused, InvalidAction, InvalidInput, ManagerError, TangramError
from tangram.managers.base import Manager
from tangram.managers.quotas.manager import Quota
from tangram.runtime.action_timeline import trace_of_rows
from tangram.runtime.error_records import NotFound, error_record_of
from tangram.runtime.orchestrator import SettledAction
from tangram.runtime.views import PoolUsageView, Story, TimelineView, View
from tangram.runtime.wire import (
    Acknowledgement,
    ActionReply,
    DirectoryReply,
    ImageKeyRequest,
    ImageReply,
    NodeRequest,
    OutputChunk,
    PoolRequest,
    QuotaRelease,
    QuotasReply,
    RunReply,
    RunRequest,
    RunsReply,
    SandboxesReply,
    SandboxReply,
    ServerInfo,
    ServicesReply,
    Submission,
    UpstreamResponse,
    WeightRequest,
    require_name,
)
from tangram.server.actions.service import ActionService
from tangram.server.actions.tenant_images import TenantImages
from tangram.server.http.auth import RunRegistry
from tangram.server.http.bodies import (
    JSON,
    LARGE_BYTES,
    OCTET_STREAM,
    OpenFileResponse,
    ResponseSpool,
    UploadSpool,
    read_json,
)
from tangram.server.http.request_context import SAFE_INTEGER_MAX, RequestContext
from tangram.server.http.responses import encode, json_response, no_content
from tangram.server.observe.visibility import VisibilityFilter

FILE_BYTES_MAX = 256 << 20
"""Size of one file; larger ones are transferred as a tree."""
CONCURRENT_READS_MAX = 8
"""Concurrent files in memory."""
TIMELINE_ROWS_PER_PAGE = 5000
FILE_MODE_DEFAULT = 0o644

R = TypeVar("R")

log = logging.getLogger("tangram.server")


class QueryParam(NamedTuple):
    name: str
    schema: dict[str, Any]
    """Its JSON schema."""
    description: str
    required: bool = False


class Route(NamedTuple):
    """One operation of the API."""

    method: str
    path: str
    handler: Callable[[Any, RequestContext], Any]
    operation_id: str
    """`operationId` of the OpenAPI document. Generated clients use it as a name, so it is stable."""
    summary: str
    request_type: Any = None
    """The record of the body; `bytes` for a raw one."""
    response_type: Any = None
    """The record of the response; `bytes` for a raw one, None for an empty one."""
    query: tuple[QueryParam, ...] = ()
    is_public: bool = False
    """Needs no token."""
    status: int = 200
    other_statuses: tuple[int, ...] = ()
    """Further success statuses."""


PATH = QueryParam(
    "path", {"type": "string", "minLength": 1}, "inside the sandbox; relative paths start at /work", required=True
)
WAIT = QueryParam(
    "wait_s", {"type": "number", "minimum": 0, "maximum": 60, "default": 20}, "how long to wait for it to settle"
)
UNTIL = QueryParam("until", {"enum": ["settled", "started"], "default": "settled"}, "what to wait for")
AFTER = QueryParam(
    "after",
    {"type": "integer", "minimum": 0, "default": 0},
    "position after which to continue: a byte offset, or the number of a row",
)


class RouteHandlers:
    def __init__(
        self,
        action_service: ActionService,
        runs: RunRegistry,
        manager: Manager,
        images: TenantImages,
        visibility: VisibilityFilter,
        about: ServerInfo,
    ) -> None:
        self._action_service = action_service
        self._runs = runs
        self._drain_gate = action_service.drain_gate
        self._manager = manager
        self._images = images
        self._visibility = visibility
        self._about = about
        self._uploads = UploadSpool()
        self._responses = ResponseSpool()
        self._read_semaphore = asyncio.Semaphore(CONCURRENT_READS_MAX)
        self._encode_lock = asyncio.Lock()
        """Large results are read and encoded one by one: each is in memory twice, and encoding blocks the event
        loop."""

    async def about(self, context: RequestContext) -> Response:
        info = msgspec.structs.replace(self._about, run=context.caller.run, admin=context.caller.is_admin)
        return json_response(info)

    async def _read_json(self, context: RequestContext, kind: type[R]) -> R:
        return await read_json(context, kind, self._action_service.limits.body_bytes_max)

    # ---- actions ----

    async def submit(self, context: RequestContext) -> Response:
        reply = await self._submit_and_wait(context, context.wait_s())
        return await self._reply_response(context, reply, 200 if reply.state == "settled" else 202)

    async def _submit_and_wait(self, context: RequestContext, wait_s: float) -> ActionReply:
        """A separate function, so that the request's memory is free while its result waits for a slot."""
        request = await self._read_json(context, Submission)
        result = await self._action_service.submit(context.caller, request)
        if isinstance(result, SettledAction):
            return self._action_service.reply(context.caller, request.id, result)
        return await self._action_service.wait(context.caller, result, request.id, wait_s=wait_s)

    async def _reply_response(self, context: RequestContext, reply: ActionReply, status: int = 200) -> Response:
        """Waits for a slot, fetches the large result again, and encodes it off the event loop."""
        if reply.state != "settled" or reply.settled is not None:
            return json_response(reply, status)

        async def write(file: BinaryIO) -> None:
            async with self._encode_lock:
                context.caller.require_not_revoked()
                full_reply = await self._action_service.fetch_reply(context.caller, reply.id)
                content = await asyncio.to_thread(encode, full_reply)
                del full_reply
                await asyncio.to_thread(file.write, content)

        return await self._responses.spool(context, write, JSON, status)

    async def get_action(self, context: RequestContext) -> Response:
        until = context.query_text("until", "settled")
        if until not in ("settled", "started"):
            raise InvalidAction("until", until, "'settled' or 'started'")
        reply = await self._action_service.status(
            context.caller, context.path_param("id"), wait_s=context.wait_s(), until_started=until == "started"
        )
        return await self._reply_response(context, reply)

    async def output(self, context: RequestContext) -> Response:
        chunks = self._action_service.follow(
            context.caller, context.path_param("id"), context.query_int("after", 0, SAFE_INTEGER_MAX)
        )

        async def lines() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                yield encode(chunk) + b"\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def cancel(self, context: RequestContext) -> Response:
        await self._action_service.cancel(context.caller, context.path_param("id"))
        return no_content()

    async def release_quota(self, context: RequestContext) -> Response:
        request = await self._read_json(context, QuotaRelease)
        self._action_service.release_quota(context.caller, context.path_param("id"), request.spent)
        return no_content()

    async def acknowledge(self, context: RequestContext) -> Response:
        request = await self._read_json(context, Acknowledgement)
        self._action_service.acknowledge(context.caller, request.actions)
        return no_content()

    async def story(self, context: RequestContext) -> Response:
        story = self._visibility.story(context.path_param("id"), context.caller)
        if story is None:
            raise NotFound("action", context.path_param("id"))
        return json_response(story)

    # ---- sandboxes ----

    async def sandboxes(self, context: RequestContext) -> Response:
        return json_response(SandboxesReply(sandboxes=self._action_service.sandboxes(context.caller)))

    async def sandbox(self, context: RequestContext) -> Response:
        qualified_name = self._action_service.require_sandbox(context.caller, context.path_param("name"))
        return json_response(self._action_service.sandbox_reply(context.caller, qualified_name))

    async def discard(self, context: RequestContext) -> Response:
        with self._drain_gate.admit():
            await self._action_service.remove_sandbox(context.caller, context.path_param("name"))
        return no_content()

    def _sandbox_in_use(self, context: RequestContext) -> AbstractContextManager[str]:
        return self._action_service.sandbox_in_use(context.caller, context.path_param("name"))

    async def read_file(self, context: RequestContext) -> Response:
        with self._sandbox_in_use(context) as sandbox:
            path, most = context.query_text("path"), context.bytes_max(FILE_BYTES_MAX)

            async def write(file: BinaryIO) -> None:
                async with self._read_semaphore:
                    context.caller.require_not_revoked()
                    with self._drain_gate.admit():
                        content = await self._manager.read(sandbox, path, bytes_max=most)
                    if len(content) <= LARGE_BYTES:
                        file.write(content)
                    else:
                        await asyncio.to_thread(file.write, content)

            return await self._responses.spool(context, write)

    async def write_file(self, context: RequestContext) -> Response:
        with self._sandbox_in_use(context) as sandbox:
            path, mode = context.query_text("path"), context.query_octal("mode", FILE_MODE_DEFAULT)

            async def write(file: BinaryIO) -> None:
                content = await asyncio.to_thread(file.read)
                with self._drain_gate.admit():
                    await self._manager.write(sandbox, path, content, mode=mode)

            await self._uploads.spool(context, min(FILE_BYTES_MAX, self._action_service.limits.file_bytes_max), write)
        return no_content()

    async def delete_file(self, context: RequestContext) -> Response:
        with self._sandbox_in_use(context) as sandbox, self._drain_gate.admit():
            await self._manager.delete(sandbox, context.query_text("path"))
        return no_content()

    async def list_files(self, context: RequestContext) -> Response:
        with self._sandbox_in_use(context) as sandbox, self._drain_gate.admit():
            return json_response(DirectoryReply(entries=await self._manager.list(sandbox, context.query_text("path"))))

    async def read_tree(self, context: RequestContext) -> Response:
        with self._sandbox_in_use(context) as sandbox:
            path = context.query_text("path")
            most = context.bytes_max(self._action_service.limits.file_bytes_max)

            async def write(file: BinaryIO) -> None:
                async with self._read_semaphore:
                    context.caller.require_not_revoked()
                    with self._drain_gate.admit():
                        await self._manager.pack(sandbox, path, file, bytes_max=most)

            return await self._responses.spool(context, write)

    async def write_tree(self, context: RequestContext) -> Response:
        with self._sandbox_in_use(context) as sandbox:
            path = context.query_text("path")

            async def write(file: BinaryIO) -> None:
                with self._drain_gate.admit():
                    await self._manager.unpack(sandbox, path, file)

            await self._uploads.spool(context, self._action_service.limits.file_bytes_max, write)
        return no_content()

    # ---- images ----

    async def add_image(self, context: RequestContext) -> Response:
        self._images.require_capacity(context.caller.tenant, self._action_service.limits.images_max)

        async def add(file: BinaryIO) -> str:
            with tempfile.NamedTemporaryFile(suffix=".tar") as named:
                await asyncio.to_thread(_copy, file, named)
                with self._drain_gate.admit():
                    return await self._images.register(context.caller, await self._add_uploaded_image(named.name))

        return json_response(
            ImageReply(name=await self._uploads.spool(context, self._action_service.limits.file_bytes_max, add))
        )

    async def _add_uploaded_image(self, path: str) -> str:
        try:
            return await self._manager.add_image(path)
        except (InvalidInput, AdmissionRefused, ManagerError) as error:
            raise _without_upload_path(error, path) from error

    async def forget_image(self, context: RequestContext) -> Response:
        with self._drain_gate.admit():
            await self._images.forget(self._action_service.namespace(context.caller), context.path_param("name"))
        return no_content()

    async def find_image(self, context: RequestContext) -> Response:
        with self._drain_gate.admit():
            name = await self._images.find_by_key(
                self._action_service.namespace(context.caller), context.path_param("key")
            )
        return json_response(ImageReply(name=name))

    async def tag_image(self, context: RequestContext) -> Response:
        request = await self._read_json(context, ImageKeyRequest)
        with self._drain_gate.admit():
            await self._images.tag(
                self._action_service.namespace(context.caller), context.path_param("key"), request.name
            )
        return no_content()

    # ---- services and quotas ----

    async def services(self, context: RequestContext) -> Response:
        return json_response(ServicesReply(services=self._visibility.services()))

    async def quotas(self, context: RequestContext) -> Response:
        return json_response(QuotasReply(quotas=self._action_service.quotas()))

    async def set_quota(self, context: RequestContext) -> Response:
        context.require_admin()
        request = await self._read_json(context, Quota)
        self._action_service.set_quota(request)
        log.info("quota set quota=%s", request.name)
        return no_content()

    async def report_upstream_response(self, context: RequestContext) -> Response:
        request = await self._read_json(context, UpstreamResponse)
        self._action_service.report_upstream_response(
            context.caller, context.path_param("name"), request.status, request.headers, request.action, time.time()
        )
        return no_content()

    # ---- runs, pools and nodes ----

    async def runs(self, context: RequestContext) -> Response:
        context.require_admin()
        return json_response(RunsReply(runs=self._runs.replies()))

    async def make_run(self, context: RequestContext) -> Response:
        context.require_admin()
        request = await self._read_json(context, RunRequest)
        with self._drain_gate.admit():
            created = await self._runs.create(context.path_param("name"), request)
            log.info("run made run=%s weight=%g", created.name, created.weight)
            self._action_service.set_weight(created.name, created.weight)
            self._action_service.set_caps(created.name, created.caps)
        return json_response(created, 201)

    async def change_run(self, context: RequestContext) -> Response:
        context.require_admin()
        request = await self._read_json(context, RunRequest)
        changed = await self._runs.change(context.path_param("name"), request)
        log.info("run changed run=%s weight=%g", changed.name, changed.weight)
        self._action_service.set_weight(changed.name, changed.weight)
        self._action_service.set_caps(changed.name, changed.caps)
        return json_response(changed)

    async def revoke_run(self, context: RequestContext) -> Response:
        context.require_admin()
        name = context.path_param("name")
        with self._drain_gate.admit():
            async with self._runs.revoking(name):
                await self._action_service.end_run(name)
                self._visibility.hide_run(name)
        log.info("run revoked run=%s", name)
        return no_content()

    async def renew_token(self, context: RequestContext) -> Response:
        context.require_admin()
        renewed = await self._runs.renew_token(context.path_param("name"))
        log.info("token renewed run=%s", renewed.name)
        return json_response(renewed)

    async def set_weight(self, context: RequestContext) -> Response:
        context.require_admin()
        request = await self._read_json(context, WeightRequest)
        self._action_service.set_weight(require_name("run", context.path_param("run")), request.weight)
        return no_content()

    async def resize_pool(self, context: RequestContext) -> Response:
        context.require_admin()
        request = await self._read_json(context, PoolRequest)
        self._action_service.orchestrator.send(
            PoolChanged(pool=self._visibility.resized_pool(context.path_param("name"), request.total))
        )
        log.info("pool resized pool=%s total=%d", context.path_param("name"), request.total)
        return json_response(self._visibility.view(context.caller))

    async def change_node(self, context: RequestContext) -> Response:
        context.require_admin()
        request = await self._read_json(context, NodeRequest)
        if not self._visibility.has_node(context.path_param("name")):
            raise NotFound("node", context.path_param("name"))
        self._action_service.orchestrator.send(
            NodeChanged(node=context.path_param("name"), state=NodeState(request.state))
        )
        log.info("node changed node=%s state=%s", context.path_param("name"), request.state)
        return json_response(self._visibility.view(context.caller))

    # ---- views ----

    async def view(self, context: RequestContext) -> Response:
        return json_response(self._visibility.view(context.caller))

    async def timeline(self, context: RequestContext) -> Response:
        after = context.query_int("after", 0, SAFE_INTEGER_MAX)
        limit = context.query_int("limit", TIMELINE_ROWS_PER_PAGE, 1 << 20)
        return json_response(self._visibility.timeline(after, min(limit, TIMELINE_ROWS_PER_PAGE), context.caller))

    async def timeline_trace_events(self, context: RequestContext) -> Response:
        async with self._encode_lock:
            rows = self._visibility.timeline_rows(context.caller)
            content = await asyncio.to_thread(lambda: trace_of_rows(rows).encode())
        return Response(content, media_type=OCTET_STREAM)

    async def pool_usage(self, context: RequestContext) -> Response:
        return json_response(self._visibility.pool_usage(context.caller))

    async def trace(self, context: RequestContext) -> Response:
        context.require_admin()
        file, size = self._visibility.open_trace()
        resources = AsyncExitStack()
        resources.enter_context(file)
        return OpenFileResponse(file, size, resources)

    async def metrics(self, context: RequestContext) -> Response:
        context.require_admin()
        return Response(self._visibility.metrics(), media_type="text/plain; version=0.0.4")

    async def healthz(self, context: RequestContext) -> Response:
        return Response("alive\n", media_type="text/plain")

    async def readyz(self, context: RequestContext) -> Response:
        ready = not self._drain_gate.is_draining
        return Response("ready\n" if ready else "draining\n", 200 if ready else 503, media_type="text/plain")


def _without_upload_path(error: TangramError, path: str) -> TangramError:
    """Hides where the server stores files from the message of a manager."""
    error_record = error_record_of(error)
    texts = {
        field: getattr(error_record, field).replace(repr(path), "the upload").replace(path, "the upload")
        for field in ("message", "value", "expected")
    }
    return msgspec.structs.replace(error_record, **texts).to_exception()


def _copy(file: BinaryIO, named: Any) -> None:
    shutil.copyfileobj(file, named)
    named.flush()


BYTES_MAX = QueryParam(
    "bytes_max",
    {"type": "integer", "minimum": 0},
    f"refuse larger content; at most {FILE_BYTES_MAX >> 20} MiB for a file, limits.file_bytes_max for a tree",
)
FILE_MODE = QueryParam(
    "mode",
    {"type": "string", "pattern": "^[0-7]{3,4}$", "default": f"{FILE_MODE_DEFAULT:04o}"},
    "permissions of the file, in octal",
)
LIMIT = QueryParam(
    "limit",
    {"type": "integer", "minimum": 0, "maximum": 1 << 20, "default": TIMELINE_ROWS_PER_PAGE},
    "maximum number of rows",
)

ROUTES = (
    # Most frequent first: routes are matched in this order.
    Route(
        "POST",
        "/v1/actions",
        RouteHandlers.submit,
        "submit",
        "Submit an action, and wait for it",
        Submission,
        ActionReply,
        (WAIT,),
        other_statuses=(202,),
    ),
    Route(
        "POST",
        "/v1/acknowledge",
        RouteHandlers.acknowledge,
        "acknowledge",
        "Acknowledge results",
        Acknowledgement,
        status=204,
    ),
    Route(
        "GET",
        "/v1/actions/{id}",
        RouteHandlers.get_action,
        "look",
        "Get an action, or wait for it",
        None,
        ActionReply,
        (WAIT, UNTIL),
    ),
    Route(
        "GET",
        "/v1/actions/{id}/output",
        RouteHandlers.output,
        "output",
        "Follow the output of an action, as JSON lines",
        None,
        OutputChunk,
        (AFTER,),
    ),
    Route("POST", "/v1/actions/{id}/cancel", RouteHandlers.cancel, "cancel", "Cancel an action", status=204),
    Route(
        "POST",
        "/v1/actions/{id}/release",
        RouteHandlers.release_quota,
        "let_go",
        "Release the quota that an action holds",
        QuotaRelease,
        status=204,
    ),
    Route(
        "GET",
        "/v1/actions/{id:path}/story",
        RouteHandlers.story,
        "story",
        "Get the story of an action, line by line",
        None,
        Story,
    ),
    Route("GET", "/v1/sandboxes", RouteHandlers.sandboxes, "sandboxes", "List open sandboxes", None, SandboxesReply),
    Route("GET", "/v1/sandboxes/{name}", RouteHandlers.sandbox, "sandbox", "Get a sandbox", None, SandboxReply),
    Route(
        "DELETE",
        "/v1/sandboxes/{name}",
        RouteHandlers.discard,
        "discard",
        "Delete a sandbox immediately, with all its processes",
        status=204,
    ),
    Route(
        "GET",
        "/v1/sandboxes/{name}/files",
        RouteHandlers.read_file,
        "read_file",
        "Read a file",
        None,
        bytes,
        (PATH, BYTES_MAX),
    ),
    Route(
        "PUT",
        "/v1/sandboxes/{name}/files",
        RouteHandlers.write_file,
        "write_file",
        "Create or replace a file",
        bytes,
        None,
        (PATH, FILE_MODE),
        status=204,
    ),
    Route(
        "DELETE",
        "/v1/sandboxes/{name}/files",
        RouteHandlers.delete_file,
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
        RouteHandlers.list_files,
        "list_files",
        "List a directory",
        None,
        DirectoryReply,
        (PATH,),
    ),
    Route(
        "GET",
        "/v1/sandboxes/{name}/tree",
        RouteHandlers.read_tree,
        "read_tree",
        "Download a file or a directory as a tar",
        None,
        bytes,
        (PATH, BYTES_MAX),
    ),
    Route(
        "PUT",
        "/v1/sandboxes/{name}/tree",
        RouteHandlers.write_tree,
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
        RouteHandlers.add_image,
        "add_image",
        "Create an image from a tar of `docker save` or OCI",
        bytes,
        ImageReply,
    ),
    Route("DELETE", "/v1/images/{name}", RouteHandlers.forget_image, "forget_image", "Remove an image", status=204),
    Route(
        "GET",
        "/v1/image-keys/{key}",
        RouteHandlers.find_image,
        "find_image",
        "Get the image stored under a key",
        None,
        ImageReply,
    ),
    Route(
        "PUT",
        "/v1/image-keys/{key}",
        RouteHandlers.tag_image,
        "tag_image",
        "Store an image under a key",
        ImageKeyRequest,
        status=204,
    ),
    Route("GET", "/v1/services", RouteHandlers.services, "services", "List model services", None, ServicesReply),
    Route("GET", "/v1/quotas", RouteHandlers.quotas, "quotas", "List API quotas", None, QuotasReply),
    Route(
        "PUT",
        "/v1/quotas",
        RouteHandlers.set_quota,
        "set_quota",
        "Add a quota, or change one (admin)",
        Quota,
        status=204,
    ),
    Route(
        "POST",
        "/v1/quotas/{name}/responses",
        RouteHandlers.report_upstream_response,
        "report_upstream_response",
        "Report the response of an API about its limits",
        UpstreamResponse,
        status=204,
    ),
    Route(
        "GET",
        "/v1/about",
        RouteHandlers.about,
        "about",
        "Get the service and the identity of the caller",
        None,
        ServerInfo,
    ),
    Route(
        "GET", "/v1/view", RouteHandlers.view, "view", "Get the current pools, queue, runs and sandboxes", None, View
    ),
    Route(
        "GET",
        "/v1/timeline",
        RouteHandlers.timeline,
        "timeline",
        "List settled actions",
        None,
        TimelineView,
        (AFTER, LIMIT),
    ),
    Route(
        "GET",
        "/v1/timeline/trace-events",
        RouteHandlers.timeline_trace_events,
        "timeline_trace_events",
        "Download settled actions as a Chrome trace (JSON), for https://ui.perfetto.dev",
        None,
        bytes,
    ),
    Route(
        "GET",
        "/v1/pool-usage",
        RouteHandlers.pool_usage,
        "pool_usage",
        "Get the use of pools since the service started",
        None,
        PoolUsageView,
    ),
    Route("GET", "/v1/runs", RouteHandlers.runs, "runs", "List runs that have a token (admin)", None, RunsReply),
    Route(
        "POST",
        "/v1/runs/{name}",
        RouteHandlers.make_run,
        "make_run",
        "Create a run; its token is returned once (admin)",
        RunRequest,
        RunReply,
        status=201,
    ),
    Route(
        "POST",
        "/v1/runs/{name}/token",
        RouteHandlers.renew_token,
        "renew_token",
        "Replace the token of a run; the old one is invalid (admin)",
        None,
        RunReply,
    ),
    Route(
        "PATCH",
        "/v1/runs/{name}",
        RouteHandlers.change_run,
        "change_run",
        "Change the weight and caps of a run (admin)",
        RunRequest,
        RunReply,
    ),
    Route(
        "DELETE",
        "/v1/runs/{name}",
        RouteHandlers.revoke_run,
        "revoke_run",
        "Revoke the token of a run and remove all its objects (admin)",
        status=204,
    ),
    Route(
        "PUT",
        "/v1/weights/{run}",
        RouteHandlers.set_weight,
        "weigh",
        "Change the weight of a run (admin)",
        WeightRequest,
        status=204,
    ),
    Route(
        "PATCH",
        "/v1/pools/{name}",
        RouteHandlers.resize_pool,
        "resize_pool",
        "Change the size of a pool (admin)",
        PoolRequest,
        View,
    ),
    Route(
        "PATCH",
        "/v1/nodes/{name}",
        RouteHandlers.change_node,
        "change_node",
        "Drain or undrain a node (admin)",
        NodeRequest,
        View,
    ),
    Route(
        "GET",
        "/v1/trace",
        RouteHandlers.trace,
        "trace",
        "Download the trace, for `tangram sim` and `tangram plan` (admin)",
        None,
        bytes,
    ),
    Route("GET", "/metrics", RouteHandlers.metrics, "metrics", "Metrics for Prometheus (admin)", None, str),
    Route(
        "GET",
        "/healthz",
        RouteHandlers.healthz,
        "is_alive",
        "Liveness: the process responds",
        None,
        str,
        is_public=True,
    ),
    Route(
        "GET",
        "/readyz",
        RouteHandlers.readyz,
        "is_ready",
        "Readiness: the service accepts actions",
        None,
        str,
        is_public=True,
        other_statuses=(503,),
    ),
)
