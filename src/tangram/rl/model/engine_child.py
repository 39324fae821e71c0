"""The program of an engine process: takes commands between steps, answers requests and sends heartbeats.

Owns a model, its batcher and one end of a socket. The loop takes all commands that are there, never waiting for one
while there is work, then makes one step, then says what came of it. Commands therefore cost others what they take to be
noted and nothing else: new weights are read by a thread beside the loop, and switched to between two steps. What is
being written is told every few steps as well, so that little is lost if this process is killed. It ends with its owner:
when the socket closes, or by signal if it cannot look there.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import NoReturn

import msgspec
import torch

from tangram.errors import InvalidInput
from tangram.processes.child_side import Owner
from tangram.rl.inference.engines import messages
from tangram.rl.inference.engines.messages import (
    Abort,
    Acknowledged,
    Add,
    AnyAnswer,
    AnyCommand,
    Beat,
    Close,
    Done,
    Fetch,
    Hello,
    NotReady,
    Ready,
    Refused,
    Resume,
    StepRecord,
    Suspend,
    Update,
    Updated,
    UpdateFailed,
)
from tangram.rl.inference.engines.protocol import EngineStatistics, Weights
from tangram.rl.model.batching import Batcher, Happened
from tangram.rl.model.sampling import BrokenLogits
from tangram.rl.model.weight_fetcher import Fetcher, in_words, looking_through
from tangram.rl.model.weight_store import pull

TELL_STEPS = 16
"""After which what is being written is told: a message for so many tokens costs little, and a killed engine loses
no more than these."""
STEPS_RECORDED_MAX = 4096
"""Between two beats, if they are recorded."""
DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Engine:
    """The loop."""

    def __init__(self, owner: Owner[AnyCommand], hello: Hello) -> None:
        """Raises TangramError."""
        self._owner, self._hello = owner, hello
        settings = hello.settings
        self._dtype = DTYPES[hello.dtype]
        torch.set_num_threads(1 if settings.deterministic else settings.threads)
        model = pull(hello.weights).to(self._dtype).requires_grad_(False)
        for _ in looking_through(model):
            pass
        self._batcher = Batcher(
            model,
            hello.weights.version,
            slots=settings.slots,
            sessions=settings.sessions,
            context_max=settings.context_max,
            chunk=settings.chunk,
            deterministic=settings.deterministic,
            now=time.monotonic,
            prefill_s_per_token=settings.prefill_s_per_token,
            decode_s_per_step=settings.decode_s_per_step,
            pace=_pace,
            name=hello.name,
        )
        self._model = model
        self._fetcher = Fetcher(model.config, self._dtype, owner.tell, hello.beat_s)
        self._idle_s = self._update_s = 0.0
        self._untold = 0
        """Steps since what is being written was told."""
        self._beat_s = time.monotonic()
        self._steps: list[StepRecord] = []
        self._taken: list[str] = []
        """Kinds of the commands since the last step."""

    def run(self) -> NoReturn:
        while True:
            if self._batcher.busy:
                commands = self._owner.commands(wait=False)
            else:
                self._beat()
                began_s = time.monotonic()
                commands = self._owner.commands(wait=True)
                if not self._batcher.suspended:
                    self._idle_s += time.monotonic() - began_s
            for command in commands:
                self._carry_out(command)
            if self._batcher.busy:
                self._step()

    # ---- commands ----

    def _carry_out(self, command: AnyCommand) -> None:
        if self._hello.record_steps:
            self._taken.append(str(command.__struct_config__.tag))
        match command:
            case Add(request=request):
                try:
                    self._batcher.add(request)
                except InvalidInput as error:
                    self._owner.tell(
                        Refused(id=request.id, field=error.field, value=str(error.value), expected=error.expected)
                    )
            case Abort(id=id):
                self._batcher.abort(id)
            case Suspend(ask=ask):
                self._batcher.suspend()
                self._tell_written()
                self._owner.tell(Acknowledged(ask=ask))
            case Fetch(ask=ask, weights=weights):
                self._fetcher.begin(ask, weights)
            case Update(ask=ask, weights=weights):
                self._owner.tell(self._update(ask, weights))
            case Resume(ask=ask):
                self._batcher.resume()
                self._owner.tell(Acknowledged(ask=ask))
            case Close():
                self._owner.leave()
            case Hello():
                raise AssertionError("a second Hello")

    def _update(self, ask: int, weights: Weights) -> AnyAnswer:
        began_s = time.monotonic()
        try:
            self._model = self._fetcher.exchanged(weights, self._model)
        except Exception as error:
            return UpdateFailed(ask=ask, reason=in_words(error))
        finally:
            self._update_s += time.monotonic() - began_s
        self._batcher.update(self._model, weights.version)
        return Updated(ask=ask, version=weights.version)

    # ---- steps ----

    def _step(self) -> None:
        try:
            happened = self._batcher.step()
        except BrokenLogits as error:
            sys.exit(f"version {self._batcher.version}: {error}")
        if happened.done:
            self._owner.tell(*(Done(id=id, generation=generation) for id, generation in happened.done))
        self._untold += 1
        if self._untold >= TELL_STEPS:
            self._tell_written()
        if self._hello.record_steps:
            self._record(happened)
        if time.monotonic() - self._beat_s > self._hello.beat_s:
            self._beat()

    def _tell_written(self) -> None:
        self._untold = 0
        self._owner.tell(*self._batcher.take_written())

    def _record(self, happened: Happened) -> None:
        if len(self._steps) < STEPS_RECORDED_MAX:
            record = StepRecord(
                ended_s=time.monotonic(),
                commands=tuple(self._taken),
                prefilled=happened.prefilled,
                decoded=happened.decoded,
            )
            self._steps.append(record)
        self._taken = []

    def _beat(self) -> None:
        self._beat_s = time.monotonic()
        steps, self._steps = tuple(self._steps), []
        self._owner.tell(Beat(statistics=self._statistics(), steps=steps))

    def _statistics(self) -> EngineStatistics:
        return msgspec.structs.replace(
            self._batcher.statistics(), idle_s=self._idle_s, update_s=self._update_s + self._fetcher.seconds
        )


def _pace(took_s: float, least_s: float) -> float:
    """Emulated hardware takes at least so long."""
    if took_s >= least_s:
        return took_s
    time.sleep(least_s - took_s)
    return least_s


def main(fd: int) -> NoReturn:
    other = Owner(fd, messages.commands())
    hello = other.first()[0]
    assert isinstance(hello, Hello), hello
    try:
        engine = Engine(other, hello)
    except Exception as error:
        other.tell(NotReady(reason=in_words(error)))
        sys.exit(1)
    gc.collect()
    gc.freeze()  # what is there now stays: looking for garbage among it would take longer than a step
    other.tell(Ready())
    engine.run()
