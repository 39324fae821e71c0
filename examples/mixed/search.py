"""The search run: agents send one to five queries a turn, a teacher judges their notes, and a function rewards them.

Owns the behaviour of each agent, drawn from a seed. A trajectory uses the API quota, then a device, then a part of a
core.
"""

from __future__ import annotations

import asyncio
import random
import zlib

import msgspec
from rewards import share_found
from server import Library
from sides import START_S, Side
from teachers import VOCABULARY

RUN = "search"
QUERIES = (1, 5)
"""Concurrent queries per turn: minimum and maximum."""
THINK_S = (0.1, 0.5)
NOTES_TOKENS = (2, 256)
"""Tokens that a judge reads: minimum and maximum."""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory."""

    name: str
    start_s: float
    judge: str
    turns: tuple[tuple[float, tuple[str, ...]], ...]
    """Think seconds of each turn, and the places that it queries."""
    lengths: dict[str, int]
    """The right answers, by place."""

    @property
    def actions(self) -> int:
        return sum(len(places) for _, places in self.turns) + 2


def draw(number: int, seed: int, library: Library, *, turns: int, judges: tuple[str, ...]) -> Script:
    rng = random.Random(f"{RUN}-{seed}-{number}")
    counts = [rng.randint(*QUERIES) for _ in range(turns)]
    places = rng.sample(list(library.lengths), sum(counts))
    left = iter(places)
    return Script(
        name=f"{RUN}/{number}",
        start_s=rng.uniform(0.0, START_S),
        judge=judges[number % len(judges)],
        turns=tuple((rng.uniform(*THINK_S), tuple(next(left) for _ in range(count))) for count in counts),
        lengths={place: library.lengths[place] for place in places},
    )


def tokens_of(text: str) -> tuple[int, ...]:
    """Return one token per word. The teachers have no tokenizer: their weights are random, so any numbering works."""
    least, most = NOTES_TOKENS
    tokens = [zlib.crc32(word.encode()) % VOCABULARY for word in text.split()][:most]
    return tuple(tokens + [0] * (least - len(tokens)))


async def play(side: Side, script: Script) -> float:
    await asyncio.sleep(script.start_s)
    notes: list[str] = []
    for think_s, places in script.turns:
        await asyncio.sleep(think_s)
        queries = [f"how long is the {place}" for place in places]
        answers = await side.client.gather(*(side.search(query, RUN, script.name) for query in queries))
        notes += [text for text in answers if text is not None]
    judged = await side.ask(script.judge, tokens_of(" ".join(notes)), RUN, script.name)
    return await side.call(share_found, (notes, script.lengths, judged), RUN, script.name)
