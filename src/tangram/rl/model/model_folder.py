"""Model folders: checkpoints in the Hugging Face layout.

    FOLDER/config.json                    sizes, with the names of transformers
    FOLDER/model.safetensors              all weights; or several files named in model.safetensors.index.json

Owns the conversion of names and shapes in both directions. Reads Llama and Qwen2 models, and writes folders that
transformers can read. Promises that a loaded model computes the same as transformers with that folder: unsupported
settings are refused by name, and errors name damaged or mismatched files.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from tangram.errors import InvalidConfig, ManagerError
from tangram.files.atomic_directory import atomic_directory
from tangram.rl.model.transformer import RopeScaling, Transformer, TransformerConfig

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DEFAULT_CONTEXT_BY_KIND = {"llama": 2048, "qwen2": 32768}
"""Model types that are read, and the default context of each, as in transformers."""
DTYPES = ("F64", "F32", "F16", "BF16")
"""Names of dtypes in safetensors. Others are quantised."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DERIVED_SUFFIX = ".rotary_emb.inv_freq"
"""Suffix of tensors in old checkpoints that the config determines."""


class HuggingFaceRope(msgspec.Struct, frozen=True):
    """`rope_parameters` since transformers 5, `rope_scaling` before."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None


class HuggingFaceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of config.json that affects the computation."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: HuggingFaceRope | None = None
    rope_parameters: HuggingFaceRope | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    quantization_config: Any = None


def load(folder: Path | str, *, dtype: torch.dtype = torch.float32) -> Transformer:
    """Raises InvalidConfig for an unsupported model, ManagerError for files that cannot be read."""
    folder = Path(folder)
    config = read_config(folder / CONFIG)
    with ExitStack() as stack:
        tensors = {name: tensor for path in weight_files(folder) for name, tensor in open_tensors(path, stack)}
        require_exact_tensors(tensors, config, folder)
        with torch.inference_mode(False):  # otherwise the model could not be trained
            model = Transformer(config, dtype)
        with torch.no_grad():
            state = model.state_dict()
            for name, parts in parts_by_name(config).items():
                row = 0
                for part in parts:
                    state[name][row : row + part.shape[0]] = tensors[part.name].read()
                    row += part.shape[0]
            if config.tied and HEAD in tensors and not torch.equal(tensors[HEAD].read().to(dtype), model.embedding):
                raise InvalidConfig("tie_word_embeddings", True, f"false, since {HEAD} is another tensor")
    return model


def save(model: Transformer, folder: Path | str) -> None:
    """Writes atomically into a new or empty folder; see `atomic_directory`. Raises ManagerError."""
    with atomic_directory(Path(folder)) as unfinished:
        write(model, unfinished)


def write(model: Transformer, folder: Path) -> None:
    """Writes into an existing folder, whose owner makes it atomic. Raises OSError."""
    safetensors = import_safetensors()
    state = model.state_dict()
    tensors: dict[str, Tensor] = {}
    for name, parts in parts_by_name(model.config).items():
        pieces = state[name].cpu().split([part.shape[0] for part in parts])
        tensors |= {part.name: piece.contiguous() for part, piece in zip(parts, pieces, strict=True)}
    described = to_huggingface_config(model.config, str(model.dtype).removeprefix("torch."))
    (folder / CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(described), indent=2) + b"\n")
    with safetensors_errors():
        safetensors.torch.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    make_readable(folder)


@contextmanager
def safetensors_errors() -> Iterator[None]:
    """Turns errors of writing into OSError, which safetensors does not raise, even if the disk is full."""
    safetensors = import_safetensors()
    try:
        yield
    except safetensors.SafetensorError as error:
        raise OSError(errno.EIO, str(error)) from error


def make_readable(folder: Path) -> None:
    """Gives weight files the permissions of the config: safetensors makes its files readable by their owner only.
    Raises OSError."""
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / CONFIG, file)


def require_vocabulary(checkpoint: str, vocabulary: int, needed: int) -> None:
    """Raises InvalidConfig for a policy that knows fewer tokens than its codec has."""
    if vocabulary < needed:
        raise InvalidConfig(
            "policy.checkpoint", checkpoint, f"a model that knows all {needed} tokens of its vocabulary"
        )


# ---- the config ----


def read_config(path: Path) -> TransformerConfig:
    try:
        described = msgspec.json.decode(path.read_bytes(), type=HuggingFaceConfig, strict=True)
    except OSError as error:
        raise ManagerError(f"{path}: {error.strerror}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidConfig(str(path), str(error), "the config of a Llama or Qwen2 model") from None
    try:
        return to_transformer_config(described)
    except InvalidConfig as error:
        raise InvalidConfig(f"{path}: {error.field}", error.value, error.expected) from None


def to_transformer_config(described: HuggingFaceConfig) -> TransformerConfig:
    """Raises InvalidConfig for settings that the transformer does not support."""
    if described.model_type not in DEFAULT_CONTEXT_BY_KIND:
        raise InvalidConfig("model_type", described.model_type, " or ".join(DEFAULT_CONTEXT_BY_KIND))
    qwen = described.model_type == "qwen2"
    if described.quantization_config is not None:
        raise InvalidConfig("quantization_config", described.quantization_config, "none: weights as they are")
    if described.hidden_act != "silu":
        raise InvalidConfig("hidden_act", described.hidden_act, "silu")
    if described.mlp_bias:
        raise InvalidConfig("mlp_bias", True, "false")
    if described.use_sliding_window or (described.sliding_window is not None and not qwen):
        raise InvalidConfig("sliding_window", described.sliding_window, "none: full attention to all earlier tokens")
    for kind in described.layer_types or ():
        if kind != "full_attention":
            raise InvalidConfig("layer_types", kind, "full_attention for every layer")
    heads = described.num_attention_heads
    context_max = described.max_position_embeddings or DEFAULT_CONTEXT_BY_KIND[described.model_type]
    rope = described.rope_scaling or described.rope_parameters or HuggingFaceRope()
    return TransformerConfig(
        vocabulary=described.vocab_size,
        width=described.hidden_size,
        layers=described.num_hidden_layers,
        heads=heads,
        kv_heads=heads if described.num_key_value_heads is None else described.num_key_value_heads,
        head_width=described.hidden_size // max(heads, 1) if described.head_dim is None else described.head_dim,
        inner=described.intermediate_size,
        rope_theta=next((each for each in (rope.rope_theta, described.rope_theta) if each is not None), 10000.0),
        rope_stretched=to_rope_scaling(rope, described, context_max),
        norm_eps=described.rms_norm_eps,
        qkv_bias=qwen or described.attention_bias,
        output_bias=described.attention_bias and not qwen,
        tied=described.tie_word_embeddings,
        context_max=context_max,
    )


def to_rope_scaling(rope: HuggingFaceRope, described: HuggingFaceConfig, context_max: int) -> RopeScaling | None:
    for part in (rope.partial_rotary_factor, described.partial_rotary_factor):
        if part not in (None, 1.0):
            raise InvalidConfig("partial_rotary_factor", part, "1: rotary embedding of the whole head")
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise InvalidConfig("rope_type", kind, "default or llama3")
    needed = {key: getattr(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    for key, value in needed.items():
        if value is None:
            raise InvalidConfig(key, None, "a number for rope_type llama3")
    context = described.original_max_position_embeddings or rope.original_max_position_embeddings or context_max
    factor, low, high = needed.values()
    return RopeScaling(factor=factor, low=low, high=high, context=context)


def to_huggingface_config(config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """Returns a config.json that transformers 4 and 5, vLLM and others understand."""
    qwen = config.qkv_bias and not config.output_bias
    described: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM" if qwen else "LlamaForCausalLM"],
        "model_type": "qwen2" if qwen else "llama",
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.inner,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": config.context_max,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "torch_dtype": dtype,
        # Begin and end tokens are unknown here; left out, transformers would take 1 and 2.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if not qwen:
        described |= {"attention_bias": config.qkv_bias, "mlp_bias": False}
    if (stretch := config.rope_stretched) is not None:
        described["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": stretch.factor,
            "low_freq_factor": stretch.low,
            "high_freq_factor": stretch.high,
            "original_max_position_embeddings": stretch.context,
        }
    return described


# ---- the weights ----


class TensorPart(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]


def parts_by_name(config: TransformerConfig) -> dict[str, tuple[TensorPart, ...]]:
    """Returns, for each of our tensors, the checkpoint tensors that are concatenated to make it."""
    width, inner = config.width, config.inner
    queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
    parts: dict[str, tuple[TensorPart, ...]] = {"embedding": (TensorPart(EMBEDDING, (config.vocabulary, width)),)}
    for index in range(config.layers):
        own, prefix = f"layers.{index}", f"model.layers.{index}"
        projections = [(f"{prefix}.self_attn.{each}_proj", queries if each == "q" else keys) for each in "qkv"]
        output = f"{prefix}.self_attn.o_proj"
        parts |= {
            f"{own}.attention_norm": (TensorPart(f"{prefix}.input_layernorm.weight", (width,)),),
            f"{own}.qkv": tuple(TensorPart(f"{name}.weight", (rows, width)) for name, rows in projections),
            f"{own}.output": (TensorPart(f"{output}.weight", (width, queries)),),
            f"{own}.mlp_norm": (TensorPart(f"{prefix}.post_attention_layernorm.weight", (width,)),),
            f"{own}.gate_up": tuple(
                TensorPart(f"{prefix}.mlp.{each}_proj.weight", (inner, width)) for each in ("gate", "up")
            ),
            f"{own}.down": (TensorPart(f"{prefix}.mlp.down_proj.weight", (width, inner)),),
        }
        if config.qkv_bias:
            parts[f"{own}.qkv_bias"] = tuple(TensorPart(f"{name}.bias", (rows,)) for name, rows in projections)
        if config.output_bias:
            parts[f"{own}.output_bias"] = (TensorPart(f"{output}.bias", (width,)),)
    parts["norm"] = (TensorPart("model.norm.weight", (width,)),)
    if not config.tied:
        parts["head"] = (TensorPart(HEAD, (config.vocabulary, width)),)
    return parts


def require_exact_tensors(tensors: Mapping[str, StoredTensor], config: TransformerConfig, folder: Path) -> None:
    """Raises InvalidConfig unless the checkpoint has exactly the tensors of such a model, with the right shapes."""
    if config.layers > len(tensors):  # check a huge layer count before using it
        raise InvalidConfig(str(folder), f"{len(tensors)} tensors", f"those of {config.layers} layers")
    expected = {part.name: part.shape for parts in parts_by_name(config).values() for part in parts}
    if config.tied:
        expected[HEAD] = expected[EMBEDDING]
    for name, shape in expected.items():
        stored = tensors.get(name)
        if stored is None:
            if config.tied and name == HEAD:
                continue
            raise InvalidConfig(str(folder), "no such tensor", f"{name} of shape {shape}")
        if stored.shape != shape:
            raise InvalidConfig(f"{stored.path}: {name}", stored.shape, f"shape {shape}, as {CONFIG} says")
        if stored.dtype not in DTYPES:
            raise InvalidConfig(f"{stored.path}: {name}", stored.dtype, f"one of {', '.join(DTYPES)}")
    for name, stored in tensors.items():
        if name not in expected:
            raise InvalidConfig(f"{stored.path}: {name}", stored.shape, "no such tensor in a model of this kind")


# ---- files ----


def import_safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise InvalidConfig(
            "checkpoint", "safetensors is not installed", "it to be: pip install 'arl-tangram[transformers]'"
        ) from None
    return safetensors


class StoredTensor:
    """A tensor in an open file."""

    def __init__(self, path: Path, file: Any, name: str) -> None:
        part = file.get_slice(name)
        self.path = path
        self.shape: tuple[int, ...] = tuple(part.get_shape())
        self.dtype: str = part.get_dtype()
        self._file, self._name = file, name

    def read(self) -> Tensor:
        tensor: Tensor = self._file.get_tensor(self._name)
        return tensor


def open_tensors(path: Path, stack: ExitStack) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the tensors of a file by name."""
    safetensors = import_safetensors()
    try:
        file = stack.enter_context(safetensors.safe_open(path, framework="pt"))
        stored = [(name, StoredTensor(path, file, name)) for name in file.keys()]  # noqa: SIM118
    except OSError as error:
        raise ManagerError(f"{path}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise ManagerError(f"{path}: damaged: {error}", retry=False) from error
    return ((name, tensor) for name, tensor in stored if not name.endswith(DERIVED_SUFFIX))


def weight_files(folder: Path) -> list[Path]:
    """Returns the single weights file, or those named in the index."""
    index = folder / INDEX
    if (folder / WEIGHTS).exists() or not index.exists():
        return [folder / WEIGHTS]
    try:
        names = set(msgspec.json.decode(index.read_bytes(), type=WeightIndex).weight_map.values())
    except OSError as error:
        raise ManagerError(f"{index}: {error.strerror}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidConfig(str(index), str(error), "an index of safetensors files") from None
    for name in names:
        if name != Path(name).name or not name.endswith(".safetensors"):
            raise InvalidConfig(str(index), name, "names of safetensors files beside it")
    return [folder / name for name in sorted(names)]


class WeightIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
