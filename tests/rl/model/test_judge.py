"""The judge: trained once, kept, examined whenever it starts."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.fork_servers import Pool, pooled_for_models

from tangram import Emulated, Service, Status, connect
from tangram.errors import InvalidAction, InvalidConfig, ManagerError
from tangram.processes import child
from tangram.processes.fork_server import ForkServer
from tangram.rl.environments import lookup_judge
from tangram.rl.environments.lookup_judge import (
    JudgeSettings,
    cache_folder,
    cache_path,
    ensure_judge,
    load_cached,
    store_cached,
)

torch = pytest.importorskip("torch") if os.environ.get("CI") != "true" else __import__("torch")

from tangram.rl.model import judge as judge_module  # noqa: E402
from tangram.rl.model.judge import NameJudge, NamePairs, answer_payloads, load_or_train, train  # noqa: E402

DEADLINE_S = 300.0
GROUPS = tuple(tuple(f"{letter}{number}" for number in range(6)) for letter in "abcd")
TINY = JudgeSettings(groups=GROUPS, width=32, batch=64, steps_max=600)


@pytest.fixture(scope="module", autouse=True)
def _fork_servers(fork_server_pool: Pool) -> Iterator[None]:
    with pooled_for_models(fork_server_pool):
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tiny judge in it."""
    folder = tmp_path_factory.mktemp("judges")
    torch.set_num_threads(1)
    load_or_train(TINY, folder)
    return folder


def ask(judge: NameJudge, given: str, expected: str) -> dict[str, float]:
    [answer] = answer_payloads(judge, [json.dumps({"given": given, "expected": expected}).encode()])
    answered: dict[str, float] = json.loads(answer)
    return answered


def test_the_judge_matches_pairs_beyond_its_training_set(folder: Path) -> None:
    judge, pairs = load_or_train(TINY, folder), NamePairs(TINY)
    assert pairs.accuracy(judge) >= 0.99
    names = [name for group in GROUPS for name in group]
    for different, same in zip(*pairs.held_out_pairs, strict=False):
        assert ask(judge, *(names[at] for at in same))["score"] == 1.0
        assert ask(judge, *(names[at] for at in different))["score"] == 0.0
    answer = ask(judge, "a0", "a1")
    assert answer["score"] == 1.0 and 0.5 < answer["probability"] <= 1.0


def test_no_pair_is_both_taught_and_held_out() -> None:
    pairs = NamePairs(TINY)
    taught, held_out = (
        {tuple(p) for part in parts for p in part.tolist()} for parts in (pairs.training_pairs, pairs.held_out_pairs)
    )
    assert not taught & held_out and len(taught | held_out) == 24 * 24
    assert all(len(part) for part in pairs.held_out_pairs)


def test_the_same_settings_make_the_same_judge() -> None:
    few = msgspec.structs.replace(TINY, steps_max=20)
    one, other = train(few).state_dict(), train(few).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_one_that_does_not_pass_refuses_to_start_and_is_not_kept(tmp_path: Path) -> None:
    lazy = msgspec.structs.replace(TINY, steps_max=1)
    with pytest.raises(ManagerError, match=r"right about 0\.\d+ of the pairs of names, and 0\.99 are needed"):
        load_or_train(lazy, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_kept_is_examined_as_well(tmp_path: Path, folder: Path) -> None:
    """However it got there: here, that of other settings under this name, with a seal that fits."""
    lazy = msgspec.structs.replace(TINY, seed=7, steps_max=1)
    content = load_cached(folder, TINY)
    assert content is not None
    store_cached(tmp_path, lazy, content)
    load_or_train(lazy, tmp_path)  # which is a good judge
    state = torch.load(io.BytesIO(content), weights_only=True)
    state["transformer.embedding"].zero_()
    spoilt = io.BytesIO()
    torch.save(state, spoilt)
    store_cached(tmp_path, lazy, spoilt.getvalue())
    with pytest.raises(ManagerError, match="it would reward wrong answers"):
        load_or_train(lazy, tmp_path)


def test_a_cached_judge_is_used_and_a_damaged_one_is_retrained(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = load_cached(folder, TINY)
    assert content is not None
    store_cached(tmp_path, TINY, content)
    trained = []
    monkeypatch.setattr(judge_module, "train", lambda *_: trained.append(1) or train(TINY))
    load_or_train(TINY, tmp_path)
    assert trained == []
    path = cache_path(tmp_path, TINY)
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:100] + b"x" + whole[101:], b"no judge at all"):
        path.write_bytes(damaged)
        assert load_cached(tmp_path, TINY) is None
    load_or_train(TINY, tmp_path)
    assert trained == [1] and load_cached(tmp_path, TINY) is not None
    store_cached(tmp_path, TINY, b"a file of a transformer that was made otherwise")
    load_or_train(TINY, tmp_path)
    assert trained == [1, 1]
    assert [each.name for each in tmp_path.iterdir()] == [path.name], "no part of a file is left"


def test_a_file_is_that_of_its_settings(folder: Path) -> None:
    others = [{"seed": 2}, {"width": 64}, {"groups": GROUPS[:3]}, {"accuracy_min": 0.5}]
    paths = {cache_path(folder, TINY)} | {cache_path(folder, msgspec.structs.replace(TINY, **each)) for each in others}
    assert len(paths) == 5
    other = msgspec.structs.replace(TINY, seed=2)
    cache_path(folder, other).write_bytes(cache_path(folder, TINY).read_bytes())
    assert load_cached(folder, other) is None
    cache_path(folder, other).unlink()


