"""The step machine: every request gets the tokens it would have got alone, beside any other requests."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.errors import InvalidAction
from tangram.rl.inference.engines.protocol import Generation, GenerationRequest, Sampling, SamplingSeed
from tangram.rl.model.batching import Batcher, BatcherStepResult
from tangram.rl.model.sampling import BrokenLogits, draw, uniforms
from tangram.rl.model.transformer import Transformer, small_config

VOCABULARY = 23
CONTEXT = 48
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@pytest.fixture(autouse=True)
def _one_thread():
    """As in the process of an engine; with several, sums depend on how they are shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def model(version: int, dtype: torch.dtype = torch.float64) -> Transformer:
    """Different weights for each version. What they say depends strongly on what they have read."""
    config = small_config(VOCABULARY, layers=2, width=16, heads=2, context_max=CONTEXT)
    made = Transformer.new(config, seed=version, dtype=dtype).requires_grad_(False)
    assert made.head is not None
    made.head *= 40.0
    return made


def batcher(*, dtype: torch.dtype = torch.float64, **options) -> Batcher:
    clock = itertools.count()
    chosen = {"slots": 3, "context_max": CONTEXT, "chunk": 8, "now": lambda: float(next(clock))} | options
    return Batcher(model(0, dtype), 0, **chosen)


def request(number: int, count: int = 10, *, session: str = "", **sampling) -> GenerationRequest:
    return GenerationRequest(
        id=f"r{number}",
        session=session,
        tokens=tuple((number * 5 + position * position) % VOCABULARY for position in range(count)),
        sampling=Sampling(**({"tokens_max": 6} | sampling)),
        noise=SamplingSeed(seed=number),
    )


def run(machine: Batcher, steps: int = 1000) -> dict[str, Generation]:
    generations: dict[str, Generation] = {}
    for _ in range(steps):
        if not machine.busy:
            break
        take(machine.step(), generations)
        machine.check()
    return generations


def take(happened: BatcherStepResult, found: dict[str, Generation]) -> None:
    for id, generation in happened.done:
        assert id not in found, f"{id} ended twice"
        found[id] = generation


def assert_as_if_alone(sent: GenerationRequest, got: Generation, dtype: torch.dtype = torch.float64) -> None:
    """Each token is what a plain forward pass of all before it gives, under the weights of its version."""
    tokens = list(sent.tokens)
    noise = uniforms(sent.noise, len(tokens), len(got.tokens))
    for token, logprob, version, chance in zip(got.tokens, got.logprobs, got.versions, noise, strict=True):
        logits = model(version, dtype)(torch.tensor([tokens]))[:, -1]
        plain = draw(logits, [sent.sampling], [chance])
        if dtype == torch.float64:
            assert plain.tokens == [token]
            assert plain.logprobs[0] == pytest.approx(logprob, abs=TOLERANCE[dtype])
        else:  # a token may be another one where the noise falls between two; its log-probability has to be right
            scaled = logits[0].double() / (sent.sampling.temperature or 1.0)
            assert torch.log_softmax(scaled, -1)[token].item() == pytest.approx(logprob, abs=TOLERANCE[dtype])
        tokens.append(token)
    sampling = sent.sampling
    stopped = [token in sampling.stop for token in got.tokens]
    assert not any(stopped[:-1])
    assert got.finish == ("stop" if stopped[-1] else "length")
    if got.finish == "length":
        assert len(got.tokens) == sampling.tokens_max or len(tokens) == CONTEXT


# ---- one request ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("count", [1, 2, 8, 9, 16, 30])
def test_log_probabilities_are_those_of_a_plain_forward_pass(count: int, dtype: torch.dtype) -> None:
    machine = batcher(dtype=dtype)
    sent = request(1, count, tokens_max=12)
    machine.add(sent)
    assert_as_if_alone(sent, run(machine)["r1"], dtype)


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 0.4}, {"top_k": 3, "keep_ids": True}, {"top_p": 0.5, "temperature": 2.0}],
    ids=str,
)
def test_settings_of_sampling_are_those_of_the_request(sampling: dict) -> None:
    machine = batcher()
    requests = [request(1, **sampling), request(2), request(3, temperature=1.5)]
    for each in requests:
        machine.add(each)
    generations = run(machine)
    for each in requests:
        assert_as_if_alone(each, generations[each.id])
    kept = generations["r1"].kept
    assert (kept is not None) == bool(sampling.get("keep_ids"))
    assert kept is None or all(
        token in ids and len(ids) == 3 for token, ids in zip(generations["r1"].tokens, kept, strict=True)
    )


