"""Policies: models that are trained, ours and those of Hugging Face, behind one interface.

Owns which of the two a checkpoint becomes, and how log-probabilities are made of logits. Never samples and never
decides what is learned. Promises that the log-probability of a token is that of sampling.py, up to rounding: after
the temperature, among the ids that top-k and top-p left. Dropout is off, as it was for what was sampled.

Texts begin at the left and attention is causal: no text depends on the padding behind it or on the texts beside it.
"""

from __future__ import annotations

import copy
import inspect
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tangram.errors import InvalidConfig, InvalidInput, ManagerError
from tangram.files.atomic_directory import UNFINISHED, sweep, whole_folder
from tangram.rl.inference.engines.protocol import Weights
from tangram.rl.model import model_folder
from tangram.rl.model.sample_batches import Pass
from tangram.rl.model.transformer import Transformer
from tangram.rl.model.weight_store import exchange, publish


class Policy(Protocol):
    """A model that can be trained."""

    vocabulary: int
    context_max: int | None
    """Tokens that it can read; None if it does not say."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def device(self) -> torch.device: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def logits(self, tokens: Tensor, at: Tensor) -> Tensor:
        """Of what follows tokens [B, T], at places [N] that are counted through all B * T of them: [N, V]."""
        ...

    def frozen(self) -> Self:
        """A copy as it is now, which is not trained."""
        ...

    def publish(self, folder: Path | str, version: int, *, replace: bool = False) -> Weights:
        """For engines. Raises ManagerError, if it cannot be written, or is there already and not to be replaced."""
        ...

    def save(self, folder: Path | str) -> None:
        """As Hugging Face lays it out, into a folder that is not there yet or empty. Raises ManagerError."""
        ...

    def restore(self, folder: Path | str) -> None:
        """The weights that `save` wrote. Raises ManagerError and InvalidConfig; then it is as it was."""
        ...


class OurPolicy:
    """One of transformer.py. `for_others`: what serves it reads checkpoints, as servers of others do."""

    def __init__(self, model: Transformer, *, for_others: bool = False) -> None:
        self.module = model.eval()
        self._for_others = for_others
        self.vocabulary = model.config.vocabulary
        self.context_max: int | None = model.config.context_max

    @property
    def device(self) -> torch.device:
        return self.module.device

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()

    def logits(self, tokens: Tensor, at: Tensor) -> Tensor:
        # What Transformer.forward does, but the output layer, which is large where the vocabulary is, only where asked.
        model = self.module
        length = tokens.shape[1]
        if length > model.config.context_max:
            raise InvalidInput("tokens", length, f"at most {model.config.context_max}, the context of the model")
        cos, sin = model._rotary_table()[:length].unsqueeze(1).chunk(2, dim=-1)
        grouped = model.config.heads != model.config.kv_heads
        x = F.embedding(tokens, model.embedding)
        for layer in model.layers:
            queries, keys, values = (each.transpose(1, 2) for each in layer.look(x, cos, sin))
            attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)
            x = layer.add(x, attended.transpose(1, 2).flatten(2))
        return model._logits(x.flatten(0, 1)[at])

    def frozen(self) -> Self:
        return type(self)(copy.deepcopy(self.module).requires_grad_(False), for_others=self._for_others)

    def publish(self, folder: Path | str, version: int, *, replace: bool = False) -> Weights:
        if self._for_others:
            return publish_checkpoint(self, folder, version, replace=replace)
        return publish(self.module, self.module.config, folder, version, replace=replace)

    def save(self, folder: Path | str) -> None:
        model_folder.save(self.module, folder)

    def restore(self, folder: Path | str) -> None:
        found = model_folder.load(folder, dtype=self.module.dtype)
        if found.config != self.module.config:
            raise InvalidConfig(str(folder), found.config, f"the sizes of the policy, {self.module.config}")
        self.module.load_state_dict(found.state_dict())


class HuggingFacePolicy:
    """Any causal language model of transformers."""

    def __init__(self, model: Any) -> None:
        self.module: Any = model.eval()
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])
        self.context_max: int | None = getattr(model.config, "max_position_embeddings", None)
        self._sparing = "logits_to_keep" in inspect.signature(model.forward).parameters
        """Whether it can be asked of some columns alone."""

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.module.device)

    def parameters(self) -> Iterator[nn.Parameter]:
        return cast("Iterator[nn.Parameter]", self.module.parameters())

    def logits(self, tokens: Tensor, at: Tensor) -> Tensor:
        if not self._sparing:
            made: Tensor = self.module(input_ids=tokens, use_cache=False).logits
            return made.flatten(0, 1)[at]
        # Of whole columns: those in which something is asked of any row.
        rows, length = tokens.shape
        columns, place = (at % length).unique(return_inverse=True)
        made = self.module(input_ids=tokens, use_cache=False, logits_to_keep=columns).logits
        assert made.shape[:2] == (rows, len(columns)), f"{made.shape} for {len(columns)} columns of {rows} rows"
        return made[at // length, place]

    def frozen(self) -> Self:
        return type(self)(copy.deepcopy(self.module).requires_grad_(False))

    def publish(self, folder: Path | str, version: int, *, replace: bool = False) -> Weights:
        """As a checkpoint of its own: what serves such a model reads that."""
        return publish_checkpoint(self, folder, version, replace=replace)

    def save(self, folder: Path | str) -> None:
        quiet()
        safetensors = model_folder.library()
        with whole_folder(Path(folder)) as unfinished:
            try:
                self.module.save_pretrained(unfinished)
            except safetensors.SafetensorError as error:
                raise ManagerError(f"{folder} cannot be written: {error}") from error
            model_folder.share(unfinished)

    def restore(self, folder: Path | str) -> None:
        found = pretrained(folder, self.module.dtype).state_dict()
        mine = self.module.state_dict()
        if {name: value.shape for name, value in found.items()} != {name: value.shape for name, value in mine.items()}:
            raise InvalidConfig(str(folder), "other tensors", "those of the policy")
        self.module.load_state_dict(found)


def publish_checkpoint(policy: Policy, folder: Path | str, version: int, *, replace: bool) -> Weights:
    """As servers of others read it. Raises ManagerError; then what was there is there still."""
    path = Path(folder) / f"{version:08d}"
    sweep(path.parent)
    place_taken = replace and path.exists()
    new = path.parent / f"{UNFINISHED}{uuid.uuid4().hex}" if place_taken else path
    policy.save(new)
    if place_taken:
        exchange(new, path)
    return Weights(version=version, folder=str(path))


# ---- which one --------------------------------------------------------------------------------------------------


def load(folder: Path | str, *, dtype: torch.dtype = torch.float32, for_others: bool = False) -> Policy:
    """Ours, if the checkpoint can be read into it: only such a policy is served by our engines. Else as transformers
    reads it. `for_others`: servers of others serve it. Raises ManagerError, with what each of them says."""
    try:
        return OurPolicy(model_folder.load(folder, dtype=dtype), for_others=for_others)
    except (InvalidConfig, ManagerError) as refused:
        try:
            return HuggingFacePolicy(pretrained(folder, dtype))
        except (InvalidConfig, ManagerError) as error:
            raise ManagerError(f"{folder} cannot be trained: {error}; and ours: {refused}", retry=False) from error


def policy_of(model: Any) -> Policy:
    """A model as a policy; a policy stays as it is."""
    if isinstance(model, Transformer):
        return OurPolicy(model)
    if hasattr(model, "get_output_embeddings"):
        return HuggingFacePolicy(model)
    return cast(Policy, model)


def pretrained(folder: Path | str, dtype: torch.dtype) -> Any:
    """Never from the network, and never with code that the folder brings along."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise InvalidConfig(
            "policy.checkpoint",
            str(folder),
            "a Llama or Qwen2 model, or transformers to be installed: pip install 'arl-tangram[transformers]'",
        ) from None
    quiet()
    try:
        return AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
    except Exception as error:  # transformers raises anything for a folder that it cannot read
        raise ManagerError(f"{folder}: {error}", retry=False) from error


