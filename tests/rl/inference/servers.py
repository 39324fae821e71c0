"""Small servers with the protocols of vLLM and SGLang, on loopback, with configurable faults.

Each writes a token every TOKEN_S, drawn by its position, and remembers what it was asked.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

TOKEN_S = 0.01
VOCABULARY = 100
FAULTS = (
    "text", "no logprobs", "wrong counts", "wrong ids", "truncated", "dropped", "no end", "silent", "too many",
    "not json", "positive", "after the end", "null", "error inside", "aborted", "other tokens",
)  # fmt: skip


class ModelServer:
    """`calls` are the received requests, `inside` those in progress."""

    def __init__(self, server_kind: str, *, control: bool = True, scaled: bool = True) -> None:
        self.server_kind = server_kind
        self.control = control
        """Whether it takes weights."""
        self.scaled = scaled
        """Whether its log-probabilities are those after the temperature."""
        self.vocabulary = VOCABULARY
        self.calls: list[tuple[str, Any]] = []
        self.fault = ""
        self.fault_after = 2
        """Tokens that are written before."""
        self.status = 200
        self.unlucky: int | None = None
        """How often it answers with that status; None: always."""
        self.words = "as you like"
        self.busy = 0
        """How often it is busy; -1: always."""
        self.places: int | None = None
        """Requests that it takes at once; None: all."""
        self.turned_away = 0
        self.retry_after = ""
        """What it says then."""
        self.inside = self.inside_most = 0
        self.hung_up = 0
        self.aborted: list[str] = []
        self.weights = "none"
        self.refuse_weights = False
        self.refuse_reset = False
        self.stop_token: int | None = None
        self.hides_stop = False
        self.done = b"data: [DONE]\n\n"
        """How it ends a stream."""
        self.running = asyncio.Event()
        self.running.set()
        self._abort_by_id: dict[str, asyncio.Event] = {}
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> ModelServer:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        self.running.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # ---- what it answers ----

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.calls.append((request.path_qs, body))
        if request.path in ("/v1/completions", "/generate"):
            return await self._write(request, body)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "tiny"}]})
        if not self.control:
            return web.json_response({"detail": "Not Found"}, status=404)
        match request.path:
            case "/pause" | "/pause_generation":
                self.running.clear()
            case "/resume" | "/continue_generation":
                self.running.set()
            case "/collective_rpc":
                if self.refuse_weights:
                    return web.Response(status=500, text="no such file")
                self.weights = body["kwargs"]["weights_path"]
            case "/update_weights_from_disk":
                if self.refuse_weights:
                    return web.json_response({"success": False, "message": "no such file"}, status=400)
                self.weights = body["model_path"]
                self.version = body["weight_version"]
            case "/reset_prefix_cache":
                return web.Response(status=500 if self.refuse_reset else 200)
            case "/abort_request":
                self.aborted.append(body["rid"])
                if body["rid"] in self._abort_by_id:
                    self._abort_by_id[body["rid"]].set()
            case _:
                return web.Response(status=404)
        return web.json_response({"success": True, "message": "done"})

    async def _write(self, request: web.Request, body: Any) -> web.StreamResponse:
        if self.busy or (self.places is not None and self.inside >= self.places):
            self.busy -= self.busy > 0
            self.turned_away += 1
            headers = {"Retry-After": self.retry_after} if self.retry_after else {}
            return web.Response(status=429, text="later", headers=headers)
        if self.status != 200 and self.unlucky != 0:
            self.unlucky = self.unlucky - 1 if self.unlucky is not None else None
            return web.Response(status=self.status, text=self.words)
        self.inside += 1
        self.inside_most = max(self.inside, self.inside_most)
        try:
            if request.path == "/generate":
                return await self._generate(request, body)
            return await self._complete(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.hung_up += 1
            raise
        finally:
            self.inside -= 1

    def token(self, position: int) -> int:
        return 5 + position * 7 % (self.vocabulary - 5)

    def _logprob(self, temperature: float) -> float:
        return -1.25 / temperature if self.scaled and temperature else -1.25

    async def _pace(self) -> None:
        await self.running.wait()
        await asyncio.sleep(TOKEN_S)

    async def _complete(self, request: web.Request, body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def say(choice: dict[str, Any] | None, **more: Any) -> None:
            content = {"id": "x", "model": "tiny", "choices": [] if choice is None else [choice]} | more
            await response.write(b"data: " + json.dumps(content).encode() + b"\n\n")

        logprob = self._logprob(body["temperature"])
        first, limit = len(body["prompt"]), body["max_tokens"]
        for number in range(limit):
            await self._pace()
            broken = await self._misbehave(request, response, number, limit)
            if broken:
                return response
            token = self.token(first + number)
            finish = "length" if number == limit - 1 else None
            if number + 1 == self.stop_token:
                token, finish = body["stop_token_ids"][0], "stop"
            choice: dict[str, Any] = {
                "index": 0,
                "text": f"<{token}>",
                "token_ids": [] if finish == "stop" and self.hides_stop else [token],
                "logprobs": {"tokens": ["?"], "token_logprobs": [logprob]},
                "finish_reason": finish,
            }
            if not choice["token_ids"]:
                choice["logprobs"]["token_logprobs"] = []
            self._spoil(choice, number)
            await say(choice)
            if finish == "stop":
                break
        if self.fault == "after the end":
            await say({"index": 0, "text": "!", "token_ids": [9], "logprobs": {"token_logprobs": [-1.0]}})
        if self.fault == "too many":
            for _ in range(3):
                choice = {"index": 0, "text": "!", "token_ids": [9], "logprobs": {"token_logprobs": [-1.0]}}
                await say(choice | {"finish_reason": None})
        usage = {"prompt_tokens": first, "prompt_tokens_details": {"cached_tokens": first // 2}}
        await say(None, usage=usage)
        await response.write(self.done)
        return response

    def _spoil(self, choice: dict[str, Any], number: int) -> None:
        if number < self.fault_after and self.fault not in ("text", "no logprobs"):
            return
        match self.fault:
            case "text":
                del choice["token_ids"]
            case "no logprobs":
                choice["logprobs"] = None
            case "wrong counts":
                choice["logprobs"]["token_logprobs"] = [-1.0, -2.0]
            case "wrong ids":
                choice["token_ids"] = ["7"]
            case "positive":
                choice["logprobs"]["token_logprobs"] = [0.5]
            case "null":
                choice["logprobs"]["token_logprobs"] = [None]
            case "aborted":
                choice["finish_reason"] = self.words
            case "too many" | "after the end" | "" | _:
                pass

    async def _misbehave(self, request: web.Request, response: web.StreamResponse, number: int, limit: int) -> bool:
        if self.fault == "too many" and number == limit - 1:
            return False
        if number < self.fault_after:
            return False
        match self.fault:
            case "truncated":
                await response.write(b'data: {"choices": [{"index": 0, "tok')
                return True
            case "not json":
                await response.write(b"data: <html>busy</html>\n\n")
                return True
            case "error inside":
                await response.write(b'data: {"error": {"message": "EngineDeadError", "code": 500}}\n\n')
                return True
            case "no end":
                return True
            case "dropped":
                assert isinstance(request.transport, asyncio.WriteTransport)
                request.transport.abort()
                return True
            case "silent":
                await asyncio.sleep(3600.0)
        return False

    async def _generate(self, request: web.Request, body: Any) -> web.StreamResponse:
        aborted = self._abort_by_id[body["rid"]] = asyncio.Event()
        sampling = body["sampling_params"]
        first, limit = len(body["input_ids"]), sampling["max_new_tokens"]
        ids: list[Any] = []
        finish: dict[str, Any] = {"type": "length", "length": limit}
        for number in range(limit):
            await self._pace()
            if aborted.is_set():
                finish = {"type": "abort"}
                break
            if self.fault == "silent" and number == self.fault_after:
                await asyncio.sleep(3600.0)
            if self.fault == "dropped" and number == self.fault_after:
                request.transport.abort()  # type: ignore[union-attr]
                return web.Response()
            ids.append(self.token(first + number))
        del self._abort_by_id[body["rid"]]
        logprobs = [[self._logprob(sampling["temperature"]), token, None] for token in ids]
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "output_token_logprobs": logprobs,
            "prompt_tokens": first,
            "cached_tokens": first // 2,
            "weight_version": getattr(self, "version", "default"),
        }
        answer: dict[str, Any] = {"text": "...", "output_ids": ids, "meta_info": meta}
        match self.fault:
            case "text":
                del answer["output_ids"], meta["output_token_logprobs"]
            case "no logprobs":
                del meta["output_token_logprobs"]
            case "wrong counts":
                meta["output_token_logprobs"] = logprobs[1:]
            case "other tokens":
                logprobs[0][1] += 1
            case "wrong ids":
                answer["output_ids"] = [*ids[:-1], "7"]
            case "positive":
                logprobs[0][0] = 0.5
            case "null":
                logprobs[0][0] = None
            case "aborted":
                meta["finish_reason"] = {"type": self.words}
            case "too many":
                extra = [[-1.0, 9, None]]
                answer["output_ids"], meta["output_token_logprobs"] = [*ids, 9], logprobs + extra
            case "truncated":
                return web.Response(text=json.dumps(answer)[:-20], content_type="application/json")
            case "not json":
                return web.Response(text="<html>busy</html>")
            case "error inside":
                return web.json_response({"error": {"message": "dead"}})
        return web.json_response(answer)
