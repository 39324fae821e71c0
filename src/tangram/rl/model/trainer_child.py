"""The program of the trainer process: executes commands one by one, publishes weights and sends heartbeats.

Owns the policy that is trained, its learner, and the folder in which weights are published: nobody else publishes
there. Never decides what is trained on, nor which checkpoint counts. Promises that a command which fails has changed
nothing that others can see: weights are published whole or not at all, and of a checkpoint that cannot be written
nothing stays. Whatever it does not expect ends it. It ends with its owner.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, Protocol

import torch

from tangram.errors import InvalidConfig, InvalidInput, ManagerError, TangramError
from tangram.processes.child_side import Owner
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.inference.engines.protocol import Weights
from tangram.rl.model.policy import OurPolicy, Policy, load
from tangram.rl.model.weight_store import forget, rollback
from tangram.rl.rollout.assembly import first_model
from tangram.rl.train import trainer_messages as messages
from tangram.rl.train.records import Batch, Demonstration, Stepped
from tangram.rl.train.trainer_messages import (
    AnyAnswer,
    AnyCommand,
    Beat,
    Close,
    Done,
    Failed,
    Hello,
    Imitate,
    Imitated,
    NotReady,
    Publish,
    Published,
    Ready,
    Refused,
    Save,
    Saved,
    Step,
)

AT_WORK = 0.01
"""Of the time that passed, so much was spent on the processor by one who works. A beat costs far less."""


class Learns(Protocol):
    """What a learner is for its process. It is made of settings, a policy, which it trains where it stands, and the
    limits of the tasks."""

    version: int

    def imitate(self, demonstrations: tuple[Demonstration, ...]) -> float: ...

    def step(self, batch: Batch) -> dict[str, float]:
        """Raises InvalidInput and ManagerError, and has changed nothing then."""
        ...

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...


class Pulse(threading.Thread):
    """Says that the process is at work, as long as it computes: one that waits for what never comes says nothing."""

    def __init__(self, owner: Owner[AnyCommand], beat_s: float) -> None:
        super().__init__(name="pulse", daemon=True)
        self._owner, self._beat_s = owner, beat_s
        self.ask: int | None = None
        """What is being done; None: nothing."""

    def run(self) -> None:
        known_s = time.process_time()
        while True:
            time.sleep(self._beat_s)
            used_s = time.process_time()
            ask = self.ask
            if ask is not None and used_s - known_s > AT_WORK * self._beat_s:
                self._owner.tell(Beat(ask=ask))
            known_s = used_s


class Trainer:
    def __init__(self, hello: Hello) -> None:
        """Raises TangramError and OSError."""
        settings = hello.settings
        torch.set_num_threads(settings.training.threads)
        self._folder, self._keep = Path(hello.folder), hello.keep
        self._policy = first_policy(settings, hello.vocabulary)
        self._learner: Learns = _named(hello.learner)(
            settings, self._policy, reward_low=hello.reward_low, tokens_longest=hello.tokens_longest
        )
        if hello.checkpoint is not None:
            self._learner.restore(Path(hello.checkpoint))
        rollback(self._folder, self._learner.version)
        self.first = self._publish(self._learner.version)

    def carry_out(self, command: AnyCommand) -> AnyAnswer:
        """Raises InvalidInput; ManagerError and OSError for what could not be written."""
        match command:
            case Imitate(ask=ask, episodes=episodes):
                return Imitated(ask=ask, loss=self._learner.imitate(episodes))
            case Publish(ask=ask, version=version):
                return Published(ask=ask, weights=self._publish(version))
            case Step(ask=ask, batch=batch):
                return Done(ask=ask, stepped=self._step(batch))
            case Save(ask=ask, folder=folder):
                with _nothing_half(Path(folder)):
                    self._learner.save(Path(folder))
                return Saved(ask=ask)
        raise AssertionError(f"a second {type(command).__name__}")

    def _step(self, batch: Batch) -> Stepped:
        if batch.version != self._learner.version:
            raise InvalidInput("version", batch.version, f"{self._learner.version}, which is that of the trainer")
        began_s = time.monotonic()
        try:
            metrics = self._learner.step(batch)
        except ManagerError as error:  # such as a gradient that is not finite: it has changed nothing
            raise InvalidInput("batch", str(error), "groups that can be trained on") from error
        assert self._learner.version == batch.version + 1, "a step makes one version"
        made_s = time.monotonic()
        weights = self._publish(self._learner.version)
        return Stepped(weights=weights, metrics=metrics, train_s=made_s - began_s, push_s=time.monotonic() - made_s)

    def _publish(self, version: int) -> Weights:
        try:
            weights = self._policy.publish(self._folder, version, replace=True)
        except ManagerError:  # a full disk, perhaps of what engines can do without
            forget(self._folder, keep=1)
            weights = self._policy.publish(self._folder, version, replace=True)
        with contextlib.suppress(ManagerError):  # whoever publishes next tries again
            forget(self._folder, self._keep)
        return weights


def first_policy(settings: TrainSettings, vocabulary: int) -> Policy:
    """Raises InvalidConfig and ManagerError."""
    checkpoint = settings.policy.checkpoint
    for_others = all(engine.kind == "openai" for engine in settings.engines)
    if not checkpoint:
        return OurPolicy(first_model(settings, vocabulary), for_others=for_others)
    policy = load(checkpoint, for_others=for_others)
    if policy.vocabulary < vocabulary:
        raise InvalidConfig(
            "policy.checkpoint", checkpoint, f"a model that knows all {vocabulary} tokens of its vocabulary"
        )
    return policy


def _named(learner: str) -> Callable[..., Learns]:
    module, _, name = learner.partition(":")
    found: Callable[..., Learns] = getattr(importlib.import_module(module), name)
    return found


@contextlib.contextmanager
def _nothing_half(folder: Path) -> Iterator[None]:
    """What is raised inside leaves in the folder what was there before."""
    before = set(folder.iterdir())
    try:
        yield
    except BaseException:
        for path in set(folder.iterdir()) - before:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        raise


def main(fd: int) -> NoReturn:
    other = Owner(fd, messages.commands())
    hello, *commands = other.first()
    assert isinstance(hello, Hello), hello
    pulse = Pulse(other, hello.beat_s)
    pulse.start()
    try:
        trainer = Trainer(hello)
    except InvalidInput as error:
        other.tell(Refused(ask=0, field=error.field, value=str(error.value), expected=error.expected))
        sys.exit(1)
    except (TangramError, OSError) as error:
        retry = not isinstance(error, TangramError) or getattr(error, "retry", False)
        other.tell(NotReady(ask=0, reason=f"{type(error).__name__}: {error}", retry=retry))
        sys.exit(1)
    gc.collect()
    gc.freeze()  # what is there now stays
    other.tell(Ready(ask=0, weights=trainer.first))
    while True:
        for command in commands:
            if isinstance(command, Close):
                other.leave()
            pulse.ask = command.ask
            try:
                answer = trainer.carry_out(command)
            except InvalidInput as error:
                answer = Refused(ask=command.ask, field=error.field, value=str(error.value), expected=error.expected)
            except (ManagerError, OSError) as error:
                answer = Failed(ask=command.ask, reason=str(error), retry=getattr(error, "retry", True))
            pulse.ask = None
            other.tell(answer)
        commands = other.first()