def quiet() -> None:
    """What is read or written here is no news."""
    from transformers.utils import logging

    logging.disable_progress_bar()


# ---- log-probabilities ------------------------------------------------------------------------------------------


class Scored(NamedTuple):
    """Of the action tokens of a pass: [N]."""

    logprobs: Tensor
    entropy: Tensor | None
    """In nats, of the distributions that they were chosen from; if it was asked for."""


def score(
    policy: Policy, asked: Pass, *, temperature: float = 1.0, entropy: bool = False, entropy_learned: bool = False
) -> Scored:
    """What a policy says of tokens. `entropy_learned`: with a gradient."""
    logits = policy.logits(asked.tokens, asked.at)
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if asked.left_out is not None:
        logits = logits.masked_fill(asked.left_out, -torch.inf)
    logprobs = -F.cross_entropy(logits, asked.targets, reduction="none")
    if not entropy:
        return Scored(logprobs, None)
    return Scored(logprobs, entropy_of(logits if entropy_learned else logits.detach(), asked.left_out))


def entropy_of(logits: Tensor, left_out: Tensor | None) -> Tensor:
    logs = logits.log_softmax(-1)
    if left_out is None:
        return -(logs.exp() * logs).sum(-1)
    # The probability of what is left out is 0, and 0 * -inf would be no number.
    return -(logs.exp() * logs.masked_fill(left_out, 0.0)).sum(-1)
