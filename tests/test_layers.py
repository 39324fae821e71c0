"""Imports point one way, the core stays pure, and heavy packages are imported where they are used.

    errors, clock, cancellation < core < files < processes < config < managers < runtime < distributed
        < client | server | sim < rl < integrations < bench < cli

A layer may import itself and what stands left of it; layers separated by | do not import each other. `reports` needs
only `errors` and `files`, and serves every layer above. An import counts wherever it is written: inside a function or
under TYPE_CHECKING it is the same dependency.

The same holds between the packages inside a layer:

    managers    work < base | quotas < http < sandboxes | models | functions | fake < backends | doctor
    server      tenants | drain_gate < journal | observe < actions < http < components | recovery < serve
    rl          config | trajectories < environments | inference < model < rollout | buffer < runs < observe < train
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "tangram"

RANK_BY_PART = {
    "errors": 0,
    "clock": 0,
    "cancellation": 0,
    "core": 1,
    "files": 2,
    "reports": 3,
    "processes": 3,
    "config": 4,
    "managers": 5,
    "runtime": 6,
    "distributed": 7,
    "client": 8,
    "server": 8,
    "sim": 8,
    "rl": 9,
    "integrations": 10,
    "bench": 11,
    "cli": 12,
}
"""A part may import itself and every part of a lower rank."""

ALLOWED_BY_PART = {"clock": ("errors",), "reports": ("errors", "files")}
"""Parts that may import less than their rank says, or a part of their own rank."""

INNER_ORDER_BY_LAYER: dict[str, tuple[tuple[str, ...], ...]] = {
    "managers": (
        ("work",),
        ("base", "quotas"),
        ("http",),
        ("sandboxes", "models", "functions", "fake"),
        ("backends", "doctor"),
    ),
    "server": (
        ("tenants", "drain_gate"),
        ("journal", "observe"),
        ("actions",),
        ("http",),
        ("components", "recovery"),
        ("serve",),
    ),
    "rl": (
        ("config", "trajectories"),
        ("environments", "inference"),
        ("model",),
        ("rollout", "buffer"),
        ("runs",),
        ("observe",),
        ("train",),
    ),
}
"""Packages and modules of a layer, lowest first. Each may import itself and what stands before its own tuple."""

ABOVE_ALL = ("__init__", "__main__")
"""They gather the layers and may import any; no layer may import them."""

IMPURE = ("asyncio", "logging", "os", "random", "socket", "subprocess", "threading", "time")
HEAVY = ("ray", "torch", "transformers")
MADE_OF_TORCH = ("tangram.rl.model", "tangram.rl.train.trainer_child")
"""These modules are made of PyTorch, so they import it at once; their users import them where they use them."""

KEEPS_ORDER = ("enumerate", "filter", "iter", "list", "map", "tuple", "zip")
"""Builtins that hand on the order of what they are given. `sorted`, `min` or `len` of a set are fine."""


# Reading imports.


def imported_modules(node: ast.AST, module: str, *, is_package: bool) -> list[str]:
    """The absolute names that one node imports. `from a import b` gives `a.b`: b may be a module."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=source, names=names, level=level):
            package = module.split(".") if is_package else module.split(".")[:-1]
            base = package[: len(package) - level + 1] if level else []
            prefix = ".".join([*base, *([source] if source else [])])
            return [f"{prefix}.{alias.name}" for alias in names]
        case ast.Call(func=ast.Name(id="import_module" | "__import__"), args=[ast.Constant(value=str(name)), *_]):
            return [name]
        case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
            return [name]
    return []


def part_of(module: str) -> str:
    """`tangram.core.ledger` belongs to `core`; `tangram.Action` is a public name, which belongs to `__init__`."""
    name = module.split(".")[1] if "." in module else "__init__"
    return name if name in RANK_BY_PART or name in ABOVE_ALL else "__init__"


def wrong_imports(tree: ast.Module, module: str, *, is_package: bool = False) -> list[str]:
    """Imports of `tangram` that point up or sideways."""
    part = "__init__" if module == "tangram" else module.split(".")[1]
    if part in ABOVE_ALL:
        return []
    if part not in RANK_BY_PART:
        return [f"1: {part} is no layer"]
    allowed = ALLOWED_BY_PART.get(part, [other for other, rank in RANK_BY_PART.items() if rank < RANK_BY_PART[part]])
    wrong = []
    for node in ast.walk(tree):
        for name in imported_modules(node, module, is_package=is_package):
            if name.split(".")[0] != "tangram":
                continue
            target = part_of(name)
            if target in ABOVE_ALL:
                wrong.append(f"{node.lineno}: {part} imports {name} from the package; name the module that owns it")
            elif target != part and target not in allowed:
                wrong.append(f"{node.lineno}: {part} imports {name}, but {target} is not below {part}")
    return wrong


