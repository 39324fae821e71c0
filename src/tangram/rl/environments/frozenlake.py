"""frozenlake: walk over the ice to the goal, one move a turn, without falling into a hole.

Many turns, long observations and answers of one word, so prefill dominates. The reward is 1 for reaching the goal and 0
otherwise: a hole ends the episode, and so does the last turn. A move against the edge stays in place; an unknown move
gets the observation `unknown` and costs its turn.

The lake depends on the seed alone: start and goal far apart, random holes, and always a path within the turn limit.
`encoding` selects what the policy reads:

    direction   towards southeast up:edge right:ice down:hole left:edge
    position    at 0 0 goal 2 1 up:edge right:ice down:hole left:edge
    grid        row you ice ice ice row hole ice ice ice row ice goal ...

`direction` is learned best. A neighbour and its move are one word: with two words, a small policy learns much later
which of them belong together. Under `slippery` a move may go sideways, at random numbers that depend on the seed and
the turn, so the same moves still make the same episode.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, get_args

from tangram.errors import InvalidConfig
from tangram.rl.environments.agents import RandomAgent
from tangram.rl.environments.protocol import Environment, ExternalResources, MakeAgent, Step

Cell = tuple[int, int]
"""Row and column."""
Encoding = Literal["direction", "position", "grid"]

SIZE_MAX = 8
"""Rows of the largest lake: its numbers are words of the vocabulary."""

MOVES: Mapping[str, Cell] = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
"""Clockwise: sideways of a move are the ones before and after it."""
CELLS = ("ice", "goal", "hole", "edge")
SAFE = ("ice", "goal")
DIRECTIONS: Mapping[Cell, str] = {
    (-1, -1): "northwest", (-1, 0): "north", (-1, 1): "northeast",
    (0, -1): "west", (0, 0): "here", (0, 1): "east",
    (1, -1): "southwest", (1, 0): "south", (1, 1): "southeast",
}  # fmt: skip
_OTHER_WORDS = ("towards", "at", "row", "you", "unknown", "over", "fell", "reached")


class Lake:
    """The cells of a lake. Depends on seed and options, and never changes."""

    def __init__(self, seed: int, size: int, holes: float, turns: int) -> None:
        rng = random.Random(f"frozenlake {size} {holes} {turns} {seed}")
        cells = [(row, column) for row in range(size) for column in range(size)]
        self.size = size
        self.start = rng.choice(cells)
        distances = range(_distance_min(size), turns + 1)
        self.goal = rng.choice([cell for cell in cells if _steps_between(self.start, cell) in distances])
        self.holes = {cell for cell in cells if rng.random() < holes} - {self.start, self.goal}
        self._moves_by_cell = self._distances_to_goal()
        if self.moves_left(self.start) > turns:
            self.holes -= set(_walk(self.start, self.goal, rng))
            self._moves_by_cell = self._distances_to_goal()
        assert self.moves_left(self.start) <= turns, "a path exists"

    def at(self, cell: Cell) -> str:
        if not all(0 <= each < self.size for each in cell):
            return "edge"
        return "hole" if cell in self.holes else "goal" if cell == self.goal else "ice"

    def moves_left(self, cell: Cell) -> float:
        """Moves to the goal by the shortest path; infinite if there is none."""
        return self._moves_by_cell.get(cell, float("inf"))

    def _distances_to_goal(self) -> dict[Cell, float]:
        moves_by_cell: dict[Cell, float] = {self.goal: 0.0}
        queue = deque([self.goal])
        while queue:
            cell = queue.popleft()
            for move in MOVES.values():
                near = _sum(cell, move)
                if near not in moves_by_cell and self.at(near) in SAFE:
                    moves_by_cell[near] = moves_by_cell[cell] + 1
                    queue.append(near)
        return moves_by_cell


class FrozenLake:
    """One episode on one lake. Random moves reach the goal in 8 % of the default lakes, random safe moves in 17 %. A
    policy cloned from the latter can learn the rest from 15 % on, when it avoids holes."""

    needs_client: ClassVar[bool] = False
    words: ClassVar[tuple[str, ...]] = (
        *MOVES, *DIRECTIONS.values(), *CELLS, *_OTHER_WORDS, *(str(number) for number in range(SIZE_MAX)),
        *(f"{move}:{cell}" for move in MOVES for cell in CELLS),
    )  # fmt: skip
    turns_max: int = 8
    tokens_max: ClassVar[int] = 2
    """A move, and the stop token."""
    agents: ClassVar[Mapping[str, MakeAgent]] = {
        "random": lambda rng: RandomAgent(tuple(MOVES), rng),
        "teacher": lambda rng: FrozenLakeTeacher(rng),
        "expert": lambda rng: FrozenLakeExpert(),
    }

    def __init__(
        self,
        resources: ExternalResources,
        *,
        size: int = 4,
        holes: float = 0.1,
        turns: int = turns_max,
        slippery: float = 0.0,
        encoding: Encoding = "direction",
    ) -> None:
        """Raises InvalidConfig."""
        if type(size) is not int or not 2 <= size <= SIZE_MAX:
            raise InvalidConfig("size", size, f"a whole number from 2 to {SIZE_MAX}")
        if type(turns) is not int or turns < _distance_min(size):
            raise InvalidConfig(
                "turns", turns, f"a whole number, at least {_distance_min(size)}: the goal is as far away"
            )
        for key, value in (("holes", holes), ("slippery", slippery)):
            if not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
                raise InvalidConfig(key, value, "a share from 0 to 1")
        if encoding not in get_args(Encoding):
            raise InvalidConfig("encoding", encoding, f"one of {', '.join(get_args(Encoding))}")
        self.turns_max = turns
        self._size, self._holes, self._slippery, self._encoding = size, holes, slippery, encoding
        self._seed = 0
        self._turn = 0
        self._done = True
        self.lake: Lake | None = None
        """The lake after reset; for agents that may see more than the policy."""
        self.position: Cell = (0, 0)

    async def reset(self, seed: int) -> str:
        self._seed = seed
        self.lake = Lake(seed, self._size, self._holes, self.turns_max)
        self.position = self.lake.start
        self._turn = 0
        self._done = False
        return self._observation()

    async def step(self, action: str) -> Step:
        if self._done:
            raise ValueError("frozenlake: expected a reset before this step, for the episode is over or never began")
        words = action.split(maxsplit=1)
        known = len(words) == 1 and words[0] in MOVES
        if known:
            self.position = self.destination(words[0])
        self._turn += 1
        cell = self._require_lake().at(self.position)
        self._done = cell != "ice" or self._turn == self.turns_max
        observation = {"goal": "reached", "hole": "fell"}.get(cell, "over") if self._done else self._observation(known)
        return Step(
            observation=observation, reward=float(cell == "goal"), done=self._done,
            metrics={"moves": float(self._turn), "fell": float(cell == "hole")} if self._done else {},
        )  # fmt: skip

    async def close(self) -> None:
        self._done = True

    def destination(self, move: str) -> Cell:
        """Where a move leads in this turn."""
        lake = self._require_lake()
        if self._slippery and (rng := random.Random(f"slip {self._seed} {self._turn}")).random() < self._slippery:
            order = list(MOVES)
            move = order[(order.index(move) + rng.choice((-1, 1))) % len(order)]
        cell = _sum(self.position, MOVES[move])
        return self.position if lake.at(cell) == "edge" else cell

    def _require_lake(self) -> Lake:
        assert self.lake is not None, "reset makes the lake"
        return self.lake

    def _observation(self, known: bool = True) -> str:
        lake, (agent_row, agent_column) = self._require_lake(), self.position
        words = [] if known else ["unknown"]
        if self._encoding == "grid":
            for lake_row in range(lake.size):
                marks = [lake.at((lake_row, each)) for each in range(lake.size)]
                if lake_row == agent_row:
                    marks[agent_column] = "you"
                words += ["row", *marks]
            return " ".join(words)
        if self._encoding == "direction":
            words += ["towards", DIRECTIONS[_sign(lake.goal[0] - agent_row), _sign(lake.goal[1] - agent_column)]]
        else:
            words += ["at", str(agent_row), str(agent_column), "goal", str(lake.goal[0]), str(lake.goal[1])]
        words += [f"{name}:{lake.at(_sum(self.position, move))}" for name, move in MOVES.items()]
        return " ".join(words)


class FrozenLakeTeacher:
    """Random safe moves: knows the format and the holes, but not the goal."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def act(self, observation: str) -> str:
        near = _neighbours(observation.split())
        safe = [move for move, cell in near.items() if cell in SAFE]
        return self._rng.choice(safe or list(MOVES))


