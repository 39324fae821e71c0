"""The judge of lookup without its model: settings, cache on this machine, and training in a child process.

Owns the files in the cache folder. Never imports PyTorch. Promises that a file that it reads is complete and belongs to
its settings; a damaged one counts as missing. Two processes that train the same judge at once do it twice, and either
file is valid.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from tangram.cancellation import run_to_completion
from tangram.errors import InvalidConfig, ManagerError
from tangram.files.atomic_file import write_file
from tangram.processes.child import ChildProcess
from tangram.processes.framing import FrameDecoder

log = logging.getLogger("tangram")

VERSION = 1
"""Version of the cached format and the training; another version is another file."""
PROGRAM = "tangram.rl.model.judge"
QUIET_S = 2.0
"""Slower phases are logged."""

Progress = Callable[[float, str], None]
"""Called with the finished share, from 0 to 1, and a description."""


class JudgeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a judge: the same settings give the same judge."""

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


# ---- training in a child process ----


class TrainJudge(msgspec.Struct, frozen=True, kw_only=True, tag="TrainJudge"):
    request_id: int
    settings: JudgeSettings
    folder: str


class JudgeProgress(msgspec.Struct, frozen=True, kw_only=True, tag="JudgeProgress"):
    share: float
    text: str


class JudgeTrained(msgspec.Struct, frozen=True, kw_only=True, tag="JudgeTrained"):
    request_id: int
    error: str = ""
    """The reason of a failure."""


async def ensure_judge(settings: JudgeSettings, folder: Path, progress: Progress | None = None) -> None:
    """Ensures that the folder has a judge, by training one if needed. Cancellation ends the training. Raises
    ManagerError."""
    if load_cached(folder, settings) is not None:
        return
    log.info("training the judge of lookup, once for this machine")
    child = _JudgeChild(progress or _log_progress)
    try:
        await child.start(PROGRAM, 1, None, None)
        number = child.next_number()
        trained = await child.request(number, TrainJudge(request_id=number, settings=settings, folder=str(folder)))
    finally:
        # Safe at any time: the file appears only when it is complete.
        await run_to_completion(child.end("it is not needed any more"))
    if trained.error:
        raise child.death_error(trained.error)


class _JudgeChild(ChildProcess):
    """The process that trains. It imports PyTorch before it reads its request."""

    def __init__(self, progress: Progress) -> None:
        super().__init__("the judge of lookup", FrameDecoder(JudgeProgress | JudgeTrained), None)
        self._progress = progress
        self._began_s = self._loop.time()

    async def greet(self, hello: None) -> None:
        self.mark_ready()

    def on_message(self, reply: JudgeProgress | JudgeTrained) -> None:
        match reply:
            case JudgeProgress(share=share, text=text):
                if self._loop.time() - self._began_s > QUIET_S:
                    self._progress(share, text)
            case JudgeTrained(request_id=number):
                self.resolve(number, reply)

    def death_error(self, reason: str) -> ManagerError:
        return ManagerError(f"{self._title} cannot be trained: {reason}", retry=False)


def _log_progress(share: float, text: str) -> None:
    log.info("the judge of lookup: %.0f %%, %s", 100.0 * share, text)