def wrong_inner_imports(tree: ast.Module, module: str, *, is_package: bool = False) -> list[str]:
    """Imports between the packages of one layer that point up or sideways in INNER_ORDER_BY_LAYER."""
    layer, part = (*module.split(".")[1:3], "", "")[:2]
    order = INNER_ORDER_BY_LAYER.get(layer)
    if order is None or not part:
        return []
    rank_by_part = {each: rank for rank, parts in enumerate(order) for each in parts}
    if part not in rank_by_part:
        return [f"1: {part} is not in the inner order of {layer}"]
    wrong = []
    for node in ast.walk(tree):
        for name in imported_modules(node, module, is_package=is_package):
            if not _within(name, f"tangram.{layer}"):
                continue
            target = (*name.split(".")[2:3], "")[0]
            if target != part and rank_by_part.get(target, len(order)) >= rank_by_part[part]:
                wrong.append(f"{node.lineno}: {layer}.{part} imports {name}, which is not below {part}")
    return wrong


def impure_imports(tree: ast.Module, module: str, *, is_package: bool = False) -> list[str]:
    """Imports that `core` must do without."""
    return [
        f"{node.lineno}: core imports {name}"
        for node in ast.walk(tree)
        for name in imported_modules(node, module, is_package=is_package)
        if name.split(".")[0] in IMPURE
    ]


