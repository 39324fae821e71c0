"""Arrange identical units: the paper's basic operator, a multiple-choice knapsack solved by dynamic programming over
units, vectorised.

Separate from `arrange.py` because it needs numpy, which takes longer to import than the whole core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tangram.core.arrange import Arrangement, Durations, only_faster

STATES_MAX = 1024
"""States of one pass. Beyond this number units are counted in coarser steps, rounded up so that nothing is oversold. A
node with 256 cores divided into quarters of a core is still exact."""


def arrange_units(durations: Sequence[Durations], units_max: int) -> Arrangement:
    """Divides at most `units_max` units so that the sum of seconds is least.

    Every candidate gets its minimum, so the state of the pass is what was granted beyond the minima, in steps of the
    greatest common divisor of all such amounts: a rigid candidate adds no states, whatever its number of milli-cores.
    Row i holds, for every state e, the least cost of the first i candidates with at most e steps beyond their minima.
    """
    useful, budgets = _within(durations, units_max)
    quantum = _quantum(useful, budgets[0])
    steps = [[-(-(units - choices[0][0]) // quantum) for units, _ in choices] for choices in useful]
    # Row i has as many states as the first i candidates leave; before each row lies infinity, where no state is.
    pad = max((step[-1] for step in steps), default=0)
    steps_max = sum(step[-1] for step in steps)
    states = [min(budget // quantum, steps_max) + 1 for budget in budgets]
    rows = np.full((len(useful) + 1, pad + states[0]), math.inf)
    rows[0, pad:] = 0.0
    picks = _fill(rows, pad, states, steps, useful)

    def trace(count: int) -> tuple[int, ...]:
        state = states[count] - 1
        units = []
        for i in reversed(range(count)):
            pick = picks[i][state]
            units.append(useful[i][pick][0])
            state -= steps[i][pick]
        return tuple(reversed(units))

    costs = [float(rows[i, pad + states[i] - 1]) for i in range(len(useful) + 1)]
    return Arrangement(costs, len(durations), trace)


def _within(durations: Sequence[Durations], units_max: int) -> tuple[list[list[tuple[int, float]]], list[int]]:
    """Returns the useful choices of the longest prefix whose minima fit, and the units that each prefix leaves."""
    useful: list[list[tuple[int, float]]] = []
    budgets = [units_max]
    for choices in durations:
        if not choices or choices[0][0] > budgets[-1]:
            break
        budgets.append(budgets[-1] - choices[0][0])
        useful.append(only_faster(choices, units_max))
    budgets[0] = budgets[min(1, len(useful))]  # the first candidate takes its minimum: no further states are reachable
    return useful, budgets


def _quantum(useful: Sequence[Durations], budget: int) -> int:
    """Returns the largest step that distinguishes all amounts, coarser if there would be too many states."""
    exact = math.gcd(*[units - choices[0][0] for choices in useful for units, _ in choices]) or 1
    spare = min(budget, sum(choices[-1][0] - choices[0][0] for choices in useful))
    return exact * max(1, math.ceil(spare / (exact * STATES_MAX)))


def _fill(
    rows: npt.NDArray[np.float64],
    pad: int,
    states: Sequence[int],
    steps: Sequence[Sequence[int]],
    useful: Sequence[Durations],
) -> list[npt.NDArray[np.intp]]:
    """Computes the rows in order. Returns the index of the best choice for every candidate and state."""
    every = np.arange(states[0])
    sources: dict[tuple[int, ...], npt.NDArray[np.intp]] = {}
    picks = []
    for i, choices in enumerate(useful):
        key = tuple(steps[i])
        if key not in sources:  # candidates of one class share their steps
            sources[key] = every[:, None] + (pad - np.array(key))
        width = states[i + 1]
        totals = rows[i].take(sources[key][:width])
        totals += np.array([seconds for _, seconds in choices])
        pick = totals.argmin(axis=1)
        rows[i + 1, pad : pad + width] = totals[every[:width], pick]
        picks.append(pick)
    return picks
