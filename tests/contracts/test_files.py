"""The contract of managers: files of sandboxes, and that no path of theirs leads out."""

from __future__ import annotations

import contextlib
import io
import tarfile
from pathlib import Path

import pytest
from tests.contracts.conftest import Box, Harness

from tangram.errors import FileFailed, InvalidAction
from tangram.managers.work import FileEntry

needs_programs = pytest.mark.needs_programs


async def test_a_file_that_was_written_is_read_and_its_directories_are_made(harness: Harness) -> None:
    box = await harness.open()
    content = bytes(range(256)) * 1000
    await box.write("a/b/c.bin", content, mode=0o750)
    assert await box.read("/work/a/b/c.bin") == await box.read("a/./b/../b/c.bin") == content
    (entry,) = await harness.manager.list(box.name, "a/b")
    assert entry == FileEntry(name="c.bin", kind="file", bytes=len(content), mode=0o750)


async def test_a_file_is_replaced_as_a_whole(harness: Harness) -> None:
    box = await harness.open()
    await box.write("file", b"a long content")
    await box.write("file", b"short")
    await box.write("empty", b"")
    assert (await box.read("file"), await box.read("empty")) == (b"short", b"")
    assert await box.names() == ["empty", "file"]


@pytest.mark.parametrize("path", ["missing", "sub", "sub/file/below", "missing/below"])
async def test_what_is_no_file_cannot_be_read(harness: Harness, path: str) -> None:
    box = await harness.open()
    await box.write("sub/file", b"")
    with pytest.raises(FileFailed):
        await box.read(path)


async def test_a_file_that_is_too_large_is_not_read(harness: Harness) -> None:
    box = await harness.open()
    await box.write("file", b"12345")
    assert await box.read("file", bytes_max=5) == b"12345"
    with pytest.raises(FileFailed, match="5 bytes"):
        await box.read("file", bytes_max=4)


@needs_programs
async def test_what_never_ends_is_not_read(harness: Harness) -> None:
    box = await harness.open()
    await box.run("mkfifo pipe; ln -s /dev/zero zero")
    for path in ("pipe", "zero"):
        with pytest.raises(FileFailed):
            await box.read(path)


async def test_a_file_cannot_take_the_place_of_a_directory_or_stand_below_a_file(harness: Harness) -> None:
    box = await harness.open()
    await box.write("sub/file", b"kept")
    for path in ("sub", "sub/file/below"):
        with pytest.raises(FileFailed):
            await box.write(path, b"")
    assert await box.read("sub/file") == b"kept"


async def test_an_invalid_path_of_the_caller_is_refused(harness: Harness) -> None:
    box = await harness.open()
    for path in ("", "a\0b"):
        with pytest.raises(InvalidAction):
            await box.read(path)


async def test_a_listing_is_sorted_and_complete(harness: Harness) -> None:
    box = await harness.open()
    assert await box.names() == []
    for name in ("b", "a", "c.d/x", "c/x"):
        await box.write(name, b"12", mode=0o600)
    entries = await harness.manager.list(box.name, ".")
    assert [(entry.name, entry.kind) for entry in entries] == [
        ("a", "file"),
        ("b", "file"),
        ("c", "dir"),
        ("c.d", "dir"),
    ]
    assert (entries[0].bytes, entries[0].mode) == (2, 0o600)
    for path in ("missing", "a"):
        with pytest.raises(FileFailed):
            await harness.manager.list(box.name, path)


@needs_programs
async def test_a_listing_distinguishes_links_and_special_files(harness: Harness) -> None:
    box = await harness.open()
    await box.run("mkdir d; ln -s d link; ln -s nowhere dangling; mkfifo pipe")
    kinds = {entry.name: entry.kind for entry in await harness.manager.list(box.name, ".")}
    assert kinds == {"d": "dir", "link": "link", "dangling": "link", "pipe": "other"}