def private_accesses(tree: ast.Module, module: str, *, is_package: bool = False) -> list[str]:
    """Private attributes of objects other than `self` and `cls`."""
    return [
        f"{node.lineno}: reaches into {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match("_(?!_)", node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def nodes_run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that importing the module executes: function bodies and TYPE_CHECKING blocks are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for branch in child.orelse:
                yield branch
                yield from nodes_run_at_import(branch)
            continue
        yield child
        yield from nodes_run_at_import(child)


def heavy_imports(tree: ast.Module, module: str, *, is_package: bool = False) -> list[str]:
    """Imports of optional packages that happen as soon as the module is imported."""
    if any(_within(module, each) for each in MADE_OF_TORCH):
        return []
    return [
        f"{node.lineno}: imports {name} at import time; move it into the function that uses it"
        for node in nodes_run_at_import(tree)
        for name in imported_modules(node, module, is_package=is_package)
        if name.split(".")[0] in HEAVY or any(_within(name, each) for each in MADE_OF_TORCH)
    ]


def _within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


# Reading loops.


def is_set(node: ast.AST) -> bool:
    """Whether the expression is visibly a set. A variable that holds one is not seen."""
    match node:
        case ast.Set() | ast.SetComp() | ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
        case ast.BinOp(left=left, op=ast.BitOr() | ast.BitAnd() | ast.BitXor() | ast.Sub(), right=right):
            return any(is_set(side) or is_keys(side) for side in (left, right))
    return False


def is_keys(node: ast.AST) -> bool:
    # The view itself is ordered, but what & | - ^ make of it is a set.
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "keys"


def set_iterations(tree: ast.Module, module: str, *, is_package: bool = False) -> list[str]:
    """Places that take the elements of a set in the order of their hashes, which changes from process to process."""
    violations = []
    for node in ast.walk(tree):
        match node:
            case ast.For(iter=iterated) | ast.AsyncFor(iter=iterated) | ast.comprehension(iter=iterated):
                iterables = [iterated]
            case ast.Starred(value=iterated) | ast.YieldFrom(value=iterated):
                iterables = [iterated]
            case ast.Call(func=ast.Name(id=name), args=arguments) if name in KEEPS_ORDER:
                iterables = arguments
            case _:
                continue
        violations += [
            f"{iterable.lineno}: iterates the set {ast.unparse(iterable)}; sort it or use a dict"
            for iterable in iterables
            if is_set(iterable)
        ]
    return violations


# The project itself.


@cache
def _findings_by_check() -> dict[str, list[str]]:
    """All checks in one pass, because parsing the sources takes longer than a check."""
    violations_by_check = {check.__name__: [] for check in (*CHECKS_OF_ALL, *CHECKS_OF_CORE)}
    for path in sorted(SOURCE.rglob("*.py")):
        names = path.relative_to(SOURCE.parent).with_suffix("").parts
        is_package = names[-1] == "__init__"
        module = ".".join(names[:-1] if is_package else names)
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        checks = (*CHECKS_OF_ALL, *CHECKS_OF_CORE) if path.is_relative_to(SOURCE / "core") else CHECKS_OF_ALL
        for check in checks:
            lines = check(tree, module, is_package=is_package)
            violations_by_check[check.__name__] += [f"{path.relative_to(ROOT)}:{line}" for line in lines]
    return violations_by_check


CHECKS_OF_ALL = (wrong_imports, wrong_inner_imports, heavy_imports)
CHECKS_OF_CORE = (impure_imports, set_iterations, private_accesses)


def findings(check) -> list[str]:
    """What `check` finds in the sources, each as `path:line: text`."""
    return _findings_by_check()[check.__name__]


def test_the_checks_see_the_sources() -> None:
    assert SOURCE / "errors.py" in SOURCE.rglob("*.py")
    assert SOURCE / "core" / "action.py" in SOURCE.rglob("*.py")


def test_imports_point_one_way() -> None:
    assert findings(wrong_imports) == []


def test_imports_inside_a_layer_point_one_way() -> None:
    assert findings(wrong_inner_imports) == []


def test_the_inner_order_names_existing_modules() -> None:
    for layer, order in INNER_ORDER_BY_LAYER.items():
        parts = [part for parts in order for part in parts]
        modules = {path.stem for path in (SOURCE / layer).glob("*.py")} | {
            path.parent.name for path in (SOURCE / layer).glob("*/__init__.py")
        }
        assert sorted(parts) == sorted(modules - {"__init__"})


def test_core_imports_neither_time_nor_the_outside_world() -> None:
    assert findings(impure_imports) == []


def test_no_part_of_the_core_reaches_into_the_privates_of_another() -> None:
    assert findings(private_accesses) == []


def test_core_iterates_no_set() -> None:
    assert findings(set_iterations) == []


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    assert findings(heavy_imports) == []


# The checks on small sources, so that each of them is known to be able to fail.


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tangram.core.ledger", "from tangram.managers.base import Lease"),
        ("tangram.core.ledger", "import tangram.config"),
        ("tangram.core.ledger", "from ..managers import base"),
        ("tangram.core.ledger", "from .. import managers"),
        ("tangram.core.ledger", "def late():\n    from tangram.sim import engine"),
        ("tangram.core.ledger", "if TYPE_CHECKING:\n    from tangram.server.http import middleware"),
        ("tangram.core.ledger", "import importlib\nimportlib.import_module('tangram.cli')"),
        ("tangram.errors", "from tangram.core import action"),
        ("tangram.sim.engine", "from tangram.server.journal import journal"),
        ("tangram.server.http.middleware", "import tangram.sim.engine"),
        ("tangram.client.client", "from tangram.server.journal import journal"),
        ("tangram.distributed.agent", "from tangram.rl.train import pipeline"),
        ("tangram.processes.child", "from tangram.managers.work import Work"),
        ("tangram.reports.page", "from tangram.core.demand import Demand"),
        ("tangram.server.http.middleware", "from tangram.client import client"),
        ("tangram.bench.arrange", "from tangram import cli"),
        ("tangram.managers.fake", "from tangram import Action"),
        ("tangram.managers.fake", "import tangram"),
        ("tangram.managers.fake", "from .. import Action"),
        ("tangram.utils", "x = 1"),
    ],
)
def test_an_import_that_points_up_or_sideways_is_detected(module: str, source: str) -> None:
    assert len(wrong_imports(ast.parse(source), module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tangram.clock", "from tangram.errors import InvariantError"),
        ("tangram.core.ledger", "from tangram.core.demand import Demand\nfrom . import topology"),
        ("tangram.core.ledger", "import msgspec\nfrom tangram import errors"),
        ("tangram.config", "from tangram.core.demand import Demand"),
        ("tangram.sim.engine", "from tangram.managers.fake import FakeManager"),
        ("tangram.client.client", "from tangram.runtime import orchestrator"),
        ("tangram.reports.page", "from tangram.files.atomic_file import atomic_write"),
        ("tangram.rl.train.loop", "from tangram.server.observe import history"),
        ("tangram.cli.bench", "from ..bench import arrange"),
        ("tangram", "from tangram.client.client import connect"),
        ("tangram.__main__", "from tangram.cli import main"),
    ],
)
def test_an_import_that_points_down_is_allowed(module: str, source: str) -> None:
    assert wrong_imports(ast.parse(source), module) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tangram.rl.buffer.sample_buffer", "from tangram.rl.train.loop import Loop"),
        ("tangram.rl.buffer.sample_buffer", "from tangram.rl import train"),
        ("tangram.rl.buffer.sample_buffer", "from ..train import loop"),
        ("tangram.rl.rollout.rollout", "def late():\n    from tangram.rl.buffer import sample_buffer"),
        ("tangram.rl.rollout.rollout", "if TYPE_CHECKING:\n    from tangram.rl.observe.timeline import Timeline"),
        ("tangram.managers.base", "from tangram.managers.sandboxes.leases import Lease"),
        ("tangram.server.journal.adapter", "from tangram.server.actions.service import ActionService"),
        ("tangram.managers.unknown", "x = 1"),
    ],
)
def test_an_import_inside_a_layer_that_points_up_or_sideways_is_found(module: str, source: str) -> None:
    assert len(wrong_inner_imports(ast.parse(source), module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tangram.rl.train.loop", "from tangram.rl.buffer.sample_buffer import SampleBuffer"),
        ("tangram.rl.train.loop", "from . import watchdog\nfrom tangram.client import client"),
        ("tangram.managers.http", "from tangram.managers.quotas.adaptive_rate import TOO_MANY"),
        ("tangram.core.ledger", "from tangram.core.demand import Demand"),
        ("tangram.rl", "from tangram.rl.train.loop import Loop"),
    ],
)
def test_an_import_inside_a_layer_that_points_down_is_allowed(module: str, source: str) -> None:
    assert wrong_inner_imports(ast.parse(source), module) == []