class FrozenLakeExpert:
    """The shortest path, for which it sees the lake itself."""

    def __init__(self) -> None:
        self._environment: FrozenLake | None = None

    def see(self, environment: Environment) -> None:
        assert isinstance(environment, FrozenLake), "it knows this lake only"
        self._environment = environment

    def act(self, observation: str) -> str:
        assert self._environment is not None and self._environment.lake is not None, (
            "`play` shows it the environment before"
        )
        lake, lands = self._environment.lake, self._environment.destination
        return min(MOVES, key=lambda move: lake.moves_left(lands(move)))


def _neighbours(words: Sequence[str]) -> dict[str, str]:
    """Returns the neighbour in the direction of each move, from an observation of any encoding."""
    if "you" not in words:
        return dict(word.split(":") for word in words if ":" in word)
    rows: list[list[str]] = []
    for word in words[words.index("row") :]:
        if word == "row":
            rows.append([])
        else:
            rows[-1].append(word)
    position = next((row, cells.index("you")) for row, cells in enumerate(rows) if "you" in cells)
    near = {move: _sum(position, by) for move, by in MOVES.items()}
    inside = range(len(rows))
    return {move: rows[row][column] for move, (row, column) in near.items() if row in inside and column in inside}


def _distance_min(size: int) -> int:
    """Minimal number of moves from start to goal: every cell has another one at that distance, and random moves rarely
    get so far."""
    return max(2, size - 1)


def _walk(start: Cell, goal: Cell, rng: random.Random) -> list[Cell]:
    """Returns a random path without detours."""
    path = [start]
    while path[-1] != goal:
        row, column = goal[0] - path[-1][0], goal[1] - path[-1][1]
        ahead: list[Cell] = [(_sign(row), 0)] * bool(row) + [(0, _sign(column))] * bool(column)
        path.append(_sum(path[-1], rng.choice(ahead)))
    return path


def _sum(cell: Cell, by: Cell) -> Cell:
    return cell[0] + by[0], cell[1] + by[1]


def _steps_between(one: Cell, other: Cell) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
