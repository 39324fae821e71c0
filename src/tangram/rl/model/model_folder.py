"""Checkpoints: models in folders as Hugging Face lays them out.

    FOLDER/config.json                    sizes, by the names that transformers gives them
    FOLDER/model.safetensors              all weights; or several files that model.safetensors.index.json names

Owns how their names and shapes become ours and back. Reads the Llama and Qwen2 kind, and writes what transformers reads
again. Promises that a model which it returns computes what transformers would compute of that folder: whatever it does
not know how to compute it refuses by its name, and a file that is damaged or does not fit is named.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from tangram.errors import InvalidConfig, ManagerError
from tangram.files.atomic_directory import whole_folder
from tangram.rl.model.transformer import ModelConfig, Stretched, Transformer

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
CONTEXT = {"llama": 2048, "qwen2": 32768}
"""The kinds that are read, and the context of each where its config says none, as transformers has it."""
DTYPES = ("F64", "F32", "F16", "BF16")
"""As safetensors calls them. Others are quantised."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DERIVED = ".rotary_emb.inv_freq"
"""Ends the names of tensors that old checkpoints hold although the config says the same."""


class Rope(msgspec.Struct, frozen=True):
    """Of `rope_parameters` since transformers 5, of `rope_scaling` before."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """What config.json says, as far as it changes what is computed."""

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
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    quantization_config: Any = None


def load(folder: Path | str, *, dtype: torch.dtype = torch.float32) -> Transformer:
    """Raises InvalidConfig for a model that is not of our kind, ManagerError for files that cannot be read."""
    folder = Path(folder)
    config = read_config(folder / CONFIG)
    with ExitStack() as stack:
        tensors = {name: each for path in weight_files(folder) for name, each in opened(path, stack)}
        require_all(tensors, config, folder)
        with torch.inference_mode(False):  # so that it can be trained
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
    """Into a folder that is not there yet or empty: it is there whole or not at all. Raises ManagerError."""
    safetensors = library()
    state = model.state_dict()
    tensors: dict[str, Tensor] = {}
    for name, parts in parts_by_name(model.config).items():
        pieces = state[name].cpu().split([part.shape[0] for part in parts])
        tensors |= {part.name: piece.contiguous() for part, piece in zip(parts, pieces, strict=True)}
    with whole_folder(Path(folder)) as unfinished:
        described = describe(model.config, str(model.dtype).removeprefix("torch."))
        (unfinished / CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(described), indent=2) + b"\n")
        try:
            safetensors.torch.save_file(tensors, unfinished / WEIGHTS, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:
            raise ManagerError(f"{folder} cannot be written: {error}") from error
        share(unfinished)


def share(folder: Path) -> None:
    """The weights with whoever may read the config beside them: safetensors gives its files to their owner alone.
    Raises OSError."""
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / CONFIG, file)


# ---- the config ----


def read_config(path: Path) -> ModelConfig:
    try:
        described = msgspec.json.decode(path.read_bytes(), type=Described, strict=True)
    except OSError as error:
        raise ManagerError(f"{path}: {error.strerror}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidConfig(str(path), str(error), "the config of a Llama or Qwen2 model") from None
    try:
        return understood(described)
    except InvalidConfig as error:
        raise InvalidConfig(f"{path}: {error.field}", error.value, error.expected) from None


def understood(described: Described) -> ModelConfig:
    """Raises InvalidConfig for what we would compute wrongly."""
    if described.model_type not in CONTEXT:
        raise InvalidConfig("model_type", described.model_type, " or ".join(CONTEXT))
    qwen = described.model_type == "qwen2"
    if described.quantization_config is not None:
        raise InvalidConfig("quantization_config", described.quantization_config, "none: weights as they are")
    if described.hidden_act != "silu":
        raise InvalidConfig("hidden_act", described.hidden_act, "silu")
    if described.mlp_bias:
        raise InvalidConfig("mlp_bias", True, "false")
    if described.use_sliding_window or (described.sliding_window is not None and not qwen):
        raise InvalidConfig("sliding_window", described.sliding_window, "none: attention to all that stands before")
    for kind in described.layer_types or ():
        if kind != "full_attention":
            raise InvalidConfig("layer_types", kind, "full_attention for every layer")
    heads = described.num_attention_heads
    context_max = described.max_position_embeddings or CONTEXT[described.model_type]
    rope = described.rope_scaling or described.rope_parameters or Rope()
    return ModelConfig(
        vocabulary=described.vocab_size,
        width=described.hidden_size,
        layers=described.num_hidden_layers,
        heads=heads,
        kv_heads=heads if described.num_key_value_heads is None else described.num_key_value_heads,
        head_width=described.hidden_size // max(heads, 1) if described.head_dim is None else described.head_dim,
        inner=described.intermediate_size,
        rope_theta=next((each for each in (rope.rope_theta, described.rope_theta) if each is not None), 10000.0),
        rope_stretched=stretched(rope, described, context_max),
        norm_eps=described.rms_norm_eps,
        qkv_bias=qwen or described.attention_bias,
        output_bias=described.attention_bias and not qwen,
        tied=described.tie_word_embeddings,
        context_max=context_max,
    )


def stretched(rope: Rope, described: Described, context_max: int) -> Stretched | None:
    for part in (rope.partial_rotary_factor, described.partial_rotary_factor):
        if part not in (None, 1.0):
            raise InvalidConfig("partial_rotary_factor", part, "1: all of a head is turned")
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
    return Stretched(factor=factor, low=low, high=high, context=context)


def describe(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json in the words that transformers 4 and 5 understand, and vLLM and others with them."""
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
        # Which tokens begin and end a text is not known here; left out, they would be 1 and 2.
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


