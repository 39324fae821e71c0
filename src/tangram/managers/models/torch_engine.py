"""The engine for PyTorch: any module, its tensors as views into device memory.

Owns the transfer of a module from host memory to devices. A module is built once, in the process that prepares. The
host copy holds its tensors and the pickled module without them; loading joins the two, so a restore runs no factory and
reads no file. All parameters and buffers are in the host copy, also those that a checkpoint omits; names that share a
tensor still share it.

On several devices each tensor is on one of them, in order. Such a module must move its activations between devices
itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from tangram.errors import InvalidAction, InvalidConfig
from tangram.managers.models.devices import Block, Device
from tangram.managers.models.engine import Engine, Piece, Weights, offsets, place
from tangram.managers.models.error_location import describe_error

SHOWN_CHARACTERS_MAX = 500
"""Characters of an error that a payload caused."""
MISMATCH_MESSAGE = re.compile(
    r"shape|sizes? of tensor|size mismatch|\bsizes?\b.*\bmatch|must match|dimension|\bdims?\b|\b[1-5]-?D\b|channels"
    r"|dtype|scalar type|data type|out of (?:range|bounds)",
    re.IGNORECASE,
)
"""Parts of the messages of PyTorch about mismatched tensors, for which it has no exception type."""

Factory = str | Callable[..., Any]
"""A callable, or `module:name` of one."""


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    """All names of the tensor in the module."""
    parameter: bool


class PlacedModule(NamedTuple):
    module: list[Any]
    """A single module; empty after it was unloaded."""
    device: str
    """The PyTorch device of its inputs."""


class TorchEngine(Engine):
    """`factory(**arguments)` builds the module; `checkpoint` is a file with its state, as `torch.save` writes it.

    `forward(module, payload) -> answer` and `forward_batch(module, payloads) -> answers` take and return bytes, and do
    their own padding. Without either, payload and answer are a tensor as JSON, with NaN and infinities as in Python's
    `json`.

    ValueError, TypeError, IndexError, KeyError and errors of PyTorch about shapes and types, raised by these functions
    or the module, are errors of the payload. Anything else is a failure of the service.
    """

    imports: tuple[str, ...] = ("torch",)
    """Slow imports, done once for all processes of devices, by the fork server."""

    def __init__(
        self,
        factory: Factory,
        arguments: dict[str, Any] | None = None,
        *,
        checkpoint: str = "",
        forward: Factory | None = None,
        forward_batch: Factory | None = None,
        batch_max: int = 32,
    ) -> None:
        self.batch_max = batch_max if forward_batch is not None else 1
        self._factory = factory
        self._arguments = arguments or {}
        self._checkpoint = checkpoint
        self._forward = forward
        self._forward_batch = forward_batch

    # ---- for subclasses ----

    def build(self) -> Any:
        """The module, on the CPU."""
        import torch

        module = imported(self._factory, "factory")(**self._arguments)
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"expected a factory of modules, got {type(module).__name__} from {self._factory}")
        if self._checkpoint:
            module.load_state_dict(torch.load(self._checkpoint, map_location="cpu", weights_only=True))
        return module

    def answer(self, placed: PlacedModule, payloads: list[bytes]) -> list[bytes]:
        [module] = placed.module
        with payload_errors():
            if self._forward_batch is not None:
                answers: list[bytes] = imported(self._forward_batch)(module, payloads)
                return answers
            forward = imported(self._forward) if self._forward is not None else None
            return [forward(module, payload) if forward else _forward_json(placed, payload) for payload in payloads]

    # ---- the interface of an engine ----

    def warm(self, weights: Weights | None) -> None:
        import torch

        torch.set_num_threads(int(os.environ.get("TANGRAM_CPUS", "1")))
        if weights is not None:
            pickle.loads(weights.extra)  # imports the modules of its classes

    def prepare(self) -> Weights:
        for name, what in (("forward", self._forward), ("forward_batch", self._forward_batch)):
            if what is not None and not callable(imported(what, name)):
                raise InvalidConfig(name, what, "a function, or 'module:name' of one")
        module = self.build().eval()
        pieces, metas = _extract_tensors(module)
        try:
            skeleton = pickle.dumps(module)
        except Exception as error:
            raise TypeError(
                f"expected a picklable module, and {type(module).__name__} is not: {error}; "
                "define its classes and functions at the top of a module"
            ) from error
        encode = msgspec.msgpack.encode
        return Weights(
            [Piece(meta.names[0], piece, encode(meta)) for piece, meta in zip(pieces, metas, strict=True)], skeleton
        )

    def load(self, weights: Weights, devices: Sequence[Device]) -> PlacedModule:
        module = pickle.loads(weights.extra)
        for block, pieces in place(weights, devices):
            flat = tensor_of(block)
            for offset, piece in offsets(pieces):
                meta = msgspec.msgpack.decode(piece.meta, type=TensorMeta)
                _restore_tensor(module, meta, flat[offset : offset + piece.content.nbytes])
        return PlacedModule([module], devices[0].place)

    def call(self, loaded: PlacedModule, payloads: list[bytes]) -> list[bytes]:
        import torch

        with torch.inference_mode():
            return self.answer(loaded, payloads)

    def unload(self, loaded: PlacedModule) -> None:
        loaded.module.clear()


def imported(what: Factory, field: str = "") -> Callable[..., Any]:
    """The callable that `module:name` names. Raises InvalidConfig if there is none, and what importing raises."""
    if not isinstance(what, str):
        return what
    module, _, name = what.partition(":")
    if not module or not name:
        raise InvalidConfig(field, what, "'module:name'")
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a dependency of the module is missing
        raise InvalidConfig(field, what, f"a module that can be imported; there is no {error.name}") from None
    for part in name.split("."):
        if not hasattr(value, part):
            raise InvalidConfig(field, what, f"a name in module {module}, which has no {part}")
        value = getattr(value, part)
    result: Callable[..., Any] = value
    return result


@contextlib.contextmanager
def payload_errors() -> Iterator[None]:
    """Convert exceptions that a payload probably caused into InvalidAction."""
    expected = "a payload that the module and its `forward` accept"
    try:
        yield
    except (ValueError, TypeError, LookupError) as error:
        raise InvalidAction("payload", describe_error(error, SHOWN_CHARACTERS_MAX), expected) from error
    except RuntimeError as error:
        message = str(error)
        if type(error) is not RuntimeError or "CUDA" in message or not MISMATCH_MESSAGE.search(message):
            raise
        raise InvalidAction("payload", describe_error(error, SHOWN_CHARACTERS_MAX), expected) from error


def tensor_of(block: Block) -> Any:
    """The bytes of a block. For emulated memory it is a view, which keeps the memory from being freed while in use."""
    import torch

    if isinstance(block.memory, torch.Tensor):
        return block.memory
    return torch.frombuffer(memoryview(block.memory), dtype=torch.uint8)


def bytes_of(tensor: Any) -> memoryview:
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def _extract_tensors(module: Any) -> tuple[list[memoryview], list[TensorMeta]]:
    """Remove the tensors from a module, each once, and leave tensors of the `meta` device in their places."""
    import torch

    names_by_tensor: dict[int, list[str]] = {}
    tensors: dict[int, Any] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        names_by_tensor.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    pieces, metas = [], []
    for key, tensor in tensors.items():
        parameter = isinstance(tensor, torch.nn.Parameter)
        dtype = str(tensor.dtype).removeprefix("torch.")
        meta = TensorMeta(dtype, tuple(tensor.shape), tuple(names_by_tensor[key]), parameter)
        pieces.append(bytes_of(tensor))
        metas.append(meta)
        _set_tensor(module, meta, torch.empty(meta.shape, dtype=tensor.dtype, device="meta"))
    return pieces, metas


def _restore_tensor(module: Any, meta: TensorMeta, flat: Any) -> None:
    import torch

    dtype = getattr(torch, meta.dtype)
    tensor = flat.view(dtype).view(meta.shape) if flat.numel() else torch.empty(meta.shape, dtype=dtype)
    _set_tensor(module, meta, tensor)


def _set_tensor(module: Any, meta: TensorMeta, tensor: Any) -> None:
    import torch

    if meta.parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad=False)
    for name in meta.names:
        owner, _, last = name.rpartition(".")
        holder = module.get_submodule(owner)
        (holder._parameters if meta.parameter else holder._buffers)[last] = tensor


def _forward_json(placed: PlacedModule, payload: bytes) -> bytes:
    import torch

    try:
        numbers = torch.tensor(json.loads(payload))
    except (ValueError, TypeError, RuntimeError, OverflowError, RecursionError) as error:
        raise InvalidAction("payload", str(error), "a tensor as JSON: numbers in lists of the same length") from None
    numbers = numbers.to(placed.device)
    return json.dumps(placed.module[0](numbers).tolist()).encode()