def test_the_folder_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "tangram" / "judges"
    for odd in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", odd)
        assert cache_folder() == Path.home() / ".cache" / "tangram" / "judges"


def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ManagerError, match=r"cannot be kept in .*XDG_CACHE_HOME names another folder"):
        store_cached(tmp_path / "file", TINY, b"")


@pytest.mark.parametrize("groups", [(("a", "b"),), (("a",), ("a",))])
def test_settings_that_cannot_be_meant_are_refused(groups: Any) -> None:
    with pytest.raises(InvalidConfig, match="at least two entities, and each name once"):
        JudgeSettings(groups=groups)


# ---- the process that trains ----


def within(doing: Any) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(DEADLINE_S):
            return await doing

    return asyncio.run(main())


@pytest.mark.slow
def test_training_happens_once_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_judge, "QUIET_S", 0.0)
    messages: list[tuple[float, str]] = []

    async def main() -> None:
        await asyncio.gather(
            ensure_judge(TINY, tmp_path, lambda *said: messages.append(said)),
            ensure_judge(TINY, tmp_path, lambda *_: None),
        )

    within(main())
    assert messages and messages == sorted(messages) and "accuracy" in messages[-1][1]
    assert load_cached(tmp_path, TINY) is not None and len(list(tmp_path.iterdir())) == 1
    messages.clear()
    within(ensure_judge(TINY, tmp_path, lambda *said: messages.append(said)))
    assert messages == []


def test_an_error_in_the_process_is_raised_here(tmp_path: Path) -> None:
    lazy = msgspec.structs.replace(TINY, steps_max=1)
    with pytest.raises(ManagerError, match="cannot be trained: the judge is right about"):
        within(ensure_judge(lazy, tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that trains is a child of this one, as in any run."""
    monkeypatch.setattr(child, "DISABLED_FORK_SERVER", ForkServer())


@pytest.mark.usefixtures("executed")
def test_cancelling_ends_the_training(tmp_path: Path) -> None:
    long = msgspec.structs.replace(TINY, steps_max=10_000_000, accuracy_min=1.0, rate=1e-9)

    async def main() -> None:
        before = own_children()
        training = asyncio.create_task(ensure_judge(long, tmp_path))
        while own_children() == before:  # noqa: ASYNC110 - another process appears
            await asyncio.sleep(0.01)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        assert own_children() == before

    within(main())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("executed")
def test_a_training_that_is_killed_is_an_error(tmp_path: Path) -> None:
    long = msgspec.structs.replace(TINY, steps_max=10_000_000, accuracy_min=1.0, rate=1e-9)

    async def main() -> None:
        before = own_children()
        training = asyncio.create_task(ensure_judge(long, tmp_path))
        while not (new := own_children() - before):  # noqa: ASYNC110 - another process appears
            await asyncio.sleep(0.01)
        os.kill(new.pop(), signal.SIGKILL)
        with pytest.raises(ManagerError, match="cannot be trained: it ended with signal 9"):
            await training

    within(main())


def own_children() -> set[int]:
    return set(map(int, Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()))


# ---- the service ----


def service(settings: JudgeSettings, folder: Path) -> Service:
    arguments = {"settings": msgspec.to_builtins(settings), "folder": str(folder)}
    return Service(name="judge", engine="tangram.rl.model.judge:JudgeEngine", arguments=arguments)


def test_it_answers_as_a_service_and_refuses_what_it_does_not_know(tmp_path: Path, folder: Path) -> None:
    async def main() -> None:
        options: dict[str, Any] = dict(
            backend="process", state=tmp_path / "state", devices=[Emulated(memory_bytes=1 << 20)]
        )
        async with connect(services=[service(TINY, folder)], **options) as client:
            cases = [("a0", "a5", 1.0), ("a0", "b0", 0.0), ("c3", "c3", 1.0), ("d1", "a1", 0.0)] * 8
            results = await client.gather(
                *(client.infer("judge", {"given": one, "expected": other}) for one, other, _ in cases)
            )
            assert [each.json()["score"] for each in results] == [right for _, _, right in cases]
            for wrong in (
                {"given": "a0", "expected": "unknown"},
                {"given": "a0"},
                [],
                "text",
                {"given": 1, "expected": []},
            ):
                with pytest.raises(InvalidAction, match="payload"):
                    await client.infer("judge", wrong)
            assert (await client.infer("judge", {"given": "a0", "expected": "a1"})).status is Status.SUCCEEDED

    within(main())


def test_a_service_whose_judge_fails_its_test_does_not_start(tmp_path: Path) -> None:
    async def main() -> None:
        lazy = msgspec.structs.replace(TINY, steps_max=1)
        devices = [Emulated(memory_bytes=1 << 20)]
        with pytest.raises(ManagerError, match=r"service judge cannot be prepared: .*0\.99 are needed"):
            async with connect(
                backend="process", state=tmp_path / "state", services=[service(lazy, tmp_path)], devices=devices
            ):
                raise AssertionError("it started")

    within(main())


def test_naming_the_service_does_not_import_torch() -> None:
    code = "import sys; from tangram.rl.environments import lookup; sys.exit('torch' in sys.modules)"

    async def main() -> int:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
        return await process.wait()

    assert within(main()) == 0