class Part(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]


def parts_by_name(config: ModelConfig) -> dict[str, tuple[Part, ...]]:
    """Of which tensors each of ours is made, one below the other."""
    width, inner = config.width, config.inner
    queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
    found: dict[str, tuple[Part, ...]] = {"embedding": (Part(EMBEDDING, (config.vocabulary, width)),)}
    for index in range(config.layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        made = [(f"{theirs}.self_attn.{each}_proj", queries if each == "q" else keys) for each in "qkv"]
        output = f"{theirs}.self_attn.o_proj"
        found |= {
            f"{ours}.attention_norm": (Part(f"{theirs}.input_layernorm.weight", (width,)),),
            f"{ours}.qkv": tuple(Part(f"{name}.weight", (rows, width)) for name, rows in made),
            f"{ours}.output": (Part(f"{output}.weight", (width, queries)),),
            f"{ours}.mlp_norm": (Part(f"{theirs}.post_attention_layernorm.weight", (width,)),),
            f"{ours}.gate_up": tuple(
                Part(f"{theirs}.mlp.{each}_proj.weight", (inner, width)) for each in ("gate", "up")
            ),
            f"{ours}.down": (Part(f"{theirs}.mlp.down_proj.weight", (width, inner)),),
        }
        if config.qkv_bias:
            found[f"{ours}.qkv_bias"] = tuple(Part(f"{name}.bias", (rows,)) for name, rows in made)
        if config.output_bias:
            found[f"{ours}.output_bias"] = (Part(f"{output}.bias", (width,)),)
    found["norm"] = (Part("model.norm.weight", (width,)),)
    if not config.tied:
        found["head"] = (Part(HEAD, (config.vocabulary, width)),)
    return found


def require_all(tensors: Mapping[str, Stored], config: ModelConfig, folder: Path) -> None:
    """All tensors of such a model are there, of the right shapes, and no others."""
    if config.layers > len(tensors):  # a lie is found out before it is believed
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


def library() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise InvalidConfig(
            "checkpoint", "safetensors is not installed", "it to be: pip install 'arl-tangram[transformers]'"
        ) from None
    return safetensors


class Stored:
    """A tensor in an open file."""

    def __init__(self, path: Path, file: Any, name: str) -> None:
        found = file.get_slice(name)
        self.path = path
        self.shape: tuple[int, ...] = tuple(found.get_shape())
        self.dtype: str = found.get_dtype()
        self._file, self._name = file, name

    def read(self) -> Tensor:
        found: Tensor = self._file.get_tensor(self._name)
        return found


def opened(path: Path, stack: ExitStack) -> Iterator[tuple[str, Stored]]:
    """The tensors of a file, by name."""
    safetensors = library()
    try:
        file = stack.enter_context(safetensors.safe_open(path, framework="pt"))
        stored = [(name, Stored(path, file, name)) for name in file.keys()]  # noqa: SIM118
    except OSError as error:
        raise ManagerError(f"{path}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise ManagerError(f"{path}: damaged: {error}", retry=False) from error
    return ((name, each) for name, each in stored if not name.endswith(DERIVED))


def weight_files(folder: Path) -> list[Path]:
    """One, or those that an index names."""
    index = folder / INDEX
    if (folder / WEIGHTS).exists() or not index.exists():
        return [folder / WEIGHTS]
    try:
        names = set(msgspec.json.decode(index.read_bytes(), type=Index).weight_map.values())
    except OSError as error:
        raise ManagerError(f"{index}: {error.strerror}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidConfig(str(index), str(error), "an index of safetensors files") from None
    for name in names:
        if name != Path(name).name or not name.endswith(".safetensors"):
            raise InvalidConfig(str(index), name, "names of safetensors files beside it")
    return [folder / name for name in sorted(names)]


class Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
