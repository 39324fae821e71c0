"""The engine for PyTorch: any module, its tensors as views into device memory.

Owns the way of a module between host memory and devices. A module is made once, in the process that prepares. Its
tensors are laid down in the host copy, and with them the module without them, pickled; on devices the two are put
together again, so no factory runs and no file is read when a service is restored. All parameters and buffers are in the
host copy, also those that a checkpoint leaves out; those that share a tensor share it again.

On several devices each tensor lies whole on one, in order. A module that runs there has to carry its activations over.
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
from tangram.managers.models.error_location import in_words

SHOWN = 500
"""Characters of what was raised because of a payload."""
MISFIT = re.compile(
    r"shape|sizes? of tensor|size mismatch|\bsizes?\b.*\bmatch|must match|dimension|\bdims?\b|\b[1-5]-?D\b|channels"
    r"|dtype|scalar type|data type|out of (?:range|bounds)",
    re.IGNORECASE,
)
"""In what PyTorch says of tensors that do not fit together. It has no exceptions of their own for them."""

Factory = str | Callable[..., Any]
"""A callable, or where one is imported from: `module:name`."""


class Meta(msgspec.Struct, frozen=True, array_like=True):
    """A tensor, without its bytes."""

    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    """All that it has in the module."""
    parameter: bool


class Placed(NamedTuple):
    """A module on devices."""

    module: list[Any]
    """One, until it is unloaded."""
    device: str
    """Where its inputs go, as PyTorch names it."""


class TorchEngine(Engine):
    """`factory(**arguments)` makes the module; `checkpoint` is a file with its state, as `torch.save` writes it.

    `forward(module, payload) -> answer` and `forward_batch(module, payloads) -> answers` speak bytes; how payloads are
    padded to a batch is theirs to know. Without either, a payload is a tensor as JSON, and so is the answer: NaN and
    infinities are written and read as Python's `json` does it.

    What these functions or the module find wrong with a payload is the fault of its caller: they raise ValueError,
    TypeError, IndexError or KeyError, or PyTorch complains of shapes and types. Anything else is a failure of the
    service.
    """

    imports: tuple[str, ...] = ("torch",)
    """What takes long to import: it is done once for all processes of devices."""

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

    # ---- what a subclass may do otherwise ----

    def build(self) -> Any:
        """The module, on the CPU."""
        import torch

        module = imported(self._factory, "factory")(**self._arguments)
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"expected a factory of modules, got {type(module).__name__} from {self._factory}")
        if self._checkpoint:
            module.load_state_dict(torch.load(self._checkpoint, map_location="cpu", weights_only=True))
        return module

    def answer(self, placed: Placed, payloads: list[bytes]) -> list[bytes]:
        [module] = placed.module
        with payloads_to_blame():
            if self._forward_batch is not None:
                answers: list[bytes] = imported(self._forward_batch)(module, payloads)
                return answers
            forward = imported(self._forward) if self._forward is not None else None
            return [forward(module, payload) if forward else _forward_json(placed, payload) for payload in payloads]

    # ---- the contract ----

    def warm(self, weights: Weights | None) -> None:
        import torch

        torch.set_num_threads(int(os.environ.get("TANGRAM_CPUS", "1")))
        if weights is not None:
            pickle.loads(weights.extra)  # imports all that the module is made of

    def prepare(self) -> Weights:
        for name, what in (("forward", self._forward), ("forward_batch", self._forward_batch)):
            if what is not None and not callable(imported(what, name)):
                raise InvalidConfig(name, what, "a function, or 'module:name' of one")
        module = self.build().eval()
        pieces, metas = _taken_apart(module)
        try:
            skeleton = pickle.dumps(module)
        except Exception as error:
            raise TypeError(
                f"a module has to be picklable, and {type(module).__name__} is not: {error}; "
                "define its classes and functions at the top of a module"
            ) from error
        encode = msgspec.msgpack.encode
        return Weights(
            [Piece(meta.names[0], piece, encode(meta)) for piece, meta in zip(pieces, metas, strict=True)], skeleton
        )

    def load(self, weights: Weights, devices: Sequence[Device]) -> Placed:
        module = pickle.loads(weights.extra)
        for block, pieces in place(weights, devices):
            flat = tensor_of(block)
            for offset, piece in offsets(pieces):
                meta = msgspec.msgpack.decode(piece.meta, type=Meta)
                _put(module, meta, flat[offset : offset + piece.content.nbytes])
        return Placed([module], devices[0].place)

    def call(self, loaded: Placed, payloads: list[bytes]) -> list[bytes]:
        import torch

        with torch.inference_mode():
            return self.answer(loaded, payloads)

    def unload(self, loaded: Placed) -> None:
        loaded.module.clear()


def imported(what: Factory, field: str = "") -> Callable[..., Any]:
    """Raises InvalidConfig if it is not there. What the module raises when it is imported is raised as it is."""
    if not isinstance(what, str):
        return what
    module, _, name = what.partition(":")
    if not module or not name:
        raise InvalidConfig(field, what, "'module:name'")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # something that the module needs
        raise InvalidConfig(field, what, f"a module that can be imported; there is no {error.name}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise InvalidConfig(field, what, f"a name in module {module}, which has no {part}")
        found = getattr(found, part)
    result: Callable[..., Any] = found
    return result


@contextlib.contextmanager
def payloads_to_blame() -> Iterator[None]:
    """What is raised inside because of a payload becomes InvalidAction, as far as that can be told."""
    expected = "what the module and its `forward` take"
    try:
        yield
    except (ValueError, TypeError, LookupError) as error:
        raise InvalidAction("payload", in_words(error, SHOWN), expected) from error
    except RuntimeError as error:
        said = str(error)
        if type(error) is not RuntimeError or "CUDA" in said or not MISFIT.search(said):
            raise
        raise InvalidAction("payload", in_words(error, SHOWN), expected) from error


def tensor_of(block: Block) -> Any:
    """The bytes of a block. Of emulated memory it is a view that keeps the memory from being freed behind its back."""
    import torch

    if isinstance(block.memory, torch.Tensor):
        return block.memory
    return torch.frombuffer(memoryview(block.memory), dtype=torch.uint8)


def bytes_of(tensor: Any) -> memoryview:
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def _taken_apart(module: Any) -> tuple[list[memoryview], list[Meta]]:
    """Its tensors, each once, and the module is left with shapes in their places."""
    import torch

    names_by_tensor: dict[int, list[str]] = {}
    tensors: dict[int, Any] = {}
    found = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in found:
        names_by_tensor.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    pieces, metas = [], []
    for key, tensor in tensors.items():
        parameter = isinstance(tensor, torch.nn.Parameter)
        dtype = str(tensor.dtype).removeprefix("torch.")
        meta = Meta(dtype, tuple(tensor.shape), tuple(names_by_tensor[key]), parameter)
        pieces.append(bytes_of(tensor))
        metas.append(meta)
        _put_tensor(module, meta, torch.empty(meta.shape, dtype=tensor.dtype, device="meta"))
    return pieces, metas


def _put(module: Any, meta: Meta, flat: Any) -> None:
    import torch

    dtype = getattr(torch, meta.dtype)
    tensor = flat.view(dtype).view(meta.shape) if flat.numel() else torch.empty(meta.shape, dtype=dtype)
    _put_tensor(module, meta, tensor)


def _put_tensor(module: Any, meta: Meta, tensor: Any) -> None:
    """Under all of its names."""
    import torch

    if meta.parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad=False)
    for name in meta.names:
        owner, _, last = name.rpartition(".")
        holder = module.get_submodule(owner)
        (holder._parameters if meta.parameter else holder._buffers)[last] = tensor


def _forward_json(placed: Placed, payload: bytes) -> bytes:
    import torch

    try:
        numbers = torch.tensor(json.loads(payload))
    except (ValueError, TypeError, RuntimeError, OverflowError, RecursionError) as error:
        raise InvalidAction("payload", str(error), "a tensor as JSON: numbers in lists of the same length") from None
    numbers = numbers.to(placed.device)
    return json.dumps(placed.module[0](numbers).tolist()).encode()
