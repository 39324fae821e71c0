"""The weight fetcher: reads new weights while an engine generates with the current ones.

Owns the second set of weights of an engine, into which the next version is read; there are never more than two. Never
touches the current set. Promises that fetched weights are complete, have the right checksum and are finite; that an
unusable version is reported and changes nothing; and that of two requested versions the later request wins.
"""

from __future__ import annotations

import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import msgspec
import torch

from tangram.errors import ManagerError, TangramError
from tangram.rl.inference.engines.messages import Fetched, Fetching, UpdateFailed
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.model.transformer import Transformer, TransformerConfig
from tangram.rl.model.weight_store import CHUNK_ELEMENTS, pull_incrementally

NICENESS = 5
"""Niceness of the reading thread: where cores are short, the decoding thread gets three times its share."""


class WeightFetcher:
    def __init__(
        self, config: TransformerConfig, dtype: torch.dtype, send: Callable[[msgspec.Struct], None], heartbeat_s: float
    ) -> None:
        self.fetch_s = 0.0
        """Time spent reading while the engine generates."""
        self._config, self._dtype, self._send, self._heartbeat_s = config, dtype, send, heartbeat_s
        self._spare: Transformer | None = None
        self._spare_weights: PolicyWeights | None = None
        """Version of the spare set, if it is usable."""
        self._requested: PolicyWeights | None = None
        """The version that is being read, or was last."""
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def begin(self, request_id: int, weights: PolicyWeights) -> None:
        """Starts reading in the background, and sends Fetched or UpdateFailed at the end. Cancels the read before
        it."""
        self._cancel()
        self._requested, self._stop = weights, threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(request_id, weights, self._stop), name=f"fetch {weights.version}", daemon=True
        )
        self._thread.start()

    def swap(self, weights: PolicyWeights, old: Transformer) -> Transformer:
        """Returns a model with these weights, in exchange for the old one. Reads them now if they were not fetched.
        Raises ManagerError, and others."""
        if self._thread is not None and self._requested == weights:
            self._thread.join()
        if self._spare_weights != weights:
            self._cancel()
            for _ in self._read_spare(weights):
                pass
        new, self._spare, self._spare_weights = self._spare, old, None
        assert new is not None
        return new

    def _cancel(self) -> None:
        """Ends the read after its current piece."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, request_id: int, weights: PolicyWeights, stop: threading.Event) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        began_at = last_heartbeat_at = time.monotonic()
        try:
            for _ in self._read_spare(weights):
                if stop.is_set():
                    self._send(
                        UpdateFailed(request_id=request_id, reason="a later version was requested before it was read")
                    )
                    return
                if time.monotonic() - last_heartbeat_at > self._heartbeat_s:
                    last_heartbeat_at = time.monotonic()
                    self._send(Fetching(request_id=request_id))
        except Exception as error:
            self._send(UpdateFailed(request_id=request_id, reason=error_text(error)))
            return
        finally:
            self.fetch_s += time.monotonic() - began_at
        self._send(Fetched(request_id=request_id, version=weights.version))

    def _read_spare(self, weights: PolicyWeights) -> Iterator[None]:
        self._spare_weights = None
        if self._spare is None:
            self._spare = Transformer(self._config, self._dtype).requires_grad_(False)
        yield from pull_incrementally(weights, self._spare)
        yield from check_finite(self._spare)
        self._spare_weights = weights


def check_finite(model: Transformer) -> Iterator[None]:
    """Finds broken weights before the first token. Raises ManagerError."""
    for name, weight in model.named_parameters():
        for piece in weight.detach().view(-1).split(CHUNK_ELEMENTS):
            least, most = torch.aminmax(piece)  # NaN propagates into both
            if not (math.isfinite(least) and math.isfinite(most)):
                raise ManagerError(f"the weights of {name} are not finite", retry=False)
            yield


def error_text(error: Exception) -> str:
    """Returns the error as text for the supervisor. The traceback of an unexpected error goes to stderr."""
    if not isinstance(error, TangramError | OSError):
        traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"
