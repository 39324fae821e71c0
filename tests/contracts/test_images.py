"""The contract of managers: sandboxes that are opened from images."""

from __future__ import annotations

import contextlib

import pytest
from tests.contracts.conftest import Harness

from tangram.errors import InvalidAction, ManagerError

needs_programs = pytest.mark.needs_programs


async def test_a_sandbox_opened_from_a_commit_has_its_files_and_shares_none(harness: Harness) -> None:
    box = await harness.open()
    await box.write("sub/note", b"first", mode=0o640)
    await box.commit("made")
    await box.write("sub/note", b"changed")
    copy, other = await harness.open(image="made"), await harness.open(image="made")
    assert await copy.read("sub/note") == b"first"
    assert (await harness.manager.list(copy.name, "sub"))[0].mode == 0o640
    await copy.write("sub/note", b"written in the copy")
    await copy.write("new", b"")
    assert (await box.read("sub/note"), await other.read("sub/note")) == (b"changed", b"first")
    assert await other.names() == await box.names() == ["sub"]


async def test_an_image_outlives_its_sandbox_and_is_committed_again(harness: Harness) -> None:
    box = await harness.open()
    await box.run("echo one > one")
    await box.commit("first")
    await box.close()
    second = await harness.open(image="first")
    await second.run("echo two > two")
    await second.commit("second")
    assert await (await harness.open(image="second")).names() == ["one", "two"]
    assert await (await harness.open(image="first")).names() == ["one"]


@needs_programs
async def test_programs_go_on_after_a_commit(harness: Harness) -> None:
    box = await harness.open()
    lease = await box.start("while [ ! -e go ]; do sleep 0.01; done; echo went on")
    await box.commit("made")
    await box.write("go", b"")
    ended = await lease.wait()
    assert ended.executed is not None
    assert (ended.executed.exit_code, ended.executed.stdout) == (0, b"went on\n")


async def test_an_image_that_is_not_there_is_refused(harness: Harness) -> None:
    with pytest.raises((ManagerError, InvalidAction), match="no-such-image") as caught:
        await harness.open(image="no-such-image")
    assert not (isinstance(caught.value, ManagerError) and caught.value.retry)


async def test_nothing_is_committed_under_the_name_of_the_image_of_the_machine(harness: Harness) -> None:
    box = await harness.open()
    with pytest.raises(InvalidAction, match="image: expected another name: 'host' always means"):
        await box.commit("host")
    await box.commit("hosts")
    await harness.open(image="hosts")


async def test_an_image_is_remembered_until_it_is_forgotten(harness: Harness) -> None:
    box = await harness.open()
    await box.commit("made")
    assert await harness.manager.find_image("key") == ""
    await harness.manager.tag_image("key", "made")
    assert await harness.manager.find_image("key") == "made"
    await harness.manager.forget_image("made")
    assert await harness.manager.find_image("key") == ""
    with pytest.raises((ManagerError, InvalidAction)):
        await harness.open(image="made")


async def test_the_image_of_the_machine_is_never_forgotten(harness: Harness) -> None:
    box = await harness.open()
    with pytest.raises(InvalidAction, match="host"):
        await harness.manager.forget_image("host")
    await box.close()
    await harness.open()


async def test_an_image_in_use_is_deleted_once_despite_repeated_requests(harness: Harness) -> None:
    box = await harness.open()
    await box.write("note", b"text")
    await box.commit("made")
    copy = await harness.open(image="made")
    await harness.manager.forget_image("made")
    with contextlib.suppress(ManagerError, InvalidAction):
        await harness.manager.forget_image("made")
    assert await copy.read("note") == b"text"
    await copy.close()
    with pytest.raises((ManagerError, InvalidAction)):
        await harness.open(image="made")