async def test_a_file_or_a_whole_tree_is_deleted(harness: Harness) -> None:
    box = await harness.open()
    for name in ("keep", "file", "tree/a", "tree/deep/b"):
        await box.write(name, b"")
    await harness.manager.delete(box.name, "file")
    await harness.manager.delete(box.name, "tree")
    assert await box.names() == ["keep"]
    with pytest.raises(FileFailed):
        await harness.manager.delete(box.name, "file")


@needs_programs
async def test_deleting_does_not_follow_links(harness: Harness) -> None:
    box = await harness.open()
    await box.write("kept/file", b"kept")
    await box.run("mkdir tree; ln -s ../kept tree/link; ln -s kept link; ln -s nowhere dangling")
    for path in ("tree", "link", "dangling"):
        await harness.manager.delete(box.name, path)
    assert await box.names() == ["kept"]
    assert await box.read("kept/file") == b"kept"


async def test_a_tree_that_is_packed_and_unpacked_is_the_same(harness: Harness) -> None:
    box, other = await harness.open(), await harness.open()
    await box.write("tree/a", b"1")
    await box.write("tree/run", b"#!/bin/sh\n", mode=0o755)
    await box.write("tree/deep/b", b"22" * 10_000)
    packed = io.BytesIO()
    await harness.manager.pack(box.name, "tree", packed, bytes_max=1 << 20)
    packed.seek(0)
    await harness.manager.unpack(other.name, "put/here", packed)
    assert await other.names("put/here/tree") == ["a", "deep", "run"]
    assert await other.read("put/here/tree/deep/b") == b"22" * 10_000
    modes = {entry.name: entry.mode for entry in await harness.manager.list(other.name, "put/here/tree")}
    assert (modes["a"], modes["run"]) == (0o644, 0o755)


async def test_a_tree_with_a_hard_link_is_unpacked_over_itself(harness: Harness) -> None:
    packed = io.BytesIO()
    link = tarfile.TarInfo("tree/link")
    link.type, link.linkname = tarfile.LNKTYPE, "tree/file"
    with tarfile.open(fileobj=packed, mode="w") as tar:
        file = tarfile.TarInfo("tree/file")
        file.size = 4
        tar.addfile(file, io.BytesIO(b"text"))
        tar.addfile(link)
    box = await harness.open()
    for _ in range(2):
        packed.seek(0)
        await harness.manager.unpack(box.name, ".", packed)
        assert (await box.read("tree/file"), await box.read("tree/link")) == (b"text", b"text")


async def test_a_single_file_is_packed_under_its_name(harness: Harness) -> None:
    box = await harness.open()
    await box.write("sub/note", b"text")
    packed = io.BytesIO()
    await harness.manager.pack(box.name, "sub/note", packed, bytes_max=1 << 20)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as tar:
        assert tar.getnames() == ["note"]


async def test_a_tree_that_is_too_large_or_not_there_is_not_packed(harness: Harness) -> None:
    box = await harness.open()
    await box.write("tree/file", b"x" * 100_000)
    for path, bytes_max in (("tree", 50_000), ("missing", 1 << 20)):
        with pytest.raises(FileFailed):
            await harness.manager.pack(box.name, path, io.BytesIO(), bytes_max=bytes_max)


async def test_what_is_no_tar_is_not_unpacked(harness: Harness) -> None:
    box = await harness.open()
    with pytest.raises(FileFailed):
        await harness.manager.unpack(box.name, "here", io.BytesIO(b"this is no tar" * 100))


@pytest.mark.parametrize("name", ["../evil", "../../evil", "a/../../evil", "a/..", "/tmp/evil", "/evil"])
async def test_a_tar_with_a_name_that_leads_out_of_its_directory_is_refused(harness: Harness, name: str) -> None:
    box = await harness.open()
    await box.write("top/kept", b"kept")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size = 4
        tar.addfile(member, io.BytesIO(b"evil"))
    packed.seek(0)
    with pytest.raises(FileFailed, match="leads out of the directory"):
        await harness.manager.unpack(box.name, "top/here", packed)
    assert await box.names("top") == ["here", "kept"] or await box.names("top") == ["kept"]
    for path in ("evil", "top/evil", "/tmp/evil", "/evil"):
        with pytest.raises(FileFailed):
            await box.read(path)


