"""What cannot be meant is refused at once, with the name of the argument and what was expected."""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from tangram.client.client import Client, connect
from tangram.client.sync import connect_sync
from tangram.client.transport import Pending
from tangram.core.action import Action
from tangram.core.demand import CPU
from tangram.errors import FileFailed, InvalidAction, InvalidConfig, InvalidInput, ManagerError

Connected = Callable[..., None]


class Listener:
    async def __call__(self, stream: str, data: bytes) -> None: ...


async def listen(stream: str, data: bytes) -> None: ...


ARGUMENTS: dict[str, tuple[Callable[[Any], Awaitable[object]], str]] = {
    "no command": (lambda box: box.exec(None), "command: expected a string, .* or a list of words, got None"),
    "a number as command": (lambda box: box.exec(5), "command: .* got 5"),
    "bytes as command": (lambda box: box.exec(b"ls"), "command: .* got b'ls'"),
    "a number as word": (lambda box: box.exec(["ls", 5]), r"command: .* got \('ls', 5\)"),
    "words in a session": (lambda box: box.session().exec(["ls"]), "command: expected a string"),
    "a list as env": (lambda box: box.exec("true", env=["A=1"]), r"env: expected variables by name, .* \['A=1'\]"),
    "a number as cwd": (lambda box: box.exec("true", cwd=5), "cwd: expected a path: text, or a Path, got 5"),
    "a number as stdin": (lambda box: box.exec("true", stdin=5), "stdin: expected text or bytes, got 'int'"),
    "half a character": (lambda box: box.exec("true", stdin="\ud800"), "stdin: expected text that is UTF-8, or bytes"),
    "too much to capture": (lambda box: box.exec("true", capture="2GiB"), "capture: .* at most 1 GiB, got '2GiB'"),
    "a range upside down": (lambda box: box.exec("true", cpus=(2, 1)), r"cpus: .* got \(2, 1\)"),
    "no cores": (lambda box: box.start("true", cpus=0), "cpus: .* got 0"),
    "a number that listens": (lambda box: box.exec("true", on_output=5), "on_output: expected a plain function"),
    "a coroutine that listens": (lambda box: box.exec("true", on_output=listen), "on_output: expected a plain"),
    "a part of one": (lambda box: box.start("true", on_output=functools.partial(listen, "x")), "on_output: expected"),
    "an object with one": (lambda box: box.session().exec("true", on_output=Listener()), "on_output: expected"),
    "a number as content": (lambda box: box.write("x", 5), "content: expected text or bytes, got 'int'"),
    "text as mode": (lambda box: box.write("x", "", mode="755"), "mode: expected permissions .* got '755'"),
    "a number as path": (lambda box: box.read(5), "path: expected a path: text, or a Path, got 5"),
    "bytes as path": (lambda box: box.list(b"."), "path: expected a path"),
    "a number to upload": (lambda box: box.upload(5), "source: expected a path"),
    "a number to download to": (lambda box: box.download("x", 5), "target: expected a path"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_argument_that_cannot_be_meant_is_named(plain: Connected, case: str) -> None:
    call, says = ARGUMENTS[case]

    async def test(t: Client) -> None:
        async with t.sandbox() as box:
            with pytest.raises(InvalidAction, match=says):
                await call(box)
            assert (await box.exec("echo fine")).stdout == "fine\n"

    plain(test)


def test_a_target_that_is_a_file_is_refused(plain: Connected, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    async def test(t: Client) -> None:
        async with t.sandbox() as box:
            await box.write("a", "1")
            with pytest.raises(FileFailed, match="is not a writable directory"):
                await box.download("a", tmp_path / "file")

    plain(test)


def test_paths_may_be_objects_and_content_anything_of_bytes(plain: Connected, tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox() as box:
            await box.write(Path("sub/a"), bytearray(b"one"))
            await box.write(PurePosixPath("sub") / "b", memoryview(b"two"))
            assert await box.read(Path("sub/a")) + (await box.read_text(Path("sub/b"))).encode() == b"onetwo"
            assert [entry.name for entry in await box.list(Path("sub"))] == ["a", "b"]
            assert (await box.exec("cat a", cwd=Path("sub"))).stdout == "one"
            for content in ("said", b"said", bytearray(b"said"), memoryview(b"said")):
                assert (await box.exec("cat", stdin=content)).stdout == "said"
            assert await box.download(Path("sub"), tmp_path / "out") == tmp_path / "out" / "sub"
            await box.delete(Path("sub"))
            assert await box.list() == []

    plain(test)


def test_a_range_may_be_a_list(plain: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox() as box:
            assert (await box.exec("echo {cpus}", cpus=[1, 1])).stdout == "1\n"

    plain(test)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"memory": "1MiB"}, "memory: .* at least 4 MiB, got '1MiB'"),
        ({"disk": 5}, "disk: .* at least 64 KiB, got 5"),
        ({"env": ["A=1"]}, "env: expected variables by name"),
        ({"image": Path("x.tar")}, r"image: expected an Image, or the name of one; t\.image\(\) creates one"),
    ],
)
def test_a_sandbox_that_cannot_be_meant_is_refused(plain: Connected, options: dict[str, Any], says: str) -> None:
    async def test(t: Client) -> None:
        with pytest.raises(InvalidAction, match=says):
            t.sandbox(**options)

    plain(test)


def test_images_that_cannot_be_meant_are_refused(plain: Connected) -> None:
    async def test(t: Client) -> None:
        with pytest.raises(InvalidAction, match=r"setup: expected a list of commands, such as \['make'\], got 'make'"):
            await t.image(setup="make")
        with pytest.raises(InvalidAction, match="setup: expected a list of commands"):
            await t.image(setup=[["make"]])  # type: ignore[list-item]
        with pytest.raises(InvalidAction, match="base: expected an Image"):
            await t.image(base=5)  # type: ignore[arg-type]
        with pytest.raises(InvalidAction, match="source: expected a path"):
            await t.image(5)  # type: ignore[arg-type]
        with pytest.raises(InvalidAction, match="image: expected an Image"):
            await t.forget(5)  # type: ignore[arg-type]
        with pytest.raises((InvalidInput, ManagerError), match="x"):
            await t.forget("x")

    plain(test)


def test_no_image_is_committed_under_the_name_of_the_machine(plain: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            with pytest.raises(InvalidAction, match="image: expected another name: 'host'"):
                await box.commit("host")
            assert (await box.commit("mine")).name == "mine"

    plain(test)


def test_an_image_may_be_forgotten_by_its_name(plain: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox() as box:
            image = await box.commit("mine")
        assert await t.image(base="mine") == image
        await t.forget("mine")

    plain(test)


# ---- the connection -----------------------------------------------------------------------------------------------

MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"backend": "nosuch"}, "backend"),
        ({"url": "ftp://x"}, "url"),
        ({"url": "http://x", "cores": 2}, "cores"),
        ({"token": "x"}, "token"),
        ({"warm": -1}, "warm"),
        ({"warm": 1, "backend": "process"}, "warm"),
        ({"cores": 0}, "cores"),
        ({"cores": "2"}, "cores"),
        ({"cores": True}, "cores"),
        ({"cores": float("nan")}, "cores"),
        ({"limits": 5}, "limits"),
        ({"memory": "much"}, "memory"),
        ({"memory": 5}, "memory"),
        ({"memory": MEMORY_BYTES + 1}, "memory"),
        ({"state": 5}, "state"),
        ({"record": 5}, "record"),
        ({"record": "/etc"}, "record"),
        ({"record": "/dev/null/trace.jsonl"}, "record"),
    ],
)
@pytest.mark.parametrize("how", [connect, connect_sync])
def test_a_connection_that_cannot_be_meant_is_refused(
    how: Callable[..., object], options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        how(**options)
    assert caught.value.field == field


def test_a_connection_may_have_all_the_memory_of_the_machine() -> None:
    connect(backend="process", memory=MEMORY_BYTES)


def test_a_connection_that_fails_to_open_leaves_no_recording(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    t = connect_sync(backend="process", state=tmp_path / "file", record=tmp_path / "new" / "trace.jsonl")
    with pytest.raises(ManagerError), t:
        pass
    assert list((tmp_path / "new").iterdir()) == []


def test_a_connection_that_is_never_opened_begins_no_recording(tmp_path: Path) -> None:
    connect_sync(backend="process", record=tmp_path / "trace.jsonl")
    assert list(tmp_path.iterdir()) == []


# ---- options of sessions --------------------------------------------------------------------------------------------


def test_a_session_command_takes_the_same_options_as_a_command(
    plain: Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(t: Client) -> None:
        from tangram import Amdahl

        law = Amdahl(0.5)
        submit, submitted = t.transport.submit, []

        def seen(action: Action, *rest: Any) -> Pending:
            submitted.append(action)
            return submit(action, *rest)

        async with t.sandbox() as box, box.session() as shell:
            monkeypatch.setattr(t.transport, "submit", seen)
            await shell.exec("x=1", cpus=(1, 2), deadline_s=50, priority=7, speedup=law, key="k")
            action = submitted[0]
            assert (action.deadline_s, action.priority, action.key) == (50, 7, "k")
            assert action.demand.speedup == law and action.demand.pools[CPU].max == 2000
            async with await box.start("sleep 60", cpus=2):
                late = await shell.exec("echo $x", cpus=1, deadline_s=0.1)
                assert late.status.value == "timed_out" and not late.session_ended
            assert (await shell.exec("echo $x")).stdout == "1\n"

    plain(test, cores=2)