def test_a_token_of_stop_ends_a_request_and_is_part_of_it() -> None:
    machine = batcher()
    whole = request(1, tokens_max=20)
    machine.add(whole)
    tokens = run(machine)["r1"].tokens
    stop = tokens[4]
    machine.add(request(1, tokens_max=20, stop=(stop,)))
    generation = run(machine)["r1"]
    assert generation.finish == "stop"
    assert generation.tokens == tokens[: tokens.index(stop) + 1]


def test_a_request_that_fills_the_context_ends_with_length() -> None:
    machine = batcher()
    sent = request(1, CONTEXT - 4, tokens_max=20)
    machine.add(sent)
    generation = run(machine)["r1"]
    assert (len(generation.tokens), generation.finish) == (4, "length")
    assert_as_if_alone(sent, generation)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("tokens", {"tokens": ()}),
        ("tokens", {"tokens": (1,) * CONTEXT}),
        ("tokens", {"tokens": (1, VOCABULARY)}),
        ("tokens", {"tokens": (-1, 1)}),
        ("seed", {"noise": SamplingSeed(seed=-1)}),
        ("id", {}),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_the_door(field: str, change: dict) -> None:
    machine = batcher()
    machine.add(request(1))
    sent = GenerationRequest(
        **({each: getattr(request(1), each) for each in GenerationRequest.__struct_fields__} | change)
    )
    with pytest.raises(InvalidAction) as refused:
        machine.add(sent if field == "id" else GenerationRequest(**{**_fields(sent), "id": "other"}))
    assert refused.value.field == field
    assert list(run(machine)) == ["r1"]


def _fields(sent: GenerationRequest) -> dict:
    return {each: getattr(sent, each) for each in GenerationRequest.__struct_fields__}


def test_broken_weights_are_reported_and_not_sampled_from() -> None:
    broken = Transformer.new(model(0).config, seed=0, dtype=torch.float64).requires_grad_(False)
    broken.norm[3] = float("nan")
    machine = batcher()
    machine.add(request(1))
    machine.step()
    machine.update(broken, 1)
    with pytest.raises(BrokenLogits):
        run(machine)


# ---- many requests ----


def test_more_requests_than_slots_are_served_in_their_order() -> None:
    machine = batcher(slots=2)
    requests = [request(number, 4 + number, tokens_max=5) for number in range(9)]
    for each in requests:
        machine.add(each)
    assert (machine.statistics().active, machine.statistics().waiting) == (0, 9)
    machine.step()
    assert (machine.statistics().active, machine.statistics().waiting) == (2, 7)
    generations = run(machine)
    assert sorted(generations) == sorted(each.id for each in requests)
    began = [
        number + generations[each.id].waiting_s for number, each in enumerate(requests)
    ]  # the clock ticks when it is read
    assert began[2:] == sorted(began[2:]) and max(began[:2]) < began[2]
    for each in requests:
        assert_as_if_alone(each, generations[each.id])


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    machine = batcher(chunk=4)
    machine.add(request(1, 3, tokens_max=30))
    machine.step()
    machine.add(request(2, 40, tokens_max=2))
    for _ in range(9):
        happened = machine.step()
        assert (happened.decoded, happened.prefilled) == (1, 4)


def test_short_prompts_are_read_together_within_a_chunk() -> None:
    machine = batcher(slots=4, chunk=12)
    for number in range(4):
        machine.add(request(number, 3))
    assert machine.step().prefilled == 12


def test_a_few_tokens_are_prefilled_together_with_decoding_requests() -> None:
    machine = batcher(slots=4)
    writing = [request(number, 1, tokens_max=20) for number in range(3)]
    for each in writing:
        machine.add(each)
    machine.step()
    sent = request(7, 4)
    machine.add(sent)
    assert [machine.step()[1:] for _ in range(4)] == [(1, 3), (1, 3), (1, 3), (0, 4)]
    generation = run(machine)["r7"]
    assert generation.prefilled == 4
    assert_as_if_alone(sent, generation)

    machine.add(request(8, 1, tokens_max=20))
    machine.step()
    machine.add(request(9, 4))
    assert machine.step()[1:] == (4, 1), "one that writes waits rather than one that reads for three steps"


