"""Checkpoints: the logits of transformers, there and back, and nothing that would be computed wrongly."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.extras import LazyExtra

from tangram.errors import InvalidConfig, ManagerError

torch = pytest.importorskip("torch", reason="PyTorch is an extra, which is not installed")
transformers = LazyExtra("transformers")
safetensors_torch = LazyExtra("safetensors.torch")

from tangram.rl.model.model_folder import load, save  # noqa: E402
from tangram.rl.model.transformer import RopeScaling, Transformer, TransformerConfig, small_config  # noqa: E402

VOCABULARY, LENGTH = 61, 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True}),
    "llama-all-heads": ("Llama", {"num_key_value_heads": 4}),
    "llama-wide-heads": ("Llama", {"head_dim": 12}),
    "llama-3": ("Llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-one-kv-head": ("Qwen2", {"num_key_value_heads": 1}),
}


def theirs(kind: str, dtype: Any = None, **fields: Any) -> Any:
    """A model of transformers in which no two weights are alike, biases and norms included."""
    family, changed = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**(SIZES | changed | fields))
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)
    return model.to(dtype or torch.float32)


def tokens() -> Any:
    return torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(2))


def logits(model: Any) -> Any:
    with torch.inference_mode():
        output = model(tokens())
    return output if isinstance(output, torch.Tensor) else output.logits


def read(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def exactly_double(model: Any) -> Any:
    """transformers rounds norms and angles to float32 in every model: here it does not."""

    class Norm(torch.nn.Module):
        def __init__(self, norm: Any) -> None:
            super().__init__()
            self.weight, self.eps = norm.weight, norm.variance_epsilon

        def forward(self, x: Any) -> Any:
            return self.weight * x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()

    class Rotary(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            self.powers = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
            self.theta = config.rope_parameters["rope_theta"]

        def forward(self, x: Any, position_ids: Any) -> Any:
            angles = position_ids[..., None].double() / self.theta**self.powers
            both = torch.cat((angles, angles), -1)
            return both.cos(), both.sin()

    model = model.double()
    for layer in model.model.layers:
        layer.input_layernorm = Norm(layer.input_layernorm)
        layer.post_attention_layernorm = Norm(layer.post_attention_layernorm)
    model.model.norm = Norm(model.model.norm)
    model.model.rotary_emb = Rotary(model.config)
    return model


def edit(folder: Path, **fields: Any) -> None:
    """Keys of the config; a value of None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def change(folder: Path, how: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors_torch.load_file(path)
    how(tensors)
    safetensors_torch.save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    theirs("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


# ---- the same logits ----


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    model = theirs(kind)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(load(tmp_path)), logits(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama-3"])
def test_logits_in_float64_are_those_of_transformers_without_its_roundings(tmp_path: Path, kind: str) -> None:
    model = theirs(kind, torch.float64)
    model.save_pretrained(tmp_path)
    output = logits(load(tmp_path, dtype=torch.float64))
    torch.testing.assert_close(output, logits(exactly_double(model)), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_read_exactly_into_float32(tmp_path: Path, dtype: str) -> None:
    theirs("qwen2", getattr(torch, dtype)).save_pretrained(tmp_path)
    assert load(tmp_path).dtype == torch.float32
    torch.testing.assert_close(logits(load(tmp_path)), logits(read(tmp_path, dtype="float32")), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2-tied"])
def test_a_checkpoint_in_several_files_is_read(tmp_path: Path, kind: str) -> None:
    model = theirs(kind)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    torch.testing.assert_close(logits(load(tmp_path)), logits(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen2", "llama-3"])
def test_positions_are_read_as_transformers_4_wrote_them(tmp_path: Path, kind: str) -> None:
    model = theirs(kind)
    model.save_pretrained(tmp_path)
    rope = dict(json.loads((tmp_path / "config.json").read_text())["rope_parameters"])
    theta = rope.pop("rope_theta")
    edit(tmp_path, rope_parameters=None, rope_theta=theta, rope_scaling=rope if kind == "llama-3" else None)
    assert load(tmp_path).config.rope_theta == theta
    torch.testing.assert_close(logits(load(tmp_path)), logits(model), rtol=0, atol=1e-4)


def test_what_old_checkpoints_derive_from_the_config_is_passed_over(llama: Path) -> None:
    expected = logits(load(llama))
    change(llama, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert torch.equal(logits(load(llama)), expected)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path: Path) -> None:
    theirs("llama-tied").save_pretrained(tmp_path)
    expected = logits(load(tmp_path))
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(load(tmp_path)), expected)
    change(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1.0))
    with pytest.raises(InvalidConfig, match="tie_word_embeddings"):
        load(tmp_path)


# ---- there and back ----


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "float32") for kind in KINDS), ("llama", "float64"), ("qwen2-tied", "bfloat16")]
)
def test_what_was_loaded_and_saved_is_read_by_transformers_and_by_us(tmp_path: Path, kind: str, dtype: str) -> None:
    theirs(kind, getattr(torch, dtype)).save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs", dtype=getattr(torch, dtype))
    save(ours, tmp_path / "ours")
    first, back = read(tmp_path / "theirs"), read(tmp_path / "ours")
    assert type(back) is type(first)
    assert back.dtype == first.dtype == ours.dtype
    assert back.config.rope_parameters == first.config.rope_parameters
    assert torch.equal(logits(back), logits(first))
    again = load(tmp_path / "ours", dtype=ours.dtype)
    assert again.config == ours.config
    assert torch.equal(logits(again), logits(ours))


STRETCHED = RopeScaling(factor=4.0, low=1.0, high=3.0, context=16)


@pytest.mark.parametrize(
    "config",
    [
        small_config(VOCABULARY),
        msgspec.structs.replace(small_config(VOCABULARY), tied=True, kv_heads=1, head_width=6),
        msgspec.structs.replace(small_config(VOCABULARY), qkv_bias=True, head_width=6, rope_theta=123.0),
        msgspec.structs.replace(small_config(VOCABULARY), qkv_bias=True, output_bias=True, rope_stretched=STRETCHED),
    ],
    ids=["small", "tied", "qkv-bias", "stretched"],
)
def test_our_own_models_are_read_by_transformers(tmp_path: Path, config: TransformerConfig) -> None:
    ours = Transformer.new(config, 3)
    save(ours, tmp_path / "made" / "here")
    torch.testing.assert_close(logits(read(tmp_path / "made" / "here")), logits(ours), rtol=0, atol=1e-4)
    assert load(tmp_path / "made" / "here").config == config


def test_weights_are_readable_to_the_readers_of_the_config(tmp_path: Path) -> None:
    save(Transformer.new(small_config(VOCABULARY), 3), tmp_path / "made")
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "made").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_a_loaded_model_can_be_trained_even_if_it_was_loaded_in_inference_mode(llama: Path) -> None:
    with torch.inference_mode():
        model = load(llama)
    model(tokens()).sum().backward()
    assert model.embedding.grad is not None


