"""Distributions and random streams of the workloads.

Owns the mixture of capped lognormals. Real durations are skewed, multimodal and cut off by time limits; this is the
smallest family with all three properties. Mean, spread and quantiles are exact, so a fit is checked without sampling.
Same seed, same numbers, under any PYTHONHASHSEED.
"""

from __future__ import annotations

import hashlib
import math

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SECONDS_MIN = 0.001
"""The shortest action: measured tool calls go down to a millisecond, and zero is not a duration."""


def random_stream(*parts: object) -> np.random.Generator:
    """Return a separate random stream for every distinct sequence of names and numbers."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


class LognormalComponent(msgspec.Struct, frozen=True):
    """One lognormal of a mixture."""

    weight: float
    median: float
    sigma: float
    """Standard deviation of the logarithm."""
    cap: float = math.inf
    """Larger values become the cap: the time limit of the tool or of the test runner."""

    def cdf(self, x: float) -> float:
        """Return the probability of a value of at most x."""
        return 1.0 if x >= self.cap else _normal_cdf(math.log(x / self.median) / self.sigma) if x > 0.0 else 0.0

    def moment(self, order: int) -> float:
        """Return the expectation of the value to this power, in closed form for a lognormal with a cap."""
        spread = order * self.sigma
        raw = self.median**order * math.exp(spread * spread / 2.0)
        if math.isinf(self.cap):
            return raw
        z = math.log(self.cap / self.median) / self.sigma
        return raw * _normal_cdf(z - spread) + self.cap**order * (1.0 - _normal_cdf(z))


class Mixture(msgspec.Struct, frozen=True):
    """A mixture of capped lognormals; the weights sum to one."""

    components: tuple[LognormalComponent, ...]

    def __post_init__(self) -> None:
        total = sum(component.weight for component in self.components)
        assert abs(total - 1.0) < 1e-9, f"the weights of a mixture add up to 1, these to {total}"

    def cdf(self, x: float) -> float:
        return sum(component.weight * component.cdf(x) for component in self.components)

    def mean(self) -> float:
        return sum(component.weight * component.moment(1) for component in self.components)

    def cv(self) -> float:
        """Coefficient of variation: standard deviation over mean."""
        mean = self.mean()
        return (
            math.sqrt(sum(component.weight * component.moment(2) for component in self.components) - mean * mean) / mean
        )

    def quantile(self, share: float) -> float:
        """Return the quantile, by bisection of the logarithm."""
        low, high = 1e-6, 1e6
        for _ in range(80):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.cdf(middle) < share else (low, middle)
        return high

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        """Draw with three uniform numbers per value (its component, and a normal by Box-Muller): value k does not
        depend on `count`."""
        uniform = rng.random((count, 3))
        edges = np.cumsum([component.weight for component in self.components])[:-1]
        chosen = np.searchsorted(edges, uniform[:, 0], side="right")
        normal = np.sqrt(-2.0 * np.log1p(-uniform[:, 1])) * np.cos(2.0 * math.pi * uniform[:, 2])
        logs = (
            np.log([component.median for component in self.components])[chosen]
            + np.array([component.sigma for component in self.components])[chosen] * normal
        )
        caps = np.array([component.cap for component in self.components])[chosen]
        values: Floats = np.maximum(np.minimum(np.exp(logs), caps), SECONDS_MIN)
        return values


def lognormal(median: float, sigma: float, cap: float = math.inf) -> Mixture:
    return Mixture((LognormalComponent(1.0, median, sigma, cap),))


def lognormal_by_mean(mean: float, cv: float, cap: float = math.inf) -> Mixture:
    """Return the lognormal with this mean and coefficient of variation (before the cap)."""
    variance = math.log(1.0 + cv * cv)
    return lognormal(mean * math.exp(-variance / 2.0), math.sqrt(variance), cap)


def _normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2.0))
