"""Files, names, images and disks as they come: too large, too many, full, gone, or changing while one looks at them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import glob
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.conftest import Owners, inside, is_zombie, parent, pids, run, spawner, until
from tests.chaos.test_leaks import is_group
from tests.contracts.conftest import Harness, sandbox

import tangram
from tangram import Status
from tangram.errors import ActionFailed, AdmissionRefused, FileFailed, InvalidAction, ManagerError, TangramError
from tangram.managers.sandboxes.bwrap.manager import BwrapManager
from tangram.managers.sandboxes.bwrap.spawner.client import SpawnerClient
from tangram.managers.work import Open, SandboxSpec

Play = Callable[..., Any]
MIB = 1 << 20


def peak(since: str = "") -> int:
    """The most memory of this process in bytes, since `peak("forget")`."""
    if since:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


# ---- files ---------------------------------------------------------------------------------------------------------


def test_a_file_that_grows_shrinks_and_vanishes_while_it_is_read(play: Play) -> None:
    change = "while :; do head -c 3000000 /dev/zero > a; echo x > b; mv b a; rm -f a; done"

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            server = await box.start(change, cpus=0.5)
            reasons = set()
            for _ in range(60):
                try:
                    assert len(await box.read("a", bytes_max=MIB)) <= MIB
                    await box.list()
                    await box.delete("a")
                except FileFailed as error:
                    reasons.add(error.reason.partition(" bytes")[0].rstrip("0123456789"))
            assert reasons <= {"No such file or directory", "has "}
            await server.stop()

    play(story)


def test_a_tree_that_changes_while_it_is_copied_comes_whole_or_not_at_all(play: Play, tmp_path: Path) -> None:
    change = "while :; do rm -rf tree/x; mkdir -p tree/x; for n in 1 2 3 4; do echo $n > tree/x/$n; done; done"

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            await box.write("tree/kept", b"kept")
            server = await box.start(change, cpus=0.5)
            for number in range(20):
                target = tmp_path / str(number)
                try:
                    place = await box.download("tree", target)
                    assert (place / "kept").read_bytes() == b"kept"
                except FileFailed:
                    assert not target.exists() or list(target.iterdir()) == []
            await server.stop()

    play(story)


def test_a_file_that_does_not_fit_into_memory_is_no_fault_of_the_next_command(play: Play, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(bytes(100 * MIB))

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            with pytest.raises(FileFailed, match="memory of its sandbox"):
                await box.write("sub/large", bytes(100 * MIB))
            assert (await box.exec("ls -A sub")).check().stdout == ""
            with pytest.raises(FileFailed, match="memory of its sandbox"):
                await box.upload(large)
            await box.delete("large")
            after = await box.exec("true")
            assert after.ok and not after.out_of_memory

    play(story)


def test_a_write_that_is_cancelled_leaves_no_part_of_a_file(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="256MiB") as box:
            for pause_s in (0.0, 0.001, 0.005, 0.02):
                writing = asyncio.create_task(box.write("large", bytes(64 * MIB)))
                await asyncio.sleep(pause_s)
                writing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await writing
            assert {entry.name for entry in await box.list()} <= {"large"}

    play(story)


def test_a_runner_that_cannot_enter_its_sandbox_is_our_failure(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    too_many = resource.getrlimit(resource.RLIMIT_NOFILE)[1] + 1
    # As if the limit had been lowered after the sandbox was requested.
    monkeypatch.setattr(resource, "getrlimit", lambda which: (too_many, too_many))

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB", open_files=too_many, user="root") as box:
            for _ in range(20):
                result = await box.exec("echo ok")
                assert result.status is Status.LOST and "limit" in result.reason

    play(story)


def test_limits_that_the_kernel_does_not_take_are_refused_when_a_sandbox_is_opened(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        too_many = resource.getrlimit(resource.RLIMIT_NOFILE)[1] + 1
        for limits in ({"processes": (1 << 22) + 1}, {"open_files": (1 << 20) + 1}, {"open_files": too_many}):
            with pytest.raises(InvalidAction, match=next(iter(limits))):
                async with t.sandbox(memory="64MiB", **limits):  # type: ignore[arg-type]
                    pass

    play(story)


@pytest.mark.parametrize("owner", ["", "named"])
def test_a_manager_that_is_cancelled_while_its_spawner_starts_leaves_nothing(
    state: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    async def main() -> None:
        requested = asyncio.Event()

        async def hang(*_: object, **fields: object) -> None:
            requested.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(SpawnerClient, "request", hang)
        entering = asyncio.create_task(BwrapManager(state=state, owner=owner).__aenter__())
        await requested.wait()
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering

    run(main())


def test_a_spawner_without_free_descriptors_replies_leaks_nothing_and_goes_on(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            assert (await box.exec("echo ok")).ok
            pid = spawner()

            def highest_free() -> int:
                return max(int(name) for name in os.listdir(f"/proc/{pid}/fd")) + 1

            def descriptors() -> int:
                return len([1 for name in os.listdir(f"/proc/{pid}/fd") if not is_group(pid, name)])

            before, limits = descriptors(), resource.prlimit(pid, resource.RLIMIT_NOFILE)
            failures = 0
            for free in range(12):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest_free() + free, limits[1]))
                try:
                    async with t.sandbox(memory="64MiB"):
                        pass
                except TangramError:
                    failures += 1
                await box.exec("true")
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
                assert await works_again(box), "the sandbox lives on"
            assert failures
            await until(lambda: descriptors() <= before, "no descriptor is left")

    play(story)


def test_a_runner_that_cannot_join_its_groups_is_killed(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            assert (await box.exec("echo ok")).ok
            root, before = spawner(), len(runners(spawner()))
            limits = resource.prlimit(root, resource.RLIMIT_NOFILE)
            for _ in range(5):
                resource.prlimit(root, resource.RLIMIT_NOFILE, (16, limits[1]))
                await asyncio.gather(*[box.exec("true") for _ in range(4)])
                resource.prlimit(root, resource.RLIMIT_NOFILE, limits)
            assert await works_again(box)
            await until(lambda: len(runners(root)) <= before, "no runner is left")

    play(story)


async def works_again(box: tangram.Sandbox) -> bool:
    """The waiting runner was forked under the limit and inherits it, so the first program may be lost."""
    await box.exec("true")
    return (await box.exec("echo ok")).ok


def runners(spawner: int) -> list[int]:
    return [pid for pid in pids() if parent(pid) == spawner and not is_zombie(pid)]


def test_an_error_of_the_disk_while_a_sandbox_opens_is_a_lost_lease(state: Path) -> None:
    async def main() -> None:
        harness = Harness(sandbox, state)
        async with harness:
            boxes = next((state / "owners").glob("*/boxes"))
            boxes.rmdir()
            lost = (await (await harness.start("box", Open(spec=SandboxSpec(image="host")))).wait()).lost
            assert "sandbox box could not be created" in lost and "No such file" in lost
            boxes.mkdir(mode=0o711)

    run(main())


def test_a_name_that_is_committed_twice_leaves_no_image(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            for content in ("one", "two"):
                await box.write("note", content)
                await box.commit("twice")
            async with t.sandbox(image="twice", memory="64MiB") as copy:
                assert await copy.read_text("note") == "two"

    async def later(t: tangram.Client) -> None:
        with pytest.raises(InvalidAction) as refused:
            async with t.sandbox(image="twice", memory="64MiB"):
                pass
        assert "twice@" not in str(refused.value)

    play(story)
    play(later)


def test_a_directory_of_fifty_thousand_names_is_listed(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="512MiB") as box:
            (await box.exec(["python3", "-c", "for n in range(50_000): open(f'{n:05}', 'x').close()"])).check()
            names = [entry.name for entry in await box.list()]
            assert names == [f"{number:05}" for number in range(50_000)]

    play(story)


def test_a_tree_that_is_nested_very_deeply_is_an_error_of_the_file(play: Play, tmp_path: Path) -> None:
    deepen = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\nopen('f', 'x').close()"

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="256MiB") as box:
            (await box.exec(["python3", "-c", f"import os; os.mkdir('top'); os.chdir('top')\n{deepen}"])).check()
            with pytest.raises(FileFailed):
                await box.download("top", tmp_path / "target")
            with pytest.raises(FileFailed):
                await box.delete("top")
            (await box.exec("rm -rf top")).check()
            assert await box.list() == []

    play(story)


def test_any_name_that_a_file_may_have_can_be_used(play: Play) -> None:
    names = [
        "-rf",
        "a b",
        "line\nbreak",
        "ünï",
        "*",
        "$(reboot)",
        "'",
        '"',
        "\\",
        "~",
        "..a",
        "\x7f\x1b[31m",
        "x" * 255,
    ]

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            for name in names:
                await box.write(f"d/{name}", name)
                assert await box.read_text(f"d/{name}") == name
            assert sorted(entry.name for entry in await box.list("d")) == sorted(names)
            (await box.exec(["python3", "-c", "open(b'd/\\xff\\xfe', 'w').close()"])).check()
            assert "\ufffd\ufffd" in [entry.name for entry in await box.list("d")]
            for wrong in ("", "a\0b", "\ud800"):
                for operation in (box.read(wrong), box.write(wrong, b""), box.delete(wrong), box.list(wrong)):
                    with pytest.raises(InvalidAction):
                        await operation
            with pytest.raises(FileFailed, match="too long"):
                await box.write("x" * 256, b"")
            with pytest.raises(FileFailed, match="too long"):
                await box.read("x/" * 5000)
            await box.delete("d")

    play(story)


def test_a_file_is_written_whole_or_not_at_all(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="128MiB", disk="16MiB") as box:
            await box.write("a", b"first")
            with pytest.raises(FileFailed):
                await box.write("a", bytes(20 * MIB))
            assert await box.read("a") == b"first" and [entry.name for entry in await box.list()] == ["a"]
            for path in ("a/b", ".", "/", "/usr/x", "/proc/x", "/dev/null/x"):
                with pytest.raises(FileFailed):
                    await box.write(path, b"x")
            await box.write("a", b"", mode=0o4755)
            assert (await box.exec("stat -c %s a")).stdout == "0\n"

    play(story)


def test_a_sparse_file_costs_only_the_memory_that_is_read(play: Play, tmp_path: Path) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            (await box.exec("truncate -s 1T huge; mkdir tree; truncate -s 1G tree/large")).check()
            with pytest.raises(FileFailed, match="bytes"):
                await box.read("huge", bytes_max="1MiB")
            before = peak("forget")
            for path in ("huge", "tree"):
                with pytest.raises(FileFailed, match="more than"):
                    await box.download(path, tmp_path / "target", bytes_max="300MiB")
            assert peak() - before < 150 * MIB, "a tree on its way is kept on disk, not in memory"

    play(story)


def test_cancelled_file_work_leaves_no_process(play: Play, state: Path) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box, t.sandbox(memory="64MiB") as other:
            (await box.exec("truncate -s 100G large; mkdir empty")).check()
            before = inside(state)
            for _ in range(20):  # more than are done at once
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(box.download("large", "/nowhere", bytes_max="100GiB"), 0.01)
            await until(lambda: inside(state) == before, "no file work is in progress")
            assert [entry.name for entry in await box.list()] == ["empty", "large"]
            assert await other.list() == []

    play(story)


def test_file_work_on_a_closed_sandbox_is_refused(play: Play, tmp_path: Path) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            pass
        for operation in (box.read("a"), box.write("a", b""), box.list(), box.delete("a"), box.upload(__file__)):
            with pytest.raises(TangramError, match="the sandbox is closed"):
                await operation

    play(story)


# ---- programs ------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_executed_raises_with_the_reason(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            await box.write("script", "#!/nowhere/interpreter\n", mode=0o755)
            await box.write("text", "no program", mode=0o644)
            await box.write("garbage", b"\x7fELF" + bytes(100), mode=0o755)
            cases: list[tuple[list[str], int]] = [(["no-such-program"], 127), (["./script"], 127), (["./text"], 126)]
            cases += [(["./garbage"], 126), (["/etc"], 126), (["x" * 5000], 126), (["é" * 60_000], 126)]
            for command, code in cases:
                result = await box.exec(command)
                assert (result.status, result.exit_code) == (Status.SUCCEEDED, code), command[0][:20]
                assert result.stderr.startswith("tangram: ") and len(result.stderr) < 10_000
            for cwd, code in (("missing", 127), ("text", 126), ("x" * 100_000, 126), ("/root/../proc/1/cwd", 126)):
                result = await box.exec("true", cwd=cwd)
                assert result.exit_code == code and "cwd" in result.stderr
            assert (await box.exec("echo fine")).stdout == "fine\n"

    play(story)


def test_orders_that_are_too_large_are_refused_and_change_nothing(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            with pytest.raises(InvalidAction, match="at most"):
                await box.exec("x" * 200_000)
            with pytest.raises(InvalidAction, match="at most"):
                await box.exec(["true", *["x" * 100_000] * 5])
            with pytest.raises(InvalidAction, match="at most"):
                await box.exec("true", env={"A": "x" * 100_000})
            for wrong in ("", "a\0b", "\ud800", [], [""]):
                with pytest.raises(InvalidAction):
                    await box.exec(wrong)
            assert (await box.exec(["echo", *["x" * 50_000] * 3])).executed.stdout_bytes == 150_003
            assert (await box.exec(["echo", "\x01\x02" * 20_000])).executed.stdout_bytes == 40_001

    play(story)


def test_input_that_is_not_read_does_no_harm(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            content = os.urandom(5 * MIB)
            assert (await box.exec("true", stdin=content)).ok
            assert (await box.exec("head -c 5", stdin=content)).executed.stdout == content[:5]
            assert (
                await box.exec("cat | wc -c; cat /dev/stdin | wc -c", stdin=content)
            ).stdout == f"{5 * MIB}\n{5 * MIB}\n"

    play(story)


def test_streams_can_be_reopened_by_their_names(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        for user in ("agent", "root"):
            async with t.sandbox(memory="64MiB", user=user) as box:
                result = await box.exec(
                    "echo out > /dev/stdout; echo err | tee /dev/stderr; cat < /dev/stdin", stdin="in"
                )
                assert (result.stdout, result.stderr, result.exit_code) == ("out\nerr\nin", "err\n", 0)

    play(story)


def test_the_smallest_sandbox_that_is_allowed_works(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="16MiB", disk="64KiB", processes=4, open_files=16) as box:
            result = await box.exec("ulimit -n; echo x > a; cat a")
            assert (result.stdout, result.stderr) == ("16\nx\n", "")
            async with box.session() as session:
                assert (await session.exec("echo held")).stdout == "held\n"
        async with t.sandbox(memory="4MiB") as box:
            result = await box.exec(["true"])
            assert result.ok or result.out_of_memory

    play(story)


def test_a_shell_that_dies_between_its_commands_is_reported_as_ended(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            session = box.session()
            pid = (await session.exec("cd /tmp; echo $$")).stdout.strip()
            (await box.exec(f"kill -9 {pid}; while kill -0 {pid}; do sleep 0.01; done 2>/dev/null")).check()
            result = await session.exec("pwd")
            assert result.session_ended and result.stdout == "" and not result.ok
            with pytest.raises(tangram.TangramError, match="session ended"):
                await session.exec("pwd")
            async with box.session() as session:
                assert (await session.exec("pwd")).stdout == "/work\n"

    play(story)


FEW_DESCRIPTORS = "resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))"


def test_what_is_left_running_does_not_use_up_the_descriptors_of_the_owner(owners: Owners) -> None:
    """Each holds the streams of the action that left it, which must still be read."""
    process = owners.start(
        """
