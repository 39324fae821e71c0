"""Policies: trainable models, our transformer and those of Hugging Face, behind one interface.

Owns the choice between the two for a checkpoint, and the computation of log-probabilities from logits. Never samples or
trains. Promises that the log-probability of a token equals that of sampling.py, up to rounding: after temperature,
top-k and top-p. Dropout is off, as during sampling.

Sequences start at the left and attention is causal: no sequence depends on the padding behind it or on its neighbours.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tangram.errors import InvalidConfig, ManagerError
from tangram.files.atomic_directory import atomic_directory, remove_unfinished
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.model import model_folder
from tangram.rl.model.sample_batches import Microbatch
from tangram.rl.model.transformer import Transformer
from tangram.rl.model.weight_store import publish


class Policy(Protocol):
    """A trainable model."""

    vocabulary: int
    context_max: int | None
    """Longest sequence that it can read; None if unknown."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def device(self) -> torch.device: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def logits(self, tokens: Tensor, at: Tensor) -> Tensor:
        """Returns logits [N, V] after the positions `at` [N], which index the flattened tokens [B, T]."""
        ...

    def frozen(self) -> Self:
        """Returns a copy that is not trained."""
        ...

    def publish(self, folder: Path | str, version: int, *, replace: bool = False) -> PolicyWeights:
        """Publishes the weights for engines. Raises ManagerError if they cannot be written, or exist and `replace` is
        not set."""
        ...

    def save(self, folder: Path | str) -> None:
        """Writes the Hugging Face layout into an existing folder, whose owner makes it atomic. Raises OSError."""
        ...

    def restore(self, folder: Path | str) -> None:
        """Restores what `save` wrote. Raises ManagerError and InvalidConfig, and has changed nothing then."""
        ...


class TransformerPolicy:
    """The transformer of transformer.py. `for_external_servers`: publishes Hugging Face checkpoints, which such servers
    read."""

    def __init__(self, model: Transformer, *, for_external_servers: bool = False) -> None:
        self.module = model.eval()
        self._for_external_servers = for_external_servers
        self.vocabulary = model.config.vocabulary
        self.context_max: int | None = model.config.context_max

    @property
    def device(self) -> torch.device:
        return self.module.device

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()

    def logits(self, tokens: Tensor, at: Tensor) -> Tensor:
        return self.module.logits_at(tokens, at)

    def frozen(self) -> Self:
        return type(self)(
            copy.deepcopy(self.module).requires_grad_(False), for_external_servers=self._for_external_servers
        )

    def publish(self, folder: Path | str, version: int, *, replace: bool = False) -> PolicyWeights:
        if self._for_external_servers:
            return publish_checkpoint(self, folder, version, replace=replace)
        return publish(self.module, self.module.config, folder, version, replace=replace)

    def save(self, folder: Path | str) -> None:
        model_folder.write(self.module, Path(folder))

    def restore(self, folder: Path | str) -> None:
        stored = model_folder.load(folder, dtype=self.module.dtype)
        if stored.config != self.module.config:
            raise InvalidConfig(str(folder), stored.config, f"the sizes of the policy, {self.module.config}")
        self.module.load_state_dict(stored.state_dict())