async def test_a_tar_with_a_hard_link_to_what_is_not_there_is_refused(harness: Harness) -> None:
    box = await harness.open()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.LNKTYPE, "missing"
        tar.addfile(link)
    packed.seek(0)
    with pytest.raises(FileFailed):
        await harness.manager.unpack(box.name, "here", packed)


# ---- nothing leads out --------------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the machine that no sandbox has anything to do with."""
    path = tmp_path / "outside" / "secret"
    path.parent.mkdir()
    path.write_text("secret")
    return path


async def try_all(harness: Harness, box: Box, path: str) -> None:
    """Every file operation on a path. What one of them says is its own; that it is not what is outside is checked."""
    with contextlib.suppress(FileFailed):
        assert b"secret" not in await box.read(path)
    with contextlib.suppress(FileFailed):
        await box.write(path, b"planted")
    with contextlib.suppress(FileFailed):
        await harness.manager.list(box.name, path)
    packed = io.BytesIO()
    with contextlib.suppress(FileFailed):
        await harness.manager.pack(box.name, path, packed, bytes_max=1 << 20)
    assert b"secret" not in packed.getvalue() or b"planted" in packed.getvalue()
    with contextlib.suppress(FileFailed):
        await harness.manager.delete(box.name, path)


def untouched(secret: Path) -> bool:
    return [path.name for path in secret.parent.iterdir()] == ["secret"] and secret.read_text() == "secret"


async def test_paths_of_the_machine_lead_nowhere(harness: Harness, secret: Path) -> None:
    box = await harness.open()
    for path in (str(secret), "../" * 20 + str(secret)[1:], f"/work/../..{secret}", f"{secret.parent}/planted"):
        await try_all(harness, box, path)
        assert untouched(secret)


@needs_programs
async def test_links_of_a_program_lead_nowhere_outside(harness: Harness, secret: Path) -> None:
    box = await harness.open()
    await box.run(
        f"ln -s {secret} absolute; ln -s {secret.parent} directory; ln -s {'../' * 20}{str(secret)[1:]} relative;"
        "ln -s directory chain; mkdir sub; ln -s ../directory sub/link"
    )
    for path in ("absolute", "directory/secret", "directory/planted", "relative", "chain/secret", "sub/link/secret"):
        await try_all(harness, box, path)
        assert untouched(secret)


@needs_programs
async def test_a_link_that_leads_to_itself_leads_nowhere(harness: Harness) -> None:
    box = await harness.open()
    await box.run("ln -s loop loop; ln -s b a; ln -s a b")
    for path in ("loop", "loop/x", "a/x"):
        with pytest.raises(FileFailed):
            await box.read(path)


@needs_programs
async def test_links_inside_a_sandbox_are_followed(harness: Harness) -> None:
    box = await harness.open()
    await box.run("mkdir -p v1/data; echo one > v1/data/file; ln -s v1 now; ln -s ../v1/data/file v1/link")
    assert await box.read("now/data/file") == b"one\n"
    assert await box.read("v1/link") == b"one\n"
    await box.write("now/data/new", b"two")
    assert await box.read("v1/data/new") == b"two"
    assert await box.names("now/data") == ["file", "new"]


async def test_a_tar_puts_nothing_outside(harness: Harness, secret: Path) -> None:
    box = await harness.open()
    link = tarfile.TarInfo("out")
    link.type, link.linkname = tarfile.SYMTYPE, str(secret.parent)
    for members in (
        [tarfile.TarInfo("../" * 20 + str(secret)[1:])],
        [tarfile.TarInfo(f"{secret.parent}/planted")],
        [link, tarfile.TarInfo("out/planted"), tarfile.TarInfo("out/secret")],
    ):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for member in members:
                member.size = 7 if member.isreg() else 0
                tar.addfile(member, io.BytesIO(b"planted"))
        packed.seek(0)
        with contextlib.suppress(FileFailed):
            await harness.manager.unpack(box.name, "here", packed)
        assert untouched(secret)
