"""The charts of a training report: which curves there are, and their values.

Every chart over time can be drawn along three axes: steps, seconds, trajectories trained on. A point is a bucket of
neighbouring steps, so that the page stays small however long the run was. `reports/interactive.py` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tangram.reports.interactive import InteractiveCharts, round_to_digits, rounded, series, short_name
from tangram.rl.observe.run_history import RunHistory, StepBucket, step_time_parts, token_totals
from tangram.rl.observe.timeline_page import COLOURS
from tangram.rl.runs.metrics_lines import PoolUse, Trained
from tangram.rl.trajectories.trajectory import Stage

AXES = {"step": "step", "seconds": "wall seconds", "trajectories": "trajectories"}
POINTS_MAX = 320
"""Evaluations and warm-start checks that are drawn."""
MARKS_MAX = 60
CAUSES_MAX = 7
"""Named causes of waiting in a step; the others are one."""
LEVELS_MAX = 8
"""Ages with a colour of their own; older ones share one."""
CHARTS_MAX = 24
"""Pools, engines or tasks with a chart."""
WARM_PART = 0.14
"""Share of the width for the warm start, on axes where it has no length."""

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
    "kl_teacher": ("KL to the teacher", ""),
    "weight_mean": ("Mean off-policy weight", ""),
    "weight_truncated": ("Weights truncated", "percent"),
    "overlong_share": ("Trajectories cut off", "percent"),
    "learning_rate": ("Learning rate", ""),
}


class Charts:
    """The charts of a run. A section of the report adds the charts that it shows and gets their ids."""

    def __init__(self, run: RunHistory) -> None:
        self.run = run
        self.buckets = run.buckets()
        self.page = InteractiveCharts(
            axes=AXES,
            units={"seconds": "s"},
            point_sets={"steps": self._steps_x(), "warm": self._warm_x(), "evaluated": self._evaluated_x()},
            shade=self._shade(),
            marks=self._marks(),
        )

    def _shade(self) -> dict[str, Any] | None:
        if not self.run.warm:
            return None
        warm_s = self.run.warm_start_end_s
        span = {
            "step": [-self._warm_width("step"), 0.0],
            "seconds": [0.0, round_to_digits(warm_s if warm_s is not None else self.run.warm[-1].at_s)],
            "trajectories": [-self._warm_width("trajectories"), 0.0],
        }
        return {"label": "warm start", "span": span}

    # ---- axes ----------------------------------------------------------------------------------------------------

    def _steps_x(self) -> dict[str, Any]:
        return {
            "labels": [bucket.label for bucket in self.buckets],
            "step": rounded(bucket.steps[-1].step for bucket in self.buckets),
            "seconds": rounded(bucket.steps[-1].at_s for bucket in self.buckets),
            "trajectories": rounded(bucket.trajectories for bucket in self.buckets),
            "from": {
                "step": rounded(bucket.steps[0].step - 1 for bucket in self.buckets),
                "seconds": rounded(bucket.begin_s for bucket in self.buckets),
                "trajectories": rounded(bucket.before for bucket in self.buckets),
            },
        }

    def _warm_width(self, axis: str) -> float:
        """The width of the warm start, which has neither steps nor trajectories of training."""
        last = self.run.steps[-1].step if axis == "step" and self.run.steps else self.run.trajectories_total
        return WARM_PART * max(last, 1) / (1.0 - WARM_PART)

    def _warm_x(self) -> dict[str, Any]:
        warm = _thin(self.run.warm)
        most = max((line.step for line in warm), default=0) or 1
        parts = [line.step / most - 1.0 for line in warm]
        return {
            "step": rounded(part * self._warm_width("step") for part in parts),
            "seconds": rounded(line.at_s for line in warm),
            "trajectories": rounded(part * self._warm_width("trajectories") for part in parts),
            "labels": [f"warm start, step {line.step}" for line in warm],
        }

    def _evaluated_x(self) -> dict[str, Any]:
        evaluations = _thin(self.run.evaluations)
        return {
            "step": rounded(line.step for line in evaluations),
            "seconds": rounded(line.at_s for line in evaluations),
            "trajectories": rounded(self.run.trajectories_at(line.step) if line.step else 0 for line in evaluations),
            "labels": [f"held-out, version {line.step}" for line in evaluations],
        }

    def _marks(self) -> list[dict[str, Any]]:
        run = self.run
        events = [(line.at_s, f"{line.kind}: {line.text}") for line in run.notices]
        events += [(line.at_s, f"resumed from step {line.step}") for line in run.began[1:]]
        return [
            {
                "step": run.step_by(at_s),
                "seconds": round_to_digits(at_s),
                "trajectories": run.trajectories_by(at_s),
                "words": short_name(words),
            }
            for at_s, words in sorted(events)[:MARKS_MAX]
            if math.isfinite(at_s)
        ]

    # ---- learning ------------------------------------------------------------------------------------------------

    def learning(self, task: str) -> str:
        """Rewards of a task: each batch, smoothed, held out, and in the warm start."""
        steps = self.buckets
        curves = [
            series("training, each step", "p1 raw", (_reward(bucket, task) for bucket in steps)),
            series("training, smoothed", "p1", (bucket.smoothed.get(task) for bucket in steps)),
        ]
        warm = _thin(self.run.warm)
        if warm:
            curves.append(
                series("warm start", "p0", (line.scores.get(task) for line in warm), set="warm", points=True, line=True)
            )
        evaluations = _thin(self.run.evaluations)
        if evaluations:
            held = series(
                "held-out", "k1", (line.scores.get(task) for line in evaluations), set="evaluated", points=True
            )
            curves.append({**held, "error": rounded(line.spread.get(task) for line in evaluations), "line": True})
        known = [each for each in curves if any(value is not None for value in each["y"])]
        label = f"Rewards of {short_name(task)}"
        chart = {"label": label, "series": known, "high": 1.0, "tall": 1, "shaded": bool(warm)}
        return self.page.add("learning", chart)

    # ---- time ----------------------------------------------------------------------------------------------------

    def stages(self) -> str:
        parts = [[step_time_parts(line) for line in bucket.steps] for bucket in self.buckets]
        names = self.part_names()
        curves = []
        others = iter(OTHER_COLOURS * CAUSES_MAX)
        for name, members in names.items():
            values = [sum(sum(each.get(one, 0.0) for one in members) for each in some) / len(some) for some in parts]
            css = PART_COLOURS.get(name) or STAGE_COLOURS.get(name.removeprefix("wait: ")) or next(others)
            curves.append(series(name, css, values))
        return self.page.add("stages", {"label": "Where the time of steps went", "kind": "stack", "format": "seconds",
                                    "series": curves, "tall": 1})  # fmt: skip

    def part_names(self) -> dict[str, tuple[str, ...]]:
        """The parts of steps in the order in which they are drawn, each with the names that it sums up."""
        sums: dict[str, float] = {}
        for line in self.run.steps:
            for name, seconds in step_time_parts(line).items():
                sums[name] = sums.get(name, 0.0) + seconds
        causes = sorted((name for name in sums if name not in PART_COLOURS), key=lambda name: (-sums[name], name))
        known = sorted(causes[:CAUSES_MAX], key=lambda name: (name.removeprefix("wait: ") not in STAGE_COLOURS, name))
        groups: dict[str, tuple[str, ...]] = {name: (name,) for name in known}
        if causes[CAUSES_MAX:]:
            groups["wait: others"] = tuple(causes[CAUSES_MAX:])
        rest = ("wait: not known", "train", "push", "evaluation", "other")
        return groups | {name: (name,) for name in rest if name in sums}

    def weights(self) -> str:
        values: tuple[tuple[str, str, Callable[[Trained], float]], ...] = (
            ("push", "p5", lambda line: line.push_s),
            ("pull, all engines", "p0", lambda line: line.pull_s),
            ("exposed pull", "k4", lambda line: line.exposed_s),
        )
        curves = [series(name, css, (bucket.mean(value) for bucket in self.buckets)) for name, css, value in values]
        return self.page.add("weights", {"label": "Moving weights", "format": "seconds", "series": curves})

    def engines(self) -> str:
        names = list(dict.fromkeys(use.name for line in self.run.steps for use in line.engines))[:CHARTS_MAX]
        curves = []
        for place, name in enumerate(names):
            values = [bucket.mean(_busy(name)) for bucket in self.buckets]
            curves.append(series(name, CURVES[place % len(CURVES)], values))
        spec = {"label": "Engines: busy share", "format": "percent", "high": 1.0, "series": curves}
        return self.page.add("engines", spec) if curves else ""

    def groups(self) -> str:
        values: tuple[tuple[str, str, Callable[[Trained], float]], ...] = (
            ("in flight", "p5", lambda line: line.in_flight),
            ("buffered", "k6", lambda line: line.buffered),
        )
        curves = [series(name, css, (bucket.mean(value) for bucket in self.buckets)) for name, css, value in values]
        return self.page.add("groups", {"label": "Groups in flight and waiting to be trained on", "series": curves})

    # ---- staleness -----------------------------------------------------------------------------------------------

    def ages(self) -> list[int]:
        """Trajectories by staleness over the whole run."""
        indices: list[int] = []
        for line in self.run.steps:
            indices += [0] * (len(line.staleness) - len(indices))
            for age, count in enumerate(line.staleness):
                indices[age] += count
        while indices and not indices[-1]:
            indices.pop()
        return indices

    def histogram(self) -> str:
        ages = self.ages()
        shown = ages[: 4 * LEVELS_MAX]
        total = sum(ages) or 1
        spec = {
            "label": "Trajectories by staleness",
            "kind": "bars",
            "names": [str(age) for age in range(len(shown))],
            "values": shown,
            "shares": rounded(count / total for count in shown),
            "heads": ["staleness", "trajectories"],
            "limit": {"after": self.run.staleness_bound, "words": self.run.staleness_bound_text},
        }
        return self.page.add("ages", spec)

    def staleness(self) -> str:
        most = len(self.ages())
        curves = []
        for age in range(min(most, LEVELS_MAX)):
            last = age == LEVELS_MAX - 1 and most > LEVELS_MAX
            values = [_age_share(bucket, age, most if last else age + 1) for bucket in self.buckets]
            mark = " (α)" if age == self.run.staleness_bound else ""
            curves.append(series(f"{age}{' or more' if last else mark}", LEVEL_COLOURS[age], values))
        return self.page.add("staleness", {"label": "Staleness over time", "kind": "stack", "format": "percent",
                                       "high": 1.0, "series": curves})  # fmt: skip

    # ---- pools ---------------------------------------------------------------------------------------------------

    def pool(self, name: str) -> str:
        def of(value: Callable[[PoolUse], float]) -> Callable[[Trained], float | None]:
            return lambda line: next((value(use) for use in line.pools if use.name == name and use.actions), None)

        curves = [
            series("p99", "k1", (bucket.maximum(of(lambda use: use.act_p99_s)) for bucket in self.buckets)),
            series("mean", "p1", (bucket.mean(of(lambda use: use.act_mean_s)) for bucket in self.buckets)),
            series("waiting", "k4", (bucket.mean(of(lambda use: use.waiting_mean_s)) for bucket in self.buckets)),
        ]
        return self.page.add(
            "pool", {"label": f"ACT of pool {short_name(name)}", "format": "seconds", "series": curves}
        )

    # ---- the trainer, and discarded tokens -------------------------------------------------------------------------

    def metric(self, name: str, words: str, format: str) -> str:
        """A metric of the trainer; an empty id if no step reports it."""
        values = [bucket.mean(lambda line: line.metrics.get(name)) for bucket in self.buckets]
        if all(value is None for value in values):
            return ""
        return self.page.add("metric", {"label": words, "format": format, "series": [series(name, "p1", values)]})

    def dropped(self) -> str:
        causes = list(dict.fromkeys(cause for line in self.run.steps for cause in line.dropped))[:LEVELS_MAX]
        curves = []
        for place, cause in enumerate(causes):
            values = [bucket.mean(_dropped(cause)) for bucket in self.buckets]
            curves.append(series(cause, LEVEL_COLOURS[-1 - place], values))
        return self.page.add("dropped", {"label": "Groups dropped, by cause", "kind": "stack", "series": curves})

    def aborted(self) -> str:
        values = [bucket.mean(lambda line: line.aborted) for bucket in self.buckets]
        spec = {"label": "Trajectories aborted", "kind": "stack", "series": [series("aborted", "k4", values)]}
        return self.page.add("aborted", spec)

    def tokens_discarded(self) -> str:
        """Tokens that were not trained on, as shares of all decoded tokens."""
        totals = [token_totals(bucket.steps) for bucket in self.buckets]
        curves = [
            series("in no batch", "k1", (each.in_no_batch / each.written if each.written else None for each in totals)),
            series("teach nothing", "k4", (each.idle / each.written if each.written else None for each in totals)),
        ]
        spec = {"label": "Tokens not trained on", "kind": "stack", "format": "percent", "series": curves}
        return self.page.add("tokens", spec)


def _thin(lines: Sequence[Any]) -> Sequence[Any]:
    """Every n-th line, so that at most POINTS_MAX remain; always with the last."""
    every = max(1, -(-len(lines) // POINTS_MAX))
    return lines if every == 1 else [*lines[: len(lines) - 1 : every], lines[-1]]


def _reward(bucket: StepBucket, task: str) -> float | None:
    return bucket.mean(lambda line: line.tasks[task].reward if task in line.tasks else None)


def _busy(name: str) -> Callable[[Trained], float | None]:
    return lambda line: next((use.busy_share for use in line.engines if use.name == name), None)


def _dropped(cause: str) -> Callable[[Trained], float]:
    return lambda line: line.dropped.get(cause, 0)


def _age_share(bucket: StepBucket, low: int, high: int) -> float:
    all_of_them = sum(sum(line.staleness) for line in bucket.steps)
    return sum(sum(line.staleness[low:high]) for line in bucket.steps) / all_of_them if all_of_them else 0.0


assert set(STAGE_COLOURS) == {stage.value for stage in Stage}
