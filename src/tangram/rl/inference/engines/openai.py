"""Engines that are servers of others: what speaks the OpenAI API, such as vLLM and SGLang.

Owns connections, never a server: it has to run already. Tokens go in and tokens come out: an answer that is text alone
is refused, for what was sampled is never made from text again.

At its start the server keeps the weights that it serves, which count as those of the first version. Only `update` hands
it others, and it takes the folders of Hugging Face alone: config.json and *.safetensors, as
rl/model/model_folder.py saves them, where the server finds them under the same name. Weights as
rl/model/weight_store.py publishes them are refused, and it
keeps its own. Once it has taken weights, it is given those of the order at each further start: it may have been started
anew meanwhile.

What it writes may be trained on only if the server tells ids and log-probabilities of the distribution that it samples
from, and has taken weights; else it serves evaluation, and `shortcoming` says what is missing. One that trained does
not start any more if it cannot now: nobody would notice that it writes with other weights.

What a server is asked differs by its dialect:

    vllm     /v1/completions with `return_token_ids`, streamed, so that what was written survives the server. Weights:
             /pause?mode=keep, /collective_rpc reload_weights, /reset_prefix_cache, /resume, which it has with
             VLLM_SERVER_DEV_MODE=1. Log-probabilities after the temperature: --logprobs-mode processed_logprobs.
    sglang   /generate, whole: what it wrote is lost with it. Weights: /pause_generation, /update_weights_from_disk,
             /continue_generation. A request is aborted by /abort_request.
    plain    /v1/completions as vllm, and no weights: the server keeps its own. Evaluation only.

A server is asked `slots` requests at once. One that cannot be reached, breaks off, says nothing for `silent_s_max` or
says what makes no sense counts as dead (EngineDied): whether it comes back is for `start` to find out. One that has no
place (BUSY) is asked again, later if it says when, and counts as dead only if it has none for anybody for
`silent_s_max`. One that fails (5xx) is asked again TRIES times; if it fails a request each time and still answers a
probe, it lives, and does not take that one (RequestRefused). It is contract-tested: against a small server that speaks
each dialect, not against vLLM and SGLang on real devices.

What is said on one line is never heard on another: whoever waited while the engine was closed gets EngineDied, also if
it has been started again meanwhile.
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
from tangram.managers.http import Http, pause_s
from tangram.managers.quotas.adaptive_rate import OVERLOADED, TOO_MANY, UNAVAILABLE, advice_of
from tangram.rl.config.rollout_settings import Dialect, EngineSettings
from tangram.rl.inference.engines.http_session import ANSWER_BYTES_MAX, Line, LineClosed
from tangram.rl.inference.engines.protocol import (
    EngineDied,
    EngineStatistics,
    Generation,
    Noise,
    Request,
    RequestRefused,
    Sampling,
    Weights,
)
from tangram.rl.inference.engines.server_adapters import DIALECTS, SAME, SHOWN, Calls, TextAlone
from tangram.rl.inference.engines.stream_assembler import Heard, NoLogprobs, OddEnd

CONTROL_S_MAX = 600.0
"""Of a call that does not write tokens: reading the weights of a large model takes minutes."""
PROBE_S_MAX, PROBE_BUSY_S_MAX = 60.0, 30.0
"""Of asking for one token, and of these, how long a server may have no place for it."""
ABORT_S_MAX = 5.0
"""Of telling a server that a request is over: it ends by itself at its limit anyway."""
BUSY = (408, 425, TOO_MANY, UNAVAILABLE, OVERLOADED)
"""It says nothing of the request, which may well be taken a little later."""
RETRY_AFTER_S_MAX = 60.0
"""Of what a busy server asks for: a mistaken or hostile one must not stop a run."""
FAILED = 500
"""From here on, its own failure, which may be over a little later."""
TRIES = 5
PAUSE_S, PAUSE_S_MAX = 0.5, 8.0
"""Before the first further try, doubled before each that follows, less a part by chance."""
SET_UP = (401, 403, 404, 405, 407)
"""The fault of whoever set it up: the address, the name of the model, a key."""
ABOUT_LENGTH = re.compile(r"context|length|too long|too many tokens|maximum", re.IGNORECASE)
"""In what a server says of a request that does not fit."""
MISSING = (404, 405, 501)
"""The server has no such call."""
PROBE = (1, 2, 3)
"""Ids that every vocabulary has."""
SEED_BITS = 63
"""What fits into a signed integer of 64 bits."""


PROBE_TRIES = 32
"""Until the same token comes again: it is one of the likely ones."""
NONSENSE = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, msgspec.DecodeError)
"""What reading an answer raises that is not what it should be."""
TEXT_ALONE = (
    "answered text without the ids of its tokens, which cannot be used: text that is tokenised again gives other "
    "tokens than were sampled; use a server that takes return_token_ids, as vLLM from 0.10.2 on does"
)
CLOSED = "it was closed meanwhile"
ITS_OWN = "it serves weights of its own until it has taken an update"


class Unreachable(EngineDied):
    """The server was not reached: whatever killed it, it was not this request."""


class NoPlace(Unreachable):
    """The server has no place for anybody: nor was it another that is inside."""


class OpenAIEngine:
    """`number` fills `{number}` in the address, so that one table describes several servers. `temperature` is the one
    that will be trained on: a server that tells log-probabilities of another one does not train."""

    def __init__(
        self,
        settings: EngineSettings,
        number: int = 0,
        *,
        dialect: Dialect = "vllm",
        model: str = "",
        key: str = "",
        temperature: float = 1.0,
        vocabulary: int | None = None,
    ) -> None:
        """`vocabulary`: how many tokens the policy knows; None: whatever the server says is taken for one."""
        if dialect not in DIALECTS:
            raise InvalidConfig("dialect", dialect, f"one of {', '.join(DIALECTS)}")
        self.name = settings.name if settings.count == 1 else f"{settings.name}-{number}"
        self.hardware = settings.hardware
        self.trains = False
        self.shortcoming = "it was not started"
        """Why it does not train; empty if it does."""
        self._dialect = DIALECTS[dialect]
        self.url = settings.url.replace("{number}", str(number)).rstrip("/")
        """Of the server, without a slash at the end."""
        self._model = model
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._temperature = temperature
        self._vocabulary = vocabulary
        self._silent_s_max = settings.silent_s_max
        self._slots = asyncio.Semaphore(settings.slots)
        self._http = Http()
        self._line: Line | None = None
        self._heard_s = -math.inf
        """When the server last wrote something for us."""
        self._alive = False
        self._takes_weights = False
        self._has_taken = False
        """Whether it has been given weights, in this life or one before."""
        self._has_trained = False
        """Whether what it wrote could be trained on, in this life or one before."""
        self._unfit = ""
        """Why what it writes cannot be trained on, whoever's weights it has."""
        self._tells_logprobs = False
        self._suspended_at: float | None = None
        self._resumed_at = -math.inf
        self._version = 0
        self._inside = 0
        """Requests, and of these, those that have a slot:"""
        self._active = 0
        self._statistics = EngineStatistics(name=self.name)

    # ---- its life ----

    async def start(self, weights: Weights) -> None:
        self._alive = False
        self._suspended_at = None
        try:
            await self._begin(weights)
        except BaseException:
            await self.close()
            raise

    async def _begin(self, weights: Weights) -> None:
        if self._line is None:
            self._line = Line(self.url, self._headers, silent_s_max=self._silent_s_max, may_speak=self._may_speak)
        if not self._model and self._dialect.path.startswith("/v1/"):
            self._model = await self._first_model()
        missing = await self._no_control()
        self._takes_weights = not missing
        self._version = weights.version
        self._alive = True
        try:
            unfit = await self._probe()
        except (EngineDied, LineClosed) as error:
            raise ManagerError(str(error)) from error
        self._unfit = "; ".join(each for each in (missing, unfit) if each)
        if self._has_taken:
            if missing:
                raise ManagerError(f"engine {self.name}: it had taken weights, and now {missing}")
            await self._load(weights)
        self._assess()
        if self._has_trained and not self.trains:
            raise ManagerError(f"engine {self.name}: what it wrote was trained on, and now {self.shortcoming}")

    async def _no_control(self) -> str:
        """Why it takes no weights; empty if it does. It is asked to go on, which also wakes a server that was left
        suspended by whoever used it before."""
        if self._dialect.update is None:
            return "the dialect takes no weights"
        try:
            await self._calls(self._dialect.resume)
        except _Missing as error:
            return f"it takes no weights ({error}): {self._dialect.hint}"
        return ""

    def _assess(self) -> None:
        its_own = ITS_OWN if self._takes_weights and not self._has_taken else ""
        self.shortcoming = "; ".join(each for each in (self._unfit, its_own) if each)
        self.trains = not self.shortcoming
        self._has_trained = self._has_trained or self.trains

    async def fetch(self, weights: Weights) -> None:
        """A server reads them when it is told to take them."""

    async def suspend(self) -> None:
        self._require_alive()
        self._suspended_at = time.monotonic()
        if self._takes_weights:
            await self._controlled(self._dialect.suspend)

    async def update(self, weights: Weights) -> None:
        """A server that takes no weights keeps its own, and says so in `shortcoming`."""
        self._require_alive()
        began_s = time.monotonic()
        if self._takes_weights:
            await self._hand_over(weights)
        self._version = weights.version
        self._count(update_s=time.monotonic() - began_s)

    async def _hand_over(self, weights: Weights) -> None:
        """Raises ManagerError if it keeps its old weights, EngineDied if nobody knows which ones it has."""
        assert self._dialect.update is not None
        await asyncio.to_thread(_require_hugging_face, self.name, weights)
        first, *rest = self._dialect.update(weights)
        await self._controlled((first,))
        self._has_taken = True
        try:
            await self._controlled(tuple(rest))
        except ManagerError as error:
            raise EngineDied(
                self.name, f"it took version {weights.version}, but not what follows: {error}", None
            ) from error
        self._assess()

    async def resume(self) -> None:
        self._require_alive()
        if self._takes_weights:
            await self._controlled(self._dialect.resume)
        self._resumed_at = time.monotonic()
        if self._suspended_at is not None:
            self._count(suspended_s=self._resumed_at - self._suspended_at)
        self._suspended_at = None

    async def close(self) -> None:
        """Hangs up; the server stays."""
        self._alive = False
        line, self._line = self._line, None
        if line is not None:
            await line.close()
        await self._http.close()

    def statistics(self) -> EngineStatistics:
        waiting = self._inside - self._active
        return msgspec.structs.replace(self._statistics, version=self._version, active=self._active, waiting=waiting)

    # ---- writing ----

    async def generate(self, request: Request) -> Generation:
        line = self._require_alive()
        if request.sampling.keep_ids and request.sampling.leaves_out:
            raise InvalidInput("keep_ids", True, "top_k = 0 and top_p = 1: this server does not tell the ids it left")
        heard = Heard(self.name, request, vocabulary=self._vocabulary)
        self._inside += 1
        try:
            async with self._slots:
                await self._insisted(line, request, heard)
        except LineClosed as error:  # while it waited: whatever killed the engine, it was not this request
            raise Unreachable(self.name, CLOSED, heard.so_far()) from error
        except EngineDied:
            if line is self._line:
                self._alive = False
            raise
        finally:
            self._inside -= 1
        generation = heard.generation()
        self._count(prefill_tokens=generation.prefilled, decode_tokens=len(generation.tokens), steps=1)
        self._count(prefill_s=generation.prefill_s, decode_s=generation.decode_s)
        return generation

    async def _insisted(self, line: Line, request: Request, heard: Heard) -> None:
        """Asked again where the server fails. Raises EngineDied, RequestRefused and LineClosed."""
        self._active += 1
        try:
            for tried in range(1, TRIES + 1):
                try:
                    await self._admitted(line, request, heard, self._silent_s_max)
                    return
                except _Failed as failure:
                    if tried == TRIES:
                        raise await self._given_up(line, failure) from failure
                    await line.pause(pause_s(tried, PAUSE_S, PAUSE_S_MAX))
        except asyncio.CancelledError:
            await self._abort(request)
            raise
        finally:
            self._active -= 1

    async def _admitted(self, line: Line, request: Request, heard: Heard, busy_s_max: float) -> None:
        """Asked until the server has a place for it. Raises _Failed, EngineDied, RequestRefused and LineClosed."""
        began_s, tried = time.monotonic(), 0
        while True:
            line.require_open()
            try:
                await self._asked(line, request, heard)
                return
            except _Busy as busy:
                tried = min(tried + 1, TRIES)
                if self._may_speak() and time.monotonic() - max(began_s, self._heard_s) >= busy_s_max:
                    reason = f"{self.url} had no place for anybody for {busy_s_max:g} s: it said {busy}"
                    raise NoPlace(self.name, reason, None) from busy
                await line.pause(busy.wait_s + pause_s(tried, PAUSE_S, PAUSE_S_MAX))

    async def _given_up(self, line: Line, last: _Failed) -> EngineDied | RequestRefused:
        """What to say of a request that failed as often as any may. Raises LineClosed."""
        try:
            await asyncio.wait_for(self._probed(line, 1.0), PROBE_S_MAX)
        except (ManagerError, TimeoutError):
            return EngineDied(self.name, f"{self.url} failed {TRIES} times and then a probe: it said {last}", None)
        return RequestRefused(
            self.name, f"{self.url} failed this request {TRIES} times and answers others: it said {last}"
        )

    async def _asked(self, line: Line, request: Request, heard: Heard) -> None:
        """Raises EngineDied with what was heard, RequestRefused, _Busy and _Failed."""
        import aiohttp

        body = self._dialect.body(self._model, request, seed_of(request.noise, len(request.tokens)))
        heard.begin()
        try:
            async with line.post(self._dialect.path, body) as response:
                if response.status != 200:
                    text = (await response.content.read(SHOWN)).decode(errors="replace")
                    self._refuse(response.status, text, response.headers)
                async for answer in line.answers(response, streams=self._dialect.streams):
                    self._heard_s = time.monotonic()
                    heard.take(self._dialect.said(answer), self._version, logprobs=self._tells_logprobs)
                heard.require_stop()
        except LineClosed as error:
            raise EngineDied(self.name, CLOSED, heard.so_far()) from error
        except OddEnd as error:
            raise RequestRefused(self.name, f"{self.url} {error}") from error
        except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError) as error:
            reached = isinstance(error, aiohttp.ServerDisconnectedError)
            kind = EngineDied if reached else Unreachable
            raise kind(self.name, f"{self.url} cannot be reached: {error}", heard.so_far()) from error
        except TextAlone as error:
            raise EngineDied(self.name, f"{self.url} {TEXT_ALONE}", heard.so_far()) from error
        except TimeoutError as error:
            reason = f"{self.url} said nothing for {self._silent_s_max:g} s"
            raise EngineDied(self.name, reason, heard.so_far()) from error
        except (aiohttp.ClientError, OSError) as error:
            reason = f"{self.url} broke off: {type(error).__name__}: {error}"
            raise EngineDied(self.name, reason, heard.so_far()) from error
        except NONSENSE as error:
            reason = f"{self.url} said what makes no sense: {type(error).__name__}: {str(error)[:SHOWN]}"
            raise EngineDied(self.name, reason, heard.so_far()) from error
        if heard.finish is None:
            raise EngineDied(self.name, f"{self.url} ended its answer before the end", heard.so_far())

    def _may_speak(self) -> bool:
        """Whether a silence of `silent_s_max` that ends now is the server's own: while it is suspended it says
        nothing."""
        return self._suspended_at is None and time.monotonic() >= self._resumed_at + self._silent_s_max

    def _refuse(self, status: int, text: str, headers: Mapping[str, str]) -> None:
        said = f"{status}: {text}"
        if status in BUSY:
            raise _Busy(said, advice_of(status, headers, time.time()).wait_s or 0.0)
        if status >= FAILED:
            raise _Failed(said)
        if status in SET_UP:
            reason = f"{self.url}{self._dialect.path} is set up wrongly, it said {said}; look at url, model and key"
            raise EngineDied(self.name, reason, None)
        if 400 <= status < FAILED:
            hint = "; lower context_max of [[engines]] to what it takes" if ABOUT_LENGTH.search(text) else ""
            raise RequestRefused(self.name, f"{self.url}{self._dialect.path} refused the request: {said}{hint}")
        raise EngineDied(self.name, f"{self.url} said {said}", None)

    async def _abort(self, request: Request) -> None:
        if not self._dialect.abort or not self._alive:
            return
        with contextlib.suppress(ManagerError, asyncio.TimeoutError):
            async with asyncio.timeout(ABORT_S_MAX):
                await self._call("POST", self._dialect.abort, {"rid": request.id}, seconds_max=ABORT_S_MAX)

    # ---- control ----

    async def _first_model(self) -> str:
        answer = await self._call("GET", "/v1/models", None)
        try:
            name = answer["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            name = None
        if not isinstance(name, str):
            raise ManagerError(f"{self.url}/v1/models names no model: {str(answer)[:SHOWN]}", retry=False)
        return name

    async def _load(self, weights: Weights) -> None:
        """The weights of a start that is not the first."""
        await self._controlled(self._dialect.suspend)
        try:
            await self._hand_over(weights)
        finally:
            await self._controlled(self._dialect.resume)  # the server stays when we go, so it is not left suspended

    async def _controlled(self, calls: Calls) -> None:
        try:
            await self._calls(calls)
        except _Missing as error:
            raise ManagerError(f"engine {self.name}: {error}", retry=False) from error

    async def _calls(self, calls: Calls) -> None:
        for path, body in calls:
            answer = await self._call("POST", path, body)
            if isinstance(answer, dict) and answer.get("success") is False:
                raise ManagerError(f"{self.url}{path} failed: {str(answer.get('message'))[:SHOWN]}")

    async def _call(self, method: str, path: str, body: Any, *, seconds_max: float = CONTROL_S_MAX) -> Any:
        answer = await self._http.request(
            method,
            self.url + path,
            timeout_s=seconds_max,
            bytes_max=ANSWER_BYTES_MAX,
            headers=self._headers,
            **({"json": body} if body is not None else {}),
        )
        if answer.status in MISSING:
            raise _Missing(f"{answer.status} to {method} {path}")
        if not answer.ok:
            raise ManagerError(f"{self.url}{path} said {answer.status}: {answer.text[:SHOWN]}")
        with contextlib.suppress(ManagerError):
            return answer.json()
        return None  # some answer a control call with a word or with nothing

    # ---- what it is good for ----

    async def _probe(self) -> str:
        """Why what it writes cannot be trained on; empty if it can. Raises ManagerError if it is good for nothing, and
        EngineDied."""
        line = self._require_alive()
        self._tells_logprobs = True
        try:
            found = await asyncio.wait_for(self._probed(line, 1.0), PROBE_S_MAX)
        except NoLogprobs:
            self._tells_logprobs = False
            return "it tells no log-probabilities"
        except TimeoutError as error:
            raise ManagerError(f"{self.url} did not answer a probe within {PROBE_S_MAX:g} s") from error
        except RequestRefused as error:
            raise ManagerError(f"{self.url} refuses a probe of {len(PROBE)} tokens: {error}", retry=False) from error
        if self._temperature in (0.0, 1.0) or await self._is_scaled(line, found):
            return ""
        return (
            f"its log-probabilities seem to be those before the temperature, and {self._temperature:g} is trained on: "
            "start vLLM with --logprobs-mode processed_logprobs, or sample at temperature 1"
        )

    async def _is_scaled(self, line: Line, plain: Generation) -> bool:
        """Whether the log-probability of a token changes with the temperature. If that cannot be seen, it does not."""
        for seed in range(PROBE_TRIES):
            warm = await asyncio.wait_for(self._probed(line, self._temperature, seed), PROBE_S_MAX)
            if warm.tokens == plain.tokens:
                return abs(warm.logprobs[0] - plain.logprobs[0]) > SAME
        return False

    async def _probed(self, line: Line, temperature: float, seed: int = 0) -> Generation:
        sampling = Sampling(temperature=temperature, tokens_max=1)
        request = Request(
            id=f"probe-{self.name}-{time.monotonic_ns()}", tokens=PROBE, sampling=sampling, noise=Noise(seed=seed)
        )
        heard = Heard(self.name, request, vocabulary=self._vocabulary, probing=True)
        try:
            await self._admitted(line, request, heard, PROBE_BUSY_S_MAX)
        except _Failed as failure:
            raise ManagerError(f"{self.url} failed: {failure}") from failure
        if not heard.generation().tokens:
            raise ManagerError(f"{self.url} wrote nothing when it was asked for one token", retry=False)
        return heard.generation()

    def _require_alive(self) -> Line:
        if not self._alive or self._line is None:
            raise EngineDied(self.name, f"{self.url} is not connected", None)
        return self._line

    def _count(self, **more: float) -> None:
        current = {name: getattr(self._statistics, name) + value for name, value in more.items()}
        self._statistics = msgspec.structs.replace(self._statistics, **current)


class _Busy(Exception):
    """It has no place at the moment, and asks for a pause of `wait_s`."""

    def __init__(self, said: str, wait_s: float) -> None:
        self.wait_s = min(wait_s, RETRY_AFTER_S_MAX)
        super().__init__(said)


class _Failed(Exception):
    """It failed, which may be over a little later."""


class _Missing(ManagerError):
    """There is no such call."""


def seed_of(noise: Noise, position: int) -> int:
    """Of a request whose first token stands there: one that is continued elsewhere draws other numbers."""
    words = f"{noise.seed}/{noise.member}/{noise.attempt}/{position}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big") >> (64 - SEED_BITS)


def _require_hugging_face(name: str, weights: Weights) -> None:
    """Raises ManagerError."""
    folder = Path(weights.folder)
    if not (folder / "config.json").is_file() or next(folder.glob("*.safetensors"), None) is None:
        raise ManagerError(
            f"engine {name}: takes Hugging Face folders only, with config.json and *.safetensors, which {folder} is "
            "not; publish with tangram.rl.model.model_folder.save",
            retry=False,
        )