class HuggingFacePolicy:
    """Any causal language model of transformers."""

    def __init__(self, model: Any) -> None:
        self.module: Any = model.eval()
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])
        self.context_max: int | None = getattr(model.config, "max_position_embeddings", None)
        self._has_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        """Whether it can compute the logits of chosen columns only."""

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.module.device)

    def parameters(self) -> Iterator[nn.Parameter]:
        return cast("Iterator[nn.Parameter]", self.module.parameters())

    def logits(self, tokens: Tensor, at: Tensor) -> Tensor:
        if not self._has_logits_to_keep:
            logits: Tensor = self.module(input_ids=tokens, use_cache=False).logits
            return logits.flatten(0, 1)[at]
        # Whole columns: those with a position in any row.
        rows, length = tokens.shape
        columns, place = (at % length).unique(return_inverse=True)
        logits = self.module(input_ids=tokens, use_cache=False, logits_to_keep=columns).logits
        assert logits.shape[:2] == (rows, len(columns)), f"{logits.shape} for {len(columns)} columns of {rows} rows"
        return logits[at // length, place]

    def frozen(self) -> Self:
        return type(self)(copy.deepcopy(self.module).requires_grad_(False))

    def publish(self, folder: Path | str, version: int, *, replace: bool = False) -> PolicyWeights:
        """Publishes a checkpoint, the format that servers of such a model read."""
        return publish_checkpoint(self, folder, version, replace=replace)

    def save(self, folder: Path | str) -> None:
        silence_transformers()
        with model_folder.safetensors_errors():
            self.module.save_pretrained(folder)
        model_folder.make_readable(Path(folder))

    def restore(self, folder: Path | str) -> None:
        stored = load_pretrained(folder, self.module.dtype).state_dict()
        own = self.module.state_dict()
        if {name: value.shape for name, value in stored.items()} != {name: value.shape for name, value in own.items()}:
            raise InvalidConfig(str(folder), "other tensors", "those of the policy")
        self.module.load_state_dict(stored)


def publish_checkpoint(policy: Policy, folder: Path | str, version: int, *, replace: bool) -> PolicyWeights:
    """Publishes a checkpoint for external servers. Raises ManagerError, and keeps an existing version then."""
    path = Path(folder) / f"{version:08d}"
    remove_unfinished(path.parent)
    with atomic_directory(path, replace=replace) as unfinished:
        policy.save(unfinished)
    return PolicyWeights(version=version, folder=str(path))


# ---- loading ----


def load(folder: Path | str, *, for_external_servers: bool = False) -> Policy:
    """Loads our transformer if it fits the checkpoint, because our engines serve only that; else a model of
    transformers. `for_external_servers`: see TransformerPolicy. Raises ManagerError, with the reasons of both."""
    try:
        return TransformerPolicy(model_folder.load(folder), for_external_servers=for_external_servers)
    except (InvalidConfig, ManagerError) as refused:
        try:
            return HuggingFacePolicy(load_pretrained(folder, torch.float32))
        except (InvalidConfig, ManagerError) as error:
            raise ManagerError(f"{folder} cannot be trained: {error}; and ours: {refused}", retry=False) from error


def as_policy(model: Any) -> Policy:
    """Wraps a model as a policy; returns a policy as it is."""
    if isinstance(model, Transformer):
        return TransformerPolicy(model)
    if hasattr(model, "get_output_embeddings"):
        return HuggingFacePolicy(model)
    return cast(Policy, model)


def load_pretrained(folder: Path | str, dtype: torch.dtype) -> Any:
    """Loads without network access, and without code from the folder."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise InvalidConfig(
            "policy.checkpoint",
            str(folder),
            "a Llama or Qwen2 model, or transformers to be installed: pip install 'arl-tangram[transformers]'",
        ) from None
    silence_transformers()
    try:
        return AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
    except Exception as error:  # transformers raises anything for a folder that it cannot read
        raise ManagerError(f"{folder}: {error}", retry=False) from error


def silence_transformers() -> None:
    """Turns off warnings and progress bars of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()


# ---- log-probabilities ----


class TokenScores(NamedTuple):
    """Scores of the action tokens of a microbatch: [N]."""

    logprobs: Tensor
    entropy: Tensor | None
    """The entropy of the distribution of each token, in nats; None if not requested."""


def score(
    policy: Policy,
    microbatch: Microbatch,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Scores tokens under a policy. `entropy_gradient`: the entropy has a gradient."""
    logits = policy.logits(microbatch.tokens, microbatch.positions)
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if microbatch.excluded_ids is not None:
        logits = logits.masked_fill(microbatch.excluded_ids, -torch.inf)
    logprobs = -F.cross_entropy(logits, microbatch.targets, reduction="none")
    if not entropy:
        return TokenScores(logprobs, None)
    return TokenScores(logprobs, entropy_of(logits if entropy_gradient else logits.detach(), microbatch.excluded_ids))


def entropy_of(logits: Tensor, excluded_ids: Tensor | None) -> Tensor:
    logs = logits.log_softmax(-1)
    if excluded_ids is None:
        return -(logs.exp() * logs).sum(-1)
    # An excluded id has probability 0, and 0 * -inf would be NaN.
    return -(logs.exp() * logs.masked_fill(excluded_ids, 0.0)).sum(-1)
