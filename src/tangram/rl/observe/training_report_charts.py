"""The charts of a training report, as plain values that its script draws.

Owns which curves there are and of what they are made. Never writes markup: names are text here, and text in the
browser. Every chart over time has three axes to be drawn along: steps, seconds, trajectories trained on. A point is a
bucket of neighbouring steps, so that the page stays small however long the run was.

    content = {"axes": {set: {axis: [...]}}, "marks": [...], "charts": {id: {...}}, ...}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tangram.reports.printable import cut
from tangram.rl.observe.timeline_page import COLOURS
from tangram.rl.observe.training_report_run import Bucket, Run, finite, parts_of, tokens_of
from tangram.rl.rollout.records import Stage
from tangram.rl.train.records import PoolUse, Trained

AXES = {"step": "step", "seconds": "wall seconds", "trajectories": "trajectories"}
WORDS_MAX = 120
"""Characters of a name."""
POINTS_MAX = 320
"""Evaluations and looks at the warm start that are drawn."""
MARKS_MAX = 60
CAUSES_MAX = 7
"""What a step waited for, by name; the rest is one."""
LEVELS_MAX = 8
"""Ages that have a colour of their own; older ones share one."""
CHARTS_MAX = 24
"""Of a kind: pools, engines, tasks."""
DIGITS = 5
WARM_PART = 0.14
"""Of the whole width, for the warm start, where it has no length of its own."""

STAGE_COLOURS = {stage.value: css for stage, css in COLOURS.items()}
PART_COLOURS = {"train": "p1", "push": "p5", "evaluation": "p3", "other": "p0", "wait: not known": "p0 pale"}
OTHER_COLOURS = ("k5", "k4", "p6", "p2")
LEVEL_COLOURS = ("p1", "p5", "k1", "k4", "k3", "k6", "p4", "p0")
CURVES = ("p1", "k1", "p3", "p4", "p5", "k6", "k2")
MAIN_METRICS = {
    "kl_sampler": ("Sampler-trainer KL", ""),
    "clip_share": ("Clip share", "percent"),
    "entropy": ("Entropy, nats", ""),
    "zero_variance_share": ("Groups without variance", "percent"),
    "gradient_norm": ("Gradient norm", ""),
    "tokens_per_s": ("Tokens trained on per second", ""),
}
MORE_METRICS = {
    "loss": ("Loss", ""),
    "kl_reference": ("KL to the reference", ""),
    "weight_mean": ("Mean off-policy weight", ""),
    "weight_truncated": ("Weights truncated", "percent"),
    "overlong_share": ("Trajectories cut off", "percent"),
    "learning_rate": ("Learning rate", ""),
}


def name_of(text: str) -> str:
    return cut(text, WORDS_MAX)


class Charts:
    """All of a run. `charts` fills as they are asked for; each is asked for by the section that shows it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.buckets = run.buckets()
        self.charts: dict[str, dict[str, Any]] = {}

    def content(self) -> dict[str, Any]:
        """What the script is given."""
        warm_s = self.run.warm_over_s
        return {
            "axes": AXES,
            "xs": {"steps": self._steps_x(), "warm": self._warm_x(), "evaluated": self._evaluated_x()},
            "words": [bucket.words for bucket in self.buckets],
            "warm": {
                "step": [-self._warm_width("step"), 0.0],
                "seconds": [0.0, _short(warm_s if warm_s is not None else self.run.warm[-1].at_s)],
                "trajectories": [-self._warm_width("trajectories"), 0.0],
            }
            if self.run.warm
            else None,
            "marks": self._marks(),
            "charts": self.charts,
        }

    # ---- axes ----------------------------------------------------------------------------------------------------

    def _steps_x(self) -> dict[str, Any]:
        return {
            "step": _numbers(bucket.steps[-1].step for bucket in self.buckets),
            "seconds": _numbers(bucket.steps[-1].at_s for bucket in self.buckets),
            "trajectories": _numbers(bucket.trajectories for bucket in self.buckets),
            "from": {
                "step": _numbers(bucket.steps[0].step - 1 for bucket in self.buckets),
                "seconds": _numbers(bucket.begin_s for bucket in self.buckets),
                "trajectories": _numbers(bucket.before for bucket in self.buckets),
            },
        }

    def _warm_width(self, axis: str) -> float:
        """Of the warm start, which has neither steps nor trajectories of training."""
        last = self.run.steps[-1].step if axis == "step" and self.run.steps else self.run.trajectories_all
        return WARM_PART * max(last, 1) / (1.0 - WARM_PART)

    def _warm_x(self) -> dict[str, Any]:
        warm = _thinned(self.run.warm)
        most = max((line.step for line in warm), default=0) or 1
        parts = [line.step / most - 1.0 for line in warm]
        return {
            "step": _numbers(part * self._warm_width("step") for part in parts),
            "seconds": _numbers(line.at_s for line in warm),
            "trajectories": _numbers(part * self._warm_width("trajectories") for part in parts),
            "words": [f"warm start, step {line.step}" for line in warm],
        }

    def _evaluated_x(self) -> dict[str, Any]:
        found = _thinned(self.run.evaluations)
        return {
            "step": _numbers(line.step for line in found),
            "seconds": _numbers(line.at_s for line in found),
            "trajectories": _numbers(self.run.trajectories_at(line.step) if line.step else 0 for line in found),
            "words": [f"held-out, version {line.step}" for line in found],
        }

    def _marks(self) -> list[dict[str, Any]]:
        run = self.run
        found = [(line.at_s, f"{line.kind}: {line.text}") for line in run.notices]
        found += [(line.at_s, f"resumed from step {line.step}") for line in run.began[1:]]
        return [
            {
                "step": run.step_by(at_s),
                "seconds": _short(at_s),
                "trajectories": run.trajectories_by(at_s),
                "words": name_of(words),
            }
            for at_s, words in sorted(found)[:MARKS_MAX]
            if math.isfinite(at_s)
        ]

    # ---- learning ------------------------------------------------------------------------------------------------

    def learning(self, task: str) -> str:
        """Its id."""
        steps = self.buckets
        series = [
            _line("training, each step", "p1 raw", (_reward(bucket, task) for bucket in steps)),
            _line("training, smoothed", "p1", (bucket.smoothed.get(task) for bucket in steps)),
        ]
        warm = _thinned(self.run.warm)
        if warm:
            series.append(
                _line("warm start", "p0", (line.scores.get(task) for line in warm), set="warm", points=True, line=True)
            )
        found = _thinned(self.run.evaluations)
        if found:
            held = _line("held-out", "k1", (line.scores.get(task) for line in found), set="evaluated", points=True)
            series.append({**held, "error": _numbers(line.spread.get(task) for line in found), "line": True})
        known = [each for each in series if any(value is not None for value in each["y"])]
        return self._add("learning", {"label": f"Rewards of {name_of(task)}", "series": known, "high": 1.0, "tall": 1,
                                      "warm": bool(warm)})  # fmt: skip

    # ---- time ----------------------------------------------------------------------------------------------------

    def stages(self) -> str:
        parts = [[parts_of(line) for line in bucket.steps] for bucket in self.buckets]
        names = self.part_names()
        series = []
        others = iter(OTHER_COLOURS * CAUSES_MAX)
        for name, members in names.items():
            values = [sum(sum(each.get(one, 0.0) for one in members) for each in some) / len(some) for some in parts]
            css = PART_COLOURS.get(name) or STAGE_COLOURS.get(name.removeprefix("wait: ")) or next(others)
            series.append(_line(name, css, values))
        return self._add("stages", {"label": "Where the time of steps went", "kind": "stack", "format": "seconds",
                                    "series": series, "tall": 1})  # fmt: skip

    def part_names(self) -> dict[str, tuple[str, ...]]:
        """The parts of steps in the order in which they are drawn, and which names each stands for."""
        sums: dict[str, float] = {}
        for line in self.run.steps:
            for name, seconds in parts_of(line).items():
                sums[name] = sums.get(name, 0.0) + seconds
        causes = sorted((name for name in sums if name not in PART_COLOURS), key=lambda name: (-sums[name], name))
        known = sorted(causes[:CAUSES_MAX], key=lambda name: (name.removeprefix("wait: ") not in STAGE_COLOURS, name))
        found: dict[str, tuple[str, ...]] = {name: (name,) for name in known}
        if causes[CAUSES_MAX:]:
            found["wait: others"] = tuple(causes[CAUSES_MAX:])
        rest = ("wait: not known", "train", "push", "evaluation", "other")
        return found | {name: (name,) for name in rest if name in sums}

    def weights(self) -> str:
        curves: tuple[tuple[str, str, Callable[[Trained], float]], ...] = (
            ("push", "p5", lambda line: line.push_s),
            ("pull, all engines", "p0", lambda line: line.pull_s),
            ("exposed pull", "k4", lambda line: line.exposed_s),
        )
        series = [_line(name, css, (bucket.mean(value) for bucket in self.buckets)) for name, css, value in curves]
        return self._add("weights", {"label": "Moving weights", "format": "seconds", "series": series})

    def engines(self) -> str:
        names = list(dict.fromkeys(use.name for line in self.run.steps for use in line.engines))[:CHARTS_MAX]
        series = []
        for place, name in enumerate(names):
            values = [bucket.mean(_busy(name)) for bucket in self.buckets]
            series.append(_line(name, CURVES[place % len(CURVES)], values))
        spec = {"label": "Engines: busy share", "format": "percent", "high": 1.0, "series": series}
        return self._add("engines", spec) if series else ""

    def groups(self) -> str:
        curves: tuple[tuple[str, str, Callable[[Trained], float]], ...] = (
            ("in play", "p5", lambda line: line.in_flight),
            ("buffered", "k6", lambda line: line.buffered),
        )
        series = [_line(name, css, (bucket.mean(value) for bucket in self.buckets)) for name, css, value in curves]
        return self._add("groups", {"label": "Groups in play and waiting to be trained on", "series": series})

    # ---- staleness -----------------------------------------------------------------------------------------------

    def ages(self) -> list[int]:
        """Trajectories by staleness, over the whole run."""
        found: list[int] = []
        for line in self.run.steps:
            found += [0] * (len(line.staleness) - len(found))
            for age, count in enumerate(line.staleness):
                found[age] += count
        while found and not found[-1]:
            found.pop()
        return found

    def histogram(self) -> str:
        ages = self.ages()
        shown = ages[: 4 * LEVELS_MAX]
        total = sum(ages) or 1
        spec = {
            "label": "Trajectories by staleness",
            "kind": "bars",
            "names": [str(age) for age in range(len(shown))],
            "values": shown,
            "shares": _numbers(count / total for count in shown),
            "limit": {"after": self.run.alpha, "words": self.run.alpha_words},
        }
        return self._add("ages", spec)

    def staleness(self) -> str:
        most = len(self.ages())
        series = []
        for age in range(min(most, LEVELS_MAX)):
            last = age == LEVELS_MAX - 1 and most > LEVELS_MAX
            values = [_age_share(bucket, age, most if last else age + 1) for bucket in self.buckets]
            mark = " (α)" if age == self.run.alpha else ""
            series.append(_line(f"{age}{' or more' if last else mark}", LEVEL_COLOURS[age], values))
        return self._add("staleness", {"label": "Staleness over time", "kind": "stack", "format": "percent",
                                       "high": 1.0, "series": series})  # fmt: skip

    # ---- pools ---------------------------------------------------------------------------------------------------

    def pool(self, name: str) -> str:
        def of(value: Callable[[PoolUse], float]) -> Callable[[Trained], float | None]:
            return lambda line: next((value(use) for use in line.pools if use.name == name and use.actions), None)

        series = [
            _line("p99", "k1", (bucket.most(of(lambda use: use.act_p99_s)) for bucket in self.buckets)),
            _line("mean", "p1", (bucket.mean(of(lambda use: use.act_mean_s)) for bucket in self.buckets)),
            _line("waiting", "k4", (bucket.mean(of(lambda use: use.waiting_mean_s)) for bucket in self.buckets)),
        ]
        return self._add("pool", {"label": f"ACT of pool {name_of(name)}", "format": "seconds", "series": series})

    # ---- numbers of the trainer, and what was thrown away ----------------------------------------------------------

    def metric(self, name: str, words: str, format: str) -> str:
        """Its id; empty if no step tells it."""
        values = [bucket.mean(lambda line: line.metrics.get(name)) for bucket in self.buckets]
        if all(value is None for value in values):
            return ""
        return self._add("metric", {"label": words, "format": format, "series": [_line(name, "p1", values)]})

    def dropped(self) -> str:
        causes = list(dict.fromkeys(cause for line in self.run.steps for cause in line.dropped))[:LEVELS_MAX]
        series = []
        for place, cause in enumerate(causes):
            values = [bucket.mean(_dropped(cause)) for bucket in self.buckets]
            series.append(_line(cause, LEVEL_COLOURS[-1 - place], values))
        return self._add("dropped", {"label": "Groups dropped, by cause", "kind": "stack", "series": series})

    def aborted(self) -> str:
        values = [bucket.mean(lambda line: line.aborted) for bucket in self.buckets]
        spec = {"label": "Trajectories aborted", "kind": "stack", "series": [_line("aborted", "k4", values)]}
        return self._add("aborted", spec)

    def tokens_discarded(self) -> str:
        """Shares of what the policy wrote."""
        found = [tokens_of(bucket.steps) for bucket in self.buckets]
        series = [
            _line("in no batch", "k1", (each.in_no_batch / each.written if each.written else None for each in found)),
            _line("teach nothing", "k4", (each.idle / each.written if each.written else None for each in found)),
        ]
        spec = {"label": "Tokens not trained on", "kind": "stack", "format": "percent", "series": series}
        return self._add("tokens", spec)

    def _add(self, id: str, spec: dict[str, Any]) -> str:
        id = f"{id}-{len(self.charts)}"
        self.charts[id] = spec
        return id


