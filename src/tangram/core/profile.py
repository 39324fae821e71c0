"""Profile: what was learned about an action class: durations, speed-up, real CPU use.

Owns the estimates. Never decides anything. A class is (run, task, kind, key); behind it stand the same key over all
tasks of the run, and the kind over all runs, so that the first action of a new class is judged by its relatives.
Promises: one observation is enough to change an estimate, one outlier is not enough to spoil it, old observations
fade, memory is bounded by `classes_max`, and every call costs the same however much was seen.
"""

from __future__ import annotations

import math

import msgspec

from tangram.core.action import Action

MEMORY_OBSERVATIONS = 48
"""An observation fades to a third after this many later ones: long enough for a steady mean, short enough for drift."""
KEEP = 1.0 - 1.0 / MEMORY_OBSERVATIONS
"""What a later observation leaves of the sums before it."""
CLASS_TRUST = 1.0
"""A class outweighs its relatives from its second observation on: they share the key, not the task."""
OUTLIER_SIGMAS = 3.0
"""A duration counts at most as this many standard deviations (of its logarithm) above the class."""
SIGMA_FLOOR = 0.5
"""Spread of log durations assumed at least: members of one task scatter by this much."""
SIGMA_UNKNOWN = 1.5
"""Spread assumed while a class has a single observation."""
EXPONENT_PRIOR = 0.6
"""Speed-up exponent before any evidence: between package installs (0.1) and type checks (0.9)."""
EXPONENT_PRIOR_WEIGHT = 4.0
"""Evidence, in squared log-units, that outweighs the prior: about four runs at widths a factor e apart."""
THROTTLED_SHARE = 0.9
"""An action that used this share of its limit was held back by it."""
KIND_TOLD = 16.0
"""So many observations of each key are told to its kind as well."""
DURATION_FLOOR_S = 1e-4
MEASURED_MAX = 1e12
"""Seconds or units beyond which a number is the fault of a clock or a counter: 30 000 years."""

ClassKey = tuple[str, ...]


class Estimate(msgspec.Struct, frozen=True, gc=False):
    """What is believed of an action before it runs."""

    work_s: float
    """Seconds on one unit."""
    sigma: float
    """Standard deviation of the logarithm of it; 0 when a hint said it."""
    exponent: float
    """Of the power law along the elastic pool."""
    busy: float
    """Cores kept busy per unit of width."""
    observations: float
    """Evidence behind it; 0: nothing is known and the values are priors."""

    def remaining_s(self, done_s: float) -> float:
        """Expected one-unit seconds left after `done_s` of them: a lognormal's mean residual life."""
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
"""Of a kind that was never seen: a second of a whole core, which degrades to one exclusive core each."""


class Profile:
    """Fading statistics of one class or of its relatives. All updates are O(1)."""

    __slots__ = ("cpu_s", "exec_s", "log_mean", "log_var", "mean", "seen", "width_mean", "xx", "xy")

    def __init__(self) -> None:
        self.seen = 0.0
        self.log_mean = 0.0
        self.log_var = SIGMA_UNKNOWN * SIGMA_UNKNOWN
        self.mean = 0.0
        self.cpu_s = 0.0
        self.exec_s = 0.0
        self.width_mean = 0.0
        self.xx = 0.0
        self.xy = 0.0

    def observe(self, work_s: float, log_work: float, cpu_s: float | None, unit_s: float) -> None:
        """One more duration, already converted to one unit, and its logarithm; and the CPU seconds used over seconds
        times width, time-weighted, since that is what a core sees."""
        seen = self.seen = self.seen + 1.0
        rate = 1.0 / seen if seen < MEMORY_OBSERVATIONS else 1.0 / MEMORY_OBSERVATIONS
        delta = log_work - self.log_mean
        if seen > 1.0:
            if delta > OUTLIER_SIGMAS * SIGMA_FLOOR and delta > OUTLIER_SIGMAS * self.sigma:
                delta = OUTLIER_SIGMAS * self.sigma
                work_s = math.exp(self.log_mean + delta)
            # While few were seen the prior spread counts like one observation.
            fade = 1.0 / (seen + 1.0) if seen + 1.0 < MEMORY_OBSERVATIONS else 1.0 / MEMORY_OBSERVATIONS
            self.log_var += fade * (delta * delta * (1.0 - rate) - self.log_var)
        self.log_mean += rate * delta
        self.mean += rate * (work_s - self.mean)
        if cpu_s is not None:
            self.cpu_s = self.cpu_s * KEEP + cpu_s
            self.exec_s = self.exec_s * KEEP + unit_s

    def observe_width(self, deviation_width: float, deviation_duration: float) -> None:
        """Both logarithms as deviations from the class's own means, so that unlike tasks do not mix."""
        self.xx = self.xx * KEEP + deviation_width * deviation_width
        self.xy = self.xy * KEEP + deviation_width * deviation_duration

    @property
    def sigma(self) -> float:
        return max(math.sqrt(self.log_var), SIGMA_FLOOR)

    @property
    def busy(self) -> float | None:
        return self.cpu_s / self.exec_s if self.exec_s > 0.0 else None


