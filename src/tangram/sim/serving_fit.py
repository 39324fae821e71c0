"""The efficiency of each class of hardware, fitted to one published figure and to nothing else.

Owns the figure's numbers, the fit, and its result as constants. Promises that `fit()` can be run again and gives the
constants; a test does. All of it is **simulated**.

The figure: Qwen3-8B, 2 H800 against 6 H20 (about the same cost), prefix caching on, batches of 64 to 192. FrozenLake
on H800 takes down to 0.53 of the time on H20; GEM-math on H20 takes 0.49-0.79 of the time on H800. Ratios of times tell
how the classes differ, not how fast either is. Hence of the four efficiencies two are fitted, the ratio H800 : H20 of
each phase, and the level of each phase is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from tangram.errors import InvariantError
from tangram.sim.serving_fleet import Pool, serve
from tangram.sim.serving_model import H20, H800, QWEN3_8B, Efficiency
from tangram.sim.serving_tasks import FROZENLAKE, GEM_MATH, Task, draw

LEVEL = 0.7
"""Geometric mean of the efficiencies of the two classes, in both phases. Assumed: serving engines report 0.6 to 0.8."""
OVERHEAD_S = 0.002
"""Of every step. Assumed: a few milliseconds of an engine's loop are not hidden behind the device."""
BATCHES = (64, 128, 192)
FROZENLAKE_RATIO = 0.53
"""Time on H800 / time on H20, lowest over the batches."""
GEM_MATH_BAND = (0.49, 0.79)
"""Time on H20 / time on H800 over the batches. Its middle is fitted; that all batches fall into it is then a check."""
SEEDS = (1, 2, 3, 4)
TOLERANCE = 0.002
"""Of the logarithm of a ratio: far below what the published digits tell apart."""
ATTEMPTS_MAX = 12

COMPUTE_ONLY, BANDWIDTH_ONLY = (Pool(H800, 2),), (Pool(H20, 6),)


def efficiencies(prefill_ratio: float, decode_ratio: float) -> dict[str, Efficiency]:
    """Of H800 and H20, from the ratios H800 : H20."""
    prefill, decode = math.sqrt(prefill_ratio), math.sqrt(decode_ratio)
    return {
        H800.name: Efficiency(prefill=LEVEL * prefill, decode=LEVEL * decode, overhead_s=OVERHEAD_S),
        H20.name: Efficiency(prefill=LEVEL / prefill, decode=LEVEL / decode, overhead_s=OVERHEAD_S),
    }


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What came out, and what the figure becomes with it."""

    prefill_ratio: float
    """Efficiency of H800 / efficiency of H20 in compute."""
    decode_ratio: float
    """... in memory bandwidth."""
    frozenlake: tuple[float, ...]
    """Time on H800 / time on H20, by batch."""
    gem_math: tuple[float, ...]
    """Time on H20 / time on H800, by batch."""

    @property
    def efficiency(self) -> dict[str, Efficiency]:
        return efficiencies(self.prefill_ratio, self.decode_ratio)

    def lines(self) -> list[str]:
        low, high = GEM_MATH_BAND
        return [
            "simulated; efficiencies fitted to cost-equal 2 H800 against 6 H20",
            *(
                f"{name:<5} prefill {one.prefill:.3f} of its compute, decode {one.decode:.3f} of its bandwidth"
                for name, one in self.efficiency.items()
            ),
            f"{'batch':<32}" + "".join(f"{batch:>7}" for batch in BATCHES) + "   published",
            f"{'frozenlake, H800 time / H20 time':<32}"
            + "".join(f"{ratio:>7.2f}" for ratio in self.frozenlake)
            + f"   down to {FROZENLAKE_RATIO}",
            f"{'gem-math, H20 time / H800 time':<32}"
            + "".join(f"{ratio:>7.2f}" for ratio in self.gem_math)
            + f"   {low}-{high}",
        ]


def ratios(task: Task, efficiency: Mapping[str, Efficiency], seeds: Sequence[int] = SEEDS) -> tuple[float, ...]:
    """Time on 2 H800 / time on 6 H20 for each batch, until its last trajectory ends; geometric mean over the seeds."""
    found = []
    for batch in BATCHES:
        logarithm = 0.0
        for seed in seeds:
            trajectories = draw((task,), batch, seed)
            compute, bandwidth = (
                serve(pools, QWEN3_8B, 1, efficiency, trajectories).seconds for pools in (COMPUTE_ONLY, BANDWIDTH_ONLY)
            )
            logarithm += math.log(compute / bandwidth)
        found.append(math.exp(logarithm / len(seeds)))
    return tuple(found)


def fit(seeds: Sequence[int] = SEEDS) -> Fit:
    """Find the two ratios. GEM-math hardly prefills and FrozenLake hardly decodes, so one after the other will do; the
    second round corrects what little they share. Takes about 15 s."""
    prefill_ratio = decode_ratio = 1.0
    band_middle = math.sqrt(GEM_MATH_BAND[0] * GEM_MATH_BAND[1])
    frozenlake: tuple[float, ...] = ()
    gem_math: tuple[float, ...] = ()

    def middle(ratio: float) -> float:
        nonlocal gem_math
        on_compute = ratios(GEM_MATH, efficiencies(prefill_ratio, ratio), seeds)
        gem_math = tuple(1.0 / one for one in on_compute)
        return math.prod(gem_math) ** (1.0 / len(gem_math))

    def lowest(ratio: float) -> float:
        nonlocal frozenlake
        frozenlake = ratios(FROZENLAKE, efficiencies(ratio, decode_ratio), seeds)
        return min(frozenlake)

    for _ in range(2):
        decode_ratio = _solve(middle, band_middle, decode_ratio)
        prefill_ratio = _solve(lowest, FROZENLAKE_RATIO, prefill_ratio)
    return Fit(prefill_ratio=prefill_ratio, decode_ratio=decode_ratio, frozenlake=frozenlake, gem_math=gem_math)


def _solve(function: Callable[[float], float], target: float, start: float) -> float:
    """Secant steps on logarithms, in which the functions are almost straight."""
    here, miss = math.log(start), math.log(function(start) / target)
    slope = 0.0
    for _ in range(ATTEMPTS_MAX):
        if abs(miss) <= TOLERANCE:
            return math.exp(here)
        # The first step only looks which way it goes; no step leaves the range in which a straight line is believed.
        step = max(-0.3, min(0.3, -miss / slope)) if slope else 0.1
        further = here + step
        missed = math.log(function(math.exp(further)) / target)
        here, miss, slope = further, missed, (missed - miss) / step
    raise InvariantError(f"the fit missed its target {target} by a factor of {math.exp(miss):.3f}; start it nearer")


CALIBRATED = efficiencies(prefill_ratio=0.783, decode_ratio=1.018)
"""What `fit()` finds. With two seeds instead of four the first comes out between 0.74 and 0.82."""
