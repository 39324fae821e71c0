"""Profile: what was learned about an action class: durations, speed-up and CPU use.

Owns the estimates. Never decides anything. A class is (run, task, kind, key). The first action of a new class is
estimated from its relatives: the same key over all tasks of the run, or the kind over all runs. Promises that one
observation changes an estimate, that one outlier does not spoil it, that old observations fade, that memory is bounded
by `classes_max`, and that every call costs the same however many observations were made.
"""

from __future__ import annotations

import math

import msgspec

from tangram.core.action import Action

MEMORY_OBSERVATIONS = 48
"""An observation fades to 1/e after this many later ones: enough for a steady mean, few enough to follow drift."""
KEEP = 1.0 - 1.0 / MEMORY_OBSERVATIONS
"""The factor by which each observation reduces the earlier sums."""
CLASS_TRUST = 1.0
"""A class outweighs its relatives from its second observation on, because they share only the key."""
OUTLIER_SIGMAS = 3.0
"""A duration counts as at most this many standard deviations of its logarithm above the class."""
SIGMA_FLOOR = 0.5
"""The least assumed spread of log durations: members of one task differ by this much."""
SIGMA_UNKNOWN = 1.5
"""Spread assumed while a class has a single observation."""
EXPONENT_PRIOR = 0.6
"""The speed-up exponent without evidence: between package installs (0.1) and type checks (0.9)."""
EXPONENT_PRIOR_WEIGHT = 4.0
"""The evidence, in squared log-units, that equals the prior: about four runs at widths a factor e apart."""
THROTTLED_SHARE = 0.9
"""An action that used this share of its limit was slowed by it."""
KIND_OBSERVATIONS_MAX = 16.0
"""This many observations of each key also count for its kind."""
DURATION_FLOOR_S = 1e-4
MEASURED_MAX = 1e12
"""More seconds or units than this are an error of a clock or a counter: 30,000 years."""

ClassKey = tuple[str, ...]


class Estimate(msgspec.Struct, frozen=True, gc=False):
    """What is expected of an action before it runs."""

    work_s: float
    """Seconds on one unit."""
    sigma: float
    """Standard deviation of its logarithm. 0 if the caller gave the duration."""
    exponent: float
    """The exponent of the speed-up power law along the elastic pool."""
    busy: float
    """Cores kept busy per unit of width."""
    observations: float
    """The number of observations behind it. 0: the values are priors."""

    def remaining_s(self, done_s: float) -> float:
        """Returns the expected remaining one-unit seconds after `done_s`: the mean residual life of a lognormal."""
        if done_s <= 0.0:
            return self.work_s
        if self.sigma <= 0.0:
            return max(self.work_s - done_s, 0.02 * self.work_s)
        mu = math.log(self.work_s) - 0.5 * self.sigma * self.sigma
        z = (math.log(done_s) - mu) / self.sigma
        beyond = 0.5 * math.erfc(z / math.sqrt(2.0))
        if beyond < 1e-6:
            return done_s
        mass = 0.5 * math.erfc((z - self.sigma) / math.sqrt(2.0))
        return max(self.work_s * mass / beyond - done_s, 0.02 * done_s)


PRIOR = Estimate(work_s=1.0, sigma=SIGMA_UNKNOWN, exponent=EXPONENT_PRIOR, busy=1.0, observations=0.0)
"""For a kind that was never seen: one second of a whole core, so that each action gets one exclusive core."""