class Knowledge:
    """All profiles, found by the class of an action."""

    __slots__ = ("_classes", "_kinds", "_relatives", "classes_max")

    def __init__(self, classes_max: int = 20_000) -> None:
        self.classes_max = classes_max
        self._classes: dict[ClassKey, Profile] = {}
        self._relatives: dict[ClassKey, Profile] = {}
        self._kinds: dict[ClassKey, Profile] = {}

    def __len__(self) -> int:
        return len(self._classes) + len(self._relatives) + len(self._kinds)

    def estimate(self, action: Action) -> Estimate:
        """What is believed of the action: hints first, then its class, blended with its relatives."""
        exact = self._classes.get((action.run, action.task, action.kind, action.key))
        wider = self._relatives.get((action.run, action.kind, action.key)) or self._kinds.get((action.kind,)) or exact
        if wider is None or not wider.seen:
            return self._with_hints(action, PRIOR)
        work_s, variance, busy = wider.mean, wider.log_var, wider.busy
        if exact is not None and exact.seen:
            trust = exact.seen / (exact.seen + CLASS_TRUST)
            work_s = math.exp(trust * math.log(exact.mean) + (1.0 - trust) * math.log(work_s))
            variance = trust * exact.log_var + (1.0 - trust) * variance
            own_busy = exact.busy
            if own_busy is not None and busy is not None:
                busy = trust * own_busy + (1.0 - trust) * busy
        exponent = (EXPONENT_PRIOR * EXPONENT_PRIOR_WEIGHT - wider.xy) / (EXPONENT_PRIOR_WEIGHT + wider.xx)
        believed = Estimate(
            work_s,
            max(math.sqrt(variance), SIGMA_FLOOR),
            min(0.98, max(0.0, exponent)),
            PRIOR.busy if busy is None else busy,
            wider.seen,
        )
        if action.duration_s is None and action.demand.speedup is None:
            return believed
        return self._with_hints(action, believed)

    def observe(self, action: Action, *, execution_s: float, units: float | None, cpu_s: float | None) -> None:
        """The action ran for `execution_s` and used `cpu_s` of CPU; an elastic one on `units` cores or devices. Numbers
        that cannot have been measured teach nothing."""
        if not (
            0.0 <= execution_s < MEASURED_MAX
            and (cpu_s is None or 0.0 <= cpu_s < MEASURED_MAX)
            and (units is None or 0.0 < units < MEASURED_MAX)
        ):
            return
        exact = self._profile(self._classes, (action.run, action.task, action.kind, action.key))
        wider = self._profile(self._relatives, (action.run, action.kind, action.key))
        seconds = max(execution_s, DURATION_FLOOR_S)
        if units is not None:
            self._observe_speedup(exact, wider, seconds, units)
            speedup = action.demand.speedup
            exponent = self.estimate(action).exponent
            if units < 1.0:
                # Below one core only what used all that it had was slowed; it is taken to fill a core.
                slowed = cpu_s is None or cpu_s >= THROTTLED_SHARE * units * seconds
                seconds_on_one = seconds * units if slowed else seconds
            else:
                seconds_on_one = seconds * (speedup.at(units) if speedup else units**exponent)
        else:
            seconds_on_one = seconds
        # The kind speaks only for keys that are new; those seen often need not be told to it again.
        told = [exact, wider]
        if wider.seen < KIND_TOLD:
            told.append(self._profile(self._kinds, (action.kind,)))
        log_work = math.log(seconds_on_one)
        unit_s = seconds if units is None or units < 1.0 else seconds * units
        for profile in told:
            profile.observe(seconds_on_one, log_work, cpu_s, unit_s)

    def _observe_speedup(self, exact: Profile, wider: Profile, seconds: float, units: float) -> None:
        """Regress log duration on log width, each measured from the class's own running mean."""
        log_width, log_seconds = math.log(max(units, 1e-3)), math.log(seconds)
        if exact.seen:
            # The class mean is on one unit; bring it to the mean width by the exponent believed so far.
            exponent = (EXPONENT_PRIOR * EXPONENT_PRIOR_WEIGHT - wider.xy) / (EXPONENT_PRIOR_WEIGHT + wider.xx)
            expected = exact.log_mean - exponent * exact.width_mean
            limit = OUTLIER_SIGMAS * exact.sigma
            deviation = min(limit, max(-limit, log_seconds - expected))
            wider.observe_width(log_width - exact.width_mean, deviation)
        exact.width_mean += (log_width - exact.width_mean) / (min(exact.seen, MEMORY_OBSERVATIONS) + 1.0)

    def _with_hints(self, action: Action, believed: Estimate) -> Estimate:
        speedup, duration_s = action.demand.speedup, action.duration_s
        exponent = believed.exponent
        if speedup is not None:
            elastic = action.demand.elastic
            units_max = action.demand.pools[elastic].max if elastic else 1
            minimum = action.demand.pools[elastic].min if elastic else 1
            exponent = min(0.98, speedup.exponent_near(max(2.0, units_max / max(minimum, 1))))
        if duration_s is None:
            return Estimate(believed.work_s, believed.sigma, exponent, believed.busy, believed.observations)
        return Estimate(duration_s, 0.0, exponent, believed.busy, max(1.0, believed.observations))

    def _profile(self, profiles: dict[ClassKey, Profile], key: ClassKey) -> Profile:
        """The profile to tell of an observation; while there is room enough, order does not matter."""
        profile = profiles.get(key)
        if profile is None:
            if len(profiles) >= self.classes_max:
                # The class that was observed longest ago goes.
                del profiles[next(iter(profiles))]
            profile = profiles[key] = Profile()
        elif 2 * len(profiles) >= self.classes_max:
            profiles[key] = profiles.pop(key)
        return profile