def test_a_relative_import_in_a_package_file_starts_at_that_package() -> None:
    tree = ast.parse("from .base import Policy\nfrom ...sim import engine")
    assert wrong_imports(tree, "tangram.core.policies", is_package=True) == [
        "2: core imports tangram.sim.engine, but sim is not below core"
    ]


@pytest.mark.parametrize("package", IMPURE)
def test_an_impure_import_is_detected(package: str) -> None:
    for source in (f"import {package}", f"from {package} import anything", f"def late():\n    import {package}.sub"):
        assert len(impure_imports(ast.parse(source), "tangram.core.ledger")) == 1


def test_modules_that_only_sound_impure_are_allowed() -> None:
    source = "import math, operator\nfrom tangram.core import time_limits\nfrom . import random_draws"
    assert impure_imports(ast.parse(source), "tangram.core.ledger") == []


@pytest.mark.parametrize(
    "source",
    [
        "for x in set(names): pass",
        "for x in frozenset(names): pass",
        "for x in {1, 2}: pass",
        "for x in {y for y in names}: pass",
        "[x for x in set(names)]",
        "{x: 1 for x in {1, 2}}",
        "any(x for x in set(names))",
        "for x in set(a) - set(b): pass",
        "for x in a.keys() & b.keys(): pass",
        "for i, x in enumerate(set(names)): pass",
        "first = list({1, 2})[0]",
        "[*set(names)]",
    ],
)
def test_iterating_a_set_is_detected(source: str) -> None:
    assert len(set_iterations(ast.parse(source), "tangram.core.ledger")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "for x in sorted(set(names)): pass",
        "for x in dict.fromkeys(names): pass",
        "for x in grants.keys(): pass",
        "for x in range(total - held): pass",
        "seen = {y for y in names}",
        "count = len(set(names))",
        "if x in {1, 2}: pass",
    ],
)
def test_using_a_set_without_its_order_is_allowed(source: str) -> None:
    assert set_iterations(ast.parse(source), "tangram.core.ledger") == []


def test_an_access_to_a_private_attribute_is_found() -> None:
    source = "class Explainer:\n    def explain(self, scheduler):\n        return self._queue, scheduler._queue"
    assert private_accesses(ast.parse(source), "tangram.core.explain") == ["3: reaches into scheduler._queue"]


@pytest.mark.parametrize("package", HEAVY)
@pytest.mark.parametrize(
    "source",
    [
        "import {}",
        "import {}.nn as nn",
        "from {} import anything",
        "try:\n    import {}\nexcept ImportError:\n    pass",
        "class Engine:\n    import {}",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import {}",
    ],
)
def test_a_heavy_import_at_import_time_is_detected(source: str, package: str) -> None:
    assert len(heavy_imports(ast.parse(source.format(package)), "tangram.managers.models")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "def load():\n    import torch",
        "class Engine:\n    async def load(self):\n        from transformers import AutoModel",
        "if TYPE_CHECKING:\n    import torch",
        "import torchless",
    ],
)
def test_a_heavy_import_where_it_is_used_is_allowed(source: str) -> None:
    assert heavy_imports(ast.parse(source), "tangram.managers.models") == []


def test_what_is_made_of_torch_imports_it_at_once_and_is_itself_heavy() -> None:
    assert heavy_imports(ast.parse("import torch"), "tangram.rl.model.transformer") == []
    late = "def load():\n    from tangram.rl.model.transformer import Transformer"
    assert heavy_imports(ast.parse(late), "tangram.rl.inference.engines.process") == []
    early = "from tangram.rl.model.transformer import Transformer"
    assert len(heavy_imports(ast.parse(early), "tangram.rl.inference.engines.process")) == 1
