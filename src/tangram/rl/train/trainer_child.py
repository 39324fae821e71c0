"""The program of the trainer process: executes commands one by one, publishes weights and sends heartbeats.

Owns the policy in training, its learner, and the folder of published weights, into which no other process writes. Never
decides what is trained on, nor which checkpoint counts. Promises that a failed command has no visible effect: weights
are published completely or not at all, and a failed checkpoint leaves no files. An unexpected error ends the process.
It ends with its supervisor.
"""

from __future__ import annotations

import contextlib
import gc
import pkgutil
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, Protocol

import torch

from tangram.errors import InvalidInput, ManagerError, TangramError
from tangram.processes.child_side import SupervisorConnection
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.model.model_folder import require_vocabulary
from tangram.rl.model.policy import Policy, TransformerPolicy, load
from tangram.rl.model.weight_store import prune_versions, rollback
from tangram.rl.rollout.assembly import first_model
from tangram.rl.train import trainer_messages as messages
from tangram.rl.train.trainer import TrainStepResult
from tangram.rl.trajectories.training_batch import Demonstration, TrainingBatch

BUSY_CPU_SHARE = 0.01
"""Share of CPU time above which a process counts as working. A heartbeat itself needs far less."""


class LearnerLike(Protocol):
    """The interface of a learner in its process. Made from settings, a policy, which it trains in place, and limits of
    tasks."""

    version: int

    def imitate(self, demonstrations: tuple[Demonstration, ...]) -> float: ...

    def step(self, batch: TrainingBatch) -> dict[str, float]:
        """Raises InvalidInput and ManagerError, and has changed nothing then."""
        ...

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...