class Profile:
    """Fading statistics of a class or of its relatives. All updates are O(1)."""

    __slots__ = ("cpu_s", "exec_s", "log_mean", "log_var", "mean", "observations", "width_mean", "xx", "xy")

    def __init__(self) -> None:
        self.observations = 0.0
        self.log_mean = 0.0
        self.log_var = SIGMA_UNKNOWN * SIGMA_UNKNOWN
        self.mean = 0.0
        self.cpu_s = 0.0
        self.exec_s = 0.0
        self.width_mean = 0.0
        self.xx = 0.0
        self.xy = 0.0

    def observe(self, work_s: float, log_work: float, cpu_s: float | None, unit_s: float) -> None:
        """Adds a duration, converted to one unit, with its logarithm. Adds the CPU seconds and the seconds times width:
        their ratio is weighted by time, as a core sees it."""
        observations = self.observations = self.observations + 1.0
        rate = 1.0 / observations if observations < MEMORY_OBSERVATIONS else 1.0 / MEMORY_OBSERVATIONS
        delta = log_work - self.log_mean
        if observations > 1.0:
            if delta > OUTLIER_SIGMAS * SIGMA_FLOOR and delta > OUTLIER_SIGMAS * self.sigma:
                delta = OUTLIER_SIGMAS * self.sigma
                work_s = math.exp(self.log_mean + delta)
            # The prior spread counts as one observation.
            fade = 1.0 / (observations + 1.0) if observations + 1.0 < MEMORY_OBSERVATIONS else 1.0 / MEMORY_OBSERVATIONS
            self.log_var += fade * (delta * delta * (1.0 - rate) - self.log_var)
        self.log_mean += rate * delta
        self.mean += rate * (work_s - self.mean)
        if cpu_s is not None:
            self.cpu_s = self.cpu_s * KEEP + cpu_s
            self.exec_s = self.exec_s * KEEP + unit_s

    def observe_width(self, deviation_width: float, deviation_duration: float) -> None:
        """Adds both logarithms as deviations from the means of the class, so that different tasks do not mix."""
        self.xx = self.xx * KEEP + deviation_width * deviation_width
        self.xy = self.xy * KEEP + deviation_width * deviation_duration

    @property
    def sigma(self) -> float:
        return max(math.sqrt(self.log_var), SIGMA_FLOOR)

    @property
    def busy(self) -> float | None:
        return self.cpu_s / self.exec_s if self.exec_s > 0.0 else None


