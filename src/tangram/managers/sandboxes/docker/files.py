"""The file API of the docker backend.

Owns the tars that go to the engine and come from it. Content moves through the engine's archive endpoints, whether the
container is paused or not: the engine resolves every path inside the container. It does so as root inside, so the
caller may access files that programs in the sandbox may not; written files belong to their user. Listing and deleting
are small scripts inside, run as that user, for which the container is unpaused.

Promises that no more is read than requested, and that a failure inside raises FileFailed.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import posixpath
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from typing import IO, BinaryIO

from tangram.cancellation import run_to_completion
from tangram.errors import FileFailed, ManagerError
from tangram.managers.sandboxes.docker.container import HTTP_NOT_FOUND, Container
from tangram.managers.sandboxes.docker.engine import (
    UPLOAD_BYTES,
    DockerEngine,
    EngineRefused,
    Json,
    read_chunks,
)
from tangram.managers.sandboxes.docker.programs import Programs, ScriptResult
from tangram.managers.work import WORKSPACE, FileEntry, file_entry, require_safe_member, sandbox_path

LINKS_MAX = 40
"""Links followed on the way to one file: the limit of the kernel."""
ENTRIES_MAX = 100_000
LISTING_BYTES_MAX = 64 << 20
"""Size limit of one listing."""
LISTING_ROUNDS = 5
"""Attempts to list a directory that changes meanwhile."""
TAR_SLACK_BYTES = 1 << 16
"""Overhead of a tar with one file, without the content."""
SPOOL_BYTES = 8 << 20
"""Bytes of a rewritten tar that are kept in memory; more goes to a file."""
DIRECTORY_MODE = 0o755
NO_SPACE = "no space left on device"

GO_DIRECTORY, GO_LINK = 1 << 31, 1 << 27
GO_TYPES = GO_DIRECTORY | GO_LINK | 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19
"""The engine's file type bits; a regular file has none of these."""

Names = list[str]
Entries = list[tarfile.TarInfo]

LIST_SCRIPT = r"""
fail() { echo "$1" >&2; exit 1; }
[ -e "$1" ] || fail 'no such file or directory'
[ -d "$1" ] || fail 'not a directory'
[ -r "$1" ] || fail 'permission denied'
cd -- "$1" || exit 1
names() {
  for f in .[!.]* ..?* *; do
    if [ -e "$f" ] || [ -L "$f" ]; then printf './%s\000' "$f"; fi
  done
}
names
printf '\000'
names | xargs -0 -r stat -c '%f %s'
"""
"""Prints all names, each ended by NUL, an empty one, and for each a line with its mode and size."""

DELETE_SCRIPT = r"""
if [ ! -e "$1" ] && [ ! -L "$1" ]; then echo 'no such file or directory' >&2; exit 1; fi
rm -rf -- "$1"
"""


