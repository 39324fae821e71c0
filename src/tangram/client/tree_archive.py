"""Files and directories of this machine as a tar, and back.

Owns both directions. The content of a sandbox is hostile. Promises that unpacking writes nothing outside the target,
replaces nothing, creates no devices and no links that lead out of the target, and uses no more of the disk than the tar
has bytes.
"""

from __future__ import annotations

import itertools
import os
import posixpath
import secrets
import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from tangram.errors import FileFailed

MEMORY_BYTES_MAX = 64 << 20
"""Above this size, a tar that is being written uses a temporary file."""
ENTRIES_MAX = 1_000_000
NAME_BYTES_MAX = 4096
DEPTH_MAX = 200
"""Maximum nesting of directories; creating and deleting them recurses as deeply."""


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
    """Unpacks a tar with one file or directory into `target`. It appears there complete, or not at all."""
    aside = target / f".tangram-{secrets.token_hex(6)}.part"
    try:
        target.mkdir(parents=True, exist_ok=True)
        aside.mkdir(mode=0o700)
    except OSError as error:
        raise FileFailed(str(target), f"is not a writable directory: {error.strerror}") from error
    try:
        name = _unpack(tar, aside)
        target_path = target / name
        if os.path.lexists(target_path):
            raise FileFailed(str(target_path), "exists already; choose another target or remove it")
        # Not `files.atomic_directory`: the name and whether it is a file are known only from the tar, which is hostile.
        os.rename(aside / name, target_path)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise FileFailed(str(target), f"the tree could not be unpacked: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target_path


def _unpack(tar: BinaryIO, aside: Path) -> str:
    """Returns the one top-level name. Only this function writes below `aside`, and it creates links last, so no name of
    the tar is resolved through one."""
    links: list[tuple[str, str]] = []
    top = ""
    with tarfile.open(fileobj=tar, mode="r|") as reader:
        remaining = ENTRIES_MAX
        while (member := reader.next()) is not None:
            reader.members.clear()  # type: ignore[attr-defined]  # it would remember all of them
            remaining -= 1
            if remaining < 0:
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
                os.link(source, aside / name, follow_symlinks=False)
    for name, leads_to in links:
        if _stays_below(top, name, leads_to):
            _make_link(aside, name, leads_to)
    if not top or not os.path.lexists(aside / top):
        raise FileFailed(top or "the tree", "contains nothing that can be unpacked")
    return top


def _make_link(aside: Path, name: str, leads_to: str) -> None:
    """Skips existing names, and places beyond another link, where the target would resolve differently."""
    link = aside / name
    if not os.path.lexists(link) and not any(os.path.islink(aside / above) for above in PurePosixPath(name).parents):
        link.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(leads_to, link)


def _write_file(reader: tarfile.TarFile, member: tarfile.TarInfo, target_path: Path) -> None:
    if member.issparse():
        raise FileFailed(member.name[:200], "is a sparse file, whose size may exceed any disk")
    target_path.parent.mkdir(parents=True, exist_ok=True)
    content = reader.extractfile(member)
    assert content is not None
    with content, open(target_path, "xb") as file:
        shutil.copyfileobj(content, file)
    target_path.chmod(0o755 if member.mode & 0o100 else 0o644)


def _safe_name(name: str) -> str:
    parts = name.strip("/").split("/")
    plain = all(part not in ("", ".", "..") for part in parts)
    if len(parts) > DEPTH_MAX:
        raise FileFailed(f"{name[:200]}...", f"is more than {DEPTH_MAX} directories deep")
    if name.startswith("/") or not plain or "\0" in name or len(os.fsencode(name)) > NAME_BYTES_MAX:
        raise FileFailed(name[:200], "is not a valid name in a tree")
    return "/".join(parts)


def _stays_below(top: str, name: str, leads_to: str) -> bool:
    """Whether a link stays inside the tree, judged by its text. It may go up first and then only down: a component that
    is a link again was judged by the same rule, and no way up follows it."""
    if not leads_to or leads_to.startswith("/") or "\0" in leads_to:
        return False
    parts = leads_to.split("/")
    if ".." in itertools.dropwhile(lambda part: part == "..", parts):
        return False
    end = posixpath.normpath(posixpath.join(posixpath.dirname(name), leads_to))
    return end == top or end.startswith(f"{top}/")
