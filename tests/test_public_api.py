"""The public names of the package: sorted, complete, and cheap to import."""

from __future__ import annotations

import ast
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest

import tangram

HEAVY = ("numpy", "ray", "rich", "torch", "transformers", "typer")
"""Packages that a program which only wants to submit an action should not have to wait for."""


def test_all_is_sorted_and_names_nothing_twice() -> None:
    assert list(tangram.__all__) == sorted(set(tangram.__all__))


def test_every_name_in_all_resolves() -> None:
    missing = [name for name in tangram.__all__ if not hasattr(tangram, name)]
    assert missing == []


def test_a_name_is_the_one_that_type_checkers_see() -> None:
    """They read the imports under TYPE_CHECKING; at run time a table says where a name is."""
    tree = ast.parse(Path(tangram.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    module_by_name = {
        alias.name: node.module for node in imports for alias in node.names if str(node.module).startswith("tangram.")
    }
    for name, module in module_by_name.items():
        assert getattr(tangram, name) is getattr(import_module(module), name)
    assert sorted(module_by_name) == list(tangram.__all__)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tangram' has no attribute 'nothing'"):
        _ = tangram.nothing


def test_nothing_else_is_public_but_submodules() -> None:
    def is_submodule(name: str) -> bool:
        member = getattr(tangram, name)
        return isinstance(member, types.ModuleType) and member.__name__ == f"tangram.{name}"

    public = [name for name in dir(tangram) if not name.startswith("_")]
    stray = [name for name in public if name not in tangram.__all__ and not is_submodule(name)]
    assert stray == []


def test_import_is_light() -> None:
    # In a process of its own: here the test runner may have imported anything.
    program = f"import sys; from tangram import *; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
