"""frozenlake: over the ice to the goal, one move a turn, without falling into a hole.

Many turns, long observations and answers of one word: reading is what it costs. The reward is 1 for reaching the goal
and 0 for all else: a hole ends the episode, and so does the last turn. A move against the edge stays where it is; what
is no move is answered by `unknown` and costs its turn.

The lake is made of the seed alone: start and goal well apart, holes by chance, and always a way
that fits into the turns. What the policy reads is chosen by `encoding`:

    direction   towards southeast up:edge right:ice down:hole left:edge
    position    at 0 0 goal 2 1 up:edge right:ice down:hole left:edge
    grid        row you ice ice ice row hole ice ice ice row ice goal ...

`direction` is the one that learns best. What lies beside is one word with its move: as two words, a small policy learns
much later which of them belong together. Under `slippery` a move goes sideways by a chance that is made of the seed and
the turn, so that the same moves still make the same episode.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, get_args

from tangram.errors import InvalidConfig
from tangram.rl.environments.agents import RandomAgent
from tangram.rl.environments.protocol import Environment, MakeAgent, Outside, Step

Cell = tuple[int, int]
"""Row and column."""
Encoding = Literal["direction", "position", "grid"]

SIZE_MAX = 8
"""Rows of the largest lake: its numbers are words of the vocabulary."""

MOVES: Mapping[str, Cell] = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
"""In the order of a clock: what lies beside a move are the ones before and after it."""
CELLS = ("ice", "goal", "hole", "edge")
SAFE = ("ice", "goal")
DIRECTIONS: Mapping[Cell, str] = {
    (-1, -1): "northwest", (-1, 0): "north", (-1, 1): "northeast",
    (0, -1): "west", (0, 0): "here", (0, 1): "east",
    (1, -1): "southwest", (1, 0): "south", (1, 1): "southeast",
}  # fmt: skip
_OTHER_WORDS = ("towards", "at", "row", "you", "unknown", "over", "fell", "reached")


class Lake:
    """Where is what. Made of a seed and the options, and never changed."""

    def __init__(self, seed: int, size: int, holes: float, turns: int) -> None:
        chance = random.Random(f"frozenlake {size} {holes} {turns} {seed}")
        cells = [(row, column) for row in range(size) for column in range(size)]
        self.size = size
        self.start = chance.choice(cells)
        far = range(_apart(size), turns + 1)
        self.goal = chance.choice([cell for cell in cells if _steps_between(self.start, cell) in far])
        self.holes = {cell for cell in cells if chance.random() < holes} - {self.start, self.goal}
        self._moves_by_cell = self._measure()
        if self.moves_left(self.start) > turns:
            self.holes -= set(_walk(self.start, self.goal, chance))
            self._moves_by_cell = self._measure()
        assert self.moves_left(self.start) <= turns, "there is a way"

    def at(self, cell: Cell) -> str:
        if not all(0 <= each < self.size for each in cell):
            return "edge"
        return "hole" if cell in self.holes else "goal" if cell == self.goal else "ice"

    def moves_left(self, cell: Cell) -> float:
        """To the goal, by the shortest way; infinite if there is none."""
        return self._moves_by_cell.get(cell, float("inf"))

    def _measure(self) -> dict[Cell, float]:
        moves_by_cell: dict[Cell, float] = {self.goal: 0.0}
        front = deque([self.goal])
        while front:
            cell = front.popleft()
            for move in MOVES.values():
                near = _sum(cell, move)
                if near not in moves_by_cell and self.at(near) in SAFE:
                    moves_by_cell[near] = moves_by_cell[cell] + 1
                    front.append(near)
        return moves_by_cell


class FrozenLake:
    """One episode on one lake. Chance reaches the goal in 8 % of the usual lakes, any safe moves do in 17 %: a policy
    that was taught those is ready to learn the rest at 15 %, when it falls no more."""

    acts_outside: ClassVar[bool] = False
    words: ClassVar[tuple[str, ...]] = (
        *MOVES, *DIRECTIONS.values(), *CELLS, *_OTHER_WORDS, *(str(number) for number in range(SIZE_MAX)),
        *(f"{move}:{cell}" for move in MOVES for cell in CELLS),
    )  # fmt: skip
    turns_max: int = 8
    tokens_max: ClassVar[int] = 2
    """A move, and its end."""
    agents: ClassVar[Mapping[str, MakeAgent]] = {
        "random": lambda chance: RandomAgent(tuple(MOVES), chance),
        "teacher": lambda chance: Careful(chance),
        "expert": lambda chance: Expert(),
    }

    def __init__(
        self,
        outside: Outside,
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
        if type(turns) is not int or turns < _apart(size):
            raise InvalidConfig("turns", turns, f"a whole number, at least {_apart(size)}: the goal is as far away")
        for key, value in (("holes", holes), ("slippery", slippery)):
            if not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
                raise InvalidConfig(key, value, "a share from 0 to 1")
        if encoding not in get_args(Encoding):
            raise InvalidConfig("encoding", encoding, f"one of {', '.join(get_args(Encoding))}")
        self.turns_max = turns
        self._size, self._holes, self._slippery, self._encoding = size, holes, slippery, encoding
        self._seed = 0
        self._turn = 0
        self._over = True
        self.lake: Lake | None = None
        """Where it is played, once it is reset. For agents that may know more than the policy."""
        self.position: Cell = (0, 0)

    async def reset(self, seed: int) -> str:
        self._seed = seed
        self.lake = Lake(seed, self._size, self._holes, self.turns_max)
        self.position = self.lake.start
        self._turn = 0
        self._over = False
        return self._said()

    async def step(self, action: str) -> Step:
        if self._over:
            raise ValueError("frozenlake: expected a reset before this step, for the episode is over or never began")
        words = action.split(maxsplit=1)
        known = len(words) == 1 and words[0] in MOVES
        if known:
            self.position = self.lands(words[0])
        self._turn += 1
        here = self._here().at(self.position)
        self._over = here != "ice" or self._turn == self.turns_max
        said = {"goal": "reached", "hole": "fell"}.get(here, "over") if self._over else self._said(known)
        return Step(
            observation=said, reward=float(here == "goal"), done=self._over,
            metrics={"moves": float(self._turn), "fell": float(here == "hole")} if self._over else {},
        )  # fmt: skip

    async def close(self) -> None:
        self._over = True

    def lands(self, move: str) -> Cell:
        """Where a move leads in this turn."""
        lake = self._here()
        if self._slippery and (chance := random.Random(f"slip {self._seed} {self._turn}")).random() < self._slippery:
            order = list(MOVES)
            move = order[(order.index(move) + chance.choice((-1, 1))) % len(order)]
        cell = _sum(self.position, MOVES[move])
        return self.position if lake.at(cell) == "edge" else cell

    def _here(self) -> Lake:
        assert self.lake is not None, "reset makes the lake"
        return self.lake

    def _said(self, known: bool = True) -> str:
        lake, (row, column) = self._here(), self.position
        words = [] if known else ["unknown"]
        if self._encoding == "grid":
            for cells in range(lake.size):
                marks = [lake.at((cells, each)) for each in range(lake.size)]
                if cells == row:
                    marks[column] = "you"
                words += ["row", *marks]
            return " ".join(words)
        if self._encoding == "direction":
            words += ["towards", DIRECTIONS[_sign(lake.goal[0] - row), _sign(lake.goal[1] - column)]]
        else:
            words += ["at", str(row), str(column), "goal", str(lake.goal[0]), str(lake.goal[1])]
        words += [f"{name}:{lake.at(_sum(self.position, move))}" for name, move in MOVES.items()]
        return " ".join(words)


class Careful:
    """Any move that is safe: it knows the format and the holes, and not what the goal is good for."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def act(self, observation: str) -> str:
        near = _neighbours(observation.split())
        safe = [move for move, cell in near.items() if cell in SAFE]
        return self._chance.choice(safe or list(MOVES))


