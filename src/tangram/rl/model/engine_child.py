"""The program of an engine process: executes commands between steps, answers requests and sends heartbeats.

Owns a model, its batcher and one end of a socket. The loop executes all pending commands, without waiting while there
is work, makes one step, and sends the results. So a command delays others only by its own bookkeeping: a separate
thread reads new weights, and the loop switches to them between two steps. Partial generations are sent every few steps,
so that little is lost if this process is killed. The process ends with its supervisor: when the socket closes, or by a
signal.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import NoReturn

import msgspec
import torch

from tangram.errors import InvalidInput
from tangram.processes.child_side import SupervisorConnection
from tangram.rl.inference.engines import messages
from tangram.rl.inference.engines.protocol import EngineStatistics, PolicyWeights
from tangram.rl.model.batching import Batcher, BatcherStepResult
from tangram.rl.model.sampling import BrokenLogits
from tangram.rl.model.weight_fetcher import WeightFetcher, check_finite, error_text
from tangram.rl.model.weight_store import pull

DELTA_STEPS = 16
"""Steps between two messages with partial generations: one message for many tokens costs little, and a killed engine
loses no more."""
STEPS_RECORDED_MAX = 4096
"""Time between two heartbeats, if steps are recorded."""
DTYPES = {"float32": torch.float32, "float64": torch.float64}


class EngineLoop:
    """The loop of an engine."""

    def __init__(
        self, supervisor: SupervisorConnection[messages.AnyEngineCommand], hello: messages.EngineHello
    ) -> None:
        """Raises TangramError."""
        self._supervisor, self._hello = supervisor, hello
        settings = hello.settings
        self._dtype = DTYPES[hello.dtype]
        torch.set_num_threads(1 if settings.deterministic else settings.threads)
        model = pull(hello.weights).to(self._dtype).requires_grad_(False)
        for _ in check_finite(model):
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
        self._fetcher = WeightFetcher(model.config, self._dtype, supervisor.send, hello.beat_s)
        self._idle_s = self._update_s = 0.0
        self._steps_since_deltas = 0
        """Since partial generations were sent."""
        self._last_heartbeat_at = time.monotonic()
        self._steps: list[messages.StepRecord] = []
        self._commands_since_step: list[str] = []
        """Tags of the commands since the last step."""

    def run(self) -> NoReturn:
        while True:
            if self._batcher.busy:
                commands = self._supervisor.receive(wait=False)
            else:
                self._send_heartbeat()
                began_at = time.monotonic()
                commands = self._supervisor.receive(wait=True)
                if not self._batcher.suspended:
                    self._idle_s += time.monotonic() - began_at
            for command in commands:
                self._handle(command)
            if self._batcher.busy:
                self._step()

    # ---- commands ----

    def _handle(self, command: messages.AnyEngineCommand) -> None:
        if self._hello.record_steps:
            self._commands_since_step.append(str(command.__struct_config__.tag))
        match command:
            case messages.AddRequest(request=request):
                try:
                    self._batcher.add(request)
                except InvalidInput as error:
                    self._supervisor.send(
                        messages.GenerationRefused(
                            id=request.id, field=error.field, value=str(error.value), expected=error.expected
                        )
                    )
            case messages.AbortRequest(id=id):
                self._batcher.abort(id)
            case messages.Suspend(request_id=request_id):
                self._batcher.suspend()
                self._send_deltas()
                self._supervisor.send(messages.EngineAcknowledged(request_id=request_id))
            case messages.Fetch(request_id=request_id, weights=weights):
                self._fetcher.begin(request_id, weights)
            case messages.Update(request_id=request_id, weights=weights):
                self._supervisor.send(self._update(request_id, weights))
            case messages.Resume(request_id=request_id):
                self._batcher.resume()
                self._supervisor.send(messages.EngineAcknowledged(request_id=request_id))
            case messages.CloseEngine():
                self._supervisor.exit_process()
            case messages.EngineHello():
                raise AssertionError("a second Hello")

    def _update(self, request_id: int, weights: PolicyWeights) -> messages.AnyEngineReply:
        began_at = time.monotonic()
        try:
            self._model = self._fetcher.swap(weights, self._model)
        except Exception as error:
            return messages.UpdateFailed(request_id=request_id, reason=error_text(error))
        finally:
            self._update_s += time.monotonic() - began_at
        self._batcher.update(self._model, weights.version)
        return messages.Updated(request_id=request_id, version=weights.version)

    # ---- steps ----

    def _step(self) -> None:
        try:
            result = self._batcher.step()
        except BrokenLogits as error:
            sys.exit(f"version {self._batcher.version}: {error}")
        if result.done:
            self._supervisor.send(
                *(messages.GenerationDone(id=id, generation=generation) for id, generation in result.done)
            )
        self._steps_since_deltas += 1
        if self._steps_since_deltas >= DELTA_STEPS:
            self._send_deltas()
        if self._hello.record_steps:
            self._record_step(result)
        if time.monotonic() - self._last_heartbeat_at > self._hello.beat_s:
            self._send_heartbeat()

    def _send_deltas(self) -> None:
        self._steps_since_deltas = 0
        self._supervisor.send(*self._batcher.take_deltas())

    def _record_step(self, result: BatcherStepResult) -> None:
        if len(self._steps) < STEPS_RECORDED_MAX:
            record = messages.StepRecord(
                ended_s=time.monotonic(),
                commands=tuple(self._commands_since_step),
                prefilled=result.prefilled,
                decoded=result.decoded,
            )
            self._steps.append(record)
        self._commands_since_step = []

    def _send_heartbeat(self) -> None:
        self._last_heartbeat_at = time.monotonic()
        steps, self._steps = tuple(self._steps), []
        self._supervisor.send(messages.EngineHeartbeat(statistics=self._statistics(), steps=steps))

    def _statistics(self) -> EngineStatistics:
        return msgspec.structs.replace(
            self._batcher.statistics(), idle_s=self._idle_s, update_s=self._update_s + self._fetcher.fetch_s
        )


def _pace(took_s: float, least_s: float) -> float:
    """Sleeps until an emulated step took at least `least_s`."""
    if took_s >= least_s:
        return took_s
    time.sleep(least_s - took_s)
    return least_s


def main(fd: int) -> NoReturn:
    supervisor = SupervisorConnection(fd, messages.command_frames())
    hello = supervisor.receive_first()[0]
    assert isinstance(hello, messages.EngineHello), hello
    try:
        engine = EngineLoop(supervisor, hello)
    except Exception as error:
        supervisor.send(messages.EngineNotReady(reason=error_text(error)))
        sys.exit(1)
    gc.collect()
    gc.freeze()  # present objects stay; scanning them for garbage would take longer than a step
    supervisor.send(messages.EngineReady())
    engine.run()
