"""Trees of files, to a sandbox and back from one that is hostile."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from tangram.client.tree_archive import pack_tree, unpack_tree
from tangram.errors import FileFailed


def crafted(*members: tuple[str, bytes | str | None], kinds: dict[str, bytes] | None = None) -> io.BytesIO:
    """A tar with these names: bytes are a file, text is a link to it, None is a directory; `kinds` says otherwise."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                member.size = len(content)
            elif content is None:
                member.type = tarfile.DIRTYPE
            else:
                member.type, member.linkname = tarfile.SYMTYPE, content
            if kinds and name in kinds:
                member.type = kinds[name]
            tar.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    out.seek(0)
    return out


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    source = tmp_path / "project"
    (source / "src").mkdir(parents=True)
    (source / "src" / "a.py").write_text("print(1)\n")
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("src/a.py")
    with pack_tree(source) as tar:
        place = unpack_tree(tar, tmp_path / "out")
    assert place == tmp_path / "out" / "project"
    assert (place / "src" / "a.py").read_text() == "print(1)\n"
    assert os.access(place / "run.sh", os.X_OK) and not os.access(place / "src" / "a.py", os.X_OK)
    assert (place / "link").readlink() == Path("src/a.py")


def test_one_file_is_a_tree_as_well(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pack_tree(tmp_path / "a.txt") as tar:
        assert unpack_tree(tar, tmp_path / "out").read_text() == "x"


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileFailed, match="nothing"):
        pack_tree(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "./a", "a//b", ".."])
def test_a_name_that_leads_out_is_refused_and_nothing_is_left(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileFailed, match="not a valid name in a tree"):
        unpack_tree(crafted(("top", None), (name, b"x")), tmp_path / "out")
    assert not (tmp_path / "evil").exists()
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("leads_to", ["/etc", "../..", "../../outside", "a/../../../x"])
def test_a_link_that_leads_out_is_left_out(tmp_path: Path, leads_to: str) -> None:
    place = unpack_tree(crafted(("top", None), ("top/a.txt", b"x"), ("top/link", leads_to)), tmp_path)
    assert not os.path.lexists(place / "link")
    assert (place / "a.txt").read_bytes() == b"x"


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    tar = crafted(("top", None), ("top/d", str(outside)), ("top/d/evil", b"x"))
    place = unpack_tree(tar, tmp_path / "out")
    assert list(outside.iterdir()) == []
    assert (place / "d").is_dir() and not (place / "d").is_symlink()


def test_two_links_that_lead_out_together_do_not(tmp_path: Path) -> None:
    """By its words `b` stays inside; by way of `a`, which leads up to the top, it would not."""
    tar = crafted(("top/p/q/f", b"x"), ("top/p/q/a", "../.."), ("top/b", "p/q/a/../../../etc"), ("top/c", "p/q/a/p"))
    place = unpack_tree(tar, tmp_path / "out")
    assert not os.path.lexists(place / "b")
    assert (place / "c" / "q" / "f").read_bytes() == b"x"


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_devices_and_pipes_are_left_out(tmp_path: Path, kind: bytes) -> None:
    place = unpack_tree(crafted(("top", None), ("top/dev", None), kinds={"top/dev": kind}), tmp_path)
    assert list(place.iterdir()) == []


def test_setuid_bits_do_not_come_along(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        member = tarfile.TarInfo("su")
        member.mode = 0o4755
        tar.addfile(member)
    out.seek(0)
    assert unpack_tree(out, tmp_path).stat().st_mode & 0o7777 == 0o755


def test_what_is_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "top").write_text("mine")
    with pytest.raises(FileFailed, match="exists already"):
        unpack_tree(crafted(("top", b"theirs")), tmp_path)
    assert (tmp_path / "top").read_text() == "mine"


def test_a_target_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileFailed, match="file: is not a writable directory: File exists"):
        unpack_tree(crafted(("top", b"x")), tmp_path / "file")
    with pytest.raises(FileFailed, match="below: is not a writable directory: Not a directory"):
        unpack_tree(crafted(("top", b"x")), tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("content", [b"", b"no tar at all" * 100, b"\0" * 10240])
def test_what_is_no_tree_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(FileFailed):
        unpack_tree(io.BytesIO(content), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_tree_that_is_cut_off_leaves_nothing(tmp_path: Path) -> None:
    whole = crafted(("top", None), ("top/a", b"x" * 100_000)).getvalue()
    with pytest.raises(FileFailed):
        unpack_tree(io.BytesIO(whole[:20_000]), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
