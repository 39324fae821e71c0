"""Weights that are read while an engine writes with others: by a thread in its process."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch
from tests.rl.inference.engines.test_process import CONTEXT, SLOW, in_process, model, request, run, settings
from tests.rl.processes import until

from tangram.errors import ManagerError
from tangram.rl.inference.engines.messages import Fetched, UpdateFailed
from tangram.rl.inference.engines.process import ProcessEngine
from tangram.rl.inference.engines.protocol import EngineDied, PolicyWeights
from tangram.rl.model import weight_fetcher
from tangram.rl.model.transformer import Transformer
from tangram.rl.model.weight_fetcher import WeightFetcher
from tangram.rl.model.weight_store import prune_versions, publish, pull_incrementally


@pytest.fixture
def published(tmp_path: Path) -> list[PolicyWeights]:
    return [publish(model(version), model(version).config, tmp_path / "published", version) for version in (0, 1)]


def stuck(weights: PolicyWeights, folder: Path, version: int = 7) -> PolicyWeights:
    """A version whose reading waits until the other end is opened."""
    path = folder / f"{version:08d}"
    shutil.copytree(weights.folder, path)
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"version":{weights.version}', f'"version":{version}'))
    [bucket] = path.glob("*.bucket")
    bucket.unlink()
    os.mkfifo(bucket)
    return PolicyWeights(version=version, folder=str(path))


def open_up(weights: PolicyWeights) -> None:
    """Release the reader, which reads nothing."""
    [bucket] = Path(weights.folder).glob("*.bucket")
    os.close(os.open(bucket, os.O_WRONLY))


# ---- in the engine's process ----


def test_it_writes_while_it_fetches_and_what_it_writes_is_what_it_would_have_written(
    published: list[PolicyWeights], tmp_path: Path
) -> None:
    engine = ProcessEngine(settings(**SLOW))
    slow = stuck(published[1], tmp_path)

    async def test() -> None:
        fetch = asyncio.create_task(engine.fetch(slow))
        generation = await engine.generate(request(1, tokens_max=20))
        assert (generation.tokens, set(generation.versions)) == (in_process(request(1, tokens_max=20)), {0})
        assert not fetch.done()
        open_up(slow)
        with pytest.raises(ManagerError, match=r"keeps its weights: version 7.*expected \d+ bytes, got 0") as failed:
            await fetch
        assert not isinstance(failed.value, EngineDied)
        assert (await engine.generate(request(2))).tokens == in_process(request(2))

    run(engine, published[0], test)


def test_what_was_fetched_is_taken_by_the_update_and_not_before(published: list[PolicyWeights]) -> None:
    engine = ProcessEngine(settings(**SLOW), dtype="float64")

    async def test() -> None:
        going = asyncio.create_task(engine.generate(request(1, tokens_max=40)))
        await until(lambda: engine.statistics().steps > 4)
        await engine.fetch(published[1])
        shutil.rmtree(published[1].folder)  # nothing of it is read any more
        assert set((await engine.generate(request(2, tokens_max=3))).versions) == {0}
        await engine.suspend()
        await engine.update(published[1])
        await engine.resume()
        generation = await going
        old = generation.versions.count(0)
        assert generation.versions == (0,) * old + (1,) * (40 - old) and 0 < old < 40
        assert generation.prefilled == 5 + 5 + old
        after = await engine.generate(request(3))
        assert (after.tokens, set(after.versions)) == (in_process(request(3), 1), {1})
        await until(lambda: engine.statistics().version == 1)
        assert engine.statistics().update_s > 0.0

    run(engine, published[0], test)


def test_a_failed_fetch_keeps_the_old_weights_and_reports_why(published: list[PolicyWeights], tmp_path: Path) -> None:
    engine = ProcessEngine(settings())
    damaged = publish(model(1), model(1).config, tmp_path, 5)
    bucket = next(Path(damaged.folder).glob("*.bucket"))
    content = bytearray(bucket.read_bytes())
    content[100] ^= 1
    bucket.write_bytes(content)
    broken = Transformer.new(model(0).config, seed=3).requires_grad_(False)
    broken.norm[0] = float("nan")

    async def test() -> None:
        for bad, reason in (
            (damaged, "checksum"),
            (PolicyWeights(version=9, folder=str(tmp_path / "nowhere")), "No such file"),
            (publish(broken, broken.config, tmp_path, 6), "not finite"),
        ):
            with pytest.raises(ManagerError, match=reason) as failed:
                await engine.fetch(bad)
            assert not isinstance(failed.value, EngineDied)
            with pytest.raises(ManagerError, match=reason):
                await engine.update(bad)
            assert (await engine.generate(request(1))).tokens == in_process(request(1))
        await engine.fetch(published[1])
        await engine.update(published[1])
        assert (await engine.generate(request(1))).tokens == in_process(request(1), 1)

    run(engine, published[0], test)


def test_killed_half_way_through_a_fetch_it_has_died_and_starts_with_the_newest(
    published: list[PolicyWeights], tmp_path: Path
) -> None:
    engine = ProcessEngine(settings(**SLOW))
    slow = stuck(published[1], tmp_path)

    async def test() -> None:
        fetch = asyncio.create_task(engine.fetch(slow))
        going = asyncio.create_task(engine.generate(request(1, tokens_max=50)))
        await until(lambda: engine.statistics().steps > 4)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="signal 9"):
            await fetch
        with pytest.raises(EngineDied, match="signal 9"):
            await going
        await engine.start(published[1])
        assert (await engine.generate(request(1))).tokens == in_process(request(1), 1)

    run(engine, published[0], test)


def test_a_fetch_that_hangs_is_noticed(published: list[PolicyWeights], tmp_path: Path) -> None:
    engine = ProcessEngine(settings(), hang_s=5.0)

    async def test() -> None:
        with pytest.raises(EngineDied, match="sent nothing for"):
            await engine.fetch(stuck(published[1], tmp_path))

    run(engine, published[0], test)


def test_closing_does_not_wait_for_a_fetch(published: list[PolicyWeights], tmp_path: Path) -> None:
    engine = ProcessEngine(settings())

    async def test() -> None:
        fetch = asyncio.create_task(engine.fetch(stuck(published[1], tmp_path)))
        await engine.generate(request(1))
        await engine.close()
        with pytest.raises(EngineDied, match="closed"):
            await fetch

    run(engine, published[0], test)


# ---- the thread ----


class Recorder:
    def __init__(self) -> None:
        self.answers: list[msgspec.Struct] = []

    def __call__(self, answer: msgspec.Struct) -> None:
        self.answers.append(answer)

    async def until(self, count: int) -> list[msgspec.Struct]:
        await until(lambda: len(self.answers) >= count)
        return self.answers


def fetcher(recorder: Recorder) -> WeightFetcher:
    return WeightFetcher(model(0).config, torch.float32, recorder, heartbeat_s=60.0)


def weights_of(model: Transformer) -> list[torch.Tensor]:
    return [each.clone() for each in model.state_dict().values()]


def same(one: Transformer, other: Transformer) -> bool:
    return all(torch.equal(*pair) for pair in zip(weights_of(one), weights_of(other), strict=True))


def test_the_newer_of_two_fetches_wins_and_the_older_reports_it(
    published: list[PolicyWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, reached = Recorder(), threading.Event()

    def slowly(weights, into):
        for _ in pull_incrementally(weights, into):
            reached.set()
            yield
            while weights.version == 0:  # until the fetcher takes no more of it
                time.sleep(0.01)
                yield

    monkeypatch.setattr(weight_fetcher, "pull_incrementally", slowly)
    fetched = fetcher(recorder)
    fetched.begin(1, published[0])
    assert reached.wait(60.0)
    fetched.begin(2, published[1])
    first, second = asyncio.run(recorder.until(2))
    assert isinstance(first, UpdateFailed) and first.request_id == 1 and "a later version was requested" in first.reason
    assert second == Fetched(request_id=2, version=1)
    assert same(fetched.swap(published[1], model(0)), model(1))


def test_there_are_never_more_than_two_sets_of_weights(published: list[PolicyWeights]) -> None:
    recorder = Recorder()
    fetched = fetcher(recorder)
    first = Transformer.new(model(0).config, seed=9).requires_grad_(False)
    fetched.begin(1, published[1])
    second = fetched.swap(published[1], first)
    assert same(second, model(1))
    fetched.begin(2, published[0])
    third = fetched.swap(published[0], second)
    assert third is first and same(third, model(0))
    assert same(fetched.swap(published[1], third), model(1)), "what was not fetched is read at once"


def test_a_version_that_is_forgotten_while_it_is_fetched_is_had_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [
        publish(model(version), model(version).config, tmp_path, version, bucket_bytes=2000) for version in (0, 1)
    ]
    monkeypatch.setattr("tangram.rl.model.weight_store.CHUNK_BYTES", 500)
    into = Transformer.new(model(0).config, seed=9).requires_grad_(False)
    reading = pull_incrementally(weights[0], into)
    next(reading)
    assert [each.version for each in prune_versions(tmp_path, keep=1)] == [0]
    assert len(list(reading)) > 10
    assert same(into, model(0))
    before = weights_of(into)
    with pytest.raises(ManagerError, match="No such file"):
        list(pull_incrementally(weights[0], into))
    assert all(map(torch.equal, weights_of(into), before))
    assert model(0).config.context_max == CONTEXT