def test_a_folder_with_something_in_it_is_not_overwritten(llama: Path) -> None:
    before = (llama / "model.safetensors").read_bytes()
    with pytest.raises(ManagerError, match="llama exists already"):
        save(Transformer.new(small_config(VOCABULARY), 1), llama)
    assert (llama / "model.safetensors").read_bytes() == before


def test_a_full_disk_is_reported_and_leaves_nothing_behind(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(ManagerError, match="made cannot be written"):
            save(Transformer.new(small_config(VOCABULARY), 1), tmp_path / "made")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


# ---- what is refused ----


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"model_type": "mistral"}, "model_type"),
        ({"model_type": "qwen3"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 16}, "sliding_window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_attention_heads": 0}, "heads"),
        ({"num_key_value_heads": 3}, "kv_heads"),
        ({"max_position_embeddings": 1 << 50}, "context_max"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"vocab_size": None}, "vocab_size"),
    ],
    ids=str,
)
def test_what_would_be_computed_wrongly_is_refused_by_its_name(llama: Path, fields: dict[str, Any], name: str) -> None:
    edit(llama, **fields)
    with pytest.raises(InvalidConfig) as caught:
        load(llama)
    assert name in str(caught.value)
    assert str(llama / "config.json") in str(caught.value)


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.pop(name)


