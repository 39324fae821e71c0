"""Trees: files and directories of this machine as a tar, and back.

Owns both directions. What comes from a sandbox is hostile: promises that unpacking writes nothing outside the target,
replaces nothing that is there, makes no device, and no link that leads out of the target.
"""

from __future__ import annotations

import os
import posixpath
import secrets
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import BinaryIO

from tangram.errors import FileFailed

MEMORY_BYTES_MAX = 64 << 20
"""Of a tar in the making; larger ones go to a temporary file."""
ENTRIES_MAX = 1_000_000
NAME_BYTES_MAX = 4096


def pack_tree(source: Path) -> BinaryIO:
    """A tar whose names begin with that of the file or directory."""
    tar = tempfile.SpooledTemporaryFile(MEMORY_BYTES_MAX)  # noqa: SIM115
    try:
        with tarfile.open(fileobj=tar, mode="w", format=tarfile.PAX_FORMAT) as writer:
            writer.add(source, arcname=source.resolve().name or "root", filter=_without_owner)
    except OSError as error:
        tar.close()
        raise FileFailed(str(source), str(error)) from error
    tar.seek(0)
    return tar  # type: ignore[return-value]


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member if member.isreg() or member.isdir() or member.issym() or member.islnk() else None


def unpack_tree(tar: BinaryIO, target: Path) -> Path:
    """Put what a tar holds, one file or directory, below `target`. It appears there whole, or not at all."""
    target.mkdir(parents=True, exist_ok=True)
    aside = target / f".tangram-{secrets.token_hex(6)}.part"
    aside.mkdir(mode=0o700)
    try:
        name = _unpack(tar, aside)
        place = target / name
        if os.path.lexists(place):
            raise FileFailed(str(place), "exists already; choose another target or remove it")
        os.rename(aside / name, place)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise FileFailed(str(target), f"the tree could not be unpacked: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return place


def _unpack(tar: BinaryIO, aside: Path) -> str:
    """Returns the one name at the top. Only this function writes below `aside`, and it makes links last: no name of the
    tar leads through one."""
    links: list[tuple[str, str]] = []
    top = ""
    with tarfile.open(fileobj=tar, mode="r|") as reader:
        for number, member in enumerate(reader):
            if number >= ENTRIES_MAX:
                raise FileFailed(member.name[:200], f"is one of more than {ENTRIES_MAX} entries")
            name = _safe_name(member.name)
            top = top or name.split("/")[0]
            if name.split("/")[0] != top:
                raise FileFailed(name, f"is not below {top}, which this tree is")
            if member.isdir():
                (aside / name).mkdir(mode=0o755, parents=True, exist_ok=True)
            elif member.isreg():
                _write_file(reader, member, aside / name)
            elif member.issym():
                links.append((name, member.linkname))
            elif member.islnk():
                source = aside / _safe_name(member.linkname)
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, aside / name, follow_symlinks=False)
    for name, leads_to in links:
        if _stays_below(top, name, leads_to) and not os.path.lexists(aside / name):
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            os.symlink(leads_to, aside / name)
    _drop_links_out(aside / top, [aside / name for name, _ in links])
    if not top or not os.path.lexists(aside / top):
        raise FileFailed(top or "the tree", "holds nothing that can be unpacked")
    return top


def _drop_links_out(top: Path, links: list[Path]) -> None:
    """By its words a link may stay inside and yet lead out, by way of another one."""
    inside = top.resolve()
    for link in links:
        if link.is_symlink() and not link.resolve().is_relative_to(inside):
            link.unlink()


def _write_file(reader: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    content = reader.extractfile(member)
    assert content is not None
    with content, open(place, "xb") as file:
        shutil.copyfileobj(content, file)
    place.chmod(0o755 if member.mode & 0o100 else 0o644)


def _safe_name(name: str) -> str:
    parts = name.strip("/").split("/")
    plain = all(part not in ("", ".", "..") for part in parts)
    if name.startswith("/") or not plain or "\0" in name or len(os.fsencode(name)) > NAME_BYTES_MAX:
        raise FileFailed(name[:200], "is no name that a tree may hold")
    return "/".join(parts)


def _stays_below(top: str, name: str, leads_to: str) -> bool:
    """Whether a link leads to something inside the tree, by its words."""
    if not leads_to or leads_to.startswith("/") or "\0" in leads_to:
        return False
    end = posixpath.normpath(posixpath.join(posixpath.dirname(name), leads_to))
    return end == top or end.startswith(f"{top}/")
