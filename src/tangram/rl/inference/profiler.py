"""The profiler: measures prefill and decoding of tasks, and recommends a hardware class for each.

Owns the measurements and the arithmetic. Never changes an affinity: it recommends one, with its confidence. Only
necessary work counts: each token of an observation is prefilled once, and so is the last token of each action that is
followed by another turn. Prefill after an evicted prefix or an engine's death depends on the KV cache of the engine,
not on the task; it is reported, but not part of the recommendation.

The prediction is the time that one device of each class would spend on a trajectory, by its roofline. Prefill is bound
by compute, because many tokens share one pass over the weights. Decoding is bound by bandwidth, because each step reads
the weights once for the batch, and the context of each request. Times are compared at equal cost. Model and batch are
assumptions, `MODEL` and `BATCH`; ratios between tasks hardly depend on them, but the boundary between classes does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from tangram.rl.inference.affinity import HARDWARE_BY_CLASS
from tangram.rl.inference.engines.protocol import Generation
from tangram.rl.trajectories.trajectory import Trajectory
from tangram.sim.serving_model import BYTES, CALIBRATED, QWEN3_8B, Efficiency, Gpu

MODEL = QWEN3_8B
"""The served model."""
BATCH = 32
"""Requests that decode in one step."""
TRAJECTORIES_MIN = 16
"""With fewer, a recommendation is a guess: lengths of trajectories vary by several times."""
RATIO_CLEAR = 1.2
"""A smaller advantage may be reversed by effects that the roofline ignores."""
AGREEMENT_CLEAR = 0.8
"""Required share of trajectories that agree on the class."""
REREAD_SHARE_REPORTED = 0.1
"""A smaller share is the usual cost of weight updates and deaths."""


class InferenceWork(msgspec.Struct, frozen=True, kw_only=True):
    """Work for a task, or for one of its trajectories."""

    trajectories: int = 0
    turns: int = 0
    prefilled: int = 0
    """Prefilled tokens, repetitions included."""
    again: int = 0
    """The part that had been prefilled before."""
    decoded: int = 0
    context: int = 0
    """Sum of the context lengths of all decoded tokens: what decoding had to attend to."""
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def __add__(self, other: InferenceWork) -> InferenceWork:
        return InferenceWork(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})

    @property
    def needed(self) -> int:
        """Tokens that had to be prefilled."""
        return self.prefilled - self.again

    @property
    def prefill_share(self) -> float:
        """Share of prefill in the measured engine time."""
        total_s = self.prefill_s + self.decode_s
        return self.prefill_s / total_s if total_s else 0.0


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task should go."""

    task: str
    hardware: str
    """The class."""
    ratio: float
    """Time on the next best class divided by time on this one, at equal cost."""
    seconds_by_class: Mapping[str, float]
    """Predicted for one trajectory on one device."""
    work: InferenceWork
    agreement: float
    """Share of its trajectories that agree on the class."""
    confident: bool
    note: str
    """Confidence, and why."""

    def line(self) -> str:
        work = self.work
        each = max(1, work.trajectories)
        return (
            f"{self.task}: {self.hardware}, {_format_ratio(self.ratio)}x at equal cost "
            f"(reads {work.needed / each:.0f} and writes {work.decoded / each:.0f} tokens per trajectory in "
            f"{work.turns / each:.1f} turns; {work.prefill_share:.0%} of its engine time was reading); {self.note}"
        )