class Expert:
    """The shortest way, which takes more than what the policy reads: it looks at the lake itself."""

    def __init__(self) -> None:
        self._seen: FrozenLake | None = None

    def see(self, environment: Environment) -> None:
        assert isinstance(environment, FrozenLake), "it knows this lake only"
        self._seen = environment

    def act(self, observation: str) -> str:
        assert self._seen is not None and self._seen.lake is not None, "`play` shows it the environment before"
        lake, lands = self._seen.lake, self._seen.lands
        return min(MOVES, key=lambda move: lake.moves_left(lands(move)))


def _neighbours(words: Sequence[str]) -> dict[str, str]:
    """What lies in the direction of each move, as an observation of any encoding says it."""
    if "you" not in words:
        return dict(word.split(":") for word in words if ":" in word)
    rows: list[list[str]] = []
    for word in words[words.index("row") :]:
        if word == "row":
            rows.append([])
        else:
            rows[-1].append(word)
    you = next((row, cells.index("you")) for row, cells in enumerate(rows) if "you" in cells)
    near = {move: _sum(you, by) for move, by in MOVES.items()}
    inside = range(len(rows))
    return {move: rows[row][column] for move, (row, column) in near.items() if row in inside and column in inside}


def _apart(size: int) -> int:
    """Moves from start to goal at least: as many as every cell has another one for, and too many to do by chance."""
    return max(2, size - 1)


def _walk(start: Cell, goal: Cell, chance: random.Random) -> list[Cell]:
    """A way without detours, by chance."""
    way = [start]
    while way[-1] != goal:
        row, column = goal[0] - way[-1][0], goal[1] - way[-1][1]
        ahead: list[Cell] = [(_sign(row), 0)] * bool(row) + [(0, _sign(column))] * bool(column)
        way.append(_sum(way[-1], chance.choice(ahead)))
    return way


def _sum(cell: Cell, by: Cell) -> Cell:
    return cell[0] + by[0], cell[1] + by[1]


def _steps_between(one: Cell, other: Cell) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