class DockerFiles:
    def __init__(self, engine: DockerEngine, programs: Programs, get_container: Callable[[str], Container]) -> None:
        self._engine = engine
        self._programs = programs
        self._get_container = get_container

    async def read(self, sandbox: str, path: str, bytes_max: int) -> bytes:
        container = self._get_container(sandbox)
        target = sandbox_path(path)
        for _ in range(LINKS_MAX):
            async with self._download(container, path, target) as (about, pieces):
                if not about["mode"] & GO_LINK:
                    return await _extract_file(path, about, pieces, bytes_max)
                target = posixpath.join(posixpath.dirname(target), about["linkTarget"])
        raise FileFailed(path, "too many links")

    async def write(self, sandbox: str, path: str, content: bytes, mode: int) -> None:
        """The container is paused meanwhile, so that no program sees a part of the file."""
        container = self._get_container(sandbox)
        above, name = posixpath.split(posixpath.normpath(sandbox_path(path)))
        if not name or path.endswith("/"):
            raise FileFailed(path, "is a directory")
        at, missing = await self._split_existing(container, path, above)
        file = tarfile.TarInfo("/".join([*missing, name]))
        file.size, file.mode = len(content), mode & 0o7777
        try:
            async with container.paused():
                await run_to_completion(
                    self._upload(container, path, at, _tar([*_directories(missing), file], content, container.user))
                )
        except FileFailed as error:
            if error.reason == NO_SPACE:
                await run_to_completion(self._remove_partial(container, f"{above}/{name}"))
            raise

    async def list(self, sandbox: str, path: str) -> list[FileEntry]:
        container = self._get_container(sandbox)
        for _ in range(LISTING_ROUNDS):
            result = await self._run_script(container, path, LIST_SCRIPT, bytes_max=LISTING_BYTES_MAX)
            if not result.complete:
                raise FileFailed(path, f"has more names than {LISTING_BYTES_MAX} bytes hold")
            entries = _entries(result.stdout)
            if entries is not None:
                if len(entries) > ENTRIES_MAX:
                    raise FileFailed(path, f"has {len(entries)} entries, more than {ENTRIES_MAX}")
                return sorted(entries, key=lambda entry: entry.name)
        raise FileFailed(path, "changes while it is listed")

    async def delete(self, sandbox: str, path: str) -> None:
        await self._run_script(self._get_container(sandbox), path, DELETE_SCRIPT)

    async def pack(self, sandbox: str, path: str, into: BinaryIO, bytes_max: int) -> None:
        container = self._get_container(sandbox)
        total = 0
        failure: OSError | None = None
        async with self._download(container, path, sandbox_path(path)) as (_, pieces):
            async for piece in pieces:
                total += len(piece)
                if total > bytes_max:
                    break
                try:
                    await asyncio.to_thread(into.write, piece)
                except OSError as error:
                    failure = error
                    break
        if failure is not None:
            raise failure
        if total > bytes_max:
            raise FileFailed(path, f"has more than the {bytes_max} bytes that may be read")

    async def unpack(self, sandbox: str, path: str, tar: BinaryIO) -> None:
        container = self._get_container(sandbox)
        target = posixpath.normpath(sandbox_path(path))
        with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as spool:
            try:
                await asyncio.to_thread(_rewrite, path, tar, spool, container.user)
            except tarfile.TarError as error:
                raise FileFailed(path, f"the content is not a tar: {error}") from error
            at, missing = await self._split_existing(container, path, target)
            if missing:
                await self._upload(container, path, at, _tar(_directories(missing), user=container.user))
            await run_to_completion(self._upload(container, path, target, read_chunks(spool)))

    async def make_directories(self, container: Container) -> None:
        """Create, in a container that is about to start, the workspace and the home of its user, and /tmp if there is
        none."""
        entries_by_place: dict[str, Entries] = {}
        for path, user, mode in (
            (WORKSPACE, container.user, DIRECTORY_MODE),
            (home_directory(container.user), container.user, DIRECTORY_MODE),
            ("/tmp", 0, 0o1777),
        ):
            at, missing = await self._split_existing(container, path, path)
            if path == WORKSPACE and not missing:
                at, name = posixpath.split(at)
                missing = [name]  # it exists, and gets a new owner
            entries = _directories(missing)
            for entry in entries:
                entry.uid = entry.gid = user
                entry.mode = mode
            entries_by_place.setdefault(at, []).extend(entries)
        for at, entries in entries_by_place.items():
            if entries:
                await self._upload(container, at, at, _tar(entries))

    # ---- paths in the engine ----

    @contextlib.asynccontextmanager
    async def _download(
        self, container: Container, path: str, target: str
    ) -> AsyncIterator[tuple[Json, AsyncIterator[bytes]]]:
        archive = f"/containers/{container.id}/archive"
        try:
            async with self._engine.download(archive, purpose="read a file", query={"path": target}) as response:
                yield response
        except EngineRefused as error:
            raise _file_error(container, path, error) from error

    async def _upload(self, container: Container, path: str, at: str, content: AsyncIterator[bytes]) -> None:
        query = {"path": at, "noOverwriteDirNonDir": "true"}
        try:
            await self._engine.upload(
                "PUT", f"/containers/{container.id}/archive", content, purpose="write files", query=query
            )
        except EngineRefused as error:
            raise _file_error(container, path, error) from error

    async def _split_existing(self, container: Container, path: str, directory: str) -> tuple[str, Names]:
        """The part of a path that exists, and the names that are missing below it."""
        missing: Names = []
        while True:
            about = await self._stat(container, path, directory)
            if about is not None and about["mode"] & GO_LINK:
                about = await self._stat(container, path, posixpath.join(directory, "..", about["linkTarget"]))
            if about is not None:
                if not about["mode"] & GO_DIRECTORY:
                    raise FileFailed(path, f"{directory} is not a directory")
                return directory, missing
            directory, name = posixpath.split(directory)
            missing.insert(0, name)

    async def _stat(self, container: Container, path: str, target: str) -> Json | None:
        archive = f"/containers/{container.id}/archive"
        try:
            return await self._engine.path_stat(archive, purpose="describe a file", query={"path": target})
        except EngineRefused as error:
            container.require_alive()
            if error.status == HTTP_NOT_FOUND:
                return None
            raise _file_error(container, path, error) from error

    # ---- scripts inside ----

    async def _run_script(self, container: Container, path: str, script: str, bytes_max: int = 1 << 16) -> ScriptResult:
        async with container.unpaused():
            result = await self._programs.run_script(container, script, sandbox_path(path), bytes_max=bytes_max)
        if result.code != 0:
            raise FileFailed(path, result.stderr.splitlines()[-1] if result.stderr else f"exit code {result.code}")
        return result

    async def _remove_partial(self, container: Container, target: str) -> None:
        with contextlib.suppress(ManagerError):
            async with container.unpaused():
                await self._programs.run_script(container, 'rm -f -- "$1"', target)


