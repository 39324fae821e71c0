"""The judge: a small transformer that says whether two names are of the same entity, as the service `judge` of lookup.

Owns its training, its examination and its engine. It is trained on pairs of names, and examined on pairs that it was
never trained on: it has to have found out who belongs together. Promises that a judge which starts has passed:
`accuracy_min` holds for the pairs held out, and for all pairs, right and wrong ones counting alike.

    python -m tangram.rl.model.judge FOLDER    settings as JSON on stdin; progress, a share and a text a line, on stdout
"""

from __future__ import annotations

import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tangram.errors import ManagerError, TangramError
from tangram.managers.models.torch_engine import TorchEngine
from tangram.rl.environments.lookup_judge import JudgeSettings, Progress, keep, kept
from tangram.rl.model.transformer import Transformer, small

LOOK_EVERY = 50
"""Steps of training between two examinations."""
GOOD_ENOUGH = 0.998
"""Where training ends early: clearly above what is demanded."""
CALLS_AT_ONCE = 64


class Judge(nn.Module):
    """Reads two names; the last two logits say no and yes."""

    def __init__(self, settings: JudgeSettings) -> None:
        super().__init__()
        self.id_by_name = {name: at for at, name in enumerate(n for group in settings.groups for n in group)}
        sizes = small(
            len(self.id_by_name) + 2, layers=settings.layers, width=settings.width, heads=settings.heads, context_max=2
        )
        self.transformer = Transformer.new(sizes, settings.seed)

    def forward(self, pairs: Tensor) -> Tensor:
        """Logits [B, 2] of no and yes, of pairs [B, 2]."""
        logits: Tensor = self.transformer(pairs)[:, -1, -2:]
        return logits


class Pairs:
    """All pairs of names: who belongs together, and which are held out."""

    def __init__(self, settings: JudgeSettings) -> None:
        entity = torch.tensor([at for at, group in enumerate(settings.groups) for _ in group])
        same = entity.unsqueeze(1) == entity
        chance = torch.Generator().manual_seed(settings.seed)
        held_out = torch.rand(same.shape, generator=chance) < settings.held_out
        self.taught = (~same & ~held_out).nonzero(), (same & ~held_out).nonzero()
        self.held_out = (~same & held_out).nonzero(), (same & held_out).nonzero()
        """Different ones, and same ones."""

    def accuracy(self, judge: Judge) -> float:
        """On the pairs held out or on those taught, whichever is less; different and same ones count alike."""
        return min(_balanced(judge, self.held_out), _balanced(judge, self.taught))


def _balanced(judge: Judge, pairs: tuple[Tensor, Tensor]) -> float:
    with torch.inference_mode():
        shares = [(judge(part).argmax(1) == said).float().mean().item() for said, part in enumerate(pairs) if len(part)]
    return sum(shares) / len(shares)


def train(settings: JudgeSettings, progress: Progress | None = None) -> Judge:
    """The best that was seen at an examination. The same settings make the same judge, on one thread."""
    judge, pairs = Judge(settings), Pairs(settings)
    chance = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=settings.rate, weight_decay=settings.decay)
    half = settings.batch // 2
    said = torch.arange(2).repeat_interleave(half)
    best, best_state = -1.0, judge.state_dict()
    for step in range(1, settings.steps_max + 1):
        drawn = [part[torch.randint(len(part), (half,), generator=chance)] for part in pairs.taught]
        loss = F.cross_entropy(judge(torch.cat(drawn)), said)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % LOOK_EVERY and step < settings.steps_max:
            continue
        accuracy = pairs.accuracy(judge)
        if progress is not None:
            progress(step / settings.steps_max, f"step {step}, accuracy {accuracy:.3f}")
        if accuracy > best:
            best, best_state = accuracy, {name: value.clone() for name, value in judge.state_dict().items()}
        if best >= GOOD_ENOUGH:
            break
    judge.load_state_dict(best_state)
    return judge


def obtain(settings: JudgeSettings, folder: Path, progress: Progress | None = None) -> Judge:
    """The one that is kept, or else one that is trained now and kept. Raises ManagerError for one that does not pass,
    wherever it comes from."""
    judge = _loaded(settings, kept(folder, settings))
    trained = judge is None
    if judge is None:
        judge = train(settings, progress)
    accuracy = Pairs(settings).accuracy(judge)
    if not accuracy >= settings.accuracy_min:
        raise ManagerError(
            f"the judge is right about {accuracy:.3f} of the pairs of names, and {settings.accuracy_min:g} are "
            "needed, or it would pay for wrong answers; train it for more steps (steps_max), or give it another seed",
            retry=False,
        )
    if trained:
        content = io.BytesIO()
        torch.save(judge.state_dict(), content)
        keep(folder, settings, content.getvalue())
    return judge.eval()


def _loaded(settings: JudgeSettings, content: bytes | None) -> Judge | None:
    if content is None:
        return None
    judge = Judge(settings)
    try:
        judge.load_state_dict(torch.load(io.BytesIO(content), weights_only=True))
    except Exception:  # of a transformer that was made otherwise; PyTorch raises anything there
        return None
    return judge


# ---- the service ------------------------------------------------------------------------------------------------


class JudgeEngine(TorchEngine):
    """A payload is `{"given": name, "expected": name}`, an answer `{"score": 0.0 or 1.0, "probability": ...}`."""

    def __init__(self, settings: dict[str, Any], folder: str) -> None:
        super().__init__(Judge, forward_batch=answers, batch_max=CALLS_AT_ONCE)
        self._settings = msgspec.convert(settings, JudgeSettings)
        self._folder = Path(folder)

    def build(self) -> Judge:
        torch.set_num_threads(1)
        return obtain(self._settings, self._folder)


def answers(judge: Judge, payloads: list[bytes]) -> list[bytes]:
    """Raises ValueError for a payload that names what the judge does not know."""
    pairs = torch.tensor([_pair(judge, payload) for payload in payloads], device=judge.transformer.device)
    probabilities = judge(pairs).softmax(1)[:, 1].tolist()
    return [json.dumps({"score": float(p > 0.5), "probability": p}).encode() for p in probabilities]


def _pair(judge: Judge, payload: bytes) -> list[int]:
    asked = json.loads(payload)
    names = [asked.get(key) for key in ("given", "expected")] if isinstance(asked, dict) else []
    found = [judge.id_by_name.get(name) for name in names if isinstance(name, str)]
    if len(found) != 2 or None in found:
        raise ValueError(f'expected {{"given": name, "expected": name}} with names that the judge knows, got {asked!r}')
    return [at for at in found if at is not None]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; whoever started this ends it
    torch.set_num_threads(1)
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=JudgeSettings)
    try:
        obtain(settings, Path(sys.argv[1]), lambda share, said: print(f"{share:.3f} {said}", flush=True))
    except TangramError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
