"""Engines that are external servers with an OpenAI-compatible API, such as vLLM and SGLang.

Owns connections, never a server, which has to run already. Input and output are tokens: a response with text alone is
rejected, because tokens are never recomputed from text.

At its start the server keeps its weights, which are labelled as the first version. Only `update` changes them, to
folders in the format of Hugging Face (config.json and *.safetensors, as rl/model/model_folder.py saves them), which the
server must find under the same path. Weights of rl/model/weight_store.py are refused, and the server keeps its own.
After the first update, each start sends the current weights again: the server may have restarted meanwhile.

Its output can be trained on only if the server returns ids and log-probabilities of the sampled distribution, and
accepts weights; otherwise it serves evaluation, and `shortcoming` has the reason. An engine whose output was trained on
does not start if that is no longer possible, because its output would silently come from other weights.

The API depends on the kind of server:

    vllm     /v1/completions with `return_token_ids`, streamed, so that partial output survives the server. Weights:
             /pause?mode=keep, /collective_rpc reload_weights, /reset_prefix_cache, /resume, which it has with
             VLLM_SERVER_DEV_MODE=1. Log-probabilities after the temperature: --logprobs-mode processed_logprobs.
    sglang   /generate, not streamed: partial output is lost with the server. Weights: /pause_generation,
             /update_weights_from_disk, /continue_generation. A request is aborted by /abort_request.
    plain    /v1/completions like vllm, without weight updates: the server keeps its own. Evaluation only.

A server gets at most `slots` concurrent requests. One that cannot be reached, closes a connection, sends nothing for
`silent_s_max` or sends malformed responses counts as dead (EngineDied); `start` checks whether it is back. A busy
server (BUSY) is retried, after Retry-After if it sends that, and counts as dead only if it accepts no request for
`silent_s_max`. A failing one (5xx) is retried TRIES times; if the same request fails each time and a probe succeeds,
the request counts as rejected (RequestRefused). Tested against a small server that implements each kind, not against
vLLM and SGLang on real devices.

Sessions are independent: a request that waits while the engine is closed gets EngineDied, even if the engine has been
started again meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tangram.errors import InvalidConfig, InvalidInput, ManagerError
from tangram.managers.http import ConnectFailed, Disconnected, HttpClient, HttpError, InvalidUrl, backoff_s
from tangram.managers.quotas.adaptive_rate import OVERLOADED, TOO_MANY, UNAVAILABLE, parse_rate_limit
from tangram.rl.config.rollout_settings import EngineSettings, ServerKind
from tangram.rl.inference.engines.http_session import RESPONSE_BYTES_MAX, HttpSession, HttpSessionClosed
from tangram.rl.inference.engines.protocol import (
    EngineDied,
    EngineStatistics,
    Generation,
    GenerationRequest,
    PolicyWeights,
    RequestRefused,
    Sampling,
    SamplingSeed,
    ServerOverloaded,
    ServerUnreachable,
)
from tangram.rl.inference.engines.server_adapters import (
    LOGPROB_TOLERANCE,
    SERVER_ADAPTERS,
    SHOWN_CHARACTERS,
    ControlCalls,
    TextOnlyResponse,
)
from tangram.rl.inference.engines.stream_assembler import NoLogprobs, StreamAssembler, UnexpectedFinish

CONTROL_S_MAX = 600.0
"""Time limit of a call that generates nothing: reading the weights of a large model takes minutes."""
PROBE_S_MAX, PROBE_BUSY_S_MAX = 60.0, 30.0
"""Time limit of a probe for one token, and how long the server may be busy meanwhile."""
ABORT_S_MAX = 5.0
"""Time limit of an abort: the request ends by itself at its limit anyway."""
BUSY = (408, 425, TOO_MANY, UNAVAILABLE, OVERLOADED)
"""Statuses that do not concern the request, which may be accepted later."""
RETRY_AFTER_S_MAX = 60.0
"""Limit of Retry-After: a wrong or hostile value must not stop a run."""
FAILED = 500
"""From this status on, a failure of the server, which may be transient."""
TRIES = 5
PAUSE_S, PAUSE_S_MAX = 0.5, 8.0
"""Exponential backoff between tries."""
MISCONFIGURED = (401, 403, 404, 405, 407)
"""Statuses of a wrong set-up: the address, the name of the model, a key."""
ABOUT_LENGTH = re.compile(r"context|length|too long|too many tokens|maximum", re.IGNORECASE)
"""Matches error messages for a request that is too long."""
MISSING = (404, 405, 501)
"""Statuses of a server without such a call."""
PROBE = (1, 2, 3)
"""Ids that every vocabulary has."""
SEED_BITS = 63
"""Fits into a signed integer of 64 bits."""


PROBE_TRIES = 32
"""Samples until a token repeats, which is then one of the likely ones."""
PARSE_ERRORS = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, msgspec.DecodeError)
"""Errors of parsing a malformed response."""
TEXT_ONLY = (
    "answered text without the ids of its tokens, which cannot be used: text that is tokenised again gives other "
    "tokens than were sampled; use a server that takes return_token_ids, as vLLM from 0.10.2 on does"
)
CLOSED = "it was closed meanwhile"
OWN_WEIGHTS = "it serves weights of its own until it has taken an update"


class OpenAIEngine:
    """`number` fills `{number}` in the address, so that one table describes several servers. `temperature` is that of
    training: a server that returns log-probabilities of another temperature cannot train."""

    def __init__(
        self,
        settings: EngineSettings,
        number: int = 0,
        *,
        server: ServerKind = "vllm",
        model: str = "",
        key: str = "",
        temperature: float = 1.0,
        vocabulary: int | None = None,
    ) -> None:
        """`vocabulary`: size of the vocabulary; None: unknown, every id is accepted."""
        if server not in SERVER_ADAPTERS:
            raise InvalidConfig("server", server, f"one of {', '.join(SERVER_ADAPTERS)}")
        self.name = settings.engine_name(number)
        self.hardware = settings.hardware
        self.output_is_trainable = False
        self.shortcoming = "it was not started"
        """The reason why its output cannot be trained on; empty if it can."""
        self._adapter = SERVER_ADAPTERS[server]
        self.url = settings.url.replace("{number}", str(number)).rstrip("/")
        """Address of the server, without a trailing slash."""
        self._model = model
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._temperature = temperature
        self._vocabulary = vocabulary
        self._silent_s_max = settings.silent_s_max
        self._slots = asyncio.Semaphore(settings.slots)
        self._http = HttpClient()
        self._session: HttpSession | None = None
        self._last_output_at = -math.inf
        """When the server last sent output."""
        self._alive = False
        self._takes_weights = False
        self._has_taken_weights = False
        """Whether it has taken weights, since this start or before."""
        self._has_trained = False
        """Whether its output could be trained on, since this start or before."""
        self._untrainable_reason = ""
        """The reason why its output cannot be trained on, independent of its weights."""
        self._tells_logprobs = False
        self._suspended_at: float | None = None
        self._resumed_at = -math.inf
        self._version = 0
        self._requests = 0
        self._active = 0
        """The requests that have a slot."""
        self._statistics = EngineStatistics(name=self.name)

    # ---- lifecycle ----

    async def start(self, weights: PolicyWeights) -> None:
        self._alive = False
        self._suspended_at = None
        try:
            await self._connect(weights)
        except BaseException:
            await self.close()
            raise

    async def _connect(self, weights: PolicyWeights) -> None:
        if self._session is None:
            self._session = HttpSession(
                self.url, self._headers, silent_s_max=self._silent_s_max, is_response_due=self._is_response_due
            )
        if not self._model and self._adapter.path.startswith("/v1/"):
            self._model = await self._first_model()
        missing = await self._missing_control()
        self._takes_weights = not missing
        self._version = weights.version
        self._alive = True
        try:
            unfit = await self._probe()
        except (EngineDied, HttpSessionClosed) as error:
            raise ManagerError(str(error)) from error
        self._untrainable_reason = "; ".join(filter(None, (missing, unfit)))
        if self._has_taken_weights:
            if missing:
                raise ManagerError(f"engine {self.name}: it had taken weights, and now {missing}")
            await self._load(weights)
        self._assess()
        if self._has_trained and not self.output_is_trainable:
            raise ManagerError(f"engine {self.name}: its output was trained on, and now {self.shortcoming}")

    async def _missing_control(self) -> str:
        """Returns why it takes no weights; empty if it does. Resumes the server, which may have been left suspended."""
        if self._adapter.update is None:
            return "this kind of server takes no weights"
        try:
            await self._post_all(self._adapter.resume)
        except _CallMissing as error:
            return f"it takes no weights ({error}): {self._adapter.hint}"
        return ""

    def _assess(self) -> None:
        weights_reason = OWN_WEIGHTS if self._takes_weights and not self._has_taken_weights else ""
        self.shortcoming = "; ".join(filter(None, (self._untrainable_reason, weights_reason)))
        self.output_is_trainable = not self.shortcoming
        self._has_trained = self._has_trained or self.output_is_trainable

    async def fetch(self, weights: PolicyWeights) -> None:
        """Does nothing: a server reads weights when it takes them."""

    async def suspend(self) -> None:
        self._require_alive()
        self._suspended_at = time.monotonic()
        if self._takes_weights:
            await self._control(self._adapter.suspend)

    async def update(self, weights: PolicyWeights) -> None:
        """A server that takes no weights keeps its own; `shortcoming` has the reason."""
        self._require_alive()
        began_at = time.monotonic()
        if self._takes_weights:
            await self._push_weights(weights)
        self._version = weights.version
        self._count(update_s=time.monotonic() - began_at)

    async def _push_weights(self, weights: PolicyWeights) -> None:
        """Raises ManagerError if it keeps its old weights, EngineDied if its weights are unknown."""
        assert self._adapter.update is not None
        await asyncio.to_thread(_require_hugging_face, self.name, weights)
        first, *rest = self._adapter.update(weights)
        await self._control((first,))
        self._has_taken_weights = True
        try:
            await self._control(tuple(rest))
        except ManagerError as error:
            raise EngineDied(
                self.name, f"it applied version {weights.version}, but failed afterwards: {error}", None
            ) from error
        self._assess()

    async def resume(self) -> None:
        self._require_alive()
        if self._takes_weights:
            await self._control(self._adapter.resume)
        self._resumed_at = time.monotonic()
        if self._suspended_at is not None:
            self._count(suspended_s=self._resumed_at - self._suspended_at)
        self._suspended_at = None

    async def close(self) -> None:
        """Closes the connections; the server stays."""
        self._alive = False
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        await self._http.close()

    def statistics(self) -> EngineStatistics:
        waiting = self._requests - self._active
        return msgspec.structs.replace(self._statistics, version=self._version, active=self._active, waiting=waiting)

    # ---- generation ----

    async def generate(self, request: GenerationRequest) -> Generation:
        session = self._require_alive()
        if request.sampling.keep_ids and request.sampling.truncates_distribution:
            raise InvalidInput(
                "keep_ids", True, "top_k = 0 and top_p = 1: this server does not return the ids that it kept"
            )
        assembler = StreamAssembler(self.name, request, vocabulary=self._vocabulary)
        self._requests += 1
        try:
            async with self._slots:
                await self._generate_with_retries(session, request, assembler)
        except HttpSessionClosed as error:  # while it waited for a slot, so the request did not cause it
            raise ServerUnreachable(self.name, CLOSED, assembler.partial()) from error
        except EngineDied:
            if session is self._session:
                self._alive = False
            raise
        finally:
            self._requests -= 1
        generation = assembler.generation()
        self._count(prefill_tokens=generation.prefilled, decode_tokens=len(generation.tokens), steps=1)
        self._count(prefill_s=generation.prefill_s, decode_s=generation.decode_s)
        return generation

    async def _generate_with_retries(
        self, session: HttpSession, request: GenerationRequest, assembler: StreamAssembler
    ) -> None:
        """Retries while the server fails. Raises EngineDied, RequestRefused and HttpSessionClosed."""
        self._active += 1
        try:
            for tried in range(1, TRIES + 1):
                try:
                    await self._generate_when_admitted(session, request, assembler, self._silent_s_max)
                    return
                except _ServerFailed as failure:
                    if tried == TRIES:
                        raise await self._final_error(session, failure) from failure
                    await session.pause(backoff_s(tried, PAUSE_S, PAUSE_S_MAX))
        except asyncio.CancelledError:
            await self._abort(request)
            raise
        finally:
            self._active -= 1

    async def _generate_when_admitted(
        self, session: HttpSession, request: GenerationRequest, assembler: StreamAssembler, busy_s_max: float
    ) -> None:
        """Retries while the server is busy. Raises _ServerFailed, EngineDied, RequestRefused and HttpSessionClosed."""
        began_at, tried = time.monotonic(), 0
        while True:
            session.require_open()
            try:
                await self._generate_once(session, request, assembler)
                return
            except _ServerBusy as busy:
                tried = min(tried + 1, TRIES)
                if self._is_response_due() and time.monotonic() - max(began_at, self._last_output_at) >= busy_s_max:
                    reason = f"{self.url} accepted no request for {busy_s_max:g} s: {busy}"
                    raise ServerOverloaded(self.name, reason, None) from busy
                await session.pause(busy.wait_s + backoff_s(tried, PAUSE_S, PAUSE_S_MAX))

    async def _final_error(self, session: HttpSession, last: _ServerFailed) -> EngineDied | RequestRefused:
        """The error of a request that failed in every try. Raises HttpSessionClosed."""
        try:
            await asyncio.wait_for(self._generate_probe(session, 1.0), PROBE_S_MAX)
        except (ManagerError, TimeoutError):
            return EngineDied(self.name, f"{self.url} failed {TRIES} times and then a probe: {last}", None)
        return RequestRefused(self.name, f"{self.url} failed this request {TRIES} times and serves others: {last}")

    async def _generate_once(
        self, session: HttpSession, request: GenerationRequest, assembler: StreamAssembler
    ) -> None:
        """Raises EngineDied with the partial output, RequestRefused, _ServerBusy and _ServerFailed."""
        body = self._adapter.body(self._model, request, seed_of(request.noise, len(request.tokens)))
        assembler.begin()
        try:
            async with session.post(self._adapter.path, body) as response:
                if response.status != 200:
                    text = (await response.read_up_to(SHOWN_CHARACTERS)).decode(errors="replace")
                    self._raise_for_status(response.status, text, response.headers)
                async for part in session.response_parts(response, streams=self._adapter.streams):
                    self._last_output_at = time.monotonic()
                    assembler.add(self._adapter.parse(part), self._version, logprobs=self._tells_logprobs)
                assembler.require_stop()
        except HttpSessionClosed as error:
            raise EngineDied(self.name, CLOSED, assembler.partial()) from error
        except UnexpectedFinish as error:
            raise RequestRefused(self.name, f"{self.url} {error}") from error
        except (ConnectFailed, Disconnected) as error:
            kind = ServerUnreachable if isinstance(error, ConnectFailed) else EngineDied
            raise kind(self.name, f"{self.url} cannot be reached: {error.reason}", assembler.partial()) from error
        except TextOnlyResponse as error:
            raise EngineDied(self.name, f"{self.url} {TEXT_ONLY}", assembler.partial()) from error
        except TimeoutError as error:
            reason = f"{self.url} sent nothing for {self._silent_s_max:g} s"
            raise EngineDied(self.name, reason, assembler.partial()) from error
        except (HttpError, InvalidUrl, OSError) as error:
            reason = f"{self.url} broke off: {error}"
            raise EngineDied(self.name, reason, assembler.partial()) from error
        except PARSE_ERRORS as error:
            reason = f"{self.url} sent a malformed response: {type(error).__name__}: {str(error)[:SHOWN_CHARACTERS]}"
            raise EngineDied(self.name, reason, assembler.partial()) from error
        if assembler.finish is None:
            raise EngineDied(self.name, f"{self.url} ended its response early", assembler.partial())

    def _is_response_due(self) -> bool:
        """Whether a silence of `silent_s_max` is the server's fault; a suspended server sends nothing."""
        return self._suspended_at is None and time.monotonic() >= self._resumed_at + self._silent_s_max

    def _raise_for_status(self, status: int, text: str, headers: Mapping[str, str]) -> None:
        message = f"{status}: {text}"
        if status in BUSY:
            raise _ServerBusy(message, parse_rate_limit(status, headers, time.time()).wait_s or 0.0)
        if status >= FAILED:
            raise _ServerFailed(message)
        if status in MISCONFIGURED:
            reason = f"{self.url}{self._adapter.path} is misconfigured: {message}; check url, model and key"
            raise EngineDied(self.name, reason, None)
        if 400 <= status < FAILED:
            hint = "; lower context_max of [[engines]] to its limit" if ABOUT_LENGTH.search(text) else ""
            raise RequestRefused(self.name, f"{self.url}{self._adapter.path} refused the request: {message}{hint}")
        raise EngineDied(self.name, f"{self.url} answered {message}", None)

    async def _abort(self, request: GenerationRequest) -> None:
        if not self._adapter.abort or not self._alive:
            return
        with contextlib.suppress(ManagerError, asyncio.TimeoutError):
            async with asyncio.timeout(ABORT_S_MAX):
                await self._call("POST", self._adapter.abort, {"rid": request.id}, seconds_max=ABORT_S_MAX)

    # ---- control ----

    async def _first_model(self) -> str:
        response = await self._call("GET", "/v1/models", None)
        try:
            name = response["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            name = None
        if not isinstance(name, str):
            raise ManagerError(f"{self.url}/v1/models names no model: {str(response)[:SHOWN_CHARACTERS]}", retry=False)
        return name

    async def _load(self, weights: PolicyWeights) -> None:
        """Sends the weights on a start that is not the first."""
        await self._control(self._adapter.suspend)
        try:
            await self._push_weights(weights)
        finally:
            await self._control(self._adapter.resume)  # the server outlives the engine and must not stay suspended

    async def _control(self, calls: ControlCalls) -> None:
        try:
            await self._post_all(calls)
        except _CallMissing as error:
            raise ManagerError(f"engine {self.name}: {error}", retry=False) from error

    async def _post_all(self, calls: ControlCalls) -> None:
        for path, body in calls:
            response = await self._call("POST", path, body)
            if isinstance(response, dict) and response.get("success") is False:
                raise ManagerError(f"{self.url}{path} failed: {str(response.get('message'))[:SHOWN_CHARACTERS]}")

    async def _call(self, method: str, path: str, body: Any, *, seconds_max: float = CONTROL_S_MAX) -> Any:
        response = await self._http.request(
            method,
            self.url + path,
            timeout_s=seconds_max,
            bytes_max=RESPONSE_BYTES_MAX,
            headers=self._headers,
            **({"json": body} if body is not None else {}),
        )
        if response.status in MISSING:
            raise _CallMissing(f"{response.status} to {method} {path}")
        if not response.ok:
            raise ManagerError(f"{self.url}{path} answered {response.status}: {response.text[:SHOWN_CHARACTERS]}")
        with contextlib.suppress(ManagerError):
            return response.json()
        return None  # some servers answer control calls with a word or with nothing

    # ---- probing ----

    async def _probe(self) -> str:
        """Returns why its output cannot be trained on; empty if it can. Raises ManagerError if it cannot serve at all,
        and EngineDied."""
        session = self._require_alive()
        self._tells_logprobs = True
        try:
            generation = await asyncio.wait_for(self._generate_probe(session, 1.0), PROBE_S_MAX)
        except NoLogprobs:
            self._tells_logprobs = False
            return "it returns no log-probabilities"
        except TimeoutError as error:
            raise ManagerError(f"{self.url} did not respond to a probe within {PROBE_S_MAX:g} s") from error
        except RequestRefused as error:
            raise ManagerError(f"{self.url} refuses a probe of {len(PROBE)} tokens: {error}", retry=False) from error
        if self._temperature in (0.0, 1.0) or await self._is_scaled(session, generation):
            return ""
        return (
            f"its log-probabilities seem to be those before the temperature, and {self._temperature:g} is trained on: "
            "start vLLM with --logprobs-mode processed_logprobs, or sample at temperature 1"
        )

    async def _is_scaled(self, session: HttpSession, plain: Generation) -> bool:
        """Whether the log-probability of a token depends on the temperature. False if that cannot be determined."""
        for seed in range(PROBE_TRIES):
            warm = await asyncio.wait_for(self._generate_probe(session, self._temperature, seed), PROBE_S_MAX)
            if warm.tokens == plain.tokens:
                return abs(warm.logprobs[0] - plain.logprobs[0]) > LOGPROB_TOLERANCE
        return False

    async def _generate_probe(self, session: HttpSession, temperature: float, seed: int = 0) -> Generation:
        sampling = Sampling(temperature=temperature, tokens_max=1)
        request = GenerationRequest(
            id=f"probe-{self.name}-{time.monotonic_ns()}",
            tokens=PROBE,
            sampling=sampling,
            noise=SamplingSeed(seed=seed),
        )
        assembler = StreamAssembler(self.name, request, vocabulary=self._vocabulary, probing=True)
        try:
            await self._generate_when_admitted(session, request, assembler, PROBE_BUSY_S_MAX)
        except _ServerFailed as failure:
            raise ManagerError(f"{self.url} failed: {failure}") from failure
        if not assembler.generation().tokens:
            raise ManagerError(f"{self.url} generated nothing when one token was requested", retry=False)
        return assembler.generation()

    def _require_alive(self) -> HttpSession:
        if not self._alive or self._session is None:
            raise EngineDied(self.name, f"{self.url} is not connected", None)
        return self._session

    def _count(self, **more: float) -> None:
        current = {name: getattr(self._statistics, name) + value for name, value in more.items()}
        self._statistics = msgspec.structs.replace(self._statistics, **current)


class _ServerBusy(Exception):
    """The server is busy and requests a pause of `wait_s`."""

    def __init__(self, message: str, wait_s: float) -> None:
        self.wait_s = min(wait_s, RETRY_AFTER_S_MAX)
        super().__init__(message)


class _ServerFailed(Exception):
    """The server failed; a retry may succeed."""


class _CallMissing(ManagerError):
    """The server has no such call."""


def seed_of(noise: SamplingSeed, position: int) -> int:
    """The seed of a request whose first token has this position: a continued request samples with other numbers."""
    words = f"{noise.seed}/{noise.member}/{noise.attempt}/{position}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big") >> (64 - SEED_BITS)


def _require_hugging_face(name: str, weights: PolicyWeights) -> None:
    """Raises ManagerError."""
    folder = Path(weights.folder)
    if not (folder / "config.json").is_file() or next(folder.glob("*.safetensors"), None) is None:
        raise ManagerError(
            f"engine {name}: takes Hugging Face folders only, with config.json and *.safetensors, which {folder} is "
            "not; publish with tangram.rl.model.model_folder.save",
            retry=False,
        )