class ProfileStore:
    """All profiles, by action class."""

    __slots__ = ("_classes", "_kinds", "_relatives", "classes_max", "observations")

    def __init__(self, classes_max: int = 20_000) -> None:
        self.classes_max = classes_max
        self.observations = 0
        """Grows with every observation. Estimates do not change between observations."""
        self._classes: dict[ClassKey, Profile] = {}
        self._relatives: dict[ClassKey, Profile] = {}
        self._kinds: dict[ClassKey, Profile] = {}

    def __len__(self) -> int:
        return len(self._classes) + len(self._relatives) + len(self._kinds)

    def estimate(self, action: Action) -> Estimate:
        """Returns the estimate of an action: from hints, else from its class, blended with its relatives."""
        exact = self._classes.get((action.run, action.task, action.kind, action.key))
        wider = self._relatives.get((action.run, action.kind, action.key)) or self._kinds.get((action.kind,)) or exact
        if wider is None or not wider.observations:
            return self._with_hints(action, PRIOR)
        work_s, variance, busy = wider.mean, wider.log_var, wider.busy
        if exact is not None and exact.observations:
            trust = exact.observations / (exact.observations + CLASS_TRUST)
            work_s = math.exp(trust * math.log(exact.mean) + (1.0 - trust) * math.log(work_s))
            variance = trust * exact.log_var + (1.0 - trust) * variance
            own_busy = exact.busy
            if own_busy is not None and busy is not None:
                busy = trust * own_busy + (1.0 - trust) * busy
        exponent = (EXPONENT_PRIOR * EXPONENT_PRIOR_WEIGHT - wider.xy) / (EXPONENT_PRIOR_WEIGHT + wider.xx)
        learned = Estimate(
            work_s,
            max(math.sqrt(variance), SIGMA_FLOOR),
            min(0.98, max(0.0, exponent)),
            PRIOR.busy if busy is None else busy,
            wider.observations,
        )
        if action.duration_s is None and action.demand.speedup is None:
            return learned
        return self._with_hints(action, learned)

    def observe(self, action: Action, *, execution_s: float, units: float | None, cpu_s: float | None) -> None:
        """Learns from an action that ran for `execution_s` and used `cpu_s` of CPU, an elastic one on `units` cores or
        devices. Ignores numbers that cannot be measurements."""
        if not (
            0.0 <= execution_s < MEASURED_MAX
            and (cpu_s is None or 0.0 <= cpu_s < MEASURED_MAX)
            and (units is None or 0.0 < units < MEASURED_MAX)
        ):
            return
        self.observations += 1
        exact = self._profile(self._classes, (action.run, action.task, action.kind, action.key))
        wider = self._profile(self._relatives, (action.run, action.kind, action.key))
        seconds = max(execution_s, DURATION_FLOOR_S)
        if units is not None:
            self._observe_speedup(exact, wider, seconds, units)
            speedup = action.demand.speedup
            exponent = self.estimate(action).exponent
            if units < 1.0:
                # Below one core, only an action that used all of its limit was slowed. Assume that it would fill a
                # core.
                slowed = cpu_s is None or cpu_s >= THROTTLED_SHARE * units * seconds
                seconds_on_one = seconds * units if slowed else seconds
            else:
                seconds_on_one = seconds * (speedup.at(units) if speedup else units**exponent)
        else:
            seconds_on_one = seconds
        # The kind only matters for new keys, so the first observations of each key are enough for it.
        profiles = [exact, wider]
        if wider.observations < KIND_OBSERVATIONS_MAX:
            profiles.append(self._profile(self._kinds, (action.kind,)))
        log_work = math.log(seconds_on_one)
        unit_s = seconds if units is None or units < 1.0 else seconds * units
        for profile in profiles:
            profile.observe(seconds_on_one, log_work, cpu_s, unit_s)

    def _observe_speedup(self, exact: Profile, wider: Profile, seconds: float, units: float) -> None:
        """Regresses log duration on log width, both relative to the running means of the class."""
        log_width, log_seconds = math.log(max(units, 1e-3)), math.log(seconds)
        if exact.observations:
            # The class mean is for one unit. Convert it to the mean width by the current exponent.
            exponent = (EXPONENT_PRIOR * EXPONENT_PRIOR_WEIGHT - wider.xy) / (EXPONENT_PRIOR_WEIGHT + wider.xx)
            expected = exact.log_mean - exponent * exact.width_mean
            limit = OUTLIER_SIGMAS * exact.sigma
            deviation = min(limit, max(-limit, log_seconds - expected))
            wider.observe_width(log_width - exact.width_mean, deviation)
        exact.width_mean += (log_width - exact.width_mean) / (min(exact.observations, MEMORY_OBSERVATIONS) + 1.0)

    def _with_hints(self, action: Action, learned: Estimate) -> Estimate:
        speedup, duration_s = action.demand.speedup, action.duration_s
        exponent = learned.exponent
        if speedup is not None:
            elastic = action.demand.elastic
            units_max = action.demand.pools[elastic].max if elastic else 1
            minimum = action.demand.pools[elastic].min if elastic else 1
            exponent = min(0.98, speedup.exponent_near(max(2.0, units_max / max(minimum, 1))))
        if duration_s is None:
            return Estimate(learned.work_s, learned.sigma, exponent, learned.busy, learned.observations)
        return Estimate(duration_s, 0.0, exponent, learned.busy, max(1.0, learned.observations))

    def _profile(self, profiles: dict[ClassKey, Profile], key: ClassKey) -> Profile:
        """Returns the profile of a class for a new observation, and creates it if needed. The least recently observed
        class is evicted at `classes_max`; recency is only tracked once half of that is in use."""
        profile = profiles.get(key)
        if profile is None:
            if len(profiles) >= self.classes_max:
                # Evict the class that was observed longest ago.
                del profiles[next(iter(profiles))]
            profile = profiles[key] = Profile()
        elif 2 * len(profiles) >= self.classes_max:
            profiles[key] = profiles.pop(key)
        return profile