def home_directory(user: int) -> str:
    return "/home/agent" if user else "/root"


def _file_error(container: Container, path: str, error: EngineRefused) -> FileFailed:
    """If the container exists, any refusal of the engine is about the path."""
    container.require_alive()
    if error.status == HTTP_NOT_FOUND:
        return FileFailed(path, "no such file or directory")
    if "no space left" in error.reason or "quota exceeded" in error.reason:
        return FileFailed(path, NO_SPACE)
    # The reason follows the path on the engine's machine.
    return FileFailed(path, error.reason.rpartition(": ")[2])


async def _extract_file(path: str, about: Json, pieces: AsyncIterator[bytes], bytes_max: int) -> bytes:
    """The content of the one file in a tar."""
    if about["mode"] & GO_DIRECTORY:
        raise FileFailed(path, "is a directory")
    if about["mode"] & GO_TYPES:
        raise FileFailed(path, "is not a regular file")
    if about["size"] > bytes_max:
        raise FileFailed(path, f"has {about['size']} bytes, at most {bytes_max} may be read")
    content = bytearray()
    async for piece in pieces:
        content += piece
        if len(content) > about["size"] + TAR_SLACK_BYTES:
            raise FileFailed(path, "grows while it is read")
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        entry = tar.next()
        file = tar.extractfile(entry) if entry is not None and entry.isreg() else None
        if file is None:
            raise FileFailed(path, "changes while it is read")
        return file.read(bytes_max)


def _entries(listing: bytes) -> list[FileEntry] | None:
    """None if the directory changed between its names and their sizes."""
    names, _, lines = listing.rpartition(b"\0\0")
    if not names:
        return []
    parts = names.split(b"\0")
    facts = lines.splitlines()
    if len(parts) != len(facts):
        return None
    entries = []
    for name, fact in zip(parts, facts, strict=True):
        mode, size = fact.split()
        entries.append(file_entry(name.removeprefix(b"./").decode(errors="replace"), int(mode, 16), int(size)))
    return entries


# ---- tars ---------------------------------------------------------------------------------------------------------


def _directories(names: list[str]) -> list[tarfile.TarInfo]:
    """Each below the one before."""
    return [_directory("/".join(names[: count + 1])) for count in range(len(names))]


def _directory(name: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, DIRECTORY_MODE
    return entry


async def _tar(entries: list[tarfile.TarInfo], content: bytes = b"", user: int | None = None) -> AsyncIterator[bytes]:
    """A tar of entries that belong to the user; the last one has the content."""
    for entry in entries:
        if user is not None:
            entry.uid = entry.gid = user
        entry.mtime = int(time.time())
        yield entry.tobuf(tarfile.PAX_FORMAT)
    view = memoryview(content)
    for at in range(0, len(content), UPLOAD_BYTES):
        yield bytes(view[at : at + UPLOAD_BYTES])
    yield bytes(-len(content) % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE)


def _rewrite(path: str, source: BinaryIO, target: IO[bytes], user: int) -> None:
    """Copy the members that may enter a sandbox: files, directories and links, owned by its user, without privileges.
    Blocks."""
    with (
        tarfile.open(fileobj=source, mode="r|*") as source_tar,
        tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for entry in source_tar:
            require_safe_member(path, entry.name)
            if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
                continue
            entry.uid = entry.gid = user
            entry.uname = entry.gname = ""
            entry.mode &= 0o777
            entry.pax_headers = {}
            archive.addfile(entry, source_tar.extractfile(entry) if entry.isreg() else None)