def replaced(name: str, tensor: Any) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({name: tensor})


QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("how", "named"),
    [
        (without(QUERY), QUERY),
        (without("lm_head.weight"), "lm_head.weight"),
        (replaced("model.layers.0.self_attn.q_norm.weight", torch.ones(8)), "q_norm"),
        (replaced("model.layers.3.mlp.up_proj.weight", torch.ones(72, 32)), "model.layers.3"),
        (replaced(QUERY, torch.ones(32, 31)), QUERY),
        (replaced(QUERY, torch.ones(32)), QUERY),
        (replaced(QUERY, torch.ones(32, 32, dtype=torch.int8)), "I8"),
    ],
)
def test_tensors_that_are_missing_unknown_or_of_another_shape_are_named(
    llama: Path, how: Callable[[dict[str, Any]], object], named: str
) -> None:
    change(llama, how)
    with pytest.raises(InvalidConfig) as caught:
        load(llama)
    assert named in str(caught.value)
    assert str(llama) in str(caught.value)


@pytest.mark.parametrize(
    "fields", [{"num_hidden_layers": 1 << 40}, {"hidden_size": 10**40}, {"vocab_size": 1 << 60}], ids=str
)
def test_a_config_that_lies_about_sizes_makes_nothing_large(llama: Path, fields: dict[str, Any]) -> None:
    edit(llama, **fields)
    with pytest.raises(InvalidConfig):
        load(llama)


def test_every_truncation_of_the_weights_is_reported_with_the_file(llama: Path) -> None:
    path = llama / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 1, 7, 8, 9, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ManagerError, match=r"model\.safetensors"):
            load(llama)


def test_a_wrong_header_of_the_weights_is_reported_with_the_file(llama: Path) -> None:
    path = llama / "model.safetensors"
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])

    def written(changed: dict[str, Any]) -> bytes:
        text = json.dumps(changed).encode()
        return len(text).to_bytes(8, "little") + text + whole[8 + size :]

    entry = header[QUERY]
    beyond = {**entry, "data_offsets": [entry["data_offsets"][0], entry["data_offsets"][1] + (1 << 40)]}
    overlapping = {**entry, "data_offsets": [0, 32 * 32 * 4]}
    larger = {**entry, "shape": [64, 32]}
    lies = [written(header | {QUERY: each}) for each in (beyond, overlapping, larger, {**entry, "dtype": "X9"})]
    lies += [(1 << 63).to_bytes(8, "little") + whole[8:], b"\xff" * len(whole), written({QUERY: 3})]
    for lie in lies:
        path.write_bytes(lie)
        with pytest.raises(ManagerError, match=r"model\.safetensors"):
            load(llama)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"quantization_config":' * 100_000])
def test_an_invalid_config_is_reported_with_the_file(llama: Path, text: bytes) -> None:
    (llama / "config.json").write_bytes(text)
    with pytest.raises(InvalidConfig, match=r"config\.json"):
        load(llama)


def test_files_that_are_not_there_are_named(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(ManagerError, match=r"model\.safetensors: No such file"):
        load(llama)
    with pytest.raises(ManagerError, match=r"nowhere/config\.json: No such file"):
        load(llama / "nowhere")


@pytest.mark.parametrize("name", ["../llama/other.safetensors", "/etc/passwd", "a/b", ".."])
def test_an_index_names_only_files_beside_it(llama: Path, name: str) -> None:
    (llama / "model.safetensors").rename(llama / "other.safetensors")
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {QUERY: name}}))
    with pytest.raises(InvalidConfig, match="beside"):
        load(llama)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    theirs("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    missing = sorted(tmp_path.glob("*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(ManagerError, match=missing.name):
        load(tmp_path)


def test_without_the_library_the_error_names_what_to_install(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidConfig, match=r"pip install 'arl-tangram\[transformers\]'"):
        load(llama)
    with pytest.raises(InvalidConfig, match="pip install"):
        save(Transformer.new(small_config(VOCABULARY), 1), llama / "other")