async with t.sandbox(memory="256MiB") as box, t.sandbox(memory="64MiB") as other:
    for number in range(150):
        (await box.exec("sleep 1000 &")).check()
    (await other.exec("echo unharmed")).check()
    (await box.exec("echo unharmed")).check()
print("well")
""",
        before=FEW_DESCRIPTORS,
    )
    assert process.stdout is not None
    assert process.stdout.read() == "well\n"
    assert process.wait(60) == 0


def test_many_sandboxes_at_once_need_no_special_limits(owners: Owners) -> None:
    process = owners.start(
        """
async with contextlib.AsyncExitStack() as stack:
    boxes = [await stack.enter_async_context(t.sandbox(memory="16MiB")) for _ in range(60)]
    results = await t.gather(*(box.exec("echo here") for box in boxes))
    assert all(result.stdout == "here\\n" for result in results), results
print("well")
""",
        before=FEW_DESCRIPTORS,
    )
    assert process.stdout is not None
    assert process.stdout.read() == "well\n"
    assert process.wait(60) == 0


# ---- images --------------------------------------------------------------------------------------------------------


def test_an_invalid_image_name_is_refused_without_harm(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            other = asyncio.create_task(box.exec("sleep 0.5; echo unharmed"))
            for name in ("host", "/etc", "a\0b", "x" * 1000, "\ud800"):
                with pytest.raises(InvalidAction):
                    await box.commit(name)
            assert (await other).stdout == "unharmed\n"
            with pytest.raises(InvalidAction, match="unknown"):
                async with t.sandbox(image="unknown"):
                    pass
            assert (await box.exec("echo usable")).stdout == "usable\n"

    play(story)


def test_too_many_layers_are_refused_without_harm(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        images = ["host"]

        async def stack_up() -> None:
            for number in range(60):
                async with t.sandbox(memory="16MiB", image=images[-1]) as box:
                    images.append((await box.commit(f"layer-{number}")).name)

        with pytest.raises((AdmissionRefused, ActionFailed), match="layers"):
            await stack_up()
        async with t.sandbox(memory="16MiB", image=images[-1]) as box:
            assert (await box.exec("echo usable")).stdout == "usable\n"
        for name in reversed(images[1:]):
            await t.forget(tangram.Image(name))

    play(story)


def test_a_copy_is_atomic_while_programs_run(play: Play) -> None:
    """Each program counts in two files, one after the other: a copy of one moment has them at most one apart. Large
    files are copied between the two."""
    who = ("left", "first", "late-1", "late-2", "late-3")
    make = "touch {0}; for n in $(seq 20); do head -c 10000000 /dev/zero > m$n; done; touch {1}"
    count = """
