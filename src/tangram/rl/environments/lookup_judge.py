"""The judge of lookup, before it is a model: its settings, where it is kept on this machine, and how it gets there.

Owns the files in the cache folder. Never imports PyTorch: training happens in a process of its own. Promises that a
file which is read is whole and is that of its settings; a damaged one is as good as none. Two processes that make the
same one at once do it twice, and either file is right.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from tangram.errors import InvalidConfig, ManagerError
from tangram.runtime.orchestrator import undisturbed

log = logging.getLogger("tangram")

VERSION = 1
"""Of what is kept, and of how it is trained: another one is another file."""
QUIET_S = 2.0
"""What takes longer is told of."""

Progress = Callable[[float, str], None]
"""Told how much is done, from 0 to 1, and what is being done."""


class JudgeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that makes a judge: the same settings make the same one."""

    groups: tuple[tuple[str, ...], ...]
    """The names of each entity."""
    layers: int = 2
    width: int = 64
    heads: int = 4
    steps_max: int = 1500
    batch: int = 256
    rate: float = 3e-3
    decay: float = 1.0
    """So large that it has to find out who belongs together: with less it learns the pairs by heart."""
    held_out: float = 0.2
    """Of all pairs, how many it is never trained on."""
    accuracy_min: float = 0.99
    """On pairs that it was not trained on. Below, it refuses to start: it would pay for wrong answers."""
    seed: int = 1

    def __post_init__(self) -> None:
        names = [name for group in self.groups for name in group]
        if len(self.groups) < 2 or len(set(names)) != len(names):
            raise InvalidConfig("groups", self.groups, "at least two entities, and each name once")

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode([VERSION, self])).hexdigest()


def cache_folder() -> Path:
    """Where models that were trained on this machine are kept."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "tangram" / "judges"


def kept_at(folder: Path, settings: JudgeSettings) -> Path:
    return folder / f"{settings.digest[:32]}.pt"


def kept(folder: Path, settings: JudgeSettings) -> bytes | None:
    """The weights; None if there are none, or they are damaged."""
    try:
        found = kept_at(folder, settings).read_bytes()
    except OSError:
        return None
    seal, content = found[:32], found[32:]
    return content if seal == _seal(settings, content) else None


def keep(folder: Path, settings: JudgeSettings, content: bytes) -> None:
    """It appears whole. Raises ManagerError."""
    path = kept_at(folder, settings)
    part = path.with_suffix(f".{secrets.token_hex(8)}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(_seal(settings, content) + content)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        said = f"the judge cannot be kept in {folder}: {error.strerror}; XDG_CACHE_HOME names another folder"
        raise ManagerError(said, retry=False) from error


def _seal(settings: JudgeSettings, content: bytes) -> bytes:
    return hashlib.sha256(settings.digest.encode() + content).digest()


async def have_judge(settings: JudgeSettings, folder: Path, progress: Progress | None = None) -> None:
    """There is one in the folder: it was there, or it is trained now. Whoever is cancelled here ends the training.
    Raises ManagerError."""
    if kept(folder, settings) is not None:
        return
    log.info("training the judge of lookup, once for this machine")
    pipe = asyncio.subprocess.PIPE
    words = (sys.executable, "-m", "tangram.rl.model.judge", str(folder))
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        complaint = await _follow(process, settings, progress or _logged)
    finally:
        await undisturbed(_end(process))
    if process.returncode:
        last = complaint.strip().rpartition("\n")[2]
        raise ManagerError(f"the judge of lookup cannot be trained: {last}", retry=False)


async def _follow(process: asyncio.subprocess.Process, settings: JudgeSettings, progress: Progress) -> str:
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    began_s = asyncio.get_running_loop().time()
    process.stdin.write(msgspec.json.encode(settings))
    process.stdin.close()
    async with asyncio.TaskGroup() as group:
        complaint = group.create_task(process.stderr.read())
        async for line in process.stdout:
            share, _, said = line.decode(errors="replace").strip().partition(" ")
            if asyncio.get_running_loop().time() - began_s > QUIET_S:
                progress(float(share), said)
        await process.wait()
    return complaint.result().decode(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Whatever it does: what it would have kept is not there before it is whole."""
    if process.returncode is None:
        process.kill()
    await process.communicate()  # also closes its pipes


def _logged(share: float, said: str) -> None:
    log.info("the judge of lookup: %.0f %%, %s", 100.0 * share, said)