class Profiler:
    """Collects trajectories or generations, and recommends classes."""

    def __init__(self) -> None:
        self._work_by_task: dict[str, InferenceWork] = {}
        self._votes_by_task: dict[str, dict[str, int]] = {}

    def add(self, trajectory: Trajectory) -> None:
        """Also one that failed or was cancelled: its tokens were prefilled and decoded too."""
        self._add(trajectory.task, work_of(trajectory))

    def add_generation(self, task: str, generation: Generation, *, context: int) -> None:
        """A single turn; `context` is the number of tokens before it."""
        written = len(generation.tokens)
        work = InferenceWork(
            trajectories=1,
            turns=1,
            prefilled=generation.prefilled,
            decoded=written,
            context=_attended_tokens(context, written),
            prefill_s=generation.prefill_s,
            decode_s=generation.decode_s,
        )
        self._add(task, work)

    def work(self, task: str) -> InferenceWork:
        return self._work_by_task.get(task, InferenceWork())

    def recommend(self) -> tuple[Recommendation, ...]:
        """For each task with tokens, in the order of their first one."""
        return tuple(
            self._recommend(task) for task, work in self._work_by_task.items() if work.prefilled or work.decoded
        )

    def lines(self) -> list[str]:
        """As text."""
        lines = [recommendation.line() for recommendation in self.recommend()]
        return lines or ["no tokens were generated yet, so there is no recommendation"]

    def _add(self, task: str, work: InferenceWork) -> None:
        self._work_by_task[task] = self._work_by_task.get(task, InferenceWork()) + work
        if work.prefilled or work.decoded:
            votes = self._votes_by_task.setdefault(task, dict.fromkeys(HARDWARE_BY_CLASS, 0))
            votes[cheapest(self._costs(work))] += 1

    def _costs(self, work: InferenceWork) -> dict[str, float]:
        """Seconds times cost, by class."""
        return {name: predicted_s(work, gpu) * gpu.cost for name, gpu in HARDWARE_BY_CLASS.items()}

    def _recommend(self, task: str) -> Recommendation:
        work = self._work_by_task[task]
        costs = self._costs(work)
        chosen = cheapest(costs)
        ratio = min(cost for name, cost in costs.items() if name != chosen) / costs[chosen]
        votes = self._votes_by_task[task]
        agreement = votes[chosen] / sum(votes.values())
        doubts = list(_doubts(work.trajectories, ratio, agreement))
        each = max(1, work.trajectories)
        return Recommendation(
            task=task,
            hardware=chosen,
            ratio=ratio,
            seconds_by_class={name: costs[name] / HARDWARE_BY_CLASS[name].cost / each for name in costs},
            work=work,
            agreement=agreement,
            confident=not doubts,
            note=("clear" if not doubts else "doubtful: " + ", ".join(doubts)) + _reread_note(work),
        )


def _doubts(trajectories: int, ratio: float, agreement: float) -> Iterable[str]:
    if trajectories < TRAJECTORIES_MIN:
        yield f"only {trajectories} of at least {TRAJECTORIES_MIN} trajectories were seen"
    if ratio < RATIO_CLEAR:
        yield f"the classes differ by less than {RATIO_CLEAR:g}x"
    if agreement < AGREEMENT_CLEAR:
        yield f"only {agreement:.0%} of the trajectories agree"


def _format_ratio(ratio: float) -> str:
    """With enough digits to distinguish it from its limit."""
    for digits in range(2, 9):
        shown = f"{ratio:.{digits}f}"
        if (float(shown) < RATIO_CLEAR) == (ratio < RATIO_CLEAR):
            break
    return shown


def _reread_note(work: InferenceWork) -> str:
    if work.again <= REREAD_SHARE_REPORTED * work.needed:
        return ""
    rereads = work.again / max(1, work.trajectories)
    return (
        f"; {rereads:.0f} tokens more per trajectory were prefilled again, which is not counted: "
        "more `sessions` or slots of its engines would avoid it"
    )


def cheapest(costs: Mapping[str, float]) -> str:
    return min(costs, key=lambda name: costs[name])


def work_of(trajectory: Trajectory) -> InferenceWork:
    before = context = reread_tokens = 0
    for turn in trajectory.turns:
        # The last decoded token was not prefilled, because no turn followed until now.
        reread_tokens += max(0, turn.prefilled - len(turn.observation_tokens) - min(1, before))
        before += len(turn.observation_tokens)
        context += _attended_tokens(before, len(turn.tokens))
        before += len(turn.tokens)
    return InferenceWork(
        trajectories=1,
        turns=len(trajectory.turns),
        prefilled=sum(turn.prefilled for turn in trajectory.turns),
        again=reread_tokens,
        decoded=sum(len(turn.tokens) for turn in trajectory.turns),
        context=context,
        prefill_s=sum(turn.prefill_s for turn in trajectory.turns),
        decode_s=sum(turn.decode_s for turn in trajectory.turns),
    )


def predicted_s(work: InferenceWork, gpu: Gpu) -> float:
    """On one device: prefill by compute; decoding by bandwidth, or by compute if that is the tighter bound."""
    reached = CALIBRATED.get(gpu.name, Efficiency())
    flops = gpu.flops * reached.prefill
    bandwidth = gpu.bandwidth * reached.decode
    token_s = 2.0 * MODEL.parameters / flops
    weights_s = MODEL.parameters * BYTES / BATCH / bandwidth
    context_s = work.context * MODEL.kv_bytes / bandwidth
    return work.needed * token_s + max(work.decoded * token_s, work.decoded * weights_s + context_s)


def _attended_tokens(before: int, written: int) -> int:
    """The first token attends to `before` others, each following one to one more."""
    return written * before + written * (written - 1) // 2
