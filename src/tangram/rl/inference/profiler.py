"""The profiler: what tasks read and write, and which class of hardware that speaks for.

Owns the measurements and the arithmetic. Never changes an affinity: it recommends one, and says how sure it is. What
counts is what a task cannot do without: each token that it is told is read once, and so is the last one of each action
that is followed by another turn. What was read besides, because a prefix did not stay or an engine died, speaks of the
engine's cache and not of the task: it is told, and left out of the recommendation.

Predicted is the time that one device of each class would spend on a trajectory, by its roofline: reading is bound by
compute, since many tokens share one pass over the weights; writing is bound by bandwidth, since each step reads the
weights once for all requests of its batch and the context of each. Times are compared at equal cost, for what a class
costs more can be bought of the other one. The model and the batch are assumptions, stated in `Assumptions`; ratios
between tasks do not depend on them much, where the line between classes lies does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from tangram.rl.inference.affinity import PUBLISHED, Hardware
from tangram.rl.inference.engines.protocol import Generation
from tangram.rl.rollout.records import Trajectory
from tangram.sim.serving_fit import CALIBRATED
from tangram.sim.serving_model import Efficiency

TRAJECTORIES_MIN = 16
"""From fewer a recommendation is a guess: lengths of trajectories differ by several times."""
RATIO_CLEAR = 1.2
"""A class that would win by less may lose by what the roofline leaves out."""
AGREEMENT_CLEAR = 0.8
"""Of the trajectories, those that speak for the same class."""
AGAIN_TOLD = 0.1
"""Less than this share is what new weights and deaths cost anyway."""
TERA = 1e12


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is served: an 8B model of 36 layers with 8 key-value heads of 128, in 16 bits."""

    parameters: float = 8.2e9
    bytes_per_parameter: float = 2.0
    context_bytes_per_token: float = 147_456.0
    batch: float = 32.0
    """Requests that write in one step."""
    reached: Mapping[str, Efficiency] = msgspec.field(default_factory=lambda: CALIBRATED)
    """Which share of its published numbers a device reaches, by its name; the simulator has fitted them."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What was done for a task, or for one of its trajectories."""

    trajectories: int = 0
    turns: int = 0
    prefilled: int = 0
    """Tokens that were read, again included."""
    again: int = 0
    """Of these, those that had been read before."""
    decoded: int = 0
    context: int = 0
    """Tokens before each token that was written, summed up: what writing had to look at."""
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})

    @property
    def needed(self) -> int:
        """Tokens that had to be read."""
        return self.prefilled - self.again

    @property
    def prefill_share(self) -> float:
        """Of the measured engine time, that of reading."""
        total_s = self.prefill_s + self.decode_s
        return self.prefill_s / total_s if total_s else 0.0


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task should go."""

    task: str
    hardware: str
    """The class."""
    ratio: float
    """The time on the next best class at equal cost, over that on this one."""
    seconds_by_class: Mapping[str, float]
    """Predicted, of one trajectory on one device."""
    work: Work
    agreement: float
    """Of its trajectories, those that by themselves speak for the same class."""
    confident: bool
    note: str
    """How sure, and why."""

    def line(self) -> str:
        work = self.work
        each = max(1, work.trajectories)
        return (
            f"{self.task}: {self.hardware}, {_shown(self.ratio)}x at equal cost "
            f"(reads {work.needed / each:.0f} and writes {work.decoded / each:.0f} tokens per trajectory in "
            f"{work.turns / each:.1f} turns; {work.prefill_share:.0%} of its engine time was reading); {self.note}"
        )


class Profiler:
    """Is told of trajectories or generations, asked for recommendations."""

    def __init__(self, classes: Mapping[str, Hardware] = PUBLISHED, *, assumptions: Assumptions | None = None) -> None:
        assert len(classes) >= 2, "there is nothing to choose between fewer than two classes"
        self._classes = classes
        self._assumptions = assumptions or Assumptions()
        self._work_by_task: dict[str, Work] = {}
        self._votes_by_task: dict[str, dict[str, int]] = {}

    def add(self, trajectory: Trajectory) -> None:
        """Also one that failed or was cancelled: its tokens were read and written all the same."""
        self._note(trajectory.task, work_of(trajectory))

    def add_generation(self, task: str, generation: Generation, *, context: int) -> None:
        """A turn by itself; `context` is how many tokens stood before it."""
        written = len(generation.tokens)
        work = Work(
            trajectories=1,
            turns=1,
            prefilled=generation.prefilled,
            decoded=written,
            context=_looked_at(context, written),
            prefill_s=generation.prefill_s,
            decode_s=generation.decode_s,
        )
        self._note(task, work)

    def work(self, task: str) -> Work:
        return self._work_by_task.get(task, Work())

    def recommend(self) -> tuple[Recommendation, ...]:
        """For each task of which tokens were seen, in the order in which they came."""
        return tuple(
            self._recommend(task) for task, work in self._work_by_task.items() if work.prefilled or work.decoded
        )

    def lines(self) -> list[str]:
        """For a reader."""
        found = [each.line() for each in self.recommend()]
        return found or ["nothing was written yet: there is nothing to recommend from"]

    def _note(self, task: str, work: Work) -> None:
        self._work_by_task[task] = self._work_by_task.get(task, Work()) + work
        if work.prefilled or work.decoded:
            votes = self._votes_by_task.setdefault(task, dict.fromkeys(self._classes, 0))
            votes[best(self._costs(work))] += 1

    def _costs(self, work: Work) -> dict[str, float]:
        """Seconds times cost, by class."""
        return {
            name: predicted_s(work, hardware, self._assumptions) * hardware.cost
            for name, hardware in self._classes.items()
        }

    def _recommend(self, task: str) -> Recommendation:
        work = self._work_by_task[task]
        costs = self._costs(work)
        chosen = best(costs)
        ratio = min(cost for name, cost in costs.items() if name != chosen) / costs[chosen]
        votes = self._votes_by_task[task]
        agreement = votes[chosen] / sum(votes.values())
        doubts = list(_doubts(work.trajectories, ratio, agreement))
        each = max(1, work.trajectories)
        return Recommendation(
            task=task,
            hardware=chosen,
            ratio=ratio,
            seconds_by_class={name: costs[name] / self._classes[name].cost / each for name in costs},
            work=work,
            agreement=agreement,
            confident=not doubts,
            note=("clear" if not doubts else "doubtful: " + ", ".join(doubts)) + _told_again(work),
        )


def _doubts(trajectories: int, ratio: float, agreement: float) -> Iterable[str]:
    if trajectories < TRAJECTORIES_MIN:
        yield f"only {trajectories} of at least {TRAJECTORIES_MIN} trajectories were seen"
    if ratio < RATIO_CLEAR:
        yield f"the classes differ by less than {RATIO_CLEAR:g}x"
    if agreement < AGREEMENT_CLEAR:
        yield f"only {agreement:.0%} of the trajectories speak for it"


def _shown(ratio: float) -> str:
    """With as many digits as tell it from the limit by which it is judged."""
    for digits in range(2, 9):
        shown = f"{ratio:.{digits}f}"
        if (float(shown) < RATIO_CLEAR) == (ratio < RATIO_CLEAR):
            break
    return shown


def _told_again(work: Work) -> str:
    if work.again <= AGAIN_TOLD * work.needed:
        return ""
    again = work.again / max(1, work.trajectories)
    return (
        f"; {again:.0f} tokens more per trajectory were read again, which is not counted: "
        "more `sessions` or slots of its engines would spare it"
    )


def best(costs: Mapping[str, float]) -> str:
    return min(costs, key=lambda name: costs[name])


def work_of(trajectory: Trajectory) -> Work:
    before = context = again = 0
    for turn in trajectory.turns:
        # The last token that was written has not been read: nothing came after it until now.
        again += max(0, turn.prefilled - len(turn.observation_tokens) - min(1, before))
        before += len(turn.observation_tokens)
        context += _looked_at(before, len(turn.tokens))
        before += len(turn.tokens)
    return Work(
        trajectories=1,
        turns=len(trajectory.turns),
        prefilled=sum(turn.prefilled for turn in trajectory.turns),
        again=again,
        decoded=sum(len(turn.tokens) for turn in trajectory.turns),
        context=context,
        prefill_s=sum(turn.prefill_s for turn in trajectory.turns),
        decode_s=sum(turn.decode_s for turn in trajectory.turns),
    )


def predicted_s(work: Work, hardware: Hardware, assumptions: Assumptions) -> float:
    """On one device: of reading by compute, of writing by bandwidth, or by compute where that is the tighter one."""
    reached = assumptions.reached.get(hardware.name, Efficiency())
    flops = hardware.tflops * TERA * reached.prefill
    bandwidth = hardware.bandwidth_tb_s * TERA * reached.decode
    token_s = 2.0 * assumptions.parameters / flops
    weights_s = assumptions.parameters * assumptions.bytes_per_parameter / assumptions.batch / bandwidth
    context_s = work.context * assumptions.context_bytes_per_token / bandwidth
    return work.needed * token_s + max(work.decoded * token_s, work.decoded * weights_s + context_s)


def _looked_at(before: int, written: int) -> int:
    """The first token looks at `before` others, each that follows at one more."""
    return written * before + written * (written - 1) // 2
