"""The judge: a small transformer that classifies whether two names mean the same entity; the service `judge` of lookup.

Owns its training, evaluation and serving. It is trained on pairs of names and evaluated on held-out pairs, so it must
infer which names belong together. Promises that a judge starts only if it has passed: `accuracy_min` holds for held-out
pairs and for all pairs, with equal weight of positive and negative ones.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tangram.errors import ManagerError, TangramError
from tangram.managers.models.torch_engine import TorchEngine
from tangram.processes.child_side import SupervisorConnection
from tangram.processes.framing import FrameDecoder
from tangram.rl.environments.lookup_judge import (
    JudgeProgress,
    JudgeSettings,
    JudgeTrained,
    Progress,
    TrainJudge,
    load_cached,
    store_cached,
)
from tangram.rl.model.transformer import Transformer, small_config

EVALUATE_EVERY = 50
"""Training steps between two evaluations."""
TARGET_ACCURACY = 0.998
"""Training stops early at this accuracy, clearly above the required one."""
BATCH_MAX = 64


class NameJudge(nn.Module):
    """Reads two names; returns the logits of no and yes."""

    def __init__(self, settings: JudgeSettings) -> None:
        super().__init__()
        self.id_by_name = {name: at for at, name in enumerate(n for group in settings.groups for n in group)}
        sizes = small_config(
            len(self.id_by_name) + 2, layers=settings.layers, width=settings.width, heads=settings.heads, context_max=2
        )
        self.transformer = Transformer.new(sizes, settings.seed)

    def forward(self, pairs: Tensor) -> Tensor:
        """Logits [B, 2] of no and yes, of pairs [B, 2]."""
        logits: Tensor = self.transformer(pairs)[:, -1, -2:]
        return logits


class NamePairs:
    """All pairs of names: their labels, and which are held out."""

    def __init__(self, settings: JudgeSettings) -> None:
        entity = torch.tensor([at for at, group in enumerate(settings.groups) for _ in group])
        same = entity.unsqueeze(1) == entity
        generator = torch.Generator().manual_seed(settings.seed)
        held_out = torch.rand(same.shape, generator=generator) < settings.held_out
        self.training_pairs = (~same & ~held_out).nonzero(), (same & ~held_out).nonzero()
        self.held_out_pairs = (~same & held_out).nonzero(), (same & held_out).nonzero()
        """Negative and positive ones."""

    def accuracy(self, judge: NameJudge) -> float:
        """The lower accuracy of held-out and trained pairs; negative and positive ones count equally."""
        return min(_balanced_accuracy(judge, self.held_out_pairs), _balanced_accuracy(judge, self.training_pairs))


def _balanced_accuracy(judge: NameJudge, pairs: tuple[Tensor, Tensor]) -> float:
    with torch.inference_mode():
        shares = [
            (judge(part).argmax(1) == label).float().mean().item() for label, part in enumerate(pairs) if len(part)
        ]
    return sum(shares) / len(shares)


def train(settings: JudgeSettings, progress: Progress | None = None) -> NameJudge:
    """Returns the best judge of all evaluations. The same settings make the same judge, on one thread."""
    judge, pairs = NameJudge(settings), NamePairs(settings)
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=settings.rate, weight_decay=settings.decay)
    half = settings.batch // 2
    labels = torch.arange(2).repeat_interleave(half)
    best, best_state = -1.0, judge.state_dict()
    for step in range(1, settings.steps_max + 1):
        sampled = [part[torch.randint(len(part), (half,), generator=generator)] for part in pairs.training_pairs]
        loss = F.cross_entropy(judge(torch.cat(sampled)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVALUATE_EVERY and step < settings.steps_max:
            continue
        accuracy = pairs.accuracy(judge)
        if progress is not None:
            progress(step / settings.steps_max, f"step {step}, accuracy {accuracy:.3f}")
        if accuracy > best:
            best, best_state = accuracy, {name: value.clone() for name, value in judge.state_dict().items()}
        if best >= TARGET_ACCURACY:
            break
    judge.load_state_dict(best_state)
    return judge


def load_or_train(settings: JudgeSettings, folder: Path, progress: Progress | None = None) -> NameJudge:
    """Loads the stored judge, or trains and stores one. Raises ManagerError if it does not pass."""
    judge = _load(settings, load_cached(folder, settings))
    trained = judge is None
    if judge is None:
        judge = train(settings, progress)
    accuracy = NamePairs(settings).accuracy(judge)
    if not accuracy >= settings.accuracy_min:
        raise ManagerError(
            f"the judge is right about {accuracy:.3f} of the pairs of names, and {settings.accuracy_min:g} are "
            "needed, or it would reward wrong answers; train it for more steps (steps_max), or give it another seed",
            retry=False,
        )
    if trained:
        content = io.BytesIO()
        torch.save(judge.state_dict(), content)
        store_cached(folder, settings, content.getvalue())
    return judge.eval()


def _load(settings: JudgeSettings, content: bytes | None) -> NameJudge | None:
    if content is None:
        return None
    judge = NameJudge(settings)
    try:
        judge.load_state_dict(torch.load(io.BytesIO(content), weights_only=True))
    except Exception:  # made with other settings; PyTorch raises anything there
        return None
    return judge


# ---- the service ----


class JudgeEngine(TorchEngine):
    """A payload is `{"given": name, "expected": name}`, an answer `{"score": 0.0 or 1.0, "probability": ...}`."""

    def __init__(self, settings: dict[str, Any], folder: str) -> None:
        super().__init__(NameJudge, forward_batch=answer_payloads, batch_max=BATCH_MAX)
        self._settings = msgspec.convert(settings, JudgeSettings)
        self._folder = Path(folder)

    def build(self) -> NameJudge:
        torch.set_num_threads(1)
        return load_or_train(self._settings, self._folder)


def answer_payloads(judge: NameJudge, payloads: list[bytes]) -> list[bytes]:
    """Raises ValueError for a payload with an unknown name."""
    pairs = torch.tensor([_pair(judge, payload) for payload in payloads], device=judge.transformer.device)
    probabilities = judge(pairs).softmax(1)[:, 1].tolist()
    return [json.dumps({"score": float(p > 0.5), "probability": p}).encode() for p in probabilities]


def _pair(judge: NameJudge, payload: bytes) -> list[int]:
    request = json.loads(payload)
    names = [request.get(key) for key in ("given", "expected")] if isinstance(request, dict) else []
    ids = [judge.id_by_name.get(name) for name in names if isinstance(name, str)]
    if len(ids) != 2 or None in ids:
        raise ValueError(
            f'expected {{"given": name, "expected": name}} with names that the judge knows, got {request!r}'
        )
    return [at for at in ids if at is not None]


# ---- the process that trains ----


def main(fd: int) -> NoReturn:
    supervisor = SupervisorConnection(fd, FrameDecoder[TrainJudge](TrainJudge))
    torch.set_num_threads(1)
    for command in supervisor.receive_first():
        try:
            load_or_train(
                command.settings,
                Path(command.folder),
                lambda share, text: supervisor.send(JudgeProgress(share=share, text=text)),
            )
            supervisor.send(JudgeTrained(request_id=command.request_id))
        except TangramError as error:
            supervisor.send(JudgeTrained(request_id=command.request_id, error=str(error)))
    supervisor.exit_process()