def _line(name: str, css: str, values: Iterable[float | None], **more: Any) -> dict[str, Any]:
    return {"name": name_of(name), "css": css, "y": _numbers(values), **more}


def _numbers(values: Iterable[float | None]) -> list[float | None]:
    return [_short(value) for value in values]


def _short(value: float | None) -> float | None:
    """To digits that can be seen; whole numbers stay so."""
    found = finite(value)
    if found is None or isinstance(found, int):
        return found
    whole = round(found)
    if abs(found) >= 10.0**DIGITS or found == whole:
        return whole
    return float(f"{found:.{DIGITS}g}")


def _thinned(found: Sequence[Any]) -> Sequence[Any]:
    """The last one always."""
    every = max(1, -(-len(found) // POINTS_MAX))
    return found if every == 1 else [*found[: len(found) - 1 : every], found[-1]]


def _reward(bucket: Bucket, task: str) -> float | None:
    return bucket.mean(lambda line: line.tasks[task].reward if task in line.tasks else None)


def _busy(name: str) -> Callable[[Trained], float | None]:
    return lambda line: next((use.busy_share for use in line.engines if use.name == name), None)


def _dropped(cause: str) -> Callable[[Trained], float]:
    return lambda line: line.dropped.get(cause, 0)


def _age_share(bucket: Bucket, low: int, high: int) -> float:
    all_of_them = sum(sum(line.staleness) for line in bucket.steps)
    return sum(sum(line.staleness[low:high]) for line in bucket.steps) / all_of_them if all_of_them else 0.0


assert set(STAGE_COLOURS) == {stage.value for stage in Stage}
