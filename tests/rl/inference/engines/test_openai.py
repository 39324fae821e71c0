"""The engine for external servers, against real HTTP servers of each kind, correct and faulty."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.rl.inference.conftest import STOP, a_request, fake, weights
from tests.rl.inference.servers import ModelServer

from tangram.errors import InvalidConfig, InvalidInput, ManagerError
from tangram.rl.config.rollout_settings import EngineSettings
from tangram.rl.inference.engines import openai
from tangram.rl.inference.engines.http_session import HttpSession
from tangram.rl.inference.engines.openai import (
    OWN_WEIGHTS,
    SEED_BITS,
    OpenAIEngine,
    seed_of,
)
from tangram.rl.inference.engines.protocol import (
    EngineDied,
    GenerationRequest,
    PolicyWeights,
    RequestRefused,
    Sampling,
    SamplingSeed,
    ServerOverloaded,
    ServerUnreachable,
)
from tangram.rl.inference.router import Router
from tangram.rl.rollout.assembly import require_trainable_engines

DEADLINE_S = 60.0
BOTH = pytest.mark.parametrize("server_kind", ["vllm", "sglang"])
ALL = pytest.mark.parametrize("server_kind", ["vllm", "sglang", "plain"])


def engine_at(url: str, server_kind: str = "vllm", **options: Any) -> OpenAIEngine:
    given = {"silent_s_max": 20.0} | {key: options.pop(key) for key in ("silent_s_max", "slots") if key in options}
    settings = EngineSettings(name="server", hardware="bandwidth", kind="openai", url=url, **given)
    return OpenAIEngine(settings, **({"server": server_kind} | options))


def with_server(
    test: Callable[[ModelServer, OpenAIEngine], Awaitable[None]], server_kind: str = "vllm", **options: Any
) -> None:
    async def main() -> None:
        server_options = {key: options.pop(key) for key in ("control", "scaled") if key in options}
        async with asyncio.timeout(DEADLINE_S), ModelServer(server_kind, **server_options) as server:
            engine = engine_at(server.url, server_kind, **options)
            try:
                await engine.start(weights())
                await test(server, engine)
            finally:
                await engine.close()

    asyncio.run(main())


def checkpoint(folder: Path, version: int) -> PolicyWeights:
    """As Hugging Face has it, as far as it is looked at here."""
    path = folder / str(version)
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        (path / name).touch()
    return PolicyWeights(version=version, folder=str(path))


def tokens_of(server: ModelServer, request: GenerationRequest) -> tuple[int, ...]:
    first = len(request.tokens)
    return tuple(server.token(first + number) for number in range(request.sampling.tokens_max))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


# ---- well ----


@ALL
def test_tokens_go_in_and_tokens_come_out(server_kind: str) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        request = a_request(tokens=6, tokens_max=5)
        generation = await engine.generate(request)
        assert generation.tokens == tokens_of(server, request)
        assert generation.logprobs == (-1.25,) * 5 and generation.versions == (1,) * 5
        assert (generation.finish, generation.engine, generation.prefilled, generation.reused) == (
            "length",
            "server",
            3,
            3,
        )
        path, body = server.calls[-1]
        sent = body["input_ids"] if server_kind == "sglang" else body["prompt"]
        sampling = body["sampling_params"] if server_kind == "sglang" else body
        assert path == ("/generate" if server_kind == "sglang" else "/v1/completions")
        assert sent == list(request.tokens) and sampling["stop_token_ids"] == [STOP]
        seed = sampling["sampling_seed"] if server_kind == "sglang" else sampling["seed"]
        assert seed == seed_of(request.noise, 6)
        assert engine.statistics().decode_tokens == 5

    with_server(test, server_kind)


def test_a_seed_is_made_of_all_of_the_noise_and_of_the_position() -> None:
    noises = [
        SamplingSeed(seed=1),
        SamplingSeed(seed=2),
        SamplingSeed(seed=1, member=1),
        SamplingSeed(seed=1, attempt=1),
    ]
    seeds = [seed_of(noise, position) for noise in noises for position in (1, 2)]
    assert len(set(seeds)) == 8
    assert all(0 <= seed < 1 << SEED_BITS for seed in seeds)
    assert seed_of(SamplingSeed(seed=1), 5) == seed_of(SamplingSeed(seed=1), 5)


def test_an_action_ends_with_the_token_that_ends_it() -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        server.stop_token = 3
        generation = await engine.generate(a_request(tokens_max=10))
        assert (generation.tokens[-1], len(generation.tokens), generation.finish) == (STOP, 3, "stop")
        server.hides_stop = True
        with pytest.raises(RequestRefused, match=r"by itself at token \d+, .*one of \[1\]: .*generation_config\.json"):
            await engine.generate(a_request(tokens_max=10))
        server.hides_stop = False
        assert (await engine.generate(a_request(tokens_max=10))).finish == "stop", "it goes on with others"

    with_server(test)


@BOTH
def test_a_server_keeps_the_weights_that_it_serves_until_it_takes_an_update(server_kind: str, tmp_path: Path) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        assert server.weights == "none" and engine.statistics().version == 1
        assert not engine.output_is_trainable and engine.shortcoming == OWN_WEIGHTS
        second = checkpoint(tmp_path, 2)
        await engine.update(second)
        assert server.weights == second.folder
        assert engine.output_is_trainable and not engine.shortcoming

    with_server(test, server_kind)


@BOTH
def test_weights_change_in_the_middle_of_a_request(server_kind: str, tmp_path: Path) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        second = checkpoint(tmp_path, 2)
        request = a_request(tokens_max=20)
        task = asyncio.create_task(engine.generate(request))
        await until(lambda: server.inside == 1)
        await asyncio.sleep(0.05)
        await engine.suspend()
        await engine.update(second)
        await engine.resume()
        result = await task
        assert result.tokens == tokens_of(server, request)
        assert server.weights == second.folder and result.versions[-1] == 2
        assert engine.statistics().version == 2
        paths = [path for path, _ in server.calls]
        if server_kind == "vllm":
            assert result.versions[0] == 1
            assert paths[-4:] == [
                "/pause?mode=keep", "/collective_rpc", "/reset_prefix_cache?reset_running_requests=true", "/resume",
            ]  # fmt: skip
        else:
            assert paths[-3:] == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]

    with_server(test, server_kind)


@BOTH
def test_weights_that_cannot_be_had_leave_the_old_ones(server_kind: str, tmp_path: Path) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        server.refuse_weights = True
        with pytest.raises(ManagerError, match="no such file") as refused:
            await engine.update(checkpoint(tmp_path, 2))
        assert not isinstance(refused.value, EngineDied)
        assert engine.statistics().version == 1 and engine.shortcoming == OWN_WEIGHTS

    with_server(test, server_kind)


@BOTH
def test_published_weights_are_never_sent_to_a_server(server_kind: str, tmp_path: Path) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        for name in ("manifest.json", "00000.bucket", "config.json"):
            (tmp_path / name).touch()
        with pytest.raises(ManagerError, match=r"takes Hugging Face folders only.*model_folder\.save") as refused:
            await engine.update(PolicyWeights(version=2, folder=str(tmp_path)))
        assert not isinstance(refused.value, EngineDied)
        assert server.weights == "none" and engine.statistics().version == 1

    with_server(test, server_kind)


def test_a_server_that_has_new_weights_and_old_prefixes_counts_as_dead(tmp_path: Path) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        server.refuse_reset = True
        with pytest.raises(EngineDied, match="applied version 2"):
            await engine.update(checkpoint(tmp_path, 2))

    with_server(test, "vllm")


@BOTH
def test_a_server_with_updated_weights_gets_them_again_at_its_next_start(server_kind: str, tmp_path: Path) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        await engine.update(checkpoint(tmp_path, 2))
        await engine.close()
        server.weights = "those of its own"  # it was restarted meanwhile
        third = checkpoint(tmp_path, 3)
        server.refuse_weights = True
        with pytest.raises(ManagerError, match="no such file"):
            await engine.start(third)
        assert server.running.is_set()
        server.refuse_weights = False
        await engine.start(third)
        assert server.weights == third.folder and engine.output_is_trainable
        assert engine.statistics().version == 3

    with_server(test, server_kind)


@BOTH
def test_a_server_that_was_left_suspended_goes_on_when_it_is_started(server_kind: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), ModelServer(server_kind) as server:
            server.running.clear()
            engine = engine_at(server.url, server_kind)
            await engine.start(weights())
            assert len((await engine.generate(a_request(tokens_max=2))).tokens) == 2
            await engine.close()

    asyncio.run(main())


@ALL
def test_cancelling_a_request_aborts_it_in_the_server(server_kind: str) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        request = a_request(tokens_max=5000)
        other = asyncio.create_task(engine.generate(a_request(tokens_max=30)))
        task = asyncio.create_task(engine.generate(request))
        await until(lambda: server.inside == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len((await other).tokens) == 30
        await until(lambda: server.inside == 0)
        if server_kind == "sglang":
            assert server.aborted == [request.id]
        assert engine.statistics().active == 0

    with_server(test, server_kind)


# ---- what it is good for ----


@BOTH
def test_a_server_without_control_serves_evaluation_and_reports_why(server_kind: str) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        assert not engine.output_is_trainable
        assert "takes no weights" in engine.shortcoming
        await engine.suspend()
        await engine.update(weights(2))
        await engine.resume()
        request = a_request()
        assert (await engine.generate(request)).tokens == tokens_of(server, request)

    with_server(test, server_kind, control=False)


@ALL
def test_only_engines_that_have_taken_weights_may_be_trained_on(server_kind: str, tmp_path: Path) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        others = [fake("ours")]
        require_trainable_engines(others)
        with pytest.raises(InvalidConfig, match=r"engine server: expected .*no weights|engine server: .*of its own"):
            require_trainable_engines([*others, engine])
        await engine.update(checkpoint(tmp_path, 2))
        if server_kind == "plain":
            with pytest.raises(InvalidConfig, match="this kind of server takes no weights"):
                require_trainable_engines([engine])
        else:
            require_trainable_engines([engine])

    with_server(test, server_kind)


@BOTH
def test_a_server_that_was_trained_on_does_not_come_back_with_weights_of_its_own(
    server_kind: str, tmp_path: Path
) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        await engine.update(checkpoint(tmp_path, 2))
        assert engine.output_is_trainable
        await engine.close()
        server.control = False  # it was restarted meanwhile, otherwise
        for _ in range(2):
            with pytest.raises(ManagerError, match="it had taken weights, and now it takes no weights"):
                await engine.start(checkpoint(tmp_path, 3) if not (tmp_path / "3").exists() else weights(3))
        server.control = True
        await engine.start(PolicyWeights(version=3, folder=str(tmp_path / "3")))
        assert engine.output_is_trainable

    with_server(test, server_kind)


@BOTH
def test_a_server_that_was_trained_on_does_not_come_back_without_log_probabilities(
    server_kind: str, tmp_path: Path
) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        second = checkpoint(tmp_path, 2)
        await engine.update(second)
        await engine.close()
        server.fault = "no logprobs"
        for _ in range(2):
            with pytest.raises(ManagerError, match="was trained on, and now it returns no log-probabilities"):
                await engine.start(second)

    with_server(test, server_kind)


def test_a_plain_server_serves_evaluation() -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        assert not engine.output_is_trainable and "no weights" in engine.shortcoming

    with_server(test, "plain")


@BOTH
def test_a_server_without_log_probabilities_serves_evaluation(server_kind: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), ModelServer(server_kind) as server:
            server.fault = "no logprobs"
            engine = engine_at(server.url, server_kind)
            await engine.start(weights())
            assert (
                not engine.output_is_trainable
                and engine.shortcoming == f"it returns no log-probabilities; {OWN_WEIGHTS}"
            )
            generation = await engine.generate(a_request(tokens_max=4))
            assert len(generation.tokens) == len(generation.logprobs) == 4
            await engine.close()

    asyncio.run(main())


@ALL
def test_text_without_ids_is_refused_at_the_start(server_kind: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), ModelServer(server_kind) as server:
            server.fault = "text"
            with pytest.raises(ManagerError, match="text without the ids of its tokens"):
                await engine_at(server.url, server_kind).start(weights())

    asyncio.run(main())


@BOTH
@pytest.mark.parametrize(
    ("temperature", "scaled", "output_is_trainable"), [(0.5, True, True), (0.5, False, False), (1.0, False, True)]
)
def test_log_probabilities_before_the_temperature_are_detected(
    server_kind: str, temperature: float, scaled: bool, output_is_trainable: bool, tmp_path: Path
) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        await engine.update(checkpoint(tmp_path, 2))
        assert engine.output_is_trainable is output_is_trainable
        assert ("before the temperature" in engine.shortcoming) is not output_is_trainable

    with_server(test, server_kind, scaled=scaled, temperature=temperature)


def test_without_the_ids_of_the_sampled_subset_training_with_top_k_is_refused() -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        sampling = Sampling(top_k=5, keep_ids=True)
        request = GenerationRequest(id="r", tokens=(1,), sampling=sampling, noise=SamplingSeed(seed=1))
        with pytest.raises(InvalidInput, match="keep_ids"):
            await engine.generate(request)

    with_server(test)


# ---- hostile and unlucky ----


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no logprobs", "tokens without log-probabilities"),
        ("wrong counts", "1 tokens and 2 log-probabilities"),
        ("wrong ids", "invalid token ids"),
        ("truncated", "an incomplete line"),
        ("dropped", "broke off|reached"),
        ("no end", "ended its response early"),
        ("silent", "sent nothing"),
        ("too many", "more than the 6 tokens"),
        ("not json", "malformed response"),
        ("positive", "an invalid log-probability: 0.5"),
        ("null", "an invalid log-probability: None"),
        ("after the end", "more than the 6 tokens"),
        ("error inside", "EngineDeadError"),
        ("text", "without the ids"),
    ],
)
def test_a_stream_that_goes_wrong_kills_the_engine_and_what_was_sound_survives(fault: str, words: str) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        server.fault = fault
        request = a_request(tokens_max=6)
        with pytest.raises(EngineDied, match=words) as died:
            await engine.generate(request)
        written = died.value.written.tokens if died.value.written is not None else ()
        assert written == tokens_of(server, request)[: len(written)]
        first = 0 if fault in ("text", "no logprobs") else 2
        # What was in flight when a line broke may be lost with it.
        assert len(written) >= first or fault == "dropped"
        with pytest.raises(EngineDied, match="not connected"):
            await engine.generate(a_request())
        server.fault = ""
        await engine.close()
        await engine.start(weights(7))
        assert (await engine.generate(a_request(tokens_max=2))).versions == (7, 7)

    with_server(test, "vllm", silent_s_max=3.0 if fault == "silent" else 20.0)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no logprobs", "tokens without log-probabilities"),
        ("wrong counts", "other tokens than it generated"),
        ("other tokens", "other tokens than it generated"),
        ("wrong ids", "malformed response"),
        ("truncated", "malformed response"),
        ("dropped", "reached|broke off"),
        ("silent", "sent nothing"),
        ("too many", "more than the 6 tokens"),
        ("not json", "malformed response"),
        ("positive", "an invalid log-probability"),
        ("null", "an invalid log-probability"),
        ("error inside", "malformed response"),
        ("text", "without the ids"),
    ],
)
def test_a_whole_answer_that_goes_wrong_kills_the_engine(fault: str, words: str) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        server.fault = fault
        with pytest.raises(EngineDied, match=words) as died:
            await engine.generate(a_request(tokens_max=6))
        assert died.value.written is None

    with_server(test, "sglang", silent_s_max=3.0 if fault == "silent" else 20.0)


@BOTH
@pytest.mark.parametrize("finish", ["abort", "tool_calls", "content_filter"])
def test_an_answer_that_ends_oddly_costs_its_request_alone(server_kind: str, finish: str) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        server.fault, server.words = "aborted", finish
        with pytest.raises(RequestRefused, match=f"ended the answer by '{finish}'"):
            await engine.generate(a_request(tokens_max=6))
        server.fault = ""
        assert (await engine.generate(a_request(tokens_max=2))).tokens, "it was not closed"

    with_server(test, server_kind)


@pytest.mark.parametrize(
    "done", [b"data:[DONE]\n\n", b"data: [DONE]", b"data:[DONE]", b"event: end\r\ndata: [DONE]\r\n", b""]
)
def test_the_end_of_a_stream_has_several_valid_forms(done: bytes) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        server.done = done
        request = a_request(tokens_max=3)
        generation = await engine.generate(request)
        assert (generation.tokens, generation.reused) == (tokens_of(server, request), 5)

    with_server(test)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "PAUSE_S", 0.01)


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(
    ("status", "error"), [(400, RequestRefused), (422, RequestRefused), (404, EngineDied), (500, EngineDied)]
)
def test_the_status_of_a_response_decides_which_side_failed(status: int, error: type[Exception]) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        server.status = status
        with pytest.raises(error, match=f"{status}: as you like"):
            await engine.generate(a_request())
        server.status = 200
        if error is RequestRefused:
            assert (await engine.generate(a_request(tokens_max=2))).tokens, "it goes on with others"

    with_server(test)


@pytest.mark.usefixtures("no_pauses")
def test_a_server_that_fails_once_gets_the_request_again() -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        server.status, server.unlucky = 500, 1
        request = a_request(tokens_max=2)
        assert (await engine.generate(request)).tokens == tokens_of(server, request)

    with_server(test)


@pytest.mark.usefixtures("no_pauses")
def test_a_request_that_fails_each_time_is_refused_if_the_server_answers_further_requests() -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        server.status, server.unlucky = 500, openai.TRIES
        with pytest.raises(RequestRefused, match="serves others: 500: as you like"):
            await engine.generate(a_request(tokens_max=2))
        assert (await engine.generate(a_request(tokens_max=2))).tokens

    with_server(test)


def test_a_length_error_names_the_key_to_change() -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        server.status, server.words = 400, "maximum context length is 8 tokens"
        with pytest.raises(RequestRefused, match=r"8 tokens; lower context_max of \[\[engines\]\]"):
            await engine.generate(a_request())

    with_server(test)


@BOTH
def test_a_token_that_the_policy_does_not_know_makes_no_sense(server_kind: str) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        request = a_request(tokens_max=20)
        wrong = next(token for token in tokens_of(server, request) if token >= 50)
        with pytest.raises(
            EngineDied,
            match=f"malformed response: ValueError: token {wrong}, and the vocabulary has 50: policy.checkpoint",
        ):
            await engine.generate(request)

    with_server(test, server_kind, vocabulary=50)


def test_a_server_without_free_slots_gets_the_request_again() -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        server.busy = 1
        request = a_request(tokens_max=2)
        assert (await engine.generate(request)).tokens == tokens_of(server, request)

    with_server(test)


@pytest.mark.usefixtures("no_pauses")
def test_a_server_that_has_place_for_one_serves_all_one_after_the_other() -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        server.places = 1
        requests = [a_request(tokens_max=4) for _ in range(openai.TRIES + 3)]
        results = await asyncio.gather(*(engine.generate(request) for request in requests))
        assert [each.tokens for each in results] == [tokens_of(server, request) for request in requests]
        assert server.turned_away > 0

    with_server(test)


def test_concurrent_requests_are_limited_to_the_slots_and_waiting_is_reported() -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        tasks = [asyncio.create_task(engine.generate(a_request(tokens_max=3))) for _ in range(6)]
        await until(lambda: server.inside == 2)
        assert (engine.statistics().active, engine.statistics().waiting) == (2, 4)
        results = await asyncio.gather(*tasks)
        assert server.inside_most == 2
        assert max(each.waiting_s for each in results) > min(each.waiting_s for each in results)
        assert (engine.statistics().active, engine.statistics().waiting) == (0, 0)

    with_server(test, slots=2)


@pytest.mark.usefixtures("no_pauses")
def test_a_busy_server_gets_the_request_again_after_its_retry_after_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    async def pause(line: HttpSession, seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(HttpSession, "pause", pause)

    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        for retry_after, least_s in (("7", 7.0), ("1000000", openai.RETRY_AFTER_S_MAX)):
            server.busy, server.retry_after = 1, retry_after
            assert (await engine.generate(a_request(tokens_max=2))).tokens
            assert least_s <= pauses.pop() <= least_s + openai.PAUSE_S and not pauses

    with_server(test)


@pytest.mark.usefixtures("no_pauses")
def test_a_server_that_stays_without_free_slots_is_dead_after_a_while() -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        server.busy = -1
        with pytest.raises(ServerOverloaded, match="accepted no request for 2 s: 429: later"):
            await engine.generate(a_request())
        assert server.turned_away > 1

    with_server(test, silent_s_max=2.0)


@pytest.mark.parametrize("again", [False, True])
def test_a_request_that_pauses_when_the_engine_is_closed_dies_with_it(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        monkeypatch.setattr(openai, "PAUSE_S", 2.0 * DEADLINE_S)
        monkeypatch.setattr(openai, "PAUSE_S_MAX", 2.0 * DEADLINE_S)
        server.status, server.unlucky = 503, 1
        pausing = asyncio.create_task(engine.generate(a_request()))
        await until(lambda: server.unlucky == 0)
        served = asyncio.create_task(engine.generate(a_request(tokens_max=5000)))
        queued = asyncio.create_task(engine.generate(a_request()))
        await until(lambda: server.inside == 1)
        await engine.close()
        if again:
            await engine.start(weights(2))
        for task in (pausing, queued):
            with pytest.raises(ServerUnreachable, match="it was closed meanwhile"):
                await task
        with pytest.raises(EngineDied, match="it was closed meanwhile"):
            await served
        if again:
            assert (await engine.generate(a_request(tokens_max=2))).versions == (2, 2), "the new life goes on"

    with_server(test, slots=2)


def test_silence_while_it_is_suspended_is_no_death() -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        request = a_request(tokens_max=10)
        task = asyncio.create_task(engine.generate(request))
        await until(lambda: server.inside == 1)
        await engine.suspend()
        done, _ = await asyncio.wait({task}, timeout=2.0)  # longer than it may be silent
        assert not done
        await engine.resume()
        assert (await task).tokens == tokens_of(server, request)

    with_server(test, "vllm", silent_s_max=1.0)


def test_a_server_that_is_not_there_is_unreachable() -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        await server.stop()
        with pytest.raises(ServerUnreachable, match="cannot be reached"):
            await engine.generate(a_request())
        with pytest.raises(ManagerError, match="cannot be reached"):
            await engine_at(server.url).start(weights())

    with_server(test)


def test_closing_kills_what_is_inside_and_leaves_the_server() -> None:
    async def test(server: ModelServer, engine: OpenAIEngine) -> None:
        task = asyncio.create_task(engine.generate(a_request(tokens_max=5000)))
        await until(lambda: server.inside == 1)
        await engine.close()
        with pytest.raises(EngineDied):
            await task
        await until(lambda: server.inside == 0)
        await engine.start(weights())
        assert len((await engine.generate(a_request(tokens_max=2))).tokens) == 2

    with_server(test)


def test_an_unknown_dialect_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="one of vllm, sglang, plain"):
        engine_at("http://127.0.0.1:1", "esperanto")


@pytest.mark.parametrize(
    "url",
    ["localhost", "localhost:8000", "http://", "http://[::1", "http://node:{port}", "http://node:99999", "http://a b"],
)
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfig, match=r"url: expected an address such as http://localhost:8000"):
        EngineSettings(kind="openai", url=url)


def test_one_table_describes_several_servers() -> None:
    settings = EngineSettings(name="server", count=3, kind="openai", url="http://node-{number}:8000/")
    engine = OpenAIEngine(settings, 2)
    assert (engine.name, engine.url) == ("server-2", "http://node-2:8000")


# ---- behind a router ----


@pytest.mark.usefixtures("no_pauses")
def test_behind_a_gateway_a_busy_server_that_drops_a_connection_costs_no_request() -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), ModelServer("vllm") as server:
            router = Router([engine_at(server.url, slots=3)])
            await router.start(weights())
            server.status, server.unlucky = 503, 3
            tasks = [asyncio.create_task(router.generate(a_request(tokens_max=30))) for _ in range(7)]
            await until(lambda: server.inside == 3)
            server.fault, server.fault_after = "dropped", 0
            await until(lambda: server.inside < 3)
            server.fault, server.status, server.unlucky = "", 503, 3
            results = await asyncio.gather(*tasks)
            assert [len(each.tokens) for each in results] == [30] * 7
            assert router.statistics().engines[0].incarnations >= 2
            await router.close()

    asyncio.run(main())


def test_behind_a_gateway_a_request_survives_its_server() -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), ModelServer("vllm") as first, ModelServer("vllm") as second:
            engines = [
                OpenAIEngine(EngineSettings(name=name, kind="openai", url=server.url), server="vllm")
                for name, server in (("first", first), ("second", second))
            ]
            router = Router(engines)
            await router.start(weights())
            request = a_request(tokens_max=40)
            first.fault, first.fault_after = "dropped", 5
            result = await router.generate(request)
            assert result.tokens == tokens_of(first, request)
            assert result.engine == "second" and router.statistics().resumed == 1
            prompt = second.calls[-1][1]["prompt"]
            assert len(prompt) > len(request.tokens) and prompt[len(request.tokens) :] == list(
                result.tokens[: len(prompt) - len(request.tokens)]
            )
            await router.close()

    asyncio.run(main())


def test_behind_a_gateway_a_server_that_refuses_our_weights_goes_on_serving(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), ModelServer("vllm") as server:
            router = Router([engine_at(server.url)])
            await router.start(weights())
            request = a_request(tokens_max=40)
            task = asyncio.create_task(router.generate(request))
            await until(lambda: server.inside == 1)
            with pytest.raises(ManagerError, match=r"no engine applied version 2.*Hugging Face folders only"):
                await router.update(weights(2))
            assert (await task).versions == (1,) * 40
            await router.update(checkpoint(tmp_path, 2))
            (kept,) = router.statistics().engines
            assert (kept.version, kept.output_is_trainable, kept.incarnations) == (2, True, 1)
            await router.close()

    asyncio.run(main())