import itertools, os, sys
files = [os.open(f"{name}-{sys.argv[1]}", os.O_RDWR) for name in "az"]
for n in itertools.count():
    for file in files: os.pwrite(file, b"%9d" % n, 0)
"""

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="768MiB", disk="512MiB", processes=64) as box:
            names = [" ".join(f"{file}-{each}" for each in who) for file in "az"]
            (await box.exec(make.format(*names))).check()
            await box.write("count.py", count)
            (await box.exec("python3 count.py left & sleep 0.2")).check()
            committing = asyncio.create_task(box.commit())
            # These start while the copy is made: some in a new slot, and the first wakes what was left running.
            servers = [await box.start(["python3", "count.py", each], cpus=0.3) for each in who[1:]]
            image = await committing
            for server in servers:
                assert (await server.stop()).status is Status.CANCELLED
        async with t.sandbox(memory="768MiB", image=image) as copy:
            for each in who:
                pair = [int(await copy.read(f"{file}-{each}") or 0) for file in "az"]
                assert abs(pair[0] - pair[1]) <= 1, f"{each} ran while the copy was made: {pair}"
        await t.forget(image)

    play(story)


def test_an_image_in_use_can_be_forgotten_and_replaced(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            await box.write("a", b"1")
            image = await box.commit("same")
            async with (
                t.sandbox(memory="64MiB", image=image) as first,
                t.sandbox(memory="64MiB", image=image) as second,
            ):
                await box.write("a", b"2")
                assert await box.commit("same") == image
                await t.forget(image)
                with contextlib.suppress(tangram.TangramError):
                    await t.forget(image)
                assert await first.read("a") == await second.read("a") == b"1"
        with pytest.raises(tangram.TangramError):
            async with t.sandbox(memory="64MiB", image=image):
                pass
        async with t.sandbox(memory="64MiB") as box:
            assert (await box.exec("echo usable")).stdout == "usable\n"

    play(story)


def test_a_sandbox_made_ahead_has_the_image_of_today(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            for content in (b"1", b"2", b"3"):
                await box.write("a", content)
                image = await box.commit("renewed")
                for _ in range(2):
                    async with t.sandbox(memory="64MiB", image=image) as copy:
                        assert await copy.read("a") == content
                    (await box.exec("sleep 0.1", cpus=2)).check()  # after it the next one has been made

    play(story, warm=2)


def test_a_set_up_that_fails_is_not_remembered(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        for _ in range(2):
            with pytest.raises(tangram.TangramError, match="exit 3"):
                await t.image(setup=["echo made > /made", "exit 3"], memory="64MiB")
        image = await t.image(setup=["echo made > /made"], memory="64MiB")
        async with t.sandbox(memory="64MiB", image=image) as box:
            assert await box.read("/made") == b"made\n"
        await t.forget(image)

    play(story)


# ---- the disk of the state directory -------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(at: Path, size: str) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    at.mkdir()
    if libc.mount(b"small", str(at).encode(), b"tmpfs", 0, f"size={size}".encode()) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    try:
        yield
    finally:
        if libc.umount2(str(at).encode(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"{at} is still in use")


def fill(at: Path) -> None:
    with open(at / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_a_full_disk_is_reported_as_full_and_nothing_is_lost(owners: Owners, tmp_path: Path) -> None:
    disk = tmp_path / "disk"

    async def connected(story: Callable[[tangram.Client], Any]) -> None:
        async with tangram.connect(state=disk, cores=2, memory="1GiB") as t:
            await story(t)

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            await box.write("a", b"kept")
            kept = await box.commit("kept")
            (await box.exec("head -c 20000000 /dev/urandom > large")).check()
            with pytest.raises(tangram.TangramError, match="No space left on device"):
                await box.commit("too-large")
            fill(disk)
            # What a sandbox writes is in memory, so those that are open go on; new ones need next to nothing.
            assert await box.read("a") == b"kept"
            (await box.exec("echo more > b")).check()
            with pytest.raises(tangram.TangramError, match="No space left on device"):
                await box.commit("none")
            with contextlib.suppress(tangram.TangramError):
                async with t.sandbox(memory="64MiB") as another:
                    (await another.exec("true")).check()
            (disk / "filler").unlink()
            async with t.sandbox(memory="64MiB", image=kept) as copy:
                assert await copy.read("a") == b"kept"
            await box.delete("large")
            small = await box.commit("small")
            async with t.sandbox(memory="64MiB", image=small) as copy:
                assert await copy.read("b") == b"more\n"

    async def nothing(t: tangram.Client) -> None:
        raise AssertionError("a connection that has no room for its owner is refused")

    with small_disk(disk, "10M"):
        fill(disk)
        with pytest.raises(tangram.TangramError, match="No space left on device"):
            asyncio.run(connected(nothing))
        (disk / "filler").unlink()
        asyncio.run(connected(story))
        left = [path.name for path in (disk / "images" / "layers").iterdir() if path.name.startswith(".part")]
        assert left == [] and list((disk / "owners").iterdir()) == []


@pytest.mark.parametrize("where", ["file", "file/below", "comma,", "colon:", "/proc/tangram"])
def test_a_place_that_cannot_hold_state_is_named(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("x")

    async def main() -> None:
        async with tangram.connect(state=tmp_path / where):
            raise AssertionError("this cannot be")

    with pytest.raises(tangram.TangramError, match=where.strip("/").partition("/")[0].strip(",:")):
        asyncio.run(main())


def test_a_sandbox_that_cannot_be_removed_can_be_closed_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with Harness(sandbox, tmp_path / "state") as harness:
            box = await harness.open()
            (directory,) = glob.glob(f"{tmp_path}/state/owners/*/boxes/*")
            os.mkdir(f"{directory}/in-the-way")
            for _ in range(2):
                with pytest.raises(ManagerError, match="could not be removed"):
                    await box.close()
            os.rmdir(f"{directory}/in-the-way")
            await box.close()
            assert not glob.glob(directory)

    asyncio.run(main())


def test_a_state_directory_that_vanishes_is_an_error_and_no_hang(play: Play, state: Path) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            os.rename(state, state.with_name("elsewhere"))
            try:
                assert (await box.exec("echo open ones go on")).ok
                with pytest.raises(tangram.TangramError):
                    async with t.sandbox(memory="64MiB"):
                        pass
            finally:
                os.rename(state.with_name("elsewhere"), state)
            async with t.sandbox(memory="64MiB") as another:
                assert (await another.exec("echo back")).stdout == "back\n"

    play(story)
