"""Filing: files of containers.

Owns the tars that go to the engine and come from it. Content moves through the engine's archive endpoints while the
container stands still or runs on, as it is: the engine looks every path up inside the container. It does so with the
rights of root inside, so the caller may read and write what programs in the sandbox may not; what it writes belongs to
their user. Listing and deleting are small scripts inside, with the rights of that user: the container runs meanwhile.

Promises that no more comes out than was asked for, and that a failure inside is FileFailed.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import posixpath
import stat
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from typing import IO, BinaryIO

from tangram.errors import FileFailed, ManagerError
from tangram.managers.sandboxes.docker.container import NOT_FOUND, Container
from tangram.managers.sandboxes.docker.engine import UPLOAD_BYTES, Engine, EngineRefused, Json, pieces_of, to_its_end
from tangram.managers.sandboxes.docker.programs import Answer, Programs
from tangram.managers.work import WORKSPACE, Entry, inside, require_below

LINKS_MAX = 40
"""Followed on the way to one file, as the kernel has it."""
ENTRIES_MAX = 100_000
LISTING_BYTES_MAX = 64 << 20
"""Of one listing."""
LISTING_ROUNDS = 5
"""Of looking at a directory that changes meanwhile."""
TAR_SLACK_BYTES = 1 << 16
"""Of a tar with one file: all that is not its content."""
SPOOL_BYTES = 8 << 20
"""Of a tar that is rewritten: what is held in memory; more goes to a file."""
DIRECTORY_MODE = 0o755
NO_SPACE = "no space left on device"

GO_DIRECTORY, GO_LINK = 1 << 31, 1 << 27
GO_TYPES = GO_DIRECTORY | GO_LINK | 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19
"""How the engine says what a file is; a regular one has none of these bits."""

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


class Filing:
    def __init__(self, engine: Engine, programs: Programs, found: Callable[[str], Container]) -> None:
        self._engine = engine
        self._programs = programs
        self._found = found

    async def read(self, sandbox: str, path: str, bytes_max: int) -> bytes:
        container = self._found(sandbox)
        target = inside(path)
        for _ in range(LINKS_MAX):
            async with self._download(container, path, target) as (about, pieces):
                if not about["mode"] & GO_LINK:
                    return await _only_file(path, about, pieces, bytes_max)
                target = posixpath.join(posixpath.dirname(target), about["linkTarget"])
        raise FileFailed(path, "too many links")

    async def write(self, sandbox: str, path: str, content: bytes, mode: int) -> None:
        """Nothing runs in the container meanwhile, so that nobody there sees a part of the file."""
        container = self._found(sandbox)
        above, name = posixpath.split(posixpath.normpath(inside(path)))
        if not name or path.endswith("/"):
            raise FileFailed(path, "is a directory")
        at, missing = await self._existing(container, path, above)
        file = tarfile.TarInfo("/".join([*missing, name]))
        file.size, file.mode = len(content), mode & 0o7777
        try:
            async with container.still():
                await to_its_end(
                    self._upload(container, path, at, _tar([*_directories(missing), file], content, container.user))
                )
        except FileFailed as error:
            if error.reason == NO_SPACE:
                await to_its_end(self._remove_part(container, f"{above}/{name}"))
            raise

    async def list(self, sandbox: str, path: str) -> list[Entry]:
        container = self._found(sandbox)
        for _ in range(LISTING_ROUNDS):
            answer = await self._ask(container, path, LIST_SCRIPT, bytes_max=LISTING_BYTES_MAX)
            if not answer.complete:
                raise FileFailed(path, f"has more names than {LISTING_BYTES_MAX} bytes hold")
            entries = _entries(answer.stdout)
            if entries is not None:
                if len(entries) > ENTRIES_MAX:
                    raise FileFailed(path, f"has {len(entries)} entries, more than {ENTRIES_MAX}")
                return sorted(entries, key=lambda entry: entry.name)
        raise FileFailed(path, "changes while it is listed")

    async def delete(self, sandbox: str, path: str) -> None:
        await self._ask(self._found(sandbox), path, DELETE_SCRIPT)

    async def pack(self, sandbox: str, path: str, into: BinaryIO, bytes_max: int) -> None:
        container = self._found(sandbox)
        total = 0
        failure: OSError | None = None
        async with self._download(container, path, inside(path)) as (_, pieces):
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
        container = self._found(sandbox)
        target = posixpath.normpath(inside(path))
        with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as spool:
            try:
                await asyncio.to_thread(_rewrite, path, tar, spool, container.user)
            except tarfile.TarError as error:
                raise FileFailed(path, f"what came is no tar: {error}") from error
            at, missing = await self._existing(container, path, target)
            if missing:
                await self._upload(container, path, at, _tar(_directories(missing), user=container.user))
            await to_its_end(self._upload(container, path, target, pieces_of(spool)))

    async def make_directories(self, container: Container) -> None:
        """In a container that is about to start: the workspace and the home of its user, and /tmp if there is none."""
        entries_by_place: dict[str, Entries] = {}
        for path, user, mode in (
            (WORKSPACE, container.user, DIRECTORY_MODE),
            (home(container.user), container.user, DIRECTORY_MODE),
            ("/tmp", 0, 0o1777),
        ):
            at, missing = await self._existing(container, path, path)
            if path == WORKSPACE and not missing:
                at, name = posixpath.split(at)
                missing = [name]  # it is there, and gets a new owner
            entries = _directories(missing)
            for entry in entries:
                entry.uid = entry.gid = user
                entry.mode = mode
            entries_by_place.setdefault(at, []).extend(entries)
        for at, entries in entries_by_place.items():
            if entries:
                await self._upload(container, at, at, _tar(entries))

    # ---- the engine ----

    @contextlib.asynccontextmanager
    async def _download(
        self, container: Container, path: str, target: str
    ) -> AsyncIterator[tuple[Json, AsyncIterator[bytes]]]:
        archive = f"/containers/{container.id}/archive"
        try:
            async with self._engine.download(archive, what="read a file", query={"path": target}) as found:
                yield found
        except EngineRefused as error:
            raise _failed(container, path, error) from error

    async def _upload(self, container: Container, path: str, at: str, content: AsyncIterator[bytes]) -> None:
        query = {"path": at, "noOverwriteDirNonDir": "true"}
        try:
            await self._engine.upload(
                "PUT", f"/containers/{container.id}/archive", content, what="write files", query=query
            )
        except EngineRefused as error:
            raise _failed(container, path, error) from error

    async def _existing(self, container: Container, path: str, directory: str) -> tuple[str, Names]:
        """The part of a path that is there, and the names that are missing below it."""
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
            return await self._engine.path_stat(archive, what="look at a file", query={"path": target})
        except EngineRefused as error:
            container.require()
            if error.status == NOT_FOUND:
                return None
            raise _failed(container, path, error) from error

    # ---- scripts inside ----

    async def _ask(self, container: Container, path: str, script: str, bytes_max: int = 1 << 16) -> Answer:
        async with container.visit():
            answer = await self._programs.ask(container, script, inside(path), bytes_max=bytes_max)
        if answer.code != 0:
            raise FileFailed(path, answer.stderr.splitlines()[-1] if answer.stderr else f"exit code {answer.code}")
        return answer

    async def _remove_part(self, container: Container, target: str) -> None:
        with contextlib.suppress(ManagerError):
            async with container.visit():
                await self._programs.ask(container, 'rm -f -- "$1"', target)


def home(user: int) -> str:
    return "/home/agent" if user else "/root"


def _failed(container: Container, path: str, error: EngineRefused) -> FileFailed:
    """Whatever an engine that has the container says against a path is about the file."""
    container.require()
    if error.status == NOT_FOUND:
        return FileFailed(path, "no such file or directory")
    if "no space left" in error.answer or "quota exceeded" in error.answer:
        return FileFailed(path, NO_SPACE)
    # Before the reason stands the path on the engine's machine.
    return FileFailed(path, error.answer.rpartition(": ")[2])


async def _only_file(path: str, about: Json, pieces: AsyncIterator[bytes], bytes_max: int) -> bytes:
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


def _entries(listing: bytes) -> list[Entry] | None:
    """None: the directory changed between its names and their sizes."""
    names, _, lines = listing.rpartition(b"\0\0")
    if not names:
        return []
    found = names.split(b"\0")
    facts = lines.splitlines()
    if len(found) != len(facts):
        return None
    entries = []
    for name, fact in zip(found, facts, strict=True):
        mode, size = fact.split()
        entries.append(_entry(name.removeprefix(b"./").decode(errors="replace"), int(mode, 16), int(size)))
    return entries


def _entry(name: str, mode: int, size: int) -> Entry:
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}
    return Entry(name=name, kind=kinds.get(stat.S_IFMT(mode), "other"), bytes=size, mode=stat.S_IMODE(mode))


# ---- tars ---------------------------------------------------------------------------------------------------------


def _directories(names: list[str]) -> list[tarfile.TarInfo]:
    """Each below the one before."""
    return [_directory("/".join(names[: count + 1])) for count in range(len(names))]


def _directory(name: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, DIRECTORY_MODE
    return entry


async def _tar(entries: list[tarfile.TarInfo], content: bytes = b"", user: int | None = None) -> AsyncIterator[bytes]:
    """Of entries that belong to the user; the last one has the content."""
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
    """All that belongs into a sandbox: files, directories and links of its user, without privileges. Blocks."""
    with (
        tarfile.open(fileobj=source, mode="r|*") as given,
        tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as made,
    ):
        for entry in given:
            require_below(path, entry.name)
            if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
                continue
            entry.uid = entry.gid = user
            entry.uname = entry.gname = ""
            entry.mode &= 0o777
            entry.pax_headers = {}
            made.addfile(entry, given.extractfile(entry) if entry.isreg() else None)