def test_what_is_aborted_frees_its_slot_for_the_next() -> None:
    machine = batcher(slots=1)
    machine.add(request(1, tokens_max=30))
    machine.add(request(2))
    machine.add(request(3))
    run(machine, steps=4)
    assert machine.abort("r1")
    assert machine.abort("r3"), "one that waits can be aborted too"
    assert not machine.abort("r1")
    generations = run(machine)
    assert list(generations) == ["r2"]
    assert_as_if_alone(request(2), generations["r2"])
    assert (machine.statistics().active, machine.statistics().waiting) == (0, 0)


def test_while_suspended_requests_are_taken_but_nothing_is_written() -> None:
    machine = batcher()
    machine.add(request(1))
    run(machine, steps=3)
    machine.suspend()
    machine.add(request(2))
    assert not machine.busy
    assert (machine.statistics().active, machine.statistics().waiting) == (1, 1)
    machine.resume()
    generations = run(machine)
    assert sorted(generations) == ["r1", "r2"]
    assert machine.statistics().suspended_s > 0.0


def test_the_tokens_so_far_are_returned_once() -> None:
    machine = batcher()
    machine.add(request(1, 3, tokens_max=9))
    partials = []
    while machine.busy:
        done = dict(machine.step().done)
        if len(partials) % 2:
            partials += machine.take_deltas()
        else:
            partials += [None]
    parts = [each for each in partials if each is not None]
    tokens = tuple(token for each in parts for token in each.tokens)
    assert tokens == done["r1"].tokens[: len(tokens)] and len(tokens) >= 7
    assert tuple(logprob for each in parts for logprob in each.logprobs) == done["r1"].logprobs[: len(tokens)]


# ---- sessions ----


def test_the_next_request_of_a_session_reads_only_what_is_new() -> None:
    machine = batcher()
    first = request(1, session="s")
    machine.add(first)
    generation = run(machine)["r1"]
    more = first.tokens + generation.tokens + (3, 1, 4)
    second = GenerationRequest(id="r2", session="s", tokens=more, sampling=first.sampling, noise=first.noise)
    machine.add(second)
    again = run(machine)["r2"]
    # The last token that was written has never been read.
    assert (again.reused, again.prefilled) == (len(more) - 4, 4)
    assert_as_if_alone(second, again)


def test_a_session_that_went_another_way_keeps_what_both_begin_with() -> None:
    machine = batcher()
    first = request(1, session="s")
    machine.add(first)
    run(machine)
    second = GenerationRequest(
        id="r2",
        session="s",
        tokens=(*first.tokens[:7], (first.tokens[7] + 1) % VOCABULARY, 2, 2),
        sampling=first.sampling,
        noise=first.noise,
    )
    machine.add(second)
    again = run(machine)["r2"]
    assert again.reused == 7
    assert_as_if_alone(second, again)


def test_the_same_request_again_reads_its_last_token() -> None:
    machine = batcher()
    machine.add(request(1, session="s"))
    first = run(machine)["r1"]
    machine.add(request(1, session="s"))
    again = run(machine)["r1"]
    assert (again.reused, again.tokens) == (9, first.tokens)
    assert_as_if_alone(request(1, session="s"), again)


def test_slots_of_sessions_are_reused_least_recently_used_first() -> None:
    machine = batcher(slots=2)
    for number in (1, 2):
        machine.add(request(number, session=f"s{number}"))
        run(machine)
    assert machine.statistics().resident > 0
    machine.add(request(3, session="s3"))  # takes the slot of s1
    assert_as_if_alone(request(3), run(machine)["r3"])
    machine.add(request(2, session="s2"))
    again = run(machine)["r2"]
    assert again.reused == 9
    assert_as_if_alone(request(2), again)
    machine.add(request(1, session="s1"))
    first = run(machine)["r1"]
    assert first.reused == 0
    assert_as_if_alone(request(1), first)