class HeartbeatThread(threading.Thread):
    """Sends heartbeats while the process computes; a process that waits forever sends none."""

    def __init__(self, supervisor: SupervisorConnection[messages.AnyTrainerCommand], heartbeat_s: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._supervisor, self._heartbeat_s = supervisor, heartbeat_s
        self._request_id: int | None = None
        """The current command; None if idle."""

    @contextlib.contextmanager
    def computing(self, request_id: int) -> Iterator[None]:
        self._request_id = request_id
        try:
            yield
        finally:
            self._request_id = None

    def run(self) -> None:
        before_s = time.process_time()
        while True:
            time.sleep(self._heartbeat_s)
            used_s = time.process_time()
            request_id = self._request_id
            if request_id is not None and used_s - before_s > BUSY_CPU_SHARE * self._heartbeat_s:
                self._supervisor.send(messages.TrainerHeartbeat(request_id=request_id))
            before_s = used_s


class TrainerWorker:
    def __init__(self, hello: messages.TrainerHello) -> None:
        """Raises TangramError and OSError."""
        settings = hello.settings
        torch.set_num_threads(settings.training.threads)
        self._folder, self._keep = Path(hello.folder), hello.keep
        self._policy = first_policy(settings, hello.vocabulary)
        self._learner: LearnerLike = pkgutil.resolve_name(hello.learner)(
            settings, self._policy, reward_low=hello.reward_low, tokens_longest=hello.tokens_longest
        )
        if hello.checkpoint is not None:
            self._learner.restore(Path(hello.checkpoint))
        rollback(self._folder, self._learner.version)
        self.initial_weights = self._publish(self._learner.version)

    def handle(self, command: messages.AnyTrainerCommand) -> messages.AnyTrainerReply:
        """Raises InvalidInput; ManagerError and OSError for what cannot be written."""
        match command:
            case messages.CloningStep(request_id=request_id, episodes=episodes):
                return messages.CloningStepDone(request_id=request_id, loss=self._learner.imitate(episodes))
            case messages.PublishWeights(request_id=request_id, version=version):
                return messages.WeightsPublished(request_id=request_id, weights=self._publish(version))
            case messages.TrainStep(request_id=request_id, batch=batch):
                return messages.TrainStepDone(request_id=request_id, stepped=self._step(batch))
            case messages.SaveCheckpoint(request_id=request_id, folder=folder):
                with _remove_partial_files(Path(folder)):
                    self._learner.save(Path(folder))
                return messages.CheckpointSaved(request_id=request_id)
        raise AssertionError(f"a second {type(command).__name__}")

    def _step(self, batch: TrainingBatch) -> TrainStepResult:
        if batch.version != self._learner.version:
            raise InvalidInput("version", batch.version, f"{self._learner.version}, which is that of the trainer")
        began_at = time.monotonic()
        try:
            metrics = self._learner.step(batch)
        except ManagerError as error:  # e.g. a gradient that is not finite; nothing has changed
            raise InvalidInput("batch", str(error), "groups that can be trained on") from error
        assert self._learner.version == batch.version + 1, "a step makes one version"
        made_at = time.monotonic()
        weights = self._publish(self._learner.version)
        return TrainStepResult(
            weights=weights, metrics=metrics, train_s=made_at - began_at, push_s=time.monotonic() - made_at
        )

    def _publish(self, version: int) -> PolicyWeights:
        try:
            weights = self._policy.publish(self._folder, version, replace=True)
        except ManagerError:  # a full disk: delete versions that engines can do without, and try again
            prune_versions(self._folder, keep=1)
            weights = self._policy.publish(self._folder, version, replace=True)
        with contextlib.suppress(ManagerError):  # the next publication tries again
            prune_versions(self._folder, self._keep)
        return weights


def first_policy(settings: TrainSettings, vocabulary: int) -> Policy:
    """Raises InvalidConfig and ManagerError."""
    checkpoint = settings.policy.checkpoint
    for_others = all(engine.kind == "openai" for engine in settings.engines)
    if not checkpoint:
        return TransformerPolicy(first_model(settings, vocabulary), for_external_servers=for_others)
    policy = load(checkpoint, for_external_servers=for_others)
    require_vocabulary(checkpoint, policy.vocabulary, vocabulary)
    return policy


@contextlib.contextmanager
def _remove_partial_files(folder: Path) -> Iterator[None]:
    """On an exception, deletes what the block added to the folder."""
    before = set(folder.iterdir())
    try:
        yield
    except BaseException:
        for path in set(folder.iterdir()) - before:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        raise


def main(fd: int) -> NoReturn:
    supervisor = SupervisorConnection(fd, messages.command_frames())
    hello, *commands = supervisor.receive_first()
    assert isinstance(hello, messages.TrainerHello), hello
    heartbeat = HeartbeatThread(supervisor, hello.beat_s)
    heartbeat.start()
    try:
        trainer = TrainerWorker(hello)
    except InvalidInput as error:
        supervisor.send(
            messages.TrainerRefused(request_id=0, field=error.field, value=str(error.value), expected=error.expected)
        )
        sys.exit(1)
    except (TangramError, OSError) as error:
        retry = not isinstance(error, TangramError) or getattr(error, "retry", False)
        supervisor.send(messages.TrainerNotReady(request_id=0, reason=f"{type(error).__name__}: {error}", retry=retry))
        sys.exit(1)
    gc.collect()
    gc.freeze()  # what exists now stays; the garbage collector skips it
    supervisor.send(messages.TrainerReady(request_id=0, weights=trainer.initial_weights))
    while True:
        for command in commands:
            if isinstance(command, messages.CloseTrainer):
                supervisor.exit_process()
            try:
                with heartbeat.computing(command.request_id):
                    reply = trainer.handle(command)
            except InvalidInput as error:
                reply = messages.TrainerRefused(
                    request_id=command.request_id, field=error.field, value=str(error.value), expected=error.expected
                )
            except (ManagerError, OSError) as error:
                reply = messages.TrainerFailed(
                    request_id=command.request_id, reason=str(error), retry=getattr(error, "retry", True)
                )
            supervisor.send(reply)
        commands = supervisor.receive_first()
