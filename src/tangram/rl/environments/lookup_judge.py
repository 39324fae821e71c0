"""The judge of lookup without its model: settings, cache on this machine, and training in a child process.

Owns the files in the cache folder. Never imports PyTorch. Promises that a file that it reads is complete and belongs to
its settings; a damaged one counts as missing. Two processes that train the same judge at once do it twice, and either
file is valid.
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

from tangram.cancellation import run_to_completion
from tangram.errors import InvalidConfig, ManagerError
from tangram.files.atomic_file import write_file

log = logging.getLogger("tangram")

VERSION = 1
"""Version of the cached format and the training; another version is another file."""
QUIET_S = 2.0
"""Slower phases are logged."""

Progress = Callable[[float, str], None]
"""Gets the share that is done, from 0 to 1, and a description."""


class JudgeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that determines a judge: the same settings make the same one."""

    groups: tuple[tuple[str, ...], ...]
    """The names of each entity."""
    layers: int = 2
    width: int = 64
    heads: int = 4
    steps_max: int = 1500
    batch: int = 256
    rate: float = 3e-3
    decay: float = 1.0
    """Weight decay, large enough that it has to infer which names belong together; with less it memorises the pairs."""
    held_out: float = 0.2
    """Share of pairs that it is never trained on."""
    accuracy_min: float = 0.99
    """On held-out pairs. Below this it refuses to start, because it would reward wrong answers."""
    seed: int = 1

    def __post_init__(self) -> None:
        names = [name for group in self.groups for name in group]
        if len(self.groups) < 2 or len(set(names)) != len(names):
            raise InvalidConfig("groups", self.groups, "at least two entities, and each name once")

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode([VERSION, self])).hexdigest()


def cache_folder() -> Path:
    """Folder of models that were trained on this machine."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "tangram" / "judges"


def cache_path(folder: Path, settings: JudgeSettings) -> Path:
    return folder / f"{settings.digest[:32]}.pt"


def load_cached(folder: Path, settings: JudgeSettings) -> bytes | None:
    """Returns the weights; None if they are missing or damaged."""
    try:
        stored = cache_path(folder, settings).read_bytes()
    except OSError:
        return None
    seal, content = stored[:32], stored[32:]
    return content if seal == _checksum(settings, content) else None


def store_cached(folder: Path, settings: JudgeSettings, content: bytes) -> None:
    """Writes atomically. Raises ManagerError."""
    path = cache_path(folder, settings)
    part = path.with_suffix(f".{secrets.token_hex(8)}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(path, _checksum(settings, content) + content, partial=part)
    except OSError as error:
        text = f"the judge cannot be kept in {folder}: {error.strerror}; XDG_CACHE_HOME names another folder"
        raise ManagerError(text, retry=False) from error


def _checksum(settings: JudgeSettings, content: bytes) -> bytes:
    return hashlib.sha256(settings.digest.encode() + content).digest()


async def ensure_judge(settings: JudgeSettings, folder: Path, progress: Progress | None = None) -> None:
    """Ensures that the folder has a judge, by training one if needed. Cancellation ends the training. Raises
    ManagerError."""
    if load_cached(folder, settings) is not None:
        return
    log.info("training the judge of lookup, once for this machine")
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "tangram.rl.model.judge", str(folder))
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        complaint = await _follow_training(process, settings, progress or _log_progress)
    finally:
        await run_to_completion(_kill(process))
    if process.returncode:
        last = complaint.strip().rpartition("\n")[2]
        raise ManagerError(f"the judge of lookup cannot be trained: {last}", retry=False)


async def _follow_training(process: asyncio.subprocess.Process, settings: JudgeSettings, progress: Progress) -> str:
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    began_s = asyncio.get_running_loop().time()
    process.stdin.write(msgspec.json.encode(settings))
    process.stdin.close()
    async with asyncio.TaskGroup() as group:
        complaint = group.create_task(process.stderr.read())
        async for line in process.stdout:
            share, _, text = line.decode(errors="replace").strip().partition(" ")
            if asyncio.get_running_loop().time() - began_s > QUIET_S:
                progress(float(share), text)
        await process.wait()
    return complaint.result().decode(errors="replace")


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Safe at any time: the file appears only when it is complete."""
    if process.returncode is None:
        process.kill()
    await process.communicate()  # also closes its pipes


def _log_progress(share: float, text: str) -> None:
    log.info("the judge of lookup: %.0f %%, %s", 100.0 * share, text)