def test_more_sessions_than_slots_keep_what_was_read() -> None:
    """Turn after turn, each session comes back when all others have been served in its slot."""
    machine = batcher(slots=2, sessions=5)
    texts = {f"s{number}": request(number, 8).tokens for number in range(6)}
    for turn in range(4):
        requests = [
            GenerationRequest(
                id=name, session=name, tokens=text, sampling=Sampling(tokens_max=2), noise=SamplingSeed(seed=turn)
            )
            for name, text in texts.items()
        ]
        for each in requests:
            machine.add(each)
        generations = run(machine)
        for each in requests:
            generation = generations[each.id]
            assert_as_if_alone(each, generation)
            assert generation.prefilled == (4 if turn else 8)
            texts[each.id] = each.tokens + generation.tokens + (turn, 1, 2)


def test_of_the_sessions_that_are_kept_the_longest_unused_one_goes_first() -> None:
    machine = batcher(slots=1, sessions=2)
    for number in (1, 2, 3, 1, 4):  # 2 is the one that was left first, and has no place
        machine.add(request(number, session=f"s{number}"))
        run(machine)
    reused = {}
    for number in (4, 3, 1, 2):
        machine.add(request(number, session=f"s{number}"))
        generation = run(machine)[f"r{number}"]
        reused[number] = generation.reused
        assert_as_if_alone(request(number), generation)
    assert reused == {4: 9, 3: 9, 1: 9, 2: 0}


def test_what_is_kept_is_void_after_an_update() -> None:
    machine = batcher(slots=1, sessions=2)
    for number in (1, 2, 3):
        machine.add(request(number, session=f"s{number}"))
        run(machine)
    machine.update(model(1), 1)
    assert machine.statistics().resident == 0
    for number in (1, 2, 3):
        machine.add(request(number, session=f"s{number}"))
        generation = run(machine)[f"r{number}"]
        assert generation.reused == 0
        assert_as_if_alone(request(number), generation)


def test_two_requests_of_a_session_at_once_do_not_share_a_slot() -> None:
    machine = batcher()
    machine.add(request(1, session="s"))
    run(machine)
    machine.add(request(2, session="s"))
    machine.add(request(1, session="s"))
    generations = run(machine)
    for number in (1, 2):
        assert_as_if_alone(request(number), generations[f"r{number}"])


def test_what_an_aborted_request_had_read_stays_for_its_session() -> None:
    machine = batcher(chunk=4)
    machine.add(request(1, 20, session="s"))
    run(machine, steps=3)
    machine.abort("r1")
    machine.add(request(1, 20, session="s"))
    again = run(machine)["r1"]
    assert again.reused == 12
    assert_as_if_alone(request(1, 20), again)


# ---- new weights ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("before", [0, 1, 2, 5])
def test_a_continuation_after_an_update_equals_a_fresh_prefill_under_the_new_weights(
    before: int, dtype: torch.dtype
) -> None:
    machine = batcher(dtype=dtype)
    sent = request(1, 12, tokens_max=10)
    machine.add(sent)
    run(machine, steps=1 + before)  # one to read the first chunk
    machine.update(model(1, dtype), 1)
    generation = run(machine)["r1"]
    old = generation.versions.count(0)
    assert generation.versions == (0,) * old + (1,) * (10 - old) and old == before
    assert generation.prefilled == (12 + old + (12 if old else 8))
    assert_as_if_alone(sent, generation, dtype)

    fresh = batcher(dtype=dtype)
    fresh.update(model(1, dtype), 1)
    fresh.add(
        GenerationRequest(
            id="fresh",
            tokens=sent.tokens + generation.tokens[:old],
            sampling=Sampling(tokens_max=10 - old),
            noise=sent.noise,
        )
    )
    alone = run(fresh)["fresh"]
    assert alone.tokens == generation.tokens[old:]
    assert alone.logprobs == pytest.approx(generation.logprobs[old:], abs=TOLERANCE[dtype])


def test_nothing_that_was_read_under_old_weights_is_used_again() -> None:
    machine = batcher()
    machine.add(request(1, session="s"))
    run(machine)
    machine.update(model(1), 1)
    assert machine.statistics().resident == 0
    machine.add(request(1, session="s"))
    generation = run(machine)["r1"]
    assert (generation.reused, set(generation.versions)) == (0, {1})
    assert_as_if_alone(request(1), generation)


OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 9), st.sampled_from(["", "a", "b", "c"])),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.sampled_from([("update",), ("suspend",), ("resume",)]),
)


@settings(max_examples=60)
@given(
    operations=st.lists(OPERATIONS, min_size=3, max_size=25),
    slots=st.integers(1, 4),
    sessions=st.integers(0, 3),
    chunk=st.integers(1, 9),
    deterministic=st.booleans(),
)
def test_every_request_ends_once_with_what_it_would_have_got_alone(
    operations: list, slots: int, sessions: int, chunk: int, deterministic: bool
) -> None:
    machine = batcher(slots=slots, sessions=sessions, chunk=chunk, deterministic=deterministic)
    requests: dict[str, GenerationRequest] = {}
    aborted: set[str] = set()
    generations: dict[str, Generation] = {}
    version = 0
    for operation in operations:
        match operation:
            case ("add", count, tokens_max, session):
                made = request(len(requests), count, tokens_max=tokens_max, session=session, temperature=1.3)
                requests[made.id] = made
                machine.add(made)
            case ("abort", number):
                id = f"r{number}"
                if machine.abort(id):
                    assert id not in generations and id not in aborted
                    aborted.add(id)
            case ("step", count):
                generations |= run(machine, steps=count)
            case ("update",):
                version += 1
                machine.update(model(version % 3), version % 3)
            case ("suspend",):
                machine.suspend()
            case ("resume",):
                machine.resume()
        machine.check()
    machine.resume()
    for id, generation in run(machine).items():
        assert id not in generations
        generations[id] = generation
    assert set(generations) == set(requests) - aborted
    assert machine.statistics().active == machine.statistics().waiting == 0
    for id, generation in generations.items():
        assert_as_if_alone(requests[id], generation)


# ---- to the last bit ----


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 7, 8, 16])
def test_deterministic_writing_does_not_depend_on_neighbours_order_or_slot(slots: int) -> None:
    options = {"dtype": torch.float32, "slots": slots, "chunk": 8, "deterministic": True}
    watched = request(1, 19, tokens_max=12, session="s")
    machine = batcher(**options)
    machine.add(watched)
    alone = _bits(run(machine)["r1"])
    for position in range(slots):
        machine = batcher(**options)
        for number in range(2, 2 + position):
            machine.add(request(number, 3 + 5 * (number % 6), tokens_max=30))
        run(machine, steps=2 * position)
        machine.add(watched)
        generations = run(machine, steps=3)
        for number in range(40, 40 + slots):
            machine.add(request(number, 1 + number % 7, tokens_max=4, session="s"))
        generations |= run(machine, steps=3)
        if position:
            machine.abort("r2")
        generations |= run(machine)
        assert _bits(generations["r1"]) == alone, f"with {position} before it"


def test_deterministic_writing_reads_everything_again_rather_than_what_a_neighbour_may_have_displaced() -> None:
    machine = batcher(deterministic=True)
    machine.add(request(1, session="s"))
    run(machine)
    machine.add(request(1, session="s"))
    assert run(machine)["r1"].reused == 0


def _bits(generation: Generation) -> tuple[tuple[int, ...], tuple[str, ...]]:
    return generation.tokens, tuple(logprob.hex() for logprob in generation.logprobs)


# ---- emulated hardware, and what it took ----


def test_emulated_hardware_takes_at_least_the_configured_time() -> None:
    paced: list[tuple[float, float]] = []

    def pace(took_s: float, least_s: float) -> float:
        paced.append((took_s, least_s))
        return max(took_s, least_s)

    machine = batcher(now=lambda: 0.0, pace=pace, prefill_s_per_token=2.0, decode_s_per_step=7.0)
    machine.add(request(1, 10, tokens_max=3))
    generation = run(machine)["r1"]
    assert paced == [(0.0, 16.0), (0.0, 4.0), (0.0, 7.0), (0.0, 7.0)]
    assert (generation.prefill_s, generation.decode_s, generation.prefilled) == (20.0, 14.0, 10)
    known = machine.statistics()
    assert (known.prefill_s, known.decode_s, known.steps) == (20.0, 14.0, 4)
    assert (known.prefill_tokens, known.decode_tokens) == (10, 2)
