"""Fetching: weights are read while an engine goes on writing with those that it has.

Owns the second set of weights of an engine, into which the next ones are read; there are never more than two. Never
touches those that are being written with. Promises that what it hands out is whole, has the right checksum and is
finite; that a version which cannot be had is told and changes nothing; and that of two versions that are asked for one
after the other the newer one wins.
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
from tangram.rl.inference.engines.protocol import Weights
from tangram.rl.model.transformer import ModelConfig, Transformer
from tangram.rl.model.weight_store import PIECE_NUMBERS, pulling

NICENESS = 5
"""Of the thread that reads: where cores are short, whoever writes tokens has three times its share of them."""


class Fetcher:
    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, tell: Callable[[msgspec.Struct], None], beat_s: float
    ) -> None:
        self.seconds = 0.0
        """That were spent reading beside the engine's steps."""
        self._config, self._dtype, self._tell, self._beat_s = config, dtype, tell, beat_s
        self._spare: Transformer | None = None
        self._whole: Weights | None = None
        """What the spare holds, if it is of any use."""
        self._wanted: Weights | None = None
        """What is being read beside the steps, or was last."""
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def begin(self, ask: int, weights: Weights) -> None:
        """Reads them beside whatever the caller does, and tells when it is done. What was being read is given up."""
        self._give_up()
        self._wanted, self._stop = weights, threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(ask, weights, self._stop), name=f"fetch {weights.version}", daemon=True
        )
        self._thread.start()

    def exchanged(self, weights: Weights, old: Transformer) -> Transformer:
        """A model with these weights, for the one with the old ones. If they were not fetched they are read now. Raises
        ManagerError, and others."""
        if self._thread is not None and self._wanted == weights:
            self._thread.join()
        if self._whole != weights:
            self._give_up()
            for _ in self._reading(weights):
                pass
        new, self._spare, self._whole = self._spare, old, None
        assert new is not None
        return new

    def _give_up(self) -> None:
        """It ends after the piece that it is at."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, ask: int, weights: Weights, stop: threading.Event) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        began_s = told_s = time.monotonic()
        try:
            for _ in self._reading(weights):
                if stop.is_set():
                    self._tell(UpdateFailed(ask=ask, reason="others were asked for before it was read"))
                    return
                if time.monotonic() - told_s > self._beat_s:
                    told_s = time.monotonic()
                    self._tell(Fetching(ask=ask))
        except Exception as error:
            self._tell(UpdateFailed(ask=ask, reason=in_words(error)))
            return
        finally:
            self.seconds += time.monotonic() - began_s
        self._tell(Fetched(ask=ask, version=weights.version))

    def _reading(self, weights: Weights) -> Iterator[None]:
        self._whole = None
        if self._spare is None:
            self._spare = Transformer(self._config, self._dtype).requires_grad_(False)
        yield from pulling(weights, self._spare)
        yield from looking_through(self._spare)
        self._whole = weights


def looking_through(model: Transformer) -> Iterator[None]:
    """Raises ManagerError. Weights that are broken are found before the first token and not by it."""
    for name, weight in model.named_parameters():
        for piece in weight.detach().view(-1).split(PIECE_NUMBERS):
            least, most = torch.aminmax(piece)  # what is no number is both
            if not (math.isfinite(least) and math.isfinite(most)):
                raise ManagerError(f"the weights of {name} are not finite", retry=False)
            yield


def in_words(error: Exception) -> str:
    """What an engine says of what went wrong. The whole story of what nobody expected goes to stderr besides."""
    if not isinstance(error, TangramError | OSError):
        traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"
